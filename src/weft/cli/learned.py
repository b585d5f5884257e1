"""`weft learned`: what a server learned from its traffic. A command imports its implementation when it is called."""

from typing import Any

import typer

from weft.cli.batch import DEFAULT_URL, Key, Url
from weft.cli.bench import AsJson

learned_app = typer.Typer(
    help="Show or forget what a server learned from its traffic.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

_PATH = "/admin/learned"


@learned_app.command("show")
def show(url: Url = DEFAULT_URL, api_key: Key = None, json: AsJson = False) -> None:
    """Show what was learned, how large it is, and what it gave.

    costs: seconds of steps, kept for each model and machine, so that the first requests after a start are planned well.
    drafts: finished answers, in memory, from which draft tokens are taken.

    If the server has API keys, the command needs an admin key.
    """
    from weft.cli.batch_command import BatchClient, print_hint, print_json

    found = BatchClient(url, api_key).send("GET", _PATH)
    if json:
        print_json(found)
        return
    for one in found["data"]:
        print(_line(one))
    if not any(one["kind"] == "costs" for one in found["data"]):
        print_hint("No costs of steps are kept yet.")


@learned_app.command("clear")
def clear(url: Url = DEFAULT_URL, api_key: Key = None, json: AsJson = False) -> None:
    """Forget the costs of steps, in the store and in the running engine, and its finished answers.

    The engine learns again from the next requests. If the server has API keys, the command needs an admin key.
    """
    from weft.cli.batch_command import BatchClient, print_json

    found = BatchClient(url, api_key).send("DELETE", _PATH)
    if json:
        print_json(found)
    else:
        print(f"{found['entries']:,} entries deleted")


def _line(entry: dict[str, Any]) -> str:
    from datetime import datetime

    from weft.terminal import printable

    if entry["kind"] == "costs":
        updated = datetime.fromtimestamp(entry["updated_at"]).strftime("%Y-%m-%d %H:%M")
        step = f", {1000 * entry['step_seconds']:.3g} ms a step" if entry["step_seconds"] else ""
        return f"costs   {updated}  {entry['bytes']:,} bytes{step}  {printable(entry['name'])}"
    saved = f"{entry['tokens_saved']:,} tokens and {entry['seconds_saved']:.1f} s saved"
    return f"drafts  {entry['tokens']:,} tokens, {entry['bytes']:,} bytes; {saved}"
