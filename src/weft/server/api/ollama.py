"""What the formats of Ollama's API share: the fields of requests, options, and the types of answers."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from weft.request import MAX_LOGPROBS, PARAMETERS, Grammar, SamplingParams
from weft.server.api import structured
from weft.server.api.answer_format import (
    AnswerFormat,
    ParsedRequest,
    ServedModel,
)
from weft.server.api.field_docs import Field
from weft.server.api.logprob_entries import TopLogprob
from weft.server.api.ollama_writer import error_body, head
from weft.server.api.response_shapes import Shape
from weft.server.errors import ApiError, refusal

FAMILY = "/api"
TAG = "Ollama"
EVENT_NOTE = "Each line is one object of this type. The last one has `done: true`, or is an error."

# The defaults of Ollama. The files of a model may have others. repeat_penalty is left out, because it means something
# else there: Ollama applies it to the last 64 tokens, weft to the whole prompt.
_DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
_RANDOM_SEED = -1
_NO_LIMIT = (-1, -2, 0)
"""Values of num_predict without a limit. In Ollama -1 is no limit and -2 the rest of the context; weft treats all of them as
the rest of the context."""
_LEVELS = ("low", "medium", "high", "max")
_ZERO = re.compile(r"[+-]?0+(\.0*)?[a-zµ]*")
_WITHOUT_EFFECT = Meta(description="Accepted, without effect.")

# ---------------------------------------------------------------------- the types of requests and responses


class OllamaOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a request. Clients write whole numbers also as 40.0."""

    num_predict: Annotated[
        float | None,
        Meta(description="Maximum number of generated tokens. -1, -2 or 0: the rest of the context."),
    ] = None
    num_ctx: Annotated[
        float | None,
        Meta(
            description="Limit for prompt and answer together, in tokens. It cannot exceed that of the server."
        ),
    ] = None
    temperature: Annotated[
        float | None,
        Meta(
            description="Sampling temperature; 0 is greedy. Default: the value in the files of the model, else 0.8."
        ),
    ] = None
    top_k: Annotated[
        float | None,
        Meta(
            description="Sample from this many of the most likely tokens; 0: off. Default: as above, else 40."
        ),
    ] = None
    top_p: Annotated[
        float | None,
        Meta(
            description="Sample from the most likely tokens that have this probability. Default: as above, else 0.9."
        ),
    ] = None
    min_p: float | None = None
    typical_p: float | None = None
    repeat_penalty: Annotated[
        float | None, Meta(description="Above 1: tokens of the prompt and the answer become less likely.")
    ] = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: Annotated[
        float | None,
        Meta(description="The same request with the same seed gets the same answer. -1: random."),
    ] = None
    stop: str | list[str] | None = None
    num_keep: Annotated[Any, _WITHOUT_EFFECT] = None
    repeat_last_n: Annotated[Any, _WITHOUT_EFFECT] = None
    tfs_z: Annotated[Any, _WITHOUT_EFFECT] = None
    mirostat: Annotated[Any, _WITHOUT_EFFECT] = None
    mirostat_tau: Annotated[Any, _WITHOUT_EFFECT] = None
    mirostat_eta: Annotated[Any, _WITHOUT_EFFECT] = None
    penalize_newline: Annotated[Any, _WITHOUT_EFFECT] = None
    numa: Annotated[Any, _WITHOUT_EFFECT] = None
    num_batch: Annotated[Any, _WITHOUT_EFFECT] = None
    num_gpu: Annotated[Any, _WITHOUT_EFFECT] = None
    main_gpu: Annotated[Any, _WITHOUT_EFFECT] = None
    low_vram: Annotated[Any, _WITHOUT_EFFECT] = None
    f16_kv: Annotated[Any, _WITHOUT_EFFECT] = None
    logits_all: Annotated[Any, _WITHOUT_EFFECT] = None
    vocab_only: Annotated[Any, _WITHOUT_EFFECT] = None
    use_mmap: Annotated[Any, _WITHOUT_EFFECT] = None
    use_mlock: Annotated[Any, _WITHOUT_EFFECT] = None
    embedding_only: Annotated[Any, _WITHOUT_EFFECT] = None
    num_thread: Annotated[Any, _WITHOUT_EFFECT] = None


_SAMPLING = {
    **{name: name for name in (*PARAMETERS, "stop") if name in OllamaOptions.__struct_fields__},
    "repeat_penalty": "repetition_penalty",
}
"""Option -> name in `SamplingParams`."""


class OllamaRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of both routes that generate. A null means the default, and is removed before the conversion."""

    model: str | None = None
    stream: bool = True
    format: str | dict[str, Any] = ""
    options: OllamaOptions = OllamaOptions()
    think: bool | str | None = None
    keep_alive: float | str | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    truncate: bool | None = None
    shift: bool | None = None
    deadline: float | None = None
    learn_prompt: bool = False


FIELDS: Mapping[str, Field] = {
    "stream": Field("Send the answer as lines of JSON while it is generated."),
    "format": Field('"json" for any JSON object, or a JSON schema that the answer must follow.'),
    "options": Field(
        "Sampling parameters and limits. Unknown options are ignored and named in a `Warning` header."
    ),
    "think": Field("Whether the model thinks before it answers: true, false, low, medium, high or max."),
    "keep_alive": Field(
        "Without effect: the model stays loaded. 0 in a request without a prompt is answered as an unload."
    ),
    "logprobs": Field("Return the logprob of each generated token."),
    "top_logprobs": Field(
        "For each token, also return the logprobs of this many most likely tokens.", 0, MAX_LOGPROBS
    ),
    "truncate": Field("Without effect: a prompt that is too long is an error."),
    "shift": Field("Without effect: an answer ends when the context is full."),
}


class OllamaError(Shape):
    """The body of every failed request; in a stream, the last line."""

    error: str


class Logprob(Shape):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob] | UnsetType = UNSET


Nanoseconds = Annotated[int | UnsetType, Meta(description="Nanoseconds.")]


class OllamaAnswer(Shape):
    """The fields that /api/chat and /api/generate share: those of a whole answer, and of each line of a stream."""

    model: str
    created_at: str
    done: bool
    done_reason: Annotated[str | UnsetType, Meta(description="stop, length, load or unload.")] = UNSET
    total_duration: Nanoseconds = UNSET
    load_duration: Nanoseconds = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: Nanoseconds = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: Nanoseconds = UNSET
    logprobs: list[Logprob] | UnsetType = UNSET


R = TypeVar("R", bound=OllamaRequest)


# ---------------------------------------------------------------------- requests


class OllamaFormat(AnswerFormat[R]):
    """Base of chat and generate."""

    family = FAMILY

    @abstractmethod
    def content(self, text: str) -> dict[str, Any]:
        """The field of an answer that has its text."""

    @abstractmethod
    def is_load_request(self, api_request: R) -> bool:
        """Whether the request has nothing to answer. Clients send it to load or unload a model."""

    def answer_at_once(self, api_request: R, model: str) -> Any:
        if not self.is_load_request(api_request):
            return None
        reason = "unload" if _is_zero(api_request.keep_alive) else "load"
        return {**head(model), **self.content(""), "done": True, "done_reason": reason}

    def field_names(self, api_request: R) -> Mapping[str, str]:
        options = {name: f"options.{option}" for option, name in _SAMPLING.items()}
        return {
            **options,
            "max_tokens": "options.num_predict",
            "max_sequence_length": "options.num_ctx",
            "seed": "options.seed",
            "logprobs": "top_logprobs",
            "grammar": "format",
            "response_format": "format",
        }

    def error(self, error: ApiError) -> tuple[int, Any]:
        return error.status, error_body(error)


def parsed_request(api_request: OllamaRequest, prompt: Any, model: ServedModel, **more: Any) -> ParsedRequest:
    """A `ParsedRequest` with the fields that both formats have. `more` are its other fields."""
    num_ctx = _whole("num_ctx", api_request.options.num_ctx)
    return ParsedRequest(
        prompt,
        _sampling_params(api_request, model.generation_defaults),
        api_request.stream,
        _grammar(api_request.format),
        max_context=num_ctx,
        deadline=api_request.deadline,
        learn_prompt=api_request.learn_prompt,
        **more,
    )


def template_options(api_request: OllamaRequest, model: ServedModel) -> dict[str, Any]:
    """The options of chat templates that switch thoughts on and off."""
    think = api_request.think
    if think is None:
        return {}
    if isinstance(think, str) and think not in _LEVELS:
        raise _invalid("think", f"is {think!r:.80}; allowed: true, false, {', '.join(_LEVELS)}")
    if think and not model.can_think:
        raise _invalid(
            "think", f"is set, but the model {model.name!r:.200} does not support thinking; leave it out"
        )
    level = {"reasoning_effort": think} if isinstance(think, str) else {}
    return {"enable_thinking": bool(think), **level}


def refuse_images(images: Any, where: str) -> None:
    if images:
        raise _invalid(where, "has entries, but weft reads text only; leave it out or empty")


def _sampling_params(api_request: OllamaRequest, defaults: Mapping[str, Any]) -> SamplingParams:
    options = api_request.options
    given = {name: getattr(options, option) for option, name in _SAMPLING.items()}
    given["top_k"] = _whole("top_k", options.top_k)
    limit = _whole("num_predict", options.num_predict)
    seed = _whole("seed", options.seed)
    if limit is not None and limit < min(_NO_LIMIT):
        raise _invalid("options.num_predict", f"is {limit}; allowed: a number of tokens, or -1 for no limit")
    return SamplingParams(
        **{
            **_DEFAULTS,
            **defaults,
            **{name: value for name, value in given.items() if value is not None},
            "max_tokens": None if limit in _NO_LIMIT else limit,
            "seed": None if seed == _RANDOM_SEED else seed,
            "logprobs": api_request.top_logprobs if api_request.logprobs else None,
        }
    )


def _whole(option: str, value: float | None) -> int | None:
    """A whole number that may be written as 40.0."""
    if value is None or isinstance(value, int):
        return value
    if not value.is_integer():
        raise _invalid(f"options.{option}", f"is {value:g}; allowed: whole numbers")
    return int(value)


def _grammar(form: str | dict[str, Any]) -> Grammar | None:
    if form == "":
        return None
    if isinstance(form, str) and form != "json":
        raise _invalid("format", f'is {form!r:.80}; allowed: "json", or a JSON schema')
    return structured.grammar_of_schema(structured.ANY_OBJECT if form == "json" else form, "format")


def _is_zero(keep_alive: float | str | None) -> bool:
    """Whether `keep_alive` asks to unload the model at once."""
    if isinstance(keep_alive, str):
        return _ZERO.fullmatch(keep_alive.strip()) is not None
    return keep_alive == 0


def _invalid(param: str, problem: str) -> ApiError:
    return refusal(f"{param} {problem}", param)
