"""A change of the sources that should change no kernel changes no text of one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from terrazzo.lowering.targets import Target
from terrazzo.lowering.toolchain import package_version

sys.path.insert(0, str(Path(__file__).parent / "tools"))
import kernel_digest

WRITTEN = json.loads(kernel_digest.GOLDEN.read_text())
pytestmark = pytest.mark.skipif(
    package_version("tilelang") != WRITTEN["tilelang"],
    reason=f"the digests are of TileLang {WRITTEN['tilelang']}, this is {package_version('tilelang')}",
)
REMEDY = "if the kernel had to change, measure it and run `make digests`; docs/internals.md says how to compare"


@pytest.mark.parametrize("call", kernel_digest.QUICK)
def test_one_kernel_of_each_program_is_what_it_was(call, without_records):
    chosen = kernel_digest.select([call])
    assert chosen
    for label, request in chosen.items():
        assert kernel_digest.sha256(kernel_digest.text_of(request)) == WRITTEN["kernels"][label], f"{label}: {REMEDY}"


def test_every_call_has_its_digests_whatever_gpu_is_here(without_records, monkeypatch):
    chosen = kernel_digest.select(["*"])
    assert set(chosen) == set(WRITTEN["kernels"]) and len(chosen) > 200, set(chosen) ^ set(WRITTEN["kernels"])
    for gpu in ("nvidia/nvidia-h100", "nvidia/nvidia-l4"):
        here = Target.parse(gpu)
        monkeypatch.setattr(Target, "detect", staticmethod(lambda device=None, here=here: here))
        assert kernel_digest.select(["*"]) == chosen, gpu


def test_a_kernel_counts_as_changed_by_what_it_is_made_of(without_records, monkeypatch, tmp_path):
    chosen = kernel_digest.select(["rope *"])
    label, *others = chosen
    monkeypatch.setattr(kernel_digest, "SOURCES", tmp_path / "kernel_sources.json")
    assert kernel_digest.changed(chosen, 0, 0) == chosen, "nothing is known"
    known = {name: kernel_digest.made_of(request) for name, request in chosen.items()}
    kernel_digest.SOURCES.write_text(json.dumps(known))
    assert kernel_digest.changed(chosen, 0, 0) == {} and len(kernel_digest.changed(chosen, 1, 7)) == 1
    kernel_digest.SOURCES.write_text(json.dumps(known | {label: "0" * 16}))
    assert list(kernel_digest.changed(chosen, 0, 0)) == [label] and others


@pytest.mark.slow
@pytest.mark.random
@pytest.mark.timeout(3600)
def test_every_kernel_is_what_it_was(seed):
    """Those that are made of what they were are what they were: of them, some are looked at, others with each seed."""
    tool = [sys.executable, kernel_digest.__file__, "--changed", "24", "--seed", str(seed)]
    done = subprocess.run(tool, capture_output=True, text=True, check=False)
    differ = [line for line in done.stdout.splitlines() if line.endswith("DIFFERS")]
    assert done.returncode == 0, f"{differ} {done.stderr} {REMEDY}"
