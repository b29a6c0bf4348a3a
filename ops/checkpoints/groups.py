"""Which group of scales each input channel of a checkpoint layer has, act-order included."""

from __future__ import annotations

from typing import TYPE_CHECKING

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.checkpoints.words import check_group, shape_error
from terrazzo.ops.grouped_codes import GROUPS, derive_group
from terrazzo.ops.weight_only.byte_integers import of_bits
from terrazzo.ops.weight_only.integers import QuantizedWeight

if TYPE_CHECKING:
    import torch


def by_index(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    g_idx: torch.Tensor | None,
    bias: torch.Tensor | None,
    group_size: int | None,
    desc_act: bool | None,
    code_bits: int = 4,
) -> QuantizedWeight:
    """Canonical weight from codes [N, K], scales and zeros [N, G], and the group of each column (None: in order)."""
    import torch

    k, groups, kind = codes.shape[1], scales.shape[1], of_bits(code_bits)
    size = _ceil_groups(k, groups, check_group(group_size))
    if g_idx is None:
        if desc_act and groups > 1:
            constraint = "the config says desc_act, which needs the group of each channel"
            raise ArgumentError("g_idx", None, constraint, "add the layer's g_idx tensor")
        if group_size is None and derive_group(k, groups) is None:
            constraint = f"K = {k} with {groups} scales for each row does not tell it"
            raise ArgumentError("group_size", None, constraint, "pass what the checkpoint's config states")
        return kind.canonical(codes, scales, zeros, group_size=size, bias=bias)
    if len(g_idx) != k:
        raise shape_error("g_idx", g_idx, f"int32 [{k}]")
    g_idx = g_idx.to(codes.device).long()
    if bool((g_idx < 0).any()) or bool((g_idx >= groups).any()):
        constraint = f"must lie in 0..{groups - 1}, one of the scales"
        raise ArgumentError("g_idx", [int(g_idx.min()), int(g_idx.max())], constraint, "get the file again")
    if bool((g_idx == torch.arange(k, device=codes.device) // size).all()):
        return kind.canonical(codes, scales, zeros, group_size=size, bias=bias)
    if desc_act is False:
        constraint = "the config says so, but g_idx is not k // group_size"
        raise ArgumentError("desc_act", False, constraint, "pass desc_act=None to believe the tensors")
    perm, source, size = _sort_groups(g_idx, groups)
    zeros = None if zeros is None else zeros[:, source]
    return kind.canonical(codes[:, perm], scales[:, source], zeros, group_size=size, bias=bias, perm=perm)


def _sort_groups(g_idx: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(perm [K], original group of each stored one [G'], unit): channels sorted by group, groups cut into equal units.

    One group may hold a remainder; it goes last, where a ragged end is allowed. Empty groups vanish.
    """
    import torch

    counts = torch.bincount(g_idx, minlength=groups)
    full = counts.max().item()
    for unit in dict.fromkeys(
        (full, *reversed(GROUPS)) if full in GROUPS or full % GROUPS[-1] == 0 else reversed(GROUPS)
    ):
        ragged = (counts % unit).nonzero().flatten().tolist()
        if len(ragged) > 1:
            continue
        order = [g for g in range(groups) if g not in ragged] + ragged
        rank = torch.empty(groups, dtype=torch.long, device=g_idx.device)
        rank[torch.tensor(order, device=g_idx.device)] = torch.arange(groups, device=g_idx.device)
        units = torch.tensor([-(-c // unit) for c in counts[order].tolist()], device=g_idx.device)
        source = torch.tensor(order, device=g_idx.device).repeat_interleave(units)
        return torch.argsort(rank[g_idx], stable=True), source, unit if len(source) > 1 else len(g_idx)
    raise ArgumentError(
        "g_idx",
        sorted(set(counts.tolist())),
        f"channels for each group must share a unit of {GROUPS[0]}, {GROUPS[1]} or {GROUPS[2]}",
        "import the unsharded layer (a slice along K of an act-order layer cuts groups), or requantize with quantize()",
    )


def _ceil_groups(k: int, groups: int, group_size: int | None) -> int:
    """Group size over K with perhaps a ragged last group: the one stated, else the supported one that fits."""
    derived = group_size is None or (group_size == -1 and groups == 1)
    size = (derive_group(k, groups) or -(-k // groups)) if derived else group_size
    if size < 1 or -(-k // size) != groups:
        constraint = f"K = {k} with {groups} scales for each row needs ceil(K / group_size) = {groups}"
        remedy = "pass the group size that the checkpoint's config states, -1 for one group"
        raise ArgumentError("group_size", group_size, constraint, remedy)
    return size


def exact_groups(k: int, groups: int, group_size: int | None) -> int:
    """AWQ's group size: every group is full."""
    size = k if group_size in (-1, None) and groups == 1 else k // groups if group_size is None else group_size
    if size < 1 or k % size or k // size != groups:
        constraint = f"K = {k} with {groups} rows of scales needs K % group_size = 0 and K / group_size = {groups}"
        remedy = "pass the group size that the checkpoint's config states, -1 for one group"
        raise ArgumentError("group_size", group_size, constraint, remedy)
    return size
