"""Links, commands and flags in the documents exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.main import get_command

from benchmarks.__main__ import app as benchmarks_app
from weft.cli.main import app as weft_app

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAM = r"(?:weft|make|(?:\.venv/bin/)?python -m benchmarks)"
# Engines and ratios in the tables of `python -m benchmarks peers`.
NOT_COMMANDS = (
    "weft in process",
    "weft without drafts",
    "weft / best peer",
    "weft in process / best in process",
)
documents = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)


def without_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)


def anchors(document: Path) -> set[str]:
    """The anchors that GitHub makes from headings."""
    headings = re.findall(r"^#+ (.+)$", without_blocks(document.read_text("utf-8")), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(text: str) -> Iterator[str]:
    """The commands of a page: indented lines and inline code that begin with a program of PROGRAM.

    A command that is continued with a backslash is one line here.
    """
    joined = re.sub(r"\\\n\s*", "", text)
    for line in re.findall(rf"^(?: {{4}}|\t)({PROGRAM} .*)$", joined, re.M):
        yield from (part.strip() for part in line.partition(" #")[0].split(";"))
    yield from re.findall(rf"`({PROGRAM} [^`]*)`", without_blocks(joined))


@documents
def test_every_link_leads_to_a_page_and_a_heading_that_exist(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_blocks(document.read_text("utf-8"))):
        if re.match(r"https?://", target):
            continue
        page, _, heading = target.partition("#")
        found = (document.parent / page) if page else document
        assert found.exists(), f"{document.name} links to {target}"
        assert not heading or heading in anchors(found), f"{document.name} links to {target}"


@documents
def test_every_command_and_flag_that_is_shown_exists(document: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M))
    for line in commands(document.read_text("utf-8")):
        if line in NOT_COMMANDS:
            continue
        program, *words = re.sub(r"^\S*python -m benchmarks", "benchmarks", line).split()
        if program == "make":
            words = [word for word in words if "=" not in word]
            assert words and words[0] in targets, f"{document.name}: {line}"
            continue
        app = get_command(benchmarks_app if program == "benchmarks" else weft_app)
        command = app
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]  # type: ignore[attr-defined]
        known = {option for parameter in command.params for option in parameter.opts} | {
            "--help",
            "--version",
        }
        assert command is not app or words[0] in known, f"{document.name}: {line}"
        for word in words:
            if word.startswith("-") and word != "-":
                assert word.partition("=")[0] in known, f"{document.name}: {line}"
