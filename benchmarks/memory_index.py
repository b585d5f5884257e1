"""`python -m benchmarks memory-index`: recall, latency, build rate and memory of the index of vector stores.

The vectors come from real passages (`--passages`, a file that `python -m benchmarks passages` writes), or from a
generator: clusters with the spectrum of the real vectors. Searches go through `VectorIndex`, as in the server. They are
compared with an exact search of the same f16 vectors.
"""

from __future__ import annotations

import json
import resource
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers_environment import draw_chart
from weft.bench.report import machine, print_json, print_line, print_table, quantile
from weft.errors import InvalidRequestError
from weft.memory.index_file import open_graph, write_graph
from weft.memory.vector_index import VectorIndex, base_of, max_delta, merged

Vectors = NDArray[np.float32]

RECALL_AT = 10
ASKED = 50
"""The server asks the index for this many passages, to merge them with those that a search by words finds."""
_CLUSTERS = 1000
_SPREAD = 0.8
"""The median distance of a vector from its centre, where 1 is the length of the centre."""
_SPREAD_SIGMA = 0.5
"""The standard deviation of the logarithm of that distance: some vectors have very near neighbours, others none."""
_DECAY = 0.75
"""Direction k has the variance k ** -_DECAY. So the ten largest directions have a quarter of the variance, as with the
vectors of 50,000 real passages (docs/lab/2026-11-19-memory.md)."""
_MEAN = 0.326
"""Length of the mean of all vectors, as measured with real ones."""
_PIECE = 20_000


@dataclass(frozen=True)
class Measured:
    """The figures for an index of one size."""

    source: str
    vectors: int
    dimensions: int
    recall: float
    p50_ms: float
    p99_ms: float
    cpu_p99_ms: float
    """Processor time of a search, which other load on the machine hardly changes."""
    exact_p50_ms: float
    build_seconds: float
    build_per_second: float
    file_mb: float
    memory_mb: float
    """Largest resident memory of the process while it built the index."""
    search_ms: list[float]
    """The time of every search, sorted."""


def main(
    *,
    size: int,
    dimensions: int,
    queries: int,
    passages: Path | None,
    threads: int,
    as_json: bool,
    keep: Path | None,
    plot: Path | None,
) -> None:
    vectors = generated(size + queries, dimensions) if passages is None else stored(passages, size + queries)
    source = "generated" if passages is None else passages.stem
    measured = measure(source, vectors[:-queries], vectors[-queries:], threads)
    result = {"machine": machine(), **asdict(measured)}
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        (keep / f"{source}-{size}.json").write_text(json.dumps(result))
    if as_json:
        print_json(result)
    else:
        _print(measured, queries)
    if plot is not None:
        kept = [json.loads(path.read_text()) for path in sorted(keep.glob("*.json"))] if keep else [result]
        draw_chart("plot_memory_index", kept, plot)


def _print(measured: Measured, queries: int) -> None:
    print_line(machine())
    print_table(
        f"{measured.dimensions} numbers a vector ({measured.source}), {queries} searches, k={RECALL_AT}",
        (
            "vectors",
            "recall",
            "p50 ms",
            "p99 ms",
            "p99 CPU ms",
            "exact p50 ms",
            "build s",
            "vectors/s",
            "file MB",
            "memory MB",
        ),
        [
            (
                f"{measured.vectors:,}",
                f"{measured.recall:.4f}",
                f"{measured.p50_ms:.2f}",
                f"{measured.p99_ms:.2f}",
                f"{measured.cpu_p99_ms:.2f}",
                f"{measured.exact_p50_ms:.1f}",
                f"{measured.build_seconds:.0f}",
                f"{measured.build_per_second:,.0f}",
                f"{measured.file_mb:,.0f}",
                f"{measured.memory_mb:,.0f}",
            )
        ],
    )


def generated(count: int, dimensions: int, seed: int = 26) -> Vectors:
    """Unit vectors in clusters, with a decaying spectrum, rounded to f16 as in the store."""
    numbers = np.random.default_rng(seed)
    scale = np.arange(1, dimensions + 1) ** (-_DECAY / 2)
    rotation, _ = np.linalg.qr(numbers.standard_normal((dimensions, dimensions)))
    centres = numbers.standard_normal((_CLUSTERS, dimensions)) * scale
    found = np.empty((count, dimensions), np.float32)
    for start in range(0, count, _PIECE):
        size = min(_PIECE, count - start)
        around = numbers.standard_normal((size, dimensions)) * scale
        spread = _SPREAD * np.exp(_SPREAD_SIGMA * numbers.standard_normal((size, 1)))
        piece = (centres[numbers.integers(0, _CLUSTERS, size)] + spread * around) @ rotation
        piece /= np.linalg.norm(piece, axis=1, keepdims=True)
        piece = (1 - _MEAN**2) ** 0.5 * piece + _MEAN * rotation[-1]
        piece /= np.linalg.norm(piece, axis=1, keepdims=True)
        found[start : start + size] = piece.astype(np.float16)
    return found


def stored(path: Path, count: int) -> Vectors:
    """The first vectors of a `.npy` file."""
    vectors = np.load(path, mmap_mode="r")
    if len(vectors) < count:
        raise InvalidRequestError(f"{path} has {len(vectors)} vectors; asked for: {count}", field="size")
    return np.asarray(vectors[:count], np.float32)


def num_in_base(count: int) -> int:
    """How many of `count` passages are in the base, if the delta (the newer ones) is as large as the server allows."""
    return next(one for one in range(count) if count - one <= max_delta(one))


def measure(source: str, vectors: Vectors, queries: Vectors, threads: int) -> Measured:
    """Builds the base, maps it from its file, adds a delta, and searches."""
    count, dimensions = vectors.shape
    in_base = num_in_base(count)
    ids = np.arange(1, count + 1)
    files = ids // 64
    began = time.perf_counter()
    index = VectorIndex.empty(dimensions)
    index = index.changed([], ids[:in_base], files[:in_base], ids[:in_base], vectors[:in_base])
    graph = merged(index, threads)
    build_seconds = time.perf_counter() - began
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    with tempfile.TemporaryDirectory(prefix="weft-index-") as folder:
        name = write_graph(graph, Path(folder), "vs_bench")
        del graph
        file_mb = (Path(folder) / name).stat().st_size / 1e6
        index = index.with_base(base_of(open_graph(Path(folder), name)))
        index = index.changed([], ids[in_base:], files[in_base:], ids[in_base:], vectors[in_base:])
        # Warm-up: maps the pages that all searches need.
        for query in queries[:20]:
            index.search(query, ASKED)
        times, cpu_times, found = [], [], []
        for query in queries:
            began, cpu_began = time.perf_counter(), time.thread_time()
            hits = index.search(query, ASKED)
            cpu_times.append(1e3 * (time.thread_time() - cpu_began))
            times.append(1e3 * (time.perf_counter() - began))
            found.append({one for one, _ in hits[:RECALL_AT]})
    exact_times = []
    num_right = 0
    for query, hits_of_query in zip(queries, found, strict=True):
        began = time.perf_counter()
        right = _exact(vectors, query)
        exact_times.append(1e3 * (time.perf_counter() - began))
        num_right += len(hits_of_query & {int(ids[one]) for one in right})
    return Measured(
        source,
        count,
        dimensions,
        num_right / (RECALL_AT * len(queries)),
        quantile(times, 0.5),
        quantile(times, 0.99),
        quantile(cpu_times, 0.99),
        quantile(exact_times, 0.5),
        build_seconds,
        in_base / build_seconds,
        file_mb,
        memory,
        sorted(times),
    )


def _exact(vectors: Vectors, query: Vectors) -> NDArray[np.int64]:
    """The indices of the `RECALL_AT` best vectors, found by comparing all of them."""
    scores = vectors @ query
    return np.argpartition(-scores, RECALL_AT)[:RECALL_AT]
