"""Frames for the live page. A frame has the requests and blocks of an engine, its last steps, and the events since the
previous frame.

Frames are made on demand. The server adds its own data (`weft.server.live`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from weft.request import FinishReason, RequestId

BLOCK_STATES = {
    "f": "free",
    "u": "used by one request",
    "s": "shared by several requests",
    "c": "cached, evictable",
    "h": "cached, kept hot by a session",
    "i": "cached content of idle work, evicted first",
}
"""A letter for each state of a full block. A store block of a two-tier cache has the same letter in upper case."""

FINISH_REASONS = tuple(FinishReason)
"""In the event of a request's end, `first` is the index of its finish reason in this list."""

MAX_REQUESTS = 512
"""Requests in a frame: running ones first, then the head of the queue."""
MAX_STEPS = 64
MAX_EVENTS = 1024
"""Steps and events in a frame: the newest ones. The frame says how many older ones it leaves out."""
BLOCKS_PER_FRAME = 4096
"""A frame has the states of this many blocks. The next frame continues where this one ends, so a large cache is shown
completely by several frames."""


class LiveStep(NamedTuple):
    """A finished step."""

    step: int
    seconds: float
    num_decodes: int
    """Sequences that decoded, with or without draft tokens."""
    num_drafts: int
    """Draft tokens that the step checked."""
    num_prefills: int
    prefill_tokens: int


class LiveEvent(NamedTuple):
    """Something that happened to a request. `first` and `second` depend on the kind."""

    at: float
    """Seconds on the clock of the engine."""
    step: int
    """queued, first_token, finished, failed: the newest applied step. admitted, preempted, swapped_in: the step that was
    planned then. chunk: the step that computed it."""
    kind: str
    """queued (prompt tokens); admitted (row, tokens of the prefix hit); chunk (first position, tokens); preempted (0 recompute or
    1 swap); swapped_in (1: the copy failed, and its tokens are computed again); first_token; finished (index in
    `FINISH_REASONS`); failed."""
    request_id: RequestId
    first: int = 0
    second: int = 0


class LiveRequest(NamedTuple):
    """A request that has not ended."""

    request_id: RequestId
    row: int
    """-1: the request has no row, because it waits."""
    state: str
    """waiting, prefilling, decoding, preempted, paused, swapped."""
    priority: int
    is_idle_work: bool
    prompt_length: int
    cached_tokens: int
    """Tokens of the prefix hit at its first admission."""
    computed: int
    num_tokens: int
    """Tokens of the prompt and generated tokens."""
    limit: int
    """The value of `num_tokens` at which the request ends at the latest."""
    num_drafted: int
    num_accepted: int
    preemptions: int
    num_blocks: int
    arrived_at: float
    """Times are seconds on the clock of the engine."""
    admitted_at: float | None
    """When the request was first admitted. None: not yet."""
    first_token_at: float | None
    deadline_at: float | None


@dataclass(frozen=True, slots=True)
class LiveInfo:
    """Properties of an engine that do not change while it runs."""

    num_blocks: int
    store_blocks: int
    block_size: int
    swap_blocks: int
    num_rows: int
    max_context: int
    policy: str
    step_target: float | None
    """The time target of a step in seconds (`target_inter_token_latency`). None: the policy has none."""
    device: str = ""
    """The name of the device that computes, if it is not the host's processor."""


@dataclass(frozen=True, slots=True)
class LiveFrame:
    """A snapshot of an engine, and its steps and events since the frame before."""

    at: float
    step: int
    """The newest step that was applied."""
    requests: tuple[LiveRequest, ...]
    num_running: int
    num_waiting: int
    """The two counts include requests that `requests` leaves out."""
    steps: tuple[LiveStep, ...]
    steps_left_out: int
    events: tuple[LiveEvent, ...]
    events_left_out: int
    first_block: int
    blocks: str
    """A letter of `BLOCK_STATES` for each block from `first_block` on."""
    blocks_used: int
    blocks_cached: int
    """Blocks with cached content, including those that requests use."""
    store_blocks_used: int
    swap_blocks_used: int
    totals: dict[str, int]
    """Totals since the start of the engine: the fields of `SchedulerStats`."""
    first_token_counts: dict[int, int]
    """Counts since the start by bucket of `weft.metrics.Histogram`. The page subtracts an older frame. A request counts
    at its first token."""
    gap_counts: dict[int, int]
    """Counts of the gaps between tokens, by the same buckets."""
