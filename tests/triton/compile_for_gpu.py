"""Compiles the kernels of a forward pass and of sampling for a Hopper GPU, on a machine without a GPU, and checks
every launch. Run as a script, without the interpreter. It finds errors that the interpreter does not: shapes that
are not powers of two, types that do not fit, more shared memory than a multiprocessor has."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from small_decoders import BLOCK_SIZE, PLAIN, Texts, decoder_of, device_batch
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver
from triton.tools.tensor_descriptor import TensorDescriptor

from weft.backends.cuda.sampler import DeviceSampler
from weft.models.config import ExpertsConfig, ModelConfig
from weft.ops.base import AttentionShape, TwoTierCache
from weft.ops.triton.attention import Attention
from weft.ops.triton.device import Device
from weft.ops.triton.ops import TritonOps
from weft.ops.triton.program import record
from weft.ops.triton.rope import RopeTables
from weft.ops.triton.store import Moves, new_store
from weft.plan import RowStart
from weft.request import RequestId, SamplingParams

# Shared memory of one program on such a GPU.
SHARED_BYTES = 227 << 10


Call = tuple[str, list[Any]]
calls: list[Call] = []


class Launcher:
    """Replaces Triton's launcher of a compiled kernel: records the call."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self.name = metadata.name

    def __call__(self, *arguments: Any) -> None:
        # Grid, stream, function, metadata, three values for hooks, and the kernel arguments.
        calls.append((self.name, [comparable(value) for value in (*arguments[:6], *arguments[9:])]))


def comparable(value: Any) -> Any:
    if isinstance(value, TensorDescriptor):
        return value.base.data_ptr(), value.shape, value.strides, value.block_shape
    return value.data_ptr() if isinstance(value, torch.Tensor) else value


class Utilities:
    def load_binary(self, *arguments: Any) -> tuple[int, int, int, int, int]:
        return 1, 2, 32, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_BYTES}


class NoGpu:
    """Replaces Triton's driver, which Triton queries before it compiles and launches."""

    utils = Utilities()
    launcher_cls = Launcher

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class HostMemory(Device):
    """A GPU with host memory: nothing is launched."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self.index = 0
        self.is_gpu = False
        self.processors = 132
        self.dependent_launches = True
        self.remembers_launches = True
        self._launches = {}


compiled: dict[str, int] = {}
compile_and_launch = JITFunction.run


def run_and_check(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
    kernel = compile_and_launch(self, *args, grid=grid, warmup=warmup, **options)
    compiled[kernel.hash] = kernel.metadata.shared
    name, code = self.fn.__name__, kernel.asm["ptx"]
    if "DEPENDENT" in self.arg_names:
        waits, releases = code.find("griddepcontrol.wait"), code.find("griddepcontrol.launch_dependents")
        assert waits >= 0, f"{name} does not wait for the previous kernel"
        assert releases >= 0, f"{name} never lets the next kernel begin"
        assert waits < releases or name == "_rms_norm", (
            f"{name} lets the next kernel begin before it has waited"
        )
    return kernel


def compile_all(config: ModelConfig, plan: list[list[int]], invariant: bool = False) -> None:
    device = HostMemory()
    ops = TritonOps(device)
    decoder = decoder_of(config, ops)
    program = record(decoder, ops, max_tokens=64, max_sampled=64, invariant=invariant)
    texts = Texts.of_lengths(60, 60)
    cache = decoder.new_cache(texts.blocks, BLOCK_SIZE)
    for step in texts.steps(plan):
        batch = device_batch(step, device)
        program._piecewise_graphs._graphs = defaultdict(dict)
        for from_graphs in (False, True):
            program._piecewise_graphs.begin_step = lambda rows, answer=from_graphs: answer
            launch_twice(lambda batch=batch: program.run(batch, cache))


def compile_decodes_of_a_full_gpu(config: ModelConfig) -> None:
    """Many requests with long contexts: the step is only launched, not computed."""
    device = HostMemory()
    decoder = decoder_of(config, TritonOps(device))
    texts = Texts.of_lengths(60, 60)
    (step,) = texts.steps([[1, 1]])
    few = device_batch(step, device)
    batch = replace(few, tokens=256, requests=256, longest_context=4096)
    shape = config.attention
    attention = Attention(shape, None, 256, 4096, device)
    assert attention.splits(256, 4096).shared
    width = shape.heads * shape.head_size
    rows = device.empty(256, width, dtype=torch.bfloat16)
    cache = decoder.new_cache(texts.blocks, BLOCK_SIZE)
    tiers = TwoTierCache(cache, decoder.new_store(texts.blocks, BLOCK_SIZE, 4), 4, 2)
    for any_cache in (cache, tiers):
        launch_twice(lambda any_cache=any_cache: attention.run(batch, rows, any_cache, 0, rows))


def compile_two_tiers(
    bits: int, heads: int, lengths: list[int], invariant: bool = False, size: int = 64
) -> None:
    """RoPE, moves and attention of one layer, for steps with `length` tokens per request."""
    device = HostMemory()
    shape = AttentionShape(heads, 1, size, 0.125)
    store = new_store(4, 1, BLOCK_SIZE, shape, bits, device)
    full = device.zeros(4, 1, 2, 1, BLOCK_SIZE, size, dtype=torch.bfloat16)
    cache = TwoTierCache(full, store, bits, 2)
    attention = Attention(shape, None, 64, 256, device, invariant)
    tables = RopeTables(PLAIN.patterns[0].rope, 256, device)
    texts = Texts.of_lengths(60, 60)
    (step,) = texts.steps([[1, 1]])
    for length in lengths:
        batch = replace(
            device_batch(step, device),
            tokens=2 * length,
            longest_query=length,
            decodes=0,
            moves=Moves(device.zeros(2, dtype=torch.int32), 1),
        )
        rows = device.zeros(2 * length, (heads + 2) * size, dtype=torch.bfloat16)
        output = device.zeros(2 * length, heads * size, dtype=torch.bfloat16)
        launch_twice(
            lambda batch=batch, rows=rows, output=output: attention.rope_and_attend(
                batch, rows, cache, 0, tables, None, output
            )
        )


def compile_sampling() -> None:
    """Greedy, drawn, and with all sampling parameters."""
    device, count = HostMemory(), 64
    row_tokens = device.zeros(count, 128, dtype=torch.int32)
    sampler = DeviceSampler(count, 50_000, {0}, row_tokens, device, count)
    logits = device.zeros(count, 50_000, dtype=torch.bfloat16)
    rows = device.zeros(count, dtype=torch.int32)
    everything = {"top_k": 50, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.9, "repetition_penalty": 1.1}
    everything |= {"presence_penalty": 1.0, "logit_bias": {3: 1.0}, "logprobs": 5, "xtc_probability": 0.5}
    for params in (SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(**everything)):
        sampler.start([RowStart(0, RequestId("0"), (1,), 1, params, 0, ())])
        path = sampler.path([0])
        launch_twice(lambda path=path: sampler.sample(logits, rows, rows, path))


def launch_twice(work: Callable[[], object]) -> None:
    launched: list[list[Call]] = []
    for _ in range(2):
        calls.clear()
        work()
        launched.append(calls.copy())
    assert launched[0] == launched[1], "the remembered launch differs from the first one"


def main() -> None:
    driver.set_active(NoGpu())
    JITFunction.run = run_and_check
    # Sizes that are multiples of the tiles, as in real models: most kernels have a branch for them.
    wide = replace(
        PLAIN,
        layers=1,
        layer_patterns=(0,),
        hidden_size=256,
        feed_forward_size=1024,
        qk_norm="head",
        attention=replace(PLAIN.attention, heads=8, head_size=64),
    )
    compile_all(wide, [[40, 0], [1, 0], [1, 1], [10, 10]])
    compile_all(replace(wide, experts=ExpertsConfig(8, 2, 64, normalised=True)), [[1, 0]], invariant=True)
    compile_decodes_of_a_full_gpu(wide)
    compile_two_tiers(8, 4, [1])
    compile_two_tiers(4, 4, [1, 30])
    compile_two_tiers(4, 2, [30], size=16)
    compile_two_tiers(8, 20, [1, 30], invariant=True)
    compile_sampling()
    print(
        f"{len(compiled)} kernels compiled, the largest with {max(compiled.values())} bytes of shared memory"
    )


if __name__ == "__main__":
    main()
