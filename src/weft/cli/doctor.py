"""`weft doctor`: checks the machine and a model, and says what to do about problems."""

from __future__ import annotations

import json as json_module
import os
import platform
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from weft import __version__
from weft.backends import registry
from weft.backends.cpu.kernels import has_kernels
from weft.cli import machine
from weft.errors import ModelFileError, WeftError
from weft.loading.cache import models_directory
from weft.loading.checkpoint import Checkpoint, open_checkpoint
from weft.loading.pull import cached_models, pull
from weft.models.registry import build_config
from weft.terminal import one_line, printable
from weft.text.model_text import open_model_text

Status = Literal["ok", "note", "fail"]

_GIB = 1 << 30
_PACKAGES = ("numpy", "tokenizers", "minijinja", "msgspec", "starlette", "uvicorn", "llguidance")
_CUDA_PACKAGES = {"torch": ((2, 11), (2, 14)), "triton": ((3, 6), (4,))}
"""Packages of the extra `cuda`: the first supported release, and the first later release that is not supported."""
_FLOAT_BYTES = 4
"""Bytes of a weight with numpy, which computes with float32."""
_GPU_BYTES = 2
"""Bytes of a weight on a GPU, which computes with bfloat16."""
_LOW_DISK = 1 << 30
_TYPICAL_SHARE = 0.55
"""Typical speed, as a fraction of the speed that the memory bandwidth allows. Measured over HTTP, with the client on
the same two cores. The fraction is about the same for numpy."""
_STYLES = {"ok": "green", "note": "yellow", "fail": "red"}


@dataclass(frozen=True)
class Check:
    """The result of one check. With "note" weft still works; with "fail" it does not."""

    name: str
    status: Status
    found: str
    advice: str = ""


def doctor_command(model: str, port: int, json: bool) -> bool:
    """Prints all checks. Returns whether none failed."""
    checks = list(_checks(model, port))
    is_ok = all(check.status != "fail" for check in checks)
    if json:
        print(json_module.dumps({"ok": is_ok, "checks": [asdict(check) for check in checks]}, indent=2))
        return is_ok
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        found = printable(check.found + (f"\n{check.advice}" if check.advice else ""))
        table.add_row(f"[{_STYLES[check.status]}]{check.status}[/]", check.name, escape(found))
    console = Console(highlight=False)
    console.print(table)
    console.print("weft can run here." if is_ok else "weft cannot run here: see the failed checks above.")
    return is_ok


def _checks(model: str, port: int) -> Iterator[Check]:
    """Runs all checks. A check that raises becomes a result and does not stop the others."""
    for name, check in (
        ("weft", _weft),
        ("packages", _packages),
        ("processor", _processor),
        ("memory", _memory),
        ("GPU", _gpu),
        ("kernels", _kernels),
        ("BLAS", _blas),
        ("cache", _cache),
        ("port", lambda: _port(port)),
    ):
        yield _run_check(name, check)
    yield from _model_checks(model)


def _run_check(name: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    except WeftError as error:
        return Check(name, "fail", one_line(error))
    except Exception as error:
        return Check(name, "note", f"unknown: {type(error).__name__}: {one_line(error)}")


def _weft() -> Check:
    found = f"{__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    if sys.platform.startswith("linux"):
        return Check("weft", "ok", found)
    return Check("weft", "note", found, "weft is tested on Linux; on other systems some values are unknown.")


def _packages() -> Check:
    found, missing = [], []
    for name in (*_PACKAGES, *_CUDA_PACKAGES):
        number = _version(name)
        if number is not None:
            found.append(f"{name} {number}")
        elif name in _PACKAGES:  # the others are needed for GPUs only
            missing.append(name)
    if missing:
        advice = f"pip install {' '.join(missing)}"
        return Check("packages", "fail", f"missing: {', '.join(missing)}", advice)
    return Check("packages", "ok", ", ".join(found))


def _version(package: str) -> str | None:
    """The version of an installed package. Does not import it: torch would take seconds."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _release(number: str) -> tuple[int, ...]:
    """Parses a version: "2.11.0+cu128" becomes (2, 11)."""
    return tuple(int(part) for part in number.split(".")[:2] if part.isdigit())


def _dotted(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))


def _processor() -> Check:
    cpu = machine.processor()
    cores = f"{cpu.physical_cores or 'unknown'} physical cores, {cpu.usable_cores} usable"
    if cpu.features is None:
        return Check("processor", "note", f"{cpu.name}, {cores}, features unknown")
    found = f"{cpu.name}, {cores}, {', '.join(cpu.features) or 'no known vector instructions'}"
    if not {"AVX2", "NEON"} & set(cpu.features):
        return Check("processor", "note", found, "Without AVX2 or NEON weft is several times slower.")
    return Check("processor", "ok", found)


def _memory() -> Check:
    memory = machine.memory()
    if memory.available is None:
        return Check("memory", "note", "unknown")
    total = f" of {memory.total / _GIB:.1f} GiB" if memory.total else ""
    limit = f", limited to {memory.limit / _GIB:.1f} GiB by the cgroup" if memory.limit else ""
    found = f"{memory.available / _GIB:.1f} GiB available{total}{limit}"
    if memory.available < _GIB:
        return Check("memory", "note", found, "Use a small model and a small --memory.")
    return Check("memory", "ok", found)


def _gpu() -> Check:
    gpus, reason = machine.gpus(), registry.why_no_gpu()
    if reason is not None and not registry.has_gpu():
        if gpus is None:
            return Check("GPU", "note", "unknown: nvidia-smi does not respond")
        if not gpus:
            return Check("GPU", "ok", "none found; weft runs on the processor")
    found = "; ".join(gpus or ["there is a GPU, but nvidia-smi does not describe it"])
    if reason is not None:
        return Check("GPU", "note", found, f"weft runs on the processor: {reason}.")
    versions = {name: _version(name) or "unknown" for name in _CUDA_PACKAGES}
    found += f"; {', '.join(f'{name} {number}' for name, number in versions.items())}; weft runs on it"
    for name, number in versions.items():
        first, end = _CUDA_PACKAGES[name]
        if not first <= _release(number) < end:
            advice = (
                f"weft needs {name} from {_dotted(first)} to below {_dotted(end)}: pip install 'weft[cuda]'"
            )
            return Check("GPU", "note", found, advice)
    return Check("GPU", "ok", found)


def _kernels() -> Check:
    from weft.backends.cpu.kernels import describe, instruction_set

    return Check("kernels", "ok" if instruction_set() else "note", describe())


def _blas() -> Check:
    import numpy as np

    config = np.show_config(mode="dicts")
    library = (
        config.get("Build Dependencies", {}).get("blas", {}).get("name", "unknown") if config else "unknown"
    )
    threads = os.environ.get("OPENBLAS_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS")
    found = f"numpy {np.__version__} with {library}, threads: {threads or 'one per core'}"
    if threads is None:
        advice = "If other programs run on this machine, set OPENBLAS_NUM_THREADS=1 for a steadier speed."
        return Check("BLAS", "ok", found, advice)
    return Check("BLAS", "ok", found)


def _cache() -> Check:
    folder = models_directory()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    found = f"{folder}, {free / _GIB:.1f} GiB free"
    if not os.access(existing, os.W_OK | os.X_OK):
        return Check("cache", "fail", f"{found}, not writable", "Set WEFT_HOME to a writable folder.")
    if free < _LOW_DISK:
        return Check("cache", "note", found, "Models may not fit; set WEFT_HOME to another folder.")
    return Check("cache", "ok", found)


def _port(port: int) -> Check:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            advice = "Use another one: `weft serve --port N`."
            return Check("port", "note", f"{port}: {error.strerror or error}", advice)
    return Check("port", "ok", f"{port} is free")


# --- the model --------------------------------------------------------------------------------------------------------


def _model_checks(model: str) -> Iterator[Check]:
    try:
        path = _find_model(model)
        if path is None:
            advice = f"`weft pull{'' if model == 'default' else ' ' + model}` fetches it now."
            yield Check(
                "model", "note", f"{model} is not on this machine yet; the first use fetches it", advice
            )
            return
        checkpoint = open_checkpoint(path)
        context = build_config(checkpoint.layout, checkpoint.metadata, checkpoint.tensors).max_context
        yield Check("model", "ok", _describe(checkpoint, context))
        yield _text(checkpoint)
        yield _weights_fit(checkpoint)
        yield _run_check("speed", lambda: _speed(checkpoint))
    except WeftError as error:
        yield Check("model", "fail", one_line(error), "Use another model, or pull it again.")


def _find_model(model: str) -> Path | None:
    """The path of a model, without a download. None if "default" or an `hf:` model is not in the cache."""
    if model == "default" or model.startswith("hf:"):
        kept = next((one for one in cached_models() if one.name == model), None)
        if kept is None:
            return None
        if kept.problem:
            raise ModelFileError(f"{kept.path}: {kept.problem}")
        return kept.path
    return pull(model)  # a path: it is only checked, never downloaded


def _describe(checkpoint: Checkpoint, context: int) -> str:
    path = checkpoint.path
    files = [path] if path.is_file() else list(path.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    return (
        f"{path.name}: {checkpoint.architecture}, {checkpoint.parameter_count / 1e6:,.0f} M parameters, "
        f"{checkpoint.stored_as}, {size / (1 << 20):,.0f} MiB, context {context:,}"
    )


def _text(checkpoint: Checkpoint) -> Check:
    text = open_model_text(checkpoint)
    try:
        if text.chat_template is None:
            advice = "The model can complete texts; chat requests are refused."
            return Check("chat", "note", "the model has no chat template", advice)
        tools = "with tools" if text.chat_template.uses_tools else "without tools"
        return Check("chat", "ok", f"the model has a chat template {tools}")
    finally:
        text.close()


def _weights_fit(checkpoint: Checkpoint) -> Check:
    on_gpu = registry.why_no_gpu() is None
    needed = _weight_bytes(checkpoint, on_gpu)
    available = machine.gpu_memory().available if on_gpu else machine.memory().available
    if on_gpu:
        found = f"{needed / _GIB:.2f} GiB on the GPU for weights, as bfloat16"
    else:
        found = f"{needed / _GIB:.2f} GiB for weights, {'packed for the kernels' if has_kernels() else 'as float32'}"
    if available is not None and needed > available:
        where = "of GPU memory are free" if on_gpu else "are available"
        other = ", or run on the processor with --device cpu" if on_gpu else ""
        advice = f"Only {available / _GIB:.2f} GiB {where}: use a smaller model, or free memory{other}."
        return Check("room", "fail", found, advice)
    rest = "the rest of the memory" if on_gpu else "what --memory allows"
    return Check("room", "ok", f"{found}; the KV cache uses {rest}")


def _speed(checkpoint: Checkpoint) -> Check:
    """Estimates the speed of a single answer. Each token reads every weight once, so the memory bandwidth is the
    limit."""
    if registry.why_no_gpu() is None:
        read = _weight_bytes(checkpoint, on_gpu=True) / 1e9
        found = (
            f"the GPU reads {read:.2f} GB for every token of one answer; answers in a batch share the reads"
        )
        return Check("speed", "ok", found, "`weft bench gpu` measures the speed.")
    rate = machine.bytes_per_second()
    most = rate / _weight_bytes(checkpoint, on_gpu=False)
    expected = f"{most * _TYPICAL_SHARE:.{0 if most > 20 else 1}f}"
    found = (
        f"memory reads {rate / 1e9:.1f} GB/s: at most {most:.3g} tokens/s for one answer, "
        f"typically {expected}; a batch is faster in total"
    )
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > machine.processor().usable_cores:
        return Check(
            "speed", "note", found, f"Other programs are running (load {load:.1f}); they slow this down."
        )
    return Check("speed", "ok", found)


def _weight_bytes(checkpoint: Checkpoint, on_gpu: bool) -> int:
    """Bytes of the weights in the format of the backend."""
    if on_gpu:
        return checkpoint.parameter_count * _GPU_BYTES
    if not has_kernels():
        return checkpoint.parameter_count * _FLOAT_BYTES
    from weft.ops.cpu.weights import resident_bytes

    return resident_bytes(checkpoint.tensors.values())
