"""The CPU backend of embedding models and rerankers: whole texts in, vectors or scores out, without a KV cache.

A step is one forward pass over the texts that the scheduler put into it. Steps run and are reported as in the CPU
backend (`StepThread`).

**Pairs.** A model with token types (BERT) marks the second text of a pair. The tokens of a request do not carry types,
and need not: a token has type 1 if a separator token comes before it in the same input. The last token of a single text
is its separator, so a single text has type 0 throughout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from weft.backends.cpu.core_lease import CoreLease
from weft.backends.cpu.kernels import has_kernels, instruction_set
from weft.backends.cpu.packed_weights import check_quantize, keep_packed
from weft.backends.cpu.step_thread import AloneStep, QueuedStep, StepThread
from weft.backends.cpu.threads import thread_count
from weft.config import KvCachePoolConfig
from weft.embedding import EmbeddingSpec
from weft.errors import InvalidRequestError, ModelFileError
from weft.loading.checkpoint import Checkpoint, open_checkpoint
from weft.loading.embedding_files import dense_layers, embedding_spec, separator_id
from weft.models.text_model import HeadLayer, TextModel, build_text_model
from weft.ops.reference_texts import ReferenceTextOps
from weft.ops.texts import TextIndices, TextOps
from weft.plan import BackendInfo, IterationPlan, StepResult
from weft.request import Failure, FailureKind, Grammar, RequestId

if TYPE_CHECKING:
    from weft.ops.cpu.weights import Quantize

_SHORT_STEP_TOKENS = 256
"""A step with at most this many tokens is alone until other requests arrive: all that waited are in it."""
_NOT_A_NUMBER = Failure(FailureKind.STEP, "the vector has a value that is not a number")


class _Input(NamedTuple):
    """The prompt of a row."""

    tokens: np.ndarray
    second: int
    """The index of the first token with type 1. The number of tokens if there is none."""


class Forward(Protocol):
    """The forward pass of a text model: `TextModel` in numpy, or the C++ program recorded from it."""

    def forward(self, step: TextIndices) -> np.ndarray: ...


class EmbedderBackend:
    """A `Backend` that makes a vector of each prompt."""

    def __init__(
        self,
        model: TextModel,
        separator: int | None,
        forward: Forward | None = None,
        release: Callable[[], object] = lambda: None,
        lease: CoreLease | None = None,
        room_tokens: int = 0,
    ) -> None:
        """Without `forward`, the model computes in numpy. `release` gives memory back after the model was dropped.
        `room_tokens` is reported (`BackendInfo`)."""
        self.spec: EmbeddingSpec = model.spec
        self._vocabulary_size = model.vocabulary_size
        self._weight_bytes = model.weight_bytes
        self._forward: Forward = model if forward is None else forward
        self._release = release
        self._room_tokens = room_tokens
        self._separator = separator if model.types > 1 else None
        self._thread = StepThread("weft-embedder", lease)
        self._rows: dict[int, _Input] = {}
        self._counting = np.arange(self.spec.max_tokens)

    def allocate(self, pool: KvCachePoolConfig, num_rows: int, max_tokens: int = 0) -> BackendInfo:
        max_context = self.spec.max_tokens + 1  # one more: a sampled token stands for the vector
        if pool.block_size < max_context or not pool.num_blocks:
            raise InvalidRequestError(
                f"block_size is {pool.block_size}; an embedding model needs one block of {max_context} tokens for each "
                "input (EmbeddingSpec.engine_config)",
                field="block_size",
            )
        return BackendInfo(
            vocabulary_size=self._vocabulary_size,
            max_context=max_context,
            num_blocks=pool.num_blocks,
            block_size=pool.block_size,
            swap_blocks=0,
            bytes_per_block=0,
            weight_bytes=self._weight_bytes,
            vector_size=self.spec.dimensions,
            room_tokens=self._room_tokens,
        )

    def check_grammar(self, grammar: Grammar) -> None:
        raise InvalidRequestError(
            "an embedding model generates no text, so it takes no grammar", field="grammar"
        )

    def submit(self, plan: IterationPlan) -> QueuedStep | AloneStep:
        for start in plan.row_starts:
            tokens = start.tokens[: start.prompt_length]
            second = tokens.index(self._separator) + 1 if self._separator in tokens else len(tokens)
            self._rows[start.row] = _Input(np.array(tokens, np.int64), second)
        inputs = []
        for row, first, count in zip(plan.rows, plan.starts, plan.counts, strict=True):
            text = self._rows[row]
            assert first == 0 and count == len(text.tokens), "a step holds whole prompts"
            inputs.append(text)
        submit = self._thread.submit_short if plan.num_tokens <= _SHORT_STEP_TOKENS else self._thread.submit
        return submit(partial(self._run, plan.request_ids, inputs))

    def close(self) -> None:
        self._thread.close()
        if hasattr(self, "_forward"):
            del self._forward
        self._release()

    def _run(self, request_ids: tuple[RequestId, ...], inputs: list[_Input]) -> StepResult:
        """Computes one step."""
        if not inputs:
            return StepResult()
        try:
            if len(inputs) > 1:
                # Inputs of similar length lie together, so that threads get equal parts.
                order = sorted(range(len(inputs)), key=lambda index: len(inputs[index].tokens))
                inputs, request_ids = [inputs[i] for i in order], tuple(request_ids[i] for i in order)
            step = self._indices(inputs)
            self._thread.report()
            vectors = self._finished(self._forward.forward(step))
        except Exception as error:
            return StepResult(error=f"{type(error).__name__}: {error}")
        is_finite = np.isfinite(vectors)
        errors = {} if is_finite.all() else _errors_of(request_ids, is_finite)
        named = {
            request_id: vector.tobytes() for request_id, vector in zip(request_ids, vectors, strict=True)
        }
        return StepResult(tokens=[0] * len(inputs), vectors=named, errors=errors)

    def _indices(self, inputs: list[_Input]) -> TextIndices:
        starts = [0, *accumulate([len(text.tokens) for text in inputs])]
        types = np.zeros(starts[-1], np.int64)
        for text, start in zip(inputs, starts, strict=False):
            if text.second < len(text.tokens):
                types[start + text.second : start + len(text.tokens)] = 1
        return TextIndices(
            np.concatenate([text.tokens for text in inputs]),
            np.concatenate([self._counting[: len(text.tokens)] for text in inputs]),
            types,
            np.array(starts, np.int64),
        )

    def _finished(self, rows: np.ndarray) -> np.ndarray:
        """Makes vectors or scores of the rows, as `spec` says. Each row is computed by itself, in float64, so a result
        never depends on the other rows."""
        spec, wide = self.spec, rows
        with np.errstate(over="ignore", invalid="ignore"):
            if spec.yes_no is not None:
                wide = np.subtract(wide[:, :1], wide[:, 1:2], dtype=np.float64)
            if spec.yes_no is not None or spec.activation == "sigmoid":
                wide = 1.0 / (1.0 + np.exp(-wide.astype(np.float64)))
            if spec.normalise:
                squares = np.square(wide, dtype=np.float64)
                lengths = np.sqrt(np.add.reduce(squares, axis=1, keepdims=True))
                wide = wide / np.maximum(lengths, 1e-12)  # as in torch: a vector of zeros stays zero
            return np.ascontiguousarray(wide, "<f4")


def _errors_of(request_ids: tuple[RequestId, ...], is_finite: np.ndarray) -> dict[RequestId, Failure]:
    each = zip(request_ids, np.logical_and.reduce(is_finite, axis=1), strict=True)
    return {request_id: _NOT_A_NUMBER for request_id, is_good in each if not is_good}


def open_embedder(
    checkpoint: Checkpoint | Path | str,
    threads: int | None = None,
    quantize: Quantize | None = None,
    dtype: np.dtype | type | None = None,
    core_lease: tuple[int, int] | None = None,
) -> EmbedderBackend:
    """Opens the backend for an embedding model or a reranker, or for the path of one.

    Without `dtype`, the C++ kernels compute with `threads` threads if they were built. With `dtype`, numpy computes in
    that type. `quantize` ("int8" or "int4") applies to weights that the files store as floats.
    """
    if not isinstance(checkpoint, Checkpoint):
        checkpoint = open_checkpoint(checkpoint)
    threads = thread_count(threads)
    is_native = dtype is None and has_kernels()
    check_quantize(quantize, checkpoint, is_native)

    def build(spec: EmbeddingSpec, dense: Sequence[HeadLayer]) -> tuple[TextModel, Forward | None]:
        if is_native:
            return _native(checkpoint, spec, dense, threads, quantize)
        ops = ReferenceTextOps(np.float32 if dtype is None else dtype)
        return build_model(checkpoint, ops, spec, dense), None

    lease = None if core_lease is None else CoreLease(*core_lease)
    return EmbedderBackend(*open_text_model(checkpoint, build), lease=lease)


def open_text_model(
    checkpoint: Checkpoint,
    build: Callable[[EmbeddingSpec, Sequence[HeadLayer]], tuple[TextModel, Forward | None]],
) -> tuple[TextModel, int | None, Forward | None]:
    """The model of a checkpoint, the id of its separator, and the forward pass. `build` gets the layers after pooling
    that are in files of their own."""
    spec = embedding_spec(checkpoint)
    if spec is None:
        raise ModelFileError(
            f"{checkpoint.path}: is neither an embedding model nor a reranker: it has no modules.json, no "
            "...ForSequenceClassification in config.json, and no pooling_type; use it as a model that generates text"
        )
    dense = [HeadLayer(layer.weight, layer.bias, layer.activation) for layer in dense_layers(checkpoint)]
    try:
        model, forward = build(spec, dense)
    except ModelFileError as error:
        raise ModelFileError(f"{checkpoint.path}: {error}") from error
    separator = separator_id(checkpoint)
    if spec.kind == "rerank" and model.types > 1 and separator is None:
        raise ModelFileError(
            f"{checkpoint.path}: sep_token: missing; without it weft cannot tell the texts of a pair apart"
        )
    return model, separator, forward


def build_model(
    checkpoint: Checkpoint, ops: TextOps, spec: EmbeddingSpec, dense: Sequence[HeadLayer]
) -> TextModel:
    return build_text_model(checkpoint.layout, checkpoint.metadata, checkpoint.tensors, ops, spec, dense)


def _native(
    checkpoint: Checkpoint,
    spec: EmbeddingSpec,
    dense: Sequence[HeadLayer],
    threads: int,
    quantize: Quantize | None,
) -> tuple[TextModel, Forward]:
    """The model, and the C++ program recorded from it."""
    from weft import _kernels
    from weft.ops.cpu.program import record_texts
    from weft.ops.cpu.text_ops import CpuTextOps
    from weft.ops.cpu.weights import PACKING_VERSION, Packing
    from weft.ops.recording import NO_STEP

    if (name := instruction_set()) is not None:
        _kernels.use(name)
    ops = CpuTextOps(Packing(quantize))
    model = build_model(checkpoint, ops, spec, dense)
    # The prefix `texts-` keeps these packed weights apart from those of a decoder that is made from the same files.
    keep = keep_packed(checkpoint, f"texts-{quantize or 'stored'}-{PACKING_VERSION}", threads)
    pool = _kernels.Pool(threads)
    return model, record_texts(lambda: model.forward(NO_STEP), ops, keep, pool, spec.pooling)
