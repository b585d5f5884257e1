"""Lines of a batch file: jobs, errors, and resuming an earlier output."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from weft.cli.batch_file import Output, open_output
from weft.cli.lines import Line, LineDefaults, make_job, read_line
from weft.cli.result_json import answer, error_answer
from weft.errors import InvalidRequestError, WeftError
from weft.json_lines import read_lines
from weft.llm import PromptJob
from weft.request import (
    FinishReason,
    GenerationResult,
    RequestId,
    RequestState,
    SamplingParams,
    TokenLogprobs,
)

USER = [{"role": "user", "content": "hi"}]


class Model:
    """The part of an LLM that a line needs."""

    def __init__(self, **suggestions: float) -> None:
        self.suggestions = suggestions

    def default_params(self, *, chat: bool = False, **overrides: Any) -> SamplingParams:
        return SamplingParams(**{"max_tokens": None if chat else 16, **self.suggestions, **overrides})


def job_of(content: object, defaults: LineDefaults | None = None, model: Model | None = None) -> PromptJob:
    line, read = read_line(json.dumps(content).encode(), 0, "plain")
    if isinstance(read, InvalidRequestError):
        raise read
    return make_job(line, read, defaults or LineDefaults(), model or Model(temperature=0.5))  # type: ignore[arg-type]


def request(body: dict[str, object], url: str = "/v1/chat/completions") -> dict[str, object]:
    return {"custom_id": "a", "method": "POST", "url": url, "body": body}


def params_of(
    content: object, defaults: LineDefaults | None = None, model: Model | None = None
) -> SamplingParams:
    params = job_of(content, defaults, model).params
    assert params is not None
    return params


# --- jobs -------------------------------------------------------------------------------------------------------


def test_a_line_is_a_prompt_a_conversation_or_a_request_of_the_openai_format() -> None:
    assert job_of("text").prompt == "text"
    assert job_of({"prompt": [1, 2]}).prompt == [1, 2]
    assert job_of({"messages": USER}).messages == USER
    chat = job_of(request({"model": "any", "messages": USER}))
    assert chat.messages == USER and chat.key == Line(0, "chat", "a")
    completion = job_of(request({"prompt": "x"}, "/v1/completions"))
    assert completion.prompt == "x" and completion.key == Line(0, "completion", "a")


def test_missing_parameters_come_from_the_command_line_then_from_the_model() -> None:
    defaults = LineDefaults({"top_p": 0.9, "seed": 3})
    assert params_of("x", defaults) == SamplingParams(max_tokens=64, temperature=0.5, top_p=0.9, seed=3)
    assert params_of({"prompt": "x", "seed": 4, "max_tokens": 2}, defaults).seed == 4
    assert params_of({"messages": USER}).max_tokens is None
    assert params_of(request({"messages": USER})).max_tokens is None
    assert params_of(request({"prompt": "x"}, "/v1/completions")).max_tokens == 16
    assert (
        params_of(request({"prompt": "x"}, "/v1/completions"), LineDefaults({"max_tokens": 5})).max_tokens
        == 5
    )


def test_without_a_recommendation_the_temperature_is_1_in_the_openai_format_and_0_in_plain_lines() -> None:
    model = Model()
    assert params_of("x", model=model).temperature == 0
    assert params_of({"messages": USER}, model=model).temperature == 0
    assert params_of(request({"messages": USER}), model=model).temperature == 1
    assert params_of("x", LineDefaults({"temperature": 0.3}), model).temperature == 0.3


def test_null_means_the_default() -> None:
    content = {"prompt": "x", "temperature": None, "messages": None, "stop": None, "id": None}
    assert params_of(content) == params_of("x")


def test_parameters_may_have_the_names_of_weft_or_of_the_openai_api() -> None:
    params = params_of(
        request(
            {
                "messages": USER,
                **{"max_completion_tokens": 9, "stop": "END", "logprobs": True, "top_logprobs": 2},
                **{"logit_bias": {"5": -1.5}, "n": 3, "stream": False, "user": "me"},
                "response_format": {"type": "text"},
            }
        )
    )
    assert (params.max_tokens, params.stop, params.logprobs, params.n) == (9, ("END",), 2, 3)
    assert params.logit_bias == {5: -1.5}
    assert params_of(request({"messages": USER, "logprobs": True})).logprobs == 0
    assert params_of(request({"messages": USER, "logprobs": False})).logprobs is None
    assert params_of({"prompt": "x", "logprobs": 3, "top_k": 7, "min_p": 0.1}).logprobs == 3


def test_with_chat_a_plain_prompt_becomes_a_message() -> None:
    defaults = LineDefaults(as_chat=True, system="be brief")
    job = job_of("hi", defaults)
    assert job.prompt is None
    assert job.messages == [{"role": "system", "content": "be brief"}, *USER]
    assert job_of({"messages": USER}, defaults).messages == USER, "a conversation gets no system message"


# --- errors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (5, "a JSON int; allowed: a string or an object"),
        ({}, "either a prompt or messages; neither is given"),
        ({"prompt": "x", "messages": USER}, "both are given"),
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": ["a", "b"]}, "one prompt a line"),
        ({"prompt": [True]}, "list of token ids"),
        ({"prompt": "x", "temprature": 1}, "temprature is not a field of a request; allowed: .*temperature"),
        ({"prompt": "x", "temperature": "hot"}, "temperature is 'hot'"),
        ({"prompt": "x", "stream": True}, "stream is true; allowed here: false"),
        ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias has the key 'a'"),
        ({"prompt": "x", "top_logprobs": 2}, "top_logprobs needs"),
        ({"prompt": "x", "tools": []}, "tools must be a list of functions, and needs messages"),
        ({"prompt": "x", "id": [1]}, "neither a string nor a whole number"),
        ({"messages": "hi"}, "messages is not a list"),
        (
            request({"messages": USER}, "/v1/embeddings"),
            "url is '/v1/embeddings'; allowed: /v1/chat/completions",
        ),
        ({"custom_id": "a", "url": "/v1/completions"}, "body is not an object"),
        ({"url": "/v1/completions", "body": {}}, "custom_id is missing"),
        ({"custom_id": "a", "method": "GET", "url": "/v1/completions", "body": {}}, "method is 'GET'"),
        (request({"prompt": "x"}), "prompt is for /v1/completions"),
        (request({"messages": USER}, "/v1/completions"), "messages is for /v1/chat/completions"),
        (request({"messages": USER, "response_format": {"type": "json_object"}}), "response_format is"),
    ],
)
def test_an_invalid_line_is_refused_with_the_reason(content: object, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        job_of(content)


def test_the_error_lists_only_allowed_fields() -> None:
    with pytest.raises(InvalidRequestError, match="id is not a field of a request; allowed: ") as caught:
        job_of(request({"messages": USER, "id": "a"}))
    named = str(caught.value).split("allowed: ")[1].split(", ")
    assert "id" not in named and {"model", "max_completion_tokens", "stream", "top_logprobs"} <= set(named)
    with pytest.raises(InvalidRequestError, match=r"allowed: .*, id, "):
        job_of({"prompt": "x", "temprature": 1})


@pytest.mark.parametrize(
    "raw", [b"{", b"\xff", b'"\\ud800"', b'{"prompt": "x", "temperature": NaN}', b"[" * 100_000]
)
def test_invalid_json_is_refused(raw: bytes) -> None:
    line, error = read_line(raw, 6, "chat")
    assert line == Line(6, "chat")
    assert isinstance(error, InvalidRequestError) and error.code == "invalid_json"


def test_an_error_has_the_format_of_the_request() -> None:
    error = InvalidRequestError("too hot", field="temperature")
    details = {
        "message": "too hot",
        "type": "invalid_request_error",
        "param": "temperature",
        "code": "invalid_value",
    }
    assert error_answer(Line(4, "plain", "a"), error) == {
        "index": 4,
        "id": "a",
        "error": {**details, "line": 5},
    }
    answer = error_answer(Line(4, "chat", "a"), error)
    assert answer["custom_id"] == "a" and answer["error"] is None
    assert answer["response"]["status_code"] == 400 and answer["response"]["body"] == {"error": details}
    assert error_answer(Line(4, "chat", "a"), WeftError("broke"))["response"]["status_code"] == 500
    assert answer["response"]["request_id"] == "", "no request was made of the line"
    failed = error_answer(Line(4, "chat", "a"), error, "b-1")
    assert failed["response"]["request_id"] == "b-1"
    without_id = error_answer(Line(4, "chat"), error)
    assert without_id["response"] is None and without_id["error"]["message"] == "line 5: too hot"


def test_the_sampled_token_is_among_the_top_logprobs_of_a_completion() -> None:
    result = GenerationResult(
        request_id=RequestId("a-request"),
        tokens=(2,),
        text="c",
        state=RequestState.COMPLETED,
        finish_reason=FinishReason.LENGTH,
        error=None,
        waiting_time=0.0,
        prefill_time=0.0,
        decode_time=0.0,
        time_to_first_token=None,
        decode_steps=1,
        prompt_token_count=1,
        cached_token_count=0,
        preemptions=0,
        logprobs=(TokenLogprobs(-3.0, ((0, -0.1), (1, -2.5))),),
    )
    tokenizer: Any = SimpleNamespace(token_text=lambda token: "abc"[token])
    answered = answer(Line(0, "completion", "x"), result, tokenizer, "model")
    assert answered["response"]["request_id"] == "a-request"
    assert answered["response"]["body"]["id"] == "cmpl-a-request"
    several = answer(
        Line(0, "chat", "x"),
        dataclasses.replace(
            result, request_id=RequestId("b-0"), logprobs=None, siblings=(dataclasses.replace(result),)
        ),
        SimpleNamespace(token_bytes=lambda token: b"abc"[token : token + 1]),  # type: ignore[arg-type]
        "model",
    )
    assert several["response"]["request_id"] == "b", "the id of the request, not of its first answer"
    (choice,) = answered["response"]["body"]["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{"a": -0.1, "b": -2.5, "c": -3.0}]


def test_a_line_that_is_too_long_is_skipped() -> None:
    first, second, third = read_lines(io.BytesIO(b"a" * 10_000 + b"\n" + b"short\n" + b"last"), 10)
    assert isinstance(first, InvalidRequestError)
    assert (second, third) == (b"short\n", b"last")


# --- the output -------------------------------------------------------------------------------------------------


def test_an_existing_output_is_kept_without_overwrite_or_resume(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("old\n")
    with (
        pytest.raises(InvalidRequestError, match=r"--resume .* --overwrite"),
        open_output(path, False, False),
    ):
        pass
    assert path.read_text() == "old\n"
    with open_output(path, True, False) as output:
        assert path.read_text() == "old\n", "the file is kept until the model is loaded"
        output.begin()
        output.write({"a": "é"})
    assert path.read_text() == '{"a": "é"}\n'
    path.write_text("")
    with open_output(path, False, False):
        pass  # an empty file may be replaced: a run that ended early leaves one


def test_resuming_keeps_complete_answers_and_drops_errors_and_an_incomplete_line(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    kept = [
        {"index": 0, "text": "x"},
        {"index": 1, "id": "one", "text": "x"},
        {"id": "batch_req_2", "custom_id": "two", "response": {"status_code": 200}, "error": None},
    ]
    dropped = [
        {"index": 3, "error": {"message": "no"}},
        {"id": "batch_req_4", "custom_id": "four", "response": {"status_code": 500}, "error": None},
        {"id": "batch_req_5", "custom_id": None, "response": None, "error": {"message": "no"}},
    ]
    path.write_text(
        "".join(json.dumps(one) + "\n" for one in [*kept, *dropped]) + '{"index": 9, "text": "x"}'
    )
    with open_output(path, False, True) as output:
        assert output.done == {("index", 0), ("id", "one"), ("id", "two")}
        output.write({"index": 6, "text": "y"})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [*kept, {"index": 6, "text": "y"}]
    with open_output(tmp_path / "new.jsonl", False, True) as output:
        assert output.done == frozenset()


@pytest.mark.parametrize("foreign", ["notes", '"text"', '{"id": 1}', '{"custom_id": "a", "body": {}}'])
def test_a_file_that_weft_did_not_write_is_not_resumed(tmp_path: Path, foreign: str) -> None:
    path = tmp_path / "notes.txt"
    content = f'{{"index": 0, "text": "x"}}\n{foreign}\n'
    path.write_text(content)
    with (
        pytest.raises(InvalidRequestError, match="line 2 was not written by weft"),
        open_output(path, False, True),
    ):
        pass
    assert path.read_text() == content and [one.name for one in tmp_path.iterdir()] == ["notes.txt"]


def test_resuming_keeps_the_mode_of_the_file_and_the_link_to_it(tmp_path: Path) -> None:
    real, link = tmp_path / "real.jsonl", tmp_path / "link.jsonl"
    real.write_text('{"index": 0, "text": "x"}\n{"cut')
    real.chmod(0o600)
    link.symlink_to(real)
    with open_output(link, False, True) as output:
        output.write({"index": 1, "text": "y"})
    assert link.is_symlink() and real.stat().st_mode & 0o777 == 0o600
    assert [json.loads(line)["index"] for line in real.read_text().splitlines()] == [0, 1]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_the_error_of_a_full_disk_advises_to_resume() -> None:
    with (
        pytest.raises(WeftError, match=r"/dev/full: cannot be written: No space .* --resume continues"),
        open_output(Path("/dev/full"), False, False) as output,
    ):
        output.write({"index": 0})


@pytest.mark.usefixtures("ctrl_c_is_ignored")
def test_a_batch_in_the_background_ignores_ctrl_c(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with open_output(path, False, False) as output:
        os.kill(os.getpid(), signal.SIGINT)
        output.write({"index": 0})
    assert path.read_text() == '{"index": 0}\n'


def test_ctrl_c_takes_effect_after_the_current_line(tmp_path: Path) -> None:
    class Interrupted(io.BytesIO):
        def write(self, content: Any) -> int:
            half = len(content) // 2
            super().write(content[:half])
            os.kill(os.getpid(), signal.SIGINT)
            return half + super().write(content[half:])

    file = Interrupted()
    output = Output(file)
    previous = signal.signal(signal.SIGINT, output.interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            output.write({"text": "whole"})
    finally:
        signal.signal(signal.SIGINT, previous)
    assert file.getvalue() == b'{"text": "whole"}\n'
