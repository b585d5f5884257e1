"""The requests that a server gets, and when: workloads, arrival processes and trace files, all fixed by a seed.

Prompts are consecutive slices of English text (Python's help topics): real text, without shared prefixes except in the
Wshare workloads.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.errors import InvalidRequestError

WORKLOADS = ("W1", "W8", "W32", "Wmix", "Wshare", "Wshare-warm")
TOKENS_PER_RUN = 40_000
"""Tokens of text reserved for one run, more than the workloads use. The next run starts after them, so that it gets no
prefix hits."""


@dataclass(frozen=True)
class Item:
    """One request: the prompt as token ids or text, the length of the answer, and the arrival time in seconds."""

    prompt: tuple[int, ...] | str
    max_tokens: int
    at: float = 0.0


@dataclass(frozen=True)
class Phase:
    """Requests that are measured together: sent at their arrival times, or, with `clients`, in a closed loop."""

    name: str
    items: tuple[Item, ...]
    clients: int | None = None
    rate: float | None = None
    """Average requests per second; None if the arrivals have no rate."""
    warm_up: tuple[Item, ...] = ()
    """Requests that are sent before the clock starts. They are not measured."""


@dataclass(frozen=True)
class Lengths:
    """Token counts, drawn uniformly from `low` to `high`."""

    low: int
    high: int

    def draw(self, source: random.Random) -> int:
        return source.randint(self.low, self.high)


class Text:
    """English text as token ids, returned in consecutive slices. After the end it starts again."""

    def __init__(self, encode: Callable[[str], Sequence[int]], run: int = 0) -> None:
        from pydoc_data.topics import topics  # half a megabyte: imported only if needed

        self._ids = encode("\n".join(topics[name] for name in sorted(topics)))
        self._next = run * TOKENS_PER_RUN

    def take(self, count: int) -> tuple[int, ...]:
        start, self._next = self._next, self._next + count
        return tuple(self._ids[(start + index) % len(self._ids)] for index in range(count))


def workloads(names: Sequence[str], text: Text) -> list[Phase]:
    """The named workloads. The prompts of each do not depend on which others are named."""
    unknown = [name for name in names if name not in WORKLOADS]
    if unknown:
        raise InvalidRequestError(
            f"no workload {unknown[0]!r}; there are {', '.join(WORKLOADS)}, and 'all'", field="workload"
        )
    source = random.Random(1234)
    one = tuple(Item(text.take(128), 128) for _ in range(3))
    eight = tuple(Item(text.take(128), 128) for _ in range(8))
    thirty_two = tuple(Item(text.take(128), 128) for _ in range(32))
    mix, clock = [], 0.0
    for _ in range(64):
        prompt = text.take(source.randint(16, 512))
        mix.append(Item(prompt, source.randint(16, 256), clock))
        clock += source.expovariate(16.0)
    prefix = text.take(512)
    share = tuple(Item(prefix + text.take(32), 64) for _ in range(32))
    warm = tuple(Item(prefix + text.take(32), 64) for _ in range(32))
    # Wshare-warm needs the prefix in the server's cache. Without Wshare before it, a warm-up request puts it there.
    warm_up = () if "Wshare" in itertools.takewhile("Wshare-warm".__ne__, names) else (Item(prefix, 1),)
    phases = {
        "W1": Phase("W1", one, clients=1),
        "W8": Phase("W8", eight),
        "W32": Phase("W32", thirty_two),
        "Wmix": Phase("Wmix", tuple(mix), rate=16.0),
        "Wshare": Phase("Wshare", share),
        "Wshare-warm": Phase("Wshare-warm", warm, warm_up=warm_up),
    }
    return [phases[name] for name in names]


def poisson_times(count: int, rate: float, seed: int) -> list[float]:
    """Independent arrivals, `rate` per second on average. The first is at 0."""
    source = random.Random(seed)
    gaps = (source.expovariate(rate) for _ in range(count - 1))
    return list(itertools.accumulate(gaps, initial=0.0))


def burst_times(count: int, size: int, every: float) -> list[float]:
    """`count` arrivals in bursts of `size`, one burst every `every` seconds."""
    return [every * (number // size) for number in range(count)]


def make_items(
    text: Text, times: Iterable[float], prompt_tokens: Lengths, max_tokens: Lengths, seed: int
) -> tuple[Item, ...]:
    source = random.Random(seed)
    return tuple(Item(text.take(prompt_tokens.draw(source)), max_tokens.draw(source), at) for at in times)


def read_trace(path: Path) -> tuple[Item, ...]:
    """Requests from a file of JSON lines: {"at": seconds, "prompt": text or token ids, "max_tokens": count}."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"{path}: {error}", field="trace") from error
    items = [_trace_item(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not items:
        raise InvalidRequestError(f"{path} has no requests; each line is one", field="trace")
    return tuple(sorted(items, key=lambda item: item.at))


def _trace_item(path: Path, number: int, line: str) -> Item:
    def refuse(what: str) -> InvalidRequestError:
        return InvalidRequestError(
            f'{path}, line {number}: {what}; write {{"at": seconds, "prompt": text or token ids, "max_tokens": count}}',
            field="trace",
        )

    try:
        fields: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise refuse(f"not JSON ({error})") from None
    if not isinstance(fields, dict):
        raise refuse("not a JSON object")
    at, prompt, max_tokens = (fields.get(name) for name in ("at", "prompt", "max_tokens"))
    if not isinstance(at, int | float) or isinstance(at, bool) or not 0 <= at < math.inf:
        raise refuse(f"'at' is {at!r}, not a number of seconds of at least 0")
    if not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1:
        raise refuse(f"'max_tokens' is {max_tokens!r}, not a whole number of at least 1")
    if isinstance(prompt, list) and prompt and all(_is_token_id(token) for token in prompt):
        return Item(tuple(prompt), max_tokens, float(at))
    if isinstance(prompt, str) and prompt:
        return Item(prompt, max_tokens, float(at))
    raise refuse("'prompt' is neither text nor a list of token ids, or is empty")


def _is_token_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
