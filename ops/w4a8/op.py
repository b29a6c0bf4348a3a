"""y = x w^T in int8: validation, choice of kernel and schedule, workspace, launch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.targets import Target
from terrazzo.ops import launching
from terrazzo.ops.launching import Plan
from terrazzo.ops.linear.bytes import fp8_problem
from terrazzo.ops.linear.bytes import multistage as multistage_program
from terrazzo.ops.linear.bytes import small_batch as small_batch_program
from terrazzo.ops.linear.bytes import stream_k as stream_k_program
from terrazzo.ops.linear.bytes.fp8_problem import CONVERTERS, E2M1, E4M3
from terrazzo.ops.linear.sizes import shapeless
from terrazzo.ops.w4a8 import activations, fp8_format
from terrazzo.ops.w4a8.activations import QuantizedActivations
from terrazzo.ops.w4a8.format import GROUPS, PackedWeight
from terrazzo.ops.w4a8.reference import DEQUANTIZATIONS, OUT_DTYPES
from terrazzo.schedules import linear_spaces, multistage, records, small_batch, spaces, stream_k
from terrazzo.schedules.problem import TOKENS_PER_TILE, Gemm

if TYPE_CHECKING:
    import torch

PIPELINES = ("auto", "small_batch", "multistage", "imfp")
LARGEST_UNSIGNED_K = 66311
"""Longest row whose sums of u8 x s8 products stay in int32: 255 * 127 * K < 2^31."""
AUTO = "xor"
WEIGHTS = (PackedWeight, fp8_format.PackedWeight)
Weight: TypeAlias = PackedWeight | fp8_format.PackedWeight


@lru_cache(maxsize=1024)
def plan(
    m: int,
    n: int,
    k: int,
    *,
    group_size: int,
    out_dtype: str,
    dequantization: str,
    bias: bool,
    pipeline: str,
    target: Target,
    device: Target | None = None,
) -> Plan:
    """Kernel and launch sizes for M = m >= 1. `device` is the GPU that runs it where that is newer than `target`.

    `dequantization` "e4m3" is the form of `fp8` weights, "e2m1" of those of `mxfp4_fp8`.
    """
    check_choices(k, out_dtype, dequantization, pipeline)
    dequantization = AUTO if dequantization == "auto" else dequantization
    e4m3 = dequantization in CONVERTERS
    k16, raw = activations.padded(k), out_dtype == "int32"
    common = dict(
        n=n, k=k16, group=group_size, out_dtype=out_dtype, dequantization=dequantization, bias=bias and not raw
    )
    fp8_problem.of(**common)
    gemm = Gemm.of_bytes(n, k16, group_size, 4 if raw else 2, "e4m3" if e4m3 else "s8")

    def request(program: ModuleType, schedule: Any) -> KernelRequest:
        name = f"w4a8.{program.__name__.rpartition('.')[2]}"
        params = common | schedule.params()
        params = shapeless(params, 4 if raw else 2) if program is stream_k_program else params
        flags = launching.ptx_flags(target, device)
        entry = f"{program.__name__}:build"
        return KernelRequest(name, entry, tuple(params.items()), target, program.PASS_CONFIGS, flags)

    if e4m3:
        fp8_format.check_target(target)
    if pipeline == "imfp" and not target.supports("wgmma.s8"):
        raise ArgumentError("pipeline", pipeline, f"{target.arch} has no wgmma of bytes", "leave it 'auto'")
    if e4m3 and pipeline in ("small_batch", "multistage") and not target.supports("mma.e4m3"):
        raise ArgumentError("pipeline", pipeline, f"{target.arch} emulates mma.sync of e4m3", "leave it 'auto'")
    if pipeline == "auto":
        facts = tuning_facts(n, k, group_size, out_dtype, dequantization)
        program, s = spaces.choose(linear_spaces.of(gemm), operator_of(dequantization), facts, target, m, device)
    elif pipeline == "small_batch":
        program = pipeline
        s = small_batch.choose(gemm, target, min(m, gemm.form.small_tokens))  # more take several launches
    elif pipeline == "multistage":
        program, s = pipeline, multistage.choose(gemm, target, m)
    else:
        program, s = "stream_k", stream_k.choose(gemm, target, m)
    if program == "small_batch":
        return Plan(request(small_batch_program, s), *s.workspace(gemm.row_blocks * 64), ())
    if program == "multistage":
        return Plan(request(multistage_program, s), *multistage.launch_sizes(s, gemm, m), ())
    part = stream_k.partition(s, gemm, device or target, m)
    return Plan(request(stream_k_program, s), *s.workspace(part.grid), (part.shared,))


def operator_of(dequantization: str) -> str:
    """The name under which records are kept."""
    return {E4M3: "w4a8_fp8", E2M1: "mxfp4_fp8"}.get(dequantization, "w4a8")


def tuning_facts(n: int, k: int, group_size: int, out_dtype: str, dequantization: str) -> dict[str, int | str]:
    """What tells one tuned weight from another, besides M."""
    chosen = AUTO if dequantization == "auto" else dequantization
    return dict(n=n, k=k, group=group_size, out_dtype=out_dtype, dequantization=chosen)


def tokens_per_launch(chosen: Plan, m: int) -> int:
    """Tokens that one launch takes: all, or as many as the small-batch program holds."""
    params = dict(chosen.request.params)
    tiles = params.get("token_tiles")
    return m if tiles is None else min(m, params["tokens"] or tiles * TOKENS_PER_TILE)


def kernel_requests(
    n: int,
    k: int,
    *,
    group_size: int = 64,
    m: int | Sequence[int] | None = None,
    dtype: str = "float16",
    out_dtype: str | None = None,
    target: Target | str,
    dequantization: str = "auto",
    pipeline: str = "auto",
    bias: bool = False,
    smooth: bool = False,
) -> list[KernelRequest]:
    """The kernels that serve an [n, k] weight: for the given M, or for every M (None). Needs no GPU.

    Args:
        m: numbers of tokens. group_size: 32, 64 or 128; with "e4m3", K too; with "e2m1", 32.
        dtype: of the activations that are quantized, "float16" or "bfloat16"; None leaves their kernel out.
        out_dtype: "float16", "bfloat16" or "int32"; None takes dtype.
        dequantization, pipeline: see `gemm`; "e4m3" for the weights and activations of `fp8`, "e2m1" for those of
            `mxfp4_fp8`.
        bias, smooth: whether the weight has one.

    Raises:
        ArgumentError: a value that no kernel serves. TargetError: an unknown target.
    """
    launching.check_shape(n, k)
    if dtype not in (None, *activations.DTYPES):
        raise ArgumentError("dtype", dtype, f"must be one of {activations.DTYPES}", "cast the activations")
    launching.check_group(group_size, k, GROUPS)
    launching.check_flags(bias=bias, smooth=smooth)
    at, out = Target.parse(target), out_dtype or dtype or "float16"
    codes = "e4m3" if dequantization in CONVERTERS else "int8"
    group_size = 128 if dequantization == E4M3 and group_size == k and k not in GROUPS else group_size
    recorded = tuning_facts(n, k, group_size, out, dequantization)
    more = records.tokens(operator_of(dequantization), recorded, at) if m is None else ()
    tokens = (*launching.tokens_of(m), *more)
    facts = dict(group_size=group_size, dequantization=dequantization, pipeline=pipeline, bias=bias, target=at)
    plans = [plan(t, n, k, **facts, out_dtype=out) for t in tokens]
    made = dict(dtype=dtype, gain=smooth, norm=False, target=at, codes=codes)
    before = [activations.plan(t, k, **made) for t in tokens if dtype]
    return list(dict.fromkeys([*launching.requests_of(plans), *before]))


def weight_requests(
    w: Weight,
    m: int | Sequence[int],
    dtype: torch.dtype | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    dequantization: str = "auto",
    pipeline: str = "auto",
    bias: bool | None = None,
) -> list[KernelRequest]:
    """The kernels that `gemm` will use for `w` and these M on the current GPU, to compile them up front.

    Args:
        w: packed weight on a GPU, of this package or of `fp8`. m: numbers of tokens.
        dtype: of 16-bit activations; None for quantized ones. out_dtype: None takes dtype, or float16.
        dequantization, pipeline: see `gemm`.
        bias: whether one is added; None: w's own.

    Raises:
        ArgumentError: w on no GPU, or a value that no kernel serves. TargetError: w was packed for another GPU.
    """
    target, device = launching.targets(w.target, w.device)
    out = str(out_dtype or dtype or "torch.float16").removeprefix("torch.")
    has_bias = w.bias is not None if bias is None else bias
    tokens = launching.tokens_of(m)
    plans = [_plan_for(w, t, out, has_bias, dequantization, pipeline, target, device) for t in tokens]
    before = []
    if dtype is not None:
        facts = dict(dtype=str(dtype)[6:], gain=w.smooth is not None, norm=False, target=target, device=device)
        facts |= dict(codes=w.ACTIVATIONS)
        before = [activations.plan(t, w.k, **facts) for t in tokens]
    return list(dict.fromkeys([*launching.requests_of(plans), *before]))


records.on_change(plan.cache_clear)


def check_codes(x: QuantizedActivations, w: Weight) -> None:
    """Raise ArgumentError unless activations have the codes that a weight multiplies, and no zero points."""
    if x.codes != w.ACTIVATIONS:
        constraint = f"must be {w.ACTIVATIONS} codes: {w!r} multiplies {w.ACTIVATIONS}"
        raise ArgumentError("x", x.codes, constraint, f"quantize_activations(x, codes={w.ACTIVATIONS!r})")
    if x.zeros is not None:
        raise ArgumentError(
            "x", "zero points", f"must have none: {w!r} takes no zero points", "quantize_activations(x)"
        )


def check_sums(x: QuantizedActivations, w: Weight) -> None:
    """Raise ArgumentError unless int8 activations have the sums of their rows."""
    if x.row_sums is None and w.ACTIVATIONS != "e4m3":
        raise ArgumentError("x", "no row_sums", f"must have them: {w!r} reads them", "quantize_activations(x)")


def _plan_for(
    w: Weight,
    m: int,
    out_dtype: str,
    bias: bool,
    dequantization: str,
    pipeline: str,
    target: Target,
    device: Target,
) -> Plan:
    dequantization = dequantization_of(w, dequantization)
    return plan(
        m, w.n, w.k, group_size=w.group_size, out_dtype=out_dtype, dequantization=dequantization, bias=bias,
        pipeline=pipeline, target=target, device=device,
    )  # fmt: skip


def dequantization_of(w: Weight, asked: str) -> str:
    """What `plan` is asked for: the weight's own on e4m3, which has no other; else as asked.

    Raises:
        ArgumentError: the other form of weights is asked for.
    """
    own = w.DEQUANTIZATION
    if asked != "auto" and asked != own and (own or asked in CONVERTERS):
        raise ArgumentError("dequantization", asked, f"is not that of {w!r}", "leave it 'auto'")
    return own or asked


def check_choices(k: int, out_dtype: str, dequantization: str, pipeline: str) -> None:
    for name, value, known in (
        ("out_dtype", out_dtype, OUT_DTYPES),
        ("dequantization", dequantization, (*DEQUANTIZATIONS, *CONVERTERS)),
        ("pipeline", pipeline, PIPELINES),
    ):
        if value not in known:
            raise ArgumentError(name, value, f"must be one of {known}", f"leave {name} out")
    if dequantization == "unsigned" and k > LARGEST_UNSIGNED_K:
        raise ArgumentError(
            "dequantization", dequantization, f"K = {k} > {LARGEST_UNSIGNED_K}: sums may leave int32", "use 'xor'"
        )
