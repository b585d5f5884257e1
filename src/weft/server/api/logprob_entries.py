"""The logprobs of a token in JSON, and their types, as several APIs have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weft.request import TokenLogprobs
from weft.server.api.response_shapes import Shape


class TopLogprob(Shape):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Shape):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


def logprob_entry(token: int, logprobs: TokenLogprobs, token_bytes: Callable[[int], bytes]) -> dict[str, Any]:
    """The logprobs of one token. `token_bytes` is the method of the tokenizer."""
    return {
        **_entry(token, logprobs.logprob, token_bytes),
        "top_logprobs": [_entry(*other, token_bytes) for other in logprobs.top],
    }


def _entry(token: int, logprob: float, token_bytes: Callable[[int], bytes]) -> dict[str, Any]:
    content = token_bytes(token)
    return {"token": content.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(content)}
