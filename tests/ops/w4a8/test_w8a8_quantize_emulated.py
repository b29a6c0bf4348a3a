"""The kernels that quantize activations for W8A8 alone, run on the CPU from their CUDA text: bits of the reference."""

from __future__ import annotations

import pytest
import torch
from cuda_on_cpu import CpuKernel, cuda_text
from emulated_cases import cases
from rows_on_cpu import POISON, emulated_text
from terrazzo.lowering.targets import Target
from terrazzo.lowering.toolchain import toolchain
from terrazzo.ops import quantized
from terrazzo.ops.w4a8.w8a8 import activations, reference

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(bool(toolchain().missing()), reason=f"cannot compile: {toolchain().missing()} missing"),
]
CASES = {  # form, target, M of the bucket, K, dtype, smooth
    "static": ("int8_static", "sm_80", 1, 264, "float16", True),
    "static e4m3": ("e4m3_static", "sm_90a", 600, 520, "bfloat16", False),
    "asymmetric": ("int8_asymmetric", "sm_90a", 1, 1032, "bfloat16", True),
    "asymmetric, rows of a warp": ("int8_asymmetric", "sm_80", 600, 520, "float16", False),
    "blocks": ("e4m3_block128", "sm_90a", 1, 1032, "bfloat16", True),
    "powers of two": ("e4m3_block128_ue8m0", "sm_90a", 1, 1032, "bfloat16", True),
}
SCALE, ZERO = 0.037, -9


@pytest.mark.parametrize("name", cases(CASES, ("powers of two",)))
def test_the_cuda_text_computes_the_reference(name, tmp_path):
    form, target, bucket, k, dtype, smooth = CASES[name]
    request = activations.plan(bucket, k, dtype=dtype, gain=smooth, form=form, target=Target.parse(target))
    params, m = dict(request.params), 7
    source, shims = emulated_text(cuda_text(request))
    kernel = CpuKernel(source, shims, 32 * params["warps"] * params["rows"], tmp_path)
    rng = torch.Generator().manual_seed(k)
    x = torch.randn(m, k, generator=rng) * 2
    x[1], x[2, :: k // 3], x[3], x[5] = 0, 300.0, x[3].abs() + 1, -x[5].abs()
    x[4], x[6, :300] = 2.0**-130, 448.0 * 2.0**-3
    x[6, 5] = float("nan") if form.endswith("ue8m0") else 1.0
    x = x.to(getattr(torch, dtype))
    gain = torch.rand(k, generator=rng) + 0.2 if smooth else None
    q = torch.full((m + 1, quantized.padded(k)), POISON, dtype=torch.int8)
    blocks = "_block128" in form
    scales = torch.full((-(-k // 128), 8) if blocks else (m + 1,), float("nan"))
    zeros = torch.full((m + 1,), POISON, dtype=torch.int32)
    zero = ZERO if form == "int8_static" else 0
    inverse = activations._reciprocal(SCALE)
    kernel(
        (-(-m // params["rows"]), 1, 1), X=x, G=torch.zeros(1) if gain is None else 1 / gain, Q=q, XS=scales, ZS=zeros,
        scale=SCALE, inverse=inverse, zero=float(zero), m=m, mp=8,
    )  # fmt: skip
    assert bool((q[m] == POISON).all())
    if blocks:
        values = x.float() if gain is None else x.float() * (1 / gain)
        powers = form.endswith("ue8m0")
        expected = (
            reference.quantize_powers(values, (m, k)) if powers else quantized.encode(values, None, (m, k), form, True)
        )
        same = dict(rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(q[:m].view(torch.float8_e4m3fn).float(), expected.q.float(), **same)
        torch.testing.assert_close(scales[:, :m], expected.scales[:, :m], **same)
        return
    if form.endswith("static"):
        expected = reference.quantize_static(x, SCALE, zero, form.partition("_")[0], gain)
        assert bool((scales[:m] == torch.tensor(SCALE)).all())
    else:
        expected, expected_scales, expected_zeros = reference.quantize_asymmetric(x, gain)
        torch.testing.assert_close(scales[:m], expected_scales, rtol=0, atol=0)
        assert torch.equal(zeros[:m], expected_zeros)
    codes = q[:m, :k] if form.startswith("int8") else q[:m, :k].view(torch.float8_e4m3fn)
    assert torch.equal(codes.float(), expected.float())
    if form == "int8_static":
        assert bool((zeros[:m] == ZERO).all())
    assert form.startswith("e4m3") or int(zeros[m]) == POISON
    assert bool(scales[m].isnan())
