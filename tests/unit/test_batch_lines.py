"""Lines of a batch file: what they ask for, what is wrong with them, and what an earlier output already answers."""

from __future__ import annotations

import io
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from weft.cli import lines as lines_module
from weft.cli.answers import error_answer
from weft.cli.batch import Output, open_output
from weft.cli.lines import Line, Wishes, make_job, read_line, read_lines
from weft.errors import InvalidRequestError, WeftError
from weft.llm import Job
from weft.request import SamplingParams

USER = [{"role": "user", "content": "hi"}]


def default_params(*, chat: bool = False, **overrides: Any) -> SamplingParams:
    """A model whose makers suggest a temperature."""
    return SamplingParams(**{"max_tokens": None if chat else 16, "temperature": 0.5, **overrides})


def job_of(content: object, wishes: Wishes | None = None) -> Job:
    line, read = read_line(json.dumps(content).encode(), 0, "plain")
    if isinstance(read, InvalidRequestError):
        raise read
    return make_job(line, read, wishes or Wishes(), default_params)


def request(body: dict[str, object], url: str = "/v1/chat/completions") -> dict[str, object]:
    return {"custom_id": "a", "method": "POST", "url": url, "body": body}


def params_of(content: object, wishes: Wishes | None = None) -> SamplingParams:
    params = job_of(content, wishes).params
    assert params is not None
    return params


# --- what a line asks for ---------------------------------------------------------------------------------------


def test_a_line_is_a_prompt_a_conversation_or_a_request_of_the_openai_format() -> None:
    assert job_of("text").prompt == "text"
    assert job_of({"prompt": [1, 2]}).prompt == [1, 2]
    assert job_of({"messages": USER}).messages == USER
    chat = job_of(request({"model": "any", "messages": USER}))
    assert chat.messages == USER and chat.key == Line(0, "chat", "a")
    completion = job_of(request({"prompt": "x"}, "/v1/completions"))
    assert completion.prompt == "x" and completion.key == Line(0, "completion", "a")


def test_what_is_not_said_comes_from_the_command_line_then_from_the_model() -> None:
    wishes = Wishes({"top_p": 0.9, "seed": 3})
    assert params_of("x", wishes) == SamplingParams(max_tokens=64, temperature=0.5, top_p=0.9, seed=3)
    assert params_of({"prompt": "x", "seed": 4, "max_tokens": 2}, wishes).seed == 4
    assert params_of({"messages": USER}).max_tokens is None
    assert params_of(request({"messages": USER})).max_tokens is None
    assert params_of(request({"prompt": "x"}, "/v1/completions")).max_tokens == 16
    assert params_of(request({"prompt": "x"}, "/v1/completions"), Wishes({"max_tokens": 5})).max_tokens == 5


def test_null_stands_for_the_default() -> None:
    content = {"prompt": "x", "temperature": None, "messages": None, "stop": None, "id": None}
    assert params_of(content) == params_of("x")


def test_parameters_go_by_the_names_of_either_api() -> None:
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


def test_with_chat_a_plain_prompt_is_a_message() -> None:
    wishes = Wishes(as_chat=True, system="be brief")
    job = job_of("hi", wishes)
    assert job.prompt is None
    assert job.messages == [{"role": "system", "content": "be brief"}, *USER]
    assert job_of({"messages": USER}, wishes).messages == USER, "a conversation is complete as it is"


# --- what is wrong with a line ----------------------------------------------------------------------------------


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
        ({"prompt": "x", "tools": []}, "tools is for messages"),
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
def test_a_bad_line_is_refused_by_what_is_wrong_in_it(content: object, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        job_of(content)


@pytest.mark.parametrize(
    "raw", [b"{", b"\xff", b'"\\ud800"', b'{"prompt": "x", "temperature": NaN}', b"[" * 100_000]
)
def test_what_is_no_json_is_refused(raw: bytes) -> None:
    line, error = read_line(raw, 6, "chat")
    assert line == Line(6, "chat")
    assert isinstance(error, InvalidRequestError) and error.code == "invalid_json"


def test_an_error_is_told_in_the_form_of_the_request() -> None:
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
    nobody = error_answer(Line(4, "chat"), error)
    assert nobody["response"] is None and nobody["error"]["message"] == "line 5: too hot"


def test_a_line_without_end_is_skipped_and_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "MAX_LINE_BYTES", 10)
    first, second, third = read_lines(io.BytesIO(b"a" * 10_000 + b"\n" + b"short\n" + b"last"))
    assert isinstance(first, InvalidRequestError)
    assert (second, third) == (b"short\n", b"last")


# --- the output -------------------------------------------------------------------------------------------------


def test_an_output_that_exists_is_kept_unless_the_caller_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("old\n")
    with (
        pytest.raises(InvalidRequestError, match=r"--resume .* --overwrite"),
        open_output(path, False, False),
    ):
        pass
    assert path.read_text() == "old\n"
    with open_output(path, True, False) as output:
        output.write({"a": "é"})
    assert path.read_text() == '{"a": "é"}\n'


def test_resuming_keeps_whole_answers_and_drops_errors_and_what_was_cut(tmp_path: Path) -> None:
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
        "something else",
    ]
    path.write_text(
        "".join(json.dumps(one) + "\n" for one in [*kept, *dropped]) + '{"index": 9, "text": "x"}'
    )
    with open_output(path, False, True) as output:
        assert output.done == {0, "one", "two"}
        output.write({"index": 6, "text": "y"})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [*kept, {"index": 6, "text": "y"}]
    with open_output(tmp_path / "new.jsonl", False, True) as output:
        assert output.done == frozenset()


def test_ctrl_c_waits_for_the_line_that_is_being_written(tmp_path: Path) -> None:
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
