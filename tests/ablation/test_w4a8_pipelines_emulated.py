"""The wgmma pipelines of W4A8 (basic, excp, pingpong), run on the CPU from their CUDA text: int32 sums are exact."""

from __future__ import annotations

import importlib
from dataclasses import asdict

import pytest
import torch
from cuda_on_cpu import CpuKernel, cuda_text
from emulated_cases import cases
from terrazzo.ablation.w4a8 import schedules
from terrazzo.ablation.w4a8.baseline import Gemm
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.toolchain import toolchain
from terrazzo.ops.w4a8.format import pack
from test_w4a8_emulated import EXTRA
from test_w4a8_grouped_emulated import weights
from wgmma_on_cpu import SHIMS as WGMMA
from wgmma_on_cpu import STMATRIX, translated

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(bool(toolchain().missing()), reason=f"cannot compile: {toolchain().missing()} missing"),
]
SHIMS = r"""
static void tz_lds64(void *out, const void *p) { memcpy(out, p, 8); }
"""


def request_of(pipeline: str, gemm: Gemm, schedule: schedules.Compared) -> KernelRequest:
    program = importlib.import_module(f"terrazzo.ablation.w4a8.{pipeline}")
    params = tuple((asdict(gemm) | schedule.params()).items())
    return KernelRequest(f"w4a8.{pipeline}", f"{program.__name__}:build", params, "sm_90a", program.PASS_CONFIGS)


def emulate(weight, x, x_scales, pipeline, schedule, partition, folder, *, out_dtype, dequantization):
    """y of one launch on the CPU, in an output that was NaN (int32: garbage)."""
    packed, (m, k) = pack(weight), x.shape
    gemm = Gemm(weight.n, k, weight.group_size, out_dtype, dequantization, out_dtype != "int32")
    request = request_of(pipeline, gemm, schedule)
    source = translated(cuda_text(request), schedule.block_tokens)
    kernel = CpuKernel(
        source.replace("int grid", "int ctas").replace("grid", "ctas"),
        [WGMMA, EXTRA.replace("typedef unsigned char uchar;", ""), SHIMS, STMATRIX, gemm.converter.device_source],
        schedule.threads,
        folder,
    )
    grid, shared = partition
    y = torch.full((m, gemm.n), -77 if gemm.raw else float("nan"), dtype=getattr(torch, out_dtype))
    space, flags = schedule.workspace(grid)
    semaphores = torch.zeros(flags, dtype=torch.int32)
    kernel(
        (grid, 1, 1), X_desc=torch.tensor([x.data_ptr(), m, k]), W=packed.words, S=packed.channel_scales, XS=x_scales,
        RS=x.sum(1, dtype=torch.int32), B=packed.bias, Y=y, SEM=semaphores, sk=shared, m=m, ctas=grid,
        WS=torch.full(space, 0x5A5A5A5A, dtype=torch.int32),
    )  # fmt: skip
    assert not semaphores.any()
    return y


B, E, P = schedules.Basic, schedules.Excp, schedules.PingPong
CASES = {  # pipeline, n, k, group, m, schedule, (grid, shared tiles), output, dequantization; True: always run
    "basic": ("basic", 450, 400, 64, 37, B(256, 2, 1, 3), (3, 4), "int32", "vadd4", False),
    "excp": ("excp", 450, 400, 64, 37, E(128, 2, 2, 3), (3, 2), "int32", "xor", False),
    "pingpong": ("pingpong", 450, 400, 64, 37, P(128, 2, 2, 3), (3, 4), "int32", "xor", True),
    "basic vadd4": ("basic", 192, 400, 64, 37, B(16, 2, 1, 3), (4, 3), "int32", "vadd4", False),
    "basic two sets": ("basic", 200, 272, 32, 20, B(16, 2, 1, 2, operands=2), (3, 0), "float16", "unsigned", False),
    "basic one set": ("basic", 130, 656, 128, 33, B(32, 1, 2, 4), (5, 4), "int32", "xor", False),
    "excp shared": ("excp", 192, 400, 64, 37, E(16, 2, 1, 3), (4, 3), "int32", "xor", False),
    "excp one stage": ("excp", 200, 272, 32, 20, E(16, 1, 2, 2, operands=1), (3, 0), "bfloat16", "unsigned", False),
    "excp three stages": ("excp", 130, 656, 128, 33, E(32, 1, 1, 4, operands=3), (5, 6), "int32", "unsigned", False),
    "pingpong shared": ("pingpong", 192, 400, 64, 37, P(16, 2, 1, 3), (2, 5), "int32", "xor", False),
    "pingpong of three": ("pingpong", 200, 272, 32, 20, P(16, 3, 1, 2), (2, 4), "float16", "unsigned", False),
    "pingpong two blocks": ("pingpong", 130, 656, 128, 33, P(32, 2, 2, 4), (2, 0), "int32", "xor", False),
}


@pytest.mark.parametrize("name", cases(CASES, [name for name, case in CASES.items() if case[-1]]))
def test_pipeline(name, tmp_path):
    pipeline, n, k, group, m, schedule, partition, out_dtype, dequantization, _ = CASES[name]
    (weight,) = weights(1, n, k, group)
    rng = torch.Generator().manual_seed(m)
    x = torch.randint(-128, 128, (m, k), generator=rng, dtype=torch.int8)
    x_scales = torch.rand(m, generator=rng) * 1e-3 + 1e-4
    y = emulate(
        weight, x, x_scales, pipeline, schedule, partition, tmp_path, out_dtype=out_dtype, dequantization=dequantization
    )
    exact = x.double() @ weight.bytes().double().T
    if out_dtype == "int32":
        assert torch.equal(y.double(), exact)
        return
    product = exact * weight.channel_scales.double() * x_scales.double()[:, None]
    bound = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[out_dtype] * (product + weight.bias).abs() * 1.001
    bound += 2.0**-21 * (product.abs() + weight.bias.abs()) + 2.0**-25
    assert bool(((y.double() - product - weight.bias).abs() <= bound).all())
