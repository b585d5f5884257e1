"""The options of scheduler, KV cache and engine. Frozen, and checked when they are created.

A field declares one setting: its name, type and default, its `Range` and `Flag` if it has them. The docstring below the
field describes it. Checks, flags, environment variables, the TOML file and the reference page are made from the field.
"""

import dataclasses
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin

from weft.errors import InvalidRequestError


class PriorityPolicy(Enum):
    """The order in which waiting requests are admitted."""

    FCFS = "fcfs"
    SHORTEST_JOB_FIRST = "shortest-job-first"
    PRIORITY = "priority"
    ADAPTIVE = "adaptive"


class PreemptionMode(Enum):
    """How a sequence is preempted. AUTO chooses the cheaper way for each one."""

    AUTO = "auto"
    RECOMPUTE = "recompute"
    SWAP = "swap"


class KvCacheKind(Enum):
    """FULL keeps all K and V in full precision. TWO_TIER does so for recent tokens, and quantises older ones."""

    FULL = "full"
    TWO_TIER = "two-tier"


class Range(NamedTuple):
    """The finite numbers from `low` to `high`."""

    low: float
    high: float | None = None

    def __contains__(self, value: object) -> bool:
        is_number = (
            isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")
        )
        return is_number and self.low <= value and (self.high is None or value <= self.high)  # type: ignore[operator]


class Flag(NamedTuple):
    """The flag of a setting on the command line. A name without dashes is a positional argument."""

    name: str
    metavar: str
    help: str
    repeats: bool = False


class Setting(NamedTuple):
    """What the annotation of a field declares."""

    type: Any
    """The type of the value. For an optional setting, the type without None."""
    is_optional: bool
    range: Range | None
    flag: Flag | None


@cache
def declared_settings(config: Any) -> Mapping[str, Setting]:
    """The fields of a configuration class. Its module must not import `annotations` from
    `__future__`: with it, the types would be text."""
    return {one.name: _setting(one.type) for one in dataclasses.fields(config)}


def _setting(hint: Any) -> Setting:
    assert not isinstance(hint, str)
    kind, *extras = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    is_optional = get_origin(kind) in (Union, types.UnionType)
    return Setting(
        type=get_args(kind)[0] if is_optional else kind,
        is_optional=is_optional,
        range=next((one for one in extras if isinstance(one, Range)), None),
        flag=next((one for one in extras if isinstance(one, Flag)), None),
    )


def _check_fields(config: Any) -> None:
    """Raises unless every field has a value of its type and range."""
    for name, setting in declared_settings(config.__class__).items():
        value = getattr(config, name)
        if value is None and setting.is_optional:
            continue
        if setting.type is bool:
            _check_switch(name, value)
        elif setting.range is not None:
            check = _check_count if setting.type is int else _check
            check(name, value, setting.range.low, setting.range.high)
        elif isinstance(setting.type, type) and issubclass(setting.type, Enum):
            _check_choice(name, value, setting.type)


def _check(name: str, value: float, low: float, high: float | None = None) -> None:
    if value not in Range(low, high):
        allowed = f"at least {low}" if high is None else f"{low} to {high}"
        raise InvalidRequestError(f"{name} is {value!r}; allowed: {allowed}", field=name)


def _check_count(name: str, value: float, low: float, high: float | None = None) -> None:
    if not isinstance(value, int):
        raise InvalidRequestError(f"{name} is {value!r}; allowed: a whole number", field=name)
    _check(name, value, low, high)


def _check_switch(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidRequestError(f"{name} is {value!r}; allowed: True, False", field=name)


def named_choice(name: str, value: object, choices: type[Enum]) -> object:
    """Converts the name of a choice, as a user types it. Returns values of other types unchanged: the check of
    the field refuses them."""
    words = {choice.value: choice for choice in choices}
    if isinstance(value, str) and value not in words:
        raise InvalidRequestError(f"{name} is {value!r}; allowed: {', '.join(words)}", field=name)
    return words[value] if isinstance(value, str) else value


def _check_choice(name: str, value: object, choices: type[Enum]) -> None:
    if not isinstance(value, choices):
        allowed = ", ".join(f"{choices.__name__}.{choice.name}" for choice in choices)
        raise InvalidRequestError(f"{name} is {value!r}; allowed: {allowed}", field=name)


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of a step, the order of requests, and limits of the queue."""

    policy: PriorityPolicy = PriorityPolicy.FCFS
    """The order in which waiting requests are admitted."""
    max_running: Annotated[int, Range(1)] = 256
    """Sequences that hold a row (slot) at the same time."""
    max_sequences_per_step: int | None = None
    """Sequences in one step. None: all running ones. With fewer, running sequences rotate."""
    max_tokens_per_step: int = 2048
    """The token budget of a step, for prefill and decode together."""
    max_prefill_tokens: int = 1024
    """The part of that budget that prompts may use."""
    max_chunk_tokens: Annotated[int, Range(1)] = 512
    """The largest chunk of one prompt in one step."""
    chunked_prefill: bool = True
    """Long prompts are computed in chunks, over several steps."""
    prefer_pure_decode: bool = False
    """A step holds either prompts or decodes: one step of prompts each time all running sequences have decoded."""
    dynamic_batching: bool = True
    """New requests join while others generate. Off: a batch closes when it generates, and runs to its end."""
    prefix_caching: bool = True
    """KV blocks of earlier requests (prompts and answers) are reused by prompts with the same beginning."""
    max_draft_tokens: Annotated[
        int, Range(0, 64), Flag("--drafts", "N", "Maximum draft tokens; 0: off; default: 11.")
    ] = 11
    """The most draft tokens of a sequence in one step; 0: none. They are proposed from the sequence's own text, its
    prediction, and finished answers. They change how many steps an answer takes, never the answer. Only the CPU backend
    checks draft tokens."""
    max_learned_bytes: Annotated[int, Range(0)] = 64 << 20
    """Memory for finished answers. Draft tokens also come from these, for requests with the same cache salt; 0: none
    are kept. They are in memory; `learned_text_days` keeps some on disk too."""
    preemption: PreemptionMode = PreemptionMode.AUTO
    """How a preempted sequence is resumed: by recompute, from swap, or by the cheaper of both."""
    ageing_rate: Annotated[float, Range(0.0)] = 0.1
    """Priority levels that a waiting request gains per second (policies PRIORITY and ADAPTIVE)."""
    target_inter_token_latency: Annotated[float, Range(1e-6)] = 0.1
    """ADAPTIVE sizes prompt chunks so that the seconds between two tokens of a stream stay below this."""
    session_lifetime: Annotated[float, Range(0.0)] = 600.0
    """Seconds after a request with a session id during which its cached blocks are evicted last."""
    max_waiting_requests: Annotated[int, Range(1)] = 8192
    """Requests that may wait for admission; further ones are refused."""
    max_waiting_tokens: Annotated[int, Range(1)] = 4_194_304
    """Prompt tokens that may wait for admission; further requests are refused."""

    def __post_init__(self) -> None:
        _check_fields(self)
        _check_count("max_sequences_per_step", self.sequences_per_step, 1, self.max_running)
        _check_count("max_tokens_per_step", self.max_tokens_per_step, self.sequences_per_step)
        _check_count("max_prefill_tokens", self.max_prefill_tokens, 1, self.max_tokens_per_step)
        if not self.chunked_prefill:
            _check(
                "max_tokens_per_step - max_sequences_per_step (chunked_prefill is off)",
                self.longest_whole_prompt,
                1,
            )

    @property
    def sequences_per_step(self) -> int:
        return self.max_running if self.max_sequences_per_step is None else self.max_sequences_per_step

    @property
    def longest_whole_prompt(self) -> int:
        """With chunked prefill off: the longest prompt that fits into one step together with the decodes."""
        return min(self.max_prefill_tokens, self.max_tokens_per_step - self.sequences_per_step)


@dataclass(frozen=True)
class KvCachePoolConfig:
    """The KV cache. Without `num_blocks` and `memory`, the backend chooses the size by its free memory."""

    num_blocks: Annotated[int | None, Range(1)] = None
    """KV blocks in the pool. None: `memory` decides, or the backend."""
    block_size: Annotated[int, Range(1)] = 16
    """Tokens per KV block."""
    swap_blocks: Annotated[int | None, Range(0)] = None
    """Swap slots in host memory. None: the backend's default. 0: never swap."""
    memory: Annotated[int | None, Range(1)] = None
    """Bytes for blocks, instead of `num_blocks`."""
    kv_cache: Annotated[
        KvCacheKind,
        Flag("--kv-cache", "full|two-tier", "two-tier: quantise older tokens; default: full."),
    ] = KvCacheKind.FULL
    """TWO_TIER quantises older tokens, so that several times as many fit."""
    tail_length: Annotated[
        int, Range(1), Flag("--tail-length", "N", "two-tier: newest tokens left as is; default: 256.")
    ] = 256
    """TWO_TIER: recent tokens of each sequence in full precision. A multiple of block_size."""
    store_bits: Annotated[int, Flag("--store-bits", "8|4", "two-tier: bits per older value; default: 8.")] = 8
    """TWO_TIER: bits per quantised value, 8 or 4."""
    store_blocks: Annotated[int | None, Range(2)] = None
    """TWO_TIER: the number of quantised blocks, in addition to num_blocks full ones. None: both follow from memory."""
    expected_context: Annotated[int | None, Range(1)] = None
    """TWO_TIER: the typical length of a sequence in tokens; it decides how memory is split between the tiers. None:
    4096, or the model's context if that is shorter. Other lengths work too."""

    def __post_init__(self) -> None:
        _check_fields(self)
        if self.store_bits not in (4, 8):
            raise InvalidRequestError(f"store_bits is {self.store_bits!r}; allowed: 8, 4", field="store_bits")
        self._check_tiers()
        if self.memory is not None and self.num_blocks is not None:
            raise InvalidRequestError(
                f"num_blocks is {self.num_blocks} and memory {self.memory} bytes; set one", field="memory"
            )

    def _check_tiers(self) -> None:
        if self.kv_cache is KvCacheKind.FULL:
            if self.store_blocks is not None:
                raise InvalidRequestError(
                    f"store_blocks is {self.store_blocks}, but kv_cache is 'full' and has no store; set kv_cache to "
                    "'two-tier', or leave store_blocks out",
                    field="store_blocks",
                )
            return
        if self.tail_length % self.block_size:
            raise InvalidRequestError(
                f"tail_length is {self.tail_length} and block_size {self.block_size}; tail_length must be a multiple of "
                "block_size",
                field="tail_length",
            )
        if (self.num_blocks is None) != (self.store_blocks is None):
            raise InvalidRequestError(
                f"num_blocks is {self.num_blocks} and store_blocks {self.store_blocks}; with kv_cache 'two-tier' set both, "
                "or set memory instead",
                field="store_blocks" if self.store_blocks is None else "num_blocks",
            )
        if self.num_blocks is not None and self.num_blocks < self.tail_blocks + 2:
            raise InvalidRequestError(
                f"num_blocks is {self.num_blocks}; a tail of {self.tail_length} tokens needs at least "
                f"{self.tail_blocks + 2} blocks of {self.block_size}",
                field="num_blocks",
            )

    @property
    def is_two_tier(self) -> bool:
        return self.kv_cache is KvCacheKind.TWO_TIER

    @property
    def tail_blocks(self) -> int:
        """The length of the tail in KV blocks. 0: the cache has one tier."""
        return self.tail_length // self.block_size if self.is_two_tier else 0

    def blocks_in_memory(self, bytes_per_block: int) -> int | None:
        """The configured number of blocks. None: the backend chooses."""
        if self.memory is None:
            return self.num_blocks
        if self.memory < bytes_per_block:
            raise InvalidRequestError(
                f"memory is {self.memory} bytes, and one block of {self.block_size} tokens takes {bytes_per_block}; "
                "allow more",
                field="memory",
            )
        return self.memory // bytes_per_block


@dataclass(frozen=True)
class ServingEngineConfig:
    """The engine: its scheduler, its KV cache, and its handling of requests, streams and results."""

    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    cache: KvCachePoolConfig = field(default_factory=KvCachePoolConfig)
    overlap: bool = True
    """Plan step N+1 while step N runs."""
    request_timeout: Annotated[float | None, Range(0.0)] = None
    """The deadline, in seconds, of requests without one of their own."""
    stream_buffer: Annotated[int, Range(1)] = 1024
    """Unread tokens of a stream before its request is cancelled."""
    max_kept_results: Annotated[int, Range(1)] = 16384
    """Results kept for `get_result`. The oldest are dropped first."""
    log_path: str | None = None
    """Path of the event log, for `weft replay`. It has every input of the scheduler, prompts too. Logs of earlier runs are
    kept next to it, as .1 to .5."""

    def __post_init__(self) -> None:
        _check_fields(self)
