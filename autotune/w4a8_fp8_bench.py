"""W4A8 on e4m3 activations beside cuBLAS f16 and torch's fp8 product: rows as `w4a8_bench`, another weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terrazzo.autotune import gemm_bench, w4a8_bench
from terrazzo.autotune.gemm_bench import OURS, Settings
from terrazzo.autotune.w4a8_bench import TorchFp8, W4A8Settings
from terrazzo.lowering.errors import CompileError
from terrazzo.schedules.problem import TOKENS_PER_TILE, Gemm
from terrazzo.schedules.roofline import bounds

if TYPE_CHECKING:
    import torch
    from terrazzo.lowering.request import KernelRequest
    from terrazzo.lowering.targets import Target

PEERS = (TorchFp8(),)
GROUP = 128


def bench_w4a8_fp8(
    problems: Mapping[tuple[int, int], Sequence[str]],
    ms: Sequence[int],
    settings: W4A8Settings | None = None,
    compile_all: Callable[[Sequence[KernelRequest]], Sequence[Path | CompileError]] | None = None,
    on_row: Callable[[dict[str, Any]], None] | None = None,
    on_shape: Callable[[dict[str, Any]], None] | None = None,
    commit: str | None = None,
) -> dict[str, Any]:
    """Measure every (N, K) at every M; needs a GPU. Arguments, result and errors as `gemm_bench.bench_w4a16`."""
    settings = settings or W4A8Settings(group=GROUP)
    return gemm_bench.bench(Fp8Shape, problems, ms, settings, compile_all, on_row, on_shape, commit)


class Fp8Shape(w4a8_bench.W4A8Shape):
    """Rows of W4A8 on e4m3."""

    @staticmethod
    def requests(n: int, k: int, m: int | Sequence[int], settings: Settings, target: Target) -> list[KernelRequest]:
        from terrazzo.ops import w4a8

        facts = dict(group_size=settings.group, m=m, dtype=settings.dtype, target=target)
        return w4a8.kernel_requests(n, k, **facts, dequantization="e4m3")

    def load(self) -> tuple[Any, Any, tuple[str, ...], torch.Tensor]:
        from terrazzo.ops.w4a8 import fp8

        weight = random_weight(self.n, self.k, self.settings.group, self.random)
        return weight, fp8.pack(weight), ("words", "channel_scales"), dense_of(weight, self.dtype)

    def facts(self, m: int, requests: Sequence[KernelRequest]) -> dict[str, Any]:
        """The cost model's converter is "xor": seven instructions for eight codes too, and e4m3 runs at s8's rate."""
        from terrazzo.layouts.converters import get_converter
        from terrazzo.ops.linear.bytes.problem import DEQUANTIZATIONS

        own = next(request for request in requests if "group" in dict(request.params))
        params = dict(own.params)
        problem = Gemm.of_bytes(self.n, self.k, self.settings.group)
        tile = params.get("block_tokens") or params.get("token_tiles", 0) * TOKENS_PER_TILE
        roof = bounds(
            problem, self.target, m, get_converter(DEQUANTIZATIONS["xor"]).alu_per_element, tile, self.copy_gb_s
        )
        return self.unmeasured("w4a8_fp8", "z4_e4m3", m, [own], roof)

    def expected(self, x: torch.Tensor, requests: Sequence[KernelRequest]) -> tuple[torch.Tensor, ...]:
        """As `Shape.expected`; peers multiply the unquantized x, so theirs is held to what quantizing x can change."""
        from terrazzo.ops.w4a8 import fp8_reference
        from terrazzo.ops.w4a8.reference import UNIT_ROUNDOFF

        rows = self.checked_rows(x.shape[0])
        x = x[rows]
        q, scales = fp8_reference.quantize_activations(x)
        ref = fp8_reference.gemm(q, scales, self.weight)
        bound = fp8_reference.forward_error_bound(q, scales, self.weight, self.dtype)
        dense = self.weight.dequantize().abs()
        rounding = 2.0**-4 + 4 * UNIT_ROUNDOFF[self.settings.dtype]
        loose = bound + rounding * (x.double().abs() @ dense.T) + 2.0**-10 * scales.double()[:, None] * dense.sum(1)
        return rows, ref, bound, loose

    def calls(self, x: torch.Tensor) -> dict[str, Callable[[Any, torch.Tensor | None], torch.Tensor]]:
        from terrazzo.ops.w4a8 import gemm
        from terrazzo.ops.w4a8.fp8 import quantize_activations

        quantized = quantize_activations(x)
        return {
            OURS: lambda packed, out: gemm(quantized, packed, out=out, out_dtype=self.dtype),
            "with_quantizer": lambda packed, out: gemm(x, packed, out=out),
        }

    def side_calls(self, x: torch.Tensor) -> dict[str, Callable[[], object]]:
        from terrazzo.ops.w4a8.fp8 import quantize_activations

        out = quantize_activations(x)
        return {"quantizer": lambda: quantize_activations(x, out=out)}


def random_weight(n: int, k: int, group: int, random: torch.Generator) -> Any:
    """A canonical weight with uniform codes and scales of both signs, on the generator's device."""
    import torch
    from terrazzo.ops.w4a8 import fp8

    device = random.device
    factors = torch.randn((n, -(-k // group)), generator=random, device=device)
    return fp8.QuantizedWeight.canonical(
        torch.randint(-8, 8, (n, k), generator=random, device=device, dtype=torch.int8),
        (factors.sign() * (1 + 0.2 * factors.abs())).half(),
        torch.exp(0.3 * torch.randn(n, generator=random, device=device) - 5),
        group_size=group,
    )


def dense_of(weight: Any, dtype: torch.dtype) -> torch.Tensor:
    """The weight in 16 bits [N, K], a slice of rows at a time: the float64 of a large one would not fit."""
    import torch

    out = torch.empty(weight.codes.shape, dtype=dtype, device=weight.codes.device)
    for lo in range(0, weight.n, 4096):
        part = slice(lo, lo + 4096)
        factors = weight.scales[part].float() * weight.channel_scales[part, None]
        out[part] = weight.codes[part].float() * factors.repeat_interleave(weight.group_size, dim=1)[:, : weight.k]
    return out
