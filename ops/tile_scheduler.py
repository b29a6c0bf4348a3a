"""Macros of persistent tile programs: which share of which tile comes next, and the ring that feeds it.

Work partition (schedules/stream_k.py): the first `sk` tiles are cut along k into equal shares, one for each CTA, the
others are whole tiles in waves. A CTA that starts inside a tile leaves its sum in the workspace; the CTA that holds the
head of that tile adds the shares in order of k, so the result has the same bits in every run. A share is awaited only
from CTAs with a lower index, which the hardware has started earlier.

Each function returns macros for one program; all of their state lives in one-element local buffers (`scalars`).
"""

from types import SimpleNamespace


def scalars(*names: str) -> SimpleNamespace:
    """Runtime int32 state of a program, one local buffer for each name."""
    import tilelang.language as T

    return SimpleNamespace(**{name: T.alloc_local((1,), "int32") for name in names})


def plan_state() -> SimpleNamespace:
    """What `plan` writes: k units [first, last) of shared tiles, shared segments, all segments."""
    return scalars("first", "last", "shared", "all")


def segment_state() -> SimpleNamespace:
    """What `segment` writes: tile, k units [k0, k1), token block, row tile; `count` is a scratch value."""
    return scalars("tile", "k0", "k1", "tokens", "rows", "count")


def ring_state() -> SimpleNamespace:
    """Stage and parity of a ring, and the stage before."""
    return scalars("stage", "parity", "before")


def partition_macros(*, units: int, row_tiles: int, raster: int) -> SimpleNamespace:
    """Macros `plan`, `segment` and `later_shares` for tiles of `units` k units, `row_tiles` of them along the rows.

    Groups of `raster` token blocks walk over the rows together, so that both operands stay in L2.
    """
    import tilelang.language as T

    @T.macro
    def plan(p, cta, grid, sk, mt):
        """Shared iterations [first, last), shared segments and all segments of CTA `cta` of `grid`."""
        r = grid - 1 - cta  # high shares on low CTAs: a share is only awaited from a CTA that started earlier
        p.first[0] = T.truncdiv(r * (sk * units), grid)
        p.last[0] = T.truncdiv((r + 1) * (sk * units), grid)
        p.shared[0] = T.if_then_else(
            p.last[0] > p.first[0], T.truncdiv(p.last[0] - 1, units) - T.truncdiv(p.first[0], units) + 1, 0
        )
        p.all[0] = p.shared[0] + T.max(T.truncdiv(mt * row_tiles - sk - r + grid - 1, grid), 0)

    @T.macro
    def segment(p, c, seg, cta, grid, sk, mt):
        """Tile, k units [k0, k1), token block and row tile of the CTA's segment `seg`."""
        if seg < p.shared[0]:
            c.tile[0] = T.truncdiv(p.first[0], units) + seg
            c.k0[0] = T.max(p.first[0] - c.tile[0] * units, 0)
            c.k1[0] = T.min(p.last[0] - c.tile[0] * units, units)
        else:
            c.tile[0] = sk + grid - 1 - cta + (seg - p.shared[0]) * grid
            c.k0[0] = 0
            c.k1[0] = units
        c.tokens[0] = T.truncdiv(c.tile[0], raster * row_tiles) * raster
        c.rows[0] = T.truncmod(c.tile[0], raster * row_tiles)
        c.count[0] = T.min(mt - c.tokens[0], raster)
        c.tokens[0] = c.tokens[0] + T.truncmod(c.rows[0], c.count[0])
        c.rows[0] = T.truncdiv(c.rows[0], c.count[0])

    @T.macro
    def later_shares(c, cta, grid, sk):
        """c.count: the other shares of the tile whose head CTA `cta` holds; those of the CTAs right below."""
        c.count[0] = T.truncdiv((c.tile[0] + 1) * units * grid - 1, sk * units) - (grid - 1 - cta)

    return SimpleNamespace(plan=plan, segment=segment, later_shares=later_shares)


def ring_macros(*, stages: int) -> SimpleNamespace:
    """Macros `reset`, `advance` and `release` of a ring of shared-memory stages."""
    import tilelang.language as T

    @T.macro
    def reset(ring):
        ring.stage[0] = 0
        ring.parity[0] = 0
        ring.before[0] = 0

    @T.macro
    def advance(ring):
        ring.before[0] = ring.stage[0]
        ring.stage[0] = ring.stage[0] + 1
        if ring.stage[0] == stages:
            ring.stage[0] = 0
            ring.parity[0] = ring.parity[0] ^ 1

    @T.macro
    def release(empty, ring, condition):
        """The stage before goes back to the producer."""
        if condition:
            T.barrier_arrive(empty[ring.before[0]])

    return SimpleNamespace(reset=reset, advance=advance, release=release)


def share_macros(*, vectors: int, row_blocks: int, flags: int, add: str) -> SimpleNamespace:
    """Macros `leave_share` and `add_shares`: partial tiles through the workspace.

    A thread holds `row_blocks` * `vectors` groups of four 32-bit sums; WS is [grid, blocks, vectors, 128, 4]. `flags`
    semaphores belong to a CTA, one for each warpgroup. `add` is the primitive that adds four sums from the workspace.
    """
    import tilelang.language as T

    @T.macro
    def leave_share(WS, SEM, acc, cta, wg, wt):
        """The sum of a tile whose head another CTA holds goes to the workspace."""
        for r in T.unroll(row_blocks):
            for i in T.unroll(vectors):
                T.call_extern(
                    "handle",
                    "tz_copy16",
                    T.access_ptr(WS[cta, wg * row_blocks + r, i, wt, 0], "w", 4),
                    T.access_ptr(acc[(r * vectors + i) * 4], "r", 4),
                )
        T.call_extern("handle", "tz_signal", T.access_ptr(SEM[cta, wg], "rw", 1), wg + 1)

    @T.macro
    def add_shares(WS, SEM, acc, count, cta, wg, wt):
        """The head of a tile adds the `count` other shares in order of k."""
        T.call_extern(
            "handle",
            "tz_await",
            T.access_ptr(SEM[cta - 1, wg], "rw", 1),
            count,
            -flags,
            wg + 1,
        )
        for b in T.serial(count):
            for r in T.unroll(row_blocks):
                for i in T.unroll(vectors):
                    T.call_extern(
                        "handle",
                        add,
                        T.access_ptr(acc[(r * vectors + i) * 4], "rw", 4),
                        T.access_ptr(WS[cta - (b + 1), wg * row_blocks + r, i, wt, 0], "r", 4),
                    )

    return SimpleNamespace(leave_share=leave_share, add_shares=add_shares)
