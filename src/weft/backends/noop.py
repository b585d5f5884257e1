"""A backend that computes nothing and notices everything: the detector.

It keeps a paper KV pool. Every scheduled token is written, with its position, into the block and offset that the
plan gives; the next token is a hash of the whole context read back through the block table. Steps and swaps run
at seeded moments, in any order that their stated dependencies allow; blocks that are free or begun anew are
poisoned. A mistake in blocks, positions, chunking, swapping, rows or overlap therefore changes the output.

A grammar constrains nothing here, but a row that has one must not be in a step before the host knows the token that
the step before sampled for it (unless `grammars_may_overlap`): a plan that does so is refused loudly.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

from weft.config import KvCachePoolConfig
from weft.plan import BackendInfo, IterationPlan, RowStart, StepResult, SwapTask
from weft.request import Grammar, RequestId, SamplingParams, TokenLogprobs

POISON = -1


def next_token(
    cells: Sequence[int], seed: int, output_index: int, params: SamplingParams, info: BackendInfo
) -> int:
    """The token after a context: a hash of every cell (position and token), the seed and the output index."""
    token = hash((seed, output_index, *cells)) % info.vocabulary_size
    if output_index < params.min_tokens and not params.ignore_eos:
        while token in info.eos_token_ids:
            token = (token + 1) % info.vocabulary_size
    return token


def logprobs_of(token: int, cells: Sequence[int], num_top: int, info: BackendInfo) -> TokenLogprobs:
    """As if it were the logprob of a token after a context: another hash of every cell, so that a mistake shows."""
    value = hash(("logprob", *cells)) % 100_003
    top = tuple(((value + rank) % info.vocabulary_size, -rank / 8) for rank in range(num_top))
    return TokenLogprobs(-(value ^ token) / 100_003, top)


def score_alone(tokens: Sequence[int], first: int, num_top: int, info: BackendInfo) -> list[TokenLogprobs]:
    """The logprobs of tokens[first:] as a request gets them with the whole machine to itself."""
    cells = [_cell(position, token) for position, token in enumerate(tokens)]
    return [logprobs_of(tokens[p], cells[:p], num_top, info) for p in range(first, len(tokens))]


def generate_alone(
    prompt: Sequence[int], seed: int, params: SamplingParams, limit: int, info: BackendInfo
) -> list[int]:
    """What a request gets with the whole machine to itself: the same arithmetic on a plain list, no blocks."""
    tokens = list(prompt)
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else info.eos_token_ids)
    cells = [_cell(position, token) for position, token in enumerate(tokens)]
    while len(tokens) < limit:
        index = len(tokens) - len(prompt)
        token = next_token(cells, seed, index, params, info)
        cells.append(_cell(len(tokens), token))
        tokens.append(token)
        if token in stops and index + 1 >= params.min_tokens:
            break
    return tokens[len(prompt) :]


def _cell(position: int, token: int) -> int:
    return position << 32 | token


class SimulatedFault(RuntimeError):
    """A fault that was asked for."""


class Faults(Protocol):
    """What goes wrong and when; drawn by the simulation."""

    def at_submit(self, plan: IterationPlan) -> str | None: ...

    def at_result(self, plan: IterationPlan) -> tuple[str | None, Mapping[RequestId, str]]:
        """An error of nobody, and errors of single requests."""
        ...

    def at_wait(self, plan: IterationPlan) -> str | None:
        """An exception instead of a result."""
        ...

    def at_swap(self, task: SwapTask) -> str | None: ...


class _Row:
    __slots__ = ("blocks", "params", "prompt_length", "sampled_by", "seed", "tokens")

    def __init__(self, start: RowStart) -> None:
        self.sampled_by: _Step | None = None
        self.tokens = list(start.tokens)
        self.blocks = list(start.blocks)
        self.prompt_length = start.prompt_length
        self.params = start.params
        self.seed = start.seed


class _Step:
    """A submitted plan and, once it ran, what it gave. Also its handle."""

    __slots__ = (
        "backend",
        "errors",
        "failure",
        "is_over",
        "is_told",
        "logprobs",
        "plan",
        "prompt_logprobs",
        "tokens",
        "was_rejected",
    )

    def __init__(self, backend: NoopBackend, plan: IterationPlan) -> None:
        self.backend = backend
        self.plan = plan
        self.is_over = False
        self.is_told = False
        self.was_rejected = False
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs | None] = []
        self.prompt_logprobs: dict[RequestId, tuple[int, list[TokenLogprobs]]] = {}
        self.failure: str | None = None
        self.errors: Mapping[RequestId, str] = {}

    def result(self) -> StepResult:
        return self.backend._finish(self)


class NoopBackend:
    """See the module. `random_source` None runs every step at its result and every swap at once."""

    def __init__(
        self,
        vocabulary_size: int = 50_000,
        max_context: int = 8192,
        eos_token_ids: frozenset[int] = frozenset(),
        random_source: random.Random | None = None,
        faults: Faults | None = None,
        recompute_seconds_per_token: float = 1e-4,
        swap_seconds_per_block: float = 1e-4,
        eager_blocks: int | None = None,
        grammars_may_overlap: bool = False,
    ) -> None:
        self._vocabulary_size = vocabulary_size
        self._max_context = max_context
        self._eos_token_ids = eos_token_ids
        self._random = random_source
        self._faults = faults
        self._costs = (recompute_seconds_per_token, swap_seconds_per_block)
        self._eager_blocks = eager_blocks
        self._grammars_may_overlap = grammars_may_overlap
        self._rows: dict[int, _Row] = {}
        self._waiting_steps: deque[_Step] = deque()
        self._waiting_swaps: list[tuple[SwapTask, bool]] = []
        self._last_step_over = -1
        self._swaps_over: dict[int, str | None] = {}
        self._unreported: list[int] = []

    def allocate(self, pool: KvCachePoolConfig, num_rows: int, max_tokens: int = 0) -> BackendInfo:
        self._block_size = pool.block_size
        block_bytes = 8 * pool.block_size
        num_blocks = pool.blocks_in_memory(block_bytes) or 4096
        self._blocks = [[POISON] * pool.block_size for _ in range(num_blocks)]
        self._host: dict[int, list[int]] = {}
        self.info = BackendInfo(
            vocabulary_size=self._vocabulary_size,
            max_context=self._max_context,
            num_blocks=len(self._blocks),
            block_size=pool.block_size,
            swap_blocks=len(self._blocks) if pool.swap_blocks is None else pool.swap_blocks,
            bytes_per_block=block_bytes,
            eos_token_ids=self._eos_token_ids,
            recompute_seconds_per_token=self._costs[0],
            swap_seconds_per_block=self._costs[1],
            eager_blocks=self._eager_blocks,
            grammars_may_overlap=self._grammars_may_overlap,
        )
        return self.info

    def check_grammar(self, grammar: Grammar) -> None:
        pass

    def close(self) -> None:
        self._waiting_steps.clear()
        self._waiting_swaps.clear()

    def submit(self, plan: IterationPlan) -> _Step:
        step = _Step(self, plan)
        failure = self._faults.at_submit(plan) if self._faults else None
        if failure is not None:
            step.was_rejected = True  # still counts as over for swaps that wait for it
            self._waiting_steps.append(step)
            raise SimulatedFault(failure)
        # Taken over now, beside a step that may still be running: a row in flight must not be among them.
        for row_start in plan.row_starts:
            self._rows[row_start.row] = _Row(row_start)
        for row, index, block in zip(plan.table_rows, plan.table_indices, plan.table_blocks, strict=True):
            blocks = self._rows[row].blocks
            blocks.extend([POISON] * (index + 1 - len(blocks)))
            blocks[index] = block
        if not self._grammars_may_overlap:
            self._check_grammars(step)
        self._waiting_steps.append(step)
        self._waiting_swaps += [(task, True) for task in plan.swap_out]
        self._waiting_swaps += [(task, False) for task in plan.swap_in]
        if self._random is not None:
            while self._random.random() < 0.5 and self._run_something():
                pass
        return step

    def _check_grammars(self, step: _Step) -> None:
        """No mask can be made for a row whose last token only the device knows."""
        plan = step.plan
        for index, request_id, samples in zip(plan.rows, plan.request_ids, plan.samples, strict=True):
            row = self._rows[index]
            if samples and row.params.grammar is not None:
                before = row.sampled_by
                assert before is None or before.is_told, (
                    f"request {request_id} has a grammar and is in step {plan.step} while step {before.plan.step}, "
                    "which samples its last token, is in flight"
                )
                row.sampled_by = step

    def _finish(self, step: _Step) -> StepResult:
        while not step.is_over:
            self._run_something(must=True)
        step.is_told = True
        if not step.plan.rows and self._waiting_swaps and not self._unreported:
            self._run_swap(self._ready_swaps())
        elif self._random is None:
            while ready := self._ready_swaps():
                self._run_swap(ready)
        lost = self._faults.at_wait(step.plan) if self._faults else None
        if lost is not None:
            self._lose_swaps(lost)
            raise SimulatedFault(lost)
        over, self._unreported = self._unreported, []
        return StepResult(
            tokens=step.tokens,
            logprobs=step.logprobs if any(step.logprobs) else None,
            prompt_logprobs=step.prompt_logprobs,
            errors=step.errors,
            error=step.failure,
            finished_swaps=tuple(s for s in over if self._swaps_over[s] is None),
            failed_swaps={s: failure for s in over if (failure := self._swaps_over[s]) is not None},
        )

    # -- what runs when

    def _run_something(self, must: bool = False) -> bool:
        """Runs the next step or any swap whose dependencies are met, by chance. False: nothing can run."""
        steps = self._waiting_steps
        step_is_ready = bool(steps) and (
            steps[0].was_rejected or all(s in self._swaps_over for s in steps[0].plan.after_swaps)
        )
        swaps = self._ready_swaps()
        if swaps and (not step_is_ready or (self._random is not None and self._random.random() < 0.4)):
            self._run_swap(swaps)
        elif step_is_ready:
            self._run_step(steps.popleft())
        else:
            assert not must, "the plans state dependencies that can never be met"
            return False
        return True

    def _ready_swaps(self) -> list[tuple[SwapTask, bool]]:
        if not self._waiting_swaps:
            return []
        accepted = {task.swap_id for task, _ in self._waiting_swaps}
        return [
            (task, is_out)
            for task, is_out in self._waiting_swaps
            if task.after_step <= self._last_step_over and accepted.isdisjoint(task.after_swaps)
        ]

    def _run_swap(self, ready: list[tuple[SwapTask, bool]]) -> None:
        task, is_out = self._random.choice(ready) if self._random is not None else ready[0]
        self._waiting_swaps.remove((task, is_out))
        failure = self._faults.at_swap(task) if self._faults else None
        for earlier in task.after_swaps:
            if self._swaps_over.get(earlier, "never accepted") is not None:
                failure = failure or f"swap {earlier} before it failed"
        for block, slot in zip(task.blocks, task.swap_slots, strict=True):
            if is_out:
                self._host[slot] = self._poisoned() if failure else list(self._blocks[block])
            else:
                self._blocks[block] = self._poisoned() if failure else list(self._host[slot])
        self._swaps_over[task.swap_id] = failure
        self._unreported.append(task.swap_id)

    def _lose_swaps(self, failure: str) -> None:
        """All swaps accepted so far are over, none is reported: what they were to write is poison."""
        for task, is_out in self._waiting_swaps:
            for block, slot in zip(task.blocks, task.swap_slots, strict=True):
                if is_out:
                    self._host[slot] = self._poisoned()
                else:
                    self._blocks[block] = self._poisoned()
            self._swaps_over[task.swap_id] = failure
        self._waiting_swaps.clear()
        self._unreported.clear()

    # -- what a step does

    def _run_step(self, step: _Step) -> None:
        step.is_over = True
        self._last_step_over = step.plan.step
        if step.was_rejected:
            return
        if self._faults is not None:
            step.failure, step.errors = self._faults.at_result(step.plan)
        plan = step.plan
        for block in plan.freed:
            self._blocks[block] = self._poisoned()
        broken = step.failure is not None or bool(step.errors)
        for index, start, count in zip(plan.rows, plan.starts, plan.counts, strict=True):
            self._write(self._rows[index], start, count, broken)
        for entry, (start, count) in enumerate(zip(plan.starts, plan.counts, strict=True)):
            row = self._rows[plan.rows[entry]]
            if row.params.prompt_logprobs is not None and start + 1 < row.prompt_length:
                scored = self._score_prompt(row, start + 1, min(start + count + 1, row.prompt_length))
                step.prompt_logprobs[plan.request_ids[entry]] = (start + 1, scored)
            if plan.samples[entry]:
                self._sample(row, start + count, step)

    def _write(self, row: _Row, start: int, count: int, broken: bool) -> None:
        block_size = self._block_size
        for position in range(start, start + count):
            index, offset = divmod(position, block_size)
            # Reads of what a failed step never produced find poison, not an exception: its successor is discarded.
            block = row.blocks[index] if index < len(row.blocks) else POISON
            token = row.tokens[position] if position < len(row.tokens) else 0
            if offset == 0:
                self._blocks[block] = self._poisoned()
            self._blocks[block][offset] = POISON if broken else _cell(position, token)

    def _sample(self, row: _Row, length: int, step: _Step) -> None:
        cells = self._context(row, length)
        token = next_token(cells, row.seed, length - row.prompt_length, row.params, self.info)
        row.tokens[length:] = [token]
        step.tokens.append(token)
        num_top = row.params.logprobs
        step.logprobs.append(None if num_top is None else logprobs_of(token, cells, num_top, self.info))

    def _score_prompt(self, row: _Row, first: int, end: int) -> list[TokenLogprobs]:
        num_top = row.params.prompt_logprobs or 0
        return [
            logprobs_of(row.tokens[p], self._context(row, p), num_top, self.info) for p in range(first, end)
        ]

    def _context(self, row: _Row, length: int) -> list[int]:
        """The first `length` cells of a row, read through its block table."""
        cells: list[int] = []
        for block in row.blocks[: -(-length // self._block_size)]:
            cells += self._blocks[block]
        del cells[length:]
        return cells

    def _poisoned(self) -> list[int]:
        return [POISON] * self._block_size
