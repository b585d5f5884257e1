"""Decode over 16 contexts of 4,096 tokens through LLM.generate: full, 8 bits, 4 bits; c_engine.py [8b|0.6b] (~45 s)."""
import sys, time
from weft.bench.gpu_work import open_shape
from weft.config import KvCacheKind, PriorityPolicy
from weft.llm import LLM
from weft.request import SamplingParams
import random

name = sys.argv[1] if len(sys.argv) > 1 else "8b"
N, PROMPT, NEW = 16, 4000, 96
checkpoint = open_shape(name)
chance = random.Random(3)
prompts = [[chance.randrange(10, 9000) for _ in range(PROMPT)] for _ in range(N)]
for label, options in {"full": {}, "8 bits": {"kv_cache": KvCacheKind.TWO_TIER, "store_bits": 8}, "4 bits": {"kv_cache": KvCacheKind.TWO_TIER, "store_bits": 4}}.items():
    begin = time.time()
    llm = LLM(checkpoint, device="cuda", max_context=4352, memory=12 << 30 if name == "8b" else 8 << 30, max_running=N, max_tokens_per_step=8192,
              max_prefill_tokens=8192, max_chunk_tokens=4096, prefix_caching=True, policy=PriorityPolicy.FCFS, **options)
    params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
    first = llm.generate(prompts, params)
    assert all(getattr(result, "error", None) is None for result in first), first[0]
    # compiles, captures, and leaves the prompts in the cache
    llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
    speeds = []
    for _ in range(2):
        one = time.time(); llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)); one = time.time() - one
        took = time.time(); llm.generate(prompts, params); took = time.time() - took
        speeds.append(N * (NEW - 1) / (took - one))
    fresh = [[chance.randrange(10, 9000) for _ in range(PROMPT)] for _ in range(N)]
    prefill = time.time(); llm.generate(fresh, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)); prefill = time.time() - prefill
    metrics = llm.engine.metrics()
    print(f"{name} {label:7} {max(speeds):8.0f} tokens/s decoding ({1e3 * N / max(speeds):.2f} ms a step)  prompts again: {one:.2f} s  new prompts: {N * PROMPT / prefill:.0f} tokens/s  all of it took {time.time() - begin:.0f} s  {metrics.two_tier}", flush=True)
    llm.close() if hasattr(llm, "close") else llm.engine.stop()
    del llm
