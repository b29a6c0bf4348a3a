"""Schedules of grouped GEMMs: stream-K tiles, chosen by what is known before a launch, M and the number of experts."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

from terrazzo.lowering.targets import Target
from terrazzo.schedules.partition import share_tiles

WIDTHS = (16, 32, 64, 128, 256)
"""Tokens of the tiles: those of an expert vary too much for finer steps (not measured)."""
_SHAPES = ((4, 1), (4, 2), (2, 1))  # warpgroups, row blocks of each; of equal cost the first
_FEW_TOKENS = 64
_PIECES = 6
"""Products of the average expert's tokens up to which the padding of tiles that are wider than one costs more than they
save: with 2 they took 5 to 9 % more time, with 8 they take 5 % less (Mixtral-8x7B and Qwen3-30B-A3B on H200)."""
_FIX_UP = 10  # a shared tile's trip through the workspace, in loads of 64 rows by 128 k
_TILE = 3  # begin and end of a tile, in the same unit
_TABLE_BYTES = 8  # of an expert


def choose(form: ModuleType, problem: Any, target: Target, m: int, experts: int, *numerics: bool) -> Any:
    """A StreamK of `form` (schedules.w4a8 or schedules.stream_k) for m tokens over `experts` experts.

    A tile is as wide as the average expert's tokens: an expert with more takes several, which meet in L2. Up to 64
    tokens the weights bound the time, so the shape is the one whose busiest SM loads least.

    Args:
        problem: of one expert. numerics: further arguments of `form.choose`.
    """
    active = min(experts, m)
    average = -(-m // experts)
    free = room(target, experts)
    if hasattr(form, "OF_EXPERTS") and average <= 2 * max(form.OF_EXPERTS):
        return _converting(form, problem, free, average)
    tokens = average
    if hasattr(form, "AT_ONCE") and average <= _PIECES * form.AT_ONCE:
        tokens = min(average, form.AT_ONCE)
    wide = form.choose(replace(problem, n=problem.n * active), free, tokens, *numerics, widths=WIDTHS)
    if wide.block_tokens > _FEW_TOKENS:
        return wide
    shapes = [(wgs, rb) for wgs, rb in _SHAPES if legal(replace(wide, warpgroups=wgs, row_blocks=rb))]
    blocks = active * -(-average // wide.block_tokens)
    cost = lambda shape: _busiest(problem, target, blocks, shape[0] * shape[1], shape[0])
    warpgroups, row_blocks = min(shapes, key=cost)
    return form.fitted(replace(wide, warpgroups=warpgroups, row_blocks=row_blocks), problem, free)


def _converting(form: ModuleType, problem: Any, free: Target, average: int) -> Any:
    """Where converting bounds the time and not the bytes, an expert's second tile costs as much as its first: as wide
    as most experts' tokens, two standard deviations over the average."""
    tokens = next((t for t in form.OF_EXPERTS if average + 2 * average**0.5 <= t), max(form.OF_EXPERTS))
    return form.fitted(form.StreamK(tokens, *form.OF_EXPERTS[tokens], stages=2), problem, free)


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


def _busiest(problem: Any, target: Target, token_blocks: int, cta_blocks: int, warpgroups: int) -> float:
    """Loads of 64 rows by 128 k of the busiest SM."""
    tiles = token_blocks * -(-problem.row_blocks // cta_blocks)
    tile = cta_blocks * problem.units + _TILE
    part = share_tiles(tiles, problem.units, target.sms)
    slow = 1.0 if warpgroups > 2 else 1.1  # fewer warps hide less of the conversion
    if part.shared == 0:
        return slow * -(-tiles // target.sms) * tile
    return slow * (tiles * tile / target.sms + _FIX_UP)
