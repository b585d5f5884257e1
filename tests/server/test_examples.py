"""The Python examples of the documents run unchanged with the real model."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from server_process import MODEL, Server, running_server
from vector_models import embedder, embedder_server

ROOT = Path(__file__).parents[2]
EXAMPLES = [
    pytest.param(
        code,
        printed,
        {"embeddings.md": "embedding_server", "memory.md": "memory_server"}.get(page.name, "real_server"),
        id=f"{page.name} {number}",
    )
    for page in (ROOT / "README.md", *sorted((ROOT / "docs" / "guide").glob("*.md")))
    for number, (code, printed) in enumerate(
        re.findall(
            r"^```python\n(.*?)^```\n(?:\nprints\n\n```\n(.*?)^```\n)?", page.read_text("utf-8"), re.S | re.M
        ),
        1,
    )
]


@pytest.fixture(scope="module")
def embedding_server() -> Iterator[Server]:
    """A server of the default embedder alone."""
    with embedder_server() as server:
        yield server


@pytest.fixture(scope="module")
def memory_server(default_model_path: Path) -> Iterator[Server]:
    """A server of the default model and the default embedder."""
    options = {"checkpoint": str(default_model_path), "max_context": 2048}
    with running_server(
        default_model_path, backend="cpu", backend_options=options, vector_models=[embedder()]
    ) as server:
        yield server


@pytest.mark.parametrize(("code", "printed", "server"), EXAMPLES)
def test_an_example_runs_and_prints_what_the_page_shows(
    request: pytest.FixtureRequest, code: str, printed: str, server: str
) -> None:
    """The text may differ: rounding depends on the processor. The number of lines and the names before "=" must
    match."""
    url = request.getfixturevalue(server).url
    code = code.replace("http://127.0.0.1:8000", url).replace('"default"', f'"{MODEL}"')
    output = io.StringIO()
    with redirect_stdout(output):
        exec(compile(code, "example", "exec"), {"__name__": "example"})
    shown = output.getvalue().splitlines()
    assert len(shown) == len(printed.splitlines()) if printed else shown
    for line, promised in zip(shown, printed.splitlines(), strict=False):
        assert line.partition("=")[0] == promised.partition("=")[0] or "=" not in promised
