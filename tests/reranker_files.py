"""Writes the files of a small random reranker, with the tokenizer of the default embedder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from weft.loading.default_model import DEFAULT_EMBEDDER_NAME
from weft.loading.pull import pull

_HIDDEN = 32
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def write_reranker(folder: Path) -> Path:
    """A small BERT with random weights and a score head, with the tokenizer of the default embedder."""
    source = pull(DEFAULT_EMBEDDER_NAME)
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
