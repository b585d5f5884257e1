"""The requests of each API, and which optional fields of it a server accepts: found before anything is measured."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from weft.bench.serve_client import Client
from weft.bench.serve_load import Item
from weft.errors import WeftError

PROBE_SECONDS = 120.0
_REFUSALS = ("HTTP 400", "HTTP 422", "HTTP 500", "HTTP 501")
"""Statuses with which servers refuse fields that they do not know. Some send 500 for a prompt that is a list."""


class ServerError(WeftError):
    """The server cannot be measured: it does not answer, or its answers do not follow the API."""


Api = Literal["completions", "chat", "responses", "messages", "ollama"]
_PATHS: Mapping[Api, str] = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "ollama": "/api/chat",
}
APIS: Sequence[Api] = tuple(_PATHS)


@dataclass(frozen=True)
class Dialect:
    """The form of the requests: the API, and which optional fields the server accepts."""

    model: str
    api: Api = "completions"
    takes_ids: bool = True
    """Whether prompts are sent as token ids; otherwise they are sent as text."""
    takes_exact_length: bool = True
    """Whether the server accepts `ignore_eos` and `min_tokens`: then every answer has exactly `max_tokens` tokens."""
    takes_usage: bool = True
    """Whether the server accepts `stream_options` and so reports token counts. APIs other than chat and completion
    always report them."""

    @property
    def path(self) -> str:
        return _PATHS[self.api]

    def body(self, item: Item, decode: Callable[[Sequence[int]], str]) -> bytes:
        prompt: Any = item.prompt
        if isinstance(prompt, tuple):
            prompt = list(prompt) if self.takes_ids else decode(prompt)
        fields: dict[str, Any] = {
            "model": self.model,
            "stream": True,
            **self._content(prompt, item.max_tokens),
        }
        if self.takes_exact_length:
            fields |= {"ignore_eos": True, "min_tokens": item.max_tokens}
        if self.takes_usage and self.api in ("completions", "chat"):
            fields["stream_options"] = {"include_usage": True}
        return json.dumps(fields).encode()

    def _content(self, prompt: Any, max_tokens: int) -> dict[str, Any]:
        messages = [{"role": "user", "content": prompt}]
        match self.api:
            case "completions":
                return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
            case "responses":
                return {"input": prompt, "max_output_tokens": max_tokens, "temperature": 0, "store": False}
            case "ollama":
                return {"messages": messages, "options": {"num_predict": max_tokens, "temperature": 0}}
            case _:
                return {"messages": messages, "max_tokens": max_tokens, "temperature": 0}

    def describe(self) -> str:
        prompt = "token ids" if self.takes_ids else "text"
        length = "exact lengths (ignore_eos)" if self.takes_exact_length else "answers may end early"
        return f"{self.path}, model {self.model}, prompts as {prompt}, {length}"


async def served_model(client: Client) -> str:
    """The first model that the server lists."""
    answer, exchange = await client.send(client.message("GET", "/v1/models"), PROBE_SECONDS)
    if exchange is None or exchange.response.status == 0:
        reason = answer.failure.detail if answer.failure else "no answer"
        raise ServerError(f"no HTTP server answers at {client.url}: {reason}. Is the server running?")
    if exchange.response.status in (401, 403):
        raise ServerError(
            f"{client.url} requires an API key (HTTP {exchange.response.status}): give one with --api-key"
        )
    try:
        name = json.loads(exchange.body)["data"][0]["id"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        status = exchange.response.status
        raise ServerError(
            f"{client.url}/v1/models lists no model (HTTP {status}): name one with --served-model"
        ) from None
    return str(name)


async def find_dialect(
    client: Client, model: str, items: Sequence[Item], api: Api, decode: Callable[[Sequence[int]], str]
) -> Dialect:
    """The form with the most optional fields that the server accepts, found with short requests."""
    has_ids = any(isinstance(item.prompt, tuple) for item in items)
    sample = next((item for item in items if isinstance(item.prompt, tuple)), items[0])
    # Reversed, so that the probe leaves no prefix of a measured prompt in the server's cache.
    probe = Item(sample.prompt[:-17:-1], 2)
    is_openai = api in ("completions", "chat")  # only these have the optional fields
    forms = [
        Dialect(model, api, ids and has_ids and api == "completions", exact and is_openai, usage)
        for usage in (True, False)
        for ids in (True, False)
        for exact in (True, False)
    ]
    reason = ""
    for dialect in dict.fromkeys(forms):
        message = client.message("POST", dialect.path, dialect.body(probe, decode))
        answer, _ = await client.send(message, PROBE_SECONDS)
        if answer.failure is None:
            return dialect
        reason = f"{answer.failure.kind}: {' '.join(answer.failure.detail.split())[:300]}"
        if answer.failure.kind not in _REFUSALS:
            break
    raise ServerError(f"{client.url}{dialect.path} did not answer a request of two tokens: {reason}")
