"""Arrays of vectors. Checks the `dimensions` of a request, and shortens vectors to that many numbers."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from weft.embedding import EmbeddingSpec
from weft.errors import InvalidRequestError

__all__ = ["Ids", "Vectors", "check_dimensions", "np", "shortened"]

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vectors = NDArray[np.float32]
    Ids = NDArray[np.int64]
else:
    Vectors = Ids = Any

    class _Numpy:
        """numpy, imported at its first use. The import takes 35 ms, and a server without vectors does not need it."""

        def __getattr__(self, name: str) -> Any:
            return getattr(import_module("numpy"), name)

    np = _Numpy()


def check_dimensions(dimensions: int | None, spec: EmbeddingSpec) -> None:
    if dimensions is not None and not (type(dimensions) is int and 1 <= dimensions <= spec.dimensions):
        raise InvalidRequestError(
            f"dimensions is {dimensions!r:.80}; allowed for this model: 1 to {spec.dimensions}",
            field="dimensions",
        )


def shortened(vectors: Vectors, dimensions: int | None, spec: EmbeddingSpec) -> Vectors:
    """The first `dimensions` numbers of each vector; None: all of them. If the model normalises, the shortened vectors are
    scaled to length 1."""
    if dimensions is None or dimensions == spec.dimensions:
        return vectors
    cut = np.ascontiguousarray(vectors[:, :dimensions])
    if not spec.normalise:
        return cut
    lengths = np.linalg.norm(cut, axis=1, keepdims=True)
    return np.asarray(cut / np.where(lengths == 0, 1, lengths), np.float32)
