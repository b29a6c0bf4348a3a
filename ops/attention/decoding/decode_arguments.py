"""What the programs of decode attention have in common: tensors, sizes, and the integers of a CTA's work."""

from types import SimpleNamespace

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.attention.cache.layout import CacheLayout
from terrazzo.ops.attention.device.decode_copies import peek
from terrazzo.ops.attention.device.tile_macros import less, smaller

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


def stage_words(layout: CacheLayout, tiles: int) -> int:
    """int32 words of one stage of a warp's ring."""
    return layout.channel_words + tiles * layout.tile_words


def arguments(
    head_dim: int, dtype: str, *, cols: int, cluster: int, balanced: bool = False, ragged: bool = False,
    coded: bool = False,
) -> SimpleNamespace:  # fmt: skip
    """The types of the tensors that both programs take (shapes: decode_program.build), and the sizes they have.

    Args:
        cols: rows of a CTA. cluster, balanced, ragged: as of decode_program. coded: whether codes are made of the
            output, by the last CTA of each sequence.
    """
    import tilelang.language as T

    names = ("b", "q_len", "hq", "hk", "pages", "page_words", "tb", "most", "slots", "rh", "res_words")
    names += ("skh", "skd", "svh", "svd", "n_sinks", "y", "p", "n", "b1")
    names += ("m", "k", "n_scales", "n_sums", "n_smooth") if coded else ()
    d = SimpleNamespace(**{name: T.dynamic(name) for name in names})
    part_rows = 1 if balanced else d.b
    new = (1, d.n) if ragged else (d.b, d.q_len)
    return SimpleNamespace(
        Q=T.Tensor((*new, d.hq, head_dim), dtype),
        KV=T.Tensor((d.pages, d.hk, d.page_words), "int32"),
        TABLE=T.Tensor((d.tb, d.most), "int32"),
        LEN=T.Tensor((d.b,), "int32"),
        RES=T.Tensor((d.slots, d.rh, d.res_words), "int32"),
        SLOT=T.Tensor((d.b,), "int32"),
        SK=T.Tensor((d.skh, d.skd), "float32"),
        SV=T.Tensor((d.svh, d.svd), "float32"),
        SINK=T.Tensor((d.n_sinks,), "float32"),
        OP=T.Tensor((part_rows, d.y, d.p, cols, head_dim), "float32"),
        LP=T.Tensor((part_rows, d.y, d.p, cluster * cols), "float32"),
        SEM=T.Tensor((d.b * d.y * cluster + (d.b if coded else 0),), "int32"),
        O=T.Tensor((*new, d.hq, head_dim), dtype),
        LSE=T.Tensor((*new, d.hq), "float32"),
        CU=T.Tensor((d.b1,), "int32"),
        **(_coded(d) if coded else {}),
        splits=d.p * cluster, grid=(d.p * cluster, d.y, part_rows), sizes=d,
    )  # fmt: skip


def _coded(d: SimpleNamespace) -> dict:
    """Types of codes, scales (flat), sums, and factors of columns."""
    import tilelang.language as T

    return dict(
        XQ=T.Tensor((d.m, d.k), "int8"), XS=T.Tensor((d.n_scales,), "float32"), XR=T.Tensor((d.n_sums,), "int32"),
        SM=T.Tensor((d.n_smooth,), "float32"),
    )  # fmt: skip


def work_of(sizes: SimpleNamespace, names: tuple[str, ...], most_new, **own) -> SimpleNamespace:
    """`w` of the macros: sizes of the launch, one-element buffers `names`, and what a program has of its `own`.

    Every sequence has `q_len` new tokens, of which Q[b] are the rows. Where `most_new`, the most of a sequence, is not
    None, q_len is the sequence's own number, and its rows are Q[0] from `own_first` on (`make_rows_macros`).
    """
    import tilelang.language as T

    ints = {name: T.alloc_local((1,), "int32") for name in (*INTEGERS, *names)}
    facts = dict(
        q_len=sizes.q_len,
        most_new=sizes.q_len,
        q_of=own["b"],
        own_first=None,
        kv_heads=sizes.hk,
        pages=sizes.pages,
        most=sizes.most,
        page_words=sizes.page_words,
    )
    if most_new is not None:
        own_first, own_new = (T.alloc_local((1,), "int32") for _ in range(2))
        facts |= dict(most_new=most_new, q_of=0, own_first=own_first, own_new=own_new, q_len=own_new[0])
    return SimpleNamespace(**{"member": ints["lane"], **ints, **facts, "places": sizes.p, **own})


def query_at(w, query):
    """Where new token `query` of the CTA's sequence lies in Q[w.q_of], O and LSE."""
    return query if w.own_first is None else w.own_first[0] + query


def make_rows_macros(sizes: SimpleNamespace, cols: int, ragged: bool) -> SimpleNamespace:
    """Macros `find_rows` (which rows of which kv head are the CTA's) and, of ragged batches, `find_own` (how many new
    tokens its sequence has, behind the wait for the kernel ahead; a CTA without rows ends there)."""
    import tilelang.language as T

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

    return SimpleNamespace(find_rows=find_rows, find_own=find_own)


def program(body, args: SimpleNamespace, ragged: bool, coded: bool = False):
    """The prim_func `main` of a macro over all tensors; one of a ragged batch has CU and most_new besides, and one
    that makes codes has those behind LSE."""
    import tilelang.language as T

    if coded:
        return _coded_program(body, args, ragged)
    if ragged:

        @T.prim_func
        def main(
            Q: args.Q, KV: args.KV, TABLE: args.TABLE, LEN: args.LEN, RES: args.RES, SLOT: args.SLOT, SK: args.SK,
            SV: args.SV, SINK: args.SINK, OP: args.OP, LP: args.LP, SEM: args.SEM, O: args.O, LSE: args.LSE,
            CU: args.CU, scale: T.float32, cap: T.float32, window: T.int32, most_new: T.int32,
        ):  # fmt: skip
            body(
                Q, KV, TABLE, LEN, RES, SLOT, SK, SV, SINK, OP, LP, SEM, O, LSE, CU, most_new, None, scale, cap, window
            )  # fmt: skip

        return main

    @T.prim_func
    def main(
        Q: args.Q, KV: args.KV, TABLE: args.TABLE, LEN: args.LEN, RES: args.RES, SLOT: args.SLOT, SK: args.SK,
        SV: args.SV, SINK: args.SINK, OP: args.OP, LP: args.LP, SEM: args.SEM, O: args.O, LSE: args.LSE,
        scale: T.float32, cap: T.float32, window: T.int32,
    ):  # fmt: skip
        body(Q, KV, TABLE, LEN, RES, SLOT, SK, SV, SINK, OP, LP, SEM, O, LSE, None, None, None, scale, cap, window)

    return main


def _coded_program(body, args: SimpleNamespace, ragged: bool):
    """`program` with codes XQ int8 [M, Hq D] of the M tokens, scales XS, sums XR and factors SM."""
    import tilelang.language as T

    if ragged:

        @T.prim_func
        def main(
            Q: args.Q, KV: args.KV, TABLE: args.TABLE, LEN: args.LEN, RES: args.RES, SLOT: args.SLOT, SK: args.SK,
            SV: args.SV, SINK: args.SINK, OP: args.OP, LP: args.LP, SEM: args.SEM, O: args.O, LSE: args.LSE,
            XQ: args.XQ, XS: args.XS, XR: args.XR, SM: args.SM,
            CU: args.CU, scale: T.float32, cap: T.float32, window: T.int32, most_new: T.int32,
        ):  # fmt: skip
            body(
                Q, KV, TABLE, LEN, RES, SLOT, SK, SV, SINK, OP, LP, SEM, O, LSE, CU, most_new, (XQ, XS, XR, SM), scale,
                cap, window,
            )  # fmt: skip

        return main

    @T.prim_func
    def main(
        Q: args.Q, KV: args.KV, TABLE: args.TABLE, LEN: args.LEN, RES: args.RES, SLOT: args.SLOT, SK: args.SK,
        SV: args.SV, SINK: args.SINK, OP: args.OP, LP: args.LP, SEM: args.SEM, O: args.O, LSE: args.LSE,
        XQ: args.XQ, XS: args.XS, XR: args.XR, SM: args.SM,
        scale: T.float32, cap: T.float32, window: T.int32,
    ):  # fmt: skip
        body(
            Q, KV, TABLE, LEN, RES, SLOT, SK, SV, SINK, OP, LP, SEM, O, LSE, None, None, (XQ, XS, XR, SM), scale, cap,
            window,
        )  # fmt: skip

    return main


def check_cache(layout: CacheLayout, *, page: int, residual: int, tokens: int, remedy: str) -> None:
    """Raise ArgumentError where stages of `tokens` tokens do not fit pages, or values cannot join f16 tokens."""
    if residual and layout.v.scaling == "static":
        constraint = "static values cannot join f16 residual tokens"
        raise ArgumentError("v_format", layout.v_format, constraint, "use token-wise values")
    if page % max(tokens, layout.block_tokens):
        raise ArgumentError("page", page, f"must be a multiple of {max(tokens, layout.block_tokens)}", remedy)


def check_cluster(cluster: int, most: int, constraint: str) -> None:
    """Raise ArgumentError where a cluster has no CTA or more than `most`."""
    if not 1 <= cluster <= most:
        raise ArgumentError("cluster", cluster, constraint, "use 1")
