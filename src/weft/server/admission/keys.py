"""API keys: their permissions and limits, the key file, and the constant-time lookup."""

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

KEY = "weft.key"
"""Scope entry with the `ApiKey` of a request; None if the server needs no key."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_MAX_RATE = 10**12
_MAX_WEIGHT = 1e6
_FIELDS = (
    *("name", "key", "key_sha256", "requests_per_minute", "tokens_per_minute", "concurrent"),
    *("max_priority", "cache_salt", "weight", "admin", "feedback"),
)


@dataclass(frozen=True)
class ApiKey:
    """One API key with its permissions and limits. Only the SHA-256 digest of the secret is kept."""

    name: str
    """The name in logs, metrics and admin routes."""
    key_sha256: str
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Prompt and generated tokens together."""
    concurrent: int | None = None
    """Limit for the active requests of the key."""
    max_priority: Priority = Priority.NORMAL
    """The highest priority that requests of the key may have."""
    cache_salt: str | None = None
    """Keys with the same salt share cached prefixes. None: the key shares with no other key."""
    weight: float = 1.0
    """Under load, each key gets tokens in proportion to its weight."""
    admin: bool = False
    feedback: bool = False
    """Answers for this key are kept, so that clients can send feedback about them, if the server has `feedback_days`."""
    is_plain: bool = False
    """Whether only the secret was given, without a [[key]] table."""

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
            _refuse("cache_salt", found, f"text of 1 to {MAX_NAME_LENGTH} characters, or leave it out")
        if not (_is_number(self.weight, int | float) and 1 / _MAX_WEIGHT <= self.weight <= _MAX_WEIGHT):
            _refuse("weight", self.weight, f"a number from {1 / _MAX_WEIGHT:g} to {_MAX_WEIGHT:g}")
        for field in ("admin", "feedback"):
            if not isinstance(getattr(self, field), bool):
                _refuse(field, getattr(self, field), "true, false")

    @property
    def owner(self) -> str:
        """The owner of everything that is stored for this key: its name. For a plain key it is the digest of the secret,
        because the name of a plain key is its position in the list. If an earlier key is removed, another secret gets this
        name, but must not get the files."""
        return f"sha256:{self.key_sha256[:32]}" if self.is_plain else self.name

    def salt_for(self, requested: str) -> str:
        """The cache salt of a request that sent the salt `requested` ("": none). The result is a hash that includes the
        salt of the key, or its digest. So a request cannot use the cached prefixes of keys with another salt."""
        if self.cache_salt is None:
            parts = ("own", self.key_sha256, requested)
        else:
            parts = ("shared", self.cache_salt, requested)
        return hashlib.sha256(repr(parts).encode("utf-8", "surrogatepass")).hexdigest()


class KeyRing:
    """Finds the key of a request. Raises InvalidRequestError for keys with the same name or the same secret."""

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
        """The key of an Authorization header; None if it is missing or wrong."""
        scheme, _, secret = authorization.partition(b" ")
        given = hashlib.sha256(secret.strip()).digest()
        # Every key is compared in constant time, so that the time reveals nothing about any key.
        matches = [key for known, key in self._digests if hmac.compare_digest(given, known)]
        return matches[0] if matches and scheme.lower() == b"bearer" else None


def all_keys(secrets: Iterable[str], path: str | Path | None) -> tuple[ApiKey, ...]:
    """The keys given as plain secrets, and those of a file. A single plain key may use HIGH, because there is no
    other key to overtake. CRITICAL preempts running sequences and needs a [[key]] table."""
    keys = (*plain_keys(secrets), *(() if path is None else read_key_file(path)))
    if len(keys) == 1 and keys[0].is_plain:
        return (replace(keys[0], max_priority=Priority.HIGH),)
    return keys


def plain_keys(secrets: Iterable[str]) -> tuple[ApiKey, ...]:
    """Keys given as plain secrets, as with --api-key."""
    found = []
    for number, secret in enumerate(secrets, 1):
        if not secret.strip():
            raise InvalidRequestError(
                f"API key {number} is empty; remove it or give it text", field="api_key"
            )
        found.append(ApiKey(f"key-{number}", _digest(secret), is_plain=True))
    return tuple(found)


def read_key_file(path: str | Path) -> tuple[ApiKey, ...]:
    """Reads a key file: one secret per line, or TOML with a [[key]] table per key. Raises InvalidRequestError with the
    file, and with the line of an invalid table if it is known."""
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
            # With an empty file the server would start without access control.
            raise InvalidRequestError("it contains no key; write one per line, or [[key]] tables")
        KeyRing(keys)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"key file {path}: {error}", field="api_key_file") from error
    return keys


def _read_lines(lines: list[str]) -> tuple[ApiKey, ...]:
    numbered = ((number, line) for number, line in enumerate(lines, 1) if line and not line.startswith("#"))
    return tuple(ApiKey(f"line-{number}", _digest(line), is_plain=True) for number, line in numbered)


def _read_tables(text: str, lines: list[str]) -> tuple[ApiKey, ...]:
    """Reads the keys of a TOML file. Errors name the number of the table, and its line if it is known."""
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidRequestError(f"it is not TOML: {error}") from error
    tables = content.pop("key", [])
    if content:
        raise InvalidRequestError(f"{min(content)!r} is unknown; allowed: [[key]] tables")
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise InvalidRequestError("'key' is not a list of tables; write [[key]] before each")
    # The parser reports no line numbers. The lines of the headers are used, if all are written as [[key]].
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
    """Checks one [[key]] table. Its secret is replaced by the digest."""
    unknown = table.keys() - set(_FIELDS)
    if unknown:
        raise InvalidRequestError(f"{min(unknown)!r} is unknown; allowed: {', '.join(_FIELDS)}")
    given = dict(table)
    if "name" not in given:
        raise InvalidRequestError("name is missing; give the key a name")
    if ("key" in given) == ("key_sha256" in given):
        raise InvalidRequestError("write either key or key_sha256, the hexadecimal digest of the key")
    if "key" in given:
        secret = given.pop("key")
        if not isinstance(secret, str) or not secret or secret != secret.strip():
            # The message does not quote the key: the log must not contain secrets.
            raise InvalidRequestError("key must be text in quotes, not empty, without spaces around it")
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
