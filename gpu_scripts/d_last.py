"""Decoding over 16 contexts of 4,096 through the engine, by the times of its steps: d_last.py [shape] [kinds]; ~25 s a kind."""
import gc, os, random, sys, time
import torch
from weft.backends.cuda.runner import open_cuda_backend
from weft.bench.gpu_work import open_shape
from weft.config import KvCacheKind, KvCachePoolConfig, PreemptionMode, PriorityPolicy, SchedulerConfig, ServingEngineConfig
from weft.engine.serving import ServingEngine
from weft.request import InferenceRequest, SamplingParams

SMALL = os.environ.get("SMALL")
device = "cpu" if SMALL else "cuda"
shape = sys.argv[1] if len(sys.argv) > 1 else "8b"
kinds = sys.argv[2].split(",") if len(sys.argv) > 2 else ["8", "full", "4"]
N, PROMPT, WARM, STEPS = (2, 40, 3, 4) if SMALL else (16, 4000, 20, 64)


def wait():
    if not SMALL:
        torch.cuda.synchronize()


for kind in kinds:
    begin = time.time()
    backend = open_cuda_backend(open_shape(shape), max_context=64 * 2 if SMALL else 4352, device=device)
    tiers = {} if kind == "full" else {"kv_cache": KvCacheKind.TWO_TIER, "store_bits": int(kind), "tail_length": 16 if SMALL else 256}
    pool = KvCachePoolConfig(memory=(1 << 20) if SMALL else 12 << 30, swap_blocks=0, **tiers)
    scheduler = SchedulerConfig(policy=PriorityPolicy.FCFS, max_running=N, max_tokens_per_step=8192, max_prefill_tokens=8192, max_chunk_tokens=8192, prefix_caching=False)
    seen = []
    submit = backend.submit

    def watched(plan, submit=submit, seen=seen):
        seen.append((plan.num_decodes == len(plan.rows) == N, len(plan.moved_rows)))
        return submit(plan)

    backend.submit = watched
    engine = ServingEngine(backend, ServingEngineConfig(scheduler, pool), seed=1)
    chance = random.Random(3)
    ids = [engine.submit(InferenceRequest(tuple(chance.randrange(10, 500) for _ in range(PROMPT)), SamplingParams(temperature=0.0, max_tokens=WARM + STEPS + 40, ignore_eos=True))) for _ in range(N)]
    opened = time.time() - begin
    while sum(all_decode for all_decode, _ in seen) < WARM:
        assert engine.run_iteration(), "over too early"
    wait()
    times, first = [], len(seen)
    for _ in range(STEPS):
        now = time.perf_counter()
        engine.run_iteration()
        times.append(time.perf_counter() - now)
    wait()
    took = sum(times)
    steps = seen[first:]
    moves = [i for i, (_, moved) in enumerate(steps) if moved]
    plain = sorted(t for i, t in enumerate(times) if not any(abs(i - m) <= 2 for m in moves))
    print(f"{shape} {kind:5} {N * STEPS / took:7.0f} tokens/s  {1e3 * took / STEPS:.3f} ms a step (median of those without moves {1e3 * plain[len(plain) // 2]:.3f}), "
          f"{sum(moved for _, moved in steps)} blocks moved in {len(moves)} of {STEPS} steps; opened in {opened:.0f} s, all {time.time() - begin:.0f} s", flush=True)
    if moves:
        print("   ms around moves:", [[round(1e3 * t, 2) for t in times[m - 1 : m + 4]] for m in moves[:3]], flush=True)
    if kind == kinds[0] and not SMALL:
        try:
            from torch.profiler import ProfilerActivity, profile

            with profile(activities=[ProfilerActivity.CUDA]) as profiled:
                for _ in range(17):
                    engine.run_iteration()
                wait()
            events = [event for event in profiled.events() if event.device_type.name == "CUDA"]
            total = {}
            for event in events:
                entry = total.setdefault(event.name[:60], [0, 0.0])
                entry[0] += 1
                entry[1] += event.device_time if hasattr(event, "device_time") else event.cuda_time
            span = max(e.time_range.end for e in events) - min(e.time_range.start for e in events)
            print(f"   17 steps: {span / 17:.0f} us a step on the card, busy {sum(us for _, us in total.values()) / 17:.0f}")
            for name, (count, us) in sorted(total.items(), key=lambda item: -item[1][1])[:13]:
                print(f"   {us / 17:8.1f} us a step  {count / 17:6.1f} x {us / count:7.1f} us  {name}", flush=True)
        except Exception as error:
            print("   no profile:", type(error).__name__, str(error)[:100], flush=True)
    engine.stop()
    del engine, backend, submit, watched
    gc.collect()
    if not SMALL:
        torch.cuda.empty_cache()
