"""First calls on a machine that has compiled nothing: one alone, 48 layers, one with a wheel.

    python -m benchmarks.cold_calls --commit SHA                 on a GPU; each case in a process and a cache of its own
    python -m benchmarks.cold_calls --compile-only --gpu nvidia/nvidia-h100     the same compilations without that GPU

Seconds count from the call until its result is there; importing torch, the CUDA context and packing come before it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import report

LAYERS, TOKENS = 48, 16
CASES = ("one", "one_small_batch", "one_1024", "many", "many_called", "many_called_small_batch", "wheel",
         "wheel_small_batch")  # fmt: skip
"""`many` are prepared in parallel; `many_called` are not, and called one after another, where stand-ins answer."""


def sizes(count: int = LAYERS) -> list[tuple[int, int]]:
    """Small weights of different sizes."""
    return [(512 + 128 * (i % 8), 1024 + 256 * (i // 8)) for i in range(count)]


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cold_calls", description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--compile-only", action="store_true", help="where there is no GPU: compile, launch nothing")
    parser.add_argument("--gpu", default="", help="a target's name, for --compile-only")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    if options.case:
        print(json.dumps(measure(options.case, options)))
        return 0
    return report.guarded("benchmarks.cold_calls", lambda: run(options))


def run(options: argparse.Namespace) -> int:
    start, rows = time.perf_counter(), []
    result: dict[str, Any] = {"cpus": len(os.sched_getaffinity(0)), "rows": rows}
    if not options.compile_only:
        from terrazzo.autotune.gemm_bench import header
        from terrazzo.lowering.targets import Target

        result |= header(Target.detect(), options.commit or None)
    result["tilelang_bytecode"] = has_bytecode()
    with tempfile.TemporaryDirectory() as scratch:
        name_version(Path(scratch))
        for case in options.cases.split(","):
            rows.append({"case": case, **_in_a_process(case, options, Path(scratch))})
            print(json.dumps(rows[-1]), flush=True)
            report.write(result, options.out, start)
    return int(any("failure" in row for row in rows))


def has_bytecode() -> bool:
    """Whether tilelang is imported from bytecode, as pip leaves it; its text takes two seconds more."""
    import importlib.util

    found = importlib.util.find_spec("tilelang")
    return found is not None and found.cached is not None and Path(found.cached).is_file()


def name_version(scratch: Path) -> None:
    """Give one to a checkout that only PYTHONPATH names: wheels ask for it."""
    import importlib.metadata

    import terrazzo

    try:
        importlib.metadata.version("terrazzo")
    except importlib.metadata.PackageNotFoundError:
        info = scratch / "version" / "terrazzo.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: terrazzo\nVersion: {terrazzo.__version__}\n", encoding="utf-8"
        )
        paths = [*filter(None, [os.environ.get("PYTHONPATH")]), str(info.parent)]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        sys.path.append(str(info.parent))


def _in_a_process(case: str, options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """What `measure` says in a fresh process with an empty cache; for wheels, with a wheel of the case's kernel."""
    environment = {**os.environ, "TERRAZZO_CACHE_DIR": str(scratch / case), "TERRAZZO_COMPILER": ""}
    environment |= {"TERRAZZO_BACKGROUND": "1"} if case.startswith("many_called") else {}
    if case.startswith("wheel"):
        kind = "one" + case.removeprefix("wheel")
        environment |= {"TERRAZZO_CACHE_DIR": str(scratch / kind), "COLD_CALLS_WHEEL": str(scratch / case)}
        made = _run(kind, options, environment)  # compiled by the case before; writes the wheel
        if "failure" in made:
            return made
        (file,) = (scratch / case).glob("*.whl")
        with zipfile.ZipFile(file) as archive:
            archive.extractall(scratch / case / "site")
        path = os.pathsep.join([str(scratch / case / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment |= {"PYTHONPATH": path, "TERRAZZO_CACHE_DIR": str(scratch / f"{case}_empty"), "PATH": "/nowhere"}
        environment |= {"CUDA_HOME": "/nowhere", "COLD_CALLS_WHEEL": ""}
        case = kind
    return _run(case, options, environment)


def _run(case: str, options: argparse.Namespace, environment: dict[str, str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.cold_calls", "--case", case, "--gpu", options.gpu]
    command += ["--compile-only"] * options.compile_only
    done = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", check=False)
    if done.returncode:
        return {"failure": (done.stdout + done.stderr)[-1500:]}
    return json.loads(done.stdout.splitlines()[-1])


def measure(case: str, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a case in this process."""
    import torch
    from terrazzo import nn, prepare
    from terrazzo.lowering.targets import Target
    from terrazzo.nn.preparing import kernel_requests

    device = "cpu" if options.compile_only else "cuda"
    target = Target.parse(options.gpu) if options.compile_only else None
    tokens = 1 if case.endswith("small_batch") else 1024 if case.endswith("1024") else TOKENS
    shapes = sizes() if case.startswith("many") else [(4096, 4096)]
    make = lambda n, k: nn.Linear.from_float(torch.randn(n, k, device=device), "w4a16-g128")
    layers = torch.nn.ModuleList(make(n, k) for n, k in shapes)
    inputs = [torch.randn(tokens, k, device=device, dtype=torch.float16) for _, k in shapes]
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    requests = kernel_requests(layers, tokens, target=target)
    if case == "many" or options.compile_only:
        if case == "many":
            prepare(layers, tokens, target=target, quiet=True)
        else:
            from terrazzo.lowering import replacing
            from terrazzo.lowering.kernels import get_kernel
            from terrazzo.ops.weight_only.op import stand_in

            stands = not replacing.off()
            for answers in dict.fromkeys((stands and stand_in(request)) or request for request in requests):
                get_kernel(answers)
    prepared = time.perf_counter() - start
    if device == "cuda":
        for layer, x in zip(layers, inputs):
            layer(x)
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    found = {"seconds": round(seconds, 2), "prepared": round(prepared, 2), "layers": len(layers)}
    if folder := os.environ.get("COLD_CALLS_WHEEL"):
        from terrazzo.lowering.wheel_file import write_wheel

        write_wheel(folder, requests)
    return found | {"kernels": len(requests), "tokens": tokens}


if __name__ == "__main__":
    sys.exit(main())
