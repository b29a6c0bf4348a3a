"""Folders of compressed-tensors that we write: which formats have one, and a layer's tensors under published names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from terrazzo.lowering.errors import ArgumentError
from terrazzo.nn.joined import rows_of
from terrazzo.nn.sources import Published, cast
from terrazzo.ops.checkpoints.conventions.compressed_tensors import METHOD, in_blocks, scheme_of
from terrazzo.ops.checkpoints.conventions.table import WRITERS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch
    from terrazzo.nn.formats import Format
    from terrazzo.ops.checkpoints.conventions.base import Convention
    from terrazzo.ops.weight.base import AnyPacked as Packed

PACKED = "packed"
WRITES = (METHOD.name, PACKED)
"""What `quantize_folder` may write; the first one where a format has it."""


def writer_of(form: Format | None, write: str | None, lacks: str = "") -> Convention | None:
    """The convention in which a folder's layers are written; None: packed.

    Args:
        form: None packs what is quantized already. write: one of WRITES, or None for the first that can be.
        lacks: why this model cannot be published, or what of the caller's wishes only a packed folder holds.

    Raises:
        ArgumentError: names `write`: no such thing, or none for this format.
    """
    if write not in (None, *WRITES):
        raise ArgumentError("write", write, f"must be one of {WRITES}", "leave it out")
    found = None if form is None else WRITERS.get(form.product.record)
    lacks = lacks or ("" if found else f"has no form for {form or 'layers that are quantized already'}")
    if write == METHOD.name and lacks:
        raise ArgumentError("write", write, lacks, f"write {PACKED!r} (--write packed), which terrazzo.load reads")
    return None if lacks or write == PACKED else found


def quantization_config(convention: Convention, form: Format, names: Iterable[str]) -> dict[str, Any]:
    """`quantization_config` of such a folder; names of its tensors."""
    group = scheme_of(form.product, form.group_size, form.symmetric, convention.published)
    routers = sorted(name.removesuffix(".weight") for name in names if name.endswith(".gate.weight"))
    return {
        "quant_method": METHOD.name, "format": convention.published, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": [*routers, "lm_head"], "kv_cache_scheme": None,
    }  # fmt: skip


class Written:
    """Collects what is written of a model while its layers are made.

    Args:
        made: source of the layers, which tells of those that are quantized. convention: of these.
        root: what stands in front of "layers.0." in the source. tied: whether the head is the embedding.
    """

    def __init__(self, made: Published, convention: Convention, root: str, tied: bool) -> None:
        self.made, self.convention, self.root, self.tied = made, convention, root, tied
        self.block = in_blocks(made.quantize.product, made.quantize.group_size)
        self.state: dict[str, torch.Tensor] = {}
        self.taken: set[str] = set()
        made.keep = self._keep

    def _keep(self, names: Sequence[str], sizes: Sequence[int], packed: Packed) -> None:
        whole, first = packed.unpack(), 0
        for name, size in zip(names, sizes, strict=True):
            part, first = rows_of(whole, slice(first, first + size)), first + size
            tensors = self.convention.write(part, self.block) | ({} if part.bias is None else {"bias": part.bias})
            self.state |= {f"{self._named(name)}.{leaf}": t.cpu().contiguous() for leaf, t in tensors.items()}

    def _named(self, name: str) -> str:
        """The name that a text model of transformers has for a tensor or layer."""
        if ".layers." not in f".{name}" and (head := name.rfind("lm_head.")) >= 0:
            return name[head:]
        return f"model.{name.removeprefix(self.root)}"

    def take(self) -> dict[str, torch.Tensor]:
        """What was quantized since the last call, and what else modules were made of, in the model's dtype."""
        read = {name for name in self.made.seen - self.taken - self.made.consumed if self.made.has(name)}
        self.taken |= read
        for name in sorted(read):
            if not (self.tied and name.endswith("lm_head.weight")):
                self.state[self._named(name)] = cast(self.made.read(name), self.made.dtype, name).cpu()
        found, self.state = self.state, {}
        return found
