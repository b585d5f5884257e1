"""How one server wants to be asked: the parts of the OpenAI API it takes are found out before anything is measured."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from weft.bench.serve_client import Client
from weft.bench.serve_load import Item
from weft.errors import WeftError

PROBE_SECONDS = 120.0
_REFUSALS = ("HTTP 400", "HTTP 422", "HTTP 500", "HTTP 501")
"""What servers answer to a request whose shape they do not know; 500 is what some make of a list as a prompt."""


class ServerError(WeftError):
    """The server cannot be measured: it does not answer, or not as the OpenAI API says."""


@dataclass(frozen=True)
class Dialect:
    """The shape of the requests."""

    model: str
    is_chat: bool = False
    takes_ids: bool = True
    """Prompts as token ids; else as text."""
    takes_exact_length: bool = True
    """`ignore_eos` and `min_tokens`: every answer gets as long as was asked."""
    takes_usage: bool = True
    """`stream_options`: the server counts the tokens."""

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.is_chat else "/v1/completions"

    def body(self, item: Item, decode: Callable[[Sequence[int]], str]) -> bytes:
        prompt: Any = item.prompt
        if isinstance(prompt, tuple):
            prompt = list(prompt) if self.takes_ids else decode(prompt)
        fields: dict[str, Any] = {
            "model": self.model,
            "max_tokens": item.max_tokens,
            "temperature": 0,
            "stream": True,
        }
        if self.is_chat:
            fields["messages"] = [{"role": "user", "content": prompt}]
        else:
            fields["prompt"] = prompt
        if self.takes_exact_length:
            fields |= {"ignore_eos": True, "min_tokens": item.max_tokens}
        if self.takes_usage:
            fields["stream_options"] = {"include_usage": True}
        return json.dumps(fields).encode()

    def describe(self) -> str:
        prompt = "token ids" if self.takes_ids else "text"
        length = "lengths exact (ignore_eos)" if self.takes_exact_length else "answers may end early"
        return f"{self.path}, model {self.model}, prompts as {prompt}, {length}"


async def served_model(client: Client) -> str:
    """The first model that the server lists."""
    answer, exchange = await client.ask(client.message("GET", "/v1/models"), PROBE_SECONDS)
    if exchange is None or exchange.response.status == 0:
        reason = answer.failure.detail if answer.failure else "no answer"
        raise ServerError(f"nothing that speaks HTTP answers at {client.url}: {reason}. Is the server up?")
    if exchange.response.status in (401, 403):
        raise ServerError(
            f"{client.url} wants an API key (HTTP {exchange.response.status}): give one with --api-key"
        )
    try:
        name = json.loads(exchange.body)["data"][0]["id"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        status = exchange.response.status
        raise ServerError(
            f"{client.url}/v1/models names no model (HTTP {status}): say which to ask for with --served-model"
        ) from None
    return str(name)


async def find_dialect(
    client: Client, model: str, items: Sequence[Item], is_chat: bool, decode: Callable[[Sequence[int]], str]
) -> Dialect:
    """The richest shape of request that the server answers, tried with short requests like those to come."""
    has_ids = any(isinstance(item.prompt, tuple) for item in items)
    sample = next((item for item in items if isinstance(item.prompt, tuple)), items[0])
    probe = Item(
        sample.prompt[:-17:-1], 2
    )  # backwards, so that no cache has the beginning of what is measured
    shapes = [
        Dialect(model, is_chat, ids and has_ids and not is_chat, exact, usage)
        for usage in (True, False)
        for ids in (True, False)
        for exact in (True, False)
    ]
    reason = ""
    for dialect in dict.fromkeys(shapes):
        message = client.message("POST", dialect.path, dialect.body(probe, decode))
        answer, _ = await client.ask(message, PROBE_SECONDS)
        if answer.failure is None:
            return dialect
        reason = f"{answer.failure.kind}: {' '.join(answer.failure.detail.split())[:300]}"
        if answer.failure.kind not in _REFUSALS:
            break
    raise ServerError(f"{client.url}{dialect.path} did not answer a request of two tokens: {reason}")
