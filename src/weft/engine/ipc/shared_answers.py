"""Exact coalescing: identical requests in flight share one sequence of the engine. Each keeps an answer of its own.

    request 1 <-- RemoteAnswer <--+
    request 2 <-- LateAnswer <----+-- SharedAnswer <-- outputs of the sequence
    request 3 <-- LateAnswer <----+

While a sequence has one reader, the client gives its outputs to the `RemoteAnswer` directly, so a token costs nothing
more. The `SharedAnswer` takes its place when a second request joins.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from weft.config import ServingEngineConfig
from weft.engine.ipc import wire
from weft.engine.ipc.remote_answer import LateAnswer, RemoteAnswer
from weft.errors import WeftError
from weft.plan import BackendInfo
from weft.request import (
    Failure,
    FailureKind,
    FinishReason,
    GenerationResult,
    InferenceRequest,
    RequestId,
    RequestState,
)

_LEAST_SECONDS = 1.0
"""No request joins a sequence whose deadline is nearer than this: the message that drops the deadline could arrive too
late."""


class _Key:
    """What identical requests have in common. Prompts are long, so its hash is computed once."""

    __slots__ = ("_content", "_hash")

    def __init__(self, *content: object) -> None:
        self._content = content
        self._hash = hash(content)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._content == other._content


class SharedReader(NamedTuple):
    """A request that shares a sequence, in a frame of the live page."""

    request_id: RequestId
    sequence_id: RequestId
    """The id of the sequence in the engine: the request id of its first reader, even after that reader has left."""
    age: float
    left: float | None
    """Seconds until its deadline. None: it has none."""


@dataclass(slots=True, eq=False)
class _Reader:
    """One of the requests that share a sequence."""

    answer: RemoteAnswer
    request: InferenceRequest
    began: float
    """When it was submitted. Its deadline and the times of its result count from here."""
    deadline: float | None
    timer: asyncio.TimerHandle | None = None


class SharedAnswer:
    """One sequence and its readers. It takes outputs as a `RemoteAnswer` does, and gives them to all readers."""

    def __init__(self, owner: SharedAnswers, key: _Key, first: _Reader) -> None:
        self.key = key
        self.handle = first.answer.handle
        self.request_id = first.answer.request_id
        """The id of the sequence in the engine, even after the first reader has left."""
        self.is_idle_work = first.request.is_idle_work
        self.readers: tuple[_Reader, ...] = (first,)
        """Replaced when it changes: a reader may leave while it gets an output."""
        self.is_shared = False
        """Whether a second request has ever joined."""
        self.num_tokens = 0
        self._began = first.began
        self._outputs: array[int] | None = None
        """All tokens so far, for requests that join later. None: outputs with logprobs are large and are not kept."""
        self._owner = owner

    def may_join(self, request_id: RequestId) -> bool:
        """Whether a request with this id may join now. A request with the id of the sequence may not: it is submitted, and
        the engine refuses the id."""
        first = self.readers[0]
        if request_id == self.request_id:
            return False
        # It may join only if it can get every token: all are kept, or none exists yet.
        if self.is_shared:
            return self._outputs is not None or not self.num_tokens
        if first.deadline is not None and first.began + first.deadline - time.monotonic() < _LEAST_SECONDS:
            return False
        return first.answer.kept is not None or not first.answer.num_tokens

    def begin(self) -> None:
        """Takes the tokens so far from the first reader. Called before the second request joins."""
        first = self.readers[0].answer
        self.is_shared, self.num_tokens = True, first.num_tokens
        self._outputs, first.kept = first.kept, None
        if self._outputs is not None:
            self._outputs.extend(first.unread_tokens)

    def add(self, reader: _Reader, answer: LateAnswer) -> None:
        self.readers += (reader,)
        if self._outputs:
            answer.catch_up(self._outputs)

    # -- called by the client, like the methods of a RemoteAnswer

    def put_token(self, token: int) -> bool:
        self._count_token()
        if self._outputs is not None:
            self._outputs.append(token)
        has_first = False
        for reader in self.readers:
            has_first = reader.answer.put_token(token) or has_first
        return has_first

    def put(self, output: wire.Output) -> bool:
        if output.token_id is not None:
            self._count_token()
        has_first = False
        for reader in self.readers:
            has_first = reader.answer.put(output) or has_first
        return has_first

    def _count_token(self) -> None:
        self.num_tokens += 1
        self._owner.num_tokens += max(0, len(self.readers) - 1)

    def end(self, result: GenerationResult) -> None:
        for reader in self.readers:
            is_first = reader.answer.request_id == self.request_id
            reader.answer.result = result if is_first else self._result_of_later(reader, result)

    def _result_of_later(self, reader: _Reader, result: GenerationResult) -> GenerationResult:
        """The result for a request that joined later, without the time before it joined."""
        late = min(reader.began - self._began, result.total_time)
        first = result.time_to_first_token
        waiting, prefill, decode = _times_after(late, result)
        return dataclasses.replace(
            result,
            request_id=reader.answer.request_id,
            waiting_time=waiting,
            prefill_time=prefill,
            decode_time=decode,
            time_to_first_token=None if first is None else max(0.0, first - late),
            cached_token_count=max(result.cached_token_count, self._owner.prefix_hits(reader)),
            metadata=reader.request.metadata,
            preempted_times=tuple(
                one._replace(began=max(0.0, one.began - late), ended=one.ended - late)
                for one in result.preempted_times
                if one.ended > late
            ),
        )

    def fail(self, error: WeftError) -> None:
        for reader in self.readers:
            reader.answer.fail(error)

    def stop_timers(self) -> None:
        for reader in self.readers:
            if reader.timer is not None:
                reader.timer.cancel()


def _times_after(late: float, result: GenerationResult) -> tuple[float, float, float]:
    """Waiting, prefill and decode time after the first `late` seconds.

    queue | prefill | pause | prefill | decode | pause by recompute | prefill, decode
          admitted                    first                                         end
    """
    pauses = result.preempted_times
    end, first = result.total_time, result.time_to_first_token
    admitted = result.waiting_time - sum(one.ended - one.began for one in pauses)
    first = end if first is None else first

    def running(began: float, ended: float) -> float:
        """Seconds from `began` to `ended`, without the pauses."""
        paused = sum(max(0.0, min(one.ended, ended) - max(one.began, began)) for one in pauses)
        return max(0.0, ended - began - paused)

    before_first, after_first = running(max(late, admitted), first), running(max(late, first), end)
    # The result does not have the duration of each recompute. It is assumed to be the same for all.
    ends = [one.ended for one in pauses if not one.by_swap and one.began >= first]
    again = max(0.0, result.prefill_time - running(admitted, first))
    share = sum(ended > late for ended in ends) / len(ends) if ends else 0.0
    again = min(again * share, after_first)
    waiting = max(0.0, end - late - before_first - after_first)
    return waiting, before_first + again, after_first - again


class SharedAnswers:
    """Owns the sequences that several requests may share. Belongs to an `EngineClient`."""

    def __init__(
        self,
        answers: dict[int, RemoteAnswer | SharedAnswer],
        send: Callable[[wire.Message], None],
        coalesce: bool | None,
        config: ServingEngineConfig,
    ) -> None:
        """`answers` are the unfinished answers of the client, by handle. `coalesce` None: requests share sequences only if
        the answers of the backend do not depend on the batch."""
        self.num_requests = 0
        """Requests that joined the sequence of another one."""
        self.num_tokens = 0
        """Tokens that such requests got without a computation."""
        self.is_on = False
        self._answers = answers
        self._send = send
        self._coalesce = coalesce
        self._config = config
        self._block_size = 1
        self._by_key: dict[_Key, SharedAnswer] = {}
        """The shared answers that requests may join."""
        self._by_handle: dict[int, SharedAnswer] = {}
        """The shared answers whose sequence has not ended."""

    def on_ready(self, info: BackendInfo) -> None:
        self.is_on = info.answers_are_exact if self._coalesce is None else self._coalesce
        self._block_size = info.block_size

    @property
    def num_idle_followers(self) -> int:
        """Answers of idle work that have no sequence of their own."""
        return sum(max(0, len(one.readers) - 1) for one in self._by_handle.values() if one.is_idle_work)

    def live_readers(self) -> Iterator[SharedReader]:
        """The readers of all sequences that a second request has joined."""
        now = time.monotonic()
        for shared in self._by_handle.values():
            for one in shared.readers if shared.is_shared else ():
                age = round(now - one.began, 3)
                left = None if one.deadline is None else round(one.deadline - age, 3)
                yield SharedReader(one.answer.request_id, shared.request_id, age, left)

    def key_of(self, request: InferenceRequest) -> _Key | None:
        """What identical requests have in common; None if this request must not share a sequence."""
        params = request.params
        is_determined = params.temperature == 0 or params.seed is not None
        if not self.is_on or not is_determined or params.n != 1 or params.prompt_logprobs is not None:
            return None
        return _Key(
            request.prompt,
            wire.encode(params),
            request.cache_salt,
            request.priority,
            request.session_id,
            request.max_sequence_length,
            request.ttft_target,
            request.adapter_id,
            request.is_idle_work,
            request.prediction,
            request.learns_prompt,
        )

    def find(self, key: _Key | None, request_id: RequestId) -> SharedAnswer | None:
        """The sequence that a request with this key and id may join."""
        shared = None if key is None else self._by_key.get(key)
        return shared if shared is not None and shared.may_join(request_id) else None

    def open(self, key: _Key, answer: RemoteAnswer, request: InferenceRequest, waited: float) -> None:
        """Lets later requests join a sequence that was just submitted."""
        shared = SharedAnswer(self, key, self._reader(answer, request, waited))
        self._by_key[key] = self._by_handle[answer.handle] = shared
        if request.params.logprobs is None:
            answer.kept = array("i")

    def join(
        self, shared: SharedAnswer, answer: RemoteAnswer, request: InferenceRequest, waited: float
    ) -> None:
        """Adds a request to a sequence in flight. It gets all earlier outputs at once."""
        assert isinstance(answer, LateAnswer)
        reader = self._reader(answer, request, waited)
        self.num_requests += 1
        if not shared.is_shared:
            [first] = shared.readers
            shared.begin()
            self._answers[shared.handle] = shared
            # The engine must no longer end the sequence at the first reader's deadline. Each reader has a timer instead.
            if first.deadline is not None:
                self._send(wire.DropDeadline(shared.request_id, shared.handle))
                self._start_timer(first)
        self.num_tokens += shared.num_tokens
        self._start_timer(reader)
        shared.add(reader, answer)

    def cancel(self, answer: RemoteAnswer, reason: str | None) -> None:
        """Cancels an answer that has not ended. If it is the last reader of its sequence, cancels the sequence too."""
        self._leave(
            answer,
            Failure(FailureKind.CANCELLED, reason or ""),
            lambda request_id: wire.Cancel(request_id, answer.handle, reason),
        )

    def finish(self, answer: RemoteAnswer, num_tokens: int) -> None:
        """Ends an answer after its first `num_tokens` tokens. If it is the last reader of its sequence, ends the sequence
        too."""
        self._leave(
            answer, None, lambda request_id: wire.Finish(request_id, answer.handle, num_tokens), num_tokens
        )

    def close(self, handle: int) -> None:
        """Stops the timers of a sequence that has ended. No request joins it any more."""
        shared = self._by_handle.pop(handle, None)
        if shared is not None:
            shared.stop_timers()
            self._close_key(shared)

    def clear(self) -> None:
        """Closes all sequences. Called when the engine has ended."""
        for handle in list(self._by_handle):
            self.close(handle)

    def prefix_hits(self, reader: _Reader) -> int:
        """The prefix hits that the result of a joined request reports: those that it would have had after the first
        request (contract 9). No token of its prompt was computed."""
        if not self._config.scheduler.prefix_caching:
            return 0
        return (len(reader.request.prompt) - 1) // self._block_size * self._block_size

    def _reader(self, answer: RemoteAnswer, request: InferenceRequest, waited: float) -> _Reader:
        default = None if request.is_idle_work else self._config.request_timeout
        deadline = default if request.deadline is None else max(0.0, request.deadline - waited)
        return _Reader(answer, request, time.monotonic(), deadline)

    def _start_timer(self, reader: _Reader) -> None:
        if reader.deadline is not None:
            left = max(0.0, reader.began + reader.deadline - time.monotonic())
            reader.timer = asyncio.get_running_loop().call_later(left, self._expire, reader)

    def _expire(self, reader: _Reader) -> None:
        answer, waited = reader.answer, time.monotonic() - reader.began
        message = f"deadline of {reader.deadline:g} s passed after {waited:.3f} s"
        self._leave(
            answer,
            Failure(FailureKind.DEADLINE, message),
            lambda request_id: wire.Cancel(request_id, answer.handle, message),
        )

    def _leave(
        self,
        answer: RemoteAnswer,
        failure: Failure | None,
        to_engine: Callable[[RequestId], wire.Message],
        num_tokens: int | None = None,
    ) -> None:
        """Ends an answer. If no other answer reads the sequence, sends the engine the message that `to_engine` makes from
        the id of the sequence. An answer that was never shared waits for its result from the engine."""
        shared = self._by_handle.get(answer.handle)
        if shared is None or not shared.is_shared:
            if shared is not None:
                self._close_key(shared)
            self._send(to_engine(answer.request_id))
            return
        reader = next((one for one in shared.readers if one.answer is answer), None)
        if reader is None:
            return  # it has left already
        shared.readers = tuple(one for one in shared.readers if one is not reader)
        if reader.timer is not None:
            reader.timer.cancel()
        if not shared.readers:
            self._close_key(shared)
            self._send(to_engine(shared.request_id))
        answer.result = self._early_result(reader, failure, num_tokens)
        answer.put(wire.Output(answer.handle, None, finish_reason=answer.result.finish_reason))

    def _early_result(
        self, reader: _Reader, failure: Failure | None, num_tokens: int | None
    ) -> GenerationResult:
        """The result of an answer that ends before its sequence. Only the engine knows how long the request waited, so
        all time before the first token is prefill time."""
        answer, request, now = reader.answer, reader.request, time.monotonic()
        count = answer.num_tokens if num_tokens is None else num_tokens
        first = now if answer.first_at is None else answer.first_at
        is_late = isinstance(answer, LateAnswer)
        return GenerationResult(
            answer.request_id,
            (),
            "",
            state=RequestState.COMPLETED if failure is None else RequestState.CANCELLED,
            finish_reason=FinishReason.STOP if failure is None else FinishReason.CANCELLED,
            error=None if failure is None else failure.message or None,
            failure=None if failure is None else failure.kind,
            waiting_time=0.0,
            prefill_time=first - reader.began,
            decode_time=now - first,
            time_to_first_token=None if answer.first_at is None else first - reader.began,
            decode_steps=max(0, count - 1),
            prompt_token_count=len(request.prompt),
            cached_token_count=self.prefix_hits(reader) if is_late else 0,
            preemptions=0,
            num_tokens=count,
            metadata=request.metadata,
        )

    def _close_key(self, shared: SharedAnswer) -> None:
        if self._by_key.get(shared.key) is shared:
            del self._by_key[shared.key]
