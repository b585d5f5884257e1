"""What Triton's interpreter needs to run these kernels in tests, and to run them in seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton.runtime import interpreter


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

        interpreter._patch_lang_tensor = patch_tensor
        interpreter._patch_lang = patch_language
        interpreter.is_mended = True
