"""The oracle of prefill attention: float64 over what the cache and the new tokens hold, and the allowed error."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from terrazzo.ops.attention.cache.quantizer import rotated_exactly
from terrazzo.ops.attention.decoding.reference import (
    LOG2E,
    UNIT_ROUNDOFF,
    Options,
    _magnitudes,
    attend,
    rotation_error,
    rounded_bound,
)

if TYPE_CHECKING:
    import torch
    from terrazzo.ops.attention.cache.cache import PackedCache

ROWS = 256  # new tokens at a time: bounds the temporary memory


def prefill(
    q: torch.Tensor, cache: PackedCache, cu_seqlens: torch.Tensor, options: Options | None = None,
    k: torch.Tensor | None = None, v: torch.Tensor | None = None, bounded: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(out [N, Hq, D], lse [N, Hq], bound [N, Hq, D]), float64, of `prefill` with the same arguments; see `bound_of`.

    Without `bounded`, which takes most of the time, the bound is 0.

    cache.lengths counts the new tokens. With k and v [N, Hkv, D] the cache need only hold the tokens before them.
    """
    import torch

    options = options or Options()
    group = q.shape[1] // cache.kv_heads
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    lse, bound = torch.full_like(out[..., 0], -math.inf), torch.zeros_like(out)
    starts = cu_seqlens.tolist()
    if k is not None:
        cache = replace(cache, lengths=cache.lengths - cu_seqlens.diff().to(cache.lengths.device))
    for b, (first, last) in enumerate(pairwise(starts)):
        for h in range(cache.kv_heads if last > first else 0):
            span = slice(h * group, (h + 1) * group)
            sinks = None if options.sinks is None else options.sinks[span]
            if sinks is not None:
                lse[first:last, span] = sinks.double() * LOG2E
            tokens = list(cache.dequantize(b, h))
            parts = [None, None]
            if bounded:
                parts = [[torch.cat(p) for p in zip(*found)] if found else None for found in _parts(cache, b, h)]
            for role, x in enumerate((k, v)):
                if x is not None:
                    fresh = x[first:last, h].double()
                    tokens[role] = torch.cat([tokens[role], fresh])
                    if not bounded:
                        continue
                    fresh = rotated_exactly(fresh) if (cache.layout.k, cache.layout.v)[role].rotation else fresh
                    more = [fresh.abs(), torch.zeros_like(fresh), torch.zeros_like(fresh)]
                    parts[role] = [torch.cat(p) for p in zip(parts[role], more)] if parts[role] else more
            length, new = len(tokens[0]), last - first
            for r in range(max(0, new - length), new, ROWS):  # earlier rows have no token
                end = min(r + ROWS, new)
                seen = length - (new - end)
                rows = q[first + r : first + end, span]
                o, sums, weights = attend(rows, tokens[0][:seen], tokens[1][:seen], options, sinks)
                at = slice(first + r, first + end)
                out[at, span], lse[at, span] = o, sums
                if bounded:
                    cut = [[p[:seen] for p in part] for part in parts]
                    bound[at, span] = bound_of(rows, cache, tokens[0][:seen], cut, o, weights, options)
    return out, lse, bound


def _parts(cache: PackedCache, sequence: int, head: int):
    return [_magnitudes(cache, sequence, head, role) for role in (0, 1)]


def bound_of(
    q: torch.Tensor, cache: PackedCache, keys: torch.Tensor, parts: list, out: torch.Tensor, weights: torch.Tensor,
    options: Options,
) -> torch.Tensor:  # fmt: skip
    """Bound of |kernel - out| [q_len, G, D] for one head.

    The programs round where decode does (reference.forward_error_bound), or each dequantized key and value to the
    operand's dtype; static scales are rounded themselves. Such errors of a logit's products are independent: six
    standard deviations are allowed. P is rounded to the operand's dtype without a lift: 2^-25 of its subnormals.
    """
    import torch

    layout, given = cache.layout, out
    scale = 1 / math.sqrt(q.shape[-1]) if options.scale is None else abs(options.scale)
    a = (rotated_exactly(q) if layout.k.rotation else q.double()).abs()
    keys = rotated_exactly(keys) if layout.k.rotation else keys
    out = rotated_exactly(out) if layout.v.rotation else out
    steps, zeros, _ = parts[0]
    uv = UNIT_ROUNDOFF[layout.v.operand] * (1 if layout.v.plain else 3)
    quantized = float(layout.k.scaling != "none" or layout.k.operand != str(q.dtype).removeprefix("torch."))
    ground = (layout.head_dim / 16 + 8) * 2.0**-22
    d = scale * ground * torch.einsum("qgd,td->qgt", a, steps + zeros)
    squares = torch.einsum("qgd,td->qgt", a**2, torch.maximum(keys.abs(), steps) ** 2)
    d += scale * quantized * UNIT_ROUNDOFF[layout.k.operand] * 6 * (squares * (2 / 3)).sqrt()
    d += scale * 2.0**-24 * steps.sum(-1)
    if layout.k.rotation:  # Q is rotated, and rounded behind it
        d += scale * UNIT_ROUNDOFF[layout.k.operand] * torch.einsum("qgd,td->qgt", a, keys.abs())
        d += scale * rotation_error(q.double()) * (steps + zeros).sum(-1)
    d = torch.expm1(1.01 * d + 2.0**-20)
    values, v_zeros, _ = parts[1]
    whole = values + v_zeros
    moved = (weights * d) @ whole + (weights * d).sum(-1, keepdim=True) * out.abs()
    rounded = uv * (weights @ whole) + torch.minimum(weights, weights.new_tensor(2.0**-24)) @ whole
    rest = (2.0**-19 + len(keys) / 16 * 2.0**-25) * (weights @ whole + out.abs())
    total = moved + rounded + rest
    return rounded_bound(total, out, given, str(q.dtype).removeprefix("torch."), bool(layout.v.rotation))
