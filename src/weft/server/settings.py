"""The settings of a server. As in `weft.config`, a field declares a setting. `KEYS` has all settings, also those
of the engine.

`config_file` reads their values from flags, the environment and a file. `weft.cli` makes the flags.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_origin

from weft.config import (
    Flag,
    PriorityPolicy,
    Range,
    SchedulerConfig,
    ServingEngineConfig,
    Setting,
    declared_settings,
)

if TYPE_CHECKING:
    from weft.server.admission.keys import ApiKey
else:
    ApiKey = Any  # at run time the type is not needed: `weft --help` imports only the declarations

Seconds = Annotated[float, Range(0, 1_000_000)]
AtLeastOne = Annotated[int, Range(1)]
LogFormat = Literal["auto", "text", "json", "off"]


def _engine_config() -> ServingEngineConfig:
    # ADAPTIVE chooses the chunk size by measured step times. No fixed size suits machines that differ a hundredfold.
    return ServingEngineConfig(scheduler=SchedulerConfig(policy=PriorityPolicy.ADAPTIVE))


@dataclass(frozen=True)
class ServerSettings:
    """One server. `weft serve` replaces `model` by a path: a GGUF file, or a folder with safetensors. It passes
    `context`, `memory`, `threads` and `quantize` on to the engine and its backend."""

    model: Annotated[str, Flag("MODEL", "MODEL", "")] = "default"
    """'default' (SmolLM2-135M-Instruct), 'hf:owner/name', or a path to a GGUF file or a folder with safetensors."""
    names: Annotated[
        tuple[str, ...], Flag("--name", "NAME", "Model name in the API; default: the file name.")
    ] = ()
    """Names of the model that requests may use. Responses carry the first one."""
    host: Annotated[str, Flag("--host", "ADDRESS", "Default: 127.0.0.1; 0.0.0.0: all interfaces.")] = (
        "127.0.0.1"
    )
    """The address to listen on. "0.0.0.0" accepts other machines: set API keys then."""
    port: Annotated[int, Range(0, 65535), Flag("--port", "N", "Default: 8000; 0: any.")] = 8000
    """0: any free port."""
    ollama_port: Annotated[
        int | None,
        Range(0, 65535),
        Flag("--ollama-port", "N", "A second port. Ollama's clients expect 11434."),
    ] = None
    """A second port on the same address, with the same routes. Ollama's clients expect a server at port 11434. 0: any
    free port. Not set: there is no second port."""
    api_keys: Annotated[
        tuple[ApiKey, ...], Flag("--api-key", "KEY", "Require this key; may be repeated.", repeats=True)
    ] = ()
    """A request must send one of these API keys. Empty: no key is needed. `weft serve` adds the keys of `api_key_file`."""
    api_key_file: Annotated[
        str | None, Flag("--api-key-file", "PATH", "A file with one key per line, or TOML.")
    ] = None
    """A file with API keys: one key a line, or TOML with limits for each key."""
    aliases: Mapping[str, str] = field(
        default_factory=lambda: {
            **dict.fromkeys(("claude-*", "gpt-*", "codex-*", "o[0-9]*"), ""),
            **dict.fromkeys(("text-embedding-*", "rerank-*"), ""),
        }
    )
    """Other names that requests may use, as a table: name = "name of the model". A name may have wildcards, as in
    "gpt-*" or "*"; "" is the model that serves the route. By default requests with the names of the vendors' models
    are answered."""
    embedder: Annotated[
        str | None,
        Flag("--embedder", "MODEL", "Also serve this embedding model, or 'default'."),
    ] = None
    """An embedding model to serve beside MODEL: 'default' (all-MiniLM-L6-v2), 'hf:owner/name', or a path. Not set: none,
    unless MODEL is one."""
    reranker: Annotated[
        str | None, Flag("--reranker", "MODEL", "Also serve this model that scores documents.")
    ] = None
    """A reranker to serve beside MODEL: 'hf:owner/name', or a path. Not set: none, unless MODEL is one."""
    context: Annotated[
        int | None, Range(2), Flag("--context", "N", "Maximum context in tokens; default: the model's.")
    ] = None
    """Longest context in tokens. Not set: the model's own."""
    memory: Annotated[
        int | None, Range(1), Flag("--memory", "SIZE", "KV cache, such as 4GiB; default: at least 2GiB.")
    ] = None
    """Bytes for the KV cache. Not set: most of the free GPU memory; on a CPU 2 GiB or one whole context, at
    most half of the free memory."""
    backend: Annotated[
        str, Flag("--device", "auto|cpu|cuda", "Where to compute; default: a GPU if there is one.")
    ] = "auto"
    """One of "cpu", "cuda", and "auto": a GPU if there is one, else the CPU."""
    threads: Annotated[
        int | None, Range(1, 1024), Flag("--threads", "N", "CPU threads that compute; default: one per core.")
    ] = None
    """Threads of the CPU backend. Not set: one for each physical core."""
    quantize: Annotated[
        Literal["int8", "int4"] | None,
        Flag("--quantize", "int8|int4", "Quantise weights that are stored as floats."),
    ] = None
    """Quantise weights that are stored as floats. Applies to all models of the server."""
    chat_template: Annotated[
        str | None, Flag("--chat-template", "PATH", "A Jinja file that replaces the model's.")
    ] = None
    """Path of a Jinja template that replaces the template of the model."""
    tool_format: str | None = None
    """How the model writes tool calls, one of `weft.text.model_text.TOOL_FORMATS`. None: detected from its template."""
    show_prompts: bool = False
    """The live view shows the prompt of a request to those who may see the view."""
    allowed_origins: tuple[str, ...] = ()
    """Origins of web pages that may call the server from a browser; "*" for all."""
    log_format: LogFormat = "auto"
    """"auto": text if standard error is a terminal, else JSON."""
    otlp_endpoint: str | None = None
    """URL of a collector of OpenTelemetry, such as http://127.0.0.1:4318. It gets a trace of each request. Not set: the URL in OTEL_EXPORTER_OTLP_ENDPOINT; without it, no traces are made. Needs the extra `otel`."""
    backend_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the backend, for developers of backends."""
    engine: ServingEngineConfig = field(default_factory=_engine_config)
    drain_seconds: Seconds = 30.0
    """After a SIGTERM, active requests may run this long."""
    stall_seconds: Annotated[float, Range(1, 1_000_000)] = 120.0
    """An engine process without progress for this long is restarted. Its requests get an error."""
    coalesce: bool | None = None
    """Identical requests in flight are computed once: greedy or seeded ones with the same cache salt. Not set: where no
    answer depends on the batch (on a CPU, and on a GPU in the batch-invariant mode)."""
    max_body_bytes: AtLeastOne = 16 << 20
    """Largest body of one request."""
    max_buffered_bytes: AtLeastOne = 256 << 20
    """Limit for the bodies of all requests together. A body counts until its prompt is tokenised. The parts that the response repeats or stores count until the request ends."""
    max_answer_bytes: AtLeastOne = 64 << 20
    """Limit for the answers of one request in memory. For a stream only unsent bytes count."""
    max_buffered_answer_bytes: AtLeastOne = 256 << 20
    """Limit for the answers of all requests together in memory."""
    max_header_bytes: AtLeastOne = 64 << 10
    """Largest headers of one request."""
    header_seconds: Seconds = 10.0
    """A request's headers have this long to arrive."""
    body_seconds: Seconds = 120.0
    """Time limit for the body of a request, counted from the end of its headers."""
    stalled_reader_seconds: Seconds = 60.0
    """A connection is closed if bytes wait to be sent and its client accepts none for this long."""
    silence_seconds: Annotated[float, Range(1, 1_000_000)] = 15.0
    """A stream that had nothing to send for this long sends an event without content, so that its client does not give up."""
    max_answers: AtLeastOne = 1024
    """Limit for prompts times `n` of one request."""
    max_requests: AtLeastOne = 4096
    """Limit for active requests, waiting ones included."""
    state_path: str | None = None
    """The folder of stored responses, files, batches and vector stores. Not set: WEFT_HOME/state, or .cache/weft/state."""
    max_file_bytes: AtLeastOne = 1 << 30
    """Largest file that can be uploaded."""
    response_days: Annotated[float, Range(0, 10_000)] = 30.0
    """A stored response is deleted after this many days."""
    feedback_days: Annotated[float, Range(0, 10_000)] = 0.0
    """Answers are kept for this many days, so that clients can send feedback about them. Keys need `feedback = true` too.
    0: no answer is kept, and feedback is refused."""
    max_feedback_bytes: AtLeastOne = 256 << 20
    """Limit for kept answers and their feedback, of all keys together. The oldest are deleted first."""
    learned_text_days: Annotated[float, Range(0, 10_000)] = 0.0
    """Finished answers from which draft tokens are taken are kept on disk for this many days, so that they help after a
    restart. 0: they are in memory only."""
    max_stored_bytes: AtLeastOne = 4 << 30
    """Limit for the responses, files and vector stores that are stored, of all keys together."""

    def __post_init__(self) -> None:
        from weft.server.admission.keys import KeyRing

        KeyRing(self.api_keys)  # raises for duplicate keys


def _leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Setting]]:
    for name, setting in declared_settings(config).items():
        if dataclasses.is_dataclass(setting.type):
            yield from _leaves(setting.type, f"{prefix}{name}.")
        else:
            yield prefix + name, setting


_SETTINGS = dict(_leaves(ServerSettings))
# `engine.cache.memory` has the short key `memory`. `engine.max_kept_results` has no effect: a server keeps no results.
del _SETTINGS["engine.cache.memory"], _SETTINGS["engine.max_kept_results"]
# Operators give API keys as text. `keys.all_keys` makes `ApiKey` objects of them.
_SETTINGS["api_keys"] = _SETTINGS["api_keys"]._replace(type=tuple[str, ...])
KEYS: Mapping[str, Setting] = _SETTINGS
"""Every setting by its key: `port`, `engine.scheduler.max_running`."""
FLAGS: Mapping[str, Flag] = {key: one.flag for key, one in KEYS.items() if one.flag is not None}


def is_size(key: str) -> bool:
    """Whether the value is a number of bytes, which may be written as 4GiB."""
    return key == "memory" or key.endswith("_bytes")


def is_list(key: str) -> bool:
    return get_origin(KEYS[key].type) is tuple


def flag_type(key: str) -> type:
    """The type of a flag's value on the command line."""
    return int if KEYS[key].type is int and not is_size(key) else str
