"""What each field of a request means and which numbers it takes, in words for the OpenAPI document.

Types are in `schema`, and values are checked in `weft.request`, where the engine needs them right; a test holds that
the ranges told here are those. A field that is not described here is a failing test.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
)
from weft.server.api.schema import MAX_ENTRIES


@dataclass(frozen=True)
class Field:
    """`above` is a minimum that is itself too low."""

    description: str
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None


FIELDS: Mapping[str, Field] = {
    # generating
    "model": Field(
        "The model that shall answer, by a name that /v1/models tells; left out: the one there is."
    ),
    "messages": Field(
        f"The conversation so far, the oldest first; at most {MAX_ENTRIES['messages']} messages."
    ),
    "prompt": Field(
        "Text to continue, or its token ids; a list of either is several prompts. To /tokenize: the text to split."
    ),
    "stream": Field("Send the answer as server-sent events while it is made, ended by `data: [DONE]`."),
    "stream_options": Field("What a stream tells besides the answer."),
    "include_usage": Field("One more event, before the end, with the tokens that were used."),
    "n": Field("Answers to each prompt, each with a seed of its own.", 1, MAX_N),
    "max_tokens": Field(
        "Most new tokens. A chat's default is what the context has room for, a completion's 16.",
        1,
        MAX_TOKENS,
    ),
    "max_completion_tokens": Field("The newer name of max_tokens.", 1, MAX_TOKENS),
    "min_tokens": Field(
        "No end before so many new tokens, unless the form of the answer leaves nothing else.", 0, MAX_TOKENS
    ),
    "temperature": Field(
        "Randomness of the choice of tokens; 0 always takes the best. Default: what the model's makers suggest, else 1.",
        0,
        100,
    ),
    "top_p": Field(
        "Choose among the likeliest tokens that together have this probability.", None, 1, above=0
    ),
    "top_k": Field("Choose among so many of the likeliest tokens; 0 or -1: all.", -1, 2**31 - 1),
    "min_p": Field("Leave out tokens less likely than this share of the likeliest one.", 0, 1),
    "typical_p": Field(
        "Choose among the most typical tokens that together have this probability.", None, 1, above=0
    ),
    "repetition_penalty": Field(
        "Above 1: tokens of prompt and answer become less likely.", None, 100, above=0
    ),
    "frequency_penalty": Field("Taken off a token's logit for each time it was generated.", -2, 2),
    "presence_penalty": Field("Taken off the logit of each token that was generated.", -2, 2),
    "logit_bias": Field(
        f"Token ids, each with what is added to its logit, -100 to 100; at most {MAX_LOGIT_BIAS} of them."
    ),
    "seed": Field("The same seed gives the same answer.", -(2**63), MAX_SEED),
    "stop": Field(
        f"End the answer before this text, or one of these: at most {MAX_STOP_STRINGS}, of 1 to {MAX_STOP_LENGTH} characters."
    ),
    "stop_token_ids": Field(f"End the answer at one of these tokens: at most {MAX_STOP_TOKENS}."),
    "ignore_eos": Field("Go on past the token with which the model ends an answer."),
    "logprobs": Field(
        f"In a chat, whether to tell the logprob of each token of the answer; in a completion, how many of the likeliest "
        f"tokens to tell beside it, 0 to {MAX_LOGPROBS}."
    ),
    "top_logprobs": Field(
        "How many of the likeliest tokens to tell beside each; needs logprobs.", 0, MAX_LOGPROBS
    ),
    "echo": Field("Repeat the prompt before its answer."),
    "suffix": Field("Not supported: weft continues a prompt only."),
    "best_of": Field("Taken where it is the same as n; every answer is given."),
    # weft's own
    "priority": Field(
        "low, normal, high or critical, or its number: who goes first where not all can.", 0, 3
    ),
    "deadline": Field("Seconds after which the request ends with an error, wherever it is.", 0, MAX_SECONDS),
    "ttft_target": Field(
        "Seconds to the first token that are hoped for; orders the queue and prompts under way.",
        0,
        MAX_SECONDS,
    ),
    "cache_salt": Field(
        f"Requests with different salts never share cached prompts; at most {MAX_NAME_LENGTH} characters."
    ),
    "session_id": Field(
        "A conversation's name: between its turns its cached prompt is kept longer; "
        f"at most {MAX_NAME_LENGTH} characters."
    ),
    # what an answer has to look like
    "response_format": Field(
        "The form that the answer has to have, by its `type`: text, json_object, json_schema, and weft's regex, choice and grammar. "
        'Objects have the properties that their schema names and no others, unless it says `"additionalProperties": true`.'
    ),
    "guided_json": Field("vLLM's name for a JSON schema that the answer has to fit."),
    "guided_regex": Field("vLLM's name for a regular expression that the answer has to fit."),
    "guided_choice": Field("vLLM's name for the texts of which the answer is one."),
    "guided_grammar": Field("vLLM's name for a grammar that the answer has to fit."),
    "structured_outputs": Field("vLLM's newer form of the same: json, regex, choice or grammar."),
    "grammar": Field("llama.cpp's name for a grammar that the answer has to fit."),
    "json_schema": Field("llama.cpp's name for a JSON schema that the answer has to fit."),
    # tools and templates
    "tools": Field(
        "Functions that the model may call, each with a name, a description and a schema of its parameters; "
        f"at most {MAX_ENTRIES['tools']}."
    ),
    "tool_choice": Field("auto, none, required, or the one function that has to be called."),
    "parallel_tool_calls": Field("Whether one answer may hold several calls."),
    "documents": Field(f"Documents for templates that take some; at most {MAX_ENTRIES['documents']}."),
    "chat_template_kwargs": Field(
        f"The template's own options, such as enable_thinking; at most {MAX_ENTRIES['chat_template_kwargs']}."
    ),
    "add_special_tokens": Field("Whether the tokenizer adds its own, such as one for the beginning."),
    "add_generation_prompt": Field("Whether the template opens the assistant's turn."),
    "continue_final_message": Field("Continue the last message instead of beginning a new one."),
    # without effect
    "user": Field("Who asks; taken, without effect."),
    "metadata": Field(f"Taken, without effect; at most {MAX_ENTRIES['metadata']} entries."),
    "store": Field("Taken, without effect: nothing is stored."),
    "service_tier": Field("Taken, without effect."),
    "safety_identifier": Field("Taken, without effect."),
    "prompt_cache_key": Field("Taken, without effect: prefixes are found by themselves."),
    # text
    "tokens": Field("Token ids."),
}
