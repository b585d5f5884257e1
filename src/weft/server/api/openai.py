"""Builds the response objects of the OpenAI API: whole responses, chunks of streams, usage, logprobs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from weft.request import GenerationResult, TokenLogprobs
from weft.server.stream.choices import Choice, Choices, Piece
from weft.text.answer_parts import AnswerParts, Content, Delta, ParsedCall, Reasoning, ToolCallStart
from weft.text.detokenizer import Detokenizer
from weft.text.tokenizer import Tokenizer

ApiFormat = Literal["chat", "completion"]


@dataclass(frozen=True)
class Echo:
    """A prompt that is repeated before its answers (`echo`)."""

    text: str = ""
    tokens: Sequence[int] = ()


_NO_ECHO = Echo()


class TokenOffsets:
    """The offset of each token in the text of one answer. Correct also while the end of the text is held back."""

    def __init__(self, tokenizer: Tokenizer, offset: int = 0) -> None:
        self._text = Detokenizer(tokenizer, skip_control=False)
        self.offset = offset

    def add(self, token: int) -> int:
        offset = self.offset
        self.offset += len(self._text.add(token))
        return offset


@dataclass(frozen=True)
class ResponseBuilder:
    """Builds the response objects of one request."""

    api_format: ApiFormat
    model: str
    tokenizer: Tokenizer
    wants_logprobs: bool = False
    num_choices_per_prompt: int = 1
    echoes: Sequence[Echo] = ()
    """One entry per prompt if prompts are echoed, else empty."""
    has_parts: bool = False
    """Answers may have thoughts or tool calls besides content."""
    is_named_call: bool = False
    """tool_choice names a function. The finish reason is then "stop", as in the OpenAI API."""
    request_id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def id(self) -> str:
        return f"{'chatcmpl' if self.api_format == 'chat' else 'cmpl'}-{self.request_id}"

    def response(self, choice_objects: list[dict[str, Any]], choices: Choices) -> dict[str, Any]:
        """The response of a request that is not streamed; `choice` makes each of `choice_objects`."""
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
        """The first chunk of a chat answer, with the role."""
        # Clients concatenate contents. None, since an answer with tool calls may have no content.
        delta = {"role": "assistant", "content": None if self.has_parts else ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def pieces(self, piece: Piece, offsets: TokenOffsets) -> list[dict[str, Any]]:
        """The choice objects for a piece; `offsets` are those of its answer."""
        if piece.deltas is None:
            has_content = piece.text or (self.wants_logprobs and piece.tokens)
            return [self._piece(piece, offsets)] if has_content else []
        events: list[dict[str, Any]] = [
            {"index": piece.choice.index, "delta": _delta(delta), "logprobs": None, "finish_reason": None}
            for delta in piece.deltas
        ]
        if self.wants_logprobs and piece.tokens:
            # The logprobs of all tokens, also of thoughts and tool calls, are in the first event.
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
        """The choice object of a chunk with text only."""
        content: dict[str, Any] = (
            {"delta": {"content": text}} if self.api_format == "chat" else {"text": text}
        )
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": None}

    def closing(self, choice: Choice, result: GenerationResult) -> dict[str, Any]:
        """The last chunk of an answer, with the finish reason."""
        return {
            "index": choice.index,
            **({"delta": {}} if self.api_format == "chat" else {"text": ""}),
            "logprobs": None,
            "finish_reason": self._finish_reason(result, choice.has_calls),
            "timings": _timings(result),
        }

    def usage(self, choices: Choices) -> dict[str, Any]:
        """The usage of all answers. A prompt counts once for all its answers."""
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
        """The prompt that is repeated before an answer."""
        return self.echoes[index // self.num_choices_per_prompt] if self.echoes else _NO_ECHO

    def _finish_reason(self, result: GenerationResult, has_calls: bool) -> str:
        reason = result.finish_reason.in_openai
        is_call = has_calls and not self.is_named_call
        return "tool_calls" if is_call and reason == "stop" else reason

    def choice(self, index: int, result: GenerationResult, answer: str | AnswerParts) -> dict[str, Any]:
        """The choice object of one answer, without its logprobs."""
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
            "only the first token of an echoed prompt has no logprobs, and chats have no echo"
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
        """The format of completions: parallel lists, with the text offset of each token."""
        names = [self._name(token) for token in tokens]
        return {
            "tokens": names,
            "token_logprobs": [None if one is None else one.logprob for one in token_logprobs],
            "top_logprobs": [
                None
                if one is None
                # The sampled token is always included.
                else {**{self._name(other): value for other, value in one.top}, name: one.logprob}
                for name, one in zip(names, token_logprobs, strict=True)
            ],
            "text_offset": [offsets.add(token) for token in tokens],
        }

    def _name(self, token: int) -> str:
        """A token as a dictionary key. Incomplete UTF-8 is written as bytes: decoded, all such tokens would be
        equal."""
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


def _call(call: ParsedCall) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _delta(delta: Delta) -> dict[str, Any]:
    if isinstance(delta, Content):
        return {"content": delta.text}
    if isinstance(delta, Reasoning):
        return {"reasoning_content": delta.text}
    if isinstance(delta, ToolCallStart):
        return {"tool_calls": [{"index": delta.index, **_call(ParsedCall(delta.id, delta.name))}]}
    return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.text}}]}


def _timings(result: GenerationResult) -> dict[str, Any]:
    """Seconds in each phase; an extension of weft."""
    return {
        "queue": result.waiting_time,
        "prefill": result.prefill_time,
        "decode": result.decode_time,
        "preemptions": result.preemptions,
    }
