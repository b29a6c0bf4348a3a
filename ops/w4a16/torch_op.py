"""`torch.ops.terrazzo.w4a16_gemm`: the operator as torch.compile, torch.export and fake tensors see it."""

from __future__ import annotations

import torch
from terrazzo.ops import launching
from terrazzo.ops.grouped import GroupedWeight
from terrazzo.ops.w4a16.format import PackedWeight


def call(x: torch.Tensor, w: PackedWeight, bias: torch.Tensor | None, numerics: str) -> torch.Tensor:
    """`gemm` as one opaque node of a graph; see `terrazzo.ops.w4a16.gemm`."""
    if bias is None and w.bias is not None:
        bias = w.bias.to(x.dtype)
    return torch.ops.terrazzo.w4a16_gemm(
        x, w.words, w.params, w.perm, bias, w.n, w.k, w.group_size, w.scale_dtype, w.symmetric, w.layout,
        w.target or "", numerics,
    )  # fmt: skip


@torch.library.custom_op("terrazzo::w4a16_gemm", mutates_args=())
def w4a16_gemm(
    x: torch.Tensor,
    words: torch.Tensor,
    params: torch.Tensor,
    perm: torch.Tensor | None,
    bias: torch.Tensor | None,
    n: int,
    k: int,
    group_size: int,
    scale_dtype: str,
    symmetric: bool,
    layout: str,
    target: str,
    numerics: str,
) -> torch.Tensor:
    """y [..., n] from x [..., k] and the fields of a PackedWeight."""
    from terrazzo.ops.w4a16 import op, reference

    w = PackedWeight(words, params, n, k, group_size, scale_dtype, symmetric, layout, perm, None, target or None)
    if not x.is_cuda:
        return reference.forward(x, w, bias, numerics)
    return op.run(x, w, bias, None, numerics)


@w4a16_gemm.register_fake
def _(x, words, params, perm, bias, n, k, group_size, scale_dtype, symmetric, layout, target, numerics):
    launching.check_last(x, k)
    return x.new_empty((*x.shape[:-1], n))


def call_grouped(
    x: torch.Tensor, w: GroupedWeight, expert_offsets: torch.Tensor, bias: torch.Tensor | None, numerics: str
) -> torch.Tensor:
    """`grouped_gemm` as one opaque node of a graph; see `terrazzo.ops.w4a16.grouped_gemm`."""
    s = w.stacked
    if bias is None and s.bias is not None:
        bias = s.bias.to(x.dtype)
    return torch.ops.terrazzo.w4a16_grouped_gemm(
        x, s.words, s.params, expert_offsets, bias, s.n, s.k, s.group_size, s.scale_dtype, s.symmetric, s.layout,
        s.target or "", numerics,
    )  # fmt: skip


@torch.library.custom_op("terrazzo::w4a16_grouped_gemm", mutates_args=())
def w4a16_grouped_gemm(
    x: torch.Tensor,
    words: torch.Tensor,
    params: torch.Tensor,
    expert_offsets: torch.Tensor,
    bias: torch.Tensor | None,
    n: int,
    k: int,
    group_size: int,
    scale_dtype: str,
    symmetric: bool,
    layout: str,
    target: str,
    numerics: str,
) -> torch.Tensor:
    """y [M, n] from x [M, k] sorted by expert and the fields of a GroupedWeight."""
    from terrazzo.ops.w4a16 import grouped, reference

    stacked = PackedWeight(words, params, n, k, group_size, scale_dtype, symmetric, layout, None, None, target or None)
    w = GroupedWeight(stacked)
    if not x.is_cuda:
        return w.reference(lambda rows, one, b: reference.forward(rows, one, b, numerics), x, expert_offsets, bias)
    return grouped.run(x, w, expert_offsets, bias, None, numerics)


@w4a16_grouped_gemm.register_fake
def _(x, words, params, expert_offsets, bias, n, k, group_size, scale_dtype, symmetric, layout, target, numerics):
    return x.new_empty((x.shape[0], n))
