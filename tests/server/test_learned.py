"""What the engine learned is kept through a kill and a crash; damage costs a warning and nothing else."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from server_process import NOOP, Server, api_key, running_server, wait_for

from weft.cli.learned import clear, show
from weft.cli.plan import profile
from weft.engine.replay import replay
from weft.errors import WeftError
from weft.planning.costs import StepShape
from weft.planning.profile import read_profile

PROMPT = "word " * 60


@contextmanager
def learning_server(model_path: Path, state: Path, **more: Any) -> Iterator[Server]:
    options = {**NOOP, "seconds_per_step": 0.002, "fixed_cost_rows": 4.0}
    settings = {"state_path": str(state), "backend_options": options, **more}
    with running_server(model_path, **settings) as server:
        yield server


def entries(server: Server, kind: str = "costs") -> list[dict[str, Any]]:
    found = server.client.get("/admin/learned").json()["data"]
    return [one for one in found if one["kind"] == kind]


def learn(server: Server) -> None:
    """Sends requests until the costs of their steps are kept."""

    def is_kept() -> bool:
        assert server.complete(PROMPT, max_tokens=12).status_code == 200
        return bool(entries(server))

    wait_for(is_kept)


def events(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_server_that_was_killed_plans_its_first_request_with_the_learned_costs(
    default_model_path: Path, tmp_path: Path
) -> None:
    log = tmp_path / "engine.log"
    with learning_server(default_model_path, tmp_path / "state") as server:
        assert entries(server) == []
        learn(server)
        [before] = entries(server)
        server.process.send_signal(signal.SIGKILL)
        server.process.wait(60)
    with learning_server(default_model_path, tmp_path / "state", engine={"log_path": str(log)}) as server:
        [after] = entries(server)
        assert after["name"] == before["name"] and after["created_at"] == before["created_at"]
        assert server.complete(PROMPT).status_code == 200
        os.kill(server.engine_pid(), signal.SIGKILL)  # the next engine gets them too
        wait_for(lambda: server.client.get("/health").status_code == 503)
        wait_for(lambda: server.client.get("/health").status_code == 200)
        assert server.complete(PROMPT).status_code == 200
    for path in (Path(f"{log}.1"), log):
        kinds = [event["event"] for event in events(path)]
        assert kinds.index("restore_costs") < kinds.index("add")
        restored = events(path)[kinds.index("restore_costs")]["costs"]
        assert restored["steps"] >= 3 and restored["mean_seconds"] > 0
        assert replay(str(path)).requests == 1


def test_the_learned_costs_make_a_machine_profile(default_model_path: Path, tmp_path: Path) -> None:
    output = tmp_path / "profile.json"
    with learning_server(default_model_path, tmp_path / "state") as server:
        url = f"http://127.0.0.1:{server.port}"
        with pytest.raises(WeftError, match="has not learned the costs of its steps yet"):
            profile(output=output, url=url)
        learn(server)
        profile(output=output, url=url)
        info = server.client.get("/live/info").json()
    found = read_profile(str(output))
    assert (found.room.num_blocks, found.room.block_size) == (info["num_blocks"], info["block_size"])
    assert found.source == "learned costs of a running server"
    # A step of this server takes 2 ms, whatever it computes.
    assert 0.001 < found.costs.of(StepShape(1, 1, 100, 0)) < 0.1
    assert not found.is_gpu and info["device"] == ""


def test_a_damaged_row_is_set_aside_with_a_warning_and_the_server_starts(
    default_model_path: Path, tmp_path: Path
) -> None:
    state, log = tmp_path / "state", tmp_path / "server.log"
    with learning_server(default_model_path, state) as server:
        learn(server)
    with sqlite3.connect(state / "state.db") as database:
        # Still JSON: only the checksum tells.
        database.execute(
            """UPDATE learned SET content = CAST(replace(CAST(content AS TEXT), '"steps":', '"steps":1') AS BLOB)"""
        )
        database.execute(
            "INSERT INTO learned SELECT 'costs::other', kind, 'other', owner, created_at, updated_at, expires_at, 999, "
            "checksum, content FROM learned"
        )
    database.close()
    with (
        log.open("w") as stderr,
        learning_server(default_model_path, state, log_format="json", stderr=stderr) as server,
    ):
        assert entries(server) == []
        assert server.complete().status_code == 200
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [one["level"] for one in lines if one["event"] == "damaged_learned"] == ["warning"] * 2
    with sqlite3.connect(state / "state.db") as database:
        kinds = database.execute("SELECT kind FROM learned WHERE version = 999").fetchall()
    database.close()
    assert kinds == [("damaged",)]


def test_numbers_that_make_no_sense_are_damage_too(default_model_path: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    with learning_server(default_model_path, state) as server:
        learn(server)
    import zlib

    content = b'{"steps": -5}'
    with sqlite3.connect(state / "state.db") as database:
        database.execute("UPDATE learned SET content = ?, checksum = ?", (content, zlib.crc32(content)))
    database.close()
    with learning_server(default_model_path, state) as server:
        assert entries(server) == []
        learn(server)


def test_the_command_and_the_metrics_show_what_was_learned_and_clear_forgets_it(
    default_model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = [api_key("boss", admin=True), api_key("ann")]
    more = {"api_keys": keys, "headers": {"Authorization": "Bearer boss"}}
    with learning_server(default_model_path, tmp_path / "state", **more) as server:
        learn(server)
        show(server.url, "boss", False)
        shown = capsys.readouterr().out
        assert "costs   " in shown and "test-model on " in shown and "ms a step" in shown
        assert server.complete(PROMPT, max_tokens=60).status_code == 200
        [drafts] = entries(server, "drafts")
        assert drafts["tokens"] > 40 and drafts["bytes"] > drafts["tokens"]
        show(server.url, "boss", False)
        shown = capsys.readouterr().out
        figures = ("learned_tokens", "learned_bytes", "learned_seconds_saved")
        assert server.metrics(*figures) == [drafts["tokens"], drafts["bytes"], drafts["seconds_saved"]]
        assert f"drafts  {drafts['tokens']:,} tokens, {drafts['bytes']:,} bytes; " in shown
        clear(server.url, "boss", False)
        assert capsys.readouterr().out == "1 entries deleted\n"
        assert entries(server) == []
        [drafts] = entries(server, "drafts")
        assert drafts["tokens"] == drafts["bytes"] == 0
        learn(server)  # it is learned and kept again
        with pytest.raises(WeftError, match="admin key"):
            show(server.url, "ann", False)


def test_a_store_that_cannot_be_written_stops_nothing(default_model_path: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    log = tmp_path / "server.log"
    with (
        log.open("w") as stderr,
        learning_server(
            default_model_path, tmp_path / "file" / "state", log_format="json", stderr=stderr
        ) as server,
    ):

        def is_logged() -> bool:
            assert server.complete(PROMPT, max_tokens=12).status_code == 200
            return "learned_not_kept" in log.read_text()

        wait_for(is_logged)
    assert log.read_text().count('"learned_not_kept"') == 1


KEYS = {
    "api_keys": [api_key("ann"), api_key("bob"), api_key("boss", admin=True)],
    "headers": {"Authorization": "Bearer boss"},
    "backend_options": {**NOOP, "fixed_cost_rows": 100.0},
}


def learned_drafts(server: Server, key: str) -> float:
    """The learned draft tokens that were accepted in an answer to this key."""
    name = "spec_decode_num_learned_accepted_tokens_total"
    before = server.metric(name)
    body = {"prompt": "Hello", "max_tokens": 60, "seed": 1, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {key}"}
    assert server.client.post("/v1/completions", json=body, headers=headers).status_code == 200
    return server.metric(name) - before


@contextmanager
def server_with_texts(model_path: Path, state: Path, days: float = 1.0, **more: Any) -> Iterator[Server]:
    with learning_server(model_path, state, learned_text_days=days, **{**KEYS, **more}) as server:
        yield server


def keep_text(model_path: Path, state: Path) -> None:
    """Runs a server until it has kept an answer of ann, and kills it."""
    with server_with_texts(model_path, state) as server:
        assert learned_drafts(server, "ann") == 0
        wait_for(lambda: entries(server, "texts"))
        [kept] = entries(server, "texts")
        assert (kept["name"], kept["answers"]) == ("ann", 1)
        server.process.send_signal(signal.SIGKILL)
        server.process.wait(60)


def test_kept_answers_give_draft_tokens_after_a_kill_and_to_the_same_salt_only(
    default_model_path: Path, tmp_path: Path
) -> None:
    keep_text(default_model_path, tmp_path)
    for file in tmp_path.glob("state.db*"):
        assert file.stat().st_mode & 0o777 == 0o600
    with server_with_texts(default_model_path, tmp_path) as server:
        assert learned_drafts(server, "bob") == 0
        assert learned_drafts(server, "ann") > 0
        os.kill(server.engine_pid(), signal.SIGKILL)
        wait_for(lambda: server.client.get("/health").status_code == 503)
        wait_for(lambda: server.client.get("/health").status_code == 200)
        wait_for(lambda: server.metric("learned_tokens") > 0)
        assert learned_drafts(server, "ann") > 0
        assert server.client.delete("/admin/learned").json()["entries"] > 0
        assert entries(server, "texts") == []
    with server_with_texts(default_model_path, tmp_path) as server:
        assert learned_drafts(server, "ann") == 0


def test_without_the_setting_no_answer_is_written_and_kept_ones_are_not_used(
    default_model_path: Path, tmp_path: Path
) -> None:
    keep_text(default_model_path, tmp_path)
    with server_with_texts(default_model_path, tmp_path, days=0.0) as server:
        assert learned_drafts(server, "ann") == 0
        assert learned_drafts(server, "bob") == 0
    with sqlite3.connect(tmp_path / "state.db") as database:
        assert database.execute("SELECT owner FROM learned WHERE kind = 'drafts'").fetchall() == [("ann",)]


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_damaged_answer_is_set_aside(default_model_path: Path, tmp_path: Path, is_whole: bool) -> None:
    """`is_whole`: the content has a correct checksum, but is no answer."""
    keep_text(default_model_path, tmp_path)
    with sqlite3.connect(tmp_path / "state.db") as database:
        content = b"nonsense"
        checksum = zlib.crc32(content) if is_whole else 0
        changed = "UPDATE learned SET content = ?, checksum = ? WHERE kind = 'drafts'"
        assert database.execute(changed, (content, checksum)).rowcount == 1
    log = tmp_path / "server.log"
    with (
        log.open("w") as stderr,
        server_with_texts(default_model_path, tmp_path, log_format="json", stderr=stderr) as server,
    ):
        assert log.read_text().count('"damaged_learned"') == 1
        assert learned_drafts(server, "ann") == 0
        assert learned_drafts(server, "ann") > 0


def test_keys_with_other_salts_share_no_finished_answers(default_model_path: Path, tmp_path: Path) -> None:
    """The same text from two keys, measured by counters: draft tokens come from answers to the same key alone."""
    with learning_server(default_model_path, tmp_path / "state", **KEYS) as server:
        assert learned_drafts(server, "ann") == 0
        assert learned_drafts(server, "ann") > 0
        assert learned_drafts(server, "bob") == 0
        assert learned_drafts(server, "bob") > 0


ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 12, "ignore_eos": True},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 12},
    "/v1/responses": {"input": PROMPT, "max_output_tokens": 12, "store": False},
    "/v1/messages": {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 12},
    "/api/chat": {
        "messages": [{"role": "user", "content": PROMPT}],
        "stream": False,
        "options": {"num_predict": 12},
    },
    "/api/generate": {"prompt": PROMPT, "stream": False, "options": {"num_predict": 12}},
}


def test_every_api_can_let_prompts_be_learned_if_the_key_allows_it(
    default_model_path: Path, tmp_path: Path
) -> None:
    more = {
        "api_keys": [api_key("ann", learn_prompts=True), api_key("bob"), api_key("boss", admin=True)],
        "headers": {"Authorization": "Bearer boss"},
        "coalesce": False,
    }
    with learning_server(default_model_path, tmp_path / "state", **more) as server:
        ann, bob = ({"Authorization": f"Bearer {key}"} for key in ("ann", "bob"))
        for path, body in ROUTES.items():
            refused = server.client.post(path, json={**body, "learn_prompt": True}, headers=bob)
            assert refused.status_code == 403 and "learn_prompts = true" in refused.text, path
            assert server.client.post(path, json={**body, "learn_prompt": 1}, headers=ann).status_code == 400
            learned = []
            for learn_prompt in (False, True):
                before = server.metric("learned_tokens")
                sent = {**body, "learn_prompt": learn_prompt}
                assert server.client.post(path, json=sent, headers=ann).status_code == 200, path
                # Tokens are indexed after steps, so another request makes some.
                assert server.complete("Hello", max_tokens=2).status_code == 200
                learned.append(server.metric("learned_tokens") - before)
            assert learned[1] - learned[0] >= 40, (path, learned)
