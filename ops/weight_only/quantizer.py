"""Quantize a float weight to small floats: round to nearest with the scale that the format's publishers take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import dlpack, weights
from terrazzo.ops.products.codes import E2M1, MXFP4, Codes
from terrazzo.ops.quantizers.rows import best_of, row_chunks
from terrazzo.ops.quantizers.scales import check_scales
from terrazzo.ops.weight_only.format import QuantizedWeight

if TYPE_CHECKING:
    import torch
    from terrazzo.ops.dlpack import SupportsDLPack

GRANULARITIES = ("tensor", "channel", "block")


@dlpack.accepting
def quantize_mxfp4(weight: SupportsDLPack, *, bias: SupportsDLPack | None = None) -> QuantizedWeight:
    """e2m1 codes with a power of two for each 32 k, of the two that are published the one with the smaller squared
    error: floor(log2 amax) - 2 (OCP), which may clip, and ceil(log2(amax / 6)) (modelopt), which does not.

    Args:
        weight: float [N, K], finite; any K, a ragged last group included. bias: float [N], kept with the weight.

    Raises:
        ArgumentError: for anything else.
    """
    return quantize_powers(weight, bias, MXFP4)


def quantize_powers(weight: torch.Tensor, bias: SupportsDLPack | None, of: Codes) -> QuantizedWeight:
    """The same for groups of another format with e2m1 codes and powers of two."""
    import torch

    (n, k), size = weights.check_matrix(weight), of.usual
    groups = -(-k // size)
    codes = torch.empty(n, groups * size, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(n, groups, dtype=torch.uint8, device=weight.device)
    for part in row_chunks(n, groups * size, weight.device.type):
        w = torch.nn.functional.pad(weight[part].float(), (0, groups * size - k)).view(-1, groups, size)
        amax = w.abs().amax(-1)
        floor = torch.where(amax > 0, torch.frexp(amax).exponent - 1 - 2, -127)
        ceil = floor + (amax > torch.ldexp(torch.full_like(amax, 6.0), floor)).int()
        found, scales[part] = best_of(_rounded(w, (exponent + 127).clamp(0, 254)) for exponent in (floor, ceil))
        codes[part] = found.view(-1, groups * size)
    return QuantizedWeight.canonical(codes[:, :k], scales, weight=of.name, group_size=size, bias=bias)


@dlpack.accepting
def quantize_nvfp4(weight: SupportsDLPack, *, bias: SupportsDLPack | None = None) -> QuantizedWeight:
    """e2m1 codes, round to nearest, with e4m3 scales amax / 6 of 16 k and a float32 amax / 2688 of the tensor.

    Args:
        weight: float [N, K], finite; any K, a ragged last group included. bias: float [N], kept with the weight.

    Raises:
        ArgumentError: for anything else.
    """
    import torch

    n, k = weights.check_matrix(weight)
    groups = -(-k // 16)
    whole = float(weight.detach().abs().amax().float()) / (448 * 6)
    factor = torch.tensor(whole if whole > 0 else 1.0, dtype=torch.float32, device=weight.device)
    codes = torch.empty(n, groups * 16, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(n, groups, dtype=torch.float8_e4m3fn, device=weight.device)
    for part in row_chunks(n, groups * 16, weight.device.type):
        w = torch.nn.functional.pad(weight[part].float(), (0, groups * 16 - k)).view(-1, groups, 16)
        scales[part] = (w.abs().amax(-1) / 6 / factor).clamp(max=448).to(torch.float8_e4m3fn)
        each = scales[part].float() * factor
        relative = torch.where(each[..., None] > 0, w / each[..., None], torch.zeros_like(w))
        codes[part] = _nearest(relative).view(-1, groups * 16)
    facts = dict(weight="nvfp4", group_size=16, bias=bias, factors=factor)
    return QuantizedWeight.canonical(codes[:, :k], scales, **facts)


def _nearest(values: torch.Tensor) -> torch.Tensor:
    """uint8 e2m1 codes; ties to the even code, zeros without a sign."""
    import torch

    magnitudes = torch.tensor(E2M1, device=values.device)
    between = (magnitudes[1:] + magnitudes[:-1]) / 2
    size = values.abs().contiguous()
    low = torch.bucketize(size, between)
    high = torch.bucketize(size, between, right=True)
    code = torch.where(low % 2 == 0, low, high)
    return (code + 8 * ((values < 0) & (code > 0))).to(torch.uint8)


def _rounded(w: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The squared error of w [R, G, group], its uint8 codes, and the scale [R, G] as uint8; ties to the even code."""
    import torch

    code = _nearest(torch.ldexp(w.double(), (127 - scale)[..., None]).float())
    value = torch.ldexp(torch.tensor(E2M1, device=w.device)[(code & 7).long()].double(), (scale - 127)[..., None])
    error = (value - w.double().abs()).square().sum(-1)
    return error, code, scale.to(torch.uint8)


@dlpack.accepting
def quantize_fp8(
    weight: SupportsDLPack,
    *,
    granularity: str = "channel",
    scale_dtype: torch.dtype | None = None,
    bias: SupportsDLPack | None = None,
) -> QuantizedWeight:
    """e4m3 codes, round to nearest, with scales amax / 448.

    Args:
        weight: float [N, K], finite. bias: float [N], kept with the weight.
        granularity: "tensor", "channel" (a scale for each row) or "block" (of 128 x 128).
        scale_dtype: of "block": torch.bfloat16 or torch.float16, None for float32. 16-bit scales are folded into
            operands of their dtype, which is faster for many tokens and rounds each weight once.

    Raises:
        ArgumentError: for anything else.
    """
    import torch

    n, k = weights.check_matrix(weight)
    if granularity not in GRANULARITIES:
        raise ArgumentError("granularity", granularity, f"must be one of {GRANULARITIES}", "use 'channel'")
    w = weight.float()
    if granularity == "block":
        rows, columns = -(-n // 128), -(-k // 128)
        blocks = torch.nn.functional.pad(w, (0, columns * 128 - k, 0, rows * 128 - n))
        amax = blocks.view(rows, 128, columns, 128).abs().amax((1, 3))
    else:
        amax = w.abs().amax().reshape(1, 1) if granularity == "tensor" else w.abs().amax(1, keepdim=True)
    scales = torch.where(amax > 0, amax / 448, 1.0)
    scales = torch.where(scales > 0, scales, 1.0)  # amax so small that its scale is none
    each = scales
    if granularity == "block":
        each = scales.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    if scale_dtype is not None:
        if granularity != "block" or scale_dtype not in (torch.bfloat16, torch.float16, torch.float32):
            constraint = "must be None, or of granularity='block' a dtype of floats up to 32 bits"
            raise ArgumentError("scale_dtype", str(scale_dtype), constraint, "leave it out")
        scales = scales.to(scale_dtype)
        check_scales(scales, amax > 0)
        each = scales.float().repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    codes = (w / each).clamp(-448, 448).to(torch.float8_e4m3fn)
    group = 128 if granularity == "block" else k
    return QuantizedWeight.canonical(codes, scales, weight="fp8", group_size=group, bias=bias)
