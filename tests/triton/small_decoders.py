"""Small random decoders that cover every field of a configuration, and steps of several requests over them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from array_source import ArraySource
from weft.models.config import ExpertsConfig, ModelConfig
from weft.models.decoder import Decoder
from weft.ops.base import AttentionPattern, AttentionShape, Ops, Rope, StepIndices
from weft.ops.reference import ReferenceOps
from weft.ops.triton.device import Device
from weft.ops.triton.device_batch import DeviceBatch
from weft.ops.triton.ops import TritonOps
from weft.ops.triton.program import CudaProgram, record

MAX_CONTEXT = 128
BLOCK_SIZE = 16


def rope(pairs: int, base: float = 1e4, interleaved: bool = False, scale: float = 1.0) -> Rope:
    return Rope(tuple(base ** (-pair / pairs) for pair in range(pairs)), interleaved, scale)


PLAIN = ModelConfig(
    architecture="plain",
    layers=2,
    hidden_size=48,
    feed_forward_size=40,
    vocabulary_size=53,
    max_context=MAX_CONTEXT,
    attention=AttentionShape(heads=6, kv_heads=2, head_size=16, scale=0.25),
    patterns=(AttentionPattern(rope(8)),),
    layer_patterns=(0, 0),
    norm_epsilon=1e-5,
)
CONFIGS = {
    "plain, 3 heads to a kv head": PLAIN,
    "tied, a norm of each head": replace(PLAIN, tied_embedding=True, qk_norm="head"),
    "biases, scales": replace(
        PLAIN,
        qkv_bias=True,
        output_bias=True,
        feed_forward_bias=True,
        embedding_scale=3.0,
        residual_scale=0.4,
        logit_scale=0.2,
    ),
    "post-norms of whole rows": replace(PLAIN, pre_norms=False, post_norms=True, qk_norm="row"),
    "all norms, with an offset; windows, caps, gelu": replace(
        PLAIN,
        norm_offset=1.0,
        post_norms=True,
        activation="gelu_tanh",
        logit_cap=4.0,
        embedding_scale=48**0.5,
        attention=replace(PLAIN.attention, score_cap=3.0),
        patterns=(AttentionPattern(rope(8), window=11), AttentionPattern(rope(8, 1e5))),
        layer_patterns=(0, 1),
    ),
    "RoPE on a part of each head, interleaved": replace(
        PLAIN, patterns=(AttentionPattern(rope(6, interleaved=True, scale=1.2)),)
    ),
    "experts": replace(PLAIN, experts=ExpertsConfig(5, 2, 24, normalised=True)),
    "experts, shares not normalised": replace(
        PLAIN, qk_norm="head", experts=ExpertsConfig(6, 3, 40, normalised=False)
    ),
}


def shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = config.hidden_size, config.feed_forward_size
    yield "embedding", (config.vocabulary_size, hidden)
    yield "final_norm", (hidden,)
    if not config.tied_embedding:
        yield "lm_head", (config.vocabulary_size, hidden)
    for layer in range(config.layers):
        prefix = f"layers.{layer}."
        for part, exists in (("norm", config.pre_norms), ("post_norm", config.post_norms)):
            if exists:
                yield f"{prefix}attention_{part}", (hidden,)
                yield f"{prefix}feed_forward_{part}", (hidden,)
        products = [
            ("wq", config.query_size, hidden, config.qkv_bias),
            ("wk", config.kv_size, hidden, config.qkv_bias),
            ("wv", config.kv_size, hidden, config.qkv_bias),
            ("wo", hidden, config.query_size, config.output_bias),
        ]
        if (experts := config.experts) is None:
            products += [
                ("w_gate", inner, hidden, config.feed_forward_bias),
                ("w_up", inner, hidden, config.feed_forward_bias),
                ("w_down", hidden, inner, config.feed_forward_bias),
            ]
        else:
            yield f"{prefix}router", (experts.count, hidden)
            yield f"{prefix}experts.w_gate", (experts.count, experts.feed_forward_size, hidden)
            yield f"{prefix}experts.w_up", (experts.count, experts.feed_forward_size, hidden)
            for expert in range(experts.count):
                yield f"{prefix}experts.{expert}.w_down", (hidden, experts.feed_forward_size)
        for name, outputs, inputs, biased in products:
            yield prefix + name, (outputs, inputs)
            if biased:
                yield f"{prefix}{name}.bias", (outputs,)
        if config.qk_norm is not None:
            row = config.qk_norm == "row"
            yield prefix + "query_norm", (config.query_size if row else config.attention.head_size,)
            yield prefix + "key_norm", (config.kv_size if row else config.attention.head_size,)


def decoder_of(config: ModelConfig, ops: Ops) -> Decoder:
    """Random weights without neutral values: norms are not ones, biases are not zeros."""
    draw = np.random.default_rng(5)
    weights = {}
    for name, shape in shapes(config):
        values = draw.standard_normal(shape).astype(np.float32)
        if "norm" in name:
            values = values * 0.3 + (1.0 - config.norm_offset)
        elif len(shape) == 1:
            values *= 0.3
        elif name != "embedding":
            values *= 1.5 / shape[-1] ** 0.5
        weights[name] = ArraySource(values, name)
    return Decoder(config, weights, ops)


@dataclass(frozen=True)
class Texts:
    """Requests with blocks scattered over a cache, and with backend rows in another order."""

    tokens: list[list[int]]
    tables: np.ndarray  # [requests, blocks of a context]
    blocks: int

    @classmethod
    def of_lengths(cls, *lengths: int) -> Texts:
        draw = np.random.default_rng(3)
        each = MAX_CONTEXT // BLOCK_SIZE
        blocks = len(lengths) * each + 2
        tables = draw.permutation(blocks)[: len(lengths) * each].reshape(len(lengths), each)
        return cls(
            [draw.integers(0, PLAIN.vocabulary_size, length).tolist() for length in lengths], tables, blocks
        )

    def steps(self, plan: list[list[int]]) -> Iterator[StepIndices]:
        """Every entry of `plan` is a step: the number of tokens of each text. All tokens need logits."""
        done = [0] * len(self.tokens)
        for counts in plan:
            chosen = [index for index, count in enumerate(counts) if count]
            positions = [np.arange(done[index], done[index] + counts[index]) for index in chosen]
            for index in chosen:
                done[index] += counts[index]
            flat = np.concatenate(positions)
            blocks = [self.tables[i, p // BLOCK_SIZE] for i, p in zip(chosen, positions, strict=True)]
            yield StepIndices(
                token_ids=np.concatenate(
                    [np.array(self.tokens[i])[p] for i, p in zip(chosen, positions, strict=True)]
                ),
                positions=flat,
                cells=np.concatenate(blocks) * BLOCK_SIZE + flat % BLOCK_SIZE,
                query_starts=np.cumsum([0, *(counts[index] for index in chosen)]),
                context_lengths=np.array([done[index] for index in chosen]),
                block_tables=self.tables[chosen],
                logit_indices=np.arange(len(flat)),
            )


def device_batch(step: StepIndices, device: Device, sampled: int | None = None) -> DeviceBatch:
    """The step on a device; the block tables are in reverse order in the rows of a larger array."""
    counts = np.diff(step.query_starts)
    requests = len(counts)
    tables = np.zeros((requests + 2, step.block_tables.shape[1]), np.int32)
    rows = np.arange(requests, 0, -1)
    tables[rows] = step.block_tables

    def put(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device.torch_device, dtype)

    several = np.flatnonzero(counts != 1)
    return DeviceBatch(
        tokens=len(step.token_ids),
        requests=requests,
        sampled=len(step.logit_indices) if sampled is None else sampled,
        longest_query=int(counts.max()),
        longest_context=int(step.context_lengths.max()),
        token_ids=put(step.token_ids, torch.int32),
        positions=put(step.positions, torch.int32),
        cells=put(step.cells, torch.int64),
        rows=put(rows, torch.int32),
        query_starts=put(step.query_starts, torch.int32),
        context_lengths=put(step.context_lengths, torch.int32),
        tables=put(tables, torch.int32),
        logit_indices=put(step.logit_indices, torch.int32),
        decodes=int(several[0]) if len(several) else requests,
    )


def reference_logits(config: ModelConfig, texts: Texts, plan: list[list[int]]) -> list[np.ndarray]:
    decoder = decoder_of(config, ReferenceOps())
    cache: Any = decoder.new_cache(texts.blocks, BLOCK_SIZE)
    return [decoder.logits(decoder.forward(step, cache)) for step in texts.steps(plan)]


# One step for cuBLAS, one for tiles with chunks and single tokens, one with single tokens, one with a single token.
TEXTS = Texts.of_lengths(28, 9, 8)
PLAN = [[25, 7, 5], [1, 1, 3], [1, 1, 0], [1, 0, 0]]


def build(
    config: ModelConfig, device: Device, dtype: torch.dtype = torch.float32, invariant: bool = False
) -> tuple[CudaProgram, torch.Tensor]:
    ops = TritonOps(device, dtype)
    decoder = decoder_of(config, ops)
    program = record(decoder, ops, max_tokens=64, max_sampled=64, invariant=invariant)
    cache = decoder.new_cache(TEXTS.blocks, BLOCK_SIZE)
    cache.fill_(float("nan"))  # reads of unwritten cells show as NaN
    return program, cache


def logits_of(
    config: ModelConfig, device: Device, dtype: torch.dtype = torch.float32, invariant: bool = False
) -> list[np.ndarray]:
    program, cache = build(config, device, dtype, invariant)
    # The buffer of logits is reused in every step.
    return [
        program.run(device_batch(step, device), cache)[0].float().cpu().numpy().copy()
        for step in TEXTS.steps(PLAN)
    ]


def relative_error(ours: list[np.ndarray], theirs: list[np.ndarray]) -> float:
    pairs = zip(ours, theirs, strict=True)
    return max(float(np.abs(mine - other).max() / np.abs(other).max()) for mine, other in pairs)
