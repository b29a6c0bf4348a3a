"""Tiles of 16 tokens as true values in A fragments: what both prefill programs multiply.

Decode leaves codes unscaled and scales the few rows of S and P instead (tile_macros.py). Prefill has many rows for each
token, so it scales the fragment: value = fma(code, scale, zero) in f16, as TurboMind does (specs.md B.5). Codes come
from converters that leave the exact integer; they read the fields in the order of the packed layout's own converter.
"""

from typing import NamedTuple

from terrazzo.layouts.converters import Converter, get_converter
from terrazzo.lowering.errors import LayoutError
from terrazzo.ops.attention.cache.layout import CacheLayout
from terrazzo.ops.attention.device.calls import at32, byte_perm, hfma2, load_words
from terrazzo.ops.attention.device.tile_macros import each
from terrazzo.ops.products.kv import KVFormat
from terrazzo.ops.tiles.calls import mma_kind, pack2
from terrazzo.ops.tiles.language import T
from terrazzo.ops.tiles.types import Expr, Macro


def exact_converter(fmt: KVFormat) -> Converter:
    """The converter of a format whose registers hold the codes themselves.

    Raises:
        LayoutError: it reads the fields in another order than the packed layout has them.
    """
    found = fmt.exact
    if found.pos_map != fmt.converter.pos_map or any(found.scale_exp2) or any(found.bias):
        raise LayoutError("converter", found.name, f"does not read {fmt.name} as it is packed", "use another")
    return found


def sources(*layouts: CacheLayout) -> tuple[str, ...]:
    """CUDA text of the converters of some layouts."""
    found = {exact_converter(f).name for layout in layouts for f in (layout.k, layout.v)}
    return tuple(get_converter(name).device_source for name in sorted(found))


class Operands(NamedTuple):
    """Macros of one tile at address `base`: `key_params`, `keys` (one load of a lane), `value_params`, `guard` and
    `values` (atoms of one load). k_loads, k_atoms, v_loads, v_atoms: loads of a lane, 16 x 16 atoms of each.

    Channel parameters, and static scales of keys in their order, are read from address `head`; static scales of values
    are words st.sv [atom, half, (scale, zero)].

    `STATE` are registers of st, which has a [32], too: loaded words, a converted load, parameters of keys (scale, zero
    of tokens g and g + 8) and of values (of token pairs 2t and 2t + 8), masks of those pairs, channel parameters.
    """

    layout: CacheLayout
    key_params: Macro
    keys: Macro
    value_params: Macro
    guard: Macro
    values: Macro
    share_static: Macro
    load_static: Macro

    @property
    def k_atoms(self) -> int:
        return self.layout.k_layout.block_k // 16

    @property
    def k_loads(self) -> int:
        return self.layout.head_dim // 16 // self.k_atoms

    @property
    def v_atoms(self) -> int:
        return self.layout.v_layout.block_rows // 16

    @property
    def v_loads(self) -> int:
        return self.layout.head_dim // 16 // self.v_atoms

    @property
    def v_words(self) -> int:
        return self.layout.v_layout.load_words

    @property
    def k_kind(self) -> str:
        return mma_kind(self.layout.k.operand)

    @property
    def v_kind(self) -> str:
        return mma_kind(self.layout.v.operand)


STATE = {name: (n, "uint32") for name, n in dict(w=4, t=32, kp=4, vp=4, keep=2, ch=8).items()}


def make_operand_macros(layout: CacheLayout) -> Operands:
    """Those of tiles of a layout."""
    k, v, params = layout.k, layout.v, layout.token_params
    k_cvt, v_cvt = exact_converter(k), exact_converter(v)
    k_atoms, k_words = layout.k_layout.block_k // 16, layout.k_layout.load_words
    v_atoms, v_words = layout.v_layout.block_rows // 16, layout.v_layout.load_words
    k_token, v_token = k.token_wise, v.token_wise
    by_channel, v_static = k.scaling in ("channel", "static"), v.static

    def permute(a: Expr, b: Expr, select: int) -> Expr:
        return byte_perm(a, b, T.uint32(select))

    @T.macro
    def convert(st, cvt, address, words):
        """st.t = operand registers of `words` words."""
        if cvt.outputs == 1:
            load_words(words, st.t, address)
        else:
            load_words(words, st.w, address)
            for i in each(words):
                T.call_extern("handle", cvt.device_name, st.w[i], T.access_ptr(st.t[i * cvt.outputs], "w", cvt.outputs))

    @T.macro
    def key_params(st, base, lane):
        """Registers kp: scale and zero of the lane's tokens g and g + 8, each twice in a word."""
        if k_token:
            load_words(2, st.w, at32(base, layout.param_offset + lane // 4 * (2 * params)))
            for e in each(2):
                st.kp[e * 2] = permute(st.w[e], st.w[e], 0x1010)
                st.kp[e * 2 + 1] = permute(st.w[e], st.w[e], 0x3232)

    @T.macro
    def keys(st, base, head, j, lane):
        """Load j, k_atoms k16 slices of 16 tokens, to registers a."""
        convert(st, k_cvt, at32(base, (j * 32 + lane) * k_words), k_words)
        for i in each(k_atoms):
            if by_channel:
                if i % 2 == 0:
                    for part in each(2):
                        load_words(
                            4,
                            st.ch[part * 4],
                            at32(head, part * (layout.head_dim // 2) + (j * k_atoms + i) // 2 * 16 + lane % 4 * 4),
                        )
            for r in each(4):
                if by_channel:
                    at = i % 2 * 2 + r // 2
                    st.a[i * 4 + r] = hfma2(st.t[i * 4 + r], st.ch[at], st.ch[4 + at])
                elif k_token:
                    st.a[i * 4 + r] = hfma2(st.t[i * 4 + r], st.kp[r % 2 * 2], st.kp[r % 2 * 2 + 1])
                else:
                    st.a[i * 4 + r] = st.t[i * 4 + r]

    @T.macro
    def value_params(st, base, lane):
        """Registers vp: scales and zeros of the lane's token pairs 2t and 2t + 8."""
        if v_token:
            for e in each(2):
                load_words(
                    2,
                    st.w[e * 2],
                    at32(base, layout.param_offset + (lane % 4 * 2 + e) * (2 * params) + 2 * (params - 1)),
                )
            for e in each(2):
                st.vp[e * 2] = permute(st.w[e], st.w[2 + e], 0x5410)
                st.vp[e * 2 + 1] = permute(st.w[e], st.w[2 + e], 0x7632)

    @T.macro
    def guard(st, token, end, lane):
        """Tokens from `end` on may be anything, and 0 * NaN is NaN: their values become 0."""
        for e in each(2):
            at = token + lane % 4 * 2 + e * 8
            st.keep[e] = T.if_then_else(
                at + 1 < end, T.uint32(0xFFFFFFFF), T.if_then_else(at < end, T.uint32(0xFFFF), T.uint32(0))
            )
            if v_token:
                st.vp[e * 2] = st.vp[e * 2] & st.keep[e]
                st.vp[e * 2 + 1] = st.vp[e * 2 + 1] & st.keep[e]

    @T.macro
    def values(st, base, offset, j, guarded):
        """Load j, whose words begin at `offset`: all of its atoms, to registers a."""
        convert(st, v_cvt, at32(base, layout.k_words + offset), v_words)
        for i in each(v_atoms):
            for r in each(4):
                to, sv = i * 4 + r, (j * v_atoms + i) * 4 + r % 2 * 2
                st.a[to] = st.t[to]
                if v_token:
                    st.a[to] = hfma2(st.a[to], st.vp[r // 2 * 2], st.vp[r // 2 * 2 + 1])
                elif v_static:
                    st.a[to] = hfma2(st.a[to], st.sv[sv], st.sv[sv + 1])
        if not v_token:
            if guarded > 0:
                for i in each(v_atoms):
                    for r in each(4):
                        st.a[i * 4 + r] = st.a[i * 4 + r] & st.keep[r // 2]

    @T.macro
    def share_static(SK, ring, at, h, tx, threads):
        """Static scales of keys to words `at` of shared memory, in the order of channel parameters."""
        for e in each(-(-(layout.head_dim // 2) // threads)):
            x = e * threads + tx
            if x < layout.head_dim // 2:
                channel = x // 16 * 32 + x // 2 % 2 * 16 + x % 2 * 8 + x // 4 % 4 * 2
                for part in each(2):
                    factor = T.float32(k.bias if part else 1)
                    ring[at + part * (layout.head_dim // 2) + x] = T.reinterpret(
                        pack2(SK[h, channel] * factor, SK[h, channel + 1] * factor, bf16=False),
                        "int32",
                    )

    @T.macro
    def load_static(SV, sv, first, count, h, lane):
        """Static scales of values of `count` atoms from atom `first` on, rows g and g + 8."""
        for i in each(count):
            for half in each(2):
                for part in each(2):
                    sv[(i * 2 + half) * 2 + part] = pack2(
                        SV[h, (first + i) * 16 + half * 8 + lane // 4] * T.float32(v.bias if part else 1),
                        SV[h, (first + i) * 16 + half * 8 + lane // 4] * T.float32(v.bias if part else 1),
                        bf16=False,
                    )

    return Operands(layout, key_params, keys, value_params, guard, values, share_static, load_static)
