"""The GPU, or the interpreter in its place."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from weft.errors import WeftError
from weft.ops.triton.device import Device


def test_a_missing_gpu_is_an_error_with_a_clear_message() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(WeftError, match=r"'cuda'.*finds no CUDA GPU"):
        Device("cuda")


def test_the_host_is_not_a_device_without_the_interpreter() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    code = "from weft.ops.triton.device import Device; Device('cpu')"
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert result.returncode == 1
    assert "TRITON_INTERPRET=1" in result.stderr


def test_a_replayed_graph_uses_the_current_content_of_its_tensors(device: Device) -> None:
    source, target = device.zeros(3, dtype=torch.float32), device.zeros(3, dtype=torch.float32)
    target.copy_(source)
    graph = device.capture(lambda: target.copy_(source), device.graph_pool())
    source.fill_(2.0)
    graph.replay()
    device.synchronize()
    assert target.tolist() == [2.0, 2.0, 2.0]


def test_work_on_a_stream_is_done_when_its_event_is_done(device: Device) -> None:
    values, stream, event = device.zeros(4, dtype=torch.int32), device.stream(), device.event()
    stream.wait_stream(device.current_stream())
    host = device.pinned(4, dtype=torch.int32)
    with device.using(stream):
        values.add_(7)
        host.copy_(values, non_blocking=True)
        event.record()
    event.synchronize()
    assert event.query()
    assert host.tolist() == [7, 7, 7, 7]


def test_free_memory_is_positive(device: Device) -> None:
    assert device.free_memory() > 0
