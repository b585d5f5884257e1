"""The caches that `python -m benchmarks kv-cache` compares, and how an engine with one of them is opened."""

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
"""Of prompts in a step, at most."""


@dataclass(frozen=True)
class Kind:
    """One kind of cache. `bits` None: all of it in full precision."""

    name: str
    bits: int | None
    tail_length: int = 256

    def pool(self, **sizes: Any) -> KvCachePoolConfig:
        """Never with swap space: nothing measured here may depend on a second memory."""
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
        """With room for so many sequences of so many tokens, and for the prompts of a step beside them."""
        size = KvCachePoolConfig().block_size
        blocks = -(-context // size)
        under_way = -(-STEP_TOKENS // size)
        if self.bits is None:
            return self.pool(num_blocks=sequences * blocks + under_way)
        tail = self.tail_length // size
        return self.pool(
            num_blocks=sequences * (tail + 1) + under_way + 1,
            store_blocks=sequences * max(2, blocks),
        )


FULL = "full"


def kinds(tail_length: int) -> tuple[Kind, ...]:
    """What the others are compared with comes first."""
    return (Kind(FULL, None), Kind("8 bits", 8, tail_length), Kind("4 bits", 4, tail_length))


@dataclass(frozen=True)
class Setup:
    """What is measured, and on what."""

    checkpoint: Checkpoint
    device: str
    threads: int | None = None

    @contextmanager
    def open(self, pool: KvCachePoolConfig, context: int, sequences: int) -> Iterator[ServingEngine]:
        """An engine for contexts of so many tokens, at most `sequences` of them together. It is not started: whoever
        measures runs its steps."""
        backend = registry.build(
            self.device, checkpoint=self.checkpoint, max_context=context, threads=self.threads
        )
        engine = ServingEngine(backend, engine_config(pool, sequences))
        try:
            yield engine
        finally:
            engine.stop()


def engine_config(pool: KvCachePoolConfig, sequences: int) -> ServingEngineConfig:
    """First come, first served, a prompt in two or three steps: what runs together is then decided by memory alone."""
    scheduler = SchedulerConfig(
        max_running=sequences,
        max_tokens_per_step=STEP_TOKENS + sequences,
        max_prefill_tokens=STEP_TOKENS,
        max_chunk_tokens=STEP_TOKENS,
        max_draft_tokens=0,  # all get on by one token a step
    )
    return ServingEngineConfig(scheduler=scheduler, cache=pool)
