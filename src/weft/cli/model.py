"""Fetches the model of a command, and gives it a name to show."""

from __future__ import annotations

from pathlib import Path

from weft.loading.default_model import DEFAULT_MODEL
from weft.loading.pull import pull
from weft.progress import PullBar


def fetch(model: str, verify: bool = False) -> Path:
    """Fetches `model` if needed and returns its file or folder. Shows the progress on stderr."""
    bar = PullBar(model)
    try:
        with bar as show:
            return pull(model, show, verify)
    except KeyboardInterrupt:
        if bar.was_fetched:
            bar.say("Stopped. The next pull continues from here.")
        raise


def shown_name(model: str) -> str:
    """The name of the model for people: the file name instead of the path."""
    if model == "default":
        return DEFAULT_MODEL.file.name
    return model if model.startswith("hf:") else Path(model).name
