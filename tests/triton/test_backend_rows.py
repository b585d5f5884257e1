"""Compares the rows and index arrays on the device with those on the host (`weft.backends.step_arrays.Rows`)."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch

from weft.backends.cuda.mailbox import SLOTS, Mailbox
from weft.backends.cuda.rows import DeviceRows, is_decode
from weft.backends.step_arrays import Rows
from weft.ops.triton.device import Device
from weft.ops.triton.device_batch import DeviceBatch
from weft.plan import IterationPlan, RowStart
from weft.request import RequestId, SamplingParams

NUM_ROWS, CONTEXT, BLOCK_SIZE, MAX_TOKENS = 6, 70, 8, 128


class NoStep:
    """The content of a slot until its result is collected."""

    def __init__(self) -> None:
        self.collected = 0

    def collect(self) -> None:
        self.collected += 1


@dataclass
class Both:
    """The rows of a backend on the device, and the same rows on the host."""

    device: Device

    def __post_init__(self) -> None:
        self.mailbox = Mailbox(self.device, NUM_ROWS, 64)
        self.rows = DeviceRows(self.device, self.mailbox, NUM_ROWS, CONTEXT, BLOCK_SIZE, MAX_TOKENS)
        self.twin = Rows(NUM_ROWS, CONTEXT, BLOCK_SIZE)

    def step(self, plan: IterationPlan, size: int | None = None) -> DeviceBatch:
        """Prepares the batch of one step; `size` pads a decode step."""
        slot = self.mailbox.take()
        self.twin.update(plan)
        self.rows.change(plan, slot)
        if is_decode(plan):
            size = size or len(plan.rows)
            self.rows.prepare_decodes(size)
            batch = self.rows.decode_batch(size, CONTEXT)
        else:
            batch = self.rows.prepare_tokens(plan, slot, None)
        sampled = torch.zeros(NUM_ROWS, dtype=torch.int32, device=self.device.torch_device)
        self.mailbox.publish(sampled, sampled, plan.num_samples)
        self.mailbox.send(slot, NoStep())
        self.device.synchronize()
        return batch

    def check(self, plan: IterationPlan, batch: DeviceBatch) -> None:
        """Checks that the batch equals that of the host, and that padding is marked."""
        step = self.twin.prepare(plan)
        self.twin.read_tokens(step)
        expected = step.indices
        tokens, entries, samples = len(expected.token_ids), len(plan.rows), plan.num_samples
        assert (batch.token_ids[:tokens].cpu().numpy() == expected.token_ids).all()
        assert (batch.positions[:tokens].cpu().numpy() == expected.positions).all()
        assert (batch.cells[:tokens].cpu().numpy() == expected.cells).all()
        assert (batch.cells[tokens:].cpu().numpy() == -1).all()
        assert batch.rows[:entries].tolist() == list(plan.rows)
        assert (batch.query_starts[: entries + 1].cpu().numpy() == expected.query_starts).all()
        assert batch.query_starts[batch.requests] == batch.tokens
        assert (batch.context_lengths[:entries].cpu().numpy() == expected.context_lengths).all()
        assert (batch.context_lengths[entries:].cpu().numpy() == 0).all()
        assert (batch.logit_indices[:samples].cpu().numpy() == expected.logit_indices).all()
        entries_sampling = step.entries
        rows, positions = self.rows.sampled(batch.sampled)
        assert (rows[:samples].cpu().numpy() == entries_sampling.rows).all()
        assert (rows[samples:].cpu().numpy() == -1).all()
        assert (positions[:samples].cpu().numpy() == entries_sampling.positions).all()
        assert batch.longest_query == max(plan.counts)
        assert batch.longest_context >= max(expected.context_lengths)


def start(row: int, tokens: list[int], blocks: list[int]) -> RowStart:
    return RowStart(row, RequestId(str(row)), tuple(tokens), len(tokens), SamplingParams(), 0, tuple(blocks))


def plan_of(
    entries: list[tuple[int, int, int, bool]],
    starts: list[RowStart] | None = None,
    tables: list[tuple[int, int, int]] | None = None,
    decodes: int = 0,
) -> IterationPlan:
    """Entries are (row, start, count, samples), tables (row, index, block)."""
    columns = list(zip(*entries, strict=True)) or [(), (), (), ()]
    changed = list(zip(*(tables or []), strict=True)) or [(), (), ()]
    return IterationPlan(
        step=0,
        num_decodes=decodes,
        request_ids=tuple(RequestId(str(row)) for row in columns[0]),
        rows=columns[0],
        starts=columns[1],
        counts=columns[2],
        samples=columns[3],
        row_starts=tuple(starts or ()),
        table_rows=changed[0],
        table_indices=changed[1],
        table_blocks=changed[2],
    )


def test_random_steps_have_the_same_index_arrays_on_the_device_as_on_the_host(device: Device) -> None:
    both, chance = Both(device), random.Random(5)
    lengths: dict[int, int] = {}
    for _ in range(60):
        starts, tables, decodes, prefills = [], [], [], []
        for row in chance.sample(range(NUM_ROWS), chance.randint(1, NUM_ROWS)):
            if row not in lengths or chance.random() < 0.1:
                tokens = [chance.randrange(1000) for _ in range(chance.randint(1, 40))]
                blocks = [chance.randrange(10_000) for _ in range(-(-len(tokens) // BLOCK_SIZE))]
                starts.append(start(row, tokens, blocks))
                done = chance.randrange(len(tokens))
                count = chance.randint(1, len(tokens) - done)
                prefills.append((row, done, count, done + count == len(tokens)))
                lengths[row] = len(tokens)
            elif lengths[row] < CONTEXT:
                position = lengths[row]
                if position % BLOCK_SIZE == 0:
                    tables.append((row, position // BLOCK_SIZE, chance.randrange(10_000)))
                decodes.append((row, position, 1, True))
                lengths[row] += 1
        if not decodes and not prefills:
            continue
        plan = plan_of([*decodes, *prefills], starts, tables, len(decodes))
        both.check(plan, both.step(plan, NUM_ROWS if not prefills else None))


def test_a_decode_step_is_padded_to_the_size_of_its_graph(device: Device) -> None:
    both = Both(device)
    both.step(plan_of([(3, 0, 9, True)], [start(3, list(range(9)), [7, 5])]))
    plan = plan_of([(3, 9, 1, True)], decodes=1)
    batch = both.step(plan, size=4)
    assert (batch.tokens, batch.requests, batch.sampled) == (4, 4, 4)
    both.check(plan, batch)


def test_a_table_entry_that_is_new_in_a_decode_step_is_used_by_it(device: Device) -> None:
    both = Both(device)
    both.step(plan_of([(2, 0, 8, True)], [start(2, list(range(8)), [4])]))
    batch = both.step(plan_of([(2, 8, 1, True)], tables=[(2, 1, 77)], decodes=1))
    assert batch.cells.tolist() == [77 * BLOCK_SIZE]


def test_more_table_entries_than_a_message_holds_are_still_written(device: Device) -> None:
    both = Both(device)
    both.step(plan_of([(row, 0, 1, True) for row in (0, 1)], [start(row, [row], [row]) for row in (0, 1)]))
    tables = [(row, index, 100 * row + index) for row in (0, 1) for index in range(1, 8)]
    assert len(tables) > NUM_ROWS
    plan = plan_of([(0, 1, 1, True), (1, 1, 1, True)], tables=tables, decodes=2)
    both.check(plan, both.step(plan))
    assert both.rows.tables[1, :8].tolist() == [1, *range(101, 108)]


def test_if_an_entry_is_named_twice_the_last_one_counts(device: Device) -> None:
    both = Both(device)
    both.step(plan_of([(0, 0, 1, True)], [start(0, [1], [3])]))
    for plan in (
        plan_of([(0, 1, 1, True)], tables=[(0, 1, 8), (0, 1, 9)], decodes=1),
        plan_of([(0, 2, 2, True)], tables=[(0, 2, 8), (0, 2, 9)]),
    ):
        both.step(plan)
    assert both.rows.tables[0, :3].tolist() == [3, 9, 9]


@pytest.mark.parametrize("is_decode_step", [True, False])
def test_blocks_of_the_store_are_in_the_second_half_of_a_table_row(
    device: Device, is_decode_step: bool
) -> None:
    mailbox = Mailbox(device, NUM_ROWS, 64)
    rows = DeviceRows(device, mailbox, NUM_ROWS, CONTEXT, BLOCK_SIZE, MAX_TOKENS, two_tier=True)
    rows.number_store_from(100)
    half = rows.tables.shape[1] // 2
    begin = plan_of([(2, 24, 6, True)], [start(2, list(range(30)), [103, 101, 7, 8])])
    plan = plan_of([(2, 30, 1, is_decode_step)], tables=[(2, 4, 9)], decodes=int(is_decode_step))
    plan = replace(plan, moved_rows=(2, 2), moved_indices=(2, 3), moved_from=(7, -1), moved_to=(105, 104))
    for one in (begin, plan):
        slot = mailbox.take()
        rows.change(one, slot)
        if is_decode(one):
            rows.prepare_decodes(1)
        else:
            rows.prepare_tokens(one, slot, None)
        mailbox.publish(mailbox.step_count, mailbox.step_count, sampled=0)
        mailbox.send(slot, NoStep())
    assert rows.tables[2, 2:5].tolist() == [7, 8, 9]
    assert rows.tables[2, half : half + 4].tolist() == [3, 1, 5, 4]
    moves = rows.moves(plan, mailbox.take())
    assert moves is not None and moves.count == 1 and moves.parcel.tolist() == [7, 5]
    assert rows.moves(begin, mailbox.take()) is None


def test_a_row_start_larger_than_the_buffer_of_a_slot_arrives_complete(device: Device) -> None:
    mailbox = Mailbox(device, 2, 64)
    rows = DeviceRows(device, mailbox, 2, 40_000, BLOCK_SIZE, 64)
    tokens = np.random.default_rng(1).integers(0, 50_000, 39_000).tolist()
    slot = mailbox.take()
    plan = plan_of([(1, 38_990, 10, True)], [start(1, tokens, list(range(4875)))])
    rows.change(plan, slot)
    batch = rows.prepare_tokens(plan, slot, None)
    device.synchronize()
    assert rows.tokens[1, :39_000].tolist() == tokens
    assert batch.token_ids.tolist() == tokens[-10:]


def test_sampled_tokens_arrive_in_the_slot_of_their_step(device: Device) -> None:
    mailbox = Mailbox(device, 4, 64)
    slots = []
    for turn in range(2 * SLOTS + 1):
        slot = mailbox.take()
        tokens = torch.full((4,), 10 * turn, dtype=torch.int32, device=device.torch_device)
        mailbox.publish(tokens, tokens + 1, sampled=3)
        mailbox.send(slot, NoStep())
        slot.event.synchronize()
        assert slot.outbox[:, :3].tolist() == [[10 * turn] * 3, [10 * turn + 1] * 3]
        slots.append(slot)
    assert slots[0] is slots[SLOTS] and len(set(map(id, slots))) == SLOTS


def test_a_slot_is_not_written_again_before_its_step_was_collected(device: Device) -> None:
    mailbox = Mailbox(device, 4, 64)
    steps = []
    for _ in range(SLOTS):
        steps.append(NoStep())
        mailbox.publish(mailbox.step_count, mailbox.step_count, sampled=0)
        mailbox.send(mailbox.take(), steps[-1])
    mailbox.take()
    assert [step.collected for step in steps] == [1] + [0] * (SLOTS - 1)


def test_after_launches_that_failed_halfway_the_next_step_has_the_right_slot(device: Device) -> None:
    mailbox = Mailbox(device, 4, 64)
    tokens = torch.arange(4, dtype=torch.int32, device=device.torch_device)
    mailbox.take()
    mailbox.publish(tokens, tokens, sampled=4)  # then an exception was raised
    mailbox.restore()
    slot = mailbox.take()
    mailbox.publish(tokens + 5, tokens, sampled=4)
    mailbox.send(slot, NoStep())
    slot.event.synchronize()
    assert slot.outbox[0].tolist() == [5, 6, 7, 8]
