"""Background responses of the Responses API: their states, cancellation, limits, and a server that stops."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from test_responses import Api, run
from test_responses_store import LONG

from weft.request import RequestId
from weft.server.admission.keys import plain_keys
from weft.server.errors import ApiError
from weft.server.state.store import StoreFullError
from weft.server.stream.choices import Choices


def test_a_background_response_ends_with_the_object_of_a_foreground_one(
    default_model_path: Path, tmp_path: Path
) -> None:
    async def work(api: Api) -> None:
        fields: dict[str, Any] = {"input": "Hello", "seed": 1, "include": ["message.output_text.logprobs"]}
        queued = await api.create(background=True, **fields)
        assert (queued["status"], queued["background"], queued["output"]) == ("queued", True, [])
        ended = await api.ended(queued["id"])
        plain = await api.create(**fields)
        assert (ended["status"], ended["created_at"]) == ("incomplete", queued["created_at"])
        assert ended["output"][0]["content"] == plain["output"][0]["content"]
        assert ended["output"][0]["id"] == f"msg_{queued['id'][5:]}_0"
        again = await api.create(input="More", previous_response_id=queued["id"])
        assert again["usage"]["input_tokens"] > ended["usage"]["input_tokens"]
        status, content = await api.get(f"{queued['id']}/cancel", method="POST")
        assert (status, content["status"]) == (200, "incomplete")
        status, content = await api.get(f"{plain['id']}/cancel", method="POST")
        assert status == 400 and "background" in content["error"]["message"]

    run(default_model_path, tmp_path, work)


def test_a_background_response_is_checked_before_it_is_queued(
    default_model_path: Path, tmp_path: Path
) -> None:
    async def work(api: Api) -> None:
        for fields in ({"temperature": -1}, {"model": "no"}, {"previous_response_id": "no"}, {"tools": [3]}):
            assert (await api.post(input="x", background=True, **fields)).status in (400, 404)

    run(default_model_path, tmp_path, work)


def test_a_request_and_the_background_response_that_it_began_end_apart(
    default_model_path: Path, tmp_path: Path
) -> None:
    async def work(api: Api) -> None:
        server = api.app.server
        requests, choices = server.active_requests, Choices(server.engine, server.text.tokenizer)
        first, second = (requests.begin(None, choices, RequestId("id")) for _ in range(2))
        requests.end(first, [])
        assert [one["id"] for one in requests.described()] == ["id"]
        assert not await server.wait_until_idle(0)
        for _ in range(2):
            requests.end(second, [])
        assert await server.wait_until_idle(10) and not requests.described()

    run(default_model_path, tmp_path, work)


def test_a_background_response_is_cancelled_and_frees_the_engine(
    default_model_path: Path, tmp_path: Path
) -> None:
    async def work(api: Api) -> None:
        queued = await api.create(input="Hello", background=True, **LONG)
        while (await api.get(queued["id"]))[1]["status"] == "queued":
            await asyncio.sleep(0.01)
        status, cancelled = await api.get(f"{queued['id']}/cancel", method="POST")
        assert (status, cancelled["status"]) == (200, "cancelled")
        assert await api.app.server.wait_until_idle(10)
        assert (await api.ended(queued["id"]))["status"] == "cancelled"
        assert (await api.error(input="x", previous_response_id=queued["id"]))[0] == 400
        deleted = await api.create(input="Hello", background=True, **LONG)
        assert (await api.get(deleted["id"], method="DELETE"))[0] == 200
        assert await api.app.server.wait_until_idle(10)
        assert (await api.get(deleted["id"]))[0] == 404

    run(default_model_path, tmp_path, work, max_context=1 << 17)


def test_a_background_response_waits_while_the_server_has_no_room(
    default_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(api: Api) -> None:
        active = api.app.server.active_requests
        check, refusals = active.check_capacity, [True, True]

        def full(key: Any) -> None:
            if refusals and api.app.server.tasks._tasks:
                refusals.pop()
                raise ApiError(429, "full", code="queue_full", retry_after=0)
            check(key)

        monkeypatch.setattr(active, "check_capacity", full)
        queued = await api.create(input="Hello", background=True)
        assert (await api.ended(queued["id"]))["status"] == "incomplete"
        assert not refusals

    run(default_model_path, tmp_path, work)


def test_a_background_response_that_fails_says_why(
    default_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(api: Api) -> None:
        queued = await api.create(input="Hello", background=True, deadline=0.05, **LONG)
        ended = await api.ended(queued["id"])
        assert ended["status"] == "failed" and "deadline" in ended["error"]["message"]
        assert (ended["error"]["code"], ended["output"]) == ("server_error", [])

    run(default_model_path, tmp_path, work, max_context=1 << 17)


def test_a_server_that_stops_says_so_in_its_background_responses(
    default_model_path: Path, tmp_path: Path
) -> None:
    ids: list[str] = []

    async def begin(api: Api) -> None:
        ids.append((await api.create(input="Hello", background=True, **LONG))["id"])

    async def look(api: Api) -> None:
        [response_id] = ids
        _, content = await api.get(response_id)
        assert content["status"] == "failed" and "stopped" in content["error"]["message"]

    run(default_model_path, tmp_path, begin, max_context=1 << 17)
    run(default_model_path, tmp_path, look)


def test_background_responses_of_one_key_leave_places_for_the_others(
    default_model_path: Path, tmp_path: Path
) -> None:
    async def work(api: Api) -> None:
        one, two = Api(api.app, "one"), Api(api.app, "two")
        ids = [(await one.create(input="x", background=True, **LONG))["id"] for _ in range(8)]
        status, _, code, message = await one.error(input="x", background=True)
        assert (status, code) == (429, "queue_full") and "8 requests run in the background, 8 of" in message
        other = await two.create(input="x", background=True, **LONG)
        for client, response_id in [*((one, each) for each in ids), (two, other["id"])]:
            assert (await client.get(f"{response_id}/cancel", method="POST"))[0] == 200
        assert (await one.ended((await one.create(input="x", background=True))["id"]))["output"]

    keys = plain_keys(["one", "two"])
    run(default_model_path, tmp_path, work, api_keys=keys, max_requests=10, max_context=1 << 17)


def test_a_background_response_whose_end_could_not_be_stored_has_failed(
    default_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would be in progress for as long as the server runs."""

    async def work(api: Api) -> None:
        async def full(work: Any) -> Any:
            raise StoreFullError("the disk is full")

        queued = await api.create(input="Hello", background=True, max_output_tokens=500)
        with monkeypatch.context() as patch:
            patch.setattr(api.app.server.store, "run", full)
            while queued["id"] in api.app.server.tasks:
                await asyncio.sleep(0.01)
        ended = await api.ended(queued["id"])
        assert ended["status"] == "failed" and ended["error"]["code"] == "server_error"

    run(default_model_path, tmp_path, work)
