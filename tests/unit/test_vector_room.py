"""How many tokens of texts are in the engine of an embedding model at once."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from weft.embedding import STEP_TOKENS_OF_GPU, EmbeddingSpec
from weft.engine.ipc.client import EngineState
from weft.request import InferenceRequest, RequestId
from weft.server.vectors.model import VectorCaller, VectorModel

LENGTH = 60


class Engine:
    """Takes prompts and never answers."""

    state = EngineState.READY
    is_responding = True
    num_unfinished = 1

    def __init__(self, room_tokens: int) -> None:
        self.info: Any = SimpleNamespace(vocabulary_size=100, room_tokens=room_tokens)
        self.num_tokens = 0

    async def submit(self, request: InferenceRequest, arrived: asyncio.Event) -> list[Any]:
        self.num_tokens += len(request.prompt)
        return [SimpleNamespace(check=lambda: None, result=None, cancel=lambda reason: None)]


@pytest.mark.parametrize(
    ("reported", "is_beside_answers", "expected"),
    [(0, False, 1536), (0, True, 512), (STEP_TOKENS_OF_GPU, False, 16_384)],
)
def test_an_engine_has_as_many_tokens_at_once_as_it_reports(
    reported: int, is_beside_answers: bool, expected: int
) -> None:
    engine: Any = Engine(reported)
    texts: Any = None
    model = VectorModel(("m",), "", EmbeddingSpec("embed", "mean", 4, max_tokens=100), engine, texts)
    model.beside = engine if is_beside_answers else None

    async def run() -> None:
        running = asyncio.create_task(model.run([[1] * LENGTH] * 2000, VectorCaller(RequestId("r"))))
        for _ in range(5000):
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait([running])

    asyncio.run(run())
    group = 256 // LENGTH * LENGTH
    assert expected - group < engine.num_tokens <= expected
