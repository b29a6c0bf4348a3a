"""The cost models of small batches beside what was measured on an H200."""

from __future__ import annotations

import json
from math import exp, log
from pathlib import Path

import pytest
from terrazzo.lowering.targets import Target
from terrazzo.schedules import small_batch
from terrazzo.schedules.problem import Gemm

MEASURED = json.loads((Path(__file__).parents[1] / "data/tuning/small_batch_h200.json").read_text())
TARGET = Target.parse("nvidia/nvidia-h200")


@pytest.mark.parametrize(("op", "tokens"), [("w4a16", 1), ("w4a16", 4), ("w4a16", 8), ("w4a8", 1), ("w4a8", 4)])
def test_the_cheapest_of_those_measured_is_nearly_the_fastest(op, tokens):
    """Of each weight that was measured with so many tokens: time of the one with the least cost over the shortest."""
    lost = []
    for row in MEASURED[op]:
        if row["m"] != tokens:
            continue
        sizes = row["n"], row["k"]
        problem = Gemm(*sizes, 1, 192) if op == "w4a16" else Gemm.of_bytes(*sizes, 64)
        runs = [(small_batch.SmallBatch(**dict(zip(MEASURED["fields"], values))), us) for values, us in row["runs"]]
        runs = [(s, us) for s, us in runs if s.x_rows == (tokens if tokens < 8 else 8) and s.stages <= 2]
        if len(runs) > 1:
            chosen = min(runs, key=lambda run: small_batch.cost(run[0], problem, TARGET))
            lost.append(chosen[1] / min(us for _, us in runs))
    assert len(lost) >= 8
    assert exp(sum(map(log, lost)) / len(lost)) < 1.03 and max(lost) < 1.2, sorted(lost)[-4:]
