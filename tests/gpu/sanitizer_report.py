"""What compute-sanitizer's racecheck says about a ring stage that a bulk copy refills, though nothing races there.

Every lane of a warp reads the stage; behind a warp barrier one lane arrives at the mbarrier that the producer waits for
before it refills it. racecheck (CUDA 13.0, H200) then reports the reads of the other 31 lanes, in W4A16, W4A8 and W4Ax.
It does so even with a barrier of all 128 threads between the reads and the arrive, in W4A8 on e4m3 as in the fifty
lines of refilled_ring.cu, and not if every thread arrives: it follows nobody else to the refill. test_sanitizer.py
watches that this is still so.
On the CPU, tests/ops/test_emulated_sanitizers.py has ThreadSanitizer watch the same programs.
"""

from __future__ import annotations

import re

_ACCESS = r"(Write access at tz_bulk\(|Read access at tz_lds(32|64|128)\().*"
_KNOWN = re.compile(
    rf"=========( Error: Race reported between {_ACCESS}|     and {_ACCESS}"
    r"| RACECHECK SUMMARY: .*| COMPUTE-SANITIZER| *)"
)


def unknown_findings(report: str) -> list[str]:
    """Lines of a report of racecheck that say anything else."""
    return [
        line for line in report.splitlines() if line.startswith("=========") and not _KNOWN.fullmatch(line.rstrip())
    ]
