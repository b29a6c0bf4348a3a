"""How a packed weight becomes a tensor-core operand: numerics, the converter that serves them, parameter records."""

from __future__ import annotations

from dataclasses import dataclass

from terrazzo.lowering.errors import ArgumentError

SCALE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
_SHORT = {"float16": "f16", "bfloat16": "bf16"}
NUMERICS = ("exact", "fused", "post")


@dataclass(frozen=True)
class Operand:
    """The decoding side of a W4A16 problem (specs.md B.2, B.3).

    Args:
        group: k extent of one scale, 32, 64 or 128; 0 means one scale for the whole row.
        symmetric: the zero point is 8 everywhere and no zeros are stored.
        scale_dtype: "float16", "bfloat16" or "float32".
        dtype: activation and operand dtype, "float16" or "bfloat16".
        numerics: "exact", "fused" or "post".
    """

    group: int
    symmetric: bool
    scale_dtype: str
    dtype: str
    numerics: str

    def __post_init__(self):
        if self.group not in (0, 32, 64, 128):
            raise ArgumentError("group", self.group, "must be 32, 64, 128 or 0 (whole row)", "expand the scales to 128")
        if self.dtype not in _SHORT:
            raise ArgumentError("dtype", self.dtype, "must be float16 or bfloat16", "cast the activations")
        if self.scale_dtype not in SCALE_BYTES:
            raise ArgumentError(
                "scale_dtype", self.scale_dtype, f"must be one of {sorted(SCALE_BYTES)}", "cast the scales"
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
    def converter(self) -> str:
        """Name of the u4 converter in terrazzo.layouts."""
        if self.numerics == "post":
            return "u4_f16_subnormal" if self.dtype == "float16" else "u4_bf16_biased"
        return f"u4_{_SHORT[self.dtype]}_{self.numerics}"

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
        return np_ * kp // 2 + np_ // 64 * self.groups(kp) * self.record_bytes
