"""What a model file says about rotary embedding, from either layout, as `RopeParameters`.

GGUF has one set of keys, and tensors for factors. config.json says it in `rope_parameters`, in older files in
`rope_scaling` beside a `rope_theta`; where layers differ, `rope_parameters` holds an object for each kind of layer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from weft.models.fields import Fields, Section
from weft.models.rope import KINDS, RopeParameters

LayerType = Literal["full_attention", "sliding_attention"]

# Other words for a kind: an older one of Phi-3's makers, and GGUF's for no scaling.
_SYNONYMS = {"su": "longrope", "none": "default"}

# Tensors of GGUF files that are part of the description: `read_rope` turns them into parameters.
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
    """The rope of one kind of layer. `base` counts where the file names none under `base_keys` (GGUF's and
    config.json's); without `scaled`, scaling that the file states outside of the layer's own object is not for it."""
    if fields.layout == "gguf":
        return _from_gguf(fields, head_size, base, base_keys[0], scaled)
    return _from_huggingface(fields, head_size, base, layer_type, base_keys[1], scaled)


# --- GGUF -------------------------------------------------------------------------------------------------------


def _from_gguf(fields: Fields, head_size: int, base: float, base_key: str, scaled: bool) -> RopeParameters:
    section, key = fields.section, fields.gguf_key
    size_key = key("rope.dimension_count")
    rotated = _rotated(section, size_key, section.size(size_key, head_size), head_size)
    base = _base(section, key(base_key), base)
    if not scaled:
        return RopeParameters("default", base, rotated)
    factor_key = key("rope.scaling.factor")
    if not section.has(factor_key) and section.has(key("rope.scale_linear")):
        factor_key = key("rope.scale_linear")  # its name in early files
    # Files of Phi-3 have the factors and no type; a factor without a type has always meant linear.
    unnamed = "linear" if section.has(factor_key) else "default"
    if fields.has_tensor(LONG_FACTORS) or fields.has_tensor(SHORT_FACTORS):
        unnamed = "longrope"
    kind = _kind(section, key("rope.scaling.type"), unnamed)
    plain = RopeParameters(kind, base, rotated)
    if fields.has_tensor(FREQUENCY_FACTORS):
        if kind not in ("default", "linear"):
            raise section.error(key("rope.scaling.type"), f"{kind} beside the factors of {FREQUENCY_FACTORS}")
        plain = replace(plain, frequency_factors=fields.vector(FREQUENCY_FACTORS, plain.pairs))
    if kind == "longrope":
        return _gguf_longrope(fields, plain)
    if kind == "yarn":
        return _gguf_yarn(fields, replace(plain, factor=section.number(factor_key)))
    if kind == "linear":
        return replace(plain, factor=section.number(factor_key))
    if kind == "default":
        return plain
    raise section.error(key("rope.scaling.type"), f"{kind} is not a word of GGUF files")


def _gguf_longrope(fields: Fields, plain: RopeParameters) -> RopeParameters:
    section, key = fields.section, fields.gguf_key
    return replace(
        plain,
        original_context=section.size(key("rope.scaling.original_context_length"), smallest=2),
        # The factor itself; where it is missing there is none, as in llama.cpp.
        attention_factor=section.number(key("rope.scaling.attn_factor"), 1.0),
        short_factors=fields.vector(SHORT_FACTORS, plain.pairs),
        long_factors=fields.vector(LONG_FACTORS, plain.pairs),
    )


def _gguf_yarn(fields: Fields, plain: RopeParameters) -> RopeParameters:
    section, key = fields.section, fields.gguf_key
    for rest in ("rope.scaling.attn_factor", "rope.scaling.yarn_ext_factor"):
        # Nobody writes them for the models weft knows; ignoring one would give fluent nonsense.
        if (value := section.number(key(rest), 1.0)) != 1.0:
            raise section.error(key(rest), f"{value} is not supported with yarn; only 1 is")
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
    top = fields.section
    # The older name counts where a file has both: whoever extends a context by hand still writes that one.
    section = top.section("rope_scaling" if top.has("rope_scaling") else "rope_parameters")
    if section.has("full_attention") or section.has("sliding_attention"):
        section = section.section(layer_type)
    elif not scaled:
        section = Section({}, section.where)
    base = _base(section, "rope_theta", _base(top, base_key, base))
    share = section.number("partial_rotary_factor", top.number("partial_rotary_factor", 1.0))
    rotated = _rotated(section, "partial_rotary_factor", int(head_size * share), head_size)
    kind = _kind(section, "rope_type" if section.has("rope_type") else "type", "default")
    if kind == "yarn" and section.has("long_factor"):
        kind = "longrope"  # what the first Phi-3 files call it
    plain = RopeParameters(kind, base, rotated)
    if kind == "default":
        return plain
    if kind == "linear":
        return replace(plain, factor=section.number("factor"))
    # Phi-3 states the original context beside the object, and there it counts more.
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
            key, f"pairs of features turn, and of a head's {head_size} features {rotated} cannot"
        )
    return rotated


def _base(section: Section, key: str, default: float) -> float:
    base = section.number(key, default)
    if base <= 1.0:
        raise section.error(key, f"{base} is no base of rotary embedding; it is more than 1")
    return base


def _kind(section: Section, key: str, default: str) -> str:
    kind = section.text(key, default)
    kind = _SYNONYMS.get(kind, kind)
    if kind == "dynamic":
        raise section.error(
            key,
            "dynamic scaling changes with the length of a text, which a cache of keys cannot follow; "
            "use yarn, or remove the scaling and stay inside the original context",
        )
    if kind not in KINDS:
        raise section.error(key, f"{kind!r:.80} is not supported; weft scales by {', '.join(KINDS)}")
    return kind
