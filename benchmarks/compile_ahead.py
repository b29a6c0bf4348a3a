"""Compiles the kernels of a benchmark and stops where it would launch the first; the GPU is only asked for its name.

python -m benchmarks.compile_ahead attention --quick           the benchmark's name and arguments
python -m benchmarks.compile_ahead --gpu nvidia/nvidia-h200 linear --compile-only --formats w4a16
                                                               on a machine without a GPU (pretended_gpu.py)
python -m benchmarks.compile_ahead --write DIR attention       and writes them as a bundle, too
python -m benchmarks.compile_ahead --use DIR attention         runs the benchmark on that bundle; nothing is compiled
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

from terrazzo.lowering import bundle, parallel
from terrazzo.lowering.errors import TargetError


class _Compiled(BaseException):
    """Ends the benchmark; no `except Exception` of its own holds it."""


def main(argv: list[str] | None = None) -> int:
    given = sys.argv[1:] if argv is None else argv
    if given[:1] in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    options: dict[str, str] = {}
    while given[:1] and given[0] in ("--gpu", "--write", "--use"):
        options[given[0]], given = "".join(given[1:2]), given[2:]
    if "--gpu" in options:
        from benchmarks.pretended_gpu import pretend

        try:
            pretend(options["--gpu"])
        except TargetError as error:
            print(error, file=sys.stderr)
            return 2
    if not given:
        print(__doc__, file=sys.stderr)
        return 2
    name, *rest = given
    original, failed = parallel.compile_many, []

    def and_stop(requests: Any, *args: Any, **more: Any) -> None:
        outcomes = original(requests, *args, **more)
        failed.extend(out for out in outcomes if isinstance(out, Exception))
        print(f"{len(set(requests))} kernels, {len(failed)} failed")
        if "--write" in options and not failed:
            bundle.write_bundle(options["--write"], list(dict.fromkeys(requests)), replace=True)
        raise _Compiled

    if "--use" in options:
        bundle.load_bundle(options["--use"], strict=True)
    parallel.compile_many = (lambda *args, **more: []) if "--use" in options else and_stop
    try:
        known = name.isidentifier() and importlib.util.find_spec(f"benchmarks.{name}")
        module = importlib.import_module(f"benchmarks.{name}") if known else None
        if not hasattr(module, "main"):
            print(f"{name}: no benchmark of this name; name a module of benchmarks/, as attention", file=sys.stderr)
            return 2
        code = module.main(rest)
        if "--use" in options:
            return code
    except _Compiled:
        return 1 if failed else 0
    finally:
        parallel.compile_many = original
    print(f"benchmarks.{name} ended with {code} before it compiled anything", file=sys.stderr)
    return code or 1


if __name__ == "__main__":
    sys.exit(main())
