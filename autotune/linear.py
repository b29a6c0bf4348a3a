"""The adapter of linear layers: every kind of weight and activations, alone and with experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from terrazzo.autotune.adapter import TOKENS, Operator
from terrazzo.autotune.database import Problem
from terrazzo.layouts.converters import get_converter
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.targets import Target
from terrazzo.ops.kinds.base import Kind
from terrazzo.ops.kinds.table import KINDS
from terrazzo.schedules import linear_spaces, models, spaces
from terrazzo.schedules.roofline import Roofline, bounds

if TYPE_CHECKING:
    from terrazzo.autotune.adapter import Plan
    from terrazzo.autotune.gemm_bench import Settings, Shape
    from terrazzo.autotune.jobs import Job
    from terrazzo.autotune.subjects import Subject

_ANY = 1 << 20  # features of a weight, where formats are asked for alone


def settings_of(name: str, *, dtype: str, group: int | None = None) -> tuple[type[Shape], Settings]:
    """How rows of an operator are measured, as `gemm_bench.bench` takes it. group: None takes the usual one.

    Raises:
        ArgumentError: a format that the operator does not have.
    """
    from terrazzo.autotune.linear_bench import shape_of

    kind = KINDS[name]
    return shape_of(kind, kind.facts(_ANY, _ANY, 0, dtype=dtype, group=group, symmetric=False))


class Linear(Operator):
    """Linear layers of a kind; with experts, m tokens of all of them together."""

    def __init__(self, kind: Kind, experts: bool = False) -> None:
        self.kind, self.experts, self.rate = kind, experts, kind.product.x.rate
        record = kind.product.record
        self.name = f"{record}_grouped" if experts else record

    def facts(self, n: int, k: int, experts: int = 8, **asked: Any) -> dict[str, Any]:
        """The facts under which records are kept; arguments as of `Kind.facts`."""
        return self.kind.facts(n, k, experts * self.experts, **asked)

    def problems(self, job: Job) -> list[Problem]:
        asked = dict(dtype=job.dtype, group=job.group, symmetric=job.symmetric)
        found: list[Problem] = []
        for sizes, tokens in (self._stacks if self.experts else self._weights)(job):
            facts = self.facts(*sizes, **asked)
            found += [Problem.of(self.name, facts, m) for m in tokens or job.m or TOKENS]
        return found

    @staticmethod
    def _weights(job: Job) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """((n, k), tokens or none) of a job."""
        alone = {**dict.fromkeys(models.shapes(list(job.models))), **dict.fromkeys(job.shapes)}
        return [*((sizes, ()) for sizes in alone), *(((n, k), tokens) for n, k, tokens in job.extra)]

    @staticmethod
    def _stacks(job: Job) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """((n, k, experts), tokens or none) of a job."""
        layers = [layer for model in job.models for layer in models.get_model(model) if layer.count > 1]
        found = dict.fromkeys(((layer.n, layer.k, layer.count) for layer in layers), ())
        found |= {(n, k, experts): () for experts in job.experts for n, k in job.shapes}
        found |= {(n, k, experts): tokens for experts in job.experts for n, k, tokens in job.extra}
        return list(found.items())

    def space(self, problem: Problem) -> spaces.Space:
        return linear_spaces.of(self.kind.gemm(dict(problem.facts)))

    def plan(self, problem: Problem, target: Target) -> Plan:
        return self.kind.plan(problem.m, dict(problem.facts), target)

    def beside(self, problem: Problem, target: Target) -> list[KernelRequest]:
        return self.kind.beside(problem.m, dict(problem.facts), target)

    def roofline(self, problem: Problem, target: Target) -> Roofline:
        facts = dict(problem.facts)
        alu, size = get_converter(self.kind.converter(facts)).alu_per_element, self.kind.weight_bytes(facts)
        return bounds(self.kind.gemm(facts), target, problem.m, alu, weight_bytes=size)

    def flop(self, problem: Problem) -> float:
        return 2.0 * problem.m * problem.n * problem.k

    def subject(self, problem: Problem, target: Target) -> Subject:
        from terrazzo.autotune import gemm_bench, grouped_bench, linear_bench, subjects

        facts = dict(problem.facts)
        kind, settings = linear_bench.shape_of(self.kind, facts)
        if not self.experts:
            peers = [gemm_bench.Cublas()]
            return subjects.Gemm(kind(problem.n, problem.k, settings, target, peers, target.dram_gb_s))
        requests = lambda m: [self.kind.plan(m, facts, target).request]
        return grouped_bench.Grouped(kind, problem.n, problem.k, facts["experts"], settings, target, requests)
