"""Makes machine profiles: by load on a server of this machine, from an event log, or from what a running server learned."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.bench.serve_client import Client
from weft.bench.serve_load import Item, Phase, Text
from weft.bench.serve_measure import Targets
from weft.bench.serve_run import measure
from weft.bench.start import started_server, wait_for_phases
from weft.errors import InvalidRequestError, WeftError
from weft.learned_costs import LearnedCosts
from weft.loading.checkpoint import open_checkpoint
from weft.loading.pull import pull
from weft.planning.costs import MeasuredCosts, StepShape, shape_of
from weft.planning.fit import Fit, fit
from weft.planning.profile import KvRoom, MachineProfile
from weft.planning.traces import read_events
from weft.scheduling.policy import StepCostModel
from weft.text.model_text import open_model_text

MEASURED_SECONDS = 40.0
"""Seconds of load. With the start of the server, a measurement takes about a minute."""
_REQUEST_SECONDS = 300.0
_CLOSED_LOOPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96)
"""Concurrent requests of the phases of a round."""
_LENGTHS = ((16, 150), (30, 300), (100, 1200))
"""Prompt tokens of these phases, in turn."""
_ANSWER = 32
_SHORT_ANSWER = 8
_SHARED, _TAIL = 512, (16, 128)
"""Tokens of a shared prefix, and of what follows it."""
_FEW = 4
"""Up to this many clients, a first token shows what the server adds to it. More clients also wait for each other."""


@dataclass(frozen=True)
class _LoggedPlan:
    """The part of a logged plan that its cost depends on."""

    num_decodes: int
    starts: Sequence[int]
    counts: Sequence[int]
    samples: Sequence[bool]
    drafts: Sequence[Sequence[int]]


class _Tables:
    """The block tables of the rows, from the changes in the plans."""

    def __init__(self) -> None:
        self._rows: dict[int, list[int]] = {}

    def num_blocks(self, plan: dict[str, Any], block_size: int) -> int:
        """Applies the changes of a plan. Returns how many different blocks the step reads."""
        for row, _, _, _, blocks in plan["row_starts"]:
            self._rows[row] = list(blocks)
        for row, index, block in zip(
            plan["table_rows"], plan["table_indices"], plan["table_blocks"], strict=True
        ):
            table = self._rows[row]
            table.extend([block] * (index + 1 - len(table)))
            table[index] = block
        read: set[int] = set()
        for row, start, count in zip(plan["rows"], plan["starts"], plan["counts"], strict=True):
            read.update(self._rows[row][: -(-(start + count) // block_size)])
        return len(read)


@dataclass
class LoggedSteps:
    """What a log says about steps and first tokens."""

    info: dict[str, Any] = field(default_factory=dict)
    steps: list[tuple[StepShape, float]] = field(default_factory=list)
    tables: _Tables = field(default_factory=_Tables)
    first_tokens: dict[tuple[int, ...], float] = field(default_factory=dict)
    """The tokens of a prompt -> seconds from its arrival in the engine to its first token."""


def profile_by_load(
    model: str, arguments: Sequence[str], machine: str, say: Callable[[str], None]
) -> MachineProfile:
    """Starts `weft serve` with these arguments, puts load on it, and makes a profile of its event log."""
    path = pull(model)
    tokenizer = open_model_text(open_checkpoint(path)).tokenizer
    text = Text(lambda whole: tokenizer.encode(whole, add_bos=False))
    with tempfile.TemporaryDirectory(prefix="weft-profile-") as folder:
        log = Path(folder) / "engine.log"
        variables = {
            "WEFT_SERVE_ENGINE_LOG_PATH": str(log),
            "WEFT_SERVE_ENGINE_SCHEDULER_MAX_DRAFT_TOKENS": "0",
            "WEFT_SERVE_STATE_PATH": folder,
            "WEFT_SERVE_LOG_FORMAT": "off",
        }
        with started_server(model, *arguments, variables=variables) as (port, process):
            wait_for_phases(port, process, time.perf_counter())
            client_times = asyncio.run(_load(port, text, log, tokenizer.decode, say))
        logged = read_steps(log)
    added = [
        seconds - logged.first_tokens[prompt]
        for prompt, seconds in client_times.items()
        if prompt in logged.first_tokens
    ]
    found = fit(logged.steps, float(logged.info.get("swap_seconds_per_block", 1e-4)))
    say(
        f"{found.num_steps:,} steps; mean error of a step {found.mean_error:.1%}, of all {found.bias - 1:+.1%}"
    )
    request_seconds = max(0.0, statistics.median(added)) if added else 0.0
    return _profile(logged.info, found, machine, model, "measured by weft profile", request_seconds)


def profile_of_log(path: Path, machine: str | None, model: str | None) -> MachineProfile:
    """A profile of the steps in an event log. It does not say of which model it is, and names only a GPU."""
    logged = read_steps(path)
    machine = machine or logged.info.get("device")
    if not machine or not model:
        raise InvalidRequestError(
            "the log does not name its model or its machine: give MODEL, and --machine for one without a GPU",
            field="machine",
        )
    found = fit(logged.steps, float(logged.info.get("swap_seconds_per_block", 1e-4)))
    return _profile(logged.info, found, machine, model, "an event log", 0.0)


def profile_of_server(learned: Mapping[str, Any], live: Mapping[str, Any]) -> MachineProfile:
    """A profile of what a running server learned. `learned`: from `/admin/learned`; `live`: from `/live/info`."""
    entry = next((one for one in learned.get("data", ()) if one.get("kind") == "costs"), None)
    if entry is None or entry.get("costs") is None:
        raise WeftError(
            "the server has not learned the costs of its steps yet; send it requests, and try again"
        )
    try:
        sums = LearnedCosts.of(**entry["costs"])
        room = KvRoom(live["block_size"], live["num_blocks"], 0, live["swap_blocks"], live["max_context"])
    except (KeyError, TypeError, ValueError) as error:
        raise WeftError(
            f"the answers of the server cannot be used: {error}; it may be another version"
        ) from None
    model = StepCostModel()
    model.restore(sums)
    base, per_token, per_context, per_pair = model.coefficients
    # A decode of the learned costs counts its context as pairs too; `MeasuredCosts` counts pairs of prompts only.
    costs = MeasuredCosts(
        base,
        ((0, 0.0), (8192, 8192 * per_token)),
        0.0,
        per_context + per_pair,
        per_pair,
        per_context + per_pair,
    )
    name, _, machine = entry["name"].partition(" on ")
    return MachineProfile(
        machine=machine.rpartition(",")[0] or machine,
        model=name,
        source="learned costs of a running server",
        room=room,
        costs=costs,
        is_gpu=bool(live.get("device")),
        steps=int(sums.steps),
    )


def read_steps(path: Path) -> LoggedSteps:
    """Reads the steps of an event log. Steps that failed are left out."""
    logged = LoggedSteps()
    plans: list[dict[str, Any]] = []
    waiting: dict[str, tuple[tuple[int, ...], float]] = {}
    for number, event in read_events(path):
        try:
            _read_event(event, logged, plans, waiting)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise InvalidRequestError(
                f"{path}, line {number}: not an event of a weft log ({error!r})"
            ) from None
    return logged


def _read_event(
    event: dict[str, Any],
    logged: LoggedSteps,
    plans: list[dict[str, Any]],
    waiting: dict[str, tuple[tuple[int, ...], float]],
) -> None:
    kind = event["event"]
    if kind == "start":
        logged.info = event["info"]
    elif kind == "add":
        for one in event["requests"]:
            request = one["request"]
            waiting[request["request_id"]] = tuple(request["prompt"]), event["clock"][0]
    elif kind == "plan" and event["plan"] is not None:
        plans.append(event["plan"])
    elif kind == "fail":
        plans.clear()
    elif kind == "apply":
        plan = plans.pop(0)
        fields = ("num_decodes", "starts", "counts", "samples", "drafts")
        known = _LoggedPlan(*(plan[name] for name in fields))
        block_size = logged.info["block_size"]
        shape = shape_of(known, logged.tables.num_blocks(plan, block_size), block_size)
        if event["seconds"] is not None:
            logged.steps.append((shape, float(event["seconds"])))
        for request_id, samples in zip(plan["request_ids"], plan["samples"], strict=True):
            if samples and request_id in waiting:
                prompt, since = waiting.pop(request_id)
                logged.first_tokens[prompt] = event["clock"][0] - since


def _profile(
    info: Mapping[str, Any], found: Fit, machine: str, model: str, source: str, request_seconds: float
) -> MachineProfile:
    if info.get("store_blocks"):
        raise InvalidRequestError(
            "the log is of a two-tier KV cache; a profile needs one with kv_cache 'full'"
        )
    names = ("block_size", "num_blocks", "bytes_per_block", "swap_blocks", "max_context", "eager_blocks")
    room = KvRoom(
        **{name: info[name] for name in names},
        recompute_seconds_per_token=info["recompute_seconds_per_token"],
    )
    return MachineProfile(
        machine=info.get("device") or machine,
        model=model,
        source=source,
        room=room,
        costs=found.costs,
        is_gpu=bool(info.get("device")),
        request_seconds=round(request_seconds, 6),
        steps=found.num_steps,
        mean_error=round(found.mean_error, 4),
    )


# ---------------------------------------------------------------------- load


async def _load(
    port: int,
    text: Text,
    log: Path,
    decode: Callable[[Sequence[int]], str],
    say: Callable[[str], None],
) -> dict[tuple[int, ...], float]:
    """Rounds of phases until the time is over. Returns the seconds to the first token of requests that had little
    company, as their clients saw it."""
    with log.open("rb") as file:
        context = int(json.loads(file.readline())["info"]["max_context"])
    source, began = random.Random(0), time.perf_counter()
    found: dict[tuple[int, ...], float] = {}
    for number, phase in enumerate(_phases(text, source, context)):
        if number >= len(_CLOSED_LOOPS) and time.perf_counter() - began > MEASURED_SECONDS:
            break
        say(f"{time.perf_counter() - began:4.0f} s  {phase.name}")
        report = await measure(
            Client(f"http://127.0.0.1:{port}"),
            [phase],
            targets=Targets(),
            decode=decode,
            seconds=_REQUEST_SECONDS,
            print_status=lambda line: None,
        )
        use = report.phases[0].machine
        if use.is_disturbed:
            say(f"        other processes used the machine: {', '.join(use.loudest) or 'short ones'}")
        for item, record in zip(phase.items, report.phases[0].records, strict=True):
            if not record.is_answered:
                raise WeftError(
                    f"a request of the measurement failed: {record.failure_kind}: {record.failure_detail}"
                )
            is_alone = phase.clients is None or phase.clients <= _FEW
            if is_alone and isinstance(item.prompt, tuple) and record.first_token is not None:
                found[item.prompt] = record.first_token
    return found


def _phases(text: Text, source: random.Random, context: int) -> Iterator[Phase]:
    """Phases without end. Each round has requests at once, short prompts one after another, shared prefixes, long prompts,
    and arrivals at random times."""

    def item(
        low: int, high: int, at: float = 0.0, answer: int = _ANSWER, prefix: tuple[int, ...] = ()
    ) -> Item:
        room = max(1, context - len(prefix) - answer - 1)
        tokens = text.take(min(room, source.randint(low, high)))
        return Item(prefix + tokens, min(answer, context // 2), at)

    longest = min(context, 4096)
    round_number = 0
    while True:
        for index, count in enumerate(_CLOSED_LOOPS):
            low, high = _LENGTHS[(index + round_number) % len(_LENGTHS)]
            # Of many requests with long prompts, nearly all of the time is prompts.
            high = min(high, 12_000 // count + low)
            items = tuple(item(low, high) for _ in range(max(4, count)))
            yield Phase(f"{count} at once, prompts of {low} to {high} tokens", items, clients=count)
            if count <= _FEW:
                items = tuple(item(4, 512, answer=_SHORT_ANSWER) for _ in range(8 * count))
                yield Phase(f"{count} at once, prompts of 4 to 512 tokens", items, clients=count)
            elif context > 2 * _SHARED and count <= 32:
                prefix = text.take(_SHARED)
                items = tuple(item(*_TAIL, prefix=prefix) for _ in range(count + count // 2))
                yield Phase(f"{count} at once with a shared prefix", items, clients=count)
        items = (item(longest // 2, longest), item(longest // 2, longest))
        yield Phase(f"2 prompts of {longest // 2} to {longest} tokens", items, clients=1)
        times = itertools.accumulate((source.expovariate(4.0) for _ in range(24)), initial=0.0)
        yield Phase("25 at random times", tuple(item(16, 512, at) for at in times), rate=4.0)
        round_number += 1
