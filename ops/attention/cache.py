"""A packed KV cache as kernels read it: contiguous or paged storage, lengths on the device, f16 residual blocks."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.attention.layout import CacheLayout
from terrazzo.ops.attention.quantizer import F16_MAX, QuantizedBlock, dequantize, quantize

MAX_RESIDUAL = 256
"""Tokens: a warp of the kernel that packs a block holds 16 of them."""

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class PackedCache:
    """Keys and values of B sequences.

    Tokens [0, length - length % residual_tokens) of a sequence are packed, the others lie in its f16 residual block;
    without a residual block all are packed. The residual block is a ring of one tile more than it has tokens for: token
    p lies in tile p // 16 % tiles, so that new tokens never overwrite those of a block that is about to be packed.
    Unwritten storage must hold finite numbers: allocate it with zeros.

    Attributes:
        layout: formats and byte order.
        pages: int32 [P, Hkv, words of a page]; contiguous: page b is sequence b, as long as the longest may grow.
        lengths: int32 [B], tokens of each sequence.
        max_length: host-side bound of `lengths`, for the number of splits.
        block_table: int32 [B, most pages] of page numbers, or None when contiguous.
        page_size: tokens of a page, 0 when contiguous.
        residual: int32 [slots, Hkv, (residual_tokens / 16 + 1) * words of an f16 tile], or None.
        slots: int32 [B], the residual block of each sequence, or None for its own number.
        k_static, v_static: f32 [Hkv, D] scales of static formats.
    """

    layout: CacheLayout
    pages: torch.Tensor
    lengths: torch.Tensor
    max_length: int
    block_table: torch.Tensor | None = None
    page_size: int = 0
    residual: torch.Tensor | None = None
    slots: torch.Tensor | None = None
    k_static: torch.Tensor | None = None
    v_static: torch.Tensor | None = None

    @property
    def kv_heads(self) -> int:
        return self.pages.shape[1]

    @property
    def residual_tokens(self) -> int:
        """Tokens of a residual block, 0 without one."""
        if self.residual is None:
            return 0
        return (self.residual.shape[2] // residual_layout(self.layout).tile_words - 1) * 16

    @property
    def nbytes(self) -> int:
        return 4 * self.pages.numel() + (0 if self.residual is None else 4 * self.residual.numel())

    def to(self, device: str | torch.device) -> PackedCache:
        """The cache with every tensor on a device."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{n: t.to(device) for n, t in tensors.items() if hasattr(t, "to")})

    def packed_words(self, sequence: int, head: int, tokens: int) -> torch.Tensor:
        """Blocks [n, block_words] that hold the first `tokens` tokens of one head."""
        if self.block_table is None:
            words = self.pages[sequence, head]
        else:
            wanted = self.block_table[sequence, : -(-tokens // self.page_size)].long()
            words = self.pages[wanted, head].reshape(-1)
        blocks = -(-tokens // self.layout.block_tokens)
        return words[: blocks * self.layout.block_words].reshape(blocks, self.layout.block_words)

    def dequantize(self, sequence: int, head: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [length, D], float64, of one head of one sequence, from the stored bytes."""
        import torch

        length, n = int(self.lengths[sequence]), self.residual_tokens
        packed = length - length % n if n else length
        made = self.blocks(sequence, head, packed)
        static = [None if s is None else s[head] for s in (self.k_static, self.v_static)]
        parts = [dequantize(q, f, s)[:packed] for q, f, s in zip(made, (self.layout.k, self.layout.v), static)]
        if packed < length:
            slot = sequence if self.slots is None else int(self.slots[sequence])
            layout = residual_layout(self.layout)
            tiles = self.residual[slot, head].reshape(-1, layout.block_words)
            rest = layout.unpack(tiles.roll(-(packed // 16), 0))
            parts = [torch.cat([p, dequantize(q, "float16")[: length - packed]]) for p, q in zip(parts, rest)]
        return parts[0], parts[1]

    def blocks(self, sequence: int, head: int, tokens: int) -> tuple[QuantizedBlock, QuantizedBlock]:
        """Codes and parameters of whole blocks that hold the first `tokens` tokens."""
        return self.layout.unpack(self.packed_words(sequence, head, tokens))


def residual_of(layout: CacheLayout, residual: int | None) -> int:
    """Tokens of the residual block that a cache of this layout gets; None asks for what it needs.

    Raises:
        ArgumentError: no multiple of 16 up to 256, or another size than the channel group of the keys.
    """
    group = layout.k.group
    residual = group if residual is None else residual
    if residual % 16 or not 0 <= residual <= MAX_RESIDUAL or (group and residual != group):
        constraint = f"must be {group or f'a multiple of 16 up to {MAX_RESIDUAL}'} for {layout.k} keys"
        raise ArgumentError("residual", residual, constraint, "leave it out")
    if residual and layout.v.scaling == "static":
        constraint = "static values cannot join the f16 tokens of a residual block"
        raise ArgumentError("v_format", layout.v_format, constraint, "use token-wise values")
    return residual


def residual_words(layout: CacheLayout, residual: int) -> int:
    """int32 words of the ring of tiles behind a residual block of `residual` tokens."""
    return residual_layout(layout).words(residual + 16)


def residual_layout(layout: CacheLayout) -> CacheLayout:
    """The residual block of any pair of formats: f16 tiles."""
    return CacheLayout("float16", "float16", layout.head_dim)


def pack_cache(
    k: torch.Tensor,
    v: torch.Tensor,
    k_format: str,
    v_format: str,
    *,
    lengths: torch.Tensor | None = None,
    page_size: int = 0,
    residual: int | None = None,
    k_static: torch.Tensor | None = None,
    v_static: torch.Tensor | None = None,
    permutation: torch.Tensor | None = None,
) -> PackedCache:
    """Quantize and pack whole sequences in torch, on the device of k; the definition of what kernels write.

    Args:
        k, v: [B, Hkv, T, D]; tokens at and past a sequence's length are stored as zeros.
        lengths: int32 [B], default T for all.
        page_size: tokens of a page, 0 for contiguous storage.
        residual: tokens of the f16 residual block; default the channel group of the keys, or none. 0: none.
        k_static, v_static: f32 [Hkv, D] for static formats.
        permutation: order in which pages are handed out, int64 [pages]; default in turn.

    Raises:
        ArgumentError: formats, head_dim or sizes that do not fit.
    """
    import torch

    batch, heads, tokens, head_dim = k.shape
    layout = CacheLayout(k_format, v_format, head_dim)
    residual = residual_of(layout, residual)
    if residual:  # tokens pass through the f16 block, so what is packed does not depend on how they came
        k, v = (x.float().clamp(-F16_MAX, F16_MAX).half() for x in (k, v))
    device = k.device
    lengths = torch.full((batch,), tokens) if lengths is None else lengths
    lengths = lengths.to(device=device, dtype=torch.int32)
    unit = page_size or layout.block_tokens
    layout.words(unit)
    room = -(-tokens // unit) * unit
    unit = max(unit, layout.block_tokens)
    keep = (
        torch.arange(room, device=device)[None, :] < ((lengths - lengths % residual if residual else lengths)[:, None])
    )
    static = [None if s is None else s.to(device).unsqueeze(-2) for s in (k_static, v_static)]
    words = torch.empty(batch, heads, room // layout.block_tokens, layout.block_words, dtype=torch.int32, device=device)
    for b in range(batch):  # one at a time: bounds the temporary memory
        parts = []
        for x, fmt, s in zip((k, v), (layout.k, layout.v), static):
            padded = torch.nn.functional.pad(x[b], (0, 0, 0, room - tokens))
            parts.append(quantize(torch.where(keep[b][None, :, None], padded, 0), fmt, s))
        words[b] = layout.pack(*parts)
    rest = None
    if residual:
        spare = residual_layout(layout)
        starts = (lengths - lengths % residual).long()
        index = starts[:, None] + torch.arange(residual, device=device)
        inside = index < lengths[:, None]
        picked = [
            torch.where(
                inside[:, None, :, None],
                x.gather(2, index.clamp(max=tokens - 1)[:, None, :, None].expand(-1, heads, -1, head_dim)),
                0,
            )
            for x in (k, v)
        ]
        tiles = spare.pack(*(quantize(x, "float16") for x in picked))
        tiles = torch.nn.functional.pad(tiles, (0, 0, 0, 1))
        turns = (starts // 16).tolist()
        rest = torch.stack([t.roll(turn, 1) for t, turn in zip(tiles, turns)]).reshape(batch, heads, -1)
    facts = {"lengths": lengths, "max_length": tokens, "residual": rest, "k_static": k_static, "v_static": v_static}
    if not page_size:
        return PackedCache(layout, words.reshape(batch, heads, -1), **facts)
    pages = (
        words.reshape(batch, heads, room // page_size, -1)
        .transpose(1, 2)
        .reshape(batch * (room // page_size), heads, -1)
    )
    order = torch.arange(len(pages)) if permutation is None else permutation
    stored = torch.zeros_like(pages, memory_format=torch.contiguous_format)  # a batch of 1 is a permuted view
    stored[order.to(device)] = pages
    table = order.to(device=device, dtype=torch.int32).reshape(batch, -1).contiguous()
    return PackedCache(layout, stored, block_table=table, page_size=page_size, **facts)
