"""The commands with a fake model: input, output, exit codes."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from weft.cli.chat import chat_command
from weft.cli.main import main
from weft.errors import InvalidRequestError, WeftError
from weft.llm import MemoryUse, PromptJob
from weft.request import MAX_SEED, FinishReason, GenerationResult, RequestId, RequestState, SamplingParams
from weft.terminal import one_line, printable

OPTIONS: dict[str, Any] = {
    **{"model": "default", "context": None},
    **{"max_tokens": 4, "temperature": 0.0, "seed": 0},
}
DONE = GenerationResult(
    request_id=RequestId("0"),
    tokens=(1, 2, 3, 4),
    text=" text",
    state=RequestState.COMPLETED,
    finish_reason=FinishReason.END_OF_SEQUENCE,
    error=None,
    waiting_time=0.0,
    prefill_time=0.0,
    decode_time=0.0,
    time_to_first_token=None,
    decode_steps=0,
    prompt_token_count=1,
    cached_token_count=0,
    preemptions=0,
)
FAILED = dataclasses.replace(
    DONE, text=" te", state=RequestState.FAILED, finish_reason=FinishReason.ERROR, error="out of luck"
)

Answer = Callable[[str], str | GenerationResult | WeftError]


class FakeLLM:
    """Answers the last message (or prompt) with `answer`, and records the conversations."""

    memory = MemoryUse(weights=3 << 20, kv_cache=2 << 20, swap=1 << 20, kv_tokens=4096, max_context=2048)

    suggestions: dict[str, float] = {}  # noqa: RUF012

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.conversations: list[Sequence[Mapping[str, str]]] = []
        self.sessions: list[str | None] = []
        self.params: list[SamplingParams | None] = []
        self.text = SimpleNamespace(
            require_chat_template=lambda: None, tokenizer=None, chat_template=object()
        )

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def default_params(self, *, chat: bool = False, **overrides: Any) -> SamplingParams:
        given = {name: value for name, value in overrides.items() if value is not None}
        return SamplingParams(**{"max_tokens": None if chat else 16, **given})

    def _result(self, prompt: str) -> GenerationResult:
        answer = self.answer(prompt)
        if isinstance(answer, WeftError):
            raise answer
        return dataclasses.replace(DONE, text=answer) if isinstance(answer, str) else answer

    def run(self, jobs: Iterable[PromptJob]) -> Iterator[tuple[PromptJob, GenerationResult | WeftError]]:
        for job in jobs:
            try:
                assert isinstance(job.prompt, str)
                yield job, self._result(job.prompt)
            except WeftError as error:
                yield job, error

    def stream(self, prompt: str, params: SamplingParams) -> Generator[str, None, None]:
        return self._stream(self._result(prompt), lambda _: None)

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, str]],
        params: SamplingParams,
        *,
        session_id: str | None = None,
        on_result: Callable[[GenerationResult], object] = lambda _: None,
    ) -> Generator[str, None, None]:
        self.conversations.append(list(messages))
        self.sessions.append(session_id)
        self.params.append(params)
        return self._stream(self._result(messages[-1]["content"]), on_result)

    def _stream(
        self, result: GenerationResult, on_result: Callable[[GenerationResult], object]
    ) -> Generator[str, None, None]:
        yield result.text
        on_result(result)
        if result.state is not RequestState.COMPLETED:
            raise WeftError(f"the text is not complete: {result.error}")


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[[Answer], FakeLLM]:
    """Replaces the model of both commands by a FakeLLM."""
    # The memory table is printed only in a terminal.
    monkeypatch.delenv("FORCE_COLOR", raising=False)

    def arrange(answer: Answer) -> FakeLLM:
        llm = FakeLLM(answer)
        monkeypatch.setattr("weft.llm.LLM", lambda path, **options: llm)
        monkeypatch.setattr("weft.cli.start.fetch", lambda model: Path("model.gguf"))
        return llm

    return arrange


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    def arrange(content: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), "utf-8"))

    return arrange


class Terminal(io.TextIOWrapper):
    """A stream that claims to be a terminal."""

    def __init__(self) -> None:
        self.content = io.BytesIO()
        super().__init__(self.content, "utf-8")

    def isatty(self) -> bool:
        return True


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["weft", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    assert isinstance(caught.value.code, int)
    return caught.value.code


# --- generate ---------------------------------------------------------------------------------------------------


def test_generate_reports_where_standard_input_is_not_utf8(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Python opens standard input like this in the C locale. This stream accepts invalid UTF-8.
    content = io.BytesIO("é".encode() + b"ab\xffc")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(content, "utf-8", errors="surrogateescape"))
    assert run_main(monkeypatch, "generate", "-") == 2
    assert capsys.readouterr().err == "weft: standard input is not UTF-8 at byte 4; convert it first\n"


def test_generate_reads_standard_input_once(
    stdin: Callable[[bytes], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stdin(b"text")
    assert run_main(monkeypatch, "generate", "-", "x", "-") == 2
    assert "'-' is given 2 times; allowed: once" in capsys.readouterr().err
    for arguments in (("-",), ()):
        monkeypatch.setattr(sys, "stdin", None)  # `<&-`
        assert run_main(monkeypatch, "generate", *arguments) == 2
        assert "standard input is empty" in capsys.readouterr().err


def test_generate_without_a_prompt_does_not_wait_for_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal())
    assert run_main(monkeypatch, "generate") == 2
    assert "no prompt is given" in capsys.readouterr().err


def test_in_a_terminal_every_answer_has_a_heading(
    serve: Callable[[Answer], FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    two = dataclasses.replace(DONE, siblings=(dataclasses.replace(DONE, text=" else"),))
    serve(lambda prompt: two if prompt == "b" else DONE)
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    assert run_main(monkeypatch, "generate", "a", "b") == 0
    assert screen.content.getvalue().decode().splitlines() == [
        *("--- prompt 1 of 2, answer 1 of 1", "a text", ""),
        *("--- prompt 2 of 2, answer 1 of 2", "b text", ""),
        *("--- prompt 2 of 2, answer 2 of 2", "b else", ""),
    ]


def test_generate_with_chat_refuses_a_model_without_a_chat_template(
    serve: Callable[[Answer], FakeLLM], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    serve(lambda prompt: "never").text.chat_template = None
    assert run_main(monkeypatch, "generate", "--chat", "x") == 2
    assert capsys.readouterr() == ("", "weft: the model has no chat template; leave --chat out\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_at_standard_output_is_an_error_of_one_line(
    serve: Callable[[Answer], FakeLLM], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    serve(lambda prompt: "yes")
    full = Path("/dev/full").open("w")  # noqa: SIM115  # closing it would fail
    monkeypatch.setattr(sys, "stdout", full)
    assert run_main(monkeypatch, "generate", "x") == 1
    assert capsys.readouterr().err == "weft: [Errno 28] No space left on device\n"
    with pytest.raises(OSError, match="No space"):
        full.close()


def test_a_character_that_the_terminal_cannot_encode_is_replaced(
    serve: Callable[[Answer], FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(lambda prompt: "café")
    content = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(content, "ascii"))
    assert run_main(monkeypatch, "generate", "x") == 0
    assert content.getvalue() == b"caf?\n"


def test_generate_prints_all_complete_answers_before_the_errors(
    serve: Callable[[Answer], FakeLLM], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cancelled = dataclasses.replace(FAILED, state=RequestState.CANCELLED, error="deadline passed")
    answers = {"bad": FAILED, "late": cancelled}
    serve(lambda prompt: answers.get(prompt, DONE))
    assert run_main(monkeypatch, "generate", "bad", "one", "late", "two") == 1
    captured = capsys.readouterr()
    assert captured.out == "one text\n\ntwo text\n\n"
    assert captured.err.splitlines() == [
        "the prompt 'bad' failed: out of luck",
        "the prompt 'late' failed: deadline passed",
        "weft: 2 of 4 prompts failed",
    ]
    assert run_main(monkeypatch, "generate", "late") == 1
    assert capsys.readouterr() == (" te", "weft: the text is not complete: deadline passed\n")


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--temperature", "nan", "temperature is nan; allowed: from 0, up to 100"),
        ("--temperature", "-1", "temperature is -1.0; allowed: from 0, up to 100"),
        ("--max-tokens", "0", "max_tokens is 0; allowed: a whole number from 1 to 2147483647"),
    ],
)
@pytest.mark.parametrize("command", [["generate", "x"], ["chat"]])
def test_a_value_out_of_range_is_refused_with_the_message_of_the_request(
    command: list[str],
    option: str,
    value: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_main(monkeypatch, *command, option, value) == 2
    assert capsys.readouterr() == ("", f"weft: {message}\n")


# --- chat -------------------------------------------------------------------------------------------------------


def test_chat_needs_a_chat_template_before_the_first_prompt(
    serve: Callable[[Answer], FakeLLM],
    stdin: Callable[[bytes], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from weft.text.model_text import ModelText

    llm = serve(lambda prompt: "never")
    llm.text = ModelText(None, None)  # type: ignore[arg-type, assignment]
    stdin(b"hello\n")
    assert run_main(monkeypatch, "chat") == 2
    assert "the model has no chat template" in capsys.readouterr().err
    assert llm.conversations == [] and sys.stdin.read() == "hello\n"


def test_chat_without_a_standard_input_ends_at_once(
    serve: Callable[[Answer], FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = serve(lambda prompt: "never")
    monkeypatch.setattr(sys, "stdin", None)
    assert run_main(monkeypatch, "chat") == 0
    assert llm.conversations == []


def test_chat_advises_to_clear_only_if_the_context_is_full(
    serve: Callable[[Answer], FakeLLM], stdin: Callable[[bytes], None], capsys: pytest.CaptureFixture[str]
) -> None:
    errors = {
        "long": InvalidRequestError("prompt has 9 tokens\x1b[31m", code="context_length_exceeded"),
        "other": InvalidRequestError("the template [b]refused[/b]"),
    }
    serve(lambda prompt: errors[prompt])
    stdin(b"other\n")
    chat_command(**OPTIONS, system=None)
    err = capsys.readouterr().err
    assert "the template [b]refused[/b]" in err and "/clear" not in err
    stdin(b"long\n")
    chat_command(**OPTIONS, system=None)
    assert "prompt has 9 tokens\\x1b[31m\n/clear starts a new conversation." in capsys.readouterr().err


def test_chat_marks_an_answer_that_was_cut(
    serve: Callable[[Answer], FakeLLM], stdin: Callable[[bytes], None], capsys: pytest.CaptureFixture[str]
) -> None:
    cut = dataclasses.replace(DONE, finish_reason=FinishReason.LENGTH)
    answers = {"cut": cut, "full": dataclasses.replace(cut, tokens=(1,)), "done": DONE}
    llm = serve(answers.__getitem__)
    for line, marker in (("cut", "[cut at 4 tokens]"), ("full", "the context is full"), ("done", None)):
        stdin(line.encode())
        chat_command(**OPTIONS, system=None)
        captured = capsys.readouterr()
        assert captured.out == " text\n"
        assert marker in captured.err if marker else "cut" not in captured.err
    assert len(llm.conversations) == 3


def test_an_error_in_the_middle_of_an_answer_starts_on_a_new_line(
    serve: Callable[[Answer], FakeLLM], stdin: Callable[[bytes], None], capsys: pytest.CaptureFixture[str]
) -> None:
    llm = serve(lambda prompt: FAILED if prompt == "bad" else DONE)
    stdin(b"bad\ngood\n")
    chat_command(**OPTIONS, system=None)
    captured = capsys.readouterr()
    assert captured.out == " te\n text\n"
    assert "not complete: out of luck" in captured.err
    assert llm.conversations[1] == [{"role": "user", "content": "good"}], (
        "a failed message stays in the conversation"
    )


def test_chat_survives_bytes_that_are_not_utf8(
    serve: Callable[[Answer], FakeLLM], stdin: Callable[[bytes], None]
) -> None:
    llm = serve(lambda prompt: "yes")
    stdin(b"a\xffb\nnext\n")
    chat_command(**OPTIONS, system=None)
    assert [messages[-1]["content"] for messages in llm.conversations] == ["a\ufffdb", "next"]


def test_two_slashes_send_a_message_with_one(
    serve: Callable[[Answer], FakeLLM], stdin: Callable[[bytes], None], capsys: pytest.CaptureFixture[str]
) -> None:
    llm = serve(lambda prompt: "yes")
    stdin(b'//etc/hosts\n  //x\n/etc\n"""/etc\n/exit"""\n"""//x"""\n/quit\nnever\n')
    chat_command(**OPTIONS, system=None)
    sent = [messages[-1]["content"] for messages in llm.conversations]
    assert sent == ["/etc/hosts", "  /x", "/etc\n/exit", "//x"], "text in quotes is not a command"
    assert capsys.readouterr().err.count("no command '/etc'") == 1


def test_markup_in_a_file_name_is_printed_as_it_is(
    serve: Callable[[Answer], FakeLLM], stdin: Callable[[bytes], None], capsys: pytest.CaptureFixture[str]
) -> None:
    serve(lambda prompt: "yes")
    stdin(b"")
    chat_command(**{**OPTIONS, "model": "/folder/[red]model.gguf"}, system=None)
    assert "[red]model.gguf - /help" in capsys.readouterr().err


def test_a_conversation_has_one_session_until_it_is_cleared(
    serve: Callable[[Answer], FakeLLM], stdin: Callable[[bytes], None]
) -> None:
    llm = serve(lambda prompt: "yes")
    stdin(b"one\ntwo\n/clear\nthree\n/system be brief\nfour\n")
    chat_command(**OPTIONS, system=None)
    first, second, third, fourth = llm.sessions
    assert first == second and len({first, third, fourth}) == 3 and None not in llm.sessions
    assert [len(messages) for messages in llm.conversations] == [1, 3, 1, 2]
    assert llm.conversations[3][0] == {"role": "system", "content": "be brief"}


def test_regenerate_uses_another_seed(
    serve: Callable[[Answer], FakeLLM], stdin: Callable[[bytes], None], capsys: pytest.CaptureFixture[str]
) -> None:
    answers = iter(["first", "second", "third"])
    llm = serve(lambda prompt: next(answers))
    stdin(b"/regenerate\none\n/regenerate\ntwo\n")
    chat_command(**{**OPTIONS, "temperature": 0.9}, system=None)
    err = capsys.readouterr().err
    assert "There is no answer yet." in err and "At temperature 0" not in err
    assert [params.seed for params in llm.params if params] == [0, 1, 0]
    assert [params.temperature for params in llm.params if params] == [0.9, 0.9, 0.9]
    assert llm.conversations[1] == llm.conversations[0]
    assert llm.conversations[2][1] == {"role": "assistant", "content": "second"}


def test_regenerate_at_temperature_0_samples_and_reports_it(
    serve: Callable[[Answer], FakeLLM], stdin: Callable[[bytes], None], capsys: pytest.CaptureFixture[str]
) -> None:
    llm = serve(lambda prompt: "yes")
    stdin(b"one\n/regenerate\n/regenerate\ntwo\n")
    chat_command(**{**OPTIONS, "seed": MAX_SEED}, system=None)
    assert [params.temperature for params in llm.params if params] == [0, 0.7, 0.7, 0]
    assert len({params.seed for params in llm.params[:3] if params}) == 3
    assert capsys.readouterr().err.count("At temperature 0 the answer is always the same") == 2


def test_a_failed_regenerate_keeps_the_first_answer(
    serve: Callable[[Answer], FakeLLM], stdin: Callable[[bytes], None]
) -> None:
    answers: Iterator[str | WeftError] = iter(["first", WeftError("no"), "third"])
    llm = serve(lambda prompt: next(answers))
    stdin(b"one\n/regenerate\ntwo\n")
    chat_command(**OPTIONS, system=None)
    assert llm.conversations[2][1] == {"role": "assistant", "content": "first"}


@pytest.mark.usefixtures("ctrl_c_is_handled")
def test_a_stopped_answer_stays_in_the_conversation_as_far_as_it_was_shown(
    serve: Callable[[Answer], FakeLLM], stdin: Callable[[bytes], None], capsys: pytest.CaptureFixture[str]
) -> None:
    def press_ctrl_c(times: int) -> None:
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)

    class Stopped(FakeLLM):
        def _stream(
            self, result: GenerationResult, on_result: Callable[[GenerationResult], object]
        ) -> Generator[str, None, None]:
            if result.text == "early":
                press_ctrl_c(1)
            try:
                yield result.text
                press_ctrl_c(1)
                on_result(result)
            finally:
                press_ctrl_c(3)  # while the answer is being stopped, and after its end

    llm = serve(lambda prompt: prompt)
    llm.__class__ = Stopped
    stdin(b"early\nlate\n/exit\n")
    chat_command(**OPTIONS, system=None)
    captured = capsys.readouterr()
    assert captured.err.count("[stopped]") == 2 and captured.out == "\nlate\n"
    assert [len(messages) for messages in llm.conversations] == [1, 1], "an answer without text is not added"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("ctrl_c_is_ignored")
def test_a_chat_in_the_background_ignores_ctrl_c(
    serve: Callable[[Answer], FakeLLM], stdin: Callable[[bytes], None], capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(prompt: str) -> str:
        os.kill(os.getpid(), signal.SIGINT)
        return prompt

    serve(answer)
    stdin(b"one\ntwo\n")
    chat_command(**OPTIONS, system=None)
    captured = capsys.readouterr()
    assert captured.out == "one\ntwo\n" and "[stopped]" not in captured.err


@pytest.mark.usefixtures("ctrl_c_is_handled")
def test_the_stats_are_of_the_last_answer_even_if_it_was_stopped(
    serve: Callable[[Answer], FakeLLM], stdin: Callable[[bytes], None], capsys: pytest.CaptureFixture[str]
) -> None:
    class Stopped(FakeLLM):
        def _stream(
            self, result: GenerationResult, on_result: Callable[[GenerationResult], object]
        ) -> Generator[str, None, None]:
            try:
                yield result.text
                os.kill(os.getpid(), signal.SIGINT)
            finally:
                on_result(dataclasses.replace(result, state=RequestState.CANCELLED))

    llm = serve(lambda prompt: dataclasses.replace(DONE, prompt_token_count=int(prompt)))
    llm.__class__ = Stopped
    stdin(b"/stats\n7\n/stats\n1234\n/stats\n/clear\n/stats\n")
    chat_command(**OPTIONS, system=None)
    lines = [line for line in capsys.readouterr().err.splitlines() if "answer" in line]
    assert [line.split(" tokens")[0] for line in lines] == [
        *("There is no answer yet.", "prompt 7", "prompt 1,234", "There is no answer yet.")
    ]


@pytest.mark.usefixtures("ctrl_c_is_handled")
def test_ctrl_c_prints_the_exit_hint_once_and_a_message_of_several_lines_has_its_own_prompt(
    serve: Callable[[Answer], FakeLLM], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = iter(["ctrl-c", "ctrl-c", '"""', "a", 'b"""', "ctrl-d"])
    input_prompts: list[str] = []

    def type_line(input_prompt: str) -> str:
        input_prompts.append(input_prompt)
        key = next(keys)
        if key == "ctrl-c":
            os.kill(os.getpid(), signal.SIGINT)
        if key == "ctrl-d":
            raise EOFError
        return key

    llm = serve(lambda prompt: "yes")
    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr("builtins.input", type_line)
    chat_command(**OPTIONS, system=None)
    assert input_prompts == ["> ", "> ", "> ", ". ", ". ", "> "]
    assert capsys.readouterr().err.count("Press Ctrl-D or type /exit to leave.") == 1
    assert llm.conversations[0][-1]["content"] == "a\nb"


def test_a_message_can_have_several_lines(
    serve: Callable[[Answer], FakeLLM], stdin: Callable[[bytes], None]
) -> None:
    llm = serve(lambda prompt: "yes")
    stdin(b'a\\\nb\\\nc\n"""first\n\n/help\nlast"""\n"""\nx\n"""\n"""one"""\nend\\\n')
    chat_command(**OPTIONS, system=None)
    sent = [messages[-1]["content"] for messages in llm.conversations]
    assert sent == ["a\nb\nc", "first\n\n/help\nlast", "x\n", "one", "end"]


def test_a_conversation_is_saved_to_a_new_file_only(
    serve: Callable[[Answer], FakeLLM],
    stdin: Callable[[bytes], None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    serve(lambda prompt: "yes")
    paths = (f"{tmp_path}/talk.jsonl", f"{tmp_path}/talk.jsonl", "", "~missing-user/x", "a\0b")
    stdin("".join(["hé\n", *(f"/save {path}\n" for path in paths)]).encode())
    chat_command(**OPTIONS, system=None)
    lines = [json.loads(line) for line in (tmp_path / "talk.jsonl").read_text().splitlines()]
    assert lines == [{"role": "user", "content": "hé"}, {"role": "assistant", "content": "yes"}]
    err = capsys.readouterr().err
    assert "Saved 2 messages to" in err and "exists already; choose another name" in err
    assert "needs a file name" in err and "~missing-user/x: cannot be written" in err
    assert "a\\x00b: cannot be written" in err


def test_a_terminal_shows_the_memory_of_the_model(
    serve: Callable[[Answer], FakeLLM], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    serve(lambda prompt: "yes")
    assert run_main(monkeypatch, "generate", "x") == 0
    assert capsys.readouterr() == ("yes\n", "")
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "dumb")  # no colours
    assert run_main(monkeypatch, "generate", "x") == 0
    screen.flush()
    lines = [" ".join(line.split()) for line in screen.content.getvalue().decode().splitlines()]
    assert {"weights 3 MiB", "swap 1 MiB at most"} <= set(lines)
    assert "KV cache 2 MiB at most: 4,096 tokens, 2,048 in one context" in lines


# --- what both share --------------------------------------------------------------------------------------------


def test_control_characters_are_escaped() -> None:
    assert printable("a\x1b[31mb\tc\nd\x07\u202e") == "a\\x1b[31mb\tc\nd\\x07\\u202e"
    assert one_line(WeftError("two\nlines \x1b")) == "two lines \\x1b"
    assert one_line(WeftError()) == "WeftError"


def test_text_of_every_script_is_printed_as_it_is() -> None:
    text = "é 🎉 👨\u200d👩\u200d👧 日本\u3000語 10\u202f000\u00a0€ می\u200cخواهم"
    assert printable(text) == text


# --- pull -------------------------------------------------------------------------------------------------------


def test_a_path_is_pulled_only_if_weft_can_run_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    notes, folder = tmp_path / "notes.gguf", tmp_path / "model"
    notes.write_text("This is no model at all.")
    assert run_main(monkeypatch, "pull", str(notes)) == 2
    assert f"{notes}: magic: " in capsys.readouterr().err
    folder.mkdir()
    assert run_main(monkeypatch, "pull", str(folder)) == 2
    assert f"{folder}: holds no model" in capsys.readouterr().err
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (folder / "config.json").write_text('{"architectures": ["NoSuchForCausalLM"]}')
    assert run_main(monkeypatch, "pull", str(folder)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"{folder}: architectures: 'NoSuchForCausalLM' is not supported" in captured.err
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    assert run_main(monkeypatch, "pull", str(folder)) == 0
    assert capsys.readouterr() == (f"{folder}\n", "")


def test_the_list_of_models_reports_a_broken_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WEFT_HOME", str(tmp_path))
    link = tmp_path / "models" / "m.gguf"
    link.parent.mkdir()
    link.symlink_to("/nowhere/at/all")
    assert run_main(monkeypatch, "models") == 0
    assert "it is a link to /nowhere/at/all, which does not exist" in capsys.readouterr().out
    assert run_main(monkeypatch, "remove", str(link)) == 0
    assert not link.is_symlink() and "Deleted" in capsys.readouterr().err


# --- help -------------------------------------------------------------------------------------------------------


def test_help_shows_no_python_types_and_no_truncated_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    commands = ("pull", "models", "remove", "generate", "chat", "replay", "simulate-check", "bench")
    for command in commands:
        assert run_main(monkeypatch, command, "--help") == 0
        out = capsys.readouterr().out
        assert "<" not in out, "a type of Python is shown"
    assert run_main(monkeypatch, "--help") == 0
    out = capsys.readouterr().out
    assert all(f"\n  {command} " in out for command in commands) and "..." not in out.split("Commands:")[1]


def test_help_of_replay_promises_only_equal_plans(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(monkeypatch, "replay", "--help") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "every plan has to be the same" in out and "token" not in out
