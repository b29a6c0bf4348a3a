"""W4A8 beside cuBLAS f16 and 8-bit peers: activations quantized outside of the clock, with rows that count it in.

A row's `us` is the product of quantized activations with the packed weight. Its `variants` are other calls of ours on
the same data: `with_quantizer` (16-bit x, both kernels) and `quantizer` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from terrazzo.autotune.gemm_bench import OURS, Settings, Shape
from terrazzo.ops.products import converted
from terrazzo.schedules.problem import Gemm

if TYPE_CHECKING:
    import torch
    from terrazzo.lowering.request import KernelRequest
    from terrazzo.lowering.targets import Target


@dataclass(frozen=True)
class W4A8Settings(Settings):
    """`Settings` with the groups that W4A8's weights usually have."""

    group: int = 64


class W4A8Shape(Shape):
    """Rows of W4A8."""

    product = converted.W4A8

    @staticmethod
    def requests(n: int, k: int, m: int | Sequence[int], settings: Settings, target: Target) -> list[KernelRequest]:
        from terrazzo.ops import w4a8

        return w4a8.kernel_requests(n, k, group_size=settings.group, m=m, dtype=settings.dtype, target=target)

    def load(self) -> tuple[Any, Any, tuple[str, ...], torch.Tensor]:
        from terrazzo.ops import w4a8

        weight = random_weight(self.n, self.k, self.settings.group, self.random)
        return weight, w4a8.pack(weight), ("words", "channel_scales"), dense_of(weight, self.dtype)

    @property
    def module(self) -> ModuleType:
        from terrazzo.ops import w4a8

        return w4a8

    def described(self) -> tuple[str, str]:
        return "w4a8", "u4_lqq"

    def gemm(self) -> Gemm:
        return Gemm.of_bytes(self.n, self.k, self.settings.group)

    def converter(self, params: Mapping[str, Any]) -> str:
        from terrazzo.ops.linear.bytes.problem import DEQUANTIZATIONS

        return DEQUANTIZATIONS[params["dequantization"]]

    def expected(self, x: torch.Tensor, requests: Sequence[KernelRequest]) -> tuple[torch.Tensor, ...]:
        """As `Shape.expected`; peers multiply the unquantized x, so theirs is held to what quantizing x can change."""
        from terrazzo.ops.w4a8 import reference

        rows = self.checked_rows(x.shape[0])
        x = x[rows]
        q, scales, _ = reference.quantize_activations(x)
        ref = reference.gemm(q, scales, self.weight)
        bound = reference.forward_error_bound(ref, self.dtype)
        dense = reference.dequantize(self.weight).abs()
        rounding = 4 * reference.UNIT_ROUNDOFF[self.settings.dtype]
        loose = bound + rounding * (x.double().abs() @ dense.T) + 0.5 * scales.double()[:, None] * dense.sum(1)
        return rows, ref, bound, loose

    def calls(self, x: torch.Tensor) -> dict[str, Callable[[Any, torch.Tensor | None], torch.Tensor]]:
        from terrazzo.ops.w4a8 import gemm, quantize_activations

        quantized = quantize_activations(x)
        return {
            OURS: lambda packed, out: gemm(quantized, packed, out=out, out_dtype=self.dtype),
            "with_quantizer": lambda packed, out: gemm(x, packed, out=out),
        }

    def side_calls(self, x: torch.Tensor) -> dict[str, Callable[[], object]]:
        from terrazzo.ops.w4a8 import quantize_activations

        out = quantize_activations(x)
        return {"quantizer": lambda: quantize_activations(x, out=out)}


class Fp8Shape(W4A8Shape):
    """Rows of W4A8 on e4m3."""

    product = converted.W4A8_FP8

    @staticmethod
    def requests(n: int, k: int, m: int | Sequence[int], settings: Settings, target: Target) -> list[KernelRequest]:
        from terrazzo.ops import w4a8

        facts = dict(group_size=settings.group, m=m, dtype=settings.dtype, target=target)
        return w4a8.kernel_requests(n, k, **facts, dequantization="e4m3")

    def load(self) -> tuple[Any, Any, tuple[str, ...], torch.Tensor]:
        from terrazzo.ops.w4a8 import fp8

        weight = random_fp8_weight(self.n, self.k, self.settings.group, self.random)
        return weight, fp8.pack(weight), ("words", "channel_scales"), dense_fp8(weight, self.dtype)

    @property
    def module(self) -> ModuleType:
        from terrazzo.ops.w4a8 import fp8

        return fp8

    def described(self) -> tuple[str, str]:
        return "w4a8_fp8", "z4_e4m3"

    def gemm(self) -> Gemm:
        return Gemm.of_bytes(self.n, self.k, self.settings.group, activations="e4m3")

    def converter(self, params: Mapping[str, Any]) -> str:
        return self.described()[1]

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


class Mxfp4Shape(Fp8Shape):
    """MXFP4 on e4m3 activations."""

    product = converted.MXFP4_FP8

    @staticmethod
    def requests(n: int, k: int, m: int | Sequence[int], settings: Settings, target: Target) -> list[KernelRequest]:
        from terrazzo.ops import mxfp4_fp8

        return mxfp4_fp8.kernel_requests(n, k, m=m, dtype=settings.dtype, target=target)

    def load(self) -> tuple[Any, Any, tuple[str, ...], torch.Tensor]:
        weight = random_mxfp4_weight(self.n, self.k, self.random)
        return weight, weight.pack(), ("words", "channel_scales"), dense_mxfp4(weight, self.dtype)

    @property
    def module(self) -> ModuleType:
        from terrazzo.ops import mxfp4_fp8

        return mxfp4_fp8

    def described(self) -> tuple[str, str]:
        return "mxfp4_fp8", "e2m1_e4m3"


def random_weight(n: int, k: int, group: int, random: torch.Generator) -> Any:
    """A canonical weight with uniform codes and offsets around zero, on the generator's device."""
    import torch
    from terrazzo.ops.w4a8 import QuantizedWeight

    shape, device = (n, -(-k // group)), random.device
    scales = torch.randint(6, 14, shape, generator=random, device=device)
    return QuantizedWeight.canonical(
        torch.randint(0, 16, (n, k), generator=random, device=device, dtype=torch.uint8),
        scales,
        128 - (7.5 * scales).int(),
        torch.exp(0.3 * torch.randn(n, generator=random, device=device) - 8),
        group_size=group,
    )


def dense_of(weight: Any, dtype: torch.dtype) -> torch.Tensor:
    """The weight in 16 bits [N, K], a slice of rows at a time: the float64 of a large one would not fit."""
    import torch

    out = torch.empty(weight.codes.shape, dtype=dtype, device=weight.codes.device)
    values = weight.bytes()
    for lo in range(0, weight.n, 4096):
        part = slice(lo, lo + 4096)
        out[part] = values[part].float() * weight.channel_scales[part, None]
    return out


def random_fp8_weight(n: int, k: int, group: int, random: torch.Generator) -> Any:
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


def random_mxfp4_weight(n: int, k: int, random: torch.Generator) -> Any:
    """A canonical MXFP4 weight with uniform codes and scales of six binades."""
    import torch
    from terrazzo.ops.mxfp4_fp8 import QuantizedWeight

    own = dict(generator=random, device=random.device, dtype=torch.uint8)
    codes, scales = torch.randint(16, (n, k), **own), torch.randint(116, 122, (n, -(-k // 32)), **own)
    return QuantizedWeight.canonical(codes, scales, weight="mxfp4", group_size=32)


def dense_fp8(weight: Any, dtype: torch.dtype) -> torch.Tensor:
    """The weight in 16 bits [N, K], a slice of rows at a time: the float64 of a large one would not fit."""
    import torch

    out = torch.empty(weight.codes.shape, dtype=dtype, device=weight.codes.device)
    for lo in range(0, weight.n, 4096):
        part = slice(lo, lo + 4096)
        factors = weight.scales[part].float() * weight.channel_scales[part, None]
        out[part] = weight.codes[part].float() * factors.repeat_interleave(weight.group_size, dim=1)[:, : weight.k]
    return out


def dense_mxfp4(weight: Any, dtype: torch.dtype) -> torch.Tensor:
    """As `dense_fp8`."""
    import torch
    from terrazzo.ops.products.codes import MXFP4

    out = torch.empty(weight.codes.shape, dtype=dtype, device=weight.codes.device)
    table = torch.tensor(MXFP4.values, device=weight.codes.device)
    for lo in range(0, weight.n, 4096):
        part = slice(lo, lo + 4096)
        factors = torch.exp2(weight.scales[part].float() - 127)
        out[part] = table[weight.codes[part].int()] * factors.repeat_interleave(32, dim=1)[:, : weight.k]
    return out


class TorchFp8:
    """torch._scaled_mm on e4m3 operands with one scale for each tensor; x is quantized outside of the clock."""

    name = "torch_fp8"

    def missing(self) -> str:
        import torch

        if not hasattr(torch, "_scaled_mm") or not torch.cuda.is_available():
            return "this torch has no _scaled_mm, or there is no GPU"
        return "" if torch.cuda.get_device_capability() >= (8, 9) else "fp8 needs compute capability 8.9"

    def load(self, weight: Any, dense: torch.Tensor, copies: Callable[[int], int]) -> list[Any]:
        codes, scale = _to_fp8(dense)
        return [(codes.clone(), scale, dense.dtype) for _ in range(copies(codes.numel()))]

    def prepare(self, x: torch.Tensor, loaded: Any) -> Any:
        return _to_fp8(x)

    def call(self, x: Any, loaded: Any) -> torch.Tensor:
        import torch

        codes, scale, dtype = loaded
        return torch._scaled_mm(x[0], codes.T, scale_a=x[1], scale_b=scale, out_dtype=dtype)

    def wrong(self, y: torch.Tensor, x: torch.Tensor, loaded: Any) -> str:
        """Against the float64 product of its own fp8 operands; 0.5 % of the largest for 14-bit partial sums."""
        a, sa = _to_fp8(x)
        codes, scale, _ = loaded
        ref = (a[:64].double() @ codes[:512].double().T) * sa.double() * scale.double()
        error = (y[:64, :512].double() - ref).abs().max()
        return "" if bool(error <= 5e-3 * ref.abs().max()) else f"off by up to {float(error):.3g}"


class TorchInt8:
    """torch._int_mm: int8 times int8 to int32, no scales applied (a lower bound for W8A8)."""

    name = "torch_int8"

    def missing(self) -> str:
        import torch

        return "" if hasattr(torch, "_int_mm") and torch.cuda.is_available() else "this torch has no _int_mm"

    def load(self, weight: Any, dense: torch.Tensor, copies: Callable[[int], int]) -> list[Any]:
        values = weight.bytes()
        return [values.clone() for _ in range(copies(values.numel()))]

    def prepare(self, x: torch.Tensor, loaded: Any) -> torch.Tensor:
        from terrazzo.ops.w4a8 import reference

        return reference.quantize_activations(x)[0]

    def call(self, x: torch.Tensor, loaded: torch.Tensor) -> torch.Tensor:
        import torch

        return torch._int_mm(x, loaded.T)

    def wrong(self, y: torch.Tensor, x: torch.Tensor, loaded: torch.Tensor) -> str:
        ref = self.prepare(x[:64], loaded).double() @ loaded[:512].double().T
        return "" if bool((y[:64, :512].double() == ref).all()) else "sums are not exact"


def _to_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    scale = (x.abs().amax().float() / 448.0).clamp(min=1e-12)
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


PEERS = (TorchFp8(), TorchInt8())
FP8_PEERS = (TorchFp8(),)
"""Of e4m3."""
