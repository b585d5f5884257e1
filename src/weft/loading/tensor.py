"""A tensor in a mapped file: stored bytes that become numbers when asked, whatever kind of file holds them.

numpy is imported when numbers are asked for: whoever opens a model for its text alone starts without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from weft.loading.files import MappedFile
from weft.loading.formats import TensorFormat

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class StoredTensor:
    """A `weft.ops.base.WeightSource`. Whoever makes one has checked that its bytes lie inside the file.

    `shape` is in numpy order (rows first), so a linear layer is [outputs, inputs].
    """

    name: str
    shape: tuple[int, ...]
    format: TensorFormat
    file: MappedFile
    start: int
    byte_count: int

    @property
    def format_name(self) -> str:
        return self.format.name

    @property
    def raw(self) -> np.ndarray:
        """The stored bytes, a view of the map; never writable."""
        import numpy as np

        return np.frombuffer(self.file.data, np.uint8, self.byte_count, self.start)

    def read_into(self, out: np.ndarray) -> None:
        """Write the values into `out`, a floating point array of the same shape.

        The file's pages are let go piece by piece: while a model loads, its weights are never in memory twice.
        """
        from weft.loading.decoding import decode_into

        if out.shape != self.shape:
            raise ValueError(f"{self.name} has the shape {self.shape}, the array to fill {out.shape}")
        decode_into(self.raw, self.format, out, self._let_go)

    def rows(self, indices: np.ndarray) -> np.ndarray:
        """float32 copies of these rows of a matrix; nothing else of it is read."""
        import numpy as np

        from weft.loading.decoding import decode_into

        rows = self.raw.reshape(self.shape[0], -1)[indices]
        result = np.empty((len(rows), *self.shape[1:]), np.float32)
        decode_into(rows.reshape(-1), self.format, result)
        return result

    def to_float32(self) -> np.ndarray:
        """A fresh float32 array."""
        import numpy as np

        result = np.empty(self.shape, np.float32)
        self.read_into(result)
        return result

    def _let_go(self, start: int, stop: int) -> None:
        self.file.let_go(self.start + start, self.start + stop)
