"""Runs the tests of the clients, of the agents or of the page in a browser, and writes their results, with versions and
commit, into a document: `make test-clients`, `make test-agents`, `make test-browser`. The whole output of pytest goes to
the terminal."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {
    "clients": DOCS / "guide" / "clients.md",
    "agents": DOCS / "guide" / "clients.md",
    "browser": DOCS / "internals" / "testing.md",
}
AGENTS = ROOT / "tests" / "agents"
PACKAGES = (
    "openai",
    "litellm",
    "langchain-openai",
    "llama-index-core",
    "llm",
    "instructor",
    "lm_eval",
    "cohere",
)
MEMORY = "memory"
"""The row of the tests of the memory. They use several of the packages."""
OFFLINE = ("unshare", "-rn", "sh", "-c", 'ip link set lo up; exec "$@"', "sh")
"""Runs a command in a network namespace with nothing but the loopback device."""
LINE = re.compile(r"^tests/\w+/test_(\w+)\.py::(.+?) (PASSED|FAILED|ERROR|SKIPPED|X\w+)\b", re.M)

# What a row of the table of agents is: the parameter of its tests -> its name, and the package that has its version.
ROWS = {
    "Claude_Code": ("Claude Code, `--bare`", "@anthropic-ai/claude-code-linux-x64"),
    "Claude_Code_with_its_default_prompt": ("Claude Code", "@anthropic-ai/claude-code-linux-x64"),
    "Codex": ("Codex, short prompt", "@openai/codex-linux-x64"),
    "Codex_with_its_default_prompt": ("Codex", "@openai/codex-linux-x64"),
    "Codex_with_--oss": ("Codex, `--oss`", "@openai/codex-linux-x64"),
    "opencode": ("opencode", "opencode-linux-x64"),
    "opencode_with_@ai-sdk/openai": ("opencode, `@ai-sdk/openai`", "opencode-linux-x64"),
    "opencode_with_@ai-sdk/anthropic": ("opencode, `@ai-sdk/anthropic`", "opencode-linux-x64"),
    "qwen-code": ("qwen-code", "@qwen-code/qwen-code"),
    "aider": ("aider", "aider-chat"),
    "npm-ai-openai-compatible": ("AI SDK, `@ai-sdk/openai-compatible`", "@ai-sdk/openai-compatible"),
    "npm-ai-openai-chat": ("AI SDK, `@ai-sdk/openai`, `.chat`", "@ai-sdk/openai"),
    "npm-ai-openai": ("AI SDK, `@ai-sdk/openai`", "@ai-sdk/openai"),
    "npm-ai-anthropic": ("AI SDK, `@ai-sdk/anthropic`", "@ai-sdk/anthropic"),
    "npm-openai-chat": ("openai (npm), chat", "openai"),
    "npm-openai-responses": ("openai (npm), Responses", "openai"),
    "npm-anthropic": ("anthropic (npm)", "@anthropic-ai/sdk"),
    "npm-ollama": ("ollama (npm)", "ollama"),
    "python-openai-chat": ("openai (Python), chat", "openai (Python)"),
    "python-openai-responses": ("openai (Python), Responses", "openai (Python)"),
    "python-anthropic": ("anthropic (Python)", "anthropic (Python)"),
    "python-ollama": ("ollama (Python)", "ollama (Python)"),
    "clients-langchain": ("langchain-openai", "langchain-openai"),
    "clients-langchain-responses": ("langchain-openai, Responses", "langchain-openai"),
    "clients-litellm": ("litellm, `openai/`", "litellm"),
    "clients-litellm-anthropic": ("litellm, `anthropic/`", "litellm"),
    "clients-litellm-ollama": ("litellm, `ollama_chat/`", "litellm"),
    "clients-llm": ("llm", "llm"),
}
COLUMNS = {
    "test_a_whole_loop_is_streamed": "loop",
    "test_from_its_second_request_on_an_agent_finds_its_prompt_in_the_cache": "cache",
    "test_ctrl_c_ends_the_request_in_the_server": "Ctrl-C",
    "test_a_429_is_tried_again": "429",
    "test_the_loop_goes_on_after_a_restart": "restart",
    "test_the_default_model_streams_an_answer": "talk",
    "test_the_default_model_gives_a_structured_answer": "structured",
}
# Test of one agent -> the column of the table in which it counts.
ALIASES = {
    "test_aider_edits_a_file_by_a_streamed_answer": "test_a_whole_loop_is_streamed[aider]",
    "test_the_default_model_answers_aider": "test_the_default_model_streams_an_answer[aider]",
    "test_codex_finds_the_model_of_a_local_server_without_keys": "test_a_whole_loop_is_streamed[Codex_with_--oss]",
    "test_codex_gets_a_structured_answer_after_a_call": "test_the_default_model_gives_a_structured_answer[Codex]",
    "test_claude_code_gets_a_structured_answer_after_a_call": "test_the_default_model_gives_a_structured_answer[Claude_Code]",
    "test_qwen_code_gets_a_structured_answer_after_a_call": "test_the_default_model_gives_a_structured_answer[qwen-code]",
}


def main() -> int:
    kind, *arguments = sys.argv[1:]
    is_offline = kind == "agents" and subprocess.run((*OFFLINE, "true"), capture_output=True).returncode == 0
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "--tb=short",
        "-p",
        "no:cacheprovider",
        f"tests/{kind}",
        *arguments,
    ]
    with tempfile.NamedTemporaryFile(suffix=".json") as figures:
        done = subprocess.run(
            [*(OFFLINE if is_offline else ()), *command],
            cwd=ROOT,
            env={**os.environ, "WEFT_TEST_FIGURES": figures.name},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        measured = json.loads(figures.read() or "{}")
    print(done.stdout)
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude=*"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    where = f"{datetime.datetime.now(datetime.UTC).date()}, commit {commit or 'unknown'}, CPython {platform.python_version()}"
    if kind == "agents":
        network = "without a network" if is_offline else "with a network: no namespace could be made"
        text = f"{where}, {network}.\n\n{agent_results(done.stdout, agent_versions())}"
    elif kind == "browser":
        text = f"{where}.\n\n{browser_results(done.stdout, measured)}"
    else:
        text = f"{where}, the default model.\n\n{results(done.stdout, importlib.metadata.version)}"
    page = PAGES[kind]
    page.write_text(replaced(page.read_text("utf-8"), kind, text), "utf-8")
    return done.returncode


def replaced(page: str, kind: str, text: str) -> str:
    """The page with another text between the marks of `make test-KIND`."""
    begin, end = f"<!-- written by `make test-{kind}` -->", f"<!-- end of `make test-{kind}` -->"
    head, _, rest = page.partition(begin)
    assert end in rest, f"{PAGES[kind]} has no marks of make test-{kind}"
    return f"{head}{begin}\n\n{text}\n{end}{rest.partition(end)[2]}"


def results(output: str, version: Callable[[str], str]) -> str:
    """A table of the tests of each client, from the output of `pytest -v`, and the names of tests that did not pass."""
    tests = [
        (module.removeprefix("client_"), name, outcome) for module, name, outcome in LINE.findall(output)
    ]
    lines = ["| package | version | tests | passed |", "|---|---|---|---|"]
    for package in (*PACKAGES, MEMORY):
        of_client = [outcome for client, _, outcome in tests if package.replace("-", "_").startswith(client)]
        shown = "" if package == MEMORY else version(package)
        lines.append(f"| {package} | {shown} | {len(of_client)} | {of_client.count('PASSED')} |")
    return "\n".join([*lines, *_missed(tests)]) + "\n"


def agent_results(output: str, versions: Mapping[str, str]) -> str:
    """A table with a row for each agent or library and a column for each of the tests that many of them have."""
    tests = LINE.findall(output)
    outcomes = {
        ALIASES.get(name, name): "yes" if outcome == "PASSED" else "**no**" for _, name, outcome in tests
    }
    lines = [f"| client | version | {' | '.join(COLUMNS.values())} |", "|---" * (2 + len(COLUMNS)) + "|"]
    for parameter, (name, package) in ROWS.items():
        cells = [outcomes.get(f"{test}[{parameter}]", "") for test in COLUMNS]
        lines.append(f"| {name} | {versions[package]} | {' | '.join(cells)} |")
    passed = sum(outcome == "PASSED" for _, _, outcome in tests)
    return "\n".join([*lines, "", f"{passed} of {len(tests)} tests passed.", *_missed(tests)]) + "\n"


def browser_results(output: str, measured: Mapping[str, str]) -> str:
    """A table of the versions and figures that the tests measured, and how many tests passed. A test compares the
    number of functions with the source, so the table cannot be that of a part of the tests."""
    tests = LINE.findall(output)
    passed = sum(outcome == "PASSED" for _, _, outcome in tests)
    num_functions = len({(module, name.partition("[")[0]) for module, name, _ in tests})
    rows = [f"| {name} | {value} |" for name, value in measured.items()]
    rows += [f"| tests passed | {passed} of {len(tests)} |", f"| test functions | {num_functions} |"]
    lines = ["| | |", "|---|---|", *rows]
    return "\n".join([*lines, *_missed(tests)]) + "\n"


def agent_versions() -> dict[str, str]:
    """Package -> version, from the files that pin them."""
    found: dict[str, str] = {}
    for path, suffix in (
        (ROOT / "constraints-clients.txt", ""),
        (AGENTS / "requirements-aider.txt", ""),
        (AGENTS / "requirements.txt", " (Python)"),
    ):
        for line in path.read_text("utf-8").splitlines():
            name, is_pin, version = line.partition("==")
            if is_pin:
                found[name + suffix] = version
    packages = json.loads((AGENTS / "package-lock.json").read_text("utf-8"))["packages"]
    # Without the platform, where it is part of the version.
    found |= {
        path.removeprefix("node_modules/"): package["version"].removesuffix("-linux-x64")
        for path, package in packages.items()
        if path
    }
    return found


def _missed(tests: list[tuple[str, str, str]]) -> list[str]:
    missed = [f"- {outcome}: `{module}`, `{name}`" for module, name, outcome in tests if outcome != "PASSED"]
    return ["", *missed] if missed else []


if __name__ == "__main__":
    raise SystemExit(main())
