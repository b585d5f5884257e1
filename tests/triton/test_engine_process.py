"""The CUDA backend in a separate engine process, as a server runs it: opened by name from files, and used over the
wire."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("msgspec", reason="msgspec, which the wire to an engine process needs, is not installed")

import numpy as np

from model_files import entry, safetensors, write_folder
from weft.backends import registry
from weft.config import KvCachePoolConfig, SchedulerConfig, ServingEngineConfig
from weft.engine.ipc.client import EngineClient
from weft.engine.serving import ServingEngine
from weft.errors import WeftError
from weft.loading.random_checkpoint import random_checkpoint
from weft.ops.triton.device import Device
from weft.request import InferenceRequest, RequestState, SamplingParams

CONFIG = ServingEngineConfig(
    SchedulerConfig(max_running=4, max_tokens_per_step=64, max_prefill_tokens=32, max_chunk_tokens=32),
    KvCachePoolConfig(num_blocks=32),
)
SHAPE = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
REQUESTS = [
    InferenceRequest(tuple(range(1, 20)), SamplingParams(temperature=0.0, max_tokens=6, logprobs=1)),
    InferenceRequest((7, 9), SamplingParams(temperature=1.0, top_k=9, seed=4, max_tokens=6)),
]


@pytest.fixture(scope="module")
def options(device: Device, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    header, data = {}, b""
    for name, source in random_checkpoint(SHAPE, seed=1, fill_on_device=False).tensors.items():
        values = source.to_float32().astype(np.float32)
        header[name] = entry("F32", list(values.shape), len(data), len(data) + values.nbytes)
        data += values.tobytes()
    folder: Path = tmp_path_factory.mktemp("model")
    write_folder(folder, {"config.json": SHAPE, "model.safetensors": safetensors(header, data)})
    return {"checkpoint": str(folder), "device": str(device.torch_device), "dtype": "float32"}


def test_answers_over_the_wire_equal_those_of_an_engine_in_this_process(
    device: Device, options: dict[str, Any]
) -> None:
    async def ask() -> list[tuple[int, ...]]:
        client = EngineClient("cuda", options, CONFIG)
        await client.start()
        try:
            assert client.info is not None and client.info.device == device.description
            answers = [(await client.submit(request))[0] for request in REQUESTS]
            tokens = [[one.token_id async for outputs in answer for one in outputs] for answer in answers]
            results = [answer.result for answer in answers]
        finally:
            await client.stop()
        assert all(result is not None and result.state is RequestState.COMPLETED for result in results)
        return [tuple(one for one in given if one is not None) for given in tokens]

    served = asyncio.run(asyncio.wait_for(ask(), 80))
    with ServingEngine(registry.build("cuda", **options), CONFIG) as engine:
        alone = [engine.get_result(engine.submit(request), wait=60) for request in REQUESTS]
    assert served == [result.tokens for result in alone if result is not None]
    assert len(served[0]) == 6


def test_a_model_that_does_not_fit_is_rejected_with_a_reason(options: dict[str, Any]) -> None:
    async def ask() -> None:
        await EngineClient("cuda", {**options, "max_context": 4096}, CONFIG).start()

    with pytest.raises(Exception, match="context"):
        asyncio.run(asyncio.wait_for(ask(), 80))


def test_a_cache_that_does_not_fit_is_rejected_in_one_sentence_with_exit_code_2(
    options: dict[str, Any],
) -> None:
    config = ServingEngineConfig(CONFIG.scheduler, KvCachePoolConfig(memory=1 << 50))

    async def ask() -> None:
        await EngineClient("cuda", options, config).start()

    with pytest.raises(WeftError, match="the KV cache takes 1,073,741,8") as error:
        asyncio.run(asyncio.wait_for(ask(), 80))
    assert error.value.exit_code == 2 and "Traceback" not in str(error.value)
