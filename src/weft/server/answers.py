"""The answers to one HTTP request while they come: outputs of the engine become text, cut at stop strings."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from weft.engine.client import Answer, EngineClient
from weft.errors import WeftError
from weft.request import (
    FinishReason,
    GenerationResult,
    InferenceRequest,
    RequestState,
    SamplingParams,
    TokenLogprobs,
)
from weft.server.errors import ApiError
from weft.text.detokenizer import Detokenizer
from weft.text.stop import StopFinder
from weft.text.tokenizer import Tokenizer

_EFFORT = 512
"""What is done at a time for one request, in tokens without logprobs: 2 ms or so. A thousand answers, or a burst of
tokens with twenty logprobs each, would otherwise hold everyone else up for a second."""
_EFFORT_PER_PIECE = 16


@dataclass(frozen=True, slots=True)
class Piece:
    """What was added to one answer."""

    choice: Choice
    text: str
    tokens: Sequence[int]
    logprobs: Sequence[TokenLogprobs]


class Choice:
    """One answer: the text that is certain so far, and in the end its result."""

    def __init__(self, index: int, answer: Answer, params: SamplingParams, tokenizer: Tokenizer) -> None:
        self.index = index
        self.result: GenerationResult | None = None
        """With its text, once the answer is over."""
        self.num_tokens = 0
        self._answer = answer
        self.effort_per_token = 1 + (params.logprobs or 0)
        self._min_tokens = params.min_tokens
        self._detokenizer = Detokenizer(tokenizer)
        self._stop = StopFinder(params.stop)
        self._texts: list[str] = []

    def take(self, effort: int) -> Piece | None:
        """What arrived since the last call, as much as `effort` allows; None for nothing. Raises what keeps the answer
        from being one."""
        outputs = self._answer.take(max(1, effort // self.effort_per_token))
        if not outputs:
            return None
        text, tokens, logprobs = "", [], []
        for output in outputs:
            if self._stop.is_stopped:
                break  # sent before the engine heard of the stop
            token = output.token_id
            if token is not None:
                self.num_tokens += 1
                tokens.append(token)
                if output.logprob is not None:
                    logprobs.append(TokenLogprobs(output.logprob, output.top_logprobs))
                # The token that ends an answer is no part of its text, whatever kind its vocabulary calls it.
                if output.finish_reason is not FinishReason.END_OF_SEQUENCE:
                    text += self._until_stop(self._detokenizer.add(token))
            if self._stop.is_stopped:
                self._answer.finish(self.num_tokens)
            elif output.is_final:
                text += self._until_stop(self._detokenizer.finish()) + self._stop.finish()
        self._texts.append(text)
        if outputs[-1].is_final:
            self.result = self._end()
        return Piece(self, text, tokens, logprobs)

    def check(self) -> None:
        self._answer.check()

    def cancel(self) -> None:
        if self.result is None:
            self._answer.cancel("the client is gone")

    def _until_stop(self, text: str) -> str:
        return self._stop.add(text, may_stop=self.num_tokens >= self._min_tokens)

    def _end(self) -> GenerationResult:
        result = self._answer.result
        assert result is not None, "the final output comes with the result"
        text = "".join(self._texts)
        if self._stop.is_stopped:
            # The token that completed the stop is the last, whatever was on its way when the engine heard of it.
            logprobs = None if result.logprobs is None else result.logprobs[: self.num_tokens]
            return dataclasses.replace(
                result,
                text=text,
                tokens=result.tokens[: self.num_tokens],
                logprobs=logprobs,
                state=RequestState.COMPLETED,
                finish_reason=FinishReason.STOP,
                error=None,
            )
        if result.state is not RequestState.COMPLETED:
            message = result.error or f"the request was {result.state.value}"
            if message.startswith("deadline"):
                raise ApiError(504, message, code="deadline_exceeded")
            raise WeftError(message)
        return dataclasses.replace(result, text=text)


class Choices:
    """All answers to one HTTP request, numbered prompt by prompt. Whoever made it calls `cancel` in the end."""

    def __init__(self, engine: EngineClient, tokenizer: Tokenizer) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._arrived = asyncio.Event()
        self._choices: list[Choice] = []
        self._next = 0
        """Who is first when not all can be taken from at once."""

    async def submit(self, requests: Sequence[InferenceRequest]) -> None:
        for request in requests:
            for answer in await self._engine.submit(request, self._arrived):
                index = len(self._choices)
                self._choices.append(Choice(index, answer, request.params, self._tokenizer))

    @property
    def is_over(self) -> bool:
        return all(choice.result is not None for choice in self._choices)

    @property
    def results(self) -> list[GenerationResult]:
        """Of an answer that is over."""
        results = [choice.result for choice in self._choices]
        assert None not in results
        return results  # type: ignore[return-value]

    async def wait(self) -> None:
        """Until there may be something to take."""
        await self._arrived.wait()

    def check(self) -> None:
        """Raises where the engine refused the request."""
        for choice in self._choices:
            choice.check()

    def take(self) -> list[Piece]:
        """What arrived since the last call, or as much of it as may be done at a time: then `wait` returns at once.
        Raises where one of the answers cannot be given: then none is."""
        self._arrived.clear()
        pieces: list[Piece] = []
        effort = _EFFORT
        for choice in self._choices[self._next :] + self._choices[: self._next]:
            if choice.result is not None:
                continue
            if effort <= 0:
                self._next = choice.index
                self._arrived.set()
                break
            piece = choice.take(effort)
            if piece is not None:
                pieces.append(piece)
                effort -= _EFFORT_PER_PIECE + len(piece.tokens) * choice.effort_per_token
        return pieces

    def cancel(self) -> None:
        """Ends what is not over, wherever it is."""
        for choice in self._choices:
            choice.cancel()
