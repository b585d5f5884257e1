"""What Triton's interpreter needs to run these kernels in tests, and to run them in seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from triton.runtime import interpreter

# A product is summed as so many partial sums.
_PARTIAL_SUMS = 8


def mend() -> None:
    """For Triton 3.6 and numpy 2.4; what is mended already stays as it is."""
    if not getattr(interpreter, "is_mended", False):
        _patch_tensor = interpreter._patch_lang_tensor
        _patch_language = interpreter._patch_lang
        patched: set[int] = set()

        def patch_tensor(tensor: Any, scope: Any) -> None:
            """A loop's bound is a tensor of one number, and numpy makes no integer of an array [1], as Triton asks."""
            _patch_tensor(tensor, scope)
            scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

        def patch_language(function: Callable[..., Any]) -> Any:
            """Once and for all: every call of a function inside a kernel would look through the whole language again."""
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
        interpreter.is_mended = True


def product(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """left [m, k] @ right [k, n], each element summed in an order that k alone decides, as on a card.

    The order of numpy's own product depends on the processor, on the shape, and on the place of an element. With it, a test
    that two kernels give the same bits would test numpy. Here every operation is elementwise, so nothing is reordered.
    """
    length = left.shape[1]
    step = min(_PARTIAL_SUMS, length)
    assert length % step == 0, f"a product over {length} elements; kernels have powers of two"
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
