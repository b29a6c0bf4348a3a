"""What one warp does to store a tile of 16 new tokens: ranges, codes, words; generated from the derived layouts.

The warp holds the tile as the A operand that decode will read: register r of atom a of a lane = 4 g + t is a pair of
values. Keys (rows are tokens): tokens g + 8 * (r % 2), dimensions 16 a + 8 * (r // 2) + 2 t, + 1. Values (rows are
dimensions): dimension 16 a + 8 * (r % 2) + g, tokens 8 * (r // 2) + 2 t, + 1. The tokens of a lane fall into classes:
the two row halves for keys, (k half, element) for values. Codes are those of quantizer.py, bit for bit.

Rows of rotated formats are rotated, and f16, before they become registers (write_macros.py); all else is the same.
"""

from dataclasses import dataclass
from typing import NamedTuple

from terrazzo.layouts.packed import PackedLayout
from terrazzo.ops.attention.cache.layout import CacheLayout, operand_layout
from terrazzo.ops.attention.device.calls import at32, byte_perm, load_words, max2, min2, store_words, xor_word
from terrazzo.ops.attention.device.tile_macros import each
from terrazzo.ops.products.kv import CLIPS, KVFormat
from terrazzo.ops.tiles.calls import unpack
from terrazzo.ops.tiles.language import T
from terrazzo.ops.tiles.types import Buffers, Call, Expr, Macro

SUMS = len(CLIPS) + 1
"""Pairs of sums that the range of a clipped token is chosen by."""
CODE_BIAS = 0x4B000000
"""tz_code returns 2^23 + code as a float's bits; words start at minus the sum of what its fields bring along."""


def tile_state(head_dim: int, *formats: KVFormat) -> Buffers:
    """Registers of a warp that stores these formats."""
    words = dict(x=head_dim // 4, old=head_dim // 4, s=4, w=4, lo=2, hi=2, new=4, pair=4, mask=1, c=4)
    made = {name: (n, "uint32") for name, n in words.items()}
    made |= dict(par=(12, "float32"), f=(4, "float32"), scale=(head_dim // 4, "float32"))
    if any(f.rotation for f in formats):
        made |= dict(rotated=(8, "float32"), turned=(1, "float32"))
    if any(f.clip for f in formats):
        made |= dict(far=(2 * SUMS, "uint32"), middle=(4, "uint32"), limits=(8, "float32"))
    return Buffers(**made)


@dataclass(frozen=True)
class Operand:
    """The tile of keys or of values in a warp's registers, and what its codes are.

    Args:
        bf16: whether the registers hold bf16 pairs; those of a rotated format are f16.
    """

    layout: CacheLayout
    is_key: bool
    bf16: bool

    @property
    def head_dim(self) -> int:
        return self.layout.head_dim

    @property
    def fmt(self) -> KVFormat:
        return self.layout.k if self.is_key else self.layout.v

    @property
    def packed(self) -> PackedLayout:
        return self.layout.k_layout if self.is_key else self.layout.v_layout

    @property
    def slices(self) -> int:
        """Atoms of 16 dimensions, four registers each."""
        return self.head_dim // 16

    @property
    def classes(self) -> int:
        """Tokens of a lane."""
        return 2 if self.is_key else 4

    @property
    def words(self) -> int:
        """Words of a load."""
        return self.packed.load_words

    @property
    def atoms(self) -> int:
        """Atoms whose codes a load's words hold."""
        return self.words * self.fmt.converter.outputs // 4

    @property
    def shuffles(self) -> tuple[int, ...]:
        """Lanes that hold the other dimensions of a token."""
        return (1, 2) if self.is_key else (4, 8, 16)

    @property
    def shared(self) -> tuple[tuple[int, ...], ...]:
        """Registers whose halves belong to the same two tokens (values) or to one token (keys), by class."""
        pairs = [(c + 2 * k if self.is_key else k + 2 * c) for c in range(2) for k in range(2)]
        return tuple(tuple(a * 4 + r for a in range(self.slices) for r in pairs[2 * c : 2 * c + 2]) for c in range(2))

    @property
    def loads(self) -> int:
        """Of a lane."""
        return self.slices // self.atoms

    @property
    def integer(self) -> bool:
        """Whether codes are integers."""
        return self.fmt.storage != "e4m3"

    @property
    def start(self) -> int:
        """What a word begins with: less what `tz_code` brings along in each field."""
        if not self.integer:
            return 0
        outputs = range(self.fmt.converter.outputs)
        return -sum(CODE_BIAS << self.field(o, e) for o in outputs for e in range(2)) % (1 << 32)

    def register(self, j: int, i: int, o: int) -> int:
        """Register of the tile that output o of word i of load j feeds."""
        atom, r = self.packed.target(i, o)
        return (j * self.atoms + atom) * 4 + r

    def class_of(self, r: int, e: int) -> int:
        """Class of the token of half e of a register."""
        return r % 2 if self.is_key else r % 4 // 2 * 2 + e

    def field(self, o: int, e: int) -> int:
        """The lowest bit, in its word, of the code of half e of output o."""
        return self.fmt.bits * self.fmt.converter.pos(o, e)

    def fields(self, i: int, c: int) -> int:
        """The bits of word i that belong to tokens of class c."""
        pairs = ((o, e) for o in range(self.fmt.converter.outputs) for e in range(2))
        ones = (1 << self.fmt.bits) - 1
        return sum(ones << self.field(o, e) for o, e in pairs if self.class_of(self.register(0, i, o), e) == c)

    def limits_of(self, c: int) -> tuple[int, int]:
        """Where `limits` has the least and the largest value of a token of class c."""
        first = 4 * c if self.is_key else c // 2 * 4 + c % 2
        return first, first + 2

    def token_of(self, c: int, lane: Expr) -> Expr:
        """Token of the tile that class c means in a lane."""
        return lane // 4 + 8 * c if self.is_key else lane % 4 * 2 + c % 2 + c // 2 * 8


class Quantizing(NamedTuple):
    """Macros over one operand's tile, and what it is (`of`)."""

    of: Operand
    find_new: Macro
    recall: Macro
    mix: Macro
    keep: Macro
    token_parameters: Macro
    channel_parameters: Macro
    recall_scales: Macro
    recall_words: Macro
    word: Macro
    words_at: Call
    store: Macro


def make_quantize_macros(layout: CacheLayout, is_key: bool, bf16: bool, warps: int) -> Quantizing:
    """Those of keys or values, whose registers hold bf16 or f16.

    Args:
        bf16: whether the registers hold bf16 pairs; those of a rotated format are f16.
        warps: tiles of a channel group, one for each warp of the CTA.
    """
    tile = Operand(layout, is_key, bf16)
    ranges = _range_macros(tile)
    channel_parameters, channel_row = _channel_macros(tile, ranges, warps)
    words = _word_macros(tile, channel_row)
    return Quantizing(tile, *_f16_macros(tile), _token_macro(tile, ranges), channel_parameters, *words)


def _f16_macros(tile: Operand) -> tuple[Macro, Macro, Macro, Macro]:
    """Which tokens are new, and tiles of f16: find_new, recall, mix, keep."""
    is_key, slices, classes, token_of = tile.is_key, tile.slices, tile.classes, tile.token_of
    spare = operand_layout(CacheLayout("float16", "float16", tile.head_dim).k, tile.head_dim, not is_key)

    @T.macro
    def find_new(st, token, old, lane):
        """All ones for each class whose token is not older than `old`, and the same for pairs of values."""
        for c in each(classes):
            st.new[c] = T.if_then_else(token + token_of(c, lane) >= old, T.uint32(0xFFFFFFFF), T.uint32(0))
        for r in each(4):
            if is_key:
                st.pair[r] = st.new[r % 2]
            else:
                st.pair[r] = (st.new[r // 2 * 2] & T.uint32(0xFFFF)) | (st.new[r // 2 * 2 + 1] & T.uint32(0xFFFF0000))

    @T.macro
    def recall(st, tile, lane):
        """The f16 tile at address `tile`, for `mix`."""
        for a in each(slices):
            load_words(4, st.old[a * 4], at32(tile, a * 128 + lane * 4))

    @T.macro
    def mix(st):
        """Tokens that are not new come from the recalled tile."""
        for a in each(slices):
            for i in each(4):
                at = a * 4 + spare.target(i, 0)[1]
                st.x[at] = (st.x[at] & st.pair[at % 4]) | (st.old[a * 4 + i] & ~st.pair[at % 4])

    @T.macro
    def keep(st, tile, lane):
        """The tile as it is, f16, to address `tile`."""
        for a in each(slices):
            for i in each(4):
                st.s[i] = st.x[a * 4 + spare.target(i, 0)[1]]
            store_words(4, at32(tile, a * 128 + lane * 4), st.s)

    return find_new, recall, mix, keep


def _range_macros(tile: Operand) -> tuple[Macro, Macro, Macro]:
    """Least and largest values of pairs: reduce_pairs, shuffle_pairs, unpack_range."""
    bf16 = tile.bf16

    @T.macro
    def reduce_pairs(st, c, registers):
        """lo[c] and hi[c]: least and largest of some registers, each half for itself."""
        st.lo[c] = st.x[registers[0]]
        st.hi[c] = st.x[registers[0]]
        for i in each(1, len(registers)):
            st.lo[c] = min2(st.lo[c], st.x[registers[i]], bf16=bf16)
            st.hi[c] = max2(st.hi[c], st.x[registers[i]], bf16=bf16)

    @T.macro
    def shuffle_pairs(st, c, masks):
        for d in masks:
            st.lo[c] = min2(st.lo[c], xor_word(st.lo[c], d), bf16=bf16)
            st.hi[c] = max2(st.hi[c], xor_word(st.hi[c], d), bf16=bf16)

    @T.macro
    def unpack_range(st, c):
        for e in each(2):
            st.f[e] = unpack(e, st.lo[c], bf16=bf16)
            st.f[2 + e] = unpack(e, st.hi[c], bf16=bf16)

    return reduce_pairs, shuffle_pairs, unpack_range


def _clip_macro(tile: Operand, ranges: tuple[Macro, Macro, Macro]) -> Macro:
    """The limits of tokens whose ranges are clipped: clip_ranges."""
    is_key, slices, D, of_token = tile.is_key, tile.slices, tile.head_dim, tile.limits_of
    reduce_pairs, shuffle_pairs, unpack_range = ranges

    @T.macro
    def find_limits(st):
        """The ranges of all tokens, and their middles."""
        for c in each(2):
            reduce_pairs(st, c, tile.shared[c])
            shuffle_pairs(st, c, tile.shuffles)
            unpack_range(st, c)
            if is_key:
                st.f[0] = T.min(st.f[0], st.f[1])
                st.f[1] = st.f[0]
                st.f[2] = T.max(st.f[2], st.f[3])
                st.f[3] = st.f[2]
            T.call_extern(
                "handle", "tz_clip_middle", st.f[0], st.f[2], st.f[1], st.f[3],
                T.access_ptr(st.middle[2 * c], "w", 2),
            )  # fmt: skip
            for i in each(4):
                st.limits[4 * c + i] = st.f[i]

    @T.macro
    def sum_excesses(st, rows, base, lane):
        """far: sums of both classes of tokens. The registers are read from words `base` on, an atom at a time, in a
        loop: a warp that packs a tile waits for nothing but its instructions, which are cold."""
        for i in each(2 * SUMS):
            st.far[i] = T.uint32(0)
        for n in T.serial(T.call_extern("int32", "tz_now", slices)):
            load_words(4, st.s, rows[base + n * 128 + lane * 4])
            for r in each(4):
                c = r % 2 if is_key else r // 2
                T.call_extern(
                    "handle", "tz_clip_count", st.s[r], T.access_ptr(st.middle[2 * c], "r", 2),
                    T.access_ptr(st.far[SUMS * c], "rw", SUMS),
                )  # fmt: skip
        for i in each(2 * SUMS):
            st.far[i] = T.call_extern("uint32", "tz_clip_integers", st.far[i])
        for i in each(SUMS if is_key else 2 * SUMS):
            if is_key:  # of the two tokens of a lane, whose halves are added up
                st.s[0] = byte_perm(st.far[i], st.far[SUMS + i], 0x5410)
                st.far[i] = st.s[0] + byte_perm(st.far[i], st.far[SUMS + i], 0x7632)
            for d in tile.shuffles:
                st.far[i] = st.far[i] + xor_word(st.far[i], d)

    @T.macro
    def clip_ranges(st, rows, base, lane):
        """limits: low and high of each token, narrowed as `quantizer` clips two bits. The warp's rows in shared memory,
        from word `base` of `rows` on, are not needed any more."""
        for a in each(slices):
            store_words(4, rows[base + a * 128 + lane * 4], st.x[a * 4])
        find_limits(st)
        sum_excesses(st, rows, base, lane)
        for c in each(tile.classes):
            T.call_extern(
                "handle", f"tz_clip_range<{D}>", *(T.access_ptr(st.limits[i], "rw", 1) for i in of_token(c)),
                T.access_ptr(st.far[0 if is_key else SUMS * (c // 2)], "r", SUMS), c % 2,
            )  # fmt: skip

    return clip_ranges


def _token_macro(tile: Operand, ranges: tuple[Macro, Macro, Macro]) -> Macro:
    """The parameters of tokens: token_parameters."""
    layout, fmt, is_key, classes = tile.layout, tile.fmt, tile.is_key, tile.classes
    role = 0 if is_key else layout.token_params - 1  # of the pairs of parameters beside a tile
    shared, shuffles, token_of, clipped = tile.shared, tile.shuffles, tile.token_of, bool(fmt.clip)
    reduce_pairs, shuffle_pairs, unpack_range = ranges
    clip_ranges = _clip_macro(tile, ranges) if clipped else None

    @T.macro
    def find_ranges(st):
        """Scale and zero of each token, to registers."""
        for c in each(2):
            reduce_pairs(st, c, shared[c])
            shuffle_pairs(st, c, shuffles)
            unpack_range(st, c)
            if is_key:
                st.c[c] = T.call_extern(
                    "uint32", "tz_range", T.min(st.f[0], st.f[1]), T.max(st.f[2], st.f[3]), T.float32(fmt.levels),
                    T.access_ptr(st.par[c * 3], "w", 3),
                )  # fmt: skip
            else:
                for e in each(2):
                    st.c[c * 2 + e] = T.call_extern(
                        "uint32", "tz_range", st.f[e], st.f[2 + e], T.float32(fmt.levels),
                        T.access_ptr(st.par[(c * 2 + e) * 3], "w", 3),
                    )  # fmt: skip

    @T.macro
    def find_clipped(st, rows, base, lane):
        """The same, of clipped ranges."""
        clip_ranges(st, rows, base, lane)
        for c in each(classes):
            low, high = tile.limits_of(c)
            st.c[c] = T.call_extern(
                "uint32", "tz_range", st.limits[low], st.limits[high], T.float32(fmt.levels),
                T.access_ptr(st.par[c * 3], "w", 3),
            )  # fmt: skip

    @T.macro
    def token_parameters(st, tile, rows, base, lane):
        """Scale and zero of each token, to registers and beside the tile at address `tile`; the warp's rows in shared
        memory, from word `base` of `rows` on, are not needed any more."""
        if clipped:
            find_clipped(st, rows, base, lane)
        else:
            find_ranges(st)
        for c in each(classes):
            if T.And(st.new[c] != T.uint32(0), (lane % 4 if is_key else lane // 4) == 0):
                row = token_of(c, lane)
                store_words(
                    1,
                    at32(tile, layout.param_offset + row % 8 * (2 * layout.token_params) + role * 2 + row // 8),
                    st.c[c],
                )

    return token_parameters


def _channel_macros(tile: Operand, ranges: tuple[Macro, Macro, Macro], warps: int) -> tuple[Macro, Macro]:
    """The parameters of dimensions, by all warps of a CTA: channel_parameters, channel_row."""
    bf16, fmt, slices, D = tile.bf16, tile.fmt, tile.slices, tile.head_dim
    reduce_pairs, shuffle_pairs, unpack_range = ranges

    @T.macro
    def channel_parameters(st, shared_, base, block, warp, lane):
        """Scale and zero of each dimension of the CTA's tokens: to shared memory from word `base` on, 4 words for each
        pair of dimensions (scales, zeros, 1 / scale of both), and to the head of the block at address `block`."""
        for a in each(slices):
            for k in each(2):
                reduce_pairs(st, k, (a * 4 + 2 * k, a * 4 + 2 * k + 1))
                shuffle_pairs(st, k, (4, 8, 16))
                if lane // 4 == 0:  # the order of CacheLayout.channel_index
                    at = base + 2 * D + warp * D + a // 2 * 16 + lane % 4 * 4 + a % 2 * 2 + k
                    shared_[at] = T.reinterpret(st.lo[k], "int32")
                    shared_[at + D // 2] = T.reinterpret(st.hi[k], "int32")
        T.sync_threads()
        for v in each(-(-(D // 2) // (warps * 32))):
            word = v * (warps * 32) + warp * 32 + lane
            if word < D // 2:
                st.lo[0] = T.reinterpret(shared_[base + 2 * D + word], "uint32")
                st.hi[0] = T.reinterpret(shared_[base + 2 * D + D // 2 + word], "uint32")
                for i in each(1, warps):
                    at = base + 2 * D + i * D + word
                    st.lo[0] = min2(st.lo[0], T.reinterpret(shared_[at], "uint32"), bf16=bf16)
                    st.hi[0] = max2(st.hi[0], T.reinterpret(shared_[at + D // 2], "uint32"), bf16=bf16)
                unpack_range(st, 0)
                for e in each(2):
                    st.c[e] = T.call_extern(
                        "uint32", "tz_range", st.f[e], st.f[2 + e], T.float32(fmt.levels),
                        T.access_ptr(st.par[e * 3], "w", 3),
                    )  # fmt: skip
                st.s[0] = byte_perm(st.c[0], st.c[1], 0x5410)
                st.s[1] = byte_perm(st.c[0], st.c[1], 0x7632)
                for i in each(2):
                    shared_[base + word * 4 + i] = T.reinterpret(st.s[i], "int32")
                    shared_[base + word * 4 + 2 + i] = T.reinterpret(st.par[i * 3 + 2], "int32")
                    store_words(1, at32(block, i * (D // 2) + word), st.s[i])
        T.sync_threads()

    @T.macro
    def channel_row(st, shared_, base, r, lane):
        """par of both elements of a register from shared memory."""
        for i in each(4):
            st.c[i] = T.reinterpret(
                shared_[base + (r // 8 * 16 + lane % 4 * 4 + r // 4 % 2 * 2 + r % 4 // 2) * 4 + i], "uint32"
            )
        for e in each(2):
            st.par[e * 3] = unpack(e, st.c[0], bf16=False)
            st.par[e * 3 + 1] = unpack(e, st.c[1], bf16=False)
            st.par[e * 3 + 2] = T.reinterpret(st.c[2 + e], "float32")

    return channel_parameters, channel_row


def _word_macros(tile: Operand, channel_row: Macro) -> tuple[Macro, Macro, Macro, Call, Macro]:
    """Codes and words: recall_scales, recall_words, word, words_at, store."""
    fmt, is_key, bf16, D, start, integer = tile.fmt, tile.is_key, tile.bf16, tile.head_dim, tile.start, tile.integer
    cvt, words, atoms, slices, classes = fmt.converter, tile.words, tile.atoms, tile.slices, tile.classes
    register, class_of, field, fields = tile.register, tile.class_of, tile.field, tile.fields
    offset, static = 0 if is_key else tile.layout.k_words, fmt.static
    dtype, stored_bf16 = str(bf16).lower(), str(fmt.bf16).lower()

    @T.macro
    def recall_scales(st, scale, head, lane):
        """Static scales of the lane's dimensions: all in flight at once, as they would not be between divisions."""
        for i in each(D // 4 if is_key else D // 8):
            dim = i // 4 * 16 + i % 4 // 2 * 8 + lane % 4 * 2 + i % 2 if is_key else i * 8 + lane // 4
            st.scale[i] = scale[head, dim]

    @T.macro
    def word(st, shared_, base, j, i, lane):
        """w[i]: word i of load j."""
        if fmt.plain:
            st.w[i] = st.x[register(j, i, 0)]
            if stored_bf16 != dtype:
                for e in each(2):
                    st.f[e] = unpack(e, st.x[register(j, i, 0)], bf16=bf16)
                st.w[i] = T.call_extern("uint32", f"tz_clamp2<{stored_bf16}>", st.f[0], st.f[1])
        else:
            st.w[i] = T.uint32(start)
            for o in each(cvt.outputs):
                r = register(j, i, o)
                if fmt.group:
                    channel_row(st, shared_, base, r, lane)
                for e in each(2):
                    st.f[0] = unpack(e, st.x[r], bf16=bf16)
                    if static:
                        dim = r // 2 * 2 + e if is_key else r // 4 * 2 + r % 2
                        st.f[0] = T.call_extern("float32", "tz_quotient", st.f[0], st.scale[dim])
                        if integer:
                            st.s[0] = T.call_extern("uint32", "tz_code8", st.f[0])
                        else:
                            st.s[0] = T.call_extern("uint32", "tz_e4m3", st.f[0])
                    else:
                        at = (e if fmt.group else class_of(r, e)) * 3
                        st.s[0] = T.call_extern(
                            "uint32", "tz_code", st.f[0], st.par[at + 1], st.par[at], st.par[at + 2],
                            T.float32(fmt.levels),
                        )  # fmt: skip
                    st.w[i] = st.w[i] + st.s[0] * T.uint32(1 << field(o, e))

    def words_at(tile, j, lane):
        """Address of a lane's words of load j of the tile at address `tile`."""
        return at32(tile, offset + j * 32 * words + lane * words)

    @T.macro
    def recall_words(st, tile, lane):
        """The words of the tile at address `tile`, for a `store` that merges."""
        for j in each(slices // atoms):
            load_words(words, st.old[j * words], words_at(tile, j, lane))

    @T.macro
    def store(st, shared_, base, tile, merge, lane):
        """The words of the tile to address `tile`; with `merge`, recalled fields of tokens that are not new stay."""
        for j in each(slices // atoms):
            for i in each(words):
                word(st, shared_, base, j, i, lane)
            if merge:
                for i in each(words):
                    st.mask[0] = T.uint32(0)
                    for c in each(classes):
                        if fields(i, c):
                            st.mask[0] = st.mask[0] | (st.new[c] & T.uint32(fields(i, c)))
                    st.w[i] = (st.w[i] & st.mask[0]) | (st.old[j * words + i] & ~st.mask[0])
            store_words(words, words_at(tile, j, lane), st.w)

    return recall_scales, recall_words, word, words_at, store
