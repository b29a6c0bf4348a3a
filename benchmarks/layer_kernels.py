"""Kernels between a decoder layer's products, beside a copy of the same bytes, an empty kernel, and separate kernels.

    python -m benchmarks.layer_kernels                     every row; writes results/layer_kernels_<gpu>.json
    python -m benchmarks.layer_kernels --kernels norm --m 1,4096 --peers none

Up to 64 rows the data stay in the L2 cache, as between two products of a decode step, and the time is that of a kernel
in a chain (CUDA graph, programmatic dependent launch); beyond, they are rotated past it. `copy` moves as many bytes as
the kernel reads and writes; `empty` is a kernel that waits for its predecessor and ends; `separate` is what the
library had before, a sum or an activation in front of the quantizer. Codes are compared with the reference first.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.targets import Target

from benchmarks import report

DEVICE = "cuda"
MS = (1, 4, 16, 64, 256, 1024, 4096)
SIZES = {"norm": (4096, 8192), "act": (14336, 28672)}
"""Kernel -> values of a row: hidden and intermediate sizes of Llama-3-8B and 70B."""
QUANTS = ("none", "int8", "e4m3", "e4m3_block128", "w4ax")
"""What leaves: 16 bits, or codes; of W4Ax in bytes, for a layer whose last quarter of blocks is INT8."""
PEERS = ("separate", "vllm")
RESIDENT_M, RESIDENT_COPIES = 64, 4
EPS = 1e-5


def build_empty(target: Target):
    """The prim_func `main(X)` of a kernel that waits for its predecessor and ends."""
    import tilelang.language as T

    @T.prim_func
    def main(X: T.Tensor((1,), "float32")):
        with T.Kernel(1, threads=32) as block:
            tx = T.get_thread_binding()
            if target.supports("pdl"):
                T.pdl_trigger()
                T.pdl_sync()
            if block + tx < 0:
                X[0] = 0.0

    return main


def empty_request(target: Target) -> KernelRequest:
    return KernelRequest("benchmarks.empty", f"{__name__}:build_empty".replace("__main__", "benchmarks.layer_kernels"),
                         (), target)  # fmt: skip


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.layer_kernels", description=__doc__.splitlines()[0])
    parser.add_argument("--kernels", default=",".join(SIZES), help=f"of {', '.join(SIZES)}")
    parser.add_argument("--quants", default=",".join(QUANTS), help=f"of {', '.join(QUANTS)}")
    parser.add_argument("--m", default=",".join(map(str, MS)), help="comma-separated numbers of rows")
    parser.add_argument("--dtype", default="float16", choices=("float16", "bfloat16"))
    parser.add_argument("--peers", default=",".join(PEERS), help=f"of {', '.join(PEERS)}; none")
    parser.add_argument("--budget-ms", type=float, default=6.0, help="GPU time of one measurement")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="of the sources, where git cannot tell")
    parser.add_argument("--compile-only", action="store_true", help="compile what would run; no GPU")
    o = parser.parse_args(argv)
    o.kernels, o.quants, o.peers = (text.split(",") for text in (o.kernels, o.quants, o.peers))
    o.m = [int(m) for m in o.m.split(",")]
    for name, values, known in (("kernels", o.kernels, SIZES), ("quants", o.quants, QUANTS),
                                ("peers", o.peers, (*PEERS, "none"))):  # fmt: skip
        if unknown := set(values) - set(known):
            parser.error(f"--{name} {','.join(unknown)}: known are {', '.join(known)}")
    return o


def requests(o: argparse.Namespace, target: Target) -> list[KernelRequest]:
    """All kernels of a run, the quantizers of `separate` included."""
    from terrazzo.ops import activation, norm
    from terrazzo.ops.w4a8 import activations

    found = [empty_request(target)]
    for quant in o.quants:
        if quant == "w4ax":
            found += [it for kernel in o.kernels for k in SIZES[kernel] for it in w4ax_requests(kernel, k, o, target)]
            continue
        facts = dict(m=o.m, dtype=o.dtype, target=target, quant=None if quant == "none" else quant)
        for kernel in o.kernels:
            for k in SIZES[kernel]:
                made = norm.kernel_requests if kernel == "norm" else activation.kernel_requests
                found += made(k, **facts)
                if quant in ("int8", "e4m3"):
                    own = dict(dtype=o.dtype, gain=kernel == "norm", norm=kernel == "norm", target=target, codes=quant)
                    found += [activations.plan(m, k, **own) for m in o.m]
    return list(dict.fromkeys(found))


def w4ax_requests(kernel: str, k: int, o: argparse.Namespace, target: Target) -> list[KernelRequest]:
    """W4Ax's quantizer with the residual sum or the gate, and alone; the gate as a kernel of its own."""
    from terrazzo.ops import activation
    from terrazzo.ops.w4ax import activations

    facts = dict(dtype=o.dtype, permuted=True, norm=kernel == "norm", granularity="two_level", wide=True, target=target)
    fronts = ("none", "residual" if kernel == "norm" else "silu")
    made = [activations.plan(m, k, w4ax_blocks8(k), **facts, front=front) for m in o.m for front in fronts]
    return made + ([] if kernel == "norm" else activation.kernel_requests(k, m=o.m, dtype=o.dtype, target=target))


def w4ax_blocks8(k: int) -> int:
    return k // 512


def w4ax_weight(k: int) -> Any:
    """A weight of 64 rows, which says what the quantizer makes."""
    import torch
    from terrazzo.autotune.linear_bench import LinearSettings, random_weight
    from terrazzo.ops.products.mixed import W4AX

    random = torch.Generator(DEVICE).manual_seed(k)
    return random_weight(64, k, LinearSettings(record=W4AX.record), random).pack()


def moved(kernel: str, m: int, k: int, quant: str) -> int:
    """Bytes that a kernel reads and writes: x and the residual, or gate and up; the sum; what leaves, and weights."""
    leaves = {"none": 2 * k, "int8": k + 8, "e4m3": k + 4, "e4m3_block128": k + k // 32, "w4ax": k + k // 32}
    leaves = leaves[quant]
    return m * (leaves + (6 * k if kernel == "norm" else 4 * k)) + (2 * k if kernel == "norm" else 0)


Calls = dict[str, list[Callable[[], Any]]]


def calls_of(kernel: str, m: int, k: int, quant: str, o: argparse.Namespace, target: Target) -> tuple[Calls, str]:
    """name -> calls in turn over copies of the data; and what is wrong with the first result, or ""."""
    import torch
    from terrazzo.autotune import measure
    from terrazzo.lowering.kernels import get_kernel

    dtype, nbytes = getattr(torch, o.dtype), moved(kernel, m, k, quant)
    copies = RESIDENT_COPIES if m <= RESIDENT_M else measure.copies_beyond_l2(nbytes, target.l2_bytes)
    make = lambda *size, scale=1.0: (torch.randn(*size, device=DEVICE) * scale).to(dtype)
    empty, nothing = get_kernel(empty_request(target)), torch.zeros(1, device=DEVICE)
    half = [torch.randint(0, 255, (nbytes // 2,), dtype=torch.uint8, device=DEVICE) for _ in range(copies)]
    calls: Calls = {
        "empty": [partial(empty, nothing)],
        "copy": [partial(torch.empty_like(it).copy_, it) for it in half],
    }
    data = [(make(m, k, scale=1e-3), make(m, k)) if kernel == "norm" else (make(m, 2 * k),) for _ in range(copies)]
    weight = make(k, scale=0.1) + 1
    if quant == "w4ax":
        return w4ax_calls(calls, kernel, data, weight, o)
    fill = norm_calls if kernel == "norm" else act_calls
    return fill(calls, data, weight, quant, o)


def w4ax_calls(calls: Calls, kernel: str, data: list, weight: Any, o: argparse.Namespace) -> tuple[Calls, str]:
    from terrazzo.ops import activation, w4ax
    from terrazzo.ops.w4ax import reference

    k = data[0][0].shape[1] // (1 if kernel == "norm" else 2)
    w, options = w4ax_weight(k), dict(rms_weight=weight, eps=EPS) if kernel == "norm" else {}
    if kernel == "norm":
        first = data[0][1] + data[0][0]
        run = lambda x, r: w4ax.quantize_activations(x, w, residual=r, **options)
        separate = lambda x, r: w4ax.quantize_activations(x + r, w, **options)
        made = run(data[0][0], data[0][1].clone())
    else:
        first = activation.act_and_mul(data[0][0])
        run = lambda x: w4ax.quantize_activations(x, w, activation="silu")
        separate = lambda x: w4ax.quantize_activations(activation.act_and_mul(x), w)
        made = run(data[0][0])
    facts = dict(blocks8=w.blocks8, permutation=w.permutation, granularity="two_level", wide=True, **options)
    off = float((made.codes() != reference.quantize_activations(first, **facts)[0]).float().mean())
    calls["ours"] = [partial(run, *it) for it in data]
    if "separate" in o.peers:
        calls["separate"] = [partial(separate, *it) for it in data]
    return calls, f"{off:.2e} of the codes differ from the reference's" if off else ""


def norm_calls(calls: Calls, data: list, weight: Any, quant: str, o: argparse.Namespace) -> tuple[Calls, str]:
    from terrazzo.nn import glue
    from terrazzo.ops import norm, w4a8
    from terrazzo.ops.norm import reference
    from terrazzo.ops.norm.op import Call

    form = None if quant == "none" else quant
    given = (weight, None, None, EPS, EPS, "llama", form, "fused", False, False)
    y, codes, h = reference.rms_norm(Call(*data[0], *given))
    run = lambda x, r: norm.fused_add_rms_norm(x, r, weight, eps=EPS, quant=form)
    residual = data[0][1].clone()
    wrong = compare(run(data[0][0], residual), y if codes is None else codes, 0.0)
    if not bool((residual == h).all()):
        wrong = "the residual is wrong"
    calls["ours"] = [partial(run, x, r) for x, r in data]
    if "separate" in o.peers and quant in ("none", "int8", "e4m3"):
        if form is None:
            separate = lambda x, r: glue.add_norm(x, r, weight, EPS)
        else:
            separate = lambda x, r: w4a8.quantize_activations(x + r, rms_weight=weight, eps=EPS, codes=quant)
        calls["separate"] = [partial(separate, x, r) for x, r in data]
    if "vllm" in o.peers and (peer := vllm_norm(weight, quant)):
        calls["vllm"] = [partial(peer, x, r) for x, r in data]
    return calls, wrong


def act_calls(calls: Calls, data: list, weight: Any, quant: str, o: argparse.Namespace) -> tuple[Calls, str]:
    from terrazzo.nn import glue
    from terrazzo.ops import activation, w4a8
    from terrazzo.ops.activation import reference
    from terrazzo.ops.activation.op import Call

    form = None if quant == "none" else quant
    given = (None, None, "silu", "gate_up", 1.702, None, form, "fused", False)
    y, codes = reference.act_and_mul(Call(data[0][0], *given))
    run = lambda x: activation.act_and_mul(x, quant=form)
    wrong = compare(run(data[0][0]), y if codes is None else codes, 1e-3)
    calls["ours"] = [partial(run, x) for (x,) in data]
    if "separate" in o.peers and quant in ("none", "int8", "e4m3"):
        if form is None:
            separate = glue.silu_mul
        else:
            separate = lambda x: w4a8.quantize_activations(glue.silu_mul(x), codes=quant)
        calls["separate"] = [partial(separate, x) for (x,) in data]
    if "vllm" in o.peers and (peer := vllm_act(quant)):
        calls["vllm"] = [partial(peer, x) for (x,) in data]
    return calls, wrong


def compare(seen: Any, wanted: Any, allowed: float) -> str:
    """What is wrong: a share of codes, or of values of y, above `allowed` differs."""
    a, b = (seen, wanted) if not hasattr(seen, "q") else (seen.q.float(), wanted.q.float())
    off = float((a != b).float().mean())
    limit = allowed if hasattr(seen, "q") else 0.01  # y: last bits
    return "" if off <= limit else f"{off:.2e} of the values differ from the reference's"


def vllm_ops() -> Any:
    """vLLM's operators, or None where it is not installed."""
    try:
        from vllm import _custom_ops
    except ImportError:
        return None
    return _custom_ops


def vllm_norm(weight: Any, quant: str) -> Callable | None:
    """vLLM's kernel of the same purpose; its quantizing ones write the sum to the residual, as ours."""
    import torch

    ops = vllm_ops()
    if ops is None or quant not in ("none", "int8", "e4m3"):
        return None
    if quant == "none":
        return lambda x, r: ops.fused_add_rms_norm(x, r, weight, EPS)
    dtype = torch.int8 if quant == "int8" else torch.float8_e4m3fn
    return lambda x, r: ops.rms_norm_dynamic_per_token_quant(x, weight, EPS, dtype, None, r)


def vllm_act(quant: str) -> Callable | None:
    """vLLM's SiLU, with its quantizer of tokens in a second kernel."""
    import torch

    ops = vllm_ops()
    if ops is None or quant not in ("none", "int8", "e4m3"):
        return None

    def run(x: Any) -> Any:
        h = x.new_empty(x.shape[0], x.shape[1] // 2)
        torch.ops._C.silu_and_mul(h, x)
        if quant == "int8":
            return ops.scaled_int8_quant(h)
        return ops.scaled_fp8_quant(h, use_per_token_if_dynamic=True) if quant == "e4m3" else h

    return run


def row(kernel: str, m: int, k: int, quant: str, o: argparse.Namespace, target: Target) -> dict[str, Any]:
    from terrazzo.autotune import measure

    found: dict[str, Any] = {
        "op": "layer_kernels", "kernel": kernel, "m": m, "k": k, "quant": quant, "dtype": o.dtype, "us": None,
        "bytes": moved(kernel, m, k, quant), "resident": m <= RESIDENT_M, "peers": {},
    }  # fmt: skip
    calls, wrong = calls_of(kernel, m, k, quant, o, target)
    if wrong:
        return found | {"failure": wrong}
    timed = measure.time_in_turn(calls, o.budget_ms)
    if isinstance(timed["ours"], Exception):
        return found | {"failure": f"{type(timed['ours']).__name__}: {str(timed['ours'])[:200]}"}
    us = {name: round(timing.us, 3) for name, timing in timed.items() if not isinstance(timing, Exception)}
    failed = {name: str(it)[:200] for name, it in timed.items() if isinstance(it, Exception)}
    ours = timed["ours"]
    found |= {"us": us.pop("ours"), "spread": round(ours.spread, 4), "repeats": ours.replays, "peers": us}
    found |= {"of_copy": round(found["us"] / us["copy"], 3), "over_empty_us": round(found["us"] - us["empty"], 3)}
    return found | ({"peers_failed": failed} if failed else {})


def show(found: dict[str, Any]) -> None:
    place = f"{found['kernel']:5} {found['quant']:14} K {found['k']:6} M {found['m']:5}"
    if "failure" in found:
        print(f"{place} FAILED {found['failure']}", flush=True)
        return
    peers = "  ".join(f"{name} {us:.2f}" for name, us in found["peers"].items())
    said = f"{found['us']:8.2f} us, {found['of_copy']:.2f} of a copy, {found['over_empty_us']:+.2f} over empty"
    print(f"{place} {said}   {peers}", flush=True)


def run(o: argparse.Namespace) -> int:
    from terrazzo.lowering.parallel import compile_many

    start = time.perf_counter()
    target = Target.parse("sm_90a") if o.compile_only else Target.detect()
    failed = [str(it)[:300] for it in compile_many(requests(o, target)) if isinstance(it, Exception)]
    print(f"compiled in {time.perf_counter() - start:.0f} s", *failed, sep="\n", flush=True)
    if o.compile_only:
        return bool(failed)
    from terrazzo.autotune import gemm_bench, measure

    result: dict[str, Any] = gemm_bench.header(target, o.commit)
    result["copy_gb_s"] = round(measure.copy_bandwidth(), 1)
    result["rows"] = []
    out = o.out or report.RESULTS / report.file_name("layer_kernels", result["gpu"])
    for kernel in o.kernels:
        for quant in o.quants:
            for k in SIZES[kernel]:
                for m in o.m:
                    result["rows"].append(row(kernel, m, k, quant, o, target))
                    show(result["rows"][-1])
                    report.write(result, out, start)
    return report.conclude(result)


def main(argv: list[str] | None = None) -> int:
    return report.guarded("benchmarks.layer_kernels", lambda: run(arguments(argv)))


if __name__ == "__main__":
    sys.exit(main())
