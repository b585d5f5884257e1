"""Mutations: each one changes the real source in one place, and the simulation must detect it.

A mutation names a function and a piece of its text. The function is compiled again with that piece replaced. If a
change of the source removes the piece, the mutation raises LookupError: write the same error against the new text.
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
    """The seed to start with, for an error that few scenarios detect."""


SEQUENCE_TABLE = "weft.scheduling.sequence_table:SequenceTable"
PLANNER = "weft.scheduling.planner:Planner"
PROMPTS = "weft.scheduling.prompt_planner:PromptPlanner"
MEMORY = "weft.scheduling.memory_planner:MemoryPlanner"
STEP_SIZE = "weft.scheduling.prompt_order:StepSize"
PREFIX = "weft.scheduling.cache.prefix:PrefixSharing"
IDLE = "weft.scheduling.idle_work:IdlePlanner"
SCHEDULER = "weft.scheduling.scheduler:ContinuousBatchScheduler"
TOKENS = "weft.scheduling.token_committer:TokenCommitter"
KV_CACHE = "weft.scheduling.cache.manager:KvCacheManager"
POOL = "weft.scheduling.cache.block_pool:BlockPool"
SWAPS = "weft.scheduling.cache.swap:SwapSlots"
SPECULATION = "weft.scheduling.draft_tokens:Speculation"
ANSWERS = "weft.scheduling.answer_index:AnswerIndexes"
PROPOSER = "weft.scheduling.draft_tokens:DraftProposer"
NOOP = "weft.backends.noop:NoopBackend"

MUTATIONS = (
    # -- blocks and hashes
    Mutation("block is free while another sequence references it", f"{POOL}.release", "] == 0", "] <= 1"),
    Mutation("evicted block stays in the prefix cache", f"{POOL}.allocate", "self._drop_hash(block)", "pass"),
    Mutation(
        "shared block stays evictable", f"{POOL}.share", "del self._eviction_order(block)[block]", "pass"
    ),
    Mutation("hot block is evicted like others", f"{POOL}._eviction_order", "in self._hot_counts", "is None"),
    Mutation(
        "content stays hot after its session",
        "weft.scheduling.cache.sessions:Sessions._drop",
        "pool.unmark_hot(block_hash)",
        "pass",
    ),
    Mutation(
        "hashes of a dropped session are still counted",
        "weft.scheduling.cache.sessions:Sessions._drop",
        "-= len",
        "-= 0 * len",
    ),
    Mutation(
        "block of a failed step stays in the prefix cache",
        f"{POOL}.unregister",
        "!= block_hash",
        "!= block_hash or True",
    ),
    Mutation(
        "block is cached before it is full",
        f"{PREFIX}.register",
        "end // block_size, len",
        "-(-end // block_size), len",
        first_seed=200,
    ),
    Mutation(
        "block hash without salt", "weft.scheduling.cache.block_pool:root_hash", "cache_salt.encode()", 'b""'
    ),
    Mutation(
        "block hash without the previous hash",
        "weft.scheduling.cache.block_pool:extend_block_hashes",
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
        "weft.scheduling.plan_builder:PlanBuilder.freeze",
        "starts.append(start)",
        "starts.append(start - 1)",
    ),
    Mutation(
        "chunk starts one position late",
        f"{PROMPTS}._add_prefill",
        "start = sequence.scheduled\n",
        "start = sequence.scheduled + (sequence.scheduled > 0)\n",
    ),
    Mutation(
        "first token sampled before the prompt ends",
        f"{PROMPTS}._add_prefill",
        "end == sequence.target",
        "end >= sequence.target - 1",
    ),
    Mutation(
        "progress committed before success",
        f"{SEQUENCE_TABLE}.roll_back",
        "sequence.scheduled = sequence.computed",
        "sequence.computed = sequence.scheduled",
    ),
    Mutation(
        "failed step's token still expected",
        f"{SEQUENCE_TABLE}.roll_back",
        "sequence.target = len(sequence.tokens)",
        "pass",
    ),
    Mutation(
        "rows not sent again after a failure",
        f"{SEQUENCE_TABLE}.roll_back",
        "sequence.row_sent = False",
        "pass",
    ),
    Mutation(
        "preempted sequence keeps its progress without its memory",
        f"{SEQUENCE_TABLE}.reset_progress",
        "sequence.computed = sequence.scheduled = 0",
        "pass",
    ),
    Mutation(
        "length limit off by one",
        f"{TOKENS}._take_token",
        "length >= sequence.limit",
        "length > sequence.limit",
    ),
    Mutation(
        "min_tokens ignored",
        f"{TOKENS}._take_token",
        "length >= sequence.min_length or is_forced",
        "True",
        first_seed=380,
    ),
    # -- swapping
    Mutation(
        "swap-in before swap-out",
        f"{SWAPS}.copy",
        "guard for guard in guards if guard is not None",
        "guard for guard in guards if False",
        first_seed=340,
    ),
    Mutation(
        "swap-out before its step",
        f"{SEQUENCE_TABLE}.preempt",
        "after_step=step - 1",
        "after_step=-1",
        first_seed=480,
    ),
    Mutation(
        "swap-in during a step that still uses the blocks",
        f"{PROMPTS}._resume",
        "after_step=builder.step - 1",
        "after_step=-1",
        first_seed=3840,
    ),
    Mutation(
        "step writes to blocks that are being copied",
        f"{SWAPS}.note_writes",
        "self._dependencies.update",
        "set().update",
    ),
    Mutation(
        "failed swap counts as successful",
        f"{SCHEDULER}._finish_swaps",
        "failed = swap_id in result.failed_swaps",
        "failed = False",
        first_seed=130,
    ),
    Mutation("swap slots leak", f"{SWAPS}.give_back", "self._free_full if", "[] if"),
    # -- overlap
    Mutation("row reused too soon", f"{SEQUENCE_TABLE}.preempt", "self.is_in_flight(sequence)", "False"),
    Mutation(
        "memory of an ended request free too soon",
        f"{SEQUENCE_TABLE}.remove",
        "and self.is_in_flight(sequence)",
        "and False",
        first_seed=310,
    ),
    Mutation(
        "token of an ended request delivered",
        f"{TOKENS}._take_token",
        "if sequence.finish_reason is not None",
        "if False",
    ),
    Mutation(
        "block shared by planning that gave no plan is never sent",
        f"{SCHEDULER}.schedule",
        "self._unsent_tables = builder.tables",
        "self._unsent_tables = []",
        first_seed=5_940,
    ),
    # -- budgets, rotation, priorities
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
        "sequence limit ignored by decodes",
        "weft.scheduling.budget:TokenBudget.take_decodes",
        "self.sequences -= count",
        "pass",
    ),
    Mutation("chunk limit ignored", f"{STEP_SIZE}.chunk", "self._config.max_chunk_tokens, ", ""),
    Mutation(
        "prompts stop if decodes use all of the time target",
        f"{STEP_SIZE}._affordable",
        "return max(tokens, self._block_size)",
        "return tokens",
    ),
    Mutation(
        "prompts have negative time if decodes exceed the time target",
        f"{STEP_SIZE}.begin_prompts",
        "max(0.0, self.spare_seconds(builder.decodes, budget.seconds))",
        "self.spare_seconds(builder.decodes, budget.seconds)",
    ),
    Mutation("skipped requests are lost", f"{PROMPTS}.plan", "queue.put_back(item)", "pass"),
    Mutation(
        "preempted sequence is admitted again in the same plan",
        f"{PROMPTS}.plan",
        "self._sequences.is_in_flight(first) or first.request_id in builder.preempted",
        "False",
        first_seed=930,
    ),
    Mutation(
        "preempted prompt continues in the same plan",
        f"{PROMPTS}.continue_prefill",
        "if sequence.state is not RequestState.RUNNING:",
        "if False:",
    ),
    Mutation("no rotation", f"{SEQUENCE_TABLE}.rotate", "if skipped and", "if False and"),
    Mutation(
        "entry of a preempted sequence stays in the plan",
        "weft.scheduling.plan_builder:PlanBuilder.drop",
        "self.decodes.remove(sequence)",
        "pass",
    ),
    Mutation(
        "victim of higher priority",
        "weft.scheduling.preemption:choose_victims",
        "            s.priority,",
        "            -s.priority,",
        first_seed=470,
    ),
    Mutation(
        "more victims than needed",
        "weft.scheduling.preemption:choose_victims",
        "if _holds_some(victim, shortage - freed):",
        "if True:",
        first_seed=630,
    ),
    Mutation(
        "age overtakes CRITICAL",
        "weft.scheduling.policy:_aged",
        "if sequence.priority == Priority.CRITICAL",
        "if False",
        first_seed=550,
    ),
    Mutation(
        "shortest job first without ageing",
        "weft.scheduling.policy:_shortest_job",
        "sequence.arrival + OVERTAKING_FACTOR",
        "OVERTAKING_FACTOR",
    ),
    Mutation(
        "longest job first",
        "weft.scheduling.policy:_shortest_job",
        "sequence.arrival + OVERTAKING_FACTOR",
        "sequence.arrival - OVERTAKING_FACTOR",
    ),
    Mutation(
        "answer ends at its expected length",
        f"{TOKENS}._take_token",
        "length >= sequence.limit",
        "length - sequence.prompt_length >= sequence.expected_tokens",
    ),
    Mutation(
        "request waits for a block that it computes itself",
        f"{PREFIX}.producer",
        "owner is not sequence and is_below(sequence, owner)",
        "True",
    ),
    Mutation(
        "announced blocks of a request that ended",
        f"{PREFIX}.withdraw",
        "if sequence.has_announced",
        "if False",
    ),
    Mutation(
        "deadline ignored",
        "weft.scheduling.deadlines:Deadlines.take_expired",
        "self._heap[0][0] <= now",
        "False",
    ),
    Mutation("pure decode not pure", f"{PLANNER}._plan_pure", "if builder.prefills:", "if False:"),
    Mutation("closed batch joined", f"{PROMPTS}.admission_is_open", "self._batch_is_open = False", "pass"),
    Mutation(
        "cancelled request stays in the queue",
        f"{SEQUENCE_TABLE}.remove",
        "self.queue_of(sequence).remove(sequence)",
        "pass",
    ),
    Mutation(
        "failure of a step ends all its requests", f"{SCHEDULER}.fail", "if failed.is_retry:", "if True:"
    ),
    # -- idle work
    Mutation(
        "idle work runs beside interactive requests",
        f"{SEQUENCE_TABLE}.pause_idle",
        "s.is_idle_work and not s.is_finishing",
        "False",
    ),
    Mutation(
        "idle work stays paused without interactive requests",
        f"{SEQUENCE_TABLE}.resume_idle",
        "if self.paused:",
        "if False:",
    ),
    Mutation(
        "interactive requests wait in the queue of idle work",
        f"{SEQUENCE_TABLE}.queue_of",
        "return self.idle_queue if sequence.is_idle_work else self.queue",
        "return self.idle_queue",
    ),
    Mutation(
        "interactive requests wait after the last idle one has ended",
        f"{SEQUENCE_TABLE}.remove",
        "self.active_queue = self.queue",
        "pass",
    ),
    Mutation(
        "interactive requests wait for blocks of a paused sequence",
        f"{SEQUENCE_TABLE}.pause_idle",
        "self.prefixes.withdraw(sequence)",
        "pass",
    ),
    Mutation(
        "paused sequences keep blocks that interactive requests need",
        f"{IDLE}.victims",
        "not kv_cache.available.covers(blocks)",
        "False",
    ),
    Mutation(
        "paused sequences keep rows that interactive requests need",
        f"{IDLE}.victims",
        "not has_rows",
        "False",
    ),
    Mutation(
        "an older idle sequence of low priority is kept, and a newer one of high priority preempted",
        f"{IDLE}.victims",
        "(s.priority, -s.order)",
        "(-s.priority, -s.order)",
        first_seed=2000,
    ),
    Mutation(
        "idle work shares steps where every row costs time",
        f"{IDLE}.__init__",
        "info.extra_rows_are_cheap",
        "True",
    ),
    Mutation(
        "idle work is added to a step with interactive prompts",
        f"{IDLE}._is_decode_step",
        "not builder.prefills",
        "True",
        first_seed=780,
    ),
    Mutation("idle decodes exceed the time target", f"{IDLE}.fill", "if seconds < 0:", "if False:"),
    Mutation(
        "idle prompts exceed the time target",
        f"{STEP_SIZE}._affordable",
        "not builder.prefills and builder.reserved is None",
        "not builder.prefills",
    ),
    Mutation(
        "idle work takes the last row",
        f"{MEMORY}.make_room",
        "kv_cache.free_rows > 1",
        "kv_cache.free_rows > 0",
        first_seed=1720,
    ),
    # -- grammars
    Mutation(
        "row with a grammar is planned before its last token is known",
        f"{PLANNER}._split",
        "sequence.needs_last_token and",
        "False and",
    ),
    Mutation(
        "row with a grammar does not wait after its first token",
        f"{PLANNER}._split",
        "target > len(sequence.tokens)",
        "target > len(sequence.tokens) > sequence.prompt_length",
    ),
    Mutation(
        "row with a grammar waits forever",
        f"{PLANNER}._split",
        "target > len(sequence.tokens)",
        "target >= len(sequence.tokens)",
    ),
    Mutation(
        "other rows wait for a row with a grammar",
        f"{PLANNER}._split",
        "continue  # its grammar",
        "return [], [], []  # its grammar",
        first_seed=1800,
    ),
    Mutation(
        "any stop token ends an answer with a grammar before min_tokens",
        f"{TOKENS}._take_token",
        "is_forced = is_eos and",
        "is_forced =",
        first_seed=1450,
    ),
    # -- logprobs
    Mutation(
        "logprobs of a prompt are off by one position",
        f"{TOKENS}._take_prompt_logprobs",
        "logprobs, first",
        "logprobs, first + 1",
    ),
    Mutation(
        "logprobs of a prompt are dropped",
        f"{TOKENS}._take_prompt_logprobs",
        "prompt_logprobs.update(",
        "__init__() or dict(",
    ),
    Mutation("a prompt with logprobs takes prefix hits", f"{PREFIX}.max_hits", "is not None", "is Ellipsis"),
    Mutation(
        "logprobs of a decode are reported and not kept",
        f"{TOKENS}._commit_decodes",
        "sequence.logprobs.append(logprob)",
        "pass",
    ),
    Mutation(
        "logprobs of a first token are those of another request",
        f"{TOKENS}._commit_prefills",
        "result.logprobs[sampled]",
        "result.logprobs[0]",
    ),
    # -- draft tokens
    Mutation(
        "one draft token too many is accepted",
        f"{TOKENS}._commit_drafts",
        "tokens[: 1 + num_accepted]",
        "tokens[: 2 + num_accepted]",
    ),
    Mutation(
        "rejected draft tokens count as computed",
        f"{TOKENS}._commit_drafts",
        "sequence.scheduled, sequence.target = sequence.computed, len(sequence.tokens)",
        "sequence.target = len(sequence.tokens)",
    ),
    Mutation(
        "tokens after rejected draft tokens are still expected",
        f"{TOKENS}._commit_drafts",
        "sequence.scheduled, sequence.target = sequence.computed, len(sequence.tokens)",
        "sequence.scheduled = sequence.computed",
    ),
    Mutation(
        "all draft tokens count as computed",
        f"{TOKENS}._commit_drafts",
        "start + index + 1)",
        "start + 1 + len(drafts))",
    ),
    Mutation(
        "samples of a sequence with draft tokens are those of another",
        f"{TOKENS}._commit_drafts",
        "sampled += 1 + len(drafts)",
        "sampled += len(drafts)",
    ),
    Mutation(
        "logprobs after draft tokens are those of the first",
        f"{TOKENS}._commit_drafts",
        "result.logprobs[sampled + index]",
        "result.logprobs[sampled]",
        first_seed=100,
    ),
    Mutation(
        "draft tokens exceed the length limit",
        f"{SPECULATION}.add_draft_tokens",
        "sequence.limit - sequence.target - 1",
        "sequence.limit - sequence.target",
    ),
    Mutation(
        "budget ignored by draft tokens",
        f"{SPECULATION}.add_draft_tokens",
        "room -= count",
        "pass",
        first_seed=440,
    ),
    Mutation(
        "draft tokens after a token that is being sampled",
        f"{SPECULATION}.add_draft_tokens",
        " or sequence.target > len(sequence.tokens)",
        "",
    ),
    Mutation(
        "draft tokens without blocks",
        f"{SPECULATION}._take_blocks",
        "return first * self._block_size - start - 1",
        "return count",
        first_seed=330,
    ),
    Mutation(
        "blocks of draft tokens are never sent",
        f"{SPECULATION}._take_blocks",
        "builder.note_tables(sequence, first)",
        "pass",
    ),
    Mutation(
        "forced tokens are proposed again after they were sampled",
        f"{PROPOSER}.update",
        "self._forced = forced[len(new) :] if forced[: len(new)] == tuple(new) else ()",
        "self._forced = forced",
    ),
    Mutation(
        "draft tokens contradict the forced tokens",
        f"{PROPOSER}.propose",
        "if matched[: len(forced)] == forced",
        "if matched",
    ),
    Mutation(
        "forced tokens of another sequence",
        f"{TOKENS}.commit",
        "result.forced.get(sequence.request_id)",
        "next(iter(result.forced.values()))",
    ),
    Mutation(
        "grammar is not rolled back after rejected draft tokens",
        f"{NOOP}._sample_after_drafts",
        "row.grammar.copy()",
        "row.grammar",
    ),
    Mutation(
        "mask after the wrong draft token",
        f"{NOOP}._sample_after_drafts",
        "_after(grammar, drafts[index])",
        "_after(grammar, drafts[0])",
    ),
    Mutation(
        "grammar consumes samples after a rejected draft token",
        f"{NOOP}._sample_after_drafts",
        "== drafts[:index]:",
        "!= 0:",
    ),
    Mutation(
        "grammar of a row begins anew after a preemption",
        "weft.backends.noop:_Row.__init__",
        "info, start.tokens[start.prompt_length :])",
        "info)",
    ),
    Mutation(
        "draft tokens come from answers with another salt",
        f"{PROPOSER}._find",
        "self._answers.of(self._cache_salt)",
        "next((one for salt, one in self._answers._indexes.items() if salt != self._cache_salt), None)",
    ),
    Mutation(
        "the answers of a dropped generation are still counted",
        f"{ANSWERS}._unlist",
        "-= index.num",
        "-= 0 * index.num",
    ),
    Mutation(
        "an index of answers stays listed with its old size",
        f"{ANSWERS}._unlist",
        "self._by_size[length].pop(cache_salt, None)",
        "pass",
    ),
    Mutation(
        "finished answers take more memory than allowed",
        f"{ANSWERS}._index",
        "while self",
        "while False and self",
    ),
    Mutation(
        "a full index drops its newest answers",
        "weft.scheduling.answer_index:AnswerIndex.drop_oldest",
        "self._generations.pop()",
        "self._generations.popleft()",
    ),
    Mutation(
        "a waiting answer is counted after it is indexed",
        f"{ANSWERS}.advance",
        "self.num_waiting -= len(text.tokens)",
        "pass",
    ),
    Mutation(
        "pieces of an answer are indexed one position off",
        "weft.scheduling.answer_index:_Generation.extend_text",
        "] = index",
        "] = index - 1",
    ),
    Mutation(
        "an answer is resumed in the next one",
        f"{PROPOSER}._find_resumed",
        "if END in window:",
        "if False and END in window:",
    ),
    Mutation(
        "an answer is resumed one position off",
        f"{PROPOSER}._find_resumed",
        "index = found // _TOKEN_BYTES + length",
        "index = found // _TOKEN_BYTES + length - 1",
    ),
    Mutation(
        "draft tokens of an answer go on past its end",
        f"{PROPOSER}._matched",
        "list(takewhile(lambda token: token != END, learned))",
        "[max(token, 0) for token in learned]",
    ),
    Mutation(
        "draft tokens come from the wrong place of the prediction",
        f"{PROPOSER}._find",
        "after_match = predicted_length, True, index, index",
        "after_match = predicted_length, True, index, index - 1",
    ),
    Mutation(
        "a match in the text is read from the prediction",
        f"{PROPOSER}._find",
        "self._is_predicted, self._learned, self._learned_rates = False, None, None",
        "self._is_predicted, self._learned, self._learned_rates = bool(self._prediction), None, None",
    ),
    Mutation(
        "all draft tokens count as predicted",
        f"{PROPOSER}.count_checked",
        "if self._is_predicted and",
        "if True or",
    ),
    Mutation(
        "step is planned while one with draft tokens is in flight",
        "weft.engine.loop:EngineCore._may_plan",
        "self.scheduler.may_plan_ahead and",
        "(self.scheduler.may_plan_ahead or self._in_flight[-1].plan.drafts) and",
    ),
    Mutation(
        "decodes with draft tokens come before plain decodes",
        "weft.scheduling.plan_builder:PlanBuilder.freeze",
        "[*decodes, *drafts,",
        "[*drafts, *decodes,",
    ),
    Mutation(
        "draft tokens are written one position off",
        f"{NOOP}.submit",
        "row_tokens[start + 1 :] = drafts",
        "row_tokens[start + 2 :] = drafts",
    ),
    Mutation(
        "samples after draft tokens are written one position off",
        f"{NOOP}._sample_after_drafts",
        "row.tokens[start + 1 :] =",
        "row.tokens[start + 2 :] =",
    ),
)

TIER_MUTATIONS = (
    # -- when blocks move
    Mutation(
        "block moves one position early", f"{KV_CACHE}.needed", "stored_blocks(end - 1", "stored_blocks(end"
    ),
    Mutation(
        "block moves one position late",
        f"{KV_CACHE}.needed",
        "stored_blocks(end - 1",
        "stored_blocks(end - 2",
    ),
    Mutation(
        "move of a request that starts with a prefix hit is lost",
        f"{PROMPTS}._start",
        "if needed.store:",
        "if needed.store and not hits:",
    ),
    Mutation(
        "move of an adopted block is lost",
        f"{KV_CACHE}.adopt",
        "allocation.blocks.append(block)",
        "allocation.stored += len(allocation.blocks) == allocation.stored; allocation.blocks.append(block)",
    ),
    Mutation(
        "entry moves twice",
        f"{KV_CACHE}.move",
        "allocation.stored = index + 1",
        "allocation.stored += index > 0",
    ),
    Mutation(
        "content that two requests move is copied twice",
        f"{KV_CACHE}.move",
        "origin, block = -1, found",
        "block = found",
    ),
    Mutation(
        "content that the store lacks is not copied",
        f"{KV_CACHE}.move",
        "self.store.register(block, hashes[index])",
        "origin = -1 if self.store.register(block, hashes[index]) else origin",
    ),
    Mutation(
        "row start contains the moves of its own step",
        "weft.scheduling.plan_builder:_row_start",
        "blocks=tuple(allocation.blocks)",
        "blocks=tuple([*allocation.arriving, *allocation.blocks[len(allocation.arriving) :]])",
    ),
    Mutation(
        "draft token completes a block",
        f"{SPECULATION}._take_blocks",
        "self._block_size - 2 - start",
        "self._block_size - 1 - start",
    ),
    # -- how long the full block is held
    Mutation(
        "full block is free before the step that moves it ends",
        f"{KV_CACHE}.settle_moves",
        "self._moving[0][0] <= step",
        "self._moving[0][0] <= step + 1",
    ),
    Mutation(
        "full block is free once its move is planned",
        f"{KV_CACHE}.move",
        "allocation.leaving[index] = full",
        "self.pool.retire(full)",
    ),
    Mutation(
        "full block that moved is never free", f"{KV_CACHE}.settle_moves", "self.pool.retire(full)", "pass"
    ),
    Mutation(
        "preempted sequence keeps store blocks for its moves",
        f"{KV_CACHE}._drop_moves",
        "if allocation.arriving:",
        "if False:",
        first_seed=640,
    ),
    Mutation(
        "preempted sequence keeps full blocks that were leaving",
        f"{KV_CACHE}._drop_moves",
        "self.pool.retire(full)",
        "pass",
    ),
    # -- failures
    Mutation(
        "rolled-back move keeps its store block",
        f"{KV_CACHE}.undo_moves",
        "allocation.blocks[move.entry] = full",
        "pass",
    ),
    Mutation(
        "rolled-back move still counts",
        f"{KV_CACHE}.undo_moves",
        "allocation.stored = move.entry",
        "pass",
    ),
    Mutation(
        "moves of a failed step are settled",
        f"{SEQUENCE_TABLE}.roll_back",
        "self.kv_cache.undo_moves()",
        "pass",
    ),
    Mutation(
        "store block of a failed step stays in the prefix cache",
        "weft.scheduling.plan_builder:PlanBuilder._move",
        "self.registered += registered",
        "pass",
    ),
    Mutation(
        "two sequences that need each other's blocks preempt themselves in turn",
        f"{MEMORY}.victim_is_in_plan",
        "return outranks and self.is_on_time(builder.step, sequence)",
        "return False",
        first_seed=801_100,
    ),
    # -- hits, swaps
    Mutation(
        "prefix hit without its full blocks",
        f"{PREFIX}._hits_in_tiers",
        "first_full <= border and",
        "True and",
    ),
    Mutation(
        "prefix hit without its store blocks",
        f"{PREFIX}._hits_in_tiers",
        "border = min(max(0, length + first_ends_a_block - self._tail_blocks), len(stored))",
        "border = max(0, length + first_ends_a_block - self._tail_blocks)",
    ),
    Mutation(
        "adopts blocks until no full block is left to continue",
        f"{PREFIX}.next_hit",
        "if index - allocation.stored >= self._pool.num_blocks - 1",
        "if False",
        first_seed=5_940,
    ),
    Mutation(
        "swap loses store blocks",
        f"{KV_CACHE}.swap_out",
        "allocation.blocks, slots,",
        "allocation.blocks[allocation.stored :], slots[allocation.stored :],",
    ),
    Mutation("swap slots of the store leak", f"{SWAPS}.give_back", "else self._free_store", "else []"),
    Mutation(
        "step moves into a block that is being copied",
        f"{KV_CACHE}._take",
        "self._swaps.note_writes(taken)",
        "pass",
    ),
)


@contextmanager
def applied(mutation: Mutation) -> Iterator[None]:
    """Applies the mutation inside the `with` block."""
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
    """The modules of weft that imported the function by name."""
    modules = [m for key, m in list(sys.modules.items()) if key.startswith("weft")]
    return [m for m in modules if getattr(m, name, None) is function]
