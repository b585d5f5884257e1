"""A plan as one HTML file: tables, and plots as inline SVG, without external resources."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from html import escape

from weft import __version__
from weft.bench.serve_html import STYLE, Series, plot, plots, table
from weft.planning.fleet import Point
from weft.planning.outcome import FineHistogram, Outcome
from weft.planning.report import (
    LATENCY_COLUMNS,
    TRIED_COLUMNS,
    Report,
    answer_lines,
    best_toml,
    latency_rows,
    load_line,
    profile_line,
    shown,
    tried_row,
)


def page(report: Report) -> str:
    """The whole document. Names from files are escaped."""
    result = report.result
    parts = [
        "<h1>weft plan</h1>",
        f"<p class='about'>weft {__version__}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC. {escape(load_line(report.load))}. "
        f"{escape(profile_line(report.plan))}.</p>",
        f"<ul class='notes'>{''.join(f'<li>{escape(line)}</li>' for line in answer_lines(report))}</ul>",
        "<h2>Replicas tried; times in ms</h2>"
        + table(TRIED_COLUMNS, [tried_row(one) for one in shown(result)]),
        "<h2>Latency with the chosen replicas</h2>" + table(LATENCY_COLUMNS, latency_rows(result.chosen)),
        *_sweep(report),
        plots("Replicas", _replica_plots(report)),
        plots("Distributions", _distribution_plots(report)),
        plots("Over time, with the chosen replicas", _time_plots(result.chosen.outcome.points)),
    ]
    return (
        "<!DOCTYPE html>\n<html lang='en'><head><meta charset='utf-8'/>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'/>"
        f"<title>weft plan</title>\n<style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(part for part in parts if part)
        + "\n</body></html>\n"
    )


def _sweep(report: Report) -> list[str]:
    result = report.result
    if result.best is None:
        return []
    names = [name.rpartition(".")[2] for name in report.plan.sweep]
    rows = [(*one.changed.values(), *tried_row(one)[2:]) for one in result.sweep]
    return [
        f"<h2>Settings tried with {result.chosen.in_words}, the best first</h2>"
        + table((*names, *TRIED_COLUMNS[2:]), rows),
        f"<pre>{escape(best_toml(report))}</pre>",
    ]


def _replica_plots(report: Report) -> list[str]:
    tried = sorted(report.result.tried, key=lambda one: one.replicas)
    if len(tried) < 2:
        return []

    def series(name: str, value: Callable[[Outcome], float]) -> Series:
        return Series(name, tuple((one.replicas, value(one.outcome.total)) for one in tried), has_dots=True)

    first = [
        series("first token p50", lambda total: total.first_token.quantile(0.5)),
        series("first token p99", lambda total: total.first_token.quantile(0.99)),
    ]
    good = [series("within the targets", lambda total: 100 * total.good_share)]
    return [
        plot("Requests within the targets", "replicas", "%", good, top=100),
        plot("First token", "replicas", "seconds", first),
    ]


def _distribution_plots(report: Report) -> list[str]:
    tried = sorted(report.result.tried, key=lambda one: one.replicas)
    near = [one for one in tried if abs(one.replicas - report.result.chosen.replicas) <= 1] or tried
    targets = report.plan.targets

    def shares(of: Callable[[Outcome], FineHistogram]) -> list[Series]:
        return [
            Series(
                one.in_words,
                tuple((1000 * value, 100 * share) for value, share in of(one.outcome.total).points()),
            )
            for one in near
        ]

    figures: tuple[tuple[str, str, Callable[[Outcome], FineHistogram], float | None], ...] = (
        ("Time to first token", "requests", lambda total: total.first_token, targets.first_token),
        ("Gap between tokens", "gaps", lambda total: total.gap, targets.gap),
        ("End to end", "requests", lambda total: total.end_to_end, None),
    )
    return [
        plot(
            title, "ms", f"% of {what} within", shares(of), log_x=True, top=100,
            target=None if target is None else 1000 * target,
        )
        for title, what, of, target in figures
    ]  # fmt: skip


def _time_plots(points: list[Point]) -> list[str]:
    def series(name: str, value: Callable[[Point], float]) -> Series:
        return Series(name, tuple((one.until, value(one)) for one in points))

    spans = {
        id(one): one.until - before
        for one, before in zip(points, [0.0, *(p.until for p in points)], strict=False)
    }
    label = "seconds"
    return [
        plot("Arrivals", label, "requests/s", [series("arrivals", lambda p: p.arrivals / max(spans[id(p)], 1e-9))]),
        plot("Replicas and load", label, "", [
            series("replicas", lambda p: p.replicas),
            series("busy replicas", lambda p: p.busy * p.replicas),
        ]),
        plot("Requests inside", label, "requests", [
            series("running", lambda p: p.running), series("waiting", lambda p: p.waiting),
        ]),
        plot("Slowest first token", label, "seconds", [series("first token", lambda p: p.first_token)]),
    ]  # fmt: skip
