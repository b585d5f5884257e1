"""The request types: fields of the OpenAI API and extensions of weft, and the parsing of a body.

Types and lengths are checked here; `SamplingParams` and `InferenceRequest` check ranges.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from weft.request import (
    MAX_LOGIT_BIAS,
    MAX_METADATA,
    MAX_NAME_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    PARAMETERS,
)
from weft.server.errors import ApiError, refusal

MAX_ENTRIES = {
    "messages": 8192,
    "input": 8192,
    "include": 64,
    "client_metadata": MAX_METADATA,
    "content": 1024,
    "output": 1024,
    "summary": 1024,
    "tool_calls": 1024,
    "images": 1024,
    "modalities": 64,
    "system": 1024,
    "tools": 128,
    "allowed_tools": 1024,
    "documents": 1024,
    "chat_template_kwargs": 64,
    "metadata": MAX_METADATA,
    "stop": MAX_STOP_STRINGS,
    "stop_sequences": MAX_STOP_STRINGS,
    "stop_token_ids": MAX_STOP_TOKENS,
    "logit_bias": MAX_LOGIT_BIAS,
}
"""Limits for lists and mappings, checked before their entries are processed. They also hold for the lists of each
message, item and tool. Other lists have limits of their own: prompts (`max_answers`), token ids (the context), schemas
and choices (`MAX_GRAMMAR_LENGTH`)."""
MAX_CHARACTERS = {
    "session_id": MAX_NAME_LENGTH,
    "cache_salt": MAX_NAME_LENGTH,
    "previous_response_id": MAX_NAME_LENGTH,
}


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


class _FirstFields(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None


if TYPE_CHECKING:
    # Type checkers do not see the other fields: code reads them by their names in PARAMETERS.
    _SamplingFields = _FirstFields
else:
    _SamplingFields = msgspec.defstruct(
        "_SamplingFields",
        [(name, each.kind | None, None) for name, each in PARAMETERS.items()],
        bases=(_FirstFields,),
        frozen=True,
        kw_only=True,
    )


class GenerationRequest(_SamplingFields, frozen=True, kw_only=True):
    """Fields of all formats of the OpenAI API. A null means the default, and is removed before the conversion.

    The base class adds the sampling parameters. Its first fields come first in the OpenAPI document."""

    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    priority: int | str = 1
    """The number or the name of a `Priority`."""
    deadline: float | None = None
    ttft_target: float | None = None
    cache_salt: str = ""
    learn_prompt: bool = False
    session_id: str | None = None
    # Structured output: the field of OpenAI, then the fields of vLLM and llama.cpp.
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    # Accepted without effect.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_key: str | None = None
    """Read as `session_id`, if that is missing."""


class TokenizeRequest(msgspec.Struct, frozen=True):
    """Text, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] = {}
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class DetokenizeRequest(msgspec.Struct, frozen=True):
    tokens: list[int]
    model: str | None = None


# Fields that would change the answer if weft supported them: an error is better than ignoring them.
_REFUSED = {
    "chat_template": "the operator sets the template of the server",
    "functions": "it was replaced by tools",
    "function_call": "it was replaced by tool_choice",
    "audio": "weft generates text only",
    "web_search_options": "weft does not search the web",
    "adapter": "weft has no adapters",
    "adapter_id": "weft has no adapters",
    "lora": "weft has no adapters",
    "lora_path": "weft has no adapters",
    "lora_request": "weft has no adapters",
}
_PATH = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
MAX_NAMED = 8
"""Limit for the names in a `Warning` header."""

C = TypeVar("C")
T = TypeVar("T", bound=msgspec.Struct)


def read(kind: type[T], body: bytes) -> tuple[T, list[str]]:
    """Parses a body. Returns the request and the names of unknown fields. Raises ApiError if it is invalid."""
    content = _parse(body)
    if not isinstance(content, dict):
        raise ApiError(400, "the body is not a JSON object; send one", code="invalid_json")
    given = {name: value for name, value in content.items() if value is not None}
    for name in sorted(_REFUSED.keys() & given.keys()):
        raise refusal(f"{name} is not supported: {_REFUSED[name]}; leave it out", name, "unsupported")
    api_request = converted(given, kind)
    _check_lengths(api_request)
    return api_request, [shown(name) for name in _unknown_fields(given, api_request)[:MAX_NAMED]]


def converted(content: Any, kind: type[C], where: str = "") -> C:
    """Converts parsed JSON. Raises ApiError if types are wrong. `where` is the field of the body that it comes from."""
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        message, param = str(error), where
        if found := _PATH.search(message):
            message, path = message[: found.start()], found["path"]
            param = f"{where}.{path}" if where and not path.startswith("[") else where + path
        elif not where and (missing := re.search(r"missing required field `(\w+)`", message)):
            param = missing[1]
        named = f"{param}: {message}" if param else message
        raise refusal(named, param or None, "invalid_type") from None


def _unknown_fields(given: dict[str, Any], api_request: msgspec.Struct) -> list[str]:
    """The names of the given fields that the type of the request does not have, also inside objects with a type of their own."""
    names = list(given.keys() - set(api_request.__struct_fields__))
    for name in api_request.__struct_fields__:
        inner, value = given.get(name), getattr(api_request, name)
        if isinstance(inner, dict) and isinstance(value, msgspec.Struct):
            names += [f"{name}.{one}" for one in inner.keys() - set(value.__struct_fields__)]
    return sorted(names)


def _check_lengths(api_request: msgspec.Struct) -> None:
    max_entries = {**MAX_ENTRIES, **getattr(api_request, "max_entries", {})}
    for name in api_request.__struct_fields__:
        value = getattr(api_request, name)
        if isinstance(value, list | dict):
            _check_length(name, len(value), max_entries.get(name), "entries", name)
        elif isinstance(value, str):
            _check_length(name, len(value), MAX_CHARACTERS.get(name), "characters", name)
    for name in ("messages", "input", "tools"):
        items = getattr(api_request, name, None)
        for index, item in enumerate(items if isinstance(items, list) else ()):
            for field, value in item.items() if isinstance(item, dict) else ():
                if isinstance(value, list):
                    check_entries(f"{name}[{index}].{field}", value, field)


def check_entries(where: str, value: Sequence[Any], field: str, param: str | None = None) -> None:
    """Raises ApiError if a list inside a field is longer than `MAX_ENTRIES` allows for `field`. `param`: the field that
    the error names."""
    _check_length(where, len(value), MAX_ENTRIES.get(field), "entries", param or where)


def _check_length(where: str, length: int, most: int | None, what: str, param: str) -> None:
    if most is not None and length > most:
        raise refusal(f"{where} has {length} {what}; allowed: at most {most}", param)


def _parse(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply; use fewer levels", code="invalid_json") from None
    except ValueError as error:  # also invalid UTF-8
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None


def shown(name: str) -> str:
    """A name that a client sent, for a header."""
    return re.sub(r"[^\w.-]", "?", name[:40], flags=re.ASCII)  # safe for a header
