"""`step_arrays`: the index arrays that follow from a plan and the rows."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from weft.backends.step_arrays import Rows, SampledEntries
from weft.ops.base import StepIndices
from weft.plan import IterationPlan, RowStart
from weft.request import RequestId, SamplingParams


def plan(entries: list[tuple[int, int, int, bool]], decodes: int = 0, **extra: object) -> IterationPlan:
    """Entries are (row, start, count, samples)."""
    rows, starts, counts, samples = zip(*entries, strict=True)
    ids = tuple(RequestId(str(100 + row)) for row in rows)
    return IterationPlan(0, decodes, ids, rows, starts, counts, samples, **extra)  # type: ignore[arg-type]


def start(row: int, tokens: tuple[int, ...], blocks: tuple[int, ...], **params: object) -> RowStart:
    return RowStart(row, RequestId(str(100 + row)), tokens, 2, SamplingParams(**params), row, blocks)  # type: ignore[arg-type]


def indices(rows: Rows, plan: IterationPlan) -> StepIndices:
    step = rows.prepare(plan)
    rows.read_tokens(step)
    return step.indices


def entries_of(rows: Rows, plan: IterationPlan) -> SampledEntries:
    return rows.prepare(plan).entries


def test_a_mixed_step_becomes_flat_tokens_with_positions_cells_and_tables() -> None:
    rows = Rows(num_rows=4, max_context=32, block_size=4)
    mixed = plan(
        [(2, 5, 1, True), (0, 0, 3, False), (3, 4, 2, True)],
        decodes=1,
        row_starts=(
            start(2, (10, 11, 12, 13, 14, 15), (7, 3)),
            start(0, (20, 21, 22, 23), (5,)),
            start(3, (30, 31, 32, 33, 34, 35), (1, 9)),
        ),
    )
    rows.update(mixed)
    step = indices(rows, mixed)
    assert step.token_ids.tolist() == [15, 20, 21, 22, 34, 35]
    assert step.positions.tolist() == [5, 0, 1, 2, 4, 5]
    assert step.cells.tolist() == [3 * 4 + 1, 20, 21, 22, 9 * 4, 9 * 4 + 1]
    assert step.query_starts.tolist() == [0, 1, 4, 6]
    assert step.context_lengths.tolist() == [6, 3, 6]
    assert step.block_tables.tolist() == [[7, 3], [5, 0], [1, 9]]
    assert step.logit_indices.tolist() == [0, 5]
    assert step.cells.dtype == np.int64
    entries = entries_of(rows, mixed)
    assert entries.request_ids == ["102", "103"]
    assert entries.positions.tolist() == [6, 6] and entries.output_indices.tolist() == [4, 4]


@pytest.mark.parametrize("full_blocks", [None, 16])
def test_the_fast_path_for_decodes_gives_the_arrays_of_the_general_path(
    full_blocks: int | None,
) -> None:
    random = np.random.default_rng(0)
    rows = Rows(num_rows=9, max_context=64, block_size=4, full_blocks=full_blocks, tail_blocks=2)
    lengths = random.integers(1, 64, size=9).tolist()
    starts = tuple(
        start(row, tuple(random.integers(99, size=n).tolist()), tuple(random.permutation(16).tolist()))
        for row, n in enumerate(lengths)
    )
    rows.update(plan([(0, 0, 1, False)], row_starts=starts))
    for count in range(1, 10):
        entries = [(int(row), lengths[row] - 1, 1, True) for row in random.permutation(9)[:count]]
        decodes, general = indices(rows, plan(entries, decodes=count)), indices(rows, plan(entries))
        for part, other in ((general, decodes), (general.store, decodes.store)):
            for name, values in {} if part is None else vars(part).items():
                if isinstance(values, np.ndarray):
                    found = getattr(other, name)
                    assert found.tolist() == values.tolist() and found.dtype == values.dtype, name


def test_decodes_over_two_tiers_are_gathered_at_every_step() -> None:
    rows = Rows(num_rows=1, max_context=64, block_size=4, full_blocks=20, tail_blocks=2)
    for position in (12, 13, 14):
        begun = (start(0, tuple(range(13)), (25, 24, 3, 4)),) if position == 12 else ()
        decodes = plan([(0, position, 1, True)], decodes=1, row_starts=begun)
        rows.update(decodes)
        found = rows.prepare(decodes).indices
        assert found.store is not None and found.context_lengths.tolist() == [position + 1]


def test_consecutive_decode_steps_have_the_arrays_that_a_new_gather_gives() -> None:
    """The steps cross block ends, replace a block before it is full, restart a row, and change the order of rows."""
    random = np.random.default_rng(1)
    rows, twin = (Rows(num_rows=4, max_context=64, block_size=4) for _ in range(2))
    lengths, order = [5, 9, 9, 12], [2, 0, 3, 1]
    tables = [tuple(random.permutation(90)[:16].tolist()) for _ in lengths]
    begun = tuple(start(row, tuple(range(n)), tables[row]) for row, n in enumerate(lengths))
    changes: dict[int, dict[str, object]] = {
        0: {"row_starts": begun},
        10: {"table_rows": (3,), "table_indices": (5,), "table_blocks": (95,)},
        14: {"row_starts": (start(0, tuple(range(19)), tables[1], temperature=0.5),)},
    }
    for number in range(24):
        if number == 19:
            order = [1, 0, 3, 2]
        entries = [(row, lengths[row] - 1, 1, True) for row in order]
        decodes = plan(entries, decodes=len(order), **changes.get(number, {}))
        tokens = random.integers(99, size=len(order))
        twin._last = twin._selected = None
        steps = []
        for each in (rows, twin):
            each.update(decodes)
            step = each.prepare(decodes)
            each.read_tokens(step)
            each.record(step, tokens)
            steps.append(step)
        found, expected = steps
        for one, other in ((found.indices, expected.indices), (found.entries, expected.entries)):
            for name, values in vars(other).items():
                assert np.array_equal(getattr(one, name), values), (number, name)
        for row in order:
            lengths[row] += 1


def test_store_blocks_have_separate_tables_that_moves_change() -> None:
    """Block ids from 20 on are in the store. The tail is one block of 4."""
    rows = Rows(num_rows=3, max_context=32, block_size=4, full_blocks=20, tail_blocks=1)
    long = tuple(range(40, 55))
    first = plan(
        [(2, 14, 1, True), (0, 0, 3, True)],
        row_starts=(start(2, long, (21, 20, 9, 7)), start(0, (4, 5, 6, 7), (3,))),
    )
    rows.update(first)
    step = indices(rows, first)
    assert step.store is not None
    assert step.block_tables[0, 2:].tolist() == [9, 7] and step.block_tables[1, 0] == 3
    assert step.store.tables.tolist() == [[1, 0, 0], [0, 0, 0]]
    assert step.store.moved_from.tolist() == [] and step.store.moved_to.tolist() == []

    moved = {
        "moved_rows": (2, 0),
        "moved_indices": (2, 0),
        "moved_from": (9, -1),  # the second is in the store already
        "moved_to": (24, 22),
    }
    second = plan([(2, 15, 1, True), (0, 3, 5, True)], **moved)
    rows.update(second)
    step = indices(rows, second)
    assert step.store is not None
    assert step.store.tables.tolist() == [[1, 0, 4], [2, 0, 0]]
    assert step.store.moved_from.tolist() == [9] and step.store.moved_to.tolist() == [4]
    assert step.block_tables[0, 2:].tolist() == [9, 7], "a moved block stays in the full table too"


def test_a_sampled_token_is_the_input_of_the_next_decode() -> None:
    rows = Rows(num_rows=2, max_context=8, block_size=4)
    first = plan([(1, 0, 2, True)], row_starts=(start(1, (4, 5), (0,)),))
    rows.update(first)
    rows.record(rows.prepare(first), np.array([77]))
    second = plan([(1, 2, 1, True)], decodes=1)
    assert indices(rows, second).token_ids.tolist() == [77]


def test_a_step_prepared_early_reads_tokens_that_are_sampled_later() -> None:
    rows = Rows(num_rows=2, max_context=8, block_size=4)
    first = plan([(1, 0, 2, True)], row_starts=(start(1, (4, 5), (0,)),))
    rows.update(first)
    one, two = rows.prepare(first), rows.prepare(plan([(1, 2, 1, True)], decodes=1))
    rows.record(one, np.array([77]))
    rows.read_tokens(two)
    assert two.indices.token_ids.tolist() == [77]


def test_table_entries_are_written_at_their_index_and_the_last_token_of_the_context_is_stored() -> None:
    rows = Rows(num_rows=1, max_context=8, block_size=4)
    rows.update(plan([(0, 0, 4, False)], row_starts=(start(0, (1,) * 7, (3,)),)))
    last = plan([(0, 7, 1, True)], decodes=1, table_rows=(0,), table_indices=(1,), table_blocks=(6,))
    rows.update(last)
    assert indices(rows, last).cells.tolist() == [6 * 4 + 3]
    rows.record(rows.prepare(last), np.array([9]))
    assert rows.tokens[0, 8] == 9


def test_a_row_start_replaces_all_parameters_of_the_previous_request() -> None:
    rows = Rows(num_rows=1, max_context=8, block_size=4)
    rows.update(
        plan([(0, 0, 3, True)], row_starts=(start(0, (1, 2, 3), (5,), top_k=3, temperature=0.5, logprobs=1),))
    )
    again = plan([(0, 0, 2, True)], row_starts=(start(0, (8, 9), (2,), temperature=0.0),))
    rows.update(again)
    entries = entries_of(rows, again)
    assert entries.is_plain.tolist() == [True] and entries.temperatures.tolist() == [0.0]
    assert entries.top_counts.tolist() == [-1]
    assert indices(rows, again).cells.tolist() == [8, 9]


def test_cached_row_parameters_are_gathered_again_after_a_row_start() -> None:
    rows = Rows(num_rows=2, max_context=8, block_size=4)
    step = plan([(0, 1, 1, True), (1, 1, 1, True)], decodes=2)
    rows.update(
        step := dataclasses.replace(step, row_starts=(start(0, (1, 2), (5,)), start(1, (3, 4), (6,))))
    )
    before = entries_of(rows, step)
    rows.update(plan([(1, 0, 1, False)], row_starts=(start(1, (7, 8), (2,), temperature=0.5, top_k=3),)))
    after = entries_of(rows, step)
    assert before.temperatures.tolist() == [1.0, 1.0] and after.temperatures.tolist() == [1.0, 0.5]
    assert after.is_plain.tolist() == [True, False]
    assert indices(rows, step).token_ids.tolist() == [2, 8] and indices(rows, step).cells.tolist() == [21, 9]


def test_logit_indices_list_sampled_tokens_before_tokens_that_score_prompts() -> None:
    rows = Rows(num_rows=4, max_context=64, block_size=4)
    scored = start(1, (10, 11, 12, 13, 14), (7, 8), prompt_logprobs=2)._replace(prompt_length=5)
    first = plan([(0, 0, 2, True), (1, 0, 3, False)], row_starts=(start(0, (1, 2), (5,)), scored))
    rows.update(first)
    pieces = rows.scored_prompts(first)
    assert [(p.request_id, p.first, p.tokens.tolist(), p.top_count) for p in pieces] == [
        ("101", 1, [11, 12, 13], 2)
    ]
    assert indices(rows, first).logit_indices.tolist() == [1, 2, 3, 4]
    # The second to last token of the prompt scores the last one. The token after the prompt is sampled, not scored.
    second = plan([(1, 3, 2, True)])
    assert [(p.first, p.tokens.tolist()) for p in rows.scored_prompts(second)] == [(4, [14])]
    assert indices(rows, second).logit_indices.tolist() == [1, 0]
    assert rows.scored_prompts(plan([(1, 5, 1, True)])) == []
