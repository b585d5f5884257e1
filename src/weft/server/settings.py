"""What an operator may set: frozen, each with a default that suits most.

`config_file` makes the keys of the TOML file and the environment's names of these fields, and checks values by their types.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta

from weft.config import PriorityPolicy, SchedulerConfig, ServingEngineConfig
from weft.server.admission.keys import ApiKey, KeyRing

Seconds = Annotated[float, Meta(ge=0, le=1_000_000)]
AtLeastOne = Annotated[int, Meta(ge=1)]
LogFormat = Literal["auto", "text", "json", "off"]


def _engine_config() -> ServingEngineConfig:
    # How long a prompt may hold the others up is measured, not guessed: machines differ a hundredfold.
    return ServingEngineConfig(scheduler=SchedulerConfig(policy=PriorityPolicy.ADAPTIVE))


@dataclass(frozen=True)
class ServerSettings:
    """One server. `model` is a path: a GGUF file, or a folder with safetensors."""

    model: str
    names: tuple[str, ...]
    """What requests may call the model; the first is the one that answers carry."""
    host: str = "127.0.0.1"
    """The address to listen on. "0.0.0.0" accepts other machines: set API keys then."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    """0: any that is free."""
    api_keys: tuple[ApiKey, ...] = ()
    """None at all: everyone may ask. Made by `keys.all_keys`."""
    allowed_origins: tuple[str, ...] = ()
    """Web pages that may call the server from a browser; "*" for all."""
    chat_template: str | None = None
    """The path of a Jinja template that is used instead of the model's own."""
    tool_format: str | None = None
    """How the model writes calls of tools, one of `weft.text.model_text.TOOL_FORMATS`; None: found from its template."""
    log_format: LogFormat = "auto"
    """"auto": text where standard error is a terminal, JSON elsewhere."""
    backend: str = "auto"
    """What computes: "cpu", "cuda", or "auto": a card, where there is one."""
    backend_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the backend, for developers of backends."""
    engine: ServingEngineConfig = field(default_factory=_engine_config)
    drain_seconds: Seconds = 30.0
    """What is under way at a SIGTERM has this long to end."""
    stall_seconds: Annotated[float, Meta(ge=1, le=1_000_000)] = 120.0
    """An engine that shows no sign of life for this long is replaced, and its requests get an error."""
    max_body_bytes: AtLeastOne = 16 << 20
    """Largest body of one request."""
    max_buffered_bytes: AtLeastOne = 256 << 20
    """Bodies of all requests together, until they are tokens."""
    max_answer_bytes: AtLeastOne = 64 << 20
    """What one request may have of its answers in memory: all of them, or of a stream what is not sent yet."""
    max_buffered_answer_bytes: AtLeastOne = 256 << 20
    """The same for all requests together."""
    max_header_bytes: AtLeastOne = 64 << 10
    """Largest headers of one request."""
    header_seconds: Seconds = 10.0
    """A request's headers have this long to arrive."""
    body_seconds: Seconds = 120.0
    """A request has this long to arrive, from its first byte."""
    stalled_reader_seconds: Seconds = 60.0
    """A connection is closed when its client accepts none of the bytes that wait for it for so long."""
    max_answers: AtLeastOne = 1024
    """Prompts times `n` of one request."""
    max_requests: AtLeastOne = 4096
    """Requests that may be under way at once, waiting ones too."""

    def __post_init__(self) -> None:
        KeyRing(self.api_keys)  # refuses those that cannot be told apart
