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
from terrazzo.ops.checkpoints.config import FORMATS, Config, LayerConfig

if TYPE_CHECKING:
    import torch

TENSORS = {
    "awq": ("qweight", "qzeros", "scales"),
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "compressed_tensors": ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
    "int_quantized": (
        "weight", "weight_scale", "weight_zero_point", "weight_shape", "input_scale", "input_zero_point",
    ),
    "qserve": ("qweight", "s1_scales", "s2_scales", "s2_zeros", "s1_szeros"),
    "mxfp4": ("weight_packed", "weight_scale"),
    "fp8": ("weight", "weight_scale", "weight_scale_inv", "input_scale"),
    "nvfp4": (
        "weight", "weight_packed", "weight_scale", "weight_scale_2", "weight_global_scale", "input_scale",
        "input_global_scale",
    ),
}  # fmt: skip
"""Convention -> the tensors of a layer, beside `bias`. "int_quantized" is compressed-tensors' int8 [N, K] of int4;
"mxfp4", "nvfp4" and "fp8" are small floats, of compressed-tensors and others."""
_OPTIONAL = {
    "qzeros", "g_idx", "weight_zero_point", "weight_shape", "weight_g_idx", "s2_scales", "s2_zeros", "s1_szeros",
    "input_scale", "input_zero_point", "input_global_scale",
}  # fmt: skip
_OF_CACHES = re.compile(r"\b[qkv]_proj\.([qkv]_scale|output_scale|output_zero_point)$")
"""Tensors of a layer that are about the cache of keys and values behind it, as ModelOpt, Quark and others name them."""
_SCALES = ("weight_scale", "weight_scale_inv")
_PAIRS = {
    "fp8": (_SCALES,), "nvfp4": (("weight", "weight_packed"), ("weight_scale_2", "weight_global_scale")),
}  # fmt: skip
"""Convention -> tensors of which one is not needed where the other is."""


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
        """Prefix of every layer of quantized codes -> its convention, a key of TENSORS, by its tensors' names."""
        if self._layers is None:
            self._layers = {}
            for name in self.names():
                prefix, _, leaf = name.rpartition(".")
                if leaf == "weight_packed":
                    self._layers[prefix] = self._of_packed(prefix)
                elif leaf == "qweight":
                    self._layers[prefix] = self._of_words(prefix)
                elif leaf == "weight" and self._has(prefix, "weight_scale") and self._is(name, "I8"):
                    self._layers[prefix] = "int_quantized"
                elif leaf == "weight" and any(self._has(prefix, it) for it in _SCALES) and self._is(name, "F8_E4M3"):
                    self._layers[prefix] = "fp8"
                elif leaf == "weight" and self._has(prefix, "weight_scale_2") and self._is(name, "U8"):
                    self._layers[prefix] = "nvfp4"
            self._owned = self._owners(self._layers)
        return self._layers

    def _of_packed(self, prefix: str) -> str:
        """Convention of a layer with the tensor weight_packed."""
        if not self._is(join(prefix, "weight_packed"), "U8"):
            return "compressed_tensors"
        if self._has(prefix, "weight_global_scale"):
            return "nvfp4"
        return "mxfp4" if self._is(join(prefix, "weight_scale"), "U8", "F8_E8M0") else "compressed_tensors"

    def _of_words(self, prefix: str) -> str:
        """Convention of a layer with the tensor qweight."""
        if self._has(prefix, "s1_scales"):
            return "qserve"
        stated = self.config.layer(prefix).format
        if stated is not None and FORMATS[stated] in ("awq", "gptq"):
            return FORMATS[stated]
        words, scales = join(prefix, "qweight"), join(prefix, "scales")
        if scales not in self.places or words not in self.places:
            return "gptq"
        columns, n = (self.describe(name)[1][-1:] for name in (words, scales))  # [] of tensors without dimensions
        return "awq" if not self._has(prefix, "g_idx") and [8 * c for c in columns] == n else "gptq"

    def _has(self, prefix: str, leaf: str) -> bool:
        name = join(prefix, leaf)
        return name in self.places or name in self.lost

    def _is(self, name: str, *dtypes: str) -> bool:
        return name in self.places and self.describe(name)[0] in dtypes

    def _owners(self, layers: dict[str, str]) -> dict[str, dict[str, str]]:
        """layer -> {what stands behind its prefix -> tensor}: each tensor belongs to the longest prefix before it."""
        owned: dict[str, dict[str, str]] = {prefix: {} for prefix in layers}
        for name in self.names():
            prefix = name.rpartition(".")[0]
            while prefix and prefix not in owned:
                prefix = prefix.rpartition(".")[0]
            if prefix in owned and (prefix or "." not in name):
                owned[prefix][name[len(prefix) + 1 if prefix else 0 :]] = name
        return owned

    def leaves(self, prefix: str) -> dict[str, str]:
        """Of one layer: what stands behind its prefix, such as "qweight" -> the tensor's whole name."""
        self._check(prefix)
        return self._owned[prefix]

    def read_leaves(self, prefix: str) -> tuple[str, ...]:
        """What an importer reads of a layer, whether it is there or not."""
        return (*TENSORS[self.layers()[prefix]], "bias")

    def layer(self, prefix: str) -> LayerConfig:
        """What is known of one layer. `skip` is the reason why it cannot be read as its tensors say, else "".

        Raises:
            ArgumentError: there is no such layer, or the config says nonsense about it.
        """
        self._check(prefix)
        config, owned, read = self.config.layer(prefix), self._owned[prefix], self.read_leaves(prefix)
        lost = next((name for name in owned.values() if name in self.lost), None)
        extra = [leaf for leaf, name in owned.items() if leaf not in read and not _OF_CACHES.search(name)]
        decided = config.excluded and self.config.method == "awq"  # quantized all the same: the tensors decide
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
        if self.layers()[prefix] != "awq":
            return ""
        if self._dividers is None:
            self._dividers = {}
            for name in self.places:
                module, _, leaf = name.rpartition(".")
                if leaf == "scales" and module and module not in self.layers():
                    long = [extent for extent in self.describe(name)[1] if extent != 1]
                    self._dividers.setdefault(module.rpartition(".")[0], []).append((name, long))
        words = join(prefix, "qweight")
        k = self.describe(words)[1][:1] if words in self.places else []
        near = self._dividers.get(prefix.rpartition(".")[0], [])
        return next((name for name, long in near if k and long == k), "")

    def tensors(self, prefix: str, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
        """The tensors of one layer that importers read, by what stands behind the prefix: "qweight", ..., "bias".

        Raises:
            ArgumentError: there is no such layer, or one of its tensors is missing or unreadable.
        """
        self._check(prefix)
        found = {}
        for leaf in self.read_leaves(prefix):
            full = join(prefix, leaf)
            if full in self.places:
                found[leaf] = self.tensor(full, device)
            elif full not in self.lost and self._has(prefix, _other_of(self.layers()[prefix], leaf)):
                continue
            elif full in self.lost or leaf not in _OPTIONAL | {"bias"}:
                constraint = f"layer {prefix!r} needs the tensor {full!r}"
                constraint += f": {self.lost[full]}" if full in self.lost else ""
                raise ArgumentError(leaf, None, constraint, "get the missing shard, or the file again")
        return found

    def others(self) -> dict[str, str]:
        """Every tensor that no layer reads, `<name>` of `<name>.weight`, else whole names -> what it is, or why it is
        lost: "BF16 [4096, 4096]"."""
        taken, found = self.layers(), {}
        for name in self.names():
            prefix, _, leaf = name.rpartition(".")
            if prefix in taken and leaf in self.read_leaves(prefix):
                continue
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


def _other_of(convention: str, leaf: str) -> str:
    """The tensor that may stand in the place of another one, itself if none may."""
    pairs = (pair for pair in _PAIRS.get(convention, ()) if leaf in pair)
    return next((pair[leaf == pair[0]] for pair in pairs), leaf)


def join(prefix: str, leaf: str) -> str:
    return f"{prefix}.{leaf}" if prefix else leaf


def natural(name: str) -> list[tuple[int, int, str]]:
    """Sorts layer 2 before layer 10."""
    parts = re.split(r"([0-9]+)", name)
    return [(1, len(part.lstrip("0")), part.lstrip("0")) if i % 2 else (0, 0, part) for i, part in enumerate(parts)]
