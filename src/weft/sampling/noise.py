"""The noise of sampling: the definition that every sampler follows.

Noise is a pure function of (seed, output index, token id). It does not depend on the batch, the row, the step or
earlier tokens. So a request gives the same text alone, in a batch, after a preemption, and on replay.

    mix(x)   = the output function of SplitMix64: three xor-shifts, two multiplications, modulo 2^64
    key      = mix(mix(seed + G) + output index * G)              once per sampled token
    bits     = mix(key + (token id + 1) * G) >> 32                32 bits: the SplitMix64 stream of that key
    v        = (bits + 0.5) / 2^32                                0 < v < 1
    gumbel   = -log(-log1p(-v))

with G = 0x9E3779B97F4A7C15 and seeds modulo 2^64. The sampled token is the argmax of logits / temperature + gumbel; the
lowest id wins a tie. This is an exact draw from the softmax.

The bits are identical on all backends. The logarithms may differ in the last digit, depending on the precision. Large
noise, which decides the argmax, comes from small v, where single precision is accurate. In single precision, clamp v to
at most 1 - 2^-24.
"""

from __future__ import annotations

import math

import numpy as np

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)

# The range of the noise. A score that is further below the best than GUMBEL_MAX - GUMBEL_MIN can never win.
GUMBEL_MAX = -math.log(-math.log1p(-(2.0**-33)))
GUMBEL_MIN = -math.log(-math.log1p(-(1.0 - 2.0**-33)))


def _mix(values: np.ndarray) -> np.ndarray:
    # uint64 products and sums wrap modulo 2^64, as the definition requires.
    values = (values ^ (values >> np.uint64(30))) * _FIRST
    values = (values ^ (values >> np.uint64(27))) * _SECOND
    return values ^ (values >> np.uint64(31))


def as_seed(seed: int) -> int:
    """A seed of any sign and size, modulo 2^64."""
    return seed & 0xFFFF_FFFF_FFFF_FFFF


def noise_keys(seeds: np.ndarray, output_indices: np.ndarray) -> np.ndarray:
    """One uint64 key per sampled token. `seeds` uint64 [S], `output_indices` [S]."""
    return _mix(_mix(seeds.astype(np.uint64) + _GAMMA) + output_indices.astype(np.uint64) * _GAMMA)


def noise_bits(keys: np.ndarray | np.uint64, token_ids: np.ndarray) -> np.ndarray:
    """32 random bits, as uint64, for each pair of key and token id (broadcast)."""
    return _mix(keys + (token_ids.astype(np.uint64) + np.uint64(1)) * _GAMMA) >> np.uint64(32)


def uniform(bits: np.ndarray) -> np.ndarray:
    """float64 values between 0 and 1, both excluded."""
    return (bits.astype(np.float64) + 0.5) * 2.0**-32


def gumbel(uniform_values: np.ndarray) -> np.ndarray:
    """float64 Gumbel noise. Smaller uniform values give larger noise."""
    return -np.log(-np.log1p(-uniform_values))
