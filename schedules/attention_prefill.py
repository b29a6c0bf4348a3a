"""Schedules of prefill attention: the program, and how many rows and stages a CTA has.

A row is one (new token, query head). In "mma" every warp converts the tokens of a stage for its own rows, whose number
registers limit. In "shared" one more warpgroup converts for all rows of a CTA, 64 of each of its warpgroups.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import lru_cache

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.targets import Target

_STATIC = 2048  # bytes: barriers with their alignment, and what the driver keeps of each CTA
_MMA_ROWS = {64: 4, 128: 2, 256: 1}  # head_dim -> groups of 8 rows of a warp
_SHARED_WARPS = {64: (12, 8, 4), 128: (12, 8, 4), 256: (4,)}
"""head_dim -> warps of consumers; more would spill."""
_SHARED_COST = {192: 1.3, 128: 1.0, 64: 0.8}
"""Rows of a CTA of "shared" -> time of a stage, measured on H200 with int4 and float16, head_dim 128."""


@dataclass(frozen=True)
class PrefillProblem:
    """What a schedule needs to know. stage_words, shared_words: int32 words of a stage of 64 tokens in the rings of
    "mma" and of "shared"."""

    head_dim: int
    stage_words: int
    shared_words: int


@dataclass(frozen=True)
class Prefill:
    """program "mma" or "shared"; row_tiles groups of 8 rows of each of `warps` warps (mma) or of each group of
    four; `stages` stages of 64 tokens; shared: `buffers` of converted stages."""

    program: str
    row_tiles: int
    warps: int
    stages: int
    buffers: int = 2

    def __post_init__(self) -> None:
        if self.program not in ("mma", "shared"):
            raise ArgumentError("program", self.program, "must be mma or shared", "leave the schedule out")

    @property
    def rows(self) -> int:
        """Rows of a CTA."""
        return 8 * self.row_tiles * (self.warps if self.program == "mma" else self.warps // 4)

    def params(self) -> dict[str, int]:
        """Arguments of the program's `build`."""
        without = ("program",) if self.program == "shared" else ("program", "buffers")
        return {name: value for name, value in asdict(self).items() if name not in without}

    def smem_bytes(self, problem: PrefillProblem) -> int:
        """Dynamic shared memory of a CTA: the ring, a table of channel scales; shared: Q, and `buffers` stages of keys
        and of values in 16 bits."""
        operands = (self.rows + 2 * self.buffers * 64) * problem.head_dim // 2
        words, rest = {"mma": (problem.stage_words, 0), "shared": (problem.shared_words, operands)}[self.program]
        return 4 * (self.stages * words + problem.head_dim + rest)


def every(problem: PrefillProblem, target: Target) -> list[Prefill]:
    """The schedules to choose from, best first for long prompts: "shared" where the target has wgmma, the widest tile
    of rows that registers allow, three buffers before two, and as many stages as fit beside them, up to 4."""
    made = []
    if target.supports("wgmma.f16"):
        made += [
            Prefill("shared", 8, warps, n, buffers)
            for warps in _SHARED_WARPS[problem.head_dim]
            for buffers in (3, 2)
            for n in (4, 3, 2)
        ]
    made += [Prefill("mma", _MMA_ROWS[problem.head_dim], warps, n) for warps in (8, 4) for n in (4, 3, 2)]
    return [schedule for schedule in made if schedule.smem_bytes(problem) + _STATIC <= target.smem_per_block]


def check(schedule: Prefill, problem: PrefillProblem, target: Target) -> None:
    """That a schedule which somebody chose can be launched.

    Raises:
        ArgumentError: counts that its program does not take, or more shared memory than a block has.
    """
    if schedule.program == "shared":
        warps = _SHARED_WARPS[problem.head_dim]
        fits = schedule.row_tiles == 8 and schedule.warps in warps and schedule.buffers in (2, 3)
        takes = f"shared has 8 row tiles, {warps} warps and 2 or 3 buffers"
    else:
        most = _MMA_ROWS[problem.head_dim]
        fits = 1 <= schedule.row_tiles <= most and 1 <= schedule.warps <= 32
        takes = f"mma has 1 to {most} row tiles and 1 to 32 warps"
    if schedule.program == "shared" and not target.supports("wgmma.f16"):
        raise ArgumentError("schedule", schedule, f"{target.arch} has no wgmma, which shared needs", "use mma")
    if not fits or schedule.stages < 2:
        constraint = f"with head_dim {problem.head_dim} {takes}, and a ring two stages or more"
        raise ArgumentError("schedule", schedule, constraint, "leave it out")
    size = schedule.smem_bytes(problem) + _STATIC
    if size > target.smem_per_block:
        constraint = f"needs {size} bytes of shared memory, a block on {target.arch} has {target.smem_per_block}"
        raise ArgumentError("schedule", schedule, constraint, "use fewer stages or buffers")


def choose(problem: PrefillProblem, target: Target, rows: int = 0) -> Prefill:
    """The first of `every`, or the first with so many rows in a CTA.

    Raises:
        ArgumentError: shared memory too small for two stages.
    """
    possible = every(problem, target)
    if not possible:
        constraint = f"no two stages of {problem.stage_words} words fit on {target.arch}"
        raise ArgumentError("head_dim", problem.head_dim, constraint, "use smaller formats")
    return next((it for it in possible if it.rows == rows), possible[0])


def widths(problem: PrefillProblem, target: Target) -> list[int]:
    """Rows of the CTAs that `narrower` may choose from, the widest first; empty where there is one program for all."""
    return list(dict.fromkeys(it.rows for it in every(problem, target) if it.program == "shared"))


MOST_PARTS = 32
"""Most CTAs that share the tokens of a tile of rows."""
PARTS = (2, 3, 4, 6, 8, 12, 16, 24, MOST_PARTS)
"""What `divide` may choose: those that were timed."""
# In stages of 64 tokens and 128 rows, fitted to 840 times of an H100 (tests/data/tuning/prefill_parts_h100.json):
_PART_COST = {192: 1.25, 128: 1.0, 64: 0.8}  # rows of a CTA -> time of a stage
_LEAST_STAGES = 4  # that a part is worth
_START = 4.0  # a wave of CTAs, ahead of its first stage
_MERGE = 5.0  # the merge's launch
_MERGE_ROW = 4e-4  # a row of a partial result, written and read
_GAIN = 0.95  # of the time there was: less than that is worth a merge


def _waves(ctas: int, sms: int, counted: int = 2) -> float:
    """How often SMs take a CTA; beyond `counted`, waves are as good as their average."""
    waves = ctas / sms
    return math.ceil(waves) if waves <= counted else waves + 0.5


@lru_cache(maxsize=4096)
def divide(problem: PrefillProblem, target: Target, sms: int, rows: int, groups: int, tokens: int) -> tuple[int, int]:
    """(rows of a CTA or 0 as of `narrower`, parts that the tokens of each tile of rows are cut into).

    Short chunks over long pasts leave SMs idle, however narrow their tiles of rows are; then CTAs share the tokens. So
    they do where tiles leave some SMs idle, and their parts fill whole waves.

    Args:
        tokens: that the rows of the longest sequence see. The rest as of `narrower`.
    """
    stages, unsplit = -(-tokens // 64), narrower(problem, target, sms, rows, groups)
    possible = widths(problem, target)

    def ctas_of(width: int) -> int:
        return -(-rows // (width or choose(problem, target).rows)) * groups

    def cost(width: int, parts: int) -> float:
        merge = _MERGE + _MERGE_ROW * rows * groups * parts if parts > 1 else 0
        stage = _PART_COST.get(width, 1.0) * -(-stages // parts)
        return _waves(ctas_of(width) * parts, sms, counted=4) * (_START + stage) + merge

    few = [width for width in possible or [0] if ctas_of(width) <= sms]  # more were not timed, and gain little
    split = [(width, parts) for width in few for parts in PARTS if parts * _LEAST_STAGES <= stages]
    width, parts = min(split, key=lambda it: cost(*it), default=(0, 1))
    if parts == 1 or cost(width, parts) > _GAIN * cost(unsplit or (possible[0] if possible else 0), 1):
        return unsplit, 1
    return (0 if possible and width == possible[0] else width), parts


@lru_cache(maxsize=4096)
def narrower(problem: PrefillProblem, target: Target, sms: int, rows: int, groups: int) -> int:
    """Rows of a CTA for a launch whose widest tiles would leave SMs idle, 0 for one that has enough of them.

    Args:
        sms: of the GPU. rows: of the longest sequence, (new token, query head of a group). groups: sequences times kv
            heads.
    """

    def cost(width: int) -> float:
        return _waves(-(-rows // width) * groups, sms) * _SHARED_COST[width]

    possible = widths(problem, target)
    best = min(possible, key=cost, default=0)
    return 0 if possible and best == possible[0] else best
