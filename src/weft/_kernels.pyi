"""The C++ kernels (csrc/), as Python sees them. Arrays are contiguous numpy arrays of exactly these types."""

from collections.abc import Sequence
from mmap import mmap

import numpy as np
from numpy import ndarray
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Codes = NDArray[np.uint16]
Integers = NDArray[np.int64]
Bytes = NDArray[np.uint8]

def available() -> list[str]:
    """The instruction sets that this processor has kernels for, the best first."""

def in_use() -> str: ...
def use(name: str) -> None:
    """Use the kernels of another instruction set, for tests and measurements."""

class Pool:
    """Threads that share the work of a step; a backend has one, and one thread of it calls."""

    def __init__(self, threads: int) -> None: ...
    @property
    def threads(self) -> int: ...
    def take_pages(self, bytes: NDArray[np.uint8]) -> None:
        """Has the system give this memory now, to all threads at once. What it holds stays; nobody may write to it meanwhile."""

    def offer_pages(self, bytes: NDArray[np.uint8]) -> None:
        """The same during the next step, by one thread while the others compute, if that is a step in flow. The memory must stay
        until it is withdrawn, which is before anything else is offered."""

    def withdraw_pages(self) -> bool:
        """True: nobody took what was offered. False: somebody did, or nothing was."""

class LinearWeight:
    """A linear layer in one of the packed layouts (csrc/kernels/kernels.h). The bytes stay where they are."""

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
    """A decoder as a list of instructions over buffers, run by one call per step (csrc/program/program.h)."""

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
        two_tier: tuple[Bytes, int, int, Integers, Integers, Integers] | None = None,
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """The logits of the first `sampled` selected rows, and the other selected rows: views, until the next call.
        `two_tier`: the store, its bits, the blocks of a tail, tables of the store, the moves' full blocks and theirs there."""

    def logits(self, rows: NDArray[np.float32]) -> NDArray[np.float32]: ...
    def measure(self, on: bool) -> None:
        """Count the time that is spent in each kind of instruction, from 0."""

    def seconds(self) -> dict[str, float]: ...

# Linear layers. A layout is a number: 0 W4, 1 W8, 2 f32, 3 f16, 4 bf16 (csrc/kernels/kernels.h says what each looks like).

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

def checksum(bytes: NDArray[np.uint8]) -> int:
    """A checksum of 64 bits. It finds damage, not malice. Releases the interpreter's lock."""

# What follows shows single kernels to tests and measurements.

def quantise(
    rows: NDArray[np.float32], with_outliers: bool = True
) -> tuple[
    NDArray[np.int8],
    NDArray[np.float32],
    NDArray[np.int32],
    NDArray[np.int32],
    NDArray[np.uint32],
    NDArray[np.float32],
]:
    """Codes, scales, starts and corrections of the rows, row and input of each outlier, and its value (csrc/kernels/kernels.h)."""

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
    with_outliers: bool = True,
    rows_each: int = 0,
) -> NDArray[np.float32]:
    """rows @ weights.T + bias; with a residual: residual + scale * (rows @ weights.T + bias).

    `with_outliers`: they are taken out of their groups. `rows_each` cuts the work into pieces of so many rows.
    """

def unpack_rows(
    layout: int, outputs: int, inputs: int, packed: NDArray[np.uint8], indices: NDArray[np.int64]
) -> NDArray[np.float32]:
    """The weights of some outputs as floats."""

class Sampler:
    """From logits to tokens over a pool of threads; weft.backends.cpu.native_sampler is what uses it."""

    def __init__(self, pool: Pool) -> None: ...
    def set_row(
        self,
        row: int,
        top_k: int,
        top_p: float,
        has_min_p: bool,
        min_p_log: float,
        typical_p: float,
        repetition_penalty: float,
        frequency_penalty: float,
        presence_penalty: float,
        biased: Sequence[int],
        biases: Sequence[float],
        min_tokens: int,
        ends: Sequence[int],
        has_grammar: bool,
    ) -> None:
        """What the parameters of the request in `row` ask for; needed before an entry of it that is not plain."""

    def sample(
        self,
        logits: ndarray,  # float32 [S, vocabulary]
        rows: ndarray,  # int64 [S]
        positions: ndarray,  # int64 [S]
        output_indices: ndarray,  # int64 [S]
        seeds: ndarray,  # uint64 [S]
        temperatures: ndarray,  # float64 [S]
        is_plain: ndarray,  # bool [S]
        history: ndarray,  # int32 [rows, positions]
        prompt_lengths: ndarray,  # int64 [rows]
        masked: ndarray,  # int64 [M]: entries
        allowed: ndarray,  # uint8 [M, bytes]: a bit for each token
        top_counts: ndarray,  # int64 [S]; -1: no logprobs
        tokens: ndarray,  # out: int64 [S]
        verdicts: ndarray,  # out: uint8 [S]; 0: good
        logprobs: ndarray,  # out: float64 [S], or empty where nobody asks
        top_tokens: ndarray,  # out: int64 [S, most]
        top_logprobs: ndarray,  # out: float64 [S, most]
    ) -> None: ...
    def score(
        self,
        logits: ndarray,  # float32 [N, vocabulary]
        tokens: ndarray,  # int64 [N]
        top_count: int,
        logprobs: ndarray,  # out: float64 [N]
        top_tokens: ndarray,  # out: int64 [N, top_count]
        top_logprobs: ndarray,  # out: float64 [N, top_count]
    ) -> None: ...

def measure_linear(
    layout: int,
    outputs: int,
    inputs: int,
    data: NDArray[np.uint8],
    rows: int,
    pool: Pool,
    seconds: float,
    outlier_every: int = 0,
) -> float:
    """Seconds for one layer, the least of the tries that fit into `seconds`; a try takes all layers that `data` has room for.

    Of the groups of the rows one in `outlier_every` has an outlier, or none with 0.
    """

def measure_read(data: NDArray[np.uint8], pool: Pool, seconds: float) -> float:
    """Seconds to read `data` once, the least of the tries that fit into `seconds`."""

def measure_products(pool: Pool, seconds: float) -> float:
    """Products of bytes in a second on all threads, from registers; 0 where there are no instructions for them."""

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

def attend(
    queries: Floats,
    cache: Codes,
    layer: int,
    table: Integers,
    first_position: int,
    window: int,
    scale: float,
    cap: float,
    out: Floats,
    split: bool = False,
    two_tier: tuple[Bytes, int, int, Integers] | None = None,
) -> None:
    """Attention of one request's queries [count, heads, head size], at consecutive positions, over one layer of a cache
    [blocks, layers, kv heads, block size, room]. A window or a cap of 0 is none. `split` works through the
    context of a single query in segments, as several threads would. `two_tier`: a store [blocks, layers, kv heads,
    bytes], its bits, the blocks of a tail, and the request's table of the store."""

def write_cache(key: Floats, value: Floats, cache: Codes, layer: int, kv_head: int, cell: int) -> None:
    """Write what one token has of a kv head to one layer of a cache."""

def cache_room(block_size: int, head_size: int) -> int:
    """As many elements as a kv head's part of a block of the cache has for each position."""

def move_block(
    cache: Codes, layer: int, moved_from: int, store: Bytes, moved_to: int, head_size: int, bits: int
) -> None:
    """Quantise a block of one layer into a block of the store."""

# --- strings ----------------------------------------------------------------------------------------------------------

def read_strings(data: bytes | mmap, position: int, count: int, end: int) -> tuple[list[str], int] | None:
    """`count` strings behind their 64-bit lengths, from `position` to `end` at most, and where they end; None where one
    does not fit or is not UTF-8."""
