"""Tile program for sm_80, sm_86 and sm_89: INT4 blocks on native s4 mma.sync, INT8 blocks on s8, one persistent grid.

A CTA computes 16 * row_blocks * (warps / token_warps) output features by `block_tokens` tokens. A stage of the ring
holds a block of 128 channels: X swizzled by 16-byte chunks (64 bytes of a token in an INT4 block, 128 in an INT8 one),
whole units of weights, and the scales of the tokens. Weights are the A operand, fetched 16 rows and 64 channels at a
time with one LDS.128 for each lane: four registers of m16n8k64 as they are, or, converted (3 instructions for 8
values), those of two m16n8k32. X comes by ldmatrix (mma_tiles.py), 32 bytes of a token at a time in both kinds.

The sums of a block are s32; they are scaled by row and token into f32 sums of the tile. With two-level scales a row's
is the block's multiplier; the channel's comes with the output.

Which CTA does which k range of which tile is a plan of schedules/work_items.py, whose costs know that an INT8 block
takes twice the time of an INT4 block. Partial sums are added in order of k: the same bits in every run.
"""

from terrazzo.ops.linear.mixed import problem, work_list
from terrazzo.ops.linear.mixed.problem import BLOCK_WORDS, SCALES, TILE4_WORDS, UNIT_K, UNIT_WORDS, Gemm
from terrazzo.ops.tiles import mma_tiles
from terrazzo.ops.tiles.calls import call, cp_async, cp_commit, cp_wait, lds32, lds64, lds128, mma, pack2, syncwarp
from terrazzo.ops.tiles.cuda.blocks import BLOCK_SCALES, FLAGS, MMA_S4
from terrazzo.ops.tiles.cuda.text import prelude
from terrazzo.ops.tiles.cuda.tiles import MMA_TILES
from terrazzo.ops.tiles.language import T
from terrazzo.ops.tiles.mma_tiles import Tile, element, sts32
from terrazzo.ops.tiles.program import OWN_BARRIERS_AND_BOUNDS, take
from terrazzo.ops.tiles.types import Buffers, Macro, Scalar, scalars

PASS_CONFIGS = OWN_BARRIERS_AND_BOUNDS
MOST_SUMS = 64  # of a thread, in f32 and once more in s32


def shared_bytes(shape: Tile) -> int:
    """Shared memory of a CTA, bytes."""
    return shape.x_bytes + shape.stages * (shape.blocks * UNIT_WORDS + scales_pitch(shape)) * 4


def scales_pitch(shape: Tile) -> int:
    """Floats of the token scales of a stage."""
    return max(shape.block_tokens, 32)


def copy_macro(gemm: Gemm, shape: Tile) -> Macro:
    """Macro `issue`: the copies of a block into a stage of the ring."""
    bm, threads, f_pitch = shape.block_tokens, shape.threads, scales_pitch(shape)
    blocks4, blocks8 = gemm.blocks4, gemm.blocks8
    issue_units = mma_tiles.unit_macro(shape, row_blocks=gemm.row_blocks, unit_words=UNIT_WORDS)

    @T.macro
    def issue_x(X, Xs, c, block, width, slot, tx):
        """16-byte pieces of `width` bytes of every token; tokens >= M become zero."""
        for e in T.unroll(-(-bm * width // 16 // threads)):
            at = e * threads + tx
            row = at // (width // 16)
            piece = at % (width // 16)
            if at < bm * width // 16:
                cp_async(
                    Xs[slot * (bm * UNIT_K) + row * UNIT_K + (piece ^ row % 8) * 16],
                    element(
                        1,
                        X,
                        "r",
                        T.min(c.tokens[0] + row, X.shape[0] - 1),
                        blocks4 * UNIT_K // 2 if width == 64 else blocks8 * UNIT_K,
                        block * width + piece * 16,
                    ),
                    T.if_then_else(c.tokens[0] + row < X.shape[0], 16, 0),
                )

    @T.macro
    def issue(io, c, unit, slot, tx):
        """Copies of a block."""
        if blocks8 == 0:
            issue_x(io.X4, io.Xs, c, unit, 64, slot, tx)
        elif blocks4 == 0:
            issue_x(io.X8, io.Xs, c, unit, 128, slot, tx)
        elif unit < blocks4:
            issue_x(io.X4, io.Xs, c, unit, 64, slot, tx)
        else:
            issue_x(io.X8, io.Xs, c, unit - blocks4, 128, slot, tx)
        if tx * 4 < bm:
            cp_async(io.Fs[slot * f_pitch + tx * 4], io.XS[unit, T.min(c.tokens[0] + tx * 4, io.XS.shape[1] - 4)])
        issue_units(io.W, io.Ws, c, unit, slot, tx)

    return issue


def block_macro(gemm: Gemm, shape: Tile, load_x: Macro, convert: Macro) -> Macro:
    """Macro `multiply`: the products of a block, of either kind."""
    rb, pairs, blocks = shape.row_blocks, shape.pairs, shape.blocks
    unit_of = lambda slot, row_tile: slot * (blocks * UNIT_WORDS) + row_tile // 4 * UNIT_WORDS

    @T.macro
    def multiply4(io, slot):
        """An INT4 block: two k64."""
        for j in T.unroll(2):
            for m in T.unroll(rb):
                at = slot * (blocks * UNIT_WORDS) + (io.tile + m) * TILE4_WORDS + j * 128
                lds128(io.w[m * 4], io.Ws[at + io.lane * 4])
            for p in T.unroll(pairs):
                load_x(io.Xs, io.x, slot, j, p, io.column, io.lane)
                for m in T.unroll(rb):
                    for e in T.unroll(2):
                        call(
                            "mma_s4", T.access_ptr(io.part[((m * pairs + p) * 2 + e) * 4], "rw", 4),
                            T.access_ptr(io.w[m * 4], "r", 4), T.access_ptr(io.x[p * 4 + e * 2], "r", 2),
                        )  # fmt: skip

    @T.macro
    def multiply8(io, slot):
        """An INT8 block: four k32, two with every load of words."""
        for j in T.unroll(2):
            for m in T.unroll(rb):
                at = unit_of(slot, io.tile + m) + j * BLOCK_WORDS + (io.tile + m) % 4 * 128
                lds128(io.w, io.Ws[at + io.lane * 4])
                convert(io.w, 0, io.a, m * 8, io.codes)
            for h in T.unroll(2):
                for p in T.unroll(pairs):
                    load_x(io.Xs, io.x, slot, j * 2 + h, p, io.column, io.lane)
                    for m in T.unroll(rb):
                        for e in T.unroll(2):
                            to = ((m * pairs + p) * 2 + e) * 4
                            mma("int8", io.part, to, io.a, m * 8 + h * 4, io.x, p * 4 + e * 2)

    @T.macro
    def multiply(io, unit):
        """The s32 sums of block `unit`, which are zero before."""
        if gemm.blocks8 == 0:
            multiply4(io, io.ring.slot[0])
        elif gemm.blocks4 == 0:
            multiply8(io, io.ring.slot[0])
        elif unit < gemm.blocks4:
            multiply4(io, io.ring.slot[0])
        else:
            multiply8(io, io.ring.slot[0])

    return multiply


def sum_macros(gemm: Gemm, shape: Tile) -> tuple[Macro, Macro]:
    """Macros `scale`, of a block's sums, and `store`, of a tile's."""
    rb, pairs, blocks, pitch = shape.row_blocks, shape.pairs, shape.blocks, shape.out_pitch
    n, units, blocks4, blocks8 = gemm.n, gemm.units, gemm.blocks4, gemm.blocks8
    f_pitch, wide, bf16 = scales_pitch(shape), gemm.out_bytes == 4, gemm.out_dtype == "bfloat16"
    stage, write = mma_tiles.out_macros(shape, n=n, vec=2)
    unit_of = lambda slot, row_tile: slot * (blocks * UNIT_WORDS) + row_tile // 4 * UNIT_WORDS

    @T.macro
    def row_scales(io, at, m):
        """s[2 m] and s[2 m + 1]: the scales of rows g and g + 8 of row tile m, from word `at` of the stage."""
        problem.row_scales(io.s[m * 2], lds32(io.Ws[at]))

    @T.macro
    def scale(io, unit, slot):
        """The sums of a block join those of the tile."""
        for m in T.unroll(rb):
            if blocks8 < units:
                if unit < blocks4:
                    at4 = slot * (blocks * UNIT_WORDS) + (io.tile + m) * TILE4_WORDS + 256
                    row_scales(io, at4 + io.lane // 4, m)
            if blocks8:
                if unit >= blocks4:
                    at8 = unit_of(slot, io.tile + m) + SCALES + (io.tile + m) % 4 * 8
                    row_scales(io, at8 + io.lane // 4, m)
        for p in T.unroll(pairs):
            for e in T.unroll(2):
                token = io.column * shape.tokens + p * 16 + e * 8 + io.lane % 4 * 2
                lds64(io.f, io.Fs[slot * f_pitch + token])
                for m in T.unroll(rb):
                    for i in T.unroll(4):
                        at = (m * pairs + p) * 8 + e * 4 + i
                        io.acc[at] = problem.scaled(io.acc[at], io.part[at], io.f[i % 2], io.s[m * 2 + i // 2])

    @T.macro
    def store(io, c):
        """16 tokens at a time, with channel scales and bias: 16-bit results transposed in registers, staged by the warp
        and written 16 bytes a lane, float32 ones as they are."""
        row0 = c.rows[0] * (blocks * 64) + io.tile * 16
        for p in T.unroll(pairs):
            token0 = c.tokens[0] + io.column * shape.tokens + p * 16
            syncwarp()
            for m in T.unroll(rb):
                for i in T.unroll(8):
                    row = row0 + m * 16 + i % 4 // 2 * 8 + io.lane // 4
                    io.held.f[i % 2] = io.acc[(m * pairs + p) * 8 + i]
                    if gemm.two_level:
                        io.held.f[i % 2] = io.held.f[i % 2] * io.S[T.min(row, gemm.row_blocks * 64 - 1)]
                    if gemm.bias:
                        io.held.f[i % 2] = io.held.f[i % 2] + io.B[T.min(row, n - 1)]
                    if wide:
                        token = token0 + i // 4 * 8 + io.lane % 4 * 2 + i % 2
                        if T.And(token < io.Y.shape[0], row < n):
                            sts32(element(4, io.Y, "w", token, n, row), T.reinterpret(io.held.f[i % 2], "uint32"))
                    elif i % 2 == 1:
                        io.held.o[0] = pack2(io.held.f[0], io.held.f[1], bf16=bf16)
                        stage(io.Xs, io.held.o, io.warp * (16 * pitch), m, i // 2, io.lane)
            if not wide:
                syncwarp()
                write(io.Y, io.Xs, io.warp * (16 * pitch), token0, row0, io.Y.shape[0], io.lane)

    return scale, store


def build(target, **params: Scalar):
    """The prim_func `main(X4, X8, W, XS, S, B, ITEMS, FIRST, WS, SEM, Y)` for any M.

    Shapes: X4 uint8 [M, K4/2] and X8 int8 [M, 128 * blocks8] (one element where a plane has no blocks); W int32
    [k/128, Np/64, 1056]; XS f32 [k/128, MP] scales of the tokens, MP a multiple of 4; S f32 [Np] channel scales (one
    element unless two-level); B f32 [n] (one element without a bias); ITEMS, FIRST: see work_list.py; WS f32
    [slots, sums / 4, 32 * warps, 4] with sums = row_blocks * block_tokens / token_warps / 2; SEM int32 [slots], zero
    before the first launch and after each one; Y [M, n].

    Args:
        target: a Target whose shared memory the ring must fit in, or None.
        params: of `Gemm` and `Tile`.

    Raises:
        ArgumentError: a format or a configuration outside the limits.
    """
    gemm, shape = take(Gemm, params), Tile(**params)
    shape.check(units=gemm.units, most=MOST_SUMS * 2, need=shared_bytes(shape), target=target)
    bm, rb, threads, stages = shape.block_tokens, shape.row_blocks, shape.threads, shape.stages
    pairs, nacc, n, k, two_level = shape.pairs, shape.sums, gemm.n, gemm.k, gemm.two_level
    units, all_blocks, blocks4, blocks8 = gemm.units, gemm.row_blocks, gemm.blocks4, gemm.blocks8
    registers, convert = problem.convert_macros(gemm)
    load, leave, gather = work_list.work_macros(block_tokens=bm, sums=nacc)
    issue, multiply = (
        copy_macro(gemm, shape),
        block_macro(gemm, shape, mma_tiles.x_macros(shape, k=k, stage_k=UNIT_K)[1], convert),
    )
    scale, store = sum_macros(gemm, shape)
    used = ("cp_async", "lds", "ldmatrix", "pack", "semaphore", "int8")
    source = prelude(*used, extra=(MMA_TILES, gemm.converter.device_source, BLOCK_SCALES, FLAGS, MMA_S4))
    M, MP, ENDS, COUNT, SLOTS = (T.dynamic(name) for name in ("m", "mp", "ends", "count", "slots"))

    @T.prim_func
    def main(
        X4: T.Tensor((M, blocks4 * UNIT_K // 2) if blocks4 else (1, 1), "uint8"),
        X8: T.Tensor((M, blocks8 * UNIT_K) if blocks8 else (1, 1), "int8"),
        W: T.Tensor((units, all_blocks, UNIT_WORDS), "int32"),
        XS: T.Tensor((units, MP), "float32"),
        S: T.Tensor((all_blocks * 64 if two_level else 1,), "float32"),
        B: T.Tensor((n if gemm.bias else 1,), "float32"),
        ITEMS: T.Tensor((COUNT, work_list.ITEM_WORDS), "int32"),
        FIRST: T.Tensor((ENDS,), "int32"),
        WS: T.Tensor((SLOTS, nacc // 4, threads, 4), "float32"),
        SEM: T.Tensor((SLOTS,), "int32"),
        Y: T.Tensor((M, n), gemm.out_dtype),
    ):
        with T.Kernel(ENDS - 1, threads=threads, prelude=source) as cta:
            Xs = T.alloc_shared((shape.x_bytes,), "int8")
            Ws = T.alloc_shared((stages * shape.blocks * UNIT_WORDS,), "int32")
            Fs = T.alloc_shared((stages * scales_pitch(shape),), "float32")
            w = T.alloc_local((rb * 4,), "uint32")
            a = T.alloc_local((rb * 8,), "uint32")
            x = T.alloc_local((pairs * 4,), "uint32")
            acc = T.alloc_local((nacc,), "float32")
            part = T.alloc_local((nacc,), "int32")
            f = T.alloc_local((2,), "float32")
            s = T.alloc_local((rb * 2,), "float32")
            codes = registers()
            held = Buffers(f=(2, "float32"), o=(1, "uint32"))
            c = work_list.item_state()
            ring = scalars("slot")
            tx = T.get_thread_binding()
            lane = tx % 32
            warp = tx // 32
            tile = warp % shape.row_warps * rb
            column = warp // shape.row_warps
            io = Buffers(
                X4=X4, X8=X8, W=W, XS=XS, S=S, B=B, Y=Y, Xs=Xs, Ws=Ws, Fs=Fs, w=w, a=a, x=x, acc=acc, part=part, f=f,
                s=s, codes=codes, held=held, ring=ring, lane=lane, warp=warp, tile=tile, column=column,
            )  # fmt: skip
            for it in T.serial(FIRST[cta + 1] - FIRST[cta]):
                load(ITEMS, c, FIRST[cta] + it)
                T.sync_threads()  # the ring and the staged output of the item before were read
                for p in T.unroll(stages - 1):
                    if c.k0[0] + p < c.k1[0]:
                        issue(io, c, c.k0[0] + p, p, tx)
                    cp_commit()
                for i in T.unroll(nacc):
                    acc[i] = 0.0
                ring.slot[0] = 0
                for u in T.serial(c.k1[0] - c.k0[0]):
                    unit = c.k0[0] + u
                    cp_wait(stages - 2)
                    T.sync_threads()  # this stage is complete, and the one before was read by every warp
                    if unit + stages - 1 < c.k1[0]:
                        free = T.if_then_else(ring.slot[0] == 0, stages - 1, ring.slot[0] - 1)
                        issue(io, c, unit + stages - 1, free, tx)
                    cp_commit()
                    for i in T.unroll(nacc):
                        part[i] = 0
                    multiply(io, unit)
                    scale(io, unit, ring.slot[0])
                    ring.slot[0] = T.if_then_else(ring.slot[0] == stages - 1, 0, ring.slot[0] + 1)
                if c.k0[0] > 0:
                    leave(WS, SEM, acc, c, tx)
                else:
                    if c.shares[0] > 0:
                        gather(WS, SEM, acc, c, tx)
                    T.sync_threads()  # the staged output shares memory with X
                    store(io, c)

    return main
