"""`weft replay --show` as a process: it shows what a real server did, from the log that this server wrote."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from server_process import MESSAGES, SLOW, SOURCE, running_server, wait_for

from weft.server.page.routes import FOLDER


class Shown(NamedTuple):
    process: subprocess.Popen[str]
    client: httpx.Client

    def info(self) -> dict[str, Any]:
        return dict(self.client.get("/live/info").raise_for_status().json())

    def whole_info(self) -> dict[str, Any]:
        """The info when all frames are made."""
        wait_for(lambda: self.info()["is_complete"])
        return self.info()

    def frames(self, num_frames: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        while len(found) < num_frames:
            parameters = {"start": len(found), "count": 100}
            found += self.client.get("/replay/frames", params=parameters).raise_for_status().json()
        return found

    def stop(self, number: int) -> tuple[int, str]:
        """The exit code after a signal, and what was written to standard error."""
        self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors


@contextmanager
def shown(path: Path, *options: str) -> Iterator[Shown]:
    command = [sys.executable, "-m", "weft.cli.entry", "replay", "--show", str(path), "--port", "0", *options]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        found = re.fullmatch(rf"{re.escape(str(path))} at (http://127\.0\.0\.1:\d+/); Ctrl-C ends\n", line)
        assert found is not None, line
        with httpx.Client(base_url=found[1], timeout=60) as client:
            yield Shown(process, client)
    finally:
        process.kill()
        process.communicate()


class Run(NamedTuple):
    log: Path
    usage: dict[str, dict[str, int]]
    """By request id."""
    cancelled: str


@pytest.fixture(scope="module")
def run(default_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """What clients got from a server, and its log."""
    log = tmp_path_factory.mktemp("log") / "engine.log"
    usage = {}
    with running_server(
        default_model_path, engine={"log_path": str(log)}, backend_options={**SLOW, "seconds_per_step": 0.001}
    ) as server:
        for length in (3, 20, 5):
            response = server.chat(max_tokens=length, ignore_eos=True)
            usage[response.headers["x-request-id"]] = response.json()["usage"]
        fields = {"messages": MESSAGES, "max_tokens": 4000, "ignore_eos": True, "stream": True}
        with server.client.stream("POST", "/v1/chat/completions", json=fields) as response:
            cancelled = response.headers["x-request-id"]
            next(response.iter_lines())
        server.wait_until_free()
    return Run(log, usage, cancelled)


@pytest.fixture(scope="module")
def replay(run: Run) -> Iterator[Shown]:
    with shown(run.log) as replay:
        yield replay


def test_the_frames_have_the_requests_tokens_and_ends_that_clients_saw(run: Run, replay: Shown) -> None:
    info = replay.whole_info()
    assert (info["mode"], info["model"], info["problem"]) == ("replay", run.log.name, None)
    assert info["path"] == str(run.log) and info["progress"] == 1 and info["show_prompts"] is False
    frames = replay.frames(info["num_frames"])
    assert all(frame["model"] == run.log.name and frame["engine"] == "ready" for frame in frames)
    events = [event for frame in frames for event in frame["events"]]
    for request_id, usage in run.usage.items():
        mine = [
            dict(zip(("id", "row", "state"), request[:3], strict=True), prompt=request[5], tokens=request[8])
            for frame in frames
            for request in frame["requests"]
            if request[0] == request_id
        ]
        lengths = [one["tokens"] for one in mine if one["state"] == "decoding"]
        prompt, answer = usage["prompt_tokens"], usage["completion_tokens"]
        assert {one["prompt"] for one in mine} == {prompt}
        # The frame of the step with the last token no longer has the request.
        assert lengths == list(range(prompt + 1, prompt + answer))
        (end,) = [event for event in events if event[3] == request_id and event[2] == "finished"]
        assert info["reasons"][end[4]] == "length"
    (end,) = [event for event in events if event[3] == run.cancelled and event[2] == "finished"]
    assert info["reasons"][end[4]] == "cancelled"
    steps = [step[0] for frame in frames for step in frame["steps"]]
    assert steps == list(range(frames[-1]["totals"]["steps"]))
    assert frames[-1]["requests"] == [] and frames[-1]["blocks_used"] == 0


def test_a_frame_is_the_same_wherever_a_page_begins(replay: Shown) -> None:
    number = replay.whole_info()["num_frames"]
    frames = replay.frames(number)
    for start, count in ((0, 1), (number - 1, 256), (number // 2, 7), (31, 2)):
        parameters = {"start": start, "count": count}
        assert replay.client.get("/replay/frames", params=parameters).json() == frames[start : start + count]


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({}, "start"),
        ({"start": 0}, "count"),
        ({"start": -1, "count": 1}, "start"),
        ({"start": 10**9, "count": 1}, "start"),
        ({"start": "1" * 20_000, "count": 1}, "start"),
        ({"start": "1.0", "count": 1}, "start"),
        ({"start": "٣", "count": 1}, "start"),
        ({"start": "", "count": 1}, "start"),
        ({"start": 0, "count": 0}, "count"),
        ({"start": 0, "count": 257}, "count"),
        ({"start": 0, "count": 10**30}, "count"),
        ({"start": 0, "count": "all"}, "count"),
    ],
)
def test_a_page_outside_of_the_replay_is_refused(
    replay: Shown, parameters: dict[str, Any], field: str
) -> None:
    response = replay.client.get("/replay/frames", params=parameters)
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == field
    assert "allowed: " in error["message"] and len(error["message"]) < 200
    assert replay.info()["mode"] == "replay"


def test_the_events_of_a_request_and_the_overview_are_those_of_the_frames(run: Run, replay: Shown) -> None:
    number = replay.whole_info()["num_frames"]
    frames = replay.frames(number)
    for request_id in (*run.usage, run.cancelled):
        for until in (number // 2, number - 1):
            path, parameters = f"/replay/requests/{request_id}", {"until": until}
            found = replay.client.get(path, params=parameters).raise_for_status().json()
            mine = [
                event for frame in frames[: until + 1] for event in frame["events"] if event[3] == request_id
            ]
            assert found == {"events": mine, "left_out": 0}
    overview = replay.client.get("/replay/overview").json()
    assert overview["num_frames"] == number and not any(overview["preemptions"])
    assert replay.client.get("/replay/preemption", params={"after": 0}).json() == {"frame": None}
    for path, field in (("/replay/requests/x", "until"), ("/replay/preemption", "after")):
        for value in ("-1", number, "x", "1" * 500):
            response = replay.client.get(path, params={field: value})
            assert response.status_code == 400 and response.json()["error"]["param"] == field


def test_the_page_is_the_one_of_a_server_without_its_other_routes(replay: Shown) -> None:
    page = replay.client.get("/")
    assert page.status_code == 200 and "default-src 'none'" in page.headers["content-security-policy"]
    for name in ("app.js", "style.css"):
        assert replay.client.get(f"/page/{name}").content == (FOLDER / name).read_bytes()
    for path in ("/live", "/docs", "/v1/models", "/page/routes.py", "/live/info/"):
        response = replay.client.get(path)
        assert response.status_code == 404 and "a replay has no route" in response.json()["error"]["message"]
    assert replay.client.post("/live/info").status_code == 405
    for headers in ({"Host": "example.com"}, {"Origin": "http://example.com"}):
        assert replay.client.get("/live/info", headers=headers).status_code == 403


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_exit_code_0(run: Run, number: int) -> None:
    with shown(run.log) as replay:
        replay.whole_info()
        code, errors = replay.stop(number)
    assert code == 0
    assert re.fullmatch(rf"{re.escape(str(run.log))} replayed: 4 requests, \d+ steps, \d+ tokens\n", errors)


def test_a_difference_is_in_the_info_and_on_standard_error(run: Run, tmp_path: Path) -> None:
    lines = run.log.read_text().splitlines(keepends=True)
    changed = max(number for number, line in enumerate(lines) if '"event": "apply"' in line)
    event = json.loads(lines[changed])
    event["clock"] = []
    path = tmp_path / "engine.log.1"
    path.write_text("".join([*lines[:changed], json.dumps(event) + "\n", *lines[changed + 1 :]]))
    with shown(path) as replay:
        info = replay.whole_info()
        assert info["problem"].startswith(f"{path}, line {changed + 1}: the clock is read more often")
        assert len(replay.frames(info["num_frames"])) == info["num_frames"] > 20
        code, errors = replay.stop(signal.SIGINT)
    assert code == 0
    assert errors == f"weft: {info['problem']}. The page shows the {info['num_frames']} frames before that\n"


def test_a_log_that_the_engine_still_writes_can_be_shown(default_model_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    with running_server(default_model_path, engine={"log_path": str(path)}) as server:
        assert server.complete().status_code == 200
        with shown(path) as replay:
            info = replay.whole_info()
            assert replay.frames(info["num_frames"])[-1]["totals"]["prompt_tokens"] > 0
        assert server.complete().status_code == 200


def test_a_file_that_cannot_be_shown_ends_it_with_exit_code_2(run: Run, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign.log"
    foreign.write_bytes(os.urandom(1000))
    for path, message in ((foreign, "not a weft log"), (Path("/dev/zero"), "not a weft log")):
        done = subprocess.run(
            [sys.executable, "-m", "weft.cli.entry", "replay", "--show", str(path)],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "PYTHONPATH": str(SOURCE)},
        )
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("weft: ") and message in done.stderr and done.stderr.count("\n") == 1
