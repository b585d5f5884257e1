"""Several replicas: routing, autoscaling, processes, and the same result for any number of them."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_planning import COSTS, figures, load, profile, settings

from weft.config import KvCachePoolConfig, ServingEngineConfig
from weft.errors import InvalidRequestError, WeftError
from weft.planning.autoscaler import Autoscaler, Autoscaling, FleetLoad
from weft.planning.description import LengthRange
from weft.planning.fleet import MAX_POINTS, FleetOutcome, FleetSettings, simulate
from weft.planning.replica import Replica, Targets
from weft.planning.traces import unique_segment
from weft.planning.workers import Workers


def fleet(count: int, num_processes: int = 1, **fields: Any) -> FleetOutcome:
    requests = fields.pop("requests", None) or load(300, 30.0)
    replica = settings(targets=Targets(0.5, 0.2), seed=fields.pop("seed", 0))
    return simulate(FleetSettings(replica, count, **fields), requests, num_processes)


def everything(outcome: FleetOutcome) -> Any:
    return figures(outcome.total), outcome.by_replica, [dataclasses.astuple(one) for one in outcome.points]


def test_the_same_seed_gives_the_same_result_with_any_number_of_processes() -> None:
    shared = load(200, 40.0, prefix=160, prefixes=6)
    one, two, three = (fleet(4, count, requests=shared) for count in (1, 2, 3))
    assert everything(one) == everything(two) == everything(three)
    assert everything(one) == everything(fleet(4, requests=shared))
    assert everything(one) != everything(fleet(4, requests=shared, seed=1))


def test_more_replicas_give_earlier_first_tokens() -> None:
    few, many = fleet(1), fleet(4)
    assert many.total.completed == few.total.completed == 300
    assert many.total.first_token.quantile(0.99) < few.total.first_token.quantile(0.99)
    assert many.total.good > few.total.good
    assert sum(many.by_replica.values()) == 300 and len(many.by_replica) == 4


def test_prefix_routing_keeps_most_of_the_hits_of_one_replica() -> None:
    # Many prefixes, each used a few times: replicas that each see all of them compute each four times.
    shared = load(240, 24.0, prefix=480, prefixes=40, prompt=LengthRange(16, 64))
    alone, routed, spread = (
        fleet(count, requests=shared, by_prefix=by_prefix).total.hit_rate
        for count, by_prefix in ((1, True), (4, True), (4, False))
    )
    assert routed >= 0.9 * alone
    assert spread < 0.75 * alone


def test_a_conversation_stays_on_its_replica() -> None:
    talk = load(120, rate=4.0, turns=LengthRange(4, 4), pause=3.0)
    routed, spread = fleet(4, requests=talk), fleet(1, requests=talk)
    assert routed.total.hit_rate == pytest.approx(spread.total.hit_rate, abs=0.01)


def test_the_course_over_time_is_short_and_counts_all_arrivals() -> None:
    outcome = fleet(1, requests=load(400, rate=0.8))
    assert len(outcome.points) <= 2 * MAX_POINTS
    assert sum(one.arrivals for one in outcome.points) == 400
    assert outcome.points[-1].until >= outcome.seconds > 0


def test_autoscaling_follows_the_load_and_pays_for_starts() -> None:
    quiet = load(20, 0.5)
    busy = [
        one._replace(
            number=1000 + one.number, at=one.at + 60.0, segments=(unique_segment(1000 + one.number, 200),)
        )
        for one in load(600, 60.0)
    ]
    late = [one._replace(number=5000 + one.number, at=one.at + 90.0) for one in load(60, 0.5)]
    scaling = Autoscaling(1, 6, start_seconds=2.0, first_token=0.3, waiting_seconds=0.1, idle_seconds=5.0)
    requests = sorted([*quiet, *busy, *late], key=lambda one: one.at)
    outcome = fleet(1, requests=requests, autoscaling=scaling)
    assert outcome.total.completed == 680
    assert 3 <= outcome.most_replicas <= 6
    assert outcome.points[0].replicas == 1
    assert outcome.points[-1].replicas < outcome.most_replicas
    assert outcome.total.paid_seconds > outcome.total.ready_seconds > outcome.seconds
    assert everything(outcome) == everything(fleet(1, 2, requests=requests, autoscaling=scaling))
    alone = fleet(1, requests=requests)
    assert alone.total.paid_seconds == alone.total.ready_seconds == alone.seconds
    assert outcome.total.first_token.quantile(0.99) < alone.total.first_token.quantile(0.99)


def test_a_replica_that_drains_ends_its_requests_and_gets_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    # The fleet asserts that no request goes to a replica that drains. Here it drains under load.
    monkeypatch.setattr(Autoscaler, "wanted", lambda scaler, now, load: 1 if now >= 3.0 else 2)
    outcome = fleet(2, requests=load(150, 15.0), autoscaling=Autoscaling(1, 2))
    assert outcome.total.completed == 150
    assert outcome.points[0].replicas == 2 and outcome.points[-1].replicas == 1
    fewer, more = sorted(outcome.by_replica.values())
    assert fewer < 45 < more, "the replica that drained got later requests"
    assert outcome.total.ready_seconds < 1.5 * outcome.seconds


def test_the_autoscaler_adds_for_waits_and_late_tokens_and_drains_after_a_quiet_time() -> None:
    scaler = Autoscaler(Autoscaling(1, 8, first_token=1.0, waiting_seconds=0.5, idle_seconds=10.0))
    assert scaler.wanted(0.0, FleetLoad(2, 0, 0.1, 5, 0, 0.9)) == 2
    assert scaler.wanted(1.0, FleetLoad(2, 0, 0.8, 5, 0, 0.9)) == 3
    assert scaler.wanted(1.0, FleetLoad(2, 0, 5.0, 5, 0, 0.9)) == 4, "more than twice as many at once"
    assert scaler.wanted(2.0, FleetLoad(2, 1, 0.6, 5, 5, 0.9)) == 3, "a replica that starts is not waited for"
    assert scaler.wanted(2.0, FleetLoad(2, 0, 0.1, 5, 5, 0.9)) == 3, "late first tokens add none"
    assert scaler.wanted(2.0, FleetLoad(8, 0, 9.0, 5, 5, 0.9)) == 8
    quiet = FleetLoad(3, 0, 0.0, 5, 0, 0.1)
    wanted = [scaler.wanted(100.0 + 0.25 * number, quiet) for number in range(200)]
    assert wanted[0] == 3 and 2 in wanted
    assert scaler.wanted(500.0, FleetLoad(1, 0, 0.0, 0, 0, 0.0)) == 1


def test_an_error_in_a_process_is_an_error_of_the_command() -> None:
    with Workers(settings(), 2) as workers, pytest.raises(WeftError, match="KeyError"):
        workers.finish(7)


def test_one_long_prompt_adds_no_replica() -> None:
    scaler = Autoscaler(Autoscaling(1, 8))
    assert scaler.wanted(0.0, FleetLoad(2, 0, 0.0, 1, 1, 0.9)) == 2
    scaler = Autoscaler(Autoscaling(1, 8))
    found = [
        scaler.wanted(0.25 * number, FleetLoad(2, 0, 0.0, 10, number % 8 == 0, 0.9)) for number in range(99)
    ]
    assert set(found) == {2}, "1 late first token of 80 adds a replica"


def test_requests_that_the_server_still_reads_add_replicas() -> None:
    # A server that reads 5 requests a second gets 12. The engine itself is idle most of the time.
    slow = settings(profile=profile(COSTS, request_seconds=0.2), targets=Targets(1.0))
    scaling = Autoscaling(1, 6, start_seconds=1.0)
    outcome = simulate(FleetSettings(slow, 1, scaling), load(300, 12.0), 1)
    assert outcome.most_replicas >= 3
    alone = simulate(FleetSettings(slow, 1), load(300, 12.0), 1).total
    assert outcome.total.first_token.quantile(0.99) < 0.5 * alone.first_token.quantile(0.99)
    assert alone.limits.most_common(1)[0][0] == "reading"
    replica = Replica(0, slow)
    replica.assign(load(100, 50.0))
    replica.run_until(2.0)
    report = replica.report()
    assert report.waiting > 50 and report.load.waiting_tokens > 50 * 16
    assert report.reading_seconds == pytest.approx(100 * 0.2 - 2.0, abs=0.5)
    assert max(report.first_tokens) > 0.7, "the time in which the server reads is left out"


def test_replicas_that_come_and_go_give_the_same_result_in_any_number_of_processes() -> None:
    waves = [
        one._replace(
            number=one.number + 1000 * wave, at=one.at + 40.0 * wave, segments=((one.number * 4096, 120),)
        )
        for wave in range(4)
        for one in load(200, 40.0, turns=LengthRange(1, 3), pause=1.0)
    ]
    scaling = Autoscaling(1, 5, start_seconds=1.0, first_token=0.3, waiting_seconds=0.1, idle_seconds=2.0)
    requests = sorted(waves, key=lambda one: one.at)
    one, three = (fleet(1, count, requests=requests, autoscaling=scaling) for count in (1, 3))
    assert everything(one) == everything(three)
    assert one.most_replicas >= 3


def test_reports_are_in_the_order_of_the_numbers_in_one_process_too() -> None:
    with Workers(settings(), 1) as workers:
        for number in (2, 0, 1):
            workers.create(number, 0.0)
        requests = load(3)
        workers.begin(9.0, {number: [requests[number]] for number in range(3)})
        assert list(workers.reports()) == [0, 1, 2]


def test_a_replica_with_a_number_that_is_used_again_has_other_noise() -> None:
    def ended(now: float) -> float:
        replica = Replica(0, settings(), now)
        replica.assign([one._replace(at=now + 1.0) for one in load(5)])
        replica.run_until(now + 1e3)
        return replica.finish().ended - now

    assert ended(0.0) != pytest.approx(ended(64.0), abs=1e-6)


def test_a_month_without_requests_is_passed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    month = 30 * 86_400.0
    requests = [*load(20), *(one._replace(number=100 + one.number, at=month + one.at) for one in load(20))]
    scaling, seen = Autoscaling(1, 3, idle_seconds=5.0), list[float]()
    wanted = Autoscaler.wanted

    def counted(self: Autoscaler, now: float, load: FleetLoad) -> int:
        seen.append(now)
        assert len(seen) < 5000, "every window of the pause is simulated"
        return wanted(self, now, load)

    monkeypatch.setattr(Autoscaler, "wanted", counted)
    outcome = fleet(2, requests=requests, autoscaling=scaling)
    assert outcome.total.completed == 40 and outcome.seconds > month
    assert outcome.mean_replicas == pytest.approx(1.0, abs=0.01), "the second replica was not drained"


def test_a_rest_changes_what_the_windows_would() -> None:
    stepped, skipped = Autoscaler(Autoscaling(1, 4)), Autoscaler(Autoscaling(1, 4))
    for one in (stepped, skipped):
        one.wanted(0.0, FleetLoad(1, 0, 0.0, 9, 3, 0.7))
    for number in range(50):
        stepped.wanted(0.25 * number, FleetLoad(1, 0, 0.0, 0, 0, 0.0))
    skipped.rest(50)
    assert vars(skipped) == {
        name: pytest.approx(value) if isinstance(value, float) else value
        for name, value in vars(stepped).items()
    }


def test_a_process_that_ended_is_one_error() -> None:
    with Workers(settings(), 2) as workers:
        workers.create(0, 0.0)
        for process in workers._processes:
            process.kill()
            process.join()
        with pytest.raises(WeftError, match="a process of the simulation ended"):
            for _ in range(3):  # the first message may still fit into the pipe
                workers.begin(1.0, {0: load(500)})
                workers.reports()


def test_an_error_of_the_settings_keeps_its_kind_in_a_process() -> None:
    room = dataclasses.replace(profile().room, bytes_per_block=1 << 20)
    tiny = settings(
        profile=dataclasses.replace(profile(), room=room),
        config=ServingEngineConfig(cache=KvCachePoolConfig(memory=1 << 10)),
    )
    errors = []
    for count in (1, 2):
        with Workers(tiny, count) as workers, pytest.raises(InvalidRequestError) as caught:
            workers.create(1, 0.0)
        errors.append((str(caught.value), caught.value.field, caught.value.exit_code))
    assert errors[0] == errors[1] and "Traceback" not in errors[1][0]


def test_processes_whose_parent_ended_print_nothing() -> None:
    # The processes still compute when their parent is gone, and cannot send their reports.
    code = """
import os, signal
from test_planning import load, settings
from weft.planning.workers import Workers
if __name__ == '__main__':
    workers = Workers(settings(), 2)
    workers.create(0, 0.0)
    workers.create(1, 0.0)
    workers.begin(1e6, {0: load(300), 1: load(300)})
    os.kill(os.getpid(), signal.SIGKILL)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, timeout=100, check=False, env=environment
    )
    assert ended.returncode == -signal.SIGKILL
    assert ended.stderr == b""
