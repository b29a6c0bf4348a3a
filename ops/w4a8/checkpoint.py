"""Checkpoint files -> W4A8 weights for int8 activations: one layer, or a whole Hugging Face folder, layer by layer.

QServe's layers, and those of compressed-tensors (int-quantized and pack-quantized). `ops/checkpoints` finds layers and
decides; here is what W4A8 makes of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.checkpoints import loaders
from terrazzo.ops.checkpoints.compressed_tensors import arguments
from terrazzo.ops.checkpoints.config import LayerConfig
from terrazzo.ops.checkpoints.loaders import Layer, Model
from terrazzo.ops.checkpoints.words import check_bits
from terrazzo.ops.w4a8.format import PackedWeight, QuantizedWeight, pack
from terrazzo.ops.w4a8.importers import read_compressed_tensors, read_qserve

if TYPE_CHECKING:
    import torch
    from terrazzo.lowering.targets import Target


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
    return loaders.read_layer(FAMILY, path, name, format=format, device=device, requantize=requantize)


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
    yield from loaders.iter_layers(
        FAMILY, path, select=select, packed=packed, strict=strict, format=format, device=device, target=target,
        requantize=requantize,
    )  # fmt: skip


def load_model(path: str | Path, **options: Any) -> Model:
    """All layers that `iter_layers(path, **options)` yields, as one object with a printable report."""
    return loaders.load_model(FAMILY, path, **options)


def _qserve(tensors: dict[str, torch.Tensor], config: LayerConfig, requantize: bool = False) -> QuantizedWeight:
    check_bits(config.bits)
    k, levels = 2 * tensors["qweight"].shape[-1] if tensors["qweight"].ndim else 0, tensors.get("s2_scales")
    if config.group_size is not None and levels is not None and levels.ndim == 2:
        if config.group_size * levels.shape[0] != k:
            constraint = f"K = {k} with {levels.shape[0]} rows of s2_scales needs another"
            raise ArgumentError("group_size", config.group_size, constraint, "correct the config")
    return read_qserve(**({"s1_scales": None} | tensors), requantize=requantize)


def _compressed(tensors: dict[str, torch.Tensor], config: LayerConfig, requantize: bool = False) -> QuantizedWeight:
    return read_compressed_tensors(**arguments(tensors, config), requantize=requantize)


FAMILY = loaders.Family(
    "w4a8",
    {"qserve": _qserve, "compressed_tensors": _compressed, "int_quantized": _compressed},
    pack,
    activations=("int8", ""),
)
