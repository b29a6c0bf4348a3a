"""One adapter for each operator that can be tuned: its problems, search space, the kernel of a schedule, its data.

A new operator is a subclass of `Operator` in `OPERATORS`: a `Space` of schedules/, a `Subject` of autotune/subjects.py,
and an operator that asks `spaces.choose` for its schedule and forgets its plans when `records.changed` is called.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from terrazzo.autotune.database import Problem
from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.targets import Target
from terrazzo.schedules import attention, attention_space, linear_spaces, records, spaces, w4ax
from terrazzo.schedules.prefill_space import Prefill
from terrazzo.schedules.problem import Gemm
from terrazzo.schedules.roofline import Roofline, bounds, weight_only_gemm

if TYPE_CHECKING:
    from terrazzo.autotune.jobs import Job
    from terrazzo.autotune.subjects import Subject

DTYPES = ("float16", "bfloat16")
TOKENS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""M that a job tunes when it names none: one of each bucket of records, up to 4096."""


class Operator(ABC):
    """What tuning must know of an operator.

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
    def _plan(self, problem: Problem, target: Target) -> Any:
        """The operator's plan, not a kept one; it has the `request`."""

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
            return self._plan(problem, target).request


class _Linear(Operator):
    """Operators on an [n, k] weight."""

    @abstractmethod
    def facts(self, n: int, k: int, *, dtype: str, group: int | None, symmetric: bool) -> dict[str, Any]:
        """The facts of an [n, k] weight under which records are kept. group: None takes the operator's usual one.

        Raises:
            ArgumentError: a format that the operator does not have.
        """

    def problems(self, job: Job) -> list[Problem]:
        from terrazzo.schedules.models import shapes

        weights = [(n, k, job.m) for n, k in {**dict.fromkeys(shapes(list(job.models))), **dict.fromkeys(job.shapes)}]
        found: list[Problem] = []
        for n, k, tokens in (*weights, *job.extra):
            facts = self.facts(n, k, dtype=job.dtype, group=job.group, symmetric=job.symmetric)
            found += [Problem.of(self.name, facts, m) for m in tokens or job.m or TOKENS]
        return found

    def flop(self, problem: Problem) -> float:
        return 2.0 * problem.m * problem.n * problem.k


class W4A16(_Linear):
    name = "w4a16"

    def facts(self, n: int, k: int, *, dtype: str, group: int | None, symmetric: bool) -> dict[str, Any]:
        from terrazzo.ops.linear import operand
        from terrazzo.ops.w4a16 import op

        size = group or 128
        operand.Operand(0 if size >= k else size, symmetric, dtype, dtype, "post")
        return op.tuning_facts(n, k, size, symmetric, dtype, dtype)

    def space(self, problem: Problem) -> spaces.Space:
        facts, of = dict(problem.facts), self._operand(problem)
        numerics = facts.get("numerics", "exact" if facts["scale_dtype"] == facts["dtype"] else "post")
        scales = "post" if numerics == "post" else "fold"
        own = dict(scales=scales, symmetric=facts["symmetric"], experts=facts.get("experts", 0))
        return linear_spaces.of(Gemm(facts["n"], -(-facts["k"] // 8) * 8, of.groups_per(128), of.record_bytes, **own))

    def _operand(self, problem: Problem) -> Any:
        from terrazzo.ops.linear.operand import Operand

        facts = dict(problem.facts)
        return Operand(facts["group"], facts["symmetric"], facts["scale_dtype"], facts["dtype"], "post")

    def _common(self, problem: Problem) -> dict[str, Any]:
        facts = dict(problem.facts)
        own = {name: facts[name] for name in ("symmetric", "scale_dtype", "dtype")}
        return own | {"group_size": facts["group"] or facts["k"]}

    def _plan(self, problem: Problem, target: Target) -> Any:
        from terrazzo.ops.w4a16 import op

        made = op.plan.__wrapped__  # not the kept one, which may answer with another schedule
        own = self._common(problem)
        return made(problem.m, problem.n, problem.k, **own, bias=False, numerics="auto", target=target)

    def _roofline(self, problem: Problem, target: Target, m: int, weights: int) -> Roofline:
        """Of `weights` matrices that m tokens share."""
        from terrazzo.layouts.converters import get_converter

        operand = self._operand(problem)
        alu = get_converter(operand.converter).alu_per_element
        size = weights * operand.weight_bytes(problem.n, problem.k)
        return weight_only_gemm(target, m, problem.n, problem.k, size, alu)

    def roofline(self, problem: Problem, target: Target) -> Roofline:
        return self._roofline(problem, target, problem.m, 1)

    def _settings(self, problem: Problem) -> Any:
        from terrazzo.autotune.gemm_bench import Settings

        facts = dict(problem.facts)
        return Settings(facts["dtype"], facts["group"] or facts["k"], facts["symmetric"])

    def subject(self, problem: Problem, target: Target) -> Subject:
        from terrazzo.autotune import gemm_bench, subjects

        peers, speed = [gemm_bench.Cublas()], target.dram_gb_s
        shape = gemm_bench.W4A16Shape(problem.n, problem.k, self._settings(problem), target, peers, speed)
        return subjects.Gemm(shape)


class W4A8(_Linear):
    name, rate = "w4a8", "s8"

    def facts(self, n: int, k: int, *, dtype: str, group: int | None, symmetric: bool) -> dict[str, Any]:
        from terrazzo.ops.w4a8 import op

        if symmetric:
            raise ArgumentError("symmetric", True, "w4a8 weights always have offsets", "leave it out")
        if (group or 64) not in (32, 64, 128):
            raise ArgumentError("group", group, "must be 32, 64 or 128", "leave it out for 64")
        return op.tuning_facts(n, k, group or 64, dtype, "auto")

    def _gemm(self, problem: Problem) -> Gemm:
        facts = dict(problem.facts)
        own = dict(activations=self.rate, experts=facts.get("experts", 0))
        return Gemm.of_bytes(problem.n, -(-problem.k // 16) * 16, facts["group"], **own)

    def space(self, problem: Problem) -> spaces.Space:
        return linear_spaces.of(self._gemm(problem))

    def _common(self, problem: Problem) -> dict[str, Any]:
        facts = dict(problem.facts)
        return {"group_size": facts["group"], "out_dtype": facts["out_dtype"], "dequantization": "auto"}

    def _plan(self, problem: Problem, target: Target) -> Any:
        from terrazzo.ops.w4a8 import op

        made = op.plan.__wrapped__  # not the kept one, which may answer with another schedule
        own = self._common(problem)
        return made(problem.m, problem.n, problem.k, **own, bias=False, pipeline="auto", target=target)

    def beside(self, problem: Problem, target: Target) -> list[KernelRequest]:
        from terrazzo.ops.w4a8 import activations

        dtype = dict(problem.facts)["out_dtype"]
        return [activations.plan(problem.m, problem.k, dtype=dtype, gain=False, norm=False, target=target)]

    def roofline(self, problem: Problem, target: Target) -> Roofline:
        from terrazzo.layouts.converters import get_converter

        return bounds(self._gemm(problem), target, problem.m, get_converter("u4_s8_lqq").alu_per_element)

    def _settings(self, problem: Problem) -> Any:
        from terrazzo.autotune.w4a8_bench import W4A8Settings

        facts = dict(problem.facts)
        return W4A8Settings(facts["out_dtype"], facts["group"])

    def subject(self, problem: Problem, target: Target) -> Subject:
        from terrazzo.autotune import gemm_bench, subjects
        from terrazzo.autotune.w4a8_bench import W4A8Shape

        peers, speed = [gemm_bench.Cublas()], target.dram_gb_s
        return subjects.Gemm(W4A8Shape(problem.n, problem.k, self._settings(problem), target, peers, speed))


class W4A8Fp8(W4A8):
    """W4A8 on e4m3 activations."""

    name, rate = "w4a8_fp8", "e4m3"

    def facts(self, n: int, k: int, *, dtype: str, group: int | None, symmetric: bool) -> dict[str, Any]:
        from terrazzo.ops.w4a8 import op

        if (group or 128) not in (32, 64, 128):
            raise ArgumentError("group", group, "must be 32, 64 or 128", "leave it out for 128")
        return op.tuning_facts(n, k, group or 128, dtype, "e4m3")

    def _common(self, problem: Problem) -> dict[str, Any]:
        return super()._common(problem) | {"dequantization": "e4m3"}

    def beside(self, problem: Problem, target: Target) -> list[KernelRequest]:
        from terrazzo.ops.w4a8 import activations

        own = dict(dtype=dict(problem.facts)["out_dtype"], gain=False, norm=False, codes="e4m3")
        return [activations.plan(problem.m, problem.k, **own, target=target)]

    def roofline(self, problem: Problem, target: Target) -> Roofline:
        from terrazzo.layouts.converters import get_converter

        alpha, size = get_converter("z4_e4m3").alu_per_element, self._gemm(problem).weight_bytes
        return weight_only_gemm(target, problem.m, problem.n, problem.k, size, alpha, dtype="e4m3", x_bytes=1)

    def subject(self, problem: Problem, target: Target) -> Subject:
        from terrazzo.autotune import gemm_bench, subjects
        from terrazzo.autotune.w4a8_fp8_bench import Fp8Shape

        peers, speed = [gemm_bench.Cublas()], target.dram_gb_s
        return subjects.Gemm(Fp8Shape(problem.n, problem.k, self._settings(problem), target, peers, speed))


class W4Ax(_Linear):
    """With two-level scales, and a quarter of the blocks in 8 bits, as the paper's kernel measurements."""

    name, rate = "w4ax", "s8"

    def facts(self, n: int, k: int, *, dtype: str, group: int | None, symmetric: bool) -> dict[str, Any]:
        from terrazzo.ops.w4ax import op

        if (group or w4ax.BLOCK) != w4ax.BLOCK:
            raise ArgumentError("group", group, f"must be {w4ax.BLOCK}, the block", "leave it out")
        return op.tuning_facts(n, k, round(0.25 * -(-k // w4ax.BLOCK)), dtype, True)

    def _gemm(self, problem: Problem) -> Gemm:
        facts = dict(problem.facts)
        depth, two_level = -(-facts["k"] // w4ax.BLOCK) * w4ax.BLOCK, facts.get("scales") == "two_level"
        return Gemm.of_blocks(facts["n"], depth, facts["blocks8"], two_level=two_level)

    def space(self, problem: Problem) -> spaces.Space:
        return linear_spaces.of(self._gemm(problem))

    def _plan(self, problem: Problem, target: Target) -> Any:
        from terrazzo.ops.w4ax import op

        facts = dict(problem.facts)
        made = op.plan.__wrapped__
        own = dict(out_dtype=facts["out_dtype"], bias=False, two_level=facts.get("scales") == "two_level")
        return made(problem.m, problem.n, problem.k, facts["blocks8"], **own, target=target)[0]

    def beside(self, problem: Problem, target: Target) -> list[KernelRequest]:
        from terrazzo.ops.w4ax import activations
        from terrazzo.ops.w4ax.format import native

        facts = dict(problem.facts)
        own = dict(dtype=facts["out_dtype"], permuted=True, norm=False, wide=not native(target))
        own["granularity"] = facts.get("scales", "block")
        return [activations.plan(problem.m, problem.k, facts["blocks8"], **own, target=target)]

    def roofline(self, problem: Problem, target: Target) -> Roofline:
        from terrazzo.layouts.converters import get_converter

        gemm = self._gemm(problem)
        alpha = get_converter("s4_s8_lqq" if gemm.two_level else "s4_s8_x16").alu_per_element
        return weight_only_gemm(
            target, problem.m, problem.n, problem.k, gemm.weight_bytes, alpha, dtype="s8", x_bytes=1
        )

    def subject(self, problem: Problem, target: Target) -> Subject:
        from terrazzo.autotune import gemm_bench, subjects
        from terrazzo.autotune.w4ax_bench import W4AxSettings, W4AxShape

        facts = dict(problem.facts)
        ratio = facts["blocks8"] / -(-problem.k // w4ax.BLOCK)
        settings = W4AxSettings(facts["out_dtype"], ratio=ratio, scales=facts.get("scales", "block"))
        peers = [gemm_bench.Cublas()]
        return subjects.Gemm(W4AxShape(problem.n, problem.k, settings, target, peers, target.dram_gb_s))


class _Grouped:
    """What the grouped operators share: experts of one shape, m tokens of all of them together."""

    family: str

    def problems(self, job: Job) -> list[Problem]:
        from terrazzo.schedules.models import get_model

        layers = [layer for model in job.models for layer in get_model(model) if layer.count > 1]
        weights = {(layer.n, layer.k, layer.count): job.m for layer in layers}
        weights |= {(n, k, experts): job.m for experts in job.experts for n, k in job.shapes}
        weights |= {(n, k, experts): tokens or job.m for experts in job.experts for n, k, tokens in job.extra}
        found: list[Problem] = []
        for (n, k, experts), tokens in weights.items():
            facts = self.facts(n, k, experts, dtype=job.dtype, group=job.group, symmetric=job.symmetric)
            found += [Problem.of(self.name, facts, m) for m in tokens or TOKENS]
        return found

    def flop(self, problem: Problem) -> float:
        return 2.0 * problem.m * problem.n * problem.k

    def active(self, problem: Problem) -> int:
        """Experts that m tokens reach at most."""
        return min(problem.m, dict(problem.facts)["experts"])


class GroupedW4A16(_Grouped, W4A16):
    name, family = "w4a16_grouped", "w4a16"

    def facts(
        self, n: int, k: int, experts: int = 8, *, dtype: str, group: int | None, symmetric: bool
    ) -> dict[str, Any]:
        from terrazzo.ops.w4a16 import grouped

        super().facts(n, k, dtype=dtype, group=group, symmetric=symmetric)
        return grouped.tuning_facts(n, k, experts, group or 128, symmetric, dtype, dtype, "exact")

    def _plan(self, problem: Problem, target: Target) -> Any:
        from terrazzo.ops.w4a16 import grouped

        facts, made = dict(problem.facts), grouped.plan.__wrapped__
        own = self._common(problem) | dict(bias=False, numerics=facts["numerics"], target=target)
        return made(problem.m, problem.n, problem.k, facts["experts"], **own)

    def roofline(self, problem: Problem, target: Target) -> Roofline:
        return self._roofline(problem, target, problem.m, self.active(problem))

    def subject(self, problem: Problem, target: Target) -> Subject:
        from terrazzo.autotune.grouped_bench import Grouped
        from terrazzo.ops import w4a16

        own, experts = self._common(problem), dict(problem.facts)["experts"]
        requests = lambda m: w4a16.grouped_requests(problem.n, problem.k, experts, m=m, target=target, **own)
        return Grouped("w4a16", problem.n, problem.k, experts, self._settings(problem), target, requests)


class GroupedW4A8(_Grouped, W4A8):
    name, family = "w4a8_grouped", "w4a8"

    def facts(
        self, n: int, k: int, experts: int = 8, *, dtype: str, group: int | None, symmetric: bool
    ) -> dict[str, Any]:
        return super().facts(n, k, dtype=dtype, group=group, symmetric=symmetric) | {"experts": experts}

    def _plan(self, problem: Problem, target: Target) -> Any:
        from terrazzo.ops.w4a8 import grouped

        facts, made = dict(problem.facts), grouped.plan.__wrapped__
        own = self._common(problem) | dict(bias=False, target=target)
        return made(problem.m, problem.n, problem.k, facts["experts"], **own)

    def roofline(self, problem: Problem, target: Target) -> Roofline:
        roof, active = super().roofline(problem, target), self.active(problem)
        more = (active - 1) * self._gemm(problem).weight_bytes / target.dram_gb_s / 1e3
        return Roofline(roof.load_us + more, roof.dequant_us, roof.mma_us)

    def subject(self, problem: Problem, target: Target) -> Subject:
        from terrazzo.autotune.grouped_bench import Grouped
        from terrazzo.ops import w4a8

        own, experts = self._common(problem), dict(problem.facts)["experts"]
        requests = lambda m: w4a8.grouped_requests(problem.n, problem.k, experts, m=m, target=target, **own)
        return Grouped(self.family, problem.n, problem.k, experts, self._settings(problem), target, requests)


class GroupedW4A8Fp8(GroupedW4A8, W4A8Fp8):
    """Grouped W4A8 on e4m3 activations."""

    name, family = "w4a8_fp8_grouped", "w4a8_fp8"


class Attention(Operator):
    """Decode attention; a problem's m is its number of (sequence, kv head) pairs."""

    name = "attention"
    caches: Sequence[str] = ("1x32/8x4k", "1x32/8x32k", "1x32/8x128k", "8x32/8x32k", "64x32/8x4k", "8x32/32x4k")
    formats: Sequence[str] = ("int4/int4", "int8/int8", "int4_channel128/int4", "float16/float16")

    def problems(self, job: Job) -> list[Problem]:
        from terrazzo.autotune.attention_bench import Shape
        from terrazzo.ops.attention.cache import residual_of
        from terrazzo.ops.attention.layout import CacheLayout
        from terrazzo.ops.attention.op import tuning_facts

        found: list[Problem] = []
        for shape in map(Shape.parse, job.caches or self.caches):
            for text in job.formats or self.formats:
                layout = CacheLayout(*_formats(text), job.head_dim)
                for q_len in job.q_len:
                    rows = q_len * shape.heads // shape.kv_heads
                    for page in job.pages:
                        facts = tuning_facts(layout, rows, shape.tokens, job.dtype, page, residual_of(layout, None))
                        found.append(Problem.of(self.name, facts, shape.batch * shape.kv_heads))
        return found

    def _layout(self, problem: Problem) -> Any:
        from terrazzo.ops.attention.layout import CacheLayout

        facts = dict(problem.facts)
        return CacheLayout(facts["k_format"], facts["v_format"], facts["head_dim"])

    def _of(self, problem: Problem) -> attention.DecodeProblem:
        from terrazzo.ops.attention.op import problem_of

        facts = dict(problem.facts)
        sizes = (facts["rows"], facts["tokens"], facts["page"], facts["residual"])
        return problem_of(self._layout(problem), problem.m, 1, *sizes)

    def space(self, problem: Problem) -> spaces.Space:
        return attention_space.Decode(self._of(problem))

    def _plan(self, problem: Problem, target: Target) -> Any:
        from terrazzo.ops.attention import op

        facts, made = dict(problem.facts), op.plan.__wrapped__
        own = {name: facts[name] for name in ("dtype", "page", "residual")} | dict(softcap=False, sinks=False)
        return made(self._layout(problem), problem.m, 1, facts["rows"], facts["tokens"], **own, target=target)

    def roofline(self, problem: Problem, target: Target) -> Roofline:
        of, facts = self._of(problem), dict(problem.facts)
        words = problem.m * of.tokens / 16 * (of.tile_words + (of.channel_words * 16 / of.group if of.group else 0))
        nbytes = 4 * words + 4 * problem.m * facts["rows"] * of.head_dim
        return Roofline(nbytes / target.dram_gb_s / 1e3, 0.0, self.flop(problem) / target.tflops("f16") / 1e6)

    def flop(self, problem: Problem) -> float:
        of = self._of(problem)
        return 4.0 * problem.m * of.rows * of.tokens * of.head_dim

    def subject(self, problem: Problem, target: Target) -> Subject:
        from terrazzo.autotune.attention_bench import Decode, Shape

        facts = dict(problem.facts)
        kv_heads = next(heads for heads in (8, 4, 2, 1) if problem.m % heads == 0)
        q_len = next(length for length in (1, 2, 3, 4, 5, 6, 7, 8) if self._splits(facts["rows"], length))
        heads = facts["rows"] // q_len * kv_heads
        shape = Shape(problem.m // kv_heads, heads, kv_heads, facts["tokens"])
        formats = facts["k_format"], facts["v_format"]
        return Decode(formats, shape, facts["head_dim"], facts["page"], q_len, facts["dtype"])

    @staticmethod
    def _splits(rows: int, q_len: int) -> bool:
        """Whether rows may be those of q_len tokens: a group of at most 16 query heads."""
        return rows % q_len == 0 and rows // q_len <= 16

    def data(self, problem: Problem) -> tuple:
        return problem.op, problem.facts, problem.m


class AttentionPrefill(Operator):
    """Prefill attention over what the cache holds; a kernel serves any batch, so m is 1. Measured on eight sequences
    whose last quarter is new: with one, partial waves decide, and a program that takes two to three times as long on
    prompts came out level."""

    name = "attention_prefill"
    shape = "8x32/8x4k"

    def problems(self, job: Job) -> list[Problem]:
        from terrazzo.ops.attention.cache import residual_of
        from terrazzo.ops.attention.layout import CacheLayout
        from terrazzo.ops.attention.prefill_op import tuning_facts

        found: list[Problem] = []
        for text in job.formats or Attention.formats:
            layout = CacheLayout(*_formats(text), job.head_dim)
            for page in job.pages:
                facts = tuning_facts(layout, job.dtype, page, residual_of(layout, None), False)
                found.append(Problem.of(self.name, facts, 1))
        return found

    def _layout(self, problem: Problem) -> Any:
        from terrazzo.ops.attention.layout import CacheLayout

        facts = dict(problem.facts)
        return CacheLayout(facts["k_format"], facts["v_format"], facts["head_dim"])

    def space(self, problem: Problem) -> spaces.Space:
        from terrazzo.ops.attention.prefill_op import problem_of

        facts = dict(problem.facts)
        return Prefill(problem_of(self._layout(problem), facts["page"], facts["residual"], facts["fresh"]))

    def _plan(self, problem: Problem, target: Target) -> Any:
        from terrazzo.ops.attention import prefill_op

        facts = dict(problem.facts)
        own = {name: facts[name] for name in ("dtype", "page", "residual", "fresh")} | dict(softcap=False, sinks=False)
        return prefill_op.plan.__wrapped__(self._layout(problem), **own, target=target)

    def roofline(self, problem: Problem, target: Target) -> Roofline:
        from terrazzo.autotune.attention_bench import Shape

        shape = Shape.parse(self.shape)
        nbytes = 4 * shape.batch * shape.kv_heads * shape.tokens // 64 * self.space(problem).problem.stage_words
        load = nbytes / target.dram_gb_s / 1e3
        return Roofline(load, 0.0, self.flop(problem) / target.tflops("f16") / 1e6)

    def flop(self, problem: Problem) -> float:
        from terrazzo.autotune.attention_bench import Shape

        shape = Shape.parse(self.shape)
        new, seen = shape.tokens // 4, shape.tokens * 7 / 8
        return 4.0 * shape.batch * shape.heads * new * seen * dict(problem.facts)["head_dim"]

    def subject(self, problem: Problem, target: Target) -> Subject:
        from terrazzo.autotune import attention_bench

        facts, shape = dict(problem.facts), attention_bench.Shape.parse(self.shape)
        formats = facts["k_format"], facts["v_format"]
        return attention_bench.Prefill(
            formats, shape, facts["head_dim"], facts["page"], shape.tokens // 4, facts["dtype"]
        )


def _formats(text: str) -> tuple[str, str]:
    """ "int4/int4" -> its formats of keys and values.

    Raises:
        ArgumentError: something else.
    """
    k_format, slash, v_format = text.partition("/")
    if not slash:
        raise ArgumentError("formats", text, "is no pair of formats", "write keys/values, as int4/int4")
    return k_format, v_format


_LINEAR = (W4A16(), W4A8(), W4A8Fp8(), W4Ax())
_GROUPED = (GroupedW4A16(), GroupedW4A8(), GroupedW4A8Fp8())
ALL = (*_LINEAR, *_GROUPED, Attention(), AttentionPrefill())
OPERATORS: dict[str, Operator] = {operator.name: operator for operator in ALL}


def get_operator(name: str) -> Operator:
    """The adapter of an operator.

    Raises:
        ArgumentError: one that cannot be tuned.
    """
    if name not in OPERATORS:
        raise ArgumentError("op", name, f"must be one of {', '.join(OPERATORS)}", "use one of these")
    return OPERATORS[name]
