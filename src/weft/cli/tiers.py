"""The two-tier KV cache in the commands: its options, and what a start says of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from weft.config import KvCacheKind, KvCachePoolConfig, named_choice

if TYPE_CHECKING:
    from weft.tiers import TierSizes

_MIB = 1 << 20


def cache_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Options by the fields of `KvCachePoolConfig`, None for one that was not given. Refuses what does not go together
    before a model is fetched for it."""
    options = {name: value for name, value in given.items() if value is not None}
    if "kv_cache" in options:
        options["kv_cache"] = named_choice("kv_cache", options["kv_cache"], KvCacheKind)
    KvCachePoolConfig(**options)
    return options


def tier_rows(tiers: TierSizes) -> list[tuple[str, str, str]]:
    """Of the start-up table: each tier's name, its size, and what that holds."""
    return [
        (
            "tail",
            f"{tiers.tail_bytes / _MIB:,.0f} MiB",
            f"{tiers.tail_tokens:,} tokens in full precision: the newest {tiers.tail_length:,} of every context",
        ),
        (
            "store",
            f"{tiers.store_bytes / _MIB:,.0f} MiB",
            f"{tiers.store_tokens:,} tokens in {tiers.store_bits} bits; with the tail {tiers.ratio:.2f} times those "
            "of a full cache",
        ),
    ]
