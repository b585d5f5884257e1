"""Prints random comments, docstrings and functions of the source, to be judged by a reader who knows vLLM but not weft.

    python tools/sample_comments.py --seed 105 --comments 60 --functions 10

The same seed and the same source give the same sample. Without --comments every comment is printed.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import io
import random
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FOLDERS = ("src", "csrc", "benchmarks")
CPP = (".cpp", ".h", ".inl")
JS, CSS = ".js", ".css"
# A string must be recognised too: `//` inside it is no comment.
CPP_TOKEN = re.compile(
    r'//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'', re.S
)
CSS_TOKEN = re.compile(r'/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.S)
# A lone quote, backtick, brace or slash begins something that `_js_comments` reads to its end.
JS_TOKEN = re.compile(CSS_TOKEN.pattern + r"|//[^\n]*|[`{}/]", re.S)
JS_TEMPLATE = re.compile(r"(?:\\.|\$(?!\{)|[^\\`$])*(`|\$\{)", re.S)
JS_REGEX = re.compile(r"/(?:\\.|\[(?:\\.|[^\]\\\n])*\]|[^/\\\n\[])+/")
# What precedes a regular expression. Otherwise a slash divides.
JS_BEFORE_REGEX = re.compile(r"(?:^|[(,=:\[!&|?{};]|=>|\breturn)\s*\Z")
JS_FUNCTION = re.compile(
    r"^( *)(?:(?:export |async |static |get |set )*"
    r"(?!(?:if|for|while|switch|catch)\b)(?:function\*? )?[\w#]+\([^;]*?\)|(?:export )?const \w+ = [^;{]*?=>) \{$",
    re.M,
)
CPP_FUNCTION = re.compile(
    r"^( *)(?!(?:if|for|while|switch|else|do|return)\b)\w[^\n(={;#/]* [^\n(={;#/]*\w\([^;{}]*\)[\w\s]*\{$",
    re.M,
)
# Not text for a reader: instructions to a tool, the end of a namespace, a ruled line.
DIRECTIVE = re.compile(r"\W*(?:(?:noqa|type: ignore|fmt|clang-format|NOLINT|pragma|namespace)\b|--)")


class Piece(NamedTuple):
    """A comment or a function, with the line of its file on which it begins."""

    path: str
    line: int
    text: str


class Line(NamedTuple):
    """One line of a comment. `alone` says that no code precedes it on its line."""

    number: int
    column: int
    alone: bool
    text: str


def comments(path: str, source: str) -> list[Piece]:
    """The comments and docstrings of a file, in the order of its lines. Comments on consecutive lines are one."""
    if not path.endswith(".py"):
        return list(_merged(path, _lines_of_comments(source, _comments_of_braces(path, source))))
    found = list(_merged(path, _python_lines(source)))
    for node in ast.walk(ast.parse(source)):
        # Any string that is a statement: Python's docstrings, and the strings that describe attributes.
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            found.append(Piece(path, node.lineno, inspect.cleandoc(node.value.value)))
    return sorted(found, key=lambda piece: piece.line)


def functions(path: str, source: str) -> Iterator[Piece]:
    """The functions of a file. In C++ and JavaScript one ends at the first closing brace of its own indentation."""
    if path.endswith(CSS):
        return
    if not path.endswith(".py"):
        for match in (JS_FUNCTION if path.endswith(JS) else CPP_FUNCTION).finditer(source):
            end = source.find(f"\n{match[1]}}}", match.end())
            yield Piece(
                path,
                source.count("\n", 0, match.start()) + 1,
                source[match.start() : end] + f"\n{match[1]}}}",
            )
        return
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield Piece(path, node.lineno, "\n".join(lines[node.lineno - 1 : node.end_lineno]))


def _python_lines(source: str) -> Iterator[Line]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            yield Line(row, column, not token.line[:column].strip(), token.string.lstrip("#!").strip())


def _comments_of_braces(path: str, source: str) -> Iterator[re.Match[str]]:
    """The comments of a file in a language with braces, with their marks."""
    if path.endswith(JS):
        found = _js_comments(source)
    else:
        found = (CSS_TOKEN if path.endswith(CSS) else CPP_TOKEN).finditer(source)
    return (match for match in found if match[0].startswith(("//", "/*")))


def _js_comments(source: str) -> Iterator[re.Match[str]]:
    """Comments and strings, without those that only look like it in a template or a regular expression."""
    opened: list[str] = []  # the open braces: "{", or "${" in a template
    match = JS_TOKEN.search(source)
    while match is not None:
        end, text = match.end(), match[0]
        if text == "{":
            opened.append(text)
        elif text == "`" or (text == "}" and opened and opened.pop() == "${"):
            rest = JS_TEMPLATE.match(source, end)
            assert rest is not None, "a template without an end"
            end = rest.end()
            if rest[1] == "${":
                opened.append(rest[1])
        elif text == "/":
            regex = JS_REGEX.match(source, match.start())
            if regex and JS_BEFORE_REGEX.search(source[max(0, match.start() - 100) : match.start()]):
                end = regex.end()
        else:
            yield match
        match = JS_TOKEN.search(source, end)


def _lines_of_comments(source: str, found: Iterator[re.Match[str]]) -> Iterator[Line]:
    for match in found:
        text = match[0]
        begin = source.rfind("\n", 0, match.start()) + 1
        number, column = source.count("\n", 0, match.start()) + 1, match.start() - begin
        alone = not source[begin : match.start()].strip()
        for offset, line in enumerate(text.removesuffix("*/").split("\n")):
            yield Line(number + offset, column, alone or offset > 0, line.strip().lstrip("/*").strip())


def _merged(path: str, lines: Iterator[Line]) -> Iterator[Piece]:
    piece, last = None, None
    for line in lines:
        if DIRECTIVE.match(line.text):
            continue
        if piece and last and line.alone and line.number == last.number + 1 and line.column == last.column:
            piece = piece._replace(text=f"{piece.text}\n{line.text}")
        else:
            if piece:
                yield piece
            piece = Piece(path, line.number, line.text)
        last = line
    if piece:
        yield piece


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--comments", type=int, help="how many comments; all without this option")
    parser.add_argument("--functions", type=int, default=0, help="how many functions (default: none)")
    parser.add_argument("paths", nargs="*", default=FOLDERS, help=f"default: {' '.join(FOLDERS)}")
    args = parser.parse_args()
    listed = subprocess.run(
        ["git", "ls-files", *args.paths], cwd=ROOT, capture_output=True, text=True, check=True
    )
    sources = {
        path: (ROOT / path).read_text("utf-8")
        for path in sorted(listed.stdout.split())
        if path.endswith((*CPP, JS, CSS, ".py"))
    }
    everything = [piece for path, source in sources.items() for piece in comments(path, source)]
    bodies = [piece for path, source in sources.items() for piece in functions(path, source)]
    chance = random.Random(args.seed)
    if args.comments is not None:
        everything = chance.sample(everything, min(args.comments, len(everything)))
    for piece in everything + chance.sample(bodies, min(args.functions, len(bodies))):
        print(f"{piece.path}:{piece.line}\n{piece.text}\n")


if __name__ == "__main__":
    main()
