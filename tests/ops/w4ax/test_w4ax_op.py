"""The W4Ax operator without a GPU: which kernels serve which M, schedules, and how bad calls are refused."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
import torch
from terrazzo.lowering.errors import ArgumentError, TargetError
from terrazzo.lowering.targets import Target
from terrazzo.ops import launching, w4ax
from terrazzo.ops.call import plans
from terrazzo.ops.w4ax import activations, op
from terrazzo.schedules import linear_spaces, stream_k, work_items
from terrazzo.schedules import w4ax as schedules
from terrazzo.schedules.forms import stashes
from terrazzo.schedules.problem import Gemm
from test_w4ax_format import random_weight
from w4ax_tiles import integer_tile

SHAPES = ((13824, 5120), (5120, 13824), (6144, 4096), (57344, 8192), (8192, 29568), (257, 203), (1, 1))
TOKENS = (1, 2, 8, 15, 16, 17, 33, 64, 65, 128, 129, 300, 4096)


@pytest.mark.parametrize("granularity", ["block", "two_level"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90a"])
def test_no_m_needs_a_kernel_outside_the_listed_ones(arch, granularity, without_records):
    target, two_level = Target.parse(arch), granularity == "two_level"
    for n, k in SHAPES:
        blocks8 = -(-k // 128) // 4
        listed = set(w4ax.kernel_requests(n, k, blocks8=blocks8, granularity=granularity, target=target))
        wgmma = arch == "sm_90a"  # tiles in steps of 16 tokens; of two-level scales also of two or three warpgroups
        assert len(listed) <= 7 + 4 * wgmma + 5 * (two_level and wgmma)
        for m in TOKENS:
            plan = plans.plan(m, op.Facts(n, k, blocks8=blocks8, out_dtype="float16", two_level=two_level), target)
            assert plan.request in listed, (n, k, m)
            assert all(extent > 0 for extent in (*plan.workspace, *plan.semaphores))
            assert prod(plan.semaphores) <= launching.SEMAPHORES
            assert (plan.listed is None) == (arch == "sm_90a")
            facts = dict(dtype="float16", permuted=True, norm=False, granularity=granularity, wide=arch == "sm_90a")
            assert activations.plan(m, k, blocks8, **facts, target=target) in listed


def test_schedules_fit_their_targets():
    for n, k in SHAPES:
        gemm = Gemm.of_blocks(n, k, 0)
        for m in TOKENS:
            hopper = stream_k.choose(gemm, Target.parse("sm_90a"), m)
            integer = stream_k.choose(replace(gemm, scales="integer"), Target.parse("sm_90a"), m)
            assert hopper.legal() and hopper.stages >= 2 and integer.legal() and integer.stages >= 3
            found = linear_spaces.of(gemm).candidates(Target.parse("sm_90a"), m)
            for each in (hopper, integer, *(it.schedule for it in found if it.program == "stream_k")):
                assert each.smem_bytes(gemm) <= Target.parse("sm_90a").smem_per_block
            for arch in ("sm_80", "sm_86"):
                target = Target.parse(arch)
                s = schedules.choose_persistent(gemm, target, m)
                assert s.smem_bytes(gemm) <= target.smem_per_block
                assert s.ctas * (s.smem_bytes(gemm) + 1024) <= target.smem_per_sm


def test_each_form_of_scales_has_its_tile_program():
    hopper, old = Target.parse("sm_90a"), Target.parse("sm_80")
    for two_level, program, other in ((False, "stream_k", "integer"), (True, "integer", "stream_k")):
        space = linear_spaces.of(Gemm.of_blocks(6144, 4096, 8, two_level=two_level))
        for m, first in ((8, "small_batch"), (64, program), (256, program)):
            assert space.heuristic(hopper, m)[0] == first
            found = {c.program for c in space.candidates(hopper, m)}
            assert found == ({"small_batch", program} if m <= 16 else {program})
        tile = dict(block_tokens=64, warpgroups=2, stages=4, raster=8)
        assert not space.revive(program, tile, hopper, 64)[1]
        assert "no program" in space.revive(other, tile, hopper, 64)[1]
        assert space.heuristic(old, 64)[0] == "persistent"


def test_tiles_of_integer_sums():
    """Both kinds of sums in registers as far as these go; at 128 tokens three warpgroups keep some in shared memory."""
    every = [integer_tile(t, w, 2) for t in (16, 32, 64, 128, 256) for w in (1, 2, 3, 4)]
    assert [(s.block_tokens, s.warpgroups) for s in every if s.legal() and stashes(s)] == [(128, 3)]
    refused = [(s.block_tokens, s.warpgroups) for s in every if not s.legal()]
    assert refused == [(128, 4), *((256, warpgroups) for warpgroups in (1, 2, 3, 4))]
    mixed, alone = (Gemm.of_blocks(4096, 4096, blocks8, two_level=True) for blocks8 in (8, 0))
    wide = integer_tile(128, 3, 2)
    assert wide.smem_bytes(mixed) - wide.smem_bytes(alone) == 3 * 128 * 64 * 4


def test_the_work_list_covers_every_block_once():
    target, gemm = Target.parse("sm_80"), Gemm.of_blocks(1000, 1280, 3)
    schedule = schedules.choose_persistent(gemm, target, 100)
    plan = schedules.work_plan(schedule, gemm, target, 100, 216)
    plan.check(work_items.items_of(8, (4,) * 7 + (8,) * 3))
    items, first, slots = schedules.work_list(plan, 1)
    assert first[0] == 0 and first[-1] == len(items) and slots < plan.sms == 80  # no more CTAs than blocks
    assert sorted(k for item in items for k in range(item[2], item[3])) == sorted([*range(10)] * 8)
    costs = work_items.block_costs(target, rows=128, tokens=128, unit_k=128, unit_bytes=8448)
    assert costs[8] > 1.3 * costs[4]  # so that INT8 blocks come in smaller ranges


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"out_dtype": "int32"}, "out_dtype"),
        ({"dtype": "float32"}, "dtype"),
        ({"blocks8": 3}, "blocks8"),
        ({"blocks8": 1.0}, "blocks8 = 1.0"),
        ({"permuted": 1}, "permuted"),
        ({"granularity": "row"}, "granularity"),
        ({"group_size": 64}, "group_size"),
        ({"scales": "row"}, "scales"),
        ({"scales": "two_level", "granularity": "block"}, "granularity"),
        ({"scales": "two_level", "granularity": "static"}, "granularity"),
    ],
)
def test_requests_that_no_kernel_serves(changes, words):
    with pytest.raises(ArgumentError, match=words):
        w4ax.kernel_requests(**({"n": 64, "k": 256, "m": 4, "target": "sm_90a"} | changes))


def test_unknown_targets_and_rows_that_do_not_fit():
    with pytest.raises(TargetError):
        w4ax.kernel_requests(64, 256, target="sm_75")
    with pytest.raises(ArgumentError, match="shared memory"):
        schedules.quantizer_warps(65536, Target.parse("sm_86"), 4)


def quantized(weight, target: str, m: int = 5):
    packed = weight.pack(target=target)
    q = torch.zeros(m, packed.blocks * 128, dtype=torch.int8)
    return packed, activations.from_codes(q, torch.ones(m, packed.blocks), packed)


def test_activations_must_be_made_for_the_weight():
    weight = random_weight(70, 300, 1)
    packed, x = quantized(weight, "sm_90a")
    elsewhere = quantized(weight, "sm_80")[1]
    assert x.wide and not elsewhere.wide and x.order == packed.order != ""
    with pytest.raises(ArgumentError, match="CUDA device"):  # all but the device fits
        w4ax.gemm(x, packed)
    mixed = random_weight(70, 300, 2)
    for bad in (quantized(random_weight(70, 300, 1, seed=9), "sm_90a")[1], quantized(mixed, "sm_90a")[1], elsewhere):
        with pytest.raises(ArgumentError, match="quantized for") as error:
            w4ax.gemm(bad, packed)
        assert error.value.argument == "x"
    with pytest.raises(ArgumentError, match="last dimension"):
        w4ax.gemm(quantized(random_weight(70, 200, 1), "sm_90a")[1], packed)
    with pytest.raises(ArgumentError, match="w = "):
        w4ax.gemm(x, torch.ones(3))
    with pytest.raises(ArgumentError, match="bias"):
        w4ax.gemm(x, packed, bias=torch.ones(71))
    with pytest.raises(ArgumentError, match="last dimension"):
        w4ax.quantize_activations(torch.ones(3, 299), packed)
    with pytest.raises(ArgumentError, match="static_scales"):
        activations._static(None, "static", 3, torch.device("cpu"))


def test_two_level_weights_take_uniform_scales():
    weight = random_weight(70, 300, 1, two_level=True)
    for target, refused in (("sm_90a", True), ("sm_80", False)):
        packed = weight.pack(target=target)
        q, scales = torch.zeros(5, 384, dtype=torch.int8), torch.ones(5, 3)
        assert activations.default_granularity(packed) == "two_level"
        for granularity in ("two_level", "token", "block", "static"):
            x = activations.from_codes(q, scales, packed, granularity)
            bad = refused and granularity in ("block", "static")
            with pytest.raises(ArgumentError, match="two-level scales" if bad else "CUDA device"):
                w4ax.gemm(x, packed)
    block = random_weight(70, 300, 1).pack(target="sm_90a")
    assert activations.default_granularity(block) == "block"
    with pytest.raises(ArgumentError, match="CUDA device"):  # all but the device fits
        w4ax.gemm(activations.from_codes(q, scales, block, "two_level"), block)


def test_torch_sees_the_operator():
    from torch._subclasses.fake_tensor import FakeTensorMode

    for target, low, high, two_level in (
        ("sm_90a", 0, 384, False),
        ("sm_80", 128, 128, False),
        ("sm_90a", 0, 384, True),
    ):
        weight = random_weight(70, 300, 1, bias=True, two_level=two_level)
        mode, packed = FakeTensorMode(), weight.pack(target=target)
        fake = packed.__class__(
            **{k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in packed.__dict__.items()}
        )
        with mode:
            x = torch.empty(2, 3, 300, dtype=torch.bfloat16)
            made = w4ax.quantize_activations(x, fake)
            assert made.granularity == ("two_level" if two_level else "block")
            assert made.q4.shape == (6, low) and made.q8.shape == (6, high) and made.scales.shape == (3, 8)
            y = w4ax.gemm(x, fake)
            assert y.shape == (2, 3, 70) and y.dtype == torch.bfloat16
            assert w4ax.gemm(made, fake, out_dtype=torch.float32).dtype == torch.float32
