"""What operators make of a caller's tensors and keep: gains, casts, work lists. No GPU."""

from __future__ import annotations

import copy
import pickle
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import terrazzo
import torch
from terrazzo.lowering.errors import ArgumentError, CaptureError, LayoutMismatchError
from terrazzo.lowering.targets import Target
from terrazzo.ops import derived, grouped, launching, w4a8, w4a16, w4ax
from terrazzo.ops.w4a8 import activations
from terrazzo.ops.w4ax import activations as mixed
from terrazzo.ops.w4ax import op as mixed_op
from terrazzo.schedules import records
from terrazzo.schedules import w4ax as schedules
from terrazzo.schedules.problem import Gemm
from torch._subclasses import FakeTensorMode

CPU = torch.device("cpu")


def weight_with_bias():
    return w4a8.quantize(torch.randn(64, 64), bias=torch.ones(64, dtype=torch.bfloat16))


def test_what_a_graph_holds_outlives_every_change():
    """A captured graph has the address: what is made anew takes the same memory, whoever asks between."""
    norm, a, b = torch.rand(32), torch.rand(32) + 0.5, torch.rand(32) + 0.5
    first = activations._gain(a, norm, 32, CPU)
    address, alive = first.data_ptr(), weakref.ref(first)
    del first
    for smooth in (b, None, a):
        assert torch.equal(activations._gain(smooth, norm, 32, CPU), norm if smooth is None else norm / smooth)
    norm.mul_(2)
    again = activations._gain(a, norm, 32, CPU)
    assert alive() is again and again.data_ptr() == address and torch.equal(again, norm / a)
    plans = [w4ax.quantize(torch.randn(16, 256), stats, target="sm_90a") for stats in plans_of(256)]
    kept = [mixed._gain(norm256, w) for norm256 in [torch.rand(256)] for w in plans]
    assert kept[0].data_ptr() != kept[1].data_ptr()


def plans_of(k):
    """Two orders of channels."""
    made = []
    for hot in (3, 200):
        x = torch.ones(8, k)
        x[:, hot] = 100.0
        stats = w4ax.ActivationStatistics.empty(k).observe(x)
        made.append(w4ax.plan_blocks(stats))
    return made


def test_a_cast_keeps_its_memory():
    w = weight_with_bias()
    cast = derived.cast_once(w, "bias", torch.float32)
    w.bias.copy_(torch.full((64,), 3.0))
    again = derived.cast_once(w, "bias", torch.float32)
    assert again.data_ptr() == cast.data_ptr() and again.tolist() == [3.0] * 64


@pytest.mark.parametrize("change", ["data", "half", "inference"])
def test_gains_follow_memory_that_is_exchanged(change):
    if change == "inference":
        with torch.inference_mode():
            norm = torch.rand(256)
            before = activations._gain(None, norm, 256, CPU).clone()
            norm.zero_()
            terrazzo.forget(norm)
        assert before.any() and not activations._gain(None, norm, 256, CPU).any()
        return
    layer = torch.nn.LayerNorm(256)
    w = w4ax.quantize(torch.randn(16, 256), plans_of(256)[0], target="sm_90a")
    for gain in (lambda: activations._gain(None, layer.weight, 256, CPU), lambda: mixed._gain(layer.weight, w)):
        layer.weight.data = torch.ones(256)
        assert gain().min() == 1
        if change == "data":
            layer.weight.data = torch.zeros(256)
        else:
            with torch.no_grad():
                layer.weight.fill_(0)
            layer.half()
        assert not gain().any()
        layer.float()


def test_writes_that_are_not_counted_are_told():
    norm, w = torch.nn.Parameter(torch.rand(32)), weight_with_bias()
    gain, cast = activations._gain(None, norm, 32, CPU), derived.cast_once(w, "bias", torch.float32)
    norm.data.zero_()
    w.bias.data.zero_()
    terrazzo.forget(norm, w)
    assert activations._gain(None, norm, 32, CPU) is gain and not gain.any()
    assert derived.cast_once(w, "bias", torch.float32) is cast and not cast.any()
    for wrong in (5, None, [norm], torch.Tensor, Target.parse("sm_80"), w4a8.PackedWeight):
        with pytest.raises(ArgumentError, match="written = .*must be a tensor or a weight"):
            terrazzo.forget(wrong)


def test_a_forgotten_vector_is_read_anew_beside_any_norm():
    """The gain of both is kept with the norm; what was written to is the other one."""
    norm, smooth = torch.rand(32), torch.rand(32) + 0.5
    gain = activations._gain(smooth, norm, 32, CPU)
    smooth.data.mul_(2)
    terrazzo.forget(smooth)
    assert activations._gain(smooth, norm, 32, CPU) is gain and torch.equal(gain, norm / smooth)
    w = replace(weight_with_bias(), smooth=smooth[:1].expand(64).contiguous())
    gain = activations._gain(w.smooth, torch.ones(64), 64, CPU)
    norm = torch.ones(64)
    first = activations._gain(w.smooth, norm, 64, CPU)
    w.smooth.data.mul_(2)
    terrazzo.forget(w)
    assert activations._gain(w.smooth, norm, 64, CPU) is first and torch.equal(first, gain / 2)


def test_a_forgotten_weight_is_checked_again():
    w, seen = w4a16.quantize(torch.randn(64, 128)), []
    table = launching.LaunchTable(lambda w: (1, 2), seen.append)
    table.of(w, w.words, w.params), table.of(w, w.words, w.params)
    assert len(seen) == 1
    terrazzo.forget(w)
    table.of(w, w.words, w.params)
    assert len(seen) == 2


def test_copies_and_pickles_keep_nothing():
    norm = torch.rand(32)
    activations._gain(None, norm, 32, CPU)
    for twin in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        assert not getattr(twin, "_terrazzo_derived", None)
        assert torch.equal(activations._gain(None, twin, 32, CPU), norm)


def test_an_owner_can_be_saved_and_read(tmp_path):
    norm = torch.nn.Parameter(torch.rand(32))
    activations._gain(None, norm, 32, CPU)
    torch.save({"norm": norm}, tmp_path / "norm.pt")
    back = torch.load(tmp_path / "norm.pt")["norm"]
    assert torch.equal(activations._gain(None, back, 32, CPU), norm)


def test_vectors_that_are_new_in_every_call_are_not_kept_for_ever():
    norm = torch.rand(32)
    for _ in range(40):
        smooth = torch.rand(32) + 0.5
        assert torch.equal(activations._gain(smooth, norm, 32, CPU), norm / smooth)
    assert len(norm._terrazzo_derived) == derived._MOST


def test_nothing_made_in_a_capture_is_kept(monkeypatch):
    norm = torch.rand(32)
    monkeypatch.setattr(launching, "may_keep", lambda device: False)
    first = activations._gain(None, norm, 32, CPU)
    assert activations._gain(None, norm, 32, CPU) is not first and not getattr(norm, "_terrazzo_derived", None)


def test_experts_of_another_layout_are_seen_behind_checked_words():
    """The note that experts were checked lies on their words, and says what it looked at."""
    experts = [w4a16.quantize(torch.randn(64, 128)) for _ in range(2)]
    stacked = w4a16.GroupedWeight.stack(experts)
    grouped.check_once(stacked)
    other = grouped.GroupedWeight(replace(stacked.stacked, layout="layout.of.another.version"))
    assert other.stacked.words is stacked.stacked.words
    with pytest.raises(LayoutMismatchError):
        grouped.check_once(other)
    grouped.check_once(stacked)
    perm = grouped.GroupedWeight(replace(stacked.stacked, perm=torch.arange(128)))
    with pytest.raises(ArgumentError, match="perm"):
        grouped.check_once(perm)


@pytest.mark.parametrize("family", ["w4a16", "w4a8"])
def test_a_parameter_that_requires_a_gradient_is_refused(family):
    ops = {"w4a16": w4a16, "w4a8": w4a8}[family]
    w = ops.quantize(torch.randn(64, 128))
    x = torch.nn.Parameter(torch.randn(4, 128).half())
    with pytest.raises(ArgumentError, match="requires_grad"):
        ops.gemm(x, w)


def test_work_lists_outlive_tuned_records(monkeypatch):
    """Of the `persistent` program: captured graphs read them, whatever records say later."""
    target, gemm = Target.parse("sm_80"), Gemm.of_blocks(1000, 1280, 3)
    listed = schedules.choose_persistent(gemm, target, 100)
    weight = SimpleNamespace(n=1000, blocks=10, blocks8=3)
    asked = lambda m: mixed_op.work_lists(weight, m, listed, target, target, CPU)
    lists = asked(100)
    assert [it.dtype for it in lists] == [torch.int32] * 2 and lists[1][-1] == len(lists[0])
    records.changed()
    assert asked(100) is lists
    monkeypatch.setattr(launching, "may_keep", lambda device: False)
    assert asked(100) is lists  # whatever stream is captured
    with pytest.raises(CaptureError, match="M = 99 never ran on cpu, .*call it once with each M before the capture"):
        asked(99)


def test_options_of_other_types_are_refused_by_name():
    w, x = w4a8.quantize(torch.randn(64, 128)), torch.randn(4, 128).half()
    own = w4a16.quantize(torch.randn(64, 128))
    q = w4a8.QuantizedActivations(torch.zeros(4, 128, dtype=torch.int8), torch.ones(4), torch.zeros(4).int(), (4, 128))
    experts, offsets = w4a8.GroupedWeight.stack([w] * 2), torch.tensor([0, 2, 4], dtype=torch.int32)
    for words, call in (
        ("numerics = ", lambda: w4a16.gemm(x, own, numerics=["auto"])),
        ("dequantization = ", lambda: w4a8.gemm(q, w, dequantization=["auto"])),
        ("pipeline = ", lambda: w4a8.gemm(q, w, pipeline=["auto"])),
        ("out_dtype = 'float16'", lambda: w4a8.gemm(q, w, out_dtype="float16")),
        ("out_dtype = 'float16'", lambda: w4a8.grouped_gemm(q, experts, offsets, out_dtype="float16")),
        ("codes = ", lambda: w4a8.quantize_activations(x, codes=["int8"])),
    ):
        with pytest.raises(ArgumentError, match=words):
            call()


def test_traced_calls_are_asked_for_their_choices():
    w, own = w4a8.quantize(torch.randn(64, 128)), w4a16.quantize(torch.randn(64, 128))
    with FakeTensorMode():
        x = torch.empty(4, 128, dtype=torch.float16)
        for words, call in (
            ("numerics = 'x'", lambda: w4a16.gemm(x, own, numerics="x")),
            ("dequantization = 'e4m3'", lambda: w4a8.gemm(x, w, dequantization="e4m3")),
            ("pipeline = 'x'", lambda: w4a8.gemm(x, w, pipeline="x")),
            ("out_dtype = 'int64'", lambda: w4a8.gemm(x, w, out_dtype=torch.int64)),
        ):
            with pytest.raises(ArgumentError, match=words):
                call()


def test_one_tensor_without_a_count_of_writes_leaves_none():
    with torch.inference_mode():
        inside = torch.zeros(1)
    assert launching.writes(torch.zeros(1), inside) == launching.writes(inside, torch.zeros(1)) == -1


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_sparse_activations_are_refused_by_name():
    x = torch.randn(4, 128).half()
    for make in (torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr):
        for ops in (w4a16, w4a8):
            w = ops.quantize(torch.randn(64, 128))
            with pytest.raises(ArgumentError, match="x = .*sparse.*dense"):
                ops.gemm(make(x), w)
        with pytest.raises(ArgumentError, match="x = .*sparse.*dense"):
            w4a8.quantize_activations(make(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_another_default_dtype_changes_no_weight(dtype):
    """Model loaders set one."""
    x, weight = torch.randn(1023, 256), torch.randn(16, 256)  # 1022 is no bfloat16
    plan = w4ax.plan_blocks(w4ax.ActivationStatistics.empty(256).observe(x))

    def everything():
        statistics = w4ax.ActivationStatistics.empty(256).observe(x)
        made, own = w4ax.quantize_weight(weight, plan), w4a16.quantize_weight(weight, group_size=128)
        smooth = w4a8.search_smooth(x, weight, steps=2, max_tokens=1023).smooth
        said = w4ax.report(statistics, plan, weight, x)
        return statistics.maximum, made.codes, made.scales, own.codes, own.scales, smooth, said

    *wanted, said = everything()
    torch.set_default_dtype(dtype)
    try:
        *found, again = everything()
    finally:
        torch.set_default_dtype(torch.float32)
    for a, b in zip(wanted, found, strict=True):
        assert (a is None and b is None) or (a.dtype == b.dtype and torch.equal(a, b))
    assert str(again) == str(said) and again.errors == said.errors


def test_a_file_takes_two_fields_of_one_tensor(tmp_path):
    vector = torch.rand(64) + 0.5
    w = replace(w4a8.quantize(torch.randn(64, 64)), smooth=vector, bias=vector)
    w.save(tmp_path / "w.safetensors")
    back = w4a8.PackedWeight.load(tmp_path / "w.safetensors")
    assert torch.equal(back.smooth, vector) and torch.equal(back.bias, vector)


def test_facts_of_a_file_of_experts_are_checked(tmp_path):
    stacked = w4a8.GroupedWeight.stack([w4a8.quantize(torch.randn(64, 128)) for _ in range(2)])
    for name, value in (("group_size", 48), ("group_size", 0), ("n", 1.5), ("k", "x")):
        grouped.GroupedWeight(replace(stacked.stacked, **{name: value})).save(tmp_path / "g.safetensors")
        with pytest.raises(ArgumentError):
            grouped.GroupedWeight.load(w4a8.PackedWeight, tmp_path / "g.safetensors")
