"""Every schedule that a program could run for a problem, and what a cost model says of it: the search space of tuning.

A space holds schedules that fit by construction (shared memory, registers, divisibility). The predicted microseconds
order them; they are fitted to measurements on H200 for the programs of that GPU, and analytic for the others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from math import log2
from typing import Any

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.targets import Target
from terrazzo.schedules import multistage, records, small_batch, stream_k, w4a8
from terrazzo.schedules.clusters import PAIR
from terrazzo.schedules.partition import Partition
from terrazzo.schedules.problem import Gemm

MOST = 160
"""Schedules of a problem that are worth a compilation, by default."""
WITHIN = 1.6
"""Predicted times above this multiple of the shortest one are left out."""
_RASTERS = (8, 4, 2, 1, 16)
_FEW = 512  # tokens up to which only a wide space has other rasters than the first
_FAR = 0.01  # of its time, by which a schedule is tried later for each halving or doubling of the first raster
# (warpgroups, CTAs of an SM) -> f32 sums of a thread that leave room for two sets of operands (W4A16)
_SUMS = {(2, 1): 128, (3, 1): 64, (4, 1): 32, (1, 2): 64, (2, 2): 32}
_SEMAPHORES = 4096  # of a stream: one for each tile that splits k
_LAUNCH_US = 2.0  # start and end of a grid
_LOGIC_LANES = 64  # LOP3 and the like of one SM in one clock
_CLOCK_GHZ = 1.6
_REGISTERS = 1.25  # of a multistage thread, for each accumulator and operand register that its tile needs


@dataclass(frozen=True)
class Candidate:
    """One schedule of a program and its predicted time in microseconds."""

    program: str
    schedule: Any
    us: float

    @property
    def params(self) -> dict[str, int]:
        """The numbers of the schedule, as records hold them."""
        return {name: value for name, value in asdict(self.schedule).items() if isinstance(value, int)}


class Space(ABC):
    """The schedules of one operator for one weight or cache.

    Attributes:
        programs: name of a program -> its schedule class, a dataclass of integers.
        problem: what the schedules' own functions ask.
    """

    programs: Mapping[str, type]

    def __init__(self, problem: Any) -> None:
        self.problem = problem

    @abstractmethod
    def heuristic(self, target: Target, m: int) -> tuple[str, Any]:
        """Program and schedule that the operator takes without a record."""

    @abstractmethod
    def every(self, target: Target, m: int, wide: bool = False) -> Iterator[tuple[str, Any]]:
        """Programs and schedules worth considering for m tokens; `refusal` filters them. wide: also those that differ
        only in what rarely matters (fewer stages, another raster), for a record of a whole space."""

    @abstractmethod
    def refusal(self, program: str, schedule: Any, target: Target, m: int) -> str:
        """Why the schedule cannot serve m tokens on the target, or ""."""

    @abstractmethod
    def cost(self, program: str, schedule: Any, target: Target, m: int) -> float:
        """Predicted microseconds."""

    def candidates(
        self, target: Target, m: int, most: int = MOST, within: float = WITHIN, wide: bool = False
    ) -> list[Candidate]:
        """Legal schedules, the heuristic's first, then by predicted time as a multiple of their program's shortest: the
        models of two programs are fitted each for itself, so all programs are tried.

        Args:
            most: at most so many. within: none predicted slower than its program's shortest by this factor.
            wide: see `every`.
        """
        chosen, every = self.heuristic(target, m), self.every(target, m, wide)
        legal = dict.fromkeys([chosen, *(pair for pair in every if not self.refusal(*pair, target, m))])
        first, *found = [Candidate(*pair, self.cost(*pair, target, m)) for pair in legal]
        shortest: dict[str, float] = {}
        for it in (first, *found):
            shortest[it.program] = min(it.us, shortest.get(it.program, it.us))
        found = [it for it in found if it.us <= within * shortest[it.program]]
        found.sort(key=lambda it: (it.us / shortest[it.program] * _later(it.schedule), it.us))
        return [first, *found[: most - 1]]

    def revive(self, program: str, params: Mapping[str, Any], target: Target, m: int) -> tuple[Any, str]:
        """(schedule, "") from its recorded parameters, or (None, why it cannot be used)."""
        kind = self.programs.get(program)
        if kind is None:
            return None, f"there is no program {program!r}"
        names = {field.name for field in fields(kind)}
        needed = {field.name for field in fields(kind) if field.default is MISSING}
        if not needed <= set(params) <= names or not all(isinstance(value, int) for value in params.values()):
            return None, f"a schedule of {program} has the integers {sorted(names)}, the record has {dict(params)}"
        low = [it.name for it in fields(kind) if params.get(it.name, 1) < bool(it.default)]  # 0 only where it is usual
        if low:
            return None, f"{program} with {low[0]} = {params[low[0]]}, a count below one"
        schedule = kind(**params)
        reason = self.refusal(program, schedule, target, m)
        return (None, reason) if reason else (schedule, "")


class W4A16(Space):
    """Schedules of W4A16."""

    programs = {  # noqa: RUF012  (read only)
        "small_batch": small_batch.SmallBatch,
        "stream_k": stream_k.StreamK,
        "multistage": multistage.Multistage,
    }

    problem: Gemm

    @property
    def scaled_sums(self) -> bool:
        """Whether the tile programs scale f32 sums of each group."""
        return self.problem.scales == "post"

    def heuristic(self, target: Target, m: int) -> tuple[str, Any]:
        if small_batch.serves(self.problem, target, m):
            return "small_batch", small_batch.choose(self.problem, target, m)
        if target.supports("wgmma.f16"):
            return "stream_k", stream_k.choose(self.problem, target, m)
        return "multistage", multistage.choose(self.problem, target, m)

    def every(self, target: Target, m: int, wide: bool = False) -> Iterator[tuple[str, Any]]:
        if m <= small_batch.MAX_TOKENS:
            yield from (("small_batch", s) for s in small_batch.every(self.problem, target, m))
        if target.supports("wgmma.f16"):
            for shape in tiles_of(stream_k.BLOCK_TOKENS, m, self.problem, wide):
                for stage_k in (64, 128):
                    s = stream_k.StreamK(*shape[:3], stages=2, stage_k=stage_k, raster=shape[3])
                    yield from (("stream_k", it) for it in rings(stream_k.fitted(s, self.problem, target), wide))
                    yield from self._pairs(s, target, m)
            for tokens, *shape in tiles_of(stream_k.BLOCK_TOKENS, m, self.problem):
                for warpgroups, row_blocks in ((1, 1), (1, 2), (2, 1), (2, 2)) if shape == [2, 1, 8] else ():
                    for stage_k in (64, 128):
                        s = stream_k.StreamK(tokens, warpgroups, row_blocks, 2, stage_k, per_sm=2)
                        yield "stream_k", stream_k.fitted(s, self.problem, target)
                        if (warpgroups, row_blocks) == (1, 1):
                            yield from self._pairs(replace(s, per_sm=1), target, m)
        else:
            for s in _multistage(multistage.Multistage, self.problem, target, m):
                yield "multistage", s

    def _pairs(self, s: stream_k.StreamK, target: Target, m: int) -> Iterator[tuple[str, stream_k.StreamK]]:
        """The tile with pairs of CTAs, where there may be such."""
        found = stream_k.pairs(stream_k.fitted(s, self.problem, target), self.problem, target, m)
        if found:
            yield "stream_k", found

    def refusal(self, program: str, schedule: Any, target: Target, m: int) -> str:
        if program == "small_batch":
            return small_batch_refusal(schedule, self.problem, target, m, small_batch.MAX_TOKENS)
        if program == "multistage":
            return _multistage_refusal(schedule, self.problem, target, m, 128 if self.scaled_sums else 256)
        if not target.supports("wgmma.f16"):
            return f"{target.arch} has no wgmma"
        if schedule.block_tokens not in stream_k.BLOCK_TOKENS:
            return f"no tile of {schedule.block_tokens} tokens"
        of_cluster = schedule.cluster_refusal(self.problem, target)
        return sums_refusal(schedule, self.scaled_sums) or of_cluster or ring_refusal(schedule, self.problem, target, 3)

    def cost(self, program: str, schedule: Any, target: Target, m: int) -> float:
        if program == "small_batch":
            return small_batch.cost(schedule, self.problem, target, small_batch.COSTS, 2)
        if program == "multistage":
            return _multistage_us(schedule, self.problem, target, m)
        return stream_k.us(schedule, self.problem, target, m)


class W4A8(Space):
    """Schedules of W4A8 for quantized activations."""

    programs = {  # noqa: RUF012  (read only)
        "small_batch": w4a8.SmallBatch,
        "stream_k": w4a8.StreamK,
        "multistage": w4a8.Multistage,
    }
    problem: Gemm

    def heuristic(self, target: Target, m: int) -> tuple[str, Any]:
        if w4a8.serves(self.problem, target, m):
            return "small_batch", w4a8.choose_small_batch(self.problem, target, m)
        if target.supports("wgmma.s8"):
            return "stream_k", w4a8.choose(self.problem, target, m)
        return "multistage", w4a8.choose_multistage(self.problem, target, m)

    def every(self, target: Target, m: int, wide: bool = False) -> Iterator[tuple[str, Any]]:
        if m <= w4a8.MAX_TOKENS:
            yield from (("small_batch", s) for s in w4a8.small_batches(self.problem, target, m))
        if target.supports("wgmma.s8"):
            for shape in tiles_of(w4a8.BLOCK_TOKENS, m, self.problem, wide):
                s = w4a8.StreamK(*shape[:3], stages=2, raster=shape[3])
                s = w4a8.fitted(s, self.problem, target, w4a8.UNROLLED_STAGES)
                yield from (("stream_k", it) for it in rings(s, wide))
                yield from self._pairs(s, shape, target, m)
        else:
            for s in _multistage(w4a8.Multistage, self.problem, target, m):
                yield "multistage", s

    def _pairs(self, s: w4a8.S, shape: tuple[int, ...], target: Target, m: int) -> Iterator[tuple[str, w4a8.S]]:
        """The tile with pairs of CTAs, and one of half its rows, where there may be such."""
        for it in (s, replace(s, warpgroups=1)) if shape[1:] == (2, 1, _RASTERS[0]) else (s,):
            found = w4a8.pairs(w4a8.fitted(it, self.problem, target, w4a8.UNROLLED_STAGES), self.problem, target, m)
            if found:
                yield "stream_k", found

    def refusal(self, program: str, schedule: Any, target: Target, m: int) -> str:
        if program == "small_batch":
            return small_batch_refusal(schedule, self.problem, target, m, w4a8.MAX_TOKENS)
        if program == "multistage":
            return _multistage_refusal(schedule, self.problem, target, m, 256)
        if not target.supports("wgmma.s8"):
            return f"{target.arch} has no integer wgmma"
        if schedule.block_tokens not in w4a8.BLOCK_TOKENS:
            return f"no tile of {schedule.block_tokens} tokens"
        if not schedule.legal():
            return f"{schedule.warpgroups} warpgroups with {schedule.sums} sums of a thread do not fit the registers"
        return schedule.cluster_refusal(self.problem, target) or ring_refusal(schedule, self.problem, target, 2)

    def cost(self, program: str, schedule: Any, target: Target, m: int) -> float:
        if program == "small_batch":
            return w4a8.small_batch_us(schedule, self.problem, target)
        if program == "multistage":
            return _multistage_us(schedule, self.problem, target, m)
        return w4a8.stream_k_us(schedule, self.problem, target, m)


def choose(
    space: Space, op: str, facts: Mapping[str, Any], target: Target, m: int, device: Target | None = None
) -> tuple[str, Any]:
    """Program and schedule for m tokens: the record's if there is one that fits, else the heuristic's.

    Args:
        facts: what tells problems of the operator apart, see `records.pick`. device: the GPU that runs the kernel
            where that is newer than the target; it has no records for code of another architecture.

    Raises:
        ArgumentError: a schedule of `records.forced` that cannot serve the problem.
    """
    if device is None or device.arch == target.arch:
        found = records.pick(op, facts, m, device or target)
        if found is not None:
            schedule, reason = space.revive(found.program, found.params, target, m)
            if not reason:
                return found.program, schedule
            if found.how == "forced":
                raise ArgumentError("schedule", dict(found.params), reason, "take one of the space")
    return space.heuristic(target, m)


def _later(schedule: Any) -> float:
    """1, or more for rasters that no cost model tells apart: the usual one of every tile is tried before the others."""
    return 1 + _FAR * abs(log2(getattr(schedule, "raster", _RASTERS[0]) / _RASTERS[0]))


def tiles_of(
    block_tokens: tuple[int, ...], m: int, problem: Gemm, wide: bool = False
) -> Iterator[tuple[int, int, int, int]]:
    """(tokens, warpgroups, row blocks of each, raster) of tiles no wider than m needs."""
    widest = next((t for t in block_tokens if m <= t), block_tokens[-1])
    for tokens in (t for t in block_tokens if wide or widest // 4 <= t <= widest):
        for warpgroups in (1, 2, 3, 4) if wide else (2, 3, 4):
            for row_blocks in (1, 2):
                if warpgroups * row_blocks <= 2 * problem.row_blocks:
                    # token blocks that walk over the rows together: all of them or, where they are many, fewer
                    for raster in _RASTERS:
                        if raster == _RASTERS[0] or (raster * tokens < m and (wide or m > _FEW)):
                            yield tokens, warpgroups, row_blocks, raster


def rings(schedule: Any, wide: bool) -> Iterator[Any]:
    """A tile with as many stages as fit and, if wide, with each smaller number of them from three on."""
    yield schedule
    if wide:
        yield from (replace(schedule, stages=stages) for stages in range(schedule.stages - 1, 2, -1))


def _multistage(
    kind: type[multistage.Multistage], problem: Gemm, target: Target, m: int
) -> Iterator[multistage.Multistage]:
    widest = next((t for t in multistage.BLOCK_TOKENS if m <= t), multistage.BLOCK_TOKENS[-1])
    for tokens in (t for t in multistage.BLOCK_TOKENS if t <= widest):
        for warps, token_warps in ((4, 1), (8, 1), (8, 2)):
            for row_blocks in (1, 2):
                for stages in (2, 3, 4):
                    base = kind(tokens, warps, row_blocks, stages, token_warps, raster=16 if m > 8 * tokens else 8)
                    if base.rows % 64:
                        continue
                    full = 2 * target.sms // max(1, base.tiles(problem, m))
                    for kc in sorted({1, max(1, full // 2), max(1, full), min(8, 2 * full)}):
                        if kc <= min(8, problem.units):
                            yield replace(base, kc=kc)


def small_batch_refusal(s: small_batch.SmallBatch, problem: Gemm, target: Target, m: int, most: int) -> str:
    if m > min(most, s.x_rows):
        return f"small_batch with {s.x_rows} resident rows does not hold {m} tokens"
    if s.tokens and not 0 <= s.token_tiles * small_batch.TOKENS_PER_TILE - s.tokens < small_batch.TOKENS_PER_TILE:
        return f"{s.tokens} tokens are not those of {s.token_tiles} tiles"
    if min(s.kc, s.nc, s.warps, s.chunk, s.stages, s.cluster, s.token_tiles) < 1 or s.nc % s.cluster:
        return "a count below one, or CTAs that do not divide into clusters"
    if s.joined and (s.cluster > 1 or s.kc % PAIR or not target.supports("cluster")):
        return f"{s.kc} CTAs along k, {s.cluster} with the same slice of x, cannot be pairs"
    if s.warps > min(small_batch.MAX_WARPS, problem.units // s.kc):
        return f"{s.warps} warps have no work in k / {s.kc}"
    if s.kc * s.nc > target.sms:
        return f"{s.kc} * {s.nc} CTAs wait for each other on {target.sms} SMs"
    if s.registers() * s.warps * 32 > target.registers_per_sm:
        return f"{s.warps} warps need more registers than an SM has"
    return memory_refusal(s.launch_bytes(problem, target), target)


def sums_refusal(s: stream_k.StreamK, scaled_sums: bool) -> str:
    sums = s.row_blocks * s.block_tokens // 2 * (2 if scaled_sums else 1)
    most = _SUMS.get((s.warpgroups, s.per_sm), 64 if s.warpgroups == 1 and s.cluster > 1 else 0)
    if (s.warpgroups, s.row_blocks, s.per_sm, s.stage_k) == (4, 1, 1, 64) and not scaled_sums:
        most = 64  # sets of half as many operands
    if s.per_sm == s.warpgroups == s.row_blocks == 2:
        most //= 2  # the words of a stage take the registers
    if sums > most or s.stage_k not in (64, 128):
        return f"{s.per_sm} CTAs of {s.warpgroups} warpgroups with {sums} sums of a thread do not fit the registers"
    return ""


def ring_refusal(s: Any, problem: Gemm, target: Target, least: int) -> str:
    if s.stages < least or s.raster < 1:
        return f"a ring of {s.stages} stages; at least {least} must fit"
    if getattr(s, "per_sm", 1) > 1 and s.smem_bytes(problem) > stream_k.room(s, target):
        return f"{s.per_sm} CTAs of {s.smem_bytes(problem)} bytes do not fit the shared memory of an SM"
    return memory_refusal(s.smem_bytes(problem), target)


def _multistage_refusal(s: multistage.Multistage, problem: Gemm, target: Target, m: int, most: int) -> str:
    if s.block_tokens % (16 * s.token_warps) or s.warps % s.token_warps or s.rows % 64:
        return "warps do not divide the tile"
    if s.row_blocks * s.block_tokens // s.token_warps > most:
        return f"{s.row_blocks} row blocks of {s.block_tokens} tokens do not fit the registers"
    if s.stages < 2 or not 1 <= s.kc <= problem.units:
        return "needs two stages, and a unit of k for each split"
    if s.kc > 1 and s.tiles(problem, m) > _SEMAPHORES:
        return f"more than {_SEMAPHORES} tiles that split k"
    return memory_refusal(s.smem_bytes(problem), target)


def memory_refusal(need: int, target: Target) -> str:
    return "" if need <= target.smem_per_block else f"needs {need} bytes of shared memory, {target.arch} has less"


@dataclass(frozen=True)
class _StreamKCost:
    """Factors of the parts of a stream-K kernel's time; of a unit of 64 rows by 128 k, of a tile, of a shared tile."""

    stream: float = 0.545  # the longer of DRAM and tensor cores
    l2: float = 0.062  # weights and x of every CTA through L2
    convert: float = 0.139
    mma: float = 0.108
    latency: float = 0.142  # of a unit, hidden by more warpgroups
    tile: float = 15.7  # per 1000 rows of 64 times tokens: epilogue
    share: float = 1.49  # the same, through the workspace
    split: float = 3.89


_STREAM_K = _StreamKCost()  # fitted to 242 measurements of W4A16 on H200: 6 % rms, the first 1 % from the best


def stream_k_us(
    s: Any,
    problem: Gemm,
    target: Target,
    blocks: tuple[int, float],
    part: Partition,
) -> float:
    """Microseconds of the busiest CTA: its units of 128 k, its epilogues, its shares.

    Args:
        blocks: token blocks in all, and how many of them read the same weights.
    """
    c, (token_blocks, sharing) = _STREAM_K, blocks
    per_sm = getattr(s, "per_sm", 1)  # CTAs that take turns on the units of an SM
    tiles = token_blocks * -(-problem.row_blocks // s.cta_blocks)
    waves = -(-(tiles - part.shared) // part.grid)
    units = waves * problem.units - (-part.shared * problem.units // part.grid)
    weights, x = s.cta_blocks * problem.unit_bytes, s.block_tokens * 128 * problem.x_bytes
    gb = part.grid / (target.dram_gb_s * 1e3)
    mma = per_sm * s.cta_blocks * 64 * 128 * 2 * s.block_tokens * target.sms / (target.tflops(problem.rate) * 1e6)
    area, shared = s.cta_blocks * s.block_tokens / 1e3, part.shared > 0
    per_unit = c.stream * max(weights * gb / sharing, mma) + c.l2 * (weights + x) * gb + c.mma * mma
    per_unit += c.convert * per_sm * s.cta_blocks * 0.8192 + c.latency / (per_sm * s.warpgroups)
    per_unit *= 1 + 0.02 * max(0, 4 - s.stages)  # a short ring hides less of the latency (an estimate)
    return units * per_unit + (waves + shared) * c.tile * area + shared * (c.share * area + c.split)


def _multistage_us(
    s: multistage.Multistage,
    problem: Gemm,
    target: Target,
    m: int,
) -> float:
    """Microseconds by resources: CTAs that share an SM, waves, the longest of DRAM, tensor cores and conversion."""
    blocks, threads = s.rows // 64, 32 * s.warps
    sums = s.row_blocks * s.block_tokens // s.token_warps // 2
    registers = min(255, _REGISTERS * (sums + 64))
    fits = min(target.smem_per_sm // (s.smem_bytes(problem) + 1024), target.registers_per_sm // (registers * threads))
    on_sm = max(1, min(4, int(fits)))
    ctas = s.tiles(problem, m) * s.kc
    waves, busy = -(-ctas // (target.sms * on_sm)), min(on_sm, -(-ctas // target.sms))
    units = -(-problem.units // s.kc)
    load = (
        (blocks * problem.unit_bytes + 0.3 * s.block_tokens * 128 * problem.x_bytes)
        * target.sms
        / (target.dram_gb_s * 1e3)
    )
    mma = blocks * 64 * 128 * 2 * s.block_tokens * target.sms / (0.7 * target.tflops(problem.rate) * 1e6)
    convert = blocks * 64 * 128 * 1.5 * s.token_warps / (_LOGIC_LANES * _CLOCK_GHZ * 1e3)
    latency = 1.2 / s.stages
    unit = max(busy * max(load, mma, convert), latency)
    fix_up = (1.0 + 0.2 * s.kc) * (s.kc > 1)
    return _LAUNCH_US + waves * units * unit + fix_up + 0.5 * waves
