"""The program of rotary positions: its CUDA text run on the CPU against the reference, its machine code."""

from __future__ import annotations

import pytest
import torch
from cuda_on_cpu import CpuKernel, cuda_text
from emulated_cases import cases
from rows_on_cpu import emulated_text
from terrazzo.lowering import KernelReport
from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.kernels import compile_request
from terrazzo.lowering.targets import Target
from terrazzo.lowering.toolchain import toolchain
from terrazzo.ops import row_calls
from terrazzo.ops.rope import op, program, reference
from terrazzo.ops.tiles import heads as heads_in_lanes

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(bool(toolchain().missing()), reason=f"cannot compile: {toolchain().missing()} missing"),
]
FACTS = dict(
    rotary_dim=None, layout="neox", dtype="float16", norm="none", numerics="fused", positions="int32", arch="sm_90a"
)
CASES = {  # head_dim, heads, kv_heads, what differs from FACTS
    "llama": (128, 4, 2, {}),
    "llama as a model": (128, 4, 2, dict(numerics="model", dtype="bfloat16")),
    "qwen 3": (128, 5, 1, dict(norm="llama", dtype="bfloat16", positions="int64")),
    "qwen 3 as a model": (128, 5, 1, dict(norm="llama", numerics="model")),
    "gemma 3": (256, 3, 2, dict(norm="gemma", dtype="bfloat16", arch="sm_80")),
    "gemma 3 as a model": (256, 3, 2, dict(norm="gemma", numerics="model", dtype="bfloat16")),
    "neighbours, partial": (64, 3, 3, dict(layout="interleaved", rotary_dim=32, positions="none")),
    "neighbours as a model": (64, 3, 3, dict(layout="interleaved", numerics="model")),
    "halves, partial": (96, 3, 1, dict(rotary_dim=32, norm="llama")),
    "phi": (80, 2, 2, dict(rotary_dim=32)),
}
QUICK = ("qwen 3 as a model",)


def request(name: str):
    head_dim, _, _, changes = CASES[name]
    facts = FACTS | changes
    facts["rotary_dim"] = facts["rotary_dim"] or head_dim
    arch = facts.pop("arch")
    return row_calls.plan(1, op.Choices(head_dim, **facts), Target.parse(arch)), facts


@pytest.mark.parametrize("name", cases(CASES, QUICK))
def test_the_cuda_text_computes_the_reference(name, tmp_path):
    (wanted, facts), (dim, heads, kv_heads, _), m = request(name), CASES[name], 5
    kernel = CpuKernel(*emulated_text(cuda_text(wanted)), 32 * program.WARPS, tmp_path)
    dtype, rng = getattr(torch, facts["dtype"]), torch.Generator().manual_seed(dim)
    qkv = (torch.randn(m, (heads + 2 * kv_heads) * dim, generator=rng) * 2).to(dtype)
    half, kind = facts["rotary_dim"] // 2, facts["positions"]
    angles = torch.arange(40)[:, None] * 10000.0 ** (-torch.arange(half) / half)
    table = 1.1 * torch.stack([angles.cos(), angles.sin()])
    positions = None if kind == "none" else torch.tensor([0, 7, 39, 2, 2]).to(getattr(torch, kind))
    weights = [(torch.randn(dim, generator=rng) * 0.1 + (facts["norm"] == "llama")).to(dtype) for _ in range(2)]
    norm = facts["norm"]
    given = (*table, positions, *(weights if norm != "none" else (None, None)), heads, kv_heads, dim)
    given += (facts["rotary_dim"], facts["layout"], norm, 1e-5, facts["numerics"])
    q, k = (torch.full((m + 1, count * dim), float("nan"), dtype=dtype) for count in (heads, kv_heads))
    none = torch.zeros(1)
    tensors = dict(X=qkv, POS=none.int() if positions is None else positions, COS=table[0], SIN=table[1], Q=q, K=k)
    sizes = dict(m=m, pitch=qkv.shape[1], p=40, width=half, places=m, qn=q.shape[1], kn=k.shape[1])
    per = program.WARPS * 32 // heads_in_lanes.lanes_of(dim)
    grid = (-(-m * (heads + kv_heads) // per), 1, 1)
    vectors = dict(QW=weights[0], KW=weights[1], eps=1e-5, heads=heads, kv_heads=kv_heads)
    kernel(grid, **tensors, **sizes, **vectors)
    model = facts["numerics"] == "model"
    for seen, wanted in zip((q, k), reference.apply_rope(op.Call(qkv, *given), exact=not model)):
        assert bool(seen[m].isnan().all())
        seen = seen[:m].view(wanted.shape)
        if model:
            assert float((seen != wanted).float().mean()) <= (0 if norm == "none" else 1e-3)
        else:
            assert bool(((seen.double() - wanted).abs() <= reference.error_bound(wanted, wanted, dtype)).all())


@pytest.mark.slow
def test_machine_code_spills_nothing():
    report = KernelReport.read(compile_request(request("qwen 3")[0]) / "report.json")
    assert (report.spill_stores, report.spill_loads, report.stack) == (0, 0, 0)


def test_choices_that_no_kernel_serves_are_refused():
    base = dict(head_dim=128, **{name: value for name, value in request("llama")[1].items()})
    for change in (dict(head_dim=72), dict(rotary_dim=144), dict(layout="gptj"), dict(norm="layer"), dict(dtype="f8")):
        with pytest.raises(ArgumentError) as caught:
            program.build(Target.parse("sm_90a"), **base | change)
        assert caught.value.argument == next(iter(change))
