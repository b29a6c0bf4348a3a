"""Attention over packed caches on a CPU: what is stored is read once a call, for all heads, and attended in float32."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from terrazzo.ops.attention.cache.cache import PackedCache
from terrazzo.ops.attention.cache.quantizer import decoded, rotated_exactly
from terrazzo.ops.attention.decoding.reference import Options
from terrazzo.ops.attention.writing.reference_writing import spare_layout, unpacked
from terrazzo.ops.products.kv import TILE_TOKENS

ROWS = 256
"""New tokens at a time: bounds the temporary memory."""


def decode(q: torch.Tensor, cache: PackedCache, options: Options) -> torch.Tensor:
    """[B, q_len, Hq, D] in q's dtype of q [B, q_len, Hq, D], the newest tokens of each sequence."""
    made = [_attend(rows, *_stored(cache, b), options) for b, rows in enumerate(q)]
    return torch.stack(made).to(q.dtype)


def prefill(
    q: torch.Tensor, cache: PackedCache, starts: list[int], k: torch.Tensor, v: torch.Tensor, options: Options
) -> torch.Tensor:
    """[N, Hq, D] in q's dtype of new tokens q [N, Hq, D] that attend to themselves and to what the cache holds.

    Args:
        cache: whose lengths count the new tokens, which it need not hold. starts: of each sequence's tokens, and N.
        k, v: [N, Hkv, D], of the new tokens.
    """
    made = []
    for b, (first, last) in enumerate(pairwise(starts)):
        held = _stored(cache, b, last - first) if last > first else ()
        fresh = (x[first:last].transpose(0, 1).float() for x in (k, v))
        keys, values = (torch.cat(pair, 1) for pair in zip(held, fresh)) if held else (None, None)
        for at in range(first, last, ROWS):
            end = min(at + ROWS, last)
            seen = keys.shape[1] - (last - end)
            made.append(_attend(q[at:end], keys[:, :seen], values[:, :seen], options))
    return torch.cat(made).to(q.dtype) if made else torch.zeros_like(q)


def _stored(cache: PackedCache, b: int, new: int = 0) -> list[torch.Tensor]:
    """Keys and values float32 [Hkv, T, D] of a sequence without its `new` newest tokens, turned back where rotated."""
    layout, heads = cache.layout, cache.kv_heads
    length = int(cache.lengths[b]) - new
    packed = layout.packed(length, cache.residual_tokens)
    words = cache.pages[b]
    if cache.block_table is not None:
        pages = cache.block_table[b, : -(-packed // cache.page_size)].long()
        words = cache.pages[pages].transpose(0, 1).reshape(heads, -1)
    blocks = -(-packed // layout.block_tokens)
    words = words[:, : blocks * layout.block_words].reshape(heads, blocks, layout.block_words)
    static = [None if s is None else s[:, None] for s in (cache.k_static, cache.v_static)]
    whole = zip(unpacked(layout, words), (layout.k, layout.v), static)
    parts = [decoded(codes, form, scales)[:, :packed] for codes, form, scales in whole]
    if cache.residual is not None:
        spare = spare_layout(layout)
        tiles = cache.residual[b if cache.slots is None else int(cache.slots[b])].reshape(heads, -1, spare.block_words)
        ring, sink = tiles.split([cache.residual_tokens // TILE_TOKENS + 1, layout.sink_tokens // TILE_TOKENS], 1)
        rest = unpacked(spare, ring.roll(-(packed // TILE_TOKENS), 1))
        parts = [torch.cat([p, decoded(c, spare.k)[:, : length - packed]], 1) for p, c in zip(parts, rest)]
        if packed and sink.shape[1]:
            parts = [torch.cat([decoded(c, spare.k), p[:, 16:]], 1) for p, c in zip(parts, unpacked(spare, sink))]
    return [(rotated_exactly(x) if form.rotation else x).float() for x, form in zip(parts, (layout.k, layout.v))]


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> torch.Tensor:
    """float32 [n, Hq, D] of q [n, Hq, D], the newest n of the T tokens k, v [Hkv, T, D]; a row that sees none is 0."""
    (new, heads, dim), (kv_heads, tokens, _) = q.shape, k.shape
    rows = q.float().view(new, kv_heads, -1, dim).permute(1, 2, 0, 3)  # [Hkv, G, n, D]
    scale = 1 / math.sqrt(dim) if options.scale is None else options.scale
    s = (rows.flatten(1, 2) * scale @ k.transpose(1, 2)).view(*rows.shape[:3], tokens)
    if options.softcap:
        s = options.softcap * torch.tanh(s / options.softcap)
    own, at = torch.arange(tokens - new, tokens)[:, None], torch.arange(tokens)
    hidden = at > own
    if options.window:
        hidden |= at <= own - options.window
    s.masked_fill_(hidden, -math.inf)
    if options.sinks is not None:
        s = torch.cat([s, options.sinks.float().view(kv_heads, -1, 1, 1).expand(-1, -1, new, -1)], -1)
    p = s.softmax(-1)[..., :tokens].nan_to_num(0.0) if tokens else s[..., :0]
    return (p.flatten(1, 2) @ v).view(rows.shape).permute(2, 0, 1, 3).reshape(new, heads, dim)
