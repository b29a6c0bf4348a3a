"""What a warpgroup does with four packed tiles of 16 tokens: scores, softmax and values of 16 to 64 rows by wgmma.

S^T[64 tokens, rows] = K Q^T: each warp converts one of the tiles to A registers, as mma.sync takes them, and Q lies in
shared memory for all. O^T[dims, rows] += V^T P^T: each warp converts a quarter of the head dimensions of all tiles, and
P goes through shared memory, the only thing that does. A packed tile is the one that the other programs read.

Operands in shared memory are K-major core matrices of 8 rows by 16 bytes, [k / 8][row / 8][8][8], without a swizzle.
Accumulators are in the order of mma.sync's: value e of lane 4 g + t belongs to token or dimension g + 8 * (e // 2) of
the warp's 16 and to row 2 t + e % 2 of its group of eight rows.
"""

from dataclasses import dataclass
from typing import NamedTuple

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.attention.cache.layout import CacheLayout
from terrazzo.ops.attention.device.calls import at32, ex2, fma, hmul2, less_mask, load_words, store_words, xor_shuffle
from terrazzo.ops.attention.device.tile_macros import LOWEST, THRESHOLD, Arithmetic, each, less, make_tile_macros
from terrazzo.ops.tiles.calls import mma_kind, pack2, stmatrix4_trans, unpack, wg_any, wg_sync, wgmma
from terrazzo.ops.tiles.language import T
from terrazzo.ops.tiles.types import Buffer, Buffers, Call, Expr, Macro

TILES = 4
"""Tiles of a step, one for each warp."""
TOKENS = 16 * TILES


def values_share(layout: CacheLayout) -> int:
    """Words of a tile's values that a lane of each of the four warps loads; 0 if they cannot be parted so."""
    words = layout.v_words // 32
    return words // TILES if words % TILES == 0 else 0


def supports(layout: CacheLayout) -> bool:
    """Whether steps of 64 tokens end where channel groups do, and four warps can part the values of a tile."""
    return layout.k.group % TOKENS == 0 and values_share(layout) > 0


def exchange_words(nt: int) -> int:
    """int32 words of a warpgroup's exchange: P^T of two steps, then two numbers of each warp for each row."""
    return 2 * TOKENS * 8 * nt // 2 + TILES * 2 * 8 * nt


@dataclass(frozen=True)
class Step:
    """Sizes of a warpgroup's step."""

    of: Arithmetic

    @property
    def atoms(self) -> int:
        """Of a warp."""
        return self.of.layout.head_dim // 64

    @property
    def v_atoms(self) -> int:
        """Of one load."""
        return self.of.layout.v_layout.block_rows // 16

    @property
    def share(self) -> int:
        return values_share(self.of.layout)

    @property
    def parts(self) -> int:
        """Warps that part a load."""
        return max(self.of.layout.v_layout.load_words // self.share, 1)

    @property
    def p_words(self) -> int:
        return TOKENS * 8 * self.of.nt // 2

    @property
    def notes(self) -> int:
        """Word of the exchange behind P."""
        return 2 * self.p_words

    @property
    def step_16(self) -> int:
        """16-byte units of a k16 slice of an operand in shared memory."""
        return 2 * self.of.nt * 8


def _make_operand_macro() -> Macro:
    """Macro `operand`: words of a tile at an address, converted to registers."""

    @T.macro
    def operand(cvt, words, source, st, to, first):
        """`words` words from an address to registers to[first] on, converted."""
        if cvt.outputs == 1:
            load_words(words, to[first], source)
        else:
            load_words(words, st.w, source)
            for i in each(words):
                T.call_extern(
                    "handle", cvt.device_name, st.w[i], T.access_ptr(to[first + i * cvt.outputs], "w", cvt.outputs)
                )

    return operand


def _make_product_macros(f: Step) -> tuple[Macro, Macro, Macro, Macro, Macro]:
    """Macros `keys` (a tile to A registers), `product` (with Q) and `settle`, and of Q itself `sum_q` and `scale_q`."""
    tile, layout, nt, step_16 = f.of, f.of.layout, f.of.nt, f.step_16
    D, n, slices, k = layout.head_dim, 8 * nt, layout.head_dim // 16, layout.k
    k_load, k_atoms = layout.k_layout.load_words, layout.k_layout.block_k // 16
    k_kinds, operand = (mma_kind(k.operand),) * 2, _make_operand_macro()

    @T.macro
    def keys(base, st, lane):
        """The warp's tile at address `base` to A registers."""
        for j in each(slices // k_atoms):
            operand(k.converter, k_load, at32(base, (j * 32 + lane) * k_load), st, st.a, j * k_atoms * 4)

    @T.macro
    def product(q, at, st):
        """s = (A registers) Q^T, Q at 16-byte unit `at` behind descriptor q: one group of products, to be awaited."""
        T.warpgroup_fence_operand(st.s, 0, nt * 4)
        T.warpgroup_fence_operand(st.a, 0, slices * 4)
        T.warpgroup_arrive()
        for j in each(slices):
            wgmma(n, k_kinds, st.s, 0, st.a, j * 4, q, at + j * step_16, j > 0)
        T.warpgroup_commit_batch()

    @T.macro
    def settle(st):
        """All products have ended."""
        T.warpgroup_wait(0)
        T.warpgroup_fence_operand(st.s, 0, nt * 4)

    @T.macro
    def sum_q(q, at, st):
        """qs = scale * (sum of each row of Q, times the format's bias), by a product with ones."""
        if tile.q_weight:
            for j in each(slices):
                for i in each(4):
                    st.a[j * 4 + i] = T.uint32(tile.unshifted(i // 2))
            product(q, at, st)
            settle(st)
            for i in each(nt * 2):
                st.qs[i] = st.s[i // 2 * 4 + i % 2] * (st.scale * T.float32(tile.q_weight))

    @T.macro
    def scale_q(head, q, rows, scaled, x, st, w):
        """Q in words `rows` of shared memory times the scales of a channel group at address `head`, to words `scaled`;
        and its products with the zeros, by a product whose 64 rows are all the zeros. q: descriptor of both."""
        for e in each(n * D // 8 // 128):
            row = (e * 128 + w.quarter * 32 + w.lane[0]) % n
            chunk = (e * 128 + w.quarter * 32 + w.lane[0]) // n
            at = ((chunk * nt + row // 8) * 8 + row % 8) * 4
            load_words(4, st.w, x.ring[rows + at])
            for t in each(4):
                load_words(1, st.w[4 + t], at32(head, chunk // 4 * 16 + t * 4 + chunk % 4))
                st.w[t] = hmul2(st.w[t], st.w[4 + t])
            store_words(4, x.ring[scaled + at], st.w)
        for j in each(slices // 2):
            load_words(4, st.w, at32(head, D // 2 + j * 16 + w.lane[0] % 4 * 4))
            for i in each(2):
                for half in each(2):
                    at = (j * 2 + i) * 4 + half * 2
                    st.a[at] = st.w[i * 2 + half]
                    if tile.k_shift[half]:
                        st.a[at] = hmul2(st.a[at], T.uint32(tile.unshifted(half)))
                    st.a[at + 1] = st.a[at]
        product(q, rows // 4, st)
        settle(st)
        for i in each(nt * 2):
            st.qs[i] = st.s[i // 2 * 4 + i % 2] * st.scale
        T.fence_proxy_async()
        wg_sync(w.warp[0])

    return keys, product, settle, sum_q, scale_q


def _make_value_macros(f: Step) -> tuple[Macro, Macro, Macro, Macro, Macro]:
    """Macros `place_values`, `find_values` and `values` (of four tiles, to A registers), `weigh_values` and `flush`."""
    layout, nt, atoms, parts, share = f.of.layout, f.of.nt, f.atoms, f.parts, f.share
    v_load, v_atoms, p_words, step_16 = layout.v_layout.load_words, f.v_atoms, f.p_words, f.step_16
    n, v, v_kinds, clean = 8 * nt, layout.v, (mma_kind(layout.v.operand),) * 2, layout.v.plain
    operand = _make_operand_macro()

    @T.macro
    def place_values(w):
        """Which head dimensions are the lane's. Where warps part a load, every eight lanes take another part of it, so
        that they read different banks: the product's rows may be any dimensions."""
        if parts > 1:
            w.atom[0] = (w.quarter % parts + w.lane[0] // 8) % parts * atoms + w.quarter // parts * v_atoms
        else:
            w.atom[0] = w.quarter * atoms

    @T.macro
    def find_values(w):
        """Where the values of these dimensions begin in a tile of this format."""
        w.values[0] = (w.atom[0] // v_atoms * 32 + w.lane[0]) * v_load + (
            w.atom[0] % v_atoms // atoms * share if parts > 1 else 0
        )

    @T.macro
    def values(tile_at, token, length, st, w):
        """The lane's values of the four tiles, which lie at tile_at(0) to tile_at(3), to A registers."""
        for r in each(TILES):
            for i in each(max(share // v_load, 1)):
                operand(
                    v.converter, min(share, v_load),
                    at32(tile_at(r), layout.k_words + w.values[0] + i * 32 * v_load), st, st.v,
                    r * atoms * 4 + i * v_atoms * 4,
                )  # fmt: skip
            if clean:  # what lies behind the last token may be anything, and 0 * NaN is NaN
                for e in each(2):
                    first = token + r * 16 + w.lane[0] % 4 * 2 + e * 8
                    st.keep[e] = (less_mask(first, length) & T.uint32(0xFFFF)) | (
                        less_mask(first + 1, length) & T.uint32(0xFFFF0000)
                    )
                for i in each(atoms * 4):
                    st.v[r * atoms * 4 + i] = st.v[r * atoms * 4 + i] & st.keep[i % 4 // 2]

    @T.macro
    def weigh_values(x, st, w):
        """O^T += V^T P^T of the step before: one group of products, to be awaited."""
        T.warpgroup_fence_operand(st.o, 0, atoms * nt * 4)
        T.warpgroup_fence_operand(st.v, 0, TILES * atoms * 4)
        T.warpgroup_arrive()
        for r in each(TILES):
            for i in each(atoms):
                wgmma(
                    n, v_kinds, st.o, i * nt * 4, st.v, (r * atoms + i) * 4, x.p,
                    (w.turn[0] ^ 1) * (p_words // 4) + r * step_16,
                )  # fmt: skip
        T.warpgroup_commit_batch()

    @T.macro
    def flush(x, st, w):
        """The values of the last step, and zeros in their place."""
        weigh_values(x, st, w)
        T.warpgroup_wait(0)
        T.warpgroup_fence_operand(st.o, 0, atoms * nt * 4)
        T.warpgroup_fence_operand(st.v, 0, TILES * atoms * 4)
        for i in each(TILES * atoms * 4):
            st.v[i] = T.uint32(0)

    return place_values, find_values, values, weigh_values, flush


def _make_softmax_macros(f: Step) -> tuple[Macro, Macro, Macro]:
    """Macros `weigh` (scores become weights in the exchange), `raise_maxima` and `totals`."""
    tile, nt, n, atoms, p_words, notes = f.of, f.of.nt, 8 * f.of.nt, f.atoms, f.p_words, f.notes
    v_bf16, params = tile.layout.v.bf16, tile.layout.token_params

    @T.macro
    def put(to, st, i):
        """st.x[i] to an address, which comes by name: TileLang would fence a store that it knows off from wgmma, even
        where that happens once in many steps and the fence is there."""
        store_words(1, to, st.x[i])

    @T.macro
    def put_matrices(to, a, b, c, d):
        """The same for four 8x8 matrices, transposed."""
        stmatrix4_trans(to, a, b, c, d)

    @T.macro
    def raise_maxima(x, st, w):
        """The rows' running maxima are those of all four warps."""
        for i in each(nt * 2):
            for d in each(3):
                st.x[i] = T.max(st.x[i], xor_shuffle(st.x[i], 4 << d))
            if less(w.lane[0], 4):
                put(
                    T.access_ptr(x.ring[x.at + notes + w.quarter * n + i // 2 * 8 + w.lane[0] * 2 + i % 2], "w", 1),
                    st,
                    i,
                )
        wg_sync(w.warp[0])
        for i in each(nt * 2):
            st.x[i] = st.m[i]
            for q in each(TILES):
                st.x[i] = T.max(
                    st.x[i],
                    T.reinterpret(x.ring[x.at + notes + q * n + i // 2 * 8 + w.lane[0] % 4 * 2 + i % 2], "float32"),
                )
            st.f[0] = ex2(st.m[i] - st.x[i])
            st.m[i] = st.x[i]
            st.l[i] = st.l[i] * st.f[0]
            st.z[i] = st.z[i] * st.f[0]
            for a in each(atoms):
                for half in each(2):
                    at = (a * nt + i // 2) * 4 + half * 2 + i % 2
                    st.o[at] = st.o[at] * st.f[0]

    @T.macro
    def weigh(x, st, w):
        """P^T of the warp's tile to the exchange, and what the sums are with it."""
        if tile.layout.v.token_wise:
            for e in each(2):
                st.f[e] = unpack(0, st.par[2 * (params - 1) + e], bf16=False) * T.float32(tile.p_factor[e])
                st.f[2 + e] = unpack(1, st.par[2 * (params - 1) + e], bf16=False)
        for t in each(nt):
            for e in each(4):
                st.p[e] = ex2(st.s[t * 4 + e] - st.m[t * 2 + e % 2])
            for e in each(2):
                st.ln[t * 2 + e] = st.l[t * 2 + e] + (st.p[e] + st.p[2 + e])
                if tile.layout.v.token_wise:
                    st.zn[t * 2 + e] = fma(st.p[e], st.f[2], fma(st.p[2 + e], st.f[3], st.z[t * 2 + e]))
            for e in each(4):
                if tile.layout.v.token_wise:
                    st.p[e] = st.p[e] * st.f[e // 2]
                elif tile.p_factor[e // 2] != 1:
                    st.p[e] = st.p[e] * T.float32(tile.p_factor[e // 2])
            for half in each(2):
                st.b[t * 2 + half] = pack2(st.p[2 * half], st.p[2 * half + 1], bf16=v_bf16)
        for t in each(0, nt, 2):  # lanes 8 i .. 8 i + 7 name the rows of matrix i: halves of tokens, then of rows
            core = (w.quarter * 2 + w.lane[0] // 8 % 2) * nt + t + w.lane[0] // 16
            put_matrices(
                T.access_ptr(x.ring[x.at + w.turn[0] * p_words + (core * 8 + w.lane[0] % 8) * 4], "w", 4),
                st.b[t * 2], st.b[t * 2 + 1], st.b[t * 2 + 2], st.b[t * 2 + 3],
            )  # fmt: skip
        T.fence_proxy_async()

    @T.macro
    def totals(x, st, w):
        """l and z of each row over all lanes and warps, in a fixed order."""
        for i in each(nt * 2):
            for d in each(3):
                st.l[i] = st.l[i] + xor_shuffle(st.l[i], 4 << d)
                st.z[i] = st.z[i] + xor_shuffle(st.z[i], 4 << d)
            at = x.at + notes + (w.quarter * n + i // 2 * 8 + w.lane[0] % 4 * 2 + i % 2) * 2
            if less(w.lane[0], 4):
                x.ring[at] = T.reinterpret(st.l[i], "int32")
                x.ring[at + 1] = T.reinterpret(st.z[i], "int32")
        wg_sync(w.warp[0])
        for i in each(nt * 2):
            st.l[i] = 0.0
            st.z[i] = 0.0
            for q in each(TILES):
                at = x.at + notes + (q * n + i // 2 * 8 + w.lane[0] % 4 * 2 + i % 2) * 2
                st.l[i] = st.l[i] + T.reinterpret(x.ring[at], "float32")
                st.z[i] = st.z[i] + T.reinterpret(x.ring[at + 1], "float32")

    return weigh, raise_maxima, totals


class Exchange(NamedTuple):
    """What a warpgroup has in shared memory `ring`: its P^T, by descriptor `p` and from word `at` on; Q behind
    descriptor `q`."""

    ring: Buffer
    q: Buffer
    p: Buffer
    at: Expr


class Warpgroup(NamedTuple):
    """Macros over a step of 64 tokens; `state`, the registers of a thread: scale and cap in units of log2, window in
    tokens.

    `w` holds `lane`, the warp `quarter` of its warpgroup, that one's index `warp`, and one-element local buffers
    `atom`, the first of the lane's atoms of 16 head dimensions, and `values`, the word of a tile's values where those
    begin. `x` is its `Exchange`.
    """

    of: Arithmetic
    state: Call
    clear: Macro
    adopt: Macro
    place_values: Macro
    find_values: Macro
    sum_q: Macro
    scale_q: Macro
    step: Macro
    flush: Macro
    totals: Macro


def make_warpgroup_macros(f: Arithmetic, early: bool = False) -> Warpgroup:
    """Those of 8 * nt rows; f: of one tile, for each warp. `early`: values are converted while keys are multiplied,
    where registers allow."""
    layout, nt, sizes = f.layout, f.nt, Step(f)
    if not supports(layout):
        raise ArgumentError(
            "layout", layout.identity, f"needs channel groups of {TOKENS} tokens and values that four warps can part",
            "use the program of single warps",
        )  # fmt: skip
    tile, slices, atoms, p_words = make_tile_macros(f), f.slices, sizes.atoms, sizes.p_words
    keys, product, settle, sum_q, scale_q = _make_product_macros(sizes)
    place_values, find_values, values, weigh_values, flush = _make_value_macros(sizes)
    weigh, raise_maxima, totals = _make_softmax_macros(sizes)

    def state(scale: Expr, cap: Expr, window: Expr) -> Buffers:
        f32, u32 = "float32", "uint32"
        return Buffers(
            o=(atoms * nt * 4, f32), s=(nt * 4, f32), m=(nt * 2, f32), l=(nt * 2, f32), z=(nt * 2, f32),
            qs=(nt * 2, f32), x=(nt * 2, f32), ln=(nt * 2, f32), zn=(nt * 2, f32), f=(4, f32), p=(4, f32), top=(1, f32),
            a=(slices * 4, u32), v=(TILES * atoms * 4, u32), w=(8, u32), par=(4, u32), keep=(2, u32), b=(nt * 2, u32),
            hi=(nt * 2, "int32"), scale=scale, cap=cap, window=window,
        )  # fmt: skip

    @T.macro
    def clear(x, st, w):
        """No token has been seen: the values and P of the step before the first are zeros."""
        for i in each(atoms * nt * 4):
            st.o[i] = 0.0
        for i in each(nt * 2):
            st.m[i] = T.float32(LOWEST)
            st.l[i] = 0.0
            st.z[i] = 0.0
        for i in each(TILES * atoms * 4):
            st.v[i] = T.uint32(0)
        for i in each(4):
            st.w[i] = T.uint32(0)
        w.turn[0] = 0
        for i in each(p_words // 512):
            store_words(4, x.ring[x.at + p_words + (i * 128 + w.quarter * 32 + w.lane[0]) * 4], st.w)

    @T.macro
    def adopt(st):
        """Sums of O^T at true scale become sums of this format, whose rows carry powers of two."""
        for i in each(atoms * nt * 4):
            if f.v_factor[i % 4 // 2] != 1:
                st.o[i] = st.o[i] * T.float32(1 / f.v_factor[i % 4 // 2])

    @T.macro
    def step(tile_at, q_at, x, st, token, length, edge, ends, w):
        """The warpgroup's tokens `token` to `token` + 63: four tiles at the addresses tile_at(0) to tile_at(3), Q at
        16-byte unit q_at behind x.q; `edge`: some tokens may lie outside a row's limits, which macro `ends` then puts
        into st.hi. The values of the step before are multiplied beside, those of this one remain. After it all warps
        have read the tiles.

        P is made for the maxima there are, and once more if a score turns out to exceed one by too much: so one
        barrier does for both."""
        weigh_values(x, st, w)
        keys(tile_at(w.quarter), st, w.lane[0])
        product(x.q, q_at, st)
        T.warpgroup_wait(1)
        T.warpgroup_fence_operand(st.o, 0, atoms * nt * 4)
        T.warpgroup_fence_operand(st.v, 0, TILES * atoms * 4)
        values(tile_at, token, length, st, w)
        if early:
            T.warpgroup_fence_operand(st.v, 0, TILES * atoms * 4)
        settle(st)
        tile.finish(tile_at(w.quarter), st, 0, w.lane[0])
        if edge:
            ends(st, w)
            tile.mask(st, 0, token + w.quarter * 16, length, w.lane[0])
        for i in each(nt * 2):
            st.x[i] = T.max(st.s[i // 2 * 4 + i % 2], st.s[i // 2 * 4 + i % 2 + 2])
        st.top[0] = st.x[0] - st.m[0]
        for i in each(1, nt * 2):
            st.top[0] = T.max(st.top[0], st.x[i] - st.m[i])
        weigh(x, st, w)
        if wg_any(w.warp[0], st.top[0] > T.float32(THRESHOLD)):
            raise_maxima(x, st, w)
            weigh(x, st, w)
            wg_sync(w.warp[0])
        for i in each(nt * 2):
            st.l[i] = st.ln[i]
            if f.layout.v.token_wise:
                st.z[i] = st.zn[i]
        w.turn[0] = w.turn[0] ^ 1

    return Warpgroup(
        f, state, clear, adopt, place_values, find_values, sum_q, scale_q, step, flush, totals
    )  # fmt: skip
