"""The commands with the default model: prompts, JSON lines, Ctrl-C."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from weft.cli.batch_file import BatchFileRun, Output
from weft.cli.lines import LineDefaults
from weft.cli.main import main
from weft.llm import LLM
from weft.loading.default_model import DEFAULT_MODEL

GREEDY = ("--temperature", "0")
PARIS = "The capital of France is"


@pytest.fixture(scope="module")
def llm(default_model_path: Path) -> Iterator[LLM]:
    with LLM(max_running=2) as llm:
        yield llm


@pytest.fixture
def weft(llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command in this process, with a model that is loaded once. Returns exit code, stdout and stderr."""
    # A command closes its model; this one must stay open for the next test.
    monkeypatch.setattr("weft.cli.generate.start", lambda *arguments: _borrowed(llm))

    def run(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["weft", *arguments])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode()), "utf-8"))
        with pytest.raises(SystemExit) as caught:
            main()
        captured = capsys.readouterr()
        return caught.value.code, captured.out, captured.err  # type: ignore[return-value]

    return run


@contextmanager
def _borrowed(llm: LLM) -> Iterator[LLM]:
    yield llm


def json_lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


# --- prompts ----------------------------------------------------------------------------------------------------


def test_one_prompt_prints_only_its_answer(weft: Any) -> None:
    assert weft("generate", PARIS, "-n", "2", *GREEDY) == (0, " Paris.\n", "")


def test_prompts_come_from_arguments_standard_input_and_files(weft: Any, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("Water boils at")
    assert weft("generate", "-n", "2", *GREEDY, stdin=f"{PARIS}\n") == (0, " Paris.\n", "")
    code, out, _ = weft("generate", "-", "One, two,", "-f", str(file), "-n", "2", *GREEDY, stdin=PARIS)
    texts = out.split("\n\n")
    assert code == 0
    assert texts[0] == f"{PARIS} Paris."
    assert texts[1].startswith("One, two, ") and texts[2].startswith("Water boils at ")


def test_a_prompt_with_chat_is_a_message_and_may_have_several_answers(weft: Any, llm: LLM) -> None:
    code, out, _ = weft(
        "generate", "--chat", "Say hello.", "-n", "4", "--seed", "1", "--answers", "2", "-t", "1"
    )
    expected = llm.chat(
        [{"role": "user", "content": "Say hello."}],
        llm.default_params(max_tokens=4, seed=1, n=2, temperature=1),
    )
    assert code == 0 and out == "".join(f"{choice.text}\n\n" for choice in expected.choices)


def test_a_stop_string_ends_the_text(weft: Any) -> None:
    assert weft("generate", PARIS, "-n", "8", "--stop", ".", *GREEDY)[1] == " Paris\n"


def test_an_answer_matches_a_regular_expression_or_a_schema_in_a_file(weft: Any, tmp_path: Path) -> None:
    code, out, _ = weft("generate", "Call me at", "--regex", r"\d{3}-\d{2}", *GREEDY)
    assert code == 0 and re.fullmatch(r"\d{3}-\d{2}\n", out)
    schema = tmp_path / "schema.json"
    schema.write_text(
        '{"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], \
"additionalProperties": false}'
    )
    code, out, _ = weft("generate", "Is it?", "--json-schema", str(schema), *GREEDY)
    assert code == 0 and json.loads(out)["ok"] in (True, False)
    code, _, errors = weft("generate", "x", "--regex", "a(", *GREEDY)
    assert code == 2 and "unclosed group" in errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "standard input is empty"),
        (("x", "--regex", "a", "--json-schema", "x"), "--json-schema and --regex exclude each other"),
        (("x", "--input", "-"), "--input cannot be combined with other prompts"),
        (("x", "--system", "be brief"), "--system needs --chat"),
        (("-f", "/nowhere/x"), "/nowhere/x: cannot be read: No such file"),
        (("-i", "/nowhere/x"), "/nowhere/x: cannot be read: No such file"),
        (("x", "-o", "/nowhere/x"), "/nowhere/x: cannot be written: No such file"),
        (("x", "-o", "/"), "/: cannot be written: Is a directory"),
        (("x", "--resume"), "--resume needs --output with a file"),
        (("x", "--overwrite", "-o", "-"), "--overwrite needs --output with a file"),
        (("x", "--overwrite", "--resume", "-o", "x"), "--overwrite and --resume exclude each other"),
    ],
)
def test_invalid_arguments_exit_with_code_2_and_a_message(
    weft: Any, arguments: tuple[str, ...], message: str
) -> None:
    code, out, err = weft("generate", *arguments)
    assert code == 2 and out == "" and message in err


# --- JSON lines -------------------------------------------------------------------------------------------------


def test_valid_lines_are_answered_even_if_others_are_invalid(weft: Any) -> None:
    lines = [
        json.dumps(PARIS),
        "{not json",
        "",
        json.dumps({"prompt": PARIS, "max_tokens": 1, "id": "mine", "logprobs": 1, "n": 2}),
        json.dumps({"prompt": "x " * 9000}),
        json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}),
    ]
    code, out, err = weft("generate", "-i", "-", "-n", "2", *GREEDY, stdin="\n".join(lines))
    answers = {answer["index"]: answer for answer in json_lines(out)}
    assert code == 1 and "2 of 5 lines failed" in err and "3 done, 2 failed" in err
    assert answers[0] == {
        "index": 0,
        "text": " Paris.",
        "finish_reason": "length",
        "usage": {
            "prompt_tokens": 5,
            "completion_tokens": 2,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }
    assert answers[1]["error"]["line"] == 2 and answers[1]["error"]["code"] == "invalid_json"
    assert (
        answers[3]["id"] == "mine" and [choice["text"] for choice in answers[3]["choices"]] == [" Paris"] * 2
    )
    (token,) = answers[3]["choices"][0]["logprobs"]["content"]
    assert token["token"] == " Paris" and bytes(token["bytes"]) == b" Paris"
    assert token["top_logprobs"][0]["logprob"] == token["logprob"] < 0
    assert answers[4]["error"]["code"] == "context_length_exceeded"
    assert answers[5]["finish_reason"] == "length"


def test_requests_in_the_openai_batch_format_get_answers_in_that_format(weft: Any) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_completion_tokens": 2, "model": "any"}
    requests = [
        {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": chat},
        {
            "custom_id": "text",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": PARIS, "max_tokens": 2, "temperature": 0, "logprobs": 1},
        },
        {"custom_id": "bad", "method": "POST", "url": "/v1/completions", "body": {"prompt": PARIS, "n": 0}},
    ]
    code, out, _ = weft("generate", "-i", "-", stdin="\n".join(map(json.dumps, requests)))
    answers = {answer["custom_id"]: answer for answer in json_lines(out)}
    assert code == 1
    assert answers["bad"]["response"]["status_code"] == 400
    body = answers["chat"]["response"]["body"]
    assert answers["chat"]["error"] is None and answers["chat"]["response"]["status_code"] == 200
    assert body["object"] == "chat.completion" and body["model"] == DEFAULT_MODEL.file.name
    assert body["choices"][0]["message"]["role"] == "assistant" and body["usage"]["completion_tokens"] == 2
    body = answers["text"]["response"]["body"]
    assert body["object"] == "text_completion" and body["choices"][0]["text"] == " Paris."
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [" Paris", "."] and logprobs["text_offset"] == [0, 6]
    assert logprobs["top_logprobs"][0][" Paris"] == logprobs["token_logprobs"][0]


def test_an_interrupted_run_is_resumed(weft: Any, tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"id": f"n{i}", "prompt": f"{i} and"}) + "\n" for i in range(4)))
    arguments = ("generate", "-i", str(source), "-o", str(out), "-n", "1", *GREEDY)
    assert weft(*arguments)[0] == 0
    whole = {answer["id"]: answer for answer in json_lines(out.read_text())}
    assert set(whole) == {"n0", "n1", "n2", "n3"}
    assert weft(*arguments)[0] == 2, "an existing output is not overwritten"
    out.write_bytes(b"".join(out.read_bytes().splitlines(keepends=True)[:2]) + b'{"index": 2, "te')
    code, _, err = weft(*arguments, "--resume")
    assert code == 0 and "2 done, 0 failed" in err and "2 were answered before" in err
    again = {answer["id"]: answer for answer in json_lines(out.read_text())}
    assert {name: answer["text"] for name, answer in again.items()} == {
        name: answer["text"] for name, answer in whole.items()
    }


def test_an_id_may_equal_the_index_of_another_line(weft: Any, tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"id": 1, "prompt": "a"}\n{"prompt": "b"}\n')
    out.write_text('{"index": 0, "id": 1, "text": "x"}\n')
    code, _, err = weft("generate", "-i", str(source), "-o", str(out), "--resume", "-n", "1")
    assert code == 0 and "1 done, 0 failed" in err and "1 were answered before" in err
    assert [answer["index"] for answer in json_lines(out.read_text())] == [0, 1]


def test_a_second_line_with_the_same_id_is_refused_even_if_the_first_is_answered(
    weft: Any, tmp_path: Path
) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"id": "a", "prompt": "one"}\n\n{"id": "a", "prompt": "two"}\n')
    for resume in ((), ("--resume",)):
        code, _, err = weft("generate", "-i", str(source), "-o", str(out), "-n", "1", *resume)
        assert code == 1 and "1 failed" in err
        good, bad = sorted(json_lines(out.read_text()), key=lambda answer: "error" in answer)
        assert "text" in good and bad["index"] == 2 and bad["error"]["code"] == "duplicate_id"
        assert bad["error"]["message"] == "line 1 has the id 'a' already; give line 3 another"


def test_an_output_survives_a_model_that_does_not_load(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("old\n")
    arguments = ["weft", "generate", "x", "-o", str(out), "--overwrite", "-m", "/nowhere/m.gguf"]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit, match="2"):
        main()
    assert out.read_text() == "old\n" and "/nowhere/m.gguf: does not exist" in capsys.readouterr().err


def test_the_input_is_not_the_output(weft: Any, tmp_path: Path) -> None:
    source, link = tmp_path / "in.jsonl", tmp_path / "link.jsonl"
    source.write_text('"a"\n')
    link.symlink_to(source)
    for flag in ("--overwrite", "--resume"):
        code, _, err = weft("generate", "-i", str(source), "-o", str(link), flag)
        assert code == 2 and "is also the input" in err and source.read_text() == '"a"\n'


def test_with_an_output_the_answers_to_prompts_are_json_lines(weft: Any, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert weft("generate", PARIS, "Two", "-o", str(out), "-n", "1", *GREEDY)[:2] == (0, "")
    assert {answer["index"] for answer in json_lines(out.read_text())} == {0, 1}
    assert weft("generate", PARIS, "-o", str(out), "--overwrite", "-n", "1", *GREEDY)[0] == 0
    assert [answer["text"] for answer in json_lines(out.read_text())] == [" Paris"]
    assert json_lines(weft("generate", PARIS, "-o", "-", "-n", "1", *GREEDY)[1])[0]["text"] == " Paris"


def test_a_file_is_read_only_as_fast_as_it_is_answered(llm: LLM) -> None:
    class Counting(io.BytesIO):
        num_read = 0

        def readline(self, size: int | None = -1, /) -> bytes:
            self.num_read += 1
            return super().readline(size)

    class Watching(io.BytesIO):
        num_written = most_ahead = 0

        def write(self, content: Any) -> int:
            self.num_written += 1
            self.most_ahead = max(self.most_ahead, source.num_read - self.num_written)
            return len(content)

    source, sink = Counting(b'"a"\n' * 60), Watching()
    BatchFileRun(llm, "default", LineDefaults({"max_tokens": 1}), Output(sink)).run(source)
    assert sink.num_written == 60
    assert 0 < sink.most_ahead <= 4 * llm.engine.config.scheduler.max_running + 1


# --- Ctrl-C -----------------------------------------------------------------------------------------------------


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "weft.cli.main", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=0,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


@pytest.mark.usefixtures("ctrl_c_is_handled")
def test_ctrl_c_stops_the_answer_and_not_the_program_even_if_it_is_repeated(
    default_model_path: Path,
) -> None:
    with start("chat", *GREEDY) as process:
        assert process.stdin and process.stdout and process.stderr
        guard = threading.Timer(300, process.kill)
        guard.start()
        greeting = process.stderr.readline()
        assert "/help" in greeting
        process.stdin.write("Count from one to one hundred, with every number as a word.\n")
        assert process.stdout.read(1)
        for _ in range(5):
            process.send_signal(signal.SIGINT)
        assert "[stopped]" in process.stderr.readline()
        # Before the first token, and while no answer is generated.
        process.stdin.write("And once more, please.\n")
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        process.stdin.write("/stats\n/exit\n")
        _, err = process.communicate()
        guard.cancel()
        assert process.returncode == 0, err
        assert "Traceback" not in err


@pytest.mark.usefixtures("ctrl_c_is_handled")
def test_ctrl_c_leaves_complete_lines_and_exit_code_130(default_model_path: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "Once", "max_tokens": 2, "temperature": 0}\n' * 2000)
    with start("generate", "-i", str(source), "-o", str(out)) as process:
        guard = threading.Timer(300, process.kill)
        guard.start()
        while not out.exists() or out.stat().st_size == 0:
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
        guard.cancel()
    assert process.returncode == 130, err
    assert "Traceback" not in err and "0 failed" in err
    assert out.read_bytes().endswith(b"\n")
    assert 0 < len(json_lines(out.read_text())) < 2000
