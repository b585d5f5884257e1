"""If the GPU or the host has too little memory, the error is one sentence: what is needed, what is free, what uses
the rest, and what to set. The program ends with exit code 2."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from watched_gpu import SHAPE, WatchedGpu

from weft.backends.cuda import memory
from weft.backends.cuda.memory import BlockMemory
from weft.backends.cuda.runner import CudaBackend, open_cuda_backend
from weft.backends.host_memory import HostMemory
from weft.config import KvCacheKind, KvCachePoolConfig
from weft.errors import OutOfMemoryError
from weft.loading.checkpoint import Checkpoint
from weft.loading.random_checkpoint import random_checkpoint
from weft.ops.triton.device import INTERPRETED, Device
from weft.tiers import PoolSizes

MIB = 1 << 20
POOL = KvCachePoolConfig(num_blocks=8, swap_blocks=4)

interpreted = pytest.mark.skipif(not INTERPRETED.value, reason="a real GPU has a fixed memory size")


class SmallGpu(WatchedGpu):
    """A device with the free memory that a test sets."""

    def __init__(self, name: str, free: int, refuse_from: int | None = None) -> None:
        super().__init__(name, refuse_from)
        self.free = free

    def free_memory(self) -> int:
        return self.free

    def total_memory(self) -> int:
        return 1024 * MIB


def checkpoint(**fields: Any) -> Checkpoint:
    return random_checkpoint({**SHAPE, **fields}, fill_on_device=False)


def opened(gpu: Device, **fields: Any) -> CudaBackend:
    return open_cuda_backend(checkpoint(**fields), device=gpu, dtype="float32")


def sentence(error: pytest.ExceptionInfo[OutOfMemoryError]) -> str:
    """Checks that the error is one sentence without a chained exception, with the exit code for user errors; returns
    the text."""
    assert error.value.exit_code == 2
    assert error.value.__cause__ is None and error.value.__context__ is None
    text = str(error.value)
    assert "\n" not in text
    return text


def test_weights_that_do_not_fit_are_rejected_before_any_is_read(device: Device) -> None:
    gpu = SmallGpu(str(device.torch_device), free=3 * MIB)
    with pytest.raises(OutOfMemoryError) as error:
        opened(gpu, vocab_size=100_000)  # 6.1 MiB of embeddings
    text = sentence(error)
    assert text.startswith(
        f"the memory of {gpu.description} is too small: the weights take 6 MiB, and 3 MiB of 1,024 MiB"
    )
    assert text.endswith("; take a smaller model, or end other programs that use the GPU")
    assert not gpu.taken


def test_running_out_of_memory_while_weights_are_read_gives_the_same_sentence(device: Device) -> None:
    gpu = SmallGpu(str(device.torch_device), free=500 * MIB, refuse_from=3)
    with pytest.raises(OutOfMemoryError) as error:
        opened(gpu, vocab_size=100_000)
    assert "the weights take 6 MiB, and 500 MiB of 1,024 MiB are free" in sentence(error)
    assert len(gpu.taken) == 3 and gpu.alive == 0


@pytest.mark.parametrize("refuse_after", [1, 5, 40])
def test_running_out_of_memory_during_allocation_gives_one_sentence(
    device: Device, refuse_after: int
) -> None:
    gpu = SmallGpu(str(device.torch_device), free=500 * MIB)
    backend = opened(gpu)
    gpu.refuse_from = len(gpu.taken) + refuse_after
    with pytest.raises(OutOfMemoryError) as error:
        backend.allocate(POOL, 4, 64)
    text = sentence(error)
    assert "buffers for steps of 64 tokens and 4 requests" in text and "--memory, --context" in text
    assert gpu.alive == 0


@pytest.mark.parametrize(
    "pool",
    [
        KvCachePoolConfig(memory=600 * MIB),
        KvCachePoolConfig(num_blocks=600 * MIB // 4096),
        KvCachePoolConfig(
            num_blocks=60_000, store_blocks=600_000, kv_cache=KvCacheKind.TWO_TIER, tail_length=16
        ),
        KvCachePoolConfig(num_blocks=1 << 60),
    ],
    ids=["memory", "blocks", "two tiers", "more than there are addresses"],
)
def test_a_requested_cache_that_does_not_fit_is_rejected_with_both_sizes(
    device: Device, pool: KvCachePoolConfig
) -> None:
    gpu = SmallGpu(str(device.torch_device), free=500 * MIB)
    with pytest.raises(OutOfMemoryError) as error:
        opened(gpu).allocate(pool, 4, 64)
    text = sentence(error)
    assert re.search(r"the KV cache takes [\d,]+ MiB beside 0 MiB of weights, and 500 MiB of 1,024 MiB", text)
    assert "set a smaller --memory, --context" in text


def test_a_gpu_without_room_for_any_cache_is_rejected(device: Device) -> None:
    """With a cache of a few tokens, every prompt would be rejected as too long."""
    gpu = SmallGpu(str(device.torch_device), free=1024 * MIB)  # all of it is reserved
    with pytest.raises(OutOfMemoryError) as error:
        opened(gpu).allocate(KvCachePoolConfig(), 4, 64)
    assert "the KV cache takes at least 0 MiB, with 1,024 MiB in reserve, beside" in sentence(error)
    gpu.free = 127 * MIB
    with pytest.raises(
        OutOfMemoryError, match=r"with 1,024 MiB in reserve, .* and 127 MiB of 1,024 MiB are free"
    ):
        opened(gpu).allocate(KvCachePoolConfig(), 4, 64)
    gpu.free = 1025 * MIB
    info = opened(gpu).allocate(KvCachePoolConfig(), 4, 64)
    assert info.num_blocks * info.block_size >= info.max_context == 128


@interpreted
def test_the_interpreter_has_the_memory_that_is_set(device: Device) -> None:
    gpu = Device(str(device.torch_device))
    gpu.interpreter_memory = 3000
    with pytest.raises(OutOfMemoryError, match=r"0 MiB of 0 MiB are free"):
        opened(gpu)


def test_processes_that_use_the_gpu_are_named_largest_first(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\necho 77, 1200, /usr/bin/python3\necho 78, [N/A], x\necho 4711, 130000, /opt/train\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    gpu = SmallGpu(str(device.torch_device), free=3 * MIB)
    with pytest.raises(OutOfMemoryError) as error:
        opened(gpu, vocab_size=100_000)
    named = "(train, process 4711, uses 130,000 MiB, python3, process 77, uses 1,200 MiB)"
    assert f"3 MiB of 1,024 MiB are free {named};" in sentence(error)


@pytest.mark.parametrize("answer", ["exit 9", "sleep 1; echo No devices were found"])
def test_a_driver_that_names_no_process_does_not_hide_the_error(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{answer}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(OutOfMemoryError, match="nvidia-smi names no process that uses the rest"):
        opened(SmallGpu(str(device.torch_device), free=3 * MIB), vocab_size=100_000)


# --- swap space -------------------------------------------------------------------------------------------------


def blocks(swap_blocks: int | None) -> BlockMemory:
    """Memory with blocks of 2 MiB."""
    return BlockMemory(KvCachePoolConfig(swap_blocks=swap_blocks), 4096, 2048, 2 * MIB, 0)


def has_available(monkeypatch: pytest.MonkeyPatch, size: int | None) -> None:
    monkeypatch.setattr(memory, "host_memory", lambda: HostMemory(size, 64 << 30))


def test_the_default_swap_space_is_smaller_on_a_host_with_little_memory_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = PoolSizes(20_000, 0)
    for available, slots in ((None, 4096), (16 << 30, 4096)):
        has_available(monkeypatch, available)
        assert blocks(None).swap_slots(sizes) == (slots, 0)
    assert not caplog.records
    has_available(monkeypatch, 1 << 30)
    with caplog.at_level(logging.WARNING):
        assert blocks(None).swap_slots(sizes) == (256, 0)
    assert "the swap space has 512 MiB instead of 8,192" in caplog.text
    has_available(monkeypatch, MIB)
    assert blocks(None).swap_slots(sizes) == (0, 0)


def test_a_requested_swap_space_that_does_not_fit_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    has_available(monkeypatch, 1 << 30)
    assert blocks(512).swap_slots(PoolSizes(20_000, 0)) == (512, 0)
    assert blocks(0).swap_slots(PoolSizes(20_000, 0)) == (0, 0)
    with pytest.raises(OutOfMemoryError) as error:
        blocks(513).swap_slots(PoolSizes(20_000, 0))
    text = sentence(error)
    assert "swap_blocks = 513 takes 1,026 MiB of host memory, and 1,024 MiB are available" in text
    assert "swap_blocks = 0" in text


def test_a_backend_without_memory_for_its_swap_space_frees_everything(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_available(monkeypatch, 1000)
    gpu = SmallGpu(str(device.torch_device), free=500 * MIB)
    with pytest.raises(OutOfMemoryError, match="swap_blocks = 4 takes"):
        opened(gpu).allocate(POOL, 4, 64)
    assert gpu.alive == 0
    info = opened(gpu).allocate(KvCachePoolConfig(num_blocks=8), 4, 64)
    assert info.swap_blocks == 0
