"""Experts of every operator: calls that no kernel can take, and offsets of any kind, on the CPU as on a GPU."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from terrazzo.lowering.errors import ArgumentError
from terrazzo.nn import products
from terrazzo.ops import fp8, mxfp4, mxfp4_fp8, mxfp4_mxfp8, nf4, nvfp4, registry, w4a8, w4a16, w4ax, w8a8, w8a16

N, K, E, M = 64, 128, 3, 6
FAMILIES = {
    "w4a16": w4a16, "w8a16": w8a16, "mxfp4": mxfp4, "nvfp4": nvfp4, "nf4": nf4, "fp8": fp8, "w4a8": w4a8,
    "w4a8_fp8": w4a8.fp8, "mxfp4_fp8": mxfp4_fp8, "mxfp4_mxfp8": mxfp4_mxfp8, "w8a8": w8a8, "w8a8_fp8": w8a8,
    "w4ax": w4ax,
}  # fmt: skip
every = pytest.mark.parametrize("name", FAMILIES)


def test_every_operator_with_weights_is_here():
    others = {"attention", "norm", "activation", "rope"}
    assert {family.__name__.split(".")[2] for family in FAMILIES.values()} == {
        entry.operator for entry in registry.REGISTRY
    } - others


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@cache
def stacked(name: str):
    w = torch.randn(N, K, generator=torch.Generator().manual_seed(0))
    if name == "w4ax":
        one = w4ax.quantize(w, w4ax.plan_blocks(w.abs().amax(0)), target="sm_90a")
    else:
        one = FAMILIES[name].quantize(w, **({"codes": "e4m3"} if name == "w8a8_fp8" else {}))
    return FAMILIES[name].GroupedWeight.stack([one] * E)


@cache
def tokens(name: str) -> torch.Tensor:
    x = torch.randn(M, K, generator=torch.Generator().manual_seed(1))
    return x.to(torch.bfloat16 if name in ("mxfp4", "nvfp4") else torch.float16)


GOOD = ints(0, 2, 4, 6)
BAD_OFFSETS = {
    "int64": GOOD.long(), "one less": GOOD[:-1], "one more": ints(0, 1, 2, 4, 6), "a row": GOOD[None],
    "strided": torch.zeros(8, dtype=torch.int32)[::2], "elsewhere": GOOD.to("meta"), "a list": [0, 2, 4, 6],
    "none": None, "floats": GOOD.float(),
}  # fmt: skip


@every
def test_what_is_no_operand_is_refused_by_name(name):
    w, x, family = stacked(name), tokens(name), FAMILIES[name]
    memory = torch.zeros(M * N, dtype=x.dtype)
    cases = [("expert_offsets", dict(expert_offsets=bad)) for bad in BAD_OFFSETS.values()]
    cases += [("x", dict(x=bad)) for bad in (x.float(), x[None], x[0], x[:, 1:], x.int(), None)]
    outs = (torch.zeros(M, N), memory[:-N].view(M - 1, N), torch.zeros(M, 2 * N, dtype=x.dtype)[:, ::2])
    cases += [("out", dict(out=bad)) for bad in (*outs, memory.to("meta").view(M, N))]
    over = [dict(expert_offsets=memory.view(torch.int32)[: E + 1]), dict(bias=memory[: E * N].view(E, N))]
    cases += [("out", dict(out=memory.view(M, N)) | it) for it in over]
    cases += [("bias", dict(bias=bad)) for bad in (memory[:N], memory[: E * N].view(N, E).T, [0.0] * N)]
    for argument, changes in cases:
        with pytest.raises(ArgumentError) as refused:
            family.grouped_gemm(**({"x": x, "w": w, "expert_offsets": GOOD} | changes))
        assert refused.value.argument == argument, changes
    for fine in ({}, dict(x=torch.zeros(M, 2 * K, dtype=x.dtype)[:, ::2]), dict(x=x[:0])):  # up to the device
        with pytest.raises(ArgumentError, match="must be on a CUDA device"):
            family.grouped_gemm(**({"x": x, "w": w, "expert_offsets": GOOD} | fine))


@every
def test_an_output_inside_of_what_the_kernel_reads_is_refused(name):
    """Of quantized activations their codes and scales; x in 16 bits is read by the quantizer alone."""
    w, x, family = stacked(name), tokens(name), FAMILIES[name]
    if not hasattr(family, "quantize_activations"):
        memory = torch.zeros(2 * M, K, dtype=x.dtype)
        for start in (0, K, M * K - 8):
            with pytest.raises(ArgumentError, match="out = .*shares memory with x"):
                out = memory.view(-1)[start : start + M * N].view(M, N)
                family.grouped_gemm(memory[:M], w, GOOD, out=out)
        return
    made = products.quantize(x, w)
    held = next(getattr(made, part) for part in ("q8", "q") if hasattr(made, part))
    bytes_ = held.view(torch.uint8).flatten()
    if len(bytes_) >= 2 * M * N:
        with pytest.raises(ArgumentError, match="out = .*shares memory with x"):
            family.grouped_gemm(made, w, GOOD, out=bytes_[: 2 * M * N].view(torch.float16).view(M, N))


@every
def test_offsets_that_make_no_sense_are_refused_where_they_can_be_read(name):
    """On the CPU. Rows of no expert are zero; experts without rows, and no rows at all, are fine."""
    w, x = stacked(name), tokens(name)
    given = products.quantize(x, w)
    call = lambda *offsets: products.grouped_gemm(given, w, ints(*offsets), x.dtype)
    right = call(0, 2, 4, 6)
    assert right.shape == (M, N) and bool(right.any(1).all())
    assert torch.equal(call(0, 6, 6, 6), right) and torch.equal(call(0, 0, 0, 6), right)
    part = call(1, 2, 4, 5)
    assert torch.equal(part[1:5], right[1:5]) and not bool(part[0].any() or part[5].any())
    assert not bool(call(3, 3, 3, 3).any())
    none = products.grouped_gemm(products.quantize(x[:0], w), w, ints(0, 0, 0, 0), x.dtype)
    assert none.shape == (0, N)
    for bad in ((0, 5, 3, 6), (-2, 2, 4, 6), (0, 2, 4, 9), (9, 9, 9, 9), (0, 7, 7, 6), (6, 4, 2, 0)):
        with pytest.raises(ArgumentError, match="expert_offsets = .*must ascend"):
            call(*bad)
