"""Prepares a request for the engine: tokenises prompts, and builds and checks grammars."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from zlib import crc32

from weft.errors import InvalidRequestError, PromptTooLongError
from weft.request import Grammar, InferenceRequest, RequestId
from weft.server.admission.keys import ApiKey
from weft.server.api.answer_format import (
    AnswerContext,
    AnswerFormat,
    AnswerWriter,
    B,
    Echo,
    ParsedRequest,
    Prompt,
    ServedModel,
)
from weft.server.api.requests import inference_request
from weft.server.api.schema import TokenizeRequest
from weft.server.api.tool_use import ToolUse
from weft.server.errors import refusal, renamed_fields
from weft.server.settings import ServerSettings
from weft.server.text_work.grammar_check import GrammarChecker
from weft.server.text_work.prompt_tokens import PromptEncoder
from weft.server.text_work.text_process import Chat, Text
from weft.text.answer_reader import AnswerSyntax
from weft.text.conversation import (
    Conversation,
    from_start,
    starts_of_rest,
    template_messages,
    text_of_kind,
)
from weft.text.model_text import ModelText

_SMALL_BYTES = 16 << 10
"""Parsing the schemas in a body of up to this size takes a few milliseconds, so it runs in the event loop."""
_MAX_DETOKENIZED = 1 << 18
_TOKENS_OF_KIND = 16
"""Prompts that are no conversations are of one kind if their first tokens, up to this many, are the same."""
_ANSWER_ROOM = 512
"""If the oldest items of a conversation are left out, this many tokens of room remain for an answer without max_tokens."""

T = TypeVar("T")


@dataclass(frozen=True)
class Prepared:
    """A request that is ready for the engine."""

    requests: list[InferenceRequest]
    writer: AnswerWriter
    answer_form: AnswerSyntax | None
    is_streamed: bool
    kind: tuple[int, int] = (0, 0)
    """Hashes of the instructions (or of the beginning of the prompt) and of the names of the tools. Answers to requests of
    one kind may have similar lengths."""


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
        self._model = ServedModel(
            settings.names[0],
            text.tokenizer,
            generation_defaults,
            settings.max_answers,
            text.chat_template is not None,
            text.reasoning is not None,
        )
        engine = settings.engine
        self._cached_block = engine.cache.block_size if engine.scheduler.prefix_caching else None
        """Tokens of a block of the prefix cache; None: it is off."""
        _ = text.tool_format  # computed now, because it renders the template and takes time

    async def close(self) -> None:
        await self._encoder.close()
        await self._grammars.close()

    async def parse(
        self, answer_format: AnswerFormat[B], api_request: B, size: int, client_id: str
    ) -> ParsedRequest:
        """Checks a request with a body of `size` bytes. Raises if it is invalid. Text work is shared fairly between
        clients, by `client_id`."""
        parsed: ParsedRequest = await self._run_in_thread_if_large(
            size, client_id, answer_format.parse, api_request, self._model
        )
        return parsed

    def before_search(
        self,
        answer_format: AnswerFormat[B],
        api_request: B,
        parsed: ParsedRequest,
        request_id: RequestId,
        key: ApiKey | None,
    ) -> Prepared:
        """Prepares a request whose search has not run: makes its writer, and an `InferenceRequest` with a prompt of one
        token. This checks the other fields of the request, as `prepare` does."""
        request = inference_request(parsed, (0,), parsed.params, key, request_id)
        writer = answer_format.writer(api_request, self._context(parsed, request_id))
        return Prepared([request], writer, None, parsed.is_streamed)

    def _context(self, parsed: ParsedRequest, request_id: RequestId) -> AnswerContext:
        return AnswerContext(
            self._model.name,
            self._model.tokenizer,
            request_id,
            wants_logprobs=parsed.params.logprobs is not None,
            num_choices_per_prompt=parsed.params.n,
            has_session=parsed.session_id is not None,
        )

    async def prepare(
        self,
        answer_format: AnswerFormat[B],
        api_request: B,
        parsed: ParsedRequest,
        size: int,
        request_id: RequestId,
        key: ApiKey | None,
        client_id: str,
        *,
        is_idle_work: bool = False,
        writer: AnswerWriter | None = None,
    ) -> Prepared:
        """Prepares a request that `parse` has read. Raises if it is invalid. `writer`: the writer that `before_search` made."""
        size += parsed.stored_bytes
        grammar, answer_form = parsed.grammar, None
        echoes: Sequence[Echo] = ()
        if grammar is not None:
            grammar = await self._grammars.check(grammar, client_id)
        if isinstance(parsed.prompt, Conversation):
            tokens = await self._fitting_chat_tokens(parsed.prompt, parsed, size, client_id)
            prompts = [self._encoder.check_tokens(tokens)]
            answer_form = parsed.tools.answer_form(self._text, prompts[0])
            if parsed.earlier_tokens:
                prompts = [self._encoder.check_tokens([*parsed.earlier_tokens, *prompts[0]])]
            grammar = await self._answer_grammar(parsed.tools, grammar, answer_form, size, client_id)
        else:
            prompts = await self._prompt_tokens(parsed.prompt, client_id)
            if parsed.echoes_prompts:
                echoes = await self._echoes(parsed.prompt, prompts, client_id)
        prediction = await self._prediction_tokens(parsed.prediction, client_id)
        params = parsed.params if grammar is None else replace(parsed.params, grammar=grammar)
        requests = [
            inference_request(
                parsed,
                prompt,
                params,
                key,
                _prompt_id(request_id, index, len(prompts)),
                prediction,
                is_idle_work=is_idle_work,
            )
            for index, prompt in enumerate(prompts)
        ]
        context = replace(
            self._context(parsed, request_id),
            prompt_tokens=sum(map(len, prompts)),
            cacheable_tokens=sum(self._cacheable(len(one)) for one in prompts),
            has_parts=answer_form is not None,
            echoes=echoes,
            prompts=[request.prompt for request in requests],
        )
        if writer is not None:
            writer.prompt_is_ready(api_request, context)
        else:
            writer = await self._run_in_thread_if_large(
                size, client_id, answer_format.writer, api_request, context
            )
        return Prepared(requests, writer, answer_form, parsed.is_streamed, _kind(parsed, prompts[0]))

    def _cacheable(self, num_tokens: int) -> int:
        """How many tokens of a prompt are in complete blocks. The last token does not count: it is always computed."""
        block = self._cached_block
        return 0 if block is None else (num_tokens - 1) // block * block

    async def count(self, parsed: ParsedRequest, size: int, client_id: str) -> int:
        """The number of prompt tokens of a request."""
        size += parsed.stored_bytes
        if isinstance(parsed.prompt, Conversation):
            return len(await self._fitting_chat_tokens(parsed.prompt, parsed, size, client_id))
        return sum(map(len, await self._prompt_tokens(parsed.prompt, client_id)))

    async def _fitting_chat_tokens(
        self, conversation: Conversation, parsed: ParsedRequest, size: int, client_id: str
    ) -> list[int]:
        """The tokens of a conversation. If `parsed.drops_oldest` is set, as few of the oldest items as possible are left
        out, so that the other items fit the context: a binary search over the items at which it may begin."""
        if not parsed.drops_oldest:
            return await self._chat_tokens(conversation, parsed.tools, size, client_id)
        room = min(parsed.params.max_tokens or _ANSWER_ROOM, self._encoder.max_context // 2)
        starts = starts_of_rest(conversation.items)
        least, most = 0, len(starts) - 1
        found: list[int] | None = None
        index = 0  # the whole conversation is tried first
        while True:
            shorter = from_start(conversation, starts[index])
            # `size` is the size of the whole conversation. It only decides whether a worker process does the work.
            tokens = await self._tokens_if_short(shorter, parsed.tools, size, client_id)
            if tokens is not None and len(tokens) <= self._encoder.max_context - room:
                found, most = tokens, index - 1
            elif index == len(starts) - 1:
                # Not even the newest items fit. The engine refuses them, with both numbers.
                return await self._chat_tokens(shorter, parsed.tools, size, client_id)
            else:
                least = index + 1
            if found is not None and least > most:
                return found
            index = (least + most) // 2

    async def _tokens_if_short(
        self, conversation: Conversation, tools: ToolUse, size: int, client_id: str
    ) -> list[int] | None:
        try:
            return await self._chat_tokens(conversation, tools, size, client_id)
        except PromptTooLongError:
            return None

    async def _chat_tokens(
        self, conversation: Conversation, tools: ToolUse, size: int, client_id: str
    ) -> list[int]:
        chat = Chat(
            template_messages(conversation.items),
            tools.template_tools,
            conversation.documents,
            conversation.template_options,
            conversation.opens_answer and not conversation.continues_last,
            conversation.continues_last,
            conversation.reasoning_effort,
        )
        return await self._encoder.encode(chat, size, client_id)

    async def _answer_grammar(
        self,
        tools: ToolUse,
        grammar: Grammar | None,
        answer_form: AnswerSyntax | None,
        size: int,
        client_id: str,
    ) -> Grammar | None:
        """The grammar of whole answers, with thoughts and tool calls. `grammar` is the grammar of their content."""
        written = await self._run_in_thread_if_large(
            size, client_id, tools.grammar, grammar, answer_form, self._text
        )
        if written is None or written is grammar:
            return grammar
        # The grammar of the content was checked before. So an error here comes from the tools.
        with renamed_fields({"grammar": "tools"} if tools.tools else {}):
            return await self._grammars.check(written, client_id)

    async def _prompt_tokens(self, prompts: Sequence[Prompt], client_id: str) -> list[list[int]]:
        texts = [one for one in prompts if isinstance(one, str)]
        encoded = iter(await self._encoder.encode_texts(texts, client_id))
        tokens = []
        for one in prompts:
            if isinstance(one, tuple):
                tokens.append(self._encoder.check_tokens(await self._joined_tokens(one, client_id)))
            else:
                tokens.append(next(encoded) if isinstance(one, str) else self._encoder.check_tokens(one))
        return tokens

    async def _joined_tokens(self, parts: Sequence[str | int], client_id: str) -> list[int]:
        """The tokens of texts with token ids between them."""
        texts = [part for part in parts if isinstance(part, str)]
        encoded = iter(await self._encoder.encode_texts(texts, client_id, add_special_tokens=False))
        return [token for part in parts for token in ((part,) if isinstance(part, int) else next(encoded))]

    async def _prediction_tokens(self, prediction: str, client_id: str) -> list[int]:
        """The tokens of a prediction. Raises ApiError if they do not fit the context."""
        if not prediction:
            return []
        try:
            size = len(prediction.encode())
            tokens = await self._encoder.encode(Text(prediction, False), size, client_id)
            return self._encoder.check_tokens(tokens)
        except InvalidRequestError as error:
            if error.code != "context_length_exceeded":
                raise
            raise refusal(
                f"prediction has more tokens than the context of the model, which has {self._encoder.max_context}; "
                "send a shorter one",
                "prediction",
            ) from None

    async def _echoes(
        self, prompts: Sequence[Prompt], tokens: Sequence[Sequence[int]], client_id: str
    ) -> list[Echo]:
        ids = [one for one in prompts if isinstance(one, list)]
        decoded = iter(await self._encoder.decode(ids, client_id))
        return [
            Echo(one if isinstance(one, str) else next(decoded), each)
            for one, each in zip(prompts, tokens, strict=True)
        ]

    async def tokens(self, api_request: TokenizeRequest, size: int, client_id: str) -> list[int]:
        """The prompt tokens that a completion or a chat with these fields would have."""
        if (api_request.prompt is None) == (api_request.messages is None):
            raise refusal("send either prompt or messages, not both", "prompt")
        if api_request.prompt is not None:
            text = Text(api_request.prompt, api_request.add_special_tokens)
            return await self._encoder.encode(text, size, client_id)
        chat = Chat(
            api_request.messages or [],
            api_request.tools or None,
            None,
            api_request.chat_template_kwargs,
            api_request.add_generation_prompt and not api_request.continue_final_message,
            api_request.continue_final_message,
        )
        return await self._encoder.encode(chat, size, client_id)

    async def text(self, tokens: list[int], client_id: str) -> str:
        """The text of tokens, with control tokens. Raises ApiError for invalid tokens."""
        if len(tokens) > _MAX_DETOKENIZED:
            message = f"tokens has {len(tokens)} entries; allowed: {_MAX_DETOKENIZED}"
            raise refusal(message, "tokens")
        last = self._text.tokenizer.vocabulary_size - 1
        for token in (min(tokens), max(tokens)) if tokens else ():
            if not 0 <= token <= last:
                message = f"tokens holds {token}; allowed: 0 to {last}"
                raise refusal(message, "tokens")
        [text] = await self._encoder.decode([tokens], client_id)
        return text

    async def _run_in_thread_if_large(
        self, size: int, client_id: str, work: Callable[..., T], *arguments: Any
    ) -> T:
        """Runs `work` in the event loop for a small body, else in a thread."""
        if size <= _SMALL_BYTES:
            return work(*arguments)
        return await self._encoder.run_in_thread(size, client_id, work, *arguments)


def _kind(parsed: ParsedRequest, prompt: Sequence[int]) -> tuple[int, int]:
    """The `kind` of a `Prepared` request. `prompt` has the tokens of its first prompt."""
    if isinstance(parsed.prompt, Conversation):
        shared = text_of_kind(parsed.prompt.items)
    else:
        shared = repr(prompt[:_TOKENS_OF_KIND])
    tools = "\n".join(sorted(tool.name for tool in parsed.tools.tools))
    return crc32(shared.encode("utf-8", "surrogatepass")), crc32(tools.encode())


def _prompt_id(request_id: RequestId, index: int, num_prompts: int) -> RequestId:
    """The id of one prompt: the id of the request. With several prompts, the index is appended."""
    return request_id if num_prompts == 1 else RequestId(f"{request_id}-{index}")
