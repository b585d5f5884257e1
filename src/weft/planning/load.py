"""A load that can be simulated several times: a trace or a description, at its own speed or another."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.errors import InvalidRequestError
from weft.planning.description import Description, described, parse_lengths
from weft.planning.replica import PlannedRequest
from weft.planning.traces import detect, read_trace

_LENGTHS = {"prompt_tokens": "prompt", "max_tokens": "answer", "turns": "turns"}
_COUNTS = ("requests", "burst", "prefix", "prefixes", "seed")
_SECONDS = ("rate", "pause")
FIELDS = (*_SECONDS, *_COUNTS, *_LENGTHS)
"""The fields of a description, in a file or as options."""


@dataclass(frozen=True)
class Load:
    """Where requests come from. Each simulation reads them anew."""

    context: int
    """The longest sequence that is allowed."""
    description: Description | None = None
    trace: Path | None = None
    kind: str = "auto"
    limit: int | None = None
    speed: float = 1.0
    """2: the requests arrive in half the time."""

    def requests(self, speed: float = 1.0) -> Iterator[PlannedRequest]:
        if self.description is not None:
            return described(self.description, context=self.context, speed=speed * self.speed)
        assert self.trace is not None
        return read_trace(
            self.trace, self.kind, context=self.context, limit=self.limit, speed=speed * self.speed
        )


@dataclass(frozen=True)
class LoadSummary:
    """What a load asks for."""

    name: str
    requests: int
    seconds: float
    """From the first arrival to the last."""
    prompt_tokens: float
    """Mean tokens of a prompt."""
    answer_tokens: float
    conversations: int
    cut: int = 0
    """Requests that were longer than the context. Their lengths were cut."""

    @property
    def rate(self) -> float:
        return self.requests / self.seconds if self.seconds else 0.0


def summarise_load(load: Load) -> LoadSummary:
    """Reads the load once, so that errors in it are found before a simulation."""
    count = prompt = answer = cut = 0
    last, sessions = 0.0, set[str]()
    for request in load.requests():
        count += 1
        prompt += request.prompt_tokens
        answer += request.answer_tokens
        cut += request.is_cut
        if request.session is not None:
            sessions.add(request.session)
        last = request.at
    if load.trace is None:
        name = "a description"
    else:
        name = f"{load.trace.name} ({detect(load.trace) if load.kind == 'auto' else load.kind})"
    return LoadSummary(name, count, last, prompt / count, answer / count, len(sessions), cut)


def read_description(path: Path | None, given: Mapping[str, Any]) -> Description:
    """A description from a TOML file, whose values those in `given` replace. None: not given."""
    values: dict[str, Any] = {}
    if path is not None:
        try:
            values = tomllib.loads(path.read_bytes().decode())
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InvalidRequestError(f"--load {path}: cannot be read: {reason}", field="load") from error
        except tomllib.TOMLDecodeError as error:
            raise InvalidRequestError(f"--load {path}: is not TOML: {error}", field="load") from error
        unknown = [name for name in values if name not in FIELDS]
        if unknown:
            raise InvalidRequestError(
                f"--load {path}: unknown field {unknown[0]!r:.60}; known: {', '.join(FIELDS)}", field="load"
            )
    values |= {name: value for name, value in given.items() if value is not None}
    if "rate" not in values:
        raise InvalidRequestError(
            "there is no load: give --trace FILE, or --load FILE, or --rate with --prompt-tokens and --max-tokens",
            field="rate",
        )
    fields: dict[str, Any] = {"requests": 1000}
    for name, value in values.items():
        if name in _LENGTHS:
            fields[_LENGTHS[name]] = parse_lengths(value, name)
        elif name in _COUNTS:
            if not isinstance(value, int) or isinstance(value, bool):
                raise InvalidRequestError(f"{name} is {value!r:.40}; it must be a whole number", field=name)
            fields[name] = value
        else:
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise InvalidRequestError(f"{name} is {value!r:.40}; it must be a number", field=name)
            fields[name] = float(value)
    return Description(**fields)
