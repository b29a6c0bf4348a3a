"""Checkpoint files -> W4A8 weights for e4m3 activations (W4AFP8): one layer, or a whole Hugging Face folder.

The layers of compressed-tensors, symmetric. `ops/checkpoints` finds them and decides; here is what becomes of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terrazzo.ops.checkpoints import loaders
from terrazzo.ops.checkpoints.compressed_tensors import arguments
from terrazzo.ops.checkpoints.config import LayerConfig
from terrazzo.ops.checkpoints.loaders import Layer, Model
from terrazzo.ops.w4a8.fp8_format import PackedWeight, QuantizedWeight, pack
from terrazzo.ops.w4a8.fp8_importers import read_compressed_tensors

if TYPE_CHECKING:
    import torch
    from terrazzo.lowering.targets import Target


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
    return loaders.read_layer(FAMILY, path, name, format=format, device=device)


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
    yield from loaders.iter_layers(
        FAMILY, path, select=select, packed=packed, strict=strict, format=format, device=device, target=target
    )


def load_model(path: str | Path, **options: Any) -> Model:
    """All layers that `iter_layers(path, **options)` yields, as one object with a printable report."""
    return loaders.load_model(FAMILY, path, **options)


def _compressed(tensors: dict[str, torch.Tensor], config: LayerConfig) -> QuantizedWeight:
    return read_compressed_tensors(**arguments(tensors, config))


FAMILY = loaders.Family(
    "w4a8.fp8", {"compressed_tensors": _compressed, "int_quantized": _compressed}, pack, activations=("e4m3", "")
)
