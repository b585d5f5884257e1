"""The quality loss of quantised K and V: perplexity, and facts retrieved from long contexts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.kv_cache_kinds import Kind, Setup
from benchmarks.perplexity import Difference, Scores, compare, score
from weft.bench.serve_load import Text
from weft.errors import WeftError
from weft.request import InferenceRequest, SamplingParams

if TYPE_CHECKING:
    from weft.text.tokenizer import Tokenizer

COLOURS = ("blue", "red", "green", "black", "white", "yellow", "silver", "golden", "brown", "purple")
THINGS = ("box", "door", "safe", "chest", "locker", "room", "bag", "drawer", "gate", "cabin")
_ANSWER_TOKENS = 8
_CONCURRENT_FACTS = 8
"""Facts whose contexts run at the same time."""


# --- perplexity ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reading:
    """The perplexity with one kind of cache, and its difference from the full cache."""

    kind: str
    perplexity: float
    scored_tokens: int
    difference: Difference


def score_text(setup: Setup, kinds: Sequence[Kind], windows: Sequence[tuple[int, ...]]) -> list[Reading]:
    """Scores the second half of every window with each kind of cache. The first kind is the reference."""
    context = len(windows[0]) + 1
    scores: list[Scores] = []
    for kind in kinds:
        options = {} if setup.threads is None else {"threads": setup.threads}
        pool = kind.pool_for(len(windows), context)
        scores.append(score(setup.checkpoint, windows, kind.name, setup.device, pool, **options))
    return [Reading(one.name, one.perplexity, len(one.logprobs), compare(one, scores[0])) for one in scores]


# --- retrieval ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fact:
    """A long text that contains a code once and ends with a question for it."""

    prompt: tuple[int, ...]
    code: str
    depth: float
    """Position of the fact in the text: 0 is the beginning, 1 the end."""


@dataclass(frozen=True)
class Retrieval:
    """Facts found with one kind of cache."""

    kind: str
    asked: int
    found: int
    kept: int
    """Facts found with this cache and with the full one."""
    expected: int
    """Facts found with the full cache."""
    lost: tuple[str, ...]
    """The wrong answers to facts that the full cache finds, with their depth."""

    @property
    def share(self) -> float:
        return self.kept / self.expected if self.expected else 0.0


def make_facts(
    tokenizer: Tokenizer, count: int, lengths: tuple[int, int], tail_length: int, seed: int = 0
) -> list[Fact]:
    """Contexts with a length drawn uniformly from `lengths`.

    The fact is at a random depth, but before the last `tail_length` tokens, so that two-tier caches have quantised it.
    """

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_bos=False))

    source, text = random.Random(seed), Text(encode)
    first = list(tokenizer.encode(""))
    facts = []
    for _ in range(count):
        place = f"{source.choice(COLOURS)} {source.choice(THINGS)}"
        code = str(source.randint(10_000, 99_999))
        fact = encode(f"\n\nThe code of the {place} is {code}.\n\n")
        # The final space is included, so that the model only has to copy digits.
        question = encode(f"\n\nAs was said above, the code of the {place} is ")
        rest = source.randint(*lengths) - len(first) - len(fact) - len(question)
        filler = list(text.take(max(rest, 0)))
        at = source.randint(0, max(0, len(filler) - tail_length))
        prompt = (*first, *filler[:at], *fact, *filler[at:], *question)
        facts.append(Fact(prompt, code, at / max(1, len(filler))))
    return facts


def answer_facts(setup: Setup, kind: Kind, tokenizer: Tokenizer, facts: Sequence[Fact]) -> list[str]:
    """The greedy answers to all facts."""
    context = max(len(fact.prompt) for fact in facts) + _ANSWER_TOKENS
    params = SamplingParams(max_tokens=_ANSWER_TOKENS, temperature=0.0, ignore_eos=True)
    answers = []
    with setup.open(kind.pool_for(_CONCURRENT_FACTS, context), context, _CONCURRENT_FACTS) as engine:
        request_ids = [engine.submit(InferenceRequest(fact.prompt, params)) for fact in facts]
        engine.run_until_idle()
        for request_id in request_ids:
            result = engine.get_result(request_id)
            if result is None or result.error:
                raise WeftError(f"{kind.name}: a fact was not answered: {result and result.error}")
            answers.append(tokenizer.decode(result.tokens).strip())
    return answers


def evaluate(kind: Kind, facts: Sequence[Fact], answers: Sequence[str], full: Sequence[str]) -> Retrieval:
    """Compares `answers` with `full`, the answers of the full cache to the same facts."""
    found = [is_found(fact, answer) for fact, answer in zip(facts, answers, strict=True)]
    expected = [is_found(fact, answer) for fact, answer in zip(facts, full, strict=True)]
    kept = [
        is_found_here and is_found_in_full
        for is_found_here, is_found_in_full in zip(found, expected, strict=True)
    ]
    lost = tuple(
        f"{fact.code} at {fact.depth:.0%}: {answer!r}"
        for fact, answer, is_found_here, is_found_in_full in zip(facts, answers, found, expected, strict=True)
        if is_found_in_full and not is_found_here
    )
    return Retrieval(kind.name, len(facts), sum(found), sum(kept), sum(expected), lost)


def is_found(fact: Fact, answer: str) -> bool:
    """Whether the answer is the code, and not a longer number that begins with it."""
    return answer.startswith(fact.code) and not answer[len(fact.code) :][:1].isdigit()
