"""The text of one answer: tokens become text, cut at a stop string, and in the end a result."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence

from weft.request import FinishReason, GenerationResult, RequestState, SamplingParams, TokenOutput
from weft.text.detokenizer import Detokenizer
from weft.text.stop import StopFinder
from weft.text.tokenizer import Tokenizer


class AnswerText:
    """Takes the outputs of one answer in order. `shown` are control tokens that are part of the text all the same.

    Without a tokenizer there is no text: tokens are counted.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        params: SamplingParams,
        *,
        shown: frozenset[int] = frozenset(),
        keeps_text: bool = True,
    ) -> None:
        """`keeps_text`: the result has the text. Without, only its pieces do, and a long answer takes no memory here."""
        self.num_tokens = 0
        self.is_cut = False
        """The answer is complete: whatever the engine still sends was on its way before it heard of that."""
        self._min_tokens = params.min_tokens
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer, shown=shown)
        self._stop = StopFinder(params.stop) if params.stop else None
        self._pieces: deque[str] = deque(maxlen=None if keeps_text else 0)

    def add(self, output: TokenOutput) -> str:
        """The text that is certain now and was not before."""
        if self.is_cut:
            return ""
        self.num_tokens += output.token_id is not None
        if self._detokenizer is None:
            return ""
        text = ""
        # The token that ends an answer is no part of its text, whatever kind of token its vocabulary calls it.
        if output.token_id is not None and output.finish_reason is not FinishReason.END_OF_SEQUENCE:
            text = self._detokenizer.add(output.token_id)
        if output.is_final:
            text += self._detokenizer.finish()
        if self._stop is not None:
            text = self._stop.add(text, may_stop=self.num_tokens >= self._min_tokens)
            self.is_cut = self._stop.is_stopped
            if output.is_final:
                text += self._stop.finish()
        self._pieces.append(text)
        return text

    @property
    def may_stop(self) -> bool:
        """Whether a stop string is looked for."""
        return self._stop is not None

    def add_all(self, tokens: Sequence[int], reason: FinishReason | None) -> str:
        """As `add` for each, at a fraction of the cost, where no stop string is looked for; `reason` is why the answer
        ended with the last of them, if it did."""
        assert self._stop is None and self._detokenizer is not None
        self.num_tokens += len(tokens)
        has_end = reason is FinishReason.END_OF_SEQUENCE
        text = self._detokenizer.add_all(tokens[:-1] if has_end else tokens)
        if reason is not None:
            text += self._detokenizer.finish()
        self._pieces.append(text)
        return text

    def add_one(self, token: int) -> str:
        """As `add_all` for one token that is not the last."""
        assert self._stop is None and self._detokenizer is not None
        self.num_tokens += 1
        text = self._detokenizer.add(token)
        self._pieces.append(text)
        return text

    def cut(self) -> None:
        """Ends the answer with the last token that was added."""
        self.is_cut = True

    def result(self, result: GenerationResult) -> GenerationResult:
        """What the engine says of the answer, with its text; cut where the answer was."""
        text = "".join(self._pieces)
        if not self.is_cut:
            return dataclasses.replace(result, text=text)
        # The token that completed the stop is the last one, however the engine ended the request meanwhile.
        return dataclasses.replace(
            result,
            text=text,
            tokens=result.tokens[: self.num_tokens],
            num_tokens=None if result.num_tokens is None else self.num_tokens,
            logprobs=None if result.logprobs is None else result.logprobs[: self.num_tokens],
            state=RequestState.COMPLETED,
            finish_reason=FinishReason.STOP,
            error=None,
        )
