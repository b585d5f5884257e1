"""Decides which replica gets a request: the one with the earliest predicted first token, which prefix hits make earlier.

Pure: no clock, no randomness, no I/O. `weft plan` uses it on a virtual clock; an ingress can use it on a real one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

MAX_SESSIONS = 65_536
"""Sessions that are remembered. Beyond it, the one without a request for the longest time is forgotten."""
MAX_ASSUMED = 65_536
"""Keys of assigned requests that no report has confirmed. Of these, the newest are kept, up to twice this many."""
_LEAST_TOKEN_SECONDS = 1e-7
"""Until a replica knows its costs, this makes waiting tokens count."""


def key_of(block_hash: bytes) -> int:
    """The key of a KV block: 64 bits of its hash, which depends on the cache salt and on all tokens before the block."""
    return int.from_bytes(block_hash[:8], "little")


class ReplicaLoad(NamedTuple):
    """What a replica reports about its load."""

    waiting_tokens: int
    """Prompt tokens that are not computed yet: of requests that the server still reads, in the queue, in running sequences."""
    running: int
    step_seconds: float
    """Predicted seconds of a step with the running sequences."""
    row_seconds: float
    """What one more sequence adds to a step."""
    token_seconds: float
    """Seconds of one prompt token."""


NO_LOAD = ReplicaLoad(0, 0, 0.0, 0.0, 0.0)


class PrefixSketch:
    """Which replicas have which KV blocks cached: one table from the key of a block to a bit for each replica.

    Keys of requests that were assigned, but not reported yet, count as cached. They are in two generations, of which the
    older one is dropped when the newer one is full.
    """

    def __init__(self) -> None:
        self._cached: dict[int, int] = {}
        self._assumed: dict[int, int] = {}
        self._assumed_before: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._cached)

    def update(self, replica: int, added: Iterable[int], removed: Iterable[int]) -> None:
        """Applies a report: keys that came into the cache of a replica since its last report, and keys that left it."""
        cached, bit = self._cached, 1 << replica
        for key in removed:
            for table in (cached, self._assumed, self._assumed_before):
                if left := table.get(key, 0) & ~bit:
                    table[key] = left
                else:
                    table.pop(key, None)
        for key in added:
            cached[key] = cached.get(key, 0) | bit

    def assume(self, replica: int, keys: Iterable[int]) -> None:
        """Counts these blocks as cached: a request that was assigned to the replica will compute them."""
        table, bit = self._assumed, 1 << replica
        for key in keys:
            table[key] = table.get(key, 0) | bit
        if len(table) > MAX_ASSUMED:
            self._assumed, self._assumed_before = {}, table

    def drop(self, replica: int) -> None:
        """Removes a replica that is gone."""
        bit = 1 << replica
        for name in ("_cached", "_assumed", "_assumed_before"):
            table = getattr(self, name)
            setattr(self, name, {key: mask & ~bit for key, mask in table.items() if mask & ~bit})

    def hits(self, keys: Sequence[int], replicas: int) -> dict[int, int]:
        """How many leading blocks each replica has cached. `replicas`: a bit for each replica that counts. A replica
        without a hit is left out."""
        cached, new, old = self._cached, self._assumed, self._assumed_before
        found: dict[int, int] = {}
        left = replicas
        for index, key in enumerate(keys):
            still = left & (cached.get(key, 0) | new.get(key, 0) | old.get(key, 0))
            if still != left:
                if index:
                    found.update(dict.fromkeys(_bits(left & ~still), index))
                left = still
                if not left:
                    break
        if keys:
            found.update(dict.fromkeys(_bits(left), len(keys)))
        return found


@dataclass(slots=True)
class _Replica:
    load: ReplicaLoad = NO_LOAD
    assigned_tokens: int = 0
    """Uncached prompt tokens that were assigned since the last report."""
    assigned: int = 0
    accepts: bool = True


class Router:
    """Owns the sketch, the newest loads, and the replicas of sessions."""

    def __init__(self, block_size: int, *, by_prefix: bool = True) -> None:
        """Without `by_prefix`, cached blocks do not count: the replica with the least load gets the request."""
        self.sketch = PrefixSketch()
        self._block_size = block_size
        self._by_prefix = by_prefix
        self._replicas: dict[int, _Replica] = {}
        self._accepting = 0
        self._sessions: OrderedDict[str, int] = OrderedDict()

    def add(self, replica: int) -> None:
        """Adds a replica that is ready."""
        self._replicas[replica] = _Replica()
        self._accepting |= 1 << replica

    def drain(self, replica: int) -> None:
        """The replica gets no more requests, also none of its sessions."""
        self._replicas[replica].accepts = False
        self._accepting &= ~(1 << replica)

    def remove(self, replica: int) -> None:
        """Removes a replica, with its sessions: another replica may get its number."""
        self._replicas.pop(replica, None)
        self._sessions = OrderedDict(one for one in self._sessions.items() if one[1] != replica)
        self._accepting &= ~(1 << replica)
        self.sketch.drop(replica)

    def report(
        self, replica: int, load: ReplicaLoad, added: Iterable[int] = (), removed: Iterable[int] = ()
    ) -> None:
        """Takes over a report. It contains all requests that were assigned before."""
        state = self._replicas[replica]
        state.load, state.assigned_tokens, state.assigned = load, 0, 0
        self.sketch.update(replica, added, removed)

    def first_token_seconds(self, replica: int, tokens: int) -> float:
        """The predicted seconds until the first token of a request with `tokens` uncached prompt tokens."""
        state = self._replicas[replica]
        load = state.load
        per_token = max(load.token_seconds, _LEAST_TOKEN_SECONDS)
        step = load.step_seconds + state.assigned * load.row_seconds
        return step + per_token * (load.waiting_tokens + state.assigned_tokens + tokens)

    def choose(self, keys: Sequence[int], prompt_tokens: int, session: str | None = None) -> int:
        """The replica for a request, which counts as assigned from now on. `keys`: of the complete blocks of its prompt.

        The replica with the longest prefix hit gets it, unless the predicted first token of another one is earlier by more
        than the recomputation costs. A session stays with its replica. Raises LookupError if no replica accepts requests.
        """
        hits = self.sketch.hits(keys, self._accepting) if self._by_prefix else {}
        chosen = self._sessions.get(session) if session is not None else None
        if chosen is None or chosen not in self._replicas or not self._replicas[chosen].accepts:
            chosen = min(
                (number for number, state in self._replicas.items() if state.accepts),
                key=lambda number: self._rank(number, hits.get(number, 0), prompt_tokens),
                default=None,
            )
            if chosen is None:
                raise LookupError("no replica accepts requests")
        if session is not None:
            self._sessions[session] = chosen
            self._sessions.move_to_end(session)
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
        state = self._replicas[chosen]
        state.assigned += 1
        state.assigned_tokens += self._uncached(hits.get(chosen, 0), prompt_tokens)
        if self._by_prefix:
            self.sketch.assume(chosen, keys)
        return chosen

    def _rank(self, replica: int, hit_blocks: int, prompt_tokens: int) -> tuple[float, int, int]:
        state = self._replicas[replica]
        # Uncached tokens count twice: they delay this request, and they take time from others.
        uncached = self._uncached(hit_blocks, prompt_tokens)
        seconds = self.first_token_seconds(replica, 2 * uncached)
        return seconds, state.load.running + state.assigned, replica

    def _uncached(self, hit_blocks: int, prompt_tokens: int) -> int:
        return max(1, prompt_tokens - hit_blocks * self._block_size)


def _bits(mask: int) -> Iterable[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
