"""The card that kernels run on, or Triton's interpreter that stands in for it: memory, streams, events, graphs, launches.

With TRITON_INTERPRET=1 and the device "cpu" every kernel computes the same on tensors of the host, so that a machine
without a card tests all of it. There everything is done when a call returns: streams and events have nothing to order,
and a graph is the work itself, done again.
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
"""Whether kernels are interpreted in this process; for kernels too."""


def pieces(whole: int, piece: int) -> int:
    """How many pieces cover the whole. Triton's own functions for this take two microseconds a call."""
    return -(-whole // piece)


def power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


class Event(Protocol):
    """A place in the work of a stream."""

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None:
        """The stream's further work waits for the event; the caller does not."""

    def query(self) -> bool: ...

    def synchronize(self) -> None:
        """The caller waits."""


class Stream(Protocol):
    """Work in the order in which it was given."""

    def wait_event(self, event: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def record_event(self, event: Any = None) -> Event: ...

    def synchronize(self) -> None: ...


class Graph(Protocol):
    """Work that was captured once and is done again in one launch."""

    def replay(self) -> None: ...


class _DoneEvent:
    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class _InOrder:
    """The stream of the interpreter."""

    def wait_event(self, event: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Event:
        return _DoneEvent() if event is None else event

    def synchronize(self) -> None:
        pass


class _Repeated:
    """The graph of the interpreter."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work

    def replay(self) -> None:
        self._work()


_idle_streams: dict[int, list[torch.cuda.Stream]] = defaultdict(list)
"""By card. cuBLAS keeps tens of megabytes for every stream it was used on: the next device uses the same streams again."""

_Launch = tuple[Callable[..., None], int, Any, Callable[[int], int], tuple[Any, ...]]
"""Of a compiled kernel: what launches it, its address, how it is laid out, who knows the stream, and its constants."""


class Device:
    """One card ("cuda", "cuda:1"), or the interpreter ("cpu")."""

    stand_in_memory = 1 << 30
    """Free bytes of the interpreter's card."""
    card_id = ""
    """By which nvidia-smi knows the card."""

    def __init__(self, name: str = "cuda") -> None:
        self.torch_device = torch.device(name)
        self.index = self.torch_device.index or 0
        self.is_card = self.torch_device.type == "cuda"
        self._capture_stream: torch.cuda.Stream | None = None
        self._streams: list[torch.cuda.Stream] = []
        self._launches: dict[Any, _Launch] = {}
        self.remembers_launches = self.is_card
        self.description = "Triton's interpreter"
        """What a person knows it by."""
        self.processors = 4
        """How many multiprocessors there are."""
        self.dependent_launches = False
        """Whether a kernel may begin before the one in front of it has ended: see `wait_for_previous`."""
        if self.is_card:
            if not torch.cuda.is_available():
                raise WeftError(
                    f"the device is {name!r}, but torch {torch.__version__} finds no CUDA card here"
                )
            self.torch_device = torch.device("cuda", self.index)
            properties = torch.cuda.get_device_properties(self.torch_device)
            self.description = properties.name
            self.card_id = f"GPU-{properties.uuid}"
            self.processors = properties.multi_processor_count
            self.dependent_launches = properties.major >= 9
        elif not INTERPRETED.value:
            raise WeftError(f"the device is {name!r}: Triton computes there with TRITON_INTERPRET=1 only")

    def __repr__(self) -> str:
        return f"Device({str(self.torch_device)!r})"

    # --- memory -------------------------------------------------------------------------------------------------

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.torch_device)

    def zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.torch_device)

    def pinned(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Zeros on the host, page-locked for a card: copies from and to it run beside other work (`copy_` with
        `non_blocking=True`)."""
        return torch.zeros(shape, dtype=dtype, pin_memory=self.is_card)

    def free_memory(self) -> int:
        """Bytes of the card that no process holds."""
        if not self.is_card:
            return self.stand_in_memory
        torch.cuda.empty_cache()  # what torch keeps of memory that was given back counts as free
        return torch.cuda.mem_get_info(self.torch_device)[0]

    def total_memory(self) -> int:
        if not self.is_card:
            return self.stand_in_memory
        return torch.cuda.get_device_properties(self.torch_device).total_memory

    def release(self) -> None:
        """The end of all work here: other processes may have the memory of tensors and graphs that are gone, on the card
        and page-locked, which torch would keep for its next allocations."""
        gc.collect()
        if self.is_card:
            _idle_streams[self.index] += reversed(self._streams)
            self._streams.clear()
            self._capture_stream = None
            torch.cuda.empty_cache()
            # Up to torch 2.11 it has a private name only.
            (getattr(torch.accelerator, "empty_host_cache", None) or torch._C._host_emptyCache)()

    # --- order --------------------------------------------------------------------------------------------------

    def stream(self) -> Stream:
        return cast(Stream, self._card_stream()) if self.is_card else _InOrder()

    def _card_stream(self) -> torch.cuda.Stream:
        idle = _idle_streams[self.index]
        self._streams.append(idle.pop() if idle else torch.cuda.Stream(self.torch_device))
        return self._streams[-1]

    def current_stream(self) -> Stream:
        return cast(Stream, torch.cuda.current_stream(self.torch_device)) if self.is_card else _InOrder()

    def using(self, stream: Stream) -> AbstractContextManager[Any]:
        """What is launched inside goes to this stream. It is the calling thread's, and so is the device."""
        return torch.cuda.stream(cast(Any, stream)) if self.is_card else nullcontext()

    def event(self) -> Event:
        return cast(Event, torch.cuda.Event()) if self.is_card else _DoneEvent()

    def synchronize(self) -> None:
        if self.is_card:
            torch.cuda.synchronize(self.torch_device)

    def capture(self, work: Callable[[], object], pool: Any = None) -> Graph:
        """The launches of `work` as a graph; it has run before, so that its kernels are compiled. Graphs that never
        run at the same time may share a `pool` (of `graph_pool`) for what they allocate."""
        if not self.is_card:
            return _Repeated(work)
        # Not `torch.cuda.graph`, which waits for the card and empties the caches: this happens between two steps. Other
        # threads may allocate and copy meanwhile.
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
        """One for all: cuBLAS takes tens of megabytes for every stream it is used on, and not during a capture."""
        if self._capture_stream is None:
            self._capture_stream = self._card_stream()
            with torch.cuda.stream(self._capture_stream):
                torch.cuda.current_blas_handle()
        return self._capture_stream

    def graph_pool(self) -> Any:
        return torch.cuda.graph_pool_handle() if self.is_card else None

    # --- launches -----------------------------------------------------------------------------------------------

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        arguments: tuple[Any, ...],
        key: Hashable,
        constants: Callable[[], dict[str, Any]],
    ) -> None:
        """`kernel[grid](*arguments, **constants())`, with `launch_options` where the kernel has a parameter DEPENDENT; but
        from the second time on without Triton's own search for what it compiled, which takes 10 to 25 us: longer than
        many a kernel runs.

        `arguments` are the kernel's first parameters, `constants` all the others (and `num_warps`). The key is whatever
        decides how the kernel is compiled: types, constants, and of sizes and addresses whether they are multiples of
        16 (or sizes are 1), where these can differ between launches.
        """
        place = (id(kernel), key)
        if (known := self._launches.get(place)) is not None:
            run, function, how, current_stream, values = known
            x, y, z = grid
            # As Triton calls it, without hooks.
            run(x, y, z, current_stream(self.index), function, how, None, None, None, *arguments, *values)
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
        """What a kernel that has a parameter DEPENDENT is launched with: `kernel[grid](..., **device.launch_options())`.

        On a card that can, it then begins while the kernel in front of it ends.
        """
        if dependent and self.dependent_launches:
            return {"DEPENDENT": True, "launch_pdl": True}
        return {"DEPENDENT": False}


@triton.jit
def wait_for_previous(DEPENDENT: tl.constexpr):
    """Stands in every program of a dependent kernel, in front of the first read or write of anything that another
    kernel touches; weights may be read before. Where a kernel leaves it out, the ones behind it could overtake the
    one in front."""
    if DEPENDENT:
        gdc_wait()


@triton.jit
def let_next_begin(DEPENDENT: tl.constexpr):
    """The kernel behind this one may be loaded when every program has come here; what it reads of this one it still
    waits for. After `wait_for_previous`: so a kernel that has begun knows that the one before the last is done, and may
    read what that one wrote before it waits itself. Only a norm does it before, since what stands behind a norm reads
    nothing but weights before it waits."""
    if DEPENDENT:
        gdc_launch_dependents()


@triton.jit
def let_next_begin_if(now, DEPENDENT: tl.constexpr):
    """`let_next_begin` once `now` is true, in a loop that is pipelined: a branch would break that."""
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
def fetch_rows(first, stride, rows, COLUMNS: tl.constexpr):
    """COLUMNS values of each of so many rows, at most one for every thread, are fetched into the card's cache; nobody waits
    for them. Rows begin at multiples of 16 bytes. On a card only: the interpreter knows nothing of it."""
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
    """sums + left @ right, in float32. The interpreter takes the bits of bfloat16 for whole numbers there, so it gets
    float32; and what is float32 is not rounded to tf32."""
    if INTERPRETED:
        return tl.dot(left.to(tl.float32), right.to(tl.float32), sums)
    return tl.dot(left, right, sums, input_precision="ieee")


if INTERPRETED:
    from weft.ops.triton import interpreter

    interpreter.mend()
