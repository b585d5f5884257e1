"""Opens a model, from a GGUF file or a Hugging Face folder, as one `Checkpoint`."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from weft.errors import ModelFileError
from weft.loading.files import PICKLE_SUFFIXES, field_error, read_json
from weft.loading.formats import SAFETENSORS_FORMATS as FLOAT_FORMATS
from weft.loading.generation import gguf_sampling, huggingface_sampling
from weft.loading.gguf import later_part_names, read_gguf
from weft.loading.safetensors import INDEX_NAME, SINGLE_NAME, read_safetensors, read_sharded_safetensors
from weft.loading.tensor import StoredTensor
from weft.loading.vocabulary import Vocabulary, read_vocabulary

if TYPE_CHECKING:
    from weft.loading.random_checkpoint import RandomSource

Layout = Literal["gguf", "huggingface"]

_MAX_NAMES_SHOWN = 12


@dataclass(frozen=True)
class Checkpoint:
    """A model before any weight is decoded: its tensors are views of mapped files, or random numbers not yet drawn."""

    path: Path
    """The GGUF file, or the folder with config.json and safetensors files. Only a name if the weights are random."""
    layout: Layout
    metadata: Mapping[str, Any]
    """The key-value pairs of the GGUF file, or config.json."""
    tensors: Mapping[str, StoredTensor | RandomSource]
    """The tensors by their names in the files."""
    end_ids: frozenset[int]
    """Every token that ends an answer."""
    generation: Mapping[str, Any] = field(default_factory=dict)
    """The model's default sampling parameters, by their names in `SamplingParams`."""
    vocabulary: Vocabulary | None = None
    """The vocabulary of a GGUF file. A folder has a tokenizer.json instead."""
    has_text: bool = True
    """False: there is no tokenizer, so prompts and answers are token ids."""

    @property
    def architecture(self) -> str:
        """The architecture's name in the files, for example "llama"."""
        return str(self.metadata.get("general.architecture" if self.layout == "gguf" else "model_type", ""))

    @property
    def files(self) -> frozenset[Path]:
        """The files that hold the tensors."""
        return frozenset(
            tensor.file.path for tensor in self.tensors.values() if isinstance(tensor, StoredTensor)
        )

    @property
    def parameter_count(self) -> int:
        return sum(math.prod(tensor.shape) for tensor in self.tensors.values())

    @property
    def has_float_weights(self) -> bool:
        """Whether a weight matrix is stored as floats, so that it can be quantised."""
        return any(
            tensor.format_name in FLOAT_FORMATS for tensor in self.tensors.values() if len(tensor.shape) > 1
        )

    @property
    def stored_as(self) -> str:
        """The kind of file, and the format of most of its parameters: "GGUF Q4_K"."""
        formats: Counter[str] = Counter()
        for tensor in self.tensors.values():
            formats[tensor.format_name] += math.prod(tensor.shape)
        kind = "GGUF" if self.layout == "gguf" else "safetensors"
        return " ".join([kind, *(name for name, _ in formats.most_common(1))])


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Opens the model at `path`, a GGUF file or a folder. Errors name the file and the field.

    Code in the folder is never run. A model that needs code has an architecture that `weft.models.registry` rejects.
    """
    path = Path(path)
    # If the parent folder is not accessible, os.path.isdir returns False. Path.is_dir would raise an error.
    if os.path.isdir(path):
        return _open_folder(path)
    if path.suffix == ".safetensors":
        raise ModelFileError(f"{path}: holds only weights; pass the folder that also holds config.json")
    if path.suffix in PICKLE_SUFFIXES:
        raise _pickle_error(path)
    return _open_gguf(path)


def _open_gguf(path: Path) -> Checkpoint:
    file = read_gguf(path)
    try:
        vocabulary = read_vocabulary(file.metadata)
    except ModelFileError as error:
        raise ModelFileError(f"{path}: {error}") from error
    return Checkpoint(
        path,
        "gguf",
        file.metadata,
        file.tensors,
        vocabulary.end_ids,
        gguf_sampling(path, file.metadata),
        vocabulary,
    )


# --- folders ----------------------------------------------------------------------------------------------------------


def _open_folder(folder: Path) -> Checkpoint:
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError as error:
        raise ModelFileError(f"{folder}: cannot be opened: {error.strerror or error}") from error
    if SINGLE_NAME not in names and INDEX_NAME not in names:
        return _open_gguf(folder / _only_gguf(folder, names))
    if "config.json" not in names:
        raise ModelFileError(
            f"{folder}: has weights but no config.json, which describes the model; download config.json too"
        )
    config_path = folder / "config.json"
    config = read_json(config_path)
    _refuse_quantised(config_path, config)
    _refuse_tokenizer_code(folder, names)
    generation_path = folder / "generation_config.json"
    generation = read_json(generation_path) if generation_path.name in names else {}
    return Checkpoint(
        folder,
        "huggingface",
        config,
        _read_weights(folder, names),
        _end_ids(folder, names, config, generation),
        huggingface_sampling(generation_path, generation),
    )


def _read_weights(folder: Path, names: list[str]) -> dict[str, StoredTensor]:
    # As in transformers, a single file wins over an index: the index may be stale, from before the shards were merged.
    if SINGLE_NAME in names:
        return read_safetensors(folder / SINGLE_NAME)
    return read_sharded_safetensors(folder / INDEX_NAME)


def _only_gguf(folder: Path, names: list[str]) -> str:
    """The name of the only GGUF model in a folder without safetensors. If there is not exactly one, raises an error that
    lists what the folder holds."""
    found = [name for name in names if name.endswith(".gguf")]
    later_parts = {part for name in found for part in later_part_names(name)}
    models = [name for name in found if name not in later_parts]
    if len(models) == 1:
        return models[0]
    if models:
        raise ModelFileError(
            f"{folder}: holds several GGUF models; pass the path of one: {_join_names(models)}"
        )
    if pickles := [name for name in names if name.endswith(PICKLE_SUFFIXES) and name != "training_args.bin"]:
        raise _pickle_error(folder / pickles[0])
    if weights := [name for name in names if name.endswith(".safetensors")]:
        raise ModelFileError(
            f"{folder}: has neither {SINGLE_NAME} nor {INDEX_NAME}, only {_join_names(weights)}; "
            "download the missing file"
        )
    raise ModelFileError(
        f"{folder}: holds no model; expected config.json with {SINGLE_NAME} or {INDEX_NAME}, or a GGUF file"
    )


def _join_names(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES_SHOWN} more" if len(names) > _MAX_NAMES_SHOWN else ""
    return ", ".join(names[:_MAX_NAMES_SHOWN]) + more


def _pickle_error(path: Path) -> ModelFileError:
    return ModelFileError(
        f"{path}: pickle weights can run code when they are read, so weft does not read them; "
        "convert the model to safetensors or GGUF"
    )


def _refuse_quantised(path: Path, config: Mapping[str, Any]) -> None:
    for key in ("quantization_config", "compression_config"):
        details = config.get(key)
        if details is not None:
            method = details.get("quant_method") if isinstance(details, dict) else None
            raise field_error(
                path,
                key,
                f"the weights are quantised ({method or 'method unknown'!r:.40}), which weft does not read yet; "
                "use the model in bf16, or a GGUF quantisation of it",
            )


def _refuse_tokenizer_code(folder: Path, names: list[str]) -> None:
    """Rejects a folder without tokenizer.json whose tokenizer is custom Python code (`auto_map`)."""
    if "tokenizer_config.json" in names and "tokenizer.json" not in names:
        path = folder / "tokenizer_config.json"
        if read_json(path).get("auto_map"):
            raise field_error(
                path, "auto_map", "the tokenizer is custom Python code; weft never runs code of a checkpoint"
            )


# --- the tokens that end an answer ------------------------------------------------------------------------------------


def _end_ids(
    folder: Path, names: list[str], config: Mapping[str, Any], generation: Mapping[str, Any]
) -> frozenset[int]:
    """The EOS tokens of the first file that names any: generation_config.json, config.json, or the tokenizer's files.

    An id outside the vocabulary is an error. If it were ignored, answers might never end.
    """
    size = config.get("vocab_size")
    limit = size if type(size) is int and size > 0 else 2**31
    for name, values in (("generation_config.json", generation), ("config.json", config)):
        value = values.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        for token in ids:
            if type(token) is not int or not 0 <= token < limit:
                problem = f"{token!r:.80} is not the id of one of the {limit} tokens"
                raise field_error(folder / name, "eos_token_id", problem)
        if ids:
            return frozenset(ids)
    token = _tokenizer_end_id(folder, names)
    if token is not None and token >= limit:
        problem = f"its id {token} is not that of one of the {limit} tokens of config.json"
        raise field_error(folder / "tokenizer_config.json", "eos_token", problem)
    return frozenset() if token is None else frozenset((token,))


def _tokenizer_end_id(folder: Path, names: list[str]) -> int | None:
    """The id of `eos_token` in tokenizer_config.json, which is a string or an object with a "content"."""
    config_path, tokenizer_path = folder / "tokenizer_config.json", folder / "tokenizer.json"
    if config_path.name not in names or tokenizer_path.name not in names:
        return None
    token = read_json(config_path).get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    if text is None:
        return None
    added = read_json(tokenizer_path).get("added_tokens")
    for entry in added if isinstance(added, list) else ():
        if isinstance(entry, dict) and entry.get("content") == text:
            number = entry.get("id")
            if type(number) is not int or number < 0:
                problem = f"the id of {text!r:.80} is {number!r:.80}, expected a whole number from 0"
                raise field_error(tokenizer_path, "added_tokens", problem)
            return number
    raise field_error(
        config_path, "eos_token", f"{text!r:.80} is not among the added_tokens of tokenizer.json"
    )
