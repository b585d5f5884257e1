"""Every architecture and every kind of RoPE scaling against transformers, on small random checkpoints.

A text has 164 tokens: a prompt longer than chunks, blocks, windows and the original context, and 64 greedy tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files import write_gguf
from small_models import (
    NEW_TOKENS,
    PROMPT_LENGTH,
    SIZES,
    VOCABULARY,
    WIDE_HEADS,
    Case,
    Reader,
    build_model,
    generate,
    logits_in_a_batch,
    logits_of,
    save,
    transformers_in_float64,
)

from weft.models.architectures import ARCHITECTURES
from weft.models.registry import build_config, build_decoder
from weft.ops.reference import ReferenceOps

TIE = 1e-4

SHORT_FACTORS = [1.0 + 0.1 * pair for pair in range(12)]
LONG_FACTORS = [1.0 + 0.9 * pair for pair in range(12)]


def rope(kind: str, **options: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **options}}


def longrope(original: int, pairs: int = 12, **options: Any) -> dict[str, Any]:
    factors = {"short_factor": SHORT_FACTORS[:pairs], "long_factor": LONG_FACTORS[:pairs]}
    return rope("longrope", original_max_position_embeddings=original, **factors, **options)


EXPERTS = {"num_experts_per_tok": 2}

CASES = {
    "llama": Case("Llama", {**WIDE_HEADS, **rope("default", rope_theta=5_000.0)}),
    "llama, tied": Case("Llama", {**SIZES, "tie_word_embeddings": True}),
    "llama, biases": Case("Llama", {**WIDE_HEADS, "attention_bias": True, "mlp_bias": True}),
    "llama, linear": Case("Llama", {**WIDE_HEADS, **rope("linear", factor=4.0)}),
    "llama, llama3": Case(
        "Llama",
        {
            **WIDE_HEADS,
            **rope(
                "llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=32,
            ),
        },
    ),
    "llama, yarn": Case(
        "Llama", {**WIDE_HEADS, **rope("yarn", factor=4.0, original_max_position_embeddings=32)}
    ),
    "llama, yarn, all options": Case(
        "Llama",
        {
            **WIDE_HEADS,
            **rope(
                "yarn",
                factor=8.0,
                original_max_position_embeddings=64,
                beta_fast=4.0,
                beta_slow=0.5,
                mscale=0.7,
                mscale_all_dim=1.3,
                truncate=False,
            ),
        },
    ),
    "llama, yarn, attention factor": Case(
        "Llama",
        {
            **WIDE_HEADS,
            **rope("yarn", factor=4.0, original_max_position_embeddings=32, attention_factor=1.3),
        },
    ),
    "llama, longrope, long": Case("Llama", {**WIDE_HEADS, **longrope(64)}),
    "llama, longrope, short": Case("Llama", {**WIDE_HEADS, **longrope(256)}, max_context=200),
    "llama, longrope, attention factor": Case(
        "Llama", {**WIDE_HEADS, **longrope(64, attention_factor=1.2, factor=8.0)}
    ),
    "mistral": Case("Mistral", {**WIDE_HEADS, "sliding_window": 24}),
    "mistral, no window": Case("Mistral", {**WIDE_HEADS, "sliding_window": None}),
    "smollm": Case("Llama", {**SIZES, "num_attention_heads": 8, "tie_word_embeddings": True}),
    "qwen2": Case("Qwen2", {**SIZES, "num_key_value_heads": 1, **rope("default", rope_theta=1e6)}),
    "qwen2, window in the last layers": Case(
        "Qwen2", {**SIZES, "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
    ),
    "qwen2, yarn": Case("Qwen2", {**SIZES, **rope("yarn", factor=4.0, original_max_position_embeddings=32)}),
    "qwen3": Case("Qwen3", {**WIDE_HEADS, "tie_word_embeddings": True}),
    "qwen3, biases and layer types": Case(
        "Qwen3",
        {
            **WIDE_HEADS,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 33,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "phi3": Case("Phi3", {**SIZES, "sliding_window": 24}),
    "phi3, longrope, part of the head": Case(
        "Phi3",
        {
            **SIZES,
            "original_max_position_embeddings": 64,
            **longrope(64, pairs=6, partial_rotary_factor=0.75),
        },
    ),
    "granite": Case(
        "Granite",
        {
            **SIZES,
            "attention_bias": True,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.15,
            "logits_scaling": 5.0,
        },
    ),
    "olmo2": Case("Olmo2", {**SIZES, **rope("default", rope_theta=500_000.0)}),
    "gemma2": Case(
        "Gemma2",
        {
            **WIDE_HEADS,
            "num_hidden_layers": 4,
            "sliding_window": 24,
            "query_pre_attn_scalar": 10,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 4.0,
        },
    ),
    "gemma3": Case(
        "Gemma3",
        {
            **WIDE_HEADS,
            "num_hidden_layers": 7,
            "sliding_window": 24,
            "query_pre_attn_scalar": 30,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5_000.0},
            },
        },
        config="Gemma3TextConfig",
    ),
    "mixtral": Case("Mixtral", {**WIDE_HEADS, **EXPERTS, "num_local_experts": 5, "sliding_window": 24}),
    "mixtral, no window": Case("Mixtral", {**WIDE_HEADS, **EXPERTS, "num_local_experts": 5}),
    "qwen3 moe": Case(
        "Qwen3Moe",
        {**WIDE_HEADS, **EXPERTS, "num_experts": 6, "moe_intermediate_size": 40, "norm_topk_prob": True},
        module="qwen3_moe",
    ),
    "qwen3 moe, not normalised": Case(
        "Qwen3Moe",
        {**WIDE_HEADS, **EXPERTS, "num_experts": 6, "moe_intermediate_size": 40, "norm_topk_prob": False},
        module="qwen3_moe",
    ),
}


def relative_error(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


@pytest.mark.parametrize(("chunk", "block_size"), [(7, 8), (32, 16)])
@pytest.mark.parametrize("name", CASES)
def test_logits_and_greedy_text_equal_transformers(
    name: str, chunk: int, block_size: int, tmp_path: Path
) -> None:
    case = CASES[name]
    model = build_model(case)
    checkpoint = save(model, tmp_path)
    decoder = build_decoder(
        "huggingface", checkpoint.config, checkpoint.sources, ReferenceOps(), case.max_context
    )
    tokens, ours = generate(decoder, chunk, block_size)
    theirs = logits_of(model, tokens)
    error = relative_error(ours, theirs)
    print(f"{name}, chunks of {chunk}: relative error {error:.1e}")
    assert error <= 1e-4
    last = np.sort(theirs[PROMPT_LENGTH - 1 : -1], axis=1)
    best = theirs[PROMPT_LENGTH - 1 : -1].argmax(axis=1)
    for index in range(NEW_TOKENS):
        is_tie = last[index, -1] - last[index, -2] <= TIE
        assert tokens[PROMPT_LENGTH + index] == best[index] or is_tie, f"token {index}"


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers_to_the_last_digits_of_float64(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    with transformers_in_float64(case):
        model = build_model(case)
        checkpoint = save(model, tmp_path)
        decoder = build_decoder(
            "huggingface", checkpoint.config, checkpoint.sources, ReferenceOps(np.float64), case.max_context
        )
        tokens, ours = generate(decoder, 23, 8)
        error = relative_error(ours, logits_of(model.double(), tokens))
    print(f"{name}: relative error {error:.1e}")
    assert error <= 1e-10


# Cases that GGUF can express. It has no key for the windows of Mistral and Qwen2 and query_pre_attn_scalar of Gemma.
GGUF_CASES = {
    **{
        name: CASES[name]
        for name in (
            "llama",
            "llama, tied",
            "llama, biases",
            "llama, linear",
            "llama, llama3",
            "llama, yarn",
            "llama, yarn, attention factor",
            "mistral, no window",
            "qwen2",
            "qwen2, yarn",
            "qwen3",
            "qwen3 moe",
            "mixtral, no window",
            "phi3",
            "phi3, longrope, part of the head",
            "granite",
            "olmo2",
        )
    },
    **{
        name: Case(
            CASES[name].model, {**CASES[name].options, "query_pre_attn_scalar": 24}, config=CASES[name].config
        )
        for name in ("gemma2", "gemma3")
    },
}


@pytest.mark.parametrize("name", GGUF_CASES)
def test_a_gguf_file_gives_the_logits_of_its_source_checkpoint(name: str, tmp_path: Path) -> None:
    case = GGUF_CASES[name]
    checkpoint = save(build_model(case), tmp_path)
    file = write_gguf(checkpoint, tmp_path / "model.gguf")
    ops = ReferenceOps(np.float64)
    tokens, expected = generate(
        build_decoder("huggingface", checkpoint.config, checkpoint.sources, ops), 32, 16
    )
    reader = Reader(build_decoder("gguf", file.metadata, file.tensors, ops), len(tokens), 16)
    error = relative_error(reader.feed(tokens), expected)
    print(f"{name}: relative error {error:.1e}")
    # Not exact: GGUF stores the numbers of the configuration in float32.
    assert error <= 1e-4


@pytest.mark.parametrize("name", ["mistral", "gemma3", "phi3, longrope, part of the head", "mixtral"])
def test_logits_do_not_depend_on_the_rest_of_the_batch_or_on_chunks(name: str, tmp_path: Path) -> None:
    """In float64: each text alone in one step, against chunks and single tokens of four texts in common steps."""
    case = CASES[name]
    checkpoint = save(build_model(case), tmp_path)
    decoder = build_decoder("huggingface", checkpoint.config, checkpoint.sources, ReferenceOps(np.float64))
    rng = np.random.default_rng(4)
    texts = [rng.integers(1, VOCABULARY, length).tolist() for length in (100, 41, 9, 66)]
    plan = [[50, 40, 0, 7], [0, 1, 8, 7], [49, 0, 0, 7], [1, 0, 1, 45]]
    together = logits_in_a_batch(decoder, texts, plan, 8)
    for text, ours in zip(texts, together, strict=True):
        (alone,) = logits_in_a_batch(decoder, [text], [[len(text)]], 8)
        assert relative_error(ours, alone) <= 1e-12


# --- fields that are missing in config.json -----------------------------------------------------------------------

CLASSES = {entry.class_name: entry.model_type for entry in ARCHITECTURES}


def class_defaults(model_type: str, **options: Any) -> dict[str, Any]:
    import transformers

    return transformers.AutoConfig.for_model(model_type, **options).to_dict()


@pytest.mark.parametrize("windows", [{}, {"use_sliding_window": True}])
@pytest.mark.parametrize("class_name", CLASSES)
def test_a_missing_field_has_the_default_of_the_transformers_class(
    class_name: str, windows: dict[str, bool]
) -> None:
    """Files with all fields, with no fields, and with each single field missing."""
    written = {**class_defaults(CLASSES[class_name], **windows), "architectures": [class_name]}
    expected = build_config("huggingface", written, {})
    assert build_config("huggingface", {"architectures": [class_name], **windows}, {}) == expected
    for key in written.keys() - {"architectures", "use_sliding_window"}:
        rest = {name: value for name, value in written.items() if name != key}
        assert build_config("huggingface", rest, {}) == expected, key


@pytest.mark.parametrize("class_name", CLASSES)
def test_a_config_without_default_fields_gives_the_logits_of_transformers(
    class_name: str, tmp_path: Path
) -> None:
    import transformers

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 112, "num_hidden_layers": 2}
    experts = {"num_experts": 12, "moe_intermediate_size": 40} if class_name.startswith("Qwen3Moe") else {}
    model_type = CLASSES[class_name]
    config_class = type(transformers.AutoConfig.for_model(model_type)).__name__
    case = Case(
        class_name.removesuffix("ForCausalLM"), {**sizes, **experts, "pad_token_id": 0}, config=config_class
    )
    checkpoint = save(build_model(case), tmp_path)
    defaults = class_defaults(model_type)
    kept = {key: value for key, value in checkpoint.config.items() if value != defaults.get(key, "none")}
    assert "rms_norm_eps" not in kept and "num_attention_heads" not in kept
    (tmp_path / "config.json").write_text(json.dumps({**kept, "model_type": model_type}))
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    decoder = build_decoder("huggingface", kept, checkpoint.sources, ReferenceOps())
    tokens, ours = generate(decoder, 32, 16)
    assert relative_error(ours, logits_of(reference, tokens)) <= 1e-4


@pytest.mark.parametrize("same", [True, False])
def test_an_output_layer_in_a_file_with_tied_embeddings_is_used_as_in_transformers(
    same: bool, tmp_path: Path
) -> None:
    import transformers
    from safetensors.numpy import save_file

    checkpoint = save(build_model(CASES["llama, tied"]), tmp_path)
    embedding = checkpoint.tensors["model.embed_tokens.weight"]
    checkpoint.tensors["lm_head.weight"] = embedding.copy() if same else embedding[::-1].copy()
    save_file(checkpoint.tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    decoder = build_decoder("huggingface", checkpoint.config, checkpoint.sources, ReferenceOps())
    tokens, ours = generate(decoder, 32, 16)
    assert relative_error(ours, logits_of(reference, tokens)) <= 1e-4
