"""Small random checkpoints of every architecture, and two ways to run one: transformers on the whole text, and weft's
decoder with chunks, KV blocks and single tokens."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from array_source import ArraySource
from spoilt_cache import spoil
from weft.models.decoder import Decoder
from weft.ops.base import StepIndices

torch = pytest.importorskip("torch")

PROMPT_LENGTH = 100
NEW_TOKENS = 64
VOCABULARY = 97

# WIDE_HEADS has 4 heads of 24 features with a hidden size of 64, for architectures that allow it.
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 0,
}
WIDE_HEADS = {**SIZES, "head_dim": 24}


@dataclass(frozen=True)
class Case:
    """A model to build: transformers' name of the architecture, and its configuration."""

    model: str
    options: Mapping[str, Any]
    max_context: int | None = None
    config: str = ""  # the name of the configuration class, if it is not the model's name with Config
    module: str = ""  # the module in transformers, if it is not the model's name

    @property
    def modeling(self) -> str:
        module = self.module or self.model.lower()
        return f"transformers.models.{module}.modeling_{module}"


@dataclass(frozen=True)
class Checkpoint:
    """The content of model files."""

    config: dict[str, Any]
    tensors: dict[str, np.ndarray]

    @property
    def sources(self) -> dict[str, ArraySource]:
        return {name: ArraySource(array) for name, array in self.tensors.items()}


def build_model(case: Case) -> Any:
    """A transformers model with random weights everywhere: norms are not all ones, biases not all zeros."""
    import transformers

    config = getattr(transformers, case.config or f"{case.model}Config")(**case.options)
    config._attn_implementation = config._experts_implementation = "eager"
    torch.set_num_threads(1)  # for the reason given in tests/conftest.py
    model = getattr(transformers, f"{case.model}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            if "norm" in name:
                values = values * 0.3 + parameter.mean().round().float()  # around 1, or 0 for Gemma
            elif parameter.ndim == 1:
                values = values * 0.3
            elif "embed" not in name:
                values = values * 1.5 / parameter.shape[-1] ** 0.5
            parameter.copy_(values)
    model.tie_weights()
    return model


def save(model: Any, folder: Path) -> Checkpoint:
    """Saves the model with transformers, and reads the files."""
    from safetensors.numpy import load_file

    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    return Checkpoint(json.loads((folder / "config.json").read_text()), tensors)


def logits_of(model: Any, tokens: list[int]) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([tokens]), use_cache=False).logits[0].numpy()


class _DoubleTorch:
    """torch with float64 in place of float32."""

    def __getattr__(self, name: str) -> Any:
        return torch.float64 if name in ("float", "float32") else getattr(torch, name)


@contextmanager
def transformers_in_float64(case: Case) -> Iterator[None]:
    """Makes transformers compute norms, softmax and RoPE frequencies in float64, to compare all digits. Normally it
    uses float32 for these, whatever the dtype of the model."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (case.modeling, "transformers.modeling_rope_utils"):
            patch.setattr(importlib.import_module(module), "torch", _DoubleTorch())
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield


class Reader:
    """Runs one request in chunks. Its KV blocks are scattered over the cache."""

    def __init__(self, decoder: Decoder, length: int, block_size: int) -> None:
        self.decoder = decoder
        self.block_size = block_size
        blocks = -(-length // block_size)
        self.cache = decoder.new_cache(blocks + 3, block_size)
        spoil(self.cache)
        self.table = np.random.default_rng(1).permutation(blocks + 3)[:blocks]
        self.position = 0

    def feed(self, tokens: list[int]) -> np.ndarray:
        """Computes the next tokens, and returns the logits of each."""
        positions = np.arange(self.position, self.position + len(tokens))
        self.position += len(tokens)
        step = StepIndices(
            token_ids=np.array(tokens),
            positions=positions,
            cells=self.table[positions // self.block_size] * self.block_size + positions % self.block_size,
            query_starts=np.array([0, len(tokens)]),
            context_lengths=np.array([self.position]),
            block_tables=self.table[None, : -(-self.position // self.block_size)],
            logit_indices=np.arange(len(tokens)),
        )
        return self.decoder.logits(self.decoder.forward(step, self.cache))


def prompt() -> list[int]:
    return np.random.default_rng(3).integers(1, VOCABULARY, PROMPT_LENGTH).tolist()


def generate(decoder: Decoder, chunk: int, block_size: int) -> tuple[list[int], np.ndarray]:
    """Computes the prompt in chunks, then decodes greedily. Returns all tokens and the logits of each."""
    tokens = prompt()
    reader = Reader(decoder, PROMPT_LENGTH + NEW_TOKENS, block_size)
    rows = [reader.feed(tokens[start : start + chunk]) for start in range(0, PROMPT_LENGTH, chunk)]
    for _ in range(NEW_TOKENS):
        tokens.append(int(rows[-1][-1].argmax()))
        rows.append(reader.feed(tokens[-1:]))
    return tokens, np.concatenate(rows)


def next_step(
    texts: list[list[int]], counts: list[int], done: np.ndarray, tables: np.ndarray, block_size: int
) -> tuple[np.ndarray, StepIndices]:
    """A step that computes `counts` tokens of each text, with logits for every token. Returns the texts with tokens
    in the step, and the step. Adds `counts` to `done`, the number of computed tokens of each text."""
    rows = np.flatnonzero(counts)
    positions = [np.arange(done[row], done[row] + counts[row]) for row in rows]
    blocks = [tables[row, at // block_size] for row, at in zip(rows, positions, strict=True)]
    flat = np.concatenate(positions)
    done[rows] += np.array(counts)[rows]
    starts = np.concatenate([[0], np.cumsum(np.array(counts)[rows])])
    step = StepIndices(
        token_ids=np.concatenate([np.array(texts[row])[at] for row, at in zip(rows, positions, strict=True)]),
        positions=flat,
        cells=np.concatenate(blocks) * block_size + flat % block_size,
        query_starts=starts,
        context_lengths=done[rows],
        block_tables=tables[rows, : -(-int(done[rows].max()) // block_size)],
        logit_indices=np.arange(len(flat)),
    )
    return rows, step


def logits_in_a_batch(
    decoder: Decoder, texts: list[list[int]], plan: list[list[int]], block_size: int
) -> list[np.ndarray]:
    """The logits of every token of each text. Each entry of `plan` is a step: the number of tokens of each text."""
    needed = [-(-len(text) // block_size) for text in texts]
    order = np.random.default_rng(2).permutation(sum(needed) + 3)
    tables = np.zeros((len(texts), max(needed)), np.int64)
    for row, count in enumerate(needed):
        tables[row, :count], order = order[:count], order[count:]
    cache = decoder.new_cache(sum(needed) + 3, block_size)
    spoil(cache)
    done = np.zeros(len(texts), np.int64)
    pieces: list[list[np.ndarray]] = [[] for _ in texts]
    for counts in plan:
        rows, step = next_step(texts, counts, done, tables, block_size)
        starts = step.query_starts
        logits = decoder.logits(decoder.forward(step, cache))
        for index, row in enumerate(rows):
            pieces[row].append(logits[starts[index] : starts[index + 1]])
    return [np.concatenate(piece) for piece in pieces]
