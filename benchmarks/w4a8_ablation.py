"""LiquidGEMM's figure 13: the pipelines of W4A8 and QServe's dequantization, beside cuBLAS f16 in the same run.

    python -m benchmarks.w4a8_ablation               the whole grid; writes benchmarks/results/ablation_w4a8_<gpu>.json
    python -m benchmarks.w4a8_ablation --quick       LLaMA-2-7B, three sizes of M, result not written unless --out
    python -m benchmarks.w4a8_ablation --count       only say how many kernels the other arguments ask for
    python -m benchmarks.w4a8_ablation --ncu         counters of each pipeline on one shape and the largest M instead of
                                                     times: tensor pipe, issue slots, stalls, DRAM (needs ncu)

Every column reads the same packed weight and adds the same int32 sums, all but one in a persistent stream-K kernel on
s8 wgmma: `basic_vadd4` is the baseline (no roles, QServe's multiply and vadd4), `basic_xor` has LiquidGEMM's
dequantization instead, `basic_overlapped_xor` also a second set of operand registers, `excp_xor` is the explicit
coarse-grained pipeline, `imfp_xor` and `pingpong_xor` are the implicit fine-grained one on two halves of a tile and on
two tiles. `multistage_vadd4` is built as QServe's own kernel: mma.sync behind a ring of cp.async. A row's own time is
what `auto` takes. Outputs are compared with a float64 product before their time counts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from typing import Any

from terrazzo.ablation.w4a8.bench import WAYS, WaysSettings, WaysShape
from terrazzo.lowering.errors import TerrazzoError

from benchmarks import gemm, report, w4a8_counters
from benchmarks.gemm import compile_all

MODELS = ("llama-2-7b", "llama-2-13b", "llama-2-70b", "llama-3-8b")
MS = (4, 16, 64, 128, 256)
QUICK_MODELS, QUICK_MS = ("llama-2-7b",), (16, 64, 256)


def _extend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--count", action="store_true", help="only say how many kernels would be compiled; no GPU")
    parser.add_argument("--ncu", action="store_true", help="counters of Nsight Compute on one shape, no times")
    parser.add_argument("--shape", default="22016x4096", help="of --ncu, N x K")


PROGRAM = gemm.Program("w4a8_ablation", __doc__, MODELS, MS, QUICK_MODELS, QUICK_MS, 64, _extend, file="ablation_w4a8")


def main(argv: list[str] | None = None) -> int:
    from terrazzo.autotune.gemm_bench import bench

    options = gemm.arguments(PROGRAM, argv)
    settings = WaysSettings(dtype=options.dtype, group=options.group, budget_ms=options.budget_ms)

    def measure(problems: Any, ms: Any, on_shape: Any, **callbacks: Any) -> dict[str, Any]:
        facts = dict(compile_all=gemm.compiling(options), commit=options.commit, on_shape=on_shape)
        result = bench(WaysShape, problems, ms, settings, **facts, **callbacks)
        print(f"\nspeed-up over {column(WAYS[0])}, geometric mean over shapes\n\n{table(result)}\n")
        return result

    if options.count:
        print(f"{len(set(requests(options, settings)))} kernels for sm_90a")
        return 0
    if options.ncu:
        return counters(options, settings)
    return gemm.main(PROGRAM, measure, options)


def counters(options: argparse.Namespace, settings: Any) -> int:
    """What --ncu does; 2, and a line on stderr, where there is no ncu or it may not read counters."""
    from terrazzo.autotune.gemm_bench import header
    from terrazzo.lowering.targets import Target

    try:
        w4a8_counters.find_ncu()
        (n, k), m, target = map(int, options.shape.split("x")), max(options.m), Target.detect()
        ways = list(WaysShape.serving(m, n, k, settings, target))
        compile_all(WaysShape.requests(n, k, m, settings, target))
        rows = w4a8_counters.collect(n, k, m, options.group, options.dtype, ways)
    except (ValueError, TerrazzoError, w4a8_counters.CountersError) as error:
        print(f"benchmarks.w4a8_ablation: {error}", file=sys.stderr)
        return 2
    print(f"\nW4A8 ({n}, {k}) at M = {m}\n\n{w4a8_counters.table(rows)}\n")
    if options.out:
        result = header(target, options.commit) | {"n": n, "k": k, "m": m, "counters": rows}
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def requests(options: argparse.Namespace, settings: Any, arch: str = "sm_90a") -> list[Any]:
    """All kernels that a run of these options launches."""
    from terrazzo.lowering.targets import Target
    from terrazzo.schedules.models import shapes

    target = Target.parse(arch)
    return [r for n, k in shapes(options.models) for r in WaysShape.requests(n, k, options.m, settings, target)]


def column(way: tuple[str, str]) -> str:
    """The name of a column, as rows have it among their variants."""
    return "_".join(way)


def ratios(result: Mapping[str, Any]) -> dict[str, dict[int, float]]:
    """cuBLAS and every column but the baseline -> M -> speed-up over the baseline."""
    baseline, *others = map(column, WAYS)
    found = {"cublas_f16": report.variant_ratios(result, baseline)}
    return found | {name: report.variant_ratios(result, baseline, name) for name in others}


def table(result: Mapping[str, Any]) -> str:
    """Markdown: M, then for cuBLAS and every column the speed-up over the baseline."""
    found = ratios(result)
    ms = sorted({m for by_m in found.values() for m in by_m})
    rows = [(m, *(f"{by_m[m]:.2f}x" if m in by_m else "" for by_m in found.values())) for m in ms]
    return report.markdown(("M", *found), rows, range(1 + len(found)))


if __name__ == "__main__":
    sys.exit(main())
