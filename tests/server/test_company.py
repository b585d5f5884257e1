"""An answer over HTTP does not depend on other requests, on preemption or on load."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from server_process import Server, running_server


def ask_all(server: Server, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sends all bodies concurrently and returns their first choices in order."""
    with httpx.Client(base_url=server.url, timeout=120, limits=httpx.Limits(max_connections=64)) as client:

        def ask(body: dict[str, Any]) -> dict[str, Any]:
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            choice: dict[str, Any] = answer.json()["choices"][0]
            return choice

        with ThreadPoolExecutor(len(bodies)) as threads:
            return list(threads.map(ask, bodies))


def test_39_preempted_requests_get_the_same_answers(default_model_path: Path) -> None:
    """Eight answers need four times the KV cache. The noop backend detects a misplaced block."""
    cache = {"num_blocks": 48, "block_size": 16, "swap_blocks": 16}
    options = {"vocabulary_size": 49152, "max_context": 1024}
    with running_server(default_model_path, backend_options=options, engine={"cache": cache}) as server:
        bodies = [
            {
                "prompt": [index + 5] * 60,
                "max_tokens": 300,
                "seed": index,
                "ignore_eos": True,
                "stream": False,
            }
            for index in range(8)
        ]
        alone = [ask_all(server, [body])[0] for body in bodies]
        assert {one["timings"]["preemptions"] for one in alone} == {0}
        num_preempted = 0
        for _ in range(20):
            together = ask_all(server, bodies)
            assert [one["text"] for one in together] == [one["text"] for one in alone]
            num_preempted = sum(one["timings"]["preemptions"] for one in together)
            if num_preempted:  # on a busy machine the requests may arrive one by one
                break
        assert num_preempted > 0
        assert server.metric("num_preemptions_total") > 0
        server.wait_until_free()


def test_17_the_same_seed_gives_the_same_text_under_load(real_server: Server) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 8, "seed": 2**63 - 1, "temperature": 1.0}
    [alone] = ask_all(real_server, [body])
    crowd = [{"prompt": f"{index} bottles", "max_tokens": 6 + index, "seed": index} for index in range(6)]
    together = ask_all(real_server, [*crowd[:3], body, *crowd[3:]])
    assert together[3]["text"] == alone["text"]
    [other] = ask_all(real_server, [{**body, "seed": 1}])
    assert other["text"] != alone["text"]


def test_repetitive_answers_use_draft_tokens_and_the_metrics_count_them(
    real_server: Server,
) -> None:
    names = ("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens", "generation_tokens")
    totals = [f"{name}_total" for name in names]
    before = real_server.metrics(*totals)
    colours = "red, blue, green, amber, grey, black, white, brown, "
    body = {"prompt": colours * 3, "max_tokens": 40, "temperature": 0.0, "ignore_eos": True}
    [whole] = ask_all(real_server, [body])
    drafted, accepted, generated = (
        now - then for now, then in zip(real_server.metrics(*totals), before, strict=True)
    )
    assert generated == 40 and 0 < accepted < generated and accepted <= drafted
    # A stop string cuts at the same position, although accepted draft tokens may follow it.
    stopped = [{**body, "stop": [word]} for word in ("green", "y, bl", ", white")]
    for fields, answer in zip(stopped, [ask_all(real_server, [one])[0] for one in stopped], strict=True):
        assert fields["stop"][0] in whole["text"], "the stop string must occur in the text"
        assert answer["text"] == whole["text"].partition(fields["stop"][0])[0]
        assert answer["finish_reason"] == "stop"
