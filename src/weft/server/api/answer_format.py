"""What an API format is: how its requests are read, and how its answers are written.

An `AnswerFormat` serves one route and has no state. For each request it makes an `AnswerWriter`, which owns the state
of the response. No other module depends on the format of a request.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Protocol, TypeVar

from weft.request import GenerationResult, Grammar, Priority, SamplingParams, TokenLogprobs
from weft.server.api.field_docs import Field
from weft.server.api.tool_use import NO_TOOLS, ToolUse
from weft.server.errors import ApiError
from weft.server.stream.choices import Choices, Piece
from weft.server.stream.loop_turns import LoopTurns
from weft.text.answer_parts import AnswerParts
from weft.text.conversation import Conversation
from weft.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from weft.server.api.services import Caller

Prompt = str | list[int] | tuple[str | int, ...]
"""Text, token ids, or texts with token ids between them. Texts in a tuple get no special tokens."""


@dataclass(frozen=True)
class ServedModel:
    """The properties of the server that a format may use."""

    name: str
    tokenizer: Tokenizer
    generation_defaults: Mapping[str, Any]
    max_answers: int
    has_chat_template: bool = True
    can_think: bool = False
    """The chat template has markers around thoughts."""


@dataclass(frozen=True)
class ParsedRequest:
    """The content of a body, independent of the API format."""

    prompt: Conversation | Sequence[Prompt]
    """One conversation, or the prompts to continue."""
    params: SamplingParams
    is_streamed: bool = False
    grammar: Grammar | None = None
    """The grammar of the content. It is not checked and not in `params` yet."""
    tools: ToolUse = NO_TOOLS
    echoes_prompts: bool = False
    earlier_tokens: Sequence[int] = ()
    """Tokens at the beginning of the prompt, before the tokens of the conversation."""
    max_context: int | None = None
    """Limit for prompt and answer together, in tokens. It applies if it is below the limit of the server."""
    priority: Priority | int = Priority.NORMAL
    session_id: str | None = None
    ttft_target: float | None = None
    deadline: float | None = None
    cache_salt: str = ""
    stored_bytes: int = 0
    """The size of the part of the prompt that was not in the body."""
    drops_oldest: bool = False
    """A conversation that is longer than the context loses its oldest items."""
    is_search_pending: bool = False
    """`AnswerFormat.search` must run before the prompt is complete."""
    prediction: str = ""
    """The text that the answers probably have. It becomes draft tokens."""
    learn_prompt: bool = False
    """Later requests may get draft tokens from the prompt too."""


@dataclass(frozen=True)
class Echo:
    """A prompt that is repeated before its answers."""

    text: str = ""
    tokens: Sequence[int] = ()


@dataclass(frozen=True)
class AnswerContext:
    """The properties of a request that its writer uses."""

    model: str
    tokenizer: Tokenizer
    request_id: str
    wants_logprobs: bool = False
    num_choices_per_prompt: int = 1
    prompt_tokens: int = 0
    """The sum of the tokens of all prompts."""
    cacheable_tokens: int = 0
    """Prompt tokens that the same request, sent again, can find in the prefix cache."""
    has_session: bool = False
    """The cached prefixes of the request are evicted last."""
    has_parts: bool = False
    """Answers may have thoughts or tool calls besides content."""
    echoes: Sequence[Echo] = ()
    """One entry per prompt if prompts are echoed, else empty."""
    prompts: Sequence[Sequence[int]] = ()
    """prompts[i] has the tokens of prompt i."""
    created: int = field(default_factory=lambda: int(time.time()))


class AnswerWriter(ABC):
    """Writes the answers of one request: as a stream, or as one body."""

    stream_type: ClassVar[str] = "text/event-stream; charset=utf-8"
    smallest_entry: ClassVar[int] = 0
    """Lower bound for the bytes of one logprob entry in JSON. Each token of an answer has 1 + `logprobs` entries."""

    def __init__(self, context: AnswerContext) -> None:
        self.context = context

    @property
    def kept_bytes(self) -> int:
        """Bytes of the request that the writer keeps until the end. They count against the budget for bodies."""
        return 0

    def prompt_is_ready(self, api_request: Any, context: AnswerContext) -> None:
        """Completes a writer that was made before a search, with the request and the context after it."""
        self.context = context

    async def start(self, caller: Caller) -> bytes | None:
        """Work before the request is submitted. If it returns bytes, they are the whole answer, and nothing is generated."""
        return None

    async def finish(self, caller: Caller, choices: Choices) -> None:
        """Work after the last piece and before the last bytes are sent, such as storing. An error fails the request.
        Not called for a request that failed or was cancelled."""
        return

    # ------------------------------------------------------------------ a stream

    def begin(self) -> bytes:
        """The first bytes of a stream. They are sent at once, before the prompt is computed."""
        return b""

    def keep_alive(self) -> bytes:
        """An event without content. It is sent after a time without events, because clients give up a silent stream.
        Many clients ignore comments of server-sent events, so it must be an event of the protocol."""
        return b""

    @abstractmethod
    def events(self, pieces: Sequence[Piece]) -> bytes:
        """The events for new pieces. This method is called for every token of every stream. It adds an opening event
        before the first piece of an answer, and a closing event after the last, when `choice.result` is set."""

    @abstractmethod
    def end(self, choices: Choices) -> bytes:
        """The last bytes of a stream, after all answers."""

    @abstractmethod
    def error(self, error: ApiError) -> bytes:
        """The last bytes of a stream that failed after its HTTP status was sent."""

    # ------------------------------------------------------------------ one body

    def collect(self, pieces: Sequence[Piece]) -> int | None:
        """Keeps the pieces of a whole answer, and returns how many bytes that takes. None: the caller keeps them, and
        passes them to `answer` and `logprobs`."""
        return None

    @abstractmethod
    def answer(self, index: int, result: GenerationResult, answer: str | AnswerParts) -> tuple[bytes, bytes]:
        """The JSON of one answer, split where its logprobs are inserted."""

    def envelope(self, choices: Choices) -> tuple[bytes, bytes]:
        """The JSON before and after all answers. The caller writes the commas between answers."""
        return b"", b""

    def keep(self, piece: Piece) -> int:
        """Keeps what `answer` needs of a piece besides its text. Returns the number of bytes that it keeps."""
        return 0

    async def before_answers(self, loop_turns: LoopTurns) -> None:
        """Work before the first answer of a body. Runs while the engine computes."""
        return

    def logprobs(
        self, index: int, tokens: Sequence[int], token_logprobs: Sequence[TokenLogprobs | None]
    ) -> dict[str, list[Any]]:
        """The logprobs object for the next tokens of an answer, as lists. The caller joins the lists of all calls."""
        raise NotImplementedError

    def prompt_logprobs(
        self, index: int, start: int, token_logprobs: Sequence[TokenLogprobs | None]
    ) -> dict[str, list[Any]]:
        """The logprobs object for tokens of an echoed prompt, from token `start` on."""
        raise NotImplementedError


class RequestBody(Protocol):
    """The fields that every request type has. Request types are msgspec structs."""

    @property
    def model(self) -> str | None: ...
    @property
    def deadline(self) -> float | None: ...
    @property
    def __struct_fields__(self) -> tuple[str, ...]: ...


B = TypeVar("B", bound=RequestBody)


@dataclass(frozen=True)
class Operation:
    """One route in the OpenAPI document."""

    summary: str
    description: str
    tag: str
    answer: type | None
    """Type of the response. None: plain text."""
    request: type | None = None
    event: type | None = None
    """Type of the events, if the route can stream."""
    examples: Mapping[str, Any] = field(default_factory=dict)
    errors: tuple[int, ...] = ()
    media_type: str = "application/json"
    is_open: bool = False
    """True: the route never needs a key."""
    event_note: str = ""
    """Tells clients how events are separated, and which event is the last."""
    event_media_type: str = "text/event-stream"
    error: type | None = None
    """Type of the body of an error. None: the type that weft's own routes have."""
    query: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The parameters of the query and their JSON schemas. All are optional."""
    form: Mapping[str, Any] | None = None
    """JSON schema of the body, if it is a form (multipart/form-data)."""


GENERATING = (400, 404, 408, 413, 429, 500, 503, 504)
"""The error statuses of a route that generates."""
HELLO = [{"role": "user", "content": "Hello"}]
"""The messages of examples."""


@dataclass(frozen=True)
class Counting:
    """A route that counts the prompt tokens of a request without generating."""

    path: str
    request_type: type[RequestBody]
    """Type of its body. `AnswerFormat.parse` must accept it."""
    answer: Callable[[int], Any]
    """The JSON of the response, from the number of tokens."""
    operation: Operation


class AnswerFormat(ABC, Generic[B]):
    """One API format."""

    request_type: type[B]
    operation: Operation
    fields: Mapping[str, Field] = {}
    """Descriptions and ranges of the fields that only this format has. `FIELDS` describes the other fields."""
    operation_name: Literal["chat", "text_completion"] = "chat"
    """The value of `gen_ai.operation.name` in traces."""
    family: str = ""
    """All routes that begin with this path have the errors of this format."""
    client_header: bytes = b""
    """A header that all clients of this API send. On routes that several APIs share, it selects the form of errors."""
    id_header: str = ""
    """The response header in which clients with `client_header` expect the request id, besides X-Request-Id."""
    counting: Counting | None = None
    """The route that only counts the tokens of a prompt, if the format has one."""

    async def load(self, api_request: B, caller: Caller) -> B:
        """Adds what a body refers to, such as stored items. Runs before `parse`."""
        return api_request

    async def search(self, api_request: B, caller: Caller) -> B:
        """Adds passages of files. Runs after `parse` if `is_search_pending`; then `parse` runs again. This may take as
        long as an answer, so a stream begins before it."""
        raise NotImplementedError

    def ignored(self, api_request: B) -> Sequence[str]:
        """The parts of a body that have no effect, for the `Warning` header. Unknown fields are added by the caller."""
        return ()

    @abstractmethod
    def parse(self, api_request: B, model: ServedModel) -> ParsedRequest:
        """Converts a body. Raises ApiError or InvalidRequestError. May run in a thread."""

    @abstractmethod
    def writer(self, api_request: B, context: AnswerContext) -> AnswerWriter:
        """The writer of the answers. It must not keep a reference to the body, which may have megabytes."""

    def answer_at_once(self, api_request: B, model: str) -> Any:
        """The JSON of the answer to a request that needs no generation. None: it needs generation. `model`: the name of
        the model."""
        return None

    def field_names(self, api_request: B) -> Mapping[str, str]:
        """Maps field names of `InferenceRequest` and `Chat` to those that the client sent, for errors."""
        return {}

    def error(self, error: ApiError) -> tuple[int, Any]:
        """The status and the JSON of an error. Also used for errors before the body is read."""
        return error.status, error.body


def around_text(content: bytes) -> tuple[bytes, bytes]:
    """Splits JSON at its last string, which must be empty. A stream then encodes only the text between the halves for each
    event."""
    split = content.rindex(b'""')
    return content[:split], content[split + 2 :]
