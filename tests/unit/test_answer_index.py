"""Draft tokens from finished answers: what is found, for which cache salt, and how much memory it takes."""

from __future__ import annotations

import random
import sys
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_drafts import Script

from weft.request import InferenceRequest, RequestId, SamplingParams
from weft.scheduling.answer_index import (
    BYTES_PER_INDEX,
    BYTES_PER_TOKEN,
    END,
    INITIAL_RATE,
    LENGTHS,
    MAX_SALTS,
    PROMPT_TOKENS,
    AnswerIndex,
    AnswerIndexes,
)
from weft.scheduling.draft_tokens import INITIAL_ACCEPTANCE, DraftProposer
from weft.scheduling.sequence import Sequence

ROOM = 1 << 20
PROMPT = list(range(100, 120))
ANSWER = [7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20]


def as_bytes(tokens: list[int]) -> bytes:
    return array("i", tokens).tobytes()


def indexes_with(*answers: list[int], salt: str = "", room: int = ROOM) -> AnswerIndexes:
    indexes = AnswerIndexes(room)
    for answer in answers:
        indexes.add(salt, PROMPT + answer, len(PROMPT))
    return indexes


def proposed(indexes: AnswerIndexes, tokens: list[int], salt: str = "", count: int = 5) -> tuple[int, ...]:
    """What follows a sequence that has just got the last of these tokens."""
    own = tokens[:-1]
    proposer = DraftProposer(own, (), indexes, salt)
    own.append(tokens[-1])
    proposer.update()
    return proposer.propose(count)


def test_an_answer_continues_as_an_earlier_one_did() -> None:
    indexes = indexes_with(ANSWER)
    assert proposed(indexes, [1, 2, *ANSWER[3:7]]) == tuple(ANSWER[7:12])
    assert proposed(indexes, [1, 2, *ANSWER[4:7]]) == (), "three tokens are too few"


def test_the_beginning_of_an_answer_is_found_by_the_end_of_its_prompt() -> None:
    indexes = indexes_with(ANSWER)
    assert proposed(indexes, [*PROMPT, ANSWER[0]]) == tuple(ANSWER[1:6])


def test_other_salts_find_nothing() -> None:
    indexes = indexes_with(ANSWER, salt="a")
    assert proposed(indexes, ANSWER[:6], "a") and not proposed(indexes, ANSWER[:6], "b")


def test_the_longest_match_wins_and_of_equal_ones_the_last() -> None:
    common = [31, 32, 33, 34]
    long = list(range(40, 40 + LENGTHS[0] - 4)) + common
    indexes = indexes_with([*long, 1, 1], [*common, 2, 2], [5, 5, 5, *common, 3, 3])
    assert proposed(indexes, long, count=2) == (1, 1)
    assert proposed(indexes, [0, *common], count=2) == (3, 3)


def test_the_own_text_comes_before_an_answer_of_equal_length() -> None:
    common = [31, 32, 33, 34]
    indexes = indexes_with([*common, 1, 1])
    assert proposed(indexes, [*common, 2, 2, *common], count=2) == (2, 2)


def test_a_match_ends_with_its_text() -> None:
    indexes = indexes_with(ANSWER, [1, 2, 3, 4, 5])
    assert proposed(indexes, ANSWER[:-2], count=9) == tuple(ANSWER[-2:])
    assert proposed(indexes, ANSWER) == (), "the next text does not continue it"


@settings(max_examples=50)
@given(st.lists(st.lists(st.integers(0, 3), min_size=4, max_size=40), max_size=12), st.integers(0, 1 << 30))
def test_what_is_found_occurred_after_the_same_tokens(answers: list[list[int]], seed: int) -> None:
    indexes, numbers = indexes_with(*answers), random.Random(seed)
    index = indexes.of("")
    for _ in range(20):
        last = [numbers.randrange(4) for _ in range(numbers.choice((3, 4, 12, 20)))]
        length, text, place = index.find(as_bytes(last)) if index is not None else (0, array("i"), -1)
        known = [PROMPT[-PROMPT_TOKENS:] + answer for answer in answers]
        if length:
            assert text[place - length : place].tolist() == last[-length:] and text[place] != END
        expected = next(
            (
                n
                for n in LENGTHS
                if len(last) >= n
                and any(
                    one[i - n : i] == last[-n:]
                    for one in known
                    for i in range(PROMPT_TOKENS, len(one))
                    if i >= n
                )
            ),
            0,
        )
        assert length == expected


def test_wrong_answers_do_not_lower_the_rate_of_the_own_text() -> None:
    indexes, tokens = indexes_with(ANSWER), [1, 2, *ANSWER[:4]]
    own = tokens[:-1]
    proposer = DraftProposer(own, (), indexes)
    own.append(tokens[-1])
    proposer.update()
    assert proposer.is_learned and proposer.acceptance_rate == INITIAL_RATE
    own.append(99)
    proposer.update()
    index = indexes.of("")
    assert index is not None and index.rates[LENGTHS[-1]] < INITIAL_RATE == index.rates[LENGTHS[0]]
    assert proposer.own_rate == INITIAL_ACCEPTANCE and not proposer.has_match


def test_memory_is_bounded_and_the_salt_with_most_answers_pays() -> None:
    indexes, numbers = AnswerIndexes(40 * BYTES_PER_INDEX), random.Random(1)
    indexes.add("small", PROMPT + ANSWER, len(PROMPT))
    for _ in range(400):
        answer = [numbers.randrange(1000) for _ in range(numbers.randrange(4, 200))]
        indexes.add("large", PROMPT + answer, len(PROMPT))
        indexes.check_integrity()
    assert proposed(indexes, ANSWER[:6], "small"), "a small index stays"
    assert proposed(indexes, answer[:-1] if len(answer) > 5 else answer, "large", 1)
    for salt in range(300):
        indexes.add(str(salt), PROMPT + ANSWER, len(PROMPT))
        indexes.check_integrity()


def test_an_answer_costs_the_same_with_thousands_of_salts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients choose the salts, and answers are added in the loop of the engine."""
    num_reads = 0
    num_tokens = AnswerIndex.num_tokens.fget
    assert num_tokens is not None

    def counted(index: AnswerIndex) -> int:
        nonlocal num_reads
        num_reads += 1
        return num_tokens(index)  # type: ignore[no-any-return]

    monkeypatch.setattr(AnswerIndex, "num_tokens", property(counted))
    for max_bytes in (1 << 30, MAX_SALTS * BYTES_PER_INDEX):
        indexes, most = AnswerIndexes(max_bytes), 0
        for number in range(2 * MAX_SALTS):
            num_reads = 0
            indexes.add(str(number), PROMPT + ANSWER, len(PROMPT))
            most = max(most, num_reads)
        assert most <= 30, f"{most} reads of the size of an index for one answer"
        indexes.check_integrity()


def test_the_salts_without_an_answer_for_the_longest_time_are_dropped() -> None:
    indexes = AnswerIndexes(1 << 30)
    for number in range(MAX_SALTS):
        indexes.add(str(number), PROMPT + ANSWER, len(PROMPT))
    indexes.add("0", PROMPT + ANSWER, len(PROMPT))
    for number in range(MAX_SALTS, MAX_SALTS + 5):
        indexes.add(str(number), PROMPT + ANSWER, len(PROMPT))
    assert [number for number in range(MAX_SALTS) if indexes.of(str(number)) is None] == [1, 2, 3, 4, 5]
    indexes.check_integrity()


def test_the_memory_of_a_token_is_what_is_counted() -> None:
    numbers = random.Random(2)
    tokens = [numbers.randrange(50_000) for _ in range(100_000)]
    indexes = indexes_with(*(tokens[i : i + 200] for i in range(0, len(tokens), 200)), room=64 << 20)
    index = indexes.of("")
    assert index is not None
    generation = index._younger
    entries = sum(sys.getsizeof(key) for key in generation.places) + sys.getsizeof(generation.places)
    places = {id(place): sys.getsizeof(place) for place in generation.places.values()}
    used = entries + sum(places.values()) + sys.getsizeof(generation.tokens)
    assert used <= index.num_tokens * BYTES_PER_TOKEN * 1.1


@pytest.mark.parametrize("room", [0, BYTES_PER_INDEX])
def test_without_room_nothing_is_kept(room: int) -> None:
    indexes = indexes_with(ANSWER, ANSWER, room=room)
    assert indexes.num_bytes <= room and not proposed(indexes, ANSWER[:6])


class Salted(Script):
    """Requests with cache salts."""

    def ask(self, salt: str, *, is_cancelled: bool = False) -> int:
        """Lets a request generate ANSWER, or cancels it in the middle. Returns the number of its steps."""
        request_id, before = RequestId(str(len(self.texts))), len(self.plans)
        request = InferenceRequest(
            tuple(PROMPT),
            SamplingParams(max_tokens=len(ANSWER), logprobs=0),
            request_id=request_id,
            cache_salt=salt,
        )
        self.texts[request_id] = (*PROMPT, *ANSWER)
        self.scheduler.add(Sequence(request, seed=1))
        if is_cancelled:
            for _ in range(8):
                self.step()
            self.scheduler.cancel(request_id)
            self.collect()
        self.run()
        return len(self.plans) - before


def test_completed_answers_help_requests_with_the_same_salt_only() -> None:
    script = Salted()
    script.ask("a", is_cancelled=True)
    assert script.scheduler._planner.speculation.answers.num_texts == 0, "cancelled answers are not kept"
    first, again, other = script.ask("a"), script.ask("a"), script.ask("b")
    assert again < first == other
    assert all(script.reported(number) == ANSWER for number in (1, 2, 3))
    stats = script.scheduler.stats
    assert 0 < stats.learned_drafts_accepted <= stats.learned_drafts <= stats.tokens_drafted


def test_no_answer_is_kept_with_a_size_of_zero() -> None:
    script = Salted(max_learned_bytes=0)
    assert script.ask("a") == script.ask("a")
