"""Reads loads from files, one request at a time: weft's event log, OpenAI-style access logs, Azure and Mooncake traces.

Prompts with a common beginning get the same token ids there. How it is known: a weft log has the tokens; a Mooncake trace has
ids of blocks of 512 tokens; the others do not say it, so their prompts share nothing.
"""

from __future__ import annotations

import csv
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from weft.errors import InvalidRequestError
from weft.planning.replica import PlannedRequest, Segment
from weft.request import MAX_TOKENS, Priority

MOONCAKE_BLOCK = 512
"""Tokens of a block of `hash_ids` in the Mooncake traces."""
LOG_BLOCK = 16
"""Tokens of a segment that is made of a weft log."""
_MAX_LINE = 64 << 20
_UNIQUE = 1 << 40
"""Token ids of text that only one request has begin here. Those of shared text are below."""
_UNIQUE_ROOM = 1 << 20
_LATEST = 1e15
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
FORMATS = ("weft", "openai", "azure", "mooncake")
_WRITE = {
    "weft": "give the event log of a weft engine (log_path)",
    "openai": 'each line needs "timestamp" (or "created", "time"), and "usage" with "prompt_tokens" and "completion_tokens"',
    "azure": f"the columns must be {', '.join(_AZURE)}",
    "mooncake": 'each line needs "timestamp" (ms), "input_length", "output_length" and "hash_ids"',
}


class Raw(NamedTuple):
    """A request of a file."""

    at: float
    segments: list[Segment]
    answer_tokens: int
    session: str | None = None
    priority: int = 1
    is_idle_work: bool = False


_WRONG = (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError, csv.Error)
"""What parsers raise on content of another form."""


class TraceError(InvalidRequestError):
    """A trace cannot be used. The message names the line and what it must have."""


@contextmanager
def _readable(where: str, kind: str) -> Iterator[None]:
    """Turns errors of a parser into one that says what the file must have."""
    try:
        yield
    except InvalidRequestError:
        raise
    except _WRONG as error:
        write = _WRITE.get(kind, "give a trace as UTF-8 text")
        reason = f"{type(error).__name__}: {error}"
        raise TraceError(f"{where}: not of this form ({reason:.120}); {write}") from None


def unique_segment(number: int, count: int) -> Segment:
    """Text that no other request has."""
    return _UNIQUE + number * _UNIQUE_ROOM, count


def read_trace(
    path: Path, kind: str = "auto", *, context: int, limit: int | None = None, speed: float = 1.0
) -> Iterator[PlannedRequest]:
    """The requests of a file in order of arrival, the first at 0. `context`: the longest sequence that is allowed. `limit`:
    the most requests. `speed`: 2 halves the times between requests."""
    if kind == "auto":
        with _readable(str(path), ""):
            kind = detect(path)
    if kind not in FORMATS:
        raise TraceError(f"--format is {kind!r}; allowed: auto, {', '.join(FORMATS)}", field="format")
    first: float | None = None
    last = 0.0
    number = 0
    for line, (at, segments, answer, session, priority, is_idle_work) in _lines(path, kind):
        if limit is not None and number >= limit:
            break
        first = at if first is None else first
        since = (at - first) / speed
        prompt = sum(count for _, count in segments)
        where = f"{path}, line {line}"
        if since < last - 1e-6:
            raise TraceError(
                f"{where}: the time is {last - since:.3f} s before that of an earlier request; sort the file by time"
            )
        if prompt < 1 or answer < 1:
            raise TraceError(
                f"{where}: the prompt has {prompt} tokens and the answer {answer}; both must have at least 1. {_WRITE[kind]}"
            )
        if prompt + answer > context:
            raise TraceError(
                f"{where}: the prompt has {prompt} tokens and the answer {answer}, together {prompt + answer}; the context of "
                f"the profile is {context}. Plan with a profile that has a longer context, or leave such requests out",
                code="context_length_exceeded",
            )
        last = max(last, since)
        yield PlannedRequest(number, last, tuple(segments), answer, session, priority, is_idle_work)
        number += 1
    if not number:
        raise TraceError(f"{path} has no requests. {_WRITE[kind]}")


def _lines(path: Path, kind: str) -> Iterator[tuple[int, Raw]]:
    with _readable(str(path), kind):
        yield from _READERS[kind](path)


def detect(path: Path) -> str:
    """The format of a file, by its first line."""
    with _open(path) as file:
        line = file.readline(1 << 20).strip()
    if not line:
        raise TraceError(f"{path} is empty; give a trace")
    if not line.startswith("{"):
        if line.split(",")[0].strip().upper() == "TIMESTAMP":
            return "azure"
        raise TraceError(
            f"{path}: the columns are {line!r:.80}. For a CSV trace {_WRITE['azure']}", field="trace"
        )
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        return "weft" if line.startswith('{"event": "start"') else "openai"
    if document.get("event") == "start":
        return "weft"
    return "mooncake" if "input_length" in document or "hash_ids" in document else "openai"


# ---------------------------------------------------------------------- formats


def _azure(path: Path) -> Iterator[tuple[int, Raw]]:
    with _open(path) as file:
        reader = csv.reader(file)
        columns = [one.strip() for one in next(reader, [])]
        if tuple(columns) != _AZURE:
            raise TraceError(
                f"{path}, line 1: the columns are {', '.join(columns)!r:.100}; {_WRITE['azure']}",
                field="trace",
            )
        for row in reader:
            where = f"{path}, line {reader.line_num}"
            if not row:
                continue
            if len(row) != len(_AZURE):
                raise TraceError(f"{where}: {len(row)} columns; {_WRITE['azure']}")
            prompt, answer = _count(row[1], where, "azure"), _count(row[2], where, "azure")
            at = _moment(row[0], where)
            yield reader.line_num, Raw(at, [unique_segment(reader.line_num, prompt)], answer)


def _mooncake(path: Path) -> Iterator[tuple[int, Raw]]:
    for line, document in _documents(path, "mooncake"):
        where = f"{path}, line {line}"
        names = ("timestamp", "input_length", "output_length", "hash_ids")
        at, prompt, answer, ids = (document.get(name) for name in names)
        prompt, answer = _count(prompt, where, "mooncake"), _count(answer, where, "mooncake")
        if not isinstance(ids, list) or not all(type(one) is int and 0 <= one < 1 << 29 for one in ids):
            raise TraceError(f"{where}: hash_ids is {ids!r:.60}; {_WRITE['mooncake']}")
        if len(ids) * MOONCAKE_BLOCK < prompt or (len(ids) - 1) * MOONCAKE_BLOCK >= max(prompt, 1):
            raise TraceError(
                f"{where}: {len(ids)} hash_ids for {prompt} tokens; each stands for {MOONCAKE_BLOCK} tokens"
            )
        segments = [(one * MOONCAKE_BLOCK, MOONCAKE_BLOCK) for one in ids]
        if segments:
            segments[-1] = (segments[-1][0], prompt - (len(ids) - 1) * MOONCAKE_BLOCK)
        yield line, Raw(_number(at, where, "timestamp") / 1000, segments, answer)


def _openai(path: Path) -> Iterator[tuple[int, Raw]]:
    for line, document in _documents(path, "openai"):
        where = f"{path}, line {line}"
        usage = document.get("usage")
        if not isinstance(usage, dict):
            raise TraceError(f"{where}: usage is {usage!r:.60}; {_WRITE['openai']}")
        at = next((document[name] for name in ("timestamp", "created", "time") if name in document), None)
        if at is None:
            raise TraceError(f"{where}: there is no time; {_WRITE['openai']}")
        seconds = _moment(at, where) if isinstance(at, str) else _number(at, where, "timestamp")
        prompt = _count(usage.get("prompt_tokens"), where, "openai")
        answer = _count(usage.get("completion_tokens"), where, "openai")
        session = document.get("session_id")
        if session is not None and not isinstance(session, str):
            raise TraceError(f"{where}: session_id is {session!r:.60}; it must be text")
        yield line, Raw(seconds, [unique_segment(line, prompt)], answer, session)


def _weft(path: Path) -> Iterator[tuple[int, Raw]]:
    """The requests of an event log that got tokens. Their answers have the recorded lengths, so the log is read twice: the end
    of a request comes after its beginning."""
    lengths = _answer_lengths(path)
    for line, event in read_events(path):
        if event.get("event") != "add":
            continue
        with _readable(f"{path}, line {line}", "weft"):
            found = [
                Raw(
                    _number(event["clock"][0] if event["clock"] else 0.0, f"{path}, line {line}", "clock"),
                    _segments_of(request["prompt"], request.get("cache_salt", "")),
                    lengths[request["request_id"]],
                    request.get("session_id"),
                    Priority(request.get("priority", 1)),
                    bool(request.get("is_idle_work", False)),
                )
                for request in (one["request"] for one in event["requests"])
                if lengths.get(request["request_id"])
            ]
        for one in found:
            yield line, one


def _answer_lengths(path: Path) -> dict[str, int]:
    """How many tokens each request of a log got. A step that failed gives none."""
    lengths: dict[str, int] = {}
    plans: list[dict[str, Any]] = []
    for line, event in read_events(path):
        where = f"{path}, line {line}"
        with _readable(where, "weft"):
            _count_answers(event, where, lengths, plans)
    return lengths


def _count_answers(
    event: dict[str, Any], where: str, lengths: dict[str, int], plans: list[dict[str, Any]]
) -> None:
    kind = event.get("event")
    if kind == "plan" and event["plan"] is not None:
        plans.append(event["plan"])
    elif kind == "fail":
        plans.clear()
    elif kind == "finish":
        lengths[event["id"]] = _count(event["num_tokens"], where, "weft")
    elif kind == "apply":
        plan, tokens = plans.pop(0), iter(event["result"]["tokens"])
        num_decodes, drafts = plan["num_decodes"], plan["drafts"]
        for index, request_id in enumerate(plan["request_ids"]):
            if not plan["samples"][index]:
                continue
            count, draft = (
                1,
                drafts[index - num_decodes] if 0 <= index - num_decodes < len(drafts) else [],
            )
            sampled = [next(tokens, None) for _ in range(1 + len(draft))]
            for expected, token in zip(draft, sampled, strict=False):
                if expected != token:
                    break
                count += 1
            lengths[request_id] = lengths.get(request_id, 0) + count


def _segments_of(tokens: list[int], salt: str) -> list[Segment]:
    """Segments of `LOG_BLOCK` tokens whose ids follow from their content, and that of all before: equal prefixes stay
    equal, and the text itself is not kept."""
    segments = []
    chain = hashlib.sha256(salt.encode()).digest()
    for start in range(0, len(tokens), LOG_BLOCK):
        part = tokens[start : start + LOG_BLOCK]
        chain = hashlib.sha256(chain + repr(part).encode()).digest()
        segments.append((int.from_bytes(chain[:4], "little") * LOG_BLOCK, len(part)))
    return segments


_READERS: dict[str, Callable[[Path], Iterator[tuple[int, Raw]]]] = {
    "azure": _azure,
    "mooncake": _mooncake,
    "openai": _openai,
    "weft": _weft,
}

# ---------------------------------------------------------------------- parsing


def read_events(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The events of a log. A cut last line is left out."""
    from weft.engine.replay import LOG_VERSION

    with _readable(str(path), "weft"), _open(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(_MAX_LINE), ""), 1):
            try:
                event = json.loads(line)
            except (ValueError, RecursionError) as error:
                if not line.endswith("\n"):
                    return
                raise TraceError(f"{path}, line {number}: not JSON ({error}); {_WRITE['weft']}") from None
            if not isinstance(event, dict):
                raise TraceError(f"{path}, line {number}: not a JSON object; {_WRITE['weft']}")
            if number == 1 and event.get("version") != LOG_VERSION:
                raise TraceError(
                    f"{path}: the log has version {event.get('version')!r:.20}, and this weft reads {LOG_VERSION}; "
                    "record it again"
                )
            yield number, event


def _documents(path: Path, kind: str) -> Iterator[tuple[int, dict[str, Any]]]:
    with _open(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(_MAX_LINE), ""), 1):
            if not line.strip():
                continue
            try:
                document = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise TraceError(f"{path}, line {number}: not JSON ({error}); {_WRITE[kind]}") from None
            if not isinstance(document, dict):
                raise TraceError(f"{path}, line {number}: not a JSON object; {_WRITE[kind]}")
            yield number, document


def _open(path: Path) -> TextIO:
    try:
        file = path.open(encoding="utf-8-sig", newline="")
        file.read(0)
        return file
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise TraceError(f"{path} cannot be read: {reason}", field="trace") from error


def _count(value: Any, where: str, kind: str) -> int:
    """A number of tokens."""
    if isinstance(value, str) and len(value) <= 20 and value.strip().isdecimal():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_TOKENS:
        return value
    raise TraceError(f"{where}: {value!r:.40} is no number of tokens; {_WRITE[kind]}")


def _number(value: Any, where: str, name: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _LATEST:
        return float(value)
    raise TraceError(f"{where}: {name} is {value!r:.40}; it must be a number from 0 to {_LATEST:g}")


def _moment(text: str, where: str) -> float:
    """Seconds of '2023-11-16 18:15:46.6805900', or of a number."""
    text = text.strip()
    try:
        return _number(float(text), where, "the time")
    except ValueError as error:
        if isinstance(error, TraceError):
            raise
    head, dot, fraction = text.partition(".")
    digits = "".join(itertools.takewhile(str.isdecimal, fraction))
    rest = fraction[len(digits) :]
    try:
        moment = datetime.fromisoformat(head + rest)
        if moment.tzinfo is None:
            moment = moment.replace(
                tzinfo=UTC
            )  # the zone of this machine may have a change of the clock in between
        return moment.timestamp() + (float(f"0.{digits}") if dot else 0.0)
    except ValueError:
        raise TraceError(
            f"{where}: {text!r:.40} is no time; write seconds, or as 2023-11-16 18:15:46.68"
        ) from None
