"""Kernels of products: which one serves M tokens, with what launch sizes, and all that a weight may need."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any, ClassVar

from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.targets import Target
from terrazzo.ops import grouped, launching
from terrazzo.ops.launching import Plan
from terrazzo.schedules import linear_spaces, multistage, records, spaces, stream_k
from terrazzo.schedules.problem import Gemm

Tuned = dict[str, int | str | bool]


@dataclass(frozen=True)
class Facts(ABC):
    """What tells the kernels of one product from those of another, besides M and the GPU.

    Attributes:
        n, k: of the weight, or of each expert's. bias: whether one is added. experts: their number, 0 without.
    """

    n: int
    k: int
    _: KW_ONLY
    bias: bool = False
    experts: int = 0

    programs: ClassVar[Mapping[str, ModuleType]]
    """What schedules call a program -> the module that builds it."""

    @property
    @abstractmethod
    def record(self) -> str:
        """The name under which records of a weight alone are kept."""

    @property
    def recorded(self) -> str:
        """The name under which records are kept."""
        return f"{self.record}_grouped" if self.experts else self.record

    @property
    def kernels(self) -> str:
        """What names of kernels begin with."""
        return self.record

    @abstractmethod
    def check(self, target: Target) -> None:
        """Raise ArgumentError for what no kernel of a target serves."""

    @abstractmethod
    def gemm(self) -> Gemm:
        """What schedules know of it."""

    @abstractmethod
    def params(self) -> dict[str, Any]:
        """Arguments of `build` ahead of the schedule's."""

    @abstractmethod
    def tuned(self) -> Tuned:
        """What tells one tuned product from another, besides M."""

    def choose(self, gemm: Gemm, target: Target, m: int, device: Target | None) -> tuple[str, Any]:
        """Program and schedule."""
        return spaces.choose(linear_spaces.of(gemm), self.recorded, self.tuned(), target, m, device)

    def build(self, program: str, schedule: Any) -> dict[str, Any]:
        """All arguments of `build`."""
        return self.params() | schedule.params() | ({"experts": self.experts} if self.experts else {})

    def stand_in(self, request: KernelRequest) -> KernelRequest | None:
        """See `Plan`."""
        return None


@lru_cache(maxsize=4096)
def plan(
    m: int, facts: Facts, target: Target, device: Target | None = None, chosen: tuple[str, Any] | None = None
) -> Plan:
    """Kernel and launch sizes for M = m >= 1, with experts for the tokens of all of them together.

    Args:
        device: the GPU that runs it where that is newer than `target`. chosen: program and schedule; None takes what
            records or the cost model choose.

    Raises:
        ArgumentError: what no kernel serves.
    """
    facts.check(target)
    gemm = facts.gemm()
    name, s = chosen or facts.choose(gemm, target, m, device)
    program = facts.programs[name]
    label = "grouped" if facts.experts else program.__name__.rpartition(".")[2]
    entry, params = f"{program.__name__}:build", tuple(facts.build(name, s).items())
    flags = launching.ptx_flags(target, device)
    request = KernelRequest(f"{facts.kernels}.{label}", entry, params, target, program.PASS_CONFIGS, flags)
    if name == "multistage":
        return Plan(request, *multistage.launch_sizes(s, gemm, m), ())
    if name == "small_batch":
        return Plan(request, *s.workspace(gemm.row_blocks * 64), (), facts.stand_in(request))
    if name == "persistent":
        slots = s.ctas * (device or target).sms  # a CTA leaves at most one sum
        return Plan(request, (slots, s.sums // 4, s.warps * 32, 4), (slots,), (), listed=s)
    if facts.experts:
        return Plan(request, *s.workspace(target.sms), ())
    part = stream_k.partition(s, gemm, device or target, m)
    return Plan(request, *s.workspace(part.grid), (part.shared,), facts.stand_in(request))


records.on_change(plan.cache_clear)


def tokens_of(facts: Facts, m: int | Iterable[int] | None, target: Target) -> tuple[int, ...]:
    """The numbers of tokens that a request names; None: one of every bucket, and those of tuned records."""
    if m is not None:
        return launching.tokens_of(m)
    every = grouped.all_tokens(facts.experts) if facts.experts else launching.ALL_TOKENS
    return (*every, *records.tokens(facts.recorded, facts.tuned(), target))


def requests(
    facts: Facts, m: Iterable[int], target: Target, device: Target | None = None, before: Iterable[KernelRequest] = ()
) -> list[KernelRequest]:
    """The distinct kernels for some numbers of tokens, then those of `before`."""
    plans = (plan(tokens, facts, target, device).request for tokens in m)
    return list(dict.fromkeys([*plans, *before]))
