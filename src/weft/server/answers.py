"""The answers to one HTTP request while they come: outputs of the engine become text, cut at stop strings."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence
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
    TokenOutput,
)
from weft.server.errors import ApiError
from weft.text.detokenizer import Detokenizer
from weft.text.stop import StopFinder
from weft.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Piece:
    """What was added to one answer."""

    choice: Choice
    text: str
    tokens: Sequence[int]
    logprobs: Sequence[TokenLogprobs]


class Choice:
    """One answer: the text that is certain so far, and in the end its result."""

    def __init__(
        self, index: int, answer: Answer, params: SamplingParams, tokenizer: Tokenizer, waited: float = 0.0
    ) -> None:
        self.index = index
        self.result: GenerationResult | None = None
        """With its text, once the answer is over."""
        self.num_tokens = 0
        self._answer = answer
        self._waited = waited
        """Seconds before the engine had it."""
        self._min_tokens = params.min_tokens
        self._detokenizer = Detokenizer(tokenizer)
        self._has_stops = bool(params.stop)
        self._stop = StopFinder(params.stop)
        self._texts: list[str] = []

    def take(self) -> Piece | None:
        """What arrived since the last call; None for nothing. Raises what keeps the answer from being one."""
        outputs = self._answer.take()
        if not outputs:
            return None
        piece = self._read(outputs) if self._has_stops else self._read_all(outputs)
        self._texts.append(piece.text)
        if outputs[-1].is_final:
            self.result = self._end()
        return piece

    def _read(self, outputs: Sequence[TokenOutput]) -> Piece:
        """Token by token: the one that completes a stop string is the last."""
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
        return Piece(self, text, tokens, logprobs)

    def _read_all(self, outputs: Sequence[TokenOutput]) -> Piece:
        """The same where no stop string is looked for, all at once."""
        tokens = [output.token_id for output in outputs if output.token_id is not None]
        logprobs = [
            TokenLogprobs(output.logprob, output.top_logprobs)
            for output in outputs
            if output.logprob is not None
        ]
        self.num_tokens += len(tokens)
        has_end = outputs[-1].finish_reason is FinishReason.END_OF_SEQUENCE
        text = self._detokenizer.add_all(tokens[:-1] if has_end else tokens)
        if outputs[-1].is_final:
            text += self._detokenizer.finish()
        return Piece(self, text, tokens, logprobs)

    @property
    def num_generated(self) -> int:
        """Tokens of the answer, looked at or not; none behind a stop."""
        return self.num_tokens if self.result is not None else self._answer.num_tokens

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
        if self._waited:
            first = result.time_to_first_token
            result = dataclasses.replace(
                result,
                waiting_time=result.waiting_time + self._waited,
                time_to_first_token=None if first is None else first + self._waited,
            )
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
        self._is_submitted = False
        self._failure: ApiError | WeftError | None = None
        self._later: asyncio.Task[None] | None = None

    async def submit(
        self, requests: Sequence[InferenceRequest], *, wake_every: int = 1, waited: float = 0.0
    ) -> None:
        """Hands them to the engine. Whoever waits is woken after each first token, then after every so many; `waited`
        is for how many seconds the requests have been held back."""
        for request in requests:
            for answer in await self._engine.submit(request, self._arrived, wake_every=wake_every):
                index = len(self._choices)
                self._choices.append(Choice(index, answer, request.params, self._tokenizer, waited))
        self._is_submitted = True

    def submit_later(self, work: Callable[[], Awaitable[None]]) -> None:
        """Runs `work`, which calls `submit` in its own time; `wait` also waits for that, and `take` raises its error."""
        self._later = asyncio.create_task(self._report(work))

    async def _report(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except (ApiError, WeftError) as error:
            self.fail(error)

    def fail(self, error: ApiError | WeftError) -> None:
        """Whoever reads gets this error."""
        self._failure = error
        self._arrived.set()

    @property
    def num_tokens(self) -> int:
        """Of all answers, as far as they are generated."""
        return sum(choice.num_generated for choice in self._choices)

    @property
    def is_over(self) -> bool:
        return self._is_submitted and all(choice.result is not None for choice in self._choices)

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
        if self._failure is not None:
            raise self._failure
        for choice in self._choices:
            choice.check()

    def take(self) -> list[Piece]:
        """What arrived since the last call. Raises where one of the answers cannot be given: then none is."""
        self._arrived.clear()
        if self._failure is not None:
            raise self._failure
        pieces = (choice.take() for choice in self._choices if choice.result is None)
        return [piece for piece in pieces if piece is not None]

    def cancel(self) -> None:
        """Ends what is not over, wherever it is."""
        if self._later is not None:
            self._later.cancel()
        for choice in self._choices:
            choice.cancel()
