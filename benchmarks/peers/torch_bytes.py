"""torch's own products of bytes: e4m3 with one scale for each tensor, and int8 without scales."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


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
