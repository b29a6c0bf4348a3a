"""W4A16 over the layers of real models beside cuBLAS f16 and every installed peer.

    python -m benchmarks.w4a16                       the whole grid; writes benchmarks/results/w4a16_<gpu>.json
    python -m benchmarks.w4a16 --quick               LLaMA-3-8B, four sizes of M, result not written unless --out
    python -m benchmarks.w4a16 --models yi-34b --m 1,64 --out result.json
    python -m benchmarks.w4a16 --compile-only         the kernels of the same arguments, nothing measured

Every output is compared with a float64 product of the same dequantized weight before its time counts.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from benchmarks import gemm
from benchmarks.peers.weights import PEERS

MODELS = ("llama-3-8b", "llama-3-70b", "qwen3-32b")
MS = (1, 4, 16, 32, 64, 96, 128, 160, 192, 256, 1024, 4096, 8192)
QUICK_MODELS, QUICK_MS = ("llama-3-8b",), (1, 16, 64, 256)


def _extend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--symmetric", action="store_true", help="without zero points")


PROGRAM = gemm.Program("w4a16", __doc__, MODELS, MS, QUICK_MODELS, QUICK_MS, 128, _extend)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    return gemm.arguments(PROGRAM, argv)


def main(argv: list[str] | None = None) -> int:
    from terrazzo.autotune.gemm_bench import bench
    from terrazzo.autotune.linear_bench import LinearSettings, LinearShape

    options = arguments(argv)
    settings = LinearSettings(
        dtype=options.dtype,
        group=options.group,
        symmetric=options.symmetric,
        budget_ms=options.budget_ms,
        peers=() if options.no_peers else PEERS,
    )

    def measure(problems: Any, ms: Any, **callbacks: Any) -> dict[str, Any]:
        own = dict(compile_all=gemm.compiling(options), commit=options.commit)
        return bench(LinearShape, problems, ms, settings, **own, **callbacks)

    return gemm.main(PROGRAM, measure, options)


if __name__ == "__main__":
    sys.exit(main())
