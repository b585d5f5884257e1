"""Files become passages that fit the embedding model, whatever its tokenizer adds to a text."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, processors

from weft.embedding import EmbeddingSpec
from weft.loading.checkpoint import Checkpoint
from weft.memory.documents import ChunkSize, Passage
from weft.server.memory import reading_process
from weft.server.memory.reader import DocumentReader
from weft.server.vectors.model import VectorModel
from weft.server.vectors.text_tokens import VectorTexts
from weft.text.embedding_text import EmbeddingText

SPEC = EmbeddingSpec("embed", "mean", 4, max_tokens=6)
WORDS = ["[UNK]", "[CLS]", "[SEP]", "river", "stone"]


def model(folder: Path, *, has_special_tokens: bool) -> VectorModel:
    """A model with a word for a token. Its tokenizer removes the letter x."""
    backend = tokenizers.Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    backend.normalizer = normalizers.Replace("x", "")
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if has_special_tokens:
        around = [("[CLS]", 1), ("[SEP]", 2)]
        backend.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=around)
    backend.save(str(folder / "tokenizer.json"))
    checkpoint = Checkpoint(folder, "huggingface", {"model_type": "bert"}, {}, frozenset())
    texts = VectorTexts(EmbeddingText(checkpoint, SPEC), str(folder))
    engine: Any = SimpleNamespace(info=SimpleNamespace(vocabulary_size=len(WORDS), room_tokens=0))
    return VectorModel(("m",), str(folder), SPEC, engine, texts)


@pytest.mark.parametrize(("has_special_tokens", "words_in_passage"), [(True, 4), (False, 6)])
def test_passages_fit_a_model_with_special_tokens_and_one_without(
    has_special_tokens: bool, words_in_passage: int, tmp_path: Path
) -> None:
    path = tmp_path / "a.txt"
    path.write_text("river xx stone " * 8)

    async def read() -> list[Passage]:
        embedder = model(tmp_path, has_special_tokens=has_special_tokens)
        reader = DocumentReader()
        try:
            return await reader.passages(path, "a.txt", ChunkSize(800, 0), embedder)
        finally:
            await reader.close()
            await embedder.close()

    passages = asyncio.run(read())
    counts = [sum(word in WORDS for word in one.text.split()) for one in passages]
    assert sum(counts) == 16 and max(counts) == words_in_passage


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (MemoryError(), "needs more than 1024 MiB"),
        (AssertionError("a mistake"), "cannot be read (AssertionError)"),
    ],
)
def test_an_error_of_a_parser_is_the_reason_of_the_file(
    error: Exception, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(content: bytes, name: str) -> None:
        raise error

    monkeypatch.setattr(reading_process, "read_document", read)
    (tmp_path / "a.txt").write_text("words")
    job = msgspec.msgpack.encode(reading_process.ReadJob(str(tmp_path / "a.txt"), "a.txt"))
    result = msgspec.msgpack.decode(reading_process._run_in_child(job), type=reading_process.Result)
    assert isinstance(result, reading_process.Failed) and reason in result.message
