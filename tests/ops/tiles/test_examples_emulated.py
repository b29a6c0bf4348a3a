"""The teaching programs of examples/, in TileLang's words alone: right on the emulator, native on both targets."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cuda_on_cpu import LDMATRIX, SANITIZER, CpuKernel, emulator
from terrazzo.lowering.toolchain import find_cuda_tool, find_nvcc, import_tilelang, toolchain
from wgmma_on_cpu import SHIMS, translated

EXAMPLES = Path(__file__).parents[3] / "examples"
TOKENS = 32
LOWER = """
import sys
from terrazzo.lowering.toolchain import import_tilelang
tilelang = import_tilelang()
from tvm.target import Target
import {name} as example
from tile_w4a16 import OWN_WARPS
target = Target({{"kind": "cuda", "arch": "{arch}"}})
with tilelang.transform.PassContext(opt_level=3, config=OWN_WARPS), target:
    program = example.{name}({arguments})
    made = tilelang.lower(program, target=target, enable_host_codegen=False, enable_device_compile=False)
sys.stdout.write(made.kernel_source)
"""


@pytest.fixture(scope="module")
def examples():
    import_tilelang()
    sys.path.append(str(EXAMPLES))
    try:
        import tile_kv_decode
        import tile_w4a16
    finally:
        sys.path.remove(str(EXAMPLES))
    return SimpleNamespace(w4a16=tile_w4a16, decode=tile_kv_decode)


def emulated(name: str, arch: str, arguments: str, folder: Path) -> CpuKernel:
    """A program of an example on the CPU. It is lowered in a process of its own, as z3 does not survive sanitizers."""
    env = {key: value for key, value in os.environ.items() if key not in ("LD_PRELOAD", SANITIZER)}
    command = [sys.executable, "-c", LOWER.format(name=name, arch=arch, arguments=arguments)]
    done = subprocess.run(command, cwd=EXAMPLES, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    text = done.stdout.replace("__grid_constant__ const CUtensorMap Y_desc", "const TensorMap* Y_desc")
    shims = [LDMATRIX, emulator("tile_words")]
    if arch == "sm_90a":
        shims += [SHIMS, emulator("tile_store").replace("@ROWS@", str(TOKENS))]
        text = translated(text, 0)
    return CpuKernel(re.sub(r"\bhalf_t\b", "f16", text), shims, 256, folder)


@pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_80", marks=pytest.mark.slow)])
def test_the_product_is_right(arch, examples, tmp_path):
    """Integers, so that sums are exact; scales are powers of two; the last tile of tokens is not full."""
    n, k, m, w4a16 = 256, 512, 41, examples.w4a16
    random = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, generator=random)
    x = torch.randint(-4, 5, (m, k), generator=random).half()
    s = 2.0 ** torch.randint(-3, 2, (k // w4a16.GROUP, n), generator=random).half()
    words = torch.from_numpy(w4a16.BLOCK.pack(codes.numpy()).view("int32"))
    y = torch.full((m, n), float("nan")).half()
    kernel = emulated("tile_w4a16", arch, f"{n}, {k}, block_tokens={TOKENS}", tmp_path)
    box = torch.tensor([y.data_ptr(), m, 2 * n])
    kernel((-(-m // TOKENS), n // w4a16.BN, 1), X=x, W=words, S=s, Y=y, Y_desc=box, m=m)
    weight = (codes.double() - w4a16.ZERO) * s.double().T.repeat_interleave(w4a16.GROUP, 1)
    assert torch.equal(y, (x.double() @ weight.T).half())


@pytest.mark.parametrize("arch", [pytest.param("sm_90a", marks=pytest.mark.slow), "sm_80"])
def test_decode_is_right(arch, examples, tmp_path):
    """Compared with float64 over the same codes; probabilities are rounded to 11 bits, as in the program."""
    decode = examples.decode
    pairs, blocks = 2, 3
    tokens, random = blocks * decode.TOKENS, torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (2, pairs, blocks, decode.TOKENS, decode.DIM), dtype=torch.uint8, generator=random)
    scales = 0.02 + 0.1 * torch.rand(2, pairs, tokens, generator=random)
    q = torch.randn(pairs, decode.HEADS, decode.DIM, generator=random).half()
    packed = [
        torch.stack([torch.stack([decode.packed(b, values) for b in pair]) for pair in part])
        for values, part in enumerate(codes)
    ]
    out = torch.full(q.shape, float("nan")).half()
    kernel = emulated("tile_kv_decode", arch, f"{pairs}, {blocks}", tmp_path)
    kernel((pairs, 1, 1), Q=q, K=packed[0], KS=scales[0], V=packed[1], VS=scales[1], O=out)
    right = decode.reference(q, codes, scales)
    assert float((out - right).abs().max()) < 2e-3 * float(right.abs().max())


@pytest.mark.slow
@pytest.mark.compiles
@pytest.mark.skipif(bool(toolchain().missing()), reason=f"cannot compile: {toolchain().missing()} missing")
@pytest.mark.parametrize(("arch", "product"), [("sm_90a", "HGMMA.64x"), ("sm_80", "HMMA.16816.F32")])
@pytest.mark.parametrize(("name", "sizes"), [("tile_w4a16", (1024, 1024)), ("tile_kv_decode", (64, 32))])
def test_machine_code_has_tensor_cores_and_no_spills(name, sizes, arch, product, examples, tmp_path):
    root = Path(import_tilelang().__file__).parent
    program = getattr(examples.decode, name, None) or getattr(examples.w4a16, name)
    (tmp_path / "kernel.cu").write_text(examples.w4a16.compiled(program(*sizes), arch).get_kernel_source())
    include = [f"-I{root / folder}" for folder in ("src", "3rdparty/cutlass/include")]
    command = [find_nvcc(), f"-arch={arch}", "-std=c++17", "-w", "-cubin", "-Xptxas", "-v", *include, "kernel.cu"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "0 bytes spill stores, 0 bytes spill loads" in done.stderr
    sass = subprocess.run(
        [find_cuda_tool("cuobjdump"), "-sass", "kernel.cubin"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert sass.stdout.count(product) >= 4
