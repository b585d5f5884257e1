"""Parses the lines of a batch file: from JSON to a job, or to an error that names the invalid field.

A line has one of three forms. It is a string (a prompt), or an object with "prompt" or "messages" and sampling
parameters, or an object of the OpenAI batch format. The "body" of the last is a request to the server.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from weft.cli.start import command_params
from weft.errors import InvalidRequestError
from weft.request import SamplingParams

if TYPE_CHECKING:
    from weft.llm import LLM, PromptJob

MAX_LINE_BYTES = 64 << 20
"""Limit for one line. The text of any context is shorter."""

_URLS: dict[str, Form] = {"/v1/chat/completions": "chat", "/v1/completions": "completion"}
_PARAMETERS = frozenset(field.name for field in dataclasses.fields(SamplingParams))
_ALIASES = {"max_completion_tokens": "max_tokens", "max_new_tokens": "max_tokens"}
# Fields of the OpenAI API that are ignored: --model sets the model, and the others do not change the answer.
_IGNORED = frozenset(
    (
        *("model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "prediction", "verbosity"),
    )
)
# Fields of the OpenAI API that are accepted only with these values.
_ONLY_VALUES: dict[str, tuple[object, ...]] = {
    "stream": (False,),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "parallel_tool_calls": (True,),
}

_FIELDS = frozenset(
    (*_PARAMETERS, *_ALIASES, *_IGNORED, *_ONLY_VALUES, "prompt", "messages", "tools", "top_logprobs")
)

Key = tuple[Literal["id", "index"], str | int]
"""Identifies a line in an output. The first item is needed because an index and an id may be the same
number."""

Form = Literal["plain", "chat", "completion"]
"""The format of the answer: weft's own, or one of the OpenAI batch output."""


@dataclass(frozen=True)
class Line:
    """Identifies a line of the input and the format of its answer."""

    index: int
    """Position in the input, from 0; empty lines count."""
    form: Form = "plain"
    identifier: str | int | None = None

    @property
    def key(self) -> Key:
        return ("index", self.index) if self.identifier is None else ("id", self.identifier)


@dataclass(frozen=True)
class LineDefaults:
    """Options of the command line: the defaults for all lines."""

    sampling: Mapping[str, Any] = field(default_factory=dict)
    as_chat: bool = False
    system: str | None = None

    def messages(self, text: str) -> list[dict[str, str]]:
        opening = [{"role": "system", "content": self.system}] if self.system else []
        return [*opening, {"role": "user", "content": text}]


def read_line(raw: bytes, index: int, previous: Form) -> tuple[Line, dict[str, Any] | InvalidRequestError]:
    """Parses a line to its identity and its content, or an error. An invalid line whose form is unknown gets the form
    of the previous line."""
    line = Line(index, previous)
    try:
        content = json.loads(raw.decode("utf-8-sig"), parse_constant=_no_number)
        json.dumps(content, ensure_ascii=False).encode()  # raises for half a surrogate pair
    except (ValueError, RecursionError) as error:
        return line, InvalidRequestError(f"the line is not JSON: {error}", code="invalid_json")
    if isinstance(content, str):
        content = {"prompt": content}
    if not isinstance(content, dict):
        return line, InvalidRequestError(
            f"the line is a JSON {type(content).__name__}; allowed: a string or an object"
        )
    identifier = content.pop("custom_id", None)
    identifier = content.pop("id", None) if identifier is None else identifier
    if identifier is not None and (not isinstance(identifier, str | int) or isinstance(identifier, bool)):
        return line, InvalidRequestError(
            "the id of the line is neither a string nor a whole number", field="id"
        )
    if "body" not in content and "url" not in content:
        return Line(index, "plain", identifier), content
    form = _URLS.get(str(content.get("url")))
    line = Line(index, form or "chat", identifier)
    if form is None:
        allowed = " or ".join(_URLS)
        return line, InvalidRequestError(f"url is {content.get('url')!r}; allowed: {allowed}", field="url")
    if content.get("method", "POST") != "POST":
        return line, InvalidRequestError(f"method is {content['method']!r}; allowed: POST", field="method")
    if identifier is None:
        return line, InvalidRequestError(
            "custom_id is missing; give every request its own", field="custom_id"
        )
    if not isinstance(content.get("body"), dict):
        return line, InvalidRequestError(
            "body is not an object; it must be the body of the request", field="body"
        )
    return line, content["body"]


def make_job(line: Line, content: Mapping[str, Any], defaults: LineDefaults, llm: LLM) -> PromptJob:
    """The job of a line. Raises InvalidRequestError with the invalid field. A null means the default. In the
    forms of the OpenAI API, it is the default of that API."""
    from weft.llm import PromptJob

    given = {name: value for name, value in content.items() if value is not None}
    prompt, messages = given.pop("prompt", None), given.pop("messages", None)
    tools = given.pop("tools", None)
    _check_prompt(line.form, prompt, messages)
    if messages is None and defaults.as_chat and line.form == "plain" and isinstance(prompt, str):
        messages, prompt = defaults.messages(prompt), None
    if tools is not None and (messages is None or not isinstance(tools, list)):
        raise InvalidRequestError("tools must be a list of functions, and needs messages", field="tools")
    sampling = {**defaults.sampling, **_sampling(given, line.form)}
    is_chat = messages is not None
    if line.form == "plain":
        params = command_params(llm, chat=is_chat, **sampling)
    else:
        params = llm.default_params(chat=is_chat, **sampling)
    return PromptJob(prompt=prompt, messages=messages, params=params, key=line, tools=tools)


def _check_prompt(form: Form, prompt: Any, messages: Any) -> None:
    if form == "chat" and prompt is not None:
        raise InvalidRequestError("prompt is for /v1/completions; use messages in a chat", field="prompt")
    if form == "completion" and messages is not None:
        raise InvalidRequestError(
            "messages is for /v1/chat/completions; use prompt in a completion", field="messages"
        )
    if (prompt is None) == (messages is None):
        both = "both are" if prompt is not None else "neither is"
        raise InvalidRequestError(f"a line needs either a prompt or messages; {both} given", field="prompt")
    if messages is not None and not isinstance(messages, list):
        raise InvalidRequestError("messages is not a list", field="messages")
    is_tokens = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    if prompt is not None and not isinstance(prompt, str) and not is_tokens:
        raise InvalidRequestError(
            "prompt is neither a string nor a list of token ids; one prompt a line", field="prompt"
        )
    if prompt is not None and not prompt:
        raise InvalidRequestError("prompt is empty; give it at least one character", field="prompt")


def _sampling(given: dict[str, Any], form: Form) -> dict[str, Any]:
    """Converts field names of weft and of the OpenAI API to fields of `SamplingParams`."""
    found: dict[str, Any] = {}
    top_logprobs = given.pop("top_logprobs", None)
    for name, value in given.items():
        name = _ALIASES.get(name, name)
        if name in _ONLY_VALUES:
            if value not in _ONLY_VALUES[name]:
                allowed = " or ".join(json.dumps(one) for one in _ONLY_VALUES[name])
                raise InvalidRequestError(
                    f"{name} is {json.dumps(value)}; allowed here: {allowed}", field=name
                )
        elif name in _PARAMETERS:
            found[name] = value
        elif name not in _IGNORED:
            allowed = ", ".join(sorted(_FIELDS | {"id"} if form == "plain" else _FIELDS))
            raise InvalidRequestError(f"{name} is not a field of a request; allowed: {allowed}", field=name)
    if isinstance(found.get("logprobs"), bool):  # in chat requests the number is in top_logprobs
        found["logprobs"] = (top_logprobs or 0) if found["logprobs"] else None
    elif top_logprobs is not None:
        raise InvalidRequestError('top_logprobs needs "logprobs": true', field="top_logprobs")
    if isinstance(found.get("logit_bias"), dict):
        found["logit_bias"] = {_token_id(token): bias for token, bias in found["logit_bias"].items()}
    return found


def _token_id(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InvalidRequestError(
            f"logit_bias has the key {text!r}; allowed: token ids", field="logit_bias"
        ) from None


def _no_number(text: str) -> float:
    """Refuses NaN and Infinity: Python would read them, but JSON does not have them."""
    raise ValueError(f"{text} is not valid JSON")
