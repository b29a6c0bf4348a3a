"""Dtypes of scales that a caller chooses, and whether they hold what a quantizer puts into them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from terrazzo.lowering.errors import ArgumentError

if TYPE_CHECKING:
    import torch


def check_scale_dtype(scale_dtype: torch.dtype) -> None:
    """Raise ArgumentError unless it is float16, bfloat16 or float32."""
    import torch

    floats = (torch.float16, torch.bfloat16, torch.float32)
    if not isinstance(scale_dtype, torch.dtype) or scale_dtype not in floats:
        constraint = f"must be one of {tuple(map(str, floats))}"
        raise ArgumentError("scale_dtype", str(scale_dtype), constraint, "leave it out")


def check_scales(scales: torch.Tensor, used: torch.Tensor) -> None:
    """Raise ArgumentError for scales that are infinite, or 0 of groups that are not all zeros.

    Args:
        scales: floats [...]. used: bool [...], groups that hold anything.
    """
    import torch

    wide = scales.dtype == torch.float32
    wider = "use torch.float32 or torch.bfloat16" if scales.dtype == torch.float16 else "use torch.float32"
    if not bool(scales.isfinite().all()):
        remedy = "scale the weight down" if wide else wider
        raise ArgumentError("scale_dtype", str(scales.dtype), "cannot hold the scale of this weight", remedy)
    if bool(((scales == 0) & used).any()):
        remedy = "scale the weight up" if wide else wider
        constraint = "is too narrow for the scales of this weight: one that is not 0 rounds to 0"
        raise ArgumentError("scale_dtype", str(scales.dtype), constraint, remedy)
