"""Hostile and broken model files, as `weft serve` and its clients see them."""

from __future__ import annotations

import json
import os
import pickle
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from server_process import SOURCE, running_server

from model_files import (
    GOOD_GGUF,
    HEADER,
    PAIRS,
    STRING,
    TENSOR_BYTES,
    VOCABULARY,
    entry,
    gguf,
    pair,
    safetensors,
    string,
    write_folder,
)


def with_template(model: Path, template: str, target: Path) -> Path:
    """The default model with another chat template. Only the metadata of the GGUF file is rewritten, for the text
    side."""
    content = model.read_bytes()
    key = string("tokenizer.chat_template") + struct.pack("<I", STRING)
    at = content.index(key) + len(key)
    (length,) = struct.unpack_from("<Q", content, at)
    changed = content[:at] + string(template) + content[at + 8 + length :]
    # The tensor data must begin at a multiple of 32 bytes.
    padding = -(len(string(template)) - 8 - length) % 32
    extra = pair("padding", STRING, string("x" * ((padding - len(pair("padding", STRING, string("")))) % 32)))
    first = content.index(string("general.architecture"))
    tensors, pairs = struct.unpack_from("<QQ", content, 8)
    head = content[:8] + struct.pack("<QQ", tensors, pairs + 1) + content[24:first]
    target.write_bytes(head + extra + changed[first:])
    return target


@pytest.mark.parametrize(
    "template",
    [
        pytest.param(
            "{% for i in range(99999999) %}{% for j in range(99999999) %}x{% endfor %}{% endfor %}", id="loop"
        ),
        pytest.param(
            "{% set ns = namespace(s='x' * 1000) %}{% for i in range(64) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
            id="string bomb",
        ),
        pytest.param("{{ ''.__class__.__mro__[1].__subclasses__() }}", id="attribute walk"),
        pytest.param("{{ messages.__init__.__globals__['os'].system('true') }}", id="call"),
    ],
)
def test_24_a_hostile_template_fails_its_request_and_nothing_else(
    default_model_path: Path, tmp_path: Path, template: str
) -> None:
    model = with_template(default_model_path, template, tmp_path / "hostile.gguf")
    with running_server(model) as server:
        refused = server.chat()
        assert refused.status_code == 400, refused.text
        assert "template" in refused.json()["error"]["message"]
        assert server.client.get("/health").status_code == 200
        assert server.complete().status_code == 200
        server.wait_until_free()


def serve(path: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-m", "weft.cli.main", "serve", str(path), "--port", "0"]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)


class Harm:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


CONFIG = {"model_type": "llama", "vocab_size": 32}


def broken_gguf(tmp_path: Path) -> tuple[Path, str]:
    path = tmp_path / "cut.gguf"
    path.write_bytes(GOOD_GGUF[:60])
    return path, str(path)


def lying_gguf(tmp_path: Path) -> tuple[Path, str]:
    path = tmp_path / "lying.gguf"
    path.write_bytes(gguf(PAIRS, [], b"", counts=(2**60, 2**60)))
    return path, str(path)


def gguf_without_fields(tmp_path: Path) -> tuple[Path, str]:
    path = tmp_path / "bare.gguf"
    path.write_bytes(gguf([*PAIRS[:1], *VOCABULARY], [], b""))
    return path, "llama."


def junk(tmp_path: Path) -> tuple[Path, str]:
    path = tmp_path / "junk.gguf"
    path.write_bytes(os.urandom(4096))
    return path, str(path)


def broken_safetensors(tmp_path: Path) -> tuple[Path, str]:
    header = {**HEADER, "matrix": entry("F32", [2, 3], 0, 10**12)}
    files = {"config.json": CONFIG, "model.safetensors": safetensors(header, TENSOR_BYTES)}
    return write_folder(tmp_path / "folder", files), "matrix"


def huge_header(tmp_path: Path) -> tuple[Path, str]:
    files = {"config.json": CONFIG, "model.safetensors": safetensors(HEADER, TENSOR_BYTES, length=2**63)}
    return write_folder(tmp_path / "folder", files), "model.safetensors"


def pickled(tmp_path: Path) -> tuple[Path, str]:
    harm = pickle.dumps(Harm(tmp_path / "harmed"))
    return write_folder(tmp_path / "folder", {"config.json": CONFIG, "pytorch_model.bin": harm}), "pickle"


def pickled_file(tmp_path: Path) -> tuple[Path, str]:
    path = tmp_path / "model.pt"
    path.write_bytes(pickle.dumps(Harm(tmp_path / "harmed")))
    return path, "pickle"


def code(tmp_path: Path) -> tuple[Path, str]:
    harm = f"open({str(tmp_path / 'harmed')!r}, 'w')"
    config = {**CONFIG, "model_type": "own", "auto_map": {"AutoModel": "modeling_own.Own"}}
    files = {
        "config.json": config,
        "modeling_own.py": harm.encode(),
        "model.safetensors": safetensors(HEADER, TENSOR_BYTES),
        "tokenizer_config.json": {"auto_map": {"AutoTokenizer": ["modeling_own.Own", None]}},
    }
    return write_folder(tmp_path / "folder", files), "auto_map"


@pytest.mark.parametrize(
    "make",
    [
        *(broken_gguf, lying_gguf, gguf_without_fields, junk, broken_safetensors, huge_header),
        *(pickled, pickled_file, code),
    ],
    ids=lambda make: make.__name__,
)
def test_33_34_an_invalid_model_file_is_refused_with_its_name_and_no_code_in_it_runs(
    tmp_path: Path, make: Callable[[Path], tuple[Path, str]]
) -> None:
    path, expected = make(tmp_path)
    done = serve(path)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("weft: ") and done.stderr.count("\n") == 1
    assert str(path) in done.stderr and expected in done.stderr
    assert not (tmp_path / "harmed").exists()


def test_25_a_model_without_a_template_causes_a_warning_at_the_start(
    default_model_path: Path, tmp_path: Path
) -> None:
    content = default_model_path.read_bytes().replace(b"tokenizer.chat_template", b"tokenizer.chat_templatf")
    model = tmp_path / "plain.gguf"
    model.write_bytes(content)
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-m", "weft.cli.main", "serve", str(model), "--port", "0", "--context", "64"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    try:
        warning = json.loads(process.stderr.readline())
        assert warning["event"] == "warning" and warning["level"] == "warning"
        assert "no chat template" in warning["message"] and "--chat-template" in warning["message"]
        assert json.loads(process.stderr.readline())["event"] == "ready"
        process.terminate()
        assert process.wait(60) == 0
        assert [json.loads(line)["event"] for line in process.stderr] == ["draining", "stopped"]
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
