"""What the documents promise exists: pages, links, commands, flags, source files, names of the package, generated pages."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from typer.main import get_command

from weft.cli.main import app as weft_app

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *PAGES]
# The lab is history: names of files and modules there are those of their day.
CURRENT = [
    document for document in DOCUMENTS if "lab" not in document.parts and document.name != "CHANGELOG.md"
]
PROGRAM = r"(?:weft|make|(?:\.venv/bin/)?python -m benchmarks)"
# Engines and ratios in the tables of `python -m benchmarks peers`, and commands that were moved.
NOT_COMMANDS = (
    *("weft in process", "weft without drafts", "weft / best peer", "weft in process / best in process"),
    *("weft bench peers", "weft COMMAND --help"),
)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


documents = pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
current_documents = pytest.mark.parametrize("document", CURRENT, ids=name_of)


def without_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)


def anchors(document: Path) -> set[str]:
    """The anchors that GitHub and mkdocs make of headings."""
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


def inline_code(document: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", without_blocks(document.read_text("utf-8")))


# --- links and the site ---------------------------------------------------------------------------------------------


@documents
def test_every_link_leads_to_a_page_and_a_heading_that_exist(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_blocks(document.read_text("utf-8"))):
        if re.match(r"https?://", target):
            continue
        page, _, heading = target.partition("#")
        found = (document.parent / page) if page else document
        assert found.is_file(), f"{name_of(document)} links to {target}"
        assert not heading or heading in anchors(found), f"{name_of(document)} links to {target}"


def test_every_page_is_once_in_the_navigation_of_the_site() -> None:
    _, _, navigation = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")
    listed = Counter(re.findall(r"^ *- ([\w/.-]+\.md)$", navigation, re.M))
    assert listed == Counter(str(page.relative_to(ROOT / "docs")) for page in PAGES)


def test_names_of_pages_are_lower_case_with_dashes() -> None:
    files = [path for path in (ROOT / "docs").rglob("*") if path.is_file()]
    assert [name_of(path) for path in files if not re.fullmatch(r"[a-z0-9-]+\.[a-z]+", path.name)] == []


def test_the_site_loads_nothing_from_other_hosts() -> None:
    """`make docs` checks the built pages; this is the part that needs no build."""
    settings = (ROOT / "mkdocs.yml").read_text("utf-8")
    assert re.search(r"^  font: false$", settings, re.M)
    assert not re.search(r"https?://", settings)
    for page in PAGES:
        assert not re.search(r"!\[[^]]*\]\(https?:|```mermaid", page.read_text("utf-8")), name_of(page)


# --- commands, files and names --------------------------------------------------------------------------------------


@documents
def test_every_command_and_flag_that_is_shown_exists(document: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M))
    for line in commands(document.read_text("utf-8")):
        if line in NOT_COMMANDS or line.endswith("..."):
            continue
        program, *words = re.sub(r"^\S*python -m benchmarks", "benchmarks", line).split()
        if program == "make":
            words = [word for word in words if "=" not in word]
            assert words and words[0] in targets, f"{name_of(document)}: {line}"
            continue
        app = get_command(benchmarks_app() if program == "benchmarks" else weft_app)
        command = app
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]  # type: ignore[attr-defined]
        known = {option for parameter in command.params for option in parameter.opts} | {
            "--help",
            "--version",
        }
        assert command is not app or (words and words[0] in known), f"{name_of(document)}: {line}"
        for word in words:
            if word.startswith("-") and word != "-":
                assert word.partition("=")[0] in known, f"{name_of(document)}: {line}"


def benchmarks_app():  # type: ignore[no-untyped-def]
    return importlib.import_module("benchmarks.__main__").app


@current_documents
def test_every_source_file_that_is_named_exists(document: Path) -> None:
    """A name with folders is a path in the repository or in the package; one without may be anywhere in the source."""
    for code in inline_code(document):
        if re.fullmatch(r"[a-z_0-9./-]+\.(?:py|pyi|cpp|h|inl)", code):
            if "/" in code:
                found = any((folder / code).is_file() for folder in (ROOT, ROOT / "src" / "weft"))
            else:
                folders = [ROOT / name for name in ("src", "csrc", "tests", "tools", "benchmarks", "docs")]
                found = any(next(folder.rglob(code), None) for folder in folders if folder.is_dir())
            assert found, f"{name_of(document)} names {code}"


@current_documents
def test_every_name_of_the_package_that_is_shown_exists(document: Path) -> None:
    for code in inline_code(document):
        if re.fullmatch(r"weft(?:\.\w+)+", code) and code != "weft.toml":
            assert exists(code), f"{name_of(document)} names {code}"


def exists(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        module, _, attribute = name.rpartition(".")
        return bool(module) and hasattr(importlib.import_module(module), attribute)
    return True


def test_every_contract_that_is_cited_is_defined_once() -> None:
    text = (ROOT / "docs" / "internals" / "contracts.md").read_text("utf-8")
    defined = Counter(re.findall(r"^## (\d+)\. ", text, re.M))
    assert defined == Counter(str(number) for number in range(1, len(defined) + 1))
    folders = [ROOT / name for name in ("src", "csrc", "tests", "docs", "benchmarks")]
    files = [path for folder in folders for path in folder.rglob("*.*") if path.suffix in SOURCE_SUFFIXES]
    for path in files:
        for cited in re.findall(r"\bcontracts? ((?:\d+(?:, | and | to )?)+)", path.read_text("utf-8"), re.I):
            assert set(re.findall(r"\d+", cited)) <= set(defined), f"{name_of(path)} cites contract {cited}"


SOURCE_SUFFIXES = {".py", ".pyi", ".cpp", ".h", ".inl", ".md"}


# --- generated pages and limits -------------------------------------------------------------------------------------


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GENERATED = (
    "settings.md",
    "routes.md",
    "metrics.md",
    "commands.md",
    "grafana-dashboard.json",
    "prometheus-alerts.yml",
)


@pytest.mark.parametrize("name", GENERATED)
def test_a_file_of_the_reference_is_what_the_code_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))  # for modules beside the scripts
    pages = tool("make_reference").PAGES | tool("make_monitoring").PAGES
    assert pages.keys() == set(GENERATED)
    made = pages[name]()
    written = (ROOT / "docs" / "reference" / name).read_text("utf-8")
    assert written == made, f"docs/reference/{name} is out of date: run `make reference`"


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("rate(weft:no_such_total[5m])", "no metric weft:no_such_total"),
        ("sum by (color) (weft:engine_up)", "the label color"),
        ('weft:engine_up{priority="low"}', "the label priority"),
        ("rate(weft:engine_up[5m])", "no counter"),
        ("deriv(weft:steps_total[5m])", "is a counter"),
        ("up == 0", "no metric of weft"),
    ],
)
def test_a_panel_or_an_alert_that_names_what_no_server_exports_cannot_be_made(
    expression: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    checked = tool("make_monitoring").checked
    assert checked("sum by (kind) (rate(weft:step_seconds_count[5m]))")
    with pytest.raises(AssertionError, match=words):
        checked(expression)


@pytest.mark.parametrize(
    ("name", "unit", "limit"),
    [("README.md", "lines", 130), ("docs/internals/overview.md", "words", 1200)],
)
def test_a_short_page_stays_short(name: str, unit: str, limit: int) -> None:
    text = (ROOT / name).read_text("utf-8")
    length = len(text.splitlines() if unit == "lines" else text.split())
    assert length <= limit, f"{name} has {length} {unit}; allowed: at most {limit}"


def test_the_glossary_has_at_most_forty_terms() -> None:
    text = (ROOT / "docs" / "internals" / "glossary.md").read_text("utf-8")
    terms = re.findall(r"^\| (?!term |---)(.+?) \|", text, re.M)
    assert 0 < len(terms) <= 40 and terms == sorted(set(terms), key=str.lower)


# Without this file, which has the words itself, and without texts of other authors.
PROSE = [
    *DOCUMENTS,
    *(
        path
        for folder in ("src", "csrc", "benchmarks", "tests")
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in (".py", ".cpp", ".h", ".inl", ".js", ".css", ".html")
        and not path.is_relative_to(ROOT / "tests" / "data")
        and path != Path(__file__)
    ),
]


def test_texts_do_not_turn_code_into_people() -> None:
    found = {}
    for path in PROSE:
        if words := re.findall(r"\b(?:whoever|nobody|somebody|whom|told)\b", path.read_text("utf-8"), re.I):
            found[name_of(path)] = words
    assert not found


def test_the_table_of_browser_tests_is_of_all_tests_that_there_are() -> None:
    found = re.search(
        r"^\| test functions \| (\d+) \|$", (ROOT / "docs/internals/testing.md").read_text("utf-8"), re.M
    )
    assert found, "`make test-browser` writes the table"
    sources = (ROOT / "tests" / "browser").glob("test_*.py")
    number = sum(len(re.findall(r"^def test_", source.read_text("utf-8"), re.M)) for source in sources)
    assert int(found[1]) == number, "run `make test-browser` at a clean commit"
