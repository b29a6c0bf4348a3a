"""The programs take codes of 8 bits from the format alone: a format that only this test knows, run on the CPU."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import w4a16_on_cpu
from emulated_cases import cases
from terrazzo.layouts.converters import CONVERTERS, Converter, arith
from terrazzo.layouts.converters.base import mul_f16, register, sub_f16
from terrazzo.layouts.fragment import Fragment
from terrazzo.layouts.packed import derive
from terrazzo.lowering.toolchain import toolchain
from terrazzo.ops.linear import multistage, small_batch, stream_k
from terrazzo.ops.products import codes as own
from terrazzo.ops.products import ways
from terrazzo.ops.w4a16 import QuantizedWeight
from terrazzo.schedules.multistage import Multistage
from terrazzo.schedules.small_batch import SmallBatch
from terrazzo.schedules.stream_k import StreamK
from w4a16_on_cpu import Program

from tests.gpu.oracles import Spec
from tests.tools.kernel_digest import text_of

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(bool(toolchain().missing()), reason=f"cannot compile: {toolchain().missing()} missing"),
]
NAME, MAGIC = "offset_bytes", 1024 + 128
CODES = own.Codes(NAME, 8, (32, 64, 128), True, 128, ("float16",))
WAYS = (
    ways.Way("exact", ways.FOLD, {"float16": f"{NAME}_exact"}),
    ways.Way("post", ways.POST, {"float16": f"{NAME}_plain"}),
)
"""Codes 0..255 that stand for code - 128, a scale for each group."""


def converter(form: str) -> Converter:
    """Bytes under 1024 in float16, less 1024 + 128; in the form "exact" times the scale of their row."""
    scaled = form == "exact"
    selectors = (0x4240, 0x4341)
    lines = [f"out[{o}] = __byte_perm(w, 0x64646464u, {selectors[o]:#06x});" for o in range(2)]
    lines += [sub_f16(f"out[{o}]", f"out[{o}]", f"{int(arith.pair(arith.half(MAGIC))):#010x}u") for o in range(2)]
    lines += [mul_f16(f"out[{o}]", f"out[{o}]", f"s{o}") for o in range(2)] if scaled else []

    def emulation(words: np.ndarray, *params: np.ndarray) -> list[np.ndarray]:
        magic = arith.pair(arith.half(MAGIC))
        out = [arith.hsub2(arith.prmt(words, 0x64646464, selector), magic) for selector in selectors]
        return [arith.hmul2(out[o], params[1 + 2 * o]) for o in range(2)] if scaled else out

    params = ("b0", "s0", "b1", "s1") if scaled else ()
    return Converter(f"{NAME}_{form}", "u8", "float16", 8, 16, emulation, "\n".join(lines), 6, params)


@pytest.fixture(autouse=True)
def known(monkeypatch):
    """The format and its converters are registered for a test; compiling happens in this process."""
    names = (f"{NAME}_exact", f"{NAME}_plain")
    monkeypatch.setitem(own.WIDE, NAME, CODES)
    monkeypatch.setitem(ways.WAYS, NAME, WAYS)
    for form in ("exact", "plain"):
        register(converter(form))
    monkeypatch.setattr(w4a16_on_cpu, "cuda_text", text_of)
    yield
    for name in names:
        del CONVERTERS[name]


CASES = {  # program, schedule, target, M, numerics
    "small_batch": (small_batch, SmallBatch(1, 1, 4, 2, 1, 2), "sm_90a", 4, "exact"),
    "stream_k": (stream_k, StreamK(32, 1, 1, 2, 128), "sm_90a", 20, "exact"),
    "small_batch, post": (small_batch, SmallBatch(1, 1, 4, 2, 1, 2), "sm_90a", 3, "post"),
    "stream_k, two row blocks, post": (stream_k, StreamK(16, 1, 2, 3, 64), "sm_90a", 20, "post"),
    "multistage, post": (multistage, Multistage(32, 4, 2, 3), "sm_80", 20, "post"),
    "multistage": (multistage, Multistage(32, 4, 2, 3), "sm_80", 20, "exact"),
}


@pytest.mark.parametrize("name", cases(CASES, ("stream_k, two row blocks, post",)))  # FP8 has the others
def test_bytes_with_scales_of_groups(name, tmp_path):
    program, schedule, target, m, numerics = CASES[name]
    n, k, group = 128, 256, 128
    spec = Spec(n, k, group, symmetric=True)
    rng = torch.Generator().manual_seed(7)
    codes = torch.randint(0, 256, (n, k), generator=rng, dtype=torch.uint8)
    scales = 2.0 ** torch.randint(-8, -4, (n, k // group), generator=rng)
    x = torch.randint(-2, 3, (m, k), generator=rng).half()
    # four words of a load are two k16 steps; the blocks of one k stand side by side
    layout = derive(Fragment.wgmma_a(16), CONVERTERS[f"{NAME}_exact"], 8, 4, ((0, 0), (0, 1)), "atom", "kr")
    assert (layout.block_rows, layout.block_k) == (own.BLOCK_ROWS, CODES.block_k)
    of_scales = QuantizedWeight.canonical(codes & 15, scales.half(), None, group_size=group).pack()
    packed = SimpleNamespace(words=layout.pack(codes).contiguous(), params=of_scales.params, bias=None)
    assert packed.words.shape == (CODES.blocks(k), n // 64, own.BLOCK_WORDS)
    run = Program(program, schedule, spec, numerics, tmp_path, target=target, weight=NAME)
    y = run.stream_k(x, packed, 2, 1) if program is stream_k else getattr(run, name.partition(",")[0])(x, packed)
    expected = x.double() @ ((codes.double() - 128) * scales.repeat_interleave(group, dim=1)).T
    assert torch.equal(y, expected.half()), "integers and powers of two: no sum rounds"
