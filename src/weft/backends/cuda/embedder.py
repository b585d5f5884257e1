"""Embedding models and rerankers on a GPU. The backend is `EmbedderBackend`, as on the CPU; only the forward pass runs on
the device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, cast

import numpy as np
import torch

from weft.backends.cpu.embedder import EmbedderBackend, Forward, build_model, open_text_model
from weft.backends.cuda.memory import drop_frames, is_out_of_memory, mib, shortage
from weft.embedding import STEP_TOKENS_OF_GPU, EmbeddingSpec
from weft.errors import InvalidRequestError
from weft.loading.checkpoint import Checkpoint, open_checkpoint
from weft.models.text_model import HeadLayer, TextModel
from weft.ops.texts import TextIndices, TextOps
from weft.ops.triton.device import Device
from weft.ops.triton.text_ops import TritonTextOps

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class GpuForward:
    """The forward pass of a text model on the device."""

    def __init__(self, model: TextModel, device: Device) -> None:
        self._model = model
        self._device = device
        self._stream = device.stream()
        # Steps wait for the copies of the weights, which may still run.
        self._stream.wait_stream(device.current_stream())

    def forward(self, step: TextIndices) -> np.ndarray:
        with self._device.using(self._stream), torch.inference_mode():
            rows = self._model.forward(step)[: len(step.starts) - 1]
            return np.asarray(rows.float().cpu().numpy())


def open_cuda_embedder(
    checkpoint: Checkpoint | Path | str,
    device: str | Device = "cuda",
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
) -> EmbedderBackend:
    """Opens the backend for an embedding model or a reranker, or for the path of one. The device "cpu" is Triton's
    interpreter, for tests."""
    if not isinstance(checkpoint, Checkpoint):
        checkpoint = open_checkpoint(checkpoint)
    if dtype not in _DTYPES:
        raise InvalidRequestError(f"dtype is {dtype!r}; allowed: {', '.join(_DTYPES)}", field="dtype")
    gpu = Device(device) if isinstance(device, str) else device
    try:
        return _open(checkpoint, gpu, _DTYPES[dtype])
    except BaseException as error:
        drop_frames(error)
        with suppress(RuntimeError):
            gpu.release()
        if not is_out_of_memory(error):
            raise
    # Raised outside `except`, so that the new error does not keep the old one, with its GPU memory, as its context.
    needed = f"the weights take {mib(_DTYPES[dtype].itemsize * checkpoint.parameter_count)}"
    raise shortage(gpu, needed, "take a smaller model, or end other programs that use the GPU")


def _open(checkpoint: Checkpoint, gpu: Device, dtype: torch.dtype) -> EmbedderBackend:
    def build(spec: EmbeddingSpec, dense: Sequence[HeadLayer]) -> tuple[TextModel, Forward]:
        # The other operations of `Ops` are for models with a KV cache or with experts: no text model has these.
        ops = cast(TextOps, TritonTextOps(gpu, dtype, spec.max_tokens))
        model = build_model(checkpoint, ops, spec, dense)
        return model, GpuForward(model, gpu)

    return EmbedderBackend(*open_text_model(checkpoint, build), gpu.release, room_tokens=STEP_TOKENS_OF_GPU)
