"""Canonical and packed W4A8 weights: exact round trips at any size, the documented bytes, files, refusals by name."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from terrazzo.layouts.units import derive_unit
from terrazzo.lowering.errors import ArgumentError, LayoutError, LayoutMismatchError, TargetError
from terrazzo.ops import w4a8
from terrazzo.ops.w4a8 import PackedWeight, QuantizedWeight, pack, reference
from terrazzo.ops.w4a8.format import unit_layout
from test_w4a16_format import same


def random_weight(n, k, group, *, seed=0, bias=False, smooth=False) -> QuantizedWeight:
    """Every byte that the format allows can occur: offsets reach as far as the largest code leaves room."""
    rng = torch.Generator().manual_seed(seed)
    groups = -(-k // group)
    codes = torch.randint(0, 16, (n, k), generator=rng, dtype=torch.uint8)
    scales = torch.randint(1, 17, (n, groups), generator=rng)
    room = 255 - 15 * scales
    offsets = (torch.rand(n, groups, generator=rng) * (room + 1)).floor().int().minimum(room)
    return QuantizedWeight.canonical(
        codes,
        scales,
        offsets,
        torch.rand(n, generator=rng) * 0.01 + 0.001,
        group_size=group,
        smooth=torch.rand(k, generator=rng) + 0.5 if smooth else None,
        bias=torch.randn(n, generator=rng) if bias else None,
    )


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 200), k=st.integers(1, 400), group=st.sampled_from((32, 64, 128)), seed=st.integers(0, 99))
def test_unpack_is_the_exact_inverse(n, k, group, seed):
    weight = random_weight(n, k, group, seed=seed, bias=seed % 2 == 0, smooth=seed % 3 == 0)
    packed = pack(weight)
    packed.check_sizes()
    assert same(packed.unpack(), weight) and packed.shape == (n, k)
    assert torch.equal(packed.dequantize(), weight.dequantize())


@settings(max_examples=12, deadline=None)
@given(
    n=st.integers(1, 140),
    k=st.integers(1, 300),
    group=st.sampled_from((32, 64, 128)),
    dequantization=st.sampled_from(("xor", "unsigned")),
    seed=st.integers(0, 99),
)
def test_the_emulated_tensor_core_agrees(n, k, group, dequantization, seed):
    """Words, converter, fragment and records together: the int32 sums from the packed bytes alone."""
    weight = random_weight(n, k, group, seed=seed)
    q = torch.randint(-127, 128, (3, k), generator=torch.Generator().manual_seed(seed), dtype=torch.int8)
    assert torch.equal(reference.accumulate_packed(q, pack(weight), dequantization), reference.accumulate(q, weight))


@pytest.mark.parametrize("group", [32, 64, 128])
def test_padding_is_the_weight_zero(group):
    weight = random_weight(70, 200, group)
    packed = pack(weight)
    whole = dataclasses.replace(packed, n=128, k=256).unpack()
    assert not whole.bytes()[70:].any() and not whole.bytes()[:, -(-200 // group) * group :].any()
    assert not whole.codes[:, 200:].any() and not whole.channel_scales[70:].any()
    assert packed.words.shape == (2, 2, 1024 + 32 * (128 // group))
    assert packed.nbytes == packed.words.numel() * 4 + 128 * 4


def test_the_packed_bytes_are_the_documented_ones():
    """Code (row, k) by the wgmma fragment: low nibbles feed the first k32, high ones the second; then (s, a)."""
    n, k, group = 64, 128, 32
    codes = torch.zeros(n, k, dtype=torch.uint8)
    codes[37, 70] = 9  # row 37: warp 2, g 5, first half; k 70 = block 1, k32 0, t 1, byte 2, low k half
    codes[37, 70 + 32] = 5
    scales = (torch.arange(64)[:, None] % 16 + 1).expand(64, 4)
    offsets = torch.arange(64)[:, None] + torch.arange(4)
    weight = QuantizedWeight.canonical(codes, scales, offsets, torch.ones(n), group_size=group)
    (unit,) = pack(weight).words[0]
    (word,) = unit[:1024].nonzero()[0].tolist()
    assert word == 512 + (2 * 32 + 5 * 4 + 1) * 4 and unit[word] == (9 << 4 * 4) | (5 << 4 * 5)
    records = unit[1024:].view(torch.uint8).view(4, 4, 8, 2, 2)  # group, warp, g, row g / g + 8, (s, a)
    for record, warp, g, pair in ((0, 0, 0, 0), (1, 0, 0, 1), (3, 2, 5, 0), (2, 3, 7, 1)):
        row = 16 * warp + g + 8 * pair
        assert records[record, warp, g, pair].tolist() == [row % 16 + 1, row + record]


@pytest.mark.parametrize("smooth", [False, True])
def test_files_round_trip(tmp_path, smooth):
    packed = pack(random_weight(70, 300, 64, bias=True, smooth=smooth), target="sm_90a")
    packed.save(tmp_path / "w.safetensors")
    assert [file.name for file in tmp_path.iterdir()] == ["w.safetensors"]
    assert same(PackedWeight.load(tmp_path / "w.safetensors"), packed) and same(packed.to("cpu"), packed)


def test_files_of_another_layout_or_kind_are_refused(tmp_path):
    from terrazzo.ops import w4a16

    packed, path = pack(random_weight(64, 128, 32)), tmp_path / "w.safetensors"
    dataclasses.replace(packed, layout="other.layout").save(path)
    with pytest.raises(LayoutMismatchError, match="path = 'other.layout': must be packed with layout"):
        PackedWeight.load(path)
    dataclasses.replace(packed, group_size=64, layout=unit_layout(64).identity).save(path)
    with pytest.raises(ArgumentError, match="words = .*must be contiguous int32"):
        PackedWeight.load(path)
    w4a16.quantize(torch.randn(64, 128)).save(path)
    with pytest.raises(ArgumentError, match="must name version 'terrazzo.w4a8/1'"):
        PackedWeight.load(path)


_GOOD = {
    "codes": torch.full((8, 256), 15, dtype=torch.uint8),
    "scales": torch.ones(8, 2, dtype=torch.uint8),
    "offsets": torch.zeros(8, 2, dtype=torch.uint8),
    "channel_scales": torch.ones(8),
    "group_size": 128,
}
BAD = [
    ({"codes": _GOOD["codes"][0]}, "codes", "N, K"),
    ({"codes": _GOOD["codes"].half()}, "codes", "must be integers"),
    ({"codes": _GOOD["codes"] + 1}, "codes", "0..15"),
    ({"codes": torch.zeros(1, 131073, dtype=torch.uint8)}, "codes", "at most 131072"),
    ({"group_size": 16}, "group_size", "32, 64, 128"),
    ({"group_size": 64}, "scales", r"integers \[8, 4\]"),
    ({"scales": None}, "scales", "must be integers"),
    ({"scales": torch.zeros(8, 2, dtype=torch.uint8)}, "scales", "0: must be in 1..16"),
    ({"scales": torch.full((8, 2), 17)}, "scales", "17: must be in 1..16"),
    ({"offsets": torch.full((8, 2), 256)}, "offsets", "0..255"),
    ({"offsets": torch.full((8, 2), 241)}, "offsets", "256: .*must fit a byte"),
    ({"channel_scales": torch.ones(7)}, "channel_scales", r"float vector \[8\]"),
    ({"channel_scales": torch.full((8,), float("nan"))}, "channel_scales", "finite"),
    ({"smooth": torch.ones(255)}, "smooth", r"\[256\]"),
    ({"smooth": torch.zeros(256)}, "smooth", "positive"),
    ({"bias": torch.ones(9)}, "bias", r"float vector \[8\]"),
    ({"bias": torch.ones(8).double()}, "bias", r"vector \[8\] of float16 or bfloat16 or float32"),
]


@pytest.mark.parametrize(("changes", "argument", "words"), BAD)
def test_bad_input_names_argument_and_remedy(changes, argument, words):
    with pytest.raises(ArgumentError, match=words) as caught:
        QuantizedWeight.canonical(**(_GOOD | changes))
    assert caught.value.argument == argument


def test_pack_takes_canonical_weights_and_known_targets():
    with pytest.raises(ArgumentError, match="QuantizedWeight"):
        pack(torch.zeros(8, 64))
    with pytest.raises(TargetError, match="sm_75"):
        random_weight(8, 64, 32).pack(target="sm_75")
    assert "pack" in dir(w4a8) and repr(pack(random_weight(8, 64, 32))) == "PackedWeight(N=8, K=64, group=32)"


def test_units_refuse_what_does_not_fit():
    unit = unit_layout(64)
    codes, plane = torch.zeros(64, 128, dtype=torch.uint8), torch.zeros(64, 2, dtype=torch.uint8)
    for arguments in ((codes[:, :64], plane, plane), (codes, plane), (codes, plane, plane[:, :1])):
        with pytest.raises(LayoutError, match="whole units"):
            unit.pack(*arguments)
    words = unit.pack(codes, plane, plane)
    with pytest.raises(LayoutError, match="units of 1088 words"):
        unit.split(words[..., :-1])
    with pytest.raises(LayoutError, match="must have shape"):
        unit.unpack(words, 65, 128)
    with pytest.raises(LayoutError, match="rk instance"):
        derive_unit("w4a16", 2, 1, 2)
    with pytest.raises(LayoutError, match="32-bit words"):
        derive_unit("w4a8_wgmma", 2, 1, 0)
    assert len({unit_layout(group).identity for group in (32, 64, 128)}) == 3
