"""Arrays of other libraries in calls of operators: read without a copy, in the order of streams, and handed back."""

from __future__ import annotations

import gc
import inspect
import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from terrazzo.lowering.errors import ArgumentError, CaptureError
from terrazzo.ops import attention, dlpack, w4a8, w4a16, w4ax
from terrazzo.ops.call.linear import Linear


class Array:
    """An array of a library of its own, whose module has `from_dlpack`."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.asked = tensor, []

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()

    def __dlpack__(self, **form):
        self.asked.append(form)
        return self.tensor.__dlpack__(**form)


@pytest.fixture
def library(monkeypatch):
    module = ModuleType("elsewhere")
    module.taken = []

    def from_dlpack(value):
        module.taken.append(value)
        return Array(torch.from_dlpack(value))

    module.from_dlpack = from_dlpack
    monkeypatch.setitem(sys.modules, "elsewhere", module)
    monkeypatch.setattr(Array, "__module__", "elsewhere.arrays")
    return module


def operator(x, w, *, bias=None, out=None, **options):
    """As those of the package: on tensors alone."""
    if dlpack.is_foreign(x):
        return dlpack.call(operator, locals())
    for given in (x, bias, out, *options.values()):
        assert given is None or isinstance(given, torch.Tensor)
    made = x @ w.T
    made = made if bias is None else made + bias
    return made if out is None else out.copy_(made)


def test_a_result_is_handed_back_as_an_array_of_the_same_library(library):
    x, w, bias = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5)
    y = operator(Array(x), w, bias=Array(bias), scale=Array(bias))
    assert type(y) is Array and torch.equal(y.tensor, x @ w.T + bias)
    assert len(library.taken) == 1  # on a CPU no stream has to wait


def test_out_is_written_and_given_back_itself(library):
    x, w, memory = torch.randn(3, 4), torch.randn(5, 4), torch.empty(3, 5)
    out = Array(memory)
    assert operator(Array(x), w, out=out) is out and torch.equal(memory, x @ w.T)
    assert operator(Array(x), w, out=memory) is memory


def test_a_library_without_from_dlpack_gets_a_tensor(library):
    del library.from_dlpack
    x, w = torch.randn(3, 4), torch.randn(5, 4)
    assert torch.equal(operator(Array(x), w), x @ w.T)


def test_nothing_is_copied(library):
    x = torch.randn(3, 4)
    seen = []
    look = dlpack.accepting(lambda x: seen.append(x.data_ptr()) or x)
    y = look(Array(x))
    assert seen == [x.data_ptr()] and y.tensor.data_ptr() == x.data_ptr()
    assert look(x) is x  # a tensor does not come here


def test_the_kinds_of_libraries_that_are_installed():
    tvm_ffi = pytest.importorskip("tvm_ffi", reason="tvm-ffi is a dependency")
    x, w = torch.randn(3, 4), torch.randn(5, 4)
    for made in (tvm_ffi.from_dlpack(x), np.asarray(x)):
        y = operator(made, w)
        assert type(y) is type(made) and torch.equal(torch.from_dlpack(y), x @ w.T)


def test_arrays_of_jax():
    jax = pytest.importorskip("jax", reason="JAX is no dependency")
    x, w = torch.randn(3, 4), torch.randn(5, 4)
    for dtype in (torch.float16, torch.bfloat16):
        given = jax.numpy.from_dlpack(x.to(dtype))
        y = operator(given, w.to(dtype))
        assert isinstance(y, jax.Array) and torch.equal(torch.from_dlpack(y), x.to(dtype) @ w.to(dtype).T)
        with pytest.raises(ArgumentError, match="out = 'jaxlib.*immutable"):
            operator(given, w, out=given)
    codes = jax.numpy.arange(64 * 128, dtype="int32").reshape(64, 128) % 16
    scales = jax.numpy.ones((64, 1), dtype="float16")
    packed = w4a16.pack(codes, scales, group_size=128)
    same = w4a16.pack(torch.from_dlpack(codes), torch.from_dlpack(scales), group_size=128)
    assert torch.equal(packed.words, same.words) and torch.equal(packed.params, same.params)


@pytest.mark.parametrize("make", ["tvm_ffi", "numpy", "elsewhere"])
def test_packers_take_them(make, library):
    import tvm_ffi

    array = {"tvm_ffi": tvm_ffi.from_dlpack, "numpy": np.asarray, "elsewhere": Array}[make]
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 128, generator=generator)
    smooth = weight[0].abs() + 1
    pairs = [
        (w4a16.quantize(weight), w4a16.quantize(array(weight))),
        (w4a8.quantize(weight, smooth=smooth), w4a8.quantize(array(weight), smooth=array(smooth))),
        (w4a8.fp8.quantize(weight), w4a8.fp8.quantize(array(weight))),
    ]
    codes, scales = torch.randint(0, 16, (64, 128), generator=generator), torch.rand(64, 4, generator=generator).half()
    given = dict(group_size=32)
    pairs.append((w4a16.pack(codes, scales, **given), w4a16.pack(array(codes), array(scales), **given)))
    plan = w4ax.plan_blocks(weight.abs().amax(0))
    pairs.append((w4ax.quantize(weight, plan, target="sm_90a"), w4ax.quantize(array(weight), plan, target="sm_90a")))
    for expected, packed in pairs:
        assert type(packed) is type(expected) and torch.equal(packed.words, expected.words)
    k, v = torch.randn(2, 1, 2, 40, 64, generator=generator)
    expected, cache = (attention.pack_cache(*kv, "int4", "int4") for kv in ((k, v), (array(k), array(v))))
    assert torch.equal(cache.pages, expected.pages)


STARTS = torch.tensor([0, 1], dtype=torch.int32)
OPERATORS = {
    "w4a16.gemm": lambda x: w4a16.gemm(x, w4a16.quantize(torch.randn(64, 128))),
    "w4a8.gemm": lambda x: w4a8.gemm(x, w4a8.quantize(torch.randn(64, 128))),
    "w4a8.quantize_activations": lambda x: w4a8.quantize_activations(x),
    "w4ax.gemm": lambda x: w4ax.gemm(x, w4ax.quantize(torch.randn(64, 128), plan128(), target="sm_90a")),
    "attention.decode": lambda x: attention.decode(heads(x), cache()),
    "attention.prefill": lambda x: attention.prefill(heads(x), cache(), STARTS, 1),
    "attention.append": lambda x: attention.append(cache(), heads(x), heads(x)),
    "attention.store": lambda x: attention.store(
        cache(), heads(x), heads(x), torch.tensor([0, 1], dtype=torch.int32), 1
    ),
}


def plan128():
    return w4ax.plan_blocks(torch.ones(128))


def heads(x):
    """[1, 2, 64] of x [1, 128], in the same kind."""
    return type(x)(x.tensor.view(1, 2, 64))


def cache():
    return attention.pack_cache(*torch.randn(2, 1, 2, 16, 64), "int4", "int4")


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_read_them_and_say_where_they_must_be(name, library):
    """On a CPU a call ends where its tensors' device is checked, behind all that is read."""
    x = Array(torch.randn(1, 128).half())
    with pytest.raises(ArgumentError, match="must be on a CUDA device|CUDA") as error:
        OPERATORS[name](x)
    assert "torch tensor" not in str(error.value)


def test_what_cannot_be_read_is_an_argument_error(library):
    class Wrong(Array):
        def __dlpack__(self, **form):
            raise BufferError("no such memory")

    with pytest.raises(ArgumentError, match=r"bias = .*Wrong': cannot be read through DLPack \(no such memory\)"):
        operator(Array(torch.ones(1, 2)), torch.ones(2, 2), bias=Wrong(torch.ones(2)))


def test_what_the_library_cannot_take_is_an_argument_error(library):
    def from_dlpack(value):
        raise BufferError("no bfloat16 here")

    library.from_dlpack = from_dlpack
    from_dlpack.__module__ = "elsewhere"
    with pytest.raises(ArgumentError, match=r"elsewhere cannot take a result of torch.float32 \(no bfloat16 here\)"):
        operator(Array(torch.ones(1, 2)), torch.ones(2, 2))


def test_everything_else_is_refused_as_before():
    with pytest.raises(ArgumentError, match="must be a torch tensor"):
        w4a16.gemm([1.0], w4a16.quantize(torch.randn(64, 128)))


class OnDevice(Array):
    """Says that it lies on a CUDA device."""

    def __dlpack_device__(self):
        return dlpack.CUDA, 1


def test_a_capture_is_refused(library, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dlpack, "capturing", lambda device: device == torch.device("cuda", 1))
    with pytest.raises(CaptureError, match="x is a .*OnDevice, and a CUDA graph is being captured"):
        operator(OnDevice(torch.ones(1, 2)), torch.ones(2, 2))


class Stream:
    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_stream(self, other):
        self.log.append((self.name, "waits for", other.name))


@pytest.mark.parametrize(
    ("asked", "waits"),
    [({}, "default"), ({"stream": None}, "default"), ({"stream": 1}, "default"), ({"stream": 2}, "external 2"),
     ({"stream": 4711}, "external 4711"), ({"stream": -1}, None)],
)  # fmt: skip
def test_the_consumers_stream_waits(asked, waits, monkeypatch):
    """What DLPack says of each number, with a tensor's and streams' calls written down."""
    log: list = []

    @contextmanager
    def device(to):
        log.append(("on", to))
        yield

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("own", log))
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: Stream("default", log))
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda number, device: Stream(f"external {number}", log))
    tensor = SimpleNamespace(
        is_cuda=True,
        device="cuda:1",
        __dlpack__=lambda **form: log.append(("handed", form)),
    )
    dlpack._Handed(tensor).__dlpack__(max_version=(1, 0), copy=None, **asked)
    ordered = [(waits, "waits for", "own")] if waits else []
    assert log == [("on", "cuda:1"), *ordered, ("handed", {"stream": -1, "max_version": (1, 0)})]


class Result:
    """Of a library: weak references can be taken of it."""


@pytest.mark.parametrize("capture", [False, True])
def test_memory_of_a_result_comes_back_behind_the_librarys_stream(capture, monkeypatch):
    """Dropping the array asks its library, through another array of it, to order its stream before torch's."""
    log: list = []

    @contextmanager
    def stream(own):
        log.append(f"on {own}")
        yield

    monkeypatch.setattr(torch, "empty", lambda *size, device: "one element")
    monkeypatch.setattr(torch, "from_dlpack", lambda token: log.append(f"behind {token}"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "its stream")
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(dlpack, "_late", [])
    monkeypatch.setattr(dlpack, "_held", [])
    now = [capture]
    monkeypatch.setattr(dlpack, "capturing", lambda device: now[0])
    monkeypatch.setattr(dlpack, "_hand", lambda name, tensor, taker: taker(tensor))
    array = Result()
    assert dlpack._keep(array, SimpleNamespace(is_cuda=True, device="cuda:0"), lambda x: f"array of {x}") is array
    del array
    gc.collect()
    ordered = ["on its stream", "behind array of one element"]
    assert log == ([] if capture else ordered)
    now[0] = False
    dlpack._hold([])
    assert log == ordered and dlpack._late == []


def test_results_without_weak_references_are_given_back_as_they_are():
    assert dlpack._keep(5, torch.ones(1), None) == 5


def test_arguments_are_held_until_the_work_has_ended(monkeypatch):
    done = []
    event = lambda: SimpleNamespace(record=lambda stream: None, query=lambda: bool(done))
    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(dlpack, "_held", [])
    first, second = (SimpleNamespace(is_cuda=True, device="cuda:0") for _ in range(2))
    dlpack._hold([first, SimpleNamespace(is_cuda=False)])
    dlpack._hold([second])
    assert [held for _, held in dlpack._held] == [[first], [second]]
    done.append(True)
    dlpack._hold([])
    assert dlpack._held == []


def test_the_way_of_tensors_is_as_long_as_before():
    """Operators ask for other libraries' arrays behind a comparison of types that tensors fail."""
    lines = inspect.getsource(Linear.gemm).splitlines()
    (asked,) = (i for i, line in enumerate(lines) if "dlpack.is_foreign" in line)
    assert any("is not torch.Tensor" in line for line in lines[asked - 6 : asked])
    lines = inspect.getsource(attention.decode).splitlines()
    (asked,) = (i for i, line in enumerate(lines) if "dlpack.is_foreign" in line)
    assert lines[asked - 1].strip() == "if not plain:" and "plain = type(q) is torch.Tensor" in lines[asked - 2]
    for function in (attention.prefill, attention.append, attention.store):
        (line,) = (line for line in inspect.getsource(function).splitlines() if "dlpack.is_foreign" in line)
        assert "is not torch.Tensor and" in line
