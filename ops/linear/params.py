"""From a record of parameters to registers: macros that the W4A16 programs share.

Registers u, uint32 [3], hold what a thread has loaded for its rows g and g + 8: u[0] two scales of 16 bits, or u[0] and
u[1] two of float32; u[2] two zero points, a byte each.
"""

from types import SimpleNamespace

from terrazzo.ops.linear.operand import Operand
from terrazzo.ops.tiles.calls import byte_perm, unpack


def param_macros(op: Operand) -> SimpleNamespace:
    """Macros `scales` and, for the (bias, scale) words of the exact converters, `bias_words` and `scale_words`.

    Words v[at .. at + 3] are bias and scale of row g, then of row g + 8, each twice in a word.
    """
    import tilelang.language as T

    bf16 = op.dtype == "bfloat16"
    one = 0x3F803F80 if bf16 else 0x3C003C00

    @T.macro
    def scales(s, at, u):
        """s[at] and s[at + 1], float32: the scales."""
        if op.scale_dtype == "float32":
            s[at] = T.reinterpret(u[0], "float32")
            s[at + 1] = T.reinterpret(u[1], "float32")
        else:
            s[at] = unpack(0, u[0], bf16=op.scale_dtype == "bfloat16")
            s[at + 1] = unpack(1, u[0], bf16=op.scale_dtype == "bfloat16")

    @T.macro
    def bias_words(v, at, u):
        """What is subtracted from a converted field: the power of two that it was put behind, and the zero point."""
        if bf16:
            v[at] = byte_perm(u[2], T.uint32(0x43434343), 0x4040)
            v[at + 2] = byte_perm(u[2], T.uint32(0x43434343), 0x4141)
        else:
            v[at] = byte_perm(u[2], T.uint32(0x64646464), 0x4040)
            v[at + 2] = (u[2] >> T.uint32(8)) * T.uint32(0x100010) + T.uint32(0x54005400)

    @T.macro
    def scale_words(v, at, u):
        """The scales, or (numerics "post") ones."""
        v[at + 1] = T.uint32(one) if op.numerics == "post" else byte_perm(u[0], u[0], 0x1010)
        v[at + 3] = T.uint32(one) if op.numerics == "post" else byte_perm(u[0], u[0], 0x3232)

    return SimpleNamespace(scales=scales, bias_words=bias_words, scale_words=scale_words)
