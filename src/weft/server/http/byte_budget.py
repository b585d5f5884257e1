"""Bytes that requests may have in memory: each alone, and all together."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable

from weft.server.errors import ApiError

_FREE_BYTES = 64 << 10
_LARGE_BYTES = 4 << 20
_TRIM_SECONDS = 1.0


class ByteBudget:
    """Owns how many bytes of one kind all requests have in memory."""

    def __init__(self, max_each: int, max_bytes: int, refusal: Callable[[int, ByteBudget], ApiError]) -> None:
        """`refusal` makes the error for a request that would have so many bytes."""
        self.max_each = max_each
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.refusal = refusal
        self._will_trim = False

    def trim_later(self) -> None:
        """Gives freed memory back to the system: the C library keeps free memory that lies below memory in use. That takes
        some 10 ms for 100 MB, so it runs in a thread, and once for all requests that end within a second."""
        if not self._will_trim:
            self._will_trim = True
            asyncio.get_running_loop().call_later(_TRIM_SECONDS, self._trim)

    def _trim(self) -> None:
        self._will_trim = False
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone
        if trim is not None:
            asyncio.get_running_loop().run_in_executor(None, trim, 0)


class RequestBytes:
    """What one request uses of a budget. Its first bytes are free, so that large requests never keep small ones out;
    connections hold as much anyway."""

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self._num_charged = 0
        self._is_large = False
        self._is_released = False
        self.num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """So many more, or fewer. Raises the budget's refusal where that is too many, for one request or for all."""
        if (refusal := self.try_add(num_bytes)) is not None:
            raise refusal

    def try_add(self, num_bytes: int) -> ApiError | None:
        """As `add`, with the refusal returned."""
        if self._is_released:
            return None  # the last outputs of a cancelled answer arrive after its request has ended
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
        """Raises the refusal for a request that would have so many bytes, though it had the budget to itself."""
        if num_bytes > self._budget.max_each:
            raise self._budget.refusal(num_bytes, self._budget)

    def release(self) -> None:
        """Nothing of it is needed any more."""
        self.add(-self.num_bytes)
        self._is_released = True
        if self._is_large:
            self._is_large = False
            self._budget.trim_later()


def body_budget_error(num_bytes: int, budget: ByteBudget) -> ApiError:
    return ApiError(
        503,
        f"the bodies of requests under way have {budget.num_bytes} bytes; allowed: {budget.max_bytes} "
        "in all; send this one again later",
        code="server_busy",
    )


def answer_budget_error(num_bytes: int, budget: ByteBudget) -> ApiError:
    if num_bytes > budget.max_each:
        return ApiError(
            413,
            f"the answer would have {num_bytes} bytes or more in memory; allowed: {budget.max_each} (max_answer_bytes). "
            "Stream it and read it as it comes, or ask for fewer logprobs, tokens or answers",
            code="answer_too_large",
        )
    return ApiError(
        429,
        f"the answers under way have {budget.num_bytes} bytes; allowed: {budget.max_bytes} in all "
        "(max_buffered_answer_bytes); ask again later",
        code="server_busy",
    )
