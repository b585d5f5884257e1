"""Makes the frames of the live page from a scheduler, in an engine or in a replay."""

from __future__ import annotations

import dataclasses

from weft.config import PriorityPolicy
from weft.engine.engine_metrics import EngineMetrics
from weft.live import BLOCKS_PER_FRAME, MAX_REQUESTS, LiveFrame, LiveInfo, LiveRequest
from weft.metrics import SchedulerStats
from weft.scheduling.scheduler import ContinuousBatchScheduler
from weft.scheduling.sequence import Sequence

LAPSE_SECONDS = 5.0
"""The scheduler stops recording steps and events this many seconds after the last frame of the live page."""

_TOTALS = tuple(field.name for field in dataclasses.fields(SchedulerStats))


class LiveRecorder:
    """Remembers what earlier frames have shown: the number of steps, and the block at which the next frame begins.
    Callers hold the engine's lock.

    The scheduler records steps and events (`History`) while frames are asked for. The first frame has no steps and no
    events, and neither has the first frame after a pause.
    """

    def __init__(
        self,
        scheduler: ContinuousBatchScheduler,
        metrics: EngineMetrics,
        *,
        lapse: float = LAPSE_SECONDS,
        blocks_per_frame: int = BLOCKS_PER_FRAME,
    ) -> None:
        self._scheduler = scheduler
        self._metrics = metrics
        self._lapse = lapse
        self._blocks_per_frame = blocks_per_frame
        self._next_block = 0
        self._steps_before = 0
        """Steps up to the last frame."""

    def info(self) -> LiveInfo:
        config, info = self._scheduler.config, self._scheduler.info
        has_target = config.policy is PriorityPolicy.ADAPTIVE
        return LiveInfo(
            num_blocks=info.num_blocks,
            store_blocks=info.store_blocks,
            block_size=info.block_size,
            swap_blocks=info.swap_blocks + info.store_swap_blocks,
            num_rows=config.max_running,
            max_context=self._scheduler.max_sequence_length,
            policy=config.policy.value,
            step_target=config.target_inter_token_latency if has_target else None,
            device=info.device,
        )

    def start(self, now: float) -> None:
        """Starts recording, as a frame does. A replay calls it before the first event of its log."""
        history = self._scheduler.history
        if now >= history.until:
            history.take_steps()
            history.take_events()
            self._steps_before = self._scheduler.stats.steps
        history.until = now + self._lapse

    def frame(self, now: float) -> LiveFrame:
        """A snapshot, and the steps and events since the last call."""
        scheduler = self._scheduler
        self.start(now)
        steps = scheduler.history.take_steps()
        events, events_left_out = scheduler.history.take_events()
        num_steps = scheduler.stats.steps - self._steps_before
        self._steps_before = scheduler.stats.steps
        cache = scheduler.kv_cache.stats()
        first_block, blocks = self._block_states()
        first_token_counts, gap_counts = self._metrics.bucket_counts()
        num_waiting = len(scheduler.queue) + len(scheduler.idle_queue)
        return LiveFrame(
            at=now,
            step=scheduler.applied_step,
            requests=self._requests(),
            num_running=len(scheduler.sequences) - num_waiting,
            num_waiting=num_waiting,
            steps=steps,
            steps_left_out=num_steps - len(steps),
            events=events,
            events_left_out=events_left_out,
            first_block=first_block,
            blocks=blocks,
            blocks_used=cache.blocks_used,
            blocks_cached=cache.blocks_cached,
            store_blocks_used=cache.store_blocks_used,
            swap_blocks_used=cache.swap_blocks_used + cache.store_swap_blocks_used,
            totals={name: getattr(scheduler.stats, name) for name in _TOTALS},
            first_token_counts=first_token_counts,
            gap_counts=gap_counts,
        )

    def _block_states(self) -> tuple[int, str]:
        """The index of the next block to show, and the states of up to `_blocks_per_frame` blocks from there on."""
        kv_cache = self._scheduler.kv_cache
        first_stored = kv_cache.pool.num_blocks
        num_blocks = first_stored + kv_cache.store.num_blocks
        first = self._next_block
        end = min(first + self._blocks_per_frame, num_blocks)
        self._next_block = end % num_blocks
        full = kv_cache.pool.states(first, min(end, first_stored))
        stored = kv_cache.store.states(max(first, first_stored), end)
        return first, full + stored.upper()

    def _requests(self) -> tuple[LiveRequest, ...]:
        scheduler = self._scheduler
        shown = [*scheduler.running, *scheduler.paused, *scheduler.resuming]
        shown.sort(key=_row)
        for queue in (scheduler.queue, scheduler.idle_queue):
            room = MAX_REQUESTS - len(shown)
            if room > 0:
                shown += queue.head(room)
        paused = set(map(id, scheduler.paused))
        return tuple(_live_request(s, id(s) in paused) for s in shown[:MAX_REQUESTS])


def _row(sequence: Sequence) -> int:
    allocation = sequence.allocation
    return -1 if allocation is None or allocation.row is None else allocation.row


def _live_request(sequence: Sequence, is_paused: bool) -> LiveRequest:
    allocation, proposer = sequence.allocation, sequence.draft_proposer
    state = sequence.seq_state.value
    if is_paused:
        state = "paused"
    elif sequence.swap_id is not None:
        state = "swapped"
    return LiveRequest(
        request_id=sequence.request_id,
        row=_row(sequence),
        state=state,
        priority=int(sequence.request.priority),
        is_idle_work=sequence.is_idle_work,
        prompt_length=sequence.prompt_length,
        cached_tokens=sequence.cached_tokens or 0,
        computed=sequence.computed,
        num_tokens=len(sequence.tokens),
        limit=sequence.limit,
        num_drafted=0 if proposer is None else proposer.num_drafted,
        num_accepted=0 if proposer is None else proposer.num_accepted,
        preemptions=sequence.preemptions,
        num_blocks=0 if allocation is None else len(allocation.blocks or allocation.swap_slots),
        arrived_at=sequence.arrival,
        admitted_at=sequence.admitted_at,
        first_token_at=sequence.first_token_at,
        deadline_at=sequence.deadline_at,
    )
