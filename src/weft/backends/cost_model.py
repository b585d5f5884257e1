"""A backend that computes nothing. A linear cost model says how long a step takes on a virtual clock.

The real scheduler and engine use this backend. So a run shows how a device with these costs would be scheduled: in a
fraction of the time, and with the same result on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol
from zlib import crc32

from weft.clock import VirtualClock
from weft.config import KvCachePoolConfig
from weft.plan import BackendInfo, IterationPlan, StepResult, SwapTask
from weft.request import Grammar
from weft.tiers import PoolSizes, choose_sizes, longest_context, store_vector_bytes

_HEAD_SIZE = 64
"""The head size assumed for the block sizes of the two tiers. Only the ratio of these sizes matters."""


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds of a step: base + per_token * tokens + per_context * context + per_pair * pairs.

    An entry with `count` tokens from position `start` on has a context of start + count. It has one pair for each of
    its tokens and each position up to that token. The context dominates decodes, the pairs dominate long prompts.
    """

    base: float
    """Reading the weights once, and launching the step."""
    per_token: float
    """The linear layers for one token."""
    per_context: float
    """Reading the K and V of one position."""
    per_pair: float = 0.0
    """The attention arithmetic of one token over one position."""
    swap_per_block: float = 1e-4
    """Copying one block between device and host, one direction."""

    def seconds(self, plan: IterationPlan) -> float:
        """How long the step of the plan keeps the device busy. A plan without rows takes no time."""
        if not plan.rows:
            return 0.0
        first = plan.num_decodes
        context = pairs = first + sum(plan.starts[:first])
        for start, count in zip(plan.starts[first:], plan.counts[first:], strict=True):
            context += start + count
            pairs += count * start + count * (count + 1) // 2
        return (
            self.base + self.per_token * plan.num_tokens + self.per_context * context + self.per_pair * pairs
        )


ZEN3_SMOLLM2_135M = StepCosts(
    base=2.0e-3, per_token=0.85e-3, per_context=2.0e-6, per_pair=0.5e-6, swap_per_block=75e-6
)
"""SmolLM2-135M in 4 bits on two Zen 3 cores.

    linear layers     1 token       8 tokens   32 tokens   long prompts
    measured          2.4-2.8 ms    13.5 ms    30 ms       1,060-1,420 tokens/s
    cost model        2.9 ms        8.8 ms     29 ms       1,176 tokens/s

The cost model is too fast for 8 tokens: the kernels compute tiles of six tokens, and the second tile is mostly padding.
Attention: 46 kB of f32 K and V per position at 25 GB/s, 69 kFLOP per pair at 140 GFLOP/s. Swap: a block of 16 positions
at 10 GB/s.
"""

H200_LLAMA_8B = StepCosts(
    base=4.0e-3, per_token=22e-6, per_context=30e-9, per_pair=1.0e-9, swap_per_block=42e-6
)
"""Llama-3.1-8B in bf16 on one H200.

Linear layers, measured: 4.0 ms for 1 token; 42,400 tokens/s on prompts of 2,048 (cost model: 43,400). Attention: 131 kB
of K and V per position at 4.38 TB/s, 0.52 MFLOP per pair at 500 TFLOP/s. 256 decodes at 320 positions take 12.1 ms in
the cost model, and 12.0 ms measured in a CUDA graph without fused kernels. Swap: 50 GB/s, an assumption.
"""


class Costs(Protocol):
    """How long steps and swaps take."""

    @property
    def per_token(self) -> float:
        """Seconds of one more token: the cost of a recompute."""
        ...

    @property
    def swap_per_block(self) -> float: ...

    def seconds(self, plan: IterationPlan) -> float: ...


class SimulatedStep:
    """A submitted plan and the time at which it ends. It is also the plan's `StepHandle`."""

    __slots__ = ("backend", "end", "plan")

    def __init__(self, backend: CostModelBackend, plan: IterationPlan, end: float) -> None:
        self.backend = backend
        self.plan = plan
        self.end = end

    def result(self) -> StepResult:
        return self.backend._finish(self)


class CostModelBackend:
    """Simulates steps, one at a time, and swaps, also one at a time. A swap may overlap a step. Waiting advances the
    clock."""

    def __init__(
        self,
        clock: VirtualClock,
        costs: Costs = ZEN3_SMOLLM2_135M,
        *,
        vocabulary_size: int = 49_152,
        max_context: int = 8192,
        default_blocks: int = 4096,
    ) -> None:
        """`default_blocks`: the full blocks that fit into its memory, where no other size is configured."""
        self._clock = clock
        self._costs = costs
        self._vocabulary_size = vocabulary_size
        self._max_context = max_context
        self._default_blocks = default_blocks
        self.busy_seconds = 0.0
        """The sum of the seconds of all steps."""
        self._device_free_at = 0.0
        self._swaps_free_at = 0.0
        # End times of steps and swaps that are not yet reported. An id that is missing here has ended.
        self._step_ends: dict[int, float] = {}
        self._swap_ends: dict[int, float] = {}

    def allocate(self, pool: KvCachePoolConfig, num_rows: int, max_tokens: int = 0) -> BackendInfo:
        max_context, sizes = self._max_context, PoolSizes(pool.num_blocks or self._default_blocks, 0)
        block_bytes = store_block_bytes = 0
        if pool.is_two_tier:
            block_bytes, store_block_bytes = 2 * _HEAD_SIZE, store_vector_bytes(_HEAD_SIZE, pool.store_bits)
            sizes = choose_sizes(
                pool,
                block_bytes=block_bytes,
                store_block_bytes=store_block_bytes,
                free_memory=self._default_blocks * block_bytes,
                model_context=max_context,
                step_tokens=max_tokens,
            )
            max_context = longest_context(max_context, sizes, pool.block_size, pool.tail_blocks)
        swap_blocks = sizes.full if pool.swap_blocks is None else pool.swap_blocks
        return BackendInfo(
            vocabulary_size=self._vocabulary_size,
            max_context=max_context,
            num_blocks=sizes.full,
            block_size=pool.block_size,
            swap_blocks=swap_blocks,
            bytes_per_block=block_bytes,
            store_blocks=sizes.store,
            store_swap_blocks=-(-swap_blocks * sizes.store // sizes.full),
            bytes_per_store_block=store_block_bytes,
            tail_blocks=pool.tail_blocks,
            recompute_seconds_per_token=self._costs.per_token,
            swap_seconds_per_block=self._costs.swap_per_block,
        )

    def check_grammar(self, grammar: Grammar) -> None:
        pass  # the tokens are arbitrary numbers, so no grammar is checked

    def submit(self, plan: IterationPlan) -> SimulatedStep:
        # Computes the end times of the swaps first, in the order of their ids. A swap depends only on earlier swaps.
        # This step may depend on any of these swaps.
        for task in sorted((*plan.swap_out, *plan.swap_in)):
            self._start_swap(task)
        seconds = self._costs.seconds(plan)
        earliest = [self._swap_ends.get(swap_id, 0.0) for swap_id in plan.after_swaps]
        start = max(self._clock.now, self._device_free_at, *earliest)
        self._device_free_at = self._step_ends[plan.step] = end = start + seconds
        self.busy_seconds += seconds
        return SimulatedStep(self, plan, end)

    def close(self) -> None:
        self._step_ends.clear()
        self._swap_ends.clear()

    def _start_swap(self, task: SwapTask) -> None:
        earliest = [self._swap_ends.get(swap_id, 0.0) for swap_id in task.after_swaps]
        earliest.append(self._step_ends.get(task.after_step, 0.0))
        start = max(self._clock.now, self._swaps_free_at, *earliest)
        end = start + self._costs.swap_per_block * len(task.blocks)
        self._swaps_free_at = self._swap_ends[task.swap_id] = end

    def _finish(self, step: SimulatedStep) -> StepResult:
        clock, plan = self._clock, step.plan
        clock.advance_to(step.end)
        if not plan.rows and self._swap_ends:
            clock.advance_to(min(self._swap_ends.values()))
        self._step_ends.pop(plan.step, None)
        finished = tuple(swap_id for swap_id, end in self._swap_ends.items() if end <= clock.now)
        for swap_id in finished:
            del self._swap_ends[swap_id]
        vocabulary = self._vocabulary_size
        tokens = [
            (crc32(request_id.encode()) + start + count) % vocabulary
            for request_id, start, count, samples in zip(
                plan.request_ids, plan.starts, plan.counts, plan.samples, strict=True
            )
            if samples
        ]
        return StepResult(tokens=tokens, finished_swaps=finished)
