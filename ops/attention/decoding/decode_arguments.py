"""What the programs of decode attention have in common: tensors, sizes, and the integers of a CTA's work."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.attention.cache.layout import CacheLayout
from terrazzo.ops.attention.device.decode_copies import peek
from terrazzo.ops.attention.device.tile_macros import Sizes, less, smaller
from terrazzo.ops.tiles.language import T
from terrazzo.ops.tiles.types import Buffer, Buffers, Expr, Macro, PrimFunc, scalars

PASS_CONFIGS = (  # barriers and bounds are the program's own
    ("tl.disable_safe_memory_legalize", True),
    ("tl.disable_thread_storage_sync", True),
    ("tl.disable_warp_specialized", True),
)
INTEGERS = (
    *("length", "group", "rows", "h", "y", "here"),  # of the sequence and of the CTA's rows
    *("packed", "start", "r0", "r1", "first", "count"),  # tokens and stages of the warp
    *("now", "again"),  # length and page, read once more
    *("page", "later", "source"),  # pages of stages
    *("read", "parity"),  # of the ring
    *("lane", "warp", "query", "head"),  # of the thread, and of a row
    "least",  # tokens below need no mask, unless a window ends there
)


@dataclass(frozen=True)
class Decode:
    """What a decode kernel is built for.

    Attributes:
        dtype: of q and out. row_tiles: groups of 8 rows of a CTA. warps: 4 for each warpgroup, where those multiply.
        stages: of a ring. min_blocks: CTAs on an SM that registers allow.
        page: tokens of a page, 0 for a contiguous cache (one page for each sequence).
        residual: tokens of the f16 residual ring, 0 for none. Its tiles are one more, and behind them lies that of the
            `sink_tokens` first tokens (`PackedCache`).
        softcap, sinks: whether the logits are capped, and whether each head has a sink.
        tiles: 16-token tiles in a stage of a warp, or of a warpgroup.
        shared_rows: the rows' B fragments stay in shared memory, for more warps with more rows.
        ahead: stages of a warp that are fetched into L2 while the kernel ahead may still run (decode_copies.py), 0..32.
        parts: warps that share a group of channel-wise keys. cluster: splits whose CTAs are a cluster, 1..16.
        balanced: sequences get splits in proportion to their tokens, without clusters. Of P CTAs along x, P - B are
            what the tokens of all are divided by (schedules/attention_balance.py).
        ragged: sequences have numbers of new tokens of their own, up to most_new.
        output: "none", or the form of codes that the last CTA of a sequence makes of its rows of O (decode_codes.py).
        smooth: whether columns are multiplied with SM first. column_scales: scales of blocks as [Hq D / 128, M4].
    """

    k_format: str
    v_format: str
    head_dim: int
    dtype: str
    row_tiles: int
    warps: int
    stages: int
    min_blocks: int
    page: int
    residual: int
    softcap: bool
    sinks: bool
    tiles: int = 4
    shared_rows: bool = False
    ahead: int = 0
    parts: int = 1
    cluster: int = 1
    balanced: bool = False
    sink_tokens: int = 0
    ragged: bool = False
    output: str = "none"
    smooth: bool = False
    column_scales: bool = False

    @cached_property
    def layout(self) -> CacheLayout:
        return CacheLayout(self.k_format, self.v_format, self.head_dim, self.sink_tokens)

    @cached_property
    def plain(self) -> CacheLayout:
        """Of f16 tokens."""
        return CacheLayout("float16", "float16", self.head_dim)

    @property
    def cols(self) -> int:
        """Rows of a CTA, the columns of its products."""
        return 8 * self.row_tiles

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def stage(self) -> int:
        """int32 words of a stage."""
        return stage_words(self.layout, self.tiles)

    @property
    def sliding(self) -> bool:
        """Whether the ring takes over inside a stage."""
        return bool(self.residual) and not self.layout.k.group

    @property
    def coded(self) -> bool:
        return self.output != "none"


def stage_words(layout: CacheLayout, tiles: int) -> int:
    """int32 words of one stage of a warp's ring."""
    return layout.channel_words + tiles * layout.tile_words


class Tensors(NamedTuple):
    """The tensors and scalars of a kernel (shapes: decode_program.build), and their types: those of a ragged batch and
    those of codes may be None."""

    Q: Buffer
    KV: Buffer
    TABLE: Buffer
    LEN: Buffer
    RES: Buffer
    SLOT: Buffer
    SK: Buffer
    SV: Buffer
    SINK: Buffer
    OP: Buffer
    LP: Buffer
    SEM: Buffer
    O: Buffer
    LSE: Buffer
    scale: Expr = None
    cap: Expr = None
    window: Expr = None
    CU: Buffer | None = None
    most_new: Expr = None
    XQ: Buffer | None = None
    XS: Buffer | None = None
    XR: Buffer | None = None
    SM: Buffer | None = None


def arguments(p: Decode) -> tuple[Tensors, Sizes]:
    """The types of the tensors, and the sizes they have."""
    names = ("b", "q_len", "hq", "hk", "pages", "page_words", "tb", "most", "slots", "rh", "res_words")
    names += ("skh", "skd", "svh", "svd", "n_sinks", "y", "p", "n", "b1")
    names += ("m", "k", "n_scales", "n_sums", "n_smooth") if p.coded else ()
    d = Sizes(*names)
    part_rows = 1 if p.balanced else d.b
    new = (1, d.n) if p.ragged else (d.b, d.q_len)
    types = Tensors(
        Q=T.Tensor((*new, d.hq, p.head_dim), p.dtype),
        KV=T.Tensor((d.pages, d.hk, d.page_words), "int32"),
        TABLE=T.Tensor((d.tb, d.most), "int32"),
        LEN=T.Tensor((d.b,), "int32"),
        RES=T.Tensor((d.slots, d.rh, d.res_words), "int32"),
        SLOT=T.Tensor((d.b,), "int32"),
        SK=T.Tensor((d.skh, d.skd), "float32"),
        SV=T.Tensor((d.svh, d.svd), "float32"),
        SINK=T.Tensor((d.n_sinks,), "float32"),
        OP=T.Tensor((part_rows, d.y, d.p, p.cols, p.head_dim), "float32"),
        LP=T.Tensor((part_rows, d.y, d.p, p.cluster * p.cols), "float32"),
        SEM=T.Tensor((d.b * d.y * p.cluster + (d.b if p.coded else 0),), "int32"),
        O=T.Tensor((*new, d.hq, p.head_dim), p.dtype),
        LSE=T.Tensor((*new, d.hq), "float32"),
        CU=T.Tensor((d.b1,), "int32"),
    )
    if p.coded:  # codes, scales (flat), sums, and factors of columns
        types = types._replace(
            XQ=T.Tensor((d.m, d.k), "int8"), XS=T.Tensor((d.n_scales,), "float32"), XR=T.Tensor((d.n_sums,), "int32"),
            SM=T.Tensor((d.n_smooth,), "float32"),
        )  # fmt: skip
    return types, d


def grid_of(p: Decode, d: Sizes) -> tuple[Expr, Expr, Expr]:
    """CTAs of a launch: splits, groups of rows of all kv heads, sequences."""
    return d.p * p.cluster, d.y, 1 if p.balanced else d.b


def work_of(d: Sizes, names: tuple[str, ...], t: Tensors, **own: Buffer | Expr | None) -> Buffers:
    """`w` of the macros: sizes of the launch, one-element buffers `names`, and what a program has of its `own`.

    Every sequence has `q_len` new tokens, of which Q[b] are the rows. Of a ragged batch q_len is the sequence's own
    number, `most_new` the most of one, and its rows are Q[0] from `own_first` on (`make_rows_macros`).
    """
    w = scalars(*INTEGERS, *names)
    vars(w).setdefault("member", w.lane)
    facts = dict(q_len=d.q_len, most_new=d.q_len, q_of=own["b"], own_first=None)
    facts |= dict(kv_heads=d.hk, pages=d.pages, most=d.most, page_words=d.page_words, places=d.p, window=t.window)
    if t.most_new is not None:
        own = vars(scalars("own_first", "own_new")) | own
        facts |= dict(most_new=t.most_new, q_of=0, q_len=own["own_new"][0])
    vars(w).update(facts | own)
    return w


def query_at(w: Buffers, query: Expr) -> Expr:
    """Where new token `query` of the CTA's sequence lies in Q[w.q_of], O and LSE."""
    return query if w.own_first is None else w.own_first[0] + query


def make_rows_macros(p: Decode, sizes: Sizes) -> tuple[Macro, Macro]:
    """Macros `find_rows` (which rows of which kv head are the CTA's) and, of ragged batches, `find_own` (how many new
    tokens its sequence has, behind the wait for the kernel ahead; a CTA without rows ends there)."""
    cols, ragged = p.cols, p.ragged

    @T.macro
    def count_rows(w):
        w.rows[0] = w.group[0] * w.q_len

    @T.macro
    def find_rows(w):
        w.group[0] = T.truncdiv(sizes.hq, sizes.hk)
        if not ragged:
            count_rows(w)
        w.h[0] = T.truncdiv(w.hy * sizes.hk, sizes.y)
        w.y[0] = w.hy - w.h[0] * T.truncdiv(sizes.y, sizes.hk)
        if not ragged:
            w.here[0] = smaller(cols, w.rows[0] - w.y[0] * cols)
        w.read[0] = 0
        w.parity[0] = 0

    @T.macro
    def find_own(CU, w):
        w.own_first[0] = peek(CU, w.b)
        w.own_new[0] = peek(CU, w.b + 1) - w.own_first[0]
        count_rows(w)
        w.here[0] = smaller(cols, w.rows[0] - w.y[0] * cols)
        if less(w.here[0], 1):
            T.thread_return()

    return find_rows, find_own


def program(body: Macro, a: Tensors, p: Decode) -> PrimFunc:
    """The prim_func `main` of a macro over all `Tensors`, whose types are `a`. One of a ragged batch has CU and
    most_new besides. One that makes codes has XQ int8 [M, Hq D], scales XS, sums XR and factors SM behind LSE."""
    if p.coded and p.ragged:

        @T.prim_func
        def main(
            Q: a.Q, KV: a.KV, TABLE: a.TABLE, LEN: a.LEN, RES: a.RES, SLOT: a.SLOT, SK: a.SK, SV: a.SV, SINK: a.SINK,
            OP: a.OP, LP: a.LP, SEM: a.SEM, O: a.O, LSE: a.LSE, XQ: a.XQ, XS: a.XS, XR: a.XR, SM: a.SM,
            CU: a.CU, scale: T.float32, cap: T.float32, window: T.int32, most_new: T.int32,
        ):  # fmt: skip
            t = Tensors(Q, KV, TABLE, LEN, RES, SLOT, SK, SV, SINK, OP, LP, SEM, O, LSE, scale, cap, window)
            body(t._replace(CU=CU, most_new=most_new, XQ=XQ, XS=XS, XR=XR, SM=SM))

    elif p.coded:

        @T.prim_func
        def main(
            Q: a.Q, KV: a.KV, TABLE: a.TABLE, LEN: a.LEN, RES: a.RES, SLOT: a.SLOT, SK: a.SK, SV: a.SV, SINK: a.SINK,
            OP: a.OP, LP: a.LP, SEM: a.SEM, O: a.O, LSE: a.LSE, XQ: a.XQ, XS: a.XS, XR: a.XR, SM: a.SM,
            scale: T.float32, cap: T.float32, window: T.int32,
        ):  # fmt: skip
            t = Tensors(Q, KV, TABLE, LEN, RES, SLOT, SK, SV, SINK, OP, LP, SEM, O, LSE, scale, cap, window)
            body(t._replace(XQ=XQ, XS=XS, XR=XR, SM=SM))

    elif p.ragged:

        @T.prim_func
        def main(
            Q: a.Q, KV: a.KV, TABLE: a.TABLE, LEN: a.LEN, RES: a.RES, SLOT: a.SLOT, SK: a.SK, SV: a.SV, SINK: a.SINK,
            OP: a.OP, LP: a.LP, SEM: a.SEM, O: a.O, LSE: a.LSE,
            CU: a.CU, scale: T.float32, cap: T.float32, window: T.int32, most_new: T.int32,
        ):  # fmt: skip
            t = Tensors(Q, KV, TABLE, LEN, RES, SLOT, SK, SV, SINK, OP, LP, SEM, O, LSE, scale, cap, window)
            body(t._replace(CU=CU, most_new=most_new))

    else:

        @T.prim_func
        def main(
            Q: a.Q, KV: a.KV, TABLE: a.TABLE, LEN: a.LEN, RES: a.RES, SLOT: a.SLOT, SK: a.SK, SV: a.SV, SINK: a.SINK,
            OP: a.OP, LP: a.LP, SEM: a.SEM, O: a.O, LSE: a.LSE,
            scale: T.float32, cap: T.float32, window: T.int32,
        ):  # fmt: skip
            body(Tensors(Q, KV, TABLE, LEN, RES, SLOT, SK, SV, SINK, OP, LP, SEM, O, LSE, scale, cap, window))

    return main


def check_cache(p: Decode, tokens: int, remedy: str) -> None:
    """Raise ArgumentError where stages of `tokens` tokens do not fit pages, or values cannot join f16 tokens."""
    layout, page = p.layout, p.page
    if p.residual and layout.v.static:
        constraint = "static values cannot join f16 residual tokens"
        raise ArgumentError("v_format", layout.v_format, constraint, "use token-wise values")
    if page % max(tokens, layout.block_tokens):
        raise ArgumentError("page", page, f"must be a multiple of {max(tokens, layout.block_tokens)}", remedy)


def check_cluster(cluster: int, most: int, constraint: str) -> None:
    """Raise ArgumentError where a cluster has no CTA or more than `most`."""
    if not 1 <= cluster <= most:
        raise ArgumentError("cluster", cluster, constraint, "use 1")
