"""Macros of programs that keep their slice of X in shared memory while each warp streams weights (small batches)."""

from collections.abc import Callable
from types import SimpleNamespace

ROW_WORDS = 8
"""Parameter words of 16 rows in a record of a unit."""


def resident_macros(
    *, k: int, item_k: int, items: int, cta_items: int, rows: int, pitch: int, size: int, threads: int, bulk: bool,
    cluster: int = 1,
) -> SimpleNamespace:  # fmt: skip
    """Macros `fetch` and `wait` for X [m, k] in elements of `size` bytes.

    Args:
        k: columns of X, a multiple of 16 bytes. item_k: columns of one item; `items` of them cover k.
        cta_items: most items of a CTA. rows: rows of the resident slice, m at most. pitch: elements of its row.
        threads: of the CTA. bulk: rows come by bulk copies, so that they do not queue behind the first weights.
        cluster: CTAs with the same slice, which share the load by multicast.
    """
    import tilelang.language as T

    vec, kp = 16 // size, items * item_k
    copies, chunks = rows * cta_items * item_k // vec, cta_items * item_k // vec  # 16-byte pieces: of all, of a row

    @T.macro
    def fetch_bulk(X, Xs, bar, m, k0, kn, rank, tx):
        for e in T.serial(T.ceildiv((rows - m) * (pitch // vec), threads)):
            if e * threads + tx < (rows - m) * (pitch // vec):
                T.call_extern("handle", "tz_zero16", T.access_ptr(Xs[m * pitch + (e * threads + tx) * vec], "w", vec))
        if kp > k:  # the last CTA along k: columns past the end
            tail = (kp - k) // vec
            for e in T.serial(T.ceildiv(m * tail, threads)):
                at = e * threads + tx
                if T.And(at < m * tail, k0 + kn == items):
                    T.call_extern(
                        "handle",
                        "tz_zero16",
                        T.access_ptr(Xs[at // tail * pitch + (k - k0 * item_k) + at % tail * vec], "w", vec),
                    )
        if tx == 0:
            row_bytes = T.min(kn * item_k, k - k0 * item_k) * size
            T.mbarrier_expect_tx(bar, m * row_bytes)
            T.barrier_arrive(bar)
            for r in T.serial(T.ceildiv(m - rank, cluster)):
                row = r * cluster + rank
                T.call_extern(
                    "handle",
                    "tz_bulk_multicast" if cluster > 1 else "tz_bulk",
                    T.access_ptr(Xs[row * pitch], "w", vec),
                    T.access_ptr(X[row, k0 * item_k], "r", vec),
                    row_bytes,
                    T.access_ptr(bar, "rw", 1),
                    *([(1 << cluster) - 1] if cluster > 1 else []),
                )

    @T.macro
    def fetch_async(X, Xs, bar, m, k0, kn, rank, tx):
        for e in T.serial(-(-copies // threads)):
            at = e * threads + tx
            row = at // chunks
            col = k0 * item_k + at % chunks * vec
            if at < copies:
                T.call_extern(
                    "handle",
                    "tz_cp_async",
                    T.access_ptr(Xs[row * pitch + at % chunks * vec], "w", vec),
                    T.access_ptr(X[T.min(row, m - 1), T.min(col, k - vec)], "r", vec),
                    T.if_then_else(T.And(row < m, col < k), 16, 0),
                )
        T.call_extern("handle", "tz_cp_commit")

    @T.macro
    def wait(bar, newer):
        """X is there; of the cp.async groups, the `newer` newest may be missing."""
        if bulk:
            T.barrier_wait(bar, 0)
        else:
            T.call_extern("handle", f"tz_cp_wait<{newer}>")
        T.sync_threads()

    return SimpleNamespace(fetch=fetch_bulk if bulk else fetch_async, wait=wait)


def unit_macros(*, token_tiles: int, chunk: int, groups: int, stages: int, pitch: int) -> SimpleNamespace:
    """Macros `issue` and `load_x` of 8-bit fragments; words of a ring `step`, of which `params` are codes.

    A unit of 64 rows by 128 k is two blocks of 512 words and `groups` records of 32; a ring step holds that of `chunk`
    row tiles of 16. `pitch`: bytes of a row of X.
    """
    import tilelang.language as T

    params = chunk * 256
    record = groups * ROW_WORDS  # words of a row tile's parameters
    step = params + -(-chunk * record // 32) * 32  # 128-byte aligned

    @T.macro
    def issue(W, R, base, q, gn, t0, t1, kg, lane):
        """Ring step q of this warp: `chunk` row tiles x one item, with their parameters."""
        first = t0 + T.truncdiv(q, gn) * chunk
        item = kg + T.truncmod(q, gn)
        slot = base + q % stages * step
        for m in T.unroll(chunk):
            if first + m < t1:
                tile = first + m
                for h in T.unroll(2):
                    T.call_extern(
                        "handle",
                        "tz_cp_async",
                        T.access_ptr(R[slot + m * 256 + h * 128 + lane * 4], "w", 4),
                        T.access_ptr(W[item, tile // 4, h * 512 + tile % 4 * 128 + lane * 4], "r", 4),
                        16,
                    )
                if lane < groups * 2:
                    T.call_extern(
                        "handle",
                        "tz_cp_async",
                        T.access_ptr(R[slot + params + m * record + lane * 4], "w", 4),
                        T.access_ptr(
                            W[
                                item,
                                tile // 4,
                                1024 + lane // 2 * 4 * ROW_WORDS + tile % 4 * ROW_WORDS + lane % 2 * 4,
                            ],
                            "r",
                            4,
                        ),
                        16,
                    )
        T.call_extern("handle", "tz_cp_commit")

    @T.macro
    def load_x(Xs, x, col, lane):
        """B fragments of one item from the resident X: two k32 steps for each 64 k."""
        for j in T.unroll(2):
            for t in T.unroll(token_tiles):
                T.call_extern(
                    "handle",
                    "tz_ldmatrix4",
                    T.access_ptr(x[(j * token_tiles + t) * 4], "w", 4),
                    T.access_ptr(Xs[(t * 8 + lane % 8) * pitch + col + j * 64 + lane // 8 * 16], "r", 16),
                )

    return SimpleNamespace(issue=issue, load_x=load_x, params=params, step=step)


def sum_macros(
    *, token_tiles: int, chunk: int, chunks: int, warps: int, kc: int, add: str, store: Callable[..., None]
) -> SimpleNamespace:  # fmt: skip
    """Macros `add_warps`, once for each chunk of row tiles, and `add_ctas`, after the last; `words` of shared Q.

    A thread's sums `acc` are four 32-bit values of each row tile and 8 tokens; WS is [kc, 8 * token_tiles, rows]. Warps
    and then CTAs are added in order.

    Args:
        chunks: of a CTA. warps: of a CTA. kc: CTAs along k. add: the primitive that adds four sums from WS.
        store: macro `store(to, r4, tok, row)` of four sums r4, rows row .. row + 3 of a token.
    """
    import tilelang.language as T

    nt, threads = token_tiles, warps * 32
    pitch = chunk * 16 + 4  # partial tiles [token][row]: stores and vector loads without bank conflicts
    part = nt * 8 * pitch

    @T.macro
    def add_warps(Q, WS, to, acc, r4, m, bk, t0, t1, ci, tx):
        warp = tx // 32
        lane = tx % 32
        if chunks == 1:
            T.sync_threads()  # Q may share memory with what the main loop read, whose last use this is
        for r in T.unroll(chunk):
            for t in T.unroll(nt):
                for i in T.unroll(4):
                    Q[warp * part + (t * 8 + lane % 4 * 2 + i % 2) * pitch + r * 16 + i // 2 * 8 + lane // 4] = acc[
                        (r * nt + t) * 4 + i
                    ]
        T.sync_threads()
        for e in T.serial(-(-(nt * 8 * chunk * 4) // threads)):
            tok = (e * threads + tx) // (chunk * 4)
            row = (e * threads + tx) % (chunk * 4) * 4
            if T.And(tok < T.min(m, nt * 8), t0 * 16 + ci * chunk * 16 + row < t1 * 16):
                for i in T.vectorized(4):
                    r4[i] = Q[tok * pitch + row + i]
                for wi in T.unroll(1, warps):
                    for i in T.vectorized(4):
                        r4[i] = r4[i] + Q[wi * part + tok * pitch + row + i]
                if kc > 1:
                    for i in T.vectorized(4):
                        WS[bk, tok, (t0 + ci * chunk) * 16 + row + i] = r4[i]
                else:
                    store(to, r4, tok, (t0 + ci * chunk) * 16 + row)
        T.sync_threads()

    @T.macro
    def add_ctas(WS, SEM, to, r4, m, bn, t0, t1, tx):
        """The last CTA of a row range adds the partial sums of all of them."""
        if kc > 1:
            if T.call_extern("bool", "tz_last_arrival", T.access_ptr(SEM[bn], "rw", 1), kc):
                for e in T.serial(T.ceildiv((t1 - t0) * 4 * T.min(m, nt * 8), threads)):
                    tok = T.truncdiv(e * threads + tx, (t1 - t0) * 4)
                    row = t0 * 16 + T.truncmod(e * threads + tx, (t1 - t0) * 4) * 4
                    if tok < T.min(m, nt * 8):
                        T.call_extern(
                            "handle", "tz_ldcg4", T.access_ptr(r4, "w"), T.access_ptr(WS[0, tok, row], "r", 4)
                        )
                        for kk in T.unroll(1, kc):
                            T.call_extern("handle", add, T.access_ptr(r4, "rw"), T.access_ptr(WS[kk, tok, row], "r", 4))
                        store(to, r4, tok, row)

    return SimpleNamespace(add_warps=add_warps, add_ctas=add_ctas, words=warps * part)
