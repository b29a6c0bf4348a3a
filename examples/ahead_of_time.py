"""Compile kernels without a GPU, put them into a bundle, load it where there is no compiler.

python examples/ahead_of_time.py [sm_80 | sm_86 | sm_89 | sm_90a]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import terrazzo

N, K = 256, 512


def main(target: str = "sm_90a") -> None:
    requests = terrazzo.ops.w4a16.kernel_requests(
        N, K, group_size=128, symmetric=False, scale_dtype="float16", m=[1, 64], dtype="float16", target=target
    )
    with tempfile.TemporaryDirectory() as folder:
        for request, outcome in zip(requests, terrazzo.compile_many(requests)):
            if isinstance(outcome, terrazzo.errors.CompileError):
                raise outcome
            print("compiled", request)
        bundle = Path(folder) / "bundle"
        terrazzo.write_bundle(bundle, requests)
        # Another process, in which tilelang cannot be imported: the bundle is verified and its kernels are found.
        code = f"""
import sys
sys.modules["tilelang"] = None
import terrazzo
bundle = terrazzo.load_bundle({str(bundle)!r}, target={target!r})
for request, report in bundle.reports.items():
    print("loaded", request.name, report.registers, "registers,", ", ".join(report.tensor_instructions))
"""
        subprocess.run([sys.executable, "-c", code], check=True)


if __name__ == "__main__":
    main(*sys.argv[1:2])
