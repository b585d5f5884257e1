"""What the tests of files and batches share: forms, lines, and requests to the application without sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

from in_process import InProcess, Reply, in_process

COMPLETIONS = "/v1/completions"
BOUNDARY = b"boundary-of-a-test"
FORM_TYPE = {b"content-type": b"multipart/form-data; boundary=" + BOUNDARY}


def run(path: Path, work: Callable[[InProcess], Awaitable[Any]], **settings: Any) -> None:
    """Runs `work` with a new server."""

    async def run_in_server() -> None:
        async with in_process(path, **settings) as server:
            await asyncio.wait_for(work(server), 60)

    asyncio.run(run_in_server())


def form(content: bytes | None, name: str = "lines.jsonl", **fields: str) -> bytes:
    """The body of an upload."""
    parts = [
        b'--%b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n' % (BOUNDARY, *map(str.encode, one))
        for one in fields.items()
    ]
    if content is not None:
        head = b'--%b\r\nContent-Disposition: form-data; name="file"; filename="%b"\r\n\r\n'
        parts.append(head % (BOUNDARY, name.encode()) + content + b"\r\n")
    return b"".join(parts) + b"--" + BOUNDARY + b"--\r\n"


def line(index: int, **changes: Any) -> dict[str, Any]:
    """A line whose answer has `index % 7 + 1` tokens."""
    body = {"prompt": f"line {index}", "max_tokens": index % 7 + 1, "ignore_eos": True}
    return {"custom_id": f"id-{index}", "method": "POST", "url": COMPLETIONS, "body": body, **changes}


def lines(content: Iterable[Any]) -> bytes:
    return b"".join((one if isinstance(one, bytes) else json.dumps(one).encode()) + b"\n" for one in content)


async def upload(server: InProcess, content: bytes, key: str | None = None, **fields: str) -> Reply:
    fields = {"purpose": "batch", **fields}
    return await server.send("/v1/files", form(content, **fields), key=key, more_headers=FORM_TYPE)


async def get(server: InProcess, path: str, key: str | None = None) -> Any:
    """The JSON of a route that must succeed."""
    reply = await server.send(path, method="GET", key=key)
    assert reply.status == 200, reply.body
    return json.loads(reply.body)


async def submit(server: InProcess, content: bytes, key: str | None = None, **fields: Any) -> dict[str, Any]:
    """Uploads lines and makes a batch of them."""
    uploaded = await upload(server, content, key)
    assert uploaded.status == 200, uploaded.body
    body = {"input_file_id": json.loads(uploaded.body)["id"], "endpoint": COMPLETIONS, **fields}
    reply = await server.send("/v1/batches", json.dumps(body).encode(), key=key)
    assert reply.status == 200, reply.body
    batch: dict[str, Any] = json.loads(reply.body)
    assert batch["status"] == "validating" and batch["request_counts"]["total"] == 0
    return batch


async def wait_for_status(
    server: InProcess, batch: dict[str, Any], *statuses: str, key: str | None = None
) -> dict[str, Any]:
    while True:
        found: dict[str, Any] = await get(server, f"/v1/batches/{batch['id']}", key)
        if found["status"] in statuses:
            return found
        assert found["status"] in ("validating", "in_progress", "finalizing", "cancelling"), found
        await asyncio.sleep(0.01)


async def download(server: InProcess, file_id: str | None, key: str | None = None) -> list[dict[str, Any]]:
    """The lines of a file; none for None."""
    if file_id is None:
        return []
    reply = await server.send(f"/v1/files/{file_id}/content", method="GET", key=key)
    assert reply.status == 200, reply.body
    return [json.loads(one) for one in reply.body.splitlines()]
