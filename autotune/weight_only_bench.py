"""Rows of weights with 16-bit activations, of every registered format."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from terrazzo.autotune.gemm_bench import OURS, Settings, Shape, numerics_of
from terrazzo.ops.products.codes import get_codes
from terrazzo.ops.products.table import of_codes
from terrazzo.ops.products.ways import choose_way

if TYPE_CHECKING:
    import torch
    from terrazzo.lowering.request import KernelRequest
    from terrazzo.lowering.targets import Target
    from terrazzo.ops.linear.operand import Operand
    from terrazzo.schedules.problem import Gemm


@dataclass(frozen=True)
class WeightOnlySettings(Settings):
    """`Settings`, and the weight's format."""

    weight: str = "u4"


class WeightOnlyShape(Shape):
    """Rows of a format of `ops.products`: 16-bit activations."""

    @staticmethod
    def requests(
        n: int, k: int, m: int | Sequence[int], settings: WeightOnlySettings, target: Target
    ) -> list[KernelRequest]:
        from terrazzo.ops.weight_only import op

        form = get_codes(settings.weight)
        own = dict(symmetric=settings.symmetric or bool(form.values), weight=settings.weight)
        own["scale_dtype"] = form.scales[0] if form.values else settings.dtype
        size = min(settings.group, k) if form.one_group else settings.group
        return op.kernel_requests(n, k, group_size=size, m=m, dtype=settings.dtype, target=target, **own)

    @property
    def module(self) -> ModuleType:
        """The public module of the format."""
        return importlib.import_module(f"terrazzo.ops.{of_codes(self.settings.weight).record}")

    @property
    def reference(self) -> ModuleType:
        """Its oracle."""
        from terrazzo.ops.w4a16 import reference as zeros
        from terrazzo.ops.weight_only import reference

        return reference if get_codes(self.settings.weight).values else zeros

    def load(self) -> tuple[Any, Any, tuple[str, ...], torch.Tensor]:
        weight = random_weight(self.n, self.k, self.settings, self.random)
        return weight, self.module.pack(weight), ("words", "params"), self.dense(weight).to(self.dtype)

    def dense(self, weight: Any) -> torch.Tensor:
        """The weight in floats [N, K], of `dequantize`, a slice of rows at a time where it is float64."""
        import torch
        from terrazzo.nn.joined import rows_of

        if not get_codes(self.settings.weight).values:
            return self.reference.dequantize(weight, "exact", self.dtype)
        parts = []
        for lo in range(0, self.n, 4096):
            part = slice(lo, lo + 4096)
            rows = rows_of(weight, part)
            parts.append(rows.dequantize().to(self.dtype))
        return torch.cat(parts)

    def described(self) -> tuple[str, str]:
        form = get_codes(self.settings.weight)
        return of_codes(form).record, form.name if form.values or self.settings.symmetric else f"{form.name}_zeros"

    def operand(self, numerics: str) -> Operand:
        from terrazzo.ops.linear.operand import Operand

        s, form = self.settings, get_codes(self.settings.weight)
        scales = form.scales[0] if form.values else s.dtype
        group = 0 if s.group >= self.k and get_codes(s.weight).one_group else s.group
        return Operand(group, s.symmetric or bool(form.values), scales, s.dtype, numerics, s.weight)

    def gemm(self) -> Gemm:
        from terrazzo.ops.weight_only import op

        form = get_codes(self.settings.weight)
        scales = form.scales[0] if form.values else self.settings.dtype
        return op.problem_of(self.operand(choose_way(form, scales, self.settings.dtype, False).name), self.n, self.k)

    def converter(self, params: Mapping[str, Any]) -> str:
        return self.operand(params["numerics"]).converter

    def expected(self, x: torch.Tensor, requests: Sequence[KernelRequest]) -> tuple[torch.Tensor, ...]:
        from terrazzo.ops.weight_only.reference import UNIT_ROUNDOFF

        rows, numerics, own = self.checked_rows(x.shape[0]), numerics_of(requests), self.reference
        x = x[rows]
        bound = own.forward_error_bound(x, self.weight, numerics)
        magnitude = x.double().abs() @ self.weight_values().abs().T
        loose = bound + 4 * UNIT_ROUNDOFF[self.settings.dtype] * magnitude
        return rows, own.gemm(x, self.weight, numerics), bound, loose

    def weight_values(self) -> torch.Tensor:
        """float64 [N, K]."""
        if get_codes(self.settings.weight).values:
            return self.weight.dequantize()
        return self.reference.dequantize(self.weight, "post").double()

    def calls(self, x: torch.Tensor) -> dict[str, Callable[[Any, torch.Tensor | None], torch.Tensor]]:
        gemm = self.module.gemm
        return {OURS: lambda packed, out: gemm(x, packed, out=out)}


def random_weight(n: int, k: int, settings: WeightOnlySettings, random: torch.Generator) -> Any:
    """A canonical weight with uniform codes and log-normal scales, on the generator's device."""
    import torch
    from terrazzo.ops.weight_only.format import QuantizedWeight

    form = get_codes(settings.weight)
    size = min(settings.group, k) if form.one_group else settings.group
    shape, device = (n, -(-k // size)), random.device
    codes = torch.randint(0, 1 << form.bits, (n, k), generator=random, device=device, dtype=torch.uint8)
    scales = torch.exp(0.3 * torch.randn(shape, generator=random, device=device) - 4.5)
    if not form.values:
        zeros = torch.randint(0, 1 << form.bits, shape, generator=random, device=device, dtype=torch.uint8)
        scales, zeros = scales.to(getattr(torch, settings.dtype)), None if settings.symmetric else zeros
        module = importlib.import_module(f"terrazzo.ops.{of_codes(form).record}")
        return module.QuantizedWeight.canonical(codes, scales, zeros, group_size=size)
    if form.bits == 8:  # of e4m3 without NaN
        codes = codes & 128 | (codes & 127).clamp(max=126)
    if form.scales == ("e8m0",):
        scales = 127 + torch.frexp(scales).exponent.to(torch.uint8)
    if form.scales == ("e4m3",):
        scales = scales.to(torch.float8_e4m3fn)
    return QuantizedWeight.canonical(codes, scales, weight=settings.weight, group_size=size)
