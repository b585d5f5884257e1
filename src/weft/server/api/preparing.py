"""Prepares a request for the engine: tokenises prompts, and builds and checks grammars."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from weft.request import InferenceRequest, RequestId
from weft.server.admission.keys import ApiKey
from weft.server.api import structured
from weft.server.api.openai import ApiFormat, Echo, ResponseBuilder
from weft.server.api.requests import check_completion, inference_request, prompts_of, sampling_params
from weft.server.api.schema import ChatRequest, CompletionRequest, TokenizeRequest
from weft.server.api.tool_use import NO_TOOLS, ToolUse, tool_use
from weft.server.errors import ApiError, renamed_fields
from weft.server.settings import ServerSettings
from weft.server.text_work.grammar_check import GrammarChecker
from weft.server.text_work.prompt_tokens import PromptEncoder
from weft.server.text_work.text_process import Chat, Text
from weft.text.answer_reader import AnswerSyntax
from weft.text.model_text import ModelText

_SMALL_BYTES = 16 << 10
"""The schemas in a body of up to this size take a few milliseconds."""
_MAX_DETOKENIZED = 1 << 18

T = TypeVar("T")


@dataclass(frozen=True)
class Prepared:
    """A request that is ready for the engine."""

    requests: list[InferenceRequest]
    builder: ResponseBuilder
    answer_form: AnswerSyntax | None
    is_streamed: bool
    include_usage: bool


class Preparer:
    """Owns the worker processes that tokenise long prompts and check grammars. Belongs to one event loop."""

    def __init__(
        self,
        settings: ServerSettings,
        text: ModelText,
        generation_defaults: Mapping[str, Any],
        max_context: int,
        vocabulary_size: int,
    ) -> None:
        self._encoder = PromptEncoder(text, settings.model, max_context, settings.chat_template)
        self._grammars = GrammarChecker(settings.model, vocabulary_size)
        self._text = text
        self._generation_defaults = generation_defaults
        self._name = settings.names[0]
        self._max_answers = settings.max_answers
        _ = text.tool_format  # detected now by rendering the template, so that no request waits for it

    async def close(self) -> None:
        await self._encoder.close()
        await self._grammars.close()

    async def prepare(
        self,
        api_request: ChatRequest | CompletionRequest,
        size: int,
        request_id: RequestId,
        key: ApiKey | None,
        client_id: str,
    ) -> Prepared:
        """Prepares a request with a body of `size` bytes. Raises if it is invalid. Text work is shared fairly between
        clients, by `client_id`."""
        params = sampling_params(api_request, self._generation_defaults)
        grammar = await self._run_in_thread_if_large(
            size, client_id, structured.requested_grammar, api_request
        )
        if grammar is not None:
            grammar = await self._grammars.check(grammar, client_id)
        api_format: ApiFormat
        echoes: list[Echo] = []
        tools = NO_TOOLS
        answer_form = None
        if isinstance(api_request, ChatRequest):
            tools = await self._run_in_thread_if_large(size, client_id, tool_use, api_request)
            api_format = "chat"
            prompts = [await self._encoder.encode(_chat_prompt(api_request, tools), size, client_id)]
            answer_form = tools.answer_form(self._text, prompts[0])
            written = await self._run_in_thread_if_large(
                size, client_id, tools.grammar, grammar, answer_form, self._text
            )
            if written is not None and written is not grammar:
                # The grammar of the answer was checked above, so an error here is caused by the tools.
                with renamed_fields({"grammar": "tools"} if tools.tools else {}):
                    grammar = await self._grammars.check(written, client_id)
        else:
            api_format = "completion"
            check_completion(api_request)
            texts = prompts_of(api_request, self._max_answers)
            encoded = iter(
                await self._encoder.encode_texts([one for one in texts if isinstance(one, str)], client_id)
            )
            prompts = [
                next(encoded) if isinstance(one, str) else self._encoder.check_tokens(one) for one in texts
            ]
            if api_request.echo:
                decoded = iter(
                    await self._encoder.decode([one for one in texts if not isinstance(one, str)], client_id)
                )
                echoes = [
                    Echo(one if isinstance(one, str) else next(decoded), tokens)
                    for one, tokens in zip(texts, prompts, strict=True)
                ]
        if grammar is not None:
            params = replace(params, grammar=grammar)
        builder = ResponseBuilder(
            api_format,
            self._name,
            self._text.tokenizer,
            wants_logprobs=params.logprobs is not None,
            num_choices_per_prompt=params.n,
            echoes=echoes,
            request_id=request_id,
            has_parts=answer_form is not None,
            is_named_call=tools.is_named,
        )
        options = api_request.stream_options
        return Prepared(
            [
                inference_request(
                    api_request, prompt, params, key, _prompt_id(request_id, index, len(prompts))
                )
                for index, prompt in enumerate(prompts)
            ],
            builder,
            answer_form,
            api_request.stream,
            options is not None and bool(options.include_usage),
        )

    async def tokens(self, api_request: TokenizeRequest, size: int, client_id: str) -> list[int]:
        """The prompt tokens that a completion or a chat with these fields would have."""
        if (api_request.prompt is None) == (api_request.messages is None):
            raise ApiError(
                400, "send either prompt or messages, not both", param="prompt", code="invalid_value"
            )
        prompt = (
            _chat_prompt(api_request)
            if api_request.prompt is None
            else Text(api_request.prompt, api_request.add_special_tokens)
        )
        return await self._encoder.encode(prompt, size, client_id)

    async def text(self, tokens: list[int], client_id: str) -> str:
        """The text of tokens, with control tokens. Raises ApiError for invalid tokens."""
        if len(tokens) > _MAX_DETOKENIZED:
            message = f"tokens has {len(tokens)} entries; allowed: {_MAX_DETOKENIZED}"
            raise ApiError(400, message, param="tokens", code="invalid_value")
        last = self._text.tokenizer.vocabulary_size - 1
        for token in (min(tokens), max(tokens)) if tokens else ():
            if not 0 <= token <= last:
                message = f"tokens holds {token}; allowed: 0 to {last}"
                raise ApiError(400, message, param="tokens", code="invalid_value")
        [text] = await self._encoder.decode([tokens], client_id)
        return text

    async def _run_in_thread_if_large(
        self, size: int, client_id: str, work: Callable[..., T], *arguments: Any
    ) -> T:
        """Runs `work` here for a small body, else in a thread."""
        if size <= _SMALL_BYTES:
            return work(*arguments)
        return await self._encoder.run_in_thread(size, client_id, work, *arguments)


def _prompt_id(request_id: RequestId, index: int, num_prompts: int) -> RequestId:
    """The id of one prompt: the id of the request, and with several prompts the index."""
    return request_id if num_prompts == 1 else RequestId(f"{request_id}-{index}")


def client_field_names(api_request: ChatRequest | CompletionRequest) -> AbstractContextManager[None]:
    """Translates field names of `InferenceRequest` in errors to the fields that the client sent."""
    names = {"grammar": structured.grammar_param(api_request)}
    if isinstance(api_request, ChatRequest):
        names["prompt"] = "messages"
        if api_request.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        if api_request.top_logprobs is not None:
            names["logprobs"] = "top_logprobs"
    return renamed_fields(names)


def _chat_prompt(api_request: ChatRequest | TokenizeRequest, tools: ToolUse | None = None) -> Chat:
    return Chat(
        api_request.messages or [],
        (api_request.tools if tools is None else tools.template_tools) or None,
        api_request.documents if isinstance(api_request, ChatRequest) else None,
        api_request.chat_template_kwargs,
        api_request.add_generation_prompt and not api_request.continue_final_message,
        api_request.continue_final_message,
    )
