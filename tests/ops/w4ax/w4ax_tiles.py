"""Tiles of W4Ax's programs on wgmma, short to write."""

from __future__ import annotations

from terrazzo.schedules.stream_k import StreamK


def block_tile(block_tokens: int, warpgroups: int, stages: int, turns: int = 0) -> StreamK:
    """Of scales of each block."""
    return StreamK(block_tokens, warpgroups, 1, stages, turns=turns, form="s4_s8 block")


def integer_tile(block_tokens: int, warpgroups: int, stages: int) -> StreamK:
    """Of two-level scales."""
    return StreamK(block_tokens, warpgroups, 1, stages, form="s4_s8 integer")
