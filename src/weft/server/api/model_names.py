"""The names by which requests may call the model of a server."""

from __future__ import annotations

from fnmatch import fnmatchcase

from weft.server.settings import ServerSettings

_DEFAULT_TAG = ":latest"
"""Ollama's clients add it to names without a tag."""


def is_model_name(name: str, settings: ServerSettings) -> bool:
    """Whether a name, or the model that it is an alias of, is served."""
    names = {name, name.removesuffix(_DEFAULT_TAG)}
    if not names.isdisjoint(settings.names):
        return True
    return any(
        target in ("", *settings.names) and any(fnmatchcase(one, alias) for one in names)
        for alias, target in settings.aliases.items()
    )
