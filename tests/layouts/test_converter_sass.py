"""Device sources compiled for sm_80 and sm_90a; their SASS instructions counted against what converters declare."""

import collections
import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from terrazzo.layouts import CONVERTERS

pytestmark = pytest.mark.compiles

# instructions that do arithmetic; moves, loads, stores, addresses and control are not conversion
ARITHMETIC = {"LOP3", "SHF", "PRMT", "IMAD", "IADD3", "LEA", "HADD2", "HMUL2", "HFMA2", "FADD", "F2FP", "VIADD", "FFMA"}
MOVE = re.compile(
    r"\.MOV\b|\bR\d+, (?:-RZ, RZ|RZ, RZ), "
)  # constants reach registers as IMAD.MOV or HFMA2 -RZ, RZ, imm
FEW, MANY = 4, 12  # words converted by two kernels: their difference has no constants or addresses in it


def tool(name: str) -> str:
    """Path of a CUDA tool: on PATH, under CUDA_HOME, or in the wheels; skips with the remedy if there is none."""
    spec = importlib.util.find_spec("nvidia")
    wheels = [Path(root) / "cu13" / "bin" for root in (spec.submodule_search_locations if spec else [])]
    homes = [Path(os.environ[key]) / "bin" for key in ("CUDA_HOME", "CUDA_PATH") if key in os.environ]
    for folder in (None, *homes, *wheels, Path("/usr/local/cuda/bin")):
        found = shutil.which(name, path=str(folder) if folder else None)
        if found:
            return found
    package = {"nvcc": "terrazzo[compile]"}.get(name, f"nvidia-cuda-{name}")
    pytest.skip(f"{name} was not found; pip install '{package}'")


def kernel(converter, words: int) -> str:
    params = "".join(f", unsigned {name}" for name in converter.params)
    call = "".join(f", {name}" for name in converter.params)
    o = converter.outputs
    return f"""extern "C" __global__ void {converter.name}__{words}(const unsigned* x, unsigned* y{params}) {{
    #pragma unroll
    for (int i = 0; i < {words}; ++i) {{
        unsigned r[{o}];
        {converter.device_name}(x[i], r{call});
        #pragma unroll
        for (int j = 0; j < {o}; ++j) y[i * {o} + j] = r[j];
    }}
}}
"""


@pytest.fixture(scope="module", params=["sm_80", "sm_90a"])
def counts(request, tmp_path_factory) -> dict[str, collections.Counter]:
    """Arithmetic instructions of MANY - FEW words of every converter, by opcode."""
    nvcc, nvdisasm = tool("nvcc"), tool("nvdisasm")
    folder = tmp_path_factory.mktemp("sass")
    source, cubin = folder / "all.cu", folder / "all.cubin"
    plain = [c for c in CONVERTERS.values() if c.instructions]
    source.write_text("".join(c.device_source + kernel(c, FEW) + kernel(c, MANY) for c in plain))
    # restrict: stores must not force later loads and conversions apart
    source.write_text(source.read_text().replace("unsigned* x", "unsigned* __restrict__ x"))
    subprocess.run([nvcc, "-cubin", f"-arch={request.param}", "-o", cubin, source], check=True, capture_output=True)
    text = subprocess.run([nvdisasm, "-c", cubin], check=True, capture_output=True, text=True).stdout
    found: dict[str, collections.Counter] = {}
    for part in text.split(".section\t.text.")[1:]:
        counter = collections.Counter()
        for line in re.findall(r"/\*[0-9a-f]{4,5}\*/\s+(.*?);", part):
            opcode = re.sub(r"^@!?U?P\w+\s+", "", line).split()[0]
            if opcode.split(".")[0] in ARITHMETIC and not MOVE.search(line):
                counter[opcode.split(".")[0]] += 1
        found[re.split(r"[,\s]", part, maxsplit=1)[0]] = counter
    result = {}
    for c in plain:
        difference = found[f"{c.name}__{MANY}"]
        difference.subtract(found[f"{c.name}__{FEW}"])
        result[c.name] = difference
    return result


def test_declared_instructions_are_the_compiled_ones(counts):
    seen = {name: sum(counter.values()) / (MANY - FEW) for name, counter in counts.items()}
    assert seen == {name: CONVERTERS[name].instructions for name in counts}


@pytest.mark.parametrize(
    "name,expected",
    [
        ("u4_f16_subnormal", {"LOP3": 4, "SHF": 1}),
        ("u4_f16_magic", {"LOP3": 4, "SHF": 1, "half": 4}),
        ("u4_f16_exact", {"LOP3": 4, "SHF": 1, "half": 8}),
        ("u4_bf16_biased", {"LOP3": 4, "SHF": 3}),
        ("u2_f16_subnormal", {"LOP3": 8, "SHF": 1}),
        ("u4_s8_lqq", {"LOP3": 4, "SHF": 1, "IMAD": 2}),
        ("s4_s8_lqq", {"LOP3": 4, "SHF": 1, "IMAD": 2}),
        ("u4_u8_lqq", {"LOP3": 2, "SHF": 1, "IMAD": 2}),
        ("s4_s8_x16", {"LOP3": 2, "SHF": 1}),
    ],
)
def test_hot_converters_compile_to_the_planned_instructions(counts, name, expected):
    words = MANY - FEW
    got = {opcode: count / words for opcode, count in counts[name].items() if count}
    half = sum(got.pop(opcode, 0) for opcode in ("HADD2", "HMUL2", "HFMA2"))
    if half:
        got["half"] = half
    if "SHF" in expected and "IMAD" not in expected:
        got["SHF"] = got.get("SHF", 0) + got.pop("IMAD", 0)  # ptxas may shift left by an IMAD.SHL
    if "IADD3" in got:
        got["IMAD"] += got.pop("IADD3")  # sm_90 adds by IMAD.IADD
    assert got == expected
