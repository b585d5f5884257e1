"""What the engine's process and its client say to each other: messages, and how they are cut out of a stream of bytes.

A message is MessagePack behind its length in four bytes. The vocabulary itself travels: msgspec checks types when it
decodes, and the classes of `weft.request` their own values. Nothing is pickled.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import msgspec

from weft.config import ServingEngineConfig
from weft.metrics import ServingMetrics
from weft.plan import BackendInfo
from weft.request import (
    FinishReason,
    GenerationResult,
    InferenceRequest,
    RequestId,
    SamplingParams,
    TokenLogprobs,
    TokenOutput,
)

_LENGTH = struct.Struct("<I")
MAX_MESSAGE_BYTES = 1 << 30


class Message(msgspec.Struct, array_like=True, tag=True):
    """What all messages share; none is changed once it was made."""


# --- to the engine ------------------------------------------------------------------------------------------------


class Start(Message):
    """The first message: which backend to build, and the engine around it."""

    backend: str
    options: dict[str, Any]
    config: ServingEngineConfig


class Submit(Message):
    """Answers to a request: as many as there are `ids`, the client's names for them, from number `first` of its `n` on.

    The params travel beside the request. They are the same for all prompts of one body, and may hold thousands of
    entries: the engine decodes and checks them once (`decode_params`), not for every prompt and every answer.
    """

    ids: tuple[int, ...]
    request: InferenceRequest
    """Without its params."""
    params: msgspec.Raw
    first: int = 0
    waited: float = 0.0
    """Seconds since the request arrived: its deadline and ttft_target count from there."""

    @classmethod
    def of(
        cls, ids: tuple[int, ...], request: InferenceRequest, first: int = 0, waited: float = 0.0
    ) -> Submit:
        params = msgspec.Raw(encode(request.params))
        return cls(ids, request.replaced(params=_NO_PARAMS), params, first, waited)

    @property
    def whole_request(self) -> InferenceRequest:
        times = ("deadline", "ttft_target")
        left = {
            name: max(0.0, at - self.waited)
            for name in times
            if (at := getattr(self.request, name)) is not None
        }
        return self.request.replaced(params=decode_params(bytes(self.params)), **left)


class Cancel(Message):
    id: int
    reason: str | None = None


class Finish(Message):
    """A stop was found in the text: the answer is complete after this many tokens."""

    id: int
    num_tokens: int


class AskMetrics(Message):
    number: int


class Stop(Message):
    pass


ToEngine = Start | Submit | Cancel | Finish | AskMetrics | Stop


# --- from the engine ----------------------------------------------------------------------------------------------


class Beat(Message):
    """Sent all the time. A number is None while its thread waits for work; else it changes with each piece of work done."""

    loop: int | None
    reader: int | None
    threads: tuple[int, ...]
    """The kernel's ids of threads that pass messages: what they do is no sign that the loop works."""


class Ready(Message):
    info: BackendInfo
    max_sequence_length: int


class Failed(Message):
    """The engine could not be built, or broke down; the process ends."""

    message: str
    exit_code: int


class Warned(Message):
    """For the operator; may come before `Ready`."""

    message: str


class Refused(Message):
    """A request that was not taken in."""

    ids: tuple[int, ...]
    kind: str
    """The name of the error's class in `weft.errors`."""
    message: str
    field: str = ""
    code: str = ""


class Output(msgspec.Struct, array_like=True, gc=False):
    """An output with more than a token: it has logprobs, or is the last. Many of them may wait on both sides, so the
    likeliest tokens stay encoded: 13 bytes each instead of 130."""

    request_id: int
    token_id: int | None
    logprob: float | None = None
    finish_reason: FinishReason | None = None
    encoded_top: bytes = b""

    @classmethod
    def of(cls, output: TokenOutput, name: int) -> Output:
        top = encode(output.top_logprobs) if output.top_logprobs else b""
        return cls(name, output.token_id, output.logprob, output.finish_reason, top)

    @property
    def effort(self) -> int:
        """What reading it costs, in tokens without logprobs."""
        return 1 + len(self.encoded_top) // 13

    @property
    def logprobs(self) -> TokenLogprobs | None:
        if self.logprob is None:
            return None
        return TokenLogprobs(self.logprob, _decode_top(self.encoded_top) if self.encoded_top else ())

    def as_token_output(self, sequence_length: int) -> TokenOutput:
        top = self.logprobs.top if self.logprobs is not None else ()
        reason = self.finish_reason
        request_id = RequestId(self.request_id)
        return TokenOutput(
            request_id, self.token_id, "", self.logprob, reason is not None, reason, sequence_length, top
        )


class PromptLogprobs(Message):
    """The logprobs of the next tokens of an answer's prompt. They come before its end. A long prompt has many such messages:
    decoding a single one would block the client's event loop."""

    id: int
    encoded: bytes
    """For `prompt_logprobs`."""


class StepReport(Message):
    """What happened since the last one. Ids are the client's.

    Most outputs are a token and no more; they come as two columns, which cost a tenth. `outputs` are those that say more
    (logprobs, an end) and come after them: what one request has of both kinds ends with its end.
    """

    ids: tuple[int, ...]
    tokens: tuple[int, ...]
    outputs: tuple[Output, ...]
    ended: tuple[GenerationResult, ...]
    """Without tokens and logprobs, which the outputs have: `num_tokens` is how many of them belong to the result."""


class Metrics(Message):
    number: int
    metrics: ServingMetrics


FromEngine = Beat | Ready | Failed | Warned | Refused | StepReport | PromptLogprobs | Metrics

encode = msgspec.msgpack.Encoder().encode
to_engine = msgspec.msgpack.Decoder(ToEngine)
_params = msgspec.msgpack.Decoder(SamplingParams)
_NO_PARAMS = SamplingParams()


@lru_cache(maxsize=32)
def decode_params(content: bytes) -> SamplingParams:
    """The same object for the same content, as long as few others come in between: prompts of one body share it."""
    return _params.decode(content)


from_engine = msgspec.msgpack.Decoder(FromEngine)
prompt_logprobs = msgspec.msgpack.Decoder(tuple[TokenLogprobs | None, ...])
_decode_top = msgspec.msgpack.Decoder(tuple[tuple[int, float], ...]).decode


def framed(message: Message) -> bytes:
    content = encode(message)
    return _LENGTH.pack(len(content)) + content


class Frames:
    """Cuts what was received into the contents of messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, received: bytes) -> Iterator[bytes]:
        """The messages that are complete now. Raises ValueError for a length no message has."""
        self._buffer += received
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            if length > MAX_MESSAGE_BYTES:
                raise ValueError(f"a message of {length} bytes; allowed: {MAX_MESSAGE_BYTES}")
            end = start + _LENGTH.size + length
            if end > len(self._buffer):
                break
            yield bytes(self._buffer[start + _LENGTH.size : end])
            start = end
        del self._buffer[:start]
