"""Formats results as JSON: weft's own lines, and the objects of the OpenAI API."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from weft.cli.lines import Line
from weft.errors import InvalidRequestError, WeftError
from weft.request import GenerationResult, RequestState

if TYPE_CHECKING:
    from weft.text.tokenizer import Tokenizer


def error_of(result: GenerationResult) -> WeftError | None:
    """The error of a result; None if all its answers are complete."""
    for choice in result.choices:
        if choice.state is not RequestState.COMPLETED:
            return WeftError(choice.error or f"it was {choice.state.value}")
    return None


def id_of_request(result: GenerationResult) -> str:
    """The id of the request of a result. With several answers, the result has the id of the first one."""
    return result.request_id.removesuffix("-0") if result.siblings else result.request_id


def answer(line: Line, result: GenerationResult, tokenizer: Tokenizer, model: str) -> dict[str, Any]:
    """The output line for a complete result."""
    if line.form == "plain":
        return {**_name(line), **_plain(result, tokenizer)}
    body = _body(line, result, tokenizer, model)
    return _openai_line(line, {"status_code": 200, "request_id": id_of_request(result), "body": body}, None)


def error_answer(line: Line, error: WeftError, request_id: str = "") -> dict[str, Any]:
    """The output line for an input line that failed. `request_id` "": no request was made of the line."""
    is_client_error = isinstance(error, InvalidRequestError)
    details: dict[str, Any] = {
        "message": str(error),
        "type": "invalid_request_error" if is_client_error else "server_error",
        "param": error.field or None if isinstance(error, InvalidRequestError) else None,
        "code": error.code if isinstance(error, InvalidRequestError) else "failed",
    }
    if line.form == "plain":
        return {**_name(line), "error": {**details, "line": line.index + 1}}
    if line.identifier is None:
        # The line has no custom_id, so the message names the line.
        message = f"line {line.index + 1}: {error}"
        return _openai_line(line, None, {"code": details["code"], "message": message})
    response = {
        "status_code": 400 if is_client_error else 500,
        "request_id": request_id,
        "body": {"error": details},
    }
    return _openai_line(line, response, None)


def _name(line: Line) -> dict[str, Any]:
    return {"index": line.index} | ({} if line.identifier is None else {"id": line.identifier})


def _openai_line(line: Line, response: object, error: object) -> dict[str, Any]:
    return {
        "id": f"batch_req_{line.index}",
        "custom_id": line.identifier,
        "response": response,
        "error": error,
    }


def _plain(result: GenerationResult, tokenizer: Tokenizer) -> dict[str, Any]:
    choices = []
    for choice in result.choices:
        one: dict[str, Any] = {"text": choice.text, "finish_reason": choice.finish_reason.in_openai}
        if choice.logprobs is not None:
            one["logprobs"] = _chat_logprobs(choice, tokenizer)
        choices.append(one)
    several = choices[0] if len(choices) == 1 else {"choices": choices}
    prompt = {}
    if result.prompt_logprobs is not None:
        prompt["prompt_logprobs"] = [None if one is None else one.logprob for one in result.prompt_logprobs]
    return {**several, **prompt, "usage": _usage(result)}


def _body(line: Line, result: GenerationResult, tokenizer: Tokenizer, model: str) -> dict[str, Any]:
    """The body of the response that the server would send."""
    is_chat = line.form == "chat"
    choices: list[dict[str, Any]] = []
    for index, choice in enumerate(result.choices):
        one: dict[str, Any] = {
            "index": index,
            "finish_reason": choice.finish_reason.in_openai,
            "logprobs": None,
        }
        if is_chat:
            one["message"] = {"role": "assistant", "content": choice.text, "refusal": None}
        else:
            one["text"] = choice.text
        if choice.logprobs is not None:
            in_form = _chat_logprobs if is_chat else _completion_logprobs
            one["logprobs"] = in_form(choice, tokenizer)
        choices.append(one)
    return {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{id_of_request(result)}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": _usage(result),
    }


def _usage(result: GenerationResult) -> dict[str, Any]:
    prompt, completion = result.prompt_token_count, sum(len(choice.tokens) for choice in result.choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": result.cached_token_count},
    }


def _chat_logprobs(choice: GenerationResult, tokenizer: Tokenizer) -> dict[str, Any]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        content = tokenizer.token_bytes(token)
        return {"token": content.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(content)}

    return {
        "content": [
            {**entry(token, one.logprob), "top_logprobs": [entry(*other) for other in one.top]}
            for token, one in zip(choice.tokens, choice.logprobs or (), strict=True)
        ]
    }


def _completion_logprobs(choice: GenerationResult, tokenizer: Tokenizer) -> dict[str, Any]:
    """The format of /v1/completions: parallel lists, with the position of each token in the text."""
    texts = [tokenizer.token_text(token) for token in choice.tokens]
    offsets = [0]
    for text in texts:
        offsets.append(offsets[-1] + len(text))
    each = choice.logprobs or ()
    return {
        "tokens": texts,
        "token_logprobs": [one.logprob for one in each],
        "top_logprobs": [
            # The sampled token is included even if it is not among the top logprobs.
            {tokenizer.token_text(token): logprob for token, logprob in one.top} | {text: one.logprob}
            for text, one in zip(texts, each, strict=True)
        ],
        "text_offset": offsets[:-1],
    }
