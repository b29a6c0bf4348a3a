"""The program that quantizes activations by blocks: machine code; its CUDA text on the CPU against the reference."""

from __future__ import annotations

import pytest
import rows_on_cpu
import torch
from cuda_on_cpu import CpuKernel, cuda_text
from emulated_cases import Compiled, cases
from terrazzo.lowering import KernelReport, compile_request
from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.targets import Target
from terrazzo.lowering.toolchain import toolchain
from terrazzo.ops import activation, w4ax
from terrazzo.ops.linear.quantize import quantize_blocks
from terrazzo.ops.tiles.cuda.blocks import ROW_BLOCKS
from terrazzo.ops.tiles.cuda.rows import GATED, ROW_OUTPUTS, ROW_SUMS
from terrazzo.ops.w4ax import activations, reference
from test_w4a8_quantize_rows import SHIMS, primitives

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(bool(toolchain().missing()), reason=f"cannot compile: {toolchain().missing()} missing"),
]
CASES = {  # target, K, INT8 blocks, dtype, permuted, norm, granularity
    "planes": ("sm_80", 640, 2, "float16", True, False, "block"),
    "wide": ("sm_90a", 4300, 1, "bfloat16", True, True, "block"),
    "tokens": ("sm_80", 333, 1, "bfloat16", True, False, "token"),
    "static": ("sm_90a", 512, 4, "float16", False, False, "static"),
    "two levels": ("sm_90a", 900, 2, "float16", True, False, "two_level"),
    "all int4": ("sm_80", 200, 0, "float16", False, True, "block"),
}
QUICK = ("planes", "two levels")
CASES |= {
    "two levels, planes": ("sm_80", 640, 2, "bfloat16", True, True, "two_level"),
    "two levels of an int8 row": ("sm_90a", 640, 5, "bfloat16", False, False, "two_level"),
    "two levels of an int4 row": ("sm_90a", 640, 0, "bfloat16", False, True, "two_level"),
}
FRONTED = {  # the same, and what comes with it
    "sum and norm": ("sm_90a", 904, 2, "bfloat16", True, True, "two_level", "residual"),
    "gate": ("sm_90a", 2312, 5, "float16", True, False, "two_level", "silu"),
    "sum": ("sm_80", 640, 1, "float16", True, False, "block", "residual"),
    "gate by erf": ("sm_80", 640, 2, "bfloat16", True, False, "two_level", "gelu"),
}
MORE_SHIMS = r"""
typedef unsigned char uchar;
struct int4 { int x, y, z, w; };
static int4 __ldg(const int4 *p) { int4 v; memcpy(&v, p, 16); return v; }
struct uint4 { unsigned x, y, z, w; };
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
#define __expf expf
static float __fdividef(float a, float b) { return a / b; }
"""


def request(name: str):
    arch, k, blocks8, dtype, permuted, norm, granularity, *front = (CASES | FRONTED)[name]
    facts = dict(dtype=dtype, permuted=permuted, norm=norm, granularity=granularity, wide=arch == "sm_90a")
    return activations.plan(600, k, blocks8, **facts, front=(*front, "none")[0], target=Target.parse(arch))


def rows_in_front(name: str, x: torch.Tensor, folder) -> torch.Tensor:
    """What the quantizer must see: the residual sum, or what the kernel of the gate makes."""
    *_, front = FRONTED[name]
    if front == "residual":
        return x[0] + x[1]
    gate = torch.cat(list(x), dim=1)
    (made,) = activation.kernel_requests(
        x.shape[2], m=len(gate), dtype=str(x.dtype)[6:], activation=front, target=Target.parse("sm_90a")
    )
    h = rows_on_cpu.outputs(len(gate), x.shape[2], x.dtype, "none", False)
    empty = torch.zeros(1)
    kernel = rows_on_cpu.emulated(made, folder)
    kernel(
        (len(gate) * dict(made.params)["parts"], 1, 1), X=gate, S=empty, OFFSETS=empty.int(), alpha=0.0, limit=0.0,
        m=len(gate), mp=8, **h,
    )  # fmt: skip
    return h["Y"][: len(gate)]


@pytest.fixture(scope="module")
def compiled():
    return Compiled(request, QUICK)


@pytest.mark.parametrize("name", cases(CASES, QUICK))
def test_machine_code(compiled, name):
    report = KernelReport.read(compiled[name] / "report.json")
    assert (report.spill_stores, report.spill_loads, report.stack) == (0, 0, 0)
    assert report.registers <= 64
    params = dict(request(name).params)
    assert report.smem_dynamic + report.smem_static <= quantize_blocks.shared_bytes(params["k"], params["warps"])
    if not report.instructions:
        pytest.skip(report.note)
    vectors = -(-params["k"] // 128) * 16  # of 16 bytes in a row
    assert report.count(r"LDG\.E\.NA\.128") == -(-vectors // (32 * params["warps"]))  # x is read once
    rounded = params["granularity"] == "two_level" and params["blocks8"] * 128 < params["k"]  # factors of INT4 blocks
    assert not report.count("F2I") and not report.count("I2F") and report.count("FRND") == rounded


@pytest.mark.parametrize("name", cases(CASES, QUICK))
def test_the_cuda_text_computes_the_reference(compiled, name, tmp_path):
    arch, k, blocks8, dtype, permuted, norm, granularity = CASES[name]
    params = dict(request(name).params)
    source = (compiled[name] / "kernel.cu").read_text()
    kernel = CpuKernel(source, [SHIMS, MORE_SHIMS, primitives(), ROW_BLOCKS], 32 * params["warps"], tmp_path)
    rng, m = torch.Generator().manual_seed(k), 6
    plan = w4ax.plan_blocks(torch.rand(k, generator=rng) + 0.1, floor=blocks8, ceiling=blocks8)
    permutation = plan.permutation if permuted else None
    assert (permutation is not None) == permuted
    x = (torch.randn(m, k, generator=rng) * torch.exp(torch.randn(m, 1, generator=rng))).to(getattr(torch, dtype))
    x[1], x[2, :: k // 3], x[4, 5], x[5, k - 1] = 0, 40.0, float("nan"), float("inf")
    gain = torch.randn(k, generator=rng) if norm else None
    static = torch.rand(plan.blocks, generator=rng) * 0.1 + 0.02 if granularity == "static" else None
    arranged = None if gain is None else reference.arrange(gain[None], plan.blocks, permutation)[0].contiguous()
    wide = arch == "sm_90a"
    _, low, high = activations.sizes(m, k, blocks8, wide)
    q4 = torch.full((m + 1, low), 99, dtype=torch.uint8)
    q8, scales = torch.full((m + 1, high), 99, dtype=torch.int8), torch.full((plan.blocks, 8), -7.0)
    values = {
        "X": torch.nn.functional.pad(x, (0, -k % 8)),
        "P": torch.zeros(1, dtype=torch.int32) if permutation is None else permutation,
        "G": torch.zeros(1) if gain is None else arranged,
        "S": torch.zeros(1) if static is None else static,
        "Q4": q4, "Q8": q8, "XS": scales, "eps": 1e-5, "m": m, "mp": 8,
    }  # fmt: skip
    kernel((m, 1, 1), **values)
    assert (q4[m:] == 99).all() and (q8[m:] == 99).all()
    made = w4ax.QuantizedActivations(q4[:m], q8[:m], scales, (m, k), blocks8)
    made.check()
    q, expected = reference.quantize_activations(
        x, blocks8=blocks8, permutation=permutation, rms_weight=gain, eps=1e-5, granularity=granularity,
        static_scales=static, wide=wide,
    )  # fmt: skip
    good = [0, 1, 2, 3]
    assert torch.equal(made.codes()[good], q[good])
    found = made.token_scales()
    if norm:
        torch.testing.assert_close(found[good], expected[good], rtol=2e-6, atol=0)
    else:
        assert torch.equal(found[good], expected[good])
    if static is None:  # NaN and infinity show in the scale of their block
        assert found[4].isnan().any() and not found[5].isfinite().all()
        assert torch.equal(found[4].isfinite(), expected[4].isfinite())
    assert (scales != -7).all()  # the padding is written, too
    weight = w4ax.quantize_weight(torch.randn(3, k, generator=rng), plan)
    again = activations.from_codes(q[good], expected[good], weight.pack(target=arch), granularity)
    assert torch.equal(again.codes(), q[good]) and torch.equal(again.token_scales(), expected[good])
    again.check()


@pytest.mark.parametrize("name", cases(FRONTED, ("sum and norm",)))
def test_codes_are_those_of_what_stands_in_front(name, tmp_path):
    """The residual becomes the sum; codes of sums and gates are those of two kernels, to the bit."""
    arch, k, blocks8, dtype, _, norm, granularity, front = FRONTED[name]
    made, rng, m = request(name), torch.Generator().manual_seed(k), 5
    report = KernelReport.read(compile_request(made) / "report.json")
    assert (report.spill_stores, report.spill_loads, report.stack) == (0, 0, 0)
    sources = [ROW_OUTPUTS, ROW_SUMS if front == "residual" else GATED]
    shims = [SHIMS, MORE_SHIMS, primitives(), *sources, ROW_BLOCKS]
    (tmp_path / "codes").mkdir()
    kernel = CpuKernel(cuda_text(made), shims, 32 * dict(made.params)["warps"], tmp_path / "codes")
    plan = w4ax.plan_blocks(torch.rand(k, generator=rng) + 0.1, floor=blocks8, ceiling=blocks8)
    x = (torch.randn(2, m, k, generator=rng) * torch.exp(torch.randn(2, m, 1, generator=rng))).to(getattr(torch, dtype))
    x[:, 1] = 0
    wanted = rows_in_front(name, x, tmp_path)
    gain = torch.randn(k, generator=rng) if norm else None
    arranged = None if gain is None else reference.arrange(gain[None], plan.blocks, plan.permutation)[0].contiguous()
    wide = arch == "sm_90a"
    _, low, high = activations.sizes(m, k, blocks8, wide)
    q4, scales = torch.full((m + 1, low), 99, dtype=torch.uint8), torch.full((plan.blocks, 8), -7.0)
    q8, residual = torch.full((m + 1, high), 99, dtype=torch.int8), torch.cat([x[1], x[1, :1]])
    given = {"R": residual} if front == "residual" else {}
    kernel(
        (m, 1, 1), X=x[0] if front == "residual" else torch.cat(list(x), dim=1), P=plan.permutation,
        G=torch.zeros(1) if arranged is None else arranged, S=torch.zeros(1), Q4=q4, Q8=q8, XS=scales, eps=1e-5, m=m,
        mp=8, **given,
    )  # fmt: skip
    if front == "residual":
        assert torch.equal(residual[:m], wanted) and torch.equal(residual[m], x[1, 0])
    facts = dict(blocks8=blocks8, permutation=plan.permutation, rms_weight=gain, eps=1e-5, granularity=granularity)
    q, expected = reference.quantize_activations(wanted, **facts, wide=wide)
    found = w4ax.QuantizedActivations(q4[:m], q8[:m], scales, (m, k), blocks8)
    assert torch.equal(found.codes(), q)
    assert torch.equal(found.token_scales(), expected) or norm
    torch.testing.assert_close(found.token_scales(), expected, rtol=2e-6, atol=0)
    assert (q4[m:] == 99).all() and (q8[m:] == 99).all() and (scales != -7).all()


@pytest.mark.parametrize(
    ("changes", "argument"),
    [({"front": "relu"}, "front"), ({"front": "residual", "k": 333}, "front"), ({"dtype": "float32"}, "dtype"),
     ({"granularity": "row"}, "granularity"), ({"blocks8": 9}, "blocks8"), ({"warps": 0}, "warps")],
)  # fmt: skip
def test_what_no_program_can_do_is_refused(changes, argument):
    with pytest.raises(ArgumentError) as caught:
        quantize_blocks.build(Target.parse("sm_80"), **(dict(request("planes").params) | changes))
    assert caught.value.argument == argument
