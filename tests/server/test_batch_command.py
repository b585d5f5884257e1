"""`weft batch` with a real server."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from batch_client import COMPLETIONS, line, lines
from server_process import Server, api_key, running_server, wait_for

from weft.cli.batch_command import BatchClient, cancel_command, get_command, list_command, submit_command
from weft.errors import InvalidRequestError, WeftError


@pytest.fixture(scope="module")
def keyed_server(default_model_path: Path) -> Iterator[Server]:
    with running_server(default_model_path, api_keys=[api_key("secret")], max_file_bytes=100_000) as server:
        yield server


def test_a_file_is_submitted_and_its_output_downloaded(
    keyed_server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, source, output = keyed_server.url, tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(lines([line(0), b"wrong", line(2)]))
    submit_command(source, None, "1h", url, "secret", False)
    shown = capsys.readouterr()
    batch_id = shown.out.split()[0]
    assert batch_id.startswith("batch_") and f"weft batch get {batch_id} --url {url}" in shown.err

    def status() -> str:
        get_command(batch_id, None, False, url, "secret", True)
        return str(json.loads(capsys.readouterr().out)["status"])

    wait_for(lambda: status() == "completed")
    get_command(batch_id, output, False, url, "secret", False)
    shown = capsys.readouterr()
    assert "2 of 3 lines, 1 failed" in shown.out and "line 2:" in shown.out
    assert [json.loads(one)["custom_id"] for one in output.read_text().splitlines()] == ["id-0", "id-2"]
    assert "invalid_json_line" in Path(f"{output}.errors").read_text()
    with pytest.raises(InvalidRequestError, match="--overwrite"):
        get_command(batch_id, output, False, url, "secret", False)
    get_command(batch_id, output, True, url, "secret", False)
    list_command(20, url, "secret", False)
    assert f"{batch_id}  " in capsys.readouterr().out
    with pytest.raises(WeftError, match="is completed"):
        cancel_command(batch_id, url, "secret", False)
    assert sorted(os.listdir(tmp_path)) == ["in.jsonl", "out.jsonl", "out.jsonl.errors"]


def test_errors_say_what_to_do(keyed_server: Server, tmp_path: Path) -> None:
    url, path = keyed_server.url, tmp_path / "in.jsonl"
    with pytest.raises(WeftError, match="API key is missing"):
        list_command(20, url, None, False)
    with pytest.raises(WeftError, match="weft serve"):
        list_command(20, "http://127.0.0.1:9", None, False)
    with pytest.raises(InvalidRequestError, match="--url"):
        list_command(20, "localhost:8000", None, False)
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        submit_command(path, None, "24h", url, "secret", False)
    path.write_text("{}\n")
    with pytest.raises(InvalidRequestError, match="--endpoint"):
        submit_command(path, None, "24h", url, "secret", False)
    with pytest.raises(WeftError, match="completion_window"):
        submit_command(path, COMPLETIONS, "soon", url, "secret", False)
    source = keyed_server.client.post(
        "/v1/files",
        data={"purpose": "batch"},
        files={"file": ("a", b"a")},
        headers={"Authorization": "Bearer secret"},
    )
    with pytest.raises(WeftError, match="nowhere/out: cannot be written: No such file"):
        BatchClient(url, "secret").download(source.json()["id"], tmp_path / "nowhere" / "out", False)
    path.write_bytes(bytes(8 << 20))
    with pytest.raises(WeftError, match="max_file_bytes"):
        submit_command(path, COMPLETIONS, "24h", url, "secret", False)
    with pytest.raises(WeftError, match="there is no batch"):
        get_command("batch_0", None, False, url, "secret", False)


def test_a_pipe_is_submitted_like_a_file(keyed_server: Server, tmp_path: Path) -> None:
    pipe, client = tmp_path / "pipe", keyed_server.client
    os.mkfifo(pipe)
    writing = threading.Thread(target=pipe.write_bytes, args=(lines([line(0)]),))
    writing.start()
    submit_command(pipe, None, "24h", keyed_server.url, "secret", False)
    writing.join()
    [newest] = client.get("/v1/batches?limit=1", headers={"Authorization": "Bearer secret"}).json()["data"]
    path = f"/v1/files/{newest['input_file_id']}/content"
    assert client.get(path, headers={"Authorization": "Bearer secret"}).content == lines([line(0)])


def test_a_download_that_was_cut_is_an_error_and_leaves_no_file(tmp_path: Path) -> None:
    def answer(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n" + bytes(60))

    with socket.create_server(("127.0.0.1", 0)) as listening:
        answering = threading.Thread(target=answer, args=(listening,))
        answering.start()
        client = BatchClient(f"http://127.0.0.1:{listening.getsockname()[1]}", None)
        with pytest.raises(WeftError, match="before the whole file"):
            client.download("file-a", tmp_path / "out", False)
        answering.join()
    assert not list(tmp_path.iterdir())
