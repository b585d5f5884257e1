"""`weft batch`: the options and help of each command. A command imports its implementation when it is called."""

from pathlib import Path
from typing import Annotated

import typer

from weft.cli.bench import AsJson

batch_app = typer.Typer(
    help="Run files of requests on a server, in idle capacity.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Url = Annotated[str, typer.Option(metavar="URL", help="The server.")]
Key = Annotated[
    str | None,
    typer.Option("--api-key", envvar="WEFT_API_KEY", metavar="KEY", help="Sent as a bearer token."),
]
Id = Annotated[str, typer.Argument(metavar="ID", hidden=True)]
DEFAULT_URL = "http://127.0.0.1:8000"


@batch_app.command("submit")
def submit(
    file: Annotated[Path, typer.Argument(metavar="FILE", hidden=True)],
    endpoint: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="The route of all lines; default: the url of the first line."),
    ] = None,
    window: Annotated[
        str,
        typer.Option(
            metavar="TIME", help="Lines that did not run after this time get an error: 30m, 24h, 7d."
        ),
    ] = "24h",
    url: Url = DEFAULT_URL,
    api_key: Key = None,
    json: AsJson = False,
) -> None:
    """Upload a file and make a batch of it.

    FILE has one request in each line: an object with custom_id, method (POST), url (such as /v1/chat/completions) and body
    (the request).
    """
    from weft.cli.batch_command import submit_command

    submit_command(file, endpoint, window, url, api_key, json)


@batch_app.command("list")
def list_batches(
    limit: Annotated[int, typer.Option(min=1, max=100, metavar="N", help="How many batches to list.")] = 20,
    url: Url = DEFAULT_URL,
    api_key: Key = None,
    json: AsJson = False,
) -> None:
    """List the batches of a server, the newest first."""
    from weft.cli.batch_command import list_command

    list_command(limit, url, api_key, json)


@batch_app.command("get")
def get(
    batch_id: Id,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="PATH",
            help="Write the output to this file, and the errors to PATH.errors.",
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing files.")] = False,
    url: Url = DEFAULT_URL,
    api_key: Key = None,
    json: AsJson = False,
) -> None:
    """Show a batch, or download its output.

    ID is what `weft batch submit` printed. Exit code 1 with --output: the batch has not ended, or has no output.
    """
    from weft.cli.batch_command import get_command

    get_command(batch_id, output, overwrite, url, api_key, json)


@batch_app.command("cancel")
def cancel(batch_id: Id, url: Url = DEFAULT_URL, api_key: Key = None, json: AsJson = False) -> None:
    """Cancel a batch. Lines that have a result stay in its output."""
    from weft.cli.batch_command import cancel_command

    cancel_command(batch_id, url, api_key, json)
