"""The benchmarks of scheduler and batching, and the criteria that hold exactly in virtual time."""

from __future__ import annotations

import json

import pytest

from benchmarks import batching
from benchmarks import scheduler as scheduler_bench
from weft.backends.cost_model import StepCosts
from weft.bench import report
from weft.config import SchedulerConfig


@pytest.fixture(scope="module")
def batching_report() -> batching.Report:
    return batching.measure_all(quick=True)


# ---------------------------------------------------------------------- scheduler


def test_in_the_scheduler_benchmark_all_rows_decode_and_the_other_requests_wait() -> None:
    scheduler = scheduler_bench.decoding_scheduler(running=32, waiting=200, steps=4)
    assert len(scheduler.running) == 32
    assert len(scheduler.queue) == 200
    plan = scheduler.schedule()
    assert plan is not None
    assert plan.num_decodes == 32
    assert plan.num_prefills == 0


def test_in_every_measured_step_one_sequence_in_sixteen_allocates_a_block() -> None:
    cell = scheduler_bench.measure(running=32, waiting=10, rounds=2)
    assert cell.blocks_taken_per_step == 2.0
    assert 0 < cell.step_median_ms <= cell.step_loudest_median_ms <= cell.step_p99_ms
    assert cell.steps == 2 * scheduler_bench.STEPS_PER_ROUND
    assert cell.schedule_median_ms > 0 and cell.apply_median_ms > 0


def test_planning_is_linear_in_running_requests_and_independent_of_waiting_ones() -> None:
    def instructions(running: int, waiting: int) -> int:
        return scheduler_bench.count_instructions(
            scheduler_bench.decoding_scheduler(running, waiting, steps=4)
        )

    assert instructions(128, 10) <= 4 * instructions(32, 10)
    assert instructions(32, 2000) == instructions(32, 10)


def test_the_scheduler_benchmark_prints_a_table_and_its_criteria(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_bench, "WAITING", (10, 1000))
    scheduler_bench.main(quick=True)
    table = capsys.readouterr().out
    assert "Host time of a decode step" in table and "at most 0.5 ms" in table
    assert "1,024" in table


def test_the_scheduler_benchmark_prints_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = [scheduler_bench.measure(running=2, waiting=1, rounds=1)]
    monkeypatch.setattr(scheduler_bench, "measure_all", lambda quick: cells)
    monkeypatch.setattr(scheduler_bench, "check", lambda cells: [])
    scheduler_bench.main(json=True)
    document = json.loads(capsys.readouterr().out)
    assert document["cells"][0]["running"] == 2
    assert document["machine"] and document["gc"]


# ---------------------------------------------------------------------- batching: helpers


def test_no_run_is_faster_than_the_lower_bound() -> None:
    jobs = [batching.Job(0.0, 100, 20), batching.Job(0.0, 30, 50), batching.Job(0.0, 7, 1)]
    costs = StepCosts(base=1.0, per_token=0.01, per_context=0.001, per_pair=0.0001)
    for rows in (1, 2, 3):
        run = batching.run(costs, SchedulerConfig(max_running=rows), jobs)
        assert run.seconds >= batching.floor_seconds(costs, jobs, rows) * (1 - 1e-9)


def test_one_request_alone_runs_exactly_at_the_lower_bound() -> None:
    costs = StepCosts(base=1.0, per_token=0.01, per_context=0.001, per_pair=0.0001)
    jobs = [batching.Job(0.0, 100, 20)]
    run = batching.run(costs, SchedulerConfig(), jobs)
    assert run.seconds == pytest.approx(batching.floor_seconds(costs, jobs, 1))


def test_latencies_count_from_the_arrival_even_if_the_engine_was_busy_then() -> None:
    costs = StepCosts(base=1.0, per_token=0.0, per_context=0.0)
    jobs = [batching.Job(0.0, 8, 10), batching.Job(3.5, 8, 2)]
    first, second = batching.run(costs, SchedulerConfig(), jobs).traces
    assert first.first_token == 1.0 and first.latency == 10.0 and first.largest_gap == 1.0
    # It arrives during a step, and the next step is already planned: it runs in the third one, from 5 to 6.
    assert second.first_token == 2.5 and second.latency == 3.5


def test_unused_positions_are_those_after_the_last_token_of_a_block() -> None:
    costs = StepCosts(base=1.0, per_token=0.0, per_context=0.0)
    run = batching.run(costs, SchedulerConfig(), [batching.Job(0.0, 12, 2)])
    assert run.unused_positions / run.held_positions == pytest.approx((4 + 3) / (16 + 16))


def test_a_quantile_is_the_smallest_value_that_covers_the_share() -> None:
    values = [float(n) for n in range(1, 101)]
    assert report.quantile(values, 0.99) == 99.0
    assert report.quantile(values, 0.5) == 50.0
    assert report.quantile([7.0], 0.01) == 7.0


# ---------------------------------------------------------------------- batching: the criteria


def test_continuous_batching_is_more_than_twice_static_in_the_same_memory(
    batching_report: batching.Report,
) -> None:
    ratios = [c.ratio for c in batching_report.static if c.device == "H200" and "blocks" in c.equal]
    assert ratios and min(ratios) > 2


def test_continuous_batching_is_never_slower_than_static_and_twice_as_fast_as_padded_on_the_cpu(
    batching_report: batching.Report,
) -> None:
    assert all(c.padded < c.static < c.continuous <= c.most_possible for c in batching_report.static)
    on_cpu = [c for c in batching_report.static if c.device == "CPU"]
    assert all(c.continuous > 2 * c.padded for c in on_cpu)
    assert all(c.continuous > 0.98 * c.most_possible for c in on_cpu)


def test_batch_16_keeps_more_than_70_percent_on_the_accelerator_and_reaches_the_device_limit_everywhere(
    batching_report: batching.Report,
) -> None:
    at_16 = {s.device: s for s in batching_report.scaling if s.batch == 16}
    assert at_16["H200"].efficiency > 0.7
    assert all(s.share_of_limit > 0.99 for s in at_16.values())


def test_long_prompts_among_short_ones_meet_the_criteria_on_the_accelerator(
    batching_report: batching.Report,
) -> None:
    mixes = [mix for mix in batching_report.long_and_short if mix.device == "H200"]
    assert len(mixes) == 2
    assert all(mix.rise < 0.5 and mix.longest_stall <= 0.5 for mix in mixes)


def test_kv_fragmentation_stays_under_15_percent(batching_report: batching.Report) -> None:
    assert all(
        max(mix.fragmentation, mix.fragmentation_alone) < 0.15 for mix in batching_report.long_and_short
    )


def test_the_adaptive_policy_shortens_the_longest_gap_that_a_prefill_causes(
    batching_report: batching.Report,
) -> None:
    for first_come, adaptive in zip(
        batching_report.long_and_short[::2], batching_report.long_and_short[1::2], strict=True
    ):
        assert adaptive.largest_gap < first_come.largest_gap / 2


def test_the_batching_benchmark_prints_its_tables_and_json(
    batching_report: batching.Report, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batching, "measure_all", lambda quick: batching_report)
    batching.main()
    tables = capsys.readouterr().out
    assert "Continuous against static" in tables and "Scaling" in tables and "verdict" in tables
    batching.main(json=True)
    document = json.loads(capsys.readouterr().out)
    assert {check["is_met"] for check in document["checks"]} == {True, False}
    assert document["long_and_short"][0]["policy"] == "fcfs"
