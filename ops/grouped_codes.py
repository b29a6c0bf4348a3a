"""Groups of integer codes along K: sizes that kernels read, and checks of their scales and zero points."""

from __future__ import annotations

from typing import TYPE_CHECKING

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import weights

if TYPE_CHECKING:
    import torch

GROUPS = (32, 64, 128)
"""Group sizes that kernels read; one group for the whole of K is the fourth choice."""
SCALE_DTYPES = ("float16", "bfloat16", "float32")
MOST_ZERO = {4: 16, 8: 255}
"""Bits of codes -> largest zero point."""


def expand_groups(group_size: int, k: int, device: torch.device) -> tuple[int, torch.Tensor]:
    """(unit, int64 [ceil(K / unit)]): the largest group of kernels that cuts these evenly, and the group of each unit.

    Raises:
        ArgumentError: no group size of kernels divides this one.
    """
    import torch

    unit = next((g for g in reversed(GROUPS) if group_size % g == 0), None)
    if unit is None:
        small = "; groups of 16 are those of NVFP4 (terrazzo.ops.nvfp4)" if group_size == 16 else ""
        raise ArgumentError(
            "group_size",
            group_size,
            f"must be one of {GROUPS}, a multiple of {GROUPS[0]}, or K = {k}{small}",
            "requantize with a supported group size, or use quantize() on the float weight",
        )
    return unit, torch.arange(-(-k // unit), device=device) // (group_size // unit)


def derive_group(k: int, groups: int) -> int | None:
    """The group size that so many groups over K tell, or None: 2 groups of K = 192 may be 96 + 96 or 128 + 64."""
    if groups == 1:
        return k
    even = k // groups if k % groups == 0 else 0
    fits = [g for g in GROUPS if -(-k // g) == groups]
    if even and even % GROUPS[0] == 0 and even not in fits and (fits or even % GROUPS[-1] == 0):
        fits.append(even)
    return fits[0] if len(fits) == 1 else None


def check_scales(scales: torch.Tensor, n: int, k: int, group_size: int | None) -> int:
    import torch

    if (
        scales is None
        or weights.dtype_name(scales) not in SCALE_DTYPES
        or scales.ndim != 2
        or scales.shape[0] != n
        or scales.shape[1] < 1
    ):
        seen = None if scales is None else f"{weights.dtype_name(scales)} {list(scales.shape)}"
        raise ArgumentError(
            "scales", seen, f"must be one of {SCALE_DTYPES}, shape [{n}, groups]", "transpose or convert them"
        )
    if not bool(torch.isfinite(scales).all()):
        bad = (~torch.isfinite(scales)).nonzero()[0].tolist()
        raise ArgumentError(
            "scales",
            float(scales[bad[0], bad[1]]),
            f"must be finite (row {bad[0]}, group {bad[1]})",
            "the checkpoint is damaged: get it again",
        )
    groups = scales.shape[1]
    if group_size in (None, -1):
        found = derive_group(k, groups)
        if found is None or (group_size == -1 and groups != 1):
            raise ArgumentError(
                "scales",
                f"{groups} groups",
                f"no usual group size gives that many groups over K = {k}, or more than one does",
                "pass group_size, or all the scales",
            )
        return found
    if type(group_size) is not int or group_size < 1 or -(-k // group_size) != groups:
        raise ArgumentError(
            "group_size",
            group_size,
            f"K = {k} with {groups} scales for each row needs ceil(K / group_size) = {groups}",
            "pass the group size that the checkpoint's config states, -1 for one group",
        )
    return k if groups == 1 else group_size


def check_zeros(zeros: torch.Tensor | None, scales: torch.Tensor, bits: int) -> torch.Tensor | None:
    import torch

    if zeros is None:
        return None
    if not weights.is_integer(zeros) or zeros.shape != scales.shape:
        raise ArgumentError(
            "zeros",
            f"{weights.dtype_name(zeros)} {list(zeros.shape)}",
            f"must be integers {list(scales.shape)}, one for each scale",
            f"round float zero points (w = (code - zero) * scale), or leave them out for {1 << bits - 1}",
        )
    if (value := weights.out_of_range(zeros, 0, MOST_ZERO[bits])) is not None:
        remedy = f"add {1 << bits - 1} to signed zero points; they count in units of a code"
        raise ArgumentError("zeros", value, f"must be in 0..{MOST_ZERO[bits]}", remedy)
    return None if bool((zeros == 1 << bits - 1).all()) else zeros.to(torch.uint8)


def check_perm(perm: torch.Tensor, k: int) -> torch.Tensor | None:
    import torch

    natural = torch.arange(k, device=perm.device)
    if (
        not weights.is_integer(perm)
        or tuple(perm.shape) != (k,)
        or not bool((perm.long().sort().values == natural).all())
    ):
        raise ArgumentError(
            "perm",
            f"{weights.dtype_name(perm)} {list(perm.shape)}",
            f"must be a permutation of 0..{k - 1}",
            "pass argsort(g_idx, stable=True)",
        )
    return None if bool((perm == natural).all()) else perm.to(torch.int32).contiguous()
