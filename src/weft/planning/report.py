"""A plan as tables, as JSON, and as the TOML of its best settings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from weft import __version__
from weft.backends.registry import GPU_BUDGETS
from weft.bench.report import print_line, print_table, write_text
from weft.planning.load import LoadSummary
from weft.planning.outcome import FineHistogram
from weft.planning.replica import NO_TARGETS
from weft.planning.search import BREAK_REQUESTS, SPEEDS, PlanResult, PlanSettings, Tried, with_changes
from weft.server.config_file import toml_value
from weft.server.settings import KEYS, ServerSettings

SHARES = (0.5, 0.9, 0.99)


@dataclass(frozen=True)
class Report:
    plan: PlanSettings
    load: LoadSummary
    result: PlanResult
    price: float | None
    """Of one replica for an hour."""

    @property
    def cost_per_hour(self) -> float | None:
        """The mean over the load, with the time that replicas take to start."""
        outcome = self.result.chosen.outcome
        if self.price is None or not outcome.seconds:
            return None
        return self.price * outcome.total.paid_seconds / outcome.seconds

    @property
    def cost_per_million_tokens(self) -> float | None:
        cost, speed = self.cost_per_hour, self.result.chosen.outcome.tokens_per_second
        return cost / (3600 * speed) * 1e6 if cost is not None and speed else None


def answer_lines(report: Report) -> list[str]:
    """The answer in sentences."""
    plan, result = report.plan, report.result
    chosen, scaling = result.chosen, plan.autoscaling
    outcome, total = chosen.outcome, chosen.outcome.total
    count = chosen.in_words
    if scaling is not None:
        count = f"{count}, {outcome.mean_replicas:.2f} on average"
    has_targets = plan.targets != NO_TARGETS
    share = (
        f"{total.good_share:.2%} of the requests are within the targets (wanted: {plan.good_share:.2%})"
        if has_targets
        else f"{total.completed:,} requests completed, and no target was given"
    )
    lines = [
        f"{count}: {share}."
        if chosen.is_enough
        else f"{count} {'is' if chosen.replicas == 1 and scaling is None else 'are'} not enough: {share}; {chosen.cause}."
    ]
    if not chosen.is_enough and plan.least != plan.most and scaling is None:
        lines.append(f"More than {plan.most} replicas are needed; allow more with --replicas.")
    if report.cost_per_hour is not None:
        per_million = report.cost_per_million_tokens or 0.0
        lines.append(
            f"Cost: {report.cost_per_hour:.2f} an hour, {per_million:.3g} for a million output tokens."
        )
    is_part = report.load.requests > BREAK_REQUESTS
    part = f" (tried with its first {BREAK_REQUESTS:,} requests)" if is_part else ""
    if result.breaks is not None:
        lines.append(
            f"What breaks first{part}: at {result.breaks.speed:g} times this load {result.breaks.cause}."
        )
    elif chosen.is_enough and has_targets:
        lines.append(f"Nothing breaks up to {SPEEDS[-1]:g} times this load{part}.")
    if result.best is not None:
        best = result.best
        words = ", ".join(f"{name.rpartition('.')[2]} = {value}" for name, value in best.changed.items())
        share = f"{best.outcome.total.good_share:.2%} of the requests are within the targets"
        result_words = f" With them and {best.in_words}, {share}." if has_targets else ""
        lines.append(f"Best settings: {words or 'the present ones'}.{result_words}")
    return lines


def load_line(load: LoadSummary) -> str:
    conversations = f", {load.conversations:,} conversations" if load.conversations else ""
    conversations += f", {load.cut:,} requests cut to the context" if load.cut else ""
    return (
        f"Load: {load.name}, {load.requests:,} requests in {load.seconds:,.0f} s ({load.rate:.3g} a second), "
        f"{load.prompt_tokens:,.0f} prompt and {load.answer_tokens:,.0f} answer tokens on average{conversations}"
    )


def profile_line(plan: PlanSettings) -> str:
    profile = plan.profile
    tokens = profile.room.num_blocks * profile.room.block_size
    return (
        f"Machine: {profile.machine}, model {profile.model}, KV cache of {tokens:,} tokens; costs: {profile.source}"
        + (f", {profile.steps:,} steps" if profile.steps else "")
    )


def latency_rows(tried: Tried) -> list[tuple[str, ...]]:
    total = tried.outcome.total
    return [
        _latency("first token, ms", total.first_token),
        _latency("gap, ms", total.gap),
        _latency("end to end, ms", total.end_to_end),
    ]


LATENCY_COLUMNS = ("", "p50", "p90", "p99", "max", "mean")
TRIED_COLUMNS = (
    *("replicas", "load", "within targets", "first p50", "first p99", "gap p99", "tokens/s"),
    *("busy", "rows/step", "hits", "KV peak", "preempted"),
)


def tried_row(tried: Tried) -> tuple[str, ...]:
    outcome, total = tried.outcome, tried.outcome.total
    return (
        tried.count,
        f"{tried.speed:g}",
        f"{total.good_share:.2%}",
        f"{1000 * total.first_token.quantile(0.5):,.0f}",
        f"{1000 * total.first_token.quantile(0.99):,.0f}",
        f"{1000 * total.gap.quantile(0.99):,.1f}",
        f"{outcome.tokens_per_second:,.0f}",
        f"{total.utilisation:.0%}",
        f"{total.rows_per_step:.1f}",
        f"{total.hit_rate:.1%}",
        f"{total.kv_peak:.0%}",
        f"{total.preemptions:,}",
    )


def shown(result: PlanResult) -> list[Tried]:
    """The numbers of replicas that were tried, the fewest first, and the load that was too high."""
    tried = sorted(result.tried, key=lambda one: one.replicas)
    return tried if result.breaks is None else [*tried, result.breaks]


def print_report(report: Report) -> None:
    result = report.result
    print_line(load_line(report.load))
    print_line(profile_line(report.plan))
    print_table("Replicas tried; times in ms", TRIED_COLUMNS, [tried_row(one) for one in shown(result)])
    print_table("Latency with the chosen replicas", LATENCY_COLUMNS, latency_rows(result.chosen))
    if result.sweep:
        names = [name.rpartition(".")[2] for name in report.plan.sweep]
        rows = [(*one.changed.values(), *tried_row(one)[2:]) for one in result.sweep]
        print_table(
            f"Settings tried with {result.chosen.in_words}, the best first",
            (*names, *TRIED_COLUMNS[2:]),
            rows,
        )
    for line in answer_lines(report):
        print_line(line)
    if result.best is not None:
        print(f"\n{best_toml(report)}")


def best_toml(report: Report) -> str:
    """The best settings as a file for `weft serve --config`: all that differ from the defaults. `weft serve` leaves out all
    budgets of a GPU if one is set, so the file has all of them."""
    plan, best = report.plan, report.result.best
    assert best is not None
    settings, defaults = with_changes(plan.settings, best.changed), ServerSettings()
    budgets = [f"engine.scheduler.{name}" for name in GPU_BUDGETS] if plan.profile.is_gpu else []
    tables: dict[str, list[str]] = {}
    for key in KEYS:
        value = attrgetter(key)(settings)
        is_changed = key in best.changed or key in budgets or value != attrgetter(key)(defaults)
        if value is None or not is_changed or key.endswith("keys"):
            continue
        table, _, name = key.rpartition(".")
        text = best.changed[key] if key == "memory" and key in best.changed else value
        tables.setdefault(table, []).append(f"{name} = {toml_value(text)}")
    parts = [
        "\n".join([*([f"[{table}]"] if table else []), *lines]) for table, lines in sorted(tables.items())
    ]
    return "\n\n".join(parts)


def document(report: Report) -> dict[str, Any]:
    """All results, in seconds."""
    plan, result = report.plan, report.result
    return {
        "weft": __version__,
        "profile": {
            "machine": plan.profile.machine,
            "model": plan.profile.model,
            "source": plan.profile.source,
        },
        "load": {**asdict(report.load), "rate": report.load.rate},
        "targets": {**asdict(plan.targets), "good_share": plan.good_share},
        "seed": plan.seed,
        "replicas": result.chosen.replicas if plan.autoscaling is None else None,
        "autoscaling": None if plan.autoscaling is None else asdict(plan.autoscaling),
        "is_enough": result.is_enough,
        "cost_per_hour": report.cost_per_hour,
        "cost_per_million_output_tokens": report.cost_per_million_tokens,
        "chosen": _tried(result.chosen),
        "tried": [_tried(one) for one in result.tried],
        "breaks_first": None if result.breaks is None else _tried(result.breaks),
        "sweep": [_tried(one) for one in result.sweep],
        "best": None if result.best is None else {**_tried(result.best), "toml": best_toml(report)},
        "over_time": [asdict(point) for point in result.chosen.outcome.points],
        "answer": answer_lines(report),
    }


def write_json(report: Report, path: Path) -> None:
    write_text(path, json.dumps(document(report)) + "\n")


def _tried(tried: Tried) -> dict[str, Any]:
    outcome, total = tried.outcome, tried.outcome.total
    sums = {
        name: value
        for name, value in vars(total).items()
        if isinstance(value, int | float) and name != "ended"
    }
    return {
        "replicas": tried.replicas if tried.scaling is None else None,
        "mean_replicas": outcome.mean_replicas,
        "most_replicas": outcome.most_replicas,
        "speed": tried.speed,
        "settings": dict(tried.changed),
        "is_enough": tried.is_enough,
        "cause": tried.cause,
        "seconds": outcome.seconds,
        "requests_per_second": outcome.requests_per_second,
        "output_tokens_per_second": outcome.tokens_per_second,
        "good_share": total.good_share,
        "hit_rate": total.hit_rate,
        "utilisation": total.utilisation,
        "rows_per_step": total.rows_per_step,
        **sums,
        **{name: _distribution(getattr(total, name)) for name in ("first_token", "gap", "end_to_end")},
        "waited_for": dict(total.limits),
        "requests_by_replica": outcome.by_replica,
    }


def _distribution(values: FineHistogram) -> dict[str, float]:
    quantiles = {f"p{100 * share:g}": values.quantile(share) for share in SHARES}
    return {"count": values.count, "mean": values.mean, **quantiles, "max": values.largest}


def _latency(name: str, values: FineHistogram) -> tuple[str, ...]:
    figures: Sequence[float] = (*(values.quantile(share) for share in SHARES), values.largest, values.mean)
    return (name, *(f"{1000 * one:,.1f}" for one in figures))
