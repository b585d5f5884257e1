"""The text of one answer: detokenises its tokens, cuts the text at a stop string, and makes the result."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence

from weft.request import FinishReason, GenerationResult, RequestState, SamplingParams, TokenOutput
from weft.text.detokenizer import Detokenizer
from weft.text.stop import StopFinder
from weft.text.tokenizer import Tokenizer


class AnswerText:
    """Turns the outputs of one answer, in order, into text. Without a tokenizer, it only counts tokens.

    Control tokens are left out of the text, except those in `visible_control_ids`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        params: SamplingParams,
        *,
        visible_control_ids: frozenset[int] = frozenset(),
        keeps_text: bool = True,
    ) -> None:
        """`keeps_text`: `result` returns the whole text. Otherwise the text is not stored, which saves memory."""
        self.num_tokens = 0
        self.is_cut = False
        """Whether a stop string or `cut` ended the answer. Then tokens that the engine still sends are ignored."""
        self._min_tokens = params.min_tokens
        self._detokenizer = (
            None if tokenizer is None else Detokenizer(tokenizer, visible_control_ids=visible_control_ids)
        )
        self._stop = StopFinder(params.stop) if params.stop else None
        self._pieces: deque[str] = deque(maxlen=None if keeps_text else 0)

    def add(self, output: TokenOutput) -> str:
        """Returns the new text. Text that may become a stop string is held back."""
        if self.is_cut:
            return ""
        self.num_tokens += output.token_id is not None
        if self._detokenizer is None:
            return ""
        text = ""
        # The EOS token is not part of the text, even if the vocabulary does not call it a control token.
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
        """Whether the request has stop strings."""
        return self._stop is not None

    def add_all(self, tokens: Sequence[int], reason: FinishReason | None) -> str:
        """Like `add` for each token, but much cheaper. Only for requests without stop strings.

        `reason` is the finish reason if the last token ended the answer, else None.
        """
        assert self._stop is None and self._detokenizer is not None
        self.num_tokens += len(tokens)
        has_end = reason is FinishReason.END_OF_SEQUENCE
        text = self._detokenizer.add_all(tokens[:-1] if has_end else tokens)
        if reason is not None:
            text += self._detokenizer.finish()
        self._pieces.append(text)
        return text

    def add_one(self, token: int) -> str:
        """Like `add_all` for one token that does not end the answer."""
        assert self._stop is None and self._detokenizer is not None
        self.num_tokens += 1
        text = self._detokenizer.add(token)
        self._pieces.append(text)
        return text

    def cut(self) -> None:
        """Ends the answer after the last token added."""
        self.is_cut = True

    def result(self, result: GenerationResult) -> GenerationResult:
        """The engine's result with the text. If the answer was cut, so are the result's tokens."""
        text = "".join(self._pieces)
        if not self.is_cut:
            return dataclasses.replace(result, text=text)
        # The last token is the one that completed the stop string or the last tool call, even if the engine has
        # generated more.
        return dataclasses.replace(
            result,
            text=text,
            tokens=result.tokens[: self.num_tokens],
            num_tokens=None if result.num_tokens is None else self.num_tokens,
            logprobs=None if result.logprobs is None else result.logprobs[: self.num_tokens],
            state=RequestState.COMPLETED,
            finish_reason=FinishReason.STOP,
            stop_string=None if self._stop is None else self._stop.found,
            error=None,
        )
