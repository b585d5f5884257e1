"""The dashboard and the alert rules of docs/reference work: with a real Prometheus, against a real server."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_process import JOB, Prometheus, program, running_prometheus
from server_process import MODEL, Server, api_key, running_server, wait_for

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
DASHBOARD = json.loads((REFERENCE / "grafana-dashboard.json").read_text("utf-8"))
RULES = (REFERENCE / "prometheus-alerts.yml").read_text("utf-8")
ALERTS = re.findall(r"- alert: (\w+)", RULES)
KEY = "operator"
CACHE = {"kv_cache": "two-tier", "tail_length": 32, "num_blocks": 64, "store_blocks": 256}


# --- without Prometheus -----------------------------------------------------------------------------------------------


def test_panels_of_the_dashboard_have_their_own_places_and_numbers() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken, panel["title"]
                taken.add((x, y))
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(numbers)) == len(numbers)


def test_every_query_of_the_dashboard_uses_its_variables_and_no_fixed_data_source() -> None:
    names = {one["name"] for one in DASHBOARD["templating"]["list"]}
    assert names == {"datasource", "job", "instance", "model"}
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            assert target["datasource"]["uid"] == panel["datasource"]["uid"] == "${datasource}"
            selectors = re.findall(r"weft:\w+(\{[^}]*\})", target["expr"])
            assert len(selectors) == target["expr"].count("weft:")
            for selector in selectors:
                assert all(f'=~"${name}"' in selector for name in names - {"datasource"})


# --- a real Prometheus ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scraped(default_model_path: Path) -> Iterator[Server]:
    """A server with keys and a two-tier cache: it exports every series."""
    with running_server(
        default_model_path,
        engine={"cache": CACHE},
        api_keys=[api_key(KEY, admin=True)],
        headers={"Authorization": f"Bearer {KEY}"},
    ) as server:
        yield server


@pytest.fixture(scope="module")
def prometheus(scraped: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    rules, num_changed = re.subn(r"for: \d+s", "for: 0s", RULES)
    assert num_changed == 5
    target = f"127.0.0.1:{scraped.port}"
    with running_prometheus(tmp_path_factory.mktemp("prometheus"), target, KEY, rules) as process:
        wait_for(lambda: [one["value"][1] for one in process.query("up")] == ["1"])
        yield process


def queries() -> Iterator[tuple[str, str]]:
    """Title of the panel and expression of each query, with the variables of Grafana replaced by all values."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            expression = target["expr"].replace("$__rate_interval", "1m")
            yield panel["title"], re.sub(r'"\$\w+"', '".*"', expression)


def ask(server: Server) -> None:
    assert server.chat(stream=True, max_tokens=50).status_code == 200
    assert server.complete([*range(1, 201)], max_tokens=20).status_code == 200
    assert server.complete(n=3, max_tokens=20).status_code == 200


def load(server: Server) -> None:
    """Requests of each kind that a panel shows."""
    ask(server)
    assert server.complete(model="no such model").status_code == 404
    body = {"prompt": "Hello", "max_tokens": 4}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": body}
    uploaded = server.client.post(
        "/v1/files", data={"purpose": "batch"}, files={"file": ("lines.jsonl", json.dumps(line))}
    )
    batch = {"input_file_id": uploaded.json()["id"], "endpoint": "/v1/completions"}
    assert server.client.post("/v1/batches", json=batch).status_code == 200
    wait_for(lambda: "weft:batch_lines_total{" in server.client.get("/metrics").text)


def test_every_query_of_the_dashboard_has_data(scraped: Server, prometheus: Prometheus) -> None:
    load(scraped)
    found = dict.fromkeys(queries(), False)

    def have_data() -> bool:
        ask(scraped)  # a rate needs two scrapes that differ
        for title, expression in [query for query, has_data in found.items() if not has_data]:
            values = [float(one["value"][1]) for one in prometheus.query(expression)]
            if title != "Draft tokens":  # the noop backend checks none, so their acceptance rate is 0 / 0
                values = [value for value in values if not math.isnan(value)]
            found[title, expression] = bool(values)
        return all(found.values())

    try:
        wait_for(have_data)
    except AssertionError:
        pytest.fail(f"no data: {[query for query, has_data in found.items() if not has_data]}")
    assert len(found) > 40


def test_the_variables_of_the_dashboard_find_the_server(scraped: Server, prometheus: Prometheus) -> None:
    values = {}
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            asked = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
            assert asked is not None
            selector = re.sub(r'"\$\w+"', '".*"', asked[1])
            values[variable["name"]] = prometheus.values_of_label(asked[2], selector)
    assert values == {"job": [JOB], "instance": [f"127.0.0.1:{scraped.port}"], "model": [MODEL]}


def test_rules_are_evaluated_without_errors_and_alerts_fire_when_the_engine_or_the_server_is_gone(
    scraped: Server, prometheus: Prometheus
) -> None:
    def is_evaluated() -> bool:
        return [rule["name"] for rule in prometheus.rules() if rule["health"] == "ok"] == ALERTS

    wait_for(is_evaluated)
    assert not [rule for rule in prometheus.rules() if rule.get("lastError")]
    for rule in prometheus.rules():
        for name in re.findall(r"weft:\w+", rule["query"]):
            wait_for(lambda name=name: bool(prometheus.query(name)))  # type: ignore[misc]
    wait_for(lambda: not prometheus.firing() - {"WeftQueueGrows"})

    engine = scraped.engine_pid()
    os.kill(engine, signal.SIGSTOP)
    try:
        wait_for(lambda: "WeftNotReady" in prometheus.firing())
    finally:
        os.kill(engine, signal.SIGCONT)
    wait_for(lambda: "WeftNotReady" not in prometheus.firing())
    assert "WeftEngineRestarted" not in prometheus.firing()

    os.kill(engine, signal.SIGKILL)
    wait_for(lambda: "WeftEngineRestarted" in prometheus.firing())

    scraped.process.send_signal(signal.SIGTERM)
    wait_for(lambda: "WeftServerDown" in prometheus.firing(), 120)


# --- promtool ---------------------------------------------------------------------------------------------------------


def promtool(*arguments: str) -> str:
    done = subprocess.run([program("promtool"), *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_promtool_accepts_the_rules() -> None:
    assert f"{len(ALERTS)} rules found" in promtool(
        "check", "rules", str(REFERENCE / "prometheus-alerts.yml")
    )


LABELS = {"job": "a", "instance": "b", "model_name": "m"}
UP = {"up": "1x60", "weft:engine_up": "1x60"}
# Values begin at minute 0, one each minute: "1x3" is 1 1 1 1, "0+2x3" is 0 2 4 6. An alert must fire at minute 55 only
# if it is named.
FACTS: list[tuple[str, dict[str, str], set[str]]] = [
    ("nothing is wrong", UP, set()),
    ("the server cannot be scraped", {"up": "1x50 0x10", "weft:engine_up": "1x50 _x10"}, {"WeftServerDown"}),
    ("another job is down, which is not weft", {"up": "1x50 0x10"}, set()),
    ("the engine is down", {**UP, "weft:engine_up": "1x50 0x10"}, {"WeftNotReady"}),
    ("the engine was down for some seconds", {**UP, "weft:engine_up": "1x54 0x0 1x5"}, set()),
    ("the queue grows", {"weft:num_requests_waiting": "0x30 1+1x30"}, {"WeftQueueGrows"}),
    ("the queue is long but shrinks", {"weft:num_requests_waiting": "200-2x60"}, set()),
    ("the queue is empty now and then", {"weft:num_requests_waiting": "0x52 0+9x8"}, set()),
    (
        "first tokens take more than 10 s",
        {
            'weft:time_to_first_token_seconds_bucket{priority="normal",le="10.0"}': "0x60",
            'weft:time_to_first_token_seconds_bucket{priority="normal",le="20.0"}': "0+6x60",
            'weft:time_to_first_token_seconds_bucket{priority="normal",le="+Inf"}': "0+6x60",
        },
        {"WeftFirstTokensLate"},
    ),
    (
        "only first tokens of low priority take more than 10 s",
        {
            'weft:time_to_first_token_seconds_bucket{priority="low",le="10.0"}': "0x60",
            'weft:time_to_first_token_seconds_bucket{priority="low",le="+Inf"}': "0+6x60",
        },
        set(),
    ),
    (
        "one of two answers is preempted for memory",
        {
            'weft:num_preemptions_total{cause="memory"}': "0+30x60",
            'weft:request_success_total{finished_reason="stop"}': "0+60x60",
        },
        {"WeftCacheThrashing"},
    ),
    (
        "answers are preempted, but no answer ends",
        {
            'weft:num_preemptions_total{cause="memory"}': "0+30x60",
            'weft:request_success_total{finished_reason="stop"}': "5x60",
        },
        {"WeftCacheThrashing"},
    ),
    (
        "one of a hundred answers is preempted for memory, and many for priority",
        {
            'weft:num_preemptions_total{cause="memory"}': "0+1x60",
            'weft:num_preemptions_total{cause="priority"}': "0+90x60",
            'weft:request_success_total{finished_reason="stop"}': "0+100x60",
        },
        set(),
    ),
    (
        "KV blocks of sessions are evicted",
        {'weft:kv_cache_evictions_total{tier="full",state="hot"}': "0+5x60"},
        {"WeftCacheThrashing"},
    ),
    (
        "other cached KV blocks are evicted",
        {'weft:kv_cache_evictions_total{tier="full",state="cached"}': "0+5x60"},
        set(),
    ),
    ("the engine was restarted", {"weft:engine_restarts_total": "0x40 1x20"}, {"WeftEngineRestarted"}),
    ("the engine was restarted an hour ago", {"weft:engine_restarts_total": "0x5 1x55"}, set()),
    (
        "the server starts again and again",
        {"weft:start_time_seconds": "0x40 1x2 2x2 3x15"},
        {"WeftServerRestarts"},
    ),
    ("the server was updated", {"weft:start_time_seconds": "0x40 1x20"}, set()),
]


@pytest.mark.parametrize(("fact", "series", "firing"), FACTS, ids=[fact for fact, _, _ in FACTS])
def test_an_alert_fires_for_its_fact_only(
    fact: str, series: dict[str, str], firing: set[str], tmp_path: Path
) -> None:
    def labelled(name: str) -> str:
        name, _, own = name.partition("{")
        labels = {key: value for key, value in LABELS.items() if key != "model_name" or name != "up"}
        return f"{name}{{{','.join([own.rstrip('}')] * bool(own) + [f'{k}={json.dumps(v)}' for k, v in labels.items()])}}}"

    test: dict[str, Any] = {
        "interval": "1m",
        "input_series": [{"series": labelled(name), "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                "eval_time": "55m",
                "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in firing],
            }
        ],
    }
    rules = str(REFERENCE / "prometheus-alerts.yml")
    content = {"rule_files": [rules], "evaluation_interval": "1m", "tests": [test]}
    (tmp_path / "test.yml").write_text(json.dumps(content))
    promtool("test", "rules", str(tmp_path / "test.yml"))


def test_every_alert_has_a_fact_that_makes_it_fire() -> None:
    assert set().union(*(firing for _, _, firing in FACTS)) == set(ALERTS)
