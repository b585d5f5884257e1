"""The format of `/v1/responses`: items in, items out, with a store of responses.

    body -> load: adds the stored conversation and referenced items -> parse -> ParsedRequest
                                                                            `-> ResponsesWriter

| file | what it has |
|---|---|
| `responses.py` | the request, and its conversion to a conversation |
| `responses_items.py` | items of the input, in all their forms |
| `responses_tools.py` | tools and the choice of tools |
| `responses_writer.py` | the response object, streamed or not, and storing it |
| `responses_output.py` | the items of the output and their events |
| `responses_shapes.py` | the types of responses, for the OpenAPI document |
| `responses_stored.py` | items of stored responses |
| `responses_routes.py` | the routes for stored responses |
| `responses_background.py` | background responses |
| `server/state/responses.py` | the table of stored responses |

The state of a response is in its writer until it is complete, and then in the table. A background response is in the
table from its beginning. Nothing else is kept between requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from weft.request import MAX_LOGPROBS, MAX_TOKENS, Grammar
from weft.server.api import structured
from weft.server.api.answer_format import (
    GENERATING,
    AnswerContext,
    AnswerFormat,
    AnswerWriter,
    Counting,
    Operation,
    ParsedRequest,
    ServedModel,
)
from weft.server.api.chat_request import VERBOSITIES
from weft.server.api.field_docs import Field
from weft.server.api.file_search import FileSearch, is_file_search, planned_search, with_passages
from weft.server.api.openai import parsed_request
from weft.server.api.requests import sampling_params
from weft.server.api.responses_items import (
    check_calls,
    check_items,
    conversation_items,
    ignored_items,
    item_type,
    referenced_ids,
    with_references,
)
from weft.server.api.responses_shapes import ResponseEvent, ResponseInputTokens, ResponseObject
from weft.server.api.responses_stored import stored_conversation, stored_items
from weft.server.api.responses_tools import function_tools, ignored_tools, known_choice, tool_choice
from weft.server.api.responses_writer import ResponsesWriter
from weft.server.api.schema import MAX_ENTRIES, MAX_NAMED, GenerationRequest, shown
from weft.server.api.services import Caller
from weft.server.api.tool_use import ToolChoice, chosen_tools
from weft.server.errors import refusal
from weft.server.state import responses as table
from weft.text.conversation import EFFORTS, Conversation, Item, Message

PATH = "/v1/responses"
_LOGPROBS = "message.output_text.logprobs"
_MAX_METADATA_LENGTH = 512
_SUMMARIES = ("auto", "concise", "detailed")


class TextOptions(msgspec.Struct, frozen=True):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ReasoningOptions(msgspec.Struct, frozen=True):
    effort: str | None = None
    summary: str | None = None


class ResponsesRequest(GenerationRequest, frozen=True, kw_only=True):
    input: str | list[Any] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    background: bool = False
    max_output_tokens: int | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    max_tool_calls: int | None = None
    text: TextOptions = TextOptions()
    reasoning: ReasoningOptions = ReasoningOptions()
    include: list[str] = msgspec.field(default_factory=list)
    top_logprobs: int | None = None
    truncation: str = "disabled"
    client_metadata: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    # Refused: ignoring them would change the answer.
    conversation: Any = None
    prompt: Any = None

    @property
    def wants_logprobs(self) -> bool:
        return _LOGPROBS in self.include or bool(self.top_logprobs)


class LoadedRequest(ResponsesRequest, frozen=True, kw_only=True):
    """A request together with the stored items that its body refers to: `input` has no references any more. `load`
    makes it; a body is never decoded into this type."""

    earlier: list[Item] = msgspec.field(default_factory=list)
    """The stored conversation before this request."""
    stored_bytes: int = 0
    search: FileSearch | None = None
    """The search of the tool `file_search`."""


class ResponsesFormat(AnswerFormat[ResponsesRequest]):
    request_type = ResponsesRequest
    operation = Operation(
        "Response",
        "Items in, items out. With `store` (the default) a later request continues the conversation by "
        "`previous_response_id`. The server itself runs the tool file_search, before it generates. Other tools that the "
        "OpenAI API runs, such as web_search, are ignored and listed in the `Warning` header.",
        "Generating",
        ResponseObject,
        ResponsesRequest,
        ResponseEvent,
        {
            "Question": {"input": "Hello", "temperature": 0, "max_output_tokens": 64, "store": False},
            "Instructions and items": {
                "instructions": "Answer in one sentence.",
                "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}],
                "max_output_tokens": 64,
                "store": False,
            },
            "Tool call": {
                "input": "What is the weather in Rome?",
                "tools": [
                    {
                        "type": "function",
                        "name": "weather",
                        "parameters": {
                            "type": "object",
                            "properties": {"city": {"type": "string", "maxLength": 40}},
                            "required": ["city"],
                        },
                    }
                ],
                "tool_choice": "required",
                "temperature": 0,
                "max_output_tokens": 64,
                "store": False,
            },
        },
        GENERATING,
        event_note="Each event has an `event:` line with its type and a `data:` line with a JSON object. The last one "
        "is `response.completed`, `response.incomplete` or `response.failed`.",
    )
    fields: Mapping[str, Field] = {
        "input": Field(
            f"A text, or a list of items, oldest first: messages, function calls and their outputs, custom tool calls "
            f"and their outputs, reasoning, references to stored items; at most {MAX_ENTRIES['input']}."
        ),
        "instructions": Field(
            "A system message before the conversation. It is not part of the stored conversation."
        ),
        "previous_response_id": Field("The id of a stored response. Its conversation is continued."),
        "background": Field(
            "Return at once, and generate in the background. Needs store. GET returns the state."
        ),
        "max_output_tokens": Field("Maximum number of generated tokens, thoughts included.", 1, MAX_TOKENS),
        "tools": Field(
            "Tools of the types function, custom (its input is a text, which may have a grammar), namespace (a group of "
            f"tools) and file_search; others are ignored. At most {MAX_ENTRIES['tools']}."
        ),
        "tool_choice": Field(
            "auto, none, required, or an object that names a tool, or several: allowed_tools."
        ),
        "parallel_tool_calls": Field("Whether an answer may have several tool calls."),
        "max_tool_calls": Field(
            "Accepted, without effect: the server searches files at most once for an answer."
        ),
        "text": Field(
            "`format`: text, json_schema or json_object. `verbosity`: low, medium or high, without effect."
        ),
        "reasoning": Field(
            f"`effort`: {', '.join(EFFORTS)}; none and minimal turn thoughts off, if the chat template can. `summary`: "
            f"{', '.join(_SUMMARIES)}; thoughts are returned as a summary, which is their whole text."
        ),
        "include": Field(
            f"`{_LOGPROBS}`, `reasoning.encrypted_content` and `file_search_call.results`; others have no effect. At most {MAX_ENTRIES['include']}."
        ),
        "top_logprobs": Field(
            "For each token, also return the logprobs of this many most likely tokens.", 0, MAX_LOGPROBS
        ),
        "truncation": Field(
            "auto: the oldest items are left out if the conversation is longer than the context. disabled: an error."
        ),
        "store": Field("Store the response and its input. Default: true; false in a line of a batch."),
        "metadata": Field(
            f"Returned with the response. At most {MAX_ENTRIES['metadata']} entries, texts of at most "
            f"{_MAX_METADATA_LENGTH} characters."
        ),
        "client_metadata": Field("Accepted, without effect."),
        "prompt_cache_key": Field("The cached prefixes of requests with the same key are evicted last."),
        "user": Field("Returned with the response, otherwise without effect."),
        "safety_identifier": Field("Returned with the response, otherwise without effect."),
        "max_tokens": Field("The same as max_output_tokens.", 1, MAX_TOKENS),
        "n": Field("Only 1: a response has one answer.", 1, 1),
        "conversation": Field("Not supported; use previous_response_id.", schema={"type": "null"}),
        "prompt": Field("Not supported; send instructions and input.", schema={"type": "null"}),
    }
    counting = Counting(
        f"{PATH}/input_tokens",
        ResponsesRequest,
        lambda count: {"object": "response.input_tokens", "input_tokens": count},
        Operation(
            "Count the input tokens of a response",
            "Takes the body of a response, and generates nothing.",
            "Text",
            ResponseInputTokens,
            ResponsesRequest,
            examples={"Question": {"input": "Hello"}},
            errors=(400, 404, 408, 413, 429, 500, 503),
        ),
    )

    async def load(self, api_request: ResponsesRequest, caller: Caller) -> ResponsesRequest:
        if caller.is_internal and not api_request.background and api_request.store is None:
            # By default a line of a batch is not stored: a large batch would evict the conversations of the key.
            api_request = msgspec.structs.replace(api_request, store=False)
        loaded = await self._load_stored(api_request, caller)
        # A background request is loaded again when it runs. Only then is its search planned.
        if not any(map(is_file_search, api_request.tools or ())) or (
            api_request.background and not caller.is_internal
        ):
            return loaded
        items = conversation_items(check_items(loaded.input))
        search = await planned_search(api_request.tools or (), api_request.tool_choice, items, caller)
        if search is None:
            return loaded
        values = {name: getattr(loaded, name) for name in loaded.__struct_fields__}
        return LoadedRequest(**{**values, "search": search})

    async def search(self, api_request: ResponsesRequest, caller: Caller) -> ResponsesRequest:
        assert isinstance(api_request, LoadedRequest) and api_request.search is not None
        return msgspec.structs.replace(api_request, search=await api_request.search.with_sources(caller))

    async def _load_stored(self, api_request: ResponsesRequest, caller: Caller) -> ResponsesRequest:
        """Adds the stored conversation, and replaces references by the items that they refer to."""
        _check(api_request, stores_nothing=caller.services.settings.response_days <= 0)
        items = check_items(api_request.input)
        references = referenced_ids(items)
        previous = api_request.previous_response_id
        if previous is None and not references:
            return api_request
        services = caller.services
        limits = {"max_items": MAX_ENTRIES["input"], "max_bytes": services.settings.max_body_bytes}

        def read(connection: Any) -> LoadedRequest:
            now = services.store.wall_clock()
            given = {item["id"]: item for item in items if _has_id(item)}
            others = [one for one in references if one not in given]
            found = given | stored_items(connection, others, caller.owner, now, limits)
            resolved, num_resolved_bytes = with_references(items, found, limits["max_bytes"])
            earlier: list[Item] = []
            num_bytes = 0
            if previous is not None:
                # The conversation, the references and the body together have the limit of one body.
                room = max(0, limits["max_bytes"] - caller.body.num_bytes - num_resolved_bytes)
                chain = table.chain(
                    connection, previous, caller.owner, now, max_items=limits["max_items"], max_bytes=room
                )
                earlier = stored_conversation(
                    chain, previous, room, is_cut_allowed=api_request.truncation == "auto"
                )
                num_bytes = sum(row.num_bytes for row in chain.rows)
            values = {name: getattr(api_request, name) for name in api_request.__struct_fields__}
            return LoadedRequest(
                **{**values, "input": resolved}, earlier=earlier, stored_bytes=num_bytes + num_resolved_bytes
            )

        loaded = await services.store.run(read)
        caller.body.add(loaded.stored_bytes)
        return loaded

    def ignored(self, api_request: ResponsesRequest) -> Sequence[str]:
        found = [*ignored_tools(api_request.tools or ()), *ignored_items(api_request.input)]
        choice = api_request.tool_choice
        if known_choice(choice, api_request.tools or ()) != (choice or "auto"):
            found.append("tool_choice")
        return [shown(name) for name in found[:MAX_NAMED]]

    def parse(self, api_request: ResponsesRequest, model: ServedModel) -> ParsedRequest:
        logprobs = {"logprobs": api_request.top_logprobs or 0} if api_request.wants_logprobs else {}
        limit = api_request.max_output_tokens
        max_tokens = {} if limit is None else {"max_tokens": limit}
        params = sampling_params(api_request, model.generation_defaults, **logprobs, **max_tokens)
        given = api_request.tools or ()
        functions, choice = function_tools(given), tool_choice(api_request.tool_choice, given)
        if not functions and choice.mode == "required" and any(map(is_file_search, given)):
            # The server makes the required call: its own file search. The model then needs to call nothing.
            choice = ToolChoice("auto")
        tools = chosen_tools(functions, choice, api_request.parallel_tool_calls)
        items = list[Item]()
        stored_bytes = 0
        if isinstance(api_request, LoadedRequest):
            items, stored_bytes = list(api_request.earlier), api_request.stored_bytes
        items += conversation_items(check_items(api_request.input))
        check_calls(items)
        search: FileSearch | None = getattr(api_request, "search", None)
        items = with_passages(items, search)
        if api_request.instructions:
            items.insert(0, Message("system", api_request.instructions))
        if not items:
            raise refusal("input is empty; send a text, or at least one item", "input")
        conversation = Conversation(
            items,
            template_options=api_request.chat_template_kwargs,
            reasoning_effort=api_request.reasoning.effort,
        )
        return parsed_request(
            api_request,
            conversation,
            params,
            _grammar(api_request),
            is_search_pending=search is not None and search.is_pending,
            tools=tools,
            stored_bytes=stored_bytes,
            drops_oldest=api_request.truncation == "auto",
        )

    def writer(self, api_request: ResponsesRequest, context: AnswerContext) -> AnswerWriter:
        return ResponsesWriter(api_request, context)

    def field_names(self, api_request: ResponsesRequest) -> Mapping[str, str]:
        return {
            "messages": "input",
            "prompt": "input" if api_request.prompt is None else "prompt",
            "max_tokens": "max_output_tokens",
            "logprobs": "top_logprobs",
            "grammar": "text" if api_request.text.format else structured.grammar_param(api_request),
        }


def _check(api_request: ResponsesRequest, *, stores_nothing: bool) -> None:
    """Raises ApiError for fields that are not supported, or that contradict each other."""
    for name, instead in (("conversation", "previous_response_id"), ("prompt", "instructions and input")):
        if getattr(api_request, name) is not None:
            raise refusal(f"{name} is not supported; use {instead}", name, "unsupported")
    if api_request.n not in (None, 1):
        raise refusal(f"n is {api_request.n}; a response has one answer: leave it out", "n")
    if api_request.truncation not in ("auto", "disabled"):
        raise refusal(f"truncation is {api_request.truncation!r:.80}; allowed: auto, disabled", "truncation")
    effort = api_request.reasoning.effort
    if effort is not None and effort not in EFFORTS:
        raise refusal(f"reasoning.effort is {effort!r:.80}; allowed: {', '.join(EFFORTS)}", "reasoning")
    for name, word, allowed in (
        ("text.verbosity", api_request.text.verbosity, VERBOSITIES),
        ("reasoning.summary", api_request.reasoning.summary, _SUMMARIES),
    ):
        if word is not None and word not in allowed:
            message = f"{name} is {word!r:.80}; allowed: {', '.join(allowed)}"
            raise refusal(message, name.partition(".")[0])
    if api_request.background:
        if api_request.stream:
            raise refusal(
                "background and stream cannot be combined; leave stream out, and ask for the state with GET",
                "stream",
            )
        if api_request.store is False or stores_nothing:
            why = "this server stores no responses (response_days)" if stores_nothing else "store is false"
            raise refusal(f"a background response is stored, but {why}; leave background out", "background")
    for name, value in (api_request.metadata or {}).items():
        if not isinstance(value, str) or max(len(name), len(value)) > _MAX_METADATA_LENGTH:
            raise refusal(
                f"metadata has the entry {name!r:.80}, which is no text or longer than {_MAX_METADATA_LENGTH} "
                "characters; send a shorter text",
                "metadata",
            )


def _grammar(api_request: ResponsesRequest) -> Grammar | None:
    form = api_request.text.format
    other = structured.requested_grammar(api_request)
    kind = None if form is None else form.get("type")
    if form is None or kind == "text":
        return other
    if kind not in ("json_object", "json_schema"):
        raise refusal(f"text.format.type is {kind!r:.80}; allowed: text, json_schema, json_object", "text")
    if other is not None:
        raise refusal("text.format and another field both define the format of the answer; send one", "text")
    if kind == "json_object":
        return structured.grammar_of_schema(structured.ANY_OBJECT, "text.format")
    return structured.grammar_of_schema(form.get("schema"), "text.format.schema")


def _has_id(item: Mapping[str, Any]) -> bool:
    """Whether an item of the body has an id, so that references of the same body may refer to it."""
    return item_type(item) != "item_reference" and isinstance(item.get("id"), str)
