"""What compute-sanitizer's racecheck says about a ring stage that a bulk copy refills, though nothing races there.

Every lane of a warp reads the stage; behind a warp barrier one lane arrives at the mbarrier that the producer waits for
before it refills it. In W4A8 on e4m3, the one refilling program that it has watched so far, racecheck reports the reads
of the other 31 lanes. With a barrier of all 128 threads of the warpgroup between the reads and the arrive it reports
the same reads, as many times (compute-sanitizer of CUDA 13.0, H200): it does not follow them to the refill. On the CPU,
tests/ops/test_emulated_sanitizers.py has ThreadSanitizer watch the same programs.
"""

from __future__ import annotations

import re

_KNOWN = re.compile(
    r"=========( Error: Race reported between Write access at tz_bulk\(.*"
    r"|     and Read access at tz_lds(32|64|128)\(.*"
    r"| RACECHECK SUMMARY: .*| COMPUTE-SANITIZER| *)"
)


def unknown_findings(report: str) -> list[str]:
    """Lines of a report of racecheck that say anything else."""
    return [
        line for line in report.splitlines() if line.startswith("=========") and not _KNOWN.fullmatch(line.rstrip())
    ]
