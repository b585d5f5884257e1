"""`weft chat`: a conversation in the terminal, answers shown as they are generated."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import signal
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from rich.console import Console

from weft.cli.model import shown_name
from weft.cli.start import check_sampling, command_params, start
from weft.errors import InvalidRequestError, WeftError
from weft.memory.prompting import Source, question_with_passages
from weft.request import FinishReason, GenerationResult, SamplingParams
from weft.terminal import one_line, printable

if TYPE_CHECKING:
    from weft.llm import LLM

Message = dict[str, str]
Recall = Callable[[str], Sequence[Source]]
"""A function that finds passages for a question."""

_NUM_PASSAGES = 4
_QUERY_CHARACTERS = 4096

_RETRY_TEMPERATURE = 0.7
"""The temperature of /regenerate if the chat has temperature 0: a greedy answer would be the same again."""

_HELP = """  /help          this list
  /clear         forget the conversation
  /system TEXT   restart with this system message; without TEXT, show it
  /regenerate    answer the last message again
  /stats         tokens and times of the last answer
  /save PATH     write the conversation to a new file, as JSON lines
  /exit          leave (so do /quit and Ctrl-D)
  //...          send a message that begins with a slash
  ...\\           continue the message in the next line
  \"\"\"            begins and ends a message of several lines, without commands
  Ctrl-C         stop the answer; the model remembers the part that was shown"""


def chat_command(
    *,
    model: str,
    system: str | None,
    context: int | None,
    threads: int | None = None,
    device: str = "auto",
    quantize: str | None = None,
    cache: Mapping[str, Any] | None = None,
    memory: str | None = None,
    url: str = "",
    api_key: str | None = None,
    **sampling: Any,
) -> None:
    """Reads messages and answers them until the end of the input."""
    check_sampling(sampling)
    recall = None if memory is None else _recall(memory, url, api_key)
    console = Console(stderr=True, highlight=False)
    with start(model, context, threads, quantize, device, cache) as llm:
        llm.text.require_chat_template()
        params = command_params(llm, chat=True, **sampling)
        name = printable(shown_name(model))
        console.print(f"{name} - /help shows the commands", style="dim", soft_wrap=True, markup=False)
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="replace")  # an invalid byte must not end the conversation
        with _Interrupts() as interrupts:
            _Conversation(llm, params, system, console, interrupts, recall).run()


def _recall(name: str, url: str, api_key: str | None) -> Recall:
    """Returns a function that searches the vector store `name` of a server. Raises WeftError if the server has no such
    store."""
    from weft.cli.memory_command import MemoryClient

    client = MemoryClient(url, api_key)
    store = client.named(name)["id"]
    return lambda question: client.sources(store, question[-_QUERY_CHARACTERS:], _NUM_PASSAGES)


class _Interrupts:
    """Handles Ctrl-C: it stops an answer or drops the line being typed. It never ends the program, even if repeated."""

    def __init__(self) -> None:
        self._may_raise = self._is_pending = False

    def __enter__(self) -> _Interrupts:
        self._previous = signal.getsignal(signal.SIGINT)
        # A background job of a script starts with SIGINT ignored; it must stay ignored.
        if self._previous is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _handle(self, signal_number: int, frame: FrameType | None) -> None:
        if self._may_raise:
            self._may_raise = False
            raise KeyboardInterrupt
        self._is_pending = True

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Defers Ctrl-C to the end of the block. A spinner that is interrupted while it stops would spin forever."""
        self._may_raise, self._is_pending = False, False
        yield
        if self._is_pending:
            raise KeyboardInterrupt
        self._may_raise = True

    def run(self, action: Callable[[], None]) -> bool:
        """Runs `action`. Returns False if Ctrl-C ended it."""
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
    """The messages of the conversation, and the commands that change them."""

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        system: str | None,
        console: Console,
        interrupts: _Interrupts,
        recall: Recall | None = None,
    ) -> None:
        self._llm = llm
        self._params = params
        self._system = system
        self._console = console
        self._interrupts = interrupts
        self._recall = recall
        self._num_tries = 0
        self._is_exit_hint_shown = False
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
        while (message := self._read_message()) is not None:
            text = message.text
            name, _, argument = text.strip().partition(" ")
            may_be_command = name.startswith("/") and not message.is_quoted
            if may_be_command and name in ("/exit", "/quit"):
                return
            if may_be_command and name in commands:
                commands[name](argument.strip())
            elif may_be_command and not name.startswith("//"):
                self._say(f"There is no command {name!r}; /help lists the commands.", "")
            elif name:
                self._num_tries = 0
                self._ask(text.replace("/", "", 1) if may_be_command else text, self._params)

    def _clear(self) -> None:
        self._result: GenerationResult | None = None
        self._messages: list[Message] = [{"role": "system", "content": self._system}] if self._system else []
        # The engine evicts the KV blocks of a session last.
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
        self._say("The system message is set. The conversation is forgotten.")

    def _command_regenerate(self, argument: str) -> None:
        if not self._messages or self._messages[-1]["role"] != "assistant":
            self._say("There is no answer yet.")
            return
        *before, question, _ = kept = self._messages
        params = self._params
        self._num_tries += 1
        if params.temperature == 0:
            self._say(
                f"At temperature 0 the answer is always the same; using {_RETRY_TEMPERATURE} for this one."
            )
            params = dataclasses.replace(params, temperature=_RETRY_TEMPERATURE)
        if params.seed is not None:
            # XOR gives another seed for each try and stays within the allowed range.
            params = dataclasses.replace(params, seed=params.seed ^ self._num_tries)
        self._messages = before
        if not self._ask(question["content"], params):
            self._messages = kept

    def _command_stats(self, argument: str) -> None:
        result = self._result
        if result is None:
            self._say("There is no answer yet.")
            return
        first, speed = result.time_to_first_token, result.decode_tokens_per_second
        self._say(
            f"prompt {result.prompt_token_count:,} tokens ({result.cached_token_count:,} from the cache); "
            f"answer {result.completion_token_count:,} tokens"
            + (f"; first token after {first:.2f} s" if first is not None else "")
            + (f"; then {speed:.1f} tokens/s" if speed is not None else "")
            + f"; the context holds {self._llm.memory.max_context:,} tokens"
        )

    def _command_save(self, argument: str) -> None:
        if not argument:
            self._say("/save needs a file name.")
            return
        try:
            with Path(os.path.expanduser(argument)).open("x", encoding="utf-8") as file:
                file.writelines(json.dumps(message, ensure_ascii=False) + "\n" for message in self._messages)
        except FileExistsError:
            self._say(f"{argument}: exists already; choose another name.", "red")
            return
        except (OSError, ValueError) as error:  # ValueError: the name contains a zero byte
            self._say(f"{argument}: cannot be written: {getattr(error, 'strerror', None) or error}", "red")
            return
        self._say(f"Saved {len(self._messages)} messages to {argument}.")

    def _read_message(self) -> _TypedMessage | None:
        """Reads one message of one or several lines; None at the end of the input. Ctrl-C drops an incomplete
        message."""
        while True:
            typed = _TypedMessage()
            if self._interrupts.run(typed.read):
                return typed if typed.lines else None
            print()
            if not typed.has_content and not self._is_exit_hint_shown:
                self._is_exit_hint_shown = True
                self._say("Press Ctrl-D or type /exit to leave.")

    def _ask(self, text: str, params: SamplingParams) -> bool:
        """Streams the answer and adds message and answer to the conversation. If it fails, adds neither."""
        messages = [*self._messages, {"role": "user", "content": text}]
        sources: Sequence[Source] = ()
        try:
            if self._recall is not None:
                sources = self._recall(text)
            # The conversation keeps the question without its passages: the next question gets other passages.
            asked = {"role": "user", "content": question_with_passages(text, sources)}
            answer = self._answer([*self._messages, asked], params)
        except WeftError as error:
            self._say(one_line(error), "red")
            if isinstance(error, InvalidRequestError) and error.code == "context_length_exceeded":
                self._say("/clear starts a new conversation.", "red")
            return False
        if answer is None:
            return False
        self._messages = [*messages, {"role": "assistant", "content": answer}]
        if sources:
            from weft.cli.memory_command import source_line

            for number, one in enumerate(sources, 1):
                self._say(f"[{number}] {source_line(one)}")
        return True

    def _answer(self, messages: list[Message], params: SamplingParams) -> str | None:
        """Streams the answer and returns its text; None if it was stopped before the first token."""
        pieces: list[str] = []
        results: list[GenerationResult] = []

        status = self._console.status("Reading")

        # `show` includes the tokenising, so that Ctrl-C right after the Enter key stops it too.
        def show() -> None:
            stream = self._llm.stream_chat(
                messages, params, session_id=self._session_id, on_result=results.append
            )
            with closing(stream):  # closing the stream cancels the request
                with self._interrupts.deferred():
                    status.start()
                for piece in stream:
                    with self._interrupts.deferred():
                        status.stop()
                    pieces.append(piece)
                    print(printable(piece), end="", flush=True)

        try:
            was_finished = self._interrupts.run(show)
        except WeftError:
            if pieces:
                print(flush=True)  # the error is printed on a new line
            raise
        finally:
            status.stop()
            self._result = results[0] if results else None
        if not was_finished:
            self._mark("[stopped]")
        elif self._result is not None and self._result.finish_reason is FinishReason.LENGTH:
            self._mark(_cut_marker(self._result, params))
        print(flush=True)
        return "".join(pieces) if was_finished or pieces else None

    def _mark(self, text: str) -> None:
        """Prints a remark after the answer; on its own line if stdout is not the terminal."""
        self._console.print(f" {text}", style="dim", end="" if sys.stdout.isatty() else "\n", markup=False)

    def _say(self, text: str, style: str = "dim") -> None:
        self._console.print(printable(text), style=style, markup=False, soft_wrap=True)


class _TypedMessage:
    """A message as it is typed, of one or several lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.is_quoted = False

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @property
    def has_content(self) -> bool:
        return bool(self.lines) or self.is_quoted

    def read(self) -> None:
        """Reads lines until the message is complete. `lines` stays empty at the end of the input."""
        # Only a terminal gets an input prompt; the output of a pipe has answers only.
        is_terminal = sys.stdin.isatty()
        if is_terminal:
            try:
                import readline  # noqa: F401  # importing it gives `input` a history and line editing
            except ImportError:
                pass
        while True:
            try:
                line = input((". " if self.has_content else "> ") if is_terminal else "")
            except EOFError:
                return
            if not self.has_content and line.strip().startswith('"""'):
                self.is_quoted = True
                line = line.strip()[3:]
                if not line:
                    continue
            if self.is_quoted:
                self.lines.append(line.removesuffix('"""'))
                if line.endswith('"""'):
                    return
            elif line.endswith("\\"):
                self.lines.append(line[:-1])
            else:
                self.lines.append(line)
                return


def _cut_marker(result: GenerationResult, params: SamplingParams) -> str:
    count = len(result.tokens)
    if params.max_tokens is not None and count >= params.max_tokens:
        return f"[cut at {count} tokens]"
    return f"[cut at {count} tokens: the context is full, /clear starts a new conversation]"
