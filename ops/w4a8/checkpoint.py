"""Checkpoint files -> W4A8 weights for int8 activations: one layer, or a whole Hugging Face folder, layer by layer.

QServe's layers, and those of compressed-tensors (int-quantized and pack-quantized). `ops/checkpoints` finds layers and
decides; here is what W4A8 makes of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from terrazzo.ops.checkpoints import loaders
from terrazzo.ops.checkpoints.conventions.qserve import TwoLevels
from terrazzo.ops.checkpoints.loaders import Layer
from terrazzo.ops.products.converted import W4A8
from terrazzo.ops.w4a8.format import PackedWeight, QuantizedWeight, pack
from terrazzo.ops.w4a8.importers import of_groups, of_levels

if TYPE_CHECKING:
    import torch
    from terrazzo.lowering.targets import Target
    from terrazzo.ops.checkpoints.conventions.base import Convention, LayerConfig, Tensors
    from terrazzo.ops.products.product import Product


def _read(
    convention: Convention, product: Product, tensors: Tensors, config: LayerConfig, requantize: bool = False
) -> QuantizedWeight:
    codes = convention.read(tensors, config, product)
    return (of_levels if isinstance(codes, TwoLevels) else of_groups)(codes, requantize)


FAMILY = loaders.family_of(W4A8, pack=pack, read=_read)


def read_layer(
    path: str | Path,
    name: str | None = None,
    *,
    format: str | None = None,
    device: str | int | torch.device = "cpu",
    requantize: bool = False,
) -> QuantizedWeight:
    """Canonical weight of one layer.

    Args:
        path: a .safetensors file or a Hugging Face folder; a config beside the file is read too.
        name: prefix of the layer's tensors; None when the checkpoint has only one layer.
        format: "qserve" or "compressed_tensors", obeyed whatever the config says.
        device: where the weight is built, as torch names it: "cuda", "cuda:1", 1, a torch.device.
        requantize: see `read_qserve` and `read_compressed_tensors`.

    Raises:
        ArgumentError: no such layer, a missing tensor, a layer that W4A8 cannot take, or one that its config or
            further tensors give another meaning (`load_model` skips it with the same reason): a config that wants
            other activations than int8 with a dynamic scale for each token is such a reason.
    """
    return FAMILY.one(path, name, format=format, device=device, requantize=requantize)


def load_layer(
    path: str | Path,
    name: str | None = None,
    *,
    format: str | None = None,
    device: str | int | torch.device = "cpu",
    requantize: bool = False,
    target: Target | str | None = None,
) -> PackedWeight:
    """A layer of a checkpoint, packed: `pack(read_layer(...), target=target)`; it lies on `device`.

    Args:
        path, name, format, device, requantize: see `read_layer`. target: see `pack`.

    Raises:
        ArgumentError: see both. TargetError: see `Target.parse`.
    """
    return pack(read_layer(path, name, format=format, device=device, requantize=requantize), target=target)


def iter_layers(
    path: str | Path,
    *,
    select: str = "",
    packed: bool = True,
    strict: bool = False,
    format: str | None = None,
    device: str | int | torch.device = "cpu",
    requantize: bool = False,
    target: Target | str | None = None,
) -> Iterator[Layer]:
    """Read a checkpoint one layer at a time, as `w4a16.iter_layers` does.

    Args:
        path, select, packed, strict, device, target: as there. format, requantize: as of `read_layer`.

    Raises:
        ArgumentError: as there.
    """
    yield from FAMILY.each(
        path, select=select, packed=packed, strict=strict, format=format, device=device, target=target,
        requantize=requantize,
    )  # fmt: skip


load_model = FAMILY.load_model
"""All layers that `iter_layers(path, **options)` yields, as one object with a printable report."""
