"""Writes the pages of docs/reference from the code: `make reference`. `make_monitoring.py` writes its other files.

Settings come from the configuration classes, routes from the OpenAPI document, metrics from the Prometheus registry, and
commands from the command line. A test fails when a page differs from what this script makes.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

from starlette.routing import Route
from typer.main import get_command

from weft.cli.main import app
from weft.config import declared_settings
from weft.server import config_file
from weft.server.api import openapi
from weft.server.metrics import ServerMetrics, _KeyUsage
from weft.server.settings import FLAGS, KEYS, ServerSettings, is_size

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
MARK = "<!-- Made by tools/make_reference.py from the code. To change it, change the code and run `make reference`. -->"


def main() -> None:
    for name, make in PAGES.items():
        (FOLDER / name).write_text(make(), "utf-8")


# --- settings ---------------------------------------------------------------------------------------------------------


def settings_page() -> str:
    lines = [
        "# Settings",
        "",
        MARK,
        "",
        "Every setting of `weft serve`. A flag overrides the environment, the environment overrides the file, and the file overrides the",
        "default. `weft serve --print-config` prints the values in use and the source of each.",
        "",
        "The variable of a setting is `WEFT_SERVE_` and its name in capitals, with `_` for each dot: `WEFT_SERVE_PORT`,",
        f"`{config_file.variable('engine.scheduler.max_running')}`. API keys are in `{config_file.variable('api_keys')}`.",
        "[Configure the server](../guide/configure.md) explains the file and the environment.",
    ]
    tables: dict[str, list[str]] = {}
    for key in KEYS:
        tables.setdefault(key.rpartition(".")[0], []).append(key)
    for table, keys in sorted(tables.items()):
        lines += ["", f"## [{table}]" if table else "## Top level", ""]
        lines += ["| setting | default | allowed | flag | meaning |", "|---|---|---|---|---|"]
        for key in keys:
            words = _setting_words(key)
            assert words, f"{key} has no docstring under its field"
            name = key.rpartition(".")[2]
            row = (
                f"`{name}`",
                _setting_default(key),
                config_file.allowed_words(key),
                f"`{FLAGS[key].name}`" if key in FLAGS else "",
                _one_line(words),
            )
            lines.append(f"| {' | '.join(map(_cell, row))} |")
    return "\n".join(lines) + "\n"


def _setting_default(key: str) -> str:
    value = attrgetter(key)(ServerSettings())
    if value is None or value == ():
        return "none"
    return f"`{_size(value) if is_size(key) else config_file.toml_value(value)}`"


def _size(count: int) -> str:
    for unit in ("", "KiB", "MiB", "GiB"):
        if count < 1024 or count % 1024:
            return f"{count}{unit}"
        count //= 1024
    return f"{count}TiB"


def _setting_words(key: str) -> str:
    kind: Any = ServerSettings
    *path, name = key.split(".")
    for part in path:
        kind = declared_settings(kind)[part].type
    return _field_words(kind).get(name, "")


@cache
def _field_words(kind: type) -> dict[str, str]:
    """The docstring under each field of a dataclass."""
    body = ast.parse(inspect.cleandoc(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    words = {}
    for field, after in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr):
            assert isinstance(field.target, ast.Name)
            words[field.target.id] = ast.literal_eval(after.value)
    return words


# --- routes -----------------------------------------------------------------------------------------------------------


def routes_page() -> str:
    routes = [
        Route(path, lambda request: None, methods=[method.upper()]) for method, path in openapi.OPERATIONS
    ]
    document = openapi.document(routes, needs_key=True)
    schemas = document["components"]["schemas"]
    lines = [
        "# Routes",
        "",
        MARK,
        "",
        "Every route of the server and every field of a request. A running server has the same at `/docs`, to try, and at",
        "`/openapi.json`, for programs. A field with `null` counts as left out. Unknown fields are ignored and named in a `Warning` header.",
        "",
        "| route | what it does | key | errors |",
        "|---|---|---|---|",
    ]
    for path, methods in document["paths"].items():
        for method, one in methods.items():
            what = ". ".join(
                part.rstrip(".") for part in (one["summary"], one.get("description", "")) if part
            )
            errors = [status for status in one["responses"] if status not in ("200", "default")]
            row = (
                f"`{method.upper()} {path}`",
                what,
                "yes" if one["security"] else "no",
                ", ".join(errors),
            )
            lines.append(f"| {' | '.join(map(_cell, row))} |")
    lines += [
        "",
        "The column *key* says whether a server with [API keys](../guide/api-keys.md) asks for one here.",
    ]
    lines += ["", "## Errors", "", "| status | meaning |", "|---|---|"]
    lines += [f"| {status} | {_cell(words)} |" for status, words in openapi._STATUSES.items()]
    chat, completion = (set(_fields(schemas[name])) for name in ("ChatRequest", "CompletionRequest"))
    shared = chat & completion
    lines += ["", "## Fields of chats and completions", "", *_FIELDS_HEAD]
    lines += [row for row in _fields(schemas["ChatRequest"]) if row in shared]
    for path, methods in document["paths"].items():
        for method, one in methods.items():
            if "requestBody" in one:
                [(media_type, content)] = one["requestBody"]["content"].items()
                name = content["schema"].get("$ref", "").rpartition("/")[2]
                fields = schemas[name] if name else content["schema"]
                lines += ["", f"## {method.upper()} {path}", ""]
                if name in ("ChatRequest", "CompletionRequest"):
                    lines += ["The fields above, and:", ""]
                else:
                    shared = set()
                if not name:
                    lines += [f"The body is a form (`{media_type}`).", ""]
                lines += [*_FIELDS_HEAD, *(row for row in _fields(fields) if row not in shared)]
            elif queries := [each for each in one.get("parameters", ()) if each["in"] == "query"]:
                lines += [
                    "",
                    f"## {method.upper()} {path}",
                    "",
                    "Parameters of the query:",
                    "",
                    *_FIELDS_HEAD,
                ]
                properties = {each["name"]: each["schema"] for each in queries}
                lines += _fields({"properties": properties})
    return "\n".join(lines) + "\n"


_FIELDS_HEAD = ("| field | type | range | default | meaning |", "|---|---|---|---|---|")


def _fields(schema: dict[str, Any]) -> Iterator[str]:
    required = set(schema.get("required", ()))
    for name, one in schema["properties"].items():
        low, high = one.get("minimum", one.get("exclusiveMinimum")), one.get("maximum")
        bounds = ""
        if low is not None or high is not None:
            above = "above " if "exclusiveMinimum" in one else ""
            bounds = f"{above}{_number(low)} to {_number(high)}"
        default = f"`{one['default']!r}`" if "default" in one else ("required" if name in required else "")
        default = default.replace("`False`", "`false`").replace("`True`", "`true`")
        row = (f"`{name}`", _type(one), bounds, default, one.get("description", ""))
        yield f"| {' | '.join(map(_cell, row))} |"


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.15g}"


def _type(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        kinds = [_type(one) for one in schema["anyOf"] if one.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "$ref" in schema:
        return "object"
    if "enum" in schema:
        return ", ".join(map(str, schema["enum"]))
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return str(schema.get("type", "any"))


# --- metrics ----------------------------------------------------------------------------------------------------------


def metrics_page() -> str:
    plain = set(_metric_rows(ServerMetrics("model")))
    rows = [*_metric_rows(ServerMetrics("model", is_two_tier=True)), *_key_rows()]
    lines = [
        "# Metrics",
        "",
        MARK,
        "",
        "Every series of `/metrics`, for Prometheus. Names are those of vLLM with `weft:` in front, where vLLM has the series.",
        "A counter ends in `_total`; a histogram has `_bucket`, `_sum` and `_count`. Every series has the label `model_name`.",
        "",
        "| name | type | further labels | meaning |",
        "|---|---|---|---|",
    ]
    for row in rows:
        name, kind, labels, words = row
        if row not in plain and name.startswith("weft:kv_cache"):
            words = f"Two-tier KV cache only. {words}"
        shown = ", ".join(f"`{label}`" for label in labels if label != "model_name")
        lines.append(f"| {' | '.join(map(_cell, (f'`{name}`', kind, shown, words)))} |")
    lines += [
        "",
        "A key with `admin = true` sees the series of all [keys](../guide/api-keys.md), another key its own.",
    ]
    return "\n".join(lines) + "\n"


_MetricRow = tuple[str, str, tuple[str, ...], str]


def _metric_rows(metrics: ServerMetrics) -> Iterator[_MetricRow]:
    for collector in metrics._registry._collector_to_names:
        for family in collector.collect():
            labels = tuple(getattr(collector, "_labelnames", None) or getattr(collector, "_labels", ()))
            yield _metric_row(family, labels)


def _key_rows() -> Iterator[_MetricRow]:
    for family in _KeyUsage({"model_name": "model"}, {"name": (1, 1)}).collect():
        yield _metric_row(family, tuple(family.samples[0].labels))


def _metric_row(family: Any, labels: tuple[str, ...]) -> _MetricRow:
    name = family.name + ("_total" if family.type == "counter" else "")
    return name, family.type, labels, family.documentation


# --- commands ---------------------------------------------------------------------------------------------------------


def commands_page() -> str:
    root = get_command(app)
    lines = [
        "# Commands",
        "",
        MARK,
        "",
        "Every command with its options, as `weft COMMAND --help` shows them.",
        "",
    ]
    lines += ["| command | what it does |", "|---|---|"]
    found = [one for one in _commands(root, "weft") if one[0] != "weft"]
    for name, command in found:
        first = _one_line((command.help or "").split("\n\n")[0])
        link = re.sub(r"[^\w\- ]", "", name).replace(" ", "-")
        lines.append(f"| [`{name}`](#{link}) | {_cell(first)} |")
    for name, command in found:
        lines += ["", f"## {name}", ""]
        paragraphs = [_one_line(part) for part in inspect.cleandoc(command.help or "").split("\n\n")]
        lines += [_escape("\n\n".join(paragraphs))]
        arguments = [one for one in command.params if one.param_type_name == "argument"]
        options = [one for one in command.params if one.param_type_name == "option"]
        usage = [name, *(f"[{one.metavar}]" if not one.required else one.metavar for one in arguments)]
        if not getattr(command, "commands", None):
            lines += ["", f"    {' '.join(map(str, usage))}{' [OPTIONS]' if options else ''}"]
        if options:
            lines += ["", "| option | default | meaning |", "|---|---|---|"]
            for one in options:
                flags = ", ".join(f"`{flag}`" for flag in one.opts)
                value = f" {one.metavar}" if one.metavar else ""
                default = one.default
                shown = "" if default in (None, False, ()) or callable(default) else f"`{default}`"
                lines.append(
                    f"| {_cell(flags + value)} | {_cell(shown)} | {_cell(_one_line(one.help or ''))} |"
                )
    return "\n".join(lines) + "\n"


def _commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    yield name, command
    for part, each in getattr(command, "commands", {}).items():
        if not each.hidden:
            yield from _commands(each, f"{name} {part}")


# --- text -------------------------------------------------------------------------------------------------------------


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _escape(text: str) -> str:
    """Angle brackets outside code would be taken for HTML."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else part.replace("<", "&lt;") for part in parts)


def _cell(text: str) -> str:
    return _escape(text).replace("|", "\\|")


PAGES: dict[str, Callable[[], str]] = {
    "settings.md": settings_page,
    "routes.md": routes_page,
    "metrics.md": metrics_page,
    "commands.md": commands_page,
}

if __name__ == "__main__":
    main()
