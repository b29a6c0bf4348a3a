"""`torch.ops.terrazzo.<operator>_gemm` of each format: what torch.compile, torch.export and fake tensors see."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from terrazzo.ops import launching
from terrazzo.ops.call.linear import calls_of
from terrazzo.ops.grouped import GroupedWeight, check_dtype
from terrazzo.ops.products.codes import WIDE
from terrazzo.ops.products.table import of_codes
from terrazzo.ops.weight_only.packed import WeightOnly, kind_of


def call(x: torch.Tensor, w: WeightOnly, bias: torch.Tensor | None, numerics: str) -> torch.Tensor:
    """`gemm` as one opaque node of a graph; see `terrazzo.ops.weight_only.entry.gemm`."""
    if bias is None and w.bias is not None:
        bias = w.bias.to(x.dtype)
    return getattr(torch.ops.terrazzo, f"{of_codes(w.format).record}_gemm")(
        x, w.words, w.params, w.perm, bias, w.n, w.k, w.group_size, w.scale_dtype, w.symmetric, w.layout,
        w.target or "", numerics,
    )  # fmt: skip


def call_grouped(
    x: torch.Tensor, w: GroupedWeight, expert_offsets: torch.Tensor, bias: torch.Tensor | None, numerics: str
) -> torch.Tensor:
    """`grouped_gemm` as one opaque node of a graph; see `terrazzo.ops.weight_only.entry.grouped_gemm`."""
    s = w.stacked
    if bias is None and s.bias is not None:
        bias = s.bias.to(x.dtype)
    return getattr(torch.ops.terrazzo, f"{of_codes(s.format).record}_grouped_gemm")(
        x, s.words, s.params, expert_offsets, bias, s.n, s.k, s.group_size, s.scale_dtype, s.symmetric, s.layout,
        s.target or "", numerics,
    )  # fmt: skip


def _made(weight: str, **facts: Any) -> WeightOnly:
    """The packed weight of these fields; of those that its class has."""
    kind = kind_of(weight)
    facts |= {"weight": weight, "target": facts["target"] or None}
    return kind(**{field.name: facts[field.name] for field in fields(kind) if field.name in facts})


def _register(weight: str, operator: str) -> None:
    """The two operators of a format."""

    def gemm(
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
        from terrazzo.ops.weight_only import reference

        w = _made(
            weight, words=words, params=params, perm=perm, n=n, k=k, group_size=group_size, scale_dtype=scale_dtype,
            symmetric=symmetric, layout=layout, target=target,
        )  # fmt: skip
        if not x.is_cuda:
            return reference.forward(x, w, bias, numerics)
        return calls_of("weight_only").run(x, x, w, bias, None, None, numerics)

    def grouped_gemm(
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
        from terrazzo.ops.weight_only import reference

        stacked = _made(
            weight, words=words, params=params, n=n, k=k, group_size=group_size, scale_dtype=scale_dtype,
            symmetric=symmetric, layout=layout, target=target,
        )  # fmt: skip
        w = GroupedWeight(stacked)
        if not x.is_cuda:
            check_dtype(x)
            calls_of("weight_only").check_call(x.shape, x.device, w, expert_offsets, bias, None, x.dtype, numerics)
            return w.reference(lambda rows, one, b: reference.forward(rows, one, b, numerics), x, expert_offsets, bias)
        return calls_of("weight_only").run_experts(x, x, w, expert_offsets, bias, None, x.dtype, numerics)

    made = torch.library.custom_op(f"terrazzo::{operator}_gemm", gemm, mutates_args=())
    made.register_fake(_fake)
    made = torch.library.custom_op(f"terrazzo::{operator}_grouped_gemm", grouped_gemm, mutates_args=())
    made.register_fake(_fake_grouped)


def _fake(x, words, params, perm, bias, n, k, *_):
    launching.check_last(x, k)
    return x.new_empty((*x.shape[:-1], n))


def _fake_grouped(x, words, params, expert_offsets, bias, n, *_):
    return x.new_empty((x.shape[0], n))


for _form in WIDE.values():
    _register(_form.name, of_codes(_form).record)
