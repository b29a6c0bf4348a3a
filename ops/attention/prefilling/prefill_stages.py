"""What both prefill programs stream: stages of 64 tokens from pages, residual blocks and new tokens in f16.

A CTA owns one kv head and a tile of rows; a row is one (new token, query head). It walks over the tokens that any of
its rows sees, newest source first:

    new       f16 tiles of the tokens of this call (`fresh`), in pages of 64 of their own; or their `images`, keys and
              values as wgmma reads them from shared memory (new_tokens_program.py), which a program fetches by itself
    residual  f16 tiles of the ring behind the packed tokens, and then that of the first tokens, if they stay f16
    packed    tiles of the cache's pages

A CTA of a split kernel takes a share of these stages, and its result is a partial one (prefill_merge.py).

Stages begin at multiples of 64 tokens of their source; tokens past a source's end are masked, and copied only where the
source has room for them.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.attention.cache.layout import CacheLayout
from terrazzo.ops.attention.device.calls import at_page
from terrazzo.ops.attention.device.tile_macros import Sizes, each, less
from terrazzo.ops.attention.prefilling.prefill_rows import seen_by
from terrazzo.ops.products.kv import OF_NEW_TOKENS
from terrazzo.ops.tiles.language import T
from terrazzo.ops.tiles.types import Buffer, Buffers, Call, Expr, Macro

STAGE = 64
"""Tokens of a stage: the m64 of a wgmma over keys."""
INTEGERS = (
    *("length", "group", "rows", "row0", "first", "before"),  # of the sequence and of the CTA's rows
    *("packed", "cached", "a", "b", "c", "na", "nb", "nc"),  # ends of sources; first token and stages of each
    *("page", "at"),
)


@dataclass(frozen=True)
class Geometry:
    """Sizes of stages. page: tokens of a page or 0; residual: tokens or 0; fresh: new tokens come beside the cache, as
    f16 tiles or as `images`.

    Raises:
        ArgumentError: a page that no 16 tokens divide, a residual block whose dtype is not the keys' operand.
    """

    layout: CacheLayout
    page: int
    residual: int
    fresh: bool
    images: bool = False

    def __post_init__(self) -> None:
        if self.page % self.layout.block_tokens:
            constraint = f"must be a multiple of {self.layout.block_tokens}"
            raise ArgumentError("page", self.page, constraint, "use 128 tokens")
        if self.residual and (self.layout.k.operand, self.layout.v.operand) != ("float16", "float16"):
            constraint = f"an f16 residual block cannot join {self.layout.k_format} keys, {self.layout.v_format} values"
            raise ArgumentError("residual", self.residual, constraint, "use residual=0")

    @property
    def plain(self) -> CacheLayout:
        """Tiles of unquantized tokens, in the dtypes of the packed tokens' operands."""
        return plain_layout(self.layout)

    @property
    def part_tokens(self) -> int:
        """Tokens that lie side by side in any page."""
        return math.gcd(STAGE, self.page, self.layout.k.group)

    @property
    def part_words(self) -> int:
        return self.layout.channel_words + self.part_tokens // 16 * self.layout.tile_words

    @property
    def stage_words(self) -> int:
        """int32 words of a stage of any source that goes through the ring."""
        tiles = self.residual or (self.fresh and not self.images)
        plain = STAGE // 16 * self.plain.tile_words if tiles else 0
        return max(STAGE // self.part_tokens * self.part_words, plain)

    def tile_at(self, r: Expr) -> Expr:
        """Word of the stage where packed tile r begins; r may be an expression."""
        tiles = self.part_tokens // 16
        return self.channel_at(r) + self.layout.channel_words + r % tiles * self.layout.tile_words

    def channel_at(self, r: Expr) -> Expr:
        """Word of the stage where the channel parameters of packed tile r lie."""
        return r // (self.part_tokens // 16) * self.part_words


def plain_layout(layout: CacheLayout) -> CacheLayout:
    """How new tokens are handed to the kernel beside a cache of this layout: rotated where that one's are."""
    names = (OF_NEW_TOKENS.name if fmt.rotation else fmt.operand for fmt in (layout.k, layout.v))
    return CacheLayout(*names, layout.head_dim)


@dataclass(frozen=True)
class Prefill:
    """What a prefill kernel is built for.

    Attributes:
        dtype: of q and out. row_tiles: groups of 8 rows of a warp, or of a warpgroup. warps: that multiply.
        stages: of 64 tokens in the ring. buffers: of operands in shared memory, where they go there.
        page: tokens of a page, 0 for a contiguous cache. residual: tokens of the f16 residual block, 0 for none.
        fresh: the new tokens come unquantized, and the cache holds only those before them.
        softcap, sinks: whether the logits are capped, and whether each head has a sink.
        split: CTAs share the tokens of a tile of rows, `tiles` times the parts of them; O and LSE are partial results,
            f32 [parts, N, Hq, D] and [parts, N, Hq], which prefill_merge.py adds up.
    """

    k_format: str
    v_format: str
    head_dim: int
    dtype: str
    row_tiles: int
    warps: int
    stages: int
    page: int
    residual: int
    fresh: bool
    softcap: bool
    sinks: bool
    buffers: int = 0
    sink_tokens: int = 0
    split: bool = False

    @cached_property
    def g(self) -> Geometry:
        layout = CacheLayout(self.k_format, self.v_format, self.head_dim, self.sink_tokens)
        return Geometry(layout, self.page, self.residual, self.fresh, images=self.fresh and self.buffers > 0)

    @property
    def layout(self) -> CacheLayout:
        return self.g.layout

    @property
    def slices(self) -> int:
        return self.head_dim // 16

    @property
    def bf16(self) -> bool:
        return self.dtype == "bfloat16"

    def integers(self) -> tuple[str, ...]:
        """Names of the integers of `make_stage_macros`."""
        made = (*INTEGERS, "sink") if self.sink_tokens else INTEGERS
        return (*made, "part", "from_stage", "to_stage") if self.split else made

    def result_of(self, w: Buffers) -> tuple[Expr, ...]:
        """Where the results of row w.query, w.head are."""
        return (w.part[0], w.query[0], w.head[0]) if self.split else (w.query[0], w.head[0])


class Tensors(NamedTuple):
    """The tensors of a kernel, and their types (shapes: prefill_mma.build)."""

    Q: Buffer
    KV: Buffer
    TABLE: Buffer
    LEN: Buffer
    CU: Buffer
    RES: Buffer
    SLOT: Buffer
    NEW: Buffer
    SK: Buffer
    SV: Buffer
    SINK: Buffer
    O: Buffer
    LSE: Buffer


def arguments(p: Prefill) -> tuple[Tensors, Sizes]:
    """The types of the tensors that both programs take, and the sizes they have."""
    names = ("b", "b1", "n", "hq", "hk", "pages", "page_words", "tb", "most", "slots", "rh", "res_words")
    names += ("new_pages", "nh", "new_words", "skh", "skd", "svh", "svd", "n_sinks", "parts")
    d = Sizes(*names)
    results = (d.parts, d.n, d.hq) if p.split else (d.n, d.hq)
    types = Tensors(
        Q=T.Tensor((d.n, d.hq, p.head_dim), p.dtype),
        KV=T.Tensor((d.pages, d.hk, d.page_words), "int32"),
        TABLE=T.Tensor((d.tb, d.most), "int32"),
        LEN=T.Tensor((d.b,), "int32"),
        CU=T.Tensor((d.b1,), "int32"),
        RES=T.Tensor((d.slots, d.rh, d.res_words), "int32"),
        SLOT=T.Tensor((d.b,), "int32"),
        NEW=T.Tensor((d.new_pages, d.nh, d.new_words), "int32"),
        SK=T.Tensor((d.skh, d.skd), "float32"),
        SV=T.Tensor((d.svh, d.svd), "float32"),
        SINK=T.Tensor((d.n_sinks,), "float32"),
        O=T.Tensor((*results, p.head_dim), "float32" if p.split else p.dtype),
        LSE=T.Tensor(results, "float32"),
    )
    return types, d


def check_memory(target, stages: int, words: int) -> None:
    """Refuse a ring of `stages` stages that makes `words` int32 words of shared memory in all more than a Target has.

    Raises:
        ArgumentError: too many stages.
    """
    if target is not None and 4 * words > target.smem_per_block:
        constraint = f"needs {4 * words} bytes of shared memory, {target.arch} has {target.smem_per_block}"
        raise ArgumentError("stages", stages, constraint, "use fewer")


class Stream(NamedTuple):
    """Macros: `begin` (rows and sources of a CTA, or its share of them), `fetch` (stage i into words `at` of the ring;
    nothing for images) and `locate` (what tokens it has), and expressions of a stage: `token` (its first one), `end`
    (of its source) and `new_page` (of new tokens)."""

    begin: Macro
    fetch: Macro
    locate: Macro
    token: Call
    end: Call
    new_page: Call


def make_stage_macros(p: Prefill, d: Sizes, rows: int, move: Macro) -> Stream:
    """Those of CTAs of `rows` rows.

    Args:
        move: macro (ring, at, source, words, most, io) that copies `words` words, at most `most`, to ring[at].
    """
    g, layout, plain = p.g, p.layout, p.g.plain
    spare_tiles = g.residual // 16 + 1
    sink = layout.sink_tokens
    block, group = layout.block_tokens, layout.k.group

    def token(w, i):
        made = w.a[0] + (i - w.nb[0] - w.nc[0]) * STAGE
        if g.residual:
            inside = w.b[0] + (i - w.nc[0]) * STAGE
            inside = T.if_then_else(i == w.sink[0], 0, inside) if sink else inside
            made = T.if_then_else(i < w.nb[0] + w.nc[0], inside, made)
        return T.if_then_else(i < w.nc[0], w.c[0] + i * STAGE, made) if g.fresh else made

    def end(w, i):
        """Of an unquantized stage."""
        if sink:
            ring = T.if_then_else(i == w.sink[0], sink, w.cached[0])
            return T.if_then_else(i < w.nc[0], w.length[0], ring) if g.fresh else ring
        return T.if_then_else(i < w.nc[0], w.length[0], w.cached[0]) if g.fresh else w.cached[0]

    def new_page(w, i):
        """Of the new tokens of stage i, among all sequences' (prefill_op.fresh_pages)."""
        return T.truncdiv(w.first[0], STAGE) + w.b_ + T.truncdiv(token(w, i) - w.cached[0], STAGE)

    @T.macro
    def locate(w, i):
        """w.token and w.end: the first token of stage i, and the end of its source."""
        w.token[0] = token(w, i)
        if g.residual or g.fresh:
            w.end[0] = w.packed[0]
            if less(i, w.nb[0] + w.nc[0]):
                w.end[0] = end(w, i)

    @T.macro
    def place(LEN, CU, w, y, window, hq, hk):
        """w.rows[0] <= w.row0[0] where the CTA has nothing to do; heavy tiles, the last ones, come first."""
        w.length[0] = LEN[w.b_]
        w.first[0] = CU[w.b_]
        w.group[0] = T.truncdiv(hq, hk)
        w.rows[0] = (CU[w.b_ + 1] - w.first[0]) * w.group[0]
        w.before[0] = w.length[0] - (CU[w.b_ + 1] - w.first[0])
        w.row0[0] = (T.truncdiv(w.rows[0] + rows - 1, rows) - 1 - y) * rows
        w.row0[0] = T.if_then_else(w.row0[0] < 0, w.rows[0], w.row0[0])
        top = seen_by(w, T.min(w.row0[0] + rows, w.rows[0]) - 1)
        w.at[0] = 0
        if window > 0:
            w.at[0] = T.max(seen_by(w, w.row0[0]) - window, 0)
        w.cached[0] = T.max(w.before[0], 0) if g.fresh else w.length[0]
        if g.residual and not group:
            w.packed[0] = T.truncdiv(T.max(w.cached[0] - layout.kept(g.residual)[0], 0), 16) * 16
        else:
            w.packed[0] = w.cached[0] - T.truncmod(w.cached[0], g.residual) if g.residual else w.cached[0]
        w.a[0] = T.truncdiv(w.at[0], STAGE) * STAGE
        w.na[0] = T.truncdiv(T.max(T.min(top, w.packed[0]) - w.a[0] + STAGE - 1, 0), STAGE)
        w.nb[0] = 0
        w.nc[0] = 0
        if g.residual:
            w.b[0] = w.packed[0] + T.truncdiv(T.max(w.at[0] - w.packed[0], 0), STAGE) * STAGE
            w.nb[0] = T.truncdiv(T.max(T.min(top, w.cached[0]) - w.b[0] + STAGE - 1, 0), STAGE)
        if sink:
            w.sink[0] = -1
        if g.fresh:
            w.c[0] = w.cached[0] + T.truncdiv(T.max(w.at[0] - w.cached[0], 0), STAGE) * STAGE
            w.nc[0] = T.truncdiv(T.max(T.min(top, w.length[0]) - w.c[0] + STAGE - 1, 0), STAGE)
        if sink:  # a stage of its own, the last one of the ring
            if T.And(w.packed[0] > 0, w.at[0] < sink):
                w.sink[0] = w.nc[0] + w.nb[0]
                w.nb[0] = w.nb[0] + 1

    @T.macro
    def fetch(x, ring, w, i, at, io):
        """Stage i to ring[at ..]; x: the kernel's tensors."""
        if (g.fresh or g.residual) and i < w.nc[0] + w.nb[0]:
            if g.fresh and not g.images:
                if i < w.nc[0]:
                    words = STAGE // 16 * plain.tile_words
                    move(ring, at, at_page(x.NEW, new_page(w, i), w.h * x.NEW.shape[2]), words, words, io)
            if g.residual:
                if i >= w.nc[0]:
                    for j in each(STAGE // 16):
                        if token(w, i) + j * 16 < (end(w, i) if sink else w.cached[0]):
                            tile = T.truncmod(T.truncdiv(token(w, i), 16) + j, spare_tiles)
                            tile = T.if_then_else(i == w.sink[0], spare_tiles, tile) if sink else tile
                            word = w.h * x.RES.shape[2] + tile * plain.tile_words
                            move(
                                ring, at + j * plain.tile_words, at_page(x.RES, x.SLOT[w.b_], word), plain.tile_words,
                                plain.tile_words, io,
                            )  # fmt: skip
        else:
            for j in each(STAGE // g.part_tokens):
                start = token(w, i) + j * g.part_tokens
                if start < w.packed[0]:
                    w.page[0] = w.b_
                    w.at[0] = start
                    if g.page:
                        w.page[0] = x.TABLE[w.b_, T.truncdiv(start, g.page)]
                        w.at[0] = T.truncmod(start, g.page)
                    inside = T.truncmod(w.at[0], block) if group else 0
                    word = w.h * x.KV.shape[2] + T.truncdiv(w.at[0], block) * layout.block_words
                    body = at + j * g.part_words + layout.channel_words
                    most = g.part_tokens // 16 * layout.tile_words
                    if group:
                        head = at_page(x.KV, w.page[0], word)
                        move(ring, at + j * g.part_words, head, layout.channel_words, layout.channel_words, io)
                    move(
                        ring, body, at_page(
                            x.KV, w.page[0], word + layout.channel_words + T.truncdiv(inside, 16) * layout.tile_words
                        ), most if group else T.min(
                            T.truncdiv(w.packed[0] - start + 15, 16) * layout.tile_words, most
                        ), most, io,
                    )  # fmt: skip

    take_share = _make_share_macro(g) if p.split else None

    @T.macro
    def begin(t, w, y, window):
        """The CTA's rows and sources, or its share of them."""
        if take_share is not None:
            w.part[0] = T.truncmod(y, d.parts)
            place(t.LEN, t.CU, w, T.truncdiv(y, d.parts), window, d.hq, d.hk)
            take_share(w, d.parts)
        else:
            place(t.LEN, t.CU, w, y, window, d.hq, d.hk)

    return Stream(begin, fetch, locate, token, end, new_page)


def _make_share_macro(g: Geometry) -> Macro:
    """Macro `take_share`: of all stages that a tile of rows sees, those of one CTA of a split kernel."""
    sink = g.layout.sink_tokens

    def until(end, first, count):
        """How many of `count` stages, which begin at stage `first`, lie ahead of stage `end`."""
        return T.max(T.min(end - first, count[0]), 0)

    @T.macro
    def narrow(w, start, count, first):
        """A source's stages, from stage `first` on, to those of the share."""
        start[0] = start[0] + until(w.from_stage[0], first, count) * STAGE
        count[0] = until(w.to_stage[0], first, count) - until(w.from_stage[0], first, count)

    @T.macro
    def take_share(w, parts):
        """Share w.part of `parts` of the stages, newest first as all are."""
        w.at[0] = w.na[0] + w.nb[0] + w.nc[0]
        w.from_stage[0] = T.truncdiv(w.part[0] * w.at[0], parts)
        w.to_stage[0] = T.truncdiv((w.part[0] + 1) * w.at[0], parts)
        narrow(w, w.a, w.na, w.nb[0] + w.nc[0])
        if g.residual:
            narrow(w, w.b, w.nb, w.nc[0])
        if sink:
            w.sink[0] = T.if_then_else(
                T.And(w.sink[0] >= w.from_stage[0], w.sink[0] < w.to_stage[0]), w.sink[0] - w.from_stage[0], -1
            )
        if g.fresh:
            narrow(w, w.c, w.nc, 0)

    return take_share
