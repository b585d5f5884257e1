"""`weft plan` and `weft profile` as commands: what they print and write, and their exit codes."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from weft.backends.registry import GPU_BUDGETS
from weft.cli import plan_command
from weft.cli.main import main
from weft.planning import measure, report
from weft.planning.profile import read_profile
from weft.server.config_file import gather
from weft.server.settings import ServerSettings

LOAD = ("--rate", "6", "-n", "60", "--prompt-tokens", "16-400", "--max-tokens", "8-60", "--jobs", "1")
PROFILES = Path(measure.__file__).parent / "profiles"
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
    assert code == 0 and "2 replicas: 60 requests completed, and no target was given." in out
    assert "breaks" not in out and "within the targets." not in out


def test_autoscaling_reports_the_mean_number_of_replicas(weft: Any) -> None:
    code, out, _ = weft(*PLAN, "--autoscale", "1-3", "--start-delay", "1s", "--ttft", "2s")
    assert code == 0 and "1 to 3 replicas, 1.00 on average" in out


def test_autoscaled_replicas_are_named_by_their_limits_everywhere(weft: Any, tmp_path: Path) -> None:
    path, page = tmp_path / "plan.json", tmp_path / "plan.html"
    scaling = ("--autoscale", "2-3", "--start-delay", "0s", "--ttft", "2s", "--sweep", "max_running=1,64")
    code, out, err = weft(*PLAN, *scaling, "--json", str(path), "--html", str(page))
    assert code == 0 and "With them and 2 to 3 replicas" in out
    assert (
        "Settings tried with 2 to 3 replicas" in out
        and "Settings tried with 2 to 3 replicas" in page.read_text()
    )
    assert "2 replicas" not in out + err + page.read_text()
    found = json.loads(path.read_text("utf-8"))
    assert found["replicas"] is found["chosen"]["replicas"] is None
    assert (found["autoscaling"]["least"], found["autoscaling"]["most"]) == (2, 3)


def test_best_settings_reproduce_the_plan_of_a_gpu(weft: Any, tmp_path: Path) -> None:
    config, best = tmp_path / "weft.toml", tmp_path / "best.toml"
    config.write_text('memory = "2GiB"\n[engine.cache]\nexpected_context = 3000\n')
    plan = ("plan", "-p", "h200-8b-derived", *LOAD, "--replicas", "1", "--ttft", "9s")
    code, out, err = weft(
        *plan, "--sweep", "max_chunk_tokens=256", "--config", str(config), "--toml", str(best)
    )
    assert code == 0, err
    found = tomllib.loads(best.read_text("utf-8"))
    is_present = "Best settings: the present ones" in out
    budgets = {**GPU_BUDGETS, **({} if is_present else {"max_chunk_tokens": 256})}
    assert found["engine"]["scheduler"] == budgets
    assert found["memory"] == 2 << 30 and found["engine"]["cache"] == {"expected_context": 3000}
    served = gather(best, {}, {}).applied_to(ServerSettings())
    assert served.engine.scheduler.max_prefill_tokens == GPU_BUDGETS["max_prefill_tokens"]


def test_names_of_files_are_escaped_in_the_page(weft: Any, tmp_path: Path) -> None:
    document = json.loads((PROFILES / "zen4-2-cores.json").read_text("utf-8"))
    document["machine"] = "<script>alert(1)</script>"
    profile = tmp_path / "p.json"
    profile.write_text(json.dumps(document))
    trace, page = tmp_path / "<b>&.csv", tmp_path / "plan.html"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n1,50,5\n2,50,5\n")
    plan = ("plan", "-p", str(profile), "--trace", str(trace), "--replicas", "1", "-j", "1")
    code, _, err = weft(*plan, "--html", str(page))
    assert code == 0, err
    text = page.read_text("utf-8")
    assert "&lt;script&gt;alert(1)" in text and "&lt;b&gt;&amp;.csv" in text
    assert "<script" not in text and "<b>" not in text


def test_the_seed_of_a_load_file_is_used(weft: Any, tmp_path: Path) -> None:
    load = tmp_path / "load.toml"
    load.write_text("rate = 6\nrequests = 40\nprompt_tokens = '16-400'\nmax_tokens = 9\nseed = 5\n")
    plan = ("plan", "-p", "zen4-2-cores", "--load", str(load), "--replicas", "1", "-j", "1")
    lines = {seed: weft(*plan, *seed)[1].splitlines()[0] for seed in ((), ("--seed", "5"), ("--seed", "0"))}
    assert lines[()] == lines["--seed", "5"] != lines["--seed", "0"]


def test_what_breaks_first_says_that_it_tried_only_the_first_requests(
    weft: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets = (*PLAN, "--replicas", "1", "--ttft", "2s")
    assert "(tried with its first" not in weft(*targets)[1]
    monkeypatch.setattr(report, "BREAK_REQUESTS", 50)
    assert "(tried with its first 50 requests)" in weft(*targets)[1]


def test_a_long_simulation_says_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    progress = plan_command._Progress(500, seconds=0.0)
    progress.add(20)
    progress.add(30)
    progress.say("1 replica: enough")
    progress.add(7)
    expected = ["  20 of 500", "  50 of 500", "1 replica: enough", "  7 of 500"]
    assert [line.partition(" requests")[0] for line in capsys.readouterr().err.splitlines()] == expected
    plan_command._Progress(500, seconds=1e9).add(20)
    assert not capsys.readouterr().err


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
        ((*PLAN, "--ttft", "1s", "--json", "none/x.json"), "cannot write none/x.json: none is not a folder"),
        ((*PLAN, "--ttft", "1s", "--html", "."), "cannot write .: it is a folder"),
        ((*PLAN, "--ttft", "1s", "--limit", "5"), "--limit has no effect: it needs --trace"),
        ((*PLAN, "--ttft", "1s", "--format", "azure"), "--format has no effect: it needs --trace"),
        ((*PLAN, "--autoscale", "1-2", "--replicas", "2"), "--replicas has no effect"),
        ((*PLAN, "--ttft", "1s", "--start-delay", "5s"), "--start-delay has no effect: it needs --autoscale"),
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
