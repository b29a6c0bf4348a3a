"""The generated kernels of W8A8, run on the CPU from their CUDA text: int32 sums exact, floats inside their bound."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from cuda_on_cpu import VOTES, CpuKernel, cuda_text
from emulated_cases import cases
from terrazzo.layouts.instances import get_instance
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.toolchain import toolchain
from terrazzo.ops.linear.bytes import stream_k
from terrazzo.ops.linear.sizes import shapeless
from terrazzo.ops.tiles.scheduler import EXPERTS_SOURCE
from terrazzo.schedules.stream_k import StreamK
from test_w4a8_emulated import EXTRA
from test_w4a8_fp8_emulated import FLOATS, HOPPER
from wgmma_on_cpu import SHIMS as WGMMA
from wgmma_on_cpu import translated

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(bool(toolchain().missing()), reason=f"cannot compile: {toolchain().missing()} missing"),
]
UNIFORM = "static int tz_uniform(int x) { return x; }\n"
UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8}


def launch(q, weights, scales, xs, zeros, bias, numerics, schedule, partition, folder, out_dtype, generic=False):
    """y of one launch on the CPU, in an output that was NaN (int32: garbage).

    weights: codes [N, K] of each matrix, bytes; scales: S as kernels take it; partition: (grid, shared tiles), or
    (grid, offsets) of experts.
    """
    grid, shared = partition
    experts = len(weights) if torch.is_tensor(shared) else 0
    (m, k), n, layout = q.shape, len(weights[0]), get_instance("w8a8")
    words = torch.cat([layout.pack(w.view(torch.int8)) for w in weights])
    params = dict(
        n=n, k=k, group=128, out_dtype=out_dtype, dequantization=numerics, bias=bias is not None, **schedule.params()
    ) | ({"experts": experts} if experts else {})  # fmt: skip
    params = shapeless(params, 4 if out_dtype == "int32" else 2) if generic else params
    request = KernelRequest(
        "w8a8.stream_k", f"{stream_k.__name__}:build", tuple(params.items()), "sm_90a", stream_k.PASS_CONFIGS
    )
    source = translated(cuda_text(request), schedule.block_tokens).replace("int grid", "int ctas")
    source = source.replace("grid", "ctas")
    extra = [WGMMA, EXTRA.replace("typedef unsigned char uchar;", ""), HOPPER, UNIFORM]
    extra += [] if numerics.startswith("s8") else [FLOATS]
    extra += [VOTES, EXPERTS_SOURCE] if experts else []
    kernel = CpuKernel(
        source, extra, schedule.warpgroups * 128 + 128, folder, max(schedule.cluster, schedule.multicast)
    )
    raw = out_dtype == "int32"
    y = torch.full((m, n), -77 if raw else float("nan"), dtype=getattr(torch, out_dtype))
    semaphores = torch.zeros(grid, schedule.flags, dtype=torch.int32)
    space = torch.full((grid, schedule.cta_blocks, schedule.block_tokens // 8, 128, 4), 0x5A5A5A5A, dtype=torch.int32)
    kernel(
        (grid, 1, 1), X_desc=torch.tensor([q.data_ptr(), *q.shape]), W=words, S=scales, XS=xs, RS=zeros,
        B=torch.empty(1) if bias is None else bias, WS=space, SEM=semaphores, Y=y, m=m, mp=xs.shape[-1],
        parts=shared, sk=shared, ctas=grid, n=n, k=k, blocks=words.shape[1], units=words.shape[0],
        bias=1 if bias is None else bias.numel(),
    )  # fmt: skip
    assert not semaphores.any()
    return y


S8, FAST, PROMOTED, BLOCK = (
    partial(StreamK, form=form) for form in ("s8 direct", "e4m3 fast", "e4m3 promoted", "e4m3 block")
)
CASES = {  # numerics, n, k, m, schedule, (grid, shared tiles), output, generic; True: quick
    "s8 sums": ("s8", 200, 656, 37, S8(32, 2, 1, 3), (3, 3), "int32", False, True),
    "s8 with zeros": ("s8_zeros", 130, 400, 20, S8(16, 2, 1, 3), (3, 2), "float16", True, True),
    "s8 sums with zeros": ("s8_zeros", 67, 272, 20, S8(16, 1, 2, 2), (2, 1), "int32", False, False),
    "s8 two row blocks": ("s8", 260, 272, 70, S8(32, 2, 2, 2), (3, 1), "bfloat16", False, False),
    "s8 clusters": ("s8", 200, 656, 37, S8(32, 2, 1, 3, cluster=2), (8, 4), "float16", False, False),
    "s8 parted": ("s8", 130, 512, 20, S8(16, 1, 1, 2), (9, 3), "float16", False, False),
    "s8 wide": ("s8", 130, 272, 260, S8(256, 2, 1, 3), (2, 0), "float16", True, False),
    "fast": ("fast", 130, 400, 20, FAST(16, 2, 1, 3), (3, 3), "float16", True, False),
    "promoted": ("promoted", 130, 400, 20, PROMOTED(16, 2, 1, 3), (3, 3), "bfloat16", True, True),
    "promoted two row blocks": ("promoted", 200, 272, 20, PROMOTED(16, 1, 2, 2), (3, 3), "float16", False, False),
    "promoted two pieces": ("promoted", 130, 656, 150, PROMOTED(256, 2, 1, 3), (2, 1), "float16", False, False),
    "promoted clusters": ("promoted", 200, 656, 37, PROMOTED(32, 2, 1, 3, cluster=2), (8, 4), "float16", False, False),
    "block": ("block", 200, 400, 37, BLOCK(32, 2, 1, 3), (3, 3), "float16", True, True),
    "block two row blocks": ("block", 200, 272, 20, BLOCK(16, 1, 2, 2), (3, 3), "bfloat16", False, False),
    "block two pieces": ("block", 130, 400, 200, BLOCK(192, 2, 1, 2), (3, 3), "bfloat16", False, False),
    "s8 same rows": ("s8", 200, 400, 85, S8(16, 2, 1, 2, multicast=2), (4, 0), "float16", True, True),
    "s8 same rows, shares": ("s8", 270, 656, 37, S8(16, 1, 2, 3, multicast=2), (6, 5), "int32", False, False),
    "promoted same rows": (
        "promoted",
        200,
        272,
        70,
        PROMOTED(32, 2, 1, 2, multicast=2),
        (2, 1),
        "float16",
        True,
        False,
    ),
    "block same rows": ("block", 200, 400, 37, BLOCK(16, 2, 2, 3, multicast=2), (4, 1), "bfloat16", True, True),
    "block clusters": ("block", 200, 656, 37, BLOCK(32, 2, 1, 3, cluster=2), (8, 4), "float16", False, False),
}


def random_bytes(rng, numerics, *shape):
    """Codes of both operands as int8: integers, or e4m3 of normal values."""
    if numerics.startswith("s8"):
        return torch.randint(-128, 128, shape, generator=rng, dtype=torch.int8)
    return (torch.randn(*shape, generator=rng) * 30).to(torch.float8_e4m3fn).view(torch.int8)


def values(codes, numerics):
    return codes.double() if numerics.startswith("s8") else codes.view(torch.float8_e4m3fn).double()


@pytest.mark.parametrize("name", cases(CASES, [name for name, case in CASES.items() if case[-1]]))
def test_kernel(name, tmp_path):
    numerics, n, k, m, schedule, partition, out_dtype, generic, _ = CASES[name]
    rng = torch.Generator().manual_seed(n + k + m)
    q, w = random_bytes(rng, numerics, m, k), random_bytes(rng, numerics, n, k)
    units, np_, raw = -(-k // 128), -(-n // 64) * 64, out_dtype == "int32"
    bias = None if raw else torch.randn(n, generator=rng)
    zeros = torch.randint(-128, 128, (m,), generator=rng, dtype=torch.int32)
    x, dense = values(q, numerics), values(w, numerics)
    if numerics == "block":
        xs = torch.rand(units, -(-m // 4) * 4, generator=rng) * 1e-2 + 1e-3
        s = torch.rand(units, np_ // 16, generator=rng) * 1e-2 + 1e-3
        xs[:, m:] = float("nan")
        x = x * xs.double().T[:m].repeat_interleave(128, 1)[:, :k]
        dense = dense * s.double().T.repeat_interleave(16, 0).repeat_interleave(128, 1)[:n, :k]
    else:
        xs, scale = torch.rand(m, generator=rng) * 1e-3 + 1e-4, torch.rand(n, generator=rng) * 1e-2 + 1e-3
        rows = torch.cat([scale, torch.full((np_ - n,), float("nan"))])
        s = (
            torch.stack([rows, torch.nn.functional.pad(dense.sum(1).float(), (0, np_ - n))])
            if "s8" in numerics
            else rows
        )
    y = launch(q, [w], s, xs, zeros, bias, numerics, schedule, partition, tmp_path, out_dtype, generic)
    if numerics == "s8_zeros":
        x = x - zeros.double()[:, None]
    product = x @ dense.T
    if raw:
        assert torch.equal(y.double(), product)
        return
    magnitude = x.abs() @ dense.abs().T
    if numerics != "block":
        both = xs.double()[:, None] * scale.double()
        product, magnitude = product * both, magnitude * both
    exact = product + bias.double()
    bound = UNIT[out_dtype] * exact.abs() * 1.001 + 2.0**-21 * (product.abs() + bias.abs()) + 2.0**-25
    if not numerics.startswith("s8"):
        bound += (k // 32 + 12) * 2.0**-24 * magnitude
    assert bool(((y.double() - exact).abs() <= bound).all()), ((y.double() - exact).abs() / bound).max()
