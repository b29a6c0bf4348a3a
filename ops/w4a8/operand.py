"""From packed words and (s, a) records to 8-bit operand registers: macros that every W4A8 program uses."""

from types import SimpleNamespace

from terrazzo.ops.w4a8.problem import Gemm


def operand_macros(gemm: Gemm) -> SimpleNamespace:
    """Macro `convert` and `registers()`, its scratch registers."""
    import tilelang.language as T

    name, split = gemm.converter.device_name, gemm.groups == 4

    def registers() -> SimpleNamespace:
        return SimpleNamespace(v=T.alloc_local((4,), "uint32"), o=T.alloc_local((8,), "uint32"))

    @T.macro
    def convert(w, at, u, a, to, held, h):
        """Words w[at .. at + 3] of block `h` of a unit into a[to .. to + 7]: A fragments of two k32 steps.

        u: parameter words of the unit's groups. Low nibbles are the first k32, high nibbles the second.
        """
        for e in T.unroll(2):
            if e == 0 or split:  # groups of 32: each k32 has parameters of its own
                T.call_extern(
                    "handle", "tz_lqq_params", u[(h * 2 + e) * gemm.groups // 4], T.access_ptr(held.v, "w")
                )  # fmt: skip
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

    return SimpleNamespace(registers=registers, convert=convert)
