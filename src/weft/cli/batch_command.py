"""`weft batch`: a client of `/v1/files` and `/v1/batches`. Files are sent and received in pieces."""

from __future__ import annotations

import http.client
import json
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote, urlsplit

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from weft.errors import InvalidRequestError, WeftError
from weft.json_lines import read_lines
from weft.terminal import printable

_SECONDS = 60.0
"""Limit for a connection without progress."""
_PIECE_BYTES = 256 << 10
_ENDED = ("completed", "failed", "expired", "cancelled")
_MAX_FIRST_LINE = 16 << 20
_SHOWN_ERRORS = 5


def submit_command(
    file: Path, endpoint: str | None, window: str, url: str, api_key: str | None, as_json: bool
) -> None:
    """Uploads a file, makes a batch of it, and prints its id and the next command."""
    client = BatchClient(url, api_key)
    with opened(file) as source:
        endpoint = endpoint or _endpoint_of(source, file)
        uploaded = client.upload(source, file.name)
    batch = client.send(
        "POST",
        "/v1/batches",
        {"input_file_id": uploaded["id"], "endpoint": endpoint, "completion_window": window},
    )
    if as_json:
        print_json(batch)
        return
    print(f"{batch['id']}  {file.name}, {uploaded['bytes']:,} bytes, to {endpoint}")
    print_hint(f"It runs while clients leave capacity. Progress: weft batch get {batch['id']}{at_url(url)}")


def list_command(limit: int, url: str, api_key: str | None, as_json: bool) -> None:
    """Prints one line for each batch."""
    found = BatchClient(url, api_key).send("GET", f"/v1/batches?limit={limit}")
    if as_json:
        print_json(found)
        return
    for batch in found["data"]:
        made = datetime.fromtimestamp(batch["created_at"]).strftime("%Y-%m-%d %H:%M")
        print(f"{batch['id']}  {made}  {batch['status']:<11}  {_progress_of(batch)}")
    if not found["data"]:
        print_hint("There are no batches. Make one: weft batch submit FILE")


def get_command(
    batch_id: str, output: Path | None, overwrite: bool, url: str, api_key: str | None, as_json: bool
) -> None:
    """Prints a batch. With `output`, writes its results."""
    client = BatchClient(url, api_key)
    batch = client.send("GET", f"/v1/batches/{quote(batch_id, safe='')}")
    if as_json:
        print_json(batch)
    else:
        _print_batch(batch)
    if output is None:
        if not as_json and batch["output_file_id"]:
            print_hint(f"Its results: weft batch get {batch_id} --output results.jsonl{at_url(url)}")
        return
    if batch["status"] not in _ENDED:
        raise WeftError(f"{batch_id} is {batch['status']}; its output is there when it has ended")
    files = [(batch["output_file_id"], output), (batch["error_file_id"], Path(f"{output}.errors"))]
    if not any(file_id for file_id, _ in files):
        raise WeftError(f"{batch_id} has no output: it is {batch['status']}")
    for file_id, path in files:
        if file_id is not None:
            num_bytes = client.download(file_id, path, overwrite)
            print_hint(f"{path}: {num_bytes:,} bytes")


def cancel_command(batch_id: str, url: str, api_key: str | None, as_json: bool) -> None:
    """Cancels a batch and prints it."""
    batch = BatchClient(url, api_key).send("POST", f"/v1/batches/{quote(batch_id, safe='')}/cancel")
    if as_json:
        print_json(batch)
    else:
        print(f"{batch['id']}  {batch['status']}  {_progress_of(batch)}")


class BatchClient:
    """Sends requests to one server, each on a connection of its own."""

    default_url = "http://127.0.0.1:8000"

    def __init__(self, url: str, api_key: str | None) -> None:
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            message = f"--url is {url!r}; write it like {self.default_url}"
            raise InvalidRequestError(message, field="url")
        self._url = url
        self._host, self._port = parts.hostname, port
        self._is_secure = parts.scheme == "https"
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}

    def send(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """Sends `body` as JSON. Returns the JSON of the response."""
        content = b"" if body is None else json.dumps(body).encode()
        with self._response(method, path, content, {"Content-Type": "application/json"}) as response:
            return self._json(response)

    def upload(self, source: IO[bytes], name: str, purpose: str = "batch") -> dict[str, Any]:
        """Sends a file from its current position to its end."""
        boundary = secrets.token_hex(16)
        name = name.replace('"', "%22").replace("\r", " ").replace("\n", " ")
        head = (
            f'--{boundary}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n{purpose}\r\n'
            f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n'
        ).encode()
        tail = f"\r\n--{boundary}--\r\n".encode()
        size = os.fstat(source.fileno()).st_size - source.tell()
        headers = {
            "Content-Type": f"multipart/form-data; boundary={boundary}",
            "Content-Length": str(len(head) + size + len(tail)),
        }
        with _transfer(f"uploading {name}", size) as advance:

            def parts() -> Iterator[bytes]:
                yield head
                left = size
                while left and (piece := source.read(min(_PIECE_BYTES, left))):
                    yield piece
                    left -= len(piece)
                    advance(len(piece))
                yield tail

            with self._response("POST", "/v1/files", parts(), headers) as response:
                return self._json(response)

    def download(self, file_id: str, path: Path, overwrite: bool) -> int:
        """Writes a file, and returns its size. A file that is not complete is not left behind."""
        if path.exists() and not overwrite:
            message = f"{path}: exists already; choose another name, or replace it with --overwrite"
            raise InvalidRequestError(message, field="output")
        partial = path.with_name(f".partial-{path.name}")
        num_bytes = 0
        try:
            with self._response("GET", f"/v1/files/{quote(file_id, safe='')}/content", b"", {}) as response:
                size = int(response.headers.get("content-length", 0))
                with _transfer(f"downloading {path.name}", size) as advance, partial.open("wb") as file:
                    while piece := response.read(_PIECE_BYTES):
                        file.write(piece)
                        num_bytes += len(piece)
                        advance(len(piece))
            if num_bytes < size:  # `read` with a size does not raise for a connection that ended early
                raise ConnectionError
            os.replace(partial, path)
        except (http.client.IncompleteRead, ConnectionError, TimeoutError):
            raise WeftError(
                f"{self._url}: the connection ended before the whole file had arrived; try again"
            ) from None
        except OSError as error:
            raise WeftError(f"{path}: cannot be written: {error.strerror or error}") from error
        finally:
            with suppress(OSError):
                partial.unlink()
        return num_bytes

    @contextmanager
    def _response(
        self, method: str, path: str, body: bytes | Iterator[bytes], headers: dict[str, str]
    ) -> Iterator[http.client.HTTPResponse]:
        """Sends a request and yields the response. For an error status, raises WeftError with the server's message."""
        kind = http.client.HTTPSConnection if self._is_secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=_SECONDS)
        try:
            try:
                # A server that refuses a large body does not read it, so sending fails. Its response still says why.
                with suppress(BrokenPipeError, ConnectionResetError):
                    connection.request(method, self._path + path, body, {**headers, **self._headers})
                response = connection.getresponse()
            except (OSError, http.client.HTTPException) as error:
                reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
                message = (
                    f"{self._url}: {reason}; is the server running? Start it with `weft serve`, or set --url"
                )
                raise WeftError(message) from error
            if response.status >= 400:
                raise WeftError(f"{self._url}: {_message_of(response)}")
            yield response
        finally:
            connection.close()

    def _json(self, response: http.client.HTTPResponse) -> dict[str, Any]:
        try:
            content = json.loads(response.read())
        except ValueError:
            content = None
        if not isinstance(content, dict):
            raise WeftError(f"{self._url}: the answer is not JSON; is it a weft server?")
        return content


def _message_of(response: http.client.HTTPResponse) -> str:
    try:
        return str(json.loads(response.read(1 << 20))["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {response.status}; is it a weft server?"


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    try:
        file = path.open("rb")
    except OSError as error:
        raise InvalidRequestError(f"{path}: cannot be read: {error.strerror}", field="file") from error
    with file:
        if file.seekable():
            yield file
            return
        with tempfile.TemporaryFile() as copy:  # the size of a pipe is unknown
            shutil.copyfileobj(file, copy)
            copy.seek(0)
            yield copy


def _endpoint_of(source: IO[bytes], path: Path) -> str:
    """The url of the first line."""
    raw = next(read_lines(source, _MAX_FIRST_LINE), b"")
    source.seek(0)
    try:
        url = json.loads(raw)["url"] if isinstance(raw, bytes) else None
    except (ValueError, KeyError, TypeError):
        url = None
    if not isinstance(url, str):
        message = f"{path}: the first line has no url; set the route of all lines with --endpoint"
        raise InvalidRequestError(message, field="endpoint")
    return url


def _print_batch(batch: dict[str, Any]) -> None:
    print(f"{batch['id']}  {batch['status']}  {_progress_of(batch)}")
    errors = (batch["errors"] or {}).get("data", [])
    for error in errors[:_SHOWN_ERRORS]:
        line = "" if error["line"] is None else f"line {error['line']}: "
        print(f"  {line}{printable(error['message'])}")
    if len(errors) > _SHOWN_ERRORS:
        print(f"  and {len(errors) - _SHOWN_ERRORS} more; --json shows them")


def _progress_of(batch: dict[str, Any]) -> str:
    counts = batch["request_counts"]
    failed = f", {counts['failed']:,} failed" if counts["failed"] else ""
    return f"{counts['completed']:,} of {counts['total']:,} lines{failed}"


def at_url(url: str) -> str:
    """The option --url, with a space before it, for a server that is not at the default address; else nothing."""
    return "" if url == BatchClient.default_url else f" --url {url}"


def print_json(content: dict[str, Any]) -> None:
    print(json.dumps(content, indent=2, ensure_ascii=False))


def print_hint(text: str) -> None:
    print(text, file=sys.stderr)


@contextmanager
def _transfer(text: str, size: int) -> Iterator[Any]:
    """Shows a progress bar in a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(24), DownloadColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task(printable(text), total=size)
        yield lambda num_bytes: bars.advance(task, num_bytes)
