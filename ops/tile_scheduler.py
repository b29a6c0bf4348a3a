"""Macros of persistent tile programs: which share of which tile comes next, and the ring that feeds it.

Work partition (schedules/stream_k.py): the first `sk` tiles are cut along k into equal shares, one for each CTA, the
others are whole tiles in waves. A CTA that starts inside a tile leaves its sum in the workspace before all else; the
CTA that holds the head of that tile adds the shares in order of k, after its whole tiles, so that it does not wait. The
result has the same bits in every run. A share is awaited only from CTAs with a lower index, which the hardware has
started earlier.

Where every tile is shared by as many CTAs (`exchange`), they part the sum instead: each leaves what the others add,
and adds and stores a slice of the tile's tokens. They wait for each other, which is free of deadlock only while all of
them run; so a warp that waited for too long leaves its slice to the one that comes last.

Each function returns macros for one program; all of their state lives in one-element local buffers (`scalars`).
"""

from types import SimpleNamespace

from terrazzo.schedules.tile_costs import MOST_SLICES


def scalars(*names: str) -> SimpleNamespace:
    """Runtime int32 state of a program, one local buffer for each name."""
    import tilelang.language as T

    return SimpleNamespace(**{name: T.alloc_local((1,), "int32") for name in names})


def plan_state() -> SimpleNamespace:
    """What `plan` writes: k units [first, last) of shared tiles, each `length` long, of which the first `head` cost no
    work; shared segments, whether one of them is a head to come last, all segments; `among`, the CTAs that part each
    tile, or 0."""
    return scalars("first", "last", "length", "head", "shared", "late", "all", "among")


def segment_state() -> SimpleNamespace:
    """What `segment` writes: tile, k units [k0, k1), token block, row tile, whether it `leaves` its sum to the tile's
    head or `adds` other shares; `length` of the plan, and `count`, a scratch value. What `locate` adds: the block's
    tokens [first, end) as rows of x, and its expert."""
    names = ("tile", "k0", "k1", "tokens", "rows", "leaves", "adds", "length", "count", "first", "end", "expert")
    return scalars(*names)


def slice_state() -> SimpleNamespace:
    """What `give` and `take` of the share macros write: which `share` of its tile the CTA has, in order of k, of how
    many (`among`); the slice `at` and a bit for each of its `units`; slices left to add and how many they were, whether
    the other CTAs came in time."""
    return scalars("share", "among", "units", "at", "todo", "rounds", "met")


def table_state() -> SimpleNamespace:
    """What `partition` of an expert table writes: token blocks, shared tiles, CTAs that take part."""
    return scalars("blocks", "shared", "grid", "tiles", "rest")


def ring_state() -> SimpleNamespace:
    """Stage and parity of a ring, and the stage before."""
    return scalars("stage", "parity", "before")


def partition_macros(
    *, units: int, row_tiles: int, raster: int, head_units: int = 0, exchange: bool = False
) -> SimpleNamespace:
    """Macros `plan`, `segment` and `later_shares` for tiles of `units` k units, `row_tiles` of them along the rows.

    Groups of `raster` token blocks walk over the rows together, so that both operands stay in L2. `head_units`: where
    whole tiles are left besides the shared ones, a head gets so many k units less for each other share that it adds up
    (a share may then be empty: k0 = k1). `exchange`: where all tiles are shared, by as many CTAs each, at most
    MOST_SLICES and a unit of k for each, nobody leaves or adds a share; all of them part the sum.
    """
    import tilelang.language as T

    @T.macro
    def plan(p, cta, grid, sk, mt):
        """Shared iterations [first, last), shared segments and all segments of CTA `cta` of `grid`."""
        r = grid - 1 - cta  # high shares on low CTAs: a share is only awaited from a CTA that started earlier
        p.head[0] = 0
        if head_units:
            if T.And(sk > 0, sk < mt * row_tiles):
                p.head[0] = T.min(T.truncdiv(grid + sk - 1, sk) * head_units, units // 4)
        p.among[0] = 0
        if exchange:
            if T.And(sk > 0, sk == mt * row_tiles):  # and a unit of k for each share
                if T.And(T.And(sk < grid, T.truncmod(grid, sk) == 0), grid <= min(MOST_SLICES, units) * sk):
                    p.among[0] = T.truncdiv(grid, sk)
        p.length[0] = units + p.head[0]
        p.first[0] = T.truncdiv(r * (sk * p.length[0]), grid)
        p.last[0] = T.truncdiv((r + 1) * (sk * p.length[0]), grid)
        p.shared[0] = 0
        p.late[0] = 0
        if p.last[0] > p.first[0]:
            p.shared[0] = T.truncdiv(p.last[0] - 1, p.length[0]) - T.truncdiv(p.first[0], p.length[0]) + 1
            if T.And(
                T.truncmod(p.last[0], p.length[0]) > 0,
                p.last[0] - T.truncmod(p.last[0], p.length[0]) >= p.first[0],
            ):
                p.late[0] = 1
        p.all[0] = T.if_then_else(
            cta < grid, p.shared[0] + T.max(T.truncdiv(mt * row_tiles - sk - r + grid - 1, grid), 0), 0
        )

    @T.macro
    def segment(p, c, seg, cta, grid, sk, mt):
        """Tile, k units [k0, k1), token block and row tile of the CTA's segment `seg`: the shares that it leaves to
        others, whole tiles, the head that it adds shares to."""
        c.length[0] = p.length[0]
        c.leaves[0] = 0
        c.adds[0] = 0
        if T.Or(seg < p.shared[0] - p.late[0], T.And(p.late[0] == 1, seg == p.all[0] - 1)):
            c.tile[0] = T.truncdiv(p.first[0], p.length[0]) + T.if_then_else(
                seg < p.shared[0] - p.late[0], seg, p.shared[0] - 1
            )
            c.k0[0] = T.max(p.first[0] - c.tile[0] * p.length[0], 0)
            c.k1[0] = T.min(p.last[0] - c.tile[0] * p.length[0], p.length[0])
            c.leaves[0] = T.if_then_else(c.k0[0] > 0, 1, 0)
            c.adds[0] = T.if_then_else(T.And(c.k0[0] == 0, c.k1[0] < p.length[0]), 1, 0)
            if exchange:
                if p.among[0] > 0:
                    c.leaves[0] = 0
                    c.adds[0] = 0
            c.k0[0] = T.if_then_else(c.k0[0] > 0, T.max(c.k0[0] - p.head[0], 0), 0)
            c.k1[0] = T.max(c.k1[0] - p.head[0], 0)
        else:
            c.tile[0] = sk + grid - 1 - cta + (seg - p.shared[0] + p.late[0]) * grid
            c.k0[0] = 0
            c.k1[0] = T.min(c.tile[0] + units, units)  # = units: a trip count that nvcc knows is unrolled, if small
        c.tokens[0] = T.truncdiv(c.tile[0], raster * row_tiles) * raster
        c.rows[0] = T.truncmod(c.tile[0], raster * row_tiles)
        c.count[0] = T.min(mt - c.tokens[0], raster)
        c.tokens[0] = c.tokens[0] + T.truncmod(c.rows[0], c.count[0])
        c.rows[0] = T.truncdiv(c.rows[0], c.count[0])

    @T.macro
    def later_shares(c, cta, grid, sk):
        """c.count: the other shares of the tile whose head CTA `cta` holds; those of the CTAs right below."""
        c.count[0] = T.truncdiv((c.tile[0] + 1) * c.length[0] * grid - 1, sk * c.length[0]) - (grid - 1 - cta)

    return SimpleNamespace(plan=plan, segment=segment, later_shares=later_shares)


EXPERTS_SOURCE = """\
// table[e], e <= E: token blocks of the experts before e; table[E + 1 + e]: their tokens, kept inside 0..m
template <int E> __device__ __forceinline__ void tz_expert_table(void *table_, const void *offsets_, int m, int block) {
  int *blocks = (int *)table_, *tokens = blocks + E + 1, lane = threadIdx.x % 32, before = 0;
  const int *offsets = (const int *)offsets_;
  if (threadIdx.x >= 32) return;
#pragma unroll
  for (int base = 0; base < E; base += 32) {
    int e = base + lane, lo = min(max(offsets[min(e, E)], 0), m), hi = min(max(offsets[min(e + 1, E)], 0), m);
    int sum = (max(hi - lo, 0) + block - 1) / block;
    for (int d = 1; d < 32; d *= 2) { int v = __shfl_up_sync(~0u, sum, d); if (lane >= d) sum += v; }
    if (e < E) { tokens[e] = lo; blocks[e + 1] = before + sum; }
    if (e == E - 1) tokens[E] = hi;
    before += __shfl_sync(~0u, sum, 31);
  }
  if (lane == 0) blocks[0] = 0;
}
// the expert of a token block, by a whole warp
template <int E> __device__ __forceinline__ int tz_expert_of(const void *table, int block) {
  int found = 0, lane = threadIdx.x % 32;
#pragma unroll
  for (int base = 1; base <= E; base += 32)
    found += __popc(__ballot_sync(~0u, base + lane <= E && ((const int *)table)[min(base + lane, E)] <= block));
  return found;
}
"""
"""Why not TileLang: a scan and a search by warp votes."""


def table_words(experts: int) -> int:
    """int32 of an expert table, padded so that what follows it in shared memory starts a line of 128 bytes."""
    return -(-2 * (experts + 1) // 32) * 32


def expert_macros(*, experts: int, block_tokens: int, units: int, row_tiles: int) -> SimpleNamespace:
    """Macros `partition` and `locate` of programs whose tokens are sorted by expert, each with a matrix of its own.

    A token block belongs to one expert; blocks are counted through all of them, so that a persistent loop walks over
    (expert, tile) pairs without a drain between experts, and empty experts cost nothing. The table Es is int32
    [table_words(experts)] in shared memory. `experts` = 0: one matrix, no table.
    """
    import tilelang.language as T

    @T.macro
    def partition(Es, e, offsets, m, grid):
        """The table, and which tiles are shared: schedules/partition.py on the device. A block barrier inside."""
        T.call_extern(
            "handle",
            f"tz_expert_table<{experts}>",
            T.access_ptr(Es[0], "w", 2 * (experts + 1)),
            T.access_ptr(offsets[0], "r", experts + 1),
            m,
            block_tokens,
        )
        T.sync_threads()
        e.blocks[0] = Es[experts]
        e.tiles[0] = e.blocks[0] * row_tiles
        e.rest[0] = T.truncmod(e.tiles[0], grid)
        e.grid[0] = grid
        e.shared[0] = 0
        if T.And(e.rest[0] > 0, (e.tiles[0] - e.rest[0] + grid) * 50 >= e.tiles[0] * 53):
            if e.tiles[0] < grid:
                e.shared[0] = e.tiles[0]
                e.grid[0] = T.truncdiv(e.tiles[0] * units + grid - 1, grid)  # k units of the busiest CTA
                e.grid[0] = T.truncdiv(e.tiles[0] * units + e.grid[0] - 1, e.grid[0])
            else:
                e.shared[0] = e.rest[0] + T.if_then_else(e.rest[0] * 2 > grid, 0, grid)

    @T.macro
    def locate(Es, c, m):
        if experts:
            c.expert[0] = T.call_extern(
                "int32", f"tz_expert_of<{experts}>", T.access_ptr(Es[0], "r", experts + 1), c.tokens[0]
            )
            c.first[0] = Es[experts + 1 + c.expert[0]] + (c.tokens[0] - Es[c.expert[0]]) * block_tokens
            c.end[0] = Es[experts + 2 + c.expert[0]]
        else:
            c.expert[0] = 0
            c.first[0] = c.tokens[0] * block_tokens
            c.end[0] = m

    return SimpleNamespace(partition=partition, locate=locate)


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
        """The stage before goes back to the producer, on behalf of the warp."""
        T.call_extern("handle", "tz_syncwarp")  # the other lanes' reads come before the arrive, too
        if condition:
            T.barrier_arrive(empty[ring.before[0]])

    return SimpleNamespace(reset=reset, advance=advance, release=release)


def spare_registers(warpgroups: int, used: int, per_sm: int = 1) -> int:
    """Registers of a thread that ptxas has left beside `used` in CTAs of so many warpgroups and one of producers:
    setmaxnreg comes too late for it."""
    return min(65536 // (128 * (warpgroups + 1) * per_sm) // 8 * 8, 240) - used


def share_macros(
    *, vectors: int, row_blocks: int, flags: int, dtype: str, spare: int, apart: bool = False
) -> SimpleNamespace:
    """Macros `leave_share` and `add_shares`, or `give`, `take` and `close`: partial tiles through the workspace.

    A thread holds `row_blocks` * `vectors` groups of four 32-bit sums in `dtype`; WS [grid, blocks, vectors, 128, 4].
    `flags` semaphores belong to a CTA, one for each warpgroup (each warp, where tiles are parted). `spare`: registers
    of a thread for loads under way; from 16 on, several shares are loaded together. `apart`: warpgroups have tiles of
    their own; each then counts as a CTA, and `wg` only names its barrier.
    """
    import tilelang.language as T

    part = (lambda wg: 0) if apart else (lambda wg: wg)
    total = row_blocks * vectors
    at_once = 4 if spare >= 64 else 2  # shares whose loads are in flight together
    depth = max(min(spare // (4 * at_once), 8, total), 1)  # vectors of each

    @T.macro
    def leave_share(WS, SEM, acc, cta, wg, wt):
        """The sum of a tile whose head another CTA holds goes to the workspace."""
        for r in T.unroll(row_blocks):
            for i in T.unroll(vectors):
                T.call_extern(
                    "handle",
                    "tz_copy16",
                    T.access_ptr(WS[cta, part(wg) * row_blocks + r, i, wt, 0], "w", 4),
                    T.access_ptr(acc[(r * vectors + i) * 4], "r", 4),
                )
        T.call_extern("handle", "tz_signal", T.access_ptr(SEM[cta, part(wg)], "rw", 1), wg + 1)

    @T.macro
    def load_vector(WS, coming, i, b, count, cta, wg, wt):
        """Vector i of shares b .. b + at_once - 1; zeros from those past the last."""
        for j in T.unroll(at_once):
            T.call_extern(
                "handle",
                "tz_load_share",
                T.access_ptr(coming[(i % depth * at_once + j) * 4], "w", 4),
                T.access_ptr(WS[cta, part(wg) * row_blocks + i // vectors, i % vectors, wt, 0], "r", 4),
                WS.shape[1] * (vectors * 512),
                b + j + 1,
                count,
            )

    @T.macro
    def add_in_place(WS, acc, count, cta, wg, wt):
        for b in T.serial(count):
            for i in T.unroll(total):
                T.call_extern(
                    "handle",
                    "tz_addcg4" if dtype == "float32" else "tz_addcg4i",
                    T.access_ptr(acc[i * 4], "rw", 4),
                    T.access_ptr(WS[cta - (b + 1), part(wg) * row_blocks + i // vectors, i % vectors, wt, 0], "r", 4),
                )

    @T.macro
    def add_together(WS, acc, count, cta, wg, wt):
        coming = T.alloc_local((depth * at_once * 4,), dtype)
        for b in T.serial(T.ceildiv(count, at_once)):
            for i in T.unroll(total + depth - 1):
                if i < total:
                    load_vector(WS, coming, i, b * at_once, count, cta, wg, wt)
                if i >= depth - 1:
                    for j in T.unroll(at_once):
                        for e in T.unroll(4):
                            acc[(i - depth + 1) * 4 + e] = (
                                acc[(i - depth + 1) * 4 + e] + coming[((i - depth + 1) % depth * at_once + j) * 4 + e]
                            )

    @T.macro
    def add_shares(WS, SEM, acc, count, cta, wg, wt):
        """The head of a tile adds the `count` other shares in order of k."""
        T.call_extern(
            "handle",
            "tz_await",
            T.access_ptr(SEM[cta - 1, part(wg)], "rw", 1),
            count,
            -flags,
            wg + 1,
        )
        if spare < 16:
            add_in_place(WS, acc, count, cta, wg, wt)
        else:
            add_together(WS, acc, count, cta, wg, wt)

    parts = row_blocks * vectors // 2  # of 16 tokens: what a slice is made of
    others = 3  # shares whose loads are in flight together
    ahead = max(min((spare + 24) // (4 * others), 8, total), 1)  # vectors of each; a tile's end needs no operands

    def word(SEM, x, cta, wg, wt):
        return T.access_ptr(SEM[cta + x.share[0], wg * 4 + wt // 32], "rw", 1)

    @T.macro
    def write(WS, acc, units, cta, wg, wt):
        for i in T.unroll(total):
            T.call_extern(
                "handle",
                "tz_give",
                T.access_ptr(WS[cta, wg * row_blocks, 0, wt, 0], "w", 4),
                i * 2048,
                T.access_ptr(acc[i * 4], "r", 4),
                units,
                i // 2,
            )

    @T.macro
    def give(WS, SEM, acc, x, among, cta, grid, wg, wt):
        """All but this CTA's slice of its sums goes to the others. `x.rounds`: the slices that this warp adds, one if
        the others came in time; x.todo has their bits."""
        x.among[0] = among
        x.share[0] = T.truncmod(grid - 1 - cta, among)
        x.units[0] = T.call_extern("int32", "tz_slice", x.share[0], x.among[0], parts)
        write(WS, acc, ~x.units[0], cta, wg, wt)
        x.met[0] = T.call_extern("int32", "tz_meet", word(SEM, x, cta, wg, wt), x.among[0])
        if x.met[0] == 0:  # the others do not run yet
            write(WS, acc, x.units[0], cta, wg, wt)
            x.met[0] = T.call_extern("int32", "tz_withdraw", word(SEM, x, cta, wg, wt), x.among[0], x.share[0])
        x.todo[0] = T.if_then_else(x.met[0] > 0, T.int32(1) << x.share[0] | x.met[0] >> 1, 0)
        x.rounds[0] = T.call_extern("int32", "__popc", x.todo[0])

    @T.macro
    def load_part(WS, out, at, i, units, other, x, cta, wg, wt):
        T.call_extern(
            "handle",
            "tz_load_part",
            T.access_ptr(out[at], "rw", 4),
            T.access_ptr(WS[cta, wg * row_blocks, 0, wt, 0], "r", 4),
            (x.share[0] - other) * (WS.shape[1] * (vectors * 512)),
            i * 2048,
            units,
            i // 2,
        )

    @T.macro
    def take(WS, acc, x, c, cta, wg, wt):
        """The next slice of x.todo: its own CTA's part, and the others in order of k."""
        coming = T.alloc_local((ahead * others * 4,), dtype)
        wanted = T.alloc_local((others,), "int32")
        T.call_extern("handle", "tz_opaque", T.access_ptr(c.first[0], "rw", 1))  # addresses of y wait for their turn
        which = T.alloc_local((others,), "int32")
        x.at[0] = T.call_extern("int32", "__ffs", x.todo[0]) - 1
        x.todo[0] = x.todo[0] & (x.todo[0] - 1)
        x.units[0] = T.call_extern("int32", "tz_slice", x.at[0], x.among[0], parts)
        if x.at[0] != x.share[0]:
            for i in T.unroll(total):
                if T.call_extern("int32", "tz_has", x.units[0], i // 2) > 0:
                    load_part(WS, acc, i * 4, i, x.units[0], x.at[0], x, cta, wg, wt)
        for b in T.serial(T.truncdiv(x.among[0] + others - 2, others)):
            for j in T.unroll(others):  # zeros from those past the last
                wanted[j] = T.if_then_else(b * others + j < x.among[0] - 1, x.units[0], 0)
                which[j] = b * others + j + T.if_then_else(b * others + j >= x.at[0], 1, 0)
            for i in T.unroll(total + ahead - 1):
                if i < total:
                    for j in T.unroll(others):
                        at = (i % ahead * others + j) * 4
                        load_part(WS, coming, at, i, wanted[j], which[j], x, cta, wg, wt)
                if i >= ahead - 1:
                    for j in T.unroll(others):
                        for e in T.unroll(4):
                            acc[(i - ahead + 1) * 4 + e] = (
                                acc[(i - ahead + 1) * 4 + e] + coming[((i - ahead + 1) % ahead * others + j) * 4 + e]
                            )

    @T.macro
    def close(SEM, x, cta, wg, wt):
        """This warp is done with the word of its tile; the last one clears it, for the next launch."""
        T.call_extern("handle", "tz_depart", word(SEM, x, cta, wg, wt), x.among[0])

    return SimpleNamespace(leave_share=leave_share, add_shares=add_shares, give=give, take=take, close=close)
