"""Which resource bounds a weight-only GEMM, and how long that resource alone needs.

Three things run beside each other in a good pipeline: loading packed weights, decoding them on the integer units, and
the tensor cores. The longest of the three is a lower bound of the time, and says what a faster kernel would have to
change.
"""

from __future__ import annotations

from dataclasses import dataclass

from terrazzo.lowering.targets import Target
from terrazzo.schedules.problem import Gemm

# Dense s8 tensor operations of one SM in one clock (vendor's architecture papers). With the datasheet rate they give
# the clock; f16 would not on GeForce, which halves it.
_S8_PER_CLOCK = {"sm_80": 4096, "sm_86": 2048, "sm_89": 2048, "sm_90a": 8192, "sm_100a": 16384, "sm_120a": 2048}
_LOGIC_LANES = 64  # LOP3, SHF, HFMA2 results of one SM in one clock
TOKEN_TILE = 256  # widest token tile: decoding is repeated for each


@dataclass(frozen=True)
class Roofline:
    """Lower bounds of one problem, microseconds; `bound` names the longest: "load", "dequant" or "mma"."""

    load_us: float
    dequant_us: float
    mma_us: float

    @property
    def bound(self) -> str:
        return max(("load", self.load_us), ("dequant", self.dequant_us), ("mma", self.mma_us), key=lambda it: it[1])[0]

    @property
    def us(self) -> float:
        return max(self.load_us, self.dequant_us, self.mma_us)


def weight_only_gemm(
    target: Target,
    m: int,
    n: int,
    k: int,
    weight_bytes: int,
    alu_per_weight: float,
    gb_s: float | None = None,
    dtype: str = "f16",
    x_bytes: int = 2,
    token_tile: int = TOKEN_TILE,
) -> Roofline:
    """Bounds of y[m, n] = x[m, k] w[n, k]^T with a packed weight and 16-bit y.

    Args:
        weight_bytes: packed weight and parameters.
        alu_per_weight: instructions that decode one weight (`Converter.alu_per_element`, scaling included).
        gb_s: memory bandwidth; None takes the datasheet's.
        dtype: operand dtype of the tensor cores.
        x_bytes: of one activation.
        token_tile: tokens that share one decoding of the weights.
    """
    clock = 1e12 * target.tflops("s8") / (_S8_PER_CLOCK[target.arch] * target.sms)
    tiles = -(-m // token_tile)
    return Roofline(
        load_us=(weight_bytes + m * (2 * n + x_bytes * k)) / (gb_s or target.dram_gb_s) / 1e3,
        dequant_us=1e6 * tiles * n * k * alu_per_weight / (_LOGIC_LANES * target.sms * clock),
        mma_us=2 * m * n * k / target.tflops(dtype) / 1e6,
    )


def bounds(
    problem: Gemm,
    target: Target,
    m: int,
    alu_per_weight: float,
    token_tile: int = TOKEN_TILE,
    gb_s: float | None = None,
    weight_bytes: int = 0,
) -> Roofline:
    """Whether loading, dequantization or the tensor cores bound m tokens of a weight (specs.md D, equations 3 to 6);
    of experts, of as many as the tokens can reach.

    Args:
        weight_bytes: of a packed weight; 0 takes the problem's. The others as of `weight_only_gemm`.
    """
    nbytes = (weight_bytes or problem.weight_bytes) * (min(m, problem.experts) or 1)
    own = dict(dtype=problem.rate, x_bytes=problem.x_bytes, token_tile=token_tile)
    return weight_only_gemm(target, m, problem.n, problem.k, nbytes, alu_per_weight, gb_s, **own)
