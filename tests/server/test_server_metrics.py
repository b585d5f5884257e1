"""The metrics of a real server: times by priority, and totals that survive a restart of the engine."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from server_process import MESSAGES, SLOW, Server, running_server, wait_for

from weft.metrics import STEP_SECONDS, Buckets
from weft.request import Priority
from weft.server.metrics import ServerMetrics, _MirroredBuckets


def value(server: Server, name: str, **labels: str) -> float:
    """The sum of the series of a metric with these labels."""
    lines = server.client.get("/metrics").text.splitlines()
    found = [
        float(line.rpartition(" ")[2])
        for line in lines
        if line.startswith(f"weft:{name}{{")
        and all(f'{label}="{wanted}"' in line for label, wanted in labels.items())
    ]
    assert found, f"no metric weft:{name} with {labels}"
    return sum(found)


def times(server: Server, priority: Priority) -> tuple[float, float]:
    """How many first tokens and gaps were recorded for a priority."""
    names = ("time_to_first_token_seconds_count", "inter_token_latency_seconds_count")
    first, gaps = (value(server, name, priority=priority.name.lower()) for name in names)
    return first, gaps


def test_times_of_tokens_are_counted_by_priority(default_model_path: Path) -> None:
    others = set(Priority) - {Priority.HIGH, Priority.LOW}
    body = {"messages": MESSAGES, "max_tokens": 8000, "ignore_eos": True, "priority": "high", "stream": True}
    with running_server(default_model_path, backend_options=SLOW) as server:
        assert all(times(server, priority) == (0, 0) for priority in Priority)
        assert server.chat(priority="low").status_code == 200
        assert times(server, Priority.LOW) == (1, 0), "only a stream has events with gaps"
        with server.client.stream("POST", "/v1/chat/completions", json=body):
            wait_for(lambda: times(server, Priority.HIGH)[1] > 0)
        assert times(server, Priority.HIGH)[0] == times(server, Priority.LOW)[0] == 1
        assert all(times(server, priority) == (0, 0) for priority in others)


def test_the_start_time_of_the_server_is_now_when_it_starts() -> None:
    before = time.time()
    [line] = [
        one
        for family in ServerMetrics("m")._registry.collect()
        for one in family.samples
        if one.name == "weft:start_time_seconds"
    ]
    assert before <= line.value <= time.time()


def test_step_times_and_totals_of_the_engine_survive_its_restart(default_model_path: Path) -> None:
    names = ("steps_total", "step_tokens_total", "step_seconds_count", "step_seconds_sum")
    with running_server(default_model_path) as server:
        assert server.complete(max_tokens=20, ignore_eos=True).status_code == 200
        server.wait_until_free()
        before = server.metrics(*names)
        assert before[0] == before[2] >= 20 and before[3] > 0
        os.kill(server.engine_pid(), signal.SIGKILL)
        wait_for(lambda: server.metric("engine_restarts_total") == 1)
        assert server.metrics(*names) == before
        assert server.complete(max_tokens=2, ignore_eos=True).status_code == 200
        server.wait_until_free()
        assert server.metric("steps_total") == server.metric("step_seconds_count") > before[0]


def test_a_mirrored_histogram_adds_what_a_new_engine_counts() -> None:
    shown = Buckets.of(STEP_SECONDS)
    mirror = _MirroredBuckets(shown)
    first, second = Buckets.of(STEP_SECONDS), Buckets.of(STEP_SECONDS)
    for seconds in (0.01, 0.01, 0.2):
        first.record(seconds)
    mirror.set(first.copy())
    mirror.set(first.copy())
    assert shown == first
    second.record(0.2)
    mirror.set(second.copy())
    first.record(0.2)
    assert shown.counts == first.counts and shown.total == pytest.approx(first.total)
