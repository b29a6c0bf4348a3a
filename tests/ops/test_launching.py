"""What stands between a call and its launch, without a GPU: what is remembered, and what makes it be asked again."""

from __future__ import annotations

import ast
import copy
import dataclasses
import pickle
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.runtime import Kernel
from terrazzo.ops import launching, w4a16
from terrazzo.ops.w4a8 import activations
from terrazzo.ops.weight_only.entry import CALLS


def weight(n=64, k=128):
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    return w4a16.pack(codes, torch.rand(n, 1).half(), group_size=k)


@pytest.fixture
def calls(monkeypatch):
    """CPU tensors taken for CUDA ones: what was prepared, what was launched, the stream to be."""
    seen = SimpleNamespace(prepared=[], launched=[], stream=0)

    def launch(*args):
        seen.launched.append(args)
        args[6].fill_(len(seen.launched))

    kernel = SimpleNamespace(launcher=lambda index: launch)

    def prepare(launches, key, x, held, w):
        seen.prepared.append(key)
        found = launches[key] = (kernel, launch, (None, None), (), None, 1 << 31, None)
        return found

    monkeypatch.setattr(CALLS, "prepare", prepare)
    monkeypatch.setattr(CALLS, "launches", launching.LaunchTable(CALLS.facts, CALLS.check_weight))
    monkeypatch.setattr(launching, "place", lambda x: (x.get_device(), seen.stream))
    return seen


def test_equal_calls_prepare_once_and_different_ones_anew(calls):
    x, w = torch.zeros(2, 128).half(), weight()
    for changed in range(2):
        w4a16.gemm(x, w)
        assert len(calls.prepared) == 1, changed
    w4a16.gemm(x, weight())  # a weight of the same format
    assert len(calls.prepared) == 1
    for call in (
        lambda: w4a16.gemm(x[:1], w),
        lambda: w4a16.gemm(x.bfloat16(), w),
        lambda: w4a16.gemm(x, w, numerics="post"),
        lambda: w4a16.gemm(x, w, bias=torch.zeros(64).half()),
        lambda: w4a16.gemm(x, weight(n=128)),
        lambda: (setattr(calls, "stream", 7), w4a16.gemm(x, w)),
    ):
        before = len(calls.prepared)
        call(), call()
        assert len(calls.prepared) == before + 1
    CALLS.launches.clear()
    w4a16.gemm(x, w)
    assert len(calls.prepared) == before + 2


def test_the_kernel_gets_rows_and_the_caller_its_shape(calls):
    x, w = torch.randn(2, 3, 128).half(), weight()
    y = w4a16.gemm(x, w)
    assert y.shape == (2, 3, 64) and (y == 1).all() and calls.launched[-1][0].shape == (6, 128)
    out = torch.zeros(2, 3, 64).half()
    assert w4a16.gemm(x, w, out=out) is out and (out == 2).all()
    room = torch.zeros(6 * 64 + 1).half()
    aside = room[1:].view(6, 64)  # not at 16 bytes: the kernel writes elsewhere
    assert w4a16.gemm(x.view(6, 128), w, out=aside) is aside and (aside == 3).all() and room[0] == 0
    assert calls.launched[-1][6].data_ptr() % 16 == 0
    w4a16.gemm(torch.randn(128, 6).half().T, w)
    got = calls.launched[-1][0]
    assert got.is_contiguous() and got.shape == (6, 128)
    w4a16.gemm(torch.randn(6 * 128 + 1).half()[1:].view(6, 128), w)
    assert calls.launched[-1][0].data_ptr() % 16 == 0
    wrong = (out[0], out.view(6, 64), out.float(), torch.zeros(2, 3, 128).half()[..., ::2])
    for bad in wrong:  # although an equal call passed
        with pytest.raises(ArgumentError, match="out"):
            w4a16.gemm(x, w, out=bad)


def test_a_copied_or_replaced_weight_is_adopted_again(calls, monkeypatch):
    adopted = []
    real = CALLS.launches.check
    monkeypatch.setattr(CALLS.launches, "check", lambda w: adopted.append(w) or real(w))
    x, w = torch.zeros(2, 128).half(), weight()
    w4a16.gemm(x, w)
    w4a16.gemm(x, w)
    assert len(adopted) == 1
    for again in (copy.deepcopy(w), pickle.loads(pickle.dumps(w)), dataclasses.replace(w, params=w.params.clone())):
        assert again.__dict__.get("_launches") is None
        before = len(adopted)
        w4a16.gemm(x, again), w4a16.gemm(x, again)
        assert len(adopted) == before + 1
    w.words.data = w.words.clone()  # other memory under the same tensor: no write that PyTorch counts
    before = len(adopted)
    w4a16.gemm(x, w)
    assert len(adopted) == before + 1


@pytest.mark.parametrize("name", ["words", "params"])
def test_a_weight_that_is_not_aligned_is_refused(calls, name):
    x, w = torch.zeros(2, 128).half(), weight()
    aligned = getattr(w, name)
    room = torch.zeros(aligned.nbytes + 4, dtype=torch.uint8)
    moved = room[4:].view(aligned.dtype).view(aligned.shape)
    with pytest.raises(ArgumentError, match="w = .*multiples of 16 bytes.*clone"):
        w4a16.gemm(x, dataclasses.replace(w, **{name: moved}))
    assert not calls.launched
    w4a16.gemm(x, dataclasses.replace(w, **{name: moved.clone()}))


def test_an_output_that_shares_memory_with_x_is_refused(calls):
    room, w = torch.zeros(6 * 128).half(), weight(n=128)
    x = room[: 4 * 128].view(4, 128)
    for out in (x, room[2 * 128 :].view(4, 128)):
        with pytest.raises(ArgumentError, match="out = .*shares memory with x"):
            w4a16.gemm(x, w, out=out)
    w4a16.gemm(x[:2], w, out=room[2 * 128 : 4 * 128].view(2, 128))  # side by side
    w4a16.gemm(room[: 2 * 128].view(128, 2).T, w, out=room[: 2 * 128].view(2, 128))  # a strided x is copied first
    assert len(calls.launched) == 2
    for bad in ([0.0], None.__class__):
        with pytest.raises(ArgumentError, match="out = .*torch tensor"):
            w4a16.gemm(x, w, out=bad)


def test_vectors_of_a_new_weight_are_checked(calls):
    x, w = torch.zeros(2, 128).half(), weight()
    w4a16.gemm(x, w)  # its words are adopted
    for name, bad in (
        ("bias", torch.zeros(63)),
        ("bias", torch.zeros(64).double()),
        ("bias", torch.zeros(64, device="meta")),
        ("perm", torch.arange(128)),
        ("perm", torch.arange(127, dtype=torch.int32)),
    ):
        with pytest.raises(ArgumentError, match=f"{name} = .*must be contiguous"):
            w4a16.gemm(x, dataclasses.replace(w, **{name: bad}))


def test_a_bias_is_cast_again_when_it_was_written_to(calls):
    x, w = torch.zeros(2, 128).half(), dataclasses.replace(weight(), bias=torch.zeros(64))
    bias = lambda: w4a16.gemm(x, w) is not None and calls.launched[-1][3]
    first = bias()
    assert first.dtype == torch.float16 and bias() is first
    w.bias.fill_(3)  # as load_state_dict does
    assert (bias() == 3).all()


def test_a_warm_kernel_is_called_without_its_wrapper():
    kernel = Kernel.__new__(Kernel)
    kernel.name, kernel._warm, kernel._function = "k", {1}, lambda *args: None
    assert kernel.launcher(0) is kernel and kernel.launcher(1) is kernel._function
    refused = RuntimeError("main input A shape[0] violates packed ABI constraint; expected: 512, got: 9")
    with pytest.raises(ArgumentError, match="shape"):
        kernel.explain((torch.zeros(9),), refused)
    with pytest.raises(RuntimeError, match="launch failed"):
        kernel.explain((torch.zeros(9),), RuntimeError("launch failed"))


def scratch(shape, stream=0, codes="int8", m=None):
    x = torch.empty(shape).half()
    rows = x.numel() // shape[-1] if m is None else m
    return activations._scratch(x.shape, rows, codes, (-1, stream), x)


def test_activations_between_two_launches_take_the_same_memory(monkeypatch):
    monkeypatch.setattr(activations, "_spaces", activations._Spaces())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    first = scratch((3, 100))
    first.check()
    assert scratch((3, 100)) is first
    other_stream, others = scratch((3, 100), stream=5), []
    thread = threading.Thread(target=lambda: others.append(scratch((3, 100))))
    thread.start()
    thread.join()
    places = {found.q.data_ptr() for found in (first, other_stream, *others)}
    assert len(places) == 3  # neither streams nor threads share it
    shaped, fp8 = scratch((1, 3, 100)), scratch((3, 100), codes="e4m3")
    shaped.check(), fp8.check()
    assert shaped.q.data_ptr() == first.q.data_ptr() and shaped.shape == (1, 3, 100) and fp8.row_sums is None
    larger = scratch((5, 2, 64))
    larger.check()
    addresses = [t.data_ptr() for t in (larger.q, larger.scales, larger.row_sums)]
    assert all(address % 16 == 0 for address in addresses)
    ends = [address + nbytes for address, nbytes in zip(addresses, (10 * 64, 40, 40))]
    assert addresses[1] >= ends[0] and addresses[2] >= ends[1]


def test_large_and_captured_activations_get_memory_of_their_own(monkeypatch):
    monkeypatch.setattr(activations, "_spaces", activations._Spaces())
    assert scratch((1, 1 << 12), m=1 << 12) is None
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert scratch((3, 100)) is None


def test_an_output_is_written_in_place_where_kernels_can():
    x, out = torch.zeros(6, 64).half(), torch.zeros(2, 3, 8)
    rows, aside = launching.output(x, out, (2, 3, 8), 6, torch.float32, -1)
    assert not aside and rows.shape == (6, 8) and rows.data_ptr() == out.data_ptr()
    odd = torch.zeros(49)[1:].view(2, 3, 8)  # 4 bytes behind a multiple of 16
    rows, aside = launching.output(x, odd, (2, 3, 8), 6, torch.float32, -1)
    assert aside and rows.shape == (6, 8) and rows.dtype == torch.float32 and rows.data_ptr() != odd.data_ptr()
    for bad in (torch.zeros(2, 3, 9), torch.zeros(2, 3, 8).half(), torch.zeros(2, 8, 3).mT):
        with pytest.raises(ArgumentError, match="out"):
            launching.output(x, bad, (2, 3, 8), 6, torch.float32, -1)
    with pytest.raises(ArgumentError, match="shares memory"):
        launching.output(x, x[:, :8].contiguous().set_(x.untyped_storage(), 0, (6, 8)), (6, 8), 6, torch.float16, -1)


def test_a_table_checks_a_weight_once_for_each_state():
    seen = []
    table = launching.LaunchTable(lambda w: (w.n,), lambda w: seen.append(w.n))
    w = SimpleNamespace(n=64, k=128, words=torch.zeros(16, dtype=torch.int32), params=torch.zeros(16))
    assert table.of(w, w.words, w.params) is table.of(w, w.words, w.params) and seen == [64]
    w.params.mul_(2)
    assert table.of(w, w.words, w.params).facts == (64,) and seen == [64, 64]
    w.words = w.words.clone()
    table.of(w, w.words, w.params)
    assert len(seen) == 3


def test_checks_of_tensors_make_no_text_ahead():
    """torch.compile makes no strings of sizes that it holds as symbols: `check_tensor` gets words and sizes apart."""
    ahead = []
    for path in Path(launching.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("check_tensor", "launching.check_tensor"):
                made = [part for part in ast.walk(node) if isinstance(part, ast.JoinedStr)]
                ahead += [f"{path.name}:{node.lineno}"] * bool(made)
    assert not ahead
    with pytest.raises(ArgumentError, match=r"a torch tensor, float16 \[3, 5\]"):
        launching.check_tensor([1.0], "x", "float16 [{}, {}]", 3, 5)
