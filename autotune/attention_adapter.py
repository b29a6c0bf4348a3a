"""The adapters of attention: decode over a cache, and prefill."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from terrazzo.autotune.adapter import Operator, Plan
from terrazzo.autotune.database import Problem
from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.targets import Target
from terrazzo.schedules import attention, attention_space, spaces
from terrazzo.schedules.prefill_space import Prefill
from terrazzo.schedules.roofline import Roofline

if TYPE_CHECKING:
    from terrazzo.autotune.jobs import Job
    from terrazzo.autotune.subjects import Subject
    from terrazzo.ops.attention.cache.layout import CacheLayout


class Attention(Operator):
    """Decode attention; a problem's m is its number of (sequence, kv head) pairs."""

    name = "attention"
    caches: Sequence[str] = ("1x32/8x4k", "1x32/8x32k", "1x32/8x128k", "8x32/8x32k", "64x32/8x4k", "8x32/32x4k")
    formats: Sequence[str] = ("int4/int4", "int8/int8", "int4_channel128/int4", "float16/float16")

    def problems(self, job: Job) -> list[Problem]:
        from terrazzo.autotune.attention_bench import Shape
        from terrazzo.ops.attention.cache.cache import residual_of
        from terrazzo.ops.attention.cache.layout import CacheLayout
        from terrazzo.ops.attention.decoding.op import tuning_facts

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

    def _layout(self, problem: Problem) -> CacheLayout:
        from terrazzo.ops.attention.cache.layout import CacheLayout

        facts = dict(problem.facts)
        return CacheLayout(facts["k_format"], facts["v_format"], facts["head_dim"])

    def _of(self, problem: Problem) -> attention.DecodeProblem:
        from terrazzo.ops.attention.decoding.op import problem_of

        facts = dict(problem.facts)
        sizes = (facts["rows"], facts["tokens"], facts["page"], facts["residual"])
        return problem_of(self._layout(problem), problem.m, 1, *sizes)

    def space(self, problem: Problem) -> spaces.Space:
        return attention_space.Decode(self._of(problem))

    def plan(self, problem: Problem, target: Target) -> Plan:
        from terrazzo.ops.attention import checks
        from terrazzo.ops.attention.decoding import op

        facts, made = dict(problem.facts), op.plan.__wrapped__
        checks.check_facts(facts["dtype"], page=facts["page"], residual=facts["residual"])
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
        from terrazzo.ops.attention.cache.cache import residual_of
        from terrazzo.ops.attention.cache.layout import CacheLayout
        from terrazzo.ops.attention.prefilling.prefill_op import tuning_facts

        found: list[Problem] = []
        for text in job.formats or Attention.formats:
            layout = CacheLayout(*_formats(text), job.head_dim)
            for page in job.pages:
                facts = tuning_facts(layout, job.dtype, page, residual_of(layout, None), False)
                found.append(Problem.of(self.name, facts, 1))
        return found

    def _layout(self, problem: Problem) -> CacheLayout:
        from terrazzo.ops.attention.cache.layout import CacheLayout

        facts = dict(problem.facts)
        return CacheLayout(facts["k_format"], facts["v_format"], facts["head_dim"])

    def space(self, problem: Problem) -> spaces.Space:
        from terrazzo.ops.attention.prefilling.prefill_op import problem_of

        facts = dict(problem.facts)
        return Prefill(problem_of(self._layout(problem), facts["page"], facts["residual"], facts["fresh"]))

    def plan(self, problem: Problem, target: Target) -> Plan:
        from terrazzo.ops.attention import checks
        from terrazzo.ops.attention.prefilling import prefill_op

        facts = dict(problem.facts)
        checks.check_facts(facts["dtype"], page=facts["page"], residual=facts["residual"], fresh=facts["fresh"])
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
