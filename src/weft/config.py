"""The options of scheduler, cache and engine: frozen, checked once, few, each with a default that suits most."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from weft.errors import InvalidRequestError


class PriorityPolicy(Enum):
    """In which order waiting requests are admitted."""

    FCFS = "fcfs"
    SHORTEST_JOB_FIRST = "shortest-job-first"
    PRIORITY = "priority"
    ADAPTIVE = "adaptive"


class PreemptionMode(Enum):
    """How a victim gives its memory back. AUTO takes the cheaper way for each victim."""

    AUTO = "auto"
    RECOMPUTE = "recompute"
    SWAP = "swap"


class KvCacheKind(Enum):
    """FULL keeps all K and V as computed. TWO_TIER keeps the newest tokens so and quantises what is older."""

    FULL = "full"
    TWO_TIER = "two-tier"


def _check(name: str, value: float, low: float, high: float | None = None) -> None:
    """Refuses what is no finite number in low..high, naming the field, the value and the range."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")
    if not is_number or value < low or (high is not None and value > high):
        allowed = f"at least {low}" if high is None else f"{low} to {high}"
        raise InvalidRequestError(f"{name} is {value!r}; allowed: {allowed}", field=name)


def _check_count(name: str, value: int, low: int, high: int | None = None) -> None:
    if not isinstance(value, int):
        raise InvalidRequestError(f"{name} is {value!r}; allowed: a whole number", field=name)
    _check(name, value, low, high)


def _check_switch(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidRequestError(f"{name} is {value!r}; allowed: True, False", field=name)


def named_choice(name: str, value: object, choices: type[Enum]) -> object:
    """A choice that somebody typed, by its word; whatever is no text is left to the checks of its field."""
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
    """What one step may hold, who goes first, and how long the queue may grow."""

    policy: PriorityPolicy = PriorityPolicy.FCFS
    """The order in which waiting requests are admitted."""
    max_running: int = 256
    """Sequences that hold a row (slot) at the same time."""
    max_sequences_per_step: int | None = None
    """Sequences in one step; None: all that run. With fewer, running sequences take turns."""
    max_tokens_per_step: int = 2048
    """The one token budget of a step, over prefill and decode together."""
    max_prefill_tokens: int = 1024
    """How much of that budget prompts may take."""
    max_chunk_tokens: int = 512
    """How much of one prompt is computed in one step."""
    chunked_prefill: bool = True
    """Long prompts are computed in chunks, over several steps."""
    prefer_pure_decode: bool = False
    """Steps hold either prompts or decodes, never both; a full round of decodes, then one step of prompts."""
    dynamic_batching: bool = True
    """New requests join while others generate. Off: a batch is formed, closed, and run to its end."""
    prefix_caching: bool = True
    """KV blocks of earlier prompts are reused by prompts with the same beginning."""
    max_draft_tokens: int = 11
    """Tokens that are guessed from the sequence's own text and checked in one step, at most; 0: none. They change how many
    steps an answer takes, never the answer. Only where the backend checks drafts (the CPU's does)."""
    preemption: PreemptionMode = PreemptionMode.AUTO
    """How a preempted sequence is resumed: by recompute, from swap, or by the cheaper of both."""
    ageing_rate: float = 0.1
    """Priority levels that a waiting request gains per second (policies PRIORITY and ADAPTIVE)."""
    target_inter_token_latency: float = 0.1
    """Seconds between two tokens of a stream that ADAPTIVE holds by sizing the prompt share of a step."""
    session_lifetime: float = 600.0
    """Seconds after a turn of a conversation (a request with a session id) that its cached blocks are evicted last."""
    max_waiting_requests: int = 8192
    """Requests that may wait for admission; further ones are refused."""
    max_waiting_tokens: int = 4_194_304
    """Prompt tokens that may wait for admission; further requests are refused."""

    def __post_init__(self) -> None:
        _check_choice("policy", self.policy, PriorityPolicy)
        _check_choice("preemption", self.preemption, PreemptionMode)
        for name in ("chunked_prefill", "prefer_pure_decode", "dynamic_batching", "prefix_caching"):
            _check_switch(name, getattr(self, name))
        _check_count("max_running", self.max_running, 1)
        _check_count("max_sequences_per_step", self.sequences_per_step, 1, self.max_running)
        _check_count("max_tokens_per_step", self.max_tokens_per_step, self.sequences_per_step)
        _check_count("max_prefill_tokens", self.max_prefill_tokens, 1, self.max_tokens_per_step)
        _check_count("max_chunk_tokens", self.max_chunk_tokens, 1)
        _check_count("max_draft_tokens", self.max_draft_tokens, 0, 64)
        _check("ageing_rate", self.ageing_rate, 0.0)
        _check("target_inter_token_latency", self.target_inter_token_latency, 1e-6)
        _check("session_lifetime", self.session_lifetime, 0.0)
        _check_count("max_waiting_requests", self.max_waiting_requests, 1)
        _check_count("max_waiting_tokens", self.max_waiting_tokens, 1)
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
        """With chunked prefill off: the longest prompt that fits one step beside the decodes."""
        return min(self.max_prefill_tokens, self.max_tokens_per_step - self.sequences_per_step)


@dataclass(frozen=True)
class KvCachePoolConfig:
    """The paged pool. Where neither `num_blocks` nor `memory` says how large, the backend chooses from what it has."""

    num_blocks: int | None = None
    """KV blocks in the pool. None: `memory` decides, or the backend."""
    block_size: int = 16
    """Tokens in one KV block."""
    swap_blocks: int | None = None
    """Blocks of host memory for swapping; None: the backend's default; 0: never swap."""
    memory: int | None = None
    """Bytes for blocks, instead of their number: the backend knows what one takes."""
    kv_cache: KvCacheKind = KvCacheKind.FULL
    """TWO_TIER: older tokens are quantised, so that several times as many fit."""
    tail_length: int = 256
    """TWO_TIER: tokens of every sequence that stay in full precision, a multiple of block_size."""
    store_bits: int = 8
    """TWO_TIER: bits of a quantised value, 8 or 4."""
    store_blocks: int | None = None
    """TWO_TIER: quantised blocks, beside num_blocks full ones; None: both follow from memory."""
    expected_context: int | None = None
    """TWO_TIER: tokens of a usual sequence, for which memory is split between the tiers. None: 4096, or what the model
    can. Longer and shorter ones run all the same."""

    def __post_init__(self) -> None:
        _check_count("block_size", self.block_size, 1)
        _check_choice("kv_cache", self.kv_cache, KvCacheKind)
        _check_count("tail_length", self.tail_length, 1)
        if self.store_bits not in (4, 8):
            raise InvalidRequestError(f"store_bits is {self.store_bits!r}; allowed: 8, 4", field="store_bits")
        if self.expected_context is not None:
            _check_count("expected_context", self.expected_context, 1)
        if self.store_blocks is not None:
            _check_count("store_blocks", self.store_blocks, 2)
        self._check_tiers()
        if self.num_blocks is not None:
            _check_count("num_blocks", self.num_blocks, 1)
        if self.swap_blocks is not None:
            _check_count("swap_blocks", self.swap_blocks, 0)
        if self.memory is not None:
            _check_count("memory", self.memory, 1)
            if self.num_blocks is not None:
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
        """Blocks of the tail; 0 where the cache has one tier."""
        return self.tail_length // self.block_size if self.is_two_tier else 0

    def blocks_in_memory(self, bytes_per_block: int) -> int | None:
        """How many were asked for; None: the choice is the backend's."""
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
    """The engine: its scheduler, its cache, and how it treats requests and readers."""

    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    cache: KvCachePoolConfig = field(default_factory=KvCachePoolConfig)
    overlap: bool = True
    """Plan step N+1 while N runs."""
    request_timeout: float | None = None
    """Seconds after which a request ends that has no deadline of its own."""
    stream_buffer: int = 1024
    """Tokens a stream reader may be behind before its request is cancelled."""
    max_kept_results: int = 16384
    """Results kept for `get_result`; the oldest go first."""
    log_path: str | None = None
    """Writes a log here that `weft replay` runs again. Those of earlier starts are kept beside it, as .1 to .5."""

    def __post_init__(self) -> None:
        _check_switch("overlap", self.overlap)
        _check_count("stream_buffer", self.stream_buffer, 1)
        _check_count("max_kept_results", self.max_kept_results, 1)
        if self.request_timeout is not None:
            _check("request_timeout", self.request_timeout, 0.0)
