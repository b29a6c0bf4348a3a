"""Published int4 checkpoint layers for e4m3 activations (W4AFP8): compressed-tensors, with the scales as they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import dlpack, weights
from terrazzo.ops.checkpoints import loaders
from terrazzo.ops.checkpoints.conventions.compressed_tensors import unpack
from terrazzo.ops.checkpoints.loaders import Layer
from terrazzo.ops.products.converted import W4A8_FP8
from terrazzo.ops.w4a8.fp8_format import PackedWeight, QuantizedWeight, pack

if TYPE_CHECKING:
    import torch
    from terrazzo.lowering.targets import Target
    from terrazzo.ops.dlpack import SupportsDLPack
    from terrazzo.ops.weight_only.integers import QuantizedWeight as Integers


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
    return _made(unpack(weight, weight_scale, weight_zero_point, weight_shape, **facts))


def _made(source: Integers) -> QuantizedWeight:
    if source.zeros is not None and bool((source.zeros != 8).any()):
        constraint = "codes are signed e4m3 operands: the layer must be symmetric"
        remedy = "use int8 activations: w4a8.from_compressed_tensors"
        raise ArgumentError("weight_zero_point", "not 0", constraint, remedy)
    codes = source.codes.short() - 8
    with weights.renamed(scales="weight_scale"):
        return QuantizedWeight.canonical(codes, source.scales, group_size=source.group_size, bias=source.bias)


FAMILY = loaders.family_of(W4A8_FP8, pack=pack, made=_made)


def read_layer(
    path: str | Path,
    name: str | None = None,
    *,
    format: str | None = None,
    device: str | int | torch.device = "cpu",
) -> QuantizedWeight:
    """Canonical weight of one layer.

    Args:
        path: a .safetensors file or a Hugging Face folder; a config beside the file is read too.
        name: prefix of the layer's tensors; None when the checkpoint has only one layer.
        format: "compressed_tensors", obeyed whatever the config says.
        device: where the weight is built, as torch names it: "cuda", "cuda:1", 1, a torch.device.

    Raises:
        ArgumentError: no such layer, a missing tensor, a layer that this family cannot take, or one that its config or
            further tensors give another meaning (`load_model` skips it with the same reason): a config that wants
            other activations than e4m3 with a dynamic scale for each token is such a reason.
    """
    return FAMILY.one(path, name, format=format, device=device)


def load_layer(
    path: str | Path,
    name: str | None = None,
    *,
    format: str | None = None,
    device: str | int | torch.device = "cpu",
    target: Target | str | None = None,
) -> PackedWeight:
    """A layer of a checkpoint, packed: `pack(read_layer(...), target=target)`; it lies on `device`.

    Args:
        path, name, format, device: see `read_layer`. target: see `pack`.

    Raises:
        ArgumentError: see both. TargetError: see `Target.parse`.
    """
    return pack(read_layer(path, name, format=format, device=device), target=target)


def iter_layers(
    path: str | Path,
    *,
    select: str = "",
    packed: bool = True,
    strict: bool = False,
    format: str | None = None,
    device: str | int | torch.device = "cpu",
    target: Target | str | None = None,
) -> Iterator[Layer]:
    """Read a checkpoint one layer at a time, as `w4a16.iter_layers` does.

    Args:
        path, select, packed, strict, device, target: as there. format: as of `read_layer`.

    Raises:
        ArgumentError: as there.
    """
    facts = dict(select=select, packed=packed, strict=strict, format=format, device=device, target=target)
    yield from FAMILY.each(path, **facts)


load_model = FAMILY.load_model
"""All layers that `iter_layers(path, **options)` yields, as one object with a printable report."""
