"""`weft plan` and `weft profile` as commands: what they print and write, and their exit codes."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from weft.cli.main import main
from weft.planning import measure
from weft.planning.profile import read_profile
from weft.server.config_file import gather
from weft.server.settings import ServerSettings

LOAD = ("--rate", "6", "-n", "60", "--prompt-tokens", "16-400", "--max-tokens", "8-60", "--jobs", "1")
PLAN = ("plan", "-p", "zen4-2-cores", *LOAD)


@pytest.fixture
def weft(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command in this process. Returns exit code, stdout and stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["weft", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        captured = capsys.readouterr()
        return caught.value.code or 0, captured.out, captured.err  # type: ignore[return-value]

    return run


def test_a_plan_prints_the_answer_and_writes_json_html_and_toml(weft: Any, tmp_path: Path) -> None:
    files = {name: tmp_path / f"plan.{name}" for name in ("json", "html", "toml")}
    outputs = [part for name, path in files.items() for part in (f"--{name}", str(path))]
    sweep = ("--sweep", "policy=adaptive,fcfs", "--sweep", "max_chunk_tokens=64,512")
    targets = ("--ttft", "2s", "--itl", "250ms", "--price", "1.5")
    code, out, err = weft(*PLAN, *targets, *sweep, *outputs)
    assert code == 0, err
    assert "1 replica: 100.00% of the requests are within the targets" in out
    assert "Cost: 1.50 an hour" in out and "What breaks first: at" in out and "Best settings:" in out
    assert "enough" in err

    document = json.loads(files["json"].read_text("utf-8"))
    assert document["replicas"] == 1 and document["is_enough"] is True
    assert document["load"]["requests"] == document["chosen"]["completed"] == 60
    assert document["chosen"]["first_token"]["p50"] <= document["chosen"]["first_token"]["p99"]
    assert document["breaks_first"]["speed"] > 1 and len(document["sweep"]) == 4
    assert sum(point["arrivals"] for point in document["over_time"]) == 60

    page = files["html"].read_text("utf-8")
    tree = ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>\n"))
    assert len(list(tree.iter("svg"))) >= 6 and len(list(tree.iter("table"))) == 3
    assert not list(tree.iter("script")) and "http" not in page

    best = tomllib.loads(files["toml"].read_text("utf-8"))
    assert set(best["engine"]["scheduler"]) == {"policy", "max_chunk_tokens"}
    served = gather(files["toml"], {}, {}).applied_to(ServerSettings())
    assert served.engine.scheduler.max_chunk_tokens == best["engine"]["scheduler"]["max_chunk_tokens"]
    assert files["toml"].read_text("utf-8").strip() in out


def test_a_profile_is_measured_on_the_real_server_and_plans(
    weft: Any, tmp_path: Path, default_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The shortest load that has enough steps for a profile.
    monkeypatch.setattr(measure, "MEASURED_SECONDS", 0.0)
    monkeypatch.setattr(measure, "_CLOSED_LOOPS", (1, 2, 3))
    path, config = tmp_path / "machine.json", tmp_path / "weft.toml"
    config.write_text("[engine.cache]\nnum_blocks = 300\n")
    code, out, err = weft(
        "profile", str(default_model_path), "-o", str(path), "--config", str(config), "--machine", "a machine"
    )
    assert code == 0, err
    assert "4,800 tokens in 300 blocks of 16" in out and "3 at once" not in err
    found = read_profile(str(path))
    assert (found.machine, found.source) == ("a machine", "measured by weft profile")
    assert found.steps >= 200 and found.request_seconds > 0 and not found.is_gpu
    assert not list(tmp_path.glob("*.log")), "the event log of the measurement is left"
    code, out, _ = weft("plan", "-p", str(path), *LOAD, "--replicas", "1")
    assert code == 0 and "a machine" in out and "KV cache of 4,800 tokens" in out


def test_too_few_replicas_are_exit_code_1(weft: Any) -> None:
    code, out, _ = weft(*PLAN, "--replicas", "1", "--ttft", "5ms")
    assert code == 1
    assert "1 replica is not enough" in out and "first tokens are late" in out


def test_a_fixed_number_of_replicas_needs_no_target(weft: Any) -> None:
    code, out, _ = weft(*PLAN, "--replicas", "2")
    assert code == 0 and "2 replicas: 100.00%" in out


def test_autoscaling_reports_the_mean_number_of_replicas(weft: Any) -> None:
    code, out, _ = weft(*PLAN, "--autoscale", "1-3", "--start-delay", "1s", "--ttft", "2s")
    assert code == 0 and "1 to 3 replicas, 1.00 on average" in out


def test_the_settings_of_the_servers_come_from_their_file(weft: Any, tmp_path: Path) -> None:
    config = tmp_path / "weft.toml"
    config.write_text("[engine.scheduler]\nmax_running = 1\n")
    plan = (*PLAN, "--replicas", "1", "--ttft", "400ms", "--good", "0.9")
    assert weft(*plan)[0] == 0
    code, out, _ = weft(*plan, "--config", str(config))
    assert code == 1 and "all rows (max_running) are taken" in out


def test_a_trace_is_planned_at_another_speed(weft: Any, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    lines = [
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        *(f"{number},{100 + number},20" for number in range(40)),
    ]
    trace.write_text("\n".join(lines))
    plan = ("plan", "-p", "zen4-2-cores", "--trace", str(trace), "--replicas", "1", "-j", "1")
    code, out, _ = weft(*plan)
    assert code == 0 and "trace.csv (azure), 40 requests in 39 s" in out
    _, out, _ = weft(*plan, "--speed", "3", "--limit", "10")
    assert "10 requests in 3 s" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("plan", *LOAD, "--ttft", "1s"),
            "--profile is missing: give a file that `weft profile` wrote, or one of",
        ),
        (("plan", "-p", "none.json", *LOAD), "none.json: No such file"),
        ((*PLAN,), "there is no target: give --ttft or --itl"),
        ((*PLAN, "--ttft", "5"), "--ttft is '5'; write a time with its unit"),
        ((*PLAN, "--ttft", "1s", "--replicas", "9-3"), "--replicas is '9-3'"),
        ((*PLAN, "--ttft", "1s", "--replicas", "0"), "--replicas is '0'"),
        ((*PLAN, "--ttft", "1s", "--good", "1.5"), "--good is 1.5"),
        ((*PLAN, "--ttft", "1s", "--price", "-1"), "--price is -1"),
        ((*PLAN, "--ttft", "1s", "--routing", "random"), "--routing is 'random'"),
        ((*PLAN, "--ttft", "1s", "--sweep", "colour=red"), "there is no setting 'colour'"),
        ((*PLAN, "--ttft", "1s", "--toml", "x.toml"), "--toml needs --sweep"),
        ((*PLAN, "--ttft", "1s", "--trace", "x.csv"), "--trace and --rate each define the load"),
        (("plan", "-p", "zen4-2-cores", "--ttft", "1s"), "there is no load"),
        (("plan", "-p", "zen4-2-cores", "--ttft", "1s", "--trace", "none.csv"), "none.csv cannot be read"),
        ((*PLAN, "--ttft", "1s", "--max-tokens", "9000"), "the context of the profile is 8192"),
        (("profile", "--log", "none.log"), "none.log cannot be read"),
        (("profile", "--log", "a", "--url", "b"), "--log and --url each define the steps"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    weft: Any, arguments: tuple[str, ...], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = weft(*arguments)
    assert code == 2
    assert words in err and err.startswith("weft: ") and err.count("\n") == 1 and not out
    assert not list(tmp_path.iterdir())
