"""Guesses what a sequence goes on with from what stands in it already, and says which guesses a step should check.

A step reads all the weights whatever it computes: while few sequences run, a few tokens more cost little. And text comes back:
code that is edited, words of the question in the answer, lists, the loops of a small model. So the tokens that followed the
same words the last time are computed along, as drafts. What is sampled behind each of them shows whether it was right; from
the first wrong one on they count for nothing. Answers are the same token for token: they only take fewer steps.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection
from copy import copy
from itertools import takewhile

from weft.config import SchedulerConfig
from weft.plan import BackendInfo, IterationPlan
from weft.scheduling.cache.manager import KvCacheManager
from weft.scheduling.decode_costs import DecodeCosts
from weft.scheduling.plan_builder import PlanBuilder
from weft.scheduling.sequence import Phase, Sequence

MATCHED_LENGTHS = (2, 4, 8)
"""How many of the last tokens must have stood together before; the longest that did counts."""

LOOKED_BACK = 2048
"""Tokens that are searched, for every token of a sequence that has no guess: 1 to 6 us, more in text made of few bytes."""

FIRST_CHANCE = 0.5
LEARNING_RATE = 0.1

_TOKEN_BYTES = array("i").itemsize


class DraftProposer:
    """Follows the tokens of one sequence. Every token that comes tells how good its guesses are, checked by a step or not."""

    __slots__ = ("_bytes", "_next", "_tokens", "chance")

    def __init__(self, tokens: list[int]) -> None:
        """`tokens` belong to the sequence and grow."""
        self._tokens = tokens
        # The same, in a form that can be searched at once.
        self._bytes = bytearray(array("i", tokens).tobytes())
        self._next = self._find()
        self.chance = FIRST_CHANCE
        """That the next guess is right, by how the last ones did."""

    def sibling(self, tokens: list[int]) -> DraftProposer:
        """A copy that follows `tokens`, which are equal to those of this one."""
        other = copy(self)
        other._tokens, other._bytes = tokens, self._bytes.copy()
        return other

    @property
    def has_guess(self) -> bool:
        return self._next >= 0

    def learn(self) -> None:
        """Takes in the tokens that have come since."""
        tokens, source = self._tokens, self._next
        known = len(self._bytes) // _TOKEN_BYTES
        new = tokens[known:]
        self._bytes += array("i", new).tobytes()
        for token in new:
            if source >= 0:
                is_right = tokens[source] == token
                self.chance += LEARNING_RATE * (is_right - self.chance)
                source = source + 1 if is_right else -1
        self._next = source if source >= 0 else self._find()

    def guesses(self, count: int, stop_ids: Collection[int] = ()) -> tuple[int, ...]:
        """The next `count` tokens, if all goes on as it did; less where a stop is among them, behind which nothing is said."""
        if self._next < 0 or count <= 0:
            return ()
        found = self._tokens[self._next : self._next + count]
        # What reaches the end of the sequence goes on with itself: a loop.
        looped = (found * (count // len(found) + 1))[:count]
        return tuple(takewhile(lambda token: token not in stop_ids, looped))

    def _find(self) -> int:
        """Where the last tokens stood before: the index behind them. -1: nowhere."""
        text, behind = self._bytes, -1
        lowest = max(0, len(text) - LOOKED_BACK * _TOKEN_BYTES)
        for length in MATCHED_LENGTHS:
            size = length * _TOKEN_BYTES
            last, end = text[-size:], len(text) - _TOKEN_BYTES
            found = text.rfind(last, lowest, end) if size < len(text) else -1
            while found % _TOKEN_BYTES and found >= 0:  # not at the border of a token
                end = found + size - 1
                found = text.rfind(last, lowest, end)
            if found < 0:
                break
            behind = (found + size) // _TOKEN_BYTES
        return behind


class Speculation:
    """How many guesses are worth a place in a step.

    Let n sequences run, and let a step cost as much beside its rows as `fixed` rows do (`DecodeCosts`). A draft token costs one
    row whether it is right or not. It is worth that if the step gives more tokens for its cost with it than without: its chance is
    above n / (fixed + n), and the more drafts there are before it, the higher it must be. One sequence alone makes many drafts;
    among many, only a sequence that repeats itself surely makes some. Beside prompts there are none: prompts fill a step by
    themselves, and requests wait for their first token.
    """

    def __init__(self, config: SchedulerConfig, info: BackendInfo) -> None:
        self._most = config.max_draft_tokens if info.fixed_cost_rows else 0
        self.costs = DecodeCosts(info.fixed_cost_rows)
        self._free_since: float | None = None
        """When the last step ended, if the next was not planned by then."""
        self._block_size = info.block_size
        self._has_tiers = info.store_blocks > 0

    @property
    def is_on(self) -> bool:
        return self._most > 0

    def begin(self, sequence: Sequence) -> None:
        """Gives a sequence a guesser, if it may have one: what a grammar allows is known for one token at a time."""
        if self._most and sequence.request.params.grammar is None:
            sequence.guesser = DraftProposer(sequence.tokens)

    def learn(self, plan: IterationPlan, seconds: float | None, now: float, has_next: bool) -> None:
        """Takes in what a step cost that ended `now`. `has_next`: the step after it is planned already."""
        if self._most and seconds is not None and not plan.num_prefills and plan.num_tokens:
            self.costs.learn(plan.num_tokens, seconds)
            if self._free_since is not None:
                self.costs.learn_gap(now - self._free_since - seconds)
        self._free_since = None if has_next else now

    def may_have_drafts(self, draft: PlanBuilder) -> bool:
        """Whether there is anyone in a step to guess for. Asked for every step, so before anything is reckoned."""
        if not self._most or draft.prefills:
            return False
        return any(s.target == len(s.tokens) for s in draft.decodes)

    def add_drafts(self, draft: PlanBuilder, kv_cache: KvCacheManager, room: int) -> None:
        """Lets decodes go on with what they are guessed to say, while there is room for so many tokens in the step. Nobody gives
        way for it, and nobody waits much longer: a step takes half as long again at most, or what one sequence's guesses take."""
        num_running = len(draft.decodes)
        room = min(room, max(self._most, int(self.costs.fixed_rows + num_running) // 2))
        for sequence in draft.decodes:
            guesser = sequence.guesser
            if guesser is None or sequence.target > len(sequence.tokens):
                continue  # its last token is being sampled
            count = min(
                len(self._chances(guesser, num_running)),
                sequence.limit - sequence.target - 1,
                room,
            )
            guessed = guesser.guesses(count, sequence.stop_ids)
            if guessed and (count := self._take_blocks(draft, kv_cache, sequence, len(guessed))) > 0:
                room -= count
                draft.guesses[sequence] = guessed[:count]

    def _take_blocks(
        self, draft: PlanBuilder, kv_cache: KvCacheManager, sequence: Sequence, count: int
    ) -> int:
        """How many of `count` drafts a decode has blocks for, or gets them."""
        allocation, start = sequence.allocation, sequence.scheduled
        assert allocation is not None
        if self._has_tiers:
            # NOTE: what moves behind the tail is final, and drafts may be wrong: none of them may complete a block.
            count = min(count, self._block_size - 2 - start % self._block_size)
        first = len(allocation.blocks)
        needed = kv_cache.needed(first, allocation.stored, start + 1 + count)
        if not needed.full:
            return count
        if not kv_cache.extend(allocation, needed, sequence.keys):
            return first * self._block_size - start - 1
        draft.note_tables(sequence, first)
        return count

    def is_worth_waiting(self, running: list[Sequence]) -> bool:
        """Whether to let the step in flight end before another is planned, since guesses need its tokens."""
        if not self._most or any(s.phase is not Phase.DECODE for s in running):
            return False
        saved, worth = 0.0, self.costs.fixed_rows / max(1, len(running)) + 1.0
        for sequence in running:
            if sequence.guesser is not None:
                chances = self._chances(sequence.guesser, len(running))
                saved += sum(chances) * worth - len(chances)
        return saved > self.costs.gap_rows

    def _chances(self, guesser: DraftProposer, num_running: int) -> list[float]:
        """Of each guess worth checking where so many run, that it and all before it are right."""
        chances: list[float] = []
        if not guesser.has_guess:
            return chances
        tokens, cost = float(num_running), self.costs.fixed_rows + num_running
        chance = guesser.chance
        while chance * cost > tokens and len(chances) < self._most:
            chances.append(chance)
            tokens, cost = tokens + chance, cost + 1.0
            chance *= guesser.chance
        return chances
