"""What one rank reads of a published layer: slices of its tensors that are a smaller layer of the same convention.

Every tensor of a layer holds output features along one axis and input features along another, one by one, several to
a word, or several to a scale. A cut that falls between words and scales is read as it is. Where it does not, or where
nothing tells the size of a group, `tensors` gives None: the layer is read as a whole and cut afterwards.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from typing import TYPE_CHECKING

from terrazzo.ops.checkpoints.config import LayerConfig
from terrazzo.ops.checkpoints.reader import Checkpoint, join
from terrazzo.ops.grouped_codes import derive_group
from terrazzo.ops.shards import Cut, Share, Span

if TYPE_CHECKING:
    import torch

COLUMNS_BY_ROWS = dict.fromkeys(("qweight", "qzeros", "scales"), (1, 0))
ROWS_BY_COLUMNS = dict.fromkeys(
    ("weight", "weight_packed", "weight_scale", "weight_scale_inv", "weight_zero_point"), (0, 1)
)
AXES: dict[str, dict[str, tuple[int | None, int | None]]] = {
    "awq": COLUMNS_BY_ROWS,
    "gptq": COLUMNS_BY_ROWS | {"g_idx": (None, 0)},
    "compressed_tensors": ROWS_BY_COLUMNS | {"weight_g_idx": (None, 0)},
    "int_quantized": ROWS_BY_COLUMNS,
    "mxfp4": ROWS_BY_COLUMNS,
    "fp8": ROWS_BY_COLUMNS,
    "nvfp4": ROWS_BY_COLUMNS,
}
"""Convention -> tensor -> axes of output and input features. QServe's blocks of 32 x 32 have none."""
CODES = {"awq": "qweight", "gptq": "qweight", "compressed_tensors": "weight_packed", "mxfp4": "weight_packed"}
IN_WORD = {"awq": (8, 1), "gptq": (1, 8), "compressed_tensors": (1, 8), "mxfp4": (1, 2), "nvfp4": (1, 2)}
"""Convention -> output and input features in one element of its codes; of 8 bits, a word of 4 has half of them."""
GROUPS = {"mxfp4": 32, "nvfp4": 16, "fp8": 128}
"""Convention -> input features of a scale, where it says so."""
ZEROS = ("qzeros", "weight_zero_point")
FP8_BLOCK = GROUPS["fp8"]


def tensors(
    checkpoint: Checkpoint, name: str, config: LayerConfig, share: Share, device: torch.device
) -> tuple[dict[str, torch.Tensor], LayerConfig] | None:
    """What `Checkpoint.tensors` would give of the rank's own layer, and its config; or None.

    Raises:
        ArgumentError: a world that does not divide the features, a tensor that is missing or unreadable.
    """
    import torch

    convention = checkpoint.layers()[name]
    if convention not in AXES or not _whole(checkpoint, name):
        return None
    shapes = {leaf: checkpoint.describe(full)[1] for leaf, full in checkpoint.leaves(name).items()}
    sizes = _sizes(checkpoint, name, config, shapes)
    if sizes is None:
        return None
    total = sizes[share.dim]
    (span,) = share.cut(total, 0).spans
    group = _group(convention, config, sizes[1], shapes)
    cuts: dict[str, Cut] = {}
    for leaf, shape in shapes.items():
        axis = (
            (0 if share.dim == 0 else None) if leaf == "bias" else AXES[convention].get(leaf, (None, None))[share.dim]
        )
        if axis is None or axis >= len(shape):
            continue
        words = leaf == _codes(convention, shapes) or (leaf in ZEROS and share.dim == 0)
        if shape[axis] == 1 and not words:
            continue  # one for all
        per = _per(convention, config, leaf, shape, share.dim, group, total)
        if per is None or total % per or shape[axis] * per != total or any(end % per for end in span):
            return None
        cuts[leaf] = Cut(axis, ((span[0] // per, span[1] // per),))
    index = next((leaf for leaf in ("g_idx", "weight_g_idx") if leaf in shapes), None)
    if index is not None and share.dim == 1:
        held = checkpoint.tensor(join(name, index), device).long()
        if group is None or not torch.equal(held, torch.arange(total, device=held.device) // group):
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


def _codes(convention: str, leaves: Container[str]) -> str:
    """The tensor of a layer's codes; NVFP4 has two names for it."""
    return "weight_packed" if convention == "nvfp4" and "weight" not in leaves else CODES.get(convention, "weight")


def _in_word(convention: str, config: LayerConfig) -> tuple[int, int]:
    """Output and input features in one element of the codes."""
    first, second = IN_WORD.get(convention, (1, 1))
    return (first, 4) if config.bits == 8 and second == 8 else (first, second)


def _whole(checkpoint: Checkpoint, name: str) -> bool:
    """Whether all of a layer's tensors can be read; what is missing is said where the whole is."""
    convention = checkpoint.layers()[name]
    held = checkpoint.leaves(name)
    return _codes(convention, held) in held and all(full in checkpoint.places for full in held.values())


def _sizes(
    checkpoint: Checkpoint, name: str, config: LayerConfig, shapes: dict[str, list[int]]
) -> tuple[int, int] | None:
    """(N, K), or None for codes that are no matrix."""
    convention = checkpoint.layers()[name]
    codes = shapes[_codes(convention, shapes)]
    if len(codes) != 2 or 0 in codes:
        return None
    first, second = _in_word(convention, config)
    n, k = (codes[1] * first, codes[0] * second) if convention in ("awq", "gptq") else (codes[0], codes[1] * second)
    if "weight_shape" in shapes:
        stated = checkpoint.tensor(join(name, "weight_shape")).flatten().tolist()
        return (n, stated[1]) if stated == [n, k] else None  # rows or columns that fill no word
    return n, k


def _group(convention: str, config: LayerConfig, k: int, shapes: dict[str, list[int]]) -> int | None:
    """Input channels of a scale, or None where nothing tells."""
    if convention in GROUPS:
        return GROUPS[convention]
    name = "scales" if convention in ("awq", "gptq") else "weight_scale"
    shape = shapes.get(name, [])
    axis = AXES[convention][name][1]
    groups = shape[axis] if len(shape) > axis else 1
    stated = config.group_size
    if groups == 1:
        return k
    return stated if stated is not None and stated > 0 else derive_group(k, groups)


def _per(
    convention: str, config: LayerConfig, leaf: str, shape: list[int], dim: int, group: int | None, total: int
) -> int | None:
    """Features of the cut dimension in one element of a tensor."""
    if leaf == CODES.get(convention, "weight") or leaf == "weight_packed":
        return _in_word(convention, config)[dim]
    if leaf in ("bias", "g_idx", "weight_g_idx"):
        return 1
    if dim == 1:
        return group
    if leaf in ZEROS and convention != "int_quantized":
        return 4 if config.bits == 8 else 8
    return FP8_BLOCK if convention == "fp8" and shape[0] != total else 1
