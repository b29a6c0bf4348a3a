"""QServe's way from codes to bytes, on the units of a W4A8 weight: multiply, then add four bytes that wrap (vadd4)."""

from terrazzo.ops.linear.bytes import problem

VADD4 = "vadd4"


class Gemm(problem.Gemm):
    """A problem of W4A8 whose `dequantization` may also be "vadd4"; the bytes are the same."""

    converters = problem.DEQUANTIZATIONS | {VADD4: "u4_s8_vadd4"}

    @property
    def offset_flip(self) -> int:
        """__vadd4 adds a - 128."""
        return 0x80008000 if self.dequantization == VADD4 else 0
