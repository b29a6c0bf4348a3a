"""From packed words and (s, a) records to 8-bit operand registers: macros that every W4A8 program uses."""

from types import SimpleNamespace

from terrazzo.ops.linear.bytes.problem import Gemm


def operand_macros(gemm: Gemm) -> SimpleNamespace:
    """Macros `convert` with `registers()`, its scratch registers, `word` and `mma` (mma.sync)."""
    import tilelang.language as T

    name, split = gemm.converter.device_name, gemm.groups == 4

    def registers() -> SimpleNamespace:
        return SimpleNamespace(v=T.alloc_local((4,), "uint32"), o=T.alloc_local((8,), "uint32"))

    @T.macro
    def word(w, at, o, v, row):
        """Word w[at] into o[0] and o[1], low and high nibbles, with factor and offset v[row] and v[row + 1]."""
        T.call_extern("handle", name, w[at], T.access_ptr(o, "w", 2), v[row], v[row + 1])

    @T.macro
    def mma(acc, to, a, at, x, b):
        """m16n8k32: acc[to .. to + 3] += a[at .. at + 3] x[b .. b + 1]."""
        if gemm.unsigned:
            T.call_extern(
                "handle",
                "tz_mma_u8s8",
                T.access_ptr(acc[to], "rw", 4),
                T.access_ptr(a[at], "r", 4),
                T.access_ptr(x[b], "r", 2),
            )
        else:
            T.ptx_mma(
                "int32", "m16n8k32", "row", "col", "int8", "int8", "int32",
                a.data, at, x.data, b, acc.data, to, T.bool(False),
            )  # fmt: skip

    @T.macro
    def convert(w, at, u, a, to, held, h):
        """Words w[at .. at + 3] of block `h` of a unit into a[to .. to + 7]: A fragments of two k32 steps.

        u: parameter words of the unit's groups. Low nibbles are the first k32, high nibbles the second.
        """
        for e in T.unroll(2):
            if e == 0 or split:  # groups of 32: each k32 has parameters of its own
                T.call_extern(
                    "handle",
                    "tz_lqq_params",
                    u[(h * 2 + e) * gemm.groups // 4],
                    T.access_ptr(held.v, "w"),
                )
            for r in T.unroll(4):  # registers 0 and 2 hold row g, 1 and 3 row g + 8
                if e == 0 or split:
                    T.call_extern(
                        "handle",
                        name,
                        w[at + r],
                        T.access_ptr(held.o[r * 2], "w", 2),
                        held.v[r % 2 * 2],
                        held.v[r % 2 * 2 + 1],
                    )
                a[to + e * 4 + r] = held.o[r * 2 + e]

    return SimpleNamespace(registers=registers, convert=convert, word=word, mma=mma)
