"""What quantised K and V cost in quality: the perplexity of text, and facts read back out of long contexts."""

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
_TOGETHER = 8
"""Contexts of facts that run at the same time."""


# --- perplexity ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reading:
    """The perplexity of text with one kind of cache, beside that of the full one."""

    kind: str
    perplexity: float
    scored_tokens: int
    difference: Difference


def read_text(setup: Setup, kinds: Sequence[Kind], windows: Sequence[tuple[int, ...]]) -> list[Reading]:
    """The second half of every window is scored; the first kind is what the others are compared with."""
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
    """A code that stands once in a long text, and the question for it at the end."""

    prompt: tuple[int, ...]
    code: str
    depth: float
    """Of the fact in the text: 0 at its beginning, 1 at its end."""


@dataclass(frozen=True)
class Retrieval:
    """How many facts were found with one kind of cache."""

    kind: str
    asked: int
    found: int
    kept: int
    """Found, of those that the full cache finds."""
    expected: int
    """Those."""
    lost: tuple[str, ...]
    """What was answered instead, with the depth."""

    @property
    def share(self) -> float:
        return self.kept / self.expected if self.expected else 0.0


def make_facts(
    tokenizer: Tokenizer, count: int, lengths: tuple[int, int], tail_length: int, seed: int = 0
) -> list[Fact]:
    """Contexts of `lengths` tokens, drawn evenly; the fact is at any depth before the tail of the question, so that every
    kind of cache has quantised it by then if it ever does."""

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_bos=False))

    source, text = random.Random(seed), Text(encode)
    first = list(tokenizer.encode(""))
    facts = []
    for _ in range(count):
        place = f"{source.choice(COLOURS)} {source.choice(THINGS)}"
        code = str(source.randint(10_000, 99_999))
        fact = encode(f"\n\nThe code of the {place} is {code}.\n\n")
        # The space is part of it: what remains is to copy digits, not to guess that digits are wanted.
        question = encode(f"\n\nAs was said above, the code of the {place} is ")
        rest = source.randint(*lengths) - len(first) - len(fact) - len(question)
        filler = list(text.take(max(rest, 0)))
        at = source.randint(0, max(0, len(filler) - tail_length))
        prompt = (*first, *filler[:at], *fact, *filler[at:], *question)
        facts.append(Fact(prompt, code, at / max(1, len(filler))))
    return facts


def ask(setup: Setup, kind: Kind, tokenizer: Tokenizer, facts: Sequence[Fact]) -> list[str]:
    """The answers, the likeliest tokens each."""
    context = max(len(fact.prompt) for fact in facts) + _ANSWER_TOKENS
    params = SamplingParams(max_tokens=_ANSWER_TOKENS, temperature=0.0, ignore_eos=True)
    answers = []
    with setup.open(kind.pool_for(_TOGETHER, context), context, _TOGETHER) as engine:
        asked = [engine.submit(InferenceRequest(fact.prompt, params)) for fact in facts]
        engine.run_until_idle()
        for request_id in asked:
            result = engine.get_result(request_id)
            if result is None or result.error:
                raise WeftError(f"{kind.name}: a question was not answered: {result and result.error}")
            answers.append(tokenizer.decode(result.tokens).strip())
    return answers


def judge(kind: Kind, facts: Sequence[Fact], answers: Sequence[str], full: Sequence[str]) -> Retrieval:
    """`full` are the answers of the full cache to the same questions."""
    found = [is_found(fact, answer) for fact, answer in zip(facts, answers, strict=True)]
    expected = [is_found(fact, answer) for fact, answer in zip(facts, full, strict=True)]
    kept = [mine and theirs for mine, theirs in zip(found, expected, strict=True)]
    lost = tuple(
        f"{fact.code} at {fact.depth:.0%}: {answer!r}"
        for fact, answer, mine, theirs in zip(facts, answers, found, expected, strict=True)
        if theirs and not mine
    )
    return Retrieval(kind.name, len(facts), sum(found), sum(kept), sum(expected), lost)


def is_found(fact: Fact, answer: str) -> bool:
    """The code, and not the beginning of a longer one."""
    return answer.startswith(fact.code) and not answer[len(fact.code) :][:1].isdigit()
