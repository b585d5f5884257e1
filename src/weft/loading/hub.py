"""Fetches models from the Hugging Face hub and keeps them so that they work without it afterwards.

huggingface_hub answers what is in a repository, where its files are, and with which token; it follows HF_TOKEN,
HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE. It cannot go on with a download after the process was killed, so the bytes are
fetched by `weft.loading.download`. The cache under `hub/` looks like this:

    owner--name/COMMIT/...    files; each gets its name once it is whole and checked
    NAME.json                 a manifest, written last: what makes of these files a model, and says which ones
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
    errors_of_the_disk,
    models_directory,
    move_into_place,
    only_one_pull,
    partial_path,
    require_room,
)
from weft.loading.checksum import Expected, matches
from weft.loading.download import Location, download
from weft.loading.files import PICKLE_SUFFIXES
from weft.loading.gguf import other_parts

_TIMEOUT_SECONDS = 20.0
_FORMS = "hf:OWNER/NAME, hf:OWNER/NAME:Q4_K_M or hf:OWNER/NAME/FILE.gguf, each with @REVISION where wanted"
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")


@dataclass(frozen=True)
class HubModel:
    """What `hf:...` names: a repository at a revision and, where GGUF files are meant, which of them."""

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
    """One pulled model: its files, relative to the commit's folder, as they were checked."""

    model: str
    commit: str
    files: tuple[Expected, ...]

    @property
    def folder(self) -> Path:
        return parse_hub_name(self.model).folder / self.commit

    @property
    def path(self) -> Path:
        """What the loader is given: the GGUF file, the first of several, or the folder."""
        is_gguf = all(file.name.endswith(".gguf") for file in self.files)
        return self.folder / self.files[0].name if is_gguf else self.folder

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    def missing(self) -> list[str]:
        """The files that are gone or have another size; they were checked before the manifest was written."""
        return [file.name for file in self.files if not _has_size(self.folder / file.name, file.size)]


def hub_directory() -> Path:
    return models_directory() / "hub"


def parse_hub_name(name: str) -> HubModel:
    """`hf:owner/name`, with a file or a quantisation, and a revision."""
    rest, _, revision = name.removeprefix("hf:").partition("@")
    found = re.fullmatch(r"([\w][\w.-]*/[\w][\w.-]*)(?:/(.+\.gguf)|:([\w.-]+))?", rest, re.ASCII)
    file = found[2] or "" if found else ""
    if found is None or not _is_inside(file) or ("@" in name and not revision):
        raise ModelFileError(f"{name}: is not a name on the hub; allowed: {_FORMS}")
    return HubModel(found[1], revision or "main", file, found[3] or "")


def read_manifest(path: Path) -> Manifest | None:
    """None where there is none, or one that this version cannot read: the model is then fetched again."""
    try:
        content = json.loads(path.read_text())
        files = tuple(Expected(**file) for file in content["files"])
        manifest = Manifest(content["model"], content["commit"], files)
        is_sound = parse_hub_name(manifest.model).manifest_path.name == path.name and bool(files)
        is_sound = is_sound and all(_is_inside(name) for name in (manifest.commit, *(f.name for f in files)))
        return manifest if is_sound else None
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError, ModelFileError):
        return None


def manifests() -> Iterator[Manifest]:
    for path in sorted(hub_directory().glob("*.json")):
        if (manifest := read_manifest(path)) is not None:
            yield manifest


def pull_hub_model(name: str, progress: Progress, verify: bool = False) -> Path:
    """The file or folder of the model. One that is here is used as it is, without asking the hub, unless `verify`
    wants the newest commit of the revision and every checksum looked at."""
    model = parse_hub_name(name)
    with errors_of_the_disk(hub_directory()):
        kept = read_manifest(model.manifest_path)
        if kept is not None and not verify and not kept.missing():
            return kept.path
        with only_one_pull(model.lock_path, progress):
            kept = read_manifest(model.manifest_path)
            if kept is not None and not verify and not kept.missing():
                return kept.path
            progress(PullProgress("find"))
            repository = _Repository(model)
            manifest = repository.listing(kept)
            _fetch(repository, manifest, kept, progress, verify)
            _write(model, manifest)
            _sweep(model, kept)
    return manifest.path


def begun_repositories() -> Iterator[HubModel]:
    """Those of which some bytes came, and no model yet."""
    finished = {parse_hub_name(manifest.model).folder for manifest in manifests()}
    for folder in sorted(hub_directory().glob("*--*/")):
        if folder not in finished:
            yield HubModel(folder.name.replace("--", "/", 1))


def remove_hub_model(model: HubModel, progress: Progress) -> None:
    """Forget a pulled model, or one that was begun, and delete the files that no other one uses."""
    with only_one_pull(model.lock_path, progress):
        manifest = read_manifest(model.manifest_path)
        model.manifest_path.unlink(missing_ok=True)
        _sweep(model, manifest)


def _fetch(
    repository: _Repository, manifest: Manifest, kept: Manifest | None, progress: Progress, verify: bool
) -> None:
    """Bring every file of the manifest into its folder, whole and checked."""
    total, done = manifest.size, 0
    to_fetch: list[Expected] = []
    for file in manifest.files:
        target = manifest.folder / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        check = _from(done, total, "check", progress)
        is_here = matches(target, file, check) if verify else _has_size(target, file.size)
        if is_here or _take_over(repository.model, manifest, kept, file, check):
            done += file.size
        else:
            to_fetch.append(file)
    partials = [partial_path(manifest.folder / file.name) for file in to_fetch]
    begun = sum(path.stat().st_size for path in partials if path.exists())
    require_room(manifest.folder, sum(file.size for file in to_fetch) - begun)
    for file, partial in zip(to_fetch, partials, strict=True):
        locate = repository.locator(manifest.commit, file)
        download(locate, partial, file, _from(done, total, "download", progress))
        move_into_place(partial, manifest.folder / file.name)
        done += file.size


def _from(base: int, total: int, stage: str, progress: Progress) -> Callable[[int], None]:
    return lambda done: progress(PullProgress(stage, base + done, total))


def _take_over(
    model: HubModel, manifest: Manifest, kept: Manifest | None, file: Expected, check: Callable[[int], None]
) -> bool:
    """Use a copy that is on this machine already: from the commit pulled before, or from the hub's own cache."""
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


def _write(model: HubModel, manifest: Manifest) -> None:
    content = {
        "model": manifest.model,
        "commit": manifest.commit,
        "files": [dataclasses.asdict(file) for file in manifest.files],
    }
    draft = partial_path(model.manifest_path)
    draft.write_text(json.dumps(content, indent=1) + "\n")
    move_into_place(draft, model.manifest_path)


def _sweep(model: HubModel, old: Manifest | None) -> None:
    """Delete what `old` named and nothing names now, and commits that nothing names, with what was begun in them.
    Whatever runs with these files keeps them until it ends."""
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
    """What the hub says about one repository, in words for whoever asked for the model."""

    def __init__(self, model: HubModel) -> None:
        self.model = model

    def listing(self, kept: Manifest | None) -> Manifest:
        """The model's files at the newest commit of its revision. Offline it is what is here."""
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
                f"{self.model}: is not on this machine, and HF_HUB_OFFLINE forbids to fetch it; unset it once"
            ) from None
        # Which library's errors these are depends on the version of huggingface_hub: requests, httpx or another.
        except Exception as error:
            raise self._refused(error, kept) from error
        files = [_expected(sibling) for sibling in info.siblings or []]
        chosen = _choose(self.model, [file for file in files if file is not None])
        if not re.fullmatch(r"[0-9a-f]{40,64}", info.sha or ""):
            raise ModelFileError(
                f"{self.model}: the hub named the commit {info.sha!r}; expected 40 hex digits"
            )
        return Manifest(str(self.model), str(info.sha), tuple(chosen))

    def locator(self, commit: str, file: Expected) -> Callable[[], Location]:
        """Asks the hub anew each time it is called: what it answers may be an address that expires."""
        from huggingface_hub import get_hf_file_metadata, hf_hub_url
        from huggingface_hub.errors import HfHubHTTPError
        from huggingface_hub.utils import build_hf_headers

        url = hf_hub_url(self.model.repository, file.name, revision=commit)

        def locate() -> Location:
            try:
                location = get_hf_file_metadata(url, timeout=_TIMEOUT_SECONDS).location
            except Exception as error:
                if isinstance(error, HfHubHTTPError) and error.response.status_code < 500:
                    raise self._refused(error, None) from error
                raise ConnectionError(_first_line(error)) from error
            # Past the hub's own host the address is signed, and the token is nobody's business.
            is_same_host = urlsplit(location)[:2] == urlsplit(url)[:2]
            headers = build_hf_headers(library_name="weft")
            return Location(location, headers if is_same_host else {})

        return locate

    def _refused(self, error: Exception, kept: Manifest | None) -> ModelFileError:
        from huggingface_hub import constants, get_token
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

        model, endpoint = self.model, constants.ENDPOINT
        status = getattr(getattr(error, "response", None), "status_code", None)
        how_to_log_in = "set HF_TOKEN to a token of an account that may read it, or run `hf auth login`"
        if isinstance(error, GatedRepoError):
            if get_token():
                how_to_log_in = (
                    "wait until its owner grants access if you did; the token that was sent has none"
                )
            said = f"is gated: accept its terms at {endpoint}/{model.repository}, then {how_to_log_in}"
        elif isinstance(error, RevisionNotFoundError):
            said = f"the repository has no revision {model.revision!r}; leave '@...' out for the newest"
        elif isinstance(error, RepositoryNotFoundError):
            said = (
                f"there is no such model at {endpoint}, or it is private: check the name, or {how_to_log_in}"
            )
        elif status in (401, 403):
            said = f"the hub answered {status} ({_first_line(error)}): {how_to_log_in}"
        elif status is not None:
            said = f"the hub answered {status} ({_first_line(error)}); try again later"
        else:
            said = (
                f"{endpoint} cannot be reached ({_first_line(error)}); check the network, "
                "or name a mirror with HF_ENDPOINT"
            )
        if kept is not None and not kept.missing():
            said += f". What was pulled before (commit {kept.commit[:12]}) is still here and works"
        return ModelFileError(f"{model}: {said}")


def _expected(sibling: Any) -> Expected | None:
    """A file of the repository; None for one without a size or a checksum, or with a name that leads elsewhere."""
    name = sibling.rfilename
    if not _is_inside(name):
        return None
    if sibling.lfs is not None:
        return Expected(name, sibling.lfs.size, "sha256", sibling.lfs.sha256)
    if sibling.size is None or sibling.blob_id is None:
        return None
    return Expected(name, sibling.size, "git", sibling.blob_id)


def _choose(model: HubModel, files: list[Expected]) -> list[Expected]:
    """The files that make the model, out of all in the repository. Never code, never pickles."""
    ggufs = [file for file in files if file.name.endswith(".gguf") and "mmproj" not in file.name.lower()]
    if model.file or model.quantisation:
        return _choose_gguf(model, ggufs)
    here = [file for file in files if "/" not in file.name]
    safetensors = [file for file in here if file.name.endswith(".safetensors")]
    # Some repositories hold the same weights twice; these are the names that every loader knows.
    weights = [file for file in safetensors if _WEIGHTS.fullmatch(file.name)] or safetensors
    if weights and any(file.name == "config.json" for file in here):
        small = [f for f in here if f.name.endswith((".json", ".jinja")) or f.name == "tokenizer.model"]
        return [*small, *weights]
    if ggufs:
        return _choose_gguf(model, ggufs)
    pickles = [file.name for file in files if file.name.endswith(PICKLE_SUFFIXES)]
    if pickles:
        raise ModelFileError(
            f"{model}: has its weights only as {pickles[0]}, a pickle, which can run any code when it is read; "
            "weft reads safetensors and GGUF. Look for a conversion of the model on the hub"
        )
    raise ModelFileError(
        f"{model}: has neither safetensors beside a config.json nor a GGUF file among its {len(files)} files; "
        "it is not a model that weft can read"
    )


def _choose_gguf(model: HubModel, files: list[Expected]) -> list[Expected]:
    """The one GGUF file that is meant; where it is the first of several that are one model, all of them."""
    later_parts = {part for file in files for part in other_parts(file.name)}
    firsts = [file for file in files if file.name not in later_parts]
    wanted = re.compile(rf"(^|[-._/]){re.escape(model.quantisation)}(?=[-.])", re.IGNORECASE)
    if model.file:
        found = [file for file in firsts if file.name == model.file]
    else:
        found = [file for file in firsts if not model.quantisation or wanted.search(file.name)]
    if len(found) != 1:
        what = model.file or model.quantisation
        if not files:
            raise ModelFileError(f"{model}: there is no {what}: the repository has no GGUF file")
        of_these = (
            f"{len(found) or 'none'} of them {'are' if len(found) > 1 else 'is'} {what}; " if what else ""
        )
        raise ModelFileError(
            f"{model}: has {len(firsts)} GGUF models; {of_these}name one: {_names(model, found or firsts)}"
        )
    by_name = {file.name: file for file in files}
    parts = [found[0].name, *other_parts(found[0].name)]
    if missing := [name for name in parts if name not in by_name]:
        raise ModelFileError(
            f"{model}: {missing[0]} is missing: the repository has {len(parts) - len(missing)} of the "
            f"{len(parts)} files of this model; choose another one"
        )
    return [by_name[name] for name in parts]


def _names(model: HubModel, files: list[Expected]) -> str:
    shown = [str(HubModel(model.repository, model.revision, file.name)) for file in files[:20]]
    return ", ".join(shown) + (f" and {len(files) - 20} more" if len(files) > 20 else "")


def _has_size(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except (FileNotFoundError, NotADirectoryError):
        return False


def _is_inside(name: str) -> bool:
    """Whether a name from outside stays under the folder it is put in."""
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and "\\" not in name and "\0" not in name


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
