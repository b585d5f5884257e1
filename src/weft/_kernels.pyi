"""The C++ kernels (csrc/), as Python sees them. Arrays are contiguous numpy arrays of exactly these types."""

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
    """Codes, scales, offsets and sums of the rows (QuantisedRows in csrc/kernels.h)."""

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
