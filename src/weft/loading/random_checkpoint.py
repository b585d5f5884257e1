"""A model without files: the tensors that a config.json asks for, filled with random numbers. For measurements and tests.

Speed depends on shapes, not on values: a model of any size can be measured without fetching it.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.errors import ModelFileError
from weft.loading.checkpoint import Checkpoint

if TYPE_CHECKING:
    import numpy as np

_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_NORM_SPREAD = 0.1
"""Norms lie around 1; were all exactly 1, a norm that is left out would not show."""


@dataclass(frozen=True)
class RandomSource:
    """A `weft.ops.base.WeightSource` whose numbers, normally distributed around `mean`, are drawn when they are read.

    They are bfloat16 and depend on `seed` alone. Where `fill_on_device` is set, a backend with a memory of its own may
    draw them there instead, from the same distribution: other numbers, and nothing has to be copied.
    """

    name: str
    shape: tuple[int, ...]
    seed: int
    deviation: float
    mean: float = 0.0
    fill_on_device: bool = True

    @property
    def format_name(self) -> str:
        return "BF16"

    @property
    def raw(self) -> np.ndarray:
        """The bytes as a file would hold them."""
        import numpy as np

        drawn = self.to_float32().reshape(-1).view(np.uint32) >> 16
        return drawn.astype(np.uint16).view(np.uint8)

    def read_into(self, out: np.ndarray) -> None:
        out[...] = self.to_float32()

    def rows(self, indices: np.ndarray) -> np.ndarray:
        return self.to_float32()[indices]

    def to_float32(self) -> np.ndarray:
        import numpy as np

        generator = np.random.Generator(np.random.Philox(self.seed))
        values = generator.standard_normal(self.shape, np.float32)
        values *= np.float32(self.deviation)
        values += np.float32(self.mean)
        # What bfloat16 has no room for is cut off, so that every way to read gives the same numbers.
        values.view(np.uint32)[...] &= np.uint32(0xFFFF0000)
        return values


def random_checkpoint(
    config: Mapping[str, Any], seed: int = 0, *, fill_on_device: bool = True, name: str = "random"
) -> Checkpoint:
    """The checkpoint of a config.json's content. It has no tokenizer, and no token ends an answer.

    A product's weights have a deviation of 1 / sqrt(inputs): what goes through keeps its size, so that activations stay
    finite however many layers there are.
    """
    tensors = {}
    for tensor_name, shape in _shapes(config):
        is_norm = tensor_name.endswith("norm.weight")
        tensors[tensor_name] = RandomSource(
            tensor_name,
            shape,
            seed=(seed << 32) + zlib.crc32(tensor_name.encode()),
            deviation=_NORM_SPREAD if is_norm else 1 / math.sqrt(shape[-1]),
            mean=1.0 if is_norm else 0.0,
            fill_on_device=fill_on_device,
        )
    return Checkpoint(Path(name), "huggingface", dict(config), tensors, end_ids=frozenset(), has_text=False)


def _shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor under its name in safetensors files, as transformers writes them."""
    kind = config.get("model_type")
    if kind not in _ARCHITECTURES:
        raise ModelFileError(
            f"model_type: {kind!r:.80} cannot be made of random numbers; weft does so with {', '.join(_ARCHITECTURES)}"
        )
    hidden, inner, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head = config.get("head_dim") or hidden // heads
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield f"{prefix}input_layernorm.weight", (hidden,)
        for part, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            yield f"{prefix}self_attn.{part}_proj.weight", (count * head, hidden)
            if kind == "qwen2":
                yield f"{prefix}self_attn.{part}_proj.bias", (count * head,)
        if kind == "qwen3":
            yield f"{prefix}self_attn.q_norm.weight", (head,)
            yield f"{prefix}self_attn.k_norm.weight", (head,)
        yield f"{prefix}self_attn.o_proj.weight", (hidden, heads * head)
        yield f"{prefix}post_attention_layernorm.weight", (hidden,)
        yield f"{prefix}mlp.gate_proj.weight", (inner, hidden)
        yield f"{prefix}mlp.up_proj.weight", (inner, hidden)
        yield f"{prefix}mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
    if not config.get("tie_word_embeddings", False):
        yield "lm_head.weight", (vocabulary, hidden)
