"""Reads settings from flags, the environment and a TOML file, in this order of precedence.

Keys are derived from the fields of `ServerSettings` and of the engine configuration inside it. A new field is at once
a new TOML key and a new environment variable.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import msgspec
from msgspec import Meta, inspect

from weft.errors import InvalidRequestError
from weft.server.settings import ServerSettings

ENVIRONMENT = "WEFT_SERVE_"
CONFIG_VARIABLE = ENVIRONMENT + "CONFIG"
_OTHER_VARIABLES = {"api_keys": "WEFT_API_KEY"}
"""Environment variables without the prefix. Other commands use them too."""
_FLAGS = {
    "model": "MODEL",
    "api_keys": "--api-key",
    "names": "--name",
    "backend": "--device",
    "engine.cache.kv_cache": "--kv-cache",
    "engine.cache.tail_length": "--tail-length",
    "engine.cache.store_bits": "--store-bits",
    "engine.scheduler.max_draft_tokens": "--drafts",
}
"""Flags whose name differs from their key."""
_UNITS = ("", "k", "m", "g", "t")
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)\s*(?:([kmgt])(i?))?b?", re.IGNORECASE)

T = TypeVar("T")


@dataclass(frozen=True)
class _Command:
    """Keys that `weft serve` handles itself. It derives fields of `ServerSettings` from them."""

    model: str = "default"
    """'default' (SmolLM2-135M-Instruct), 'hf:owner/name', or a path to a GGUF file or a folder with safetensors."""
    context: Annotated[int, Meta(ge=2)] | None = None
    """Longest context in tokens. Not set: the model's own."""
    memory: Annotated[int, Meta(ge=1)] | None = None
    """Bytes for the KV cache. Not set: most of the free GPU memory; on a CPU 2 GiB or one whole context, at most half of the free memory."""
    threads: Annotated[int, Meta(ge=1, le=1024)] | None = None
    """Threads of the CPU backend. Not set: one for each physical core."""
    quantize: Literal["int8", "int4"] | None = None
    """Quantise weights that are stored as floats."""
    api_keys: tuple[str, ...] = ()
    """API keys that requests must send. None at all: no key is needed."""
    api_key_file: str | None = None
    """A file with API keys: one key a line, or TOML with limits for each key."""


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
        """The value of a key of `_Command`, or its default."""
        return self.given[key].value if key in self.given else getattr(_Command(), key)

    def applied_to(self, settings: ServerSettings) -> ServerSettings:
        """`settings` with the given values, without the keys of `_Command`. Raises if values contradict each other."""
        return self._override(settings, "")

    def _override(self, part: T, prefix: str) -> T:
        changes: dict[str, Any] = {}
        for name in (field.name for field in dataclasses.fields(part)):  # type: ignore[arg-type]
            key, value = prefix + name, getattr(part, name)
            if dataclasses.is_dataclass(value):
                changes[name] = self._override(value, f"{key}.")
            elif key in self.given and key not in _COMMAND_KEYS:
                changes[name] = self.given[key].value
        try:
            return dataclasses.replace(part, **changes)  # type: ignore[type-var]
        except InvalidRequestError as error:
            key = prefix + error.field
            source = f"{self.given[key].source}: " if key in self.given else ""
            raise InvalidRequestError(f"{source}{prefix}{error}", field=key) from error


def gather(file: Path | None, environment: Mapping[str, str], flags: Mapping[str, Any]) -> Gathered:
    """Collects all given settings; for each key the source with the highest precedence wins. In `flags`, by key, None
    means not given."""
    if file is None and environment.get(CONFIG_VARIABLE):
        file = Path(environment[CONFIG_VARIABLE])
    given = dict(_from_file(file)) if file is not None else {}
    given |= _from_environment(environment)
    for key, value in flags.items():
        if value is not None:
            flag = _FLAGS.get(key, "--" + key.replace("_", "-"))
            given[key] = Given(_read(key, value, flag), flag)
    return Gathered(given)


def variable(key: str) -> str:
    """The environment variable of a key."""
    return _OTHER_VARIABLES.get(key, ENVIRONMENT + key.replace(".", "_").upper())


def as_toml(settings: ServerSettings, gathered: Gathered) -> str:
    """The effective settings as a TOML file, each with its source as a comment. API keys are left out."""
    tables: dict[str, list[str]] = {}
    for key in KEYS:
        table, _, name = key.rpartition(".")
        value: Any = settings
        if key in _COMMAND_KEYS:
            value = gathered.value(key)
        else:
            for part in key.split("."):
                value = getattr(value, part)
        remark = f"  # {gathered.given[key].source}" if key in gathered.given else ""
        if _is_secret(key):
            line = f"# {name}: {len(value) if value else 'none'}{' given, not shown' if value else ''}"
        elif value is None:
            line = f"# {name} is not set; {_allowed(key)}"
        else:
            line = f"{name} = {_toml(value)}"
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


# --- the keys ---------------------------------------------------------------------------------------------------------


def _leaves(kind: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    hints = get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from _leaves(hint, f"{prefix}{field.name}.")  # type: ignore[arg-type]
        else:
            yield prefix + field.name, hint


_COMMAND_KEYS = frozenset(field.name for field in dataclasses.fields(_Command))
KEYS: Mapping[str, Any] = {
    key: kind
    # Keys of `_Command` come first in the order, and their types replace those of fields with the same name.
    for key, kind in (
        dict(_leaves(_Command)) | dict(_leaves(ServerSettings)) | dict(_leaves(_Command))
    ).items()
    # The first has the short key `memory`. The second has no effect here: a server keeps no results.
    if key not in ("engine.cache.memory", "engine.max_kept_results")
}
"""Every key with its type."""
_TABLES = frozenset(key.rpartition(".")[0] for key in KEYS) - {""}


def _is_secret(key: str) -> bool:
    return key.endswith("keys")


def _is_size(key: str) -> bool:
    return key == "memory" or key.endswith("_bytes")


# --- reading ----------------------------------------------------------------------------------------------------------


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
    """Ignores empty variables. Unknown ones are an error: a misspelt API_KEY_FILE would leave the server without
    keys."""
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
    # Otherwise a key with the same name in another table.
    close = close or [one for one in known if one.rpartition(".")[2] == name.rpartition(".")[2]]
    return f" (did you mean {close[0]}?)" if close else ""


def _read(key: str, value: Any, source: str, is_text: bool = False) -> Any:
    kind = KEYS[key]
    given = value
    if isinstance(value, str):
        if _is_size(key):
            size = parse_size(value)
            value = value if size is None else size
        elif is_text and isinstance(inspect.type_info(kind), inspect.VarTupleType):
            parts = [part.strip() for part in value.split(",")]
            # Empty API keys stay in the list, so that `plain_keys` refuses them: without keys the server is open.
            value = parts if _is_secret(key) else [part for part in parts if part]
    try:
        return msgspec.convert(value, kind, strict=not is_text or _is_size(key))
    except msgspec.ValidationError:
        shown = "invalid" if _is_secret(key) else f"{given!r:.80}"
        raise InvalidRequestError(
            f"{source}: {key} is {shown}; allowed: {_allowed(key)}",
            field=key,
        ) from None


def _allowed(key: str) -> str:
    """Describes the values that a setting accepts."""
    return "a size such as 4GiB" if _is_size(key) else _type_words(inspect.type_info(KEYS[key]))


def _type_words(info: inspect.Type) -> str:
    if isinstance(info, inspect.UnionType):
        return " or ".join(_type_words(one) for one in info.types if not isinstance(one, inspect.NoneType))
    if isinstance(info, inspect.Metadata):
        return _type_words(info.type)
    if isinstance(info, inspect.LiteralType):
        return ", ".join(map(str, info.values))
    if isinstance(info, inspect.EnumType):
        return ", ".join(str(one.value) for one in info.cls)
    if isinstance(info, inspect.BoolType):
        return "true or false"
    if isinstance(info, inspect.IntType | inspect.FloatType):
        noun = "a whole number" if isinstance(info, inspect.IntType) else "a number"
        low = f" from {info.ge:,}" if info.ge is not None else ""
        high = f" to {info.le:,}" if info.le is not None else ""
        return noun + low + high
    if isinstance(info, inspect.StrType):
        return "a text"
    if isinstance(info, inspect.VarTupleType | inspect.ListType):
        return f"a list: each {_type_words(info.item_type)}"
    return "a table"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return msgspec.json.encode(value).decode().replace("\x7f", "\\u007f")
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml(str(name))} = {_toml(one)}" for name, one in value.items()) + "}"
    return _toml(value.value) if hasattr(value, "value") else repr(value)
