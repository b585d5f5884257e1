"""Writes the Grafana dashboard and the alert rules of docs/reference: `make reference`.

Both name metrics of the server's registry only. An expression with a metric or label that does not exist, or a rate of
a gauge, stops this script. A test fails when a file differs from what this script makes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from dashboard_panels import ROWS, Panel, Query

from weft.server.metrics import ServerMetrics, _KeyUsage

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
SELECT = '{job=~"$job", instance=~"$instance", model_name=~"$model"}'
"""Selects what the variables of the dashboard select."""
_TARGET_LABELS = frozenset({"job", "instance", "model_name", "le"})


def main() -> None:
    for name, make in PAGES.items():
        (FOLDER / name).write_text(make(), "utf-8")


# --- what the server declares -----------------------------------------------------------------------------------------


@cache
def declared() -> Mapping[str, tuple[str, frozenset[str]]]:
    """Type and labels by the name of each series. The parts of a histogram count as counters."""
    metrics = ServerMetrics("model", is_two_tier=True)
    found: dict[str, tuple[str, frozenset[str]]] = {}
    for collector in [*metrics._registry._collector_to_names, _KeyUsage({"model_name": ""}, {"key": (1, 1)})]:
        known = getattr(collector, "_labelnames", None) or getattr(collector, "_labels", ())
        for family in collector.collect():
            labels = frozenset(known).union(*(sample.labels for sample in family.samples))
            if family.type == "histogram":
                for part in ("bucket", "sum", "count"):
                    found[f"{family.name}_{part}"] = "counter", labels
            else:
                name = family.name + ("_total" if family.type == "counter" else "")
                found[name] = family.type, labels
    return found


def checked(expression: str) -> str:
    """The expression, if it uses only what the server declares."""
    names = re.findall(r"weft:\w+", expression)
    assert names, f"no metric of weft in {expression}"
    for name in names:
        assert name in declared(), f"there is no metric {name}: {expression}"
    for function, name in re.findall(r"(\w+)\((weft:\w+)", expression):
        is_counter = declared()[name][0] == "counter"
        if function in ("rate", "increase"):
            assert is_counter, f"{name} is no counter: {expression}"
        if function in ("deriv", "changes", "min_over_time"):
            assert not is_counter, f"{name} is a counter: {expression}"
    labels = _TARGET_LABELS.union(*(declared()[name][1] for name in names))
    used = [word for by in re.findall(r"(?:by|on) \(([^)]*)\)", expression) for word in re.split(", *", by)]
    used += re.findall(r"(\w+)(?:=~|!=|!~|=)\"", expression)
    for label in used:
        assert label in labels, f"no metric here has the label {label}: {expression}"
    return expression


# --- the dashboard ----------------------------------------------------------------------------------------------------


_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def dashboard() -> str:
    document = {
        "title": "weft",
        "uid": "weft",
        "description": "Servers of weft. Made by tools/make_monitoring.py from the declared metrics.",
        "tags": ["weft", "llm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "graphTooltip": 1,
        "templating": {
            "list": [
                {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
                _variable("job", "label_values(weft:engine_up, job)"),
                _variable("instance", 'label_values(weft:engine_up{job=~"$job"}, instance)'),
                _variable(
                    "model", 'label_values(weft:engine_up{job=~"$job", instance=~"$instance"}, model_name)'
                ),
            ]
        },
        "annotations": {"list": []},
        "panels": list(_panels()),
    }
    return json.dumps(document, indent=1) + "\n"


def _variable(name: str, query: str) -> dict[str, Any]:
    checked(query.partition("(")[2].rpartition(",")[0])
    return {
        "name": name,
        "label": name.capitalize(),
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,  # when the time range changes
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _panels() -> Iterator[dict[str, Any]]:
    number = top = 0
    for row, panels in ROWS.items():
        number += 1
        yield {
            "id": number,
            "type": "row",
            "title": row,
            "collapsed": False,
            "panels": [],
            "gridPos": {"x": 0, "y": top, "w": 24, "h": 1},
        }
        top, left = top + 1, 0
        height = 4 if panels[0].is_stat else 8
        for panel in panels:
            if left + panel.width > 24:
                top, left = top + height, 0
            number += 1
            yield _panel(panel, number, {"x": left, "y": top, "w": panel.width, "h": height})
            left += panel.width
        top += height


def _shown(query: Query) -> str:
    return checked(query.expression.replace("{$}", SELECT).replace("[$]", "[$__rate_interval]"))


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit}
    options: dict[str, Any]
    if panel.is_stat:
        steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
        if panel.red_above is not None:
            # A step begins at its value, so a limit of 0 is just above it.
            steps.append({"color": "red", "value": panel.red_above or 1e-9})
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
        options = {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value", "graphMode": "area"}
    else:
        defaults["min"] = 0
        defaults["custom"] = {
            "fillOpacity": 30 if panel.is_stacked else 5,
            "stacking": {"mode": "normal" if panel.is_stacked else "none"},
            "showPoints": "never",
        }
        options = {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    return {
        "id": number,
        "type": "stat" if panel.is_stat else "timeseries",
        "title": panel.title,
        "description": panel.help,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _SOURCE,
                "expr": _shown(query),
                "legendFormat": query.legend or "__auto",
            }
            for index, query in enumerate(panel.queries)
        ],
    }


# --- alerts -----------------------------------------------------------------------------------------------------------

_BY = "by (job, instance, model_name)"
LATE_SECONDS = 10


@dataclass(frozen=True)
class Alert:
    name: str
    expression: str
    seconds: int
    """The expression must hold this long."""
    severity: str
    summary: str
    what_to_do: str


ALERTS = (
    Alert(
        "WeftServerDown",
        "up == 0 and on (job, instance) count by (job, instance) (last_over_time(weft:engine_up[1d]))",
        60,
        "critical",
        "weft at {{ $labels.instance }} cannot be scraped",
        "The server does not run, or its network is broken. It was scraped within the last day.",
    ),
    Alert(
        "WeftNotReady",
        "weft:engine_up == 0",
        60,
        "critical",
        "The engine of {{ $labels.model_name }} at {{ $labels.instance }} is not ready",
        "The server restarts it by itself. The log has the reason: engine_died, engine_stalled, engine_restart_failed.",
    ),
    Alert(
        "WeftQueueGrows",
        "min_over_time(weft:num_requests_waiting[5m]) > 0 and deriv(weft:num_requests_waiting[10m]) > 0",
        600,
        "warning",
        "More and more requests wait for {{ $labels.model_name }} at {{ $labels.instance }}",
        "More requests arrive than are answered. Add a server, or limit the requests of the keys.",
    ),
    Alert(
        "WeftFirstTokensLate",
        f"histogram_quantile(0.95, sum {_BY.replace(')', ', le)')} "
        f'(rate(weft:time_to_first_token_seconds_bucket{{priority!="low"}}[10m]))) > {LATE_SECONDS}',
        300,
        "warning",
        "First tokens of {{ $labels.model_name }} at {{ $labels.instance }} come late: p95 is "
        "{{ $value | humanizeDuration }}",
        "If requests wait, the server is full. Otherwise prompts are long, or the HTTP process is slow "
        "(weft:event_loop_lag_seconds).",
    ),
    Alert(
        "WeftCacheThrashing",
        f'sum {_BY} (rate(weft:num_preemptions_total{{cause="memory"}}[10m])) > '
        f"0.1 * sum {_BY} (rate(weft:request_success_total[10m])) "
        f'or sum {_BY} (rate(weft:kv_cache_evictions_total{{state="hot"}}[10m])) > 0',
        600,
        "warning",
        "The KV cache of {{ $labels.model_name }} at {{ $labels.instance }} is too small for its load",
        "One of ten answers is preempted for memory, or KV blocks of live sessions are evicted: both are computed again. "
        "Give the KV cache more memory, lower max_running, or use kv_cache = two-tier.",
    ),
    Alert(
        "WeftEngineRestarted",
        "increase(weft:engine_restarts_total[30m]) > 0",
        0,
        "warning",
        "The engine of {{ $labels.model_name }} at {{ $labels.instance }} was restarted",
        "Its requests got an error. The log has the reason and the stacks: engine_died or engine_stalled.",
    ),
    Alert(
        "WeftServerRestarts",
        "changes(weft:start_time_seconds[30m]) > 2",
        0,
        "warning",
        "weft at {{ $labels.instance }} starts again and again",
        "Look at the end of its log, and at its memory limit.",
    ),
)


def alerts() -> str:
    lines = [
        "# Alert rules of weft for Prometheus. Made by tools/make_monitoring.py; to change it, run `make reference`.",
        "groups:",
        "  - name: weft",
        "    rules:",
    ]
    for one in ALERTS:
        lines += [
            f"      - alert: {one.name}",
            f"        expr: {json.dumps(checked(one.expression))}",
            *([f"        for: {one.seconds}s"] if one.seconds else []),
            f"        labels: {{severity: {one.severity}}}",
            "        annotations:",
            f"          summary: {json.dumps(one.summary)}",
            f"          description: {json.dumps(one.what_to_do)}",
        ]
    return "\n".join(lines) + "\n"


PAGES: dict[str, Callable[[], str]] = {
    "grafana-dashboard.json": dashboard,
    "prometheus-alerts.yml": alerts,
}

if __name__ == "__main__":
    main()
