"""The two-tier KV cache as people meet it: options, settings, the start-up tables, and the page of metrics."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from weft.backends.noop import NoopBackend
from weft.cli import serve_command as serve
from weft.cli.start import start
from weft.cli.tiers import cache_options, tier_rows
from weft.config import KvCacheKind, KvCachePoolConfig, ServingEngineConfig
from weft.engine.ipc.shared_answers import SharedAnswers
from weft.engine.serving import ServingEngine
from weft.errors import InvalidRequestError, WeftError
from weft.llm import LLM
from weft.metrics import ServingMetrics, TwoTierKvCache
from weft.plan import BackendInfo
from weft.server.config_file import gather
from weft.server.lifecycle import Started
from weft.server.logs import ServerLog
from weft.server.metrics import ServerMetrics
from weft.server.settings import ServerSettings
from weft.tiers import tier_sizes

MIB = 1 << 20
POOL = KvCachePoolConfig(kv_cache=KvCacheKind.TWO_TIER, store_bits=4, tail_length=32)
INFO = BackendInfo(
    vocabulary_size=100,
    max_context=8192,
    num_blocks=10,
    block_size=16,
    swap_blocks=4,
    bytes_per_block=MIB,
    store_blocks=60,
    store_swap_blocks=8,
    bytes_per_store_block=MIB // 4,
    tail_blocks=2,
)
FIGURES = TwoTierKvCache(
    tail_tokens=160,
    store_tokens=960,
    tail_bytes=1000,
    store_bytes=2000,
    compression_ratio=2.5,
    migrations=7,
    migrations_shared=3,
)


# --- options ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kv_cache": "two"}, "kv_cache is 'two'; allowed: full, two-tier"),
        ({"policy": "best"}, "policy is 'best'; allowed: fcfs, shortest-job-first, priority, adaptive"),
        ({"kv_cache": 2}, r"kv_cache is 2; allowed: KvCacheKind\.FULL, KvCacheKind\.TWO_TIER"),
        ({"kv_cache": "two-tier", "tail_length": 40}, "tail_length is 40 and block_size 16"),
        ({"kv_cache": "two-tier", "store_bits": 2}, "store_bits is 2; allowed: 8, 4"),
    ],
)
def test_a_wrong_word_or_number_is_refused_before_a_model_is_looked_for(
    options: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        LLM("/nowhere/model.gguf", **options)


def test_a_command_refuses_options_that_do_not_go_together_before_it_fetches_a_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("weft.cli.start.fetch", lambda model: pytest.fail("a model was fetched for nothing"))
    with pytest.raises(InvalidRequestError, match="tail_length is 40 and block_size 16"):
        start("default", None, None, None, "cpu", {"kv_cache": "two-tier", "tail_length": 40})


def test_options_that_were_not_given_are_left_to_the_defaults() -> None:
    assert cache_options({"kv_cache": None, "tail_length": None, "store_bits": None}) == {}
    assert cache_options({"kv_cache": "two-tier", "tail_length": 32, "store_bits": None}) == {
        "kv_cache": KvCacheKind.TWO_TIER,
        "tail_length": 32,
    }


def test_flags_variables_and_the_file_of_a_server_set_the_same_fields(tmp_path: Path) -> None:
    file = tmp_path / "weft.toml"
    file.write_text("[engine.cache]\nkv_cache = 'two-tier'\nstore_bits = 4\nexpected_context = 2048\n")
    variables = {"WEFT_SERVE_ENGINE_CACHE_STORE_BITS": "8", "WEFT_SERVE_ENGINE_CACHE_TAIL_LENGTH": "64"}
    gathered = gather(file, variables, {"engine.cache.tail_length": 32})
    cache = gathered.applied_to(ServerSettings("model", ())).engine.cache
    assert (cache.kv_cache, cache.store_bits, cache.tail_length) == (KvCacheKind.TWO_TIER, 8, 32)
    assert cache.expected_context == 2048


def test_a_wrong_flag_of_a_server_is_refused_by_its_name() -> None:
    with pytest.raises(InvalidRequestError, match=r"--kv-cache: .*'half'; allowed: full, two-tier"):
        gather(None, {}, {"engine.cache.kv_cache": "half"})
    gathered = gather(None, {}, {"engine.cache.kv_cache": "two-tier", "engine.cache.tail_length": 40})
    with pytest.raises(InvalidRequestError, match=r"--tail-length: engine\.cache\.tail_length is 40"):
        gathered.applied_to(ServerSettings("model", ()))


# --- the start-up tables ------------------------------------------------------------------------------------------


def test_the_sizes_of_both_tiers_and_what_they_gain_follow_from_the_blocks() -> None:
    tiers = tier_sizes(INFO, POOL)
    assert tiers is not None
    assert (tiers.tail_tokens, tiers.tail_bytes) == (160, 10 * MIB)
    assert (tiers.store_tokens, tiers.store_bytes) == (960, 15 * MIB)
    assert (tiers.tail_length, tiers.store_bits) == (32, 4)
    # 70 blocks in the memory of 25 full ones.
    assert tiers.ratio == pytest.approx(2.8)
    assert (INFO.cache_bytes, INFO.cache_tokens, INFO.swap_bytes) == (25 * MIB, 1120, 6 * MIB)
    assert tier_sizes(dataclasses.replace(INFO, store_blocks=0), POOL) is None


def test_the_rows_of_a_start_say_size_tokens_and_gain_of_the_tiers() -> None:
    tiers = tier_sizes(INFO, POOL)
    assert tiers is not None
    tail, store = tier_rows(tiers)
    assert tail == ("tail", "10 MiB", "160 tokens in full precision: the newest 32 of every context")
    assert store == (
        "store",
        "15 MiB",
        "960 tokens in 4 bits; with the tail 2.80 times as many as a full cache",
    )


class _Log(ServerLog):
    def __init__(self, format: Any) -> None:
        self.format = format
        self.said: list[tuple[str, str, dict[str, Any]]] = []

    def event(self, event: str, message: str, level: str = "info", **fields: Any) -> None:
        self.said.append((event, message, fields))


def announced(format: str, info: BackendInfo, pool: KvCachePoolConfig) -> tuple[str, dict[str, Any]]:
    settings = ServerSettings("model", ("small",), backend="noop", engine=ServingEngineConfig(cache=pool))
    log = _Log(format)
    serve._announce(settings, Started("127.0.0.1", 8000, info, 4096, has_chat_template=True), log)
    [(_, message, fields)] = [one for one in log.said if one[0] == "ready"]
    return message, fields


def test_a_server_tells_both_tiers_when_it_starts() -> None:
    lines = [" ".join(line.split()) for line in announced("text", INFO, POOL)[0].splitlines()]
    assert "KV cache 25 MiB at most: 1,120 tokens, 4,096 in one context" in lines
    assert "tail 10 MiB: 160 tokens in full precision: the newest 32 of every context" in lines
    assert "store 15 MiB: 960 tokens in 4 bits; with the tail 2.80 times as many as a full cache" in lines
    assert "swap 6 MiB at most" in lines
    fields = announced("json", INFO, POOL)[1]
    assert (fields["kv_cache_bytes"], fields["swap_bytes"]) == (25 * MIB, 6 * MIB)
    assert fields["kv_cache_tiers"]["store_tokens"] == 960 and fields["kv_cache_tiers"]["store_bits"] == 4


def test_a_server_with_one_tier_says_nothing_of_tiers() -> None:
    info = dataclasses.replace(INFO, store_blocks=0, store_swap_blocks=0)
    message, fields = announced("text", info, KvCachePoolConfig())
    assert "KV cache" in message and "tail" not in message and "store" not in message
    assert "kv_cache_tiers" not in fields


# --- metrics ------------------------------------------------------------------------------------------------------


def fresh(kind: KvCacheKind) -> ServingMetrics:
    """The metrics of an engine that has run nothing."""
    pool = KvCachePoolConfig(
        kv_cache=kind, num_blocks=64, store_blocks=64 if kind is KvCacheKind.TWO_TIER else None
    )
    return ServingEngine(NoopBackend(), ServingEngineConfig(cache=pool)).metrics()


class _Engine:
    """As much of an engine as the page of metrics asks."""

    restarts = stalls = 0

    def __init__(self, figures: TwoTierKvCache | None) -> None:
        self.shared_answers = SharedAnswers({}, print, True, ServingEngineConfig())
        self.figures: TwoTierKvCache | None = figures
        self.is_down = False

    async def metrics(self) -> Any:
        if self.is_down:
            raise WeftError("down")
        kind = KvCacheKind.FULL if self.figures is None else KvCacheKind.TWO_TIER
        return dataclasses.replace(fresh(kind), two_tier=self.figures)


def page(metrics: ServerMetrics, engine: Any) -> dict[str, float]:
    lines = asyncio.run(metrics.text(engine)).decode().splitlines()
    values = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name.partition("{")[0]: float(value) for name, _, value in values}


def test_metrics_tell_the_tiers_and_count_migrations_over_a_restart_of_the_engine() -> None:
    metrics, engine = ServerMetrics("small", is_two_tier=True), _Engine(FIGURES)
    shown = page(metrics, engine)
    assert shown["weft:kv_cache_tail_tokens"] == 160 and shown["weft:kv_cache_store_tokens"] == 960
    assert shown["weft:kv_cache_tail_bytes"] == 1000 and shown["weft:kv_cache_store_bytes"] == 2000
    assert shown["weft:kv_cache_compression_ratio"] == 2.5
    assert shown["weft:kv_cache_migrations_total"] == 7
    assert shown["weft:kv_cache_migrations_shared_total"] == 3
    engine.figures = dataclasses.replace(FIGURES, migrations=2, migrations_shared=0)  # it began anew
    assert page(metrics, engine)["weft:kv_cache_migrations_total"] == 9


def test_while_the_engine_is_down_its_tiers_hold_nothing() -> None:
    metrics, engine = ServerMetrics("small", is_two_tier=True), _Engine(FIGURES)
    page(metrics, engine)
    engine.is_down = True
    shown = page(metrics, engine)
    assert shown["weft:kv_cache_tail_bytes"] == 0 and shown["weft:kv_cache_store_tokens"] == 0
    assert shown["weft:kv_cache_compression_ratio"] == 1 and shown["weft:kv_cache_migrations_total"] == 7


def test_metrics_of_a_plain_cache_have_no_tiers() -> None:
    assert not [
        name for name in page(ServerMetrics("small"), _Engine(None)) if "tail" in name or "store" in name
    ]
