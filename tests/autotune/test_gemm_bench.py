"""The comparison run, on the CPU with a stand-in for the clock: what is checked, what is timed, what is recorded."""

from __future__ import annotations

import contextlib
import importlib

import pytest
import torch
from terrazzo.autotune import gemm_bench, measure
from terrazzo.autotune.linear import settings_of
from terrazzo.autotune.linear_bench import LinearSettings, LinearShape
from terrazzo.lowering.errors import CompileError
from terrazzo.lowering.targets import Target
from terrazzo.ops import w4a16
from terrazzo.ops.products.codes import WIDE
from terrazzo.ops.products.table import of_codes
from terrazzo.ops.products.ways import choose_way
from terrazzo.ops.w4a16 import reference
from terrazzo.ops.weight_only import reference as floats

from benchmarks.report import FIELDS, ROW_FIELDS

SHAPES = {(128, 256): ("model.qkv",), (64, 384): ("model.o", "other.o")}


class Rival:
    """A peer that is right, wrong, absent or broken."""

    def __init__(self, name="rival_right", factor=1.0, missing="", breaks=""):
        self.name, self.factor, self._missing, self.breaks = name, factor, missing, breaks

    def missing(self):
        return self._missing

    def load(self, weight, dense, copies):
        if self.breaks == "load":
            raise RuntimeError("cannot load")
        return [dense] * copies(dense.numel())

    def call(self, x, loaded):
        if self.breaks == "call":
            raise RuntimeError("cannot\nrun")
        return self.factor * (x.double() @ loaded.double().T).to(x.dtype)


@pytest.fixture
def on_the_cpu(monkeypatch):
    """Everything but the GPU: gemm is the reference, a timing calls everything twice and answers 10 us."""
    target = Target.parse("sm_90a")

    def gemm(x, w, *, out=None):
        y = reference.gemm(x, w, "post").to(x.dtype)
        return y if out is None else out.copy_(y)

    def prepare(calls, budget_ms, stream):
        for call in (*calls, *calls):
            call()
        return calls

    def timings(runs, sustained):
        return [measure.Timing(10.0, 0.01, len(calls), 5) for calls in runs]

    monkeypatch.setattr(gemm_bench, "DEVICE", "cpu")
    monkeypatch.setattr(gemm_bench, "require_gpu", lambda: None)
    monkeypatch.setattr(Target, "detect", staticmethod(lambda device=None: target))
    monkeypatch.setattr(measure, "_on_side_stream", contextlib.nullcontext)
    monkeypatch.setattr(measure, "_prepare", prepare)
    monkeypatch.setattr(measure, "_measure", timings)
    monkeypatch.setattr(measure, "copy_bandwidth", lambda: 4000.0)
    monkeypatch.setattr(measure, "call_overhead_us", lambda call: call() is None or 5.0)
    monkeypatch.setattr(measure, "copies_beyond_l2", lambda nbytes, l2: 3)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setitem(vars(w4a16), "gemm", gemm)
    return monkeypatch


def bench(peers=(), ms=(1, 7), compile_all=lambda requests: [None] * len(requests), **settings):
    made = LinearSettings(peers=peers, **settings)
    return gemm_bench.bench(LinearShape, SHAPES, ms, made, compile_all, commit="abc")


def test_a_run_has_every_field(on_the_cpu):
    seen, lengths = [], []
    result = gemm_bench.bench(
        LinearShape,
        SHAPES,
        (1, 7),
        LinearSettings(),
        compile_all=lambda requests: [None] * len(requests),
        on_row=seen.append,
        on_shape=lambda so_far: lengths.append(len(so_far["rows"])),
    )
    assert result["rows"] == seen and len(seen) == 4 and lengths == [2, 4]
    assert set(FIELDS) <= set(result) and all(set(ROW_FIELDS) <= set(row) for row in seen)
    row = seen[-1]
    assert (row["m"], row["n"], row["k"], row["model"]) == (7, 64, 384, "model.o, other.o")
    assert row["us"] == 10.0 and row["peers"] == {"cublas_f16": 10.0} and "failure" not in row
    assert row["bytes"] == 64 * 384 // 2 + 64 * 3 * 3  # codes, then a scale and a zero point for each row and group
    assert row["schedule"].startswith("w4a16.small_batch ") and row["bound"] in ("load", "dequant", "mma")
    assert result["call_overhead_us"] == {"terrazzo": 5.0, "torch_mm": 5.0, "terrazzo_allocating": 5.0}


@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, {"group": 32}, {"symmetric": True}, {"group": 4096}])
def test_other_settings(on_the_cpu, settings):
    assert all(row["us"] for row in bench(**settings)["rows"])


@pytest.mark.parametrize("weight", WIDE)
def test_every_registered_format_is_measured(on_the_cpu, weight):
    """Its data, its oracle and its kernels follow from the registry; a wrong element has no time."""
    form, spoilt = WIDE[weight], 1.0

    def gemm(x, w, *, out=None):
        own = floats if form.values else reference
        y = own.gemm(x, w, choose_way(form, w.scale_dtype, str(x.dtype)[6:], True).name)
        y[-1, 5] *= spoilt
        return y.to(x.dtype) if out is None else out.copy_(y)

    module = importlib.import_module(f"terrazzo.ops.{of_codes(form).record}")
    on_the_cpu.setitem(vars(module), "gemm", gemm)
    given = settings_of(of_codes(form).record, dtype="bfloat16")
    run = lambda: gemm_bench.bench(given[0], SHAPES, (3,), given[1], lambda found: [None] * len(found), commit="abc")
    for row in run()["rows"]:
        assert row["us"] == 10.0 and row["op"] == of_codes(form).record and row["peers"] == {"cublas_f16": 10.0}
        assert row["schedule"].startswith(f"{of_codes(form).record}.small_batch ") and row["group"] == form.groups[-1]
    spoilt = 1.5
    assert all(row["us"] is None and "1 of" in row["failure"] for row in run()["rows"])


def test_many_tokens_are_timed_at_the_power_limit_too(on_the_cpu):
    on_the_cpu.setattr(gemm_bench, "SUSTAINED_M", 7)
    few, many = bench(ms=(1, 7))["rows"][:2]
    assert "sustained" not in few and many["sustained"] == {gemm_bench.OURS: 10.0, "cublas_f16": 10.0}


def test_many_tokens_are_sampled(on_the_cpu):
    on_the_cpu.setattr(gemm_bench, "CHECKED_ROWS", 4)
    assert all(row["us"] for row in bench(ms=(9,))["rows"])


def test_a_wrong_output_has_no_time(on_the_cpu):
    right = vars(w4a16)["gemm"]

    def wrong(x, w, *, out=None):
        y = right(x, w, out=out)
        y[-1, 5] *= 1.5
        return y

    on_the_cpu.setitem(vars(w4a16), "gemm", wrong)
    for row in bench()["rows"]:
        assert row["us"] is None and "1 of" in row["failure"] and "y[" in row["failure"]
        assert row["peers"] == {"cublas_f16": 10.0}


def test_an_element_that_is_never_written_has_no_time(on_the_cpu):
    right = vars(w4a16)["gemm"]

    def forgets(x, w, *, out=None):
        y = right(x, w)
        return y if out is None else out[:, :-1].copy_(y[:, :-1])

    on_the_cpu.setitem(vars(w4a16), "gemm", forgets)
    assert {row["failure"] for row in bench(ms=(1,))["rows"]} == {"1 elements of y are NaN"}


def test_an_output_that_changes_has_no_time(on_the_cpu):
    right, count = vars(w4a16)["gemm"], iter(range(10**6))

    def unstable(x, w, *, out=None):
        y = right(x, w, out=out)
        y[0, 0] += next(count) * 2.0**-11 * y[0, 0]
        return y

    on_the_cpu.setitem(vars(w4a16), "gemm", unstable)
    assert "differs" in bench(ms=(1,))["rows"][0]["failure"]


def test_a_kernel_that_does_not_compile(on_the_cpu):
    result = bench(ms=(1,), compile_all=lambda requests: [CompileError("nvcc says no\nat length")] * len(requests))
    assert {row["failure"] for row in result["rows"]} == {"does not compile: nvcc says no"}


def test_peers(on_the_cpu):
    peers = (
        Rival(),
        Rival("rival_wrong", factor=1.1),
        Rival("rival_absent", missing="rival is not installed"),
        Rival("rival_unloadable", breaks="load"),
        Rival("rival_failing", breaks="call"),
    )
    peers[0].package, peers[1].package, peers[2].package = "pytest", "no-such-rival", "not-asked"
    result = bench(peers)
    assert result["peers_missing"] == {"rival_absent": "rival is not installed"}
    assert result["peers_versions"] == {"no-such-rival": None, "pytest": pytest.__version__}
    for row in result["rows"]:
        assert row["peers"] == {"cublas_f16": 10.0, "rival_right": 10.0}
        assert set(row["peers_failed"]) == {"rival_wrong", "rival_unloadable", "rival_failing"}
        assert row["peers_failed"]["rival_failing"] == "RuntimeError: cannot run"
