"""Machine code of the W4Ax programs: tensor instructions, no spills, wgmma in groups, 3 instructions for 8 values."""

from __future__ import annotations

import re

import pytest
from emulated_cases import cases
from terrazzo.lowering import KernelReport, compile_request
from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.targets import Target
from terrazzo.lowering.toolchain import find_nvcc
from terrazzo.ops.linear.mixed import integer, persistent, small_batch, stream_k
from terrazzo.schedules import w4ax as schedules
from terrazzo.schedules.forms import held
from terrazzo.schedules.problem import Gemm
from terrazzo.schedules.small_batch import SmallBatch
from test_w4a8_programs import check_releases, counter, sass
from w4ax_tiles import block_tile, integer_tile

pytestmark = pytest.mark.compiles
FACTS = {"n": 448, "k": 640, "blocks8": 2, "out_dtype": "float16", "bias": False}
WGMMA = {  # changes, tokens of the instruction (half of them in turns of halves)
    "few tokens": ({"block_tokens": 16, "warpgroups": 4, "stages": 4}, 16),
    "three warpgroups": ({"block_tokens": 64, "warpgroups": 3, "stages": 4, "out_dtype": "bfloat16", "bias": True}, 64),
    "three in turn": ({"block_tokens": 64, "warpgroups": 3, "stages": 4, "turns": 1}, 64),
    "four of 64 tokens": ({"block_tokens": 64, "warpgroups": 4, "stages": 4, "bias": True}, 64),
    "widest": ({"block_tokens": 128, "warpgroups": 2, "stages": 4, "n": 450, "turns": 1}, 128),
    "halves": ({"block_tokens": 128, "warpgroups": 3, "stages": 4, "bias": True, "turns": 1}, 64),
}
# the kernel that the emulated tests run, and others: changes
INTEGER = {
    "shared": {"n": 130, "k": 512, "blocks8": 1, "bias": True, "out_dtype": "float32", "tile": (128, 3, 2)},
    "few tokens": {"tile": (16, 4, 4)},
    "two warpgroups": {"bias": True, "out_dtype": "bfloat16", "tile": (128, 2, 4)},
    "four stages": {"n": 450, "bias": True, "tile": (128, 3, 4)},
    "four warpgroups": {"tile": (64, 4, 4)},
    "one kind": {"blocks8": 0, "out_dtype": "float32", "tile": (64, 3, 4)},
}
TILE = {"two_level": True, "block_tokens": 16, "warpgroups": 4, "stages": 4}
# form of the sums -> groups of wgmma in the code, waits for them, conversions of a block, scalings of a tile's sums
FORMS = {"blocks": (3, 3, 3, 3), "kept": (1, 2, 1, 2), "whole": (1, 2, 1, 2), "halves": (2, 2, 1, 1)}
MMA = {
    "few tokens": {"block_tokens": 16, "warps": 4, "row_blocks": 2, "stages": 4},
    "widest": {"block_tokens": 128, "warps": 8, "row_blocks": 2, "stages": 3, "token_warps": 2, "bias": True, "n": 450},
}


SMALL = {
    "one tile": {"token_tiles": 1, "kc": 1, "nc": 7, "warps": 5, "chunk": 2, "stages": 2, "bias": True, "n": 450},
    "two tiles": {"token_tiles": 2, "kc": 2, "nc": 10, "warps": 2, "chunk": 2, "stages": 2, "cluster": 2},
}


def request(program, target: str, changes: dict) -> KernelRequest:
    params = tuple((FACTS | changes).items())
    return KernelRequest("w4ax", f"{program.__name__}:build", params, target, program.PASS_CONFIGS)


def compiled(program, target: str, changes: dict):
    if find_nvcc() is None:
        pytest.skip("needs nvcc")
    folder = compile_request(request(program, target, changes))
    report = KernelReport.read(folder / "report.json")
    assert (report.spill_stores, report.spill_loads, report.stack) == (0, 0, 0)
    return folder, report


@pytest.mark.parametrize("name", cases(WGMMA, ("halves",)))
def test_wgmma(name):
    changes, tokens = WGMMA[name]
    folder, report = compiled(stream_k, "sm_90a", changes)
    check_releases((folder / "kernel.cu").read_text())
    schedule = block_tile(**{key: value for key, value in changes.items() if key not in FACTS})
    assert report.smem_dynamic + report.smem_static <= schedule.smem_bytes(Gemm.of_blocks(448, 640, 2))
    if not report.instructions:
        pytest.skip(report.note)
    assert report.tensor_instructions == [f"IGMMA.64x{tokens}x32.S8.S8"]  # INT4 blocks, too: s4 is not native
    groups, waits, blocks, scalings = FORMS[held(schedule)]
    assert report.count("IGMMA") == 4 * groups and report.count(r"WARPGROUP\.ARRIVE") == groups, (
        "ptxas serializes wgmma"
    )
    assert report.count(r"WARPGROUP\.DEPBAR") == waits, "ptxas waits for wgmmas on its own"
    assert report.count(r"BAR\.ARV") == (groups + 1 if schedule.turns else 0)
    assert report.count("UTMALDG") and report.count("UBLKCP") and report.count("STSM")
    count = counter(sass(folder))
    assert (
        count(r"LOP3\.LUT R\d+, R\d+(\.reuse)?, 0xf0f0f0f0, RZ, 0xc0") == 16 * blocks
    )  # 8 words: two masks, one shift
    assert count(r"(SHF\.L\.U32|IMAD\.SHL\.U32) R\d+, R\d+(\.reuse)?, 0x10?,? ?") in range(8 * blocks, 8 * blocks + 16)
    assert converted(count, schedule.block_tokens // 2 * scalings)  # a sum becomes f32 once


def converted(count, sums: int) -> bool:
    """Whether `sums` int32 values become f32 beside those of the plan: a quotient converts one or two, and one back."""
    quotients = count(r"F2I\.TRUNC")
    return quotients <= count(r"I2FP?\.F(32|P)") - sums <= 2 * quotients


@pytest.mark.parametrize("name", cases(INTEGER, list(INTEGER)[:1]))
def test_integer(name):
    """A main loop for each kind of block, or one for both: pairs of wgmmas, of which one pair stays under way."""
    facts = FACTS | INTEGER[name]
    schedule = integer_tile(*facts.pop("tile"))
    folder, report = compiled(integer, "sm_90a", facts | {"two_level": True} | schedule.params())
    check_releases((folder / "kernel.cu").read_text())
    out_bytes = 4 if facts["out_dtype"] == "float32" else 2
    gemm = Gemm.of_blocks(facts["n"], facts["k"], facts["blocks8"], out_bytes, True)
    assert report.smem_dynamic + report.smem_static <= schedule.smem_bytes(gemm) <= 232448
    if not report.instructions:
        pytest.skip(report.note)
    assert report.tensor_instructions == [f"IGMMA.64x{schedule.block_tokens}x32.S8.S8"]
    loops, rest = divmod(report.count("IGMMA"), 4)
    assert rest == 0 and loops in (1, 2) and report.count(r"WARPGROUP\.ARRIVE") == 2 * loops, "wgmma is serialized"
    assert report.count(r"WARPGROUP\.DEPBAR") == 3 * loops, "ptxas waits for wgmmas on its own"
    assert report.count("UTMALDG") and report.count("UBLKCP")
    count = counter(sass(folder))
    masked = count(r"LOP3\.LUT R\d+, R\d+(\.reuse)?, 0xf0f0f0f, (U?R\d+)(\.reuse)?, 0x6a")
    flipped = count(r"LOP3\.LUT R\d+, R\d+(\.reuse)?, 0x80808080, RZ, 0x3c")
    assert (masked, flipped) == (16 * loops, 16 * loops)  # 8 words: mask and plus 8 at once, multiply-add, flip
    each = schedule.block_tokens // 2  # a sum becomes f32 once for each kind of block
    assert converted(count, each) or converted(count, each * loops)


@pytest.mark.parametrize("name", cases(MMA, ("few tokens",)))
def test_native_s4_and_s8(name):
    changes = MMA[name]
    folder, report = compiled(persistent, "sm_80", changes)
    schedule = schedules.Persistent(**{key: value for key, value in changes.items() if key not in FACTS})
    assert report.smem_dynamic + report.smem_static == schedule.smem_bytes(Gemm.of_blocks(448, 640, 2))
    if not report.instructions:
        pytest.skip(report.note)
    assert set(report.tensor_instructions) == {"IMMA.16832.S8.S8", "IMMA.16864.S4.S4"}
    tiles = schedule.sums // 4  # instruction tiles of a warp: two k64 of an INT4 block, four k32 of an INT8 block
    assert report.count(r"IMMA\.16864") == 2 * tiles and report.count(r"IMMA\.16832") == 4 * tiles
    assert report.count("LDGSTS") and report.count("LDSM") and report.count(r"LDS\.128")
    lines = sass(folder)
    first, last = (f(i for i, line in enumerate(lines) if line.startswith("IMMA.16832")) for f in (min, max))
    words = 8 * schedule.row_blocks  # of an INT8 block
    masks = [
        i for i, line in enumerate(lines) if re.match(r"LOP3\.LUT R\d+, R\d+(\.reuse)?, 0xf0f0f0f0, RZ, 0xc0", line)
    ]
    assert len(masks) == 2 * words and masks[-1] < last
    loop = lines[max(min(masks[0], first) - 60, 0) : last + 1]
    shifts = counter(loop)(r"(SHF\.L\.U32|IMAD\.SHL\.U32) R\d+, R\d+(\.reuse)?, (0x4|0x10), RZ")
    assert words <= shifts < words + 12  # and some of addresses
    # INT4 blocks go to the tensor core as they are: no mask between the s4 instructions
    s4 = [i for i, line in enumerate(lines) if line.startswith("IMMA.16864")]
    assert not [i for i in masks if s4[0] < i < s4[-1]]


@pytest.mark.parametrize("name", cases(SMALL, ("one tile",)))
def test_small_batch(name):
    changes = SMALL[name]
    folder, report = compiled(small_batch, "sm_90a", changes)
    schedule = SmallBatch(**{key: value for key, value in changes.items() if key not in FACTS})
    size = schedule.launch_bytes(Gemm.of_blocks(448, 640, 2), Target.parse("sm_90a"))
    assert report.smem_dynamic + report.smem_static <= size
    assert report.registers <= schedule.registers(Gemm.of_blocks(448, 640, 2)) + 32
    if not report.instructions:
        pytest.skip(report.note)
    assert report.tensor_instructions == ["IMMA.16832.S8.S8"]
    assert report.count("LDGSTS") and report.count("LDSM") and report.count(r"LDS\.128") and report.count("UBLKCP")
    lines = sass(folder)
    products = report.count("IMMA")
    blocks = products // (4 * schedule.token_tiles)  # of 16 rows by 128 channels in the code
    count = counter(lines)
    assert (
        count(r"LOP3\.LUT R\d+, R\d+(\.reuse)?, 0xf0f0f0f0, RZ, 0xc0") == 16 * blocks
    )  # 8 words: two masks, one shift
    assert count(r"I2FP?\.F(32|P)") == 4 * schedule.token_tiles * blocks  # a sum becomes f32 once


def test_other_targets_and_single_kinds():
    for target, blocks8, wanted in (("sm_86", 0, {"IMMA.16864.S4.S4"}), ("sm_89", 5, {"IMMA.16832.S8.S8"})):
        _, report = compiled(persistent, target, MMA["few tokens"] | {"blocks8": blocks8, "out_dtype": "float32"})
        if not report.instructions:
            pytest.skip(report.note)
        assert set(report.tensor_instructions) == wanted


@pytest.mark.parametrize(
    ("program", "changes", "argument"),
    [
        (stream_k, WGMMA["widest"][0] | {"block_tokens": 256}, "block_tokens"),
        (stream_k, WGMMA["widest"][0] | {"two_level": True}, "two_level"),
        (integer, TILE | {"two_level": False}, "two_level"),
        (integer, TILE | {"block_tokens": 40}, "block_tokens"),
        (integer, TILE | {"block_tokens": 256}, "block_tokens"),
        (integer, TILE | {"stages": 1}, "stages"),
        (stream_k, WGMMA["widest"][0] | {"warpgroups": 4}, "block_tokens"),
        (stream_k, WGMMA["widest"][0] | {"stages": 1}, "stages"),
        (stream_k, WGMMA["widest"][0] | {"warpgroups": 1}, "turns"),
        (stream_k, WGMMA["widest"][0] | {"turns": 2}, "turns"),
        (stream_k, WGMMA["widest"][0] | {"k": 650}, "k"),
        (stream_k, WGMMA["widest"][0] | {"blocks8": 6}, "blocks8"),
        (stream_k, WGMMA["widest"][0] | {"out_dtype": "int32"}, "out_dtype"),
        (small_batch, SMALL["one tile"] | {"warps": 6}, "warps"),
        (persistent, MMA["widest"] | {"stages": 30}, "stages"),
        (persistent, MMA["widest"] | {"token_warps": 1}, "row_blocks"),
        (persistent, MMA["widest"] | {"warps": 5}, "warps"),
    ],
)
def test_refusals(program, changes, argument):
    with pytest.raises(ArgumentError) as error:
        program.build(Target.parse("sm_90a"), **(FACTS | changes))
    assert error.value.argument == argument
