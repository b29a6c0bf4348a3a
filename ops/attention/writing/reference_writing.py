"""The oracle of `store` and `append`: new tokens written into a packed cache, in torch on its device."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING

from terrazzo.ops.attention.cache.cache import PackedCache
from terrazzo.ops.attention.cache.layout import QuantizedBlock, residual_layout
from terrazzo.ops.attention.cache.quantizer import F16_MAX, encode, rotate
from terrazzo.ops.products.kv import TILE_TOKENS

if TYPE_CHECKING:
    import torch
    from terrazzo.ops.attention.cache.layout import CacheLayout


@lru_cache(maxsize=64)
def stored_places(layout: CacheLayout) -> tuple[QuantizedBlock, QuantizedBlock]:
    """Of keys and of values: the field of a block's words, counted in fields of its own width, where each code and
    parameter lies. `layout.unpack` tells: it is asked for words whose fields hold their own numbers, part by part."""
    import torch

    def asked(bits: int) -> list:
        number, found = torch.arange(layout.block_words * 32 // bits), []
        for part in range(0, len(number).bit_length(), bits):
            fields = number >> part & (1 << bits) - 1
            units = fields.view(-1, max(8 // bits, 1)) << torch.arange(0, max(bits, 8), bits)
            words = units.sum(1).to(torch.int32 if bits == 16 else torch.uint8)
            words = words.to(torch.int16) if bits == 16 else words
            found.append((part, layout.unpack(words.view(torch.int32)[None])))
        return found

    def joined(parts: list, role: int, name: str) -> torch.Tensor | None:
        values = [(part, getattr(made[role], name)) for part, made in parts]
        if values[0][1] is None:
            return None
        wide = lambda x: (x.view(torch.int16) if x.is_floating_point() else x).long() & 0xFFFF
        return sum(wide(x) << part for part, x in values)

    forms, shared = (layout.k, layout.v), asked(16)
    codes = [joined(asked(form.bits), role, "codes") for role, form in enumerate(forms)]
    return tuple(
        QuantizedBlock(c, *(joined(shared, role, n) for n in ("scale", "zero"))) for role, c in enumerate(codes)
    )


def unpacked(layout: CacheLayout, words: torch.Tensor) -> list[QuantizedBlock]:
    """`layout.unpack` of words int32 [..., blocks, block_words], by places that are known."""
    import torch

    found = []
    for form, places in zip((layout.k, layout.v), stored_places(layout)):
        bits, at = form.bits, places.codes.flatten()
        per = 32 // bits
        codes = words[..., at // per] >> (at % per * bits).int() & (1 << bits) - 1
        codes = codes.unflatten(-1, places.codes.shape).flatten(-3, -2)
        halves = words.contiguous().view(torch.float16)
        made = [
            None if p is None else halves[..., p.flatten()].unflatten(-1, p.shape).flatten(-p.dim() - 1, -p.dim())
            for p in (places.scale, places.zero)
        ]
        found.append(QuantizedBlock(codes.to(torch.int16 if bits == 16 else torch.uint8), *made))
    return found


spare_layout = lru_cache(maxsize=64)(residual_layout)
"""`residual_layout`, whose maps are derived once for all steps."""


def store(cache: PackedCache, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor) -> None:
    """Write k, v [N, Hkv, D], the newest tokens of all sequences in turn; `cache.lengths` counts them already.

    Args:
        starts: int32 [B + 1], where each sequence's tokens begin, and their number.
    """
    import torch

    ring = cache.residual_tokens
    for b, (first, last) in enumerate(pairwise(starts.tolist())):
        length = int(cache.lengths[b])
        begin = length - (last - first)
        if begin == length:
            continue
        new = [x[first:last].transpose(0, 1) for x in (k, v)]  # [Hkv, new, D]
        new = [rotate(x) if fmt.rotation else x for x, fmt in zip(new, (cache.layout.k, cache.layout.v))]
        if not ring:
            _write(cache, b, begin, length, new)
            continue
        held, packed = (cache.layout.packed(n, ring) for n in (begin, length))
        new = [x.float().clamp(-F16_MAX, F16_MAX).half() for x in new]
        waiting = _Ring(cache, b)
        first_new = begin
        if held < packed:
            if held < begin:
                old = waiting.read(held, begin)
                new, first_new = [torch.cat(pair, dim=1) for pair in zip(old, new)], held
            _write(cache, b, held, packed, [x[:, : packed - held] for x in new])
            if held == 0 and cache.layout.sink_tokens:
                waiting.write_sink([x[:, : cache.layout.sink_tokens] for x in new])
        reach = packed if cache.layout.k.group else ((length - 1) // TILE_TOKENS - ring // TILE_TOKENS) * TILE_TOKENS
        begin = max(begin, reach)  # what a truncation may want back
        if begin < length:
            waiting.write(begin, length, [x[:, begin - first_new :] for x in new])


def _write(cache: PackedCache, b: int, begin: int, end: int, new: list[torch.Tensor]) -> None:
    """Tokens begin..end of all heads of a sequence into its pages; what else their blocks hold stays."""
    layout, unit = cache.layout, cache.layout.block_tokens
    for block in range(begin // unit, -(-end // unit)):
        page, at = b, block * layout.block_words
        if cache.block_table is not None:
            page = int(cache.block_table[b, block * unit // cache.page_size])
            at = block * unit % cache.page_size // unit * layout.block_words
        words = cache.pages[page, :, at : at + layout.block_words]
        low, high = max(begin, block * unit), min(end, (block + 1) * unit)
        part = [x[:, low - begin : high - begin] for x in new]
        static = (cache.k_static, cache.v_static)
        words.copy_(_merged(layout, words, low - block * unit, high - block * unit, part, static))


def _merged(
    layout: CacheLayout, words: torch.Tensor, low: int, high: int, new: list[torch.Tensor], static: tuple = (None, None)
) -> torch.Tensor:
    """words [Hkv, block_words] with tokens low..high of the block replaced."""
    import torch

    if layout.k.bits == layout.v.bits == 16:
        made = words.clone(memory_format=torch.contiguous_format)
        for x, fmt, places in zip(new, (layout.k, layout.v), stored_places(layout)):
            made.view(torch.int16)[:, places.codes[low:high].flatten()] = encode(x, fmt).codes.flatten(1)
        return made
    held = layout.unpack(words[:, None])
    made = []
    for old, x, fmt, scales in zip(held, new, (layout.k, layout.v), static):
        q = encode(x, fmt, None if scales is None else scales[:, None])
        if fmt.scaling == "channel":  # of whole blocks
            made.append(q)
            continue
        fields = {"codes": old.codes.clone()}
        fields["codes"][:, low:high] = q.codes
        if fmt.token_wise:
            for name in ("scale", "zero"):
                fields[name] = getattr(old, name).clone()
                fields[name][:, low:high] = getattr(q, name)
        made.append(QuantizedBlock(**fields))
    return layout.pack(*made)[:, 0]


class _Ring:
    """The f16 tiles of one sequence's residual block: token p lies in tile p // 16 % tiles."""

    def __init__(self, cache: PackedCache, b: int) -> None:
        slot = b if cache.slots is None else int(cache.slots[b])
        self.layout = spare_layout(cache.layout)
        whole = cache.residual[slot].view(cache.kv_heads, -1, self.layout.tile_words)
        self.tiles = whole[:, : cache.residual_tokens // TILE_TOKENS + 1]
        self.sink = whole[:, self.tiles.shape[1] :]

    def _spans(self, begin: int, end: int) -> list[tuple[int, int, int]]:
        """(tile, first, last token in it) of tokens begin..end."""
        found = []
        for tile in range(begin // TILE_TOKENS, -(-end // TILE_TOKENS)):
            start = tile * TILE_TOKENS
            found.append((tile % self.tiles.shape[1], max(begin - start, 0), min(end - start, TILE_TOKENS)))
        return found

    def read(self, begin: int, end: int) -> list[torch.Tensor]:
        """k, v float16 [Hkv, end - begin, D]."""
        import torch

        parts = []
        for tile, low, high in self._spans(begin, end):
            held = unpacked(self.layout, self.tiles[:, tile : tile + 1])
            parts.append([q.codes[:, low:high].view(torch.float16) for q in held])
        return [torch.cat(part, dim=1) for part in zip(*parts)]

    def write_sink(self, new: list[torch.Tensor]) -> None:
        """The first tokens, which are packed now."""
        self.sink[:, 0] = _merged(self.layout, self.sink[:, 0], 0, TILE_TOKENS, new)

    def write(self, begin: int, end: int, new: list[torch.Tensor]) -> None:
        done = 0
        for tile, low, high in self._spans(begin, end):
            part = [x[:, done : done + high - low] for x in new]
            self.tiles[:, tile] = _merged(self.layout, self.tiles[:, tile], low, high, part)
            done += high - low


def append(cache: PackedCache, k: torch.Tensor, v: torch.Tensor) -> None:
    """Write k, v [B, q_len, Hkv, D], as many new tokens for each sequence."""
    import torch

    batch, new = k.shape[:2]
    store(cache, k.flatten(0, 1), v.flatten(0, 1), torch.arange(batch + 1) * new)


def store_slots(cache: PackedCache, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write k, v [tokens, Hkv, D] to slots page * page_size + i of the pages; others than those are left out."""
    layout, unit = cache.layout, cache.layout.block_tokens
    known = (slot_mapping >= 0) & (slot_mapping < len(cache.pages) * cache.page_size)
    slots = slot_mapping[known].long()
    if not len(slots):
        return
    blocks, place = (slots // unit).unique(return_inverse=True)
    every = cache.pages.unflatten(-1, (-1, layout.block_words))  # [pages, Hkv, blocks of a page, words]
    where = blocks // (cache.page_size // unit), slice(None), blocks % (cache.page_size // unit)
    held = layout.unpack(every[where].transpose(0, 1))
    made = []
    for x, old, fmt, static in zip((k, v), held, (layout.k, layout.v), (cache.k_static, cache.v_static)):
        new = x[known].transpose(0, 1)  # [Hkv, tokens, D]
        q = encode(rotate(new) if fmt.rotation else new, fmt, None if static is None else static[:, None])
        fields = {name: field for name in ("codes", "scale", "zero") if (field := getattr(old, name)) is not None}
        for name, field in fields.items():
            fields[name] = field.clone()
            fields[name][:, place * unit + slots % unit] = getattr(q, name)
        made.append(QuantizedBlock(**fields))
    every[where] = layout.pack(*made).transpose(0, 1)
