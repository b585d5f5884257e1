"""From what a request asks to what the engine takes: prompts become tokens, forms grammars, both tried out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from weft.request import InferenceRequest
from weft.server.admission.keys import ApiKey
from weft.server.api import structured
from weft.server.api.openai import Echo, Form, Shape
from weft.server.api.requests import check_completion, inference_request, prompts_of, sampling_params
from weft.server.api.schema import ChatRequest, CompletionRequest, TokenizeRequest
from weft.server.api.tool_use import NO_TOOLS, ToolUse, tool_use
from weft.server.errors import ApiError, renamed
from weft.server.settings import ServerSettings
from weft.server.text_work.grammar_check import GrammarChecker
from weft.server.text_work.prompt_tokens import PromptEncoder
from weft.server.text_work.text_process import Chat, Text
from weft.text.answer_reader import AnswerSyntax
from weft.text.model_text import ModelText

_SMALL_BYTES = 16 << 10
"""In a body of this size all schemas together take a few milliseconds."""
_MAX_DETOKENIZED = 1 << 18

T = TypeVar("T")


@dataclass(frozen=True)
class Prepared:
    """A request that is ready for the engine."""

    requests: list[InferenceRequest]
    shape: Shape
    answer_form: AnswerSyntax | None
    is_streamed: bool
    include_usage: bool


class Preparer:
    """Owns the processes that tokenise long prompts and try out grammars. Belongs to one event loop."""

    def __init__(
        self,
        settings: ServerSettings,
        text: ModelText,
        suggestions: Mapping[str, Any],
        max_context: int,
        vocabulary_size: int,
    ) -> None:
        self._encoder = PromptEncoder(text, settings.model, max_context, settings.chat_template)
        self._grammars = GrammarChecker(settings.model, vocabulary_size)
        self._text = text
        self._suggestions = suggestions
        self._name = settings.names[0]
        self._max_answers = settings.max_answers
        _ = text.tool_format  # found by rendering: a few milliseconds, which no request should wait for

    async def close(self) -> None:
        await self._encoder.close()
        await self._grammars.close()

    async def prepare(
        self,
        asked: ChatRequest | CompletionRequest,
        size: int,
        request_id: str,
        key: ApiKey | None,
        asker: str,
    ) -> Prepared:
        """What is asked with a body of `size` bytes, with this key. Raises what is wrong with it. Work beside the event
        loop is shared out between askers."""
        params = sampling_params(asked, self._suggestions)
        grammar = await self._beside_if_large(size, asker, structured.grammar_of, asked)
        if grammar is not None:
            grammar = await self._grammars.check(grammar, asker)
        form: Form
        echoes: list[Echo] = []
        tools = NO_TOOLS
        answer_form = None
        if isinstance(asked, ChatRequest):
            tools = await self._beside_if_large(size, asker, tool_use, asked)
            form, prompts = "chat", [await self._encoder.encode(_chat_prompt(asked, tools), size, asker)]
            answer_form = tools.answer_form(self._text, prompts[0])
            written = await self._beside_if_large(
                size, asker, tools.grammar, grammar, answer_form, self._text
            )
            if written is not None and written is not grammar:
                # What the answer must look like was found good already: an error is one of the tools.
                with renamed({"grammar": "tools"} if tools.tools else {}):
                    grammar = await self._grammars.check(written, asker)
        else:
            form = "completion"
            check_completion(asked)
            texts = prompts_of(asked, self._max_answers)
            encoded = iter(
                await self._encoder.encode_texts([one for one in texts if isinstance(one, str)], asker)
            )
            prompts = [
                next(encoded) if isinstance(one, str) else self._encoder.check_tokens(one) for one in texts
            ]
            if asked.echo:
                decoded = iter(
                    await self._encoder.decode([one for one in texts if not isinstance(one, str)], asker)
                )
                echoes = [
                    Echo(one if isinstance(one, str) else next(decoded), tokens)
                    for one, tokens in zip(texts, prompts, strict=True)
                ]
        if grammar is not None:
            params = replace(params, grammar=grammar)
        shape = Shape(
            form,
            self._name,
            self._text.tokenizer,
            wants_logprobs=params.logprobs is not None,
            num_choices_per_prompt=params.n,
            echoes=echoes,
            request_id=request_id,
            has_parts=answer_form is not None,
            is_named_call=tools.is_named,
        )
        options = asked.stream_options
        return Prepared(
            [inference_request(asked, prompt, params, key) for prompt in prompts],
            shape,
            answer_form,
            asked.stream,
            options is not None and bool(options.include_usage),
        )

    async def tokens(self, asked: TokenizeRequest, size: int, asker: str) -> list[int]:
        """The tokens of the prompt that a completion or a chat would have."""
        if (asked.prompt is None) == (asked.messages is None):
            raise ApiError(400, "send either prompt or messages", param="prompt", code="invalid_value")
        prompt = _chat_prompt(asked) if asked.prompt is None else Text(asked.prompt, asked.add_special_tokens)
        return await self._encoder.encode(prompt, size, asker)

    async def text(self, tokens: list[int], asker: str) -> str:
        """The text of tokens, control tokens too. Raises what is wrong with them."""
        if len(tokens) > _MAX_DETOKENIZED:
            message = f"tokens has {len(tokens)} entries; allowed: {_MAX_DETOKENIZED}"
            raise ApiError(400, message, param="tokens", code="invalid_value")
        last = self._text.tokenizer.vocabulary_size - 1
        for token in (min(tokens), max(tokens)) if tokens else ():
            if not 0 <= token <= last:
                message = f"tokens holds {token}; allowed: 0 to {last}"
                raise ApiError(400, message, param="tokens", code="invalid_value")
        [text] = await self._encoder.decode([tokens], asker)
        return text

    async def _beside_if_large(self, size: int, asker: str, work: Callable[..., T], *arguments: Any) -> T:
        """What `work` returns: at once for a small body, else from a thread."""
        if size <= _SMALL_BYTES:
            return work(*arguments)
        return await self._encoder.beside(size, asker, work, *arguments)


def as_asked(asked: ChatRequest | CompletionRequest) -> AbstractContextManager[None]:
    """Errors of the engine name the fields of its own request; the client knows those it sent."""
    names = {"grammar": structured.param_of(asked)}
    if isinstance(asked, ChatRequest):
        names["prompt"] = "messages"
        if asked.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        if asked.top_logprobs is not None:
            names["logprobs"] = "top_logprobs"
    return renamed(names)


def _chat_prompt(asked: ChatRequest | TokenizeRequest, tools: ToolUse | None = None) -> Chat:
    return Chat(
        asked.messages or [],
        (asked.tools if tools is None else tools.told) or None,
        asked.documents if isinstance(asked, ChatRequest) else None,
        asked.chat_template_kwargs,
        asked.add_generation_prompt and not asked.continue_final_message,
        asked.continue_final_message,
    )
