"""The oracle of attention: float64 over the dequantized cache, and the error that kernels may make against it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from terrazzo.ops.attention.cache.launch import LOG2E
from terrazzo.ops.attention.cache.quantizer import rotated_exactly
from terrazzo.ops.attention.checks import Options

if TYPE_CHECKING:
    import torch
    from terrazzo.ops.attention.cache.cache import PackedCache

UNIT_ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8}


def logits(q: torch.Tensor, k: torch.Tensor, options: Options) -> torch.Tensor:
    """Masked logits [q_len, G, T] of q [q_len, G, D] and k [T, D]: the q_len newest tokens are the rows' own."""
    import torch

    new, tokens = q.shape[0], k.shape[0]
    scale = 1 / math.sqrt(q.shape[-1]) if options.scale is None else options.scale
    s = torch.einsum("qgd,td->qgt", q.double(), k.double()) * scale
    if options.softcap:
        s = options.softcap * torch.tanh(s / options.softcap)
    own = torch.arange(tokens - new, tokens, device=q.device)[:, None]
    at = torch.arange(tokens, device=q.device)[None, :]
    seen = at <= own
    if options.window:
        seen &= at > own - options.window
    return s.masked_fill(~seen[:, None, :], -math.inf)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options, sinks: torch.Tensor | None = None):
    """(out [q_len, G, D], lse [q_len, G] base 2, weights [q_len, G, T]), float64; rows that see nothing give 0, -inf.

    sinks: [G] of this kv head's query heads.
    """
    import torch

    s = logits(q, k, options)
    top = s.amax(-1) if s.shape[-1] else s.new_full(s.shape[:-1], -math.inf)
    if sinks is not None:
        top = torch.maximum(top, sinks.double())
    safe = torch.where(top.isinf(), 0.0, top)
    p = torch.exp(s - safe[..., None])
    total = p.sum(-1) + (0 if sinks is None else torch.exp(sinks.double() - safe))
    weights = torch.where(total[..., None] > 0, p / total[..., None], 0.0)
    return weights @ v.double(), (safe + torch.log(total)) * LOG2E, weights


def decode(q: torch.Tensor, cache: PackedCache, options: Options | None = None, bounded: bool = True):
    """(out [B, q_len, Hq, D], lse [B, q_len, Hq], bound [B, q_len, Hq, D]), float64; see `forward_error_bound`.

    Without `bounded`, which takes most of the time, the bound is 0.

    A row whose token lies before the sequence's begin (q_len > length) sees nothing.
    """
    import torch

    options = options or Options()
    batch, new, heads, head_dim = q.shape
    group = heads // cache.kv_heads
    out = torch.zeros(batch, new, heads, head_dim, dtype=torch.float64, device=q.device)
    lse, bound = torch.full_like(out[..., 0], -math.inf), torch.zeros_like(out)
    for b in range(batch):
        for h in range(cache.kv_heads):
            k, v = cache.dequantize(b, h)
            span = slice(h * group, (h + 1) * group)
            first = max(0, new - k.shape[0])  # earlier rows have no token
            rows, sinks = q[b, first:, span], None if options.sinks is None else options.sinks[span]
            if not k.shape[0]:
                if sinks is not None:
                    lse[b, :, span] = sinks.double() * LOG2E
                continue
            o, l, weights = attend(rows, k, v, options, sinks)
            out[b, first:, span], lse[b, first:, span] = o, l
            if bounded:
                bound[b, first:, span] = forward_error_bound(rows, cache, b, h, o, weights, options)
            if first and sinks is not None:
                lse[b, :first, span] = sinks.double() * LOG2E
    return out, lse, bound


def forward_error_bound(
    q: torch.Tensor, cache: PackedCache, sequence: int, head: int, out: torch.Tensor, weights: torch.Tensor,
    options: Options,
) -> torch.Tensor:  # fmt: skip
    """Bound of |kernel - out| [q_len, G, D] for one head.

    A kernel rounds: Q times channel or static scales to f16, once for each product (u of it in the logit); sums of
    D products in f32, 16 at a time ((D/16 + 8) 2^-22 of the magnitudes, zero terms and the exponential
    included); P times the token's scale to f16 (u of each term, or 2^-25 of the lifted subnormal: 2^-29 after the lift
    by 2^4); the output. A logit off by d moves its weight by a factor e^d, hence the output by w d (|v| + |out|).

    Rotated keys meet a rotated Q, which is rounded to f16 (u of each product); sums of rotated values are rotated back
    in f32, so that an output has a share of the error of all of them.
    """
    import torch

    layout, given = cache.layout, out
    out = rotated_exactly(out) if layout.v.rotation else out
    d = _growth(q, cache, sequence, head, options)
    v_parts = [torch.cat(pair) for pair in zip(*_magnitudes(cache, sequence, head, 1))]
    values, v_zeros, _ = v_parts
    whole = values + v_zeros
    p_unit = UNIT_ROUNDOFF[layout.v.operand]
    moved = (weights * d) @ whole + (weights * d).sum(-1, keepdim=True) * out.abs()
    rounded = p_unit * (weights @ values) + torch.minimum(weights, weights.new_tensor(2.0**-28)) @ values
    rest = (2.0**-19) * (weights @ whole + out.abs())
    total = moved + rounded + rest
    return rounded_bound(total, out, given, str(q.dtype).removeprefix("torch."), bool(layout.v.rotation))


def rounded_bound(total: torch.Tensor, held: torch.Tensor, out: torch.Tensor, dtype: str, rotated: bool):
    """The error of `out` in `dtype` where that of the sums `held`, [..., D], is `total`; rotated: they are."""
    if rotated:
        total = (total + rotation_error(held)).sum(-1, keepdim=True) / math.sqrt(held.shape[-1])
    return total + UNIT_ROUNDOFF[dtype] * (out.abs() + total) + 2.0**-24


def rotation_error(x: torch.Tensor) -> torch.Tensor:
    """What each element of a rotation of x [..., D] in f32 may be off by, [..., 1]."""
    return (x.shape[-1].bit_length() + 1) * 2.0**-24 / math.sqrt(x.shape[-1]) * x.abs().sum(-1, keepdim=True)


def lse_error_bound(q: torch.Tensor, cache: PackedCache, options: Options | None = None) -> torch.Tensor:
    """Bound of |kernel - lse| [B, q_len, Hq], base 2; logits as in `forward_error_bound`, P rounded before its sum."""
    import torch

    options = options or Options()
    batch, new, heads, _ = q.shape
    group = heads // cache.kv_heads
    bound = torch.full((batch, new, heads), 2.0**-20, dtype=torch.float64, device=q.device)
    if options.sinks is not None:  # of a row that sees nothing else
        bound += 2.0**-20 * LOG2E * options.sinks.double().abs()
    for b in range(batch):
        for h in range(cache.kv_heads):
            k, v = cache.dequantize(b, h)
            if not k.shape[0]:
                continue
            span, first = slice(h * group, (h + 1) * group), max(0, new - k.shape[0])
            rows, sinks = q[b, first:, span], None if options.sinks is None else options.sinks[span]
            _, lse, weights = attend(rows, k, v, options, sinks)
            moved = (weights * _growth(rows, cache, b, h, options)).sum(-1)
            seen = lse.abs().nan_to_num(posinf=0.0)
            bound[b, first:, span] = LOG2E * (moved + UNIT_ROUNDOFF["float16"]) + 2.0**-20 * (1 + seen)
    return bound


def _growth(q: torch.Tensor, cache: PackedCache, sequence: int, head: int, options: Options) -> torch.Tensor:
    """By how much e^logit may grow, less 1: [q_len, G, T] of one head; see `forward_error_bound`."""
    import torch

    layout, u = cache.layout, UNIT_ROUNDOFF["float16"]
    steps, zeros, folded = (torch.cat(pair) for pair in zip(*_magnitudes(cache, sequence, head, 0)))
    scale = 1 / math.sqrt(q.shape[-1]) if options.scale is None else abs(options.scale)
    a = (rotated_exactly(q) if layout.k.rotation else q.double()).abs()
    ground = (layout.head_dim / 16 + 8) * 2.0**-22
    d = scale * (ground * (torch.einsum("qgd,td->qgt", a, steps) + torch.einsum("qgd,td->qgt", a, zeros)))
    d += scale * (u * torch.einsum("qgd,td->qgt", a, folded) + 2.0**-24 * steps.sum(-1))
    if layout.k.rotation:
        d += scale * rotation_error(q.double()) * (steps + zeros).sum(-1)
    return torch.expm1(1.01 * d + 2.0**-20)


def _magnitudes(cache: PackedCache, sequence: int, head: int, role: int):
    """Of keys (role 0) or values (1), as stored: |code * scale|, |zero terms| [T, D], and what the rounding of Q counts
    for: the first where Q takes the scale, the whole where Q is rotated, else 0; one triple for the packed part, one
    for the residual block."""
    import torch

    fmt = (cache.layout.k, cache.layout.v)[role]
    length, first = int(cache.lengths[sequence]), cache.layout.sink_tokens
    packed = cache.layout.packed(length, cache.residual_tokens)
    x = cache.stored(sequence, head)[role].abs()
    found = []
    if packed:
        block = cache.blocks(sequence, head, packed)[role]
        codes = block.codes[:packed]
        if fmt.scaling in ("none",) or fmt.storage == "e4m3":
            steps, zeros = x[:packed], torch.zeros_like(x[:packed])
        elif fmt.static:
            scale = (cache.k_static, cache.v_static)[role][head].double()
            steps, zeros = codes.double() * scale, (abs(fmt.bias) * scale).expand(packed, -1)
        else:
            repeat = fmt.group or 1
            scale, zero = (
                (p.repeat_interleave(repeat, 0)[:packed] if fmt.group else p[:packed, None].expand(-1, x.shape[1]))
                for p in (block.scale.double(), block.zero.double())
            )
            steps, zeros = codes.double() * scale, zero.abs()
        folded = steps * float(fmt.scaling in ("channel", "static"))
        parts = (steps, zeros, x[:packed] if fmt.rotation else folded)
        plain = (x[:first], torch.zeros_like(x[:first]), parts[2][:first] * bool(fmt.rotation))
        found.append(tuple(torch.cat([a, b[first:]]) for a, b in zip(plain, parts)))
    if packed < length:
        rest = x[packed:]
        found.append((rest, torch.zeros_like(rest), rest if fmt.rotation else torch.zeros_like(rest)))
    return found
