"""Searches the vectors of one vector store: most of them through a graph (the base), the rest exactly (the delta)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.memory.index_file import add_vectors, graph_keys, new_graph

MAX_EXACT = 8192
"""Up to this many vectors, exact search is faster than a graph. A delta of this size is not merged, and fewer passages
that pass a filter are searched exactly."""
_DELTA_PART = 64
"""The delta is merged into the base when it has more than `MAX_EXACT` passages, and more than 1/64 as many as the base."""
_FACTOR = 4
"""If too few matches of the graph are allowed passages, the next search asks for this many times more matches."""
_PIECE = 8192
"""Vectors that are copied at a time from a base to a new one."""

Ids = NDArray[np.int64]
Vectors = NDArray[np.float32]


@dataclass(frozen=True)
class Base:
    """A graph for approximate search, which never changes. It may have vectors of passages that are no longer visible."""

    graph: Any
    ids: Ids
    """The passages in the graph, sorted."""


@dataclass(frozen=True)
class VectorIndex:
    """The visible passages of a store. A change makes a new index, so searches in other threads keep theirs."""

    dimensions: int
    ids: Ids
    """All visible passages, sorted."""
    files: Ids
    """files[i] is the file of the passage ids[i]."""
    delta_ids: Ids
    """Visible passages that are not in the base, sorted."""
    delta: Vectors
    base: Base | None = None

    @classmethod
    def empty(cls, dimensions: int) -> VectorIndex:
        none = np.zeros(0, np.int64)
        return cls(dimensions, none, none, none, np.zeros((0, dimensions), np.float32))

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that the index uses, without the mapped file of the base."""
        arrays = (self.ids, self.files, self.delta_ids, self.delta)
        return sum(one.nbytes for one in arrays) + (0 if self.base is None else self.base.ids.nbytes)

    @property
    def must_merge(self) -> bool:
        num_in_base = 0 if self.base is None else len(self.base.ids)
        return len(self.delta_ids) > max_delta(num_in_base) or self.is_mostly_removed

    @property
    def is_mostly_removed(self) -> bool:
        """Whether more than half of the passages of the base are no longer visible. Each search has to skip them."""
        num_visible = len(self.ids) - len(self.delta_ids)
        return self.base is not None and num_visible < len(self.base.ids) // 2

    def changed(
        self, removed_files: Iterable[int], ids: Ids, files: Ids, delta_ids: Ids, delta: Vectors
    ) -> VectorIndex:
        """An index without the passages of `removed_files`, and with the passages `ids` of `files`. `delta_ids` and `delta`
        have the passages of `ids` that are not in the base, and their vectors."""
        gone = np.fromiter(removed_files, np.int64)
        stays = ~np.isin(self.files, gone)
        kept_ids, kept_files = self.ids[stays], self.files[stays]
        in_delta = np.isin(self.delta_ids, kept_ids, assume_unique=True)
        all_ids, all_files = np.concatenate((kept_ids, ids)), np.concatenate((kept_files, files))
        order = np.argsort(all_ids, kind="stable")
        new_delta_ids = np.concatenate((self.delta_ids[in_delta], delta_ids))
        delta_order = np.argsort(new_delta_ids, kind="stable")
        new_delta = np.concatenate((self.delta[in_delta], delta))[delta_order]
        return replace(
            self,
            ids=all_ids[order],
            files=all_files[order],
            delta_ids=new_delta_ids[delta_order],
            delta=new_delta,
        )

    def with_base(self, base: Base | None) -> VectorIndex:
        """An index of the same passages with another base. Passages that are in `base` leave the delta."""
        if base is None:
            return replace(self, base=None)
        stays = ~np.isin(self.delta_ids, base.ids, assume_unique=True)
        return replace(self, base=base, delta_ids=self.delta_ids[stays], delta=self.delta[stays])

    def search(self, query: Vectors, count: int, files: Ids | None = None) -> list[tuple[int, float]]:
        """The `count` nearest passages and their similarity, best first. `files`: only passages of these files."""
        allowed = self.ids if files is None else self.ids[np.isin(self.files, files)]
        if files is None:
            found = [_exact(self.delta_ids, self.delta, query, count)]
        else:
            mask = np.isin(self.delta_ids, allowed, assume_unique=True)
            found = [_exact(self.delta_ids[mask], self.delta[mask], query, count)]
        if self.base is not None:
            found.append(self._in_base(self.base, query, count, allowed))
        ids, scores = (np.concatenate(parts) for parts in zip(*found, strict=True))
        order = np.lexsort((ids, -scores))[:count]
        return [(int(ids[one]), float(scores[one])) for one in order]

    def _in_base(self, base: Base, query: Vectors, count: int, allowed: Ids) -> tuple[Ids, Vectors]:
        """The nearest allowed passages of the base: few allowed ones are searched exactly, many through the graph."""
        inside = allowed[np.isin(allowed, base.ids, assume_unique=True)] if len(allowed) < MAX_EXACT else None
        if inside is not None:
            if not len(inside):
                return _exact(inside, np.zeros((0, self.dimensions), np.float32), query, count)
            return _exact(
                inside, np.stack(base.graph.get(inside.astype(np.uint64))).astype(np.float32), query, count
            )
        asked = count
        while True:
            matches = base.graph.search(query, min(asked, len(base.ids)), threads=1)
            ids = matches.keys.astype(np.int64)
            # The graph may also find passages that were removed, or that the filter leaves out: drop them.
            at = np.searchsorted(allowed, ids)
            passes = allowed[np.minimum(at, len(allowed) - 1)] == ids
            if passes.sum() >= count or asked >= len(base.ids):
                return ids[passes], 1 - matches.distances[passes].astype(np.float32)
            asked *= _FACTOR


def merged(index: VectorIndex, threads: int, editable: Any = None) -> Any:
    """A graph with all visible passages. It is `editable`, a copy of the graph of the base, with changes. None: a new
    graph is built."""
    graph = new_graph(index.dimensions) if editable is None else editable
    if index.base is not None:
        is_visible = np.isin(index.base.ids, index.ids, assume_unique=True)
        dead, kept = index.base.ids[~is_visible], index.base.ids[is_visible]
        if editable is None:
            for start in range(0, len(kept), _PIECE):
                keys = kept[start : start + _PIECE].astype(np.uint64)
                add_vectors(graph, keys, np.stack(index.base.graph.get(keys)).astype(np.float32), threads)
        elif len(dead):
            graph.remove(dead.astype(np.uint64))
    add_vectors(graph, index.delta_ids.astype(np.uint64), index.delta, threads)
    return graph


def max_delta(num_in_base: int) -> int:
    """Maximum passages of the delta beside a base of `num_in_base` passages. A larger delta is merged."""
    return max(MAX_EXACT, num_in_base // _DELTA_PART)


def base_of(graph: Any) -> Base:
    return Base(graph, graph_keys(graph))


def _exact(ids: Ids, vectors: Vectors, query: Vectors, count: int) -> tuple[Ids, Vectors]:
    # One product for each row. A matrix product would run on the threads of BLAS, which wait for each other and take the
    # cores of the engine.
    scores = np.vecdot(vectors, query)
    if count < len(ids):
        best = np.argpartition(-scores, count)[:count]
        return ids[best], scores[best]
    return ids, scores
