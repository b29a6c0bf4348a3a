"""W4A8 over the layers of real models beside cuBLAS f16, torch fp8 and torch int8, activations quantized beforehand.

    python -m benchmarks.w4a8                        the whole grid; writes benchmarks/results/w4a8_<gpu>.json
    python -m benchmarks.w4a8 --quick                LLaMA-3-8B, four sizes of M, result not written unless --out
    python -m benchmarks.w4a8 --fp8                  on e4m3 activations; writes benchmarks/results/w4afp8_<gpu>.json
    python -m benchmarks.w4a8 --mxfp4                MXFP4 on e4m3; writes benchmarks/results/mxfp4_fp8_<gpu>.json
    python -m benchmarks.w4a8 --quantizer            only the activation quantizer, more forms and sizes
    python -m benchmarks.w4a8 --count                only say how many kernels the other arguments ask for

Every output is compared with a float64 product of the quantized operands before its time counts. `with_quantizer` is
the call on 16-bit activations, both kernels counted. The quantizer is also timed alone from 1024 tokens, on activations
that are not in the L2 cache, against the copy bandwidth (x read, codes, scales and sums written) and beside a copy of
torch that moves as many bytes: a launch of a few microseconds never reaches the bandwidth of 2 GiB.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterable
from typing import Any

from benchmarks import gemm, report
from benchmarks.gemm import compile_all
from benchmarks.peers.byte_inputs import FP8_PEERS as MORE_FP8_PEERS
from benchmarks.peers.byte_inputs import INT8_PEERS

MODELS = ("llama-2-7b", "llama-2-13b", "llama-2-70b", "llama-3-8b")
MS = (4, 8, 16, 32, 64, 96, 128, 160, 192, 256, 1024, 4096)
QUICK_MODELS, QUICK_MS = ("llama-3-8b",), (16, 64, 256, 4096)
QUANTIZER_MS = (1, 16, 256, 1024, 4096, 16384)
QUANTIZER_KS = (4096, 5120, 8192, 14336, 28672)
FORMS = {"plain": (False, False), "smooth": (True, False), "norm": (True, True)}
"""Of the quantizer: name -> whether it has a vector of gains, and RMSNorm."""
DEVICE = "cuda"


def _extend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quantizer", action="store_true", help="only the activation quantizer")
    parser.add_argument("--fp8", action="store_true", help="activations in e4m3, weights of ops/w4a8/fp8.py")
    parser.add_argument("--mxfp4", action="store_true", help="activations in e4m3, weights of ops/mxfp4_fp8.py")
    parser.add_argument("--count", action="store_true", help="only say how many kernels would be compiled; no GPU")


PROGRAM = gemm.Program("w4a8", __doc__, MODELS, MS, QUICK_MODELS, QUICK_MS, 64, _extend)
FP8 = dataclasses.replace(PROGRAM, group=128, file="w4afp8")
MXFP4 = dataclasses.replace(PROGRAM, group=32, file="mxfp4_fp8")


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    options = gemm.arguments(PROGRAM, argv)
    program = MXFP4 if options.mxfp4 else FP8 if options.fp8 else None
    return options if program is None else gemm.arguments(program, argv)


def main(argv: list[str] | None = None) -> int:
    from terrazzo.autotune.gemm_bench import bench
    from terrazzo.autotune.linear_bench import ByteShape

    from benchmarks.peers.torch_bytes import PEERS

    options = arguments(argv)
    settings = _settings(options, (*PEERS, *INT8_PEERS))

    def measure(problems: Any, ms: Any, on_shape: Any, **callbacks: Any) -> dict[str, Any]:
        extra = quantizer_problems(options, (k for _, k in problems))
        both = lambda requests: gemm.compiling(options)([*requests, *quantizer_requests(extra, options.dtype)])[
            : len(requests)
        ]
        facts = dict(compile_all=both, commit=options.commit, on_shape=on_shape)
        result = bench(ByteShape, problems, ms, settings, **facts, **callbacks)
        result["quantizer"] = time_quantizer(extra, options, result["copy_gb_s"])
        on_shape(result)
        return result

    if options.count:
        print(f"{len(set(requests(options, settings)))} kernels for sm_90a")
        return 0
    if options.quantizer:
        return quantizer(options)
    if options.fp8 or options.mxfp4:
        return gemm.main(
            MXFP4 if options.mxfp4 else FP8,
            lambda *given, **callbacks: measure_fp8(options, *given, **callbacks),
            options,
        )
    return gemm.main(PROGRAM, measure, options)


def measure_fp8(options: argparse.Namespace, problems: Any, ms: Any, **callbacks: Any) -> dict[str, Any]:
    """The result of a run with --fp8 or --mxfp4."""
    from terrazzo.autotune.gemm_bench import bench

    from benchmarks.peers.torch_bytes import FP8_PEERS

    settings = _settings(options, (*FP8_PEERS, *MORE_FP8_PEERS))
    return bench(_kind(options), problems, ms, settings, gemm.compiling(options), commit=options.commit, **callbacks)


def _kind(options: argparse.Namespace) -> Any:
    """How the rows of a run are measured."""
    from terrazzo.autotune.linear_bench import ByteShape, E4M3Shape

    return E4M3Shape if options.mxfp4 or options.fp8 else ByteShape


def _settings(options: argparse.Namespace, peers: tuple[Any, ...]) -> Any:
    """What the rows of a run share."""
    from terrazzo.autotune.linear_bench import LinearSettings
    from terrazzo.ops.products import converted

    product = converted.MXFP4_FP8 if options.mxfp4 else converted.W4A8_FP8 if options.fp8 else converted.W4A8
    own = dict(group=options.group, budget_ms=options.budget_ms, peers=() if options.no_peers else peers)
    return LinearSettings(options.dtype, **own, record=product.record)


def requests(options: argparse.Namespace, settings: Any, arch: str = "sm_90a") -> list[Any]:
    """All kernels that a run of these options launches."""
    from terrazzo.lowering.targets import Target
    from terrazzo.schedules.models import shapes

    target, problems = Target.parse(arch), shapes(() if options.quantizer else options.models)
    found = [r for n, k in problems for r in _kind(options).requests(n, k, options.m, settings, target)]
    if options.fp8 or options.mxfp4:
        return found
    return found + quantizer_requests(quantizer_problems(options, (k for _, k in problems)), options.dtype, target)


def quantizer_problems(options: argparse.Namespace, ks: Iterable[int]) -> list[tuple[int, int, str]]:
    """(M, K, form): everything with --quantizer; else M from 1024, RMSNorm in front of the narrower layers only."""
    if options.quantizer:
        return [(m, k, form) for k in QUANTIZER_KS for m in QUANTIZER_MS for form in FORMS]
    ks = sorted(set(ks))
    ms = [m for m in options.m if m >= report.QUANTIZER_LEAST_M]
    return [(m, k, form) for k in ks for m in ms for form in ("plain", "norm") if form == "plain" or k <= 8192]


def quantizer_requests(problems: Iterable[tuple[int, int, str]], dtype: str, target: Any = None) -> list[Any]:
    """The kernels of some (M, K, form); target None: the GPU's."""
    from terrazzo.lowering.targets import Target
    from terrazzo.ops.w4a8 import activations

    at = target or Target.detect()
    gains = ((m, k, *FORMS[form]) for m, k, form in problems)
    return [activations.plan(m, k, dtype=dtype, gain=gain, norm=norm, target=at) for m, k, gain, norm in gains]


def time_quantizer(
    problems: Iterable[tuple[int, int, str]], options: argparse.Namespace, copy_gb_s: float
) -> list[dict[str, Any]]:
    """A row of each problem: m, k, form, us, share of the copy bandwidth, copy_us of a copy that moves as many bytes.

    A wrong one has `failure` and no time.
    """
    import torch
    from terrazzo.autotune import measure
    from terrazzo.lowering.targets import Target
    from terrazzo.ops import w4a8
    from terrazzo.ops.w4a8 import reference

    l2_bytes, dtype, rows, copies = Target.detect().l2_bytes, getattr(torch, options.dtype), [], {}
    for m, k, form in problems:
        nbytes, vector = m * (3 * k + 8), torch.rand(k, device=DEVICE) + 0.5
        given = {"plain": {}, "smooth": {"smooth": vector}, "norm": {"rms_weight": vector}}[form]
        xs = [torch.randn(m, k, device=DEVICE, dtype=dtype) for _ in range(measure.copies_beyond_l2(nbytes, l2_bytes))]
        outs = [w4a8.quantize_activations(x, **given) for x in xs]
        right = reference.quantize_activations(xs[0], given.get("smooth"), given.get("rms_weight"), 1e-6)
        row = {"m": m, "k": k, "form": form, "us": None, "share": None}
        if torch.equal(outs[0].q[:, :k], right[0]) and torch.equal(outs[0].row_sums, right[2]):
            calls = [
                lambda x=x, out=out, g=given: w4a8.quantize_activations(x, out=out, **g) for x, out in zip(xs, outs)
            ]
            us = measure.time_calls(calls, options.budget_ms).us
            if nbytes not in copies:
                copies[nbytes] = time_copy(nbytes, l2_bytes, options.budget_ms)
            row |= {"us": round(us, 3), "share": round(nbytes / us / 1e3 / copy_gb_s, 4)}
            row["copy_us"] = round(copies[nbytes], 3)
        else:
            row["failure"] = "codes or sums differ from the reference's"
        rows.append(row)
        said = f"FAILED: {row.get('failure')}"
        if row["us"]:
            said = f"{row['us']:9.2f} us {row['share']:4.0%}, torch copies as many bytes in {row['copy_us']:9.2f} us"
        print(f"quantizer K {k:6} M {m:6} {form:6} {said}", flush=True)
    return rows


def time_copy(nbytes: int, l2_bytes: int, budget_ms: float) -> float:
    """Microseconds in which torch reads `nbytes` / 2 and writes as many, outside of the L2 cache and in a CUDA graph.

    The faster of a copy, which a graph may give to the copy engine, and a kernel (-x): what so few bytes can come to.
    """
    import torch
    from terrazzo.autotune import measure

    sources = torch.ones(measure.copies_beyond_l2(nbytes, l2_bytes), nbytes // 8, dtype=torch.int32, device=DEVICE)
    pairs = list(zip(sources, torch.empty_like(sources)))
    copy = [lambda x=x, y=y: y.copy_(x) for x, y in pairs]
    kernel = [lambda x=x, y=y: torch.neg(x, out=y) for x, y in pairs]
    return min(measure.time_calls(calls, budget_ms).us for calls in (copy, kernel))


def quantizer(options: argparse.Namespace) -> int:
    """Times the quantizer alone; 1 if an output was wrong."""
    from terrazzo.autotune import measure

    problems = quantizer_problems(options, ())
    compile_all(quantizer_requests(problems, options.dtype))
    copy = measure.copy_bandwidth()
    print(f"{copy:.0f} GB/s copied; us, and the share of that bandwidth")
    rows = time_quantizer(problems, options, copy)
    for what, goal, reached, verdict in report.quantizer_goals(rows):
        print(f"{what:68} {goal:>8} {reached:>8}  {verdict}")
    return 1 if any("failure" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
