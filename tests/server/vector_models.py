"""Models that make vectors and scores, for tests of the server."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from server_process import Server, running_server

from weft.loading.default_model import DEFAULT_EMBEDDER_NAME
from weft.loading.pull import pull

EMBEDDER, RERANKER = DEFAULT_EMBEDDER_NAME, "small-reranker"
DIMENSIONS, MAX_TOKENS = 384, 256
_HIDDEN = 32
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def embedder_path() -> Path:
    return pull(EMBEDDER)


def write_reranker(folder: Path) -> Path:
    """A small BERT with random weights and a score head, with the tokenizer of the default embedder."""
    source = embedder_path()
    folder.mkdir(parents=True, exist_ok=True)
    for name in _TOKENIZER:
        shutil.copy(source / name, folder / name)
    config = json.loads((source / "config.json").read_text())
    config |= {
        "architectures": ["BertForSequenceClassification"],
        "hidden_size": _HIDDEN,
        "intermediate_size": 2 * _HIDDEN,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_tensors(config), folder / "model.safetensors")
    return folder


def _tensors(config: dict[str, Any]) -> dict[str, np.ndarray]:
    numbers = np.random.default_rng(3)
    found: dict[str, np.ndarray] = {}

    def linear(name: str, inputs: int, outputs: int) -> None:
        weight = numbers.standard_normal((outputs, inputs)) / inputs**0.5
        found[f"{name}.weight"] = weight.astype(np.float32)
        found[f"{name}.bias"] = numbers.standard_normal(outputs).astype(np.float32)

    def norm(name: str) -> None:
        found[f"{name}.weight"] = np.ones(_HIDDEN, np.float32)
        found[f"{name}.bias"] = np.zeros(_HIDDEN, np.float32)

    for name, count in (
        ("word", config["vocab_size"]),
        ("position", config["max_position_embeddings"]),
        ("token_type", config["type_vocab_size"]),
    ):
        weight = numbers.standard_normal((count, _HIDDEN)).astype(np.float32)
        found[f"bert.embeddings.{name}_embeddings.weight"] = weight
    norm("bert.embeddings.LayerNorm")
    for layer in range(config["num_hidden_layers"]):
        prefix = f"bert.encoder.layer.{layer}"
        for name in ("query", "key", "value"):
            linear(f"{prefix}.attention.self.{name}", _HIDDEN, _HIDDEN)
        linear(f"{prefix}.attention.output.dense", _HIDDEN, _HIDDEN)
        norm(f"{prefix}.attention.output.LayerNorm")
        linear(f"{prefix}.intermediate.dense", _HIDDEN, 2 * _HIDDEN)
        linear(f"{prefix}.output.dense", 2 * _HIDDEN, _HIDDEN)
        norm(f"{prefix}.output.LayerNorm")
    linear("bert.pooler.dense", _HIDDEN, _HIDDEN)
    linear("classifier", _HIDDEN, 1)
    return found


def embedder(**options: Any) -> dict[str, Any]:
    """The default embedder as a setting of `running_server`."""
    spec = {"kind": "embed", "pooling": "mean", "dimensions": DIMENSIONS, "max_tokens": MAX_TOKENS}
    path = str(embedder_path())
    return _setting(spec, path, EMBEDDER, "embedder", {"checkpoint": path, "threads": 2, **options})


@contextmanager
def embedder_server() -> Iterator[Server]:
    """A server of the default embedder alone."""
    one = embedder()
    settings = {"spec": one["spec"], "backend": one["backend"], "backend_options": one["backend_options"]}
    with running_server(embedder_path(), names=[EMBEDDER], **settings) as server:
        yield server


def reranker(folder: Path) -> dict[str, Any]:
    spec = {
        **{"kind": "rerank", "pooling": "cls", "dimensions": 1, "max_tokens": 2 * MAX_TOKENS},
        **{"normalise": False, "activation": "sigmoid"},
    }
    path = str(write_reranker(folder))
    return _setting(spec, path, RERANKER, "embedder", {"checkpoint": path, "threads": 1})


def noop_embedder(path: Path, *, max_tokens: int = 64, dimensions: int = 8, **options: Any) -> dict[str, Any]:
    """An embedder without weights, with the tokenizer of the model at `path`."""
    spec = {"kind": "embed", "pooling": "mean", "dimensions": dimensions, "max_tokens": max_tokens}
    sizes = {"vocabulary_size": 30522, "max_context": max_tokens + 1, "vector_size": dimensions}
    return _setting(spec, str(path), "noop-embedder", "noop", {**sizes, **options})


def noop_reranker(path: Path) -> dict[str, Any]:
    """A reranker without weights. Its scores are from -1 to 1."""
    one = noop_embedder(path, dimensions=1)
    return {**one, "spec": {**one["spec"], "kind": "rerank"}, "names": ["noop-reranker"]}


def _setting(
    spec: dict[str, Any], path: str, name: str, backend: str, options: dict[str, Any]
) -> dict[str, Any]:
    return {"spec": spec, "path": path, "names": [name], "backend": backend, "backend_options": options}
