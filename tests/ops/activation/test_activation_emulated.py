"""The program of gated activations: its CUDA text run on the CPU against the reference, its machine code."""

from __future__ import annotations

import pytest
import torch
from emulated_cases import cases
from rows_on_cpu import POISON, check_codes, emulated, outputs
from terrazzo.lowering import KernelReport
from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.kernels import compile_request
from terrazzo.lowering.targets import Target
from terrazzo.lowering.toolchain import toolchain
from terrazzo.ops import row_calls
from terrazzo.ops.activation import op, program, reference
from terrazzo.schedules import rows

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(bool(toolchain().missing()), reason=f"cannot compile: {toolchain().missing()} missing"),
]
FACTS = dict(
    dtype="float16", activation="silu", layout="gate_up", clamps=False, numerics="fused", smooth=False, by_expert=False,
    experts=0, quant=None, column_scales=False,
)  # fmt: skip
CASES = {  # target, M of the bucket, K, what differs from FACTS
    "silu": ("sm_90a", 1, 1032, {}),
    "silu, int8": ("sm_90a", 1, 1032, dict(quant="int8", dtype="bfloat16", layout="up_gate")),
    "silu as a model": ("sm_80", 1, 1032, dict(numerics="model", quant="int8")),
    "rows of a warp": ("sm_90a", 600, 520, dict(quant="e4m3", dtype="bfloat16", smooth=True)),
    "gelu by tanh": ("sm_90a", 1, 264, dict(activation="gelu_tanh")),
    "gelu by tanh as a model": ("sm_90a", 1, 264, dict(activation="gelu_tanh", numerics="model", dtype="bfloat16")),
    "gelu": ("sm_90a", 600, 4104, dict(activation="gelu", quant="e4m3_block128")),
    "gelu as a model": ("sm_90a", 1, 264, dict(activation="gelu", numerics="model")),
    "gpt-oss": ("sm_90a", 1, 264, dict(activation="swiglu_oai", layout="interleaved", clamps=True, dtype="bfloat16")),
    "gpt-oss as a model": (
        "sm_80", 1, 264,
        dict(activation="swiglu_oai", layout="interleaved", clamps=True, dtype="bfloat16", numerics="model"),
    ),
    "clamped silu": ("sm_90a", 1, 264, dict(clamps=True, quant="int8_block128", column_scales=True)),
    "experts": ("sm_90a", 600, 520, dict(experts=40, by_expert=True, smooth=True, quant="int8")),
    "experts, one row a CTA": ("sm_90a", 1, 2048, dict(experts=3, smooth=True, quant="int8")),
    "parts": ("sm_90a", 1, 8200, {}),
    "parts, int8": ("sm_90a", 1, 8200, dict(quant="int8", dtype="bfloat16")),
    "parts, e4m3": ("sm_90a", 1, 10240, dict(quant="e4m3", smooth=True)),
    "parts, blocks": ("sm_80", 1, 8200, dict(quant="int8_block128", layout="interleaved")),
    "long rows": ("sm_90a", 600, 28672, dict(quant="int8")),
}  # fmt: skip
QUICK = ("experts",)
ALPHA, LIMIT = 1.702, 1.5


def request(name: str):
    arch, m, k, changes = CASES[name]
    facts = FACTS | changes
    return row_calls.plan(m, op.Choices(k, **facts), Target.parse(arch)), facts


@pytest.mark.parametrize("name", cases(CASES, QUICK))
def test_the_cuda_text_computes_the_reference(name, tmp_path):
    (wanted, facts), k, m = request(name), CASES[name][2], 7
    kernel, params = emulated(wanted, tmp_path), dict(wanted.params)
    dtype, rng = getattr(torch, facts["dtype"]), torch.Generator().manual_seed(k)
    x = (torch.randn(m, 2 * k, generator=rng) * 2).to(dtype)
    x[1], x[2, :: k // 3] = 0, 40.0
    x[4, k // 2] = float("nan")
    experts, offsets = facts["experts"], None
    good = [0, 1, 2, 3, 5, 6]
    if experts:  # rows 0 and 6 are of none, most experts have none
        offsets = torch.tensor([1, 1, 3, 6][: experts + 1] + [6] * (experts - 3), dtype=torch.int32)
        good = [1, 2, 3, 5]
    smooth = None
    if facts["smooth"]:
        smooth = torch.rand(*([experts] if facts["by_expert"] else []), k, generator=rng) + 0.2
    limit = LIMIT if facts["clamps"] else None
    given = (facts["activation"], facts["layout"], ALPHA, limit, facts["quant"], facts["numerics"])
    y, codes = reference.act_and_mul(op.Call(x, smooth, offsets, *given, facts["column_scales"]))
    out = outputs(m, k, dtype, facts["quant"] or "none", facts["column_scales"])
    none = torch.zeros(1)
    tensors = dict(
        X=x, S=none if smooth is None else 1 / smooth, OFFSETS=none.int() if offsets is None else offsets, **out
    )
    kernel(
        (-(-m // params["rows"]) * params["parts"], 1, 1), **tensors, alpha=ALPHA, limit=LIMIT, m=m, mp=-(-m // 4) * 4
    )
    if codes is not None:
        # two float32 exponentials differ in last bits: codes at a half go either way
        check_codes(out, codes, good, exact=False)
        if experts:
            assert bool((out["Q"][[0, 6]] == POISON).all()) and bool(out["XS"][[0, 6]].isnan().all())
        return
    assert bool(out["Y"][m].isnan().all()) and bool(out["Y"][4].isnan().any())
    g, u = (t.double() for t in reference.gate_and_up(x[good], facts["layout"]))
    if facts["numerics"] == "fused":
        ref = reference.gated(g, u, facts["activation"], ALPHA, limit, None)
        assert bool(((out["Y"][good].double() - ref).abs() <= reference.error_bound(g, u, ref, dtype)).all())
    elif facts["activation"] == "gelu":  # 1 + erf cancels below 0: this machine's erf is not torch's to the bit
        seen, wanted = out["Y"][good].double(), y[good].double()
        assert bool(((seen - wanted).abs() <= 2 * reference.error_bound(g, u, wanted, dtype)).all())
    else:
        assert float((out["Y"][good] != y[good]).float().mean()) <= 1e-3  # a last bit of a float32 function


@pytest.mark.parametrize(
    ("k", "m", "changes"),
    [
        (14336, 4096, dict(quant="int8")),
        pytest.param(14336, 1, dict(quant="int8"), marks=pytest.mark.slow),
        pytest.param(28672, 4096, {}, marks=pytest.mark.slow),
    ],
)
def test_machine_code_spills_nothing_and_reads_once(k, m, changes):
    wanted = row_calls.plan(m, op.Choices(k, **FACTS | changes), Target.parse("sm_90a"))
    report, params = KernelReport.read(compile_request(wanted) / "report.json"), dict(wanted.params)
    assert (report.spill_stores, report.spill_loads, report.stack) == (0, 0, 0)
    if report.instructions:
        assert report.count(r"LDG\.E\.NA\.128") == 2 * params["vectors"]


def test_choices_that_no_kernel_serves_are_refused():
    target = Target.parse("sm_90a")
    base = {n: v for n, v in FACTS.items() if n != "quant"} | dict(k=4096, output="none")
    base |= rows.choose(4096, target, 1).params()
    for change in (dict(k=4092), dict(activation="relu"), dict(layout="rows"), dict(experts=2000), dict(warps=1)):
        with pytest.raises(ArgumentError) as caught:
            program.build(target, **base | change)
        assert caught.value.argument == next(iter(change))
