"""y = x w^T in int8 by a pipeline that serves comparisons: validation, schedule, launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from terrazzo.ablation.w4a8 import basic, excp, multistage, pingpong, schedules
from terrazzo.ablation.w4a8.baseline import VADD4, Gemm
from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.targets import Target
from terrazzo.ops import launching
from terrazzo.ops.launching import Plan
from terrazzo.ops.w4a8.activations import QuantizedActivations, padded
from terrazzo.ops.w4a8.format import PackedWeight
from terrazzo.schedules import multistage as multistage_schedules
from terrazzo.schedules import problem

if TYPE_CHECKING:
    import torch

PIPELINES = ("multistage", *schedules.PIPELINES)
ROLELESS = ("multistage", "basic", "basic_overlapped")
"""Pipelines that have QServe's dequantization."""
_PROGRAMS = {"pingpong": pingpong, "excp": excp, "basic": basic, "multistage": multistage}


def plan(
    m: int,
    n: int,
    k: int,
    *,
    group_size: int,
    out_dtype: str,
    dequantization: str,
    pipeline: str,
    target: Target,
    device: Target | None = None,
) -> Plan:
    """Kernel and launch sizes for M = m >= 1, without a bias.

    Args:
        out_dtype: "float16", "bfloat16" or "int32". dequantization: "xor", "unsigned" or, where the pipeline is one of
            ROLELESS, "vadd4".
        pipeline: "pingpong" (`imfp` with a tile for each consumer), "excp" (load, dequantize and multiply apart),
            "basic" (no roles; with "basic_overlapped" a warpgroup dequantizes beside its products), "multistage".
        device: the GPU that runs the kernel where that is newer than `target`.

    Raises:
        ArgumentError: a value that no kernel serves.
    """
    if pipeline not in PIPELINES:
        raise ArgumentError("pipeline", pipeline, f"must be one of {PIPELINES}", "call w4a8.gemm for others")
    if pipeline != "multistage" and not target.supports("wgmma.s8"):
        raise ArgumentError("pipeline", pipeline, f"{target.arch} has no wgmma of bytes", "take 'multistage'")
    if dequantization == VADD4 and pipeline not in ROLELESS:
        raise ArgumentError("dequantization", dequantization, f"is a form of {ROLELESS} only", "take 'xor'")
    gemm = Gemm(n, padded(k), group_size, out_dtype, dequantization, bias=False)
    sizes = problem.Gemm.of_bytes(n, gemm.k, group_size, gemm.out_bytes)
    if pipeline == "multistage":
        program, s = pipeline, multistage_schedules.choose(sizes, target, m)
        workspace, semaphores = multistage_schedules.launch_sizes(s, sizes, m)
        scalars = ()
    else:
        program, s = schedules.choose_pipeline(pipeline, sizes, target, m)
        part = schedules.partition(s, sizes, device or target, m)
        (workspace, semaphores), scalars = s.workspace(part.grid), (part.shared,)
    params = dict(
        n=n, k=gemm.k, group=group_size, out_dtype=out_dtype, dequantization=dequantization, bias=False, **s.params()
    )
    module = _PROGRAMS[program]
    flags = launching.ptx_flags(target, device)
    entry = f"{module.__name__}:build"
    request = KernelRequest(f"w4a8.{program}", entry, tuple(params.items()), target, module.PASS_CONFIGS, flags)
    return Plan(request, workspace, semaphores, scalars)


def kernel_requests(
    n: int, k: int, *, m: int, pipeline: str, dequantization: str = "xor", group_size: int = 64,
    out_dtype: str = "float16", target: Target | str,
) -> list[KernelRequest]:  # fmt: skip
    """The kernel of an [n, k] weight and M = m in a list; see `plan`. Needs no GPU."""
    facts = dict(group_size=group_size, out_dtype=out_dtype, dequantization=dequantization, pipeline=pipeline)
    return [plan(m, n, k, **facts, target=Target.parse(target)).request]


def gemm(
    x: QuantizedActivations,
    w: PackedWeight,
    *,
    pipeline: str,
    dequantization: str = "xor",
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """y[M, N] of `w4a8.gemm` without a bias, the same bits, by another pipeline.

    Args:
        x: quantized activations [M, K], M >= 1. w: int8 weight, on the same GPU.
        pipeline, dequantization: see `plan`.
        out: contiguous [M, N], written and returned. out_dtype: None takes out's, or float16.

    Raises:
        ArgumentError: an operand that does not fit. CaptureError: see `w4a8.gemm`.
    """
    import torch

    if not isinstance(w, PackedWeight):
        raise launching.not_packed(w, "w4a8")
    if x.codes != w.ACTIVATIONS or x.shape[-1] != w.k:
        constraint = f"must be {w.ACTIVATIONS} codes of K = {w.k}"
        raise ArgumentError("x", f"{x.codes} {list(x.shape)}", constraint, "quantize_activations(x)")
    if x.device != w.device or not x.q.is_cuda or not x.q.shape[0]:
        raise ArgumentError("x", f"{x.q.shape[0]} rows on {x.device}", f"must be rows on {w.device}", "move x there")
    dtype = out_dtype or (torch.float16 if out is None else out.dtype)
    y = x.q.new_empty((x.q.shape[0], w.n), dtype=dtype) if out is None else out
    launching.check_out(y, (x.q.shape[0], w.n), dtype, x.device)
    target, device = launching.targets(w.target, x.device)
    chosen = plan(
        x.q.shape[0], w.n, w.k, group_size=w.group_size, out_dtype=str(dtype).removeprefix("torch."),
        dequantization=dequantization, pipeline=pipeline, target=target, device=device,
    )  # fmt: skip
    stream = launching.current_stream(x.q)
    kernel, workspace, semaphores, scalars = launching.ready(chosen, x.q.shape[0], x.device, stream, "gemm", "int32")
    (no_bias,) = launching.stand_ins(x.device, torch.float32)
    kernel(x.q, w.words, w.channel_scales, x.scales, x.row_sums, no_bias, workspace, semaphores, y, *scalars)
    return y
