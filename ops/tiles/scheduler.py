"""Macros of persistent tile programs: which share of which tile comes next, and the ring that feeds it.

Work partition (schedules/stream_k.py): the first `sk` tiles are cut along k into equal shares, one for each CTA, the
others are whole tiles in waves. The whole tiles come first: CTAs then walk along k side by side, and what one has read
another finds in L2, while shares begin anywhere along k and would part them for good. Then a CTA leaves its sum of a
tile that another one began, and adds the shares of the tile that it begins (ops/tiles/shares.py). A share is awaited
only from CTAs with a lower index, which the hardware has started earlier.

Each function returns macros for one program; all of their state lives in one-element local buffers.
"""

from dataclasses import dataclass

from terrazzo.ops.tiles.calls import arrive, call, place, quotient, syncwarp
from terrazzo.ops.tiles.calls import wait as wait_at
from terrazzo.ops.tiles.language import T
from terrazzo.ops.tiles.types import Buffers, Call, Macro, scalars
from terrazzo.schedules.partition import MOST_SHARED
from terrazzo.schedules.tile_costs import MOST_SLICES


def plan_state() -> Buffers:
    """What `plan` writes: k units [first, last) of shared tiles, each `length` long, of which the first `head` cost no
    work; segments that are whole tiles, all segments; `among`, the CTAs that part each tile, or 0."""
    return scalars("first", "last", "length", "head", "whole", "all", "among")


def segment_state() -> Buffers:
    """What `segment` writes: tile, k units [k0, k1), token block, row tile, whether it `leaves` its sum to the tile's
    head or `adds` other shares; `length` of the plan, and `count`, a scratch value. What `locate` adds: the block's
    tokens [first, end) as rows of x, and its expert."""
    names = ("tile", "k0", "k1", "tokens", "rows", "leaves", "adds", "length", "count", "first", "end", "expert")
    return scalars(*names)


def table_state() -> Buffers:
    """What `partition` of an expert table writes: token blocks, shared tiles, CTAs that take part."""
    return scalars("blocks", "shared", "grid", "tiles", "rest")


def ring_state() -> Buffers:
    """Stage and parity of a ring, and the stage before; where its barriers lie, for a consumer."""
    places = dict.fromkeys(("full", "empty"), (1, "uint32"))
    return Buffers(**places, **dict.fromkeys(("stage", "parity", "before"), (1, "int32")))


@dataclass(frozen=True)
class Tiles:
    """Macros of `partition_macros`."""

    plan: Macro
    segment: Macro
    each_unit: Macro
    later_shares: Macro


def partition_macros(
    *, units: int, row_tiles: int, raster: int, head_units: int = 0, exchange: bool = False, cluster: int = 1
) -> Tiles:
    """For tiles of `units` k units, `row_tiles` of them along
    the rows.

    Groups of `raster` token blocks walk over the rows together, so that both operands stay in L2. `head_units`: where
    whole tiles are left besides the shared ones, a head gets so many k units less for each other share that it adds up
    (a share may then be empty: k0 = k1). `exchange`: where all tiles are shared, by as many CTAs each, at most
    MOST_SLICES and a unit of k for each, nobody leaves or adds a share; all of them part the sum. In clusters of
    several CTAs these must be the `cluster` CTAs of each tile.
    """
    known = isinstance(units, int)
    most_slices = min(MOST_SLICES, units) if known else T.min(MOST_SLICES, units)

    @T.macro
    def plan(p, cta, grid, sk, mt):
        """Shared iterations [first, last), shared segments and all segments of CTA `cta` of `grid`."""
        r = grid - 1 - cta  # high shares on low CTAs: a share is only awaited from a CTA that started earlier
        p.head[0] = 0
        if head_units:
            if T.And(sk > 0, sk < mt * row_tiles):
                p.head[0] = T.min(quotient(grid + sk - 1, sk) * head_units, units // 4)
        p.among[0] = 0
        if exchange:
            if T.And(sk > 0, sk == mt * row_tiles):  # and a unit of k for each share
                p.among[0] = quotient(grid, sk)
                if cluster > 1:
                    if T.Or(p.among[0] * sk != grid, p.among[0] != cluster):
                        p.among[0] = 0
                else:
                    if T.Or(T.Or(p.among[0] * sk != grid, p.among[0] < 2), p.among[0] > most_slices):
                        p.among[0] = 0
        p.length[0] = units + p.head[0]
        p.first[0] = quotient(r * (sk * p.length[0]), grid)
        p.last[0] = quotient((r + 1) * (sk * p.length[0]), grid)
        p.whole[0] = T.if_then_else(cta < grid, quotient(mt * row_tiles - sk + cta, grid), 0)
        p.all[0] = p.whole[0]
        if T.And(cta < grid, p.last[0] > p.first[0]):
            p.all[0] = p.all[0] + quotient(p.last[0] - 1, p.length[0]) - quotient(p.first[0], p.length[0]) + 1

    @T.macro
    def segment(p, c, seg, cta, grid, sk, mt):
        """Tile, k units [k0, k1), token block and row tile of the CTA's segment `seg`: whole tiles, the share that it
        leaves to another CTA, the head that it adds shares to."""
        c.length[0] = p.length[0]
        c.leaves[0] = 0
        c.adds[0] = 0
        if seg >= p.whole[0]:
            c.tile[0] = quotient(p.first[0], p.length[0]) + seg - p.whole[0]
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
            c.tile[0] = sk + grid - 1 - cta + seg * grid
            c.k0[0] = 0
            c.k1[0] = T.min(c.tile[0] + units, units)  # = units: a trip count that nvcc knows is unrolled, if small
        if known:
            c.tokens[0] = T.truncdiv(c.tile[0], raster * row_tiles) * raster
            c.rows[0] = T.truncmod(c.tile[0], raster * row_tiles)
        else:
            c.tokens[0] = quotient(c.tile[0], raster * row_tiles)
            c.rows[0] = c.tile[0] - c.tokens[0] * (raster * row_tiles)
            c.tokens[0] = c.tokens[0] * raster
        c.count[0] = T.min(mt - c.tokens[0], raster)
        c.tokens[0] = c.tokens[0] + c.rows[0]
        c.rows[0] = quotient(c.rows[0], c.count[0])
        c.tokens[0] = c.tokens[0] - c.rows[0] * c.count[0]

    @T.macro
    def each_unit(fill, io, locate, p, c, cta, grid, sk, mt):
        """What a producer does: macro `fill(io, c, kb)` for every k unit of the CTA's segments, in their order. Macro
        `locate(io, c)`, or None, comes first in each segment; `io` holds what both of them need."""
        for seg in T.serial(p.all[0]):
            segment(p, c, seg, cta, grid, sk, mt)
            if locate is not None:
                locate(io, c)
            for kb in T.unroll(c.k0[0], c.k1[0], unroll_factor=1):
                fill(io, c, kb)

    @T.macro
    def later_shares(c, cta, grid, sk):
        """c.count: the other shares of the tile whose head CTA `cta` holds; those of the CTAs right below."""
        c.count[0] = quotient((c.tile[0] + 1) * c.length[0] * grid - 1, sk * c.length[0]) - (grid - 1 - cta)

    return Tiles(plan, segment, each_unit, later_shares)


def table_words(experts: int) -> int:
    """int32 of an expert table, padded so that what follows it in shared memory starts a line of 128 bytes."""
    return -(-2 * (experts + 1) // 32) * 32


@dataclass(frozen=True)
class Tokens:
    """Macros of `expert_macros`; `partition` is `tabulate` and `share`."""

    partition: Macro
    tabulate: Macro
    share: Macro
    locate: Macro


def expert_macros(*, experts: int, block_tokens: int, units: int, row_tiles: int) -> Tokens:
    """Of programs whose tokens are sorted by
    expert, each with a matrix of its own.

    A token block belongs to one expert; blocks are counted through all of them, so that a persistent loop walks over
    (expert, tile) pairs without a drain between experts, and empty experts cost nothing. The table Es is int32
    [table_words(experts)] in shared memory. `experts` = 0: one matrix, no table.
    """

    @T.macro
    def tabulate(Es, offsets, m):
        """The table. A block barrier inside."""
        call(
            f"expert_table<{experts}>", T.access_ptr(Es[0], "w", 2 * (experts + 1)),
            T.access_ptr(offsets[0], "r", experts + 1), m, block_tokens,
        )  # fmt: skip
        T.sync_threads()

    @T.macro
    def share(Es, e, grid):
        """Which tiles are shared: schedules/partition.py on the device."""
        e.blocks[0] = Es[experts]
        e.tiles[0] = e.blocks[0] * row_tiles
        e.rest[0] = T.truncmod(e.tiles[0], grid)
        e.grid[0] = grid
        e.shared[0] = 0
        thin = (e.tiles[0] - e.rest[0] + grid) * 50 >= e.tiles[0] * 53
        if T.And(T.And(e.rest[0] > 0, 2 * grid * units <= MOST_SHARED), thin):
            if e.tiles[0] < grid:
                e.shared[0] = e.tiles[0]
                e.grid[0] = T.truncdiv(e.tiles[0] * units + grid - 1, grid)  # k units of the busiest CTA
                e.grid[0] = T.truncdiv(e.tiles[0] * units + e.grid[0] - 1, e.grid[0])
            else:
                e.shared[0] = e.rest[0] + T.if_then_else(e.rest[0] * 2 > grid, 0, grid)

    @T.macro
    def partition(Es, e, offsets, m, grid):
        """The table, and which tiles are shared."""
        tabulate(Es, offsets, m)
        share(Es, e, grid)

    @T.macro
    def locate(Es, c, m):
        """The expert and the tokens, rows [first, end) of x, of segment c."""
        if experts:
            c.expert[0] = call(
                f"expert_of<{experts}>", T.access_ptr(Es[0], "r", experts + 1), c.tokens[0], returns="int32"
            )
            c.first[0] = Es[experts + 1 + c.expert[0]] + (c.tokens[0] - Es[c.expert[0]]) * block_tokens
            c.end[0] = Es[experts + 2 + c.expert[0]]
        else:
            c.expert[0] = 0
            c.first[0] = c.tokens[0] * block_tokens
            c.end[0] = m

    return Tokens(partition, tabulate, share, locate)


@dataclass(frozen=True)
class Ring:
    """Macros of `ring_macros`; `acquire` is a producer's wait for a stage, `wait` a consumer's."""

    reset: Macro
    acquire: Macro
    find: Macro
    wait: Macro
    advance: Macro
    release: Macro
    give_back: Macro
    consume: Macro


@dataclass(frozen=True)
class Turn:
    """A consumer's unit of k: of its stage h the number `stage(h)` and `wait(h)`, `advance()` behind its last use,
    `release(h, condition)` of the stage before, and `give_back(h, condition)` of its own."""

    stage: Call
    wait: Call
    advance: Call
    release: Call
    give_back: Call


def ring_macros(*, stages: int, each: int = 1, rounds: bool = True) -> Ring:
    """A ring of shared-memory stages. `full` and `empty` are its mbarriers, one of each for a
    stage; a consumer, whose loop is short of instructions, finds them once. `each`: stages of a unit
    of k. `rounds`: `consume` unrolls those of the ring, which takes registers."""
    turns = 2 if stages % each else 1  # of the ring, until a unit begins with the first stage again
    unrolled = turns * stages // each

    @T.macro
    def reset(ring):
        """To the first stage."""
        ring.stage[0] = 0
        ring.parity[0] = 0
        ring.before[0] = 0

    @T.macro
    def acquire(empty, ring):
        """The stage may be written: whoever read it has given it back."""
        T.barrier_wait(empty[ring.stage[0]], ring.parity[0] ^ 1)

    @T.macro
    def advance(ring):
        """To the next stage."""
        ring.before[0] = ring.stage[0]
        ring.stage[0] = ring.stage[0] + 1
        if ring.stage[0] == stages:
            ring.stage[0] = 0
            ring.parity[0] = ring.parity[0] ^ 1

    @T.macro
    def find(full, empty, ring, first):
        """Where the barriers lie; `first`: of the ring's stages, among those of a buffer. empty: None without a
        producer that waits for them."""
        ring.full[0] = place(full[first], "rw")
        if empty is not None:
            ring.empty[0] = place(empty[first], "rw")

    def wait_for(ring, stage, parity):
        return wait_at(ring.full[0] + T.cast(stage, "uint32") * T.uint32(8), parity)

    @T.macro
    def wait(ring):
        """The loads that follow see the stage."""
        wait_for(ring, ring.stage[0], ring.parity[0])

    @T.macro
    def give_back(ring, stage):
        """A stage goes back to the producer, on behalf of the warp."""
        arrive(ring.empty[0] + T.cast(stage, "uint32") * T.uint32(8))

    @T.macro
    def release(ring, condition):
        """The stage before is given back."""
        syncwarp()  # the other lanes' reads come before the arrive, too
        if condition:
            give_back(ring, ring.before[0])

    @T.macro
    def release_now(ring, stage, condition):
        """The warp gives this stage back."""
        syncwarp()
        if condition:
            give_back(ring, stage)

    @T.macro
    def release_before(ring, stage, condition):
        """`release`, where the compiler knows the stage."""
        syncwarp()
        if condition:
            give_back(ring, (stage + stages - 1) % stages)

    def moving(ring):
        """A unit that begins with the ring's stage, wherever that is."""
        return Turn(
            lambda h: ring.stage[0], lambda h: wait(ring), lambda: advance(ring),
            lambda h, condition: release(ring, condition),
            lambda h, condition: release_now(ring, ring.stage[0], condition),
        )  # fmt: skip

    def fixed(ring, first):
        """A unit that begins `first` stages after the ring's first one, where a round began."""
        return Turn(
            lambda h: (first + h) % stages,
            lambda h: wait_for(ring, (first + h) % stages, ring.parity[0] ^ ((first + h) // stages)),
            lambda: None,
            lambda h, condition: release_before(ring, first + h, condition),
            lambda h, condition: release_now(ring, (first + h) % stages, condition),
        )

    def units_to_first(stage):
        """Units of k until one begins with the first stage."""
        if turns == 1:
            return T.truncmod(stages - stage, stages) // each
        return T.if_then_else(stage % 2 == 1, (stages - stage) // 2, T.truncmod(stages - stage // 2, stages))

    @T.macro
    def consume(unit, drain, io, ring, count):
        """What a consumer does: macro `unit(io, at, follows)` for each of `count` units of k, and `drain(io)`, which
        completes its products. `at`: a `Turn`; `follows`: whether a unit came before.

        A seventh of a unit's instructions are addresses and barriers, which cost next to nothing where the compiler
        knows the stages: rounds of the ring are unrolled, between the units that lead to the first stage of one and
        those that are left. ptxas serializes products that are under way from one loop to another: hence `drain`.
        """
        if not rounds:
            for i in T.serial(count):
                unit(io, moving(ring), i > 0)
        else:
            ring.before[0] = -1  # none of this count
            left = T.alloc_local((1,), "int32")
            left[0] = count - T.min(units_to_first(ring.stage[0]), count)
            for _ in T.serial(count - left[0]):
                unit(io, moving(ring), ring.before[0] >= 0)
            drain(io)
            for _ in T.serial(T.truncdiv(left[0], unrolled)):
                for j in T.unroll(unrolled):
                    unit(io, fixed(ring, j * each), T.Or(j > 0, ring.before[0] >= 0))
                ring.parity[0] = ring.parity[0] ^ (turns & 1)
                ring.before[0] = stages - 1
            drain(io)
            for _ in T.serial(T.truncmod(left[0], unrolled)):
                unit(io, moving(ring), ring.before[0] >= 0)

    return Ring(reset, acquire, find, wait, advance, release, give_back, consume)
