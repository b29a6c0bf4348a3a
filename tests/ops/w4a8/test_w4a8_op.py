"""The operator without a GPU: which kernels serve which M, what they get, and how bad calls are refused."""

from __future__ import annotations

import dataclasses
from math import prod

import pytest
import torch
from terrazzo.lowering.errors import ArgumentError, LayoutMismatchError, TargetError
from terrazzo.lowering.targets import Target
from terrazzo.ops import derived, launching, w4a8
from terrazzo.ops.call import plans
from terrazzo.ops.w4a8 import QuantizedActivations, activations, op, reference
from terrazzo.ops.w4a8.entry import CALLS
from terrazzo.schedules import quantize_rows
from terrazzo.schedules.models import MEASURED, MODELS

FACTS = {"group_size": 64, "out_dtype": "float16", "dequantization": "auto", "bias": False, "pipeline": "auto"}
MODEL_SHAPES = sorted({(layer.n, layer.k) for model in MEASURED for layer in MODELS[model]})[::3]
SHAPES = (*MODEL_SHAPES, (257, 203), (1, 1), (64, 64))
TOKENS = (*range(1, 40), 63, 64, 65, 128, 129, 200, 256, 257, 300, 1000, 4096, 16384)


@pytest.mark.parametrize("few", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["few shapes", "every shape"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a"])
def test_no_m_needs_a_kernel_outside_the_listed_ones(arch, few):
    target = Target.parse(arch)
    for n, k in SHAPES[::5] if few else SHAPES:
        listed = set(w4a8.kernel_requests(n, k, target=target))
        for m in TOKENS:
            plan = plans.plan(m, op.Facts(n, k, **FACTS), target)
            assert plan.request in listed, (n, k, m)
            assert all(extent > 0 for extent in (*plan.workspace, *plan.semaphores))
            assert prod(plan.semaphores) <= launching.SEMAPHORES, (n, k, m)
            assert 1 <= op.tokens_per_launch(plan, m) <= m
            assert activations.plan(m, k, dtype="float16", gain=False, norm=False, target=target) in listed, (n, k, m)


def params(n, k, **changes) -> list[dict]:
    return [dict(request.params) for request in w4a8.kernel_requests(n, k, **({"target": "sm_90a"} | changes))]


def test_requests_carry_the_facts():
    found = params(70, 250, dtype="bfloat16", bias=True, smooth=True, group_size=32, dequantization="unsigned")
    gemms, rows = ([p for p in found if ("group" in p) == kind] for kind in (True, False))
    shaped, others = ([p for p in gemms if (p["n"] > 0) == kind] for kind in (True, False))
    assert {(p["n"], p["k"], p["bias"]) for p in shaped} == {(70, 256, True)}  # rows of 16 bytes
    assert {(p["k"], p["bias"], p["whole"]) for p in others} == {(0, False, False)}  # stream_k's come with the launch
    assert {p["k"] for p in rows} == {256}
    assert {(p["out_dtype"], p["dequantization"], p["group"]) for p in gemms} == {("bfloat16", "unsigned", 32)}
    assert {(p["dtype"], p["gain"], p["norm"]) for p in rows} == {("bfloat16", True, False)}
    raw = params(68, 250, dtype=None, out_dtype="int32", bias=True)
    assert all("group" in p and not p["bias"] for p in raw)  # int32 sums take no bias, and no activations are quantized
    assert all(p["whole"] for p in raw if p["n"] == 0)  # 68 int32 are whole pieces of 16 bytes, 68 float16 are not
    halves = [p for p in params(68, 250, dtype=None) if p["n"] == 0]
    assert halves and not any(p["whole"] for p in halves)
    assert {p["dequantization"] for p in params(70, 250, dtype=None)} == {"xor"}


def test_both_programs_serve_by_m_and_on_request(without_records):
    names = lambda **changes: {r.name for r in w4a8.kernel_requests(4096, 4096, dtype=None, target="sm_90a", **changes)}
    assert names(m=4) == {"w4a8.small_batch"} and names(m=256) == {"w4a8.stream_k"}
    assert names(m=[17, 32]) == {"w4a8.small_batch"} and names(m=33) == {"w4a8.stream_k"}
    assert names(m=256, pipeline="small_batch") == {"w4a8.small_batch"}
    assert names(m=4, pipeline="imfp") == {"w4a8.stream_k"}
    older = {r.name for r in w4a8.kernel_requests(4096, 4096, dtype=None, target="sm_80")}
    assert "w4a8.stream_k" not in older
    many = plans.plan(1000, op.Facts(4096, 4096, **FACTS | {"pipeline": "small_batch"}), Target.parse("sm_90a"))
    assert op.tokens_per_launch(many, 1000) == 32


def test_sm_80_code_runs_on_newer_gpus_from_its_ptx():
    old, new = Target.parse("sm_80"), Target.parse("sm_90a")
    plan = plans.plan(64, op.Facts(256, 512, **FACTS), old, new)
    assert plan.request.flags == ("ptx=compute_80",) and plan.request.target.arch == "sm_80"
    rows = activations.plan(64, 512, dtype="float16", gain=True, norm=True, target=old, device=new)
    assert rows.flags == ("ptx=compute_80",)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"group_size": 16}, "group"),
        ({"out_dtype": "float32"}, "out_dtype"),
        ({"dequantization": "vadd4"}, "dequantization"),
        ({"dequantization": "vadd4", "pipeline": "imfp"}, "dequantization"),
        ({"dequantization": "e4m3", "pipeline": "excp"}, "pipeline"),
        ({"dequantization": "vadd4", "pipeline": "multistage"}, "dequantization"),
        ({"pipeline": "imfp", "target": "sm_80"}, "wgmma"),
        ({"pipeline": "split"}, "pipeline"),
        ({"dtype": "float32"}, "dtype"),
        ({"pipeline": "imfp", "target": "sm_89"}, "wgmma"),
        ({"dequantization": "unsigned", "k": 66312}, "66311"),
        ({"k": 70000}, "65536"),
        ({"bias": 1}, "bias = 1"),
        ({"smooth": "yes"}, "smooth"),
        ({"m": 2**31}, "2147483647"),
    ],
)
def test_requests_that_no_kernel_serves(changes, words):
    with pytest.raises(ArgumentError, match=words):
        w4a8.kernel_requests(**({"n": 64, "k": 256, "target": "sm_90a"} | changes))


def test_unknown_targets():
    with pytest.raises(TargetError):
        w4a8.kernel_requests(64, 256, target="sm_75")


# -- activations -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_schedules_of_the_quantizer_hold_every_row(arch):
    target = Target.parse(arch)
    for k in (*range(8, 3000, 8), 4096, 5120, 7168, 8192, 11008, 13824, 14336, 28672, 29568, 65536):
        for m in (1, 7, 500):
            s = quantize_rows.choose(k, target, m)
            assert s.warps * 32 * s.vectors * 8 >= k and s.warps <= 32 and s.vectors <= 8
            assert s.rows == 1 or s.warps == 1
            assert s.warps == 1 or (s.warps - 1) * 32 * s.vectors * 8 < k + 16 + 256 * s.vectors


def test_schedules_of_many_rows_fill_the_registers_of_an_sm():
    """Rows of up to 8192 without gains on all threads; what the SASS tests hold the kernels to."""
    hopper, ampere = Target.parse("sm_90a"), Target.parse("sm_80")
    # K -> threads of an SM without gains, with gains, and without them on sm_80
    threads = {512: (1024, 1024, 1024), 4096: (2048, 1024, 1024), 8192: (2048, 1024, 1024), 14336: (896, 896, 896)}
    for k, expected in threads.items():
        plain, gain = (quantize_rows.choose(k, hopper, 1024, gain) for gain in (False, True))
        assert (plain.resident, gain.resident, quantize_rows.choose(k, ampere, 1024).resident) == expected
        assert 0 < plain.ahead < 16 and 0 < gain.ahead <= 16
    assert not quantize_rows.choose(4096, ampere, 1024).ahead and not quantize_rows.choose(4096, hopper, 16).ahead
    assert quantize_rows.choose(28672, ampere, 1024, True).resident == 32 * 16


def test_a_kernel_is_launched_behind_the_one_that_made_a_gain():
    """Gains are read before the kernel ahead has ended, so that one must not be their writer."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen, smooth, weight = [], torch.rand(20) + 0.5, torch.randn(20)
    with Recorder():
        activations._gain(smooth, weight, 20, torch.device("cpu"))
    assert seen[-1] is torch.ops.aten.new_zeros.default and torch.ops.aten.constant_pad_nd.default in seen


def test_gains_are_kept_until_a_vector_changes():
    smooth, weight = torch.rand(20) + 0.5, torch.randn(20).half()
    device = torch.device("cpu")
    gain = activations._gain(smooth, weight, 20, device)
    assert torch.equal(gain[:20], weight.float() / smooth) and gain.shape == (32,) and not gain[20:].any()
    assert activations._gain(smooth, weight, 20, device) is gain
    smooth.mul_(2)
    assert torch.equal(activations._gain(smooth, weight, 20, device)[:20], weight.float() / smooth)
    assert activations._gain(None, None, 20, device) is None
    assert torch.equal(activations._gain(None, weight, 20, device)[:20], weight.float())
    for arguments in ((smooth[:9], None), (None, weight.int())):
        with pytest.raises(ArgumentError, match="float vector"):
            activations._gain(*arguments, 20, device)


def test_nothing_is_kept_that_a_capture_has_only_recorded(monkeypatch):
    smooth, device = torch.rand(20) + 0.5, torch.device("cpu")
    weight = w4a8.quantize(torch.randn(64, 64), bias=torch.ones(64, dtype=torch.bfloat16))
    with monkeypatch.context() as capture:
        for says_so in ("is_initialized", "is_current_stream_capturing"):
            capture.setattr(torch.cuda, says_so, lambda: True)
        gain, bias = activations._gain(smooth, None, 20, device), derived.cast_once(weight, "bias", torch.float32)
    after = activations._gain(smooth, None, 20, device)
    assert after is not gain and activations._gain(smooth, None, 20, device) is after
    assert derived.cast_once(weight, "bias", torch.float32) is not bias


def test_quantized_activations_are_checked():
    x = torch.randn(2, 3, 20)
    q, scales, sums = reference.quantize_activations(x.view(6, 20))
    made = QuantizedActivations(torch.nn.functional.pad(q, (0, 12)), scales, sums, (2, 3, 20))
    made.check()
    assert (made.dequantize() - x).abs().max() <= 0.51 * scales.max() and made.k == 20
    for changes in ({"q": q}, {"scales": scales.double()}, {"row_sums": sums[:5]}):
        with pytest.raises(ArgumentError, match="quantize_activations"):
            dataclasses.replace(made, **changes).check()


# -- calls -------------------------------------------------------------------------------------------------------------
def weight(n=64, k=128, **options):
    return w4a8.quantize(torch.randn(n, k, generator=torch.Generator().manual_seed(0)), **options)


def quantized(m=2, k=128):
    q, scales, sums = reference.quantize_activations(torch.randn(m, k))
    return QuantizedActivations(q, scales, sums, (m, k))


def test_a_weight_is_adopted_once_for_each_state(monkeypatch):
    adopted = []
    real = CALLS.launches.check
    monkeypatch.setattr(CALLS.launches, "check", lambda w: adopted.append(w) or real(w))
    x, w = quantized(), weight()

    def call(w):
        with pytest.raises(ArgumentError, match="CUDA device"):  # comes after the weight's own checks
            w4a8.gemm(x, w)
        return len(adopted)

    assert (call(w), call(w), call(dataclasses.replace(w))) == (1, 1, 1)
    w.channel_scales.mul_(2)
    assert (call(w), call(w), call(weight())) == (2, 2, 3)
    with pytest.raises(LayoutMismatchError, match="layout"):
        w4a8.gemm(x, dataclasses.replace(weight(), layout="other"))


_X = torch.zeros(2, 128).half()


@pytest.mark.parametrize(
    ("words", "call"),
    [
        ("CUDA device", lambda w: w4a8.gemm(_X, w)),
        ("CUDA device", lambda w: w4a8.gemm(quantized(), w)),
        ("CUDA device", lambda w: w4a8.quantize_activations(_X)),
        ("K = 128", lambda w: w4a8.gemm(_X[:, :120], w)),
        ("K = 128", lambda w: w4a8.gemm(_X[0, 0], w)),
        ("K = 128", lambda w: w4a8.gemm(quantized(k=64), w)),
        ("K >= 1", lambda w: w4a8.quantize_activations(_X[0, 0])),
        ("bias", lambda w: w4a8.gemm(quantized(), w, bias=torch.zeros(63))),
        ("bias", lambda w: w4a8.gemm(quantized(), w, bias=torch.zeros(64), out_dtype=torch.int32)),
        ("out_dtype", lambda w: w4a8.gemm(quantized(), w, out_dtype=torch.float32)),
        ("dequantization", lambda w: w4a8.gemm(quantized(), w, dequantization="vadd4")),
        ("pipeline", lambda w: w4a8.gemm(quantized(), w, pipeline="split")),
        ("PackedWeight", lambda w: w4a8.gemm(_X, w.unpack())),
        ("no_grad", lambda w: w4a8.gemm(_X.clone().requires_grad_(), w)),
        ("no_grad", lambda w: w4a8.quantize_activations(_X.clone().requires_grad_())),
        ("smooth", lambda w: w4a8.quantize_activations(_X, smooth=torch.ones(64))),
        ("out", lambda w: w4a8.quantize_activations(_X, out=quantized(3))),
        ("row_sums", lambda w: w4a8.gemm(dataclasses.replace(quantized(), row_sums=torch.zeros(2)), w)),
        ("CUDA device", lambda w: w4a8.weight_requests(w, 4)),
    ],
)
def test_bad_calls_are_refused_before_anything_runs(words, call):
    with pytest.raises(ArgumentError, match=words):
        call(weight())


def test_the_traced_operator_knows_its_shapes():
    from torch._subclasses.fake_tensor import FakeTensorMode

    w = weight(70, 100, smooth=torch.ones(100))
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(3, 5, 100, dtype=torch.bfloat16)
        y, raw = w4a8.gemm(x, w), w4a8.gemm(x, w, out_dtype=torch.int32)
        made = w4a8.quantize_activations(x, rms_weight=torch.ones(100))
        again = w4a8.gemm(made, w)
    assert (y.shape, y.dtype, raw.dtype) == ((3, 5, 70), torch.bfloat16, torch.int32)
    assert made.q.shape == (15, 112) and made.scales.shape == (15,) and made.row_sums.dtype == torch.int32
    assert again.shape == (3, 5, 70) and again.dtype == torch.float16
