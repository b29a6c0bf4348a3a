"""The real measuring process where there is no GPU: operators are their references, a timing answers 10 us.

A schedule with `stages` = 1 raises what a CUDA error looks like; one with `chunk` = 2, `raster` = 4 or `min_blocks` = 4
gives a wrong output.
"""

from __future__ import annotations

import itertools
import os
from importlib import import_module

import torch
from terrazzo.autotune import gemm_bench, measure, measurer
from terrazzo.lowering.targets import Target
from terrazzo.ops import attention, mxfp4_fp8, mxfp4_mxfp8, w4a8, w4a16, w4ax, w8a8
from terrazzo.ops.attention.decoding import reference as caches
from terrazzo.ops.attention.prefilling import prefill_reference as prefills
from terrazzo.ops.products.table import PRODUCTS
from terrazzo.ops.products.wide import W4A16
from terrazzo.ops.w4a8 import fp8, mxfp8
from terrazzo.ops.w4a8 import fp8_reference as integers_fp8
from terrazzo.ops.w4a8 import reference as integers
from terrazzo.ops.w4a8.w8a8 import activations as byte_activations
from terrazzo.ops.w4a8.w8a8 import reference as bytes_by_bytes
from terrazzo.ops.w4a16 import reference
from terrazzo.ops.w4ax import reference as mixed
from terrazzo.ops.w4ax.activations import default_granularity
from terrazzo.ops.weight_only import reference as floats
from terrazzo.schedules import records

WEIGHT_ONLY = {
    one.record: import_module(f"terrazzo.ops.{one.module}") for one in PRODUCTS if one.wide and one is not W4A16
}
H200 = Target.parse("nvidia/nvidia-h200")


def misbehave(op: str, y: torch.Tensor) -> torch.Tensor:
    params = records.pick(op, {}, 1, H200).params  # what the forced schedule is, as `plan` would see it
    if params["stages"] == 1:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    if params.get("chunk") == 2 or params.get("raster") == 4 or params.get("min_blocks", params["stages"] + 1) == 4:
        y.view(-1)[0] += 1.0
    return y


def gemm16(x, w, *, out):
    return out.copy_(misbehave("w4a16", reference.gemm(x, w, "post").to(x.dtype)))


def weight_only(op: str, x, w, out):
    """A product with a weight of another format than W4A16's."""
    numerics = "auto" if w.format.values else "post"  # integers of few tokens are scaled in their sums
    return out.copy_(misbehave(op, floats.forward(x, w, None, numerics)))


def grouped_weight_only(op: str, x, w, offsets, out):
    for e, (lo, hi) in enumerate(itertools.pairwise(offsets.tolist())):
        out[lo:hi] = floats.forward(x[lo:hi], w[e])
    return misbehave(f"{op}_grouped", out)


def gemm8(x, w, *, out, out_dtype=torch.float16, **options):
    if isinstance(x, tuple):
        op = w._product.record
        return out.copy_(misbehave(op, integers_fp8.gemm(*x, w).to(out_dtype)))
    return out.copy_(misbehave("w4a8", integers.gemm(x.q, x.scales, w).to(out_dtype)))


def quantize(x, *, out=None):
    q, scales, sums = integers.quantize_activations(x)
    return w4a8.QuantizedActivations(q, scales, sums, x.shape)


def grouped16(x, w, offsets, *, out):
    for e, (lo, hi) in enumerate(itertools.pairwise(offsets.tolist())):
        out[lo:hi] = reference.gemm(x[lo:hi], w[e], "exact").to(x.dtype)
    return misbehave("w4a16_grouped", out)


def grouped8(x, w, offsets, *, out, out_dtype):
    for e, (lo, hi) in enumerate(itertools.pairwise(offsets.tolist())):
        out[lo:hi] = integers.gemm(x.q[lo:hi], x.scales[lo:hi], w[e]).to(out_dtype)
    return misbehave("w4a8_grouped", out)


def grouped_fp8(x, w, offsets, *, out, out_dtype):
    q, scales = x
    for e, (lo, hi) in enumerate(itertools.pairwise(offsets.tolist())):
        out[lo:hi] = integers_fp8.gemm(q[lo:hi], scales[lo:hi], w[e]).to(out_dtype)
    op = w.stacked._product.record
    return misbehave(f"{op}_grouped", out)


def grouped_bytes(x, w, offsets, *, out, out_dtype):
    for e, (lo, hi) in enumerate(itertools.pairwise(offsets.tolist())):
        out[lo:hi] = bytes_by_bytes.gemm(x.of_tokens(torch.arange(lo, hi)), w[e]).to(out_dtype)
    return misbehave("w8a8_grouped" if w.stacked.codes == "int8" else "w8a8_fp8_grouped", out)


def gemmx(x, w, *, out, out_dtype=torch.float16):
    return out.copy_(misbehave("w4ax", mixed.gemm(*x, w).to(out_dtype)))


def quantizex(x, w):
    facts = dict(blocks8=w.blocks8, permutation=w.permutation, granularity=default_granularity(w))
    return mixed.quantize_activations(x, **facts, wide=not w.native)


def decode(q, cache, *, out):
    return out.copy_(misbehave("attention", caches.decode(q, cache, bounded=False)[0].to(q.dtype)))


def prefill(q, cache, starts, most, *, out):
    return out.copy_(misbehave("attention_prefill", prefills.prefill(q, cache, starts, bounded=False)[0].to(q.dtype)))


def quantize_fp8(x):
    return integers_fp8.quantize_activations(x)


def quantize_mxfp8(x):
    made = mxfp8.reference(x)
    return made.q[:, : made.k], made.token_scales()


def time_calls(calls, budget_ms, sustained=False):
    for call in calls:
        call()
    return measure.Timing(10.0, 0.01, len(calls), 5)


def _named(call, op: str):
    return lambda *given, out: call(op, *given, out)


def patch(put) -> None:
    """Replace what needs a GPU; `put(holder, name, value)` sets an attribute."""
    put(gemm_bench, "DEVICE", "cpu")
    put(gemm_bench, "require_gpu", lambda: None)
    put(Target, "detect", staticmethod(lambda device=None: H200))
    put(measure, "time_calls", time_calls)
    put(measure, "copies_beyond_l2", lambda nbytes, l2: 2)
    put(torch.cuda, "empty_cache", lambda: None)
    put(torch.cuda, "synchronize", lambda: None)
    put(measurer, "_gpu_id", lambda: "cpu")
    for holder, name, value in (
        (w4a16, "gemm", gemm16),
        (w4a16, "grouped_gemm", grouped16),
        (w4a8, "gemm", gemm8),
        (w4a8, "grouped_gemm", grouped8),
        (w4a8, "quantize_activations", quantize),
        (fp8, "gemm", gemm8),
        (fp8, "quantize_activations", quantize_fp8),
        (fp8, "grouped_gemm", grouped_fp8),
        (mxfp4_fp8, "gemm", gemm8),
        (mxfp4_fp8, "quantize_activations", quantize_fp8),
        (mxfp4_fp8, "grouped_gemm", grouped_fp8),
        (mxfp4_mxfp8, "gemm", gemm8),
        (mxfp4_mxfp8, "quantize_activations", quantize_mxfp8),
        (mxfp4_mxfp8, "grouped_gemm", grouped_fp8),
        (w8a8, "grouped_gemm", grouped_bytes),
        (w8a8, "quantize_activations", byte_activations.on_cpu),
        (w4ax, "gemm", gemmx),
        (w4ax, "quantize_activations", quantizex),
        *((module, "gemm", _named(weight_only, op)) for op, module in WEIGHT_ONLY.items()),
        *((module, "grouped_gemm", _named(grouped_weight_only, op)) for op, module in WEIGHT_ONLY.items()),
        (attention, "decode", decode),
        (attention, "prefill", prefill),
    ):
        getattr(holder, name)  # resolved first, or the lazy name would replace it
        put(holder, name, value)


if __name__ == "__main__":
    torch.set_num_threads(1)
    patch(setattr)
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    measurer.serve()
