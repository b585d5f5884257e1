"""Small random embedding models and rerankers of every architecture: their files, and what transformers computes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from small_models import Case, transformers_in_float64

VOCABULARY = 97
SEPARATOR = 3
YES, NO = 41, 17

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
DECODER = {**SIZES, "num_key_value_heads": 2, "head_dim": 24, "rms_norm_eps": 1e-5}

POOLING = {"mean": "mean", "cls": "cls", "last": "lasttoken"}


@dataclass(frozen=True)
class TextCase:
    """A model to build. `kind` says what makes a number of its last hidden states."""

    family: str  # the prefix of transformers' classes
    options: Mapping[str, Any]
    kind: Literal["embed", "score", "yes_no"] = "embed"
    pooling: Literal["mean", "cls", "last"] = "mean"
    dense: tuple[int, ...] = ()  # outputs of the linear layers after pooling
    normalise: bool = True
    config: str = ""
    module: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def class_name(self) -> str:
        ending = {"embed": "Model", "score": "ForSequenceClassification", "yes_no": "ForCausalLM"}
        return self.family + ending[self.kind]


def build(case: TextCase) -> Any:
    import torch
    import transformers

    options = dict(case.options)
    if case.kind == "score":
        options["num_labels"] = 1
    config = getattr(transformers, case.config or f"{case.family}Config")(**options)
    config._attn_implementation = "eager"
    torch.set_num_threads(1)
    model = getattr(transformers, case.class_name)(config).eval()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            if "norm" in name.lower() and name.endswith("weight"):
                values = values * 0.3 + parameter.mean().round()
            elif parameter.ndim == 1:
                values = values * 0.3
            elif "embed" not in name:
                values = values * 1.5 / parameter.shape[-1] ** 0.5
            parameter.copy_(values)
    return model


def dense_weights(case: TextCase) -> list[np.ndarray]:
    sizes = (case.options["hidden_size"], *case.dense)
    numbers = np.random.default_rng(5)
    return [
        numbers.standard_normal((outputs, inputs)).astype(np.float32) / inputs**0.5
        for inputs, outputs in itertools.pairwise(sizes)
    ]


def write_folder(case: TextCase, model: Any, folder: Path) -> Path:
    """Saves the model as sentence-transformers does, with a tokenizer that only names its separator."""
    from safetensors.numpy import save_file

    model.save_pretrained(folder)
    _write(folder / "tokenizer_config.json", {"sep_token": "[SEP]"})
    _write(
        folder / "tokenizer.json", {"added_tokens": [{"id": SEPARATOR, "content": "[SEP]", "special": True}]}
    )
    modules = ["Transformer"]
    if case.kind == "embed":
        modules += ["Pooling", *["Dense"] * len(case.dense), *["Normalize"] * case.normalise]
    elif case.kind == "yes_no":
        modules.append("LogitScore")
    else:
        return folder
    named = [(f"{index}_{kind}" if index else "", kind) for index, kind in enumerate(modules)]
    _write(
        folder / "modules.json",
        [
            {"idx": i, "path": path, "type": f"sentence_transformers.models.{kind}"}
            for i, (path, kind) in enumerate(named)
        ],
    )
    dense = iter(dense_weights(case))
    for path, kind in named:
        if kind == "Pooling":
            _write(folder / path / "config.json", {"pooling_mode": POOLING[case.pooling]})
        elif kind == "LogitScore":
            _write(folder / path / "config.json", {"true_token_id": YES, "false_token_id": NO})
        elif kind == "Dense":
            weight = next(dense)
            outputs, inputs = weight.shape
            identity = "torch.nn.modules.linear.Identity"
            config = {
                "in_features": inputs,
                "out_features": outputs,
                "bias": False,
                "activation_function": identity,
            }
            _write(folder / path / "config.json", config)
            save_file({"linear.weight": weight}, folder / path / "model.safetensors")
    return folder


def _write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def expected(case: TextCase, model: Any, text: list[int]) -> np.ndarray:
    """The vector or the score of one text, in float64."""
    import torch

    model = model.double()
    inputs = {"input_ids": torch.tensor([text]), "attention_mask": torch.ones(1, len(text), dtype=torch.long)}
    if getattr(model.config, "type_vocab_size", 1) > 1:
        inputs["token_type_ids"] = torch.tensor([types_of(text)])
    with torch.no_grad(), transformers_in_float64(Case(case.family, {}, module=case.module)):
        if case.kind == "score":
            return 1 / (1 + np.exp(-model(**inputs).logits[0].numpy()))
        if case.kind == "yes_no":
            logits = model(**inputs, use_cache=False).logits[0, -1].numpy()
            return 1 / (1 + np.exp(logits[NO : NO + 1] - logits[YES : YES + 1]))
        rows = model(**inputs).last_hidden_state[0].numpy()
    row = {"mean": rows.mean(axis=0), "cls": rows[0], "last": rows[-1]}[case.pooling]
    for weight in dense_weights(case):
        row = weight.astype(np.float64) @ row
    return row / np.linalg.norm(row) if case.normalise else row


def types_of(text: list[int]) -> list[int]:
    """0 up to the first separator, 1 after it."""
    first = text.index(SEPARATOR) if SEPARATOR in text else len(text)
    return [int(index > first) for index in range(len(text))]


def texts(count: int = 9, longest: int = 100, seed: int = 1) -> list[list[int]]:
    """Texts of 1 to `longest` tokens. A few have a separator in the middle: they are pairs."""
    numbers = np.random.default_rng(seed)
    lengths = [1, longest, *numbers.integers(2, longest, count - 2).tolist()]
    found = [numbers.integers(4, VOCABULARY, length).tolist() for length in lengths]
    for text in found[1::2]:
        text[len(text) // 2] = SEPARATOR
        text[-1] = SEPARATOR
    return found


BERT = {**SIZES, "type_vocab_size": 2}
SPECIAL = {"bos_token_id": 1, "cls_token_id": 1, "eos_token_id": 2, "sep_token_id": SEPARATOR}
MODERN = {**SIZES, **SPECIAL, "max_position_embeddings": 256, "local_attention": 16}
XLM = {**SIZES, "pad_token_id": 1, "type_vocab_size": 1}
GEMMA = {
    **DECODER,
    "num_hidden_layers": 7,  # one in six has no window
    "use_bidirectional_attention": True,
    "sliding_window": 16,
    "query_pre_attn_scalar": 24,
}

CASES = {
    "bert, mean": TextCase("Bert", BERT),
    "bert, first token": TextCase("Bert", BERT, pooling="cls", normalise=False),
    "bert, tanh form of gelu": TextCase("Bert", {**BERT, "hidden_act": "gelu_new"}),
    "bert, dense after pooling": TextCase("Bert", BERT, dense=(24,)),
    "bert, reranker": TextCase("Bert", BERT, "score"),
    "roberta": TextCase("Roberta", {**BERT, "pad_token_id": 1}, pooling="cls"),
    "xlm-roberta": TextCase("XLMRoberta", XLM, pooling="cls", module="xlm_roberta"),
    "xlm-roberta, reranker": TextCase("XLMRoberta", XLM, "score", module="xlm_roberta"),
    "modernbert": TextCase("ModernBert", MODERN),
    "modernbert, biases": TextCase(
        "ModernBert", {**MODERN, "attention_bias": True, "mlp_bias": True, "norm_bias": True}, pooling="cls"
    ),
    "modernbert, reranker": TextCase("ModernBert", MODERN, "score"),
    "modernbert, reranker with mean": TextCase(
        "ModernBert", {**MODERN, "classifier_pooling": "mean"}, "score"
    ),
    "qwen3": TextCase("Qwen3", DECODER, pooling="last"),
    "qwen3, mean": TextCase("Qwen3", DECODER),
    "qwen3, reranker with a head": TextCase("Qwen3", DECODER, "score"),
    "qwen3, reranker with yes and no": TextCase("Qwen3", DECODER, "yes_no"),
    "qwen3, tied, yes and no": TextCase("Qwen3", {**DECODER, "tie_word_embeddings": True}, "yes_no"),
    "qwen2": TextCase("Qwen2", {**SIZES, "num_key_value_heads": 2}, pooling="last"),
    "gemma3": TextCase("Gemma3Text", GEMMA, dense=(96, 40), config="Gemma3TextConfig", module="gemma3"),
}
