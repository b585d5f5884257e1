"""Filters, the join of rankings, citations, and the vector index against an exact search."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import InvalidRequestError
from weft.memory.filters import parsed_filter
from weft.memory.index_file import DamagedIndexError, open_graph, write_graph
from weft.memory.prompting import Source, citations, question_with_passages
from weft.memory.ranking import fused, words_query
from weft.memory.vector_index import MAX_EXACT, VectorIndex, base_of, merged

VALUES = st.one_of(st.booleans(), st.integers(-3, 3), st.sampled_from(["", "a", "b", "1"]))
ATTRIBUTES = st.dictionaries(st.sampled_from("xyz"), VALUES, max_size=3)


def compared(kind: str, key: str, value: Any) -> dict[str, Any]:
    return {"type": kind, "key": key, "value": value}


@given(ATTRIBUTES, st.sampled_from("xyz"), VALUES)
def test_a_comparison_and_its_opposite_never_agree(attributes: dict[str, Any], key: str, value: Any) -> None:
    for kind, opposite in (("eq", "ne"), ("in", "nin")):
        given_value = [value] if kind == "in" else value
        passes = parsed_filter(compared(kind, key, given_value))(attributes)
        assert passes != parsed_filter(compared(opposite, key, given_value))(attributes)
        same = key in attributes and attributes[key] == value
        same = same and isinstance(attributes[key], bool) == isinstance(value, bool)
        assert passes == same


@given(ATTRIBUTES, st.sampled_from("xyz"), st.integers(-3, 3))
def test_an_order_holds_only_between_numbers(attributes: dict[str, Any], key: str, value: int) -> None:
    found = attributes.get(key)
    is_number = isinstance(found, int) and not isinstance(found, bool)
    results = {
        kind: parsed_filter(compared(kind, key, value))(attributes) for kind in ("gt", "gte", "lt", "lte")
    }
    assert results == {
        "gt": is_number and found > value,  # type: ignore[operator]
        "gte": is_number and found >= value,  # type: ignore[operator]
        "lt": is_number and found < value,  # type: ignore[operator]
        "lte": is_number and found <= value,  # type: ignore[operator]
    }


def test_compounds_join_their_parts() -> None:
    parts = [compared("gte", "year", 2020), compared("eq", "tag", "a")]
    both = parsed_filter({"type": "and", "filters": parts})
    either = parsed_filter({"type": "or", "filters": [*parts, {"type": "and", "filters": parts}]})
    cases: list[tuple[dict[str, Any], bool, bool]] = [
        ({"year": 2021, "tag": "a"}, True, True),
        ({"year": 2021, "tag": "b"}, False, True),
        ({"year": 2019}, False, False),
    ]
    for attributes, all_pass, any_passes in cases:
        assert both(attributes) == all_pass and either(attributes) == any_passes


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        {},
        {"type": "and"},
        {"type": "and", "filters": [{}]},
        compared("gt", "a", True),
        compared("in", "a", "b"),
    ],
)
def test_a_wrong_filter_names_its_place(wrong: Any) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        parsed_filter(wrong, "filters")
    assert raised.value.field is not None and raised.value.field.startswith("filters")


@given(st.lists(st.integers(0, 20), unique=True), st.lists(st.integers(0, 20), unique=True))
def test_the_join_has_each_passage_once_and_rewards_both_rankings(
    vectors: list[int], words: list[int]
) -> None:
    joined = fused(vectors, words)
    assert sorted(one for one, _ in joined) == sorted({*vectors, *words})
    scores = [score for _, score in joined]
    assert scores == sorted(scores, reverse=True) and all(0 < score <= 1 for score in scores)
    places = dict(joined)
    for first, second in itertools.pairwise(vectors):
        if first not in words and second not in words:
            assert places[first] > places[second]
    if vectors and words and vectors[0] == words[0]:
        assert joined[0] == (vectors[0], 1.0)


def test_a_weight_of_zero_leaves_a_ranking_out() -> None:
    assert [one for one, _ in fused([1, 2], [3], words_weight=0.0)] == [1, 2]
    assert fused([1], [2], vector_weight=0.0) == [(2, 1.0)]


def test_a_query_has_its_telling_words_quoted() -> None:
    assert words_query('What is "the" KV-cache? NOT') == '"kv" OR "cache"'
    assert words_query("what is it") == '"what" OR "is" OR "it"'
    assert words_query(' ?!"*^ ') is None


SOURCES = [
    Source("file-a", "a.md", 0.9, "A text.", "Install > Linux", 3),
    Source("file-b", "b.txt", 0.5, "B text."),
]


def test_passages_are_numbered_before_the_question() -> None:
    text = question_with_passages("Why?", SOURCES)
    assert "[1] a.md, Install > Linux, page 3:\nA text." in text and "[2] b.txt:\nB text." in text
    assert text.endswith("Question: Why?") and question_with_passages("Why?", []) == "Why?"


def test_citations_are_the_numbers_in_the_answer_or_else_the_best_passage() -> None:
    found = citations("One [2]. Two [1, 2] and [7] [x].", SOURCES)
    assert [(one.source.file_id, one.offset) for one in found] == [
        ("file-b", 4),
        ("file-a", 13),
        ("file-b", 13),
    ]
    assert [(one.source.file_id, one.offset) for one in citations("No number.", SOURCES)] == [("file-a", 10)]
    assert citations("", SOURCES) == [] and citations("text", []) == []


# ---------------------------------------------------------------------- the index


def unit_vectors(count: int, dimensions: int = 24, seed: int = 1) -> np.ndarray:
    """Vectors around some centres, as those of texts are."""
    numbers = np.random.default_rng(seed)
    centres = numbers.standard_normal((64, dimensions))
    found = centres[numbers.integers(0, 64, count)] + 0.5 * numbers.standard_normal((count, dimensions))
    stored = (found / np.linalg.norm(found, axis=1, keepdims=True)).astype(np.float16)
    return stored.astype(np.float32)


def added(index: VectorIndex, ids: np.ndarray, files: np.ndarray, vectors: np.ndarray) -> VectorIndex:
    return index.changed([], ids, files, ids, vectors)


def exact(ids: np.ndarray, vectors: np.ndarray, query: np.ndarray, count: int) -> list[int]:
    scores = vectors @ query
    return [int(ids[one]) for one in np.lexsort((ids, -scores))[:count]]


@given(st.integers(0, 10**6), st.integers(1, 12))
def test_a_small_index_is_exact_through_all_changes(seed: int, num_changes: int) -> None:
    numbers = np.random.default_rng(seed)
    index, rows, next_id = VectorIndex.empty(24), {}, 1
    for step in range(num_changes):
        vectors = unit_vectors(int(numbers.integers(1, 20)), seed=seed + step)
        ids = np.arange(next_id, next_id + len(vectors))
        next_id += len(vectors)
        index = added(index, ids, np.full(len(ids), step), vectors)
        rows |= {int(one): (step, vector) for one, vector in zip(ids, vectors, strict=True)}
        if numbers.random() < 0.3:
            gone = int(numbers.integers(0, step + 1))
            none = np.zeros(0, np.int64)
            index = index.changed([gone], none, none, none, np.zeros((0, 24), np.float32))
            rows = {one: row for one, row in rows.items() if row[0] != gone}
    query = unit_vectors(1, seed=seed + 99)[0]
    chosen = np.array([0, 2, 4])
    for files in (None, chosen):
        left = {one: row for one, row in rows.items() if files is None or row[0] in (0, 2, 4)}
        expected = sorted(left, key=lambda one: (-float(left[one][1] @ query), one))[:7]
        found = index.search(query, 7, files)
        assert len(found) == len(expected)
        scores = [float(left[one][1] @ query) for one in expected]
        assert np.allclose([score for _, score in found], scores, atol=1e-5)


@pytest.fixture(scope="module")
def large() -> tuple[VectorIndex, np.ndarray, Any]:
    """An index with a base of 12,000 passages in 12 files, a delta, and two removed files."""
    pytest.importorskip("usearch")
    vectors = unit_vectors(13_000)
    ids = np.arange(1, 13_001)
    files = ids % 13
    index = added(VectorIndex.empty(24), ids[:12_000], files[:12_000], vectors[:12_000])
    assert index.must_merge
    graph = merged(index, 2)
    index = index.with_base(base_of(graph))
    assert len(index.delta_ids) == 0 and not index.must_merge
    index = added(index, ids[12_000:], files[12_000:], vectors[12_000:])
    none = np.zeros(0, np.int64)
    index = index.changed([3, 7], none, none, none, np.zeros((0, 24), np.float32))
    return index, vectors, graph


def test_a_large_index_finds_nearly_all_nearest_passages_and_no_removed_one(
    large: tuple[VectorIndex, np.ndarray, Any],
) -> None:
    index, vectors, _ = large
    alive = np.arange(1, 13_001)[~np.isin(np.arange(1, 13_001) % 13, [3, 7])]
    num_found = 0
    queries = unit_vectors(50, seed=5)
    for query in queries:
        found = [one for one, _ in index.search(query, 10)]
        assert len(found) == 10 and not any(one % 13 in (3, 7) for one in found)
        num_found += len({*found} & {*exact(alive, vectors[alive - 1], query, 10)})
    assert num_found >= 0.95 * 10 * len(queries)


def test_a_filter_that_leaves_few_passages_is_exact_and_one_that_leaves_many_is_full(
    large: tuple[VectorIndex, np.ndarray, Any],
) -> None:
    index, vectors, _ = large
    every = np.arange(1, 13_001)
    for files in ([0, 3], [1, 2, 4, 5, 6, 8, 9, 10, 11, 12]):
        left = every[np.isin(every % 13, [one for one in files if one != 3])]
        for query in unit_vectors(10, seed=9):
            found = [one for one, _ in index.search(query, 10, np.array(files))]
            assert len(found) == 10 and {*found} <= {*left.tolist()}
            if len(left) < MAX_EXACT:
                assert found == exact(left, vectors[left - 1], query, 10)


def test_a_merge_keeps_what_is_visible_and_drops_the_rest(large: tuple[VectorIndex, np.ndarray, Any]) -> None:
    index, _, graph = large
    base = base_of(merged(index, 1, graph.copy()))
    assert base.ids.tolist() == index.ids.tolist()
    assert len(index.with_base(base).delta_ids) == 0


def test_an_index_file_is_named_by_its_content_and_damage_is_noticed(
    large: tuple[VectorIndex, np.ndarray, Any], tmp_path: Path
) -> None:
    graph = large[2]
    name = write_graph(graph, tmp_path, "vs_1")
    assert [each.name for each in tmp_path.iterdir()] == [name]
    assert len(base_of(open_graph(tmp_path, name)).ids) == 12_000
    content = bytearray((tmp_path / name).read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DamagedIndexError):
        open_graph(tmp_path, name)
    with pytest.raises(FileNotFoundError):
        open_graph(tmp_path, "vs_1-other")
