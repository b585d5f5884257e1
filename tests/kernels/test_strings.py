"""Strings of GGUF files: C++ and Python read the same; if C++ rejects a string, Python makes the error message."""

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
def test_strings_are_read_as_written_at_any_position(seed: int) -> None:
    rng = random.Random(seed)
    alphabet = ["a", "\0", "é", "漢", "😀", "\0" * 9, "x" * 300]
    texts = ["".join(rng.choices(alphabet, k=rng.randrange(5))) for _ in range(rng.randrange(40))]
    before, content, after = bytes(rng.randrange(9)), written(texts), bytes(rng.randrange(9))
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
        "past the end",
        "end past the data",
        "no length",
        "huge",
        "wraps",
        "not UTF-8",
    ],
)
def test_strings_that_do_not_fit_are_rejected(data: bytes, position: int, count: int, end: int) -> None:
    assert _kernels.read_strings(data, position, count, end) is None


def test_without_kernels_a_file_is_read_and_rejected_with_the_same_result(
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
