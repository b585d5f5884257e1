"""The answers of one HTTP request while they are generated: turns outputs of the engine into text and its parts."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import NamedTuple

from weft.engine.ipc.client import EngineClient
from weft.engine.ipc.remote_answer import RemoteAnswer, Unread
from weft.errors import WeftError
from weft.request import (
    GenerationResult,
    InferenceRequest,
    RequestState,
    TokenLogprobs,
    TokenOutput,
)
from weft.server.errors import ApiError, failed_result
from weft.server.http.byte_budget import RequestBytes
from weft.server.learned.transcript import Transcript
from weft.text.answer_parts import Delta, ToolCallStart
from weft.text.answer_reader import AnswerReader, AnswerSyntax
from weft.text.answer_text import AnswerText
from weft.text.tokenizer import Tokenizer

_MAX_EFFORT = 512
"""Limit for the work of one `Choices.take`. The unit is a token without logprobs; the limit is about 2 ms. Without it,
a thousand answers, or many tokens with twenty logprobs each, would block the event loop for a second."""
_EFFORT_PER_PIECE = 16


class Piece(NamedTuple):
    """New tokens of one answer, with their text."""

    choice: Choice
    text: str
    tokens: Sequence[int]
    logprobs: Sequence[TokenLogprobs]
    deltas: Sequence[Delta] | None = None
    """The text as parts of the answer (thought, content, tool calls); None if the answer is plain text."""
    is_last: bool = False


class Choice:
    """One answer: reads its outputs from the engine and makes pieces of them. After the end it holds the result. It
    does not keep the text, which the pieces contain."""

    def __init__(
        self,
        index: int,
        answer: RemoteAnswer,
        text: AnswerText,
        reader: AnswerReader | None,
        *,
        effort_per_token: int = 1,
        waited: float = 0.0,
    ) -> None:
        self.index = index
        self.result: GenerationResult | None = None
        """The result of the engine; None until the answer has ended. It has no tokens and no text: the pieces have them."""
        self.num_reasoning_tokens = 0
        self.has_calls = False
        self.calls_began = self.calls_ended = 0.0
        """The times when the first tool call of the answer began, and when the last one was complete."""
        self._answer = answer
        self.effort_per_token = effort_per_token
        self._text = text
        self._reader = reader
        self._is_plain = reader is None and not text.may_stop
        self._waited = waited
        """Seconds for which the answer waited in the server before it was submitted."""

    def prompt_logprobs(self) -> Iterator[Sequence[TokenLogprobs | None]]:
        """The logprobs of the prompt tokens, in batches. Available when the answer has ended."""
        return self._answer.prompt_logprobs()

    def take(self, effort: int) -> Piece | None:
        """The tokens that arrived since the last call, limited by `effort`; None if there are none. Raises if the
        answer failed."""
        most = effort // self.effort_per_token or 1
        if self._is_plain:
            piece = self._read_all(self._answer.take_raw(most))
        else:
            outputs = self._answer.take(most)
            piece = self._read(outputs) if outputs else None
        if piece is not None and piece.is_last:
            self.result = self._end()
        return piece

    def _read(self, outputs: Sequence[TokenOutput]) -> Piece:
        """Reads token by token, and stops at the one that completes a stop string or the last tool call."""
        answer, reader = self._text, self._reader
        text, tokens, logprobs = "", [], []
        deltas: list[Delta] | None = None if reader is None else []
        for output in outputs:
            if answer.is_cut:
                break  # these tokens were generated before the engine got the message that ends the answer
            new = answer.add(output)
            text += new
            if output.token_id is not None:
                tokens.append(output.token_id)
                if output.logprob is not None:
                    logprobs.append(TokenLogprobs(output.logprob, output.top_logprobs))
            if reader is not None and deltas is not None:
                deltas += self._read_parts(reader, new, output.is_final)
            if answer.is_cut:
                self._answer.finish(answer.num_tokens)
        return Piece(self, text, tokens, logprobs, deltas, outputs[-1].is_final)

    def _read_all(self, outputs: Sequence[Unread]) -> Piece | None:
        """Reads all tokens at once, for answers that are plain text (no reasoning, no tool calls) without stop strings."""
        if not outputs:
            return None
        last = outputs[-1]
        if len(outputs) == 1 and isinstance(last, int):  # the common case of a stream under low load
            return Piece(self, self._text.add_one(last), (last,), ())
        tokens: list[int] = []
        logprobs: list[TokenLogprobs] = []
        for output in outputs:
            if isinstance(output, int):
                tokens.append(output)
            elif output.token_id is not None:
                tokens.append(output.token_id)
                if (scored := output.logprobs) is not None:
                    logprobs.append(scored)
        reason = None if isinstance(last, int) else last.finish_reason
        return Piece(self, self._text.add_all(tokens, reason), tokens, logprobs, is_last=reason is not None)

    @property
    def num_generated(self) -> int:
        """Generated tokens of the answer, taken or not. Tokens after a stop string do not count."""
        return self._text.num_tokens if self.result is not None else self._answer.num_tokens

    def check(self) -> None:
        self._answer.check()

    def cancel(self) -> None:
        if self.result is None:
            self._answer.cancel("the client is gone")

    def _read_parts(self, reader: AnswerReader, text: str, is_final: bool) -> list[Delta]:
        """Splits new text into parts of the answer. Cuts the answer after its last allowed tool call."""
        self.num_reasoning_tokens += reader.is_in_reasoning
        deltas = reader.add(text)
        if reader.is_over:
            self._text.cut()
        if is_final or self._text.is_cut:
            deltas += reader.finish()
        if not self.has_calls and any(isinstance(delta, ToolCallStart) for delta in deltas):
            self.has_calls = True
            self.calls_began = time.monotonic()
        return deltas

    @property
    def engine_result(self) -> GenerationResult | None:
        """The result of the engine. Its times include the wait in the server. Failed and cancelled answers have a result
        too. None: not known yet."""
        result, waited = self._answer.result, self._waited
        if result is None or not waited:
            return result
        first = result.time_to_first_token
        return dataclasses.replace(
            result,
            waiting_time=result.waiting_time + waited,
            time_to_first_token=None if first is None else first + waited,
            preempted_times=tuple(
                one._replace(began=one.began + waited, ended=one.ended + waited)
                for one in result.preempted_times
            ),
        )

    def _end(self) -> GenerationResult:
        result = self.engine_result
        assert result is not None, "the final output comes with the result"
        if self.has_calls:
            self.calls_ended = time.monotonic()
        if not self._text.is_cut and result.state is not RequestState.COMPLETED:
            raise failed_result(result)
        return self._text.result(result)


class _Arrival(asyncio.Event):
    """Set when `Choices.take` may return something. A reader that is not a task sets `on_set`, which is then called."""

    on_set: Callable[[], object] | None = None

    def set(self) -> None:
        if not self.is_set():
            super().set()
            if self.on_set is not None:
                self.on_set()


class _UntakenBytes:
    """Counts the bytes of answers that arrived and are not taken. Answers refer to this object: a reference to
    `Choices` would be a reference cycle."""

    def __init__(self, answer_bytes: RequestBytes | None) -> None:
        self._answer_bytes = answer_bytes
        self.refusal: ApiError | None = None

    def may_grow(self, num_bytes: int) -> bool:
        if self._answer_bytes is not None and self.refusal is None:
            self.refusal = self._answer_bytes.try_add(num_bytes)
        return self.refusal is None


class Choices:
    """All answers of one HTTP request: `n` for the first prompt, then `n` for the next. The OpenAI API calls an answer
    a choice. The owner of this object must call `cancel` at the end."""

    def __init__(
        self, engine: EngineClient, tokenizer: Tokenizer, answer_bytes: RequestBytes | None = None
    ) -> None:
        """`answer_bytes` counts the bytes of the answers against their budget; None: no limit."""
        self._engine = engine
        self._tokenizer = tokenizer
        self._untaken_bytes = _UntakenBytes(answer_bytes)
        self._arrived = _Arrival()
        self._choices: list[Choice] = []
        self._is_submitted = False
        self._failure: ApiError | WeftError | None = None
        self._submit_task: asyncio.Task[None] | None = None
        self._first_index = 0
        """Index of the answer at which the next `take` begins, because the last `take` did not reach all answers."""
        self._shown_ids: frozenset[int] | None = None
        self.on_answer_end: Callable[[int], object] = lambda num_tokens: None
        """Called with the number of tokens of each answer that ends."""
        self.transcript: Transcript | None = None
        """Collects the text of all answers, if they are kept."""

    async def submit(
        self,
        requests: Sequence[InferenceRequest],
        form: AnswerSyntax | None = None,
        *,
        is_streamed: bool = True,
        wake_every: int = 1,
        waited: float = 0.0,
        indices: range | None = None,
        is_last: bool = True,
    ) -> None:
        """Submits requests to the engine: all their answers, or those in `indices`. More calls follow unless `is_last`.

        `form`: the parts that answers may have; None: plain text. The reader is woken after the first token of an
        answer and then after every `wake_every` tokens. `waited`: seconds for which the requests waited in the
        server. Answers that are not streamed have no limit for unread tokens, because the server itself reads them.
        """
        if self._shown_ids is None:
            self._shown_ids = frozenset() if form is None else form.visible_control_ids(self._tokenizer)
        for request in requests:
            for answer in await self._engine.submit(
                request,
                self._arrived,
                wake_every=wake_every,
                indices=indices,
                waited=waited,
                is_unbounded=not is_streamed,
                may_grow=self._untaken_bytes.may_grow,
            ):
                text = AnswerText(
                    self._tokenizer, request.params, visible_control_ids=self._shown_ids, keeps_text=False
                )
                reader = None if form is None else AnswerReader(form)
                effort = 1 + (request.params.logprobs or 0)
                self._choices.append(
                    Choice(len(self._choices), answer, text, reader, effort_per_token=effort, waited=waited)
                )
                # Outputs may have arrived before the answer was in the list. Then `take` has not seen them.
                if answer.is_readable:
                    self._arrived.set()
        self._is_submitted = is_last

    def submit_later(self, work: Callable[[], Awaitable[None]]) -> None:
        """Runs `work`, which calls `submit`, in a task. If `work` fails, `take` and `check` raise its error."""
        self._submit_task = asyncio.create_task(self._run_submit(work))

    async def _run_submit(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except (ApiError, WeftError) as error:
            self.fail(error)
        except Exception:
            self.fail(ApiError.internal_error())
            raise

    def fail(self, error: ApiError | WeftError) -> None:
        """Makes `take` and `check` raise this error."""
        self._failure = error
        self._arrived.set()

    @property
    def num_tokens(self) -> int:
        """Generated tokens of all answers so far."""
        return sum(choice.num_generated for choice in self._choices)

    @property
    def is_over(self) -> bool:
        return self._is_submitted and all(choice.result is not None for choice in self._choices)

    def __iter__(self) -> Iterator[Choice]:
        """The answers that were submitted to the engine."""
        return iter(self._choices)

    @property
    def results(self) -> list[GenerationResult]:
        """The results of all answers, after `is_over`."""
        results = [choice.result for choice in self._choices]
        assert None not in results
        return results  # type: ignore[return-value]

    def prompt_logprobs(self, index: int) -> Iterator[Sequence[TokenLogprobs | None]]:
        """The logprobs of the prompt of an answer, in batches."""
        return self._choices[index].prompt_logprobs()

    @property
    def num_reasoning_tokens(self) -> int:
        return sum(choice.num_reasoning_tokens for choice in self._choices)

    @property
    def has_more(self) -> bool:
        """Whether `take` may return something."""
        return self._arrived.is_set()

    async def wait(self) -> None:
        """Waits until `take` may return something."""
        await self._arrived.wait()

    def call_on_arrival(self, call: Callable[[], object] | None) -> None:
        """Calls `call` each time `take` may return something new, and immediately if `take` already may. `call` must
        not call `take`: the connection is still passing outputs to the answers at that time."""
        self._arrived.on_set = call
        if call is not None and self._arrived.is_set():
            call()

    def check(self) -> None:
        """Raises if the engine refused the request, or if it failed."""
        self._raise_failure()
        for choice in self._choices:
            choice.check()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._untaken_bytes.refusal is not None:
            raise self._untaken_bytes.refusal

    def take(self) -> list[Piece]:
        """The pieces that arrived since the last call, limited by `_MAX_EFFORT`. If some are left, `has_more` stays
        true. Raises if one answer failed: then the whole request fails."""
        self._arrived.clear()
        self._raise_failure()
        pieces: list[Piece] = []
        effort = _MAX_EFFORT
        choices = self._choices
        for choice in (
            choices[self._first_index :] + choices[: self._first_index] if self._first_index else choices
        ):
            if choice.result is not None:
                continue
            if effort <= 0:
                self._first_index = choice.index
                self._arrived.set()
                break
            piece = choice.take(effort)
            if piece is not None:
                pieces.append(piece)
                if self.transcript is not None:
                    self.transcript.add(piece)
                if piece.is_last:
                    self.on_answer_end(choice.num_generated)
                effort -= _EFFORT_PER_PIECE + len(piece.tokens) * choice.effort_per_token
        return pieces

    def cancel(self) -> None:
        """Cancels all answers that have not ended, submitted or not."""
        if self._submit_task is not None:
            self._submit_task.cancel()
        if self.transcript is not None:
            self.transcript.drop()
        for choice in self._choices:
            choice.cancel()
