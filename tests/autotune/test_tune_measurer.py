"""The measuring process: what it checks before a time counts, and a whole job with real compilers."""

from __future__ import annotations

import re
import sys

import cpu_measurer
import pytest
import torch
import tuning
from terrazzo.autotune import measurer as measurer_module
from terrazzo.autotune.attention_adapter import AttentionPrefill
from terrazzo.autotune.database import Database, Problem
from terrazzo.autotune.isolation import Measurer
from terrazzo.autotune.jobs import Job
from terrazzo.autotune.measurer import Bench
from terrazzo.autotune.operators import get_operator
from terrazzo.autotune.runner import Runner, candidates
from terrazzo.lowering import cache
from terrazzo.lowering.errors import ArgumentError, ToolchainError
from terrazzo.lowering.toolchain import toolchain
from terrazzo.ops.products.codes import WIDE
from terrazzo.ops.products.table import BY_RECORD, of_codes
from terrazzo.schedules import records

COMMAND = (sys.executable, str(tuning.HERE / "cpu_measurer.py"))
SAYS_CACHE = "import os, sys; print(os.environ['TERRAZZO_CACHE_DIR'], file=sys.stderr)"
GOOD = dict(token_tiles=1, kc=1, nc=8, warps=2, chunk=1, stages=2, cluster=1)


def problem_of(op: str = "w4a16", m: int = 8) -> Problem:
    return Problem.of(op, get_operator(op).facts(128, 256, dtype="float16", group=None, symmetric=False), m)


@pytest.fixture
def on_the_cpu(monkeypatch, tmp_path):
    monkeypatch.setenv("TERRAZZO_CACHE_DIR", str(tmp_path / "cache"))
    cpu_measurer.patch(monkeypatch.setattr)
    return monkeypatch


@pytest.mark.parametrize("op", ["w4a16", "w4a8"])
def test_a_trial_checks_then_times(on_the_cpu, op):
    bench, problem = Bench(cpu_measurer.H200), problem_of(op)
    assert bench.trial(problem, "small_batch", GOOD, 5.0) == {"status": "ok", "us": 10.0, "spread": 0.01}
    wrong = bench.trial(problem, "small_batch", GOOD | {"chunk": 2}, 5.0)
    assert wrong["status"] == "wrong" and "1 of" in wrong["error"]
    assert bench.peer(problem) == {"status": "ok", "name": "cublas_f16", "us": 10.0}
    assert records.pick(op, dict(problem.facts), 8, cpu_measurer.H200) is None  # nothing stays forced
    other = bench.trial(problem_of(op, 3), "small_batch", GOOD, 5.0)
    assert other["status"] == "ok" and [m for _, m in bench.inputs] == [8, 3] and len(bench.subjects) == 1
    error = bench.trial(problem, "small_batch", GOOD | {"warps": 40}, 5.0)
    assert error["status"] == "error" and "schedule" in error["error"]
    with pytest.raises(RuntimeError, match="illegal memory access"):
        bench.trial(problem, "small_batch", GOOD | {"stages": 1}, 5.0)


TILE = dict(block_tokens=16, warpgroups=2, row_blocks=1, stages=4, raster=8)
MANY = {
    "w4a8_fp8": ("stream_k", TILE, {"raster": 4}),
    "mxfp4_fp8": ("stream_k", TILE, {"raster": 4}),
    "mxfp4_mxfp8": ("stream_k", TILE, {"raster": 4}),
    "w4ax": ("integer", dict(block_tokens=16, warpgroups=2, stages=4, raster=8), {"raster": 4}),
    "w4a8_grouped": ("grouped", TILE, {"raster": 4}),
    **{
        of_codes(one).record: ("small_batch", GOOD | {"token_tiles": 2}, {"chunk": 2})
        for one in WIDE.values()
        if one.name != "u4"
    },
    **{f"{of_codes(one).record}_grouped": ("grouped", TILE | {"stage_k": 64}, {"raster": 4}) for one in WIDE.values()},
    "w4a8_fp8_grouped": ("grouped", TILE, {"raster": 4}),
    "mxfp4_fp8_grouped": ("grouped", TILE, {"raster": 4}),
    "mxfp4_mxfp8_grouped": ("grouped", TILE, {"raster": 4}),
    "w8a8_grouped": ("grouped", TILE, {"raster": 4}),
    "w8a8_fp8_grouped": ("grouped", TILE, {"raster": 4}),
    "attention_prefill": ("prefill_shared", dict(row_tiles=8, warps=8, stages=2, buffers=2), {"stages": 3}),
    "attention": ("decode", dict(row_tiles=1, warps=4, tiles=1, stages=4, min_blocks=2), {"min_blocks": 4}),
}


@pytest.mark.parametrize("op", MANY)
def test_every_operator_is_checked_by_its_oracle(on_the_cpu, op):
    """One small problem of each: a right output is timed, a wrong one is not, several problems are held at once."""
    program, good, change = MANY[op]
    job = Job(ops=(op,), shapes=((128, 256),), m=(9,), experts=(3,), caches=("2x8/2x128",), formats=("int4/int4",))
    (problem,) = job.problems()
    on_the_cpu.setattr(AttentionPrefill, "shape", "1x4/2x64")
    bench = Bench(cpu_measurer.H200)
    assert bench.trial(problem, program, good, 5.0) == {"status": "ok", "us": 10.0, "spread": 0.01}
    wrong = bench.trial(problem, program, good | change, 5.0)
    assert wrong["status"] == "wrong" and "1 of" in wrong["error"]
    said = bench.peer(problem)
    assert said["status"] == ("ok" if op in set(BY_RECORD) else "error")
    request = get_operator(op).request(problem, program, good, cpu_measurer.H200)
    family = "w4a8" if op.startswith(("mxfp4_fp8", "mxfp4_mxfp8")) else op.split("_")[0]
    assert good.items() <= dict(request.params).items() and request.name == f"{family}.{program}"
    illegal = {"warpgroups": 4, "block_tokens": 256} if "warpgroups" in good else {"warps": 40}
    with pytest.raises(ArgumentError, match="schedule"):
        get_operator(op).request(problem, program, good | illegal, cpu_measurer.H200)
    bench.trial(problem_of("w4a16"), "small_batch", GOOD, 5.0)
    assert len(bench.subjects) == 2
    on_the_cpu.setattr(measurer_module, "_used", lambda: 0.9)
    assert bench.trial(problem_of("w4a8"), "small_batch", GOOD, 5.0)["status"] == "ok"
    assert len(bench.subjects) == 1 and len(bench.inputs) == 1  # there was no room for the others


@pytest.mark.parametrize("form", ["w8a8", "w8a8-e4m3", "w8a8-e4m3-g128", "w4a8", "w4a16"])
def test_experts_of_a_measurement_are_one_weight_with_rotated_rows(form):
    import torch
    from terrazzo.autotune.grouped_bench import turned
    from terrazzo.nn.formats import Format

    packed = Format.parse(form).quantize(torch.randn(192, 256))
    for e, one in enumerate(turned(packed, 3)):
        assert torch.equal(one.dequantize(), packed.dequantize().roll(64 * e, 0))


def test_two_launches_must_agree(on_the_cpu):
    from terrazzo.ops import w4a16

    count = iter(range(1000))

    def wavering(x, w, *, out):
        y = cpu_measurer.gemm16(x, w, out=out)
        y.view(torch.int16)[0, 0] ^= next(count) & 1
        return y

    on_the_cpu.setattr(w4a16, "gemm", wavering)
    said = Bench(cpu_measurer.H200).trial(problem_of(), "small_batch", GOOD, 5.0)
    assert said["status"] == "wrong" and "different bits" in said["error"]


def test_the_process_is_replaced_after_a_cuda_error_or_a_wrong_result(tmp_path, monkeypatch):
    monkeypatch.setenv("TERRAZZO_CACHE_DIR", str(tmp_path))
    measurer, problem = Measurer(command=COMMAND, deadline=60.0), problem_of()
    machine = measurer.hello()
    assert (machine.gpu, machine.arch, machine.tilelang) == ("NVIDIA H200", "sm_90a", toolchain().tilelang)
    assert measurer.trial(problem, "small_batch", GOOD, 5.0).us == 10.0
    crashed = measurer.trial(problem, "small_batch", GOOD | {"stages": 1}, 5.0)
    assert crashed.status == "crash" and "illegal memory access" in crashed.error and measurer.process is None
    assert measurer.peer(problem).us == 10.0
    wrong = measurer.trial(problem, "small_batch", GOOD | {"chunk": 2}, 5.0)
    assert wrong.status == "wrong" and measurer.process is None and measurer.started == 2


@pytest.mark.compiles
@pytest.mark.skipif(bool(toolchain().missing()), reason=f"cannot compile: {toolchain().missing()} missing")
def test_a_job_with_real_kernels(tmp_path, monkeypatch):
    """Everything but the GPU: kernels are compiled in the pool, the real process answers with references."""
    monkeypatch.setenv("TERRAZZO_CACHE_DIR", str(tmp_path))
    job = Job(shapes=((128, 256),), m=(8,), strategy="top-k", most=1)
    with Database() as database:
        found = candidates(job.problems()[0], cpu_measurer.H200, job)
        summary = Runner(job, database, [Measurer(command=COMMAND)], workers=2).run()
        kept = database.trials()
    assert summary.ended == "done" and [it.role for it in kept] == ["heuristic"]
    assert {(it.program, it.params) for it in kept} == {(c.program, tuple(sorted(c.params.items()))) for c in found}
    assert set(summary.statuses) <= {"ok", "wrong", "crash"}, summary.statuses


def test_a_process_that_ends_before_it_is_asked_says_why(monkeypatch):
    """Its input is closed by then, which was a BrokenPipeError."""
    write = Measurer._write
    monkeypatch.setattr(Measurer, "_write", lambda self, message: (self.process.wait(), write(self, message)))
    with pytest.raises(ToolchainError, match="no luck today"):
        Measurer(command=[sys.executable, "-c", "import sys; sys.exit('no luck today')"], deadline=60.0).hello()


def test_measuring_processes_use_the_same_cache(tmp_path, monkeypatch):
    """Wherever the working directory has gone since a relative TERRAZZO_CACHE_DIR was first read."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TERRAZZO_CACHE_DIR", "here")
    assert cache.cache_root() == tmp_path / "here"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    measurer = Measurer(command=[sys.executable, "-c", SAYS_CACHE], deadline=60.0)
    with pytest.raises(ToolchainError, match=re.escape(str(tmp_path / "here"))):
        measurer.hello()
