"""Stored responses: chains, keys, expiry, limits, disconnects."""

from __future__ import annotations

import asyncio
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from responses_checks import checked_events
from test_responses import CALL, RESULT, TOOL, URL, Api, run

from weft.server.admission.keys import plain_keys
from weft.server.state.batches import Batch, BatchDetails
from weft.server.state.batches import add as add_batch
from weft.server.state.responses import Keeping, StoredResponse, insert

LONG = {"max_output_tokens": 100_000}
"""An answer that is not complete before a test has cancelled it: the context of these tests is as long."""


def test_a_conversation_continues_by_id_with_the_same_prompt_as_with_all_items(
    default_model_path: Path, tmp_path: Path
) -> None:
    async def work(api: Api) -> None:
        first = await api.create(input="My name is Ada.", instructions="Be brief.")
        events = await api.stream(input="And yours?", previous_response_id=first["id"])
        second = events[-1]["response"]
        third = await api.create(input="Thanks.", previous_response_id=second["id"], store=False)
        talk = [
            {"role": "user", "content": "My name is Ada."},
            *first["output"],
            {"role": "user", "content": "And yours?"},
            *second["output"],
            {"role": "user", "content": "Thanks."},
        ]
        assert third["usage"]["input_tokens"] == await api.count(input=talk)
        assert await api.count(input="Thanks.", previous_response_id=second["id"]) == await api.count(
            input=talk
        )
        status, param, code, _ = await api.error(input="?", previous_response_id=third["id"])
        assert (status, param, code) == (404, "previous_response_id", "previous_response_not_found")
        assert third["store"] is False and first["store"] is True

    run(default_model_path, tmp_path, work)


def test_what_was_returned_is_what_is_stored(default_model_path: Path, tmp_path: Path) -> None:
    async def work(api: Api) -> None:
        body = await api.create(input="One", include=["message.output_text.logprobs"])
        streamed = (await api.stream(input="Two"))[-1]["response"]
        for response in (body, streamed):
            assert await api.get(response["id"]) == (200, response)
        status, error = await api.get(body["id"], "stream=true")
        assert status == 400 and error["error"]["param"] == "stream"

    run(default_model_path, tmp_path, work)


def test_input_items_are_listed_in_pages_in_both_orders(default_model_path: Path, tmp_path: Path) -> None:
    async def work(api: Api) -> None:
        texts = [str(number) for number in range(25)]
        response = await api.create(input=[{"role": "user", "content": text} for text in texts])
        path = f"{response['id']}/input_items"
        for order, expected in (("asc", texts), ("desc", texts[::-1])):
            found: list[str] = []
            query = f"limit=10&order={order}"
            while True:
                _, page = await api.get(path, query)
                found += [item["content"][0]["text"] for item in page["data"]]
                assert page["first_id"] == page["data"][0]["id"]
                if not page["has_more"]:
                    break
                query = f"limit=10&order={order}&after={page['last_id']}"
            assert found == expected
        assert len((await api.get(path))[1]["data"]) == 20
        for query in ("limit=0", "limit=101", "limit=x", "order=up", "after=no"):
            assert (await api.get(path, query))[0] == 400

    run(default_model_path, tmp_path, work)


def test_references_to_stored_items_and_to_items_of_the_request_are_resolved(
    default_model_path: Path, tmp_path: Path
) -> None:
    async def work(api: Api) -> None:
        first = await api.create(input="Hello")
        [given] = (await api.get(f"{first['id']}/input_items"))[1]["data"]
        [answer] = first["output"]
        references = [{"type": "item_reference", "id": one["id"]} for one in (given, answer)]
        more = {"role": "user", "content": "More", "id": "mine"}
        talk = [*references, more, {"id": "mine"}]
        assert await api.count(input=talk) == await api.count(input=[given, answer, more, more])
        second = await api.create(input=talk)
        listed = (await api.get(f"{second['id']}/input_items", "order=asc"))[1]["data"]
        assert [item["id"] for item in listed] == [given["id"], answer["id"], "mine", "mine"]
        for unknown in ("msg_nothing_0", "mine", "", "_", f"msg_{first['id'][5:]}_7"):
            status, param, code, _ = await api.error(input=[{"type": "item_reference", "id": unknown}])
            assert (status, param, code) == (404, "input", "item_not_found")

    run(default_model_path, tmp_path, work)


def test_a_response_of_another_key_is_not_there(default_model_path: Path, tmp_path: Path) -> None:
    async def work(api: Api) -> None:
        mine, other = Api(api.app, "one"), Api(api.app, "two")
        response = await mine.create(input="Secret")
        response_id = response["id"]
        unknown = await other.get("resp_unknown")
        foreign = await other.get(response_id)
        assert (foreign[0], str(foreign[1]).replace(response_id, "resp_unknown")) == (
            unknown[0],
            str(unknown[1]),
        )
        assert foreign[0] == 404
        for path, method in (("", "DELETE"), ("/cancel", "POST"), ("/input_items", "GET")):
            assert (await other.get(response_id + path, method=method))[0] == 404
        assert (await other.error(input="?", previous_response_id=response_id))[0] == 404
        reference = [{"type": "item_reference", "id": response["output"][0]["id"]}]
        assert (await other.error(input=reference))[0] == 404
        assert (await mine.get(response_id))[0] == 200

    run(default_model_path, tmp_path, work, api_keys=plain_keys(["one", "two"]))


def test_a_deleted_response_is_gone_and_its_conversation_is_no_longer_whole(
    default_model_path: Path, tmp_path: Path
) -> None:
    async def work(api: Api) -> None:
        first = await api.create(input="One")
        second = await api.create(input="Two", previous_response_id=first["id"])
        status, content = await api.get(first["id"], method="DELETE")
        assert (status, content) == (200, {"id": first["id"], "object": "response", "deleted": True})
        assert (await api.get(first["id"]))[0] == (await api.get(first["id"], method="DELETE"))[0] == 404
        status, _, code, message = await api.error(input="Three", previous_response_id=second["id"])
        assert (status, code) == (404, "previous_response_not_found") and first["id"] in message
        await api.create(input="Three", previous_response_id=second["id"], truncation="auto")

    run(default_model_path, tmp_path, work)


def test_a_response_expires(default_model_path: Path, tmp_path: Path) -> None:
    async def work(api: Api) -> None:
        response = await api.create(input="One")
        store = api.app.server.store
        store.wall_clock = lambda: time.time() + 1.5 * 86400
        assert (await api.get(response["id"]))[0] == 200
        store.wall_clock = lambda: time.time() + 2.5 * 86400
        assert (await api.get(response["id"]))[0] == 404
        assert (await api.error(input="?", previous_response_id=response["id"]))[0] == 404

    run(default_model_path, tmp_path, work, response_days=2)


def test_a_server_that_keeps_nothing_says_so(default_model_path: Path, tmp_path: Path) -> None:
    async def work(api: Api) -> None:
        response = await api.create(input="One")
        assert response["store"] is False and (await api.get(response["id"]))[0] == 404
        status, param, _, message = await api.error(input="One", background=True)
        assert (status, param) == (400, "background") and "response_days" in message

    run(default_model_path, tmp_path, work, response_days=0)


def test_when_the_store_is_full_the_oldest_responses_of_the_key_that_stores_most_go(
    default_model_path: Path, tmp_path: Path
) -> None:
    async def work(api: Api) -> None:
        one, two = Api(api.app, "one"), Api(api.app, "two")
        kept = await two.create(input="Keep this")
        ids = [(await one.create(input="word " * 1000))["id"] for _ in range(40)]
        found = [(await one.get(response_id))[0] for response_id in ids]
        num_lost = found.count(404)
        assert 0 < num_lost < 40 and found == [404] * num_lost + [200] * (40 - num_lost)
        assert (await two.get(kept["id"]))[0] == 200
        # A key that stores little can continue its conversation, although another one fills the store.
        next_id = kept["id"]
        for _ in range(10):
            next_id = (await two.create(input="More", previous_response_id=next_id))["id"]
        assert (await two.get(kept["id"]))[0] == 200
        status, _, _, message = await two.error(input="x" * 600_000, truncation="auto")
        assert status in (400, 507), message

    run(
        default_model_path,
        tmp_path,
        work,
        api_keys=plain_keys(["one", "two"]),
        max_stored_bytes=250_000,
        max_context=8192,
    )


@pytest.mark.parametrize("path", ["/v1/responses/resp_x", "/v1/responses/resp_x/input_items", "/v1/batches"])
def test_what_is_read_from_the_store_counts_as_answers_until_the_client_has_read_it(
    default_model_path: Path, tmp_path: Path, path: str
) -> None:
    """Clients that read nothing must not fill the memory with copies of a stored object."""

    def add(connection: Any, now: float) -> None:
        content, long = b'[{"id":"a","text":"%b"}]' % (b"x" * 400_000), {"a": "x" * 400_000}
        row = StoredResponse("resp_x", now, None, content, content, "completed", 2)
        insert(connection, row, "", now, Keeping(1, 1 << 30))
        details = BatchDetails("/v1/completions", "24h", long)
        add_batch(connection, Batch("batch_x", "", now, now + 1000, "completed", "file-x", details))

    async def work(api: Api) -> None:
        store, reads = api.app.server.store, asyncio.Event()
        await store.run(lambda connection: add(connection, store.wall_clock()))

        async def read_slowly() -> tuple[int, bytes]:
            sent: list[Any] = []

            async def receive() -> Any:
                return await asyncio.Future()

            async def send(message: Any) -> None:
                sent.append(message)
                if message["type"] == "http.response.body" and sent[0]["status"] == 200:
                    begun.set()
                    await reads.wait()

            scope = {"type": "http", "method": "GET", "path": path, "raw_path": path.encode()}
            headers = {"query_string": b"", "root_path": "", "headers": [(b"host", b"localhost")]}
            await api.app._asgi({**scope, **headers}, receive, send)
            begun.set()
            retry = dict(sent[0]["headers"]).get(b"retry-after", b"none")
            return sent[0]["status"], retry if sent[0]["status"] == 429 else sent[-1]["body"]

        readers = []
        for _ in range(4):
            begun = asyncio.Event()
            readers.append(asyncio.create_task(read_slowly()))
            await begun.wait()
        reads.set()
        replies = [await one for one in readers]
        statuses = [status for status, _ in replies]
        assert statuses[0] == 200 and set(statuses) == {200, 429} and statuses == sorted(statuses)
        assert all(int(retry) >= 1 for status, retry in replies if status == 429)
        assert (await read_slowly())[0] == 200, "the bytes are released at the end of each request"

    run(default_model_path, tmp_path, work, max_buffered_answer_bytes=1_000_000)


def test_calls_of_the_stored_answer_need_their_results(default_model_path: Path, tmp_path: Path) -> None:
    async def work(api: Api) -> None:
        first = await api.create(input=[{"role": "user", "content": "Add."}, CALL, RESULT], tools=[TOOL])
        status, param, _, message = await api.error(input=[RESULT], previous_response_id=first["id"])
        assert (status, param) == (400, "input") and "'c1'" in message

    run(default_model_path, tmp_path, work)


def test_a_stored_conversation_may_not_have_more_items_than_a_request(
    default_model_path: Path, tmp_path: Path
) -> None:
    async def work(api: Api) -> None:
        items = [{"role": "user", "content": ""}] * 8000
        first = await api.create(input=items)
        second = await api.create(input="x", previous_response_id=first["id"])
        last = await api.create(
            input=[{"role": "user", "content": ""}] * 500,
            previous_response_id=second["id"],
            truncation="auto",
        )
        status, _, code, message = await api.error(input="x", previous_response_id=last["id"])
        assert (status, code) == (400, "context_length_exceeded") and "8192" in message

    run(default_model_path, tmp_path, work, max_context=1 << 17)


def test_a_stored_conversation_longer_than_the_context_is_an_error_or_is_shortened(
    default_model_path: Path, tmp_path: Path
) -> None:
    async def work(api: Api) -> None:
        first = await api.create(input="word " * 300)
        fields: dict[str, Any] = {"input": "word " * 300, "previous_response_id": first["id"]}
        status, _, code, message = await api.error(**fields)
        assert (status, code) == (400, "context_length_exceeded") and "512" in message
        second = await api.create(**fields, truncation="auto")
        assert 300 < second["usage"]["input_tokens"] < 400

    run(default_model_path, tmp_path, work, max_context=512)


# ---------------------------------------------------------------------- clients that leave, and a store that fails


def test_a_client_that_leaves_cancels_its_response_and_nothing_is_stored(
    default_model_path: Path, tmp_path: Path
) -> None:
    async def work(api: Api) -> None:
        for is_streamed in (False, True):
            await api.post(input="Hello", leaves_after=0.2, stream=is_streamed, **LONG)
            assert await api.app.server.wait_until_idle(10)
        rows = await api.app.server.store.run(
            lambda connection: connection.execute("SELECT count(*) FROM responses").fetchone()
        )
        assert rows == (0,)

    run(default_model_path, tmp_path, work, max_context=1 << 17)


def test_when_the_store_fails_a_response_that_is_stored_fails_and_others_go_on(
    default_model_path: Path, tmp_path: Path
) -> None:
    async def work(api: Api) -> None:
        await api.create(input="Hello", store=False)
        status, _, code, _ = await api.error(input="Hello")
        assert (status, code) == (507, "storage_full")
        events = checked_events((await api.post(input="Hello", stream=True)).body)
        assert events[-1]["type"] == "response.failed"
        assert events[-1]["response"]["error"]["code"] == "server_error"
        assert "store: false" in events[-1]["response"]["error"]["message"]
        assert (await api.stream(input="Hello", store=False))[-1]["type"] == "response.incomplete"

    run(default_model_path, tmp_path, work, max_stored_bytes=1)


def test_references_count_as_long_as_what_they_refer_to(default_model_path: Path, tmp_path: Path) -> None:
    """Otherwise a short body with thousands of references to one long item needs gigabytes."""
    sealed = {"type": "reasoning", "summary": [], "encrypted_content": "x" * 400_000}
    hello = {"role": "user", "content": "Hello"}

    async def work(api: Api) -> None:
        stored = await api.create(input=[sealed, hello])
        _, items = await api.get(f"{stored['id']}/input_items", "order=asc")
        reference = {"type": "item_reference", "id": items["data"][0]["id"]}
        own = {"type": "item_reference", "id": "rs_own"}
        await api.create(input=[reference, reference, hello], store=False)
        for references in ([reference] * 3, [{**sealed, "id": "rs_own"}, *[own] * 3]):
            for path in (URL, f"{URL}/input_tokens"):
                reply = await api.post(path, input=[*references, hello])
                assert reply.status == 400 and b"max_body_bytes" in reply.body, reply.body

    run(default_model_path, tmp_path, work, max_body_bytes=1_000_000)


def test_a_body_and_what_it_refers_to_have_one_limit_together(
    default_model_path: Path, tmp_path: Path
) -> None:
    """A later attempt would not help, so the error is not a 503."""
    hello = {"role": "user", "content": "Hello"}

    def sealed(size: int) -> dict[str, Any]:
        return {"type": "reasoning", "summary": [], "encrypted_content": "x" * size}

    async def work(api: Api) -> None:
        stored = await api.create(input=[sealed(700_000), hello])
        last = {"previous_response_id": stored["id"]}
        for path in (URL, f"{URL}/input_tokens"):
            reply = await api.post(path, input=[sealed(400_000), hello], **last)
            error = json.loads(reply.body)["error"]
            assert (reply.status, error["code"]) == (400, "context_length_exceeded"), error
            found, allowed = (int(one) for one in re.findall(r"(\d{6,}) bytes", error["message"]))
            assert 700_000 < found < 710_000 and 590_000 < allowed < 600_000
        cut = await api.create(input=[sealed(400_000), hello], **last, truncation="auto")
        assert cut["usage"]["input_tokens"] == await api.count(input=[hello])
        whole = await api.create(input=[sealed(200_000), hello], **last, store=False)
        assert whole["usage"]["input_tokens"] > cut["usage"]["input_tokens"]
        _, items = await api.get(f"{stored['id']}/input_items", "order=asc")
        reference = {"type": "item_reference", "id": items["data"][0]["id"]}
        for fields in ({}, {**last, "truncation": "auto"}):
            status, _, code, message = await api.error(input=[reference, sealed(400_000), hello], **fields)
            assert (status, code) == (413, "body_too_large"), message
            found, allowed = (int(one) for one in re.findall(r"\d{6,}", message))
            assert 1_100_000 < found < 1_110_000 and allowed == 1_000_000

    run(default_model_path, tmp_path, work, max_body_bytes=1_000_000)


def test_what_a_running_response_keeps_of_its_request_counts_as_its_body_did(
    default_model_path: Path, tmp_path: Path
) -> None:
    """The input that is stored at the end is in memory until then, and so are tools that are repeated."""
    sealed = {"type": "reasoning", "summary": [], "encrypted_content": "x" * 300_000}
    tool = {**TOOL, "unknown": "x" * 300_000}
    stored: dict[str, Any] = {"input": [sealed, {"role": "user", "content": "Hello"}]}
    repeated: dict[str, Any] = {"input": "Hello", "tools": [tool], "store": False}

    async def work(api: Api) -> None:
        for fields, expected in (({**stored, "store": False}, 200), (stored, 503), (repeated, 503)):
            running = asyncio.create_task(api.post(**fields, **LONG, leaves_after=60))
            # After some tokens, not the first: the handler of the request frees its body in a later turn of the loop.
            while not any(one.choices.num_tokens > 2 for one in api.app.server.active_requests._open):
                await asyncio.sleep(0.01)
            reply = await api.post(input=[sealed, {"role": "user", "content": "Hi"}], store=False)
            assert reply.status == expected, (list(fields), reply.body)
            running.cancel()
            await asyncio.wait([running])
            assert await api.app.server.wait_until_idle(10)
        assert (await api.post(**stored)).status == 200

    run(default_model_path, tmp_path, work, max_context=1 << 17, max_buffered_bytes=400_000)
