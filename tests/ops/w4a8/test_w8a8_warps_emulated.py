"""W8A8 on mma.sync, run on the CPU from its CUDA text: int32 sums exact, floats inside their bound."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from cuda_on_cpu import VOTES, CpuKernel, cuda_text
from emulated_cases import cases
from terrazzo.layouts.instances import get_instance
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.toolchain import toolchain
from terrazzo.ops.linear.bytes import multistage
from terrazzo.ops.tiles.cuda.experts import EXPERT_SEARCH
from terrazzo.ops.w4a8.w8a8 import op
from terrazzo.schedules.multistage import Multistage, launch_sizes
from test_w4a8_emulated import EXTRA, on_cpu
from test_w4a8_fp8_emulated import ADA, FLOATS
from test_w8a8_emulated import Operands, check

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(bool(toolchain().missing()), reason=f"cannot compile: {toolchain().missing()} missing"),
]
PRODUCTS = r"""
static void tz_mma_e4m3_tokens(void *c_, const void *a, const void *b, float f0, float f1) {
  float d[4] = {}, *c = (float *)c_;
  tz_mma_e4m3(d, a, b, 1, 1);
  for (int i = 0; i < 4; ++i) c[i] = fmaf(d[i], i % 2 ? f1 : f0, c[i]);
}
static void tz_mma_e4m3_sums(void *c, const void *a, const void *b) { tz_mma_e4m3(c, a, b, 1, 1); }
"""


def launch(made, n, schedule, folder, out_dtype, bias, offsets=None):
    """y of one launch on the CPU, in an output that was NaN (int32: garbage), whose workspace was garbage."""
    floats, experts = not made.numerics.startswith("s8"), 0 if offsets is None else len(offsets) - 1
    (m, k), layout = made.q.shape, get_instance("w8a8")
    words = torch.cat([layout.pack(w.view(torch.int8)) for w in made.w])
    params = dict(n=n, k=k, group=128, out_dtype=out_dtype, dequantization=made.numerics, bias=bias is not None)
    params |= schedule.params() | ({"experts": experts} if experts else {})
    request = KernelRequest(
        "w8a8.multistage", f"{multistage.__name__}:build", tuple(params.items()), "sm_89" if floats else "sm_80",
        multistage.PASS_CONFIGS,
    )  # fmt: skip
    extra = [EXTRA, *([FLOATS, ADA, PRODUCTS] if floats else []), *([VOTES, EXPERT_SEARCH] if experts else [])]
    kernel = CpuKernel(on_cpu(cuda_text(request)), extra, schedule.warps * 32, folder)
    raw, problem = out_dtype == "int32", op.problem(n, k, made.numerics, out_dtype, experts)
    space, flags = launch_sizes(schedule, problem, m)
    y = torch.full((m, n), -77 if raw else float("nan"), dtype=getattr(torch, out_dtype))
    semaphores = torch.zeros(flags, dtype=torch.int32)
    scales = torch.cat(made.s) if made.numerics == "block" else torch.cat([s.flatten() for s in made.s])
    kernel(
        (schedule.tiles(problem, m), schedule.kc, 1), X=made.q, W=words, S=scales, XS=made.xs, RS=made.zeros,
        B=torch.empty(1) if bias is None else bias, Y=y, WS=torch.full(space, 0x5A5A5A5A, dtype=torch.int32),
        SEM=semaphores, m=m, mp=made.xs.shape[-1], tiles=flags[0], offsets=offsets,
    )  # fmt: skip
    assert not semaphores.any()
    return y


CASES = {  # numerics, n, k, m, schedule, output; True: quick
    "s8 sums, split k": ("s8", 192, 656, 37, Multistage(32, 4, 2, 3, kc=3), "int32", False),
    "s8 token warps": ("s8", 130, 288, 100, Multistage(64, 8, 1, 2, token_warps=2), "float16", False),
    "s8 tall": ("s8", 260, 400, 130, Multistage(128, 8, 2, 2, raster=16), "bfloat16", False),
    "s8 with zeros": ("s8_zeros", 67, 512, 33, Multistage(16, 4, 1, 3, kc=2), "bfloat16", False),
    "s8 sums with zeros": ("s8_zeros", 67, 272, 20, Multistage(32, 4, 1, 2), "int32", False),
    "fast": ("fast", 130, 400, 20, Multistage(32, 4, 2, 2), "float16", False),
    "promoted": ("promoted", 200, 400, 37, Multistage(32, 4, 2, 3, kc=2), "bfloat16", False),
    "block": ("block", 200, 656, 70, Multistage(64, 4, 1, 3), "float16", False),
    "block, split k": ("block", 130, 656, 37, Multistage(32, 4, 2, 2, kc=2), "bfloat16", True),
}


@pytest.mark.parametrize("name", cases(CASES, [name for name, case in CASES.items() if case[-1]]))
def test_kernel(name, tmp_path):
    numerics, n, k, m, schedule, out_dtype, _ = CASES[name]
    rng = torch.Generator().manual_seed(n + k + m)
    made = Operands.random(rng, numerics, m, n, k, 1)
    bias = None if out_dtype == "int32" else torch.randn(n, generator=rng)
    y = launch(made, n, schedule, tmp_path, out_dtype, bias)
    check(y, *made.product(0, slice(None)), bias, k, numerics)


EXPERTS = {  # numerics, n, k, offsets of experts, tokens, schedule, output; True: quick
    "s8 with zeros": ("s8_zeros", 70, 272, (0, 5, 5, 40), 40, Multistage(16, 4, 1, 3), "float16", False),
    "promoted": ("promoted", 70, 272, (2, 5, 5, 40), 42, Multistage(32, 4, 2, 3), "bfloat16", False),
    "block": ("block", 130, 400, (0, 5, 5, 38), 38, Multistage(16, 4, 1, 3, kc=2), "float16", False),
}


@pytest.mark.parametrize("name", cases(EXPERTS, [name for name, case in EXPERTS.items() if case[-1]]))
def test_experts(name, tmp_path):
    """Each expert's rows, scales and tokens, which begin anywhere; rows of no expert stay as they were."""
    numerics, n, k, offsets, m, schedule, out_dtype, _ = EXPERTS[name]
    rng, count = torch.Generator().manual_seed(n + k + m), len(offsets) - 1
    made = Operands.random(rng, numerics, m, n, k, count)
    bias = torch.randn(count, n, generator=rng)
    y = launch(made, n, schedule, tmp_path, out_dtype, bias.flatten(), torch.tensor(offsets, dtype=torch.int32))
    for e, (low, high) in enumerate(pairwise(offsets)):
        if low < high:
            rows = slice(low, high)
            check(y[rows], *made.product(e, rows), bias[e], k, numerics)
    assert bool(torch.cat([y[: offsets[0]], y[offsets[-1] :]]).isnan().all())
