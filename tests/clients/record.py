"""Runs the tests of clients and writes their results, with versions and commit, to docs/guide/clients.md: `make
test-clients`. The whole output of pytest goes to the terminal."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guide" / "clients.md"
PACKAGES = ("openai", "litellm", "langchain-openai", "llm", "instructor", "lm_eval")
MARK = "<!-- written by `make test-clients` from here on -->"


def main() -> int:
    command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider", "tests/clients"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout)
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude=*"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    today = datetime.datetime.now(datetime.UTC).date()
    head = PAGE.read_text("utf-8").partition(MARK)[0]
    where = f"{today}, commit {commit or 'unknown'}, CPython {platform.python_version()}, the default model."
    PAGE.write_text(f"{head}{MARK}\n\n{where}\n\n{results(done.stdout, importlib.metadata.version)}", "utf-8")
    return done.returncode


def results(output: str, version: Callable[[str], str]) -> str:
    """A table of the tests of each client, from the output of `pytest -v`, and the names of tests that did not pass."""
    tests = re.findall(
        r"^tests/clients/test_client_(\w+)\.py::(.+?) (PASSED|FAILED|ERROR|SKIPPED|X\w+)\b", output, re.M
    )
    lines = ["| package | version | tests | passed |", "|---|---|---|---|"]
    for package in PACKAGES:
        of_client = [outcome for client, _, outcome in tests if package.replace("-", "_").startswith(client)]
        lines.append(f"| {package} | {version(package)} | {len(of_client)} | {of_client.count('PASSED')} |")
    missed = [f"- {outcome}: `{client}`, `{name}`" for client, name, outcome in tests if outcome != "PASSED"]
    return "\n".join([*lines, *(["", *missed] if missed else [])]) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
