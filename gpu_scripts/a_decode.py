"""Decode attention, full against 8 and 4 bits, in microseconds and share of bandwidth (H200: 4.8 TB/s)."""
import itertools, sys, time
import torch
from weft.ops.base import AttentionShape, TwoTierCache
from weft.ops.triton.attention import Attention, StoreTiles
from weft.ops.triton.batch import DeviceBatch
from weft.ops.triton.device import Device
from weft.ops.triton.store import Moves, move_to_store, new_store

PEAK = 4.8e12
B, TAIL, CONTEXT = 16, 16, 4096
device = Device("cuda")
TUNED = [int(sys.argv[1])] if len(sys.argv) > 1 else []


def measured(work, copies):
    """Microseconds of one launch, over `copies` layers in a graph so that nothing stays in the cache."""
    for layer in range(copies):
        work(layer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(copies):
            work(layer)
    best = 1e9
    for _ in range(8):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record(); graph.replay(); end.record(); end.synchronize()
        best = min(best, begin.elapsed_time(end) * 1e3 / copies)
    return best


def case(name, heads, kv_heads, head, requests, contexts=None):
    shape = AttentionShape(heads, kv_heads, head, head**-0.5)
    contexts = contexts or [CONTEXT] * requests
    blocks = -(-max(contexts) // B)
    per_layer = requests * CONTEXT * 2 * kv_heads * head * 2
    layers = max(2, min(12, int(3e9 // per_layer)))
    i32 = lambda values: torch.tensor(values, dtype=torch.int32, device="cuda")
    total = requests * blocks
    cache = torch.randn(total, layers, 2, kv_heads, B, head, device="cuda", dtype=torch.bfloat16)
    table = torch.randperm(total, device="cuda").int().reshape(requests, blocks)
    qkv = torch.randn(requests, (heads + 2 * kv_heads) * head, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(requests, heads * head, device="cuda", dtype=torch.bfloat16)

    def batch(tables):
        counting = torch.arange(requests + 1, device="cuda", dtype=torch.int32)
        return DeviceBatch(requests, requests, requests, 1, max(contexts), counting[:-1], i32([c - 1 for c in contexts]), counting[:-1].long(),
                           counting[:-1].contiguous(), counting, i32(contexts), tables, counting[:-1], requests)

    plain = Attention(shape, None, requests, 8192, device)
    full_bytes = sum(contexts) * 2 * kv_heads * head * 2
    plain_batch = batch(table)
    full = measured(lambda layer: plain.run(plain_batch, qkv, cache, layer, out), layers)
    plain.run(plain_batch, qkv, cache, 0, out)
    exact = out.clone()
    print(f"{name:28} full    {full:7.1f} us  {full_bytes / full / 1e-6 / PEAK:5.1%}", flush=True)
    for bits in TUNED or (8, 4):
        tiers = TwoTierCache(cache, new_store(total, layers, B, shape, bits, device), bits, TAIL)
        everything = torch.arange(total, device="cuda", dtype=torch.int32)
        sixteen = Moves(torch.cat([everything[:16], everything[:16]]), 16)
        moved = measured(lambda layer: move_to_store(tiers, sixteen, device), 1)
        move_to_store(tiers, Moves(torch.cat([everything, everything]), total), device)
        both = torch.cat([table, table], dim=1).contiguous()
        tier_batch = batch(both)
        read = sum(
            (c - 1 - (c // B - TAIL) * B) * 2 * kv_heads * head * 2 + max(0, c // B - TAIL) * B * 2 * kv_heads * (head * bits // 8 + 2)
            for c in contexts
        )
        rows = []
        options = list(itertools.product((64, 128), (3, 4, 5), (2, 4))) if TUNED else [None]
        for option in options:
            attention = Attention(shape, None, requests, 8192, device)
            if option is not None:
                tile, stages, warps = option
                attention.decode_store_tiles = StoreTiles(tile, stages)
                attention.decode_tiles = attention.decode_tiles._replace(warps=warps)
            try:
                took = measured(lambda layer: attention.run(tier_batch, qkv, tiers, layer, out), layers)
            except Exception as error:
                print("   ", option, type(error).__name__, str(error)[:80]); continue
            attention.run(tier_batch, qkv, tiers, 0, out)
            far = (out.float() - exact.float()).abs().max().item() / exact.float().abs().max().item()
            rows.append((took, option, far))
        for took, option, far in sorted(rows, key=lambda row: row[0])[:8]:
            print(f"{name:28} {bits} bits  {took:7.1f} us  {read / took / 1e-6 / PEAK:5.1%}  x {full / took:4.2f}  {option}  off {far:.3f}  (16 blocks, all layers moved: {moved:.1f} us)", flush=True)
        del tiers
    del cache
    torch.cuda.empty_cache()


begin = time.time()
big, small = (32, 8, 128), (16, 8, 128)
case("8B shape, 16 x 4096", *big, 16)
if TUNED: sys.exit()
if time.time() - begin < 40: case("8B shape, 1 x 4096", *big, 1)
if time.time() - begin < 45: case("8B shape, 64 x 4096", *big, 64)
if time.time() - begin < 45: case("0.6B shape, 16 x 4096", *small, 16)
if time.time() - begin < 48: case("8B, 64 uneven", *big, 64, [200 + 61 * i for i in range(64)])
print(f"{time.time() - begin:.0f} s")
