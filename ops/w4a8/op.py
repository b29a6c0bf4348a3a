"""y = x w^T in int8: validation, choice of kernel and schedule, workspace, launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.targets import Target
from terrazzo.ops import grouped, launching
from terrazzo.ops.call import plans
from terrazzo.ops.launching import Plan
from terrazzo.ops.linear.bytes import fp8_problem
from terrazzo.ops.linear.bytes import multistage as multistage_program
from terrazzo.ops.linear.bytes import small_batch as small_batch_program
from terrazzo.ops.linear.bytes import stream_k as stream_k_program
from terrazzo.ops.linear.bytes.fp8_problem import CONVERTERS, E2M1, E2M1_MX, E4M3
from terrazzo.ops.linear.sizes import shapeless
from terrazzo.ops.products.converted import MXFP4_FP8, MXFP4_MXFP8, W4A8, W4A8_FP8
from terrazzo.ops.products.product import Product
from terrazzo.ops.w4a8 import activations, fp8_format, mxfp8
from terrazzo.ops.w4a8.activations import QuantizedActivations
from terrazzo.ops.w4a8.format import GROUPS, UNIT_K, PackedWeight
from terrazzo.ops.w4a8.reference import DEQUANTIZATIONS, OUT_DTYPES
from terrazzo.schedules import multistage, small_batch, stream_k
from terrazzo.schedules.problem import TOKENS_PER_TILE, Gemm

if TYPE_CHECKING:
    import torch

PIPELINES = ("auto", "small_batch", "multistage", "imfp")
LARGEST_UNSIGNED_K = 66311
"""Longest row whose sums of u8 x s8 products stay in int32: 255 * 127 * K < 2^31."""
AUTO = "xor"
WEIGHTS = (PackedWeight, fp8_format.PackedWeight)
Weight: TypeAlias = PackedWeight | fp8_format.PackedWeight


@dataclass(frozen=True, kw_only=True)
class Facts(plans.Facts):
    """Of a 4-bit weight for bytes.

    Attributes:
        group_size: k of a scale. out_dtype: "float16", "bfloat16" or "int32".
        dequantization: see `gemm`; "e4m3" is the form of `fp8` weights, "e2m1" that of `mxfp4_fp8`, "e2m1_mx" that of
            `mxfp4_mxfp8`.
        pipeline: see `gemm`.
    """

    group_size: int
    out_dtype: str
    dequantization: str
    pipeline: str = "auto"

    programs: ClassVar = {
        "small_batch": small_batch_program,
        "stream_k": stream_k_program,
        "grouped": stream_k_program,
        "multistage": multistage_program,
    }
    kernels = "w4a8"

    @property
    def form(self) -> str:
        """The dequantization that is meant."""
        return AUTO if self.dequantization == "auto" else self.dequantization

    @property
    def product(self) -> Product:
        """The kind of linear layer."""
        return {E4M3: W4A8_FP8, E2M1: MXFP4_FP8, E2M1_MX: MXFP4_MXFP8}.get(self.dequantization, W4A8)

    @property
    def record(self) -> str:
        return self.product.record

    @property
    def out_bytes(self) -> int:
        return 4 if self.out_dtype == "int32" else 2

    def check(self, target: Target) -> None:
        if self.experts:
            grouped.check_request(self.n, self.k, self.experts, self.group_size, GROUPS)
        check_choices(self.k, self.out_dtype, self.dequantization, self.pipeline)
        fp8_problem.of(**self.params())
        self.product.check(target)
        if self.pipeline == "small_batch" and self.dequantization == E2M1_MX:
            constraint = "has no program for scales of groups of both operands"
            raise ArgumentError("pipeline", self.pipeline, constraint, "leave it 'auto'")
        if self.pipeline == "imfp" and not self.experts and not target.supports("wgmma.s8"):
            raise ArgumentError("pipeline", self.pipeline, f"{target.arch} has no wgmma of bytes", "leave it 'auto'")
        on_mma = self.pipeline in ("small_batch", "multistage")
        if self.product is not W4A8 and on_mma and not target.supports("mma.e4m3"):
            constraint = f"{target.arch} emulates mma.sync of e4m3"
            raise ArgumentError("pipeline", self.pipeline, constraint, "leave it 'auto'")

    def gemm(self) -> Gemm:
        activations_of = "e4m3" if self.dequantization in CONVERTERS else "s8"
        sizes = (self.n, activations.padded(self.k), self.group_size, self.out_bytes)
        return Gemm.of_bytes(*sizes, activations_of, experts=self.experts, mx=self.dequantization == E2M1_MX)

    def params(self) -> dict[str, Any]:
        own = dict(n=self.n, k=activations.padded(self.k), group=self.group_size, out_dtype=self.out_dtype)
        return own | dict(dequantization=self.form, bias=self.bias and self.out_dtype != "int32")

    def tuned(self) -> plans.Tuned:
        own = dict(n=self.n, k=self.k, group=self.group_size, out_dtype=self.out_dtype, dequantization=self.form)
        return own | ({"experts": self.experts} if self.experts else {})

    def choose(self, gemm: Gemm, target: Target, m: int, device: Target | None) -> tuple[str, Any]:
        if self.experts or self.pipeline == "auto":
            return super().choose(gemm, target, m, device)
        if self.pipeline == "small_batch":  # more tokens take several launches
            return self.pipeline, small_batch.choose(gemm, target, min(m, gemm.form.small_tokens))
        if self.pipeline == "multistage":
            return self.pipeline, multistage.choose(gemm, target, m)
        return "stream_k", stream_k.choose(gemm, target, m)

    def build(self, program: str, schedule: Any) -> dict[str, Any]:
        params = super().build(program, schedule)
        return shapeless(params, self.out_bytes) if program == "stream_k" and not self.experts else params


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
        dequantization, pipeline: see `gemm`; "e4m3" for the weights and activations of `fp8`, "e2m1" for `mxfp4_fp8`'s.
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
    own = dict(group_size=_kept_group(group_size, k, dequantization), dequantization=dequantization, bias=bias)
    facts = Facts(n, k, **own, out_dtype=out, pipeline=pipeline)
    tokens = plans.tokens_of(facts, m, at)
    found = plans.requests(facts, tokens, at)
    made = dict(dtype=dtype, gain=smooth, norm=False, target=at)
    made |= dict(codes=facts.product.x.quant)
    return list(dict.fromkeys([*found, *(mxfp8.quantizer(t, k, **made) for t in tokens if dtype)]))


def _kept_group(group_size: int, k: int, dequantization: str) -> int:
    """As fp8.QuantizedWeight keeps one group."""
    return UNIT_K if dequantization == E4M3 and group_size == k and k not in GROUPS else group_size


def grouped_requests(
    n: int,
    k: int,
    experts: int,
    *,
    m: int | tuple[int, ...] | None = None,
    group_size: int = 64,
    out_dtype: str = "float16",
    dequantization: str = "auto",
    bias: bool = False,
    target: Target | str = "sm_90a",
) -> list[KernelRequest]:
    """The kernels that `grouped_gemm` uses for these M (None: M of every bucket). Needs no GPU.

    Args:
        n, k: of each expert's weight. experts: number of them. m: tokens of all experts together.
        group_size: 32, 64 or 128; with "e4m3", K too; with "e2m1", 32.
        out_dtype: "float16", "bfloat16" or "int32" (not with "e4m3" and "e2m1").
        dequantization: see `gemm`; "e4m3" for the weights and activations of `fp8`, "e2m1" for `mxfp4_fp8`'s.
        bias: whether one is added.

    Raises:
        ArgumentError: a value that no kernel serves, or e4m3 activations on a target without them.
        TargetError: an unknown target.
    """
    grouped.check_request(n, k, experts, group_size, GROUPS)
    launching.check_flags(bias=bias)
    own = dict(group_size=_kept_group(group_size, k, dequantization), dequantization=dequantization, bias=bias)
    facts, at = Facts(n, k, **own, out_dtype=out_dtype, experts=experts), Target.parse(target)
    return plans.requests(facts, plans.tokens_of(facts, m, at), at)


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
    facts = facts_of(w, out, w.bias is not None if bias is None else bias, (dequantization, pipeline))
    tokens, before = launching.tokens_of(m), []
    if dtype is not None:
        made = dict(dtype=str(dtype)[6:], gain=w.smooth is not None, norm=False, target=target, device=device)
        before = [mxfp8.quantizer(t, w.k, **made, codes=w.ACTIVATIONS) for t in tokens]
    return plans.requests(facts, tokens, target, device, before)


def facts_of(w: Weight, out_dtype: str, bias: bool, choices: tuple[str, str], experts: int = 0) -> Facts:
    """Of a packed weight; choices: dequantization and pipeline."""
    own = dict(dequantization=dequantization_of(w, choices[0]), pipeline=choices[1])
    return Facts(w.n, w.k, group_size=w.group_size, out_dtype=out_dtype, bias=bias, experts=experts, **own)


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
    if x.row_sums is None and w.ACTIVATIONS == "int8":
        raise ArgumentError("x", "no row_sums", f"must have them: {w!r} reads them", "quantize_activations(x)")


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
