"""Rows of W8A8: bytes by bytes, activations quantized outside of the clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from terrazzo.autotune.gemm_bench import OURS, Settings, Shape
from terrazzo.ops.w4a8.w8a8 import op
from terrazzo.schedules.problem import Gemm

if TYPE_CHECKING:
    import torch
    from terrazzo.lowering.request import KernelRequest
    from terrazzo.lowering.targets import Target


@dataclass(frozen=True)
class W8A8Settings(Settings):
    """`Settings`, and the form of the codes; `group` is K, or 128 for blocks.

    Attributes:
        codes: "int8" or "e4m3". block: whether scales are those of 128 x 128.
    """

    codes: str = "int8"
    block: bool = False

    @property
    def numerics(self) -> str:
        """Of the product, one of `direct.NUMERICS`."""
        return op.numerics_of(self.codes, self.block, False, "auto")


class W8A8Shape(Shape):
    """Rows of a form of W8A8."""

    settings: W8A8Settings

    @staticmethod
    def requests(n: int, k: int, m: int | Sequence[int], settings: W8A8Settings, target: Target) -> list[KernelRequest]:
        facts = dict(codes=settings.codes, block=settings.block, m=m, dtype=settings.dtype, target=target)
        return op.kernel_requests(n, k, **facts)

    def load(self) -> tuple[Any, Any, tuple[str, ...], torch.Tensor]:
        import torch
        from terrazzo.ops import w8a8

        dense = torch.randn(self.n, self.k, generator=self.random, device=self.random.device) * 0.02
        granularity = {"granularity": "block"} if self.settings.block else {}
        weight = w8a8.quantize_weight(dense, codes=self.settings.codes, **granularity)
        scales = weight.scales.repeat_interleave(op.BLOCK, 1)[:, : self.k] if weight.block else weight.scales[:, None]
        return weight, w8a8.pack(weight), ("words", "scales"), (weight.codes.float() * scales).to(self.dtype)

    @property
    def module(self) -> ModuleType:
        from terrazzo.ops import w8a8

        return w8a8

    def quantized(self, x: torch.Tensor) -> Any:
        return self.module.quantize_activations(x, self.packed[0])

    def described(self) -> tuple[str, str]:
        return op.OPERATORS[self.settings.numerics], self.settings.numerics

    def gemm(self) -> Gemm:
        return op.problem(self.n, self.k, self.settings.numerics, self.settings.dtype)

    def converter(self, params: Mapping[str, Any]) -> str:
        return "s8_s8" if self.settings.codes == "int8" else "e4m3_e4m3"

    def expected(self, x: torch.Tensor, requests: Sequence[KernelRequest]) -> tuple[torch.Tensor, ...]:
        """As `Shape.expected`; peers multiply the unquantized x, so theirs is held to what quantizing x can change."""
        from terrazzo.ops.w4a8.reference import UNIT_ROUNDOFF
        from terrazzo.ops.w4a8.w8a8 import activations, reference

        rows = self.checked_rows(x.shape[0])
        x = x[rows]
        made = activations.on_cpu(x, self.packed[0])
        bound = reference.forward_error_bound(made, self.weight, self.dtype)
        dense, own = self.weight.dequantize().abs(), 2.0**-4 if self.settings.codes == "e4m3" else 0.0
        rounding = own + 4 * UNIT_ROUNDOFF[self.settings.dtype]
        step = (reference.values(made) - x.double()).abs().amax(1, keepdim=True)
        loose = bound + rounding * (x.double().abs() @ dense.T) + step * dense.sum(1)
        return rows, reference.gemm(made, self.weight), bound, loose

    def calls(self, x: torch.Tensor) -> dict[str, Callable[[Any, torch.Tensor | None], torch.Tensor]]:
        from terrazzo.ops.w8a8 import gemm, quantize_activations

        quantized = quantize_activations(x, self.packed[0])
        return {
            OURS: lambda packed, out: gemm(quantized, packed, out=out, out_dtype=self.dtype),
            "with_quantizer": lambda packed, out: gemm(x, packed, out=out),
        }
