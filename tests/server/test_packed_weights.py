"""Packed weights of the real model: damage to their file does not change answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from server_process import running_server

from weft.backends.cpu.kernels import has_kernels
from weft.llm import LLM
from weft.loading.packed import packed_files
from weft.request import SamplingParams

pytestmark = pytest.mark.skipif(not has_kernels(), reason="without kernels nothing is packed")

PROMPT = "The capital of France is"


def answer(model: Path) -> str:
    with LLM(str(model), device="cpu", memory=64 << 20) as llm:
        return llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=2))[0].text


def spoil(file: Path) -> None:
    """Overwrites 48 pages of one layer's weights."""
    with file.open("r+b") as content:
        content.seek(file.stat().st_size // 2)
        content.write(b"\x7f" * 48 * 4096)


@pytest.fixture
def packed(default_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The packed file of the default model, in a temporary WEFT_HOME."""
    monkeypatch.setenv("WEFT_HOME", str(tmp_path))
    assert answer(default_model_path) == " Paris."
    (file,) = packed_files(default_model_path)
    return file


def test_50_overwritten_pages_of_packed_weights_change_no_answer(
    packed: Path, default_model_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spoil(packed)
    assert answer(default_model_path) == " Paris."
    (warning,) = caplog.messages
    assert str(packed) in warning and packed.with_suffix(".damaged").exists()


def test_50_a_server_with_damaged_packed_weights_answers_correctly_and_logs_a_warning(
    packed: Path, default_model_path: Path, tmp_path: Path
) -> None:
    spoil(packed)
    options = {"checkpoint": str(default_model_path), "max_context": 2048}
    log = tmp_path / "log"
    with (
        log.open("w") as file,
        running_server(
            default_model_path, backend="cpu", backend_options=options, log_format="json", stderr=file
        ) as server,
    ):
        chosen = server.complete(PROMPT, temperature=0, max_tokens=2).json()["choices"][0]
    assert chosen["text"] == " Paris."
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    (warning,) = [line for line in lines if line["event"] == "warning"]
    assert str(packed) in warning["message"] and warning["level"] == "warning"
