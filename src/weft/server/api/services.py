"""What the routes of an API may use of the server."""

from __future__ import annotations

from typing import Protocol

from weft.engine.ipc.client import EngineClient
from weft.server.settings import ServerSettings
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
    def created(self) -> int:
        """When the server started, in seconds since 1970."""
        ...

    def check_model(self, name: str | None) -> None:
        """Raises a 404 if requests may not use this name of a model."""
        ...
