"""Checkpoint files -> W4A16 weights: one layer of a safetensors file, or a whole Hugging Face folder, layer by layer.

A layer is a name prefix ("model.layers.0.mlp.down_proj") whose tensors are `<prefix>.qweight`, ... Nothing is loaded
before it is needed. What cannot be read is reported with the reason, never dropped in silence. `ops/checkpoints` finds
layers and decides; here is what W4A16 makes of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from terrazzo.ops.checkpoints import loaders
from terrazzo.ops.checkpoints.loaders import Layer
from terrazzo.ops.products.wide import W4A16
from terrazzo.ops.weight_only.integers import PackedWeight, QuantizedWeight, pack

if TYPE_CHECKING:
    import torch
    from terrazzo.lowering.targets import Target

FAMILY = loaders.family_of(W4A16, pack=pack)


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
    return FAMILY.one(path, name, format=format, device=device, zero_overflow=zero_overflow)


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
    yield from FAMILY.each(
        path, select=select, packed=packed, strict=strict, format=format, device=device, target=target,
        zero_overflow=zero_overflow,
    )  # fmt: skip


load_model = FAMILY.load_model
"""All layers that `iter_layers(path, **options)` yields, as one object with a printable report."""
