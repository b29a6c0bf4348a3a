"""y = x w^T in mixed W4A4 and W4A8: validation, choice of kernel and schedule, workspace, launch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from terrazzo.lowering.errors import ArgumentError, CaptureError
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.targets import Target
from terrazzo.ops import launching
from terrazzo.ops.lasting import lasting
from terrazzo.ops.launching import Plan
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
from terrazzo.schedules import linear_spaces, records, spaces, stream_k
from terrazzo.schedules import w4ax as schedules
from terrazzo.schedules.problem import Gemm

if TYPE_CHECKING:
    import torch

_PROGRAMS = {
    "small_batch": small_batch_program,
    "stream_k": stream_k_program,
    "integer": integer_program,
    "persistent": persistent_program,
}


@lru_cache(maxsize=1024)
def plan(
    m: int,
    n: int,
    k: int,
    blocks8: int,
    *,
    out_dtype: str,
    bias: bool,
    two_level: bool = False,
    target: Target,
    device: Target | None = None,
) -> Plan:
    """Kernel and launch sizes for M = m >= 1. `device` is the GPU that runs it where that is newer than `target`."""
    if out_dtype not in OUT_DTYPES:
        raise ArgumentError("out_dtype", out_dtype, f"must be one of {OUT_DTYPES}", "leave out_dtype out")
    native(target)  # raises where no program is
    depth = -(-k // BLOCK) * BLOCK
    common = dict(n=n, k=depth, blocks8=blocks8, out_dtype=out_dtype, bias=bias, two_level=two_level)
    gemm = Gemm.of_blocks(n, depth, blocks8, problem.Gemm(**common).out_bytes, two_level)
    facts = tuning_facts(n, k, blocks8, out_dtype, two_level)
    name, schedule = spaces.choose(linear_spaces.of(gemm), "w4ax", facts, target, m, device)
    program = _PROGRAMS[name]
    request = KernelRequest(
        f"w4ax.{name}",
        f"{program.__name__}:build",
        tuple((common | schedule.params()).items()),
        target,
        program.PASS_CONFIGS,
        launching.ptx_flags(target, device),
    )
    if name == "persistent":
        slots = schedule.ctas * (device or target).sms  # a CTA leaves at most one sum
        return Plan(request, (slots, schedule.sums // 4, schedule.warps * 32, 4), (slots,), (), listed=schedule)
    if name == "small_batch":
        return Plan(request, *schedule.workspace(gemm.row_blocks * 64), ())
    part = stream_k.partition(schedule, gemm, device or target, m)
    return Plan(request, *schedule.workspace(part.grid), (part.shared,))


def tuning_facts(n: int, k: int, blocks8: int, out_dtype: str, two_level: bool) -> dict[str, int | str]:
    """What tells one tuned weight from another, besides M."""
    facts = dict(n=n, k=k, blocks8=blocks8, out_dtype=out_dtype)
    return facts | ({"scales": "two_level"} if two_level else {})


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
    at, tokens = Target.parse(target), launching.tokens_of(m)
    high = round(0.25 * -(-k // BLOCK)) if blocks8 is None else blocks8
    out, two_level = out_dtype or dtype or "float16", (scales or granularity) == "two_level"
    _check_granularity(granularity, two_level, native(at), "granularity")
    tokens += tuple(records.tokens("w4ax", tuning_facts(n, k, high, out, two_level), at)) if m is None else ()
    plans = [plan(t, n, k, high, out_dtype=out, bias=bias, two_level=two_level, target=at) for t in tokens]
    facts = dict(permuted=permuted, norm=norm, granularity=granularity, wide=not native(at), front=front, target=at)
    before = [activations.plan(t, k, high, dtype=dtype, **facts) for t in tokens if dtype]
    return list(dict.fromkeys([*launching.requests_of(plans), *before]))


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
    form = dict(out_dtype=out, bias=has_bias, two_level=w.two_level)
    plans = [plan(t, w.n, w.k, w.blocks8, **form, **at) for t in tokens]
    before, granularity = [], granularity or activations.default_granularity(w)
    if dtype is not None:
        activations.check_front(front, w.k)
        facts = dict(permuted=bool(w.order), norm=norm, granularity=granularity, wide=not w.native, front=front)
        before = [activations.plan(t, w.k, w.blocks8, dtype=str(dtype)[6:], **facts, **at) for t in tokens]
    return list(dict.fromkeys([*launching.requests_of(plans), *before]))


records.on_change(plan.cache_clear)
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
