"""W4Ax beside cuBLAS f16: rows whose time is the product of quantized activations with the packed weight.

With two-level scales, a row's variant `block` is the same product with a packed weight that has a scale for each block
(the random weight's scales are exact in both forms): the kernel whose sums are scaled block by block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from terrazzo.autotune.gemm_bench import OURS, Settings, Shape
from terrazzo.schedules.problem import Gemm


@dataclass(frozen=True)
class W4AxSettings(Settings):
    """`Settings`, `ratio`: share of INT8 blocks, `scales` of weight and activations; `both`: two-level ones are timed
    beside a scale for each block."""

    group: int = 128
    ratio: float = 0.25
    scales: str = "two_level"
    both: bool = False


class W4AxShape(Shape):
    """Rows of W4Ax."""

    @staticmethod
    def requests(n: int, k: int, m: int | Sequence[int], settings: W4AxSettings, target: Any) -> list[Any]:
        from terrazzo.ops import w4ax

        facts = dict(m=m, dtype=settings.dtype, target=target, blocks8=blocks8(k, settings.ratio))
        forms = (settings.scales, "block")[: 1 + settings.both]
        return [r for form in forms for r in w4ax.kernel_requests(n, k, **facts, granularity=form)]

    def load(self) -> tuple[Any, Any, tuple[str, ...], Any]:
        self._blocks: dict[int, Any] = {}
        weight = random_weight(self.n, self.k, self.settings.ratio, self.random, self.settings.scales)
        return weight, weight.pack(target=self.target), ("words",), dense_of(weight, self.dtype)

    @property
    def module(self) -> ModuleType:
        from terrazzo.ops import w4ax

        return w4ax

    def described(self) -> tuple[str, str]:
        blocks = f"{self.weight.blocks8} of {self.weight.blocks} blocks INT8"
        return "w4ax", f"s4, {blocks}, {self.settings.scales} scales"

    def gemm(self) -> Gemm:
        own = dict(two_level=self.settings.scales == "two_level")
        return Gemm.of_blocks(self.n, self.weight.blocks * 128, self.weight.blocks8, **own)

    def converter(self, params: Mapping[str, Any]) -> str:
        return "s4_s8_lqq" if params["two_level"] else "s4_s8_x16"

    def expected(self, x: Any, requests: Sequence[Any]) -> tuple[Any, ...]:
        """As `Shape.expected`; peers multiply the unquantized x, so theirs is held to what quantizing x can change."""
        from terrazzo.ops.w4ax import reference

        rows, w = self.checked_rows(x.shape[0]), self.weight
        x = x[rows]
        facts = dict(blocks8=w.blocks8, permutation=w.permutation, granularity=self.settings.scales)
        q, scales = reference.quantize_activations(x, **facts, wide=not self.packed[0].native)
        ref, bound = reference.gemm(q, scales, w), reference.forward_error_bound(q, scales, w, self.dtype)
        magnitude = x.double().abs() @ w.dequantize().abs().T
        steps = scales.double().repeat_interleave(128, dim=1) @ w.values().abs().T
        return rows, ref, bound, bound + 4 * reference.UNIT_ROUNDOFF[self.settings.dtype] * magnitude + 0.5 * steps

    def quantized(self, x: Any) -> Any:
        return self.module.quantize_activations(x, self.packed[0])

    def calls(self, x: Any) -> dict[str, Callable[[Any, Any], Any]]:
        from terrazzo.ops import w4ax

        quantized = w4ax.quantize_activations(x, self.packed[0])
        made = {OURS: lambda packed, out: w4ax.gemm(quantized, packed, out=out, out_dtype=self.dtype)}
        if self.settings.both:
            form = self.block_form()
            made["block"] = lambda packed, out: w4ax.gemm(quantized, form[id(packed)], out=out, out_dtype=self.dtype)
        return made | {"with_quantizer": lambda packed, out: w4ax.gemm(x, packed, out=out)}

    def block_form(self) -> dict[int, Any]:
        """id of each packed weight -> the same weight, packed with a scale for each block."""
        if not self._blocks:
            other = dataclasses.replace(self.weight, channel_scales=None).pack(target=self.target)
            for held in self.packed:
                self._blocks[id(held)] = dataclasses.replace(other, words=other.words.clone())
        return self._blocks

    def drop(self) -> None:
        self._blocks.clear()
        super().drop()

    def side_calls(self, x: Any) -> dict[str, Callable[[], object]]:
        from terrazzo.ops import w4ax

        return {"quantizer": lambda: w4ax.quantize_activations(x, self.packed[0])}


def blocks8(k: int, ratio: float) -> int:
    return int(ratio * -(-k // 128) + 0.5)


def random_weight(n: int, k: int, ratio: float, random: Any, scales: str) -> Any:
    """A canonical weight with uniform codes and scales of this form, on the generator's device."""
    import torch
    from terrazzo.ops import w4ax

    make = lambda *shape: torch.rand(shape, generator=random, device=random.device)
    plan = w4ax.plan_blocks(make(k) + 0.1, ratio=ratio)
    codes = torch.randint(-7, 8, (n, plan.padded), generator=random, device=random.device, dtype=torch.int8)
    held, channel = torch.exp(make(n, plan.blocks) - 5).bfloat16(), None
    if scales == "two_level":
        channel = (8 + (make(n) * 8).floor()) * 2.0**-14  # four bits, four of the multiplier: exact in bfloat16
        held = channel[:, None] * torch.randint(6, 17, (n, plan.blocks), generator=random, device=random.device)
    return w4ax.QuantizedWeight.canonical(
        codes.masked_fill(plan.order() < 0, 0),
        held,
        k=k,
        blocks8=plan.blocks8,
        permutation=plan.permutation,
        channel_scales=channel,
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
