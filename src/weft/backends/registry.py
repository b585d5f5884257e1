"""The only place that builds a backend; each is imported when it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from weft.backends.base import Backend
from weft.errors import InvalidRequestError

# Name -> module and the function or class in it that makes the backend.
_BUILDERS = {
    "cpu": ("weft.backends.cpu.runner", "open_cpu_backend"),
    "noop": ("weft.backends.noop", "NoopBackend"),
}


def build(name: str, **options: Any) -> Backend:
    """The backend called `name`. `options` are those of its builder: "cpu" takes `checkpoint`,
    `max_context`, `threads`, `quantize`, `dtype`."""
    if name not in _BUILDERS:
        raise InvalidRequestError(
            f"backend is {name!r}; allowed: {', '.join(sorted(_BUILDERS))}", field="backend"
        )
    module, attribute = _BUILDERS[name]
    builder: Callable[..., Backend] = getattr(import_module(module), attribute)
    return builder(**options)
