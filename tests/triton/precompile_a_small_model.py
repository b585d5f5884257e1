"""Run as a script, without the interpreter: the precompiled kernels of a small model are those that would be
launched, and are compiled once."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import triton
from small_decoders import PLAIN, shapes

from weft.backends.cuda import precompile
from weft.backends.cuda.precompile import KernelPrecompiler, Outline, Sizes, StoredShape
from weft.config import KvCacheKind, KvCachePoolConfig
from weft.plan import IterationPlan


def main() -> None:
    config = replace(PLAIN, max_context=256)
    stored = ((name, StoredShape(name, shape, "BF16")) for name, shape in shapes(config))
    outline = Outline(config, tuple(stored), "bfloat16", False, 90, 132, True)
    sizes = Sizes(KvCachePoolConfig(num_blocks=16, block_size=16), num_rows=20, max_tokens=128)

    two_tier = KvCachePoolConfig(
        num_blocks=16,
        block_size=16,
        kv_cache=KvCacheKind.TWO_TIER,
        tail_length=64,
        store_bits=4,
        store_blocks=16,
    )
    assert "move_blocks" in {
        name for _, name, _ in kernels_to_compile(outline, replace(sizes, pool=two_tier))
    }
    met = kernels_to_compile(outline, sizes)
    names = {name for _, name, _ in met}
    assert {
        "_gemv",
        "_tile",
        "decode_attention",
        "prefill_attention",
        "choose_kernel",
        "copy_kernel",
    } <= names

    # One kernel is compiled by two processes, and then never again.
    precompile._MASKED = ()
    precompile._plans = lambda sizes: iter([IterationPlan(0, 0, (), (), (), (), ())])
    precompile.compile_all(outline, sizes, processes=2)
    binaries = list(Path(triton.knobs.cache.dir).rglob("publish.cubin"))
    assert len(binaries) == 1
    done = KernelPrecompiler(outline)
    done.begin(sizes)
    assert done._process is None
    done.begin(replace(sizes, pool=replace(sizes.pool, num_blocks=17)))  # both have the context of the model
    assert done._process is None
    print(f"{len(met)} kernels found")


def kernels_to_compile(outline: Outline, sizes: Sizes) -> list[tuple[str, str, str]]:
    """Tensors without memory and tensors with memory must give the same kernels, with the same compile keys."""
    met = []
    for memory in ("meta", "cpu"):
        shares = precompile.prepare_to_compile(outline.capability)
        precompile.precompile(outline, sizes, memory)
        met.append(list(shares.launched))
    assert met[0] == met[1], set(met[0]) ^ set(met[1])
    return met[0]


if __name__ == "__main__":
    sys.exit(main())
