"""Macros of programs that keep their slice of X in shared memory (small batches)."""

from types import SimpleNamespace


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
