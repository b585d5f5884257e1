"""Vectors and scores from an engine in this process: what `LLM.embed` and `LLM.rerank` do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from weft.embedding import EmbeddingSpec
from weft.engine.serving import ServingEngine
from weft.errors import InvalidRequestError, WeftError
from weft.request import InferenceRequest, RequestId, RequestState, SamplingParams, TokenOutput
from weft.text.embedding_text import EmbeddingText
from weft.vectors import Vectors, check_dimensions, shortened

TextKind = Literal["query", "document"]

KINDS = ("query", "document")
_ONE_TOKEN = SamplingParams(max_tokens=1)
"""The engine reports a vector with the one token that it samples. The token means nothing."""


class LocalVectors:
    """The text side of a model that makes vectors or scores, and its engine."""

    def __init__(self, engine: ServingEngine, spec: EmbeddingSpec, text: EmbeddingText) -> None:
        self.spec = spec
        self._engine = engine
        self._text = text

    def embed(
        self, texts: Sequence[str], kind: TextKind | None, dimensions: int | None, truncate: bool
    ) -> Vectors:
        """The vectors of the texts, in their order. Raises the error of the first text that has one."""
        vectors, errors = self.embed_each(texts, kind, dimensions, truncate)
        if errors:
            raise errors[min(errors)]
        return vectors

    def embed_each(
        self, texts: Sequence[str], kind: TextKind | None, dimensions: int | None, truncate: bool
    ) -> tuple[Vectors, dict[int, WeftError]]:
        """The vectors of the texts, and the errors of texts that have no vector, by index."""
        self.check(kind, dimensions)
        vectors, errors = self._run(texts, lambda text: self._text.tokens(text, kind, truncate=truncate))
        return shortened(vectors, dimensions, self.spec), errors

    def check(self, kind: TextKind | None, dimensions: int | None) -> None:
        """Raises if the model cannot make such vectors."""
        if self.spec.kind != "embed":
            raise InvalidRequestError("the model scores documents for a query; use LLM.rerank", field="model")
        if kind is not None and kind not in KINDS:
            raise InvalidRequestError(
                f"kind is {kind!r:.80}; allowed: {', '.join(KINDS)}, None", field="kind"
            )
        check_dimensions(dimensions, self.spec)

    def rerank(self, query: str, documents: Sequence[str]) -> list[float]:
        """The score of each document. Long documents are cut."""
        if self.spec.kind != "rerank":
            raise InvalidRequestError(
                "the model makes embeddings, which do not rank documents; open a reranker: a cross-encoder or "
                "Qwen3-Reranker",
                field="model",
            )
        asked = self._text.query_part(query)

        def tokens_of(document: str) -> list[int]:
            return self._text.pair(asked, self._text.document_part(document), truncate=True)

        scores, errors = self._run(documents, tokens_of)
        if errors:
            raise errors[min(errors)]
        return [float(score) for score in scores[:, 0]]

    def _run(
        self, texts: Sequence[str], tokens_of: Callable[[str], list[int]]
    ) -> tuple[Vectors, dict[int, WeftError]]:
        """Tokenises and submits texts while the engine computes earlier ones. Returns the vectors, and the errors by
        index."""
        vectors = np.zeros((len(texts), self.spec.dimensions), np.float32)
        errors: dict[int, WeftError] = {}
        indices: dict[RequestId, int] = {}
        """Id of a request that has not ended -> the index of its text."""
        has_ended = threading.Semaphore(0)

        def take(output: TokenOutput) -> None:
            if not output.is_final:
                return
            result = self._engine.get_result(output.request_id)
            index = indices.pop(output.request_id)
            if result is None or result.state is not RequestState.COMPLETED or result.vector is None:
                reason = (result and result.error) or "the request was cancelled"
                errors[index] = WeftError(f"text {index}: {reason}")
            else:
                vectors[index] = np.frombuffer(result.vector, "<f4")
            has_ended.release()

        num_submitted = 0
        try:
            for index, text in enumerate(texts):
                try:
                    tokens = _tokens(text, index, tokens_of)
                except InvalidRequestError as error:
                    errors[index] = error
                    continue
                request_id = self._engine.new_id()
                indices[request_id] = index
                # Waits while the queue is full, so that many texts do not fill the memory.
                request = InferenceRequest(tokens, _ONE_TOKEN, request_id=request_id)
                self._engine.submit_choices(request, take, block=True)
                num_submitted += 1
            for _ in range(num_submitted):
                has_ended.acquire()
        finally:
            for request_id in list(indices):
                self._engine.cancel(request_id)
        return vectors, errors


def _tokens(text: str, index: int, tokens_of: Callable[[str], list[int]]) -> tuple[int, ...]:
    if not isinstance(text, str):
        raise InvalidRequestError(f"text {index} is {type(text).__name__}; allowed: text", field="texts")
    try:
        return tuple(tokens_of(text))
    except InvalidRequestError as error:
        raise InvalidRequestError(f"text {index}: {error}", field="texts", code=error.code) from error
