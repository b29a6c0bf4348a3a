"""Schedules of grouped GEMMs: stream-K tiles, chosen by what is known before a launch, M and the number of experts."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, erfc
from types import ModuleType
from typing import Any

from terrazzo.lowering.targets import Target
from terrazzo.schedules import stream_k, tile_costs, w4a8, w4a8_fp8
from terrazzo.schedules.partition import share_tiles
from terrazzo.schedules.problem import Gemm

_SHAPES = ((4, 1), (4, 2), (2, 1), (2, 2))
"""Warpgroups, and row blocks of each, of the tiles that were measured."""
_AGAIN = 0.05  # of a launch's time, for a second and a third tile of an expert, which read its weights again (estimate)
_TABLE_BYTES = 8  # of an expert
FORMS: dict[str, ModuleType] = {"f16": stream_k, "s8": w4a8, "e4m3": w4a8_fp8}
"""Activations -> the module of the stream-K program that multiplies them."""


def choose(problem: Gemm, target: Target, m: int) -> Any:
    """The StreamK of its form for m tokens over the experts of a problem.

    The tile whose launch is cheapest for the average expert's bucket of tokens, each of which goes to a random expert:
    one that is only as wide as the average takes half of the experts two tiles. In 66 problems on an H200, 0.5 % from
    the fastest tile in the mean (tests/data/tuning/grouped_h200.json).
    """
    form, experts = FORMS[problem.activations], problem.experts
    free, average = room(target, experts), -(-m // experts)
    if problem.activations == "f16" and problem.scales == "post":  # whose tiles were not measured one by one
        return form.choose(replace(problem, n=problem.n * min(experts, m)), free, average)
    average = tile_costs.bucket(average) if average > 8 else 1 << (average - 1).bit_length()
    active = min(experts, 1 << (m - 1).bit_length())
    widest = tile_costs.bucket(ceil(average + 2 * average**0.5))
    costs = getattr(form, "EXPERT_COSTS", form.TILE_COSTS)
    tiles = [tile for tile in costs.units if tile[0] <= widest and tile[1:] in _SHAPES]
    made = (form.fitted(form.StreamK.of_tile(tile), problem, free) for tile in tiles)
    return min(filter(legal, made), key=lambda s: us(costs, s, problem, target, average, active))


def us(costs: tile_costs.TileCosts, schedule: Any, problem: Gemm, target: Target, average: int, experts: int) -> float:
    """Predicted microseconds of `average` tokens for each expert."""
    each = tiles_of_expert(average, schedule.block_tokens)
    tiles = round(experts * each * -(-problem.row_blocks // schedule.cta_blocks))
    weights = problem.row_blocks * problem.units * problem.unit_bytes
    return (1 + _AGAIN * min(each - 1, 2)) * costs.us(
        (schedule.block_tokens, schedule.warpgroups, schedule.row_blocks),
        tiles,
        problem.units,
        share_tiles(tiles, problem.units, target.sms),
        tile_costs.dram_us(target, experts * (weights + 2 * average * (problem.k + problem.n))),
        target.sms,
        False,
        1.0,
    )


def tiles_of_expert(average: float, tokens: int) -> float:
    """How many tiles an expert takes whose tokens are random, by the normal distribution of that average."""
    above = lambda count: 0.5 * erfc((count - average) / (2 * average) ** 0.5)
    return 1 + sum(above(tokens * number) for number in range(1, int(2 * average / tokens) + 8))


def room(target: Target, experts: int) -> Target:
    """The target with the shared memory that the table of the experts leaves, and without clusters: which CTAs share a
    tile is found on the device."""
    left = target.smem_per_block - _TABLE_BYTES * (experts + 1) - 128
    return replace(target, smem_per_block=left, capabilities=target.capabilities - {"cluster"})


def legal(schedule: Any) -> bool:
    """Whether the accumulators leave room for the operands beside the expert's state (else ptxas serializes wgmma)."""
    if hasattr(schedule, "legal"):
        return schedule.legal()
    return schedule.warpgroups < 4 or schedule.row_blocks == 1 or schedule.block_tokens <= 16
