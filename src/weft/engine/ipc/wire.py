"""The messages between the engine's process and its client, and their framing.

A frame is the length of the message in four bytes, then the message as MessagePack. The classes of `weft.request` are
sent as they are: msgspec checks types on decoding, and the classes check their values. Nothing is pickled.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import msgspec

from weft.config import ServingEngineConfig
from weft.learned_costs import LearnedCosts, LearnedText
from weft.live import LiveInfo
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
    """Base class of all messages. Messages are never changed after construction."""


# --- to the engine ------------------------------------------------------------------------------------------------


class Start(Message):
    """The first message: the backend to build and the configuration of the engine."""

    backend: str
    options: dict[str, Any]
    config: ServingEngineConfig


class Submit(Message):
    """Submits `len(handles)` of the `n` answers of a request, starting with answer number `first`.

    An answer handle is a number that the client gives to an answer. Step reports identify answers by their handles:
    with a request id for every token, a report would be ten times as long.

    The params are encoded separately. All prompts of one HTTP body share them, and they may have thousands of entries.
    The engine decodes and checks them once (`decode_params`), not for every prompt and answer.
    """

    handles: tuple[int, ...]
    request: InferenceRequest
    """The request without its parameters: its `params` are the defaults. The real ones are in the field below."""
    params: msgspec.Raw
    first: int = 0
    waited: float = 0.0
    """Seconds since the request arrived. They are subtracted from its deadline and ttft_target."""

    @classmethod
    def of(
        cls, handles: tuple[int, ...], request: InferenceRequest, first: int = 0, waited: float = 0.0
    ) -> Submit:
        params = msgspec.Raw(encode(request.params))
        return cls(handles, request.replaced(params=_NO_PARAMS), params, first, waited)

    @property
    def whole_request(self) -> InferenceRequest:
        """The request with its parameters. Its deadline and ttft_target count from this submission, not from its
        arrival."""
        times = ("deadline", "ttft_target")
        left = {
            name: max(0.0, at - self.waited)
            for name in times
            if (at := getattr(self.request, name)) is not None
        }
        return self.request.replaced(params=decode_params(bytes(self.params)), **left)

    @property
    def indices(self) -> range:
        return range(self.first, self.first + len(self.handles))


class Cancel(Message):
    """Cancels an answer. The id may have been used again for a later answer; the handle is unique."""

    request_id: RequestId
    handle: int
    reason: str | None = None


class Finish(Message):
    """Ends an answer after its first `num_tokens` tokens, because its text contains a stop string."""

    request_id: RequestId
    handle: int
    num_tokens: int


class DropDeadline(Message):
    """Removes the deadline of an answer. From now on the client watches the deadlines of the requests that share it."""

    request_id: RequestId
    handle: int


class GetMetrics(Message):
    number: int


class GetLive(Message):
    """Asks for a frame of the live page. The engine records steps and events while frames are asked for."""

    number: int


class GetLearned(Message):
    """Asks for the costs of steps that the engine has learned."""

    number: int


class GetAnswers(Message):
    """Asks for the finished answers that were learned since the last such message."""

    number: int


class RestoreAnswers(Message):
    """Finished answers of an earlier engine."""

    texts: tuple[LearnedText, ...]


class Restore(Message):
    """The costs that an earlier engine learned. They replace those of this engine, for the requests that follow."""

    costs: LearnedCosts


class Forget(Message):
    """Makes the engine forget the learned costs and all finished answers."""


class Stop(Message):
    pass


ToEngine = (
    Start
    | Submit
    | Cancel
    | Finish
    | DropDeadline
    | GetMetrics
    | GetLive
    | GetLearned
    | GetAnswers
    | RestoreAnswers
    | Restore
    | Forget
    | Stop
)


# --- from the engine ----------------------------------------------------------------------------------------------


class Heartbeat(Message):
    """Sent twice a second. `loop` changes with every step and `reader` with every message handled. Either is None while
    its thread is idle."""

    loop: int | None
    reader: int | None
    threads: tuple[int, ...]
    """Kernel ids of the threads that pass messages. Their CPU time does not show that the loop makes progress."""
    waits_for_device: bool = False
    """Whether the loop waits for a GPU now."""


class Ready(Message):
    info: BackendInfo
    max_sequence_length: int
    live: LiveInfo


class Failed(Message):
    """The engine could not be built, or failed. The process ends."""

    message: str
    exit_code: int


class Warned(Message):
    """A warning for the operator. May arrive before `Ready`."""

    message: str


class Refused(Message):
    """The engine did not accept these answers of a request."""

    handles: tuple[int, ...]
    kind: str
    """The name of the error's class in `weft.errors`."""
    message: str
    field: str = ""
    code: str = ""


class Output(msgspec.Struct, array_like=True, gc=False):
    """An output with logprobs, or the final output of an answer. Many outputs may be buffered, so the top logprobs stay
    encoded until they are read: 13 bytes per logprob instead of 130."""

    handle: int
    token_id: int | None
    logprob: float | None = None
    finish_reason: FinishReason | None = None
    encoded_top: bytes = b""

    @classmethod
    def of(cls, output: TokenOutput, handle: int) -> Output:
        top = encode(output.top_logprobs) if output.top_logprobs else b""
        return cls(handle, output.token_id, output.logprob, output.finish_reason, top)

    @property
    def read_cost(self) -> int:
        """Cost of reading this output, in units of a token without logprobs."""
        return 1 + len(self.encoded_top) // 13

    @property
    def logprobs(self) -> TokenLogprobs | None:
        if self.logprob is None:
            return None
        return TokenLogprobs(self.logprob, _decode_top(self.encoded_top) if self.encoded_top else ())

    def as_token_output(self, request_id: RequestId, sequence_length: int) -> TokenOutput:
        top = self.logprobs.top if self.logprobs is not None else ()
        reason = self.finish_reason
        return TokenOutput(
            request_id, self.token_id, "", self.logprob, reason is not None, reason, sequence_length, top
        )


class PromptLogprobs(Message):
    """Logprobs of consecutive prompt tokens, sent before the end of the answer. A long prompt has many such messages:
    decoding one large message would block the client's event loop."""

    handle: int
    encoded: bytes
    """A list of `TokenLogprobs`, to decode with `prompt_logprobs`."""


class StepReport(Message):
    """All outputs since the last report.

    The answer `handles[i]` got the token `tokens[i]`. Most outputs are only a token, and two lists of integers take a
    tenth of the time of objects. `outputs` has the outputs with logprobs and the final ones. The client handles
    `outputs` after `tokens`, so that the final output of an answer is its last.
    """

    handles: tuple[int, ...]
    tokens: tuple[int, ...]
    outputs: tuple[Output, ...]
    ended: tuple[GenerationResult, ...]
    """Results of the answers whose final outputs are in `outputs`, in the same order. They have no tokens and no
    logprobs: these were sent as outputs. The first `num_tokens` tokens of the answer belong to the result."""


class Metrics(Message):
    number: int
    metrics: ServingMetrics


class Live(Message):
    number: int
    frame: bytes
    """A `weft.live.LiveFrame` as JSON. The client passes it on as it is."""
    seconds: float
    """CPU time that the engine's process used for the frame."""


class Learned(Message):
    number: int
    costs: LearnedCosts


class Answers(Message):
    number: int
    texts: tuple[LearnedText, ...]


FromEngine = (
    Heartbeat
    | Ready
    | Failed
    | Warned
    | Refused
    | StepReport
    | PromptLogprobs
    | Metrics
    | Live
    | Learned
    | Answers
)

encode = msgspec.msgpack.Encoder().encode
to_engine = msgspec.msgpack.Decoder(ToEngine)
_params = msgspec.msgpack.Decoder(SamplingParams)
_NO_PARAMS = SamplingParams()


@lru_cache(maxsize=32)
def decode_params(content: bytes) -> SamplingParams:
    """Decodes and checks sampling parameters. Cached, so that the prompts of one HTTP body share one object."""
    return _params.decode(content)


from_engine = msgspec.msgpack.Decoder(FromEngine)
prompt_logprobs = msgspec.msgpack.Decoder(tuple[TokenLogprobs | None, ...])
_decode_top = msgspec.msgpack.Decoder(tuple[tuple[int, float], ...]).decode


def framed(message: Message) -> bytes:
    content = encode(message)
    return _LENGTH.pack(len(content)) + content


class Frames:
    """Splits received bytes into the contents of messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, received: bytes) -> Iterator[bytes]:
        """Yields the messages that are complete now. Raises ValueError if a length is over MAX_MESSAGE_BYTES."""
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
