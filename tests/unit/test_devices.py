"""The choice of the device: the requested one, or a GPU if there is one, found without importing torch."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from weft.backends import registry
from weft.errors import InvalidRequestError
from weft.llm_config import build_config


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Simulates a machine with a GPU, its driver, torch and triton."""
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


def test_auto_uses_the_gpu_if_there_is_one(gpu: pytest.MonkeyPatch) -> None:
    assert registry.why_no_gpu() is None
    assert registry.chosen("auto", {}) == "cuda"
    assert registry.chosen("cuda", {"threads": None}) == "cuda"


def test_auto_uses_the_cpu_if_there_is_no_gpu(gpu: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "nvidia0").unlink()
    (tmp_path / "nvidiactl").touch()
    assert registry.chosen("auto", {}) == "cpu"
    with pytest.raises(InvalidRequestError, match="the device is cuda, but no NVIDIA GPU is here"):
        registry.chosen("cuda", {})


@pytest.mark.parametrize("package", ["torch", "triton"])
def test_without_the_cuda_extra_the_gpu_is_not_used_and_the_error_says_how_to_install_it(
    gpu: pytest.MonkeyPatch, package: str
) -> None:
    gpu.setattr(importlib.metadata, "version", lacks(package))
    assert registry.chosen("auto", {}) == "cpu"
    with pytest.raises(InvalidRequestError, match=rf"{package} is not installed; pip install 'weft\[cuda\]'"):
        registry.chosen("cuda", {})


def test_a_torch_without_cuda_counts_as_not_installed(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(importlib.metadata, "version", lambda name: "2.13.0+cpu")
    assert registry.chosen("auto", {}) == "cpu"


@pytest.mark.parametrize(("hidden", "expected"), [("", "cpu"), ("-1", "cpu"), ("0", "cuda")])
def test_hidden_gpus_are_not_used(gpu: pytest.MonkeyPatch, hidden: str, expected: str) -> None:
    gpu.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert registry.chosen("auto", {}) == expected


def test_cpu_options_make_auto_choose_the_cpu_and_are_rejected_with_cuda(gpu: pytest.MonkeyPatch) -> None:
    assert registry.chosen("auto", {"quantize": "int8"}) == "cpu"
    assert registry.chosen("auto", {"threads": 4}) == "cpu"
    with pytest.raises(InvalidRequestError, match="quantize is 'int8', but the device is cuda and only cpu"):
        registry.chosen("cuda", {"quantize": "int8"})


def test_an_unknown_device_is_rejected_with_the_list_of_devices() -> None:
    with pytest.raises(InvalidRequestError, match="'tpu'; allowed: auto, cpu, cuda, noop"):
        registry.chosen("tpu", {})


def test_steps_on_a_gpu_are_larger_unless_a_budget_is_set() -> None:
    assert build_config({}, "cuda").scheduler.max_chunk_tokens == 8192
    assert build_config({}, "cpu").scheduler.max_chunk_tokens == 512
    config = build_config({"max_prefill_tokens": 100}, "cuda").scheduler
    assert (config.max_prefill_tokens, config.max_chunk_tokens, config.max_tokens_per_step) == (
        100,
        512,
        2048,
    )


def test_choosing_a_device_imports_no_torch() -> None:
    program = (
        "import sys; import weft.llm; from weft.backends import registry; registry.chosen('auto', {});"
        "print([name for name in ('torch', 'triton') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
