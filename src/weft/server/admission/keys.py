"""API keys: what each may do, where they are written down, and how one is found without telling which came close."""

from __future__ import annotations

import hashlib
import hmac
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weft.errors import InvalidRequestError
from weft.request import MAX_NAME_LENGTH, Priority

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_MAX_RATE = 10**12
_MAX_WEIGHT = 1e6
_FIELDS = (
    *("name", "key", "key_sha256", "requests_per_minute", "tokens_per_minute", "concurrent"),
    *("max_priority", "cache_salt", "weight", "admin"),
)


@dataclass(frozen=True)
class ApiKey:
    """One key and what it may do. The key itself is not kept, only what it is recognised by."""

    name: str
    """What logs, metrics and operators call it."""
    key_sha256: str
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Of prompts and answers together."""
    concurrent: int | None = None
    """Requests under way at once."""
    max_priority: Priority = Priority.NORMAL
    """No key outranks the others unless its table grants that."""
    cache_salt: str | None = None
    """Keys with the same one share cached prefixes; None: this key shares with no other."""
    weight: float = 1.0
    """Its share under load, beside the weights of the others."""
    admin: bool = False
    is_plain: bool = False
    """Only its secret was given, and no table."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            _refuse("name", self.name, "1 to 64 letters, digits, and . _ @ -")
        if not isinstance(self.key_sha256, str) or not _DIGEST.fullmatch(self.key_sha256):
            _refuse("key_sha256", self.key_sha256, "64 hexadecimal digits in lower case")
        for field in ("requests_per_minute", "tokens_per_minute", "concurrent"):
            value = getattr(self, field)
            if value is not None and not (_is_number(value, int) and 1 <= value <= _MAX_RATE):
                _refuse(field, value, f"a whole number from 1 to {_MAX_RATE}")
        if not isinstance(self.max_priority, Priority):
            _refuse("max_priority", self.max_priority, _priority_names())
        salt = self.cache_salt
        if salt is not None and (not isinstance(salt, str) or not 1 <= len(salt) <= MAX_NAME_LENGTH):
            found = f"{len(salt)} characters" if isinstance(salt, str) and salt else salt
            _refuse("cache_salt", found, f"text of 1 to {MAX_NAME_LENGTH} characters, or nothing at all")
        if not (_is_number(self.weight, int | float) and 1 / _MAX_WEIGHT <= self.weight <= _MAX_WEIGHT):
            _refuse("weight", self.weight, f"a number from {1 / _MAX_WEIGHT:g} to {_MAX_WEIGHT:g}")
        if not isinstance(self.admin, bool):
            _refuse("admin", self.admin, "true, false")

    def salt_for(self, asked: str) -> str:
        """The salt of a request that asked for one of its own, or for "". Hashed over its kind and both parts, so that
        no wish leads into the cache of another key."""
        if self.cache_salt is None:
            parts = ("own", self.key_sha256, asked)
        else:
            parts = ("shared", self.cache_salt, asked)
        return hashlib.sha256(repr(parts).encode("utf-8", "surrogatepass")).hexdigest()


class KeyRing:
    """Finds the key that a request was sent with. Raises InvalidRequestError for keys that cannot be told apart."""

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        self.keys = tuple(keys)
        self._digests = [(bytes.fromhex(key.key_sha256), key) for key in self.keys]
        for field in ("name", "key_sha256"):
            seen: dict[str, ApiKey] = {}
            for key in self.keys:
                other = seen.setdefault(getattr(key, field), key)
                if other is not key:
                    what = "have the same name" if field == "name" else "are the same key"
                    raise InvalidRequestError(
                        f"two API keys, {other.name!r} and {key.name!r}, {what}; change one", field=field
                    )

    def find(self, authorization: bytes) -> ApiKey | None:
        """The key in an Authorization header; None where it is missing or wrong."""
        scheme, _, secret = authorization.partition(b" ")
        given = hashlib.sha256(secret.strip()).digest()
        # Every key is compared, each in constant time: how long it takes says nothing about any of them.
        matches = [key for known, key in self._digests if hmac.compare_digest(given, known)]
        return matches[0] if matches and scheme.lower() == b"bearer" else None


def all_keys(secrets: Iterable[str], path: str | Path | None) -> tuple[ApiKey, ...]:
    """Those that were given as they are, and those of a file. A single key of which only the secret is known may ask for
    HIGH: there is no other key that it would pass. CRITICAL, which preempts what runs, is granted in a table alone."""
    keys = (*plain_keys(secrets), *(() if path is None else read_key_file(path)))
    if len(keys) == 1 and keys[0].is_plain:
        return (replace(keys[0], max_priority=Priority.HIGH),)
    return keys


def plain_keys(secrets: Iterable[str]) -> tuple[ApiKey, ...]:
    """Keys of which only the secret was given, as by --api-key."""
    found = []
    for number, secret in enumerate(secrets, 1):
        if not secret.strip():
            raise InvalidRequestError(f"API key {number} is empty; give it some text", field="api_key")
        found.append(ApiKey(f"key-{number}", _digest(secret), is_plain=True))
    return tuple(found)


def read_key_file(path: str | Path) -> tuple[ApiKey, ...]:
    """The keys of a file: one in a line, or a TOML file with a [[key]] table for each. Raises InvalidRequestError that
    names the line."""
    try:
        text = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"key file {path}: {error}", field="api_key_file") from error
    lines = [line.strip() for line in text.splitlines()]
    written = [line for line in lines if line and not line.startswith("#")]
    is_toml = Path(path).suffix == ".toml" or (bool(written) and written[0].startswith("[["))
    try:
        keys = _read_tables(text, lines) if is_toml else _read_lines(lines)
        if not keys:
            # An empty file must not open the server to everyone.
            raise InvalidRequestError("there is no key in it; write one in a line, or a [[key]] table")
        KeyRing(keys)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"key file {path}: {error}", field="api_key_file") from error
    return keys


def _read_lines(lines: list[str]) -> tuple[ApiKey, ...]:
    numbered = ((number, line) for number, line in enumerate(lines, 1) if line and not line.startswith("#"))
    return tuple(ApiKey(f"line-{number}", _digest(line), is_plain=True) for number, line in numbered)


def _read_tables(text: str, lines: list[str]) -> tuple[ApiKey, ...]:
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidRequestError(f"it is no TOML: {error}") from error
    tables = content.pop("key", [])
    if content:
        raise InvalidRequestError(f"{min(content)!r} is unknown; allowed: [[key]] tables")
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise InvalidRequestError("'key' is not a list of tables; write [[key]] before each")
    # The parser does not say where a value stands; the headers do, unless somebody writes them in an odd way.
    headers = [number for number, line in enumerate(lines, 1) if line.startswith("[[key]]")]
    keys = []
    for index, table in enumerate(tables):
        place = f"key {index + 1}"
        if len(headers) == len(tables):
            place += f", line {headers[index]}"
        try:
            keys.append(_read_table(table))
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{place}: {error}") from error
    return tuple(keys)


def _read_table(table: Mapping[str, Any]) -> ApiKey:
    unknown = table.keys() - set(_FIELDS)
    if unknown:
        raise InvalidRequestError(f"{min(unknown)!r} is unknown; allowed: {', '.join(_FIELDS)}")
    given = dict(table)
    if "name" not in given:
        raise InvalidRequestError("name is missing; give the key one")
    if ("key" in given) == ("key_sha256" in given):
        raise InvalidRequestError("write either key or key_sha256, the hexadecimal digest of the key")
    if "key" in given:
        secret = given.pop("key")
        if not isinstance(secret, str) or not secret or secret != secret.strip():
            # Not shown: whoever reads the log is not who the key is for.
            raise InvalidRequestError("key is not text, empty, or has spaces around it")
        given["key_sha256"] = _digest(secret)
    if "max_priority" in given:
        given["max_priority"] = _priority(given["max_priority"])
    return ApiKey(**given)


def _priority(value: object) -> Priority:
    if not isinstance(value, str) or value.upper() not in Priority.__members__:
        _refuse("max_priority", value, _priority_names())
    return Priority[str(value).upper()]


def _priority_names() -> str:
    return ", ".join(priority.name.lower() for priority in Priority)


def _is_number(value: object, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.strip().encode()).hexdigest()


def _refuse(field: str, value: object, allowed: str) -> None:
    raise InvalidRequestError(f"{field} is {value!r:.80}; allowed: {allowed}", field=field)
