"""A model that makes vectors or scores, as the caller of `serve` describes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weft.embedding import EmbeddingSpec


@dataclass(frozen=True)
class VectorModelFiles:
    """A model that makes vectors or scores, and how its engine is built. `weft serve` makes one for --embedder and
    one for --reranker."""

    spec: EmbeddingSpec
    path: str
    names: tuple[str, ...]
    backend: str
    backend_options: Mapping[str, Any]
