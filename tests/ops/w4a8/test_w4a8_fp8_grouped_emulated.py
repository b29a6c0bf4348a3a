"""The grouped kernel of W4A8 on e4m3, run on the CPU from its CUDA text: unit vectors, small integers, random data."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
import torch
from cuda_on_cpu import VOTES, CpuKernel, cuda_text
from emulated_cases import cases
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.toolchain import toolchain
from terrazzo.ops.linear.bytes import fp8_problem, multistage, stream_k
from terrazzo.ops.tiles.cuda.experts import EXPERT_SEARCH, EXPERT_TABLE
from terrazzo.ops.w4a8 import fp8, fp8_reference
from terrazzo.schedules.multistage import Multistage, launch_sizes
from terrazzo.schedules.problem import Gemm
from terrazzo.schedules.stream_k import StreamK
from test_w4a8_emulated import EXTRA
from test_w4a8_fp8_emulated import ADA, FLOATS, on_cpu
from test_w4a8_fp8_emulated import HOPPER as LOADS
from wgmma_on_cpu import SHIMS as WGMMA
from wgmma_on_cpu import translated

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(bool(toolchain().missing()), reason=f"cannot compile: {toolchain().missing()} missing"),
]
GUARD = 4
S = partial(StreamK, form="e4m3 post")
CASES = {  # tokens of each expert, rows of nobody at both ends, n, k, group, schedule, grid, output
    "rows of nobody": ((7, 0, 33), (3, 6), 200, 640, 128, S(32, 2, 1, 2), 7, "float16"),
    "empty experts": ((0, 5, 0, 0, 40, 1, 0), (0, 0), 130, 272, 32, S(16, 1, 2, 3, raster=2), 4, "bfloat16"),
    "waves and shares": ((20, 30, 1, 16), (0, 0), 320, 256, 64, S(16, 1, 1, 2), 9, "float16"),
    "all shared": ((9,), (0, 0), 64, 1280, 64, S(16, 1, 1, 2), 6, "bfloat16"),
    "no tokens": ((0, 0), (2, 3), 64, 128, 128, S(16, 1, 1, 2), 3, "float16"),
    "four warpgroups": ((16, 3, 16), (0, 0), 256, 384, 128, S(16, 4, 1, 2), 5, "float16"),
    "forty experts": (
        (0,) * 31 + (3, 17, 0, 0, 2, 0, 0, 0, 40), (0, 1), 100, 256, 64, S(64, 2, 1, 2), 5, "bfloat16",
    ),
    "widest": ((130, 0, 20), (0, 0), 100, 384, 32, S(128, 2, 1, 2), 4, "float16"),
    "two pieces": ((260, 0, 20), (0, 0), 100, 384, 64, S(256, 2, 1, 2), 4, "float16"),
    "mma, split k": ((0, 5, 0, 40, 1), (3, 1), 130, 272, 32, Multistage(16, 4, 2, 3, kc=2), 0, "bfloat16"),
    "mma, wide": ((70, 0, 20), (0, 0), 100, 384, 128, Multistage(64, 4, 1, 2), 0, "float16"),
}  # fmt: skip


def kernel_of(
    n: int, k: int, group: int, schedule: S, out_dtype: str, experts: int, folder: Path, form: str = "e4m3"
) -> CpuKernel:
    facts = dict(n=n, k=k, group=group, out_dtype=out_dtype, dequantization=form, bias=True, experts=experts)
    params = tuple((facts | schedule.params()).items())
    converter = fp8_problem.Gemm(n, k, group, out_dtype, form, True).converter.device_source
    if isinstance(schedule, Multistage):
        request = KernelRequest(
            "w4a8.grouped", f"{multistage.__name__}:build", params, "sm_89", multistage.PASS_CONFIGS
        )
        shims = [EXTRA, FLOATS, ADA, VOTES, EXPERT_SEARCH, converter]
        return CpuKernel(on_cpu(cuda_text(request)), shims, schedule.warps * 32, folder)
    request = KernelRequest("w4a8.grouped", f"{stream_k.__name__}:build", params, "sm_90a", stream_k.PASS_CONFIGS)
    source = translated(cuda_text(request), schedule.block_tokens)
    base = EXTRA.replace("typedef unsigned char uchar;", "")
    shims = [WGMMA, base, FLOATS, LOADS, VOTES, EXPERT_TABLE, converter]
    return CpuKernel(re.sub(r"\bgrid\b", "ctas", source), shims, schedule.warpgroups * 128 + 128, folder)


def launch(kernel: CpuKernel, packed, q, scales, offsets, schedule: S, grid: int, dtype: torch.dtype) -> torch.Tensor:
    """y, in an output and a workspace that were NaN; rows beside it must stay so."""
    m, shape, tiles = len(q), (grid, 1, 1), 0
    y = torch.full((m + 2 * GUARD, packed.n), float("nan"), dtype=dtype)
    if isinstance(schedule, Multistage):
        problem = Gemm.of_bytes(packed.n, q.shape[1], packed.group_size, activations="e4m3", experts=len(offsets) - 1)
        space, flags = launch_sizes(schedule, problem, m)
        shape, tiles = (schedule.tiles(problem, m), schedule.kc, 1), flags[0]
    else:
        space, flags = (grid, schedule.cta_blocks, schedule.block_tokens // 8, 128, 4), (grid, schedule.flags)
    semaphores, bytes_ = torch.zeros(flags, dtype=torch.int32), q.view(torch.int8)
    kernel(
        shape, X=bytes_, X_desc=torch.tensor([bytes_.data_ptr(), *bytes_.shape]), W=packed.words,
        S=packed.channel_scales, XS=scales, RS=torch.zeros(1, dtype=torch.int32), B=packed.bias, Y=y[GUARD:], m=m,
        ctas=grid, WS=torch.full(space, float("nan")), SEM=semaphores, parts=offsets, sk=offsets, tiles=tiles,
        offsets=offsets, mp=scales.shape[-1],
    )  # fmt: skip
    assert not semaphores.any(), "a semaphore is not zero"
    assert y[:GUARD].isnan().all() and y[-GUARD:].isnan().all(), "rows beside y were written"
    return y[GUARD:-GUARD]


def weights(experts: int, n: int, k: int, group: int, free: bool) -> list[fp8.QuantizedWeight]:
    """Experts with free scales, or with powers of two."""
    rng, made = torch.Generator().manual_seed(n + k), []
    shape = (n, -(-k // group))
    for _ in range(experts):
        factors = torch.randn(shape, generator=rng) if free else 2.0 ** torch.randint(-2, 2, shape, generator=rng)
        channels = torch.rand(n, generator=rng) * 1e-2 + 1e-3 if free else torch.full((n,), 2.0**-6)
        bias = torch.randn(n, generator=rng) if free else torch.randint(-8, 8, (n,), generator=rng).float()
        codes = torch.randint(-8, 8, (n, k), generator=rng)
        made.append(fp8.QuantizedWeight.canonical(codes, factors.half(), channels, group_size=group, bias=bias))
    return made


def activations(kind: str, m: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(m)
    if kind == "random":
        return fp8_reference.quantize_activations(torch.randn(m, k, generator=rng) * 3)
    columns = torch.randint(k, (m, 1), generator=rng)
    values = columns == torch.arange(k) if kind == "unit" else torch.randint(-4, 5, (m, k), generator=rng)
    return values.float().to(torch.float8_e4m3fn), 2.0 ** torch.randint(-3, 1, (m,), generator=rng)


@pytest.mark.parametrize("name", cases(CASES, []))
def test_grouped(name, tmp_path):
    check(CASES[name], weights, "e4m3", tmp_path)


def check(case, weights, form, tmp_path):
    """Unit vectors and small integers are exact, random data inside the bound; two runs give the same bits."""
    counts, (before, after), n, k, group, schedule, grid, out_dtype = case
    dtype, m = getattr(torch, out_dtype), sum(counts) + before + after
    offsets = torch.tensor([0, *counts]).cumsum(0).int() + before
    kernel = kernel_of(n, k, group, schedule, out_dtype, len(counts), tmp_path, form)
    for kind in ("unit", "integer", "random"):
        made = weights(len(counts), n, k, group, kind == "random")
        packed = fp8.GroupedWeight.stack([w.pack() for w in made]).stacked
        q, scales = activations(kind, m, k)
        y, again = (launch(kernel, packed, q, scales, offsets, schedule, grid, dtype) for _ in range(2))
        assert torch.equal(y.view(torch.int16), again.view(torch.int16)), f"two runs differ: {kind}"
        assert y[:before].isnan().all() and y[m - after :].isnan().all(), "rows of nobody were written"
        for e, w in enumerate(made):
            rows = slice(int(offsets[e]), int(offsets[e + 1]))
            ref = fp8_reference.gemm(q[rows], scales[rows], w)
            if kind != "random":
                assert torch.equal(y[rows], ref.float().to(dtype)), (kind, f"expert {e}")
                continue
            bound = fp8_reference.forward_error_bound(q[rows], scales[rows], w, dtype, fraction_bits=23)
            assert bool(((y[rows].double() - ref).abs() <= bound).all()), (kind, f"expert {e}")
