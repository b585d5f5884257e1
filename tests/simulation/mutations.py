"""Planted mistakes: each is one change to the real source, which the simulation must notice.

A mutation names a function and a piece of its text; the function is compiled again with that piece replaced. When the
source changes so that the piece is gone, the mutation fails loudly and is to be written anew.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple


class Mutation(NamedTuple):
    name: str
    target: str
    """module:qualified.name"""
    old: str
    new: str
    first_seed: int = 0
    """Where to look first, for a mistake that few scenarios bring to light."""


ROSTER = "weft.scheduling.roster:Roster"
PLANNER = "weft.scheduling.planner:Planner"
PREFIX = "weft.scheduling.prefix:PrefixSharing"
SCHEDULER = "weft.scheduling.scheduler:ContinuousBatchScheduler"
KV_CACHE = "weft.scheduling.kv_cache:KvCacheManager"
POOL = "weft.scheduling.blocks:BlockPool"

MUTATIONS = (
    # -- blocks and keys
    Mutation("block is free while another still refers to it", f"{POOL}.release", "] == 0", "] <= 1"),
    Mutation("evicted block stays findable", f"{POOL}.allocate", "self._drop_key(block)", "pass"),
    Mutation(
        "shared block stays evictable", f"{POOL}.share", "del self._eviction_order(block)[block]", "pass"
    ),
    Mutation("hot block is put back among the cold", f"{POOL}._eviction_order", "in self._heat", "is None"),
    Mutation(
        "content stays hot after its session",
        "weft.scheduling.sessions:Sessions._drop",
        "self._pool.cool(key)",
        "pass",
    ),
    Mutation(
        "keys of a dropped session are still counted",
        "weft.scheduling.sessions:Sessions._drop",
        "-= len",
        "-= 0 * len",
    ),
    Mutation("block of a failed step stays findable", f"{POOL}.forget", "!= key", "!= key or True"),
    Mutation(
        "block is findable before it is full",
        f"{PREFIX}.register",
        "end // block_size, len",
        "-(-end // block_size), len",
    ),
    Mutation("prefix key without salt", "weft.scheduling.blocks:root_key", "cache_salt.encode()", 'b""'),
    Mutation(
        "prefix key without what stands before",
        "weft.scheduling.blocks:extend_keys",
        "previous + content",
        "content",
    ),
    Mutation(
        "prefix hit of the whole prompt",
        f"{PREFIX}.max_hits",
        "len(sequence.tokens) - 1",
        "len(sequence.tokens)",
    ),
    # -- positions, chunks, progress
    Mutation(
        "position off by one",
        "weft.scheduling.draft:Draft.freeze",
        "starts.append(start)",
        "starts.append(start - 1)",
    ),
    Mutation(
        "chunk starts one late",
        f"{PLANNER}._add_prefill",
        "start = sequence.scheduled\n",
        "start = sequence.scheduled + (sequence.scheduled > 0)\n",
    ),
    Mutation(
        "first token sampled before the prompt ends",
        f"{PLANNER}._add_prefill",
        "end == sequence.target",
        "end >= sequence.target - 1",
    ),
    Mutation(
        "progress committed before success",
        f"{SCHEDULER}._roll_back",
        "sequence.scheduled = sequence.computed",
        "sequence.computed = sequence.scheduled",
    ),
    Mutation(
        "failed step's token still expected",
        f"{SCHEDULER}._roll_back",
        "sequence.target = len(sequence.tokens)",
        "pass",
    ),
    Mutation(
        "rows not sent anew after a failure", f"{SCHEDULER}._roll_back", "sequence.row_known = False", "pass"
    ),
    Mutation(
        "victim keeps its progress without its memory",
        f"{ROSTER}.forget_computed",
        "sequence.computed = sequence.scheduled = 0",
        "pass",
    ),
    Mutation(
        "length limit off by one",
        f"{SCHEDULER}._take_token",
        "length >= sequence.limit",
        "length > sequence.limit",
    ),
    Mutation(
        "min_tokens ignored",
        f"{SCHEDULER}._take_token",
        "length >= sequence.min_length or is_forced",
        "True",
    ),
    # -- swapping
    Mutation(
        "swap-in before swap-out",
        f"{KV_CACHE}._new_swap",
        "guard for guard in guards if guard is not None",
        "guard for guard in guards if False",
    ),
    Mutation("swap-out before its step", f"{ROSTER}.suspend", "after_step=step - 1", "after_step=-1"),
    Mutation(
        "swap-in beside the step that still uses the blocks",
        f"{PLANNER}._resume",
        "after_step=draft.step - 1",
        "after_step=-1",
        first_seed=3500,
    ),
    Mutation(
        "step writes to blocks that are being copied",
        f"{KV_CACHE}._take_blocks",
        "self._dependencies.update",
        "set().update",
    ),
    Mutation(
        "failed swap taken for a good one",
        f"{SCHEDULER}._finish_swaps",
        "failed = swap_id in result.failed_swaps",
        "failed = False",
    ),
    Mutation("swap slots leak", f"{KV_CACHE}._free_slots", "self._free_swap_slots.extend(slots)", "pass"),
    # -- overlap
    Mutation("row reused too soon", f"{ROSTER}.suspend", "self.is_in_flight(sequence)", "False"),
    Mutation(
        "memory of an ended request free too soon",
        f"{ROSTER}.remove",
        "and self.is_in_flight(sequence)",
        "and False",
    ),
    Mutation(
        "token of an ended request delivered",
        f"{SCHEDULER}._take_token",
        "if sequence.finish_reason is not None",
        "if False",
    ),
    Mutation(
        "block adopted by planning that led to no plan is never told",
        f"{SCHEDULER}.schedule",
        "self._untold_tables = draft.tables",
        "self._untold_tables = []",
        first_seed=128_000,
    ),
    # -- budgets, turns, priorities
    Mutation(
        "budget ignored by prompts",
        "weft.scheduling.budget:TokenBudget.take_prefill",
        "self.tokens -= tokens",
        "pass",
    ),
    Mutation(
        "prompt budget ignored",
        "weft.scheduling.budget:TokenBudget.take_prefill",
        "self.prefill_tokens -= tokens",
        "pass",
    ),
    Mutation(
        "places ignored by decodes",
        "weft.scheduling.budget:TokenBudget.take_decodes",
        "self.sequences -= count",
        "pass",
    ),
    Mutation("chunk limit ignored", f"{PLANNER}._chunk", ", self._config.max_chunk_tokens)", ")"),
    Mutation("no rotation", f"{SCHEDULER}._rotate", "if skipped and", "if False and"),
    Mutation(
        "victim's task stays in the plan",
        "weft.scheduling.draft:Draft.drop",
        "self.decodes.remove(sequence)",
        "pass",
    ),
    Mutation(
        "victim of higher priority",
        "weft.scheduling.preemption:choose_victims",
        "            s.priority,",
        "            -s.priority,",
    ),
    Mutation(
        "more victims than needed",
        "weft.scheduling.preemption:choose_victims",
        "if freed >= shortage:",
        "if False:",
    ),
    Mutation(
        "age overtakes CRITICAL",
        "weft.scheduling.policy:_aged",
        "if sequence.priority == Priority.CRITICAL",
        "if False",
    ),
    Mutation(
        "request waits for what it was to compute itself",
        f"{PREFIX}.must_wait",
        "owner is not sequence and is_below(sequence, owner)",
        "True",
    ),
    Mutation(
        "promise of a request that is gone", f"{PREFIX}.withdraw", "if sequence.has_promised", "if False"
    ),
    Mutation("deadline ignored", f"{SCHEDULER}._expire", "deadlines[0][0] <= now", "False"),
    Mutation("pure decode not pure", f"{PLANNER}._plan_pure", "if draft.prefills:", "if False:"),
    Mutation("closed batch joined", f"{PLANNER}._joins_open", "self._batch_is_open = False", "pass"),
    Mutation(
        "cancelled request stays in the queue", f"{ROSTER}.remove", "self.queue.remove(sequence)", "pass"
    ),
    Mutation("failure of nobody ends everybody", f"{SCHEDULER}.fail", "if failed.is_retry:", "if True:"),
    # -- grammars
    Mutation(
        "row with a grammar is planned before its last token is known",
        f"{PLANNER}._split",
        "sequence.sits_out and",
        "False and",
    ),
    Mutation(
        "row with a grammar does not sit out after its first token",
        f"{PLANNER}._split",
        "target > len(sequence.tokens)",
        "target > len(sequence.tokens) > sequence.prompt_length",
    ),
    Mutation(
        "row with a grammar sits out for good",
        f"{PLANNER}._split",
        "target > len(sequence.tokens)",
        "target >= len(sequence.tokens)",
    ),
    Mutation(
        "neighbours wait for a row with a grammar",
        f"{PLANNER}._split",
        "continue  # what its grammar",
        "return [], [], []  # what its grammar",
        first_seed=960,
    ),
    Mutation(
        "any stop ends an answer with a grammar before min_tokens",
        f"{SCHEDULER}._take_token",
        "is_forced = is_eos and",
        "is_forced =",
        first_seed=940,
    ),
    # -- logprobs
    Mutation(
        "logprobs of a prompt are one place off",
        f"{SCHEDULER}._take_prompt_logprobs",
        "logprobs, first",
        "logprobs, first + 1",
    ),
    Mutation(
        "logprobs of a prompt are dropped",
        f"{SCHEDULER}._take_prompt_logprobs",
        "prompt_logprobs.update(",
        "__init__() or dict(",
    ),
    Mutation("a prompt with logprobs takes prefix hits", f"{PREFIX}.max_hits", "is not None", "is Ellipsis"),
    Mutation(
        "a decode's logprobs are told and not kept",
        f"{SCHEDULER}._commit_decodes",
        "sequence.logprobs.append(logprob)",
        "pass",
    ),
    Mutation(
        "a first token's logprobs are another's",
        f"{SCHEDULER}._commit_prefills",
        "result.logprobs[sampled]",
        "result.logprobs[0]",
    ),
)


@contextmanager
def planted(mutation: Mutation) -> Iterator[None]:
    """The mutation is in force inside."""
    module_name, path = mutation.target.split(":")
    module = importlib.import_module(module_name)
    *owners, name = path.split(".")
    owner: Any = module
    for part in owners:
        owner = getattr(owner, part)
    original = getattr(owner, name)
    source = textwrap.dedent(inspect.getsource(original))
    if mutation.old not in source:
        raise LookupError(f"mutation {mutation.name!r}: {mutation.old!r} is no longer in {mutation.target}")
    scope: dict[str, Any] = {}
    exec(
        compile(source.replace(mutation.old, mutation.new), f"<{mutation.name}>", "exec"),
        module.__dict__,
        scope,
    )
    places = [owner, *_importers(original, name)]
    for place in places:
        setattr(place, name, scope[name])
    try:
        yield
    finally:
        for place in places:
            setattr(place, name, original)


def _importers(function: Any, name: str) -> list[Any]:
    """The modules of weft that have imported the function by its name."""
    modules = [m for key, m in list(sys.modules.items()) if key.startswith("weft")]
    return [m for m in modules if getattr(m, name, None) is function]
