"""The server tokenises the texts of vectors and scores: each text once, whatever a request pairs it with."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from weft.embedding import EmbeddingSpec
from weft.errors import InvalidRequestError
from weft.loading.checkpoint import Checkpoint
from weft.loading.vocabulary import read_vocabulary
from weft.server.errors import ApiError
from weft.server.vectors.text_tokens import MAX_TOKENS, VectorTexts
from weft.server.vectors.vector_text_process import VectorTextJob, convert
from weft.text.embedding_text import EmbeddingText

R = TypeVar("R")
SPEC = EmbeddingSpec("rerank", "cls", 1, max_tokens=512)


class Counted:
    """The texts of a model. Worker processes are replaced by calls, and the tokenised bytes are counted."""

    def __init__(self, text: EmbeddingText) -> None:
        self.num_bytes = 0
        self.texts = VectorTexts(text, "")
        encode_part = text.tokenizer.encode_part
        jobs = msgspec.msgpack.Decoder(VectorTextJob)

        def counting(one: str, prefix: str = "") -> list[int]:
            self.num_bytes += len((prefix + one).encode(errors="replace"))
            return encode_part(one, prefix)

        async def run(payload: bytes, **_: Any) -> bytes:
            return msgspec.msgpack.encode(convert(text, jobs.decode(payload)))

        text.tokenizer.encode_part = counting  # type: ignore[method-assign]
        self.texts._workers.run = run  # type: ignore[method-assign]

    def run(self, work: Callable[[VectorTexts], Coroutine[Any, Any, R]]) -> R:
        async def whole() -> R:
            try:
                return await work(self.texts)
            finally:
                await self.texts.close()

        return asyncio.run(whole())


@pytest.fixture(params=["llama", "qwen3"])
def counted(request: pytest.FixtureRequest, default_model_file: Any) -> Iterator[Counted]:
    """A reranker with two separate texts, and one that asks a question with both."""
    vocabulary = read_vocabulary(default_model_file.metadata)
    metadata = {"general.architecture": request.param}
    checkpoint = Checkpoint(Path("model"), "gguf", metadata, {}, frozenset(), vocabulary=vocabulary)
    yield Counted(EmbeddingText(checkpoint, SPEC))


@pytest.mark.parametrize("num_queries", [1, 100])
def test_the_tokenised_bytes_grow_with_the_body_and_not_with_the_number_of_pairs(
    counted: Counted, num_queries: int
) -> None:
    queries, documents = ["why? " * (80_000 // num_queries)] * num_queries, ["a"] * 2048
    if num_queries > 1:
        documents = documents[:num_queries]
    pairs = counted.run(lambda texts: texts.encode_pairs(queries, documents, "client"))
    assert len(pairs) == len(documents) and {len(one) for one in pairs} == {SPEC.max_tokens}
    fixed = 200  # the words around a query and a document
    assert counted.num_bytes < 400_000 + (num_queries + len(documents)) * fixed


def test_pairs_with_too_many_tokens_are_refused_before_they_are_made(counted: Counted) -> None:
    text = counted.texts._text
    text.spec = dataclasses.replace(SPEC, max_tokens=MAX_TOKENS)
    made: list[None] = []
    pair = text.pair
    text.pair = lambda *parts, **options: (made.append(None), pair(*parts, **options))[1]  # type: ignore
    with pytest.raises(ApiError, match=rf"documents has at least \d+ tokens in all.* at most {MAX_TOKENS}"):
        counted.run(lambda texts: texts.encode_pairs(["why? " * 100_000], ["a"] * 2048, "client"))
    assert len(made) < 10
    assert counted.num_bytes < 1_000_000


def test_an_error_names_the_query_or_the_document(counted: Counted) -> None:
    with pytest.raises(ApiError, match=r"text_1\[1\]: the text has an unpaired surrogate") as error:
        counted.run(
            lambda texts: texts.encode_pairs(["a", "\ud800"], ["b", "c"], "client", query_field="text_1")
        )
    assert error.value.param == "text_1[1]"


def test_texts_with_too_many_tokens_are_refused_before_all_are_tokenised(counted: Counted) -> None:
    text = counted.texts._text
    text.spec = dataclasses.replace(SPEC, max_tokens=MAX_TOKENS)
    with pytest.raises((ApiError, InvalidRequestError), match=r"input has at least \d+ tokens in all"):
        counted.run(lambda texts: texts.encode("default", ["why? " * 100_000] * 40, "client"))
    assert counted.num_bytes < 12 * 500_000
