"""MXFP4, NVFP4, FP8 and INT8 weights with bfloat16 activations, beside int4 symmetric of groups of 32 and cuBLAS bf16.

    python -m benchmarks.weight_only                 three layers of LLaMA-3-8B; writes results/weight_only_<gpu>.json
    python -m benchmarks.weight_only --m 1,64 --out result.json --formats mxfp4

Each row is one format; the others that ran beside it are its peers. Every output is compared with a float64 product of
the same weight before its time counts.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

from benchmarks import program, report

FORMATS = {
    "mxfp4": 32, "nvfp4": 16, "w8a16": 0, "w8a16_g128": 128, "fp8": 0, "fp8_block": 128, "fp8_block_folded": 128,
}  # fmt: skip
"""Name in rows -> k of a scale, 0 for one of the row. Scales of FP8 are float32, of folded ones and of INT8 in the
activations' dtype."""
E2M1 = ("mxfp4", "nvfp4")
INT4, CUBLAS = "w4a16_symmetric_g32", "cublas_bf16"
ROWS = 48  # of y that are compared


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = program.parser("weight_only", __doc__, 10.0, "compile-only")
    parser.add_argument("--dtype", default="bfloat16", choices=("float16", "bfloat16"))
    return program.layers(parser, tuple(FORMATS), argv)


def requests_of(name: str, n: int, k: int, ms: tuple[int, ...], dtype: str, target: Any) -> list[Any]:
    from terrazzo.ops import fp8, mxfp4, nvfp4, w4a16, w8a16

    facts = dict(m=ms, dtype=dtype, target=target)
    if name == INT4:
        return w4a16.kernel_requests(n, k, group_size=32, symmetric=True, scale_dtype=dtype, **facts)
    if name in E2M1:
        return {"mxfp4": mxfp4, "nvfp4": nvfp4}[name].kernel_requests(n, k, **facts)
    if name.startswith("w8a16"):
        return w8a16.kernel_requests(n, k, group_size=FORMATS[name] or k, scale_dtype=dtype, **facts)
    facts |= {"scale_dtype": dtype} if name.endswith("folded") else {}
    return fp8.kernel_requests(n, k, group_size=FORMATS[name] or k, **facts)


def weight_of(name: str, n: int, k: int, dtype: Any, random: Any) -> Any:
    """A canonical weight of uniform codes, on the GPU."""
    import torch
    from terrazzo.ops import w8a16
    from terrazzo.ops.w4a16 import QuantizedWeight as Integers
    from terrazzo.ops.weight_only.format import QuantizedWeight as Floats

    on = dict(generator=random, device="cuda")
    most = 16 if name in (*E2M1, INT4) else 256 if name.startswith("w8a16") else 127
    codes = torch.randint(0, most, (n, k), **on, dtype=torch.uint8)
    if name == "mxfp4":
        scales = torch.randint(116, 122, (n, -(-k // 32)), **on, dtype=torch.uint8)
        return Floats.canonical(codes, scales, weight="mxfp4", group_size=32)
    if name == INT4:
        scales = torch.exp(0.3 * torch.randn(n, -(-k // 32), **on) - 4.5).to(dtype)
        return Integers.canonical(codes, scales, None, group_size=32)
    if name == "nvfp4":
        scales = torch.randint(64, 112, (n, -(-k // 16)), **on, dtype=torch.uint8)
        factors = 1e-4 * torch.exp(0.3 * torch.randn(n, **on))
        return Floats.canonical(codes, scales, weight="nvfp4", group_size=16, factors=factors)
    group = FORMATS[name] or k
    if name.startswith("w8a16"):
        scales = torch.exp(0.3 * torch.randn(n, -(-k // group), **on) - 7.3).to(dtype)
        return w8a16.QuantizedWeight.canonical(codes, scales, None, group_size=group)
    codes |= torch.randint(0, 2, (n, k), **on, dtype=torch.uint8) << 7
    scales = 1e-4 * torch.exp(0.3 * torch.randn(n, -(-k // group), **on))
    scales = scales.to(dtype) if name.endswith("folded") else scales
    return Floats.canonical(codes, scales, weight="fp8", group_size=group)


class Layer:
    """One [n, k] weight in each form, as many times as L2 cannot hold."""

    def __init__(self, n: int, k: int, options: argparse.Namespace, target: Any) -> None:
        import torch
        from terrazzo.autotune import measure

        self.n, self.k, self.options, self.target = n, k, options, target
        self.dtype, self.random = getattr(torch, options.dtype), torch.Generator("cuda").manual_seed(1)
        copies = lambda nbytes: range(measure.copies_beyond_l2(nbytes, target.l2_bytes))
        self.weights, self.packed = {}, {}
        for name in (*options.formats, INT4):
            self.weights[name] = weight = weight_of(name, n, k, self.dtype, self.random)
            packed = weight.pack()
            again = lambda w: dataclasses.replace(w, words=w.words.clone(), params=w.params.clone())
            self.packed[name] = [packed, *(again(packed) for _ in copies(packed.nbytes)[1:])]
        dense = torch.randn(n, k, generator=self.random, device="cuda", dtype=self.dtype)
        self.dense = [dense, *(dense.clone() for _ in copies(2 * n * k)[1:])]

    def wrong(self, name: str, m: int, x: Any, y: Any) -> str:
        """Why an output is wrong, or ""."""
        import torch
        from terrazzo.autotune import measure
        from terrazzo.ops.w4a16 import reference as integers
        from terrazzo.ops.weight_only import reference

        if bool(y.isnan().any()):
            return "NaN in the output"
        weight, rows = self.weights[name], torch.arange(m, device="cuda")[:: max(1, m // ROWS)]
        (request,) = requests_of(name, self.n, self.k, (m,), self.options.dtype, self.target)
        numerics, bound = (
            dict(request.params)["numerics"],
            (integers if name == INT4 or name.startswith("w8a16") else reference).forward_error_bound,
        )
        return measure.check_outputs(
            y[rows], reference.gemm(x[rows], weight, numerics), bound(x[rows], weight, numerics)
        )

    def rows(self, m: int) -> list[dict[str, Any]]:
        import torch
        from terrazzo.autotune import measure
        from terrazzo.autotune.gemm_bench import schedule_text
        from terrazzo.ops import w4a16  # one gemm serves all these formats

        x = torch.randn(m, self.k, generator=self.random, device="cuda", dtype=self.dtype)
        outs, failures, candidates = {}, {}, {}
        for name, packed in self.packed.items():
            outs[name] = y = measure.poisoned((m, self.n), self.dtype, "cuda")
            w4a16.gemm(x, packed[0], out=y)
            failures[name] = self.wrong(name, m, x, y)
            candidates[name] = [lambda w=w, y=y: w4a16.gemm(x, w, out=y) for w in packed]
        y = torch.empty(m, self.n, dtype=self.dtype, device="cuda")
        candidates[CUBLAS] = [lambda w=w: torch.mm(x, w.T, out=y) for w in self.dense]
        times = measure.time_in_turn(candidates, self.options.budget_ms)
        us = {name: round(timing.us, 3) for name, timing in times.items()}
        found = []
        for name in self.options.formats:
            requests = requests_of(name, self.n, self.k, (m,), self.options.dtype, self.target)
            operator = name.partition("_")[0]
            row = {
                "op": operator, "format": name, "dtype": self.options.dtype, "group": FORMATS[name] or self.k, "m": m,
                "n": self.n, "k": self.k, "us": us[name], "spread": round(times[name].spread, 4),
                "bytes": self.packed[name][0].nbytes, "peers": {peer: us[peer] for peer in (CUBLAS, INT4)},
                "schedule": schedule_text(requests),
            }  # fmt: skip
            if failures[name]:
                row |= {"us": None, "failure": failures[name]}
            found.append(row)
        return found


def show(row: dict[str, Any]) -> None:
    us, peers = row["us"], row["peers"]
    said = f"{us:9.2f} us  {peers[CUBLAS] / us:5.2f}x cuBLAS  {us / peers[INT4]:5.3f} of int4" if us else row["failure"]
    print(f"({row['n']:5}, {row['k']:5}) M {row['m']:5} {row['format']:10} {said}  {row['schedule']}", flush=True)


def rows_of(options: argparse.Namespace, target: Any) -> Iterator[list[dict[str, Any]]]:
    """Rows of each layer and number of tokens."""
    for n, k in options.shapes:
        layer = Layer(n, k, options, target)
        for m in options.m:
            rows = layer.rows(m)
            for row in rows:
                show(row)
            yield rows
        del layer


def run(options: argparse.Namespace) -> int:
    from terrazzo.lowering.targets import Target

    target, names = Target.detect(), (*options.formats, INT4)
    facts = (options.m, options.dtype, target)
    wanted = [r for n, k in options.shapes for f in names for r in requests_of(f, n, k, *facts)]
    rows = lambda o, result: rows_of(o, target)
    return program.run("weight_only", options, target, rows, wanted, copies=False)


def main(argv: list[str] | None = None) -> int:
    options = arguments(argv)
    return report.guarded("benchmarks.weight_only", lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
