"""Draft tokens from finished answers: what is found, for which cache salt, and how much memory it takes."""

from __future__ import annotations

import gc
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
    MAX_WAITING_TOKENS,
    PROMPT_TOKENS,
    RESUMED_WINDOW,
    SAMPLED_SEARCHES,
    AnswerIndex,
    AnswerIndexes,
    AnswerRates,
)
from weft.scheduling.draft_tokens import INITIAL_ACCEPTANCE, DraftProposer
from weft.scheduling.sequence import Sequence

ROOM = 1 << 20
PROMPT = list(range(100, 120))
ANSWER = [7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20]


def as_bytes(tokens: list[int]) -> bytes:
    return array("i", tokens).tobytes()


def add(indexes: AnswerIndexes, answer: list[int], salt: str = "") -> None:
    """Adds an answer, and indexes all of it."""
    indexes.add(salt, PROMPT + answer, len(PROMPT))
    indexes.advance(1 << 30)
    indexes.check_integrity()


def indexes_with(*answers: list[int], salt: str = "", room: int = ROOM) -> AnswerIndexes:
    indexes = AnswerIndexes(room)
    for answer in answers:
        add(indexes, answer, salt)
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


def following(answer: list[int], text: list[int], num_known: int = 4) -> tuple[AnswerIndexes, DraftProposer]:
    """A sequence that gets the tokens of a text one after another, beside this finished answer."""
    indexes, own = indexes_with(answer), text[:num_known]
    proposer = DraftProposer(own, (), indexes)
    proposer._next = proposer._find()
    for token in text[num_known:]:
        own.append(token)
        proposer.update()
    return indexes, proposer


@pytest.mark.parametrize(
    ("text", "proposal", "length"),
    [
        ([7, 8, 9, 10, 11, 99], (13, 14, 15), 0),
        ([7, 8, 9, 10, 11, 99, 13, 14], (15, 16, 17), 0),
        ([7, 8, 9, 10, 11, 99, 98, 12], (13, 14, 15), 1),
        ([7, 8, 9, 10, 11, 99, 15], (16, 17, 18), 1),
        ([7, 8, 9, 10, 11, 15], (16, 17, 18), 1),
    ],
    ids=["replaced", "goes on after a replaced token", "inserted", "replaced by fewer", "left out"],
)
def test_after_a_mismatch_the_answer_is_resumed_where_its_next_tokens_are(
    text: list[int], proposal: tuple[int, ...], length: int
) -> None:
    _, proposer = following(ANSWER, text)
    assert proposer.propose(3) == proposal
    assert proposer.is_learned and proposer.match_length == length


def test_an_answer_is_resumed_at_the_next_pair_of_tokens_before_a_single_one() -> None:
    answer = [1, 2, 3, 4, 5, 60, 7, 61, 8, 64, 7, 8, 62, 63]
    _, proposer = following(answer, [1, 2, 3, 4, 5, 99, 7, 8])
    assert proposer.propose(2) == (62, 63) and proposer.match_length == 2


def test_an_answer_is_resumed_within_a_window_and_before_its_end() -> None:
    for gap, proposal in ((RESUMED_WINDOW - 3, (51,)), (RESUMED_WINDOW, ())):
        far = [1, 2, 3, 4, 5, *range(1000, 1000 + gap), 50, 51]
        indexes, proposer = following(far, [1, 2, 3, 4, 5, 99, 98, 50])
        assert proposer.propose(4) == proposal
        add(indexes, [50, 51, 52, 53, 54])
    assert not following([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 99])[1].has_match, (
        "nothing follows the last token"
    )
    indexes, own = indexes_with([1, 2, 3, 4, 5, 6, 7], [8, 50, 51, 52]), [1, 2, 3, 4]
    proposer = DraftProposer(own, (), indexes)
    proposer._next = proposer._find()
    for token in (5, 99, 98, 50):
        own.append(token)
        proposer.update()
    assert not proposer.has_match, "the next answer is another text"


def test_a_resumed_answer_has_acceptance_rates_of_its_own() -> None:
    indexes, proposer = following(ANSWER, [7, 8, 9, 10, 11, 99, 98])
    rates = indexes.of("").rates  # type: ignore[union-attr]
    assert rates[0] < INITIAL_RATE and rates[1] == rates[2] == rates[LENGTHS[0]] == INITIAL_RATE
    assert not proposer.has_match, "one token is taken for a replaced one, not two in a row"


def test_the_own_text_is_used_while_it_is_right_more_often_than_resumed_answers() -> None:
    answer = [7, 8, 9, 10, 98, 12, 13, 14]
    for rate, proposal in ((0.1, (31, 32)), (0.9, (13, 14))):
        indexes, own = indexes_with(answer), [98, 99, 31, 32, 7, 8, 9, 10]
        indexes.of("").rates[0] = rate  # type: ignore[union-attr]
        proposer = DraftProposer(own, (), indexes)
        proposer._next = proposer._find()
        own += [98, 99]  # 98 as in the answer, and 99 in place of 12
        proposer.update()
        assert proposer.propose(2) == proposal


def test_memory_is_bounded_and_the_salt_with_most_answers_pays() -> None:
    indexes, numbers = AnswerIndexes(40 * BYTES_PER_INDEX), random.Random(1)
    add(indexes, ANSWER, "small")
    for _ in range(400):
        answer = [numbers.randrange(1000) for _ in range(numbers.randrange(4, 200))]
        add(indexes, answer, "large")
    assert proposed(indexes, ANSWER[:6], "small"), "a small index stays"
    assert proposed(indexes, answer[:-1] if len(answer) > 5 else answer, "large", 1)
    for salt in range(300):
        add(indexes, ANSWER, str(salt))


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
            indexes.advance(1 << 30)
            most = max(most, num_reads)
        assert most <= 30, f"{most} reads of the size of an index for one answer"
        indexes.check_integrity()


def test_the_salts_without_an_answer_for_the_longest_time_are_dropped() -> None:
    indexes = AnswerIndexes(1 << 30)
    for number in range(MAX_SALTS):
        indexes.add(str(number), PROMPT + ANSWER, len(PROMPT))
        indexes.advance(100)
    add(indexes, ANSWER, "0")
    for number in range(MAX_SALTS, MAX_SALTS + 5):
        add(indexes, ANSWER, str(number))
    assert [number for number in range(MAX_SALTS) if indexes.of(str(number)) is None] == [1, 2, 3, 4, 5]
    indexes.check_integrity()


def test_the_memory_of_a_token_is_what_is_counted() -> None:
    numbers = random.Random(2)
    tokens = [numbers.randrange(50_000) for _ in range(100_000)]
    indexes = indexes_with(*(tokens[i : i + 200] for i in range(0, len(tokens), 200)), room=64 << 20)
    index = indexes.of("")
    assert index is not None
    used = 0
    for generation in index._generations:
        entries = sum(sys.getsizeof(key) for key in generation.places) + sys.getsizeof(generation.places)
        places = {id(place): sys.getsizeof(place) for place in generation.places.values()}
        used += entries + sum(places.values()) + sys.getsizeof(generation.tokens)
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


def texts(count: int, length: int, seed: int = 3) -> list[list[int]]:
    numbers = random.Random(seed)
    return [[numbers.randrange(50_000) for _ in range(length)] for _ in range(count)]


@pytest.mark.parametrize("salts", [("",), ("a", "b")])
def test_a_full_index_loses_its_oldest_answers_only(salts: tuple[str, ...]) -> None:
    room = 2000 * BYTES_PER_TOKEN
    indexes, most_kept = AnswerIndexes(room + len(salts) * BYTES_PER_INDEX), 0
    answers = texts(6000 // 52, 40)
    for number, answer in enumerate(answers):
        add(indexes, answer, salts[number % len(salts)])
        most_kept = max(most_kept, indexes.num_tokens)
        if number == len(salts):
            rates = [indexes.of(salt).rates for salt in salts]  # type: ignore[union-attr]
            rates[0].learn(LENGTHS[0], True)
        if most_kept > 1900:
            assert indexes.num_tokens > 2000 * 3 // 4, f"{indexes.num_tokens} tokens remain after {number}"
    for number, answer in list(enumerate(answers))[-10:]:
        assert proposed(indexes, answer[:30], salts[number % len(salts)]) == tuple(answer[30:35])
    assert not proposed(indexes, answers[0][:30], salts[0]), "the oldest answer is still there"
    assert [indexes.of(salt).rates for salt in salts] == rates  # type: ignore[union-attr]
    assert rates[0][LENGTHS[0]] > INITIAL_RATE


def test_an_index_has_few_generations() -> None:
    """A search looks into each of them."""
    indexes, most = AnswerIndexes(1000 * 17 * BYTES_PER_TOKEN), 0
    for answer in texts(4000, 4):
        add(indexes, answer)
        most = max(most, len(indexes.of("")._generations))  # type: ignore[union-attr]
    assert 8 < most <= 8 + 20


@pytest.mark.parametrize("count", [1, 7, 512])
def test_an_answer_that_is_indexed_in_pieces_is_found_as_if_it_were_added_at_once(count: int) -> None:
    at_once, in_pieces = AnswerIndexes(ROOM), AnswerIndexes(ROOM)
    answers = texts(12, 60)
    for number, answer in enumerate(answers):
        salt = str(number % 2)
        add(at_once, answer, salt)
        in_pieces.add(salt, PROMPT + answer, len(PROMPT))
    for _ in range(12 * (60 + PROMPT_TOKENS)):
        in_pieces.advance(count)
        in_pieces.check_integrity()
    for salt in ("0", "1"):
        one, other = at_once.of(salt), in_pieces.of(salt)
        assert one is not None and other is not None
        assert [(g.tokens, g.places) for g in one._generations] == [
            (g.tokens, g.places) for g in other._generations
        ]


def test_a_piece_never_has_more_tokens_than_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Indexing happens between two steps."""
    indexes, sizes = AnswerIndexes(1 << 30), []
    extend = AnswerIndex.extend_text

    def counted(index: AnswerIndex, piece: array[int], num_prompt_tokens: int) -> None:
        sizes.append(len(piece))
        extend(index, piece, num_prompt_tokens)

    monkeypatch.setattr(AnswerIndex, "extend_text", counted)
    indexes.add("", PROMPT + texts(1, 5000)[0], len(PROMPT))
    assert not sizes, "the end of an answer does not wait for its index"
    for _ in range(10):
        sizes.clear()
        indexes.advance(512)
        assert sum(sizes) <= 512
    assert indexes.num_tokens == PROMPT_TOKENS + 5000 + 1


def test_the_first_tokens_of_an_answer_help_while_the_rest_waits() -> None:
    indexes = AnswerIndexes(ROOM)
    indexes.add("", PROMPT + ANSWER, len(PROMPT))
    indexes.advance(PROMPT_TOKENS + 8)
    assert proposed(indexes, ANSWER[:6]) == tuple(ANSWER[6:8])
    indexes.advance(100)
    assert proposed(indexes, ANSWER[:6]) == tuple(ANSWER[6:11])


def test_too_many_waiting_answers_are_not_kept() -> None:
    indexes = AnswerIndexes(1 << 30)
    for answer in texts(100, 5000):
        indexes.add("", PROMPT + answer, len(PROMPT))
        indexes.check_integrity()
    assert indexes.num_texts == MAX_WAITING_TOKENS // (5000 + PROMPT_TOKENS)
    indexes.advance(1 << 30)
    indexes.add("", PROMPT + ANSWER, len(PROMPT))
    indexes.advance(100)
    assert proposed(indexes, ANSWER[:6]) == tuple(ANSWER[6:11])


def test_an_index_that_is_dropped_while_an_answer_is_added_gets_no_half_answer() -> None:
    small, large = texts(3, 230), texts(1, 480)[0]
    indexes = AnswerIndexes(1000 * BYTES_PER_TOKEN + 4 * BYTES_PER_INDEX)
    for number, answer in enumerate(small):
        add(indexes, answer, str(number))
    indexes.add("large", PROMPT + large, len(PROMPT))
    for _ in range(2):
        indexes.advance(150)
        indexes.check_integrity()
    assert indexes.of("large") is None, "the largest index pays"
    indexes.advance(1000)
    assert indexes.of("large") is None and not indexes._waiting
    add(indexes, ANSWER, "large")
    assert proposed(indexes, ANSWER[:6], "large")


def test_a_sequence_does_not_hold_an_index_that_was_dropped() -> None:
    indexes, own = indexes_with(ANSWER), [1, 2, *ANSWER[:3]]
    proposer = DraftProposer(own, (), indexes)
    own.append(ANSWER[3])
    proposer.update()
    assert proposer.is_learned
    assert indexes.of("") not in gc.get_referents(proposer)
    own.append(99)
    proposer.update()
    assert not any(isinstance(one, AnswerRates) for one in gc.get_referents(proposer))


def test_while_draft_tokens_do_not_pay_off_one_search_in_sixteen_looks_for_them() -> None:
    index = indexes_with(ANSWER).of("")
    assert index is not None
    last = as_bytes(ANSWER[:12])
    found = [index.find(last, needed_rate=0.6)[0] for _ in range(4 * SAMPLED_SEARCHES)]
    assert found.count(12) == 4
    assert found.count(0) == 4 * SAMPLED_SEARCHES - 4
    assert all(index.find(last, needed_rate=0.4)[0] == 12 for _ in range(SAMPLED_SEARCHES))
    for _ in range(50):
        index.rates.learn(12, True)
    assert all(index.find(last, needed_rate=0.6)[0] == 12 for _ in range(SAMPLED_SEARCHES))
