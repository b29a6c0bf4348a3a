"""The GPU oracles themselves, on the CPU: a correct operator passes, each kind of fault is found and repeatable."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from terrazzo.ops import w4a16
from terrazzo.ops.w4a16 import QuantizedWeight, reference

_SOURCE = importlib.util.spec_from_file_location("oracles_on_cpu", Path(__file__).parents[2] / "gpu" / "oracles.py")
oracles = sys.modules["oracles_on_cpu"] = importlib.util.module_from_spec(_SOURCE)
_SOURCE.loader.exec_module(oracles)
Case, Spec = oracles.Case, oracles.Spec

SPECS = [
    Spec(48, 160, 32),
    Spec(33, 203, 64, symmetric=True, dtype="bfloat16", bias=True),
    Spec(70, 130, -1, dtype="bfloat16", scale="float32", bias=True),
    Spec(65, 256, 128, act_order=True, scale="bfloat16"),
]


def operator(change_weight=lambda w: w, change_output=lambda y: y):
    """gemm() in float32 from the packed bytes, with a fault."""

    def gemm(x, weight, *, bias=None, out=None, numerics="auto"):
        weight = change_weight(weight.unpack())
        numerics = "post" if numerics == "auto" else numerics
        bias, w = weight.bias if bias is None else bias, reference.dequantize(weight, numerics, x.dtype).float()
        y = (x.float() @ w.T + (0 if bias is None else bias.float())).to(x.dtype)
        out.copy_(change_output(y))
        return out

    return gemm


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(oracles, "DEVICE", "cpu")
    # Straight into the module's names: asking for the present value would import the operator.
    monkeypatch.setitem(vars(w4a16), "weight_requests", lambda *_: [SimpleNamespace(params=(("numerics", "post"),))])
    monkeypatch.setitem(vars(w4a16), "gemm", operator())


@pytest.mark.parametrize("kind", oracles.KINDS)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_correct_operator_passes(kind, spec):
    for numerics in ("auto", *spec.numerics):
        for m in (1, 5, 64) if kind == "identity" else (0, 1, 5, 64):
            oracles.check(Case(spec, m, numerics, kind, seed=1))


def _code(weight: QuantizedWeight) -> QuantizedWeight:
    codes = weight.codes.clone()
    codes[7, 100] ^= 1
    return QuantizedWeight.canonical(codes, weight.scales, weight.zeros, group_size=weight.group_size)


def _swapped(weight: QuantizedWeight) -> QuantizedWeight:
    codes = weight.codes.clone()
    codes[:, [3, 4]] = codes[:, [4, 3]]
    return QuantizedWeight.canonical(codes, weight.scales, weight.zeros, group_size=weight.group_size)


def _lost_group(weight: QuantizedWeight) -> QuantizedWeight:
    scales = weight.scales.clone()
    scales[5, -1] = 0
    return QuantizedWeight.canonical(weight.codes, scales, weight.zeros, group_size=weight.group_size)


def _lost_element(y: torch.Tensor) -> torch.Tensor:
    y[-1, -1] = float("nan")
    return y


@pytest.mark.parametrize("kind", oracles.KINDS)
@pytest.mark.parametrize(
    "fault",
    [
        {"change_weight": _code},
        {"change_weight": _swapped},
        {"change_weight": _lost_group},
        {"change_output": _lost_element},
    ],
    ids=["code", "swapped", "lost-group", "lost-element"],
)
def test_faults_are_found(kind, fault, monkeypatch):
    monkeypatch.setitem(vars(w4a16), "gemm", operator(**fault))
    case = Case(SPECS[0], 64, "auto", kind, seed=1)
    with pytest.raises(AssertionError) as found:
        oracles.check(case)
    assert str(found.value).endswith(case.repro) and "python tests/gpu/oracles.py" in case.repro
    text = case.repro.partition('"')[2].rstrip('"')
    assert eval(text, {"Case": Case, "Spec": Spec}) == case


def test_other_faults_are_found(monkeypatch):
    def refuses(words: str, gemm, spec=SPECS[0]) -> None:
        monkeypatch.setitem(vars(w4a16), "gemm", gemm)
        with pytest.raises(AssertionError, match=words):
            oracles.check(Case(spec, 64))

    def beyond(x, weight, *, out, **_):
        out._base[-1, 0] = 0
        return operator()(x, weight, out=out)

    runs = iter(range(2))
    refuses("two runs differ", operator(change_output=lambda y: y + next(runs)))
    refuses("rows beside the output were written", beyond)
    refuses("out= was not used", lambda x, weight, *, out, **_: operator()(x, weight, out=out).clone())
    refuses("KeyError: 'x'.*\n.*python tests/gpu", lambda *_, **__: {}["x"])
    # The forward error bound of bf16 post is loose over a long group; the rms is not.
    long = Spec(48, 4096, -1, dtype="bfloat16")
    refuses("rms error", operator(change_output=lambda y: y + y.std() * 8e-3), long)
