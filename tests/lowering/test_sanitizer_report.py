"""Which findings of racecheck the GPU tests accept: those of refilled ring stages, and no other."""

from __future__ import annotations

from pathlib import Path

import pytest
from lowering_tools import needs_compiler, request_for, run_python
from terrazzo.lowering import KernelRequest
from terrazzo.lowering.compiler import _Nvcc

from tests.gpu import line_tables, sanitizer_report
from tests.gpu.sanitizer_report import unknown_findings

REFILL = """\
========= COMPUTE-SANITIZER
refills w4a8 e4m3
========= Error: Race reported between Write access at tz_bulk(void *, const void *, int, void *)+0x6730 in kernel.cu:63
=========     and Read access at tz_lds128(void *, unsigned int)+0x1930 in kernel.cu:23 [31744 hazards]
=========     and Read access at tz_lds32(unsigned int)+0x19a0 in kernel.cu:27 [2048 hazards]
=========
========= Error: Race reported between Read access at tz_lds128(void *, unsigned int)+0x1a30 in kernel.cu:23
=========     and Write access at tz_bulk(void *, const void *, int, void *)+0x8bc0 in kernel.cu:63 [63488 hazards]
ok
========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)
"""


def test_a_refill_is_known():
    assert not unknown_findings(REFILL)


def test_anything_else_is_not():
    store = "=========     and Write access at tz_sts128(void *, unsigned int)+0x1930 in kernel.cu:23 [32 hazards]"
    error = "========= Error: Race reported between Read access at main_kernel+0x10 in kernel.cu:3"
    word = "=========     and Write access at tz_lds32(unsigned int)+0x20 in kernel.cu:9 [4 hazards]"
    access = "========= Invalid __global__ read of size 4 bytes"
    for line in (store, error, word, access):
        assert unknown_findings(REFILL.replace("=========\n", f"{line}\n", 1)) == [line]


@needs_compiler
@pytest.mark.parametrize("flags", [(), ("ptx=compute_80",)])
def test_watched_kernels_have_line_tables(monkeypatch, flags):
    """Reports name inlined functions by them. The kernels are others than those without, in the cache too."""
    plain = request_for("scale", flags=flags)
    lined = line_tables.lined(plain)
    assert "-lineinfo" in _Nvcc(lined, Path("build"), None).command({}) and "-lineinfo" not in plain.flags
    assert lined.identity() != plain.identity() and lined.ptx == plain.ptx and line_tables.lined(lined) == lined
    monkeypatch.setattr(KernelRequest, "__post_init__", KernelRequest.__post_init__)  # as it was, behind this test
    line_tables.line_all()
    assert request_for("scale", flags=flags) == lined == KernelRequest.from_dict(lined.as_dict())


def test_the_watched_process_launches_what_was_compiled_for_it():
    """Its operators' own requests find the kernels in the cache by the same keys."""
    code = """
from benchmarks.pretended_gpu import pretend
pretend("nvidia/nvidia-h200")
import sanitized, torch
from terrazzo.ops import w4a16
"""
    compiles = "print(*(request.as_dict() for request in sanitized.PLANTED.requests()))"
    launches = """
sanitized.main("no family", lambda text: None)
requests = w4a16.weight_requests(sanitized.PLANTED.weight(), 4, torch.float16)
print(*(request.as_dict() for request in requests))
"""
    folder = Path(sanitizer_report.__file__).parent
    ahead, watched = (run_python(text, path=folder) for text in (code + compiles, code + launches))
    assert not ahead.returncode and not watched.returncode, ahead.stderr + watched.stderr
    assert ahead.stdout == watched.stdout and "'flags': ['-lineinfo']" in ahead.stdout
