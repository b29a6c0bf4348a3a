"""W8A8 beside torch's own 8-bit products and cuBLAS bf16: quantized activations, and rows that count the quantizer in.

    python -m benchmarks.w8a8                        three layers of LLaMA-3-8B; writes results/w8a8_<gpu>.json
    python -m benchmarks.w8a8 --m 1,64 --out result.json --formats int8,fp8 --tiles 6

A row is one format at one M. `peers` are torch._int_mm (no scales applied), torch._scaled_mm by tensor and by row,
cuBLAS bf16 and, with fp8_block, the products of peers/blocks.py; all ran in the same turns. `variants` are
`with_quantizer` and, with --tiles, the cheapest other tiles. Every output of ours, and of products with blocks, is
compared with a float64 product of the same operands before its time counts.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

from benchmarks import program, report
from benchmarks.peers import blocks as block_peers

FORMATS = {
    "int8": dict(codes="int8"),
    "int8_asymmetric": dict(codes="int8", asymmetric=True),
    "fp8": dict(codes="e4m3"),
    "fp8_fast": dict(codes="e4m3"),
    "fp8_block": dict(codes="e4m3", granularity="block"),
}
"""Name in rows -> how a float weight is quantized. Sums of fp8 are promoted each 128 k, those of fp8_fast are not."""
ROWS = 48  # of y that are compared
RASTERS = (1, 8)
"""Of the tiles that are timed as variants: tokens walk together over the rows one block at a time, or eight."""


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = program.parser("w8a8", __doc__, 10.0, "compile-only")
    tiles = "so many of the cheapest tiles, or those named as 256x2x1,128x2x2, are timed as variants, in all ways"
    parser.add_argument("--tiles", default="0", help=tiles)
    parser.add_argument("--experts", type=int, default=0, help="so many, of M tokens each, are timed as a variant")

    def own(o: argparse.Namespace) -> None:
        o.tiles = tuple(tuple(map(int, tile.split("x"))) for tile in o.tiles.split(","))
        if {len(tile) for tile in o.tiles} != {3} and not (len(o.tiles) == len(o.tiles[0]) == 1):
            parser.error("--tiles: a number, or tokens x warpgroups x row blocks of each")

    return program.layers(parser, tuple(FORMATS), argv, own)


def accumulate_of(name: str) -> str:
    return "fast" if name == "fp8_fast" else "auto"


def numerics_of(name: str) -> str:
    from terrazzo.ops.w4a8.w8a8 import op

    block, zeros = name == "fp8_block", name == "int8_asymmetric"
    return op.numerics_of(FORMATS[name]["codes"], block, zeros, accumulate_of(name))


def plans_of(name: str, n: int, k: int, m: int, target: Any, tiles: tuple = ((0,),)) -> dict[str, Any]:
    """Name of a tile -> its plan: the chosen one first, then those of `--tiles`."""
    from terrazzo.ops.call import plans
    from terrazzo.ops.w4a8.w8a8 import op
    from terrazzo.schedules import linear_spaces

    numerics = numerics_of(name)
    product = op.Facts(n, k, numerics=numerics, out_dtype="bfloat16")
    space = linear_spaces.of(product.gemm())
    found = {"chosen": plans.plan(m, product, target)}
    legal = [(p, s) for p, s in space.every(target, m) if p != "multistage" and not space.refusal(p, s, target, m)]
    best: dict[tuple, list] = {}
    for p, s in sorted(legal, key=lambda it: space.cost(*it, target, m)):
        best.setdefault((*s.tile, s.cluster, p), []).append(s)
    wanted = list(best)[: tiles[0][0]] if len(tiles[0]) == 1 else [it for it in best if it[:3] in tiles]
    for p, s in ((tile[-1], s) for tile in wanted for s in best[tile] if s.raster in RASTERS):
        plan = plans.plan(m, product, target, chosen=(p, s))
        if plan != found["chosen"]:
            name = {"stream_k": "tile", "direct_tokens": "tokens"}[p]
            found[f"{name}_{s.block_tokens}x{s.warpgroups}x{s.row_blocks}_c{s.cluster}_r{s.raster}"] = plan
    return found


def quantizer_of(name: str, k: int, m: int, target: Any) -> Any:
    from terrazzo.ops.w4a8.w8a8 import activations

    form = {"fp8_block": "e4m3_block128", "int8_asymmetric": "int8_asymmetric"}.get(name, "")
    facts = dict(dtype="bfloat16", gain=False, target=target)
    if form:
        return activations.plan(m, k, form=form, **facts)
    return activations.dynamic(m, k, codes=FORMATS[name]["codes"], **facts)


def experts_of(name: str, n: int, k: int, m: int, experts: int, target: Any) -> Any:
    """The kernel of experts with m tokens each."""
    from terrazzo.ops.call import plans
    from terrazzo.ops.w4a8.w8a8 import op

    product = op.Facts(n, k, numerics=numerics_of(name), out_dtype="bfloat16", experts=experts)
    return plans.plan(m * experts, product, target).request


def requests_of(options: argparse.Namespace, target: Any) -> list[Any]:
    """All kernels that a run of these options launches."""
    found = []
    for n, k in options.shapes:
        for name in options.formats:
            for m in options.m:
                plans = plans_of(name, n, k, m, target, options.tiles).values()
                found += [*(plan.request for plan in plans), quantizer_of(name, k, m, target)]
                if options.experts:
                    found.append(experts_of(name, n, k, m, options.experts, target))
    return list(dict.fromkeys(found))


class Layer:
    """One [n, k] weight in each form, as many times as L2 cannot hold."""

    def __init__(self, n: int, k: int, options: argparse.Namespace, target: Any) -> None:
        import torch
        from terrazzo.autotune import measure
        from terrazzo.ops import w8a8

        self.n, self.k, self.options, self.target = n, k, options, target
        self.random = torch.Generator("cuda").manual_seed(1)
        dense = torch.randn(n, k, generator=self.random, device="cuda") * 0.02
        copies = lambda nbytes: range(measure.copies_beyond_l2(nbytes, target.l2_bytes))
        again = lambda w: dataclasses.replace(w, words=w.words.clone(), scales=w.scales.clone())
        self.packed = {}
        for name in options.formats:
            packed = w8a8.quantize(dense, **FORMATS[name])
            self.packed[name] = [packed, *(again(packed) for _ in copies(packed.nbytes)[1:])]
        several = lambda t: [t, *(t.clone() for _ in copies(t.nbytes)[1:])]
        self.dense = several(dense.bfloat16())
        self.int8 = several(w8a8.quantize_weight(dense).codes)
        e4m3 = w8a8.quantize_weight(dense, codes="e4m3")
        self.e4m3, self.row_scales = several(e4m3.codes), e4m3.scales
        self.one = torch.tensor(1e-4, device="cuda")
        self.blocks: list[block_peers.Blocks] = []
        if "fp8_block" in options.formats:
            blocks = block_peers.Blocks.of(w8a8.quantize_weight(dense, **FORMATS["fp8_block"]))
            self.blocks = [dataclasses.replace(blocks, codes=codes) for codes in several(blocks.codes)]

    def peers(self, x: Any) -> dict[str, list[Any]]:
        """Calls of torch on the same x, quantized outside of the clock."""
        import torch
        from terrazzo.ops import w4a8

        m, made = len(x), {}
        out = torch.empty(m, self.n, dtype=torch.bfloat16, device="cuda")
        made["cublas_bf16"] = [lambda w=w: torch.mm(x, w.T, out=out) for w in self.dense]
        if m > 16:  # what _int_mm takes
            q = w4a8.quantize_activations(x).q
            made["torch_int8"] = [lambda w=w: torch._int_mm(q, w.T) for w in self.int8]
        e = w4a8.fp8.quantize_activations(x)
        mm = lambda w, a, b: torch._scaled_mm(e.q, w.T, scale_a=a, scale_b=b, out_dtype=torch.bfloat16)
        made["torch_fp8"] = [lambda w=w: mm(w, self.one, self.one) for w in self.e4m3]
        by_row = (e.scales[:, None].contiguous(), self.row_scales[None].contiguous())
        made["torch_fp8_rows"] = [lambda w=w: mm(w, *by_row) for w in self.e4m3]
        return made

    def block_peers(self, x: Any, failures: dict[str, str]) -> dict[str, list[Any]]:
        """Name -> calls of other products with blocks, checked first; what one raises is its failure."""
        from terrazzo.ops import w8a8

        found = {}
        quantized = w8a8.quantize_activations(x, self.packed["fp8_block"][0])
        for peer in (peer for peer in block_peers.PEERS if not peer.missing()):
            try:
                calls = peer.calls(quantized, self.blocks)
                failure = block_peers.wrong(calls[0](), quantized, self.blocks[0])
            except Exception as error:  # they refuse sizes in many ways
                failure = f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
            if failure:
                failures[peer.name] = failure
            else:
                found[peer.name] = calls
        return found

    def wrong(self, name: str, m: int, quantized: Any, y: Any) -> str:
        """Why an output is wrong, or ""."""
        import torch
        from terrazzo.autotune import measure
        from terrazzo.ops.quantized import BlockQuantizedActivations
        from terrazzo.ops.w4a8.w8a8 import reference

        if bool(y.isnan().any()):
            return "NaN in the output"
        weight, rows = self.packed[name][0], torch.arange(m, device="cuda")[:: max(1, m // ROWS)]
        if isinstance(quantized, BlockQuantizedActivations):
            scales = quantized.scales[:, rows].contiguous()
            some = dataclasses.replace(quantized, q=quantized.q[rows], scales=scales, shape=(len(rows), self.k))
        else:
            some = quantized.of_tokens(rows)
        bound = reference.forward_error_bound(some, weight, y.dtype, accumulate=accumulate_of(name))
        return measure.check_outputs(y[rows], reference.gemm(some, weight), bound)

    def candidates(self, name: str, x: Any, failures: dict[str, str]) -> dict[str, list[Any]]:
        """Name -> calls, checked first."""
        import torch
        from terrazzo.autotune import measure
        from terrazzo.ops import w8a8

        m, packed, how = len(x), self.packed[name], dict(accumulate=accumulate_of(name), out_dtype=torch.bfloat16)
        quantized, found = w8a8.quantize_activations(x, packed[0]), {}
        y = measure.poisoned((m, self.n), torch.bfloat16, "cuda")
        w8a8.gemm(quantized, packed[0], out=y, **how)
        failures[name] = self.wrong(name, m, quantized, y)
        found[name] = [lambda w=w, y=y: w8a8.gemm(quantized, w, out=y, **how) for w in packed]
        found[f"{name} with_quantizer"] = [lambda w=w, y=y: w8a8.gemm(x, w, out=y, **how) for w in packed]
        if self.options.experts:
            found |= self.experts(name, x, quantized, how, failures)
        tiles = list(plans_of(name, self.n, self.k, m, self.target, self.options.tiles).items())[1:]
        for tile, plan in tiles:
            out = measure.poisoned((m, self.n), torch.bfloat16, "cuda")
            calls = [launch_of(plan, quantized, w, out) for w in packed]
            calls[0]()
            if not (failure := self.wrong(name, m, quantized, out)):
                found[f"{name} {tile}"] = calls
            else:
                failures[f"{name} {tile}"] = failure
        return found

    def experts(self, name: str, x: Any, quantized: Any, how: Any, failures: dict[str, str]) -> dict[str, list[Any]]:
        """One launch of experts with the same weight and the same tokens, checked first."""
        import torch
        from terrazzo.autotune import measure
        from terrazzo.ops import w8a8

        m, count, packed = len(x), self.options.experts, self.packed[name]
        stack = w8a8.GroupedWeight.stack([packed[0]] * count)
        given = quantized.of_tokens(torch.arange(m, device="cuda").repeat(count))
        offsets = (torch.arange(count + 1, device="cuda") * m).int()
        y = measure.poisoned((m * count, self.n), torch.bfloat16, "cuda")
        call = lambda: w8a8.grouped_gemm(given, stack, offsets, out=y, **how)
        call()
        wrong = next(filter(None, (self.wrong(name, m, quantized, part) for part in y.split(m))), "")
        if wrong:
            failures[f"{name} {count}_experts"] = wrong
        return {} if wrong else {f"{name} {count}_experts": [call]}

    def rows(self, m: int) -> list[dict[str, Any]]:
        import torch
        from terrazzo.autotune import measure
        from terrazzo.autotune.gemm_bench import schedule_text

        x = torch.randn(m, self.k, generator=self.random, device="cuda", dtype=torch.bfloat16)
        failures: dict[str, str] = {}
        candidates = self.peers(x)
        if self.blocks:
            candidates |= self.block_peers(x, failures)
        peers, refused = tuple(candidates), dict(failures)
        for name in self.options.formats:
            candidates |= self.candidates(name, x, failures)
        times = measure.time_in_turn(candidates, self.options.budget_ms)
        us = {name: round(timing.us, 3) for name, timing in times.items()}
        found = []
        for name in self.options.formats:
            plan = plans_of(name, self.n, self.k, m, self.target)["chosen"]
            own = {key.partition(" ")[2]: value for key, value in us.items() if key.startswith(f"{name} ")}
            row = {
                "op": "w8a8", "format": name, "dtype": "bfloat16", "group": 128 if name == "fp8_block" else self.k,
                "m": m, "n": self.n, "k": self.k, "us": us[name], "spread": round(times[name].spread, 4),
                "bytes": self.packed[name][0].nbytes, "peers": {peer: us[peer] for peer in peers}, "variants": own,
                "tflops": round(2e-6 * m * self.n * self.k / us[name], 1), "schedule": schedule_text([plan.request]),
            }  # fmt: skip
            broken = {key: why for key, why in failures.items() if key.startswith(f"{name} ")}
            row |= {"variants_failed": broken} if broken else {}
            row |= {"peers_failed": refused} if refused and name == "fp8_block" else {}
            if failures[name]:
                row |= {"us": None, "failure": failures[name]}
            found.append(row)
        return found


def launch_of(plan: Any, x: Any, w: Any, y: Any) -> Any:
    """A call of one plan's kernel, with a workspace of its own."""
    import torch
    from terrazzo.ops import launching

    sums = "int32" if w.codes == "int8" else "float32"
    kernel, workspace, semaphores, scalars = launching.ready(
        plan, len(y), y.device, launching.current_stream(x.q), "w8a8.gemm", sums
    )
    none, no_zeros = launching.stand_ins(y.device, torch.float32, torch.int32)
    zeros = getattr(x, "zeros", None)
    scales = w.scales if w.block else w.scales.view(-1)
    args = (x.q.view(torch.int8), w.words, scales, x.scales, no_zeros if zeros is None else zeros, none)
    return lambda: kernel(*args, workspace, semaphores, y, *scalars)


def show(row: dict[str, Any]) -> None:
    us, peers = row["us"], row["peers"]
    said = "  ".join(f"{name} {peer / us:.2f}x" for name, peer in peers.items()) if us else row["failure"]
    place = f"({row['n']:5}, {row['k']:5}) M {row['m']:5} {row['format']:15}"
    more = "  ".join(f"{name} {value:.2f}" for name, value in row["variants"].items())
    more += "".join(f"  {name}: {why}" for name, why in row.get("peers_failed", {}).items())
    print(f"{place} {us or 0:9.2f} us {row['tflops']:7.1f}  {said}  [{row['schedule']}] {more}", flush=True)


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
    import torch
    from terrazzo.lowering.targets import Target

    there = torch.cuda.is_available()
    target = Target.detect() if there or not options.compile_only else Target.parse("sm_90a")
    peers = block_peers.PEERS if "fp8_block" in options.formats else None
    rows = lambda o, result: rows_of(o, target)
    return program.run("w8a8", options, target, rows, requests_of(options, target), peers, copies=False)


def main(argv: list[str] | None = None) -> int:
    options = arguments(argv)
    return report.guarded("benchmarks.w8a8", lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
