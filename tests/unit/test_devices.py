"""Which device a model runs on: what was asked for, or what there is, found without importing torch."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from weft.backends import registry
from weft.errors import InvalidRequestError
from weft.llm import _build_config


@pytest.fixture
def card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with a card and all it takes."""
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(registry, "_DEVICE_FILES", tmp_path)
    monkeypatch.setattr(
        importlib.metadata, "version", {"torch": "2.11.0+cu128", "triton": "3.6.0"}.__getitem__
    )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return monkeypatch


def lacks(package: str) -> Any:
    def version(name: str) -> str:
        if name == package:
            raise importlib.metadata.PackageNotFoundError(name)
        return "2.11.0"

    return version


def test_auto_takes_the_card_where_there_is_one(card: pytest.MonkeyPatch) -> None:
    assert registry.why_no_card() is None
    assert registry.chosen("auto", {}) == "cuda"
    assert registry.chosen("cuda", {"threads": None}) == "cuda"


def test_auto_takes_the_cpu_where_there_is_no_card(card: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "nvidia0").unlink()
    (tmp_path / "nvidiactl").touch()
    assert registry.chosen("auto", {}) == "cpu"
    with pytest.raises(InvalidRequestError, match="the device is cuda, but no NVIDIA card is here"):
        registry.chosen("cuda", {})


@pytest.mark.parametrize("package", ["torch", "triton"])
def test_without_the_extra_the_card_is_not_used_and_the_error_says_how_to_get_it(
    card: pytest.MonkeyPatch, package: str
) -> None:
    card.setattr(importlib.metadata, "version", lacks(package))
    assert registry.chosen("auto", {}) == "cpu"
    with pytest.raises(InvalidRequestError, match=rf"{package} is not installed; pip install 'weft\[cuda\]'"):
        registry.chosen("cuda", {})


def test_a_torch_for_the_processor_alone_counts_as_none(card: pytest.MonkeyPatch) -> None:
    card.setattr(importlib.metadata, "version", lambda name: "2.13.0+cpu")
    assert registry.chosen("auto", {}) == "cpu"


@pytest.mark.parametrize(("hidden", "expected"), [("", "cpu"), ("-1", "cpu"), ("0", "cuda")])
def test_cards_that_are_hidden_count_as_none(card: pytest.MonkeyPatch, hidden: str, expected: str) -> None:
    card.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert registry.chosen("auto", {}) == expected


def test_options_of_the_cpu_decide_auto_and_are_refused_on_a_card(card: pytest.MonkeyPatch) -> None:
    assert registry.chosen("auto", {"quantize": "int8"}) == "cpu"
    assert registry.chosen("auto", {"threads": 4}) == "cpu"
    with pytest.raises(InvalidRequestError, match="quantize is 'int8', which only the device cpu knows"):
        registry.chosen("cuda", {"quantize": "int8"})


def test_an_unknown_device_is_refused_with_those_there_are() -> None:
    with pytest.raises(InvalidRequestError, match="'tpu'; allowed: auto, cpu, cuda, noop"):
        registry.chosen("tpu", {})


def test_steps_on_a_card_are_larger_unless_somebody_says_how_large() -> None:
    assert _build_config({}, "cuda").scheduler.max_chunk_tokens == 8192
    assert _build_config({}, "cpu").scheduler.max_chunk_tokens == 512
    told = _build_config({"max_prefill_tokens": 100}, "cuda").scheduler
    assert (told.max_prefill_tokens, told.max_chunk_tokens, told.max_tokens_per_step) == (100, 512, 2048)


def test_choosing_a_device_imports_no_torch() -> None:
    program = (
        "import sys; import weft.llm; from weft.backends import registry; registry.chosen('auto', {});"
        "print([name for name in ('torch', 'triton') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
