"""`python -m benchmarks passages`: real passages and their vectors, for `memory-index --passages`.

Reads the documents below some folders, splits them as the server does, and embeds a random part of the passages with the
default embedder. After an interruption it continues with the passages that have no vector yet.
"""

from __future__ import annotations

import gzip
import json
import random
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from weft.bench.report import print_line
from weft.errors import InvalidRequestError
from weft.llm import LLM
from weft.memory.documents import ChunkSize, DocumentError
from weft.memory.reading import read_document
from weft.memory.splitting import split, words_of

_NAMES = (".html", ".md", ".rst", ".txt")
_MIN_WORDS = 8
"""Shorter passages are mostly the links of a page."""
_AT_ONCE = 512
_REPORTED_SECONDS = 10.0


def main(folders: list[Path], *, out: Path, count: int, tokens: int, quantize: str | None) -> None:
    """Writes `out` (f16 vectors) and the texts beside it, as JSON lines."""
    lines = out.with_suffix(".jsonl")
    with LLM("all-MiniLM-L6-v2", quantize=quantize) as llm:
        if not lines.exists():
            texts = sorted(set(passages(llm, folders, ChunkSize(tokens, 0))))
            print_line(f"{len(texts):,} different passages")
            if len(texts) < count:
                raise InvalidRequestError(f"{len(texts)} passages; asked for: {count}", field="count")
            chosen = random.Random(26).sample(texts, count)
            lines.write_text("".join(json.dumps(text) + "\n" for text in chosen))
        _embed(llm, [json.loads(line) for line in lines.open()], out)


def passages(llm: LLM, folders: Iterable[Path], size: ChunkSize) -> Iterator[str]:
    """The text of each passage as it is embedded, with its heading."""
    tokens: dict[str, int] = {}
    around = len(llm.tokenizer.encode(""))  # special tokens around every text
    for path in _documents(folders):
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        try:
            document = read_document(content, path.name.removesuffix(".gz"))
        except DocumentError as error:
            print_line(f"{path.name}: {error}")
            continue
        for word in words_of(document) - tokens.keys():
            tokens[word] = len(llm.tokenizer.encode(word)) - around
        for passage in split(document, size, tokens):
            if len(passage.text.split()) >= _MIN_WORDS:
                yield passage.searched_text


def _documents(folders: Iterable[Path]) -> Iterator[Path]:
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.name.removesuffix(".gz").endswith(_NAMES) and path.is_file():
                yield path


def _embed(llm: LLM, texts: list[str], out: Path) -> None:
    """Fills the rows of `out` that are still zero."""
    shape = (len(texts), llm.vectors.spec.dimensions)
    if out.exists():
        vectors = np.lib.format.open_memmap(out, mode="r+")
    else:
        vectors = np.lib.format.open_memmap(out, mode="w+", dtype=np.float16, shape=shape)
    first = int(np.count_nonzero(vectors.any(axis=1))) // _AT_ONCE * _AT_ONCE
    began = reported = time.monotonic()
    for start in range(first, len(texts), _AT_ONCE):
        part = texts[start : start + _AT_ONCE]
        vectors[start : start + len(part)] = llm.embed(part, truncate=True)
        now = time.monotonic()
        if now - reported > _REPORTED_SECONDS or start + _AT_ONCE >= len(texts):
            done = start + len(part)
            print_line(
                f"{done:,} of {len(texts):,} passages, {(done - first) / (now - began):,.0f} per second"
            )
            reported = now
