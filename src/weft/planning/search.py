"""Decides which simulations run: how many replicas are needed, what breaks first, and which settings are best."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from weft.errors import InvalidRequestError
from weft.planning.autoscaler import Autoscaling
from weft.planning.costs import StepShape
from weft.planning.fleet import FleetOutcome, FleetSettings, simulate
from weft.planning.load import Load, LoadSummary
from weft.planning.profile import MachineProfile
from weft.planning.replica import NO_TARGETS, Replica, ReplicaSettings, Targets
from weft.server.config_file import Gathered, Given, read_value
from weft.server.settings import KEYS, ServerSettings

SPEEDS = (1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)
"""Factors of the load that are tried until the targets are missed."""
_GUESSED_ROWS = 64
BREAK_REQUESTS = 20_000
"""These factors are tried with the first requests of the load only, at most this many."""
MAX_COMBINATIONS = 256
_SWEPT = ("context", "memory")
Say = Callable[[str], None]


@dataclass(frozen=True)
class PlanSettings:
    profile: MachineProfile
    load: Load
    settings: ServerSettings
    """With the budgets of a GPU, if the profile is of one."""
    targets: Targets = NO_TARGETS
    good_share: float = 0.99
    """The fraction of the requests that must be within the targets."""
    least: int = 1
    most: int = 64
    """The range of replicas that is searched. Equal: no search."""
    autoscaling: Autoscaling | None = None
    by_prefix: bool = True
    sweep: Mapping[str, Sequence[str]] = field(default_factory=dict)
    seed: int = 0
    num_processes: int | None = None


@dataclass(frozen=True)
class Tried:
    """One simulation."""

    replicas: int
    speed: float
    outcome: FleetOutcome
    is_enough: bool
    cause: str
    """What was missed, and why; "" if nothing was."""
    changed: Mapping[str, str] = field(default_factory=dict)
    """The settings of a sweep."""
    scaling: Autoscaling | None = None

    @property
    def count(self) -> str:
        """The number of replicas: "3"; with autoscaling, "2-6"."""
        return str(self.replicas) if self.scaling is None else f"{self.scaling.least}-{self.scaling.most}"

    @property
    def in_words(self) -> str:
        return "1 replica" if self.count == "1" else f"{self.count.replace('-', ' to ')} replicas"


@dataclass
class PlanResult:
    tried: list[Tried]
    """Numbers of replicas, in the order in which they were tried."""
    chosen: Tried
    """The fewest replicas that are enough; if none are, the most that were tried."""
    breaks: Tried | None
    """The smallest load, of those tried, for which the chosen replicas are not enough."""
    sweep: list[Tried]
    """The best first."""
    best: Tried | None
    """The best of these and of `chosen`, which has the present settings. None: there was no sweep."""

    @property
    def is_enough(self) -> bool:
        return self.chosen.is_enough or (self.best is not None and self.best.is_enough)


def first_guess(profile: MachineProfile, load: LoadSummary) -> int:
    """How many replicas the answers of a load keep busy, in steps of many rows. A search begins there: with far too few
    replicas, simulations take long."""
    if not load.seconds:
        return 1
    context = _GUESSED_ROWS * int(load.prompt_tokens + load.answer_tokens / 2)
    step = profile.costs.of(StepShape(_GUESSED_ROWS, _GUESSED_ROWS, context, 0))
    return max(1, int(load.requests * load.answer_tokens * step / _GUESSED_ROWS / load.seconds))


def make_plan(
    plan: PlanSettings,
    say: Say = lambda line: None,
    start: int = 1,
    progress: Callable[[int], None] | None = None,
) -> PlanResult:
    """`start`: the number of replicas that is tried first, within the range of the plan. `progress` gets how many requests
    arrived since its last call."""
    # A mistake in any settings is found before the first simulation.
    for changed in ({}, *_combinations(plan)):
        Replica(0, _replica_settings(plan, changed))
    tried: list[Tried] = []

    def run(replicas: int, speed: float = 1.0, changed: Mapping[str, str] | None = None) -> Tried:
        found = try_out(plan, replicas, speed, changed or {}, progress)
        words = "enough" if found.is_enough else f"not enough: {found.cause}"
        factor = f", {speed:g} times the load" if speed != 1.0 else ""
        settings = "".join(f", {name.rpartition('.')[2]} {value}" for name, value in (changed or {}).items())
        say(
            f"{found.in_words}{factor}{settings}: {found.outcome.total.good_share:.1%} of the requests within the "
            f"targets; {words}"
            if plan.targets != NO_TARGETS
            else f"{found.in_words}{factor}{settings}: {found.outcome.total.completed:,} requests"
        )
        return found

    if plan.autoscaling is not None or plan.least == plan.most:
        chosen = run(plan.least)
        tried.append(chosen)
    else:
        chosen = _fewest(plan.least, plan.most, max(plan.least, min(start, plan.most)), run, tried)
    breaks = None
    if chosen.is_enough and plan.targets != NO_TARGETS:
        for speed in SPEEDS:
            faster = run(chosen.replicas, speed)
            if not faster.is_enough:
                breaks = faster
                break
    sweep, best = _sweep(plan, chosen, run)
    return PlanResult(tried, chosen, breaks, sweep, best)


def _replica_settings(plan: PlanSettings, changed: Mapping[str, str]) -> ReplicaSettings:
    settings = with_changes(plan.settings, changed)
    return ReplicaSettings(
        profile=plan.profile,
        config=settings.engine,
        context=settings.context,
        targets=plan.targets,
        seed=plan.seed,
    )


def try_out(
    plan: PlanSettings,
    replicas: int,
    speed: float = 1.0,
    changed: Mapping[str, str] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Tried:
    """Simulates this number of replicas."""
    reports_keys = plan.by_prefix and (replicas > 1 or plan.autoscaling is not None)
    replica = dataclasses.replace(_replica_settings(plan, changed or {}), reports_keys=reports_keys)
    fleet = FleetSettings(replica, replicas, plan.autoscaling, plan.by_prefix)
    most = plan.autoscaling.most if plan.autoscaling is not None else replicas
    requests = plan.load.requests(speed)
    if speed != 1.0:
        requests = itertools.islice(requests, BREAK_REQUESTS)
    outcome = simulate(fleet, requests, 1 if most == 1 else plan.num_processes, progress)
    total = outcome.total
    is_enough = not total.refused and total.good_share >= plan.good_share
    cause = "" if is_enough else cause_of(outcome, plan.targets)
    return Tried(replicas, speed, outcome, is_enough, cause, changed or {}, plan.autoscaling)


def cause_of(outcome: FleetOutcome, targets: Targets) -> str:
    """What was missed most often, and what requests waited for."""
    total = outcome.total
    if total.refused:
        missed = f"{total.refused:,} requests were refused"
    elif total.late >= total.slow:
        p99, target = total.first_token.quantile(0.99), targets.first_token or 0.0
        missed = f"first tokens are late (p99 {p99:.3g} s, target {target:g} s)"
    else:
        p99, target = 1000 * total.gap.quantile(0.99), 1000 * (targets.gap or 0.0)
        missed = f"gaps are long (p99 {p99:.3g} ms, target {target:g} ms for 99% of the gaps of a request)"
    limit = total.limits.most_common(1)
    reasons = {
        "rows": "all rows (max_running) are taken",
        "KV cache": "the KV cache is full",
        "steps": "steps have no room for more prompts",
        "reading": "the server reads them one after another",
    }
    return missed + (f"; requests wait because {reasons[limit[0][0]]}" if limit else "")


def _fewest(least: int, most: int, start: int, run: Callable[[int], Tried], tried: list[Tried]) -> Tried:
    """The fewest replicas that are enough: doubles their number, then halves the range."""
    below, count = least - 1, start
    while True:
        found = run(count)
        tried.append(found)
        if found.is_enough or count == most:
            break
        below, count = count, min(most, 2 * count)
    best, above = found, count
    while best.is_enough and above - below > 1:
        middle = (below + above) // 2
        found = run(middle)
        tried.append(found)
        if found.is_enough:
            best, above = found, middle
        else:
            below = middle
    return best


# ---------------------------------------------------------------------- settings


def with_changes(settings: ServerSettings, changed: Mapping[str, str]) -> ServerSettings:
    """The settings with other values, given as text by key. `memory` also sets the memory of the KV cache."""
    given = {key: Given(read_value(key, value, "--sweep"), "--sweep") for key, value in changed.items()}
    found = Gathered(given).applied_to(settings)
    if found.memory is None:
        return found
    cache = dataclasses.replace(found.engine.cache, memory=found.memory)
    return dataclasses.replace(found, engine=dataclasses.replace(found.engine, cache=cache))


def sweep_key(name: str) -> str:
    """The key of a setting by its name: `policy` is `engine.scheduler.policy`."""
    keys = [key for key in KEYS if key.startswith("engine.") or key in _SWEPT]
    found = [key for key in keys if name in (key, key.rpartition(".")[2])]
    if len(found) == 1:
        return found[0]
    names = ", ".join(sorted(key.rpartition(".")[2] for key in keys))
    raise InvalidRequestError(f"--sweep: there is no setting {name!r:.60} of the engine; there are {names}")


def parse_sweep(parts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Parses 'policy=adaptive,fcfs', which may be repeated."""
    found: dict[str, tuple[str, ...]] = {}
    for part in parts:
        name, equals, values = part.partition("=")
        options = tuple(value.strip() for value in values.split(",") if value.strip())
        if not equals or not options:
            raise InvalidRequestError(
                f"--sweep is {part!r:.80}; write a setting and values: policy=adaptive,fcfs"
            )
        key = sweep_key(name.strip())
        for option in options:
            with_changes(ServerSettings(), {key: option})
        found[key] = options
    count = 1
    for options in found.values():
        count *= len(options)
    if count > MAX_COMBINATIONS:
        raise InvalidRequestError(f"--sweep has {count} combinations; allowed: at most {MAX_COMBINATIONS}")
    return found


def _sweep(
    plan: PlanSettings, chosen: Tried, run: Callable[[int, float, Mapping[str, str]], Tried]
) -> tuple[list[Tried], Tried | None]:
    """Tries all combinations with the chosen replicas, then the best one with fewer. Returns all, and the best, which may be
    the present settings."""
    if not plan.sweep:
        return [], None
    rows = [run(chosen.replicas, 1.0, changed) for changed in _combinations(plan)]
    rows.sort(key=_rank)
    if _rank(chosen) < _rank(rows[0]):
        return rows, chosen
    best = rows[0]
    while best.is_enough and plan.autoscaling is None and plan.least < best.replicas:
        fewer = run(best.replicas - 1, 1.0, best.changed)
        if not fewer.is_enough:
            break
        best = fewer
    return rows, best


def _combinations(plan: PlanSettings) -> list[dict[str, str]]:
    """The settings of a sweep. None without one."""
    values = itertools.product(*plan.sweep.values())
    return [dict(zip(plan.sweep, one, strict=True)) for one in values] if plan.sweep else []


def _rank(tried: Tried) -> tuple[bool, float, float, float]:
    total = tried.outcome.total
    first, gap = total.first_token.quantile(0.99), total.gap.quantile(0.99)
    return not tried.is_enough, -round(total.good_share, 3), round(first, 2), gap
