"""What a request is: its parameters, its states, and what comes back. The vocabulary of the public API."""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any, NamedTuple, NewType, TypeVar

from weft.errors import InvalidRequestError

RequestId = NewType("RequestId", int)

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
"""Characters of `session_id` and `cache_salt`: the engine keeps them after the request."""
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
        return self in _OVER


_OVER = frozenset({RequestState.COMPLETED, RequestState.FAILED, RequestState.CANCELLED})


class FinishReason(Enum):
    LENGTH = "length"
    STOP = "stop"
    END_OF_SEQUENCE = "end_of_sequence"
    CANCELLED = "cancelled"
    ERROR = "error"

    @property
    def in_openai(self) -> str:
        """What the OpenAI API calls it; "error" for what it has no word for."""
        return _IN_OPENAI.get(self, "error")


_IN_OPENAI = {
    FinishReason.STOP: "stop",
    FinishReason.END_OF_SEQUENCE: "stop",
    FinishReason.LENGTH: "length",
}


def _refuse(name: str, value: object, allowed: str) -> None:
    try:
        shown = repr(value)
    except ValueError:  # Python refuses to print whole numbers of thousands of digits
        shown = "a huge number"
    if len(shown) > 80:
        shown = shown[:77] + "..."
    raise InvalidRequestError(f"{name} is {shown}; allowed: {allowed}", field=name)


def _number(name: str, value: object, low: float, high: float, *, above: bool = False) -> None:
    """Refuses anything but a finite number in low..high (or strictly above `low`)."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and -math.inf < value < math.inf
    if not good or not (low < value if above else low <= value) or not value <= high:  # type: ignore[operator]
        _refuse(name, value, f"{'above' if above else 'from'} {low:g}, up to {high:g}")


def _integer(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        _refuse(name, value, f"a whole number from {low} to {high}")


def _instance(name: str, value: object, kind: type, allowed: str) -> None:
    if not isinstance(value, kind):
        _refuse(name, value, allowed)


def _text(name: str, value: object, most: int | None = None) -> None:
    """Refuses what is not text, text that cannot be written down (half a surrogate pair), and more than `most`
    characters."""
    try:
        assert isinstance(value, str)
        value.encode()
    except (AssertionError, UnicodeEncodeError):
        _refuse(name, value, "a string of Unicode text")
    if most is not None and len(value) > most:  # type: ignore[arg-type]
        _refuse(name, f"{len(value)} characters", f"at most {most}")  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must look like, from its first token to its last. Checked in full where it is compiled."""

    kind: str
    definition: str
    """A JSON schema, a regular expression, a JSON list of strings to choose from, or a grammar in llguidance's Lark."""

    def __post_init__(self) -> None:
        if self.kind not in GRAMMAR_KINDS:
            _refuse("grammar", self.kind, ", ".join(GRAMMAR_KINDS))
        _text("grammar", self.definition)
        if len(self.definition) > MAX_GRAMMAR_LENGTH:
            _refuse("grammar", f"{len(self.definition)} characters", f"at most {MAX_GRAMMAR_LENGTH}")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen and when to stop. The only place where these values are checked."""

    max_tokens: int | None = 16
    """None: as many as the context has room for."""
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: off."""
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """How many of the likeliest tokens to tell beside each generated one; 0: that one's logprob alone."""
    prompt_logprobs: int | None = None
    """The same for each token of the prompt but the first. Such a prompt is computed in full: no prefix hits."""
    n: int = 1
    """Answers to the same prompt, each with a seed of its own (`child_seed`)."""
    grammar: Grammar | None = None
    """Only tokens that it allows are chosen; the answer ends where it is complete."""

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, MAX_TOKENS)
        _integer("min_tokens", self.min_tokens, 0, self.max_tokens or MAX_TOKENS)
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0, above=True)
        _integer("top_k", self.top_k, -1, 2**31 - 1)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("typical_p", self.typical_p, 0.0, 1.0, above=True)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, above=True)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), MAX_SEED)
        _integer("n", self.n, 1, MAX_N)
        _instance("ignore_eos", self.ignore_eos, bool, "true or false")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, MAX_LOGPROBS)
        self._check_stops()
        self._check_logit_bias()
        if self.grammar is not None:
            _instance("grammar", self.grammar, Grammar, "a Grammar")
            if self.ignore_eos:
                _refuse("ignore_eos", True, "false beside a grammar, which says where an answer ends")

    def _check_stops(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            if not isinstance(value, tuple | list):
                _refuse(name, value, "a list")
            object.__setattr__(self, name, tuple(value))
        if len(self.stop) > MAX_STOP_STRINGS:
            _refuse("stop", f"a list of {len(self.stop)}", f"at most {MAX_STOP_STRINGS} strings")
        if len(self.stop_token_ids) > MAX_STOP_TOKENS:
            _refuse(
                "stop_token_ids",
                f"a list of {len(self.stop_token_ids)}",
                f"at most {MAX_STOP_TOKENS} token ids",
            )
        for text in self.stop:
            if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_LENGTH:
                _refuse("stop", text, f"strings of 1 to {MAX_STOP_LENGTH} characters")
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, 2**31 - 1)

    def _check_logit_bias(self) -> None:
        if not isinstance(self.logit_bias, Mapping):
            _refuse("logit_bias", self.logit_bias, "a mapping from token id to bias")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            _refuse("logit_bias", f"{len(self.logit_bias)} entries", f"at most {MAX_LOGIT_BIAS} entries")
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        for token, bias in self.logit_bias.items():
            _integer("logit_bias", token, 0, 2**31 - 1)
            _number(f"logit_bias[{token}]", bias, -100.0, 100.0)


GenerateParams = SamplingParams
"""The published name of the same thing."""


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """One prompt to complete. Frozen: what happens to it is kept by the scheduler, not here."""

    prompt: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    priority: Priority = Priority.NORMAL
    session_id: str | None = None
    max_sequence_length: int | None = None
    """Prompt and new tokens together; None: the model's context."""
    ttft_target: float | None = None
    """Seconds to the first token that the client hopes for: orders admission (ADAPTIVE), counted when missed."""
    deadline: float | None = None
    """Seconds after arrival at which the request ends, wherever it is."""
    cache_salt: str = ""
    """Requests with different salts never share cached prefixes."""
    adapter_id: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The caller's own: it comes back in the result, and decides nothing."""

    def __post_init__(self) -> None:
        try:
            prompt = tuple(self.prompt)
            kinds = set(map(type, prompt))
            if bool in kinds:
                raise TypeError
            # Nearly always they are plain numbers, and prompts are long.
            object.__setattr__(
                self, "prompt", prompt if kinds == {int} else tuple(map(operator.index, prompt))
            )
        except TypeError:
            _refuse("prompt", self.prompt, "a list of token ids (whole numbers)")
        if not self.prompt:
            _refuse("prompt", "empty", "at least 1 token")
        if not isinstance(self.priority, Priority):
            if type(self.priority) is not int or self.priority not in tuple(Priority):
                _refuse("priority", self.priority, ", ".join(f"{p.name} ({p.value})" for p in Priority))
            object.__setattr__(self, "priority", Priority(self.priority))
        _text("cache_salt", self.cache_salt, MAX_NAME_LENGTH)
        if self.adapter_id != "":
            _refuse("adapter_id", self.adapter_id, 'only "": weft has no adapters yet')
        _instance("metadata", self.metadata, Mapping, "a mapping")
        if len(self.metadata) > MAX_METADATA:
            _refuse("metadata", f"{len(self.metadata)} entries", f"at most {MAX_METADATA} entries")
        if self.session_id is not None:
            _text("session_id", self.session_id, MAX_NAME_LENGTH)
        for name in ("ttft_target", "deadline"):
            if getattr(self, name) is not None:
                _number(name, getattr(self, name), 0.0, MAX_SECONDS)
        if self.max_sequence_length is not None:
            _integer("max_sequence_length", self.max_sequence_length, 2, 2**31 - 1)

    def children(self, seed: int, indices: range | None = None) -> list[InferenceRequest]:
        """One request for each of the `n` answers, or for those in `indices`, given the seed of the whole. The prompt's
        logprobs, which are the same for all, are left to the first. All share the lists of the params."""
        params = self.params
        return [
            self.replaced(
                params=_replaced(
                    params,
                    n=1,
                    seed=child_seed(seed, index),
                    prompt_logprobs=None if index else params.prompt_logprobs,
                )
            )
            for index in (range(params.n) if indices is None else indices)
        ]

    def replaced(self, **fields: Any) -> InferenceRequest:
        """As `dataclasses.replace` for values that were checked. Nothing is checked again: prompts and lists are long,
        and a request may have many answers."""
        return _replaced(self, **fields)


_Frozen = TypeVar("_Frozen", SamplingParams, InferenceRequest)


def _replaced(original: _Frozen, **fields: Any) -> _Frozen:
    other = object.__new__(type(original))
    for name in original.__slots__:
        object.__setattr__(other, name, fields[name] if name in fields else getattr(original, name))
    return other


def child_seed(seed: int, index: int) -> int:
    """The seed of answer `index` of several: the first keeps the seed, so that asking for more changes nothing."""
    if index == 0:
        return seed
    digest = hashlib.sha256(b"%d:%d" % (seed, index)).digest()
    return int.from_bytes(digest[:8], "little") & MAX_SEED


class TokenLogprobs(NamedTuple):
    """How likely one token was, under the model's own distribution, and which were the likeliest there."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob), the likeliest first; as many as were asked for."""


class TokenOutput(NamedTuple):
    """One token as it is generated; or, with token_id None, the end of a request that ended without one."""

    request_id: RequestId
    token_id: int | None
    text: str
    """What is certain of the text with this token and was not before; "" where the engine has no tokenizer."""
    logprob: float | None
    is_final: bool
    finish_reason: FinishReason | None
    sequence_length: int
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """How a request ended. Each phase is timed on its own; together they make the total."""

    request_id: RequestId
    tokens: tuple[int, ...]
    text: str
    state: RequestState
    finish_reason: FinishReason
    error: str | None
    waiting_time: float
    prefill_time: float
    decode_time: float
    time_to_first_token: float | None
    decode_steps: int
    prompt_token_count: int
    cached_token_count: int
    preemptions: int
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One for each token, where they were asked for."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """One for each token of the prompt; None for the first, which nothing stands before."""
    siblings: tuple[GenerationResult, ...] = ()
    """The other answers, where `n` asked for several."""
    num_tokens: int | None = None
    """How many tokens there were, where they were handed out one by one and not kept; None: those in `tokens`."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """That of the request."""

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
        """Speed after the first token; None where there was no second one to time."""
        if self.decode_time <= 0 or self.decode_steps == 0:
            return None
        return self.decode_steps / self.decode_time


CompletedRequest = GenerationResult
"""The published name of the same thing."""
