"""Sends mutated requests, by seed, to every route of the application: `python fuzz_requests.py --count 1000000`. The
engine is real, on noop.

Valid requests (`fuzz_cases.py`) get wrong types, ranges, nesting, text, numbers, ids, queries, methods and bytes. Every
response must be an answer or an error in the format of its API, never a 5xx. In the end nothing may be held: no request,
no block, no bytes, no row and no file of a request that was refused.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import api_shapes
from batch_client import BOUNDARY, FORM_TYPE, form, line, lines
from fuzz_cases import CASES, FIELDS, HELLO, IDS, LEGAL, NASTY, RAW, Case
from in_process import InProcess, Reply, in_process
from vector_models import embedder_path, noop_embedder, noop_reranker

from reranker_files import write_reranker
from weft.server.http.byte_budget import ByteBudget

_FIELDS, _LEGAL = sorted(FIELDS), sorted(LEGAL)
_METHODS = ("GET", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE", "POST", "X")
_DOCUMENTED = {501: "/api/"}
"""Statuses from 500 on that are no problem, and the routes that may have them. 504 is the answer to a short deadline."""
_MADE = {"/v1/responses": "resp_", "/v1/files": "file-", "/v1/vector_stores": "vs_"}
"""The routes that make objects, and the first letters of their ids."""


def settings(folder: Path) -> dict[str, Any]:
    """`folder` gets the files of a reranker."""
    vector_models = [noop_embedder(embedder_path()), noop_reranker(write_reranker(folder))]
    return {"max_context": 256, "show_prompts": True, "vector_models": vector_models, "feedback_days": 1}


@dataclass
class Asked:
    """A mutated request."""

    method: str
    path: str
    body: bytes
    headers: dict[bytes, bytes] = field(default_factory=dict)


@dataclass
class Objects:
    """The objects of the store that requests may name."""

    ids: dict[str, str]
    made: dict[str, list[str]] = field(default_factory=lambda: {prefix: [] for prefix in _MADE.values()})
    """Ids of objects that earlier requests made and that may be deleted, newest last."""
    num_left: int = 0
    """Requests that may have made objects without a response."""

    def put_into(self, text: str) -> str:
        for name in IDS:
            text = text.replace(name, self.ids[name])
        return text


# ---------------------------------------------------------------------- mutation


def mutated(chance: random.Random, objects: Objects) -> Asked:
    case = chance.choice(CASES)
    path, method, headers = _path(chance, case, objects), case.method, {}
    if chance.random() < 0.02 and not any(name in case.path for name in IDS):
        method = chance.choice(_METHODS)  # a DELETE would remove an object that other requests name
    if path.startswith(("/v1/messages", "/v1/models")) and chance.random() < 0.7:
        headers[b"anthropic-version"] = b"2023-06-01"
    if case.upload is not None:
        body = _upload(chance, case.upload)
        if chance.random() < 0.9:  # the others have no length, like bodies in chunks
            headers[b"content-length"] = b"%d" % len(body)
        return Asked(method, path, body, {**FORM_TYPE, **headers})
    body = (
        b""
        if case.body is None
        else objects.put_into(_body(chance, case.body).decode("latin-1")).encode("latin-1")
    )
    if chance.random() < 0.03:
        headers[b"content-type"] = chance.choice(
            (b"", b"text/plain", b"application/x-www-form-urlencoded", b"a/b;c")
        )
    return Asked(method, path, body, headers)


def _path(chance: random.Random, case: Case, objects: Objects) -> str:
    path = case.path
    if path.endswith("/OLD"):
        made = objects.made[_MADE[path.removesuffix("/OLD")]]
        old = made.pop(chance.randrange(len(made))) if made and chance.random() < 0.7 else "resp_none"
        path = path.removesuffix("OLD") + old
    path = objects.put_into(path)
    if chance.random() < 0.9 - 0.5 * (case.method == "GET"):
        return path
    path, _, query = path.partition("?")
    if chance.random() < 0.6:
        name = chance.choice(
            (
                "limit",
                "order",
                "after",
                "purpose",
                "stream",
                "before_id",
                "after_id",
                "key",
                "include",
                "filter",
                "page",
                "",
            )
        )
        value = chance.choice([str(one) for one in NASTY if isinstance(one, str | int | float)])
        query += f"&{name}={quote(value, errors='replace')}" + chance.choice(("", "&", f"&{name}=1", "=%ff"))
    else:
        *rest, last = path.rpartition("/")
        value = chance.choice([one for one in NASTY if isinstance(one, str)])
        path = "".join(rest) + chance.choice(
            (last + value, value, last[:-1], last.upper(), f"{last}/{value}")
        )
        path = unquote(quote(path, errors="replace"))
    return f"{path}?{query}" if query else path.replace("?", "")


def _upload(chance: random.Random, upload: dict[str, Any]) -> bytes:
    parts = dict(upload)
    for _ in range(chance.choice((0, 0, 1, 2))):
        name = chance.choice(
            ("content", "purpose", "name", "expires_after[seconds]", "expires_after[anchor]", "x")
        )
        value = chance.choice(
            ("", "a", "-1", "9" * 400, "batch", "user_data", "created_at", "\x00", "../../x", "é" * 600)
        )
        parts[name] = value.encode() if name == "content" else value
    content = form(**parts)
    kind = chance.random()
    if kind < 0.2:
        return _broken_bytes(chance, content)
    if kind < 0.25:
        return content.replace(
            BOUNDARY, chance.choice((b"", b"--", BOUNDARY + b"x")), chance.choice((1, 2, -1))
        )
    return content * 20 if kind < 0.27 else content


def _body(chance: random.Random, valid: dict[str, Any]) -> bytes:
    body = json.loads(json.dumps(valid))
    if chance.random() < 0.4:
        names = chance.sample(_LEGAL, chance.randint(1, 4))
        # Mostly fields that the route has.
        names = [name for name in names if name in valid or chance.random() < 0.5]
        return json.dumps({**body, **{name: chance.choice(LEGAL[name]) for name in names}}).encode()
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        body = _changed(chance, body, 0)
    if chance.random() < 0.5 and isinstance(body, dict):
        body = {**body, chance.choice(_FIELDS): chance.choice(NASTY)}
    for name in ("messages", "input"):
        if chance.random() < 0.03 and isinstance(body, dict) and name in valid:
            # Long enough to be tokenised in a worker process.
            long = {"role": "user", "content": "word " * 2000, "extra": chance.choice((*NASTY, _nested(900)))}
            body = {**body, name: [*HELLO, long]}
    content = json.dumps(body).encode()
    kind = chance.random()
    if kind < 0.1:
        return _broken_bytes(chance, content)
    if kind < 0.15 and content.startswith(b"{") and len(content) > 2:
        name = json.dumps(chance.choice(_FIELDS)).encode()
        return b"{" + name + b": " + chance.choice(RAW) + b", " + content[1:]
    if kind < 0.17:
        depth = chance.choice((10, 1000, 20_000))
        return content[:-1] + b', "metadata": ' + b'{"a":' * depth + b"1" + b"}" * (depth + 1)
    return content


def _changed(chance: random.Random, value: Any, depth: int) -> Any:
    """`value` with a change at one position."""
    if depth < 7 and isinstance(value, dict) and value and chance.random() < 0.8:
        name = chance.choice(list(value))
        kind = chance.random()
        if kind < 0.1:
            return {other: one for other, one in value.items() if other != name}
        if kind < 0.2:
            return {**value, chance.choice(_FIELDS): value[name]}
        return {**value, name: _changed(chance, value[name], depth + 1)}
    if depth < 7 and isinstance(value, list) and value and chance.random() < 0.8:
        at = chance.randrange(len(value))
        if chance.random() < 0.15:
            return [*value[:at], *value[at:][::-1]]  # another order
        return [*value[:at], _changed(chance, value[at], depth + 1), *value[at + chance.randrange(2) :]]
    if isinstance(value, int) and not isinstance(value, bool) and chance.random() < 0.5:
        return value * chance.choice((-1, 10, 1000, 2**40)) + chance.choice((-1, 0, 1))
    if isinstance(value, str) and chance.random() < 0.3:
        return value + chr(chance.choice((0, 7, 0x300, 0x200D, 0xFFFF, 0x10FFFF)))
    return chance.choice(NASTY)


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def _broken_bytes(chance: random.Random, content: bytes) -> bytes:
    at = chance.randrange(len(content))
    return chance.choice(
        (
            content[:at],
            content[:at] + bytes([chance.randrange(256)]) + content[at + 1 :],
            content[:at] + chance.choice(RAW) + content[at:],
            content + content,
            content.replace(b":", b":\x00", 1),
        )
    )


# ---------------------------------------------------------------------- checks


def problem_of(asked: Asked, reply: Reply) -> str | None:
    """The problem of a response; None if there is none."""
    path, status = asked.path.partition("?")[0], reply.status
    if status == 0:
        return "no response"
    documented = status in _DOCUMENTED and path.startswith(_DOCUMENTED[status])
    if status >= 500 and status != 504 and not documented:
        return f"status {status}: {reply.body[:300]!r}"
    if b"x-request-id" not in reply.headers:
        return "no x-request-id"
    if asked.method in ("HEAD", "OPTIONS"):
        return None  # the HTTP implementation leaves the body out
    media_type = reply.headers.get(b"content-type", b"").partition(b";")[0]
    if status >= 400:
        family = api_shapes.family(path, asked.headers)
        return api_shapes.problem_of_error(family, json.loads(reply.body))
    if media_type in (b"text/event-stream", b"application/x-ndjson"):
        return api_shapes.problem_of_stream(path, reply.body)
    if media_type == b"application/json":
        content = json.loads(reply.body)
        # A stored response or batch has the error that it ended with.
        return (
            "an error with the status of a success"
            if content.get("error") and "object" not in content
            else None
        )
    is_other = path == "/" or path.startswith(("/v1/files/", "/api/delete", "/docs", "/metrics"))
    return None if is_other else f"{media_type!r}"


async def prepared(server: InProcess) -> Objects:
    """Makes the objects that requests name."""

    async def made(path: str, **body: Any) -> dict[str, Any]:
        reply = await server.send(path, json.dumps(body).encode())
        assert reply.status == 200, reply.body
        content: dict[str, Any] = json.loads(reply.body)
        return content

    response = await made("/v1/responses", input="Hello", max_output_tokens=4)
    background = await made("/v1/responses", input="Hello", max_output_tokens=4, background=True)

    async def uploaded(content: bytes, **parts: str) -> str:
        reply = await server.send("/v1/files", form(content, **parts), more_headers=FORM_TYPE)
        return str(json.loads(reply.body)["id"])

    file_id = await uploaded(lines([line(0)]), purpose="batch")
    document = await uploaded(b"Hello world. " * 50, purpose="assistants", name="a.txt")
    batch = await made("/v1/batches", input_file_id=file_id, endpoint="/v1/completions")
    store = await made("/v1/vector_stores", name="s")
    group = await made(f"/v1/vector_stores/{store['id']}/file_batches", file_ids=[document])
    found = (
        *(response["id"], background["id"], response["output"][0]["id"], file_id, batch["id"]),
        *(store["id"], document, group["id"]),
    )
    return Objects(dict(zip(IDS, found, strict=True)))


async def fuzz(server: InProcess, seed: int, count: int, at_once: int = 16) -> tuple[Counter[int], list[str]]:
    """The number of responses by status, and the problems."""
    statuses: Counter[int] = Counter()
    problems: list[str] = []
    numbers = iter(range(count))
    objects = await prepared(server)
    known = set(objects.ids.values())

    async def ask_some() -> None:
        for number in numbers:
            chance = random.Random(f"{seed}:{number}")
            asked = mutated(chance, objects)
            leaves_after = chance.choice((0.0, 0.001, 0.01)) if chance.random() < 0.03 else None
            try:
                sending = server.send(
                    asked.path, asked.body, leaves_after, asked.method, more_headers=asked.headers
                )
                reply = await asyncio.wait_for(sending, 60)
                problem = None if leaves_after is not None else problem_of(asked, reply)
                statuses[reply.status] += 1
                _remember(asked, reply, objects, known)
            except Exception as error:
                problem = repr(error)
            if problem:
                problems.append(
                    f"seed {seed}, number {number}: {asked.method} {asked.path} {asked.body[:400]!r}: {problem}"
                )

    await asyncio.gather(*(ask_some() for _ in range(at_once)))
    problems += await _strangers(server, known, objects.num_left)
    return statuses, problems


def _remember(asked: Asked, reply: Reply, objects: Objects, known: set[str]) -> None:
    path = asked.path.partition("?")[0]
    if asked.method != "POST" or path not in _MADE:
        return
    prefix = _MADE[path]
    found = reply.body.partition(f'"id":"{prefix}'.encode())[2].partition(b'"')[0].decode()
    if not found:
        objects.num_left += reply.status in (0, 499)  # its client left, perhaps while it was stored
        return
    known.add(prefix + found)
    made = objects.made[prefix]
    made.append(prefix + found)
    del made[:-50]


async def _strangers(server: InProcess, known: set[str], num_left: int) -> list[str]:
    """Rows and files that no answered request made, and files without a row or rows without a file."""
    for _ in range(1200):
        rows = await server.server.store.run(
            lambda connection: {
                table: dict(connection.execute(f"SELECT id, {column} FROM {table}").fetchall())
                for table, column in (
                    *(("responses", "status"), ("files", "purpose"), ("batches", "status")),
                    *(("vector_stores", "is_deleted"), ("vector_store_files", "status")),
                )
            }
        )
        unfinished = [id for id, status in rows["responses"].items() if status in ("queued", "in_progress")]
        unfinished += [id for id, status in rows["batches"].items() if status in ("validating", "in_progress", "finalizing", "cancelling")]  # fmt: skip
        unfinished += [id for id, status in rows["vector_store_files"].items() if status == "in_progress"]
        if not unfinished:
            break
        await asyncio.sleep(0.05)
    problems = [f"{len(unfinished)} rows do not end: {unfinished[:5]}"] if unfinished else []
    strangers = rows["responses"].keys() - known
    strangers |= {id for id, purpose in rows["files"].items() if purpose != "batch_output"} - known
    strangers |= {id for id, is_deleted in rows["vector_stores"].items() if not is_deleted} - known
    if len(strangers) > num_left:
        problems.append(f"{len(strangers)} rows of requests without a response: {sorted(strangers)[:5]}")
    on_disk = {path.name for path in (server.server.store.folder / "files").iterdir()}
    if on_disk != rows["files"].keys():
        problems.append(
            f"files without rows or rows without files: {sorted(on_disk ^ rows['files'].keys())[:5]}"
        )
    return problems


HELD = (
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "http_requests_open"),
    *("num_requests_held", "batch_lines_running"),
)


async def leftovers(server: InProcess) -> dict[str, float]:
    """What is still held after all requests have ended. It must be empty."""
    held: dict[str, float] = {}
    for _ in range(1200):
        page = (await server.send("/metrics", method="GET")).body.decode()
        held = {}
        for metric in page.splitlines():
            name, _, value = metric.rpartition(" ")
            if name.partition("{")[0].removeprefix("weft:") in HELD and float(value):
                held[name] = float(value)
        if server.server.engine.num_unfinished:
            held["answers"] = server.server.engine.num_unfinished
        if server.server.answers.memory.num_bytes:
            held["transcripts"] = server.server.answers.memory.num_bytes
        if server.server.tasks._tasks:
            held["tasks"] = len(server.server.tasks._tasks)
        budgets = [one for one in gc.get_objects() if isinstance(one, ByteBudget)]
        assert budgets
        held |= {f"bytes {index}": one.num_bytes for index, one in enumerate(budgets) if one.num_bytes}
        if not held:
            break
        await asyncio.sleep(0.05)
    return held


async def _main(arguments: argparse.Namespace) -> int:
    from weft.loading.pull import pull

    model = Path(pull("default"))
    with tempfile.TemporaryDirectory() as home:
        os.environ["WEFT_HOME"] = home  # /api/delete and /api/pull work there
        async with in_process(model, **settings(Path(home, "reranker"))) as server:
            began = time.monotonic()
            statuses, problems = await fuzz(server, arguments.seed, arguments.count)
            seconds = time.monotonic() - began
            held = await leftovers(server)
    print(
        f"{arguments.count} requests in {seconds:.1f} s, {arguments.count / seconds:.0f}/s; {dict(statuses)}"
    )
    print(f"{len(problems)} problems; still held: {held or 'nothing'}")
    print("\n".join(problems[:20]))
    return 1 if problems or held else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    sys.exit(asyncio.run(_main(parser.parse_args())))
