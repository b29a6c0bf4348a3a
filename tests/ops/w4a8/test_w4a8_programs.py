"""Machine code of the W4A8 programs: integer tensor cores, copies, no spills, 7 or 5 instructions for each word."""

from __future__ import annotations

import re
import subprocess
from functools import partial

import pytest
from emulated_cases import cases
from terrazzo.lowering import KernelReport, compile_request
from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.targets import Target
from terrazzo.lowering.toolchain import find_cuda_tool, find_nvcc
from terrazzo.ops.linear.bytes import multistage, small_batch, stream_k
from terrazzo.schedules.multistage import Multistage
from terrazzo.schedules.problem import Gemm
from terrazzo.schedules.small_batch import SmallBatch
from terrazzo.schedules.stream_k import StreamK

FACTS = {"n": 448, "k": 640, "group": 64, "out_dtype": "float16", "dequantization": "xor", "bias": False}
WIDE = {"warpgroups": 4, "row_blocks": 1, "stages": 4}
CASES = {  # program, target, changes, tensor instruction, groups of them (stream_k)
    "wide": (stream_k, "sm_90a", WIDE | {"block_tokens": 64}, r"IGMMA\.64x64x32\.S8\.S8$", 2),
    "widest unsigned g32": (
        stream_k,
        "sm_90a",
        {"block_tokens": 256, "warpgroups": 2, "row_blocks": 1, "stages": 4, "group": 32, "bias": True}
        | {"out_dtype": "bfloat16", "dequantization": "unsigned"},
        r"IGMMA\.64x256x32\.U8\.S8$",
        2,
    ),
    "two row blocks": (
        stream_k,
        "sm_90a",
        {"block_tokens": 128, "warpgroups": 2, "row_blocks": 2, "stages": 3, "out_dtype": "int32", "n": 450},
        r"IGMMA\.64x128x32\.S8\.S8$",
        4,
    ),
    "small": (
        small_batch,
        "sm_90a",
        {"token_tiles": 2, "kc": 2, "nc": 10, "warps": 2, "chunk": 2, "stages": 2, "cluster": 2},
        r"IMMA\.16832\.S8\.S8$",
        0,
    ),
    "small, four token tiles": (
        small_batch,
        "sm_90a",
        {"token_tiles": 4, "kc": 1, "nc": 14, "warps": 5, "chunk": 2, "stages": 3, "cluster": 2},
        r"IMMA\.16832\.S8\.S8$",
        0,
    ),
    "small unsigned": (
        small_batch,
        "sm_80",
        {"token_tiles": 1, "kc": 1, "nc": 14, "warps": 5, "chunk": 1, "stages": 2, "dequantization": "unsigned"},
        r"IMMA\.16832\.U8\.S8$",
        0,
    ),
    "tall": (
        multistage,
        "sm_80",
        {"block_tokens": 128, "warps": 8, "row_blocks": 2, "stages": 3},
        r"IMMA\.16832\.S8\.S8$",
        0,
    ),
    "split k unsigned": (
        multistage,
        "sm_89",
        {"block_tokens": 64, "warps": 4, "row_blocks": 2, "stages": 3, "kc": 2, "group": 32, "n": 450, "bias": True}
        | {"out_dtype": "bfloat16", "dequantization": "unsigned"},
        r"IMMA\.16832\.U8\.S8$",
        0,
    ),
}
FORMS = {stream_k: partial(StreamK, form="s8 integer"), small_batch: SmallBatch, multistage: Multistage}
MULTISTAGE = {"block_tokens": 64, "warps": 4, "row_blocks": 2, "stages": 3}


def request(program, target, changes) -> KernelRequest:
    params = tuple((FACTS | changes).items())
    return KernelRequest("w4a8", f"{program.__name__}:build", params, target, program.PASS_CONFIGS)


@pytest.fixture(scope="module")
def tools():
    if find_nvcc() is None:
        pytest.skip("needs nvcc")


@pytest.mark.parametrize("name", cases(CASES, ("wide", "small")))
def test_machine_code(tools, name):
    program, target, changes, instruction, groups = CASES[name]
    report = KernelReport.read(compile_request(request(program, target, changes)) / "report.json")
    assert (report.spill_stores, report.spill_loads, report.stack) == (0, 0, 0)
    facts = FACTS | changes
    schedule = FORMS[program](**{key: value for key, value in changes.items() if key not in FACTS})
    of = Gemm.of_bytes(facts["n"], facts["k"], facts["group"], 4 if facts["out_dtype"] == "int32" else 2)
    size = schedule.launch_bytes(of, Target.parse(target)) if program is small_batch else schedule.smem_bytes(of)
    assert report.smem_dynamic + report.smem_static <= size
    if not report.instructions:
        pytest.skip(report.note)
    assert [opcode for opcode in report.tensor_instructions if re.match(instruction, opcode)]
    assert len(report.tensor_instructions) == 1  # both signs are never mixed up
    if program is small_batch:
        assert report.count("IMMA") % (4 * schedule.chunk * schedule.token_tiles) == 0  # of whole steps
    if program is stream_k:
        assert report.count("IGMMA") == 2 * report.count(r"WARPGROUP\.ARRIVE"), "ptxas serializes wgmma"
        units, rest = divmod(report.count("IGMMA"), 2 * groups)
        assert rest == 0 and units >= (schedule.stages + 2 if schedule.row_blocks == 1 else 1)  # a round, and others
        assert report.count("UTMALDG") and report.count("UBLKCP") and not report.count(r"STS\.U16")
        assert bool(report.count("STSM")) == (changes.get("out_dtype") != "int32")
    else:
        assert report.count("LDGSTS") and report.count("LDSM") and report.count(r"LDS\.128")
    if program is multistage:
        assert report.count("IMMA") % (schedule.row_blocks * schedule.block_tokens // 2) == 0  # each of 4 passes once
        assert report.smem_dynamic + report.smem_static == schedule.smem_bytes(of)


def sass(folder) -> list[str]:
    disassembler = find_cuda_tool("cuobjdump")
    if disassembler is None:
        pytest.skip("needs cuobjdump")
    text = subprocess.run([disassembler, "-sass", str(folder / "kernel.cubin")], capture_output=True, text=True).stdout
    return re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][^;]*);", text, re.MULTILINE)


def counter(lines: list[str]):
    return lambda pattern: sum(re.match(pattern, line) is not None for line in lines)


@pytest.mark.parametrize(("name", "flips"), cases([("wide", 16), ("widest unsigned g32", 0)], [("wide", 16)]))
def test_dequantization_of_the_main_loop(tools, name, flips):
    """8 words of a unit: a shift, two masks, two multiply-adds (and, signed, two flips) for each."""
    program, target, changes, _, _ = CASES[name]
    lines = sass(compile_request(request(program, target, changes)))
    last = max(i for i, line in enumerate(lines) if line.startswith("IGMMA"))
    first = min(i for i, line in enumerate(lines) if line.startswith("LDS.128"))
    count = counter(lines[first : last + 1])
    units = count("IGMMA") // 4
    assert count(r"SHF\.R\.U32\.HI R\d+, RZ, 0x4, R\d+") == 8 * units
    assert count(r"LOP3\.LUT R\d+, R\d+(\.reuse)?, 0xf0f0f0f, RZ, 0xc0") == 16 * units
    assert count(r"IMAD R\d+, R\d+(\.reuse)?, R\d+(\.reuse)?, R\d+") == 16 * units
    assert count(r"LOP3\.LUT R\d+, R\d+(\.reuse)?, 0x80808080, RZ, 0x3c") == flips * units
    assert count("PRMT") == 4 * (4 if FACTS | changes == FACTS | changes | {"group": 32} else 2) * units


def test_a_known_stage_costs_few_instructions(tools):
    """128 k of an unrolled round: 21 or 22 for each product, where 26 and more come to stages one by one."""
    lines = sass(compile_request(request(*CASES["wide"][:3])))
    products = [i for i, line in enumerate(lines) if line.startswith("IGMMA")]
    loops = [j - i for i, j in zip(products, products[4:])]
    assert sum(length <= 4 * 22 for length in loops) >= 2 * WIDE["stages"], loops


def test_multistage_converts_each_nibble_once(tools):
    """Two row tiles: 16 words for each 128 k in the loop, and the low nibbles of the first 64 k before it."""
    count = counter(sass(compile_request(request(*CASES["tall"][:3]))))
    assert count(r"SHF\.R\.U32\.HI R\d+, RZ, 0x4, R\d+") in range(16, 16 + 8)  # and some of addresses
    assert count(r"LOP3\.LUT R\d+, R\d+(\.reuse)?, 0xf0f0f0f, RZ, 0xc0") == 32 + 8
    assert count(r"LOP3\.LUT R\d+, R\d+(\.reuse)?, 0x80808080, RZ, 0x3c") in range(32, 32 + 9)


def check_releases(source: str) -> None:
    """In CUDA text, between the last load from shared memory and an arrive that gives a stage back, the warp meets: one
    lane arrives for all. At the top of a loop that loads, its bottom may have been the last."""
    met, arrives = True, 0
    lines = source[source.index("main_kernel(") :].splitlines()
    for i, line in enumerate(lines):
        loop = re.match(r"( *)for \(", line)
        body = lines[i : lines.index(loop[1] + "}", i)] if loop else [line]
        if any("tz_lds" in inner for inner in body):
            met = False
        elif re.search(r"\btz_(syncwarp|wg_sync|signal|await)\(", line):
            met = True
        elif "tz_arrive(" in line:
            arrives += 1
            assert met, line
    assert arrives


def test_a_stage_is_released_only_after_its_wgmmas(tools):
    """Between the last load of packed words and the arrive that gives the stage back stands a wait for wgmma."""
    folder = compile_request(request(*CASES["wide"][:3]))
    check_releases((folder / "kernel.cu").read_text())
    lines = sass(folder)
    first, last = (f(i for i, line in enumerate(lines) if line.startswith("IGMMA")) for f in (min, max))
    seen, arrives = "", 0
    for line in lines[first : last + 1]:
        if line.startswith(("LDS.128", "WARPGROUP.DEPBAR")):
            seen = line
        elif line.startswith("SYNCS.ARRIVE"):
            arrives += 1
            assert seen.startswith("WARPGROUP.DEPBAR")
    assert arrives


@pytest.mark.parametrize(
    ("program", "changes", "argument"),
    [
        (stream_k, WIDE | {"block_tokens": 64, "group": 48}, "group"),
        (stream_k, WIDE | {"block_tokens": 64, "k": 650}, "k"),
        (stream_k, WIDE | {"block_tokens": 64, "stages": 1}, "stages"),
        (stream_k, WIDE | {"block_tokens": 256}, "block_tokens"),
        (stream_k, WIDE | {"block_tokens": 64, "dequantization": "vadd4"}, "dequantization"),
        (stream_k, WIDE | {"block_tokens": 64, "out_dtype": "float32"}, "out_dtype"),
        (stream_k, WIDE | {"block_tokens": 64, "out_dtype": "int32", "bias": True}, "bias"),
        (multistage, MULTISTAGE | {"block_tokens": 40}, "block_tokens"),
        (multistage, MULTISTAGE | {"warps": 5}, "warps"),
        (multistage, MULTISTAGE | {"stages": 1}, "stages"),
        (multistage, MULTISTAGE | {"stages": 30}, "stages"),
        (multistage, MULTISTAGE | {"block_tokens": 256}, "row_blocks"),
        (multistage, MULTISTAGE | {"kc": 6}, "kc"),
        (small_batch, {"token_tiles": 1, "kc": 2, "nc": 8, "warps": 4, "chunk": 1, "stages": 2}, "warps"),
    ],
)
def test_refusals(program, changes, argument):
    with pytest.raises(ArgumentError) as error:
        program.build(Target.parse("sm_90a"), **(FACTS | changes))
    assert error.value.argument == argument
