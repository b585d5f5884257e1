"""The names by which requests may call a model of the server, and the route for each use of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

MAIN_ROUTES = {"generate": "/v1/chat/completions", "embed": "/v1/embeddings", "rerank": "/v1/rerank"}
_DEFAULT_TAG = ":latest"
"""Ollama's clients add this tag to names without one."""


def is_own_name(name: str, names: Sequence[str]) -> bool:
    """Whether `name` is one of the names of a model."""
    return not {name, name.removesuffix(_DEFAULT_TAG)}.isdisjoint(names)


def is_alias(name: str, names: Sequence[str], aliases: Mapping[str, str]) -> bool:
    """Whether `name` is an alias of the model with these names."""
    given = {name, name.removesuffix(_DEFAULT_TAG)}
    return any(
        target in ("", *names) and any(fnmatchcase(one, alias) for one in given)
        for alias, target in aliases.items()
    )
