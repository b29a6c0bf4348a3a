"""W4A8 over the layers of real models beside cuBLAS f16, torch fp8 and torch int8, activations quantized beforehand.

    python -m benchmarks.w4a8                        the whole grid; writes benchmarks/results/w4a8_<gpu>.json
    python -m benchmarks.w4a8 --quick                LLaMA-3-8B, four sizes of M, result not written unless --out
    python -m benchmarks.w4a8 --ablation             also every pipeline with every dequantization
    python -m benchmarks.w4a8 --quantizer            the activation quantizer alone, against the copy bandwidth

Every output is compared with a float64 product of the quantized operands before its time counts. `with_quantizer` is
the call on 16-bit activations, both kernels counted.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from benchmarks import gemm
from benchmarks.gemm import compile_all

MODELS = ("llama-2-7b", "llama-2-13b", "llama-2-70b", "llama-3-8b")
MS = (4, 8, 16, 32, 64, 128, 256, 1024, 4096)
QUICK_MODELS, QUICK_MS = ("llama-3-8b",), (16, 64, 256, 4096)
QUANTIZER_MS = (1, 16, 256, 1024, 4096, 16384)
QUANTIZER_KS = (4096, 5120, 8192, 14336, 28672)
QUANTIZER_GOAL = 0.8
"""Share of the copy bandwidth that the quantizer aims at from M = 1024."""


def _extend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ablation", action="store_true", help="also every pipeline with every dequantization")
    parser.add_argument("--quantizer", action="store_true", help="only the activation quantizer")


PROGRAM = gemm.Program("w4a8", __doc__, MODELS, MS, QUICK_MODELS, QUICK_MS, 64, _extend)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    return gemm.arguments(PROGRAM, argv)


def main(argv: list[str] | None = None) -> int:
    from terrazzo.autotune.w4a8_bench import PEERS, W4A8Settings, bench_w4a8

    options = arguments(argv)
    if options.quantizer:
        return quantizer(options)
    settings = W4A8Settings(
        dtype=options.dtype,
        group=options.group,
        budget_ms=options.budget_ms,
        peers=() if options.no_peers else PEERS,
        ablation=options.ablation,
    )

    def measure(problems: Any, ms: Any, **callbacks: Any) -> dict[str, Any]:
        return bench_w4a8(problems, ms, settings, compile_all=compile_all, commit=options.commit, **callbacks)

    return gemm.main(PROGRAM, measure, options)


def quantizer(options: argparse.Namespace) -> int:
    """Times the quantizer; the share of the copy bandwidth counts x read and codes, scales and sums written."""
    import torch
    from terrazzo.autotune import measure
    from terrazzo.lowering.targets import Target
    from terrazzo.ops import w4a8
    from terrazzo.ops.w4a8 import activations

    target, dtype = Target.detect(), getattr(torch, options.dtype)
    compile_all(
        [
            activations.plan(m, k, dtype=options.dtype, gain=gain, norm=norm, target=target)
            for m in QUANTIZER_MS
            for k in QUANTIZER_KS
            for gain, norm in ((False, False), (True, False), (True, True))
        ]
    )
    copy = measure.copy_bandwidth()
    print(f"{target.name}: {copy:.0f} GB/s copied; us, and the share of that bandwidth")
    missed = 0
    for k in QUANTIZER_KS:
        vector = torch.rand(k, device="cuda") + 0.5
        for m in QUANTIZER_MS:
            nbytes, cells = m * (3 * k + 8), []
            xs = [torch.randn(m, k, device="cuda", dtype=dtype) for _ in range(_copies(nbytes, target.l2_bytes))]
            outs = [w4a8.quantize_activations(x) for x in xs]
            for name, given in (("plain", {}), ("smooth", {"smooth": vector}), ("norm", {"rms_weight": vector})):
                calls = [_quantize(x, out, given) for x, out in zip(xs, outs)]
                us = measure.time_calls(calls, options.budget_ms).us
                share = nbytes / us / 1e3 / copy
                missed += m >= 1024 and share < QUANTIZER_GOAL
                cells.append(f"{name} {us:8.2f} us {share:4.0%}")
            print(f"K {k:6} M {m:6}  {'   '.join(cells)}", flush=True)
    print(f"{missed} rows from M = 1024 stay below {QUANTIZER_GOAL:.0%} of the copy bandwidth")
    return 0


def _copies(nbytes: int, l2_bytes: int) -> int:
    from terrazzo.autotune import measure

    return measure.copies_beyond_l2(nbytes, l2_bytes)


def _quantize(x: Any, out: Any, given: dict[str, Any]) -> Any:
    from terrazzo.ops.w4a8 import quantize_activations

    return lambda: quantize_activations(x, out=out, **given)


if __name__ == "__main__":
    sys.exit(main())
