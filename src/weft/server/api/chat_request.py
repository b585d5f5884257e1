"""The body of a chat completion: its fields, their words for the OpenAPI document, and their checks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from weft.request import MAX_LOGPROBS, MAX_TOKENS
from weft.server.api.field_docs import Field
from weft.server.api.file_search import FileSearch
from weft.server.api.schema import MAX_ENTRIES, GenerationRequest, check_entries
from weft.server.errors import refusal
from weft.text.conversation import EFFORTS

VERBOSITIES = ("low", "medium", "high")


class ChatRequest(GenerationRequest, frozen=True, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    reasoning_effort: str | None = None
    prediction: dict[str, Any] | None = None
    verbosity: str | None = None
    modalities: list[str] | None = None


class LoadedChat(ChatRequest, frozen=True, kw_only=True):
    """A request that searches files. `load` makes it; a body is never decoded into this type."""

    search: FileSearch


CHAT_FIELDS: Mapping[str, Field] = {
    "max_completion_tokens": Field("The newer name of max_tokens.", 1, MAX_TOKENS),
    "top_logprobs": Field(
        "For each token, also return the logprobs of this many most likely tokens. Needs logprobs.",
        0,
        MAX_LOGPROBS,
    ),
    "tools": Field(
        "Tools of the types function (a name, a description and a JSON schema of its parameters), custom (its input "
        f"is a text, which may have a grammar) and file_search (an extension); at most {MAX_ENTRIES['tools']}."
    ),
    "tool_choice": Field("auto, none, required, or an object that names the tool to call."),
    "reasoning_effort": Field(
        f"How much the model thinks: {', '.join(EFFORTS)}. none and minimal turn thoughts off, others on, if the "
        "chat template has a switch. Templates with levels get the level."
    ),
    "prediction": Field(
        'Text that the answer probably has: {"type": "content", "content": a text or a list of text parts}. It '
        "makes an answer faster that repeats it, and never changes the answer."
    ),
    "verbosity": Field("low, medium or high. Accepted, without effect."),
    "modalities": Field('Only ["text"].'),
    "parallel_tool_calls": Field("Whether an answer may have several tool calls."),
    "documents": Field(f"Documents for chat templates that use them; at most {MAX_ENTRIES['documents']}."),
}


def sampling_of(api_request: ChatRequest) -> dict[str, Any]:
    """The values of max_tokens and logprobs. In a chat, two fields determine each of them."""
    given: dict[str, Any] = {}
    if api_request.max_completion_tokens is not None:
        if api_request.max_tokens not in (None, api_request.max_completion_tokens):
            raise refusal(
                f"max_tokens is {api_request.max_tokens} and max_completion_tokens is "
                f"{api_request.max_completion_tokens}; send one of them",
                "max_completion_tokens",
            )
        given["max_tokens"] = api_request.max_completion_tokens
    if api_request.logprobs:
        given["logprobs"] = api_request.top_logprobs or 0
    elif api_request.top_logprobs:
        raise refusal("top_logprobs needs logprobs; send logprobs: true too", "top_logprobs")
    return given


def check_words(api_request: ChatRequest) -> None:
    """Raises ApiError if a field that accepts only certain words has another value."""
    for name, given, allowed in (
        ("reasoning_effort", api_request.reasoning_effort, EFFORTS),
        ("verbosity", api_request.verbosity, VERBOSITIES),
        *(("modalities", one, ("text",)) for one in api_request.modalities or ()),
    ):
        if given is not None and given not in allowed:
            raise refusal(f"{name} is {given!r:.80}; allowed: {', '.join(allowed)}", name)


def predicted_text(prediction: dict[str, Any] | None) -> str:
    """The text of the field `prediction`. Raises ApiError if the field has another form."""
    if prediction is None:
        return ""
    kind, content = prediction.get("type"), prediction.get("content")
    if kind != "content":
        raise refusal(f"prediction.type is {kind!r:.80}; allowed: content", "prediction")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [None]
    check_entries("prediction.content", parts, "content", "prediction")
    found = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    texts = [text for text in found if isinstance(text, str)]
    if len(texts) < len(parts):
        raise refusal("prediction.content is not a text; send a string or a list of text parts", "prediction")
    return "".join(texts)
