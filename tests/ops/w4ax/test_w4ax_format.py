"""Canonical and packed W4Ax weights: packing, its inverse, the bytes as the tensor cores see them, files, refusals."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from terrazzo.lowering.errors import ArgumentError, LayoutMismatchError, TargetError
from terrazzo.ops import w4ax
from terrazzo.ops.w4ax import reference
from terrazzo.ops.w4ax.format import UNIT_WORDS, identity


def random_weight(
    n: int, k: int, blocks8: int, seed: int = 0, bias: bool = False, two_level: bool = False
) -> w4ax.QuantizedWeight:
    rng = torch.Generator().manual_seed(seed)
    blocks = -(-k // 128)
    plan = w4ax.plan_blocks(torch.rand(k, generator=rng) + 0.1, floor=blocks8, ceiling=blocks8)
    codes = torch.randint(-8, 8, (n, plan.padded), generator=rng).masked_fill(plan.order() < 0, 0)
    scales, channel = torch.exp(torch.randn(n, blocks, generator=rng) * 0.5 - 4).bfloat16(), None
    if two_level:
        channel = scales[:, 0].float() / 8
        scales = channel[:, None] * torch.randint(1, 17, (n, blocks), generator=rng)
    return w4ax.QuantizedWeight.canonical(
        codes, scales, k=k, blocks8=blocks8, permutation=plan.permutation,
        bias=torch.randn(n, generator=rng) if bias else None, channel_scales=channel,
    )  # fmt: skip


@pytest.mark.parametrize("two_level", [False, True])
@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_90a"])
@pytest.mark.parametrize(("n", "k", "blocks8"), [(64, 256, 1), (200, 640, 0), (130, 333, 3), (65, 512, 4), (7, 100, 0)])
def test_packed_bytes_hold_the_weight(target, n, k, blocks8, two_level):
    weight = random_weight(n, k, blocks8, two_level=two_level)
    packed = weight.pack(target=target)
    assert packed.words.shape == (weight.blocks, -(-n // 64), UNIT_WORDS) and packed.native == (target != "sm_90a")
    back = packed.unpack()
    assert torch.equal(back.codes, weight.codes) and torch.equal(back.scales, weight.scales)
    assert (packed.channel_scales is not None) == back.two_level == two_level
    if two_level:
        assert torch.equal(back.channel_scales, weight.channel_scales) and len(packed.channel_scales) % 64 == 0
    assert torch.equal(reference.operand_packed(packed), weight.values())
    assert torch.equal(packed.dequantize(), weight.dequantize())


def test_int4_blocks_lie_as_native_fragments():
    """A lane's four words are the A registers of one m16n8k64: eight neighbouring channels in each."""
    weight = random_weight(64, 128, 0)
    word = weight.pack(target="sm_80").words[0, 0]
    lane, tile, register = 13, 2, 3  # rows 32 + 13 // 4 + 8, channels 8 * (13 % 4) + 32 ...
    codes = weight.codes[tile * 16 + 3 + 8, 8 + 32 : 16 + 32].int() & 15
    assert int(word[tile * 264 + lane * 4 + register]) & 0xFFFFFFFF == sum(int(c) << 4 * i for i, c in enumerate(codes))


def test_two_level_units_are_those_of_w4a8():
    """Without native s4: but for 8 in each code; LiquidGEMM's bytes are codes times multipliers."""
    from terrazzo.ops import w4a8

    weight = random_weight(128, 256, 1, two_level=True)
    made = w4a8.QuantizedWeight.canonical(
        weight.codes + 8, weight.multipliers().int(), 128 - 8 * weight.multipliers().int(), weight.channel_scales,
        group_size=128,
    )  # fmt: skip
    assert torch.equal(made.bytes(), (weight.codes * weight.multipliers().repeat_interleave(128, 1)).to(torch.int8))
    own, theirs = weight.pack(target="sm_90a").words, w4a8.pack(made).words
    assert torch.equal(own[..., 1024:], theirs[..., 1024:])
    assert torch.equal(own[..., :1024], theirs[..., :1024] ^ torch.tensor(0x88888888 - 2**32, dtype=torch.int32))


def test_two_level_files(tmp_path):
    packed = random_weight(100, 300, 1, two_level=True).pack(target="sm_90a")
    packed.save(tmp_path / "w.safetensors")
    back = w4ax.PackedWeight.load(tmp_path / "w.safetensors")
    assert repr(back) == repr(packed) and torch.equal(back.channel_scales, packed.channel_scales)
    assert packed.layout != identity(False) and back.nbytes == back.words.numel() * 4 + 128 * 4
    w4ax.PackedWeight(**(packed.__dict__ | {"layout": identity(False)})).save(tmp_path / "other.safetensors")
    with pytest.raises(LayoutMismatchError):
        w4ax.PackedWeight.load(tmp_path / "other.safetensors")
    w4ax.PackedWeight(**(packed.__dict__ | {"channel_scales": torch.ones(100)})).save(tmp_path / "size.safetensors")
    with pytest.raises(ArgumentError, match="channel_scales"):
        w4ax.PackedWeight.load(tmp_path / "size.safetensors")


def test_files(tmp_path):
    packed = random_weight(100, 300, 1, bias=True).pack(target="sm_80")
    packed.save(tmp_path / "w.safetensors")
    back = w4ax.PackedWeight.load(tmp_path / "w.safetensors")
    assert repr(back) == repr(packed) and torch.equal(back.words, packed.words)
    assert torch.equal(back.permutation, packed.permutation) and torch.equal(back.bias, packed.bias)
    changed = w4ax.PackedWeight(**(packed.__dict__ | {"layout": identity(False)}))
    changed.save(tmp_path / "other.safetensors")
    with pytest.raises(LayoutMismatchError):
        w4ax.PackedWeight.load(tmp_path / "other.safetensors")
    w4ax.PackedWeight(**(packed.__dict__ | {"n": 400})).save(tmp_path / "size.safetensors")
    with pytest.raises(ArgumentError, match="words"):
        w4ax.PackedWeight.load(tmp_path / "size.safetensors")


GOOD = {"codes": torch.ones(4, 256, dtype=torch.int8), "scales": torch.ones(4, 2)}


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"codes": torch.ones(4, 200, dtype=torch.int8)}, "codes"),
        ({"codes": torch.full((4, 256), 8)}, "codes"),
        ({"codes": torch.ones(4, 256)}, "codes"),
        ({"k": 128}, "k"),
        ({"k": 250}, "codes"),
        ({"blocks8": 3}, "blocks8"),
        ({"scales": torch.ones(4, 1)}, "scales"),
        ({"scales": torch.zeros(4, 2)}, "scales"),
        ({"scales": torch.full((4, 2), 1.001)}, "scales"),
        ({"permutation": torch.zeros(256, dtype=torch.int32)}, "permutation"),
        ({"permutation": torch.arange(255)}, "permutation"),
        ({"bias": torch.ones(5)}, "bias"),
        ({"channel_scales": torch.ones(5)}, "channel_scales"),
        ({"channel_scales": torch.zeros(4)}, "channel_scales"),
        ({"channel_scales": torch.full((4,), 1.001)}, "channel_scales"),
        ({"channel_scales": torch.full((4,), 2.0)}, "scales"),
        ({"channel_scales": torch.full((4,), 0.03125)}, "scales"),
        ({"channel_scales": torch.full((4,), 0.75)}, "scales"),
    ],
)
def test_canonical_refuses(changes, argument):
    with pytest.raises(ArgumentError) as error:
        w4ax.QuantizedWeight.canonical(**(GOOD | changes))
    assert error.value.argument == argument


def test_a_bias_of_another_dtype_is_told_the_dtypes():
    with pytest.raises(ArgumentError, match=r"bias = 'float64 \[4\]': .* of float16 or bfloat16 or float32"):
        w4ax.QuantizedWeight.canonical(**GOOD, bias=torch.ones(4).double())


def test_scales_of_any_stride_are_packed():
    """[64, 1] counts as contiguous with any stride."""
    codes, scales = torch.ones(64, 128, dtype=torch.int8), 2.0 ** -torch.arange(64.0)[None]
    for target in ("sm_80", "sm_90a"):
        weight = w4ax.QuantizedWeight.canonical(codes, scales.T)
        assert torch.equal(weight.pack(target=target).dequantize(), weight.dequantize())


def test_packing_needs_a_target():
    with pytest.raises(TargetError):
        w4ax.QuantizedWeight.canonical(**GOOD).pack(target="sm_75")
    with pytest.raises(ArgumentError):
        w4ax.pack(GOOD["codes"], target="sm_80")


def test_the_weight_of_the_benchmark_is_exact_in_both_forms():
    from terrazzo.autotune import linear_bench

    settings = linear_bench.LinearSettings(record="w4ax")
    weight = linear_bench.random_weight(130, 640, settings, torch.Generator().manual_seed(0))
    checked = w4ax.QuantizedWeight.canonical(
        weight.codes, weight.scales, k=640, blocks8=weight.blocks8, permutation=weight.permutation,
        channel_scales=weight.channel_scales,
    )  # fmt: skip
    block = dataclasses.replace(checked, channel_scales=None).pack(target="sm_90a")
    assert torch.equal(block.dequantize(), weight.dequantize()) and not block.two_level


def test_clipping_is_searched():
    rng = torch.Generator().manual_seed(2)
    weight = torch.randn(50, 300, generator=rng)
    weight[:, 7] *= 6
    plan = w4ax.plan_blocks(torch.ones(300))
    error = lambda w, share=1.0: ((w.dequantize() - weight) ** 2 * share).sum()
    importance = torch.ones(300)
    importance[7] = 1e4
    found = {}
    for scales in ("block", "two_level"):
        make = lambda steps=16, share=None, form=scales: w4ax.quantize_weight(
            weight, plan, clip_steps=steps, importance=share, scales=form
        )
        searched, plain = make(), make(1)
        assert error(searched) < 0.9 * error(plain)
        assert searched.codes.abs().max() == 7 and searched.two_level == (scales == "two_level")
        exact = plain.scales if scales == "block" else plain.channel_scales
        assert torch.equal(exact, exact.bfloat16().float())
        assert error(make(share=importance), importance) < error(searched, importance)
        zero = w4ax.quantize_weight(torch.zeros(3, 128), w4ax.plan_blocks(torch.ones(128)), scales=scales)
        assert (zero.scales == 1).all() and not zero.codes.any()
        found[scales] = error(searched)
    assert found["two_level"] < 1.1 * found["block"]  # rows that have an outlier included


def test_the_two_level_quantizer_is_that_of_numpy():
    rng = np.random.default_rng(3)
    weight = rng.standard_normal((6, 384)).astype(np.float32)
    weight[0, :128] *= 30
    made = w4ax.quantize_weight(torch.from_numpy(weight), w4ax.plan_blocks(torch.ones(384)))
    for row in range(6):
        largest = np.abs(weight[row]).reshape(3, 128).max(axis=1) / np.float32(7)
        channel = float(torch.tensor(largest.max() / 16).bfloat16())
        assert float(made.channel_scales[row]) == channel
        for block in range(3):
            w = weight[row, block * 128 : block * 128 + 128].astype(np.float64)
            first = min(max(int(np.ceil(largest[block] / np.float32(channel))), 1), 16)
            last = int(np.ceil(np.float32(first) * np.float32(0.6)))
            codes = {m: np.clip(np.rint(w / (m * channel)), -7, 7) for m in range(first, last - 1, -1)}
            errors = {m: ((q * m * channel - w) ** 2).sum() for m, q in codes.items()}
            taken = round(float(made.scales[row, block]) / channel)
            assert errors[taken] <= min(errors.values()) * (1 + 1e-5)
            assert np.array_equal(made.codes[row, block * 128 : block * 128 + 128].numpy(), codes[taken])


@pytest.mark.parametrize(
    ("weight", "options", "argument"),
    [
        (torch.ones(4, 299), {}, "plan"),
        (torch.ones(4, 300, dtype=torch.int8), {}, "weight"),
        (torch.full((4, 300), float("inf")), {}, "weight"),
        (torch.ones(4, 300), {"importance": -torch.ones(300)}, "importance"),
        (torch.ones(4, 300), {"clip_steps": 0}, "clip_steps"),
        (torch.ones(4, 300), {"scales": "row"}, "scales"),
    ],
)
def test_the_quantizer_refuses(weight, options, argument):
    with pytest.raises(ArgumentError) as error:
        w4ax.quantize_weight(weight, w4ax.plan_blocks(torch.ones(300)), **options)
    assert error.value.argument == argument
