"""What tuning must know of an operator: its problems, search space, the kernel of a schedule, its data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from terrazzo.autotune.database import Problem
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.targets import Target
from terrazzo.schedules import records, spaces
from terrazzo.schedules.roofline import Roofline

if TYPE_CHECKING:
    from terrazzo.autotune.jobs import Job
    from terrazzo.autotune.subjects import Subject

DTYPES = ("float16", "bfloat16")
TOKENS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""M that a job tunes when it names none: one of each bucket of records, up to 4096."""


class Plan(Protocol):
    """What operators plan: a kernel."""

    request: KernelRequest


class Operator(ABC):
    """An adapter.

    Attributes:
        name: under which records are kept. rate: dtype of the tensor cores' operands.
    """

    name: str
    rate: str = "f16"

    @abstractmethod
    def problems(self, job: Job) -> list[Problem]:
        """The problems that a job's fields name for this operator; none where they name none.

        Raises:
            ArgumentError: a field that the operator does not serve.
        """

    @abstractmethod
    def space(self, problem: Problem) -> spaces.Space:
        """The schedules of a problem."""

    @abstractmethod
    def plan(self, problem: Problem, target: Target) -> Plan:
        """The operator's plan, not a kept one, which may answer with another schedule; it has the `request`."""

    @abstractmethod
    def roofline(self, problem: Problem, target: Target) -> Roofline:
        """What bounds the problem."""

    @abstractmethod
    def flop(self, problem: Problem) -> float:
        """Floating-point (or integer) operations of the problem."""

    @abstractmethod
    def subject(self, problem: Problem, target: Target) -> Subject:
        """The problem's data on the GPU."""

    def data(self, problem: Problem) -> tuple:
        """What problems with the same data on the GPU share."""
        return problem.op, problem.facts

    def beside(self, problem: Problem, target: Target) -> list[KernelRequest]:
        """Kernels that a measurement needs besides the schedule's own."""
        return []

    def request(self, problem: Problem, program: str, params: Mapping[str, int], target: Target) -> KernelRequest:
        """The kernel of a schedule, as the operator would ask for it.

        Raises:
            ArgumentError: the schedule cannot serve the problem.
        """
        with records.forced(self.name, program, params):
            return self.plan(problem, target).request
