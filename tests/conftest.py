"""What several test folders share: the default model, fetched once into the user's cache."""

from __future__ import annotations

from pathlib import Path

import pytest

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
