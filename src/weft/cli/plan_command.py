"""`weft plan` and `weft profile`: checks the options, runs, prints and writes."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.backends.registry import GPU_BUDGETS
from weft.bench.report import write_text
from weft.bench.serve import parse_duration
from weft.cli.machine import processor
from weft.errors import InvalidRequestError
from weft.planning.autoscaler import Autoscaling
from weft.planning.html import page
from weft.planning.load import Load, read_description, summarise_load
from weft.planning.profile import MachineProfile, read_profile, shipped_profiles, write_profile
from weft.planning.replica import Targets
from weft.planning.report import Report, best_toml, print_report, write_json
from weft.planning.search import PlanSettings, first_guess, make_plan, parse_sweep
from weft.server.config_file import gather
from weft.server.settings import ServerSettings

MAX_REPLICAS = 1024


@dataclass(frozen=True)
class PlanOptions:
    """The options of `weft plan`, as they were given."""

    profile: str | None
    trace: Path | None
    format: str | None
    limit: int | None
    speed: float
    load: Path | None
    description: Mapping[str, Any]
    seed: int | None
    ttft: str | None
    itl: str | None
    good: float
    replicas: str | None
    autoscale: str | None
    start_delay: str | None
    routing: str
    price: float | None
    config: Path | None
    sweep: list[str]
    jobs: int | None


def plan_command(options: PlanOptions, json: Path | None, html: Path | None, toml: Path | None) -> bool:
    """Plans, prints and writes. Returns whether the replicas are enough."""
    if toml is not None and not options.sweep:
        raise InvalidRequestError(
            "--toml needs --sweep: it writes the best settings of a sweep", field="toml"
        )
    for path in (json, html, toml):
        if path is not None:
            _check_writable(path)
    settings = plan_settings(options)
    load = summarise_load(settings.load)
    start = first_guess(settings.profile, load)
    progress = _Progress(load.requests)
    result = make_plan(settings, progress.say, start, progress.add)
    report = Report(settings, load, result, options.price)
    print_report(report)
    if json is not None:
        write_json(report, json)
    if html is not None:
        write_text(html, page(report))
    if toml is not None and result.best is not None:
        write_text(toml, best_toml(report) + "\n")
    return result.is_enough


class _Progress:
    """Prints a line after each simulation, and every ten seconds of a long one."""

    def __init__(self, requests: int, seconds: float = 10.0) -> None:
        self._requests, self._seconds = requests, seconds
        self._arrived, self._last = 0, time.monotonic()

    def say(self, line: str) -> None:
        self._print(line)
        self._arrived = 0

    def add(self, arrived: int) -> None:
        self._arrived += arrived
        if time.monotonic() - self._last >= self._seconds:
            self._print(f"  {self._arrived:,} of {self._requests:,} requests have arrived")

    def _print(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)
        self._last = time.monotonic()


def _check_writable(path: Path) -> None:
    """Raises now, and not after minutes, if the file cannot be written."""
    reason = ""
    if path.is_dir():
        reason = "it is a folder"
    elif not path.parent.is_dir():
        reason = f"{path.parent} is not a folder"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        reason = "permission denied"
    if reason:
        raise InvalidRequestError(f"cannot write {path}: {reason}")


def plan_settings(options: PlanOptions) -> PlanSettings:
    """The checked options."""
    if not options.profile:
        raise InvalidRequestError(
            f"--profile is missing: give a file that `weft profile` wrote, or one of: {', '.join(shipped_profiles())}",
            field="profile",
        )
    profile = read_profile(options.profile)
    for name, value in (("speed", options.speed), ("price", options.price)):
        if value is not None and not 0 < value < 1e9:
            raise InvalidRequestError(f"--{name} is {value:g}; allowed: above 0", field=name)
    if not 0 < options.good <= 1:
        raise InvalidRequestError(f"--good is {options.good:g}; allowed: above 0, at most 1", field="good")
    if options.routing not in ("prefix", "load"):
        raise InvalidRequestError(f"--routing is {options.routing!r}; allowed: prefix, load", field="routing")
    targets = Targets(parse_duration(options.ttft, "--ttft"), parse_duration(options.itl, "--itl"))
    _refuse_unused(options)
    least, most = parse_range(options.replicas or "1-64", "--replicas")
    autoscaling = None
    if options.autoscale is not None:
        least, most = parse_range(options.autoscale, "--autoscale")
        delay = _start_delay(options.start_delay)
        first = targets.first_token or Autoscaling.first_token
        autoscaling = Autoscaling(least, most, delay, first, waiting_seconds=first / 2)
    elif least != most and targets == Targets():
        raise InvalidRequestError(
            f"--replicas is {least}-{most}, and there is no target: give --ttft or --itl, or one number of replicas",
            field="replicas",
        )
    settings = _server_settings(options.config, profile)
    context = min(profile.room.max_context, settings.context or profile.room.max_context)
    load = _load(options, context)
    return PlanSettings(
        profile=profile,
        load=load,
        settings=settings,
        targets=targets,
        good_share=options.good,
        least=least,
        most=most,
        autoscaling=autoscaling,
        by_prefix=options.routing == "prefix",
        sweep=parse_sweep(options.sweep),
        seed=load.description.seed if load.description is not None else options.seed or 0,
        num_processes=options.jobs,
    )


def _refuse_unused(options: PlanOptions) -> None:
    """Raises if an option would have no effect."""
    names = [
        *(("replicas",) if options.autoscale is not None else ("start_delay",)),
        *(("format", "limit") if options.trace is None else ()),
    ]
    needs = {"replicas": "leave it out with --autoscale", "start_delay": "it needs --autoscale"}
    for name in names:
        if getattr(options, name) is not None:
            why = needs.get(name, "it needs --trace")
            raise InvalidRequestError(f"--{name.replace('_', '-')} has no effect: {why}", field=name)


def _start_delay(text: str | None) -> float:
    if text is None:
        return Autoscaling.start_seconds
    if re.fullmatch(r"0+(\.0*)?\s*(ms|s)", text.strip()):
        return 0.0
    return parse_duration(text, "--start-delay") or 0.0


def parse_range(text: str, option: str) -> tuple[int, int]:
    """Parses '4', or '1-64'."""
    low, dash, high = text.partition("-")
    if not (low.isdecimal() and (high.isdecimal() or not dash)):
        raise InvalidRequestError(f"{option} is {text!r}; write a number such as 4, or 1-64", field=option)
    least, most = int(low), int(high) if dash else int(low)
    if not 1 <= least <= most <= MAX_REPLICAS:
        raise InvalidRequestError(
            f"{option} is {text!r}; write at least 1, at most {MAX_REPLICAS}, and the larger number last",
            field=option,
        )
    return least, most


def _load(options: PlanOptions, context: int) -> Load:
    given = {name: value for name, value in options.description.items() if value is not None}
    if options.trace is None:
        description = read_description(options.load, {**given, "seed": options.seed})
        return Load(context, description, speed=options.speed)
    if given or options.load is not None:
        name = "--load" if options.load is not None else f"--{next(iter(given)).replace('_', '-')}"
        raise InvalidRequestError(f"--trace and {name} each define the load; give one of them", field="trace")
    return Load(context, None, options.trace, options.format or "auto", options.limit, options.speed)


def _server_settings(config: Path | None, profile: MachineProfile) -> ServerSettings:
    """The settings of the servers, as `weft serve --config` has them. On a GPU, with its budgets of a step."""
    gathered = gather(config, {}, {})
    settings = gathered.applied_to(ServerSettings())
    engine = settings.engine
    if settings.memory is not None:
        engine = dataclasses.replace(engine, cache=dataclasses.replace(engine.cache, memory=settings.memory))
    if profile.is_gpu and not any(f"engine.scheduler.{name}" in gathered.given for name in GPU_BUDGETS):
        engine = dataclasses.replace(engine, scheduler=dataclasses.replace(engine.scheduler, **GPU_BUDGETS))
    return dataclasses.replace(settings, engine=engine)


def profile_command(
    model: str | None,
    output: Path,
    *,
    config: Path | None,
    device: str | None,
    log: Path | None,
    url: str | None,
    api_key: str | None,
    machine: str | None,
) -> None:
    """Makes a profile, writes it, and prints what it says."""
    from weft.planning.measure import profile_by_load, profile_of_log, profile_of_server

    if log is not None and url is not None:
        raise InvalidRequestError("--log and --url each define the steps; give one of them", field="log")
    count = len(os.sched_getaffinity(0))
    name = machine or f"{processor().name}, {count} {'core' if count == 1 else 'cores'}"
    if url is not None:
        from weft.cli.batch_command import BatchClient

        client = BatchClient(url, api_key)
        found = profile_of_server(client.send("GET", "/admin/learned"), client.send("GET", "/live/info"))
    elif log is not None:
        found = profile_of_log(log, machine, model)
    else:
        arguments = [
            *(("--config", str(config)) if config else ()),
            *(("--device", device) if device else ()),
        ]
        found = profile_by_load(
            model or "default", arguments, name, lambda line: print(line, file=sys.stderr, flush=True)
        )
    if machine is not None:
        found = dataclasses.replace(found, machine=machine)
    write_profile(found, output)
    costs, room = found.costs, found.room
    print(f"{output}: {found.machine}, model {found.model}; {found.source}")
    print(
        f"  KV cache     {room.num_blocks * room.block_size:,} tokens in {room.num_blocks:,} blocks of {room.block_size}"
    )
    print(
        f"  a step       {1000 * (costs.base + costs.linear_seconds(1) + costs.per_sample):.2f} ms with one token, "
        f"{1000 * (costs.base + costs.linear_seconds(32) + 32 * costs.per_sample):.2f} ms with 32 decodes"
    )
    if costs.per_token:
        print(f"  prompts      {1 / costs.per_token:,.0f} tokens/s, without the cost of their attention")
    if found.steps:
        print(
            f"  measured     {found.steps:,} steps; a step differs from its prediction by {found.mean_error:.1%} on average"
        )
    print(
        f"Plan with it: weft plan --profile {output} --rate 2 --prompt-tokens 16-512 --max-tokens 16-256 --ttft 1s"
    )
