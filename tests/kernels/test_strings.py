"""Strings of GGUF files: what C++ reads is what Python reads, and what it does not take Python finds the words for."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest

from model_files import gguf, string, strings
from weft.errors import ModelFileError
from weft.loading import gguf as reader

_kernels = pytest.importorskip("weft._kernels")


def written(texts: list[str]) -> bytes:
    return b"".join(map(string, texts))


@pytest.mark.parametrize("seed", range(20))
def test_strings_come_back_as_written_wherever_they_stand(seed: int) -> None:
    chance = random.Random(seed)
    alphabet = ["a", "\0", "é", "漢", "😀", "\0" * 9, "x" * 300]
    texts = ["".join(chance.choices(alphabet, k=chance.randrange(5))) for _ in range(chance.randrange(40))]
    before, content, after = bytes(chance.randrange(9)), written(texts), bytes(chance.randrange(9))
    end = len(before) + len(content)
    data = before + content + after
    assert _kernels.read_strings(data, len(before), len(texts), end) == (texts, end)
    assert _kernels.read_strings(data, len(before), len(texts), len(data)) == (texts, end)


@pytest.mark.parametrize(
    ("data", "position", "count", "end"),
    [
        (written(["abc"]), 0, 1, 10),
        (written(["abc"]), 0, 2, 11),
        (written(["abc"]), 0, 2**60, 11),
        (written(["abc"]), 12, 1, 11),
        (written(["abc"]), 0, 1, 12),
        (written(["abc"])[:5], 0, 1, 5),
        (struct.pack("<Q", 2**64 - 1) + b"abc", 0, 1, 11),
        (struct.pack("<Q", 2**64 - 8) + b"abc", 0, 1, 11),
        (struct.pack("<Q", 2) + b"\xff\xff", 0, 1, 10),
    ],
    ids=[
        "cut",
        "too few",
        "absurd count",
        "behind the end",
        "end behind the data",
        "no length",
        "huge",
        "wraps",
        "not UTF-8",
    ],
)
def test_what_does_not_fit_is_not_taken(data: bytes, position: int, count: int, end: int) -> None:
    assert _kernels.read_strings(data, position, count, end) is None


def test_a_file_is_read_alike_and_refused_in_the_same_words_without_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["a", "", "é" * 200]
    content = gguf([strings("words", words)], [], b"")
    whole, broken = tmp_path / "whole.gguf", tmp_path / "broken.gguf"
    whole.write_bytes(content)
    broken.write_bytes(content.replace("é".encode(), b"\xff\xff", 1))

    def outcome() -> tuple[object, str]:
        with pytest.raises(ModelFileError) as caught:
            reader.read_gguf(broken)
        return reader.read_gguf(whole).metadata["words"], str(caught.value)

    native = outcome()
    monkeypatch.setattr(reader, "_read_strings", None)
    assert outcome() == native
    assert native[0] == words and "entry 2 of 3 is not UTF-8" in native[1]
