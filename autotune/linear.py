"""The adapter of linear layers: every kind of weight and activations, alone and with experts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from terrazzo.autotune.adapter import TOKENS, Operator
from terrazzo.autotune.database import Problem
from terrazzo.layouts.converters import get_converter
from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.targets import Target
from terrazzo.ops.products.codes import WIDE
from terrazzo.ops.products.table import of_codes
from terrazzo.ops.products.ways import choose_way
from terrazzo.schedules import linear_spaces, models, spaces, w4ax
from terrazzo.schedules.problem import Gemm
from terrazzo.schedules.roofline import Roofline, bounds

if TYPE_CHECKING:
    from terrazzo.autotune.gemm_bench import Settings, Shape
    from terrazzo.autotune.jobs import Job
    from terrazzo.autotune.subjects import Subject
    from terrazzo.ops.linear.operand import Operand

Facts = Mapping[str, Any]
_ANY = 1 << 20  # features of a weight, where formats are asked for alone


class Kind(ABC):
    """How the weights of an operator are stored and multiplied.

    Attributes:
        name: of the operator, under which records are kept. rate: dtype of the tensor cores' operands.
    """

    name: str
    rate: str = "f16"

    @abstractmethod
    def facts(self, n: int, k: int, experts: int, *, dtype: str, group: int | None, symmetric: bool) -> dict[str, Any]:
        """The facts under which records are kept. experts: 0 for a weight alone. group: None takes the usual one.

        Raises:
            ArgumentError: a format that the operator does not have.
        """

    @abstractmethod
    def gemm(self, facts: Facts) -> Gemm:
        """What schedules know of it."""

    @abstractmethod
    def plan(self, m: int, facts: Facts, target: Target) -> Any:
        """The operator's plan, not a kept one."""

    @abstractmethod
    def converter(self, facts: Facts) -> str:
        """What decodes the codes."""

    @abstractmethod
    def shape(self, facts: Facts) -> tuple[type[Shape], Settings]:
        """How its rows are measured."""

    def weight_bytes(self, facts: Facts) -> int:
        """Of a packed weight."""
        return self.gemm(facts).weight_bytes

    def beside(self, m: int, facts: Facts, target: Target) -> list[KernelRequest]:
        """Kernels that a measurement needs besides the product's."""
        return []


class WeightOnly(Kind):
    """16-bit activations, and a weight of a registered format."""

    def __init__(self, weight: str) -> None:
        self.weight, self.format = weight, WIDE[weight]
        self.name = of_codes(self.format).record

    def facts(self, n: int, k: int, experts: int, *, dtype: str, group: int | None, symmetric: bool) -> dict[str, Any]:
        from terrazzo.ops.weight_only import grouped, op

        scales = self.format.scales[0] if self.format.values else dtype
        symmetric, size = symmetric or bool(self.format.values), group or self.format.groups[-1]
        own = (size, symmetric, scales, dtype)
        one = op.tuning_facts(n, k, *own, self.weight)
        self._operand(one)  # raises where these do not go together
        if not experts:
            return one
        numerics = choose_way(self.format, scales, dtype, False).name
        return grouped.tuning_facts(n, k, experts, *own, numerics, self.weight)

    def _operand(self, facts: Facts, few: bool = False) -> Operand:
        """few: as the program for small batches reads it."""
        from terrazzo.ops.linear.operand import Operand

        own = [facts[name] for name in ("group", "symmetric", "scale_dtype", "dtype")]
        numerics = choose_way(self.format, facts["scale_dtype"], facts["dtype"], few).name
        return Operand(*own, numerics if few else facts.get("numerics", numerics), self.weight)

    def gemm(self, facts: Facts) -> Gemm:
        from terrazzo.ops.weight_only import op

        return op.problem_of(self._operand(facts), facts["n"], -(-facts["k"] // 8) * 8, facts.get("experts", 0))

    def plan(self, m: int, facts: Facts, target: Target) -> Any:
        from terrazzo.ops.weight_only import grouped, op

        own = {name: facts[name] for name in ("symmetric", "scale_dtype", "dtype")}
        own |= dict(group_size=facts["group"] or facts["k"], bias=False, target=target, weight=self.weight)
        if "experts" not in facts:
            return op.plan.__wrapped__(m, facts["n"], facts["k"], **own, numerics="auto")
        made = grouped.plan.__wrapped__
        return made(m, facts["n"], facts["k"], facts["experts"], **own, numerics=facts["numerics"])

    def converter(self, facts: Facts) -> str:
        return self._operand(facts, few=True).converter

    def weight_bytes(self, facts: Facts) -> int:
        return self._operand(facts).weight_bytes(facts["n"], facts["k"])

    def shape(self, facts: Facts) -> tuple[type[Shape], Settings]:
        from terrazzo.autotune.weight_only_bench import WeightOnlySettings, WeightOnlyShape

        own = dict(group=facts["group"] or facts["k"], symmetric=facts["symmetric"], weight=self.weight)
        return WeightOnlyShape, WeightOnlySettings(facts["dtype"], **own)


class Bytes(Kind):
    """W4A8: activations in int8 or e4m3, and 4-bit weights of scales in two levels, or MXFP4."""

    def __init__(self, name: str, rate: str, dequantization: str, codes: str, group: int) -> None:
        self.name, self.rate, self.dequantization, self.codes, self.group = name, rate, dequantization, codes, group

    def facts(self, n: int, k: int, experts: int, *, dtype: str, group: int | None, symmetric: bool) -> dict[str, Any]:
        from terrazzo.ops.w4a8 import grouped, op

        if symmetric and self.codes == "int8":
            raise ArgumentError("symmetric", True, "w4a8 weights always have offsets", "leave it out")
        size = group or self.group
        known = (32,) if self.dequantization == "e2m1" else (32, 64, 128)
        if size not in known:
            constraint = f"must be {' or '.join(map(str, known))}"
            raise ArgumentError("group", group, constraint, f"leave it out for {self.group}")
        own = (size, dtype, self.dequantization)
        return grouped.tuning_facts(n, k, experts, *own) if experts else op.tuning_facts(n, k, *own)

    def gemm(self, facts: Facts) -> Gemm:
        own = dict(activations=self.rate, experts=facts.get("experts", 0))
        return Gemm.of_bytes(facts["n"], -(-facts["k"] // 16) * 16, facts["group"], **own)

    def plan(self, m: int, facts: Facts, target: Target) -> Any:
        from terrazzo.ops.w4a8 import grouped, op

        own = dict(group_size=facts["group"], out_dtype=facts["out_dtype"], dequantization=self.dequantization)
        own |= dict(bias=False, target=target)
        if "experts" in facts:
            return grouped.plan.__wrapped__(m, facts["n"], facts["k"], facts["experts"], **own)
        return op.plan.__wrapped__(m, facts["n"], facts["k"], **own, pipeline="auto")

    def converter(self, facts: Facts) -> str:
        from terrazzo.ops.linear.bytes import fp8_problem, problem

        known = fp8_problem.CONVERTERS if self.codes == "e4m3" else problem.DEQUANTIZATIONS
        if (name := facts["dequantization"]) not in known:
            raise ArgumentError("dequantization", name, f"must be one of {', '.join(known)}", "name one of them")
        return known[name]

    def beside(self, m: int, facts: Facts, target: Target) -> list[KernelRequest]:
        from terrazzo.ops.w4a8 import activations

        own = dict(dtype=facts["out_dtype"], gain=False, norm=False, codes=self.codes)
        return [activations.plan(m, facts["k"], **own, target=target)]

    def shape(self, facts: Facts) -> tuple[type[Shape], Settings]:
        from terrazzo.autotune import w4a8_bench

        kinds = {"e4m3": w4a8_bench.Fp8Shape, "e2m1": w4a8_bench.Mxfp4Shape}
        kind = kinds.get(self.dequantization, w4a8_bench.W4A8Shape)
        return kind, w4a8_bench.W4A8Settings(facts["out_dtype"], facts["group"])


class Direct(Kind):
    """W8A8: bytes by bytes, of rows or, of e4m3, of blocks."""

    def __init__(self, name: str, rate: str, codes: str) -> None:
        self.name, self.rate, self.codes = name, rate, codes

    def facts(self, n: int, k: int, experts: int, *, dtype: str, group: int | None, symmetric: bool) -> dict[str, Any]:
        from terrazzo.ops.w4a8.w8a8 import grouped, op

        form = op.form_of(group or k, k, self.codes)
        own = (dtype, op.numerics_of(**form, zeros=False, accumulate="auto"))
        return grouped.tuning_facts(n, k, experts, *own) if experts else op.tuning_facts(n, k, *own)

    def gemm(self, facts: Facts) -> Gemm:
        from terrazzo.ops.w4a8.w8a8 import op

        own = (facts["dequantization"], facts["out_dtype"], facts.get("experts", 0))
        return op.problem(facts["n"], facts["k"], *own)

    def plan(self, m: int, facts: Facts, target: Target) -> Any:
        from terrazzo.ops.w4a8.w8a8 import grouped, op

        own = dict(numerics=facts["dequantization"], out_dtype=facts["out_dtype"], bias=False, target=target)
        if "experts" in facts:
            return grouped.plan.__wrapped__(m, facts["n"], facts["k"], facts["experts"], **own)
        return op.plan.__wrapped__(m, facts["n"], facts["k"], **own)

    def converter(self, facts: Facts) -> str:
        return "s8_s8" if self.codes == "int8" else "e4m3_e4m3"

    def beside(self, m: int, facts: Facts, target: Target) -> list[KernelRequest]:
        from terrazzo.ops.w4a8.w8a8 import op

        own = dict(codes=self.codes, block=facts["dequantization"] == "block")
        return op.quantizers(facts["k"], m=[m], dtype=facts["out_dtype"], target=target, **own)

    def shape(self, facts: Facts) -> tuple[type[Shape], Settings]:
        from terrazzo.autotune import w8a8_bench

        block = facts["dequantization"] == "block"
        own = dict(group=facts["group"] if block else facts["k"], codes=self.codes, block=block)
        return w8a8_bench.W8A8Shape, w8a8_bench.W8A8Settings(facts["out_dtype"], **own)


class Blocks(Kind):
    """W4Ax with two-level scales, and a quarter of the blocks in 8 bits, as the paper's kernel measurements."""

    name, rate = "w4ax", "s8"

    def facts(self, n: int, k: int, experts: int, *, dtype: str, group: int | None, symmetric: bool) -> dict[str, Any]:
        from terrazzo.ops.w4ax import grouped, op

        if (group or w4ax.BLOCK) != w4ax.BLOCK:
            raise ArgumentError("group", group, f"must be {w4ax.BLOCK}, the block", "leave it out")
        high = round(0.25 * -(-k // w4ax.BLOCK))
        return grouped.tuning_facts(n, k, experts, high, dtype) if experts else op.tuning_facts(n, k, high, dtype, True)

    def gemm(self, facts: Facts) -> Gemm:
        depth = -(-facts["k"] // w4ax.BLOCK) * w4ax.BLOCK
        own = dict(two_level="scales" in facts, experts=facts.get("experts", 0))
        return Gemm.of_blocks(facts["n"], depth, facts["blocks8"], **own)

    def plan(self, m: int, facts: Facts, target: Target) -> Any:
        from terrazzo.ops.w4ax import grouped, op

        own = dict(out_dtype=facts["out_dtype"], bias=False, target=target)
        if "experts" in facts:
            made = grouped.plan.__wrapped__
            return made(m, facts["n"], facts["k"], facts["experts"], facts["blocks8"], **own)
        own["two_level"] = "scales" in facts
        return op.plan.__wrapped__(m, facts["n"], facts["k"], facts["blocks8"], **own)

    def converter(self, facts: Facts) -> str:
        return "s4_s8_lqq" if "scales" in facts else "s4_s8_x16"

    def beside(self, m: int, facts: Facts, target: Target) -> list[KernelRequest]:
        from terrazzo.ops.w4ax import activations
        from terrazzo.ops.w4ax.format import native

        own = dict(dtype=facts["out_dtype"], permuted=True, norm=False, wide=not native(target))
        own["granularity"] = facts.get("scales", "block")
        return [activations.plan(m, facts["k"], facts["blocks8"], **own, target=target)]

    def shape(self, facts: Facts) -> tuple[type[Shape], Settings]:
        from terrazzo.autotune.w4ax_bench import W4AxSettings, W4AxShape

        ratio = facts["blocks8"] / -(-facts["k"] // w4ax.BLOCK)
        return W4AxShape, W4AxSettings(facts["out_dtype"], ratio=ratio, scales=facts.get("scales", "block"))


KINDS: tuple[Kind, ...] = (
    *(WeightOnly(weight) for weight in WIDE),
    Bytes("w4a8", "s8", "xor", "int8", 64),
    Bytes("w4a8_fp8", "e4m3", "e4m3", "e4m3", 128),
    Bytes("mxfp4_fp8", "e4m3", "e2m1", "e4m3", 32),
    Direct("w8a8", "s8", "int8"),
    Direct("w8a8_fp8", "e4m3", "e4m3"),
    Blocks(),
)


def settings_of(name: str, *, dtype: str, group: int | None = None) -> tuple[type[Shape], Settings]:
    """How rows of an operator are measured, as `gemm_bench.bench` takes it. group: None takes the usual one.

    Raises:
        ArgumentError: a format that the operator does not have.
    """
    kind = next(kind for kind in KINDS if kind.name == name)
    return kind.shape(kind.facts(_ANY, _ANY, 0, dtype=dtype, group=group, symmetric=False))


class Linear(Operator):
    """Linear layers of a kind; with experts, m tokens of all of them together."""

    def __init__(self, kind: Kind, experts: bool = False) -> None:
        self.kind, self.experts, self.rate = kind, experts, kind.rate
        self.name = f"{kind.name}_grouped" if experts else kind.name

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

    def plan(self, problem: Problem, target: Target) -> Any:
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
        from terrazzo.autotune import gemm_bench, grouped_bench, subjects

        facts = dict(problem.facts)
        kind, settings = self.kind.shape(facts)
        if not self.experts:
            peers = [gemm_bench.Cublas()]
            return subjects.Gemm(kind(problem.n, problem.k, settings, target, peers, target.dram_gb_s))
        requests = lambda m: [self.kind.plan(m, facts, target).request]
        return grouped_bench.Grouped(kind, problem.n, problem.k, facts["experts"], settings, target, requests)
