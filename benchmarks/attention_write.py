"""Storing keys and values: packing a prefill beside its copy time, and what an append adds to a decode step.

    python -m benchmarks.attention_write                 128K tokens of 8 heads; 8x32/8x32k and 64x32/8x4k
    python -m benchmarks.attention_write --formats int4/int4

One line for each measurement; outputs are compared with quantizer.py, in every bit, before their time counts.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import Any

from terrazzo.autotune.attention_bench import Shape, random_cache
from terrazzo.lowering.errors import TerrazzoError

from benchmarks.attention import DEVICE, FORMATS

CHECKED_TOKENS = 2048
HEADS, TOKENS, DIM = 8, 131072, 128
STEPS = ("8x32/8x32k", "64x32/8x4k")


def prefill(formats: tuple[str, str], copy_gb_s: float, budget_ms: float) -> str:
    """Time of `store` for one long prompt."""
    import torch
    from terrazzo.autotune import measure
    from terrazzo.ops.attention import pack_cache, writing

    cache = random_cache(*formats, Shape(1, 4 * HEADS, HEADS, TOKENS), DIM, 128)
    cache.block_table.copy_(torch.arange(cache.block_table.numel()).reshape_as(cache.block_table))
    k, v = torch.randn(2, TOKENS, HEADS, DIM, device=DEVICE).half()
    starts = torch.tensor([0, TOKENS], dtype=torch.int32, device=DEVICE)
    call = partial(writing.store, cache, k, v, starts, TOKENS)
    call()
    part = (x[None, :CHECKED_TOKENS].transpose(1, 2) for x in (k, v))
    static = dict(k_static=cache.k_static, v_static=cache.v_static)
    wanted = pack_cache(*part, *formats, page_size=128, **static)
    wrong = int((cache.pages[: CHECKED_TOKENS // 128] != wanted.pages).sum())
    if wrong:
        return f"FAILED: {wrong} words differ"
    moved = 2 * k.numel() * 2 + 4 * cache.pages.numel()
    us = measure.time_calls([call], budget_ms).us
    return f"{us:9.1f} us, {us * copy_gb_s * 1e3 / moved:5.2f} of the copy time of the same bytes"


def step(formats: tuple[str, str], shape: Shape, fill: int, budget_ms: float) -> str:
    """Time of a decode step with and without the append in front; `fill`: tokens missing in the residual block."""
    import torch
    from terrazzo.autotune import measure
    from terrazzo.ops.attention import op, writing

    cache = random_cache(*formats, shape, DIM, 128)
    cache.lengths.fill_(shape.tokens - fill)
    q = torch.randn(shape.batch, 1, shape.heads, DIM, device=DEVICE).half()
    k, v = torch.randn(2, shape.batch, 1, shape.kv_heads, DIM, device=DEVICE).half()
    y = torch.empty_like(q)

    def both() -> None:
        writing.append(cache, k, v)
        op.decode(q, cache, out=y)

    found = measure.time_in_turn({"decode": [partial(op.decode, q, cache, out=y)], "both": [both]}, budget_ms)
    decode, total = found["decode"].us, found["both"].us
    return f"decode {decode:8.2f} us, with append {total:8.2f} us: {total / decode - 1:+.1%}"


def run(o: argparse.Namespace) -> int:
    from terrazzo.autotune import measure

    copy_gb_s, failed = measure.copy_bandwidth(), False
    print(f"copy {copy_gb_s:.1f} GB/s", flush=True)
    for formats in o.formats:
        rows: dict[str, Any] = {"store 1x8x128k": partial(prefill, formats, copy_gb_s, o.budget_ms)}
        for shape in STEPS:
            rows[f"step {shape}"] = partial(step, formats, Shape.parse(shape), 1, o.budget_ms)
            if "channel" in formats[0]:
                rows[f"step {shape}, block full"] = partial(step, formats, Shape.parse(shape), 0, o.budget_ms)
        for name, call in rows.items():
            said = call()
            failed |= said.startswith("FAILED")
            print(f"{name:28} {'/'.join(formats):24} {said}", flush=True)
    return 1 if failed else 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention_write", description=__doc__.splitlines()[0])
    parser.add_argument("--formats", help="comma-separated, keys/values")
    parser.add_argument("--budget-ms", type=float, default=15.0)
    o = parser.parse_args(argv)
    o.formats = [tuple(f.split("/")) for f in o.formats.split(",")] if o.formats else list(FORMATS)
    try:
        return run(o)
    except TerrazzoError as error:
        print(f"benchmarks.attention_write: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
