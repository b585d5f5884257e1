"""A tensor in a mapped GGUF or safetensors file, decoded on demand.

numpy is imported on first decoding: a process that only needs the tokenizer starts without it.
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
    """A `weft.ops.base.WeightSource` in a file. The caller has checked that its bytes lie inside the file.

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
        """The encoded bytes: a read-only view of the map."""
        import numpy as np

        return np.frombuffer(self.file.data, np.uint8, self.byte_count, self.start)

    def read_into(self, out: np.ndarray) -> None:
        """Decodes the values into `out`, a floating point array of the same shape.

        Decoded pages of the file are released at once: the weights are never in memory twice during loading.
        """
        from weft.loading.decoding import decode_into

        if out.shape != self.shape:
            raise ValueError(f"{self.name} has the shape {self.shape}, the output array {out.shape}")
        decode_into(self.raw, self.format, out, self._release_pages)

    def rows(self, indices: np.ndarray) -> np.ndarray:
        """Decodes these rows of a matrix to float32. Other rows are not read."""
        import numpy as np

        from weft.loading.decoding import decode_into

        rows = self.raw.reshape(self.shape[0], -1)[indices]
        result = np.empty((len(rows), *self.shape[1:]), np.float32)
        decode_into(rows.reshape(-1), self.format, result)
        return result

    def to_float32(self) -> np.ndarray:
        """Decodes the tensor into a new float32 array."""
        import numpy as np

        result = np.empty(self.shape, np.float32)
        self.read_into(result)
        return result

    def _release_pages(self, start: int, stop: int) -> None:
        self.file.release_pages(self.start + start, self.start + stop)
