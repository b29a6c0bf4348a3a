"""The demo: on any machine, from the repository's layer, from another one, and with nothing to read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from terrazzo import demo
from terrazzo.cli import main

DATA = Path(__file__).parent / "data"


@pytest.fixture(autouse=True)
def private_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("TERRAZZO_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "demo-kernels"))


@pytest.mark.slow
def test_the_demo_holds_on_this_machine(capsys):
    assert main(["demo"]) == 0
    said = capsys.readouterr().out
    for words in ("awq_demo.safetensors", "bijective yes", "HMMA", "HGMMA", "sm_80", "sm_89", "sm_90a", "holds"):
        assert words in said
    assert "FAILED" not in said and "DIFFERS" not in said


def test_the_demo_as_json(capsys, monkeypatch):
    monkeypatch.setattr(demo, "COMPILED_M", (64,))  # one kernel
    assert main(["demo", "--targets", "sm_90a", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] and len(report["steps"]) >= 5
    checked = next(step for step in report["steps"] if "exact" in step)
    assert all(checked[numerics]["wrong"] == 0 for numerics in ("exact", "fused", "post"))
    kernels = next(step for step in report["steps"] if "kernels" in step)["kernels"]
    assert any("HGMMA" in op for kernel in kernels for op in kernel["tensor_instructions"])


@pytest.mark.parametrize("name", ["gptq_act_order", "ct_sym", None])
def test_other_layers(monkeypatch, name):
    monkeypatch.setattr(demo, "_CHECKOUT_LAYER", Path("absent"))
    report = demo.run_demo(DATA / f"{name}.safetensors" if name else None, targets=(), quiet=True)
    assert report["ok"]


def test_a_wrong_number_is_noticed(monkeypatch, capsys):
    from terrazzo.layouts import emulate

    right = emulate.emulate_w4a16

    def wrong(*args, **kwargs):
        y = right(*args, **kwargs)
        y[0, 0] += 1
        return y

    monkeypatch.setattr(emulate, "emulate_w4a16", wrong)
    assert demo.run_demo(targets=(), quiet=True)["ok"] is False
    assert main(["demo", "--targets", "sm_90a"]) == 1
    assert "SOMETHING FAILED" in capsys.readouterr().out
