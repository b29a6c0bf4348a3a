"""y = x w^T: validation, choice of kernel and schedule, workspace, launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.targets import Target
from terrazzo.ops import grouped, launching
from terrazzo.ops.call import plans
from terrazzo.ops.grouped import GroupedWeight
from terrazzo.ops.linear import multistage as multistage_program
from terrazzo.ops.linear import small_batch as small_batch_program
from terrazzo.ops.linear import stream_k as stream_k_program
from terrazzo.ops.linear.operand import Operand
from terrazzo.ops.linear.sizes import shapeless
from terrazzo.ops.products.codes import get_codes
from terrazzo.ops.products.table import of_codes
from terrazzo.ops.products.ways import choose_way, numerics_of
from terrazzo.ops.weight_only.packed import WeightOnly
from terrazzo.schedules import linear_spaces, stream_k
from terrazzo.schedules.problem import Gemm

if TYPE_CHECKING:
    import torch


_SHAPED = 16
"""Tokens of a tile of stream_k whose kernels keep their shape: without one they took 2 %, up to 5 % (H100). Those
without a shape stand in until they are compiled."""


def has_shape(weight: str, schedule: stream_k.StreamK) -> bool:
    """Whether stream_k's kernel for a format and a schedule is made for one [n, k]."""
    shaped = of_codes(weight).shaped
    return shaped is None or schedule.block_tokens <= _SHAPED or schedule.warpgroups in shaped


@dataclass(frozen=True, kw_only=True)
class Facts(plans.Facts):
    """Of a weight for 16-bit activations.

    Attributes:
        group_size: k of a scale, or k for one group. symmetric: without zero points. scale_dtype: of scales.
        dtype: of activations and output. numerics: see `gemm`. weight: name of the format.
    """

    group_size: int
    symmetric: bool
    scale_dtype: str
    dtype: str
    numerics: str = "auto"
    weight: str = "u4"

    programs: ClassVar = {
        "small_batch": small_batch_program,
        "stream_k": stream_k_program,
        "grouped": stream_k_program,
        "multistage": multistage_program,
    }

    @property
    def record(self) -> str:
        return of_codes(self.weight).record

    @property
    def group(self) -> int:
        """What programs call a group: 0 where one scale serves the whole row."""
        return 0 if self.group_size >= self.k and get_codes(self.weight).one_group else self.group_size

    def operand(self, few: bool = False) -> Operand:
        """What programs are made for. few: those of small batches."""
        way = self.numerics
        if way == "auto":
            way = choose_way(get_codes(self.weight), self.scale_dtype, self.dtype, few).name
        return Operand(self.group, self.symmetric, self.scale_dtype, self.dtype, way, self.weight)

    def check(self, target: Target) -> None:
        if self.experts:
            check_request(self)

    def gemm(self) -> Gemm:
        return problem_of(self.operand(), self.n, self.columns, self.experts)

    @property
    def columns(self) -> int:
        """Of x: rows are multiples of 16 bytes."""
        return -(-self.k // 8) * 8

    def params(self) -> dict[str, Any]:
        own = dict(n=self.n, k=self.columns, group=self.group, symmetric=self.symmetric, scale_dtype=self.scale_dtype)
        own |= dict(dtype=self.dtype, bias=self.bias)
        return own | ({"weight": self.weight} if of_codes(self.weight).named else {})

    def tuned(self) -> plans.Tuned:
        own = dict(n=self.n, k=self.k, group=self.group, symmetric=self.symmetric, scale_dtype=self.scale_dtype)
        own["dtype"] = self.dtype
        return own | (dict(experts=self.experts, numerics=self.operand().numerics) if self.experts else {})

    def choose(self, gemm: Gemm, target: Target, m: int, device: Target | None) -> tuple[str, Any]:
        if self.experts or self.numerics == "auto":
            return super().choose(gemm, target, m, device)
        return linear_spaces.of(gemm).heuristic(target, m)

    def build(self, program: str, schedule: Any) -> dict[str, Any]:
        params = self.params() | schedule.params() | {"numerics": self.operand(program == "small_batch").numerics}
        if self.experts:
            return params | {"experts": self.experts}
        return shapeless(params) if program == "stream_k" and not has_shape(self.weight, schedule) else params

    def stand_in(self, request: KernelRequest) -> KernelRequest | None:
        return stand_in(request)


def facts_of(w: WeightOnly[Any], dtype: str, numerics: str, bias: bool, experts: int = 0) -> Facts:
    """Of a packed weight."""
    own = dict(group_size=w.group_size, symmetric=w.symmetric, scale_dtype=w.scale_dtype, weight=w.weight)
    return Facts(w.n, w.k, **own, dtype=dtype, numerics=numerics, bias=bias, experts=experts)


def check_request(facts: Facts) -> None:
    """Raise ArgumentError for what no weight is, and for experts that no kernel has."""
    launching.check_shape(facts.n, facts.k)
    if facts.experts != 0 or type(facts.experts) is not int:
        grouped.check_experts(facts.experts)
    check_group(facts.group_size, facts.k, facts.weight)
    launching.check_flags(symmetric=facts.symmetric, bias=facts.bias)
    check_numerics(facts.numerics, facts.weight)


def stand_in(request: KernelRequest) -> KernelRequest | None:
    """The kernel that serves other weights, too, and gives the bits of one that knows its shape: of stream_k any, of
    small_batch those of the same k. None where there is no such kernel."""
    params = dict(request.params)
    if not params.get("n") or params.get("experts") or params.get("joined"):
        return None
    any_of = {stream_k_program: shapeless, small_batch_program: small_batch_program.of_any_rows}
    program = next((it for it in any_of if request.entry == f"{it.__name__}:build"), None)
    return program and replace(request, params=tuple(any_of[program](params).items()))


def problem_of(operand: Operand, n: int, k: int, experts: int = 0) -> Gemm:
    """What schedules know of a product."""
    return Gemm(
        n, k, operand.records_per(128), operand.group_bytes, bits=operand.format.bits, weight=operand.weight,
        scales="post" if operand.scales_sums else "fold", symmetric=operand.symmetric, experts=experts,
    )  # fmt: skip


def kernel_requests(
    n: int,
    k: int,
    *,
    group_size: int,
    symmetric: bool,
    scale_dtype: str,
    m: int | Sequence[int] | None = None,
    dtype: str = "float16",
    target: Target | str,
    numerics: str = "auto",
    bias: bool = False,
    weight: str = "u4",
) -> list[KernelRequest]:
    """The kernels that serve an [n, k] weight: for the given M, or for every M (None). Needs no GPU.

    Args:
        m: numbers of tokens. group_size: of the format's, or k for one group. scale_dtype: of scales.
        symmetric: without zero points. bias: whether the weight has one.
        dtype: of activations and output, "float16" or "bfloat16".
        numerics: see `gemm`. weight: name of the format.

    Raises:
        ArgumentError: a value that no kernel serves. TargetError: an unknown target.
    """
    own = dict(group_size=group_size, symmetric=symmetric, scale_dtype=scale_dtype, dtype=dtype, weight=weight)
    facts, at = Facts(n, k, **own, numerics=numerics, bias=bias), Target.parse(target)
    check_request(facts)
    return plans.requests(facts, plans.tokens_of(facts, m, at), at)


def grouped_requests(
    n: int,
    k: int,
    experts: int,
    *,
    group_size: int,
    symmetric: bool,
    scale_dtype: str,
    m: int | tuple[int, ...] | None = None,
    dtype: str = "float16",
    numerics: str = "auto",
    bias: bool = False,
    target: Target | str = "sm_90a",
    weight: str = "u4",
) -> list[KernelRequest]:
    """The kernels that `grouped_gemm` uses for these M (None: M of every bucket). Needs no GPU.

    Args:
        n, k: of each expert's weight. experts: number of them.
        group_size: of the format's, or k for one group. scale_dtype: of scales. symmetric: without zero points.
        m: tokens of all experts together.
        dtype: of activations and output, "float16" or "bfloat16".
        numerics: see `grouped_gemm`. bias: whether one is added. weight: name of the format.

    Raises:
        ArgumentError: a value that no kernel serves.
        TargetError: an unknown target.
    """
    own = dict(group_size=group_size, symmetric=symmetric, scale_dtype=scale_dtype, dtype=dtype, weight=weight)
    facts, at = Facts(n, k, **own, numerics=numerics, bias=bias, experts=experts), Target.parse(target)
    grouped.check_experts(experts)
    check_request(facts)
    return plans.requests(facts, plans.tokens_of(facts, m, at), at)


def weight_requests(
    w: WeightOnly[Any], m: int | Sequence[int], dtype: torch.dtype, numerics: str = "auto", bias: bool | None = None
) -> list[KernelRequest]:
    """The kernels that `gemm` will use for `w` and these M on the current GPU, to compile them up front.

    Args:
        w: packed weight on a GPU. m: numbers of tokens.
        dtype: of x, torch.float16 or torch.bfloat16. numerics: see `gemm`.
        bias: whether one is added; None: w's own.

    Raises:
        ArgumentError: w on no GPU, or m, dtype or numerics that no kernel serves.
        TargetError: w was packed for another GPU.
    """
    check_numerics(numerics, w.weight)
    target, device = launching.targets(w.target, w.device)
    facts = facts_of(w, str(dtype)[6:], numerics, w.bias is not None if bias is None else bias)
    return plans.requests(facts, launching.tokens_of(m), target, device)


def experts_requests(
    w: GroupedWeight, m: int | tuple[int, ...], dtype: str, numerics: str = "auto", bias: bool | None = None
) -> list[KernelRequest]:
    """The kernels that `grouped_gemm` will use for `w` and these M on the current GPU, to compile them up front.

    Args:
        m: tokens of all experts together. dtype: of x, "float16" or "bfloat16". numerics: see `grouped_gemm`.
        bias: whether one is added; None: w's own.

    Raises:
        ArgumentError: w on no GPU, or m, dtype or numerics that no kernel serves.
        TargetError: w was packed for another GPU.
    """
    s = w.stacked
    target, device = launching.targets(s.target, w.device)
    facts = facts_of(s, dtype, numerics, s.bias is not None if bias is None else bias, len(w))
    return plans.requests(facts, launching.tokens_of(m), target, device)


def check_numerics(numerics: str, weight: str = "u4") -> None:
    known = ("auto", *numerics_of(get_codes(weight)))
    if numerics not in known:
        raise ArgumentError("numerics", numerics, f"must be one of {known}", "leave it 'auto'")


def check_group(group_size: int, k: int, weight: str) -> None:
    """Raise ArgumentError unless kernels of the format read groups of this size."""
    form = get_codes(weight)
    if form.one_group or group_size not in form.groups:
        launching.check_group(group_size, k, form.groups)
    if not form.one_group and group_size not in form.groups:
        raise ArgumentError("group_size", group_size, f"must be one of {form.groups} in {weight}", "leave it out")
