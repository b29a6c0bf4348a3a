"""How a packed weight becomes a tensor-core operand: numerics, the converter that serves them, parameter records."""

from __future__ import annotations

from dataclasses import dataclass

from terrazzo.layouts.converters import Converter, get_converter
from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.formats.weight import WeightFormat, get_weight_format

SCALE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
NUMERICS = ("exact", "fused", "post")


@dataclass(frozen=True)
class Operand:
    """The decoding side of a product with 16-bit activations (specs.md B.2, B.3).

    Args:
        group: k extent of one scale, 32, 64 or 128; 0 means one scale for the whole row.
        symmetric: the zero point is the format's everywhere and no zeros are stored.
        scale_dtype: "float16", "bfloat16" or "float32".
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
        if self.group not in (0, 32, 64, 128):
            raise ArgumentError("group", self.group, "must be 32, 64, 128 or 0 (whole row)", "expand the scales to 128")
        if self.dtype not in self.format.unscaled:
            raise ArgumentError("dtype", self.dtype, "must be float16 or bfloat16", "cast the activations")
        if self.scale_dtype not in self.format.scales:
            raise ArgumentError(
                "scale_dtype", self.scale_dtype, f"must be one of {sorted(self.format.scales)}", "cast the scales"
            )
        if self.numerics not in NUMERICS:
            raise ArgumentError("numerics", self.numerics, f"must be one of {NUMERICS}", "use 'post'")
        if self.numerics != "post" and self.scale_dtype != self.dtype:
            raise ArgumentError(
                "numerics",
                self.numerics,
                f"needs scales in the activation dtype {self.dtype}, and they are {self.scale_dtype}",
                "use numerics='post', or repack with scales in the activation dtype",
            )

    @property
    def format(self) -> WeightFormat:
        return get_weight_format(self.weight)

    @property
    def converter(self) -> str:
        """Name of the converter in terrazzo.layouts, where programs scale nothing that it could scale."""
        if self.numerics == "post":
            return self.format.unscaled[self.dtype]
        return self.format.scaled[self.dtype][self.numerics]

    @property
    def scaling_converter(self) -> Converter:
        """The converter that takes (bias, scale) words; with numerics "post" the scales are ones."""
        return get_converter(self.format.scaled[self.dtype]["exact" if self.numerics == "post" else self.numerics])

    @property
    def scale_bytes(self) -> int:
        return SCALE_BYTES[self.scale_dtype]

    @property
    def record_bytes(self) -> int:
        """Bytes of the parameters of 64 rows and one group: scales, then one byte for each zero point."""
        return 64 * (self.scale_bytes + (0 if self.symmetric else 1))

    def groups(self, k_padded: int) -> int:
        """Parameter records along a padded k."""
        return 1 if self.group == 0 else k_padded // self.group

    def groups_per(self, k_extent: int) -> int:
        """Distinct scales inside `k_extent` consecutive k, at least one."""
        return 1 if self.group == 0 else max(1, k_extent // self.group)

    def weight_bytes(self, n: int, k: int) -> int:
        """Packed bytes of an [n, k] weight: what a kernel must read at least once."""
        np_, kp = -(-n // 64) * 64, -(-k // 128) * 128
        return self.format.nbytes(np_, kp) + np_ // 64 * self.groups(kp) * self.record_bytes
