"""The examples that the documents show run as they stand, on the real model."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from server_process import MODEL, Server

ROOT = Path(__file__).parents[2]
EXAMPLES = [
    pytest.param(code, said, id=f"{page.name} {number}")
    for page in (ROOT / "README.md", *sorted((ROOT / "docs" / "guide").glob("*.md")))
    for number, (code, said) in enumerate(
        re.findall(
            r"^```python\n(.*?)^```\n(?:\nprints\n\n```\n(.*?)^```\n)?", page.read_text("utf-8"), re.S | re.M
        ),
        1,
    )
]


@pytest.mark.parametrize(("code", "said"), EXAMPLES)
def test_an_example_runs_and_says_as_much_as_it_is_said_to(real_server: Server, code: str, said: str) -> None:
    """Not word by word: the last bit of a sum, and with it the words, is the processor's business."""
    code = code.replace("http://127.0.0.1:8000", real_server.url).replace('"default"', f'"{MODEL}"')
    output = io.StringIO()
    with redirect_stdout(output):
        exec(compile(code, "an example", "exec"), {"__name__": "example"})
    shown = output.getvalue().splitlines()
    assert len(shown) == len(said.splitlines()) if said else shown
    for line, promised in zip(shown, said.splitlines(), strict=False):
        assert line.partition("=")[0] == promised.partition("=")[0] or "=" not in promised
