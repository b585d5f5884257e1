"""Patches of Triton's interpreter: with them the tests can run these kernels, and finish in seconds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from triton.language import core
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
            """Patches the conversion of loop bounds, which are tensors of one number, to int: Triton calls int() on an
            array of shape [1], which numpy 2.4 rejects."""
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
        # Triton would compute whether an integer overflows, and then drop the assertion, because `debug` is off.
        builder = interpreter.interpreter_builder
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
        _remember_types()
        interpreter.is_patched = True


def _remember_types() -> None:
    """Triton describes type and shape of every result anew, which takes longer than most operations. Here each
    description is made once."""
    make_block_type, make_tensor = core.block_type.__init__, core.tensor.__init__
    find_numpy_type = interpreter._get_np_dtype
    block_types: dict[tuple[Any, ...], dict[str, Any]] = {}
    shapes: dict[str | None, tuple[Any, Any]] = {}
    numpy_types: dict[str, np.dtype] = {}

    def init_block_type(block_type: Any, element_type: Any, shape: Any) -> None:
        key = (element_type.name, *shape)
        if key in block_types:
            vars(block_type).update(block_types[key])
        else:
            make_block_type(block_type, element_type, shape)
            block_types[key] = dict(vars(block_type))

    def init_tensor(tensor: Any, handle: Any, tensor_type: Any) -> None:
        name = tensor_type.name if tensor_type.is_block() else None
        if name in shapes:
            tensor.handle, tensor.type, tensor.dtype = handle, tensor_type, tensor_type.scalar
            tensor.numel, tensor.shape = shapes[name]
        else:
            make_tensor(tensor, handle, tensor_type)
            shapes[name] = tensor.numel, tensor.shape

    def numpy_type(some_type: Any) -> np.dtype:
        name = some_type.scalar.name
        if name not in numpy_types:
            numpy_types[name] = find_numpy_type(some_type)
        return numpy_types[name]

    core.block_type.__init__ = init_block_type
    core.tensor.__init__ = init_tensor
    interpreter._get_np_dtype = numpy_type


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
