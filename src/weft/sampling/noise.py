"""The noise of sampling: the one definition that every sampler follows.

Noise is a pure function of (seed, output index, token id). It does not depend on the batch, the row, the step or
what was sampled before, so a request gives the same text alone, in company, after preemption and on replay.

    mix(x)   = the output function of SplitMix64: three xor-shifts, two multiplications, modulo 2^64
    key      = mix(mix(seed + G) + output index * G)              once per sampled token
    bits     = mix(key + (token id + 1) * G) >> 32                32 bits: SplitMix64's stream from that key
    v        = (bits + 0.5) / 2^32                                0 < v < 1
    gumbel   = -log(-log1p(-v))

with G = 0x9E3779B97F4A7C15 and seeds taken modulo 2^64. A token is the argmax of logits / temperature + gumbel,
the lowest id at a tie, which is an exact draw from the softmax. The bits are the same everywhere; the logarithms
are the same up to the last place of the arithmetic they are done in. They are arranged so that the large noise that
wins comes from a small v, which single precision holds exactly enough: there, clamp v to at most 1 - 2^-24.
"""

from __future__ import annotations

import math

import numpy as np

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)

# No noise is outside these: a logit further below the best than their distance can never win.
GUMBEL_MAX = -math.log(-math.log1p(-(2.0**-33)))
GUMBEL_MIN = -math.log(-math.log1p(-(1.0 - 2.0**-33)))


def _mix(values: np.ndarray) -> np.ndarray:
    # Products and sums of uint64 arrays wrap, which is what is meant here.
    values = (values ^ (values >> np.uint64(30))) * _FIRST
    values = (values ^ (values >> np.uint64(27))) * _SECOND
    return values ^ (values >> np.uint64(31))


def as_seed(seed: int) -> int:
    """A seed of any sign and size as the 64 bits that the noise is made from."""
    return seed & 0xFFFF_FFFF_FFFF_FFFF


def noise_keys(seeds: np.ndarray, output_indices: np.ndarray) -> np.ndarray:
    """uint64 keys of sampled tokens: `seeds` uint64 [S], `output_indices` [S]."""
    return _mix(_mix(seeds.astype(np.uint64) + _GAMMA) + output_indices.astype(np.uint64) * _GAMMA)


def noise_bits(keys: np.ndarray | np.uint64, token_ids: np.ndarray) -> np.ndarray:
    """32 random bits, as uint64, for each pair of key and token id (broadcast)."""
    return _mix(keys + (token_ids.astype(np.uint64) + np.uint64(1)) * _GAMMA) >> np.uint64(32)


def uniform(bits: np.ndarray) -> np.ndarray:
    """float64 between 0 and 1, neither of them."""
    return (bits.astype(np.float64) + 0.5) * 2.0**-32


def gumbel(uniform_values: np.ndarray) -> np.ndarray:
    """float64 Gumbel noise from uniform values: the smaller those, the larger it is."""
    return -np.log(-np.log1p(-uniform_values))
