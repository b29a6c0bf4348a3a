"""Tile program for 17 tokens and more on sm_80, sm_86 and sm_89: mma.sync m16n8k16 behind a cp.async ring.

A CTA computes 16 * row_blocks * (warps / token_warps) output features by `block_tokens` tokens. A stage of the ring
holds 64 k: X swizzled by 16-byte chunks, packed weights, and the parameters where a group begins. The weights are the A
operand: a warp fetches the words of 16 rows with one LDS.128 per lane and converts them in registers. X comes by
ldmatrix.

A pass is one k16 step. While its MMAs run, the warp converts the weights of the next pass into the other half of `a`
and reloads each pair of X fragments right after its last use. The last pass of a stage starts with the only block
barrier: the stage has been read by then, so its slot takes the copy for `stages` stages later, and the next stage is
complete.

Numerics (specs.md B.3): `exact` and `fused` scale the operand; `post` multiplies the integers q - z and applies the
scale to f32 sums, once per group. With kc > 1 the CTAs of a tile share k; the last to arrive sums the kc partial tiles
in a fixed order, so the result has the same bits in every run.

With experts, whose tokens lie one after the other, a token block belongs to one expert. The grid has as many CTAs as
there may be tiles; each finds its expert by itself, and one past the last tile stores nothing.
"""

from terrazzo.ops.linear.operand import Operand
from terrazzo.ops.linear.params import factor_macros, param_macros
from terrazzo.ops.products.codes import BLOCK_ROWS, BLOCK_WORDS, TILE_WORDS
from terrazzo.ops.tiles import mma_tiles
from terrazzo.ops.tiles.calls import (
    call,
    cp_async,
    cp_commit,
    cp_wait,
    last_arrival,
    lds16_at,
    lds32,
    lds128,
    mma,
    mma_kind,
    pack2,
    syncwarp,
    unpack,
)
from terrazzo.ops.tiles.cuda.experts import EXPERT_SEARCH
from terrazzo.ops.tiles.cuda.text import prelude
from terrazzo.ops.tiles.cuda.tiles import MMA_TILES, RAGGED
from terrazzo.ops.tiles.language import T
from terrazzo.ops.tiles.mma_tiles import Tile
from terrazzo.ops.tiles.program import OWN_BARRIERS_AND_BOUNDS, take
from terrazzo.ops.tiles.types import Buffers, Call, Macro, PrimFunc, Scalar, scalars

UNIT_K = 128  # k extent of one unit of work: two ring stages
PASS_CONFIGS = OWN_BARRIERS_AND_BOUNDS


def shared_bytes(op: Operand, shape: Tile) -> int:
    """Shared memory of a CTA, bytes."""
    flag = 1024 if shape.kc > 1 else 0  # one word, and the alignment of what follows
    of_block = op.format.nbytes(BLOCK_ROWS, 64) + op.records_per(64) * op.group_bytes
    return shape.x_bytes + shape.stages * shape.blocks * of_block + flag


def copy_macro(op: Operand, shape: Tile, issue_x: Macro, *, all_blocks: int, k: int, experts: int, end: Call) -> Macro:
    """Macro `issue`: the copies of a stage, of a weight of `all_blocks` row blocks of 64 and of X [M, k].

    issue_x: of `mma_tiles.x_macros`. experts: whose matrices follow each other in W and P; 0: one matrix.
    end: function of `c` that tells the token behind the last one.
    """
    group, threads, blocks = op.group, shape.threads, shape.blocks
    rec, ir, parts = op.record_bytes, op.records_per(64), op.format.blocks(64)
    block_words, copies = parts * BLOCK_WORDS, rec // 16
    copy_x = "tz_copy_ragged" if k % 8 else "tz_cp_async"  # rows of X that are not aligned to 16 bytes, or are
    kp = -(-k // UNIT_K) * UNIT_K
    first = lambda c, count: c.expert[0] * count if experts else 0  # of the expert's blocks, of its records

    def block_at(c, b):
        """Block of 64 rows `b` of the CTA; past the end the last one again, for rows that are not stored."""
        block = c.rows[0] * blocks + b
        return block if all_blocks % blocks == 0 else T.min(block, all_blocks - 1)

    @T.macro
    def issue(io, c, kb, slot, params, tx):
        """Copies of the 64 k that start at 64 * kb; rows >= end and columns >= k of X become zero."""
        issue_x(io.X, io.Xs, copy_x, c.tokens[0], kb, slot, tx, end(c))
        for b in T.unroll(parts):
            for e in T.unroll(-(-blocks * 128 // threads)):
                at = e * threads + tx
                if at < blocks * 128:
                    cp_async(
                        io.Ws[slot * (blocks * block_words) + b * (blocks * BLOCK_WORDS) + at * 4],
                        io.W[first(c, op.format.blocks(kp)) + kb * parts + b, block_at(c, at // 128), at % 128 * 4],
                    )
        if op.has_groups and params:
            for e in T.unroll(-(-ir * blocks * copies // threads)):
                at = e * threads + tx
                record = 0 if group == 0 else (kb // 2 if group == 128 else kb * ir + at // (blocks * copies))
                if at < ir * blocks * copies:
                    cp_async(
                        io.Ps[slot * (ir * blocks * rec) + at * 16],
                        io.P[first(c, op.records(kp)) + record, block_at(c, at // copies % blocks), at % copies * 16],
                    )

    return issue


def operand_macros(op: Operand, shape: Tile) -> tuple[Macro, Macro, Macro, Macro]:
    """Macros `load_words`, `load_scales`, `load_operands` and `convert`: from a stage to operand registers."""
    fmt, cvt, words = op.format, op.scaling_converter, param_macros(op)
    rb, blocks, rec, sb = shape.row_blocks, shape.blocks, op.record_bytes, op.scale_bytes
    ig, parts, per_step = op.groups_per(64), fmt.blocks(64), fmt.step_words
    block_words = parts * BLOCK_WORDS
    bf16, scale_bf16 = op.dtype == "bfloat16", op.scale_dtype == "bfloat16"

    @T.macro
    def load_words(Ws, w, slot, tile, lane):
        """A lane's words of a stage: 64 k of each row tile of the warp."""
        for m in T.unroll(rb):
            for b in T.unroll(parts):
                at = slot * (blocks * block_words) + b * (blocks * BLOCK_WORDS) + (tile + m) * TILE_WORDS + lane * 4
                lds128(w[(m * parts + b) * 4], Ws[at])

    @T.macro
    def load_scales(Ps, s, u, slot, q, tile, lane):
        """f32 scales of rows g and g + 8 of each row tile."""
        for m in T.unroll(rb):
            at = (slot * ig + q) * (blocks * rec) + (tile + m) // 4 * rec + ((tile + m) % 4 * 8 + lane // 4) * 2 * sb
            u[0] = lds16_at(Ps[at], 0, nbytes=2) if sb == 1 else lds32(Ps[at])
            if op.scale_dtype == "float32":
                u[1] = lds32(Ps[at + 4])
            words.scales(s, m * 2, u)

    @T.macro
    def load_operands(Ps, v, u, zs, slot, q, tile, lane):
        """The converter's packed (bias, scale) pairs of rows g and g + 8 of each row tile."""
        for m in T.unroll(rb):
            base = (slot * ig + q) * (blocks * rec) + (tile + m) // 4 * rec
            row = (tile + m) % 4 * 8 + lane // 4
            if fmt.record_groups > 1:
                first = slot * (blocks * rec) + (tile + m) // 4 * rec
                words.pair_word(v, m * 4, lds32(Ps[first + row * 8 + q // 2 * 4]), q % 2 == 1)
            elif op.numerics != "post":
                u[0] = lds16_at(Ps[base], row, nbytes=64) if sb == 1 else lds32(Ps[base + row * 2 * sb])
            if op.symmetric:
                u[2] = T.uint32(fmt.zero * 0x0101)
            else:
                u[2] = lds16_at(Ps[base + 64 * sb], row, nbytes=64)
            if fmt.record_groups == 1:
                words.scale_words(v, m * 4, u)
            if op.numerics == "fused":
                zs[0] = unpack(0, u[0], bf16=scale_bf16)
                zs[1] = unpack(1, u[0], bf16=scale_bf16)
                for e in T.unroll(2):
                    zs[e] = -T.cast(u[2] >> T.uint32(8 * e) & T.uint32(255), "float32") * zs[e]
                    v[m * 4 + 2 * e] = pack2(zs[e], zs[e], bf16=bf16)
            else:
                words.bias_words(v, m * 4, u)

    @T.macro
    def convert(w, a, v, m, step):
        """The words of pass `step` into its half of a."""
        for i in T.unroll(per_step):
            T.call_extern(
                "handle", cvt.device_name, w[m * 4 * parts + step * per_step + i],
                T.access_ptr(a[(step % 2 * rb + m) * 4 + i * (4 // per_step)], "w", 4 // per_step),
                *words.of_converter(cvt, v, m * 4),
            )  # fmt: skip

    return load_words, load_scales, load_operands, convert


def sum_macros(op: Operand, shape: Tile) -> tuple[Macro, Macro, Macro, Macro]:
    """Macros `clear`, `multiply` and `add_scaled` of a pair of token tiles, and `scale` of all sums."""
    rb, pairs, kind = shape.row_blocks, shape.pairs, mma_kind(op.dtype)

    @T.macro
    def clear(part, p):
        """The sums of a group of k, of pair p of token tiles, start anew."""
        for m in T.unroll(rb):
            for i in T.unroll(8):
                part[(m * pairs + p) * 8 + i] = 0.0

    @T.macro
    def multiply(d, a, x, step, p):
        """Pass `step` of pair p, into d."""
        for m in T.unroll(rb):
            for e in T.unroll(2):
                mma(kind, d, ((m * pairs + p) * 2 + e) * 4, a, (step % 2 * rb + m) * 4, x, p * 4 + e * 2)

    @T.macro
    def add_scaled(acc, part, s, p):
        """Those sums, times the scales of the rows, join the tile's."""
        for m in T.unroll(rb):
            for i in T.unroll(8):
                at = (m * pairs + p) * 8 + i
                acc[at] = acc[at] + s[m * 2 + i % 4 // 2] * part[at]

    @T.macro
    def scale(acc, s):
        """Without groups, the scales of the rows enter at the end."""
        for i in T.unroll(shape.sums):
            acc[i] = acc[i] * s[i // (pairs * 8) * 2 + i % 4 // 2]

    return clear, multiply, add_scaled, scale


def store_macro(op: Operand, shape: Tile, *, n: int, k_padded: int, bias: bool, experts: int) -> Macro:
    """Macro `store`: from sums to rows of Y [M, n]."""
    rb, pairs, blocks, pitch = shape.row_blocks, shape.pairs, shape.blocks, shape.out_pitch
    fmt, bf16 = op.format, op.dtype == "bfloat16"
    factors, (stage_out, write) = factor_macros(op, n, k_padded), mma_tiles.out_macros(shape, n=n, vec=1)
    first = lambda c, count: c.expert[0] * count if experts else 0

    @T.macro
    def store(io, c, end):
        """Bias, then 16 tokens at a time: transposed in registers, staged by the warp, written 16 bytes a lane."""
        row0 = c.rows[0] * (blocks * 64) + io.tile * 16
        stage = io.warp * (16 * pitch)
        if fmt.row_factors:
            for m in T.unroll(rb):
                for e in T.unroll(2):
                    factors.load(io.P, io.bb, e, row0 + m * 16 + e * 8 + io.lane // 4, first(c, op.records(k_padded)))
                for i in T.unroll(pairs * 8):
                    io.acc[m * pairs * 8 + i] = io.acc[m * pairs * 8 + i] * io.bb[i % 4 // 2]
        if bias:
            for m in T.unroll(rb):
                for e in T.unroll(2):
                    row = T.min(row0 + m * 16 + e * 8 + io.lane // 4, n - 1)
                    io.bb[e] = T.cast(io.B[first(c, n) + row], "float32")
                for i in T.unroll(pairs * 8):
                    io.acc[m * pairs * 8 + i] = io.acc[m * pairs * 8 + i] + io.bb[i % 4 // 2]
        for p in T.unroll(pairs):
            syncwarp()
            for m in T.unroll(rb):
                for i in T.unroll(4):
                    at = (m * pairs + p) * 8 + i * 2
                    io.o[0] = pack2(io.acc[at], io.acc[at + 1], bf16=bf16)
                    stage_out(io.Xs, io.o, stage, m, i, io.lane)
            syncwarp()
            write(io.Y, io.Xs, stage, c.tokens[0] + io.column * shape.tokens + p * 16, row0, end, io.lane)

    return store


def build(target, *, n: int, k: int, bias: bool, experts: int = 0, **params: Scalar):
    """The prim_func `main(X, W, P, B, WS, SEM, Y)` for any M; with E = `experts`, int32 [E + 1] comes last.

    Shapes: X [M, k] and Y [M, n] in `dtype`; W int32 [Kp/KB, Np/64, 512], blocks of KB k of the format `weight`; P
    uint8 [G, Np/64, R]; B [n] in `dtype` (one element without a bias). With kc > 1, WS f32
    [tiles, kc, A/4, 32 * warps, 4] with A = row_blocks * block_tokens /
    token_warps / 2, and SEM int32 [tiles], zero before the first launch and after each one, where tiles is
    ceil(M / block_tokens) * ceil(Np / rows of a CTA) or more; with kc = 1 they are unused, [1, 1, 1, 1, 4] and [1].

    With experts, W, P and B hold one matrix after the other: [E * Kp/KB, Np/64, 512], [E * G, Np/64, R], [E * n];
    expert e owns the rows offsets[e] .. offsets[e + 1] - 1 of X and Y, in ascending order. Rows of no expert are not
    written. There are min(M, (M + E * (block_tokens - 1)) / block_tokens) token blocks in the place of
    ceil(M / block_tokens).

    Args:
        target: a Target whose shared memory the ring must fit in, or None.
        params: of `Operand` and `Tile`.

    Raises:
        ArgumentError: a format or a configuration outside these limits, or one that needs more than 255 registers.
    """
    op = take(Operand, params)
    shape, most = Tile(**params), 128 if op.scales_sums and op.group > 0 else 256
    shape.check(units=-(-k // UNIT_K), most=most, need=shared_bytes(op, shape), target=target)
    return program(op, shape, n=n, k=k, bias=bias, experts=experts)


def program(op: Operand, shape: Tile, *, n: int, k: int, bias: bool, experts: int) -> PrimFunc:
    """The prim_func of `build` for legal values."""
    fmt, group, dtype, rb = op.format, op.group, op.dtype, shape.row_blocks
    np_, units = -(-n // BLOCK_ROWS) * BLOCK_ROWS, -(-k // UNIT_K)
    kp = units * UNIT_K
    grouped = op.scales_sums and group > 0  # otherwise MMAs add straight to the result
    stages, kc = shape.stages, shape.kc
    pairs, nacc, blocks, all_blocks = shape.pairs, shape.sums, shape.blocks, np_ // BLOCK_ROWS
    row_tiles = -(-all_blocks // blocks)
    ig, parts = op.groups_per(64), fmt.blocks(64)  # of a stage: groups, packed blocks of 64 rows
    run = 4 // ig  # passes of a stage with the same parameters
    M, TILES = T.dynamic("m"), T.dynamic("tiles")
    end = lambda c: c.end[0] if experts else M
    place, token_blocks_of = mma_tiles.place_macros(shape, row_tiles=row_tiles, experts=experts)
    issue_x, load_x = mma_tiles.x_macros(shape, k=k, stage_k=64)
    leave, gather = mma_tiles.partial_macros(shape, "float32")
    issue = copy_macro(op, shape, issue_x, all_blocks=all_blocks, k=k, experts=experts, end=end)
    load_words, load_scales, load_operands, convert = operand_macros(op, shape)
    clear, multiply, add_scaled, scale = sum_macros(op, shape)
    store = store_macro(op, shape, n=n, k_padded=kp, bias=bias, experts=experts)
    source = prelude(
        "cp_async", "lds", "ldmatrix", "pack", "semaphore",
        extra=(
            MMA_TILES, RAGGED, op.scaling_converter.device_source,
            *([EXPERT_SEARCH] if experts else []),
        ),
    )  # fmt: skip
    matrices, token_blocks = max(experts, 1), token_blocks_of(M)

    @T.macro
    def compute(X, W, P, B, WS, SEM, Y, offsets):
        with T.Kernel(token_blocks * row_tiles, kc, threads=shape.threads, prelude=source) as (bx, bz):
            Xs = T.alloc_shared((shape.x_bytes // 2,), dtype)
            Ws = T.alloc_shared((stages * blocks * parts * BLOCK_WORDS,), "int32")
            Ps = T.alloc_shared((max(stages * op.records_per(64) * blocks * op.group_bytes, 16),), "uint8")
            w = T.alloc_local((rb * parts * 4,), "uint32")
            a = T.alloc_local((rb * 8,), "uint32")
            x = T.alloc_local((pairs * 4,), "uint32")
            v = T.alloc_local((rb * 4,), "uint32")
            u = T.alloc_local((3,), "uint32")
            s = T.alloc_local((rb * 2,), "float32")
            zs = T.alloc_local((2,), "float32")
            bb = T.alloc_local((2,), "float32")
            o = T.alloc_local((1,), "uint32")
            acc = T.alloc_local((nacc,), "float32")
            part = T.alloc_local((nacc if grouped else 1,), "float32")
            d = part if grouped else acc
            c = scalars("tokens", "rows", "count", "slot", "free", *(["expert", "end"] if experts else []))
            tx = T.get_thread_binding()
            lane = tx % 32
            warp = tx // 32
            tile = warp % shape.row_warps * rb
            column = warp // shape.row_warps
            io = Buffers(
                X=X, W=W, P=P, B=B, Y=Y, Xs=Xs, Ws=Ws, Ps=Ps, acc=acc, bb=bb, o=o, lane=lane, warp=warp,
                tile=tile, column=column,
            )  # fmt: skip
            place(c, bx, offsets, M)
            k0 = bz * units // kc
            kn = (bz + 1) * units // kc - k0
            if experts:
                kn = T.if_then_else(c.end[0] > 0, kn, 0)

            for p in T.unroll(stages):
                if p < kn * 2:
                    params = p == 0 if group == 0 else group != 128 or p % 2 == 0
                    issue(io, c, k0 * 2 + p, p, params, tx)
                cp_commit()
            for i in T.unroll(nacc):
                acc[i] = 0.0
            c.slot[0] = 0
            cp_wait(stages - 1)
            T.sync_threads()
            load_words(Ws, w, 0, tile, lane)
            if op.has_groups:
                load_operands(Ps, v, u, zs, 0, 0, tile, lane)
            for p in T.unroll(pairs):
                load_x(Xs, x, 0, 0, p, column, lane)
            for m in T.unroll(rb):
                convert(w, a, v, m, 0)
            if op.scales_sums:
                load_scales(Ps, s, u, 0, 0, tile, lane)

            for unit in T.serial(kn):
                for h in T.unroll(2):
                    for step in T.unroll(4):
                        if step == 3:  # this stage has been read, the next one is complete
                            cp_wait(stages - 2)
                            T.sync_threads()
                            c.free[0] = c.slot[0]
                            c.slot[0] = T.if_then_else(c.slot[0] == stages - 1, 0, c.slot[0] + 1)
                            if unit * 2 + h + stages < kn * 2:
                                issue(
                                    io, c, (k0 + unit) * 2 + h + stages, c.free[0],
                                    group != 0 and (group != 128 or (h + stages) % 2 == 0), tx,
                                )  # fmt: skip
                            cp_commit()
                            load_words(Ws, w, c.slot[0], tile, lane)
                        if group != 0:
                            if T.And((step + 1) % run == 0, h == 1 or group != 128):
                                load_operands(Ps, v, u, zs, c.slot[0], (step + 1) % 4 // run, tile, lane)
                        for p in T.unroll(pairs):
                            if grouped:
                                if T.And(step % run == 0, h == 0 or group != 128):
                                    clear(part, p)
                            multiply(d, a, x, step, p)
                            load_x(Xs, x, c.slot[0], (step + 1) % 4, p, column, lane)
                            for m in T.unroll(rb):
                                if m * pairs // rb == p:
                                    convert(w, a, v, m, (step + 1) % 4)
                        if grouped:
                            if T.And((step + 1) % run == 0, h == 1 or group != 128):
                                # a branch that ptxas cannot see through keeps it from working on two groups at once
                                if call("not_negative", M, returns="bool"):
                                    for p in T.unroll(pairs):
                                        add_scaled(acc, part, s, p)
                                load_scales(Ps, s, u, c.slot[0], (step + 1) % 4 // run, tile, lane)
            if op.scales_sums and group == 0:
                scale(acc, s)
            T.sync_threads()  # the staged output shares memory with X
            if kc > 1:
                leave(WS, acc, bx, bz, tx)
                if last_arrival(SEM[bx], kc):
                    gather(WS, acc, bx, tx)
                    store(io, c, end(c))
            else:
                store(io, c, end(c))

    tensors = (
        T.Tensor((M, k), dtype),
        T.Tensor((matrices * fmt.blocks(kp), all_blocks, BLOCK_WORDS), "int32"),
        T.Tensor((matrices * op.records(kp), all_blocks, op.record_bytes), "uint8"),
        T.Tensor((matrices * n if bias else 1,), dtype),
        T.Tensor((TILES, kc, nacc // 4, shape.threads, 4) if kc > 1 else (1, 1, 1, 1, 4), "float32"),
        T.Tensor((TILES,) if kc > 1 else (1,), "int32"),
        T.Tensor((M, n), dtype),
    )
    return _main(compute, tensors, experts)


def _main(compute: Macro, tensors: tuple, experts: int) -> PrimFunc:
    """The prim_func "main" that runs the macro; dense weights have no offsets of experts."""
    x, w, p, b, ws, sem, y = tensors

    if experts:

        @T.prim_func
        def main(X: x, W: w, P: p, B: b, WS: ws, SEM: sem, Y: y, offsets: T.Tensor((experts + 1,), "int32")):
            compute(X, W, P, B, WS, SEM, Y, offsets)

        return main

    @T.prim_func
    def main(X: x, W: w, P: p, B: b, WS: ws, SEM: sem, Y: y):
        compute(X, W, P, B, WS, SEM, Y, None)

    return main
