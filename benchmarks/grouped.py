"""Grouped GEMMs (mixture of experts) beside torch's in bf16 and vLLM's experts, activations quantized beforehand.

    python -m benchmarks.grouped                     W4A8 (int8, e4m3), W4A16, W4Ax, all layers, and MXFP4 (bf16, e4m3),
                                                     gpt-oss's; writes nothing unless --out is given
    python -m benchmarks.grouped --op w4ax --dense   with as many tokens for each expert, beside one weight of all their
                                                     rows and the tokens of one: the same bytes and products
    python -m benchmarks.grouped --op w4a8 --quick   the layer with a goal only
    python -m benchmarks.grouped --op w4a16 --packed-for sm_80     programs of mma.sync, through PTX on a newer GPU;
                                                     beside a `gemm` for each expert, and experts packed for the GPU

Before its time counts, W4A8 on int8 must have the bits of one `gemm` for each expert, and the others must
stay inside their error bounds for two of them. The share of the copy bandwidth counts the weights of experts with
tokens, x and y.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import program
from benchmarks.peers.experts import PEERS

RIVALS = {peer.name for peers in PEERS.values() for peer in peers}
BESIDE = {
    "torch_bf16": "torch bf16", "dense_us": "one weight", "each_us": "a gemm each", "native_us": "packed for this GPU",
    **{name: name for name in RIVALS},
}  # fmt: skip
"""What rows time besides ours -> how it is said."""
GOAL = 0.75
"""Share of the copy bandwidth on the layer with a goal (public figure on an H200: 48 us, 2.65 TB/s)."""
GROUP = {"w4a8": 64, "w4a8_fp8": 128, "w4a16": 128, "w4ax": 128, "mxfp4": 32, "mxfp4_fp8": 32}
WEIGHT_ONLY = ("w4a16", "mxfp4")
ON_E4M3 = {"w4a8_fp8": "e4m3", "mxfp4_fp8": "e2m1"}
"""Operators on e4m3 activations -> how their codes are asked for."""


@dataclass(frozen=True)
class Layer:
    """`experts` weights [n, k]; `even` tokens for each, or `top_k` picks of random tokens."""

    name: str
    experts: int
    n: int
    k: int
    tokens: tuple[int, ...]
    top_k: int = 0


EVEN_LAYER = Layer("8 experts, as many tokens each", 8, 4096, 4096, (1, 16, 64, 128, 256, 1024))
GOAL_LAYER = Layer("8 experts, 16 tokens each", 8, 4096, 7168, (16,))
LAYERS = (
    GOAL_LAYER,
    Layer("Mixtral-8x7B gate_up", 8, 28672, 4096, (1, 16, 64, 256, 1024, 4096), 2),
    Layer("Mixtral-8x7B down", 8, 4096, 14336, (1, 16, 64, 256, 1024, 4096), 2),
    Layer("Qwen3-30B-A3B gate_up", 128, 1536, 2048, (1, 16, 64, 256, 1024, 4096), 8),
    Layer("Qwen3-30B-A3B down", 128, 2048, 768, (1, 16, 64, 256, 1024, 4096), 8),
)
GPT_OSS = (
    GOAL_LAYER,
    Layer("gpt-oss-20b gate_up", 32, 5760, 2880, (1, 16, 64, 256, 1024, 4096), 4),
    Layer("gpt-oss-20b down", 32, 2880, 2880, (1, 16, 64, 256, 1024, 4096), 4),
)
LAYERS_OF = {"mxfp4": GPT_OSS, "mxfp4_fp8": GPT_OSS}
"""Operator -> its layers, if not LAYERS."""


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.grouped", description=__doc__.splitlines()[0])
    parser.add_argument("--op", choices=tuple(GROUP), help="default: all")
    parser.add_argument("--quick", action="store_true", help="the layer with a goal only")
    parser.add_argument("--dense", action="store_true", help="as many tokens for each expert, beside one weight")
    parser.add_argument("--packed-for", choices=("sm_80",), help="of W4A16: another target than the GPU's")
    parser.add_argument("--no-peers", action="store_true", help="only ours")
    parser.add_argument("--budget-ms", type=float, default=15.0, help="GPU time of one measurement")
    parser.add_argument("--out", type=Path, help="file to write")
    parser.add_argument("--compile-only", action="store_true", help="compile the kernels, and end")
    parser.add_argument("--layer", type=int, help="one layer, by its place")
    parser.add_argument("--commit", help="of the sources, where git cannot tell")
    options = parser.parse_args(argv)
    if options.packed_for and options.op != "w4a16":
        parser.error("--packed-for needs --op w4a16")
    if options.dense and options.op in (None, *WEIGHT_ONLY):
        parser.error("--dense needs --op w4ax, w4a8, w4a8_fp8 or mxfp4_fp8, whose experts lie as one weight does")
    return options


def operator_of(op: str) -> Any:
    """The module that has `grouped_gemm`, `GroupedWeight` and, of W4A8, `quantize_activations`."""
    from terrazzo import ops

    return ops.w4a8.fp8 if op == "w4a8_fp8" else getattr(ops, op)


def counts_of(layer: Layer, tokens: int) -> Any:
    """int64 [E]: tokens of each expert."""
    import torch

    if not layer.top_k:
        return torch.full((layer.experts,), tokens)
    rng = torch.Generator().manual_seed(tokens)
    picks = torch.rand(tokens, layer.experts, generator=rng).topk(layer.top_k).indices
    return torch.bincount(picks.flatten(), minlength=layer.experts)


def requests_of(op: str, layer: Layer, packed_for: str | None = None, dense: bool = False) -> list[Any]:
    """The kernels of a layer: the grouped ones, and those of the comparison."""
    from terrazzo.ops import mxfp4, w4a8, w4a16, w4ax

    rows = [int(counts_of(layer, t).sum()) for t in layer.tokens]
    each = sorted({int(c) for t in layer.tokens for c in counts_of(layer, t)} - {0})
    if op == "w4a16":
        facts = dict(group_size=GROUP[op], symmetric=False, scale_dtype="bfloat16", dtype="bfloat16")
        own = w4a16.grouped_requests(layer.n, layer.k, layer.experts, m=rows, **facts)
        return own + (_of_another_target(layer, rows, each, packed_for, facts) if packed_for else [])
    joined = layer.n * layer.experts if dense else 0
    if op == "w4ax":
        facts = dict(dtype="bfloat16", target="sm_90a")
        found = w4ax.grouped_requests(layer.n, layer.k, layer.experts, m=rows, **facts)
        return [*found, *(w4ax.kernel_requests(joined, layer.k, m=each, **facts) if dense else [])]
    if op == "mxfp4":
        return mxfp4.grouped_requests(layer.n, layer.k, layer.experts, m=rows)
    if op in ON_E4M3:
        facts = dict(group_size=GROUP[op], out_dtype="bfloat16", dequantization=ON_E4M3[op])
        own = w4a8.grouped_requests(layer.n, layer.k, layer.experts, m=rows, **facts)
        facts |= dict(m=each, dtype=None, target="sm_90a")
        return [*own, *(w4a8.kernel_requests(joined, layer.k, **facts) if dense else [])]
    own = w4a8.grouped_requests(layer.n, layer.k, layer.experts, m=rows, out_dtype="bfloat16")
    facts = dict(group_size=GROUP[op], m=each, out_dtype="bfloat16", dtype=None, target="sm_90a")
    sizes = (layer.n, joined) if dense else (layer.n,)
    return [*own, *(it for n in sizes for it in w4a8.kernel_requests(n, layer.k, **facts))]


def _of_another_target(layer: Layer, rows: list[int], each: list[int], packed_for: str, facts: dict) -> list[Any]:
    """Experts packed for it, and a `gemm` for each."""
    from terrazzo.lowering.targets import Target
    from terrazzo.ops.call import plans
    from terrazzo.ops.weight_only import op

    at = Target.parse(packed_for), Target.detect()
    alone, stacked = (op.Facts(layer.n, layer.k, **facts, experts=experts) for experts in (0, layer.experts))
    return [*(plans.plan(m, stacked, *at).request for m in rows), *(plans.plan(m, alone, *at).request for m in each)]


def experts_of(op: str, layer: Layer, packed_for: str | None = None) -> Any:
    """Stacked weights: one random weight whose blocks of rows are rotated for each expert."""
    import torch
    from terrazzo.autotune.grouped_bench import turned
    from terrazzo.autotune.linear_bench import LinearSettings, random_weight

    random = torch.Generator("cuda").manual_seed(7)
    settings = LinearSettings("bfloat16", record=op, group=GROUP[op])
    packed = random_weight(layer.n, layer.k, settings, random).pack(target=packed_for)
    return operator_of(op).GroupedWeight.stack(turned(packed, layer.experts))


def measure_row(op: str, layer: Layer, tokens: int, stacked: Any, options: argparse.Namespace) -> dict[str, Any]:
    import torch
    from terrazzo.autotune import gemm_bench, measure
    from terrazzo.autotune.grouped_bench import clone

    family, counts = operator_of(op), counts_of(layer, tokens)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    starts, m = offsets.tolist(), int(offsets[-1])
    offsets = offsets.int().cuda()
    x = torch.randn(m, layer.k, device="cuda", dtype=torch.bfloat16)
    needs_weight = (stacked.stacked,) if op == "w4ax" else ()
    given = x if op in WEIGHT_ONLY else family.quantize_activations(x, *needs_weight)
    out = torch.empty(m, layer.n, device="cuda", dtype=torch.bfloat16)
    more = {} if op in WEIGHT_ONLY else dict(out_dtype=torch.bfloat16)
    active = int((counts > 0).sum())
    row = {
        "op": op,
        "layer": layer.name,
        "tokens": tokens,
        "m": m,
        "experts": layer.experts,
        "n": layer.n,
        "k": layer.k,
    }
    row["bytes"] = stacked.nbytes // layer.experts * active + given_bytes(given) + out.numel() * 2
    target = options.target
    most = measure.copies_beyond_l2(row["bytes"], target.l2_bytes, 8)
    copies = [stacked, *(family.GroupedWeight(clone(stacked.stacked)) for _ in range(most - 1))]
    call = lambda w: lambda: family.grouped_gemm(given, w, offsets, out=out, **more)
    call(stacked)()
    wrong = _wrong(op, given, stacked, starts, out)
    row |= {"us": None, "failure": wrong} if wrong else {}
    candidates = {} if wrong else {"us": [call(w) for w in copies]}
    if options.dense and not wrong:
        candidates["dense_us"] = _dense(family, given, copies, tokens, out)
    if options.packed_for:
        row["packed_for"] = options.packed_for
        if not wrong:
            used = [e for e in range(layer.experts) if starts[e] < starts[e + 1]]
            candidates["each_us"] = [_each(family.gemm, x, w, starts, used, out) for w in copies]
            native = replace(stacked.stacked, target=None)
            candidates["native_us"] = [call(family.GroupedWeight(clone(native))) for _ in copies]
    if not options.no_peers and hasattr(torch, "_grouped_mm"):
        dense = torch.randn(layer.experts, layer.n, layer.k, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        candidates["torch_bf16"] = [lambda: torch._grouped_mm(x, dense, offs=offsets[1:])]
    failed = {} if options.no_peers else _peers(op, layer, tokens, x, starts, len(copies), candidates)
    for name, timing in measure.time_in_turn(candidates, options.budget_ms).items():
        if isinstance(timing, Exception):
            if name in RIVALS:
                failed[name] = gemm_bench.one_line(timing)
                continue
            raise timing
        row[name] = round(timing.us, 3)
        if name == "us":
            share = row["bytes"] / timing.us / 1e3 / options.copy_gb_s
            row |= {"spread": round(timing.spread, 4), "repeats": timing.replays, "copy_share": round(share, 4)}
    return row | ({"peers_failed": failed} if failed else {})


def _peers(
    op: str, layer: Layer, tokens: int, x: Any, starts: list[int], copies: int, candidates: dict[str, Any]
) -> dict[str, str]:
    """Add installed packages' calls to the candidates; name -> why one is left out."""
    from terrazzo.autotune import gemm_bench

    failed = {}
    for peer in PEERS.get(op, ()):
        if peer.missing():
            continue
        try:
            stacks = [peer.load(layer.experts, layer.n, layer.k, GROUP[op]) for _ in range(copies)]
            calls, y = peer.calls(x, starts, stacks, tokens if layer.top_k else len(x), layer.top_k or 1)
            calls[0]()
            problem = peer.wrong(y, x, starts, stacks[0])
        except Exception as error:  # another package's error of any kind costs its column, not the run
            problem = gemm_bench.one_line(error)
        if problem:
            failed[peer.name] = problem
        else:
            candidates[peer.name] = calls
    return failed


def _dense(family: Any, given: Any, copies: list[Any], tokens: int, grouped: Any) -> list[Any]:
    """Calls of one weight of all experts' rows on the tokens of the first expert, whose product they hold first."""
    import torch

    x = given.of_tokens(torch.arange(tokens, device="cuda"))
    joined = [one_weight(w) for w in copies]
    y = torch.empty(tokens, joined[0].n, device="cuda", dtype=torch.bfloat16)
    calls = [lambda w=w: family.gemm(x, w, out=y, out_dtype=y.dtype) for w in joined]
    calls[0]()
    torch.testing.assert_close(y[:, : grouped.shape[1]], grouped[:tokens], rtol=2**-6, atol=1e-2)
    return calls


def one_weight(experts: Any) -> Any:
    """A packed weight whose rows are those of all experts, one after the other; N is a multiple of 64."""
    s = experts.stacked
    words = s.words.transpose(0, 1).flatten(1, 2).contiguous()
    return replace(s, words=words, channel_scales=s.channel_scales.flatten(), n=s.n * len(experts))


def _each(gemm: Any, x: Any, w: Any, starts: list[int], used: list[int], out: Any) -> Any:
    """A call for each expert that has tokens."""
    parts = [(x[starts[e] : starts[e + 1]], w[e], out[starts[e] : starts[e + 1]]) for e in used]
    return lambda: [gemm(rows, one, out=y) for rows, one, y in parts]


def given_bytes(x: Any) -> int:
    import torch

    if torch.is_tensor(x):
        return x.numel() * 2
    if hasattr(x, "q8"):
        return x.q8.numel() + 4 * x.scales.numel()
    return x.q.numel() + (4 if x.row_sums is None else 8) * x.scales.numel()


def _wrong(op: str, x: Any, stacked: Any, starts: list[int], y: Any) -> str | None:
    """What is wrong with y, or None."""
    import torch
    from terrazzo.ops import w4a8
    from terrazzo.ops.w4a8 import fp8_reference
    from terrazzo.ops.w4a16 import reference as integers
    from terrazzo.ops.w4ax import reference as blocks
    from terrazzo.ops.weight_only import reference as floats

    used = [e for e in range(len(starts) - 1) if starts[e] < starts[e + 1]]
    for e in used if op == "w4a8" else {used[0], used[-1]}:
        rows = slice(starts[e], starts[e + 1])
        if op == "w4a8":
            part = replace(x, q=x.q[rows], scales=x.scales[rows], row_sums=x.row_sums[rows])
            part = replace(part, shape=(len(part.q), x.k))
            alone = w4a8.gemm(part, stacked[e], out_dtype=y.dtype)
            if not torch.equal(alone, y[rows]):
                return f"expert {e}: other bits than its gemm"
            continue
        rows = slice(starts[e], min(starts[e + 1], starts[e] + 16))
        if op in WEIGHT_ONLY:
            reference = integers if op == "w4a16" else floats
            ref = reference.gemm(x[rows], stacked[e], "exact")
            bound = reference.forward_error_bound(x[rows], stacked[e], "exact")
        elif op == "w4ax":
            held = x.codes()[rows], x.token_scales()[rows], stacked[e].unpack()
            ref, bound = blocks.gemm(*held), blocks.forward_error_bound(*held, y.dtype)
        else:
            q, weight = x.q[rows, : x.k], stacked[e].unpack()
            ref = fp8_reference.gemm(q, x.scales[rows], weight)
            bound = fp8_reference.forward_error_bound(q, x.scales[rows], weight, y.dtype)
        if not bool(((y[rows].double() - ref).abs() <= bound).all()):
            return f"expert {e}: outside the error bound"
    return None


def main(argv: list[str] | None = None) -> int:
    import torch
    from terrazzo.autotune import gemm_bench, measure
    from terrazzo.lowering.targets import Target

    options = arguments(argv)
    ops = (options.op,) if options.op else tuple(GROUP)
    even = (GOAL_LAYER, EVEN_LAYER) if options.dense else None
    chosen = slice(1 if options.quick else None) if options.layer is None else slice(options.layer, options.layer + 1)
    layers = {op: even or LAYERS_OF.get(op, LAYERS)[chosen] for op in ops}
    options.target = Target.detect()
    how = (options.packed_for, options.dense)
    found = [request for op in ops for layer in layers[op] for request in requests_of(op, layer, *how)]
    outcomes = program.compile_all(found)
    if options.compile_only:
        return int(any(isinstance(outcome, Exception) for outcome in outcomes))
    result = gemm_bench.header(options.target, options.commit)
    result["copy_gb_s"] = options.copy_gb_s = round(measure.copy_bandwidth(), 1)
    used = () if options.no_peers else (peer for op in ops for peer in PEERS.get(op, ()))
    result["peers_missing"] = {peer.name: why for peer in used if (why := peer.missing())}
    result["rows"] = []
    print(*(f"{name}: {why}" for name, why in result["peers_missing"].items()), sep="\n")
    print(f"{options.target.name}: {options.copy_gb_s:.0f} GB/s copied")
    for op in ops:
        for layer in layers[op]:
            stacked = experts_of(op, layer, options.packed_for)
            for tokens in layer.tokens:
                row = measure_row(op, layer, tokens, stacked, options)
                result["rows"].append(row)
                peer = ", ".join(f"{said} {row[name]:9.2f} us" for name, said in BESIDE.items() if name in row)
                said = f"{row['us']:9.2f} us {row['copy_share']:4.0%} of copy" if row["us"] else row["failure"]
                print(f"{op:8} {layer.name:26} T {tokens:5} M {row['m']:6}  {said}  {peer}", flush=True)
            del stacked
            torch.cuda.empty_cache()
            if options.out is not None:
                options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    goal = [row for row in result["rows"] if row["layer"] == GOAL_LAYER.name and row["us"]]
    for row in goal:
        print(f"{row['op']}: {row['copy_share']:.0%} of the copy bandwidth on {row['layer']}, goal {GOAL:.0%}")
    return int(any(not row["us"] for row in result["rows"]))


if __name__ == "__main__":
    sys.exit(main())
