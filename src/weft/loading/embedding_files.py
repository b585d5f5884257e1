"""Reads what an embedding model or reranker computes from the files beside its weights.

modules.json                          the parts of the model, in order, each with a folder
1_Pooling/config.json                 which rows of the model become the vector
2_Dense/config.json, model.safetensors    a linear layer after pooling
sentence_bert_config.json             the longest input, and whether inputs are converted to lower case
config_sentence_transformers.json     texts that the model expects before a query or a document
config.json                           `...ForSequenceClassification` with one label is a reranker
GGUF: `pooling_type`                  1 mean, 2 first token, 3 last token, 4 the score of a reranker
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from weft.embedding import EmbeddingSpec
from weft.errors import ModelFileError
from weft.loading.checkpoint import Checkpoint
from weft.loading.files import PICKLE_SUFFIXES, field_error, parse_json, read_json, read_text
from weft.loading.safetensors import SINGLE_NAME, read_safetensors
from weft.loading.tensor import StoredTensor

Pooling = Literal["mean", "cls", "last"]

ENCODER_TYPES = ("bert", "roberta", "xlm-roberta", "modernbert")
_GGUF_ENCODERS = ("bert", "modern-bert", "gemma-embedding")
_LARGEST = (1 << 31) - 1
_MAX_MODULES = 16

_POOLING: dict[str, Pooling] = {"mean": "mean", "cls": "cls", "lasttoken": "last"}
_OLD_POOLING = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_GGUF_POOLING: dict[int, Pooling] = {1: "mean", 2: "cls", 3: "last"}
_GGUF_RANK = 4
_ACTIVATIONS: dict[str, Literal["none", "tanh", "gelu"]] = {
    "Identity": "none",
    "Tanh": "tanh",
    "GELU": "gelu",
}
# Qwen3-Reranker has the files of a chat model. Only its name shows what it is.
_RERANKER_NAME = re.compile(r"qwen3-reranker", re.IGNORECASE)


@dataclass(frozen=True)
class DenseLayer:
    """A linear layer after pooling."""

    weight: StoredTensor
    bias: StoredTensor | None
    activation: Literal["none", "tanh", "gelu"]


@dataclass(frozen=True)
class _Modules:
    """The content of modules.json: the configurations of its parts."""

    pooling: tuple[Path, Mapping[str, Any]] | None
    dense: tuple[tuple[Path, Mapping[str, Any]], ...]
    score: tuple[Path, Mapping[str, Any]] | None
    normalise: bool


def embedding_spec(checkpoint: Checkpoint) -> EmbeddingSpec | None:
    """How the model makes vectors or scores. None if it is neither an embedding model nor a reranker. Reads no weights."""
    if checkpoint.layout == "gguf":
        return _gguf_spec(checkpoint)
    folder, config = checkpoint.path, checkpoint.metadata
    config_path = folder / "config.json"
    modules = _read_modules(folder)
    architectures = config.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else ""
    is_encoder = config.get("model_type") in ENCODER_TYPES
    if isinstance(name, str) and name.endswith("ForSequenceClassification"):
        return EmbeddingSpec(
            "rerank",
            pooling=_classifier_pooling(config_path, config) if is_encoder else "last",
            dimensions=_one_label(config_path, config),
            max_tokens=_max_tokens(folder, config),
            normalise=False,
            activation=_score_activation(config),
        )
    yes_no = _yes_no(folder, config, modules)
    if yes_no is not None:
        return EmbeddingSpec(
            "rerank",
            pooling="last",
            dimensions=1,
            max_tokens=_max_tokens(folder, config),
            normalise=False,
            prompts=_prompts(folder),
            yes_no=yes_no,
        )
    if modules is None and not is_encoder:
        return None
    dimensions = _size(config_path, config, "hidden_size")
    if modules is None:
        # An encoder without modules.json: the mean of all tokens, as in sentence-transformers.
        return EmbeddingSpec(
            "embed",
            "mean",
            dimensions,
            _max_tokens(folder, config),
            prompts=_prompts(folder),
            lower_case=_lower_case(folder),
        )
    if modules.pooling is None:
        raise field_error(
            folder / "modules.json", "type", "there is no Pooling, so the model makes no vectors"
        )
    pooling = _pooling(*modules.pooling)
    for path, dense in modules.dense:
        dimensions = _size(path, dense, "out_features")
    prompts = _prompts(folder)
    if prompts and modules.pooling[1].get("include_prompt", True) is not True:
        raise field_error(modules.pooling[0], "include_prompt", "weft pools the tokens of the prompt too")
    return EmbeddingSpec(
        "embed",
        pooling,
        dimensions,
        _max_tokens(folder, config),
        normalise=modules.normalise,
        prompts=prompts,
        lower_case=_lower_case(folder),
    )


def dense_layers(checkpoint: Checkpoint) -> list[DenseLayer]:
    """The linear layers after pooling that are in files of their own."""
    modules = None if checkpoint.layout == "gguf" else _read_modules(checkpoint.path)
    return [_dense_layer(path, config) for path, config in (modules.dense if modules else ())]


def separator_id(checkpoint: Checkpoint) -> int | None:
    """The token between the texts of a pair: `sep_token`, or the separator of a GGUF vocabulary."""
    if checkpoint.vocabulary is not None:
        return checkpoint.vocabulary.separator_id
    folder = checkpoint.path
    tokenizer_path, config_path = folder / "tokenizer.json", folder / "tokenizer_config.json"
    if not (tokenizer_path.is_file() and config_path.is_file()):
        return None
    token = read_json(config_path).get("sep_token")
    text = token.get("content") if isinstance(token, dict) else token
    added = read_json(tokenizer_path).get("added_tokens")
    for entry in added if isinstance(added, list) else ():
        if isinstance(entry, dict) and entry.get("content") == text and type(entry.get("id")) is int:
            return int(entry["id"])
    return None


# --- GGUF ---------------------------------------------------------------------------------------------------------


def _gguf_spec(checkpoint: Checkpoint) -> EmbeddingSpec | None:
    """The specification in the metadata of a GGUF file. None: the model generates text."""
    metadata, path = checkpoint.metadata, checkpoint.path
    name = checkpoint.architecture
    key = f"{name}.pooling_type"
    number = metadata.get(key)
    if number is None:
        if name not in _GGUF_ENCODERS:
            return None
        number = 1
    if number == 0 and name not in _GGUF_ENCODERS:
        return None
    if type(number) is not int or number not in (*_GGUF_POOLING, _GGUF_RANK):
        raise field_error(
            path, key, f"{number!r:.80} is not supported; weft knows 1 (mean), 2 (cls), 3 (last), 4 (rank)"
        )
    max_tokens = _size(path, metadata, f"{name}.context_length")
    if number == _GGUF_RANK:
        is_encoder = name in _GGUF_ENCODERS
        return EmbeddingSpec(
            "rerank",
            "cls" if is_encoder else "last",
            dimensions=1,
            max_tokens=max_tokens,
            normalise=False,
            activation="sigmoid" if is_encoder else "none",
            yes_no=None if is_encoder else _gguf_yes_no(checkpoint),
        )
    dimensions = _size(path, metadata, f"{name}.embedding_length")
    for dense in ("dense_2.weight", "dense_3.weight"):
        tensor = checkpoint.tensors.get(dense)
        if tensor is not None:
            dimensions = tensor.shape[0]
    return EmbeddingSpec("embed", _GGUF_POOLING[number], dimensions, max_tokens)


def _gguf_yes_no(checkpoint: Checkpoint) -> tuple[int, int]:
    assert checkpoint.vocabulary is not None
    tokens = checkpoint.vocabulary.tokens
    if "yes" not in tokens or "no" not in tokens:
        raise field_error(
            checkpoint.path, "tokenizer.ggml.tokens", "a reranker needs the tokens 'yes' and 'no'"
        )
    return tokens.index("yes"), tokens.index("no")


# --- folders ------------------------------------------------------------------------------------------------------


def _read_modules(folder: Path) -> _Modules | None:
    """Reads modules.json and the configurations that it names. None: there is no such file."""
    path = folder / "modules.json"
    if not os.path.lexists(path):
        return None
    # `parse_json` reads objects only; modules.json is a list.
    listed = parse_json(path, b'{"modules": ' + read_text(path).encode() + b"}", "JSON")["modules"]
    if not isinstance(listed, list) or not 1 <= len(listed) <= _MAX_MODULES:
        raise field_error(path, "modules", f"is not a list of 1 to {_MAX_MODULES} modules")
    found: dict[str, list[tuple[Path, Mapping[str, Any]]]] = {}
    kinds = []
    for module in listed:
        kind = str(module.get("type", "")).rpartition(".")[2] if isinstance(module, dict) else ""
        if kind not in ("Transformer", "Pooling", "Dense", "Normalize", "LogitScore"):
            known = "Transformer, Pooling, Dense, Normalize and LogitScore"
            raise field_error(
                path, "type", f"the module {kind!r:.80} is not supported; weft supports {known}"
            )
        kinds.append(kind)
        config_path = _inside(path, module.get("path", "")) / "config.json"
        if kind in ("Pooling", "Dense", "LogitScore"):
            found.setdefault(kind, []).append((config_path, read_json(config_path)))
    order = [kind for kind in kinds if kind != "Dropout"]
    if (
        order[0] != "Transformer"
        or order != sorted(order, key=_ORDER.index)
        or len(found.get("Pooling", ())) > 1
    ):
        raise field_error(
            path,
            "type",
            f"the modules are {', '.join(kinds)}; expected Transformer, Pooling, Dense, Normalize",
        )
    return _Modules(
        pooling=found["Pooling"][0] if "Pooling" in found else None,
        dense=tuple(found.get("Dense", ())),
        score=found["LogitScore"][0] if "LogitScore" in found else None,
        normalise="Normalize" in kinds,
    )


_ORDER = ["Transformer", "LogitScore", "Pooling", "Dense", "Normalize"]


def _inside(path: Path, name: Any) -> Path:
    """The folder of a module, after a check of its path: the path in a hostile file could lead anywhere."""
    if not isinstance(name, str) or name.startswith(("/", "~")) or "\\" in name or ".." in name.split("/"):
        raise field_error(path, "path", f"{name!r:.80} is not the name of a folder beside modules.json")
    return path.parent / name


def _pooling(path: Path, config: Mapping[str, Any]) -> Pooling:
    mode: Any = config.get("pooling_mode")
    if mode is None:
        modes = [name for key, name in _OLD_POOLING.items() if config.get(key) is True] or ["mean"]
        mode = modes[0] if len(modes) == 1 else modes
    if isinstance(mode, list) and len(mode) == 1:
        mode = mode[0]
    if not isinstance(mode, str) or mode not in _POOLING:
        raise field_error(
            path, "pooling_mode", f"{mode!r:.80} is not supported; weft supports {', '.join(_POOLING)}"
        )
    return _POOLING[mode]


def _dense_layer(path: Path, config: Mapping[str, Any]) -> DenseLayer:
    """Reads a linear layer after pooling, and checks the shapes of its tensors."""
    text = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    activation = _ACTIVATIONS.get(text.rpartition(".")[2])
    if activation is None:
        known = ", ".join(_ACTIVATIONS)
        raise field_error(
            path, "activation_function", f"{text!r:.80} is not supported; weft supports {known}"
        )
    weights = path.with_name(SINGLE_NAME)
    if not weights.is_file():
        pickles = [entry.name for entry in sorted(path.parent.iterdir()) if entry.suffix in PICKLE_SUFFIXES]
        hint = f"; weft does not read {pickles[0]}: pickle weights can run code" if pickles else ""
        raise ModelFileError(f"{weights}: missing{hint}")
    tensors = read_safetensors(weights)
    shape = (_size(path, config, "out_features"), _size(path, config, "in_features"))
    expected: dict[str, tuple[int, ...]] = {"linear.weight": shape}
    if config.get("bias", True) is not False:
        expected["linear.bias"] = shape[:1]
    for name, size in expected.items():
        if name not in tensors:
            raise ModelFileError(f"{weights}: {name}: the tensor is missing from the file")
        if tensors[name].shape != size:
            problem = f"has shape {tensors[name].shape}, config.json requires {size}"
            raise ModelFileError(f"{weights}: {name}: {problem}")
    return DenseLayer(tensors["linear.weight"], tensors.get("linear.bias"), activation)


def _yes_no(folder: Path, config: Mapping[str, Any], modules: _Modules | None) -> tuple[int, int] | None:
    """The ids of "yes" and "no" of a reranker that answers with one of them. None: the model is no such reranker."""
    if modules is not None and modules.score is not None:
        path, values = modules.score
        limit = _size(folder / "config.json", config, "vocab_size")
        yes, no = (_token(path, values, key, limit) for key in ("true_token_id", "false_token_id"))
        return yes, no
    if modules is not None or config.get("model_type") != "qwen3":
        return None
    readme = folder / "README.md"
    has_name = _RERANKER_NAME.search("/".join(folder.parts[-3:])) is not None
    if not has_name and not (readme.is_file() and "# Qwen3-Reranker" in read_text(readme)):
        return None
    path = folder / "tokenizer.json"
    model = read_json(path).get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids = [vocabulary.get(text) if isinstance(vocabulary, dict) else None for text in ("yes", "no")]
    if not all(type(number) is int for number in ids):
        raise field_error(path, "vocab", "a reranker needs the tokens 'yes' and 'no'")
    return ids[0], ids[1]  # type: ignore[return-value]


def _token(path: Path, values: Mapping[str, Any], key: str, limit: int) -> int:
    value = values.get(key)
    if type(value) is not int or not 0 <= value < limit:
        raise field_error(path, key, f"{value!r:.80} is not the id of one of the {limit} tokens")
    return value


def _one_label(path: Path, config: Mapping[str, Any]) -> int:
    """Returns 1. Raises ModelFileError if the model has another number of labels."""
    labels = config.get("id2label")
    count = config.get("num_labels", len(labels) if isinstance(labels, dict) else 2)
    if count != 1:
        raise field_error(
            path,
            "num_labels",
            f"the model has {count!r:.80} labels; a reranker has 1, and weft runs no classifiers",
        )
    return 1


def _classifier_pooling(path: Path, config: Mapping[str, Any]) -> Pooling:
    pooling = config.get("classifier_pooling", "cls")
    if pooling not in ("cls", "mean"):
        raise field_error(
            path, "classifier_pooling", f"{pooling!r:.80} is not supported; weft supports cls and mean"
        )
    return "mean" if pooling == "mean" else "cls"


def _score_activation(config: Mapping[str, Any]) -> Literal["none", "sigmoid"]:
    section = config.get("sentence_transformers")
    name = section.get("activation_fn") if isinstance(section, dict) else None
    name = name or config.get("sbert_ce_default_activation_function")
    return "none" if isinstance(name, str) and name.endswith("Identity") else "sigmoid"


def _max_tokens(folder: Path, config: Mapping[str, Any]) -> int:
    """The most tokens of an input: the limit of sentence-transformers, else of the tokenizer. It is never more than the
    model has positions."""
    positions = _size(folder / "config.json", config, "max_position_embeddings", _default_positions(config))
    if config.get("model_type") in ("roberta", "xlm-roberta"):
        # The positions begin after the id of the padding token.
        positions -= _size(folder / "config.json", config, "pad_token_id", 1, smallest=0) + 1
    for name, key in (
        ("sentence_bert_config.json", "max_seq_length"),
        ("tokenizer_config.json", "model_max_length"),
    ):
        path = folder / name
        if os.path.lexists(path) and (value := read_json(path).get(key)) is not None:
            # Without a limit, transformers writes 10^30.
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or value < 1:
                raise field_error(path, key, f"{value!r:.80} is not a number of tokens from 1")
            return int(min(value, positions))
    if positions < 1:
        raise field_error(
            folder / "config.json", "max_position_embeddings", f"leaves {positions} positions for tokens"
        )
    return positions


def _lower_case(folder: Path) -> bool:
    path = folder / "sentence_bert_config.json"
    value = read_json(path).get("do_lower_case", False) if os.path.lexists(path) else False
    if not isinstance(value, bool):
        raise field_error(path, "do_lower_case", f"{value!r:.80} is not true or false")
    return value


def _default_positions(config: Mapping[str, Any]) -> int | None:
    return {"modernbert": 8192}.get(str(config.get("model_type")), 512)


def _prompts(folder: Path) -> dict[str, str]:
    """The prompts (texts that are put before an input), by their names in the file. "passage" is another name of
    "document". The default prompt, if there is one, is "default"."""
    path = folder / "config_sentence_transformers.json"
    if not os.path.lexists(path):
        return {}
    content = read_json(path)
    prompts = content.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise field_error(path, "prompts", "is not an object of texts")
    named = dict(prompts)
    if "document" not in named and "passage" in named:
        named["document"] = named["passage"]
    default = content.get("default_prompt_name")
    if default is not None:
        if default not in prompts:
            raise field_error(path, "default_prompt_name", f"{default!r:.80} is not one of the prompts")
        named["default"] = prompts[default]
    return named


def _size(
    path: Path, values: Mapping[str, Any], key: str, default: int | None = None, smallest: int = 1
) -> int:
    value = values.get(key)
    value = default if value is None else value
    if type(value) is not int or not smallest <= value <= _LARGEST:
        raise field_error(path, key, f"{value!r:.80} is not a whole number from {smallest} to {_LARGEST}")
    return value
