"""Schedules of decode attention: how many warps share a sequence's tokens, what each keeps in flight, how many splits.

One wave of CTAs fills the GPU: many (sequence, kv head) pairs take several small CTAs on each SM, few pairs take one
large CTA for each SM and as few splits as fill them, because every split is read again by the combine. Fitted to an
H200: 64 x 8 heads of 4K tokens of int4 take 72.6 us in CTAs of 4 warps, 73.6 of 8, 78.5 of 16; 8 x 8 heads of 32K
tokens 72.2 us in CTAs of 16 warps, 73.0 of 12, 73.9 of 8.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.targets import Target

MAX_SPLITS = 128
_STATIC = 2048  # barriers with their alignment, and what the driver keeps of each CTA
_ON_SM = (16, 12, 8, 4, 2)  # warps of an SM to choose from
_COMBINE = 8  # warps of 16 rows or of channel groups: fewer add the splits of a sequence in more trips to memory
_MANY_SPLITS = 8  # from here on they rather merge early: 18.2 us with 8 warps, 18.9 with 12 (one of 32K int4, H200)
_FULL = 0.9  # a wave with more than this share of its CTAs counts as full
IN_FLIGHT = 32 << 10  # bytes on their way to an SM that hide the latency of memory at full bandwidth (H200)


@dataclass(frozen=True)
class DecodeProblem:
    """What a schedule needs to know of one decode call.

    Args:
        pairs: sequences times kv heads. rows: query rows of a kv head, q_len * group. tokens: longest sequence.
        head_dim: 64, 128 or 256. tile_words, channel_words: int32 words of a packed tile, and at the head of a block.
        group: tokens of a channel-wise group, 0 for none. page: tokens of a page, 0 for contiguous caches.
        residual: tokens of the f16 residual block, 0 for none.
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

    def divides(self, tokens: int) -> bool:
        """Whether stages of so many tokens end where groups, pages and residual blocks do."""
        return not (self.group % tokens or self.page % tokens or self.residual % tokens)


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

    def stage_words(self, problem: DecodeProblem) -> int:
        return problem.channel_words + self.tiles * problem.tile_words

    def smem_bytes(self, problem: DecodeProblem) -> int:
        """Dynamic shared memory of a CTA: rings, or what the merge needs in their place; the rows of Q if they do not
        fit into a stage of each ring, and their fragments where channel-wise scales multiply them."""
        rows = 8 * self.row_tiles
        merge = self.warps * rows * (problem.head_dim + 6)
        rings = max(self.warps * self.stages * self.stage_words(problem), merge)
        copies = bool(problem.group or self.shared_rows) + (self.warps if problem.group and self.shared_rows else 0)
        pitch = problem.head_dim // 2 + 4
        rings += rows * pitch if self.stage_words(problem) // pitch * self.warps < rows else 0
        return 4 * (rings + 4 * problem.head_dim * self.row_tiles * copies + (2 * rows if self.shared_rows else 0))

    def in_flight(self, problem: DecodeProblem) -> int:
        """Words on their way to one SM while a stage is worked on."""
        return self.min_blocks * self.warps * (self.stages - 1) * self.tiles * problem.tile_words


@dataclass(frozen=True)
class PlainDecode(Decode):
    """The same with integer-to-float instructions instead of masks, to compare with (ops/attention/ablation.py)."""

    def params(self) -> dict[str, int | str]:
        return super().params() | {"convert": "plain"}


def row_tiles(problem: DecodeProblem) -> int:
    """Groups of 8 rows that a CTA serves; 16 rows share each conversion, but not at head_dim 256 (registers)."""
    return 1 if problem.rows <= 8 or problem.head_dim > 128 else 2


def row_groups(problem: DecodeProblem) -> int:
    """CTAs side by side over the rows of a kv head."""
    return -(-problem.rows // (8 * row_tiles(problem)))


def shares_rows(problem: DecodeProblem, small: bool = False) -> bool:
    """Whether the fragments of 16 rows are read from shared memory: tiles of 4 bits and less are bound by instructions
    and their latency, not by copies, and the registers go to larger stages. In CTAs of at most half of an SM's warps
    (`small`) only with channel-wise keys: 79.3 us against 82.9 in large ones, 87.6 against 83.5 in small (H200)."""
    wide = row_tiles(problem) > 1 and problem.head_dim > 64 and problem.tile_words < 5 * problem.head_dim
    return wide and bool(problem.group or not small)


def warps_per_sm(problem: DecodeProblem) -> int:
    """Warps whose registers fit into an SM: 128 registers for the usual case, 168 for twice the state."""
    return 16 if row_tiles(problem) * problem.head_dim <= 128 else 12


def _stages(problem: DecodeProblem, small: bool, warps: int) -> list[tuple[int, int]]:
    """(tiles, stages) of a ring to choose from. Small tiles come in large stages: the loop costs as much as half a tile
    of 2 bits."""
    most = (6, 5, 4, 3)
    if row_tiles(problem) == 1 and problem.tile_words < 3 * problem.head_dim:
        return [(4, 3), (4, 2), *((2, n) for n in most), *((1, n) for n in most)]
    wide = row_tiles(problem) * problem.head_dim > 128 and row_tiles(problem) > 1
    if wide and problem.tile_words < 5 * problem.head_dim and not problem.group:
        return [(2, 4 if small else 5 if warps <= _COMBINE else 3), (2, 3), *((1, n) for n in most)]
    if wide and shares_rows(problem, small) != bool(problem.group):  # their registers have room for one tile
        return [*((1, n) for n in most), *((2, n) for n in most)]
    if small and not shares_rows(problem, small):
        return [*((1, n) for n in most[1:]), *((2, n) for n in most)]
    if small and wide and problem.group:  # 16 rows share the conversion of two tiles: 77.9 us, and 89.5 with one (H200)
        return [*((2, n) for n in (*most, 2)), *((1, n) for n in most)]
    return [*((2, n) for n in most), *((1, n) for n in most)]


def choose(problem: DecodeProblem, target: Target) -> Decode:
    """As many warps as registers and rings allow, in CTAs of a size whose waves are full; stages of one tile in small
    CTAs, of two in large ones and more of 2-bit tiles, and as many stages as fit.

    Raises:
        ArgumentError: a page, group or residual block that no stage divides, or too little shared memory for a ring.
    """
    possible = []
    for on_sm in (n for n in _ON_SM if n <= warps_per_sm(problem)):
        warps = _warps(problem, target, on_sm)
        small = warps <= on_sm // 2
        made = [
            Decode(row_tiles(problem), warps, tiles, stages, max(1, on_sm // warps), shares_rows(problem, small))
            for tiles, stages in _stages(problem, small, warps)
            if problem.divides(16 * tiles)
        ]
        possible += [schedule for schedule in made if fits(schedule, problem, target)][:1]
    for schedule in possible:
        if schedule.in_flight(problem) * 4 >= IN_FLIGHT:
            return schedule
    if possible:
        return max(possible, key=lambda schedule: schedule.in_flight(problem))
    raise ArgumentError(
        "page", problem.page, f"no ring of whole stages fits on {target.arch} (group {problem.group})", "use 128 tokens"
    )


def every(problem: DecodeProblem, target: Target) -> list[Decode]:
    """What `choose` answers for any number of sequences and tokens, with the problem's other facts."""
    sizes = ((2**i, 2**j) for i in range(14) for j in range(4, 21))
    return list(dict.fromkeys(choose(replace(problem, pairs=pairs, tokens=tokens), target) for pairs, tokens in sizes))


def fits(schedule: Decode, problem: DecodeProblem, target: Target) -> bool:
    size = schedule.smem_bytes(problem) + _STATIC
    return size <= target.smem_per_block and schedule.min_blocks * size <= target.smem_per_sm


def _warps(problem: DecodeProblem, target: Target, on_sm: int) -> int:
    """Warps of a CTA. Pairs that fill whole waves of CTAs stay unsplit, in the smallest CTAs that do so; otherwise
    sequences are split, over the largest CTAs, because every split is read again; fewer warps where tokens are few."""
    pairs = problem.pairs * row_groups(problem)
    whole = {}
    for warps in _sizes(on_sm):
        waves = pairs / (target.sms * (on_sm // warps))
        if waves >= _FULL:
            whole[warps] = waves / math.ceil(waves)
    if whole and max(whole.values()) >= _FULL:
        return next(warps for warps, filled in whole.items() if filled >= max(whole.values()) - 0.02)
    many = row_tiles(problem) > 1 and target.sms // pairs >= _MANY_SPLITS
    warps, per_warp = min(on_sm, _COMBINE) if many else on_sm, max(problem.group, 32)
    least = min(on_sm, _COMBINE) if row_tiles(problem) > 1 or problem.group else 2
    while warps > least and warps % 2 == 0 and target.sms // pairs * warps * per_warp > problem.tokens:
        warps = max(least, warps // 2)
    return warps


def _sizes(on_sm: int) -> list[int]:
    """Warps of a CTA, from the smallest, that share an SM's `on_sm` evenly."""
    return [warps for warps in (on_sm // 4, on_sm // 2, on_sm) if warps >= min(on_sm, 3) and on_sm % warps == 0]


def splits(problem: DecodeProblem, schedule: Decode, target: Target) -> int:
    """Splits of each sequence: what fills the GPU once, as long as every warp of a split has 32 tokens to work on."""
    room = target.sms * schedule.min_blocks // (problem.pairs * row_groups(problem))
    chunk = schedule.warps * max(problem.group, 32)
    return max(1, min(room, -(-problem.tokens // chunk), MAX_SPLITS))
