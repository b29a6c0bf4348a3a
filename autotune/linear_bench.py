"""Rows of linear layers of every product: data, oracles, and calls compared with cuBLAS f16 and 8-bit peers.

A row's `us` is the product of activations, quantized outside of the clock, with the packed weight. Its `variants` are
other calls of ours on the same data: `with_quantizer` (16-bit x, both kernels), and of W4Ax with two-level scales
`block`, the same product with a packed weight that has a scale for each block (the random weight's scales are exact in
both forms).
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from terrazzo.autotune.gemm_bench import OURS, Settings, Shape, numerics_of
from terrazzo.ops.kinds.base import Facts, Kind
from terrazzo.ops.kinds.table import KINDS
from terrazzo.ops.products.codes import MXFP4
from terrazzo.ops.products.product import Product
from terrazzo.ops.products.table import BY_RECORD
from terrazzo.ops.products.ways import get_way
from terrazzo.schedules.w4ax import BLOCK

if TYPE_CHECKING:
    import torch
    from terrazzo.lowering.request import KernelRequest
    from terrazzo.lowering.targets import Target
    from terrazzo.nn.products import Activations
    from terrazzo.ops.weight.base import AnyPacked as Packed
    from terrazzo.schedules.problem import Gemm

Calls = dict[str, Callable[[Any, "torch.Tensor | None"], "torch.Tensor"]]


@dataclass(frozen=True)
class LinearSettings(Settings):
    """`Settings`, and the product.

    Attributes:
        record: of the product. group: K where a row has one scale.
        ratio: of W4Ax, share of INT8 blocks. scales: of its weight and activations. both: whether two-level ones are
            timed beside a scale for each block.
        scale_dtype: of a weight of small floats whose scales may have several. accumulate: of bytes by bytes.
    """

    record: str = "w4a16"
    ratio: float = 0.25
    scales: str = "two_level"
    both: bool = False
    scale_dtype: str = ""
    accumulate: str = "auto"

    @property
    def product(self) -> Product:
        """What is measured."""
        return BY_RECORD[self.record]

    def size(self, k: int) -> int:
        """k of a scale."""
        return min(self.group, k) if self.product.codes.one_group else self.group


class LinearShape(Shape):
    """Rows of a product whose activations keep 16 bits, and what all have in common."""

    settings: LinearSettings

    @property
    def product(self) -> Product:
        """What is measured."""
        return self.settings.product

    @property
    def module(self) -> ModuleType:
        return importlib.import_module(f"terrazzo.ops.{self.product.module}")

    @staticmethod
    def requests(
        n: int, k: int, m: int | Sequence[int], settings: LinearSettings, target: Target
    ) -> list[KernelRequest]:
        from terrazzo.ops.weight_only import op

        codes = settings.product.codes
        own = dict(symmetric=settings.symmetric or bool(codes.values), weight=codes.name)
        own["scale_dtype"] = settings.scale_dtype or (codes.scales[0] if codes.values else settings.dtype)
        return op.kernel_requests(n, k, group_size=settings.size(k), m=m, dtype=settings.dtype, target=target, **own)

    def load(self) -> tuple[Any, Any, tuple[str, ...], torch.Tensor]:
        from terrazzo.nn.joined import rows_of

        weight = random_weight(self.n, self.k, self.settings, self.random)
        planes = [plane.name for plane in self.product.planes if plane.shape is not None]
        first = max(0, self.n - self.settings.checked) // 128 * 128 if self.settings.checked else 0
        self.columns = slice(first, self.n)
        self.part = rows_of(weight, self.columns)
        packed = weight.pack(target=self.target if self.product.planned else None)
        return weight, packed, tuple(planes), dense_of(weight, self.dtype)

    def drop(self) -> None:
        self.part = None
        super().drop()

    def problem(self) -> Facts:
        """The facts of the weight."""
        own = dict(dtype=self.settings.dtype, group=self.settings.size(self.k), symmetric=self.settings.symmetric)
        return KINDS[self.settings.record].facts(self.n, self.k, 0, **own)

    def gemm(self) -> Gemm:
        return KINDS[self.settings.record].gemm(self.problem())

    def described(self) -> tuple[str, str]:
        codes = self.product.codes
        return self.product.record, codes.name if codes.values or self.settings.symmetric else f"{codes.name}_zeros"

    def converter(self, params: Mapping[str, Any]) -> str:
        symmetric = params.get("symmetric", False)
        return get_way(self.product.codes, params["numerics"]).converter(self.settings.dtype, symmetric)

    @property
    def reference(self) -> ModuleType:
        """The oracle."""
        from terrazzo.ops.w4a16 import reference as zeros
        from terrazzo.ops.weight_only import reference

        return reference if self.product.codes.values else zeros

    def expected(self, x: torch.Tensor, requests: Sequence[KernelRequest]) -> tuple[torch.Tensor, ...]:
        """As `Shape.expected`; peers multiply the unquantized x, so theirs is held to what quantizing x can change."""
        import torch

        rows = self.checked_rows(x.shape[0])
        x = x[rows]
        reference, bound, rounding, more = self.oracle(x, requests)
        rounding += 2 * torch.finfo(self.dtype).eps
        if self.columns.start:
            rows = rows[:, None], torch.arange(self.columns.start, self.n, device=rows.device)
        return rows, reference, bound, bound + rounding * (x.double().abs() @ self.magnitudes().T) + more

    def magnitudes(self) -> torch.Tensor:
        """float64 [N, K] of what is checked of the weight."""
        integers = self.product.wide and not self.product.codes.values
        values = self.part.dequantize("post") if integers else self.part.dequantize()
        return values.double().abs()

    def oracle(self, x: torch.Tensor, requests: Sequence[KernelRequest]) -> tuple[Any, ...]:
        """(reference, bound for us, relative rounding of x's codes, absolute errors of peers that come on top)."""
        numerics, own = numerics_of(requests), self.reference
        return own.gemm(x, self.part, numerics), own.forward_error_bound(x, self.part, numerics), 0.0, 0.0

    def calls(self, x: torch.Tensor) -> Calls:
        gemm = self.module.gemm
        return {OURS: lambda packed, out: gemm(x, packed, out=out)}


class ByteShape(LinearShape):
    """Rows of 4-bit codes that become bytes, on int8 activations."""

    @staticmethod
    def requests(
        n: int, k: int, m: int | Sequence[int], settings: LinearSettings, target: Target
    ) -> list[KernelRequest]:
        from terrazzo.ops import w4a8

        own = settings.product.numerics
        facts = dict(group_size=settings.size(k), m=m, dtype=settings.dtype, target=target)
        return w4a8.kernel_requests(n, k, **facts, dequantization="auto" if len(own) > 1 else own[0])

    def described(self) -> tuple[str, str]:
        return self.product.record, self.product.codes.name

    def converter(self, params: Mapping[str, Any]) -> str:
        return get_way(self.product.codes, params["dequantization"]).converter()

    def quantized(self, x: torch.Tensor) -> Activations:
        return self.module.quantize_activations(x)

    def oracle(self, x: torch.Tensor, requests: Sequence[KernelRequest]) -> tuple[Any, ...]:
        from terrazzo.ops.w4a8 import reference

        q, scales, _ = reference.quantize_activations(x)
        made = reference.gemm(q, scales, self.part)
        more = 0.5 * scales.double()[:, None] * self.magnitudes().sum(1)
        return made, reference.forward_error_bound(made, self.dtype), 0.0, more

    def calls(self, x: torch.Tensor) -> Calls:
        gemm, quantized = self.module.gemm, self.quantized(x)
        return {
            OURS: lambda packed, out: gemm(quantized, packed, out=out, out_dtype=self.dtype),
            "with_quantizer": lambda packed, out: gemm(x, packed, out=out),
        }


class E4M3Shape(ByteShape):
    """The same on e4m3 activations."""

    def described(self) -> tuple[str, str]:
        return self.product.record, self.product.ways[0].converter()

    def oracle(self, x: torch.Tensor, requests: Sequence[KernelRequest]) -> tuple[Any, ...]:
        from terrazzo.ops.w4a8 import fp8_reference as reference
        from terrazzo.ops.w4a8 import mxfp8

        if self.product.x.quant == mxfp8.FORM:
            made = mxfp8.reference(x)
            q, scales = made.q[:, : x.shape[-1]], made.token_scales()
        else:
            q, scales = reference.quantize_activations(x)
        bound = reference.forward_error_bound(q, scales, self.part, self.dtype)
        more = 2.0**-10 * scales.double().view(len(q), -1).amax(1)[:, None] * self.magnitudes().sum(1)
        return reference.gemm(q, scales, self.part), bound, 2.0**-4, more


class DirectShape(ByteShape):
    """Rows of bytes by bytes."""

    @staticmethod
    def requests(
        n: int, k: int, m: int | Sequence[int], settings: LinearSettings, target: Target
    ) -> list[KernelRequest]:
        from terrazzo.ops.w4a8.w8a8 import op

        form = op.form_of(settings.size(k), k, settings.product.codes.name)
        how = dict(accumulate=settings.accumulate, dtype=settings.dtype, target=target)
        return op.kernel_requests(n, k, **form, m=m, **how)

    def described(self) -> tuple[str, str]:
        return self.product.record, self.problem()["dequantization"]

    def quantized(self, x: torch.Tensor) -> Activations:
        return self.module.quantize_activations(x, self.packed[0])

    def oracle(self, x: torch.Tensor, requests: Sequence[KernelRequest]) -> tuple[Any, ...]:
        from terrazzo.ops.w4a8.w8a8 import activations, reference

        made = activations.on_cpu(x, self.packed[0])
        bound = reference.forward_error_bound(made, self.part, self.dtype, accumulate=self.settings.accumulate)
        step = (reference.values(made) - x.double()).abs().amax(1, keepdim=True)
        rounding = 2.0**-4 if self.product.codes.values else 0.0
        return reference.gemm(made, self.part), bound, rounding, step * self.magnitudes().sum(1)

    def calls(self, x: torch.Tensor) -> Calls:
        gemm, quantized, how = self.module.gemm, self.quantized(x), dict(accumulate=self.settings.accumulate)
        return {
            OURS: lambda packed, out: gemm(quantized, packed, out=out, out_dtype=self.dtype, **how),
            "with_quantizer": lambda packed, out: gemm(x, packed, out=out, **how),
        }


class MixedShape(ByteShape):
    """Rows of W4Ax."""

    @staticmethod
    def requests(
        n: int, k: int, m: int | Sequence[int], settings: LinearSettings, target: Target
    ) -> list[KernelRequest]:
        from terrazzo.ops import w4ax

        high = int(settings.ratio * -(-k // BLOCK) + 0.5)
        facts = dict(m=m, dtype=settings.dtype, target=target, blocks8=high)
        forms = (settings.scales, "block")[: 1 + settings.both]
        return [r for form in forms for r in w4ax.kernel_requests(n, k, **facts, granularity=form)]

    def load(self) -> tuple[Any, Any, tuple[str, ...], torch.Tensor]:
        self._blocks: dict[int, Any] = {}
        return super().load()

    def described(self) -> tuple[str, str]:
        blocks = f"{self.weight.blocks8} of {self.weight.blocks} blocks INT8"
        return self.product.record, f"{self.product.codes.name}, {blocks}, {self.settings.scales} scales"

    def problem(self) -> Facts:
        facts = {name: it for name, it in super().problem().items() if name != "scales" or self.weight.two_level}
        return facts | dict(blocks8=self.weight.blocks8)

    def converter(self, params: Mapping[str, Any]) -> str:
        return self.product.ways[not params["two_level"]].converter()

    def quantized(self, x: torch.Tensor) -> Activations:
        return self.module.quantize_activations(x, self.packed[0])

    def oracle(self, x: torch.Tensor, requests: Sequence[KernelRequest]) -> tuple[Any, ...]:
        from terrazzo.ops.w4ax import reference

        w = self.part
        facts = dict(blocks8=w.blocks8, permutation=w.permutation, granularity=self.settings.scales)
        q, scales = reference.quantize_activations(x, **facts, wide=not self.packed[0].native)
        coarse = reference.quantize_activations(x, **facts)[1]  # what rounding loses, also where bytes hold the codes
        steps = coarse.double().repeat_interleave(BLOCK, dim=1) @ w.values().abs().T
        bound = reference.forward_error_bound(q, scales, w, self.dtype)
        return reference.gemm(q, scales, w), bound, 0.0, 0.5 * steps

    def calls(self, x: torch.Tensor) -> Calls:
        made = super().calls(x)
        if self.settings.both:
            gemm, quantized, form = self.module.gemm, self.quantized(x), self.block_form()
            made["block"] = lambda packed, out: gemm(quantized, form[id(packed)], out=out, out_dtype=self.dtype)
        return made

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


def class_of(product: Product) -> type[LinearShape]:
    """How rows of a product are measured."""
    if product.wide:
        return LinearShape
    if product.planned:
        return MixedShape
    return DirectShape if product.direct else ByteShape if product.codes.zero else E4M3Shape


def shape_of(kind: Kind, facts: Facts) -> tuple[type[LinearShape], LinearSettings]:
    """How rows of a problem are measured."""
    product, dtype = kind.product, facts.get("dtype") or facts["out_dtype"]
    own: dict[str, Any] = dict(group=facts.get("group") or facts["k"], symmetric=facts.get("symmetric", False))
    if product.planned:
        ratio = facts["blocks8"] / -(-facts["k"] // BLOCK)
        own = dict(group=BLOCK, ratio=ratio, scales=facts.get("scales", "block"))
    elif product.direct and not kind.in_blocks(facts):
        own = dict(group=facts["k"])
    return class_of(product), LinearSettings(dtype, **own, record=product.record)


def random_weight(n: int, k: int, settings: LinearSettings, random: torch.Generator) -> Packed:
    """A canonical weight of a product with uniform codes, on the generator's device."""
    import torch

    product, device = settings.product, random.device
    codes, size = product.codes, settings.size(k)
    made = importlib.import_module(f"terrazzo.ops.{product.module}")
    shape = (n, -(-k // size))
    uniform = lambda low, high, at, dtype: torch.randint(low, high, at, generator=random, device=device, dtype=dtype)
    normal = lambda *at: torch.randn(at, generator=random, device=device)
    if product.direct:
        granularity = {"granularity": "block"} if size < k else {}
        return made.quantize_weight(normal(n, k) * 0.02, codes=codes.name, **granularity)
    if product.planned:
        return _random_mixed(n, k, settings, random)
    if product.converted and not codes.values:
        low = -8 if not codes.zero else 0
        own = uniform(low, low + 16, (n, k), torch.uint8 if codes.zero else torch.int8)
        if codes.zero:
            scales = uniform(6, 14, shape, torch.int64)
            channels = torch.exp(0.3 * normal(n) - 8)
            return made.QuantizedWeight.canonical(own, scales, 128 - (7.5 * scales).int(), channels, group_size=size)
        factors = normal(*shape)
        scales = (factors.sign() * (1 + 0.2 * factors.abs())).half()
        return made.QuantizedWeight.canonical(own, scales, torch.exp(0.3 * normal(n) - 5), group_size=size)
    own = uniform(0, 1 << codes.bits, (n, k), torch.uint8)
    scales = torch.exp(0.3 * normal(*shape) - 4.5)
    if not codes.values:
        zeros = uniform(0, 1 << codes.bits, shape, torch.uint8)
        scales, zeros = scales.to(getattr(torch, settings.dtype)), None if settings.symmetric else zeros
        return made.QuantizedWeight.canonical(own, scales, zeros, group_size=size)
    if codes.bits == 8:  # of e4m3 without NaN
        own = own & 128 | (own & 127).clamp(max=126)
    if codes.scales == ("e8m0",):
        scales = 127 + torch.frexp(scales).exponent.to(torch.uint8)
    if codes.scales == ("e4m3",):
        scales = scales.to(torch.float8_e4m3fn)
    elif settings.scale_dtype:
        scales = scales.to(getattr(torch, settings.scale_dtype))
    name = codes.name if product.wide else MXFP4.name
    return made.QuantizedWeight.canonical(own, scales, weight=name, group_size=size)


def _random_mixed(n: int, k: int, settings: LinearSettings, random: torch.Generator) -> Packed:
    """Of W4Ax, with scales of this form."""
    import torch
    from terrazzo.ops import w4ax

    make = lambda *shape: torch.rand(shape, generator=random, device=random.device)
    plan = w4ax.plan_blocks(make(k) + 0.1, ratio=settings.ratio)
    codes = torch.randint(-7, 8, (n, plan.padded), generator=random, device=random.device, dtype=torch.int8)
    held, channel = torch.exp(make(n, plan.blocks) - 5).bfloat16(), None
    if settings.scales == "two_level":
        channel = (8 + (make(n) * 8).floor()) * 2.0**-14  # four bits, four of the multiplier: exact in bfloat16
        held = channel[:, None] * torch.randint(6, 17, (n, plan.blocks), generator=random, device=random.device)
    facts = dict(k=k, blocks8=plan.blocks8, permutation=plan.permutation, channel_scales=channel)
    return w4ax.QuantizedWeight.canonical(codes.masked_fill(plan.order() < 0, 0), held, **facts)


def dense_of(weight: Packed, dtype: torch.dtype) -> torch.Tensor:
    """The weight in 16 bits [N, K], a slice of rows at a time: the float64 of a large one would not fit."""
    import torch
    from terrazzo.nn.joined import rows_of

    parts = (rows_of(weight, slice(lo, lo + 4096)) for lo in range(0, weight.n, 4096))
    return torch.cat([part.dequantize().to(dtype) for part in parts])
