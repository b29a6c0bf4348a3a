"""Published int4 checkpoint layers for e4m3 activations (W4AFP8): compressed-tensors, with the scales as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import dlpack, weights
from terrazzo.ops.checkpoints.compressed_tensors import unpack
from terrazzo.ops.w4a8.fp8_format import PackedWeight, QuantizedWeight, pack

if TYPE_CHECKING:
    from terrazzo.lowering.targets import Target
    from terrazzo.ops.dlpack import SupportsDLPack


def from_compressed_tensors(*tensors, target: Target | str | None = None, **options) -> PackedWeight:
    """`pack(read_compressed_tensors(...), target=target)`: arguments and errors of `read_compressed_tensors`."""
    return pack(read_compressed_tensors(*tensors, **options), target=target)


@dlpack.accepting
def read_compressed_tensors(
    weight: SupportsDLPack,
    weight_scale: SupportsDLPack,
    weight_zero_point: SupportsDLPack | None = None,
    weight_shape: SupportsDLPack | tuple[int, int] | None = None,
    *,
    bias: SupportsDLPack | None = None,
    group_size: int | None = None,
    format: str | None = None,
    symmetric: bool | None = None,
) -> QuantizedWeight:
    """compressed-tensors int4 weights, symmetric, of strategy "channel" or "group". Exact, no scale is rounded.

    Arguments (weight, weight_scale, weight_zero_point, weight_shape, bias, group_size, format, symmetric) as of
    `w4a8.read_compressed_tensors`. Activations are quantized here, per token and dynamically, whatever the config says
    of them.

    Raises:
        ArgumentError: as there, and for zero points other than 0 (a code is a signed e4m3 operand), or float32 scales
            that are no float16 times a power of two of their row.
    """
    facts = dict(bias=bias, group_size=group_size, format=format, symmetric=symmetric)
    source = unpack(weight, weight_scale, weight_zero_point, weight_shape, **facts)
    if source.zeros is not None and bool((source.zeros != 8).any()):
        raise ArgumentError(
            "weight_zero_point", "not 0", "codes are signed e4m3 operands: the layer must be symmetric",
            "use int8 activations: w4a8.from_compressed_tensors",
        )  # fmt: skip
    codes = source.codes.short() - 8
    with weights.renamed(scales="weight_scale"):
        return QuantizedWeight.canonical(codes, source.scales, group_size=source.group_size, bias=source.bias)
