"""Batches in the application without sockets: every status, every wrong line, limits of keys, cancel and expiry."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from batch_client import COMPLETIONS, download, get, line, lines, run, submit, upload, wait_for_status
from in_process import InProcess
from server_process import MESSAGES, api_key

from weft.server.admission.keys import ApiKey
from weft.server.api.batches import BatchList, BatchObject
from weft.server.batches import lines as lines_module
from weft.server.state import batches as rows


def keys(*names: str, **fields: Any) -> tuple[ApiKey, ...]:
    return tuple(msgspec.convert(api_key(name, **fields), ApiKey) for name in names)


def test_every_line_is_answered_once_in_the_order_of_the_file(default_model_path: Path) -> None:
    async def work(server: InProcess) -> None:
        batch = await submit(server, lines(map(line, range(700))), metadata={"name": "nightly"})
        ended = await wait_for_status(server, batch, "completed")
        msgspec.convert(ended, BatchObject)
        assert ended["request_counts"] == {"total": 700, "completed": 700, "failed": 0}
        assert ended["metadata"] == {"name": "nightly"} and ended["errors"] is None
        assert ended["error_file_id"] is None and ended["completed_at"] >= ended["in_progress_at"]
        found = await download(server, ended["output_file_id"])
        assert [one["custom_id"] for one in found] == [f"id-{index}" for index in range(700)]
        assert len({one["id"] for one in found}) == 700
        for index, one in enumerate(found):
            response = one["response"]
            assert one["error"] is None and response["status_code"] == 200 and response["request_id"]
            assert response["body"]["usage"]["completion_tokens"] == index % 7 + 1
        file = await get(server, f"/v1/files/{ended['output_file_id']}")
        assert file["purpose"] == "batch_output" and file["filename"] == f"{batch['id']}_output.jsonl"
        listed = await get(server, "/v1/batches?limit=1")
        msgspec.convert(listed, BatchList)
        assert [one["id"] for one in listed["data"]] == [batch["id"]] and listed["has_more"] is False

        def num_rows(connection: Any) -> int:
            return int(connection.execute("SELECT COUNT(*) FROM batch_lines").fetchone()[0])

        while await server.server.store.run(num_rows):
            await asyncio.sleep(0.01)

    run(default_model_path, work)


WRONG: dict[str, tuple[Any, str]] = {
    "broken JSON": (b'{"custom_id": "a", ', "invalid_json_line"),
    "not UTF-8": (b'{"custom_id": "\xff"}', "invalid_json_line"),
    "binary": (bytes(range(11, 256)), "invalid_json_line"),
    "an open list": (b'{"custom_id": "b", "body": ' + b"[" * 30_000, "invalid_json_line"),
    "no object": (["custom_id"], "invalid_line"),
    "no custom_id": ({"url": COMPLETIONS, "body": {}}, "invalid_line"),
    "custom_id is null": (line(1, custom_id=None), "invalid_line"),
    "custom_id is empty": (line(1, custom_id=""), "invalid_custom_id"),
    "custom_id is too long": (line(1, custom_id="x" * 513), "invalid_custom_id"),
    "a custom_id again": (line(0), "duplicate_custom_id"),
    "another url": (line(1, url="/v1/chat/completions"), "mismatched_url"),
    "another method": (line(1, method="GET"), "invalid_method"),
    "no body": ({"custom_id": "b", "method": "POST", "url": COMPLETIONS}, "invalid_line"),
    "body is a list": (line(1, body=[]), "invalid_line"),
    "stream": (line(1, body={"prompt": "a", "stream": True}), "unsupported"),
    "background": (line(1, body={"prompt": "a", "background": True}), "unsupported"),
    "too long": (line(1, body={"prompt": "a" * 100_000}), "line_too_long"),
}


def test_wrong_lines_are_reported_and_the_others_run(default_model_path: Path) -> None:
    async def work(server: InProcess) -> None:
        batch = await submit(
            server, lines([line(0), b"  ", *(wrong for wrong, _ in WRONG.values()), line(2)])
        )
        ended = await wait_for_status(server, batch, "completed")
        assert ended["request_counts"] == {"total": len(WRONG) + 2, "completed": 2, "failed": len(WRONG)}
        errors, failed = ended["errors"]["data"], await download(server, ended["error_file_id"])
        for index, (case, (_, code)) in enumerate(WRONG.items()):
            error = errors[index]
            assert (error["line"], error["code"]) == (index + 3, code) and error["message"], case
            assert failed[index]["response"] is None and failed[index]["error"]["code"] == code, case
        found = await download(server, ended["output_file_id"])
        assert [one["custom_id"] for one in found] == ["id-0", "id-2"]

    run(default_model_path, work, max_body_bytes=65536)


def test_every_route_that_generates_can_be_an_endpoint(default_model_path: Path) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": MESSAGES},
        "/v1/completions": {"prompt": "a"},
        "/v1/messages": {"model": "test-model", "messages": MESSAGES, "max_tokens": 3},
        "/v1/responses": {"input": "a"},
    }

    async def work(server: InProcess) -> None:
        assert bodies.keys() == {path for path in server.server.formats if path.startswith("/v1/")}
        for endpoint, body in bodies.items():
            content = lines([line(0, url=endpoint, body=body)])
            ended = await wait_for_status(
                server, await submit(server, content, endpoint=endpoint), "completed"
            )
            [found] = await download(server, ended["output_file_id"])
            assert found["response"]["status_code"] == 200 and found["response"]["body"]["id"], endpoint
        reply = await upload(server, b"")
        body = {"input_file_id": json.loads(reply.body)["id"], "endpoint": "/api/chat"}
        assert (await server.send("/v1/batches", json.dumps(body).encode())).status == 400

    run(default_model_path, work, max_context=256)


def test_a_line_stores_its_response_only_if_it_asks_for_that(default_model_path: Path) -> None:
    """Otherwise a batch would evict the stored conversations of its key."""

    async def work(server: InProcess) -> None:
        url, stores = "/v1/responses", (None, False, True)
        fields = [{} if store is None else {"store": store} for store in stores]
        content = lines(line(index, url=url, body={"input": "a", **one}) for index, one in enumerate(fields))
        ended = await wait_for_status(server, await submit(server, content, endpoint=url), "completed")
        for store, one in zip(stores, await download(server, ended["output_file_id"]), strict=True):
            body = one["response"]["body"]
            reply = await server.send(f"{url}/{body['id']}", method="GET")
            assert (body["store"], reply.status) == ((True, 200) if store else (False, 404))

    run(default_model_path, work, max_context=256)


def test_an_error_of_a_request_goes_to_the_error_file_with_its_status(default_model_path: Path) -> None:
    async def work(server: InProcess) -> None:
        wrong = line(1, body={"prompt": "a", "temperature": -1})
        batch = await submit(server, lines([line(0), wrong]))
        ended = await wait_for_status(server, batch, "completed")
        assert ended["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
        [failed] = await download(server, ended["error_file_id"])
        assert failed["custom_id"] == "id-1" and failed["error"] is None
        assert failed["response"]["status_code"] == 400
        assert failed["response"]["body"]["error"]["param"] == "temperature"

    run(default_model_path, work)


def test_a_batch_fails_if_no_line_can_run(default_model_path: Path) -> None:
    async def work(server: InProcess) -> None:
        for content, num_wrong in ((b"", 0), (b"\n \n", 0), (b"\x89PNG\r\n\x1a\n\x00\x00", 3)):
            ended = await wait_for_status(server, await submit(server, content), "failed")
            codes = [one["code"] for one in ended["errors"]["data"]]
            assert codes == ["no_valid_line", *["invalid_json_line"] * num_wrong]
            assert ended["failed_at"] and ended["output_file_id"] is None

    run(default_model_path, work)


def test_a_batch_with_too_many_lines_fails(default_model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.server.batches.run.MAX_LINES", 5)

    async def work(server: InProcess) -> None:
        ended = await wait_for_status(server, await submit(server, lines(map(line, range(6)))), "failed")
        assert [one["code"] for one in ended["errors"]["data"]] == ["too_many_lines"]
        await wait_for_status(server, await submit(server, lines(map(line, range(5)))), "completed")

    run(default_model_path, work)


REFUSED: tuple[tuple[dict[str, Any], int, str | None], ...] = (
    ({"input_file_id": "file-none"}, 404, "input_file_id"),
    ({"endpoint": "/v1/models"}, 400, "endpoint"),
    ({"endpoint": "/v1/batches"}, 400, "endpoint"),
    ({"endpoint": None}, 400, "endpoint"),
    ({"completion_window": "soon"}, 400, "completion_window"),
    ({"completion_window": "31d"}, 400, "completion_window"),
    ({"metadata": {str(index): "" for index in range(17)}}, 400, "metadata"),
    ({"metadata": {"a": "b" * 513}}, 400, "metadata"),
    ({"metadata": {"a": 1}}, 400, None),
    ({"output_expires_after": {"seconds": 1}}, 400, "output_expires_after.seconds"),
)


def test_an_invalid_batch_is_refused(default_model_path: Path) -> None:
    async def work(server: InProcess) -> None:
        uploaded = json.loads((await upload(server, lines([line(0)]))).body)
        for fields, status, param in REFUSED:
            body = {"input_file_id": uploaded["id"], "endpoint": COMPLETIONS, **fields}
            reply = await server.send("/v1/batches", json.dumps(body).encode())
            error = json.loads(reply.body)["error"]
            assert reply.status == status and (param is None or error["param"] == param), error
        assert (await server.send("/v1/batches", b"x" * 70_000)).status == 413
        assert (await get(server, "/v1/batches"))["data"] == []

    run(default_model_path, work)


def test_the_input_of_a_batch_must_have_its_purpose_and_stays_until_it_ends(default_model_path: Path) -> None:
    async def work(server: InProcess) -> None:
        other = json.loads((await upload(server, lines([line(0)]), purpose="user_data")).body)
        body = {"input_file_id": other["id"], "endpoint": COMPLETIONS}
        assert (await server.send("/v1/batches", json.dumps(body).encode())).status == 400
        batch = await submit(server, lines([line(0, body=LONG)]))
        path = f"/v1/files/{batch['input_file_id']}"
        assert (await server.send(path, method="DELETE")).status == 409
        await server.send(f"/v1/batches/{batch['id']}/cancel")
        await wait_for_status(server, batch, "cancelled")
        assert (await server.send(path, method="DELETE")).status == 200

    run(default_model_path, work, **SLOW_ENGINE)


LONG = {"prompt": "a", "max_tokens": 60, "ignore_eos": True}
SLOW_ENGINE: dict[str, Any] = {"seconds_per_step": 0.5}


def test_cancel_stops_running_lines_and_keeps_finished_ones(default_model_path: Path) -> None:
    async def work(server: InProcess) -> None:
        short = {"prompt": "a", "max_tokens": 1}
        batch = await submit(server, lines([line(0, body=short), line(1, body=LONG), b"wrong"]))
        while (await get(server, f"/v1/batches/{batch['id']}"))["request_counts"]["completed"] == 0:
            await asyncio.sleep(0.01)
        reply = await server.send(f"/v1/batches/{batch['id']}/cancel")
        assert reply.status == 200 and json.loads(reply.body)["status"] == "cancelling"
        ended = await wait_for_status(server, batch, "cancelled")
        assert ended["request_counts"] == {"total": 3, "completed": 1, "failed": 1}
        assert ended["cancelled_at"] >= ended["cancelling_at"]
        [found] = await download(server, ended["output_file_id"])
        assert found["custom_id"] == "id-0"
        while server.server.engine.num_unfinished:
            await asyncio.sleep(0.01)
        again = await server.send(f"/v1/batches/{batch['id']}/cancel")
        assert again.status == 409 and b"cancelled" in again.body

    run(default_model_path, work, **SLOW_ENGINE)


def test_lines_that_did_not_run_in_the_completion_window_get_an_error(default_model_path: Path) -> None:
    async def work(server: InProcess) -> None:
        now = time.time()
        server.server.store.wall_clock = lambda: now
        short = {"prompt": "a", "max_tokens": 1}
        batch = await submit(
            server,
            lines([line(0, body=short), *(line(index, body=LONG) for index in range(1, 5))]),
            completion_window="1h",
        )
        assert batch["expires_at"] == int(now + 3600)
        while (await get(server, f"/v1/batches/{batch['id']}"))["request_counts"]["completed"] == 0:
            await asyncio.sleep(0.01)
        now += 3600
        server.server.wake_batches()
        ended = await wait_for_status(server, batch, "expired")
        assert ended["request_counts"] == {"total": 5, "completed": 1, "failed": 4} and ended["expired_at"]
        [found] = await download(server, ended["output_file_id"])
        assert found["custom_id"] == "id-0"
        failed = await download(server, ended["error_file_id"])
        assert [one["custom_id"] for one in failed] == ["id-1", "id-2", "id-3", "id-4"]
        assert {one["error"]["code"] for one in failed} == {"batch_expired"}

    run(default_model_path, work, **SLOW_ENGINE)


def test_ids_of_another_key_do_not_exist(default_model_path: Path) -> None:
    async def work(server: InProcess) -> None:
        batch = await submit(server, lines([line(0)]), key="one")
        ended = await wait_for_status(server, batch, "completed", key="one")
        assert (await get(server, "/v1/batches", "two"))["data"] == []
        for method, path in (
            ("GET", f"/v1/batches/{batch['id']}"),
            ("POST", f"/v1/batches/{batch['id']}/cancel"),
            ("GET", f"/v1/batches?after={batch['id']}"),
            ("GET", f"/v1/files/{ended['output_file_id']}"),
            ("GET", f"/v1/files/{ended['output_file_id']}/content"),
            ("DELETE", f"/v1/files/{batch['input_file_id']}"),
        ):
            found = await server.send(path, method=method, key="two")
            missing = await server.send(path.replace(batch["id"], "batch_0"), method=method, key="two")
            assert found.status == missing.status == 404, path
        body = {"input_file_id": batch["input_file_id"], "endpoint": COMPLETIONS}
        assert (await server.send("/v1/batches", json.dumps(body).encode(), key="two")).status == 404

    run(default_model_path, work, api_keys=keys("one", "two"))


def test_limits_of_a_key_do_not_make_its_batch_fail_and_its_batch_does_not_use_them(
    default_model_path: Path,
) -> None:
    async def work(server: InProcess) -> None:
        batch = await submit(server, lines(map(line, range(50))), key="one")
        ended = await wait_for_status(server, batch, "completed", key="one")
        assert ended["request_counts"] == {"total": 50, "completed": 50, "failed": 0}
        body = json.dumps({"messages": MESSAGES, "max_tokens": 1}).encode()
        assert (await server.send("/v1/chat/completions", body, key="one")).status == 200
        assert (await server.send("/v1/chat/completions", body, key="one")).status == 429

    limited = keys("one", requests_per_minute=1, tokens_per_minute=60, concurrent=1)
    run(default_model_path, work, api_keys=(*limited, *keys("two")))


def test_lines_take_no_places_of_clients(default_model_path: Path) -> None:
    """The server allows one active request, and the gate two running answers: all are left to clients."""

    async def work(server: InProcess) -> None:
        batch = await submit(server, lines(line(index, body=LONG) for index in range(8)), key="one")
        while server.server.engine.num_unfinished < 2:
            await asyncio.sleep(0.01)
        for key in ("one", "two"):
            assert (await server.send("/ready", method="GET", key=key)).status == 200
            body = json.dumps({"messages": MESSAGES, "max_tokens": 1}).encode()
            assert (await server.send("/v1/chat/completions", body, key=key)).status == 200
        assert (await get(server, f"/v1/batches/{batch['id']}", "one"))["status"] == "in_progress"

    scheduler = {"max_running": 4, "max_tokens_per_step": 64, "max_prefill_tokens": 32}
    run(
        default_model_path,
        work,
        api_keys=keys("one", "two"),
        max_requests=1,
        scheduler=scheduler,
        seconds_per_step=0.05,
    )


def test_a_line_that_finds_no_place_is_tried_again(default_model_path: Path) -> None:
    """Each line has three answers, and the engine runs four."""

    async def work(server: InProcess) -> None:
        content = lines(line(index, body={"prompt": "a", "max_tokens": 2, "n": 3}) for index in range(6))
        ended = await wait_for_status(server, await submit(server, content), "completed")
        assert ended["request_counts"] == {"total": 6, "completed": 6, "failed": 0}

    scheduler = {"max_running": 4, "max_tokens_per_step": 64, "max_prefill_tokens": 32}
    run(default_model_path, work, scheduler=scheduler)


def test_batches_of_several_keys_run_at_the_same_time(default_model_path: Path) -> None:
    async def work(server: InProcess) -> None:
        many = await submit(server, lines(line(index, body=LONG) for index in range(300)), key="one")
        few = await submit(server, lines(map(line, range(3))), key="two")
        await wait_for_status(server, few, "completed", key="two")
        assert (await get(server, f"/v1/batches/{many['id']}", "one"))["status"] == "in_progress"

    run(default_model_path, work, api_keys=keys("one", "two"), seconds_per_step=0.05)


def test_a_draining_server_begins_no_lines(default_model_path: Path) -> None:
    async def work(server: InProcess) -> None:
        server.server.is_draining = True
        batch = await submit(server, lines([line(0)]))
        await asyncio.sleep(0.3)
        assert (await get(server, f"/v1/batches/{batch['id']}"))["request_counts"]["completed"] == 0
        server.server.is_draining = False
        server.server.wake_batches()
        await wait_for_status(server, batch, "completed")

    run(default_model_path, work)


def test_ids_of_a_large_file_are_compared_in_bounded_memory() -> None:
    ids = lines_module.CustomIds(10_000)
    found = [ids.checked(lines_module.Line(index, f"id-{index % 9000}", b"")) for index in range(10_000)]
    wrong = [one for one in found if isinstance(one, lines_module.WrongLine)]
    assert [one.index for one in wrong] == list(range(9000, 10_000))


def test_a_batch_whose_input_was_removed_by_hand_ends_with_the_results_it_has(
    default_model_path: Path,
) -> None:
    async def work(server: InProcess) -> None:
        batch = await submit(server, lines([line(0, body=LONG), *map(line, range(1, 20_000))]))
        await wait_for_status(server, batch, "in_progress")
        path = server.server.files.path(batch["input_file_id"])
        path.unlink()
        running = server.server._batches._running[""]
        running.task.cancel()  # as a restart does: the file is opened again
        ended = await wait_for_status(server, batch, "completed")
        assert ended["errors"]["data"][-1]["code"] == "unreadable_file"
        assert ended["request_counts"]["completed"] < 20_000

    run(default_model_path, work, **SLOW_ENGINE)


def test_batches_run_again_after_an_unexpected_error(
    default_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unfinished, raised = rows.unfinished, 0

    def fails_once(connection: Any) -> Any:
        nonlocal raised
        raised += 1
        if raised == 1:
            raise ValueError
        return unfinished(connection)

    monkeypatch.setattr(rows, "unfinished", fails_once)

    async def work(server: InProcess) -> None:
        batch = await submit(server, lines([line(0)]))
        while not raised:
            await asyncio.sleep(0.01)
        server.server.wake_batches()
        await wait_for_status(server, batch, "completed")

    run(default_model_path, work)
