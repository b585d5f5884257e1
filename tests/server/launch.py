"""Starts a real server with settings that have no flag, such as the noop backend. It stops when its stdin is closed."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import threading

import msgspec

from weft.embedding import EmbeddingSpec
from weft.server.admission.keys import ApiKey
from weft.server.lifecycle import Started, serve
from weft.server.logs import ServerLog
from weft.server.settings import ServerSettings
from weft.server.vectors.model_files import VectorModelFiles


def announce(started: Started) -> None:
    print(json.dumps({"port": started.port, "ollama_port": started.ollama_port}), flush=True)


def end_with_parent() -> None:
    """Stops the server when the test process ends, even if that is killed."""
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=end_with_parent, daemon=True).start()
    given = json.loads(sys.argv[1])
    given["api_keys"] = msgspec.convert(given.get("api_keys", ()), tuple[ApiKey, ...])
    spec = msgspec.convert(given.pop("spec", None), EmbeddingSpec | None)
    vector_models = msgspec.convert(given.pop("vector_models", ()), tuple[VectorModelFiles, ...])
    settings = msgspec.convert(given, ServerSettings)
    if spec is not None:
        settings = dataclasses.replace(settings, engine=spec.engine_config())
    serve(settings, announce, ServerLog(settings.log_format), spec=spec, vector_models=vector_models)
