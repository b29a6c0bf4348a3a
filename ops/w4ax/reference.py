"""The oracle of W4Ax: what a kernel must compute, in plain torch, and how far rounding may take it from that.

    x'[m, j] = x[m, order[j]] (* rms_weight[order[j]]), 0 for padding
    q[m, j]  = round(x'[m, j] * qmax / max |x' of its block|)        half to even; qmax = 7 in INT4 blocks, 127 in INT8
    acc_b    = sum over the 128 channels of block b of q * codes     int32, exact
    y[m, n]  = round_d(sum_b acc_b[m, n] * sa[m, b] * sw[n, b] + bias[n])                f32, see the bound

The paper states neither scale granularity nor rounding; these are specs.md E.1. Two-level scales of activations: those
of a token's INT4 blocks are small integers times one unit, its INT8 blocks have one scale,

    sa[m, b] = unit[m] * f[m, b], f = clamp(ceil(max of the block / (7 unit)), 1, 18)         INT4
    unit[m]  = the 16 leading bits of (max of the token's INT4 blocks) / 125.9375             so that |q * f| <= 126
    sa[m, b] = max of the token's INT8 blocks / 127                                           INT8

and activations in bytes (`wide`) hold q * f with the scale unit[m]: the same values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import weights
from terrazzo.ops.linear.mixed.scales import GRANULARITIES, LARGEST_FACTOR, TINY, UNIFORM, UNITS
from terrazzo.ops.quantized import rounding_error
from terrazzo.ops.w4ax.fmpq import BLOCK
from terrazzo.ops.w4ax.format import PackedWeight, QuantizedWeight

if TYPE_CHECKING:
    import torch

QMAX = {4: 7.0, 8: 127.0}
_U = 2.0**-24


def dequantize(weight: QuantizedWeight | PackedWeight) -> torch.Tensor:
    """The float64 weight [N, k], columns in the order of the input.

    Raises:
        ArgumentError: no weight of W4Ax.
    """
    if not isinstance(weight, (PackedWeight, QuantizedWeight)):
        remedy = "quantize or load one; other families have a dequantize of their own"
        raise ArgumentError("weight", weights.kind(weight), "must be a W4Ax weight, packed or not", remedy)
    return weight.dequantize()


def arrange(x: torch.Tensor, blocks: int, permutation: torch.Tensor | None) -> torch.Tensor:
    """[M, k] to [M, 128 * blocks] in the weight's order; padding is 0."""
    import torch

    if permutation is None:
        return torch.nn.functional.pad(x, (0, blocks * BLOCK - x.shape[1]))
    order = permutation.long()
    return x.index_select(1, order.clamp(min=0)).masked_fill(order < 0, 0)


def limits(blocks: int, blocks8: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """float32 [B]: qmax of each block."""
    import torch

    number = torch.arange(blocks, device=device)
    return torch.where(number < blocks - blocks8, QMAX[4], QMAX[8]).float()  # of two numbers it has the default dtype


def quantize_activations(
    x: torch.Tensor,
    *,
    blocks8: int,
    permutation: torch.Tensor | None = None,
    rms_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    granularity: str = "block",
    static_scales: torch.Tensor | None = None,
    wide: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(q int8 [M, Kp] in the weight's order, scales f32 [M, B]) of x [M, k], symmetric.

    q is the exact product of x' with the float32 of qmax / max, rounded half to even, so that a kernel can be held to
    the bit. RMSNorm's factor 1 / sqrt(mean x^2 + eps) is the same for a whole row: it changes the scale, not q (except
    with static scales). A maximum below TINY counts as 0: scale 1, q 0. NaN or infinity in a block makes its scale so.

    Args:
        granularity: "two_level", see the module; "block", a scale for each token and block; "token", one for each token
            and precision; "static", `static_scales` float32 [B] for all tokens, codes clamped to qmax.
        wide: with "two_level", codes times their factors, and the units as scales of INT4 blocks.
    """
    import torch

    _check_granularity(granularity, static_scales)
    m, k = x.shape
    blocks = -(-k // BLOCK)
    x = x.float()
    factor = None if rms_weight is None else torch.rsqrt(x.square().mean(dim=1) + eps)
    v = x if rms_weight is None else x * rms_weight.float()
    v = arrange(v, blocks, permutation).view(m, blocks, BLOCK)
    qmax = limits(blocks, blocks8, x.device)
    if granularity == "static":
        v = v if factor is None else v * factor[:, None, None]
        scales = static_scales.to(x.device, torch.float32)
        q = (v.double() * (1 / scales).double()[:, None]).round()
        q = torch.minimum(torch.maximum(q, -qmax[:, None].double()), qmax[:, None].double())
        return _int8(q).flatten(1), scales.expand(m, blocks).contiguous()
    largest = v.abs().amax(dim=2)
    own = largest.clone()
    if granularity in UNIFORM:
        for part in (slice(0, blocks - blocks8), slice(blocks - blocks8, blocks)):
            if len(range(*part.indices(blocks))):
                largest[:, part] = largest[:, part].amax(dim=1, keepdim=True)
    zero = largest < TINY
    inverse, scales, times = qmax / largest, largest / qmax, torch.ones_like(largest)
    if granularity == "two_level":
        low, unit = qmax == QMAX[4], leading_bits(largest / torch.full_like(largest, UNITS))
        times = torch.where(low & ~zero, (own / (7 * unit)).ceil().clamp(1, LARGEST_FACTOR), 1.0)
        inverse, scales = torch.where(low, 1 / (unit * times), inverse), torch.where(low, unit, scales)
    q = (v.double() * torch.where(zero, 0.0, inverse).double()[..., None]).round()
    if factor is not None:
        scales = scales * factor[:, None]
    if wide:
        q = q * times[..., None]
    else:
        scales = scales * times
    return _int8(q).flatten(1), torch.where(zero, 1.0, scales)


def leading_bits(values: torch.Tensor) -> torch.Tensor:
    """float32 cut to 16 significant bits: times an integer up to 256 it is exact."""
    import torch

    return (values.view(torch.int32) & ~255).view(torch.float32)


def _int8(q: torch.Tensor) -> torch.Tensor:
    import torch

    return q.nan_to_num(0, 0, 0).to(torch.int8)


def _check_granularity(granularity: str, static_scales: torch.Tensor | None) -> None:
    if granularity not in GRANULARITIES:
        raise ArgumentError("granularity", granularity, f"must be one of {GRANULARITIES}", "use 'block'")
    if (granularity == "static") != (static_scales is not None):
        seen = None if static_scales is None else list(static_scales.shape)
        raise ArgumentError("static_scales", seen, "goes with granularity='static'", "pass both or none")


def block_sums(q: torch.Tensor, weight: QuantizedWeight | PackedWeight) -> torch.Tensor:
    """int32 [B, M, N], exact: the products of each block of 128, |sum| <= 128 * 127 * 8."""
    import torch

    if isinstance(weight, PackedWeight):
        weight = weight.unpack()
    m, b = q.shape[0], weight.blocks
    x, w = q.view(m, b, BLOCK).double(), weight.codes.view(weight.n, b, BLOCK).double()
    return torch.einsum("mbk,nbk->bmn", x, w).round().to(torch.int32)


def gemm(
    q: torch.Tensor,
    scales: torch.Tensor,
    weight: QuantizedWeight | PackedWeight,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """float64 [M, N]: the scaled sum of the quantized operands, plus `bias` (else the weight's own).

    Each block is summed before it is scaled: a sum of products that cancel is 0.
    """
    import torch

    if isinstance(weight, PackedWeight):
        weight = weight.unpack()
    y = torch.zeros(len(q), weight.n, dtype=torch.float64, device=q.device)
    for b in range(weight.blocks):
        part = slice(b * BLOCK, (b + 1) * BLOCK)
        sums = q[:, part].double() @ weight.codes[:, part].double().T
        y += sums * scales[:, b, None].double() * weight.scales[:, b].double()
    bias = weight.bias if bias is None else bias
    return y if bias is None else y + bias.double()


def forward_error_bound(
    q: torch.Tensor,
    scales: torch.Tensor,
    weight: QuantizedWeight | PackedWeight,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Largest |y - gemm(...)| that a correct kernel can show, for each element: float64 [M, N].

    The sum of a block is an exact float32. Its product with two scales rounds twice, then B block terms and, where k is
    split, at most B partial sums are added: each term meets at most 2 B + 2 roundings of u = 2^-24. With the bias and
    the rounding to `dtype` of what is left. Terms are bounded through sums of their magnitudes. Sums over all blocks of
    a precision (two-level scales) round once when they become float32, in place of the additions.
    """
    import torch

    if isinstance(weight, PackedWeight):
        weight = weight.unpack()
    terms = torch.zeros(q.shape[0], weight.n, dtype=torch.float64, device=q.device)
    for b in range(weight.blocks):
        part = slice(b * BLOCK, (b + 1) * BLOCK)
        sums = q[:, part].double() @ weight.codes[:, part].double().T
        terms += sums.abs() * scales[:, b, None].double() * weight.scales[:, b].double()
    ref = gemm(q, scales, weight, bias)
    error = 1.01 * _U * ((2 * weight.blocks + 2) * terms + ref.abs()) + 2.0**-125
    return error + rounding_error(ref.abs() + error, dtype)


def operand_packed(weight: PackedWeight) -> torch.Tensor:
    """float64 [N, Kp]: codes times scales as the tensor cores and the scaling see them, from packed bytes (and channel
    scales) alone.

    Words, converter (16 times the code for bytes), fragment and records, through `layouts.emulate` on the CPU.
    """
    import numpy as np
    import torch
    from terrazzo.layouts.emulate import operand_tiles, operand_w4a8

    parts, rows = [], weight.words.shape[1] * 64
    for bits, unit, held in weight._units():
        words = held.cpu().numpy()
        codes, records = unit.split(words)
        if weight.two_level and not weight.native:
            parts.append(torch.from_numpy(operand_w4a8(words, unit, "signed").astype(np.float64)))
            continue
        tiles = operand_tiles(codes, unit.block, "s4_s4" if bits == 4 else "s4_s8_x16")
        stored = np.ascontiguousarray(records).view(np.uint16)[..., 0]  # [row blocks, B, slots]
        held = torch.from_numpy((stored.astype(np.uint32) << 16).view(np.float32).astype(np.float64))
        scales = torch.empty_like(held)
        scales[..., torch.from_numpy(unit.rows.index)] = held
        scales = scales.transpose(1, 2).reshape(rows, -1)
        parts.append(torch.from_numpy(tiles) * scales.repeat_interleave(BLOCK, dim=1))
    operand = torch.cat(parts, dim=1)[: weight.n]
    return operand * weight.channel_scales[: weight.n, None].double() if weight.two_level else operand
