"""A backend without a model that checks the plans of the scheduler: a wrong plan changes the sampled tokens.

It simulates the KV cache. A step writes each token with its position into the KV block and offset that the plan gives.
The next token is a hash of the whole context, read back through the block table. Steps and swaps run in a seeded random
order that respects their stated dependencies. Blocks that become free, and blocks that get new content, are overwritten
with POISON. So an error in blocks, positions, chunks, swaps, rows or overlapped steps changes the output.

With two tiers, an error in the moves to the store changes the output too: a block is moved too late, too early, twice or
from the wrong block; or a position reads the wrong tier. `noop_model` describes the cells and the tokens. An error spreads
to every cell that is computed from a wrong one.

Only the grammar `FORCING` constrains tokens, but the backend checks the steps of rows with any grammar. Unless
`grammars_may_overlap`, such a row must not be in a step while the step that samples its last token is in flight.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Protocol

from weft.backends.noop_model import (
    ToyGrammar,
    cell_of,
    logprobs_of,
    next_token,
    num_quantised,
    quantised,
    vector_of,
)
from weft.config import KvCachePoolConfig
from weft.plan import BackendInfo, IterationPlan, RowStart, StepResult, SwapTask
from weft.request import Failure, Grammar, RequestId, TokenLogprobs
from weft.tiers import PoolSizes, choose_sizes, longest_context

POISON = -1


class SimulatedFault(RuntimeError):
    """An error that `Faults` injected."""


class Faults(Protocol):
    """Injects errors. The simulation draws them at random."""

    def at_submit(self, plan: IterationPlan) -> str | None: ...

    def at_result(self, plan: IterationPlan) -> tuple[str | None, Mapping[RequestId, Failure]]:
        """An error of the whole step, and errors of single requests."""

    def at_wait(self, plan: IterationPlan) -> str | None:
        """The message of an exception that `result` raises."""

    def at_swap(self, task: SwapTask) -> str | None: ...


class _Row:
    __slots__ = ("blocks", "grammar", "params", "prompt_length", "sampled_by", "seed", "store", "tokens")

    def __init__(self, start: RowStart, info: BackendInfo) -> None:
        num_blocks = info.num_blocks
        self.sampled_by: _Step | None = None
        self.tokens = list(start.tokens)
        self.blocks = [block if block < num_blocks else POISON for block in start.blocks]
        self.store = [block if block >= num_blocks else POISON for block in start.blocks]
        self.prompt_length = start.prompt_length
        self.params = start.params
        self.seed = start.seed
        self.grammar = ToyGrammar.of(start.params, info, start.tokens[start.prompt_length :])


class _Step:
    """A submitted plan and, once it ran, its result. It is also the plan's `StepHandle`."""

    __slots__ = (
        "backend",
        "errors",
        "failure",
        "forced",
        "is_over",
        "is_reported",
        "logprobs",
        "plan",
        "prompt_logprobs",
        "tokens",
        "vectors",
        "was_rejected",
    )

    def __init__(self, backend: NoopBackend, plan: IterationPlan) -> None:
        self.backend = backend
        self.plan = plan
        self.is_over = False
        self.is_reported = False
        self.was_rejected = False
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs | None] = []
        self.prompt_logprobs: dict[RequestId, tuple[int, list[TokenLogprobs]]] = {}
        self.vectors: dict[RequestId, bytes] = {}
        self.forced: dict[RequestId, tuple[int, ...]] = {}
        self.failure: str | None = None
        self.errors: Mapping[RequestId, Failure] = {}

    def result(self) -> StepResult:
        return self.backend._finish(self)


class NoopBackend:
    """A `Backend` that checks plans. Without `random_source`, a step runs when its result is requested, and a swap as
    soon as it can.

    A step with rows takes at least `seconds_per_step`, so that a test can observe a request while it runs."""

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
        fixed_cost_rows: float = 0.0,
        extra_rows_are_cheap: bool = False,
        seconds_per_step: float = 0.0,
        vector_size: int = 0,
    ) -> None:
        self._vocabulary_size = vocabulary_size
        self._max_context = max_context
        self._eos_token_ids = eos_token_ids
        self._random = random_source
        self._faults = faults
        self._costs = (recompute_seconds_per_token, swap_seconds_per_block)
        self._eager_blocks = eager_blocks
        self._grammars_may_overlap = grammars_may_overlap
        self._fixed_cost_rows = fixed_cost_rows
        self._extra_rows_are_cheap = extra_rows_are_cheap
        self._seconds_per_step = seconds_per_step
        self._vector_size = vector_size
        self._rows: dict[int, _Row] = {}
        self._waiting_steps: deque[_Step] = deque()
        self._waiting_swaps: list[tuple[SwapTask, bool]] = []
        self._last_step_over = -1
        self._swaps_over: dict[int, str | None] = {}
        self._unreported: list[int] = []

    def allocate(self, pool: KvCachePoolConfig, num_rows: int, max_tokens: int = 0) -> BackendInfo:
        self._block_size = pool.block_size
        self._num_layers = 2 if pool.is_two_tier else 1
        block_bytes, store_block_bytes, max_context = 8 * pool.block_size, 0, self._max_context
        if pool.is_two_tier:
            store_block_bytes = pool.store_bits * pool.block_size // 2
            num_blocks, store_blocks = sizes = choose_sizes(
                pool,
                block_bytes=block_bytes,
                store_block_bytes=store_block_bytes,
                free_memory=4096 * block_bytes,
                model_context=max_context,
                step_tokens=max_tokens,
            )
            max_context = longest_context(max_context, sizes, pool.block_size, pool.tail_blocks)
        else:
            num_blocks, store_blocks = PoolSizes(pool.blocks_in_memory(block_bytes) or 4096, 0)
        # The last block is never written. A missing table entry is POISON (-1), so reading through it gives this block.
        self._blocks = [self._poisoned() for _ in range(num_blocks + store_blocks + 1)]
        self._host: dict[int, list[int]] = {}
        swap_blocks = num_blocks if pool.swap_blocks is None else pool.swap_blocks
        self.info = BackendInfo(
            vocabulary_size=self._vocabulary_size,
            max_context=max_context,
            num_blocks=num_blocks,
            block_size=pool.block_size,
            swap_blocks=swap_blocks,
            bytes_per_block=block_bytes,
            store_blocks=store_blocks,
            store_swap_blocks=-(-swap_blocks * store_blocks // num_blocks),
            bytes_per_store_block=store_block_bytes,
            tail_blocks=pool.tail_blocks,
            eos_token_ids=self._eos_token_ids,
            recompute_seconds_per_token=self._costs[0],
            swap_seconds_per_block=self._costs[1],
            eager_blocks=self._eager_blocks,
            grammars_may_overlap=self._grammars_may_overlap,
            fixed_cost_rows=self._fixed_cost_rows,
            extra_rows_are_cheap=self._extra_rows_are_cheap,
            vector_size=self._vector_size,
            answers_are_exact=not self._vector_size,
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
            step.was_rejected = True  # a failed step still counts as ended for swaps that depend on it
            self._waiting_steps.append(step)
            raise SimulatedFault(failure)
        # Row starts are applied now, while the previous step may still run: the plan must not start a row that is in
        # flight.
        for row_start in plan.row_starts:
            self._rows[row_start.row] = _Row(row_start, self.info)
        for entry, drafts in enumerate(plan.drafts, plan.num_decodes):
            row_tokens, start = self._rows[plan.rows[entry]].tokens, plan.starts[entry]
            assert plan.counts[entry] == 1 + len(drafts), (
                f"drafts {drafts} for {plan.counts[entry]} positions"
            )
            assert len(row_tokens) > start, f"draft tokens after position {start}, whose token is unknown"
            row_tokens[start + 1 :] = drafts
        for row, index, block in zip(plan.table_rows, plan.table_indices, plan.table_blocks, strict=True):
            assert block < self.info.num_blocks, f"store block {block} in place of a full one"
            _set_entry(self._rows[row].blocks, index, block)
        for row, index, origin, block in _moves(plan):
            assert origin < self.info.num_blocks <= block, f"a move from {origin} to {block}"
            _set_entry(self._rows[row].store, index, block)
        if not self._grammars_may_overlap:
            self._check_grammars(step)
        self._waiting_steps.append(step)
        self._waiting_swaps += [(task, True) for task in plan.swap_out]
        self._waiting_swaps += [(task, False) for task in plan.swap_in]
        if self._random is not None:
            while self._random.random() < 0.5 and self._run_next():
                pass
        return step

    def _check_grammars(self, step: _Step) -> None:
        """Checks that a row with a grammar is in no step while its last token is in flight: its mask needs the token."""
        plan = step.plan
        for index, request_id, samples in zip(plan.rows, plan.request_ids, plan.samples, strict=True):
            row = self._rows[index]
            if samples and row.params.grammar is not None:
                before = row.sampled_by
                assert before is None or before.is_reported, (
                    f"request {request_id} has a grammar and is in step {plan.step} while step {before.plan.step}, "
                    "which samples its last token, is in flight"
                )
                row.sampled_by = step

    def _finish(self, step: _Step) -> StepResult:
        if self._seconds_per_step and step.plan.rows:
            time.sleep(self._seconds_per_step)
        while not step.is_over:
            self._run_next(must=True)
        step.is_reported = True
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
            vectors=step.vectors,
            forced=step.forced,
            errors=step.errors,
            error=step.failure,
            finished_swaps=tuple(s for s in over if self._swaps_over[s] is None),
            failed_swaps={s: failure for s in over if (failure := self._swaps_over[s]) is not None},
        )

    # -- the order of steps and swaps

    def _run_next(self, must: bool = False) -> bool:
        """Runs the next step or a swap, at random among those that are ready. Returns False if none is ready."""
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
            assert not must, "the dependencies of the plans can never be met"
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
                failure = failure or f"swap {earlier}, which it depends on, failed"
        for block, slot in zip(task.blocks, task.swap_slots, strict=True):
            if is_out:
                self._host[slot] = self._poisoned() if failure else list(self._blocks[block])
            else:
                self._blocks[block] = self._poisoned() if failure else list(self._host[slot])
        self._swaps_over[task.swap_id] = failure
        self._unreported.append(task.swap_id)

    def _lose_swaps(self, failure: str) -> None:
        """Ends all accepted swaps without a report, and poisons their targets."""
        for task, is_out in self._waiting_swaps:
            for block, slot in zip(task.blocks, task.swap_slots, strict=True):
                if is_out:
                    self._host[slot] = self._poisoned()
                else:
                    self._blocks[block] = self._poisoned()
            self._swaps_over[task.swap_id] = failure
        self._waiting_swaps.clear()
        self._unreported.clear()

    # -- one step

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
        # In a step of decodes only, moved blocks were complete before the step. So a backend may move them before it
        # computes.
        moves_come_first = plan.num_prefills == 0
        for layer in range(self._num_layers):
            if moves_come_first:
                self._move(plan, layer)
        for layer in range(self._num_layers):
            for index, start, count in zip(plan.rows, plan.starts, plan.counts, strict=True):
                self._write(self._rows[index], layer, start, count, broken)
            if not moves_come_first:
                self._move(plan, layer)
        for entry, (start, count) in enumerate(zip(plan.starts, plan.counts, strict=True)):
            row = self._rows[plan.rows[entry]]
            if row.params.prompt_logprobs is not None and start + 1 < row.prompt_length:
                scored = self._score_prompt(row, start + 1, min(start + count + 1, row.prompt_length))
                step.prompt_logprobs[plan.request_ids[entry]] = (start + 1, scored)
            if plan.first_prefill > entry >= plan.num_decodes:
                self._sample_after_drafts(row, start, count, step)
            elif plan.samples[entry]:
                token = self._sample(row, start + count, step, row.grammar)
                if row.grammar is not None:
                    row.grammar.consume(token)
                if self._vector_size:
                    cells = self._context(row, self._num_layers - 1, start + count)
                    step.vectors[plan.request_ids[entry]] = vector_of(cells, self._vector_size)
            if plan.samples[entry] and row.grammar is not None:
                step.forced[plan.request_ids[entry]] = row.grammar.forced()

    def _write(self, row: _Row, layer: int, start: int, count: int, broken: bool) -> None:
        block_size = self._block_size
        for position in range(start, start + count):
            index, offset = divmod(position, block_size)
            # After a failed step, table entries and tokens may be missing. The result of this step is discarded then.
            block = row.blocks[index] if index < len(row.blocks) else POISON
            if block == POISON:
                continue
            if layer:
                cell = hash(tuple(self._context(row, layer - 1, position + 1)))
            else:
                cell = cell_of(position, row.tokens[position] if position < len(row.tokens) else 0)
                if offset == 0:
                    self._blocks[block] = self._poisoned()
            self._blocks[block][layer * block_size + offset] = POISON if broken else cell

    def _move(self, plan: IterationPlan, layer: int) -> None:
        """Quantises one layer of the blocks that move in this step."""
        cells = slice(layer * self._block_size, (layer + 1) * self._block_size)
        for origin, block in zip(plan.moved_from, plan.moved_to, strict=True):
            if origin != -1:
                self._blocks[block][cells] = map(quantised, self._blocks[origin][cells])

    def _sample_after_drafts(self, row: _Row, start: int, count: int, step: _Step) -> None:
        """Writes the sampled tokens over all draft tokens, accepted or not, as a backend may do."""
        first, drafts = len(step.tokens), row.tokens[start + 1 : start + count]
        grammar = None if row.grammar is None else row.grammar.copy()
        for index, length in enumerate(range(start + 1, start + count + 1)):
            known = list(row.tokens)
            token = self._sample(row, length, step, grammar)
            row.tokens = known
            if row.grammar is not None and step.tokens[first : first + index] == drafts[:index]:
                row.grammar.consume(token)
            if grammar is not None and index < len(drafts):
                grammar = _after(grammar, drafts[index])
        row.tokens[start + 1 :] = step.tokens[first:]

    def _sample(self, row: _Row, length: int, step: _Step, grammar: ToyGrammar | None) -> int:
        cells = self._context(row, self._num_layers - 1, length)
        token = next_token(cells, row.seed, length - row.prompt_length, row.params, self.info, grammar)
        row.tokens[length:] = [token]
        step.tokens.append(token)
        num_top = row.params.logprobs
        step.logprobs.append(None if num_top is None else logprobs_of(token, cells, num_top, self.info))
        return token

    def _score_prompt(self, row: _Row, first: int, end: int) -> list[TokenLogprobs]:
        num_top, layer = row.params.prompt_logprobs or 0, self._num_layers - 1
        return [
            logprobs_of(row.tokens[p], self._context(row, layer, p), num_top, self.info)
            for p in range(first, end)
        ]

    def _context(self, row: _Row, layer: int, length: int) -> list[int]:
        """The cells of a layer that the query at position `length` - 1 reads, through the row's block tables."""
        block_size = self._block_size
        num_blocks = -(-length // block_size)
        num_stored = num_quantised(length - 1, self.info) // block_size
        table = row.blocks
        if num_stored:
            store = row.store[:num_stored]
            table = [*store, *[POISON] * (num_stored - len(store)), *table[num_stored:]]
        cells: list[int] = []
        for block in table[:num_blocks]:
            cells += self._blocks[block][layer * block_size : (layer + 1) * block_size]
        del cells[length:]
        return cells

    def _poisoned(self) -> list[int]:
        return [POISON] * (self._num_layers * self._block_size)


def _after(grammar: ToyGrammar, draft: int) -> ToyGrammar | None:
    """The grammar after a draft token. None if the draft token is forbidden: later samples are discarded."""
    if not grammar.allows(draft):
        return None
    grammar.consume(draft)
    return grammar


def _set_entry(table: list[int], index: int, block: int) -> None:
    table.extend([POISON] * (index + 1 - len(table)))
    table[index] = block


def _moves(plan: IterationPlan) -> Iterator[tuple[int, int, int, int]]:
    return zip(plan.moved_rows, plan.moved_indices, plan.moved_from, plan.moved_to, strict=True)
