"""Opens and closes models on the GPU. Prints a line at each stage, then waits for a line on standard input."""

from __future__ import annotations

import dataclasses
import sys

import torch

from weft.bench.gpu_work import open_shape
from weft.errors import ModelFileError, OutOfMemoryError
from weft.llm import LLM
from weft.request import SamplingParams

SHAPE = "0.6b"


def reach(stage: str) -> None:
    print(stage, flush=True)
    sys.stdin.readline()


def open_and_close() -> None:
    """By default the KV cache takes all free memory of the GPU."""
    llm = LLM(open_shape(SHAPE), device="cuda", max_context=4096, max_draft_tokens=0)
    prompts = [[10 + number] * (50 * number) for number in range(1, 9)]
    llm.generate(prompts, SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True))
    reach("open")
    llm.close()
    reach("closed")
    assert llm.engine.metrics().requests_completed == len(prompts)


def fail_to_open() -> None:
    checkpoint = open_shape(SHAPE)
    without_norm = {
        name: tensor for name, tensor in checkpoint.tensors.items() if name != "model.norm.weight"
    }
    try:
        LLM(dataclasses.replace(checkpoint, tensors=without_norm), device="cuda")
    except ModelFileError as error:
        kept: list[Exception] = [error]
    try:
        LLM(checkpoint, device="cuda", num_blocks=1 << 40)
    except OutOfMemoryError as error:
        kept.append(error)
    reach("failed twice")
    assert len(kept) == 2


def main() -> None:
    torch.zeros(1, device="cuda").add_(1)
    torch.cuda.empty_cache()
    reach("bare")
    for _ in range(3):
        open_and_close()
    fail_to_open()


if __name__ == "__main__":
    main()
