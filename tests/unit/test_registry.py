"""Building a `ModelConfig` from the metadata of both layouts: older keys, rope scaling, windows, invalid values."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from array_source import ArraySource
from weft.errors import ModelFileError
from weft.models.architectures import ARCHITECTURES
from weft.models.config import ModelConfig
from weft.models.names import decoder_name, file_name
from weft.models.registry import build_config, build_decoder, find_architecture
from weft.ops.base import AttentionPattern, Rope
from weft.ops.reference import ReferenceOps

LLAMA_JSON: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 500.0,
    "tie_word_embeddings": False,
}
MISTRAL = {"architectures": ["MistralForCausalLM"]}
LLAMA_GGUF: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.vocab_size": 50,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 48,
    "llama.block_count": 2,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.context_length": 128,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 500.0,
}


def source(*shape: int) -> ArraySource:
    return ArraySource(np.ones(shape, np.float32))


def llama_tensors() -> dict[str, ArraySource]:
    tensors = {
        "model.embed_tokens.weight": source(50, 32),
        "model.norm.weight": source(32),
        "lm_head.weight": source(50, 32),
    }
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        tensors |= {
            prefix + "input_layernorm.weight": source(32),
            prefix + "self_attn.q_proj.weight": source(32, 32),
            prefix + "self_attn.k_proj.weight": source(16, 32),
            prefix + "self_attn.v_proj.weight": source(16, 32),
            prefix + "self_attn.o_proj.weight": source(32, 32),
            prefix + "post_attention_layernorm.weight": source(32),
            prefix + "mlp.gate_proj.weight": source(48, 32),
            prefix + "mlp.up_proj.weight": source(48, 32),
            prefix + "mlp.down_proj.weight": source(32, 48),
        }
    return tensors


def mistral(max_context: int | None = None, **changes: Any) -> ModelConfig:
    return from_json(max_context, **MISTRAL, **changes)


def from_json(max_context: int | None = None, **changes: Any) -> ModelConfig:
    return build_config("huggingface", {**LLAMA_JSON, **changes}, llama_tensors(), max_context)


def from_gguf(tensors: dict[str, ArraySource] | None = None, **changes: Any) -> ModelConfig:
    """LLAMA_GGUF with changed keys. A keyword has two underscores for each dot, and omits the prefix "llama."."""
    named = {f"llama.{key.replace('__', '.')}": value for key, value in changes.items()}
    return build_config("gguf", {**LLAMA_GGUF, **named}, {"output.weight": source(50, 32), **(tensors or {})})


def build(tensors: dict[str, ArraySource], **changes: Any) -> Any:
    return build_decoder("huggingface", {**LLAMA_JSON, **changes}, tensors, ReferenceOps())


# --- finding the architecture -----------------------------------------------------------------------------------


def test_both_layouts_describe_the_same_model() -> None:
    config = from_json()
    rope = Rope(tuple(500.0 ** (-pair / 4) for pair in range(4)), interleaved=False)
    assert config.patterns == (AttentionPattern(rope),)
    interleaved = replace(config, patterns=(AttentionPattern(replace(rope, interleaved=True)),))
    assert from_gguf() == interleaved


@pytest.mark.parametrize(
    ("layout", "metadata", "field"),
    [
        ("gguf", {"general.architecture": "mamba"}, "general.architecture: 'mamba'"),
        ("gguf", {}, "general.architecture: None"),
        ("huggingface", {"architectures": ["GPT2LMHeadModel"]}, "architectures: 'GPT2LMHeadModel'"),
        ("huggingface", {"model_type": "gpt2"}, "model_type: 'gpt2'"),
        ("huggingface", {"architectures": [], "model_type": ["llama"]}, r"model_type: \['llama'\]"),
    ],
)
def test_an_unknown_architecture_is_refused_with_the_list_of_known_ones(
    layout: Any, metadata: dict[str, Any], field: str
) -> None:
    with pytest.raises(
        ModelFileError, match=f"{field} is not supported; weft supports .*(llama|Llama).*(qwen2|Qwen2)"
    ):
        build_config(layout, metadata, {})


AUTO_MAP = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.Own"}


def test_an_architecture_that_needs_its_own_code_is_refused() -> None:
    own = {"architectures": ["OwnForCausalLM"], "auto_map": AUTO_MAP}
    with pytest.raises(ModelFileError, match=r"'OwnForCausalLM' is not supported; .*never runs code"):
        find_architecture("huggingface", own)


def test_code_in_the_folder_of_a_supported_architecture_is_ignored() -> None:
    phi = {"architectures": ["Phi3ForCausalLM"], "auto_map": AUTO_MAP}
    assert find_architecture("huggingface", phi).model_type == "phi3"


def test_every_architecture_is_found_by_each_of_its_names() -> None:
    for entry in ARCHITECTURES:
        config = build_config("huggingface", {"architectures": [entry.class_name]}, {})
        assert config == build_config("huggingface", {"model_type": entry.model_type}, {})
        assert config.architecture == entry.gguf_name
        with pytest.raises(ModelFileError, match=f"{entry.gguf_name}.*missing"):
            build_config("gguf", {"general.architecture": entry.gguf_name}, {})


# --- tensors ----------------------------------------------------------------------------------------------------


def test_tensor_names_of_a_file_are_mapped_to_the_decoders_names() -> None:
    assert decoder_name("gguf", "token_embd.weight") == "embedding"
    assert decoder_name("gguf", "blk.17.attn_q.weight") == "layers.17.wq"
    assert decoder_name("gguf", "blk.0.attn_q.bias") == "layers.0.wq.bias"
    assert decoder_name("gguf", "blk.x.attn_q.weight") is None
    assert decoder_name("gguf", "blk.01.attn_q.weight") is None
    assert decoder_name("gguf", "blk.0.attn_q.weight\n") is None
    assert decoder_name("huggingface", "model.layers.3.mlp.down_proj.weight") == "layers.3.w_down"
    assert decoder_name("huggingface", "layers.3.mlp.down_proj.weight") is None
    name = "model.layers.3.post_attention_layernorm.weight"
    assert decoder_name("huggingface", name) == "layers.3.feed_forward_norm"
    renamed = {"post_attention_layernorm": "attention_post_norm"}
    assert decoder_name("huggingface", name, renamed) == "layers.3.attention_post_norm"


def test_the_decoders_names_are_mapped_back_to_the_names_of_the_file() -> None:
    renamed = {"post_attention_layernorm": "attention_post_norm"}
    for name in (
        "lm_head.weight",
        "model.layers.3.self_attn.q_proj.bias",
        "model.layers.3.post_attention_layernorm.weight",
        "model.layers.3.pre_feedforward_layernorm.weight",
    ):
        assert file_name("huggingface", decoder_name("huggingface", name, renamed) or "", renamed) == name
    assert file_name("gguf", "layers.3.w_gate_up", {"ffn_up": "w_gate_up"}) == "blk.3.ffn_up.weight"
    assert file_name("huggingface", "unknown.name", {}) == "unknown.name"


def test_the_bytes_of_the_weights_are_counted() -> None:
    layer = 32 * (32 + 16 + 16 + 32) + 3 * 32 * 48 + 2 * 32
    decoder = build(llama_tensors())
    assert decoder.weight_bytes == 4 * (2 * layer + 32 + 2 * 50 * 32)
    assert decoder.config.multiplications_per_token == 2 * (layer - 2 * 32)


def test_an_lm_head_in_the_file_is_used_even_if_the_metadata_says_tied() -> None:
    tensors = {**llama_tensors(), "lm_head.weight": ArraySource(np.full((50, 32), 2.0, np.float32))}
    for tied in (True, False):
        logits = build(tensors, tie_word_embeddings=tied).logits(np.ones((1, 32), np.float32))
        np.testing.assert_array_equal(logits, np.full((1, 50), 64.0))


def test_the_embedding_is_tied_only_if_the_metadata_says_so_or_gguf_has_no_lm_head() -> None:
    tensors = llama_tensors()
    whole = build(tensors).weight_bytes
    del tensors["lm_head.weight"]
    assert build(tensors, tie_word_embeddings=True).weight_bytes == whole - 4 * 50 * 32
    with pytest.raises(ModelFileError, match=r"^lm_head.weight: the tensor is missing from the file"):
        build(tensors)
    assert not from_gguf().tied_embedding
    assert build_config("gguf", LLAMA_GGUF, {}).tied_embedding


def test_rope_frequencies_stored_in_old_checkpoints_are_ignored() -> None:
    tensors = llama_tensors()
    tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = source(4)
    build(tensors)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.2.input_layernorm.weight",
        "lm_head.bias",
        "surprise",
    ],
)
def test_the_error_names_an_unused_tensor(name: str) -> None:
    tensors = {**llama_tensors(), name: source(32)}
    with pytest.raises(ModelFileError, match=f"{name}: weft does not use this tensor"):
        build(tensors, attention_bias=False)


def test_the_error_names_a_missing_tensor_and_one_of_another_shape() -> None:
    tensors = llama_tensors()
    tensors["model.layers.1.mlp.up_proj.weight"] = source(40, 32)
    with pytest.raises(
        ModelFileError, match=r"^model.layers.1.mlp.up_proj.weight: has shape \(40, 32\).*requires \(48, 32\)"
    ):
        build(tensors)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ModelFileError, match=r"^model.layers.1.mlp.up_proj.weight: the tensor is missing"):
        build(tensors)


def test_biases_of_the_first_layer_are_required_in_all_layers() -> None:
    tensors = llama_tensors()
    tensors["model.layers.0.self_attn.q_proj.bias"] = source(32)
    with pytest.raises(ModelFileError, match=r"^model.layers.0.self_attn.k_proj.bias: the tensor is missing"):
        build(tensors)


# --- rotary embedding -------------------------------------------------------------------------------------------


YARN = {"factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {**YARN, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {
    "original_max_position_embeddings": 64,
    "short_factor": [1.0, 2.0, 3.0, 4.0],
    "long_factor": [5.0, 6.0, 7.0, 8.0],
}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("linear", {"factor": 2.0}),
        ("yarn", YARN),
        ("llama3", LLAMA3),
        ("longrope", LONGROPE),
        ("default", {}),
    ],
)
def test_the_older_keys_of_rope_scaling_mean_the_same(kind: str, options: dict[str, Any]) -> None:
    new = from_json(rope_theta=None, rope_parameters={"rope_type": kind, "rope_theta": 500.0, **options})
    assert from_json(rope_scaling={"rope_type": kind, **options}) == new
    assert from_json(rope_scaling={"type": kind, **options}) == new
    assert from_json(rope_parameters={"rope_type": kind, **options}) == new


def test_longrope_uses_the_factors_for_the_configured_context() -> None:
    def frequencies(max_context: int | None) -> tuple[float, ...]:
        config = from_json(max_context, rope_scaling={"type": "longrope", **LONGROPE})
        return config.patterns[0].rope.frequencies

    plain = [500.0 ** (-pair / 4) for pair in range(4)]
    long = pytest.approx([frequency / (5 + pair) for pair, frequency in enumerate(plain)])
    assert frequencies(None) == frequencies(65) == long
    assert frequencies(64) == pytest.approx([frequency / (1 + pair) for pair, frequency in enumerate(plain)])
    scale = from_json(64, rope_scaling={"type": "longrope", **LONGROPE}).patterns[0].rope.scale
    assert scale == pytest.approx(math.sqrt(1 + math.log(2) / math.log(64))), (
        "the attention factor depends on the file's context, not on the configured one"
    )


def test_factors_in_a_gguf_file_divide_the_frequencies() -> None:
    factors = ArraySource(np.array([1, 2, 4, 8], np.float32))
    plain, config = from_gguf(), from_gguf({"rope_freqs.weight": factors})
    expected = [
        f / factor for f, factor in zip(plain.patterns[0].rope.frequencies, (1, 2, 4, 8), strict=True)
    ]
    assert config.patterns[0].rope.frequencies == pytest.approx(expected)
    with pytest.raises(ModelFileError, match=r"rope_freqs.weight: has shape \(3,\), expected \(4,\)"):
        from_gguf({"rope_freqs.weight": source(3)})
    with pytest.raises(ModelFileError, match=r"rope_freqs.weight: 0.0 is not a number from"):
        from_gguf({"rope_freqs.weight": ArraySource(np.zeros(4, np.float32))})
    with pytest.raises(
        ModelFileError, match=r"llama.rope.scaling.type: yarn together with rope_freqs.weight"
    ):
        from_gguf({"rope_freqs.weight": factors}, rope__scaling__type="yarn", rope__scaling__factor=2.0)


def test_longrope_in_gguf_needs_both_sets_of_factors() -> None:
    original = {"rope__scaling__original_context_length": 64}
    long, short = ArraySource(np.arange(5, 9, dtype=np.float32)), ArraySource(np.ones(4, np.float32))
    both = from_gguf({"rope_factors_long.weight": long, "rope_factors_short.weight": short}, **original)
    json = from_json(rope_scaling={"type": "longrope", **LONGROPE})
    assert both.patterns[0].rope.frequencies == json.patterns[0].rope.frequencies
    with pytest.raises(ModelFileError, match=r"rope_factors_short.weight: the tensor is missing"):
        from_gguf({"rope_factors_long.weight": long}, **original)
    with pytest.raises(ModelFileError, match=r"rope_factors_short.weight: the tensor is missing"):
        from_gguf(rope__scaling__type="longrope", **original)
    with pytest.raises(
        ModelFileError, match=r"llama.rope.scaling.type: llama3 is not a scaling type of GGUF"
    ):
        from_gguf(rope__scaling__type="llama3")


def test_gguf_rope_factors_in_a_safetensors_file_are_an_unused_tensor() -> None:
    with pytest.raises(ModelFileError, match=r"rope_freqs.weight: weft does not use this tensor"):
        build({**llama_tensors(), "rope_freqs.weight": source(4)})


def test_a_factor_without_a_type_is_linear_in_gguf() -> None:
    named = from_gguf(rope__scaling__type="linear", rope__scaling__factor=4.0)
    assert from_gguf(rope__scaling__factor=4.0) == from_gguf(rope__scale_linear=4.0) == named
    assert named.patterns[0].rope.frequencies[0] == 0.25
    assert from_gguf(rope__scaling__type="none", rope__scaling__factor=4.0) == from_gguf()


def test_yarn_in_gguf_reads_its_options() -> None:
    options: dict[str, Any] = {
        "rope__scaling__type": "yarn",
        "rope__scaling__factor": 4.0,
        "rope__scaling__original_context_length": 32,
    }
    yarn = {"rope_type": "yarn", **YARN}

    def same(gguf: ModelConfig, json: ModelConfig) -> bool:
        ours, theirs = gguf.patterns[0].rope, json.patterns[0].rope
        return (ours.frequencies, ours.scale) == (theirs.frequencies, theirs.scale)

    assert same(from_gguf(**options), from_json(rope_scaling=yarn))
    betas = from_gguf(**options, rope__scaling__yarn_beta_fast=9.0, rope__scaling__yarn_beta_slow=2.0)
    assert same(betas, from_json(rope_scaling={**yarn, "beta_fast": 9.0, "beta_slow": 2.0}))
    factor = from_gguf(**options, rope__scaling__yarn_attn_factor=1.5)
    assert same(factor, from_json(rope_scaling={**yarn, "attention_factor": 1.5}))
    multiplier = from_gguf(**options, rope__scaling__yarn_log_multiplier=0.5)
    assert same(multiplier, from_json(rope_scaling={**yarn, "mscale": 1.0, "mscale_all_dim": 0.5}))
    with pytest.raises(ModelFileError, match=r"yarn_ext_factor: 0.5 is not supported"):
        from_gguf(**options, rope__scaling__yarn_ext_factor=0.5)


def test_the_older_keys_of_gemma3s_two_ropes_mean_the_same() -> None:
    gemma = {"architectures": ["Gemma3ForCausalLM"], "head_dim": 8, "sliding_window_pattern": 2}
    gemma["sliding_window"] = 16
    old = from_json(
        **gemma, rope_theta=2e6, rope_local_base_freq=3e3, rope_scaling={"rope_type": "linear", "factor": 8.0}
    )
    full = {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6}
    local = {"rope_type": "default", "rope_theta": 3e3}
    new = from_json(
        **gemma, rope_theta=None, rope_parameters={"full_attention": full, "sliding_attention": local}
    )
    assert old == new
    assert windows(new) == [16, None]
    assert [pattern.rope.frequencies[1] for pattern in new.patterns] == pytest.approx(
        [3e3**-0.25, 2e6**-0.25 / 8]
    )


def test_gemma2_has_default_caps_and_a_default_window() -> None:
    config = from_json(8192, architectures=["Gemma2ForCausalLM"], max_position_embeddings=8192)
    assert (config.attention.score_cap, config.logit_cap, windows(config)) == (50.0, 30.0, [4096, None])
    null = from_json(
        architectures=["Gemma2ForCausalLM"], attn_logit_softcapping=None, final_logit_softcapping=None
    )
    assert (null.attention.score_cap, null.logit_cap) == (None, None)


# --- windows ----------------------------------------------------------------------------------------------------


def windows(config: ModelConfig) -> list[int | None]:
    return [config.patterns[pattern].window for pattern in config.layer_patterns]


def test_a_window_as_large_as_the_context_is_dropped() -> None:
    assert windows(mistral(sliding_window=127)) == [127, 127]
    assert windows(mistral(sliding_window=128)) == [None, None]
    assert windows(mistral(64, sliding_window=64)) == [None, None]


def test_llama_ignores_a_window_in_its_metadata() -> None:
    assert windows(from_json(sliding_window=16)) == [None, None]


def qwen2(**changes: Any) -> ModelConfig:
    return from_json(architectures=["Qwen2ForCausalLM"], sliding_window=16, **changes)


def test_qwen2_uses_its_window_only_with_use_sliding_window() -> None:
    assert windows(qwen2()) == windows(qwen2(use_sliding_window=False)) == [None, None]
    assert windows(qwen2(use_sliding_window=True, max_window_layers=1)) == [None, 16]
    types = ["sliding_attention", "full_attention"]
    assert windows(qwen2(use_sliding_window=True, max_window_layers=1, layer_types=types)) == [16, None]


def test_qwen3_moe_uses_its_window_in_all_layers() -> None:
    moe = {"architectures": ["Qwen3MoeForCausalLM"], "sliding_window": 16, "max_window_layers": 1}
    assert windows(from_json(**moe, use_sliding_window=True)) == [16, 16]


def test_gguf_gives_the_layers_with_a_window_as_flags_or_as_a_period() -> None:
    pattern = np.array([False, True])
    assert windows(from_gguf(attention__sliding_window=16)) == [16, 16]
    config = from_gguf(attention__sliding_window=16, attention__sliding_window_pattern=pattern)
    assert windows(config) == [None, 16]
    config = from_gguf(attention__sliding_window=16, attention__sliding_window_pattern=2)
    assert windows(config) == [16, None]


# --- invalid values ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "hidden_size: missing from the file"),
        ({"hidden_size": "32"}, "hidden_size: '32' is not a whole number from 1 to"),
        ({"hidden_size": 1 << 40}, "hidden_size: 1099511627776 is not a whole number"),
        ({"num_hidden_layers": 1_000_000}, "num_hidden_layers: 1000000 is not a whole number from 1 to 4096"),
        ({"num_attention_heads": 0}, "num_attention_heads: 0 is not"),
        ({"num_attention_heads": 64}, "64 heads need a hidden size of at least 64, found 32"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 4 heads are not a multiple of 3 KV heads"),
        (
            {"head_dim": 7},
            "partial_rotary_factor: rope rotates 7 features, expected an even number from 2 to the head size 7",
        ),
        ({"partial_rotary_factor": 2.0}, "partial_rotary_factor: rope rotates 16 features, .* head size 8"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps: -1.0 is not a number from"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps: nan is not a number from"),
        ({"rms_norm_eps": 1e300}, "rms_norm_eps: 1e[+]300 is not a number from"),
        ({"rope_theta": 1.0}, "rope_theta: 1.0 is not a valid rope base"),
        ({"hidden_act": "relu"}, "hidden_act: 'relu' is not supported; weft supports silu"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings: 'yes' is neither true nor false"),
        ({"rope_scaling": 3}, "rope_scaling: 3 is not an object"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rope_scaling.type: dynamic scaling depends on",
        ),
        (
            {"rope_scaling": {"rope_type": "mrope"}},
            "rope_scaling.rope_type: 'mrope' is not supported; weft supports default",
        ),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor: missing"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.factor: missing"),
        (
            {"rope_scaling": {"type": "longrope", **LONGROPE, "long_factor": [1.0] * 5}},
            "rope_scaling.long_factor: 5 values, expected a list of 4 numbers",
        ),
        (
            {"rope_scaling": {"type": "llama3", **LLAMA3, "low_freq_factor": 4.0}},
            "low_freq_factor: 4.0 must be less than high_freq_factor, 4.0",
        ),
        ({**MISTRAL, "layer_types": ["full_attention"]}, "layer_types: is not a list of 2 names"),
        ({**MISTRAL, "layer_types": ["full_attention", "odd"]}, "layer_types: 'odd' is neither"),
        (
            {**MISTRAL, "sliding_window": None, "layer_types": ["sliding_attention"] * 2},
            "sliding_window: missing from the file, but its layer_types contain",
        ),
        ({"num_local_experts": 8}, "num_local_experts: weft does not support llama with experts"),
    ],
)
def test_the_error_names_an_invalid_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        from_json(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok: 9 is not a whole number from 1 to 8"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok: missing"),
        ({"num_experts": 1 << 20}, "num_experts: 1048576 is not a whole number from 0 to 4096"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step: 2: layers without experts are not supported"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers: \[0\]: layers without experts are not supported"),
        (
            {"hidden_act": "gelu_pytorch_tanh"},
            "hidden_act: 'gelu_pytorch_tanh' is not supported in experts; weft supports silu",
        ),
    ],
)
def test_the_error_names_an_invalid_field_of_a_mixture_of_experts(
    changes: dict[str, Any], message: str
) -> None:
    moe = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2}
    config = from_json(**moe, moe_intermediate_size=10)
    assert config.multiplications_per_token == 2 * (32 * (32 + 16 + 16 + 32) + 3 * 32 * 2 * 10)
    with pytest.raises(ModelFileError, match=message):
        from_json(**{**moe, **changes})


HOSTILE = [
    None,
    True,
    -1,
    0,
    1,
    3,
    1 << 70,
    0.5,
    -2.0,
    1e308,
    math.inf,
    math.nan,
    "",
    "x",
    [],
    [1],
    {},
    {"a": 1},
]


@pytest.mark.parametrize("architecture", [entry.class_name for entry in ARCHITECTURES])
def test_any_value_of_a_field_gives_a_configuration_or_a_model_file_error(architecture: str) -> None:
    scaling = {"rope_type": "yarn", **LLAMA3, **LONGROPE, "beta_fast": 32.0, "beta_slow": 1.0}
    base = {**LLAMA_JSON, "architectures": [architecture], "use_sliding_window": True, "head_dim": 8}
    if architecture != "Olmo2ForCausalLM":
        base["sliding_window"] = 16
    for kind in ("default", "linear", "llama3", "yarn", "longrope"):
        build_config("huggingface", {**base, "rope_scaling": {**scaling, "rope_type": kind}}, {})
        for key in [*base, "layer_types", "attn_logit_softcapping", "partial_rotary_factor"]:
            for value in HOSTILE:
                build_or_refuse(
                    "huggingface", {**base, "rope_scaling": {**scaling, "rope_type": kind}, key: value}
                )
        for key in scaling:
            for value in HOSTILE:
                changed = {**scaling, "rope_type": kind, key: value}
                build_or_refuse("huggingface", {**base, "rope_parameters": changed})


def test_any_value_of_a_gguf_field_gives_a_configuration_or_a_model_file_error() -> None:
    extra = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 2.0,
        "llama.rope.scaling.original_context_length": 32,
        "llama.rope.dimension_count": 8,
        "llama.attention.sliding_window": 16,
        "llama.attention.sliding_window_pattern": 2,
        "llama.attention.key_length": 8,
        "llama.attention.value_length": 8,
    }
    build_config("gguf", {**LLAMA_GGUF, **extra}, {})
    for key in [*LLAMA_GGUF, *extra]:
        for value in [*HOSTILE, np.array([1, 2]), np.array([1.5])]:
            build_or_refuse("gguf", {**LLAMA_GGUF, **extra, key: value})


def build_or_refuse(layout: Any, metadata: dict[str, Any]) -> None:
    try:
        build_config(layout, metadata, {})
    except ModelFileError:
        pass
