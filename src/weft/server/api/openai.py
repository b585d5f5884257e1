"""The objects of the OpenAI API that go out: whole answers, chunks of streams, usage, logprobs."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from weft.request import GenerationResult, TokenLogprobs
from weft.server.stream.choices import Choice, Choices, Piece
from weft.text.answer_parts import AnswerParts, Call, CallBegins, Content, Delta, Thought
from weft.text.detokenizer import Detokenizer
from weft.text.tokenizer import Tokenizer

ApiFormat = Literal["chat", "completion"]


@dataclass(frozen=True)
class Echo:
    """A prompt that is repeated before its answers."""

    text: str = ""
    tokens: Sequence[int] = ()


_NO_ECHO = Echo()


class TokenOffsets:
    """Where in the text of one answer each token begins, also while some of the text is held back."""

    def __init__(self, tokenizer: Tokenizer, offset: int = 0) -> None:
        self._text = Detokenizer(tokenizer, skip_control=False)
        self.offset = offset

    def add(self, token: int) -> int:
        offset = self.offset
        self.offset += len(self._text.add(token))
        return offset


@dataclass(frozen=True)
class ResponseBuilder:
    """What all that is said about one request has in common."""

    api_format: ApiFormat
    model: str
    tokenizer: Tokenizer
    wants_logprobs: bool = False
    num_choices_per_prompt: int = 1
    echoes: Sequence[Echo] = ()
    """For each prompt, where it is to be repeated before its answers."""
    has_parts: bool = False
    """An answer may be more than text: thoughts, calls."""
    is_named_call: bool = False
    """The request named the tool to call. OpenAI calls the end of that a stop, and clients expect it."""
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def id(self) -> str:
        return f"{'chatcmpl' if self.api_format == 'chat' else 'cmpl'}-{self.request_id}"

    def response(self, choice_objects: list[dict[str, Any]], choices: Choices) -> dict[str, Any]:
        """The whole answer of a request that was not streamed; `said` is what `choice` makes of each of its answers."""
        return {
            "id": self.id,
            "object": "chat.completion" if self.api_format == "chat" else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choice_objects,
            "usage": self.usage(choices),
        }

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "chat.completion.chunk" if self.api_format == "chat" else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **more,
        }

    def opening(self, index: int) -> dict[str, Any]:
        """The first chunk of a chat's answer, which says who speaks."""
        # Clients add contents up, and there is none beside a call.
        delta = {"role": "assistant", "content": None if self.has_parts else ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def pieces(self, piece: Piece, offsets: TokenOffsets) -> list[dict[str, Any]]:
        """What was added; `offsets` are those of its answer."""
        if piece.deltas is None:
            is_worth_it = piece.text or (self.wants_logprobs and piece.tokens)
            return [self._piece(piece, offsets)] if is_worth_it else []
        events: list[dict[str, Any]] = [
            {"index": piece.choice.index, "delta": _delta(delta), "logprobs": None, "finish_reason": None}
            for delta in piece.deltas
        ]
        if self.wants_logprobs and piece.tokens:
            # Of all tokens, those of thoughts and calls too; the first event of several takes them along.
            if not events:
                events = [{"index": piece.choice.index, "delta": {}, "logprobs": None, "finish_reason": None}]
            events[0]["logprobs"] = self.logprobs(piece.tokens, piece.logprobs, offsets)
        return events

    def _piece(self, piece: Piece, offsets: TokenOffsets) -> dict[str, Any]:
        logprobs = None
        if self.wants_logprobs and piece.tokens:
            logprobs = self.logprobs(piece.tokens, piece.logprobs, offsets)
        return self.text(piece.choice.index, piece.text, logprobs)

    def text(self, index: int, text: str, logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
        """A chunk of an answer that is all text."""
        content: dict[str, Any] = (
            {"delta": {"content": text}} if self.api_format == "chat" else {"text": text}
        )
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": None}

    def closing(self, choice: Choice, result: GenerationResult) -> dict[str, Any]:
        """The last chunk of an answer, which says why it ended."""
        return {
            "index": choice.index,
            **({"delta": {}} if self.api_format == "chat" else {"text": ""}),
            "logprobs": None,
            "finish_reason": self._finish_reason(result, choice.has_calls),
            "timings": _timings(result),
        }

    def usage(self, choices: Choices) -> dict[str, Any]:
        """Over all answers; a prompt counts once, however many answers it has."""
        results = choices.results
        details: dict[str, Any] = {}
        if self.has_parts:
            details["completion_tokens_details"] = {"reasoning_tokens": choices.num_reasoning_tokens}
        firsts = results[:: self.num_choices_per_prompt]
        prompt = sum(result.prompt_token_count for result in firsts)
        completion = sum(result.completion_token_count for result in results)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(result.cached_token_count for result in firsts)},
            **details,
        }

    def echo(self, index: int) -> Echo:
        """What stands before an answer."""
        return self.echoes[index // self.num_choices_per_prompt] if self.echoes else _NO_ECHO

    def _finish_reason(self, result: GenerationResult, has_calls: bool) -> str:
        reason = result.finish_reason.in_openai
        is_call = has_calls and not self.is_named_call
        return "tool_calls" if is_call and reason == "stop" else reason

    def choice(self, index: int, result: GenerationResult, answer: str | AnswerParts) -> dict[str, Any]:
        """One answer of several, but for its logprobs."""
        content: dict[str, Any] = {"message": _message(answer)}
        if isinstance(answer, str) and self.api_format == "completion":
            content = {"text": self.echo(index).text + answer}
        return {
            "index": index,
            **content,
            "logprobs": None,
            "finish_reason": self._finish_reason(result, not isinstance(answer, str) and bool(answer.calls)),
            "timings": _timings(result),
        }

    def logprobs(
        self, tokens: Sequence[int], token_logprobs: Sequence[TokenLogprobs | None], offsets: TokenOffsets
    ) -> dict[str, list[Any]]:
        if self.api_format == "chat":
            return {"content": [self._entry(*pair) for pair in zip(tokens, token_logprobs, strict=True)]}
        return self._completion_logprobs(tokens, token_logprobs, offsets)

    def _entry(self, token: int, logprobs: TokenLogprobs | None) -> dict[str, Any]:
        assert logprobs is not None, (
            "only a prompt begins with a token without logprobs, and no chat repeats it"
        )
        return {
            **self._token_entry(token, logprobs.logprob),
            "top_logprobs": [self._token_entry(*other) for other in logprobs.top],
        }

    def _token_entry(self, token: int, logprob: float) -> dict[str, Any]:
        content = self.tokenizer.token_bytes(token)
        return {"token": content.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(content)}

    def _completion_logprobs(
        self, tokens: Sequence[int], token_logprobs: Sequence[TokenLogprobs | None], offsets: TokenOffsets
    ) -> dict[str, list[Any]]:
        """The older form: parallel lists, and where in the text each token begins."""
        names = [self._name(token) for token in tokens]
        return {
            "tokens": names,
            "token_logprobs": [None if one is None else one.logprob for one in token_logprobs],
            "top_logprobs": [
                None
                if one is None
                # The token that was chosen is always among them.
                else {**{self._name(other): value for other, value in one.top}, name: one.logprob}
                for name, one in zip(names, token_logprobs, strict=True)
            ],
            "text_offset": [offsets.add(token) for token in tokens],
        }

    def _name(self, token: int) -> str:
        """A token as a key: half a character is written as its bytes, since all halves would look alike."""
        content = self.tokenizer.token_bytes(token)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def _message(answer: str | AnswerParts) -> dict[str, Any]:
    if isinstance(answer, str):
        return {"role": "assistant", "content": answer, "refusal": None}
    message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["content"] = answer.content or None
        message["tool_calls"] = [_call(call) for call in answer.calls]
    return message


def _call(call: Call) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _delta(delta: Delta) -> dict[str, Any]:
    if isinstance(delta, Content):
        return {"content": delta.text}
    if isinstance(delta, Thought):
        return {"reasoning_content": delta.text}
    if isinstance(delta, CallBegins):
        return {"tool_calls": [{"index": delta.index, **_call(Call(delta.id, delta.name))}]}
    return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.text}}]}


def _timings(result: GenerationResult) -> dict[str, Any]:
    """Seconds in each phase; weft's own addition to the API."""
    return {
        "queue": result.waiting_time,
        "prefill": result.prefill_time,
        "decode": result.decode_time,
        "preemptions": result.preemptions,
    }
