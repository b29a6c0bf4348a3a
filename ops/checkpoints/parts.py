"""What one rank reads of a published layer: slices of its tensors that are a smaller layer of the same convention.

Every tensor of a layer holds output features along one axis and input features along another, one by one, several to
a word, or several to a scale. A cut that falls between words and scales is read as it is. Where it does not, or where
nothing tells the size of a group, `tensors` gives None: the layer is read as a whole and cut afterwards.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from terrazzo.ops.checkpoints.conventions.base import BIAS, GROUP, WORD, Convention, LayerConfig, Leaf
from terrazzo.ops.checkpoints.reader import Checkpoint, join
from terrazzo.ops.grouped_codes import derive_group
from terrazzo.ops.shards import Cut, Share, Span

if TYPE_CHECKING:
    import torch


def tensors(
    checkpoint: Checkpoint, name: str, config: LayerConfig, share: Share, device: torch.device
) -> tuple[dict[str, torch.Tensor], LayerConfig] | None:
    """What `Checkpoint.tensors` would give of the rank's own layer, and its config; or None.

    Raises:
        ArgumentError: a world that does not divide the features, a tensor that is missing or unreadable.
    """
    import torch

    convention, held = checkpoint.convention(name), checkpoint.leaves(name)
    codes = next((leaf for leaf in convention.leaves if leaf.name in convention.codes and leaf.name in held), None)
    lacking = any(not (leaf.optional or leaf.name in held or leaf.instead in held) for leaf in convention.leaves)
    flat = codes is None or codes.n is None
    if convention.rows > 1 or flat or lacking or not all(full in checkpoint.places for full in held.values()):
        return None  # what is missing is said where the whole is
    shapes = {leaf: checkpoint.describe(full)[1] for leaf, full in held.items()}
    sizes = _sizes(checkpoint, name, codes, config, shapes)
    if sizes is None:
        return None
    total = sizes[share.dim]
    (span,) = share.cut(total, 0).spans
    group = _group(convention, config, sizes[1], shapes)
    cuts: dict[str, Cut] = {}
    for leaf in (*convention.leaves, BIAS):
        place, shape = (leaf.n, leaf.k)[share.dim], shapes.get(leaf.name, [])
        if place is None or place[0] >= len(shape):
            continue
        axis, per = place[0], leaf.features(share.dim, config.bits)
        extent = shape[axis]
        if extent == 1 and leaf is not codes and place[1] != WORD:
            continue  # one for all
        if per == GROUP:
            per = 1 if extent == total else group
        if per is None or total % per or extent * per != total or any(end % per for end in span):
            return None
        cuts[leaf.name] = Cut(axis, ((span[0] // per, span[1] // per),))
    index = "" if convention.index is None else convention.index.name
    if index in shapes and share.dim == 1:
        ids = checkpoint.tensor(join(name, index), device).long()
        if group is None or not torch.equal(ids, torch.arange(total, device=ids.device) // group):
            return None  # act-order
    found = {}
    for leaf in checkpoint.read_leaves(name):
        if leaf not in shapes or (leaf == "bias" and share.dim == 1 and share.rank):
            continue
        full = join(name, leaf)
        if leaf == "weight_shape":
            found[leaf] = torch.tensor([_extent(sizes, share, dim, span) for dim in (0, 1)], device=device)
        elif leaf == index and share.dim == 1:
            found[leaf] = checkpoint.part(full, cuts[leaf], device) - span[0] // group
        else:
            found[leaf] = checkpoint.part(full, cuts[leaf], device) if leaf in cuts else checkpoint.tensor(full, device)
    if share.dim == 1 and group is not None and group >= total and config.group_size is not None:
        config = replace(config, group_size=-1)
    return found, config


def _extent(sizes: tuple[int, int], share: Share, dim: int, span: Span) -> int:
    return span[1] - span[0] if dim == share.dim else sizes[dim]


def _sizes(
    checkpoint: Checkpoint, name: str, codes: Leaf, config: LayerConfig, shapes: dict[str, list[int]]
) -> tuple[int, int] | None:
    """(N, K), or None for codes that are no matrix."""
    shape = shapes[codes.name]
    if len(shape) != 2 or 0 in shape:
        return None
    n, k = (shape[place[0]] * codes.features(dim, config.bits) for dim, place in enumerate((codes.n, codes.k)))
    if "weight_shape" in shapes:
        stated = checkpoint.tensor(join(name, "weight_shape")).flatten().tolist()
        return (n, stated[1]) if stated == [n, k] else None  # rows or columns that fill no word
    return n, k


def _group(convention: Convention, config: LayerConfig, k: int, shapes: dict[str, list[int]]) -> int | None:
    """Input channels of a scale, or None where nothing tells."""
    if convention.group:
        return convention.group
    shape, axis = shapes.get(convention.scales.name, []), convention.scales.k[0]
    groups = shape[axis] if len(shape) > axis else 1
    stated = config.group_size
    if groups == 1:
        return k
    return stated if stated is not None and stated > 0 else derive_group(k, groups)
