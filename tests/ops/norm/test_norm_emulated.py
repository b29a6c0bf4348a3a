"""RMSNorm's program: its CUDA text run on the CPU against the reference, its machine code, what its builder refuses."""

from __future__ import annotations

import pytest
import torch
from emulated_cases import cases
from rows_on_cpu import check_codes, emulated, outputs
from terrazzo.lowering import KernelReport
from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.kernels import compile_request
from terrazzo.lowering.targets import Target
from terrazzo.lowering.toolchain import toolchain
from terrazzo.ops import row_calls
from terrazzo.ops.norm import op, program, reference
from terrazzo.schedules import rows

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(bool(toolchain().missing()), reason=f"cannot compile: {toolchain().missing()} missing"),
]
FACTS = dict(
    dtype="float16", weight=None, style="llama", numerics="fused", residual=True, post=False, smooth=False, quant=None,
    plain=False, column_scales=False,
)  # fmt: skip
CASES = {  # target, M of the bucket, K, what differs from FACTS
    "sum, y": ("sm_90a", 1, 1032, {}),
    "sum, int8": ("sm_90a", 1, 1032, dict(quant="int8", dtype="bfloat16")),
    "first, int8": ("sm_90a", 1, 520, dict(quant="int8", residual=False, smooth=True)),
    "rows of a warp": ("sm_90a", 600, 520, dict(quant="e4m3", dtype="bfloat16", smooth=True)),
    "many rows, y": ("sm_90a", 600, 2048, dict(numerics="model")),
    "many rows, blocks": ("sm_90a", 600, 4104, dict(quant="e4m3_block128")),
    "sandwich": ("sm_90a", 1, 264, dict(quant="int8", style="gemma", post=True, dtype="bfloat16")),
    "sandwich as a model": ("sm_80", 1, 264, dict(style="gemma", post=True, numerics="model", dtype="bfloat16")),
    "llama as a model": ("sm_90a", 1, 2048, dict(quant="int8", numerics="model", smooth=True)),
    "gpt-oss as a model": ("sm_80", 600, 2880, dict(style="gpt_oss", numerics="model", dtype="bfloat16", quant="int8")),
    "router": ("sm_90a", 1, 1024, dict(quant="int8_block128", plain=True, column_scales=True)),
    "router, smooth": ("sm_90a", 1, 1024, dict(quant="e4m3", plain=True, smooth=True, dtype="bfloat16")),
    "float32 weight": ("sm_90a", 1, 72, dict(weight="float32", style="gemma")),
    "smooth, all warps": ("sm_90a", 1, 8192, dict(quant="int8", dtype="bfloat16", smooth=True)),
    "long rows": ("sm_90a", 1, 16384, dict(quant="int8")),
}
QUICK = ("llama as a model",)


def request(name: str):
    arch, m, k, changes = CASES[name]
    facts = FACTS | changes
    facts["weight"] = facts["weight"] or facts["dtype"]
    return row_calls.plan(m, op.Choices(k, **facts), Target.parse(arch)), facts


@pytest.mark.parametrize("name", cases(CASES, QUICK))
def test_the_cuda_text_computes_the_reference(name, tmp_path):
    (wanted, facts), k, m = request(name), CASES[name][2], 6
    kernel, params = emulated(wanted, tmp_path), dict(wanted.params)
    dtype, rng = getattr(torch, facts["dtype"]), torch.Generator().manual_seed(k)
    make = lambda *size: torch.randn(*size, generator=rng)
    x, residual = make(m, k).to(dtype), (make(m, k) * 3).to(dtype)
    x[1], residual[1], x[2, :: k // 3] = 0, 0, 40.0
    x[4, k - 1], x[5, 0] = float("nan"), float("inf")
    weight = (make(k) * 0.1).to(getattr(torch, facts["weight"])) + (0 if facts["style"] == "gemma" else 1)
    post = (make(k) * 0.1).to(weight.dtype) if facts["post"] else None
    smooth = torch.rand(k, generator=rng) + 0.2 if facts["smooth"] else None
    given = (weight, post, smooth, 1e-5, 1e-4, facts["style"], facts["quant"], facts["numerics"], facts["plain"])
    call = op.Call(x, residual if facts["residual"] else None, *given, facts["column_scales"])
    y, codes, h = reference.rms_norm(call)
    out = outputs(m, k, dtype, facts["quant"] or "none", facts["column_scales"])
    sums = torch.cat([residual, torch.full((1, k), 7.0, dtype=dtype)])
    vectors = (weight, None) if smooth is None else op.vectors_of(call)
    none = torch.zeros(1)
    tensors = dict(
        X=x, R=sums, W=vectors[0], P=none if post is None else post, S=none if smooth is None else vectors[1]
    )
    kernel((-(-m // params["rows"]), 1, 1), **tensors, **out, eps=1e-5, post_eps=1e-4, m=m, mp=-(-m // 4) * 4)
    good = [0, 1, 2, 3]
    if facts["residual"]:
        if facts["post"]:  # a sum of squares in another order
            torch.testing.assert_close(sums[good].float(), h[good].float(), rtol=2**-7, atol=1e-3)
            same = float((sums[good] == h[good]).float().mean())
            assert same > 0.999
        else:
            assert torch.equal(sums[good], h[good])
        assert bool((sums[m] == 7).all())
    exact = facts["numerics"] == "fused" and not facts["post"]
    if codes is not None:
        check_codes(out, codes, good, exact)
        bad = out["XS"].T if facts["column_scales"] else out["XS"]
        assert bool(bad[4].isnan().any()) and not bool(bad[5].isfinite().all())
    if y is None:
        assert bool(out["Y"].isnan().all())
        return
    assert bool(out["Y"][m].isnan().all()) and bool(out["Y"][4].isnan().all())
    if exact:
        ref = exact_norm(h[good], weight, facts["style"], 1e-5)
        assert bool(((out["Y"][good].double() - ref).abs() <= reference.error_bound(h[good], ref, dtype)).all())
    else:
        assert float((out["Y"][good] != y[good]).float().mean()) <= 1e-3  # the last bit of a mean
        torch.testing.assert_close(out["Y"][good], y[good], rtol=2**-7 if dtype == torch.bfloat16 else 2**-10, atol=0)


def exact_norm(h: torch.Tensor, weight: torch.Tensor, style: str, eps: float) -> torch.Tensor:
    w = weight.double() + (style == "gemma")
    return h.double() * torch.rsqrt(h.double().square().mean(-1, keepdim=True) + eps) * w


@pytest.mark.parametrize(
    ("k", "m", "changes"),
    [
        (4096, 4096, dict(quant="int8")),
        pytest.param(4096, 1, dict(quant="int8"), marks=pytest.mark.slow),
        pytest.param(8192, 4096, dict(quant="e4m3_block128"), marks=pytest.mark.slow),
    ],
)
def test_machine_code_spills_nothing_and_reads_once(k, m, changes):
    facts = FACTS | dict(weight="float16") | changes
    wanted = row_calls.plan(m, op.Choices(k, **facts), Target.parse("sm_90a"))
    report, params = KernelReport.read(compile_request(wanted) / "report.json"), dict(wanted.params)
    assert (report.spill_stores, report.spill_loads, report.stack) == (0, 0, 0)
    if report.instructions:
        assert report.count(r"LDG\.E\.NA\.128") == 2 * params["vectors"]


def test_choices_that_no_kernel_serves_are_refused():
    target = Target.parse("sm_90a")
    good = dict(weight="float16") | rows.choose(4096, target, 1).params()
    base = {n: v for n, v in FACTS.items() if n not in ("weight", "quant")} | good | dict(k=4096, output="none")
    changes = (dict(k=4092), dict(dtype="float32"), dict(style="t5"), dict(weight="bfloat16"), dict(warps=1))
    for change in (*changes, dict(output="int4"), dict(numerics="exact")):
        with pytest.raises(ArgumentError) as caught:
            program.build(target, **base | change)
        assert caught.value.argument == next(iter(change))
