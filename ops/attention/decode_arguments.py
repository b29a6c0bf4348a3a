"""What the programs of decode attention have in common: tensors, sizes, and the integers of a CTA's work."""

from types import SimpleNamespace

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.attention.decode_merge import BATCH
from terrazzo.ops.attention.layout import CacheLayout
from terrazzo.ops.attention.tile_macros import smaller

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


def arguments(head_dim: int, dtype: str, *, cols: int, cluster: int, balanced: bool = False) -> SimpleNamespace:
    """The types of the tensors that both programs take (shapes: decode_program.build), and the sizes they have.

    Args:
        cols: rows of a CTA. cluster, balanced: as of decode_program.
    """
    import tilelang.language as T

    names = ("b", "q_len", "hq", "hk", "pages", "page_words", "tb", "most", "slots", "rh", "res_words")
    names += ("skh", "skd", "svh", "svd", "n_sinks", "y", "p")
    d = SimpleNamespace(**{name: T.dynamic(name) for name in names})
    part_rows = 1 if balanced else d.b
    return SimpleNamespace(
        Q=T.Tensor((d.b, d.q_len, d.hq, head_dim), dtype),
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
        SEM=T.Tensor((d.b * d.y * cluster,), "int32"),
        O=T.Tensor((d.b, d.q_len, d.hq, head_dim), dtype),
        LSE=T.Tensor((d.b, d.q_len, d.hq), "float32"),
        splits=d.p * cluster, grid=(d.p * cluster, d.y, part_rows), sizes=d,
    )  # fmt: skip


def work_of(sizes: SimpleNamespace, names: tuple[str, ...], **own) -> SimpleNamespace:
    """`w` of the macros: sizes of the launch, one-element buffers `names`, and what a program has of its `own`."""
    import tilelang.language as T

    ints = {name: T.alloc_local((1,), "int32") for name in (*INTEGERS, *names)}
    facts = dict(q_len=sizes.q_len, kv_heads=sizes.hk, pages=sizes.pages, most=sizes.most, page_words=sizes.page_words)
    return SimpleNamespace(**{**ints, **facts, "places": sizes.p, "member": ints["lane"], **own})


def make_rows_macro(sizes: SimpleNamespace, cols: int):
    """Macro `find_rows`: which rows of which kv head are the CTA's, at the beginning of its ring."""
    import tilelang.language as T

    @T.macro
    def find_rows(w):
        w.group[0] = T.truncdiv(sizes.hq, sizes.hk)
        w.rows[0] = w.group[0] * w.q_len
        w.h[0] = T.truncdiv(w.hy * sizes.hk, sizes.y)
        w.y[0] = w.hy - w.h[0] * T.truncdiv(sizes.y, sizes.hk)
        w.here[0] = smaller(cols, w.rows[0] - w.y[0] * cols)
        w.read[0] = 0
        w.parity[0] = 0

    return find_rows


def check_cache(layout: CacheLayout, *, page: int, residual: int, tokens: int, remedy: str) -> None:
    """Raise ArgumentError where stages of `tokens` tokens do not fit pages, or values cannot join f16 tokens."""
    if residual and layout.v.scaling == "static":
        constraint = "static values cannot join f16 residual tokens"
        raise ArgumentError("v_format", layout.v_format, constraint, "use token-wise values")
    if page % max(tokens, layout.block_tokens):
        raise ArgumentError("page", page, f"must be a multiple of {max(tokens, layout.block_tokens)}", remedy)


def check_cluster(cluster: int, most: int, constraint: str) -> None:
    """Raise ArgumentError where a cluster has no CTA or more than `most`, at most BATCH."""
    if not 1 <= cluster <= min(most, BATCH):
        raise ArgumentError("cluster", cluster, constraint, "use 1")
