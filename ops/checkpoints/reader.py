"""A checkpoint, layer by layer: what each is stored as, what its config says, its tensors, or why it cannot be read.

checkpoint = Checkpoint("model/")
for name, convention in checkpoint.layers().items():
    decision = checkpoint.layer(name)          # LayerConfig: format, bits, group_size, activations, ..., skip
    if not decision.skip:
        tensors = checkpoint.tensors(name, "cuda")
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.checkpoints import files
from terrazzo.ops.checkpoints.config import Config
from terrazzo.ops.checkpoints.conventions.base import BIAS, Convention, LayerConfig
from terrazzo.ops.checkpoints.conventions.table import BY_CODES, CONVENTIONS

if TYPE_CHECKING:
    import torch

_OF_CACHES = re.compile(r"\b[qkv]_proj\.([qkv]_scale|output_scale|output_zero_point)$")
"""Tensors of a layer that are about the cache of keys and values behind it, as ModelOpt, Quark and others name them."""


class Checkpoint(files.TensorFiles):
    """The layers of a safetensors file or folder. Nothing is loaded before it is asked for.

    Args:
        path: see `TensorFiles`; a config beside the file is read too.
        format: what the caller says that the layers are stored as, whatever the config says; see `FORMATS`.

    Attributes:
        config: the quantization config (`Config`), resolved for one layer by `layer`.
    """

    def __init__(self, path: str | Path, format: str | None = None) -> None:
        self.config = Config(format=format)  # what is no format is said before files are opened
        super().__init__(path)
        self.config = Config.of_folder(self.folder, format)
        self._layers: dict[str, str] | None = None
        self._owned: dict[str, dict[str, str]] = {}
        self._dividers: dict[str, list[tuple[str, list[int]]]] | None = None

    def layers(self) -> dict[str, str]:
        """Prefix of every layer of quantized codes -> its convention, a key of CONVENTIONS, by its tensors' names."""
        if self._layers is None:
            self._layers = {}
            for name in self.names():
                prefix, _, leaf = name.rpartition(".")
                found = (one for one in BY_CODES.get(leaf, ()) if one.holds is None or one.holds(self, prefix, leaf))
                if (first := next(found, None)) is not None:
                    self._layers[prefix] = first.name
            self._owned = self._owners(self._layers)
        return self._layers

    def convention(self, prefix: str) -> Convention:
        """Of one layer."""
        self._check(prefix)
        return CONVENTIONS[self.layers()[prefix]]

    def has(self, prefix: str, leaf: str) -> bool:
        """Whether a file holds a tensor, or should."""
        name = join(prefix, leaf)
        return name in self.places or name in self.lost

    def stores(self, prefix: str, leaf: str, *dtypes: str) -> bool:
        """Whether a tensor that can be read has one of these dtypes, as safetensors names them."""
        name = join(prefix, leaf)
        return name in self.places and self.describe(name)[0] in dtypes

    def shape(self, prefix: str, leaf: str) -> list[int] | None:
        """Of a tensor that can be read."""
        name = join(prefix, leaf)
        return self.describe(name)[1] if name in self.places else None

    def _owners(self, layers: dict[str, str]) -> dict[str, dict[str, str]]:
        """layer -> {what follows its prefix -> tensor}: each tensor belongs to the longest prefix before it."""
        owned: dict[str, dict[str, str]] = {prefix: {} for prefix in layers}
        for name in self.names():
            prefix = name.rpartition(".")[0]
            while prefix and prefix not in owned:
                prefix = prefix.rpartition(".")[0]
            if prefix in owned and (prefix or "." not in name):
                owned[prefix][name[len(prefix) + 1 if prefix else 0 :]] = name
        return owned

    def leaves(self, prefix: str) -> dict[str, str]:
        """Of one layer: what follows its prefix, such as "qweight" -> the tensor's whole name."""
        self._check(prefix)
        return self._owned[prefix]

    def read_leaves(self, prefix: str) -> tuple[str, ...]:
        """What an importer reads of a layer, whether it is there or not."""
        return self.convention(prefix).names

    def layer(self, prefix: str) -> LayerConfig:
        """What is known of one layer. `skip` is the reason why it cannot be read as its tensors say, else "".

        Raises:
            ArgumentError: there is no such layer, or the config says nonsense about it.
        """
        self._check(prefix)
        config, owned, read = self.config.layer(prefix), self._owned[prefix], self.read_leaves(prefix)
        lost = next((name for name in owned.values() if name in self.lost), None)
        extra = [leaf for leaf, name in owned.items() if leaf not in read and not _OF_CACHES.search(name)]
        decided = config.excluded and self.config.by_tensors  # quantized all the same: the tensors decide
        reason = "" if decided else config.skip
        if lost is not None:
            reason = f"layer {prefix!r} needs {lost!r}: {self.lost[lost]}"
        elif not reason and extra:
            more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
            reason = f"its tensor {extra[0]!r}{more} is not read: it may change what the layer means"
        elif not reason and (divider := self._divided(prefix)):
            reason = f"{divider!r} divides the activations of this layer (AWQ's scaled activation)"
        return replace(config, skip=reason, excluded=config.excluded and reason == config.skip)

    def _divided(self, prefix: str) -> str:
        """The vector of AutoAWQ's ScaledActivation before a layer: `<parent>.<activation>.scales` [K]; "" for none."""
        if not self.convention(prefix).divided:
            return ""
        if self._dividers is None:
            self._dividers = {}
            for name in self.places:
                module, _, leaf = name.rpartition(".")
                if leaf == "scales" and module and module not in self.layers():
                    long = [extent for extent in self.describe(name)[1] if extent != 1]
                    self._dividers.setdefault(module.rpartition(".")[0], []).append((name, long))
        k = (self.shape(prefix, self.convention(prefix).codes[0]) or [])[:1]
        near = self._dividers.get(prefix.rpartition(".")[0], [])
        return next((name for name, long in near if k and long == k), "")

    def tensors(self, prefix: str, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
        """The tensors of one layer that importers read, by what follows the prefix: "qweight", ..., "bias".

        Raises:
            ArgumentError: there is no such layer, or one of its tensors is missing or unreadable.
        """
        found = {}
        for leaf in (*self.convention(prefix).leaves, BIAS):
            full = join(prefix, leaf.name)
            if full in self.places:
                found[leaf.name] = self.tensor(full, device)
            elif full not in self.lost and leaf.instead and self.has(prefix, leaf.instead):
                continue
            elif full in self.lost or not leaf.optional:
                constraint = f"layer {prefix!r} needs the tensor {full!r}"
                constraint += f": {self.lost[full]}" if full in self.lost else ""
                raise ArgumentError(leaf.name, None, constraint, "get the missing shard, or the file again")
        return found

    def others(self) -> dict[str, str]:
        """Every tensor that no layer reads, `<name>` of `<name>.weight`, else whole names -> what it is, or why it is
        lost: "BF16 [4096, 4096]"."""
        taken, found = self.layers(), {}
        read = {full for one in taken for leaf, full in self.leaves(one).items() if leaf in self.read_leaves(one)}
        for name in self.names():
            if name in read:
                continue
            prefix, _, leaf = name.rpartition(".")
            key = prefix if leaf == "weight" and prefix and prefix not in taken else name
            found[key] = self.lost[name] if name in self.lost else "{} {}".format(*self.describe(name))
        return found

    def _check(self, prefix: str) -> None:
        if not isinstance(prefix, str) or prefix not in self.layers():
            known = ", ".join(sorted(self.layers(), key=natural)[:6]) or "none"
            seen = prefix if isinstance(prefix, str) else type(prefix).__name__
            raise ArgumentError(
                "name", seen, "is no quantized layer of this checkpoint", f"name one of its layers: {known}"
            )


def join(prefix: str, leaf: str) -> str:
    return f"{prefix}.{leaf}" if prefix else leaf


def natural(name: str) -> list[tuple[int, int, str]]:
    """Sorts layer 2 before layer 10."""
    parts = re.split(r"([0-9]+)", name)
    return [(1, len(part.lstrip("0")), part.lstrip("0")) if i % 2 else (0, 0, part) for i, part in enumerate(parts)]
