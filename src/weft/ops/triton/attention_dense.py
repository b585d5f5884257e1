"""Attention of a step with only new prompts of equal length, by cuDNN: on Hopper it is faster than the kernels here.

cuDNN builds a plan for each new shape, which takes as long as some hundred layers of attention. So cuDNN is used only
for long prompts with round lengths. Such lengths repeat, because long prompts are cut into chunks of one size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.ops.base import AttentionShape
from weft.ops.triton.device import Device
from weft.ops.triton.device_batch import DeviceBatch

_ROUND = 256
_SHORTEST = 1024


def supports_dense_attention(shape: AttentionShape, device: Device) -> bool:
    """True if cuDNN on this device supports this attention."""
    return (
        device.is_gpu
        and device.dependent_launches  # Hopper or newer
        and torch.backends.cudnn.is_available()
        and shape.score_cap is None
        and shape.head_size in (64, 128)
    )


def is_dense(batch: DeviceBatch, window: int | None) -> bool:
    """True if the step has only new prompts of one long, round length, and the last token sees its whole prompt."""
    length = batch.longest_query
    return (
        length >= _SHORTEST
        and length % _ROUND == 0
        and batch.tokens == batch.requests * length
        and batch.longest_context == length
        and (window is None or window >= length)
    )


def dense_attention(batch: DeviceBatch, qkv: Tensor, shape: AttentionShape) -> Tensor:
    """Attention of qkv [tokens, (heads + 2 kv heads) * head size], after RoPE. Returns [tokens, heads * head size]."""
    length = batch.longest_query
    rows = qkv.view(batch.requests, length, shape.heads + 2 * shape.kv_heads, shape.head_size).transpose(1, 2)
    queries, keys, values = rows.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
    # Calls the internal operation: the public function selects a backend at each call, and warns if that is not cuDNN.
    attended = torch.ops.aten._scaled_dot_product_cudnn_attention(
        queries,
        keys,
        values,
        attn_bias=None,
        compute_log_sumexp=False,
        dropout_p=0.0,
        is_causal=True,
        return_debug_mask=False,
        scale=shape.scale,
    )[0]
    # cuDNN's result has the memory layout of the queries, token by token, so nothing is copied here.
    return attended.transpose(1, 2).reshape(batch.tokens, shape.heads * shape.head_size)
