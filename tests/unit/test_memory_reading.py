"""Documents: how files become text, and texts become passages."""

from __future__ import annotations

import codecs
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdf_files import small_pdf
from weft.memory.documents import ChunkSize, Document, DocumentError
from weft.memory.reading import read_document
from weft.memory.splitting import refit, split, words_of

TEXTS = st.text(st.sampled_from("ab. \n\tä中#`-=xyz!"), max_size=600)
SIZES = st.integers(1, 40).flatmap(
    lambda most: st.builds(ChunkSize, st.just(most), st.integers(0, most // 2))
)


@settings(max_examples=300, deadline=None)
@given(TEXTS, SIZES, st.sampled_from(["a.txt", "a.md", "a.py", "a.html"]), st.integers(1, 3))
def test_passages_are_spans_of_the_text_that_cover_it_and_fit(
    text: str, size: ChunkSize, name: str, cost: int
) -> None:
    try:
        document = read_document(text.encode(), name)
    except DocumentError:
        return
    tokens = dict.fromkeys(words_of(document), cost)
    passages = split(document, size, tokens)
    covered = 0
    for passage in passages:
        assert document.text[passage.start : passage.end] == passage.text
        assert not document.text[covered : passage.start].strip(), "words between two passages were lost"
        assert passage.end > covered, "a passage repeats what others have"
        covered = passage.end
        num_words = len(passage.text.split())
        assert cost * num_words <= size.max_tokens or num_words == 1
    assert not document.text[covered:].strip()


@settings(max_examples=100, deadline=None)
@given(TEXTS, st.integers(2, 30))
def test_an_overlap_repeats_at_most_so_many_tokens(text: str, most: int) -> None:
    document = Document(text)
    passages = split(document, ChunkSize(most, most // 2), dict.fromkeys(words_of(document), 1))
    for before, after in itertools.pairwise(passages):
        assert len(document.text[after.start : before.end].split()) <= most // 2
        assert after.start > before.start


def test_passages_end_at_headings_and_paragraphs_rather_than_in_the_middle() -> None:
    text = "# One\n\n" + "word " * 30 + "\n\n# Two\n\n" + "other " * 30
    document = read_document(text.encode(), "a.md")
    first, second = split(document, ChunkSize(50, 10), dict.fromkeys(words_of(document), 1))
    assert first.heading == "One" and first.text.startswith("# One") and "other" not in first.text
    assert second.heading == "Two" and second.text.startswith("# Two")


def test_headings_have_their_path_and_code_blocks_have_none() -> None:
    text = "Title\n=====\n\n## Part ##\n```\n# no heading\n```\n### Deep\n## Next\n"
    marks = read_document(text.encode(), "a.md").headings
    assert [mark.label for mark in marks] == [
        "Title",
        "Title > Part",
        "Title > Part > Deep",
        "Title > Next",
    ]
    assert all(text[mark.start :].startswith(("Title", "##")) for mark in marks)


def test_definitions_are_the_headings_of_code_and_decorators_belong_to_them() -> None:
    text = "import a\n\n@cached\n@other\ndef f():\n    pass\n\nclass A:\n    def inner(self): ...\n"
    marks = read_document(text.encode(), "a.py").headings
    assert [mark.label for mark in marks] == ["def f():", "class A:"]
    assert text[marks[0].start :].startswith("@cached")


def test_html_becomes_paragraphs_without_scripts() -> None:
    source = (
        b"<!DOCTYPE html><title>T</title><style>s{}</style><body><h1>A <b>b</b></h1><p>one&amp;two<script>x</script>"
        b"<ul><li>x<li>y</ul><table><tr><td>1<td>2</table><pre>a\n  b</pre>"
    )
    document = read_document(source, "page")
    assert document.text == "T\n\nA b\n\none&two\n\nx\n\ny\n\n1 2\n\na\n  b"
    assert [mark.label for mark in document.headings] == ["A b"]
    assert all(document.text[mark.start :].startswith("A b") for mark in document.headings)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("<html><head><title>T</title><h1>Hi</h1><p>words", "T\n\nHi\n\nwords"),
        ("<head><meta charset=utf-8><title>T</title>words<script>x</script>", "T\n\nwords"),
        ("<head><style>s{}</style><title>T</title></head><svg><title>icon</title></svg>words", "T\n\nwords"),
        ("<p>one <![x]> two <![if !IE]>three<![endif]>", "one two three"),
        ("<p>one <![ two", "one <![ two"),
    ],
)
def test_html_may_leave_out_optional_tags_and_have_sections_that_are_no_html(source: str, text: str) -> None:
    assert read_document(f"<!DOCTYPE html>{source}".encode(), "a.html").text == text


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(["<", "!", "[", "]", ">", "/", "-", "?", "p", " ", "<![", "</", "CDATA["])))
def test_any_markup_is_read_or_refused_with_a_reason(parts: list[str]) -> None:
    try:
        assert read_document("".join(["<!DOCTYPE html>", *parts]).encode(), "a.html").text.strip()
    except DocumentError as error:
        assert str(error)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty"),
        (b"PK\x03\x04rest", "zip container"),
        (b"\x1f\x8b\x08rest", "gzip"),
        (b"\xff\xfea", "UTF-16"),
        (b"a\xe4b", "byte 1"),
        (b"a\0b", "zero byte"),
        (b"%PDF-1.4 nothing", "PDF"),
        (b"x" * ((16 << 20) + 1), "characters"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_text_is_refused_with_a_reason(content: bytes, reason: str) -> None:
    with pytest.raises(DocumentError, match=reason):
        read_document(content, "a.txt")


def test_texts_with_a_byte_order_mark_are_read() -> None:
    for mark, encoding in ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le")):
        assert read_document(mark + "Bär".encode(encoding), "a.txt").text == "Bär"


def test_a_pdf_has_pages_and_its_passages_name_them() -> None:
    pypdf = pytest.importorskip("pypdf")
    document = read_document(small_pdf(["first page", "second page"]), "a.pdf")
    assert document.text == "first page\n\nsecond page"
    assert [mark.label for mark in document.pages] == ["1", "2"]
    passages = split(document, ChunkSize(2, 0), dict.fromkeys(words_of(document), 1))
    assert [(one.text, one.page) for one in passages] == [("first page", 1), ("second page", 2)]
    assert pypdf


def test_a_size_is_cut_to_the_model_and_shrinks_after_a_passage_was_too_long() -> None:
    assert ChunkSize(800, 400).within(254) == ChunkSize(254, 127)
    assert ChunkSize(100, 20).within(254) == ChunkSize(100, 20)
    smaller = refit(ChunkSize(200, 100), 300, 250)
    assert smaller.max_tokens < 200 * 250 / 300 + 1 and smaller.overlap_tokens <= smaller.max_tokens // 2


def test_a_long_word_and_a_document_with_too_many_passages() -> None:
    document = Document("x" * 1000)
    passages = split(document, ChunkSize(2, 1), dict.fromkeys(words_of(document), 1))
    assert "".join(one.text for one in passages[::1])[:96] == "x" * 96 and passages[-1].end == 1000
    with pytest.raises(DocumentError, match="50000 passages"):
        split(Document("a " * 60_000), ChunkSize(1, 0), {"a": 1})
