"""Submits requests to an engine in this process and collects their texts and results.

Without a tokenizer the text of an answer is empty.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable, Iterable
from typing import Any

from weft.engine.serving import ServingEngine
from weft.errors import WeftError
from weft.request import GenerationResult, InferenceRequest, RequestId, SamplingParams, TokenOutput
from weft.text.answer_text import AnswerText
from weft.text.tokenizer import Tokenizer


class Feeder:
    """Submits the requests of an iterable, in a thread of its own, and queues the answers that have ended."""

    def __init__(
        self,
        engine: ServingEngine,
        tokenizer: Tokenizer | None,
        source: Iterable[tuple[Any, InferenceRequest | WeftError]],
        max_unread: int,
    ) -> None:
        self.ended: queue.SimpleQueue[tuple[Any, LocalChoices | WeftError] | None] = queue.SimpleQueue()
        """The answers that have ended. None follows the last one."""
        self.capacity = threading.Semaphore(max_unread)
        """Limits the requests whose results are not read yet. The reader of the results releases it once for each, so
        that `source` is not read faster than they are."""
        self.failure: BaseException | None = None
        """The error that `source` raised."""
        self._engine = engine
        self._tokenizer = tokenizer
        self._source = iter(source)
        self._lock = threading.Lock()
        self._unfinished: set[LocalChoices] = set()
        self._is_exhausted = self._is_stopped = False
        threading.Thread(target=self._feed, name="weft-feeder", daemon=True).start()

    def stop(self) -> None:
        """Cancels unfinished requests and submits no more."""
        with self._lock:
            self._is_stopped = True
            unfinished = list(self._unfinished)
        self.capacity.release()  # `_feed` may be waiting for it; it must see `_is_stopped`
        for choices in unfinished:
            choices.cancel()

    def _feed(self) -> None:
        try:
            while self.capacity.acquire() and not self._is_stopped:
                key, request = next(self._source)
                if isinstance(request, WeftError):
                    self.ended.put((key, request))
                else:
                    self._submit(key, request)
        except StopIteration:
            pass
        except BaseException as error:
            self.failure = error
            self.stop()
        with self._lock:
            self._is_exhausted = True
            if not self._unfinished:
                self.ended.put(None)

    def _submit(self, key: Any, request: InferenceRequest) -> None:
        choices = LocalChoices(self._engine, self._tokenizer, request, lambda: self._finish(key, choices))
        with self._lock:
            self._unfinished.add(choices)
        try:
            choices.submit()
        except WeftError as error:
            self._finish(key, choices, error)
        if self._is_stopped:
            choices.cancel()

    def _finish(self, key: Any, choices: LocalChoices, error: WeftError | None = None) -> None:
        with self._lock:
            self._unfinished.discard(choices)
            self.ended.put((key, error or choices))
            if self._is_exhausted and not self._unfinished:
                self.ended.put(None)


class LocalChoices:
    """Collects the answers to one request in the engine's thread. Calls `on_end` there once all have ended."""

    def __init__(
        self,
        engine: ServingEngine,
        tokenizer: Tokenizer | None,
        request: InferenceRequest,
        on_end: Callable[[], object],
        deliver: Callable[[str], object] | None = None,
    ) -> None:
        """`request` must have an id. `deliver` is called with each new text."""
        self._engine = engine
        self._tokenizer = tokenizer
        self._request = request
        self._on_end = on_end
        self._deliver = deliver
        self._ids = tuple(map(request.answer_id, range(request.params.n)))
        self._answers: dict[RequestId, LocalAnswer] = {}
        self._num_over = 0
        self.is_submitted = False

    def submit(self) -> None:
        # Blocks while the queue is full, so that a long source does not fill the memory.
        self._engine.submit_choices(self._request, self._take, block=True)
        self.is_submitted = True

    def cancel(self) -> None:
        for request_id in self._ids:
            self._engine.cancel(request_id)

    def result(self) -> GenerationResult:
        """The result of the first answer. Its `choices` include the results of the others."""
        first, *others = (self._answers[request_id].result() for request_id in self._ids)
        return dataclasses.replace(first, siblings=tuple(others))

    def _take(self, output: TokenOutput) -> None:
        answer = self._answers.get(output.request_id)
        if answer is None:
            answer = LocalAnswer(self._engine, self._tokenizer, self._request.params, self._deliver)
            self._answers[output.request_id] = answer
        is_over = output.is_final
        try:
            answer.take(output)
        except BaseException:
            # After this exception the engine fails the request and does not call `_take` again. `on_end` must still be
            # called.
            is_over = True
            raise
        finally:
            if is_over:
                self._num_over += 1
                if self._num_over == len(self._ids):
                    self._on_end()


class LocalAnswer:
    """Collects the text and the result of one answer. Cuts them at a stop string."""

    def __init__(
        self,
        engine: ServingEngine,
        tokenizer: Tokenizer | None,
        params: SamplingParams,
        deliver: Callable[[str], object] | None = None,
    ) -> None:
        self._engine = engine
        self._text = AnswerText(tokenizer, params)
        self._deliver = deliver
        self._result: GenerationResult | None = None

    def take(self, output: TokenOutput) -> None:
        was_cut = self._text.is_cut
        text = self._text.add(output)
        if self._deliver is not None:
            self._deliver(text)
        if self._text.is_cut and not was_cut:
            self._engine.finish(output.request_id, self._text.num_tokens)
        if output.is_final:
            self._result = self._engine.get_result(output.request_id)

    def result(self) -> GenerationResult:
        if self._result is None:
            raise WeftError("the tokens of the answer could not be decoded; see the error of the request")
        return self._text.result(self._result)
