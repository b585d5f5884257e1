"""Builds backends by name, importing each only when it is needed, and decides what "auto" means on this machine.

This module checks for a usable GPU without torch, because importing torch takes seconds.
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

# Name -> module, and the function or class in it that builds the backend.
BUILDERS = {
    "cpu": ("weft.backends.cpu.runner", "open_cpu_backend"),
    "cuda": ("weft.backends.cuda.runner", "open_cuda_backend"),
    "cuda-embedder": ("weft.backends.cuda.embedder", "open_cuda_embedder"),
    "embedder": ("weft.backends.cpu.embedder", "open_embedder"),
    "noop": ("weft.backends.noop", "NoopBackend"),
}
EMBEDDERS = {"cpu": "embedder", "cuda": "cuda-embedder", "noop": "embedder"}
"""The backend of a model that makes vectors, by the backend of a model that generates."""

# Option -> the backends that have it. The CPU ignores `invariant`: with its C++ kernels, an answer never depends on the
# rest of the batch.
_OPTIONS_OF = {
    "threads": ("cpu", "embedder"),
    "quantize": ("cpu", "embedder"),
    "invariant": ("cuda",),
    "max_context": ("cpu", "cuda", "noop"),
    "core_lease": ("cpu", "embedder"),
}

GPU_BUDGETS: dict[str, Any] = {
    "max_tokens_per_step": 8448,
    "max_prefill_tokens": 8192,
    "max_chunk_tokens": 8192,
}
"""Default budgets of a step on a GPU. Smaller prompt chunks would leave most of the GPU idle."""

_DEVICE_FILES = Path("/dev")


def build(name: str, **options: Any) -> Backend:
    """Builds the backend `name`, or the one that "auto" means. Options of another backend are ignored, except that
    "cuda" rejects options of the CPU (see `chosen`).

    "cpu" takes `checkpoint`, `max_context`, `dtype`, `threads`, `quantize`; "cuda" takes `checkpoint`, `max_context`,
    `dtype`, `invariant`; "embedder" takes `checkpoint`, `dtype`, `threads`, `quantize`; "cuda-embedder" takes `checkpoint`, `dtype`."""
    name = chosen(name, options)
    module, attribute = BUILDERS[name]
    builder: Callable[..., Backend] = getattr(import_module(module), attribute)
    return builder(**{key: value for key, value in options.items() if name in _OPTIONS_OF.get(key, (name,))})


def open_model(model: str, device: str, options: Mapping[str, Any]) -> OpenedModel:
    """Opens a model by name or path, downloading it first if needed, with the backend for `device`."""
    # Imported here: a backend without a model needs none of it.
    from weft.backends.open_model import open_with_text

    return open_with_text(model, lambda checkpoint: build(device, checkpoint=checkpoint, **options))


def chosen(name: str, options: Mapping[str, Any]) -> str:
    """The name of the backend that `build` uses. "auto" means "cuda" if there is a usable GPU and no option is for the
    CPU only. Raises InvalidRequestError if this machine or these options rule the backend out."""
    if name != AUTO and name not in BUILDERS:
        allowed = ", ".join((AUTO, *EMBEDDERS))
        raise InvalidRequestError(f"backend is {name!r}; allowed: {allowed}", field="backend")
    cpu_only = [
        key
        for key, owners in _OPTIONS_OF.items()
        if "cpu" in owners and "cuda" not in owners and options.get(key) is not None
    ]
    if name == AUTO:
        return "cpu" if cpu_only or why_no_gpu() is not None else "cuda"
    if name == "cuda":
        if cpu_only:
            raise InvalidRequestError(
                f"{cpu_only[0]} is {options[cpu_only[0]]!r}, but the device is cuda and only cpu has this option; "
                "leave it out, or use the device cpu",
                field=cpu_only[0],
            )
        if str(options.get("device", name)).startswith("cuda") and (reason := why_no_gpu()) is not None:
            raise InvalidRequestError(f"the device is cuda, but {reason}", field="device")
    return name


def has_gpu() -> bool:
    """Looks for the device files of the driver: one per GPU, or `dxg` for all of them under WSL."""
    return any(_DEVICE_FILES.glob("nvidia[0-9]*")) or (_DEVICE_FILES / "dxg").exists()


def why_no_gpu() -> str | None:
    """Why weft cannot run on a GPU here; None if it can, as far as this can be checked without torch."""
    if not has_gpu():
        return "no NVIDIA GPU is here, or its driver is not loaded"
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES hides all GPUs"
    # Imported here: the import is slow, and most machines have no GPU.
    from importlib.metadata import PackageNotFoundError, version

    try:
        torch = version("torch")
        version("triton")
    except PackageNotFoundError as error:
        return f"{error.name} is not installed; pip install 'weft[cuda]' installs it"
    if "+cpu" in torch:
        return f"torch {torch} was built without CUDA; install a torch with CUDA"
    return None
