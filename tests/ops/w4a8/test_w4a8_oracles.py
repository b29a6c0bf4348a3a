"""The W4A8 GPU oracles themselves, on the CPU: a correct operator passes, each fault is found and repeatable."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path

import pytest
import torch
from terrazzo.ops import w4a8
from terrazzo.ops.w4a8 import QuantizedActivations, reference


@pytest.fixture(scope="module")
def oracles():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "gpu"))
        yield importlib.import_module("w4a8_oracles")


def operator(change_weight=lambda w: w, change_output=lambda y: y):
    """gemm() in float64 from the packed bytes, with a fault."""

    def gemm(x, w, *, bias, out, out_dtype, dequantization, pipeline):
        if isinstance(x, QuantizedActivations):
            q, scales = x.q[:, : w.k], x.scales
        else:
            q, scales, _ = reference.quantize_activations(x, w.smooth)
        w = change_weight(w.unpack())
        y = reference.accumulate(q, w) if out_dtype == torch.int32 else reference.gemm(q, scales, w, bias)
        out.copy_(change_output(y.to(out_dtype)))
        return out

    return gemm


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch, oracles):
    monkeypatch.setattr(oracles, "DEVICE", "cpu")
    monkeypatch.setitem(vars(w4a8), "gemm", operator())
    oracles.canonical.cache_clear()
    oracles.packed.cache_clear()


SPECS = ((48, 160, 32, False, False), (33, 203, 64, True, True), (70, 130, 128, True, False))


@pytest.mark.parametrize("kind", ["identity", "integer", "random"])
@pytest.mark.parametrize("out", ["float16", "bfloat16", "int32"])
def test_a_correct_operator_passes(oracles, kind, out):
    for spec in SPECS:
        for m in (1, 64) if kind == "identity" else (0, 1, 5, 64):
            oracles.check(oracles.Case(oracles.Spec(*spec), m, out, kind=kind, seed=1))


def _code(weight):
    codes = weight.codes.clone()
    codes[7, 101] = 0 if codes[7, 101] else 1  # fits the byte whatever the offset
    return dataclasses.replace(weight, codes=codes)


def _offset(weight):
    offsets = weight.offsets.clone()
    offsets[5, -1] ^= 1
    return dataclasses.replace(weight, offsets=offsets)


def _swapped(weight):
    codes = weight.codes.clone()
    codes[:, [3, 4]] = codes[:, [4, 3]]
    return dataclasses.replace(weight, codes=codes)


def _lost(y):
    y[-1, -1] = float("nan") if y.is_floating_point() else y[-1, -1] + 1
    return y


@pytest.mark.parametrize("kind", ["identity", "integer", "random"])
@pytest.mark.parametrize(
    "fault",
    [{"change_weight": _code}, {"change_weight": _offset}, {"change_weight": _swapped}, {"change_output": _lost}],
    ids=["code", "offset", "swapped", "lost"],
)
def test_faults_are_found(oracles, kind, fault, monkeypatch):
    monkeypatch.setitem(vars(w4a8), "gemm", operator(**fault))
    case = oracles.Case(oracles.Spec(*SPECS[0]), 64, "int32", kind=kind, seed=1)
    with pytest.raises(AssertionError) as found:
        oracles.check(case)
    assert str(found.value).endswith(case.repro) and "python tests/gpu/w4a8_oracles.py" in case.repro
    text = case.repro.partition('"')[2].rstrip('"')
    assert eval(text, {"Case": oracles.Case, "Spec": oracles.Spec}) == case


def test_other_faults_are_found(oracles, monkeypatch):
    def refuses(words, gemm):
        monkeypatch.setitem(vars(w4a8), "gemm", gemm)
        with pytest.raises(AssertionError, match=words):
            oracles.check(oracles.Case(oracles.Spec(*SPECS[0]), 64))

    def beyond(x, w, *, out, **options):
        out._base[-1, 0] = 0
        return operator()(x, w, out=out, **options)

    runs = iter(range(2))
    refuses("two runs differ", operator(change_output=lambda y: y + next(runs)))
    refuses("rows beside the output were written", beyond)
    refuses("out= was not used", lambda x, w, *, out, **o: operator()(x, w, out=out, **o).clone())
    refuses("outside the forward error bound", operator(change_output=lambda y: y * 1.01))
    refuses("KeyError: 'x'.*\n.*python tests/gpu", lambda *_, **__: {}["x"])
