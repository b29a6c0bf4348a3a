"""Schedules of the tile programs on wgmma, and the partition of their tiles over the SMs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from terrazzo.lowering.targets import Target
from terrazzo.schedules import clusters, forms, tile_costs
from terrazzo.schedules.costs import COSTS
from terrazzo.schedules.forms import FORMS, Form
from terrazzo.schedules.partition import Partition, share_tiles
from terrazzo.schedules.problem import Gemm

BLOCK_TOKENS = forms.WIDTHS
_RESERVED = 2048  # barriers, alignment
_FINE_RING = ((80, 4, 1), (96, 4, 1), (112, 2, 2), (112, 4, 1), (128, 2, 2), (128, 4, 1), (224, 2, 1), (256, 2, 1))
"""Tiles with 16-bit x whose ring stages hold 64 k: more of them fit, or registers for the words of one."""
_COOL = ((96, 2, 2), (112, 2, 2), (128, 2, 2))
"""The fastest of short sweeps from 129 tokens on with 16-bit x; of long benchmarks, where the clock follows the power,
they lose."""
_LARGE_E4M3 = 100  # millions of weights from which four warpgroups have enough tiles to share, as on int8


@dataclass(frozen=True)
class StreamK:
    """Tiles of 64 * row_blocks * warpgroups rows by block_tokens; a ring stage holds `stage_k`, an SM `per_sm` CTAs.

    Attributes:
        cluster: CTAs that may share a tile alike, and add it up without a trip to memory.
        turns: 1: a warpgroup issues its wgmmas when the one before it has, not as the tensor core takes them.
        form: of the product, a key of `forms.FORMS`, whose `fields` its program has.
    """

    block_tokens: int
    warpgroups: int
    row_blocks: int
    stages: int
    stage_k: int = 128
    raster: int = 8
    per_sm: int = 1
    cluster: int = 1
    turns: int = 0
    form: str = field(default="f16 fold", kw_only=True)

    @property
    def rules(self) -> Form:
        """Of the form."""
        return FORMS[self.form]

    @property
    def recorded(self) -> tuple[str, ...]:
        """The fields that records hold."""
        return self.rules.fields

    @property
    def tile(self) -> tile_costs.Tile:
        return self.block_tokens, self.warpgroups, self.row_blocks

    @property
    def cta_blocks(self) -> int:
        """Row blocks of 64 of one CTA."""
        return self.warpgroups * self.row_blocks

    @property
    def pieces(self) -> int:
        """Products that a tile's tokens are parted into, where their sums wait to be scaled."""
        return 1 if self.block_tokens <= forms.AT_ONCE else 2

    @property
    def sums(self) -> int:
        """Registers of a thread for sums while products run."""
        return self.rules.sums(self)

    @property
    def parts(self) -> bool:
        """Whether CTAs that share a tile alike part its sum."""
        return self.rules.parts(self)

    def crowded(self) -> str:
        """Why the sums do not fit the registers beside the operands, or ""."""
        return self.rules.crowded(self)

    def legal(self) -> bool:
        """Whether the sums fit the registers."""
        return not self.crowded()

    @property
    def flags(self) -> int:
        """Semaphores of a CTA."""
        return self.warpgroups * self.rules.flags

    def stage_bytes(self, problem: Gemm) -> int:
        """Of one stage of the ring: x, words and parameters; one set of these for both halves of 128 k."""
        shared = problem.groups_per_128 == 1
        params = (1 if shared else problem.groups_per_128 * self.stage_k // 128) * problem.record_bytes
        x = self.block_tokens * (self.stage_k * problem.x_bytes + self.rules.token_bytes)
        return x + self.cta_blocks * (self.stage_k * 8 * problem.bits + params)

    def smem_bytes(self, problem: Gemm) -> int:
        """Shared memory of one CTA."""
        own = self.warpgroups * self.rules.warpgroup_bytes(self, problem)
        return self.stages * self.stage_bytes(problem) + own + _RESERVED

    def tiles(self, problem: Gemm, m: int) -> int:
        return -(-m // self.block_tokens) * -(-problem.row_blocks // self.cta_blocks)

    def workspace(self, grid: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of the shares and semaphores of `grid` CTAs."""
        return (grid, self.cta_blocks, self.block_tokens // 8, 128, 4), (grid, self.flags)

    def cluster_refusal(self, problem: Gemm, target: Target) -> str:
        """Why the CTAs of a tile cannot be a cluster, or ""."""
        ring = self.stages * self.stage_k * self.block_tokens * problem.x_bytes
        of_tile = self.cluster, self.warpgroups, self.row_blocks, self.block_tokens
        if self.cluster > 1 and self.per_sm > 1:
            return f"clusters with {self.per_sm} CTAs on an SM"
        return clusters.refusal(*of_tile, ring, problem.units, target)

    @property
    def costs(self) -> tile_costs.TileCosts:
        """What its launches cost; CTAs that share an SM share its tensor cores (46 tuned launches on H200, 9 % rms)."""
        costs = COSTS[self.form].tiles if self.cluster == 1 else COSTS[self.form].pairs
        return (
            replace(costs, units={self.tile: 1.2 * self.per_sm * costs.unit(self.tile)}) if self.per_sm > 1 else costs
        )

    def params(self) -> dict[str, int]:
        """Arguments of the program's `build`."""
        return {name: getattr(self, name) for name in self.rules.fields}


S = TypeVar("S", bound=StreamK)


def of_tile(problem: Gemm, tile: tile_costs.Tile, raster: int = 8) -> StreamK:
    """The schedule of a tile, with two stages."""
    fine = problem.form.x_16_bit and tile in _FINE_RING
    return StreamK(*tile, stages=2, stage_k=64 if fine else 128, raster=raster, form=problem.form_name)


def room(schedule: StreamK, target: Target) -> int:
    """Bytes of shared memory for one of the CTAs of an SM; the driver keeps 1 KiB of each."""
    return min(target.smem_per_block, target.smem_per_sm // schedule.per_sm - 1024)


def fitted(schedule: S, problem: Gemm, target: Target, ring_k: int = 0) -> S:
    """The same tile with as many stages as fit, up to `ring_k` in all; 0: what the form's program unrolls."""
    each = schedule.stage_bytes(problem)
    stages = (room(schedule, target) - schedule.smem_bytes(problem) + schedule.stages * each) // each
    return replace(schedule, stages=min((ring_k or schedule.rules.ring_k) // schedule.stage_k, stages))


def pairs(schedule: S, problem: Gemm, target: Target, m: int) -> S | None:
    """The schedule with two CTAs for each tile, which are a cluster, where all of them run at once; else None, also for
    tall tiles: those of 384 and 512 rows took 4 to 12 % more time than others without pairs (16 and 64 tokens, H200).
    """
    s = replace(schedule, cluster=clusters.PAIR)
    fits = clusters.PAIR * s.tiles(problem, m) <= target.sms and s.cta_blocks <= clusters.TALLEST_PAIR
    return s if fits and not s.cluster_refusal(problem, target) else None


def choose(
    problem: Gemm, target: Target, m: int, widths: Sequence[int] | None = None, may_pair: bool = True
) -> StreamK:
    """The tile whose launch is cheapest for the bucket of m (`tile_costs`), with as many stages as fit.

    Args:
        widths: tokens of the tiles to choose from; None: the form's. may_pair: also pairs of CTAs.
    """
    if problem.form_name == "f16 post":
        return fitted(_of_scaled_sums(problem, m), problem, target)
    if problem.form_name == "s4_s8 block":
        return _of_scaled_blocks(problem, target, m)
    if problem.form_name == "s4_s8 integer" and tile_costs.bucket(m) <= 32:
        tile = tile_costs.bucket(m), _of_scaled_blocks(problem, target, m).warpgroups, 1
        return fitted(of_tile(problem, tile), problem, target)
    top, e4m3 = tile_costs.bucket(m), problem.form_name == "e4m3 post"
    made = _of_e4m3 if e4m3 else _of_measured
    found = made(problem, target, m, tile_costs.widths(m, widths or problem.form.widths), may_pair)
    cost = us if e4m3 else lambda *given: _divide(*given)[0]
    return min(found, key=lambda s: cost(s, problem, target, top))


def _of_measured(problem: Gemm, target: Target, m: int, widths: Sequence[int], may_pair: bool) -> list[StreamK]:
    """Every tile whose cost was measured, alone and with pairs of CTAs."""
    top, costs, found = tile_costs.bucket(m), COSTS[problem.form_name], []
    clustered, wide = "cluster" in problem.form.fields, problem.form.x_16_bit
    for tile in costs.pairs.units:
        spills = tile == (64, 3, 2) and problem.groups_per_128 > 1
        if tile[0] not in widths or (wide and (spills or (tile in _COOL and m > 128))):
            continue
        walks = clustered and problem.weight != problem.activations  # bytes by bytes were faster with 8
        raster = tile_costs.raster(-(-top // tile[0]), problem.row_blocks, target) if walks else 8
        s = fitted(of_tile(problem, tile, raster), problem, target)
        found += [s] if tile in costs.tiles.units else []
        found += filter(None, [clustered and may_pair and pairs(s, problem, target, top)])
    return [s for s in found if s.legal()]  # a tile that is too tall alone may be two CTAs'


def _of_e4m3(problem: Gemm, target: Target, m: int, widths: Sequence[int], may_pair: bool) -> list[StreamK]:
    """Four warpgroups where the accumulators and the number of tiles allow it, else two; or pairs of CTAs, of one
    warpgroup or two. A warpgroup has one group of wgmma in flight and converts 64 k meanwhile, so more of them fill the
    tensor core."""
    millions = problem.row_blocks * 64 * problem.units * 128 / 1e6
    top, found = tile_costs.bucket(m), []
    for tokens in widths:
        warpgroups = 4 if tokens <= 64 and millions >= _LARGE_E4M3 else 2
        many = tokens > forms.AT_ONCE
        raster = tile_costs.raster(-(-top // tokens), problem.row_blocks, target) if many else 8
        tiles = [of_tile(problem, (tokens, number, 1), raster) for number in dict.fromkeys((warpgroups, 2, 1))]
        tiles = [fitted(s, problem, target) for s in tiles if s.legal()]
        paired = () if many or not may_pair else (pairs(s, problem, target, top) for s in tiles)
        found += [tiles[0], *filter(None, paired)]
    return found


def _of_scaled_sums(problem: Gemm, m: int) -> StreamK:
    """By tokens and size of the weight; these programs were not measured tile by tile."""
    tokens = next((t for t in BLOCK_TOKENS if m <= t), 128) if m <= 128 else 128
    millions = problem.row_blocks * 64 * problem.units * 128 / 1e6
    shape = (2, 1)
    if tokens <= 64:
        shape = (4, 2) if tokens == 16 and millions >= 300 else (2, 2) if millions >= 100 else (2, 1)
    stage_k = 128 if tokens <= 64 or m <= 256 else 64
    return StreamK(tokens, *shape, stages=2, stage_k=stage_k, form=problem.form_name)


def _of_scaled_blocks(problem: Gemm, target: Target, m: int) -> StreamK:
    """The same of blocks: as few tiles as with the widest ones, as narrow as so many may be."""
    top, widths = tile_costs.bucket(m), problem.form.widths
    tiles = -(-top // widths[-1])
    tokens = next(tokens for tokens in widths if tokens * tiles >= top)
    millions = problem.row_blocks * 64 * problem.units * 128 / 1e6
    warpgroups = (4 if millions >= 40 else 2) if tokens <= 32 else (3 if millions >= 80 else 2) if tokens <= 64 else 2
    # wide tiles scale as long as they multiply: one warpgroup after the other
    turns = int(tokens > 64 and problem.form.program == "stream_k")
    return fitted(StreamK(tokens, warpgroups, 1, stages=2, turns=turns, form=problem.form_name), problem, target)


def partition(schedule: StreamK, problem: Gemm, target: Target, m: int) -> Partition:
    """The cheapest way to divide the tiles of the schedule over the SMs of the target."""
    return _divide(schedule, problem, target, m)[1]


def us(schedule: StreamK, problem: Gemm, target: Target, m: int) -> float:
    """Predicted microseconds; a ring of few stages hides less of the latency."""
    step_k = schedule.rules.step_k
    steps = schedule.stages * schedule.stage_k // step_k if step_k else 4
    return _divide(schedule, problem, target, m)[0] * (1 + 0.02 * max(0, 4 - steps))


def _divide(schedule: StreamK, problem: Gemm, target: Target, m: int) -> tuple[float, Partition]:
    """Microseconds, and the partition."""
    of_tile = schedule.tile, schedule.tiles(problem, m), problem.units
    launch = (
        tile_costs.dram_us(target, problem.launch_bytes(m)),
        target.sms * schedule.per_sm,
        schedule.parts,
        tile_costs.later_wave(target, m, problem.k, problem.x_bytes),
        schedule.cluster,
    )
    if schedule.form != "s4_s8 block":
        return schedule.costs.divide(*of_tile, *launch)
    part = share_tiles(*of_tile[1:], target.sms)  # other divisions were not measured
    return schedule.costs.us(*of_tile, part, *launch), part
