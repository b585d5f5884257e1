"""The format of `/v1/completions`: prompts in, their continuations out. With `echo`, a prompt precedes its answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec import UNSET, UnsetType

from weft.request import TokenLogprobs
from weft.server.api import structured
from weft.server.api.answer_format import (
    GENERATING,
    AnswerContext,
    AnswerWriter,
    Echo,
    Operation,
    ParsedRequest,
    Prompt,
    ServedModel,
)
from weft.server.api.field_docs import Field
from weft.server.api.openai import EVENT_NOTE, OpenAIFormat, OpenAIWriter, includes_usage, parsed_request
from weft.server.api.requests import sampling_params
from weft.server.api.response_shapes import FinishReason, Shape, Timings, Usage
from weft.server.api.schema import GenerationRequest
from weft.server.errors import refusal
from weft.server.stream.loop_turns import LoopTurns
from weft.text.answer_parts import AnswerParts
from weft.text.detokenizer import Detokenizer
from weft.text.tokenizer import Tokenizer

_DEFAULT_MAX_TOKENS = 16
_NO_ECHO = Echo()

# ---------------------------------------------------------------------- the types of requests and responses


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    prompt: str | list[Any]
    logprobs: int | None = None
    echo: bool = False
    suffix: str = ""
    best_of: int | None = None


class CompletionLogprobs(Shape):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Shape):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    timings: Timings | UnsetType = UNSET


class Completion(Shape):
    """A completion, or one event of a completion stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class CompletionFormat(OpenAIFormat[CompletionRequest]):
    request_type = CompletionRequest
    operation_name = "text_completion"
    operation = Operation(
        "Text completion",
        "The model continues the prompt. No chat template is applied.",
        "Generating",
        Completion,
        CompletionRequest,
        Completion,
        {
            "Text": {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0},
            "Token ids": {"prompt": [504, 3575, 282], "max_tokens": 8},
            "Several prompts": {"prompt": ["One, two,", "Red, green,"], "n": 2, "max_tokens": 8},
            "Score a text": {"prompt": "Hello", "max_tokens": 1, "echo": True, "logprobs": 1},
        },
        GENERATING,
        event_note=EVENT_NOTE,
    )
    fields: Mapping[str, Field] = {
        "echo": Field("Repeat the prompt before its answer."),
        "suffix": Field("Not supported: weft only continues a prompt."),
        "best_of": Field("Accepted only if equal to n: all answers are returned."),
    }

    def parse(self, api_request: CompletionRequest, model: ServedModel) -> ParsedRequest:
        params = sampling_params(
            api_request,
            model.generation_defaults,
            default_max_tokens=_DEFAULT_MAX_TOKENS,
            logprobs=api_request.logprobs,
            prompt_logprobs=api_request.logprobs if api_request.echo else None,
        )
        grammar = structured.requested_grammar(api_request)
        _check(api_request)
        prompts = _prompts(api_request, model.max_answers)
        return parsed_request(api_request, prompts, params, grammar, echoes_prompts=api_request.echo)

    def writer(self, api_request: CompletionRequest, context: AnswerContext) -> AnswerWriter:
        return CompletionWriter(context, include_usage=includes_usage(api_request))


def _check(api_request: CompletionRequest) -> None:
    """Refuses fields of completions that weft does not support."""
    if api_request.suffix:
        raise refusal(
            "suffix is not supported: weft only continues a prompt; leave it out", "suffix", "unsupported"
        )
    if api_request.best_of not in (None, api_request.n or 1):
        raise refusal(
            f"best_of is {api_request.best_of} and n is {api_request.n or 1}; "
            "allowed: the same value, since all answers are returned",
            "best_of",
            "unsupported",
        )
    if api_request.echo and api_request.stream and api_request.logprobs is not None:
        raise refusal(
            "echo with logprobs cannot be streamed: the logprobs of the prompt are known at the end; leave out stream",
            "echo",
            "unsupported",
        )


def _prompts(api_request: CompletionRequest, max_answers: int) -> list[Prompt]:
    """The prompts of a completion. A prompt is text or a list of token ids; the field may be a list of prompts."""
    prompt = api_request.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise refusal("prompt is empty; send text, or at least one token", "prompt")
    if _are_tokens(prompt):
        _check_ids(prompt, "prompt")
        return [prompt]
    if len(prompt) * (api_request.n or 1) > max_answers:
        raise refusal(
            f"prompt has {len(prompt)} entries and n is {api_request.n or 1}; "
            f"allowed: {max_answers} answers in one request",
            "prompt",
        )
    for index, one in enumerate(prompt):
        if isinstance(one, list) and _are_tokens(one):
            _check_ids(one, f"prompt[{index}]")
        elif not isinstance(one, str):
            raise refusal(
                f"prompt[{index}] is neither text nor a list of token ids", f"prompt[{index}]", "invalid_type"
            )
    return list(prompt)


def _are_tokens(prompt: list[Any]) -> bool:
    # A Python loop over 250,000 ids would block the event loop.
    return set(map(type, prompt)) <= {int}


def _check_ids(tokens: Sequence[int], param: str) -> None:
    """Refuses ids that do not fit a message to the engine. The engine checks ids against the vocabulary."""
    for token in (min(tokens), max(tokens)) if tokens else ():
        if not 0 <= token < 2**31:
            raise refusal(f"{param} holds {token!r:.80}; allowed: token ids", param)


class TokenOffsets:
    """The offset of each token in the text of one answer. The offsets include text that is not sent yet because it may
    begin a stop string."""

    def __init__(self, tokenizer: Tokenizer, offset: int = 0) -> None:
        self._text = Detokenizer(tokenizer, skip_control=False)
        self.offset = offset

    def add(self, token: int) -> int:
        offset = self.offset
        self.offset += len(self._text.add(token))
        return offset


class CompletionWriter(OpenAIWriter):
    id_prefix = "cmpl"
    answer_object = chunk_object = "text_completion"
    smallest_entry = 16

    def __init__(self, context: AnswerContext, *, include_usage: bool = False) -> None:
        super().__init__(context, include_usage=include_usage)
        self._starts: Sequence[int] = ()
        """For each prompt that is echoed with logprobs: the length of its text. Its answers begin there."""
        self._offsets: dict[int, TokenOffsets] = {}
        """Answer -> the offsets of its tokens. Only answers with logprobs need them."""
        self._prompt_offsets = TokenOffsets(context.tokenizer)

    def opening(self, index: int) -> bytes:
        echo = self._echo(index)
        return self.text_event(index, echo.text) if echo.text else b""

    def text(self, index: int, text: str, logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}

    def content(self, index: int, answer: str | AnswerParts) -> dict[str, Any]:
        assert isinstance(answer, str), "a completion is plain text"
        return {"text": self._echo(index).text + answer}

    async def before_answers(self, loop_turns: LoopTurns) -> None:
        if self.context.wants_logprobs:
            self._starts = [await self._text_length(echo.tokens, loop_turns) for echo in self.context.echoes]

    async def _text_length(self, tokens: Sequence[int], loop_turns: LoopTurns) -> int:
        """The length of the prompt's text, with control tokens. Waits for a turn before each 512 tokens."""
        offsets = TokenOffsets(self.context.tokenizer)
        for start in range(0, len(tokens), 512):
            await loop_turns.wait()
            for token in tokens[start : start + 512]:
                offsets.add(token)
        return offsets.offset

    def logprobs(
        self, index: int, tokens: Sequence[int], token_logprobs: Sequence[TokenLogprobs | None]
    ) -> dict[str, list[Any]]:
        offsets = self._offsets.get(index)
        if offsets is None:
            start = self._starts[index // self.context.num_choices_per_prompt] if self._starts else 0
            offsets = self._offsets[index] = TokenOffsets(self.context.tokenizer, start)
        return self._lists(tokens, token_logprobs, offsets)

    def prompt_logprobs(
        self, index: int, start: int, token_logprobs: Sequence[TokenLogprobs | None]
    ) -> dict[str, list[Any]]:
        if start == 0:
            self._prompt_offsets = TokenOffsets(self.context.tokenizer)
        tokens = self._echo(index).tokens[start : start + len(token_logprobs)]
        return self._lists(tokens, token_logprobs, self._prompt_offsets)

    def _echo(self, index: int) -> Echo:
        """The prompt that is repeated before an answer."""
        echoes = self.context.echoes
        return echoes[index // self.context.num_choices_per_prompt] if echoes else _NO_ECHO

    def _lists(
        self, tokens: Sequence[int], token_logprobs: Sequence[TokenLogprobs | None], offsets: TokenOffsets
    ) -> dict[str, list[Any]]:
        """Parallel lists, with the text offset of each token."""
        names = [self._name(token) for token in tokens]
        return {
            "tokens": names,
            "token_logprobs": [None if one is None else one.logprob for one in token_logprobs],
            "top_logprobs": [
                None
                if one is None
                # The token itself is always included, even if it is not among the top ones.
                else {**{self._name(other): value for other, value in one.top}, name: one.logprob}
                for name, one in zip(names, token_logprobs, strict=True)
            ],
            "text_offset": [offsets.add(token) for token in tokens],
        }

    def _name(self, token: int) -> str:
        """A token as a dictionary key. Incomplete UTF-8 is written as bytes: all such tokens would
        decode to the same text."""
        content = self.context.tokenizer.token_bytes(token)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)
