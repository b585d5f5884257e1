"""Settings and fixtures of several test folders: the default model and llama.cpp's vocabularies, downloaded once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

# Set before numpy is imported. The threads of OpenBLAS spin while they wait: on a busy machine a step takes ten times
# as long. One thread has no such outliers.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# The test servers run on this machine, so their addresses must not go through a proxy of the user.
os.environ |= {
    name: ",".join(filter(None, (os.environ.get(name), "127.0.0.1", "localhost")))
    for name in ("no_proxy", "NO_PROXY")
}
# Set before triton is imported, because triton reads it once; transformers imports triton while tests are collected.
# tests/triton uses the interpreter, except in `make test-gpu`. With the interpreter no GPU can be used, and by default weft
# would use one.
if os.environ.get("WEFT_TEST_DEVICE", "cpu") == "cpu":
    os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}

from weft.loading.gguf import GgufFile, read_gguf
from weft.loading.pull import models_directory, pull
from weft.loading.vocabulary import read_vocabulary
from weft.text.gguf_tokenizer import tokenizer_of
from weft.text.tokenizer import Tokenizer

with suppress(ImportError):  # `make test-gpu` may run without it
    from hypothesis import HealthCheck, settings

    # No test depends on the speed or load of the machine.
    settings.register_profile("weft", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("weft")


@pytest.fixture
def ctrl_c_is_handled() -> Iterator[None]:
    """Handles SIGINT as a program started from a terminal does. A background job and its children ignore SIGINT."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.fixture
def ctrl_c_is_ignored() -> Iterator[None]:
    """Ignores SIGINT, as a background job of a script does."""
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    return pull("default")


@pytest.fixture(scope="session")
def default_embedder_path() -> Path:
    return pull("all-MiniLM-L6-v2")


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
    """A folder with vocabularies of many model families, llama.cpp's token ids for test texts, and chat templates.

    They are part of a source distribution on the Python package index, so no model hub is needed.
    """
    folder = models_directory().parent / "test-data" / LLAMA_CPP_SDIST.replace("==", "-")
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as staging:
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
            try:
                (Path(staging) / "models").rename(folder)
            except OSError:
                if not folder.is_dir():  # otherwise another test process was faster
                    raise
    return folder
