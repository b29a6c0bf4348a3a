"""Ring stages of the wgmma pipelines (basic, excp, pingpong): how one is filled, and how a warpgroup uses it."""

from types import SimpleNamespace

from terrazzo.ops.w4a8.operand import operand_macros
from terrazzo.ops.w4a8.problem import BLOCK_WORDS, UNIT_K, Gemm

PASS_CONFIGS = (  # the barriers and the bounds are the program's own
    ("tl.disable_safe_memory_legalize", True),
    ("tl.disable_thread_storage_sync", True),
    ("tl.disable_warp_specialized", True),
)


def stage_macros(gemm: Gemm, *, block_tokens: int, row_blocks: int, cta_blocks: int) -> SimpleNamespace:
    """Macros `load_weights`, `load_tokens`, `load_unit`, `convert`, `multiply`; `registers()` is convert's scratch.

    A stage holds 128 k of a tile: X int8 [block_tokens, 128], swizzled by 128 bytes, and the units of `cta_blocks` row
    blocks of which a warpgroup owns `row_blocks`.
    """
    import tilelang.language as T

    bm, nacc, unit_words = block_tokens, block_tokens // 2, gemm.unit_words
    operand = operand_macros(gemm)
    a_type = "uint8" if gemm.unsigned else "int8"

    @T.macro
    def load_weights(W, Ws, full, slot, c, kb):
        """One thread: the units of the tile's row blocks, words and parameters in one copy."""
        count = T.max(T.min(cta_blocks, gemm.row_blocks - c.rows[0] * cta_blocks), 0)
        T.mbarrier_expect_tx(full[slot], count * (unit_words * 4))
        if count > 0:
            T.call_extern(
                "handle",
                "tz_bulk",
                T.access_ptr(Ws[slot, 0, 0], "w", unit_words),
                T.access_ptr(W[kb, c.rows[0] * cta_blocks, 0], "r", unit_words),
                count * (unit_words * 4),
                T.access_ptr(full[slot], "rw", 1),
            )

    @T.macro
    def load_tokens(X, Xs, full, slot, c, kb):
        """One warp: the tile's tokens."""
        T.tma_copy(
            X[c.first[0] : c.first[0] + bm, kb * UNIT_K : kb * UNIT_K + UNIT_K],
            Xs[slot, :, :],
            barrier=full[slot],
            leader_scope_threads=32,
        )

    @T.macro
    def load_unit(Ws, w, u, slot, block, wt):
        """A thread's words of both 64 k of a row block, and the parameters of its rows g and g + 8 for each group."""
        for h in T.unroll(2):
            T.call_extern(
                "handle",
                "tz_lds128",
                T.access_ptr(w[h * 4], "w", 4),
                T.access_ptr(Ws[slot, block, h * BLOCK_WORDS + wt * 4], "r", 4),
            )
        for q in T.unroll(gemm.groups):
            u[q] = T.call_extern(
                "uint32", "tz_lds32", T.access_ptr(Ws[slot, block, 2 * BLOCK_WORDS + q * 32 + wt // 4], "r", 1)
            )

    @T.macro
    def multiply(a, at, acc, desc, slot, r, h):
        """Two wgmma on 64 k, A in registers a[at .. at + 7], as one group."""
        T.warpgroup_fence_operand(a, at, 8)
        T.warpgroup_fence_operand(acc, r * nacc, nacc)
        T.warpgroup_arrive()
        for e in T.unroll(2):
            T.ptx_wgmma_rs(
                "int32", f"m64n{bm}k32", True, a_type, "int8", "int32",
                a.data, at + e * 4, desc.data, slot * (bm * UNIT_K // 16) + (h * 2 + e) * 2,
                acc.data, r * nacc, T.bool(True), 1, 1,
            )  # fmt: skip
        T.warpgroup_commit_batch()
        T.warpgroup_fence_operand(acc, r * nacc, nacc)

    return SimpleNamespace(
        load_weights=load_weights,
        load_tokens=load_tokens,
        load_unit=load_unit,
        convert=operand.convert,
        registers=operand.registers,
        multiply=multiply,
    )
