"""What attention's calls refuse or leave alone before a launch: schedules, streams, memory, traced calls. No GPU."""

from __future__ import annotations

import copy
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch
from terrazzo.lowering import kernels
from terrazzo.lowering.errors import ArgumentError, CaptureError, TargetError
from terrazzo.lowering.targets import Target
from terrazzo.ops import launching
from terrazzo.ops.attention import append, checks, decode, decode_requests, pack_cache, prefill, prefill_requests, store
from terrazzo.ops.attention.cache import launch
from terrazzo.ops.attention.cache.layout import CacheLayout
from terrazzo.ops.attention.decoding import op
from terrazzo.ops.attention.prefilling import prefill_op
from terrazzo.ops.attention.writing import writing
from terrazzo.schedules import attention as decode_schedules
from terrazzo.schedules import attention_prefill as prefill_schedules
from terrazzo.schedules.checks import check_fields
from torch._subclasses import FakeTensorMode

H200 = Target.parse("nvidia/nvidia-h200")
Prefill = prefill_schedules.Prefill


@pytest.fixture
def cache():
    return pack_cache(*torch.randn(2, 3, 2, 64, 128), "int4", "int4", lengths=torch.tensor([3, 64, 9]))


@pytest.fixture
def on_a_gpu(monkeypatch):
    """CPU tensors pass for a GPU's, up to the launch of `seen`'s kernels."""
    seen = []
    monkeypatch.setattr(checks, "check_on_gpu", lambda q: None)
    monkeypatch.setattr(writing, "check_rows", lambda *args: None)
    monkeypatch.setattr(launch, "current_targets", lambda *args: (H200, H200))
    monkeypatch.setattr(launch, "warm", lambda *args: (lambda *given: seen.append(given), False))
    return seen


def q_of(cache, new=4):
    return torch.zeros(new, 8, 128).half(), torch.tensor([0, new, new, new], dtype=torch.int32)


# ---------------------------------------------------------------- schedules


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (Prefill("mma", 2, 8, 1), "two stages"),
        (Prefill("mma", 2, 8, 0), "two stages"),
        (Prefill("mma", 2, 33, 2), "1 to 32 warps"),
        (Prefill("mma", 7, 8, 4), "1 to 2 row tiles"),
        (Prefill("mma", 0, 8, 4), "1 to 2 row tiles"),
        (Prefill("shared", 8, 2, 4), "(12, 8, 4) warps"),
        (Prefill("shared", 8, 0, 4), "(12, 8, 4) warps"),
        (Prefill("shared", 4, 8, 4), "8 row tiles"),
        (Prefill("shared", 8, 8, 4, 0), "2 or 3 buffers"),
        (Prefill("shared", 8, 8, 4, 5), "2 or 3 buffers"),
        (Prefill("shared", 8, 8, 0), "two stages"),
        (Prefill("shared", 8, 12, 20, 3), "bytes of shared memory, a block on sm_90a has"),
        (Prefill("shared", 8, 8, 4, 2.0), "buffers must be of type int"),
        (Prefill("shared", 8, 8.0, 4), "warps must be of type int"),
        (Prefill("shared", 8, 8, True), "stages must be of type int"),
        (decode_schedules.Decode(1, 4, 1, 3, 1), "must be a schedule, Prefill"),
        (5, "must be a schedule, Prefill"),
        ("shared", "must be a schedule, Prefill"),
        (True, "must be a schedule, Prefill"),
        ({}, "must be a schedule, Prefill"),
        (Prefill, "must be a schedule, Prefill"),
    ],
    ids=str,
)
def test_prefill_schedules_that_cannot_run_are_refused(cache, on_a_gpu, schedule, words):
    q, starts = q_of(cache)
    for call in (
        lambda: prefill(q, cache, starts, 4, schedule=schedule),
        lambda: prefill_requests(cache.layout, page=0, schedule=schedule, target="sm_90a"),
    ):
        with pytest.raises(ArgumentError) as error:
            call()
        assert error.value.argument == "schedule" and words in str(error.value)
    assert not on_a_gpu


def test_wgmma_is_asked_for_where_there_is_some():
    with pytest.raises(ArgumentError, match="sm_80 has no wgmma"):
        prefill_requests(CacheLayout("int4", "int4", 128), schedule=Prefill("shared", 8, 8, 4), target="sm_80")


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a"])
def test_every_schedule_of_the_space_passes(arch, head_dim):
    problem, target = prefill_op.problem_of(CacheLayout("int4", "int4", head_dim), 128, 0, True), Target.parse(arch)
    for schedule in prefill_schedules.every(problem, target):
        prefill_schedules.check(schedule, problem, target)


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (decode_schedules.Decode(1, 4.0, 1, 3, 1), "warps must be of type int"),
        (decode_schedules.Decode(1, "4", 1, 3, 1), "warps must be of type int"),
        (decode_schedules.Decode(1, 4, 1, 3, 1, 1), "shared_rows must be of type bool"),
        (Prefill("mma", 2, 8, 2), "must be a schedule, Decode or WarpgroupDecode"),
        (decode_schedules.Decode, "must be a schedule, Decode or WarpgroupDecode"),
        (0, "must be a schedule, Decode or WarpgroupDecode"),
    ],
    ids=str,
)
def test_decode_schedules_of_other_types_are_refused(cache, on_a_gpu, schedule, words):
    for call in (
        lambda: decode(torch.zeros(3, 1, 8, 128).half(), cache, schedule=schedule),
        lambda: decode_requests((3, 1, 8, 128), cache, schedule=schedule, target="sm_90a"),
    ):
        with pytest.raises(ArgumentError) as error:
            call()
        assert error.value.argument == "schedule" and words in str(error.value)


def test_schedules_of_decode_pass():
    for made in (
        decode_schedules.WarpgroupDecode(2, 4, 4, 3, 1),
        decode_schedules.Decode(1, 4, 1, 3, 1),
    ):
        check_fields(made, *op.SCHEDULES)


def test_an_equal_schedule_of_other_types_leaves_no_plan_behind(cache):
    for wrong, right in (
        (decode_schedules.Decode(1, 4.0, 1, 3, 1), decode_schedules.Decode(1, 4, 1, 3, 1)),
        (decode_schedules.Decode(1, 4, 1, 3, 1, False, True), decode_schedules.Decode(1, 4, 1, 3, 1)),
    ):
        with pytest.raises(ArgumentError, match="schedule"):
            decode_requests((3, 1, 8, 128), cache, schedule=wrong, target="sm_90a")
        (request,) = decode_requests((3, 1, 8, 128), cache, schedule=right, target="sm_90a")
        assert all(type(value) is not float for _, value in request.params) and dict(request.params)["warps"] == 4


# ---------------------------------------------------------------- memory that kernels and graphs keep


def test_multiples_live_as_long_as_the_process():
    device = torch.device("cpu")
    first = launch.multiples(5, 7, device)
    assert first.tolist() == [0, 7, 14, 21, 28] and first.dtype == torch.int32
    address = first.data_ptr()
    for count in (3, 64, 65, 1000, 40_000):
        made = launch.multiples(count, 7, device)
        assert made.tolist() == list(range(0, 7 * count, 7))
    assert any(kept.data_ptr() == address for kept in launch._multiples[device, 7])  # a captured graph reads it
    assert launch.multiples(5, 7, device) is first  # no slice of each call
    assert launch.multiples(2, 2**30, device).tolist() == [0, 2**30]


def test_what_a_graph_makes_serves_no_other_call(monkeypatch):
    device = torch.device("cpu")
    monkeypatch.setattr(launching, "may_keep", lambda device: False)
    assert launch.multiples(3, 11, device).tolist() == [0, 11, 22] and not launch._multiples[device, 11]
    monkeypatch.setattr(launching, "may_keep", lambda device: True)
    kept = launch.multiples(3, 11, device).data_ptr()
    monkeypatch.setattr(launching, "may_keep", lambda device: False)
    assert launch.multiples(3, 11, device).data_ptr() == kept


def test_what_a_cache_hands_to_kernels_is_found_once(cache, monkeypatch):
    first = launch.operands(cache)
    assert launch.operands(cache) is first and first.slots.tolist() == [0, 1, 2]
    other = replace(cache, lengths=cache.lengths.clone())
    assert launch.operands(other).lengths is other.lengths and launch.operands(other).pages is first.pages
    copied = copy.deepcopy(cache)
    assert launch.operands(copied).pages is copied.pages and copied.pages is not cache.pages
    monkeypatch.setattr(launching, "may_keep", lambda device: False)  # in a capture
    made = replace(cache)
    assert launch.operands(made) is not launch.operands(made)


def test_a_kernel_that_was_never_launched_is_not_captured(cache, monkeypatch):
    monkeypatch.setattr(launch, "capturing", lambda device: True)
    monkeypatch.setattr(kernels, "get_kernel", lambda request: SimpleNamespace(warm_on=lambda device: False))
    request = decode_requests((3, 1, 8, 128), cache, target="sm_80")[0]
    with pytest.raises(CaptureError, match="attention.decode for 3 sequences of up to 7 tokens was never launched"):
        launch.warm(request, torch.device("cpu"), "{} sequences of up to {} tokens", 3, 7)
    monkeypatch.setattr(kernels, "get_kernel", lambda request: SimpleNamespace(warm_on=lambda device: True))
    assert launch.warm(request, torch.device("cpu"), "a call")[1]


@pytest.mark.parametrize("pitch", [2**31, 2**32, 2**30])
def test_heads_too_far_apart_are_copied(monkeypatch, pitch):
    """A kernel multiplies a head by the pitch in 32 bits."""
    copied = []
    monkeypatch.setattr(launching, "aligned_copy", lambda x: copied.append(x) or torch.zeros(x.shape, dtype=x.dtype))
    x = torch.empty(128, dtype=torch.float16, device="meta").as_strided((40, 2, 128), (128, pitch, 1))
    assert writing.rows_of(x)[1:] == (256, 128) and len(copied) == 1
    near = torch.zeros(40, 2, 128).half()
    assert writing.rows_of(near)[0].data_ptr() == near.data_ptr() and len(copied) == 1


@pytest.mark.parametrize("other", ["q", "out"])
def test_lse_shares_no_memory(cache, on_a_gpu, other):
    words = rf"lse = .*shares memory with {other}"
    q, starts = q_of(cache)
    held = {"q": q, "out": torch.zeros_like(q)}
    lse = held[other].view(torch.float32).flatten()[:32].view(4, 8)
    with pytest.raises(ArgumentError, match=words):
        prefill(q, cache, starts, 4, out=held["out"], lse=lse)
    q = torch.zeros(3, 1, 8, 128).half()
    held = {"q": q, "out": torch.zeros_like(q)}
    lse = held[other].view(torch.float32).flatten()[:24].view(3, 1, 8)
    with pytest.raises(ArgumentError, match=words):
        decode(q, cache, out=held["out"], lse=lse)
    assert not on_a_gpu


def test_new_tokens_of_no_sequence_are_refused(cache, on_a_gpu):
    q, starts = q_of(cache)
    k = torch.zeros(4, 2, 128).half()
    with pytest.raises(ArgumentError, match="q = '4 tokens, most_new 0, 3 sequences': has new tokens of no sequence"):
        prefill(q, cache, starts, 0)
    with pytest.raises(ArgumentError, match="k = '4 tokens, most_new 0, 3 sequences"):
        store(cache, k, k, starts, 0)
    none = replace(cache, lengths=cache.lengths[:0], pages=cache.pages[:0])
    with pytest.raises(ArgumentError, match="q = '4 tokens, most_new 4, 0 sequences"):
        prefill(q, none, starts[:1], 4)
    with pytest.raises(ArgumentError, match="q = .*: has new tokens of no sequence"):
        decode(q, none, cu_seqlens=starts[:1], most_new=4)
    assert prefill(q[:0], cache, starts * 0, 0).shape == (0, 8, 128) and not on_a_gpu
    store(cache, k[:0], k[:0], starts * 0, 0)


# ---------------------------------------------------------------- tensors and numbers


def test_a_cap_beyond_what_tanh_resolves_is_refused(cache):
    q, starts = q_of(cache)
    for call in (lambda: prefill(q, cache, starts, 4, softcap=1025.0), lambda: decode(q[:3], cache, softcap=1e6)):
        with pytest.raises(ArgumentError, match="softcap = .*up to 1024"):
            call()


def test_sparse_tensors_are_refused_by_name(cache):
    q, starts = q_of(cache)
    k = torch.zeros(4, 2, 128).half()
    sparse = k.to_sparse()
    for words, call in (
        ("q = 'torch.sparse_coo': must be a dense tensor", lambda: prefill(q.to_sparse(), cache, starts, 4)),
        ("q = 'torch.sparse_coo", lambda: decode(q[:3].to_sparse(), cache)),
        ("k = 'torch.sparse_coo", lambda: prefill(q, cache, starts, 4, k=sparse, v=k)),
        ("cu_seqlens = 'torch.sparse_coo", lambda: prefill(q, cache, starts.to_sparse(), 4)),
        ("v = 'torch.sparse_coo", lambda: store(cache, k, sparse, starts, 4)),
        ("k = 'torch.sparse_coo", lambda: append(cache, k[:3].to_sparse(), k[:3])),
    ):
        with pytest.raises(ArgumentError, match=words):
            call()


def test_parameters_are_checked_as_tensors_are(cache):
    q, starts = q_of(cache)
    k = torch.nn.Parameter(torch.zeros(4, 2, 128).half())
    own = torch.nn.Parameter(q)
    for words, call in (
        ("q = 'requires_grad=True'", lambda: prefill(own, cache, starts, 4)),
        ("q = 'requires_grad=True'", lambda: decode(own[:3], cache)),
        ("k = 'requires_grad=True'", lambda: store(cache, k, k, starts, 4)),
    ):
        with pytest.raises(ArgumentError, match=words):
            call()
    with torch.no_grad():
        for words, call in (
            ("cu_seqlens", lambda: prefill(own, cache, [0, 4], 4)),
            ("most_new = 2.5", lambda: prefill(own, cache, starts, 2.5)),
            ("k = 'list'", lambda: prefill(own, cache, starts, 4, k=[1], v=[1])),
            ("sinks = 'list'", lambda: decode(torch.nn.Parameter(q[:3]), cache, sinks=[1.0])),
            ("most_new = 2.5", lambda: store(cache, k, k, starts, 2.5)),
            ("cu_seqlens = .*must be int32 .4.", lambda: store(cache, k, k, starts.long(), 4)),
            ("cu_seqlens = .*must be int32 .4.", lambda: store(cache, k, k, starts[:3], 4)),
        ):
            with pytest.raises(ArgumentError, match=words):
                call()


def test_traced_calls_take_no_schedule_and_no_target(cache):
    with FakeTensorMode() as mode:
        held = {f.name: getattr(cache, f.name) for f in fields(cache)}
        fake = replace(cache, **{n: mode.from_tensor(t) for n, t in held.items() if isinstance(t, torch.Tensor)})
        q, starts = torch.empty(4, 8, 128).half(), torch.empty(4, dtype=torch.int32)
        k = torch.empty(4, 2, 128).half()
        for words, call in (
            ("schedule = 5: cannot be given", lambda: prefill(q, fake, starts, 4, schedule=5)),
            ("target = 'sm_80'", lambda: prefill(q, fake, starts, 4, target="sm_80")),
            ("most_new = 2.5", lambda: prefill(q, fake, starts, 2.5)),
            ("scale = 'x'", lambda: prefill(q, fake, starts, 4, scale="x")),
            ("sinks = 'list'", lambda: prefill(q, fake, starts, 4, sinks=[1.0])),
            ("splits = 2", lambda: decode(q[:3], fake, splits=2)),
            ("window = 1.5", lambda: decode(q[:3], fake, window=1.5)),
            ("target = 'sm_80'", lambda: append(fake, k[:3], k[:3], target="sm_80")),
            ("target = 'sm_80'", lambda: store(fake, k, k, starts, 4, target="sm_80")),
        ):
            with pytest.raises(ArgumentError, match=words):
                call()
    # a real q beside a fake cache is traced, too
    assert launching.is_traced(torch.zeros(1), fake.pages) and not launching.is_traced(torch.zeros(1), cache.pages)


# ---------------------------------------------------------------- targets


def test_a_target_is_the_gpus_own_or_runs_as_ptx(monkeypatch):
    l40s, seen = Target.parse("nvidia/nvidia-l40s"), []

    def detect(device=None):
        seen.append(device)
        return l40s if device == 1 else H200

    monkeypatch.setattr(Target, "detect", staticmethod(detect))
    launching.detect.cache_clear()
    try:
        second = torch.device("cuda", 1)
        assert launch.current_targets(None, second) == (l40s, l40s) and launch.current_targets(None) == (H200, H200)
        assert launch.current_targets("sm_80", second) == (Target.parse("sm_80"), l40s)
        with pytest.raises(ArgumentError, match="target = 'sm_90a': NVIDIA L40S runs programs of sm_89"):
            launch.current_targets("sm_90a", second)
        assert seen.count(1) == 1  # asked once for each GPU
        assert launching.requested_targets("sm_89") == (Target.parse("sm_89"),) * 2  # to compile for another machine
        assert launching.requested_targets("sm_80") == (Target.parse("sm_80"), H200)
        assert launching.requested_targets(l40s) == (l40s, l40s)
        assert launching.requested_targets("sm_90a") == (H200, H200)
        for other in ("nvidia/nvidia-h100", "nvidia/nvidia-a100"):  # not what is here, though H200 runs its programs
            assert launching.requested_targets(other) == (Target.parse(other),) * 2
    finally:
        launching.detect.cache_clear()


def test_requests_without_a_gpu_name_one(monkeypatch):
    def none(device=None):
        raise TargetError("target", None, "no CUDA device", "name one")

    monkeypatch.setattr(Target, "detect", staticmethod(none))
    assert launching.requested_targets("sm_89") == (Target.parse("sm_89"),) * 2
    with pytest.raises(TargetError):
        launching.requested_targets(None)


def test_requests_of_caches_that_there_are_not_are_refused():
    layout = CacheLayout("int4_channel64", "int4", 128)
    for residual in (10, 512, 0, 128):
        with pytest.raises(ArgumentError, match=f"residual = {residual}"):
            prefill_requests(layout, page=128, residual=residual, target="sm_90a")
    assert dict(prefill_requests(layout, page=128, target="sm_90a")[0].params)["residual"] == 64


# ---------------------------------------------------------------- ragged decode, split prefill


@pytest.mark.parametrize("change", [torch.Tensor.float, lambda q: q[..., :64], lambda q: q[:, 0, 0]])
def test_decode_names_queries_that_do_not_fit(cache, on_a_gpu, change):
    q = torch.zeros(3, 1, 8, 128).half()
    with pytest.raises(ArgumentError, match=r"q = .*: must be float16 or bfloat16 \[B, q_len, Hq, 128\]"):
        decode(change(q), cache)
    assert not on_a_gpu


def test_ragged_decode_says_what_does_not_fit(cache, on_a_gpu, monkeypatch):
    monkeypatch.setattr(launch, "semaphores", lambda *args: None)
    q, starts = q_of(cache, 6)
    for words, call in (
        ("most_new = 4: belongs to cu_seqlens", lambda: decode(q, cache, most_new=4)),
        ("most_new = 0: must be 1..8", lambda: decode(q, cache, cu_seqlens=starts)),
        ("most_new = 9: must be 1..8", lambda: decode(q, cache, cu_seqlens=starts, most_new=9)),
        ("most_new = True", lambda: decode(q, cache, cu_seqlens=starts, most_new=True)),
        ("must be int32 .4.", lambda: decode(q, cache, cu_seqlens=starts.long(), most_new=6)),
        ("must be int32 .4.", lambda: decode(q, cache, cu_seqlens=starts[:3], most_new=6)),
        ("cu_seqlens", lambda: decode(q, cache, cu_seqlens=[0, 6, 6, 6], most_new=6)),
        ("q = .*new tokens, Hq, D", lambda: decode(q[None], cache, cu_seqlens=starts, most_new=6)),
        ("lse", lambda: decode(q, cache, cu_seqlens=starts, most_new=6, lse=torch.zeros(6, 1, 8))),
    ):
        with pytest.raises(ArgumentError, match=words):
            call()
    assert decode(q[:0], cache, cu_seqlens=starts * 0, most_new=1).shape == (0, 8, 128) and not on_a_gpu
    assert decode(q, cache, cu_seqlens=starts, most_new=6).shape == (6, 8, 128) and len(on_a_gpu) == 1


def test_short_chunks_over_long_pasts_are_cut_along_the_past():
    problem = prefill_op.problem_of(CacheLayout("int4", "int4", 128), 128, 0, True)
    for chunk in (16, 64, 128, 256, 512, 4096):
        for past in (0, 1000, 8192, 131072):
            facts = (problem, H200, H200.sms, chunk * 4, 8)
            rows, parts = prefill_schedules.divide(*facts, past + chunk)
            tiles = 8 * -(-chunk * 4 // (rows or 192)) * parts
            assert 1 <= parts <= prefill_schedules.MOST_PARTS
            if parts == 1:
                assert rows == prefill_schedules.narrower(*facts)
            else:  # four stages of 64 tokens are worth a CTA
                assert 4 * parts <= -(-(past + chunk) // 64)
            if chunk <= 256 and past >= 8192:  # whole waves: few SMs are idle in the last one
                assert parts > 1 and tiles > 0.95 * H200.sms * -(-tiles // H200.sms)
            if chunk == 4096 or past == 0:  # they fill the GPU, or have nothing to share
                assert parts == 1


def test_a_split_prefill_is_merged_behind_it(cache, on_a_gpu):
    cache = replace(cache, max_length=64)
    q, starts = q_of(cache)
    prefill(q, cache, starts, 4, splits=3)
    partial, merge = on_a_gpu
    assert partial[11].shape == (3, 4, 8, 128) and partial[12].shape == (3, 4, 8) and partial[-1] == 3
    assert merge[0] is partial[11] and merge[1] is partial[12] and merge[2] is starts
    for splits in (0, 33, 2.0, True):
        with pytest.raises(ArgumentError, match="splits"):
            prefill(q, cache, starts, 4, splits=splits)
