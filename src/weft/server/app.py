"""The routes, and one request from its body to its answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from weft import __version__
from weft.engine.client import EngineClient, EngineState
from weft.errors import WeftError
from weft.request import GenerationResult, InferenceRequest
from weft.server import schema
from weft.server.answers import Choices
from weft.server.errors import ApiError, as_api_error, json_response
from weft.server.guard import Guard
from weft.server.metrics import CONTENT_TYPE, ServerMetrics
from weft.server.openai import Echo, Form, Shape
from weft.server.prompts import PromptEncoder
from weft.server.requests import check_completion, inference_request, prompts_of, sampling_params
from weft.server.rounds import Rounds
from weft.server.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from weft.server.settings import ServerSettings
from weft.server.streaming import Disconnected, EventStream, unless_disconnected
from weft.server.text_process import Chat, Text
from weft.text.model_text import ModelText

_HEADERS_SECONDS = 1.0
"""A stream's status waits this long for the engine to refuse the request; a refusal that is later is an event."""
_MAX_DETOKENIZED = 1 << 18

T = TypeVar("T", bound=msgspec.Struct)


@dataclass(frozen=True)
class _Prepared:
    """A request that is ready for the engine."""

    requests: list[InferenceRequest]
    shape: Shape
    is_streamed: bool
    include_usage: bool


class ServerApp:
    """Owns what all requests share. Belongs to one event loop."""

    def __init__(
        self,
        settings: ServerSettings,
        text: ModelText,
        suggestions: Mapping[str, Any],
        engine: EngineClient,
    ) -> None:
        self.settings = settings
        self.text = text
        self.engine = engine
        self.is_draining = False
        self.encoder = PromptEncoder(text, settings.model, engine.max_sequence_length)
        self._suggestions = suggestions
        self._name = settings.names[0]
        self._metrics = ServerMetrics(self._name)
        self._created = int(time.time())
        self._num_open = 0
        self._rounds = Rounds()
        self._idle = asyncio.Event()
        self._idle.set()
        self._metrics.open_requests.set_function(lambda: self._num_open)

    async def wait_until_idle(self, seconds: float) -> bool:
        """Whether all requests ended in time."""
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def asgi(self) -> ASGIApp:
        post, get = ["POST"], ["GET"]
        routes = [
            Route("/v1/chat/completions", self._chat, methods=post),
            Route("/v1/completions", self._completion, methods=post),
            Route("/v1/models", self._models, methods=get),
            Route("/v1/models/{name:path}", self._model, methods=get),
            Route("/tokenize", self._tokenize, methods=post),
            Route("/detokenize", self._detokenize, methods=post),
            Route("/tokenizer_info", self._tokenizer_info, methods=get),
            Route("/health", self._health, methods=get),
            Route("/ready", self._ready, methods=get),
            Route("/metrics", self._show_metrics, methods=get),
            Route("/version", self._version, methods=get),
        ]
        handlers: dict[Any, Any] = {
            ApiError: self._respond_with_error,
            WeftError: self._respond_with_weft_error,
            HTTPException: _respond_with_http_error,
            Disconnected: _respond_to_nobody,
            ClientDisconnect: _respond_to_nobody,
            Exception: _respond_with_mistake,
        }
        origins = list(self.settings.allowed_origins)
        middleware = []
        if origins:
            middleware = [
                Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
            ]
        return Guard(
            Starlette(routes=routes, exception_handlers=handlers, middleware=middleware), self.settings
        )

    # ------------------------------------------------------------------ generating

    async def _chat(self, request: Request) -> Response:
        return await self._generate(request, ChatRequest)

    async def _completion(self, request: Request) -> Response:
        return await self._generate(request, CompletionRequest)

    async def _generate(
        self, request: Request, kind: type[ChatRequest] | type[CompletionRequest]
    ) -> Response:
        self._check_open()
        body = await request.body()
        began = time.monotonic()
        self._num_open += 1
        self._idle.clear()
        choices = Choices(self.engine, self.text.tokenizer)
        is_handed_on = False
        try:
            await self._rounds.turn()
            asked, unknown = schema.read(kind, body)
            headers = (
                {"Warning": f'299 weft "unknown fields ignored: {", ".join(unknown)}"'} if unknown else {}
            )
            with _renamed_params(asked):
                prepared = await unless_disconnected(request.receive, self._begin(asked, len(body), choices))
                headers["x-request-id"] = prepared.shape.request_id
                if prepared.is_streamed:
                    is_handed_on = True
                    return EventStream(
                        choices,
                        prepared.shape,
                        self._metrics,
                        rounds=self._rounds,
                        began=began,
                        include_usage=prepared.include_usage,
                        headers=headers,
                        on_end=lambda outcome: self._end(outcome, prepared.shape, began),
                    )
                results = await unless_disconnected(request.receive, _whole(choices, self._rounds))
            self._end(results, prepared.shape, began, is_streamed=False)
            is_handed_on = True
            return json_response(prepared.shape.answer(results), headers=headers)
        finally:
            if not is_handed_on:
                choices.cancel()
                self._close()

    async def _begin(self, asked: ChatRequest | CompletionRequest, size: int, choices: Choices) -> _Prepared:
        """Everything until the engine has the request and did not refuse it."""
        self._check_model(asked.model)
        schema.check_response_format(asked.response_format)
        prepared = await self._prepare(asked, size)
        await choices.submit(prepared.requests)
        try:
            await asyncio.wait_for(choices.wait(), _HEADERS_SECONDS)
        except TimeoutError:
            pass
        choices.check()
        return prepared

    async def _prepare(self, asked: ChatRequest | CompletionRequest, size: int) -> _Prepared:
        params = sampling_params(asked, self._suggestions)
        form: Form
        echoes: list[Echo] = []
        if isinstance(asked, ChatRequest):
            form, prompts = "chat", [await self.encoder.encode(self._chat_prompt(asked), size)]
        else:
            form = "completion"
            check_completion(asked)
            texts = prompts_of(asked, self.settings.max_answers)
            prompts = [
                await self.encoder.encode(Text(one), len(one)) if isinstance(one, str) else one
                for one in texts
            ]
            if asked.echo:
                decode = self.text.tokenizer.decode
                echoes = [
                    Echo(one if isinstance(one, str) else decode(tokens, skip_control=False), tokens)
                    for one, tokens in zip(texts, prompts, strict=True)
                ]
        shape = Shape(
            form,
            self._name,
            self.text.tokenizer,
            wants_logprobs=params.logprobs is not None,
            num_choices_per_prompt=params.n,
            echoes=echoes,
        )
        options = asked.stream_options
        return _Prepared(
            [inference_request(asked, prompt, params) for prompt in prompts],
            shape,
            asked.stream,
            options is not None and options.include_usage,
        )

    def _chat_prompt(self, asked: ChatRequest | TokenizeRequest) -> Chat:
        tools, documents = asked.tools or None, None
        if isinstance(asked, ChatRequest):
            documents = asked.documents
            if schema.check_tool_choice(asked.tool_choice, bool(tools)) == "none":
                tools = None
        return Chat(
            asked.messages or [],
            tools,
            documents,
            asked.chat_template_kwargs,
            asked.add_generation_prompt and not asked.continue_final_message,
            asked.continue_final_message,
        )

    def _end(
        self,
        outcome: list[GenerationResult] | ApiError | None,
        shape: Shape,
        began: float,
        is_streamed: bool = True,
    ) -> None:
        """Books how a request ended; None: nobody was there any more."""
        self._close()
        if isinstance(outcome, ApiError):
            self._metrics.failed(outcome.status)
        elif outcome:
            num_prompts = len(outcome) // shape.num_choices_per_prompt
            self._metrics.answered(outcome, num_prompts, time.monotonic() - began)
            first = outcome[0].time_to_first_token
            if not is_streamed and first is not None:
                self._metrics.first_token(first)

    def _close(self) -> None:
        self._num_open -= 1
        if not self._num_open:
            self._idle.set()

    def _check_open(self) -> None:
        """Refuses new work where it could not be done."""
        soon = {"Retry-After": "1"}
        if self.is_draining:
            raise ApiError(503, "the server is shutting down; ask another", code="draining", headers=soon)
        if self.engine.state is not EngineState.READY:
            raise ApiError(503, "the engine is starting; try again", code="engine_not_ready", headers=soon)
        if self._num_open >= self.settings.max_requests:
            raise ApiError(
                429,
                f"{self._num_open} requests are under way; allowed: {self.settings.max_requests}; try again later",
                code="queue_full",
                headers=soon,
            )

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in self.settings.names:
            raise ApiError(
                404,
                f"there is no model {name!r:.200}; this server has {self._name!r}",
                param="model",
                code="model_not_found",
            )

    # ------------------------------------------------------------------ everything else

    async def _tokenize(self, request: Request) -> Response:
        body = await request.body()
        asked, _ = schema.read(TokenizeRequest, body)
        self._check_model(asked.model)
        if (asked.prompt is None) == (asked.messages is None):
            raise ApiError(400, "send either prompt or messages", param="prompt", code="invalid_value")
        prompt = (
            self._chat_prompt(asked) if asked.prompt is None else Text(asked.prompt, asked.add_special_tokens)
        )
        tokens = await unless_disconnected(request.receive, self.encoder.encode(prompt, len(body)))
        return json_response(
            {"count": len(tokens), "max_model_len": self.engine.max_sequence_length, "tokens": tokens}
        )

    async def _detokenize(self, request: Request) -> Response:
        asked, _ = schema.read(DetokenizeRequest, await request.body())
        self._check_model(asked.model)
        if len(asked.tokens) > _MAX_DETOKENIZED:
            message = f"tokens has {len(asked.tokens)} entries; allowed: {_MAX_DETOKENIZED}"
            raise ApiError(400, message, param="tokens", code="invalid_value")
        last = self.text.tokenizer.vocabulary_size - 1
        for token in asked.tokens:
            if not 0 <= token <= last:
                message = f"tokens holds {token}; allowed: 0 to {last}"
                raise ApiError(400, message, param="tokens", code="invalid_value")
        return json_response({"prompt": self.text.tokenizer.decode(asked.tokens, skip_control=False)})

    async def _tokenizer_info(self, request: Request) -> Response:
        """As vLLM has it: clients that count tokens (lm-eval) look here before they ask for a tokenizer's files."""
        names = self.text.tokenizer.specials.names
        known = {name: names.get(name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
        return json_response({**known, "vocab_size": self.text.tokenizer.vocabulary_size})

    async def _models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [self._described()]})

    async def _model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return json_response(self._described())

    def _described(self) -> dict[str, Any]:
        return {
            "id": self._name,
            "object": "model",
            "created": self._created,
            "owned_by": "weft",
            "max_model_len": self.engine.max_sequence_length,
        }

    async def _health(self, request: Request) -> Response:
        is_live = self.engine.state is EngineState.READY
        return json_response({"status": "ok" if is_live else "engine is down"}, 200 if is_live else 503)

    async def _ready(self, request: Request) -> Response:
        self._check_open()
        return json_response({"status": "ready"})

    async def _show_metrics(self, request: Request) -> Response:
        return Response(await self._metrics.text(self.engine), media_type=CONTENT_TYPE)

    async def _version(self, request: Request) -> Response:
        return json_response({"version": __version__})

    async def _respond_with_error(self, request: Request, error: ApiError) -> Response:
        self._metrics.failed(error.status)
        return error.response()

    async def _respond_with_weft_error(self, request: Request, error: WeftError) -> Response:
        return await self._respond_with_error(request, as_api_error(error))


async def _whole(choices: Choices, rounds: Rounds) -> list[GenerationResult]:
    while not choices.is_over:
        await choices.wait()
        await rounds.turn()
        choices.take()
    return choices.results


@contextmanager
def _renamed_params(asked: ChatRequest | CompletionRequest) -> Iterator[None]:
    """Errors of the engine name the fields of its own request; the client knows those it sent."""
    try:
        yield
    except WeftError as error:
        raised = as_api_error(error)
    except ApiError as error:
        raised = error
    else:
        return
    if isinstance(asked, ChatRequest):
        names = {"prompt": "messages"}
        if asked.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        if asked.top_logprobs is not None:
            names["logprobs"] = "top_logprobs"
        raised.param = names.get(raised.param or "", raised.param)
    raise raised


async def _respond_with_http_error(request: Request, error: HTTPException) -> Response:
    if error.status_code == 404:
        message = f"there is no {request.url.path!r:.200} here"
    elif error.status_code == 405:
        message = f"{request.method} is not allowed for {request.url.path!r:.200}"
    else:
        message = error.detail
    return ApiError(error.status_code, message, headers=error.headers).response()


async def _respond_to_nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


async def _respond_with_mistake(request: Request, error: Exception) -> Response:
    return ApiError(500, "the server made a mistake; its log says which", code="internal_error").response()
