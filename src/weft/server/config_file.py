"""Reads settings from flags, the environment and a TOML file, in this order of precedence.

Every key of `settings.KEYS` is a key of the file and an environment variable.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import msgspec

from weft.errors import InvalidRequestError
from weft.server.settings import FLAGS, KEYS, ServerSettings, is_list, is_size

ENVIRONMENT = "WEFT_SERVE_"
CONFIG_VARIABLE = ENVIRONMENT + "CONFIG"
_OTHER_VARIABLES = {"api_keys": "WEFT_API_KEY"}
"""Settings whose environment variable lacks the prefix, because other commands use the variable too."""
_UNITS = ("", "k", "m", "g", "t")
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)\s*(?:([kmgt])(i?))?b?", re.IGNORECASE)

T = TypeVar("T")


@dataclass(frozen=True)
class Given:
    """A value and its source: a flag, a variable or a file."""

    value: Any
    source: str


class Gathered:
    """The settings that were given, by key: `port`, `engine.scheduler.max_running`."""

    def __init__(self, given: Mapping[str, Given]) -> None:
        self.given = given

    def value(self, key: str) -> Any:
        """The given value of a top-level key, else its default."""
        return self.given[key].value if key in self.given else getattr(ServerSettings(), key)

    def applied_to(self, settings: ServerSettings) -> ServerSettings:
        """`settings` with the given values, except API keys. Raises if values contradict each other."""
        return self._override(settings, "")

    def _override(self, part: T, prefix: str) -> T:
        changes: dict[str, Any] = {}
        for name in (field.name for field in dataclasses.fields(part)):  # type: ignore[arg-type]
            key, value = prefix + name, getattr(part, name)
            if dataclasses.is_dataclass(value):
                changes[name] = self._override(value, f"{key}.")
            elif key in self.given and not _is_secret(key):
                changes[name] = self.given[key].value
        try:
            return dataclasses.replace(part, **changes)  # type: ignore[type-var]
        except InvalidRequestError as error:
            key = prefix + error.field
            source = f"{self.given[key].source}: " if key in self.given else ""
            raise InvalidRequestError(f"{source}{prefix}{error}", field=key) from error


def gather(file: Path | None, environment: Mapping[str, str], flags: Mapping[str, Any]) -> Gathered:
    """Collects all given settings. For each key, the source with the highest precedence wins. `flags` is by key; None
    means that the flag was not given."""
    if file is None and environment.get(CONFIG_VARIABLE):
        file = Path(environment[CONFIG_VARIABLE])
    given = dict(_from_file(file)) if file is not None else {}
    given |= _from_environment(environment)
    for key, value in flags.items():
        if is_list(key):
            value = [value] if value and isinstance(value, str) else value or None
        if value is not None:
            given[key] = Given(_read(key, value, FLAGS[key].name), FLAGS[key].name)
    return Gathered(given)


def variable(key: str) -> str:
    """The environment variable of a key."""
    return _OTHER_VARIABLES.get(key, ENVIRONMENT + key.replace(".", "_").upper())


def as_toml(settings: ServerSettings, gathered: Gathered) -> str:
    """The effective settings as a TOML file, each with its source as a comment. API keys are left out."""
    tables: dict[str, list[str]] = {}
    for key in KEYS:
        table, _, name = key.rpartition(".")
        value = gathered.value(key) if _is_secret(key) else attrgetter(key)(settings)
        remark = f"  # {gathered.given[key].source}" if key in gathered.given else ""
        if _is_secret(key):
            line = f"# {name}: {len(value) if value else 'none'}{' given, not shown' if value else ''}"
        elif value is None:
            line = f"# {name} is not set; {allowed_words(key)}"
        else:
            line = f"{name} = {toml_value(value)}"
        tables.setdefault(table, []).append(line + remark)
    head = "# The settings of this server. A comment after a value names its source; values without one are defaults.\n"
    return head + "\n\n".join(
        "\n".join(([f"[{table}]"] if table else []) + lines) for table, lines in tables.items()
    )


def parse_size(text: str) -> int | None:
    """Bytes of "512MiB", "4 GB" or "1073741824"; None if the text is not a size."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        return None
    step = 1024 if found[3] else 1000
    return int(float(found[1]) * step ** _UNITS.index((found[2] or "").lower()))


# --- reading ----------------------------------------------------------------------------------------------------------

_TABLES = frozenset(key.rpartition(".")[0] for key in KEYS) - {""}


def _is_secret(key: str) -> bool:
    return key.endswith("keys")


def _from_file(path: Path) -> Iterator[tuple[str, Given]]:
    try:
        content = tomllib.loads(path.read_bytes().decode())
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidRequestError(f"{path}: cannot be read: {reason}", field="config") from error
    except tomllib.TOMLDecodeError as error:
        raise InvalidRequestError(f"{path}: is not TOML: {error}", field="config") from error
    yield from _from_table(content, "", str(path))


def _from_table(table: Mapping[str, Any], prefix: str, source: str) -> Iterator[tuple[str, Given]]:
    for name, value in table.items():
        key = prefix + name
        if key in KEYS:
            yield key, Given(_read(key, value, source), source)
        elif key not in _TABLES:
            inside = [known for known in KEYS if known.rpartition(".")[0] == prefix.rstrip(".")]
            tables = [known for known in _TABLES if known.rpartition(".")[0] == prefix.rstrip(".")]
            allowed = ", ".join(
                [one.removeprefix(prefix) for one in inside] + [f"[{one}]" for one in sorted(tables)]
            )
            raise InvalidRequestError(
                f"{source}: there is no setting {key!r:.80}{_suggestion(key, KEYS)}; allowed here: {allowed}",
                field=key,
            )
        elif not isinstance(value, dict):
            raise InvalidRequestError(
                f"{source}: {key} is {value!r:.80}; allowed: a table [{key}]", field=key
            )
        else:
            yield from _from_table(value, f"{key}.", source)


def _from_environment(environment: Mapping[str, str]) -> dict[str, Given]:
    """Ignores empty variables. Unknown variables with the prefix are an error: with a misspelt API_KEY_FILE the server
    would need no key."""
    keys = {variable(key): key for key in KEYS}
    given = {}
    for name, value in sorted(environment.items()):
        if name in keys and value:
            given[keys[name]] = Given(_read(keys[name], value, name, is_text=True), name)
        elif name.startswith(ENVIRONMENT) and name not in keys and name != CONFIG_VARIABLE:
            raise InvalidRequestError(
                f"the environment variable {name} is not a setting{_suggestion(name, keys)}; unset it",
                field=name,
            )
    return given


def _suggestion(name: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    # If no name is similar, suggest a key with the same name in another table.
    close = close or [one for one in known if one.rpartition(".")[2] == name.rpartition(".")[2]]
    return f" (did you mean {close[0]}?)" if close else ""


def _read(key: str, value: Any, source: str, is_text: bool = False) -> Any:
    """Converts a given value to the type of its setting, and checks it. `is_text`: numbers and lists are given as text."""
    setting = KEYS[key]
    given = value
    if isinstance(value, str):
        if is_size(key):
            size = parse_size(value)
            value = value if size is None else size
        elif is_text and is_list(key):
            parts = [part.strip() for part in value.split(",")]
            # Empty API keys stay in the list, so that `plain_keys` refuses them: without keys the server is open.
            value = parts if _is_secret(key) else [part for part in parts if part]
    try:
        kind = setting.type | None if setting.is_optional else setting.type
        value = msgspec.convert(value, kind, strict=not is_text or is_size(key))
        # The engine's configuration classes check the ranges of engine settings, because some of these ranges depend on
        # other settings.
        if value is None or setting.range is None or key.startswith("engine.") or value in setting.range:
            return value
    except msgspec.ValidationError:
        pass
    shown = "invalid" if _is_secret(key) else f"{given!r:.80}"
    raise InvalidRequestError(f"{source}: {key} is {shown}; allowed: {allowed_words(key)}", field=key)


def read_value(key: str, text: str, source: str) -> Any:
    """The value of a setting that is given as text, checked. `source` is for errors."""
    return _read(key, text, source, is_text=True)


def allowed_words(key: str) -> str:
    """Describes the values that a setting accepts."""
    if is_size(key):
        return "a size such as 4GiB"
    kind, limits = KEYS[key].type, KEYS[key].range
    words = "a table"
    if is_list(key):
        words = "a list: each a text"
    elif get_origin(kind) is Literal:
        words = ", ".join(sorted(get_args(kind)))
    elif issubclass(kind, Enum):
        words = ", ".join(str(one.value) for one in kind)
    elif kind in _TYPE_WORDS:
        words = _TYPE_WORDS[kind]
    if limits is not None:
        words += f" from {limits.low:,}" + (f" to {limits.high:,}" if limits.high is not None else "")
    return words


_TYPE_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return msgspec.json.encode(value).decode().replace("\x7f", "\\u007f")
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, Mapping):
        return (
            "{"
            + ", ".join(f"{toml_value(str(name))} = {toml_value(one)}" for name, one in value.items())
            + "}"
        )
    return toml_value(value.value) if hasattr(value, "value") else repr(value)
