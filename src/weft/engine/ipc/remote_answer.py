"""One answer of the engine's process, as the client sees it: a bounded buffer of outputs that were not read yet."""

from __future__ import annotations

import asyncio
import copy
import time
from array import array
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from weft.engine.ipc import wire
from weft.errors import WeftError
from weft.request import GenerationResult, RequestId, TokenLogprobs, TokenOutput

if TYPE_CHECKING:
    from weft.engine.ipc.client import EngineClient

_OUTPUT_BYTES = 160
"""Memory of one `wire.Output` without its encoded logprobs."""

Unread = int | wire.Output
"""A token without logprobs is stored as its id. As objects, hundreds of thousands of tokens would stall the event loop
for 0.1 s in each garbage collection."""


class SlowReaderError(WeftError):
    """The reader of an answer was too slow, and the answer was cancelled."""


class RemoteAnswer:
    """One unfinished answer: the outputs that arrived and were not read yet. Outputs are dropped once read."""

    def __init__(
        self,
        client: EngineClient,
        request_id: RequestId,
        handle: int,
        capacity: int | None,
        arrived: asyncio.Event,
        prompt_length: int,
        wake_every: int = 1,
        may_grow: Callable[[int], bool] = lambda num_bytes: True,
    ) -> None:
        """`capacity` limits the number of unread tokens; None: no limit. `may_grow` is called with the size of each
        output that arrives, and with a negative size when outputs are read. If it returns False, the answer is
        cancelled."""
        self.request_id = request_id
        self.handle = handle
        self.result: GenerationResult | None = None
        """The result, set before the final output can be read. It has no tokens, no text and no logprobs."""
        self.num_tokens = 0
        """All tokens that arrived, read or not."""
        self.first_at: float | None = None
        """When the first token arrived."""
        self.kept: array[int] | None = None
        """The tokens that were read, for identical requests that come later. None: not kept."""
        self._prompt_logprobs: list[bytes] = []
        self.arrived = arrived
        """Set at the first token, when `wake_every` tokens are unread, and at the end. Several answers may share one
        event if one task reads them all."""
        self._client = client
        self._capacity = capacity
        self._wake_every = wake_every if capacity is None else min(wake_every, max(1, capacity // 2))
        self._may_grow = may_grow
        self._unread: list[Unread] = []
        self._length = prompt_length
        """Length of the sequence up to the last output that was read."""
        self._failure: WeftError | None = None

    @property
    def is_readable(self) -> bool:
        """Whether `take` returns an output or raises an error."""
        return bool(self._unread) or self._failure is not None

    def check(self) -> None:
        """Raises a copy of the error that ended the request. If the error itself, which this object keeps, were raised,
        its traceback would keep the frames alive."""
        if self._failure is not None:
            raise copy.copy(self._failure)

    def take(self, limit: int | None = None) -> list[TokenOutput]:
        """Returns the oldest unread outputs, at most `limit`. Raises the error that ended the request."""
        return [self._output(unread) for unread in self.take_raw(limit)]

    def take_raw(self, limit: int | None = None) -> list[Unread]:
        """Like `take`, without building `TokenOutput` objects: much faster."""
        if self._failure is not None:
            self.check()
        taken, self._unread = self._unread, []
        if limit is not None and len(taken) > limit:
            taken, self._unread = taken[:limit], taken[limit:]
            self.arrived.set()
        # Plain tokens do not count as memory (`_size`). If the last output is a plain token, all of them are.
        if taken and not isinstance(taken[-1], int):
            self._may_grow(-sum(map(_size, taken)))
        elif self.kept is not None:
            self.kept.extend(taken)  # type: ignore[arg-type]  # without logprobs, all but the final output are tokens
        return taken

    @property
    def unread_tokens(self) -> list[int]:
        return [unread for unread in self._unread if isinstance(unread, int)]

    def prompt_logprobs(self) -> Iterator[Sequence[TokenLogprobs | None]]:
        """Yields the logprobs of the prompt in groups of tokens. They are complete once `result` is set."""
        return map(wire.prompt_logprobs.decode, self._prompt_logprobs)

    def _output(self, unread: Unread) -> TokenOutput:
        if isinstance(unread, int):
            self._length += 1
            return TokenOutput(self.request_id, unread, "", None, False, None, self._length)
        self._length += unread.token_id is not None
        return unread.as_token_output(self.request_id, self._length)

    async def read(self) -> list[TokenOutput]:
        """Like `take`, but waits for at least one output."""
        while not (outputs := self.take()):
            self.arrived.clear()
            await self.arrived.wait()
        return outputs

    def __aiter__(self) -> AsyncIterator[list[TokenOutput]]:
        return self._outputs()

    async def _outputs(self) -> AsyncIterator[list[TokenOutput]]:
        while True:
            outputs = await self.read()
            yield outputs
            if outputs[-1].is_final:
                return

    def finish(self, num_tokens: int) -> None:
        """Ends the answer after its first `num_tokens` tokens, because its text contains a stop string."""
        self._client._finish(self, num_tokens)

    def cancel(self, reason: str | None = None) -> None:
        """Cancels the answer in any state. Does nothing if it has ended."""
        self._client._cancel(self, reason)

    # -- called by the client

    def put_token(self, token: int) -> bool:
        """Adds a token without logprobs. Returns whether it is the first token."""
        unread, capacity = self._unread, self._capacity
        if self._failure is not None or (capacity is not None and len(unread) >= capacity):
            self._overflow()
            return False
        unread.append(token)
        self.num_tokens += 1
        if self.first_at is None:
            self.first_at = time.monotonic()
            self.arrived.set()
            return True
        if len(unread) >= self._wake_every:
            self.arrived.set()
        return False

    def put(self, output: wire.Output) -> bool:
        """Adds an output with logprobs, or the final one, which a full buffer accepts too. Returns whether it has the
        first token."""
        unread, capacity = self._unread, self._capacity
        is_full = capacity is not None and len(unread) >= capacity
        if self._failure is not None or (is_full and output.finish_reason is None):
            self._overflow()
            return False
        if not self._may_grow(_size(output)):
            self._discard(WeftError("the answer needs more memory than it may have"), "too large")
            return False
        unread.append(output)
        self.num_tokens += output.token_id is not None
        is_first = self.num_tokens == 1
        if is_first and self.first_at is None:
            self.first_at = time.monotonic()
        if is_first or output.finish_reason is not None or len(unread) >= self._wake_every:
            self.arrived.set()
        return is_first

    def end(self, result: GenerationResult) -> None:
        """Sets the result. Called right after the final output was put, before any task can read that output."""
        self.result = result

    def put_prompt_logprobs(self, encoded: bytes) -> None:
        self._prompt_logprobs.append(encoded)
        self._may_grow(len(encoded))

    def _overflow(self) -> None:
        self._discard(
            SlowReaderError(f"the reader is too slow: more than {self._capacity} tokens are unread"),
            "slow reader",
        )

    def _discard(self, error: WeftError, reason: str) -> None:
        """Fails and cancels the answer, and frees its unread outputs. An output did not fit the buffer, so the text
        would have a gap."""
        if self._failure is None:
            self._may_grow(-sum(map(_size, self._unread)))
            self._unread.clear()
            self.fail(error)
            self.cancel(reason)

    def fail(self, error: WeftError) -> None:
        if self._failure is None:
            self._failure = error
        self.arrived.set()


class LateAnswer(RemoteAnswer):
    """The answer of a request that joined the sequence of an identical one (`SharedAnswer`). It reads all earlier tokens
    from the array of the sequence, so a join copies none of them, and they do not count against its capacity."""

    _early: array[int] | None = None
    """The tokens of the sequence. None: no earlier token is left to read."""
    _num_early = 0
    """The length of `_early` when this answer joined. The array may grow later."""
    _next_early = 0

    def catch_up(self, tokens: array[int]) -> None:
        """Makes the earlier tokens of the sequence readable. `tokens` may grow later, but must not change otherwise."""
        self._early = tokens
        self.num_tokens = self._num_early = len(tokens)
        self.first_at = time.monotonic()
        self.arrived.set()

    @property
    def is_readable(self) -> bool:
        return self._early is not None or super().is_readable

    def take_raw(self, limit: int | None = None) -> list[Unread]:
        if self._early is None:
            return super().take_raw(limit)
        self.check()
        begin, end = self._next_early, self._num_early
        if limit is not None and end - begin > limit:
            self._next_early = begin + limit
            self.arrived.set()
            return [*self._early[begin : begin + limit]]
        early, self._early = self._early[begin:end], None
        return [*early, *super().take_raw(None if limit is None else limit - len(early))]


def _size(unread: Unread) -> int:
    return 0 if isinstance(unread, int) else _OUTPUT_BYTES + len(unread.encoded_top)
