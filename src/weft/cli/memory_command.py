"""`weft memory`: a client of `/v1/vector_stores`. The server alone writes them."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from weft.cli.batch_command import BatchClient, at_url, opened, print_hint, print_json
from weft.errors import InvalidRequestError, WeftError
from weft.memory.prompting import Source
from weft.terminal import printable

_STORES = "/v1/vector_stores"
_POLL_SECONDS = 0.5
_SHOWN_CHARACTERS = 400


def add_command(name: str, paths: Sequence[Path], url: str, api_key: str | None, as_json: bool) -> None:
    """Uploads files, attaches them, waits until the server has read them, and prints the result of each."""
    files = list(_files(paths))
    if not files:
        raise InvalidRequestError("the folders have no files; name at least one file", field="path")
    memory = MemoryClient(url, api_key)
    store = memory.find(name) or memory.create(name)
    ids = {memory.add(store["id"], path, shown): shown for path, shown in files}
    ended = [memory.wait(store["id"], file_id) | {"filename": shown} for file_id, shown in ids.items()]
    failed = [one for one in ended if one["status"] != "completed"]
    if as_json:
        print_json({"vector_store_id": store["id"], "files": ended})
    else:
        for one in ended:
            error = f": {printable(one['last_error']['message'])}" if one["last_error"] else ""
            print(f"{one['id']}  {one['status']}  {printable(one['filename'])}{error}")
        print_hint(f"Search them: weft memory search {name} QUESTION{at_url(url)}")
    if failed:
        raise WeftError(f"{len(failed)} of {len(ended)} files could not be read")


def search_command(name: str, query: str, count: int, url: str, api_key: str | None, as_json: bool) -> None:
    """Prints the best passages."""
    memory = MemoryClient(url, api_key)
    found = memory.search(memory.named(name)["id"], query, count)
    if as_json:
        print_json(found)
        return
    for one in map(_source, found["data"]):
        text = " ".join(one.text.split())
        cut = text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + " ..."
        print(f"{one.score:.3f}  {source_line(one)}\n    {printable(cut)}")
    if not found["data"]:
        print_hint("Nothing was found.")


def list_command(name: str | None, url: str, api_key: str | None, as_json: bool) -> None:
    """Prints one line for each vector store, or for each file of one."""
    memory = MemoryClient(url, api_key)
    if name is None:
        found = list(memory.pages(_STORES))
    else:
        found = [
            one | {"filename": memory.file_name(one["id"])} for one in memory.files(memory.named(name)["id"])
        ]
    if as_json:
        print_json({"data": found})
        return
    for one in found:
        if name is None:
            counts = one["file_counts"]
            failed = f", {counts['failed']:,} failed" if counts["failed"] else ""
            print(
                f"{one['id']}  {counts['completed']:,} of {counts['total']:,} files{failed}  {printable(one['name'])}"
            )
        else:
            print(f"{one['id']}  {one['status']:<11}  {printable(one['filename'])}")
    if not found:
        print_hint("There is nothing. Add files: weft memory add NAME PATH")


def remove_command(name: str, files: Sequence[str], url: str, api_key: str | None, as_json: bool) -> None:
    """Removes files, or a whole store, and deletes the files that were in it."""
    memory = MemoryClient(url, api_key)
    store = memory.named(name)
    attached = {one["id"]: memory.file_name(one["id"]) for one in memory.files(store["id"])}
    chosen = [
        file_id for file_id, shown in attached.items() if not files or file_id in files or shown in files
    ]
    if unknown := [one for one in files if one not in attached and one not in attached.values()]:
        raise InvalidRequestError(
            f"{name} has no file {unknown[0]!r}; `weft memory list {name}` lists them", field="file"
        )
    for file_id in chosen:
        memory.remove(store["id"], file_id)
    if not files:
        memory.delete(store["id"])
    if as_json:
        print_json({"id": store["id"], "deleted": not files, "files": chosen})
    else:
        print(f"{store['id']}  {len(chosen)} files removed" + ("" if files else ", and the vector store"))


def source_line(source: Source) -> str:
    """Says where a passage comes from, in a form that is safe for a terminal."""
    return f"{printable(source.place)}, characters {source.start:,} to {source.end:,}"


class MemoryClient:
    """Sends requests about vector stores to one server."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self._client = BatchClient(url, api_key)

    def find(self, name: str) -> dict[str, Any] | None:
        """The newest vector store with this name or id."""
        return next((one for one in self.pages(_STORES) if name in (one["name"], one["id"])), None)

    def named(self, name: str) -> dict[str, Any]:
        found = self.find(name)
        if found is None:
            message = f"the server has no vector store {name!r}; `weft memory list` lists them"
            raise InvalidRequestError(message, field="name")
        return found

    def create(self, name: str) -> dict[str, Any]:
        return self._client.send("POST", _STORES, {"name": name})

    def add(self, store: str, path: Path | None, name: str) -> str:
        """Uploads and attaches a file. Returns its id. `path` None: standard input."""
        with opened(Path("/dev/stdin") if path is None else path) as source:
            file_id: str = self._client.upload(source, name, "assistants")["id"]
        self._client.send("POST", f"{_STORES}/{store}/files", {"file_id": file_id})
        return file_id

    def wait(self, store: str, file_id: str) -> dict[str, Any]:
        while True:
            found = self._client.send("GET", f"{_STORES}/{store}/files/{file_id}")
            if found["status"] != "in_progress":
                return found
            time.sleep(_POLL_SECONDS)

    def search(self, store: str, query: str, count: int) -> dict[str, Any]:
        return self._client.send(
            "POST", f"{_STORES}/{store}/search", {"query": query, "max_num_results": count}
        )

    def sources(self, store: str, query: str, count: int) -> list[Source]:
        return [_source(one) for one in self.search(store, query, count)["data"]]

    def files(self, store: str) -> Iterator[dict[str, Any]]:
        return self.pages(f"{_STORES}/{store}/files")

    def file_name(self, file_id: str) -> str:
        return str(self._client.send("GET", f"/v1/files/{quote(file_id, safe='')}")["filename"])

    def remove(self, store: str, file_id: str) -> None:
        """Deletes a file, which removes it from its vector stores."""
        self._client.send("DELETE", f"/v1/files/{file_id}")

    def delete(self, store: str) -> None:
        self._client.send("DELETE", f"{_STORES}/{store}")

    def pages(self, path: str) -> Iterator[dict[str, Any]]:
        after = ""
        while True:
            page = self._client.send("GET", f"{path}?limit=100{after}")
            yield from page["data"]
            if not page["has_more"]:
                return
            after = f"&after={page['last_id']}"


def _source(result: dict[str, Any]) -> Source:
    """Converts a result of a search."""
    return Source(
        result["file_id"],
        result["filename"],
        result["score"],
        result["content"][0]["text"],
        *(result[name] for name in ("heading", "page", "start", "end")),
    )


def _files(paths: Sequence[Path]) -> Iterator[tuple[Path | None, str]]:
    """Each file with the name that it gets. Hidden files of a folder are left out."""
    for path in paths:
        if str(path) == "-":
            if sys.stdin.isatty():
                print_hint("Type the text; Ctrl-D ends it.")
            yield None, "standard input"
        elif path.is_dir():
            for one in sorted(path.rglob("*")):
                inner = one.relative_to(path)
                if one.is_file() and not any(part.startswith(".") for part in inner.parts):
                    yield one, str(inner)
        else:
            yield path, path.name
