"""Decode steps as graphs: which size a step is padded to, which graphs there are, and when one is captured.

Nothing is captured before it is needed, so a start waits for none. A step of a new kind is launched kernel by kernel,
which compiles them and lets cuBLAS find its own; the second of its kind is captured. A size that has no graph yet uses a
larger one that has, for a few steps: a batch that drains passes through many sizes, and one that it leaves at once is not
worth a capture. But padding is not free: from a hundred rows on the products of a large model take longer with every row. To
capture takes little more of the host than to launch, so a batch that grows is not held up by it. Where a capture fails,
steps of its kind use a larger graph, or are launched.
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
_BORROWED = 2
"""So many steps of one kind use another's graph; then it gets its own. That costs some milliseconds once; padding costs up
to two in every step (8 billion weights, 128 rows in a graph of 256)."""


@dataclass(frozen=True)
class Kind:
    """What decode steps have in common that run from one graph."""

    size: int
    """Entries, padding included."""
    longest_context: int
    """No context in it is longer."""
    sampling: SamplingPath | None
    """The sampler's path where sampling is part of the graph; None: the graph ends with the logits."""


class _Captured:
    """A graph, and where it leaves its logits."""

    def __init__(self, device: Device, work: Callable[[Kind], Tensor], kind: Kind, pool: object) -> None:
        kept: list[Tensor] = []

        def note() -> None:
            kept[:] = [work(kind)]

        self._kept = kept  # `note` must not refer to `self`: the interpreter's graph keeps that function
        self.graph = device.capture(note, pool)

    @property
    def logits(self) -> Tensor:
        return self._kept[0]


@dataclass
class DecodeGraphs:
    """Runs decode steps, from a graph where there is one.

    `work` launches everything of a kind and returns its logits, which stand in the same memory every time.
    """

    device: Device
    work: Callable[[Kind], Tensor]
    max_size: int
    max_context: int
    by_context: bool
    """Whether the launches of a step depend on its longest context."""
    _graphs: dict[Kind, _Captured] = field(default_factory=dict)
    _borrowed: dict[Kind, int] = field(default_factory=dict)
    """How many steps of a kind have used another's graph."""
    _launched: set[Kind] = field(default_factory=set)
    _refused: set[Kind] = field(default_factory=set)
    """Kinds whose capture failed: no memory is left for a graph, most likely."""
    _pool: object = None

    def run(self, entries: int, longest_context: int, sampling: SamplingPath | None) -> Tensor:
        """Launches a step; its logits, those of padding behind the others."""
        kind = Kind(self._size(entries), self._context(longest_context), sampling)
        captured = self._graphs.get(kind) or self._lent(kind)
        if captured is None and kind in self._launched and kind not in self._refused:
            captured = self._capture(kind)
        if captured is None:
            self._launched.add(kind)
            return self.work(kind)
        captured.graph.replay()
        return captured.logits

    @property
    def num_captured(self) -> int:
        return len(self._graphs)

    def _capture(self, kind: Kind) -> _Captured | None:
        if self._pool is None:
            self._pool = self.device.graph_pool()
        try:
            captured = _Captured(self.device, self.work, kind, self._pool)
        except Exception as error:
            # Nothing of it has run. Where the card itself has failed, the launch that follows says so.
            self._refused.add(kind)
            _log.warning("a decode step of %d entries could not be captured (%s)", kind.size, error)
            return None
        self._graphs[kind] = captured
        return captured

    def _lent(self, kind: Kind) -> _Captured | None:
        """The smallest graph that this kind of step fits into without much waste, where it is to have none of its own yet."""
        borrowed = self._borrowed.get(kind, 0)
        if borrowed >= _BORROWED and kind not in self._refused:
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
        self._borrowed[kind] = borrowed + 1
        return self._graphs[min(fitting, key=lambda found: found[:2])[2]]

    def _size(self, entries: int) -> int:
        for size in _SMALL_SIZES:
            if entries <= size:
                return min(size, self.max_size)
        return min(-(-entries // _STEP) * _STEP, self.max_size)

    def _context(self, longest: int) -> int:
        if not self.by_context:
            return self.max_context
        bucket = _SMALLEST_CONTEXT
        while bucket < longest:
            bucket *= 2
        return min(bucket, self.max_context)
