"""Decides how much host memory the KV cache and the swap space may use, next to the weights."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from weft.backends.host_memory import HostMemory
from weft.errors import OutOfMemoryError

# The default cache size. It is a constant and not a fraction of the machine's memory, so that a model behaves the same
# everywhere.
_DEFAULT_CACHE_BYTES = 2 << 30
# Reserved for activations, finished answers (`max_learned_bytes`), and the other processes of a server.
_OTHER_BYTES = 256 << 20
# The smallest useful cache, in tokens.
_LEAST_TOKENS = 512


@dataclass(frozen=True)
class MemoryBudget:
    """Chooses default sizes, and raises an error for sizes above the cgroup limit, at which the operating system would
    kill the process. Without a limit, requested sizes are not checked here."""

    memory: HostMemory
    """The free memory before the weights are loaded."""
    weight_bytes: int

    @contextmanager
    def for_weights(self) -> Iterator[None]:
        """A context for loading the weights. Raises OutOfMemoryError if they do not fit."""
        self._require(0, "or take a smaller model")
        try:
            yield
        except MemoryError as error:
            raise self._does_not_fit(0, "or take a smaller model") from error

    def default_cache_bytes(self, block_bytes: int, block_size: int, max_context: int) -> int:
        """`_DEFAULT_CACHE_BYTES`, or a whole context of the model if that is larger and fits. The limit is half of the
        memory that the weights leave free."""
        least = -(-min(max_context, _LEAST_TOKENS) // block_size) * block_bytes
        self._require(least, "or take a smaller model")
        whole_context = -(-max_context // block_size) * block_bytes
        most = max(least, self._left_of(self._available) // 2)
        default = whole_context if _DEFAULT_CACHE_BYTES < whole_context <= most else _DEFAULT_CACHE_BYTES
        return min(default, most)

    def default_swap_blocks(self, num_blocks: int, cache_bytes: int) -> int:
        """The default number of swap slots: half as many as the cache has blocks, but no more than fit into the cgroup
        limit."""
        half = num_blocks // 2
        if self.memory.limit is None:
            return half
        left = self._left_of(self.memory.left_in_limit)
        return max(0, min(half, (left - cache_bytes) * num_blocks // cache_bytes))

    def check(self, cache_bytes: int, swap_bytes: int) -> None:
        most = max(0, self._left_of(self.memory.left_in_limit)) >> 20
        advice = f"or set memory (and swap_blocks, which take {swap_bytes >> 20} MiB) to {most} MiB at most"
        self._require(cache_bytes + swap_bytes, advice)

    @property
    def _available(self) -> int:
        if self.memory.available is not None:
            return self.memory.available
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2

    def _left_of(self, memory: int) -> int:
        """What weights and `_OTHER_BYTES` leave of this memory."""
        return memory - self.weight_bytes - _OTHER_BYTES

    def _require(self, cache_bytes: int, advice: str) -> None:
        """Raises OutOfMemoryError if the weights and this much cache exceed the cgroup limit."""
        if self.memory.limit is not None and cache_bytes > self._left_of(self.memory.left_in_limit):
            raise self._does_not_fit(cache_bytes, advice)

    def _does_not_fit(self, cache_bytes: int, advice: str) -> OutOfMemoryError:
        limit = self.memory.limit
        free = self._available if limit is None else self.memory.left_in_limit
        where = "" if limit is None else f" inside the cgroup's limit of {limit >> 20} MiB"
        needed = self.weight_bytes + cache_bytes + _OTHER_BYTES
        # An allocation may fail although enough is free: at a limit of the process, such as `ulimit -v`.
        is_cgroup = limit is not None and needed > free
        remedy = "raise the limit" if is_cgroup else "free memory, raise the limits of this process"
        return OutOfMemoryError(
            f"{needed >> 20} MiB of memory are needed ({self.weight_bytes >> 20} for the weights, {cache_bytes >> 20} for KV "
            f"cache and swap space, {_OTHER_BYTES >> 20} for the rest) and {free >> 20} MiB are free{where}; "
            f"{remedy}, {advice}"
        )
