"""Experts of W4Ax: the kernel on the CPU from its CUDA text, its machine code, and the host side without a GPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from emulated_cases import cases
from terrazzo.lowering import KernelReport, compile_request
from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.targets import Target
from terrazzo.lowering.toolchain import toolchain
from terrazzo.ops import moe, w4a8, w4ax
from terrazzo.ops.w4ax import activations, reference
from test_w4ax_emulated import launch_wgmma, uniform_activations
from test_w4ax_format import random_weight
from w4ax_tiles import integer_tile

needs_compiler = pytest.mark.skipif(
    bool(toolchain().missing()), reason=f"cannot compile: {toolchain().missing()} missing"
)


def experts_of(count: int, n: int, k: int, blocks8: int, bias: bool = True) -> list[w4ax.QuantizedWeight]:
    """Weights of one plan."""
    made = [random_weight(n, k, blocks8, seed=e, bias=bias, two_level=True) for e in range(count)]
    order = made[0].permutation
    if order is None:
        return made
    codes = [w.codes.masked_fill(order < 0, 0) for w in made]
    return [dataclasses.replace(w, codes=c, permutation=order) for w, c in zip(made, codes)]


def stacked(made: list[w4ax.QuantizedWeight], target: str = "sm_90a") -> w4ax.GroupedWeight:
    return w4ax.GroupedWeight.stack([w.pack(target=target) for w in made])


def offsets_of(counts: tuple[int, ...], before: int) -> torch.Tensor:
    return torch.tensor([before, *counts]).cumsum(0).int()


CASES = {  # tokens of each expert, rows of nobody at both ends, n, k, INT8 blocks, tile, grid, output
    "waves and shares": ((20, 30, 1, 16), (0, 0), 202, 384, 1, integer_tile(16, 2, 2), 9, "float32"),
    "empty experts, all int4": ((0, 5, 0, 0, 40, 1, 0), (2, 1), 130, 333, 0, integer_tile(32, 4, 2), 4, "float16"),
    "wide": ((70, 0, 130), (3, 6), 130, 512, 2, integer_tile(128, 2, 2), 3, "bfloat16"),
    "sums in shared memory": ((9, 130), (0, 3), 130, 512, 1, integer_tile(128, 3, 2), 2, "float32"),
}


@pytest.mark.compiles
@needs_compiler
@pytest.mark.parametrize("name", cases(CASES, ("waves and shares",)))
def test_rows_are_those_of_their_experts(name, tmp_path):
    counts, (before, after), n, k, blocks8, schedule, grid, out_dtype = CASES[name]
    made, m = experts_of(len(counts), n, k, blocks8), sum(counts) + before + after
    offsets, w = offsets_of(counts, before), stacked(made)
    q, scales = uniform_activations(m, made[0])
    x = activations.from_codes(q, scales, w.stacked, "two_level")
    y = launch_wgmma(
        w.stacked, x, schedule, grid, tmp_path, out_dtype=out_dtype, experts=len(counts), sk=offsets, parts=offsets
    )  # fmt: skip
    assert torch.cat([y[:before], y[m - after :]]).isnan().all()
    for e, weight in enumerate(made):
        rows = slice(int(offsets[e]), int(offsets[e + 1]))
        ref = reference.gemm(q[rows], scales[rows], weight)
        bound = reference.forward_error_bound(q[rows], scales[rows], weight, y.dtype)
        assert bool(((y[rows].double() - ref).abs() <= bound).all()), f"expert {e}"


@pytest.mark.compiles
@needs_compiler
@pytest.mark.parametrize("kind", ["integers", "unit vectors"])
def test_products_that_float32_holds_are_exact(kind, tmp_path):
    """Integers: scales are 1, sums below 2^24. Unit vectors: y is a column of the weight."""
    counts, (before, _), n, k, blocks8, schedule, grid, _ = CASES["waves and shares"]
    made, m, rng = experts_of(len(counts), n, k, blocks8, bias=False), sum(counts), torch.Generator().manual_seed(4)
    if kind == "integers":
        ones = torch.ones(n)
        made = [dataclasses.replace(w, scales=w.multipliers(), channel_scales=ones) for w in made]
        q, _ = uniform_activations(m, made[0])
    else:
        q = (torch.randint(k, (m, 1), generator=rng) == torch.arange(k)).to(torch.int8)
    w, offsets = stacked(made), offsets_of(counts, before)
    x = activations.from_codes(q, torch.ones(m, k // 128), w.stacked, "two_level")
    y = launch_wgmma(
        w.stacked, x, schedule, grid, tmp_path, out_dtype="float32", experts=len(counts), sk=offsets, parts=offsets
    )  # fmt: skip
    for e, weight in enumerate(made):
        rows = slice(int(offsets[e]), int(offsets[e + 1]))
        assert torch.equal(y[rows].double(), q[rows].double() @ weight.values().T), f"expert {e}"


@pytest.mark.compiles
@needs_compiler
@pytest.mark.parametrize("tokens", [1, 128])
def test_machine_code_of_chosen_tiles_spills_nothing(tokens):
    """Two accumulators' pairs of wgmmas stay under way beside the state of the experts."""
    (request,) = w4ax.grouped_requests(448, 640, 4, m=4 * tokens, blocks8=2, target=Target.parse("sm_90a"))
    report = KernelReport.read(compile_request(request) / "report.json")
    assert (report.spill_stores, report.spill_loads, report.stack) == (0, 0, 0)
    if not report.instructions:
        pytest.skip(report.note)
    loops, rest = divmod(report.count("IGMMA"), 4)
    assert rest == 0 and loops in (1, 2) and report.count(r"WARPGROUP\.ARRIVE") == 2 * loops, "wgmma is serialized"
    assert report.count(r"WARPGROUP\.DEPBAR") == 3 * loops, "ptxas waits for wgmmas on its own"


def test_the_reference_serves_a_cpu():
    made, counts = experts_of(3, 70, 200, 1), (5, 0, 4)
    w, offsets = stacked(made), offsets_of(counts, 1)
    x = torch.randn(11, 200, generator=torch.Generator().manual_seed(1)).half()
    from terrazzo.ops.w4ax import torch_op

    y = torch_op.call(x, w.stacked, None, None, None, offsets)
    assert y.shape == (11, 70) and y.dtype == torch.float16 and not y[0].any() and not y[10].any()
    facts = dict(blocks8=1, permutation=made[0].permutation, granularity="two_level", wide=True)
    q, scales = reference.quantize_activations(x, **facts)
    for e, weight in enumerate(made):
        rows = slice(int(offsets[e]), int(offsets[e + 1]))
        assert torch.equal(y[rows], reference.gemm(q[rows], scales[rows], weight).half())


def test_quantized_tokens_are_gathered_row_by_row():
    (weight,) = experts_of(1, 64, 300, 1)
    q, scales = uniform_activations(5, weight)
    x = activations.from_codes(q, scales, weight.pack(target="sm_90a"), "two_level")
    routing = moe.sort_by_expert(torch.tensor([[1, 0], [0, 2], [2, 1], [1, 2], [0, 1]]), 3)
    rows = moe.gather(x, routing)
    rows.check()
    assert rows.shape == (10, 300) and rows.order == x.order
    assert torch.equal(rows.codes(), x.codes()[routing.tokens])
    assert torch.equal(rows.token_scales(), x.token_scales()[routing.tokens])


def test_experts_are_saved_and_loaded(tmp_path):
    w = stacked(experts_of(2, 70, 200, 1))
    w.save(tmp_path / "w.safetensors")
    again = w4ax.GroupedWeight.load(w4ax.PackedWeight, tmp_path / "w.safetensors")
    assert torch.equal(again.stacked.words, w.stacked.words) and again.stacked.order == w.stacked.order
    assert torch.equal(again[1].dequantize(), w[1].dequantize())
    with pytest.raises(ArgumentError):
        w4ax.PackedWeight.load(tmp_path / "w.safetensors")


def test_what_cannot_be_experts_is_refused():
    first, second = experts_of(2, 70, 200, 1)
    other, int4 = (random_weight(70, 200, high, seed=9, two_level=True, bias=True) for high in (1, 0))
    blocks = dataclasses.replace(first, channel_scales=None, scales=first.multipliers().bfloat16().float())
    assert not torch.equal(other.permutation, first.permutation)
    for argument, words, given in (
        ("experts", "a scale for each block", [blocks.pack(target="sm_90a")]),
        ("experts", "warpgroup", [first.pack(target="sm_80"), second.pack(target="sm_80")]),
        ("order", "same for all experts", [first.pack(target="sm_90a"), other.pack(target="sm_90a")]),
        ("blocks8", "same for all", [first.pack(target="sm_90a"), int4.pack(target="sm_90a")]),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=words) as caught:
            w4ax.GroupedWeight.stack(given)
        assert caught.value.argument == argument


@pytest.mark.parametrize(
    ("argument", "changes"),
    [("k", {"k": 0}), ("experts", {"experts": 0}), ("blocks8", {"blocks8": 6}), ("dtype", {"dtype": "float32"}),
     ("out_dtype", {"out_dtype": "int32"}), ("target", {"target": "sm_80"}), ("bias", {"bias": 1})],
)  # fmt: skip
def test_requests_that_no_kernel_serves_are_refused(argument, changes):
    facts = dict(n=448, k=640, experts=4, m=8) | changes
    with pytest.raises(ArgumentError) as caught:
        w4ax.grouped_requests(**facts)
    assert caught.value.argument == argument


def test_calls_with_operands_that_do_not_fit_are_refused():
    made = experts_of(2, 70, 200, 1)
    w, x = stacked(made), torch.zeros(4, 200, dtype=torch.float16)
    offsets = torch.tensor([0, 2, 4], dtype=torch.int32)
    calls = {
        "w": lambda: w4ax.grouped_gemm(x, w[0], offsets),
        "x": lambda: w4ax.grouped_gemm(x[:, :100], w, offsets),
        "expert_offsets": lambda: w4ax.grouped_gemm(x, w, offsets.long()),
        "bias": lambda: w4ax.grouped_gemm(x, w, offsets, bias=torch.zeros(70)),
        "out_dtype": lambda: w4ax.grouped_gemm(x, w, offsets, out_dtype=torch.int32),
        "out": lambda: w4ax.grouped_gemm(x, w, offsets, out=torch.zeros(4, 71, dtype=torch.float16)),
    }
    for argument, call in calls.items():
        with pytest.raises(ArgumentError) as caught:
            call()
        assert caught.value.argument == argument
    with pytest.raises(ArgumentError, match="w4ax"):
        w4a8.grouped_gemm(x, w, offsets)


def test_every_number_of_tokens_has_a_kernel():
    found = w4ax.grouped_requests(448, 640, 8, blocks8=2, dtype="bfloat16", norm=True)
    assert {it.name for it in found} == {"w4ax.grouped", "w4ax.quantize_blocks"}
    tiles = {dict(it.params)["block_tokens"] for it in found if it.name == "w4ax.grouped"}
    assert min(tiles) == 16 and max(tiles) == 128
