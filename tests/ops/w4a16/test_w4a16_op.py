"""The operator without a GPU: which kernels serve which M, what they get, and how bad calls are refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from terrazzo.lowering.errors import ArgumentError, LayoutMismatchError, TargetError
from terrazzo.lowering.targets import Target
from terrazzo.ops import launching, w4a16
from terrazzo.ops.call import plans
from terrazzo.ops.weight_only import op
from terrazzo.ops.weight_only.entry import CALLS
from terrazzo.schedules.models import MEASURED, MODELS

FACTS = {"group_size": 128, "symmetric": False, "scale_dtype": "float16", "dtype": "float16", "bias": False}
MODEL_SHAPES = sorted({(layer.n, layer.k) for model in MEASURED for layer in MODELS[model]})
SHAPES = (*MODEL_SHAPES, (257, 203), (1, 1), (64, 64))
TOKENS = (*range(1, 40), 63, 64, 65, 100, 127, 128, 129, 200, 255, 256, 257, 300, 512, 1000, 1024, 4096, 8192, 16384)


def requests(n, k, target, **changes):
    facts = {name: value for name, value in (FACTS | changes).items() if name != "numerics"}
    return w4a16.kernel_requests(n, k, **facts, target=target, numerics=changes.get("numerics", "auto"))


@pytest.mark.parametrize("few", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["few shapes", "every shape"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a"])
def test_no_m_needs_a_kernel_outside_the_listed_ones(arch, few):
    target = Target.parse(arch)
    for n, k in SHAPES[::5] if few else SHAPES:
        listed = set(requests(n, k, target))
        for m in TOKENS:
            plan = plans.plan(m, op.Facts(n, k, **FACTS), target)
            assert plan.request in listed, (n, k, m)
            assert all(extent > 0 for extent in (*plan.workspace, *plan.semaphores))
            semaphores = 1
            for extent in plan.semaphores:
                semaphores *= extent
            assert semaphores <= launching.SEMAPHORES, (n, k, m)


def test_numerics_follow_the_scales():
    auto = {dict(r.params)["numerics"] for r in requests(4096, 4096, "sm_90a")}
    assert auto == {"post", "exact"}
    wide = requests(4096, 4096, "sm_90a", scale_dtype="float32")
    assert {dict(r.params)["numerics"] for r in wide} == {"post"}
    for numerics in ("exact", "fused", "post"):
        assert {dict(r.params)["numerics"] for r in requests(64, 256, "sm_80", numerics=numerics)} == {numerics}
    with pytest.raises(ArgumentError, match="post"):
        requests(64, 256, "sm_90a", scale_dtype="float32", numerics="exact")
    with pytest.raises(ArgumentError, match="numerics"):
        requests(64, 256, "sm_90a", numerics="precise")


def test_one_group_and_odd_k_reach_the_programs():
    params = dict(requests(64, 250, "sm_90a", group_size=250)[0].params)
    assert params["group"] == 0 and params["k"] == 256  # x is padded to rows of 16 bytes
    with pytest.raises(ArgumentError, match="group"):
        requests(64, 256, "sm_90a", group_size=16)
    with pytest.raises(TargetError):
        requests(64, 256, "sm_75")


def test_sm_80_code_runs_on_newer_gpus_from_its_ptx():
    old, new = Target.parse("sm_80"), Target.parse("sm_90a")
    plan = plans.plan(64, op.Facts(256, 512, **FACTS), old, new)
    assert plan.request.flags == ("ptx=compute_80",) and plan.request.target.arch == "sm_80"
    assert plans.plan(64, op.Facts(256, 512, **FACTS), old).request.flags == ()


def weight(n=64, k=128):
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    return w4a16.pack(codes, torch.rand(n, 1).half(), group_size=k)


def test_a_weight_is_adopted_once_for_each_state(monkeypatch):
    adopted = []
    real = CALLS.launches.check
    monkeypatch.setattr(CALLS.launches, "check", lambda w: adopted.append(w) or real(w))
    x, w = torch.zeros(2, 128).half(), weight()

    def call(w):
        with pytest.raises(ArgumentError, match="CUDA device"):  # comes after the weight's own checks
            w4a16.gemm(x, w)
        return len(adopted)

    assert (call(w), call(w)) == (1, 1)
    assert call(dataclasses.replace(w)) == 1  # another object around the same tensors, as in a traced graph
    w.params.copy_(w.params)
    assert (call(w), call(w)) == (2, 2)
    assert call(weight()) == 3
    with pytest.raises(LayoutMismatchError, match="layout"):
        w4a16.gemm(x, dataclasses.replace(weight(), layout="other"))


@pytest.mark.parametrize(
    ("words", "call"),
    [
        ("CUDA device", lambda w: w4a16.gemm(torch.zeros(2, 128).half(), w)),
        ("K = 128", lambda w: w4a16.gemm(torch.zeros(2, 120).half(), w)),
        ("K = 128", lambda w: w4a16.gemm(torch.zeros(()).half(), w)),
        ("bias", lambda w: w4a16.gemm(torch.zeros(2, 128).half(), w, bias=torch.zeros(63).half())),
        ("PackedWeight", lambda w: w4a16.gemm(torch.zeros(2, 128).half(), w.unpack())),
        ("numerics", lambda w: w4a16.gemm(torch.zeros(2, 128).half(), w, numerics="precise")),
        ("PackedWeight", lambda w: w4a16.gemm(torch.zeros(2, 128).half(), torch.zeros(64, 128))),
        ("no_grad", lambda w: w4a16.gemm(torch.zeros(2, 128).half().requires_grad_(), w)),
        ("CUDA device", lambda w: w4a16.weight_requests(w, 4, torch.float16)),
        ("symmetric = 1", lambda w: requests(64, 128, "sm_90a", symmetric=1)),
        ("bias = 1.0", lambda w: requests(64, 128, "sm_90a", bias=1.0)),
    ],
)
def test_bad_calls_are_refused_before_anything_runs(words, call):
    with pytest.raises(ArgumentError, match=words):
        call(weight())


def test_the_traced_operator_knows_its_shape():
    from torch._subclasses.fake_tensor import FakeTensorMode

    w = weight(70, 128)
    with FakeTensorMode(allow_non_fake_inputs=True):
        y = w4a16.gemm(torch.empty(3, 5, 128, dtype=torch.bfloat16), w)
    assert y.shape == (3, 5, 70) and y.dtype == torch.bfloat16


def test_weights_of_other_sizes_share_the_kernels_of_stream_k(without_records):
    """One for a schedule: n and k come with the launch, and so does whether there is a bias."""
    facts = dict(group_size=128, symmetric=False, scale_dtype="float16", target="sm_90a")
    named = lambda n, k, m, **more: set(w4a16.kernel_requests(n, k, m=m, **facts, **more))
    assert named(4096, 4096, 2048) == named(4096, 14336, 2048) == named(4096, 4096, 2048, bias=True)
    (shared,) = named(4096, 4096, 2048)
    params = dict(shared.params)
    assert (params["n"], params["k"], params["bias"], params["whole"]) == (0, 0, False, True)
    (ragged,) = named(4097, 4096, 2048)  # rows of y that are no whole 16 bytes are written another way
    assert dict(ragged.params)["n"] == 0 and dict(ragged.params)["whole"] is False


def test_small_tiles_and_small_batches_have_kernels_of_their_sizes(without_records):
    facts = dict(group_size=128, symmetric=False, scale_dtype="float16", target="sm_90a")
    for m, name in ((1, "w4a16.small_batch"), (16, "w4a16.stream_k")):
        (one,) = w4a16.kernel_requests(8192, 28672, m=m, **facts)
        assert one.name == name and (dict(one.params)["n"], dict(one.params)["k"]) == (8192, 28672)
