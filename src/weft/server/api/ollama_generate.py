"""The format of Ollama's `/api/generate`: one prompt in, its answer out, with the tokens of both as `context`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from msgspec import UNSET, Meta, UnsetType

from weft.server.api.answer_format import (
    GENERATING,
    AnswerContext,
    AnswerWriter,
    Operation,
    ParsedRequest,
    ServedModel,
)
from weft.server.api.field_docs import Field
from weft.server.api.ollama import (
    EVENT_NOTE,
    FIELDS,
    TAG,
    OllamaAnswer,
    OllamaError,
    OllamaFormat,
    OllamaRequest,
    parsed_request,
    refuse_images,
    template_options,
)
from weft.server.api.ollama_writer import STREAM_TYPE, OllamaWriter
from weft.server.errors import refusal
from weft.text.conversation import Conversation, Message
from weft.text.infill import infill_prompt

# ---------------------------------------------------------------------- the types of requests and responses


class OllamaGenerateRequest(OllamaRequest, frozen=True, kw_only=True):
    prompt: str = ""
    suffix: str = ""
    system: str = ""
    template: str = ""
    raw: bool = False
    context: list[int] | None = None
    images: list[Any] | None = None


class OllamaGenerateAnswer(OllamaAnswer, kw_only=True):
    """An answer, or one line of a stream."""

    response: str
    thinking: str | UnsetType = UNSET
    context: Annotated[
        list[int] | UnsetType, Meta(description="The tokens of prompt and answer. Not with raw or a suffix.")
    ] = UNSET


class OllamaGenerateFormat(OllamaFormat[OllamaGenerateRequest]):
    request_type = OllamaGenerateRequest
    operation_name = "text_completion"
    operation = Operation(
        "Generate in Ollama's API",
        "Answers one prompt. Streams lines of JSON unless `stream` is false. Without a prompt nothing is generated.",
        TAG,
        OllamaGenerateAnswer,
        OllamaGenerateRequest,
        OllamaGenerateAnswer,
        {
            "Question": {
                "prompt": "Why is the sky blue?",
                "stream": False,
                "options": {"temperature": 0, "num_predict": 64},
            },
            "Continue a text": {
                "prompt": "The capital of France is",
                "raw": True,
                "stream": False,
                "options": {"temperature": 0, "num_predict": 8},
            },
            "Stream": {"prompt": "Hello", "stream": True, "options": {"num_predict": 64}},
        },
        GENERATING,
        event_note=EVENT_NOTE,
        event_media_type=STREAM_TYPE,
        error=OllamaError,
    )
    fields: Mapping[str, Field] = {
        **FIELDS,
        "prompt": Field("What to answer. With raw: the text to continue."),
        "suffix": Field("The text after the answer. Needs a model with tokens for it."),
        "system": Field("The system message."),
        "template": Field("Must be empty: the operator sets the template of the server."),
        "raw": Field("Continue the prompt, without a chat template."),
        "context": Field("The `context` of an earlier answer. The prompt follows these tokens."),
        "images": Field("Must be empty: weft reads text only."),
    }

    def content(self, text: str) -> dict[str, Any]:
        return {"response": text}

    def is_load_request(self, api_request: OllamaGenerateRequest) -> bool:
        return not (api_request.prompt or api_request.suffix)

    def parse(self, api_request: OllamaGenerateRequest, model: ServedModel) -> ParsedRequest:
        refuse_images(api_request.images, "images")
        _check(api_request)
        if api_request.suffix:
            prompt = infill_prompt(model.tokenizer, api_request.prompt, api_request.suffix)
            if prompt is None:
                problem = (
                    f"the model {model.name!r:.200} does not support insert: it has no tokens for a suffix"
                )
                raise refusal(f"{problem}; leave it out", "suffix")
            return parsed_request(api_request, [prompt], model)
        if api_request.raw or not (model.has_chat_template or api_request.system or api_request.context):
            return parsed_request(api_request, [api_request.prompt], model)
        system = [Message("system", api_request.system)] if api_request.system else []
        conversation = Conversation(
            [*system, Message("user", api_request.prompt)],
            template_options=template_options(api_request, model),
        )
        return parsed_request(api_request, conversation, model, earlier_tokens=api_request.context or ())

    def writer(self, api_request: OllamaGenerateRequest, context: AnswerContext) -> AnswerWriter:
        keeps_tokens = not (api_request.raw or api_request.suffix)
        return OllamaGenerateWriter(context, keeps_tokens=keeps_tokens)

    def field_names(self, api_request: OllamaGenerateRequest) -> Mapping[str, str]:
        return {**super().field_names(api_request), "messages": "prompt", "chat_template_kwargs": "think"}


def _check(api_request: OllamaGenerateRequest) -> None:
    if api_request.template:
        raise refusal(
            "template is not supported: the operator sets the template of the server; leave it out",
            "template",
        )
    for name in ("system", "context"):
        if (api_request.raw or api_request.suffix) and getattr(api_request, name):
            raise refusal(f"{name} cannot be combined with raw or a suffix: they have no chat template", name)
    for token in (min(api_request.context), max(api_request.context)) if api_request.context else ():
        if not 0 <= token < 2**31:
            raise refusal(f"context holds {token!r:.80}; allowed: token ids", "context")


class OllamaGenerateWriter(OllamaWriter):
    def message(self, text: str, thought: str, calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {**({"thinking": thought} if thought else {}), "response": text}
