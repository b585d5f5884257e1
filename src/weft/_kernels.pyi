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
    """Instruction sets with kernels that this processor supports, best first."""

def in_use() -> str: ...
def use(name: str) -> None:
    """Selects the kernels of another instruction set, for tests and measurements."""

class Pool:
    """Threads that share the work of a step. A backend has one pool; one thread at a time calls it."""

    def __init__(self, threads: int) -> None: ...
    @property
    def threads(self) -> int: ...
    def take_pages(self, bytes: NDArray[np.uint8]) -> None:
        """Prefaults this memory now, on all threads. The content stays; no other thread may write to it meanwhile."""

    def offer_pages(self, bytes: NDArray[np.uint8]) -> None:
        """Prefaults this memory during the next step, on one thread while the others compute, if that step is a
        pipeline. The memory must stay until it is withdrawn, and it is withdrawn before the next offer."""

    def withdraw_pages(self) -> bool:
        """True: no thread prefaulted the offered memory. False: a thread did, or nothing was offered."""

class LinearWeight:
    """A linear layer in one of the packed layouts (csrc/kernels/kernels.h). The bytes are not copied."""

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
        """`shape`: heads, kv heads, head size, scale, cap (0: none). `patterns`: RoPE index, window (0: none)."""

    def buffer(self, columns: int) -> int: ...
    def embed(
        self, table: LinearWeight, output: int, scale: float, index: int = 0, first_row: int = 0
    ) -> None:
        """`index` selects the rows: 0 token ids, 1 positions, 2 types. `first_row` is added to them."""

    def norm(
        self,
        input: int,
        kind: int,
        weight: NDArray[np.float32] | None,
        bias: NDArray[np.float32] | None,
        epsilon: float,
        output: int,
    ) -> None:
        """An operation on rows, with the numbers of `linear`: a norm, an activation or a gate."""

    def linear(
        self,
        input: int,
        before: int,
        norm: NDArray[np.float32] | None,
        norm_bias: NDArray[np.float32] | None,
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
    ) -> None:
        """With `layer` -1, K and V are not written to a cache."""

    def text_attention(self, rows: int, pattern: int, causal: bool, output: int) -> None:
        """Attention over whole texts, from packed Q, K and V."""

    def mean_rows(self, input: int, output: int) -> None: ...
    def end_texts(self, rows: int) -> None:
        """The program computes one row for each text, in this buffer."""

    def run_texts(
        self,
        token_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        types: NDArray[np.int64],
        starts: NDArray[np.int64],
        selected: NDArray[np.int64],
    ) -> NDArray[np.float32]:
        """Runs a step of whole texts. Returns one row for each: a view, valid until the next call. `selected` has a token
        of each text, for `select_rows`."""

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
        """Returns the logits of the first `sampled` selected rows, and the other selected rows: views, valid until
        the next call. `two_tier`: store, bits, tail blocks, store tables, and of each move the full block and the
        store block."""

    def logits(self, rows: NDArray[np.float32]) -> NDArray[np.float32]: ...
    def measure(self, on: bool) -> None:
        """Measures the time of each kind of instruction, from 0."""

    def seconds(self) -> dict[str, float]: ...

# Linear layers. A layout is a number: 0 W4, 1 W8, 2 f32, 3 f16, 4 bf16 (defined in csrc/kernels/kernels.h).

def layout_of(format: str) -> int:
    """The layout for tensors of this file format: the one that holds it exactly, or the smallest that holds it well."""

def packed_bytes(layout: int, outputs: int, inputs: int) -> int:
    """The size of the packed layer in bytes."""

def pack(
    format: str,
    raw: NDArray[np.uint8],
    inputs: int,
    layout: int,
    first_output: int,
    total_outputs: int,
    out: NDArray[np.uint8],
) -> None:
    """Writes the rows of a tensor, consecutive in `raw`, into a packed layer, from output `first_output` on.

    Rows of one layer may come in several calls, also from several threads at once.
    """

def checksum(bytes: NDArray[np.uint8]) -> int:
    """A 64-bit checksum. It detects damage, not manipulation. Releases the GIL."""

# Single kernels, for tests and measurements.

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
    """Returns codes, scales, starts and corrections of the rows, (row, input) of each outlier, and its value
    (csrc/kernels/kernels.h)."""

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

    `with_outliers`: outliers are separated from their groups. `rows_each`: rows of one kernel call, 0 for all.
    """

def unpack_rows(
    layout: int, outputs: int, inputs: int, packed: NDArray[np.uint8], indices: NDArray[np.int64]
) -> NDArray[np.float32]:
    """The weights of some outputs as floats."""

class Sampler:
    """Samples tokens from logits on a pool of threads; used by weft.backends.cpu.native_sampler."""

    def __init__(self, pool: Pool) -> None: ...
    def set_row(
        self,
        row: int,
        parameters: Sequence[float],
        biased: Sequence[int],
        biases: Sequence[float],
        min_tokens: int,
        ends: Sequence[int],
        has_grammar: bool,
    ) -> None:
        """Sets the sampling parameters of the request in `row`; required before an entry of that row that is not
        plain. `parameters`: `weft.request.sampler_words`."""

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
        masked: ndarray,  # int64 [M]: entry indices
        allowed: ndarray,  # uint8 [M, bytes]: one bit per token
        top_counts: ndarray,  # int64 [S]; -1: no logprobs
        tokens: ndarray,  # out: int64 [S]
        verdicts: ndarray,  # out: uint8 [S]; 0: good
        logprobs: ndarray,  # out: float64 [S], or empty if no entry has logprobs
        top_tokens: ndarray,  # out: int64 [S, largest top count]
        top_logprobs: ndarray,  # out: float64 [S, largest top count]
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
    """Seconds for one layer: the shortest run within `seconds`; a run computes all layers that `data` has room for.

    One in `outlier_every` groups of the rows has an outlier; 0: none.
    """

def measure_read(data: NDArray[np.uint8], pool: Pool, seconds: float) -> float:
    """Seconds to read `data` once: the shortest run within `seconds`."""

def measure_products(pool: Pool, seconds: float) -> float:
    """Byte products per second on all threads, from registers; 0 without instructions for them."""

# Rows: each function works on every row alone; `out` may alias the input.
def rms_norm(rows: Floats, weight: Floats, epsilon: float, out: Floats) -> None: ...
def layer_norm(rows: Floats, weight: Floats, bias: Floats | None, epsilon: float, out: Floats) -> None: ...
def gelu(rows: Floats, out: Floats) -> None: ...
def gelu_tanh(rows: Floats, out: Floats) -> None: ...
def tanh(rows: Floats, out: Floats) -> None: ...
def gelu_mul(gate: Floats, up: Floats, out: Floats) -> None: ...
def silu_mul(gate: Floats, up: Floats, out: Floats) -> None: ...
def gelu_tanh_mul(gate: Floats, up: Floats, out: Floats) -> None: ...
def add_scaled(left: Floats, right: Floats, scale: float, out: Floats) -> None:
    """out = left + scale * right"""

def scale_and_cap(rows: Floats, scale: float, cap: float) -> None:
    """rows = cap * tanh(rows * scale / cap), in place; a cap of 0 means no cap."""

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
    """Attention of the queries [count, heads, head size] of one request, at consecutive positions, over one layer of
    a cache [blocks, layers, kv heads, block size, room]. A window or cap of 0 means none. `split` computes the
    context of a single query in segments, as several threads would. `two_tier`: a store [blocks, layers, kv heads,
    bytes], its bits, the tail blocks, and the store table of the request."""

def attend_text(
    rows: Floats,
    heads: int,
    kv_heads: int,
    window: int,
    causal: bool,
    scale: float,
    cap: float,
    first: int,
    end: int,
    out: Floats,
) -> None:
    """Attention over one text of packed Q, K and V rows, for its tokens from `first` to `end` - 1."""

def write_cache(key: Floats, value: Floats, cache: Codes, layer: int, kv_head: int, cell: int) -> None:
    """Writes key and value of one token and KV head to one layer of a cache."""

def cache_room(block_size: int, head_size: int) -> int:
    """16-bit elements per position of one KV head's part of a KV block."""

def move_block(
    cache: Codes, layer: int, moved_from: int, store: Bytes, moved_to: int, head_size: int, bits: int
) -> None:
    """Quantises a KV block of one layer into a block of the store."""

# --- strings ----------------------------------------------------------------------------------------------------------

def read_strings(data: bytes | mmap, position: int, count: int, end: int) -> tuple[list[str], int] | None:
    """Reads `count` strings, each after its 64-bit length, from `position` up to `end`. Returns the strings and the
    end position; None if a string does not fit or is not UTF-8."""
