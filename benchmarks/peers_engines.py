"""The compared engines: their packages, how they are started, and the workloads that they support."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.peers_environment import (
    LLAMA,
    ONNXRUNTIME,
    OPENVINO,
    VLLM,
    Environment,
    PrintStatus,
    clean_environment,
    engine_environment,
    python_of,
    run_logged,
    script,
)
from benchmarks.peers_models import make_once, write_folder, write_q4_0
from weft.bench.serve_load import WORKLOADS

CONTEXT = 1024
"""Most tokens of a request; the longest of the workloads has 768."""
OURS = "weft"
OURS_WITHOUT_DRAFTS = "weft without drafts"
OURS_IN_PROCESS = "weft in process"
OUR_ENGINES = (OURS, OURS_WITHOUT_DRAFTS, OURS_IN_PROCESS)
"""The engines that are not peers."""


@dataclass(frozen=True)
class Launch:
    """How a process is started. A server listens on `port`. A driver has no port (None), and answers on its standard
    output."""

    command: tuple[str, ...]
    port: int | None
    environment: Mapping[str, str]


@dataclass(frozen=True)
class PeerFiles:
    """Files of the peers: `home` holds their Python environments and their converted copies of `model`."""

    home: Path
    model: Path
    end_id: int
    print_status: PrintStatus

    def python(self, environment: Environment) -> str:
        return str(python_of(environment, self.home, self.print_status))

    def q4_0(self) -> Path:
        return self._made(f"{self._stem}.Q4_0.gguf", lambda target: write_q4_0(self.model, target))

    def folder(self) -> Path:
        return self._made(f"{self._stem}.f32", lambda target: write_folder(self.model, target))

    def openvino(self) -> Path:
        """The model in OpenVINO's format. OpenVINO reads a GGUF file and saves its own format beside it."""
        python, source = self.python(OPENVINO), self.q4_0()

        def make(target: Path) -> None:
            target.mkdir()
            link = target / source.name
            link.symlink_to(source)
            command = (python, str(script("save_openvino")), str(link))
            run_logged(command, self.log("convert-openvino"), "OpenVINO cannot read the model")
            link.unlink()

        return self._made(f"{self._stem}.openvino-int4", make)

    def onnx(self) -> Path:
        python, source = self.python(ONNXRUNTIME), self.folder()

        def make(target: Path) -> None:
            command = (
                *(python, "-m", "onnxruntime_genai.models.builder", "-i", str(source), "-o", str(target)),
                *("-p", "int4", "-e", "cpu", "-c", str(self.home / "cache")),
                *("--extra_options", "int4_accuracy_level=4", "int4_block_size=32"),
            )
            run_logged(command, self.log("convert-onnxruntime"), "onnxruntime-genai cannot build the model")

        return self._made(f"{self._stem}.onnx-int4", make)

    def log(self, name: str) -> Path:
        folder = self.home / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{name}.log"

    @property
    def _stem(self) -> str:
        return self.model.name.split(".")[0]

    def _made(self, name: str, make: Callable[[Path], None]) -> Path:
        target = self.home / "models" / name
        if not target.exists():
            self.print_status(f"making {target}")
        return make_once(target, make)


@dataclass(frozen=True)
class Engine:
    """An engine with the settings that it is measured with: one row of the report's tables. A peer may have several."""

    name: str
    peer: str
    """The name of the engine in the option `--peers`."""
    version: str
    prepare: Callable[[PeerFiles], Callable[[int], Launch]] = field(repr=False)
    """Installs and converts what is missing. Returns a function that makes the launch for a port."""
    work: tuple[str, ...] = WORKLOADS
    is_in_process: bool = False
    """Whether the engine runs in the process of a driver, without HTTP."""
    is_usual: bool = True
    """Whether it is measured by default, without `--peers`."""


def _weft(*options: str) -> Callable[[PeerFiles], Callable[[int], Launch]]:
    def prepare(files: PeerFiles) -> Callable[[int], Launch]:
        command = (sys.executable, "-m", "weft.cli.main", "serve", str(files.model), *options)
        return lambda port: Launch((*command, "--port", str(port)), port, engine_environment())

    return prepare


def _weft_in_process(files: PeerFiles) -> Callable[[int], Launch]:
    command = (sys.executable, "-P", str(Path(__file__).with_name("peers_drive.py")), str(files.model))
    return lambda _: Launch(command, None, engine_environment())


def _llama(slots: int, model: Callable[[PeerFiles], Path]) -> Callable[[PeerFiles], Callable[[int], Launch]]:
    def prepare(files: PeerFiles) -> Callable[[int], Launch]:
        python, path = files.python(LLAMA), model(files)
        command = (python, str(script("serve_llama")), str(path), str(slots), str(CONTEXT))
        return lambda port: Launch((*command, str(port)), port, clean_environment())

    return prepare


def _openvino(*options: str) -> Callable[[PeerFiles], Callable[[int], Launch]]:
    def prepare(files: PeerFiles) -> Callable[[int], Launch]:
        python, path = files.python(OPENVINO), files.openvino()
        command = (python, str(script("drive_openvino")), str(path), str(files.end_id), *options)
        return lambda _: Launch(command, None, clean_environment())

    return prepare


def _onnxruntime(files: PeerFiles) -> Callable[[int], Launch]:
    path = files.onnx()
    command = (files.python(ONNXRUNTIME), str(script("drive_onnxruntime")), str(path))
    return lambda _: Launch(command, None, clean_environment())


def _vllm(files: PeerFiles) -> Callable[[int], Launch]:
    command = (
        *(
            files.python(VLLM),
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            str(files.folder()),
        ),
        *(
            "--dtype",
            "float32",
            "--max-model-len",
            str(CONTEXT),
            "--max-num-seqs",
            "64",
            "--host",
            "127.0.0.1",
        ),
    )
    variables = {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",  # otherwise one core of two is reserved for HTTP
        "VLLM_CACHE_ROOT": str(files.home / "cache" / "vllm"),
        "VLLM_NO_USAGE_STATS": "1",
    }
    return lambda port: Launch((*command, "--port", str(port)), port, clean_environment(variables))


def _as_shipped(files: PeerFiles) -> Path:
    return files.model


_XLLAMACPP = LLAMA.requirements[0]

ENGINES = (
    Engine(OURS, OURS, "", _weft()),
    Engine(OURS_WITHOUT_DRAFTS, "weft-without-drafts", "", _weft("--drafts", "0")),
    Engine(OURS_IN_PROCESS, "weft-in-process", "", _weft_in_process, is_in_process=True, is_usual=False),
    Engine("llama.cpp Q4_0, 8 slots", "llama.cpp", _XLLAMACPP, _llama(8, PeerFiles.q4_0), ("W1", "W8")),
    Engine("llama.cpp Q4_0, 16 slots", "llama.cpp", _XLLAMACPP, _llama(16, PeerFiles.q4_0), ("W32",)),
    Engine("llama.cpp Q4_0, 32 slots", "llama.cpp", _XLLAMACPP, _llama(32, PeerFiles.q4_0)),
    Engine("llama.cpp, weft's file", "llama.cpp", _XLLAMACPP, _llama(8, _as_shipped), ("W1", "W8")),
    Engine("OpenVINO GenAI int4", "openvino", OPENVINO.requirements[0], _openvino(), is_in_process=True),
    Engine(
        "OpenVINO GenAI int4, 16-bit cache",
        "openvino-f16",
        OPENVINO.requirements[0],
        _openvino("f16"),
        is_in_process=True,
        is_usual=False,
    ),
    Engine(
        "onnxruntime-genai int4, static",
        "onnxruntime",
        ONNXRUNTIME.requirements[0],
        _onnxruntime,
        ("W1", "W8", "W32"),
        is_in_process=True,
    ),
    Engine("vLLM CPU f32", "vllm", VLLM.requirements[0], _vllm),
)
PEERS = tuple(dict.fromkeys(engine.peer for engine in ENGINES if engine.peer != OURS))
