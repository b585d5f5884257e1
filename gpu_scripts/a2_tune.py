"""Tunes decode attention over two tiers: `a2_tune.py` (spawns itself to compile in parallel, then measures; ~70 s)."""
import subprocess, sys, time
import torch
from weft.ops.base import AttentionShape, TwoTierCache
from weft.ops.triton.attention import Attention, Splits, StoreTiles
from weft.ops.triton.batch import DeviceBatch
from weft.ops.triton.device import Device
from weft.ops.triton.store import Moves, move_to_store, new_store

PEAK, B, TAIL = 4.8e12, 16, 16
# store tile, stages, warps, registers, full tile, programs at once, splits for few requests by `fitting`
CONFIGS = {
    "A base": (64, 3, 2, None, 64, 4, False),
    "B 4 warps 128 regs": (64, 3, 4, 128, 64, 4, False),
    "C same, 4 stages": (64, 4, 4, 128, 64, 4, False),
    "D 8 programs": (64, 3, 2, 128, 32, 8, False),
    "E same, 4 stages": (64, 4, 2, 128, 32, 8, False),
    "F tile 128, 4 warps": (128, 3, 4, 128, 64, 4, False),
    "G 8 programs, more splits": (64, 4, 2, 128, 32, 8, True),
    "H 5 stages, 8 programs": (64, 5, 2, 128, 32, 8, True),
    "I 4 warps, 5 stages, 32": (64, 5, 4, 128, 32, 4, True),
}
SHAPES = {"8B 16": (32, 8, 128, 16), "8B 64": (32, 8, 128, 64), "8B 1": (32, 8, 128, 1), "0.6B 16": (16, 8, 128, 16)}


def attention_for(shape, device, config):
    tile, stages, warps, registers, full_tile, at_once, by_fitting = config
    attention = Attention(shape, None, 256, 8192, device)
    attention.decode_store_tiles = StoreTiles(tile, stages, registers)
    attention.decode_tiles = attention.decode_tiles._replace(warps=warps, positions=full_tile)

    def splits(requests, longest):
        programs = at_once * device.processors
        fitting = programs // (requests * shape.kv_heads)
        if fitting >= 8 and not by_fitting or fitting > 16:
            return Splits(min(fitting // 2, 16), 64)
        if fitting >= 4:
            return Splits(fitting if by_fitting else 4, 256 if by_fitting else 512)
        return Splits(max(1, programs // shape.kv_heads), 256, shared=True)

    attention.splits = splits
    return attention


def measured(work, copies):
    for layer in range(copies):
        work(layer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(copies):
            work(layer)
    best = 1e9
    for _ in range(6):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record(); graph.replay(); end.record(); end.synchronize()
        best = min(best, begin.elapsed_time(end) * 1e3 / copies)
    return best


def setting(heads, kv_heads, head, requests, layers, context=4096):
    shape = AttentionShape(heads, kv_heads, head, head**-0.5)
    blocks = context // B
    total = requests * blocks
    cache = torch.randn(total, layers, 2, kv_heads, B, head, device="cuda", dtype=torch.bfloat16)
    table = torch.randperm(total, device="cuda").int().reshape(requests, blocks)
    qkv = torch.randn(requests, (heads + 2 * kv_heads) * head, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(requests, heads * head, device="cuda", dtype=torch.bfloat16)
    counting = torch.arange(requests + 1, device="cuda", dtype=torch.int32)
    lengths = torch.full((requests,), context, device="cuda", dtype=torch.int32)

    def batch(tables):
        return DeviceBatch(requests, requests, requests, 1, context, counting[:-1], lengths - 1, counting[:-1].long(),
                           counting[:-1].contiguous(), counting, lengths, tables, counting[:-1], requests)

    return shape, cache, table, qkv, out, batch


def main():
    device = Device("cuda")
    warm = sys.argv[1] if len(sys.argv) > 1 else None
    begin = time.time()
    if warm is None:
        jobs = [subprocess.Popen([sys.executable, __file__, name]) for name in CONFIGS]
        for job in jobs:
            job.wait()
        print(f"compiled in {time.time() - begin:.0f} s", flush=True)
    for name, (heads, kv_heads, head, requests) in SHAPES.items():
        layers = 1 if warm else max(2, min(12, int(2.5e9 // (requests * 4096 * 4 * kv_heads * head))))
        shape, cache, table, qkv, out, batch = setting(heads, kv_heads, head, requests, layers, 1024 if warm else 4096)
        if not warm:
            plain = Attention(shape, None, 256, 8192, device)
            plain_batch = batch(table)
            full = measured(lambda layer: plain.run(plain_batch, qkv, cache, layer, out), layers)
            print(f"{name:8} full {full:6.1f} us", flush=True)
        for bits in (8, 4):
            tiers = TwoTierCache(cache, new_store(len(cache), layers, B, shape, bits, device), bits, TAIL)
            every = torch.arange(len(cache), device="cuda", dtype=torch.int32)
            move_to_store(tiers, Moves(torch.cat([every, every]), len(cache)), device)
            tier_batch = batch(torch.cat([table, table], dim=1).contiguous())
            read = requests * 2 * kv_heads * (256 * head * 2 + 3840 * (head * bits // 8 + 2))
            took = []
            for label, config in CONFIGS.items():
                if warm not in (None, label):
                    continue
                attention = attention_for(shape, device, config)
                try:
                    if warm:
                        attention.run(tier_batch, qkv, tiers, 0, out)
                        torch.cuda.synchronize()
                    else:
                        took.append((measured(lambda layer: attention.run(tier_batch, qkv, tiers, layer, out), layers), label))
                except Exception as error:
                    print(label, bits, type(error).__name__, str(error)[:90], flush=True)
            for us, label in sorted(took):
                print(f"   {bits} bits {us:6.1f} us x{full / us:4.2f} {read / us / 1e-6 / PEAK:4.0%}  {label}", flush=True)
            del tiers
        del cache
        torch.cuda.empty_cache()
    if warm is None:
        print(f"{time.time() - begin:.0f} s")


main()
