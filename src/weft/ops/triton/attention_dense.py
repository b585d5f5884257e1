"""Attention of a step of new prompts of one length, by cuDNN: on a Hopper it is faster than the kernels here.

cuDNN plans for every shape that it meets, which takes it as long as some hundred layers of attention. So it gets only
long prompts of lengths that come again: prompts in chunks, which are round, and not every prompt's own length.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.ops.base import AttentionShape
from weft.ops.triton.device import Device
from weft.ops.triton.device_batch import DeviceBatch

_ROUND = 256
_SHORTEST = 1024


def dense_attention_serves(shape: AttentionShape, device: Device) -> bool:
    """Whether cuDNN on this device knows such attention."""
    return (
        device.is_card
        and device.dependent_launches  # a Hopper, or newer
        and torch.backends.cudnn.is_available()
        and shape.score_cap is None
        and shape.head_size in (64, 128)
    )


def is_dense(batch: DeviceBatch, window: int | None) -> bool:
    """Whether the step is nothing but new prompts of one long and round length, each seen whole by its last token."""
    length = batch.longest_query
    return (
        length >= _SHORTEST
        and length % _ROUND == 0
        and batch.tokens == batch.requests * length
        and batch.longest_context == length
        and (window is None or window >= length)
    )


def dense_attention(batch: DeviceBatch, qkv: Tensor, shape: AttentionShape) -> Tensor:
    """Of qkv [tokens, (heads + 2 kv heads) * head size] with Q and K turned: [tokens, heads * head size]."""
    length = batch.longest_query
    rows = qkv.view(batch.requests, length, shape.heads + 2 * shape.kv_heads, shape.head_size).transpose(1, 2)
    queries, keys, values = rows.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
    # The operation itself: torch's front door chooses anew at every call, and warns where it would not take cuDNN.
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
    # cuDNN lays its result out as the queries are: token after token, so that nothing is copied here.
    return attended.transpose(1, 2).reshape(batch.tokens, shape.heads * shape.head_size)
