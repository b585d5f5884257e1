"""The state of the GPU in `weft bench gpu`: parsed from the lines of nvidia-smi, for an interval."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from weft.bench.gpu_clocks import GpuWatch, Sample, read_sample, state_of

FULL = "1980, 1980, 3201, 569.65, 700.00, 47, 0x0000000000000000\n"
CAPPED = "1350, 1980, 3201, 693.12, 700.00, 52, 0x0000000000000004\n"
IDLE = "345, 1980, 3201, 94.00, 700.00, 37, 0x0000000000000001\n"


def samples(*lines: str) -> list[Sample]:
    return [sample for line in lines if (sample := read_sample(line, 0.0)) is not None]


def test_the_state_of_a_throttled_gpu_says_by_what_and_how_often() -> None:
    state = state_of(samples(FULL, CAPPED, FULL, FULL))
    assert state is not None
    assert (state.megahertz, state.lowest_megahertz, state.most_megahertz) == (1980, 1350, 1980)
    assert (state.watts, state.most_watts, state.celsius) == (569.65, 700, 52)
    assert (state.capped, state.capped_by) == (0.25, ("power limit",))
    assert str(state) == "1,980 MHz (1,350 at least), 570 W, 52 °C, 25% throttled by power limit"


def test_an_idle_gpu_is_not_throttled() -> None:
    state = state_of(samples(IDLE, FULL))
    assert state is not None and state.capped == 0 and "throttled" not in str(state)


@pytest.mark.parametrize(
    "line", ["", "No devices were found\n", "1980, [N/A], 3201, [N/A], 700.00, 47, 0x0\n"]
)
def test_a_line_without_figures_is_not_a_sample(line: str) -> None:
    assert read_sample(line, 0.0) is None
    assert state_of(samples(line)) is None


def test_a_watch_summarises_the_requested_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nwhile true; do echo '{CAPPED.strip()}'; sleep 0.02; done\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    watch = GpuWatch()
    began = time.perf_counter()
    try:
        while (state := watch.between(began, time.perf_counter())) is None:
            assert time.perf_counter() < began + 30
    finally:
        watch.close()
    assert state.megahertz == 1350
    assert watch.between(began - 2, began - 1) is None


def test_without_nvidia_smi_there_are_no_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    watch = GpuWatch()
    assert watch.between(0.0, time.perf_counter()) is None
    watch.close()
