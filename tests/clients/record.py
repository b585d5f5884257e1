"""Runs the tests of clients and writes their output, with versions and commit, to docs/guide/clients.md: `make
test-clients`."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import re
import subprocess
import sys
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
    versions = "\n".join(f"| {name} | {importlib.metadata.version(name)} |" for name in PACKAGES)
    today = datetime.datetime.now(datetime.UTC).date()
    head = PAGE.read_text("utf-8").partition(MARK)[0]
    PAGE.write_text(
        f"{head}{MARK}\n\n{today}, commit {commit or 'unknown'}, CPython {platform.python_version()}, the default model.\n\n"
        f"| package | version |\n|---|---|\n{versions}\n\n```\n{_without_paths(done.stdout)}```\n",
        "utf-8",
    )
    return done.returncode


def _without_paths(text: str) -> str:
    """Removes paths and addresses of this machine."""
    for path in (sys.prefix, str(ROOT), str(Path.home())):
        text = text.replace(path, "...")
    text = re.sub(r"https?://(?!127\.0\.0\.1)[^\s'\"]+", "(address)", text)
    return re.sub(r"(?<![\w.])/(?:tmp|opt|home|root|usr|work)/[^\s:'\"]*", "...", text)


if __name__ == "__main__":
    raise SystemExit(main())
