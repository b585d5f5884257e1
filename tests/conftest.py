"""What several test folders share: the default model, fetched once into the user's cache."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before numpy is imported: the threads of OpenBLAS wait for each other by spinning, and beside anything else that runs
# on the machine a step then takes ten times as long. One thread is slower alone and never slow.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from weft.loading.gguf import GgufFile, read_gguf
from weft.loading.pull import pull
from weft.loading.vocabulary import read_vocabulary
from weft.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    return pull("default")


@pytest.fixture(scope="session")
def default_model_file(default_model_path: Path) -> GgufFile:
    return read_gguf(default_model_path)


@pytest.fixture(scope="session")
def default_tokenizer(default_model_file: GgufFile) -> Tokenizer:
    return Tokenizer(read_vocabulary(default_model_file.metadata))
