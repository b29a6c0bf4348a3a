"""The generated kernels of W8A8, run on the CPU from their CUDA text: int32 sums exact, floats inside their bound."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import pytest
import torch
from cuda_on_cpu import VOTES, CpuKernel, cuda_text
from emulated_cases import cases
from terrazzo.layouts.instances import get_instance
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.toolchain import toolchain
from terrazzo.ops.linear.bytes import direct_tokens, stream_k
from terrazzo.ops.linear.sizes import shapeless
from terrazzo.ops.tiles.cuda.experts import EXPERT_TABLE
from terrazzo.schedules.stream_k import StreamK
from terrazzo.schedules.token_tiles import TokenTiles
from test_w4a8_emulated import EXTRA
from test_w4a8_fp8_emulated import FLOATS, HOPPER
from wgmma_on_cpu import SHIMS as WGMMA
from wgmma_on_cpu import STMATRIX, translated

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
    program = direct_tokens if isinstance(schedule, TokenTiles) else stream_k
    request = KernelRequest("w8a8", f"{program.__name__}:build", tuple(params.items()), "sm_90a", program.PASS_CONFIGS)
    source = translated(cuda_text(request), schedule.block_tokens).replace("int grid", "int ctas")
    source = source.replace("grid", "ctas")
    extra = [WGMMA, EXTRA.replace("typedef unsigned char uchar;", ""), HOPPER, UNIFORM]
    extra += [] if numerics.startswith("s8") else [FLOATS]
    extra += [VOTES, EXPERT_TABLE] if experts else []
    extra += [STMATRIX] if program is direct_tokens else []
    kernel = CpuKernel(source, extra, schedule.warpgroups * 128 + 128, folder, schedule.cluster)
    raw = out_dtype == "int32"
    y = torch.full((m, n), -77 if raw else float("nan"), dtype=getattr(torch, out_dtype))
    space, flags = schedule.workspace(grid)
    space, semaphores = torch.full(space, 0x5A5A5A5A, dtype=torch.int32), torch.zeros(flags, dtype=torch.int32)
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
    "s8 sums": ("s8", 200, 656, 37, S8(32, 2, 1, 3), (3, 3), "int32", False, False),
    "s8 with zeros": ("s8_zeros", 130, 400, 20, S8(16, 2, 1, 3), (3, 2), "float16", True, True),
    "s8 sums with zeros": ("s8_zeros", 67, 272, 20, S8(16, 1, 2, 2), (2, 1), "int32", False, False),
    "s8 two row blocks": ("s8", 260, 272, 70, S8(32, 2, 2, 2), (3, 1), "bfloat16", False, False),
    "s8 clusters": ("s8", 200, 656, 37, S8(32, 2, 1, 3, cluster=2), (8, 4), "float16", False, False),
    "s8 parted": ("s8", 130, 512, 20, S8(16, 1, 1, 2), (9, 3), "float16", False, False),
    "s8 wide": ("s8", 130, 272, 260, S8(256, 2, 1, 3), (2, 0), "float16", True, False),
    "fast": ("fast", 130, 400, 20, FAST(16, 2, 1, 3), (3, 3), "float16", True, False),
    "promoted": ("promoted", 130, 400, 20, PROMOTED(16, 2, 1, 3), (3, 3), "bfloat16", True, False),
    "promoted two row blocks": ("promoted", 200, 272, 20, PROMOTED(16, 1, 2, 2), (3, 3), "float16", False, False),
    "promoted two pieces": ("promoted", 130, 656, 150, PROMOTED(256, 2, 1, 3), (2, 1), "float16", False, False),
    "promoted clusters": ("promoted", 200, 656, 37, PROMOTED(32, 2, 1, 3, cluster=2), (8, 4), "float16", False, False),
    "block": ("block", 200, 400, 37, BLOCK(32, 2, 1, 3), (3, 3), "float16", True, True),
    "block two row blocks": ("block", 200, 272, 20, BLOCK(16, 1, 2, 2), (3, 3), "bfloat16", False, False),
    "block two pieces": ("block", 130, 400, 200, BLOCK(192, 2, 1, 2), (3, 3), "bfloat16", False, False),
    "block tokens first": ("block", 200, 400, 150, TokenTiles(128, 2, 2, 2), (3, 3), "bfloat16", True, True),
    "block tokens first, wide": ("block", 130, 272, 300, TokenTiles(256, 2, 2, 3), (3, 2), "float16", False, False),
    "block tokens first, tall": ("block", 200, 272, 70, TokenTiles(128, 2, 3, 2), (2, 1), "float16", False, False),
    "block tokens first, two pieces": (
        "block",
        260,
        272,
        90,
        TokenTiles(128, 2, 4, 2),
        (2, 2),
        "bfloat16",
        True,
        False,
    ),
    "block clusters": ("block", 200, 656, 37, BLOCK(32, 2, 1, 3, cluster=2), (8, 4), "float16", False, False),
}


def random_bytes(rng, numerics, *shape):
    """Codes of both operands as int8: integers, or e4m3 of normal values."""
    if numerics.startswith("s8"):
        return torch.randint(-128, 128, shape, generator=rng, dtype=torch.int8)
    return (torch.randn(*shape, generator=rng) * 30).to(torch.float8_e4m3fn).view(torch.int8)


def values(codes, numerics):
    return codes.double() if numerics.startswith("s8") else codes.view(torch.float8_e4m3fn).double()


@dataclass
class Operands:
    """Codes and scales as kernels take them, of a product and of several experts' weights."""

    numerics: str
    q: torch.Tensor
    w: list
    s: list
    xs: torch.Tensor
    zeros: torch.Tensor
    k: int

    @classmethod
    def random(cls, rng, numerics, m, n, k, count):
        q, units, np_ = random_bytes(rng, numerics, m, k), -(-k // 128), -(-n // 64) * 64
        zeros = torch.randint(-128, 128, (m,), generator=rng, dtype=torch.int32)
        w = [random_bytes(rng, numerics, n, k) for _ in range(count)]
        if numerics == "block":
            xs = torch.rand(units, -(-m // 4) * 4, generator=rng) * 1e-2 + 1e-3
            s = [torch.rand(units, np_ // 16, generator=rng) * 1e-2 + 1e-3 for _ in w]
            xs[:, m:] = float("nan")
            return cls(numerics, q, w, s, xs, zeros, k)
        xs, s = torch.rand(m, generator=rng) * 1e-3 + 1e-4, []
        for one in w:
            scale = torch.rand(n, generator=rng) * 1e-2 + 1e-3
            rows = torch.cat([scale, torch.full((np_ - n,), float("nan"))])
            sums = torch.nn.functional.pad(values(one, numerics).sum(1).float(), (0, np_ - n))
            s.append(torch.stack([rows, sums]) if "s8" in numerics else rows)
        return cls(numerics, q, w, s, xs, zeros, k)

    def product(self, e, rows):
        """float64 (sums, scales of a row and a column, sums of magnitudes) of some rows of x and an expert."""
        x, dense, n = values(self.q, self.numerics), values(self.w[e], self.numerics), len(self.w[e])
        if self.numerics == "block":
            x = x * self.xs.double().T[: len(x)].repeat_interleave(128, 1)[:, : self.k]
            dense = dense * self.s[e].double().T.repeat_interleave(16, 0).repeat_interleave(128, 1)[:n, : self.k]
            both = torch.ones((), dtype=torch.float64)
        else:
            own = self.s[e][0] if "s8" in self.numerics else self.s[e]
            both = self.xs.double()[rows, None] * own.double()[:n]
        if self.numerics == "s8_zeros":
            x = x - self.zeros.double()[:, None]
        return x[rows] @ dense.T, both, x[rows].abs() @ dense.abs().T


def check(y, sums, both, magnitude, bias, k, numerics):
    """int32 sums are exact; others inside their bound."""
    if y.dtype == torch.int32:
        assert torch.equal(y.double(), sums)
        return
    product, magnitude = sums * both, magnitude * both
    exact, unit = product + bias.double(), UNIT[str(y.dtype).removeprefix("torch.")]
    bound = unit * exact.abs() * 1.001 + 2.0**-21 * (product.abs() + bias.abs()) + 2.0**-25
    if not numerics.startswith("s8"):
        bound += (k // 32 + 12) * 2.0**-24 * magnitude
    assert bool(((y.double() - exact).abs() <= bound).all()), ((y.double() - exact).abs() / bound).max()


@pytest.mark.parametrize("name", cases(CASES, [name for name, case in CASES.items() if case[-1]]))
def test_kernel(name, tmp_path):
    numerics, n, k, m, schedule, partition, out_dtype, generic, _ = CASES[name]
    rng = torch.Generator().manual_seed(n + k + m)
    made = Operands.random(rng, numerics, m, n, k, 1)
    bias = None if out_dtype == "int32" else torch.randn(n, generator=rng)
    s = made.s[0]
    y = launch(
        made.q, made.w, s, made.xs, made.zeros, bias, numerics, schedule, partition, tmp_path, out_dtype, generic
    )  # fmt: skip
    check(y, *made.product(0, slice(None)), bias, k, numerics)


EXPERTS = {  # numerics, n, k, offsets of experts, tokens, schedule, grid, output, generic; True: quick
    "s8 with zeros": ("s8_zeros", 70, 272, (0, 5, 5, 40), 40, S8(16, 1, 1, 3), 3, "float16", False, False),
    "s8 sums": ("s8", 130, 400, (0, 17, 20), 20, S8(32, 2, 1, 3), 3, "int32", True, False),
    "promoted": ("promoted", 70, 272, (2, 5, 5, 40), 42, PROMOTED(32, 1, 1, 3), 3, "bfloat16", False, False),
    "block": ("block", 130, 400, (0, 5, 5, 38), 38, BLOCK(32, 2, 1, 3), 3, "float16", True, True),
    "block two row blocks": ("block", 130, 272, (1, 2, 24), 25, BLOCK(16, 1, 2, 2), 2, "bfloat16", False, False),
}


@pytest.mark.parametrize("name", cases(EXPERTS, [name for name, case in EXPERTS.items() if case[-1]]))
def test_experts(name, tmp_path):
    """Each expert's rows, scales and tokens, which begin at any multiple; rows of no expert stay as they were."""
    numerics, n, k, offsets, m, schedule, grid, out_dtype, generic, _ = EXPERTS[name]
    rng, count = torch.Generator().manual_seed(n + k + m), len(offsets) - 1
    made = Operands.random(rng, numerics, m, n, k, count)
    bias = None if out_dtype == "int32" else torch.randn(count, n, generator=rng)
    s = torch.cat(made.s) if numerics == "block" else torch.cat([one.flatten() for one in made.s])
    partition = (grid, torch.tensor(offsets, dtype=torch.int32))
    flat = None if bias is None else bias.flatten()
    y = launch(
        made.q, made.w, s, made.xs, made.zeros, flat, numerics, schedule, partition, tmp_path, out_dtype, generic
    )  # fmt: skip
    for e, (low, high) in enumerate(pairwise(offsets)):
        if low < high:
            rows = slice(low, high)
            check(y[rows], *made.product(e, rows), None if bias is None else bias[e], k, numerics)
    outside = torch.cat([y[: offsets[0]], y[offsets[-1] :]])
    assert bool((outside == -77).all() if out_dtype == "int32" else outside.isnan().all())
