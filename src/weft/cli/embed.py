"""`weft embed`: makes vectors of texts: arguments, lines of text, or JSON lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from weft.cli.lines import MAX_LINE_BYTES
from weft.cli.vector_models import embedder_path
from weft.errors import InvalidRequestError, WeftError
from weft.json_lines import read_lines

if TYPE_CHECKING:
    from weft.local_vectors import LocalVectors, TextKind

_GROUP = 1024
"""Lines that are read, computed and written at a time."""


@dataclass(frozen=True)
class _Text:
    """One input. `error` says why there is no text."""

    names: dict[str, Any]
    text: str = ""
    error: str = ""


def embed_command(
    texts: list[str],
    *,
    input_path: Path | None,
    lines_path: Path | None,
    output_path: Path | None,
    overwrite: bool,
    plain: bool,
    model: str,
    kind: TextKind | None,
    dimensions: int | None,
    truncate: bool,
    threads: int | None,
    quantize: str | None,
) -> None:
    sources = [bool(texts), input_path is not None, lines_path is not None]
    if sum(sources) > 1:
        raise InvalidRequestError("pass texts, --lines or --input; one of them", field="input")
    if not any(sources):
        if sys.stdin.isatty():
            raise InvalidRequestError(
                "no text is given; pass one, --lines PATH or --input PATH ('-': standard input)", field="text"
            )
        lines_path = Path("-")
    path = None if output_path is None or str(output_path) == "-" else output_path
    if path is not None and path.exists() and not overwrite:
        raise InvalidRequestError(f"{path}: exists; --overwrite replaces it", field="output")
    with _opened_input(input_path or lines_path) as source:
        if input_path is not None:
            inputs = _json_lines(source)
        else:
            inputs = _plain_lines(source) if lines_path is not None else _arguments(texts)
        from weft.llm import LLM  # imported after the files are checked: it imports numpy and the tokenizer

        with LLM(embedder_path(model), threads=threads, quantize=quantize) as llm:
            vectors = llm.vectors
            vectors.check(kind, dimensions)
            # Opened only now: a model that fails to load must not empty an existing file.
            with _opened_output(path) as output:
                num_failed, num_lines = _run(vectors, inputs, output, kind, dimensions, truncate, plain)
    if num_failed:
        raise WeftError(f"{num_failed} of {num_lines} texts failed")


def _run(
    vectors: LocalVectors,
    inputs: Iterator[_Text],
    output: IO[bytes],
    kind: TextKind | None,
    dimensions: int | None,
    truncate: bool,
    plain: bool,
) -> tuple[int, int]:
    """Computes and writes the vectors of all inputs. Returns how many texts failed, and how many there were."""
    num_failed = num_lines = 0
    while group := list(islice(inputs, _GROUP)):
        good = [one for one in group if not one.error]
        rows, errors = vectors.embed_each([one.text for one in good], kind, dimensions, truncate)
        row_of = {id(one): index for index, one in enumerate(good)}
        for one in group:
            index = row_of.get(id(one))
            error = one.error if index is None else str(errors[index]) if index in errors else ""
            num_failed += bool(error)
            if plain and not error:
                line = " ".join(f"{number:.9g}" for number in rows[index].tolist())
            elif plain:
                # An empty line is printed, so that line N of the output still belongs to line N of the input.
                print(f"line {num_lines + 1}: {error}", file=sys.stderr)
                line = ""
            else:
                result = {"error": {"message": error}} if error else {"embedding": rows[index].tolist()}
                line = json.dumps({**one.names, **result}, ensure_ascii=False)
            output.write(line.encode() + b"\n")
            num_lines += 1
        output.flush()
    return num_failed, num_lines


def _arguments(texts: list[str]) -> Iterator[_Text]:
    return (_Text({"index": index}, text) for index, text in enumerate(texts))


def _plain_lines(source: IO[bytes]) -> Iterator[_Text]:
    """One text in each line. An empty line is an error and not skipped: line N of the output belongs to line N of the
    input."""
    for index, line in zip(count(), read_lines(source, MAX_LINE_BYTES)):
        names = {"index": index}
        if isinstance(line, InvalidRequestError):
            yield _Text(names, error=str(line))
            continue
        try:
            text = line.decode().removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError as error:
            yield _Text(names, error=f"is not UTF-8 at byte {error.start}")
            continue
        yield _Text(names, text) if text else _Text(names, error="the line is empty")


def _json_lines(source: IO[bytes]) -> Iterator[_Text]:
    """A line is a JSON string, or an object with "text" (or "input") and optionally "id"."""
    for index, line in zip(count(), read_lines(source, MAX_LINE_BYTES)):
        if isinstance(line, InvalidRequestError):
            yield _Text({"index": index}, error=str(line))
        elif not line.isspace():
            yield _json_line(index, line)


def _json_line(index: int, line: bytes) -> _Text:
    names: dict[str, Any] = {"index": index}
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        return _Text(names, error=f"the line is not JSON: {error}")
    if isinstance(content, dict):
        names = {"id": content["id"]} if isinstance(content.get("id"), str | int) else names
        content = content.get("text", content.get("input"))
    if not isinstance(content, str) or not content:
        return _Text(names, error='the line is neither a text nor an object with "text"')
    return _Text(names, content)


@contextmanager
def _opened_input(path: Path | None) -> Iterator[IO[bytes]]:
    if path is None or str(path) == "-":
        yield sys.stdin.buffer
        return
    try:
        file = path.open("rb")
    except OSError as error:
        raise InvalidRequestError(f"{path}: cannot be read: {error.strerror}", field="input") from error
    with file:
        yield file


@contextmanager
def _opened_output(path: Path | None) -> Iterator[IO[bytes]]:
    if path is None:
        yield sys.stdout.buffer
        return
    try:
        file = path.open("wb")
    except OSError as error:
        raise InvalidRequestError(f"{path}: cannot be written: {error.strerror}", field="output") from error
    with file:
        yield file
