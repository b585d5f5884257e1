"""`weft serve`: gathers what the operator said, starts the server, and says where it is."""

from __future__ import annotations

import sys
from pathlib import Path

from weft import __version__
from weft.cli.pull import fetch
from weft.cli.start import shown_name
from weft.server.guard import is_loopback
from weft.server.keys import plain_keys, read_key_file
from weft.server.serve import Started, serve
from weft.server.settings import ServerSettings

_MIB = 1 << 20


def serve_command(
    model: str,
    *,
    host: str,
    port: int,
    name: str | None,
    api_key: list[str],
    api_key_file: Path | None,
    allow_origin: list[str],
    context: int | None,
    drain: float,
) -> None:
    keys = (*plain_keys(api_key), *(read_key_file(api_key_file) if api_key_file is not None else ()))
    path = str(fetch(model))
    shown = Path(shown_name(model)).stem if path.endswith(".gguf") else shown_name(model)
    settings = ServerSettings(
        path,
        tuple(dict.fromkeys((name or shown, model))),
        host=host,
        port=port,
        api_keys=keys,
        allowed_origins=tuple(allow_origin),
        backend_options={"checkpoint": path, "max_context": context},
        drain_seconds=drain,
    )

    def announce(started: Started) -> None:
        _say(_summary(settings, started))

    serve(settings, announce, _say)


def _summary(settings: ServerSettings, started: Started) -> str:
    info = started.info
    kv_bytes = info.num_blocks * info.bytes_per_block
    lines = [
        f"weft {__version__} with {settings.names[0]}",
        f"  weights   {info.weight_bytes / _MIB:>8,.0f} MiB",
        f"  KV cache  {kv_bytes / _MIB:>8,.0f} MiB at most: {info.num_blocks * info.block_size:,} tokens, "
        f"{started.max_context:,} in one context",
        f"  swap      {info.swap_blocks * info.bytes_per_block / _MIB:>8,.0f} MiB at most",
    ]
    if not started.has_chat_template:
        lines.append(
            "The model has no chat template: /v1/chat/completions will refuse every request. --chat-template gives it one."
        )
    if not settings.api_keys and not is_loopback(settings.host):
        lines.append("Everyone who can reach this address may use the model: --api-key would ask for a key.")
    host = f"[{started.host}]" if ":" in started.host else started.host
    lines.append(f"Serving the OpenAI API at http://{host}:{started.port}/v1")
    return "\n".join(lines)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
