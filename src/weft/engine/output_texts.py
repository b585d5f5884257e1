"""The texts of unfinished answers, for an engine that has a tokenizer."""

from __future__ import annotations

from collections.abc import Callable

from weft.backends.base import AnswerText
from weft.request import Failure, FailureKind, GenerationResult, RequestId, SamplingParams, TokenOutput


class AnswerTexts:
    """Owns one text for each unfinished request."""

    def __init__(
        self,
        text_of: Callable[[SamplingParams], AnswerText],
        finish: Callable[[RequestId, int], object],
        fail: Callable[[RequestId, Failure], object],
    ) -> None:
        """`finish` ends a request at a stop string, after the given number of tokens. `fail` ends a request whose
        tokens cannot be decoded."""
        self._text_of = text_of
        self._finish = finish
        self._fail = fail
        self._texts: dict[RequestId, AnswerText] = {}

    def begin(self, request_id: RequestId, params: SamplingParams) -> None:
        self._texts[request_id] = self._text_of(params)

    def fill(
        self, outputs: list[TokenOutput], results: list[GenerationResult]
    ) -> tuple[list[TokenOutput], list[GenerationResult]]:
        """Adds the texts to outputs and results. Drops the texts of requests that ended."""
        with_text = [output._replace(text=self._add(output)) for output in outputs]
        return with_text, [self._texts.pop(result.request_id).result(result) for result in results]

    def _add(self, output: TokenOutput) -> str:
        text = self._texts[output.request_id]
        was_cut = text.is_cut
        try:
            added = text.add(output)
        except Exception as error:
            message = f"the tokens could not be decoded to text ({type(error).__name__}: {error})"
            self._fail(output.request_id, Failure(FailureKind.DELIVERY, message))
            return ""
        if text.is_cut and not was_cut:
            self._finish(output.request_id, text.num_tokens)
        return added
