"""The cells of `python -m benchmarks peers`: every try of an engine on a workload, which of them counts, and the files they are kept in."""

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
    """One engine once on one workload, or one start of it. Times are in seconds, memory in bytes."""

    engine: str
    work: str
    round: int
    attempt: int
    """Within its round: others than the first are there because those before were disturbed."""
    seconds: float
    """Of the work from the first request to the last token; of a start, to the first token."""
    others: float | None
    """The share of the machine's CPU time that went to neither the engine nor the bench."""
    loudest: tuple[str, ...] = ()
    speed: Speed | None = None
    """What the machine gave right before and right after, the lower of each figure; None: nobody could look."""
    tokens_per_second: float | None = None
    """Output tokens, over all the time, that of the prompts included."""
    output_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompts, where the engine says so."""
    first_token_p50: float | None = None
    first_token_p99: float | None = None
    gap_p50: float | None = None
    gap_p99: float | None = None
    peak_rss: int | None = None
    pss: int | None = None

    @property
    def rate(self) -> float:
        """What tries are ordered by: tokens a second, and starts a second where there are no tokens."""
        return 1 / self.seconds if self.tokens_per_second is None else self.tokens_per_second

    def troubles(self, best: Speed | None) -> list[str]:
        """What disturbed it, in words; nothing where it was quiet. `best` is the most that the machine gave."""
        found = []
        if self.others is not None and self.others > DISTURBED:
            who = f" ({', '.join(self.loudest)})" if self.loudest else ""
            found.append(f"others used {self.others:.0%} of the machine{who}")
        if self.speed is not None and best is not None:
            found += self.speed.shortfalls(best)
        return found

    def line(self, best: Speed | None) -> str:
        """One line while the bench runs."""
        said = (
            f"{self.seconds:.2f} s"
            if self.tokens_per_second is None
            else f"{self.tokens_per_second:.1f} tokens/s"
        )
        troubles = self.troubles(best)
        if troubles:
            said += f", DISTURBED: {'; '.join(troubles)}"
        return f"{self.work:12} {self.engine:32} {said}"

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Try:
        loudest, speed = tuple(document["loudest"]), _speed_from(document["speed"])
        return cls(**{**document, "loudest": loudest, "speed": speed})


@dataclass(frozen=True)
class Cell:
    """One place of the tables: all tries of it, in the order they were made."""

    tries: tuple[Try, ...]
    best: Speed | None
    """The most that the machine gave in the whole run; a try is disturbed, or not, in comparison with it."""

    @property
    def engine(self) -> str:
        return self.tries[0].engine

    @property
    def work(self) -> str:
        return self.tries[0].work

    @property
    def quiet(self) -> list[Try]:
        return [one for one in self.tries if not one.troubles(self.best)]

    @property
    def is_disturbed(self) -> bool:
        """No try was quiet."""
        return not self.quiet

    @property
    def compared(self) -> list[Try]:
        """The tries that the figure is the median of, slowest first: the quiet ones, or all where none is quiet."""
        return sorted(self.quiet or self.tries, key=lambda one: one.rate)

    @property
    def figure(self) -> Try:
        """The median try, whole, so that its throughput and its times belong together; of two, the slower."""
        return self.compared[(len(self.compared) - 1) // 2]

    @property
    def spread(self) -> float:
        """How many times faster the fastest of them was than the slowest."""
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
            raise ValueError("a cell without tries")
        return cls(tries, _speed_from(document["best"]))


def _speed_from(document: Mapping[str, Any] | None) -> Speed | None:
    return None if document is None else Speed(**document)


class Kept:
    """Cells as files, so that a run that was stopped goes on where it was; without a folder nothing is kept."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def load(self, engine: str, work: str) -> Cell | None:
        """None where there is no file, or none of the shape that this weft writes."""
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
    """As part of a file's name."""
    return "".join(letter if letter.isalnum() or letter in "._" else "-" for letter in name)
