"""What can never run is refused before it waits, saying both numbers."""

from __future__ import annotations

from weft.config import SchedulerConfig
from weft.errors import InvalidRequestError
from weft.request import InferenceRequest


def check_request(request: InferenceRequest, vocabulary: int, longest: int, config: SchedulerConfig) -> None:
    """Raises InvalidRequestError; `longest` is how many tokens the request's sequence may grow to."""
    prompt, params = request.prompt, request.params
    for token in (min(prompt), max(prompt)):
        if not 0 <= token < vocabulary:
            raise InvalidRequestError(
                f"prompt holds token id {token}; allowed: 0 to {vocabulary - 1}", field="prompt"
            )
    beyond = [token for token in params.logit_bias if token >= vocabulary]
    if beyond:
        raise InvalidRequestError(
            f"logit_bias names token id {beyond[0]}; allowed: 0 to {vocabulary - 1}", field="logit_bias"
        )
    if len(prompt) >= longest:
        raise InvalidRequestError(
            f"prompt has {len(prompt)} tokens; allowed: at most {longest - 1}, so that one new token fits; "
            f"this model's maximum context length is {longest} tokens here; shorten it",
            field="prompt",
            code="context_length_exceeded",
        )
    if not config.chunked_prefill and len(prompt) > config.longest_whole_prompt:
        raise InvalidRequestError(
            f"prompt has {len(prompt)} tokens; allowed: at most {config.longest_whole_prompt} in one step; "
            "shorten it, or turn chunked_prefill on",
            field="prompt",
        )
