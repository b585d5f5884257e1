"""The engine for a script: prompts in, results out, with the model's own text side around it."""

from __future__ import annotations

import dataclasses
import queue
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any

from weft.backends import registry
from weft.config import KvCachePoolConfig, PriorityPolicy, SchedulerConfig, ServingEngineConfig
from weft.engine.serving import ServingEngine
from weft.errors import InvalidRequestError, WeftError
from weft.loading.cache import Progress
from weft.loading.checkpoint import open_checkpoint
from weft.loading.pull import pull
from weft.request import (
    FinishReason,
    GenerationResult,
    InferenceRequest,
    RequestId,
    RequestState,
    SamplingParams,
    TokenOutput,
)
from weft.text.detokenizer import Detokenizer
from weft.text.model_text import open_model_text
from weft.text.stop import StopFinder
from weft.text.tokenizer import Tokenizer

Message = Mapping[str, Any]
Prompt = str | Sequence[int]
OnResult = Callable[[GenerationResult], object]

_IN_FLIGHT = 4
"""`run` keeps this many times the engine's rows under way: enough to keep it busy, few enough to forget."""


@dataclass(frozen=True)
class Job:
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


class LLM:
    """One model and an engine that serves it.

        with LLM() as llm:
            for result in llm.generate(["The capital of France is", "2 + 2 ="], SamplingParams(temperature=0)):
                print(result.text)

    `model` is "default" (fetched on first use), `hf:owner/name`, or a path: a GGUF file, or a folder with
    safetensors. `max_context` shortens the model's own context. Further keywords are fields of `ServingEngineConfig`,
    `SchedulerConfig` or `KvCachePoolConfig`. All methods may be called from several threads; their requests are
    batched together. Where params are not given, they are the model's own (`default_params`).
    """

    def __init__(
        self,
        model: str = "default",
        *,
        backend: str = "cpu",
        max_context: int | None = None,
        progress: Progress | None = None,
        **config: Any,
    ) -> None:
        engine_config = _build_config(config)
        checkpoint = open_checkpoint(pull(model, progress))
        self.text = open_model_text(checkpoint)
        self.suggestions: Mapping[str, Any] = checkpoint.generation
        """What the model's makers suggest for sampling, by the names of `SamplingParams`."""
        self.engine = ServingEngine(
            registry.build(backend, checkpoint=checkpoint, max_context=max_context), engine_config
        )
        self.engine.start()

    @property
    def tokenizer(self) -> Tokenizer:
        return self.text.tokenizer

    @property
    def memory(self) -> MemoryUse:
        info = self.engine.scheduler.info
        return MemoryUse(
            weights=info.weight_bytes,
            kv_cache=info.num_blocks * info.bytes_per_block,
            swap=info.swap_blocks * info.bytes_per_block,
            kv_tokens=info.num_blocks * info.block_size,
            max_context=self.engine.scheduler.max_sequence_length,
        )

    def default_params(self, *, chat: bool = False, **overrides: Any) -> SamplingParams:
        """What the model's makers suggest, with these fields of `SamplingParams` set; None leaves one as it is.

        A completion has 16 new tokens unless told otherwise, an answer in a chat what the context has room for.
        """
        given = {name: value for name, value in overrides.items() if value is not None}
        return SamplingParams(**{"max_tokens": None if chat else 16, **self.suggestions, **given})

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
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
            [Job(prompt, params=one) for prompt, one in zip(several, each, strict=True)], show_progress
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
        job = Job(None, messages, params, None, tools, template_options or {}, session_id)
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
        jobs = [Job(None, talk, one, None, tools, template_options or {}) for talk, one in each]
        return self._all(jobs, show_progress)

    def run(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, GenerationResult | WeftError]]:
        """Each job with its result, or with the error that kept it from running, as they end.

        Jobs are taken from the iterable only as fast as they are done, so it may be endless. Leaving the loop early
        cancels what is under way.
        """
        ended: queue.SimpleQueue[tuple[Job, _Choices]] = queue.SimpleQueue()
        under_way: set[_Choices] = set()
        most = _IN_FLIGHT * self.engine.config.scheduler.max_running
        source = iter(jobs)
        is_exhausted = False
        try:
            while under_way or not is_exhausted:
                while not is_exhausted and len(under_way) < most and ended.empty():
                    job = next(source, None)
                    if job is None:
                        is_exhausted = True
                        break
                    choices = None
                    try:
                        request = self._request(job)
                        choices = _Choices(self, request.params)
                        choices.on_end = partial(ended.put, (job, choices))
                        under_way.add(choices)
                        choices.submit(request)
                    except WeftError as error:
                        under_way.discard(choices)
                        yield job, error
                if under_way:
                    job, choices = ended.get()
                    under_way.discard(choices)
                    yield job, choices.result()
        finally:
            for choices in under_way:
                choices.cancel()

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, on_result: OnResult | None = None
    ) -> Generator[str, None, None]:
        """Complete a prompt, piece by piece. Leaving the loop early cancels the rest.

        At the end `on_result` gets the whole result; WeftError says that the text is not complete, and why.
        """
        return self._stream(Job(prompt, params=params), on_result)

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
        job = Job(None, messages, params, None, tools, template_options or {}, session_id)
        return self._stream(job, on_result)

    def close(self) -> None:
        """Stop the engine; what is not over is cancelled."""
        self.engine.stop()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _request(self, job: Job) -> InferenceRequest:
        """Tokenised; raises InvalidRequestError for a job that can never run."""
        if (job.prompt is None) == (job.messages is None):
            raise InvalidRequestError("a job has either a prompt or messages", field="prompt")
        if job.messages is not None:
            template = self.text.require_chat_template()
            tokens = template.encode(job.messages, tools=job.tools, **job.template_options)
        else:
            tokens = self.tokenizer.encode(job.prompt) if isinstance(job.prompt, str) else job.prompt  # type: ignore[assignment]
        params = job.params or self.default_params(chat=job.messages is not None)
        return InferenceRequest(tuple(tokens), params, session_id=job.session_id)

    def _all(self, jobs: list[Job], show_progress: bool | None) -> list[GenerationResult]:
        """The results of all jobs, in their order. Raises before any runs where one of them never could."""
        requests = [self._request(job) for job in jobs]
        for request in requests:
            self.engine.check(request)
        results: list[GenerationResult | None] = [None] * len(jobs)
        ready = (
            Job(r.prompt, params=r.params, key=i, session_id=r.session_id) for i, r in enumerate(requests)
        )
        with ExitStack() as stack:
            if show_progress is None:
                show_progress = len(jobs) > 1
            advance = stack.enter_context(_ProgressBar(len(jobs))) if show_progress else None
            for job, result in self.run(ready):
                if isinstance(result, WeftError):
                    raise result
                results[job.key] = result
                if advance is not None:
                    advance(result)
        return results  # type: ignore[return-value]

    def _stream(self, job: Job, on_result: OnResult | None) -> Generator[str, None, None]:
        request = self._request(job)
        if request.params.n != 1:
            raise InvalidRequestError(
                f"n is {request.params.n}; allowed in a stream: 1. `generate` and `chat` give several answers",
                field="n",
            )
        pieces: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        choices = _Choices(self, request.params, pieces.put)
        choices.on_end = lambda: pieces.put(None)
        self.engine.check(request)

        def read() -> Generator[str, None, None]:
            try:
                choices.submit(request)
                while (piece := pieces.get()) is not None:
                    if piece:
                        yield piece
            finally:
                choices.cancel()
            result = choices.result()
            if on_result is not None:
                on_result(result)
            if result.state is not RequestState.COMPLETED:
                raise WeftError(f"the text is not complete: {result.error or f'it was {result.state.value}'}")

        return read()


class _Choices:
    """The answers to one request, collected in the engine's thread; `on_end` is called there once all are over."""

    def __init__(
        self, llm: LLM, params: SamplingParams, deliver: Callable[[str], object] | None = None
    ) -> None:
        self._llm = llm
        self._params = params
        self._deliver = deliver
        self._answers: dict[RequestId, _Answer] = {}
        self._num_over = 0
        self._ids: tuple[RequestId, ...] = ()
        self.on_end: Callable[[], object] = lambda: None

    def submit(self, request: InferenceRequest) -> None:
        # Blocks while the queue is full: a million prompts never wait in memory twice.
        self._ids = self._llm.engine.submit_choices(request, self._take, block=True)

    def cancel(self) -> None:
        for request_id in self._ids:
            self._llm.engine.cancel(request_id)

    def result(self) -> GenerationResult:
        """The first answer, with the others as its siblings."""
        first, *others = (self._answers[request_id].result() for request_id in self._ids)
        return dataclasses.replace(first, siblings=tuple(others))

    def _take(self, output: TokenOutput) -> None:
        answer = self._answers.get(output.request_id)
        if answer is None:
            answer = _Answer(self._llm, self._params, self._deliver)
            self._answers[output.request_id] = answer
        is_over = output.is_final
        try:
            answer.take(output)
        except (
            BaseException
        ):  # the engine fails the request and calls no more; whoever waits must not wait for ever
            is_over = True
            raise
        finally:
            if is_over:
                self._num_over += 1
                if self._num_over == self._params.n:
                    self.on_end()


class _Answer:
    """Collects one answer: text as it comes, and the result, cut at a stop string."""

    def __init__(
        self, llm: LLM, params: SamplingParams, deliver: Callable[[str], object] | None = None
    ) -> None:
        self._params = params
        self._engine = llm.engine
        self._detokenizer = Detokenizer(llm.tokenizer)
        self._stop = StopFinder(params.stop)
        self._deliver = deliver
        self._pieces: list[str] = []
        self._token_count = 0
        self._is_finished_here = False
        """The engine ended the request because of the stop string, and cut its tokens there."""
        self._result: GenerationResult | None = None

    def take(self, output: TokenOutput) -> None:
        if not self._stop.is_stopped:
            if output.token_id is not None:
                self._token_count += 1
                self._add(self._until_stop(self._detokenizer.add(output.token_id)))
            if self._stop.is_stopped:
                self._is_finished_here = self._engine.finish(output.request_id, self._token_count)
            elif output.is_final:
                self._add(self._until_stop(self._detokenizer.finish()) + self._stop.finish())
        if output.is_final:
            self._result = self._engine.get_result(output.request_id)

    def _until_stop(self, text: str) -> str:
        return self._stop.add(text, may_stop=self._token_count >= self._params.min_tokens)

    def _add(self, text: str) -> None:
        self._pieces.append(text)
        if self._deliver is not None:
            self._deliver(text)

    def result(self) -> GenerationResult:
        result = self._result
        if result is None:
            raise WeftError("the text of the request could not be made; the engine's own error says why")
        if not self._stop.is_stopped or self._is_finished_here:
            return dataclasses.replace(result, text="".join(self._pieces))
        # The request was over before the engine heard of the stop string: it came with the last token, or more tokens
        # were on their way. The one that completed it is the last all the same.
        logprobs = None if result.logprobs is None else result.logprobs[: self._token_count]
        return dataclasses.replace(
            result,
            text="".join(self._pieces),
            tokens=result.tokens[: self._token_count],
            logprobs=logprobs,
            state=RequestState.COMPLETED,
            finish_reason=FinishReason.STOP,
            error=None,
        )


class _ProgressBar:
    """How many prompts are done, and how fast tokens come; nothing where standard error is no terminal."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[speed]}"),
        )
        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("generating"),
            *columns,
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=total, speed="")
        self._tokens = 0

    def __enter__(self) -> Callable[[GenerationResult], None]:
        self._bar.start()
        return self._advance

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def _advance(self, result: GenerationResult) -> None:
        self._tokens += sum(len(choice.tokens) for choice in result.choices)
        elapsed = self._bar.tasks[self._task].elapsed or 0.0
        speed = f"{self._tokens / elapsed:,.0f} tokens/s" if elapsed > 0 else ""
        self._bar.update(self._task, advance=1, speed=speed)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt is a string or a list of token ids; everything else is a list of prompts."""
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _for_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams | None]:
    each = [params] * count if params is None or isinstance(params, SamplingParams) else list(params)
    if len(each) != count:
        raise InvalidRequestError(
            f"params has {len(each)} entries for {count} prompts; pass one, or one for each"
        )
    return each  # type: ignore[return-value]


def _build_config(options: dict[str, Any]) -> ServingEngineConfig:
    """The three configurations from one flat set of keywords."""
    parts: dict[type, dict[str, Any]] = {SchedulerConfig: {}, KvCachePoolConfig: {}, ServingEngineConfig: {}}
    known = {field.name: part for part in parts for field in dataclasses.fields(part)}
    # How long a prompt may hold the others up is measured, not guessed: machines differ a hundredfold.
    options = {"policy": PriorityPolicy.ADAPTIVE, **options}
    for name, value in options.items():
        if name not in known or name in ("scheduler", "cache"):
            names = ", ".join(sorted(set(known) - {"scheduler", "cache"}))
            raise InvalidRequestError(f"LLM has no option {name!r}; allowed: {names}", field=name)
        parts[known[name]][name] = value
    return ServingEngineConfig(
        scheduler=SchedulerConfig(**parts[SchedulerConfig]),
        cache=KvCachePoolConfig(**parts[KvCachePoolConfig]),
        **parts[ServingEngineConfig],
    )
