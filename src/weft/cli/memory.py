"""`weft memory`: the options and help of each command. A command imports its implementation when it is called."""

from pathlib import Path
from typing import Annotated

import typer

from weft.cli.batch import DEFAULT_URL, Key, Url
from weft.cli.bench import AsJson

memory_app = typer.Typer(
    help="Add documents to a server, and search them.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Name = Annotated[str, typer.Argument(metavar="NAME", hidden=True)]


@memory_app.command("add")
def add(
    name: Name,
    paths: Annotated[list[Path], typer.Argument(metavar="PATH", hidden=True)],
    url: Url = DEFAULT_URL,
    api_key: Key = None,
    json: AsJson = False,
) -> None:
    """Add files to a vector store, and wait until they are read.

    NAME is the name or the id of a vector store; one with a new name is made. Each PATH is a file (text, Markdown, HTML,
    PDF, source code) or a folder, whose files are added; '-' is standard input. Exit code 1: a file could not be read.
    """
    from weft.cli.memory_command import add_command

    add_command(name, paths, url, api_key, json)


@memory_app.command("search")
def search(
    name: Name,
    query: Annotated[list[str], typer.Argument(metavar="QUERY", hidden=True)],
    count: Annotated[
        int, typer.Option("--count", "-n", min=1, max=50, metavar="N", help="How many passages to show.")
    ] = 5,
    url: Url = DEFAULT_URL,
    api_key: Key = None,
    json: AsJson = False,
) -> None:
    """Show the passages of a vector store that fit a question best.

    NAME is the name or the id of a vector store. The words of QUERY are joined.
    """
    from weft.cli.memory_command import search_command

    search_command(name, " ".join(query), count, url, api_key, json)


@memory_app.command("list")
def list_stores(
    name: Annotated[str | None, typer.Argument(metavar="NAME", hidden=True)] = None,
    url: Url = DEFAULT_URL,
    api_key: Key = None,
    json: AsJson = False,
) -> None:
    """List the vector stores of a server, or the files of one.

    NAME is the name or the id of a vector store.
    """
    from weft.cli.memory_command import list_command

    list_command(name, url, api_key, json)


@memory_app.command("remove")
def remove(
    name: Name,
    files: Annotated[list[str] | None, typer.Argument(metavar="FILE", hidden=True)] = None,
    url: Url = DEFAULT_URL,
    api_key: Key = None,
    json: AsJson = False,
) -> None:
    """Remove files from a vector store, or all of it.

    NAME is the name or the id of a vector store; each FILE is the name or the id of a file in it. Removed files are
    deleted from the server.
    """
    from weft.cli.memory_command import remove_command

    remove_command(name, files or [], url, api_key, json)
