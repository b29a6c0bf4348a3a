"""The real measuring process where there is no GPU: operators are their references, a timing answers 10 us.

A schedule with `stages` = 1 raises what a CUDA error looks like, one with `chunk` = 2 gives a wrong output.
"""

from __future__ import annotations

import os

import torch
from terrazzo.autotune import gemm_bench, measure, measurer
from terrazzo.lowering.targets import Target
from terrazzo.ops import w4a8, w4a16
from terrazzo.ops.w4a8 import reference as integers
from terrazzo.ops.w4a16 import reference
from terrazzo.schedules import records

H200 = Target.parse("nvidia/nvidia-h200")


def misbehave(op: str, y: torch.Tensor) -> torch.Tensor:
    params = records.pick(op, {}, 1, H200).params  # what the forced schedule is, as `plan` would see it
    if params["stages"] == 1:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    if params.get("chunk") == 2:
        y[0, 0] += 1.0
    return y


def gemm16(x, w, *, out):
    return out.copy_(misbehave("w4a16", reference.gemm(x, w, "post").to(x.dtype)))


def gemm8(x, w, *, out, out_dtype=torch.float16, **options):
    return out.copy_(misbehave("w4a8", integers.gemm(x.q, x.scales, w).to(out_dtype)))


def quantize(x, *, out=None):
    q, scales, sums = integers.quantize_activations(x)
    return w4a8.QuantizedActivations(q, scales, sums, x.shape)


def time_calls(calls, budget_ms):
    for call in calls:
        call()
    return measure.Timing(10.0, 0.01, len(calls), 5)


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
        (w4a8, "gemm", gemm8),
        (w4a8, "quantize_activations", quantize),
    ):
        getattr(holder, name)  # resolved first, or the lazy name would replace it
        put(holder, name, value)


if __name__ == "__main__":
    torch.set_num_threads(1)
    patch(setattr)
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    measurer.serve()
