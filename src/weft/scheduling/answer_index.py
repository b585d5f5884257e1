"""Finished answers, indexed by their n-grams: a source of draft tokens for later answers.

Each cache salt has an index of its own. So the speed of a request shows nothing of requests with other salts.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from zlib import crc32

LENGTHS = (12, 4)
"""Lengths of the indexed n-grams: a match has one of these lengths. The longest is tried first."""
PROMPT_TOKENS = 12
"""An answer is indexed after this many last tokens of its prompt. They let a prompt find the beginning of an answer."""
BYTES_PER_TOKEN = 224
"""Memory of an indexed token: the token, its position, and an entry with a key for each length. Measured."""
BYTES_PER_INDEX = 4096
"""Memory of an index without tokens, rounded up."""
MAX_SALTS = 4096
"""The maximum number of indexes. With more, the one without an answer for the longest time is dropped."""
INITIAL_RATE = 0.5
LEARNING_RATE = 0.05
END = -1
"""Stands after each text in `_Generation.tokens`. No token id is equal to it."""

_TOKEN_BYTES = array("i").itemsize


class _Generation:
    """The tokens of several texts, one after another, and where each n-gram occurred last."""

    __slots__ = ("places", "tokens")

    def __init__(self) -> None:
        self.tokens = array("i")
        self.places: dict[int, int] = {}
        """Hash of an n-gram -> the index in `tokens` after its last occurrence. Two n-grams may have the same hash, so
        `find` compares the tokens."""

    def add(self, text: Sequence[int], num_prompt_tokens: int) -> None:
        tokens, places, first = self.tokens, self.places, len(self.tokens)
        tokens.extend(text)
        tokens.append(END)
        content = tokens[first:].tobytes()
        for length in LENGTHS:
            size = length * _TOKEN_BYTES
            for index in range(max(length, num_prompt_tokens), len(text)):
                end = index * _TOKEN_BYTES
                places[crc32(content[end - size : end], length)] = first + index

    def find(self, last: bytes, length: int) -> int:
        """The index after the last occurrence of these tokens, or -1."""
        index = self.places.get(crc32(last, length), -1)
        return index if index >= 0 and self.tokens[index - length : index].tobytes() == last else -1


class AnswerIndex:
    """The answers of one cache salt: those of two generations. A full index drops the older one."""

    __slots__ = ("_older", "_younger", "rates")

    def __init__(self) -> None:
        self._younger, self._older = _Generation(), _Generation()
        self.rates = dict.fromkeys(LENGTHS, INITIAL_RATE)
        """How often the next token of a match was right, by the length that was found."""

    @property
    def num_tokens(self) -> int:
        return len(self._younger.tokens) + len(self._older.tokens)

    def add(self, text: Sequence[int], num_prompt_tokens: int) -> None:
        self._younger.add(text, num_prompt_tokens)

    def find(self, last: bytes) -> tuple[int, array[int], int]:
        """Looks for the end of `last`, the bytes of tokens. Returns the length of the match, the text that has it, and
        the index after it in that text. Length 0: there is none."""
        for length in LENGTHS:
            size = length * _TOKEN_BYTES
            if len(last) < size:
                continue
            for generation in (self._younger, self._older):
                index = generation.find(last[-size:], length)
                if index >= 0 and generation.tokens[index] != END:
                    return length, generation.tokens, index
        return 0, self._younger.tokens, -1

    def learn(self, length: int, is_right: bool) -> None:
        self.rates[length] += LEARNING_RATE * (is_right - self.rates[length])

    def age(self) -> None:
        """Drops the older generation and begins a new one."""
        self._younger, self._older = _Generation(), self._younger


class AnswerIndexes:
    """Owns the indexes of all cache salts, and keeps them within a number of bytes.

    Clients choose the salts. So the cost of an answer does not depend on how many there are.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._indexes: OrderedDict[str, AnswerIndex] = OrderedDict()
        """By cache salt; the one with the newest answer last."""
        self._by_size: defaultdict[int, OrderedDict[str, None]] = defaultdict(OrderedDict)
        """The salts, by the bit length of their number of tokens."""
        self.num_tokens = 0
        """Tokens of all indexes."""
        self.num_texts = 0
        """Texts that were added since the start."""

    @property
    def num_bytes(self) -> int:
        return len(self._indexes) * BYTES_PER_INDEX + self.num_tokens * BYTES_PER_TOKEN

    def of(self, cache_salt: str) -> AnswerIndex | None:
        return self._indexes.get(cache_salt)

    def add(self, cache_salt: str, tokens: Sequence[int], num_prompt_tokens: int) -> None:
        """Adds the answer of a sequence that has these tokens."""
        first = max(0, num_prompt_tokens - PROMPT_TOKENS)
        text = tokens[first:]
        if len(text) - (num_prompt_tokens - first) < LENGTHS[-1] or self._max_bytes < BYTES_PER_INDEX:
            return
        text = text[: (self._max_bytes - BYTES_PER_INDEX) // (2 * BYTES_PER_TOKEN)]
        index = self._indexes.setdefault(cache_salt, AnswerIndex())
        self._indexes.move_to_end(cache_salt)
        self._unlist(cache_salt, index)
        index.add(text, num_prompt_tokens - first)
        self._list(cache_salt, index)
        self.num_texts += 1
        if len(self._indexes) > MAX_SALTS:
            self._unlist(*self._indexes.popitem(last=False))
        while self.num_bytes > self._max_bytes:
            # One of the largest indexes loses texts, so that a salt with many answers does not remove those of the others.
            salt = next(iter(self._by_size[max(self._by_size)]))
            largest = self._indexes[salt]
            self._unlist(salt, largest)
            largest.age()
            if largest.num_tokens:
                self._list(salt, largest)
                # First in its list: if its older generation was empty, it has lost nothing yet and must be chosen again.
                # Otherwise the loop could come to all other indexes before any text is dropped.
                self._by_size[largest.num_tokens.bit_length()].move_to_end(salt, last=False)
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

    def _list(self, cache_salt: str, index: AnswerIndex) -> None:
        self._by_size[index.num_tokens.bit_length()][cache_salt] = None
        self.num_tokens += index.num_tokens

    def _unlist(self, cache_salt: str, index: AnswerIndex) -> None:
        """Called before an index changes."""
        length = index.num_tokens.bit_length()
        self._by_size[length].pop(cache_salt, None)
        if not self._by_size[length]:
            del self._by_size[length]
        self.num_tokens -= index.num_tokens
