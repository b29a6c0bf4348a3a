"""Tile program for small batches: mma.sync, weights through warp-private cp.async rings, X resident in shared memory.

Persistent: kc x nc CTAs, at most one for each SM. A CTA owns one k range and about N/16/nc row tiles of 16; its slice
of X is loaded once. The warps of a CTA split its k range, so each streams its own weights with no barrier in the main
loop; they sum their partial tiles through shared memory in a fixed order once per `chunk` tiles. With kc > 1 the last
CTA of a row range sums the kc partials in a fixed order, so the result has the same bits in every run. `joined`: pairs
of CTAs along k are clusters, and each sums half of the rows, as the other sends them to its shared memory.

Numerics (specs.md B.3): `post` multiplies unscaled codes and applies scale and zero to f32 sums, once per group;
`exact` and `fused` scale the operand.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from terrazzo.layouts.converters import get_converter
from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.linear.operand import Operand
from terrazzo.ops.linear.params import Factors, factor_macros, param_macros
from terrazzo.ops.products.codes import BLOCK_ROWS, BLOCK_WORDS, TILE_WORDS
from terrazzo.ops.tiles.calls import (
    cp_async,
    cp_commit,
    ldmatrix4,
    lds16_at,
    lds32,
    lds64,
    lds128,
    mma,
    mma_kind,
    pack2,
    syncwarp,
)
from terrazzo.ops.tiles.cuda.text import prelude
from terrazzo.ops.tiles.language import T
from terrazzo.ops.tiles.program import OWN_BARRIERS, take
from terrazzo.ops.tiles.resident import ITEM_K, Split, cluster_shape, resident_macros, sum_macros, x_bytes, x_row
from terrazzo.ops.tiles.resident_pipeline import Steps, walk_macro
from terrazzo.ops.tiles.types import Buffers, Call, Expr, Macro, PrimFunc, Scalar
from terrazzo.schedules.clusters import PAIR

PASS_CONFIGS = OWN_BARRIERS


@dataclass(frozen=True)
class Rows:
    """Rows of a weight [n, k], which a kernel knows or a launch brings: n, row `blocks` of 64, and whether n is `whole`
    pieces of four."""

    n: Expr
    blocks: Expr
    whole: bool


def of_any_rows(params: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of the kernel that serves every n with the bits of one made for an n; those of `build`."""
    return {**params, "n": 0, "nc": 0, "whole": params["n"] % 4 == 0}


@dataclass(frozen=True)
class Shape:
    """A CTA's work: the operand, how [n, k] is split, and what lies in a step of a warp's ring."""

    op: Operand
    split: Split

    @property
    def group_bytes(self) -> tuple[int, int]:
        """Of 16 rows in a record of parameters: scales, zero points."""
        return self.op.scale_bytes * self.op.format.record_groups * 16, 0 if self.op.symmetric else 16

    @property
    def item_groups(self) -> int:
        """Groups of an item of k."""
        return self.op.groups_per(ITEM_K)

    @property
    def group_steps(self) -> int:
        """k16 steps of a group."""
        return 8 // self.item_groups

    @property
    def param_words(self) -> int:
        """Of a row tile and an item."""
        return self.op.records_per(ITEM_K) * sum(self.group_bytes) // 4 if self.op.has_groups else 0

    @property
    def tile_words(self) -> int:
        """The same of weights."""
        return self.op.format.blocks(ITEM_K) * TILE_WORDS

    @property
    def params_at(self) -> int:
        """Word of a ring step where parameters begin."""
        return self.split.chunk * self.tile_words

    @property
    def step_words(self) -> int:
        """Words of a ring step, 128-byte aligned."""
        return self.params_at + -(-self.split.chunk * self.param_words // 32) * 32

    @property
    def pitch(self) -> int:
        """Halves of a token in shared memory; 16 bytes mod 128: ldmatrix without conflicts."""
        return self.split.cta_items * ITEM_K + 8

    @property
    def exponents(self) -> tuple[float, float]:
        """What "post" leaves on the sums of rows g and g + 8; factors of rows undo it themselves."""
        if not self.op.scales_sums or self.op.format.row_factors:
            return 1.0, 1.0
        return tuple(2.0**power for power in get_converter(self.op.converter).scale_exp2[:2])

    @property
    def zero(self) -> float:
        """post: what codes are put behind, zero point included where it is the format's."""
        return float(self.op.format.zero + get_converter(self.op.converter).bias[0]) if self.op.scales_sums else 0.0

    @property
    def counts(self) -> bool:
        """Whether sums of x matter, times zero points."""
        return self.op.scales_sums and (not self.op.symmetric or self.zero != 0)


def ring_macro(shape: Shape) -> Macro:
    """Macro `issue`: what a warp fetches into its ring."""
    op, chunk, stages = shape.op, shape.split.chunk, shape.split.stages
    group, blocks, tile_words, p_words = op.group, op.format.blocks(ITEM_K), shape.tile_words, shape.param_words
    ir, (seg, zseg) = op.records_per(ITEM_K), shape.group_bytes
    per_record = (seg + zseg) // 16  # 16-byte copies of one record of one item
    step, p_base = shape.step_words, shape.params_at

    @T.macro
    def issue(W, P, R, base, q, at, lane):
        """Ring step q of a warp of CTA `at`: `chunk` row tiles x one item, with their parameters."""
        first = at.t0 + q // at.gn * chunk
        item = at.kg + q % at.gn
        slot = base + q % stages * step
        for m in T.unroll(chunk):
            if first + m < at.t1:
                tile = first + m
                for h in T.unroll(blocks):
                    cp_async(
                        R[slot + m * tile_words + h * TILE_WORDS + lane * 4],
                        W[item * blocks + h, tile // 4, tile % 4 * TILE_WORDS + lane * 4],
                    )
                if op.has_groups and lane < ir * per_record:
                    cp_async(
                        R[slot + p_base + m * p_words + lane * 4],
                        P[
                            0 if group == 0 else item * ir + lane // per_record,
                            tile // 4,
                            T.if_then_else(
                                lane % per_record < seg // 16,
                                tile % 4 * seg + lane % per_record * 16,
                                4 * seg + tile % 4 * 16,
                            ),
                        ],
                    )
        cp_commit()

    return issue


@dataclass(frozen=True)
class Operands:
    """Macros of `operand_macros`; function `fragment`."""

    load_x: Macro
    fragment: Call
    load_params: Macro
    operand_words: Macro
    convert: Macro


def operand_macros(shape: Shape) -> Operands:
    """From shared memory to operand registers."""
    op, nt, rows, pitch = shape.op, shape.split.token_tiles, shape.split.rows, shape.pitch
    fmt, bf16, sb = op.format, op.dtype == "bfloat16", op.scale_bytes
    cvt, words, per_step = get_converter(op.converter), param_macros(op), fmt.step_words
    seg, zseg = shape.group_bytes
    per_group = (seg + zseg) // 16
    biased, paired = "b0" in cvt.params, fmt.record_groups

    @T.macro
    def load_x(Xs, x, col, lane):
        """B fragments of one item from the resident X."""
        for j in T.unroll(4):
            for t in T.unroll(nt):
                ldmatrix4(x[(j * nt + t) * 4], Xs[x_row(nt, rows, t, lane) * pitch + col + j * 32 + lane // 8 * 8])

    def fragment(j, t):
        """Where in x the B fragment of k16 step j and token tile t begins."""
        return (j // 2 * nt + t) * 4 + j % 2 * 2

    @T.macro
    def load_params(R, p, q, s, z, u, lane):
        """Scale and zero point of rows g and g + 8 for group q of an item whose parameters start at word p; of a record
        of several groups the words, with the first one."""
        if op.scale_dtype == "float32":
            u[0] = lds32(R[p + q * per_group * 4 + lane // 4 * 2])
            u[1] = lds32(R[p + q * per_group * 4 + lane // 4 * 2 + 1])
        elif paired > 1:
            if q % paired == 0:
                lds64(u[0], R[p + q // paired * per_group * 4 + lane // 4 * 2])
        elif sb == 1:
            u[0] = lds16_at(R[p + q * per_group * 4], lane // 4, nbytes=16)
        else:
            u[0] = lds32(R[p + q * per_group * 4 + lane // 4])
        if paired == 1:
            words.scales(s, 0, u)
        if not op.symmetric:
            u[2] = lds16_at(R[p + q * per_group * 4 + seg // 4], lane // 4, nbytes=16)
            z[0] = T.cast(u[2] & T.uint32(255), "float32")
            z[1] = T.cast(u[2] >> T.uint32(8), "float32")

    @T.macro
    def operand_words(s, z, u, v, q):
        """exact / fused: the converter's packed (bias, scale) pairs of rows g and g + 8, for group q of an item."""
        if op.symmetric:
            u[2] = T.uint32(fmt.zero * 0x0101)
            z[0] = float(fmt.zero)
            z[1] = float(fmt.zero)
        if paired > 1:
            words.pair_word(v, 0, T.if_then_else(q % 4 < 2, u[0], u[1]), q % 2 == 1)
        else:
            words.scale_words(v, 0, u)
        if op.numerics == "fused":
            v[0] = pack2(-z[0] * s[0], -z[0] * s[0], bf16=bf16)
            v[2] = pack2(-z[1] * s[1], -z[1] * s[1], bf16=bf16)
        elif not biased:
            v[0] = T.uint32(0)
        elif fmt.bits == 8:
            words.bias_words(v, 0, u)
        elif bf16:
            v[0] = (T.uint32(0x4300) + (u[2] & T.uint32(255))) * T.uint32(0x10001)
            v[2] = (T.uint32(0x4300) + (u[2] >> T.uint32(8))) * T.uint32(0x10001)
        else:
            v[0] = (T.uint32(0x6400) + (u[2] & T.uint32(255))) * T.uint32(0x10001)
            v[2] = (T.uint32(0x5400) + (u[2] >> T.uint32(8)) * T.uint32(16)) * T.uint32(0x10001)

    def registers(a, i):
        """What word i of a k16 step becomes."""
        return T.access_ptr(a[i * (4 // per_step)], "w", 4 // per_step)

    @T.macro
    def convert(w, a, v, step):
        """Operand registers of a k16 step of those that are loaded."""
        for i in T.unroll(per_step):
            T.call_extern(
                "handle", cvt.device_name, w[step * per_step + i], registers(a, i), *words.of_converter(cvt, v, 0)
            )

    return Operands(load_x, fragment, load_params, operand_words, convert)


def sum_of_group_macros(shape: Shape, operands: Operands) -> tuple[Macro, Macro, Macro, Macro]:
    """Macros of numerics "post", whose sums of a group are scaled: `sum_tokens`, `begin` or `clear`, and `end`."""
    op, nt, rows, ig, steps = shape.op, shape.split.token_tiles, shape.split.rows, shape.item_groups, shape.group_steps
    cvt, kind = get_converter(op.converter), mma_kind(op.dtype)
    (e0, e1), zero, symmetric = shape.exponents, shape.zero, op.symmetric
    one_bits = 0x3F803F80 if op.dtype == "bfloat16" else 0x3C003C00

    @T.macro
    def sum_tokens(Xs, C0, x, a, d, at, lane):
        """C0 = -2^e0 * sum of x over each group of the warp's items, in accumulator column order."""
        for gi in T.serial(at.gn):
            operands.load_x(Xs, x, (at.g0 + gi) * ITEM_K, lane)
            for i in T.unroll(4):
                a[i] = T.uint32(one_bits)
            for q in T.unroll(ig):
                for t in T.unroll(nt):
                    for i in T.unroll(4):
                        d[i] = 0.0
                    for j in T.unroll(steps):
                        mma(kind, d, 0, a, 0, x, operands.fragment(q * steps + j, t))
                    for i in T.unroll(2):  # all rows of `a` are ones: each has the same sums
                        if T.And(lane < 4, t * 8 + lane * 2 + i < rows):
                            C0[((at.g0 + gi) * ig + q) * rows + t * 8 + lane * 2 + i] = d[i] * T.float32(-e0)
        syncwarp()

    @T.macro
    def begin(C0, d, c, z, at, gi, q, lane):
        """The sums of group q start with what its zero points and the codes' bias make of the tokens' sums."""
        for t in T.unroll(nt):
            for i in T.unroll(2):
                c[i] = C0[((at.g0 + gi) * ig + q) * rows + T.min(t * 8 + lane % 4 * 2 + i, rows - 1)]
                d[t * 8 + i] = c[i] * (T.float32(zero) if symmetric else z[0] + T.float32(cvt.bias[0]))
                d[t * 8 + 2 + i] = c[i] * (
                    T.float32(zero * e1 / e0)
                    if symmetric
                    else z[1] * T.float32(e1 / e0) + T.float32(cvt.bias[0] * e1 / e0)
                )
                d[t * 8 + 4 + i] = 0.0
                d[t * 8 + 6 + i] = 0.0

    @T.macro
    def clear(d):
        """Codes that are numbers as they are."""
        for i in T.unroll(8 * nt):
            d[i] = 0.0

    @T.macro
    def end(acc, d, s, m):
        """The sums of a group, times the scales, join those of row tile m."""
        s[0] = s[0] * T.float32(1.0 / e0)
        s[1] = s[1] * T.float32(1.0 / e1)
        for t in T.unroll(nt):
            for i in T.unroll(4):
                acc[(m * nt + t) * 4 + i] = acc[(m * nt + t) * 4 + i] + s[i // 2] * (d[t * 8 + i] + d[t * 8 + 4 + i])

    return sum_tokens, begin, clear, end


def store_macro(op: Operand, *, rows: Rows, bias: bool, factors: Factors | None) -> Macro:
    """Macro `store` of four rows of a token. factors: of rows that have such."""
    n, np_, dtype = rows.n, rows.blocks * BLOCK_ROWS, op.dtype

    @T.macro
    def store(to, at, r4, tok, row):
        """Four rows of one token, with the bias, in the output dtype."""
        Y, B, o4 = to.y, to.b, to.o4
        if factors is not None:
            lds128(to.f4, factors.at(to.p, T.min(row, np_ - 4)))
            for i in T.unroll(4):
                r4[i] = r4[i] * (to.f4[i] * T.float32(op.undone))
        if rows.whole:
            if row < n:
                for i in T.unroll(4):
                    o4[i] = T.cast(r4[i] + (T.cast(B[row + i], "float32") if bias else T.float32(0)), dtype)
                for i in T.vectorized(4):
                    Y[tok, row + i] = o4[i]
        else:
            for i in T.unroll(4):
                if row + i < n:
                    Y[tok, row + i] = T.cast(r4[i] + (T.cast(B[row + i], "float32") if bias else T.float32(0)), dtype)

    return store


def steps_of(shape: Shape, factors: Factors | None) -> Steps:
    """What warps do: the main loop is `item`. factors: of rows that have such."""
    op, nt, ig, steps = shape.op, shape.split.token_tiles, shape.item_groups, shape.group_steps
    post, counts, kind = op.scales_sums, shape.counts, mma_kind(op.dtype)
    ahead = 4 // op.format.step_words  # k16 steps of a load
    issue_step, operands = ring_macro(shape), operand_macros(shape)
    sum_tokens, begin, clear, end = sum_of_group_macros(shape, operands)

    @T.macro
    def issue(io, at, base, q, lane):
        issue_step(io.W, io.P, io.R, base, q, at, lane)

    @T.macro
    def behind(io, at, tx):
        if factors is not None:
            factors.fetch(io.P, T.min(at.t0 + tx, at.t1 - 1) * 16)

    @T.macro
    def open(io, at, lane):
        if counts:
            sum_tokens(io.Xs, io.C0, io.x, io.a, io.d, at, lane)

    @T.macro
    def multiply(acc, d, a, x, m, q, j):
        """k16 step j of group q by row tile m: to the sums of the group, two sets that take turns, or the tile's."""
        if post:
            for t in T.unroll(nt):
                mma(kind, d, t * 8 + j % 2 * 4, a, 0, x, operands.fragment(q * steps + j, t))
        else:
            for t in T.unroll(nt):
                mma(kind, acc, (m * nt + t) * 4, a, 0, x, operands.fragment(q * steps + j, t))

    @T.macro
    def item(io, at, gi, slot, lane):
        """128 k: load, convert and multiply, k16 by k16 step; what scales sums does so behind each group."""
        operands.load_x(io.Xs, io.x, (at.g0 + gi) * ITEM_K, lane)
        for m in T.unroll(shape.split.chunk):
            words, params = slot + m * shape.tile_words, slot + shape.params_at + m * shape.param_words
            for q in T.unroll(ig):
                if op.has_groups:
                    operands.load_params(io.R, params, q, io.s, io.z, io.u, lane)
                if counts:
                    begin(io.C0, io.d, io.c, io.z, at, gi, q, lane)
                elif post:
                    clear(io.d)
                elif op.has_groups:
                    operands.operand_words(io.s, io.z, io.u, io.v, q)
                for j in T.unroll(steps):
                    if (q * steps + j) % ahead == 0:
                        lds128(io.w, io.R[words + (q * steps + j) // ahead * TILE_WORDS + lane * 4])
                    operands.convert(io.w, io.a, io.v, (q * steps + j) % ahead)
                    multiply(io.acc, io.d, io.a, io.x, m, q, j)
                if post:
                    end(io.acc, io.d, io.s, m)

    return Steps(issue, item, behind=behind, open=open)


def build(target, *, n: int, k: int, nc: int, bias: bool, whole: bool = True, **params: Scalar):
    """The prim_func `main(X, W, P, B, WS, SEM, Y)` for M <= tokens, which is 8 * token_tiles where it is 0.

    Shapes: X [M, k] and Y [M, n] in `dtype`; W int32 [Kp/KB, Np/64, 512], blocks of KB k of the format `weight`; P
    uint8 [G, Np/64, R]; B [n] in `dtype` (one element when there is no bias); WS f32 [kc, tokens, Np]; SEM int32 [nc],
    zero before the first launch and after each one. `group` is 0 for one scale per row. With `joined`, pairs of CTAs
    along k are clusters, WS is [kc / 2, tokens, Np] and SEM [2 nc]; one pair needs neither.

    With n = nc = 0 both come with the launch, and `whole` says whether n is a multiple of 4; not with `joined`.
    """
    op, joined = take(Operand, params), params.get("joined", False)
    if (n == 0) != (nc == 0) or (n == 0 and joined):
        constraint = f"nc = {nc} must be 0 as well or neither, and joined = {joined} knows n"
        raise ArgumentError("n", n, constraint, "pass both, or neither")
    rows = Rows(n, -(-n // BLOCK_ROWS), n % 4 == 0) if n else Rows(T.dynamic("n"), T.dynamic("blocks"), whole)
    items, tiles = -(-k // ITEM_K), rows.blocks * (BLOCK_ROWS // 16)
    shape = Shape(op, Split(items, tiles, nc=nc or T.dynamic("nc"), **params))
    return program(target, shape, of=rows, k=k, bias=bias)


def program(target, shape: Shape, *, of: Rows, k: int, bias: bool) -> PrimFunc:
    """The prim_func of `build` for a legal shape."""
    op, split, nt, rows, stages = shape.op, shape.split, shape.split.token_tiles, shape.split.rows, shape.split.stages
    kc, nc, warps, chunk, cluster, joined = split.kc, split.nc, split.warps, split.chunk, split.cluster, split.joined
    fmt, dtype, counts = op.format, op.dtype, shape.counts
    n, np_, kp = of.n, of.blocks * BLOCK_ROWS, -(-k // ITEM_K) * ITEM_K
    ig, pitch, step = shape.item_groups, shape.pitch, shape.step_words
    factors = factor_macros(op, n, kp)  # which undo the operands' exponent, too
    pdl = target.supports("pdl")
    bulk_copies = target.supports("bulk_copy")  # then X does not queue behind the first weights
    resident = resident_macros(split, k=k, pitch=pitch, size=2, bulk_copies=bulk_copies)
    store = store_macro(op, rows=of, bias=bias, factors=factors)
    sums = sum_macros(split, "float32", store, floor=True)
    source = prelude(
        "cp_async", "lds", "ldmatrix", "pack", "semaphore",
        *(["multicast" if cluster > 1 else "bulk"] if bulk_copies else []), *(["cluster"] if joined else []),
        *(["prefetch_line"] if fmt.row_factors else []), *(["lds64"] if fmt.record_groups > 1 else []),
        extra=(get_converter(op.converter).device_source,),
    )  # fmt: skip
    cluster_dims = cluster_shape(target, kc, cluster, joined)
    M = T.dynamic("m")

    walk = walk_macro(steps_of(shape, factors), split, resident, sums, step_words=step, pdl=pdl)

    @T.prim_func
    def main(
        X: T.Tensor((M, k), dtype),
        W: T.Tensor((fmt.blocks(kp), of.blocks, BLOCK_WORDS), "int32"),
        P: T.Tensor((op.records(kp), of.blocks, op.record_bytes), "uint8"),
        B: T.Tensor((n if bias else 1,), dtype),
        WS: T.Tensor((kc // PAIR if joined else kc, rows, np_), "float32"),
        SEM: T.Tensor((nc * PAIR if joined else nc,), "int32"),
        Y: T.Tensor((M, n), dtype),
    ):
        with T.Kernel(kc, nc, threads=split.threads, prelude=source, **cluster_dims) as (bk, bn):
            Xs = T.alloc_shared((x_bytes(target, rows, 2 * pitch, 4 * warps * stages * step) // 2,), dtype)
            R = T.alloc_shared((warps * stages * step,), "int32")
            Q = T.alloc_shared((sums.words,), "float32")
            C0 = T.alloc_shared((split.cta_items * ig * rows if counts or not fmt.row_factors else 4,), "float32")
            xbar = T.alloc_cluster_barrier([1]) if cluster > 1 else T.alloc_barrier([1]) if bulk_copies else None
            mail = sums.mail()
            w = T.alloc_local((4,), "uint32")
            a = T.alloc_local((4,), "uint32")
            x = T.alloc_local((16 * nt,), "uint32")
            d = T.alloc_local((8 * nt,), "float32")
            c = T.alloc_local((2 * nt,), "float32")
            s = T.alloc_local((2,), "float32")
            z = T.alloc_local((2,), "float32")
            u = T.alloc_local((3,), "uint32")
            v = T.alloc_local((4,), "uint32")
            acc = T.alloc_local((chunk * nt * 4,), "float32")
            r4 = T.alloc_local((4,), "float32")
            o4 = T.alloc_local((4,), dtype)
            f4 = T.alloc_local((4,), "float32") if fmt.row_factors else None
            io = Buffers(
                X=X, W=W, P=P, WS=WS, SEM=SEM, Xs=Xs, R=R, Q=Q, C0=C0, xbar=xbar, mail=mail, w=w, a=a, x=x, d=d, c=c,
                s=s, z=z, u=u, v=v, acc=acc, r4=r4, to=Buffers(y=Y, b=B, p=P, o4=o4, f4=f4),
            )  # fmt: skip
            walk(io, M, bk, bn)

    return main
