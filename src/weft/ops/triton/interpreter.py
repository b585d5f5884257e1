"""Patches of Triton's interpreter: with them the tests can run these kernels, and finish in seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from triton.runtime import interpreter

# The number of partial sums in which a product is computed.
_PARTIAL_SUMS = 8


def patch() -> None:
    """Applies the patches, once; for Triton 3.6 and numpy 2.4."""
    if not getattr(interpreter, "is_patched", False):
        _patch_tensor = interpreter._patch_lang_tensor
        _patch_language = interpreter._patch_lang
        patched: set[int] = set()

        def patch_tensor(tensor: Any, scope: Any) -> None:
            """Loop bounds are tensors of one number. Triton calls int() on an array of shape [1], which numpy 2.4
            rejects."""
            _patch_tensor(tensor, scope)
            scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

        def patch_language(function: Callable[..., Any]) -> Any:
            """Patches each module once: Triton would patch the whole language again at every call of a function
            inside a kernel."""
            if id(function.__globals__) not in patched:
                _patch_language(function)
                patched.add(id(function.__globals__))
            return interpreter._LangPatchScope()

        def create_dot(builder: Any, left: Any, right: Any, sums: Any, *precision: Any) -> Any:
            total = product(left.data, right.data) + sums.data
            return interpreter.TensorHandle(total, sums.dtype.scalar)

        interpreter._patch_lang_tensor = patch_tensor
        interpreter._patch_lang = patch_language
        interpreter.InterpreterBuilder.create_dot = create_dot
        interpreter.is_patched = True


def product(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Computes left [m, k] @ right [k, n] with a summation order that depends on k alone, as on a GPU.

    The order of numpy's own product depends on the processor, the shape and the position of an element. So a test that
    compares the bits of two kernels would only test numpy. Here every operation is elementwise, so nothing is
    reordered.
    """
    length = left.shape[1]
    step = min(_PARTIAL_SUMS, length)
    assert length % step == 0, f"a product over {length} elements; expected a power of two"
    right = np.ascontiguousarray(right)
    sums = left[:, :step, None] * right[:step]
    terms = np.empty_like(sums)
    for first in range(step, length, step):
        np.multiply(left[:, first : first + step, None], right[first : first + step], out=terms)
        sums += terms
    while step > 1:
        step //= 2
        sums = sums[:, :step] + sums[:, step:]
    return sums[:, 0]
