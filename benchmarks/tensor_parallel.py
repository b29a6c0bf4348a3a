"""A decode step of Llama-3-70B's layers on several GPUs beside one: products, all-reduces, and whole steps.

    torchrun --nproc-per-node 2 -m benchmarks.tensor_parallel      writes results/tensor_parallel_<gpu>.json
    python -m benchmarks.compile_ahead --gpu nvidia/nvidia-h100 tensor_parallel      its kernels, without a GPU

Every rank packs the same random layers and keeps its share of them. Rank 0 times the whole layers while the others
wait; then all time their shares at once, and the slowest counts. Each figure is the median of replays of one CUDA graph
that runs all layers in turn, each with memory of its own, so that no weight stays in L2. All layers are alike: the
fields `*_80_ms` are those of the layers that were timed times 80 / layers. Embedding and head are left out.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import decode_step, report

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 8192, 28672, 64, 8, 128, 80
PAGE, REPLAYS, ROUNDS = 128, 10, 9
DEVICE = "cuda"
GOAL = 0.62
"""Most that two GPUs' products may take of one's."""
LIMIT = 0.02
"""Distance of a layer's products on all ranks from those on one GPU, relative: sums in another order, rounded twice."""


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tensor_parallel", description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8, help="that are timed; whole ones take 0.44 GB each")
    parser.add_argument("--batches", default="1,64")
    parser.add_argument("--weights", default="w4a16-g128", help="comma-separated, as nn.Format.parse reads them")
    parser.add_argument("--kv", default="int8", help="format of keys and values")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each sequence")
    parser.add_argument("--world", type=int, default=int(os.environ.get("WORLD_SIZE", "2")), help="ranks")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="of the sources, where git cannot tell")
    o = parser.parse_args(argv)
    o.batches = [int(batch) for batch in o.batches.split(",")]
    o.weights = o.weights.split(",")
    o.sizes = (HEADS // o.world, max(1, KV_HEADS // o.world), HEAD_DIM)
    return o


def shapes(world: int = 1) -> dict[str, tuple[int, int]]:
    """(N, K) of a layer's products on one of so many ranks."""
    qkv = (HEADS // world + 2 * max(1, KV_HEADS // world)) * HEAD_DIM
    rows = INTERMEDIATE // world
    return {"qkv": (qkv, HIDDEN), "o": (HIDDEN, HEADS * HEAD_DIM // world), "gate_up": (2 * rows, HIDDEN),
            "down": (HIDDEN, rows)}  # fmt: skip


def compile_all(o: argparse.Namespace) -> None:
    """The kernels of whole layers and of shares."""
    from terrazzo.lowering.parallel import compile_many

    start = time.perf_counter()
    rows = [decode_step.Row(m, o.context, form, o.kv, o.kv) for m in o.batches for form in o.weights]
    wanted = decode_step.requests(rows, shapes(), (HEADS, KV_HEADS, HEAD_DIM))
    wanted += decode_step.requests(rows, shapes(o.world), o.sizes)
    wanted = list(dict.fromkeys(wanted))
    failed = {str(e)[:300] for e in compile_many(wanted) if isinstance(e, Exception)}
    print(f"{len(wanted)} kernels in {time.perf_counter() - start:.0f} s", *failed, sep="\n", flush=True)


class Layers:
    """Layers of one format: whole ones, or a rank's shares of the same.

    Args:
        packed: of one layer's products, whole. count: of layers. ranks: that share them, None for one GPU.
    """

    def __init__(self, packed: dict[str, Any], count: int, ranks: Any = None) -> None:
        import torch
        from terrazzo import nn
        from terrazzo.ops import shards

        world = 1 if ranks is None else ranks.world
        self.ranks, self.count = ranks, count
        self.heads, self.kv_heads = HEADS // world, max(1, KV_HEADS // world)
        rows = INTERMEDIATE // world
        sizes = (self.heads * HEAD_DIM, self.kv_heads * HEAD_DIM, self.kv_heads * HEAD_DIM)
        if ranks is not None:
            at = ranks.rank, ranks.world
            packed = {
                "qkv": packed["qkv"].shard(*at, parts=shards.qkv(HEADS, KV_HEADS, HEAD_DIM)),
                "o": packed["o"].shard(*at, 1),
                "gate_up": packed["gate_up"].shard(*at, parts=shards.gate_up(INTERMEDIATE)),
                "down": packed["down"].shard(*at, 1),
            }
        self.nbytes = count * sum(w.nbytes for w in packed.values())
        made = []
        norm = lambda: nn.RMSNorm(torch.ones(HIDDEN, device=DEVICE, dtype=torch.float16), 1e-5)
        for index in range(count):
            w = {name: decode_step._copied(each) for name, each in packed.items()}
            facts = dict(heads=self.heads, kv_heads=self.kv_heads, head_dim=HEAD_DIM, layer=index, ranks=ranks)
            attention = nn.Attention(nn.QKVLinear(w["qkv"], sizes), nn.Linear(w["o"]), **facts)
            mlp = nn.MLP(nn.GateUpLinear(w["gate_up"], (rows, rows)), nn.Linear(w["down"]), ranks=ranks)
            made.append(nn.DecoderLayer(attention, mlp, norm(), norm()))
        embedding = torch.zeros(1, HIDDEN, device=DEVICE, dtype=torch.float16)
        self.decoder = nn.Decoder(embedding, made, norm(), [nn.Rotary.of_base(HEAD_DIM, 500000.0).to(DEVICE)])

    def products(self, batch: int) -> Callable[[], Any]:
        """All layers' products, nothing between them."""
        import torch
        from terrazzo.nn import products

        calls, xs = [], {}
        for layer in self.decoder.layers:
            for linear in (
                layer.self_attn.qkv_proj,
                layer.self_attn.o_proj,
                layer.mlp.gate_up_proj,
                layer.mlp.down_proj,
            ):
                if linear.in_features not in xs:
                    xs[linear.in_features] = random(batch, linear.in_features)
                x = products.quantize(xs[linear.in_features], linear.packed)
                calls.append(lambda w=linear.packed, x=x: products.gemm(x, w, torch.float16))
        return lambda: [call() for call in calls]

    def reduces(self, batch: int) -> Callable[[], Any]:
        """The layers' all-reduces by themselves, two each."""
        y = [random(batch, HIDDEN) for _ in range(2 * self.count)]
        return lambda: [self.ranks.all_reduce(each) for each in y]

    def step(self, batch: int, o: argparse.Namespace) -> Callable[[], Any]:
        """A step of all layers: norms, products, attention over `context` tokens, and all-reduces."""
        import torch
        from terrazzo.autotune.attention_bench import Shape, random_cache
        from terrazzo.nn import positions_of
        from terrazzo.ops.attention import KVCache

        tokens = -(-o.context // PAGE) * PAGE
        filled = random_cache(o.kv, o.kv, Shape(batch, self.heads, self.kv_heads, tokens), HEAD_DIM, PAGE)
        cache = KVCache(
            o.kv, o.kv, kv_heads=self.kv_heads, head_dim=HEAD_DIM, pages=len(filled.pages), page_size=PAGE,
            sequences=batch, max_tokens=tokens, layers=self.count, device=DEVICE,
        )  # fmt: skip
        for pages in cache.pages:
            pages.copy_(filled.pages)
        sequences = [cache.new() for _ in range(batch)]
        cache.extend(dict.fromkeys(sequences, o.context - 1))
        last, h = cache.extend(dict.fromkeys(sequences, 1)), random(batch, HIDDEN)
        positions = positions_of(last)

        def call() -> Any:
            with torch.no_grad():
                return self.decoder(h, positions, last)

        return call


def random(*shape: int) -> Any:
    """float16, the same on all ranks."""
    import torch

    generator = torch.Generator(DEVICE).manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, device=DEVICE, dtype=torch.float16) / 8


def timed(call: Callable[[], Any], together: Callable[[], None] | None = None) -> float:
    """ms of a call: the median over rounds of replays of its graph, as many on each rank.

    Args:
        together: called before each round, so that all ranks begin at once.
    """
    import torch

    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        call()
    found = []
    for _ in range(ROUNDS + 1):
        if together is not None:
            together()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / REPLAYS)
    return median(found[1:])  # the first warms up


def wrong(whole: dict[str, Any], mine: Layers) -> str:
    """What is wrong with the first layer's products on all ranks beside those on one GPU, or ""."""
    import torch
    from terrazzo.nn import products
    from terrazzo.ops import shards

    ranks, layer, found = mine.ranks, mine.decoder.layers[0], []
    for name, linear in (("o", layer.self_attn.o_proj), ("down", layer.mlp.down_proj)):
        x = random(4, whole[name].k)
        low, high = shards.Part(whole[name].k).span(ranks.rank, ranks.world)
        exact = products.gemm(products.quantize(x, whole[name]), whole[name], torch.float16)
        got = products.gemm(products.quantize(x[:, low:high].contiguous(), linear.packed), linear.packed, torch.float16)
        found.append((name, ranks.all_reduce(got), exact))
    x = random(4, HIDDEN)
    exact = products.gemm(products.quantize(x, whole["gate_up"]), whole["gate_up"], torch.float16)
    part = products.gemm(
        products.quantize(x, layer.mlp.gate_up_proj.packed), layer.mlp.gate_up_proj.packed, torch.float16
    )
    halves = [ranks.all_gather(each.contiguous()) for each in part.chunk(2, dim=-1)]
    found.append(("gate_up", torch.cat(halves, dim=-1), exact))
    for name, got, exact in found:
        off = float((got.float() - exact.float()).norm() / exact.float().norm())
        if not off < LIMIT:
            return f"{name} on {ranks.world} ranks is off by {off:.2%}, more than {LIMIT:.0%}"
    return ""


def measured(o: argparse.Namespace, form: str, ranks: Any) -> list[dict[str, Any]]:
    """Rows of one format."""
    import torch
    from torch import distributed

    torch.manual_seed(0)
    whole = {name: decode_step._random(form, n, k) for name, (n, k) in shapes().items()}
    mine, rows = Layers(whole, o.layers, ranks), []
    fault = wrong(whole, mine)
    one = Layers(whole, o.layers) if ranks.rank == 0 else None
    barrier = lambda: distributed.barrier(device_ids=[torch.cuda.current_device()])
    for batch in o.batches:
        row = {
            "op": "tensor_parallel", "weights": form, "kv": o.kv, "context": o.context, "batch": batch,
            "world": ranks.world, "layers": o.layers, "bytes_one": None if one is None else one.nbytes,
            "bytes_rank": mine.nbytes,
        }  # fmt: skip
        if fault:
            rows.append(row | {"failure": fault})
            continue
        alone = [0.0, 0.0]
        if one is not None:
            alone = [timed(one.products(batch)), timed(one.step(batch, o))]
        barrier()
        calls = (mine.products(batch), mine.step(batch, o), mine.reduces(batch))
        shared = torch.tensor([timed(call, barrier) for call in calls], device=DEVICE)
        distributed.all_reduce(shared, op=distributed.ReduceOp.MAX)
        products, step, reduces = shared.tolist()
        row |= {"products_one_ms": alone[0], "products_ms": products, "all_reduce_ms": reduces,
                "step_one_ms": alone[1], "step_ms": step}  # fmt: skip
        if ranks.rank == 0:
            row |= {"products_ratio": products / alone[0], "step_ratio": step / alone[1], "goal": GOAL}
            for name in ("products_one", "products", "all_reduce", "step_one", "step"):
                row[f"{name}_80_ms"] = row[f"{name}_ms"] * LAYERS / o.layers
        rows.append({name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()})
    return rows


def show(row: dict[str, Any]) -> None:
    if row.get("failure"):
        print(f"{row['weights']} batch {row['batch']}: FAILED {row['failure']}", flush=True)
        return
    print(
        f"{row['weights']} batch {row['batch']:3}, 80 layers: products {row['products_one_80_ms']:.3f} -> "
        f"{row['products_80_ms']:.3f} ms (x {row['products_ratio']:.3f}, goal {GOAL}), all-reduce "
        f"{row['all_reduce_80_ms']:.3f} ms, step {row['step_one_80_ms']:.3f} -> {row['step_80_ms']:.3f} ms",
        flush=True,
    )


def run(o: argparse.Namespace) -> int:
    start = time.perf_counter()
    if os.environ.get("RANK", "0") == "0":
        compile_all(o)
    import torch
    from terrazzo.autotune import gemm_bench, measure
    from terrazzo.nn import TensorParallel
    from terrazzo.ops.attention.cache import launch

    ranks = TensorParallel.from_torchrun()
    if ranks is None or not torch.cuda.is_available():
        print("benchmarks.tensor_parallel: start it with torchrun on a host with several GPUs", file=sys.stderr)
        return 2
    result = gemm_bench.header(launch.detect(), o.commit)
    result["gpus"], result["copy_gb_s"] = ranks.world, round(measure.copy_bandwidth(), 1)
    result["rows"], code = [], 0
    for form in o.weights:
        result["rows"] += measured(o, form, ranks)
        if ranks.rank == 0:
            for row in result["rows"][-len(o.batches) :]:
                show(row)
            named = report.RESULTS / report.file_name("tensor_parallel", result["gpu"])
            report.write(result, o.out or named, start)
    if ranks.rank == 0:
        code = report.conclude(result)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return code


def main(argv: list[str] | None = None) -> int:
    return report.guarded("benchmarks.tensor_parallel", lambda: run(arguments(argv)))


if __name__ == "__main__":
    sys.exit(main())
