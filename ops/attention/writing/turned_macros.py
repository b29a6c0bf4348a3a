"""Heads that are normed and turned to their positions beside the storing of new tokens: keys on their way to shared
memory, queries to a tensor. What the programs that do so share; ops/tiles/heads.py says how a head lies in lanes.
"""

from __future__ import annotations

from typing import NamedTuple

from terrazzo.ops.attention.device.tile_macros import each
from terrazzo.ops.attention.writing.write_macros import NewRows, Rows, row_pitch
from terrazzo.ops.tiles import heads as heads_in_lanes
from terrazzo.ops.tiles.cuda.rows import HEADS, ROW_OUTPUTS
from terrazzo.ops.tiles.language import T
from terrazzo.ops.tiles.row_outputs import VECTOR
from terrazzo.ops.tiles.types import Call, Macro

SOURCES = (ROW_OUTPUTS, HEADS)
"""CUDA text that these macros need, beside the primitive "rows"."""


class Turning(NamedTuple):
    """Macros `fetch` (a tile's new keys to shared memory) and `queries` (some heads of q to a tensor), and `state`, the
    registers of a head in lanes; `per_cta`: heads of q that a CTA turns."""

    fetch: Macro
    queries: Macro
    state: Call
    per_cta: int


def make_turned_macros(kind: dict, new_rows: NewRows, warps: int, pdl: bool) -> Turning:
    """Those of a program.

    Args:
        kind: head_dim, rotary_dim, layout, dtype, norm and numerics, as of ops/tiles/heads.py.
        new_rows: which rows of a tile are new. pdl: whether the kernel may start early.
    """
    heads_in_lanes.check(**kind)
    turned, norm, D = heads_in_lanes.heads(**kind), kind["norm"], kind["head_dim"]
    pitch = row_pitch(D)

    @T.macro
    def load_head(h, of, row, at, j):
        for i in each(2):
            place_of = turned.second(j) if i else turned.first(j)
            T.call_extern(
                "handle", "tz_stream16", T.access_ptr(h.x, "w", 4),
                T.call_extern("handle", "tz_row16", T.access_ptr(of.data[0], "r", 1), row, of.token, at + place_of),
            )  # fmt: skip
            T.call_extern(
                "handle", f"tz_widen8<{turned.bf16}>", T.access_ptr(h.v[i * VECTOR], "w", VECTOR),
                T.access_ptr(h.x, "r", 4),
            )  # fmt: skip

    @T.macro
    def turn_head(h, W, COS, SIN, row, eps, j, wanted):
        """The head in the lanes' registers, normed and turned."""
        if norm != "none":
            turned.factor(h, eps)
            if wanted:
                turned.norm(h, W, j)
        if wanted:
            turned.turn(h, COS, SIN, row, j)

    @T.macro
    def fetch_turned(rows, w, of, lane):
        """A tile's new rows to shared memory, turned; rows of other tokens become zeros."""
        h, t, j = of.registers, of.tensors, lane % turned.lanes
        for i in T.serial(turned.lanes // 2):  # 16 rows, 32 / lanes at a time
            row = i * (32 // turned.lanes) + lane // turned.lanes
            fresh = new_rows.fresh(w, row)
            source = new_rows.source(w, row, fresh)
            for e in T.unroll(2 * VECTOR):
                h.v[e] = 0.0
            if T.And(fresh, j < turned.used):
                load_head(h, of, source, w.h[0] * of.head, j)
            angle = new_rows.angle(t, source)
            turn_head(h, t.KW, t.COS, t.SIN, angle, t.eps, j, T.And(fresh, j < turned.used))
            if j < turned.used:
                for e in each(2):
                    at = turned.second(j) if e else turned.first(j)
                    T.call_extern(
                        "handle", f"tz_values_store<{turned.bf16}>",
                        T.access_ptr(rows[(w.warp * 16 + row) * pitch + at // 2], "w", 4),
                        T.access_ptr(h.v[e * VECTOR], "r", VECTOR), T.float32(1),
                    )  # fmt: skip

    @T.macro
    def turn_queries(t, h, unit, q_token, heads, q_rows, tx):
        """Heads of q from row `unit` of Q on, normed and turned."""
        row, j = unit + tx // turned.lanes, tx % turned.lanes
        at = T.alloc_local((1,), "int32")  # the division, once and in 32 bits
        at[0] = T.truncdiv(row, heads)
        token = at[0]
        wanted = T.And(row < q_rows, j < turned.used)
        if pdl:
            T.pdl_trigger()
            T.pdl_sync()
        for e in T.unroll(2 * VECTOR):
            h.v[e] = 0.0
        if wanted:
            load_head(h, Rows(t.X, q_token), token, (row - token * heads) * D, j)
        turn_head(h, t.QW, t.COS, t.SIN, new_rows.angle(t, token), t.eps, j, wanted)
        if wanted:
            for e in each(2):
                place_of = turned.second(j) if e else turned.first(j)
                T.call_extern(
                    "handle", f"tz_values_store<{turned.bf16}>", T.access_ptr(t.Q[row, place_of], "w", VECTOR),
                    T.access_ptr(h.v[e * VECTOR], "r", VECTOR), T.float32(1),
                )  # fmt: skip

    return Turning(fetch_turned, turn_queries, turned.state, warps * (32 // turned.lanes))
