"""Tile program for 17 tokens and more on sm_80, sm_86 and sm_89: mma.sync m16n8k32 behind a cp.async ring.

A CTA computes 16 * row_blocks * (warps / token_warps) output features by `block_tokens` tokens. A stage of the ring
holds 128 k: X swizzled by 16-byte chunks, and whole units of weights, words and parameters. The weights are the A
operand: a warp fetches the words of 16 rows and 64 k with one LDS.128 per lane and converts them in registers. X comes
by ldmatrix (ops/tiles/mma_tiles.py).

A pass is one k32 step. While its MMAs run, the warp converts the nibbles of the next pass into the other half of `a`
and reloads each pair of X fragments right after its last use. The last pass of a stage starts with the only block
barrier: the stage has been read by then, so its slot takes the copy for `stages` stages later, and the next stage is
complete.

Sums are int32; with e4m3 they are float32, and a tensor-core instruction's own sums last for one k32 step (the tensor
core keeps about 14 bits of them), after which they are scaled by the factors of the group and added. With kc > 1 the
CTAs of a tile share k; the last to arrive adds the kc partial tiles.

Weights of bytes (W8A8) are operands as they lie: ldmatrix fetches the fragments of the next pass in the place of a
conversion (`direct_warps`).

With experts, a CTA finds its own as in ops/linear/multistage.py.
"""

from dataclasses import dataclass

from terrazzo.ops.linear.bytes import direct_warps, fp8_problem
from terrazzo.ops.linear.bytes.operand import ByteOperand
from terrazzo.ops.linear.bytes.operand import operand_macros as byte_macros
from terrazzo.ops.linear.bytes.problem import BLOCK_WORDS, RECORD_BYTES, UNIT_K, Gemm
from terrazzo.ops.tiles import mma_tiles
from terrazzo.ops.tiles.calls import call, cp_commit, cp_wait, last_arrival, lds32, lds128, pack2, rescale, syncwarp
from terrazzo.ops.tiles.cuda.experts import EXPERT_SEARCH
from terrazzo.ops.tiles.cuda.text import prelude
from terrazzo.ops.tiles.cuda.tiles import MMA_E4M3, MMA_E4M3_GROUPS, MMA_TILES
from terrazzo.ops.tiles.language import T
from terrazzo.ops.tiles.mma_tiles import Tile, element, sts32
from terrazzo.ops.tiles.program import OWN_BARRIERS_AND_BOUNDS, take
from terrazzo.ops.tiles.types import Buffers, Call, Expr, Macro, PrimFunc, Scalar, scalars

PASS_CONFIGS = OWN_BARRIERS_AND_BOUNDS
MOST_SUMS = 128  # accumulator registers of a thread beside two sets of operands
MOST_E4M3 = 32  # and beside the products of two passes, which ptxas lets wait for their scaling


def shared_bytes(gemm: Gemm, shape: Tile) -> int:
    """Shared memory of a CTA, bytes."""
    flag = 1024 if shape.kc > 1 else 0  # one word, and the alignment of what follows
    return shape.x_bytes + shape.stages * shape.blocks * gemm.unit_words * 4 + flag


def build(target, *, experts: int = 0, **params: Scalar):
    """The prim_func `main(X, W, S, XS, RS, B, WS, SEM, Y)` for any M; with experts, int32 [E + 1] comes last.

    Shapes: X int8 [M, k]; W int32 [Kp/128, Np/64, unit words]; S f32 [Np] channel scales; XS f32 [M] token scales; RS
    int32 [M] sums of the rows of X (read by "unsigned" only); B f32 [n] (one element without a bias); Y [M, n] in
    `out_dtype`. With kc > 1, WS int32 [tiles, kc, A/4, 32 * warps, 4] with A = row_blocks * block_tokens / token_warps
    / 2, and SEM int32 [tiles], zero before the first launch and after each one, where tiles is ceil(M / block_tokens) *
    ceil(Np / rows of a CTA) or more; with kc = 1 they are unused, [1, 1, 1, 1, 4] and [1]. With `dequantization`
    "e4m3", the bytes of X are e4m3, RS [1] is not read, and WS is f32. Those of `direct.NUMERICS` take S, XS and RS as
    `stream_k` does.

    With E = `experts`, W, S and B hold one matrix after the other: [E * Kp/128, ...], [E * Np], [E * n]; expert e owns
    the rows offsets[e] .. offsets[e + 1] - 1 of X and Y, in ascending order. Rows of no expert are not written. Token
    blocks are as many as in ops/linear/multistage.py.

    Args:
        target: a Target whose shared memory the ring must fit in, or None.
        params: of `fp8_problem.of` and `Tile`, whose stages hold 128 k.

    Raises:
        ArgumentError: a format or a configuration outside these limits, or one that needs more than 255 registers.
    """
    gemm = take(fp8_problem.of, params)
    shape, e4m3 = Tile(**params), gemm.float_sums and gemm.dequantization != "fast"
    most = (MOST_E4M3 if e4m3 else MOST_SUMS) * 2
    shape.check(units=gemm.units, most=most, need=shared_bytes(gemm, shape), target=target)
    return program(gemm, shape, experts)


def operand_macros(gemm: Gemm, shape: Tile, operand: ByteOperand) -> tuple[Macro, Macro, Macro]:
    """Macros `load_words` and `load_params`, from a stage of the ring, and `convert`, by `operand`."""

    @T.macro
    def load_words(Ws, w, slot, h, tile, lane):
        """Words of 64 k: block h of the unit."""
        for m in T.unroll(shape.row_blocks):
            at = (
                slot * (shape.blocks * gemm.unit_words)
                + (tile + m) // 4 * gemm.unit_words
                + h * BLOCK_WORDS
                + (tile + m) % 4 * 128
            )
            lds128(w[m * 4], Ws[at + lane * 4])

    @T.macro
    def load_params(Ws, v, slot, q, tile, lane):
        """Parameters of rows g and g + 8 in group q of the unit: factors and offsets, or (e4m3) factors."""
        for m in T.unroll(shape.row_blocks):
            at = slot * (shape.blocks * gemm.unit_words) + (tile + m) // 4 * gemm.unit_words + 2 * BLOCK_WORDS
            word = lds32(Ws[at + q * (RECORD_BYTES // 4) + (tile + m) % 4 * 8 + lane // 4])
            if gemm.float_sums:
                operand.factors(v, m * 2, word)
            else:
                call("lqq_params", word, T.access_ptr(v[m * 4], "w", 4))

    @T.macro
    def convert(w, a, v, o, m, step):
        """The nibbles of pass `step`, low ones of w first, into its half of a, for row tile m."""
        for r in T.unroll(4):  # registers 0 and 2 hold row g, 1 and 3 row g + 8
            operand.word(w, m * 4 + r, o, v, m * 4 + r % 2 * 2)
            a[(step % 2 * shape.row_blocks + m) * 4 + r] = o[step % 2]

    return load_words, load_params, convert


def store_macros(gemm: Gemm, shape: Tile, experts: int) -> tuple[Call, Macro]:
    """Function `state`, the registers of values that wait; macro `store`."""
    rb, pairs, blocks, pitch = shape.row_blocks, shape.pairs, shape.blocks, shape.out_pitch
    n, raw, unsigned, bf16 = gemm.n, gemm.raw, gemm.unsigned, gemm.out_dtype == "bfloat16"
    zeros, of_matrix = gemm.zeros, gemm.row_blocks * 64
    stage, write = mma_tiles.out_macros(shape, n=n, vec=2)
    first = lambda c, count: c.expert[0] * count if experts else 0  # of the expert's rows
    end = lambda c, Y: c.end[0] if experts else Y.shape[0]

    def state() -> Buffers:
        rows = rb * 2, "float32"
        return Buffers(
            s=rows, w=(rb * 2, "int32") if zeros else None, b=rows, x=(4, "float32"), r=(4, "int32"), f=(2, "float32"),
            o=(1, "uint32"),
        )  # fmt: skip

    @T.macro
    def store(io, c):
        """16 tokens at a time: scaled, transposed in registers, staged by the warp, written 16 bytes a lane; raw sums
        as they are."""
        row0 = c.rows[0] * (blocks * 64) + io.tile * 16
        if zeros:
            for i in T.unroll(rb * 2):
                row = row0 + i // 2 * 16 + i % 2 * 8 + io.lane // 4
                io.held.w[i] = T.cast(io.S[first(c, 2 * of_matrix) + of_matrix + T.min(row, of_matrix - 1)], "int32")
        if not raw:
            for i in T.unroll(rb * 2):
                row = row0 + i // 2 * 16 + i % 2 * 8 + io.lane // 4
                if gemm.blocks:
                    io.held.s[i] = 1.0  # entered the sums
                else:
                    io.held.s[i] = io.S[first(c, gemm.channels * of_matrix) + T.min(row, of_matrix - 1)]
                if gemm.bias:
                    io.held.b[i] = io.B[first(c, n) + T.min(row, n - 1)]
                else:
                    io.held.b[i] = 0.0
        for p in T.unroll(pairs):
            token0 = c.tokens[0] + io.column * shape.tokens + p * 16
            for i in T.unroll(4):
                token = T.min(token0 + i // 2 * 8 + io.lane % 4 * 2 + i % 2, io.Y.shape[0] - 1)
                if gemm.blocks or gemm.grouped_tokens:
                    io.held.x[i] = 1.0  # entered the sums
                elif not raw:
                    io.held.x[i] = io.XS[token]
                if unsigned or zeros:
                    io.held.r[i] = io.RS[token]
            syncwarp()
            for m in T.unroll(rb):
                for i in T.unroll(8):
                    at = (m * pairs + p) * 8 + i
                    if unsigned:
                        io.acc[at] = io.acc[at] - io.held.r[i // 4 * 2 + i % 2] * 128
                    if zeros:
                        io.acc[at] = io.acc[at] - io.held.r[i // 4 * 2 + i % 2] * io.held.w[m * 2 + i % 4 // 2]
                    if raw:
                        token = token0 + i // 4 * 8 + io.lane % 4 * 2 + i % 2
                        row = row0 + m * 16 + i % 4 // 2 * 8 + io.lane // 4
                        if T.And(token < end(c, io.Y), row < n):
                            sts32(element(4, io.Y, "w", token, n, row), T.reinterpret(io.acc[at], "uint32"))
                    else:
                        io.held.f[i % 2] = rescale(
                            io.acc[at],
                            io.held.s[m * 2 + i % 4 // 2],
                            io.held.x[i // 4 * 2 + i % 2],
                            io.held.b[m * 2 + i % 4 // 2],
                        )
                        if i % 2 == 1:
                            io.held.o[0] = pack2(io.held.f[0], io.held.f[1], bf16=bf16)
                            stage(io.Xs, io.held.o, io.warp * (16 * pitch), m, i // 2, io.lane)
            if not raw:
                syncwarp()
                write(io.Y, io.Xs, io.warp * (16 * pitch), token0, row0, end(c, io.Y), io.lane)

    return state, store


@dataclass(frozen=True)
class Groups:
    """Macros `fetch`, the words of XS of a thread's tokens for 128 k that come next, into registers that `words()`
    makes, and `turn`, which makes them those that are multiplied."""

    words: Call
    fetch: Macro
    turn: Macro


def group_macros(shape: Tile) -> Groups:
    """Of tokens whose groups of k have scales."""
    count = shape.pairs * 4

    @T.macro
    def fetch(held, XS, c, unit, column, lane, m):
        token = c.tokens[0] + column * shape.tokens + lane % 4 * 2
        for i in T.unroll(count):
            held.next[i] = T.cast(XS[unit, T.min(token + i // 2 * 8 + i % 2, m - 1)], "uint32")

    @T.macro
    def turn(held):
        for i in T.unroll(count):
            held.now[i] = held.next[i]

    return Groups(lambda: Buffers(now=(count, "uint32"), next=(count, "uint32")), fetch, turn)


def source_of(gemm: Gemm, experts: int) -> str:
    """The primitives that a program needs."""
    used = ("cp_async", "lds", "ldmatrix", "pack", "semaphore", "int8", *(["e4m3"] if gemm.float_sums else []))
    found = [gemm.converter.device_source] if gemm.converts else []
    found += [EXPERT_SEARCH] if experts else []
    found += [MMA_E4M3] if not gemm.converts and gemm.float_sums else []
    found += [MMA_E4M3_GROUPS] if gemm.grouped_tokens else []
    return prelude(*used, extra=(MMA_TILES, *found))


def program(gemm: Gemm, shape: Tile, experts: int) -> PrimFunc:
    """The prim_func of `build` for legal values."""
    k, rb, threads, converts = gemm.k, shape.row_blocks, shape.threads, gemm.converts
    e4m3, scaled = converts and gemm.float_sums, gemm.blocks
    groups, of_groups = gemm.grouped_tokens, group_macros(shape)
    units, all_blocks, ig, unit_words = gemm.units, gemm.row_blocks, gemm.groups, gemm.unit_words
    pairs, nacc, blocks, stages, kc = shape.pairs, shape.sums, shape.blocks, shape.stages, shape.kc
    row_tiles = -(-all_blocks // blocks)
    run = 4 // ig  # passes of a stage with the same parameters
    operand = fp8_problem.operand_macros(gemm) if gemm.float_sums else byte_macros(gemm)
    sum_type = "float32" if gemm.float_sums else "int32"
    place, token_blocks_of = mma_tiles.place_macros(shape, row_tiles=row_tiles, experts=experts)
    issue_x, load_x = mma_tiles.x_macros(shape, k=k, stage_k=UNIT_K)
    issue_units = mma_tiles.unit_macro(shape, row_blocks=all_blocks, unit_words=unit_words)
    leave, gather = mma_tiles.partial_macros(shape, sum_type)
    source = source_of(gemm, experts)
    M = T.dynamic("m")
    token_blocks, end = token_blocks_of(M), lambda c: c.end[0] if experts else M

    @T.macro
    def issue(X, W, Xs, Ws, c, unit, slot, tx):
        """Copies of 128 k."""
        issue_x(X, Xs, "tz_cp_async", c.tokens[0], unit, slot, tx, end(c))
        issue_units(W, Ws, c, c.expert[0] * units + unit if experts else unit, slot, tx)

    if converts:
        load_words, load_params, convert = operand_macros(gemm, shape, operand)
    else:
        warps = direct_warps.operand_macros(gemm, shape)

    @T.macro
    def fetch(held, S, XS, c, unit, tile, column, lane, m):
        """The scales of 128 k."""
        rows, token = c.rows[0] * (blocks * 4) + tile, c.tokens[0] + column * shape.tokens + lane % 4 * 2
        warps.fetch(held, S, XS, c.expert[0] if experts else 0, unit, rows, token, m)

    state, store = store_macros(gemm, shape, experts)

    @T.macro
    def compute(X, W, S, XS, RS, B, WS, SEM, Y, offsets):
        with T.Kernel(token_blocks * row_tiles, kc, threads=threads, prelude=source) as (bx, bz):
            Xs = T.alloc_shared((shape.x_bytes,), "int8")
            Ws = T.alloc_shared((stages * blocks * unit_words,), "int32")
            w = T.alloc_local((rb * 4,), "uint32") if converts else None
            a = T.alloc_local((rb * 8,), "uint32")
            x = T.alloc_local((pairs * 4,), "uint32")
            if not converts:
                v = warps.scales()
            elif e4m3:
                v = T.alloc_local((rb * 2,), "float32")
            else:
                v = T.alloc_local((rb * 4,), "uint32")
            words = of_groups.words() if groups else None
            o = T.alloc_local((2,), "uint32") if converts else None
            acc = T.alloc_local((nacc,), sum_type)
            held = state()
            c = scalars("tokens", "rows", "count", "slot", "free", *(["expert", "end"] if experts else []))
            tx = T.get_thread_binding()
            lane = tx % 32
            warp = tx // 32
            tile = warp % shape.row_warps * rb
            column = warp // shape.row_warps
            io = Buffers(
                S=S, XS=XS, RS=RS, B=B, Y=Y, Xs=Xs, acc=acc, held=held, lane=lane, warp=warp, tile=tile, column=column
            )
            place(c, bx, offsets, M)
            k0 = bz * units // kc
            kn = (bz + 1) * units // kc - k0
            if experts:
                kn = T.if_then_else(c.end[0] > 0, kn, 0)

            for p in T.unroll(stages):
                if p < kn:
                    issue(X, W, Xs, Ws, c, k0 + p, p, tx)
                cp_commit()
            for i in T.unroll(nacc):
                acc[i] = 0
            c.slot[0] = 0
            cp_wait(stages - 1)
            T.sync_threads()
            if converts:
                load_words(Ws, w, 0, 0, tile, lane)
                load_params(Ws, v, 0, 0, tile, lane)
            for p in T.unroll(pairs):
                load_x(Xs, x, 0, 0, p, column, lane)
            for m in T.unroll(rb):
                if converts:
                    convert(w, a, v, o, m, 0)
                else:
                    warps.load(Ws, a, 0, 0, 0, m, tile, lane)
            if scaled:
                fetch(v, S, XS, c, k0, tile, column, lane, M)
            if groups:
                of_groups.fetch(words, XS, c, k0, column, lane, M)

            for unit in T.serial(kn):
                if scaled:
                    warps.turn(v)
                    fetch(v, S, XS, c, k0 + T.min(unit + 1, kn - 1), tile, column, lane, M)
                if groups:
                    of_groups.turn(words)
                    of_groups.fetch(words, XS, c, k0 + T.min(unit + 1, kn - 1), column, lane, M)
                for j in T.unroll(4):
                    if j == 3:  # this stage has been read, the next one is complete
                        cp_wait(stages - 2)
                        T.sync_threads()
                        c.free[0] = c.slot[0]
                        c.slot[0] = T.if_then_else(c.slot[0] == stages - 1, 0, c.slot[0] + 1)
                        if unit + stages < kn:
                            issue(X, W, Xs, Ws, c, k0 + unit + stages, c.free[0], tx)
                        cp_commit()
                    if converts and j % 2 == 1:
                        load_words(Ws, w, c.slot[0], (j + 1) % 4 // 2, tile, lane)
                    if converts and not e4m3 and (j + 1) % run == 0:  # of what is converted now
                        load_params(Ws, v, c.slot[0], (j + 1) % 4 // run, tile, lane)
                    for p in T.unroll(pairs):
                        for m in T.unroll(rb):
                            for e in T.unroll(2):
                                to, at = ((m * pairs + p) * 2 + e) * 4, (j % 2 * rb + m) * 4
                                if not converts:
                                    warps.mma(acc, to, a, at, x, p * 4 + e * 2, v, m, p * 2 + e)
                                elif groups:
                                    operand.mma(
                                        acc, to, a, at, x, p * 4 + e * 2, v, m * 2, words.now, p * 4 + e * 2, j
                                    )  # fmt: skip
                                elif e4m3:
                                    operand.mma(acc, to, a, at, x, p * 4 + e * 2, v, m * 2)
                                else:
                                    operand.mma(acc, to, a, at, x, p * 4 + e * 2)
                        load_x(Xs, x, c.slot[0], (j + 1) % 4, p, column, lane)
                        for m in T.unroll(rb):
                            if m * pairs // rb == p:
                                if converts:
                                    convert(w, a, v, o, m, j + 1)
                                else:
                                    warps.load(Ws, a, c.slot[0], (j + 1) % 4, (j + 1) % 2, m, tile, lane)
                    if e4m3 and (j + 1) % run == 0:  # of what is multiplied next
                        load_params(Ws, v, c.slot[0], (j + 1) % 4 // run, tile, lane)
            T.sync_threads()  # the staged output shares memory with X
            if kc > 1:
                leave(WS, acc, bx, bz, tx)
                if last_arrival(SEM[bx], kc):
                    gather(WS, acc, bx, tx)
                    store(io, c)
            else:
                store(io, c)

    return _main(compute, tensors_of(gemm, shape, M, sum_type, experts), experts)


def tensors_of(gemm: Gemm, shape: Tile, m: Expr, sum_type: str, experts: int) -> tuple:
    """Types of the tensors X to Y."""
    n, kc, units, all_blocks, scaled = gemm.n, shape.kc, gemm.units, gemm.row_blocks, gemm.blocks
    nacc, threads, tiles, matrices = shape.sums, shape.threads, T.dynamic("tiles"), max(experts, 1)
    return (
        T.Tensor((m, gemm.k), "int8"),
        T.Tensor((matrices * units, all_blocks, gemm.unit_words), "int32"),
        T.Tensor(
            (matrices * units, all_blocks * 4) if scaled else (matrices * all_blocks * 64 * gemm.channels,), "float32"
        ),
        T.Tensor(
            (units, T.dynamic("mp")) if scaled or gemm.grouped_tokens else (m,),
            "int32" if gemm.grouped_tokens else "float32",
        ),
        T.Tensor((m if gemm.row_values else 1,), "int32"),
        T.Tensor((matrices * n if gemm.bias else 1,), "float32"),
        T.Tensor((tiles, kc, nacc // 4, threads, 4) if kc > 1 else (1, 1, 1, 1, 4), sum_type),
        T.Tensor((tiles,) if kc > 1 else (1,), "int32"),
        T.Tensor((m, n), gemm.out_dtype),
    )


def _main(compute: Macro, tensors: tuple, experts: int) -> PrimFunc:
    """The prim_func "main" that runs the macro; dense weights have no offsets of experts."""
    x, w, s, xs, rs, b, ws, sem, y = tensors

    if experts:

        @T.prim_func
        def main(
            X: x, W: w, S: s, XS: xs, RS: rs, B: b, WS: ws, SEM: sem, Y: y, offsets: T.Tensor((experts + 1,), "int32")
        ):
            compute(X, W, S, XS, RS, B, WS, SEM, Y, offsets)

        return main

    @T.prim_func
    def main(X: x, W: w, S: s, XS: xs, RS: rs, B: b, WS: ws, SEM: sem, Y: y):
        compute(X, W, S, XS, RS, B, WS, SEM, Y, None)

    return main
