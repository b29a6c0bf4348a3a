"""One adapter for each operator that can be tuned: its weight's facts, search space, kernel of a schedule, bounds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from terrazzo.autotune.database import Problem
from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.targets import Target
from terrazzo.schedules import records, spaces
from terrazzo.schedules import w4a8 as integer
from terrazzo.schedules.problem import WeightOnlyGemm
from terrazzo.schedules.roofline import Roofline, weight_only_gemm

if TYPE_CHECKING:
    from terrazzo.autotune.gemm_bench import Shape
    from terrazzo.ops.launching import Plan

DTYPES = ("float16", "bfloat16")


class Operator(ABC):
    """What tuning must know of an operator."""

    name: str

    @abstractmethod
    def facts(self, n: int, k: int, *, dtype: str, group: int | None, symmetric: bool) -> dict[str, Any]:
        """The facts of an [n, k] weight under which records are kept. group: None takes the operator's usual one.

        Raises:
            ArgumentError: a format that the operator does not have.
        """

    @abstractmethod
    def space(self, problem: Problem) -> spaces.Space:
        """The schedules of a problem."""

    @abstractmethod
    def _plan(self, problem: Problem, target: Target) -> Plan:
        """The operator's plan, not a kept one."""

    @abstractmethod
    def beside(self, problem: Problem, target: Target) -> list[KernelRequest]:
        """Kernels that a measurement needs besides the schedule's own."""

    @abstractmethod
    def roofline(self, problem: Problem, target: Target) -> Roofline:
        """What bounds the problem."""

    @abstractmethod
    def shape(self, problem: Problem, target: Target) -> Shape:
        """The problem's weight on the GPU, with cuBLAS beside it."""

    def request(self, problem: Problem, program: str, params: Mapping[str, int], target: Target) -> KernelRequest:
        """The kernel of a schedule, as the operator would ask for it.

        Raises:
            ArgumentError: the schedule cannot serve the problem.
        """
        with records.forced(self.name, program, params):
            return self._plan(problem, target).request


class W4A16(Operator):
    name = "w4a16"

    def facts(self, n: int, k: int, *, dtype: str, group: int | None, symmetric: bool) -> dict[str, Any]:
        from terrazzo.ops.w4a16 import op, operand

        size = group or 128
        operand.Operand(0 if size >= k else size, symmetric, dtype, dtype, "post")
        return op.tuning_facts(n, k, size, symmetric, dtype, dtype)

    def space(self, problem: Problem) -> spaces.W4A16:
        facts = dict(problem.facts)
        of = self._operand(facts)
        gemm = WeightOnlyGemm(facts["n"], -(-facts["k"] // 8) * 8, of.groups_per(128), of.record_bytes)
        return spaces.W4A16(gemm, facts["scale_dtype"] != facts["dtype"], facts["symmetric"])

    def _operand(self, facts: Mapping[str, Any]) -> Any:
        from terrazzo.ops.w4a16.operand import Operand

        return Operand(facts["group"], facts["symmetric"], facts["scale_dtype"], facts["dtype"], "post")

    def _plan(self, problem: Problem, target: Target) -> Plan:
        from terrazzo.ops.w4a16 import op

        facts = dict(problem.facts)
        own = {name: facts[name] for name in ("symmetric", "scale_dtype", "dtype")}
        size = facts["group"] or facts["k"]
        made = op.plan.__wrapped__  # not the kept one, which may answer with another schedule
        return made(problem.m, problem.n, problem.k, group_size=size, **own, bias=False, numerics="auto", target=target)

    def beside(self, problem: Problem, target: Target) -> list[KernelRequest]:
        return []

    def roofline(self, problem: Problem, target: Target) -> Roofline:
        from terrazzo.layouts.converters import get_converter

        facts = dict(problem.facts)
        operand = self._operand(facts)
        alu = get_converter(operand.converter).alu_per_element
        size = operand.weight_bytes(problem.n, problem.k)
        return weight_only_gemm(target, problem.m, problem.n, problem.k, size, alu)

    def shape(self, problem: Problem, target: Target) -> Shape:
        from terrazzo.autotune.gemm_bench import Cublas, Settings, W4A16Shape

        facts = dict(problem.facts)
        settings = Settings(facts["dtype"], facts["group"] or facts["k"], facts["symmetric"])
        return W4A16Shape(problem.n, problem.k, settings, target, [Cublas()], target.dram_gb_s)


class W4A8(Operator):
    name = "w4a8"

    def facts(self, n: int, k: int, *, dtype: str, group: int | None, symmetric: bool) -> dict[str, Any]:
        from terrazzo.ops.w4a8 import op

        if symmetric:
            raise ArgumentError("symmetric", True, "w4a8 weights always have offsets", "leave it out")
        if (group or 64) not in (32, 64, 128):
            raise ArgumentError("group", group, "must be 32, 64 or 128", "leave it out for 64")
        return op.tuning_facts(n, k, group or 64, dtype, "auto")

    def space(self, problem: Problem) -> spaces.W4A8:
        facts = dict(problem.facts)
        return spaces.W4A8(integer.IntegerGemm.of(problem.n, -(-problem.k // 16) * 16, facts["group"]))

    def _plan(self, problem: Problem, target: Target) -> Plan:
        from terrazzo.ops.w4a8 import op

        facts = dict(problem.facts)
        own = {"group_size": facts["group"], "out_dtype": facts["out_dtype"], "dequantization": "auto"}
        made = op.plan.__wrapped__  # not the kept one, which may answer with another schedule
        return made(problem.m, problem.n, problem.k, **own, bias=False, pipeline="auto", target=target)

    def beside(self, problem: Problem, target: Target) -> list[KernelRequest]:
        from terrazzo.ops.w4a8 import activations

        dtype = dict(problem.facts)["out_dtype"]
        return [activations.plan(problem.m, problem.k, dtype=dtype, gain=False, norm=False, target=target)]

    def roofline(self, problem: Problem, target: Target) -> Roofline:
        return integer.bounds(self.space(problem).problem, target, problem.m)

    def shape(self, problem: Problem, target: Target) -> Shape:
        from terrazzo.autotune.gemm_bench import Cublas
        from terrazzo.autotune.w4a8_bench import W4A8Settings, W4A8Shape

        facts = dict(problem.facts)
        settings = W4A8Settings(facts["out_dtype"], facts["group"])
        return W4A8Shape(problem.n, problem.k, settings, target, [Cublas()], target.dram_gb_s)


OPERATORS: dict[str, Operator] = {operator.name: operator for operator in (W4A16(), W4A8())}


def get_operator(name: str) -> Operator:
    """The adapter of an operator.

    Raises:
        ArgumentError: one that cannot be tuned.
    """
    if name not in OPERATORS:
        raise ArgumentError("op", name, f"must be one of {', '.join(OPERATORS)}", "see `terrazzo ops`")
    return OPERATORS[name]
