"""Speculation without a second model: proposes draft tokens, and decides how many a step checks.

A step reads all weights whatever it computes, so a few more rows cost little while few sequences run. Text repeats
itself: edited code, quotes of the question, lists, loops. The proposer looks for the final tokens of a sequence in its
own text, in the prediction of its request if there is one, and in finished answers (`AnswerIndex`). It proposes the
tokens that followed there. The model samples after each draft token; the first mismatch discards the rest. Answers are
the same token for token, in fewer steps.

Tokens that a grammar forces come first: nothing else can be sampled there.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection
from collections.abc import Sequence as Listing
from copy import copy
from itertools import takewhile

from weft.config import SchedulerConfig
from weft.plan import BackendInfo, IterationPlan
from weft.scheduling.answer_index import (
    END,
    LENGTHS,
    RESUMED_LENGTHS,
    RESUMED_WINDOW,
    AnswerIndexes,
    AnswerRates,
)
from weft.scheduling.cache.manager import KvCacheManager
from weft.scheduling.decode_costs import DecodeCosts
from weft.scheduling.plan_builder import PlanBuilder
from weft.scheduling.sequence import Phase, Sequence

MATCH_LENGTHS = (2, 4, 8)
"""How many of the last tokens must occur earlier. The longest match is used."""

SEARCH_WINDOW = 2048
"""How many of the last tokens, and how many of the next tokens of a prediction, are searched for a match. While there is
no match, each new token starts a search. A search takes 1 to 6 us. It compares bytes, so it takes longer if many token
ids have bytes in common."""

INITIAL_ACCEPTANCE = 0.5
PREDICTED_ACCEPTANCE = 0.8
"""The first estimate for a request with a prediction."""
LEARNING_RATE = 0.1

INDEXED_TOKENS = 512
"""How many tokens of finished answers are indexed after a step. Indexing them delays the next plan by about 0.2 ms."""

_TOKEN_BYTES = array("i").itemsize


class DraftProposer:
    """Proposes draft tokens for one sequence. While there is a match, every new token updates the acceptance rate, even
    if no step checked a draft token at its position.

    A match is an index in the sequence's own text, in its prediction, or in a finished answer. The first match is the
    beginning of the prediction. After a mismatch all three are searched. The longest match is used. Of matches of equal
    length, one in the prediction is preferred, then one in the own text.

    After a mismatch in a finished answer, the match may resume in that answer, where the newest tokens occur. It resumes
    only if no match of 12 tokens is found, and if resuming has a higher acceptance rate than the match that is found. So
    a different name or number interrupts the draft tokens for a step or two only.

    Finished answers have acceptance rates of their own. If they are low, draft tokens from the own text remain.

    Forced tokens are proposed first, and then what follows them in the match. They do not change acceptance rates.
    """

    __slots__ = (
        "_anchor",
        "_answers",
        "_bytes",
        "_cache_salt",
        "_first",
        "_forced",
        "_is_predicted",
        "_learned",
        "_learned_length",
        "_learned_rate",
        "_learned_rates",
        "_left",
        "_left_at",
        "_may_replace",
        "_next",
        "_predicted_bytes",
        "_prediction",
        "_tokens",
        "num_accepted",
        "num_drafted",
        "num_predicted_accepted",
        "num_predicted_rejected",
        "own_rate",
    )

    def __init__(
        self,
        tokens: list[int],
        prediction: tuple[int, ...] = (),
        answers: AnswerIndexes | None = None,
        cache_salt: str = "",
    ) -> None:
        """`tokens` is the sequence's own list. The sequence appends to it and then calls `update`. `answers` has the
        finished answers; only those with the same cache salt are searched."""
        self._tokens = tokens
        # Set at the end, so that `_find` does not search it below: another thread may run this constructor while the
        # scheduler adds an answer.
        self._answers: AnswerIndexes | None = None
        self._forced: tuple[int, ...] = ()
        """The next tokens, if the grammar allows no others."""
        self._cache_salt = cache_salt
        self._learned: array[int] | None = None
        """The text that `_next` is an index of, if it is a finished answer."""
        self._learned_length = LENGTHS[-1]
        """How many tokens the current match had when it was found in a finished answer: one of `LENGTHS` or
        `RESUMED_LENGTHS`."""
        self._learned_rate = 0.0
        self._left: array[int] | None = None
        """The finished answer in which a match ended last. The match may resume there after a few other tokens."""
        self._left_at = 0
        """Index in `_left` of the token that did not match."""
        self._may_replace = False
        """Whether the sequence's last token is the one that did not match: it may replace the token at `_left_at`."""
        self._learned_rates: AnswerRates | None = None
        """The rates of the index that has the match. Only the rates are kept, since the index may be dropped."""
        # The same tokens as bytes: `rfind` is far faster than a loop over the list.
        self._bytes = bytearray(array("i", tokens).tobytes())
        self._prediction = prediction
        self._predicted_bytes = array("i", prediction).tobytes()
        self._anchor = 0
        """Index after the last long match in the prediction. The search begins here."""
        self._first = 0
        """Index at which the current match in the prediction or in an answer began."""
        self._is_predicted = bool(prediction)
        """Whether `_next` is an index in the prediction."""
        self._next = 0 if prediction else self._find()
        """Index of the token that is proposed next. -1: there is no match."""
        self.own_rate = PREDICTED_ACCEPTANCE if prediction else INITIAL_ACCEPTANCE
        """The acceptance rate of matches in the own text and in the prediction."""
        self.num_drafted = self.num_accepted = 0
        """Draft tokens that steps have checked, and those that were accepted."""
        self.num_predicted_accepted = self.num_predicted_rejected = 0
        """Accepted and rejected draft tokens from the prediction."""
        self._answers = answers

    def sibling(self, tokens: list[int]) -> DraftProposer:
        """A copy for another sequence with equal `tokens`."""
        other = copy(self)
        other._tokens, other._bytes = tokens, self._bytes.copy()
        return other

    @property
    def num_forced(self) -> int:
        return len(self._forced)

    def num_forced_before(self, stop_ids: Collection[int]) -> int:
        """How many forced tokens come before the first stop token."""
        return len(tuple(takewhile(lambda token: token not in stop_ids, self._forced)))

    @property
    def has_match(self) -> bool:
        """Whether there are draft tokens after the forced ones."""
        return self._next >= 0 and (not self._forced or self._matched(len(self._forced)) == self._forced)

    @property
    def acceptance_rate(self) -> float:
        """Estimated probability that the next draft token is accepted, if it is not forced."""
        return self.own_rate if self._learned is None else self._learned_rate

    @property
    def is_learned(self) -> bool:
        """Whether the current match is in a finished answer."""
        return self._learned is not None

    @property
    def match_length(self) -> int:
        """How many tokens the current match had when it was found in a finished answer."""
        return self._learned_length

    def force(self, tokens: tuple[int, ...]) -> None:
        """Sets the next tokens: those that the grammar forces."""
        self._forced = tokens

    def update(self) -> None:
        """Reads the tokens that the sequence has appended since the last call."""
        tokens, source = self._tokens, self._next
        text: Listing[int] = self._source()
        known = len(self._bytes) // _TOKEN_BYTES
        new = tokens[known:]
        self._bytes += array("i", new).tobytes()
        forced, num_forced = self._forced, len(self._forced)
        self._forced = forced[len(new) :] if forced[: len(new)] == tuple(new) else ()
        for index, token in enumerate(new):
            if source >= 0:
                is_right = text[source] == token
                if index >= num_forced:
                    self._learn(is_right)
                if is_right and source + 1 < len(text) and text[source + 1] != END:
                    source += 1
                else:
                    self._end_match(source)
                    source = -1
            else:
                self._may_replace = False
        self._next = source if source >= 0 else self._find()

    def propose(self, count: int, stop_ids: Collection[int] = ()) -> tuple[int, ...]:
        """Up to `count` draft tokens. They end before the first stop token, since nothing is generated after it."""
        if count <= 0:
            return ()
        forced = self._forced[:count]
        matched = self._matched(count) if self._next >= 0 else ()
        proposed = matched if matched[: len(forced)] == forced else forced
        return tuple(takewhile(lambda token: token not in stop_ids, proposed))

    def _matched(self, count: int) -> tuple[int, ...]:
        """Up to `count` tokens that follow the match."""
        if self._is_predicted:
            proposed: Listing[int] = self._prediction[self._next : self._next + count]
        elif self._learned is not None:
            learned = self._learned[self._next : self._next + count]
            proposed = list(takewhile(lambda token: token != END, learned))
        else:
            found = self._tokens[self._next : self._next + count]
            # A match that reaches the end of the sequence is a loop: repeat it.
            proposed = (found * (count // len(found) + 1))[:count]
        return tuple(proposed)

    def count_checked(self, num_drafts: int, num_accepted: int) -> None:
        """Counts the draft tokens of a step. Called before `update`."""
        self.num_drafted += num_drafts
        self.num_accepted += num_accepted
        if self._is_predicted and self.has_match:
            self.num_predicted_accepted += num_accepted
            self.num_predicted_rejected += num_drafts - num_accepted

    def _source(self) -> Listing[int]:
        if self._learned is not None:
            return self._learned
        return self._prediction if self._is_predicted else self._tokens

    def _learn(self, is_right: bool) -> None:
        if self._learned is None:
            self.own_rate += LEARNING_RATE * (is_right - self.own_rate)
            return
        self._learned_rate += LEARNING_RATE * (is_right - self._learned_rate)
        assert self._learned_rates is not None
        self._learned_rates.learn(self._learned_length, is_right)

    def _end_match(self, end: int) -> None:
        """Ends the current match. Only a long match moves the index at which the search in the prediction begins: a
        short one may be a coincidence."""
        if self._is_predicted and end - self._first >= MATCH_LENGTHS[-1]:
            self._anchor = end
        self._may_replace = False
        if self._learned is not None and end > self._first:
            self._left, self._left_at, self._may_replace = self._learned, end, True

    def _find(self) -> int:
        """Looks for the last tokens, and sets the source of the match. Returns the index after the match: the last one in
        the text or in finished answers, or the next one in the prediction. -1: there is no match."""
        length, after_match = self._find_in_text()
        self._is_predicted, self._learned, self._learned_rates = False, None, None
        if self._prediction:
            predicted_length, index = self._find_in_prediction()
            if predicted_length >= length and 0 <= index < len(self._prediction):
                length, self._is_predicted, self._first, after_match = predicted_length, True, index, index
        answers = None if self._answers is None else self._answers.of(self._cache_salt)
        if answers is not None:
            assert self._answers is not None
            last = bytes(self._bytes[-LENGTHS[0] * _TOKEN_BYTES :])
            learned_length, text, index = answers.find(last, self._answers.needed_rate)
            if learned_length > length:
                self._is_predicted, after_match = False, index
                self._follow(text, index, learned_length, answers.rates)
            if self._left is not None and learned_length < LENGTHS[0]:
                resumed_length, index = self._find_resumed(self._left)
                if index >= 0 and (after_match < 0 or answers.rates[resumed_length] > self.acceptance_rate):
                    self._is_predicted, after_match = False, index
                    self._follow(self._left, index, resumed_length, answers.rates)
        return after_match

    def _follow(self, text: array[int], index: int, length: int, rates: AnswerRates) -> None:
        """Records that the new match is in the finished answer `text`."""
        self._learned, self._first, self._learned_length = text, index, length
        self._learned_rates, self._learned_rate = rates, rates[length]

    def _find_resumed(self, text: array[int]) -> tuple[int, int]:
        """Looks for the last tokens in `text`, the answer that had the mismatch, soon after it. Returns how many were found,
        and the index after them, or -1."""
        first = self._left_at
        window = text[first : first + RESUMED_WINDOW]
        if END in window:
            window = window[: window.index(END)]
        following = window.tobytes()
        for length in RESUMED_LENGTHS[:-1]:
            size = length * _TOKEN_BYTES
            last = self._bytes[-size:]
            found = following.find(last)
            # Skips matches of bytes that do not begin at a token.
            while found % _TOKEN_BYTES and found >= 0:
                found = following.find(last, found + 1)
            index = found // _TOKEN_BYTES + length
            if found >= 0 and index < len(window):
                return length, first + index
        if self._may_replace and len(window) > 1:
            return 0, first + 1
        return 0, -1

    def _find_in_text(self) -> tuple[int, int]:
        """The length of the longest match in the own text, and the index after it, or -1."""
        text, best = self._bytes, (0, -1)
        lowest = max(0, len(text) - SEARCH_WINDOW * _TOKEN_BYTES)
        for length in MATCH_LENGTHS:
            size = length * _TOKEN_BYTES
            last, end = text[-size:], len(text) - _TOKEN_BYTES
            found = text.rfind(last, lowest, end) if size < len(text) else -1
            # Skips matches of bytes that do not begin at a token.
            while found % _TOKEN_BYTES and found >= 0:
                end = found + size - 1
                found = text.rfind(last, lowest, end)
            if found < 0:
                break
            best = length, (found + size) // _TOKEN_BYTES
        return best

    def _find_in_prediction(self) -> tuple[int, int]:
        """The length of the longest match in the prediction, and the index after it, or -1."""
        text, best = self._predicted_bytes, (0, -1)
        start = self._anchor * _TOKEN_BYTES
        end = start + SEARCH_WINDOW * _TOKEN_BYTES
        for length in MATCH_LENGTHS:
            size = length * _TOKEN_BYTES
            last = self._bytes[-size:]
            found = text.find(last, start, end) if size <= len(self._bytes) else -1
            # Skips matches of bytes that do not begin at a token.
            while found % _TOKEN_BYTES and found >= 0:
                found = text.find(last, found + 1, end)
            if found < 0:
                break
            best = length, (found + size) // _TOKEN_BYTES
        return best


class Speculation:
    """Decides how many draft tokens a step checks.

    Let n sequences run, and let the fixed cost of a step equal that of `fixed` rows (`DecodeCosts`). Without draft
    tokens, a step yields n / (fixed + n) tokens per row. A draft token costs one row. It pays off if its probability of
    acceptance exceeds that yield. Each draft token that pays off raises the yield, and so the threshold for the next
    one. So one sequence alone gets many draft tokens; among many sequences only those with a high acceptance rate get
    some.

    Steps with prompts have no draft tokens: prompts fill a step by themselves, and requests wait for their first token.
    """

    def __init__(self, config: SchedulerConfig, info: BackendInfo) -> None:
        self._max_draft_tokens = config.max_draft_tokens if info.fixed_cost_rows else 0
        self.costs = DecodeCosts(info.fixed_cost_rows)
        self._max_learned_bytes = config.max_learned_bytes if self._max_draft_tokens else 0
        self.answers = AnswerIndexes(self._max_learned_bytes)
        self._idle_since: float | None = None
        """When the last step ended. None: the next step was planned before it ended."""
        self._block_size = info.block_size
        self._has_tiers = info.store_blocks > 0

    @property
    def is_on(self) -> bool:
        return self._max_draft_tokens > 0

    def attach_proposer(self, sequence: Sequence) -> None:
        """Gives the sequence a proposer."""
        if self._max_draft_tokens:
            request = sequence.request
            sequence.draft_proposer = DraftProposer(
                sequence.tokens, request.prediction, self.answers, request.cache_salt
            )

    def keep(self, sequence: Sequence) -> None:
        """Keeps the tokens of a completed answer for later sequences with the same cache salt. `learn` indexes them."""
        request = sequence.request
        num_prompt_tokens = 0 if request.learns_prompt else len(request.prompt)
        self.answers.add(request.cache_salt, sequence.tokens, num_prompt_tokens)

    def forget_answers(self) -> None:
        """Drops all finished answers. Sequences with a proposer still use the old answers until they end."""
        is_collected = self.answers.is_collected
        self.answers = AnswerIndexes(self._max_learned_bytes)
        if is_collected:
            self.answers.take_new()

    def learn(self, plan: IterationPlan, seconds: float | None, now: float, has_next: bool) -> None:
        """Learns from a step that ended `now`, and indexes some tokens of finished answers. `has_next`: the next step was
        planned before this one ended."""
        self.answers.advance(INDEXED_TOKENS)
        # Steps with prompts have no draft tokens. While there are such steps, draft tokens pay off late or never.
        num_running = plan.num_tokens if plan.num_prefills else len(plan.rows)
        self.answers.needed_rate = num_running / (self.costs.fixed_rows + max(1, num_running))
        if self._max_draft_tokens and seconds is not None and not plan.num_prefills and plan.num_tokens:
            self.costs.learn(plan.num_tokens, seconds)
            if self._idle_since is not None:
                self.costs.learn_gap(now - self._idle_since - seconds)
        self._idle_since = None if has_next else now

    def seconds_saved(self, num_drafts: int, num_accepted: int, num_running: int) -> float:
        """An estimate for one sequence of a step with `num_running`. An accepted draft token saves the sequence's part of
        a step; each draft token costs a row."""
        rows_saved = num_accepted * (self.costs.fixed_rows + num_running) / num_running
        return (rows_saved - num_drafts) * self.costs.row_seconds

    def may_have_drafts(self, builder: PlanBuilder) -> bool:
        """Whether any sequence of the step can have draft tokens. A cheap test, made for every step."""
        if not self._max_draft_tokens or builder.prefills:
            return False
        return any(s.target == len(s.tokens) for s in builder.decodes)

    def add_draft_tokens(self, builder: PlanBuilder, kv_cache: KvCacheManager, room: int) -> None:
        """Adds at most `room` draft tokens to the decodes of a step, without preempting anything.

        They make the step at most 1.5 times as long. Exception: one sequence can always have its `max_draft_tokens`,
        even if the step becomes longer than that."""
        num_running = len(builder.decodes)
        room = min(room, max(self._max_draft_tokens, int(self.costs.fixed_rows + num_running) // 2))
        for sequence in builder.decodes:
            proposer = sequence.draft_proposer
            if proposer is None or sequence.target > len(sequence.tokens):
                continue  # no draft tokens for it, or its newest token is still being sampled
            count = min(
                len(self._worthwhile_drafts(proposer, sequence.stop_ids, num_running)),
                sequence.limit - sequence.target - 1,
                room,
            )
            proposed = proposer.propose(count, sequence.stop_ids)
            if proposed and (count := self._take_blocks(builder, kv_cache, sequence, len(proposed))) > 0:
                room -= count
                builder.draft_tokens[sequence] = proposed[:count]

    def _take_blocks(
        self, builder: PlanBuilder, kv_cache: KvCacheManager, sequence: Sequence, count: int
    ) -> int:
        """Allocates blocks for `count` draft tokens of a decode. Returns how many of them have blocks."""
        allocation, start = sequence.allocation, sequence.scheduled
        assert allocation is not None
        if self._has_tiers:
            # NOTE: computing the last position of a block moves an older block to the store. That move is final, but a
            # draft token may be rejected. So no draft token may have that position.
            count = min(count, self._block_size - 2 - start % self._block_size)
        first = len(allocation.blocks)
        needed = kv_cache.needed(first, allocation.stored, start + 1 + count)
        if not needed.full:
            return count
        if not kv_cache.extend(allocation, needed, sequence.block_hashes):
            return first * self._block_size - start - 1
        builder.note_tables(sequence, first)
        return count

    def should_wait_for_tokens(self, running: list[Sequence]) -> bool:
        """Whether the next step should wait for the tokens of the step in flight, so that it can have draft tokens."""
        if not self._max_draft_tokens or any(s.phase is not Phase.DECODE for s in running):
            return False
        # Compares the expected saving by draft tokens with the cost of waiting. Unit: the time of one row.
        saved, per_token = 0.0, self.costs.fixed_rows / max(1, len(running)) + 1.0
        for sequence in running:
            if sequence.draft_proposer is not None:
                num_sampling = sequence.target - len(sequence.tokens)
                probabilities = self._worthwhile_drafts(
                    sequence.draft_proposer, sequence.stop_ids, len(running), num_sampling
                )
                saved += sum(probabilities) * per_token - len(probabilities)
        return saved > self.costs.gap_rows

    def _worthwhile_drafts(
        self, proposer: DraftProposer, stop_ids: Collection[int], num_running: int, num_sampling: int = 0
    ) -> list[float]:
        """For each draft token that pays off: the probability that it and all before it are accepted. The first
        `num_sampling` forced tokens are being sampled by the step in flight."""
        probabilities: list[float] = []
        num_forced, has_match = proposer.num_forced_before(stop_ids) - num_sampling, proposer.has_match
        if num_forced <= 0 and not has_match:
            return probabilities
        tokens, cost = float(num_running), self.costs.fixed_rows + num_running
        probability, rate = 1.0, proposer.acceptance_rate
        while len(probabilities) < self._max_draft_tokens:
            if len(probabilities) >= num_forced:
                probability *= rate if has_match else 0.0
            if probability * cost <= tokens:
                break
            probabilities.append(probability)
            tokens, cost = tokens + probability, cost + 1.0
        return probabilities
