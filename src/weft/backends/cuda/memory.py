"""How many blocks the card's memory is cut into, of one tier or of two, how many slots there are to swap them to, and the
error where memory is too small."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import traceback
from contextlib import suppress
from dataclasses import dataclass

import torch

from weft.backends.host_memory import host_memory
from weft.config import KvCachePoolConfig
from weft.errors import OutOfMemoryError
from weft.models.decoder import Decoder
from weft.ops.triton.device import Device
from weft.tiers import PoolSizes, choose_sizes, longest_context

_log = logging.getLogger(__name__)

_DEFAULT_SWAP_BYTES = 8 << 30
_LEAST_TOKENS = 512
"""A cache for fewer tokens is of no use, unless the model's own context is shorter."""
# Of the free memory: for what launched steps allocate, graphs, and the libraries.
_SPARE_SHARE = 0.04
_SPARE_BYTES = 1 << 30


def free_bytes(device: Device) -> int:
    """What blocks may take beside all that has its memory already."""
    free = device.free_memory()
    return max(0, free - _reserve(free))


def _reserve(free: int) -> int:
    return max(_SPARE_BYTES, int(free * _SPARE_SHARE))


@dataclass(frozen=True)
class BlockMemory:
    """What the blocks of a model take, and how many there are to be."""

    pool: KvCachePoolConfig
    model_context: int
    step_tokens: int
    block_bytes: int
    store_block_bytes: int  # 0: there is one tier

    @classmethod
    def of(cls, pool: KvCachePoolConfig, decoder: Decoder, step_tokens: int) -> BlockMemory:
        block_bytes = decoder.new_cache(1, pool.block_size).nbytes
        store_block_bytes = 0
        if pool.is_two_tier:
            store_block_bytes = decoder.new_store(1, pool.block_size, pool.store_bits).nbytes
        return cls(pool, decoder.config.max_context, step_tokens, block_bytes, store_block_bytes)

    def asked(self) -> PoolSizes | None:
        """As many as somebody wants; None: it depends on what is free."""
        if self.pool.num_blocks is None and self.pool.memory is None:
            return None
        return self.sizes(0)

    def sizes(self, free: int) -> PoolSizes:
        """As many as somebody wants, or as fit into so many bytes."""
        if self.pool.is_two_tier:
            return choose_sizes(
                self.pool,
                block_bytes=self.block_bytes,
                store_block_bytes=self.store_block_bytes,
                free_memory=free,
                model_context=self.model_context,
                step_tokens=self.step_tokens,
            )
        asked = self.pool.blocks_in_memory(self.block_bytes)
        return PoolSizes(max(1, free // self.block_bytes) if asked is None else asked, 0)

    def bytes_of(self, sizes: PoolSizes) -> int:
        return sizes.full * self.block_bytes + sizes.store * self.store_block_bytes

    @property
    def least_bytes(self) -> int:
        """The smallest cache that is worth a start."""
        tokens = min(_LEAST_TOKENS, self.model_context)
        full = max(-(-tokens // self.pool.block_size), self.pool.tail_blocks + 2)
        return self.bytes_of(PoolSizes(full, 2))

    def fitting(self, device: Device, weight_bytes: int) -> PoolSizes:
        """As many as were asked for, or as the free memory holds. Raises OutOfMemoryError where memory is too small."""
        asked = self.asked()
        if asked is None:
            needed, room = self.least_bytes, free_bytes(device)
            text = f"the KV cache takes at least {mib(needed)}, with {mib(_reserve(device.free_memory()))} in reserve,"
        else:
            needed, room = self.bytes_of(asked), device.free_memory()
            text = f"the KV cache takes {mib(needed)}"
        if needed > room:
            raise shortage(
                device,
                f"{text} beside {mib(weight_bytes)} of weights",
                "set a smaller --memory, --context or max_tokens_per_step, or take a smaller model",
            )
        return self.sizes(room) if asked is None else asked

    def longest_context(self, sizes: PoolSizes) -> int:
        if self.pool.is_two_tier:
            return longest_context(self.model_context, sizes, self.pool.block_size, self.pool.tail_blocks)
        return min(self.model_context, sizes.full * self.pool.block_size)

    def swap_slots(self, sizes: PoolSizes) -> PoolSizes:
        """In host memory, of both tiers in the proportion of `sizes`. Raises OutOfMemoryError where more were asked for than
        the host has memory for; the default is smaller there."""
        each = self.block_bytes + self.store_block_bytes * sizes.store / sizes.full
        available, full = host_memory().available, self.pool.swap_blocks
        if full is None:
            full = usual = min(sizes.full // 2, int(_DEFAULT_SWAP_BYTES / each))
            if available is not None:
                full = min(usual, int(available / 2 / each))
            if full < usual:
                _log.warning(
                    "the swap space has %s MiB instead of %s: half of the host memory that is available",
                    *(f"{int(blocks * each) >> 20:,}" for blocks in (full, usual)),
                )
        elif available is not None and full * each > available:
            raise OutOfMemoryError(
                f"the swap space of swap_blocks = {full} takes {mib(int(full * each))} of host memory, and "
                f"{mib(available)} are available; set fewer, or swap_blocks = 0 to recompute instead"
            )
        return PoolSizes(full, -(-full * sizes.store // sizes.full))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the card is out of memory, or the host out of memory to page-lock. For the latter torch has no class."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "out of memory" in str(error)
    )


def drop_frames(error: BaseException | None) -> None:
    """Drops the variables of the functions that an error ended. They hold memory of the card while the error is kept."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def shortage(device: Device, needed: str, advice: str) -> OutOfMemoryError:
    """An error with what is needed, what is free, what else uses the card, and what to do."""
    free = 0
    with suppress(RuntimeError):  # not even a CUDA context fits
        free = device.free_memory()
    total, users = device.total_memory(), _users(device)
    used = (
        "" if free == total else f" ({', '.join(users) or 'nvidia-smi names no process that uses the rest'})"
    )
    return OutOfMemoryError(
        f"the memory of {device.description} is too small: {needed}, and {mib(free)} of {mib(total)} are free{used}; {advice}"
    )


def mib(size: int) -> str:
    return f"{size >> 20:,} MiB"


def _users(device: Device) -> list[str]:
    """Processes with memory of the card, the largest first."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    what = ("--query-compute-apps=pid,used_memory,name", "--format=csv,noheader,nounits")
    command = [tool, f"--id={device.card_id}", *what]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    users = []
    for line in told.splitlines():
        pid, used, name = (part.strip() for part in f"{line},,".split(",")[:3])
        if used.isdigit():
            who = "this process" if pid == str(os.getpid()) else f"{os.path.basename(name)}, process {pid},"
            users.append((int(used), f"{who} uses {int(used):,} MiB"))
    return [text for _, text in sorted(users, reverse=True)]
