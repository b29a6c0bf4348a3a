"""Which findings of racecheck the GPU tests accept: those of refilled ring stages, and no other."""

from __future__ import annotations

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
