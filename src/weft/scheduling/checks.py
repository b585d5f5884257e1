"""Rejects requests that can never run, before they are queued."""

from __future__ import annotations

from weft.config import SchedulerConfig
from weft.errors import InvalidRequestError
from weft.request import InferenceRequest


def check_request(
    request: InferenceRequest, vocabulary_size: int, max_length: int, config: SchedulerConfig
) -> None:
    """Raises InvalidRequestError if the request can never run. `max_length` limits prompt and generated tokens together."""
    prompt, params = request.prompt, request.params
    for name, tokens in (("prompt", prompt), ("prediction", request.prediction)):
        for token in (min(tokens), max(tokens)) if tokens else ():
            if not 0 <= token < vocabulary_size:
                raise InvalidRequestError(
                    f"{name} holds token id {token}; allowed: 0 to {vocabulary_size - 1}", field=name
                )
    unknown = [token for token in params.logit_bias if token >= vocabulary_size]
    if unknown:
        raise InvalidRequestError(
            f"logit_bias names token id {unknown[0]}; allowed: 0 to {vocabulary_size - 1}", field="logit_bias"
        )
    if len(prompt) >= max_length:
        raise InvalidRequestError(
            f"prompt has {len(prompt)} tokens; allowed: at most {max_length - 1}, so that one new token fits; "
            f"this model's maximum context length is {max_length} tokens here; shorten it",
            field="prompt",
            code="context_length_exceeded",
        )
    if not config.chunked_prefill and len(prompt) > config.longest_whole_prompt:
        raise InvalidRequestError(
            f"prompt has {len(prompt)} tokens; allowed: at most {config.longest_whole_prompt} in one step; "
            "shorten it, or turn chunked_prefill on",
            field="prompt",
        )
