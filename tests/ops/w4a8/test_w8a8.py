"""W8A8 without a GPU: layout, files, quantizers, references, what is refused, graphs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from terrazzo.layouts import Fragment, get_instance
from terrazzo.lowering.errors import ArgumentError, LayoutMismatchError
from terrazzo.lowering.targets import Target
from terrazzo.ops import quantized, w8a8
from terrazzo.ops.call import plans
from terrazzo.ops.linear.bytes import direct, direct_tokens, multistage
from terrazzo.ops.quantized import QuantizedActivations
from terrazzo.ops.w4a8.w8a8 import activations, op, reference, torch_op
from terrazzo.schedules import linear_spaces

KINDS = {
    "int8": {},
    "int8 tensor": dict(granularity="tensor"),
    "int8 static": dict(input_scale=0.03),
    "int8 static with a zero point": dict(input_scale=0.03, input_zero=7),
    "int8 asymmetric": dict(asymmetric=True),
    "e4m3": dict(codes="e4m3"),
    "e4m3 static": dict(codes="e4m3", input_scale=0.01),
    "e4m3 blocks": dict(codes="e4m3", granularity="block"),
}


def float_weight(n: int = 200, k: int = 330) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(n + k)) * 0.1


def test_a_tile_lies_as_a_descriptor_of_128_byte_swizzle_reads_it():
    """By the formula of CUTLASS's Swizzle<3, 4, 3>: byte address XOR (address / 128 % 8) * 16."""
    codes = np.arange(64 * 128, dtype=np.uint16).astype(np.uint8).reshape(64, 128)
    tagged = [np.full((64, 128), 0, np.uint8), codes]
    tagged[0][:] = np.arange(64, dtype=np.uint8)[:, None]
    for values in tagged:
        packed = get_instance("w8a8").pack(values).reshape(-1).view(np.uint8)
        row, k = np.divmod(np.arange(64 * 128), 128)
        at = row * 128 + k
        assert (packed[at ^ (at // 128 % 8 * 16)] == values.reshape(-1)).all()
    assert Fragment.wgmma_shared(8).cols == 128 and Fragment.wgmma_shared(16).cols == 64


@pytest.mark.parametrize("name", KINDS)
def test_a_packed_weight_holds_what_was_quantized(name, tmp_path):
    weight = w8a8.quantize_weight(float_weight(), bias=torch.randn(200), **KINDS[name])
    packed = weight.pack()
    packed.check_sizes()
    packed.save(tmp_path / "w.safetensors")
    for again in (packed, w8a8.PackedWeight.load(tmp_path / "w.safetensors")):
        back = again.unpack()
        assert torch.equal(back.codes.view(torch.int8), weight.codes.view(torch.int8))
        assert torch.equal(back.scales, weight.scales) and torch.equal(back.bias, weight.bias)
        own = (back.input_scale, back.input_zero, back.asymmetric)
        assert own == (weight.input_scale, weight.input_zero, weight.asymmetric)
    if weight.form == "int8":
        assert torch.equal(packed.scales[1, :200], weight.codes.sum(1).float())


@pytest.mark.parametrize("name", KINDS)
def test_products_are_near_the_float_ones_and_inside_the_bound(name):
    dense = float_weight()
    w = w8a8.quantize(dense, bias=torch.randn(200), **KINDS[name])
    x = torch.randn(3, 7, 330, generator=torch.Generator().manual_seed(1)).bfloat16()
    made = activations.run(x, w)
    assert made.codes == w.codes and made.shape == (3, 7, 330)
    exact = x.double().view(21, 330) @ dense.double().T + w.bias.double()
    y = torch_op.call(x, w, None, None, "auto")
    assert y.shape == (3, 7, 200) and y.dtype == torch.bfloat16
    error = float((y.double().view(21, 200) - exact).norm() / exact.norm())
    assert error < (0.05 if w.codes == "e4m3" else 0.02)
    bound = reference.forward_error_bound(made, w, torch.bfloat16)
    assert bool(((y.double().view(21, 200) - reference.gemm(made, w)).abs() <= bound).all())
    spread = made.dequantize().double().view(21, 330) - x.double().view(21, 330)
    assert float(spread.norm() / x.double().norm()) < 0.05


@pytest.mark.parametrize("asymmetric", [False, True])
def test_the_reference_of_int8_products_that_cancel_is_exactly_zero(asymmetric):
    """float64 sums of scaled values leave 1e-16 there, which no bound on a result of 0 covers."""
    rng = torch.Generator().manual_seed(3)
    half = torch.randint(-128, 128, (64, 100), generator=rng, dtype=torch.int8)
    w = w8a8.pack(torch.cat([half, half], 1), torch.rand(64, generator=rng) * 1e-2 + 1e-3, asymmetric=asymmetric)
    q = torch.randint(-127, 128, (9, 100), generator=rng, dtype=torch.int8)
    zeros = torch.zeros(9, dtype=torch.int32) if asymmetric else None
    q = torch.nn.functional.pad(torch.cat([q, -q], 1), (0, 8))
    made = QuantizedActivations(q, torch.rand(9, generator=rng) * 1e-2 + 1e-3, None, (9, 200), zeros)
    assert not reference.accumulate(made, w).any() and not reference.gemm(made, w).any()


def test_zero_points_are_taken_off_exactly():
    w = w8a8.quantize(float_weight(), asymmetric=True)
    x = (torch.rand(5, 330) * 3 + 1).half()
    made = activations.run(x, w)
    assert bool((made.zeros == -128).all())  # values above 0: the range begins there
    sums = reference.accumulate(made, w)
    direct = (made.q[:, :330].long() - made.zeros[:, None].long()) @ w.unpack().codes.long().T
    assert torch.equal(sums.long(), direct)


@pytest.mark.parametrize("name", KINDS)
def test_graphs_have_one_node_for_a_product(name):
    w = w8a8.quantize(float_weight(64, 128), bias=torch.randn(64), **KINDS[name])
    x = torch.randn(5, 128).bfloat16()
    call = torch.compile(lambda x: w8a8.gemm(x, w), fullgraph=True, backend="eager")
    torch._dynamo.reset()
    assert torch.equal(call(x), torch_op.call(x, w, None, None, "auto"))


def test_scales_of_published_shapes():
    codes = torch.randint(-127, 128, (300, 200), dtype=torch.int8)
    e4m3 = (torch.randn(300, 200) * 9).to(torch.float8_e4m3fn)
    for scales in (torch.tensor(0.5), torch.tensor([0.5]), torch.full((300,), 0.5), torch.full((300, 1), 0.5)):
        for given in (codes, e4m3):
            made = w8a8.QuantizedWeight.canonical(given, scales.bfloat16())
            assert tuple(made.scales.shape) == (300,) and bool((made.scales == 0.5).all())
    blocks = torch.rand(3, 2) + 0.1
    made = w8a8.QuantizedWeight.canonical(e4m3, blocks)
    wide = blocks.repeat_interleave(128, 0).repeat_interleave(128, 1)[:300, :200]
    assert torch.equal(made.dequantize(), e4m3.double() * wide.double())


def test_every_kernel_of_a_weight_is_known_ahead():
    for name, facts in KINDS.items():
        codes, block = facts.get("codes", "int8"), facts.get("granularity") == "block"
        more = dict(static="input_scale" in facts, zeros=facts.get("asymmetric", False))
        found = w8a8.kernel_requests(4096, 4096, codes=codes, block=block, target="sm_90a", **more)
        names = {request.name for request in found}
        assert "w8a8.stream_k" in names and ("w8a8.direct_tokens" in names) == block and len(names) == 2 + block, name
        again = w8a8.kernel_requests(14336, 4096, codes=codes, block=block, m=16, target="sm_90a", **more)
        assert all("n" not in dict(r.params) or dict(r.params)["n"] == 0 for r in again)


WEIGHT = torch.zeros(64, 128, dtype=torch.int8)
E4M3 = torch.zeros(64, 128).to(torch.float8_e4m3fn)
SCALES = (1e-50, 1e-40, 1e39, 10**400, float("nan"), -1.0, True, torch.tensor(True), torch.tensor(1e-40))
"""That float32 cannot divide by, or that are no numbers."""


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: w8a8.pack(WEIGHT.int(), torch.ones(64)), "codes"),
        (lambda: w8a8.pack(WEIGHT, torch.ones(63)), "scales"),
        (lambda: w8a8.pack(WEIGHT, torch.ones(1, 1, 1)), "scales"),
        (lambda: w8a8.pack(WEIGHT, -torch.ones(64)), "scales"),
        (lambda: w8a8.pack(WEIGHT, torch.full((64,), float("nan"))), "scales"),
        (lambda: w8a8.pack(torch.full((64, 128), float("nan")).to(torch.float8_e4m3fn), torch.ones(64)), "codes"),
        (lambda: w8a8.pack(torch.zeros(1, 132105, dtype=torch.int8), torch.ones(1)), "codes"),
        (lambda: w8a8.pack(WEIGHT, torch.ones(64), input_scale=0.0), "input_scale"),
        (lambda: w8a8.pack(WEIGHT, torch.ones(64), input_scale=torch.ones(2)), "input_scale"),
        *[
            (lambda scale=scale: w8a8.pack(WEIGHT, torch.ones(64), input_scale=scale), "input_scale")
            for scale in SCALES
        ],
        (lambda: w8a8.pack(WEIGHT, torch.ones(64), input_scale=1.0, input_zero=True), "input_zero"),
        (lambda: w8a8.pack(WEIGHT, torch.ones(64), input_scale=1.0, input_zero=float("nan")), "input_zero"),
        (lambda: w8a8.pack(WEIGHT, torch.ones(64), input_scale=1.0, input_zero=float("inf")), "input_zero"),
        (lambda: w8a8.pack(WEIGHT, torch.ones(64), input_scale=1.0, input_zero=128), "input_zero"),
        (lambda: w8a8.pack(WEIGHT, torch.ones(64), input_zero=3), "input_zero"),
        (lambda: w8a8.pack(E4M3, torch.ones(64), input_scale=1.0, input_zero=3), "input_zero"),
        (lambda: w8a8.pack(E4M3, torch.ones(64), asymmetric=True), "asymmetric"),
        (lambda: w8a8.pack(WEIGHT, torch.ones(64), input_scale=1.0, asymmetric=True), "asymmetric"),
        (lambda: w8a8.pack(E4M3.repeat(3, 2), torch.ones(2, 2), input_scale=1.0), "input_scale"),
        (lambda: w8a8.pack(WEIGHT, torch.ones(64), smooth=torch.zeros(128)), "smooth"),
        (lambda: w8a8.pack(WEIGHT, torch.ones(64), ue8m0=True), "ue8m0"),
        (lambda: w8a8.pack(E4M3.repeat(1, 2), torch.ones(64), ue8m0=True), "ue8m0"),
        (lambda: w8a8.pack(E4M3, torch.ones(64), input_scale=1.0, ue8m0=True), "ue8m0"),
        (lambda: w8a8.pack(E4M3, torch.ones(64), ue8m0=1), "ue8m0"),
        (lambda: w8a8.pack(WEIGHT, torch.ones(64), bias=torch.zeros(3)), "bias"),
        (lambda: w8a8.pack(E4M3, torch.ones(64), target="sm_80"), "target"),
        (lambda: w8a8.quantize(float_weight(), granularity="block"), "granularity"),
        (lambda: w8a8.quantize(float_weight(), codes="int4"), "codes"),
        (lambda: w8a8.kernel_requests(64, 128, codes="e4m3", target="sm_80"), "target"),
        (lambda: w8a8.kernel_requests(64, 128, codes="e4m3", out_dtype="int32", target="sm_90a"), "out_dtype"),
        (lambda: w8a8.kernel_requests(64, 128, accumulate="fast", target="sm_90a"), "accumulate"),
        (lambda: w8a8.kernel_requests(64, 128, codes="e4m3", zeros=True, target="sm_90a"), "codes"),
        (lambda: w8a8.gemm(torch.zeros(1, 128).half(), WEIGHT), "w"),
        (lambda: w8a8.gemm(torch.zeros(1, 128).half(), w8a8.pack(WEIGHT, torch.ones(64))), "x"),
    ],
)
def test_refusals(call, argument):
    with pytest.raises(ArgumentError) as error:
        call()
    assert error.value.argument == argument
    assert error.value.remedy


@pytest.mark.parametrize("kind", ["e4m3", "e4m3 static", "e4m3 blocks"])
def test_a_gpu_without_e4m3_is_told_of_16_bit_activations(kind, monkeypatch):
    """Whichever kernel is asked for first, a quantizer's or the product's."""
    w, at = w8a8.quantize(float_weight(), **KINDS[kind]), Target.parse("sm_80")
    monkeypatch.setattr(op.launching, "targets", lambda packed_for, device, argument="w": (at, at))
    monkeypatch.setattr(op.launching, "place", lambda x: (0, 0))
    monkeypatch.setattr(op.launching, "detect", lambda index: at)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    for call in (
        lambda: w8a8.quantize_activations(torch.ones(8, w.k, dtype=torch.float16), w),
        lambda: w8a8.weight_requests(w, 8, torch.float16),
        lambda: w8a8.weight_requests(w, 8),
        lambda: activations.requests(w, 8, "float16", at),
    ):
        with pytest.raises(ArgumentError, match="sm_89, sm_90a and sm_120a do.*16-bit activations.*terrazzo.ops.fp8"):
            call()


def test_powers_of_two_are_the_least_that_hold_every_value():
    """The quotient by 448 is a float32; one that is a power of two stays."""
    rng = torch.Generator().manual_seed(3)
    values = torch.randn(40, 300, generator=rng) * torch.randn(40, 1, generator=rng).mul(8).exp2()
    values[0], values[1, :128], values[2, 0], values[3, 0] = 0, 448.0, float("inf"), float("nan")
    values[4, :128] = torch.nextafter(torch.tensor(448.0), torch.tensor(500.0))  # its quotient rounds to 1
    made = reference.quantize_powers(values, (40, 300))
    parts = torch.nn.functional.pad(values, (0, 84)).view(40, 3, 128)
    for m, b in np.ndindex(40, 3):
        largest, scale = float(parts[m, b].abs().max()), float(made.scales[b, m])
        quotient = np.float32(largest) / np.float32(448)
        if not np.isfinite(quotient):
            assert not np.isfinite(scale)
            continue
        assert np.frexp(scale)[0] == 0.5 and (scale / 2 < quotient <= scale or (largest == 0 and scale == 1))
        codes = (parts[m, b].double() / scale).clamp(-448, 448).float().to(torch.float8_e4m3fn)
        assert torch.equal(made.q[m, b * 128 : min(b * 128 + 128, 300)].float(), codes.float()[: 300 - b * 128])
    w = w8a8.quantize(float_weight(200, 300), codes="e4m3", granularity="block", ue8m0=True)
    assert w.ue8m0 and w.unpack().ue8m0 and bool((torch.frexp(w.scales[w.scales > 0])[0] == 0.5).all())
    x = torch.randn(5, 300, generator=rng).half()
    given, y = activations.run(x, w), reference.gemm(activations.run(x, w), w)
    assert bool((torch.frexp(given.scales[:, :5])[0] == 0.5).all())
    assert float((y - x.double() @ float_weight(200, 300).double().T).norm() / y.norm()) < 0.06


def test_one_block_of_all_columns_has_scales_of_tokens():
    w = w8a8.quantize(float_weight(64, 128), codes="e4m3", granularity="block", ue8m0=True)
    assert not w.block and w.ue8m0
    made = activations.run(torch.randn(5, 128).half(), w)
    assert made.scales.shape == (5,) and bool((torch.frexp(made.scales)[0] == 0.5).all())
    op.check_activations(made, w)
    op.check_tensors(made)


def test_activations_of_another_weight_are_refused():
    int8, e4m3 = w8a8.pack(WEIGHT, torch.ones(64)), w8a8.pack(E4M3, torch.ones(64))
    blocks, long = w8a8.pack(E4M3.repeat(3, 2), torch.ones(2, 2)), w8a8.pack(E4M3.repeat(3, 2), torch.ones(192))
    x = torch.randn(4, 256).half()
    for made_for, used_with in ((int8, e4m3), (long, blocks), (blocks, long)):
        with pytest.raises(ArgumentError, match="w8a8"):
            op.check_activations(activations.run(x[:, : made_for.k], made_for), used_with)
    rows = quantized.encode(x.float(), None, (4, 256), "e4m3_block128", False)
    with pytest.raises(ArgumentError, match="column_scales"):
        op.check_activations(rows, blocks)


def test_w4a8_takes_no_zero_points():
    from terrazzo.ops import w4a8
    from terrazzo.ops.w4a8.op import check_codes

    made = activations.run(torch.randn(4, 128).half(), w8a8.quantize(float_weight(64, 128), asymmetric=True))
    with pytest.raises(ArgumentError, match="zero points"):
        check_codes(made, w4a8.quantize(float_weight(64, 128)))


def test_another_layout_is_refused():
    import dataclasses

    w = dataclasses.replace(w8a8.pack(WEIGHT, torch.ones(64)), layout="int8:another")
    with pytest.raises(LayoutMismatchError):
        w.check_layout(w.expected_layout())


def test_blocks_of_wide_batches_have_tokens_as_the_a_operand():
    target = Target.parse("sm_90a")
    product = op.Facts(6144, 4096, numerics="block", out_dtype="bfloat16")
    names = {m: plans.plan(m, product, target).request.name for m in (16, 64, 1024, 4096)}
    assert names == {16: "w8a8.stream_k", 64: "w8a8.stream_k", 1024: "w8a8.direct_tokens", 4096: "w8a8.direct_tokens"}
    space = linear_spaces.of(op.problem(6144, 4096, "block", "bfloat16"))
    program, schedule = space.heuristic(target, 4096)
    assert space.revive(program, schedule.params(), target, 4096) == (schedule, "")
    assert "no tile" in space.revive(program, schedule.params() | {"block_tokens": 192}, target, 4096)[1]
    assert "no wgmma" in space.refusal(program, schedule, Target.parse("sm_89"), 4096)
    with pytest.raises(ArgumentError, match="dequantization"):
        direct_tokens.build(
            target,
            n=64,
            k=128,
            group=128,
            out_dtype="float16",
            dequantization="promoted",
            bias=False,
            **schedule.params(),
        )


def test_a_tile_is_chosen_for_every_form_and_number_of_tokens():
    for numerics in op.OPERATORS:
        for m in (1, 16, 64, 256, 1024, 4096):
            target = Target.parse("sm_90a")
            chosen = plans.plan(m, op.Facts(4096, 4096, numerics=numerics, out_dtype="float16"), target)
            params = dict(chosen.request.params)
            assert params["dequantization"] == numerics and params["block_tokens"] >= min(m, 64), (numerics, m)


def stack_of(name: str, n: int = 200, k: int = 330) -> tuple[list, w8a8.GroupedWeight]:
    dense = torch.randn(3, n, k, generator=torch.Generator().manual_seed(5)) * 0.1
    bias = torch.randn(3, n, generator=torch.Generator().manual_seed(6))
    made = [w8a8.quantize_weight(one, bias=b, **KINDS[name]) for one, b in zip(dense, bias)]
    return made, w8a8.GroupedWeight.stack([one.pack() for one in made])


@pytest.mark.parametrize("name", KINDS)
def test_experts_are_the_products_of_each(name, tmp_path):
    made, stacked = stack_of(name)
    stacked.check()
    stacked.save(tmp_path / "experts.safetensors")
    x = torch.randn(19, 330, generator=torch.Generator().manual_seed(1)).bfloat16()
    bounds = [1, 6, 6, 17]
    for w in (stacked, w8a8.GroupedWeight.load(w8a8.PackedWeight, tmp_path / "experts.safetensors")):
        y = torch_op.call(x, w.stacked, None, None, "auto", torch.tensor(bounds, dtype=torch.int32))
        assert y.shape == (19, 200) and y.dtype == torch.bfloat16
        for e, one in enumerate(made):
            rows = torch.arange(bounds[e], bounds[e + 1])
            assert torch.equal(y[rows], torch_op.call(x[rows], one.pack(), None, None, "auto")), e


@pytest.mark.parametrize("name", ["int8 asymmetric", "e4m3 blocks"])
def test_graphs_have_one_node_for_all_experts(name):
    _, stacked = stack_of(name)
    x, offsets = torch.randn(9, 330).half(), torch.tensor([0, 4, 4, 9], dtype=torch.int32)
    torch._dynamo.reset()
    call = torch.compile(lambda x: w8a8.grouped_gemm(x, stacked, offsets), fullgraph=True, backend="eager")
    assert torch.equal(call(x), torch_op.call(x, stacked.stacked, None, None, "auto", offsets))


def test_experts_with_scales_of_activations_of_their_own_are_refused():
    made = [w8a8.quantize(float_weight(), input_scale=scale) for scale in (0.1, 0.2)]
    with pytest.raises(ArgumentError) as error:
        w8a8.GroupedWeight.stack(made)
    assert error.value.argument == "input_scale"


def test_kernels_of_experts_are_known_ahead():
    for name, facts in KINDS.items():
        own = dict(codes=facts.get("codes", "int8"), block=facts.get("granularity") == "block")
        own["zeros"] = "asymmetric" in facts
        every = w8a8.grouped_requests(2048, 1024, 8, **own)
        assert 3 < len(every) < 40 and {it.name for it in every} == {"w8a8.grouped"}, name
        assert set(w8a8.grouped_requests(2048, 1024, 8, m=(3, 4000), **own)) <= set(every), name
    for change, argument in (
        (dict(codes="e4m3", target="sm_86"), "target"), (dict(block=True), "codes"),
        (dict(accumulate="fast"), "accumulate"), (dict(codes="s4"), "codes"),
        (dict(codes="e4m3", out_dtype="int32"), "out_dtype"),
    ):  # fmt: skip
        with pytest.raises(ArgumentError) as error:
            w8a8.grouped_requests(256, 256, 4, m=1, **change)
        assert error.value.argument == argument, change


@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_89", "sm_120a"])
def test_targets_without_wgmma_multiply_bytes_on_warps(target):
    """Every M and every form that the target has instructions for, experts too, by legal schedules."""
    at = Target.parse(target)
    for name, facts in KINDS.items():
        codes, block = facts.get("codes", "int8"), facts.get("granularity") == "block"
        if not op.runs_on(at, codes):
            continue
        own = dict(codes=codes, block=block, zeros="asymmetric" in facts)
        dense = w8a8.kernel_requests(4096, 4096, **own, target=target, dtype=None)
        assert {it.name for it in dense} == {"w8a8.multistage"}, name
        for request in (*dense, *w8a8.grouped_requests(2048, 1024, 8, **own, target=target)):
            params = dict(request.params)
            gemm = direct.Gemm(params["n"], params["k"], 128, params["out_dtype"], params["dequantization"], False)
            fields = ("block_tokens", "warps", "row_blocks", "token_warps", "stages", "kc")
            tile = multistage.Tile(**{field: params[field] for field in fields})
            need = multistage.shared_bytes(gemm, tile)
            most = 2 * (multistage.MOST_E4M3 if codes == "e4m3" else multistage.MOST_SUMS)
            tile.check(units=gemm.units, most=most, need=need, target=at)


def test_rows_of_block_activations_keep_their_scales():
    w = w8a8.quantize(float_weight(), codes="e4m3", granularity="block")
    made = activations.run(torch.randn(10, 330).half(), w)
    rows = torch.tensor([3, 3, 9, 0, 1])
    some = made.of_tokens(rows)
    assert some.shape == (5, 330) and some.scales.shape == (3, 8)
    assert torch.equal(some.dequantize(), made.dequantize()[rows])
    op.check_tensors(some)
