"""`weft doctor`: looks at the machine and at a model, and says what to expect and what to do."""

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
"""Those of the extra `cuda`, with the first release that weft takes and the first that it does not."""
_FLOAT_BYTES = 4
"""On numpy weights are float32, whatever the file has."""
_CARD_BYTES = 2
"""On a card they are bfloat16."""
_LOW_DISK = 1 << 30
_TYPICAL_SHARE = 0.55
"""Of what memory allows, over HTTP with the client on the same two cores; numpy comes to about the same share."""
_STYLES = {"ok": "green", "note": "yellow", "fail": "red"}


@dataclass(frozen=True)
class Check:
    """One thing that was looked at. "note" does not keep weft from working; "fail" does."""

    name: str
    status: Status
    found: str
    advice: str = ""


def doctor_command(model: str, port: int, json: bool) -> bool:
    """Whether nothing keeps weft from working."""
    checks = list(_checks(model, port))
    is_well = all(check.status != "fail" for check in checks)
    if json:
        print(json_module.dumps({"ok": is_well, "checks": [asdict(check) for check in checks]}, indent=2))
        return is_well
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        found = printable(check.found + (f"\n{check.advice}" if check.advice else ""))
        table.add_row(f"[{_STYLES[check.status]}]{check.status}[/]", check.name, escape(found))
    console = Console(highlight=False)
    console.print(table)
    console.print(
        "weft can run here." if is_well else "Something keeps weft from working: see what failed above."
    )
    return is_well


def _checks(model: str, port: int) -> Iterator[Check]:
    """A check that breaks is a finding too: whatever the machine, the others are made."""
    for name, look in (
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
        yield _tried(name, look)
    yield from _model_checks(model)


def _tried(name: str, look: Callable[[], Check]) -> Check:
    try:
        return look()
    except WeftError as error:
        return Check(name, "fail", one_line(error))
    except Exception as error:
        return Check(name, "note", f"unknown: {type(error).__name__}: {one_line(error)}")


def _weft() -> Check:
    found = f"{__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    if sys.platform.startswith("linux"):
        return Check("weft", "ok", found)
    return Check("weft", "note", found, "weft is tested on Linux; elsewhere some figures are unknown.")


def _packages() -> Check:
    found, missing = [], []
    for name in (*_PACKAGES, *_CUDA_PACKAGES):
        number = _version(name)
        if number is not None:
            found.append(f"{name} {number}")
        elif name in _PACKAGES:  # the others only GPUs need
            missing.append(name)
    if missing:
        advice = f"pip install {' '.join(missing)}"
        return Check("packages", "fail", f"missing: {', '.join(missing)}", advice)
    return Check("packages", "ok", ", ".join(found))


def _version(package: str) -> str | None:
    """Of an installed package, which is not imported: torch would take seconds."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _release(number: str) -> tuple[int, ...]:
    """(2, 11) of 2.11.0+cu128: what ranges are about."""
    return tuple(int(part) for part in number.split(".")[:2] if part.isdigit())


def _dotted(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))


def _processor() -> Check:
    cpu = machine.processor()
    cores = f"{cpu.physical_cores or 'unknown'} physical cores, {cpu.usable_cores} usable"
    if cpu.features is None:
        return Check("processor", "note", f"{cpu.name}, {cores}, features unknown")
    found = f"{cpu.name}, {cores}, {', '.join(cpu.features) or 'no vector features known here'}"
    if not {"AVX2", "NEON"} & set(cpu.features):
        return Check("processor", "note", found, "Without AVX2 or NEON numpy is several times slower.")
    return Check("processor", "ok", found)


def _memory() -> Check:
    memory = machine.memory()
    if memory.available is None:
        return Check("memory", "note", "unknown")
    total = f" of {memory.total / _GIB:.1f} GiB" if memory.total else ""
    limit = f", limited to {memory.limit / _GIB:.1f} GiB by the cgroup" if memory.limit else ""
    found = f"{memory.available / _GIB:.1f} GiB available{total}{limit}"
    if memory.available < _GIB:
        return Check("memory", "note", found, "A small model and a small --memory may still fit.")
    return Check("memory", "ok", found)


def _gpu() -> Check:
    gpus, reason = machine.gpus(), registry.why_no_card()
    if reason is not None and not registry.has_card():
        if gpus is None:
            return Check("GPU", "note", "unknown: nvidia-smi does not answer")
        if not gpus:
            return Check("GPU", "ok", "none found; weft runs on the processor")
    found = "; ".join(gpus or ["a card is here, of which nvidia-smi tells nothing"])
    if reason is not None:
        return Check("GPU", "note", found, f"weft runs on the processor: {reason}.")
    versions = {name: _version(name) or "unknown" for name in _CUDA_PACKAGES}
    found += f"; {', '.join(f'{name} {number}' for name, number in versions.items())}; weft runs on it"
    for name, number in versions.items():
        first, end = _CUDA_PACKAGES[name]
        if not first <= _release(number) < end:
            advice = f"weft was made for {name} from {_dotted(first)} up to, not with, {_dotted(end)}: pip install 'weft[cuda]'"
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
    found = f"numpy {np.__version__} with {library}, threads: {threads or 'as many as cores'}"
    if threads is None:
        advice = "OPENBLAS_NUM_THREADS=1 is steadier where other work runs beside weft."
        return Check("BLAS", "ok", found, advice)
    return Check("BLAS", "ok", found)


def _cache() -> Check:
    folder = models_directory()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    found = f"{folder}, {free / _GIB:.1f} GiB free"
    if not os.access(existing, os.W_OK | os.X_OK):
        return Check(
            "cache", "fail", f"{found}, not writable", "Set WEFT_HOME to a folder that can be written."
        )
    if free < _LOW_DISK:
        return Check("cache", "note", found, "Models may not fit; WEFT_HOME names another folder.")
    return Check("cache", "ok", found)


def _port(port: int) -> Check:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            advice = "`weft serve --port N` takes another."
            return Check("port", "note", f"{port}: {error.strerror or error}", advice)
    return Check("port", "ok", f"{port} is free")


# --- the model --------------------------------------------------------------------------------------------------------


def _model_checks(model: str) -> Iterator[Check]:
    try:
        path = _kept(model)
        if path is None:
            advice = f"`weft pull{'' if model == 'default' else ' ' + model}` fetches it now."
            yield Check("model", "note", f"{model} is not here yet; the first use fetches it", advice)
            return
        checkpoint = open_checkpoint(path)
        context = build_config(checkpoint.layout, checkpoint.metadata, checkpoint.tensors).max_context
        yield Check("model", "ok", _described(checkpoint, context))
        yield _text(checkpoint)
        yield _room(checkpoint)
        yield _tried("speed", lambda: _speed(checkpoint))
    except WeftError as error:
        yield Check("model", "fail", one_line(error), "Take another model, or fetch it again.")


def _kept(model: str) -> Path | None:
    """Where a model is, without fetching it."""
    if model == "default" or model.startswith("hf:"):
        kept = next((one for one in cached_models() if one.name == model), None)
        if kept is None:
            return None
        if kept.problem:
            raise ModelFileError(f"{kept.path}: {kept.problem}")
        return kept.path
    return pull(model)


def _described(checkpoint: Checkpoint, context: int) -> str:
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
            advice = "It completes texts; chats are refused."
            return Check("chat", "note", "the model has no chat template", advice)
        tools = "knows tools" if text.chat_template.uses_tools else "knows no tools of its own"
        return Check("chat", "ok", f"has a chat template, which {tools}")
    finally:
        text.close()


def _room(checkpoint: Checkpoint) -> Check:
    on_card = registry.why_no_card() is None
    needed = _weight_bytes(checkpoint, on_card)
    available = machine.card_memory().available if on_card else machine.memory().available
    if on_card:
        found = f"{needed / _GIB:.2f} GiB on the card for weights, as bfloat16"
    else:
        found = f"{needed / _GIB:.2f} GiB for weights, {'packed for the kernels' if has_kernels() else 'as float32'}"
    if available is not None and needed > available:
        where = "of it are free" if on_card else "are available"
        other = ", or run on the processor with --device cpu" if on_card else ""
        advice = f"Only {available / _GIB:.2f} GiB {where}: take a smaller model, or free memory{other}."
        return Check("room", "fail", found, advice)
    rest = "what is left" if on_card else "what --memory allows"
    return Check("room", "ok", f"{found}; the KV cache takes {rest}")


def _speed(checkpoint: Checkpoint) -> Check:
    """Generating one token reads every weight once: memory sets the pace of a single answer."""
    if registry.why_no_card() is None:
        read = _weight_bytes(checkpoint, on_card=True) / 1e9
        found = (
            f"the card reads {read:.2f} GB for every token of one answer; several at once read them together"
        )
        return Check("speed", "ok", found, "`weft bench gpu` measures a card.")
    rate = machine.bytes_per_second()
    most = rate / _weight_bytes(checkpoint, on_card=False)
    expected = f"{most * _TYPICAL_SHARE:.{0 if most > 20 else 1}f}"
    found = (
        f"{rate / 1e9:.1f} GB/s, measured now: at most {most:.3g} tokens/s for one answer, "
        f"about {expected} to be expected; several at once together get more"
    )
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > machine.processor().usable_cores:
        return Check("speed", "note", found, f"Other work runs (load {load:.1f}): alone it would be faster.")
    return Check("speed", "ok", found)


def _weight_bytes(checkpoint: Checkpoint, on_card: bool) -> int:
    """As the backend keeps them."""
    if on_card:
        return checkpoint.parameter_count * _CARD_BYTES
    if not has_kernels():
        return checkpoint.parameter_count * _FLOAT_BYTES
    from weft.ops.cpu.weights import resident_bytes

    return resident_bytes(checkpoint.tensors.values())
