"""Machine code of W8A8: both operands by descriptor, four products for each group, nothing spilled or serialized; on
mma.sync the native instruction."""

from __future__ import annotations

import pytest
from emulated_cases import cases
from terrazzo.lowering import KernelReport, compile_request
from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.targets import Target
from terrazzo.lowering.toolchain import find_nvcc
from terrazzo.ops.call import plans
from terrazzo.ops.linear.bytes import direct_tokens, stream_k
from terrazzo.ops.w4a8.w8a8 import op

FACTS = dict(n=448, k=640, group=128, out_dtype="bfloat16", bias=True, raster=8, cluster=1)
CASES = {  # numerics, tokens, warpgroups, row blocks, stages, opcode
    "int8": ("s8", 256, 2, 1, 4, "IGMMA.64x256x32.S8.S8"),
    "int8 with zero points": ("s8_zeros", 16, 2, 2, 6, "IGMMA.64x16x32.S8.S8"),
    "promoted": ("promoted", 256, 2, 1, 4, "QGMMA.64x128x32.F32.E4M3.E4M3"),
    "promoted, two row blocks": ("promoted", 128, 2, 2, 4, "QGMMA.64x128x32.F32.E4M3.E4M3"),
    "blocks": ("block", 128, 2, 2, 4, "QGMMA.64x128x32.F32.E4M3.E4M3"),
    "blocks, tokens first": ("block", 128, 2, 3, 5, "QGMMA.64x192x32.F32.E4M3.E4M3"),
}


def request(name: str) -> KernelRequest:
    numerics, tokens, warpgroups, row_blocks, stages, _ = CASES[name]
    own = dict(block_tokens=tokens, warpgroups=warpgroups, row_blocks=row_blocks, stages=stages)
    params, program = FACTS | own | {"dequantization": numerics}, stream_k
    if name.endswith("tokens first"):
        del params["cluster"]
        program = direct_tokens
    return KernelRequest("w8a8", f"{program.__name__}:build", tuple(params.items()), "sm_90a", program.PASS_CONFIGS)


@pytest.mark.compiles
@pytest.mark.skipif(find_nvcc() is None, reason="needs nvcc")
@pytest.mark.parametrize("name", cases(CASES, ("blocks, tokens first",)))
def test_machine_code(name):
    report = KernelReport.read(compile_request(request(name)) / "report.json")
    assert (report.spill_stores, report.spill_loads, report.stack) == (0, 0, 0)
    if not report.instructions:
        pytest.skip(report.note)
    assert list(report.tensor_instructions) == [CASES[name][-1]]
    groups, products = report.count(r"WARPGROUP\.ARRIVE"), report.count(CASES[name][-1][:5])
    assert products % groups == 0 and products // groups in (4, 8), "ptxas serializes wgmma"


WARPS = {  # numerics, target, M, opcode
    "int8 on sm_80": ("s8", "sm_80", 512, "IMMA.16832.S8.S8"),
    "blocks on sm_89": ("block", "sm_89", 64, "QMMA.16832.F32.E4M3.E4M3"),
    "promoted on sm_120a": ("promoted", "sm_120a", 16, "QMMA.16832.F32.E4M3.E4M3"),
}


@pytest.mark.slow
@pytest.mark.compiles
@pytest.mark.skipif(find_nvcc() is None, reason="needs nvcc")
@pytest.mark.parametrize("name", WARPS)
def test_machine_code_on_warps(name):
    numerics, target, m, opcode = WARPS[name]
    plan = plans.plan(m, op.Facts(4096, 4096, numerics=numerics, out_dtype="bfloat16"), Target.parse(target))
    report = KernelReport.read(compile_request(plan.request) / "report.json")
    assert (report.spill_stores, report.spill_loads, report.stack) == (0, 0, 0)
    if not report.instructions:
        pytest.skip(report.note)
    assert list(report.tensor_instructions) == [opcode]


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        (dict(group=64), "group"),
        (dict(dequantization="fast", out_dtype="int32", bias=False), "out_dtype"),
        (dict(dequantization="s8", out_dtype="int32"), "bias"),
        (dict(k=650), "k"),
        (dict(dequantization="promoted", block_tokens=256, row_blocks=2), "block_tokens"),
        (dict(stages=1), "stages"),
    ],
)
def test_refusals(change, argument):
    params = FACTS | dict(block_tokens=64, warpgroups=2, row_blocks=1, stages=4, dequantization="s8") | change
    with pytest.raises(ArgumentError) as error:
        stream_k.build(Target.parse("sm_90a"), **params)
    assert error.value.argument == argument
