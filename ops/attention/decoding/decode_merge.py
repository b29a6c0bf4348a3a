"""What follows a warp's tokens in decode attention: the merge of a CTA's warps, and that of a sequence's splits.

Sums are added in a fixed order, so that results have the same bits in every run: first the warps in theirs. Each CTA of
a cluster then sends the others their shares of the output, to where their rings were, and adds up its own in the order
of the CTAs, without a fence or a round trip. What several clusters, or CTAs without one, have for the same output is
added by the last of them to end: there each thread adds a share of the partial results for four head dimensions of a
row, all loaded at once, and the shares follow one another through shared memory.
"""

from terrazzo.ops.attention.decoding.decode_arguments import Decode, query_at
from terrazzo.ops.attention.device.rotation_macros import make_rotation, sum_stages
from terrazzo.ops.attention.device.tile_macros import LOWEST, Arithmetic, each, larger, less, smaller
from terrazzo.ops.tiles.language import T
from terrazzo.ops.tiles.types import Buffer, Buffers, Expr, Macro

BATCH = 16  # partial results that a thread loads at once, and most CTAs of a cluster
_AT_LEAST = 4  # of them, rather than none
_SHARE = 8  # words of a share's sums


def pitch_of(head_dim: int) -> int:
    """Words of a row of staged sums: the lanes of a quad store to different banks."""
    return head_dim + 4


def merge_words(head_dim: int, row_tiles: int, warps: int) -> int:
    """int32 words of shared memory for the sums of all warps, where the threads' shares of the splits lie later."""
    return warps * 8 * row_tiles * (pitch_of(head_dim) + 2)


def share(head_dim: int, row_tiles: int, cluster: int) -> int:
    """Most pieces of four head dimensions that a CTA of a cluster adds up."""
    return -(-2 * row_tiles * head_dim // cluster)


def inbox_words(head_dim: int, row_tiles: int, cluster: int) -> int:
    """int32 words of shared memory for what the CTAs of a cluster send: pieces, then m and l of each row."""
    return cluster * (4 * share(head_dim, row_tiles, cluster) + 16 * row_tiles) if cluster > 1 else 0


def _log2(n: int) -> int:
    """Rounded down."""
    return n.bit_length() - 1


def state() -> Buffers:
    """Registers of the merges."""
    one, ints = (1, "float32"), ("items", "first", "shift", "parts", "part", "per", "item", "k", "end", "head")
    return Buffers(
        m=one, l=one, f=one, top=one, o=(4, "float32"), x=(4 * BATCH, "float32"), lse=(2 * BATCH, "float32"),
        sum=(_AT_LEAST, "float32"), **dict.fromkeys(ints, (1, "int32")),
    )  # fmt: skip


def _read(buffer: Buffer, *at: Expr) -> Expr:
    """A float32 that the kernel ahead may have written."""
    return T.reinterpret(T.call_extern("uint32", "tz_read32", T.access_ptr(buffer[at], "r", 1)), "float32")


def _make_staging_macro(p: Decode, tile: Arithmetic) -> Macro:
    """Macro `stage_sums`: what a warp has summed up, to shared memory."""
    layout, D, nt, cols, slices, cluster = p.layout, p.head_dim, p.row_tiles, p.cols, p.head_dim // 16, p.cluster
    pitch, words, v_static = pitch_of(D), words_of(p), layout.v.static
    rotation = make_rotation(D, slices * nt * 4, sum_stages(D, nt)) if layout.v.rotation else None

    @T.macro
    def turn_back(st, w):
        """Sums of rotated values, at true scale, rotated back."""
        for a in each(slices):
            for t in each(nt):
                for half in each(2):
                    for j in each(2):
                        at = (a * nt + t) * 4 + half * 2 + j
                        st.o[at] = st.o[at] * T.float32(tile.v_factor[half])
                        if tile.layout.v.token_wise:
                            st.o[at] = st.o[at] + st.z[t * 2 + j]
        rotation.turn(st, st.o, w.lane[0])
        rotation.scaled(st.o)

    @T.macro
    def stage_sums(ring, SV, st, w):
        """The warp's sums to shared memory, true scale, rows [row][dim] | m | l."""
        for i in each(nt * 2):
            for d in each(3):
                st.l[i] = st.l[i] + T.call_extern("float32", "tz_xor_shuffle", st.l[i], 4 << d)
                if tile.layout.v.token_wise:
                    st.z[i] = st.z[i] + T.call_extern("float32", "tz_xor_shuffle", st.z[i], 4 << d)
        if rotation is not None:
            turn_back(st, w)
        T.sync_threads()  # every warp is done with its ring
        if cluster > 1:
            if less(w.warp[0], 1):
                T.cluster_arrive()  # a release, for all threads that met before it: one warp waits for its fence
            else:
                T.cluster_arrive_relaxed()
        for t in each(nt):
            for j in each(2):
                row = t * 8 + w.lane[0] % 4 * 2 + j
                at = w.warp[0] * words + row * pitch + w.lane[0] // 4
                for a in each(slices):
                    for half in each(2):
                        if rotation is not None:
                            st.f[0] = st.o[(a * nt + t) * 4 + half * 2 + j]
                        else:
                            st.f[0] = st.o[(a * nt + t) * 4 + half * 2 + j] * T.float32(tile.v_factor[half])
                            if tile.layout.v.token_wise:
                                st.f[0] = st.f[0] + st.z[t * 2 + j]
                        if layout.v.bias:
                            st.f[0] = st.f[0] + st.l[t * 2 + j] * T.float32(layout.v.bias)
                        if v_static:
                            st.f[0] = st.f[0] * _read(SV, w.h[0], a * 16 + half * 8 + w.lane[0] // 4)
                        ring[at + a * 16 + half * 8] = T.reinterpret(st.f[0], "int32")
                if less(w.lane[0], 4):
                    ring[w.warp[0] * words + cols * pitch + row] = T.reinterpret(st.m[t * 2 + j], "int32")
                    ring[w.warp[0] * words + cols * (pitch + 1) + row] = T.reinterpret(st.l[t * 2 + j], "int32")
        T.sync_threads()

    return stage_sums


def _make_result_macros(p: Decode) -> tuple[Macro, Macro]:
    """Macros `finish_row` (four head dimensions of the output) and `write_result` (of it, or of a partial result)."""
    cols, cluster, sinks = p.cols, p.cluster, p.sinks
    bf16 = "true" if p.dtype == "bfloat16" else "false"
    log2e = 1.4426950408889634

    @T.macro
    def finish_row(t, c, w, row, col):
        """Four head dimensions of an output row from their weighted sum, c.l and c.m."""
        w.query[0] = T.truncdiv(row, w.group[0])
        w.head[0] = w.h[0] * w.group[0] + T.truncmod(row, w.group[0])
        if sinks:  # one more column of logits, without a value
            c.top[0] = T.max(c.m[0], _read(t.SINK, w.head[0]) * T.float32(log2e))
            c.f[0] = T.call_extern("float32", "tz_ex2", c.m[0] - c.top[0])
            c.l[0] = c.l[0] * c.f[0] + T.call_extern(
                "float32", "tz_ex2", _read(t.SINK, w.head[0]) * T.float32(log2e) - c.top[0]
            )
            for e in each(4):
                c.o[e] = c.o[e] * c.f[0]
            c.m[0] = c.top[0]
        c.f[0] = T.if_then_else(c.l[0] > 0, T.float32(1) / c.l[0], T.float32(0))
        T.call_extern(
            "handle", "tz_store8", T.access_ptr(t.O[w.q_of, query_at(w, w.query[0]), w.head[0], col], "w", 4),
            T.call_extern("uint32", f"tz_pack2<{bf16}>", c.o[0] * c.f[0], c.o[1] * c.f[0]),
            T.call_extern("uint32", f"tz_pack2<{bf16}>", c.o[2] * c.f[0], c.o[3] * c.f[0]),
        )  # fmt: skip
        if less(col, 1):
            t.LSE[w.q_of, query_at(w, w.query[0]), w.head[0]] = T.if_then_else(
                c.l[0] > 0, c.m[0] + T.call_extern("float32", "tz_log2", c.l[0]), -T.infinity("float32")
            )

    @T.macro
    def write_partial(t, c, w, row, col, leads):
        """A partial result, and with the piece of it that leads its (m, l) as one lse, for the CTAs of this place."""
        c.f[0] = T.if_then_else(c.l[0] > 0, T.float32(1) / c.l[0], T.float32(0))
        for e in each(4):
            c.o[e] = c.o[e] * c.f[0]
        place = w.part_base + w.split // cluster
        T.call_extern(
            "handle", "tz_store16", T.access_ptr(t.OP[w.part_row, w.hy, place, row, col], "w", 4),
            T.access_ptr(c.o, "r"),
        )  # fmt: skip
        if leads:
            t.LP[w.part_row, w.hy, place, w.split % cluster * cols + row] = T.if_then_else(
                c.l[0] > 0, c.m[0] + T.call_extern("float32", "tz_log2", c.l[0]), T.float32(LOWEST)
            )

    @T.macro
    def write_result(t, c, w, row, col, leads):
        """Four head dimensions of the output, or of a partial result."""
        if w.partials == 1:
            finish_row(t, c, w, w.y[0] * cols + row, col)
        else:
            write_partial(t, c, w, row, col, leads)

    return finish_row, write_result


def _make_share_macro(p: Decode) -> Macro:
    """Macro `share_of`: which part of the output is the CTA's."""
    D, cluster = p.head_dim, p.cluster

    @T.macro
    def share_of(c, w):
        """The share of the output, in pieces of four dimensions, that this CTA of its cluster adds up."""
        c.items[0] = w.here[0] * (D // 4)
        c.first[0] = 0
        if cluster > 1:
            c.per[0] = (c.items[0] + cluster - 1) // cluster
            c.first[0] = w.split % cluster * c.per[0]
            c.items[0] = larger(smaller(c.items[0] - c.first[0], c.per[0]), 0)

    return share_of


def _make_split_macro(p: Decode, share_of: Macro, finish_row: Macro) -> Macro:
    """Macro `combine_splits`: the sum over all splits in memory, by the last of them to end."""
    D, cols, cluster, threads = p.head_dim, p.cols, p.cluster, p.threads

    @T.macro
    def load(t, ring, c, w, i, row, col, of_splits):
        """Result c.k + i, or the last one, to place i: of a split, or of a thread's share of them."""
        k = smaller(c.k[0] + i, c.end[0] - 1)
        if of_splits:
            T.call_extern(
                "handle", "tz_load16cg", T.access_ptr(c.x[i * 4], "w", 4),
                T.access_ptr(t.OP[w.part_row, w.hy, w.part_base + k, row, col], "r", 4),
            )  # fmt: skip
            c.lse[i] = T.call_extern(
                "float32",
                "tz_loadcg",
                T.access_ptr(t.LP[w.part_row, w.hy, w.part_base + k, w.split % cluster * cols + row], "r", 1),
            )
        else:
            at = (k * c.items[0] + c.item[0]) * _SHARE
            T.call_extern("handle", "tz_load<4>", T.access_ptr(c.x[i * 4], "w", 4), T.access_ptr(ring[at], "r", 4))
            c.lse[i] = T.reinterpret(ring[at + 4], "float32")
            c.sum[i] = T.reinterpret(ring[at + 5], "float32")

    @T.macro
    def add(t, ring, c, w, row, col, of_splits, batch):
        """Results c.k .. c.end of a row, up to `batch` of them: all loads first."""
        for i in each(batch):
            c.lse[i] = T.float32(LOWEST)
        for q in each(batch // _AT_LEAST):
            if less(c.k[0] + q * _AT_LEAST, c.end[0]):
                for i in each(q * _AT_LEAST, (q + 1) * _AT_LEAST):
                    load(t, ring, c, w, i, row, col, of_splits)
        c.top[0] = c.m[0]
        for i in each(batch):
            c.top[0] = T.max(c.top[0], c.lse[i])
        c.f[0] = T.call_extern("float32", "tz_ex2", c.m[0] - c.top[0])
        c.m[0] = c.top[0]
        c.l[0] = c.l[0] * c.f[0]
        for e in each(4):
            c.o[e] = c.o[e] * c.f[0]
        for q in each(batch // _AT_LEAST):
            if less(c.k[0] + q * _AT_LEAST, c.end[0]):
                for i in each(q * _AT_LEAST, (q + 1) * _AT_LEAST):
                    c.f[0] = T.if_then_else(
                        T.And(less(c.k[0] + i, c.end[0]), c.lse[i] > T.float32(LOWEST)),
                        T.call_extern("float32", "tz_ex2", c.lse[i] - c.m[0]),
                        T.float32(0),
                    )
                    if of_splits:
                        c.l[0] = c.l[0] + c.f[0]
                    else:
                        c.l[0] = c.l[0] + c.f[0] * c.sum[i]
                    for e in each(4):
                        c.o[e] = c.o[e] + c.f[0] * c.x[i * 4 + e]

    @T.macro
    def combine_splits(t, ring, c, w, tx):
        """The last CTA adds all partial results of its share of the rows: `parts` threads, 1, 2 or 4, for four
        dimensions of a row where there are that many; what they have follows one another through `ring`. Nothing is
        divided: this is done while everyone else has ended."""
        share_of(c, w)
        c.shift[0] = T.call_extern("int32", "tz_bits", c.items[0] - 1)  # as a power of two
        c.parts[0] = smaller(larger(_log2(threads) - c.shift[0], 0), _log2(_AT_LEAST))
        c.per[0] = (w.partials + (1 << c.parts[0]) - 1) >> c.parts[0]
        c.parts[0] = 1 << c.parts[0]
        c.part[0] = T.call_extern("int32", "tz_select", less(1, c.parts[0]), tx >> c.shift[0], 0)
        c.head[0] = tx - (c.part[0] << c.shift[0])
        for v in T.serial(T.ceildiv(c.items[0], threads)):
            c.item[0] = v * threads + c.head[0]
            row = (c.first[0] + c.item[0]) // (D // 4)
            col = (c.first[0] + c.item[0]) % (D // 4) * 4
            exists = T.And(less(c.item[0], c.items[0]), less(c.part[0], c.parts[0]))
            if exists:
                c.m[0] = T.float32(LOWEST)
                c.l[0] = 0.0
                for e in each(4):
                    c.o[e] = 0.0
                c.k[0] = c.part[0] * c.per[0]
                c.end[0] = smaller(c.k[0] + c.per[0], w.partials)
                for _ in T.serial(T.truncdiv(c.per[0] + BATCH - 1, BATCH)):
                    if less(c.k[0], c.end[0]):
                        add(t, ring, c, w, row, col, True, BATCH)
                    c.k[0] = c.k[0] + BATCH
            if less(1, c.parts[0]):
                if exists:
                    at = (c.part[0] * c.items[0] + c.item[0]) * _SHARE
                    T.call_extern("handle", "tz_store<4>", T.access_ptr(ring[at], "w", 4), T.access_ptr(c.o, "r"))
                    ring[at + 4] = T.reinterpret(c.m[0], "int32")
                    ring[at + 5] = T.reinterpret(c.l[0], "int32")
                T.sync_threads()
                if T.And(exists, less(c.part[0], 1)):  # the first share is in registers
                    c.k[0] = 1
                    c.end[0] = c.parts[0]
                    add(t, ring, c, w, row, col, False, _AT_LEAST)
            if T.And(exists, less(c.part[0], 1)):
                finish_row(t, c, w, w.y[0] * cols + row, col)

    return combine_splits


def _make_cluster_macros(p: Decode, warps: int, share_of: Macro, write_result: Macro) -> tuple[Macro, Macro, Macro]:
    """Macros `expect`, `send` and `merge_cluster`: the sum over the CTAs of a cluster."""
    D, nt, cols, cluster, threads = p.head_dim, p.row_tiles, p.cols, p.cluster, p.threads
    most, inbox = share(D, nt, cluster), merge_words(D, nt, warps)

    def piece_from(k, item):
        """Word of shared memory where piece `item` of this CTA's share arrives from CTA k."""
        return inbox + (k * most + item) * 4

    def facts_from(k, row):
        """Where m and l of a row arrive from CTA k."""
        return inbox + cluster * most * 4 + (k * cols + row) * 2

    @T.macro
    def send(ring, c, w, row, col):
        """A piece to the CTA that adds it up; m and l of the row go with the first piece of it that this one gets."""
        c.item[0] = row * (D // 4) + col // 4
        c.k[0] = T.truncdiv(c.item[0], c.per[0])
        c.item[0] = c.item[0] - c.k[0] * c.per[0]
        T.call_extern(
            "handle", "tz_send16", T.access_ptr(ring[piece_from(w.split % cluster, c.item[0])], "w", 4), c.k[0],
            T.access_ptr(c.o, "r"), T.access_ptr(w.sent[0], "rw", 1),
        )  # fmt: skip
        if T.Or(less(col, 1), less(c.item[0], 1)):
            T.call_extern(
                "handle", "tz_send8", T.access_ptr(ring[facts_from(w.split % cluster, row)], "w", 2), c.k[0],
                c.m[0], c.l[0], T.access_ptr(w.sent[0], "rw", 1),
            )  # fmt: skip

    @T.macro
    def expect(c, w, tx):
        """What the cluster's CTAs send to this one."""
        share_of(c, w)
        if less(tx, 1):
            if less(0, c.items[0]):
                rows = (c.first[0] + c.items[0] - 1) // (D // 4) - c.first[0] // (D // 4) + 1
                T.mbarrier_expect_tx(w.sent[0], cluster * (c.items[0] * 16 + rows * 8))
            T.barrier_arrive(w.sent[0])

    @T.macro
    def merge_cluster(t, ring, c, w, tx):
        """Sum over the CTAs of a cluster in their order; the result is the output, or a partial one."""
        T.barrier_wait(w.sent[0], 0)
        for v in T.serial(T.ceildiv(c.items[0], threads)):
            row = (c.first[0] + v * threads + tx) // (D // 4)
            col = (c.first[0] + v * threads + tx) % (D // 4) * 4
            if less(v * threads + tx, c.items[0]):
                c.m[0] = T.float32(LOWEST)
                for k in each(cluster):
                    T.call_extern(
                        "handle", "tz_load<2>", T.access_ptr(c.lse[k * 2], "w", 2),
                        T.access_ptr(ring[facts_from(k, row)], "r", 2),
                    )  # fmt: skip
                    c.m[0] = T.max(c.m[0], c.lse[k * 2])
                c.l[0] = 0.0
                for e in each(4):
                    c.o[e] = 0.0
                for k in each(cluster):
                    T.call_extern(
                        "handle", "tz_load<4>", T.access_ptr(c.x, "w", 4),
                        T.access_ptr(ring[piece_from(k, v * threads + tx)], "r", 4),
                    )  # fmt: skip
                    c.f[0] = T.call_extern("float32", "tz_ex2", c.lse[k * 2] - c.m[0])
                    c.l[0] = c.l[0] + c.f[0] * c.lse[k * 2 + 1]
                    for e in each(4):
                        c.o[e] = c.o[e] + c.f[0] * c.x[e]
                leads = T.Or(less(col, 1), less(v * threads + tx, 1))
                write_result(t, c, w, row, col, leads)

    return expect, send, merge_cluster


def words_of(p: Decode) -> int:
    """Words of the sums of a warp, or a warpgroup."""
    return p.cols * (pitch_of(p.head_dim) + 2)


def make_merge_macros(p: Decode, tile: Arithmetic, warps: int, finish_codes: Macro | None) -> tuple[Macro, Macro]:
    """Macros `stage_sums`, of a warp, and `merge`.

    warps: or warpgroups, whose sums are merged. finish_codes: macro that makes codes of the output, or None.

    `w` as in decode_copies, with y, group, here, query, head, `partials`, how many results there are of an output, row
    `part_row` of OP and LP and place `part_base` there where they begin, and in a cluster `sent`, the barrier of what
    the others send, of one arrival. `merge` waits for the arrivals in `stage_sums`. s: registers of decode_codes.
    """
    D, threads, cols, cluster, pitch, words = (
        p.head_dim,
        p.threads,
        p.cols,
        p.cluster,
        pitch_of(p.head_dim),
        words_of(p),
    )
    share_of, (finish_row, write_result) = _make_share_macro(p), _make_result_macros(p)
    expect, send, merge_cluster = _make_cluster_macros(p, warps, share_of, write_result)

    @T.macro
    def merge_warps(t, ring, c, w, tx):
        """Sum over the warps in their order; the result is the output, or a partial one, or goes to the cluster."""
        if cluster > 1:
            expect(c, w, tx)
        for v in T.serial(T.ceildiv(w.here[0] * (D // 4), threads)):
            row = (v * threads + tx) // (D // 4)
            col = (v * threads + tx) % (D // 4) * 4
            if less(row, w.here[0]):
                c.m[0] = T.float32(LOWEST)
                c.l[0] = 0.0
                for e in each(4):
                    c.o[e] = 0.0
                for k in each(warps):
                    c.m[0] = T.max(c.m[0], T.reinterpret(ring[k * words + cols * pitch + row], "float32"))
                for k in each(warps):
                    c.f[0] = T.call_extern(
                        "float32", "tz_ex2",
                        T.reinterpret(ring[k * words + cols * pitch + row], "float32") - c.m[0],
                    )  # fmt: skip
                    c.l[0] = c.l[0] + c.f[0] * T.reinterpret(ring[k * words + cols * (pitch + 1) + row], "float32")
                    T.call_extern(
                        "handle", "tz_load<4>", T.access_ptr(c.x, "w", 4),
                        T.access_ptr(ring[k * words + row * pitch + col], "r", 4),
                    )  # fmt: skip
                    for e in each(4):
                        c.o[e] = c.o[e] + c.f[0] * c.x[e]
                if cluster > 1:
                    send(ring, c, w, row, col)
                else:
                    write_result(t, c, w, row, col, less(col, 1))

    combine_splits = _make_split_macro(p, share_of, finish_row)

    def is_last(t, w, group_of):
        """Whether all splits of a group have ended, counted for the caller too."""
        return T.call_extern("bool", "tz_last_arrival", T.access_ptr(t.SEM[group_of], "rw", 1), w.partials)

    @T.macro
    def merge(t, ring, c, s, w, tx):
        """What the CTA's warps have staged, and then all splits, up to the output; then the codes of a sequence by the
        last of its CTAs."""
        if cluster > 1:
            T.cluster_wait()  # the others' rings are free, too
        merge_warps(t, ring, c, w, tx)
        if cluster > 1:
            merge_cluster(t, ring, c, w, tx)
        if finish_codes is not None:
            s.done[0] = 1
        if w.partials > 1:
            group_of = (w.b * t.OP.shape[1] + w.hy) * cluster + w.split % cluster
            if finish_codes is None:
                if is_last(t, w, group_of):
                    combine_splits(t, ring, c, w, tx)
            else:
                last = is_last(t, w, group_of)
                s.done[0] = T.Cast("int32", last)
                if less(0, s.done[0]):
                    combine_splits(t, ring, c, w, tx)
        if finish_codes is not None:
            if less(0, s.done[0]):
                finish_codes(t, ring, s, w, tx)

    return _make_staging_macro(p, tile), merge
