"""The commands without a model: what they read, what they say, and how they end."""

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
from weft.cli.terminal import one_line, printable
from weft.errors import InvalidRequestError, WeftError
from weft.llm import Job, MemoryUse
from weft.request import FinishReason, GenerationResult, RequestId, RequestState, SamplingParams

OPTIONS: dict[str, Any] = {
    **{"model": "default", "context": None, "verbose": False},
    **{"max_tokens": 4, "temperature": 0.0, "seed": 0},
}
DONE = GenerationResult(
    request_id=RequestId(0),
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
    """Answers the last message (or prompt) with what `answer` makes of it, and remembers what it was asked."""

    memory = MemoryUse(weights=3 << 20, kv_cache=2 << 20, swap=1 << 20, kv_tokens=4096, max_context=2048)

    suggestions: dict[str, float] = {}  # noqa: RUF012

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.asked: list[Sequence[Mapping[str, str]]] = []
        self.sessions: list[str | None] = []
        self.params: list[SamplingParams | None] = []
        self.text = SimpleNamespace(require_chat_template=lambda: None, tokenizer=None)

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

    def run(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, GenerationResult | WeftError]]:
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
        self.asked.append(list(messages))
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
    """Puts a FakeLLM in the place of the model for both commands."""

    def arrange(answer: Answer) -> FakeLLM:
        llm = FakeLLM(answer)
        monkeypatch.setattr("weft.llm.LLM", lambda path, max_context: llm)
        monkeypatch.setattr("weft.cli.start.fetch", lambda model: Path("model.gguf"))
        return llm

    return arrange


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    def arrange(content: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), "utf-8"))

    return arrange


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["weft", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    assert isinstance(caught.value.code, int)
    return caught.value.code


# --- generate ---------------------------------------------------------------------------------------------------


def test_generate_says_where_standard_input_is_not_utf8(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # As Python sets it up where the locale is C: by itself this stream would refuse nothing.
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
    monkeypatch.setattr(sys, "stdin", None)
    assert run_main(monkeypatch, "generate", "-") == 2
    assert "standard input is closed" in capsys.readouterr().err


def test_generate_prints_all_that_is_complete_before_it_says_what_failed(
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
def test_a_value_out_of_range_is_refused_in_the_words_of_the_request(
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
    assert llm.asked == [] and sys.stdin.read() == "hello\n"


def test_chat_advises_to_clear_only_where_that_helps(
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
    assert "prompt has 9 tokens\\x1b[31m\n/clear starts anew." in capsys.readouterr().err


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
    assert len(llm.asked) == 3


def test_an_error_in_the_middle_of_an_answer_gets_a_line_of_its_own(
    serve: Callable[[Answer], FakeLLM], stdin: Callable[[bytes], None], capsys: pytest.CaptureFixture[str]
) -> None:
    llm = serve(lambda prompt: FAILED if prompt == "bad" else DONE)
    stdin(b"bad\ngood\n")
    chat_command(**OPTIONS, system=None)
    captured = capsys.readouterr()
    assert captured.out == " te\n text\n"
    assert "not complete: out of luck" in captured.err
    assert llm.asked[1] == [{"role": "user", "content": "good"}], "the conversation goes on without the line"


def test_chat_survives_bytes_that_are_no_text(
    serve: Callable[[Answer], FakeLLM], stdin: Callable[[bytes], None]
) -> None:
    llm = serve(lambda prompt: "yes")
    stdin(b"a\xffb\nnext\n")
    chat_command(**OPTIONS, system=None)
    assert [messages[-1]["content"] for messages in llm.asked] == ["a\ufffdb", "next"]


def test_two_slashes_send_one(
    serve: Callable[[Answer], FakeLLM], stdin: Callable[[bytes], None], capsys: pytest.CaptureFixture[str]
) -> None:
    llm = serve(lambda prompt: "yes")
    stdin(b"//etc/hosts\n  //x\n/etc\n")
    chat_command(**OPTIONS, system=None)
    assert [messages[-1]["content"] for messages in llm.asked] == ["/etc/hosts", "  /x"]
    assert "no command '/etc'" in capsys.readouterr().err


def test_the_name_of_a_file_is_no_markup(
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
    assert [len(messages) for messages in llm.asked] == [1, 3, 1, 2]
    assert llm.asked[3][0] == {"role": "system", "content": "be brief"}


def test_an_answer_is_given_once_more_with_another_seed(
    serve: Callable[[Answer], FakeLLM], stdin: Callable[[bytes], None], capsys: pytest.CaptureFixture[str]
) -> None:
    answers = iter(["first", "second", "third"])
    llm = serve(lambda prompt: next(answers))
    stdin(b"/regenerate\none\n/regenerate\ntwo\n")
    chat_command(**OPTIONS, system=None)
    assert "There is no answer yet." in capsys.readouterr().err
    assert [params.seed for params in llm.params if params] == [0, 1, 0]
    assert llm.asked[1] == llm.asked[0]
    assert llm.asked[2][1] == {"role": "assistant", "content": "second"}


def test_a_failed_second_try_leaves_the_first_answer(
    serve: Callable[[Answer], FakeLLM], stdin: Callable[[bytes], None]
) -> None:
    answers: Iterator[str | WeftError] = iter(["first", WeftError("no"), "third"])
    llm = serve(lambda prompt: next(answers))
    stdin(b"one\n/regenerate\ntwo\n")
    chat_command(**OPTIONS, system=None)
    assert llm.asked[2][1] == {"role": "assistant", "content": "first"}


def test_a_stopped_answer_is_remembered_as_far_as_it_was_said(
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
                press_ctrl_c(3)  # while it is being stopped, and when it is over

    llm = serve(lambda prompt: prompt)
    llm.__class__ = Stopped
    stdin(b"early\nlate\n/exit\n")
    chat_command(**OPTIONS, system=None)
    captured = capsys.readouterr()
    assert captured.err.count("[stopped]") == 2 and captured.out == "\nlate\n"
    assert [len(messages) for messages in llm.asked] == [1, 1], "nothing was said before the first word"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_message_can_have_several_lines(
    serve: Callable[[Answer], FakeLLM], stdin: Callable[[bytes], None]
) -> None:
    llm = serve(lambda prompt: "yes")
    stdin(b'a\\\nb\\\nc\n"""first\n\n/help\nlast"""\n"""\nx\n"""\n"""one"""\nend\\\n')
    chat_command(**OPTIONS, system=None)
    said = [messages[-1]["content"] for messages in llm.asked]
    assert said == ["a\nb\nc", "first\n\n/help\nlast", "x\n", "one", "end"]


def test_a_conversation_is_saved_to_a_new_file_only(
    serve: Callable[[Answer], FakeLLM],
    stdin: Callable[[bytes], None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    serve(lambda prompt: "yes")
    stdin(f"hé\n/save {tmp_path}/talk.jsonl\n/save {tmp_path}/talk.jsonl\n/save\n".encode())
    chat_command(**OPTIONS, system=None)
    lines = [json.loads(line) for line in (tmp_path / "talk.jsonl").read_text().splitlines()]
    assert lines == [{"role": "user", "content": "hé"}, {"role": "assistant", "content": "yes"}]
    err = capsys.readouterr().err
    assert "2 messages are in" in err and "cannot be written" in err and "needs the path" in err


def test_what_the_model_takes_is_told_to_who_asks(
    serve: Callable[[Answer], FakeLLM], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    serve(lambda prompt: "yes")
    monkeypatch.setattr(sys, "argv", ["weft", "generate", "x", "--verbose"])
    with pytest.raises(SystemExit):
        main()
    captured = capsys.readouterr()
    assert captured.out == "yes\n"
    told = [line.split() for line in captured.err.splitlines()]
    assert told[0] == ["weights", "3", "MiB"] and told[2] == ["swap", "1", "MiB", "at", "most"]
    assert " ".join(told[1]) == "KV cache 2 MiB at most: 4,096 tokens, 2,048 in one context"
    monkeypatch.setattr(sys, "argv", ["weft", "generate", "x"])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().err == ""


# --- what both share --------------------------------------------------------------------------------------------


def test_control_codes_do_not_reach_the_terminal() -> None:
    assert printable("a\x1b[31mb\tc\nd\x07\u202e") == "a\\x1b[31mb\tc\nd\\x07\\u202e"
    assert one_line(WeftError("two\nlines \x1b")) == "two lines \\x1b"
    assert one_line(WeftError()) == "WeftError"


def test_text_of_every_script_reaches_the_terminal_as_it_is() -> None:
    text = "é 🎉 👨\u200d👩\u200d👧 日本\u3000語 10\u202f000\u00a0€ می\u200cخواهم"
    assert printable(text) == text


def test_help_of_replay_claims_no_more_than_it_checks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(monkeypatch, "replay", "--help") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "every plan is the same" in out and "token" not in out
