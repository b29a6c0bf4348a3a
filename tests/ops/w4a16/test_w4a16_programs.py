"""Machine code of the sm_90a programs: tensor-core instructions, copies, no spills, and no early release of a stage."""

from __future__ import annotations

import re
import subprocess

import pytest
from emulated_cases import cases
from terrazzo.lowering import KernelReport, compile_request
from terrazzo.lowering.targets import Target
from terrazzo.lowering.toolchain import find_cuda_tool, find_nvcc
from terrazzo.ops.call import plans
from terrazzo.ops.weight_only import op
from terrazzo.schedules import records, stream_k

CASES = {
    "small f16": (4, {}, r"HMMA\.16816\.F32$"),
    "small bf16 exact g32": (
        16,
        {"dtype": "bfloat16", "scale_dtype": "bfloat16", "numerics": "exact", "group_size": 32},
        r"HMMA\.16816\.F32\.BF16$",
    ),
    "wide exact": (64, {}, r"HGMMA\.64x64x16\.F32$"),
    "wide post f32 scales": (32, {"scale_dtype": "float32", "group_size": 64}, r"HGMMA\.64x32x16\.F32$"),
    "wide post, many tokens": (1000, {"numerics": "post", "group_size": 64}, r"HGMMA\.64x128x16\.F32$"),
    "many tokens, fused bf16, bias": (
        4096,
        {"dtype": "bfloat16", "scale_dtype": "bfloat16", "numerics": "fused", "bias": True},
        r"HGMMA\.64x128x16\.F32\.BF16$",
    ),
    "widest, groups of 32": (
        1000,
        {"group_size": 32, "tile": (256, 2, 1, 64)},
        r"HGMMA\.64x256x16\.F32$",
    ),
    "two row blocks, bf16": (
        1000,
        {"dtype": "bfloat16", "scale_dtype": "bfloat16", "tile": (64, 2, 2, 128)},
        r"HGMMA\.64x64x16\.F32\.BF16$",
    ),
}
FACTS = {"group_size": 128, "symmetric": False, "scale_dtype": "float16", "dtype": "float16", "bias": False}


def compiled(m, changes):
    facts, target = FACTS | changes, Target.parse("sm_90a")
    numerics, tile = facts.pop("numerics", "auto"), facts.pop("tile", None)
    if tile is None:
        plan = plans.plan(m, op.Facts(448, 640, **facts, numerics=numerics), target)
        return plan, compile_request(plan.request)
    tokens, warpgroups, row_blocks, stage_k = tile
    schedule = stream_k.StreamK(tokens, warpgroups, row_blocks, stages=4, stage_k=stage_k)
    with records.forced("w4a16", "stream_k", schedule.params()):
        records.changed()
        plan = plans.plan(m, op.Facts(448, 640, **facts, numerics=numerics), target)
    records.changed()
    assert dict(plan.request.params)["block_tokens"] == tokens
    return plan, compile_request(plan.request)


def disassembled(folder) -> str:
    disassembler = find_cuda_tool("cuobjdump")
    if disassembler is None:
        pytest.skip("needs cuobjdump")
    return subprocess.run([disassembler, "-sass", str(folder / "kernel.cubin")], capture_output=True, text=True).stdout


def opcodes_of(text: str) -> list[str]:
    """The instructions of disassembled text, in order."""
    return re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]+)", text, re.MULTILINE)


@pytest.fixture(scope="module", autouse=True)
def tools():
    if find_nvcc() is None:
        pytest.skip("needs nvcc")


QUICK = ("small f16", "wide exact")


@pytest.mark.parametrize("name", cases(CASES, QUICK))
def test_machine_code(name):
    m, changes, instruction = CASES[name]
    plan, folder = compiled(m, changes)
    report = KernelReport.read(folder / "report.json")
    if dict(plan.request.params)["n"]:
        assert (report.spill_stores, report.spill_loads, report.stack) == (0, 0, 0)
    else:  # sizes that come with the launch may wait for a tile's end in memory, never between products
        assert report.spill_stores + report.spill_loads <= 128
        opcodes = opcodes_of(disassembled(folder))
        first, last = (f(i for i, op in enumerate(opcodes) if op.startswith("HGMMA")) for f in (min, max))
        assert not [op for op in opcodes[first:last] if op.startswith(("LDL", "STL"))]
    if not report.instructions:
        pytest.skip(report.note)
    assert any(re.match(instruction, opcode) for opcode in report.tensor_instructions), report.tensor_instructions
    if "stream_k" in plan.request.name:
        assert report.count(r"UTMALDG") and report.count(r"UBLKCP") and not report.count(r"HMMA\.")
        assert report.count(r"STSM") and not report.count(r"STS\.U16")
    else:
        assert report.count(r"LDGSTS") and report.count(r"LDSM") and report.count(r"LDS\.128")


def test_a_stage_is_released_only_after_its_wgmmas():
    """Between the last load of packed words and the arrive that gives the stage back stands a wait for wgmma."""
    _, folder = compiled(64, {})
    opcodes = opcodes_of(disassembled(folder))
    first, last = (f(i for i, op in enumerate(opcodes) if op.startswith("HGMMA")) for f in (min, max))
    seen = None
    arrives = 0
    for opcode in opcodes[first : last + 1]:
        if opcode.startswith(("LDS.128", "WARPGROUP.DEPBAR")):
            seen = opcode
        elif opcode.startswith("SYNCS.ARRIVE"):
            arrives += 1
            assert seen is not None and seen.startswith("WARPGROUP.DEPBAR"), opcode
    assert arrives


@pytest.mark.parametrize(
    ("name", "most"), cases([("wide exact", 22), ("two row blocks, bf16", 21)], [("wide exact", 22)])
)
def test_instructions_of_the_main_loop(name, most):
    """For each wgmma. Each takes a turn of a scheduler, and wgmma leaves few; 13 convert 8 weights of a thread.
    Parted sums come behind the loop in both programs: its stage and descriptors stay in uniform registers all the same.
    """
    m, changes, _ = CASES[name]
    _, folder = compiled(m, changes)
    text = disassembled(folder)
    lines = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", text, re.MULTILINE)
    at = {int(address, 16): index for index, (address, _) in enumerate(lines)}
    loops = []
    for index, (_, line) in enumerate(lines):
        back = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", line)
        if back and at.get(int(back[1], 16), index) < index:
            body = [line for _, line in lines[at[int(back[1], 16)] : index + 1]]
            products = sum("HGMMA" in line for line in body)
            loops += [(len(body) / products, body)] if products else []
    assert loops
    each, body = min(loops, key=lambda it: len(it[1]))
    assert each <= most and not any("R2UR" in line for line in body), each
