"""Tile program of prefill attention on wgmma (sm_90a): keys and values are converted once for all rows of a CTA.

A warpgroup of converters turns each stage of 64 packed tokens into two operands in shared memory, keys and values
[token, dim]. Warpgroups of consumers own 64 rows each: S = Q K^T reads K from shared memory, and of Q what registers
have no room for; O += P V has P in registers, where the softmax leaves it (FlashAttention-3, arXiv 2407.08608,
section 3).
Were every warpgroup to convert for its own rows, products would be narrower, conversions as many as warpgroups.

The converters' first thread keeps a ring of stages full by bulk copies. New tokens come as operands already (images,
new_tokens_program.py) and pass by the ring and the converters: shared memory is what such products are short of.
Operands have two or three buffers, keys and values apart: S of a stage is multiplied while the softmax of the one
before waits for nothing, and P V of a stage runs under the softmax of the next one. Warpgroups issue their products in
turn, so that one's softmax falls in the others' products. No product is under way when the loop goes round: ptxas would
serialize all of them.

The running maximum is lazy, for each warp: its sums are rescaled when a score exceeds it by 2^4.
"""

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.attention.device.calls import among, any_lane, at8, ex2, fma, log2, tanh, uniform, xor_shuffle
from terrazzo.ops.attention.device.rotation_macros import make_rotation, row_sum_stages
from terrazzo.ops.attention.device.tile_macros import LOWEST, THRESHOLD, each, less, smaller
from terrazzo.ops.attention.prefilling.prefill_converters import (
    Bars,
    Shared,
    make_buffer_macros,
    make_converter_macro,
    make_store_macro,
    piece,
)
from terrazzo.ops.attention.prefilling.prefill_operands import STATE, Operands, make_operand_macros, sources
from terrazzo.ops.attention.prefilling.prefill_rows import head_of, make_q_macros, query_of, seen_by, span
from terrazzo.ops.attention.prefilling.prefill_stages import (
    STAGE,
    Geometry,
    Prefill,
    Stream,
    Tensors,
    arguments,
    check_memory,
    make_stage_macros,
)
from terrazzo.ops.tiles.calls import (
    bulk,
    copy16,
    ldmatrix4,
    opaque,
    pack2,
    syncwarp,
    turn_pass,
    turn_wait,
    wg_sync,
    wgmma,
)
from terrazzo.ops.tiles.cuda.attention import BYTES_ON, attention_prelude
from terrazzo.ops.tiles.language import T
from terrazzo.ops.tiles.program import OWN_BARRIERS_AND_BOUNDS
from terrazzo.ops.tiles.types import Buffers, Call, Macro, PrimFunc, scalars

PASS_CONFIGS = OWN_BARRIERS_AND_BOUNDS
ROWS = 64  # of a warpgroup: the m64 of its products
REGISTERS = {1: (128, 240), 2: (88, 208), 3: (56, 152)}  # consumer warpgroups -> a converter's, a consumer's
NT = STAGE // 8  # n8 tiles of S
OTHERS = 28
"""Registers of a consumer beside sums, weights and Q: with fewer left, 192 rows spill."""
STATE_OF_ROWS = ("count", "slot", "parity", "to", "turn", "least", "high", "query", "head", "edge", "token", "end")


def operand_words(head_dim: int, wgs: int, buffers: int) -> int:
    """int32 words of Q of all rows, and of `buffers` stages of keys and of values."""
    return (wgs * ROWS + 2 * buffers * STAGE) * head_dim // 2


def held_slices(head_dim: int, wgs: int) -> int:
    """How many k16 slices of Q consumers hold in registers: S = Q K^T is short of shared memory's bandwidth."""
    sums, weights = head_dim // 2 + STAGE // 2, STAGE // 4
    room = 0 if head_dim > 128 else REGISTERS[wgs][1] - sums - weights - OTHERS  # of 256 any would spill
    return min(head_dim // 16, max(0, room) // 4)


def shared_words(g: Geometry, wgs: int, stages: int, buffers: int) -> int:
    """int32 words of shared memory: Q, operands, static scales of keys, the ring."""
    static = g.layout.head_dim if g.layout.k.static else 0
    return operand_words(g.layout.head_dim, wgs, buffers) + static + stages * g.stage_words


def _make_product_macros(f: Shared, tile: Operands, in_q: Call) -> tuple[Macro, Macro, Macro, Macro]:
    """Macros `limits`, `hold_q`, `scores` and `weigh`: what rows see, and their products."""
    D, slices, mt, held = f.of.head_dim, f.of.slices, f.of.head_dim // 64, held_slices(f.of.head_dim, f.wgs)
    stage_bytes, keys_at, values_at, nt = f.stage_bytes, f.keys_at, f.values_at, NT

    @T.macro
    def limits(st, w, lane):
        """Ends of what the lane's two rows see, and of what the warp's first and last row do; rows past the sequence's
        are as its last one."""
        row = w.row0[0] + w.wg * ROWS + w.warp * 16
        w.least[0] = seen_by(w, smaller(row, w.rows[0] - 1))
        w.high[0] = seen_by(w, smaller(row + 15, w.rows[0] - 1))
        for half in each(2):
            st.hi[half] = seen_by(w, smaller(row + half * 8 + lane // 4, w.rows[0] - 1))

    @T.macro
    def hold_q(space, st, w, lane):
        """The first slices of the warp's rows of Q as operand registers."""
        for j in each(held):
            row = w.warp * 16 + lane // 8 % 2 * 8 + lane % 8
            ldmatrix4(st.q[j * 4], at8(space[0], in_q(row, j * 2 + lane // 16, w)))
        T.warpgroup_fence_operand(st.q, 0, held * 4)

    @T.macro
    def scores(desc, st, w, to):
        """S = Q K^T of the keys in buffer `to`."""
        kind = tile.k_kind
        T.warpgroup_fence_operand(st.s, 0, nt * 4)
        T.warpgroup_arrive()
        for j in each(slices):
            at = keys_at // 16 + to * (stage_bytes // 16) + j // 4 * (STAGE * 8) + j % 4 * 2
            if j < held:
                wgmma(STAGE, (kind, kind), st.s, 0, st.q, j * 4, desc, at, j > 0)
            else:
                T.ptx_wgmma_ss(
                    "float32", f"m64n{STAGE}k16", True, True, kind, kind, "fp32",
                    desc.data, (w.wg * mt + j // 4) * (ROWS * 8) + j % 4 * 2,
                    desc.data, at, st.s.data, 0, T.bool(j > 0), 1, 1,
                )  # fmt: skip
        T.warpgroup_commit_batch()

    @T.macro
    def weigh(across, st, to):
        """O += P V of the values in buffer `to`; across: the descriptor of a matrix [token, dim]."""
        T.warpgroup_fence_operand(st.p, 0, nt * 2)
        T.warpgroup_fence_operand(st.o, 0, D // 2)
        T.warpgroup_arrive()
        for r in each(STAGE // 16):
            at = values_at // 16 + to * (stage_bytes // 16) + r * 128
            wgmma(D, (tile.v_kind, tile.v_kind), st.o, 0, st.p, r * 4, across, at, k_major=False)
        T.warpgroup_commit_batch()

    return limits, hold_q, scores, weigh


def _make_softmax_macros(p: Prefill, tile: Operands, stream: Stream) -> tuple[Macro, Macro]:
    """Macros `softmax` and `take`: scores to weights, and weights to an operand."""
    D, nt, softcap, sink_tokens = p.head_dim, NT, p.softcap, p.sink_tokens

    def inside(w, at):
        """Whether the stage has token `at`."""
        return among(at, w.end[0], w.end[0] - w.from_[0]) if sink_tokens else less(at, w.end[0])

    def outside(w):
        """Whether tokens of the stage may lie outside of a row's limits, or are read elsewhere."""
        found = T.Or(
            less(smaller(w.least[0], w.end[0]), w.token[0] + STAGE), less(w.token[0], w.high[0] - span(w.window))
        )
        return T.Or(found, less(w.token[0], w.from_[0])) if sink_tokens else found

    @T.macro
    def mask(st, w, lane):
        """Scores of tokens that a row does not see become -inf."""
        opaque(st.hi[0])  # differences to 16 columns are not kept from stage to stage, and spilled
        opaque(st.hi[1])
        opaque(w.end[0])
        for j in each(nt):
            for half in each(2):
                for e in each(2):
                    at = w.token[0] + j * 8 + lane % 4 * 2 + e
                    seen = among(at, st.hi[half], span(w.window))
                    st.s[j * 4 + half * 2 + e] = T.if_then_else(
                        seen, st.s[j * 4 + half * 2 + e], -T.infinity("float32")
                    )
                    st.s[j * 4 + half * 2 + e] = T.if_then_else(
                        inside(w, at), st.s[j * 4 + half * 2 + e], -T.infinity("float32")
                    )

    @T.macro
    def softmax(st, w, i, lane):
        """Weights of stage i in place of its scores, and the factors of what was summed before."""
        stream.locate(w, i)
        if sink_tokens:  # the first packed tokens are read from the ring
            w.from_[0] = T.if_then_else(i < w.nb[0] + w.nc[0], 0, sink_tokens)
        w.edge[0] = T.cast(outside(w), "int32")
        if softcap:
            for e in each(nt * 4):
                st.s[e] = w.cap * tanh(st.s[e] * w.scale / w.cap)
        if w.edge[0] > 0:
            mask(st, w, lane)
        for half in each(2):
            st.x[0] = T.max(st.s[half * 2], st.s[half * 2 + 1])
            for j in each(1, nt):
                st.x[0] = T.max(st.x[0], T.max(st.s[j * 4 + half * 2], st.s[j * 4 + half * 2 + 1]))
            for d in each(2):
                st.x[0] = T.max(st.x[0], xor_shuffle(st.x[0], 1 << d))
            if not softcap:  # the scale is positive
                st.x[0] = st.x[0] * w.scale
            st.x[1] = T.if_then_else(st.x[0] > st.m[half] + T.float32(THRESHOLD), st.x[0], st.m[half])
            st.f[half] = ex2(st.m[half] - st.x[1])
            st.m[half] = st.x[1]
            st.l[half] = st.l[half] * st.f[half]
            for j in each(nt):
                for e in each(2):
                    at = j * 4 + half * 2 + e
                    st.s[at] = ex2(st.s[at] - st.m[half] if softcap else fma(st.s[at], w.scale, -st.m[half]))
                    st.l[half] = st.l[half] + st.s[at]

    @T.macro
    def take(st):
        """P in the values' dtype, and sums relative to the new maxima; no product is under way."""
        if any_lane(T.min(st.f[0], st.f[1]) < T.float32(1)):
            for i in each(D // 2):
                st.o[i] = st.o[i] * st.f[i % 4 // 2]
        for i in each(nt * 2):
            st.p[i] = pack2(st.s[i * 2], st.s[i * 2 + 1], bf16=tile.layout.v.bf16)

    return softmax, take


def _make_consumer_macro(f: Shared, scores: Macro, weigh: Macro, softmax: Macro, take: Macro) -> Macro:
    """Macro `consume`: all stages of a warpgroup's rows."""
    D, wgs, nt, buffers = f.of.head_dim, f.wgs, NT, f.of.buffers
    following, advance = make_buffer_macros(buffers)

    @T.macro
    def consume(desc, across, bars, st, w, lane):
        """All stages; at the top of the loop the weights of stage i are in st.s, and its values in buffer w.to."""
        if wgs > 1:
            if w.wg == wgs - 1:
                turn_pass(0)
        T.barrier_wait(bars.keys[0], 0)
        scores(desc, st, w, 0)
        T.warpgroup_wait(0)
        T.warpgroup_fence_operand(st.s, 0, nt * 4)
        if lane == 0:
            T.barrier_arrive(bars.keys_free[0])
        softmax(st, w, 0, lane)
        for i in T.serial(w.count[0] - 1):
            take(st)
            T.barrier_wait(bars.keys[following(w)], w.turn[0] ^ T.cast(w.to[0] == buffers - 1, "int32"))
            if wgs > 1:
                turn_wait(w.wg)
            scores(desc, st, w, following(w))
            if wgs > 2:
                turn_pass((w.wg + 1) % wgs)
            T.barrier_wait(bars.values[w.to[0]], w.turn[0])
            weigh(across, st, w.to[0])
            if wgs == 2:  # of two, each keeps its turn for both products
                turn_pass((w.wg + 1) % wgs)
            T.warpgroup_wait(1)
            T.warpgroup_fence_operand(st.s, 0, nt * 4)
            if lane == 0:
                T.barrier_arrive(bars.keys_free[following(w)])
            softmax(st, w, i + 1, lane)
            T.warpgroup_wait(0)
            T.warpgroup_fence_operand(st.o, 0, D // 2)
            if lane == 0:
                T.barrier_arrive(bars.values_free[w.to[0]])
            advance(w)
        take(st)
        T.barrier_wait(bars.values[w.to[0]], w.turn[0])
        weigh(across, st, w.to[0])
        if wgs > 1:
            if w.wg == 0:
                turn_wait(0)  # what was passed last
        T.warpgroup_wait(0)
        T.warpgroup_fence_operand(st.o, 0, D // 2)

    return consume


def _make_result_macro(p: Prefill, in_q: Call) -> Macro:
    """Macro `finish`: a warpgroup's results, or partial ones."""
    store_atom = make_store_macro()
    D, slices, mt, row_chunks, bf16 = p.head_dim, p.slices, p.head_dim // 64, p.head_dim // 8, p.bf16
    sinks, split, result_of = p.sinks, p.split, p.result_of
    back = make_rotation(D, D // 2, row_sum_stages(D)) if p.layout.v.rotation else None

    @T.macro
    def store_rows(O, space, st, w, lane):
        """The rows by way of their place in Q."""
        for i in each(D // 2):
            st.o[i] = st.o[i] * st.f[i % 4 // 2]
        for a in each(slices):
            for i in each(4):
                st.w[i] = pack2(st.o[a * 8 + i * 2], st.o[a * 8 + i * 2 + 1], bf16=bf16)
            store_atom(
                space, (w.wg * mt + a // 4) * (ROWS * 128) + piece(lane, w.warp * 16, a % 4 * 2), st.w, 0
            )  # fmt: skip
        syncwarp()  # a warp's rows are its own
        for e in each(16 * row_chunks // 32):
            row = w.warp * 16 + (e * 32 + lane) // row_chunks
            chunk = (e * 32 + lane) % row_chunks
            if less(w.row0[0] + w.wg * ROWS + row, w.rows[0]):
                w.query[0] = query_of(w, w.row0[0] + w.wg * ROWS + row)
                w.head[0] = head_of(w, w.row0[0] + w.wg * ROWS + row)
                copy16(O[w.query[0], w.head[0], chunk * 8], at8(space[0], in_q(row, chunk, w), "w"))

    @T.macro
    def finish(O, LSE, SINK, space, st, w, lane):
        """O / l, by stmatrix into the rows' place in Q; a row that sees nothing is 0, with lse -inf."""
        if back is not None:
            back.turn(st, st.o, lane)
            back.scaled(st.o)
        for half in each(2):
            for d in each(2):
                st.l[half] = st.l[half] + xor_shuffle(st.l[half], 1 << d)
            row = w.row0[0] + w.wg * ROWS + w.warp * 16 + half * 8 + lane // 4
            st.f[half] = 1.0  # factor of the sums
            if less(row, w.rows[0]):
                w.query[0] = query_of(w, row)
                w.head[0] = head_of(w, row)
                if sinks:
                    st.x[0] = SINK[w.head[0]] * T.float32(1.4426950408889634)
                    st.x[1] = T.max(st.m[half], st.x[0])
                    st.f[half] = ex2(st.m[half] - st.x[1])
                    st.l[half] = st.l[half] * st.f[half] + ex2(st.x[0] - st.x[1])
                    st.m[half] = st.x[1]
                if lane % 4 == 0:
                    LSE[result_of(w)] = T.if_then_else(
                        st.l[half] > 0, st.m[half] + log2(st.l[half]), -T.infinity("float32")
                    )
                st.f[half] = T.if_then_else(st.l[half] > 0, st.f[half] / st.l[half], T.float32(0))
                if split:
                    for i in each(D // 4):
                        O[(*result_of(w), i // 2 * 8 + lane % 4 * 2 + i % 2)] = (
                            st.o[i // 2 * 4 + half * 2 + i % 2] * st.f[half]
                        )
        if not split:
            store_rows(O, space, st, w, lane)

    return finish


def build(target, **params: str | int | bool) -> PrimFunc:
    """The prim_func `main` for tiles of 16 * warps rows; params: the attributes of `Prefill`, row_tiles 8, 4, 8 or 12
    warps and 2 buffers or more; shapes as in prefill_mma.build, but NEW holds the images of new tokens
    (new_tokens_program.py).
    """
    p = Prefill(**params)
    g, layout, plain, D, slices, stages, buffers = p.g, p.layout, p.g.plain, p.head_dim, p.slices, p.stages, p.buffers
    warps, wgs, ct, nt = p.warps, p.warps // 4, p.warps * 32, NT  # ct: consumer threads
    total, held = shared_words(g, wgs, stages, buffers), held_slices(D, wgs)
    if warps not in (4, 8, 12) or p.row_tiles * 8 != ROWS:
        raise ArgumentError("warps", (warps, p.row_tiles), "4, 8 or 12 warps, 8 row tiles", "use 8 and 8")
    check_memory(target, stages, total)
    f = Shared(
        p, wgs * ROWS * D * 2, (wgs * ROWS + buffers * STAGE) * D * 2, operand_words(D, wgs, buffers),
        total - stages * g.stage_words, total,
    )  # fmt: skip
    tile = make_operand_macros(layout)
    spare = make_operand_macros(plain) if p.residual else None
    args, d = arguments(p)
    load_q, in_q = make_q_macros(ROWS, D, p.bf16, tile.layout.k.bf16, bool(layout.k.rotation))
    source = attention_prelude(
        "pack", "bulk", "lds", "warpgroup", "stmatrix", "stmatrix_trans", "ldmatrix", *(["turns"] if wgs > 1 else []),
        extra=(BYTES_ON, *sources(layout, *((plain,) if spare else ()))),
    )  # fmt: skip

    @T.macro
    def move(ring, at, start, words, most, io):
        """By one thread; io: the barriers of the ring, and the register that names one of them."""
        T.mbarrier_expect_tx(io[0][io[1][0]], words * 4)
        bulk(ring[at], start, words * 4, io[0][io[1][0]])

    stream = make_stage_macros(p, d, ROWS * wgs, move)
    limits, hold_q, scores, weigh = _make_product_macros(f, tile, in_q)
    produce, finish = make_converter_macro(f, tile, spare, stream), _make_result_macro(p, in_q)
    consume = _make_consumer_macro(f, scores, weigh, *_make_softmax_macros(p, tile, stream))

    @T.prim_func
    def main(
        Q: args.Q, KV: args.KV, TABLE: args.TABLE, LEN: args.LEN, CU: args.CU, RES: args.RES, SLOT: args.SLOT,
        NEW: args.NEW, SK: args.SK, SV: args.SV, SINK: args.SINK, O: args.O, LSE: args.LSE,
        scale: T.float32, cap: T.float32, window: T.int32, tiles: T.int32,
    ):  # fmt: skip
        with T.Kernel(d.hk, tiles, d.b, threads=ct + 128, prelude=source) as (h, y, b):
            space = T.alloc_shared((total,), "int32")
            full = T.alloc_barrier([1] * stages)
            keys = T.alloc_barrier([4] * buffers)
            values = T.alloc_barrier([4] * buffers)
            keys_free = T.alloc_barrier([warps] * buffers)
            values_free = T.alloc_barrier([warps] * buffers)
            bars = Bars(full, keys, values, keys_free, values_free)
            tx = T.get_thread_binding()
            lane = tx % 32
            f32 = {"o": D // 2, "s": nt * 4, "m": 2, "l": 2, "f": 2, "x": 2}
            f32 |= {"rotated": 8} if layout.k.rotated else {}
            f32 |= {"turned": 1} if layout.k.rotated or layout.v.rotated else {}
            st = Buffers(
                **{name: (n, "float32") for name, n in f32.items()}, p=(nt * 2, "uint32"), a=(32, "uint32"),
                q=(max(1, held * 4), "uint32"), **STATE, hi=(2, "int32"),
            )  # fmt: skip
            sv = T.alloc_local((slices * 4 if tile.layout.v.static else 1,), "uint32")
            vars(st).update(sv=sv)
            desc = T.alloc_wgmma_desc()
            across = T.alloc_wgmma_desc()
            w = scalars(*p.integers(), *STATE_OF_ROWS, *(["from_"] if p.sink_tokens else []))
            if not (p.residual or p.fresh):
                vars(w).update(end=w.packed)
            wg = T.alloc_local((1,), "int32")
            wg[0] = uniform(tx // 128)
            vars(w).update(b_=b, space=space, window=window, h=h, wg=wg[0], warp=tx // 32 % 4, scale=scale, cap=cap)
            x = Tensors(Q, KV, TABLE, LEN, CU, RES, SLOT, NEW, SK, SV, SINK, O, LSE)
            stream.begin(x, w, y, window)
            w.count[0] = w.na[0] + w.nb[0] + w.nc[0]
            w.slot[0] = 0
            w.parity[0] = 0
            w.to[0] = 0
            w.turn[0] = 0
            if tx >= ct:
                T.dec_max_nreg(REGISTERS[wgs][0])
                produce(x, space, bars, st, w, tx, lane)
            else:
                T.inc_max_nreg(REGISTERS[wgs][1])
                if less(w.row0[0], w.rows[0]):
                    T.initialize_wgmma_descriptor(desc, T.access_ptr(space[0], "r"), 1, 1, 64)
                    T.initialize_wgmma_descriptor(across, T.access_ptr(space[0], "r"), 1, STAGE * 8, 64)
                    limits(st, w, lane)
                    load_q(Q, space, st, w, tx % 128)
                    for i in each(D // 2):
                        st.o[i] = 0.0
                    for half in each(2):
                        st.m[half] = T.float32(LOWEST)
                        st.l[half] = 0.0
                    T.fence_proxy_async()  # wgmma reads Q through the asynchronous proxy
                    wg_sync(w.wg)
                    if held:
                        hold_q(space, st, w, lane)
                    if less(0, w.count[0]):
                        consume(desc, across, bars, st, w, lane)
                    finish(O, LSE, SINK, space, st, w, lane)

    return main
