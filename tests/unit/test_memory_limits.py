"""A hostile document ends only the child process that reads it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from weft.memory.documents import Document
from weft.server.memory import reading_process
from weft.server.memory.reading_process import Failed, ReadJob, ReadResult, Result, _run_in_child


def read(path: Path) -> Result:
    job = msgspec.msgpack.encode(ReadJob(str(path), path.name))
    return msgspec.msgpack.decode(_run_in_child(job), type=Result)


def test_a_document_that_takes_too_long_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parser of the standard library takes minutes for comments that never end. Here the child inherits the memory
    of the process of the tests, which may be above the limit."""
    path = tmp_path / "a.html"
    path.write_bytes(b"<html>" + b"<a " * 400_000)
    monkeypatch.setattr(reading_process, "SECONDS", 0.5)
    monkeypatch.setattr(reading_process, "MEMORY_BYTES", 1 << 45)
    failed = read(path)
    assert isinstance(failed, Failed) and "processor time" in failed.message


def test_a_document_that_needs_too_much_memory_fails(tmp_path: Path) -> None:
    """In a process of its own: this one may hold enough free memory for the document, whatever the limit is."""
    path = tmp_path / "a.txt"
    path.write_bytes(b"word " * 2_000_000)
    program = (
        "import sys, msgspec; from weft.server.memory import reading_process as r; r.MEMORY_BYTES = 16 << 20; "
        "job = msgspec.msgpack.encode(r.ReadJob(sys.argv[1], 'a.txt')); sys.stdout.buffer.write(r._run_in_child(job))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, check=True, timeout=60
    )
    failed = msgspec.msgpack.decode(done.stdout, type=Result)
    assert isinstance(failed, Failed) and "MiB of memory" in failed.message


def test_after_a_failure_the_next_document_is_read(tmp_path: Path) -> None:
    path = tmp_path / "gone.txt"
    gone = read(path)
    assert isinstance(gone, Failed) and "deleted" in gone.message
    path.write_text("some words")
    assert read(path) == ReadResult(Document("some words"), ["some", "words"])
    with path.open("wb") as file:
        file.truncate(reading_process.MAX_FILE_BYTES + 1)
    failed = read(path)
    assert isinstance(failed, Failed) and "allowed" in failed.message
