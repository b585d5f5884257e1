"""The routes of Ollama's API that do not generate: what is served, and models on disk."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from weft.engine.ipc.client import EngineClient
from weft.errors import ModelFileError
from weft.loading.checkpoint import open_checkpoint
from weft.loading.pull import check_name
from weft.server.admission.keys import ApiKey
from weft.server.api.answer_format import Operation
from weft.server.api.model_names import is_own_name
from weft.server.api.ollama import TAG, OllamaError
from weft.server.api.ollama_pull import ModelStore, fetchable_name, in_use
from weft.server.api.ollama_writer import STREAM_TYPE, rfc3339
from weft.server.api.response_shapes import Shape
from weft.server.api.schema import read
from weft.server.api.services import Services
from weft.server.errors import ApiError, json_response, refusal, warning_header
from weft.server.http.bodies import read_body
from weft.server.http.loopback import is_loopback
from weft.server.http.scope import KEY
from weft.server.stream.events import unless_disconnected
from weft.server.vectors.model import VectorModel
from weft.text.infill import can_infill

_VERSION = "0.13.4"
"""The version of Ollama whose API this is. Codex refuses older ones."""
_MAX_BODY = 64 << 10
_NEVER = "2318-01-01T00:00:00Z"
"""The `expires_at` of a model that is never unloaded."""
_LONGEST_TEXT = 1000
"""Longer texts of a model's metadata, such as its template, are left out of model_info."""

T = TypeVar("T", bound=msgspec.Struct)


# ---------------------------------------------------------------------- the types of requests and responses


_WITHOUT_EFFECT = Meta(description="Accepted, without effect.")


class NamedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A request about one model."""

    model: str = ""
    name: Annotated[str, Meta(description="The older name of model.")] = ""

    @property
    def wanted(self) -> str:
        if not (self.model or self.name):
            raise refusal("model is required", "model")
        return self.model or self.name


class ShowRequest(NamedModel, frozen=True, kw_only=True):
    verbose: Annotated[bool, _WITHOUT_EFFECT] = False


class PullRequest(NamedModel, frozen=True, kw_only=True):
    stream: Annotated[bool, Meta(description="Send progress as lines of JSON. Default: true.")] = True
    insecure: Annotated[bool, _WITHOUT_EFFECT] = False


class DeleteRequest(NamedModel, frozen=True, kw_only=True):
    pass


class Details(Shape):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class ListedModel(Shape):
    name: str
    model: str
    modified_at: str
    size: Annotated[int, Meta(description="Bytes of its files.")]
    digest: Annotated[str, Meta(description="It changes when the files of the model change.")]
    details: Details


class ModelTags(Shape):
    models: list[ListedModel]


class LoadedModel(Shape):
    name: str
    model: str
    size: Annotated[int, Meta(description="Bytes of weights and KV cache.")]
    digest: str
    details: Details
    expires_at: str
    size_vram: Annotated[int, Meta(description="The same on a GPU; 0 on a CPU.")]
    context_length: int


class LoadedModels(Shape):
    models: list[LoadedModel]


class ShownModel(Shape):
    details: Details
    model_info: dict[str, Any]
    capabilities: list[Literal["completion", "tools", "thinking", "insert"]]
    modified_at: str
    modelfile: str
    parameters: str
    template: str | UnsetType = UNSET


class OllamaVersion(Shape):
    version: str


class PullStatus(Shape):
    status: str
    digest: str | UnsetType = UNSET
    total: int | UnsetType = UNSET
    completed: int | UnsetType = UNSET


def _operation(summary: str, description: str, answer: type | None, **more: Any) -> Operation:
    return Operation(summary, description, TAG, answer, error=OllamaError, **more)


_REFUSED = {
    "/api/create": "weft makes no models: serve a file with `weft serve PATH`",
    "/api/copy": "weft has no copies of models: give a model more names with `weft serve --name`",
    "/api/push": "weft uploads nothing",
}
"""Routes that only refuse, and why. The OpenAPI document leaves them out."""
OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("get", "/api/tags"): _operation("List models for clients of Ollama", "", ModelTags),
    ("get", "/api/ps"): _operation("List loaded models", "", LoadedModels),
    ("get", "/api/version"): _operation("Version of Ollama's API", "", OllamaVersion),
    ("post", "/api/show"): _operation(
        "Describe a model for clients of Ollama",
        "Accepts any name of the served model.",
        ShownModel,
        request=ShowRequest,
        errors=(400, 404, 413),
    ),
    ("post", "/api/pull"): _operation(
        "Download a model",
        "Accepts `hf:owner/name` (also `hf.co/owner/name`) and `default`. Names of the served model succeed at once. "
        "Needs an admin key, or a server without keys on a loopback address.",
        PullStatus,
        request=PullRequest,
        event=PullStatus,
        event_note="Each line is one object of this type. The last one has the status success, or is an error.",
        event_media_type=STREAM_TYPE,
        errors=(400, 404, 413, 429, 500),
    ),
    ("delete", "/api/delete"): _operation(
        "Delete a downloaded model",
        "Not the served one. Needs an admin key, or a server without keys on a loopback address.",
        None,
        request=DeleteRequest,
        errors=(400, 404, 409, 413, 429, 500),
        media_type="text/plain",
    ),
}
"""The part of the OpenAPI document for these routes."""


# ---------------------------------------------------------------------- the served model


@dataclass(frozen=True)
class _Facts:
    """Facts about a served model, read from its files."""

    details: dict[str, Any]
    info: dict[str, Any]
    parameters: dict[str, Any]
    size: int
    modified: datetime
    digest: str


def _facts(path: Path) -> _Facts:
    """Reads the headers of the files, without the weights."""
    checkpoint = open_checkpoint(path)
    kind, _, quantisation = checkpoint.stored_as.partition(" ")
    states = [file.stat() for file in sorted(checkpoint.files)] or [path.stat()]
    count, family = checkpoint.parameter_count, checkpoint.architecture
    prefix = "" if checkpoint.layout == "gguf" else f"{family}."
    info = {
        f"{prefix}{name}": value
        for name, value in checkpoint.metadata.items()
        if isinstance(value, int | float | bool) or (isinstance(value, str) and len(value) <= _LONGEST_TEXT)
    }
    identity = repr([(one.st_size, one.st_mtime_ns) for one in states])
    return _Facts(
        {
            "parent_model": "",
            "format": kind.lower(),
            "family": family,
            "families": [family],
            "parameter_size": f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.2f}M",
            "quantization_level": quantisation,
        },
        {**info, "general.architecture": family, "general.parameter_count": count},
        dict(checkpoint.generation),
        sum(one.st_size for one in states),
        datetime.fromtimestamp(max(one.st_mtime for one in states), UTC),
        hashlib.sha256(identity.encode()).hexdigest(),
    )


@dataclass(frozen=True)
class _Served:
    """One served model."""

    names: Sequence[str]
    path: Path
    engine: EngineClient
    context: int
    vectors: VectorModel | None = None
    """The model, if it makes vectors or scores. None: it generates."""


def _served_models(services: Services) -> list[_Served]:
    settings, models = services.settings, services.models
    found = []
    if models.generator is not None:
        context = models.generator.max_sequence_length
        found.append(_Served(settings.names, Path(settings.model), models.generator, context))
    for each in models.vector_models:
        found.append(_Served(each.names, Path(each.path), each.engine, each.spec.max_tokens, each))
    return found


def _vector_info(facts: _Facts, model: VectorModel) -> dict[str, Any]:
    is_embedder = model.spec.kind == "embed"
    return {f"{facts.details['family']}.embedding_length": model.spec.dimensions} if is_embedder else {}


def _vector_capabilities(model: VectorModel) -> list[str]:
    return ["embedding"] if model.spec.kind == "embed" else ["rerank"]


class _OllamaModels:
    """Answers the requests of one server."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._served = _served_models(services)
        paths = [each.path for each in self._served]
        self._store = ModelStore(paths, services.settings.silence_seconds)
        self._known: dict[Path, _Facts] = {}
        """Path of a model -> its facts. They are read at the first request that needs them, not at the start of the server."""

    def routes(self) -> list[Route]:
        post, get = ["POST"], ["GET"]
        return [
            Route("/api/tags", self._tags, methods=get),
            Route("/api/ps", self._ps, methods=get),
            Route("/api/version", self._version, methods=get),
            Route("/api/show", self._show, methods=post),
            Route("/api/pull", self._pull, methods=post),
            Route("/api/delete", self._delete, methods=["DELETE"]),
            *(
                Route(path, partial(_refuse, why), methods=post, include_in_schema=False)
                for path, why in _REFUSED.items()
            ),
        ]

    async def _facts(self, served: _Served) -> _Facts:
        if served.path not in self._known:
            self._known[served.path] = await asyncio.to_thread(_facts, served.path)
        return self._known[served.path]

    async def _version(self, request: Request) -> Response:
        return json_response({"version": _VERSION})

    async def _tags(self, request: Request) -> Response:
        models = []
        for served in self._served:
            facts = await self._facts(served)
            shared = {
                "modified_at": rfc3339(facts.modified),
                "size": facts.size,
                "digest": facts.digest,
                "details": facts.details,
            }
            models += [{"name": name, "model": name, **shared} for name in served.names]
        return json_response({"models": models})

    async def _ps(self, request: Request) -> Response:
        models = []
        for served in self._served:
            facts, info, name = await self._facts(served), served.engine.info, served.names[0]
            assert info is not None
            size = info.weight_bytes + info.cache_bytes
            is_on_gpu = served.vectors is None and self._services.settings.backend == "cuda"
            models.append(
                {
                    "name": name,
                    "model": name,
                    "size": size,
                    "digest": facts.digest,
                    "details": facts.details,
                    "expires_at": _NEVER,
                    "size_vram": size if is_on_gpu else 0,
                    "context_length": served.context,
                }
            )
        return json_response({"models": models})

    async def _show(self, request: Request) -> Response:
        asked, headers = await _read(ShowRequest, request)
        vectors = self._services.models.vector_model(asked.wanted)
        served = next(each for each in self._served if each.vectors is vectors)
        facts, context = await self._facts(served), served.context
        template = self._services.text.chat_template if vectors is None else None
        parameters = {**facts.parameters, "num_ctx": context}
        shown = {
            "details": facts.details,
            "model_info": {
                **facts.info,
                f"{facts.details['family']}.context_length": context,
                **({} if vectors is None else _vector_info(facts, vectors)),
            },
            "capabilities": self._capabilities() if vectors is None else _vector_capabilities(vectors),
            "modified_at": rfc3339(facts.modified),
            "modelfile": f"# Served by weft.\nFROM {served.names[0]}\n",
            "parameters": "\n".join(f"{name:<30} {value}" for name, value in parameters.items()),
            **({} if template is None else {"template": template.source}),
        }
        return json_response(shown, headers=headers)

    def _capabilities(self) -> list[str]:
        text = self._services.text
        has = {
            "completion": True,
            "tools": text.chat_template is not None,
            "thinking": text.reasoning is not None,
            "insert": can_infill(text.tokenizer),
        }
        return [name for name, is_there in has.items() if is_there]

    # ------------------------------------------------------------------ models on disk

    async def _pull(self, request: Request) -> Response:
        asked, headers = await _read(PullRequest, request)
        name, fetchable = asked.wanted, fetchable_name(asked.wanted)
        if self._is_served(name) or (fetchable is None and self._services.models.uses_of(name)):
            lines: AsyncIterator[dict[str, Any]] = _success()
        else:
            self._check_may_change(request)
            if fetchable is None:
                message = f"{name!r:.200} is no model that weft can pull; it pulls hf:OWNER/NAME, hf:OWNER/NAME:Q4_K_M and default"
                raise ApiError(404, message, param="model", code="model_not_found")
            # In a thread: what it imports takes time to load.
            await asyncio.to_thread(_check_hub_name, fetchable)
            work = self._store.pull(fetchable)
            if not asked.stream:
                await unless_disconnected(request.receive, work.wait())
            lines = self._store.lines(work, fetchable)
        if not asked.stream:
            return json_response({"status": "success"}, headers=headers)
        encoded = (msgspec.json.encode(line) + b"\n" async for line in lines)
        return StreamingResponse(encoded, headers=headers, media_type=STREAM_TYPE)

    async def _delete(self, request: Request) -> Response:
        asked, headers = await _read(DeleteRequest, request)
        name = asked.wanted
        self._check_may_change(request)
        if self._is_served(name):
            raise in_use(name)
        await unless_disconnected(request.receive, self._store.remove(fetchable_name(name) or name))
        return Response(status_code=200, headers=headers, media_type="text/plain")

    def _is_served(self, name: str) -> bool:
        return any(is_own_name(name, each.names) for each in self._served)

    def _check_may_change(self, request: Request) -> None:
        """Raises a 403 if the client may not change the models on disk."""
        settings = self._services.settings
        key: ApiKey | None = request.scope[KEY]
        if settings.api_keys:
            if key is None or not key.admin:
                message = "pulling and deleting models needs an admin key"
                raise ApiError(403, message, code="admin_key_required")
        elif not is_loopback(settings.host):
            message = (
                "a server without API keys pulls and deletes models only if it listens on a loopback address; "
                "start it with --api-key-file and an admin key, or use `weft pull` and `weft remove`"
            )
            raise ApiError(403, message, code="admin_key_required")


def _check_hub_name(name: str) -> None:
    try:
        check_name(name)
    except ModelFileError as error:
        raise ApiError(400, str(error), param="model", code="invalid_value") from None


async def _success() -> AsyncIterator[dict[str, Any]]:
    """The lines of a pull that has nothing to do."""
    yield {"status": "pulling manifest"}
    yield {"status": "success"}


async def _refuse(why: str, request: Request) -> Response:
    raise ApiError(501, why, code="unsupported")


async def _read(kind: type[T], request: Request) -> tuple[T, dict[str, str]]:
    """Reads a body, which must be short. Also returns the headers of the response."""
    body = await read_body(request)
    if len(body) > _MAX_BODY:
        message = f"the body has {len(body)} bytes; allowed here: {_MAX_BODY}"
        raise ApiError(413, message, code="body_too_large")
    asked, unknown = read(kind, bytes(body))
    return asked, warning_header(unknown)


def routes(services: Services) -> Sequence[Route]:
    return _OllamaModels(services).routes()
