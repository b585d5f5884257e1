"""A server with a two-tier KV cache: its answers and the metrics of its tiers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import SLOW, Server, running_server, wait_for

CACHE = {"kv_cache": "two-tier", "tail_length": 32, "num_blocks": 64, "store_blocks": 256}
IN_USE = ("kv_cache_tail_tokens", "kv_cache_store_tokens", "kv_cache_tail_bytes", "kv_cache_store_bytes")
PROMPT = [*range(1, 201)]


@pytest.fixture(scope="module")
def server(default_model_path: Path) -> Iterator[Server]:
    with running_server(default_model_path, engine={"cache": CACHE}) as server:
        yield server


def test_metrics_count_migrations_and_are_zero_when_all_requests_ended(server: Server) -> None:
    before = server.metric("kv_cache_migrations_total")
    assert server.complete(PROMPT, max_tokens=8, ignore_eos=True).status_code == 200
    server.wait_until_free()
    # 207 positions are computed: 12 full KV blocks, of which the last 2 are the tail.
    assert server.metric("kv_cache_migrations_total") - before == 207 // 16 - 2
    assert server.metrics(*IN_USE) == [0, 0, 0, 0]
    assert server.metric("kv_cache_compression_ratio") == 1


def test_migrations_without_a_copy_are_counted_separately(server: Server) -> None:
    beginning = [*range(300, 396)]
    assert server.complete([*beginning, *range(400, 500)], ignore_eos=True).status_code == 200
    before = server.metric("kv_cache_migrations_shared_total")
    assert server.complete([*beginning, *range(500, 600)], ignore_eos=True).status_code == 200
    # Six KV blocks are prefix hits. The last two are in the tail, in full precision, and the store has them already.
    assert server.metric("kv_cache_migrations_shared_total") - before == 2


def test_while_a_request_runs_both_tiers_are_in_use(default_model_path: Path) -> None:
    with running_server(default_model_path, backend_options=SLOW, engine={"cache": CACHE}) as server:
        body = {"prompt": PROMPT, "max_tokens": 1800, "stream": True, "ignore_eos": True}
        with server.client.stream("POST", "/v1/completions", json=body) as answer:
            next(answer.iter_lines())
            wait_for(lambda: all(server.metrics(*IN_USE)))
            assert server.metric("kv_cache_compression_ratio") > 0
        server.wait_until_free()
        assert server.metrics(*IN_USE) == [0, 0, 0, 0]
