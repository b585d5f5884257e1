"""Uploaded files: forms, lists, downloads, lifetimes, limits, other keys, leftovers of a crash."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from batch_client import BOUNDARY, FORM_TYPE, form, get, run, upload
from in_process import InProcess
from server_process import api_key

from weft.server.admission.keys import ApiKey
from weft.server.api.files import PURPOSES, File, FileList
from weft.server.errors import ApiError
from weft.server.http.uploads import read_upload

KEYS = tuple(msgspec.convert(api_key(name), ApiKey) for name in ("one", "two"))


def stored_names(server: InProcess) -> list[str]:
    folder = server.server.files.folder
    return sorted(os.listdir(folder)) if folder.exists() else []


def test_a_file_comes_back_as_it_was_and_can_be_deleted(default_model_path: Path) -> None:
    content = bytes(range(256)) * 20_000

    async def work(server: InProcess) -> None:
        reply = await upload(server, content, purpose="user_data")
        file = json.loads(reply.body)
        msgspec.convert(file, File)
        assert file["bytes"] == len(content) and file["filename"] == "lines.jsonl"
        assert file["purpose"] == "user_data" and file["expires_at"] is None
        path = f"/v1/files/{file['id']}"
        assert await get(server, path) == file
        downloaded = await server.send(f"{path}/content", method="GET")
        assert downloaded.body == content
        mode = stat.S_IMODE(server.server.files.path(file["id"]).stat().st_mode)
        assert mode == 0o600
        deleted = await server.send(path, method="DELETE")
        assert json.loads(deleted.body) == {"id": file["id"], "object": "file", "deleted": True}
        for method, gone in (("GET", path), ("GET", f"{path}/content"), ("DELETE", path)):
            assert (await server.send(gone, method=method)).status == 404
        assert stored_names(server) == []

    run(default_model_path, work)


def test_a_form_may_be_split_anywhere() -> None:
    content = b"\r\n--boundary-of-a-tes\r\n--" + BOUNDARY[:5] + b"\r\n" * 5
    body = form(content, 'a"b/c\\.jsonl', purpose="batch")

    async def read(size: int) -> bytes:
        async def parts() -> AsyncIterator[bytes]:
            for start in range(0, len(body), size):
                yield body[start : start + size]

        found = bytearray()

        async def write(piece: bytearray) -> None:
            found.extend(piece)

        read = await read_upload(FORM_TYPE[b"content-type"].decode(), parts(), write)
        assert read.fields == {"purpose": "batch"} and read.file_name is not None
        return bytes(found)

    for size in range(1, len(body) + 1):
        assert asyncio.run(read(size)) == content


PLAIN = b"Content-Disposition: form-data; name="
WRONG_FORMS: dict[str, tuple[bytes, bytes]] = {
    "no form": (b"application/json", b"{}"),
    "no boundary": (b"multipart/form-data", form(b"a")),
    "another boundary": (b"multipart/form-data; boundary=other", form(b"a")),
    "cut": (FORM_TYPE[b"content-type"], form(b"a", purpose="batch")[:-8]),
    "empty": (FORM_TYPE[b"content-type"], b""),
    "no file": (FORM_TYPE[b"content-type"], form(None, purpose="batch")),
    "no purpose": (FORM_TYPE[b"content-type"], form(b"a")),
    "unknown purpose": (FORM_TYPE[b"content-type"], form(b"a", purpose="fun")),
    "a long field": (FORM_TYPE[b"content-type"], form(b"a", purpose="x" * 2000)),
    "many fields": (FORM_TYPE[b"content-type"], form(b"a", **{f"f{index}": "" for index in range(20)})),
    "two files": (
        FORM_TYPE[b"content-type"],
        form(b"a").removesuffix(b"--" + BOUNDARY + b"--\r\n") + form(b"b", purpose="batch"),
    ),
    "a long header": (
        FORM_TYPE[b"content-type"],
        b"--" + BOUNDARY + b"\r\n" + PLAIN + b"x" * 10_000 + b"\r\n\r\n\r\n--" + BOUNDARY + b"--\r\n",
    ),
    "a lifetime of a second": (
        FORM_TYPE[b"content-type"],
        form(b"a", purpose="batch", **{"expires_after[anchor]": "created_at", "expires_after[seconds]": "1"}),
    ),
    "a lifetime from now": (
        FORM_TYPE[b"content-type"],
        form(b"a", purpose="batch", **{"expires_after[anchor]": "now", "expires_after[seconds]": "3600"}),
    ),
}


def test_a_wrong_form_is_refused_and_leaves_nothing(default_model_path: Path) -> None:
    async def work(server: InProcess) -> None:
        for case, (content_type, body) in WRONG_FORMS.items():
            reply = await server.send("/v1/files", body, more_headers={b"content-type": content_type})
            error = json.loads(reply.body)["error"]
            assert reply.status == 400 and error["param"] and len(error["message"]) < 300, case
            assert stored_names(server) == [], case
        reply = await server.send("/v1/files", form(b"a" * 200_000), more_headers=FORM_TYPE)
        assert reply.status == 413 and b"max_file_bytes" in reply.body
        long = {**FORM_TYPE, b"content-length": b"200000"}
        assert (await server.send("/v1/files", b"", more_headers=long)).status == 413
        short = {**FORM_TYPE, b"content-length": b"9"}
        assert (await server.send("/v1/files", b"a" * 9, more_headers=short)).status == 400
        assert stored_names(server) == []

    run(default_model_path, work, max_file_bytes=100_000)


def test_lists_have_pages_orders_and_purposes(default_model_path: Path) -> None:
    async def work(server: InProcess) -> None:
        ids = [json.loads((await upload(server, b"a")).body)["id"] for _ in range(5)]
        other = json.loads((await upload(server, b"a", purpose="user_data")).body)["id"]
        listed = await get(server, "/v1/files")
        msgspec.convert(listed, FileList)
        assert [one["id"] for one in listed["data"]] == [other, *reversed(ids)]
        batch_files = await get(server, "/v1/files?purpose=batch&order=asc")
        assert [one["id"] for one in batch_files["data"]] == ids and not batch_files["has_more"]
        pages, after = [], ""
        while True:
            page = await get(server, f"/v1/files?order=asc&limit=2{after}")
            pages.append([one["id"] for one in page["data"]])
            after = f"&after={page['last_id']}"
            if not page["has_more"]:
                break
        assert pages == [ids[:2], ids[2:4], [ids[4], other]]
        for query in ("limit=0", "limit=10001", "limit=x", "limit=%C2%B2", "order=up"):
            assert (await server.send(f"/v1/files?{query}", method="GET")).status == 400
        assert (await server.send("/v1/files?after=file-0", method="GET")).status == 404

    run(default_model_path, work)


def test_a_file_of_another_key_does_not_exist(default_model_path: Path) -> None:
    async def work(server: InProcess) -> None:
        file_id = json.loads((await upload(server, b"a", key="one")).body)["id"]
        assert (await get(server, "/v1/files", "two"))["data"] == []
        for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
            reply = await server.send(f"/v1/files/{file_id}{path}", method=method, key="two")
            missing = await server.send(f"/v1/files/file-0{path}", method=method, key="two")
            assert reply.status == missing.status == 404
            assert reply.body.replace(file_id.encode(), b"file-0") == missing.body
        assert (await get(server, f"/v1/files/{file_id}", "one"))["id"] == file_id

    run(default_model_path, work, api_keys=KEYS)


def test_a_file_ends_with_its_lifetime(default_model_path: Path) -> None:
    async def work(server: InProcess) -> None:
        now = time.time()
        server.server.store.wall_clock = lambda: now
        lifetime = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
        short = json.loads((await upload(server, b"a", purpose="vision", **lifetime)).body)
        default = json.loads((await upload(server, b"a")).body)
        assert short["expires_at"] == int(now + 3600) and default["expires_at"] == int(now + 30 * 86400)
        now += 3600
        assert (await server.send(f"/v1/files/{short['id']}", method="GET")).status == 404
        assert [one["id"] for one in (await get(server, "/v1/files"))["data"]] == [default["id"]]
        await server.server.files.sweep()
        assert stored_names(server) == [default["id"]]

    run(default_model_path, work)


def test_stored_bytes_are_limited_for_all_keys_together(default_model_path: Path) -> None:
    async def work(server: InProcess) -> None:
        assert (await upload(server, b"a" * 600_000, key="one")).status == 200
        refused = await upload(server, b"a" * 600_000, key="two")
        assert refused.status == 507 and b"max_stored_bytes" in refused.body
        [first] = (await get(server, "/v1/files", "one"))["data"]
        assert stored_names(server) == [first["id"]]
        assert (await server.send(f"/v1/files/{first['id']}", method="DELETE", key="one")).status == 200
        assert (await upload(server, b"a" * 600_000, key="two")).status == 200

    run(default_model_path, work, api_keys=KEYS, max_stored_bytes=1_000_000, max_file_bytes=700_000)


def test_uploads_at_the_same_time_share_the_space_by_the_bytes_that_have_arrived(
    default_model_path: Path,
) -> None:
    """They have no Content-Length, so the server cannot know their size before their end."""

    async def upload_all(server: InProcess, num_bytes: int) -> tuple[int, int]:
        replies = await asyncio.gather(*(upload(server, b"a" * num_bytes) for _ in range(8)))
        statuses = [reply.status for reply in replies]
        assert set(statuses) <= {200, 507}
        stored = (await get(server, "/v1/files"))["data"]
        assert sum(one["bytes"] for one in stored) <= 5_000_000
        assert len(stored) == len(stored_names(server))
        return statuses.count(200), statuses.count(507)

    async def work(server: InProcess) -> None:
        assert await upload_all(server, 1000) == (8, 0)
        stored, refused = await upload_all(server, 1_300_000)
        assert stored and refused >= 5
        assert not server.server.files._incoming

    run(default_model_path, work, max_stored_bytes=5_000_000, max_file_bytes=4_000_000)


def test_leftovers_of_a_crash_are_removed_and_files_that_are_written_are_not(
    default_model_path: Path, tmp_path: Path
) -> None:
    async def work(server: InProcess) -> None:
        kept = json.loads((await upload(server, b"a")).body)["id"]
        files = server.server.files
        writing = await files.create("file-writing")
        complete = await files.create("file-complete")
        complete.complete()
        for name in ("file-orphan", ".new-file-cut"):
            (files.folder / name).write_bytes(b"a")
        assert await files.sweep() == 2
        assert stored_names(server) == sorted([kept, ".new-file-writing", "file-complete"])
        for new in (writing, complete):
            new.discard()
        assert stored_names(server) == [kept]

    run(default_model_path, work)


def test_a_row_is_never_left_without_its_file(default_model_path: Path) -> None:
    """A cancel of the caller while the transaction runs does not discard the file."""

    async def work(server: InProcess) -> None:
        files, store = server.server.files, server.server.store
        await upload(server, b"a")
        for delay in range(30):
            new = await files.create(f"file-{delay}")
            from weft.server.state.files import StoredFile

            row = StoredFile(new.id, "", 1.0, None, "name", "batch", 0)
            keeping = asyncio.ensure_future(files.keep([(new, row)], lambda connection: None))
            for _ in range(delay):
                await asyncio.sleep(0)
            keeping.cancel()
            await asyncio.wait([keeping])
        rows: set[str] = await store.run(
            lambda connection: {one for (one,) in connection.execute("SELECT id FROM files")}
        )
        assert rows <= set(stored_names(server))

    run(default_model_path, work)


def test_purposes_are_those_of_the_openai_package() -> None:
    from typing import get_args

    from openai.types import FilePurpose

    assert set(PURPOSES) == set(get_args(FilePurpose))


def test_an_error_while_the_form_is_read_is_an_error_of_the_api() -> None:
    async def parts() -> AsyncIterator[bytes]:
        yield b""

    with pytest.raises(ApiError) as caught:
        asyncio.run(read_upload("", parts(), None))  # type: ignore[arg-type]
    assert caught.value.status == 400 and "curl" in caught.value.message


def test_uploads_of_one_key_leave_places_for_the_others(default_model_path: Path) -> None:
    async def work(server: InProcess) -> None:
        ends = asyncio.Event()

        async def slow_upload() -> int:
            parts = [{"type": "http.request", "body": b"--", "more_body": True}]
            sent: list[Any] = []

            async def receive() -> Any:
                if not parts:
                    await ends.wait()
                return parts.pop() if parts else {"type": "http.disconnect"}

            async def send(message: Any) -> None:
                sent.append(message)

            headers = [*FORM_TYPE.items(), (b"host", b"localhost"), (b"authorization", b"Bearer one")]
            headers.append((b"content-length", b"1000"))
            path = {"path": "/v1/files", "raw_path": b"/v1/files", "query_string": b"", "root_path": ""}
            await server._asgi({"type": "http", "method": "POST", **path, "headers": headers}, receive, send)
            return int(sent[0]["status"]) if sent else 0

        slow = [asyncio.create_task(slow_upload()) for _ in range(4)]
        while len(stored_names(server)) < 4:
            await asyncio.sleep(0.01)
        assert (await upload(server, b"a", key="one")).status == 429
        assert (await upload(server, b"a", key="two")).status == 200
        ends.set()
        await asyncio.gather(*slow)
        assert (await upload(server, b"a", key="one")).status == 200
        assert len(stored_names(server)) == 2

    run(default_model_path, work, api_keys=KEYS)


def test_a_file_that_a_cancelled_caller_began_is_removed(default_model_path: Path) -> None:
    async def work(server: InProcess) -> None:
        files = server.server.files
        await upload(server, b"a")
        kept = stored_names(server)
        began, may_end = threading.Event(), threading.Event()

        def wait(*_: Any) -> None:
            began.set()
            may_end.wait()

        files.check_space = wait  # type: ignore[method-assign]
        creating = asyncio.ensure_future(files.create("file-a"))
        await asyncio.to_thread(began.wait)
        creating.cancel()
        asyncio.get_running_loop().call_soon(may_end.set)
        with pytest.raises(asyncio.CancelledError):
            await creating
        await server.server.store.run(lambda connection: None)  # the transaction before it has ended
        assert stored_names(server) == kept

    run(default_model_path, work)


@pytest.mark.parametrize(
    "given", ["bytes=10-", "bytes=5-2", "bytes=0-1,4-5", "bytes=-0", "bytes=-", "lines=1-2", "a"]
)
def test_a_range_that_the_file_does_not_have_is_refused_in_the_shape_of_the_api(
    default_model_path: Path, given: str
) -> None:
    async def work(server: InProcess) -> None:
        file = json.loads((await upload(server, b"0123456789")).body)
        path = f"/v1/files/{file['id']}/content"
        part = await server.send(path, method="GET", more_headers={b"range": b"bytes=2-4"})
        assert (part.status, part.body) == (206, b"234")
        part = await server.send(path, method="GET", more_headers={b"range": b"bytes=-3"})
        assert (part.status, part.body) == (206, b"789")
        reply = await server.send(path, method="GET", more_headers={b"range": given.encode()})
        assert reply.status == 416 and reply.headers[b"content-range"] == b"bytes */10"
        assert json.loads(reply.body)["error"]["code"] == "invalid_range"

    run(default_model_path, work)
