"""`python -m benchmarks embeddings`: vectors of all-MiniLM-L6-v2, from weft and from other engines in one run.

The engines take turns in every round, in an order that alternates, with the same texts: one batch of 256 passages, and
single queries. All engines get strings and normalise their vectors. Every round gives one ratio of weft to each peer of
the same precision; the checks use the worse end of its 95% interval. The table shows the lowest cosine of each engine's
vectors with those of sentence-transformers.
"""

from __future__ import annotations

import base64
import json
import re
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import numpy as np

from benchmarks.peers_environment import (
    Environment,
    PeerError,
    clean_environment,
    last_error,
    peers_directory,
    python_of,
    script,
)
from weft.backends.cpu.embedder import open_embedder
from weft.backends.cpu.threads import thread_count
from weft.bench.ratios import Ratios
from weft.bench.report import Check, machine, print_checks, print_line, print_table
from weft.engine.serving import ServingEngine
from weft.loading.checkpoint import open_checkpoint
from weft.loading.embedding_files import embedding_spec
from weft.loading.pull import pull
from weft.request import InferenceRequest, SamplingParams
from weft.text.embedding_text import EmbeddingText

ENVIRONMENT = Environment(
    "embeddings",
    "sentence-transformers 6.2, onnxruntime 1.31, llama.cpp (xllamacpp 2026.10)",
    (
        "sentence-transformers==6.2.0",
        "torch==2.13.0",
        "transformers==5.22.2",
        "onnxruntime==1.31.1",
        "onnx==1.23.2",
        "onnxscript==0.7.2",
        "gguf==0.19.0",
        "xllamacpp==2026.10.11549",
    ),
    1500,
)
REFERENCE = "sentence-transformers f32"
PEERS = {
    REFERENCE: "sentence-transformers",
    "onnxruntime int8": "onnxruntime",
    "llama.cpp Q8_0": "llama.cpp",
}
WEFT: dict[str, Any] = {"weft f32": None, "weft int8": "int8"}
BARS = (
    ("weft f32", REFERENCE, 2.0),
    ("weft int8", "onnxruntime int8", 1.3),
    ("weft int8", "llama.cpp Q8_0", 1.3),
)
"""(engine of weft, peer of the same precision, required speed of weft relative to the peer)"""
_PASSAGES, _QUERIES = 256, 64
_PAUSE_SECONDS = 0.2
"""Pause before an engine is measured: threads of the previous engine may still spin."""
_DOCUMENTS = Path(__file__).parents[1] / "docs"

Embed = Callable[[Sequence[str], bool], tuple[list[float], np.ndarray]]
"""Takes texts, and whether to send them one by one. Returns the seconds of each call, and the vectors."""


@dataclass
class Times:
    """The times of one engine."""

    batch: list[float] = field(default_factory=list)
    """For each round: the seconds of one call with all passages."""
    query: list[float] = field(default_factory=list)
    """For each round: the median seconds of a call with one query."""
    least_cosine: float = 0.0


def main(*, rounds: int, home: Path | None, threads: int | None, json_path: Path | None) -> bool:
    """Measures and prints. Returns False if a peer could not be measured, or a bar of `BARS` was missed."""
    count, folder = thread_count(threads), pull("all-MiniLM-L6-v2")
    directory = home or peers_directory()
    passages, queries = _texts()
    before = machine()
    engines: dict[str, Embed] = {name: _weft(folder, count, quantize) for name, quantize in WEFT.items()}
    drivers = []
    for name, kind in PEERS.items():
        try:
            driver = _Driver(kind, folder, count, directory)
            drivers.append(driver)
            driver(queries[:2], True)  # not measured: some engines compile at their first call
            engines[name] = driver
        except (PeerError, OSError, ValueError) as error:
            print_line(f"{name}: {error}")
    try:
        times = _measure(engines, passages, queries, rounds)
    finally:
        for driver in drivers:
            driver.close()
    checks = _checks(times)
    if json_path is not None:
        document = {"machine": before, "threads": count, "times": times, "checks": checks}
        json_path.write_text(json.dumps(document, default=asdict, indent=1))
    _print(times, checks, f"{before}; {count} threads, {rounds} rounds")
    return len(engines) == len(PEERS) + len(WEFT) and all(check.is_met for check in checks)


def _texts() -> tuple[list[str], list[str]]:
    """Passages of the documentation with 4 to 120 words, and queries of 3 to 12 words."""
    words = re.findall(
        r"[A-Za-z][\w'-]*", " ".join(path.read_text() for path in sorted(_DOCUMENTS.rglob("*.md")))
    )
    numbers = np.random.default_rng(6)

    def piece(count: int) -> str:
        start = int(numbers.integers(0, len(words) - count))
        return " ".join(words[start : start + count])

    passages = [piece(int(np.clip(numbers.lognormal(3.6, 0.9), 4, 120))) for _ in range(_PASSAGES)]
    return passages, [piece(int(numbers.integers(3, 13))) for _ in range(_QUERIES)]


def _weft(folder: Path, threads: int, quantize: Any) -> Embed:
    checkpoint = open_checkpoint(folder)
    spec = embedding_spec(checkpoint)
    assert spec is not None
    text = EmbeddingText(checkpoint, spec)
    engine = ServingEngine(open_embedder(checkpoint, threads, quantize), spec.engine_config())
    one = SamplingParams(max_tokens=1)

    def embed(texts: Sequence[str], one_by_one: bool) -> tuple[list[float], np.ndarray]:
        seconds, vectors = [], []
        for call in [[text] for text in texts] if one_by_one else [texts]:
            began = perf_counter()
            ids = [
                engine.submit(InferenceRequest(tuple(tokens), one))
                for tokens in text.tokens_of(call, truncate=True)
            ]
            engine.run_until_idle()
            results = [engine.get_result(request_id) for request_id in ids]
            vectors += [np.frombuffer(result.vector, "<f4") for result in results if result and result.vector]
            seconds.append(perf_counter() - began)
        return seconds, np.array(vectors)

    return embed


class _Driver:
    """Another engine in its own process."""

    def __init__(self, kind: str, folder: Path, threads: int, home: Path) -> None:
        home.mkdir(parents=True, exist_ok=True)
        python = python_of(ENVIRONMENT, home, print_line)
        work = home / "embeddings-models"
        work.mkdir(exist_ok=True)
        self._log = work / f"{kind}.log"
        model = folder
        if kind == "llama.cpp":
            model = work / "all-MiniLM-L6-v2-Q8_0.gguf"
            convert = (str(python), str(script("convert_bert")), str(folder), str(model))
            if not model.exists() and subprocess.run(convert, capture_output=True).returncode:
                raise PeerError("the model cannot be converted to GGUF")
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                (str(python), str(script("drive_embeddings")), kind, str(model), str(threads), str(work)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=clean_environment({"OMP_NUM_THREADS": str(threads)}),
                text=True,
            )

    def __call__(self, texts: Sequence[str], one_by_one: bool) -> tuple[list[float], np.ndarray]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"texts": list(texts), "one_by_one": one_by_one}) + "\n")
            self._process.stdin.flush()
            answer = json.loads(self._process.stdout.readline() or "null")
        except BrokenPipeError:
            answer = None
        if answer is None:
            raise PeerError(f"the engine ended: {last_error(self._log)}")
        vectors = np.frombuffer(base64.b64decode(answer["vectors"]), "<f4").reshape(len(texts), -1)
        return answer["seconds"], vectors

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _measure(
    engines: dict[str, Embed], passages: list[str], queries: list[str], rounds: int
) -> dict[str, Times]:
    times = {name: Times() for name in engines}
    vectors: dict[str, np.ndarray] = {}
    for embed in engines.values():
        embed(passages, False)
    for number in range(rounds):
        for name in list(engines) if number % 2 == 0 else list(engines)[::-1]:
            sleep(_PAUSE_SECONDS)
            seconds, vectors[name] = engines[name](passages, False)
            times[name].batch += seconds
            times[name].query.append(statistics.median(engines[name](queries, True)[0]))
    reference = vectors.get(REFERENCE, vectors["weft f32"])
    for name, found in vectors.items():
        times[name].least_cosine = float((found * reference).sum(axis=1).min())
    return times


def _checks(times: Mapping[str, Times]) -> list[Check]:
    checks = []
    for ours, peer, bar in BARS:
        for what in ("batch", "query"):
            if peer not in times:
                continue
            change = Ratios(getattr(times[ours], what), getattr(times[peer], what)).change()
            ratio, low, high = (1 + value for value in change)
            measured = f"{ratio:.2f} times [{low:.2f}, {high:.2f}]"
            checks.append(Check(f"{ours} over {peer}, {what}", measured, f"{bar:g} times", low >= bar))
    return checks


def _print(times: Mapping[str, Times], checks: Sequence[Check], where: str) -> None:
    print_line(where)
    print_table(
        f"all-MiniLM-L6-v2, medians of the rounds, {_PASSAGES} passages and {_QUERIES} queries",
        ("engine", "passages/s, all at once", "ms, one query", "lowest cosine"),
        [
            (
                name,
                f"{_PASSAGES / statistics.median(one.batch):,.0f}",
                f"{1e3 * statistics.median(one.query):.2f}",
                f"{one.least_cosine:.5f}",
            )
            for name, one in times.items()
        ],
    )
    print_checks(checks)
