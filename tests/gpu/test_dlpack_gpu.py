"""Arrays of CuPy and JAX in calls on the GPU: the numbers of tensors, no copies, and the order of streams.

Each test of order runs a second time without the step of the protocol that it is about, and must then see the race.
"""

from __future__ import annotations

import pytest
import torch
from oracles import Case, Spec, packed
from terrazzo.lowering.errors import ArgumentError, CaptureError
from terrazzo.ops import attention, dlpack, w4a8, w4a16, w4ax

SPEC = Spec(256, 512, 128)
CASES = pytest.mark.parametrize("cases", [(Case(SPEC, 4),)], ids=["specs"])
M, N, K = 4, SPEC.n, SPEC.k
CYCLES = 200_000_000  # some 100 ms

SPIN = r"""
extern "C" __global__ void spin(long long cycles) {
    long long start = clock64();
    while (clock64() - start < cycles) {}
}
"""


@pytest.fixture
def cupy(compiled):
    return pytest.importorskip("cupy", reason="CuPy is not installed")


@pytest.fixture
def jax(compiled, monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX has no GPU backend here")
    return jax


@pytest.fixture
def spin(cupy):
    """Keeps the current stream of CuPy busy for some 100 ms."""
    kernel = cupy.RawKernel(SPIN, "spin")
    kernel((1,), (1,), (cupy.int64(1),))  # compiled now: a test's work must all be queued while it spins
    return lambda: kernel((1,), (1,), (cupy.int64(CYCLES),))


@pytest.fixture
def product(cases):
    """(x, w, x w^T) as tensors, the kernel warm."""
    x, w = torch.randn(M, K, device="cuda", dtype=torch.float16), packed(SPEC, False, 0)
    y = w4a16.gemm(x, w)
    torch.cuda.synchronize()
    return x, w, y


def jax_array(jax, tensor):
    torch.cuda.synchronize()
    made = jax.numpy.from_dlpack(tensor)
    return jax.block_until_ready(made + 0)  # memory of JAX's own


@CASES
def test_cupy_gives_the_bits_of_tensors(cases, cupy, product):
    x, w, y = product
    given = cupy.from_dlpack(x)
    found = w4a16.gemm(given, w)
    assert isinstance(found, cupy.ndarray) and torch.equal(torch.from_dlpack(found), y)
    out = cupy.empty((M, N), dtype=cupy.float16)
    bias = torch.randn(N, device="cuda", dtype=torch.float16)
    assert w4a16.gemm(given, w, bias=cupy.from_dlpack(bias), out=out) is out
    assert torch.equal(torch.from_dlpack(out), w4a16.gemm(x, w, bias=bias))
    with pytest.raises(ArgumentError, match=r"x = .*its last dimension must be K = 512"):
        w4a16.gemm(given[:, :500], w)


@CASES
def test_jax_gives_the_bits_of_tensors(cases, jax, product):
    x, w, y = product
    given = jax_array(jax, x)
    found = w4a16.gemm(given, w)
    assert isinstance(found, jax.Array)
    assert torch.equal(torch.from_dlpack(jax.block_until_ready(found)), y)
    again = w4a16.gemm(jax.numpy.sin(given) * 0 + given, w) * 2  # work of JAX before and after, none of it waited for
    assert torch.equal(torch.from_dlpack(jax.block_until_ready(again)), y * 2)
    with pytest.raises(ArgumentError, match="immutable"):
        w4a16.gemm(given, w, out=found)


@CASES
def test_what_jax_still_computes_is_waited_for(cases, jax, product):
    x, w, y = product
    given, numbers = jax_array(jax, x), jax.numpy.ones((4096, 4096), dtype="float32") / 4096
    power = jax.jit(lambda a, b: jax.lax.fori_loop(0, 300, lambda i, c: c @ b, a))
    pick = jax.jit(lambda a, b: jax.numpy.where(a[:1, :1] > -1, b, 0))
    jax.block_until_ready(pick(power(numbers, numbers), given))  # compiled
    late = pick(power(numbers, numbers), given)
    assert not late.is_ready()
    found = w4a16.gemm(late, w)
    assert torch.equal(torch.from_dlpack(jax.block_until_ready(found)), y)


@CASES
def test_tvm_ffi_gives_the_bits_of_tensors(cases, product):
    import tvm_ffi

    x, w, y = product
    found = w4a16.gemm(tvm_ffi.from_dlpack(x), w)
    assert isinstance(found, tvm_ffi.Tensor) and torch.equal(torch.from_dlpack(found), y)


@CASES
def test_a_capture_refuses_them(cases, cupy, product):
    x, w, _ = product
    given = cupy.from_dlpack(x)
    with pytest.raises(CaptureError, match="is a cupy"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        w4a16.gemm(given, w)
    torch.cuda.synchronize()


class Unordered:
    """An array that hands over its memory without the order that was asked for."""

    def __init__(self, array):
        self.array = array

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, *, stream=None, **form):
        return self.array.__dlpack__(stream=-1)


@CASES
@pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "race"])
def test_what_a_side_stream_still_writes_is_waited_for(cases, ordered, cupy, spin, product):
    x, w, y = product
    source = cupy.from_dlpack(x)
    with cupy.cuda.Stream(non_blocking=True) as side:
        late = cupy.zeros((M, K), dtype=cupy.float16)
        side.synchronize()
        spin()
        late[...] = source
        found = w4a16.gemm(late if ordered else Unordered(late), w)
        found = torch.from_dlpack(found).clone()
    torch.cuda.synchronize()
    side.synchronize()
    assert torch.equal(found, y) == ordered


HAND = dlpack._Handed.__dlpack__


def unordered(self, stream=None, **form):
    """In the place of what hands a tensor over: no stream waits."""
    return HAND(self, stream=-1, **form)


@CASES
@pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "race"])
def test_the_library_waits_for_the_result(cases, ordered, cupy, product, monkeypatch):
    x, w, y = product
    given = cupy.from_dlpack(x)
    out = cupy.full((M, N), cupy.nan, dtype=cupy.float16)
    seen = cupy.empty_like(out)
    cupy.cuda.Device().synchronize()
    if not ordered:
        monkeypatch.setattr(dlpack._Handed, "__dlpack__", unordered)
    with cupy.cuda.Stream(non_blocking=True) as side:
        torch.cuda._sleep(CYCLES)  # the product starts late
        assert w4a16.gemm(given, w, out=out) is out
        seen[...] = out
        side.synchronize()
    torch.cuda.synchronize()
    assert torch.equal(torch.from_dlpack(seen), y) == ordered


@CASES
@pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "race"])
def test_the_library_may_overwrite_what_it_passed(cases, ordered, cupy, product, monkeypatch):
    x, w, y = product
    given, out = cupy.array(cupy.from_dlpack(x)), torch.empty(M, N, device="cuda", dtype=torch.float16)
    cupy.empty_like(given)[...] = 0  # what fills is compiled
    cupy.cuda.Device().synchronize()
    if not ordered:
        monkeypatch.setattr(dlpack._Handed, "__dlpack__", unordered)
    with cupy.cuda.Stream(non_blocking=True) as side:
        torch.cuda._sleep(CYCLES)
        w4a16.gemm(given, w, out=out)
        given[...] = 0
        side.synchronize()
    torch.cuda.synchronize()
    assert torch.equal(out, y) == ordered


@CASES
@pytest.mark.parametrize("held", [True, False], ids=["held", "race"])
def test_what_was_passed_may_be_freed(cases, held, cupy, product, monkeypatch):
    """CuPy hands memory of one stream to the next array of that stream, whatever another stream still reads there."""
    x, w, y = product
    source = cupy.from_dlpack(x)
    first, second = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    if not held:
        monkeypatch.setattr(dlpack, "_hold", lambda tensors: None)
    with first:
        given = cupy.array(source)
        address = given.data.ptr
        first.synchronize()
    with second:
        torch.cuda._sleep(CYCLES)
        found = w4a16.gemm(given, w)
        del given
    with first:
        taken = [cupy.zeros((M, K), dtype=cupy.float16) for _ in range(4)]
        first.synchronize()
    torch.cuda.synchronize()
    assert (address in [array.data.ptr for array in taken]) == (not held)
    assert torch.equal(torch.from_dlpack(found), y) == held


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "race"])
def test_results_stay_until_the_library_has_read_them(kept, cupy, spin, monkeypatch):
    """Torch must not use a result's memory again while a stream of CuPy still reads it."""
    expected = torch.arange(1 << 20, device="cuda", dtype=torch.float32)
    look = dlpack.accepting(lambda x: x + 1)
    given = cupy.from_dlpack(expected)
    if not kept:
        monkeypatch.setattr(dlpack, "_keep", lambda array, tensor, taker: array)
    torch.cuda.synchronize()
    with cupy.cuda.Stream(non_blocking=True) as side:
        seen = cupy.empty(expected.shape, dtype=cupy.float32)
        found = look(given)
        spin()
        seen[...] = found
        del found
        others = [torch.zeros_like(expected) for _ in range(4)]
        side.synchronize()
    torch.cuda.synchronize()
    assert torch.equal(torch.from_dlpack(seen), expected + 1) == kept and len(others) == 4


@CASES
def test_results_may_outlive_the_stream_that_took_them(cases, cupy, product):
    """Torch gets the memory back after CuPy has destroyed the stream: no handle of it may be in use then."""
    x, w, y = product
    for _ in range(8):
        with cupy.cuda.Stream(non_blocking=True) as side:
            found = w4a16.gemm(cupy.from_dlpack(x), w)
            side.synchronize()
        del side
        assert torch.equal(torch.from_dlpack(found), y)
        del found
        torch.empty(1 << 20, device="cuda").zero_()
    torch.cuda.synchronize()


def test_every_operator_takes_arrays_of_cupy(cupy, gpu):
    generator = torch.Generator("cuda").manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, device="cuda", generator=generator)
    weight, x = draw(256, 512), draw(8, 512).half()
    array = cupy.from_dlpack
    w8, e4 = w4a8.quantize(array(weight)), w4a8.fp8.quantize(array(weight))
    plan = w4ax.plan_blocks(draw(512).abs().cpu())
    wx = w4ax.quantize(array(weight), plan)
    pairs = [(w4a8.gemm(array(x), w8), w4a8.gemm(x, w4a8.quantize(weight)))]
    if torch.cuda.get_device_capability() >= (8, 9):
        pairs.append((w4a8.gemm(array(x), e4), w4a8.gemm(x, w4a8.fp8.quantize(weight))))
    pairs.append((w4ax.gemm(array(x), wx), w4ax.gemm(x, w4ax.quantize(weight, plan))))
    found, expected = w4a8.quantize_activations(array(x)), w4a8.quantize_activations(x)
    pairs.append((found.q, expected.q))
    k, v = draw(2, 2, 2, 40, 64).half()
    cache, same = attention.pack_cache(array(k), array(v), "int4", "int4"), attention.pack_cache(k, v, "int4", "int4")
    pairs.append((cache.pages, same.pages))
    q = draw(2, 1, 4, 64).half()
    pairs.append((attention.decode(array(q), cache), attention.decode(q, same)))
    new = draw(2, 1, 2, 64).half()
    attention.append(cache, array(new), array(new))
    attention.append(same, new, new)
    pairs.append((cache.pages, same.pages))
    rows, starts = draw(6, 4, 64).half(), torch.tensor([0, 2, 6], dtype=torch.int32, device="cuda")
    pairs.append((attention.prefill(array(rows), cache, array(starts), 4), attention.prefill(rows, same, starts, 4)))
    attention.store(cache, array(rows[:, :2].contiguous()), array(rows[:, 2:].contiguous()), starts, 4)
    attention.store(same, rows[:, :2], rows[:, 2:], starts, 4)
    pairs.append((cache.pages, same.pages))
    cupy.cuda.Device().synchronize()
    for number, (found, expected) in enumerate(pairs):
        assert torch.equal(torch.from_dlpack(found), expected), number


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@CASES
def test_a_capture_on_another_device_is_seen(cases, compiled):
    """The current device is not that of the tensors, on whose stream a graph is captured."""
    x, w = torch.randn(M, K, device="cuda:1", dtype=torch.float16), packed(SPEC, False, 0).to("cuda:1")
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream("cuda:1")
    torch.cuda.synchronize("cuda:1")
    with torch.cuda.device("cuda:1"), torch.cuda.graph(graph, stream=stream):
        with torch.cuda.device("cuda:0"), pytest.raises(CaptureError):
            w4a16.gemm(x, w)
        x.add_(0)  # something to capture
    torch.cuda.synchronize("cuda:1")
