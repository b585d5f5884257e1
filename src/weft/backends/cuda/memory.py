"""Decides how many KV blocks fit into GPU memory and how many swap slots into host memory, and makes the error if
memory is too small."""

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
"""The smallest useful cache, in tokens. If the model's own context is shorter, that is enough."""
# Reserve of free memory for temporary tensors of steps, CUDA graphs and libraries.
_SPARE_SHARE = 0.04
_SPARE_BYTES = 1 << 30


def free_bytes(device: Device) -> int:
    """The GPU memory that KV blocks may take: the free memory minus a reserve."""
    free = device.free_memory()
    return max(0, free - _reserve(free))


def _reserve(free: int) -> int:
    return max(_SPARE_BYTES, int(free * _SPARE_SHARE))


@dataclass(frozen=True)
class BlockMemory:
    """The sizes of the KV blocks of a model, from which their number follows."""

    pool: KvCachePoolConfig
    model_context: int
    step_tokens: int
    block_bytes: int
    store_block_bytes: int  # 0: one tier

    @classmethod
    def of(cls, pool: KvCachePoolConfig, decoder: Decoder, step_tokens: int) -> BlockMemory:
        block_bytes = decoder.new_cache(1, pool.block_size).nbytes
        store_block_bytes = 0
        if pool.is_two_tier:
            store_block_bytes = decoder.new_store(1, pool.block_size, pool.store_bits).nbytes
        return cls(pool, decoder.config.max_context, step_tokens, block_bytes, store_block_bytes)

    def requested(self) -> PoolSizes | None:
        """The numbers of blocks that the settings ask for. None: they depend on the free memory."""
        if self.pool.num_blocks is None and self.pool.memory is None:
            return None
        return self.sizes(0)

    def sizes(self, free: int) -> PoolSizes:
        """The numbers of blocks that the settings ask for, or those that fit into `free` bytes."""
        if self.pool.is_two_tier:
            return choose_sizes(
                self.pool,
                block_bytes=self.block_bytes,
                store_block_bytes=self.store_block_bytes,
                free_memory=free,
                model_context=self.model_context,
                step_tokens=self.step_tokens,
            )
        requested = self.pool.blocks_in_memory(self.block_bytes)
        return PoolSizes(max(1, free // self.block_bytes) if requested is None else requested, 0)

    def bytes_of(self, sizes: PoolSizes) -> int:
        return sizes.full * self.block_bytes + sizes.store * self.store_block_bytes

    @property
    def least_bytes(self) -> int:
        """The size of the smallest useful cache."""
        tokens = min(_LEAST_TOKENS, self.model_context)
        full = max(-(-tokens // self.pool.block_size), self.pool.tail_blocks + 2)
        return self.bytes_of(PoolSizes(full, 2))

    def fitting(self, device: Device, weight_bytes: int) -> PoolSizes:
        """The requested numbers of blocks, or those that fit. Raises OutOfMemoryError if GPU memory is too small."""
        requested = self.requested()
        if requested is None:
            needed, usable = self.least_bytes, free_bytes(device)
            text = f"the KV cache takes at least {mib(needed)}, with {mib(_reserve(device.free_memory()))} in reserve,"
        else:
            needed, usable = self.bytes_of(requested), device.free_memory()
            text = f"the KV cache takes {mib(needed)}"
        if needed > usable:
            raise shortage(
                device,
                f"{text} beside {mib(weight_bytes)} of weights",
                "set a smaller --memory, --context or max_tokens_per_step, or take a smaller model",
            )
        return self.sizes(usable) if requested is None else requested

    def longest_context(self, sizes: PoolSizes) -> int:
        if self.pool.is_two_tier:
            return longest_context(self.model_context, sizes, self.pool.block_size, self.pool.tail_blocks)
        return min(self.model_context, sizes.full * self.pool.block_size)

    def swap_slots(self, sizes: PoolSizes) -> PoolSizes:
        """The numbers of swap slots of both tiers, in the proportion of `sizes`. By default they use at most half of
        the available host memory. Raises OutOfMemoryError if a requested number does not fit."""
        each = self.block_bytes + self.store_block_bytes * sizes.store / sizes.full
        available, full = host_memory().available, self.pool.swap_blocks
        if full is None:
            full = default = min(sizes.full // 2, int(_DEFAULT_SWAP_BYTES / each))
            if available is not None:
                full = min(default, int(available / 2 / each))
            if full < default:
                _log.warning(
                    "the swap space has %s MiB instead of %s: half of the host memory that is available",
                    *(f"{int(blocks * each) >> 20:,}" for blocks in (full, default)),
                )
        elif available is not None and full * each > available:
            raise OutOfMemoryError(
                f"the swap space of swap_blocks = {full} takes {mib(int(full * each))} of host memory, and "
                f"{mib(available)} are available; set fewer, or swap_blocks = 0 to recompute instead"
            )
        return PoolSizes(full, -(-full * sizes.store // sizes.full))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the GPU is out of memory, or the host out of memory to pin. torch has no error class for pinned memory."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "out of memory" in str(error)
    )


def drop_frames(error: BaseException | None) -> None:
    """Clears the local variables in the traceback of an error. Otherwise they keep GPU memory as long as the error
    exists."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def shortage(device: Device, needed: str, advice: str) -> OutOfMemoryError:
    """An error that states the needed memory, the free memory, which processes use the GPU, and what to do."""
    free = 0
    with suppress(RuntimeError):  # raised if not even a CUDA context fits
        free = device.free_memory()
    total, processes = device.total_memory(), _processes(device)
    used = (
        ""
        if free == total
        else f" ({', '.join(processes) or 'nvidia-smi names no process that uses the rest'})"
    )
    return OutOfMemoryError(
        f"the memory of {device.description} is too small: {needed}, and {mib(free)} of {mib(total)} are free{used}; {advice}"
    )


def mib(size: int) -> str:
    return f"{size >> 20:,} MiB"


def _processes(device: Device) -> list[str]:
    """A text for each process that uses memory of the GPU, the largest first."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    options = ("--query-compute-apps=pid,used_memory,name", "--format=csv,noheader,nounits")
    command = [tool, f"--id={device.gpu_id}", *options]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    processes = []
    for line in output.splitlines():
        pid, used, name = (part.strip() for part in f"{line},,".split(",")[:3])
        if used.isdigit():
            process = (
                "this process" if pid == str(os.getpid()) else f"{os.path.basename(name)}, process {pid},"
            )
            processes.append((int(used), f"{process} uses {int(used):,} MiB"))
    return [text for _, text in sorted(processes, reverse=True)]
