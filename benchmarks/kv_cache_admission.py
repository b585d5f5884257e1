"""How many contexts run at the same time in one memory, found by running them.

The largest number is searched on paper: the real engine plans over the very pool that the real backend has taken, and a
backend that computes nothing carries the plans out. Whoever wants to see it has the real backend compute that number too.
Contexts are begun one after the other and end together, so that at the end all of them have their whole length.
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
"""Of the context that is begun last."""
_ROUNDS = 12
"""Of bringing the ends together, at most: who needs how many steps for its prompt changes when the others' lengths do."""


@dataclass(frozen=True)
class Admission:
    """The most contexts of one kind of cache in a memory."""

    kind: str
    memory: int
    """Bytes, as taken."""
    context: int
    contexts: int
    shortest: int
    """Tokens of the shortest context, at the moment when most of them were held."""
    seconds: float | None = None
    """Of the real backend's run; None: it was not asked to compute."""


@dataclass(frozen=True)
class Company:
    """What became of contexts that were asked for together."""

    context: int
    """Tokens that each came to."""
    asked: int
    most: int
    """That ran at the same time."""
    preemptions: int
    shortest: int
    """Tokens of the shortest, when all ran: the most that this ever was. 0 where they never did."""
    first_steps: tuple[int, ...]
    """In which step each gave its first token."""

    @property
    def fits(self) -> bool:
        """All ran at the same time with all but the last few tokens of their length, and none had to give way."""
        is_whole = self.shortest > self.context - NEW_TOKENS
        return self.most == self.asked and is_whole and not self.preemptions


Lengths = Sequence[tuple[int, int]]
"""Prompt and answer of each context."""


def admit(
    setup: Setup, kind: Kind, context: int, *, contexts: int, memory: int | None, confirm: bool = False
) -> Admission:
    """In `memory`; None: in what `contexts` take in full precision. `confirm`: the real backend computes them too."""
    rows = 6 * contexts + 2
    blocks = -(-context // KvCachePoolConfig().block_size)
    sizes = {"num_blocks": contexts * blocks} if memory is None else {"memory": memory}
    pool = kind.pool(**sizes)
    with setup.open(pool, context, rows) as engine:
        info = engine.scheduler.info
        lengths, company = largest(info, engine_config(pool, rows), context)
        began, seconds = time.perf_counter(), None
        if confirm:
            company = run_together(engine, lengths)
            seconds = time.perf_counter() - began
    if not company.fits:
        raise WeftError(
            f"{kind.name}: {company.asked} contexts fit on paper, but {company.most} ran at the same time, the shortest of "
            f"{company.shortest} tokens, with {company.preemptions} preemptions"
        )
    return Admission(kind.name, info.cache_bytes, context, len(lengths), company.shortest, seconds)


def largest(info: BackendInfo, config: ServingEngineConfig, context: int) -> tuple[Lengths, Company]:
    """The most contexts that run together without anyone giving way, and how that went."""
    count = _estimate(info, context)
    lengths, company = ending_together(info, config, context, count)
    while not company.fits:  # one alone always does, or is refused
        count -= 1
        lengths, company = ending_together(info, config, context, count)
    while (more := ending_together(info, config, context, count + 1))[1].fits:
        count += 1
        lengths, company = more
    return lengths, company


def _estimate(info: BackendInfo, context: int) -> int:
    """Where to begin the search."""
    blocks = -(-context // info.block_size)
    if not info.store_blocks:
        return max(1, info.num_blocks // blocks)
    tail = min(blocks, info.tail_blocks + 1)
    return max(1, min(info.num_blocks // tail, info.store_blocks // max(1, blocks - info.tail_blocks)))


def ending_together(
    info: BackendInfo, config: ServingEngineConfig, context: int, count: int
) -> tuple[Lengths, Company]:
    """Lengths with which so many contexts end at about the same step, where they fit, and how that went."""
    lengths = [(context - NEW_TOKENS, NEW_TOKENS)] * count
    company = run_together(ServingEngine(PaperBackend(info), config), lengths)
    begins = list(company.first_steps)
    for _ in range(_ROUNDS):
        if company.fits:
            break
        last = max(begins)
        answers = [min(context - 1, NEW_TOKENS + last - begin) for begin in begins]
        lengths = [(context - answer, answer) for answer in answers]
        company = run_together(ServingEngine(PaperBackend(info), config), lengths)
        # Half of the way: a whole step would swing around the lengths that are looked for.
        begins = [(old + new + 1) // 2 for old, new in zip(begins, company.first_steps, strict=True)]
    return lengths, company


def run_together(engine: ServingEngine, lengths: Lengths) -> Company:
    """Asks for all of them at once and runs them to their ends; the engine is not started."""
    vocabulary = engine.scheduler.info.vocabulary_size
    first_steps: dict[RequestId, int] = {}
    steps = most = shortest = 0

    def note(output: TokenOutput) -> None:
        first_steps.setdefault(output.request_id, steps)

    asked = []
    for number, (prompt, answer) in enumerate(lengths):
        tokens = tuple(random.Random(number).choices(range(vocabulary), k=prompt))
        params = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True)
        asked.append(engine.submit_with_callback(InferenceRequest(tokens, params), note))
    while engine.has_work:
        engine.run_iteration()
        steps += 1
        running = engine.scheduler.running
        most = max(most, len(running))
        if len(running) == len(asked):
            shortest = max(shortest, min(sequence.target for sequence in running))
    for request_id, (_, answer) in zip(asked, lengths, strict=True):
        result = engine.get_result(request_id)
        if result is None or result.state is not RequestState.COMPLETED or len(result.tokens) != answer:
            raise WeftError(f"a context did not come to its end: {result and result.error}")
    preemptions = engine.metrics().preemptions
    return Company(
        context=max(prompt + answer for prompt, answer in lengths),
        asked=len(asked),
        most=most,
        preemptions=preemptions,
        shortest=shortest,
        first_steps=tuple(first_steps[one] for one in asked),
    )


class PaperBackend:
    """Has the pool of another backend and computes nothing: every token is the first of the vocabulary."""

    def __init__(self, info: BackendInfo) -> None:
        self._info = info

    def allocate(self, pool: KvCachePoolConfig, num_rows: int, max_tokens: int = 0) -> BackendInfo:
        return self._info

    def check_grammar(self, grammar: Grammar) -> None:
        pass

    def submit(self, plan: IterationPlan) -> _PaperStep:
        return _PaperStep(plan)

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class _PaperStep:
    plan: IterationPlan

    def result(self) -> StepResult:
        swaps = tuple(task.swap_id for task in (*self.plan.swap_out, *self.plan.swap_in))
        return StepResult(tokens=(0,) * self.plan.num_samples, finished_swaps=swaps)
