"""Checkpoint files -> W4A16 weights: one layer of a safetensors file, or a whole Hugging Face folder, layer by layer.

A layer is a name prefix ("model.layers.0.mlp.down_proj") whose tensors are `<prefix>.qweight`, ... Nothing is loaded
before it is needed. What cannot be read is reported with the reason, never dropped in silence. `ops/checkpoints` finds
layers and decides; here is what W4A16 makes of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.checkpoints import loaders
from terrazzo.ops.checkpoints.config import Config, LayerConfig
from terrazzo.ops.checkpoints.loaders import Layer, Model
from terrazzo.ops.checkpoints.reader import Checkpoint
from terrazzo.ops.w4a16.importers import read_awq, read_compressed_tensors, read_gptq
from terrazzo.ops.weight_only.integers import PackedWeight, QuantizedWeight, pack

if TYPE_CHECKING:
    import torch
    from terrazzo.lowering.targets import Target

__all__ = ["FORMATS", "Checkpoint", "Config", "Layer", "LayerConfig", "Model"]
FORMATS = ("awq", "gptq", "gptq_v2", "compressed_tensors")
"""What W4A16 reads, as README and `terrazzo ops` name it. auto-round's folders hold these too."""


def read_layer(
    path: str | Path,
    name: str | None = None,
    *,
    format: str | None = None,
    device: str | int | torch.device = "cpu",
    zero_overflow: str = "wrap",
) -> QuantizedWeight:
    """Canonical weight of one layer.

    Args:
        path: a .safetensors file or a Hugging Face folder; a config beside the file is read too.
        name: prefix of the layer's tensors; None when the checkpoint has only one layer.
        format: "awq", "gptq", "gptq_v2", "compressed_tensors", or auto-round's "auto_round", "auto_round:auto_gptq",
            "auto_round:auto_awq". It is obeyed whatever the config says, and needed when neither config nor tensors
            tell (asymmetric GPTQ in a bare file).
        device: where the weight is built, as torch names it: "cuda", "cuda:1", 1, a torch.device.
        zero_overflow: see `read_gptq`.

    Raises:
        ArgumentError: no such layer, a missing tensor, a layer that W4A16 cannot take, or one that its config or
            further tensors give another meaning (`load_model` skips it with the same reason).
    """
    return loaders.read_layer(FAMILY, path, name, format=format, device=device, zero_overflow=zero_overflow)


def load_layer(
    path: str | Path,
    name: str | None = None,
    *,
    format: str | None = None,
    device: str | int | torch.device = "cpu",
    zero_overflow: str = "wrap",
    target: Target | str | None = None,
) -> PackedWeight:
    """A layer of a checkpoint, packed: `pack(read_layer(...), target=target)`; it lies on `device`.

    Args:
        path, name, format, device, zero_overflow: see `read_layer`. target: see `pack`.

    Raises:
        ArgumentError: see both. TargetError: see `Target.parse`.
    """
    return pack(read_layer(path, name, format=format, device=device, zero_overflow=zero_overflow), target=target)


def iter_layers(
    path: str | Path,
    *,
    select: str = "",
    packed: bool = True,
    strict: bool = False,
    format: str | None = None,
    device: str | int | torch.device = "cpu",
    zero_overflow: str = "wrap",
    target: Target | str | None = None,
) -> Iterator[Layer]:
    """Read a checkpoint one layer at a time, in the order of the names; at most one layer is held.

    Args:
        path: a Hugging Face folder (sharded or not) or a .safetensors file; a config beside the file is read too.
        select: regular expression searched in the layer's name; others are passed over.
        packed: False yields canonical weights.
        strict: raise for a 4-bit layer that cannot be read instead of yielding the reason.
        format, device, zero_overflow: see `read_layer`. target: see `pack`.

    Yields:
        a `Layer` for every 4-bit layer and for every other tensor (with the reason why it is skipped).

    Raises:
        ArgumentError: path, device, select or the checkpoint's config is no such thing; with `strict`, a 4-bit layer
            cannot be read. TargetError: an unknown target.
    """
    yield from loaders.iter_layers(
        FAMILY, path, select=select, packed=packed, strict=strict, format=format, device=device, target=target,
        zero_overflow=zero_overflow,
    )  # fmt: skip


def load_model(path: str | Path, **options: Any) -> Model:
    """All layers that `iter_layers(path, **options)` yields, as one object with a printable report."""
    return loaders.load_model(FAMILY, path, **options)


def _needs_zeros(tensors: dict[str, Any], kind: str, symmetric: bool | None) -> None:
    if "qzeros" not in tensors and not symmetric:
        remedy = f"get the missing shard; for a symmetric layer call from_{kind} with qzeros=None"
        raise ArgumentError("qzeros", None, "the layer needs its zero points", remedy)


def _awq(tensors: dict[str, Any], config: LayerConfig, zero_overflow: str = "wrap") -> QuantizedWeight:
    _needs_zeros(tensors, "awq", config.symmetric)
    facts = {"bits": config.bits, "group_size": config.group_size, "version": config.version or "gemm"}
    return read_awq(**({"qzeros": None} | tensors | facts))


def _gptq(tensors: dict[str, Any], config: LayerConfig, zero_overflow: str = "wrap") -> QuantizedWeight:
    _needs_zeros(tensors, "gptq", config.symmetric)
    facts = {"bits": config.bits, "group_size": config.group_size, "zero_overflow": zero_overflow}
    facts |= {"symmetric": config.symmetric, "desc_act": config.desc_act}
    version = config.version if config.version not in (None, "gptq", "gptq_v2") else config.format
    return read_gptq(**({"qzeros": None} | tensors | facts), version=version)


def _compressed(tensors: dict[str, Any], config: LayerConfig, zero_overflow: str = "wrap") -> QuantizedWeight:
    if config.desc_act and "weight_g_idx" not in tensors and tensors["weight_scale"].shape[-1:] != (1,):
        constraint = "the config states actorder by groups, which needs the group of each channel"
        raise ArgumentError("weight_g_idx", None, constraint, "add the layer's weight_g_idx tensor")
    facts = {"bits": config.bits, "group_size": config.group_size, "symmetric": config.symmetric}
    return read_compressed_tensors(**tensors, **facts, format=config.version or "pack-quantized")


FAMILY = loaders.Family(
    "w4a16", {"awq": _awq, "gptq": _gptq, "compressed_tensors": _compressed}, pack, activations=("",)
)
