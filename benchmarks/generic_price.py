"""The price of kernels without shapes: those whose n and k come with the launch, beside those made for [n, k].

    python -m benchmarks.generic_price --compile-only          their kernels, in parallel; `--gpu`: for another machine
    python -m benchmarks.generic_price --commit SHA            times, on a GPU
    python -m benchmarks.generic_price --op fp8-gK,w8a16 ...   of other formats, as `nn.Linear` names them

Both kernels of a pair have the same schedule, that of the operator's choice, and take turns. Each output of a generic
kernel is compared with the special kernel's, bit by bit, on poisoned memory. A row: `us` of the special kernel,
`peers["generic"]`, `ratio` of the two, and `control`: the special kernel, timed beside itself.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import report

SHAPES = (
    (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336),  # Llama 3 8B
    (10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672),  # Llama 3 70B
    (4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944),  # Qwen 2.5 7B
)  # fmt: skip
TOKENS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 2048)
GROUP = 128
PACKED = ("w4a16", "w4a8", "w4a8_fp8")
"""Operators whose weights are random words; those of other formats are quantized."""
BYTES = {"w8a8": ("int8", False), "w8a8-e4m3": ("e4m3", False), "w8a8-e4m3-g128": ("e4m3", True)}
"""Formats of W8A8 -> their codes, and whether these have scales of blocks."""


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.generic_price", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--op", default="w4a16", help="comma-separated: w4a16, w4a8, w4a8_fp8, or formats of 16-bit x or W8A8"
    )
    parser.add_argument("--m", help="comma-separated numbers of tokens")
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="how many of the shapes")
    parser.add_argument("--budget-ms", type=float, default=20.0, help="GPU time of one measurement")
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--gpu", help="a target's name, for --compile-only without that GPU")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="of the sources, where git cannot tell")
    from terrazzo.nn.formats import Format

    options = parser.parse_args(argv)
    options.op = options.op.split(",")
    for name in options.op:
        if name not in (*PACKED, *BYTES) and not Format.parse(name).product.wide:
            parser.error(f"--op: {name} is no format of 16-bit activations, and none of {', '.join(BYTES)}")
    options.m = tuple(int(m) for m in options.m.split(",")) if options.m else TOKENS
    return options


def pairs(options: argparse.Namespace, target: Any) -> Iterator[tuple[str, int, int, int, Any, Any]]:
    """(operator, n, k, m, plan, request of the generic kernel)."""
    for operator, (n, k), m in product(options.op, SHAPES[: options.shapes], options.m):
        plan = _plan(operator, m, n, k, target)
        if plan.stand_in is not None:
            yield operator, n, k, m, plan, plan.stand_in
        elif dict(plan.request.params)["n"] == 0:
            yield operator, n, k, m, replace(plan, request=special(plan.request, n, k)), plan.request


def _plan(operator: str, m: int, n: int, k: int, target: Any) -> Any:
    """What the operator launches."""
    from terrazzo.ops.call import plans

    if operator in BYTES:
        from terrazzo.ops.w4a8.w8a8 import op as w8a8_op

        numerics = w8a8_op.numerics_of(*BYTES[operator], False, "auto")
        return plans.plan(m, w8a8_op.Facts(n, k, numerics=numerics, out_dtype="float16"), target, target)
    if not operator.startswith("w4a8"):
        from terrazzo.nn.formats import Format
        from terrazzo.ops.weight_only import op

        form = Format.parse(operator)
        codes = form.product.codes
        scale = "float16" if codes.symmetric else codes.scales[0]
        group = GROUP if operator == "w4a16" else form.group_size or k
        symmetric = not codes.symmetric or form.symmetric
        facts = dict(symmetric=symmetric, scale_dtype=scale, dtype="float16", group_size=group, weight=codes.name)
        return plans.plan(m, op.Facts(n, k, **facts), target, target)
    from terrazzo.ops.w4a8 import op as bytes_op

    form = "e4m3" if operator == "w4a8_fp8" else "auto"
    product = bytes_op.Facts(n, k, group_size=GROUP, out_dtype="float16", dequantization=form)
    return plans.plan(m, product, target, target)


def special(request: Any, n: int, k: int) -> Any:
    """The same schedule's kernel for [n, k]."""
    params = {**dict(request.params), "n": n, "k": k}
    params.pop("whole", None)
    return replace(request, params=tuple(params.items()))


def packed(operator: str, n: int, k: int, copies: int) -> list[tuple[Any, Any]]:
    """Words and parameters of weights with random codes, scales around one and zero points; W4A8's, whose words have
    their parameters, with channel scales. Of other formats copies of one."""
    import torch

    if operator not in PACKED:
        from terrazzo.nn.formats import Format

        made = Format.parse(operator).quantize(torch.randn(n, k, device="cuda").mul_(k**-0.5).half())
        if operator in BYTES:
            scales = made.scales if made.block else made.scales.view(-1)
            return [(made.words.clone(), scales.clone()) for _ in range(copies)]
        return [(made.words.clone(), made.params.clone()) for _ in range(copies)]
    if operator != "w4a16":
        units = k // 128, -(-n // 64), 1024 + 128 // GROUP * 32
        # float16 factors of e4m3 are numbers whatever their bits, but for exponents that the mask takes away
        mask = 0x3BFF3BFF if operator == "w4a8_fp8" else -1
        words = [torch.randint(-(2**31), 2**31 - 1, units, dtype=torch.int32, device="cuda") for _ in range(copies)]
        for each in words:
            each[..., 1024:] &= mask
        return [(each, torch.rand(units[1] * 64, device="cuda") * 1e-3) for each in words]

    made = []
    blocks, groups = -(-n // 64), k // GROUP
    for _ in range(copies):
        words = torch.randint(-(2**31), 2**31 - 1, (k // 64, blocks, 512), dtype=torch.int32, device="cuda")
        scales = (torch.rand(groups, blocks, 64, device="cuda") + 0.5).mul_(k**-0.5).half().view(torch.uint8)
        zeros = torch.randint(0, 16, (groups, blocks, 64), dtype=torch.uint8, device="cuda")
        made.append((words, torch.cat([scales, zeros], -1).contiguous()))
    return made


def code(kernel: Any) -> dict[str, int]:
    """What the compiler made of a kernel."""
    report = kernel.report
    spilled = report.spill_stores + report.spill_loads
    return {"registers": report.registers, "spilled": spilled, "instructions": sum(report.instructions.values())}


def activations(operator: str, m: int, k: int) -> tuple[Any, tuple, Any]:
    """Random x; what a kernel takes between weights and bias; the stand-in for no bias."""
    import torch

    x = torch.randn(m, k, device="cuda")
    if not operator.startswith("w4a8") and operator not in BYTES:
        return x.half(), (), torch.zeros(1, device="cuda").half()
    codes, block = BYTES.get(operator, ("e4m3" if operator == "w4a8_fp8" else "int8", False))
    e4m3 = codes == "e4m3"
    x = x.to(torch.float8_e4m3fn).view(torch.int8) if e4m3 else (x * 30).clamp(-127, 127).to(torch.int8)
    scales = torch.rand(-(-k // 128), -(-m // 4) * 4, device="cuda") if block else torch.rand(m, device="cuda")
    no_sums = e4m3 or operator in BYTES
    sums = torch.zeros(1, device="cuda") if no_sums else x.sum(1)
    return x, (scales, sums.int()), torch.zeros(1, device="cuda")


def row(operator: str, n: int, k: int, m: int, plan: Any, other: Any, weights: list, budget: float) -> dict[str, Any]:
    import torch
    from terrazzo.autotune import measure
    from terrazzo.lowering.kernels import get_kernel

    x, more, bias = activations(operator, m, k)
    integer = operator in ("w4a8", "w8a8")
    space = torch.empty(plan.workspace, dtype=torch.int32 if integer else torch.float32, device="cuda")
    semaphores = torch.zeros(plan.semaphores, dtype=torch.int32, device="cuda")
    kernels = {"special": get_kernel(plan.request), "generic": get_kernel(other)}
    kernels["control"] = kernels["special"]
    outputs = {name: torch.full((m, n), float("nan"), device="cuda").half() for name in kernels}

    def calls(name: str) -> list:
        kernel, y = kernels[name], outputs[name]
        return [lambda w=w, p=p: kernel(x, w, p, *more, bias, space, semaphores, y, *plan.scalars) for w, p in weights]

    for name in kernels:
        calls(name)[0]()
    torch.cuda.synchronize()
    failure = "" if torch.equal(outputs["special"], outputs["generic"]) else "bits differ from the special kernel's"
    times = measure.time_in_turn({name: calls(name) for name in kernels}, budget)
    for found in times.values():
        if isinstance(found, Exception):
            raise found
    params = dict(plan.request.params)
    schedule = {x: v for x, v in params.items() if x in ("block_tokens", "warpgroups", "row_blocks", "stages",
        "stage_k", "cluster", "per_sm", "form", "token_tiles", "kc", "nc", "warps", "chunk", "tokens")}  # fmt: skip
    special, ours = times["special"], times["generic"]
    del kernels["control"]
    return {
        "op": operator, "format": params.get("weight", "u4"), "dtype": "float16", "group": params["group"],
        "m": m, "n": n, "k": k, "model": "",
        "program": plan.request.name.rpartition(".")[2], "us": round(special.us, 3), "spread": round(special.spread, 4),
        "bytes": sum(t.nbytes for t in weights[0]), "peers": {"generic": round(ours.us, 3)},
        "generic_spread": round(ours.spread, 4), "ratio": round(ours.us / special.us, 4),
        "control": round(times["control"].us / special.us, 4), "schedule": schedule,
        "code": {name: code(kernel) for name, kernel in kernels.items()}, **({"failure": failure} if failure else {}),
    }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    options = arguments(argv)
    return report.guarded("benchmarks.generic_price", lambda: run(options))


def run(options: argparse.Namespace) -> int:
    from terrazzo.lowering.errors import CompileError
    from terrazzo.lowering.targets import Target

    from benchmarks.program import compile_all

    if options.gpu:
        from benchmarks.pretended_gpu import pretend

        pretend(options.gpu)
    start, target = time.perf_counter(), Target.detect()
    every = list(pairs(options, target))
    special, others = {plan.request for *_, plan, _ in every}, {other for *_, other in every}
    print(f"{len(every)} pairs, {len(special)} special kernels, {len(others)} generic ones", flush=True)
    outcomes = compile_all([*special, *others])
    for outcome in outcomes:
        if isinstance(outcome, CompileError):
            print(outcome, file=sys.stderr)
    if options.compile_only:
        return int(any(isinstance(outcome, CompileError) for outcome in outcomes))
    import torch
    from terrazzo.autotune import measure
    from terrazzo.autotune.gemm_bench import header, require_gpu

    require_gpu()
    result = header(target, options.commit)
    result["rows"] = rows = []
    shape, weights = None, []
    for operator, n, k, m, plan, other in every:
        if (operator, n, k) != shape:
            weights.clear()
            torch.cuda.empty_cache()
            shape, l2 = (operator, n, k), torch.cuda.get_device_properties(0).L2_cache_size
            weights.extend(packed(operator, n, k, measure.copies_beyond_l2(n * k // 2, l2)))
        rows.append(row(operator, n, k, m, plan, other, weights, options.budget_ms))
        print(json.dumps({x: rows[-1][x] for x in ("op", "program", "n", "k", "m", "us", "ratio")}), flush=True)
        report.write(result, options.out, start)
    for line in summary(rows):
        print(line)
    return report.conclude(result)


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """Geometric mean and worst ratio by operator, program and M."""
    lines = []
    for operator, program in sorted({(row["op"], row["program"]) for row in rows}):
        own = [row for row in rows if (row["op"], row["program"]) == (operator, program)]
        for m in (*sorted({row["m"] for row in own}), None):
            ratios = [row["ratio"] for row in own if m in (None, row["m"])]
            control = report.geomean(row["control"] for row in own if m in (None, row["m"]))
            mean, worst, count = report.geomean(ratios), max(ratios), len(ratios)
            words = f"mean {mean:.4f}, worst {worst:.4f}, special beside itself {control:.4f}"
            lines.append(f"{operator:9} {program:12} M {m or 'all':>5}: {count:3} pairs, {words}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
