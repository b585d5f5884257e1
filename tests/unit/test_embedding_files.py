"""The files beside the weights of an embedding model or a reranker: what they mean, and errors that name file and field."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from model_files import (
    F32,
    STRING,
    U32,
    entry,
    gguf,
    pair,
    safetensors,
    string,
    strings,
    tensor,
    write_folder,
)
from weft.backends.cpu.embedder import open_embedder
from weft.backends.cpu.runner import open_cpu_backend
from weft.cli.pull import pull_command
from weft.embedding import EmbeddingSpec
from weft.errors import ModelFileError
from weft.loading.checkpoint import Checkpoint, open_checkpoint
from weft.loading.embedding_files import dense_layers, embedding_spec, separator_id

CONFIG = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "vocab_size": 7,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
    "type_vocab_size": 2,
    "pad_token_id": 0,
}
QWEN = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 8,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}
TYPE = "sentence_transformers.models."


def modules(*names: str) -> bytes:
    listed = [
        {"idx": i, "path": f"{i}_{name}" if i else "", "type": TYPE + name} for i, name in enumerate(names)
    ]
    return json.dumps(listed).encode()


def layers() -> dict[str, tuple[int, ...]]:
    """The tensors of a BERT with the sizes of CONFIG."""
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (7, 8),
        "embeddings.position_embeddings.weight": (16, 8),
        "embeddings.token_type_embeddings.weight": (2, 8),
        "embeddings.LayerNorm.weight": (8,),
        "embeddings.LayerNorm.bias": (8,),
    }
    prefix = "encoder.layer.0."
    for part, shape in {
        "attention.self.query": (8, 8),
        "attention.self.key": (8, 8),
        "attention.self.value": (8, 8),
        "attention.output.dense": (8, 8),
        "attention.output.LayerNorm": (8,),
        "intermediate.dense": (12, 8),
        "output.dense": (8, 12),
        "output.LayerNorm": (8,),
    }.items():
        shapes[f"{prefix}{part}.weight"] = shape
        shapes[f"{prefix}{part}.bias"] = shape[:1]
    return shapes


def weights(shapes: dict[str, tuple[int, ...]]) -> bytes:
    header, at, numbers = {}, 0, np.random.default_rng(1)
    for name, shape in shapes.items():
        size = 4 * int(np.prod(shape))
        header[name] = entry("F32", list(shape), at, at + size)
        at += size
    return safetensors(header, numbers.standard_normal(at // 4).astype("<f4").tobytes())


def folder(path: Path, config: dict[str, Any], **files: Any) -> Path:
    """A model folder. Names of files have `_dot_` for a dot and `__` for a slash."""
    content = {"config.json": config, "model.safetensors": weights(layers())}
    content.update({name.replace("_dot_", ".").replace("__", "/"): value for name, value in files.items()})
    for name in content:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
    return write_folder(path, content)


def spec_of(path: Path) -> EmbeddingSpec | None:
    return embedding_spec(open_checkpoint(path))


PARTS = {"modules_dot_json": modules("Transformer", "Pooling", "Normalize")}


def test_an_encoder_without_further_files_takes_the_mean(tmp_path: Path) -> None:
    assert spec_of(folder(tmp_path, CONFIG)) == EmbeddingSpec("embed", "mean", 8, 16)


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"pooling_mode": "cls"}, "cls"),
        ({"pooling_mode": ["lasttoken"]}, "last"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({}, "mean"),
    ],
)
def test_pooling_has_an_old_and_a_new_spelling(config: dict[str, Any], pooling: str, tmp_path: Path) -> None:
    spec = spec_of(folder(tmp_path, CONFIG, **{**PARTS, "1_Pooling__config_dot_json": config}))
    assert spec is not None and spec.pooling == pooling and spec.normalise


def test_prompts_lengths_and_dense_layers_are_read(tmp_path: Path) -> None:
    linear = {
        "in_features": 8,
        "out_features": 3,
        "bias": False,
        "activation_function": "torch.nn.modules.activation.Tanh",
    }
    path = folder(
        tmp_path,
        CONFIG,
        modules_dot_json=modules("Transformer", "Pooling", "Dense"),
        **{
            "1_Pooling__config_dot_json": {"pooling_mode": "mean"},
            "2_Dense__config_dot_json": linear,
            "2_Dense__model_dot_safetensors": weights({"linear.weight": (3, 8)}),
            "sentence_bert_config_dot_json": {"max_seq_length": 12, "do_lower_case": True},
            "config_sentence_transformers_dot_json": {
                "prompts": {"query": "q: ", "passage": "p: "},
                "default_prompt_name": "query",
            },
        },
    )
    spec = spec_of(path)
    assert spec is not None
    assert (spec.dimensions, spec.max_tokens, spec.normalise, spec.lower_case) == (3, 12, False, True)
    assert spec.prompts == {"query": "q: ", "passage": "p: ", "document": "p: ", "default": "q: "}
    [layer] = dense_layers(open_checkpoint(path))
    assert layer.activation == "tanh" and layer.weight.shape == (3, 8)
    assert open_embedder(path, dtype=np.float32).spec == spec


def test_positions_and_the_tokenizer_limit_the_longest_input(tmp_path: Path) -> None:
    tokenizer = {"tokenizer_config_dot_json": {"model_max_length": 10**30}}
    roberta = {**CONFIG, "model_type": "roberta", "pad_token_id": 1}
    assert spec_of(folder(tmp_path / "a", roberta, **tokenizer)).max_tokens == 14  # type: ignore[union-attr]
    short = {"tokenizer_config_dot_json": {"model_max_length": 9}}
    assert spec_of(folder(tmp_path / "b", CONFIG, **short)).max_tokens == 9  # type: ignore[union-attr]


def test_a_classifier_with_one_label_is_a_reranker(tmp_path: Path) -> None:
    config = {**CONFIG, "architectures": ["BertForSequenceClassification"], "id2label": {"0": "score"}}
    spec = spec_of(folder(tmp_path / "a", config))
    assert spec is not None and (spec.kind, spec.pooling, spec.dimensions) == ("rerank", "cls", 1)
    assert spec.activation == "sigmoid" and not spec.normalise
    raw = {**config, "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}
    assert spec_of(folder(tmp_path / "b", raw)).activation == "none"  # type: ignore[union-attr]


def test_models_that_generate_text_are_no_embedding_models(tmp_path: Path) -> None:
    path = folder(tmp_path / "chat", QWEN)
    assert spec_of(path) is None
    with pytest.raises(ModelFileError, match="neither an embedding model nor a reranker"):
        open_embedder(path)


def test_qwen3_reranker_is_known_by_its_name_or_its_modules(tmp_path: Path) -> None:
    tokenizer = {"tokenizer_dot_json": {"model": {"vocab": {"yes": 9, "no": 4}}}}
    spec = spec_of(folder(tmp_path / "Qwen3-Reranker-0.6B", QWEN, **tokenizer))
    assert spec is not None and (spec.kind, spec.yes_no, spec.pooling) == ("rerank", (9, 4), "last")
    score = {
        "modules_dot_json": modules("Transformer", "LogitScore"),
        "1_LogitScore__config_dot_json": {"true_token_id": 3, "false_token_id": 5},
    }
    assert spec_of(folder(tmp_path / "other", QWEN, **score)).yes_no == (3, 5)  # type: ignore[union-attr]
    with pytest.raises(ModelFileError, match=r"tokenizer.json: vocab: .*'yes'"):
        spec_of(folder(tmp_path / "qwen3-reranker", QWEN, tokenizer_dot_json={"model": {"vocab": {}}}))


POOLED = {**PARTS, "1_Pooling__config_dot_json": {"pooling_mode": "mean"}}
BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "unknown pooling": (CONFIG, {**PARTS, "1_Pooling__config_dot_json": {"pooling_mode": "max"}}, r"1_Pooling/config.json: pooling_mode: 'max'"),
    "two poolings": (CONFIG, {**PARTS, "1_Pooling__config_dot_json": {"pooling_mode": ["cls", "mean"]}}, "pooling_mode"),
    "no pooling file": (CONFIG, PARTS, r"1_Pooling/config.json: .*does not exist"),
    "unknown module": (CONFIG, {"modules_dot_json": modules("Transformer", "LSTM")}, r"modules.json: type: the module 'LSTM'"),
    "modules in a wrong order": (CONFIG, {"modules_dot_json": modules("Pooling", "Transformer"), "0_Pooling__x": b""}, "modules.json|config.json"),
    "modules that are no list": (CONFIG, {"modules_dot_json": b"{}"}, "modules.json: modules"),
    "modules that are no JSON": (CONFIG, {"modules_dot_json": b"[{]"}, "modules.json"),
    "a module outside": (CONFIG, {"modules_dot_json": b'[{"type": "a.Transformer", "path": "../../etc"}]'}, "modules.json: path"),
    "no pooling": (CONFIG, {"modules_dot_json": modules("Transformer", "Normalize")}, "there is no Pooling"),
    "prompts left out of pooling": (
        CONFIG,
        {
            **PARTS,
            "1_Pooling__config_dot_json": {"include_prompt": False},
            "config_sentence_transformers_dot_json": {"prompts": {"query": "q"}},
        },
        "include_prompt",
    ),
    "prompts that are no texts": (CONFIG, {**POOLED, "config_sentence_transformers_dot_json": {"prompts": {"query": 3}}}, "prompts"),
    "an unknown default prompt": (CONFIG, {**POOLED, "config_sentence_transformers_dot_json": {"default_prompt_name": "x"}}, "default_prompt_name"),
    "a longest input of 0": (CONFIG, {**POOLED, "sentence_bert_config_dot_json": {"max_seq_length": 0}}, "max_seq_length"),
    "a case that is a number": (CONFIG, {**POOLED, "sentence_bert_config_dot_json": {"do_lower_case": 1}}, "do_lower_case"),
    "a hidden size of text": ({**CONFIG, "hidden_size": "8"}, {}, "config.json: hidden_size"),
    "three labels": ({**CONFIG, "architectures": ["BertForSequenceClassification"], "num_labels": 3}, {}, "num_labels: .*3"),
    "pickled dense weights": (
        CONFIG,
        {
            **POOLED,
            "modules_dot_json": modules("Transformer", "Pooling", "Dense"),
            "2_Dense__config_dot_json": {"in_features": 8, "out_features": 3},
            "2_Dense__pytorch_model_dot_bin": b"x",
        },
        "pickle",
    ),
    "dense weights of a wrong shape": (
        CONFIG,
        {
            **POOLED,
            "modules_dot_json": modules("Transformer", "Pooling", "Dense"),
            "2_Dense__config_dot_json": {"in_features": 8, "out_features": 3, "bias": False},
            "2_Dense__model_dot_safetensors": weights({"linear.weight": (4, 8)}),
        },
        r"linear.weight: has shape \(4, 8\), config.json requires \(3, 8\)",
    ),
    "an activation that is unknown": ({**CONFIG, "hidden_act": "mish"}, {}, "hidden_act: 'mish'"),
    "relative positions": ({**CONFIG, "position_embedding_type": "relative_key"}, {}, "position_embedding_type"),
    "heads that do not divide": ({**CONFIG, "num_attention_heads": 3}, {}, "num_attention_heads"),
    "another architecture": ({**CONFIG, "model_type": "mpnet"}, {**POOLED}, "model_type: 'mpnet'"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_wrong_file_is_an_error_that_names_the_field(name: str, tmp_path: Path) -> None:
    config, files, message = BAD[name]
    with pytest.raises(ModelFileError, match=message) as error:
        open_embedder(folder(tmp_path / "model", config, **files), dtype=np.float32)
    assert str(tmp_path / "model") in str(error.value)


@pytest.mark.parametrize("missing", sorted(layers()))
def test_a_missing_or_misshapen_tensor_is_an_error_that_names_it(missing: str, tmp_path: Path) -> None:
    shapes = layers()
    wrong = {**shapes, missing: (*shapes[missing][:-1], shapes[missing][-1] + 1)}
    rest = {name: shape for name, shape in shapes.items() if name != missing}
    for content in (wrong, rest):
        path = folder(tmp_path / str(len(content)), CONFIG, model_dot_safetensors=weights(content))
        # Without its table, a model has no token types.
        if "token_type" in missing and content is rest:
            open_embedder(path, dtype=np.float32)
            continue
        with pytest.raises(ModelFileError, match=missing.replace(".", r"\.")):
            open_embedder(path, dtype=np.float32)


def test_a_tensor_that_is_not_used_is_an_error(tmp_path: Path) -> None:
    content = weights({**layers(), "encoder.layer.0.adapter.weight": (2, 2)})
    with pytest.raises(ModelFileError, match=r"encoder\.layer\.0\.adapter\.weight: weft does not use"):
        open_embedder(folder(tmp_path, CONFIG, model_dot_safetensors=content), dtype=np.float32)


def test_positions_that_are_numbers_are_ignored_wherever_they_are_stored(tmp_path: Path) -> None:
    header = {"embeddings.position_ids": entry("I64", [1, 2], 0, 16), "x": entry("F32", [1], 16, 20)}
    (tmp_path / "a").mkdir()
    from weft.loading.safetensors import read_safetensors

    (tmp_path / "a" / "model.safetensors").write_bytes(safetensors(header, bytes(20)))
    assert set(read_safetensors(tmp_path / "a" / "model.safetensors")) == set(header)
    bad = {"other": entry("I64", [1, 2], 0, 16)}
    (tmp_path / "b.safetensors").write_bytes(safetensors(bad, bytes(16)))
    with pytest.raises(ModelFileError, match="I64"):
        read_safetensors(tmp_path / "b.safetensors")


def gguf_file(path: Path, name: str, pooling: bytes | None, *more: bytes) -> Path:
    pairs = [
        pair("general.architecture", STRING, string(name)),
        pair(f"{name}.context_length", U32, (16).to_bytes(4, "little")),
        pair(f"{name}.embedding_length", U32, (8).to_bytes(4, "little")),
        pair("tokenizer.ggml.model", STRING, string("gpt2")),
        strings("tokenizer.ggml.tokens", ["a", "yes", "no"]),
        *more,
    ]
    if pooling is not None:
        pairs.append(pair(f"{name}.pooling_type", U32, pooling))
    path.write_bytes(gguf(pairs, [tensor("x", [4], F32, 0)], bytes(32)))
    return path


def test_the_pooling_type_of_a_gguf_file_says_what_the_model_computes(tmp_path: Path) -> None:
    def of(name: str, number: int | None) -> EmbeddingSpec | None:
        raw = None if number is None else number.to_bytes(4, "little")
        return spec_of(gguf_file(tmp_path / f"{name}{number}.gguf", name, raw))

    assert of("bert", 2) == EmbeddingSpec("embed", "cls", 8, 16)
    assert of("bert", None) == EmbeddingSpec("embed", "mean", 8, 16)
    assert of("qwen3", 3) == EmbeddingSpec("embed", "last", 8, 16)
    assert of("qwen3", None) is None
    rank = of("qwen3", 4)
    assert rank is not None and (rank.kind, rank.yes_no) == ("rerank", (1, 2))
    with pytest.raises(ModelFileError, match=r"bert\.pooling_type: 9"):
        of("bert", 9)


def test_weft_pull_checks_an_embedding_model_and_weft_generate_says_what_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder(tmp_path / "model", CONFIG)
    pull_command(str(path))
    assert capsys.readouterr().out.strip() == str(path)
    with pytest.raises(ModelFileError, match="'BertModel' is not supported; it is an embedding model"):
        open_cpu_backend(str(path))
    bad = folder(tmp_path / "bad", {**CONFIG, "hidden_act": "mish"})
    with pytest.raises(ModelFileError, match="hidden_act"):
        pull_command(str(bad))


def test_a_reranker_needs_its_head_and_no_more_than_that(tmp_path: Path) -> None:
    config = {**CONFIG, "architectures": ["BertForSequenceClassification"], "num_labels": 1}
    tokenizer = {
        "tokenizer_config_dot_json": {"sep_token": "[SEP]"},
        "tokenizer_dot_json": {"added_tokens": [{"id": 3, "content": "[SEP]"}]},
    }

    def opened(name: str, **tensors: tuple[int, ...]) -> EmbeddingSpec:
        named = {key.replace("__", "."): shape for key, shape in tensors.items()}
        content = {f"bert.{key}": shape for key, shape in layers().items()} | named
        path = folder(tmp_path / name, config, model_dot_safetensors=weights(content), **tokenizer)
        return open_embedder(path, dtype=np.float32).spec

    out = {"classifier__weight": (1, 8), "classifier__bias": (1,)}
    assert opened("plain", **out).kind == "rerank"
    with pytest.raises(ModelFileError, match=r"classifier\.weight: the tensor is missing"):
        opened("none")
    with pytest.raises(ModelFileError, match=r"classifier\.weight: makes 2 numbers, .* say 1"):
        opened("two", classifier__weight=(2, 8))
    with pytest.raises(ModelFileError, match=r"classifier\.weight: has shape \(1, 9\)"):
        opened("wide", classifier__weight=(1, 9))
    missing = tmp_path / "plain" / "tokenizer_config.json"
    missing.unlink()
    with pytest.raises(ModelFileError, match="sep_token: missing"):
        open_embedder(tmp_path / "plain", dtype=np.float32)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["mean", "cls", "1_Pooling"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
MODULE = st.fixed_dictionaries(
    {},
    optional={
        "type": VALUES | st.sampled_from([TYPE + name for name in ("Transformer", "Pooling", "Dense", "Normalize", "LogitScore")]),
        "path": VALUES | st.sampled_from(["", "1_Pooling"]),
    },
)  # fmt: skip
KEYS = (
    "architectures", "model_type", "hidden_size", "max_position_embeddings", "pad_token_id", "num_labels", "id2label",
    "classifier_pooling", "sentence_transformers", "pooling_mode", "pooling_mode_cls_token", "include_prompt", "prompts",
    "default_prompt_name", "max_seq_length", "model_max_length", "in_features", "out_features", "true_token_id", "vocab_size",
    "false_token_id", "activation_function", "bias", "sep_token", "added_tokens", "model",
)  # fmt: skip
OBJECT = st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=5)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    config=OBJECT,
    listed=st.lists(MODULE, max_size=4) | VALUES,
    files=st.dictionaries(
        st.sampled_from(
            ["1_Pooling/config.json", "config_sentence_transformers.json", "sentence_bert_config.json",
             "tokenizer_config.json", "tokenizer.json"]
        ),
        OBJECT,
    ),
)  # fmt: skip
def test_any_content_of_the_files_is_a_model_or_a_clear_error(
    config: dict[str, Any], listed: Any, files: dict[str, Any], tmp_path: Path
) -> None:
    with tempfile.TemporaryDirectory(dir=tmp_path) as name:
        path = Path(name)
        (path / "1_Pooling").mkdir()
        (path / "modules.json").write_text(json.dumps(listed))
        for file, content in files.items():
            (path / file).write_text(json.dumps(content))
        checkpoint = Checkpoint(path, "huggingface", {**CONFIG, **config}, {}, frozenset())
        for read in (embedding_spec, dense_layers, separator_id):
            try:
                read(checkpoint)
            except ModelFileError as error:
                assert str(path) in str(error)
