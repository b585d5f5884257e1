"""Invariants of idle work (contract 15): when it may run, and that interactive requests get the plans that they would get
without it."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from typing import Any

from weft.config import PreemptionMode
from weft.plan import IterationPlan
from weft.request import FinishReason, RequestId, RequestState
from weft.scheduling.prompt_order import SHARE_OF_TARGET
from weft.scheduling.scheduler import ContinuousBatchScheduler
from weft.simulation.require import require


class IdleChecker:
    """Plans every step of a scheduler, and checks its plans while it has idle work."""

    def __init__(self, scheduler: ContinuousBatchScheduler) -> None:
        self._scheduler = scheduler
        self._schedule = scheduler.schedule
        self._plans = itertools.count()
        self.plans_beside_paused = self.plans_with_idle_work_added = self.plans_compared = 0

    def schedule(self) -> IterationPlan | None:
        scheduler = self._scheduler
        idle = {rid for rid, s in scheduler.sequences.items() if s.is_idle_work}
        if not idle or scheduler.is_retrying:
            return self._schedule()
        # Every fourth plan, because planning on a copy is slow.
        is_mixed = len(idle) < len(scheduler.sequences) and next(self._plans) % 4 == 0
        expected = _plan_without(idle, scheduler) if is_mixed else {}
        plan = self._schedule()
        if is_mixed:
            self.plans_compared += 1
            found = _interactive_part(plan, idle)
            require(found == expected, f"interactive requests get {found}; without idle work {expected}")
        self._check(plan, idle)
        return plan

    def _check(self, plan: IterationPlan | None, idle: set[RequestId]) -> None:
        scheduler = self._scheduler
        planned = set(plan.request_ids) if plan is not None else set()
        others = [s for rid, s in scheduler.sequences.items() if rid not in idle]
        has_interactive_work = any(not s.is_finishing or s.request_id in planned for s in others)
        require(
            has_interactive_work or not scheduler.paused,
            "a sequence is paused, and no interactive request has work",
        )
        if not has_interactive_work:
            return
        require(
            not any(s.is_idle_work and not s.is_finishing for s in scheduler.running),
            "idle work runs beside interactive requests",
        )
        require(
            not any(s.has_announced for s in scheduler.paused), "other sequences would wait for a paused one"
        )
        self.plans_beside_paused += bool(scheduler.paused)
        if plan is None or not planned & idle:
            return
        self.plans_with_idle_work_added += 1
        require(scheduler.info.extra_rows_are_cheap, "a step has idle work and interactive requests")
        waiting = [s for s in others if s.state is not RequestState.RUNNING]
        require(not waiting, "a step has idle work, and an interactive request waits")
        prompts = set(plan.request_ids[plan.first_prefill :])
        require(prompts <= idle, "a step has idle work and an interactive prompt")
        admitted = any(s.admitted_step == plan.step for s in scheduler.paused)
        require(not admitted or scheduler.kv_cache.free_rows > 0, "idle work took the last row")
        counts = zip(plan.starts, plan.counts, strict=True)
        pairs = sum(count * start + count * (count + 1) // 2 for start, count in counts)
        seconds = scheduler.cost_model.predict(plan.num_tokens, sum(plan.starts) + plan.num_tokens, pairs)
        target = SHARE_OF_TARGET * scheduler.config.target_inter_token_latency
        require(
            seconds <= target * 1.0001, f"a step with idle work takes {seconds:.4f} s; target: {target:.4f} s"
        )


def _plan_without(idle: set[RequestId], scheduler: ContinuousBatchScheduler) -> dict[str, Any]:
    """What the next plan would give interactive requests if the memory of idle ones were free. Plans on a copy of the
    scheduler."""
    shared = (scheduler.config, scheduler.info, *(s.request for s in scheduler.sequences.values()))
    other = copy.deepcopy(scheduler, {id(value): value for value in shared})
    for queue, copied in ((scheduler.queue, other.queue), (scheduler.idle_queue, other.idle_queue)):
        for item, twin in zip(queue._heap, copied._heap, strict=True):
            # deepcopy copies a NamedTuple in a cycle twice; the sequence must refer to the one in the heap.
            if item.sequence.queue_item is item:
                twin.sequence.queue_item = twin
    # Deadlines first: an idle request that ends now, in a step in flight, holds its memory until that step ends, in this
    # plan as in the real one.
    other._expire()
    table, now = other._sequence_table, other._clock()
    # By recompute, so that these preemptions start no swaps.
    table._config = dataclasses.replace(other.config, preemption=PreemptionMode.RECOMPUTE)
    for sequence in [other.sequences[rid] for rid in idle & other.sequences.keys()]:
        if sequence.state is RequestState.RUNNING and not sequence.is_finishing:
            table.preempt(sequence, other._next_step, now)
        if sequence.queue_item is not None:
            table.remove(sequence)
            sequence.finish_reason = FinishReason.CANCELLED
    table._config = other.config
    return _interactive_part(ContinuousBatchScheduler.schedule(other), idle)


def _interactive_part(plan: IterationPlan | None, idle: set[RequestId]) -> dict[str, Any]:
    if plan is None:
        return {}
    columns = zip(plan.request_ids, plan.starts, plan.counts, plan.samples, strict=True)
    names = plan.request_ids[plan.num_decodes : plan.first_prefill]
    part: dict[str, Any] = {
        "entries": [entry for entry in columns if entry[0] not in idle],
        "drafts": [(rid, tokens) for rid, tokens in zip(names, plan.drafts, strict=True) if rid not in idle],
        "preempted": [rid for rid in plan.preempted if rid not in idle],
        "swaps": [t.request_id for t in (*plan.swap_in, *plan.swap_out) if t.request_id not in idle],
    }
    return {name: values for name, values in part.items() if values}
