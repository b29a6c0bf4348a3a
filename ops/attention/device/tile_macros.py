"""What one warp does with packed tiles of 16 tokens: scores, softmax, values; generated from the derived layouts.

Accumulator registers of a tile (lane = 4 g + t): value e belongs to token (or dimension) g + 8 * (e // 2) and to row
2 t + e % 2 of its group of eight rows.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from terrazzo.ops.attention.cache.layout import CacheLayout, Exponents, exponents
from terrazzo.ops.attention.device.calls import (
    among,
    any_lane,
    at32,
    ex2,
    fma,
    hmul2,
    less_mask,
    load_words,
    store_words,
    tanh,
    transpose,
    xor_shuffle,
)
from terrazzo.ops.tiles.calls import mma, mma_kind, pack2, unpack
from terrazzo.ops.tiles.language import T
from terrazzo.ops.tiles.types import Buffers, Call, Expr, Macro

LOWEST = -1e30
"""Running maximum before any token."""
THRESHOLD = 4.0
"""Sums are rescaled when a score exceeds the running maximum by this power of two."""
P_EXPONENT = 4
"""P * scale is lifted by 2^4 on its way to f16, away from subnormals; p <= 2^THRESHOLD leaves room for scales < 256."""


class Sizes:
    """Sizes of tensors that launches name."""

    def __init__(self, *names: str) -> None:
        for name in names:
            setattr(self, name, T.dynamic(name))

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Expr: ...


def each(*bounds: int) -> tuple[int, ...]:
    """Range of a loop that is expanded while the program is built: its variable is a Python int, not a TIR one."""
    return tuple(range(*bounds))


def less(a: Expr, b: Expr) -> Expr:
    """a < b as a condition that TileLang does not try to prove (device.py says why)."""
    return T.call_extern("bool", "tz_less", a, b)


def smaller(a: Expr, b: Expr) -> Expr:
    """min(a, b), likewise."""
    return T.call_extern("int32", "tz_min", a, b)


def larger(a: Expr, b: Expr) -> Expr:
    """max(a, b), likewise."""
    return T.call_extern("int32", "tz_max", a, b)


@dataclass(frozen=True)
class Arithmetic:
    """A warp's arithmetic over `tiles` tiles and 8 * nt rows, and what formats say of it: the powers of two that
    operands and sums carry in their halves, and what a load has.

    Attributes:
        rows_shared: `q` of a step is the address of the rows' B fragments in shared memory, int32
            [slices / 2, nt, 32, 4], and not registers [slices, nt, 2]; and what is true of each row, its last token and
            sum of Q, at st.row_facts.
        inner: other tokens than those from the layout's sink_tokens on, up to the length that a step is given, are
            hidden from all rows, as they are read elsewhere.
    """

    layout: CacheLayout
    nt: int
    tiles: int
    softcap: bool
    rows_shared: bool = False
    inner: bool = False

    @property
    def slices(self) -> int:
        return self.layout.head_dim // 16

    @cached_property
    def _k(self) -> tuple[Exponents, int]:
        made = exponents(self.layout.k, self.layout.k_layout)
        return made, max(made.k) // 2

    @cached_property
    def _v(self) -> tuple[Exponents, int, int]:
        made = exponents(self.layout.v, self.layout.v_layout)
        return made, max(made.k) // 2, P_EXPONENT if self.layout.v.token_wise else 0

    @property
    def k_shift(self) -> tuple[int, int]:
        """Power of two that Q carries in each k half."""
        e, mid = self._k
        return mid - e.k[0], mid - e.k[1]

    @property
    def k_factor(self) -> tuple[float, ...]:
        e, mid = self._k
        return tuple(2.0 ** -(row + mid) for row in e.row)

    @property
    def p_factor(self) -> tuple[float, ...]:
        e, mid, lift = self._v
        return tuple(2.0 ** (lift + mid - half) for half in e.k)

    @property
    def v_factor(self) -> tuple[float, ...]:
        """Factor of O^T in each row half."""
        e, mid, lift = self._v
        return tuple(2.0 ** -(row + lift + mid) for row in e.row)

    @property
    def atoms(self) -> dict[bool, int]:
        """Of one load, of keys (True) or values."""
        return {True: self.layout.k_layout.block_k // 16, False: self.layout.v_layout.block_rows // 16}

    @property
    def words(self) -> dict[bool, int]:
        return {True: self.layout.k_layout.load_words, False: self.layout.v_layout.load_words}

    @property
    def q_weight(self) -> int:
        """Of the sum of Q in a score; 0: it is not in any."""
        return self.layout.k.bias or int(self.layout.k.token_wise)

    def unshifted(self, half: int) -> int:
        """The 16-bit pair of 2^-k_shift."""
        return (0x3F803F80 if self.layout.k.bf16 else 0x3C003C00) - self.k_shift[half] * 0x04000400


def _make_operand_macro(f: Arithmetic) -> Macro:
    """Macro `operand`: one load of a lane, of keys or of values, converted."""
    words = f.words

    @T.macro
    def operand(st, base, offset, is_key, lane):
        """One load of a lane, converted to A registers of its atoms."""
        if is_key:
            cvt = f.layout.k.converter
        else:
            cvt = f.layout.v.converter
        if cvt.outputs == 1:
            load_words(words[is_key], st.a, at32(base, offset + lane * words[is_key]))
        else:
            load_words(words[is_key], st.w, at32(base, offset + lane * words[is_key]))
            for i in each(words[is_key]):
                T.call_extern("handle", cvt.device_name, st.w[i], T.access_ptr(st.a[i * cvt.outputs], "w", cvt.outputs))

    return operand


def _make_query_macros(f: Arithmetic) -> tuple[Macro, Macro]:
    """Macros `sum_q` and `scale_q`: the rows' sums of Q that zeros multiply, and Q times a channel group's scales."""
    nt, D, slices, k_kind = f.nt, f.layout.head_dim, f.layout.head_dim // 16, mma_kind(f.layout.k.operand)
    q_weight, unshifted = f.q_weight, f.unshifted

    @T.macro
    def sum_q(st):
        """qs = scale * (sum of each row of Q, times the format's bias), by a product with ones."""
        if q_weight:
            for i in each(nt * 8):
                st.acc[i] = 0.0
            for i in each(4):
                st.a[i] = T.uint32(unshifted(i // 2))
            for j in each(slices):  # two chains: nothing else is under way
                for t in each(nt):
                    mma(k_kind, st.acc, (j % 2 * nt + t) * 4, st.a, 0, st.q, (j * nt + t) * 2)
            for t in each(nt):
                for j in each(2):
                    st.qs[t * 2 + j] = (st.acc[t * 4 + j] + st.acc[(nt + t) * 4 + j]) * (st.scale * T.float32(q_weight))

    @T.macro
    def scale_q(head, rows, scaled, st, lane):
        """The B fragments at address `rows` times the scales of a channel group, to registers qk or to address
        `scaled`, and their products with its zeros (by an MMA whose 16 rows are all the zeros)."""
        for i in each(nt * 4):
            st.acc[i] = 0.0
        for j in each(slices // 2):
            for t in each(nt):
                load_words(4, st.a[8 + t * 4], at32(rows, ((j * nt + t) * 32 + lane) * 4))
            for part in each(2):
                load_words(4, st.w, at32(head, part * (D // 2) + j * 16 + lane % 4 * 4))
                if part == 0:
                    for t in each(nt):
                        for i in each(4):
                            if f.rows_shared:
                                st.qf[i] = hmul2(st.a[8 + t * 4 + i], st.w[i])
                            else:
                                st.qk[((j * 2 + i // 2) * nt + t) * 2 + i % 2] = hmul2(st.a[8 + t * 4 + i], st.w[i])
                        if f.rows_shared:  # every lane reads back its own words
                            store_words(4, at32(scaled, ((j * nt + t) * 32 + lane) * 4), st.qf)
                else:
                    for i in each(2):
                        for half in each(2):
                            st.a[half * 2] = st.w[i * 2 + half]
                            if f.k_shift[half]:
                                st.a[half * 2] = hmul2(st.a[half * 2], T.uint32(unshifted(half)))
                            st.a[half * 2 + 1] = st.a[half * 2]
                        for t in each(nt):
                            mma("fp16", st.acc, t * 4, st.a, 0, st.a, 8 + t * 4 + i * 2)
        for t in each(nt):
            for j in each(2):
                st.qs[t * 2 + j] = st.acc[t * 4 + j] * st.scale

    return sum_q, scale_q


def _make_key_macros(f: Arithmetic, operand: Macro) -> tuple[Macro, Macro]:
    """Macros `products` (of keys and Q) and `finish` (which makes scores of them)."""
    layout, nt, tiles, rows_shared, slices = f.layout, f.nt, f.tiles, f.rows_shared, f.layout.head_dim // 16
    k, group, params = layout.k, layout.k.group, layout.token_params
    k_kind, atoms, words = mma_kind(k.operand), f.atoms, f.words

    def chain(r: int, t: int, at: int):
        """(accumulators, first) of row group t of tile r for atom `at`: two chains where there is nothing else to do
        while a product is under way."""
        if nt * tiles == 1 and at % 2:
            return "acc", 0
        return "s", (r * nt + t) * 4

    @T.macro
    def shared_products(base, st, q, which, j, lane):
        """`products` of load j, with the rows' fragments of two atoms at a time from shared memory."""
        per_pair = 8 // k.converter.outputs  # words of two atoms
        for r in which:
            load_words(
                words[True],
                st.wk[(r - which[0]) * 4],
                at32(base, (r - which[0]) * layout.tile_words + j * 32 * words[True] + lane * words[True]),
            )
        for pair in each(atoms[True] // 2):
            for t in each(nt):
                load_words(4, st.qf[t * 4], at32(q, (((j * atoms[True]) // 2 + pair) * nt + t) * 128 + lane * 4))
            for r in which:
                for i in each(per_pair):
                    T.call_extern(
                        "handle", k.converter.device_name, st.wk[(r - which[0]) * 4 + pair * per_pair + i],
                        T.access_ptr(st.a[i * k.converter.outputs], "w", k.converter.outputs),
                    )  # fmt: skip
                for i in each(2):
                    for t in each(nt):
                        name, first = chain(r, t, j * atoms[True] + pair * 2 + i)
                        mma(k_kind, getattr(st, name), first, st.a, i * 4, st.qf, t * 4 + i * 2)

    @T.macro
    def products(base, st, q, which, lane):
        """K Q^T of the tiles `which`, the first of them at address `base`, to st.s."""
        for i in each(4 * nt * len(which)):
            st.s[which[0] * nt * 4 + i] = 0.0
        if nt * tiles == 1:
            for i in each(4):
                st.acc[i] = 0.0
        for j in each(slices // atoms[True]):
            if rows_shared:
                shared_products(base, st, q, which, j, lane)
            else:
                for r in which:
                    operand(
                        st, at32(base, (r - which[0]) * layout.tile_words),
                        j * 32 * words[True], True, lane,
                    )  # fmt: skip
                    for i in each(atoms[True]):
                        at = j * atoms[True] + i
                        for t in each(nt):
                            name, first = chain(r, t, at)
                            mma(k_kind, getattr(st, name), first, st.a, i * 4, q, (at * nt + t) * 2)

    @T.macro
    def finish(base, st, r, lane):
        """The softmax's argument, in units of log2, of the products of tile r at address `base`."""
        if params:
            load_words(2 * params, st.par[r * 4], at32(base, layout.param_offset + lane // 4 * (2 * params)))
        if rows_shared and f.q_weight:
            for t in each(nt):
                load_words(2, st.qs[t * 2], at32(st.row_facts, (nt + t) * 8 + lane % 4 * 2))
        for e in each(2):
            if k.token_wise:
                st.f[e] = unpack(0, st.par[r * 4 + e], bf16=False) * (st.scale * T.float32(f.k_factor[e]))
                st.f[2 + e] = unpack(1, st.par[r * 4 + e], bf16=False)
            else:
                st.f[e] = st.scale * T.float32(f.k_factor[e])
        for t in each(nt):
            for e in each(4):
                at = (r * nt + t) * 4 + e
                if nt * tiles == 1:
                    st.s[at] = st.s[at] + st.acc[e]
                if k.token_wise:
                    st.s[at] = fma(st.s[at], st.f[e // 2], st.f[2 + e // 2] * st.qs[t * 2 + e % 2])
                elif group or k.bias:
                    st.s[at] = fma(st.s[at], st.f[e // 2], st.qs[t * 2 + e % 2])
                else:
                    st.s[at] = st.s[at] * st.f[e // 2]
                if f.softcap:
                    st.s[at] = st.cap * tanh(st.s[at] / st.cap)

    return products, finish


def _make_softmax_macros(f: Arithmetic) -> tuple[Macro, Macro]:
    """Macros `mask` (of the scores of tokens that a row does not see) and `rescale` (to larger running maxima)."""
    layout, nt, tiles, slices = f.layout, f.nt, f.tiles, f.layout.head_dim // 16
    params, v_token = layout.token_params, f.layout.v.token_wise

    @T.macro
    def mask(st, r, token, length, lane):
        """Scores outside a row's limits become -inf; parameters and values of tokens past the end must not be read."""
        span = T.call_extern("int32", "tz_select", less(0, st.window), st.window, 0x7FFFFFFF)  # tokens that a row sees
        for t in each(nt):
            for e in each(4):
                at = token + lane // 4 + e // 2 * 8
                st.s[(r * nt + t) * 4 + e] = T.if_then_else(
                    among(at, st.hi[t * 2 + e % 2], span),
                    st.s[(r * nt + t) * 4 + e],
                    -T.infinity("float32"),
                )
                if f.inner:
                    st.s[(r * nt + t) * 4 + e] = T.if_then_else(
                        among(at, length, length - layout.sink_tokens),
                        st.s[(r * nt + t) * 4 + e],
                        -T.infinity("float32"),
                    )
        if v_token:
            for e in each(2):
                st.par[r * 4 + 2 * (params - 1) + e] = st.par[r * 4 + 2 * (params - 1) + e] & less_mask(
                    token + lane // 4 + e * 8, length
                )
        if f.layout.v.plain:
            for e in each(2):
                first = token + lane % 4 * 2 + e * 8
                st.keep[r * 2 + e] = (less_mask(first, length) & T.uint32(0xFFFF)) | (
                    less_mask(first + 1, length) & T.uint32(0xFFFF0000)
                )

    @T.macro
    def rescale(st):
        """A larger running maximum, if a score of any row asks for one."""
        for i in each(nt * 2):
            st.x[i] = T.max(st.s[i // 2 * 4 + i % 2], st.s[i // 2 * 4 + i % 2 + 2])
            for r in each(1, tiles):
                at = (r * nt + i // 2) * 4 + i % 2
                st.x[i] = T.max(st.x[i], T.max(st.s[at], st.s[at + 2]))
        for i in each(nt):
            st.f[i] = T.max(st.x[i * 2] - st.m[i * 2], st.x[i * 2 + 1] - st.m[i * 2 + 1])
        for i in each(1, nt):
            st.f[0] = T.max(st.f[0], st.f[i])
        if any_lane(st.f[0] > T.float32(THRESHOLD)):
            for i in each(nt * 2):
                for d in each(3):
                    st.x[i] = T.max(st.x[i], xor_shuffle(st.x[i], 4 << d))
                st.x[i] = T.max(st.x[i], st.m[i])
                st.f[0] = ex2(st.m[i] - st.x[i])
                st.m[i] = st.x[i]
                st.l[i] = st.l[i] * st.f[0]
                if v_token:
                    st.z[i] = st.z[i] * st.f[0]
                for a in each(slices):
                    for half in each(2):
                        at = (a * nt + i // 2) * 4 + half * 2 + i % 2
                        st.o[at] = st.o[at] * st.f[0]

    return mask, rescale


def _make_values_macro(f: Arithmetic, operand: Macro) -> Macro:
    """Macro `values`: O^T += V^T P^T of a tile, whose scores become weights."""
    layout, nt, slices, params = f.layout, f.nt, f.layout.head_dim // 16, f.layout.token_params
    v_kind, v_token, atoms, words = mma_kind(layout.v.operand), f.layout.v.token_wise, f.atoms, f.words

    @T.macro
    def values(base, st, r, lane):
        """O^T += V^T P^T of tile r."""
        if v_token:
            for e in each(2):
                st.f[e] = unpack(0, st.par[r * 4 + 2 * (params - 1) + e], bf16=False) * T.float32(f.p_factor[e])
                st.f[2 + e] = unpack(1, st.par[r * 4 + 2 * (params - 1) + e], bf16=False)
        for t in each(nt):
            for e in each(4):
                st.p[e] = ex2(st.s[(r * nt + t) * 4 + e] - st.m[t * 2 + e % 2])
            for e in each(2):
                st.l[t * 2 + e] = st.l[t * 2 + e] + (st.p[e] + st.p[2 + e])
                if v_token:
                    st.z[t * 2 + e] = fma(st.p[e], st.f[2], fma(st.p[2 + e], st.f[3], st.z[t * 2 + e]))
            for e in each(4):
                if v_token:
                    st.p[e] = st.p[e] * st.f[e // 2]
                elif f.p_factor[e // 2] != 1:
                    st.p[e] = st.p[e] * T.float32(f.p_factor[e // 2])
            for e in each(2):
                st.b[t * 2 + e] = transpose(pack2(st.p[2 * e], st.p[2 * e + 1], bf16=layout.v.bf16))
        for j in each(slices // atoms[False]):
            operand(st, base, layout.k_words + j * 32 * words[False], False, lane)
            for i in each(atoms[False]):
                if f.layout.v.plain:
                    for e in each(4):
                        st.a[i * 4 + e] = st.a[i * 4 + e] & st.keep[r * 2 + e // 2]
                for t in each(nt):
                    mma(v_kind, st.o, ((j * atoms[False] + i) * nt + t) * 4, st.a, i * 4, st.b, t * 2)

    return values


class Tile(NamedTuple):
    """Macros of a warp; `state`, its registers; scale and cap in units of log2, window in tokens."""

    of: Arithmetic
    state: Call
    adopt: Macro
    clear: Macro
    sum_q: Macro
    scale_q: Macro
    step: Macro
    finish: Macro
    mask: Macro


def make_tile_macros(f: Arithmetic) -> Tile:
    """Those of some arithmetic."""
    layout, nt, tiles, rows_shared = f.layout, f.nt, f.tiles, f.rows_shared
    slices, v_factor, operand = f.slices, f.v_factor, _make_operand_macro(f)
    (sum_q, scale_q), (products, finish) = _make_query_macros(f), _make_key_macros(f, operand)
    (mask, rescale), values = _make_softmax_macros(f), _make_values_macro(f, operand)

    def state(scale: Expr, cap: Expr, window: Expr) -> Buffers:
        f32, u32 = "float32", "uint32"
        return Buffers(
            o=(slices * nt * 4, f32), m=(nt * 2, f32), l=(nt * 2, f32), z=(nt * 2, f32), qs=(nt * 2, f32),
            s=(tiles * nt * 4, f32), acc=(nt * 8, f32), x=(nt * 2, f32), f=(4, f32), p=(4, f32),
            q=(slices * nt * 2, u32), qk=(slices * nt * 2, u32), w=(4, u32), a=(32, u32), par=(tiles * 4, u32),
            b=(nt * 2, u32), keep=(tiles * 2, u32), qf=(nt * 4, u32), wk=(tiles * 4 if rows_shared else 1, u32),
            hi=(nt * 2, "int32"), scale=scale, cap=cap, window=window,
        )  # fmt: skip

    @T.macro
    def clear(st):
        """No token has been seen."""
        for i in each(slices * nt * 4):
            st.o[i] = 0.0
        for i in each(nt * 2):
            st.m[i] = T.float32(LOWEST)
            st.l[i] = 0.0
            st.z[i] = 0.0

    @T.macro
    def adopt(st):
        """Sums of O^T at true scale become sums of this format, whose rows carry powers of two."""
        for i in each(slices * nt * 4):
            if v_factor[i % 4 // 2] != 1:
                st.o[i] = st.o[i] * T.float32(1 / v_factor[i % 4 // 2])

    @T.macro
    def step(base, st, q, token, length, edge, lane):
        """`tiles` tiles from address `base`, tokens `token` on; `edge`: some of them may lie outside a row's limits."""
        if f.layout.v.plain:
            for i in each(tiles * 2):
                st.keep[i] = T.uint32(0xFFFFFFFF)
        products(base, st, q, each(tiles), lane)
        for r in each(tiles):
            finish(at32(base, r * layout.tile_words), st, r, lane)
        if edge:
            if rows_shared:
                for t in each(nt):
                    load_words(2, st.hi[t * 2], at32(st.row_facts, t * 8 + lane % 4 * 2))
            for r in each(tiles):
                mask(st, r, token + r * 16, length, lane)
        rescale(st)
        for r in each(tiles):
            values(at32(base, r * layout.tile_words), st, r, lane)

    return Tile(f, state, adopt, clear, sum_q, scale_q, step, finish, mask)
