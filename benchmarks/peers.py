"""`python -m benchmarks peers`: the same work on weft and on every engine it is compared with, in turn, on this machine.

Each engine is started anew for each workload and the engines take turns within it, so that a ratio is of figures
taken minutes apart. One that is slow to start is kept, and frozen while others are measured. Around every run the
bench looks at what the machine gives; one that others disturbed is repeated.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.machine_speed import Gauge, Speed, open_gauge
from benchmarks.peers_cells import START, Cell, Kept, Try, plain_name
from benchmarks.peers_engines import ENGINES, OURS, PEERS, Engine, Launch, Workshop
from benchmarks.peers_environment import PeerError, Say, peers_directory
from benchmarks.peers_process import Outcome, RunningEngine, free_port, settle
from benchmarks.peers_report import NO_PROBE, Report, draw, print_report, write_report
from weft.bench.report import machine
from weft.bench.serve_load import WORKLOADS, Phase, Text, workloads
from weft.bench.serve_machine import DISTURBED, MachineUse, take_snapshot, use_of
from weft.errors import InvalidRequestError
from weft.loading.checkpoint import open_checkpoint
from weft.loading.pull import pull
from weft.text.model_text import open_tokenizer

SLOW_START = 20.0
"""Seconds; an engine that takes longer to start is kept between workloads."""
START_PROMPT = 16
"""Tokens of the first request that an engine gets."""
IDLE_SECONDS = 1.0
"""What an engine has for itself before its first work: no server is started in the moment of its first rush."""
QUIET_LOOKS = 8
"""How often the machine is looked at, a pause before each, before a disturbed run is repeated all the same."""
QUIET_PAUSE = 1.0
"""Seconds."""


def main(
    *,
    peers: str | None,
    work: str | None,
    home: Path | None,
    keep: Path | None,
    rounds: int,
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
        gauge = open_gauge()
        bench = Bench(engines, columns, Kept(keep), rounds, repeats, open_text, _say, gauge)
        try:
            bench.prepare(shop)
            gauge.calibrate()
            _say(f"this machine {gauge.best or NO_PROBE}")
            bench.run()
        finally:
            bench.end()
    cells = tuple(bench.cells.values())
    report = Report(before, model.name, tuple(engines), tuple(columns), cells, bench.problems, gauge.best)
    print_report(report)
    if json_path is not None:
        write_report(report, json_path)
    if plot_path is not None:
        draw(report, plot_path, shop)
    return not bench.problems


def choose_engines(peers: str | None) -> list[Engine]:
    """weft, and the engines of the named peers; the usual ones where none is named."""
    if peers is None:
        return [engine for engine in ENGINES if engine.is_usual]
    names = tuple(name.strip() for name in peers.split(",") if name.strip())
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


@dataclass
class Bench:
    """Runs every cell of the table that is not there yet. Owns the engines that are kept running."""

    engines: Sequence[Engine]
    columns: Sequence[str]
    kept: Kept
    rounds: int
    repeats: int
    open_text: Callable[[int], Text]
    say: Say
    gauge: Gauge
    problems: dict[str, str] = field(default_factory=dict)
    """Why an engine is not in the table, or not in all of it."""
    _tries: dict[tuple[str, str], list[Try]] = field(default_factory=dict)
    _launchers: dict[str, Callable[[int], Launch]] = field(default_factory=dict)
    _running: dict[str, RunningEngine] = field(default_factory=dict)
    _started: set[str] = field(default_factory=set)
    _logs: Callable[[str], Path] | None = None

    @property
    def cells(self) -> dict[tuple[str, str], Cell]:
        """All that was measured, compared with the best that the machine has given until now."""
        return {place: Cell(tuple(tries), self.gauge.best) for place, tries in self._tries.items()}

    def prepare(self, shop: Workshop) -> None:
        """Installs and converts before anything is measured: a download beside a run would disturb it."""
        self._logs = shop.log
        for engine in self.engines:
            try:
                self._launchers[engine.name] = engine.prepare(shop)
            except PeerError as error:
                self._give_up(engine, error)

    def run(self) -> None:
        self._take_kept()
        for group in groups(self.columns):
            for number in range(self.rounds):
                for engine in self.engines:
                    wanted = _wanted(engine, group)
                    if not wanted or engine.name in self.problems or self._is_done(engine, wanted, number):
                        continue
                    try:
                        self._run_round(engine, wanted, number)
                    except PeerError as error:
                        self._give_up(engine, error)

    def end(self) -> None:
        for engine in self._running.values():
            engine.end()
        self._running.clear()

    def _take_kept(self) -> None:
        for engine in self.engines:
            for name in _wanted(engine, self.columns):
                cell = self.kept.load(engine.name, name)
                if cell is not None and engine.name not in self.problems:
                    self._tries[engine.name, name] = list(cell.tries)
                    self.gauge.remember(cell.best)

    def _give_up(self, engine: Engine, error: PeerError) -> None:
        self.problems[engine.name] = str(error)
        self.say(f"{engine.name}: {error}")
        running = self._running.pop(engine.name, None)
        if running is not None:
            running.end()

    def _is_done(self, engine: Engine, names: Sequence[str], number: int) -> bool:
        """Whether every column has a quiet try in this round."""
        return all(
            any(not one.troubles(self.gauge.best) for one in self._tries_of(engine, name, number))
            for name in names
        )

    def _tries_of(self, engine: Engine, name: str, number: int) -> list[Try]:
        return [one for one in self._tries.get((engine.name, name), ()) if one.round == number]

    def _run_round(self, engine: Engine, names: Sequence[str], number: int) -> None:
        """Measures until it was quiet, or has been repeated often enough; every try is kept."""
        measure = self._try_start if names[0] == START else self._try_work
        first = max(len(self._tries_of(engine, name, number)) for name in names)
        for attempt in range(first, first + 1 + self.repeats):
            if attempt > first:
                self._wait_for_quiet()
            for one in measure(engine, names, number, attempt):
                self._tries.setdefault((one.engine, one.work), []).append(one)
                self.kept.save(self.cells[one.engine, one.work])
                self.say(one.line(self.gauge.best))
            if self._is_done(engine, names, number):
                return

    def _wait_for_quiet(self) -> None:
        """A neighbour that is loud now may be done in some seconds; one that is not is not waited for."""
        self.say(f"waiting for a quiet machine, {QUIET_LOOKS * QUIET_PAUSE:g} s or a little more")
        for _ in range(QUIET_LOOKS):
            before = take_snapshot()
            settle(QUIET_PAUSE)
            others = _others(use_of(before, take_snapshot(), frozenset())) or 0.0
            speed, best = self.gauge.look(), self.gauge.best
            if others <= DISTURBED and not (speed and best and speed.shortfalls(best)):
                return

    def _try_start(self, engine: Engine, names: Sequence[str], number: int, attempt: int) -> list[Try]:
        """The second start: the first brings files into memory and fills the peers' own caches."""
        if engine.name not in self._started:
            running, *_ = self._start(engine)
            running.end()
            settle()
        previous = self._running.pop(engine.name, None)
        if previous is not None:
            previous.end()
            settle()
        before = self.gauge.look()
        running, seconds, use = self._start(engine)
        try:
            speed = _slower(before, self._look_beside(running))
        except BaseException:
            running.end()
            raise
        self._let_go(engine, running, seconds)
        return [Try(engine.name, START, number, attempt, seconds, _others(use), use.loudest, speed)]

    def _try_work(self, engine: Engine, names: Sequence[str], number: int, attempt: int) -> list[Try]:
        # Other text at every try, since an engine that was kept has seen the last; the same for all engines of a round.
        phases: list[Phase] = workloads(names, self.open_text(number + self.rounds * attempt))
        running = self._running.pop(engine.name, None)
        seconds = SLOW_START
        if running is None:
            running, seconds, _ = self._start(engine)
        running.thaw()
        outcomes: list[Outcome] = []
        try:
            looks = [self._look_beside(running)]
            settle(IDLE_SECONDS)
            for outcome in running.run(phases):
                outcomes.append(outcome)
                looks.append(self._look_beside(running))
        except BaseException:
            running.end()
            raise
        self._let_go(engine, running, seconds)
        return [
            _work_try(engine, phase, number, attempt, outcome, _slower(before, after))
            for phase, outcome, (before, after) in zip(phases, outcomes, pairwise(looks), strict=True)
        ]

    def _look_beside(self, running: RunningEngine) -> Speed | None:
        """With the engine stopped: threads that spin for a while after work would look like a neighbour."""
        if self.gauge.is_blind:
            return None
        running.freeze()
        try:
            return self.gauge.look()
        finally:
            running.thaw()

    def _start(self, engine: Engine) -> tuple[RunningEngine, float, MachineUse]:
        assert self._logs is not None
        launch = self._launchers[engine.name](free_port())
        running = RunningEngine(launch, self._logs(plain_name(engine.name)))
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


def _work_try(
    engine: Engine, phase: Phase, number: int, attempt: int, outcome: Outcome, speed: Speed | None
) -> Try:
    summary, use = outcome.summary, outcome.machine
    first, gap = summary.first_token, summary.gap
    return Try(
        engine=engine.name,
        work=phase.name,
        round=number,
        attempt=attempt,
        seconds=summary.seconds,
        others=_others(use),
        loudest=use.loudest,
        speed=speed,
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


def _slower(before: Speed | None, after: Speed | None) -> Speed | None:
    return None if before is None or after is None else before.slower(after)


def _wanted(engine: Engine, columns: Sequence[str]) -> list[str]:
    """The columns that the engine can do; every engine can start."""
    return [name for name in columns if name == START or name in engine.work]


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
