"""`weft feedback`: the options and help of each command. A command imports its implementation when it is called."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from weft.cli.batch import DEFAULT_URL, Key, Url
from weft.cli.bench import AsJson

feedback_app = typer.Typer(
    help="Export, count or delete feedback about answers.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Of = Annotated[
    str | None,
    typer.Option(
        "--of", metavar="NAME", help="With an admin key: the feedback of this key; '*': that of all keys."
    ),
]


class Form(StrEnum):
    SFT = "sft"
    DPO = "dpo"
    KTO = "kto"


@feedback_app.command("export")
def export(
    form: Annotated[
        Form,
        typer.Option(
            metavar="sft|dpo|kto",
            help="sft: good and corrected answers. dpo: pairs of a better and a worse answer. kto: good and bad answers.",
        ),
    ] = Form.SFT,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="PATH", help="Write to this file; default: standard output."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
    of: Of = None,
    url: Url = DEFAULT_URL,
    api_key: Key = None,
) -> None:
    """Write feedback as JSON lines for fine-tuning.

    The fields are those of the usual trainers: messages, or prompt and completion (sft); prompt, chosen, rejected (dpo);
    prompt, completion, label (kto). An answer with the score 0 and no correction is left out.
    """
    from weft.cli.feedback_command import export_command

    export_command(form.value, output, overwrite, of, url, api_key)


@feedback_app.command("stats")
def stats(of: Of = None, url: Url = DEFAULT_URL, api_key: Key = None, json: AsJson = False) -> None:
    """Count kept responses and their feedback."""
    from weft.cli.feedback_command import stats_command

    stats_command(of, url, api_key, json)


@feedback_app.command("clear")
def clear(of: Of = None, url: Url = DEFAULT_URL, api_key: Key = None, json: AsJson = False) -> None:
    """Delete all kept responses and their feedback."""
    from weft.cli.feedback_command import clear_command

    clear_command(of, url, api_key, json)
