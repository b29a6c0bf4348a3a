"""The search spaces of linear layers and of experts: one for each kind of operands, all made by `of` from a problem."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from terrazzo.lowering.targets import Target
from terrazzo.schedules import grouped, multistage, small_batch, stream_k, tile_costs, token_tiles, w4ax
from terrazzo.schedules.clusters import PAIR
from terrazzo.schedules.multistage import Multistage
from terrazzo.schedules.partition import memory_refusal
from terrazzo.schedules.problem import TOKENS_PER_TILE, Gemm
from terrazzo.schedules.small_batch import SmallBatch
from terrazzo.schedules.spaces import RASTER, Space
from terrazzo.schedules.stream_k import StreamK
from terrazzo.schedules.token_tiles import TokenTiles

Pairs = Iterator[tuple[str, Any]]
_RASTERS = (RASTER, 4, 2, 1, 16)
_FEW = 512  # tokens up to which only a wide space has other rasters than the first
_FEW_ROWS = 64  # tokens up to which tokens as the A operand would leave half of it empty
_SEMAPHORES = 4096  # of a stream: one for each tile that splits k
_LAUNCH_US = 2.0  # start and end of a grid
_LOGIC_LANES = 64  # LOP3 and the like of one SM in one clock
_CLOCK_GHZ = 1.6
_REGISTERS = 1.25  # of a multistage thread, for each accumulator and operand register that its tile needs
_SETTLE = 0.15  # of a unit's tensor-core time on e4m3: sums of a group are scaled and added (an estimate)
_PERSISTENT = ((16, 4, 1), (32, 4, 1), (64, 4, 1), (64, 8, 1), (128, 8, 2))  # tokens, warps, warps along the tokens
_TURNS = 0.1  # of a stream-K kernel's time that warpgroups in turn save (an estimate, so that both are measured)
_SETTLED = 64  # row tiles times tokens of a warp on mma.sync of e4m3: products wait in registers to be scaled
_PERSISTENT_SUMS = 128  # f32 sums of a thread of the persistent program, beside the s32 sums of a block
_PERSISTENT_REGISTERS = 1.5  # of such a thread, for each f32 and s32 sum


def of(problem: Gemm) -> Space:
    """The schedules of a problem."""
    if problem.experts:
        return Grouped(problem)
    if problem.scales == "mx" or (problem.weight in ("s8", "e4m3") and problem.activations == problem.weight):
        return Direct(problem)
    return {"f16": Linear, "s8": Bytes, "e4m3": E4M3, "s4_s8": Blocks}[problem.activations](problem)


class Linear(Space):
    """Schedules of one weight; of 16-bit operands."""

    problem: Gemm
    warp_tiles = multistage.BLOCK_TOKENS
    """Tokens of the tiles on mma.sync."""

    def __init__(self, problem: Gemm) -> None:
        super().__init__(problem)
        self.programs = {"small_batch": SmallBatch, problem.form.program: StreamK, "multistage": Multistage}

    def fixed(self, program: str) -> dict[str, Any]:
        return fixed(self.problem) if self.programs[program] is StreamK else {}

    def heuristic(self, target: Target, m: int) -> tuple[str, Any]:
        if small_batch.serves(self.problem, target, m):
            return "small_batch", small_batch.choose(self.problem, target, m)
        return self.tile(target, m)

    def tile(self, target: Target, m: int) -> tuple[str, Any]:
        """The heuristic's program and schedule of wide batches."""
        if target.supports(f"wgmma.{self.problem.rate}"):
            return self.problem.form.program, stream_k.choose(self.problem, target, m)
        return "multistage", multistage.choose(self.problem, target, m, self.warp_tiles)

    def every(self, target: Target, m: int, wide: bool = False) -> Pairs:
        if m <= self.problem.form.small_tokens:
            yield from (("small_batch", s) for s in small_batch.every(self.problem, target, m))
        if target.supports(f"wgmma.{self.problem.rate}"):
            yield from ((self.problem.form.program, s) for s in self.tiles(target, m, wide))
        else:
            yield from (("multistage", s) for s in _multistage(self.problem, target, m, self.warp_tiles))

    def tiles(self, target: Target, m: int, wide: bool) -> Iterator[StreamK]:
        """The tiles on wgmma, with as many stages as fit; also pairs of CTAs, and two CTAs on an SM."""
        form = self.problem.form_name
        for tokens, warpgroups, row_blocks, raster in tiles_of(self.problem, m, wide):
            for stage_k in (64, 128):
                s = StreamK(tokens, warpgroups, row_blocks, 2, stage_k, raster, form=form)
                yield from rings(stream_k.fitted(s, self.problem, target), wide)
                yield from self.paired(s, target, m)
        for tokens, *shape in tiles_of(self.problem, m):
            for warpgroups, row_blocks in ((1, 1), (1, 2), (2, 1), (2, 2)) if shape == [2, 1, RASTER] else ():
                for stage_k in (64, 128):
                    s = StreamK(tokens, warpgroups, row_blocks, 2, stage_k, per_sm=2, form=form)
                    yield stream_k.fitted(s, self.problem, target)
                    if (warpgroups, row_blocks) == (1, 1):
                        yield from self.paired(replace(s, per_sm=1), target, m)

    def paired(self, s: StreamK, target: Target, m: int) -> Iterator[StreamK]:
        """The tile with pairs of CTAs, where there may be such."""
        found = stream_k.pairs(stream_k.fitted(s, self.problem, target), self.problem, target, m)
        if found:
            yield found

    def refusal(self, program: str, schedule: Any, target: Target, m: int) -> str:
        if program == "small_batch":
            return small_batch_refusal(schedule, self.problem, target, m)
        if program == "multistage":
            return multistage_refusal(schedule, self.problem, target, m)
        if not target.supports(f"wgmma.{self.problem.rate}"):
            return f"{target.arch} has no wgmma of {self.problem.rate}"
        return tile_refusal(schedule, self.problem, target)

    def cost(self, program: str, schedule: Any, target: Target, m: int) -> float:
        if program == "small_batch":
            return small_batch.cost(schedule, self.problem, target)
        if program == "multistage":
            return _multistage_us(schedule, self.problem, target, m)
        return stream_k.us(schedule, self.problem, target, m)


class Bytes(Linear):
    """Schedules of 8-bit operands."""

    def tiles(self, target: Target, m: int, wide: bool) -> Iterator[StreamK]:
        for tokens, warpgroups, row_blocks, raster in tiles_of(self.problem, m, wide):
            s = StreamK(tokens, warpgroups, row_blocks, 2, raster=raster, form=self.problem.form_name)
            yield from rings(stream_k.fitted(s, self.problem, target), wide)
            yield from self.paired(s, target, m)
            if (warpgroups, row_blocks, raster) == (2, 1, RASTER):  # pairs of half its rows
                yield from self.paired(replace(s, warpgroups=1), target, m)


class Direct(Bytes):
    """Schedules of bytes times bytes, and of groups of both operands, which have no program for small batches."""

    warp_tiles = multistage.FEW_TOKENS

    def __init__(self, problem: Gemm) -> None:
        super().__init__(problem)
        self.programs = {problem.form.program: StreamK, "multistage": Multistage}
        if problem.form_name == token_tiles.FORM:
            self.programs["direct_tokens"] = TokenTiles

    def heuristic(self, target: Target, m: int) -> tuple[str, Any]:
        found = self.tile(target, m)
        if not self._may_be_first(target, m):
            return found
        top = tile_costs.bucket(m)
        rival = "direct_tokens", token_tiles.choose(self.problem, target, m)
        return min(found, rival, key=lambda it: self.cost(*it, target, top))

    def _may_be_first(self, target: Target, m: int) -> bool:
        """Whether tokens may be the A operand."""
        return "direct_tokens" in self.programs and target.supports("wgmma.e4m3") and m > _FEW_ROWS

    def every(self, target: Target, m: int, wide: bool = False) -> Pairs:
        yield from super().every(target, m, wide)
        if self._may_be_first(target, m):
            yield from (("direct_tokens", s) for s in token_tiles.every(self.problem, target, m))

    def refusal(self, program: str, schedule: Any, target: Target, m: int) -> str:
        if program == "direct_tokens":
            return token_tiles.refusal(schedule, self.problem, target)
        of_warps = program == "multistage" and self.problem.activations == "e4m3"
        return (e4m3_refusal(schedule, target) if of_warps else "") or super().refusal(program, schedule, target, m)


class E4M3(Bytes):
    """The same on e4m3, with less room for accumulators; small batches run on mma.sync where e4m3 has it."""

    def heuristic(self, target: Target, m: int) -> tuple[str, Any]:
        if small_batch.serves(self.problem, target, m):
            tokens = next(t for t in (TOKENS_PER_TILE, 2 * TOKENS_PER_TILE) if m <= t)
            return "small_batch", small_batch.choose(self.problem, target, tokens)
        return super().heuristic(target, m)

    def every(self, target: Target, m: int, wide: bool = False) -> Pairs:
        few = not target.supports("wgmma.e4m3") and m <= 2 * TOKENS_PER_TILE
        yield from (pair for pair in super().every(target, m, wide) if pair[0] != "small_batch" or few)

    def refusal(self, program: str, schedule: Any, target: Target, m: int) -> str:
        refusal = e4m3_refusal(schedule, target) if program != "stream_k" else ""
        return refusal or super().refusal(program, schedule, target, m)

    def cost(self, program: str, schedule: Any, target: Target, m: int) -> float:
        return super().cost(program, schedule, target, m) + settle_us(self.problem, target, m)


class Blocks(Linear):
    """Schedules of W4Ax: where a target has native s4, the persistent program multiplies INT4 blocks as such; elsewhere
    all blocks are int8, and the form of the scales picks the tile program."""

    def __init__(self, problem: Gemm) -> None:
        super().__init__(problem)
        self.programs = {"small_batch": SmallBatch, problem.form.program: StreamK, "persistent": w4ax.Persistent}

    def heuristic(self, target: Target, m: int) -> tuple[str, Any]:
        if _native(target):
            return "persistent", w4ax.choose_persistent(self.problem, target, m)
        return super().heuristic(target, m)

    def every(self, target: Target, m: int, wide: bool = False) -> Pairs:
        if not _native(target):
            yield from super().every(target, m, wide)
            return
        widest = next((tokens for tokens, *_ in _PERSISTENT if m <= tokens), _PERSISTENT[-1][0])
        for tokens, warps, token_warps in (it for it in _PERSISTENT if it[0] <= widest):
            for row_blocks in (1, 2):
                for stages in (2, 3, 4):
                    for ctas in (1, 2):
                        yield "persistent", w4ax.Persistent(tokens, warps, row_blocks, stages, token_warps, ctas)

    def tiles(self, target: Target, m: int, wide: bool) -> Iterator[StreamK]:
        turns = "turns" in self.problem.form.fields
        for tokens, warpgroups, row_blocks, raster in tiles_of(self.problem, m, True):
            other = wide or raster == RASTER or -(-m // tokens) > min(raster, RASTER)  # the same order otherwise
            s = StreamK(tokens, warpgroups, 1, 2, raster=raster, form=self.problem.form_name)
            for one in (s, replace(s, turns=1)) if turns and (wide or tokens >= 64) else (s,):
                if row_blocks == 1 and other:
                    yield from rings(stream_k.fitted(one, self.problem, target), wide)

    def refusal(self, program: str, schedule: Any, target: Target, m: int) -> str:
        if (program == "persistent") != _native(target):
            return f"{program} is not the program of {target.arch}"
        if program != "persistent":
            return super().refusal(program, schedule, target, m)
        tile = (schedule.block_tokens, schedule.warps, schedule.token_warps)
        if tile not in _PERSISTENT or schedule.row_blocks not in (1, 2) or schedule.rows % 64:
            return "warps do not divide the tile"
        size = schedule.smem_bytes(self.problem)
        if schedule.stages < 2 or schedule.ctas < 1:
            return "needs two stages and a CTA"
        if schedule.ctas > 1 and schedule.ctas * (size + 1024) > target.smem_per_sm:
            return f"{schedule.ctas} CTAs do not fit an SM's shared memory"
        registers = min(255, _PERSISTENT_REGISTERS * 2 * schedule.sums + 48) * schedule.warps * 32
        if schedule.sums > _PERSISTENT_SUMS or schedule.ctas * registers > target.registers_per_sm:
            return f"{schedule.ctas} CTAs with {schedule.sums} sums of a thread do not fit the registers"
        return memory_refusal(size, target)

    def cost(self, program: str, schedule: Any, target: Target, m: int) -> float:
        if program == "stream_k":
            turns = int(schedule.block_tokens > 64) - schedule.turns  # wide tiles were measured with turns
            return super().cost(program, schedule, target, m) * (1 + _TURNS * turns)
        if program != "persistent":
            return super().cost(program, schedule, target, m)
        tiles = -(-self.problem.row_blocks * 64 // schedule.rows) * -(-m // schedule.block_tokens)
        ctas = schedule.ctas * target.sms
        part = -(-tiles * self.problem.units // ctas)  # units of the busiest CTA, which splits along k at will
        rows = schedule.rows // 64
        nbytes = rows * self.problem.unit_bytes + 0.3 * schedule.block_tokens * 128
        load = nbytes * ctas / (target.dram_gb_s * 1e3)
        mma = rows * 64 * 128 * 2 * schedule.block_tokens * ctas / (0.6 * target.tflops("s8") * 1e6)
        return 2.0 + part * max(load, mma, 1.2 / (schedule.stages * schedule.ctas)) + 0.5 * schedule.ctas


class Grouped(Space):
    """Schedules of experts for m tokens of all of them together: stream-K tiles over the tiles of all experts, or a CTA
    for each tile on mma.sync."""

    problem: Gemm

    def __init__(self, problem: Gemm) -> None:
        super().__init__(problem)
        self.programs = {"grouped": StreamK, "multistage": Multistage}

    def fixed(self, program: str) -> dict[str, Any]:
        return fixed(self.problem) if program == "grouped" else {}

    def heuristic(self, target: Target, m: int) -> tuple[str, Any]:
        if self._on_warps(target):
            return "multistage", grouped.choose_multistage(self.problem, target, m)
        return "grouped", grouped.choose(self.problem, target, m)

    def _on_warps(self, target: Target) -> bool:
        return not target.supports(f"wgmma.{self.problem.rate}")

    def every(self, target: Target, m: int, wide: bool = False) -> Pairs:
        form, average = self.problem.form, -(-m // self.problem.experts)
        if self._on_warps(target):
            tiles = _multistage(self.problem, target, m, multistage.FEW_TOKENS, 2 * average)
            yield from (("multistage", s) for s in tiles)
            return
        for tokens, warpgroups, row_blocks, raster in tiles_of(self.problem, 2 * average, wide):
            if row_blocks > 1 and "row_blocks" not in form.fields:
                continue
            for stage_k in (64, 128) if form.x_16_bit else (128,):
                s = StreamK(tokens, warpgroups, row_blocks, 2, stage_k, raster, form=self.problem.form_name)
                yield from (("grouped", it) for it in rings(grouped.fitted(s, self.problem, target), wide))

    def refusal(self, program: str, schedule: Any, target: Target, m: int) -> str:
        if program == "multistage":
            if self.problem.activations == "s4_s8":
                return f"{program} does not multiply blocks of two precisions"
            e4m3 = self.problem.activations == "e4m3"
            refusal = e4m3_refusal(schedule, target) if e4m3 else ""
            return refusal or multistage_refusal(schedule, self.problem, target, m)
        if not target.supports(f"wgmma.{self.problem.rate}"):
            return f"{target.arch} has no warpgroup instructions"
        if self.problem.form_name == "f16 post" and schedule.block_tokens == self.problem.form.widths[-1]:
            return f"no tile of {schedule.block_tokens} tokens"
        if schedule.per_sm != 1:
            return "one CTA on an SM"
        if not grouped.legal(schedule):
            return f"{schedule.warpgroups} warpgroups of {schedule.row_blocks} row blocks do not fit the registers"
        return tile_refusal(schedule, self.problem, grouped.room(target, self.problem.experts))

    def cost(self, program: str, schedule: Any, target: Target, m: int) -> float:
        if program == "multistage":
            us = _multistage_us(schedule, self.problem, target, m)
            return us + (settle_us(self.problem, target, m) if self.problem.activations == "e4m3" else 0)
        us = grouped.predicted_us(schedule, self.problem, target, m)
        return us + (settle_us(self.problem, target, m) if self.problem.activations == "e4m3" else 0)


def fixed(problem: Gemm) -> dict[str, Any]:
    """The fields of `StreamK` that its program does not have, or that are the problem's."""
    own = {"form": problem.form_name, "row_blocks": 1}
    return {it.name: own.get(it.name, it.default) for it in fields(StreamK) if it.name not in problem.form.fields}


def tiles_of(problem: Gemm, m: int, wide: bool = False) -> Iterator[tuple[int, int, int, int]]:
    """(tokens, warpgroups, row blocks of each, raster) of tiles no wider than m needs."""
    block_tokens = problem.form.widths
    widest = next((t for t in block_tokens if m <= t), block_tokens[-1])
    for tokens in (t for t in block_tokens if wide or widest // 4 <= t <= widest):
        for warpgroups in (1, 2, 3, 4) if wide else (2, 3, 4):
            for row_blocks in (1, 2):
                if warpgroups * row_blocks <= 2 * problem.row_blocks:
                    # token blocks that walk over the rows together: all of them or, where they are many, fewer
                    for raster in _RASTERS:
                        if raster == RASTER or (raster * tokens < m and (wide or m > _FEW)):
                            yield tokens, warpgroups, row_blocks, raster


def rings(schedule: StreamK, wide: bool) -> Iterator[StreamK]:
    """A tile with as many stages as fit and, if wide, with each smaller number of them from three on."""
    yield schedule
    if wide:
        yield from (replace(schedule, stages=stages) for stages in range(schedule.stages - 1, 2, -1))


def _multistage(
    problem: Gemm, target: Target, m: int, tiles: tuple[int, ...] = multistage.BLOCK_TOKENS, most: int = 0
) -> Iterator[Multistage]:
    """`tiles`: tokens of those to try, the widest of them for `most` tokens of one matrix (0: m)."""
    widest = next((t for t in tiles if (most or m) <= t), tiles[-1])
    for tokens in (t for t in tiles if t <= widest):
        for warps, token_warps in ((4, 1), (8, 1), (8, 2)):
            for row_blocks in (1, 2):
                for stages in (2, 3, 4):
                    raster = 16 if m > 8 * tokens else 8
                    base = Multistage(tokens, warps, row_blocks, stages, token_warps, raster=raster)
                    if base.rows % 64:
                        continue
                    full = 2 * target.sms // max(1, base.tiles(problem, m))
                    for kc in sorted({1, max(1, full // 2), max(1, full), min(8, 2 * full)}):
                        if kc <= min(8, problem.units):
                            yield replace(base, kc=kc)


def small_batch_refusal(s: SmallBatch, problem: Gemm, target: Target, m: int) -> str:
    if m > min(problem.form.small_tokens, s.x_rows):
        return f"small_batch with {s.x_rows} resident rows does not hold {m} tokens"
    if s.tokens and not 0 <= s.token_tiles * TOKENS_PER_TILE - s.tokens < TOKENS_PER_TILE:
        return f"{s.tokens} tokens are not those of {s.token_tiles} tiles"
    if min(s.kc, s.nc, s.warps, s.chunk, s.stages, s.cluster, s.token_tiles) < 1 or s.nc % s.cluster:
        return "a count below one, or CTAs that do not divide into clusters"
    if s.joined and (s.cluster > 1 or s.kc % PAIR or not target.supports("cluster")):
        return f"{s.kc} CTAs along k, {s.cluster} with the same slice of x, cannot be pairs"
    if s.warps > min(small_batch.MAX_WARPS, problem.units // s.kc):
        return f"{s.warps} warps have no work in k / {s.kc}"
    if s.kc * s.nc > target.sms:
        return f"{s.kc} * {s.nc} CTAs wait for each other on {target.sms} SMs"
    if s.registers(problem) * s.warps * 32 > target.registers_per_sm:
        return f"{s.warps} warps need more registers than an SM has"
    return memory_refusal(s.launch_bytes(problem, target), target)


def tile_refusal(s: StreamK, problem: Gemm, target: Target) -> str:
    """Why a tile cannot be a CTA on the target."""
    if s.block_tokens not in problem.form.widths:
        return f"no tile of {s.block_tokens} tokens"
    if s.crowded():
        return s.crowded()
    if s.cluster_refusal(problem, target):
        return s.cluster_refusal(problem, target)
    if s.stages < s.rules.least or s.raster < 1:
        return f"a ring of {s.stages} stages; at least {s.rules.least} must fit"
    if s.per_sm > 1 and s.smem_bytes(problem) > stream_k.room(s, target):
        return f"{s.per_sm} CTAs of {s.smem_bytes(problem)} bytes do not fit the shared memory of an SM"
    return memory_refusal(s.smem_bytes(problem), target)


def multistage_refusal(s: Multistage, problem: Gemm, target: Target, m: int) -> str:
    if s.block_tokens % (16 * s.token_warps) or s.warps % s.token_warps or s.rows % 64:
        return "warps do not divide the tile"
    if s.row_blocks * s.block_tokens // s.token_warps > (128 if problem.form_name == "f16 post" else 256):
        return f"{s.row_blocks} row blocks of {s.block_tokens} tokens do not fit the registers"
    if s.stages < 2 or not 1 <= s.kc <= problem.units:
        return "needs two stages, and a unit of k for each split"
    if s.kc > 1 and s.tiles(problem, m) > _SEMAPHORES:
        return f"more than {_SEMAPHORES} tiles that split k"
    return memory_refusal(s.smem_bytes(problem), target)


def e4m3_refusal(s: Multistage | SmallBatch, target: Target) -> str:
    """Why a program on mma.sync of e4m3 cannot run, or ""."""
    if not target.supports("mma.e4m3"):
        return f"{target.arch} emulates mma.sync of e4m3"
    held = s.row_blocks * s.block_tokens // s.token_warps if isinstance(s, Multistage) else 0
    if held > _SETTLED or (held and s.block_tokens >= 64 and s.row_blocks > 1):
        return "products wait in registers to be scaled: one row tile for each warp from 64 tokens on"
    return ""


def settle_us(problem: Gemm, target: Target, m: int) -> float:
    """Predicted microseconds of scaling and adding the sums of m tokens."""
    return _SETTLE * 2 * m * problem.n * problem.k / target.tflops("e4m3") / 1e6


def _native(target: Target) -> bool:
    return target.supports("mma.s4")


def _multistage_us(s: Multistage, problem: Gemm, target: Target, m: int) -> float:
    """Microseconds by resources: CTAs that share an SM, waves, the longest of DRAM, tensor cores and conversion."""
    blocks, threads = s.rows // 64, 32 * s.warps
    sums = s.row_blocks * s.block_tokens // s.token_warps // 2
    registers = min(255, _REGISTERS * (sums + 64))
    fits = min(target.smem_per_sm // (s.smem_bytes(problem) + 1024), target.registers_per_sm // (registers * threads))
    on_sm = max(1, min(4, int(fits)))
    ctas = s.tiles(problem, m) * s.kc
    waves, busy = -(-ctas // (target.sms * on_sm)), min(on_sm, -(-ctas // target.sms))
    units = -(-problem.units // s.kc)
    nbytes = blocks * problem.unit_bytes + 0.3 * s.block_tokens * 128 * problem.x_bytes
    load = nbytes * target.sms / (target.dram_gb_s * 1e3)
    mma = blocks * 64 * 128 * 2 * s.block_tokens * target.sms / (0.7 * target.tflops(problem.rate) * 1e6)
    codes = 0 if problem.weight == problem.activations else blocks * 64 * 128
    convert = codes * 1.5 * s.token_warps / (_LOGIC_LANES * _CLOCK_GHZ * 1e3)
    latency = 1.2 / s.stages
    unit = max(busy * max(load, mma, convert), latency)
    fix_up = (1.0 + 0.2 * s.kc) * (s.kc > 1)
    return _LAUNCH_US + waves * units * unit + fix_up + 0.5 * waves
