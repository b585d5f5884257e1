"""The settings of a server.

`config_file` derives TOML keys and environment variables from these fields, and checks values by the field types.
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
    # The adaptive policy measures step times: a fixed chunk size cannot suit machines that differ a hundredfold.
    return ServingEngineConfig(scheduler=SchedulerConfig(policy=PriorityPolicy.ADAPTIVE))


@dataclass(frozen=True)
class ServerSettings:
    """One server. `model` is a path: a GGUF file, or a folder with safetensors."""

    model: str
    names: tuple[str, ...]
    """Names of the model that requests may use. Responses carry the first one."""
    host: str = "127.0.0.1"
    """The address to listen on. "0.0.0.0" accepts other machines: set API keys then."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    """0: any free port."""
    api_keys: tuple[ApiKey, ...] = ()
    """Made by `keys.all_keys`. Empty: no key is needed."""
    allowed_origins: tuple[str, ...] = ()
    """Origins of web pages that may call the server from a browser; "*" for all."""
    chat_template: str | None = None
    """Path of a Jinja template that replaces the template of the model."""
    tool_format: str | None = None
    """How the model writes tool calls, one of `weft.text.model_text.TOOL_FORMATS`. None: detected from its template."""
    log_format: LogFormat = "auto"
    """"auto": text if standard error is a terminal, else JSON."""
    backend: str = "auto"
    """One of "cpu", "cuda", and "auto": a GPU if there is one, else the CPU."""
    backend_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the backend, for developers of backends."""
    engine: ServingEngineConfig = field(default_factory=_engine_config)
    drain_seconds: Seconds = 30.0
    """After a SIGTERM, active requests may run this long."""
    stall_seconds: Annotated[float, Meta(ge=1, le=1_000_000)] = 120.0
    """An engine process without progress for this long is restarted. Its requests get an error."""
    max_body_bytes: AtLeastOne = 16 << 20
    """Largest body of one request."""
    max_buffered_bytes: AtLeastOne = 256 << 20
    """Limit for the bodies of all requests together. A body counts until its prompt is tokenised."""
    max_answer_bytes: AtLeastOne = 64 << 20
    """Limit for the answers of one request in memory. For a stream only unsent bytes count."""
    max_buffered_answer_bytes: AtLeastOne = 256 << 20
    """The same limit for all requests together."""
    max_header_bytes: AtLeastOne = 64 << 10
    """Largest headers of one request."""
    header_seconds: Seconds = 10.0
    """A request's headers have this long to arrive."""
    body_seconds: Seconds = 120.0
    """Time limit for the body of a request, counted from the end of its headers."""
    stalled_reader_seconds: Seconds = 60.0
    """A connection is closed if bytes wait to be sent and its client accepts none for this long."""
    max_answers: AtLeastOne = 1024
    """Limit for prompts times `n` of one request."""
    max_requests: AtLeastOne = 4096
    """Limit for active requests, waiting ones included."""

    def __post_init__(self) -> None:
        KeyRing(self.api_keys)  # raises for duplicate keys
