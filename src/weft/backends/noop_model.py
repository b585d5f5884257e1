"""The model that the noop backend simulates: tokens are hashes of the cells of their context.

A cell is what a model would keep of a position in its KV cache. With one tier, a position has one cell: the position and
its token. With two tiers, every position has a cell in each of two layers. A cell that moved to the store is marked as
quantised.

    lower cell of p   (position, token)
    upper cell of p   hash of all lower cells that p reads
    next token        hash of all upper cells that its position reads

`generate_alone` and `score_alone` compute the same without a backend: what a request gets when it runs alone.

`FORCING` is the only grammar that constrains tokens. It forces two tokens out of three (`ToyGrammar`).
"""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from copy import copy
from itertools import pairwise

from weft.plan import BackendInfo
from weft.request import Grammar, SamplingParams, TokenLogprobs

FORCING = Grammar("regex", "forcing")
MAX_FORCED = 8


class ToyGrammar:
    """A grammar whose state is a hash of all tokens that it has consumed. So a wrong token changes all later masks."""

    def __init__(self, info: BackendInfo, generated: Sequence[int] = ()) -> None:
        self._info = info
        self._state = 0
        for token in generated:
            self.consume(token)

    @classmethod
    def of(
        cls, params: SamplingParams, info: BackendInfo, generated: Sequence[int] = ()
    ) -> ToyGrammar | None:
        return cls(info, generated) if params.grammar == FORCING else None

    def consume(self, token: int) -> None:
        self._state = hash((self._state, token))

    def allows(self, token: int) -> bool:
        forced = self._forced()
        return forced is None or forced == token

    def forced(self) -> tuple[int, ...]:
        """The next tokens, as far as each is the only one that is allowed."""
        tokens: list[int] = []
        later = self.copy()
        while len(tokens) < MAX_FORCED and (token := later._forced()) is not None:
            tokens.append(token)
            later.consume(token)
        return tuple(tokens)

    def copy(self) -> ToyGrammar:
        return copy(self)

    def _forced(self) -> int | None:
        if self._state % 3 == 0:
            return None
        token = self._state // 3 % self._info.vocabulary_size
        while token in self._info.eos_token_ids:
            token = (token + 1) % self._info.vocabulary_size
        return token


def next_token(
    cells: Sequence[int],
    seed: int,
    output_index: int,
    params: SamplingParams,
    info: BackendInfo,
    grammar: ToyGrammar | None = None,
) -> int:
    """The token after a context: a hash of all its cells, the seed and the output index."""
    token = hash((seed, output_index, *cells)) % info.vocabulary_size
    if output_index < params.min_tokens and not params.ignore_eos:
        while token in info.eos_token_ids:
            token = (token + 1) % info.vocabulary_size
    while grammar is not None and not grammar.allows(token):
        token = (token + 1) % info.vocabulary_size
    return token


def logprobs_of(token: int, cells: Sequence[int], num_top: int, info: BackendInfo) -> TokenLogprobs:
    """Simulated logprobs of a token after a context: another hash of all cells, so that an error changes them."""
    value = hash(("logprob", *cells)) % 100_003
    top = tuple(((value + rank) % info.vocabulary_size, -rank / 8) for rank in range(num_top))
    return TokenLogprobs(-(value ^ token) / 100_003, top)


def vector_of(cells: Sequence[int], size: int) -> bytes:
    """The simulated vector of a prompt: numbers from -1 to 1 that depend on all its cells."""
    numbers = random.Random(hash(tuple(cells)))
    return struct.pack(f"<{size}f", *(numbers.uniform(-1.0, 1.0) for _ in range(size)))


def score_alone(tokens: Sequence[int], first: int, num_top: int, info: BackendInfo) -> list[TokenLogprobs]:
    """The logprobs of tokens[first:] that a request gets when it runs alone."""
    alone = _Alone(tokens, info)
    return [logprobs_of(tokens[p], alone.context(p), num_top, info) for p in range(first, len(tokens))]


def generate_alone(
    prompt: Sequence[int], seed: int, params: SamplingParams, limit: int, info: BackendInfo
) -> list[int]:
    """The tokens that a request gets when it runs alone: the same arithmetic on a plain list, without blocks."""
    tokens = list(prompt)
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else info.eos_token_ids)
    alone, grammar = _Alone(tokens, info), ToyGrammar.of(params, info)
    while len(tokens) < limit:
        index = len(tokens) - len(prompt)
        token = next_token(alone.context(len(tokens)), seed, index, params, info, grammar)
        if grammar is not None:
            grammar.consume(token)
        alone.append(token)
        tokens.append(token)
        if token in stops and index + 1 >= params.min_tokens:
            break
    return tokens[len(prompt) :]


def cell_of(position: int, token: int) -> int:
    return position << 32 | token


def quantised(cell: int) -> int:
    """The content of a cell after a move to the store. Moving it twice gives another value."""
    return hash((cell, 2))


def num_quantised(position: int, info: BackendInfo) -> int:
    """How many cells the query at `position` reads from the store: all blocks that end before its tail."""
    if not info.tail_blocks:
        return 0
    before_tail = position + 1 - info.tail_blocks * info.block_size
    return max(0, before_tail - before_tail % info.block_size)


class _Alone:
    """The cells of one sequence that runs alone, in plain lists: no blocks, no tables, no moves."""

    def __init__(self, tokens: Sequence[int], info: BackendInfo) -> None:
        self._info = info
        self._layers: list[list[int]] = [[]] if not info.tail_blocks else [[], []]
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        position = len(self._layers[0])
        self._layers[0].append(cell_of(position, token))
        for lower, upper in pairwise(self._layers):
            upper.append(hash(tuple(self._read(lower, position + 1))))

    def context(self, length: int) -> list[int]:
        return self._read(self._layers[-1], length)

    def _read(self, cells: list[int], length: int) -> list[int]:
        """The cells that the query at position `length` - 1 reads."""
        num_stored = num_quantised(length - 1, self._info)
        return [*map(quantised, cells[:num_stored]), *cells[num_stored:length]]
