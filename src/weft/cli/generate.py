"""`weft generate`: completes prompts and prints the answers, or runs a file of JSON lines."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rich.console import Console

from weft.cli.batch_file import BatchFileRun, open_output
from weft.cli.lines import Line, LineDefaults, make_job
from weft.cli.model import shown_name
from weft.cli.result_json import error_of
from weft.cli.start import check_sampling, start
from weft.errors import InvalidRequestError, WeftError
from weft.request import GenerationResult, Grammar
from weft.terminal import one_line, printable

if TYPE_CHECKING:
    from weft.llm import LLM, PromptJob


def generate_command(
    prompts: list[str],
    *,
    files: list[Path],
    input_path: Path | None,
    output_path: Path | None,
    overwrite: bool,
    resume: bool,
    model: str,
    context: int | None,
    threads: int | None,
    device: str,
    quantize: str | None,
    cache: Mapping[str, Any],
    chat: bool,
    system: str | None,
    json_schema: Path | None,
    regex: str | None,
    **sampling: Any,
) -> None:
    """Runs prompts from arguments, files and standard input ("-"), or JSON lines from `input_path`."""
    given = {name: value for name, value in sampling.items() if value is not None}
    if (grammar := _grammar(json_schema, regex)) is not None:
        given["grammar"] = grammar
    check_sampling(given)
    if system is not None and not chat:
        raise InvalidRequestError(
            "--system needs --chat; a plain prompt has no system message", field="system"
        )
    # "-" is standard output. With it, even the answers to plain prompts are written as JSON lines.
    path = None if output_path is None or str(output_path) == "-" else output_path
    _check_files(input_path, path, overwrite, resume)
    if input_path is not None and (prompts or files):
        raise InvalidRequestError(
            "--input cannot be combined with other prompts; leave them out", field="input"
        )
    texts = _read_prompts(prompts, files) if input_path is None else []
    defaults = LineDefaults(given, as_chat=chat, system=system)
    if input_path is None and output_path is None:
        with start(model, context, threads, quantize, device, cache) as llm:
            _check_chat(llm, chat)
            _print_texts(llm, texts, defaults)
        return
    with (
        _open_input(input_path, texts) as source,
        open_output(path, overwrite, resume) as output,
        start(model, context, threads, quantize, device, cache) as llm,
    ):
        _check_chat(llm, chat)
        BatchFileRun(llm, shown_name(model), defaults, output).run(source)


def _grammar(json_schema: Path | None, regex: str | None) -> Grammar | None:
    if json_schema is not None and regex is not None:
        raise InvalidRequestError("--json-schema and --regex exclude each other; use one", field="regex")
    if json_schema is not None:
        return Grammar("json_schema", _read_text(json_schema))
    return None if regex is None else Grammar("regex", regex)


def _check_files(input_path: Path | None, path: Path | None, overwrite: bool, resume: bool) -> None:
    """Refuses contradictory options before a file is changed."""
    for is_given, option in ((overwrite, "--overwrite"), (resume, "--resume")):
        if is_given and path is None:
            raise InvalidRequestError(f"{option} needs --output with a file name", field="output")
    if overwrite and resume:
        raise InvalidRequestError("--overwrite and --resume exclude each other; use one", field="output")
    both_exist = input_path and path and os.path.exists(input_path) and os.path.exists(path)
    if both_exist and os.path.samefile(input_path, path):  # type: ignore[arg-type]
        raise InvalidRequestError(f"{path}: is also the input; choose another output", field="output")


def _check_chat(llm: LLM, chat: bool) -> None:
    if chat and llm.text.chat_template is None:
        raise InvalidRequestError("the model has no chat template; leave --chat out", field="chat")


def _read_prompts(prompts: list[str], files: list[Path]) -> list[str]:
    if prompts.count("-") > 1:
        raise InvalidRequestError(
            f"'-' is given {prompts.count('-')} times; allowed: once, because standard input can be read only once",
            field="prompt",
        )
    if not prompts and not files:
        if sys.stdin.isatty():
            raise InvalidRequestError(
                "no prompt is given; pass one, or '-' for standard input, --file or --input", field="prompt"
            )
        prompts = ["-"]
    texts = [_read_stdin() if prompt == "-" else prompt for prompt in prompts]
    texts += [_read_text(path) for path in files]
    for text in texts:
        if not text:
            raise InvalidRequestError("a prompt is empty; it needs at least one character", field="prompt")
    return texts


def _read_stdin() -> str:
    content = sys.stdin.buffer.read()
    if not content:
        raise InvalidRequestError("standard input is empty; pass a prompt", field="prompt")
    return _decoded(content, "standard input")


def _read_text(path: Path) -> str:
    try:
        return _decoded(path.read_bytes(), str(path))
    except OSError as error:
        raise InvalidRequestError(f"{path}: cannot be read: {error.strerror}", field="file") from error


def _decoded(content: bytes, where: str) -> str:
    try:
        return content.decode().removesuffix("\n")  # `echo` and editors add a newline at the end
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"{where} is not UTF-8 at byte {error.start}; convert it first", field="prompt"
        ) from error


@contextmanager
def _open_input(path: Path | None, texts: list[str]) -> Iterator[IO[bytes]]:
    """Opens the JSON lines: a file, standard input, or the prompts converted to JSON lines."""
    if path is None:
        yield io.BytesIO(b"".join(json.dumps(text).encode() + b"\n" for text in texts))
        return
    if str(path) == "-":
        yield sys.stdin.buffer
        return
    try:
        file = path.open("rb")
    except OSError as error:
        raise InvalidRequestError(f"{path}: cannot be read: {error.strerror}", field="input") from error
    with file:
        yield file


def _jobs(llm: LLM, texts: list[str], defaults: LineDefaults) -> list[PromptJob]:
    return [make_job(Line(index), {"prompt": text}, defaults, llm) for index, text in enumerate(texts)]


def _print_texts(llm: LLM, texts: list[str], defaults: LineDefaults) -> None:
    """Prints all complete answers in the order of the prompts, then the errors. Raises if there are any."""
    jobs = _jobs(llm, texts, defaults)
    if len(jobs) == 1 and jobs[0].params is not None and jobs[0].params.n == 1:
        _stream(llm, jobs[0])
        return
    results: dict[int, GenerationResult | WeftError] = {}
    console = Console(stderr=True)
    with console.status("Generating") as status:
        for job, result in llm.run(jobs):
            results[job.key.index] = result
            status.update(f"Generating: {len(results)} of {len(jobs)} prompts done")
    failures = []
    for index, text in enumerate(texts):
        result = results[index]
        error = result if isinstance(result, WeftError) else error_of(result)
        if error is not None:
            failures.append(WeftError(f"the prompt {text[:40]!r} failed: {error}"))
            continue
        assert isinstance(result, GenerationResult)
        for number, choice in enumerate(result.choices, start=1):
            if sys.stdout.isatty():
                _print(f"--- prompt {index + 1} of {len(texts)}, answer {number} of {len(result.choices)}")
            _print(
                f"{text}{choice.text}\n" if len(texts) > 1 and not defaults.as_chat else f"{choice.text}\n"
            )
    if not failures:
        return
    if len(texts) == 1:
        raise failures[0]
    sys.stdout.flush()
    for failure in failures:
        print(one_line(failure), file=sys.stderr)
    raise WeftError(f"{len(failures)} of {len(texts)} prompts failed")


def _stream(llm: LLM, job: PromptJob) -> None:
    """Streams a single answer, without the prompt or any other text, for use in a pipe."""
    if job.messages is not None:
        pieces = llm.stream_chat(job.messages, job.params)
    else:
        assert job.prompt is not None
        pieces = llm.stream(job.prompt, job.params)
    console = Console(stderr=True)
    with console.status("Reading the prompt"):
        first = next(pieces, "")
    _print(first, end="")
    for piece in pieces:
        _print(piece, end="")
    _print("")


def _print(text: str, end: str = "\n") -> None:
    print(printable(text) if sys.stdout.isatty() else text, end=end, flush=True)
