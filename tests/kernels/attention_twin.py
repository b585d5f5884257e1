"""Attention of one query in numpy: over the codes that the C++ kernels use, and over plain numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from stored_cache import CodedCache

from cache_codes import encode_queries, scale_of

SEGMENT = 256
LARGEST_WEIGHT, ALL_WEIGHTS = 32767, 65000
LOG2_E = np.float32(1.44269504)
LEAST_WEIGHT = 2.0**-40


@dataclass(frozen=True)
class Context:
    """The context of a request for one KV head, position by position: codes, and dequantised store values in float64."""

    codes: np.ndarray  # int16 [positions, 2, features]
    scales: np.ndarray  # float32 [positions, 2]
    stored: np.ndarray  # [positions, 2, features]


def contexts(
    cache: CodedCache, layer: int, table: np.ndarray, stored: np.ndarray | None = None
) -> list[Context]:
    """The context of each KV head; `stored` is [positions, 2, kv heads, features]."""
    codes, scales = (
        np.moveaxis(kept[table, layer], 1, 2).reshape(-1, 2, *kept.shape[4:])
        for kept in (cache.codes, cache.scales)
    )
    stored = np.empty((0, *codes.shape[1:])) if stored is None else stored
    return [
        Context(codes[:, :, head], scale_of(scales[:, :, head]), stored[:, :, head])
        for head in range(codes.shape[2])
    ]


def attend(
    query: np.ndarray, context: Context, seen: slice, scale: float, cap: float, border: int = 0
) -> np.ndarray:
    """Positions before the border are read from the store. Rounding matches the kernels, except for the exponentials
    and sums of weights, which are exact."""
    if not np.isfinite(query).all():
        return np.full(query.shape, np.nan)
    starts = range(seen.start // SEGMENT * SEGMENT, seen.stop, SEGMENT)
    parts = [(max(seen.start, start), min(seen.stop, start + SEGMENT)) for start in starts]
    with np.errstate(over="ignore", invalid="ignore"):
        segments = [
            _segment(query, context, *part, border, np.float32(scale), np.float32(cap)) for part in parts
        ]
        best = _base(max((largest for largest, *_ in segments), key=lambda x: (np.isnan(x), x)))
        shares = [np.exp2(np.float64(largest) - best) for largest, *_ in segments]
        total = sum(share * weight for share, (_, weight, _) in zip(shares, segments, strict=True))
        sums = sum(share * values for share, (*_, values) in zip(shares, segments, strict=True))
        return sums / total


def _segment(
    query: np.ndarray,
    context: Context,
    first: int,
    end: int,
    border: int,
    scale: np.float32,
    cap: np.float32,
) -> tuple[np.float32, np.float64, np.ndarray]:
    """Returns the largest score, the sum of the weights, and the weighted sum of the values."""
    border = min(max(border, first), end)
    stored = context.stored[first:border]
    codes, scales = context.codes[border:end].astype(np.float64), context.scales[border:end]
    unit = np.float32(1) if cap else LOG2_E
    scores = np.concatenate(
        [
            (stored[:, 0] @ query.astype(np.float64) * scale * unit).astype(np.float32),
            _scores(query, codes[:, 0], scales[:, 0], scale * unit),
        ]
    )
    if cap:
        scores = cap * LOG2_E * np.tanh((scores / cap).astype(np.float64)).astype(np.float32)
    largest = scores.max()
    below = scores - _base(largest)
    weights = np.exp2(below.astype(np.float64))
    total = weights.sum()
    weights[weights <= LEAST_WEIGHT] = 0
    kept = weights[: border - first] @ stored[:, 1]
    return largest, total, kept + _sums(weights[border - first :], codes[:, 1], scales[:, 1])


def _base(largest: np.floating) -> np.floating:
    return np.float32(0) if largest == -np.inf else largest


def _scores(query: np.ndarray, codes: np.ndarray, scales: np.ndarray, scale: np.float32) -> np.ndarray:
    query_codes, query_scale = encode_queries(query)
    products = (codes @ query_codes.astype(np.float64)).astype(np.float32)
    return products * scales * (scale_of(query_scale) * scale)


def _sums(weights: np.ndarray, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    scaled = np.where(weights == 0, np.float32(0), weights.astype(np.float32) * scales)
    total = scaled.sum(dtype=np.float32)
    if total == 0:
        return np.zeros(codes.shape[1])
    largest = scaled.max()
    unit = max(total * np.float32(1 / ALL_WEIGHTS), largest * np.float32(1 / LARGEST_WEIGHT))
    unit = largest / np.floor(largest / unit)
    weight_codes = np.rint(scaled * (np.float32(1) / unit)).astype(np.float64)
    return weight_codes @ codes * np.float64(unit)


def attend_plainly(query: np.ndarray, vectors: np.ndarray, scale: float, cap: float) -> np.ndarray:
    """Attention over all of vectors [positions, 2, features], in float64."""
    vectors = vectors.astype(np.float64)
    scores = vectors[:, 0] @ (query.astype(np.float64) * scale)
    if cap:
        scores = cap * np.tanh(scores / cap)
    weights = np.exp(scores - scores.max())
    return weights @ vectors[:, 1] / weights.sum()


def attend_all(
    queries: np.ndarray, first: int, window: int, attend_one: Callable[[np.ndarray, int, slice], np.ndarray]
) -> np.ndarray:
    """Calls attend_one(query, head, visible positions) for queries [queries, heads, features]; the first query is at
    `first`."""
    out = np.empty(queries.shape)
    for index, heads in enumerate(queries):
        end = first + index + 1
        seen = slice(max(0, end - window) if window else 0, end)
        for head, query in enumerate(heads):
            out[index, head] = attend_one(query, head, seen)
    return out


def assert_alike(out: np.ndarray, expected: np.ndarray, size: float = 1.0, what: object = "") -> None:
    """Compares rows of values of about `size`. Sums have another order, and rarely a weight is rounded to another
    code: 1/32767 of the largest weight, or 1/65000 of the total."""
    error = np.abs(out - expected).max(axis=-1).ravel() / size
    assert (error > 8e-6).sum() <= 2 + error.size // 20, f"{what}: {error[error > 8e-6]} of {error.size}"
    np.testing.assert_allclose(out, expected, rtol=0, atol=2.5e-4 * size, err_msg=str(what))
