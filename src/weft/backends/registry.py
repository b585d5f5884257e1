"""The only place that builds a backend; each is imported when it is asked for. Also which one "auto" is here.

Whether a card can be used is found out without importing torch, which takes seconds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from weft.backends.base import Backend, OpenedModel
from weft.errors import InvalidRequestError

AUTO = "auto"

# Name -> module and the function or class in it that makes the backend.
_BUILDERS = {
    "cpu": ("weft.backends.cpu.runner", "open_cpu_backend"),
    "cuda": ("weft.backends.cuda.runner", "open_cuda_backend"),
    "noop": ("weft.backends.noop", "NoopBackend"),
}
# Options that only one of them has. On the CPU a text never depends on its company, so `invariant` asks for nothing.
_OPTIONS_OF = {"threads": "cpu", "quantize": "cpu", "invariant": "cuda"}

CARD_BUDGETS: dict[str, Any] = {
    "max_tokens_per_step": 8448,
    "max_prefill_tokens": 8192,
    "max_chunk_tokens": 8192,
}
"""Of a step on a card, where nobody says otherwise: prompts in pieces too small leave most of it idle."""

_DEVICE_FILES = Path("/dev")


def build(name: str, **options: Any) -> Backend:
    """The backend called `name`, or "auto". `options` are those of its builder: "cpu" takes `checkpoint`,
    `max_context`, `threads`, `quantize`, `dtype`, "cuda" `checkpoint`, `max_context`, `invariant`, `dtype`."""
    name = chosen(name, options)
    module, attribute = _BUILDERS[name]
    builder: Callable[..., Backend] = getattr(import_module(module), attribute)
    return builder(**{key: value for key, value in options.items() if _OPTIONS_OF.get(key, name) == name})


def open_model(model: str, device: str, options: Mapping[str, Any]) -> OpenedModel:
    """The model of that name or path, fetched where it is not here yet, and the backend for it."""
    # Not at the top: a backend without a model needs none of it.
    from weft.backends.open_model import open_with_text

    return open_with_text(model, lambda checkpoint: build(device, checkpoint=checkpoint, **options))


def chosen(name: str, options: Mapping[str, Any]) -> str:
    """Which backend `build` takes: "auto" is a card, where there is one and no option is for the CPU alone. Raises
    InvalidRequestError for one that cannot be used here, or not with these options."""
    if name != AUTO and name not in _BUILDERS:
        allowed = ", ".join((AUTO, *sorted(_BUILDERS)))
        raise InvalidRequestError(f"backend is {name!r}; allowed: {allowed}", field="backend")
    of_cpu = [key for key, owner in _OPTIONS_OF.items() if owner == "cpu" and options.get(key) is not None]
    if name == AUTO:
        return "cpu" if of_cpu or why_no_card() is not None else "cuda"
    if name == "cuda":
        if of_cpu:
            raise InvalidRequestError(
                f"{of_cpu[0]} is {options[of_cpu[0]]!r}, which only the device cpu knows; leave it out, or take that",
                field=of_cpu[0],
            )
        if str(options.get("device", name)).startswith("cuda") and (reason := why_no_card()) is not None:
            raise InvalidRequestError(f"the device is cuda, but {reason}", field="device")
    return name


def has_card() -> bool:
    """By the driver's files: one for every card, or the one that stands for them under Windows."""
    return any(_DEVICE_FILES.glob("nvidia[0-9]*")) or (_DEVICE_FILES / "dxg").exists()


def why_no_card() -> str | None:
    """What keeps weft from running on a card here; None: nothing, as far as can be seen from outside. It is all that
    decides what "auto" is."""
    if not has_card():
        return "no NVIDIA card is here, or its driver is not loaded"
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES hides all cards"
    # Not at the top: it takes its time too, and most machines have no card.
    from importlib.metadata import PackageNotFoundError, version

    try:
        torch = version("torch")
        version("triton")
    except PackageNotFoundError as error:
        return f"{error.name} is not installed; pip install 'weft[cuda]' installs what it takes"
    if "+cpu" in torch:
        return f"torch {torch} was built for the processor alone; install a torch with CUDA"
    return None
