"""The noise of `weft.sampling.noise` on the device: the same bits, converted in single and double precision."""

from __future__ import annotations

import triton
import triton.language as tl

from weft.ops.triton.device import INTERPRETED

_GAMMA: tl.constexpr = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST: tl.constexpr = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND: tl.constexpr = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def _products(values):
    """SplitMix64's output function without its last xor-shift."""
    values = (values ^ (values >> 30)) * tl.full((), _FIRST, tl.uint64)
    return (values ^ (values >> 27)) * tl.full((), _SECOND, tl.uint64)


@triton.jit
def _mix(values):
    """SplitMix64's output function."""
    values = _products(values)
    return values ^ (values >> 31)


@triton.jit
def noise_key(seed, output_index):
    """`seed` int64 (used as bits), `output_index` int32; returns uint64."""
    gamma = tl.full((), _GAMMA, tl.uint64)
    return _mix(_mix(seed.to(tl.uint64, bitcast=True) + gamma) + output_index.to(tl.uint64) * gamma)


@triton.jit
def noise_steps(token_ids):
    """The numbers that are added to a key to get the SplitMix64 state of each token. Token 0 has the first state after
    the key."""
    return (token_ids + 1).to(tl.uint64) * tl.full((), _GAMMA, tl.uint64)


@triton.jit
def noise_bits(key, steps):
    """32 random bits for each token, as uint32: the upper half of `_mix`. The last xor-shift and the
    result have 32 bits, because converting 64-bit integers to float is slow on a GPU."""
    upper = (_products(key + steps) >> 32).to(tl.uint32)
    return upper ^ (upper >> 31)


@triton.jit
def _fast_log2(values):
    """log2 within 3e-7: one instruction on a GPU."""
    if INTERPRETED:
        return tl.log2(values)
    return tl.inline_asm_elementwise(
        "lg2.approx.f32 $0, $1;", "=f,f", [values], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def race_single(bits):
    """Exponential noise, exp(-gumbel), in single precision with a relative error of 2e-5. The smallest noise wins.

    The uniform value u and 1 - u are both made from the bits, so that neither end of the range loses precision."""
    small = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    rest = ((bits ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = small * (1.0 + small * (0.5 + small * (1.0 / 3 + small * (0.25 + small * 0.2))))
    return tl.where(small < 0.015625, series, _fast_log2(rest) * -0.6931471805599453)


@triton.jit
def gumbel_double(bits):
    """Gumbel noise in double precision."""
    small = (bits.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    tail = 1.0 / 5 + small * (1.0 / 6 + small * (1.0 / 7 + small * (1.0 / 8)))
    series = small * (1.0 + small * (0.5 + small * (1.0 / 3 + small * (0.25 + small * tail))))
    return -tl.log(tl.where(small < 0.00390625, series, -tl.log(1.0 - small)))
