"""Schedules of W4A8's activation quantizer beside each other, on activations that are not in the L2 cache.

    python -m benchmarks.w4a8_quantizer                    every candidate, M = 1024, all forms and K
    python -m benchmarks.w4a8_quantizer --m 1024,4096 --k 28672 --forms smooth,norm
    python -m benchmarks.w4a8_quantizer --k 28672 --schedule warps=28,vectors=4,resident=896,persistent=1,later=16
    python -m benchmarks.w4a8_quantizer --count            only say how many kernels the other arguments ask for

The first line of a problem is what `schedules/quantize_rows.choose` takes. Codes and sums are compared with the
reference's to the bit before a time counts. Shares are of the copy bandwidth; x read, codes, scales and sums written.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from terrazzo.lowering.targets import Target
from terrazzo.schedules.quantize_rows import QuantizeRows, candidates, choose

from benchmarks.gemm import compile_all
from benchmarks.w4a8 import DEVICE, FORMS, QUANTIZER_KS

Problem = tuple[int, int, str]
"""M, K, form."""


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.w4a8_quantizer", description=__doc__.splitlines()[0])
    numbers = lambda text: tuple(int(number) for number in text.split(","))
    parser.add_argument("--m", type=numbers, default=(1024,), help="comma-separated numbers of tokens")
    parser.add_argument("--k", type=numbers, default=QUANTIZER_KS, help="comma-separated row lengths")
    parser.add_argument("--forms", default=",".join(FORMS), help=f"comma-separated, of {', '.join(FORMS)}")
    parser.add_argument("--schedule", action="append", type=parse, help="fields of QuantizeRows instead of candidates")
    parser.add_argument("--dtype", default="float16", choices=("float16", "bfloat16"))
    parser.add_argument("--budget-ms", type=float, default=15.0, help="GPU time of one measurement")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--count", action="store_true", help="only say how many kernels would be compiled; no GPU")
    options = parser.parse_args(argv)
    options.forms = tuple(options.forms.split(","))
    if not set(options.forms) <= set(FORMS):
        parser.error(f"--forms {','.join(options.forms)}: known are {', '.join(FORMS)}")
    return options


def parse(text: str) -> QuantizeRows:
    """`warps=28,vectors=4` as a schedule; rows is 1 unless given, `persistent` is 0 or 1."""
    given = {"rows": 1} | {name: int(value) for name, value in (part.split("=") for part in text.split(","))}
    flags = {"persistent": bool(given["persistent"])} if "persistent" in given else {}
    try:
        return QuantizeRows(**(given | flags))
    except TypeError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from error


def problems(options: argparse.Namespace, target: Target) -> list[tuple[Problem, list[QuantizeRows]]]:
    """Each problem with its schedules, the one in use first."""
    found = []
    for k in options.k:
        for m in options.m:
            for form in options.forms:
                gain = FORMS[form][0]
                own = [choose(k, target, m, gain), *options.schedule] if options.schedule else None
                found.append(((m, k, form), list(dict.fromkeys(own or candidates(k, target, m, gain)))))
    return found


def request(problem: Problem, schedule: QuantizeRows, dtype: str, target: Target) -> Any:
    from terrazzo.ops.w4a8 import activations

    m, k, form = problem
    gain, norm = FORMS[form]
    return activations.plan(m, k, dtype=dtype, gain=gain, norm=norm, target=target, schedule=schedule)


def words(schedule: QuantizeRows) -> str:
    """The schedule as --schedule takes it."""
    return ",".join(f"{name}={int(value)}" for name, value in asdict(schedule).items() if value)


def time_problem(
    problem: Problem, schedules: list[QuantizeRows], options: argparse.Namespace, target: Target, copy_gb_s: float
) -> list[dict[str, Any]]:
    """A row of each schedule: us and share, or failure."""
    import torch
    from terrazzo.autotune import measure
    from terrazzo.lowering.errors import TerrazzoError
    from terrazzo.lowering.kernels import get_kernel
    from terrazzo.ops.w4a8 import activations, reference

    m, k, form = problem
    nbytes, vector = m * (3 * k + 8), torch.rand(k, device=DEVICE) + 0.5
    smooth, weight = (vector if form == name else None for name in ("smooth", "norm"))
    gain = reference.activation_gain(smooth, weight) if FORMS[form][0] else vector[:1]
    xs = [
        torch.randn(m, k, device=DEVICE, dtype=getattr(torch, options.dtype))
        for _ in range(measure.copies_beyond_l2(nbytes, target.l2_bytes))
    ]
    outs = [activations.empty((m, k), xs[0].device, "int8") for _ in xs]
    q, _, sums = reference.quantize_activations(xs[0], smooth, weight, 1e-6)
    rows = []
    for schedule in schedules:
        row = {"m": m, "k": k, "form": form, "schedule": asdict(schedule), "us": None, "share": None}
        try:
            kernel = get_kernel(request(problem, schedule, options.dtype, target))
            calls = [
                lambda x=x, o=o, run=kernel: run(x, gain, o.q, o.scales, o.row_sums, 1e-6, float(k))
                for x, o in zip(xs, outs)
            ]
            outs[0].q.fill_(99), outs[0].row_sums.fill_(99)
            calls[0]()
            if torch.equal(outs[0].q[:, :k], q) and torch.equal(outs[0].row_sums, sums):
                us = measure.time_calls(calls, options.budget_ms).us
                row |= {"us": round(us, 3), "share": round(nbytes / us / 1e3 / copy_gb_s, 4)}
            else:
                row["failure"] = "codes or sums differ from the reference's"
        except TerrazzoError as error:
            row["failure"] = str(error).splitlines()[0]
        said = f"{row['us']:8.2f} us {row['share']:4.0%}" if row["us"] else f"FAILED: {row['failure']}"
        print(f"K {k:6} M {m:6} {form:6} {said}  {words(schedule)}", flush=True)
        rows.append(row)
    return rows


def main(argv: list[str] | None = None) -> int:
    options = arguments(argv)
    if options.count:
        target = Target.parse("sm_90a")
        found = {request(p, s, options.dtype, target) for p, all_ in problems(options, target) for s in all_}
        print(f"{len(found)} kernels for sm_90a")
        return 0
    from terrazzo.autotune import measure

    target = Target.detect()
    found = problems(options, target)
    compile_all([request(problem, s, options.dtype, target) for problem, schedules in found for s in schedules])
    copy = measure.copy_bandwidth()
    print(f"{copy:.0f} GB/s copied")
    rows, best = [], []
    for problem, schedules in found:
        timed = time_problem(problem, schedules, options, target, copy)
        rows += timed
        right = [row for row in timed if row["us"]]
        if right:
            best.append((timed[0], min(right, key=lambda row: row["us"])))
    for now, fastest in best:
        place = f"K {fastest['k']:6} M {fastest['m']:6} {fastest['form']:6}"
        before = f"{now['share']:4.0%}" if now["us"] else "wrong"
        print(f"best: {place} {before} -> {fastest['share']:4.0%}  {words(QuantizeRows(**fastest['schedule']))}")
    if options.out:
        options.out.write_text(
            json.dumps({"copy_gb_s": round(copy, 1), "rows": rows}, indent=1) + "\n", encoding="utf-8"
        )
    return 1 if any("failure" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
