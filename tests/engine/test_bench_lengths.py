"""`python -m benchmarks lengths`: every order runs the same requests, and known lengths help where requests wait."""

from __future__ import annotations

from benchmarks.lengths import BAR_LOAD, ORDERS, measure, seconds_each, simulated


def test_the_benchmark_measures_every_order_and_the_waits_of_refused_clients() -> None:
    report = measure(simulated("CPU"), seconds_each("CPU"), (BAR_LOAD,), seeds=2, requests=80)
    assert [cell.order for cell in report.cells] == list(ORDERS)
    fcfs, known, learned = (
        report.at(order, BAR_LOAD) for order in ("FCFS", "shortest first, known", "shortest first, learned")
    )
    assert fcfs is not None and known is not None and learned is not None
    assert fcfs.mean == (1.0, 1.0, 1.0)
    assert known.mean[0] < 0.95 and known.short_mean[0] < known.mean[0]
    assert known.seconds < fcfs.seconds and learned.honest is not None and known.honest is None
    assert report.waits and all(named >= 0 and real > 0 for named, real in report.waits)
    assert len(report.checks(BAR_LOAD)) == 5


def test_the_same_seeds_give_the_same_figures() -> None:
    reports = [
        measure(simulated("H200"), seconds_each("H200"), (1.0,), seeds=2, requests=20) for _ in range(2)
    ]
    assert reports[0] == reports[1]
