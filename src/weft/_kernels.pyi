"""The C++ kernels (csrc/), as Python sees them. Arrays are contiguous numpy arrays of exactly these types."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Halves = NDArray[np.uint16]  # the bits of float16
Integers = NDArray[np.int64]

def available() -> list[str]:
    """The instruction sets that this processor has kernels for, the best first."""

def in_use() -> str: ...
def use(name: str) -> None:
    """Use the kernels of another instruction set, for tests and measurements."""

# Rows: each function works on every row alone; `out` may be the input.
def rms_norm(rows: Floats, weight: Floats, epsilon: float, out: Floats) -> None: ...
def silu_mul(gate: Floats, up: Floats, out: Floats) -> None: ...
def gelu_tanh_mul(gate: Floats, up: Floats, out: Floats) -> None: ...
def add_scaled(left: Floats, right: Floats, scale: float, out: Floats) -> None:
    """out = left + scale * right"""

def scale_and_cap(rows: Floats, scale: float, cap: float) -> None:
    """In place; a cap of 0 is none."""

def rotate(heads: Floats, cosine: Floats, sine: Floats, interleaved: bool, out: Floats) -> None: ...
def route(logits: Floats, normalise: bool, chosen: NDArray[np.int32], shares: Floats) -> None:
    """The experts [tokens, per token] of each token, best first, and their shares."""

def to_half(row: Floats, out: Halves) -> None: ...
def attend(
    queries: Floats,
    cache: Halves,
    layer: int,
    table: Integers,
    first_position: int,
    window: int,
    scale: float,
    cap: float,
    out: Floats,
    split: bool = False,
) -> None:
    """Attention of one request's queries [count, heads, head size], at consecutive positions, over one layer of a cache
    [blocks, layers, 2, block size, kv heads, head size]. A window or a cap of 0 is none. `split` works through the
    context of a single query in segments, as several threads would."""
