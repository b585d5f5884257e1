"""The model that a command was asked to run: fetched where it is not here yet, and what to call it before a person."""

from __future__ import annotations

from pathlib import Path

from weft.loading.default_model import DEFAULT_MODEL
from weft.loading.pull import pull
from weft.progress import PullBar


def fetch(model: str, verify: bool = False) -> Path:
    """The file or folder of `model`. Says on stderr what is going on, where there is something to do."""
    bar = PullBar(model)
    try:
        with bar as show:
            return pull(model, show, verify)
    except KeyboardInterrupt:
        if bar.was_fetched:
            bar.say("Stopped. What came is kept: the next pull goes on from there.")
        raise


def shown_name(model: str) -> str:
    """What to call the model before a person: a file's name rather than the way to it."""
    if model == "default":
        return DEFAULT_MODEL.file.name
    return model if model.startswith("hf:") else Path(model).name
