"""Codes that decode makes of its outputs: kernels on the CPU, from their CUDA text, against the quantizer's rule."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from emulated_cases import cases
from rows_on_cpu import MORE_SHIMS
from terrazzo.lowering.toolchain import toolchain
from terrazzo.ops.attention.decoding import codes as output_codes
from terrazzo.ops.attention.decoding import reference
from terrazzo.ops.tiles.cuda.rows import ROW_OUTPUTS
from terrazzo.schedules.attention import Decode, WarpgroupDecode
from test_attention_emulated import emulate, on_the_cpu  # noqa: F401
from test_w4a8_quantize_rows import SHIMS, primitives

from tests.gpu.attention_cases import Case, built

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(bool(toolchain().missing()), reason=f"cannot compile: {toolchain().missing()} missing"),
]
LAUNCHES = SHIMS[SHIMS.index("static void cudaTrigger") : SHIMS.index("static int __dp4a")]  # EARLY has its own
SOURCES = (SHIMS.replace(LAUNCHES, "") + MORE_SHIMS + primitives(), ROW_OUTPUTS)
CASES = {  # case, schedule, splits, shares, new tokens of each sequence, codes, smooth, column scales
    "int8": (Case("int4", "int4", lengths=(300, 0, 129)), Decode(1, 4, 2, 3, 1), 1, 0, (), "int8", True, False),
    "int8, splits and clusters": (
        Case("int4", "int4", lengths=(700, 300), group=7), Decode(1, 2, 1, 3, 1), 16, 0, (), "int8", False, False
    ),
    "e4m3, rows in groups and turns": (
        Case("int8", "int4", lengths=(90, 12), group=8, q_len=5, kv_heads=3, head_dim=64, dtype="bfloat16"),
        Decode(2, 1, 1, 3, 1), 2, 0, (), "e4m3", True, False,
    ),
    "int8, long rows": (
        Case("int4", "int4", lengths=(40,), group=7, kv_heads=12, dtype="bfloat16"), Decode(1, 1, 1, 3, 1), 1, 0, (),
        "int8", True, False,
    ),
    "blocks of 128": (
        Case("int4", "int4", lengths=(300, 15), group=3, kv_heads=3, head_dim=64, q_len=2), Decode(1, 2, 2, 3, 1), 2, 0,
        (), "int8_block128", True, False,
    ),
    "blocks of 128, columns": (
        Case("int4", "int4", lengths=(200, 15, 90), group=5, head_dim=256), Decode(1, 2, 1, 2, 1), 3, 0, (),
        "e4m3_block128", False, True,
    ),
    "balanced": (
        Case("int4", "int4", lengths=(900, 64, 130), head_dim=64), Decode(1, 1, 1, 3, 1, ahead=1), 0, 6, (), "int8",
        False, False,
    ),
    "ragged": (
        Case("int4_channel64", "int4", group=8, q_len=5, lengths=(200, 4, 64, 70), head_dim=64), Decode(2, 2, 1, 3, 1),
        2, 0, (1, 3, 0, 5), "int8", True, False,
    ),
    "warpgroups": (
        Case("int4", "int4", group=4, q_len=4, lengths=(300, 20), kv_heads=1), WarpgroupDecode(2, 4, 4, 2, 1), 2, 0, (),
        "int8_block128", False, True,
    ),
}  # fmt: skip
USUAL = ("ragged",)


def poisoned(codes: output_codes.Codes) -> output_codes.Codes:
    for t in (codes.made.q.view(torch.int8), codes.made.scales, getattr(codes.made, "row_sums", None)):
        if t is not None:
            t.fill_(99 if t.dtype != torch.float32 else float("nan"))
    return codes


@pytest.mark.parametrize("name", cases(CASES, USUAL))
def test_codes_are_those_of_a_quantizer_behind_the_kernel(name, tmp_path: Path):
    case, schedule, splits, shares, own, quant, smooth, columns = CASES[name]
    heads, rng = case.kv_heads * case.group, torch.Generator().manual_seed(5)
    factors = torch.rand(heads * case.head_dim, generator=rng) + 0.5 if smooth else None
    like = torch.empty(*((1, sum(own) + 1) if own else (len(case.lengths), case.q_len)), heads, case.head_dim)
    codes = poisoned(output_codes.codes_for(like, quant, factors, columns))
    q, y, _, options = emulate(case, schedule, splits, tmp_path, shares=shares, own=own, codes=codes, more=SOURCES)
    has = torch.ones(q.shape[:2], dtype=torch.bool)
    if own:
        has = torch.arange(case.q_len) >= case.q_len - torch.tensor(own)[:, None]
    expected, _, bound = reference.decode(q, built(case), options)
    assert bool(((y.double() - expected).abs() <= bound)[has].all())
    exact, made, rows = output_codes.encoded(y[has], quant, factors, columns), codes.made, int(has.sum())
    assert torch.equal(made.q.view(torch.int8)[:rows], exact.q.view(torch.int8))
    scales = [t.T if columns else t for t in (made.scales, exact.scales)]
    assert torch.equal(scales[0][:rows], scales[1][:rows])
    if quant == "int8":
        assert torch.equal(made.row_sums[:rows], exact.row_sums)
    if own:  # a row behind the last sequence's stays as it was
        assert bool((made.q.view(torch.int8)[rows:] == 99).all()) and bool(scales[0][rows:].isnan().all())
