"""`weft chat`: a conversation in the terminal, answers shown as they are generated."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.console import Console

from weft.cli.pull import fetch
from weft.cli.terminal import printable
from weft.errors import WeftError
from weft.request import SamplingParams

if TYPE_CHECKING:
    from weft.llm import LLM

_HELP = """  /help    this list
  /clear   forget the conversation
  /exit    leave (so does Ctrl-D)
  Ctrl-C   stop the answer"""


def chat_command(*, model: str, system: str | None, max_tokens: int, temperature: float, seed: int) -> None:
    """Read a line, answer it, until the end of the input."""
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    path = fetch(model)
    console = Console(stderr=True, highlight=False)
    with console.status("Loading the model"):
        from weft.llm import LLM

        llm = LLM(str(path))
    with llm:
        console.print(f"{path.name} - /help shows the commands", style="dim", soft_wrap=True)
        _converse(llm, params, system, console)


def _converse(llm: LLM, params: SamplingParams, system: str | None, console: Console) -> None:
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    while (line := _read_line()) is not None:
        command = line.strip()
        if command == "/exit":
            return
        if command == "/help":
            console.print(_HELP)
        elif command == "/clear":
            messages = list(opening)
            console.print("The conversation is forgotten.", style="dim")
        elif command.startswith("/"):
            console.print(f"There is no command {command.split()[0]!r}; /help lists them.", markup=False)
        elif command:
            answered = [*messages, {"role": "user", "content": line}]
            try:
                answer = _answer(llm, answered, params, console)
            except WeftError as error:
                # A conversation that has outgrown the context, most likely: the program goes on without this line.
                console.print(f"{error}\n/clear starts anew.", style="red", markup=False)
                continue
            messages = [*answered, {"role": "assistant", "content": answer}]


def _read_line() -> str | None:
    """One line; None at the end of the input. Ctrl-C drops the line that was begun."""
    while True:
        try:
            # The question mark is for a person; a pipe gets the answers alone.
            return input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return None
        except KeyboardInterrupt:
            print()


def _answer(llm: LLM, messages: list[dict[str, str]], params: SamplingParams, console: Console) -> str:
    """Show the answer as it comes. Ctrl-C ends it; what was said until then stays in the conversation."""
    pieces: list[str] = []
    stream = llm.stream_chat(messages, params)
    try:
        for piece in stream:
            pieces.append(piece)
            print(printable(piece), end="", flush=True)
    except KeyboardInterrupt:
        console.print(" [stopped]", style="dim", end="", markup=False)
    finally:
        stream.close()  # cancels what is not generated yet
    print(flush=True)
    return "".join(pieces)
