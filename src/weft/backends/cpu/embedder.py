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
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from weft.backends.cpu.core_lease import CoreLease
from weft.backends.cpu.kernels import has_kernels, instruction_set
from weft.backends.cpu.packed_weights import check_quantize, keep_packed
from weft.backends.cpu.step_thread import QueuedStep, StepThread
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

_NOT_A_NUMBER = Failure(FailureKind.STEP, "the vector has a value that is not a number")


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
        self._rows: dict[int, np.ndarray] = {}  # the tokens of the prompt of each row

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

    def submit(self, plan: IterationPlan) -> QueuedStep:
        for start in plan.row_starts:
            self._rows[start.row] = np.array(start.tokens[: start.prompt_length], np.int64)
        texts = []
        for row, first, count in zip(plan.rows, plan.starts, plan.counts, strict=True):
            text = self._rows[row]
            assert first == 0 and count == len(text), "a step holds whole prompts"
            texts.append(text)
        return self._thread.submit(partial(self._run, plan.request_ids, texts))

    def close(self) -> None:
        self._thread.close()
        if hasattr(self, "_forward"):
            del self._forward
        self._release()

    def _run(self, request_ids: tuple[RequestId, ...], texts: list[np.ndarray]) -> StepResult:
        """Computes one step, in the thread."""
        if not texts:
            return StepResult()
        try:
            # Inputs of similar length lie together, so that threads get equal parts.
            order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
            step = self._indices([texts[index] for index in order])
            self._thread.report()
            vectors = self._finished(self._forward.forward(step))
        except Exception as error:
            return StepResult(error=f"{type(error).__name__}: {error}")
        is_finite = np.isfinite(vectors).all(axis=1)
        named = {request_ids[index]: place for place, index in enumerate(order)}
        return StepResult(
            tokens=[0] * len(texts),
            vectors={request_id: vectors[place].tobytes() for request_id, place in named.items()},
            errors={request_id: _NOT_A_NUMBER for request_id, place in named.items() if not is_finite[place]},
        )

    def _indices(self, texts: list[np.ndarray]) -> TextIndices:
        lengths = np.array([len(text) for text in texts], np.int64)
        starts = np.zeros(len(texts) + 1, np.int64)
        np.cumsum(lengths, out=starts[1:])
        types = np.zeros(starts[-1], np.int64)
        if self._separator is not None:
            for text, start, end in zip(texts, starts[:-1], starts[1:], strict=True):
                types[start + 1 : end] = np.cumsum(text[:-1] == self._separator) > 0
        positions = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
        return TextIndices(np.concatenate(texts), positions, types, starts)

    def _finished(self, rows: np.ndarray) -> np.ndarray:
        """Makes vectors or scores of the rows, as `spec` says. Each row is computed by itself, in float64, so a result
        never depends on the other rows."""
        spec, wide = self.spec, rows.astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            if spec.yes_no is not None:
                wide = wide[:, :1] - wide[:, 1:2]
            if spec.yes_no is not None or spec.activation == "sigmoid":
                wide = 1.0 / (1.0 + np.exp(-wide))
            if spec.normalise:
                lengths = np.sqrt(np.square(wide).sum(axis=1, keepdims=True))
                wide = wide / np.maximum(lengths, 1e-12)  # as in torch: a vector of zeros stays zero
            return np.ascontiguousarray(wide, "<f4")


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
