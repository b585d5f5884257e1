"""The parts of the server that the routes and formats of an API may use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from weft.engine.ipc.client import EngineClient
from weft.request import RequestId
from weft.server.admission.keys import ApiKey
from weft.server.http.byte_budget import RequestBytes
from weft.server.internal import InternalReply, InternalRequest
from weft.server.models import ModelRegistry
from weft.server.plain_requests import PlainRequests
from weft.server.settings import ServerSettings
from weft.server.state.files import FileStore
from weft.server.state.store import Store
from weft.server.tasks import Tasks
from weft.text.model_text import ModelText

if TYPE_CHECKING:
    from weft.server.admission.active_requests import ActiveRequests
    from weft.server.api.answer_format import AnswerFormat
    from weft.server.learned.answers import AnswerKeeper
    from weft.server.learned.keeper import LearnedKeeper
    from weft.server.live.feed import LiveFeed
    from weft.server.memory.document_memory import DocumentMemory


class Services(Protocol):
    """The server, as routes and formats see it. `weft.server.app.ServerApp` implements it."""

    @property
    def settings(self) -> ServerSettings: ...
    @property
    def text(self) -> ModelText: ...
    @property
    def engine(self) -> EngineClient: ...
    @property
    def models(self) -> ModelRegistry:
        """All models of the server. `engine` and `text` belong to MODEL."""
        ...

    @property
    def plain_requests(self) -> PlainRequests:
        """Handles requests that generate nothing."""
        ...

    @property
    def store(self) -> Store: ...
    @property
    def tasks(self) -> Tasks:
        """Work that goes on after its request has ended."""
        ...

    @property
    def files(self) -> FileStore: ...
    @property
    def answers(self) -> AnswerKeeper:
        """The answers that are kept for feedback."""
        ...

    @property
    def learned(self) -> LearnedKeeper:
        """Keeps what engines learned."""
        ...

    @property
    def memory(self) -> DocumentMemory: ...
    @property
    def formats(self) -> Mapping[str, AnswerFormat[Any]]:
        """The routes that generate, by path."""
        ...

    @property
    def created(self) -> int:
        """When the server started, in seconds since 1970."""
        ...

    def check_model(self, name: str | None) -> None:
        """Raises a 404 for an unknown name of a model, and a 400 for a model that does not generate."""
        ...

    def record_vectors(self, model: str, num_inputs: int, num_tokens: int, seconds: float) -> None:
        """Adds a request for vectors or scores to the metrics."""
        ...

    @property
    def active_requests(self) -> ActiveRequests: ...
    @property
    def live(self) -> LiveFeed: ...
    async def text_of(self, tokens: Sequence[int]) -> str:
        """The text of tokens, with control tokens."""
        ...

    def wake_batches(self) -> None:
        """Call after a change of a batch in the store: starts or stops batches at once, and not only at the next poll."""
        ...

    async def send_internal(self, path: str, body: bytes, request: InternalRequest) -> InternalReply:
        """Sends a POST request to the server itself."""
        ...


@dataclass(frozen=True)
class Caller:
    """The server, and the key, the id and the body of a request to it."""

    services: Services
    key: ApiKey | None
    request_id: RequestId
    body: RequestBytes
    """Counts the bytes of the request: its body, and what is loaded for it."""
    is_internal: bool = False
    """The server sent the request to itself."""

    @property
    def owner(self) -> str:
        """The owner of the rows that the request stores."""
        return owner_of_key(self.key)


def owner_of_key(key: ApiKey | None) -> str:
    return "" if key is None else key.owner
