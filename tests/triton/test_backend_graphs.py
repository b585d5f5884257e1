"""When decode steps are launched, captured or replayed, and to which size they are padded."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch

from weft.backends.cuda.graphs import _STEPS_IN_LARGER_GRAPH, DecodeGraphs, Kind
from weft.backends.cuda.sampling_rows import SamplingPath
from weft.ops.triton.device import Device


class Launches:
    """Counts launches and replays on the device, and launches and captures on the host."""

    def __init__(self, device: Device, by_context: bool = False, max_size: int = 256) -> None:
        self.kinds: list[Kind] = []
        self.done = device.zeros(max_size + 1, dtype=torch.int32)
        self.graphs = DecodeGraphs(device, self.work, max_size, 5000, by_context)

    def work(self, kind: Kind) -> torch.Tensor:
        self.kinds.append(kind)
        self.done[kind.size] += 1
        return self.done

    def sizes_done(self, device: Device) -> dict[int, int]:
        device.synchronize()
        return {size: count for size, count in enumerate(self.done.tolist()) if count}


GREEDY = SamplingPath(flags=0, widest=-1, is_masked=False)
DRAWN = SamplingPath(flags=1, widest=-1, is_masked=False)


@pytest.mark.parametrize(
    ("entries", "size"), [(1, 1), (2, 2), (3, 4), (8, 8), (9, 16), (17, 32), (65, 96), (250, 253), (253, 253)]
)
def test_a_step_is_padded_to_the_next_size(device: Device, entries: int, size: int) -> None:
    launches = Launches(device, max_size=253)
    launches.graphs.run(entries, 10, GREEDY)
    assert launches.kinds == [Kind(size, 5000, GREEDY)]


def test_the_first_step_of_a_kind_is_launched_the_second_captured_and_each_runs_once(device: Device) -> None:
    launches = Launches(device)
    for step in range(1, 6):
        launches.graphs.run(7, 10, GREEDY)
        assert len(launches.graphs._graphs) == (step > 1)
        assert launches.sizes_done(device) == {8: step}


def test_a_size_without_a_graph_uses_one_that_is_not_much_larger(device: Device) -> None:
    launches = Launches(device)
    for entries in (128, 128, 96, 96, 64, 64, 32):
        launches.graphs.run(entries, 10, GREEDY)
    # With 32 of 128, three quarters would be padding.
    assert launches.sizes_done(device) == {128: 6, 32: 1}


def test_a_size_that_repeats_gets_its_own_graph_after_it_was_launched(device: Device) -> None:
    launches = Launches(device)
    for entries in (128, 128, *[96] * _STEPS_IN_LARGER_GRAPH):
        launches.graphs.run(entries, 10, GREEDY)
    assert launches.sizes_done(device) == {128: 2 + _STEPS_IN_LARGER_GRAPH}
    for captured in (1, 2, 2):
        launches.graphs.run(96, 10, GREEDY)
        assert len(launches.graphs._graphs) == captured
    assert launches.sizes_done(device) == {128: 2 + _STEPS_IN_LARGER_GRAPH, 96: 3}


def test_after_a_failed_capture_steps_are_launched_and_it_is_not_tried_again(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[object] = []

    def no_memory(self: Device, work: object, pool: object = None) -> None:
        attempts.append(work)
        raise torch.OutOfMemoryError("no memory for a graph")

    monkeypatch.setattr(Device, "capture", no_memory)
    launches = Launches(device)
    for step in range(1, 6):
        launches.graphs.run(7, 10, GREEDY)
        assert launches.sizes_done(device) == {8: step}
    assert len(attempts) == 1 and len(launches.graphs._graphs) == 0


def test_each_way_of_sampling_has_its_own_graph(device: Device) -> None:
    launches = Launches(device)
    for sampling in (GREEDY, GREEDY, None, DRAWN):
        launches.graphs.run(8, 10, sampling)
    assert [kind.sampling for kind in launches.kinds[-2:]] == [None, DRAWN]
    assert len(launches.graphs._graphs) == 1


def test_context_lengths_are_rounded_up_to_powers_of_two_if_launches_depend_on_them(device: Device) -> None:
    launches = Launches(device, by_context=True)
    for context in (1, 512, 513, 4000, 4097):
        launches.graphs.run(1, context, GREEDY)
    assert {kind.longest_context for kind in launches.kinds} == {512, 1024, 4096, 5000}
