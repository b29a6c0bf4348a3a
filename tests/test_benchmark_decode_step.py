"""The benchmark of a decode step on a CPU: small shapes run through the reference, and kernels are named."""

from __future__ import annotations

import pytest
import torch
from terrazzo.autotune import gemm_bench
from terrazzo.lowering.targets import Target
from terrazzo.ops.attention.cache import launch
from terrazzo.ops.w4ax import format as w4ax_format

from benchmarks import decode_step
from benchmarks.decode_step import Model, Row, Step, arguments


@pytest.fixture
def small(monkeypatch):
    """A tiny model on the CPU."""
    shapes = {"qkv": (512, 128), "o": (128, 256), "gate_up": (512, 128), "down": (128, 256)}
    for name, value in dict(
        DEVICE="cpu", HIDDEN=128, INTERMEDIATE=256, HEADS=4, KV_HEADS=2, HEAD_DIM=64, VOCABULARY=50, SHAPES=shapes,
    ).items():  # fmt: skip
        monkeypatch.setattr(decode_step, name, value)
    monkeypatch.setattr(gemm_bench, "DEVICE", "cpu")
    parse = Target.parse
    monkeypatch.setattr(w4ax_format, "native", lambda target: False)
    monkeypatch.setattr(Target, "parse", classmethod(lambda cls, name=None: parse(name or "sm_90a")))


@pytest.mark.parametrize("text", ["2x130:w4a16-g128/float16", "2x130:w4a8-g64/int4", "p2x9:w4a16-g64/int8",
                                  "1x135:w4a8-e4m3/int4_channel128+int4", "1x140:w4ax/int4@w4a16-g64"])  # fmt: skip
@torch.no_grad()
def test_a_step_runs_and_its_layers_are_those_of_float_weights(small, text):
    row = Row.parse(text)
    assert str(Row.parse(str(row))) == str(row)
    step = Step(Model(row.weights, 2), row)
    logits = step()
    assert logits.shape == (row.batch, 50) and torch.equal(step(), logits)
    assert step.wrong() == ""
    assert step.nbytes > 2 * 50 * 128
    for name, calls in step.parts().items():
        assert len(calls) == {"head": 1, "norm": 4}.get(name, 2)
        assert calls[-1]() is not None or name == "append"


def test_every_row_names_its_kernels(monkeypatch):
    target = Target.parse("nvidia/nvidia-h100")
    monkeypatch.setattr(launch, "detect", lambda *_: target)
    o = arguments([])
    found = decode_step.requests(o.rows)
    names = {request.name for request in found}
    assert {
        "attention.write",
        "attention.rope_append",
        "attention.decode",
        "w4a8.quantize_rows",
        "w4ax.quantize_blocks",
    } <= names
    assert {"norm.rms_norm", "activation.act_and_mul", "rope.apply_rope"} <= names
    assert any("prefill" in name for name in names) and any(name.startswith("w4a16") for name in names)
    assert len(found) == len(set(found)) and all(request.target.arch == "sm_90a" for request in found)


def test_bad_arguments_are_refused(capsys):
    for bad in (["--rows", "64x1024"], ["--rows", "1x1:w4a16"], ["--peers", "nobody"]):
        with pytest.raises(SystemExit):
            arguments(bad)
    assert arguments(["--peers", "none", "--quick"]).peers == []


def test_the_table_has_every_measured_row():
    from benchmarks import tables

    parts = {"qkv": 0.5, "o": 0.25, "gate_up": 1.0, "down": 0.5, "attention": 0.3, "append": 0.1, "head": 0.4}
    row = {
        "op": "decode_step", "row": "1x1024:w4a16-g128/int4", "batch": 1, "context": 1024, "new": 1, "layers": 32,
        "weights": "w4a16-g128", "k_format": "int4", "v_format": "int4", "ms": 3.25, "floor_ms": 1.5, "parts": parts,
        "peers": {"transformers_f16": 9.9},
    }  # fmt: skip
    result = {
        "gpu": "NVIDIA H100", "torch": "2.11", "date": "2026-01-01", "commit": "abc", "copy_gb_s": 3000.0,
        "rows": [row, {**row, "ms": None, "failure": "no"}, {**row, "ms": 4.0, "peers": {}, "parts": {}}],
    }  # fmt: skip
    text = tables.decode_step(result, "benchmarks/results/decode_step_h100.json")
    assert tables.owner("decode_step_h100.json") == "decode_step_*.json"
    assert "| 3.25 | 1.50 | 2.41 (1.35) | 2.25 |" in text and "| 9.90 |" in text and "4.00" in text


def test_the_table_of_small_kernels_counts_what_reaches_its_aim():
    from benchmarks import tables

    row = {"kernel": "norm", "quant": "int8", "k": 4096, "m": 1, "us": 1.0, "resident": True, "peers": {}}
    rows = [
        {**row, "over_empty_us": 0.4, "of_copy": 2.0},
        {**row, "m": 16, "over_empty_us": 0.41, "of_copy": 2.0},
        {**row, "m": 64, "over_empty_us": 0.1, "of_copy": 1.0},
        {**row, "m": 1024, "over_empty_us": 9.0, "of_copy": 1.1, "resident": False},
    ]
    result = {"gpu": "NVIDIA H100", "torch": "2.11", "date": "2026-01-01", "commit": "abc", "rows": rows}
    text = tables.layer_kernels(result, "benchmarks/results/layer_kernels_h100.json")
    assert "which 1 of 2 cases reach" in text and "which 1 of 1 reach" in text
