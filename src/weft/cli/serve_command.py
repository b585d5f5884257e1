"""`weft serve`: gathers the settings, starts the server, and prints its address."""

from __future__ import annotations

import dataclasses
import gc
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft import __version__
from weft.backends import registry
from weft.backends.cpu.kernels import describe
from weft.cli.model import fetch, shown_name
from weft.cli.tiers import tier_rows
from weft.cli.vector_models import vector_rows, with_vector_models
from weft.engine.ipc.launch import LaunchedEngine, launch_engine
from weft.server.admission.keys import all_keys
from weft.server.config_file import Gathered, as_toml, gather
from weft.server.settings import ServerSettings
from weft.tiers import tier_sizes

if TYPE_CHECKING:
    from weft.embedding import EmbeddingSpec
    from weft.server.lifecycle import Started
    from weft.server.logs import ServerLog
    from weft.server.vectors.model_files import VectorModelFiles

_MIB = 1 << 20


def serve_command(flags: Mapping[str, Any], config: Path | None, print_config: bool) -> None:
    """Runs the server. `flags`: key of a setting -> value of its flag. A flag that was not given is missing or None."""
    gc.disable()  # nearly all objects of a start stay alive; the server enables the collector later
    gathered = gather(config, os.environ, flags)
    # All settings are checked before a model is fetched.
    settings = _settings(gathered)
    if print_config:
        print(as_toml(settings, gathered))
        return
    settings = _with_model(_on_device(settings, gathered))
    settings, vector_models, spec = with_vector_models(settings)
    launched: LaunchedEngine | None = None

    def end(*_: object) -> None:
        # An exception could be lost: libraries catch any error while they are imported.
        if launched is not None:
            launched.process.kill()
        os._exit(0)

    for number in (signal.SIGINT, signal.SIGTERM):  # until the server installs its own handlers
        signal.signal(number, end)
    launched = launch_engine(settings.backend, settings.backend_options, settings.engine)
    try:
        # Imported here, in parallel with the start of the engine's process.
        from weft.server.lifecycle import serve
        from weft.server.logs import ServerLog

        log = ServerLog(settings.log_format)
        serve(
            settings,
            lambda started: _announce(settings, started, log, spec, vector_models),
            log,
            launched,
            spec=spec,
            vector_models=vector_models,
        )
    finally:
        launched.process.kill()  # the process still runs only if the start was interrupted


def _settings(gathered: Gathered) -> ServerSettings:
    """The settings with the name of the model, which is not fetched yet."""
    settings = gathered.applied_to(ServerSettings())
    if settings.memory is not None:
        cache = dataclasses.replace(settings.engine.cache, memory=settings.memory)
        settings = dataclasses.replace(settings, engine=dataclasses.replace(settings.engine, cache=cache))
    keys = all_keys(gathered.value("api_keys"), settings.api_key_file)
    return dataclasses.replace(settings, api_keys=keys)


def _on_device(settings: ServerSettings, gathered: Gathered) -> ServerSettings:
    """Sets the device. On a GPU, also sets the budgets of a step, unless the operator sets any of them."""
    backend = registry.chosen(settings.backend, _compute_options(settings))
    engine = settings.engine
    budgets = registry.GPU_BUDGETS
    if backend == "cuda" and not any(f"engine.scheduler.{name}" in gathered.given for name in budgets):
        engine = dataclasses.replace(engine, scheduler=dataclasses.replace(engine.scheduler, **budgets))
    return dataclasses.replace(settings, backend=backend, engine=engine)


def _with_model(settings: ServerSettings) -> ServerSettings:
    """Fetches the model. Returns the settings with its path, its names, and its options of the backend."""
    model = settings.model
    path = str(fetch(model))
    shown = Path(shown_name(model)).stem if path.endswith(".gguf") else shown_name(model)
    names = settings.names or (shown,)
    options: dict[str, Any] = {"max_context": settings.context}
    if settings.backend != "noop":  # noop has no weights and computes nothing
        options |= {"checkpoint": path, **_compute_options(settings)}
    return dataclasses.replace(
        settings,
        model=path,
        names=tuple(dict.fromkeys((*names, model))),
        backend_options={**options, **settings.backend_options},
    )


def _compute_options(settings: ServerSettings) -> dict[str, Any]:
    return {"threads": settings.threads, "quantize": settings.quantize}


def _announce(
    settings: ServerSettings,
    started: Started,
    log: ServerLog,
    spec: EmbeddingSpec | None = None,
    vector_models: Sequence[VectorModelFiles] = (),
) -> None:
    """Logs what is served and where: several lines in text format, one event in JSON format."""
    info = started.info
    weights, kv_cache, tokens, swap = (
        info.weight_bytes,
        info.cache_bytes,
        info.cache_tokens,
        info.swap_bytes,
    )
    tiers = tier_sizes(info, settings.engine.cache)
    of_tiers: dict[str, Any] = {} if tiers is None else {"kv_cache_tiers": dataclasses.asdict(tiers)}
    host = f"[{started.host}]" if ":" in started.host else started.host
    address = f"http://{host}:{started.port}"
    url = f"{address}/v1"
    message = f"Serving the APIs of OpenAI at {url}, of Anthropic and Ollama at {address}"
    of_ollama: dict[str, Any] = {}
    others = [each.names[0] for each in vector_models]
    of_vectors: dict[str, Any] = {"vector_models": others} if others else {}
    if started.ollama_port is not None:
        of_ollama = {"ollama_url": f"http://{host}:{started.ollama_port}"}
        message += f", of Ollama also at {of_ollama['ollama_url']}"
    kernels = _kernels(settings, info.device)
    if log.format == "text":
        memory = [
            f"  KV cache  {kv_cache / _MIB:>8,.0f} MiB at most: {tokens:,} tokens, "
            f"{started.max_context:,} in one context",
            *(
                f"    {tier:<7} {size:>12}: {content}"
                for tier, size, content in (tier_rows(tiers) if tiers is not None else ())
            ),
            f"  swap      {swap / _MIB:>8,.0f} MiB at most",
        ]
        message = "\n".join(
            [
                f"weft {__version__} with {settings.names[0]}",
                f"  weights   {weights / _MIB:>8,.0f} MiB",
                *([] if spec is not None else memory),
                *vector_rows(settings, spec, vector_models),
                f"  kernels   {kernels}",
                f"{message}; documentation and a playground: {address}/docs",
            ]
        )
    for warning in _warnings(settings, started, generates=spec is None):
        log.event("warning", warning, "warning")
    log.event(
        "ready",
        message,
        version=__version__,
        model=settings.names[0],
        url=url,
        **of_vectors,
        **of_ollama,
        weight_bytes=weights,
        kv_cache_bytes=kv_cache,
        kv_cache_tokens=tokens,
        **of_tiers,
        swap_bytes=swap,
        max_context=started.max_context,
        kernels=kernels,
    )


def _kernels(settings: ServerSettings, device: str) -> str:
    match settings.backend:
        case "cuda":
            return f"Triton on {device}"
        case "noop":
            return "none"
        case _:
            return describe(settings.backend_options.get("threads"))


def _warnings(settings: ServerSettings, started: Started, *, generates: bool) -> list[str]:
    from weft.server.http.loopback import is_loopback

    warnings = []
    if generates and not started.has_chat_template:
        warnings.append(
            "The model has no chat template: /v1/chat/completions will refuse every request. "
            "Pass one with --chat-template."
        )
    if not settings.api_keys and not is_loopback(settings.host):
        warnings.append(
            "Everyone who can reach this address may use the model. Use --api-key to require a key."
        )
    return warnings
