"""Converts fields of a body into the input of the engine: sampling parameters and priority."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weft.request import PARAMETERS, InferenceRequest, Priority, RequestId, SamplingParams
from weft.server.admission.keys import ApiKey
from weft.server.api.answer_format import ParsedRequest
from weft.server.api.schema import GenerationRequest
from weft.server.errors import ApiError, refusal

_SAMPLING = ("n", "max_tokens", "min_tokens", *PARAMETERS, "seed", "stop", "stop_token_ids", "ignore_eos")


def sampling_params(
    api_request: GenerationRequest,
    generation_defaults: Mapping[str, Any],
    *,
    default_max_tokens: int | None = None,
    **more: Any,
) -> SamplingParams:
    """The sampling parameters: the value of the request, else the generation default of the model, else the default of
    the API. `more` has values of fields that only one format has."""
    values = ((name, getattr(api_request, name)) for name in _SAMPLING)
    given = {name: value for name, value in values if value is not None}
    if api_request.logit_bias is not None:
        given["logit_bias"] = {_token_id(token): bias for token, bias in api_request.logit_bias.items()}
    return SamplingParams(**{"max_tokens": default_max_tokens, **generation_defaults, **given, **more})


def _token_id(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 10:
        raise refusal(f"logit_bias has the key {text!r:.80}; allowed: token ids", "logit_bias")
    return int(text)


def priority_of(api_request: GenerationRequest) -> Priority | int:
    """Converts the name of a priority. `InferenceRequest` checks numbers."""
    if isinstance(api_request.priority, int):
        return api_request.priority
    try:
        return Priority[api_request.priority.upper()]
    except KeyError:
        names = ", ".join(priority.name.lower() for priority in Priority)
        raise refusal(f"priority is {api_request.priority!r:.80}; allowed: {names}", "priority") from None


def inference_request(
    parsed: ParsedRequest,
    prompt: Sequence[int],
    params: SamplingParams,
    key: ApiKey | None,
    request_id: RequestId,
    prediction: Sequence[int] = (),
    *,
    is_idle_work: bool = False,
) -> InferenceRequest:
    """The request for the engine. Raises a 403 if `key` may not use its priority, or may not let prompts be learned."""
    request = InferenceRequest(
        tuple(prompt),
        params,
        priority=Priority.LOW if is_idle_work else parsed.priority,  # type: ignore[arg-type]
        session_id=parsed.session_id,
        max_sequence_length=parsed.max_context,
        ttft_target=parsed.ttft_target,
        deadline=parsed.deadline,
        cache_salt=key.salt_for(parsed.cache_salt) if key else parsed.cache_salt,
        is_idle_work=is_idle_work,
        request_id=request_id,
        prediction=tuple(prediction),
        learns_prompt=parsed.learn_prompt,
    )
    if request.learns_prompt and key is not None and not key.learn_prompts:
        raise ApiError(
            403,
            f"learn_prompt is true; the key {key.name!r} does not allow it; leave it out, or set learn_prompts = true at the key",
            param="learn_prompt",
            code="learn_prompt_not_allowed",
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
