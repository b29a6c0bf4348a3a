"""Schedules of the W4A8 programs on e4m3 activations: those on int8, with a second accumulator beside the sums.

The tensor core's sums of a group of k are scaled and added to float32 sums (ops/w4a8/fp8_reference.py says why), so a
tile of as many tokens takes more registers than on int8.
"""

from __future__ import annotations

from terrazzo.schedules import w4a8


class StreamK(w4a8.StreamK):
    """The e4m3 form of the stream-K schedule."""

    @property
    def sums(self) -> int:
        """Accumulator registers of a thread: the sums of all row blocks, and those of one group of k."""
        return (self.row_blocks + 1) * self.block_tokens // 2
