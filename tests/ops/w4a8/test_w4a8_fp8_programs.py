"""Machine code of the W4A8 programs on e4m3: tensor cores of e4m3, no spills, seven instructions for eight codes."""

from __future__ import annotations

import re
from functools import partial

import pytest
from emulated_cases import Compiled, cases
from terrazzo.lowering import KernelReport
from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.targets import Target
from terrazzo.ops.linear.bytes import multistage, small_batch, stream_k
from terrazzo.schedules.forms import AT_ONCE
from terrazzo.schedules.multistage import Multistage
from terrazzo.schedules.problem import Gemm
from terrazzo.schedules.small_batch import SmallBatch
from terrazzo.schedules.stream_k import StreamK
from test_w4a8_fp8_emulated import CASES as EMULATED
from test_w4a8_programs import counter, sass, tools  # noqa: F401  (a fixture)

pytestmark = [pytest.mark.compiles, pytest.mark.usefixtures("tools")]
FACTS = {"n": 448, "k": 640, "group": 128, "out_dtype": "float16", "dequantization": "e4m3", "bias": False}
TWO = {"warpgroups": 2, "row_blocks": 1, "stages": 2, "block_tokens": 64}
RAGGED = {"group": 32, "n": 450, "bias": True, "out_dtype": "bfloat16"}
QGMMA, QMMA = r"QGMMA\.64x%dx32\.F32\.E4M3\.E4M3$", r"QMMA\.16832\.F32\.E4M3\.E4M3$"


def emulated(name: str) -> dict:
    """Parameters of a kernel that test_w4a8_fp8_emulated.py compiles anyway."""
    n, k, group, _, schedule, _, out_dtype, _ = EMULATED[name]
    return dict(n=n, k=k, group=group, out_dtype=out_dtype, bias=True) | schedule.params()


CASES = {  # program, target, changes, tensor instruction, groups of them (stream_k); True: quick
    "wide": (
        stream_k,
        "sm_90a",
        {"warpgroups": 4, "row_blocks": 1, "stages": 4, "block_tokens": 64},
        QGMMA % 64,
        2,
        True,
    ),
    "widest": (
        stream_k,
        "sm_90a",
        {"warpgroups": 2, "row_blocks": 1, "stages": 4, "block_tokens": 128, "group": 64},
        QGMMA % 128,
        2,
        False,
    ),
    "two pieces": (
        stream_k,
        "sm_90a",
        {"warpgroups": 2, "row_blocks": 1, "stages": 5, "block_tokens": 256},
        QGMMA % 128,
        4,
        True,
    ),
    "two row blocks": (
        stream_k,
        "sm_90a",
        {"warpgroups": 2, "row_blocks": 2, "stages": 3, "block_tokens": 64} | RAGGED,
        QGMMA % 64,
        8,
        False,
    ),
    "narrow": (stream_k, "sm_90a", emulated("stream_k"), QGMMA % 16, 2, True),
    "small": (small_batch, "sm_89", emulated("small_batch"), QMMA, 0, False),
    "multistage": (multistage, "sm_89", emulated("multistage"), QMMA, 0, True),
    "tiles of 128": (
        multistage,
        "sm_89",
        {"block_tokens": 128, "warps": 8, "row_blocks": 1, "stages": 3, "token_warps": 2, "kc": 1},
        QMMA,
        0,
        False,
    ),
    "split k": (
        multistage,
        "sm_89",
        {"block_tokens": 32, "warps": 4, "row_blocks": 2, "stages": 3, "kc": 2} | RAGGED,
        QMMA,
        0,
        False,
    ),
}
QUICK = [name for name, case in CASES.items() if case[-1]]
FORMS = {stream_k: partial(StreamK, form="e4m3 post"), small_batch: SmallBatch, multistage: Multistage}


def request(program, target, changes) -> KernelRequest:
    name, params = program.__name__.rpartition(".")[2], tuple((FACTS | changes).items())
    return KernelRequest(f"w4a8.{name}", f"{program.__name__}:build", params, target, program.PASS_CONFIGS)


@pytest.fixture(scope="module")
def compiled(tools):  # noqa: F811
    return Compiled(lambda name: request(*CASES[name][:3]), QUICK)


@pytest.mark.parametrize("name", cases(CASES, QUICK))
def test_machine_code(compiled, name):
    program, _, changes, instruction, groups, _ = CASES[name]
    report = KernelReport.read(compiled[name] / "report.json")
    assert (report.spill_stores, report.spill_loads, report.stack) == (0, 0, 0)
    facts = FACTS | changes
    schedule = FORMS[program](**{key: value for key, value in changes.items() if key not in FACTS})
    of = Gemm.of_bytes(facts["n"], facts["k"], facts["group"])
    assert report.smem_dynamic + report.smem_static <= schedule.smem_bytes(of)
    if not report.instructions:
        pytest.skip(report.note)
    assert len(report.tensor_instructions) == 1 and re.match(instruction, report.tensor_instructions[0])
    if program is stream_k:
        pieces = -(-schedule.block_tokens // AT_ONCE)
        units, rest = divmod(report.count("QGMMA"), 4 * schedule.row_blocks * pieces)
        assert rest == 0 and units >= (schedule.stages + 2 if schedule.row_blocks == pieces == 1 else 1)
        assert report.count(r"WARPGROUP\.ARRIVE") == units * groups, "ptxas serializes wgmma"
        assert report.count("UTMALDG") and report.count("UBLKCP") and report.count("STSM")
    else:
        assert report.count("LDGSTS") and report.count("LDSM") and report.count(r"LDS\.128")


def test_conversion_and_scaling_of_the_main_loop(compiled):
    """8 words of a unit: a shift, four masks and two multiply-adds for each; one FFMA for each sum of a group."""
    lines = sass(compiled["wide"])
    last = max(i for i, line in enumerate(lines) if line.startswith("QGMMA"))
    first = min(i for i, line in enumerate(lines) if line.startswith("LDS.128"))
    count = counter(lines[first : last + 1])
    units = count("QGMMA") // 4
    assert count(r"SHF\.R\.U32\.HI R\d+, RZ, 0x4, R\d+") == 8 * units
    assert count(r"LOP3\.LUT R\d+, R\d+(\.reuse)?, 0xe0e0e0e, RZ, 0xc0") == 16 * units
    assert count(r"LOP3\.LUT R\d+, R\d+(\.reuse)?, 0x1010101, RZ, 0xc0") == 16 * units
    assert count(r"IMAD R\d+, R\d+(\.reuse)?, 0x82, R\d+") == 16 * units
    assert count("FFMA") == 32 * units and count(r"HADD2\.F32") == 2 * units


def test_a_stage_is_released_only_after_its_wgmmas(compiled):
    """Between the last load of packed words and the arrive that gives the stage back stands a wait for wgmma."""
    for name in [name for name in QUICK if CASES[name][0] is stream_k]:
        lines = sass(compiled[name])
        first, last = (f(i for i, line in enumerate(lines) if line.startswith("QGMMA")) for f in (min, max))
        seen, arrives = "WARPGROUP.DEPBAR", 0  # the loop begins with one
        for line in lines[first - 200 : last + 1]:
            if line.startswith(("LDS.128", "WARPGROUP.DEPBAR")):
                seen = line
            elif line.startswith("SYNCS.ARRIVE"):
                arrives += 1
                assert seen.startswith("WARPGROUP.DEPBAR"), name
        assert arrives, name


@pytest.mark.parametrize(
    ("program", "changes", "argument"),
    [
        (stream_k, {"warpgroups": 2, "row_blocks": 2, "stages": 2, "block_tokens": 256}, "block_tokens"),
        (stream_k, {"warpgroups": 4, "row_blocks": 1, "stages": 2, "block_tokens": 128}, "block_tokens"),
        (stream_k, {"warpgroups": 2, "row_blocks": 1, "stages": 2, "block_tokens": 64, "group": 48}, "group"),
        (
            stream_k,
            {"warpgroups": 2, "row_blocks": 1, "stages": 2, "block_tokens": 64, "out_dtype": "int32"},
            "out_dtype",
        ),
        (multistage, {"block_tokens": 64, "warps": 4, "row_blocks": 2, "stages": 3}, "row_blocks"),
        (multistage, {"block_tokens": 64, "warps": 4, "row_blocks": 1, "stages": 3, "k": 650}, "k"),
    ],
)
def test_refusals(program, changes, argument):
    with pytest.raises(ArgumentError) as error:
        program.build(Target.parse("sm_89"), **(FACTS | changes))
    assert error.value.argument == argument
