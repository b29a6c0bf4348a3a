"""Schedules of grouped GEMMs: stream-K tiles or, on mma.sync, a CTA for each tile; chosen by what is known before a
launch, M and the number of experts."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, erfc

from terrazzo.lowering.targets import Target
from terrazzo.schedules import multistage, stream_k, tile_costs
from terrazzo.schedules.costs import COSTS
from terrazzo.schedules.multistage import FEW_TOKENS, Multistage
from terrazzo.schedules.partition import share_tiles
from terrazzo.schedules.problem import Gemm
from terrazzo.schedules.stream_k import StreamK

_SHAPES = ((4, 1), (4, 2), (2, 1), (2, 2))
"""Warpgroups, and row blocks of each, of the tiles that were measured."""
_AGAIN = 0.05  # of a launch's time, for a second and a third tile of an expert, which read its weights again (estimate)
_WEIGHTS_AS_TOKENS = 24  # of a tile on mma.sync: reading and converting its weights takes as long (estimate)
_TABLE_BYTES = 8  # of an expert


def choose(problem: Gemm, target: Target, m: int) -> StreamK:
    """The StreamK of its form for m tokens over the experts of a problem.

    The tile whose launch is cheapest for the average expert's bucket of tokens, each of which goes to a random expert:
    one that is only as wide as the average takes half of the experts two tiles. In 66 problems on an H200, 0.5 % from
    the fastest tile in the mean (tests/data/tuning/grouped_h200.json).
    """
    experts = problem.experts
    free, average = room(target, experts), -(-m // experts)
    if problem.form_name == "f16 post":  # whose tiles were not measured one by one
        return stream_k.choose(replace(problem, n=problem.n * min(experts, m)), free, average)
    average = _average(problem, m)
    widest = tile_costs.bucket(ceil(average + 2 * average**0.5))
    tiles = [it for it in COSTS[problem.form_name].experts.units if it[0] <= widest and it[1:] in _SHAPES]
    made = (fitted(stream_k.of_tile(problem, tile), problem, target) for tile in tiles)
    return min(filter(legal, made), key=lambda s: predicted_us(s, problem, target, m))


def choose_multistage(problem: Gemm, target: Target, m: int) -> Multistage:
    """The tile on mma.sync, where a target has no warpgroup instructions."""
    average = _average(problem, m)
    cost = lambda tokens: tiles_of_expert(average, tokens) * (tokens + _WEIGHTS_AS_TOKENS)
    return multistage.choose_for_experts(problem, target, min(FEW_TOKENS, key=cost), _reached(problem, m))


def _reached(problem: Gemm, m: int) -> int:
    """Experts that m tokens can reach, a bucket."""
    return min(problem.experts, 1 << (m - 1).bit_length())


def _average(problem: Gemm, m: int) -> int:
    """The bucket of the average expert's tokens."""
    average = -(-m // problem.experts)
    return tile_costs.bucket(average) if average > 8 else 1 << (average - 1).bit_length()


def predicted_us(schedule: StreamK, problem: Gemm, target: Target, m: int) -> float:
    """Predicted microseconds of m tokens, for as many to each of the experts that they can reach."""
    average, experts = _average(problem, m), _reached(problem, m)
    each = tiles_of_expert(average, schedule.block_tokens)
    tiles = round(experts * each * -(-problem.row_blocks // schedule.cta_blocks))
    weights = problem.row_blocks * problem.units * problem.unit_bytes
    return (1 + _AGAIN * min(each - 1, 2)) * COSTS[schedule.form].experts.us(
        schedule.tile,
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


def fitted(schedule: StreamK, problem: Gemm, target: Target) -> StreamK:
    """The same tile with as many stages as fit beside the table of the experts."""
    return stream_k.fitted(schedule, problem, room(target, problem.experts), problem.form.experts_ring_k)


def legal(schedule: StreamK) -> bool:
    """Whether the accumulators leave room for the operands beside the expert's state (else ptxas serializes wgmma)."""
    if schedule.rules.x_16_bit:
        return schedule.warpgroups < 4 or schedule.row_blocks == 1 or schedule.block_tokens <= 16
    return schedule.legal()
