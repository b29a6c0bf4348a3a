"""A kernel that serves every shape stands in until the one made for a shape is compiled: which of them is launched."""

from __future__ import annotations

import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from terrazzo.lowering import KernelRequest, Target, kernels, replacing
from terrazzo.lowering.errors import BundleError, CaptureError, CompileError, ToolchainError
from terrazzo.ops import launching
from terrazzo.ops.call import plans
from terrazzo.ops.launching import Plan
from terrazzo.ops.products.codes import get_codes
from terrazzo.ops.products.table import of_codes
from terrazzo.ops.weight_only import op
from terrazzo.schedules.stream_k import StreamK

OWN, STAND_IN = (KernelRequest(f"w4a16.{name}", "terrazzo.ops.linear.stream_k:build", {}, "sm_90a") for name in "os")
PLAN = Plan(OWN, (4,), (4,), (), STAND_IN)
CPU = torch.device("cpu")


class FakeKernel:
    """What `Kernel` says of itself; launches are written down."""

    def __init__(self, request, log):
        self.request, self.log, self.is_warm, self.meanwhile = request, log, False, None

    def __call__(self, *args):
        if self.meanwhile is not None:
            self.meanwhile()
        self.is_warm = True
        self.log.append(self.request)

    def launcher(self, index):
        return (lambda *args: self.log.append(self.request)) if self.is_warm else self

    def warm_on(self, device):
        return self.is_warm


class FakePool:
    """A compiler that is done when the test says so."""

    def __init__(self, house, done, workers):
        assert workers == 1
        self.house, self.done = house, done

    def submit(self, request):
        if self.house.no_compiler:
            raise ToolchainError("no nvcc")
        self.house.submitted.append(request)


@pytest.fixture
def house(monkeypatch):
    """`call()` is an operator's call; `finish()` what the compiler reports; `log` the kernels that were launched."""
    house = SimpleNamespace(log=[], compiled=set(), submitted=[], capturing=False, no_compiler=False, kept={})
    made = {}

    def get_kernel(request):
        if request not in kernels._kernels:
            house.compiled.add(request)
            kernels._kernels[request] = made.setdefault(request, FakeKernel(request, house.log))
        return kernels._kernels[request]

    house.kernel = get_kernel
    monkeypatch.delenv(replacing.VARIABLE, raising=False)
    monkeypatch.setattr(kernels, "_kernels", {})
    monkeypatch.setattr(kernels, "get_kernel", get_kernel)
    monkeypatch.setattr(kernels, "is_ready", lambda request: request in house.compiled)
    monkeypatch.setattr(launching, "capturing", lambda device: house.capturing)
    monkeypatch.setattr(launching, "argument", lambda tensor: tensor)
    pool = launching._Pool(torch.zeros(4, 8, dtype=torch.int32), {}, {})
    monkeypatch.setattr(launching, "_pool", lambda device, operator: pool)
    monkeypatch.setattr(launching, "lasting", lambda device, make: make())
    house.pools = lambda done, workers: setattr(house, "pool", FakePool(house, done, workers)) or house.pool
    monkeypatch.setattr(replacing, "_replacements", replacing.Replacements(house.pools))

    def call(plan=PLAN, key="key"):
        found = house.kept.get(key)
        if found is None:
            found = launching.prepared(plan, 16, torch.zeros(1), (-1, 0), "w4a16.gemm")
            launching.keep(house.kept, key, found, plan, CPU)
        launching.launch(house.kept, key, found, (torch.zeros(1),))
        return house.log[-1]

    def finish(outcome=None):
        if outcome is None:
            house.compiled.add(OWN)
        house.pool.done(OWN, outcome)

    house.call, house.finish = call, finish
    return house


def test_the_stand_in_answers_until_the_own_kernel_is_compiled(house):
    assert [house.call() for _ in range(3)] == [STAND_IN] * 3
    assert house.submitted == [OWN] and not replacing.wait(0)
    house.finish()
    assert replacing.wait(0) and [house.call() for _ in range(3)] == [OWN] * 3
    assert house.submitted == [OWN]


def test_each_call_that_waits_finds_its_kernel_and_one_compilation_serves_all(house):
    other = replace(PLAN, workspace=(2,))
    assert house.call() == house.call(other, "other") == STAND_IN
    house.finish()
    assert house.call() == house.call(other, "other") == OWN and house.submitted == [OWN]


def test_a_kernel_that_is_compiled_during_the_first_launch_is_found(house):
    """The launch keeps the warm launcher of the stand-in behind it, which must not be what later calls find."""
    house.kernel(STAND_IN).meanwhile = house.finish
    assert house.call() == STAND_IN
    assert house.call() == OWN


def test_a_kernel_that_is_there_needs_no_stand_in(house):
    house.compiled.add(OWN)
    assert house.call() == OWN and STAND_IN not in house.compiled and not house.submitted


def test_a_plan_without_a_stand_in_is_what_it_was(house):
    assert house.call(replace(PLAN, stand_in=None)) == OWN and not house.submitted


def test_a_capture_keeps_to_the_stand_in_and_the_next_call_changes(house):
    """What was never launched cannot be captured, and graphs keep what they captured."""
    assert house.call() == STAND_IN
    house.finish()
    house.capturing = True
    with pytest.warns(RuntimeWarning, match="a CUDA graph keeps a slower kernel of w4a16.o, .*call terrazzo.prepare"):
        assert house.call() == house.call() == STAND_IN
    house.capturing = False
    assert house.call() == OWN
    house.capturing = True
    assert house.call() == OWN


def test_a_capture_without_a_call_before_is_refused(house):
    house.capturing = True
    with warnings.catch_warnings(), pytest.raises(CaptureError, match="never launched"):
        warnings.simplefilter("error")  # no graph keeps what is not launched
        house.call()
    assert not house.kept and not house.submitted


def test_a_stand_in_that_is_loaded_and_was_never_launched_is_refused_without_a_warning(house):
    house.kernel(STAND_IN)
    house.capturing = True
    with warnings.catch_warnings(), pytest.raises(CaptureError, match="never launched"):
        warnings.simplefilter("error")
        house.call()
    house.kernel(STAND_IN).is_warm = True
    with pytest.warns(RuntimeWarning, match="a CUDA graph keeps a slower kernel"):
        assert house.call() == STAND_IN


def test_a_kernel_that_does_not_compile_is_warned_of_once(house):
    assert house.call() == STAND_IN
    with pytest.warns(RuntimeWarning, match=r"slower kernel goes on in the place of w4a16.o.*: ptxas says no$"):
        house.finish(CompileError("ptxas says no\nand more"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert house.call() == house.call(PLAN, "other") == STAND_IN
    assert house.submitted == [OWN] and replacing.wait(0)


def test_without_a_compiler_the_stand_in_of_a_wheel_serves(house):
    house.no_compiler = True
    house.compiled.add(STAND_IN)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert house.call() == house.call() == STAND_IN and replacing.wait(0)


def test_the_environment_turns_it_off(house, monkeypatch):
    monkeypatch.setenv(replacing.VARIABLE, "0")
    assert house.call() == OWN and STAND_IN not in house.compiled and not house.submitted


def test_a_strict_bundle_is_asked_for_the_own_kernel(house, monkeypatch):
    """The error is of the kernel that belongs into the bundle."""
    monkeypatch.setattr(kernels, "_strict", ["bundle"])

    def get_kernel(request):
        raise BundleError(f"{request.name} is in no loaded bundle")

    monkeypatch.setattr(kernels, "get_kernel", get_kernel)
    with pytest.raises(BundleError, match="w4a16.o is in no"):
        house.call()


def plan_of(m: int, n: int = 4096, k: int = 4096, **more) -> Plan:
    facts = dict(group_size=128, symmetric=False, scale_dtype="float16", dtype="float16", bias=True, numerics="auto")
    return plans.plan(m, op.Facts(n, k, **{**facts, **more}), Target.parse("sm_90a"))


def test_stream_k_of_16_tokens_has_a_stand_in_that_serves_every_shape():
    some, many = plan_of(16), plan_of(64)
    assert many.stand_in is None  # it has no shape itself
    made, own = dict(some.stand_in.params), dict(some.request.params)
    assert made["n"] == made["k"] == 0 and own["n"] == 4096 and made["block_tokens"] == own["block_tokens"] == 16
    assert some.request.name == some.stand_in.name and some.request.target == some.stand_in.target
    longer = replace(some.request, params=tuple({**own, "n": 4608, "k": 4160}.items()))
    assert op.stand_in(longer) == some.stand_in


def test_small_batch_has_a_stand_in_that_serves_every_n_of_a_k():
    one, wider, longer = plan_of(1, 512, 1024), plan_of(1, 640, 1024), plan_of(1, 512, 1152)
    made, own = dict(one.stand_in.params), dict(one.request.params)
    assert one.request.name == "w4a16.small_batch" and made.pop("whole")
    assert made == own | {"n": 0, "nc": 0}, "all that bits depend on stays"
    assert one.stand_in == op.stand_in(one.request)
    assert one.stand_in == wider.stand_in != longer.stand_in and one.request != wider.request
    assert not dict(plan_of(1, 514, 1024).stand_in.params)["whole"]
    joined = replace(one.request, params=tuple({**own, "joined": True}.items()))
    assert op.stand_in(joined) is None  # the inbox of its clusters depends on n


@pytest.mark.parametrize("weight", ("u8", "mxfp4", "nvfp4", "fp8"))
def test_every_weight_format_has_stand_ins_or_kernels_without_a_shape(weight):
    form = get_codes(weight)
    scale = "float16" if weight == "u8" else form.scales[0]
    facts = dict(weight=weight, group_size=form.groups[0], symmetric=True, scale_dtype=scale)
    for m, name in ((1, "small_batch"), (64, "stream_k"), (1024, "stream_k")):
        plan = plan_of(m, 512, 1024, **facts)
        shaped = dict(plan.request.params)["n"] > 0
        assert plan.request.name == f"{of_codes(form).record}.{name}" and (plan.stand_in is not None) == shaped
        assert shaped == (weight != "fp8" or m == 1)


def test_fp8_of_three_warpgroups_and_small_tiles_keep_their_shape():
    """Without one they took more than 5 % at worst."""
    tile = lambda tokens, warpgroups: StreamK(tokens, warpgroups, 1, 2, 128)
    shaped = lambda weight: [op.has_shape(weight, tile(*it)) for it in ((16, 2), (64, 2), (64, 3), (64, 4))]
    assert shaped("fp8") == [True, False, True, False] and shaped("u4") == [True, False, False, False]
    assert shaped("mxfp4") == [True] * 4
    facts = dict(weight="fp8", group_size=3584, symmetric=True, scale_dtype="float32")
    plan = plan_of(128, 4608, 3584, **facts)
    assert dict(plan.request.params)["warpgroups"] == 3 and plan.stand_in == op.stand_in(plan.request)
