"""The question that a schedule answers: the sizes and storage of one weight-only GEMM."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class WeightOnlyGemm:
    """y[M, n] = x[M, k] w[n, k]^T with w in packed codes of 4 or 8 bits, and 16-bit x and y.

    Args:
        n, k: output and input features, unpadded.
        groups_per_128: parameter records of 64 rows in 128 k (1 also where one record serves the whole row).
        record_bytes: bytes of such a record.
        bits: of a code.
    """

    n: int
    k: int
    groups_per_128: int
    record_bytes: int
    bits: int = field(default=4, kw_only=True)

    @property
    def unit_bytes(self) -> int:
        """Of 64 rows by 128 k, words and parameters."""
        return 64 * 128 * self.bits // 8 + self.groups_per_128 * self.record_bytes

    @property
    def row_tiles(self) -> int:
        """Row tiles of 16, padding included."""
        return self.row_blocks * 4

    @property
    def row_blocks(self) -> int:
        """Row blocks of 64, the packing's unit."""
        return -(-self.n // 64)

    @property
    def units(self) -> int:
        """Units of 128 along k, padding included."""
        return -(-self.k // 128)
