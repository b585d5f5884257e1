"""The kernels that a model will need, compiled before anybody waits for them: by processes of their own, into Triton's cache.

With an empty cache the first step of every kind waits for the compiler, seconds at a time, and every request with it. So
a process is started beside the one that loads the weights. Several forked from it carry out steps of all common kinds, on
a card that has no memory and computes nothing, where to launch a kernel is to compile it, each its own part of the
kernels. What the engine needs meanwhile it compiles itself; nothing waits for this. Once all is compiled, a file in the
cache says so, and later starts have nothing to do.

Run as a module, this is that process: it is told what it is about on its standard input.
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
_PATIENCE_SECONDS = 300
"""Then a process ends by itself, whatever it is at: nobody may be there to end it."""
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
    """A `WeightSource` of which nothing is read."""

    name: str
    shape: tuple[int, ...]
    format_name: str


@dataclass(frozen=True)
class Outline:
    """All of a model and a card that decides how kernels are compiled."""

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
    """What a backend was allocated with; the pool has as many blocks, of each tier, as its longest context takes."""

    pool: KvCachePoolConfig
    num_rows: int
    max_tokens: int

    def kind(self, config: ModelConfig) -> str:
        """What of it decides how kernels are compiled: of the numbers of blocks only how long a context they allow."""
        pool = {name: value for name, value in asdict(self.pool).items() if not name.endswith("_blocks")}
        room = (self.pool.num_blocks or 0) * self.pool.block_size
        return repr((pool, self.num_rows, self.max_tokens, min(config.max_context, room)))


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
    card = (10 * major + minor, device.processors, device.dependent_launches)
    return Outline(config, tuple(shapes), str(dtype).removeprefix("torch."), invariant, *card)


class ForeseenKernels:
    """The process, as long as it takes."""

    def __init__(self, outline: Outline) -> None:
        self._outline = outline
        self._process: subprocess.Popen[bytes] | None = None
        # Where nothing of this model was compiled yet, the process is there by the time that all is known.
        if next(_cache_folder().glob(_note_name(outline) + "*"), None) is None:
            self._start()

    def begin(self, sizes: Sizes) -> None:
        """All is known now."""
        if (_cache_folder() / _note_name(self._outline, sizes)).exists():
            self.close()
            return
        if self._process is None:
            self._start()
        self._tell(sizes)
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
                # Processes are forked from it, which threads of a library would not survive.
                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                # A group of its own, which ends as a whole.
                start_new_session=True,
            )
            self._tell(self._outline)

    def _tell(self, what: Outline | Sizes) -> None:
        if self._process is not None and self._process.stdin is not None:
            # It may have ended: it was killed, or could not begin. Then everything is compiled when it is needed.
            with contextlib.suppress(OSError):
                self._process.stdin.write(to_line(what))
                self._process.stdin.flush()

    def _end_of_input(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()


def _cache_folder() -> Path:
    return Path(triton.knobs.cache.dir)


def _note_name(outline: Outline, sizes: Sizes | None = None) -> str:
    """The file that says that all of it is compiled, by this weft and with this Triton; without sizes, how its name begins."""
    digest = hashlib.sha256(repr((outline, triton.__version__, torch.__version__)).encode())
    package = Path(__file__).parents[2]
    for source in sorted((*package.glob("ops/triton/*.py"), *package.glob("backends/cuda/*.py"))):
        digest.update(source.read_bytes())
    name = f"weft-{digest.hexdigest()[:24]}-"
    if sizes is None:
        return name
    return name + hashlib.sha256(sizes.kind(outline.config).encode()).hexdigest()[:24]


# --- in that process --------------------------------------------------------------------------------------------------


class NoCard:
    """What Triton asks its driver before it compiles."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


class ForeseenCard(Device):
    """A card with the properties of another, and without memory: tensors have shapes and nothing else."""

    interpreter_memory = 1 << 62

    def __init__(self, outline: Outline, memory: str = "meta") -> None:
        self.torch_device = torch.device(memory)
        self.index = 0
        self.is_card = False
        self.description = "a card to come"
        self.processors = outline.processors
        self.dependent_launches = outline.dependent_launches
        self.remembers_launches = False
        self._launches = {}
        self._met: set[tuple[int, Hashable]] = set()

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        arguments: tuple[Any, ...],
        key: Hashable,
        constants: Callable[[], dict[str, Any]],
    ) -> None:
        """Once for each key: layers are many, and alike."""
        if (id(kernel), key) not in self._met:
            self._met.add((id(kernel), key))
            super().launch(kernel, grid, arguments, key, constants)


class _Unread(Loader):
    def _read(self, source: WeightSource, target: Tensor) -> None:
        pass


def foresee(outline: Outline, sizes: Sizes, memory: str = "meta") -> None:
    """Launches all that common steps launch, each kernel at least once, what is needed first before the rest."""
    from weft.backends.cuda.runner import CudaBackend

    device = ForeseenCard(outline, memory)
    ops = TritonOps(device, outline.dtype)
    ops._loader = _Unread(device, outline.dtype)
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
    """The steps of an engine that starts."""
    prompt = min(_PROMPT, sizes.max_tokens - 1, (sizes.pool.num_blocks or 0) * sizes.pool.block_size - 1)
    yield _prompt_plan(0, prompt)
    yield _decode_plan(1, prompt)
    for params in _SAMPLING:
        yield replace(_decode_plan(1, prompt), row_starts=(_start(0, SamplingParams(**params)),))
    if sizes.num_rows > 1:
        beside = _prompt_plan(1, prompt)
        yield replace(
            beside,
            num_decodes=1,
            request_ids=(RequestId(0), RequestId(1)),
            rows=(0, 1),
            starts=(prompt, 0),
            counts=(1, prompt - 1),
            samples=(True, True),
            row_starts=(_start(0, _GREEDY), *beside.row_starts),
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
    return RowStart(row, RequestId(row), (1,) * tokens, tokens, params, 0, (0,))


def _prompt_plan(row: int, length: int) -> IterationPlan:
    starts = (_start(row, _GREEDY, length),)
    return IterationPlan(0, 0, (RequestId(row),), (row,), (0,), (length,), (True,), row_starts=starts)


def _decode_plan(count: int, position: int) -> IterationPlan:
    ids = tuple(RequestId(row) for row in range(count))
    rows, starts = tuple(range(count)), (position,) * count
    return IterationPlan(0, count, ids, rows, starts, (1,) * count, (True,) * count)


class _Shared:
    """Which kernels there are, in the order in which they are met, and which of them this process compiles."""

    def __init__(self) -> None:
        self.met: dict[tuple[str, str, str], None] = {}
        self.part: tuple[int, int] | None = None
        """The number of this process, and of how many; None: it compiles nothing."""

    def passes_over(self, *, key: Any, fn: Any, **rest: Any) -> bool:
        kernel = (fn.module, fn.name, str(key))
        self.met[kernel] = None
        return self.part is None or zlib.crc32(repr(kernel).encode()) % self.part[1] != self.part[0]


def prepare_to_compile(capability: int) -> _Shared:
    """From here on a launch in this process compiles, if anything. It is for processes that do nothing else."""
    driver.set_active(NoCard(capability))
    shared = _Shared()
    triton.knobs.runtime.jit_cache_hook = shared.passes_over

    def compiling(self: Any, grid: Any) -> Any:
        return lambda *arguments, **constants: self.run(*arguments, grid=grid, warmup=True, **constants)

    JITFunction.__getitem__ = compiling
    # There is nothing to compile for cuBLAS, and without memory torch would import its own compiler for these.
    for owner, product in ((torch, "mm"), (torch, "addmm"), (Tensor, "addmm_")):
        setattr(owner, product, lambda *arguments, **options: None)
    return shared


def compile_all(outline: Outline, sizes: Sizes, processes: int) -> None:
    """Each process meets all kernels, and compiles its own."""
    shared = prepare_to_compile(outline.capability)
    workers = []
    for number in range(processes):
        shared.part = (number, processes)
        # Forked: whoever is started anew would take seconds to import torch.
        worker = multiprocessing.get_context("fork").Process(target=_compile_part, args=(outline, sizes))
        worker.start()
        workers.append(worker)
    for worker in workers:
        worker.join()
    if all(worker.exitcode == 0 for worker in workers):
        _cache_folder().mkdir(parents=True, exist_ok=True)
        (_cache_folder() / _note_name(outline, sizes)).touch()


def _compile_part(outline: Outline, sizes: Sizes) -> None:
    signal.alarm(_PATIENCE_SECONDS)
    foresee(outline, sizes)


def main() -> None:
    torch.set_num_threads(1)
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
    told = sys.stdin.buffer
    first = told.readline()
    import_module("weft.backends.cuda.runner")  # while the engine loads its weights
    second = told.readline()
    if not second:
        return  # the engine did not come so far
    signal.alarm(_PATIENCE_SECONDS)
    outline, sizes = from_line(Outline, first), from_line(Sizes, second)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    compile_all(outline, sizes, max(1, min(_MOST_PROCESSES, cores - 2)))


if __name__ == "__main__":
    main()
