"""A model opened for reading, whatever its files: what decoder, tokenizer and defaults are made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from weft.errors import ModelFileError
from weft.loading.gguf import read_gguf
from weft.loading.vocabulary import read_vocabulary

Layout = Literal["gguf", "huggingface"]


@dataclass(frozen=True)
class Checkpoint:
    """Nothing in it is a number yet: tensors are views of mapped files until somebody reads them."""

    path: Path
    """The GGUF file, or the folder with config.json and safetensors files."""
    layout: Layout
    metadata: Mapping[str, Any]
    """The key-value pairs of the GGUF file, or config.json."""
    tensors: Mapping[str, Any]
    """`weft.ops.base.WeightSource`s under the names they have in the files."""
    end_ids: frozenset[int]
    """Every token that ends an answer."""
    generation: Mapping[str, Any] = field(default_factory=dict)
    """What the model's makers suggest for sampling, under the names of `SamplingParams`."""


def open_checkpoint(path: Path | str) -> Checkpoint:
    """The model at `path`, a GGUF file or a folder; errors name the file and the field."""
    path = Path(path)
    if path.is_dir():
        raise ModelFileError(f"{path}: is a folder; pass the path of a GGUF file")
    file = read_gguf(path)
    try:
        return Checkpoint(path, "gguf", file.metadata, file.tensors, read_vocabulary(file.metadata).end_ids)
    except ModelFileError as error:
        raise ModelFileError(f"{path}: {error}") from error
