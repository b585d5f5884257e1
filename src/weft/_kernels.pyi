"""The C++ kernels (csrc/), as Python sees them. Arrays are contiguous numpy arrays of exactly these types."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

def available() -> list[str]:
    """The instruction sets that this processor has kernels for, the best first."""

def in_use() -> str: ...
def use(name: str) -> None:
    """Use the kernels of another instruction set, for tests and measurements."""

class Pool:
    """Threads that share the work of a step, the caller among them."""

    def __init__(self, threads: int) -> None: ...
    @property
    def threads(self) -> int: ...

class LinearWeight:
    """A linear layer in one of the packed layouts (csrc/kernels.h). The bytes stay where they are."""

    def __init__(
        self,
        layout: int,
        outputs: int,
        inputs: int,
        data: NDArray[np.uint8],
        bias: NDArray[np.float32] | None,
    ) -> None: ...
    @property
    def nbytes(self) -> int: ...

class Program:
    """A decoder as a list of instructions over buffers, run by one call per step (csrc/program.h)."""

    def __init__(
        self,
        pool: Pool,
        shape: tuple[int, int, int, float, float],
        ropes: Sequence[tuple[Sequence[float], bool, float]],
        patterns: Sequence[tuple[int, int]],
    ) -> None:
        """`shape`: heads, kv heads, head size, scale, cap (0: none). `patterns`: rope, window (0: none)."""

    def buffer(self, columns: int) -> int: ...
    def embed(self, table: LinearWeight, output: int, scale: float) -> None: ...
    def norm(self, input: int, weight: NDArray[np.float32], epsilon: float, output: int) -> None: ...
    def linear(
        self,
        input: int,
        before: int,
        norm: NDArray[np.float32] | None,
        epsilon: float,
        weight: LinearWeight,
        output: int,
        column: int,
        again: bool,
        add: bool,
        scale: float,
    ) -> None: ...
    def rope_and_write(
        self,
        rows: int,
        layer: int,
        pattern: int,
        query_norm: NDArray[np.float32] | None,
        key_norm: NDArray[np.float32] | None,
        epsilon: float,
    ) -> None: ...
    def attention(self, queries: int, layer: int, pattern: int, output: int) -> None: ...
    def mixture(
        self,
        input: int,
        router: LinearWeight,
        gate: list[LinearWeight],
        up: list[LinearWeight],
        down: list[LinearWeight],
        per_token: int,
        normalise: bool,
        output: int,
    ) -> None: ...
    def add(self, left: int, right: int, scale: float) -> None: ...
    def select_rows(self, input: int, output: int) -> None: ...
    def scale_and_cap(self, values: int, scale: float, cap: float) -> None: ...
    def begin_logits(self, rows: int) -> None: ...
    def end_logits(self, logits: int) -> None: ...
    def run(
        self,
        token_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        cells: NDArray[np.int64],
        query_starts: NDArray[np.int64],
        context_lengths: NDArray[np.int64],
        block_tables: NDArray[np.int64],
        logit_indices: NDArray[np.int64],
        cache: NDArray[np.uint16],
        sampled: int,
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """The logits of the first `sampled` selected rows, and the other selected rows: views, until the next call."""

    def logits(self, rows: NDArray[np.float32]) -> NDArray[np.float32]: ...

# Linear layers. A layout is a number: 0 W4, 1 W8, 2 f32, 3 f16, 4 bf16 (csrc/kernels.h says what each looks like).

def layout_of(format: str) -> int:
    """The layout for tensors stored in this format: the one that holds it exactly, or the smallest that holds it well."""

def packed_bytes(layout: int, outputs: int, inputs: int) -> int:
    """How many bytes the packed layer takes."""

def pack(
    format: str,
    raw: NDArray[np.uint8],
    inputs: int,
    layout: int,
    first_output: int,
    total_outputs: int,
    out: NDArray[np.uint8],
) -> None:
    """Write a tensor's rows, stored one after the other in `raw`, into a packed layer, from output `first_output` on.

    Rows of one layer may come in several calls, also from several threads at once.
    """

# What follows shows single kernels to tests and measurements.

def quantise(
    rows: NDArray[np.float32],
) -> tuple[NDArray[np.int8], NDArray[np.float32], NDArray[np.float32], NDArray[np.int32]]:
    """Codes, scales, offsets and corrections of the rows (QuantisedRows in csrc/kernels.h)."""

def linear(
    layout: int,
    outputs: int,
    inputs: int,
    packed: NDArray[np.uint8],
    bias: NDArray[np.float32] | None,
    rows: NDArray[np.float32],
    threads: int = 1,
    residual: NDArray[np.float32] | None = None,
    scale: float = 1.0,
) -> NDArray[np.float32]:
    """rows @ weights.T + bias; with a residual: residual + scale * (rows @ weights.T + bias)."""

def unpack_rows(
    layout: int, outputs: int, inputs: int, packed: NDArray[np.uint8], indices: NDArray[np.int64]
) -> NDArray[np.float32]:
    """The weights of some outputs as floats."""

def measure_linear(
    layout: int, outputs: int, inputs: int, data: NDArray[np.uint8], rows: int, pool: Pool, seconds: float
) -> float:
    """Seconds for one layer, the least of the tries that fit into `seconds`; a try takes all layers that `data` has room for."""

def measure_read(data: NDArray[np.uint8], pool: Pool, seconds: float) -> float:
    """Seconds to read `data` once, the least of the tries that fit into `seconds`."""

def measure_products(pool: Pool, seconds: float) -> float:
    """Products of bytes in a second on all threads, from registers; 0 where there are no instructions for them."""
