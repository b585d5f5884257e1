"""The entry point of the `weft` command.

`weft serve` parses plain arguments itself. Typer would take 0.09 s of CPU time, as much as all other work before the
engine starts. It would also take as much memory as the other imports of the server.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from weft.errors import WeftError
from weft.server.settings import FLAGS, flag_type

SERVE_OPTIONS = {flag.name: key for key, flag in FLAGS.items() if key != "model"} | {"--config": "config"}
"""The options of `weft serve` that take a value, with the setting of each."""


def main() -> None:
    """The `weft` command."""
    settings = plain_serve_settings(sys.argv[1:])
    if settings is not None:
        run(partial(_serve, settings))
        return
    from weft.cli.main import app

    run(app)


def plain_serve_settings(arguments: Sequence[str]) -> dict[str, Any] | None:
    """The settings of a `weft serve` with only a model and options with values. None for all other arguments, also for
    invalid ones: typer parses them."""
    if arguments[:1] != ["serve"]:
        return None
    settings: dict[str, Any] = {}
    rest = iter(arguments[1:])
    for argument in rest:
        option, has_value, value = argument.partition("=")
        if not argument.startswith("-"):
            key, value = "model", argument
        elif option in SERVE_OPTIONS:
            key, value = SERVE_OPTIONS[option], value if has_value else next(rest, "")
        else:
            return None
        is_number = key in FLAGS and flag_type(key) is int
        if not value or value.startswith("-") or (is_number and not value.isdecimal()):
            return None
        if key in FLAGS and FLAGS[key].repeats:
            settings.setdefault(key, []).append(value)
        elif key in settings:
            return None
        else:
            settings[key] = int(value) if is_number else value
    return settings


def _serve(settings: dict[str, Any]) -> None:
    from weft.cli.serve_command import serve_command

    config = settings.pop("config", None)
    serve_command(settings, Path(config) if config else None, print_config=False)


def run(command: Callable[[], object]) -> None:
    """Runs a command. This is the only place that turns an expected error into a message and an exit code."""
    _prepare_streams()
    try:
        command()
    except WeftError as error:
        from weft.terminal import one_line

        print(f"weft: {one_line(error)}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except OSError as error:
        # An error of standard output, such as a full disk. Errors of other files are handled where they are opened.
        # Standard output is replaced, because flushing its buffer at exit would fail again.
        sys.stdout = io.StringIO()
        print(f"weft: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _prepare_streams() -> None:
    """Replaces closed standard streams, which Python sets to None, by /dev/null. Characters that the terminal cannot
    encode are replaced."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115  # stays open
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


if __name__ == "__main__":
    main()
