"""The multistage program: what it compiles to for sm_80 and sm_89, and which configurations it refuses."""

import shutil

import pytest
from terrazzo.lowering import KernelReport, KernelRequest, Target, compile_request
from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.toolchain import find_cuda_tool, toolchain
from terrazzo.ops.linear import multistage
from terrazzo.ops.linear.operand import Operand

BASE = dict(n=4096, k=4096, group=128, symmetric=False, scale_dtype="float16", dtype="float16", numerics="exact")
WIDE = dict(block_tokens=128, warps=8, row_blocks=2, stages=3)
RAGGED = dict(n=2890, k=2892, group=32, numerics="post", dtype="bfloat16", scale_dtype="float32", bias=True)


def request(target: str, **params) -> KernelRequest:
    params = {**BASE, "bias": False, **params}
    return KernelRequest(
        "w4a16.multistage", "terrazzo.ops.linear.multistage:build", params, target, multistage.PASS_CONFIGS
    )


@pytest.mark.compiles
@pytest.mark.skipif(bool(toolchain().missing()), reason=f"cannot compile: {toolchain().missing()} missing")
@pytest.mark.skipif(find_cuda_tool("cuobjdump") is None, reason="no cuobjdump")
@pytest.mark.parametrize(
    ("target", "params"),
    [
        ("sm_80", WIDE),
        ("sm_80", {**RAGGED, "block_tokens": 64, "warps": 4, "row_blocks": 2, "stages": 4, "kc": 3}),
        ("sm_89", {"block_tokens": 64, "warps": 4, "row_blocks": 2, "stages": 4}),
        ("sm_89", {"block_tokens": 16, "warps": 4, "row_blocks": 2, "stages": 4, "kc": 2, "experts": 40}),
    ],
    ids=["wide", "ragged", "ada", "experts"],
)
def test_machine_code(target, params, tmp_path, monkeypatch):
    monkeypatch.setenv("TERRAZZO_CACHE_DIR", str(tmp_path))
    report = KernelReport.read(compile_request(request(target, **params)) / "report.json")
    shutil.rmtree(tmp_path)
    assert report.tensor_instructions == ["HMMA.16816.F32" + ".BF16" * (params.get("dtype") == "bfloat16")]
    tokens = params["block_tokens"] // params.get("token_warps", 1)
    assert report.count("HMMA") % (params["row_blocks"] * tokens) == 0  # whole units of eight passes, each MMA once
    assert report.count("LDSM") >= 9 * tokens // 16  # and before them the fragments of the first pass
    assert report.count("LDGSTS") > 0 and report.count("LDS.128") > 0
    assert report.registers <= 255 and report.stack == report.spill_stores == report.spill_loads == 0
    assert report.count("LDL|STL") == 0
    op = Operand(*({**BASE, **params}[f] for f in ("group", "symmetric", "scale_dtype", "dtype", "numerics")))
    tile = {f: params[f] for f in ("block_tokens", "warps", "row_blocks", "stages", "kc") if f in params}
    assert report.smem_static + report.smem_dynamic == multistage.shared_bytes(op, multistage.Tile(**tile))
    assert report.smem_static + report.smem_dynamic <= Target.parse(target).smem_per_block


@pytest.mark.parametrize(
    ("argument", "params"),
    [
        ("block_tokens", {"block_tokens": 40}),
        ("block_tokens", {"block_tokens": 48, "token_warps": 2}),
        ("warps", {"warps": 5}),
        ("warps", {"warps": 32}),
        ("stages", {"stages": 1}),
        ("stages", {"stages": 6}),
        ("row_blocks", {"row_blocks": 4}),
        ("row_blocks", {"row_blocks": 2, "numerics": "post"}),
        ("kc", {"kc": 33}),
        ("kc", {"kc": 0}),
        ("numerics", {"numerics": "exact", "scale_dtype": "float32"}),
    ],
)
def test_configurations_that_cannot_run_are_refused(argument, params):
    pytest.importorskip("tilelang")
    with pytest.raises(ArgumentError, match=argument):
        multistage.build(Target.parse("sm_89"), **{**BASE, "bias": False, **WIDE, **params})
