"""A model without files: the tensors of a config.json, filled with random numbers. For benchmarks and tests.

Speed depends on shapes, not on values, so a model of any size can be measured without a download.
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
"""Standard deviation of norm weights around 1. If all were exactly 1, tests would not notice a missing norm."""


@dataclass(frozen=True)
class RandomSource:
    """A `weft.ops.base.WeightSource` of normally distributed bfloat16 numbers, drawn on every read.

    Every read draws the same numbers from `seed`. With `fill_on_device`, a GPU backend may instead draw other numbers
    from the same distribution in its own memory, which saves the copy.
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
        """The bytes of a bfloat16 tensor in a file."""
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
        # Truncate to bfloat16, so that `raw` and this method give the same numbers.
        values.view(np.uint32)[...] &= np.uint32(0xFFFF0000)
        return values


def random_checkpoint(
    config: Mapping[str, Any], seed: int = 0, *, fill_on_device: bool = True, name: str = "random"
) -> Checkpoint:
    """A checkpoint for the content of a config.json. It has no tokenizer and no EOS token.

    The weights of a linear layer have a standard deviation of 1 / sqrt(inputs). This keeps the magnitude of the
    activations, so that they stay finite for any number of layers.
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
    """Name and shape of every tensor, with the names of transformers."""
    kind = config.get("model_type")
    if kind not in _ARCHITECTURES:
        raise ModelFileError(
            f"model_type: {kind!r:.80} is not supported with random weights; supported: {', '.join(_ARCHITECTURES)}"
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
