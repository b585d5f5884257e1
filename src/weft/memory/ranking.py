"""The words of a query, and the join of the ranking by vectors with the ranking by words."""

from __future__ import annotations

import re
from collections.abc import Sequence

_CONSTANT = 60
"""The constant k of reciprocal rank fusion. Cormack, Clarke and Buettcher (2009) found 60 good for many collections."""
_MAX_WORDS = 64
_WORD = re.compile(r"\w+")
_COMMON = frozenset(
    "a about an and are as at be been but by can could did do does for from had has have how i if in into is it its me my "  # noqa: SIM905
    "no not of on or our should so than that the their them then there these they this to was we were what when where "
    "which who why will with would you your".split()
)
"""English words that are in most passages. They do not tell passages apart, and the index has the longest lists for them."""


def words_query(text: str) -> str | None:
    """The FTS5 query for the passages that have a word of `text`. None: the text has no word. Words are quoted, so that
    none of them is an operator of FTS5."""
    words = list(dict.fromkeys(word.lower() for word in _WORD.findall(text)))
    telling = [word for word in words if word not in _COMMON] or words
    return " OR ".join(f'"{word}"' for word in telling[:_MAX_WORDS]) or None


def fused(
    by_vector: Sequence[int], by_words: Sequence[int], vector_weight: float = 1.0, words_weight: float = 1.0
) -> list[tuple[int, float]]:
    """Joins two rankings of passage ids, best first. The score is 1 for a passage that is first in both, and falls with
    the ranks (reciprocal rank fusion, divided by its largest value)."""
    scores: dict[int, float] = {}
    for ids, weight in ((by_vector, vector_weight), (by_words, words_weight)):
        if weight:
            for rank, passage_id in enumerate(ids):
                scores[passage_id] = scores.get(passage_id, 0.0) + weight / (_CONSTANT + 1 + rank)
    best = (vector_weight + words_weight) / (_CONSTANT + 1)
    return sorted(((one, score / best) for one, score in scores.items()), key=lambda one: (-one[1], one[0]))
