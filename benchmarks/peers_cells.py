"""The cells of the `peers` tables: all tries of an engine on a workload, which one counts, and their files."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine_speed import Speed
from weft.bench.serve_machine import DISTURBED

START = "start"


@dataclass(frozen=True)
class Try:
    """One run of an engine on a workload, or one start of it. Times are in seconds, memory in bytes."""

    engine: str
    work: str
    round: int
    attempt: int
    """The number of the run within its round. A run after the first repeats a disturbed one."""
    seconds: float
    """Time from the first request to the last token; for a start, from the process start to the first token."""
    others: float | None
    """The fraction of the machine's CPU time that neither the engine nor the benchmark used."""
    loudest: tuple[str, ...] = ()
    speed: Speed | None = None
    """The lower of two speeds of the machine: right before the run and right after it. None: not measured."""
    tokens_per_second: float | None = None
    """Output tokens per second over the whole time, prefill included."""
    output_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens from the prefix cache, if the engine reports them."""
    first_token_p50: float | None = None
    first_token_p99: float | None = None
    gap_p50: float | None = None
    gap_p99: float | None = None
    peak_rss: int | None = None
    pss: int | None = None

    @property
    def rate(self) -> float:
        """The speed by which tries are ordered: tokens per second, or starts per second."""
        return 1 / self.seconds if self.tokens_per_second is None else self.tokens_per_second

    def troubles(self, best: Speed | None) -> list[str]:
        """Sentences about what disturbed the run; empty if nothing did. `best` is the best speed of the machine."""
        found = []
        if self.others is not None and self.others > DISTURBED:
            names = f" ({', '.join(self.loudest)})" if self.loudest else ""
            found.append(f"other processes used {self.others:.0%} of the machine{names}")
        if self.speed is not None and best is not None:
            found += self.speed.shortfalls(best)
        return found

    def line(self, best: Speed | None) -> str:
        """A status line for the terminal."""
        result = (
            f"{self.seconds:.2f} s"
            if self.tokens_per_second is None
            else f"{self.tokens_per_second:.1f} tokens/s"
        )
        troubles = self.troubles(best)
        if troubles:
            result += f", DISTURBED: {'; '.join(troubles)}"
        return f"{self.work:12} {self.engine:32} {result}"

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Try:
        loudest, speed = tuple(document["loudest"]), _speed_from(document["speed"])
        return cls(**{**document, "loudest": loudest, "speed": speed})


@dataclass(frozen=True)
class Cell:
    """One cell of the tables: all its tries, in order."""

    tries: tuple[Try, ...]
    best: Speed | None
    """The best speed of the machine in the whole run: the reference for whether a try was disturbed."""

    @property
    def engine(self) -> str:
        return self.tries[0].engine

    @property
    def work(self) -> str:
        return self.tries[0].work

    @property
    def undisturbed(self) -> list[Try]:
        return [one for one in self.tries if not one.troubles(self.best)]

    @property
    def is_disturbed(self) -> bool:
        """Whether every try was disturbed."""
        return not self.undisturbed

    @property
    def compared(self) -> list[Try]:
        """The tries that count, slowest first: the undisturbed ones, or all if every try was disturbed."""
        return sorted(self.undisturbed or self.tries, key=lambda one: one.rate)

    @property
    def figure(self) -> Try:
        """The median try; of an even number, the slower of the middle two. All figures shown are from this one run."""
        return self.compared[(len(self.compared) - 1) // 2]

    @property
    def spread(self) -> float:
        """Speed of the fastest of the tries that count, relative to the slowest."""
        return self.compared[-1].rate / self.compared[0].rate

    def document(self) -> dict[str, Any]:
        return {
            "best": None if self.best is None else dataclasses.asdict(self.best),
            "tries": [dataclasses.asdict(one) for one in self.tries],
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Cell:
        tries = tuple(Try.from_document(one) for one in document["tries"])
        if not tries:
            raise ValueError("a cell has no tries")
        return cls(tries, _speed_from(document["best"]))


def _speed_from(document: Mapping[str, Any] | None) -> Speed | None:
    return None if document is None else Speed(**document)


class CellFiles:
    """Stores cells as files, so that an interrupted run can continue. Without a folder nothing is stored."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def load(self, engine: str, work: str) -> Cell | None:
        """The stored cell; None if there is no file, or a file of another format."""
        if self._folder is None:
            return None
        try:
            return Cell.from_document(json.loads(self._path(self._folder, engine, work).read_text()))
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def save(self, cell: Cell) -> None:
        if self._folder is not None:
            path = self._path(self._folder, cell.engine, cell.work)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(cell.document()) + "\n")

    @staticmethod
    def _path(folder: Path, engine: str, work: str) -> Path:
        return folder / f"{plain_name(engine)}.{work}.json"


def plain_name(name: str) -> str:
    """`name` with only such characters as may be in a file name."""
    return "".join(letter if letter.isalnum() or letter in "._" else "-" for letter in name)
