"""Downloads models from the Hugging Face hub into the cache. Later starts need no network.

The library huggingface_hub lists repositories, resolves URLs and finds the token. It honours HF_TOKEN, HF_ENDPOINT,
HF_HOME and HF_HUB_OFFLINE. The library cannot resume a download after the process was killed. So
`weft.loading.download` downloads the bytes. The cache under `hub/`:

    owner--name/COMMIT/...    model files; each gets its final name after its checksum was verified
    NAME.json                 the manifest of one model: its commit and its files; written last
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote, urlsplit

from weft.errors import ModelFileError
from weft.loading.cache import (
    Progress,
    PullProgress,
    exclusive_lock,
    models_directory,
    move_into_place,
    partial_path,
    report_disk_errors,
    require_free_space,
)
from weft.loading.checksum import ExpectedFile, matches
from weft.loading.download import Location, download
from weft.loading.files import PICKLE_SUFFIXES
from weft.loading.gguf import later_part_names

_TIMEOUT_SECONDS = 20.0
_FORMS = (
    "hf:OWNER/NAME, hf:OWNER/NAME:Q4_K_M or hf:OWNER/NAME/FILE.gguf, each optionally followed by @REVISION"
)
_MODULE = re.compile(r"[0-9]{1,2}_[A-Za-z]+/(config\.json|model\.safetensors)")
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")


@dataclass(frozen=True)
class HubModel:
    """A parsed `hf:...` name: a repository, a revision and, for GGUF, a file or a quantisation."""

    repository: str
    revision: str = "main"
    file: str = ""
    quantisation: str = ""

    def __str__(self) -> str:
        file = f"/{self.file}" if self.file else f":{self.quantisation}" if self.quantisation else ""
        revision = f"@{self.revision}" if self.revision != "main" else ""
        return f"hf:{self.repository}{file}{revision}"

    @property
    def folder(self) -> Path:
        return hub_directory() / self.repository.replace("/", "--")

    @property
    def manifest_path(self) -> Path:
        return hub_directory() / f"{quote(str(self)[3:], safe='@:')}.json"

    @property
    def lock_path(self) -> Path:
        return hub_directory() / f".{self.folder.name}.lock"


@dataclass(frozen=True)
class Manifest:
    """A pulled model: its files, relative to the commit's folder, with the verified checksums."""

    model: str
    commit: str
    files: tuple[ExpectedFile, ...]

    @property
    def folder(self) -> Path:
        return parse_hub_name(self.model).folder / self.commit

    @property
    def path(self) -> Path:
        """The path to load: the GGUF file (the first one of a split model), or the folder."""
        is_gguf = all(file.name.endswith(".gguf") for file in self.files)
        return self.folder / self.files[0].name if is_gguf else self.folder

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    def missing(self) -> list[str]:
        """The files that are missing or have another size. Checksums were verified before the manifest was written."""
        return [file.name for file in self.files if not _has_size(self.folder / file.name, file.size)]


def hub_directory() -> Path:
    return models_directory() / "hub"


def parse_hub_name(name: str) -> HubModel:
    """Parses `hf:owner/name` with an optional file or quantisation and an optional revision."""
    rest, _, revision = name.removeprefix("hf:").partition("@")
    found = re.fullmatch(r"([\w][\w.-]*/[\w][\w.-]*)(?:/(.+\.gguf)|:([\w.-]+))?", rest, re.ASCII)
    file = found[2] or "" if found else ""
    if found is None or not _is_inside(file) or ("@" in name and not revision):
        raise ModelFileError(f"{name}: is not a valid model name of the hub; allowed: {_FORMS}")
    return HubModel(found[1], revision or "main", file, found[3] or "")


def read_manifest(path: Path) -> Manifest | None:
    """Returns None if the manifest is missing, or unreadable for this version. The model is then pulled again."""
    try:
        content = json.loads(path.read_text())
        files = tuple(ExpectedFile(**file) for file in content["files"])
        manifest = Manifest(content["model"], content["commit"], files)
        is_valid = parse_hub_name(manifest.model).manifest_path.name == path.name and bool(files)
        is_valid = is_valid and all(_is_inside(name) for name in (manifest.commit, *(f.name for f in files)))
        return manifest if is_valid else None
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError, ModelFileError):
        return None


def manifests() -> Iterator[Manifest]:
    for path in sorted(hub_directory().glob("*.json")):
        if (manifest := read_manifest(path)) is not None:
            yield manifest


def pull_hub_model(name: str, progress: Progress, verify: bool = False) -> Path:
    """Downloads the model if needed and returns its file or folder.

    A complete model in the cache is used without a request to the hub. With `verify`, the newest commit of the revision
    is pulled and every checksum is verified.
    """
    model = parse_hub_name(name)
    with report_disk_errors(hub_directory()):
        kept = read_manifest(model.manifest_path)
        if kept is not None and not verify and not kept.missing():
            return kept.path
        with exclusive_lock(model.lock_path, progress):
            kept = read_manifest(model.manifest_path)
            if kept is not None and not verify and not kept.missing():
                return kept.path
            progress(PullProgress("find"))
            repository = _Repository(model)
            manifest = repository.listing(kept)
            _fetch(repository, manifest, kept, progress, verify)
            _write_manifest(model, manifest)
            _delete_unused(model, kept)
    return manifest.path


def incomplete_repositories() -> Iterator[HubModel]:
    """Repositories with downloaded bytes but no complete model."""
    complete = {parse_hub_name(manifest.model).folder for manifest in manifests()}
    for folder in sorted(hub_directory().glob("*--*/")):
        if folder not in complete:
            yield HubModel(folder.name.replace("--", "/", 1))


def remove_hub_model(model: HubModel, progress: Progress) -> None:
    """Deletes a model, complete or not, and its files, except files that another model uses."""
    with exclusive_lock(model.lock_path, progress):
        manifest = read_manifest(model.manifest_path)
        model.manifest_path.unlink(missing_ok=True)
        _delete_unused(model, manifest)


def _fetch(
    repository: _Repository, manifest: Manifest, kept: Manifest | None, progress: Progress, verify: bool
) -> None:
    """Puts every file of the manifest into its folder. Verifies the checksums of new files; with `verify`, of all files."""
    total, done = manifest.size, 0
    to_fetch: list[ExpectedFile] = []
    for file in manifest.files:
        target = manifest.folder / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        check = _stage_progress(done, total, "check", progress)
        is_present = matches(target, file, check) if verify else _has_size(target, file.size)
        if is_present or _reuse_local_copy(repository.model, manifest, kept, file, check):
            done += file.size
        else:
            to_fetch.append(file)
    partials = [partial_path(manifest.folder / file.name) for file in to_fetch]
    begun = sum(path.stat().st_size for path in partials if path.exists())
    require_free_space(manifest.folder, sum(file.size for file in to_fetch) - begun)
    for file, partial in zip(to_fetch, partials, strict=True):
        locate = repository.locator(manifest.commit, file)
        download(locate, partial, file, _stage_progress(done, total, "download", progress))
        move_into_place(partial, manifest.folder / file.name)
        done += file.size


def _stage_progress(base: int, total: int, stage: str, progress: Progress) -> Callable[[int], None]:
    """A callback for the bytes of one file. It reports them as progress of all files: `base` bytes were done before."""
    return lambda done: progress(PullProgress(stage, base + done, total))


def _reuse_local_copy(
    model: HubModel,
    manifest: Manifest,
    kept: Manifest | None,
    file: ExpectedFile,
    check: Callable[[int], None],
) -> bool:
    """Uses a verified copy on this machine: from the commit pulled before, or from the cache of huggingface_hub. Returns
    whether there is one."""
    from huggingface_hub import try_to_load_from_cache

    places = [kept.folder / old.name for old in kept.files if old.digest == file.digest] if kept else []
    cached = try_to_load_from_cache(model.repository, file.name, revision=manifest.commit)
    if isinstance(cached, str):
        places.append(Path(cached).resolve())
    target = manifest.folder / file.name
    for place in places:
        if place != target and matches(place, file, check):
            partial = partial_path(target)
            partial.unlink(missing_ok=True)
            try:
                os.link(place, partial)  # no second copy on the disk
            except OSError:
                shutil.copyfile(place, partial)
            move_into_place(partial, target)
            return True
    return False


def _write_manifest(model: HubModel, manifest: Manifest) -> None:
    content = {
        "model": manifest.model,
        "commit": manifest.commit,
        "files": [dataclasses.asdict(file) for file in manifest.files],
    }
    partial = partial_path(model.manifest_path)
    partial.write_text(json.dumps(content, indent=1) + "\n")
    move_into_place(partial, model.manifest_path)


def _delete_unused(model: HubModel, old: Manifest | None) -> None:
    """Deletes the files of `old` and the commit folders that no manifest names, including incomplete downloads.

    A process that has mapped a deleted file can still read it until it ends.
    """
    current = [one for one in manifests() if parse_hub_name(one.model).folder == model.folder]
    used = {one.folder / file.name for one in current for file in one.files}
    for file in old.files if old else ():
        if old and old.folder / file.name not in used:
            (old.folder / file.name).unlink(missing_ok=True)
    for folder in model.folder.glob("*"):
        if folder not in {one.folder for one in current}:
            shutil.rmtree(folder, ignore_errors=True)
    if not current:
        shutil.rmtree(model.folder, ignore_errors=True)


class _Repository:
    """One repository of the hub. Its errors are messages for the user who named the model."""

    def __init__(self, model: HubModel) -> None:
        self.model = model

    def listing(self, kept: Manifest | None) -> Manifest:
        """The model's files at the newest commit of its revision. Offline, the files in the cache."""
        from huggingface_hub import HfApi
        from huggingface_hub.errors import OfflineModeIsEnabled

        try:
            info = HfApi(library_name="weft").model_info(
                self.model.repository,
                revision=self.model.revision,
                files_metadata=True,
                timeout=_TIMEOUT_SECONDS,
            )
        except OfflineModeIsEnabled:
            if kept is not None and not kept.missing():
                return kept
            raise ModelFileError(
                f"{self.model}: is not on this machine, and HF_HUB_OFFLINE forbids downloads; unset it once"
            ) from None
        # The exception type depends on the version of huggingface_hub, which uses requests, httpx or another library.
        except Exception as error:
            raise self._hub_error(error, kept) from error
        files = [_expected(sibling) for sibling in info.siblings or []]
        chosen = _choose(self.model, [file for file in files if file is not None])
        if not re.fullmatch(r"[0-9a-f]{40,64}", info.sha or ""):
            raise ModelFileError(
                f"{self.model}: the hub returned the commit {info.sha!r}; expected 40 hex digits"
            )
        return Manifest(str(self.model), str(info.sha), tuple(chosen))

    def locator(self, commit: str, file: ExpectedFile) -> Callable[[], Location]:
        """Returns a function that requests a fresh URL from the hub on every call: URLs may expire."""
        from huggingface_hub import get_hf_file_metadata, hf_hub_url
        from huggingface_hub.errors import HfHubHTTPError
        from huggingface_hub.utils import build_hf_headers

        url = hf_hub_url(self.model.repository, file.name, revision=commit)

        def locate() -> Location:
            try:
                location = get_hf_file_metadata(url, timeout=_TIMEOUT_SECONDS).location
            except Exception as error:
                if isinstance(error, HfHubHTTPError) and error.response.status_code < 500:
                    raise self._hub_error(error, None) from error
                raise ConnectionError(_first_line(error)) from error
            # A URL on another host is signed and needs no token. The token must not be sent to that host.
            is_same_host = urlsplit(location)[:2] == urlsplit(url)[:2]
            headers = build_hf_headers(library_name="weft")
            return Location(location, headers if is_same_host else {})

        return locate

    def _hub_error(self, error: Exception, kept: Manifest | None) -> ModelFileError:
        """Converts an error of the hub to a message that says what the user can do."""
        from huggingface_hub import constants, get_token
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

        model, endpoint = self.model, constants.ENDPOINT
        status = getattr(getattr(error, "response", None), "status_code", None)
        how_to_log_in = "set HF_TOKEN to a token of an account that may read it, or run `hf auth login`"
        if isinstance(error, GatedRepoError):
            if get_token():
                how_to_log_in = (
                    "wait until its owner grants access; the token that was sent has no access yet"
                )
            problem = f"is gated: accept its terms at {endpoint}/{model.repository}, then {how_to_log_in}"
        elif isinstance(error, RevisionNotFoundError):
            problem = f"the repository has no revision {model.revision!r}; omit '@...' for the newest"
        elif isinstance(error, RepositoryNotFoundError):
            problem = (
                f"there is no such model at {endpoint}, or it is private: check the name, or {how_to_log_in}"
            )
        elif status in (401, 403):
            problem = f"the hub answered {status} ({_first_line(error)}): {how_to_log_in}"
        elif status is not None:
            problem = f"the hub answered {status} ({_first_line(error)}); try again later"
        else:
            problem = (
                f"{endpoint} cannot be reached ({_first_line(error)}); check the network, "
                "or set HF_ENDPOINT to a mirror"
            )
        if kept is not None and not kept.missing():
            problem += f". The commit pulled before ({kept.commit[:12]}) is still in the cache and works"
        return ModelFileError(f"{model}: {problem}")


def _expected(sibling: Any) -> ExpectedFile | None:
    """A file of the repository. None if it has no size or checksum, or if its path leaves the model's folder."""
    name = sibling.rfilename
    if not _is_inside(name):
        return None
    if sibling.lfs is not None:
        return ExpectedFile(name, sibling.lfs.size, "sha256", sibling.lfs.sha256)
    if sibling.size is None or sibling.blob_id is None:
        return None
    return ExpectedFile(name, sibling.size, "git", sibling.blob_id)


def _choose(model: HubModel, files: list[ExpectedFile]) -> list[ExpectedFile]:
    """The files of the repository that weft needs. Never code, never pickles."""
    ggufs = [file for file in files if file.name.endswith(".gguf") and "mmproj" not in file.name.lower()]
    if model.file or model.quantisation:
        return _choose_gguf(model, ggufs)
    top_level = [file for file in files if "/" not in file.name]
    safetensors = [file for file in top_level if file.name.endswith(".safetensors")]
    # Some repositories hold the same weights twice. The files with the standard names are preferred.
    weights = [file for file in safetensors if _WEIGHTS.fullmatch(file.name)] or safetensors
    if weights and any(file.name == "config.json" for file in top_level):
        small = [f for f in top_level if f.name.endswith((".json", ".jinja")) or f.name == "tokenizer.model"]
        return [*small, *weights, *_module_files(files)]
    if ggufs:
        return _choose_gguf(model, ggufs)
    pickles = [file.name for file in files if file.name.endswith(PICKLE_SUFFIXES)]
    if pickles:
        raise ModelFileError(
            f"{model}: has its weights only as {pickles[0]}, a pickle, which can run any code when it is read; "
            "weft reads safetensors and GGUF. Search the hub for a conversion of the model"
        )
    raise ModelFileError(
        f"{model}: has neither safetensors with a config.json nor a GGUF file among its {len(files)} files; "
        "weft cannot read this model"
    )


def _module_files(files: list[ExpectedFile]) -> list[ExpectedFile]:
    """The files of the modules of an embedding model: `1_Pooling/config.json`."""
    if not any(file.name == "modules.json" for file in files):
        return []
    return [file for file in files if _MODULE.fullmatch(file.name)]


def _choose_gguf(model: HubModel, files: list[ExpectedFile]) -> list[ExpectedFile]:
    """The GGUF file that `model` names, with the further files of a split model."""
    later_parts = {part for file in files for part in later_part_names(file.name)}
    firsts = [file for file in files if file.name not in later_parts]
    wanted = re.compile(rf"(^|[-._/]){re.escape(model.quantisation)}(?=[-.])", re.IGNORECASE)
    if model.file:
        found = [file for file in firsts if file.name == model.file]
    else:
        found = [file for file in firsts if not model.quantisation or wanted.search(file.name)]
    if len(found) != 1:
        requested = model.file or model.quantisation
        if not files:
            raise ModelFileError(f"{model}: there is no {requested}: the repository has no GGUF file")
        matching = f"{len(found) or 'none'} of them match {requested}; " if requested else ""
        raise ModelFileError(
            f"{model}: has {len(firsts)} GGUF models; {matching}name one: {_names(model, found or firsts)}"
        )
    by_name = {file.name: file for file in files}
    parts = [found[0].name, *later_part_names(found[0].name)]
    if missing := [name for name in parts if name not in by_name]:
        raise ModelFileError(
            f"{model}: {missing[0]} is missing: the repository has {len(parts) - len(missing)} of the "
            f"{len(parts)} files of this model; choose another one"
        )
    return [by_name[name] for name in parts]


def _names(model: HubModel, files: list[ExpectedFile]) -> str:
    shown = [str(HubModel(model.repository, model.revision, file.name)) for file in files[:20]]
    return ", ".join(shown) + (f" and {len(files) - 20} more" if len(files) > 20 else "")


def _has_size(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except (FileNotFoundError, NotADirectoryError):
        return False


def _is_inside(name: str) -> bool:
    """Whether an untrusted relative path stays inside its folder."""
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and "\\" not in name and "\0" not in name


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
