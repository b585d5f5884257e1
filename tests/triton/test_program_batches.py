"""Kinds of batches: any mix of requests, rows that are only kept, nothing sampled, padding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from small_decoders import (
    CONFIGS,
    PLAIN,
    TEXTS,
    Texts,
    build,
    device_batch,
    reference_logits,
    relative_error,
)

from weft.ops.triton import piecewise_graphs
from weft.ops.triton.device import Device, Graph
from weft.ops.triton.linear import padded_rows


@pytest.mark.parametrize("name", ["all norms, with an offset; windows, caps, gelu", "experts"])
def test_a_batch_invariant_model_gives_a_token_the_same_bits_in_any_batch(name: str, device: Device) -> None:
    program, cache = build(CONFIGS[name], device, torch.bfloat16, invariant=True)
    together = [
        program.run(device_batch(step, device), cache)[0].clone() for step in TEXTS.steps([[5, 9, 8]])
    ]
    cache.fill_(float("nan"))
    alone = [
        program.run(device_batch(step, device), cache)[0].clone()
        for step in TEXTS.steps([[0, 4, 0], [0, 1, 0], [3, 0, 0], [1, 4, 0]])
    ]
    assert torch.equal(alone[0], together[0][5:9])
    assert torch.equal(alone[1], together[0][9:10])
    assert torch.equal(alone[3], torch.cat([together[0][3:4], together[0][10:14]]))


def test_selected_rows_that_are_not_sampled_are_returned_for_later(device: Device) -> None:
    program, cache = build(PLAIN, device)
    [step] = TEXTS.steps([[5, 4, 0]])
    whole, others = program.run(device_batch(step, device), cache)
    assert others is None
    whole = whole.clone()
    part, others = program.run(device_batch(step, device, sampled=2), cache)
    assert torch.allclose(part, whole[:2], atol=1e-5)
    assert others is not None and len(others) == 7
    assert torch.allclose(program.logits(others), whole[2:], atol=1e-5)
    nothing, others = program.run(device_batch(step, device, sampled=0), cache)
    assert len(nothing) == 0
    assert others is not None and torch.allclose(program.logits(others), whole, atol=1e-5)


def test_a_step_may_sample_nothing_and_keep_nothing(device: Device) -> None:
    program, cache = build(PLAIN, device)
    first, second = TEXTS.steps([[4, 0, 0], [1, 0, 0]])
    [whole] = TEXTS.steps([[5, 0, 0]])
    expected = program.run(device_batch(whole, device), cache)[0][4:].clone()
    cache.fill_(float("nan"))
    logits, others = program.run(device_batch(replace(first, logit_indices=np.arange(0)), device), cache)
    assert len(logits) == 0 and others is None
    assert torch.allclose(program.run(device_batch(second, device), cache)[0], expected, atol=1e-5)


@pytest.mark.parametrize("count", [3, 17, 41])
def test_old_rows_in_the_buffers_after_those_of_the_step_change_nothing(device: Device, count: int) -> None:
    """Padded products read some of these rows."""
    program, cache = build(PLAIN, device)
    for slot in program._slots:
        slot.fill_(float("nan"))
    texts = Texts.of_lengths(50)
    [expected] = reference_logits(PLAIN, texts, [[count]])
    [step] = texts.steps([[count]])
    logits = program.run(device_batch(step, device), cache)[0].float().cpu().numpy()
    assert relative_error([logits], [expected]) < 1e-4


@pytest.mark.parametrize("rows", [1, 8, 9, 16, 17, 64, 65, 256, 300, 1025, 5000, 8192, 8448])
def test_products_are_padded_to_few_sizes_and_by_little(rows: int) -> None:
    assert rows <= padded_rows(rows) < rows + max(16, rows // 2)
    assert padded_rows(padded_rows(rows)) == padded_rows(rows)
    assert len({padded_rows(size) for size in range(1, 8449)}) < 80


def test_padding_changes_nothing_and_is_not_written(device: Device) -> None:
    """Like a graph of three requests that runs a step of two."""
    program, cache = build(PLAIN, device)
    first, second = TEXTS.steps([[3, 2, 0], [1, 1, 0]])
    program.run(device_batch(first, device), cache)
    before = cache.clone()
    expected = program.run(device_batch(second, device), cache)[0].clone()
    written = cache.clone()
    cache.copy_(before)
    batch = device_batch(second, device)

    def padded(tensor: torch.Tensor, value: int) -> torch.Tensor:
        return torch.cat([tensor, tensor.new_full((1,), value)])

    batch = replace(
        batch,
        tokens=3,
        requests=3,
        sampled=3,
        decodes=3,
        token_ids=padded(batch.token_ids, 0),
        positions=padded(batch.positions, 0),
        cells=padded(batch.cells, -1),
        rows=padded(batch.rows, 0),
        query_starts=padded(batch.query_starts, 3),
        context_lengths=padded(batch.context_lengths, 0),
        logit_indices=padded(batch.logit_indices, 2),
    )
    graph = device.capture(lambda: program.run(batch, cache))
    graph.replay()
    assert torch.allclose(program.run(batch, cache)[0][:2], expected, atol=1e-5)
    assert torch.allclose(cache, written, atol=1e-5, equal_nan=True)


def test_segments_between_attentions_run_from_graphs_after_a_row_count_repeats(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three steps with chunks of prompts, padded to 16 rows each."""
    program, cache = build(PLAIN, device)
    captured: list[int] = []
    capture = device.capture

    def noted(work: Callable[[], object], pool: object = None) -> Graph:
        captured.append(number)
        return capture(work, pool)

    monkeypatch.setattr(device, "capture", noted)
    plan = [[9, 4, 0], [8, 2, 0], [9, 3, 0]]  # the last has more rows than the captured step
    expected = reference_logits(PLAIN, TEXTS, plan)
    for number, step in enumerate(TEXTS.steps(plan)):
        batch = device_batch(step, device)
        assert padded_rows(batch.tokens) == 16
        logits = program.run(batch, cache)[0].float().cpu().numpy()
        assert relative_error([logits], [expected[number]]) < 2e-5
    # One capture after every attention but the last, when the row count repeats; and none later. Selected rows follow
    # the last.
    assert captured == [1] * (PLAIN.layers - 1)


def test_a_segment_that_cannot_be_captured_is_launched(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, cache = build(PLAIN, device)

    def full(work: Callable[[], object], pool: object = None) -> Graph:
        raise RuntimeError("no memory is left")

    monkeypatch.setattr(device, "capture", full)
    plan = [[9, 4, 0], [8, 3, 0]]
    expected = reference_logits(PLAIN, TEXTS, plan)
    for step, theirs in zip(TEXTS.steps(plan), expected, strict=True):
        logits = program.run(device_batch(step, device), cache)[0].float().cpu().numpy()
        assert relative_error([logits], [theirs]) < 2e-5


def test_a_limited_number_of_row_counts_have_graphs(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piecewise_graphs, "_MOST_SIZES", 1)
    graphs = piecewise_graphs.PiecewiseGraphs(device)
    assert [graphs.begin_step(rows) for rows in (16, 32, 16, 32, 32, 16)] == [
        False,
        False,
        True,
        False,
        False,
        True,
    ]
    assert not graphs.begin_step(4096) and not graphs.begin_step(4096)
