"""What `weft bench overhead` says about a viewer of the live page."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from weft.bench import overhead_live
from weft.bench.overhead_live import ViewerCost, print_viewer_costs, viewer_checks, viewer_costs
from weft.bench.ratios import Ratios
from weft.bench.serve_client import Client
from weft.bench.soak_server import running_server


def test_rounds_with_and_without_a_viewer_are_measured_on_a_real_server(
    default_model_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(overhead_live, "_SHAPES", ((1, 2000), (4, 1000)))
    monkeypatch.setattr(overhead_live, "_ROUNDS", 2)
    monkeypatch.setattr(overhead_live, "_LAPSE_SECONDS", 0.0)

    async def measured() -> list[ViewerCost]:
        async with running_server("noop", str(default_model_path), 49152) as port:
            client = Client(f"http://127.0.0.1:{port}")
            try:
                return await viewer_costs(client, [5, 6, 7])
            finally:
                client.close()

    costs = asyncio.run(measured())
    assert [(cost.sequences, cost.steps) for cost in costs] == [(1, 2000), (4, 1000)]
    for cost in costs:
        for figures in (cost.thread_seconds, cost.process_seconds, cost.tokens_per_second):
            assert len(figures.before) == len(figures.after) == 2
            assert min(*figures.before, *figures.after) > 0
        pairs = zip(cost.thread_seconds.after, cost.process_seconds.after, strict=True)
        assert all(thread <= process for thread, process in pairs)
        assert len(cost.frames) == 2
    print_viewer_costs(costs)
    assert "4 sequences, engine's thread" in capsys.readouterr().out


def test_the_worse_end_of_the_interval_decides_whether_a_viewer_costs_too_much() -> None:
    def verdicts(thread: tuple[float, float], speed: tuple[float, float]) -> list[bool]:
        cost = ViewerCost(1, 10)
        cost.thread_seconds = Ratios([1.0, 1.0], [*thread])
        cost.tokens_per_second = Ratios([100.0, 100.0], [*speed])
        return [check.is_met for check in viewer_checks([cost])]

    assert verdicts((1.009, 1.009), (97.5, 97.5)) == [True, True]
    assert verdicts((1.011, 1.011), (96.5, 96.5)) == [False, False]
    assert verdicts((0.999, 1.001), (95.0, 105.0)) == [False, False], "noise is no evidence"
    assert verdicts((0.9995, 0.9996), (99.9, 100.0)) == [True, True]
