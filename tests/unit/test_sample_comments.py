"""tools/sample_comments.py finds the comments and functions of Python, C++, JavaScript and CSS."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_spec = importlib.util.spec_from_file_location(
    "sample_comments", Path(__file__).parents[2] / "tools" / "sample_comments.py"
)
assert _spec is not None and _spec.loader is not None
sample_comments = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = sample_comments
_spec.loader.exec_module(sample_comments)

PYTHON = '''"""The module."""

# Two lines
# of one comment.
LIMIT = 3  # after code  # noqa
SIZE = 4
"""An attribute."""
TEXT = "# not a comment"


def work() -> None:
    """A function."""
    return None
'''
CPP = """// Two lines
// of one comment.
const char* text = "// not a comment";   // after code

/* A block
   of lines. */
int add(int a,
        int b) {
  if (a > b) {
    return a;
  }
  return a + b;
}

}  // namespace weft
"""
JS = """// Two lines
// of one comment.
const text = `// not a comment ${name(`/* nor */ this ${"}"}`) /* but this */} // nor this`;   // after code

/** A class. */
class Adder {
  async add(a, b) {
    return a.replace(/["'`/*]\\/[/*]/g, "") / b; // a division
  }
}
"""
CSS = """/* A block
   of lines. */
a[href="/* not a comment */"] { color: red; } /* after code */
"""


def test_python_comments_and_docstrings_are_found_with_their_lines() -> None:
    found = sample_comments.comments("a.py", PYTHON)
    assert [(piece.line, piece.text) for piece in found] == [
        (1, "The module."),
        (3, "Two lines\nof one comment."),
        (5, "after code  # noqa"),
        (7, "An attribute."),
        (12, "A function."),
    ]


def test_cpp_comments_are_found_with_their_lines() -> None:
    found = sample_comments.comments("a.cpp", CPP)
    assert [(piece.line, piece.text) for piece in found] == [
        (1, "Two lines\nof one comment."),
        (3, "after code"),
        (5, "A block\nof lines."),
    ]


def test_javascript_comments_are_found_outside_of_templates_and_regular_expressions() -> None:
    found = sample_comments.comments("a.js", JS)
    assert [(piece.line, piece.text) for piece in found] == [
        (1, "Two lines\nof one comment."),
        (3, "but this"),
        (3, "after code"),
        (5, "A class."),
        (8, "a division"),
    ]


def test_css_comments_are_found_with_their_lines() -> None:
    found = sample_comments.comments("a.css", CSS)
    assert [(piece.line, piece.text) for piece in found] == [
        (1, "A block\nof lines."),
        (3, "after code"),
    ]


def test_functions_are_found_whole() -> None:
    (python,) = sample_comments.functions("a.py", PYTHON)
    assert (python.line, python.text.splitlines()[-1]) == (11, "    return None")
    (cpp,) = sample_comments.functions("a.cpp", CPP)
    assert (cpp.line, cpp.text.splitlines()[-2:]) == (7, ["  return a + b;", "}"])
    (js,) = sample_comments.functions("a.js", JS)
    assert (js.line, js.text.splitlines()[-1]) == (7, "  }")
    assert not list(sample_comments.functions("a.css", CSS))
