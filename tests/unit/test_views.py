"""Views of plans and rows agree with the plan."""

from __future__ import annotations

from weft.backends.noop import NoopBackend
from weft.clock import VirtualClock
from weft.config import KvCachePoolConfig, SchedulerConfig, ServingEngineConfig
from weft.engine.serving import ServingEngine
from weft.plan import IterationPlan
from weft.request import InferenceRequest, RequestId, SamplingParams
from weft.scheduling.views import BatchType, ScheduledBatch

MIXED = IterationPlan(
    step=3,
    num_decodes=2,
    request_ids=(RequestId("4"), RequestId("5"), RequestId("6")),
    rows=(0, 1, 2),
    starts=(9, 7, 16),
    counts=(1, 1, 3),
    samples=(True, True, False),
)


def test_a_plan_can_be_read_as_prefill_and_decode_tasks() -> None:
    assert [(t.request_id, t.position) for t in MIXED.decode_tasks] == [("4", 9), ("5", 7)]
    assert [(t.request_id, t.start, t.num_tokens, t.samples) for t in MIXED.prefill_tasks] == [
        ("6", 16, 3, False)
    ]


def test_micro_batches_hold_every_token_once_and_at_most_max_tokens() -> None:
    batch = ScheduledBatch(MIXED)
    parts = batch.micro_batches(2)
    assert [len(part.tokens) for part in parts] == [2, 2, 1]
    assert [token for part in parts for token in part.tokens] == list(batch.tokens)
    assert [part.batch_type for part in parts] == [BatchType.DECODE, BatchType.PREFILL, BatchType.PREFILL]
    assert batch.batch_type is BatchType.MIXED
    assert (batch.stats.tokens, batch.stats.prefill_tokens, batch.stats.samples) == (5, 3, 2)


def test_micro_batches_list_the_tokens_and_positions_that_a_step_computes() -> None:
    scheduler = SchedulerConfig(
        max_running=3, max_tokens_per_step=16, max_prefill_tokens=8, max_chunk_tokens=8
    )
    config = ServingEngineConfig(scheduler=scheduler, cache=KvCachePoolConfig(num_blocks=16, block_size=4))
    engine = ServingEngine(NoopBackend(), config, clock=VirtualClock(), seed=1)
    engine.submit(InferenceRequest((11, 12, 13), SamplingParams(max_tokens=4)))
    first = engine.scheduler.schedule()
    assert first is not None
    (part,) = ScheduledBatch(first, engine.scheduler.sequences).micro_batches(8)
    assert (part.token_ids(), part.positions()) == ([11, 12, 13], [0, 1, 2])
    engine.submit(InferenceRequest((21, 22, 23, 24, 25), SamplingParams(max_tokens=4)))
    second = engine.scheduler.schedule()
    assert second is not None
    parts = ScheduledBatch(second, engine.scheduler.sequences).micro_batches(4)
    assert [part.token_ids() for part in parts] == [[None, 21, 22, 23], [24, 25]], (
        "the first token is being sampled"
    )
    assert [part.positions() for part in parts] == [[3, 0, 1, 2], [3, 4]]
    assert ScheduledBatch(MIXED).micro_batches(5)[0].positions() == [9, 7, 16, 17, 18]
    assert ScheduledBatch(MIXED).micro_batches(5)[0].token_ids() == [None] * 5


def test_the_last_token_of_a_split_prompt_is_no_decode() -> None:
    prompt = IterationPlan(
        step=0,
        num_decodes=0,
        request_ids=(RequestId("1"),),
        rows=(0,),
        starts=(0,),
        counts=(5,),
        samples=(True,),
    )
    kinds = [part.batch_type for part in ScheduledBatch(prompt).micro_batches(4)]
    assert kinds == [BatchType.PREFILL, BatchType.PREFILL]


def test_the_sequence_batch_lists_the_positions_of_every_sequence() -> None:
    assert ScheduledBatch(MIXED).sequence_batch.ranges == (range(9, 10), range(7, 8), range(16, 19))


def test_slots_list_every_row_with_its_request_and_progress() -> None:
    clock = VirtualClock()
    config = ServingEngineConfig(
        scheduler=SchedulerConfig(max_running=3, max_tokens_per_step=8, max_prefill_tokens=8),
        cache=KvCachePoolConfig(num_blocks=16, block_size=4),
        overlap=False,
    )
    engine = ServingEngine(NoopBackend(), config, clock=clock)
    request_id = engine.submit(InferenceRequest((1, 2, 3, 4, 5, 6, 7, 8, 9), SamplingParams(max_tokens=4)))
    engine.run_iteration()
    (slot,) = [s for s in engine.metrics().slots if s.state != "idle"]
    assert (slot.request_id, slot.state, slot.context_used, slot.context_limit) == (
        request_id,
        "prefilling",
        8,
        13,
    )
    for _ in range(2):
        engine.run_iteration()
        clock.advance(0.5)
    (slot,) = [s for s in engine.metrics().slots if s.state != "idle"]
    assert (slot.state, slot.context_used, slot.tokens_per_second) == ("decoding", 10, 1.0)
    assert len(engine.metrics().slots) == 3
