"""Tiles of 16 tokens as true values in A fragments: what both prefill programs multiply.

Decode leaves codes unscaled and scales the few rows of S and P instead (tile_macros.py). Prefill has many rows for each
token, so it scales the fragment: value = fma(code, scale, zero) in f16, as TurboMind does (specs.md B.5). Codes come
from converters that leave the exact integer; they read the fields in the order of the packed layout's own converter.
"""

from types import SimpleNamespace

from terrazzo.layouts.converters import get_converter
from terrazzo.lowering.errors import LayoutError
from terrazzo.ops.attention.cache.layout import CacheLayout
from terrazzo.ops.attention.device.calls import at32, byte_perm, hfma2, load_words
from terrazzo.ops.attention.device.tile_macros import each
from terrazzo.ops.formats.kv import STORAGES, KVFormat
from terrazzo.ops.tiles.calls import mma_kind, pack2


def exact_converter(fmt: KVFormat):
    """The converter of a format whose registers hold the codes themselves.

    Raises:
        LayoutError: it reads the fields in another order than the packed layout has them.
    """
    found = get_converter(STORAGES[fmt.storage].exact)
    if found.pos_map != fmt.converter.pos_map or any(found.scale_exp2) or any(found.bias):
        raise LayoutError("converter", found.name, f"does not read {fmt.name} as it is packed", "use another")
    return found


def sources(*layouts: CacheLayout) -> tuple[str, ...]:
    """CUDA text of the converters of some layouts."""
    found = {exact_converter(f).name for layout in layouts for f in (layout.k, layout.v)}
    return tuple(get_converter(name).device_source for name in sorted(found))


def operand_state() -> dict:
    """Registers: loaded words, a converted load, parameters of keys (scale, zero of tokens g and g + 8) and of values
    (of token pairs 2t and 2t + 8), masks of those pairs, channel parameters."""
    import tilelang.language as T

    sizes = {"w": 4, "t": 32, "kp": 4, "vp": 4, "keep": 2, "ch": 8}
    return {name: T.alloc_local((n,), "uint32") for name, n in sizes.items()}


def make_operand_macros(layout: CacheLayout) -> SimpleNamespace:
    """Macros of one tile at address `base`: `key_params`, `keys` (one load of a lane), `value_params`, `guard` and
    `values` (atoms of one load). Attributes: k_loads, k_atoms, v_loads, v_atoms: loads of a lane, 16 x 16 atoms of
    each.

    Channel parameters, and static scales of keys in their order, are read from address `head`; static scales of values
    are the caller's words sv [atom, half, (scale, zero)].
    """
    import tilelang.language as T

    k, v, params = layout.k, layout.v, layout.token_params
    kl, vl = layout.k_layout, layout.v_layout
    k_cvt, v_cvt = exact_converter(k), exact_converter(v)
    k_atoms, v_atoms = kl.block_k // 16, vl.block_rows // 16
    k_words, v_words = kl.load_words, vl.load_words
    slices = layout.head_dim // 16
    k_token, v_token = k.scaling == "token", v.scaling == "token"
    by_channel, v_static = k.scaling in ("channel", "static"), v.scaling == "static"

    def permute(a, b, select: int):
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
    def keys(st, base, head, j, a, at, lane):
        """Load j, k_atoms k16 slices of 16 tokens, to registers a[at ..]."""
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
                    a[at + i * 4 + r] = hfma2(st.t[i * 4 + r], st.ch[i % 2 * 2 + r // 2], st.ch[4 + i % 2 * 2 + r // 2])
                elif k_token:
                    a[at + i * 4 + r] = hfma2(st.t[i * 4 + r], st.kp[r % 2 * 2], st.kp[r % 2 * 2 + 1])
                else:
                    a[at + i * 4 + r] = st.t[i * 4 + r]

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
    def values(st, base, offset, words, atoms, odd, sv, sv_at, guarded, a, at, stride):
        """`atoms` atoms of `words` words at `offset` of a lane's load, to a[at + atom * stride ..]; half a word holds
        an atom where codes have two bits: `odd` then picks it."""
        convert(st, v_cvt, at32(base, layout.k_words + offset), words)
        for i in each(atoms):
            for r in each(4):
                to = at + i * stride + r
                if v_cvt.outputs * words > 4 * atoms:
                    a[to] = st.t[odd * 4 + r] if isinstance(odd, int) else T.if_then_else(
                        odd > 0, st.t[4 + r], st.t[r]
                    )  # fmt: skip
                else:
                    a[to] = st.t[i * 4 + r]
                if v_token:
                    a[to] = hfma2(a[to], st.vp[r // 2 * 2], st.vp[r // 2 * 2 + 1])
                elif v_static:
                    a[to] = hfma2(a[to], sv[sv_at + i * 4 + r % 2 * 2], sv[sv_at + i * 4 + r % 2 * 2 + 1])
        if not v_token:
            if guarded > 0:
                for i in each(atoms):
                    for r in each(4):
                        a[at + i * stride + r] = a[at + i * stride + r] & st.keep[r // 2]

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

    return SimpleNamespace(
        key_params=key_params, keys=keys, value_params=value_params, guard=guard, values=values,
        share_static=share_static, load_static=load_static, k_atoms=k_atoms, k_loads=slices // k_atoms,
        v_atoms=v_atoms, v_words=v_words, v_loads=slices // v_atoms, v_static=v_static, k_static=k.scaling == "static",
        by_channel=by_channel, k_bf16=k.operand == "bfloat16", v_bf16=v.operand == "bfloat16",
        k_kind=mma_kind(k.operand), v_kind=mma_kind(v.operand),
    )  # fmt: skip
