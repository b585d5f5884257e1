"""The engine for a script: prompts in, results out, with the model's own text side around it."""

from __future__ import annotations

import dataclasses
import gc
import queue
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from types import TracebackType
from typing import Any, SupportsIndex, TypeVar

from weft.backends import registry
from weft.config import (
    KvCachePoolConfig,
    PriorityPolicy,
    SchedulerConfig,
    ServingEngineConfig,
    named_choice,
)
from weft.engine.serving import ServingEngine
from weft.errors import InvalidRequestError, WeftError
from weft.loading.cache import Progress
from weft.loading.checkpoint import Checkpoint, open_checkpoint
from weft.loading.pull import pull
from weft.local_answers import Feeder, LocalChoices
from weft.progress import GenerationBar, PullBar
from weft.request import (
    GenerationResult,
    InferenceRequest,
    RequestState,
    SamplingParams,
)
from weft.text.model_text import ModelText, open_model_text
from weft.text.tokenizer import Tokenizer
from weft.tiers import TierSizes, tier_sizes

Message = Mapping[str, Any]
Prompt = str | Sequence[int]
OnResult = Callable[[GenerationResult], object]

K = TypeVar("K")

_IN_FLIGHT = 4
"""`run` keeps this many times the engine's rows under way: enough to keep it busy, few enough to forget."""


_frozen_for: weakref.WeakSet[LLM] = weakref.WeakSet()
"""LLMs on a card, for which the garbage collector leaves out what there was when they were opened."""


@dataclass(frozen=True)
class PromptJob:
    """One thing to generate: a prompt (text or token ids), or the messages of a conversation."""

    prompt: Prompt | None = None
    messages: Sequence[Message] | None = None
    params: SamplingParams | None = None
    key: Any = None
    """Whatever the caller tells its jobs apart by."""
    tools: Sequence[Mapping[str, Any]] | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)
    session_id: str | None = None


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of the model's weights, and what its cache and swap space may grow to."""

    weights: int
    kv_cache: int
    swap: int
    kv_tokens: int
    max_context: int
    tiers: TierSizes | None = None
    """None: the cache has one tier."""


class LLM:
    """One model and an engine that serves it.

        with LLM() as llm:
            for result in llm.generate(["The capital of France is", "2 + 2 ="], SamplingParams(temperature=0)):
                print(result.text)

    `model` is "default" (fetched on first use), `hf:owner/name`, a path (a GGUF file, or a folder with safetensors), or
    an opened `Checkpoint`; where that has no tokenizer, prompts and answers are token ids. `max_context` shortens the
    model's own context. `device` is "cpu", "cuda", or "auto": a card where there is one. On the CPU `threads` compute (one
    for each core unless told otherwise), and `quantize` ("int8", "int4") is for weights that are stored as floats. On a
    card `invariant` makes texts independent of what runs beside them, to the bit, as they are on the CPU; it costs speed.
    Further keywords are fields of `ServingEngineConfig`, `SchedulerConfig` or `KvCachePoolConfig`, such as `memory` (bytes
    of the KV cache) or `kv_cache="two-tier"` with `tail_length` and `store_bits`, which quantises all but the newest tokens
    of a context and so keeps several times as many; choices may be given by their words. All methods may be called from several threads; their requests are
    batched together. Where params are not given, they are the model's own (`default_params`).
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
        engine_config = _build_config(config, device)
        checkpoint = model if isinstance(model, Checkpoint) else _opened(model, progress)
        self._text = open_model_text(checkpoint) if checkpoint.has_text else None
        self.suggestions: Mapping[str, Any] = checkpoint.generation
        """What the model's makers suggest for sampling, by the names of `SamplingParams`."""
        self.engine = ServingEngine(registry.build(device, checkpoint=checkpoint, **options), engine_config)
        if device == "cuda":
            # To look through all that was imported for garbage takes longer than many steps of a card: it stays.
            gc.collect()
            gc.freeze()
            _frozen_for.add(self)
        self.engine.start()
        # Who forgets to close gets memory and threads back all the same.
        weakref.finalize(self, self.engine.stop)

    @property
    def text(self) -> ModelText:
        """The model's tokenizer and chat template."""
        if self._text is None:
            raise InvalidRequestError(
                "the model has no tokenizer; pass prompts as token ids, without stop strings", field="prompt"
            )
        return self._text

    @property
    def tokenizer(self) -> Tokenizer:
        return self.text.tokenizer

    @property
    def _known_tokenizer(self) -> Tokenizer | None:
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
        """What the model's makers suggest, with these fields of `SamplingParams` set; None leaves one as it is.

        A completion has 16 new tokens unless told otherwise, an answer in a chat what the context has room for.
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
        """Complete each prompt, text or token ids; results come in the order of the prompts.

        One set of params serves all. With `n` above 1 the answers to a prompt are its result's `choices`.
        `show_progress` None shows a bar for several prompts where standard error is a terminal.
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
        """Answer a conversation, a list of {"role": ..., "content": ...}, in the model's own format.

        `tools` are JSON schemas of functions, as the OpenAI API has them, and `template_options` what the model's
        template knows besides (such as enable_thinking). The conversation's cached prefix is kept longer under a
        `session_id`.
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
        """Answer several conversations as one batch; all else as in `chat` and `generate`."""
        each = zip(conversations, _for_each(params, len(conversations)), strict=True)
        jobs = [_chat_job(talk, one, tools, template_options) for talk, one in each]
        return self._all(jobs, show_progress)

    def run(self, jobs: Iterable[PromptJob]) -> Iterator[tuple[PromptJob, GenerationResult | WeftError]]:
        """Each job with its result, or with the error that kept it from running, as they end.

        Jobs are taken from the iterable only as fast as they are done, so it may be endless. Leaving the loop early
        cancels what is under way.
        """
        return self._run((job, self._attempt(job)) for job in jobs)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, on_result: OnResult | None = None
    ) -> Generator[str, None, None]:
        """Complete a prompt, piece by piece. Leaving the loop early cancels the rest.

        At the end `on_result` gets the whole result; WeftError says that the text is not complete, and why.
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
        """Answer a conversation, piece by piece; all else as in `chat` and `stream`."""
        job = _chat_job(messages, params, tools, template_options, session_id)
        return self._stream(job, on_result)

    def close(self) -> None:
        """Stop the engine; what is not over is cancelled."""
        if was_frozen := self in _frozen_for:
            _frozen_for.remove(self)
            gc.unfreeze()  # otherwise objects in cycles stay until the process ends
        self.engine.stop()
        if was_frozen and _frozen_for:
            gc.freeze()  # for the others
        if self._text is not None:
            self._text.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _request(self, job: PromptJob) -> InferenceRequest:
        """Tokenised and checked; raises InvalidRequestError for a job that can never run."""
        if not isinstance(job, PromptJob):
            raise InvalidRequestError(f"a job is {type(job).__name__}; allowed: weft.PromptJob")
        if (job.prompt is None) == (job.messages is None):
            raise InvalidRequestError("a job has either a prompt or messages", field="prompt")
        if job.messages is not None:
            tokens: Sequence[int] = self.text.encode_chat(
                job.messages, tools=job.tools, options=job.template_options
            )
        elif isinstance(job.prompt, str):
            tokens = self.tokenizer.encode(job.prompt)
        else:
            tokens = job.prompt  # type: ignore[assignment]
        params = job.params or self.default_params(chat=job.messages is not None)
        request = InferenceRequest(tokens, params, session_id=job.session_id)  # type: ignore[arg-type]
        self.engine.check(request)
        if params.stop:
            _ = self.text  # or an error: there is no text to look for them in
        return request

    def _attempt(self, job: PromptJob) -> InferenceRequest | WeftError:
        try:
            return self._request(job)
        except WeftError as error:
            return error

    def _all(self, jobs: list[PromptJob], show_progress: bool | None) -> list[GenerationResult]:
        """The results of all jobs, in their order. Raises before any runs where one of them never could."""
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
        """Feeds the engine from `source` in a thread, so that answers come out while the next request is awaited."""
        feeder = Feeder(
            self.engine, self._known_tokenizer, source, _IN_FLIGHT * self.engine.config.scheduler.max_running
        )
        try:
            while (ended := feeder.ended.get()) is not None:
                key, outcome = ended
                try:
                    result = outcome if isinstance(outcome, WeftError) else outcome.result()
                except WeftError as error:
                    result = error
                yield key, result
                feeder.room.release()
        finally:
            feeder.stop()
        if feeder.failure is not None:
            raise feeder.failure

    def _stream(self, job: PromptJob, on_result: OnResult | None) -> Generator[str, None, None]:
        request = self._request(job)
        if request.params.n != 1:
            raise InvalidRequestError(
                f"n is {request.params.n}; allowed in a stream: 1. `generate` and `chat` give several answers",
                field="n",
            )
        pieces: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        choices = LocalChoices(
            self.engine, self._known_tokenizer, request.params, partial(pieces.put, None), pieces.put
        )

        def read() -> Generator[str, None, None]:
            is_over = False
            try:
                choices.submit(request)
                while (piece := pieces.get()) is not None:
                    if piece:
                        yield piece
                is_over = True
            finally:
                choices.cancel()
                while not is_over and choices.is_submitted:
                    is_over = pieces.get() is None  # within a step: the engine says the last word
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
    """One prompt is a string or some token ids; everything else is some prompts."""
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
            f"params has {len(each)} entries for {count} prompts; pass one, or one for each"
        )
    return list(each)


def _build_config(options: dict[str, Any], device: str) -> ServingEngineConfig:
    """The three configurations from one flat set of keywords."""
    parts: dict[type, dict[str, Any]] = {SchedulerConfig: {}, KvCachePoolConfig: {}, ServingEngineConfig: {}}
    known = {field.name: part for part in parts for field in dataclasses.fields(part)}
    choices = {
        field.name: type(field.default)
        for part in parts
        for field in dataclasses.fields(part)
        if isinstance(field.default, Enum)
    }
    # How long a prompt may hold the others up is measured, not guessed: machines differ a hundredfold.
    options = {"policy": PriorityPolicy.ADAPTIVE, **options}
    if device == "cuda" and options.keys().isdisjoint(registry.CARD_BUDGETS):
        options |= registry.CARD_BUDGETS
    for name, value in options.items():
        if name not in known or name in ("scheduler", "cache"):
            names = ", ".join(sorted(set(known) - {"scheduler", "cache"}))
            raise InvalidRequestError(f"LLM has no option {name!r}; allowed: {names}", field=name)
        parts[known[name]][name] = named_choice(name, value, choices[name]) if name in choices else value
    return ServingEngineConfig(
        scheduler=SchedulerConfig(**parts[SchedulerConfig]),
        cache=KvCachePoolConfig(**parts[KvCachePoolConfig]),
        **parts[ServingEngineConfig],
    )
