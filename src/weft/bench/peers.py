"""`weft bench peers`: the same work on weft and on every engine it is compared with, in turn, on this machine.

Each engine is started anew for each workload and the engines take turns within it, so that a ratio is of figures
taken minutes apart. One that is slow to start is kept, and frozen while others are measured.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.bench.peers_engines import ENGINES, OURS, PEERS, Engine, Launch, Workshop
from weft.bench.peers_environment import PeerError, Say, peers_directory
from weft.bench.peers_process import Outcome, RunningEngine, free_port, settle
from weft.bench.peers_report import START, Cell, Report, draw, print_report, write_report
from weft.bench.report import machine
from weft.bench.serve_load import WORKLOADS, Phase, Text, workloads
from weft.bench.serve_machine import DISTURBED, MachineUse
from weft.errors import InvalidRequestError
from weft.loading.checkpoint import open_checkpoint
from weft.loading.pull import pull
from weft.text.model_text import open_tokenizer

SLOW_START = 20.0
"""Seconds; an engine that takes longer to start is kept between workloads."""
START_PROMPT = 16
"""Tokens of the first request that an engine gets."""


def main(
    *,
    peers: str | None,
    work: str | None,
    home: Path | None,
    keep: Path | None,
    repeats: int,
    json_path: Path | None,
    plot_path: Path | None,
) -> bool:
    """Measures, prints and writes; whether every engine did all of its work."""
    engines, columns = choose_engines(peers), choose_work(work)
    if plot_path is not None and columns == [START]:
        raise InvalidRequestError("--plot draws the workloads, and --work names none of them", field="--plot")
    home = home or peers_directory()
    home.mkdir(parents=True, exist_ok=True)
    model = pull("default")
    checkpoint = open_checkpoint(model)
    tokenizer = open_tokenizer(checkpoint)
    shop = Workshop(home, model, min(checkpoint.end_ids), _say)
    texts: dict[int, list[int]] = {}

    def open_text(run: int) -> Text:
        def encode(whole: str) -> list[int]:
            if 0 not in texts:
                texts[0] = tokenizer.encode(whole, add_bos=False)
            return texts[0]

        return Text(encode, run)

    before = machine()
    with _ended_by_signals():
        bench = Bench(engines, columns, Kept(keep), repeats, open_text, _say)
        try:
            bench.prepare(shop)
            bench.run()
        finally:
            bench.end()
    report = Report(
        before, model.name, tuple(engines), tuple(columns), tuple(bench.cells.values()), bench.problems
    )
    print_report(report)
    if json_path is not None:
        write_report(report, json_path)
    if plot_path is not None:
        draw(report, plot_path, shop)
    return not bench.problems


def choose_engines(peers: str | None) -> list[Engine]:
    """weft, and the engines of the named peers; all of them where none is named."""
    names = PEERS if peers is None else tuple(name.strip() for name in peers.split(",") if name.strip())
    for name in names:
        if name not in (*PEERS, OURS):
            raise InvalidRequestError(f"no peer {name!r}; there are {', '.join(PEERS)}", field="--peers")
    return [engine for engine in ENGINES if engine.peer in (OURS, *names)]


def choose_work(work: str | None) -> list[str]:
    """The columns in their order. Wshare-warm needs what Wshare leaves behind, so it brings it along."""
    known = (START, *WORKLOADS)
    names = known if work is None else tuple(name.strip() for name in work.split(",") if name.strip())
    for name in names:
        if name not in known:
            raise InvalidRequestError(f"no workload {name!r}; there are {', '.join(known)}", field="--work")
    wanted = {*names} | ({"Wshare"} if "Wshare-warm" in names else set())
    return [name for name in known if name in wanted]


class Kept:
    """Finished cells as files, so that a run that was stopped goes on where it was; without a folder nothing is kept."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def load(self, engine: str, work: str) -> Cell | None:
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
            path.write_text(json.dumps(dataclasses.asdict(cell)) + "\n")

    @staticmethod
    def _path(folder: Path, engine: str, work: str) -> Path:
        return folder / f"{_plain(engine)}.{work}.json"


@dataclass
class Bench:
    """Runs every cell of the table that is not there yet. Owns the engines that are kept running."""

    engines: Sequence[Engine]
    columns: Sequence[str]
    kept: Kept
    repeats: int
    open_text: Callable[[int], Text]
    say: Say
    cells: dict[tuple[str, str], Cell] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    """Why an engine is not in the table, or not in all of it."""
    _launchers: dict[str, Callable[[int], Launch]] = field(default_factory=dict)
    _running: dict[str, RunningEngine] = field(default_factory=dict)
    _started: set[str] = field(default_factory=set)
    _logs: Callable[[str], Path] | None = None

    def prepare(self, shop: Workshop) -> None:
        """Installs and converts before anything is measured: a download beside a run would disturb it."""
        self._logs = shop.log
        for engine in self.engines:
            try:
                self._launchers[engine.name] = engine.prepare(shop)
            except PeerError as error:
                self._give_up(engine, error)

    def run(self) -> None:
        for group in groups(self.columns):
            for engine in self.engines:
                wanted = [name for name in group if name == START or name in engine.work]
                if not wanted or engine.name in self.problems:
                    continue
                found = [self.kept.load(engine.name, name) for name in wanted]
                if all(cell is not None and not cell.is_disturbed for cell in found):
                    self._add([cell for cell in found if cell is not None])
                    continue
                try:
                    self._add(self._quiet_cells(engine, wanted))
                except PeerError as error:
                    self._give_up(engine, error)

    def end(self) -> None:
        for engine in self._running.values():
            engine.end()
        self._running.clear()

    def _add(self, cells: Sequence[Cell]) -> None:
        for cell in cells:
            self.cells[cell.engine, cell.work] = cell
            self.kept.save(cell)

    def _give_up(self, engine: Engine, error: PeerError) -> None:
        self.problems[engine.name] = str(error)
        self.say(f"{engine.name}: {error}")
        running = self._running.pop(engine.name, None)
        if running is not None:
            running.end()

    def _quiet_cells(self, engine: Engine, names: Sequence[str]) -> list[Cell]:
        """Measured again while others use the machine; in the end the least disturbed of what there is."""
        tries: list[list[Cell]] = []
        while not tries or (_disturbance(tries[-1]) > DISTURBED and len(tries) <= self.repeats):
            measure = self._start_cell if names[0] == START else self._work_cells
            tries.append(measure(engine, names, len(tries)))
            for cell in tries[-1]:
                self.say(cell.line())
        return min(tries, key=_disturbance)

    def _start_cell(self, engine: Engine, names: Sequence[str], attempt: int) -> list[Cell]:
        """The second start: the first brings files into memory and fills the peers' own caches."""
        if engine.name not in self._started:
            running, *_ = self._start(engine)
            running.end()
            settle()
        previous = self._running.pop(engine.name, None)
        if previous is not None:
            previous.end()
            settle()
        running, seconds, use = self._start(engine)
        self._let_go(engine, running, seconds)
        return [Cell(engine.name, START, attempt, seconds, _others(use), use.loudest)]

    def _work_cells(self, engine: Engine, names: Sequence[str], attempt: int) -> list[Cell]:
        # Other text at every try: an engine that was kept has seen the last.
        phases: list[Phase] = workloads(names, self.open_text(attempt))
        running = self._running.pop(engine.name, None)
        seconds = SLOW_START
        if running is None:
            running, seconds, _ = self._start(engine)
        running.thaw()
        try:
            outcomes = running.run(phases)
        except BaseException:
            running.end()
            raise
        self._let_go(engine, running, seconds)
        return [
            _cell(engine, phase, attempt, outcome) for phase, outcome in zip(phases, outcomes, strict=True)
        ]

    def _start(self, engine: Engine) -> tuple[RunningEngine, float, MachineUse]:
        assert self._logs is not None
        launch = self._launchers[engine.name](free_port())
        running = RunningEngine(launch, self._logs(_plain(engine.name)))
        try:
            seconds, use = running.first_token(self.open_text(0).take(START_PROMPT)[::-1])
        except BaseException:
            running.end()
            raise
        self._started.add(engine.name)
        return running, seconds, use

    def _let_go(self, engine: Engine, running: RunningEngine, start_seconds: float) -> None:
        if start_seconds < SLOW_START:
            running.end()
            settle()
        else:
            running.freeze()
            self._running[engine.name] = running


def groups(columns: Sequence[str]) -> list[list[str]]:
    """The columns that are measured on one start: each by itself, but Wshare-warm on what Wshare left behind."""
    found: list[list[str]] = []
    for name in columns:
        if name == "Wshare-warm":
            found[-1].append(name)
        else:
            found.append([name])
    return found


def _cell(engine: Engine, phase: Phase, attempt: int, outcome: Outcome) -> Cell:
    summary, use = outcome.summary, outcome.machine
    first, gap = summary.first_token, summary.gap
    return Cell(
        engine=engine.name,
        work=phase.name,
        attempt=attempt,
        seconds=summary.seconds,
        others=_others(use),
        loudest=use.loudest,
        tokens_per_second=summary.output_tokens_per_second,
        output_tokens=summary.output_tokens,
        cached_tokens=summary.cached_tokens,
        first_token_p50=first.p50 if first else None,
        first_token_p99=first.p99 if first else None,
        gap_p50=gap.p50 if gap else None,
        gap_p99=gap.p99 if gap else None,
        peak_rss=outcome.peak_rss,
        pss=outcome.pss,
    )


def _others(use: MachineUse) -> float | None:
    """The share of the machine that was not the engine's and not ours."""
    return None if use.others is None else use.others / use.cores


def _disturbance(cells: Sequence[Cell]) -> float:
    return max(cell.others or 0.0 for cell in cells)


def _plain(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "._" else "-" for letter in name)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """A bench that is told to end takes its engines with it."""

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
