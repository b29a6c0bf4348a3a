"""Tile program of decode attention for many query rows: split-KV over packed tiles on wgmma (sm_90a).

What decode_program does for 8 and 16 rows with warps, this one does with warpgroups for 16 to 64: each owns a private
ring of stages of 64 tokens, its tokens, and its (m, l, O^T), and all rows of a kv head share each conversion. Products
of keys and of values are asynchronous; what one warpgroup waits for, the others hide (warpgroup_macros.py).

Why: mma.sync m16n8k16 keeps the scheduler of its warp for 6 cycles (H200), 12 for 16 rows, a wgmma of as many values
for about one. With 16 rows of int2 that is more than the bytes of a tile take.
"""

from typing import NamedTuple

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.attention.cache.layout import CacheLayout
from terrazzo.ops.attention.decoding.decode_arguments import (
    PASS_CONFIGS,
    Decode,
    Tensors,
    arguments,
    check_cache,
    check_cluster,
    grid_of,
    make_rows_macros,
    program,
    query_at,
    stage_words,
    work_of,
)
from terrazzo.ops.attention.decoding.decode_codes import make_code_macro, prelude
from terrazzo.ops.attention.decoding.decode_codes import state as code_state
from terrazzo.ops.attention.decoding.decode_merge import (
    BATCH,
    inbox_words,
    make_merge_macros,
    merge_words,
    pitch_of,
    words_of,
)
from terrazzo.ops.attention.decoding.decode_merge import state as merge_state
from terrazzo.ops.attention.device.calls import at_page, read128, store_words
from terrazzo.ops.attention.device.decode_copies import Copies, Stages, make_copy_macros, peek
from terrazzo.ops.attention.device.rotation_macros import Rotation, make_rotation, row_stages
from terrazzo.ops.attention.device.tile_macros import Arithmetic, each, less, smaller
from terrazzo.ops.attention.device.warpgroup_macros import (
    TILES,
    TOKENS,
    Exchange,
    Warpgroup,
    exchange_words,
    make_warpgroup_macros,
)
from terrazzo.ops.tiles.calls import pack2, place, unpack, wait
from terrazzo.ops.tiles.language import T
from terrazzo.ops.tiles.types import Buffers, Macro, PrimFunc

OWN_INTEGERS = ("atom", "values", "member", "turn", "bars")

__all__ = ["PASS_CONFIGS", "build", "shared_words"]


def query_copies(layout: CacheLayout, warpgroups: int, residual: int) -> int:
    """How often Q lies in shared memory: for the packed keys, times each warpgroup's scales of a channel group, and as
    it is for the residual block."""
    return 1 + (warpgroups if layout.k.group else 0) + (1 if residual else 0)


def shared_words(layout: CacheLayout, row_tiles: int, warpgroups: int, stages: int, cluster: int, residual: int) -> int:
    """int32 words of shared memory: the rings, which the merges reuse, Q, and the warpgroups' exchanges."""
    merges = merge_words(layout.head_dim, row_tiles, warpgroups) + inbox_words(layout.head_dim, row_tiles, cluster)
    rings = max(warpgroups * stages * stage_words(layout, TILES), merges)
    queries = query_copies(layout, warpgroups, residual) * 4 * row_tiles * layout.head_dim
    return rings + queries + warpgroups * exchange_words(row_tiles)


def _check(p: Decode, target) -> None:
    """Raise ArgumentError for arguments of `build` that do not fit one another."""
    group, row_tiles, parts = p.layout.k.group, p.row_tiles, p.parts
    if p.warps % 4 or row_tiles % 2 or not 2 <= row_tiles <= 8:
        raise ArgumentError("warps", (p.warps, row_tiles), "whole warpgroups, 2, 4, 6 or 8 row tiles", "use 16 and 2")
    if not target.supports("wgmma.f16"):
        raise ArgumentError("target", target.arch, "must be sm_90a: wgmma", "use the program of single warps")
    if group and p.residual != group:
        raise ArgumentError("residual", p.residual, f"must be the group {group}", "change it")
    if parts > 1 and (not group or group % (TOKENS * parts)):
        raise ArgumentError("parts", parts, f"warpgroups take whole stages of {TOKENS} tokens of a group", "use 1")
    check_cache(p, TOKENS, "use single warps")
    check_cluster(p.cluster, BATCH, f"{target.arch} has clusters of 1..16 CTAs")


class Places(NamedTuple):
    """Words of shared memory in all, and where the warpgroups' exchanges and Q begin; macros that rotate rows and turn
    rows of sums back, or None."""

    of: Decode
    total: int
    exchanges: int
    queries: int
    rotation: Rotation | None
    back: Rotation | None

    @property
    def wgs(self) -> int:
        return self.of.warps // 4

    @property
    def of_q(self) -> int:
        """Words of Q."""
        return 4 * self.of.row_tiles * self.of.head_dim

    @property
    def scaled(self) -> int:
        """Where Q times the first warpgroup's scales begins."""
        return self.queries + self.of_q

    @property
    def plainly(self) -> int:
        """Where Q as it is begins."""
        return self.exchanges - self.of_q

    @property
    def turns(self) -> int:
        """Pieces of Q that a thread fetches."""
        return -(-self.of.cols * (self.of.head_dim // 8) // self.of.threads)


def places_of(p: Decode) -> Places:
    layout, D, nt, wgs = p.layout, p.head_dim, p.row_tiles, p.warps // 4
    total = shared_words(layout, nt, wgs, p.stages, p.cluster, p.residual)
    exchanges, of_row = total - wgs * exchange_words(nt), D // 32
    return Places(
        p, total, exchanges, exchanges - query_copies(layout, wgs, p.residual) * 4 * nt * D,
        make_rotation(D, 8, row_stages(D)) if layout.k.rotation else None,
        make_rotation(D, of_row, row_stages(D, of_row)) if layout.v.rotation else None,
    )  # fmt: skip


def _make_row_macros(f: Places, tile: Arithmetic) -> tuple[Macro, Macro, Macro]:
    """Macros `ends`, `ask_rows` and `place_rows`: rows of Q, from memory to shared memory."""
    p, layout, turns, rotation, queries, plainly = f.of, f.of.layout, f.turns, f.rotation, f.queries, f.plainly
    nt, cols, threads, chunks, residual = p.row_tiles, p.cols, p.threads, p.head_dim // 8, p.residual
    bf16, k_static = p.dtype == "bfloat16", layout.k.static
    q_bf16 = bf16 and rotation is None  # rotated rows are f16

    def piece(v, tx):
        """(row of the CTA, 16-byte piece of it) of Q that a thread fetches in turn v."""
        return (v * threads + tx) // chunks, (v * threads + tx) % chunks

    def core(row, chunk):
        """Word of an operand in shared memory where a piece of a row lies."""
        return ((chunk * nt + row // 8) * 8 + row % 8) * 4

    @T.macro
    def ends(st, w):
        """Where what each row of a lane sees ends; made anew where it is asked for, which spares registers."""
        for t in each(nt):
            for j in each(2):
                w.query[0] = T.truncdiv(w.y[0] * cols + t * 8 + w.lane[0] % 4 * 2 + j, w.group[0])
                st.hi[t * 2 + j] = w.length[0] + 1 - w.q_len + smaller(w.query[0], w.q_len - 1)

    @T.macro
    def ask_rows(Q, st, w, tx):
        """The rows on their way to registers, ahead of the first copies; rows that do not exist are zeros."""
        for v in each(turns):
            for i in each(4):
                st.rows[v * 4 + i] = T.uint32(0)
            w.query[0] = w.y[0] * cols + piece(v, tx)[0]
            if T.And(less(piece(v, tx)[0], cols), less(w.query[0], w.rows[0])):
                w.head[0] = T.truncdiv(w.query[0], w.group[0])
                read128(
                    st.rows[v * 4],
                    Q[
                        w.q_of, query_at(w, w.head[0]),
                        w.h[0] * w.group[0] + w.query[0] - w.head[0] * w.group[0], piece(v, tx)[1] * 8,
                    ],
                )  # fmt: skip

    @T.macro
    def place_rows(ring, SK, st, w, tx):
        """Q in the dtype of the keys' operand to shared memory, as the packed keys want it, and as it is."""
        for v in each(turns):
            if less(piece(v, tx)[0], cols):  # all lanes of a warp, or none
                if rotation is not None:
                    rotation.from_words(st.rotated, st.rows, lambda i, v=v: v * 4 + i, bf16)
                    rotation.turn(st, st.rotated, w.lane[0])
                    rotation.to_words(st.rotated, st.rows, lambda i, v=v: v * 4 + i, False)
                if residual:
                    if q_bf16:
                        for i in each(4):
                            st.w[i] = pack2(
                                unpack(0, st.rows[v * 4 + i], bf16=True), unpack(1, st.rows[v * 4 + i], bf16=True),
                                bf16=False,
                            )  # fmt: skip
                    else:
                        for i in each(4):
                            st.w[i] = st.rows[v * 4 + i]
                    store_words(4, ring[plainly + core(piece(v, tx)[0], piece(v, tx)[1])], st.w)
                for i in each(4):
                    if tile.layout.k.bf16 != q_bf16 or k_static or tile.k_shift != (0, 0):
                        for e in each(2):
                            st.f[e] = unpack(e, st.rows[v * 4 + i], bf16=q_bf16) * T.if_then_else(
                                piece(v, tx)[1] % 2 == 0,
                                T.float32(2.0 ** tile.k_shift[0]),
                                T.float32(2.0 ** tile.k_shift[1]),
                            )
                            if k_static:
                                st.f[e] = st.f[e] * T.reinterpret(
                                    T.call_extern(
                                        "uint32", "tz_read32",
                                        T.access_ptr(SK[w.h[0], piece(v, tx)[1] * 8 + i * 2 + e], "r", 1),
                                    ),
                                    "float32",
                                )  # fmt: skip
                        st.w[i] = pack2(st.f[0], st.f[1], bf16=tile.layout.k.bf16)
                    else:
                        st.w[i] = st.rows[v * 4 + i]
                store_words(4, ring[queries + core(piece(v, tx)[0], piece(v, tx)[1])], st.w)
        T.fence_proxy_async()
        T.sync_threads()

    return ends, ask_rows, place_rows


def _make_spare_macros(f: Places, tile: Warpgroup, spare: Warpgroup | None, ends: Macro) -> tuple[Macro, Macro]:
    """Macros `take_ring` and `take_residual`: the tokens that lie in f16."""
    plain, wgs, plainly, sink_tokens = f.of.plain, f.wgs, f.plainly, f.of.sink_tokens
    spare_tiles = f.of.residual // 16 + 1  # one more than a block: new tokens never overwrite those to be packed

    def spare_tile(RES, w):
        """Addresses of the tiles of residual ring w.source from number w.now on; -1: of the first tokens alone."""

        def number(r):
            inside = (w.now[0] + r) % spare_tiles
            return (
                T.call_extern("int32", "tz_select", less(w.now[0], 0), spare_tiles, inside) if sink_tokens else inside
            )

        return lambda r: at_page(RES, w.source[0], w.h[0] * RES.shape[2] + number(r) * plain.tile_words)

    @T.macro
    def take_ring(RES, SLOT, x, st, w):
        """The f16 tokens behind the packed ones, and those ahead of them."""
        spare.find_values(w)
        w.source[0] = peek(SLOT, w.b)
        first = T.call_extern("int32", "tz_select", less(0, w.packed[0]), 1, 0) if sink_tokens else 0
        w.steps[0] = T.ceildiv(w.length[0] - w.packed[0], TOKENS) + first
        for i in T.serial(T.ceildiv(w.steps[0], wgs * w.splits)):
            j = (i * wgs + w.warp[0]) * w.splits + w.split
            if less(j, w.steps[0]):
                w.token[0] = w.packed[0] + (j - first) * TOKENS
                w.now[0] = w.token[0] // 16
                w.end[0] = w.length[0]
                if sink_tokens:
                    if less(j, first):
                        w.token[0] = 0
                        w.now[0] = -1
                        w.end[0] = sink_tokens
                spare.step(spare_tile(RES, w), plainly // 4, x, st, w.token[0], w.end[0], True, ends, w)
        spare.flush(x, st, w)
        tile.adopt(st)

    @T.macro
    def take_residual(RES, SLOT, x, st, w):
        """The f16 tokens of a channel group that is not full yet."""
        spare.find_values(w)
        w.source[0] = peek(SLOT, w.b)
        for i in T.serial(T.ceildiv(w.length[0] - w.packed[0], TOKENS * wgs * w.splits)):
            j = (i * wgs + w.warp[0]) * w.splits + w.split
            if less(w.packed[0] + j * TOKENS, w.length[0]):
                w.now[0] = w.packed[0] // 16 + j * TILES
                spare.step(
                    spare_tile(RES, w), plainly // 4, x, st, w.packed[0] + j * TOKENS, w.length[0], True, ends, w,
                )  # fmt: skip
        spare.flush(x, st, w)
        tile.adopt(st)

    return take_ring, take_residual


def _make_sums_macro(f: Places, tile: Warpgroup) -> Macro:
    """Macro `stage_sums`: what a warpgroup has summed up, to shared memory."""
    p, layout, D, wgs, back, of_row = f.of, f.of.layout, f.of.head_dim, f.wgs, f.back, f.of.head_dim // 32
    nt, cols, warps, cluster, words = p.row_tiles, p.cols, p.warps, p.cluster, words_of(p)
    v_static, v_factor, v_token = layout.v.static, tile.of.v_factor, tile.of.layout.v.token_wise

    @T.macro
    def turn_back(ring, st, w, tx):
        """Rows of sums of rotated values, rotated back where they lie, a warp each."""
        for e in each(-(-wgs * cols // warps)):
            row = e * warps + tx // 32
            at = row // cols * words + row % cols * pitch_of(D) + w.lane[0] * of_row
            if less(row, wgs * cols):
                for i in each(of_row):
                    st.turns[i] = T.reinterpret(ring[at + i], "float32")
                back.turn(st, st.turns, w.lane[0])
                back.scaled(st.turns)
                for i in each(of_row):
                    ring[at + i] = T.reinterpret(st.turns[i], "int32")
        T.sync_threads()

    @T.macro
    def stage_sums(SV, x, st, w, tx):
        """The warpgroup's sums to shared memory, true scale, rows [row][dim] | m | l."""
        tile.totals(x, st, w)
        ring = x.ring
        T.sync_threads()  # every warpgroup is done with its ring
        if cluster > 1:
            if less(tx, 32):
                T.cluster_arrive()  # a release, for all threads that met before it: one warp waits for its fence
            else:
                T.cluster_arrive_relaxed()
        for t in each(nt):
            for j in each(2):
                row = t * 8 + w.lane[0] % 4 * 2 + j
                at = w.warp[0] * words + row * pitch_of(D) + w.lane[0] // 4 + w.atom[0] * 16
                for a in each(D // 64):
                    for half in each(2):
                        st.f[0] = st.o[(a * nt + t) * 4 + half * 2 + j] * T.float32(v_factor[half])
                        if v_token:
                            st.f[0] = st.f[0] + st.z[t * 2 + j]
                        if layout.v.bias:
                            st.f[0] = st.f[0] + st.l[t * 2 + j] * T.float32(layout.v.bias)
                        if v_static:
                            st.f[0] = st.f[0] * T.reinterpret(
                                T.call_extern(
                                    "uint32", "tz_read32",
                                    T.access_ptr(SV[w.h[0], (w.atom[0] + a) * 16 + half * 8 + w.lane[0] // 4], "r", 1),
                                ),
                                "float32",
                            )  # fmt: skip
                        ring[at + a * 16 + half * 8] = T.reinterpret(st.f[0], "int32")
                if T.And(less(w.lane[0], 4), less(w.quarter, 1)):
                    facts = w.warp[0] * words + cols * pitch_of(D) + row
                    ring[facts] = T.reinterpret(st.m[t * 2 + j], "int32")
                    ring[facts + cols] = T.reinterpret(st.l[t * 2 + j], "int32")
        T.sync_threads()
        if back is not None:
            turn_back(ring, st, w, tx)

    return stage_sums


def _make_loop_macros(f: Places, tile: Warpgroup, copies: Copies, ends: Macro) -> tuple[Macro, Macro]:
    """Macros `load` and `attend` of the main loop."""
    p, layout, queries, scaled, of_q, group = f.of, f.of.layout, f.queries, f.scaled, f.of_q, f.of.layout.k.group
    stages, stage, sliding, sink_tokens = p.stages, p.stage, p.sliding, p.sink_tokens

    def packed_tile(ring, at):
        """Addresses of the tiles of a stage at word `at`."""
        return lambda r: T.access_ptr(ring[at + layout.channel_words + r * layout.tile_words], "r", layout.tile_words)

    def outside(w, token, begins):
        """Whether tokens of the step may lie outside of a row's limits, or are read from the ring."""
        end = smaller(w.least[0], w.packed[0]) if sliding else w.least[0]
        found = T.Or(less(end, token + TOKENS), less(token, begins))
        return T.Or(found, less(token, sink_tokens)) if sink_tokens else found

    @T.macro
    def load(KV, TABLE, ring, full, w, i):
        """Stage i is there, and another one on its way to the slot that was read last."""
        wait(w.bars[0] + w.read[0] * 8, w.parity[0])
        copies.refill(KV, TABLE, ring, full, w, i)

    @T.macro
    def attend(x, st, w, i):
        """Tiles of stage i: converted, multiplied with the rows, weighed; the values of the stage before summed up."""
        token = copies.token_of(w, i)
        at = (w.warp[0] * stages + w.read[0]) * stage
        if group:
            if i % copies.of.per_chunk == 0:  # the scales of a channel group are the rows'
                tile.scale_q(T.access_ptr(x.ring[at], "r", stage), x.q, queries, scaled + w.warp[0] * of_q, x, st, w)
        begins = T.call_extern("int32", "tz_select", less(0, w.window), w.length[0] - w.window, sink_tokens)
        tile.step(
            packed_tile(x.ring, at), (scaled + w.warp[0] * of_q) // 4 if group else queries // 4, x, st,
            token, w.packed[0] if sliding else w.length[0],
            outside(w, token, begins), ends, w,
        )  # fmt: skip

    return load, attend


def _state(tile: Warpgroup, f: Places, t: Tensors) -> Buffers:
    """Registers of a thread."""
    st, more = tile.state(t.scale, t.cap, t.window), dict(rows=(f.turns * 4, "uint32"))
    more |= dict(turned=(1, "float32")) if f.rotation is not None or f.back is not None else {}
    more |= dict(rotated=(8, "float32")) if f.rotation is not None else {}
    more |= dict(turns=(f.of.head_dim // 32, "float32")) if f.back is not None else {}
    vars(st).update(vars(Buffers(**more)))
    return st


def build(target, **params: str | int | bool) -> PrimFunc:
    """The prim_func `main` for up to 8 * row_tiles rows in a CTA; arguments and shapes as of decode_program.build."""
    of = Decode(**params)
    _check(of, target)
    f, layout, nt, stages = places_of(of), of.layout, of.row_tiles, of.stages
    wgs, sliding, residual, cluster = f.wgs, of.sliding, of.residual, of.cluster
    source = prelude(
        of, "cp_async", "lds", "place", "pack", "bulk", "semaphore", "warpgroup", "prefetch", "stmatrix_trans"
    )
    tile = make_warpgroup_macros(Arithmetic(layout, nt, 1, of.softcap, inner=sliding), of.warps <= 8 and nt <= 6)
    spare = make_warpgroup_macros(Arithmetic(of.plain, nt, 1, of.softcap, inner=sliding)) if residual else None
    copies = make_copy_macros(Stages(layout, TILES, stages, wgs, of.parts, of.page, residual, True, of.ahead))
    ends, ask_rows, place_rows = _make_row_macros(f, tile.of)
    take_ring, take_residual = _make_spare_macros(f, tile, spare, ends)
    load, attend = _make_loop_macros(f, tile, copies, ends)
    types, sizes = arguments(of)
    codes = make_code_macro(target, sizes, of) if of.coded else None
    (_, merge), stage_sums = make_merge_macros(of, tile.of, wgs, codes), _make_sums_macro(f, tile)
    cluster_dims = dict(cluster_dims=(cluster, 1, 1)) if cluster > 1 else {}
    find_rows, find_own = make_rows_macros(of, sizes)

    @T.macro
    def body(t):
        with T.Kernel(*grid_of(of, sizes), threads=of.threads, prelude=source, **cluster_dims) as (split, hy, b):
            ring = T.alloc_shared((f.total,), "int32")
            full = T.alloc_barrier([1] * (wgs * stages))
            sent = T.alloc_barrier([1]) if cluster > 1 else None
            T.annotate_min_blocks_per_sm(of.min_blocks)
            tx = T.get_thread_binding()
            st = _state(tile, f, t)
            c = merge_state()
            coded = code_state() if of.coded else None
            q, p = T.alloc_wgmma_desc(), T.alloc_wgmma_desc()
            w = work_of(
                sizes, (*OWN_INTEGERS, *(("steps", "token", "end") if sliding else ())), t,
                b=b, hy=hy, split=split, splits=sizes.p * cluster, partials=sizes.p, part_row=b, part_base=0, sent=sent,
                quarter=tx // 32 % 4,
            )  # fmt: skip
            T.pdl_trigger()
            w.lane[0] = tx % 32
            w.member[0] = tx % 128  # the warpgroup's first warp fetches its stages
            w.warp[0] = tx // 128
            find_rows(w)
            w.bars[0] = T.cast(place(full[w.warp[0] * stages], "rw"), "int32")
            x = Exchange(ring, q, p, f.exchanges + w.warp[0] * exchange_words(nt))
            T.initialize_wgmma_descriptor(q, T.access_ptr(ring[0], "r"), 0, nt * 8, 8)
            T.initialize_wgmma_descriptor(p, T.access_ptr(ring[x.at], "r"), 0, nt * 8, 8)
            if of.ahead:
                copies.prefetch(t.KV, t.TABLE, t.LEN, w)
            T.pdl_sync()
            if of.ragged:
                find_own(t.CU, w)
            ask_rows(t.Q, st, w, tx)
            copies.start(t.KV, t.TABLE, t.LEN, ring, full, w)
            copies.confirm(t.KV, t.TABLE, ring, full, w)
            tile.clear(x, st, w)
            place_rows(ring, t.SK, st, w, tx)
            w.least[0] = w.length[0] + 1 - w.q_len + T.truncdiv(w.y[0] * of.cols, w.group[0])
            tile.place_values(w)
            if residual:
                if less(0 if of.sink_tokens else w.packed[0], w.length[0]):
                    if sliding:
                        take_ring(t.RES, t.SLOT, x, st, w)
                    else:
                        take_residual(t.RES, t.SLOT, x, st, w)
            tile.find_values(w)
            tile.sum_q(q, f.queries // 4, st)
            for i in T.serial(w.count[0]):
                load(t.KV, t.TABLE, ring, full, w, i)
                attend(x, st, w, i)
                copies.release(w)
            tile.flush(x, st, w)
            stage_sums(t.SV, x, st, w, tx)
            merge(t, ring, c, coded, w, tx)

    return program(body, types, of)
