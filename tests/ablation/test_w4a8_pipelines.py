"""Machine code of the wgmma pipelines besides imfp: operands, copies, no spills, what a stage's release waits for."""

from __future__ import annotations

import re

import pytest
from emulated_cases import cases
from terrazzo.ablation.w4a8 import basic, excp, pingpong
from terrazzo.ablation.w4a8.baseline import Gemm
from terrazzo.lowering import KernelReport, compile_request
from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.targets import Target
from terrazzo.schedules import problem as schedules
from test_w4a8_pipelines_emulated import CASES, request_of
from test_w4a8_programs import check_releases, counter, sass, tools  # noqa: F401  (a fixture)

TILE = {"block_tokens": 128, "warpgroups": 2, "row_blocks": 2, "stages": 3, "out_dtype": "int32"}
GROUPS = {"basic": (2, 2), "excp": (1, 8), "pingpong": (4, 2)}  # of wgmma in the loop, wgmmas of each


@pytest.mark.parametrize("name", cases(GROUPS, ("excp", "pingpong")))
def test_machine_code(tools, name):  # noqa: F811
    """Of the kernels that test_w4a8_pipelines_emulated.py runs."""
    _, n, k, group, _, schedule, _, out_dtype, dequantization, _ = CASES[name]
    folder = compile_request(request_of(name, Gemm(n, k, group, out_dtype, dequantization, False), schedule))
    report = KernelReport.read(folder / "report.json")
    assert (report.spill_stores, report.spill_loads, report.stack) == (0, 0, 0)
    problem, (groups, each) = schedules.Gemm.of_bytes(n, k, group, 4), GROUPS[name]
    assert report.smem_dynamic + report.smem_static <= schedule.smem_bytes(problem)
    if not report.instructions:
        pytest.skip(report.note)
    assert report.tensor_instructions == [f"IGMMA.64x{schedule.block_tokens}x32.S8.S8"]
    copies = report.count("WARPGROUP.ARRIVE") // groups  # of the loop
    assert report.count(r"WARPGROUP\.ARRIVE") == copies * groups >= groups
    assert report.count("IGMMA") == copies * groups * each, "ptxas serializes wgmma"
    assert report.count("UTMALDG") and report.count("UBLKCP")
    lines = sass(folder)
    product = next(line for line in lines if line.startswith("IGMMA"))
    assert (re.match(r"IGMMA\S+ R\d+, R\d+", product) is None) == (name == "excp")  # A by a descriptor
    CHECKS[name](lines)


@pytest.mark.parametrize("name", ["excp", "pingpong"])
def test_a_warp_meets_before_it_gives_a_stage_back(tools, name):  # noqa: F811
    _, n, k, group, _, schedule, _, out_dtype, dequantization, _ = CASES[name]
    folder = compile_request(request_of(name, Gemm(n, k, group, out_dtype, dequantization, False), schedule))
    check_releases((folder / "kernel.cu").read_text())


def barrier_in_front_of_copies(lines: list[str]) -> None:
    """basic: in the loop stand a wait for wgmma, the CTA's barrier, the copy. vadd4: a shift, two masks, two products
    and eight instructions more for each word."""
    first, last = (f(i for i, line in enumerate(lines) if line.startswith("IGMMA")) for f in (min, max))
    loop = lines[first - 100 : last + 200]
    order = [line.split()[0] for line in loop if line.startswith(("WARPGROUP.DEPBAR", "BAR.SYNC", "UBLKCP"))]
    at = next(i for i, word in enumerate(order) if word.startswith("BAR.SYNC"))
    assert order[at - 1].startswith("WARPGROUP.DEPBAR") and "UBLKCP" in order[at + 1]
    count = counter(lines)
    assert count(r"LOP3\.LUT R\d+, R\d+(\.reuse)?, 0xf0f0f0f, RZ, 0xc0") == 16
    assert count(r"LOP3\.LUT R\d+, R\d+(\.reuse)?, 0x7f7f7f7f, RZ, 0xc0") >= 16  # of __vadd4
    assert not count(r"LOP3\.LUT R\d+, R\d+(\.reuse)?, 0x80808080, RZ, 0x3c")


def fence_in_front_of_arrival(lines: list[str]) -> None:
    """excp: four stmatrix for each unit of 64 rows by 128 k, then the proxy fence, then the converted stage is full."""
    stores = [i for i, line in enumerate(lines) if line.startswith("STSM")]
    assert stores and len(stores) % 16 == 0  # four row blocks in each copy of the loop
    after = lines[stores[-1] : stores[-1] + 60]
    fence = next(i for i, line in enumerate(after) if line.startswith("FENCE.VIEW.ASYNC"))
    assert fence < next(i for i, line in enumerate(after) if line.startswith("SYNCS.ARRIVE"))


def wait_in_front_of_release(lines: list[str]) -> None:
    """pingpong: between the last load of packed words and the arrive that gives the stage back stands a wait."""
    first, last = (f(i for i, line in enumerate(lines) if line.startswith("IGMMA")) for f in (min, max))
    seen, arrives = "", 0
    for line in lines[first : last + 1]:
        if line.startswith(("LDS.128", "WARPGROUP.DEPBAR")):
            seen = line
        elif line.startswith("SYNCS.ARRIVE"):
            arrives += 1
            assert seen.startswith("WARPGROUP.DEPBAR")
    assert arrives


CHECKS = {
    "basic": barrier_in_front_of_copies,
    "excp": fence_in_front_of_arrival,
    "pingpong": wait_in_front_of_release,
}


@pytest.mark.parametrize(
    ("program", "changes", "argument"),
    [
        (basic, {"row_blocks": 4}, "block_tokens"),
        (basic, {"operands": 2}, "block_tokens"),
        (basic, {"operands": 3}, "operands"),
        (basic, {"stages": 1}, "stages"),
        (basic, {"dequantization": "other"}, "dequantization"),
        (excp, {"warpgroups": 3}, "block_tokens"),
        (excp, {"operands": 0}, "operands"),
        (excp, {"stages": 1}, "stages"),
        (excp, {"dequantization": "vadd4"}, "dequantization"),
        (pingpong, {"warpgroups": 1}, "warpgroups"),
        (pingpong, {"warpgroups": 3}, "block_tokens"),
        (pingpong, {"stages": 1}, "stages"),
        (pingpong, {"dequantization": "vadd4"}, "dequantization"),
    ],
)
def test_refusals(program, changes, argument):
    facts = {"n": 448, "k": 640, "group": 64, "bias": False, "dequantization": "xor"}
    with pytest.raises(ArgumentError) as error:
        program.build(Target.parse("sm_90a"), **(facts | TILE | changes))
    assert error.value.argument == argument
