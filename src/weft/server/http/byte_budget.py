"""Limits the bytes that requests hold in memory: each request, and all together."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable

from weft.server.errors import ApiError

_FREE_BYTES = 64 << 10
_LARGE_BYTES = 4 << 20
"""If a request held more than this, freed memory is returned to the operating system soon after."""
_TRIM_SECONDS = 1.0


class ByteBudget:
    """Counts the bytes of one kind (bodies or answers) that all requests hold in memory."""

    def __init__(self, max_each: int, max_bytes: int, refusal: Callable[[int, ByteBudget], ApiError]) -> None:
        """`refusal(num_bytes, budget)` makes the error for a request that would hold `num_bytes`."""
        self.max_each = max_each
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.refusal = refusal
        self._will_trim = False

    def trim_later(self) -> None:
        """Calls `trim_memory` once for all requests that end within a second."""
        if not self._will_trim:
            self._will_trim = True
            asyncio.get_running_loop().call_later(_TRIM_SECONDS, self._trim)

    def _trim(self) -> None:
        self._will_trim = False
        asyncio.get_running_loop().run_in_executor(None, trim_memory)


def trim_memory() -> None:
    """Returns freed memory to the operating system. malloc keeps free memory that lies below memory in use. Takes about
    10 ms for 100 MB, so it runs in a thread."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it
    if trim is not None:
        trim(0)


async def trim_often(seconds: float = 60.0) -> None:
    """Calls `trim_memory` every `seconds`, until it is cancelled. Otherwise the free memory between small requests grows for
    hours under load."""
    while True:
        await asyncio.sleep(seconds)
        await asyncio.get_running_loop().run_in_executor(None, trim_memory)


class RequestBytes:
    """The bytes of one request that count against a `ByteBudget`. The first `_FREE_BYTES` are free, so that small
    requests always fit. A connection buffers as much anyway."""

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self._num_charged = 0
        self._is_large = False
        self._is_released = False
        self.num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Adds bytes, or releases them if negative. Raises an ApiError if they exceed the limit of the request
        or the limit of all requests."""
        if (refusal := self.try_add(num_bytes)) is not None:
            raise refusal

    def try_add(self, num_bytes: int) -> ApiError | None:
        """Does the same as `add`, but returns the error."""
        if self._is_released:
            return None  # the last outputs of a cancelled answer arrive after the end of its request
        budget, own = self._budget, self.num_bytes + num_bytes
        charge = max(0, own - _FREE_BYTES) - self._num_charged
        if charge > 0 and (own > budget.max_each or budget.num_bytes + charge > budget.max_bytes):
            return budget.refusal(own, budget)
        self.num_bytes = own
        self._num_charged += charge
        budget.num_bytes += charge
        self._is_large = self._is_large or own > _LARGE_BYTES
        return None

    def check(self, num_bytes: int) -> None:
        """Raises an ApiError if this many bytes exceed the limit of a single request."""
        if num_bytes > self._budget.max_each:
            raise self._budget.refusal(num_bytes, self._budget)

    def keep(self, num_bytes: int) -> None:
        """From now on, counts this many bytes for the request, instead of the bytes counted so far."""
        self.add(num_bytes - self.num_bytes)
        if self._is_large:
            self._budget.trim_later()

    def release(self) -> None:
        """Releases all bytes of the request. Later calls of `add` have no effect."""
        self.add(-self.num_bytes)
        self._is_released = True
        if self._is_large:
            self._is_large = False
            self._budget.trim_later()


def body_budget_error(num_bytes: int, budget: ByteBudget) -> ApiError:
    if num_bytes > budget.max_each:
        return ApiError(
            413,
            f"the body has {num_bytes} bytes with the stored items that it refers to; allowed: {budget.max_each} "
            "(max_body_bytes); send fewer items",
            code="body_too_large",
        )
    return ApiError(
        503,
        f"the bodies of all active requests have {budget.num_bytes} bytes; allowed: {budget.max_bytes} together "
        "(max_buffered_bytes); send this request again later",
        code="server_busy",
    )


def answer_budget_error(num_bytes: int, budget: ByteBudget) -> ApiError:
    if num_bytes > budget.max_each:
        return ApiError(
            413,
            f"the answer would have {num_bytes} bytes or more in memory; allowed: {budget.max_each} (max_answer_bytes). "
            "Use stream=true and read the events as they arrive, or request fewer logprobs, tokens or answers",
            code="answer_too_large",
        )
    return ApiError(
        429,
        f"the answers of all active requests have {budget.num_bytes} bytes; allowed: {budget.max_bytes} together "
        "(max_buffered_answer_bytes); send this request again later",
        code="server_busy",
    )
