"""Reads `RopeParameters` from the metadata of either layout.

GGUF has one set of keys, and tensors for lists of factors. config.json has `rope_parameters`, or `rope_scaling` and
`rope_theta` in older files. If layers differ, `rope_parameters` has an object for each layer type.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from weft.models.fields import Fields, Section
from weft.models.rope import KINDS, RopeParameters

LayerType = Literal["full_attention", "sliding_attention"]

# Other names in files: "su" in older Phi-3 files, "none" in GGUF.
_SYNONYMS = {"su": "longrope", "none": "default"}

# Tensors of GGUF files that hold rope parameters, not weights.
FREQUENCY_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
GGUF_ROPE_TENSORS = frozenset({FREQUENCY_FACTORS, LONG_FACTORS, SHORT_FACTORS})


def read_rope(
    fields: Fields,
    head_size: int,
    base: float = 10_000.0,
    layer_type: LayerType = "full_attention",
    base_keys: tuple[str, str] = ("rope.freq_base", "rope_theta"),
    scaled: bool = True,
) -> RopeParameters:
    """Reads the rope of one layer type.

    `base` is the default if the file has none of `base_keys` (the GGUF key, the config.json key). With `scaled` false
    the layer type ignores scaling, unless config.json states scaling in the layer type's own object.
    """
    if fields.layout == "gguf":
        return _from_gguf(fields, head_size, base, base_keys[0], scaled)
    return _from_huggingface(fields, head_size, base, layer_type, base_keys[1], scaled)


# --- GGUF -------------------------------------------------------------------------------------------------------


def _from_gguf(fields: Fields, head_size: int, base: float, base_key: str, scaled: bool) -> RopeParameters:
    """The rope of a GGUF file."""
    section, key = fields.section, fields.gguf_key
    size_key = key("rope.dimension_count")
    rotated = _rotated(section, size_key, section.size(size_key, head_size), head_size)
    base = _base(section, key(base_key), base)
    if not scaled:
        return RopeParameters("default", base, rotated)
    factor_key = key("rope.scaling.factor")
    if not section.has(factor_key) and section.has(key("rope.scale_linear")):
        factor_key = key("rope.scale_linear")  # the key in early files
    # Without a type, a factor means linear. Phi-3 files have longrope factors and no type.
    default_kind = "linear" if section.has(factor_key) else "default"
    if fields.has_tensor(LONG_FACTORS) or fields.has_tensor(SHORT_FACTORS):
        default_kind = "longrope"
    kind = _kind(section, key("rope.scaling.type"), default_kind)
    plain = RopeParameters(kind, base, rotated)
    if fields.has_tensor(FREQUENCY_FACTORS):
        if kind not in ("default", "linear"):
            raise section.error(
                key("rope.scaling.type"), f"{kind} together with {FREQUENCY_FACTORS} is not supported"
            )
        plain = replace(plain, frequency_factors=fields.vector(FREQUENCY_FACTORS, plain.pairs))
    if kind == "longrope":
        return _gguf_longrope(fields, plain)
    if kind == "yarn":
        return _gguf_yarn(fields, replace(plain, factor=section.number(factor_key)))
    if kind == "linear":
        return replace(plain, factor=section.number(factor_key))
    if kind == "default":
        return plain
    raise section.error(key("rope.scaling.type"), f"{kind} is not a scaling type of GGUF files")


def _gguf_longrope(fields: Fields, plain: RopeParameters) -> RopeParameters:
    section, key = fields.section, fields.gguf_key
    return replace(
        plain,
        original_context=section.size(key("rope.scaling.original_context_length"), smallest=2),
        # Default 1, as in llama.cpp.
        attention_factor=section.number(key("rope.scaling.attn_factor"), 1.0),
        short_factors=fields.vector(SHORT_FACTORS, plain.pairs),
        long_factors=fields.vector(LONG_FACTORS, plain.pairs),
    )


def _gguf_yarn(fields: Fields, plain: RopeParameters) -> RopeParameters:
    """Adds the yarn parameters of a GGUF file to `plain`."""
    section, key = fields.section, fields.gguf_key
    for rest in ("rope.scaling.attn_factor", "rope.scaling.yarn_ext_factor"):
        # Files of the supported models do not use these keys. Ignoring one would give fluent but wrong text.
        if (value := section.number(key(rest), 1.0)) != 1.0:
            raise section.error(key(rest), f"{value} is not supported with yarn; weft supports only 1")
    log_multiplier = section.optional_number(key("rope.scaling.yarn_log_multiplier"))
    return replace(
        plain,
        original_context=section.size(
            key("rope.scaling.original_context_length"), fields.size("max_context")
        ),
        attention_factor=section.optional_number(key("rope.scaling.yarn_attn_factor")),
        beta_fast=section.number(key("rope.scaling.yarn_beta_fast"), 32.0),
        beta_slow=section.number(key("rope.scaling.yarn_beta_slow"), 1.0),
        mscale=None if log_multiplier is None else 1.0,
        mscale_all=log_multiplier,
    )


# --- config.json ------------------------------------------------------------------------------------------------


def _from_huggingface(
    fields: Fields, head_size: int, base: float, layer_type: LayerType, base_key: str, scaled: bool
) -> RopeParameters:
    """The rope of a config.json."""
    top = fields.section
    # The older key wins if a file has both: users who extend a context by hand still write that one.
    section = top.section("rope_scaling" if top.has("rope_scaling") else "rope_parameters")
    if section.has("full_attention") or section.has("sliding_attention"):
        section = section.section(layer_type)
    elif not scaled:
        section = Section({}, section.prefix)
    base = _base(section, "rope_theta", _base(top, base_key, base))
    fraction = section.number("partial_rotary_factor", top.number("partial_rotary_factor", 1.0))
    rotated = _rotated(section, "partial_rotary_factor", int(head_size * fraction), head_size)
    kind = _kind(section, "rope_type" if section.has("rope_type") else "type", "default")
    if kind == "yarn" and section.has("long_factor"):
        kind = "longrope"  # the first Phi-3 files call it "yarn"
    plain = RopeParameters(kind, base, rotated)
    if kind == "default":
        return plain
    if kind == "linear":
        return replace(plain, factor=section.number("factor"))
    # Phi-3 has the original context at the top level, where it has precedence.
    original_key, context = "original_max_position_embeddings", fields.size("max_context")
    holder = top if top.has(original_key) else section
    original = holder.size(original_key, None if kind == "longrope" else context, smallest=2)
    plain = replace(plain, original_context=original)
    return {"llama3": _llama3, "yarn": _yarn, "longrope": _longrope}[kind](section, plain, context)


def _llama3(section: Section, plain: RopeParameters, context: int) -> RopeParameters:
    low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
    if low >= high:
        raise section.error("low_freq_factor", f"{low} must be less than high_freq_factor, {high}")
    return replace(
        plain, factor=section.number("factor"), low_frequency_factor=low, high_frequency_factor=high
    )


def _yarn(section: Section, plain: RopeParameters, context: int) -> RopeParameters:
    return replace(
        plain,
        factor=section.number("factor", context / plain.original_context),
        attention_factor=section.optional_number("attention_factor"),
        beta_fast=section.number("beta_fast", 32.0),
        beta_slow=section.number("beta_slow", 1.0),
        truncate=section.flag("truncate", True),
        mscale=section.optional_number("mscale"),
        mscale_all=section.optional_number("mscale_all_dim"),
    )


def _longrope(section: Section, plain: RopeParameters, context: int) -> RopeParameters:
    return replace(
        plain,
        factor=section.number("factor", context / plain.original_context),
        attention_factor=section.optional_number("attention_factor"),
        short_factors=section.numbers("short_factor", plain.pairs),
        long_factors=section.numbers("long_factor", plain.pairs),
    )


# --- both -------------------------------------------------------------------------------------------------------


def _rotated(section: Section, key: str, rotated: int, head_size: int) -> int:
    if rotated % 2 or not 2 <= rotated <= head_size:
        raise section.error(
            key,
            f"rope rotates {rotated} features, expected an even number from 2 to the head size {head_size}",
        )
    return rotated


def _base(section: Section, key: str, default: float) -> float:
    base = section.number(key, default)
    if base <= 1.0:
        raise section.error(key, f"{base} is not a valid rope base; it must be greater than 1")
    return base


def _kind(section: Section, key: str, default: str) -> str:
    kind = section.text(key, default)
    kind = _SYNONYMS.get(kind, kind)
    if kind == "dynamic":
        raise section.error(
            key,
            "dynamic scaling depends on the length of a sequence, which a KV cache does not allow; "
            "use yarn, or remove the scaling and stay within the original context",
        )
    if kind not in KINDS:
        raise section.error(key, f"{kind!r:.80} is not supported; weft supports {', '.join(KINDS)}")
    return kind
