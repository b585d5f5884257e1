"""Feedback about answers: what is kept, for which keys, how much, and what survives a crash."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from in_process import InProcess, in_process
from server_process import MESSAGES, Server, api_key, running_server, wait_for

from weft.cli.feedback_command import clear_command, export_command, records, stats_command
from weft.errors import WeftError
from weft.server.admission.keys import ApiKey
from weft.server.state.feedback import Totals

URL = "/v1/feedback"
ON: dict[str, Any] = {"feedback_days": 30}
KEYS = [
    api_key("ann", feedback=True),
    api_key("bob", feedback=True),
    api_key("silent"),
    api_key("boss", admin=True),
]


@pytest.fixture(scope="module")
def server(default_model_path: Path) -> Iterator[Server]:
    with running_server(default_model_path, **ON) as running:
        yield running


@pytest.fixture(scope="module")
def server_with_keys(default_model_path: Path) -> Iterator[Server]:
    with running_server(default_model_path, api_keys=KEYS, **ON) as running:
        yield running


def give(server: Server, response_id: str, score: float = 1, **fields: Any) -> httpx.Response:
    return server.client.post(URL, json={"response_id": response_id, "score": score, **fields})


def of(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def entry(server: Server, response_id: str) -> dict[str, Any]:
    found = server.client.get(URL, params={"limit": 100}).json()["data"]
    [one] = [one for one in found if response_id.endswith(one["id"])]
    return dict(one)


def test_an_answer_of_every_api_takes_feedback_as_soon_as_it_has_ended(server: Server) -> None:
    client = server.client
    chat = server.chat().json()
    completion = server.complete("Hello").json()
    fields = {"input": "Hello", "max_output_tokens": 4}
    response = client.post("/v1/responses", json=fields).json()
    message = client.post("/v1/messages", json={"messages": MESSAGES, "max_tokens": 4}).json()
    plain = {"model": "test-model", "stream": False, "options": {"num_predict": 4}}
    ollama = client.post("/api/chat", json={**plain, "messages": MESSAGES})
    texts = {
        chat["id"]: chat["choices"][0]["message"]["content"],
        completion["id"]: completion["choices"][0]["text"],
        response["id"]: response["output"][-1]["content"][0]["text"],
        message["id"]: message["content"][-1]["text"],
        ollama.headers["x-request-id"]: ollama.json()["message"]["content"],
    }
    for response_id, text in texts.items():
        given = give(server, response_id, labels=["test"], correction="Better.")
        assert given.status_code == 200, given.text
        assert given.json()["id"] == response_id and given.json()["score"] == 1
        kept = entry(server, response_id)
        [answer] = kept["answers"]
        is_prompt = response_id.startswith("cmpl-")
        assert text and (answer["output"] if is_prompt else answer["output"]["content"]) == text
        assert kept["prompts"] == ["Hello"] if is_prompt else kept["messages"] == MESSAGES
        assert (answer["score"], answer["correction"], answer["labels"]) == (1, "Better.", ["test"])


def test_the_answer_to_a_stream_is_kept_before_its_last_event(server: Server) -> None:
    with server.client.stream(
        "POST", "/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 9, "stream": True}
    ) as stream:
        events = [line for line in stream.iter_lines() if line.startswith("data: {")]
    first = json.loads(events[0].removeprefix("data: "))
    text = "".join(
        one["choices"][0]["delta"].get("content") or ""
        for one in (json.loads(event.removeprefix("data: ")) for event in events)
        if one["choices"]
    )
    assert give(server, first["id"], -1).status_code == 200
    assert entry(server, first["id"])["answers"][0]["output"]["content"] == text


def test_each_answer_of_a_response_has_feedback_of_its_own_and_the_last_counts(server: Server) -> None:
    found = server.complete(["Hello", "Bye"], n=2).json()
    assert give(server, found["id"], 1, index=3).status_code == 200
    assert give(server, found["id"], -1, index=0).status_code == 200
    assert give(server, found["id"], 0.5, index=0).status_code == 200
    refused = give(server, found["id"], 1, index=4)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "index"
    kept = entry(server, found["id"])
    assert [one["score"] for one in kept["answers"]] == [0.5, None, None, 1]
    assert [one["output"] for one in kept["answers"]] == [one["text"] for one in found["choices"]]
    assert kept["prompts"] == ["Hello", "Bye"]


def test_tokens_tools_and_the_beginning_of_an_answer_are_kept_as_text(server: Server) -> None:
    tokens = server.client.post("/tokenize", json={"prompt": "Hello world"}).json()["tokens"]
    found = server.complete(tokens).json()
    give(server, found["id"])
    assert entry(server, found["id"])["prompts"] == ["Hello world"]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    begun = [*MESSAGES, {"role": "assistant", "content": "It is"}]
    more = {"continue_final_message": True, "add_generation_prompt": False}
    found = server.chat(messages=begun, tools=[tool], **more).json()
    give(server, found["id"])
    kept = entry(server, found["id"])
    assert kept["messages"] == MESSAGES and kept["tools"][0]["function"]["name"] == "f"
    output = found["choices"][0]["message"]["content"]
    assert kept["answers"][0]["output"]["content"].endswith(output)
    assert kept["answers"][0]["output"]["content"].startswith("It is")


def test_what_a_client_does_not_want_stored_is_not_kept(server: Server) -> None:
    found = server.client.post(
        "/v1/responses", json={"input": "Hello", "max_output_tokens": 4, "store": False}
    ).json()
    assert give(server, found["id"]).status_code == 404
    assert give(server, server.chat(store=False).json()["id"]).status_code == 404


@pytest.mark.parametrize(
    "fields",
    [
        *({"score": value} for value in (2, -1.1, 1e308, None, True, "1", [1])),
        *({"index": value} for value in (-1, 1, 10**30, 0.5, "0", True)),
        *({"correction": value} for value in ("a" * 65_537, "é" * 40_000, 5, ["a"])),
        *({"labels": value} for value in (["a"] * 17, ["a" * 65], [""], "a", [1], {"a": 1})),
        *({"response_id": value} for value in (5, None, ["a"])),
    ],
    ids=lambda fields: str(fields)[:40],
)
def test_invalid_feedback_is_refused_and_names_the_field(server: Server, fields: dict[str, Any]) -> None:
    found = server.complete().json()
    refused = server.client.post(URL, json={"response_id": found["id"], "score": 1, **fields})
    [name] = fields
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["param"].startswith(name), refused.text
    assert give(server, found["id"]).status_code == 200  # the refused one left nothing


@pytest.mark.parametrize("score", ["NaN", "Infinity", "-Infinity", "1e400", "1" * 400])
def test_a_score_that_is_no_number_is_refused(server: Server, score: str) -> None:
    found = server.complete().json()
    body = f'{{"response_id": "{found["id"]}", "score": {score}}}'
    assert server.client.post(URL, content=body.encode()).status_code == 400


def test_a_correction_of_megabytes_is_refused_and_frees_its_memory(server: Server) -> None:
    found = server.complete().json()
    assert give(server, found["id"], correction="a" * (15 << 20)).status_code == 400
    assert give(server, found["id"], correction="a" * (17 << 20)).status_code == 413
    assert give(server, found["id"], correction="a" * 65_536).status_code == 200


def test_keys_see_and_delete_their_own_feedback_only(server_with_keys: Server) -> None:
    client, body = server_with_keys.client, {"messages": MESSAGES, "max_tokens": 4}

    def answered(key: str) -> str:
        return str(client.post("/v1/chat/completions", json=body, headers=of(key)).json()["id"])

    def send(key: str, response_id: str) -> httpx.Response:
        return client.post(URL, json={"response_id": response_id, "score": 1}, headers=of(key))

    def listed(reader: str, **query: str) -> list[str]:
        found = client.get(URL, params=query, headers=of(reader))
        assert found.status_code == 200, found.text
        return [one["key"] for one in found.json()["data"]]

    of_ann, of_bob = answered("ann"), answered("bob")
    foreign, unknown = send("bob", of_ann), send("bob", "chatcmpl-none")
    assert foreign.status_code == unknown.status_code == 404
    assert foreign.text.replace(of_ann, "X") == unknown.text.replace("chatcmpl-none", "X")
    assert send("ann", of_ann).status_code == send("bob", of_bob).status_code == 200
    assert listed("ann") == ["ann"] and listed("boss") == []
    assert sorted(listed("boss", key="*")) == ["ann", "bob"] and listed("boss", key="bob") == ["bob"]
    for method in ("GET", "DELETE"):
        refused = client.request(method, URL, params={"key": "bob"}, headers=of("ann"))
        assert refused.status_code == 403 and refused.json()["error"]["param"] == "key"
    silent = send("silent", answered("silent"))
    assert silent.status_code == 403 and silent.json()["error"]["code"] == "feedback_not_allowed"
    totals = client.get(f"{URL}/statistics", params={"key": "*"}, headers=of("boss")).json()
    assert totals["responses"] == 2  # nothing of the key that does not allow it
    assert client.delete(URL, headers=of("ann")).json()["responses"] == 1
    assert listed("ann") == [] and listed("bob") == ["bob"]
    assert send("ann", of_ann).status_code == 404
    assert client.delete(URL, params={"key": "*"}, headers=of("boss")).json()["responses"] == 1
    assert listed("boss", key="*") == []


def test_a_server_whose_operator_did_not_opt_in_keeps_nothing(default_model_path: Path) -> None:
    async def work() -> None:
        key = ApiKey("ann", "0" * 64, feedback=True)
        async with in_process(default_model_path, api_keys=(key,)) as api:
            assert not api.server.answers.keeps_for(key)
        async with in_process(default_model_path) as api:
            answered = await completed(api)
            status, error = await gave(api, answered)
            assert (status, error["error"]["code"]) == (403, "feedback_off")
            assert await api.server.store.run(rows) == (0, 0)

    asyncio.run(work())


def test_figures_of_feedback_are_in_the_metrics_and_in_the_live_view(default_model_path: Path) -> None:
    with running_server(default_model_path, **ON) as server:
        for score in (1, 0.1, -1, 0):
            assert give(server, server.complete().json()["id"], score, correction="x").status_code == 200
        text = server.client.get("/metrics").text
        for score, count in (("positive", 2), ("negative", 1), ("neutral", 1)):
            assert f'weft:feedback_total{{model_name="test-model",score="{score}"}} {count}.0' in text
        assert server.metric("kept_responses") == 4
        found = server.client.get(f"{URL}/statistics").json()
        assert server.metric("feedback_bytes") == found["bytes"] > 0
        assert (found["positive"], found["negative"], found["neutral"], found["corrected"]) == (2, 1, 1, 4)
        frame = server.client.get("/live", params={"frames": 1}).text.removeprefix("data: ")
        shown = json.loads(frame)["feedback"]
        assert shown == {"requests": 4, "positive": 2, "negative": 1, "corrected": 4}


def test_acknowledged_feedback_survives_kill_9_and_a_damaged_database_is_set_aside(
    default_model_path: Path, tmp_path: Path
) -> None:
    settings = {**ON, "state_path": str(tmp_path)}
    with running_server(default_model_path, **settings) as server:
        response_id = server.chat().json()["id"]
        assert give(server, response_id, -1, correction="Better.").status_code == 200
        server.process.send_signal(signal.SIGKILL)
        server.process.wait(60)
    with running_server(default_model_path, **settings) as server:
        [answer] = entry(server, response_id)["answers"]
        assert (answer["score"], answer["correction"]) == (-1, "Better.")
        wait_for(lambda: server.metric("kept_responses") == 1)
        assert give(server, response_id, 1).status_code == 200
    damaged = tmp_path / "state.db"
    damaged.write_bytes(os.urandom(len(damaged.read_bytes())))
    for name in ("state.db-wal", "state.db-shm"):
        (tmp_path / name).unlink(missing_ok=True)
    with running_server(default_model_path, **settings) as server:
        assert give(server, response_id).status_code == 404
        assert give(server, server.chat().json()["id"]).status_code == 200
    assert list(tmp_path.glob("state.db.damaged-*"))


def test_an_answer_does_not_wait_for_the_store(default_model_path: Path, tmp_path: Path) -> None:
    """Another process has locked the database while answers arrive."""
    settings = {**ON, "state_path": str(tmp_path)}
    with running_server(default_model_path, **settings) as server:
        assert give(server, server.chat().json()["id"]).status_code == 200
        other = sqlite3.connect(tmp_path / "state.db", isolation_level=None)
        other.execute("BEGIN EXCLUSIVE")
        ids = [server.chat().json()["id"] for _ in range(3)]
        other.execute("ROLLBACK")
        other.close()
        assert [give(server, one).status_code for one in ids] == [200] * 3


# ---------------------------------------------------------------------- limits


async def completed(api: InProcess, prompt: str = "Hello", **more: Any) -> str:
    body = json.dumps({"prompt": prompt, "max_tokens": 4})
    return str(json.loads((await api.send("/v1/completions", body.encode(), **more)).body)["id"])


async def gave(api: InProcess, response_id: str, **fields: Any) -> tuple[int, Any]:
    body = {"response_id": response_id, "score": 1, **fields}
    reply = await api.send(URL, json.dumps(body).encode())
    return reply.status, json.loads(reply.body)


def rows(connection: sqlite3.Connection) -> tuple[int, int]:
    names = ("kept_answers", "feedback")
    kept, given = (connection.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in names)
    return kept, given


def counted(connection: sqlite3.Connection) -> Totals:
    """The totals as the rows have them."""
    [requests, size] = connection.execute(
        "SELECT count(*), coalesce(sum(num_bytes), 0) FROM kept_answers"
    ).fetchone()
    found = connection.execute(
        "SELECT sum(num_bytes), sum(score > 0), sum(score < 0), sum(score = 0), sum(correction NOTNULL) FROM feedback"
    ).fetchone()
    more, *counts = (one or 0 for one in found)
    return Totals(requests, size + more, *counts)


def test_an_expired_answer_is_unknown_and_its_feedback_is_deleted(default_model_path: Path) -> None:
    async def work() -> None:
        async with in_process(default_model_path, feedback_days=2) as api:
            now = api.server.store.wall_clock()
            response_id = await completed(api)
            assert (await gave(api, response_id))[0] == 200
            for days, status in ((1.9, 200), (2.1, 404)):
                api.server.store.wall_clock = lambda days=days: now + days * 86_400  # type: ignore[misc]
                assert (await gave(api, response_id))[0] == status
            assert await api.server.store.run(rows) == (0, 0)
            assert await api.server.store.run(counted) == Totals()

    asyncio.run(work())


def test_the_oldest_answers_make_room_and_the_totals_stay_right(default_model_path: Path) -> None:
    async def work() -> None:
        limit = 60_000
        async with in_process(
            default_model_path, max_context=8192, feedback_days=1, max_feedback_bytes=limit
        ) as api:
            answers = api.server.answers
            ids = []
            for number in range(60):
                ids.append(await completed(api, f"{number} " + "word " * 300))
                status, error = await gave(api, ids[-1], score=number % 3 - 1, correction="x" * 500)
                assert status == 200, error
                assert answers.totals.num_bytes <= limit
                assert await api.server.store.run(counted) == answers.totals
            kept, given = await api.server.store.run(rows)
            assert 5 < kept == given < 40
            assert (await gave(api, ids[0]))[0] == 404 and (await gave(api, ids[-1]))[0] == 200
            too_large, _ = await gave(api, ids[-1], correction="x" * 59_990)
            assert too_large == 507
            assert await api.server.store.run(counted) == answers.totals

    asyncio.run(work())


def test_thousands_of_feedbacks_keep_one_row_for_each_answer_and_no_memory(default_model_path: Path) -> None:
    async def work() -> None:
        async with in_process(default_model_path, **ON) as api:
            ids = [await completed(api) for _ in range(5)]

            async def send(first: int) -> None:
                for number in range(first, 2000, 20):
                    assert (await gave(api, ids[number % 5], score=-1 if number % 2 else 1))[0] == 200

            await asyncio.gather(*(send(first) for first in range(20)))
            assert await api.server.store.run(rows) == (5, 5)
            assert api.server.answers.memory.num_bytes == 0 and not api.server.answers._queue
            assert sum(api.server.answers.num_given.values()) == 2000
            assert await api.server.store.run(counted) == api.server.answers.totals

    asyncio.run(work())


def test_a_full_queue_loses_answers_and_counts_them(
    default_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.server.learned.answers._MAX_QUEUED", 2)
    monkeypatch.setattr("weft.server.learned.answers._BATCH_SECONDS", 3600)

    async def work() -> None:
        async with in_process(default_model_path, **ON) as api:
            ids = [await completed(api) for _ in range(4)]
            assert [(await gave(api, one))[0] for one in ids] == [200, 200, 404, 404]
            assert api.server.answers.memory.num_lost == 2
            assert api.server.answers.memory.num_bytes == 0

    asyncio.run(work())


def test_what_is_too_large_or_cancelled_is_dropped_and_the_client_has_its_answer(
    default_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.server.learned.transcript._MAX_BYTES", 2000)

    async def work() -> None:
        async with in_process(default_model_path, max_context=8192, seconds_per_step=0.001, **ON) as api:
            memory = api.server.answers.memory
            large = await completed(api, "word " * 200)
            assert (await gave(api, large))[0] == 404 and memory.num_lost == 1
            body = json.dumps({"prompt": "x", "max_tokens": 8000, "ignore_eos": True, "stream": True})
            await api.send("/v1/completions", body.encode(), leaves_at=b"data")
            assert memory.num_lost == 1 and memory.num_bytes == 0
            assert await api.server.store.run(rows) == (0, 0)

    asyncio.run(work())


# ---------------------------------------------------------------------- weft feedback

MESSAGE = {"role": "assistant", "content": "Paris"}
BAD = {"role": "assistant", "content": "Rome"}


def scored(output: Any, score: float | None, correction: str | None = None, index: int = 0) -> dict[str, Any]:
    return {"index": index, "output": output, "score": score, "correction": correction, "labels": []}


def test_feedback_becomes_records_of_the_usual_forms() -> None:
    def of_form(form: str, *answers: Any, **fields: Any) -> list[Any]:
        entry = {"messages": MESSAGES, "tools": None, "prompts": None, "answers": answers, **fields}
        return list(records(form, entry))

    right = {"role": "assistant", "content": "Tokyo"}
    assert of_form("sft", scored(MESSAGE, 0.5)) == [{"messages": [*MESSAGES, MESSAGE]}]
    assert of_form("sft", scored(MESSAGE, -1)) == of_form("sft", scored(MESSAGE, None)) == []
    assert of_form("sft", scored(MESSAGE, -1, "Tokyo"), tools=[1]) == [
        {"messages": [*MESSAGES, right], "tools": [1]}
    ]
    assert of_form("dpo", scored(MESSAGE, 0, "Tokyo")) == [
        {"prompt": MESSAGES, "chosen": [right], "rejected": [MESSAGE]}
    ]
    assert of_form("dpo", scored(BAD, -1), scored(MESSAGE, 1, index=1)) == [
        {"prompt": MESSAGES, "chosen": [MESSAGE], "rejected": [BAD]}
    ]
    assert of_form("dpo", scored(BAD, 0.5), scored(MESSAGE, 1, index=1)) == []
    assert of_form("kto", scored(MESSAGE, -1, "Tokyo"), scored(BAD, 0, index=1)) == [
        {"prompt": MESSAGES, "completion": [MESSAGE], "label": False},
        {"prompt": MESSAGES, "completion": [right], "label": True},
    ]
    prompts = {"messages": None, "prompts": ["a", "b"]}
    answers = [scored(text, 1, index=index) for index, text in enumerate("wxyz")]
    assert [(one["prompt"], one["completion"]) for one in of_form("sft", *answers, **prompts)] == [
        *(("a", "w"), ("a", "x"), ("b", "y"), ("b", "z"))
    ]


def test_the_command_exports_counts_and_clears(
    server_with_keys: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    client, where = server_with_keys.client, (server_with_keys.url, "bob")
    clear_command(None, *where, False)
    ids = []
    for number in range(205):  # more than a page
        body = {"prompt": f"Number {number}", "max_tokens": 2}
        ids.append(client.post("/v1/completions", json=body, headers=of("bob")).json()["id"])
        client.post(URL, json={"response_id": ids[-1], "score": 1}, headers=of("bob"))
    capsys.readouterr()
    target = tmp_path / "out.jsonl"
    export_command("sft", target, False, None, *where)
    lines = [json.loads(line) for line in target.read_text().splitlines()]
    assert [one["prompt"] for one in lines] == [f"Number {number}" for number in range(205)]
    with pytest.raises(WeftError, match="exists"):
        export_command("sft", target, False, None, *where)
    export_command("kto", None, False, "bob", server_with_keys.url, "boss")
    assert capsys.readouterr().out.count('"label": true') == 205
    stats_command(None, *where, False)
    assert "205 responses are kept" in capsys.readouterr().out
    clear_command(None, *where, False)
    assert "205 responses deleted" in capsys.readouterr().out
    with pytest.raises(WeftError, match="admin key"):
        export_command("sft", tmp_path / "other.jsonl", False, "ann", *where)
    assert not (tmp_path / "other.jsonl").exists()
