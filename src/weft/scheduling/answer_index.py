"""Finished answers, indexed by their n-grams: a source of draft tokens for later answers.

Each cache salt has an index of its own. So the speed of a request reveals nothing about requests with other salts.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

LENGTHS = (12, 4)
"""Lengths of the indexed n-grams: a match has one of these lengths. The longest is tried first."""
RESUMED_LENGTHS = (2, 1, 0)
"""After a mismatch, the match may resume in the same answer, at a place with this many of the newest tokens. The longest
is tried first. 0: it resumes after the token that differs."""
RESUMED_WINDOW = 64
"""How many tokens of the answer, from the mismatch on, are searched for a place where the match resumes."""
PROMPT_TOKENS = 12
"""This many of the last tokens of a prompt are stored before its answer. With them, the end of an equal prompt finds the
beginning of the answer."""
BYTES_PER_TOKEN = 224
"""Memory of an indexed token: the token, its position, and an entry with a key for each length. Measured."""
BYTES_PER_INDEX = 4096
"""Memory of an index without tokens, rounded up.

Not counted: the texts that wait, at most `MAX_WAITING_TOKENS` of 4 bytes, and dropped generations in which running
sequences have a match."""
GENERATIONS = 8
"""A new generation begins when the newest one has 1/GENERATIONS of the tokens of its index. About as many tokens are lost
when the oldest generation is dropped."""
SMALLEST_GENERATION = 64
"""A new generation also waits until the newest one has 1/SMALLEST_GENERATION of the tokens that fit into all memory. So
an index has few generations, and a search is short."""
MAX_WAITING_TOKENS = 1 << 16
"""The maximum number of tokens of finished answers that wait until they are indexed."""
MAX_SALTS = 4096
"""The maximum number of indexes. Beyond it, the index that got no new answer for the longest time is dropped."""
SAMPLED_SEARCHES = 16
"""While draft tokens of a match length do not pay off, one search in this many looks for it. So its acceptance rate is
still learned, and unrelated answers cost little."""
INITIAL_RATE = 0.5
LEARNING_RATE = 0.05
END = -1
"""Follows each text in `_Generation.tokens`. No token id is equal to it."""

_TOKEN_BYTES = array("i").itemsize


class _Generation:
    """The tokens of several texts, one after another, and where each n-gram occurred last."""

    __slots__ = ("_first", "places", "tokens")

    def __init__(self) -> None:
        self.tokens = array("i")
        self.places: dict[int, int] = {}
        """Hash of an n-gram -> the index in `tokens` after its last occurrence. Two n-grams may have the same hash, so
        `AnswerIndex.find` compares the tokens."""
        self._first = 0
        """Index of the first token of the newest text."""

    def begin_text(self) -> None:
        self._first = len(self.tokens)

    def extend_text(self, piece: array[int], num_prompt_tokens: int) -> None:
        """Appends a piece of the newest text. No n-gram ends in the first `num_prompt_tokens` tokens of that text."""
        tokens, places, known, first = self.tokens, self.places, len(self.tokens), self._first
        tokens.extend(piece)
        base = max(first, known - LENGTHS[0])
        content = tokens[base:].tobytes()
        for length in LENGTHS:
            size = length * _TOKEN_BYTES
            for index in range(max(known, first + max(length, num_prompt_tokens)), len(tokens)):
                end = (index - base) * _TOKEN_BYTES
                places[crc32(content[end - size : end], length)] = index

    def end_text(self) -> None:
        self.tokens.append(END)


class AnswerRates(dict[int, float]):
    """The acceptance rate of draft tokens from finished answers, by the length of the match."""

    def __init__(self) -> None:
        super().__init__(dict.fromkeys((*LENGTHS, *RESUMED_LENGTHS), INITIAL_RATE))

    def learn(self, length: int, is_right: bool) -> None:
        self[length] += LEARNING_RATE * (is_right - self[length])


class AnswerIndex:
    """The answers of one cache salt, in generations. A generation has about an eighth of the tokens, so that little is
    lost when the oldest one is dropped."""

    __slots__ = ("_generations", "_num_searches", "rates")

    def __init__(self) -> None:
        self._generations: deque[_Generation] = deque()
        """The newest first."""
        self._num_searches = 0
        self.rates = AnswerRates()

    @property
    def num_tokens(self) -> int:
        return sum(len(generation.tokens) for generation in self._generations)

    def begin_text(self, least: int) -> None:
        """Begins a new text; in a new generation if the newest one has enough tokens, and at least `least`."""
        enough = max(least, self.num_tokens / GENERATIONS)
        if not self._generations or len(self._generations[0].tokens) >= enough:
            self._generations.appendleft(_Generation())
        self._generations[0].begin_text()

    def extend_text(self, piece: array[int], num_prompt_tokens: int) -> None:
        self._generations[0].extend_text(piece, num_prompt_tokens)

    def end_text(self) -> None:
        self._generations[0].end_text()

    def find(self, last: bytes, needed_rate: float = 0.0) -> tuple[int, array[int], int]:
        """Looks for the longest n-gram that ends `last`, the bytes of a sequence's last tokens. Returns its length, the
        text that has it, and the index after it in that text. Length 0: there is no match, or it was not looked for,
        because draft tokens with an acceptance rate below `needed_rate` do not pay off (see `SAMPLED_SEARCHES`)."""
        self._num_searches += 1
        is_sample = self._num_searches % SAMPLED_SEARCHES == 0
        for length in LENGTHS:
            size = length * _TOKEN_BYTES
            if len(last) < size or (self.rates[length] < needed_rate and not is_sample):
                continue
            ngram = last[-size:]
            key = crc32(ngram, length)
            for generation in self._generations:
                # No call here: each new token without a match does these look-ups, and most of them find nothing.
                if key in generation.places:
                    tokens, index = generation.tokens, generation.places[key]
                    if tokens[index - length : index].tobytes() == ngram and tokens[index] != END:
                        return length, tokens, index
        return 0, array("i"), -1

    def drop_oldest(self) -> None:
        """Drops the oldest generation."""
        self._generations.pop()


@dataclass(slots=True)
class _WaitingText:
    """An answer that is not indexed completely."""

    cache_salt: str
    tokens: array[int]
    num_prompt_tokens: int
    index: AnswerIndex | None = None
    """The index that has its first tokens. None: no token is indexed."""
    num_indexed: int = 0


class AnswerIndexes:
    """Owns the indexes of all cache salts, and keeps them within a number of bytes.

    Clients choose the salts, so the cost of an answer must not depend on the number of salts. Answers wait in a queue,
    and `advance` indexes a few of their tokens, so that a long answer does not delay a step.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._indexes: OrderedDict[str, AnswerIndex] = OrderedDict()
        """Cache salt -> its index. The index with the newest answer is last."""
        self._by_size: defaultdict[int, OrderedDict[str, None]] = defaultdict(OrderedDict)
        """Bit length of a number of tokens -> the salts of the indexes with such a number."""
        self._waiting: deque[_WaitingText] = deque()
        self.num_waiting = 0
        """Tokens of the texts that are not indexed completely."""
        self.num_tokens = 0
        """Tokens of all indexes."""
        self.num_texts = 0
        """Texts that were added since the start."""
        self.needed_rate = 0.0
        """The acceptance rate above which a draft token pays off, in a step like the last one."""

    @property
    def num_bytes(self) -> int:
        return len(self._indexes) * BYTES_PER_INDEX + self.num_tokens * BYTES_PER_TOKEN

    @property
    def max_text_tokens(self) -> int:
        """A longer text is cut: one answer takes at most half of the memory."""
        room = (self._max_bytes - BYTES_PER_INDEX) // (2 * BYTES_PER_TOKEN)
        return min(room, MAX_WAITING_TOKENS)

    def of(self, cache_salt: str) -> AnswerIndex | None:
        return self._indexes.get(cache_salt)

    def add(self, cache_salt: str, tokens: Sequence[int], num_prompt_tokens: int) -> None:
        """Queues the answer of a sequence with `tokens`, prompt included. Drops the answer if too many tokens wait."""
        first = max(0, num_prompt_tokens - PROMPT_TOKENS)
        if len(tokens) - num_prompt_tokens < LENGTHS[-1] or self._max_bytes < BYTES_PER_INDEX:
            return
        text = array("i", tokens[first : first + self.max_text_tokens])
        if len(text) <= MAX_WAITING_TOKENS - self.num_waiting:
            self._waiting.append(_WaitingText(cache_salt, text, num_prompt_tokens - first))
            self.num_waiting += len(text)
            self.num_texts += 1

    def advance(self, num_tokens: int) -> None:
        """Indexes the next `num_tokens` tokens of the answers that wait."""
        while num_tokens > 0 and self._waiting:
            text = self._waiting[0]
            piece = text.tokens[text.num_indexed : text.num_indexed + num_tokens]
            num_tokens -= max(1, len(piece))
            self._index(text, piece)
            if text.num_indexed == len(text.tokens):
                self.num_waiting -= len(text.tokens)
                del self._waiting[0]

    def _index(self, text: _WaitingText, piece: array[int]) -> None:
        """Adds the next piece of an answer to the index of its salt. Drops old answers if they take too much memory."""
        salt, is_new = text.cache_salt, text.index is None
        if is_new:
            text.index = self._indexes.setdefault(salt, AnswerIndex())
            self._indexes.move_to_end(salt)
        text.num_indexed += len(piece)
        if (index := self._indexes.get(salt)) is None or index is not text.index:
            return  # the index with its first tokens was dropped
        self._unlist(salt, index)
        if is_new:
            index.begin_text(self._max_bytes // (SMALLEST_GENERATION * BYTES_PER_TOKEN))
        index.extend_text(piece, text.num_prompt_tokens)
        if text.num_indexed == len(text.tokens):
            index.end_text()
        self._list(salt, index)
        if len(self._indexes) > MAX_SALTS:
            self._unlist(*self._indexes.popitem(last=False))
        while self.num_bytes > self._max_bytes:
            # One of the largest indexes loses texts, so that a salt with many answers does not remove those of the others.
            salt = next(iter(self._by_size[max(self._by_size)]))
            largest = self._indexes[salt]
            self._unlist(salt, largest)
            largest.drop_oldest()
            if largest.num_tokens:
                self._list(salt, largest)
            else:
                del self._indexes[salt]

    def check_integrity(self) -> None:
        sizes = {salt: index.num_tokens for salt, index in self._indexes.items()}
        assert self.num_tokens == sum(sizes.values()), "the tokens of answers are counted wrongly"
        listed = {salt: length for length, salts in self._by_size.items() for salt in salts}
        assert listed == {salt: size.bit_length() for salt, size in sizes.items()}, (
            "an index is listed with a wrong size"
        )
        assert self.num_bytes <= self._max_bytes, "the answers take more memory than allowed"
        assert len(sizes) <= MAX_SALTS, "there are more indexes of answers than allowed"
        waiting = sum(len(text.tokens) for text in self._waiting)
        assert self.num_waiting == waiting <= MAX_WAITING_TOKENS, "the waiting answers are counted wrongly"

    def _list(self, cache_salt: str, index: AnswerIndex) -> None:
        self._by_size[index.num_tokens.bit_length()][cache_salt] = None
        self.num_tokens += index.num_tokens

    def _unlist(self, cache_salt: str, index: AnswerIndex) -> None:
        """Removes an index from `_by_size` and `num_tokens`. Called before the index changes; `_list` adds it again."""
        length = index.num_tokens.bit_length()
        self._by_size[length].pop(cache_salt, None)
        if not self._by_size[length]:
            del self._by_size[length]
        self.num_tokens -= index.num_tokens
