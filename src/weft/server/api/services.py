"""What the routes of an API may use of the server."""

from __future__ import annotations

from typing import Protocol

from weft.engine.ipc.client import EngineClient
from weft.server.internal import InternalReply, InternalRequest
from weft.server.settings import ServerSettings
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
    def created(self) -> int:
        """When the server started, in seconds since 1970."""
        ...

    def check_model(self, name: str | None) -> None:
        """Raises a 404 if requests may not use this name of a model."""
        ...

    async def send_internal(self, path: str, body: bytes, request: InternalRequest) -> InternalReply:
        """Sends a POST request to the server itself."""
        ...
