"""The report of `weft bench serve` as one HTML file: tables and plots as inline SVG, without external resources."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from pathlib import Path

from weft import __version__
from weft.bench.report import machine, write_text
from weft.bench.serve_measure import Targets
from weft.bench.serve_report import (
    describe_targets,
    latency_rows,
    notes,
    throughput_columns,
    throughput_row,
)
from weft.bench.serve_run import PhaseResult, Report

WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 26, 14, 44
MOST_POINTS = 2000
"""Most points of one series: more are not visible, and a browser cannot open a file with a million points."""
NUM_COLOURS = 8
SHORTEST = 0.1
"""Lowest value of a logarithmic axis, in ms. Chunks from one read have a gap of 0, which has no logarithm."""

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --faint: #6b7280; --grid: #e3e6ea; --paper: #fff; --note: #fff6dd;
  --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #cc79a7; --c4: #b58900; --c5: #4b5563; --c6: #7a4fbf; --c7: #8a5a2b; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --faint: #9aa3ad; --grid: #30363d; --paper: #14171a;
  --note: #33290f; --c0: #4aa8e0; --c1: #ff8a3d; --c2: #2fc79a; --c3: #e39cc4; --c4: #e0b73a; --c5: #cfd6de; --c6: #a98be8; --c7: #c08f5c; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1200px;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; } p.about { color: var(--faint); }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; display: block; overflow-x: auto; }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid var(--grid); white-space: nowrap; }
th:first-child, td:first-child, .latency td:nth-child(2) { text-align: left; } th { color: var(--faint); font-weight: 600; }
ul.notes { background: var(--note); padding: .6rem 1rem .6rem 2rem; border-radius: 6px; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 480px), 1fr)); gap: 1rem; }
figure { margin: 0; } figcaption { font-weight: 600; } svg { width: 100%; height: auto; }
svg text { fill: var(--faint); font: 11px system-ui, sans-serif; } svg .grid { stroke: var(--grid); }
svg .mark { stroke: var(--faint); stroke-dasharray: 4 4; }
.key { color: var(--faint); font-size: 13px; } .key span { display: inline-block; margin-right: 1rem; }
.key i { display: inline-block; width: .8em; height: .8em; border-radius: 50%; margin-right: .35em; }
""" + "".join(
    f".l{n} {{ stroke: var(--c{n}); fill: none; stroke-width: 2; }} .d{n} {{ fill: var(--c{n}); fill-opacity: .65; }} "
    f".k{n} {{ background: var(--c{n}); }}\n"
    for n in range(NUM_COLOURS)
)


@dataclass(frozen=True)
class Series:
    """Named points, drawn as a line or as dots."""

    name: str
    points: tuple[tuple[float, float], ...]
    is_line: bool = True
    has_dots: bool = False


@dataclass(frozen=True)
class Scale:
    """Maps values to pixels, linearly or logarithmically."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def place(self, value: float) -> float:
        low, high = self.low, self.high
        if self.is_log:
            low, high, value = math.log10(low), math.log10(high), math.log10(max(value, self.low))
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        if self.is_log:
            first, last = round(math.log10(self.low)), round(math.log10(self.high))
            return [10.0**power for power in range(first, last + 1)]
        step = _round_step((self.high - self.low) / 5)
        return [index * step for index in range(math.ceil(self.low / step), int(self.high / step + 1e-9) + 1)]


def write_html(report: Report, path: Path) -> None:
    write_text(path, page(report))


def page(report: Report) -> str:
    """The whole document. Names from a server or a file are escaped."""
    has_targets = report.targets.is_given
    warnings = notes(report)
    targets = f" Targets: {escape(describe_targets(report))}." if has_targets else ""
    about = (
        f"weft {__version__}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC. {escape(report.dialect.describe())}. "
        f"{escape(machine())}.{targets}"
    )
    throughput = [throughput_row(phase, has_targets) for phase in report.phases]
    latency = latency_rows(report.phases)
    parts = [
        f"<h1>{escape(report.url)}</h1>\n<p class='about'>{about}</p>",
        f"<ul class='notes'>{''.join(f'<li>{escape(note)}</li>' for note in warnings)}</ul>"
        if warnings
        else "",
        "<h2>Throughput</h2>" + table(throughput_columns(has_targets), throughput),
        "<h2>Latency, ms</h2><div class='latency'>"
        + table(("work", "", "p50", "p90", "p99", "max", "mean", "count"), latency)
        + "</div>",
        plots("Against the rate", _sweep_plots(report)),
        plots("Distributions", _distribution_plots(report.phases, report.targets)),
        plots("Over time", [_time_plot(phase) for phase in report.phases]),
    ]
    return (
        "<!DOCTYPE html>\n<html lang='en'><head><meta charset='utf-8'/>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'/>"
        f"<title>weft bench serve</title>\n<style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(part for part in parts if part)
        + "\n</body></html>\n"
    )


def plot(
    title: str,
    x_label: str,
    y_label: str,
    series: Sequence[Series],
    *,
    log_x: bool = False,
    top: float | None = None,
    target: float | None = None,
    diagonal: bool = False,
) -> str:
    """A figure with axes, series and a legend; empty if there are no points.

    `target` draws a vertical line at that x, `diagonal` the line y = x.
    """
    points = [point for line in series for point in line.points]
    if not points:
        return ""
    x_values = [x for x, _ in points] + ([] if target is None else [target])
    x_scale = _scale(x_values, LEFT, WIDTH - RIGHT, is_log=log_x)
    y_values = [y for _, y in points] if top is None else [top]
    y_scale = _scale(y_values, HEIGHT - BOTTOM, TOP)
    body = [_axes(x_scale, y_scale, x_label, y_label)]
    if target is not None:
        x = x_scale.place(target)
        body.append(f"<line class='mark' x1='{x:.1f}' y1='{TOP}' x2='{x:.1f}' y2='{HEIGHT - BOTTOM}'/>")
    if diagonal:
        end = min(x_scale.high, y_scale.high)
        (x1, y1), (x2, y2) = ((x_scale.place(v), y_scale.place(v)) for v in (0.0, end))
        body.append(f"<line class='mark' x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}'/>")
    for number, line in enumerate(series):
        colour = number % NUM_COLOURS
        placed = [(x_scale.place(x), y_scale.place(y)) for x, y in _thinned(line.points)]
        if line.is_line:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
            body.append(f"<polyline class='l{colour}' points='{path}'/>")
        if line.has_dots or not line.is_line:
            body += [f"<circle class='d{colour}' cx='{x:.1f}' cy='{y:.1f}' r='3'/>" for x, y in placed]
    key = "".join(
        f"<span><i class='k{number % NUM_COLOURS}'></i>{escape(line.name)}</span>"
        for number, line in enumerate(series)
    )
    return (
        f"<figure><figcaption>{escape(title)}</figcaption><svg viewBox='0 0 {WIDTH} {HEIGHT}' role='img' "
        f"aria-label='{escape(title)}'>{''.join(body)}</svg><div class='key'>{key}</div></figure>"
    )


def _sweep_plots(report: Report) -> list[str]:
    points = sorted(report.sweep, key=lambda point: point[0])
    if not points:
        return []

    def series(name: str, values: Iterable[tuple[float, float | None]]) -> Series:
        return Series(name, tuple((x, y) for x, y in values if y is not None), has_dots=True)

    carried = [series("answered", ((rate, s.requests_per_second) for rate, s in points))]
    if report.targets.is_given:
        carried.append(series("within targets (goodput)", ((rate, s.goodput) for rate, s in points)))
    latency = [
        series(
            f"{label} {share}",
            (
                (rate, getattr(getattr(s, field), share))
                for rate, s in points
                if getattr(s, field) is not None
            ),
        )
        for label, field in (("first token", "first_token"), ("end to end", "end_to_end"))
        for share in ("p50", "p99")
    ]
    tokens = [series("output tokens/s", ((rate, s.output_tokens_per_second) for rate, s in points))]
    return [
        plot("Requests carried", "requests/s offered", "requests/s", carried, diagonal=True),
        plot("Output tokens", "requests/s offered", "tokens/s", tokens),
        plot("Latency", "requests/s offered", "seconds", latency),
    ]


def _distribution_plots(phases: Sequence[PhaseResult], targets: Targets) -> list[str]:
    def shares(name: str, values: Iterable[float]) -> Series:
        ordered = sorted(1000 * value for value in values)
        return Series(name, tuple((value, 100 * (n + 1) / len(ordered)) for n, value in enumerate(ordered)))

    answered = [(phase.name, [r for r in phase.records if r.is_answered]) for phase in phases]
    first = [shares(name, (r.first_token for r in of if r.first_token is not None)) for name, of in answered]
    gaps = [shares(name, (gap for r in of for gap in r.gaps)) for name, of in answered]
    ends = [shares(name, (r.end_to_end for r in of)) for name, of in answered]
    return [
        plot(title, "ms", f"% of {what} within", series, log_x=True, top=100, target=target and 1000 * target)
        for title, what, series, target in (
            ("Time to first token", "requests", first, targets.first_token),
            ("Gap between chunks", "gaps", gaps, targets.gap),
            ("End to end", "requests", ends, targets.end_to_end),
        )
    ]


def _time_plot(phase: PhaseResult) -> str:
    answered = [record for record in phase.records if record.is_answered]
    first = tuple((r.began, r.first_token) for r in answered if r.first_token is not None)
    series = [
        Series("end to end", tuple((r.began, r.end_to_end) for r in answered), is_line=False),
        Series("first token", first, is_line=False),
    ]
    failed = tuple((r.began, r.end_to_end) for r in phase.records if not r.is_answered)
    if failed:
        series += [Series("failed", failed, is_line=False)]
    return plot(f"{phase.name}: latency by time of sending", "seconds after the start", "seconds", series)


def plots(title: str, figures: Sequence[str]) -> str:
    shown = "\n".join(figure for figure in figures if figure)
    return f"<h2>{escape(title)}</h2>\n<div class='plots'>{shown}</div>" if shown else ""


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _axes(x_scale: Scale, y_scale: Scale, x_label: str, y_label: str) -> str:
    parts = []
    for tick in x_scale.ticks():
        x = x_scale.place(tick)
        parts.append(f"<line class='grid' x1='{x:.1f}' y1='{TOP}' x2='{x:.1f}' y2='{HEIGHT - BOTTOM}'/>")
        parts.append(
            f"<text x='{x:.1f}' y='{HEIGHT - BOTTOM + 15}' text-anchor='middle'>{_figure(tick)}</text>"
        )
    for tick in y_scale.ticks():
        y = y_scale.place(tick)
        parts.append(f"<line class='grid' x1='{LEFT}' y1='{y:.1f}' x2='{WIDTH - RIGHT}' y2='{y:.1f}'/>")
        parts.append(f"<text x='{LEFT - 6}' y='{y + 4:.1f}' text-anchor='end'>{_figure(tick)}</text>")
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(
        f"<text x='{(LEFT + WIDTH - RIGHT) / 2}' y='{HEIGHT - 8}' text-anchor='middle'>{escape(x_label)}</text>"
    )
    parts.append(
        f"<text transform='translate(13 {middle}) rotate(-90)' text-anchor='middle'>{escape(y_label)}</text>"
    )
    return "".join(parts)


def _scale(values: Sequence[float], start: float, end: float, is_log: bool = False) -> Scale:
    if is_log:
        shown = [max(value, SHORTEST) for value in values]
        first, last = math.floor(math.log10(min(shown))), math.ceil(math.log10(max(shown)))
        return Scale(10.0**first, 10.0 ** max(last, first + 1), start, end, is_log=True)
    high = max(*values, 0.0)
    step = _round_step(high / 5 or 0.2)
    return Scale(0.0, step * max(1, math.ceil(high / step - 1e-9)), start, end)


def _round_step(step: float) -> float:
    """Rounds up to 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= step * (1 - 1e-9))


def _thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """Every n-th point and the last one, about `MOST_POINTS` in all."""
    if len(points) <= MOST_POINTS:
        return points
    step = math.ceil(len(points) / MOST_POINTS)
    return [*itertools.islice(points, 0, len(points) - 1, step), points[-1]]


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
