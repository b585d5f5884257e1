"""The file of a machine profile: what steps cost on a machine, and how much KV cache it has. JSON, with a version."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec

from weft import __version__
from weft.errors import InvalidRequestError
from weft.planning.costs import MeasuredCosts

PROFILE_VERSION = 1
_MAX_BYTES = 1 << 20
_MOST_BLOCKS = 1 << 22


@dataclass(frozen=True)
class KvRoom:
    """The KV cache of the measured server."""

    block_size: int
    num_blocks: int
    bytes_per_block: int
    swap_blocks: int
    max_context: int
    eager_blocks: int | None = None
    recompute_seconds_per_token: float = 1e-4

    def __post_init__(self) -> None:
        for name in ("block_size", "num_blocks", "max_context"):
            _check_range(self, name, 1, _MOST_BLOCKS)
        _check_range(self, "swap_blocks", 0, _MOST_BLOCKS)
        _check_range(self, "bytes_per_block", 0, 1 << 40)
        _check_range(self, "recompute_seconds_per_token", 0, 1e3)
        if self.eager_blocks is not None:
            _check_range(self, "eager_blocks", 0, _MOST_BLOCKS)


@dataclass(frozen=True)
class MachineProfile:
    machine: str
    model: str
    source: str
    """How the costs were found."""
    room: KvRoom
    costs: MeasuredCosts
    is_gpu: bool = False
    """Whether the budgets of a step are those of a GPU, where none are configured."""
    request_seconds: float = 0.0
    """Seconds from the start of a request to its arrival in the engine, if it has no company. The server reads requests one
    after another."""
    steps: int = 0
    """Measured steps."""
    mean_error: float = 0.0
    """The mean of |measured / predicted seconds - 1| of these steps."""
    weft: str = __version__
    version: int = field(default=PROFILE_VERSION)

    def __post_init__(self) -> None:
        _check_range(self, "request_seconds", 0, 1e3)
        _check_range(self, "mean_error", 0, 1e6)
        _check_range(self, "steps", 0, 1 << 62)


def _check_range(owner: object, name: str, low: float, high: float) -> None:
    value = getattr(owner, name)
    if not low <= value <= high:  # also false for NaN
        raise InvalidRequestError(f"{name} is {value}; allowed: from {low} to {high:,}", field=name)


def write_profile(profile: MachineProfile, path: Path) -> None:
    document = {"weft_profile": profile.version, **dataclasses.asdict(profile)}
    del document["version"]
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(value)}" for name, value in document.items())
    try:
        path.write_text(f"{{\n{lines}\n}}\n", "utf-8")
    except OSError as error:
        raise InvalidRequestError(f"cannot write {path}: {error.strerror or error}") from error


def shipped_profiles() -> list[str]:
    """The names of the profiles that come with weft."""
    folder = files("weft.planning") / "profiles"
    return sorted(one.name.removesuffix(".json") for one in folder.iterdir() if one.name.endswith(".json"))


def read_profile(name: str) -> MachineProfile:
    """Reads a profile: a file, or one that comes with weft."""
    if name in shipped_profiles():
        text = (files("weft.planning") / "profiles" / f"{name}.json").read_text("utf-8")
        return parse_profile(text, name)
    path = Path(name)
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_MAX_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidRequestError(
            f"--profile {name}: {reason}; give a file that `weft profile` wrote, or one of: {', '.join(shipped_profiles())}",
            field="profile",
        ) from error
    if len(text) > _MAX_BYTES:
        raise InvalidRequestError(f"{name} is larger than {_MAX_BYTES} bytes: not a profile", field="profile")
    return parse_profile(text, name)


def parse_profile(text: str, name: str) -> MachineProfile:
    """Parses a profile. `name` is for errors."""

    def refuse(what: str) -> InvalidRequestError:
        return InvalidRequestError(f"{name}: {what}", field="profile")

    try:
        document: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise refuse(f"not JSON ({error}); `weft profile` writes profiles") from None
    if not isinstance(document, dict) or "weft_profile" not in document:
        raise refuse("not a machine profile: it has no weft_profile; `weft profile` writes profiles")
    version = document.pop("weft_profile")
    if version != PROFILE_VERSION:
        raise refuse(
            f"the profile has version {version!r:.40}, and weft {__version__} reads version {PROFILE_VERSION}; "
            "measure it again with `weft profile`"
        )
    _check_names(document, MachineProfile, refuse, "")
    for part, kind in (("room", KvRoom), ("costs", MeasuredCosts)):
        if isinstance(document.get(part), dict):
            _check_names(document[part], kind, refuse, f"{part}.")
    try:
        return msgspec.convert(document, MachineProfile)
    except (msgspec.ValidationError, InvalidRequestError) as error:
        raise refuse(f"{error}; measure it again with `weft profile`") from None


def _check_names(document: dict[str, Any], kind: type, refuse: Any, prefix: str) -> None:
    known = [one.name for one in dataclasses.fields(kind) if one.name != "version"]
    unknown = [name for name in document if name not in known]
    if unknown:
        raise refuse(f"unknown field {prefix + unknown[0]!r:.60}; known: {', '.join(known)}")
