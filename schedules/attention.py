"""Schedules of decode attention: how many warps share a sequence's tokens, what each keeps in flight, how many splits.

One wave of CTAs fills the GPU: many (sequence, kv head) pairs take several small CTAs on each SM, few pairs take one
large CTA for each SM and as few splits as fill them, because the splits' sums have to meet: in one cluster if it can
be, in memory otherwise. Fitted to an H200: 64 x 8 heads of 4K tokens of int4 take 72.6 us in CTAs of 4 warps, 73.6 of
8, 78.5 of 16; 8 x 8 heads of 32K tokens 72.2 us in CTAs of 16 warps, 73.0 of 12, 73.9 of 8.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict, dataclass, replace

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.targets import Target

MAX_SPLITS = 128
_STATIC = 2048  # barriers with their alignment, and what the driver keeps of each CTA
_ON_SM = (16, 12, 8, 4, 2)  # warps of an SM to choose from
_COMBINE = 8  # warps of 16 rows or of channel groups: fewer add the splits of a sequence in more trips to memory
_SHORT = 1 << 16  # tokens of all pairs: up to here two CTAs of an SM are faster than a large one
_SHORT_PAIR = 9 << 17  # bytes of a pair up to which four warps make a CTA (_brief)
_FEW, _FEWEST = 9 << 20, 1 << 20  # bytes of all pairs, likewise
_MANY = 64 << 20  # bytes of all pairs, at head_dim 256 twice them, from which on warpgroups serve many rows
_FULL = 0.9  # a wave with more than this share of its CTAs counts as full
_CLUSTERS = ((2, 1.0), (4, 0.9), (8, 0.9), (16, 0.84))
"""CTAs of a cluster, and the share of the SMs that such clusters are taken to reach at once, because they do not divide
the SMs of a GPC: cudaOccupancyMaxActiveClusters says 120 of 132 for 4 and 8, 112 for 16 (an H200)."""
_IN_GPC = 8  # CTAs of a cluster that CUDA promises to place, with one on an SM
_SATURATE = 0.85  # of the SMs saturate the memory
_SHARED = (2, 3, 4, 5)  # CTAs of an SM that pairs are spread over where one for each SM would leave many idle
_WIDE_BITS = 9  # of a value with its parameters: an SM reaches several times its share of the bandwidth with more
_FEW_PAIRS = 4  # a quarter of the SMs: fewer pairs have splits enough to fill them
_UNEVEN, _UNEVEN_WIDE = 0.4, 0.45  # what is lost of what the busiest SM has beyond its share, with 16 rows
_UNEVEN_LARGE, _WAVE_US = 0.8, 2.5  # the same with one CTA on an SM (to the power 1.5), and each further wave
_UNEVEN_16BIT = 0.47  # the same of 16-bit caches in one wave: an SM alone reaches 1.4 times its share
_CLEARLY = 0.97  # of its time, that others must be below
_SPLIT_US, _SPLIT_WIDE_US = (0.8, 0.2), 6.0  # of sums, and each further one through memory; of few warps, 16 rows
_CLUSTERED = 1.15  # time of tokens where several CTAs of clusters share SMs, unevenly, beside that of CTAs alone
_ODD_US, _MOST_SPLITS = 0.5, 7  # CTAs of 3 and 5 warps; more splits were not timed
IN_FLIGHT = 32 << 10  # bytes on their way to an SM that hide the latency of memory at full bandwidth (H200)


@dataclass(frozen=True)
class DecodeProblem:
    """What a schedule needs to know of one decode call.

    Args:
        pairs: sequences times kv heads. rows: query rows of a kv head, q_len * group. tokens: longest sequence.
        head_dim: 64, 128 or 256. tile_words, channel_words: int32 words of a packed tile, and at the head of a block.
        group: tokens of a channel-wise group, 0 for none. page: tokens of a page, 0 for contiguous caches.
        residual: tokens of the f16 residual block, 0 for none. parted: whether four warps can part a tile's values.
        paired: whether a lane loads two atoms of keys at once, which rows in shared memory are read for.
    """

    pairs: int
    rows: int
    tokens: int
    head_dim: int
    tile_words: int
    channel_words: int = 0
    group: int = 0
    page: int = 0
    residual: int = 0
    parted: bool = False
    paired: bool = True

    def divides(self, tokens: int) -> bool:
        """Whether stages of so many tokens end where groups, with their residual blocks, and pages do."""
        return not (self.group % tokens or self.page % tokens)


@dataclass(frozen=True)
class Decode:
    """row_tiles groups of 8 rows; `warps` rings of `stages` stages of `tiles` tiles; min_blocks CTAs on an SM; whether
    the rows' B fragments are read from shared memory in every step instead of staying in registers; how many stages of
    a warp are fetched into L2 before the kernel ahead has ended, where a GPU starts kernels early (one is up to 6 %
    faster than none on an H200, three are no better than one)."""

    row_tiles: int
    warps: int
    tiles: int
    stages: int
    min_blocks: int
    shared_rows: bool = False
    ahead: int = 1

    def params(self) -> dict[str, int]:
        """Arguments of the program's `build`."""
        return asdict(self)

    @property
    def rings(self) -> int:
        """Rings of stages, each with tokens of its own."""
        return self.warps

    def row_groups(self, problem: DecodeProblem) -> int:
        """CTAs side by side over the rows of a kv head."""
        return -(-problem.rows // (8 * self.row_tiles))

    def stage_words(self, problem: DecodeProblem) -> int:
        """32-bit words that a warp copies for one stage of its ring."""
        return problem.channel_words + self.tiles * problem.tile_words

    def smem_bytes(self, problem: DecodeProblem, cluster: int = 1) -> int:
        """Dynamic shared memory of a CTA: rings, or what the merge needs in their place; the rows of Q if they do not
        fit into a stage of each ring, and their fragments where channel-wise scales multiply them."""
        rows = 8 * self.row_tiles
        merge = self.warps * rows * (problem.head_dim + 6)
        if cluster > 1:
            merge += cluster * (4 * -(-rows * problem.head_dim // 4 // cluster) + 2 * rows)
        rings = max(self.warps * self.stages * self.stage_words(problem), merge)
        copies = bool(problem.group or self.shared_rows) + (self.warps if problem.group and self.shared_rows else 0)
        pitch = problem.head_dim // 2 + 4
        rings += rows * pitch if self.stage_words(problem) // pitch * self.warps < rows else 0
        return 4 * (rings + 4 * problem.head_dim * self.row_tiles * copies + (2 * rows if self.shared_rows else 0))

    def in_flight(self, problem: DecodeProblem) -> int:
        """Words on their way to one SM while a stage is worked on."""
        return self.min_blocks * self.rings * (self.stages - 1) * self.tiles * problem.tile_words


@dataclass(frozen=True)
class WarpgroupDecode(Decode):
    """16, 32, 48 or 64 rows by wgmma (sm_90a): every four warps share a ring of stages of four tiles."""

    def params(self) -> dict[str, int]:
        return {name: value for name, value in asdict(self).items() if name not in ("tiles", "shared_rows")}

    @property
    def rings(self) -> int:
        """Rings of stages in shared memory."""
        return self.warps // 4

    def smem_bytes(self, problem: DecodeProblem, cluster: int = 1) -> int:
        """Dynamic shared memory of a CTA: rings, or what the merge needs in their place; Q for the packed keys, for the
        residual block and for each warpgroup's channel group; P of two steps, four warps' two numbers for each row."""
        rows = 8 * self.row_tiles
        merge = self.rings * rows * (problem.head_dim + 6)
        if cluster > 1:
            merge += cluster * (4 * -(-rows * problem.head_dim // 4 // cluster) + 2 * rows)
        rings = max(self.rings * self.stages * self.stage_words(problem), merge)
        copies = 1 + (self.rings if problem.group else 0) + bool(problem.residual)
        return 4 * (rings + copies * rows * problem.head_dim // 2 + self.rings * rows * (64 + 8))


def row_tiles(problem: DecodeProblem) -> int:
    """Groups of 8 rows that a CTA serves; 16 rows share each conversion, but not at head_dim 256 (registers)."""
    return 1 if problem.rows <= 8 or problem.head_dim > 128 else 2


def row_groups(problem: DecodeProblem) -> int:
    """CTAs side by side over the rows of a kv head."""
    return -(-problem.rows // (8 * row_tiles(problem)))


def is_wide(problem: DecodeProblem) -> bool:
    """Whether a warp holds sums of 16 rows and 128 dimensions."""
    return row_tiles(problem) > 1 and problem.head_dim > 64


def warps_per_sm(problem: DecodeProblem, shared_rows: bool = False) -> int:
    """Warps whose registers fit into an SM: 128 registers for the usual case, 255 for 16 rows, 168 if their fragments
    are in shared memory."""
    if is_wide(problem):
        return 12 if shared_rows else 8
    return 16 if row_tiles(problem) * problem.head_dim <= 128 else 12


def warpgroup_tiles(problem: DecodeProblem) -> int:
    """Groups of 8 rows of a CTA of warpgroups: 16 rows at head_dim 256, else as few groups of up to 64 as there can be,
    of the same size."""
    groups = -(-problem.rows // (64 if problem.head_dim <= 128 else 16))
    return 2 * -(-problem.rows // (16 * groups))


def warpgroup_warps(problem: DecodeProblem, tiles: int) -> int:
    """Warps on an SM for whose sums of 8 * tiles rows and operands there are registers."""
    return {2: 16, 4: 12}.get(tiles, 8) if problem.head_dim <= 128 else 8


def _stages(problem: DecodeProblem, blocks: int) -> list[tuple[int, int]]:
    """(tiles, stages) of a ring to choose from, with so many CTAs on an SM: two stages as large as registers allow beat
    more and smaller ones. int4 in pages on an H200, one row tile: 2 x 2 tiles 13.4, 38.4 and 35.4 us (one sequence of
    32K and of 128K, 8 x 32 heads of 4K), 3 x 2 tiles 14.8, 39.7 and 36.7, 5 x 1 tiles 15.0, 42.8 and 38.0; two row
    tiles, 2 x 4 tiles 72.9 us, 3 x 2 75.0 (8 of 32K; tests/data/tuning/decode_h200.json)."""
    bits, more = problem.tile_words / problem.head_dim * 0.98, 2 if problem.head_dim < 128 else 1
    one = [(1, n) for n in (6, 5, 4, 3)]
    if bits < 3 or (bits < 5 and is_wide(problem)):
        return [(4, 2), (2, 3), (2, 2), *one]
    if problem.head_dim > 128:
        return one
    if bits < 5 or (bits < 9 and is_wide(problem)):
        return [(2 * more, 2), (2, 3), (2, 2), *one]
    if 7 < bits < 9:
        return [(more, 2), (1, 2), *one]
    # int8/int4, 64 x 4K: 3 stages 100 us and 122 with an append (ae66eaf), 4 stages 101 and 107 (0763bc2); cause open
    return [(more, 4 if bits < 7 and blocks > 2 else 3), *one]


def _brief(problem: DecodeProblem, target: Target) -> list[Decode]:
    """Schedules for so few bytes that latency is most of the time: CTAs of four warps with deep rings, two on an SM,
    whose splits fit into a cluster, and of eight warps for somewhat more. Of a sequence with 8 kv heads, int4 in pages,
    beside what follows for more tokens: 4K 5.4 and 5.5 us, 8K 7.1 and 7.6, 16K 9.1 and 9.5; one kv head, 32K 7.1 and
    9.6 (tests/data/tuning/decode_h200.json)."""
    if not target.supports("cluster"):
        return []
    bits, of_pair = problem.tile_words / problem.head_dim, problem.tokens * problem.tile_words // 4
    of_all, narrow = problem.pairs * of_pair, problem.head_dim < 128
    if row_tiles(problem) > 1:  # steps of fewer tiles end sooner
        few = is_wide(problem) and of_all <= (_FEWEST if bits < 3 else 2 * _FEW if bits < 5 else 0)
        return [Decode(2, 8, 2, 2, 1)] if few else []
    scarce = problem.pairs <= 4 and not narrow
    values = 512 if bits < 3 else 256 if bits < 7 or (bits < 9 and scarce) else 128 if bits < 9 else 64
    tiles = min(4, max(1, values // problem.head_dim))
    short = problem.tokens <= 4096 if narrow else of_pair <= _SHORT_PAIR
    static = bits == 8  # scales that every CTA fetches
    if short and of_all <= _FEW and problem.pairs <= (32 if bits < 5 else 16) and not static:
        if 5 < bits < 7:
            return [Decode(1, 4, max(1, tiles // 2), stages, 2) for stages in (6, 5, 4)]
        return [Decode(1, 4, tiles, stages, 2) for stages in ((3,) if bits > 9 else (5, 4, 3))]
    if of_all <= 4 * _FEW and problem.pairs <= 32 and not (narrow and bits < 9):
        return [Decode(1, 8, tiles, stages, 1) for stages in ((4, 3) if 7 < bits < 9 else (3,))]
    return []


def _many_rows(problem: DecodeProblem, target: Target) -> list[Decode]:
    """Warpgroups, where rows are more than the warps of decode share a conversion for, and bytes enough to hide what
    the four warps wait for. Beside row groups of 8 and 16 (H200, us, 8 sequences of 32K, 8 kv heads): 32 rows int4 114
    and 128, int8 136 and 156, f16 246 and 269; 64 rows 195 and 248, 210 and 277, 250 and 426; channel-wise keys lose,
    because every warpgroup scales all rows (`many_rows` of tests/data/tuning/decode_h200.json)."""
    of_all = problem.pairs * problem.tokens * problem.tile_words // 4 * (2 if problem.head_dim > 128 else 1)
    least = {64: 32, 128: 16, 256: 8}[problem.head_dim]
    if not target.supports("wgmma.f16") or not problem.parted or problem.group or not problem.divides(64):
        return []
    if problem.rows <= least or of_all < _MANY:
        return []
    tiles = warpgroup_tiles(problem)
    few_bits = problem.tile_words / problem.head_dim < 5
    warps = min(12 if few_bits and not problem.residual else 8, warpgroup_warps(problem, tiles))
    return [WarpgroupDecode(tiles, warps, 4, stages, 1) for stages in (6, 5, 4, 3, 2)]


def choose(problem: DecodeProblem, target: Target) -> Decode:
    """As many warps as registers and rings allow, in CTAs of a size whose waves are full; warpgroups for many rows.

    Raises:
        ArgumentError: a page, group or residual block that no stage divides, or too little shared memory for a ring.
    """
    for schedule in (*_many_rows(problem, target), *_brief(problem, target)):
        if problem.divides(16 * schedule.tiles) and fits(schedule, problem, target):
            return schedule
    possible = []
    for on_sm in (n for n in _ON_SM if n <= warps_per_sm(problem)):
        warps = _warps(problem, target, on_sm)
        made = [
            Decode(row_tiles(problem), warps, tiles, stages, max(1, on_sm // warps))
            for tiles, stages in _stages(problem, on_sm // warps)
        ]
        made = [schedule for schedule in made if problem.divides(16 * schedule.tiles)]
        possible += [schedule for schedule in made if fits(schedule, problem, target)][:1]
    for schedule in possible:
        if schedule.in_flight(problem) * 4 >= IN_FLIGHT:
            return _spread(schedule, problem, target)
    if possible:
        return max(possible, key=lambda schedule: schedule.in_flight(problem))
    raise ArgumentError(
        "page", problem.page, f"no ring of whole stages fits on {target.arch} (group {problem.group})", "use 128 tokens"
    )


def _spread(usual: Decode, problem: DecodeProblem, target: Target) -> Decode:
    """`usual`, or smaller CTAs that share the pairs' tokens more evenly among the SMs. Of 136 pairs in CTAs of an SM
    each, 4 are a wave of their own, and 72 leave 60 SMs idle; in CTAs of a quarter and a seventh of a pair, five and
    four on an SM, none has more than 1.2 and 1.05 times its share. int4, 8 kv heads, sequences of 4K and 16K, us on an
    H200: 9 of them 18.1 -> 16.0 and 56 -> 43, 17 33.4 -> 23.1 and 113 -> 77. f16 hides a second wave, but not idle SMs:
    9 of them 54.6 -> 41.0 and 189 -> 144 (`spread` of tests/data/tuning/decode_h200.json)."""
    ctas, bits = problem.pairs * usual.row_groups(problem), problem.tile_words / problem.head_dim
    wide, most = usual.row_tiles > 1, warps_per_sm(problem)
    if ctas <= target.sms // _FEW_PAIRS or (wide and ctas <= target.sms and bits <= _WIDE_BITS):
        return usual
    shared = _SHARED
    if bits > _WIDE_BITS:  # their rings take all of the shared memory, with half of the warps that registers allow
        most, shared = usual.warps * usual.min_blocks, _SHARED[:1] if wide else _SHARED
        if ctas > target.sms or problem.pairs * problem.tokens <= _SHORT:
            return usual
    reached = (0.92 if bits > 3 else 0.7) * target.dram_gb_s
    memory = 4e-3 * ctas * (problem.tokens / 16 * problem.tile_words) / reached

    def uneven(splits: int) -> float:
        """What the busiest SM has beyond its share, of that."""
        return math.ceil(ctas * splits / target.sms) * target.sms / (ctas * splits) - 1

    division = divide(problem, usual, target)
    waves = ctas * division.splits / (target.sms * usual.min_blocks)
    if (waves <= 1 or wide) and waves / math.ceil(waves) >= _FULL:
        return usual
    late = uneven(division.splits)
    if usual.min_blocks > 1 and waves <= 1:
        late *= _UNEVEN
    else:
        late = _UNEVEN_16BIT * late if bits > _WIDE_BITS else _UNEVEN_LARGE * late**1.5
    us = memory * (1 + late) + _WAVE_US * (math.ceil(waves) - 1) + tail_us(problem, usual, division)
    found = [(_CLEARLY * us, usual)]
    for blocks in shared:
        warps = round(most / blocks) if bits > _WIDE_BITS else most // blocks
        splits = target.sms * blocks // ctas
        full = splits and math.ceil(ctas * splits / target.sms) == blocks
        few = splits * warps * max(problem.group, 32) > problem.tokens
        if warps < 2 or warps * blocks < _FULL * most or not full or (few and splits > 1) or splits > _MOST_SPLITS:
            continue
        made = [Decode(usual.row_tiles, warps, *ring, blocks) for ring in _stages(problem, blocks)]
        for it in [it for it in made if problem.divides(16 * it.tiles) and fits(it, problem, target)][:1]:
            division = divide(problem, it, target)
            later = _SPLIT_US[1] * (splits - 1) if division.cluster < splits else 0.0
            sums = _SPLIT_US[0] + later + _SPLIT_WIDE_US * wide if splits > 1 else 0.0
            us = memory * (1 + (_UNEVEN_WIDE if wide else _UNEVEN) * uneven(splits)) + sums + _ODD_US * (warps % 2)
            found += [(us, it)] if division.splits == splits else []
    return min(found, key=lambda it: it[0])[1]


def every(problem: DecodeProblem, target: Target) -> list[tuple[DecodeProblem, Decode]]:
    """What `choose` answers for any number of sequences and tokens, with the problem's other facts, and for each
    different kernel a problem that asks for it."""
    made = {}
    pairs = sorted({n << i for n in range(1, 16, 2) for i in range(8)} | {1 << i for i in range(14)})
    for i, j in itertools.product(pairs, sorted({n << i for n in (1, 3, 5) for i in range(4, 20)})):
        at = replace(problem, pairs=i, tokens=j)
        chosen = choose(at, target)
        division = divide(at, chosen, target)
        made.setdefault((chosen, division.parts, division.cluster), (at, chosen))
    return list(made.values())


def fits(schedule: Decode, problem: DecodeProblem, target: Target) -> bool:
    """Whether an SM has the shared memory, for CTAs in clusters of any size."""
    return _has_room(schedule, problem, target, _CLUSTERS[-1][0] if target.supports("cluster") else 1)


def check(schedule: Decode, problem: DecodeProblem, target: Target) -> None:
    """That a schedule which somebody chose can be launched.

    Raises:
        ArgumentError: a count below one, or a block with more shared memory or more warps than there are.
    """
    made = f"{type(schedule).__name__}({', '.join(map(str, asdict(schedule).values()))})"
    counts = (schedule.row_tiles, schedule.warps, schedule.tiles, schedule.stages, schedule.min_blocks)
    if min(counts) < 1 or schedule.warps > 32:
        raise ArgumentError("schedule", made, "counts start at one, and a block has 32 warps at most", "see Decode")
    if schedule.stages > 33 or not 0 <= schedule.ahead <= 32:
        constraint = "a lane fetches one of the first stages, and there are 32: at most 33 stages, ahead 0 to 32"
        raise ArgumentError("schedule", made, constraint, "use fewer")
    if schedule.shared_rows and not problem.paired:
        constraint = "shared_rows takes keys of at most 8 bits: those of 16 are loaded one atom at a time"
        raise ArgumentError("schedule", made, constraint, "leave shared_rows out")
    if isinstance(schedule, WarpgroupDecode):
        if not (target.supports("wgmma.f16") and problem.parted and problem.divides(64)):
            constraint = "needs sm_90a, values that four warps can part, and pages and groups of whole 64 tokens"
            raise ArgumentError("schedule", made, constraint, "use Decode")
        if schedule.warps % 4 or schedule.row_tiles not in (2, 4, 6, 8) or schedule.tiles != 4 or schedule.stages < 2:
            constraint = "has whole warpgroups, 2, 4, 6 or 8 row tiles, 4 tiles and at least two stages"
            raise ArgumentError("schedule", made, constraint, "see WarpgroupDecode")
    size = schedule.smem_bytes(problem) + _STATIC
    if size > target.smem_per_block:
        constraint = f"needs {size} bytes of shared memory, a block on {target.arch} has {target.smem_per_block}"
        raise ArgumentError("schedule", made, constraint, "use fewer warps, tiles or stages")


def _has_room(schedule: Decode, problem: DecodeProblem, target: Target, cluster: int) -> bool:
    size = schedule.smem_bytes(problem, cluster) + _STATIC
    return size <= target.smem_per_block and schedule.min_blocks * size <= target.smem_per_sm


def _warps(problem: DecodeProblem, target: Target, on_sm: int) -> int:
    """Warps of a CTA. Pairs that fill whole waves of CTAs stay unsplit, in the smallest CTAs that do so; otherwise
    sequences are split, over the largest CTAs, because every split is read again; fewer warps where tokens are few."""
    pairs = problem.pairs * row_groups(problem)
    whole = {}
    for warps in _sizes(on_sm, problem.tokens):
        waves = pairs / (target.sms * (on_sm // warps))
        if waves >= _FULL:
            whole[warps] = waves / math.ceil(waves)
    if whole and max(whole.values()) >= _FULL:
        return next(warps for warps, filled in whole.items() if filled >= max(whole.values()) - 0.02)
    warps, least = on_sm, min(on_sm, _COMBINE) if row_tiles(problem) > 1 or problem.group else 2
    while warps > least and warps % 2 == 0 and target.sms // pairs * warps * 32 > problem.tokens:
        warps = max(least, warps // 2)
    if warps == _ON_SM[0] and problem.pairs * problem.tokens <= _SHORT and target.supports("cluster"):
        return warps // 2
    return warps


def _sizes(on_sm: int, tokens: int) -> list[int]:
    """Warps of a CTA, from the smallest, that share an SM's `on_sm` evenly; two where tokens are few."""
    least = 2 if tokens <= 2048 and on_sm == _ON_SM[0] else min(on_sm, 3)
    sizes = (on_sm // 8, on_sm // 4, on_sm // 2, on_sm)
    return [warps for warps in sizes if warps >= least and on_sm % warps == 0]


@dataclass(frozen=True)
class Division:
    """Who works on the tokens of a sequence: CTAs, `splits` of them, `cluster` of which are a cluster; `parts` warps
    share a group of channel-wise keys."""

    splits: int
    parts: int = 1
    cluster: int = 1


def divide(
    problem: DecodeProblem, schedule: Decode, target: Target, device: Target | None = None, splits: int = 0
) -> Division:
    """What fills the GPU once, as long as every warp of a split has 32 tokens to work on, in the clusters that cost
    least; or so many splits. `device` runs the program where that is newer than its target. The costs are fitted to
    timings on an H200 (tests/data/tuning/decode_h200.json)."""
    device = device or target
    ctas = problem.pairs * schedule.row_groups(problem)
    slots = device.sms * schedule.min_blocks / ctas
    shared = schedule.min_blocks > 1 and device.sms // _FEW_PAIRS < ctas <= device.sms
    short = problem.pairs * problem.tokens <= _SHORT
    shared = shared and (problem.tile_words <= _WIDE_BITS * problem.head_dim or not short)
    clusters = ((1, 1.0), *(_CLUSTERS if target.supports("cluster") else ()))
    made = []
    for parts in dict.fromkeys((1, max(1, problem.group // max(32, 16 * schedule.tiles)))):
        most = -(-problem.tokens // (schedule.rings * max(problem.group // parts, 32)))
        for cluster, share in clusters:
            taken = splits or max(1, min(most, MAX_SPLITS, int(slots * share))) // cluster * cluster
            held = cluster <= _IN_GPC * schedule.min_blocks and _has_room(schedule, problem, target, cluster)
            if ctas > device.sms and not splits:  # fewer splits would leave SMs with less than others
                held = held and taken == max(1, min(most, MAX_SPLITS, int(slots)))
            if cluster == 1 or (taken and taken % cluster == 0 and held):
                alone = () if splits or cluster == 1 else (cluster,)  # needs no sums in memory
                made += [Division(taken, parts, cluster), *(Division(n, parts, cluster) for n in alone if n < taken)]

    def us(it: Division) -> float:
        late = _CLUSTERED if shared and it.cluster > 1 else 1.0
        return tail_us(problem, schedule, it) + late * stream_us(problem, schedule, device, it)

    return min(made, key=us)


def clusters_at_once(target: Target, cluster: int) -> int:
    """How many clusters find an SM for each of their CTAs."""
    return max(1, round(target.sms * dict(_CLUSTERS).get(cluster, 1.0) / cluster))


def stream_us(problem: DecodeProblem, schedule: Decode, target: Target, division: Division) -> float:
    """Time of the tokens: of their bytes, or of what the busiest SM does with them, the slower the fewer its warps."""
    ctas = problem.pairs * schedule.row_groups(problem) * division.splits
    words = problem.pairs * (problem.tokens / 16 * problem.tile_words)
    reached = 0.92 * target.dram_gb_s * min(1.0, ctas / (_SATURATE * target.sms))
    on_sm = math.ceil(ctas / target.sms)
    work = on_sm * max(problem.tokens / division.splits, schedule.rings * problem.group / division.parts)
    work *= max(1.0, 18 / (on_sm * schedule.warps)) ** 0.73
    if division.parts > 1:  # each of them scales the rows
        work *= 1.2 if schedule.row_tiles == 1 else 1.4
    return max(4e-3 * words / reached, 3e-3 * work)


def tail_us(problem: DecodeProblem, schedule: Decode, division: Division) -> float:
    """Time of what follows the tokens: sums through memory, which one CTA of each place in a cluster reads."""
    partials = division.splits // division.cluster
    if partials == 1:
        return 0.03 * (division.cluster > 1)
    kbytes = problem.rows / schedule.row_groups(problem) * problem.head_dim * partials / division.cluster / 256
    return 1.1 + 0.022 * kbytes + 1.0 * (division.cluster > 1)
