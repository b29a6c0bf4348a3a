"""Canonical and packed weights: exact round trips at any size, padding, files, and refusals by name."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from terrazzo.lowering.errors import ArgumentError, LayoutMismatchError, TargetError
from terrazzo.ops.w4a16 import PackedWeight, QuantizedWeight, pack

SCALES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def random_weight(
    n, k, group, *, symmetric=False, scale="float16", seed=0, act_order=False, bias=False
) -> QuantizedWeight:
    rng = torch.Generator().manual_seed(seed)
    groups = 1 if group in (-1, k) else -(-k // group)
    return QuantizedWeight.canonical(
        torch.randint(0, 16, (n, k), generator=rng, dtype=torch.uint8),
        (torch.rand(n, groups, generator=rng) + 0.01).to(SCALES[scale]),
        None if symmetric else torch.randint(0, 17, (n, groups), generator=rng, dtype=torch.uint8),
        group_size=group,
        perm=torch.randperm(k, generator=rng) if act_order else None,
        bias=torch.randn(n, generator=rng).half() if bias else None,
    )


def same(a, b) -> bool:
    """Equal in every field, tensors bit for bit."""
    for f in dataclasses.fields(a):
        x, y = getattr(a, f.name), getattr(b, f.name)
        if isinstance(x, torch.Tensor) != isinstance(y, torch.Tensor):
            return False
        if not (x.dtype == y.dtype and torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y):
            return False
    return True


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 200),
    k=st.integers(1, 400),
    group=st.sampled_from((32, 64, 128, -1)),
    symmetric=st.booleans(),
    scale=st.sampled_from(sorted(SCALES)),
    act_order=st.booleans(),
    seed=st.integers(0, 99),
)
def test_unpack_is_the_exact_inverse(n, k, group, symmetric, scale, act_order, seed):
    weight = random_weight(n, k, group, symmetric=symmetric, scale=scale, act_order=act_order, seed=seed)
    packed = pack(weight)
    packed.check_sizes()
    assert same(packed.unpack(), weight)
    assert torch.equal(packed.dequantize("post"), weight.dequantize("post"))


@pytest.mark.parametrize(("n", "k", "group"), [(2880, 2880, 128), (7392, 512, 64), (65, 10944, 32), (101, 7392, -1)])
def test_ragged_shapes_are_padded_with_zeros(n, k, group):
    weight = random_weight(n, k, group)
    packed = pack(weight)
    np_, kp, width = -(-n // 64) * 64, -(-k // 128) * 128, 64 * (2 + 1)
    gp = 1 if weight.group_size >= k else kp // weight.group_size
    assert packed.words.shape == (kp // 64, np_ // 64, 512) and packed.params.shape == (gp, np_ // 64, width)
    assert (np_ % 64, kp % 128, width) == (
        0,
        0,
        192,
    ) and packed.nbytes == packed.words.numel() * 4 + packed.params.numel()
    whole = dataclasses.replace(packed, n=np_, k=kp, group_size=kp if gp == 1 else packed.group_size).unpack()
    assert not whole.codes[n:].any() and not whole.codes[:, k:].any()
    assert not whole.scales[n:].any() and not whole.scales[:, weight.scales.shape[1] :].any()
    assert not whole.zeros[n:].any()
    assert same(packed.unpack(), weight)


def test_the_packed_bytes_are_the_documented_ones():
    """Code (row, k) of a 64 x 64 block, found by the wgmma fragment; params of row r at slot (warp, g, pair)."""
    n, k = 64, 128
    codes = torch.zeros(n, k, dtype=torch.uint8)
    codes[37, 70] = (
        9  # row 37: warp 2, g 5, first half; k 70 = block 1, atom 0, column 6: lane quarter 3, element 0, low k half
    )
    packed = pack(codes, torch.arange(64.0)[:, None].half(), (torch.arange(64) % 16)[:, None], group_size=-1)
    (block,), (word,) = packed.words.sum((1, 2)).nonzero()[0].tolist(), packed.words[1, 0].nonzero()[0].tolist()
    assert block == 1 and word == (2 * 32 + 5 * 4 + 3) * 4 and packed.words[1, 0, word] == 9
    order = [16 * warp + g + 8 * pair for warp in range(4) for g in range(8) for pair in range(2)]
    assert packed.params[0, 0, :128].contiguous().view(torch.float16).tolist() == [float(r) for r in order]
    assert packed.params[0, 0, 128:].tolist() == [r % 16 for r in order]


def test_large_groups_are_expanded_to_128():
    codes, scales = torch.randint(0, 16, (8, 1024)), torch.rand(8, 4).half()
    zeros = torch.randint(0, 16, (8, 4))
    weight = QuantizedWeight.canonical(codes, scales, zeros, group_size=256)
    assert weight.group_size == 128 and weight.scales.shape == (8, 8)
    assert torch.equal(weight.scales[:, ::2], scales) and torch.equal(weight.scales[:, 1::2], scales)
    assert torch.equal(
        weight.dequantize("post"), (codes - zeros.repeat_interleave(256, 1)) * scales.double().repeat_interleave(256, 1)
    )


def test_zero_points_of_8_are_dropped():
    weight = pack(torch.zeros(8, 64, dtype=torch.uint8), torch.ones(8, 2).half(), torch.full((8, 2), 8))
    assert weight.symmetric and weight.params.shape[-1] == 128 and weight.unpack().zeros is None


def test_group_size_is_derived():
    codes = torch.zeros(4, 2880, dtype=torch.uint8)
    for groups, size in ((1, 2880), (23, 128), (45, 64), (90, 32)):
        assert QuantizedWeight.canonical(codes, torch.ones(4, groups).half()).group_size == size


@pytest.mark.parametrize("act_order", [False, True])
def test_files_round_trip(tmp_path, act_order):
    packed = pack(random_weight(70, 300, 64, act_order=act_order, bias=True), target="sm_90a")
    packed.save(tmp_path / "w.safetensors")
    assert [file.name for file in tmp_path.iterdir()] == ["w.safetensors"]
    assert same(PackedWeight.load(tmp_path / "w.safetensors"), packed)
    assert same(packed.to("cpu"), packed) and packed.device.type == "cpu" and packed.shape == (70, 300)


def test_files_of_another_layout_or_kind_are_refused(tmp_path):
    packed, path = pack(random_weight(64, 128, 32)), tmp_path / "w.safetensors"
    dataclasses.replace(packed, layout="other.layout").save(path)
    with pytest.raises(
        LayoutMismatchError,
        match=r"path = 'other.layout': must be packed with layout .*; pack the canonical weight again",
    ):
        PackedWeight.load(path)
    with pytest.raises(LayoutMismatchError, match="^w = "):
        packed.check_layout("other.layout")
    dataclasses.replace(packed, k=300).save(path)
    with pytest.raises(ArgumentError, match="words = .*must be contiguous int32"):
        PackedWeight.load(path)
    save_file({"words": packed.words}, path)
    with pytest.raises(ArgumentError, match="must name version 'terrazzo.w4a16/1'"):
        PackedWeight.load(path)
    path.write_bytes(b"garbage")
    with pytest.raises(ArgumentError, match="must be a readable safetensors file"):
        PackedWeight.load(path)
    with pytest.raises(ArgumentError, match="must be a readable safetensors file"):
        PackedWeight.load(tmp_path / "missing.safetensors")


_CODES, _SCALES, _ZEROS = (
    torch.zeros(8, 256, dtype=torch.uint8),
    torch.ones(8, 2).half(),
    torch.zeros(8, 2, dtype=torch.uint8),
)
BAD = [
    ({"codes": _CODES[0]}, "codes", "N, K"),
    ({"codes": _CODES.half()}, "codes", "must be integers"),
    ({"codes": _CODES[:, :0]}, "codes", "N, K >= 1"),
    ({"codes": _CODES + 16}, "codes", "16: must be in 0..15"),
    ({"codes": _CODES.to(torch.int8) - 8}, "codes", "add 8 to signed codes"),
    ({"scales": None}, "scales", r"shape \[8, groups\]"),
    ({"scales": _SCALES[:4]}, "scales", r"shape \[8, groups\]"),
    ({"scales": _SCALES.double()}, "scales", "float32"),
    ({"scales": _SCALES * float("nan")}, "scales", "row 0, group 0"),
    ({"scales": torch.ones(8, 3).half()}, "scales", "no usual group size gives that many groups"),
    ({"group_size": 64}, "group_size", "ceil"),
    ({"group_size": 0}, "group_size", "ceil"),
    ({"group_size": -1}, "scales", "no usual group size"),
    ({"scales": torch.ones(8, 6).half(), "group_size": 48, "zeros": None}, "group_size", "multiple of 32"),
    ({"scales": torch.ones(8, 16).half(), "group_size": 16, "zeros": None}, "group_size", "groups of 16 .*NVFP4"),
    ({"zeros": _ZEROS[:, :1]}, "zeros", r"integers \[8, 2\]"),
    ({"zeros": _ZEROS.half()}, "zeros", "round float zero points"),
    ({"zeros": _ZEROS + 17}, "zeros", "17: must be in 0..16"),
    ({"zeros": _ZEROS.int() - 1}, "zeros", "add 8 to signed zero points"),
    ({"perm": torch.zeros(256, dtype=torch.int32)}, "perm", "permutation of 0..255"),
    ({"perm": torch.arange(255)}, "perm", "argsort"),
    ({"bias": torch.ones(9)}, "bias", r"float vector \[8\]"),
    ({"bias": torch.ones(8, dtype=torch.int32)}, "bias", "float vector"),
]


@pytest.mark.parametrize(
    ("group", "unit", "k"), [(96, 32, 288), (96, 32, 250), (192, 64, 384), (160, 32, 320), (384, 128, 768)]
)
def test_groups_of_other_sizes_are_cut_into_units(group, unit, k):
    codes, groups = torch.randint(0, 16, (8, k), dtype=torch.uint8), -(-k // group)
    scales, zeros = torch.rand(8, groups).half(), torch.randint(0, 16, (8, groups), dtype=torch.uint8)
    weight = pack(codes, scales, zeros, group_size=group)
    assert weight.group_size == unit
    columns = torch.arange(k) // group
    expected = (codes.float() - zeros[:, columns].float()) * scales[:, columns].float()
    assert torch.equal(weight.dequantize(), expected.half())


def test_a_group_size_that_the_scales_do_not_tell_is_asked_for():
    """Two groups over K = 192 may be 96 + 96 or 128 + 64."""
    codes, scales = torch.zeros(8, 192, dtype=torch.uint8), torch.ones(8, 2).half()
    with pytest.raises(ArgumentError, match="more than one does; pass group_size"):
        pack(codes, scales)
    assert pack(codes, scales, group_size=96).group_size == 32
    assert pack(codes, scales, group_size=128).group_size == 128


@pytest.mark.parametrize(("changes", "argument", "words"), BAD)
def test_bad_input_names_argument_and_remedy(changes, argument, words):
    with pytest.raises(ArgumentError, match=words) as caught:
        pack(**({"codes": _CODES, "scales": _SCALES, "zeros": _ZEROS} | changes))
    assert caught.value.argument == argument


def test_a_quantized_weight_is_packed_alone():
    weight = random_weight(8, 64, 32)
    with pytest.raises(ArgumentError, match="must be left out"):
        pack(weight, weight.scales)
    with pytest.raises(TargetError, match="sm_75"):
        weight.pack(target="sm_75")


def test_importing_needs_neither_torch_nor_tilelang():
    code = "import sys, terrazzo.ops.w4a16 as o, terrazzo.ops.registry as r\n"
    code += "o.PackedWeight, o.from_awq, o.quantize, o.load_layer, r.rows()\n"
    code += "assert 'pack' in dir(o) and not {'torch', 'tilelang', 'tvm', 'safetensors'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
