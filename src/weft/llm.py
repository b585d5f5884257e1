"""Offline inference for scripts: prompts in, results out, with the model's tokenizer and chat template."""

from __future__ import annotations

import gc
import queue
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Literal, SupportsIndex, TypeVar

from weft.backends import registry
from weft.engine.serving import ServingEngine
from weft.errors import InvalidRequestError, WeftError
from weft.llm_config import build_config, vector_config
from weft.loading.cache import Progress
from weft.loading.checkpoint import Checkpoint, open_checkpoint
from weft.loading.embedding_files import embedding_spec
from weft.loading.pull import pull
from weft.local_answers import Feeder, LocalChoices
from weft.local_vectors import LocalVectors
from weft.progress import GenerationBar, PullBar
from weft.request import (
    GenerationResult,
    InferenceRequest,
    RequestState,
    SamplingParams,
)
from weft.text.embedding_text import EmbeddingText
from weft.text.model_text import ModelText, open_model_text
from weft.text.tokenizer import Tokenizer
from weft.tiers import TierSizes, tier_sizes
from weft.vectors import Vectors

Message = Mapping[str, Any]
Prompt = str | Sequence[int]
OnResult = Callable[[GenerationResult], object]

K = TypeVar("K")

_SUBMITTED_PER_ROW = 4
"""Maximum number of submitted requests whose results are not read yet, per row of the engine. It is enough to keep the
engine busy, and small enough for the memory."""


_gc_frozen: weakref.WeakSet[LLM] = weakref.WeakSet()
"""The open LLMs on a GPU. While there are any, the garbage collector ignores the objects that existed when one was
last opened or closed."""


@dataclass(frozen=True)
class PromptJob:
    """One job of `LLM.run`: a prompt (text or token ids), or the messages of a conversation."""

    prompt: Prompt | None = None
    messages: Sequence[Message] | None = None
    params: SamplingParams | None = None
    key: Any = None
    """For the caller, to identify the job."""
    tools: Sequence[Mapping[str, Any]] | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)
    session_id: str | None = None


@dataclass(frozen=True)
class MemoryUse:
    """Memory of an LLM: bytes of the weights, and maximum bytes of the KV cache and the swap space."""

    weights: int
    kv_cache: int
    swap: int
    kv_tokens: int
    max_context: int
    tiers: TierSizes | None = None
    """None: the cache has one tier."""


class LLM:
    """A model and an engine that runs it.

        with LLM() as llm:
            for result in llm.generate(["The capital of France is", "2 + 2 ="], SamplingParams(temperature=0)):
                print(result.text)

    All methods may be called from several threads; their requests are batched together.

    Arguments:
        model: "default" (fetched on first use), "all-MiniLM-L6-v2" (the same, for `embed`), `hf:owner/name`, a path (a GGUF file or a folder with safetensors), or an
            opened `Checkpoint`. Without a tokenizer, prompts and answers are token ids.
        device: "cpu", "cuda", or "auto": a GPU if there is one.
        max_context: maximum context length; default: the model's.
        threads: CPU threads that compute; default: one per core.
        quantize: "int8" or "int4", for weights that are stored as floats (CPU only).
        invariant: makes answers on a GPU independent of the batch, bit for bit, as they always are on the CPU. Slower.
        progress: called while the model is fetched; default: a progress bar.
        config: fields of `ServingEngineConfig`, `SchedulerConfig` or `KvCachePoolConfig`, such as `memory` (bytes of the
            KV cache) or `kv_cache="two-tier"`, which quantises older tokens. Enums may be given as strings.
    """

    def __init__(
        self,
        model: str | Checkpoint = "default",
        *,
        device: str = "auto",
        max_context: int | None = None,
        threads: int | None = None,
        quantize: str | None = None,
        invariant: bool = False,
        progress: Progress | None = None,
        **config: Any,
    ) -> None:
        options = {
            "max_context": max_context,
            "threads": threads,
            "quantize": quantize,
            "invariant": invariant,
        }
        device = registry.chosen(device, options)
        engine_config = build_config(config, device)
        checkpoint = model if isinstance(model, Checkpoint) else _opened(model, progress)
        spec = embedding_spec(checkpoint) if checkpoint.has_text else None
        if spec is not None:
            device = registry.EMBEDDERS[device]
            engine_config = vector_config(config, spec, device)
        text = EmbeddingText(checkpoint, spec) if spec is not None else None
        if text is not None:
            self._text: ModelText | None = ModelText(text.tokenizer, None)
        else:
            self._text = open_model_text(checkpoint) if checkpoint.has_text else None
        self.suggestions: Mapping[str, Any] = checkpoint.generation
        """Sampling parameters that the model's authors recommend, by the names of `SamplingParams`."""
        self.engine = ServingEngine(registry.build(device, checkpoint=checkpoint, **options), engine_config)
        if device == "cuda":
            # A garbage collection over all imported objects takes longer than many steps of a GPU.
            gc.collect()
            gc.freeze()
            _gc_frozen.add(self)
        self._vectors = None if text is None else LocalVectors(self.engine, text.spec, text)
        self.engine.start()
        # Frees memory and threads even if the caller does not call `close`.
        weakref.finalize(self, self.engine.stop)

    @property
    def text(self) -> ModelText:
        """The model's tokenizer and chat template."""
        if self._text is None:
            raise InvalidRequestError(
                "the model has no tokenizer; pass prompts as token ids, and no stop strings", field="prompt"
            )
        return self._text

    @property
    def tokenizer(self) -> Tokenizer:
        return self.text.tokenizer

    @property
    def _tokenizer_or_none(self) -> Tokenizer | None:
        return None if self._text is None else self._text.tokenizer

    @property
    def memory(self) -> MemoryUse:
        info = self.engine.scheduler.info
        return MemoryUse(
            weights=info.weight_bytes,
            kv_cache=info.cache_bytes,
            swap=info.swap_bytes,
            kv_tokens=info.cache_tokens,
            max_context=self.engine.scheduler.max_sequence_length,
            tiers=tier_sizes(info, self.engine.config.cache),
        )

    def default_params(self, *, chat: bool = False, **overrides: Any) -> SamplingParams:
        """The parameters that the model's authors recommend, with `overrides`. An override of None is ignored.

        `max_tokens` is 16 by default; for a chat, the rest of the context.
        """
        given = {name: value for name, value in overrides.items() if value is not None}
        return SamplingParams(**{"max_tokens": None if chat else 16, **self.suggestions, **given})

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        show_progress: bool | None = None,
    ) -> list[GenerationResult]:
        """Completes each prompt (text or token ids). Returns the results in the order of the prompts.

        `params` is one set for all prompts, one for each, or None (`default_params`). With `n` above 1, the answers to
        a prompt are the `choices` of its result. `show_progress` True shows a bar. None shows one if there are several
        prompts and standard error is a terminal.
        """
        several = _as_list(prompts)
        each = _for_each(params, len(several))
        return self._all(
            [PromptJob(prompt, params=one) for prompt, one in zip(several, each, strict=True)], show_progress
        )

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
        session_id: str | None = None,
    ) -> GenerationResult:
        """Answers a conversation, a list of {"role": ..., "content": ...}, with the model's chat template.

        `tools` are functions as in the OpenAI API. `template_options` are further variables of the template, such as
        enable_thinking. With a `session_id`, the KV blocks of the conversation are evicted last.
        """
        job = _chat_job(messages, params, tools, template_options, session_id)
        return self._all([job], False)[0]

    def chat_all(
        self,
        conversations: Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
        show_progress: bool | None = None,
    ) -> list[GenerationResult]:
        """Answers several conversations as one batch. Arguments are those of `chat` and `generate`."""
        each = zip(conversations, _for_each(params, len(conversations)), strict=True)
        jobs = [_chat_job(talk, one, tools, template_options) for talk, one in each]
        return self._all(jobs, show_progress)

    def run(self, jobs: Iterable[PromptJob]) -> Iterator[tuple[PromptJob, GenerationResult | WeftError]]:
        """Yields each job with its result, or with the error that refused it. The order is the one in which jobs end.

        Jobs are read from the iterable only as fast as they end, so it may be endless. Leaving the loop early cancels
        the unfinished jobs.
        """
        return self._run((job, self._attempt(job)) for job in jobs)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, on_result: OnResult | None = None
    ) -> Generator[str, None, None]:
        """Completes a prompt and yields its text as it is generated. Leaving the loop early cancels the request.

        `on_result` is called with the result at the end. Raises WeftError if the text is not complete.
        """
        return self._stream(PromptJob(prompt, params=params), on_result)

    def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
        session_id: str | None = None,
        on_result: OnResult | None = None,
    ) -> Generator[str, None, None]:
        """Answers a conversation and yields the text as it is generated. Arguments are those of `chat` and `stream`."""
        job = _chat_job(messages, params, tools, template_options, session_id)
        return self._stream(job, on_result)

    def embed(
        self,
        texts: str | Sequence[str],
        *,
        kind: Literal["query", "document"] | None = None,
        dimensions: int | None = None,
        truncate: bool = False,
    ) -> Vectors:
        """The vectors of texts, as an array of float32 with one row for each text. One text gets a single vector.

        The model must be an embedding model, such as "all-MiniLM-L6-v2". `kind` selects the prompt that some models
        expect before a query or a document. `dimensions` keeps the first numbers of each vector, scaled to length 1
        again; only models that were trained for it (Matryoshka) keep their quality. `truncate` cuts long texts.
        """
        vectors = self.vectors.embed([texts] if isinstance(texts, str) else texts, kind, dimensions, truncate)
        return vectors[0] if isinstance(texts, str) else vectors

    def rerank(self, query: str, documents: Sequence[str]) -> list[float]:
        """The score of each document for a query, in their order; higher is more relevant. The model must be a
        reranker. Long documents are cut."""
        return self.vectors.rerank(query, documents)

    @property
    def vectors(self) -> LocalVectors:
        """What `embed` and `rerank` use. Raises if the model generates text."""
        if self._vectors is None:
            raise InvalidRequestError(
                "the model generates text and makes no vectors; open an embedding model, such as "
                'LLM("all-MiniLM-L6-v2"), or a reranker',
                field="model",
            )
        return self._vectors

    def close(self) -> None:
        """Stops the engine and cancels unfinished requests."""
        if was_frozen := self in _gc_frozen:
            _gc_frozen.remove(self)
            gc.unfreeze()  # without this, reference cycles would never be freed
        self.engine.stop()
        if was_frozen and _gc_frozen:
            gc.freeze()  # ignore the objects again, for the LLMs that are still open
        if self._text is not None:
            self._text.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _request(self, job: PromptJob) -> InferenceRequest:
        """Tokenises and checks a job. Raises InvalidRequestError if it can never run."""
        if not isinstance(job, PromptJob):
            raise InvalidRequestError(f"a job is {type(job).__name__}; allowed: weft.PromptJob")
        if self._vectors is not None:
            raise InvalidRequestError(
                "the model generates no text; use LLM.embed or LLM.rerank, or open another model",
                field="model",
            )
        if (job.prompt is None) == (job.messages is None):
            raise InvalidRequestError("a job needs either a prompt or messages", field="prompt")
        if job.messages is not None:
            tokens: Sequence[int] = self.text.encode_chat(
                job.messages, tools=job.tools, options=job.template_options
            )
        elif isinstance(job.prompt, str):
            tokens = self.tokenizer.encode(job.prompt)
        else:
            tokens = job.prompt  # type: ignore[assignment]
        params = job.params or self.default_params(chat=job.messages is not None)
        request = InferenceRequest(
            tokens,  # type: ignore[arg-type]
            params,
            session_id=job.session_id,
            request_id=self.engine.new_id(),
        )
        self.engine.check(request)
        if params.stop:
            _ = self.text  # raises if there is no tokenizer: stop strings need text
        return request

    def _attempt(self, job: PromptJob) -> InferenceRequest | WeftError:
        try:
            return self._request(job)
        except WeftError as error:
            return error

    def _all(self, jobs: list[PromptJob], show_progress: bool | None) -> list[GenerationResult]:
        """The results of all jobs, in their order. If one of them is invalid, raises before any runs."""
        results: dict[int, GenerationResult] = {}
        with ExitStack() as stack:
            if show_progress is None:
                show_progress = len(jobs) > 1
            advance = stack.enter_context(GenerationBar(len(jobs))) if show_progress else None
            requests = [self._request(job) for job in jobs]
            for index, result in self._run(enumerate(requests)):
                if isinstance(result, WeftError):
                    raise result
                results[index] = result
                if advance is not None:
                    advance(result)
        return [results[index] for index in range(len(jobs))]

    def _run(
        self, source: Iterable[tuple[K, InferenceRequest | WeftError]]
    ) -> Iterator[tuple[K, GenerationResult | WeftError]]:
        """Submits `source` in a thread, so that results are yielded while `source` makes the next request."""
        feeder = Feeder(
            self.engine,
            self._tokenizer_or_none,
            source,
            _SUBMITTED_PER_ROW * self.engine.config.scheduler.max_running,
        )
        try:
            while (ended := feeder.ended.get()) is not None:
                key, outcome = ended
                try:
                    result = outcome if isinstance(outcome, WeftError) else outcome.result()
                except WeftError as error:
                    result = error
                yield key, result
                feeder.capacity.release()
        finally:
            feeder.stop()
        if feeder.failure is not None:
            raise feeder.failure

    def _stream(self, job: PromptJob, on_result: OnResult | None) -> Generator[str, None, None]:
        request = self._request(job)
        if request.params.n != 1:
            raise InvalidRequestError(
                f"n is {request.params.n}; allowed in a stream: 1. Use `generate` or `chat` for several answers",
                field="n",
            )
        pieces: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        choices = LocalChoices(
            self.engine, self._tokenizer_or_none, request, partial(pieces.put, None), pieces.put
        )

        def read() -> Generator[str, None, None]:
            is_over = False
            try:
                choices.submit()
                while (piece := pieces.get()) is not None:
                    if piece:
                        yield piece
                is_over = True
            finally:
                choices.cancel()
                while not is_over and choices.is_submitted:
                    is_over = pieces.get() is None  # a short wait: a cancelled request ends within a step
                if on_result is not None and is_over:
                    on_result(choices.result())
            result = choices.result()
            if result.state is not RequestState.COMPLETED:
                raise WeftError(f"the text is not complete: {result.error or f'it was {result.state.value}'}")

        return read()


def _opened(model: str, progress: Progress | None) -> Checkpoint:
    with ExitStack() as stack:
        path = pull(model, progress or stack.enter_context(PullBar(model, only_in_terminal=True)))
    return open_checkpoint(path)


def _chat_job(
    messages: Sequence[Message],
    params: SamplingParams | None,
    tools: Sequence[Mapping[str, Any]] | None,
    template_options: Mapping[str, Any] | None,
    session_id: str | None = None,
) -> PromptJob:
    return PromptJob(
        messages=messages,
        params=params,
        tools=tools,
        template_options=template_options or {},
        session_id=session_id,
    )


def _as_list(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """A string or a sequence of token ids is one prompt; every other iterable is a list of prompts."""
    if isinstance(prompts, str):
        return [prompts]
    try:
        several: list[Any] = list(prompts)
    except TypeError:
        raise InvalidRequestError(
            f"prompts is {type(prompts).__name__}; allowed: text, token ids, or a list of those",
            field="prompt",
        ) from None
    return [several] if several and isinstance(several[0], SupportsIndex) else several


def _for_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    each = list(params)
    if not all(isinstance(one, SamplingParams) for one in each):
        raise InvalidRequestError(
            f"params is {type(params).__name__}; allowed: SamplingParams, or a list of them", field="params"
        )
    if len(each) != count:
        raise InvalidRequestError(
            f"params has {len(each)} entries for {count} prompts; pass one set, or one for each prompt"
        )
    return list(each)
