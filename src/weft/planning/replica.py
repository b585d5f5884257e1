"""One replica: the real scheduler and engine loop over a cost model, on a virtual clock of its own."""

from __future__ import annotations

import dataclasses
import random
import threading
from array import array
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple
from zlib import crc32

from weft.backends.cost_model import CostModelBackend, SimulatedStep
from weft.clock import VirtualClock
from weft.config import KvCachePoolConfig, ServingEngineConfig
from weft.engine.loop import EngineCore
from weft.errors import InvalidRequestError, QueueFullError, WeftError
from weft.lengths import LengthFeatures, LengthPredictor
from weft.plan import BackendInfo, IterationPlan, StepResult
from weft.planning.costs import shape_of
from weft.planning.outcome import Outcome
from weft.planning.profile import MachineProfile
from weft.request import GenerationResult, InferenceRequest, Priority, RequestId, SamplingParams, TokenOutput
from weft.routing import ReplicaLoad, key_of
from weft.scheduling.cache.manager import KvCacheManager
from weft.scheduling.scheduler import ContinuousBatchScheduler
from weft.scheduling.sequence import Sequence

VOCABULARY = 1 << 48
"""Token ids are made up: equal ids stand for equal text."""

Segment = tuple[int, int]
"""(first token id, count): consecutive token ids."""


class PlannedRequest(NamedTuple):
    """A request of the load. Prompts with a common beginning begin with the same segments."""

    number: int
    at: float
    segments: tuple[Segment, ...]
    answer_tokens: int
    session: str | None = None
    priority: int = 1
    is_idle_work: bool = False
    """Idle work has no targets."""
    is_cut: bool = False
    """Whether the description asked for more tokens than the context has."""

    @property
    def prompt_tokens(self) -> int:
        return sum(count for _, count in self.segments)

    def prompt(self) -> tuple[int, ...]:
        tokens: list[int] = []
        for first, count in self.segments:
            tokens.extend(range(first, first + count))
        return tuple(tokens)


def answer_segment(request: PlannedRequest) -> Segment:
    """The tokens that the cost model gives as the answer: the next turn of a conversation begins with them."""
    return crc32(request_id(request.number).encode()) + request.prompt_tokens, request.answer_tokens


def request_id(number: int) -> RequestId:
    return RequestId(f"plan-{number}")


@dataclass(frozen=True)
class Targets:
    """Limits in seconds. None: no limit."""

    first_token: float | None = None
    gap: float | None = None
    """For 99% of the gaps of a request."""


NO_TARGETS = Targets()


@dataclass(frozen=True)
class ReplicaSettings:
    """What all replicas have in common."""

    profile: MachineProfile
    config: ServingEngineConfig
    context: int | None = None
    """Longest context. None: that of the profile."""
    targets: Targets = NO_TARGETS
    seed: int = 0
    reports_keys: bool = True


class ReplicaReport(NamedTuple):
    """The state of a replica at the end of a window."""

    load: ReplicaLoad
    waiting: int
    busy_seconds: float
    reading_seconds: float
    """Seconds until the server has read all requests that were assigned."""
    first_tokens: tuple[float, ...]
    """The times to first tokens since the last report, without those of idle work."""
    is_idle: bool
    added: bytes
    """Keys of KV blocks that are new in its cache, as 64-bit numbers."""
    removed: bytes


class _ArrivalClock(VirtualClock):
    """Adds requests to the scheduler at their own times, while it advances: a server adds them while a step runs."""

    __slots__ = ("arrivals", "deliver")

    def __init__(
        self,
        now: float,
        arrivals: deque[tuple[float, PlannedRequest]],
        deliver: Callable[[PlannedRequest], None],
    ) -> None:
        super().__init__(now)
        self.arrivals = arrivals
        """The time at which each request reaches the engine, in order."""
        self.deliver = deliver

    def advance_to(self, moment: float) -> None:
        arrivals = self.arrivals
        while arrivals and arrivals[0][0] <= moment:
            at, request = arrivals.popleft()
            self.now = max(self.now, at)
            self.deliver(request)
        self.now = max(self.now, moment)


class _NoisyCosts:
    """The costs of the profile, with a ratio that is drawn for each step."""

    def __init__(self, profile: MachineProfile, block_size: int, source: random.Random) -> None:
        self._costs, self._draw = profile.costs, source.random
        self.per_token = profile.costs.per_token
        self.swap_per_block = profile.costs.swap_per_block

        self._block_size = block_size
        self.kv_cache: KvCacheManager | None = None
        """Says how many different blocks are in use. None: no block is shared."""

    def seconds(self, plan: IterationPlan) -> float:
        if not plan.starts:
            return 0.0
        num_blocks = None if self.kv_cache is None else self.kv_cache.pool.num_referenced
        return self._costs.noisy(self._costs.of(shape_of(plan, num_blocks, self._block_size)), self._draw())


class ProfiledBackend(CostModelBackend):
    """The cost model with the step times and the KV cache of a profile. It knows when its oldest step ends."""

    def __init__(self, clock: VirtualClock, settings: ReplicaSettings, source: random.Random) -> None:
        self._profile = profile = settings.profile
        room, cache = profile.room, settings.config.cache
        ratio = cache.block_size / room.block_size
        if cache.memory is not None and not room.bytes_per_block:
            raise InvalidRequestError(
                "memory is set, and the profile does not say how many bytes a KV block takes; set num_blocks instead, or "
                "measure the machine with `weft profile`",
                field="memory",
            )
        self._bytes_per_block = max(1, round(room.bytes_per_block * ratio))
        blocks = cache.blocks_in_memory(self._bytes_per_block) or max(1, int(room.num_blocks / ratio))
        self._swap_blocks = max(0, int(room.swap_blocks / ratio))
        self.step_costs = _NoisyCosts(profile, cache.block_size, source)
        super().__init__(
            clock,
            self.step_costs,
            vocabulary_size=VOCABULARY,
            max_context=min(room.max_context, settings.context or room.max_context),
            default_blocks=blocks,
        )
        self._pending: deque[tuple[IterationPlan, float]] = deque()

    def allocate(self, pool: KvCachePoolConfig, num_rows: int, max_tokens: int = 0) -> BackendInfo:
        swap_blocks = self._swap_blocks if pool.swap_blocks is None else pool.swap_blocks
        if pool.store_blocks is None:
            pool = dataclasses.replace(pool, num_blocks=None, memory=None)
        info = super().allocate(dataclasses.replace(pool, swap_blocks=swap_blocks), num_rows, max_tokens)
        room = self._profile.room
        store_ratio = info.bytes_per_store_block / info.bytes_per_block if info.bytes_per_block else 0.0
        return dataclasses.replace(
            info,
            bytes_per_block=self._bytes_per_block,
            bytes_per_store_block=round(self._bytes_per_block * store_ratio),
            recompute_seconds_per_token=room.recompute_seconds_per_token,
            eager_blocks=room.eager_blocks,
        )

    @property
    def next_end(self) -> float | None:
        """When the oldest submitted step ends. None: there is none."""
        if not self._pending:
            return None
        plan, end = self._pending[0]
        return max(end, min(self._swap_ends.values())) if not plan.rows and self._swap_ends else end

    def submit(self, plan: IterationPlan) -> SimulatedStep:
        step = super().submit(plan)
        self._pending.append((plan, step.end))
        return step

    def _finish(self, step: SimulatedStep) -> StepResult:
        result = super()._finish(step)
        self._pending.popleft()
        return result


class _Flight:
    """A request that has not ended."""

    __slots__ = ("arrived", "features", "last", "planned", "slow_gaps")

    def __init__(self, planned: PlannedRequest, arrived: float, features: LengthFeatures) -> None:
        self.planned = planned
        self.arrived = arrived
        """When it reached the engine."""
        self.features = features
        self.last = -1.0
        self.slow_gaps = 0


class Replica:
    """Owns a scheduler, its backend and its clock, and the requests that were assigned but have not arrived."""

    def __init__(self, number: int, settings: ReplicaSettings, now: float = 0.0) -> None:
        self.number = number
        self._targets = settings.targets
        self._request_seconds = settings.profile.request_seconds
        self._arrivals: deque[tuple[float, PlannedRequest]] = deque()
        self._clock = clock = _ArrivalClock(now, self._arrivals, self._deliver)
        self._horizon = now
        self._server_free_at = 0.0
        """When the server has read the last request that was assigned. It reads one after another."""
        config = settings.config
        if not config.overlap:
            raise InvalidRequestError(
                "engine.overlap is false; only engines that plan ahead can be simulated: leave it out",
                field="overlap",
            )
        # The number of a removed replica is used again. The time gives the new one other noise.
        noise = random.Random(f"{settings.seed} {number}" + (f" {now}" if now else ""))
        self._backend = backend = ProfiledBackend(clock, settings, noise)
        limits = config.scheduler
        info = backend.allocate(config.cache, limits.max_running, limits.max_tokens_per_step)
        self.scheduler = scheduler = ContinuousBatchScheduler(limits, info, clock)
        if not info.store_blocks:
            backend.step_costs.kv_cache = scheduler.kv_cache
        self._core = EngineCore(scheduler, backend, clock, threading.RLock())
        self._lengths = LengthPredictor()
        self._flights: dict[RequestId, _Flight] = {}
        self._first_tokens: list[float] = []
        self.outcome = Outcome()
        if settings.reports_keys:
            for pool in (scheduler.kv_cache.pool, scheduler.kv_cache.store):
                pool.changed = set()

    def assign(self, requests: SequenceOf[PlannedRequest]) -> None:
        """Adds requests that arrive later, in order of arrival."""
        for request in requests:
            self._server_free_at = max(self._server_free_at, request.at) + self._request_seconds
            self._arrivals.append((self._server_free_at, request))

    def run_until(self, horizon: float) -> None:
        """Runs all iterations that end by `horizon`."""
        self._horizon = horizon
        scheduler, backend, arrivals, clock = self.scheduler, self._backend, self._arrivals, self._clock
        while True:
            if scheduler.has_work:
                end = backend.next_end
                if end is not None and end > horizon:
                    return
                if self._core.run_overlapped():
                    self._collect()
                    continue
                self._collect()
                if not scheduler.has_work:
                    continue
                if not arrivals:
                    raise WeftError(f"replica {self.number} has requests that can never run")
            if not arrivals or arrivals[0][0] > horizon:
                return
            clock.advance_to(arrivals[0][0])

    def report(self) -> ReplicaReport:
        scheduler = self.scheduler
        model, running = scheduler.cost_model, scheduler.running
        unfinished = sum(max(0, one.prompt_length - one.scheduled) for one in running)
        step = row = token = 0.0
        if model.is_ready:
            context = sum(len(one.tokens) for one in running)
            step = model.decode_seconds(len(running), context) if running else 0.0
            row, token = model.chunk_seconds(512, 1), model.chunk_seconds(0, 512) / 512
        unfinished += sum(one.prompt_tokens for _, one in self._arrivals)
        load = ReplicaLoad(scheduler.queue.waiting_tokens + unfinished, len(running), step, row, token)
        if len(scheduler.queue):
            self.outcome.limits[self._limit()] += 1
        elif len(self._arrivals) > 1:
            self.outcome.limits["reading"] += 1
        first_tokens, self._first_tokens = tuple(self._first_tokens), []
        added, removed = self._key_changes()
        return ReplicaReport(
            load=load,
            waiting=len(scheduler.queue) + len(self._arrivals),
            busy_seconds=self._backend.busy_seconds,
            reading_seconds=max(0.0, self._server_free_at - self._horizon),
            first_tokens=first_tokens,
            is_idle=not scheduler.has_work and not self._arrivals,
            added=added,
            removed=removed,
        )

    def finish(self) -> Outcome:
        """The outcome so far, with the totals of the scheduler."""
        stats, outcome = self.scheduler.stats, self.outcome
        outcome.steps, outcome.step_sequences = stats.steps, stats.step_sequences
        outcome.preemptions, outcome.busy_seconds = stats.preemptions, self._backend.busy_seconds
        return outcome

    # ------------------------------------------------------------------ requests

    def _deliver(self, planned: PlannedRequest) -> None:
        """Adds a request to the scheduler, as the server does: with the expected length of its answer."""
        self.outcome.requests += 1
        features = LengthFeatures("", 0, 0, planned.prompt_tokens, planned.answer_tokens)
        request = InferenceRequest(
            planned.prompt(),
            SamplingParams(max_tokens=planned.answer_tokens, temperature=0.0, ignore_eos=True),
            priority=Priority(planned.priority),
            session_id=planned.session,
            is_idle_work=planned.is_idle_work,
            request_id=request_id(planned.number),
            expected=self._lengths.predict(features).expected(),
        )
        try:
            self.scheduler.add(Sequence(request, 0))
        except (InvalidRequestError, QueueFullError):
            self.outcome.refused += 1
            return
        self._flights[request.request_id] = _Flight(planned, self._clock.now, features)

    def _collect(self) -> None:
        """Folds the outputs and results of a step into the outcome."""
        tokens, outcome, now = self.scheduler.tokens, self.outcome, self._clock.now
        pool = self.scheduler.kv_cache.pool
        outcome.kv_peak = max(outcome.kv_peak, pool.num_referenced / pool.num_blocks)
        outputs, results = self.scheduler.take_outputs()
        if not outputs:
            return
        gaps = tokens.token_gaps
        for gap, times in gaps.items():
            outcome.gap.record(gap, times)
        if self._targets.gap is not None:
            self._count_slow_gaps(outputs, now, self._targets.gap)
        gaps.clear()
        if tokens.first_token_times:
            tokens.first_token_times.clear()
            for output in outputs:
                planned = self._flights[output.request_id].planned
                if output.sequence_length == planned.prompt_tokens + 1 and not planned.is_idle_work:
                    self._first_tokens.append(now - planned.at)
        for result in results:
            self._end(result, now)

    def _count_slow_gaps(self, outputs: list[TokenOutput], now: float, target: float) -> None:
        flights = self._flights
        for output in outputs:
            flight = flights[output.request_id]
            if now - flight.last > target and flight.last >= 0:
                flight.slow_gaps += 1
            flight.last = now

    def _end(self, result: GenerationResult, now: float) -> None:
        flight, outcome, targets = self._flights.pop(result.request_id), self.outcome, self._targets
        num_tokens = len(result.tokens)
        # Its limit is the length of its answer, so it ended where the real one did.
        self._lengths.learn(flight.features, num_tokens, was_cut=False)
        outcome.completed += 1
        outcome.prompt_tokens += result.prompt_token_count
        outcome.cached_tokens += result.cached_token_count
        outcome.output_tokens += num_tokens
        outcome.ended = max(outcome.ended, now)
        outcome.end_to_end.record(now - flight.planned.at)
        first = flight.arrived - flight.planned.at + (result.time_to_first_token or 0.0)
        outcome.first_token.record(first)
        has_targets = not flight.planned.is_idle_work
        is_late = has_targets and targets.first_token is not None and first > targets.first_token
        is_slow = has_targets and flight.slow_gaps > (num_tokens - 1) // 100  # one slow gap in 100 is allowed
        outcome.late += is_late
        outcome.slow += is_slow
        outcome.good += not is_late and not is_slow

    # ------------------------------------------------------------------ state for reports

    def _limit(self) -> str:
        """What the first waiting request waits for."""
        cache, first = self.scheduler.kv_cache, self.scheduler.queue.peek()
        if not cache.free_rows:
            return "rows"
        if first is None:
            return "steps"
        block_size = self.scheduler.info.block_size
        return "KV cache" if cache.min_available * block_size < len(first.tokens) else "steps"

    def _key_changes(self) -> tuple[bytes, bytes]:
        pool, store = self.scheduler.kv_cache.pool, self.scheduler.kv_cache.store
        if not pool.changed and not store.changed:
            return b"", b""
        added, removed = array("Q"), array("Q")
        for block_hash in (pool.changed or set()) | (store.changed or set()):
            is_cached = pool.lookup(block_hash) is not None or store.lookup(block_hash) is not None
            (added if is_cached else removed).append(key_of(block_hash))
        for one in (pool, store):
            if one.changed:
                one.changed.clear()
        return added.tobytes(), removed.tobytes()
