"""The one driver of linear layers, on the CPU: every format's rows, files, budgets, peers that fail."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from terrazzo.autotune import gemm_bench, linear_bench
from terrazzo.lowering.targets import Target
from terrazzo.schedules.models import MODELS

from benchmarks import linear, report
from benchmarks.peers import byte_inputs, weights

sys.path.append(str(report.RESULTS.parents[1] / "tests" / "autotune"))
from test_gemm_bench import Rival
from test_gemm_bench import on_the_cpu as clockless

on_the_cpu = clockless


class Quantizes(Rival):
    """A peer that may quantize inside of the clock."""

    def prepare(self, x, loaded):
        return x

    def quantize(self, x, loaded):
        return x if self.breaks != "quantize" else 2 * x


@pytest.fixture
def ours(on_the_cpu, tmp_path):
    """Kernels are the oracle of the shape that is measured, called as the real ones are; files go to a folder."""
    shapes = []
    tokens = gemm_bench.Shape.tokens

    def remember(self, m):
        self.asked = tokens(self, m)
        shapes[:] = [self]
        return self.asked

    def gemm(real):
        def call(*args, **options):
            inspect.signature(real).bind(*args, **options)
            (shape,) = shapes
            part, shape.part = shape.part, shape.weight
            requests = shape.requests(shape.n, shape.k, len(shape.asked), shape.settings, shape.target)
            y = shape.oracle(shape.asked, requests)[0].to(shape.dtype)
            shape.part = part
            return options["out"].copy_(y)

        return call

    for name in {form.record for form in linear.FORMATS.values()}:
        product = linear_bench.BY_RECORD[name]
        module = importlib.import_module(f"terrazzo.ops.{product.module}")
        on_the_cpu.setitem(vars(module), "gemm", gemm(module.gemm))
        if not product.wide:
            on_the_cpu.setitem(vars(module), "quantize_activations", lambda *args, **options: object())
    on_the_cpu.setattr(linear.program, "compile_all", lambda requests: [None] * len(requests))
    on_the_cpu.setattr(linear, "CHECKED", 128)
    on_the_cpu.setattr(linear, "SETS", {"tuned": ((256, 512),), "held-out": ((384, 256), (256, 256))})
    on_the_cpu.setattr(gemm_bench.measure, "call_overhead_us", lambda call: 5.0)
    on_the_cpu.setattr(gemm_bench.Shape, "tokens", remember)
    on_the_cpu.setattr(linear, "Ahead", lambda argv: SimpleNamespace(wait=lambda job: None, close=lambda: None))
    return on_the_cpu


def peers(monkeypatch, name, *others):
    """A format's peers are others."""
    form = linear.FORMATS[name]
    monkeypatch.setitem(linear.FORMATS, name, dataclasses.replace(form, peers=others))


@pytest.mark.parametrize("name", linear.FORMATS)
def test_every_format_is_measured_by_its_own_rows(ours, tmp_path, name):
    peers(ours, name, Quantizes("rival_right"))
    words = ["--formats", name, "--shapes", "tuned", "--m", "3", "--out", str(tmp_path), "--commit", "c0ffee"]
    assert linear.main(words) == 0
    (path,) = tmp_path.glob("*.json")
    result = report.load(path)
    assert path.name == report.file_name(name, result["gpu"]) and result["command"] == linear.command(name, "tuned")
    (row,) = result["rows"]
    assert row["us"] == 10.0 and row["peers"] == {"cublas_f16": 10.0, "rival_right": 10.0}, row
    assert row["peers_with_quantizer"] == {"rival_right": 10.0} and row["repeats"] == 5
    most = 0.15 if name == "w4ax" else 0.05  # int4 activations round more
    assert set(row["errors"]) == {"terrazzo", "rival_right"} and row["errors"]["terrazzo"] < most
    assert ("with_quantizer" in row.get("variants", {})) == (not linear_bench.BY_RECORD[row["op"]].wide)
    assert row["group"] in (16, 32, 64, 128, 512) and row["dtype"] == linear.FORMATS[name].dtype
    assert result["tokens"] == [3] and result["shapes"] == "tuned" and "clocks" in result


def test_a_wrong_tile_outside_of_what_the_bound_sees_shows_in_the_errors(ours, tmp_path):
    module = importlib.import_module("terrazzo.ops.w4a16")
    right = module.gemm
    ours.setitem(vars(module), "gemm", lambda *args, **options: right(*args, **options)[:, :64].zero_())
    peers(ours, "w4a16")
    assert linear.main(["--formats", "w4a16", "--shapes", "tuned", "--m", "2", "--out", str(tmp_path)]) == 0
    (row,) = json.loads(next(tmp_path.glob("*.json")).read_text())["rows"]
    assert row["us"] == 10.0 and row["errors"]["terrazzo"] > 0.3


def test_a_quantizer_that_gives_another_product_costs_that_time_alone(ours, tmp_path):
    peers(ours, "w4a8", Quantizes("rival_off", breaks="quantize"))
    assert linear.main(["--formats", "w4a8", "--shapes", "tuned", "--m", "2", "--out", str(tmp_path)]) == 0
    (row,) = json.loads(next(tmp_path.glob("*.json")).read_text())["rows"]
    assert "rival_off" in row["peers"] and "peers_with_quantizer" not in row
    assert row["peers_failed"] == {"rival_off with its quantizer": "another product than without it"}


def test_a_file_is_written_where_all_shapes_are_measured_and_the_rest_is_said(ours, tmp_path, capsys):
    peers(ours, "w4a16")
    peers(ours, "w4a8")
    old = tmp_path / "w4a8_held_out_h100.json"
    old.write_text("old")
    words = ["--formats", "w4a16,w4a8", "--m", "1", "--out", str(tmp_path), "--budget-s"]
    assert linear.main([*words, "0"]) == 1
    assert not list(tmp_path.glob("w4a16*")) and old.read_text() == "old"
    assert capsys.readouterr().out.count("NOT MEASURED: ") == 4
    options = linear.arguments(words[:-1])
    ours.setattr(linear.report, "file_name", lambda name, gpu: f"{name}_h100.json")
    with pytest.raises(linear.SpentError):
        linear.measure(options, ("w4a8", "held-out"), end=-1.0)
    part = old.with_suffix(".part")
    assert old.read_text() == "old" and len(json.loads(part.read_text())["rows"]) == 1
    assert linear.measure(options, ("w4a8", "held-out"), end=1e9) == old
    assert len(report.load(old)["rows"]) == 2 and not part.exists()


def test_a_peer_that_breaks_the_gpu_is_left_out_the_second_time(ours, tmp_path):
    def poisoned(*args, **options):
        raise gemm_bench.PoisonedError("rival", "illegal address")

    started = []
    ours.setattr(linear, "measure", poisoned)
    ours.setattr(linear.os, "execv", lambda python, words: started.append(words[3:]) or sys.exit(7))
    with pytest.raises(SystemExit):
        linear.main(["--formats", "fp8,nvfp4", "--budget-s", "100", "--m", "1", "--out", str(tmp_path)])
    (words,) = started
    again = linear.arguments(words)
    assert again.without == ["fp8:rival"] and again.formats == ("fp8", "nvfp4") and again.budget_s <= 100
    assert list(again.shapes) == ["tuned", "held-out"]
    one = linear.arguments(["--shapes", "tuned", *linear._words([("fp8", "held-out"), ("w4a8", "held-out")])])
    assert list(one.shapes) == ["held-out"] and one.formats == ("fp8", "w4a8")
    assert again.m == (1,) and again.out == tmp_path
    names = [
        peer.name
        for peer in linear.FORMATS["w4a8"].settings(linear.arguments(["--without", "w4a8:qserve_group"]), "w4a8").peers
    ]
    assert "qserve_group" not in names and "qserve_channel" in names


def test_a_format_that_fails_costs_no_other(ours, tmp_path, capsys):
    peers(ours, "fp8")
    right = linear.measure

    def fails(options, job, end):
        if job[0] == "w4a8":
            raise RuntimeError("CUDA error")
        return right(options, job, end)

    ours.setattr(linear, "measure", fails)
    ours.setattr(linear, "_is_broken", lambda: False)
    assert linear.main(["--formats", "w4a8,fp8", "--shapes", "tuned", "--m", "1", "--out", str(tmp_path)]) == 1
    assert "NOT MEASURED: w4a8 tuned, RuntimeError: CUDA error" in capsys.readouterr().out
    assert [path.name for path in tmp_path.glob("*.json")] == ["fp8_h200.json"]
    started = []
    ours.setattr(linear, "_is_broken", lambda: True)
    ours.setattr(linear.os, "execv", lambda python, words: started.append(words[3:]) or sys.exit(7))
    with pytest.raises(SystemExit):
        linear.main(["--formats", "w4a8,fp8", "--m", "1", "--out", str(tmp_path)])
    assert linear.arguments(started[0]).formats == ("fp8",)


def test_held_out_layers_are_no_tuned_record_and_no_power_of_two():
    tables = report.RESULTS.parents[1] / "schedules" / "tuned"
    tuned = {
        (record["facts"].get("n"), record["facts"].get("k"))
        for path in tables.glob("*.json")
        for record in json.loads(path.read_text())["records"]
    }
    assert len(set(linear.HELD_OUT)) >= 8 and not tuned & set(linear.HELD_OUT)
    assert not any(side & side - 1 == 0 for shape in linear.HELD_OUT for side in shape)
    named = linear.layers(linear.HELD_OUT)
    assert all(named.values()) and len({name.split(".")[0] for names in named.values() for name in names}) >= 3
    assert {(layer.n, layer.k) for layer in MODELS["llama-3-8b"]} == set(linear.TUNED)


def test_arguments_and_the_kernels_of_a_job():
    every = linear.arguments([])
    assert every.m == linear.MS and len(linear.jobs(every)) == 2 * len(linear.FORMATS)
    assert linear.jobs(every)[:2] == [("w4a16", "tuned"), ("w4a16", "held-out")]
    assert linear.jobs(every)[6:8] == [("fp8_block", "tuned"), ("mxfp4", "tuned")]  # those of a lost commit first
    few = linear.arguments(["--formats", "w8a8", "--shapes", "256x512,512x256", "--m", "8,8,2"])
    assert few.m == (8, 2) and list(few.shapes.values()) == [((256, 512), (512, 256))]
    found = linear.requests(few, linear.jobs(few)[0], Target.parse("sm_90a"))
    assert found and len(set(found)) == len(found)
    for bad in (["--m", "1,x"], ["--m", "0"], ["--shapes", "256"], ["--formats", "none"]):
        with pytest.raises(SystemExit) as stopped:
            linear.arguments(bad)
        assert stopped.value.code == 2


def test_jobs_are_ready_when_all_their_kernels_are(capsys, monkeypatch):
    first, second = ("w4a16", "tuned"), ("w4a8", "tuned")
    readiness = linear.Readiness([first, second])
    readiness.add(first, 1)
    for _ in range(2):
        readiness.add(second, -1)
    assert capsys.readouterr().out.startswith("ready w4a8 tuned")
    for _ in range(3):
        readiness.add(first, -1)
    assert capsys.readouterr().out.startswith("ready w4a16 tuned")
    batches = []

    def compiled(requests, workers, progress):
        batches.append(len(requests))
        for index, request in enumerate(requests):
            progress(index, 0, request, ValueError("no ptxas") if index == 0 else "folder")

    def refuses(*given):
        raise RuntimeError("no tile")

    monkeypatch.setattr(linear.Humming, "missing", lambda self: "")
    monkeypatch.setattr(linear, "_humming", lambda options, name: ["layer"] * (name == "w4a8"))
    monkeypatch.setattr(linear.Humming, "ahead", staticmethod(refuses))
    monkeypatch.setattr("terrazzo.lowering.parallel.compile_many", compiled)
    monkeypatch.setattr(Target, "detect", staticmethod(lambda device=None: Target.parse("sm_90a")))
    for more, count in (([], 1), (["--soon"], 2)):
        batches.clear()
        words = ["--compile-only", "--formats", "w4a16,w4a8", "--shapes", "tuned", "--m", "1", *more]
        assert linear.main(words) == 1 and len(batches) == count
        said = capsys.readouterr().out
        assert "ready w4a16 tuned" in said and "ready w4a8 tuned" in said and "no ptxas" in said
        assert "humming: no kernels of ('w4a8', 'tuned'): RuntimeError: no tile" in said


def test_a_process_that_compiles_is_waited_for_until_it_ends(monkeypatch, capsys):
    script = "print('ready w4a16 tuned 3 s', flush=True)"
    monkeypatch.setattr(linear.subprocess, "Popen", lambda words, **how: _popen([sys.executable, "-c", script], **how))
    ahead = linear.Ahead([])
    ahead.wait(("w4a16", "tuned"))
    ahead.wait(("w4a8", "tuned"))  # it ended without: whoever measures compiles
    assert "[ahead] ready w4a16 tuned" in capsys.readouterr().out
    ahead.close()


_popen = subprocess.Popen


def test_qserves_operands_hold_the_weight():
    rng = torch.Generator().manual_seed(0)
    dense = torch.randn(64, 256, generator=rng).half()
    for grouped in (True, False):
        peer = byte_inputs.QServe(grouped)
        codes, scales, zeros, rows = peer.weight(dense)
        assert int(codes.max()) <= 15 and float((scales * zeros).abs().max()) < (128 if grouped else 1e9)
        size = 256 // scales.shape[1]
        values = (codes.double().unflatten(1, (-1, size)) - zeros.double()[..., None]) * scales.double()[..., None]
        values = values.flatten(1) * (rows.double()[:, None] if grouped else 1)
        assert float((values - dense.double()).norm() / dense.double().norm()) < (0.13 if grouped else 0.18)
    words = peer.words(codes)
    assert words.shape == (64, 128) and words.dtype == torch.uint8
    tile = words.flatten()[:512]  # of the first 32 rows and 32 k: a byte has rows n and n + 16
    first = codes[:32, :32]
    assert int(tile[0]) == int(first[0, 0]) | int(first[16, 0]) << 4
    assert sorted((tile & 15).tolist()) == sorted(first.view(2, 16, 32)[0].flatten().tolist())
    assert sorted((tile >> 4).tolist()) == sorted(first.view(2, 16, 32)[1].flatten().tolist())
    ordered = peer.parameters(torch.arange(64).view(64, 1))[0]
    assert ordered[:8].tolist() == [0, 8, 16, 24, 1, 9, 17, 25] and sorted(ordered.tolist()) == list(range(64))


def test_eight_bit_words_of_the_peers():
    codes = torch.randint(0, 256, (5, 24), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    words = weights.pack_rows(codes, 8)
    assert words.shape == (6, 5) and int(words[2, 3]) >> 8 & 255 == int(codes[3, 9])
    assert torch.equal(words.T.contiguous().view(torch.uint8), codes)
