"""Tile program of prefill attention on mma.sync m16n8k16: any GPU from sm_80 on (specs.md B.5, I.6).

Tiles of 16 tokens are the A operand of S^T = K Q^T and O^T += V^T P^T, converted in registers by the warp that
multiplies them. A warp owns 8 * row_tiles rows and walks over all tokens that they see; the warps of a CTA read the
same stages of 64 tokens, a ring that all threads fill by cp.async. P^T is transposed in registers (movmatrix). The
running maximum is lazy: sums are rescaled only when a score exceeds it by 2^4.
"""

from terrazzo.ops.attention.device.calls import (
    among,
    any_lane,
    at32,
    ex2,
    load32,
    log2,
    store_words,
    tanh,
    transpose,
    xor_shuffle,
)
from terrazzo.ops.attention.device.rotation_macros import make_rotation, query_stages, sum_stages
from terrazzo.ops.attention.device.tile_macros import LOWEST, THRESHOLD, each, less, smaller
from terrazzo.ops.attention.prefilling.prefill_operands import STATE, Operands, make_operand_macros, sources
from terrazzo.ops.attention.prefilling.prefill_rows import head_of, query_of, seen_by, span
from terrazzo.ops.attention.prefilling.prefill_stages import (
    STAGE,
    Geometry,
    Prefill,
    Tensors,
    arguments,
    check_memory,
    make_stage_macros,
)
from terrazzo.ops.tiles.calls import cp_async, cp_commit, cp_wait, mma, pack2, unpack
from terrazzo.ops.tiles.cuda.attention import attention_prelude
from terrazzo.ops.tiles.language import T
from terrazzo.ops.tiles.program import OWN_BARRIERS_AND_BOUNDS
from terrazzo.ops.tiles.types import Buffers, Macro, PrimFunc, scalars

PASS_CONFIGS = OWN_BARRIERS_AND_BOUNDS
LIMITS = (
    "count", "slot", "fill", "least", "most", "high", "low", "span", "query", "head", "here", "edge", "token", "end",
)  # fmt: skip


def shared_words(g: Geometry, stages: int) -> int:
    """int32 words of shared memory: the ring, and static scales of keys."""
    return stages * g.stage_words + (g.layout.head_dim if g.layout.k.static else 0)


def _make_row_macros(p: Prefill, tile: Operands) -> tuple[Macro, Macro, Macro]:
    """Macros `limits` and `load_q` (what the warp's rows see, and their fragments) and `finish` (their results)."""
    nt, cols, slices, bf16, sinks, split = p.row_tiles, 8 * p.row_tiles, p.slices, p.bf16, p.sinks, p.split
    D, k, v, result_of = p.head_dim, p.layout.k, p.layout.v, p.result_of
    rotation = make_rotation(D, D // 4, query_stages(D)) if k.rotation else None
    back = make_rotation(D, slices * nt * 4, sum_stages(D, nt)) if v.rotation else None

    @T.macro
    def limits(st, w, window, lane):
        """Ends of what each row and what the warp's rows see; rows past the sequence's are as its last one."""
        row = w.row0[0] + w.warp * cols
        w.span[0] = span(window)
        w.high[0] = seen_by(w, smaller(row + cols, w.rows[0]) - 1)
        w.least[0] = seen_by(w, smaller(row, w.rows[0] - 1))
        w.low[0] = w.least[0] - w.span[0]
        w.most[0] = w.high[0] - w.span[0]
        for t in each(nt):
            for j in each(2):
                st.hi[t * 2 + j] = seen_by(w, smaller(row + t * 8 + lane % 4 * 2 + j, w.rows[0] - 1))

    @T.macro
    def load_q(Q, st, w, lane):
        """B fragments of the rows in the dtype of the keys' operand."""
        for t in each(nt):
            row = w.row0[0] + w.warp * cols + t * 8 + lane // 4
            w.query[0] = query_of(w, row)
            w.head[0] = head_of(w, row)
            for k in each(slices):
                for half in each(2):
                    at = (k * nt + t) * 2 + half
                    st.q[at] = T.uint32(0)
                    if less(row, w.rows[0]):
                        st.q[at] = load32(Q[w.query[0], w.head[0], k * 16 + half * 8 + lane % 4 * 2])
                        if tile.layout.k.bf16 != bf16 and rotation is None:
                            st.f[0] = unpack(0, st.q[at], bf16=bf16)
                            st.f[1] = unpack(1, st.q[at], bf16=bf16)
                            st.q[at] = pack2(st.f[0], st.f[1], bf16=tile.layout.k.bf16)
            if rotation is not None:
                at = lambda i, t=t: (i // 2 * nt + t) * 2 + i % 2
                rotation.from_words(st.rotated, st.q, at, bf16)
                rotation.turn(st, st.rotated, lane)
                rotation.to_words(st.rotated, st.q, at, False)

    @T.macro
    def finish(O, LSE, SINK, st, w, lane):
        """O = O^T / l, transposed in registers; a row that sees nothing is 0, with lse -inf."""
        if back is not None:
            back.turn(st, st.o, lane)
            back.scaled(st.o)
        for i in each(nt * 2):
            for d in each(3):
                st.l[i] = st.l[i] + xor_shuffle(st.l[i], 4 << d)
        for t in each(nt):
            for j in each(2):
                row = w.row0[0] + w.warp * cols + t * 8 + lane % 4 * 2 + j
                at = t * 2 + j
                st.x[at] = 1.0  # factor of the sums
                if less(row, w.rows[0]):
                    w.query[0] = query_of(w, row)
                    w.head[0] = head_of(w, row)
                    if sinks:
                        st.p[2] = SINK[w.head[0]] * T.float32(1.4426950408889634)
                        st.p[0] = T.max(st.m[at], st.p[2])
                        st.x[at] = ex2(st.m[at] - st.p[0])
                        st.p[1] = st.l[at] * st.x[at] + ex2(st.p[2] - st.p[0])
                    else:
                        st.p[0] = st.m[at]
                        st.p[1] = st.l[at]
                    if lane // 4 == 0:
                        LSE[result_of(w)] = T.if_then_else(st.p[1] > 0, st.p[0] + log2(st.p[1]), -T.infinity("float32"))
                    st.x[at] = T.if_then_else(st.p[1] > 0, st.x[at] / st.p[1], T.float32(0))
                    if split:
                        for a in each(slices * 2):
                            sums = st.o[(a // 2 * nt + t) * 4 + a % 2 * 2 + j]
                            O[(*result_of(w), a * 8 + lane // 4)] = sums * st.x[at]
            row = w.row0[0] + w.warp * cols + t * 8 + lane // 4
            w.query[0] = query_of(w, row)
            w.head[0] = head_of(w, row)
            for a in each(0 if split else slices):
                for half in each(2):
                    at = (a * nt + t) * 4 + half * 2
                    st.w[half] = transpose(pack2(st.o[at] * st.x[t * 2], st.o[at + 1] * st.x[t * 2 + 1], bf16=bf16))
                if less(row, w.rows[0]):
                    for half in each(2):
                        store_words(1, O[w.query[0], w.head[0], a * 16 + half * 8 + lane % 4 * 2], st.w[half])

    return limits, load_q, finish


def _make_step_macro(p: Prefill, tile: Operands) -> Macro:
    """Macro `step`: a tile's keys and values, converted and multiplied with the warp's rows."""
    nt, slices, softcap, sink_tokens = p.row_tiles, p.slices, p.softcap, p.sink_tokens

    @T.macro
    def scores(of, base, head, st, w, lane):
        """s = scale * K Q^T of a tile, in units of log2."""
        of.key_params(st, base, lane)
        for i in each(nt * 4):
            st.s[i] = 0.0
        for j in each(of.k_loads):
            of.keys(st, base, head, j, lane)
            for i in each(of.k_atoms):
                for t in each(nt):
                    mma(of.k_kind, st.s, t * 4, st.a, i * 4, st.q, ((j * of.k_atoms + i) * nt + t) * 2)
        for i in each(nt * 4):
            st.s[i] = st.s[i] * w.scale
            if softcap:
                st.s[i] = w.cap * tanh(st.s[i] / w.cap)

    @T.macro
    def mask(st, w, lane):
        """Scores of tokens that a row does not see become -inf."""
        for t in each(nt):
            for e in each(4):
                at = w.token[0] + lane // 4 + e // 2 * 8
                st.s[t * 4 + e] = T.if_then_else(
                    among(at, st.hi[t * 2 + e % 2], w.span[0]), st.s[t * 4 + e], -T.infinity("float32")
                )
                st.s[t * 4 + e] = T.if_then_else(less(at, w.end[0]), st.s[t * 4 + e], -T.infinity("float32"))

    @T.macro
    def rescale(st):
        """A larger running maximum, if a score of any of the warp's rows asks for one."""
        for i in each(nt * 2):
            st.x[i] = T.max(st.s[i // 2 * 4 + i % 2], st.s[i // 2 * 4 + i % 2 + 2])
        st.f[0] = st.x[0] - st.m[0]
        for i in each(1, nt * 2):
            st.f[0] = T.max(st.f[0], st.x[i] - st.m[i])
        if any_lane(st.f[0] > T.float32(THRESHOLD)):
            for i in each(nt * 2):
                for d in each(3):
                    st.x[i] = T.max(st.x[i], xor_shuffle(st.x[i], 4 << d))
                st.x[i] = T.max(st.x[i], st.m[i])
                st.f[0] = ex2(st.m[i] - st.x[i])
                st.m[i] = st.x[i]
                st.l[i] = st.l[i] * st.f[0]
                for a in each(slices):
                    for half in each(2):
                        at = (a * nt + i // 2) * 4 + half * 2 + i % 2
                        st.o[at] = st.o[at] * st.f[0]

    @T.macro
    def weigh(of, base, st, w, lane):
        """O^T += V^T P^T of a tile."""
        for t in each(nt):
            for e in each(4):
                st.p[e] = ex2(st.s[t * 4 + e] - st.m[t * 2 + e % 2])
            for e in each(2):
                st.l[t * 2 + e] = st.l[t * 2 + e] + (st.p[e] + st.p[2 + e])
                st.b[t * 2 + e] = transpose(pack2(st.p[2 * e], st.p[2 * e + 1], bf16=of.layout.v.bf16))
        of.value_params(st, base, lane)
        if w.edge[0] > 0:
            of.guard(st, w.token[0], w.end[0], lane)
        for j in each(of.v_loads):
            of.values(st, base, (j * 32 + lane) * of.v_words, j, w.edge[0])
            for i in each(of.v_atoms):
                for t in each(nt):
                    mma(of.v_kind, st.o, ((j * of.v_atoms + i) * nt + t) * 4, st.a, i * 4, st.b, t * 2)

    def seen(of, w):
        """Whether a row of the warp sees a token of the tile; the first tokens come from the ring."""
        found = T.And(less(w.token[0], smaller(w.high[0], w.end[0])), less(w.low[0], w.token[0] + 16))
        return T.And(found, less(sink_tokens - 1, w.token[0])) if sink_tokens and of is tile else found

    @T.macro
    def step(of, base, head, st, token, end, w, lane):
        """One tile, unless none of the warp's rows sees a token of it."""
        w.token[0] = token
        w.end[0] = end
        w.here[0] = T.cast(seen(of, w), "int32")
        if w.here[0] > 0:
            w.edge[0] = T.cast(
                T.Or(less(smaller(w.least[0], w.end[0]), w.token[0] + 16), less(w.token[0], w.most[0])), "int32"
            )
            scores(of, base, head, st, w, lane)
            if w.edge[0] > 0:
                mask(st, w, lane)
            rescale(st)
            weigh(of, base, st, w, lane)

    return step


def build(target, **params: str | int | bool) -> PrimFunc:
    """The prim_func `main` for tiles of 8 * row_tiles * warps rows; params: the attributes of `Prefill`, of which new
    tokens are tiles.

    Shapes: Q and O [N, Hq, D] in `dtype`, N new tokens of all sequences; KV int32 [pages, Hkv, page words]; TABLE int32
    [B, most pages]; LEN int32 [B], tokens in all, the new ones included; CU int32 [B + 1], where each sequence's new
    tokens begin; RES int32 [slots, Hkv, words] and SLOT int32 [B]; NEW int32 [N / 64 + B, Hkv, words of 64 tokens],
    page CU[b] / 64 + b + i for tokens 64 i on; SK, SV f32 [Hkv, D] for static formats; SINK f32 [Hq]; LSE f32 [N, Hq],
    base 2. Whatever a kernel does not read may have one element. Scalars: softmax scale * log2(e), cap * log2(e),
    window in tokens (0: none), row tiles of the longest sequence.
    """
    p = Prefill(**params)
    g, layout, plain, nt, slices, stages = p.g, p.layout, p.g.plain, p.row_tiles, p.slices, p.stages
    threads, total = p.warps * 32, shared_words(g, stages)
    check_memory(target, stages, total)
    table = stages * g.stage_words  # static scales of keys
    tile = make_operand_macros(layout)
    spare = make_operand_macros(plain) if p.residual or p.fresh else None
    (args, d), step, (limits, load_q, finish) = arguments(p), _make_step_macro(p, tile), _make_row_macros(p, tile)
    source = attention_prelude("cp_async", "pack", extra=sources(layout, *((plain,) if spare else ())))

    @T.macro
    def move(ring, at, start, words, most, tx):
        """By all threads, 16 bytes each at a time."""
        for e in each(-(-most // (4 * threads))):
            if less((e * threads + tx) * 4, words):
                cp_async(ring[at + (e * threads + tx) * 4], at32(start, (e * threads + tx) * 4))

    stream = make_stage_macros(p, d, 8 * nt * p.warps, move)

    @T.macro
    def advance(x, ring, w, i, tx):
        """Waits for stage i; the stage before it has been read, and its slot takes another one."""
        cp_wait(stages - 2)
        T.sync_threads()
        if less(i + stages - 1, w.count[0]):
            stream.fetch(x, ring, w, i + stages - 1, w.fill[0] * g.stage_words, tx)
        cp_commit()
        w.fill[0] = T.if_then_else(w.fill[0] == stages - 1, 0, w.fill[0] + 1)

    @T.prim_func
    def main(
        Q: args.Q, KV: args.KV, TABLE: args.TABLE, LEN: args.LEN, CU: args.CU, RES: args.RES, SLOT: args.SLOT,
        NEW: args.NEW, SK: args.SK, SV: args.SV, SINK: args.SINK, O: args.O, LSE: args.LSE,
        scale: T.float32, cap: T.float32, window: T.int32, tiles: T.int32,
    ):  # fmt: skip
        with T.Kernel(d.hk, tiles, d.b, threads=threads, prelude=source) as (h, y, b):
            ring = T.alloc_shared((total,), "int32")
            tx = T.get_thread_binding()
            lane = tx % 32
            x = Tensors(Q, KV, TABLE, LEN, CU, RES, SLOT, NEW, SK, SV, SINK, O, LSE)
            f32 = {"o": slices * nt * 4, "s": nt * 4, "m": nt * 2, "l": nt * 2, "x": nt * 2, "f": 2, "p": 4}
            f32 |= {"rotated": p.head_dim // 4} if layout.k.rotated else {}
            f32 |= {"turned": 1} if layout.k.rotated or layout.v.rotated else {}
            sv = T.alloc_local((slices * 4 if tile.layout.v.static else 1,), "uint32")
            st = Buffers(
                **{name: (n, "float32") for name, n in f32.items()}, q=(slices * nt * 2, "uint32"), a=(32, "uint32"),
                b=(nt * 2, "uint32"), **STATE, hi=(nt * 2, "int32"), sv=sv,
            )  # fmt: skip
            w = scalars(*p.integers(), *LIMITS)
            vars(w).update(b_=b, h=h, warp=tx // 32, scale=scale, cap=cap)
            stream.begin(x, w, y, window)
            if less(w.row0[0], w.rows[0]):
                w.count[0] = w.na[0] + w.nb[0] + w.nc[0]
                w.slot[0] = 0
                for i in each(stages - 1):
                    if less(i, w.count[0]):
                        stream.fetch(x, ring, w, i, i * g.stage_words, tx)
                    cp_commit()
                w.fill[0] = stages - 1
                for i in each(slices * nt * 4):
                    st.o[i] = 0.0
                for i in each(nt * 2):
                    st.m[i] = T.float32(LOWEST)
                    st.l[i] = 0.0
                limits(st, w, window, lane)
                load_q(Q, st, w, lane)
                if tile.layout.k.static:
                    tile.share_static(SK, ring, table, h, tx, threads)
                if tile.layout.v.static:
                    tile.load_static(SV, sv, 0, slices, h, lane)
                if spare is not None:
                    for i in T.serial(w.nb[0] + w.nc[0]):
                        advance(x, ring, w, i, tx)
                        for r in T.serial(STAGE // 16):
                            base = T.access_ptr(
                                ring[w.slot[0] * g.stage_words + r * plain.tile_words], "r", plain.tile_words
                            )
                            step(spare, base, base, st, stream.token(w, i) + r * 16, stream.end(w, i), w, lane)
                        w.slot[0] = T.if_then_else(w.slot[0] == stages - 1, 0, w.slot[0] + 1)
                for i in T.serial(w.nb[0] + w.nc[0], w.count[0]):
                    advance(x, ring, w, i, tx)
                    for r in T.serial(STAGE // 16):
                        at = w.slot[0] * g.stage_words
                        step(
                            tile, T.access_ptr(ring[at + g.tile_at(r)], "r", layout.tile_words),
                            T.access_ptr(ring[table if tile.layout.k.static else at + g.channel_at(r)], "r", 1),
                            st, stream.token(w, i) + r * 16, w.packed[0], w, lane,
                        )  # fmt: skip
                    w.slot[0] = T.if_then_else(w.slot[0] == stages - 1, 0, w.slot[0] + 1)
                finish(O, LSE, SINK, st, w, lane)

    return main
