"""Schedules of the W4A8 programs: small batches, stream-K on wgmma, multistage; and what bounds a problem."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import ClassVar, TypeVar

from terrazzo.layouts.converters import get_converter
from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.targets import Target
from terrazzo.schedules import clusters, multistage, small_batch, tile_costs
from terrazzo.schedules.partition import Partition
from terrazzo.schedules.problem import Gemm
from terrazzo.schedules.roofline import Roofline, weight_only_gemm

BLOCK_TOKENS = (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
TOKENS_PER_TILE = small_batch.TOKENS_PER_TILE
MAX_TOKENS = 32
"""Of the small-batch program; `serves` says where it is also the faster one."""
CONVERTERS = {"xor": "u4_s8_lqq", "unsigned": "u4_u8_lqq"}
_LARGE = 40e6  # weights from which 9 to 16 tokens are faster on wgmma, and up to 8 may be (H200)
_MIDDLE = 26e6  # weights from which wgmma is faster than more than two token tiles (measured on H200)
COSTS = {  # of small batches: resident rows -> fitted to measurements on H200: 155 of 1 and 4 tokens, 5 % rms, the
    # choice 1 % from the fastest that was timed (tests/data/tuning/small_batch_h200.json: 109 of them); some 40 of 16
    8: small_batch.Cost(0.0494, 0.6, 0.2536, 0.3695, 0.1217, 0.0175, 0.364, 0.9313, 0.4707, joined=0.7125, flight=48),
    16: small_batch.Cost(0.169, 0.0, 0.0, 0.0, 0.434, 0.0032, 0.131, 0.358, 0.512),
    # estimates, not measured: the loop over items takes as many issue slots as with 2 (machine code of a row tile of
    # 16 x 128 k: 103, 110, 105, 108 instructions with 1 to 4 token tiles, 4 IMMA more for each), half of what DRAM
    # takes, so streaming costs the same. A chunk's 0.434 us is split into what grows with its sums and what does not;
    # 128 KB of X come as for W4A16 on 16 tokens; the workspace grows with the tokens.
    24: small_batch.Cost(0.169, 0.0, 0.0, 0.0, 0.23, 0.01, 0.197, 0.358, 0.512, 0.6),
    32: small_batch.Cost(0.169, 0.0, 0.0, 0.0, 0.23, 0.01, 0.262, 0.358, 0.512, 0.6),
}
TILE_COSTS = tile_costs.TileCosts(  # sharing fitted to 1337 measurements of group 64 on H200, units to 450 (4 % rms),
    # tiles of up to 32 tokens to 192 before
    start=1.58, store=0.985, share=2.308, add=0.728, uneven=0.254, uneven_area=1.398,
    part=1.802, part_area=1.263, part_each=0.349, pair=0.95, pair_area=0.85, traffic=0.952, busy=0.2,
    units={
        (16, 2, 1): 0.232, (16, 2, 2): 0.455, (16, 3, 1): 0.32, (16, 4, 1): 0.43, (16, 4, 2): 0.747,
        (32, 2, 1): 0.232, (32, 2, 2): 0.512, (32, 3, 1): 0.353, (32, 4, 1): 0.448, (32, 4, 2): 0.899,
        (48, 2, 1): 0.245, (48, 3, 1): 0.262, (48, 4, 1): 0.375,
        (64, 2, 1): 0.27, (64, 2, 2): 0.54, (64, 3, 1): 0.37, (64, 4, 1): 0.47,
        (80, 2, 1): 0.301, (80, 2, 2): 0.61, (80, 3, 1): 0.39, (80, 4, 1): 0.51,
        (96, 2, 1): 0.326, (96, 2, 2): 0.67, (96, 4, 1): 0.552,
        (112, 2, 1): 0.349, (112, 2, 2): 0.69, (112, 4, 1): 0.616,
        (128, 2, 1): 0.366, (128, 2, 2): 0.747, (128, 3, 1): 0.51, (128, 4, 1): 0.665,
        (160, 2, 1): 0.42, (192, 2, 1): 0.495, (224, 2, 1): 0.575, (256, 2, 1): 0.655,
    },
)  # fmt: skip
_OF_PAIRS = replace(
    TILE_COSTS,
    units={
        **TILE_COSTS.units, (32, 1, 1): 0.17, (64, 1, 1): 0.18, (96, 1, 1): 0.204, (128, 1, 1): 0.235,
        (160, 1, 1): 0.267, (192, 1, 1): 0.32, (224, 1, 1): 0.35,
    },
)  # fmt: skip
"""Where the CTAs of a tile are pairs, tiles of one warpgroup are worth it too; estimates, from W4A16's beside two, by
which the choice is within 0.6 % of the fastest of 33 problems (H200)."""
_START_US = 2.5  # what a cost leaves out: mean of six measurements of 16 tokens
# of 32 tokens, and of each million weights: fitted to eight measurements on H200, 3 % rms
_STREAM_K_US = (4.6, 0.135)
# up to 8 tokens: what the cost of small_batch leaves out, and what that of stream_k has too much
_SMALL_START_US, _OVERRATED_US = 0.44, 0.94
_RESERVED = 2048  # barriers, flags, alignment
UNROLLED_STAGES = 8
"""Most stages of `stream_k`, which unrolls a round of its ring: more code costs what more stages bring. At 64 tokens
W4A8 takes 0 to 5 % less than with 12, e4m3 1 to 5 % less than with 10 or 12 (H200, 9 problems; rows not kept)."""
_OUT_PITCH = {2: 24 * 2, 4: 20 * 4}  # bytes of an output element -> of a staged row of 16
# warpgroups -> accumulator registers of a thread that ptxas places without serializing wgmma (and bytes to spare)
_SUMS = {1: 128, 2: 128, 3: 64, 4: 64}


@dataclass(frozen=True)
class StreamK:
    """Tiles of 64 * row_blocks * warpgroups rows by block_tokens; a ring stage holds 128 k. In stream_k, `cluster` CTAs
    may share a tile alike, and add it up without a trip to memory."""

    block_tokens: int
    warpgroups: int
    row_blocks: int
    stages: int
    raster: int = 8
    cluster: int = field(default=1, kw_only=True)

    @classmethod
    def of_tile(cls: type[S], tile: tile_costs.Tile, raster: int = 8) -> S:
        """That of a tile, with two stages."""
        return cls(*tile, stages=2, raster=raster)

    @property
    def cta_blocks(self) -> int:
        """Row blocks of 64 of one CTA."""
        return self.warpgroups * self.row_blocks

    @property
    def sums(self) -> int:
        """Accumulator registers of a thread."""
        return self.row_blocks * self.block_tokens // 2

    @property
    def parts(self) -> bool:
        """Whether CTAs that share a tile alike part its sum; two row blocks with that many sums would spill."""
        return tile_costs.parts_sums(self.warpgroups, self.sums) and (self.row_blocks == 1 or self.sums < 64)

    @property
    def costs(self) -> tile_costs.TileCosts:
        """What its launches cost."""
        return TILE_COSTS if self.cluster == 1 else _OF_PAIRS

    def legal(self) -> bool:
        """Whether the accumulators leave room for two sets of operands (two row blocks need more addresses)."""
        if self.warpgroups not in _SUMS:
            return False
        crowded = self.warpgroups == 4 and self.row_blocks > 1
        return self.sums <= _SUMS[self.warpgroups] // (1 + crowded)

    def stage_bytes(self, problem: Gemm) -> int:
        return self.block_tokens * 128 + self.cta_blocks * problem.unit_bytes

    def smem_bytes(self, problem: Gemm) -> int:
        staged = 4 * min(self.block_tokens, 32) * _OUT_PITCH[problem.out_bytes]
        scales = 8 * self.block_tokens
        return self.stages * self.stage_bytes(problem) + self.warpgroups * (staged + scales) + _RESERVED

    @property
    def threads(self) -> int:
        """Of a CTA: the warpgroups, and one for the copies."""
        return self.warpgroups * 128 + 128

    @property
    def flags(self) -> int:
        """Semaphores of a CTA: one for each warp."""
        return self.warpgroups * 4

    def workspace(self, grid: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of the shares and semaphores of `grid` CTAs."""
        return (grid, self.cta_blocks, self.block_tokens // 8, 128, 4), (grid, self.flags)

    def cluster_refusal(self, problem: Gemm, target: Target) -> str:
        """Why the CTAs of a tile cannot be a cluster, or ""."""
        ring = self.stages * 128 * self.block_tokens
        of_tile = self.cluster, self.warpgroups, self.row_blocks, self.block_tokens
        return clusters.refusal(*of_tile, ring, problem.units, target)

    def params(self) -> dict[str, int]:
        """Arguments of the program's `build`."""
        return asdict(self)


S = TypeVar("S", bound=StreamK)


def fitted(schedule: StreamK, problem: Gemm, target: Target, most: int = 12) -> StreamK:
    """The same tile with as many stages as fit, up to `most`."""
    fixed = schedule.smem_bytes(problem) - schedule.stages * schedule.stage_bytes(problem)
    return replace(schedule, stages=min(most, (target.smem_per_block - fixed) // schedule.stage_bytes(problem)))


def choose(
    problem: Gemm, target: Target, m: int, widths: Sequence[int] = BLOCK_TOKENS, may_pair: bool = True
) -> StreamK:
    """The tile whose launch is cheapest for the bucket of m (`tile_costs`), with as many stages as fit.

    Args:
        widths: tokens of the tiles to choose from. may_pair: also pairs of CTAs.
    """
    top, tokens = tile_costs.bucket(m), tile_costs.widths(m, widths)
    found = []
    for tile in _OF_PAIRS.units:
        if tile[0] in tokens:
            raster = tile_costs.raster(-(-top // tile[0]), problem.row_blocks, target)
            s = fitted(StreamK.of_tile(tile, raster), problem, target, UNROLLED_STAGES)
            both = [s] if tile in TILE_COSTS.units else []
            both += [it for it in [may_pair and pairs(s, problem, target, top)] if it]
            found += [(_divide(it, problem, target, top)[0], it) for it in both]
    return min(found, key=lambda it: it[0])[1]


def pairs(schedule: S, problem: Gemm, target: Target, m: int) -> S | None:
    """The schedule with two CTAs for each tile, which are a cluster, where all of them run at once; else None. As in
    W4A16, tall tiles have none."""
    s = replace(schedule, cluster=clusters.PAIR)
    tiles = -(-m // s.block_tokens) * -(-problem.row_blocks // s.cta_blocks)
    fits = clusters.PAIR * tiles <= target.sms and s.cta_blocks <= clusters.TALLEST_PAIR
    return s if fits and not s.cluster_refusal(problem, target) else None


def partition(schedule: StreamK, problem: Gemm, target: Target, m: int) -> Partition:
    """Tiles of the schedule over the SMs of the target, in the cheapest way."""
    return _divide(schedule, problem, target, m)[1]


def stream_k_us(schedule: StreamK, problem: Gemm, target: Target, m: int) -> float:
    """Predicted microseconds of stream_k."""
    return _divide(schedule, problem, target, m)[0] * (1 + 0.02 * max(0, 4 - schedule.stages))


def _divide(schedule: StreamK, problem: Gemm, target: Target, m: int) -> tuple[float, Partition]:
    """Microseconds, and the partition."""
    return schedule.costs.divide(
        (schedule.block_tokens, schedule.warpgroups, schedule.row_blocks),
        -(-m // schedule.block_tokens) * -(-problem.row_blocks // schedule.cta_blocks),
        problem.units,
        tile_costs.dram_us(target, problem.launch_bytes(m)),
        target.sms,
        schedule.parts,
        tile_costs.later_wave(target, m, problem.k, problem.x_bytes),
        schedule.cluster,
    )


class SmallBatch(small_batch.SmallBatch):
    """The W4A8 form of the small-batch schedule: X is int8, parameters are part of the units."""

    costs: ClassVar[Mapping[int, small_batch.Cost]] = COSTS
    pairs: ClassVar[bool] = True
    """Whether heuristic and search take those where pairs of CTAs along k are clusters, and few rows of X."""

    def smem_bytes(self, problem: Gemm) -> int:
        """Dynamic and static shared memory of one CTA."""
        x = self.x_rows * (-(-problem.units // self.kc) * 128 + 16) + 128
        step = self.chunk * 256 + -(-self.chunk * problem.groups_per_128 * 8 // 32) * 32
        partial = self.x_rows * (self.chunk * 16 + 4)
        # a single chunk leaves the ring to the partial sums; schedules up to two token tiles were fitted without that
        one = self.token_tiles > 2 and -(-problem.row_tiles // self.nc) <= self.chunk
        ring = self.stages * step
        sums = 4 * self.warps * (max(ring, partial) if one else ring + partial)
        return x + sums + self.scale_bytes(problem) + self.inbox_bytes(problem) + _RESERVED

    def held_bytes(self, problem: Gemm) -> int:
        """Of x and the ring, which are in use at the same time."""
        step = self.chunk * 256 + -(-self.chunk * problem.groups_per_128 * 8 // 32) * 32
        return self.x_rows * (-(-problem.units // self.kc) * 128 + 16) + 4 * self.warps * self.stages * step

    def most_rows(self, problem: Gemm) -> int:
        """Rows of a CTA, with those of a whole last chunk."""
        return (-(-problem.row_tiles // self.nc) + self.chunk) * 16

    def scale_bytes(self, problem: Gemm) -> int:
        """Scales of rows and tokens, and sums of tokens, that wait in shared memory."""
        return 4 * self.most_rows(problem) + 64 * self.token_tiles

    def registers(self) -> int:
        """Estimate of the registers of a thread: accumulators, X fragments, one block of 64 k in flight."""
        return 4 * self.chunk * self.token_tiles + 8 * self.token_tiles + 56


def serves(problem: Gemm, target: Target, m: int) -> bool:
    """Whether small_batch is the program for m tokens: up to 16 without wgmma or for small weights, up to 8 for larger
    and up to 32 for still smaller ones with k undivided, where its estimate is below that of stream_k; never where no
    CTA can hold its part of X."""
    wgmma, weights = target.supports("wgmma.s8"), problem.n * problem.k
    if m > (MAX_TOKENS if wgmma else 2 * TOKENS_PER_TILE):
        return False
    wide = m > 2 * TOKENS_PER_TILE
    found = _cheapest(problem, target, MAX_TOKENS if wide else m, SmallBatch)
    if found is None:
        return False
    if not wide and (weights < _LARGE or not wgmma):
        return True
    if m <= TOKENS_PER_TILE:
        other = stream_k_us(choose(problem, target, m), problem, target, m) - _OVERRATED_US
        return _SMALL_START_US + small_batch_us(found, problem, target) < other
    if found.kc > 1 or weights > _MIDDLE:
        return False
    start, per_million = _STREAM_K_US
    return not wide or _START_US + small_batch_us(found, problem, target) < start + per_million * weights / 1e6


def small_batch_us(schedule: SmallBatch, problem: Gemm, target: Target) -> float:
    """Predicted microseconds, up to a constant."""
    return small_batch.cost(schedule, problem, target, schedule.costs, x_bytes=1)


def choose_small_batch(problem: Gemm, target: Target, m: int, kind: type[SmallBatch] = SmallBatch) -> SmallBatch:
    """The cheapest split of k and of the warps for m tokens, from 17 on for all that it holds; `kind`: the operator's
    form of the schedule.

    Raises:
        ArgumentError: more than MAX_TOKENS tokens, or a target whose shared memory cannot hold any slice of X.
    """
    if not 1 <= m <= MAX_TOKENS:
        raise ArgumentError("m", m, f"must be 1..{MAX_TOKENS} for the small-batch program", "use a tile program")
    best = _cheapest(problem, target, m if m <= 2 * TOKENS_PER_TILE else MAX_TOKENS, kind)
    if best is None:
        raise ArgumentError("target", target.arch, f"has too little shared memory for K = {problem.k}", "split K")
    return best


@lru_cache(maxsize=256)  # asked by `serves` and by the choice, for every M
def _cheapest(problem: Gemm, target: Target, m: int, kind: type[SmallBatch]) -> SmallBatch | None:
    made = small_batches(problem, target, m, kind)
    few = (s for s in made if not kind.pairs or s.token_tiles > 1 or s.stages <= small_batch.MOST_STAGES)
    return small_batch.cheapest(few, problem, target, kind.costs, x_bytes=1)


def small_batches(problem: Gemm, target: Target, m: int, kind: type[SmallBatch] = SmallBatch) -> Iterator[SmallBatch]:
    """Every schedule of small batches worth a look for m tokens."""
    if kind.pairs:
        return small_batch.every(problem, target, m, kind)
    return small_batch.candidates(problem, target, -(-m // TOKENS_PER_TILE), kind)


class Multistage(multistage.Multistage):
    """The W4A8 form of the multistage schedule: a stage holds 128 k, parameters are part of the units."""

    def stage_bytes(self, problem: Gemm) -> int:
        return self.block_tokens * 128 + self.rows // 64 * problem.unit_bytes

    def smem_bytes(self, problem: Gemm) -> int:
        """Shared memory of one CTA, at most."""
        staged = self.warps * 16 * (self.row_blocks * 16 + 8) * 2 - self.stages * self.block_tokens * 128
        return self.stages * self.stage_bytes(problem) + max(staged, 0) + (1024 if self.kc > 1 else 0)


def choose_multistage(problem: Gemm, target: Target, m: int) -> Multistage:
    """Tile by tokens; k split so that the bucket's first tiles fill the SMs twice (once with tiles of 128 tokens)."""
    tokens = next((t for t in multistage.BLOCK_TOKENS if m <= t), multistage.BLOCK_TOKENS[-1])
    tall = tokens == 128 and (m > 128 or problem.row_blocks > target.sms)
    schedule = Multistage(tokens, 8 if tall else 4, 2, 2, raster=16 if tall else 8)
    room = min(target.smem_per_sm // (1 if tall else 2) - 1024, target.smem_per_block) - 1024
    schedule = replace(schedule, stages=max(2, min(4, room // schedule.stage_bytes(problem))))
    if m > 128:
        return schedule
    # the kernel serves a bucket: its split depends on the bucket's widest M, not on m
    kc = (1 if tokens == 128 else 2) * target.sms // schedule.tiles(problem, tokens)
    return replace(schedule, kc=max(1, min(8, kc, problem.units)))


def bounds(
    problem: Gemm,
    target: Target,
    m: int,
    dequantization: str = "xor",
    token_tile: int = 256,
    gb_s: float | None = None,
) -> Roofline:
    """Whether loading, dequantization or the tensor cores bound m tokens (specs.md D, equations 3 to 6).

    Args:
        dequantization: "xor" or "unsigned"; its converter states the instructions for each weight.
        token_tile: tokens of a tile, which share one dequantization.
        gb_s: memory bandwidth; None takes the datasheet's.
    """
    alpha = get_converter(CONVERTERS[dequantization]).alu_per_element
    return weight_only_gemm(
        target, m, problem.n, problem.k, problem.weight_bytes, alpha, gb_s, dtype="s8", x_bytes=1, token_tile=token_tile
    )
