"""How a packed weight becomes a tensor-core operand: numerics, the converter that serves them, parameter records."""

from __future__ import annotations

from dataclasses import dataclass

from terrazzo.layouts.converters import Converter, get_converter
from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.products.codes import HALVES, SCALE_BYTES, SMALL_SCALES, Codes, get_codes
from terrazzo.ops.products.ways import get_way, numerics_of

FACTOR_BYTES = 64 * 4
"""Of the float32 factors of 64 rows."""
NUMERICS = ("exact", "fused", "post")


@dataclass(frozen=True)
class Operand:
    """The decoding side of a product with 16-bit activations (specs.md B.2, B.3).

    Args:
        group: k extent of one scale, 16, 32, 64 or 128; 0 means one scale for the whole row.
        symmetric: the zero point is the format's everywhere and no zeros are stored.
        scale_dtype: "float16", "bfloat16" or "float32", or what else the format has.
        dtype: activation and operand dtype, "float16" or "bfloat16".
        numerics: "exact", "fused" or "post".
        weight: name of the weight's format.
    """

    group: int
    symmetric: bool
    scale_dtype: str
    dtype: str
    numerics: str
    weight: str = "u4"

    def __post_init__(self):
        if self.group not in (0, 16, 32, 64, 128):
            constraint = "must be 16, 32, 64, 128 or 0 (whole row)"
            raise ArgumentError("group", self.group, constraint, "expand the scales to 128")
        known = (*self.format.groups, *([0] if self.format.one_group else []))
        if self.group not in known:
            raise ArgumentError("group", self.group, f"must be one of {known} in {self.weight}", "expand the scales")
        if self.dtype not in HALVES:
            raise ArgumentError("dtype", self.dtype, "must be float16 or bfloat16", "cast the activations")
        if self.scale_dtype not in self.format.scales:
            raise ArgumentError(
                "scale_dtype", self.scale_dtype, f"must be one of {sorted(self.format.scales)}", "cast the scales"
            )
        numerics = numerics_of(self.format)
        if self.numerics not in numerics:
            raise ArgumentError("numerics", self.numerics, f"must be one of {numerics}", f"use {numerics[-1]!r}")
        if self.numerics == "post" and self.format.row_factors and self.scale_dtype != "float32":
            raise ArgumentError(
                "numerics", "post", f"needs float32 scales in {self.weight}, they are {self.scale_dtype}",
                f"use activations in {self.scale_dtype}, or pack with float32 scales",
            )  # fmt: skip
        if self.numerics != "post" and self.scale_dtype not in (self.dtype, *SMALL_SCALES):
            raise ArgumentError(
                "numerics",
                self.numerics,
                f"needs scales in the activation dtype {self.dtype}, and they are {self.scale_dtype}",
                "use numerics='post', or repack with scales in the activation dtype",
            )

    @property
    def format(self) -> Codes:
        return get_codes(self.weight)

    @property
    def converter(self) -> str:
        """Name of the converter in terrazzo.layouts, where programs scale nothing that it could scale."""
        return self._converter(self.numerics)

    def _converter(self, numerics: str) -> str:
        return get_way(self.format, numerics).converter(self.dtype, self.symmetric)

    @property
    def scaling_converter(self) -> Converter:
        """The converter of programs that fold what they can: it takes words of scales (and of zero points), with
        numerics "post" scales of one, or nothing where the format has none to fold."""
        own = get_converter(self.converter)
        integers = self.symmetric and all(self.format.zero + bias == 0 for bias in own.bias)
        if self.numerics != "post" or self.format.row_factors or integers:
            return own
        return get_converter(self._converter(numerics_of(self.format)[0]))

    @property
    def has_groups(self) -> bool:
        """Whether there are scales besides the rows' factors."""
        return self.group > 0 or not self.format.row_factors

    @property
    def scales_sums(self) -> bool:
        """Whether the sums of each group are scaled, or (without factors of rows) those of the whole row."""
        return self.numerics == "post" and self.has_groups

    @property
    def undone(self) -> float:
        """What a row's factor is multiplied by, for operands that are a power of two of what they stand for."""
        return 2.0 ** -(self.scaling_converter.scale_exp2[0] + self.format.outer.get(self.dtype, 0))

    @property
    def scale_bytes(self) -> int:
        return SCALE_BYTES[self.scale_dtype]

    @property
    def record_bytes(self) -> int:
        """Bytes of the parameters of 64 rows and one group, or as many as the format puts together: scales, then one
        byte for each zero point. A row's factors lie in as many records as they take."""
        return 64 * (self.scale_bytes * self.format.record_groups + (0 if self.symmetric else 1))

    @property
    def group_bytes(self) -> int:
        """`record_bytes`, 0 where there are no groups."""
        return self.record_bytes if self.has_groups else 0

    def groups(self, k_padded: int) -> int:
        """Records of groups along a padded k."""
        return int(self.has_groups) if self.group == 0 else k_padded // (self.group * self.format.record_groups)

    def records(self, k_padded: int) -> int:
        """All records of 64 rows: of groups, then those of the rows' factors."""
        return self.groups(k_padded) + (FACTOR_BYTES // self.record_bytes if self.format.row_factors else 0)

    def groups_per(self, k_extent: int) -> int:
        """Distinct scales inside `k_extent` consecutive k, at least one."""
        return 1 if self.group == 0 else max(1, k_extent // self.group)

    def records_per(self, k_extent: int) -> int:
        """Records that hold these."""
        return -(-self.groups_per(k_extent) // self.format.record_groups)

    def weight_bytes(self, n: int, k: int) -> int:
        """Packed bytes of an [n, k] weight: what a kernel must read at least once."""
        np_, kp = -(-n // 64) * 64, -(-k // 128) * 128
        return self.format.nbytes(np_, kp) + np_ // 64 * self.records(kp) * self.record_bytes
