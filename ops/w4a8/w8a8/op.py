"""y = x w^T of bytes by bytes: validation, choice of kernel and schedule, workspace, launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.targets import Target
from terrazzo.ops import grouped, launching, quantized, weights
from terrazzo.ops.call import plans
from terrazzo.ops.linear.bytes import direct_tokens as direct_tokens_program
from terrazzo.ops.linear.bytes import fp8_problem
from terrazzo.ops.linear.bytes import multistage as multistage_program
from terrazzo.ops.linear.bytes import stream_k as stream_k_program
from terrazzo.ops.linear.sizes import shapeless
from terrazzo.ops.products.direct import W8A8, W8A8_FP8
from terrazzo.ops.quantized import BlockQuantizedActivations, QuantizedActivations
from terrazzo.ops.w4a8.w8a8 import activations as w8_activations
from terrazzo.ops.w4a8.w8a8.format import BLOCK, CODES, PRODUCTS, PackedWeight
from terrazzo.schedules.problem import Gemm

if TYPE_CHECKING:
    import torch

ACCUMULATE = ("auto", "promoted", "fast")
OUT_DTYPES = ("float16", "bfloat16", "int32")
OPERATORS = {way.name: one.record for one in (W8A8, W8A8_FP8) for way in one.ways}
"""Numerics -> the name under which records are kept."""
Activations = QuantizedActivations | BlockQuantizedActivations


def numerics_of(codes: str, block: bool, zeros: bool, accumulate: str) -> str:
    """Of a product, one of `direct.NUMERICS`.

    Raises:
        ArgumentError: `accumulate` is unknown, or of sums that are exact or scaled by block.
    """
    if type(accumulate) is not str or accumulate not in ACCUMULATE:
        raise ArgumentError("accumulate", accumulate, f"must be one of {ACCUMULATE}", "leave it 'auto'")
    if codes == "int8" or block:
        if accumulate == "fast" or (accumulate != "auto" and codes == "int8"):
            what = "int8 sums are exact" if codes == "int8" else "sums of blocks are scaled after each 128 k"
            raise ArgumentError("accumulate", accumulate, f"must be 'auto': {what}", "leave it out")
        return "block" if block else "s8_zeros" if zeros else "s8"
    return "fast" if accumulate == "fast" else "promoted"


def problem(n: int, k: int, numerics: str, out_dtype: str, experts: int = 0) -> Gemm:
    """What schedules are chosen for."""
    scales = "direct" if numerics.startswith("s8") else numerics
    return Gemm.of_w8(n, quantized.padded(k), scales, 4 if out_dtype == "int32" else 2, experts=experts)


@dataclass(frozen=True, kw_only=True)
class Facts(plans.Facts):
    """Of bytes by bytes.

    Attributes:
        numerics: see `numerics_of`. out_dtype: of y.
    """

    numerics: str
    out_dtype: str

    programs: ClassVar = {
        "stream_k": stream_k_program, "direct_tokens": direct_tokens_program, "grouped": stream_k_program,
        "multistage": multistage_program,
    }  # fmt: skip
    kernels = "w8a8"

    @property
    def record(self) -> str:
        return OPERATORS[self.numerics]

    def check(self, target: Target) -> None:
        if self.experts:
            grouped.check_experts(self.experts)
        fp8_problem.of(**self.params())
        PRODUCTS["int8" if self.numerics.startswith("s8") else "e4m3"].check(target)

    def gemm(self) -> Gemm:
        return problem(self.n, self.k, self.numerics, self.out_dtype, self.experts)

    def params(self) -> dict[str, Any]:
        own = dict(n=self.n, k=quantized.padded(self.k), group=BLOCK, out_dtype=self.out_dtype)
        return own | dict(dequantization=self.numerics, bias=self.bias and self.out_dtype != "int32")

    def tuned(self) -> plans.Tuned:
        chosen = "s8" if self.numerics.startswith("s8") else self.numerics
        own = dict(n=self.n, k=self.k, group=BLOCK, out_dtype=self.out_dtype, dequantization=chosen)
        return own | ({"experts": self.experts} if self.experts else {})

    def build(self, program: str, schedule: Any) -> dict[str, Any]:
        params = super().build(program, schedule)
        if program == "multistage" or self.experts:
            return params
        return shapeless(params, 4 if self.out_dtype == "int32" else 2)


def form_of(group_size: int, k: int, codes: str) -> dict[str, Any]:
    """`codes` and `block` of a weight whose scales serve `group_size` input channels.

    Raises:
        ArgumentError: groups that no weight of the codes has.
    """
    block = group_size == BLOCK and group_size < k
    if (group_size < k and not block) or (block and codes == "int8"):
        has = "rows" if codes == "int8" else "rows or blocks of 128"
        raise ArgumentError("group_size", group_size, f"must be K: scales of {codes} are those of {has}", f"pass {k}")
    return dict(codes=codes, block=block)


def check_flags(codes: str, block: bool, zeros: bool, static: bool = False) -> None:
    """Raise ArgumentError for what codes and activations cannot be at once."""
    if (block and codes == "int8") or (zeros and codes != "int8") or (block and static):
        raise ArgumentError("codes", codes, "blocks are of e4m3 and dynamic, zero points of int8", "leave the flag out")


def runs_on(target: Target | None, codes: str) -> bool:
    """Whether a target (None: any) multiplies such bytes, "int8" or "e4m3", natively."""
    rate = "s8" if codes == "int8" else codes
    return target is None or any(target.supports(f"{kind}.{rate}") for kind in ("wgmma", "mma"))


def kernel_requests(
    n: int,
    k: int,
    *,
    codes: str = "int8",
    block: bool = False,
    zeros: bool = False,
    accumulate: str = "auto",
    m: int | Sequence[int] | None = None,
    dtype: str = "bfloat16",
    out_dtype: str | None = None,
    target: Target | str,
    bias: bool = False,
    smooth: bool = False,
    static: bool = False,
    ue8m0: bool = False,
) -> list[KernelRequest]:
    """The kernels that serve an [n, k] weight: for the given M, or for every M (None). Needs no GPU.

    Args:
        codes: "int8" or "e4m3". block: e4m3 with scales of blocks. zeros: activations have zero points (int8).
        m: numbers of tokens.
        accumulate: see `gemm`.
        dtype: of the activations that are quantized, "float16" or "bfloat16"; None leaves their kernel out.
        out_dtype: "float16", "bfloat16", or "int32" of int8; None takes dtype.
        bias, smooth: whether the weight has one. static: whether activations have one scale for all. ue8m0: whether
            their scales are powers of two.

    Raises:
        ArgumentError: a value that no kernel serves. TargetError: an unknown target.
    """
    launching.check_shape(n, k)
    launching.check_flags(bias=bias, smooth=smooth, block=block, zeros=zeros, static=static, ue8m0=ue8m0)
    if codes not in CODES.values():
        raise ArgumentError("codes", codes, f"must be one of {tuple(CODES.values())}", "use int8")
    check_flags(codes, block, zeros, static)
    out = out_dtype or dtype or "bfloat16"
    check_out_dtype(out, codes)
    numerics, at = numerics_of(codes, block, zeros, accumulate), Target.parse(target)
    facts = Facts(n, k, numerics=numerics, out_dtype=out, bias=bias)
    tokens = plans.tokens_of(facts, m, at)
    own = dict(codes=codes, block=block, zeros=zeros, static=static, smooth=smooth, ue8m0=ue8m0)
    found = plans.requests(facts, tokens, at)
    before = [] if dtype is None else quantizers(k, m=tokens, dtype=dtype, target=at, **own)
    return list(dict.fromkeys([*found, *before]))


def grouped_requests(
    n: int,
    k: int,
    experts: int,
    *,
    m: int | tuple[int, ...] | None = None,
    codes: str = "int8",
    block: bool = False,
    zeros: bool = False,
    accumulate: str = "auto",
    out_dtype: str = "bfloat16",
    bias: bool = False,
    target: Target | str = "sm_90a",
) -> list[KernelRequest]:
    """The kernels that `grouped_gemm` uses for these M (None: M of every bucket). Needs no GPU.

    Args:
        n, k: of each expert's weight. experts: number of them. m: tokens of all experts together.
        codes, block, zeros, accumulate, out_dtype: see `kernel_requests`. bias: whether one is added.

    Raises:
        ArgumentError: a value that no kernel serves, or e4m3 on a target without it.
        TargetError: an unknown target.
    """
    launching.check_shape(n, k)
    grouped.check_experts(experts)
    launching.check_flags(bias=bias, block=block, zeros=zeros)
    if codes not in CODES.values():
        raise ArgumentError("codes", codes, f"must be one of {tuple(CODES.values())}", "use int8")
    check_flags(codes, block, zeros)
    check_out_dtype(out_dtype, codes)
    numerics, at = numerics_of(codes, block, zeros, accumulate), Target.parse(target)
    facts = Facts(n, k, numerics=numerics, out_dtype=out_dtype, bias=bias, experts=experts)
    return plans.requests(facts, plans.tokens_of(facts, m, at), at)


def quantizers(
    k: int, *, m: Sequence[int], dtype: str, target: Target, codes: str, block: bool, zeros: bool = False,
    static: bool = False, smooth: bool = False, ue8m0: bool = False,
) -> list[KernelRequest]:  # fmt: skip
    """What quantizes m tokens of k values for a weight; arguments as of `kernel_requests`."""
    facts = dict(dtype=dtype, gain=smooth, target=target)
    form = (
        "e4m3_block128_ue8m0"
        if ue8m0
        else "e4m3_block128"
        if block
        else f"{codes}_static"
        if static
        else "int8_asymmetric"
        if zeros
        else ""
    )
    make = w8_activations.plan if form else w8_activations.dynamic
    own = {"form": form} if form else {"codes": codes}
    return list(dict.fromkeys(make(tokens, k, **own, **facts) for tokens in m))


def weight_requests(
    w: PackedWeight,
    m: int | Sequence[int],
    dtype: torch.dtype | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    accumulate: str = "auto",
    bias: bool | None = None,
) -> list[KernelRequest]:
    """The kernels that `gemm` will use for `w` and these M on the current GPU, to compile them up front.

    Args:
        w: packed weight on a GPU. m: numbers of tokens. dtype: of 16-bit activations; None for quantized ones.
        out_dtype: None takes dtype, or float16. accumulate: see `gemm`. bias: whether one is added; None: w's own.

    Raises:
        ArgumentError: w on no GPU, or a value that no kernel serves. TargetError: w was packed for another GPU.
    """
    target, device = launching.targets(w.target, w.device)
    out = str(out_dtype or dtype or "torch.float16").removeprefix("torch.")
    numerics = numerics_of(w.codes, w.block, w8_activations.has_zeros(w), accumulate)
    facts = Facts(
        w.n, w.k, numerics=numerics, out_dtype=out, bias=w.bias is not None if bias is None else bias
    )  # fmt: skip
    tokens = launching.tokens_of(m)
    name = None if dtype is None else str(dtype).removeprefix("torch.")
    before = [] if name is None else [w8_activations.requests(w, t, name, target, device) for t in tokens]
    return plans.requests(facts, tokens, target, device, before)


def check_activations(x: Activations, w: PackedWeight) -> None:
    """Raise ArgumentError unless activations are such as a weight multiplies."""
    block = isinstance(x, BlockQuantizedActivations)
    if block != w.block or x.codes != w.codes:
        seen = f"{x.codes}{' in blocks' if block else ''}"
        remedy = "quantize them with quantize_activations(x, w)"
        raise ArgumentError("x", seen, f"must be {w.ACTIVATIONS} codes for {w!r}", remedy)
    if block and not x.column_scales:
        remedy = "pass column_scales=True to what makes them"
        raise ArgumentError("x", "scales [M, K / 128]", "must have column_scales [K / 128, M]", remedy)
    if not x.shape or x.shape[-1] != w.k:
        constraint = f"its last dimension must be K = {w.k}"
        raise ArgumentError("x", list(x.shape), constraint, "pass activations [..., K]")


def check_out_dtype(out_dtype: str, codes: str) -> None:
    """Raise ArgumentError unless y can be written in it."""
    known = OUT_DTYPES if codes == "int8" else OUT_DTYPES[:2]
    if out_dtype not in known:
        raise ArgumentError("out_dtype", out_dtype, f"must be one of {known} of {codes} codes", "cast y")


def check_tensors(x: Activations) -> None:
    """Raise ArgumentError unless the tensors of activations have the shapes and dtypes of their description."""
    if isinstance(x, QuantizedActivations):
        x.check()
        return
    m, columns = len(x.q), quantized.padded(x.k)
    scales = (-(-x.k // BLOCK), -(-m // 4) * 4)
    for name, shape, dtype in (("q", (m, columns), "float8_e4m3fn"), ("scales", scales, "float32")):
        weights.check_tensor(x, name, shape, dtype, "quantize them with quantize_activations")
