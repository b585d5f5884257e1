"""Owns callbacks and results: passes the outputs of the scheduler to callbacks, and keeps results for their readers."""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable

from weft.backends.base import OpenedModel
from weft.clock import Clock
from weft.engine.engine_metrics import EngineMetrics
from weft.engine.output_texts import AnswerTexts
from weft.request import (
    Failure,
    FailureKind,
    FinishReason,
    GenerationResult,
    RequestId,
    RequestState,
    TokenOutput,
)
from weft.scheduling.scheduler import ContinuousBatchScheduler
from weft.scheduling.sequence import Sequence

Callback = Callable[[TokenOutput], object]


class Delivery:
    """Callers hold the engine's lock, except for `deliver`, which takes it through `changed`."""

    def __init__(
        self,
        scheduler: ContinuousBatchScheduler,
        metrics: EngineMetrics,
        model: OpenedModel | None,
        changed: threading.Condition,
        clock: Clock,
        max_kept_results: int,
        after_delivery: Callable[[], object] | None,
    ) -> None:
        """`model` makes the texts of answers; without its tokenizer outputs have no text. `changed` is notified of new results.
        `after_delivery` is called after all callbacks of a step."""
        self.results: OrderedDict[RequestId, GenerationResult] = OrderedDict()
        """The newest results, at most `max_kept_results`."""
        self._scheduler = scheduler
        self._metrics = metrics
        self._texts: AnswerTexts | None = None
        if model is not None and model.text_of is not None:
            self._texts = AnswerTexts(model.text_of, scheduler.finish, scheduler.fail_request)
        self._changed = changed
        self._clock = clock
        self._max_kept_results = max_kept_results
        self._after_delivery = after_delivery
        self._callbacks: dict[RequestId, Callback] = {}
        self._unfinished: set[RequestId] = set()
        """Requests that were submitted and have no result yet."""

    def is_unfinished(self, request_id: RequestId) -> bool:
        return request_id in self._unfinished

    def uses(self, request_id: RequestId) -> bool:
        """Whether the id is in use: its request is unfinished, or a callback of that request still runs."""
        return request_id in self._unfinished or request_id in self._callbacks

    def begin(self, sequences: Iterable[Sequence], callback: Callback | None) -> None:
        """Registers requests that were submitted."""
        for sequence in sequences:
            self._unfinished.add(sequence.request_id)
            if self._texts is not None:
                self._texts.begin(sequence.request_id, sequence.request.params)
            if callback is not None:
                self._callbacks[sequence.request_id] = callback

    def deliver(self) -> list[TokenOutput]:
        """Delivers outputs and results. Callbacks run without the lock; one that raises fails only its own request."""
        with self._changed:
            outputs, results = self._scheduler.take_outputs()
            if not outputs and not results:
                return outputs
            if self._texts is not None:
                outputs, results = self._texts.fill(outputs, results)
            self._metrics.record(results, self._clock())
            for result in results:
                self.results.pop(result.request_id, None)  # result of an earlier request with this id
                self.results[result.request_id] = result
                self._unfinished.discard(result.request_id)
            callbacks = self._callbacks
        for output in outputs if callbacks else ():
            callback = callbacks.get(output.request_id)
            if callback is None:
                continue
            is_last = output.is_final
            try:
                callback(output)
            except Exception as error:
                is_last = True
                self._fail(output.request_id, f"callback raised {type(error).__name__}: {error}")
            finally:
                if is_last:
                    callbacks.pop(output.request_id, None)
        if self._after_delivery is not None:
            self._after_delivery()
        with self._changed:
            while len(self.results) > self._max_kept_results:
                self.results.popitem(last=False)
            self._changed.notify_all()
        return outputs

    def _fail(self, request_id: RequestId, message: str) -> None:
        """Fails the request of a callback that raised."""
        with self._changed:
            failure = Failure(FailureKind.DELIVERY, message)
            if self._scheduler.fail_request(request_id, failure) or request_id not in self.results:
                return
            # The request has ended already: only its stored result can change.
            result = self.results[request_id]
            self._metrics.ended[result.state] -= 1
            self._metrics.ended[RequestState.FAILED] += 1
            self.results[request_id] = dataclasses.replace(
                result,
                state=RequestState.FAILED,
                finish_reason=FinishReason.ERROR,
                error=message,
                failure=failure.kind,
            )
