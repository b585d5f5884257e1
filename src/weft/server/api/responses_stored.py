"""Reads the items of stored responses: the conversation before a request, and the items that it refers to.

All functions run in the thread of the store, since the rows may have megabytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from weft.server.api.responses_items import conversation_items, response_of_item, without_lost_calls
from weft.server.api.schema import MAX_ENTRIES
from weft.server.errors import ApiError, refusal
from weft.server.state import responses as table
from weft.text.conversation import Item


class _Output(msgspec.Struct):
    """The fields that are read from a stored response object."""

    output: list[dict[str, Any]]


_read_input = msgspec.json.Decoder(list[dict[str, Any]]).decode
_read_output = msgspec.json.Decoder(_Output).decode


def stored_conversation(
    chain: table.Chain, previous: str, max_bytes: int, *, is_cut_allowed: bool
) -> list[Item]:
    """The conversation of a chain of stored responses. Raises ApiError if the chain is incomplete, unless
    `is_cut_allowed`, or if one of the responses cannot be continued. `max_bytes` is the limit of the chain."""
    if chain.missing_id == previous:
        raise _not_found(
            f"there is no stored response {previous!r:.80}", "previous_response_id", "previous_response"
        )
    if chain.missing_id is not None and not is_cut_allowed:
        message = (
            f"the conversation of {previous!r:.80} is not complete any more: its response {chain.missing_id!r:.80} was "
            "deleted or has expired; send the items themselves, or truncation: auto"
        )
        raise _not_found(message, "previous_response_id", "previous_response")
    if chain.is_cut and not is_cut_allowed:
        raise refusal(
            f"the stored conversation of {previous!r:.80} has at least {chain.num_items} items and {chain.num_bytes} "
            f"bytes; allowed: {MAX_ENTRIES['input']} items, and {max_bytes} bytes, which this body leaves of "
            "max_body_bytes; begin a new one, or send truncation: auto",
            "previous_response_id",
            "context_length_exceeded",
        )
    items: list[Item] = []
    for row in chain.rows:
        if not row.is_finished or row.status in ("failed", "cancelled"):
            raise refusal(
                f"the response {row.id!r:.80} has the status {row.status}; only a completed one can be continued",
                "previous_response_id",
            )
        items += conversation_items([*_read_input(row.input), *_usable(_read_output(row.response).output)])
    return without_lost_calls(items) if chain.is_cut or chain.missing_id is not None else items


def _usable(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output without calls that the token limit cut: clients cannot run them, so the next input has no output for them."""
    return [item for item in output if not ("call_id" in item and item.get("status") == "incomplete")]


def stored_items(
    connection: Any, ids: Sequence[str], owner: str, now: float, limits: Mapping[str, int]
) -> dict[str, Any]:
    """The stored items with these ids, and the other items of their responses. Raises ApiError if one does not exist."""
    responses = {one: response_of_item(one) for one in ids}
    rows = table.find_all(
        connection,
        [one for one in responses.values() if one is not None],
        owner,
        now,
        max_bytes=limits["max_bytes"],
    )
    items: dict[str, Any] = {}
    for row in rows.values():
        for item in [*_read_input(row.input), *_read_output(row.response).output]:
            items[item["id"]] = item
    for one in ids:
        if one not in items:
            raise _not_found(f"there is no stored item {one!r:.80}", "input", "item")
    return items


def _not_found(message: str, param: str, what: str) -> ApiError:
    return ApiError(404, message, param=param, code=f"{what}_not_found")
