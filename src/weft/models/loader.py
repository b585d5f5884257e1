"""Loads the tensors of a model into ops, each once and after a check of its shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from weft.errors import ModelFileError
from weft.ops.base import LinearRole, Ops, WeightSource


class TensorLoader:
    """Takes tensors by the model's names. A tensor that is never taken is an error (`reject_unused_tensors`)."""

    def __init__(
        self,
        weights: Mapping[str, WeightSource],
        ops: Ops,
        architecture: str,
        file_name: Callable[[str], str],
    ) -> None:
        """`file_name` maps a name of the model to the name in the file, for error messages."""
        self.unused = dict(weights)
        self.ops = ops
        self.architecture = architecture
        self.file_name = file_name
        self.weight_bytes = 0

    def fused(self, whole: str, *parts: tuple[str, int, int], bias: bool) -> Any:
        """Loads a fused matrix. The file stores it as `whole`, or as separate `parts`."""
        if whole not in self.unused:
            return self.linear(*parts, bias=bias)
        return self.linear((whole, sum(outputs for _, outputs, _ in parts), parts[0][2]), bias=bias)

    def linear(self, *parts: tuple[str, int, int], bias: bool = False, role: LinearRole = "layer") -> Any:
        """Loads a linear layer. Each part is (name, outputs, inputs) of a tensor; they are stacked by outputs."""
        sources = [self.take(name, (outputs, inputs)) for name, outputs, inputs in parts]
        biases = [self.take(f"{name}.bias", (outputs,)) for name, outputs, _ in parts] if bias else []
        return self.count_bytes(self.ops.load_linear(sources, biases, role))

    def take(self, name: str, shape: tuple[int, ...]) -> WeightSource:
        source = self.unused.pop(name, None)
        if source is None:
            raise ModelFileError(f"{self.file_name(name)}: the tensor is missing from the file")
        if source.shape != shape:
            raise ModelFileError(
                f"{self.file_name(name)}: has shape {source.shape}, the model's metadata requires {shape}"
            )
        return source

    def count_bytes(self, weight: Any) -> Any:
        """Adds the memory of a loaded weight to `weight_bytes`, and returns the weight."""
        self.weight_bytes += self.ops.nbytes(weight)
        return weight

    def reject_unused_tensors(self) -> None:
        """Raises ModelFileError if a tensor was not taken. Such a tensor (a bias, an expert) means that the decoder
        would compute this model wrongly."""
        if self.unused:
            raise ModelFileError(
                f"{self.file_name(min(self.unused))}: weft does not use this tensor "
                f"(and {len(self.unused) - 1} more); "
                f"the model is not a plain {self.architecture}"
            )
