"""What follows a warp's tokens in decode attention: the merge of a CTA's warps, and that of a sequence's splits.

Sums are added in a fixed order, so that results have the same bits in every run: first the warps in theirs. Each CTA of
a cluster then sends the others their shares of the output, to where their rings were, and adds up its own in the order
of the CTAs, without a fence or a round trip. What several clusters, or CTAs without one, have for the same output is
added by the last of them to end: there each thread adds a share of the partial results for four head dimensions of a
row, all loaded at once, and the shares follow one another through shared memory.
"""

from types import SimpleNamespace

from terrazzo.ops.attention.cache.layout import CacheLayout
from terrazzo.ops.attention.decoding.decode_arguments import query_at
from terrazzo.ops.attention.device.rotation_macros import make_rotation, sum_stages
from terrazzo.ops.attention.device.tile_macros import LOWEST, each, larger, less, smaller

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


def state() -> SimpleNamespace:
    """Registers of the merges."""
    import tilelang.language as T

    return SimpleNamespace(
        **{name: T.alloc_local((1,), "float32") for name in ("m", "l", "f", "top")},
        o=T.alloc_local((4,), "float32"),
        x=T.alloc_local((4 * BATCH,), "float32"),
        lse=T.alloc_local((2 * BATCH,), "float32"),
        sum=T.alloc_local((_AT_LEAST,), "float32"),
        **{
            name: T.alloc_local((1,), "int32")
            for name in ("items", "first", "shift", "parts", "part", "per", "item", "k", "end", "head")
        },
    )


def _facts_of(
    layout: CacheLayout, *, row_tiles: int, warps: int, cluster: int, dtype: str, sinks: bool, threads: int
) -> SimpleNamespace:
    """Sizes of the merges."""
    cols, pitch = 8 * row_tiles, pitch_of(layout.head_dim)
    return SimpleNamespace(
        layout=layout, nt=row_tiles, warps=warps, cluster=cluster, dtype=dtype, sinks=sinks,
        threads=threads or warps * 32, cols=cols, pitch=pitch,
        words=cols * (pitch + 2),  # of the sums of a warp
    )  # fmt: skip


def _read(buffer, *at):
    """A float32 that the kernel ahead may have written."""
    import tilelang.language as T

    return T.reinterpret(T.call_extern("uint32", "tz_read32", T.access_ptr(buffer[at], "r", 1)), "float32")


def _make_staging_macro(f: SimpleNamespace, tile: SimpleNamespace):
    """Macro `stage_sums`: what a warp has summed up, to shared memory."""
    import tilelang.language as T

    layout, D, nt, cols, slices = f.layout, f.layout.head_dim, f.nt, f.cols, f.layout.head_dim // 16
    cluster, pitch, words, v_static = f.cluster, f.pitch, f.words, layout.v.scaling == "static"
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
                        if tile.v_token:
                            st.o[at] = st.o[at] + st.z[t * 2 + j]
        rotation.turn(st, st.o, w.lane[0])
        rotation.scaled(st.o)

    @T.macro
    def stage_sums(ring, SV, st, w):
        """The warp's sums to shared memory, true scale, rows [row][dim] | m | l."""
        for i in each(nt * 2):
            for d in each(3):
                st.l[i] = st.l[i] + T.call_extern("float32", "tz_xor_shuffle", st.l[i], 4 << d)
                if tile.v_token:
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
                            if tile.v_token:
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


def _make_result_macros(f: SimpleNamespace) -> SimpleNamespace:
    """Macros `finish_row` (four head dimensions of the output) and `write_result` (of it, or of a partial result)."""
    import tilelang.language as T

    cols, cluster, sinks = f.cols, f.cluster, f.sinks
    bf16 = "true" if f.dtype == "bfloat16" else "false"
    log2e = 1.4426950408889634

    @T.macro
    def finish_row(O, LSE, SINK, c, w, row, col):
        """Four head dimensions of an output row from their weighted sum, c.l and c.m."""
        w.query[0] = T.truncdiv(row, w.group[0])
        w.head[0] = w.h[0] * w.group[0] + T.truncmod(row, w.group[0])
        if sinks:  # one more column of logits, without a value
            c.top[0] = T.max(c.m[0], _read(SINK, w.head[0]) * T.float32(log2e))
            c.f[0] = T.call_extern("float32", "tz_ex2", c.m[0] - c.top[0])
            c.l[0] = c.l[0] * c.f[0] + T.call_extern(
                "float32", "tz_ex2", _read(SINK, w.head[0]) * T.float32(log2e) - c.top[0]
            )
            for e in each(4):
                c.o[e] = c.o[e] * c.f[0]
            c.m[0] = c.top[0]
        c.f[0] = T.if_then_else(c.l[0] > 0, T.float32(1) / c.l[0], T.float32(0))
        T.call_extern(
            "handle", "tz_store8", T.access_ptr(O[w.q_of, query_at(w, w.query[0]), w.head[0], col], "w", 4),
            T.call_extern("uint32", f"tz_pack2<{bf16}>", c.o[0] * c.f[0], c.o[1] * c.f[0]),
            T.call_extern("uint32", f"tz_pack2<{bf16}>", c.o[2] * c.f[0], c.o[3] * c.f[0]),
        )  # fmt: skip
        if less(col, 1):
            LSE[w.q_of, query_at(w, w.query[0]), w.head[0]] = T.if_then_else(
                c.l[0] > 0, c.m[0] + T.call_extern("float32", "tz_log2", c.l[0]), -T.infinity("float32")
            )

    @T.macro
    def write_partial(OP, LP, c, w, row, col, leads):
        """A partial result, and with the piece of it that leads its (m, l) as one lse, for the CTAs of this place."""
        c.f[0] = T.if_then_else(c.l[0] > 0, T.float32(1) / c.l[0], T.float32(0))
        for e in each(4):
            c.o[e] = c.o[e] * c.f[0]
        place = w.part_base + w.split // cluster
        T.call_extern(
            "handle", "tz_store16", T.access_ptr(OP[w.part_row, w.hy, place, row, col], "w", 4),
            T.access_ptr(c.o, "r"),
        )  # fmt: skip
        if leads:
            LP[w.part_row, w.hy, place, w.split % cluster * cols + row] = T.if_then_else(
                c.l[0] > 0, c.m[0] + T.call_extern("float32", "tz_log2", c.l[0]), T.float32(LOWEST)
            )

    @T.macro
    def write_result(OP, LP, O, LSE, SINK, c, w, row, col, leads):
        """Four head dimensions of the output, or of a partial result."""
        if w.partials == 1:
            finish_row(O, LSE, SINK, c, w, w.y[0] * cols + row, col)
        else:
            write_partial(OP, LP, c, w, row, col, leads)

    return SimpleNamespace(finish_row=finish_row, write_result=write_result)


def _make_share_macro(f: SimpleNamespace):
    """Macro `share_of`: which part of the output is the CTA's."""
    import tilelang.language as T

    D, cluster = f.layout.head_dim, f.cluster

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


def _make_split_macro(f: SimpleNamespace, share_of, finish_row):
    """Macro `combine_splits`: the sum over all splits in memory, by the last of them to end."""
    import tilelang.language as T

    D, cols, cluster, threads = f.layout.head_dim, f.cols, f.cluster, f.threads

    @T.macro
    def load(ring, OP, LP, c, w, i, row, col, of_splits):
        """Result c.k + i, or the last one, to place i: of a split, or of a thread's share of them."""
        k = smaller(c.k[0] + i, c.end[0] - 1)
        if of_splits:
            T.call_extern(
                "handle", "tz_load16cg", T.access_ptr(c.x[i * 4], "w", 4),
                T.access_ptr(OP[w.part_row, w.hy, w.part_base + k, row, col], "r", 4),
            )  # fmt: skip
            c.lse[i] = T.call_extern(
                "float32",
                "tz_loadcg",
                T.access_ptr(LP[w.part_row, w.hy, w.part_base + k, w.split % cluster * cols + row], "r", 1),
            )
        else:
            at = (k * c.items[0] + c.item[0]) * _SHARE
            T.call_extern("handle", "tz_load<4>", T.access_ptr(c.x[i * 4], "w", 4), T.access_ptr(ring[at], "r", 4))
            c.lse[i] = T.reinterpret(ring[at + 4], "float32")
            c.sum[i] = T.reinterpret(ring[at + 5], "float32")

    @T.macro
    def add(ring, OP, LP, c, w, row, col, of_splits, batch):
        """Results c.k .. c.end of a row, up to `batch` of them: all loads first."""
        for i in each(batch):
            c.lse[i] = T.float32(LOWEST)
        for q in each(batch // _AT_LEAST):
            if less(c.k[0] + q * _AT_LEAST, c.end[0]):
                for i in each(q * _AT_LEAST, (q + 1) * _AT_LEAST):
                    load(ring, OP, LP, c, w, i, row, col, of_splits)
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
    def combine_splits(ring, OP, LP, O, LSE, SINK, c, w, tx):
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
                        add(ring, OP, LP, c, w, row, col, True, BATCH)
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
                    add(ring, OP, LP, c, w, row, col, False, _AT_LEAST)
            if T.And(exists, less(c.part[0], 1)):
                finish_row(O, LSE, SINK, c, w, w.y[0] * cols + row, col)

    return combine_splits


def _make_cluster_macros(f: SimpleNamespace, share_of, write_result) -> SimpleNamespace:
    """Macros `expect`, `send` and `merge_cluster`: the sum over the CTAs of a cluster."""
    import tilelang.language as T

    D, nt, cols, cluster, threads = f.layout.head_dim, f.nt, f.cols, f.cluster, f.threads
    most, inbox = share(D, nt, cluster), merge_words(D, nt, f.warps)

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
    def merge_cluster(ring, OP, LP, O, LSE, SINK, c, w, tx):
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
                write_result(OP, LP, O, LSE, SINK, c, w, row, col, leads)

    return SimpleNamespace(expect=expect, send=send, merge_cluster=merge_cluster)


def make_merge_macros(
    layout: CacheLayout,
    tile: SimpleNamespace,
    *,
    row_tiles: int,
    warps: int,
    cluster: int,
    dtype: str,
    sinks: bool,
    threads: int = 0,
    codes: SimpleNamespace | None = None,
) -> SimpleNamespace:
    """Macros stage_sums and merge; `words` of the sums of a warp.

    warps: or warpgroups, whose sums are merged. threads: of the CTA, 0 for those of the warps. codes: macros that make
    some of the output (decode_codes.py).

    `w` as in decode_copies, with y, group, here, query, head, `partials`, how many results there are of an output, row
    `part_row` of OP and LP and place `part_base` there where they begin, and in a cluster `sent`, the barrier of what
    the others send, of one arrival. `merge` waits for the arrivals in `stage_sums`.
    """
    import tilelang.language as T

    f = _facts_of(layout, row_tiles=row_tiles, warps=warps, cluster=cluster, dtype=dtype, sinks=sinks, threads=threads)
    D, threads, cols, pitch, words = layout.head_dim, f.threads, f.cols, f.pitch, f.words
    share_of, results = _make_share_macro(f), _make_result_macros(f)
    write_result = results.write_result
    of_cluster = _make_cluster_macros(f, share_of, write_result)
    expect, send = of_cluster.expect, of_cluster.send

    @T.macro
    def merge_warps(ring, OP, LP, O, LSE, SINK, c, w, tx):
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
                    write_result(OP, LP, O, LSE, SINK, c, w, row, col, less(col, 1))

    combine_splits = _make_split_macro(f, share_of, results.finish_row)

    @T.macro
    def merge(ring, OP, LP, SEM, O, LSE, SINK, c, w, tx):
        """What the CTA's warps have staged, and then all splits, up to the output."""
        if cluster > 1:
            T.cluster_wait()  # the others' rings are free, too
        merge_warps(ring, OP, LP, O, LSE, SINK, c, w, tx)
        if cluster > 1:
            of_cluster.merge_cluster(ring, OP, LP, O, LSE, SINK, c, w, tx)
        if w.partials > 1:
            group_of = (w.b * OP.shape[1] + w.hy) * cluster + w.split % cluster
            if T.call_extern("bool", "tz_last_arrival", T.access_ptr(SEM[group_of], "rw", 1), w.partials):
                combine_splits(ring, OP, LP, O, LSE, SINK, c, w, tx)

    @T.macro
    def merge_coded(ring, OP, LP, SEM, O, LSE, SINK, made, c, s, w, tx):
        """`merge`, then the codes of a sequence by the last of its CTAs."""
        if cluster > 1:
            T.cluster_wait()
        merge_warps(ring, OP, LP, O, LSE, SINK, c, w, tx)
        if cluster > 1:
            of_cluster.merge_cluster(ring, OP, LP, O, LSE, SINK, c, w, tx)
        s.done[0] = 1
        if w.partials > 1:
            group_of = (w.b * OP.shape[1] + w.hy) * cluster + w.split % cluster
            last = T.call_extern("bool", "tz_last_arrival", T.access_ptr(SEM[group_of], "rw", 1), w.partials)
            s.done[0] = T.Cast("int32", last)
            if less(0, s.done[0]):
                combine_splits(ring, OP, LP, O, LSE, SINK, c, w, tx)
        if less(0, s.done[0]):
            codes.finish(ring, SEM, O, *made, s, w, tx)

    return SimpleNamespace(
        stage_sums=_make_staging_macro(f, tile), merge=merge_coded if codes is not None else merge, words=words
    )
