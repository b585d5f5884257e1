"""Damaged model files are read completely or rejected with `ModelFileError`, and cost little memory.

All randomness is seeded. A failure names the seed and the damage.
"""

from __future__ import annotations

import copy
import json
import random
import struct
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model_files import (
    ARRAY,
    BF16,
    F32,
    GOOD_GGUF,
    GOOD_SAFETENSORS,
    HEADER,
    I32,
    PAIRS,
    Q4_K,
    Q6_K,
    Q8_0,
    TENSOR_BYTES,
    U16,
    VOCABULARY,
    gguf,
    pair,
    safetensors,
    tensor,
    write_folder,
)
from weft.errors import ModelFileError
from weft.loading import decoding
from weft.loading.checkpoint import open_checkpoint
from weft.loading.gguf import read_gguf
from weft.loading.safetensors import INDEX_NAME, read_safetensors
from weft.loading.tensor import StoredTensor

SEEDS = range(4)
CASES_PER_SEED = 500

RICH_GGUF = gguf(
    [
        *PAIRS,
        *VOCABULARY,
        pair("split.count", U16, struct.pack("<H", 1)),
        pair("signed", ARRAY, struct.pack("<IQ3i", I32, 3, -1, 0, 1)),
    ],
    [
        tensor("a", [256, 2], Q4_K, 0),
        tensor("b", [256], Q6_K, 288),
        tensor("c", [8], BF16, 512),
        tensor("d", [2, 1, 2, 2], F32, 544),
        tensor("e", [32], Q8_0, 576),
    ],
    bytes(range(256)) * 2 + bytes(128),
)

# --- damage -----------------------------------------------------------------------------------------------------------

ABSURD = (0, 1, 2, 127, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)


def flip_bits(content: bytes, rng: random.Random) -> bytes:
    damaged = bytearray(content)
    for _ in range(rng.randint(1, 6)):
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def overwrite_number(content: bytes, rng: random.Random) -> bytes:
    width = rng.choice((1, 2, 4, 8))
    number = rng.choice((*ABSURD, rng.getrandbits(64), len(content), len(content) - 1))
    start = rng.randrange(len(content) - width)
    return content[:start] + (number % (1 << 8 * width)).to_bytes(width, "little") + content[start + width :]


def cut(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.randrange(len(content))]


def remove(content: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(content))
    return content[:start] + content[start + rng.randint(1, 40) :]


def splice(content: bytes, rng: random.Random) -> bytes:
    """Repeats a piece of the file at another place."""
    start, place = rng.randrange(len(content)), rng.randrange(len(content))
    return content[:place] + content[start : start + rng.randint(1, 200)] + content[place:]


def add_noise(content: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(content))
    return content[:start] + rng.randbytes(rng.randint(1, 60)) + content[start:]


DAMAGES: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    flip_bits,
    overwrite_number,
    cut,
    remove,
    splice,
    add_noise,
)

HOSTILE_VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 2**31, 2**63, 2**64, 10**400, 0.5, 1e308, float("nan"), float("inf")),
    *("", "\0", "\ud800", "../x", "F32", "x" * 500, [], [0], [-1], [[1]], [0] * 300, {}, {"a": {"b": 1}}),
)


def damage_json(value: Any, rng: random.Random) -> Any:
    """A copy in which one value, at any depth, is removed, duplicated under another name, or replaced."""
    value = copy.deepcopy(value)
    place = value
    while True:
        keys = list(place) if isinstance(place, dict) else range(len(place))
        key = rng.choice(keys)
        inner = place[key]
        if not isinstance(inner, dict | list) or not inner or rng.random() < 0.3:
            break
        place = inner
    kind = rng.randrange(6)
    if kind == 0:
        del place[key]
    elif kind == 1 and isinstance(place, dict):
        place[key + "\x1b"] = inner
    elif kind == 2 and type(inner) is int:
        place[key] = inner + rng.choice((-1, 1, 4, 1 << 40))
    else:
        place[key] = rng.choice(HOSTILE_VALUES)
    return value


# --- the check --------------------------------------------------------------------------------------------------------


def read_all(tensors: Mapping[str, StoredTensor], size: int) -> None:
    assert sum(entry.byte_count for entry in tensors.values()) <= size
    for entry in tensors.values():
        values = entry.to_float32()
        assert values.shape == entry.shape
        if values.ndim == 2 and len(values):
            assert entry.rows(np.array([0])).shape == (1, entry.shape[1])


def check(read: Callable[[], object], size: int, description: object) -> bool:
    """Whether the file was accepted. Fails on any other error than ModelFileError, and if the memory use is too
    high."""
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    try:
        read()
        accepted = True
    except ModelFileError as error:
        accepted = False
        assert str(error).isprintable(), description
        assert len(str(error)) < 2_000, description
    except BaseException as error:
        raise AssertionError(f"{description}: {error!r}") from error
    assert tracemalloc.get_traced_memory()[1] - before < 500_000 + 40 * size, description
    return accepted


@pytest.fixture(autouse=True)
def traced() -> Iterator[None]:
    assert decoding, (
        "the readers import it with the first tensor, and compiling it takes memory that is not theirs"
    )
    tracemalloc.start()
    yield
    tracemalloc.stop()


def read_gguf_file(path: Path) -> None:
    read_all(read_gguf(path).tensors, path.stat().st_size)


def read_gguf_checkpoint(path: Path) -> None:
    open_checkpoint(path)


def read_safetensors_file(path: Path) -> None:
    read_all(read_safetensors(path), path.stat().st_size)


READERS = {
    "small gguf": (GOOD_GGUF, "model.gguf", read_gguf_file),
    "rich gguf": (RICH_GGUF, "model.gguf", read_gguf_file),
    "gguf with vocabulary": (RICH_GGUF, "model.gguf", read_gguf_checkpoint),
    "safetensors": (GOOD_SAFETENSORS, "model.safetensors", read_safetensors_file),
}


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_damaged_file_is_read_completely_or_rejected(tmp_path: Path, kind: str, seed: int) -> None:
    content, name, read = READERS[kind]
    path = tmp_path / name
    accepted = []
    for case in range(CASES_PER_SEED):
        rng = random.Random(f"{kind} {seed} {case}")
        damages = [rng.choice(DAMAGES) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
        damaged = content
        for damage in damages:
            damaged = damage(damaged.ljust(9, b"\0"), rng)
        path.unlink(missing_ok=True)
        path.write_bytes(damaged)
        description = (kind, seed, case, [damage.__name__ for damage in damages])
        accepted.append(check(lambda: read(path), len(damaged), description))
    # If all files were accepted, or all rejected, half of the reader would not be tested.
    assert 0.01 < np.mean(accepted) < 0.9


@pytest.mark.parametrize("kind", READERS)
def test_a_truncated_file_is_rejected(tmp_path: Path, kind: str) -> None:
    content, name, read = READERS[kind]
    path = tmp_path / name
    # Padding follows the last tensor of the GGUF files. A file without it is accepted.
    needed = len(content.rstrip(b"\0")) if name.endswith(".gguf") else len(content)
    for length in range(len(content)):
        path.unlink(missing_ok=True)
        path.write_bytes(content[:length])
        accepted = check(lambda: read(path), length, (kind, length))
        assert not accepted or length >= needed, length


@pytest.mark.parametrize("seed", SEEDS)
def test_a_safetensors_header_with_hostile_values_is_read_completely_or_rejected(
    tmp_path: Path, seed: int
) -> None:
    path = tmp_path / "model.safetensors"
    for case in range(CASES_PER_SEED):
        rng = random.Random(f"header {seed} {case}")
        header = damage_json(HEADER, rng)
        path.unlink(missing_ok=True)
        path.write_bytes(safetensors(header, TENSOR_BYTES))
        check(lambda: read_safetensors_file(path), path.stat().st_size, (seed, case, header))


SHARD = "model-00001-of-00001.safetensors"
FOLDER: dict[str, Any] = {
    "config.json": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 100,
        "eos_token_id": None,
        "auto_map": {"AutoTokenizer": "own.Tokenizer"},
        "quantization_config": None,
    },
    "generation_config.json": {"eos_token_id": None, "temperature": 0.6, "top_k": 20, "do_sample": True},
    "tokenizer_config.json": {"eos_token": {"content": "</s>"}},
    "tokenizer.json": {"added_tokens": [{"id": 0, "content": "<s>"}, {"id": 2, "content": "</s>"}]},
    INDEX_NAME: {"metadata": {}, "weight_map": {"matrix": SHARD, "half": SHARD, "brain": SHARD}},
}


def test_the_undamaged_files_are_accepted(tmp_path: Path) -> None:
    for kind, (content, name, read) in READERS.items():
        path = tmp_path / kind / name
        write_folder(path.parent, {name: content})
        read(path)
    folder = write_folder(tmp_path / "m", {**FOLDER, SHARD: GOOD_SAFETENSORS})
    checkpoint = open_checkpoint(folder)
    assert checkpoint.end_ids == {2}
    read_all(checkpoint.tensors, len(GOOD_SAFETENSORS))


@pytest.mark.parametrize("name", FOLDER)
def test_a_folder_with_hostile_json_is_opened_or_rejected(tmp_path: Path, name: str) -> None:
    folder = write_folder(tmp_path / "m", {**FOLDER, SHARD: GOOD_SAFETENSORS})
    for case in range(CASES_PER_SEED):
        rng = random.Random(f"{name} {case}")
        if rng.random() < 0.6:
            text = json.dumps(damage_json(FOLDER[name], rng)).encode()
        else:
            text = rng.choice(DAMAGES)(json.dumps(FOLDER[name]).encode(), rng)
        (folder / name).write_bytes(text)
        check(lambda: open_checkpoint(folder), 4_000, (name, case, text))
