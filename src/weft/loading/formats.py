"""The tensor formats of GGUF and safetensors files: type numbers, names and block sizes. `decoding` decodes them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TensorFormat:
    """A tensor format: a quantisation block of `block_bytes` bytes holds `block_values` values."""

    name: str
    block_values: int
    block_bytes: int

    def bytes_of(self, values: int) -> int:
        """The size in bytes of `values` values, a multiple of `block_values`."""
        return values // self.block_values * self.block_bytes


F32 = TensorFormat("F32", 1, 4)
F16 = TensorFormat("F16", 1, 2)
BF16 = TensorFormat("BF16", 1, 2)
F64 = TensorFormat("F64", 1, 8)
I64 = TensorFormat("I64", 1, 8)
"""No model reads tensors of this format, but files have them."""

GGUF_FORMATS: dict[int, TensorFormat] = {
    0: F32,
    1: F16,
    2: TensorFormat("Q4_0", 32, 18),
    3: TensorFormat("Q4_1", 32, 20),
    6: TensorFormat("Q5_0", 32, 22),
    7: TensorFormat("Q5_1", 32, 24),
    8: TensorFormat("Q8_0", 32, 34),
    10: TensorFormat("Q2_K", 256, 84),
    11: TensorFormat("Q3_K", 256, 110),
    12: TensorFormat("Q4_K", 256, 144),
    13: TensorFormat("Q5_K", 256, 176),
    14: TensorFormat("Q6_K", 256, 210),
    15: TensorFormat("Q8_K", 256, 292),
    28: F64,
    30: BF16,
}

SAFETENSORS_FORMATS: dict[str, TensorFormat] = {entry.name: entry for entry in (F32, F16, BF16, F64)}

# GGUF formats that weft does not read. Their names are for the error message.
OTHER_GGUF_FORMATS: dict[int, str] = {
    9: "Q8_1", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S",
    23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
    40: "NVFP4",
}  # fmt: skip
