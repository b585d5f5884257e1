"""The engine for a script: prompts in, results out, with the model's own tokenizer on both sides."""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from types import TracebackType
from typing import Any

from weft.backends import registry
from weft.config import KvCachePoolConfig, PriorityPolicy, SchedulerConfig, ServingEngineConfig
from weft.engine.serving import ServingEngine
from weft.errors import InvalidRequestError, WeftError
from weft.loading.checkpoint import open_checkpoint
from weft.loading.pull import Progress, pull
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

Message = Mapping[str, Any]
OnResult = Callable[[GenerationResult], object]


class LLM:
    """One model and an engine that serves it.

        with LLM() as llm:
            for result in llm.generate(["The capital of France is", "2 + 2 ="], SamplingParams(temperature=0)):
                print(result.text)

    `model` is "default" (fetched on first use) or the path of a GGUF file. Further keywords are fields of
    `ServingEngineConfig`, `SchedulerConfig` or `KvCachePoolConfig`. All methods may be called from several threads;
    their requests are batched together.
    """

    def __init__(
        self,
        model: str = "default",
        *,
        backend: str = "cpu",
        progress: Progress | None = None,
        **config: Any,
    ) -> None:
        engine_config = _build_config(config)
        checkpoint = open_checkpoint(pull(model, progress))
        text = open_model_text(checkpoint)
        self.tokenizer = text.tokenizer
        self.text = text
        self.engine = ServingEngine(registry.build(backend, checkpoint=checkpoint), engine_config)
        self.engine.start()

    def generate(
        self, prompts: str | Sequence[str], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[GenerationResult]:
        """Complete each prompt; results come in the order of the prompts. One set of params serves all."""
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        return self._generate([self.tokenizer.encode(text) for text in texts], params)

    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> GenerationResult:
        """Answer a conversation, a list of {"role": ..., "content": ...}, in the model's own format."""
        return self._generate([self.text.require_chat_template().encode(messages)], params)[0]

    def stream(
        self, prompt: str, params: SamplingParams | None = None, *, on_result: OnResult | None = None
    ) -> Generator[str, None, None]:
        """Complete a prompt, piece by piece. Leaving the loop early cancels the rest.

        At the end `on_result` gets the whole result; WeftError says that the text is not complete, and why.
        """
        return self._stream(self.tokenizer.encode(prompt), params, on_result)

    def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        on_result: OnResult | None = None,
    ) -> Generator[str, None, None]:
        """Answer a conversation, piece by piece; all else as in `stream`."""
        return self._stream(self.text.require_chat_template().encode(messages), params, on_result)

    def close(self) -> None:
        """Stop the engine; what is not over is cancelled."""
        self.engine.stop()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _generate(
        self, prompts: list[list[int]], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[GenerationResult]:
        each = _params_for_each(params, len(prompts))
        answers = [_Answer(self, one) for one in each]
        submitted: list[RequestId] = []
        try:
            # Blocks while the queue is full: a million prompts never wait in memory twice.
            for prompt, answer in zip(prompts, answers, strict=True):
                request = InferenceRequest(tuple(prompt), answer.params)
                submitted.append(self.engine.submit_with_callback(request, answer.take, block=True))
            for answer in answers:
                answer.is_over.wait()
        except BaseException:  # one bad prompt, or Ctrl-C: the others must not go on for nobody
            for request_id in submitted:
                self.engine.cancel(request_id)
            raise
        return [answer.result() for answer in answers]

    def _stream(
        self, prompt: list[int], params: SamplingParams | None, on_result: OnResult | None
    ) -> Generator[str, None, None]:
        pieces: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        answer = _Answer(self, _params_for_each(params, 1)[0], pieces.put)
        request = InferenceRequest(tuple(prompt), answer.params)
        request_id = self.engine.submit_with_callback(request, answer.take, block=True)
        try:
            while (piece := pieces.get()) is not None:
                if piece:
                    yield piece
        finally:
            self.engine.cancel(request_id)
        result = answer.result()
        if on_result is not None:
            on_result(result)
        if result.state is not RequestState.COMPLETED:
            raise WeftError(f"the text is not complete: {result.error or f'it was {result.state.value}'}")


class _Answer:
    """Collects one request in the engine's thread: text as it comes, and the result, cut at a stop string."""

    def __init__(
        self, llm: LLM, params: SamplingParams, deliver: Callable[[str | None], object] | None = None
    ) -> None:
        self.params = params
        self.is_over = threading.Event()
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
        try:
            self._take(output)
        except (
            BaseException
        ):  # the engine fails the request and calls no more; whoever waits must not wait for ever
            self._end()
            raise

    def _take(self, output: TokenOutput) -> None:
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
            self._end()

    def _until_stop(self, text: str) -> str:
        return self._stop.add(text, may_stop=self._token_count >= self.params.min_tokens)

    def _end(self) -> None:
        self.is_over.set()
        if self._deliver is not None:
            self._deliver(None)

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


def _params_for_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    each = [params] * count if isinstance(params, SamplingParams) else list(params)
    if len(each) != count:
        raise InvalidRequestError(
            f"params has {len(each)} entries for {count} prompts; pass one, or one for each"
        )
    for one in each:
        if one.n != 1:
            raise InvalidRequestError(
                f"n is {one.n}; allowed here: 1. Repeat the prompt with other seeds", field="n"
            )
    return each


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
