"""The CUDA backend: launches the steps of plans on the GPU without waiting for them.

`submit` runs in the engine's thread: it writes the changes of a plan into a mailbox slot, launches the step, and
returns. `result` waits for the end of one step and reads its slot. A step writes its sampled tokens into the rows on
the GPU, where the next step reads them. So the engine plans and submits step N + 1 while step N runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from weft.backends.cuda.graphs import DecodeGraphs, Kind
from weft.backends.cuda.mailbox import Mailbox, MailboxSlot
from weft.backends.cuda.memory import (
    BlockMemory,
    drop_frames,
    is_out_of_memory,
    mib,
    shortage,
)
from weft.backends.cuda.precompile import KernelPrecompiler, Sizes, outline_of
from weft.backends.cuda.prompt_logprobs import ScoredChunk, ScoredPrompts, indices_of
from weft.backends.cuda.rows import DeviceRows, is_decode
from weft.backends.cuda.sampler import DeviceSampler, SamplingPath
from weft.backends.cuda.step import DeviceStep
from weft.backends.cuda.swap import GpuSwap
from weft.backends.grammar import RowGrammars
from weft.backends.open_model import check_context, grammar_compiler
from weft.config import KvCachePoolConfig
from weft.errors import InvalidRequestError, ModelFileError, OutOfMemoryError
from weft.loading.checkpoint import Checkpoint, open_checkpoint
from weft.models.decoder import Decoder
from weft.models.registry import build_config, build_decoder, decoder_weights
from weft.ops.base import TwoTierCache
from weft.ops.triton.device import Device, Event
from weft.ops.triton.ops import TritonOps
from weft.ops.triton.program import CudaProgram, record
from weft.ops.triton.store import move_to_store
from weft.plan import BackendInfo, IterationPlan
from weft.request import Grammar
from weft.text.grammar import GrammarCompiler

_DEFAULT_MAX_TOKENS = 2048

_SCORED_AT_ONCE = 64

# Rough speeds of a large GPU. Only their ratio matters, for the choice between recompute and swap.
_OPERATIONS_PER_SECOND = 4e14
_COPIED_BYTES_PER_SECOND = 4e10

_HOLD_MEMORY = (
    *("_cache", "_decoder", "_graphs", "_mailbox", "_ops"),
    *("_program", "_rows", "_sampler", "_swaps"),
)
"""Attributes that hold GPU memory. Some are missing before `allocate`."""

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class CudaBackend:
    """A `Backend` with all rows and the KV cache in GPU memory."""

    def __init__(
        self,
        device: Device,
        decoder: Decoder,
        ops: TritonOps,
        eos_token_ids: frozenset[int],
        grammars: GrammarCompiler,
        invariant: bool = False,
        precompiler: KernelPrecompiler | None = None,
    ) -> None:
        self._device = device
        self._decoder = decoder
        self._ops = ops
        self._eos_token_ids = eos_token_ids
        self._compiler = grammars
        self._invariant = invariant
        self._precompiler = precompiler
        self._stream = device.stream()
        # Steps wait for the copies of the weights, which may still run.
        self._stream.wait_stream(device.current_stream())
        self._last_step: Event | None = None
        self._cache: Tensor | TwoTierCache

    # --- memory -------------------------------------------------------------------------------------------------------

    def allocate(self, pool: KvCachePoolConfig, num_rows: int, max_tokens: int = 0) -> BackendInfo:
        max_tokens = max(max_tokens or _DEFAULT_MAX_TOKENS, num_rows)
        try:
            with self._device.using(self._stream):
                return self._allocate(pool, num_rows, max_tokens)
        except BaseException as error:
            weight_bytes = self._decoder.weight_bytes
            drop_frames(error)
            self.close()
            if not is_out_of_memory(error):
                raise
        # Raised outside `except`, so that the new error does not keep the old one, with its GPU memory, as its context.
        raise shortage(
            self._device,
            f"the weights take {mib(weight_bytes)}, and the KV cache with the buffers for steps of {max_tokens} tokens "
            f"and {num_rows} requests takes more than the rest",
            "set a smaller --memory, --context, max_tokens_per_step or max_running, or take a smaller model",
        )

    def _allocate(self, pool: KvCachePoolConfig, num_rows: int, max_tokens: int) -> BackendInfo:
        device, config = self._device, self._decoder.config
        memory = BlockMemory.of(pool, self._decoder, max_tokens)
        requested = memory.requested()
        max_context = config.max_context if requested is None else memory.longest_context(requested)
        # The cache is allocated last, because by default it gets all memory that is left.
        self._program: CudaProgram = record(
            self._decoder,
            self._ops,
            max_tokens=max_tokens,
            max_sampled=num_rows,
            invariant=self._invariant,
        )
        self._mailbox = Mailbox(device, num_rows, max_tokens)
        self._rows = DeviceRows(
            device, self._mailbox, num_rows, max_context, pool.block_size, max_tokens, pool.is_two_tier
        )
        self._sampler = DeviceSampler(
            num_rows, config.vocabulary_size, self._eos_token_ids, self._rows.tokens, device, num_rows
        )
        sizes = memory.fitting(device, self._decoder.weight_bytes)
        self._cache = full = self._decoder.new_cache(sizes.full, pool.block_size)
        store = None
        if pool.is_two_tier:
            store = self._decoder.new_store(sizes.store, pool.block_size, pool.store_bits)
            self._cache = TwoTierCache(full, store, pool.store_bits, pool.tail_blocks)
            self._rows.number_store_from(sizes.full)
        slots = memory.swap_slots(sizes)
        if self._precompiler is not None:
            # Kernels depend on the longest context, not on the number of blocks that fit into the free memory.
            blocks = max(-(-max_context // pool.block_size), pool.tail_blocks + 2)
            smaller = replace(
                pool, num_blocks=blocks, store_blocks=blocks if pool.is_two_tier else None, memory=None
            )
            self._precompiler.begin(Sizes(smaller, num_rows, max_tokens))
        max_context = min(max_context, memory.longest_context(sizes))
        self._swaps = GpuSwap(device, full, slots.full, store, slots.store)
        self._grammars = RowGrammars(self._compiler, num_rows, config.vocabulary_size)
        self._prompts = ScoredPrompts()
        self._graphs = DecodeGraphs(device, self._launch_decodes, num_rows, max_context, self._invariant)
        return BackendInfo(
            vocabulary_size=config.vocabulary_size,
            max_context=max_context,
            num_blocks=sizes.full,
            block_size=pool.block_size,
            swap_blocks=slots.full,
            bytes_per_block=memory.block_bytes,
            store_blocks=sizes.store,
            store_swap_blocks=slots.store,
            bytes_per_store_block=memory.store_block_bytes,
            tail_blocks=pool.tail_blocks,
            eos_token_ids=self._eos_token_ids,
            recompute_seconds_per_token=2 * config.multiplications_per_token / _OPERATIONS_PER_SECOND,
            swap_seconds_per_block=memory.block_bytes / _COPIED_BYTES_PER_SECOND,
            weight_bytes=self._decoder.weight_bytes,
            device=device.description,
            extra_rows_are_cheap=True,
            answers_are_exact=self._invariant,
        )

    # --- steps --------------------------------------------------------------------------------------------------------

    def check_grammar(self, grammar: Grammar) -> None:
        self._compiler.compile(grammar)

    def submit(self, plan: IterationPlan) -> DeviceStep:
        slot = self._mailbox.take()
        step = DeviceStep(plan, slot, self._sampler, self._swaps, self._grammars)
        with self._device.using(self._stream):
            try:
                # Swaps are launched first: they run and are reported even if the step fails.
                self._swaps.launch(plan, self._last_step)
                self._swaps.block_stream(self._stream, plan.after_swaps)
                self._launch(plan, slot, step)
            except Exception as error:
                # After a GPU error `restore` raises too, and every later step fails.
                with suppress(RuntimeError):
                    self._mailbox.restore()
                step.fail(f"{type(error).__name__}: {error}")
                return step
            self._mailbox.send(slot, step)
        self._last_step = slot.event
        return step

    def close(self) -> None:
        if self._precompiler is not None:
            self._precompiler.close()
        # After a GPU error every call raises it again. The requests have received the error already.
        with suppress(RuntimeError):
            self._device.synchronize()
        if "_mailbox" in vars(self):  # missing if `allocate` was not called or failed
            self._mailbox.close()
        if "_grammars" in vars(self):
            self._grammars.close()
        # Frees the GPU memory even if the caller keeps the engine, for example to read its metrics.
        for name in _HOLD_MEMORY:
            vars(self).pop(name, None)
        with suppress(RuntimeError):
            self._device.release()

    def _launch(self, plan: IterationPlan, slot: MailboxSlot, step: DeviceStep) -> None:
        """Launches the row changes, the forward pass and the sampling of a plan."""
        self._rows.change(plan, slot)
        if plan.row_starts:
            self._sampler.start(plan.row_starts)
            self._grammars.start(plan.row_starts)
            self._prompts.start(plan.row_starts)
        rows = step.sampled_rows
        if self._grammars.has_any:
            step.masks = self._grammars.masks(np.array(rows, np.int64))
        path = self._sampler.path(rows, masked=len(step.masks.entries) > 0) if rows else None
        if not plan.rows:
            self._publish(0)
            return
        if is_decode(plan):
            moves = self._rows.moves(plan, slot)
            if moves is not None:
                # These blocks were complete before the step. So one launch before the graph moves all their layers.
                assert isinstance(self._cache, TwoTierCache)
                move_to_store(self._cache, moves, self._device)
            self._run_decodes(plan, slot, step, path)
            return
        scored_chunks = self._prompts.scored_chunks(plan)
        batch = self._rows.prepare_tokens(plan, slot, indices_of(scored_chunks))
        logits, others = self._program.run(batch, self._cache)
        if path is not None:
            self._sample(logits, step, path, slot)
        self._publish(len(rows))
        self._score(scored_chunks, others, slot)
        step.scored_chunks = scored_chunks

    def _run_decodes(
        self, plan: IterationPlan, slot: MailboxSlot, step: DeviceStep, path: SamplingPath | None
    ) -> None:
        assert path is not None, "every decode samples"
        # With logprobs or grammar masks, sampling is not part of the graph.
        is_plain = path.widest < 0 and not len(step.masks.entries)
        logits = self._graphs.run(len(plan.rows), max(plan.starts) + 1, path if is_plain else None)
        if not is_plain:
            self._sample(logits[: len(plan.rows)], step, path, slot)
            self._publish(len(plan.rows))

    def _launch_decodes(self, kind: Kind) -> Tensor:
        """Launches all kernels of a decode step. Graphs are captured from this function."""
        self._rows.prepare_decodes(kind.size)
        batch = self._rows.decode_batch(kind.size, kind.longest_context)
        logits, _ = self._program.run(batch, self._cache)
        if kind.sampling is not None:
            rows, positions = self._rows.sampled(kind.size)
            self._sampler.sample(logits, rows, positions, kind.sampling)
            self._publish(kind.size)
        return logits

    def _sample(self, logits: Tensor, step: DeviceStep, path: SamplingPath, slot: MailboxSlot) -> None:
        rows, positions = self._rows.sampled(len(step.sampled_rows))
        self._sampler.sample(logits, rows, positions, path, self._uploaded(step, slot))
        step.logprobs = self._sampler.collect(step.sampled_rows, path)

    def _uploaded(self, step: DeviceStep, slot: MailboxSlot) -> tuple[Tensor, Tensor] | None:
        """Copies grammar masks to the GPU: the bits of all masks, and for each entry its mask or -1."""
        masks = step.masks
        if not len(masks.entries):
            return None
        bits = masks.bits.view(np.int32)
        mask_of_entry = np.full(len(step.sampled_rows), -1, np.int32)
        mask_of_entry[masks.entries] = np.arange(len(masks.entries))
        return self._copied(slot, bits.reshape(-1)).view(bits.shape), self._copied(slot, mask_of_entry)

    def _score(self, scored_chunks: Sequence[ScoredChunk], rows: Tensor | None, slot: MailboxSlot) -> None:
        """Scores `_SCORED_AT_ONCE` tokens at a time, because the logits of a whole prompt would be large."""
        at_once = min(_SCORED_AT_ONCE, self._mailbox.capacity)
        start = 0
        for chunk in scored_chunks:
            assert rows is not None, "the step computes the rows that score prompts"
            for first in range(0, len(chunk.tokens), at_once):
                tokens = chunk.tokens[first : first + at_once]
                logits = self._program.logits(rows[start + first : start + first + len(tokens)])
                copied = self._copied(slot, np.array(tokens, np.int32))
                chunk.scores.append(self._sampler.score(logits, copied, chunk.top_count))
            start += len(chunk.tokens)

    def _copied(self, slot: MailboxSlot, words: np.ndarray) -> Tensor:
        """Copies words to new GPU memory."""
        copy = self._device.empty(len(words), dtype=torch.int32)
        copy.copy_(slot.pack([words]), non_blocking=True)
        return copy

    def _publish(self, sampled: int) -> None:
        self._mailbox.publish(self._sampler.tokens, self._sampler.errors, sampled)


def open_cuda_backend(
    checkpoint: Checkpoint | str,
    max_context: int | None = None,
    device: str | Device = "cuda",
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    invariant: bool = False,
) -> CudaBackend:
    """Opens the backend for a model or for the path of a model. `max_context` shortens the model's own context.

    With `invariant`, an answer has the same bits whatever else is in the batch; this costs some speed. The device "cpu"
    is Triton's interpreter, for tests.
    """
    if isinstance(checkpoint, str):
        checkpoint = open_checkpoint(checkpoint)
    if dtype not in _DTYPES:
        raise InvalidRequestError(f"dtype is {dtype!r}; allowed: {', '.join(_DTYPES)}", field="dtype")
    gpu = Device(device) if isinstance(device, str) else device
    try:
        return _open(checkpoint, max_context, gpu, _DTYPES[dtype], invariant)
    except BaseException as error:
        drop_frames(error)
        with suppress(RuntimeError):
            gpu.release()
        if isinstance(error, ModelFileError):
            raise ModelFileError(f"{checkpoint.path}: {error}") from error
        if not is_out_of_memory(error):
            raise
    # Raised outside `except`, so that the new error does not keep the old one, with its GPU memory, as its context.
    raise _too_large(checkpoint, gpu, _DTYPES[dtype])


def _open(
    checkpoint: Checkpoint, max_context: int | None, gpu: Device, dtype: torch.dtype, invariant: bool
) -> CudaBackend:
    layout, metadata, tensors = checkpoint.layout, checkpoint.metadata, checkpoint.tensors
    precompiler = None
    try:
        model_context = build_config(layout, metadata, tensors).max_context
        if max_context is not None:
            check_context(max_context, model_context)
        ops = TritonOps(gpu, dtype)
        if gpu.is_gpu:
            config = build_config(layout, metadata, tensors, max_context)
            weights = decoder_weights(layout, metadata, tensors)
            precompiler = KernelPrecompiler(outline_of(config, weights, ops.dtype, invariant, gpu))
        # Checked before loading, because a large model takes minutes to load.
        if _weight_bytes(checkpoint, dtype) > gpu.free_memory():
            raise _too_large(checkpoint, gpu, dtype)
        decoder = build_decoder(layout, metadata, tensors, ops, max_context)
        compiler = grammar_compiler(checkpoint, decoder.config.vocabulary_size)
    except BaseException:
        if precompiler is not None:
            precompiler.close()
        raise
    return CudaBackend(gpu, decoder, ops, checkpoint.end_ids, compiler, invariant, precompiler)


def _weight_bytes(checkpoint: Checkpoint, dtype: torch.dtype) -> int:
    weights = decoder_weights(checkpoint.layout, checkpoint.metadata, checkpoint.tensors)
    return dtype.itemsize * sum(math.prod(source.shape) for source in weights.values())


def _too_large(checkpoint: Checkpoint, gpu: Device, dtype: torch.dtype) -> OutOfMemoryError:
    needed = f"the weights take {mib(_weight_bytes(checkpoint, dtype))}"
    return shortage(gpu, needed, "take a smaller model, or end other programs that use the GPU")
