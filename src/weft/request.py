"""Requests and results of the public API: sampling parameters, states, outputs."""

from __future__ import annotations

import hashlib
import itertools
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any, NamedTuple, NewType, TypeVar

from weft.lengths import ExpectedLength
from weft.parameters import (
    Parameter,
    check_instance,
    check_integer,
    check_number,
    check_text,
    declare,
    declared_in,
    refuse,
    token_ids,
)

RequestId = NewType("RequestId", str)
"""The one name of a request: for the caller, the engine, logs, metrics and the ids of the API."""

REQUEST_ID_PATTERN = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
REQUEST_ID_RULE = "1 to 128 of letters, digits and ._:/+=@-"

MAX_SEED = 2**63 - 1
MAX_TOKENS = 2**31 - 1
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKENS = 1024
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_N = 128
MAX_METADATA = 64
MAX_NAME_LENGTH = 256
"""Maximum length of `session_id` and `cache_salt`. They are limited because the engine keeps them after the request."""
MAX_PREDICTION = 1 << 16
"""Maximum number of tokens of a prediction."""
MAX_SECONDS = 1e9
MAX_GRAMMAR_LENGTH = 1 << 18
GRAMMAR_KINDS = ("json_schema", "regex", "choice", "lark")


class Priority(IntEnum):
    LOW = 0
    NORMAL = 1
    HIGH = 2
    CRITICAL = 3


class RequestState(Enum):
    PENDING = "pending"
    RUNNING = "running"
    PREEMPTED = "preempted"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_over(self) -> bool:
        return self in _ENDED


_ENDED = frozenset({RequestState.COMPLETED, RequestState.FAILED, RequestState.CANCELLED})


class FinishReason(Enum):
    LENGTH = "length"
    STOP = "stop"
    END_OF_SEQUENCE = "end_of_sequence"
    CANCELLED = "cancelled"
    ERROR = "error"

    @property
    def in_openai(self) -> str:
        """The finish_reason of the OpenAI API; "error" if that API has no equivalent."""
        return _OPENAI_NAMES.get(self, "error")


class FailureKind(Enum):
    """Why a request did not complete. Callers decide by this, never by the words of an error message."""

    CANCELLED = "cancelled"
    """The client or an operator cancelled the request."""
    DEADLINE = "deadline"
    NO_ALLOWED_TOKEN = "no_allowed_token"
    """The parameters or the grammar of the request forbid every next token. A retry cannot help."""
    STEP = "step"
    """The backend failed to compute the request."""
    DELIVERY = "delivery"
    """The callback or the detokenizer of the request raised an exception."""
    ENGINE = "engine"
    """The engine failed or stopped."""


class Failure(NamedTuple):
    kind: FailureKind
    message: str


_OPENAI_NAMES = {
    FinishReason.STOP: "stop",
    FinishReason.END_OF_SEQUENCE: "stop",
    FinishReason.LENGTH: "length",
}


@dataclass(frozen=True, slots=True)
class Grammar:
    """Structured output: a grammar that the whole answer must match. Errors in it are found when the engine compiles
    it."""

    kind: str
    """The kind of `definition`: "json_schema", "regex", "choice" or "lark"."""
    definition: str
    """A JSON schema, a regular expression, a JSON list of strings to choose from, or a Lark grammar for llguidance."""

    def __post_init__(self) -> None:
        if self.kind not in GRAMMAR_KINDS:
            refuse("grammar", self.kind, ", ".join(GRAMMAR_KINDS))
        check_text("grammar", self.definition)
        if len(self.definition) > MAX_GRAMMAR_LENGTH:
            refuse("grammar", f"{len(self.definition)} characters", f"at most {MAX_GRAMMAR_LENGTH}")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of a request. Names and meanings are those of vLLM and the OpenAI API.

    Filters apply in this order: temperature, top_k, top_p, min_p, typical_p, xtc.
    """

    max_tokens: int | None = 16
    """Maximum number of tokens to generate. None: until the context is full."""
    min_tokens: int = 0
    """Minimum number of tokens to generate before an end-of-sequence or stop token may be sampled."""
    temperature: float = declare(
        "Sampling temperature; 0 is greedy. Default: the value in the files of the model, else 1.",
        Parameter(1.0, 0, 100, "draw", off=(0.0,), in_generation_config=True, gguf="temp"),
    )
    top_p: float = declare(
        "Sample from the most likely tokens that together have this probability. 1: off.",
        Parameter(1.0, 0, 1, "filter", above=True, in_generation_config=True, gguf="top_p"),
    )
    top_k: int = declare(
        "Sample from this many of the most likely tokens. 0 or -1: off.",
        Parameter(0, -1, 2**31 - 1, "filter", off=(0, -1), in_generation_config=True, gguf="top_k"),
    )
    min_p: float = declare(
        "Exclude tokens with less than this fraction of the probability of the most likely token. 0: off.",
        Parameter(0.0, 0, 1, "filter", is_logarithm=True, in_generation_config=True, gguf="min_p"),
    )
    typical_p: float = declare(
        "Locally typical sampling: sample from the tokens closest to the expected surprise that together have this "
        "probability. 1: off.",
        Parameter(1.0, 0, 1, "filter", above=True, in_generation_config=True),
    )
    xtc_probability: float = declare(
        "Exclude top choices: the probability, for each token, that the most likely tokens are excluded. 0: off.",
        Parameter(0.0, 0, 1, "filter", gguf="xtc_probability"),
    )
    xtc_threshold: float = declare(
        "Exclude top choices: excludes the tokens with at least this probability, except the least likely of them.",
        Parameter(0.1, 0, 1, "filter", above=True, off=(), is_logarithm=True, gguf="xtc_threshold"),
    )
    repetition_penalty: float = declare(
        "Above 1: tokens that occur in the prompt or the answer become less likely. It scales their logits.",
        Parameter(1.0, 0, 100, "penalty", above=True, in_generation_config=True, gguf="penalty_repeat"),
    )
    frequency_penalty: float = declare(
        "Subtracted from the logit of a token once for each time that it was generated.",
        Parameter(0.0, -2, 2, "penalty"),
    )
    presence_penalty: float = declare(
        "Subtracted once from the logit of each token that was generated.",
        Parameter(0.0, -2, 2, "penalty"),
    )
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits, by token id."""
    seed: int | None = None
    """Seed of the sampling. The same seed and request give the same answer. None: a random seed."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer. The text ends before the stop string."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the answer."""
    ignore_eos: bool = False
    """Whether to continue after an end-of-sequence token."""
    logprobs: int | None = None
    """Number of top logprobs to return for each generated token. 0: only the logprob of the token itself. None:
    no logprobs."""
    prompt_logprobs: int | None = None
    """Like `logprobs`, for each prompt token but the first. The whole prompt is computed then, without prefix hits."""
    n: int = 1
    """Number of answers to the prompt. Each has its own seed (`child_seed`)."""
    grammar: Grammar | None = None
    """Structured output: only tokens that the grammar allows are sampled. The answer ends when the grammar is
    complete."""

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            check_integer("max_tokens", self.max_tokens, 1, MAX_TOKENS)
        check_integer("min_tokens", self.min_tokens, 0, self.max_tokens or MAX_TOKENS)
        for value, (name, parameter) in zip(values_of(self), PARAMETERS.items(), strict=True):
            if value is not parameter.default:
                parameter.check(name, value)
        if self.seed is not None:
            check_integer("seed", self.seed, -(2**63), MAX_SEED)
        check_integer("n", self.n, 1, MAX_N)
        check_instance("ignore_eos", self.ignore_eos, bool, "true or false")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 0, MAX_LOGPROBS)
        self._check_stops()
        self._check_logit_bias()
        if self.grammar is not None:
            check_instance("grammar", self.grammar, Grammar, "a Grammar")
            if self.ignore_eos:
                refuse("ignore_eos", True, "false with a grammar, because the grammar ends the answer")

    def _check_stops(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            if not isinstance(value, tuple | list):
                refuse(name, value, "a list")
            object.__setattr__(self, name, tuple(value))
        if len(self.stop) > MAX_STOP_STRINGS:
            refuse("stop", f"a list of {len(self.stop)}", f"at most {MAX_STOP_STRINGS} strings")
        if len(self.stop_token_ids) > MAX_STOP_TOKENS:
            refuse(
                "stop_token_ids",
                f"a list of {len(self.stop_token_ids)}",
                f"at most {MAX_STOP_TOKENS} token ids",
            )
        for text in self.stop:
            if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_LENGTH:
                refuse("stop", text, f"strings of 1 to {MAX_STOP_LENGTH} characters")
        for token in self.stop_token_ids:
            check_integer("stop_token_ids", token, 0, 2**31 - 1)

    def _check_logit_bias(self) -> None:
        if not isinstance(self.logit_bias, Mapping):
            refuse("logit_bias", self.logit_bias, "a mapping from token id to bias")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            refuse("logit_bias", f"{len(self.logit_bias)} entries", f"at most {MAX_LOGIT_BIAS} entries")
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        for token, bias in self.logit_bias.items():
            check_integer("logit_bias", token, 0, 2**31 - 1)
            check_number(f"logit_bias[{token}]", bias, -100.0, 100.0)


PARAMETERS: Mapping[str, Parameter] = declared_in(SamplingParams)
"""The table of the sampling parameters that are numbers. Samplers use its order."""
values_of: Callable[[SamplingParams], tuple[Any, ...]] = operator.attrgetter(*PARAMETERS)
"""The values of these parameters, in the same order."""

GenerateParams = SamplingParams
"""Another published name of `SamplingParams`."""


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """A request: one prompt and how to complete it. Immutable; the scheduler keeps the state of the request."""

    prompt: tuple[int, ...]
    """The token ids of the prompt."""
    params: SamplingParams = field(default_factory=SamplingParams)
    priority: Priority = Priority.NORMAL
    session_id: str | None = None
    """The conversation that the request belongs to. KV blocks of sessions are evicted last."""
    max_sequence_length: int | None = None
    """Maximum number of prompt and new tokens together. None: the model's context length."""
    ttft_target: float | None = None
    """Target for the time to first token, in seconds. The ADAPTIVE policy admits requests by it; a miss is counted."""
    deadline: float | None = None
    """Seconds after arrival at which the request is cancelled, in any state."""
    cache_salt: str = ""
    """Requests with different salts never share cached prefixes."""
    adapter_id: str = ""
    """Must be empty: adapters are not supported yet."""
    is_idle_work: bool = False
    """Whether the request uses only the capacity that other requests, called interactive, leave (contract 15). Its
    priority orders it among idle work only."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """For the caller: copied to the result, otherwise ignored."""
    request_id: RequestId = RequestId("")
    """The id of the request. "": the engine makes one when the request is submitted. It must not be the id of a request
    that has not ended, or whose last step is in flight."""
    prediction: tuple[int, ...] = ()
    """Token ids that the answer probably has, such as the text to edit. They become draft tokens where it agrees."""
    expected: ExpectedLength | None = None
    """The expected length of its answer. Policies order requests by it. None: only `max_tokens` is known."""
    learns_prompt: bool = False
    """Whether later requests with the same cache salt take draft tokens from its prompt too, not only from its answer."""

    def __post_init__(self) -> None:
        for name in ("prompt", "prediction"):
            object.__setattr__(self, name, token_ids(name, getattr(self, name)))
        if not self.prompt:
            refuse("prompt", "empty", "at least 1 token")
        if len(self.prediction) > MAX_PREDICTION:
            refuse("prediction", f"{len(self.prediction)} tokens", f"at most {MAX_PREDICTION}")
        if not isinstance(self.priority, Priority):
            if type(self.priority) is not int or self.priority not in tuple(Priority):
                refuse("priority", self.priority, ", ".join(f"{p.name} ({p.value})" for p in Priority))
            object.__setattr__(self, "priority", Priority(self.priority))
        check_text("cache_salt", self.cache_salt, MAX_NAME_LENGTH)
        if self.adapter_id != "":
            refuse("adapter_id", self.adapter_id, 'only "": weft has no adapters yet')
        check_instance("is_idle_work", self.is_idle_work, bool, "true or false")
        check_instance("learns_prompt", self.learns_prompt, bool, "true or false")
        check_instance("metadata", self.metadata, Mapping, "a mapping")
        if len(self.metadata) > MAX_METADATA:
            refuse("metadata", f"{len(self.metadata)} entries", f"at most {MAX_METADATA} entries")
        if self.expected is not None:
            check_instance("expected", self.expected, ExpectedLength, "an ExpectedLength, or None")
        if self.session_id is not None:
            check_text("session_id", self.session_id, MAX_NAME_LENGTH)
        for name in ("ttft_target", "deadline"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), 0.0, MAX_SECONDS)
        if self.max_sequence_length is not None:
            check_integer("max_sequence_length", self.max_sequence_length, 2, 2**31 - 1)
        if self.request_id != "":
            check_instance("request_id", self.request_id, str, REQUEST_ID_RULE)
            if REQUEST_ID_PATTERN.fullmatch(self.answer_id(self.params.n - 1)) is None:
                with_index = ", with the index of each answer" if self.params.n > 1 else ""
                refuse("request_id", self.request_id, REQUEST_ID_RULE + with_index)

    def answer_id(self, index: int) -> RequestId:
        """The id of answer `index`: the id of the request. With several answers, the index is appended."""
        return self.request_id if self.params.n == 1 else RequestId(f"{self.request_id}-{index}")

    def children(self, seed: int, indices: range | None = None) -> list[InferenceRequest]:
        """One request for each of the `n` answers, or for those in `indices`. `seed` is the seed of the whole request.

        Only the first one has prompt_logprobs, because they are the same for all. The requests share the lists of
        `params`.
        """
        params = self.params
        return [
            self.replaced(
                request_id=self.answer_id(index),
                params=_replaced(
                    params,
                    n=1,
                    seed=child_seed(seed, index),
                    prompt_logprobs=None if index else params.prompt_logprobs,
                ),
            )
            for index in (range(params.n) if indices is None else indices)
        ]

    def replaced(self, **fields: Any) -> InferenceRequest:
        """Like `dataclasses.replace`, without validating again: prompts are long, and a request may have many
        answers."""
        return _replaced(self, **fields)


_Frozen = TypeVar("_Frozen", SamplingParams, InferenceRequest)


def _replaced(original: _Frozen, **fields: Any) -> _Frozen:
    other = object.__new__(type(original))
    for name in original.__slots__:
        object.__setattr__(other, name, fields[name] if name in fields else getattr(original, name))
    return other


def numbered_ids() -> Callable[[], RequestId]:
    """A generator of the ids "0", "1", "2", ... With it a simulation or a test is the same in every run."""
    return map(RequestId, map(str, itertools.count())).__next__


def child_seed(seed: int, index: int) -> int:
    """The seed of answer `index`. Answer 0 keeps the seed of the request, so a larger `n` does not change it."""
    if index == 0:
        return seed
    digest = hashlib.sha256(b"%d:%d" % (seed, index)).digest()
    return int.from_bytes(digest[:8], "little") & MAX_SEED


class TokenLogprobs(NamedTuple):
    """The logprob of one token and the top logprobs at its position, before any sampling parameter is applied."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob), most likely first; as many as the request asks for."""


class TokenOutput(NamedTuple):
    """One generated token of a request."""

    request_id: RequestId
    token_id: int | None
    """None if the request ended without a token in this output."""
    text: str
    """Text that this token adds. Incomplete characters, and text that may begin a stop string, come with a later token.
    "" if the engine has no tokenizer."""
    logprob: float | None
    is_final: bool
    """Whether this is the last output of the request."""
    finish_reason: FinishReason | None
    """Why the request ended. None in all outputs but the last."""
    sequence_length: int
    """Prompt and generated tokens so far."""
    top_logprobs: tuple[tuple[int, float], ...] = ()
    """(token id, logprob), most likely first."""


class PreemptedTime(NamedTuple):
    """The time from a preemption until the request ran again, or ended. Both ends are seconds since its arrival."""

    began: float
    ended: float
    by_swap: bool
    """Whether the request resumed from swap. False: by recompute."""


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """The result of a request. Times are in seconds."""

    request_id: RequestId
    tokens: tuple[int, ...]
    """The generated token ids."""
    text: str
    """The generated text; "" if the engine has no tokenizer."""
    state: RequestState
    finish_reason: FinishReason
    error: str | None
    """Why the request failed or was cancelled."""
    waiting_time: float
    """Time in the queue, also after preemptions."""
    prefill_time: float
    """Time between admission and the next token, also after preemptions."""
    decode_time: float
    """Time from admission to the end, without `prefill_time` and without time in the queue."""
    time_to_first_token: float | None
    decode_steps: int
    """The number of generated tokens after the first one."""
    prompt_token_count: int
    cached_token_count: int
    """Prompt tokens that were prefix hits."""
    preemptions: int
    """How often the request was preempted."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One for each generated token, if the request asks for them."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """One for each prompt token, if the request asks for them. The first is None: no token precedes it."""
    siblings: tuple[GenerationResult, ...] = ()
    """The results of the other answers of the request, if its `n` is above 1."""
    num_tokens: int | None = None
    """Number of generated tokens, if `tokens` was left out. None: `len(tokens)`."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The metadata of the request."""
    failure: FailureKind | None = None
    """Why the request did not complete; `error` has the words. None if it completed."""
    stop_string: str | None = None
    """The stop string that ended the answer."""
    accepted_prediction_count: int = 0
    """Draft tokens from the prediction of the request that were accepted."""
    rejected_prediction_count: int = 0
    """Draft tokens from the prediction that steps checked and rejected."""
    preempted_times: tuple[PreemptedTime, ...] = ()
    """One for each preemption. Their seconds are in `waiting_time` too."""
    vector: bytes | None = None
    """The vector of the prompt, if the model makes one: float32, little-endian. Its `tokens` mean nothing."""

    @property
    def choices(self) -> tuple[GenerationResult, ...]:
        """All answers to the prompt, this one first."""
        return (self, *self.siblings)

    @property
    def completion_token_count(self) -> int:
        return len(self.tokens) if self.num_tokens is None else self.num_tokens

    @property
    def total_time(self) -> float:
        return self.waiting_time + self.prefill_time + self.decode_time

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Tokens per second after the first token. None if there is only one token."""
        if self.decode_time <= 0 or self.decode_steps == 0:
            return None
        return self.decode_steps / self.decode_time


CompletedRequest = GenerationResult
"""Another published name of `GenerationResult`."""
