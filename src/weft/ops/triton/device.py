"""The GPU that kernels run on, or Triton's interpreter instead: memory, streams, events, graphs, launches.

With TRITON_INTERPRET=1 and the device "cpu", every kernel computes the same on host tensors, so a machine without a GPU
can test all of them. In the interpreter all work is done when a call returns. So streams and events have nothing to
order, and replaying a graph runs the work again.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, num_threads

from weft.errors import WeftError

INTERPRETED: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)
"""True if kernels are interpreted in this process; kernels read it too."""


def ceil_divide(whole: int, piece: int) -> int:
    """`whole` divided by `piece`, rounded up. Triton's own function for this takes two microseconds a call."""
    return -(-whole // piece)


def power_of_two(least: int) -> int:
    """The smallest power of two that is not less than `least`."""
    return 1 << (least - 1).bit_length()


class Event(Protocol):
    """Marks a point in the work of a stream."""

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None:
        """Later work of the stream waits for the event; the caller does not wait."""

    def query(self) -> bool: ...

    def synchronize(self) -> None:
        """The caller waits for the event."""


class Stream(Protocol):
    """A queue of work that runs in order."""

    def wait_event(self, event: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def record_event(self, event: Any = None) -> Event: ...

    def synchronize(self) -> None: ...


class Graph(Protocol):
    """Work that was captured once and is replayed by one launch."""

    def replay(self) -> None: ...


class _InterpreterEvent:
    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class _InterpreterStream:
    """A stream of the interpreter: its work is always done already."""

    def wait_event(self, event: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Event:
        return _InterpreterEvent() if event is None else event

    def synchronize(self) -> None:
        pass


class _InterpreterGraph:
    """A graph of the interpreter: a replay runs the work again."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work

    def replay(self) -> None:
        self._work()


_idle_streams: dict[int, list[torch.cuda.Stream]] = defaultdict(list)
"""Unused streams of each GPU, for the next `Device`. cuBLAS keeps tens of megabytes for every stream that it has used,
so new streams would leak memory."""

_Launch = tuple[Callable[..., None], int, Any, Callable[[int], int], tuple[Any, ...]]
"""A compiled kernel: launch function, address, packed metadata, function for the current stream, and constants."""


class Device:
    """One GPU ("cuda", "cuda:1"), or the interpreter ("cpu")."""

    interpreter_memory = 1 << 30
    """Free GPU memory that the interpreter reports, in bytes."""
    gpu_id = ""
    """The GPU's UUID in nvidia-smi."""

    def __init__(self, name: str = "cuda") -> None:
        self.torch_device = torch.device(name)
        self.index = self.torch_device.index or 0
        self.is_gpu = self.torch_device.type == "cuda"
        self._capture_stream: torch.cuda.Stream | None = None
        self._streams: list[torch.cuda.Stream] = []
        self._launches: dict[Any, _Launch] = {}
        self.remembers_launches = self.is_gpu
        self.description = "Triton's interpreter"
        """The name of the device for messages."""
        self.processors = 4
        """The number of multiprocessors."""
        self.dependent_launches = False
        """True if a kernel may begin before the previous one has ended: see `wait_for_previous`."""
        if self.is_gpu:
            if not torch.cuda.is_available():
                raise WeftError(
                    f"the device is {name!r}, but torch {torch.__version__} finds no CUDA GPU here"
                )
            self.torch_device = torch.device("cuda", self.index)
            properties = torch.cuda.get_device_properties(self.torch_device)
            self.description = properties.name
            self.gpu_id = f"GPU-{properties.uuid}"
            self.processors = properties.multi_processor_count
            self.dependent_launches = properties.major >= 9
        elif not INTERPRETED.value:
            raise WeftError(f"the device is {name!r}: Triton computes there only with TRITON_INTERPRET=1")

    def __repr__(self) -> str:
        return f"Device({str(self.torch_device)!r})"

    # --- memory -------------------------------------------------------------------------------------------------

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.torch_device)

    def zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.torch_device)

    def pinned(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Zeros on the host, page-locked if there is a GPU: copies with `non_blocking=True` then run in parallel with
        other work."""
        return torch.zeros(shape, dtype=dtype, pin_memory=self.is_gpu)

    def free_memory(self) -> int:
        """Bytes of GPU memory that no process holds."""
        if not self.is_gpu:
            return self.interpreter_memory
        torch.cuda.empty_cache()  # memory that torch caches counts as free
        return torch.cuda.mem_get_info(self.torch_device)[0]

    def total_memory(self) -> int:
        if not self.is_gpu:
            return self.interpreter_memory
        return torch.cuda.get_device_properties(self.torch_device).total_memory

    def release(self) -> None:
        """Gives the memory of deleted tensors and graphs back to the system: GPU memory and page-locked host memory.
        Otherwise torch would keep it for its next allocations. The streams go to the next `Device`."""
        gc.collect()
        if self.is_gpu:
            _idle_streams[self.index] += reversed(self._streams)
            self._streams.clear()
            self._capture_stream = None
            torch.cuda.empty_cache()
            # Up to torch 2.11 the function has only a private name.
            (getattr(torch.accelerator, "empty_host_cache", None) or torch._C._host_emptyCache)()

    # --- order --------------------------------------------------------------------------------------------------

    def stream(self) -> Stream:
        return cast(Stream, self._gpu_stream()) if self.is_gpu else _InterpreterStream()

    def _gpu_stream(self) -> torch.cuda.Stream:
        idle = _idle_streams[self.index]
        self._streams.append(idle.pop() if idle else torch.cuda.Stream(self.torch_device))
        return self._streams[-1]

    def current_stream(self) -> Stream:
        return (
            cast(Stream, torch.cuda.current_stream(self.torch_device))
            if self.is_gpu
            else _InterpreterStream()
        )

    def using(self, stream: Stream) -> AbstractContextManager[Any]:
        """Launches inside go to this stream. The stream and the device are set for the calling thread only."""
        return torch.cuda.stream(cast(Any, stream)) if self.is_gpu else nullcontext()

    def event(self) -> Event:
        return cast(Event, torch.cuda.Event()) if self.is_gpu else _InterpreterEvent()

    def synchronize(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize(self.torch_device)

    def capture(self, work: Callable[[], object], pool: Any = None) -> Graph:
        """Captures the launches of `work` as a graph. `work` must have run before, so that its kernels are compiled.
        Graphs that never run at the same time may share a `pool` (from `graph_pool`) for their allocations."""
        if not self.is_gpu:
            return _InterpreterGraph(work)
        # `torch.cuda.graph` is not used: it waits for the GPU and empties torch's memory caches, which would delay a step.
        # With "thread_local", other threads may allocate and copy during the capture.
        graph = torch.cuda.CUDAGraph()
        stream = self._stream_for_captures()
        stream.wait_stream(torch.cuda.current_stream(self.torch_device))
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        return cast(Graph, graph)

    def _stream_for_captures(self) -> torch.cuda.Stream:
        """All captures use one stream: cuBLAS takes tens of megabytes for every stream, and cannot allocate them during
        a capture."""
        if self._capture_stream is None:
            self._capture_stream = self._gpu_stream()
            with torch.cuda.stream(self._capture_stream):
                torch.cuda.current_blas_handle()
        return self._capture_stream

    def graph_pool(self) -> Any:
        return torch.cuda.graph_pool_handle() if self.is_gpu else None

    # --- launches -----------------------------------------------------------------------------------------------

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        arguments: tuple[Any, ...],
        key: Hashable,
        constants: Callable[[], dict[str, Any]],
    ) -> None:
        """Runs `kernel[grid](*arguments, **constants())`, with `launch_options` if the kernel has a parameter
        DEPENDENT. From the second launch on, this method skips Triton's own lookup of the compiled kernel, which takes
        10 to 25 us: longer than many kernels run.

        `arguments` are the kernel's first parameters, `constants` all others (and `num_warps`). `key` contains
        everything that decides how the kernel is compiled: types, constants, and whether sizes and addresses are
        multiples of 16 (or sizes are 1), if that can differ between launches.
        """
        place = (id(kernel), key)
        if (known := self._launches.get(place)) is not None:
            run, function, metadata, current_stream, values = known
            x, y, z = grid
            # The same call as in Triton's launcher. The three None: no launch metadata, no enter hook, no exit hook.
            run(
                x, y, z, current_stream(self.index), function, metadata, None, None, None, *arguments, *values
            )
            return
        named = constants()
        if "DEPENDENT" in kernel.arg_names:
            named |= self.launch_options()
        compiled = kernel[grid](*arguments, **named)
        if self.remembers_launches:
            values = tuple(named[name] for name in kernel.arg_names[len(arguments) :])
            current_stream = triton.runtime.driver.active.get_current_stream
            self._launches[place] = (
                *(compiled.run, compiled.function, compiled.packed_metadata, current_stream, values),
            )

    def launch_options(self, dependent: bool = True) -> dict[str, Any]:
        """Launch options of a kernel with a parameter DEPENDENT: `kernel[grid](..., **device.launch_options())`.

        On a GPU that supports it, the kernel then begins while the previous kernel ends (programmatic dependent
        launch).
        """
        if dependent and self.dependent_launches:
            return {"DEPENDENT": True, "launch_pdl": True}
        return {"DEPENDENT": False}


@triton.jit
def wait_for_previous(DEPENDENT: tl.constexpr):
    """Waits until the previous kernel has ended. Every program of a dependent kernel calls this before it reads or
    writes memory that another kernel uses; weights may be read earlier. If kernel B of A, B, C omitted this call, C would wait
    only for B and could run before A has ended."""
    if DEPENDENT:
        gdc_wait()


@triton.jit
def let_next_begin(DEPENDENT: tl.constexpr):
    """Lets the next kernel start, once every program of this kernel has called it. The next kernel still calls
    `wait_for_previous` before it reads results of this one.

    A kernel calls this after its own `wait_for_previous`, so the kernel before it has ended by then. Of three kernels A,
    B, C in order, C therefore starts after the end of A, and may read results of A without waiting. Only a norm calls
    this before it waits: the kernel after a norm reads only weights before it waits.
    """
    if DEPENDENT:
        gdc_launch_dependents()


@triton.jit
def let_next_begin_if(now, DEPENDENT: tl.constexpr):
    """Calls `let_next_begin` once `now` is true. For pipelined loops: an `if` around the call would break the
    pipelining."""
    if DEPENDENT:
        tl.inline_asm_elementwise(
            """
            {
                .reg .pred now;
                setp.ne.u32 now, $1, 0;
                @now griddepcontrol.launch_dependents;
                mov.u32 $0, 0;
            }
            """,
            "=r,r",
            [now.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def prefetch_rows(first, stride, rows, COLUMNS: tl.constexpr):
    """Prefetches COLUMNS values of each of `rows` rows into the L2 cache, without waiting. At most one row per
    thread; rows begin at multiples of 16 bytes. GPU only: the interpreter does not support it."""
    row = tl.arange(0, num_threads())
    BYTES: tl.constexpr = COLUMNS * first.dtype.element_ty.primitive_bitwidth // 8
    tl.inline_asm_elementwise(
        """
        {
            .reg .pred wanted;
            setp.ne.u32 wanted, $2, 0;
            @wanted cp.async.bulk.prefetch.L2.global [$1], $2;
            mov.u32 $0, 0;
        }
        """,
        "=r,l,r",
        [first + row.to(tl.int64) * stride, tl.where(row < rows, BYTES, 0)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def dot(left, right, sums):
    """sums + left @ right, in float32. The interpreter gets float32, because it would misread bfloat16 bits as integers.
    On a GPU, float32 is not rounded to tf32."""
    if INTERPRETED:
        return tl.dot(left.to(tl.float32), right.to(tl.float32), sums)
    return tl.dot(left, right, sums, input_precision="ieee")


if INTERPRETED:
    from weft.ops.triton import interpreter

    interpreter.patch()
