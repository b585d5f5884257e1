"""The kinds of cache that `python -m benchmarks kv-cache` compares, and engines with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from weft.backends import registry
from weft.config import KvCacheKind, KvCachePoolConfig, SchedulerConfig, ServingEngineConfig
from weft.engine.serving import ServingEngine
from weft.loading.checkpoint import Checkpoint

STEP_TOKENS = 2048
"""Most prompt tokens in one step."""


@dataclass(frozen=True)
class Kind:
    """One kind of cache. Without `bits`, all of it is in full precision."""

    name: str
    bits: int | None
    tail_length: int = 256

    def pool(self, **sizes: Any) -> KvCachePoolConfig:
        """A pool of this kind, without swap slots: results must not depend on other memory."""
        if self.bits is None:
            return KvCachePoolConfig(swap_blocks=0, **sizes)
        return KvCachePoolConfig(
            swap_blocks=0,
            kv_cache=KvCacheKind.TWO_TIER,
            tail_length=self.tail_length,
            store_bits=self.bits,
            **sizes,
        )

    def pool_for(self, sequences: int, context: int) -> KvCachePoolConfig:
        """A pool for `sequences` sequences of `context` tokens, and for the prompt tokens of one step."""
        size = KvCachePoolConfig().block_size
        blocks = -(-context // size)
        step_blocks = -(-STEP_TOKENS // size)
        if self.bits is None:
            return self.pool(num_blocks=sequences * blocks + step_blocks)
        tail = self.tail_length // size
        return self.pool(
            num_blocks=sequences * (tail + 1) + step_blocks + 1,
            store_blocks=sequences * max(2, blocks),
        )


FULL = "full"


def kinds(tail_length: int) -> tuple[Kind, ...]:
    """All kinds; the first is the reference."""
    return (Kind(FULL, None), Kind("8 bits", 8, tail_length), Kind("4 bits", 4, tail_length))


@dataclass(frozen=True)
class Setup:
    """The model and the device of a measurement."""

    checkpoint: Checkpoint
    device: str
    threads: int | None = None

    @contextmanager
    def open(self, pool: KvCachePoolConfig, context: int, sequences: int) -> Iterator[ServingEngine]:
        """An engine for at most `sequences` contexts of `context` tokens. The caller runs its steps."""
        backend = registry.build(
            self.device, checkpoint=self.checkpoint, max_context=context, threads=self.threads
        )
        engine = ServingEngine(backend, engine_config(pool, sequences))
        try:
            yield engine
        finally:
            engine.stop()


def engine_config(pool: KvCachePoolConfig, sequences: int) -> ServingEngineConfig:
    """The configuration of an engine with the order FCFS. A step has room for a decode of every sequence and for
    STEP_TOKENS prompt tokens. So only memory and `sequences` limit how many requests run together."""
    scheduler = SchedulerConfig(
        max_running=sequences,
        max_tokens_per_step=STEP_TOKENS + sequences,
        max_prefill_tokens=STEP_TOKENS,
        max_chunk_tokens=STEP_TOKENS,
        max_draft_tokens=0,  # every sequence gets one token per step
    )
    return ServingEngineConfig(scheduler=scheduler, cache=pool)
