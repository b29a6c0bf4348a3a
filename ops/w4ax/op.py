"""y = x w^T in mixed W4A4 and W4A8: validation, choice of kernel and schedule, workspace, launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from terrazzo.lowering.errors import ArgumentError, CaptureError
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.targets import Target
from terrazzo.ops import grouped, launching
from terrazzo.ops.call import plans
from terrazzo.ops.lasting import lasting
from terrazzo.ops.linear.mixed import integer as integer_program
from terrazzo.ops.linear.mixed import persistent as persistent_program
from terrazzo.ops.linear.mixed import problem
from terrazzo.ops.linear.mixed import small_batch as small_batch_program
from terrazzo.ops.linear.mixed import stream_k as stream_k_program
from terrazzo.ops.linear.mixed.scales import GRANULARITIES, OUT_DTYPES, UNIFORM
from terrazzo.ops.w4ax import activations
from terrazzo.ops.w4ax.activations import QuantizedActivations
from terrazzo.ops.w4ax.fmpq import BLOCK
from terrazzo.ops.w4ax.format import SCALES, PackedWeight, native
from terrazzo.schedules import w4ax as schedules
from terrazzo.schedules.problem import Gemm

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Facts(plans.Facts):
    """Of mixed W4A4 and W4A8.

    Attributes:
        blocks8: INT8 blocks. out_dtype: of y. two_level: whether the weight's scales are; those of experts are.
    """

    blocks8: int
    out_dtype: str
    two_level: bool = False

    programs: ClassVar = {
        "small_batch": small_batch_program, "stream_k": stream_k_program, "integer": integer_program,
        "grouped": integer_program, "persistent": persistent_program,
    }  # fmt: skip
    record = "w4ax"

    def check(self, target: Target) -> None:
        if self.experts:
            check_shape(self.n, self.k, self.experts, self.blocks8)
        if self.out_dtype not in OUT_DTYPES:
            raise ArgumentError("out_dtype", self.out_dtype, f"must be one of {OUT_DTYPES}", "leave out_dtype out")
        if native(target) and self.experts:  # `native` raises where no program is
            arch = target.arch
            constraint = f"experts of W4Ax are multiplied by warpgroup instructions, which {arch} does not have"
            raise ArgumentError("target", arch, constraint, "call gemm for each expert, or use experts of w4a8")

    def gemm(self) -> Gemm:
        own, out_bytes = self.params(), problem.Gemm(**self.params()).out_bytes
        return Gemm.of_blocks(self.n, own["k"], self.blocks8, out_bytes, self.two_level, experts=self.experts)

    def params(self) -> dict[str, Any]:
        own = dict(n=self.n, k=-(-self.k // BLOCK) * BLOCK, blocks8=self.blocks8, out_dtype=self.out_dtype)
        return own | dict(bias=self.bias, two_level=self.two_level)

    def tuned(self) -> plans.Tuned:
        own = dict(n=self.n, k=self.k, blocks8=self.blocks8, out_dtype=self.out_dtype)
        own |= {"scales": "two_level"} if self.two_level else {}
        return own | ({"experts": self.experts} if self.experts else {})


def check_shape(n: int, k: int, experts: int, blocks8: int) -> None:
    """Raise ArgumentError for sizes that no experts have."""
    grouped.check_request(n, k, experts, BLOCK, (BLOCK,))
    if type(blocks8) is not int or not 0 <= blocks8 <= -(-k // BLOCK):
        raise ArgumentError("blocks8", blocks8, f"must be 0..{-(-k // BLOCK)}", "count blocks of 128")


def kernel_requests(
    n: int,
    k: int,
    *,
    group_size: int = BLOCK,
    blocks8: int | None = None,
    m: int | Sequence[int] | None = None,
    dtype: str = "float16",
    out_dtype: str | None = None,
    target: Target | str,
    bias: bool = False,
    permuted: bool = True,
    norm: bool = False,
    granularity: str = GRANULARITIES[0],
    scales: str | None = None,
    front: str = "none",
) -> list[KernelRequest]:
    """The kernels that serve an [n, k] weight: for the given M, or for every M (None). Needs no GPU.

    Args:
        m: numbers of tokens. group_size: of the weight's scales: 128, the block.
        blocks8: INT8 blocks; None takes a quarter of them, as the paper's kernel measurements.
        dtype: of the activations that are quantized, "float16" or "bfloat16"; None leaves their kernel out.
        out_dtype: "float16", "bfloat16" or "float32"; None takes dtype.
        bias, permuted: whether the weight has a bias, a permutation. norm, granularity: see `quantize_activations`.
        scales: of the weight, "two_level" or "block"; None takes what `granularity` goes with.
        front: what the quantizer is asked for besides: "residual", an `activation` of its own, or "none".

    Raises:
        ArgumentError: a value that no kernel serves. TargetError: an unknown target.
    """
    launching.check_shape(n, k)
    if scales not in (None, *SCALES):
        raise ArgumentError("scales", scales, f"must be one of {SCALES}", "leave it out")
    if dtype not in (None, *activations.DTYPES):
        raise ArgumentError("dtype", dtype, f"must be one of {activations.DTYPES}", "cast the activations")
    if granularity not in GRANULARITIES:
        raise ArgumentError("granularity", granularity, f"must be one of {GRANULARITIES}", "use 'block'")
    activations.check_front(front, k)
    if group_size != BLOCK:
        raise ArgumentError("group_size", group_size, f"must be {BLOCK}, the block", "leave it out")
    launching.check_flags(bias=bias, permuted=permuted, norm=norm)
    at = Target.parse(target)
    launching.tokens_of(m)
    high = round(0.25 * -(-k // BLOCK)) if blocks8 is None else blocks8
    out, two_level = out_dtype or dtype or "float16", (scales or granularity) == "two_level"
    _check_granularity(granularity, two_level, native(at), "granularity")
    product = Facts(n, k, blocks8=high, out_dtype=out, bias=bias, two_level=two_level)
    tokens = plans.tokens_of(product, m, at)
    found = plans.requests(product, tokens, at)
    facts = dict(permuted=permuted, norm=norm, granularity=granularity, wide=not native(at), front=front, target=at)
    before = [activations.plan(t, k, high, dtype=dtype, **facts) for t in tokens if dtype]
    return list(dict.fromkeys([*found, *before]))


def grouped_requests(
    n: int,
    k: int,
    experts: int,
    *,
    m: int | tuple[int, ...] | None = None,
    blocks8: int | None = None,
    dtype: str | None = None,
    out_dtype: str | None = None,
    bias: bool = False,
    permuted: bool = True,
    norm: bool = False,
    front: str = "none",
    target: Target | str = "sm_90a",
) -> list[KernelRequest]:
    """The kernels that `grouped_gemm` uses for these M (None: M of every bucket). Needs no GPU.

    Args:
        n, k: of each expert's weight. experts: number of them. m: tokens of all experts together.
        blocks8: INT8 blocks; None takes a quarter of them.
        dtype: of activations that are quantized, "float16" or "bfloat16"; None leaves their kernel out.
        out_dtype: "float16", "bfloat16" or "float32"; None takes dtype, or "float16".
        bias: whether one is added. permuted, norm, front: see `kernel_requests`.

    Raises:
        ArgumentError: a value that no kernel serves, or a target without warpgroup instructions.
        TargetError: an unknown target.
    """
    high = round(0.25 * -(-k // BLOCK)) if blocks8 is None and type(k) is int else blocks8
    check_shape(n, k, experts, high)
    launching.check_flags(bias=bias, permuted=permuted, norm=norm)
    if dtype not in (None, *activations.DTYPES):
        raise ArgumentError("dtype", dtype, f"must be one of {activations.DTYPES}", "cast the activations")
    out, at = out_dtype or dtype or "float16", Target.parse(target)
    product = Facts(n, k, blocks8=high, out_dtype=out, bias=bias, two_level=True, experts=experts)
    tokens = plans.tokens_of(product, m, at)
    found = plans.requests(product, tokens, at)
    activations.check_front(front, k)
    facts = dict(permuted=permuted, norm=norm, granularity="two_level", wide=True, front=front, target=at)
    return list(dict.fromkeys([*found, *(activations.plan(t, k, high, dtype=dtype, **facts) for t in tokens if dtype)]))


def weight_requests(
    w: PackedWeight,
    m: int | Sequence[int],
    dtype: torch.dtype | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    bias: bool | None = None,
    norm: bool = False,
    granularity: str | None = None,
    front: str = "none",
) -> list[KernelRequest]:
    """The kernels that `gemm` will use for `w` and these M on the current GPU, to compile them up front.

    Args:
        w: packed weight on a GPU. m: numbers of tokens.
        dtype: of 16-bit activations; None for quantized ones. out_dtype: None takes dtype, or float16.
        bias: whether one is added; None: w's own.
        norm: whether `quantize_activations` gets an `rms_weight`. granularity: its own; None: as the weight's scales.
        front: see `kernel_requests`.

    Raises:
        ArgumentError: w on no GPU, or a value that no kernel serves. TargetError: w was packed for another GPU.
    """
    target, device = launching.targets(w.target, w.device)
    out = str(out_dtype or dtype or "torch.float16").removeprefix("torch.")
    has_bias = w.bias is not None if bias is None else bias
    tokens, at = launching.tokens_of(m), dict(target=target, device=device)
    product = Facts(w.n, w.k, blocks8=w.blocks8, out_dtype=out, bias=has_bias, two_level=w.two_level)
    before, granularity = [], granularity or activations.default_granularity(w)
    if dtype is not None:
        activations.check_front(front, w.k)
        facts = dict(permuted=bool(w.order), norm=norm, granularity=granularity, wide=not w.native, front=front)
        before = [activations.plan(t, w.k, w.blocks8, dtype=str(dtype)[6:], **facts, **at) for t in tokens]
    return plans.requests(product, tokens, target, device, before)


_lists: dict[tuple, tuple[torch.Tensor, ...]] = {}


def work_lists(
    w: PackedWeight, m: int, listed: schedules.Persistent | None, target: Target, device: Target, on: torch.device
) -> tuple[torch.Tensor, ...]:
    """Items of a `persistent` launch and where each CTA's begin; kept for good, as captured graphs read them. Of other
    programs nothing.

    Raises:
        CaptureError: a CUDA graph is being captured, and there are none for this M yet.
    """
    if listed is None:
        return ()
    import torch

    gemm, ctas = Gemm.of_blocks(w.n, w.blocks * BLOCK, w.blocks8), listed.ctas * device.sms
    key = (listed, gemm, target, m, ctas, on)
    if key in _lists:
        return _lists[key]
    if not launching.may_keep(on):
        raise CaptureError(
            f"w4ax.gemm with M = {m} never ran on {on}, and a CUDA graph is being captured; call it once with each "
            "M before the capture"
        )
    made = schedules.work_plan(listed, gemm, target, m, ctas)
    items, first, _ = schedules.work_list(made, -(-m // listed.block_tokens))
    make = lambda: tuple(torch.tensor(rows, dtype=torch.int32, device=on) for rows in (items, first))
    _lists[key] = lasting(on, make)
    launching.settle(on)
    return _lists[key]


def check_inputs(x: QuantizedActivations, w: PackedWeight) -> None:
    """Raise ArgumentError unless activations were quantized for a weight; of experts, for their stacked one."""
    launching.check_no_grad(x.q8, "gemm")
    if x.k != w.k:
        raise ArgumentError("x", list(x.shape), f"its last dimension must be K = {w.k}", "pass activations [..., K]")
    if (x.blocks8, x.order) != (w.blocks8, w.order) or (x.wide == w.native and x.blocks8 != x.blocks):
        seen = f"{x!r}, order {x.order!r}{', wide' if x.wide else ''}"
        constraint = f"must be quantized for {w!r}, order {w.order!r}"
        raise ArgumentError("x", seen, constraint, "call quantize_activations(x, w) with this weight")
    _check_granularity(x.granularity, w.two_level, w.native, "x")
    if x.device != w.device:
        raise launching.elsewhere(x.q8, w.device)


def _check_granularity(granularity: str, two_level: bool, native: bool, argument: str) -> None:
    """Refuse scales of activations that the kernels for a weight cannot take."""
    if two_level and not native and granularity not in UNIFORM:
        raise ArgumentError(
            argument, f"{granularity!r} scales", f"must be one of {UNIFORM} for a weight with two-level scales",
            "quantize activations with granularity='two_level', or the weight with scales='block'",
        )  # fmt: skip
