"""What the routes of vectors and scores share: limits, the run of a request, its usage, log fields and metrics."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec

from weft.server.api.services import Services
from weft.server.errors import refusal
from weft.server.logs import current_record
from weft.server.plain_requests import PlainRequest
from weft.server.stream.whole_answer import PartsResponse
from weft.server.vectors.model import VectorCaller, VectorModel
from weft.server.vectors.text_tokens import check_num_tokens
from weft.vectors import Vectors

MAX_INPUTS = 2048
"""Limit for the texts or pairs of one request."""
ERRORS = (400, 404, 408, 413, 429, 500, 503, 504)
"""The error statuses of these routes."""
_BYTES_PER_NUMBER = 4
_PART_BYTES = 64 << 10

encode = msgspec.json.Encoder().encode


def check_count(field: str, count: int, what: str = "entries") -> None:
    """Refuses a list of inputs that is empty or too long."""
    if not 1 <= count <= MAX_INPUTS:
        raise refusal(f"{field} has {count} {what}; allowed: 1 to {MAX_INPUTS}", field)


def check_text(text: str, where: str) -> None:
    if not text:
        raise refusal(f"{where} is empty; send at least 1 character", where)


def chosen_model(services: Services, name: str | None, use: Literal["embed", "rerank"]) -> VectorModel:
    """The model of a request. Also sets it in the log record, for the trace. Raises as `ModelRegistry.for_vectors` does."""
    record = current_record()
    record.model = name
    model = services.models.for_vectors(name, use)
    record.vector_model = model.name
    return model


async def run(
    services: Services,
    plain: PlainRequest[Any],
    model: VectorModel,
    prompts: Sequence[Sequence[int]],
    field: str,
) -> tuple[Vectors, int]:
    """The vectors of tokenised inputs, and the number of their tokens. The key is charged for these tokens."""
    num_tokens = sum(map(len, prompts))
    check_num_tokens(num_tokens, field)
    active, began = plain.active, time.monotonic()
    services.plain_requests.active_requests.reserve(active, num_tokens)
    plain.body_bytes.keep(0)  # from here on, only tokens are needed
    plain.answer_bytes.add(_BYTES_PER_NUMBER * len(prompts) * model.spec.dimensions)
    caller = VectorCaller(
        active.id, plain.client_id, 1.0 if active.key is None else active.key.weight, active.is_idle_work
    )
    vectors = await model.run(prompts, caller)
    record = current_record()
    record.num_inputs, record.prompt_tokens = len(prompts), num_tokens
    services.record_vectors(model.name, len(prompts), num_tokens, time.monotonic() - began)
    return vectors, num_tokens


async def list_response(
    services: Services, plain: PlainRequest[Any], before: bytes, entries: Iterable[bytes], after: bytes
) -> PartsResponse:
    """A body with a long list, which is made in small parts: `entries` makes the JSON of each entry. Raises if the body
    becomes too large."""
    body: deque[bytes | bytearray] = deque((before,))
    part = bytearray()
    for number, entry in enumerate(entries):
        if number:
            part += b","
        part += entry
        if len(part) >= _PART_BYTES:
            plain.answer_bytes.add(len(part))
            body.append(part)
            part = bytearray()
            await services.plain_requests.loop_turns.wait()
    body += (part, after)
    plain.answer_bytes.add(len(part))
    return PartsResponse(body, plain.answer_bytes, {})
