"""A change of the sources that should change no choice of a schedule changes none."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from terrazzo.lowering.toolchain import package_version

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent / "tools"))
import schedule_choices

WRITTEN = json.loads(schedule_choices.GOLDEN.read_text())
REMEDY = "`--text FOLDER` of tests/tools/schedule_choices.py keeps the lines, to compare; `--write` if that was meant"
QUICK = (
    "w4a16 sm_80 group=64 dtype=bfloat16",
    "w4a16 sm_90a scale_dtype=float32",
    "w4a8 sm_90a group=128",
    "w4a8_fp8 sm_90a group=32",
    "w4ax sm_90a scales=None",
    "w4a16_grouped sm_90a group=0",
)


def test_every_group_of_choices_has_its_digest():
    assert {label for label, _ in schedule_choices.groups()} == set(WRITTEN)


@pytest.mark.parametrize("label", QUICK)
def test_choices_over_a_few_shapes_are_what_they_were(label):
    assert dict(schedule_choices.digests([label])) == {label: WRITTEN[label]}, REMEDY


@pytest.mark.slow
@pytest.mark.skipif(package_version("tilelang") != "0.1.15", reason="records are of kernels of TileLang 0.1.15")
def test_all_choices_are_what_they_were():
    assert dict(schedule_choices.digests(["*"])) == WRITTEN, REMEDY
