"""Compiles the kernels that a model will need into Triton's cache, in separate processes, before a step needs them.

With an empty cache, the first step of every kind waits seconds for the compiler. So the engine starts a process while
it loads the weights. That process forks workers, and each worker compiles a part of the kernels. A worker runs the
common steps on a device without memory, where a launch only compiles the kernel. The engine never waits for the
workers: it compiles missing kernels itself. When everything is compiled, a marker file is written to the cache, and
later starts skip this.

The process is started with `python -m` and this module. It reads an `Outline` and `Sizes` from its standard input, one
line each.
"""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from weft.backends.cuda.plain_data import from_line, to_line
from weft.backends.cuda.sampling_rows import SamplingPath
from weft.config import KvCachePoolConfig
from weft.models.config import ModelConfig
from weft.models.decoder import Decoder
from weft.ops.base import WeightSource
from weft.ops.triton.device import Device
from weft.ops.triton.ops import TritonOps
from weft.ops.triton.weights import Loader
from weft.plan import IterationPlan, RowStart
from weft.request import RequestId, SamplingParams
from weft.text.grammar import GrammarCompiler

_MOST_PROCESSES = 12
_NICENESS = 10
_TIME_LIMIT_SECONDS = 300
"""The process ends itself after this time, because the engine that would end it may be gone."""
_PROMPT = 100
_SMALL_PROMPTS = (20, 40)
_DECODES = (2, 16, 32, 64, 128, 256)
_GREEDY = SamplingParams(temperature=0.0)
_SAMPLING: tuple[dict[str, Any], ...] = (
    {},
    {"top_p": 0.9},
    {"top_k": 50, "top_p": 0.9},
    {"top_k": 50},
    {"min_p": 0.1},
    {"temperature": 0.0, "logprobs": 5},
    {"logprobs": 5},
    {"frequency_penalty": 0.5},
    {"temperature": 0.0, "frequency_penalty": 0.5},
    {"repetition_penalty": 1.1, "top_p": 0.9},
    {"logit_bias": {3: 1.0}},
)
_MASKED: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {}, {"top_p": 0.9})


@dataclass(frozen=True)
class StoredShape:
    """A `WeightSource` that has a shape but no data."""

    name: str
    shape: tuple[int, ...]
    format_name: str


@dataclass(frozen=True)
class Outline:
    """All properties of a model and a GPU that decide how kernels are compiled."""

    config: ModelConfig
    weights: tuple[tuple[str, StoredShape], ...]
    dtype_name: str
    invariant: bool
    capability: int
    processors: int
    dependent_launches: bool

    @property
    def dtype(self) -> torch.dtype:
        named: torch.dtype = getattr(torch, self.dtype_name)
        return named


@dataclass(frozen=True)
class Sizes:
    """The arguments of `allocate`. `pool` has as many blocks, of each tier, as the longest context takes."""

    pool: KvCachePoolConfig
    num_rows: int
    max_tokens: int

    def kind(self, config: ModelConfig) -> str:
        """The values that decide how kernels are compiled. The numbers of blocks matter only through the longest
        context."""
        pool = {name: value for name, value in asdict(self.pool).items() if not name.endswith("_blocks")}
        pool_tokens = (self.pool.num_blocks or 0) * self.pool.block_size
        return repr((pool, self.num_rows, self.max_tokens, min(config.max_context, pool_tokens)))


def outline_of(
    config: ModelConfig,
    weights: Mapping[str, WeightSource],
    dtype: torch.dtype,
    invariant: bool,
    device: Device,
) -> Outline:
    major, minor = torch.cuda.get_device_capability(device.torch_device)
    shapes = (
        (name, StoredShape(source.name, source.shape, source.format_name)) for name, source in weights.items()
    )
    gpu = (10 * major + minor, device.processors, device.dependent_launches)
    return Outline(config, tuple(shapes), str(dtype).removeprefix("torch."), invariant, *gpu)


class KernelPrecompiler:
    """The engine's side: starts the process, sends it its input, and ends it."""

    def __init__(self, outline: Outline) -> None:
        self._outline = outline
        self._process: subprocess.Popen[bytes] | None = None
        # Starts the process, unless this model was compiled before. The sizes follow later: until then the process
        # imports torch.
        if next(_cache_folder().glob(_marker_name(outline) + "*"), None) is None:
            self._start()

    def begin(self, sizes: Sizes) -> None:
        """Sends the sizes; the process then begins to compile. Does nothing if everything is compiled already."""
        if (_cache_folder() / _marker_name(self._outline, sizes)).exists():
            self.close()
            return
        if self._process is None:
            self._start()
        self._send(sizes)
        self._end_of_input()

    def close(self) -> None:
        if self._process is not None:
            self._end_of_input()
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGTERM)
            self._process.wait()
            self._process = None

    def _start(self) -> None:
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                # No library threads: the process forks workers, and threads do not survive a fork.
                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                # A process group, so that `close` ends the workers too.
                start_new_session=True,
            )
            self._send(self._outline)

    def _send(self, message: Outline | Sizes) -> None:
        if self._process is not None and self._process.stdin is not None:
            # The process may have ended or failed to start. Then kernels are compiled when a step needs them.
            with contextlib.suppress(OSError):
                self._process.stdin.write(to_line(message))
                self._process.stdin.flush()

    def _end_of_input(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()


def _cache_folder() -> Path:
    return Path(triton.knobs.cache.dir)


def _marker_name(outline: Outline, sizes: Sizes | None = None) -> str:
    """The name of the marker file for this model, GPU, source code and Triton version. Without sizes: the prefix of
    that name."""
    digest = hashlib.sha256(repr((outline, triton.__version__, torch.__version__)).encode())
    package = Path(__file__).parents[2]
    for source in sorted((*package.glob("ops/triton/*.py"), *package.glob("backends/cuda/*.py"))):
        digest.update(source.read_bytes())
    name = f"weft-{digest.hexdigest()[:24]}-"
    if sizes is None:
        return name
    return name + hashlib.sha256(sizes.kind(outline.config).encode()).hexdigest()[:24]


# --- in the process that compiles -------------------------------------------------------------------------------------


class CompileOnlyDriver:
    """A driver for Triton's compiler that works without a GPU."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


class CompileOnlyDevice(Device):
    """A device with the properties of the GPU that `outline` describes. It has no memory: tensors have shapes and no data."""

    interpreter_memory = 1 << 62

    def __init__(self, outline: Outline, memory: str = "meta") -> None:
        self.torch_device = torch.device(memory)
        self.index = 0
        self.is_gpu = False
        self.description = "a device that only compiles"
        self.processors = outline.processors
        self.dependent_launches = outline.dependent_launches
        self.remembers_launches = False
        self._launches = {}
        self._launched: set[tuple[int, Hashable]] = set()

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        arguments: tuple[Any, ...],
        key: Hashable,
        constants: Callable[[], dict[str, Any]],
    ) -> None:
        """Launches each kernel once per key. The layers of a model repeat the same launches."""
        if (id(kernel), key) not in self._launched:
            self._launched.add((id(kernel), key))
            super().launch(kernel, grid, arguments, key, constants)


class _NoDataLoader(Loader):
    def _read(self, source: WeightSource, target: Tensor) -> None:
        pass


def precompile(outline: Outline, sizes: Sizes, memory: str = "meta") -> None:
    """Launches all kernels of common steps, in the order in which an engine needs them."""
    from weft.backends.cuda.runner import CudaBackend

    device = CompileOnlyDevice(outline, memory)
    ops = TritonOps(device, outline.dtype)
    ops._loader = _NoDataLoader(device, outline.dtype)
    weights = cast(Mapping[str, WeightSource], dict(outline.weights))
    decoder = Decoder(outline.config, weights, ops)
    vocabulary = outline.config.vocabulary_size
    compiler = GrammarCompiler(_no_tokenizer, frozenset(), vocabulary)
    backend = CudaBackend(device, decoder, ops, frozenset(), compiler, outline.invariant)
    backend.allocate(replace(sizes.pool, swap_blocks=0), sizes.num_rows, sizes.max_tokens)
    for plan in _plans(sizes):
        backend.submit(plan).collect()
    logits = device.empty(1, vocabulary, dtype=outline.dtype)
    masks = (device.zeros(1, -(-vocabulary // 32), dtype=torch.int32), device.zeros(1, dtype=torch.int32))
    rows, positions = backend._rows.sampled(1)
    for params in _MASKED:
        backend._sampler.start([_start(0, SamplingParams(**params))])
        path: SamplingPath = replace(backend._sampler.path([0]), is_masked=True)
        backend._sampler.sample(logits, rows, positions, path, masks)
    backend.close()


def _no_tokenizer() -> Any:
    raise AssertionError("nothing here has a grammar")


def _plans(sizes: Sizes) -> Iterator[IterationPlan]:
    """The kinds of steps that an engine runs soon after its start. A worker runs each once, to compile its kernels."""
    prompt = min(_PROMPT, sizes.max_tokens - 1, (sizes.pool.num_blocks or 0) * sizes.pool.block_size - 1)
    yield _prompt_plan(0, prompt)
    yield _decode_plan(1, prompt)
    for params in _SAMPLING:
        yield replace(_decode_plan(1, prompt), row_starts=(_start(0, SamplingParams(**params)),))
    if sizes.num_rows > 1:
        second = _prompt_plan(1, prompt)
        yield replace(
            second,
            num_decodes=1,
            request_ids=(RequestId("0"), RequestId("1")),
            rows=(0, 1),
            starts=(prompt, 0),
            counts=(1, prompt - 1),
            samples=(True, True),
            row_starts=(_start(0, _GREEDY), *second.row_starts),
        )
    yield IterationPlan(
        *(0, 0, (), (), (), (), ()),
        row_starts=tuple(_start(row, _GREEDY) for row in range(sizes.num_rows)),
    )
    for count in _DECODES:
        if count <= sizes.num_rows:
            yield _decode_plan(count, prompt)
    for length in _SMALL_PROMPTS:
        if length < prompt:
            yield _prompt_plan(0, length)
    if sizes.pool.is_two_tier:
        yield replace(
            _decode_plan(1, prompt),
            moved_rows=(0,),
            moved_indices=(0,),
            moved_from=(0,),
            moved_to=(sizes.pool.num_blocks or 0,),
        )


def _start(row: int, params: SamplingParams, tokens: int = 1) -> RowStart:
    return RowStart(row, RequestId(str(row)), (1,) * tokens, tokens, params, 0, (0,))


def _prompt_plan(row: int, length: int) -> IterationPlan:
    starts = (_start(row, _GREEDY, length),)
    return IterationPlan(0, 0, (RequestId(str(row)),), (row,), (0,), (length,), (True,), row_starts=starts)


def _decode_plan(count: int, position: int) -> IterationPlan:
    ids = tuple(RequestId(str(row)) for row in range(count))
    rows, starts = tuple(range(count)), (position,) * count
    return IterationPlan(0, count, ids, rows, starts, (1,) * count, (True,) * count)


class _KernelShares:
    """Records the kernels that are launched, in order, and decides which of them this process compiles."""

    def __init__(self) -> None:
        self.launched: dict[tuple[str, str, str], None] = {}
        self.share: tuple[int, int] | None = None
        """The index of this process, and the number of processes. None: this process compiles nothing."""

    def skips(self, *, key: Any, fn: Any, **rest: Any) -> bool:
        """A hook that Triton calls before it compiles a kernel. True keeps Triton from compiling it."""
        kernel = (fn.module, fn.name, str(key))
        self.launched[kernel] = None
        return self.share is None or zlib.crc32(repr(kernel).encode()) % self.share[1] != self.share[0]


def prepare_to_compile(capability: int) -> _KernelShares:
    """Patches Triton and torch so that launches in this process only compile. The process can no longer compute
    anything."""
    driver.set_active(CompileOnlyDriver(capability))
    shares = _KernelShares()
    triton.knobs.runtime.jit_cache_hook = shares.skips

    def compiling(self: Any, grid: Any) -> Any:
        return lambda *arguments, **constants: self.run(*arguments, grid=grid, warmup=True, **constants)

    JITFunction.__getitem__ = compiling
    # Matrix products do nothing here: cuBLAS needs no compilation, and for tensors without data torch would import its
    # own compiler.
    for owner, product in ((torch, "mm"), (torch, "addmm"), (Tensor, "addmm_")):
        setattr(owner, product, lambda *arguments, **options: None)
    return shares


def compile_all(outline: Outline, sizes: Sizes, processes: int) -> None:
    """Forks `processes` workers. Each launches all kernels, but compiles only a part of them."""
    shares = prepare_to_compile(outline.capability)
    workers = []
    for number in range(processes):
        shares.share = (number, processes)
        # Forked, because a new process would take seconds to import torch.
        worker = multiprocessing.get_context("fork").Process(target=_compile_share, args=(outline, sizes))
        worker.start()
        workers.append(worker)
    for worker in workers:
        worker.join()
    if all(worker.exitcode == 0 for worker in workers):
        _cache_folder().mkdir(parents=True, exist_ok=True)
        (_cache_folder() / _marker_name(outline, sizes)).touch()


def _compile_share(outline: Outline, sizes: Sizes) -> None:
    signal.alarm(_TIME_LIMIT_SECONDS)
    precompile(outline, sizes)


def main() -> None:
    torch.set_num_threads(1)
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
    lines = sys.stdin.buffer
    first = lines.readline()
    import_module("weft.backends.cuda.runner")  # imported while the engine loads its weights
    second = lines.readline()
    if not second:
        return  # the engine ended before it allocated its memory
    signal.alarm(_TIME_LIMIT_SECONDS)
    outline, sizes = from_line(Outline, first), from_line(Sizes, second)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    compile_all(outline, sizes, max(1, min(_MOST_PROCESSES, cores - 2)))


if __name__ == "__main__":
    main()
