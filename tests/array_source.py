"""A `weft.ops.base.WeightSource` over an array, for tests without a model file."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class ArraySource:
    array: np.ndarray
    name: str = "a tensor"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def format_name(self) -> str:
        return {2: "F16", 4: "F32"}[self.array.itemsize]

    @property
    def raw(self) -> np.ndarray:
        return self.array.reshape(-1).view(np.uint8)

    def read_into(self, out: np.ndarray) -> None:
        out[...] = self.array

    def rows(self, indices: np.ndarray) -> np.ndarray:
        return self.array[indices].astype(np.float32, copy=False)

    def to_float32(self) -> np.ndarray:
        return self.array.astype(np.float32)
