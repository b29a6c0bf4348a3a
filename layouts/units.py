"""A packed weight whose parameters travel with its words: a contiguous unit of blocks of codes, then their records.

A kernel then needs one bulk copy for both. Neither order is written by hand: the words are those of a `PackedLayout`,
the records those of the `RowLayout` of the same fragment, so that a thread finds the parameters of its rows adjacent.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
from terrazzo.layouts.instances import get_instance
from terrazzo.layouts.packed import PackedLayout
from terrazzo.layouts.rows import RowLayout, derive_rows
from terrazzo.lowering.errors import LayoutError


@dataclass(frozen=True)
class UnitLayout:
    """`k_blocks` packed blocks of the same rows, one after another along K, then `groups` parameter records.

    Attributes:
        block: layout of one block of codes, row blocks outermost ("rk").
        rows: order of the parameters of a block's rows.
        k_blocks: blocks of codes in a unit.
        groups: parameter records of a unit, each for unit_k / groups input channels.
        planes: bytes of a row in a record, one for each parameter.
    """

    block: PackedLayout
    rows: RowLayout
    k_blocks: int
    groups: int
    planes: int

    @property
    def unit_k(self) -> int:
        """Input channels of a unit."""
        return self.k_blocks * self.block.block_k

    @property
    def code_words(self) -> int:
        """32-bit words of codes, before the first record."""
        return self.k_blocks * self.block.words_per_block

    @property
    def record_words(self) -> int:
        """32-bit words of one record: a row's parameters side by side, rows in RowLayout order."""
        return self.rows.block_rows * self.planes // 4

    @property
    def words(self) -> int:
        return self.code_words + self.groups * self.record_words

    @cached_property
    def identity(self) -> str:
        """Stable name of the byte order, the block's included."""
        facts = repr((self.block.identity, self.rows.map.columns, self.k_blocks, self.groups, self.planes))
        digest = hashlib.sha256(facts.encode()).hexdigest()[:12]
        return f"{self.block.identity}+u{self.unit_k}.g{self.groups}x{self.planes}.{digest}"

    def padded(self, n: int, k: int) -> tuple[int, int]:
        """(N', K'): n and k rounded up to whole units."""
        return -(-n // self.block.block_rows) * self.block.block_rows, -(-k // self.unit_k) * self.unit_k

    def shape(self, n: int, k: int) -> tuple[int, int, int]:
        """Shape of the packed [n, k]: k units, row blocks, words of a unit."""
        rows, depth = self.padded(n, k)
        return depth // self.unit_k, rows // self.block.block_rows, self.words

    def pack(self, codes, *planes):
        """int32 (torch) [K'/unit_k, N'/rows, words] from codes uint8 [N', K'] and parameters uint8 [N', K' groups].

        Raises:
            LayoutError: sizes that are not whole units, or another number of planes.
        """
        import torch

        n, k = codes.shape
        expected = (n, k // self.unit_k * self.groups)
        if self.padded(n, k) != (n, k) or [tuple(p.shape) for p in planes] != [expected] * self.planes:
            seen = (tuple(codes.shape), *(tuple(p.shape) for p in planes))
            constraint = f"must be codes of whole units and {self.planes} parameters {expected}"
            raise LayoutError("codes", seen, constraint, "pad rows and input channels first")
        words = self.block.pack(codes).reshape(n // self.block.block_rows, k // self.unit_k, self.code_words)
        records = torch.stack([self.rows.pack(p) for p in planes], dim=-1).flatten(2).contiguous().view(torch.int32)
        return torch.cat([words, records.reshape(*words.shape[:2], -1)], dim=-1).transpose(0, 1).contiguous()

    def split(self, words):
        """(words of codes [N'/rows, K'/block_k, ...] in the block's order, records uint8 [N'/rows, G', rows, planes]).

        Accepts numpy or torch; the records' rows are in RowLayout order.
        """
        depth, blocks = words.shape[:2]
        if tuple(words.shape[2:]) != (self.words,):
            constraint = f"must have units of {self.words} words ({self.identity})"
            raise LayoutError("words", tuple(words.shape), constraint, "pack with this layout")
        words = words.swapaxes(0, 1)
        codes = words[..., : self.code_words].reshape(blocks, depth * self.k_blocks, -1)
        records = words[..., self.code_words :]
        if isinstance(words, np.ndarray):
            records = np.ascontiguousarray(records).view(np.uint8)
        else:
            import torch

            records = records.contiguous().view(torch.uint8)
        return codes, records.reshape(blocks, depth * self.groups, self.rows.block_rows, self.planes)

    def unpack(self, words, n: int, k: int):
        """(codes uint8 [n, K'], plane uint8 [n, G'], ...): the inverse of `pack`, rows cut to n; torch."""
        codes, records = self.split(words)
        depth = codes.shape[1] * self.block.block_k
        if tuple(words.shape) != self.shape(n, k):
            constraint = f"must have shape {self.shape(n, k)} for [{n}, {k}]"
            raise LayoutError("words", tuple(words.shape), constraint, "pack with this layout")
        planes = [self.rows.unpack(records[..., plane], n) for plane in range(self.planes)]
        return self.block.unpack(codes, n, depth), *planes


@cache
def derive_unit(instance: str, k_blocks: int, groups: int, planes: int) -> UnitLayout:
    """The unit of a registered instance: see `UnitLayout`.

    Raises:
        LayoutError: an unknown instance, one whose k blocks are not adjacent ("kr"), or records of broken words.
    """
    block = get_instance(instance)
    if block.block_order != "rk" or k_blocks < 1 or groups < 1 or k_blocks * block.block_k % groups:
        raise LayoutError(
            "instance", instance, f"has no unit of {k_blocks} k blocks and {groups} records", "use an rk instance"
        )
    rows = derive_rows(block.fragment, block.block_rows)
    if planes < 1 or rows.block_rows * planes % 4:
        raise LayoutError("planes", planes, "a record must be whole 32-bit words", "pad the record")
    return UnitLayout(block, rows, k_blocks, groups, planes)
