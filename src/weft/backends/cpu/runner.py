"""The CPU backend: owns the rows, the KV cache and the swap slots of one model, and runs steps in a thread.

The thread runs plans in the order of submission. Kernels release the GIL, so the caller plans and prepares the next
step while they run. That needs no lock: `submit` writes only to rows that no step in flight uses.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np

from weft.backends.cpu.core_lease import CoreLease
from weft.backends.cpu.kernels import has_kernels, instruction_set
from weft.backends.cpu.memory_budget import MemoryBudget
from weft.backends.cpu.packed_weights import check_quantize, keep_packed
from weft.backends.cpu.prefault import Prefaulter
from weft.backends.cpu.step_thread import QueuedStep, StepThread
from weft.backends.cpu.swap import HostSwap
from weft.backends.cpu.threads import thread_count
from weft.backends.grammar import ForcedTokens, Masks, RowGrammars
from weft.backends.host_memory import HostMemory, host_memory
from weft.backends.open_model import check_context, grammar_compiler
from weft.backends.step_arrays import PreparedStep, Rows, SampledEntries, ScoredPrompt
from weft.config import KvCachePoolConfig
from weft.errors import InvalidRequestError, ModelFileError
from weft.loading.checkpoint import Checkpoint, open_checkpoint
from weft.models.decoder import Decoder
from weft.models.registry import build_config, build_decoder
from weft.ops.base import StepIndices, TwoTierCache
from weft.ops.reference import ReferenceOps
from weft.plan import BackendInfo, IterationPlan, StepResult
from weft.request import Failure, Grammar, RequestId, TokenLogprobs
from weft.sampling import reference as numpy_sampler
from weft.sampling.reference import NOT_A_NUMBER, Sampled
from weft.text.grammar import GrammarCompiler
from weft.tiers import PoolSizes, choose_sizes, longest_context

if TYPE_CHECKING:
    from weft._kernels import Pool
    from weft.ops.cpu.weights import Quantize

# A block takes memory at its first use. Up to this size of all used blocks, the scheduler uses fresh blocks rather than
# evict cached content. Above it, fresh blocks are used only under load, so that resident memory follows the load.
_EAGER_CACHE_BYTES = 256 << 20
# How much cache memory is prefaulted after the used blocks.
_CACHE_BYTES_AHEAD = 128 << 20

_SCORED_AT_ONCE = 64

# The initial `BackendInfo.fixed_cost_rows` for the C++ kernels. Measured on two cores: 7 with VNNI, 1 to 2.5 with AVX2.
_FIXED_COST_ROWS = 4.0

# Rough speeds of a small machine. Only their ratio matters, for the choice between recompute and swap.
_OPERATIONS_PER_SECOND = 1e11
_COPIED_BYTES_PER_SECOND = 4e9


class Forward(Protocol):
    """The forward pass of a model: `Decoder` in numpy, or the C++ program recorded from it."""

    def step(
        self, step: StepIndices, cache: np.ndarray | TwoTierCache, sampled: int
    ) -> tuple[np.ndarray, np.ndarray]: ...

    def logits(self, rows: np.ndarray) -> np.ndarray: ...


class Sampler(Protocol):
    """Samples tokens from logits: the module `weft.sampling.reference` in numpy, or `NativeSampler` in C++."""

    def sample(
        self,
        logits: np.ndarray,
        entries: SampledEntries,
        rows: Rows,
        eos_token_ids: Collection[int],
        masks: Masks,
    ) -> Sampled: ...

    def score(self, logits: np.ndarray, tokens: np.ndarray, top_count: int) -> list[TokenLogprobs]: ...


@dataclasses.dataclass(frozen=True)
class Native:
    """The C++ program and sampler with their thread pool. Only one backend may use them at a time."""

    forward: Forward
    sampler: Sampler
    pool: Pool


class _PendingForcedTokens:
    """The forced tokens of one step. The grammar thread finds them while the next step may already run."""

    tokens: Future[ForcedTokens] | None = None

    def add_to(self, result: StepResult) -> StepResult:
        if self.tokens is None:
            return result
        with suppress(CancelledError):  # the backend was closed
            if forced := self.tokens.result():
                return dataclasses.replace(result, forced=forced)
        return result


class CpuBackend:
    """A `Backend` with the KV cache in numpy arrays. It computes in C++, or in numpy."""

    def __init__(
        self,
        decoder: Decoder,
        eos_token_ids: frozenset[int],
        grammars: GrammarCompiler,
        native: Native | None = None,
        memory: HostMemory | None = None,
        lease: CoreLease | None = None,
    ) -> None:
        """Without `native`, the decoder computes in numpy. `memory` was measured before the weights were loaded."""
        self._budget = MemoryBudget(memory or host_memory(), decoder.weight_bytes)
        self._decoder = decoder
        self._forward: Forward = decoder if native is None else native.forward
        self._sampler: Sampler = numpy_sampler if native is None else native.sampler
        self._pool = None if native is None else native.pool
        self._eos_token_ids = eos_token_ids
        self._compiler = grammars
        self._cache: np.ndarray | TwoTierCache
        self._prefaulter: Prefaulter
        self._thread = StepThread("weft-cpu", lease)

    def allocate(self, pool: KvCachePoolConfig, num_rows: int, max_tokens: int = 0) -> BackendInfo:
        config = self._decoder.config
        block_bytes = self._decoder.new_cache(1, pool.block_size).nbytes
        default_bytes = partial(
            self._budget.default_cache_bytes, block_bytes, pool.block_size, config.max_context
        )
        if pool.is_two_tier:
            store_block_bytes = self._decoder.new_store(1, pool.block_size, pool.store_bits).nbytes
            sizes = choose_sizes(
                pool,
                block_bytes=block_bytes,
                store_block_bytes=store_block_bytes,
                free_memory=0 if pool.memory or pool.num_blocks else default_bytes(),
                model_context=config.max_context,
                step_tokens=max_tokens,
            )
            max_context = longest_context(config.max_context, sizes, pool.block_size, pool.tail_blocks)
        else:
            store_block_bytes = 0
            requested = pool.blocks_in_memory(block_bytes)
            sizes = PoolSizes(default_bytes() // block_bytes if requested is None else requested, 0)
            max_context = min(config.max_context, sizes.full * pool.block_size)
        num_blocks = sizes.full
        self._block_size = pool.block_size
        cache_bytes = num_blocks * block_bytes + sizes.store * store_block_bytes
        swap_blocks = pool.swap_blocks
        if swap_blocks is None:
            swap_blocks = self._budget.default_swap_blocks(num_blocks, cache_bytes)
        store_swap_blocks = -(-swap_blocks * sizes.store // num_blocks)
        self._budget.check(cache_bytes, swap_blocks * block_bytes + store_swap_blocks * store_block_bytes)
        try:
            full = self._decoder.new_cache(num_blocks, pool.block_size)
            if pool.is_two_tier:
                store = self._decoder.new_store(sizes.store, pool.block_size, pool.store_bits)
                self._cache = TwoTierCache(full, store, pool.store_bits, pool.tail_blocks)
                self._swaps = HostSwap(full, swap_blocks, store, store_swap_blocks)
                self._rows = Rows(num_rows, max_context, pool.block_size, num_blocks, pool.tail_blocks)
            else:
                self._cache = full
                self._swaps = HostSwap(full, swap_blocks)
                self._rows = Rows(num_rows, max_context, pool.block_size)
            self._grammars = RowGrammars(
                self._compiler, num_rows, config.vocabulary_size, finds_forced=self._pool is not None
            )
            self._prefaulter = Prefaulter(full, _CACHE_BYTES_AHEAD, self._pool)
            self._thread.prefault_when_idle(self._prefaulter)
        except (
            MemoryError,
            ValueError,
        ) as error:
            # numpy raises ValueError for a size beyond the address space.
            store_text = (
                f", and store_blocks {sizes.store} of {store_block_bytes}," if pool.is_two_tier else ""
            )
            raise InvalidRequestError(
                f"num_blocks {num_blocks} and swap_blocks {swap_blocks} of {block_bytes} bytes{store_text} do not fit into "
                f"memory ({(host_memory().available or 0) >> 20} MiB available); ask for fewer",
                field="num_blocks",
            ) from error
        return BackendInfo(
            vocabulary_size=config.vocabulary_size,
            max_context=max_context,
            num_blocks=num_blocks,
            block_size=pool.block_size,
            swap_blocks=swap_blocks,
            bytes_per_block=block_bytes,
            store_blocks=sizes.store,
            store_swap_blocks=store_swap_blocks,
            bytes_per_store_block=store_block_bytes,
            tail_blocks=pool.tail_blocks,
            eos_token_ids=self._eos_token_ids,
            recompute_seconds_per_token=2 * config.multiplications_per_token / _OPERATIONS_PER_SECOND,
            swap_seconds_per_block=block_bytes / _COPIED_BYTES_PER_SECOND,
            weight_bytes=self._decoder.weight_bytes,
            # For the store, the scheduler uses the same fraction: eager_blocks / num_blocks.
            eager_blocks=min(num_blocks, _EAGER_CACHE_BYTES * num_blocks // cache_bytes),
            grammars_may_overlap=True,
            # No draft tokens with numpy: there the logits of a row depend on the other rows, so draft tokens would
            # change answers.
            fixed_cost_rows=0.0 if self._pool is None else _FIXED_COST_ROWS,
            answers_are_exact=self._pool is not None,
        )

    def check_grammar(self, grammar: Grammar) -> None:
        self._compiler.compile(grammar)

    def submit(self, plan: IterationPlan) -> QueuedStep:
        self._rows.update(plan)
        step = self._rows.prepare(plan) if plan.rows else None
        forced = _PendingForcedTokens()
        return self._thread.submit(partial(self._run, plan, step, forced), forced.add_to)

    def close(self) -> None:
        self._thread.close()
        self._grammars.close()

    def _run(
        self, plan: IterationPlan, step: PreparedStep | None, forced: _PendingForcedTokens
    ) -> StepResult:
        """Runs one plan, in the thread. Never raises: a swap must be reported even if the step fails."""
        swaps = self._swaps
        if swaps.is_idle and not plan.swap_out and not plan.swap_in:
            return self._attempt(plan, step, forced)
        self._thread.report()  # do not delay the report of the previous step by copies
        swaps.accept(plan)
        swaps.run_ready(last_ended_step=plan.step - 1)
        result = self._attempt(plan, step, forced)
        swaps.run_ready(last_ended_step=plan.step)
        finished, failed = swaps.take_reports()
        if not finished and not failed:
            return result
        return dataclasses.replace(result, finished_swaps=finished, failed_swaps=failed)

    def _attempt(
        self, plan: IterationPlan, step: PreparedStep | None, forced: _PendingForcedTokens
    ) -> StepResult:
        """Computes the step. An exception becomes the error of the step."""
        try:
            self._swaps.check_ended(plan.after_swaps)
            self._grammars.start(plan.row_starts)
            return StepResult() if step is None else self._compute(step, forced)
        except Exception as error:
            return StepResult(error=f"{type(error).__name__}: {error}")

    def _compute(self, step: PreparedStep, forced: _PendingForcedTokens) -> StepResult:
        scored, entries = step.scored, step.entries
        num_sampled = len(entries.rows)
        self._rows.read_tokens(step)
        self._thread.report()  # do not delay the report of the previous step by prefaulting
        self._prefaulter.use(int(step.indices.cells.max()) // self._block_size + 1)
        if self._grammars.has_any:
            self._grammars.start_drafts(entries.rows, step.first_draft, step.drafts)
        try:
            logits, hidden = self._forward.step(step.indices, self._cache, num_sampled)
        finally:
            self._prefaulter.end_step()
        if scored:
            logits = logits.copy()  # `_score_prompts` overwrites the logits buffer
        prompt_logprobs, errors = self._score_prompts(scored, hidden) if scored else ({}, {})
        if not num_sampled:
            return StepResult(prompt_logprobs=prompt_logprobs, errors=errors)
        masks = self._grammars.masks(entries.rows)
        sampled = self._sampler.sample(logits, entries, self._rows, self._eos_token_ids, masks)
        self._rows.record(step, sampled.tokens)
        forced.tokens = self._grammars.advance(entries.rows, sampled.tokens, step.first_draft, step.drafts)
        for entry, error in sampled.errors.items():
            if step.is_valid_sample(entry, sampled.tokens):
                errors[entries.request_ids[entry]] = error
        return StepResult(sampled.tokens.tolist(), sampled.logprobs, prompt_logprobs, errors)

    def _score_prompts(
        self, scored: Sequence[ScoredPrompt], hidden: np.ndarray
    ) -> tuple[dict[RequestId, tuple[int, list[TokenLogprobs]]], dict[RequestId, Failure]]:
        """Scores `_SCORED_AT_ONCE` tokens at a time, because the logits of a whole prompt would be large."""
        logprobs: dict[RequestId, tuple[int, list[TokenLogprobs]]] = {}
        errors: dict[RequestId, Failure] = {}
        start = 0
        for prompt in scored:
            values: list[TokenLogprobs] = []
            for first in range(0, len(prompt.tokens), _SCORED_AT_ONCE):
                tokens = prompt.tokens[first : first + _SCORED_AT_ONCE]
                logits = self._forward.logits(hidden[start + first : start + first + len(tokens)])
                values += self._sampler.score(logits, tokens, prompt.top_count)
            start += len(prompt.tokens)
            if not all(math.isfinite(value.logprob) for value in values):
                errors[prompt.request_id] = NOT_A_NUMBER
            logprobs[prompt.request_id] = (prompt.first, values)
        return logprobs, errors


def open_cpu_backend(
    checkpoint: Checkpoint | str,
    dtype: np.dtype | type | None = None,
    max_context: int | None = None,
    threads: int | None = None,
    quantize: Quantize | None = None,
    core_lease: tuple[int, int] | None = None,
) -> CpuBackend:
    """Opens the backend for a model or for the path of a model. `max_context` shortens the model's own context.
    `core_lease`: the arguments of `CoreLease`, if other engine processes compute on the same cores.

    Without `dtype`, the C++ kernels compute with `threads` threads if they were built. With `dtype`, numpy computes in
    that type. `quantize` ("int8" or "int4") applies to weights that the files store as floats.
    """
    if isinstance(checkpoint, str):
        checkpoint = open_checkpoint(checkpoint)
    layout, metadata, tensors = checkpoint.layout, checkpoint.metadata, checkpoint.tensors
    threads = thread_count(threads)
    memory = host_memory()
    is_native = dtype is None and has_kernels()
    check_quantize(quantize, checkpoint, is_native)
    try:
        model_context = build_config(layout, metadata, tensors).max_context
        if max_context is not None:
            check_context(max_context, model_context)
        native: Native | None = None
        if is_native:
            decoder, native = open_native(checkpoint, max_context, threads, quantize, memory)
        else:
            ops = ReferenceOps(np.float32 if dtype is None else dtype)
            with MemoryBudget(memory, checkpoint.parameter_count * ops.dtype.itemsize).for_weights():
                decoder = build_decoder(layout, metadata, tensors, ops, max_context)
    except ModelFileError as error:
        raise ModelFileError(f"{checkpoint.path}: {error}") from error
    compiler = grammar_compiler(checkpoint, decoder.config.vocabulary_size)
    lease = None if core_lease is None else CoreLease(*core_lease)
    return CpuBackend(decoder, checkpoint.end_ids, compiler, native, memory, lease)


def open_native(
    checkpoint: Checkpoint,
    max_context: int | None,
    threads: int,
    quantize: Quantize | None,
    memory: HostMemory | None = None,
) -> tuple[Decoder, Native]:
    """The decoder, and the C++ program recorded from it. Packed weights are kept in a file for the next start."""
    from weft import _kernels
    from weft.backends.cpu.native_sampler import NativeSampler
    from weft.ops.cpu.program import record
    from weft.ops.cpu.recording_ops import CpuOps
    from weft.ops.cpu.weights import PACKING_VERSION, Packing
    from weft.ops.recording import NO_STEP

    if (name := instruction_set()) is not None:
        _kernels.use(name)
    ops = CpuOps(Packing(quantize))
    decoder = build_decoder(checkpoint.layout, checkpoint.metadata, checkpoint.tensors, ops, max_context)
    keep = keep_packed(checkpoint, f"{quantize or 'stored'}-{PACKING_VERSION}", threads, memory)
    pool = _kernels.Pool(threads)
    forward = record(lambda: decoder.forward(NO_STEP, None), decoder.logits, ops, keep, pool)
    return decoder, Native(forward, NativeSampler(pool), pool)
