"""The CUDA backend: carries out plans on the card without waiting for it.

`submit` runs in the engine's thread: it writes what changed into a slot of the mailbox, launches the step, and comes back;
`result` waits for the end of one step and reads its slot. What a step samples is in the rows on the card before the next
step reads them, so the engine plans and submits step N + 1 while N runs.
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
from weft.backends.cuda.mailbox import Mailbox, Slot
from weft.backends.cuda.memory import (
    BlockMemory,
    drop_frames,
    is_out_of_memory,
    mib,
    shortage,
)
from weft.backends.cuda.precompile import ForeseenKernels, Sizes, outline_of
from weft.backends.cuda.prompt_logprobs import PromptPiece, ScoredPrompts, indices_of
from weft.backends.cuda.rows import DeviceRows, is_decode
from weft.backends.cuda.sampler import DeviceSampler, SamplingPath
from weft.backends.cuda.step import DeviceStep
from weft.backends.cuda.swap import CardSwap
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

# What a large card does in a second: only their ratio matters, and only to the choice between recompute and swap.
_OPERATIONS_PER_SECOND = 4e14
_COPIED_BYTES_PER_SECOND = 4e10

_HOLD_MEMORY = (
    *("_cache", "_decoder", "_graphs", "_mailbox", "_ops"),
    *("_program", "_rows", "_sampler", "_swaps"),
)
"""Attributes of a backend, of which some are missing until it is allocated."""

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class CudaBackend:
    """`Backend` over a program of launches; all state of rows and cache is on the device."""

    def __init__(
        self,
        device: Device,
        decoder: Decoder,
        ops: TritonOps,
        eos_token_ids: frozenset[int],
        grammars: GrammarCompiler,
        invariant: bool = False,
        foreseen: ForeseenKernels | None = None,
    ) -> None:
        self._device = device
        self._decoder = decoder
        self._ops = ops
        self._eos_token_ids = eos_token_ids
        self._compiler = grammars
        self._invariant = invariant
        self._foreseen = foreseen
        self._stream = device.stream()
        # Weights may still be on their way.
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
        # Not inside `except`: the error would keep the other one as its context.
        raise shortage(
            self._device,
            f"the weights take {mib(weight_bytes)}, and the KV cache with room for steps of {max_tokens} tokens and "
            f"{num_rows} requests more than the rest",
            "set a smaller --memory, --context, max_tokens_per_step or max_running, or take a smaller model",
        )

    def _allocate(self, pool: KvCachePoolConfig, num_rows: int, max_tokens: int) -> BackendInfo:
        device, config = self._device, self._decoder.config
        memory = BlockMemory.of(pool, self._decoder, max_tokens)
        asked = memory.asked()
        max_context = config.max_context if asked is None else memory.longest_context(asked)
        # All that is not the cache comes first: the cache has what is left.
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
        if self._foreseen is not None:
            # Kernels depend on how long rows are, not on how many blocks the free memory happens to hold.
            whole = max(-(-max_context // pool.block_size), pool.tail_blocks + 2)
            chosen = replace(
                pool, num_blocks=whole, store_blocks=whole if pool.is_two_tier else None, memory=None
            )
            self._foreseen.begin(Sizes(chosen, num_rows, max_tokens))
        max_context = min(max_context, memory.longest_context(sizes))
        self._swaps = CardSwap(device, full, slots.full, store, slots.store)
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
        )

    # --- steps --------------------------------------------------------------------------------------------------------

    def check_grammar(self, grammar: Grammar) -> None:
        self._compiler.compile(grammar)

    def submit(self, plan: IterationPlan) -> DeviceStep:
        slot = self._mailbox.take()
        step = DeviceStep(plan, slot, self._sampler, self._swaps, self._grammars)
        with self._device.using(self._stream):
            try:
                # Swaps are told whatever becomes of the step.
                self._swaps.launch(plan, self._last_step)
                self._swaps.hold(self._stream, plan.after_swaps)
                self._launch(plan, slot, step)
            except Exception as error:
                self._mailbox.restore()
                step.fail(f"{type(error).__name__}: {error}")
                return step
            self._mailbox.send(slot, step)
        self._last_step = slot.event
        return step

    def close(self) -> None:
        if self._foreseen is not None:
            self._foreseen.close()
        # A card that failed reports it at every call; the requests have got their errors already.
        with suppress(RuntimeError):
            self._device.synchronize()
        if "_mailbox" in vars(self):  # unless it was not allocated
            self._mailbox.close()
        if "_grammars" in vars(self):
            self._grammars.close()
        # An engine that is kept for its figures keeps none of the card's memory.
        for name in _HOLD_MEMORY:
            vars(self).pop(name, None)
        with suppress(RuntimeError):
            self._device.release()

    def _launch(self, plan: IterationPlan, slot: Slot, step: DeviceStep) -> None:
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
                # All of them were filled before the step, so every layer's go at once, in front of its graph.
                assert isinstance(self._cache, TwoTierCache)
                move_to_store(self._cache, moves, self._device)
            self._run_decodes(plan, slot, step, path)
            return
        pieces = self._prompts.pieces(plan)
        batch = self._rows.prepare_tokens(plan, slot, indices_of(pieces))
        logits, others = self._program.run(batch, self._cache)
        if path is not None:
            self._sample(logits, step, path, slot)
        self._publish(len(rows))
        self._score(pieces, others, slot)
        step.pieces = pieces

    def _run_decodes(
        self, plan: IterationPlan, slot: Slot, step: DeviceStep, path: SamplingPath | None
    ) -> None:
        assert path is not None, "every decode samples"
        # Where more is asked than tokens, or masks come from the host, sampling is not part of a graph.
        is_plain = path.widest < 0 and not len(step.masks.entries)
        logits = self._graphs.run(len(plan.rows), max(plan.starts) + 1, path if is_plain else None)
        if not is_plain:
            self._sample(logits[: len(plan.rows)], step, path, slot)
            self._publish(len(plan.rows))

    def _launch_decodes(self, kind: Kind) -> Tensor:
        """Everything of a decode step; what a graph is captured from."""
        self._rows.prepare_decodes(kind.size)
        batch = self._rows.decode_batch(kind.size, kind.longest_context)
        logits, _ = self._program.run(batch, self._cache)
        if kind.sampling is not None:
            rows, positions = self._rows.sampled(kind.size)
            self._sampler.sample(logits, rows, positions, kind.sampling)
            self._publish(kind.size)
        return logits

    def _sample(self, logits: Tensor, step: DeviceStep, path: SamplingPath, slot: Slot) -> None:
        rows, positions = self._rows.sampled(len(step.sampled_rows))
        self._sampler.sample(logits, rows, positions, path, self._uploaded(step, slot))
        step.logprobs = self._sampler.collect(step.sampled_rows, path)

    def _uploaded(self, step: DeviceStep, slot: Slot) -> tuple[Tensor, Tensor] | None:
        """What grammars allow, on the card: the bits of each mask, and which entry has which."""
        masks = step.masks
        if not len(masks.entries):
            return None
        bits = masks.bits.view(np.int32)
        mask_of_entry = np.full(len(step.sampled_rows), -1, np.int32)
        mask_of_entry[masks.entries] = np.arange(len(masks.entries))
        return self._copied(slot, bits.reshape(-1)).view(bits.shape), self._copied(slot, mask_of_entry)

    def _score(self, pieces: Sequence[PromptPiece], rows: Tensor | None, slot: Slot) -> None:
        """Logits of whole prompts would be large: they are made and used up piece by piece."""
        at_once = min(_SCORED_AT_ONCE, self._mailbox.capacity)
        start = 0
        for piece in pieces:
            assert rows is not None, "the step computes the rows that score prompts"
            for first in range(0, len(piece.tokens), at_once):
                tokens = piece.tokens[first : first + at_once]
                logits = self._program.logits(rows[start + first : start + first + len(tokens)])
                copied = self._copied(slot, np.array(tokens, np.int32))
                piece.scores.append(self._sampler.score(logits, copied, piece.top_count))
            start += len(piece.tokens)

    def _copied(self, slot: Slot, words: np.ndarray) -> Tensor:
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
    """The backend for a model, or for the path of one; errors name it. `max_context` shortens the model's own context.

    With `invariant` a text does not depend on what else is computed beside it, to the bit; it costs speed. The device
    "cpu" is Triton's interpreter, for tests.
    """
    if isinstance(checkpoint, str):
        checkpoint = open_checkpoint(checkpoint)
    if dtype not in _DTYPES:
        raise InvalidRequestError(f"dtype is {dtype!r}; allowed: {', '.join(_DTYPES)}", field="dtype")
    card = Device(device) if isinstance(device, str) else device
    try:
        return _open(checkpoint, max_context, card, _DTYPES[dtype], invariant)
    except BaseException as error:
        drop_frames(error)
        with suppress(RuntimeError):
            card.release()
        if isinstance(error, ModelFileError):
            raise ModelFileError(f"{checkpoint.path}: {error}") from error
        if not is_out_of_memory(error):
            raise
    # Not inside `except`: the error would keep the other one as its context.
    raise _too_large(checkpoint, card, _DTYPES[dtype])


def _open(
    checkpoint: Checkpoint, max_context: int | None, card: Device, dtype: torch.dtype, invariant: bool
) -> CudaBackend:
    layout, metadata, tensors = checkpoint.layout, checkpoint.metadata, checkpoint.tensors
    foreseen = None
    try:
        own_context = build_config(layout, metadata, tensors).max_context
        if max_context is not None:
            check_context(max_context, own_context)
        ops = TritonOps(card, dtype)
        if card.is_card:
            config = build_config(layout, metadata, tensors, max_context)
            weights = decoder_weights(layout, metadata, tensors)
            foreseen = ForeseenKernels(outline_of(config, weights, ops.dtype, invariant, card))
        # Before anything is read: a large model takes minutes.
        if _weight_bytes(checkpoint, dtype) > card.free_memory():
            raise _too_large(checkpoint, card, dtype)
        decoder = build_decoder(layout, metadata, tensors, ops, max_context)
        compiler = grammar_compiler(checkpoint, decoder.config.vocabulary_size)
    except BaseException:
        if foreseen is not None:
            foreseen.close()
        raise
    return CudaBackend(card, decoder, ops, checkpoint.end_ids, compiler, invariant, foreseen)


def _weight_bytes(checkpoint: Checkpoint, dtype: torch.dtype) -> int:
    weights = decoder_weights(checkpoint.layout, checkpoint.metadata, checkpoint.tensors)
    return dtype.itemsize * sum(math.prod(source.shape) for source in weights.values())


def _too_large(checkpoint: Checkpoint, card: Device, dtype: torch.dtype) -> OutOfMemoryError:
    needed = f"the weights take {mib(_weight_bytes(checkpoint, dtype))}"
    return shortage(card, needed, "take a smaller model, or end what else uses the card")
