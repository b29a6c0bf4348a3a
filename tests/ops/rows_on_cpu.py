"""Programs that make rows (RMSNorm, gated activations) on the CPU: what their CUDA text needs, and what they return."""

from __future__ import annotations

from pathlib import Path

import torch
from cuda_on_cpu import CpuKernel, cuda_text
from terrazzo.lowering.request import KernelRequest
from terrazzo.ops import quantized
from terrazzo.ops.tiles import row_outputs
from test_w4a8_quantize_rows import SHIMS, primitives

MORE_SHIMS = r"""
typedef unsigned char uchar;
struct uint4 { unsigned x, y, z, w; };
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
#define __expf expf
static float __fdividef(float a, float b) { return a / b; }
"""
POISON = 99


def emulated_text(text: str) -> tuple[str, list[str]]:
    """A kernel's text, and what stands in front of it: named primitives in plain C, the program's own functions."""
    own = text[text.index("// 8 values of 16 bits -> floats") : text.index("#if defined(_MSC_VER)")]
    return text, [SHIMS + MORE_SHIMS + primitives(), own]


def emulated(request: KernelRequest, folder: Path) -> CpuKernel:
    params = dict(request.params)
    cluster = params["parts"] if params["output"] in row_outputs.FORMS else 1
    return CpuKernel(*emulated_text(cuda_text(request)), 32 * params["warps"] * params["rows"], folder, cluster)


def outputs(m: int, k: int, dtype: torch.dtype, output: str, column_scales: bool) -> dict[str, torch.Tensor]:
    """Poisoned Y, Q, XS and RS for m rows and one more, which must stay as it is."""
    codes, blocks = output.partition("_")[0], -(-k // 128)
    one = output == codes
    if column_scales:
        scales = torch.full((blocks, -(-m // 4) * 4), float("nan"))
    else:
        scales = torch.full((m + 1,) if one else (m + 1, blocks), float("nan"))
    return {
        "Y": torch.full((m + 1, k), float("nan"), dtype=dtype),
        "Q": torch.full((m + 1, quantized.padded(k)), POISON, dtype=torch.int8),
        "XS": scales,
        "RS": torch.full((m + 1,), POISON, dtype=torch.int32),
    }


def check_codes(made: dict[str, torch.Tensor], expected, rows: list[int], exact: bool) -> None:
    """Codes and scales of `rows` are those of the reference: to the bit, or 1 in 10^4 off by one step."""
    integer = expected.codes == "int8"
    seen = made["Q"][rows] if integer else made["Q"][rows].view(torch.float8_e4m3fn).float()
    wanted = expected.q[rows] if integer else expected.q[rows].float()
    # e4m3 codes of zeros have a sign
    steps = (seen.int() - wanted.int()).abs() if integer else (seen != wanted).int()
    assert int(steps.max()) <= (0 if exact else 1) and float((steps > 0).float().mean()) <= 1e-4
    scales = made["XS"].T if getattr(expected, "column_scales", False) else made["XS"]
    wanted = expected.scales.T if getattr(expected, "column_scales", False) else expected.scales
    torch.testing.assert_close(scales[rows], wanted[rows], rtol=3e-6, atol=0)
    if integer and expected.scales.ndim == 1:
        sums = made["Q"].sum(1, dtype=torch.int32)
        assert torch.equal(made["RS"][rows], sums[rows])
        assert int(made["RS"][-1]) == POISON
    assert bool((made["Q"][-1] == POISON).all())
