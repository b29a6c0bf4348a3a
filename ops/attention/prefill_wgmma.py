"""Tile program of prefill attention on wgmma (sm_90a): keys and values are the register operand (specs.md C, I.6).

A producer thread fills a ring of stages of 64 tokens by bulk copies. A consumer warpgroup owns 8 * row_tiles rows and
walks over the stages: S^T[64 tokens, rows] = K Q^T, each warp converting its own 16-token tile, then O^T[dims, rows] +=
V^T P^T, each warp converting its own 16 head dimensions of every 64. Q lies in shared memory for the whole CTA, P^T
passes through it (stmatrix); nothing dequantized does.

While the tensor cores work on S^T of a stage, the warpgroup converts its values; while they work on O^T, the keys of
the next one. The warpgroups of a CTA share nothing but the stages, so one's softmax overlaps the other's products.

The running maximum is lazy: sums are rescaled when a score of any row exceeds it by 2^4, which the warps of a warpgroup
agree on by one barrier with a vote. A stage is released when the products on its values were waited for. No product is
under way when the loop goes round: ptxas would serialize all of them (C7514).
"""

from types import SimpleNamespace

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.attention.calls import among, at8, ex2, fma, log2, tanh, xor_shuffle
from terrazzo.ops.attention.device import attention_prelude
from terrazzo.ops.attention.layout import CacheLayout
from terrazzo.ops.attention.prefill_operands import make_operand_macros, operand_state, sources
from terrazzo.ops.attention.prefill_rows import head_of, make_q_macros, query_of, seen_by, span, swizzled
from terrazzo.ops.attention.prefill_stages import INTEGERS, STAGE, Geometry, arguments, check_memory, make_stage_macros
from terrazzo.ops.attention.tile_macros import THRESHOLD, each, less, smaller
from terrazzo.ops.calls import bulk, copy16, fence, pack2, stmatrix4_trans, syncwarp, wg_sync, wgmma
from terrazzo.ops.tile_program import OWN_BARRIERS_AND_BOUNDS

PASS_CONFIGS = OWN_BARRIERS_AND_BOUNDS
REGISTERS = {1: (40, 240), 2: (24, 240), 3: (40, 152)}  # consumer warpgroups -> a producer's, a consumer's
LIMITS = ("count", "slot", "parity", "least", "high", "query", "head", "here", "edge", "token", "end", "seen", "next")
KEPT = ("first", "group", "rows", "row0")  # in shared memory while the loop runs: registers
_SOURCE = """\
// whether any thread of the warpgroup says so; a barrier of its 128 threads
__device__ __forceinline__ bool tz_wg_any(bool x, int id) {
  int r;
  asm volatile("{.reg .pred p, q; setp.ne.s32 p, %1, 0; barrier.red.or.pred q, %2, 128, p; selp.s32 %0, 1, 0, q;}"
               : "=r"(r) : "r"((int)x), "r"(id) : "memory");
  return r;
}
// a barrier of the first `threads` threads of the CTA
__device__ __forceinline__ void tz_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void *tz_at8(const void *p, int at) { return (char *)p + at; }
"""


def part_bytes(head_dim: int, row_tiles: int, wgs: int) -> tuple[int, int, int]:
    """Bytes of Q, of P^T and of the rows' integers and partial results, each a multiple of 1024."""
    rows = 8 * row_tiles * wgs
    return rows * head_dim * 2, rows * STAGE * 2, -(-(rows * 5 + len(KEPT)) * 4 // 1024) * 1024


def shared_words(g: Geometry, row_tiles: int, wgs: int, stages: int) -> int:
    """int32 words of shared memory: Q, P^T, rows, static scales of keys, the ring."""
    fixed = sum(part_bytes(g.layout.head_dim, row_tiles, wgs)) // 4
    return fixed + stages * g.stage_words + (g.layout.head_dim if g.layout.k.scaling == "static" else 0)


def build(
    target,
    *,
    k_format: str,
    v_format: str,
    head_dim: int,
    dtype: str,
    row_tiles: int,
    warps: int,
    stages: int,
    page: int,
    residual: int,
    fresh: bool,
    softcap: bool,
    sinks: bool,
):
    """The prim_func `main` for tiles of 8 * row_tiles * warps / 4 rows; arguments and shapes as in prefill_mma.build.

    Args:
        row_tiles: groups of 8 rows of a warpgroup, even. warps: of consumers, 4, 8 or 12.
    """
    import tilelang.language as T

    g = Geometry(CacheLayout(k_format, v_format, head_dim), page, residual, fresh)
    layout, plain = g.layout, g.plain
    D, nt, rows, slices, wgs = head_dim, row_tiles, 8 * row_tiles, head_dim // 16, warps // 4
    mt, ct = D // 64, warps * 32  # m64 tiles of O^T; consumer threads
    total = shared_words(g, nt, wgs, stages)
    if warps not in (4, 8, 12) or nt % 2 or not 2 <= nt <= 32:
        raise ArgumentError("warps", (warps, nt), "4, 8 or 12 warps, an even number of row tiles", "use 8 and 8")
    check_memory(target, stages, total)
    q_bytes, p_bytes, row_bytes = part_bytes(D, nt, wgs)
    state_at = (q_bytes + p_bytes) // 4  # words: ends of what rows see, then 4 partial results of each row
    kept_at = state_at + rows * wgs * 5
    table = state_at + row_bytes // 4  # static scales of keys
    ring_at = total - stages * g.stage_words
    bf16 = dtype == "bfloat16"
    tile = make_operand_macros(layout)
    spare = make_operand_macros(plain) if residual or fresh else None
    args = arguments(D, dtype)
    qs = make_q_macros(rows, D, bf16, tile.k_bf16)
    source = attention_prelude(
        "pack", "bulk", "lds", "warpgroup", "stmatrix_trans",
        extra=(_SOURCE, *sources(layout, *((plain,) if spare else ()))),
    )  # fmt: skip

    @T.macro
    def move(ring, at, start, words, most, io):
        """By the producer thread, counted by the barrier of the slot that io names."""
        T.mbarrier_expect_tx(io.full[io.slot[0]], words * 4)
        bulk(ring[at], start, words * 4, io.full[io.slot[0]])

    stream = make_stage_macros(g, rows * wgs, move)

    @T.macro
    def limits(space, w, wt):
        """Ends of what each row and what the warpgroup's rows see; rows past the sequence's are as its last one."""
        row = w.row0[0] + w.wg * rows
        w.high[0] = seen_by(w, smaller(row + rows, w.rows[0]) - 1)
        w.least[0] = seen_by(w, smaller(row, w.rows[0] - 1))
        if less(w.rows[0] - 1, row):
            w.high[0] = 0  # nothing to do
        if T.And(w.wg == 0, wt == 0):
            for i in each(len(KEPT)):
                space[kept_at + i] = getattr(w, KEPT[i])[0]
        for e in each(-(-rows // 128)):
            if less(e * 128 + wt, rows):
                space[state_at + w.wg * rows + e * 128 + wt] = seen_by(w, smaller(row + e * 128 + wt, w.rows[0] - 1))

    def word(kind, w, slot, r):
        """Address of tile r of the stage in a slot."""
        at = g.tile_at(r) if kind is tile else r * plain.tile_words
        return T.access_ptr(w.space[ring_at + slot * g.stage_words + at], "r", 1)

    def channels_of(kind, w, slot):
        """Address of the channel parameters of the warp's own tile."""
        at = table if kind.k_static else ring_at + slot * g.stage_words + (g.channel_at(w.warp) if kind is tile else 0)
        return T.access_ptr(w.space[at], "r", 1)

    @T.macro
    def fetch_keys(kind, st, w, lane):
        """K fragments of the warp's own tile of the next stage."""
        kind.key_params(st, word(kind, w, w.next[0], w.warp), lane)
        for j in each(kind.k_loads):
            kind.keys(
                st, word(kind, w, w.next[0], w.warp), channels_of(kind, w, w.next[0]), j, st.ak, j * kind.k_atoms * 4,
                lane,
            )  # fmt: skip

    @T.macro
    def prepare(full, st, w, i, lane):
        """Waits for stage i, if there is one, and converts its keys, if any of the warpgroup's rows sees them."""
        if less(i, w.count[0]):
            T.barrier_wait(full[w.next[0]], w.parity[0])
            fence()
            stream.locate(w, i)
            w.edge[0] = T.cast(
                T.Or(
                    less(smaller(w.least[0], w.end[0]), w.token[0] + STAGE),
                    less(w.token[0], w.high[0] - span(w.window)),
                ),
                "int32",
            )
            w.here[0] = T.cast(
                T.And(less(w.token[0], w.high[0]), less(w.least[0] - span(w.window), w.token[0] + STAGE)), "int32"
            )
            if w.here[0] > 0:
                if spare is not None:
                    if less(i, w.nb[0] + w.nc[0]):
                        fetch_keys(spare, st, w, lane)
                    else:
                        fetch_keys(tile, st, w, lane)
                else:
                    fetch_keys(tile, st, w, lane)

    @T.macro
    def fetch_values(of, st, sv, a, w, lane):
        """V^T fragments of m64 tile `a`, [16-token tile]: of the warp's 16 head dimensions."""
        words = max(1, of.v_words // of.v_atoms)  # of an atom; of two, where half a word holds one
        atom = w.warp * mt + a
        for r in each(4):
            of.value_params(st, word(of, w, w.slot[0], r), lane)
            if w.edge[0] > 0:
                of.guard(st, w.token[0] + r * 16, w.end[0], lane)
            of.values(
                st, word(of, w, w.slot[0], r),
                (atom // of.v_atoms * 32 + lane) * of.v_words + atom % of.v_atoms * of.v_words // of.v_atoms,
                words, 1, a % 2 if mt > 1 else w.warp % 2, sv, a * 4, w.edge[0], st.av, a % 2 * 16 + r * 4, 4,
            )  # fmt: skip

    @T.macro
    def mask(space, st, w, lane):
        """Scores of tokens that a row does not see become -inf."""
        for t in each(nt):
            for j in each(2):
                hi = space[state_at + w.wg * rows + t * 8 + lane % 4 * 2 + j]
                for half in each(2):
                    at = w.token[0] + w.warp * 16 + half * 8 + lane // 4
                    st.s[t * 4 + half * 2 + j] = T.if_then_else(
                        among(at, hi, span(w.window)), st.s[t * 4 + half * 2 + j], -T.infinity("float32")
                    )
                    st.s[t * 4 + half * 2 + j] = T.if_then_else(
                        less(at, w.end[0]), st.s[t * 4 + half * 2 + j], -T.infinity("float32")
                    )

    @T.macro
    def rescale(space, st, w, lane):
        """The warpgroup's maxima of all rows, and everything relative to them. A row's maximum is 0 until it has seen a
        token (bit of w.seen)."""
        for i in each(nt * 2):
            st.f[0] = T.max(st.s[i // 2 * 4 + i % 2], st.s[i // 2 * 4 + i % 2 + 2])
            for d in each(3):
                st.f[0] = T.max(st.f[0], xor_shuffle(st.f[0], 4 << d))
            if lane // 4 == 0:
                space[state_at + (wgs + w.wg * 4 + w.warp) * rows + i // 2 * 8 + lane * 2 + i % 2] = T.reinterpret(
                    st.f[0], "int32"
                )
        wg_sync(w.wg)
        for i in each(nt * 2):
            st.f[0] = -T.infinity("float32")
            for k in each(4):
                st.f[0] = T.max(
                    st.f[0], T.reinterpret(
                        space[state_at + (wgs + w.wg * 4 + k) * rows + i // 2 * 8 + lane % 4 * 2 + i % 2], "float32"
                    ),
                )  # fmt: skip
            st.f[1] = 0.0  # what the maximum grows by
            st.f[2] = 1.0  # factor of sums; those of a row that has seen nothing are 0
            if st.f[0] > T.float32(-1e30):
                st.f[1] = T.if_then_else(w.seen[0] >> i & 1 > 0, T.max(st.f[0], T.float32(0)), st.f[0])
                st.f[2] = T.if_then_else(w.seen[0] >> i & 1 > 0, ex2(-st.f[1]), T.float32(0))
                w.seen[0] = w.seen[0] | (1 << i)
            st.m[i] = st.m[i] + st.f[1]
            st.l[i] = st.l[i] * st.f[2]
            for half in each(2):
                st.s[i // 2 * 4 + half * 2 + i % 2] = st.s[i // 2 * 4 + half * 2 + i % 2] - st.f[1]
                for a in each(mt):
                    at = (a * nt + i // 2) * 4 + half * 2 + i % 2
                    st.o[at] = st.o[at] * st.f[2]

    @T.macro
    def softmax(of, space, st, scale, cap, w, lane):
        """P^T of the stage to shared memory, from S^T."""
        for i in each(nt * 4):
            if softcap:
                st.s[i] = cap * tanh(st.s[i] * scale / cap) - st.m[i // 4 * 2 + i % 2]
            else:
                st.s[i] = fma(st.s[i], scale, -st.m[i // 4 * 2 + i % 2])
        if w.edge[0] > 0:
            mask(space, st, w, lane)
        st.f[0] = T.max(st.s[0], st.s[1])
        for i in each(2, nt * 4):
            st.f[0] = T.max(st.f[0], st.s[i])
        if T.call_extern(
            "bool", "tz_wg_any", T.Or(st.f[0] > T.float32(THRESHOLD), w.seen[0] != (1 << (nt * 2)) - 1), w.wg + 1
        ):
            rescale(space, st, w, lane)
        for i in each(nt * 4):
            st.s[i] = ex2(st.s[i])
        for i in each(nt * 2):
            st.l[i] = st.l[i] + (st.s[i // 2 * 4 + i % 2] + st.s[i // 2 * 4 + 2 + i % 2])
        for t in each(nt // 2):
            row = t * 16 + lane // 16 * 8 + lane % 8
            stmatrix4_trans(
                at8(space[0], q_bytes + w.wg * (rows * 128) + swizzled(row, w.warp * 2 + lane // 8 % 2), "w"),
                *(pack2(st.s[t * 8 + i * 2], st.s[t * 8 + i * 2 + 1], bf16=of.v_bf16) for i in each(4)),
            )

    @T.macro
    def work(of, space, full, desc, sv, st, scale, cap, w, i, lane):
        """Stage i, whose keys are in st.ak; afterwards the keys of the next one are."""
        T.warpgroup_fence_operand(st.ak, 0, slices * 4)
        T.warpgroup_fence_operand(st.s, 0, nt * 4)
        T.warpgroup_arrive()
        for j in each(slices):
            at = (w.wg * mt + j // 4) * (rows * 8) + j % 4 * 2
            wgmma(rows, (of.k_kind, of.k_kind), st.s, 0, st.ak, j * 4, desc, at, j > 0)
        T.warpgroup_commit_batch()
        T.warpgroup_fence_operand(st.s, 0, nt * 4)
        fetch_values(of, st, sv, 0, w, lane)
        T.warpgroup_wait(0)
        T.warpgroup_fence_operand(st.s, 0, nt * 4)
        softmax(of, space, st, scale, cap, w, lane)
        T.fence_proxy_async()  # wgmma reads P^T through the asynchronous proxy
        wg_sync(w.wg)
        for a in each(mt):
            if a > 1:
                T.warpgroup_wait(1)  # the products that read this half of st.av
            if a > 0:
                fetch_values(of, st, sv, a, w, lane)
            T.warpgroup_fence_operand(st.av, a % 2 * 16, 16)
            T.warpgroup_fence_operand(st.o, a * nt * 4, nt * 4)
            T.warpgroup_arrive()
            for r in each(4):
                at = q_bytes // 16 + w.wg * (rows * 8) + r * 2
                wgmma(rows, (of.v_kind, of.v_kind), st.o, a * nt * 4, st.av, a % 2 * 16 + r * 4, desc, at)
            T.warpgroup_commit_batch()
            T.warpgroup_fence_operand(st.o, a * nt * 4, nt * 4)
        prepare(full, st, w, i + 1, lane)
        T.warpgroup_wait(0)
        T.warpgroup_fence_operand(st.o, 0, mt * nt * 4)

    @T.macro
    def finish(O, LSE, SINK, space, st, w, wt, lane):
        """O = O^T / l, by stmatrix into the rows' place in Q; a row that sees nothing is 0, with lse -inf."""
        for i in each(len(KEPT)):
            getattr(w, KEPT[i])[0] = space[kept_at + i]
        for i in each(nt * 2):
            for d in each(3):
                st.l[i] = st.l[i] + xor_shuffle(st.l[i], 4 << d)
            if lane // 4 == 0:
                space[state_at + (wgs + w.wg * 4 + w.warp) * rows + i // 2 * 8 + lane * 2 + i % 2] = T.reinterpret(
                    st.l[i], "int32"
                )
        wg_sync(w.wg)
        for i in each(nt * 2):
            st.l[i] = 0.0
            for k in each(4):
                st.l[i] = st.l[i] + T.reinterpret(
                    space[state_at + (wgs + w.wg * 4 + k) * rows + i // 2 * 8 + lane % 4 * 2 + i % 2], "float32"
                )
            st.f[1] = T.if_then_else(st.l[i] > 0, T.float32(1), T.float32(0))  # factor of the sums
            row = w.row0[0] + w.wg * rows + i // 2 * 8 + lane % 4 * 2 + i % 2
            if less(row, w.rows[0]):
                w.query[0] = query_of(w, row)
                w.head[0] = head_of(w, row)
                if sinks:
                    st.f[2] = SINK[w.head[0]] * T.float32(1.4426950408889634)
                    st.f[3] = T.if_then_else(st.l[i] > 0, T.max(st.m[i], st.f[2]), st.f[2])
                    st.f[1] = T.if_then_else(st.l[i] > 0, ex2(st.m[i] - st.f[3]), T.float32(0))
                    st.l[i] = st.l[i] * st.f[1] + ex2(st.f[2] - st.f[3])
                    st.m[i] = st.f[3]
                if T.And(w.warp == 0, lane // 4 == 0):
                    LSE[w.query[0], w.head[0]] = T.if_then_else(
                        st.l[i] > 0, st.m[i] + log2(st.l[i]), -T.infinity("float32")
                    )
                st.f[1] = T.if_then_else(st.l[i] > 0, st.f[1] / st.l[i], T.float32(0))
            for a in each(mt):
                for half in each(2):
                    at = (a * nt + i // 2) * 4 + half * 2 + i % 2
                    st.o[at] = st.o[at] * st.f[1]
        for a in each(mt):
            chunk = (w.warp * mt + a) * 2 + lane // 8 % 2  # of 8 head dimensions
            for t in each(nt // 2):
                row = t * 16 + lane // 16 * 8 + lane % 8
                stmatrix4_trans(
                    at8(space[0], qs.in_q(row, chunk, w), "w"),
                    *(
                        pack2(st.o[(a * nt + t * 2) * 4 + i * 2], st.o[(a * nt + t * 2) * 4 + i * 2 + 1], bf16=bf16)
                        for i in each(4)
                    ),
                )
        wg_sync(w.wg)
        for e in each(rows * D // 8 // 128):
            row = (e * 128 + wt) // (D // 8)
            chunk = (e * 128 + wt) % (D // 8)
            if less(w.row0[0] + w.wg * rows + row, w.rows[0]):
                w.query[0] = query_of(w, w.row0[0] + w.wg * rows + row)
                w.head[0] = head_of(w, w.row0[0] + w.wg * rows + row)
                copy16(
                    O[w.query[0], w.head[0], chunk * 8],
                    at8(space[0], qs.in_q(row, chunk, w)),
                )

    @T.prim_func
    def main(
        Q: args.Q, KV: args.KV, TABLE: args.TABLE, LEN: args.LEN, CU: args.CU, RES: args.RES, SLOT: args.SLOT,
        NEW: args.NEW, SK: args.SK, SV: args.SV, SINK: args.SINK, O: args.O, LSE: args.LSE,
        scale: T.float32, cap: T.float32, window: T.int32, tiles: T.int32,
    ):  # fmt: skip
        with T.Kernel(args.hk, tiles, args.b, threads=ct + 128, prelude=source) as (h, y, b):
            space = T.alloc_shared((total,), "int32")
            full = T.alloc_barrier([1] * stages)
            empty = T.alloc_barrier([warps] * stages)
            tx = T.get_thread_binding()
            lane = tx % 32
            sizes = {"o": mt * nt * 4, "s": nt * 4, "m": nt * 2, "l": nt * 2, "f": 4}
            words = {"ak": slices * 4, "av": min(mt, 2) * 16}
            st = SimpleNamespace(
                **{name: T.alloc_local((n,), "float32") for name, n in sizes.items()},
                **{name: T.alloc_local((n,), "uint32") for name, n in words.items()},
                **operand_state(),
            )  # fmt: skip
            sv = T.alloc_local((mt * 4 if tile.v_static else 1,), "uint32")
            desc = T.alloc_wgmma_desc()
            ints = {name: T.alloc_local((1,), "int32") for name in (*INTEGERS, *LIMITS)}
            if spare is None:
                ints["end"] = ints["packed"]
            w = SimpleNamespace(b_=b, space=space, window=window, h=h, wg=tx // 128, warp=tx // 32 % 4, **ints)
            x = SimpleNamespace(KV=KV, TABLE=TABLE, RES=RES, SLOT=SLOT, NEW=NEW)
            stream.place(LEN, CU, w, y, window, args.hq, args.hk)
            w.count[0] = w.na[0] + w.nb[0] + w.nc[0]
            w.slot[0] = 0
            w.parity[0] = 0
            if tx >= ct:
                T.dec_max_nreg(REGISTERS[wgs][0])
                if tx == ct:
                    if less(w.row0[0], w.rows[0]):
                        for i in T.serial(w.count[0]):
                            T.barrier_wait(empty[w.slot[0]], w.parity[0] ^ 1)
                            stream.fetch(
                                x, space, w, i, ring_at + w.slot[0] * g.stage_words,
                                SimpleNamespace(full=full, slot=w.slot),
                            )  # fmt: skip
                            T.barrier_arrive(full[w.slot[0]])
                            w.slot[0] = w.slot[0] + 1
                            if w.slot[0] == stages:
                                w.slot[0] = 0
                                w.parity[0] = w.parity[0] ^ 1
            else:
                T.inc_max_nreg(REGISTERS[wgs][1])
                if less(w.row0[0], w.rows[0]):
                    T.initialize_wgmma_descriptor(desc, T.access_ptr(space[0], "r"), 1, 1, 64)
                    limits(space, w, tx % 128)
                    qs.load_q(Q, space, st, w, tx % 128)
                    if tile.k_static:
                        if tx < 128:
                            tile.share_static(SK, space, table, h, tx, 128)
                    if tile.v_static:
                        tile.load_static(SV, sv, w.warp * mt, mt, h, lane)
                    for i in each(mt * nt * 4):
                        st.o[i] = 0.0
                    for i in each(nt * 2):
                        st.m[i] = 0.0
                        st.l[i] = 0.0
                    w.seen[0] = 0
                    T.fence_proxy_async()  # wgmma reads Q through the asynchronous proxy
                    T.call_extern("handle", "tz_sync", 1, ct)
                    w.next[0] = 0
                    prepare(full, st, w, 0, lane)
                    for i in T.serial(w.count[0]):
                        w.slot[0] = w.next[0]
                        w.next[0] = w.next[0] + 1
                        if w.next[0] == stages:
                            w.next[0] = 0
                            w.parity[0] = w.parity[0] ^ 1
                        if w.here[0] > 0:
                            if spare is not None:
                                if less(i, w.nb[0] + w.nc[0]):
                                    work(spare, space, full, desc, sv, st, scale, cap, w, i, lane)
                                else:
                                    work(tile, space, full, desc, sv, st, scale, cap, w, i, lane)
                            else:
                                work(tile, space, full, desc, sv, st, scale, cap, w, i, lane)
                        else:
                            prepare(full, st, w, i + 1, lane)
                        syncwarp()  # the other lanes' reads come before the arrive, too
                        if lane == 0:
                            T.barrier_arrive(empty[w.slot[0]])
                    finish(O, LSE, SINK, space, st, w, tx % 128, lane)

    return main
