"""`weft chat`: a conversation in the terminal, answers shown as they are generated."""

from __future__ import annotations

import dataclasses
import io
import json
import signal
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from rich.console import Console

from weft.cli.start import check_sampling, shown_name, start, usual_temperature
from weft.cli.terminal import one_line, printable
from weft.errors import InvalidRequestError, WeftError
from weft.request import FinishReason, GenerationResult, SamplingParams

if TYPE_CHECKING:
    from weft.llm import LLM

Message = dict[str, str]

_HELP = """  /help          this list
  /clear         forget the conversation
  /system TEXT   begin anew with this system message; without TEXT, show it
  /regenerate    answer the last message once more
  /stats         tokens and times of the last answer
  /save PATH     write the conversation to a new file, as JSON lines
  /exit          leave (so does Ctrl-D)
  //...          say something that begins with a slash
  ...\\           a line that ends so goes on in the next one
  \"\"\"            begins a message of several lines, and ends it
  Ctrl-C         stop the answer; what was said until then is remembered"""


def chat_command(
    *, model: str, system: str | None, context: int | None, verbose: bool, **sampling: Any
) -> None:
    """Read a message, answer it, until the end of the input."""
    check_sampling(sampling)
    console = Console(stderr=True, highlight=False)
    with start(model, context, verbose) as llm:
        llm.text.require_chat_template()
        sampling["temperature"] = (
            usual_temperature(llm) if sampling.get("temperature") is None else sampling["temperature"]
        )
        params = llm.default_params(chat=True, **sampling)
        name = printable(shown_name(model))
        console.print(f"{name} - /help shows the commands", style="dim", soft_wrap=True, markup=False)
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="replace")  # a stray byte must not end the conversation
        with _Interrupts() as interrupts:
            _Conversation(llm, params, system, console, interrupts).run()


class _Interrupts:
    """Ctrl-C ends what is under way, an answer or a line that is being typed, and nothing else: pressed twice, or at
    any other moment, it must not end the program."""

    def __init__(self) -> None:
        self._may_raise = self._is_pending = False

    def __enter__(self) -> _Interrupts:
        self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _handle(self, signal_number: int, frame: FrameType | None) -> None:
        if self._may_raise:
            self._may_raise = False
            raise KeyboardInterrupt
        self._is_pending = True

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, Ctrl-C waits: a spinner that is stopped half would turn for ever."""
        self._may_raise, self._is_pending = False, False
        yield
        if self._is_pending:
            raise KeyboardInterrupt
        self._may_raise = True

    def finishes(self, action: Callable[[], None]) -> bool:
        """Run `action`; False if Ctrl-C ended it."""
        try:
            self._may_raise = True
            action()
            self._may_raise = False
            return True
        except KeyboardInterrupt:
            return False
        finally:
            self._may_raise = False


class _Conversation:
    """What was said, and the commands that change it."""

    def __init__(
        self, llm: LLM, params: SamplingParams, system: str | None, console: Console, interrupts: _Interrupts
    ) -> None:
        self._llm = llm
        self._params = params
        self._system = system
        self._console = console
        self._interrupts = interrupts
        self._num_tries = 0
        self._result: GenerationResult | None = None
        self._clear()

    def run(self) -> None:
        commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: self._console.print(_HELP, markup=False),
            "/clear": self._command_clear,
            "/system": self._command_system,
            "/regenerate": self._command_regenerate,
            "/stats": self._command_stats,
            "/save": self._command_save,
        }
        while (said := self._read_message()) is not None:
            name, _, argument = said.strip().partition(" ")
            if name == "/exit":
                return
            if name in commands:
                commands[name](argument.strip())
            elif name.startswith("/") and not name.startswith("//"):
                self._say(f"There is no command {name!r}; /help lists them.", "")
            elif name:
                self._num_tries = 0
                self._ask(said.replace("/", "", 1) if name.startswith("//") else said)

    def _clear(self) -> None:
        self._messages: list[Message] = [{"role": "system", "content": self._system}] if self._system else []
        # The engine keeps the beginning of a conversation at hand under its session.
        self._session_id = uuid.uuid4().hex

    def _command_clear(self, argument: str) -> None:
        self._clear()
        self._say("The conversation is forgotten.")

    def _command_system(self, argument: str) -> None:
        if not argument:
            self._say(
                f"The system message is: {self._system}" if self._system else "There is no system message."
            )
            return
        self._system = argument
        self._clear()
        self._say("The system message is set; the conversation begins anew.")

    def _command_regenerate(self, argument: str) -> None:
        if not self._messages or self._messages[-1]["role"] != "assistant":
            self._say("There is no answer yet.")
            return
        before, question = self._messages[:-2], self._messages[-2]
        answer = self._messages[-1]
        self._num_tries += 1
        self._messages = before
        if not self._ask(question["content"]):
            self._messages = [*before, question, answer]

    def _command_stats(self, argument: str) -> None:
        result = self._result
        if result is None:
            self._say("No answer has ended by itself yet.")
            return
        first, speed = result.time_to_first_token, result.decode_tokens_per_second
        self._say(
            f"prompt {result.prompt_token_count:,} tokens, of which {result.cached_token_count:,} from the cache; "
            f"answer {result.completion_token_count:,} tokens"
            + (f"; first token after {first:.2f} s" if first is not None else "")
            + (f"; then {speed:.1f} tokens a second" if speed is not None else "")
            + f"; the context holds {self._llm.memory.max_context:,}"
        )

    def _command_save(self, argument: str) -> None:
        if not argument:
            self._say("/save needs the path of a file.")
            return
        try:
            with Path(argument).expanduser().open("x", encoding="utf-8") as file:
                file.writelines(json.dumps(message, ensure_ascii=False) + "\n" for message in self._messages)
        except OSError as error:
            self._say(f"{argument}: cannot be written: {error.strerror}", "red")
            return
        self._say(f"{len(self._messages)} messages are in {argument}.")

    def _read_message(self) -> str | None:
        """One message, of one line or several; None at the end of the input. Ctrl-C drops what was begun."""
        while True:
            lines: list[str] = []
            if self._interrupts.finishes(lambda lines=lines: _read_lines(lines)):  # type: ignore[misc]
                return "\n".join(lines) if lines else None
            print()

    def _ask(self, said: str) -> bool:
        """Show the answer as it comes and add both to the conversation, which goes on without them where it fails."""
        asked = [*self._messages, {"role": "user", "content": said}]
        params = self._params
        if params.seed is not None and self._num_tries:
            params = dataclasses.replace(params, seed=params.seed + self._num_tries)
        try:
            answer = self._answer(asked, params)
        except WeftError as error:
            self._say(one_line(error), "red")
            if isinstance(error, InvalidRequestError) and error.code == "context_length_exceeded":
                self._say("/clear starts anew.", "red")
            return False
        if answer is None:
            return False
        self._messages = [*asked, {"role": "assistant", "content": answer}]
        return True

    def _answer(self, messages: list[Message], params: SamplingParams) -> str | None:
        """What was said; None where it was stopped before the first word."""
        pieces: list[str] = []
        results: list[GenerationResult] = []

        status = self._console.status("Reading")

        # All of it, from reading the messages on, so that Ctrl-C right behind the Enter key counts.
        def show() -> None:
            stream = self._llm.stream_chat(
                messages, params, session_id=self._session_id, on_result=results.append
            )
            with closing(stream):  # cancels what is not generated yet
                with self._interrupts.held():
                    status.start()
                for piece in stream:
                    with self._interrupts.held():
                        status.stop()
                    pieces.append(piece)
                    print(printable(piece), end="", flush=True)

        try:
            was_finished = self._interrupts.finishes(show)
        except WeftError:
            if pieces:
                print(flush=True)  # the error gets a line of its own
            raise
        finally:
            status.stop()
        if not was_finished:
            self._mark("[stopped]")
        if results:
            self._result = results[0]
            if results[0].finish_reason is FinishReason.LENGTH:
                self._mark(_cut_marker(results[0], params))
        print(flush=True)
        return "".join(pieces) if was_finished or pieces else None

    def _mark(self, text: str) -> None:
        """A remark behind the answer; on a line of its own where the answer goes elsewhere."""
        self._console.print(f" {text}", style="dim", end="" if sys.stdout.isatty() else "\n", markup=False)

    def _say(self, text: str, style: str = "dim") -> None:
        self._console.print(printable(text), style=style, markup=False, soft_wrap=True)


def _read_lines(lines: list[str]) -> None:
    """The lines of one message, into `lines`; none at the end of the input."""
    # The question mark is for a person; a pipe gets the answers alone.
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        try:
            import readline  # noqa: F401  # its import gives `input` a history and its keys
        except ImportError:
            pass
    ends_at_quotes = False
    while True:
        try:
            line = input(("> " if not lines else ". ") if is_terminal else "")
        except EOFError:
            return
        if not lines and not ends_at_quotes and line.strip().startswith('"""'):
            ends_at_quotes = True
            line = line.strip()[3:]
            if not line:
                continue
        if ends_at_quotes:
            lines.append(line.removesuffix('"""'))
            if line.endswith('"""'):
                return
        elif line.endswith("\\"):
            lines.append(line[:-1])
        else:
            lines.append(line)
            return


def _cut_marker(result: GenerationResult, params: SamplingParams) -> str:
    count = len(result.tokens)
    if params.max_tokens is not None and count >= params.max_tokens:
        return f"[cut at {count} tokens]"
    return f"[cut at {count} tokens: the context is full, /clear starts anew]"
