"""MXFP8 activations on MXFP4 weights: what is quantized, what is refused, and the programs run on the CPU."""

from __future__ import annotations

from functools import partial

import pytest
import test_mxfp4_fp8 as on_e4m3
import test_w4a8_fp8_emulated as emulated
import test_w4a8_fp8_grouped_emulated as grouped
import torch
from cuda_on_cpu import CpuKernel, cuda_text
from emulated_cases import cases
from rows_on_cpu import POISON, emulated_text
from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.targets import Target
from terrazzo.ops import mxfp4_fp8, mxfp4_mxfp8, quantized, w4a8
from terrazzo.ops.w4a8 import fp8_reference, mxfp8
from terrazzo.ops.w4a8.w8a8 import activations as w8a8_activations
from terrazzo.schedules import multistage
from terrazzo.schedules.multistage import Multistage
from terrazzo.schedules.problem import Gemm
from terrazzo.schedules.stream_k import StreamK

S, M = partial(StreamK, form="e4m3 mx"), Multistage
CASES = {  # n, k, m, schedule, (grid, shared tiles) of stream_k, output; True: quick
    "stream_k": (130, 400, 20, S(16, 2, 1, 3), (3, 3), "bfloat16", True),
    "stream_k unrolled": (70, 1100, 33, S(48, 1, 1, 2), (1, 0), "float16", False),
    "stream_k two row blocks": (200, 272, 20, S(16, 1, 2, 2), (3, 3), "float16", False),
    "stream_k clusters": (200, 656, 37, S(32, 2, 1, 3, cluster=2), (8, 4), "float16", False),
    "stream_k wide": (130, 400, 150, S(128, 2, 1, 3), (3, 2), "bfloat16", False),
    "multistage": (67, 288, 40, M(64, 4, 1, 2), None, "float16", True),
    "multistage split": (67, 528, 33, M(32, 4, 2, 3, kc=3), None, "bfloat16", False),
    "multistage token warps": (128, 400, 130, M(128, 8, 1, 2, token_warps=2), None, "float16", False),
}
GROUPED = {  # as those of test_w4a8_fp8_grouped_emulated.py
    "rows of nobody": ((7, 0, 33), (3, 6), 200, 640, S(32, 2, 1, 2), 7, "float16"),
    "mma, split k": ((0, 5, 0, 40, 1), (3, 1), 130, 272, M(16, 4, 2, 3, kc=2), 0, "bfloat16"),
}


def weight(n: int, k: int, **ends: int) -> mxfp8.QuantizedWeight:
    codes, scales = on_e4m3.tensors(n, k, **ends)
    bias = torch.randint(-8, 8, (n,), generator=torch.Generator().manual_seed(0)).float()
    return mxfp8.QuantizedWeight.canonical(codes, scales, weight="mxfp4", group_size=32, bias=bias)


def activations(kind: str, m: int, k: int) -> mxfp8.MXActivations:
    """One-hot tokens and small integers, with powers of two of their groups, or random values."""
    rng = torch.Generator().manual_seed(m)
    if kind == "random":
        x = torch.randn(m, k, generator=rng) * torch.exp2(torch.randint(-12, 3, (m, k), generator=rng))
        return mxfp8.reference(x)
    columns = torch.randint(k, (m, 1), generator=rng)
    values = columns == torch.arange(k) if kind == "unit" else torch.randint(-4, 5, (m, k), generator=rng)
    scales = torch.randint(125, 129, (m, -(-k // 32)), generator=rng, dtype=torch.uint8)
    return mxfp8.MXActivations.of(values.float().to(torch.float8_e4m3fn), scales)


def launched(name: str, w, x: mxfp8.MXActivations, folder) -> torch.Tensor:
    """y of a case's kernel, in memory that was NaN."""
    n, k, m, schedule, partition, out_dtype, _ = CASES[name]
    q = x.q.view(torch.int8)
    folder.mkdir(parents=True)
    if partition:
        return emulated.stream_k(w, q, x.scales, schedule, partition, folder, out_dtype)
    problem = Gemm.of_bytes(n, k, 32)
    grid, sizes = (schedule.tiles(problem, m), schedule.kc, 1), multistage.launch_sizes(schedule, problem, m)
    return emulated.mma_sync("multistage", w, q, x.scales, schedule, grid, *sizes, folder, out_dtype)


@pytest.mark.parametrize("name", cases(CASES, [name for name, case in CASES.items() if case[-1]]))
@pytest.mark.compiles
@on_e4m3.kernels[1]
def test_kernel(name, tmp_path):
    """Unit vectors and small integers are exact, random data inside the bound; two runs give the same bits."""
    n, k, m, *_ = CASES[name]
    for kind in ("unit", "integer", "random"):
        w = weight(n, k, **({} if kind == "random" else dict(low=119, high=122)))
        x = activations(kind, m, k)
        y, again = (launched(name, w, x, tmp_path / kind / run) for run in ("y", "again"))
        assert torch.equal(y.view(torch.int16), again.view(torch.int16)), kind
        q, scales = x.q[:, :k], x.token_scales()
        ref = fp8_reference.gemm(q, scales, w)
        if kind != "random":
            assert torch.equal(y, ref.float().to(y.dtype)), kind
            continue
        bound = fp8_reference.forward_error_bound(q, scales, w, y.dtype, fraction_bits=23)
        assert bool(((y.double() - ref).abs() <= bound).all())


@pytest.mark.parametrize("name", cases(GROUPED, []))
@pytest.mark.compiles
@on_e4m3.kernels[1]
def test_grouped(name, tmp_path):
    """Tiles of an expert begin at any token."""
    counts, (before, after), n, k, schedule, grid, out_dtype = GROUPED[name]
    dtype, m = getattr(torch, out_dtype), sum(counts) + before + after
    offsets = torch.tensor([0, *counts]).cumsum(0).int() + before
    kernel = grouped.kernel_of(n, k, 32, schedule, out_dtype, len(counts), tmp_path, "e2m1_mx")
    for kind in ("unit", "integer", "random"):
        ends = {} if kind == "random" else dict(low=119, high=122)
        experts = [weight(n, k, seed=e, **ends) for e in range(len(counts))]
        packed = mxfp4_mxfp8.GroupedWeight.stack([w.pack() for w in experts]).stacked
        x = activations(kind, m, k)
        y, again = (grouped.launch(kernel, packed, x.q, x.scales, offsets, schedule, grid, dtype) for _ in range(2))
        assert torch.equal(y.view(torch.int16), again.view(torch.int16)), kind
        assert y[:before].isnan().all() and y[m - after :].isnan().all(), "rows of nobody were written"
        for e, w in enumerate(experts):
            rows = slice(int(offsets[e]), int(offsets[e + 1]))
            q, scales = x.q[rows, :k], x.token_scales()[rows]
            ref = fp8_reference.gemm(q, scales, w)
            if kind != "random":
                assert torch.equal(y[rows], ref.float().to(dtype)), (kind, f"expert {e}")
                continue
            bound = fp8_reference.forward_error_bound(q, scales, w, dtype, fraction_bits=23)
            assert bool(((y[rows].double() - ref).abs() <= bound).all()), f"expert {e}"


def test_plain_rows_of_other_libraries_are_taken():
    """A byte for each 32 columns; NaN scales make codes NaN, and the smallest one counts as 0."""
    rng = torch.Generator().manual_seed(0)
    q = torch.randn(3, 2, 100, generator=rng).to(torch.float8_e4m3fn)
    scales = torch.randint(100, 140, (3, 2, 4), generator=rng, dtype=torch.uint8)
    x = mxfp8.MXActivations.of(q, scales)
    meant = q.double() * 2.0 ** (scales.double().repeat_interleave(32, -1)[..., :100] - 127)
    assert torch.equal(x.dequantize().double(), meant) and torch.equal(x.exponents(), scales.view(6, 4))
    assert x.scales.shape == (1, 8) and x.q.shape == (6, 112) and x.codes == "mxfp8" and x.check() is None
    assert torch.equal(x.of_tokens(torch.tensor([4, 1])).dequantize().double(), meant.view(6, 100)[[4, 1]])
    assert torch.equal(x.of_tokens(torch.tensor([3])).dequantize().double(), meant.view(6, 100)[3:4])
    scales[0, 0, 1], scales[1, 1, 0] = 255, 0
    values = mxfp8.MXActivations.of(q, scales).dequantize()
    assert mxfp8.reference(torch.zeros(0, 40)).dequantize().shape == (0, 40)
    assert values[0, 0, 32:64].isnan().all() and not values[1, 1, :32].any() and int(values.isnan().sum()) == 32


def test_what_is_no_operand_is_refused_by_name():
    w, x = weight(40, 96), torch.randn(5, 96)
    with pytest.raises(ArgumentError, match="codes: .*multiplies mxfp8|must be mxfp8 codes"):
        w4a8.op.check_codes(w4a8.QuantizedActivations(x.to(torch.float8_e4m3fn), x[:, 0], None, (5, 96)), w.pack())
    with pytest.raises(ArgumentError, match="must be e4m3 codes"):
        w4a8.op.check_codes(mxfp8.reference(x), mxfp4_fp8.quantize(torch.ones(4, 96)))
    with pytest.raises(ArgumentError, match="smooth = 'a tensor': must be None of MXFP8 activations"):
        w4a8.quantize_activations(x.half(), smooth=torch.ones(96), codes="mxfp8")
    with pytest.raises(ArgumentError, match="x = 'float32': must be float16 or bfloat16"):
        mxfp4_mxfp8.quantize_activations(x)
    for scales in (torch.ones(5, 2, dtype=torch.uint8), torch.ones(5, 3).to(torch.float8_e4m3fn), torch.ones(5, 3) > 0):
        with pytest.raises(ArgumentError, match="scales = .*: must be uint8 or float8_e8m0fnu .5, 3."):
            mxfp8.MXActivations.of(x.to(torch.float8_e4m3fn), scales)
    for module in (mxfp4_mxfp8, mxfp4_fp8):
        with pytest.raises(ArgumentError, match="bias = 'given': must be left out when codes is a QuantizedWeight"):
            module.pack(w, bias=torch.ones(40))
    with pytest.raises(ArgumentError, match="no program for scales of groups of both operands"):
        mxfp4_mxfp8.kernel_requests(256, 512, m=1, target="sm_89", pipeline="small_batch")
    with pytest.raises(ArgumentError, match="use mxfp4_mxfp8.quantize"):
        mxfp4_mxfp8.pack(w4a8.fp8.quantize_weight(torch.ones(4, 32), group_size=32))


def test_calls_on_a_cpu_tensor_of_a_graph_give_the_reference():
    w, x = weight(40, 96), torch.randn(5, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    made = mxfp8.reference(x)
    expected = made.dequantize().double() @ w.dequantize().T + w.bias
    packed = w.pack()
    for call in (lambda x: mxfp4_mxfp8.gemm(x, packed), lambda x: mxfp4_mxfp8.gemm(made, packed, out_dtype=x.dtype)):
        y = torch.compile(call, backend="eager")(x)
        assert torch.allclose(y.double(), expected, rtol=1e-2, atol=1e-2 * float(expected.abs().max()))


@pytest.mark.parametrize("k", [40, 1032])
@pytest.mark.compiles
@on_e4m3.kernels[1]
def test_the_quantizers_cuda_text_computes_the_reference(k, tmp_path):
    """Bit for bit: zeros, tiny values, saturation, halves of codes, NaN and infinity."""
    request = w8a8_activations.plan(1, k, dtype="bfloat16", gain=False, form="mxfp8", target=Target.parse("sm_90a"))
    params, m = dict(request.params), 7
    source, shims = emulated_text(cuda_text(request))
    kernel = CpuKernel(source, shims, 32 * params["warps"] * params["rows"], tmp_path)
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(k)) * 2
    x[1], x[2, ::7], x[3], x[4, :32] = 0, 300.0, 2.0**-118, 2.0**-117
    x[5, 0], x[5, 33], x[6, 1], x[6, 2] = float("nan"), float("inf"), 511.0, -(2.0**127)
    x = x.bfloat16()
    expected = mxfp8.reference(x)
    q = torch.full((m + 1, quantized.padded(k)), POISON, dtype=torch.int8)
    words = torch.full((-(-k // 128), 8), POISON, dtype=torch.int32)
    kernel(
        (-(-m // params["rows"]), 1, 1), X=x, G=torch.zeros(1), Q=q, XS=words, ZS=torch.zeros(1, dtype=torch.int32),
        scale=1.0, inverse=1.0, zero=0.0, m=m, mp=8,
    )  # fmt: skip
    assert bool((q[m] == POISON).all() and (words[:, m] == POISON).all())
    assert torch.equal(words[:, :m], expected.scales[:, :m])
    codes = q[:m].view(torch.float8_e4m3fn).float()
    torch.testing.assert_close(codes, expected.q.float(), rtol=0, atol=0, equal_nan=True)
