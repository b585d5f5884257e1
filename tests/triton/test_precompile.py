"""Precompiled kernels: which kernels are compiled, and that the backend neither waits for the process nor fails with
it."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_backends import cuda_backend
from small_decoders import CONFIGS, PLAIN

from weft.backends.cuda import precompile
from weft.backends.cuda.plain_data import from_line
from weft.backends.cuda.precompile import KernelPrecompiler, Outline, Sizes, StoredShape
from weft.config import KvCacheKind, KvCachePoolConfig
from weft.models.config import ModelConfig
from weft.ops.triton.device import Device

HERE = Path(__file__).parent
OUTLINE = Outline(PLAIN, (), "bfloat16", False, 90, 132, True)
SIZES = Sizes(KvCachePoolConfig(num_blocks=16), 4, 64)


def test_precompiled_kernels_are_those_that_are_launched_and_are_compiled_once(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    environment["PYTHONPATH"] = os.pathsep.join([environment.get("PYTHONPATH", ""), str(HERE.parent)]).strip(
        os.pathsep
    )
    command = [sys.executable, str(HERE / "precompile_a_small_model.py")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-4000:]
    assert "kernels found" in result.stdout


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Replaces the process that compiles, started with an empty cache."""

    class Process:
        def __init__(self, command: list[str], **options: Any) -> None:
            assert options["start_new_session"]
            self.stdin: Any = io.BytesIO()
            self.pid = 12345
            self.is_ended = False

        def wait(self) -> None:
            assert ended.pop() == self.pid
            self.is_ended = True

    def end_group(group: int, how: int) -> None:
        ended.append(group)

    ended: list[int] = []
    monkeypatch.setattr(precompile.os, "killpg", end_group)

    monkeypatch.setattr(precompile.triton.knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(precompile.subprocess, "Popen", Process)
    return Process


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_the_process_receives_the_outline_and_the_sizes_as_plain_lines(
    process: Any, config: ModelConfig
) -> None:
    two_tier = KvCachePoolConfig(num_blocks=40, store_blocks=7, kv_cache=KvCacheKind.TWO_TIER, store_bits=4)
    for sizes in (SIZES, Sizes(two_tier, 3, 9)):
        weights = (("a", StoredShape("a.weight", (3, 4), "BF16")),)
        outline = replace(OUTLINE, weights=weights, config=config)
        kernels = KernelPrecompiler(outline)
        started: Any = kernels._process
        lines = started.stdin
        lines.close = lambda: None
        kernels.begin(sizes)
        first, second = lines.getvalue().splitlines()
        assert from_line(Outline, first) == outline
        assert from_line(Sizes, second) == sizes
        kernels.close()


def test_a_backend_that_closes_ends_the_process(process: Any) -> None:
    kernels = KernelPrecompiler(OUTLINE)
    started: Any = kernels._process
    kernels.begin(SIZES)
    kernels.close()
    assert started.is_ended and started.stdin.closed
    kernels.close()


def test_kernels_compiled_for_other_sizes_do_not_count(process: Any, tmp_path: Path) -> None:
    (tmp_path / precompile._marker_name(OUTLINE, SIZES)).touch()
    kernels = KernelPrecompiler(OUTLINE)
    assert kernels._process is None
    kernels.begin(SIZES)
    assert kernels._process is None
    kernels.begin(replace(SIZES, num_rows=8))
    assert kernels._process is not None
    kernels.close()
    other = KernelPrecompiler(replace(OUTLINE, processors=66))
    assert other._process is not None
    other.close()


def test_a_process_that_has_ended_is_not_an_error(process: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = KernelPrecompiler(OUTLINE)

    class Closed(io.BytesIO):
        def write(self, data: Any) -> int:
            raise BrokenPipeError

    started: Any = kernels._process
    started.stdin = Closed()
    kernels.begin(SIZES)
    kernels.close()


def test_the_backend_continues_if_no_process_can_be_started(
    process: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(precompile.subprocess, "Popen", refuse)
    kernels = KernelPrecompiler(OUTLINE)
    kernels.begin(SIZES)
    kernels.close()


def test_the_process_ends_if_the_engine_sends_no_outline(monkeypatch: pytest.MonkeyPatch) -> None:
    class Input:
        buffer = io.BytesIO()

    monkeypatch.setattr(precompile.sys, "stdin", Input())
    monkeypatch.setattr(precompile.os, "nice", lambda by: 0)
    monkeypatch.setattr(precompile.signal, "alarm", lambda seconds: 0)
    monkeypatch.setattr(precompile.torch, "set_num_threads", lambda count: None)
    precompile.main()


def test_a_backend_reports_its_sizes_and_its_close(device: Device) -> None:
    reported: list[Any] = []

    class Noted:
        def begin(self, sizes: Sizes) -> None:
            reported.append(sizes)

        def close(self) -> None:
            reported.append("closed")

    backend = cuda_backend(device)
    backend._precompiler = Noted()  # type: ignore[assignment]
    info = backend.allocate(KvCachePoolConfig(memory=1 << 20, swap_blocks=2), 3, 40)
    backend.close()
    # The blocks of a context, not the blocks of the memory: only the former decide how kernels are compiled.
    blocks = -(-info.max_context // info.block_size)
    assert blocks != info.num_blocks
    assert reported == [Sizes(KvCachePoolConfig(num_blocks=blocks, swap_blocks=2), 3, 40), "closed"]
