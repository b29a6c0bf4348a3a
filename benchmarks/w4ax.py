"""W4Ax over COMET's figure 9 shapes beside cuBLAS f16 and torch._int_mm, activations quantized beforehand.

    python -m benchmarks.w4ax                        the whole grid; writes benchmarks/results/w4ax_<gpu>.json
    python -m benchmarks.w4ax --quick                LLaMA-3-8B, four sizes of M, result not written unless --out
    python -m benchmarks.w4ax --ratio 0.5            another share of INT8 blocks than the paper's 25 %
    python -m benchmarks.w4ax --scales block         a scale for each block, weights and activations
    python -m benchmarks.w4ax --count                only say how many kernels the other arguments ask for

Every output is compared with a float64 product of the quantized operands before its time counts. `with_quantizer` is
the call on 16-bit activations, both kernels counted; `quantizer` is the first of them alone. Scales are two-level, the
default; `block` is the same product with a weight that has a scale for each block.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from terrazzo.autotune.gemm_bench import bench
from terrazzo.autotune.linear_bench import LinearSettings, MixedShape
from terrazzo.ops.products.mixed import W4AX

from benchmarks import gemm
from benchmarks.peers.torch_bytes import TorchInt8

MODELS = ("llama-2-13b", "llama-3-8b", "llama-3-70b", "qwen2-72b")
MS = (2, 4, 8, 16, 64, 96, 160, 256)
QUICK_MODELS, QUICK_MS = ("llama-3-8b",), (4, 16, 64, 256)
PAPER = {(13824, 5120): ["llama-2-13b.gate"], (5120, 13824): ["llama-2-13b.down"]}
"""The two shapes that figure 9 names; the fused gate and up projection is another one."""


class IntMm(TorchInt8):
    """torch._int_mm on the weight's codes: int8 times int8 to int32, no scales applied (a lower bound for W8A8)."""

    def load(self, weight: Any, dense: Any, copies: Callable[[int], int]) -> list[Any]:
        values = weight.codes[:, : weight.k].contiguous()
        return [values.clone() for _ in range(copies(values.numel()))]


def _extend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ratio", type=float, default=0.25, help="share of INT8 blocks")
    parser.add_argument("--scales", choices=("two_level", "block"), default="two_level", help="form of the scales")
    parser.add_argument("--count", action="store_true", help="only say how many kernels would be compiled; no GPU")


PROGRAM = gemm.Program("w4ax", __doc__, MODELS, MS, QUICK_MODELS, QUICK_MS, 128, _extend)


def shapes_of(problems: Mapping[tuple[int, int], Sequence[str]]) -> dict[tuple[int, int], Sequence[str]]:
    """The models' layers, and the paper's shapes where its model is among them."""
    named = any("llama-2-13b" in layer for layers in problems.values() for layer in layers)
    return {**(PAPER if named else {}), **problems}


def main(argv: list[str] | None = None) -> int:
    options = gemm.arguments(PROGRAM, argv)
    settings = LinearSettings(
        record=W4AX.record,
        dtype=options.dtype,
        budget_ms=options.budget_ms,
        peers=() if options.no_peers else (IntMm(),),
        ratio=options.ratio,
        scales=options.scales,
        both=options.scales == "two_level",
    )
    if options.count:
        from terrazzo.lowering.targets import Target
        from terrazzo.schedules.models import shapes

        target, problems = Target.parse("sm_90a"), shapes_of(shapes(options.models))
        found = {r for n, k in problems for r in MixedShape.requests(n, k, options.m, settings, target)}
        print(f"{len(found)} kernels for sm_90a")
        return 0

    def measure(problems: Any, ms: Any, **callbacks: Any) -> dict[str, Any]:
        facts = dict(compile_all=gemm.compiling(options), commit=options.commit)
        return bench(MixedShape, shapes_of(problems), ms, settings, **facts, **callbacks)

    return gemm.main(PROGRAM, measure, options)


if __name__ == "__main__":
    sys.exit(main())
