"""How many contexts run at the same time in a given memory, found by running them.

The search computes nothing. The real engine schedules on the pool of the real backend, and `PlanOnlyBackend` executes
the plans. With `confirm` the real backend then computes the largest number of contexts too. Contexts start one after
another and end together, so that at the end all of them have their full length.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.kv_cache_kinds import Kind, Setup, engine_config
from weft.config import KvCachePoolConfig, ServingEngineConfig
from weft.engine.serving import ServingEngine
from weft.errors import WeftError
from weft.plan import BackendInfo, IterationPlan, StepResult
from weft.request import Grammar, InferenceRequest, RequestId, RequestState, SamplingParams, TokenOutput

NEW_TOKENS = 32
"""The length of the shortest answer. It belongs to the context whose prompt is computed last. Earlier contexts generate
more tokens, so that all end at the same time."""
_ITERATIONS = 12
"""Maximum iterations of `align_ends`. One is not enough: new lengths change the step in which each prompt is done."""


@dataclass(frozen=True)
class Admission:
    """The most contexts that fit into `memory` with one kind of cache."""

    kind: str
    memory: int
    """Bytes allocated for the cache."""
    context: int
    contexts: int
    shortest: int
    """Tokens of the shortest context when all ran at the same time."""
    seconds: float | None = None
    """Duration on the real backend; None if the contexts were only planned."""


@dataclass(frozen=True)
class JointRun:
    """Result of running several contexts together."""

    context: int
    """Tokens of each context at its end."""
    requested: int
    most: int
    """Most contexts that ran at the same time."""
    preemptions: int
    shortest: int
    """Tokens of the shortest context in the last step in which all contexts ran; 0 if there was no such step."""
    first_steps: tuple[int, ...]
    """The step of the first token of each context."""

    @property
    def fits(self) -> bool:
        """Whether all contexts ran at the same time, at almost their full length, without a preemption."""
        is_whole = self.shortest > self.context - NEW_TOKENS
        return self.most == self.requested and is_whole and not self.preemptions


Lengths = Sequence[tuple[int, int]]
"""Tokens of the prompt and of the answer, for each context."""


def admit(
    setup: Setup, kind: Kind, context: int, *, contexts: int, memory: int | None, confirm: bool = False
) -> Admission:
    """Finds how many contexts fit into `memory`. None: as much memory as `contexts` contexts need in full precision."""
    rows = 6 * contexts + 2
    blocks = -(-context // KvCachePoolConfig().block_size)
    sizes = {"num_blocks": contexts * blocks} if memory is None else {"memory": memory}
    pool = kind.pool(**sizes)
    with setup.open(pool, context, rows) as engine:
        info = engine.scheduler.info
        lengths, joint = largest(info, engine_config(pool, rows), context)
        began, seconds = time.perf_counter(), None
        if confirm:
            joint = run_together(engine, lengths)
            seconds = time.perf_counter() - began
    if not joint.fits:
        raise WeftError(
            f"{kind.name}: {joint.requested} contexts fit when planned, but {joint.most} ran at the same time, the shortest of "
            f"{joint.shortest} tokens, with {joint.preemptions} preemptions"
        )
    return Admission(kind.name, info.cache_bytes, context, len(lengths), joint.shortest, seconds)


def largest(info: BackendInfo, config: ServingEngineConfig, context: int) -> tuple[Lengths, JointRun]:
    """Finds the largest number of contexts that run together without preemption. Returns their lengths and the
    result of that run."""
    count = _estimate(info, context)
    lengths, joint = align_ends(info, config, context, count)
    # The loop ends: one context alone fits, or the engine rejects it.
    while not joint.fits:
        count -= 1
        lengths, joint = align_ends(info, config, context, count)
    while (more := align_ends(info, config, context, count + 1))[1].fits:
        count += 1
        lengths, joint = more
    return lengths, joint


def _estimate(info: BackendInfo, context: int) -> int:
    """The number of contexts with which the search starts."""
    blocks = -(-context // info.block_size)
    if not info.store_blocks:
        return max(1, info.num_blocks // blocks)
    tail = min(blocks, info.tail_blocks + 1)
    return max(1, min(info.num_blocks // tail, info.store_blocks // max(1, blocks - info.tail_blocks)))


def align_ends(
    info: BackendInfo, config: ServingEngineConfig, context: int, count: int
) -> tuple[Lengths, JointRun]:
    """Finds lengths with which `count` contexts end at about the same step. Returns them and the result of that run."""
    lengths = [(context - NEW_TOKENS, NEW_TOKENS)] * count
    joint = run_together(ServingEngine(PlanOnlyBackend(info), config), lengths)
    begins = list(joint.first_steps)
    for _ in range(_ITERATIONS):
        if joint.fits:
            break
        last = max(begins)
        answers = [min(context - 1, NEW_TOKENS + last - begin) for begin in begins]
        lengths = [(context - answer, answer) for answer in answers]
        joint = run_together(ServingEngine(PlanOnlyBackend(info), config), lengths)
        # Applies half of the correction: a full one would oscillate around the solution.
        begins = [(old + new + 1) // 2 for old, new in zip(begins, joint.first_steps, strict=True)]
    return lengths, joint


def run_together(engine: ServingEngine, lengths: Lengths) -> JointRun:
    """Submits all contexts at once and runs them to their ends in this thread; the engine must not be started."""
    vocabulary = engine.scheduler.info.vocabulary_size
    first_steps: dict[RequestId, int] = {}
    steps = most = shortest = 0

    def record_output(output: TokenOutput) -> None:
        first_steps.setdefault(output.request_id, steps)

    request_ids = []
    for number, (prompt, answer) in enumerate(lengths):
        tokens = tuple(random.Random(number).choices(range(vocabulary), k=prompt))
        params = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True)
        request_ids.append(engine.submit_with_callback(InferenceRequest(tokens, params), record_output))
    while engine.has_work:
        engine.run_iteration()
        steps += 1
        running = engine.scheduler.running
        most = max(most, len(running))
        if len(running) == len(request_ids):
            shortest = max(shortest, min(sequence.target for sequence in running))
    for request_id, (_, answer) in zip(request_ids, lengths, strict=True):
        result = engine.get_result(request_id)
        if result is None or result.state is not RequestState.COMPLETED or len(result.tokens) != answer:
            raise WeftError(f"a context did not complete: {result and result.error}")
    preemptions = engine.metrics().preemptions
    return JointRun(
        context=max(prompt + answer for prompt, answer in lengths),
        requested=len(request_ids),
        most=most,
        preemptions=preemptions,
        shortest=shortest,
        first_steps=tuple(first_steps[request_id] for request_id in request_ids),
    )


class PlanOnlyBackend:
    """Reports the pool of another backend and computes nothing: every token has the id 0."""

    def __init__(self, info: BackendInfo) -> None:
        self._info = info

    def allocate(self, pool: KvCachePoolConfig, num_rows: int, max_tokens: int = 0) -> BackendInfo:
        return self._info

    def check_grammar(self, grammar: Grammar) -> None:
        pass

    def submit(self, plan: IterationPlan) -> _PlanOnlyStep:
        return _PlanOnlyStep(plan)

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class _PlanOnlyStep:
    plan: IterationPlan

    def result(self) -> StepResult:
        swaps = tuple(task.swap_id for task in (*self.plan.swap_out, *self.plan.swap_in))
        return StepResult(tokens=(0,) * self.plan.num_samples, finished_swaps=swaps)
