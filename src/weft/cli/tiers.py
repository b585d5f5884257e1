"""The two-tier KV cache on the command line: its options, and its rows in the start-up table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from weft.config import KvCacheKind, KvCachePoolConfig, named_choice

if TYPE_CHECKING:
    from weft.tiers import TierSizes

_MIB = 1 << 20


def cache_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Checks options of `KvCachePoolConfig` before a model is fetched. Drops those that are None."""
    options = {name: value for name, value in given.items() if value is not None}
    if "kv_cache" in options:
        options["kv_cache"] = named_choice("kv_cache", options["kv_cache"], KvCacheKind)
    KvCachePoolConfig(**options)
    return options


def tier_rows(tiers: TierSizes) -> list[tuple[str, str, str]]:
    """Rows of the start-up table: name, size and content of each tier."""
    return [
        (
            "tail",
            f"{tiers.tail_bytes / _MIB:,.0f} MiB",
            f"{tiers.tail_tokens:,} tokens in full precision: the newest {tiers.tail_length:,} of every context",
        ),
        (
            "store",
            f"{tiers.store_bytes / _MIB:,.0f} MiB",
            f"{tiers.store_tokens:,} tokens in {tiers.store_bits} bits; with the tail {tiers.ratio:.2f} times as many "
            "as a full cache",
        ),
    ]
