"""Plans for a two-tier cache without a scheduler: blocks and moves follow from the positions."""

from __future__ import annotations

from dataclasses import dataclass, field

from weft.plan import BackendInfo, IterationPlan, RowStart
from weft.request import RequestId, SamplingParams
from weft.tiers import stored_blocks

PARAMS = SamplingParams(temperature=0.0, max_tokens=500, ignore_eos=True, logprobs=2)


@dataclass
class Text:
    """A request: its known tokens, the number of computed ones, and its blocks."""

    row: int
    tokens: list[int]
    prompt_length: int
    computed: int = 0
    full: dict[int, int] = field(default_factory=dict)
    stored: list[int] = field(default_factory=list)
    begins: bool = True


class Planner:
    """Makes consecutive plans; the next plan may use the blocks that a plan frees."""

    def __init__(self, info: BackendInfo) -> None:
        self.info = info
        self._free = list(range(info.num_blocks))
        self._free_store = list(range(info.num_blocks, info.num_blocks + info.store_blocks))
        self._steps = 0
        self._leaving: list[int] = []

    def plan(self, entries: list[tuple[Text, int]]) -> IterationPlan:
        """The plan of the next step: (text, number of tokens) pairs. Decodes come first."""
        size, tail = self.info.block_size, self.info.tail_blocks
        self._free += self._leaving
        self._leaving = []
        tables: list[tuple[int, int, int]] = []
        moves: list[tuple[int, int, int, int]] = []
        starts: list[RowStart] = []
        columns: list[tuple[RequestId, int, int, int, bool]] = []
        for text, count in entries:
            first, end = text.computed, text.computed + count
            for index in range(-(-first // size), -(-end // size)):
                text.full[index] = self._free.pop()
                tables.append((text.row, index, text.full[index]))
            if text.begins:
                last = -(-end // size)
                needed = min(stored_blocks(first, size, tail), len(text.stored))
                blocks = [text.stored[i] if i < needed else text.full[i] for i in range(last)]
                starts.append(
                    RowStart(
                        text.row,
                        RequestId(str(text.row)),
                        tuple(text.tokens),
                        text.prompt_length,
                        PARAMS,
                        3,
                        tuple(blocks),
                    )
                )
                text.begins = False
                # Stored blocks that are needed in full again are moved again, as after a failed step.
                text.stored, again = text.stored[:needed], text.stored[needed:]
                self._free_store += again
                tables = [entry for entry in tables if entry[0] != text.row]
            for index in range(len(text.stored), stored_blocks(end - 1, size, tail)):
                text.stored.append(self._free_store.pop())
                moves.append((text.row, index, text.full[index], text.stored[-1]))
            moved = [index for index in sorted(text.full) if index < len(text.stored)]
            self._leaving += [text.full.pop(index) for index in moved]
            columns.append((RequestId(str(text.row)), text.row, first, count, end >= len(text.tokens)))
            text.computed = end
        changed = list(zip(*tables, strict=True)) or [(), (), ()]
        moved_columns = list(zip(*moves, strict=True)) or [(), (), (), ()]
        ids, rows, firsts, counts, samples = zip(*columns, strict=True)
        decodes = sum(entry[3] == 1 and entry[4] for entry in columns)
        self._steps += 1
        return IterationPlan(
            self._steps,
            decodes if all(samples) and set(counts) == {1} else 0,
            ids,
            rows,
            firsts,
            counts,
            samples,
            tuple(starts),
            *changed,
            moved_rows=moved_columns[0],
            moved_indices=moved_columns[1],
            moved_from=moved_columns[2],
            moved_to=moved_columns[3],
        )
