"""Hadamard rotations in registers: of new tokens before they are stored, of queries, and of sums of rotated values.

A rotation of D = 2^n values is n stages of sums and differences in f32, one for each bit of the head dimension, from
the lowest on, as `quantizer.rotate` has them. Where a bit of the dimension is one of a register's number, a stage stays
in the lane; where it is one of the lane's number, it exchanges with the lane whose bit differs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from terrazzo.ops.attention.device.calls import clamp2, fma, xor_shuffle
from terrazzo.ops.attention.device.tile_macros import each
from terrazzo.ops.products.kv import hadamard_scale
from terrazzo.ops.tiles.calls import pack2, unpack
from terrazzo.ops.tiles.language import T
from terrazzo.ops.tiles.types import Macro

Stages = tuple[tuple[str, int], ...]
"""A stage for each bit of the head dimension: ("register", distance of the two numbers) or ("lane", mask)."""


def query_stages(head_dim: int) -> Stages:
    """Of the B operand of eight rows, unpacked: value 2 w + e of word w = 2 k + half."""
    upper = tuple(("register", 4 << i) for i in range((head_dim // 16).bit_length() - 1))
    return (("register", 1), ("lane", 1), ("lane", 2), ("register", 2), *upper)


def sum_stages(head_dim: int, row_tiles: int) -> Stages:
    """Of accumulators O^T: value (a * row_tiles + t) * 4 + e, two dimensions for each two rows."""
    upper = tuple(("register", 4 * row_tiles << i) for i in range((head_dim // 16).bit_length() - 1))
    return (("lane", 4), ("lane", 8), ("lane", 16), ("register", 2), *upper)


def row_sum_stages(head_dim: int) -> Stages:
    """Of accumulators O, whose rows are rows of the output: value 4 j + e of columns 8 j on."""
    upper = tuple(("register", 4 << i) for i in range((head_dim // 8).bit_length() - 1))
    return (("register", 1), ("lane", 1), ("lane", 2), *upper)


def row_stages(head_dim: int, values: int = 8) -> Stages:
    """Of rows whose lanes hold `values` dimensions each, one after another."""
    own, lanes = values.bit_length() - 1, (head_dim // values).bit_length() - 1
    return (*(("register", 1 << i) for i in range(own)), *(("lane", 1 << i) for i in range(lanes)))


class Rotation(NamedTuple):
    """Macros over some f32 registers of every lane: `turn` (the stages), `from_words` and `to_words` (16-bit pairs
    before and after them), `scaled` (floats times 1 / sqrt(D)). All lanes of the warp take part; st.turned is one more
    register."""

    turn: Macro
    from_words: Macro
    to_words: Macro
    scaled: Macro


def make_rotation(head_dim: int, count: int, stages: Stages) -> Rotation:
    """Those over `count` registers."""
    scale = hadamard_scale(head_dim)

    @T.macro
    def stage(st, f, kind, distance, lane):
        if kind == "register":
            for i in T.unroll(count // 2):
                low = i // distance * (2 * distance) + i % distance
                st.turned[0] = f[low] - f[low + distance]
                f[low] = f[low] + f[low + distance]
                f[low + distance] = st.turned[0]
        else:
            st.turned[0] = T.if_then_else(T.bitwise_and(lane, distance) == 0, T.float32(1), T.float32(-1))
            for i in T.unroll(count):
                f[i] = fma(f[i], st.turned[0], xor_shuffle(f[i], distance))  # rounded as the sum or difference is

    @T.macro
    def turn(st, f, lane):
        for kind, distance in stages:
            stage(st, f, kind, distance, lane)

    @T.macro
    def from_words(f, words, at: Callable[[int], int], bf16):
        """f[2 i], f[2 i + 1] = the halves of words[at(i)]."""
        for i in each(count // 2):
            for e in each(2):
                f[2 * i + e] = unpack(e, words[at(i)], bf16=bf16)

    @T.macro
    def to_words(f, words, at: Callable[[int], int], clamped):
        """words[at(i)] = f[2 i], f[2 i + 1] over sqrt(D), as f16."""
        for i in each(count // 2):
            if clamped:
                words[at(i)] = clamp2(f[2 * i] * T.float32(scale), f[2 * i + 1] * T.float32(scale), bf16=False)
            else:
                words[at(i)] = pack2(f[2 * i] * T.float32(scale), f[2 * i + 1] * T.float32(scale), bf16=False)

    @T.macro
    def scaled(f):
        for i in T.unroll(count):
            f[i] = f[i] * T.float32(scale)

    return Rotation(turn, from_words, to_words, scaled)
