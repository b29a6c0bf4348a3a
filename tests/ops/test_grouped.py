"""Grouped GEMM without a GPU: stacked weights, schedules, requests, machine code, refusals."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from math import exp, log
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from emulated_cases import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from terrazzo.lowering import KernelReport, compile_request
from terrazzo.lowering.errors import ArgumentError, LayoutMismatchError
from terrazzo.lowering.targets import Target
from terrazzo.lowering.toolchain import toolchain
from terrazzo.ops import w4a8, w4a16, w4ax, w8a8
from terrazzo.ops.call import plans
from terrazzo.ops.grouped import MOST_EXPERTS, GroupedWeight, all_tokens
from terrazzo.ops.w4a8 import entry as w4a8_entry
from terrazzo.ops.w4a8 import fp8
from terrazzo.ops.w4a8 import op as w4a8_op
from terrazzo.ops.w4a8.w8a8 import entry as w8a8_entry
from terrazzo.ops.w4ax import activations as w4ax_activations
from terrazzo.ops.w4ax import entry as w4ax_entry
from terrazzo.ops.weight_only import entry as weight_only_entry
from terrazzo.ops.weight_only import op as weight_only_op
from terrazzo.schedules import grouped
from terrazzo.schedules.linear_spaces import Grouped
from terrazzo.schedules.multistage import Multistage
from terrazzo.schedules.problem import Gemm

HOPPER = Target.parse("sm_90a")
W4A16 = dict(group_size=128, symmetric=False, scale_dtype="float16")


def experts(family, count: int = 3, n: int = 70, k: int = 200, **more) -> list:
    rng = torch.Generator().manual_seed(n)
    quantize = family.quantize_weight
    return [quantize(torch.randn(n, k, generator=rng), group_size=64, **more) for _ in range(count)]


@pytest.mark.parametrize("family", [w4a8, w4a16, fp8], ids=["w4a8", "w4a16", "fp8"])
def test_stacked_weights_keep_every_expert(family, tmp_path):
    packed = [w.pack() for w in experts(family)]
    stacked = family.GroupedWeight.stack(packed)
    assert len(stacked) == 3 and (stacked.n, stacked.k) == (70, 200)
    assert stacked.nbytes == sum(w.nbytes for w in packed)
    stacked.check()
    stacked.save(tmp_path / "experts.safetensors")
    loaded = GroupedWeight.load(family.PackedWeight, tmp_path / "experts.safetensors")
    for e, weight in enumerate(packed):
        for of in (stacked, loaded):
            assert torch.equal(of[e].words, weight.words)
            assert torch.equal(of[e].dequantize(), weight.dequantize())
    with pytest.raises(IndexError):
        stacked[3]
    assert torch.equal(stacked[np.int64(1)].words, stacked[1].words)
    for index in ("a", slice(0, 2), None, True, 1.0):
        with pytest.raises(ArgumentError, match="expert = .*must be an integer"):
            stacked[index]
    assert "3 x " in repr(stacked) and "PackedWeight" in repr(stacked)
    with pytest.raises(ArgumentError, match="grouped"):
        GroupedWeight.load((w4a16 if family is not w4a16 else fp8).PackedWeight, tmp_path / "experts.safetensors")


def test_a_single_expert_is_no_file_of_many(tmp_path):
    packed = experts(w4a8, 1)[0].pack()
    packed.save(tmp_path / "one.safetensors")
    with pytest.raises(ArgumentError, match="grouped"):
        GroupedWeight.load(w4a8.PackedWeight, tmp_path / "one.safetensors")


def test_a_damaged_expert_is_refused(tmp_path):
    stacked = GroupedWeight.stack([one.pack() for one in experts(w4a8, 2)])
    stacked.stacked.channel_scales[1, 3] = float("nan")
    stacked.save(tmp_path / "experts.safetensors")
    with pytest.raises(ArgumentError, match="channel_scales"):
        GroupedWeight.load(w4a8.PackedWeight, tmp_path / "experts.safetensors")


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: [], "experts"),
        (lambda: experts(w4a8, 2), "experts"),  # not packed
        (lambda: [experts(w4a8, 1)[0].pack(), experts(w4a16, 1)[0].pack()], "experts"),
        (lambda: [experts(w4a8, 1)[0].pack(), experts(fp8, 1)[0].pack()], "experts"),
        (lambda: [experts(w4a8, 1, n=70)[0].pack(), experts(w4a8, 1, n=71)[0].pack()], "n"),
    ],
    ids=["none", "unpacked", "mixed", "mixed codes", "sizes"],
)
def test_experts_that_differ_are_refused(make, argument):
    with pytest.raises(ArgumentError) as error:
        GroupedWeight.stack(make())
    assert error.value.argument in (argument, "words", "params")


@pytest.mark.parametrize("group_size", [32, 128, 200])
def test_an_expert_without_zero_points_is_stacked_with_others(group_size):
    """Zero points of 8 everywhere are stored as none; beside others they are written out."""
    weight = torch.randn(70, 200)
    made = [w4a16.quantize_weight(weight, group_size=group_size, symmetric=symmetric) for symmetric in (True, False)]
    stacked = GroupedWeight.stack([one.pack() for one in made])
    assert not stacked.stacked.symmetric
    for one, expert in zip(made, stacked):
        assert torch.equal(expert.dequantize(), one.dequantize())
    stacked.check()
    alike = GroupedWeight.stack([one.pack() for one in made[:1] * 2])
    assert alike.stacked.symmetric


def test_a_foreign_layout_is_refused():
    from dataclasses import replace

    stacked = w4a8.GroupedWeight.stack([w.pack() for w in experts(w4a8, 2)])
    with pytest.raises(LayoutMismatchError):
        GroupedWeight(replace(stacked.stacked, layout="another")).check()


problems = st.tuples(st.integers(1, 20000), st.integers(1, 15000), st.sampled_from((32, 64, 128)))


@settings(max_examples=80, deadline=None)
@given(sizes=problems, experts=st.integers(1, MOST_EXPERTS), m=st.integers(1, 20000))
def test_schedules_are_legal(sizes, experts, m):
    n, k, group = sizes
    room = HOPPER.smem_per_block - 8 * (experts + 1)
    for activations in ("s8", "e4m3"):
        of = Gemm.of_bytes(n, k, group, activations=activations, experts=experts)
        s = grouped.choose(of, HOPPER, m)
        assert grouped.legal(s) and s.stages >= 2 and s.smem_bytes(of) <= room
    for record, scales in ((128 * 3 // 2, "fold"), (320, "post")):
        of = Gemm(n, k, 128 // group, record, scales=scales, experts=experts)
        s = grouped.choose(of, HOPPER, m)
        assert s.stages >= 2 and s.smem_bytes(of) <= room


WITHOUT_WARPGROUPS = ("sm_80", "sm_86", "sm_89", "sm_100a", "sm_120a")


@settings(max_examples=60, deadline=None)
@given(sizes=problems, experts=st.integers(1, MOST_EXPERTS), m=st.integers(1, 20000))
@pytest.mark.parametrize("target", WITHOUT_WARPGROUPS)
def test_schedules_on_mma_sync_are_legal_and_known_up_front(target, sizes, experts, m):
    """They have as many semaphores as a stream does, and every M takes the tile of one that is compiled up front."""
    (n, k, group), at = sizes, Target.parse(target)
    kinds = ["s8", "e4m3"] if at.supports("mma.e4m3") else ["s8"]
    every = [Gemm.of_bytes(n, k, group, activations=kind, experts=experts) for kind in kinds]
    for record, scales in ((128 * 3 // 2, "fold"), (320, "post")):
        every.append(Gemm(n, k, 128 // group, record, scales=scales, experts=experts))
    for of in every:
        s = grouped.choose_multistage(of, at, m)
        assert not Grouped(of).refusal("multistage", s, at, m), s
        assert Grouped(of).heuristic(at, m) == ("multistage", s)
        assert s in {grouped.choose_multistage(of, at, tokens) for tokens in all_tokens(experts)}


def test_tiles_on_mma_sync_are_as_wide_as_their_tokens():
    of, at = Gemm(2048, 768, 1, 192, experts=128), Target.parse("sm_80")
    tokens = {m: grouped.choose_multistage(of, at, m).block_tokens for m in (8, 128, 128 * 16, 128 * 512)}
    assert tokens == {8: 16, 128: 16, 128 * 16: 32, 128 * 512: 128}


@settings(max_examples=60, deadline=None)
@given(counts=st.lists(st.integers(0, 300), min_size=1, max_size=64), rest=st.integers(0, 40))
def test_the_grid_on_mma_sync_holds_the_tiles_of_any_routing(counts, rest):
    m, s = sum(counts) + rest, Multistage(32, 4, 2, 4)
    of = Gemm(2048, 768, 1, 192, experts=len(counts))
    blocks, rows = s.tiles(of, max(m, 1)) // (2048 // s.rows), sum(-(-count // 32) for count in counts)
    assert rows <= blocks <= max(m, 1)
    even = [33] * 8  # as many blocks as there can be
    assert s.tiles(Gemm(64, 128, 1, 192, experts=8), sum(even)) == sum(-(-count // 32) for count in even)


def test_schedules_of_known_layers():
    """16 tokens for each of 8 experts are one wave of tiles that hold 8 more; 128 small experts take narrow ones."""
    choose = lambda n, k, m, e: grouped.choose(Gemm.of_bytes(n, k, 64, experts=e), HOPPER, m)
    goal = choose(4096, 7168, 128, 8)
    assert (goal.block_tokens, goal.cta_blocks) == (32, 4)
    qwen = choose(1536, 2048, 128, 128)
    assert qwen.block_tokens == 16 and -(-1536 // 64) % qwen.cta_blocks == 0
    assert choose(28672, 4096, 8192, 8).block_tokens >= 128


@settings(max_examples=60, deadline=None)
@given(m=st.integers(1, 40000), experts=st.integers(1, 160))
def test_a_new_number_of_tokens_never_needs_a_new_kernel(m, experts):
    """Every M takes the tile of one of those that are compiled up front."""
    for of in (
        Gemm(2048, 768, 1, 192, experts=experts),
        Gemm.of_bytes(2048, 768, 128, activations="e4m3", experts=experts),
    ):
        known = {grouped.choose(of, HOPPER, tokens) for tokens in all_tokens(experts)}
        assert grouped.choose(of, HOPPER, m) in known


def test_few_tokens_reach_few_experts():
    """Eight of 128 experts fill the SMs with low tiles; a token for each expert does with tall ones."""
    of = Gemm(2048, 768, 1, 192, experts=128)
    few, many = (grouped.choose(of, HOPPER, m) for m in (8, 1024))
    assert (few.block_tokens, few.cta_blocks) == (16, 2) and many.cta_blocks > 2


@pytest.mark.parametrize(("m", "experts", "tokens"), [(2048, 8, 128), (32768, 128, 128), (8192, 8, 256)])
def test_experts_on_e4m3_take_tiles_of_two_products_where_padding_is_little(m, experts, tokens):
    problem = Gemm.of_bytes(28672, 4096, 128, activations="e4m3", experts=experts)
    assert grouped.choose(problem, HOPPER, m).block_tokens == tokens


def test_random_experts_take_as_many_tiles_as_the_model_says():
    rng = torch.Generator().manual_seed(1)
    for average, tokens in ((16, 16), (16, 32), (64, 64), (64, 80), (256, 96), (3, 16)):
        drawn = torch.randint(64, (200, 64 * average), generator=rng)
        each = torch.stack([torch.bincount(row, minlength=64) for row in drawn])
        mean = float((-(-each // tokens)).double().mean())
        assert abs(grouped.tiles_of_expert(average, tokens) - mean) < 0.08


@pytest.mark.parametrize("op", ["w4a16_grouped", "w4a8_grouped", "w4a8_fp8_grouped"])
def test_tiles_beside_the_fastest_that_was_measured(op):
    """Experts of two models, 16 to 512 tokens each: 1 % more than the fastest tile, and beside what tiles as wide as
    the average expert's tokens took, an eighth less (e4m3: a sixteenth)."""
    data = json.loads((Path(__file__).parents[1] / "data/tuning/grouped_h200.json").read_text())
    beside, gained = [], []
    for row in data[op]:
        sizes, own = (row["n"], row["k"]), dict(experts=row["experts"])
        of = {
            "w4a16_grouped": Gemm(*sizes, 1, 192, **own),
            "w4a8_grouped": Gemm.of_bytes(*sizes, 64, **own),
            "w4a8_fp8_grouped": Gemm.of_bytes(*sizes, 128, activations="e4m3", **own),
        }[op]
        s = grouped.choose(of, Target.parse("nvidia/nvidia-h200"), row["m"])
        chosen = row["us"].get(f"{s.block_tokens} {s.warpgroups} {s.row_blocks}")
        beside += [chosen / min(row["us"].values())] if chosen else []
        gained += [chosen / row["us"][row["before"]]] if chosen else []
    mean = lambda ratios: exp(sum(map(log, ratios)) / len(ratios))
    assert len(beside) >= 20 and mean(beside) <= 1.011 and max(beside) <= 1.08
    assert mean(gained) <= (0.94 if "fp8" in op else 0.88)


def test_requests_depend_on_the_tokens_of_an_expert_alone():
    assert len(w4a8.grouped_requests(4096, 7168, 8)) <= 13
    one = w4a8.grouped_requests(4096, 7168, 8, m=(100, 128))
    assert len(one) == 1 and dict(one[0].params)["experts"] == 8
    (e4m3,) = w4a8.grouped_requests(4096, 7168, 8, m=(100, 128), dequantization="e4m3", group_size=128)
    assert e4m3.name == "w4a8.grouped" and dict(e4m3.params)["dequantization"] == "e4m3"
    assert [e4m3] == w4a8.grouped_requests(4096, 7168, 8, m=128, dequantization="e4m3", group_size=7168)
    assert dict(w4a16.grouped_requests(4096, 7168, 8, m=128, **W4A16)[0].params)["block_tokens"] == 16
    for made, argument in (
        (lambda: w4a8.grouped_requests(64, 128, 2, m=4, dequantization="vadd"), "dequantization"),
        (lambda: w4a8.grouped_requests(64, 128, 2, m=4, dequantization="e4m3", target="sm_80"), "target"),
        (lambda: w4a8.grouped_requests(64, 128, 2, m=4, dequantization="e4m3", target="sm_100a"), "target"),
        (lambda: w4a8.grouped_requests(64, 128, 2, m=4, dequantization="e4m3", out_dtype="int32"), "out_dtype"),
        (lambda: w4a16.grouped_requests(64, 128, 2, m=4, numerics="best", **W4A16), "numerics"),
    ):
        with pytest.raises(ArgumentError) as error:
            made()
        assert error.value.argument == argument


@pytest.mark.parametrize(("target", "flags"), [("sm_80", ("ptx=compute_80",)), ("sm_90a", ())])
def test_experts_packed_for_sm_80_run_through_ptx_on_a_newer_gpu(target, flags):
    product = weight_only_op.Facts(512, 1024, dtype="float16", experts=4, **W4A16)
    made = plans.plan(64, product, Target.parse(target), HOPPER)
    assert made.request.flags == flags and made.request.target.arch == target
    assert made.request.entry.startswith("terrazzo.ops.linear." + ("stream_k" if target == "sm_90a" else "multistage"))
    if target == "sm_80":  # k is split, so that four experts fill the SMs
        tiles, kc, *_ = made.workspace
        assert kc > 1 and made.semaphores == (tiles,) and tiles == (64 + 4 * 31) // 32 * 4


def ready(kernel, no_bias: torch.Tensor, more: object) -> tuple:
    """What is kept of a launch, with stand-ins for what the kernel does not read."""
    return SimpleNamespace(launcher=lambda index: kernel), kernel, (None, None), (), no_bias, 1 << 31, more


@pytest.mark.parametrize("codes", ["int8", "e4m3"])
def test_kernels_get_one_matrix_after_the_other(monkeypatch, codes):
    """What a launch is given: bytes of x, stacked words and vectors, and a stand-in where e4m3 has no row sums."""
    seen = []

    def kernel(q, words, channels, scales, sums, bias, workspace, semaphores, y, offsets):
        assert (q.dtype, len(words), channels.shape, bias.shape) == (torch.int8, 3 * 2, (3 * 128,), (3 * 70,))
        assert sums.dtype == torch.int32 and sums.shape == ((4,) if codes == "int8" else (1,))
        seen.append((q, scales, offsets))
        y.fill_(1.0)

    nothing = torch.empty(1), torch.empty(1, dtype=torch.int32) if codes == "e4m3" else None
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr("terrazzo.ops.launching.place", lambda x: (-1, 0))
    monkeypatch.setattr(w4a8_entry.CALLS, "prepare", lambda *given: ready(kernel, *nothing))
    family = fp8 if codes == "e4m3" else w4a8
    stacked = family.GroupedWeight.stack([w.pack() for w in experts(family, bias=torch.ones(70))])
    q, offsets = torch.ones(4, 208, dtype=torch.int8), torch.tensor([0, 1, 1, 4], dtype=torch.int32)
    x = w4a8.QuantizedActivations(q, torch.ones(4), torch.ones(4, dtype=torch.int32), (4, 200))
    if codes == "e4m3":
        x = w4a8.QuantizedActivations(q.view(torch.float8_e4m3fn), torch.ones(4), None, (4, 200))
    y = w4a8.grouped_gemm(x, stacked, offsets, out_dtype=torch.bfloat16)
    assert (y.shape, y.dtype) == ((4, 70), torch.bfloat16) and bool((y == 1).all())
    assert torch.equal(seen[0][0], q) and seen[0][1] is x.scales and seen[0][2] is offsets


FAMILIES = {"w4a16": w4a16, "w4a8": w4a8, "w8a8": w8a8, "w4ax": w4ax}
ENTRIES = {"w4a16": weight_only_entry, "w4a8": w4a8_entry, "w8a8": w8a8_entry, "w4ax": w4ax_entry}


def four_rows(name):
    """Experts of 70 rows, and four rows of activations for them."""
    family = FAMILIES[name]
    if name == "w4ax":
        plan = w4ax.plan_blocks(torch.rand(200) + 0.1, ratio=0.5)
        stacked = family.GroupedWeight.stack([w4ax.quantize(torch.randn(70, 200), plan, target="sm_90a")] * 3)
        q = torch.ones(4, stacked.stacked.blocks * 128, dtype=torch.int8)
        scales = torch.ones(4, stacked.stacked.blocks)
        return stacked, w4ax_activations.from_codes(q, scales, stacked.stacked, "two_level")
    if name == "w8a8":
        stacked = family.GroupedWeight.stack([w8a8.quantize(torch.randn(70, 200))] * 3)
    else:
        stacked = family.GroupedWeight.stack([w.pack() for w in experts(family)])
    q, ones = torch.ones(4, 208, dtype=torch.int8), torch.ones(4)
    if name == "w4a16":
        return stacked, torch.ones(4, 200).half()
    return stacked, w4a8.QuantizedActivations(q, ones, ones.int(), (4, 200))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("skipped", [0, 2, 8], ids=lambda values: f"{values} values in")
def test_rows_of_no_expert_keep_what_they_held_wherever_the_output_begins(monkeypatch, name, skipped):
    """Kernels store 16 bytes at a time: other outputs are written aside, and come back whole."""
    launched = []

    def kernel(*arguments):
        y, offsets = arguments[-2:]
        assert y.data_ptr() % 16 == 0
        y[int(offsets[0]) : int(offsets[-1])] = 1.0
        launched.append(y)

    stacked, x = four_rows(name)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    more = {"w8a8": (torch.empty(1), False), "w4ax": ({}, False)}.get(name)
    monkeypatch.setattr("terrazzo.ops.launching.place", lambda x: (-1, 0))
    monkeypatch.setattr(ENTRIES[name].CALLS, "prepare", lambda *given: ready(kernel, torch.empty(1), more))
    held = torch.full((4 * 70 + 16,), 7.0, dtype=torch.float16)
    out = held[skipped : skipped + 4 * 70].view(4, 70)
    offsets = torch.tensor([1, 2, 2, 3], dtype=torch.int32)
    y = FAMILIES[name].grouped_gemm(x, stacked, offsets, out=out)
    assert y is out and len(launched) == 1
    assert bool((out[1:3] == 1).all()) and int((held == 7).sum()) == held.numel() - 2 * 70


def of_tile(plan, **changes):
    """The plan with another kernel of the same program."""
    params = dict(plan.request.params)
    assert changes.keys() <= params.keys()
    return replace(plan, request=replace(plan.request, params=tuple((params | changes).items())))


def eight_experts(group: int, out: str, form: str, k: int = 7168) -> w4a8_op.Facts:
    """Of W4A8, on int8 or e4m3 activations, with a bias."""
    return w4a8_op.Facts(4096, k, group_size=group, out_dtype=out, dequantization=form, bias=True, experts=8)


PLANS = {  # operator's plan, tensor instruction
    "w4a8": lambda: plans.plan(128, eight_experts(64, "float16", "auto"), HOPPER),
    "fp8": lambda: plans.plan(128, eight_experts(128, "bfloat16", "e4m3"), HOPPER),
    "w4a16": lambda: plans.plan(
        4096, weight_only_op.Facts(1536, 2048, dtype="bfloat16", experts=128, **W4A16 | {"scale_dtype": "bfloat16"}),
        HOPPER,
    ),
    "w4a16, another tile": lambda: of_tile(
        PLANS["w4a16"](), n=8192, k=8192, dtype="float16", scale_dtype="float16", block_tokens=64, warpgroups=2,
        row_blocks=1, stages=4, stage_k=128,
    ),
}  # fmt: skip


TENSOR_CORES = [("w4a8", "IGMMA"), ("fp8", "QGMMA"), ("w4a16", "HGMMA")]


@pytest.mark.compiles
@pytest.mark.skipif(bool(toolchain().missing()), reason=f"cannot compile: {toolchain().missing()} missing")
@pytest.mark.parametrize(
    ("name", "instruction"),
    cases([*TENSOR_CORES, ("w4a16, another tile", "HGMMA")], TENSOR_CORES),
)
def test_machine_code(name, instruction):
    plan = PLANS[name]()
    report = KernelReport.read(compile_request(plan.request) / "report.json")
    assert (report.spill_stores, report.spill_loads, report.stack) == (0, 0, 0)
    assert report.smem_dynamic + report.smem_static <= HOPPER.smem_per_block
    assert plan.workspace[0] == plan.semaphores[0] == HOPPER.sms and plan.scalars == ()
    if not report.instructions:
        pytest.skip(report.note)
    assert all(re.match(instruction, opcode) for opcode in report.tensor_instructions)
    groups = report.count(r"WARPGROUP\.ARRIVE")
    assert report.count(instruction) == groups * (4 if name.startswith("w4a16") else 2), "ptxas serializes wgmma"
    assert report.count("VOTE") and report.count("SHFL")  # the table of experts and its search


ON_WARPS = [("int8", "sm_80", "IMMA"), ("e4m3", "sm_89", "QMMA"), ("int8", "sm_120a", "IMMA")]


@pytest.mark.compiles
@pytest.mark.skipif(bool(toolchain().missing()), reason=f"cannot compile: {toolchain().missing()} missing")
@pytest.mark.parametrize(("codes", "target", "instruction"), cases(ON_WARPS, ON_WARPS[:1]))
def test_machine_code_on_mma_sync(codes, target, instruction):
    """Of W4A8; tests/ops/w4a16/test_w4a16_multistage.py has W4A16's."""
    at, form = Target.parse(target), "e4m3" if codes == "e4m3" else "auto"
    plan = plans.plan(64, eight_experts(128, "bfloat16", form, 2048), at)
    report = KernelReport.read(compile_request(plan.request) / "report.json")
    assert (report.spill_stores, report.spill_loads, report.stack) == (0, 0, 0)
    assert report.smem_dynamic + report.smem_static <= at.smem_per_block
    if not report.instructions:
        pytest.skip(report.note)
    assert all(opcode.startswith(instruction) for opcode in report.tensor_instructions)
    assert report.count("VOTE") and report.count("SHFL") and report.count("LDGSTS")


def test_the_benchmark_routes_every_pick():
    from benchmarks import grouped as bench

    for layer in bench.LAYERS:
        for tokens in layer.tokens:
            counts = bench.counts_of(layer, tokens)
            assert (
                int(counts.sum()) == (tokens * layer.top_k or tokens * layer.experts) and len(counts) == layer.experts
            )
            assert int(counts.max()) <= tokens  # a token picks an expert once
    kinds = {request.name for request in bench.requests_of("w4a8", bench.GOAL_LAYER)}
    assert "w4a8.grouped" in kinds and len(kinds) == 2  # and what gemm takes for one expert's tokens
    assert {request.name for request in bench.requests_of("w4a8_fp8", bench.GOAL_LAYER)} == {"w4a8.grouped"}
