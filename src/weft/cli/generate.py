"""`weft generate`: completes prompts, several of them as one batch."""

from __future__ import annotations

import sys

from rich.console import Console

from weft.cli.pull import fetch
from weft.cli.terminal import one_line, printable
from weft.errors import InvalidRequestError, WeftError
from weft.request import GenerationResult, RequestState, SamplingParams


def generate_command(
    prompts: list[str], *, model: str, max_tokens: int, temperature: float, seed: int
) -> None:
    """Print the completion of each prompt; "-" stands for standard input."""
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    if prompts.count("-") > 1:
        raise InvalidRequestError(
            f"'-' is given {prompts.count('-')} times; allowed: once, standard input can be read only once",
            field="prompt",
        )
    texts = [_read_stdin() if prompt == "-" else prompt for prompt in prompts]
    for text in texts:
        if not text:
            raise InvalidRequestError("a prompt is empty; give it at least one character", field="prompt")
    path = fetch(model)
    with Console(stderr=True).status("Loading the model"):
        from weft.llm import LLM

        llm = LLM(str(path))
    with llm:
        results = llm.generate(texts, params)
    _show(texts, results)


def _read_stdin() -> str:
    if sys.stdin is None:
        raise InvalidRequestError("standard input is closed; give the prompt itself", field="prompt")
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"standard input is not UTF-8 at byte {error.start}; convert it first", field="prompt"
        ) from error


def _show(prompts: list[str], results: list[GenerationResult]) -> None:
    """Print all that is complete; then say what is not, and fail."""
    failures: list[WeftError] = []
    for prompt, result in zip(prompts, results, strict=True):
        if result.state is RequestState.COMPLETED:
            # Several completions are told apart by their prompts; one alone is given out as it is, for use in a pipe.
            text = f"{prompt}{result.text}\n" if len(prompts) > 1 else result.text
            print(printable(text) if sys.stdout.isatty() else text)
        else:
            why = result.error or f"it was {result.state.value}"
            failures.append(WeftError(f"the prompt {prompt[:40]!r} failed: {why}"))
    if not failures:
        return
    if len(prompts) == 1:
        raise failures[0]
    sys.stdout.flush()
    for failure in failures:
        print(one_line(failure), file=sys.stderr)
    raise WeftError(f"{len(failures)} of {len(prompts)} prompts failed")
