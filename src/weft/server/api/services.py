"""What the routes of an API may use of the server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from weft.engine.ipc.client import EngineClient
from weft.server.api.answer_format import AnswerFormat
from weft.server.internal import InternalReply, InternalRequest
from weft.server.settings import ServerSettings
from weft.server.state.files import FileStore
from weft.server.state.store import Store
from weft.text.model_text import ModelText


class Services(Protocol):
    """`weft.server.app.ServerApp` implements it."""

    @property
    def settings(self) -> ServerSettings: ...
    @property
    def text(self) -> ModelText: ...
    @property
    def engine(self) -> EngineClient: ...
    @property
    def store(self) -> Store: ...
    @property
    def files(self) -> FileStore: ...
    @property
    def formats(self) -> Mapping[str, AnswerFormat[Any]]:
        """The routes that generate, by path."""
        ...

    @property
    def created(self) -> int:
        """When the server started, in seconds since 1970."""
        ...

    def check_model(self, name: str | None) -> None:
        """Raises a 404 if requests may not use this name of a model."""
        ...

    def wake_batches(self) -> None:
        """Makes the batches of the store run, or stop, as their rows say."""
        ...

    async def send_internal(self, path: str, body: bytes, request: InternalRequest) -> InternalReply:
        """Sends a POST request to the server itself."""
        ...
