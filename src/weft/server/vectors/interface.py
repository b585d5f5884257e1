"""The interface of the models that make vectors and scores, for other parts of the server. `Services.models` has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from weft.embedding import EmbeddingSpec
from weft.request import RequestId
from weft.vectors import Vectors

TextKind = Literal["query", "document"]
ENGINE_NOT_READY = "engine_not_ready"
"""The code of the ApiError while the engine of a model starts."""
ENGINE_NOT_RESPONDING = "engine_not_responding"
"""The code of the ApiError while the engine is stuck."""


class Embedder(Protocol):
    """Makes vectors of texts. Belongs to one event loop."""

    @property
    def name(self) -> str:
        """The first name of the model. Vectors are stored with it, since those of two models cannot be compared."""
        ...

    @property
    def spec(self) -> EmbeddingSpec: ...

    def check_ready(self) -> None:
        """Raises a 503 with ENGINE_NOT_READY or ENGINE_NOT_RESPONDING while the engine is not ready or does not respond."""
        ...

    def new_id(self) -> RequestId:
        """An id for work that belongs to no request of a client."""
        ...

    async def embed(
        self,
        texts: Sequence[str],
        kind: TextKind,
        *,
        request_id: RequestId,
        client_id: str = "",
        is_idle_work: bool = False,
    ) -> Vectors:
        """One vector for each text: an array of shape (texts, `spec.dimensions`). A text longer than the model allows
        raises InvalidRequestError with both numbers. The engine gets the texts as `request_id` and their index, and
        is shared fairly between clients, by `client_id`. Idle work waits for all other texts. Raises WeftError if the
        engine is not ready, or ends before all vectors are computed: try again."""
        ...

    async def count_tokens(self, texts: Sequence[str], kind: TextKind) -> list[int]:
        """The number of tokens of each text, with the model's prompt for this kind and its special tokens."""
        ...


class Reranker(Protocol):
    """Scores documents for a query. Belongs to one event loop."""

    @property
    def name(self) -> str: ...

    @property
    def spec(self) -> EmbeddingSpec: ...

    async def rerank(
        self, query: str, documents: Sequence[str], *, request_id: RequestId, client_id: str = ""
    ) -> list[float]:
        """The score of each document, in their order. A higher score means more relevant. Long documents are cut.
        Raises as `Embedder.embed` does."""
        ...
