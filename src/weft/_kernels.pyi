"""The C++ kernels (csrc/), as Python sees them. Arrays are contiguous numpy arrays of exactly these types."""

def available() -> list[str]:
    """The instruction sets that this processor has kernels for, the best first."""

def in_use() -> str: ...
def use(name: str) -> None:
    """Use the kernels of another instruction set, for tests and measurements."""
