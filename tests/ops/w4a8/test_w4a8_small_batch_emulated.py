"""The generated small-batch kernels of W4A8, run on the CPU from their CUDA text: sums exact, the rest one rounding."""

from __future__ import annotations

import pytest
import torch
from cuda_on_cpu import CpuKernel, cuda_text
from emulated_cases import cases
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.toolchain import toolchain
from terrazzo.ops.linear.bytes import small_batch
from terrazzo.ops.linear.bytes.problem import Gemm
from terrazzo.ops.w4a8.format import QuantizedWeight, pack
from terrazzo.schedules.clusters import PAIR
from terrazzo.schedules.small_batch import SmallBatch
from test_w4a8_emulated import EXTRA
from wgmma_on_cpu import SHIMS as WGMMA

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(bool(toolchain().missing()), reason=f"cannot compile: {toolchain().missing()} missing"),
]
SHIMS = r"""
struct float4 { float x, y, z, w; };
struct uint2 { unsigned x, y; };
struct int4 { int x, y, z, w; };
template <class T, bool BF16> static T rescaled(int acc, float s, float x, float b) {
  return {narrow<BF16>(tz_rescale(acc, s, x, b))};
}
"""
CALLS = (
    ("tl::mma_sync<tl::DataType::kInt8, tl::DataType::kInt8, tl::DataType::kInt32, 16, 8, 32, false, true>", "mma_s8"),
    ("tz_cp_async(", "cp_async_or_zero("),
    ("(half_t)tz_rescale(", "rescaled<half_t, false>("),
    ("(bfloat16_t)tz_rescale(", "rescaled<bfloat16_t, true>("),
)


def emulate(weight, x, x_scales, schedule, folder, *, target, out_dtype, dequantization, bias):
    """y of one launch on the CPU, in an output that was NaN (int32: garbage)."""
    packed, (m, k) = pack(weight), x.shape
    facts = dict(n=weight.n, k=k, group=weight.group_size, out_dtype=out_dtype, dequantization=dequantization)
    params = facts | dict(bias=bias is not None) | schedule.params()
    entry = f"{small_batch.__name__}:build"
    request = KernelRequest("w4a8.small_batch", entry, tuple(params.items()), target, small_batch.PASS_CONFIGS)
    source = cuda_text(request)
    for name, here in CALLS if target == "sm_80" else (CALLS[0], *CALLS[2:]):
        source = source.replace(name, here)
    gemm = Gemm(weight.n, k, weight.group_size, out_dtype, dequantization, bias is not None)
    hopper = [WGMMA, EXTRA.replace("typedef unsigned char uchar;", "")]
    base = [EXTRA] if target == "sm_80" else hopper
    kernel = CpuKernel(
        source,
        [*base, SHIMS, gemm.converter.device_source],
        schedule.warps * 32,
        folder,
        PAIR if schedule.joined else 1,
    )
    kernel.give(request)
    y = torch.full((m, weight.n), -77 if gemm.raw else float("nan"), dtype=getattr(torch, out_dtype))
    workspace, counters = schedule.workspace(-(-weight.n // 64) * 64)
    semaphores = torch.zeros(counters, dtype=torch.int32)
    kernel(
        (schedule.kc, schedule.nc, 1), X=x, W=packed.words, S=packed.channel_scales, XS=x_scales,
        RS=x.sum(1, dtype=torch.int32), B=bias, WS=torch.full(workspace, 0x5A5A5A5A, dtype=torch.int32),
        SEM=semaphores, Y=y, m=m,
    )  # fmt: skip
    assert not semaphores.any()
    return y


CASES = {  # n, k, group, m, schedule, target, output, dequantization, bias; the first two always
    "four tiles, split k": (130, 656, 64, 29, SmallBatch(4, 2, 3, 2, 2, 3), "sm_90a", "int32", "xor", False),
    "three tiles": (67, 528, 32, 24, SmallBatch(3, 1, 2, 3, 2, 2), "sm_80", "float16", "unsigned", True),
    "four tiles, one chunk": (96, 640, 128, 32, SmallBatch(4, 1, 2, 5, 4, 2), "sm_90a", "bfloat16", "unsigned", True),
    "three tiles, split k": (70, 912, 64, 17, SmallBatch(3, 3, 2, 2, 1, 2), "sm_90a", "float16", "xor", True),
    "joined": (130, 656, 64, 11, SmallBatch(2, 2, 3, 2, 2, 2, joined=True), "sm_90a", "float16", "xor", True),
    "joined, four along k": (
        67,
        1040,
        32,
        5,
        SmallBatch(1, 4, 2, 2, 1, 2, joined=True),
        "sm_90a",
        "int32",
        "xor",
        False,
    ),
    "four tiles on sm_80": (130, 400, 32, 30, SmallBatch(4, 2, 4, 1, 3, 2), "sm_80", "int32", "unsigned", False),
    "two tiles": (130, 656, 64, 11, SmallBatch(2, 2, 3, 2, 2, 2), "sm_90a", "float16", "xor", True),
    "one row of x": (130, 1040, 64, 1, SmallBatch(1, 2, 3, 3, 2, 2, tokens=1), "sm_90a", "float16", "unsigned", True),
    "three of four rows": (67, 800, 32, 3, SmallBatch(1, 1, 2, 2, 1, 3, tokens=4), "sm_80", "bfloat16", "xor", True),
    "17 of 20 rows": (67, 656, 64, 17, SmallBatch(3, 2, 2, 2, 2, 2, tokens=20), "sm_90a", "float16", "xor", True),
}


@pytest.mark.parametrize("name", cases(CASES, list(CASES)[:1]))
def test_small_batch(name, tmp_path):
    n, k, group, m, schedule, target, out_dtype, dequantization, with_bias = CASES[name]
    rng = torch.Generator().manual_seed(n + k)
    groups = -(-k // group)
    factors = torch.randint(1, 17, (n, groups), generator=rng)
    weight = QuantizedWeight.canonical(
        torch.randint(0, 16, (n, k), generator=rng),
        factors,
        (torch.rand(n, groups, generator=rng) * (256 - 15 * factors)).long(),
        torch.rand(n, generator=rng) * 1e-2 + 1e-3,
        group_size=group,
    )
    x = torch.randint(-128, 128, (m, k), generator=rng, dtype=torch.int8)
    x_scales = torch.rand(m, generator=rng) * 1e-3 + 1e-4
    bias = torch.randn(n, generator=rng) if with_bias else None
    facts = dict(target=target, out_dtype=out_dtype, dequantization=dequantization, bias=bias)
    y = emulate(weight, x, x_scales, schedule, tmp_path, **facts)
    exact = x.double() @ weight.bytes().double().T
    if out_dtype == "int32":
        assert torch.equal(y.double(), exact)
        return
    product = exact * weight.channel_scales.double() * x_scales.double()[:, None]
    bound = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[out_dtype] * (product + bias).abs() * 1.001
    bound += 2.0**-21 * (product.abs() + bias.abs()) + 2.0**-25
    assert bool(((y.double() - product - bias).abs() <= bound).all())
