"""Fetches the models of `weft serve` that make vectors or scores, and decides how their engines are built."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from weft.backends.registry import EMBEDDERS
from weft.cli.model import fetch, shown_name
from weft.engine.ipc.launch import shared_cores
from weft.errors import InvalidRequestError
from weft.loading.default_model import DEFAULT_EMBEDDER_NAME, DEFAULT_MODEL
from weft.server.settings import ServerSettings
from weft.server.vectors.model_files import VectorModelFiles

if TYPE_CHECKING:
    from weft.embedding import EmbeddingSpec

EMBEDDER = "embedder"
"""The backend of --embedder and --reranker. Beside a MODEL on a GPU they compute on the CPU."""
_DOES = {"embed": "makes embeddings", "rerank": "scores documents for a query"}


def with_vector_models(
    settings: ServerSettings,
) -> tuple[ServerSettings, tuple[VectorModelFiles, ...], EmbeddingSpec | None]:
    """The settings with the backend for MODEL, the models of --embedder and --reranker, and what MODEL computes if it
    makes vectors or scores itself. `settings` has the path of MODEL."""
    spec = _spec_of_model(settings)
    if spec is not None:
        backend = EMBEDDERS[settings.backend]
        config = spec.engine_config(is_on_gpu=backend != EMBEDDER)
        settings = dataclasses.replace(
            settings,
            backend=backend,
            engine=dataclasses.replace(settings.engine, scheduler=config.scheduler, cache=config.cache),
        )
    found: list[VectorModelFiles] = []
    for setting, kind in (("embedder", "embed"), ("reranker", "rerank")):
        model = getattr(settings, setting)
        if model is None:
            continue
        if spec is not None and spec.kind == kind:
            raise InvalidRequestError(
                f"MODEL {settings.names[0]!r} {_DOES[kind]} itself; leave --{setting} out", field=setting
            )
        found.append(_fetched_model(settings, setting, kind, model))  # type: ignore[arg-type]
    _check_names(settings, found)
    settings = _quantising_floats(settings, found)
    return *_sharing_cores(settings, found), spec


def embedder_path(model: str) -> str:
    """The path of an embedding model, which is fetched if needed. "default" is the built-in one."""
    return str(fetch(DEFAULT_EMBEDDER_NAME if model == "default" else model))


def vector_rows(
    settings: ServerSettings, spec: EmbeddingSpec | None, vector_models: Sequence[VectorModelFiles]
) -> Iterator[str]:
    """Lines for the start message."""
    own = () if spec is None else ((settings.names[0], spec),)
    for name, each in (*own, *((one.names[0], one.spec) for one in vector_models)):
        if each.kind == "embed":
            yield f"  embedder  {name}: {each.dimensions} dimensions, at most {each.max_tokens:,} tokens"
        else:
            yield f"  reranker  {name}: at most {each.max_tokens:,} tokens"


def _spec_of_model(settings: ServerSettings) -> EmbeddingSpec | None:
    if settings.backend == "noop" or Path(settings.model) == DEFAULT_MODEL.path:
        return None  # saves the time to open its file before the engine starts
    return _spec(settings.model)


def _spec(path: str) -> EmbeddingSpec | None:
    # Imported here: a start without such models needs neither.
    from weft.loading.checkpoint import open_checkpoint
    from weft.loading.embedding_files import embedding_spec

    return embedding_spec(open_checkpoint(path))


def _quantisation(settings: ServerSettings, path: str) -> str | None:
    """`quantize` for one of several models. None if its weights are not stored as floats: they stay as they are."""
    from weft.loading.checkpoint import open_checkpoint

    quantize = settings.quantize
    return quantize if quantize is not None and open_checkpoint(path).has_float_weights else None


def _quantising_floats(settings: ServerSettings, found: Sequence[VectorModelFiles]) -> ServerSettings:
    """Removes `quantize` for MODEL if MODEL is quantised already and another model has float weights. If no model
    has float weights, `quantize` stays, and the engine of MODEL refuses it."""
    if settings.backend not in ("cpu", EMBEDDER) or not any(one.backend_options["quantize"] for one in found):
        return settings
    options = {**settings.backend_options, "quantize": _quantisation(settings, settings.model)}
    return dataclasses.replace(settings, backend_options=options)


def _fetched_model(
    settings: ServerSettings, setting: str, kind: Literal["embed", "rerank"], model: str
) -> VectorModelFiles:
    """Fetches the model of --embedder or --reranker. Raises if it is of another kind. "default" is only for
    --embedder."""
    if setting == "embedder":
        path = embedder_path(model)
    else:
        path = str(fetch(model))
    spec = _spec(path)
    if spec is None or spec.kind != kind:
        does = "generates text" if spec is None else _DOES[spec.kind]
        raise InvalidRequestError(
            f"--{setting} is {model!r:.200}, a model that {does}; pass one that {_DOES[kind]}", field=setting
        )
    if setting == "embedder" and model == "default":
        names: tuple[str, ...] = (DEFAULT_EMBEDDER_NAME,)
    else:
        shown = Path(shown_name(model)).stem if path.endswith(".gguf") else shown_name(model)
        names = tuple(dict.fromkeys((shown, model)))
    options = {
        "checkpoint": path,
        "threads": settings.threads,
        "quantize": _quantisation(settings, path),
    }
    return VectorModelFiles(spec, path, names, EMBEDDER, options)


def _sharing_cores(
    settings: ServerSettings, found: Sequence[VectorModelFiles]
) -> tuple[ServerSettings, tuple[VectorModelFiles, ...]]:
    """If several engines compute on the CPU, makes them share the cores with a lease (`core_lease`)."""
    is_on_cpu = settings.backend in ("cpu", EMBEDDER)
    if len(found) + is_on_cpu < 2:
        return settings, tuple(found)
    descriptor = shared_cores()
    if is_on_cpu:
        options = {**settings.backend_options, "core_lease": (descriptor, len(found))}
        settings = dataclasses.replace(settings, backend_options=options)
    return settings, tuple(
        dataclasses.replace(each, backend_options={**each.backend_options, "core_lease": (descriptor, place)})
        for place, each in enumerate(found)
    )


def _check_names(settings: ServerSettings, found: Sequence[VectorModelFiles]) -> None:
    used = set(settings.names)
    for each in found:
        if taken := used.intersection(each.names):
            raise InvalidRequestError(
                f"two models have the name {min(taken)!r:.200}; give MODEL another one with --name",
                field="names",
            )
        used.update(each.names)
