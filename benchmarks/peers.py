"""`python -m benchmarks peers`: the same workloads on weft and on other engines, in turn, on this machine.

Each engine is started anew for each workload. The engines take turns within a workload, so that the figures of a ratio
are only minutes apart. An engine that starts slowly is kept, and frozen (SIGSTOP) while others are measured. Before
and after every run the speed of the machine is measured; a disturbed run is repeated.
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
from benchmarks.peers_cells import START, Cell, CellFiles, Try, plain_name
from benchmarks.peers_engines import ENGINES, OURS, PEERS, Engine, Launch, PeerFiles
from benchmarks.peers_environment import PeerError, PrintStatus, peers_directory
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
"""An engine that takes longer to start, in seconds, is kept between workloads."""
START_PROMPT = 16
"""Prompt tokens of the first request to an engine."""
IDLE_SECONDS = 1.0
"""Pause between the start of an engine and its first workload. A real server also idles before its first request."""
QUIET_CHECKS = 8
"""Most checks for an idle machine. After them, a disturbed run is repeated even if the machine is still disturbed."""
QUIET_PAUSE = 1.0
"""Seconds before each of these checks."""


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
    """Measures the chosen engines, and prints the report. Returns True if every engine completed its workloads."""
    engines, columns = choose_engines(peers), choose_work(work)
    if plot_path is not None and columns == [START]:
        raise InvalidRequestError("--plot draws workloads, and --work names none", field="--plot")
    home = home or peers_directory()
    home.mkdir(parents=True, exist_ok=True)
    model = pull("default")
    checkpoint = open_checkpoint(model)
    tokenizer = open_tokenizer(checkpoint)
    files = PeerFiles(home, model, min(checkpoint.end_ids), _print_status)
    texts: dict[int, list[int]] = {}  # the key 0 holds the tokens of the whole text, encoded at first use

    def open_text(run: int) -> Text:
        def encode(whole: str) -> list[int]:
            if 0 not in texts:
                texts[0] = tokenizer.encode(whole, add_bos=False)
            return texts[0]

        return Text(encode, run)

    before = machine()
    with _ending_on_sigterm():
        gauge = open_gauge()
        bench = Bench(engines, columns, CellFiles(keep), rounds, repeats, open_text, _print_status, gauge)
        try:
            bench.prepare(files)
            gauge.calibrate()
            _print_status(f"this machine: {gauge.best or NO_PROBE}")
            bench.run()
        finally:
            bench.end()
    cells = tuple(bench.cells.values())
    report = Report(before, model.name, tuple(engines), tuple(columns), cells, bench.problems, gauge.best)
    print_report(report)
    if json_path is not None:
        write_report(report, json_path)
    if plot_path is not None:
        draw(report, plot_path, files)
    return not bench.problems


def choose_engines(peers: str | None) -> list[Engine]:
    """The engines of weft and of the named peers. `peers` None: the engines with `is_usual`."""
    if peers is None:
        return [engine for engine in ENGINES if engine.is_usual]
    names = tuple(name.strip() for name in peers.split(",") if name.strip())
    for name in names:
        if name not in (*PEERS, OURS):
            raise InvalidRequestError(f"no peer {name!r}; there are {', '.join(PEERS)}", field="--peers")
    return [engine for engine in ENGINES if engine.peer in (OURS, *names)]


def choose_work(work: str | None) -> list[str]:
    """The chosen columns, in table order. Wshare-warm needs the prefix cache that Wshare fills, so it adds Wshare."""
    known = (START, *WORKLOADS)
    names = known if work is None else tuple(name.strip() for name in work.split(",") if name.strip())
    for name in names:
        if name not in known:
            raise InvalidRequestError(f"no workload {name!r}; there are {', '.join(known)}", field="--work")
    chosen = {*names} | ({"Wshare"} if "Wshare-warm" in names else set())
    return [name for name in known if name in chosen]


@dataclass
class Bench:
    """Measures every missing cell of the table. Owns the engines that are kept running."""

    engines: Sequence[Engine]
    columns: Sequence[str]
    cell_files: CellFiles
    rounds: int
    repeats: int
    open_text: Callable[[int], Text]
    print_status: PrintStatus
    gauge: Gauge
    problems: dict[str, str] = field(default_factory=dict)
    """Why an engine has no figures, or not all."""
    _tries: dict[tuple[str, str], list[Try]] = field(default_factory=dict)
    _launchers: dict[str, Callable[[int], Launch]] = field(default_factory=dict)
    _running: dict[str, RunningEngine] = field(default_factory=dict)
    _started: set[str] = field(default_factory=set)
    _logs: Callable[[str], Path] | None = None

    @property
    def cells(self) -> dict[tuple[str, str], Cell]:
        """All measurements so far, with the best speed of the machine so far."""
        return {place: Cell(tuple(tries), self.gauge.best) for place, tries in self._tries.items()}

    def prepare(self, files: PeerFiles) -> None:
        """Installs engines and converts models before anything is measured: a download would disturb a run."""
        self._logs = files.log
        for engine in self.engines:
            try:
                self._launchers[engine.name] = engine.prepare(files)
            except PeerError as error:
                self._drop_engine(engine, error)

    def run(self) -> None:
        self._load_kept_cells()
        for group in groups(self.columns):
            for number in range(self.rounds):
                for engine in self.engines:
                    names = _supported(engine, group)
                    if not names or engine.name in self.problems or self._is_done(engine, names, number):
                        continue
                    try:
                        self._run_round(engine, names, number)
                    except PeerError as error:
                        self._drop_engine(engine, error)

    def end(self) -> None:
        for engine in self._running.values():
            engine.end()
        self._running.clear()

    def _load_kept_cells(self) -> None:
        for engine in self.engines:
            for name in _supported(engine, self.columns):
                cell = self.cell_files.load(engine.name, name)
                if cell is not None and engine.name not in self.problems:
                    self._tries[engine.name, name] = list(cell.tries)
                    self.gauge.remember(cell.best)

    def _drop_engine(self, engine: Engine, error: PeerError) -> None:
        self.problems[engine.name] = str(error)
        self.print_status(f"{engine.name}: {error}")
        running = self._running.pop(engine.name, None)
        if running is not None:
            running.end()

    def _is_done(self, engine: Engine, names: Sequence[str], number: int) -> bool:
        """Whether each workload in `names` has an undisturbed try in round `number`."""
        return all(
            any(not one.troubles(self.gauge.best) for one in self._tries_of(engine, name, number))
            for name in names
        )

    def _tries_of(self, engine: Engine, name: str, number: int) -> list[Try]:
        return [one for one in self._tries.get((engine.name, name), ()) if one.round == number]

    def _run_round(self, engine: Engine, names: Sequence[str], number: int) -> None:
        """Measures one try, and more until one is undisturbed, at most `repeats` more. Every try is kept."""
        measure = self._try_start if names[0] == START else self._try_work
        first = max(len(self._tries_of(engine, name, number)) for name in names)
        for attempt in range(first, first + 1 + self.repeats):
            if attempt > first:
                self._wait_for_quiet()
            for one in measure(engine, names, number, attempt):
                self._tries.setdefault((one.engine, one.work), []).append(one)
                self.cell_files.save(self.cells[one.engine, one.work])
                self.print_status(one.line(self.gauge.best))
            if self._is_done(engine, names, number):
                return

    def _wait_for_quiet(self) -> None:
        """Waits until other load has ended, but at most some seconds (`QUIET_CHECKS`)."""
        self.print_status(f"waiting for an idle machine, about {QUIET_CHECKS * QUIET_PAUSE:g} s at most")
        for _ in range(QUIET_CHECKS):
            before = take_snapshot()
            settle(QUIET_PAUSE)
            others = _others_share(use_of(before, take_snapshot(), frozenset())) or 0.0
            speed, best = self.gauge.measure(), self.gauge.best
            if others <= DISTURBED and not (speed and best and speed.shortfalls(best)):
                return

    def _try_start(self, engine: Engine, names: Sequence[str], number: int, attempt: int) -> list[Try]:
        """Measures a start. The first start of an engine is not measured: it fills the page cache and the engine's own
        caches."""
        if engine.name not in self._started:
            running, *_ = self._start(engine)
            running.end()
            settle()
        previous = self._running.pop(engine.name, None)
        if previous is not None:
            previous.end()
            settle()
        before = self.gauge.measure()
        running, seconds, use = self._start(engine)
        try:
            speed = _slower(before, self._measure_machine(running))
        except BaseException:
            running.end()
            raise
        self._release(engine, running, seconds)
        return [Try(engine.name, START, number, attempt, seconds, _others_share(use), use.loudest, speed)]

    def _try_work(self, engine: Engine, names: Sequence[str], number: int, attempt: int) -> list[Try]:
        # Every try has new prompts: an engine that was kept has those of the previous try in its prefix cache. All
        # engines get the same prompts.
        phases: list[Phase] = workloads(names, self.open_text(number + self.rounds * attempt))
        running = self._running.pop(engine.name, None)
        seconds = SLOW_START
        if running is None:
            running, seconds, _ = self._start(engine)
        running.thaw()
        outcomes: list[Outcome] = []
        try:
            speeds = [self._measure_machine(running)]
            settle(IDLE_SECONDS)
            for outcome in running.run(phases):
                outcomes.append(outcome)
                speeds.append(self._measure_machine(running))
        except BaseException:
            running.end()
            raise
        self._release(engine, running, seconds)
        return [
            _work_try(engine, phase, number, attempt, outcome, _slower(before, after))
            for phase, outcome, (before, after) in zip(phases, outcomes, pairwise(speeds), strict=True)
        ]

    def _measure_machine(self, running: RunningEngine) -> Speed | None:
        """Measures the machine while the engine is frozen: its threads may still spin after the work."""
        if self.gauge.is_disabled:
            return None
        running.freeze()
        try:
            return self.gauge.measure()
        finally:
            running.thaw()

    def _start(self, engine: Engine) -> tuple[RunningEngine, float, MachineUse]:
        assert self._logs is not None
        launch = self._launchers[engine.name](free_port())
        running = RunningEngine(launch, self._logs(plain_name(engine.name)))
        try:
            # Reversed, so that no prompt of a workload begins with these tokens and finds them in the prefix cache.
            seconds, use = running.first_token(self.open_text(0).take(START_PROMPT)[::-1])
        except BaseException:
            running.end()
            raise
        self._started.add(engine.name)
        return running, seconds, use

    def _release(self, engine: Engine, running: RunningEngine, start_seconds: float) -> None:
        """Ends the engine. If it starts slowly, freezes and keeps it for its next workload."""
        if start_seconds < SLOW_START:
            running.end()
            settle()
        else:
            running.freeze()
            self._running[engine.name] = running


def groups(columns: Sequence[str]) -> list[list[str]]:
    """The columns that share one start of an engine: Wshare-warm follows Wshare, every other column is alone."""
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
        others=_others_share(use),
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


def _others_share(use: MachineUse) -> float | None:
    """The fraction of the machine's CPU time that neither the engine nor this process used."""
    return None if use.others is None else use.others / use.cores


def _slower(before: Speed | None, after: Speed | None) -> Speed | None:
    return None if before is None or after is None else before.slower(after)


def _supported(engine: Engine, columns: Sequence[str]) -> list[str]:
    """The columns that the engine supports. Every engine supports the start."""
    return [name for name in columns if name == START or name in engine.work]


def _print_status(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """Turns SIGTERM into KeyboardInterrupt, so that the engines are ended too."""

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
