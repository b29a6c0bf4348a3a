"""Quantize a float weight for W8A8: round to nearest, a scale for the tensor, each row, or each 128 x 128 block."""

from __future__ import annotations

from typing import TYPE_CHECKING

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import dlpack
from terrazzo.ops.quantizers.rows import divide
from terrazzo.ops.w4a8.quantizer import check_weight, row_chunks, smoothed
from terrazzo.ops.w4a8.w8a8.format import BLOCK, CODES, PackedWeight, QuantizedWeight, pack
from terrazzo.ops.w4a8.w8a8.reference import power_above

if TYPE_CHECKING:
    import torch
    from terrazzo.lowering.targets import Target
    from terrazzo.ops.dlpack import SupportsDLPack

GRANULARITIES = ("channel", "tensor", "block")
_LARGEST = {"int8": 127.0, "e4m3": 448.0}


@dlpack.accepting
def quantize(
    weight: SupportsDLPack,
    *,
    codes: str = "int8",
    granularity: str = "channel",
    input_scale: float | None = None,
    input_zero: int | None = None,
    asymmetric: bool = False,
    smooth: SupportsDLPack | None = None,
    bias: SupportsDLPack | None = None,
    ue8m0: bool = False,
    target: Target | str | None = None,
) -> PackedWeight:
    """Quantize and pack a float weight: `pack(quantize_weight(...), target=target)`.

    Args:
        weight: float [N, K], finite; it is quantized where it lies.
        smooth: positive float [K]. bias: float [N]; both are kept with the weight.
        codes, granularity, input_scale, input_zero, asymmetric, ue8m0: see `quantize_weight`.
        target: GPU target to record, see `pack`.

    Raises:
        ArgumentError: see `quantize_weight`. TargetError: see `Target.parse`.
    """
    facts = dict(codes=codes, granularity=granularity, input_scale=input_scale, input_zero=input_zero)
    made = quantize_weight(weight, **facts, asymmetric=asymmetric, smooth=smooth, bias=bias, ue8m0=ue8m0)
    return pack(made, target=target)


@dlpack.accepting
def quantize_weight(
    weight: SupportsDLPack,
    *,
    codes: str = "int8",
    granularity: str = "channel",
    input_scale: float | None = None,
    input_zero: int | None = None,
    asymmetric: bool = False,
    smooth: SupportsDLPack | None = None,
    bias: SupportsDLPack | None = None,
    ue8m0: bool = False,
) -> QuantizedWeight:
    """Round to nearest; a scale puts the largest magnitude of what shares it at 127, or 448 of e4m3.

    Args:
        weight: float [N, K], finite. codes: "int8" or "e4m3".
        granularity: what shares a scale: "channel" (a row), "tensor", or "block" (128 x 128, of e4m3).
        input_scale, input_zero, asymmetric: how activations are quantized, see `QuantizedWeight`.
        smooth: positive float [K], multiplied into the weight and kept with it. bias: float [N], kept with the weight.
        ue8m0: scales of blocks are powers of two, rounded up, of the weight as of its activations.

    Raises:
        ArgumentError: for anything else.
    """
    import torch

    if type(codes) is not str or codes not in _LARGEST:
        raise ArgumentError("codes", codes, f"must be one of {tuple(_LARGEST)}", "use int8")
    known = GRANULARITIES if codes == "e4m3" else GRANULARITIES[:2]
    if type(granularity) is not str or granularity not in known:
        raise ArgumentError("granularity", granularity, f"must be one of {known} of {codes} codes", "use channel")
    n, k, factor = check_weight(weight, smooth)
    dtype = getattr(torch, {form: name for name, form in CODES.items()}[codes])
    made = torch.empty(n, k, dtype=dtype, device=weight.device)
    largest = torch.stack([_largest(weight, factor, lo, granularity) for lo in range(0, n, BLOCK)])  # [blocks, columns]
    if granularity == "tensor":
        largest = largest.amax().expand_as(largest)
    elif granularity == "channel":
        largest = largest.reshape(-1, 1)[:n]
    rows = largest if granularity == "channel" else largest.repeat_interleave(BLOCK, 0)[:n]
    scales = divide(rows, _LARGEST[codes])
    scales = torch.where(scales > 0, power_above(scales) if ue8m0 else scales, 1.0)
    for part in row_chunks(n, k, weight.device.type):
        wide = scales[part] if granularity != "block" else scales[part].repeat_interleave(BLOCK, 1)[:, :k]
        values = smoothed(weight[part], factor) / wide
        made[part] = (values.round() if codes == "int8" else values).clamp(-_LARGEST[codes], _LARGEST[codes]).to(dtype)
    scales = scales if granularity == "block" else scales[:, 0]
    own = dict(
        input_scale=input_scale, input_zero=input_zero, asymmetric=asymmetric, smooth=factor, bias=bias, ue8m0=ue8m0
    )
    return QuantizedWeight.canonical(made, scales, **own)


def _largest(weight: torch.Tensor, factor: torch.Tensor | None, lo: int, granularity: str) -> torch.Tensor:
    """Of 128 rows from `lo` on: the largest magnitude of each row (0 past the last), of 128 columns, or of all."""
    import torch

    values = smoothed(weight[lo : lo + BLOCK], factor).abs()
    if granularity == "channel":
        return torch.nn.functional.pad(values.amax(1), (0, BLOCK - len(values)))
    if granularity == "tensor":
        return values.amax().view(1)
    return torch.nn.functional.pad(values.amax(0), (0, -len(weight[0]) % BLOCK)).view(-1, BLOCK).amax(1)
