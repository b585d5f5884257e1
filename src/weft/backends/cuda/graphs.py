"""CUDA graphs of decode steps: the size to which a step is padded, the graphs captured so far, and when to capture one.

Graphs are captured on demand, so the start does not wait for them. Each graph is for one kind of step (`Kind`): a
padded batch size, a limit of the context and a sampling path. The first step of a kind is launched kernel by kernel:
this compiles Triton kernels and lets cuBLAS choose its kernels. The second step of the kind is captured. Capturing
costs the host little more than launching.

A kind without a graph first uses a larger graph for a few steps. When requests end and the batch shrinks, it passes
through many sizes, and most are not worth a capture. But padding is not free: from about 100 rows on, the matrix
products of a large model take longer with every row. If a capture fails, steps of the kind use a larger graph or are
launched.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from weft.backends.cuda.sampler import SamplingPath
from weft.ops.triton.device import Device

_log = logging.getLogger(__name__)

_STEP = 32
_SMALL_SIZES = (1, 2, 4, 8, 16)
_SMALLEST_CONTEXT = 512
_MOST_PADDING = 2
_STEPS_IN_LARGER_GRAPH = 2
"""After this many steps in a larger graph, a kind gets its own graph. A capture costs a few milliseconds once. Padding
costs up to 2 ms in every step (8 billion weights, 128 rows in a graph of 256)."""


@dataclass(frozen=True)
class Kind:
    """The properties that decode steps must share to run from the same graph."""

    size: int
    """Entries of the step, including padding."""
    longest_context: int
    """The upper limit of the context lengths."""
    sampling: SamplingPath | None
    """The sampling path, if sampling is part of the graph. None: the graph ends with the logits."""


class _CapturedGraph:
    """A graph, and the tensor that it writes its logits to."""

    def __init__(self, device: Device, work: Callable[[Kind], Tensor], kind: Kind, pool: object) -> None:
        logits: list[Tensor] = []

        def launch() -> None:
            logits[:] = [work(kind)]

        # `launch` must not refer to `self`: the graph of the interpreter keeps the function, which would make a
        # reference cycle.
        self._logits = logits
        self.graph = device.capture(launch, pool)

    @property
    def logits(self) -> Tensor:
        return self._logits[0]


@dataclass
class DecodeGraphs:
    """Runs decode steps, from a graph if there is one.

    `work` launches all kernels of a step of the given `Kind`. It returns the logits, always in the same memory.
    """

    device: Device
    work: Callable[[Kind], Tensor]
    max_size: int
    max_context: int
    by_context: bool
    """Whether the launches of a step depend on its longest context."""
    _graphs: dict[Kind, _CapturedGraph] = field(default_factory=dict)
    _steps_in_larger: dict[Kind, int] = field(default_factory=dict)
    """How many steps of a kind have used a larger graph."""
    _launched: set[Kind] = field(default_factory=set)
    _failed: set[Kind] = field(default_factory=set)
    """Kinds whose capture failed, probably because no memory was left for a graph."""
    _pool: object = None

    def run(self, entries: int, longest_context: int, sampling: SamplingPath | None) -> Tensor:
        """Launches a step and returns its logits. The logits of padding come last."""
        kind = Kind(self._size(entries), self._context(longest_context), sampling)
        captured = self._graphs.get(kind) or self._larger_graph(kind)
        if captured is None and kind in self._launched and kind not in self._failed:
            captured = self._capture(kind)
        if captured is None:
            self._launched.add(kind)
            return self.work(kind)
        captured.graph.replay()
        return captured.logits

    def _capture(self, kind: Kind) -> _CapturedGraph | None:
        if self._pool is None:
            self._pool = self.device.graph_pool()
        try:
            captured = _CapturedGraph(self.device, self.work, kind, self._pool)
        except Exception as error:
            # The capture failed, so no kernel has run. If the GPU itself has failed, the following launch raises the
            # error.
            self._failed.add(kind)
            _log.warning("a decode step of %d entries could not be captured (%s)", kind.size, error)
            return None
        self._graphs[kind] = captured
        return captured

    def _larger_graph(self, kind: Kind) -> _CapturedGraph | None:
        """The smallest graph that can run this kind, at most `_MOST_PADDING` times its size. None: `run` captures a
        graph or launches the kernels."""
        steps = self._steps_in_larger.get(kind, 0)
        if steps >= _STEPS_IN_LARGER_GRAPH and kind not in self._failed:
            return None
        fitting = [
            (other.size, other.longest_context, other)
            for other in self._graphs
            if other.sampling == kind.sampling
            and kind.size <= other.size <= kind.size * _MOST_PADDING
            and other.longest_context in (kind.longest_context, self._context(2 * kind.longest_context))
        ]
        if not fitting:
            return None
        self._steps_in_larger[kind] = steps + 1
        return self._graphs[min(fitting, key=lambda found: found[:2])[2]]

    def _size(self, entries: int) -> int:
        """The size to which a step is padded."""
        for size in _SMALL_SIZES:
            if entries <= size:
                return min(size, self.max_size)
        return min(-(-entries // _STEP) * _STEP, self.max_size)

    def _context(self, longest: int) -> int:
        """The limit of the context of the graph for a step with this longest context."""
        if not self.by_context:
            return self.max_context
        bucket = _SMALLEST_CONTEXT
        while bucket < longest:
            bucket *= 2
        return min(bucket, self.max_context)
