"""What every W4A8 program shares: its parameters' meaning, the unit of a packed weight, the converter."""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from typing import ClassVar

from terrazzo.layouts.converters import Converter, get_converter
from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.products.codes import U4_LQQ
from terrazzo.ops.products.ways import WAYS
from terrazzo.ops.tiles.language import T
from terrazzo.ops.tiles.types import Expr

DEQUANTIZATIONS = {way.name: way.converter() for way in WAYS[U4_LQQ.name]}
OUT_DTYPES = ("float16", "bfloat16", "int32")
UNIT_K = 128  # k extent of a unit of 64 rows: two packed blocks, then the parameter records
BLOCK_WORDS = 512  # words of 64 rows by 64 k
RECORD_BYTES = 128  # (s, a) of 64 rows


@dataclass(frozen=True)
class Launched:
    """What a launch brings: expressions of the shapes, `extent` of B and `bias`, whether it is one; flag `whole`."""

    row_blocks: Expr
    units: Expr
    all_units: Expr
    extent: Expr
    bias: Expr
    whole: bool


@dataclass(frozen=True)
class Gemm:
    """y[M, n] = x[M, k] w[n, k]^T, w in units of 64 rows by 128 k, x int8 with k a multiple of 16.

    Args:
        group: k extent of one (s, a), 32, 64 or 128.
        out_dtype: "float16" or "bfloat16" (scaled), or "int32" (the sums as they are).
        dequantization: "xor" makes signed bytes; "unsigned" leaves 128 in every byte, and the sums lose
            128 * row_sum.
        bias: float32 [n] is added to scaled sums.
    """

    n: int
    k: int
    group: int
    out_dtype: str
    dequantization: str
    bias: bool

    converters: ClassVar[Mapping[str, str]] = DEQUANTIZATIONS

    launched: ClassVar[Launched | None] = None
    """Of a program without shapes."""
    row_values: ClassVar[bool] = True
    """Whether RS holds an int32 for each token."""
    float_sums: ClassVar[bool] = False
    """Whether sums of products are float32, not int32."""
    zeros: ClassVar[bool] = False
    """Whether RS holds zero points of the tokens."""
    blocks: ClassVar[bool] = False
    """Whether XS and S hold a scale for each 128 k."""
    grouped_tokens: ClassVar[bool] = False
    """Whether XS holds a word for each 128 k, the e8m0 scales of its four groups."""
    converts: ClassVar[bool] = True
    """Whether codes of the weight are converted to operands, in registers."""
    channels: ClassVar[int] = 1
    """float32 of a row in S."""
    schedule_form: ClassVar[str] = "s8 integer"
    """Of schedules, a key of `schedules.forms.FORMS`."""

    def __post_init__(self):
        if self.group not in (32, 64, 128):
            raise ArgumentError("group", self.group, "must be 32, 64 or 128", "repeat the scales of a larger group")
        if self.out_dtype not in OUT_DTYPES:
            raise ArgumentError("out_dtype", self.out_dtype, f"must be one of {OUT_DTYPES}", "cast y")
        if self.dequantization not in self.converters:
            raise ArgumentError(
                "dequantization", self.dequantization, f"must be one of {tuple(self.converters)}", "use 'xor'"
            )
        if self.bias and self.raw:
            raise ArgumentError("bias", True, "cannot be added to int32 sums", "ask for float16 or bfloat16")
        if self.k % 16:
            raise ArgumentError(
                "k", self.k, "must be a multiple of 16, so that rows of x are aligned", "pad x with zeros"
            )

    @property
    def raw(self) -> bool:
        return self.out_dtype == "int32"

    @property
    def unsigned(self) -> bool:
        return self.dequantization == "unsigned"

    @property
    def converter(self) -> Converter:
        return get_converter(self.converters[self.dequantization])

    @property
    def row_blocks(self) -> int:
        """Blocks of 64 rows, padding included."""
        if self.launched is not None:
            return self.launched.row_blocks
        return -(-self.n // 64)

    @property
    def units(self) -> int:
        """Units of 128 along k, padding included."""
        if self.launched is not None:
            return self.launched.units
        return -(-self.k // UNIT_K)

    @property
    def adds_bias(self) -> Expr:
        """Whether B is added: known, or a condition of the launch."""
        return self.bias if self.launched is None else self.launched.bias

    @property
    def whole(self) -> bool:
        """Whether rows of y are whole pieces of 16 bytes."""
        return self.n * self.out_bytes % 16 == 0 if self.launched is None else self.launched.whole

    @property
    def groups(self) -> int:
        """Parameter records of a unit."""
        return UNIT_K // self.group

    @property
    def unit_words(self) -> int:
        return 2 * BLOCK_WORDS + self.groups * RECORD_BYTES // 4

    @property
    def out_bytes(self) -> int:
        return 4 if self.raw else 2

    def extents(self, matrices: int) -> tuple[Expr, Expr]:
        """Of W along the units of all matrices, and of B."""
        if self.launched is not None:
            return self.launched.all_units, self.launched.extent
        return matrices * self.units, matrices * self.n if self.bias else 1

    def at_launch(self, whole: bool, matrices: int = 1) -> "Gemm":
        """The same of whatever n and k a launch brings. B then has n elements of each matrix where there is a bias,
        else another number."""
        n, k, row_blocks, units, extent = (T.dynamic(name) for name in ("n", "k", "blocks", "units", "bias"))
        made = copy(self)
        facts = Launched(row_blocks, units // matrices, units, extent, extent == matrices * n, whole)
        for name, value in (("n", n), ("k", k), ("launched", facts)):
            object.__setattr__(made, name, value)
        return made
