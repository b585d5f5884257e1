"""The worker process that reads documents and splits them.

A document may be hostile. Each job runs in a forked child with limits on processor time and memory, so a document can end
only that child.
"""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import msgspec

from weft.memory.documents import ChunkSize, Document, DocumentError, Passage
from weft.memory.reading import read_document
from weft.memory.splitting import split, words_of
from weft.server.text_work.worker import ignore_signals, serve_jobs

SECONDS = 60
"""Maximum processor time of one job."""
MEMORY_BYTES = 1 << 30
MAX_FILE_BYTES = 64 << 20
_MAX_RESULT_BYTES = 512 << 20


class ReadJob(msgspec.Struct, frozen=True, tag=True):
    path: str
    name: str


class SplitJob(msgspec.Struct, frozen=True, tag=True):
    document: Document
    size: ChunkSize
    tokens: dict[str, int]


class ReadResult(msgspec.Struct, frozen=True, tag=True):
    document: Document
    words: list[str]


class SplitResult(msgspec.Struct, frozen=True, tag=True):
    passages: list[Passage]


class Failed(msgspec.Struct, frozen=True, tag=True):
    message: str
    code: str


Job = ReadJob | SplitJob
Result = ReadResult | SplitResult | Failed
_jobs = msgspec.msgpack.Decoder(Job)


def _result(content: bytes) -> Result:
    """Does one job. An error of the document is a result, not an exception."""
    try:
        job = _jobs.decode(content)
        if isinstance(job, SplitJob):
            return SplitResult(split(job.document, job.size, job.tokens))
        path = Path(job.path)
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            return Failed(f"the file has {size} bytes; allowed: {MAX_FILE_BYTES}; split it", "invalid_file")
        document = read_document(path.read_bytes(), job.name)
        return ReadResult(document, sorted(words_of(document)))
    except FileNotFoundError:
        return Failed("the file was deleted", "invalid_file")
    except DocumentError as error:
        return Failed(str(error), error.code)
    except MemoryError:
        return _no_memory()
    except Exception as error:  # a bug of a parser fails only this file; the message names the exception
        return Failed(f"the file cannot be read ({type(error).__name__}); it may be broken", "invalid_file")


def _no_memory() -> Failed:
    return Failed(
        f"reading the file needs more than {MEMORY_BYTES >> 20} MiB of memory; split it", "invalid_file"
    )


def _run_in_child(job: bytes) -> bytes:
    """Runs a job in a forked child. A fork is cheap: it copies only page tables."""
    source, drain = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the default action ends the child
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
            with open(drain, "wb") as pipe:
                pipe.write(msgspec.msgpack.encode(_result(job)))
        except BaseException:
            os._exit(1)
        os._exit(0)
    os.close(drain)
    with open(source, "rb") as pipe:
        content = pipe.read(_MAX_RESULT_BYTES)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == 0:
        return content
    if status == -signal.SIGPROF:
        failed = Failed(
            f"reading the file takes more than {SECONDS} s of processor time; split it", "invalid_file"
        )
    else:
        failed = _no_memory()
    return msgspec.msgpack.encode(failed)


def main() -> None:
    ignore_signals()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    serve_jobs(_run_in_child)


if __name__ == "__main__":
    main()
