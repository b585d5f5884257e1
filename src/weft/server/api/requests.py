"""Converts a parsed body into the input of the engine: sampling parameters, prompts, priority."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weft.request import MAX_LOGIT_BIAS, PARAMETERS, InferenceRequest, Priority, RequestId, SamplingParams
from weft.server.admission.keys import ApiKey
from weft.server.api.schema import ChatRequest, CompletionRequest, GenerationRequest
from weft.server.errors import ApiError

_SAMPLING = ("n", "max_tokens", "min_tokens", *PARAMETERS, "seed", "stop", "stop_token_ids", "ignore_eos")

Prompt = str | list[int]


def sampling_params(api_request: GenerationRequest, generation_defaults: Mapping[str, Any]) -> SamplingParams:
    """The sampling parameters: values of the request, else the generation defaults of the model, else of the API."""
    values = ((name, getattr(api_request, name)) for name in _SAMPLING)
    given = {name: value for name, value in values if value is not None}
    if api_request.logit_bias is not None:
        if len(api_request.logit_bias) > MAX_LOGIT_BIAS:  # before each entry is converted
            message = (
                f"logit_bias has {len(api_request.logit_bias)} entries; allowed: at most {MAX_LOGIT_BIAS}"
            )
            raise ApiError(400, message, param="logit_bias", code="invalid_value")
        given["logit_bias"] = {_token_id(token): bias for token, bias in api_request.logit_bias.items()}
    max_tokens = None
    if isinstance(api_request, ChatRequest):
        given |= _chat_parameters(api_request)
    elif isinstance(api_request, CompletionRequest):
        max_tokens = 16
        given["logprobs"] = api_request.logprobs
        given["prompt_logprobs"] = api_request.logprobs if api_request.echo else None
    return SamplingParams(**{"max_tokens": max_tokens, **generation_defaults, **given})


def _chat_parameters(api_request: ChatRequest) -> dict[str, Any]:
    given: dict[str, Any] = {}
    if api_request.max_completion_tokens is not None:
        if api_request.max_tokens not in (None, api_request.max_completion_tokens):
            raise ApiError(
                400,
                f"max_tokens is {api_request.max_tokens} and max_completion_tokens is "
                f"{api_request.max_completion_tokens}; send one of them",
                param="max_completion_tokens",
                code="invalid_value",
            )
        given["max_tokens"] = api_request.max_completion_tokens
    if api_request.logprobs:
        given["logprobs"] = api_request.top_logprobs or 0
    elif api_request.top_logprobs:
        raise ApiError(
            400,
            "top_logprobs needs logprobs; send logprobs: true too",
            param="top_logprobs",
            code="invalid_value",
        )
    return given


def _token_id(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 10:
        raise ApiError(
            400,
            f"logit_bias has the key {text!r:.80}; allowed: token ids",
            param="logit_bias",
            code="invalid_value",
        )
    return int(text)


def priority_of(api_request: GenerationRequest) -> Priority | int:
    """Converts the name of a priority. `InferenceRequest` checks numbers."""
    if isinstance(api_request.priority, int):
        return api_request.priority
    try:
        return Priority[api_request.priority.upper()]
    except KeyError:
        names = ", ".join(priority.name.lower() for priority in Priority)
        raise ApiError(
            400,
            f"priority is {api_request.priority!r:.80}; allowed: {names}",
            param="priority",
            code="invalid_value",
        ) from None


def prompts_of(api_request: CompletionRequest, max_answers: int) -> list[Prompt]:
    """The prompts of a completion. A prompt is text or a list of token ids; the field may be a list of prompts."""
    prompt = api_request.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise ApiError(
            400, "prompt is empty; send text, or at least one token", param="prompt", code="invalid_value"
        )
    if _are_tokens(prompt):
        _check_ids(prompt, "prompt")
        return [prompt]
    if len(prompt) * (api_request.n or 1) > max_answers:
        raise ApiError(
            400,
            f"prompt has {len(prompt)} entries and n is {api_request.n or 1}; "
            f"allowed: {max_answers} answers in one request",
            param="prompt",
            code="invalid_value",
        )
    for index, one in enumerate(prompt):
        if isinstance(one, list) and _are_tokens(one):
            _check_ids(one, f"prompt[{index}]")
        elif not isinstance(one, str):
            raise ApiError(
                400,
                f"prompt[{index}] is neither text nor a list of token ids",
                param=f"prompt[{index}]",
                code="invalid_type",
            )
    return list(prompt)


def _are_tokens(prompt: list[Any]) -> bool:
    return set(map(type, prompt)) <= {int}  # a Python loop over 250,000 ids would block the event loop


def _check_ids(tokens: Sequence[int], param: str) -> None:
    """Refuses ids that do not fit a message to the engine. The engine checks ids against the vocabulary."""
    for token in (min(tokens), max(tokens)) if tokens else ():
        if not 0 <= token < 2**31:
            raise ApiError(
                400, f"{param} holds {token!r:.80}; allowed: token ids", param=param, code="invalid_value"
            )


def check_completion(api_request: CompletionRequest) -> None:
    """Refuses fields of completions that weft does not support."""
    if api_request.suffix:
        raise ApiError(
            400,
            "suffix is not supported: weft only continues a prompt; leave it out",
            param="suffix",
            code="unsupported",
        )
    if api_request.best_of not in (None, api_request.n or 1):
        raise ApiError(
            400,
            f"best_of is {api_request.best_of} and n is {api_request.n or 1}; "
            "allowed: the same value, since all answers are returned",
            param="best_of",
            code="unsupported",
        )
    if api_request.echo and api_request.stream and api_request.logprobs is not None:
        raise ApiError(
            400,
            "echo with logprobs cannot be streamed: the logprobs of the prompt are known at the end; leave out stream",
            param="echo",
            code="unsupported",
        )


def inference_request(
    api_request: GenerationRequest,
    prompt: Sequence[int],
    params: SamplingParams,
    key: ApiKey | None,
    request_id: RequestId,
) -> InferenceRequest:
    """The request for the engine. Raises a 403 if `key` may not use its priority."""
    request = InferenceRequest(
        tuple(prompt),
        params,
        priority=priority_of(api_request),  # type: ignore[arg-type]
        session_id=api_request.session_id,
        ttft_target=api_request.ttft_target,
        deadline=api_request.deadline,
        cache_salt=key.salt_for(api_request.cache_salt) if key else api_request.cache_salt,
        request_id=request_id,
    )
    if key is not None and request.priority > key.max_priority:
        raise ApiError(
            403,
            f"priority is {request.priority.name.lower()}; allowed for the key {key.name!r}: "
            f"at most {key.max_priority.name.lower()}",
            param="priority",
            code="priority_not_allowed",
        )
    return request
