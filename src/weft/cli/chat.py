"""`weft chat`: a conversation in the terminal, answers shown as they are generated."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING

from rich.console import Console

from weft.cli.pull import fetch
from weft.cli.terminal import one_line, printable
from weft.errors import InvalidRequestError, WeftError
from weft.request import FinishReason, GenerationResult, SamplingParams

if TYPE_CHECKING:
    from weft.llm import LLM

_HELP = """  /help    this list
  /clear   forget the conversation
  /exit    leave (so does Ctrl-D)
  //...    say something that begins with a slash: the first one is taken off
  Ctrl-C   stop the answer; what was said until then stays in the conversation"""


def chat_command(*, model: str, system: str | None, max_tokens: int, temperature: float, seed: int) -> None:
    """Read a line, answer it, until the end of the input."""
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    path = fetch(model)
    console = Console(stderr=True, highlight=False)
    with console.status("Loading the model"):
        from weft.llm import LLM

        llm = LLM(str(path))
    with llm:
        llm.text.require_chat_template()
        name = printable(path.name)
        console.print(f"{name} - /help shows the commands", style="dim", soft_wrap=True, markup=False)
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="replace")  # a stray byte must not end the conversation
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
        elif command.startswith("/") and not command.startswith("//"):
            console.print(f"There is no command {command.split()[0]!r}; /help lists them.", markup=False)
        elif command:
            said = line.replace("/", "", 1) if command.startswith("//") else line
            answered = [*messages, {"role": "user", "content": said}]
            try:
                answer = _answer(llm, answered, params, console)
            except WeftError as error:
                # The conversation goes on without this line.
                console.print(one_line(error), style="red", markup=False, soft_wrap=True)
                if isinstance(error, InvalidRequestError) and error.code == "context_length_exceeded":
                    console.print("/clear starts anew.", style="red")
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
    results: list[GenerationResult] = []
    stream = llm.stream_chat(messages, params, on_result=results.append)
    try:
        for piece in stream:
            pieces.append(piece)
            print(printable(piece), end="", flush=True)
    except KeyboardInterrupt:
        _mark(console, "[stopped]")
    except WeftError:
        if pieces:
            print(flush=True)  # the error gets a line of its own
        raise
    finally:
        stream.close()  # cancels what is not generated yet
    if results and results[0].finish_reason is FinishReason.LENGTH:
        _mark(console, _cut_marker(results[0], params))
    print(flush=True)
    return "".join(pieces)


def _mark(console: Console, text: str) -> None:
    """A remark behind the answer; on a line of its own where the answer goes elsewhere."""
    console.print(f" {text}", style="dim", end="" if sys.stdout.isatty() else "\n", markup=False)


def _cut_marker(result: GenerationResult, params: SamplingParams) -> str:
    count = len(result.tokens)
    if params.max_tokens is not None and count >= params.max_tokens:
        return f"[cut at {count} tokens]"
    return f"[cut at {count} tokens: the context is full, /clear starts anew]"
