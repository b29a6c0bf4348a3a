"""The question that a schedule answers: sizes and storage of one linear layer. Formats are values in it."""

from __future__ import annotations

from dataclasses import dataclass, field

from terrazzo.schedules.forms import FORMS, Form, name_of

TOKENS_PER_TILE = 8
"""Of an mma, whose columns are tokens."""
X_BYTES = {"f16": 2, "s8": 1, "e4m3": 1, "s4_s8": 1}
"""Operands of the tensor cores -> bytes of an element of x."""


@dataclass(frozen=True)
class Gemm:
    """y[M, n] = x[M, k] w[n, k]^T with w in packed codes; with experts, one such weight for each.

    Args:
        n, k: output and input features, unpadded.
        groups_per_128: parameter records of 64 rows in 128 k (1 also where one record serves the whole row).
        record_bytes: bytes of such a record.
        bits: of a code.
        weight: name of the weight's format.
        activations: the tensor cores' operands, a key of `X_BYTES`: "f16" (also bfloat16), "s8", "e4m3", or "s4_s8",
            of which the last `blocks8` blocks of 128 channels have 8 bits.
        scales: how they enter: "fold" into the operand, "post" on the f32 sums of a group, "integer" (an integer of the
            group in the operand, a scale of the channel on the sums), "block" on the sums of each block of 128 k; of
            bytes as they are, on the sums of a tile: "direct", or of e4m3 "fast", and "promoted" with sums of 128 k;
            "mx" as "post", times those of a token's 32 k.
        symmetric: no zero points.
        channel_bytes: of a row of w, besides its records.
        out_bytes: of an element of y.
        experts: weights that share a launch; 0: one weight, for itself.
    """

    n: int
    k: int
    groups_per_128: int
    record_bytes: int
    bits: int = field(default=4, kw_only=True)
    weight: str = field(default="u4", kw_only=True)
    activations: str = field(default="f16", kw_only=True)
    scales: str = field(default="fold", kw_only=True)
    symmetric: bool = field(default=False, kw_only=True)
    channel_bytes: int = field(default=0, kw_only=True)
    out_bytes: int = field(default=2, kw_only=True)
    blocks8: int = field(default=0, kw_only=True)
    experts: int = field(default=0, kw_only=True)

    @staticmethod
    def of_bytes(
        n: int, k: int, group: int, out_bytes: int = 2, activations: str = "s8", *, experts: int = 0, mx: bool = False
    ) -> Gemm:
        """W4A8: 4-bit codes that become bytes, with a record of 128 bytes for each group, and channel scales."""
        form = ("z4", "mx" if mx else "post") if activations == "e4m3" else ("u4_lqq", "integer")
        own = dict(zip(("weight", "scales"), form), activations=activations, channel_bytes=4)
        return Gemm(n, k, 128 // group, 128, out_bytes=out_bytes, experts=experts, **own)

    @staticmethod
    def of_w8(n: int, k: int, scales: str, out_bytes: int = 2, *, experts: int = 0) -> Gemm:
        """W8A8: bytes times bytes; scales "direct" of int8, "fast", "promoted" or "block" of e4m3."""
        kind = "s8" if scales == "direct" else "e4m3"
        records = (
            dict(groups_per_128=1, record_bytes=16) if scales == "block" else dict(groups_per_128=0, record_bytes=0)
        )
        own = dict(bits=8, weight=kind, activations=kind, scales=scales, channel_bytes=0 if scales == "block" else 8)
        return Gemm(n, k, **records, **own, out_bytes=out_bytes, experts=experts)

    @staticmethod
    def of_blocks(
        n: int, k: int, blocks8: int, out_bytes: int = 2, two_level: bool = False, *, experts: int = 0
    ) -> Gemm:
        """W4Ax: blocks of 128 channels, each with a 2-byte parameter for each row."""
        own = dict(weight="s4", activations="s4_s8", scales="integer" if two_level else "block")
        return Gemm(n, k, 1, 128, out_bytes=out_bytes, blocks8=blocks8, experts=experts, **own)

    @property
    def form_name(self) -> str:
        """Of `form`."""
        return name_of(self.weight, self.activations, self.scales)

    @property
    def form(self) -> Form:
        """What schedules know of the programs that compute it."""
        return FORMS[self.form_name]

    @property
    def x_bytes(self) -> int:
        """Of an element of x."""
        return X_BYTES[self.activations]

    @property
    def rate(self) -> str:
        """The dtype whose tensor-core rate products have; emulated ones of s4 that of s8."""
        return "s8" if self.activations == "s4_s8" else self.activations

    @property
    def two_level(self) -> bool:
        """Whether scales are an integer of the group times that of the channel."""
        return self.scales == "integer"

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

    @property
    def weight_bytes(self) -> int:
        """Packed weight with its parameters and channel scales."""
        return self.row_blocks * (self.units * self.unit_bytes + 64 * self.channel_bytes)

    def launch_bytes(self, m: int) -> int:
        """What a launch of m tokens reads and writes at least."""
        return self.weight_bytes + m * (self.k * self.x_bytes + self.n * self.out_bytes)
