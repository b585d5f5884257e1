"""`weft pull`, `weft models` and `weft remove`: fetch a model, list the cached models, delete one."""

from __future__ import annotations

import json as json_module
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from weft.cli.model import fetch
from weft.errors import ModelFileError, WeftError
from weft.loading.cache import models_directory
from weft.loading.checkpoint import open_checkpoint
from weft.loading.embedding_files import embedding_spec
from weft.loading.pull import CachedModel, cached_models, remove
from weft.models.registry import build_config
from weft.models.text_model import check_text_model
from weft.progress import PullBar
from weft.terminal import one_line, printable


def pull_command(model: str) -> None:
    """Fetches `model`, verifies it, checks that weft can run it, and prints its path."""
    path = fetch(model, verify=True)
    checkpoint = open_checkpoint(path)
    try:
        check = build_config if embedding_spec(checkpoint) is None else check_text_model
        check(checkpoint.layout, checkpoint.metadata, checkpoint.tensors)
    except ModelFileError as error:
        raise ModelFileError(f"{path}: {error}") from error
    print(path)


@dataclass(frozen=True)
class _Description:
    """A line of `weft models`. Unknown fields are empty or 0; `problem` says why."""

    name: str
    architecture: str
    parameters: int
    format: str
    size: int
    path: str
    problem: str | None


def models_command(json: bool) -> None:
    """Lists the cached models."""
    described = [_describe(kept) for kept in cached_models()]
    if json:
        print(json_module.dumps([asdict(one) for one in described], indent=2))
        return
    console = Console(highlight=False)
    if not described:
        console.print(
            f"No models in {models_directory()} yet. `weft pull` fetches the default model.", soft_wrap=True
        )
        return
    table = Table(box=None, pad_edge=False)
    for column in ("model", "architecture", "parameters", "format", "size"):
        table.add_column(
            column, justify="right" if column in ("parameters", "size") else "left", overflow="fold"
        )
    for one in described:
        parameters = _count(one.parameters) if one.parameters else ""
        table.add_row(
            printable(one.name), printable(one.architecture), parameters, one.format, decimal(one.size)
        )
    console.print(table, markup=False)
    for one in described:
        if one.problem:
            console.print(f"{printable(one.name)}: {one.problem}", style="red", markup=False, soft_wrap=True)
    console.print(f"in {models_directory()}", style="dim", soft_wrap=True)


def remove_command(model: str) -> None:
    """Deletes a model from the cache."""
    with PullBar(model) as show:
        size = remove(model, show)
    console = Console(stderr=True, highlight=False)
    console.print(f"Deleted '{printable(model)}': {decimal(size)}", style="dim", markup=False, soft_wrap=True)


def _describe(kept: CachedModel) -> _Description:
    architecture, parameters, stored, problem = "", 0, "", kept.problem
    if problem is None:
        try:
            checkpoint = open_checkpoint(kept.path)  # reads the headers, not the weights
            architecture, stored = checkpoint.architecture, checkpoint.stored_as
            parameters = checkpoint.parameter_count
        except WeftError as error:
            problem = one_line(error).removeprefix(f"{kept.path}: ")
    return _Description(kept.name, architecture, parameters, stored, kept.size, str(kept.path), problem)


def _count(number: int) -> str:
    """Formats a number as in the names of models: 1,234,567,890 becomes 1.23B."""
    for unit, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= unit:
            return f"{number / unit:.3g}{letter}"
    return str(number)
