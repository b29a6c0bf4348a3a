"""W4Ax over COMET's figure 9 shapes beside cuBLAS f16 and torch._int_mm, activations quantized beforehand.

    python -m benchmarks.w4ax                        the whole grid; writes benchmarks/results/w4ax_<gpu>.json
    python -m benchmarks.w4ax --quick                LLaMA-3-8B, four sizes of M, result not written unless --out
    python -m benchmarks.w4ax --ratio 0.5            another share of INT8 blocks than the paper's 25 %
    python -m benchmarks.w4ax --candidates           also every schedule of the product, as variants of its rows
    python -m benchmarks.w4ax --count                only say how many kernels the other arguments ask for

Every output is compared with a float64 product of the quantized operands before its time counts. `with_quantizer` is
the call on 16-bit activations, both kernels counted; `quantizer` is the first of them alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from terrazzo.autotune.gemm_bench import OURS, Settings, Shape, bench, schedule_text
from terrazzo.autotune.w4a8_bench import TorchInt8

from benchmarks import gemm

MODELS = ("llama-2-13b", "llama-3-8b", "llama-3-70b", "qwen2-72b")
MS = (2, 4, 8, 16, 64, 256)
QUICK_MODELS, QUICK_MS = ("llama-3-8b",), (4, 16, 64, 256)
PAPER = {(13824, 5120): ["llama-2-13b.gate"], (5120, 13824): ["llama-2-13b.down"]}
"""The two shapes that figure 9 names; the fused gate and up projection is another one."""


@dataclass(frozen=True)
class W4AxSettings(Settings):
    """`Settings`, `ratio`: share of INT8 blocks, `candidates`: time every schedule."""

    ratio: float = 0.25
    candidates: bool = False


class W4AxShape(Shape):
    """Rows of W4Ax."""

    @staticmethod
    def requests(n: int, k: int, m: int | Sequence[int], settings: W4AxSettings, target: Any) -> list[Any]:
        from terrazzo.ops import w4ax

        facts = dict(m=m, dtype=settings.dtype, target=target, blocks8=blocks8(k, settings.ratio))
        found = w4ax.kernel_requests(n, k, **facts)
        tokens = [m] if isinstance(m, int) else m
        return found + [r for t in tokens for r in candidates(n, k, t, settings, target).values()]

    def load(self) -> tuple[Any, Any, tuple[str, ...], Any]:
        weight = random_weight(self.n, self.k, self.settings.ratio, self.random)
        return weight, weight.pack(target=self.target), ("words",), dense_of(weight, self.dtype)

    def facts(self, m: int, requests: Sequence[Any]) -> dict[str, Any]:
        from terrazzo.layouts import get_converter
        from terrazzo.schedules.roofline import weight_only_gemm

        own = next(request for request in requests if request.name != "w4ax.quantize_blocks")
        alpha, tile = get_converter("s4_s8_x16").alu_per_element, dict(own.params)["block_tokens"]
        roof = weight_only_gemm(
            self.target, m, self.n, self.k, self.packed[0].nbytes, alpha, self.copy_gb_s, dtype="s8", x_bytes=1,
            token_tile=tile,
        )  # fmt: skip
        return {
            "op": "w4ax",
            "format": f"s4, {self.weight.blocks8} of {self.weight.blocks} blocks INT8",
            "dtype": self.settings.dtype,
            "group": 128,
            "m": m,
            "n": self.n,
            "k": self.k,
            "us": None,
            "spread": None,
            "bytes": self.packed[0].nbytes,
            "peers": {},
            "schedule": schedule_text([own]),
            "bound": roof.bound,
            "predicted_us": round(roof.us, 2),
        }

    def expected(self, x: Any, requests: Sequence[Any]) -> tuple[Any, ...]:
        """As `Shape.expected`; peers multiply the unquantized x, so theirs is held to what quantizing x can change."""
        from terrazzo.ops.w4ax import reference

        rows, w = self.checked_rows(x.shape[0]), self.weight
        x = x[rows]
        q, scales = reference.quantize_activations(x, blocks8=w.blocks8, permutation=w.permutation)
        ref, bound = reference.gemm(q, scales, w), reference.forward_error_bound(q, scales, w, self.dtype)
        magnitude = x.double().abs() @ w.dequantize().abs().T
        steps = scales.double().repeat_interleave(128, dim=1) @ w.values().abs().T
        return rows, ref, bound, bound + 4 * reference.UNIT_ROUNDOFF[self.settings.dtype] * magnitude + 0.5 * steps

    def calls(self, x: Any) -> dict[str, Callable[[Any, Any], Any]]:
        from terrazzo.ops import w4ax

        quantized = w4ax.quantize_activations(x, self.packed[0])
        made = {OURS: lambda packed, out: w4ax.gemm(quantized, packed, out=out, out_dtype=self.dtype)}
        for name, request in candidates(self.n, self.k, x.shape[0], self.settings, self.target).items():
            made[name] = self.candidate(request, quantized)
        return made | {"with_quantizer": lambda packed, out: w4ax.gemm(x, packed, out=out)}

    def candidate(self, request: Any, x: Any) -> Callable[[Any, Any], Any]:
        """A call of the wgmma program with a schedule of its own."""
        import torch
        from terrazzo.lowering.kernels import get_kernel
        from terrazzo.schedules import w4ax as schedules

        given = {field.name for field in dataclasses.fields(schedules.StreamK)}
        s = schedules.StreamK(**{name: value for name, value in request.params if name in given})
        part = schedules.partition(s, schedules.MixedGemm(self.n, self.k, self.weight.blocks8), self.target, x.m)
        make = lambda *shape, dtype: torch.zeros(shape, dtype=dtype, device=x.device)
        space = make(part.grid, s.warpgroups, s.block_tokens // 8, 128, 4, dtype=torch.float32)
        flags, bias = make(part.grid, s.warpgroups, dtype=torch.int32), make(1, dtype=torch.float32)
        kernel = get_kernel(request)

        def call(packed: Any, out: Any) -> Any:
            kernel(x.q8, packed.words, x.scales, bias, space, flags, out, part.shared)
            return out

        return call

    def side_calls(self, x: Any) -> dict[str, Callable[[], object]]:
        from terrazzo.ops import w4ax

        return {"quantizer": lambda: w4ax.quantize_activations(x, self.packed[0])}


def blocks8(k: int, ratio: float) -> int:
    return int(ratio * -(-k // 128) + 0.5)


def candidates(n: int, k: int, m: int, settings: W4AxSettings, target: Any) -> dict[str, Any]:
    """Name -> kernel of every legal schedule of the wgmma program, with `--candidates`."""
    from terrazzo.lowering.request import KernelRequest
    from terrazzo.ops.w4ax import stream_k
    from terrazzo.schedules import w4ax as schedules

    if not settings.candidates or not target.supports("wgmma.s8"):
        return {}
    depth, high, found = -(-k // 128) * 128, blocks8(k, settings.ratio), {}
    common = dict(n=n, k=depth, blocks8=high, out_dtype=settings.dtype, bias=False)
    for s in schedules.candidates(schedules.MixedGemm(n, depth, high), target, m):
        params = tuple((common | s.params()).items())
        entry = f"{stream_k.__name__}:build"
        request = KernelRequest("w4ax.stream_k", entry, params, target, stream_k.PASS_CONFIGS)
        found[f"tokens{s.block_tokens}_warpgroups{s.warpgroups}"] = request
    return found


def random_weight(n: int, k: int, ratio: float, random: Any) -> Any:
    """A canonical weight with uniform codes, on the generator's device."""
    import torch
    from terrazzo.ops import w4ax

    make = lambda *shape: torch.rand(shape, generator=random, device=random.device)
    plan = w4ax.plan_blocks(make(k) + 0.1, ratio=ratio)
    codes = torch.randint(-7, 8, (n, plan.padded), generator=random, device=random.device, dtype=torch.int8)
    return w4ax.QuantizedWeight.canonical(
        codes.masked_fill(plan.order() < 0, 0),
        torch.exp(make(n, plan.blocks) - 5).bfloat16(),
        k=k,
        blocks8=plan.blocks8,
        permutation=plan.permutation,
    )


def dense_of(weight: Any, dtype: Any) -> Any:
    """The weight in 16 bits [N, K], a slice of rows at a time: the float64 of a large one would not fit."""
    import torch

    parts = []
    for lo in range(0, weight.n, 4096):
        part = slice(lo, lo + 4096)
        rows = dataclasses.replace(weight, codes=weight.codes[part], scales=weight.scales[part])
        parts.append(rows.dequantize().to(dtype))
    return torch.cat(parts)


class IntMm(TorchInt8):
    """torch._int_mm on the weight's codes: int8 times int8 to int32, no scales applied (a lower bound for W8A8)."""

    def load(self, weight: Any, dense: Any, copies: Callable[[int], int]) -> list[Any]:
        values = weight.codes[:, : weight.k].contiguous()
        return [values.clone() for _ in range(copies(values.numel()))]


def _extend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ratio", type=float, default=0.25, help="share of INT8 blocks")
    parser.add_argument("--candidates", action="store_true", help="also every schedule of the product")
    parser.add_argument("--count", action="store_true", help="only say how many kernels would be compiled; no GPU")


PROGRAM = gemm.Program("w4ax", __doc__, MODELS, MS, QUICK_MODELS, QUICK_MS, 128, _extend)


def shapes_of(problems: Mapping[tuple[int, int], Sequence[str]]) -> dict[tuple[int, int], Sequence[str]]:
    """The models' layers, and the paper's shapes where its model is among them."""
    named = any("llama-2-13b" in layer for layers in problems.values() for layer in layers)
    return {**(PAPER if named else {}), **problems}


def main(argv: list[str] | None = None) -> int:
    options = gemm.arguments(PROGRAM, argv)
    settings = W4AxSettings(
        dtype=options.dtype,
        budget_ms=options.budget_ms,
        peers=() if options.no_peers else (IntMm(),),
        ratio=options.ratio,
        candidates=options.candidates,
    )
    if options.count:
        from terrazzo.lowering.targets import Target
        from terrazzo.schedules.models import shapes

        target, problems = Target.parse("sm_90a"), shapes_of(shapes(options.models))
        found = {r for n, k in problems for r in W4AxShape.requests(n, k, options.m, settings, target)}
        print(f"{len(found)} kernels for sm_90a")
        return 0

    def measure(problems: Any, ms: Any, **callbacks: Any) -> dict[str, Any]:
        facts = dict(compile_all=gemm.compile_all, commit=options.commit)
        return bench(W4AxShape, shapes_of(problems), ms, settings, **facts, **callbacks)

    return gemm.main(PROGRAM, measure, options)


if __name__ == "__main__":
    sys.exit(main())
