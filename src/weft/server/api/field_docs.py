"""Descriptions and ranges of the fields of requests, for the OpenAPI document. A field that only one API format has is
in the file of that format.

`schema` has the types, and `weft.request` checks the values. Tests fail if a range here differs from the checked one,
or if a field has no description.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weft.request import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_NAME_LENGTH,
    MAX_SECONDS,
    MAX_SEED,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    MAX_TOKENS,
    PARAMETERS,
)
from weft.server.api.schema import MAX_ENTRIES


@dataclass(frozen=True)
class Field:
    """The description and the range of one field. `above` is an exclusive minimum."""

    description: str
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    schema: Mapping[str, Any] | None = None
    """Replaces the schema that is made from the type of the field."""


FIELDS: Mapping[str, Field] = {
    # fields for generating
    "model": Field("Name of the model, as listed by /v1/models. Default: the model of the server."),
    "messages": Field(
        f"The messages of the conversation, oldest first; at most {MAX_ENTRIES['messages']}.",
        schema={"type": "array", "items": {"$ref": "#/components/schemas/Message"}, "minItems": 1},
    ),
    "prompt": Field(
        "Text to continue, or a list of token ids. A list of texts or of such lists is several prompts. "
        "For /tokenize: the text to tokenise."
    ),
    "stream": Field(
        "Send the answer as server-sent events while it is generated. The last event is `data: [DONE]`."
    ),
    "stream_options": Field("Options for streams."),
    "include_usage": Field("Send an event with the token usage before the end of the stream."),
    "n": Field("Number of answers to each prompt. Each answer has its own seed.", 1, MAX_N),
    "max_tokens": Field(
        "Maximum number of generated tokens. Default: for a chat, the rest of the context; for a completion, 16.",
        1,
        MAX_TOKENS,
    ),
    "min_tokens": Field(
        "Minimum number of generated tokens. A grammar can end the answer earlier.", 0, MAX_TOKENS
    ),
    **{
        name: Field(each.words, None if each.above else each.low, each.high, each.low if each.above else None)
        for name, each in PARAMETERS.items()
    },
    "logit_bias": Field(
        f"A map from token ids to values that are added to their logits, -100 to 100; at most {MAX_LOGIT_BIAS} entries."
    ),
    "seed": Field(
        "Seed for sampling. The same request with the same seed gets the same answer.", -(2**63), MAX_SEED
    ),
    "stop": Field(
        f"One or more stop strings. The answer ends before the first one. At most {MAX_STOP_STRINGS}, of 1 to "
        f"{MAX_STOP_LENGTH} characters each."
    ),
    "stop_token_ids": Field(f"Token ids that end the answer; at most {MAX_STOP_TOKENS}."),
    "ignore_eos": Field("Continue after the end-of-sequence token of the model."),
    "logprobs": Field(
        f"Chat: true returns the logprob of each generated token. Completion: a number, 0 to {MAX_LOGPROBS}; returns also "
        "the logprobs of this many most likely tokens."
    ),
    # fields that are extensions of weft
    "priority": Field(
        "low, normal, high or critical, or its number, 0 to 3. Higher priorities are scheduled first.", 0, 3
    ),
    "deadline": Field(
        "Seconds after which the request ends with an error, queued or running.", 0, MAX_SECONDS
    ),
    "ttft_target": Field(
        "Target for the time to the first token, in seconds. It affects the order of the queue and of prefills.",
        0,
        MAX_SECONDS,
    ),
    "cache_salt": Field(
        f"Requests with different salts never share cached prefixes; at most {MAX_NAME_LENGTH} characters."
    ),
    "session_id": Field(
        "Id of a conversation. Its cached prefixes are evicted last, so that its next request finds them; "
        f"at most {MAX_NAME_LENGTH} characters."
    ),
    # fields for structured output
    "response_format": Field(
        "The format of the answer, by its `type`: text, json_object, json_schema, and as extensions of weft regex, choice "
        "and grammar. Objects have only the properties that their schema names, unless it contains "
        '`"additionalProperties": true`.'
    ),
    "guided_json": Field("A JSON schema that the answer must follow (vLLM)."),
    "guided_regex": Field("A regular expression that the answer must match (vLLM)."),
    "guided_choice": Field("A list of texts, one of which is the answer (vLLM)."),
    "guided_grammar": Field("A grammar that the answer must follow (vLLM)."),
    "structured_outputs": Field(
        "One of json, json_object, regex, choice and grammar (newer versions of vLLM)."
    ),
    "grammar": Field("A grammar that the answer must follow (llama.cpp)."),
    "json_schema": Field("A JSON schema that the answer must follow (llama.cpp)."),
    # fields for tools and chat templates
    "tools": Field(
        "Functions that the model may call, each with a name, a description and a JSON schema of its parameters; "
        f"at most {MAX_ENTRIES['tools']}."
    ),
    "chat_template_kwargs": Field(
        f"Options of the chat template, such as enable_thinking; at most {MAX_ENTRIES['chat_template_kwargs']}."
    ),
    "add_special_tokens": Field("Whether to add the special tokens of the tokenizer, such as BOS."),
    "add_generation_prompt": Field("Whether the prompt ends with the start of an assistant message."),
    "continue_final_message": Field("Continue the last message instead of starting a new one."),
    # fields without effect
    "user": Field("Accepted, without effect."),
    "metadata": Field(f"Accepted, without effect; at most {MAX_ENTRIES['metadata']} entries."),
    "store": Field("Accepted, without effect: nothing is stored."),
    "service_tier": Field("Accepted, without effect."),
    "safety_identifier": Field("Accepted, without effect."),
    "prompt_cache_retention": Field("Accepted, without effect."),
    "prompt_cache_key": Field("Read as session_id, if that is missing."),
    # fields for text work, such as /tokenize
    "tokens": Field("Token ids."),
}
