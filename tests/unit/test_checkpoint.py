"""Opening GGUF files and Hugging Face folders as a `Checkpoint`: the values read, and the errors."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import pytest

from model_files import (
    DATA,
    FLOAT,
    GOOD_SAFETENSORS,
    I32,
    STRING,
    TENSORS,
    U32,
    VOCABULARY,
    gguf,
    pair,
    string,
    write_folder,
)
from weft.errors import ModelFileError
from weft.loading.checkpoint import open_checkpoint
from weft.request import SamplingParams

CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 100, "eos_token_id": 2}
FOLDER = {"config.json": CONFIG, "model.safetensors": GOOD_SAFETENSORS}
MODEL_GGUF = gguf(VOCABULARY, TENSORS, DATA)


def folder(directory: Path, **files: Any) -> Path:
    """Writes FOLDER and `files`. A double underscore in a keyword stands for the dot of the file name."""
    named = {name.replace("__", "."): content for name, content in files.items()}
    return write_folder(directory / "m", {**FOLDER, **named})


def config(**changes: Any) -> dict[str, Any]:
    return {key: value for key, value in {**CONFIG, **changes}.items() if value != "absent"}


# --- valid checkpoints ------------------------------------------------------------------------------------------------


def test_a_folder_gives_config_tensors_and_end_tokens(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(folder(tmp_path))
    assert checkpoint.path == tmp_path / "m"
    assert checkpoint.layout == "huggingface"
    assert checkpoint.metadata == CONFIG
    assert set(checkpoint.tensors) == {"matrix", "half", "brain"}
    assert checkpoint.end_ids == {2}
    assert checkpoint.generation == {}
    assert checkpoint.architecture == "llama"
    assert (checkpoint.parameter_count, checkpoint.stored_as) == (14, "safetensors F32")


def test_shards_are_read_by_their_index_and_a_single_file_wins_over_the_index(tmp_path: Path) -> None:
    shard = "model-00001-of-00001.safetensors"
    index = {"weight_map": dict.fromkeys(("matrix", "half", "brain"), shard)}
    files = {"config.json": CONFIG, "model.safetensors.index.json": index, shard: GOOD_SAFETENSORS}
    path = write_folder(tmp_path / "sharded", files)
    assert open_checkpoint(path).tensors["matrix"].file.path.name == shard
    (path / "model.safetensors").write_bytes(GOOD_SAFETENSORS)
    assert open_checkpoint(path).tensors["matrix"].file.path.name == "model.safetensors"


def test_a_gguf_file_gives_metadata_tensors_and_end_tokens(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(MODEL_GGUF)
    checkpoint = open_checkpoint(path)
    assert (checkpoint.path, checkpoint.layout, checkpoint.end_ids) == (path, "gguf", {2})
    assert set(checkpoint.tensors) == {"first", "second"}
    assert checkpoint.vocabulary is not None and checkpoint.vocabulary.tokens == ["a", "b", "<end>"]
    assert (checkpoint.parameter_count, checkpoint.stored_as) == (40, "GGUF Q8_0")


def test_a_folder_with_one_gguf_model_opens_that_model(tmp_path: Path) -> None:
    path = write_folder(
        tmp_path / "m", {"README.md": b"hello", "model.gguf": MODEL_GGUF, "config.json": CONFIG}
    )
    assert open_checkpoint(path).path == path / "model.gguf"
    write_folder(path, {"other.gguf": MODEL_GGUF})
    with pytest.raises(
        ModelFileError, match=r"several GGUF models; pass the path of one: model.gguf, other.gguf"
    ):
        open_checkpoint(path)


def test_a_folder_with_the_files_of_one_split_gguf_model_opens_that_model(tmp_path: Path) -> None:
    def part(number: int, pairs: list[bytes]) -> bytes:
        split = {"split.no": number, "split.count": 2}
        numbers = [pair(key, U32, struct.pack("<I", value)) for key, value in split.items()]
        return gguf([*numbers, *pairs], [], b"")

    names = ["model-00001-of-00002.gguf", "model-00002-of-00002.gguf"]
    path = write_folder(tmp_path / "m", {names[0]: part(0, VOCABULARY), names[1]: part(1, [])})
    assert open_checkpoint(path).path == path / names[0]


# --- the tokens that end an answer ------------------------------------------------------------------------------------

TOKENIZER = {"added_tokens": [{"id": 0, "content": "<s>"}, {"id": 7, "content": "</s>"}]}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"generation_config__json": {"eos_token_id": [5, 6]}}, {5, 6}),
        ({"generation_config__json": {"eos_token_id": 5}}, {5}),
        ({"generation_config__json": {"eos_token_id": None}}, {2}),
        ({"generation_config__json": {"eos_token_id": []}}, {2}),
        ({"config__json": config(eos_token_id=[3, 4])}, {3, 4}),
        ({"config__json": config(eos_token_id="absent")}, set()),
        (
            {
                "config__json": config(eos_token_id=None),
                "tokenizer_config__json": {"eos_token": "</s>"},
                "tokenizer__json": TOKENIZER,
            },
            {7},
        ),
        (
            {
                "config__json": config(eos_token_id=None),
                "tokenizer_config__json": {"eos_token": {"content": "</s>", "special": True}},
                "tokenizer__json": TOKENIZER,
            },
            {7},
        ),
    ],
)
def test_the_first_file_that_names_end_tokens_decides(
    tmp_path: Path, files: dict[str, Any], expected: set[int]
) -> None:
    assert open_checkpoint(folder(tmp_path, **files)).end_ids == expected


@pytest.mark.parametrize("value", [100, -1, "2", 2.0, True, [2, 100], [[2]], {"id": 2}])
def test_an_end_token_outside_the_vocabulary_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ModelFileError, match=r"generation_config.json: eos_token_id: .* of the 100 tokens"):
        open_checkpoint(folder(tmp_path, generation_config__json={"eos_token_id": value}))
    with pytest.raises(ModelFileError, match=r"m/config.json: eos_token_id: .* of the 100 tokens"):
        open_checkpoint(folder(tmp_path, config__json=config(eos_token_id=value), generation_config__json={}))


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        ({"added_tokens": [{"id": 100, "content": "</s>"}]}, "eos_token: its id 100"),
        ({"added_tokens": [{"id": "7", "content": "</s>"}]}, "added_tokens: the id of '</s>' is '7'"),
        ({"added_tokens": []}, "eos_token: '</s>' is not among the added_tokens"),
        ({"added_tokens": 5}, "eos_token: '</s>' is not among the added_tokens"),
    ],
)
def test_an_end_token_the_tokenizer_does_not_have_is_refused(
    tmp_path: Path, tokenizer: Any, message: str
) -> None:
    files = {"tokenizer_config__json": {"eos_token": "</s>"}, "tokenizer__json": tokenizer}
    with pytest.raises(ModelFileError, match=message):
        open_checkpoint(folder(tmp_path, config__json=config(eos_token_id=None), **files))


# --- default sampling parameters --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({}, {}),
        ({"temperature": 0.6, "top_p": 0.9, "do_sample": True}, {"temperature": 0.6, "top_p": 0.9}),
        (
            {"top_k": 20, "min_p": 0.05, "typical_p": 0.95, "repetition_penalty": 1.05},
            {"top_k": 20, "min_p": 0.05, "typical_p": 0.95, "repetition_penalty": 1.05},
        ),
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"do_sample": True, "top_p": 0.9}, {"temperature": 1.0, "top_p": 0.9}),
        ({"do_sample": False, "temperature": 0.7, "top_p": 0.8}, {"temperature": 0.0, "top_p": 0.8}),
        ({"temperature": None, "top_k": None, "do_sample": None}, {}),
        ({"max_new_tokens": 7, "max_length": 9, "bos_token_id": 1, "transformers_version": "5.0"}, {}),
    ],
)
def test_sampling_defaults_are_exactly_the_values_in_the_file(
    tmp_path: Path, generation: dict[str, Any], expected: dict[str, Any]
) -> None:
    found = open_checkpoint(folder(tmp_path, generation_config__json=generation)).generation
    assert found == expected
    SamplingParams(**found)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("temperature", float("nan")),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", 2.5),
        ("top_k", True),
        ("min_p", [0.1]),
        ("typical_p", -0.1),
        ("repetition_penalty", 0),
        ("do_sample", "false"),
        ("do_sample", 0),
    ],
)
def test_a_sampling_default_out_of_range_is_refused_naming_the_field(
    tmp_path: Path, field: str, value: Any
) -> None:
    with pytest.raises(ModelFileError, match=f"generation_config.json: {field}: "):
        open_checkpoint(folder(tmp_path, generation_config__json={field: value}))


def write_gguf(directory: Path, *pairs: bytes) -> Path:
    path = directory / "model.gguf"
    path.write_bytes(gguf([*VOCABULARY, *pairs], TENSORS, DATA))
    return path


def test_sampling_defaults_of_a_gguf_file_are_the_shortest_decimals_of_their_float32(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path,
        pair("general.sampling.temp", FLOAT, struct.pack("<f", 0.7)),
        pair("general.sampling.top_k", I32, struct.pack("<i", 20)),
        pair("general.sampling.top_p", FLOAT, struct.pack("<f", 0.8)),
        pair("general.sampling.min_p", FLOAT, struct.pack("<f", 0.0)),
        pair("general.sampling.penalty_repeat", FLOAT, struct.pack("<f", 1.05)),
        pair("general.sampling.mirostat", I32, struct.pack("<i", 1)),
    )
    expected = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.0, "repetition_penalty": 1.05}
    assert open_checkpoint(path).generation == expected


def test_a_sampling_default_of_a_gguf_file_out_of_range_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path, pair("general.sampling.temp", STRING, string("hot")))
    with pytest.raises(ModelFileError, match=r"model.gguf: general.sampling.temp: temperature is 'hot'"):
        open_checkpoint(path)


# --- refused checkpoints ----------------------------------------------------------------------------------------------

PICKLES = [
    "pytorch_model.bin",
    "pytorch_model-00001-of-00002.bin",
    "model.pt",
    "consolidated.00.pth",
    "model.ckpt",
]


@pytest.mark.parametrize("name", PICKLES)
def test_pickle_weights_are_refused_unread(tmp_path: Path, name: str) -> None:
    path = write_folder(tmp_path / "m", {"config.json": CONFIG, name: b"\x80\x04"})
    for target in (path, path / name):
        with pytest.raises(
            ModelFileError, match=r"pickle weights can run code.*convert the model to safetensors"
        ):
            open_checkpoint(target)


def test_pickle_weights_next_to_safetensors_are_ignored(tmp_path: Path) -> None:
    assert open_checkpoint(folder(tmp_path, pytorch_model__bin=b"\x80\x04")).layout == "huggingface"


def test_a_tokenizer_that_is_code_is_refused_and_one_with_a_tokenizer_json_is_not(tmp_path: Path) -> None:
    remote = {"auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}}
    with pytest.raises(
        ModelFileError, match=r"tokenizer_config.json: auto_map: the tokenizer is custom Python code"
    ):
        open_checkpoint(folder(tmp_path, tokenizer_config__json=remote))
    both = folder(
        tmp_path, tokenizer_config__json=remote, tokenizer__json=TOKENIZER, config__json=config(**remote)
    )
    assert open_checkpoint(both).end_ids == {2}


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_quantised_weights_are_refused_by_their_method(tmp_path: Path, key: str) -> None:
    path = folder(tmp_path, config__json=config(**{key: {"quant_method": "gptq", "bits": 4}}))
    with pytest.raises(ModelFileError, match=f"config.json: {key}: .*'gptq'.*not read yet"):
        open_checkpoint(path)
    assert open_checkpoint(folder(tmp_path, config__json=config(**{key: None}))).end_ids == {2}


BAD_FOLDERS: dict[str, tuple[dict[str, Any], str]] = {
    "empty": ({}, "holds no model"),
    "no weights": ({"config.json": CONFIG}, "holds no model; expected config.json with model.safetensors"),
    "no config": ({"model.safetensors": GOOD_SAFETENSORS}, "has weights but no config.json"),
    "no index": ({"config.json": CONFIG, "model-00001-of-00002.safetensors": GOOD_SAFETENSORS}, "only model-00001-of-00002.safetensors"),
    "config no json": ({**FOLDER, "config.json": b"{"}, "config.json: JSON: cannot be read"),
    "config a list": ({**FOLDER, "config.json": []}, "config.json: JSON: is a list, expected an object"),
    "config too deep": ({**FOLDER, "config.json": b'{"a":' * 99 + b"1" + b"}" * 99}, "config.json: JSON: is nested deeper"),
    "config far too deep": ({**FOLDER, "config.json": b"[" * 100_000}, "config.json: JSON: is nested deeper"),
    "config with a name twice": ({**FOLDER, "config.json": b'{"a": 1, "a": 2}'}, "the name 'a' appears twice"),
    "config not utf-8": ({**FOLDER, "config.json": b'{"a": "\xff"}'}, "config.json: JSON: cannot be read"),
    "bad generation config": ({**FOLDER, "generation_config.json": b"nope"}, "generation_config.json: JSON: cannot be read"),
    "weights cut short": ({**FOLDER, "model.safetensors": GOOD_SAFETENSORS[:-1]}, "model.safetensors: brain: its data ends"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_FOLDERS)
def test_a_folder_without_a_valid_model_is_refused_with_the_reason(tmp_path: Path, case: str) -> None:
    files, message = BAD_FOLDERS[case]
    with pytest.raises(ModelFileError, match=message):
        open_checkpoint(write_folder(tmp_path / "m", files))


def test_a_json_file_over_the_size_limit_is_refused_unread(tmp_path: Path) -> None:
    path = folder(tmp_path)
    os.truncate(path / "config.json", 1 << 40)
    with pytest.raises(ModelFileError, match=r"config.json: the file has 1099511627776 bytes, the limit"):
        open_checkpoint(path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "generation_config.json"])
def test_the_error_names_a_broken_link(tmp_path: Path, name: str) -> None:
    path = folder(tmp_path)
    (path / name).unlink(missing_ok=True)
    (path / name).symlink_to("../../blobs/gone")
    with pytest.raises(
        ModelFileError, match=f"{name}: cannot be opened: it is a link to ../../blobs/gone, which"
    ):
        open_checkpoint(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_the_error_names_a_file_without_read_permission(tmp_path: Path) -> None:
    path = folder(tmp_path)
    (path / "config.json").chmod(0)
    with pytest.raises(ModelFileError, match=r"config.json: cannot be opened: Permission denied"):
        open_checkpoint(path)


def test_a_weights_file_and_a_missing_path_are_refused(tmp_path: Path) -> None:
    path = folder(tmp_path)
    with pytest.raises(ModelFileError, match=r"pass the folder that also holds config.json"):
        open_checkpoint(path / "model.safetensors")
    with pytest.raises(ModelFileError, match="does not exist"):
        open_checkpoint(tmp_path / "nothing")
