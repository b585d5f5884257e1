"""Decoders of tokenizer.json without a fast path in weft: whole texts and streams decode as in transformers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from weft.errors import InvalidRequestError
from weft.request import Grammar
from weft.text import detokenizer
from weft.text.detokenizer import Detokenizer
from weft.text.folder_tokenizer import read_folder_tokenizer
from weft.text.grammar import GrammarCompiler

PIECES = [
    *(
        "the",
        "quick",
        "##ly",
        "##ing",
        "fox",
        "n't",
        "'s",
        ".",
        ",",
        "!",
        "do",
        " not",
        "世",
        "界",
        "é",
        "🦊",
    ),
    *(
        "▁the",
        "▁fox",
        "▁",
        "▁▁",
        "_a",
        "b_",
        "_",
        "low</w>",
        "er</w>",
        "new",
        "a",
        "b",
        " ",
        "  ",
        "a ",
        " b",
    ),
    *("Ġthe", "Ġ", "Ċ", "ä¸ĸ", "ä¸", "ĸ", "çķ", "Į", "ðŁ", "¦", "Ĭ", "ł", "[PAD]", "|", "aa"),
]
BYTES = [f"<0x{byte:02X}>" for byte in "世🦊é".encode()] + ["<0x41>", "<0xFF>"]
CONTROL = ["<s>", "</s>"]

SPACES = decoders.Replace(Regex(" +"), " ")
DECODERS: dict[str, Any] = {
    "none": None,
    "wordpiece": decoders.WordPiece(),
    "wordpiece as written": decoders.WordPiece(cleanup=False),
    "suffixes": decoders.BPEDecoder(),
    "ctc": decoders.CTC(pad_token="[PAD]", word_delimiter_token="|"),
    "metaspace of its own": decoders.Metaspace(replacement="_"),
    "bytes and strip": decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]),
    "replace and bytes": decoders.Sequence(
        [decoders.Replace("_", " "), decoders.ByteFallback(), decoders.Fuse()]
    ),
    "only bytes": decoders.ByteFallback(),
    "joined": decoders.Fuse(),
    "strip at the end": decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
    "runs of spaces": decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), SPACES]),
}


def write_tokenizer(folder: Path, decoder: Any) -> Path:
    tokens = [*PIECES, *BYTES]
    backend = Tokenizer(
        models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="the")
    )
    backend.add_special_tokens(CONTROL)
    if decoder is not None:
        backend.decoder = decoder
    backend.save(str(folder / "tokenizer.json"))
    return folder


def reference(folder: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), clean_up_tokenization_spaces=False
    )


def sequences(num_tokens: int) -> Iterator[list[int]]:
    dice = random.Random(18)
    for _ in range(150):
        length = dice.choice([1, 2, 3, 5, 20, 200])
        # Chosen from few tokens, so that a token often follows itself.
        some = [dice.randrange(num_tokens) for _ in range(dice.choice([3, 10, 60]))]
        yield [dice.choice(some) for _ in range(length)]


@pytest.mark.parametrize("name", DECODERS)
def test_18_texts_and_streams_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    folder = write_tokenizer(tmp_path, DECODERS[name])
    tokenizer, theirs = read_folder_tokenizer(folder), reference(folder)
    for ids in sequences(tokenizer.vocabulary_size):
        is_empty = tokenizer.control_ids.issuperset(ids)  # some decoders panic on an empty list
        expected = "" if is_empty else theirs.decode(ids, skip_special_tokens=True)
        assert tokenizer.decode(ids) == expected
        assert tokenizer.decode(ids, skip_control=False) == theirs.decode(ids, skip_special_tokens=False)
        one_by_one, in_pieces = Detokenizer(tokenizer), Detokenizer(tokenizer)
        assert "".join(map(one_by_one.add, ids)) + one_by_one.finish() == expected
        dice, text, start = random.Random(len(ids)), "", 0
        while start < len(ids):
            count = dice.randrange(8)
            text += in_pieces.add_all(ids[start : start + count])
            start += count
        assert text + in_pieces.finish() == expected


@pytest.mark.parametrize("name", DECODERS)
def test_18_text_is_returned_as_soon_as_later_tokens_cannot_change_it(tmp_path: Path, name: str) -> None:
    tokenizer = read_folder_tokenizer(write_tokenizer(tmp_path, DECODERS[name]))
    detokenizer, held = Detokenizer(tokenizer), 0
    for token in [PIECES.index(piece) for piece in ("the", "quick", "fox", "new", ".")] * 20:
        held = 0 if detokenizer.add(token) else held + 1
        assert held == 0
    [first, second, third] = [tokenizer._backend.token_to_id(f"<0x{byte:02X}>") for byte in "世".encode()]
    shown = [detokenizer.add(token) for token in (first, second, third, PIECES.index("the"))]
    assert not any("\ufffd" in one for one in shown)


def test_18_the_cost_of_a_token_does_not_grow_with_the_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, decoder in DECODERS.items():
        tokenizer = read_folder_tokenizer(write_tokenizer(tmp_path, decoder))
        decoded: list[int] = []
        plain = tokenizer.decode

        def decode(ids: Any, **options: Any) -> str:
            decoded.append(len(ids))  # noqa: B023
            return plain(ids, **options)  # noqa: B023

        monkeypatch.setattr(tokenizer, "decode", decode)
        stream = Detokenizer(tokenizer)
        dice = random.Random(7)
        for _ in range(2000):
            stream.add(dice.randrange(tokenizer.vocabulary_size))
        assert max(decoded) <= detokenizer._MOST_TOKENS + 1, name
        assert sum(decoded) / 2000 <= 2 * detokenizer._MOST_TOKENS, name


def test_18_a_grammar_which_needs_the_bytes_of_each_token_is_rejected(tmp_path: Path) -> None:
    tokenizer = read_folder_tokenizer(write_tokenizer(tmp_path, DECODERS["wordpiece"]))
    compiler = GrammarCompiler(lambda: tokenizer, [tokenizer.vocabulary_size - 1], tokenizer.vocabulary_size)
    with pytest.raises(InvalidRequestError, match="weft cannot apply a grammar") as rejected:
        compiler.compile(Grammar("regex", "a+"))
    assert rejected.value.field == "grammar"


@pytest.mark.parametrize(
    ("decoder", "is_concatenative"),
    [
        (decoders.ByteLevel(), True),
        (decoders.Metaspace(), True),
        (decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]), True),
        (decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]), True),
        (decoders.Sequence([decoders.Replace("_", " "), decoders.Fuse()]), False),
        (decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 0, 1)]), False),
        (decoders.Metaspace(replacement="_"), False),
        (decoders.WordPiece(), False),
    ],
)
def test_the_fast_path_is_for_decoders_that_concatenate_bytes(
    tmp_path: Path, decoder: Any, is_concatenative: bool
) -> None:
    tokenizer = read_folder_tokenizer(write_tokenizer(tmp_path, decoder))
    assert tokenizer.is_concatenative is is_concatenative
