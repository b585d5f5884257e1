"""The Python examples of the documents run unchanged with the real model."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from server_process import MODEL, Server

ROOT = Path(__file__).parents[2]
EXAMPLES = [
    pytest.param(code, printed, id=f"{page.name} {number}")
    for page in (ROOT / "README.md", *sorted((ROOT / "docs" / "guide").glob("*.md")))
    for number, (code, printed) in enumerate(
        re.findall(
            r"^```python\n(.*?)^```\n(?:\nprints\n\n```\n(.*?)^```\n)?", page.read_text("utf-8"), re.S | re.M
        ),
        1,
    )
]


@pytest.mark.parametrize(("code", "printed"), EXAMPLES)
def test_an_example_runs_and_prints_what_the_page_shows(real_server: Server, code: str, printed: str) -> None:
    """The text may differ: rounding depends on the processor. The number of lines and the names before "=" must
    match."""
    code = code.replace("http://127.0.0.1:8000", real_server.url).replace('"default"', f'"{MODEL}"')
    output = io.StringIO()
    with redirect_stdout(output):
        exec(compile(code, "example", "exec"), {"__name__": "example"})
    shown = output.getvalue().splitlines()
    assert len(shown) == len(printed.splitlines()) if printed else shown
    for line, promised in zip(shown, printed.splitlines(), strict=False):
        assert line.partition("=")[0] == promised.partition("=")[0] or "=" not in promised
