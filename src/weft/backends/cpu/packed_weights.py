"""The weights of a model for the C++ kernels: the check of `quantize`, and the file in which packed weights are kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from weft.backends.cpu.memory_budget import MemoryBudget
from weft.backends.host_memory import HostMemory, host_memory
from weft.errors import InvalidRequestError
from weft.loading.checkpoint import Checkpoint
from weft.loading.packed import identity_of, open_packed, packed_path

if TYPE_CHECKING:
    from weft.ops.cpu.weights import Keep


def keep_packed(checkpoint: Checkpoint, variant: str, threads: int, memory: HostMemory | None = None) -> Keep:
    """Keeps packed weights in a file for the next start, or in memory if that is not possible. `variant` names the
    packing (`packed_path`)."""
    from weft import _kernels
    from weft.ops.cpu.weights import in_memory

    files = checkpoint.files

    def keep(sizes: Mapping[str, int], fill: Callable[[str, np.ndarray], None]) -> dict[str, np.ndarray]:
        with MemoryBudget(memory or host_memory(), sum(sizes.values())).for_weights():
            if files:  # a random model has no files, and nothing worth keeping
                path = packed_path(checkpoint.path, variant)
                identity = identity_of(files, variant)
                pieces = open_packed(path, identity, sizes, fill, _kernels.checksum, threads)
                if pieces is not None:
                    return pieces
            return in_memory(sizes, fill)

    return keep


def check_quantize(quantize: str | None, checkpoint: Checkpoint, is_native: bool) -> None:
    if quantize is None:
        return
    if quantize not in ("int8", "int4"):
        raise InvalidRequestError(f"quantize is {quantize!r}; allowed: int8, int4", field="quantize")
    if not is_native:
        raise InvalidRequestError(
            "quantize needs the C++ kernels, and this install of weft has none (`weft doctor` says why)",
            field="quantize",
        )
    if not checkpoint.has_float_weights:
        raise InvalidRequestError(
            f"quantize is {quantize!r}, but the weights of {checkpoint.path.name} are quantised already "
            f"({checkpoint.stored_as})",
            field="quantize",
        )
