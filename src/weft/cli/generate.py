"""`weft generate`: completes prompts, several of them as one batch."""

from __future__ import annotations

import sys

from rich.console import Console

from weft.cli.pull import fetch
from weft.cli.terminal import printable
from weft.errors import InvalidRequestError, WeftError
from weft.request import GenerationResult, RequestState, SamplingParams


def generate_command(
    prompts: list[str], *, model: str, max_tokens: int, temperature: float, seed: int
) -> None:
    """Print the completion of each prompt; "-" stands for standard input."""
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    texts = [sys.stdin.read() if prompt == "-" else prompt for prompt in prompts]
    for text in texts:
        if not text:
            raise InvalidRequestError("a prompt is empty; give it at least one character", field="prompt")
    path = fetch(model)
    with Console(stderr=True).status("Loading the model"):
        from weft.llm import LLM

        llm = LLM(str(path))
    with llm:
        results = llm.generate(texts, params)
    for text, result in zip(texts, results, strict=True):
        _show(text, result, with_prompt=len(texts) > 1)


def _show(prompt: str, result: GenerationResult, with_prompt: bool) -> None:
    if result.state is RequestState.FAILED:
        raise WeftError(f"the prompt {prompt[:40]!r} failed: {result.error}")
    # Several completions are told apart by their prompts; one alone is given out as it is, for use in a pipe.
    text = f"{prompt}{result.text}\n" if with_prompt else result.text
    print(printable(text) if sys.stdout.isatty() else text)
