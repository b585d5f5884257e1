"""The import rules of the architecture: which room of src/weft may know which, and what benchmarks may import.

Every import counts: at the top of a module, inside a function, under TYPE_CHECKING, and through `import_module`.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"

VOCABULARY = (
    "weft.clock",
    "weft.config",
    "weft.errors",
    "weft.embedding",
    "weft.learned_costs",
    "weft.lengths",
    "weft.live",
    "weft.metrics",
    "weft.parameters",
    "weft.plan",
    "weft.request",
    "weft.tiers",
)

# Modules that give time, randomness, threads or I/O that no caller passed in. With them a seed would not replay a run.
NONDETERMINISM = (
    *("asyncio", "concurrent", "multiprocessing", "selectors", "signal", "socket", "subprocess", "threading"),
    *("datetime", "random", "secrets", "time", "uuid"),
)
# Also kept out of `loading`, which hands out numpy buffers that every backend can take.
ARRAY_LIBRARIES = ("cupy", "flax", "jax", "mlx", "safetensors.torch", "tensorflow")

# Only here may an import take a name that is computed: the public names, and the backend registry.
COMPUTED_IMPORTS = ("weft", "weft.backends.registry", "weft.server.http.bodies")


@dataclass(frozen=True)
class Import:
    """One imported module. `refused`: why it is refused whatever the rules say; empty: the rules decide."""

    target: str
    line: int
    refused: str = ""


@dataclass(frozen=True)
class Rule:
    """What the modules under `rooms` (less `but`) may import; None means that the rule says nothing about it."""

    rooms: tuple[str, ...]
    why: str
    but: tuple[str, ...] = ()
    weft: tuple[str, ...] | None = None  # the only modules of weft, besides the room's own
    never_weft: tuple[str, ...] = ()
    third_party: tuple[str, ...] | None = None  # the only packages from outside
    never: tuple[str, ...] = ()  # of the standard library or from outside


RULES = (
    Rule(
        ("weft",),
        "benchmarks are not part of the wheel",
        never=("benchmarks",),
    ),
    Rule(
        ("benchmarks.peer_scripts",),
        "these scripts run in environments without weft",
        weft=(),
        never=("benchmarks",),
    ),
    Rule(
        ("weft", "benchmarks"),
        "torch and triton are imported in backends/cuda and ops/triton only",
        but=("weft.backends.cuda", "weft.ops.triton", "benchmarks.peer_scripts.drive_embeddings"),
        never=("torch", "triton"),
    ),
    Rule(
        ("weft", "benchmarks"),
        "opentelemetry is imported in server/otlp.py only, where traces are on",
        but=("weft.server.otlp",),
        never=("opentelemetry",),
    ),
    Rule(
        ("weft",),
        "the C++ kernels are called by ops/cpu, the CPU backend, the doctor, and the reader of GGUF vocabularies",
        but=("weft.ops.cpu", "weft.backends.cpu", "weft.cli.doctor", "weft.loading.gguf"),
        never_weft=("weft._kernels",),
    ),
    Rule(
        VOCABULARY,
        "the vocabulary imports the standard library alone; the clock is passed in",
        weft=VOCABULARY,
        third_party=(),
        never=NONDETERMINISM,
    ),
    Rule(
        ("weft.scheduling",),
        "scheduling imports the standard library and the vocabulary; time, chance and threads are passed in",
        weft=VOCABULARY,
        third_party=(),
        never=NONDETERMINISM,
    ),
    Rule(
        ("weft.engine",),
        "engine knows the vocabulary, scheduling, backends.base and backends.registry",
        weft=(*VOCABULARY, "weft.scheduling", "weft.backends.base", "weft.backends.registry"),
        third_party=("msgspec",),
    ),
    Rule(
        ("weft.backends",),
        "a backend carries out plans; it never knows who makes them",
        never_weft=("weft.scheduling", "weft.server", "weft.engine"),
    ),
    Rule(
        ("weft.sampling",),
        "the definition of sampling imports the vocabulary, numpy, and the arrays of a step",
        weft=(*VOCABULARY, "weft.backends.grammar", "weft.backends.step_arrays"),
        third_party=("numpy",),
    ),
    Rule(
        ("weft.models",),
        "models know the ops interface only, so that one decoder serves every array type",
        weft=(*VOCABULARY, "weft.ops"),
        third_party=(),
    ),
    Rule(
        ("weft.ops.triton",),
        "the kernels of the GPU know the ops interface and the flags of a sampler, and not what runs them",
        weft=(*VOCABULARY, "weft.ops", "weft.sampling.words"),
        third_party=("numpy", "torch", "triton"),
    ),
    Rule(
        ("weft.loading",),
        "loading knows the vocabulary, and no array library but numpy",
        weft=(*VOCABULARY, "weft._kernels"),
        never=ARRAY_LIBRARIES,
    ),
    Rule(
        ("weft.memory",),
        "memory knows neither HTTP nor SQLite nor who embeds its texts",
        weft=("weft.errors",),
        third_party=("msgspec", "numpy", "pypdf", "usearch"),
        never=("asyncio", "sqlite3", "socket"),
    ),
    Rule(("weft.text",), "text knows the vocabulary and model files", weft=(*VOCABULARY, "weft.loading")),
    Rule(
        ("weft.server",),
        "server knows engine.client, text, the folder of weft, the model files that the text side is opened from, and the "
        "downloads that clients of Ollama's API ask for",
        weft=(
            *VOCABULARY,
            "weft.engine.ipc.client",
            "weft.engine.ipc.launch",
            "weft.engine.ipc.remote_answer",
            "weft.json_lines",
            "weft.loading.cache",
            "weft.loading.checkpoint",
            "weft.loading.embedding_files",
            "weft.loading.pull",
            "weft.memory",
            "weft.text",
            "weft.vectors",
        ),
    ),
    Rule(
        ("weft.routing",),
        "the router is pure, so that a simulation and an ingress can use it",
        weft=(),
        third_party=(),
        never=NONDETERMINISM,
    ),
    Rule(
        ("weft.simulation", "weft.planning"),
        "a simulation computes no model",
        never_weft=("weft._kernels", "weft.models", "weft.ops", "weft.backends.cpu", "weft.backends.cuda"),
    ),
    Rule(
        ("weft.vectors",),
        "arrays of vectors need numpy alone",
        weft=VOCABULARY,
        third_party=("numpy",),
    ),
)

# Rooms whose imports only the general rules bound. A new room has to be named here or above.
OTHER_ROOMS = (
    "benchmarks",
    "weft._kernels",
    "weft.bench",
    "weft.cli",
    "weft.json_lines",
    "weft.local_answers",
    "weft.local_vectors",
    "weft.llm",
    "weft.llm_config",
    "weft.ops",
    "weft.progress",
    "weft.terminal",
)


def inside(module: str, rooms: tuple[str, ...]) -> bool:
    return any(module == room or module.startswith(room + ".") for room in rooms)


def module_name(path: Path, source: Path = SOURCE) -> str:
    parts = path.relative_to(source).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FACADE = "inside weft a name is imported from the module that defines it"
COMPUTED = "an import of a computed name cannot be checked"


def imports_of(module: str, source: str, is_package: bool, known: frozenset[str]) -> Iterator[Import]:
    """Every import in `source`. `from a import b` is an import of a.b where that may be a module, else of a."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, FACADE if alias.name == "weft" else "")
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".")[: (1 if is_package else 0) - node.level or None]
                base = ".".join([*package, base] if base else package)
            for alias in node.names:
                full = f"{base}.{alias.name}"
                if full in known or not inside(base, ("weft",)):
                    yield Import(full, node.lineno)
                elif base == "weft" and alias.name != "__version__":
                    yield Import(full, node.lineno, FACADE)
                else:
                    yield Import(base, node.lineno)
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__"):
                argument = node.args[0] if node.args else None
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield Import(argument.value, node.lineno)
                elif module not in COMPUTED_IMPORTS:
                    yield Import(ast.unparse(node), node.lineno, COMPUTED)


def broken_by(rule: Rule, module: str, target: str) -> bool:
    if not inside(module, rule.rooms) or inside(module, rule.but):
        return False
    if inside(target, ("weft",)):
        if inside(target, rule.never_weft):
            return True
        if target == "weft" or inside(target, rule.rooms):
            return False
        return rule.weft is not None and not inside(target, rule.weft)
    from_outside = target.partition(".")[0] not in sys.stdlib_module_names
    return inside(target, rule.never) or (
        from_outside and rule.third_party is not None and not inside(target, rule.third_party)
    )


def complaints(module: str, source: str, is_package: bool, known: frozenset[str]) -> list[str]:
    """What the module imports against the rules, one sentence each."""
    found = []
    for what in imports_of(module, source, is_package, known):
        reasons = (
            [what.refused] if what.refused else [r.why for r in RULES if broken_by(r, module, what.target)]
        )
        found += [f"{module}:{what.line} imports {what.target}: {why}" for why in reasons]
    return list(dict.fromkeys(found))


def tree() -> dict[str, Path]:
    """The modules in Python, and the stub of the one in C++."""
    return {
        module_name(path, source): path
        for source, package in ((SOURCE, "weft"), (ROOT, "benchmarks"))
        for path in sorted((source / package).rglob("*.py*"))
        if path.suffix != ".pyc"
    }


def test_every_import_in_the_package_obeys_the_rules() -> None:
    modules = tree()
    assert "weft.cli.main" in modules, f"the package is not under {SOURCE}"
    assert "benchmarks.__main__" in modules, f"the benchmarks are not under {ROOT}"
    known = frozenset(modules)
    found = [
        complaint
        for name, path in modules.items()
        for complaint in complaints(name, path.read_text("utf-8"), path.name == "__init__.py", known)
    ]
    assert not found, "\n" + "\n".join(found)


def test_every_module_belongs_to_a_room_that_the_rules_know() -> None:
    rooms = (*OTHER_ROOMS, *(room for rule in RULES for room in rule.rooms if room != "weft"))
    strangers = [name for name in tree() if name != "weft" and not inside(name, rooms)]
    assert not strangers, f"name these in RULES or OTHER_ROOMS: {strangers}"


KNOWN = frozenset(
    {
        *VOCABULARY,
        "weft",
        "weft._kernels",
        "weft.backends",
        "weft.backends.base",
        "weft.backends.cpu",
        "weft.backends.cpu.runner",
        "weft.backends.cuda",
        "weft.backends.cuda.runner",
        "weft.backends.noop",
        "weft.backends.registry",
        "weft.engine",
        "weft.engine.ipc.client",
        "weft.engine.loop",
        "weft.engine.serving",
        "weft.loading",
        "weft.loading.gguf",
        "weft.models",
        "weft.models.decoder",
        "weft.ops",
        "weft.ops.reference",
        "weft.ops.recording",
        "weft.scheduling",
        "weft.scheduling.cache.block_pool",
        "weft.scheduling.scheduler",
        "weft.server",
        "weft.server.app",
        "weft.text",
    }
)

PLANTED = [
    ("weft.request", "import numpy"),
    ("weft.request", "import time"),
    ("weft.request", "from weft.scheduling.cache.block_pool import BlockPool"),
    ("weft.metrics", "def now():\n    from time import monotonic\n    return monotonic()"),
    ("weft.clock", "import time"),
    ("weft.scheduling.scheduler", "import numpy as np"),
    ("weft.scheduling.scheduler", "import asyncio"),
    ("weft.scheduling.scheduler", "import os, time"),
    ("weft.scheduling.scheduler", "from concurrent.futures import Future"),
    ("weft.scheduling.scheduler", "class S:\n    def step(self):\n        import threading"),
    ("weft.scheduling.scheduler", "from ..engine import loop"),
    ("weft.scheduling.scheduler", "from weft import backends"),
    ("weft.scheduling.scheduler", "from weft import ServingEngine"),
    ("weft.scheduling.scheduler", "import importlib\nimportlib.import_module('numpy')"),
    ("weft.scheduling.scheduler", "__import__('nu' + 'mpy')"),
    ("weft.scheduling.scheduler", "if TYPE_CHECKING:\n    from weft.backends.base import Backend"),
    ("weft.engine.loop", "from weft.backends.noop import NoopBackend"),
    ("weft.engine.loop", "from weft.backends import noop"),
    ("weft.engine.loop", "from weft.backends import anything"),
    ("weft.engine.loop", "import weft.backends.cpu.runner"),
    ("weft.engine.loop", "import numpy"),
    ("weft.engine.loop", "from weft.loading.gguf import open_gguf"),
    ("weft.backends.cpu.runner", "import torch"),
    ("weft.backends.cpu.runner", "from torch.nn import functional"),
    ("weft.backends.noop", "from weft.scheduling.cache.block_pool import BlockPool"),
    ("weft.backends.noop", "from weft.engine.loop import EngineCore"),
    ("weft.backends.noop", "from ..server import app"),
    ("weft.models.decoder", "import numpy"),
    ("weft.models.decoder", "from weft.loading.gguf import open_gguf"),
    ("weft.models.decoder", "from weft.backends.base import Backend"),
    ("weft.ops.reference", "def f():\n    import triton"),
    ("weft.ops.triton.program", "from weft.backends.cuda.runner import CudaBackend"),
    ("weft.ops.triton.program", "import transformers"),
    ("weft.bench.gpu", "import torch"),
    ("weft.bench.gpu", "from benchmarks.jobs import Job"),
    ("weft.bench.gpu", "from benchmarks import jobs"),
    ("weft.bench.gpu", "from weft import _kernels"),
    ("benchmarks.kernels", "import torch"),
    ("benchmarks.kernels", "from weft import LLM"),
    ("benchmarks.peer_scripts.drive_openvino", "from weft.errors import WeftError"),
    ("benchmarks.peer_scripts.drive_openvino", "from benchmarks import jobs"),
    ("weft.loading.random_checkpoint", "def fill():\n    import torch"),
    ("weft.loading.gguf", "import jax"),
    ("weft.loading.gguf", "from safetensors.torch import load_file"),
    ("weft.loading.gguf", "from safetensors import torch"),
    ("weft.server.app", "from weft.engine.serving import ServingEngine"),
    ("weft.server.app", "from weft.models.decoder import Decoder"),
    ("weft.server.app", "def trace():\n    from opentelemetry import trace"),
    ("weft.backends", "from .noop import NoopBackend\nfrom ..scheduling import scheduler"),
    ("weft.planning.replica", "from weft.models.decoder import Decoder"),
    ("weft.planning.measure", "import weft.backends.cpu.runner"),
    ("weft.text", "import weft"),
    ("weft.text", "import_module(name)"),
]


@pytest.mark.parametrize(("module", "source"), PLANTED)
def test_a_planted_violation_is_caught(module: str, source: str) -> None:
    found = complaints(module, source, module in ("weft.text", "weft.backends"), KNOWN)
    assert len(found) == 1, found


ALLOWED = [
    (
        "weft.request",
        "import enum, hashlib\nfrom dataclasses import dataclass\nfrom weft.errors import WeftError",
    ),
    (
        "weft.scheduling.scheduler",
        "from weft.plan import IterationPlan\nfrom .cache.block_pool import BlockPool\nfrom . import scheduler",
    ),
    ("weft.scheduling.scheduler", "from weft import config, plan"),
    ("weft.engine.loop", "import asyncio, threading, time\nfrom weft.scheduling.scheduler import Scheduler"),
    ("weft.engine.loop", "from weft.backends import base, registry\nfrom weft.backends.base import Backend"),
    ("weft.backends.cuda.runner", "import torch\nimport triton.language as tl"),
    ("weft.ops.triton.program", "import torch\nimport triton\nfrom weft.ops.recording import Recording"),
    (
        "weft.backends.cpu.runner",
        "import numpy\nfrom weft.loading.gguf import open_gguf\nfrom weft.models import decoder",
    ),
    ("weft.backends.registry", "import_module(name)"),
    (
        "weft.models.decoder",
        "import math\nfrom weft.ops import Ops\nfrom weft.config import KvCachePoolConfig",
    ),
    ("weft.loading.gguf", "import mmap\nimport numpy as np\nfrom safetensors import safe_open"),
    (
        "weft.server.app",
        "import starlette\nfrom weft.engine.ipc.client import Client\nfrom weft.text import Detokenizer",
    ),
    ("weft.text", "from weft import __version__"),
    (
        "benchmarks.kernels",
        "from weft import _kernels\nfrom weft.scheduling.scheduler import Scheduler\nimport time",
    ),
    ("benchmarks.kernels", "from benchmarks import jobs\nfrom benchmarks.machine_speed import SpeedProbe"),
    ("benchmarks.peer_scripts.drive_openvino", "import openvino_genai"),
]


@pytest.mark.parametrize(("module", "source"), ALLOWED)
def test_a_legal_import_is_not_complained_about(module: str, source: str) -> None:
    assert complaints(module, source, module in ("weft.text", "weft.backends"), KNOWN) == []
