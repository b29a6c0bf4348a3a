"""Shards of every weight format: the numbers of the whole, cut along N and K; what cannot be cut is refused by name."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
import torch
from terrazzo import nn
from terrazzo.lowering.errors import ArgumentError
from terrazzo.nn import products
from terrazzo.ops import shards, w4a16, w8a8
from terrazzo.ops.grouped import GroupedWeight
from terrazzo.ops.products.table import BY_WORD
from terrazzo.ops.w4a8.w8a8 import torch_op

N, K = 128, 512
MORE = ("w4a16-g32", "w4a16-g64-sym", "w4a8-g32", "w4a8-e4m3-gK")
NO_EXPERTS = ["w4ax", *(form for form in BY_WORD if form.startswith("w8a8"))]
FORMS = [*BY_WORD, "w4a16-gK", "fp8-g128", *(pytest.param(form, marks=pytest.mark.slow) for form in MORE)]


def random(n: int, k: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) / k**0.5


@cache
def packed(form: str, n: int = N, k: int = K, bias: bool = True, seed: int = 0):
    """A weight of random numbers; W4Ax with its channels in their own order, the last quarter INT8."""
    options = {"target": "sm_90a"} if form == "w4ax" else {"clip_steps": 1} if form.startswith("w4a16") else {}
    made = nn.Format.parse(form).quantize(random(n, k, seed), random(1, n, 1)[0].half() if bias else None, **options)
    if form == "w4ax":  # another weight, of the same codes
        made = dataclasses.replace(made.unpack(), permutation=None).pack(target="sm_90a")
    return made


def same(a, b) -> None:
    """Two canonical weights hold the same."""
    for field in dataclasses.fields(a):
        x, y = getattr(a, field.name), getattr(b, field.name)
        equal = torch.equal(x, y) if torch.is_tensor(x) and torch.is_tensor(y) else x is y or x == y
        assert equal, (field.name, x, y)


@pytest.mark.parametrize("form", BY_WORD)
def test_weights_are_shown_by_their_facts_and_not_by_their_numbers(form):
    for weight in (packed(form), packed(form).unpack()):
        assert f"N={N}, K={K}" in repr(weight) and "tensor" not in repr(weight) and len(repr(weight)) < 200


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("world", [2, 4])  # 4: inside of blocks of 64 rows
def test_products_of_shards_along_n_joined_are_the_whole_bit_for_bit(form, world):
    w, x = packed(form), random(3, K, 2).half()
    joined = torch.cat([products.gemm(x, w.shard(rank, world)) for rank in range(world)], dim=-1)
    assert torch.equal(joined, products.gemm(x, w))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("world", [2, 4])
def test_shards_along_k_hold_the_numbers_of_the_whole(form, world):
    w = packed(form)
    made = [w.shard(rank, world, 1) for rank in range(world)]
    assert torch.equal(torch.cat([each.dequantize() for each in made], dim=1), w.dequantize())
    assert made[0].bias is w.bias or torch.equal(made[0].bias, w.bias)
    assert all(each.bias is None for each in made[1:]) and {each.k for each in made} == {K // world}
    for each in made:
        each.check_sizes()


@pytest.mark.parametrize("form", FORMS)
def test_products_of_shards_along_k_add_up_to_the_whole(form):
    """x is integers, 127 at most in each half of a row: int8 activations are exact, and only y is rounded."""
    w, x = packed(form), torch.randint(-8, 9, (5, K), generator=torch.Generator().manual_seed(3)).half()
    x[:, 0] = x[:, K // 2] = 127 if "e4m3" not in form else 8
    parts = [products.gemm(x[:, r * K // 2 : (r + 1) * K // 2], w.shard(r, 2, 1)).double() for r in range(2)]
    y = products.gemm(x, w).double()
    magnitude = x.double().abs() @ w.dequantize().double().abs().T + w.bias.double().abs()
    codes = 2**-4 if form == "w4ax" else 2**-20  # INT4 activations are rounded, by what a rank has of them
    rounding = 2**-11 * (sum(p.abs() for p in parts) + y.abs()) + codes * magnitude
    assert bool(((sum(parts) - y).abs() <= rounding).all())


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("form", FORMS)
def test_packed_tensors_cut_as_they_are_are_those_of_the_packed_shard(form, dim):
    w = packed(form)
    for rank in range(2):
        made, plain = w.shard(rank, 2, dim), w.unpack().shard(rank, 2, dim)
        same(made.unpack(), plain)
        as_it_is = shards.plan(w, dim, shards.checked_spans(w, rank, 2, dim, None), rank)
        assert (as_it_is is None) == (form == "w8a8" and dim == 1)  # which has sums of all codes of a row
        made.check_layout(w.layout)
        made.check_sizes()


@pytest.mark.parametrize("form", FORMS)
def test_shards_inside_of_packed_blocks_are_packed_again(form):
    w, x = packed(form, n=96, k=384), random(3, 384, 2).half()
    joined = torch.cat([products.gemm(x, w.shard(rank, 3)) for rank in range(3)], dim=-1)
    assert torch.equal(joined, products.gemm(x, w))
    if form in ("mxfp4", "w4a16-g32", "w4a8-g32"):  # 96 channels of each rank: 3 groups, no block of 128
        parts = [w.shard(rank, 4, 1).dequantize() for rank in range(4)]
        assert torch.equal(torch.cat(parts, dim=1), w.dequantize())


@pytest.mark.parametrize("form", [form for form in FORMS if form not in NO_EXPERTS])
def test_experts_are_cut_one_by_one(form):
    experts = [packed(form, 128, 256, seed=seed) for seed in range(3)]
    stack = GroupedWeight.stack(experts)
    for dim in (0, 1):
        made = stack.shard(1, 2, dim)
        made.check()
        for e, expert in enumerate(experts):
            same(made[e].unpack(), expert.shard(1, 2, dim).unpack())
    offsets, x = torch.tensor([0, 2, 2, 5], dtype=torch.int32), random(5, 256, 4).half()
    whole = products.grouped_gemm(products.quantize(x, stack), stack, offsets, torch.float16)
    halves = [products.grouped_gemm(products.quantize(x, h), h, offsets, torch.float16)
              for h in (stack.shard(0, 2), stack.shard(1, 2))]  # fmt: skip
    assert torch.equal(torch.cat(halves, dim=-1), whole)


W8A8 = {
    "int8": {}, "int8 asymmetric": {"asymmetric": True}, "e4m3": {"codes": "e4m3"},
    "e4m3 blocks": {"codes": "e4m3", "granularity": "block"}, "int8 smooth": {"smooth": torch.rand(K) + 0.5},
}  # fmt: skip


@pytest.mark.parametrize("kind", W8A8)
def test_w8a8_shards_hold_the_numbers_of_the_whole_and_multiply_alike(kind):
    w = w8a8.quantize(random(N, K), bias=random(1, N, 1)[0].half(), **W8A8[kind])
    x = torch.randint(-8, 9, (5, K), generator=torch.Generator().manual_seed(3)).half()
    product = lambda x, w: torch_op.call(x, w, None, torch.float16, "auto")
    assert torch.equal(torch.cat([product(x, w.shard(r, 2)) for r in range(2)], -1), product(x, w))
    for dim, world in ((0, 2), (0, 4), (1, 2), (1, 4)):
        made = [w.shard(rank, world, dim) for rank in range(world)]
        assert torch.equal(torch.cat([each.dequantize() for each in made], dim=dim), w.dequantize())
        for rank, each in enumerate(made):
            each.check_sizes()
            same(each.unpack(), w.unpack().shard(rank, world, dim))
            assert torch.equal(each.scales, each.unpack().pack().scales)
            assert each.bias is None or rank == 0 or dim == 0


def test_w8a8_blocks_are_cut_between_rows_that_share_a_scale():
    w = w8a8.quantize(random(192, K), codes="e4m3", granularity="block")
    for rank in range(8):  # of 24 rows: only those of rank 5 belong to two blocks inside of 16 rows
        if rank != 5:
            assert torch.equal(w.shard(rank, 8).dequantize(), w.dequantize()[24 * rank : 24 * rank + 24])
    with pytest.raises(ArgumentError, match="scales.*rows 16 i .* cut and join layers of blocks at multiples of 16"):
        w.shard(5, 8)


def rows(canonical, spans) -> torch.Tensor:
    return torch.cat([canonical.codes[low:high] for low, high in spans])


def test_joined_layers_are_cut_by_heads_and_by_halves():
    heads, kv_heads, head_dim = 4, 2, 64
    w = packed("w4a16", (heads + 2 * kv_heads) * head_dim)
    made = w.shard(1, 2, parts=shards.qkv(heads, kv_heads, head_dim))
    assert torch.equal(made.unpack().codes, rows(w.unpack(), [(128, 256), (320, 384), (448, 512)]))
    both = packed("w4a16", 256).shard(0, 2, parts=shards.gate_up(128)).unpack().codes
    assert torch.equal(both, rows(packed("w4a16", 256).unpack(), [(0, 64), (128, 192)]))
    turns = packed("w4a16", 256).shard(1, 2, parts=shards.gate_up(128, interleaved=True)).unpack().codes
    assert torch.equal(turns, rows(packed("w4a16", 256).unpack(), [(128, 256)]))


def test_heads_of_keys_and_values_fewer_than_ranks_are_held_by_several():
    w = packed("w4a16", (4 + 2 * 2) * 64)
    made = [w.shard(rank, 4, parts=shards.qkv(4, 2, 64)).unpack().codes for rank in range(4)]
    codes = w.unpack().codes
    for rank in range(4):
        kv = rank // 2
        wanted = [(rank * 64, rank * 64 + 64), (256 + kv * 64, 320 + kv * 64), (384 + kv * 64, 448 + kv * 64)]
        assert torch.equal(made[rank], rows(w.unpack(), wanted)), rank
    assert codes.shape[0] == 512


def act_order():
    codes, scales = torch.randint(0, 16, (64, 256)), torch.ones(64, 2).half()
    return w4a16.QuantizedWeight.canonical(codes, scales, group_size=128, perm=torch.randperm(256)).pack()


def test_act_order_is_cut_along_n_alone():
    w, x = act_order(), random(2, 256).half()
    y = torch.cat([products.gemm(x, w.shard(rank, 2)) for rank in range(2)], dim=-1)
    assert torch.equal(y, products.gemm(x, w))
    with pytest.raises(ArgumentError, match="perm") as caught:
        w.shard(0, 2, 1)
    assert "dim=0" in caught.value.remedy


@pytest.mark.parametrize(
    ("call", "argument", "said"),
    [
        (lambda w: w.shard(2, 2), "rank", "0..1"),
        (lambda w: w.shard(True, 2), "rank", "0..1"),
        (lambda w: w.shard(0, 0), "world", "from 1 on"),
        (lambda w: w.shard(0, 2, 2), "dim", "0 (output features)"),
        (lambda w: w.shard(0, 3), "world", "divide the 128 features"),
        (lambda w: w.shard(0, 8, 1), "world", "between groups of 128, of which there are 4"),
        (lambda w: w.shard(0, 2, parts=(64, 32)), "parts", "add up to 128"),
        (lambda w: w.shard(0, 2, 1, parts=(256, 256)), "parts", "one part along K"),
        (lambda w: w.shard(0, 2, 1, parts=(shards.Part(512, 64, True),)), "parts", "False along K"),
        (lambda w: w.shard(0, 8, parts=(shards.Part(128, 32),)), "world", "divide the 4 units of 32"),
        (lambda w: w.shard(0, 3, parts=(shards.Part(128, 32, True),)), "world", "multiple of the 4 units"),
        (lambda w: w.shard(0, 2, parts=(shards.Part(128, 96),)), "unit", "divide the 128 features"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(call, argument, said):
    for w in (packed("w4a16"), packed("w4a16").unpack(), GroupedWeight.stack([packed("w4a16")] * 2)):
        with pytest.raises(ArgumentError) as caught:
            call(w)
        assert caught.value.argument == argument and said in caught.value.constraint and caught.value.remedy
