"""`weft doctor`: the checks of a machine and a model, and the advice for problems."""

from __future__ import annotations

import importlib.metadata
import json
import re
import socket
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from model_files import GOOD_GGUF
from weft.backends import registry
from weft.backends.cpu.kernels import has_kernels
from weft.cli import doctor, machine
from weft.cli.main import app

X86 = """\
processor : 0
model name : Fast CPU
physical id : 0
core id : 0
flags : fpu avx2 fma f16c avx512f avx512_vnni

processor : 1
model name : Fast CPU
physical id : 0
core id : 0
flags : fpu avx2

processor : 2
physical id : 1
core id : 0
"""

Report = Callable[..., tuple[int, dict[str, dict[str, str]]]]


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Report:
    """Runs `weft doctor --json`. Returns the exit code and the checks by name. The memory bandwidth is fixed."""
    monkeypatch.setattr(machine, "bytes_per_second", lambda: 10e9)

    def run(*arguments: str) -> tuple[int, dict[str, dict[str, str]]]:
        result = CliRunner().invoke(app, ["doctor", "--json", *arguments])
        content: dict[str, Any] = json.loads(result.output)
        assert content["ok"] is (result.exit_code == 0)
        return result.exit_code, {check["name"]: check for check in content["checks"]}

    return run


def test_physical_cores_are_counted_once_and_features_have_names() -> None:
    found = machine.processor(X86)
    assert (found.name, found.physical_cores) == ("Fast CPU", 2)
    assert found.features == ("AVX2", "FMA", "F16C", "AVX-512", "AVX-512 VNNI")
    arm = machine.processor("Features : fp asimd asimddp\n")
    assert arm.features == ("NEON", "NEON dot product") and arm.physical_cores is None


def test_without_proc_the_values_are_unknown_and_nothing_fails(tmp_path: Path) -> None:
    found = machine.processor("")
    assert found.features is None and found.physical_cores is None and found.usable_cores >= 1
    assert machine.memory(tmp_path).total is None


def test_the_limits_of_a_cgroup_are_respected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, content in {
        "proc/self/cgroup": "0::/\n",
        "proc/meminfo": "MemTotal: 100 kB\nMemAvailable: 50 kB\n",
        "sys/fs/cgroup/memory.max": "4096\n",
        "sys/fs/cgroup/memory.current": "1024\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    found = machine.memory(tmp_path)
    assert (found.total, found.limit, found.available) == (102400, 4096, 3072)
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    assert machine.processor(X86).usable_cores == 1


def test_the_memory_bandwidth_is_measured() -> None:
    assert machine.bytes_per_second(seconds=0.05) > 1e8


def test_a_good_machine_and_model_pass_with_an_estimate_of_the_speed(
    report: Report, default_model_path: Path
) -> None:
    exit_code, checks = report()
    assert exit_code == 0
    assert "context 8,192" in checks["model"]["found"] and "GGUF Q4_1" in checks["model"]["found"]
    assert "chat template" in checks["chat"]["found"]
    # At 10 GB/s: 97 MB of packed weights, or 134.5 million weights of four bytes.
    most = "at most 103 tokens/s" if has_kernels() else "at most 18.6 tokens/s"
    assert "10.0 GB/s" in checks["speed"]["found"] and most in checks["speed"]["found"]


def test_without_kernels_weights_are_float32(
    report: Report, default_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFT_KERNELS", "numpy")
    _, checks = report()
    assert "0.50 GiB for weights, as float32" in checks["room"]["found"]
    assert "at most 18.6 tokens/s" in checks["speed"]["found"]


def test_without_json_a_table_is_printed(monkeypatch: pytest.MonkeyPatch, default_model_path: Path) -> None:
    monkeypatch.setattr(machine, "bytes_per_second", lambda: 10e9)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0 and "weft can run here." in result.output and "processor" in result.output


def test_a_missing_or_broken_model_fails_with_its_path(report: Report, tmp_path: Path) -> None:
    exit_code, checks = report("/nowhere/model.gguf")
    assert exit_code == 1 and "/nowhere/model.gguf" in checks["model"]["found"] and checks["model"]["advice"]
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(GOOD_GGUF[:40])
    exit_code, checks = report(str(broken))
    assert exit_code == 1 and str(broken) in checks["model"]["found"]


def test_a_default_model_that_is_not_fetched_yet_does_not_fail(
    report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFT_HOME", str(tmp_path))
    exit_code, checks = report()
    assert exit_code == 0 and "weft pull" in checks["model"]["advice"]


def test_a_model_larger_than_memory_fails_with_both_numbers(
    report: Report, monkeypatch: pytest.MonkeyPatch, default_model_path: Path
) -> None:
    monkeypatch.setattr(machine, "memory", lambda: machine.Memory(1 << 30, 1 << 26, None))
    exit_code, checks = report()
    needed = "0.09 GiB" if has_kernels() else "0.50 GiB"
    assert exit_code == 1 and needed in checks["room"]["found"] and "0.06 GiB" in checks["room"]["advice"]


def test_a_cache_that_is_not_writable_fails_and_names_the_variable_to_set(
    report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFT_HOME", "/dev/null/weft")
    exit_code, checks = report()
    assert exit_code == 1 and "WEFT_HOME" in checks["cache"]["advice"]


def test_a_port_in_use_is_reported(report: Report, default_model_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        exit_code, checks = report("--port", str(port))
    assert exit_code == 0 and checks["port"]["status"] == "note" and str(port) in checks["port"]["found"]


def test_a_check_that_raises_is_unknown_and_the_others_still_run(
    report: Report, monkeypatch: pytest.MonkeyPatch, default_model_path: Path
) -> None:
    def broken() -> None:
        raise RuntimeError("no driver")

    monkeypatch.setattr(machine, "gpus", broken)
    exit_code, checks = report()
    assert exit_code == 0 and checks["GPU"]["found"].startswith("unknown") and "model" in checks


H200 = "NVIDIA H200, 143771 MiB, 570.124.06"


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Simulates a GPU and the versions of torch and triton."""

    def put(torch: str | None = "2.11.0+cu128", triton: str | None = "3.6.0") -> None:
        installed, known = {"torch": torch, "triton": triton}, importlib.metadata.version

        def version(name: str) -> str:
            if name not in installed:
                return known(name)
            if (number := installed[name]) is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return number

        (tmp_path / "nvidia0").touch()
        monkeypatch.setattr(registry, "_DEVICE_FILES", tmp_path)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(importlib.metadata, "version", version)
        monkeypatch.setattr(doctor, "version", version)
        monkeypatch.setattr(machine, "gpus", lambda: [H200])

    return put


@pytest.mark.parametrize(
    ("torch", "triton", "status", "expected"),
    [
        ("2.11.0+cu128", "3.6.0", "ok", "torch 2.11.0+cu128, triton 3.6.0; weft runs on it"),
        (None, None, "note", "torch is not installed; pip install 'weft[cuda]'"),
        ("2.12.1", None, "note", "triton is not installed; pip install 'weft[cuda]'"),
        ("2.10.0", "3.6.0", "note", "torch from 2.11 to below 2.14"),
        ("2.14.0", "3.6.0", "note", "torch from 2.11 to below 2.14"),
        ("2.11.0", "3.5.1", "note", "triton from 3.6"),
        ("2.13.0+cpu", "3.6.0", "note", "built without CUDA"),
    ],
)
def test_a_gpu_is_reported_with_the_packages_that_weft_needs(
    report: Report,
    gpu: Callable[..., None],
    torch: str | None,
    triton: str | None,
    status: str,
    expected: str,
) -> None:
    gpu(torch, triton)
    check = report("/nowhere/model.gguf")[1]["GPU"]
    assert check["status"] == status
    assert H200 in check["found"] and expected in check["found"] + check["advice"]
    # The doctor agrees with the choice of "auto".
    assert ("weft runs on it" in check["found"]) == (registry.chosen("auto", {}) == "cuda")
    assert ("weft runs on the processor" in check["advice"]) == (registry.chosen("auto", {}) == "cpu")


def test_a_hidden_gpu_is_reported_as_not_used(
    report: Report, gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    check = report("/nowhere/model.gguf")[1]["GPU"]
    assert check["status"] == "note" and "CUDA_VISIBLE_DEVICES hides all GPUs" in check["advice"]


def test_room_and_speed_are_of_the_gpu_if_weft_runs_on_it(
    report: Report, gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch, default_model_path: Path
) -> None:
    gpu()
    monkeypatch.setattr(machine, "gpu_memory", lambda: machine.Memory(1 << 37, 1 << 36, None))
    monkeypatch.setattr(machine, "memory", lambda: machine.Memory(1 << 30, 1 << 26, None))
    exit_code, checks = report()
    assert exit_code == 0
    # 134.5 million weights of two bytes.
    assert "0.25 GiB on the GPU for weights, as bfloat16" in checks["room"]["found"]
    assert "the GPU reads 0.27 GB for every token" in checks["speed"]["found"]
    monkeypatch.setattr(machine, "gpu_memory", lambda: machine.Memory(1 << 37, 1 << 26, None))
    exit_code, checks = report()
    assert exit_code == 1 and "Only 0.06 GiB of GPU memory are free" in checks["room"]["advice"]


def test_the_doctor_accepts_the_versions_that_the_package_requires() -> None:
    requirements = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]["cuda"]
    for requirement in requirements:
        name = re.split(r"[<>=]", requirement)[0]
        first, end = doctor._CUDA_PACKAGES[name]
        assert f">={doctor._dotted(first)}" in requirement
        assert "<" not in requirement.partition(";")[0] or f"<{doctor._dotted(end)}" in requirement


def test_a_machine_without_a_gpu_needs_no_packages_for_one(
    report: Report, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(machine, "gpus", lambda: [])
    monkeypatch.setenv("WEFT_HOME", str(tmp_path))
    assert report()[1]["GPU"] == {
        "name": "GPU",
        "status": "ok",
        "found": "none found; weft runs on the processor",
        "advice": "",
    }
