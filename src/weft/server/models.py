"""The models of a server by name: one generates, others make vectors or scores. Owns the names that requests may use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from weft.engine.ipc.client import EngineClient
from weft.server.api.model_names import MAIN_ROUTES, is_alias, is_own_name
from weft.server.errors import ApiError, refusal
from weft.server.settings import ServerSettings
from weft.server.vectors.model import VectorModel

Use = Literal["generate", "embed", "rerank"]

_DOES = {"generate": "generates text", "embed": "makes embeddings", "rerank": "scores documents"}
_MISSING = {
    "generate": "start it with a model that generates, and pass this one with --embedder or --reranker",
    "embed": "start it with --embedder MODEL (--embedder default is all-MiniLM-L6-v2)",
    "rerank": "start it with --reranker MODEL: a cross-encoder or Qwen3-Reranker. Embeddings are no substitute",
}


class ModelRegistry:
    """Belongs to one event loop."""

    def __init__(
        self, settings: ServerSettings, generator: EngineClient | None, vector_models: Sequence[VectorModel]
    ) -> None:
        """`generator` is the engine of the model that generates. None: the server has none."""
        self.generator = generator
        self.vector_models = tuple(vector_models)
        self.embedder = self._first("embed")
        """The model that makes vectors; None if the server has none."""
        self.reranker = self._first("rerank")
        """The model that scores documents; None if the server has none."""
        self._aliases = settings.aliases
        self._names: dict[Use, tuple[str, ...]] = {
            "generate": () if generator is None else settings.names,
            "embed": () if self.embedder is None else self.embedder.names,
            "rerank": () if self.reranker is None else self.reranker.names,
        }

    @property
    def main_use(self) -> Use:
        """The use of the model that is given as MODEL."""
        return "generate" if self.generator is not None else self.vector_models[0].spec.kind

    def engines(self) -> Iterator[tuple[str, Use, EngineClient]]:
        """The name, the use and the engine of each model. MODEL is the first one."""
        if self.generator is not None:
            yield self._names["generate"][0], "generate", self.generator
        for model in self.vector_models:
            yield model.name, model.spec.kind, model.engine

    def uses_of(self, name: str) -> list[Use]:
        """The use of the model with this name, or of the models with this alias. An alias may fit several models."""
        exact: list[Use] = [use for use, names in self._names.items() if is_own_name(name, names)]
        aliased: list[Use] = [
            use for use, names in self._names.items() if names and is_alias(name, names, self._aliases)
        ]
        return exact or aliased

    def check(self, name: str | None, use: Use) -> None:
        """Checks the model name of a request. Raises a 404 for a name that no model has, and a 400 for a model with
        another use. `name` None: the request takes the model that has this use."""
        uses = [use] if name is None else self._known_uses(name)
        if not self._names[use]:
            others = ", ".join(f"{other!r:.200} {_DOES[each]}" for other, each, _ in self.engines())
            message = f"this server has no model that {_DOES[use]} ({others}); {_MISSING[use]}"
            raise refusal(message, "model", "wrong_model")
        if use not in uses:
            message = f"the model {name!r:.200} {_DOES[uses[0]]}; send its requests to {MAIN_ROUTES[uses[0]]}"
            raise refusal(message, "model", "wrong_model")

    def engine_of_route(self, path: str) -> EngineClient | None:
        """The engine that answers the requests of a route; None: the server has no model for it."""
        if path == MAIN_ROUTES["embed"]:
            return None if self.embedder is None else self.embedder.engine
        return self.generator

    def vector_model(self, name: str) -> VectorModel | None:
        """The model with this name, if it makes vectors or scores. None: it is the model that generates. Raises a 404 for an
        unknown name."""
        use = self._known_uses(name)[0]
        return None if use == "generate" else self._of_use(use)

    def for_vectors(self, name: str | None, use: Literal["embed", "rerank"]) -> VectorModel:
        """The model of a request. Raises as `check` does, and a 503 while its engine is not ready."""
        self.check(name, use)
        model = self._of_use(use)
        model.check_ready()
        return model

    async def close(self) -> None:
        for model in self.vector_models:
            await model.close()

    def _known_uses(self, name: str) -> list[Use]:
        if uses := self.uses_of(name):
            return uses
        known = ", ".join(f"{each!r:.200}" for each, _, _ in self.engines())
        message = f"there is no model {name!r:.200}; this server has {known}"
        raise ApiError(404, message, param="model", code="model_not_found")

    def _of_use(self, use: Use) -> VectorModel:
        model = self.embedder if use == "embed" else self.reranker
        assert model is not None
        return model

    def _first(self, kind: Use) -> VectorModel | None:
        return next((one for one in self.vector_models if one.spec.kind == kind), None)
