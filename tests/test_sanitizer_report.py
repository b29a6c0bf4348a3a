"""What the sanitizer test lets pass is what the docstring of sanitizer_report.py explains, and nothing else."""

from tests.gpu.sanitizer_report import unknown_findings

KNOWN = """\
========= COMPUTE-SANITIZER
refills w4a8 int8
========= Error: Race reported between Write access at tz_bulk(void *, const void *, int, void *)+0x7240 in kernel.cu:63
=========     and Read access at tz_lds128(void *, unsigned int)+0x14b0 in kernel.cu:23 [31744 hazards]
=========\x20
========= Error: Race reported between Read access at tz_lds128(void *, unsigned int)+0x1a30 in kernel.cu:23
=========     and Write access at tz_bulk(void *, const void *, int, void *)+0x8bc0 in kernel.cu:63 [63488 hazards]
ok
========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)
"""


def test_reads_of_a_stage_and_its_refill_pass():
    assert unknown_findings(KNOWN) == []


def test_anything_else_is_found():
    for line in (
        "========= Error: Race reported between Write access at tz_sts32(unsigned, unsigned)+0x10 in kernel.cu:9",
        "=========     and Read access at tz_ldmatrix4(void *, const void *)+0x20 in kernel.cu:9 [4 hazards]",
        "=========     and Write access at tz_lds32(unsigned int)+0x20 in kernel.cu:9 [4 hazards]",
        "========= Invalid __shared__ read of size 4 bytes",
    ):
        assert unknown_findings(KNOWN + line) == [line]
