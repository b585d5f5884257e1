"""A short `weft bench soak` on a real server with a killed engine, and its checks, each of which can fail."""

from __future__ import annotations

import asyncio
import itertools
import json
import select
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from server_process import Server, wait_for

from weft.bench import soak_watch
from weft.bench.soak_client import (
    LATE_CLIENT,
    Excused,
    Lateness,
    Ledger,
    Received,
    SoakClient,
    Target,
    Violation,
)
from weft.bench.soak_plan import (
    NOOP,
    Behaviour,
    Conduct,
    Question,
    draw_questions,
    kill_times,
    wrong_questions,
)
from weft.bench.soak_report import Gauges, Soaked, checks
from weft.bench.soak_watch import Kill, Poll, ProcessHistory, follow_kills, kill_engine, undisturbed


def test_a_soak_with_a_killed_engine_has_no_lost_or_duplicate_answers_and_no_leaks(
    tmp_path: Path,
) -> None:
    report = tmp_path / "soak.json"
    command = [sys.executable, "-m", "weft.cli.main", "bench", "soak", "--clients", "48", "--seconds", "8"]
    done = subprocess.run(
        [*command, "--kills", "1", "--json", str(report)], capture_output=True, text=True, timeout=120
    )
    found = json.loads(report.read_text())
    assert found["violations"] == [], done.stdout
    # Limits on time are not checked: they depend on the machine.
    missed = [
        one["criterion"] for one in found["checks"] if not one["is_met"] and "p99" not in one["criterion"]
    ]
    assert [name for name in missed if not name.startswith("kill")] == [], done.stdout
    (kill,) = found["kills"]
    assert kill["noticed"] is not None and kill["ready"] is not None
    outcomes = Counter()
    for one in found["requests"]:
        outcomes[one["conduct"]] += one["count"]
    assert set(outcomes) == {conduct.value for conduct in Conduct}, (
        "the run was too short for every kind of client"
    )


def test_the_same_seed_gives_the_same_load_and_another_seed_does_not() -> None:
    def drawn(seed: int) -> Any:
        behaviour = Behaviour(seed, 3)
        steps = [(behaviour.conduct(), behaviour.pick(9), behaviour.chance(0.5)) for _ in range(50)]
        return steps, draw_questions(seed, NOOP)[:20], kill_times(seed, 4, 300)

    assert drawn(1) == drawn(1)
    assert all(one != other for one, other in zip(drawn(1), drawn(2), strict=True))


QUESTION = Question("/v1/completions", {"prompt": "x", "max_tokens": 4}, ("one two",), 4)


def chunk(text: str, finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": finish}
    return json.dumps({"id": "a", "choices": [choice], **more}).encode()


USAGE = json.dumps({"id": "a", "choices": [], "usage": {"completion_tokens": 4}}).encode()


def receive(*events: bytes) -> Received:
    received = Received(QUESTION)
    for event in events:
        received.event(event)
    return received


def test_a_complete_answer_passes() -> None:
    receive(chunk("one "), chunk("two"), chunk("", "length"), USAGE, b"[DONE]").check_complete()


@pytest.mark.parametrize(
    "events",
    [
        pytest.param([chunk("one "), chunk("one "), chunk("two")], id="a piece twice"),
        pytest.param([chunk("two")], id="a piece lost"),
        pytest.param([chunk("another's")], id="a piece of another answer"),
        pytest.param([chunk("one "), chunk("two", id="b")], id="two ids"),
        pytest.param([chunk("one two", "length"), chunk("", "length")], id="two ends"),
        pytest.param([chunk("one two", "stop")], id="the wrong end"),
        pytest.param([chunk("one two", "length"), b"[DONE]", b"[DONE]"], id="done twice"),
        pytest.param([b'{"error": {"code": "x"}}', chunk("one ")], id="events after an error"),
    ],
)
def test_a_wrong_answer_is_detected_at_once(events: list[bytes]) -> None:
    with pytest.raises(Violation):
        receive(*events)


@pytest.mark.parametrize(
    "events",
    [
        pytest.param([chunk("one "), USAGE, b"[DONE]"], id="cut short"),
        pytest.param([chunk("one two"), USAGE, b"[DONE]"], id="no end"),
        pytest.param([chunk("one two", "length"), b"[DONE]"], id="no usage"),
    ],
)
def test_an_incomplete_answer_is_detected_at_its_end(events: list[bytes]) -> None:
    with pytest.raises(Violation):
        receive(*events).check_complete()


def test_an_id_of_two_answers_is_detected() -> None:
    ledger = Ledger()
    ledger.add_id("a")
    with pytest.raises(Violation):
        ledger.add_id("a")


def test_a_server_with_other_answers_is_detected(server: Server) -> None:
    """The real server, with wrong expected answers."""
    question = Question("/v1/completions", {"prompt": "Hello", "max_tokens": 4, "seed": 1}, ("no",), 4)
    target = Target("127.0.0.1", server.port, [question], [question], wrong_questions(8192))
    ledger, seeds = Ledger(), itertools.count()

    def is_detected() -> bool:
        """Repeated until it happens: on a busy machine one run may not complete an answer."""
        asyncio.run(SoakClient(target, Behaviour(next(seeds), 0), ledger).run(time.monotonic() + 0.5))
        return any("wrong text" in violation for violation in ledger.violations)

    wait_for(is_detected)
    assert ledger.outcomes[Conduct.READ, "answered"] == 0


def soaked(**changes: Any) -> Soaked:
    history = memory_of("HTTP", lambda minute: 100.0 + 10.0 * min(minute, 3.0))
    figures: dict[str, Any] = {
        "what": "test",
        "clients": 1,
        "seconds": 150.0,
        "seed": 0,
        "load_before": 0.0,
        "began": 0.0,
        "ledger": Ledger(),
        "kills": [Kill(10.0, 10.1, 11.0)],
        "polls": [Poll(float(second), 0.01, 200) for second in range(150)],
        "histories": [history],
        "baseline": Gauges(0, 0, 0, 0),
        "gauges": Gauges(0, 0, 0, 0),
        "loop_lag": {0.01: 900, 0.05: 995, 0.1: 1000, float("inf"): 1000},
        "files": (9, 9),
    }
    return Soaked(**{**figures, **changes})


def test_a_run_without_faults_is_clean() -> None:
    assert soaked().is_clean


def memory_of(
    name: str, mib: Callable[[float], float], minutes: float = 12.0, noise: float = 2.0
) -> ProcessHistory:
    """Memory by the minute, a sample for each second. The noise stays for half a minute, as memory does."""
    random = Random(name)
    noises = [random.uniform(-noise, noise) for _ in range(int(2 * minutes) + 1)]
    times = [float(second) for second in range(int(60 * minutes) + 1)]
    return ProcessHistory(
        name, times, [mib(at / 60) + noises[int(at) // 30] for at in times], [9] * len(times)
    )


LEAK = memory_of("engine", lambda minute: 100.0 + minute)
NOISY = memory_of("engine", lambda minute: 100.0, noise=60.0)


def test_the_interval_of_a_memory_slope_contains_the_true_slope_95_times_in_100() -> None:
    for slope in (0.0, 0.5, -2.0):
        found = [
            memory_of(f"{slope} {number}", lambda minute: 100.0 + slope * minute).growth()  # noqa: B023
            for number in range(400)
        ]
        inside = sum(one.low <= slope <= one.high for one in found)
        assert 0.9 * 400 < inside < 0.995 * 400
        assert abs(sum(one.slope for one in found) / 400 - slope) < 0.05


def test_a_slow_leak_is_found_in_a_long_run_and_a_full_cache_is_none() -> None:
    leak = memory_of("HTTP", lambda minute: 60.0 + 0.5 * minute, minutes=30.0).growth()
    assert leak.low > 0.0 and leak.high < 1.0
    cache = memory_of("HTTP", lambda minute: 60.0 + 20.0 * min(minute, 10.0), minutes=30.0).growth()
    assert cache.low <= 0.0 <= cache.high < 1.0
    constant = ProcessHistory("HTTP", [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], [50.0] * 6, [9] * 6).growth()
    assert (constant.slope, constant.low, constant.high) == (0.0, 0.0, 0.0)


def test_a_few_samples_say_nothing_about_memory() -> None:
    growth = ProcessHistory("HTTP", [0.0, 1.0, 2.0], [50.0, 60.0, 70.0], [9] * 3).growth()
    assert growth.low < -1e9 and growth.high > 1e9


def test_a_process_that_ran_for_a_short_time_is_not_checked() -> None:
    short = memory_of("engine", lambda minute: 100.0 + 10.0 * minute, minutes=9.0)
    assert not any("memory" in check.criterion for check in checks(soaked(histories=[short])))


@pytest.mark.parametrize(
    ("changes", "criterion"),
    [
        ({"ledger": Ledger(violations=["lost"])}, "wrong result"),
        ({"ledger": Ledger(excused=[Excused(50.0, 51.0, "engine_died")])}, "wrong result"),
        ({"ledger": Ledger(Counter({(Conduct.READ, LATE_CLIENT): 1}))}, "were late"),
        ({"gauges": Gauges(1, 0, 0, 0)}, "open, running"),
        ({"gauges": Gauges(0, 0, 0, 0.01)}, "open, running"),
        ({"files": (9, 10)}, "open files"),
        ({"loop_lag": {0.01: 900, 0.05: 980, 0.1: 1000, float("inf"): 1000}}, "event-loop lag"),
        ({"histories": [LEAK]}, "memory"),
        ({"histories": [NOISY]}, "memory"),
        ({"kills": [Kill(10.0, 11.5, 12.0)]}, "kill 1"),
        ({"kills": [Kill(10.0, 10.1, None)]}, "kill 1"),
        ({"polls": [Poll(float(second), 0.2, 200) for second in range(150)]}, "/health p99"),
        ({"polls": [Poll(float(second), 0.01, 503) for second in range(150)]}, "other than 200"),
    ],
)
def test_each_fault_fails_its_check(changes: dict[str, Any], criterion: str) -> None:
    failed = [check.criterion for check in checks(soaked(**changes)) if not check.is_met]
    assert len(failed) == 1 and criterion in failed[0], failed


def test_a_request_that_timed_out_is_excused_only_where_the_clients_were_late() -> None:
    now = time.monotonic()
    late = Lateness([(now - 5.0, 30.0), (now - 1.0, 40.0)])
    assert late.explains(now - 100.0) and not late.explains(now - 150.0)
    assert not Lateness([(now - 200.0, 90.0)]).explains(now - 100.0), "it was late before the request began"
    assert late.longest == 40.0


def test_a_connection_that_the_server_closed_while_idle_is_not_used_again() -> None:
    async def run() -> None:
        num_connections = 0

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal num_connections
            num_connections += 1
            await reader.readuntil(b"\r\n\r\n")
            writer.close()

        listening = await asyncio.start_server(answer, "127.0.0.1", 0)
        target = Target("127.0.0.1", listening.sockets[0].getsockname()[1], [], [], [])
        client = SoakClient(target, Behaviour(0, 0), Ledger())
        await client._send(target.message("GET", "/", b""))
        while not select.select([client._writer.get_extra_info("socket")], [], [], 0)[0]:
            await asyncio.sleep(0)
        await client._send(target.message("GET", "/", b""))
        while num_connections < 2:
            await asyncio.sleep(0.01)
        client._drop()
        listening.close()

    asyncio.run(asyncio.wait_for(run(), 30))


def test_an_error_during_a_kill_is_not_a_violation() -> None:
    assert soaked(ledger=Ledger(excused=[Excused(9.5, 10.2, "engine_died")])).is_clean


def test_the_time_of_a_kill_is_taken_before_the_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[float] = []
    monkeypatch.setattr(soak_watch.os, "kill", lambda pid, number: killed.append(time.monotonic()))
    processes: Any = SimpleNamespace(engine=lambda: 1)
    (at,) = asyncio.run(kill_engine(processes, [0.0]))
    assert at <= killed[0]


def test_polls_during_a_kill_show_its_duration_and_do_not_count_in_the_figures() -> None:
    statuses = {10: 503, 11: 503}
    polls = [Poll(float(second), 0.1, statuses.get(second, 200)) for second in range(20)]
    (kill,) = follow_kills([9.5], polls)
    assert kill == Kill(9.5, 10.1, 12.1)
    assert [poll.due for poll in polls if poll not in undisturbed(polls, [kill])] == [10.0, 11.0, 12.0]
