"""The program of mma.sync with QServe's dequantization, which is then built as QServe's own kernel is."""

from terrazzo.ablation.w4a8.baseline import Gemm
from terrazzo.ops.linear.bytes import multistage

PASS_CONFIGS = multistage.PASS_CONFIGS


def build(target, *, n: int, k: int, group: int, out_dtype: str, dequantization: str, bias: bool, **tile: int):
    """`ops.linear.bytes.multistage.build`, whose `dequantization` may also be "vadd4"."""
    return multistage.program(target, Gemm(n, k, group, out_dtype, dequantization, bias), **tile)
