"""Checkpoint files -> weights: one layer of a safetensors file, or a whole Hugging Face folder, layer by layer.

A layer is a name prefix ("model.layers.0.mlp.down_proj") whose tensors are `<prefix>.qweight`, ... Nothing is loaded
before it is needed. What cannot be read is reported with the reason, never dropped in silence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import weights
from terrazzo.ops.w4a16.format import PackedWeight, QuantizedWeight, pack
from terrazzo.ops.w4a16.importers import read_awq, read_compressed_tensors, read_gptq

if TYPE_CHECKING:
    import torch
    from terrazzo.lowering.targets import Target

FORMATS = ("awq", "gptq", "gptq_v2", "compressed_tensors")
_TENSORS = {
    "awq": ("qweight", "qzeros", "scales"),
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "compressed_tensors": ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
}
_OPTIONAL = {"qzeros", "g_idx", "weight_zero_point", "weight_shape", "weight_g_idx"}
_CONFIGS = ("config.json", "quantize_config.json", "quant_config.json")
_KINDS = {"dynamic": dict, "config_groups": dict, "version": str, "checkpoint_format": str, "format": str}
"""Fields of a config whose kind is checked at once."""


@dataclass(frozen=True)
class LayerConfig:
    """What a checkpoint's config states about one layer. None: it does not say.

    Attributes:
        format: one of FORMATS.
        bits: bits for each code.
        group_size: input channels for each scale, -1 for one group.
        version: AWQ version or compressed-tensors format, as written.
        symmetric, desc_act: as written.
        skip: why the config excludes the layer from quantization, else "".
    """

    format: str | None = None
    bits: int = 4
    group_size: int | None = None
    version: str | None = None
    symmetric: bool | None = None
    desc_act: bool | None = None
    skip: str = ""


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer of a checkpoint: a weight, or the reason why there is none.

    Attributes:
        name: prefix of its tensors.
        weight: PackedWeight (QuantizedWeight with `packed=False`), None when skipped.
        skipped: reason, "" when loaded.
    """

    name: str
    weight: PackedWeight | QuantizedWeight | None = None
    skipped: str = ""


@dataclass(frozen=True, eq=False)
class Model:
    """The W4A16 layers of a checkpoint.

    Attributes:
        layers: name -> weight.
        skipped: name -> reason, for every other matrix of the checkpoint.
    """

    layers: dict[str, PackedWeight | QuantizedWeight] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def report(self) -> str:
        """One line for each layer: what it became, or why it was skipped."""
        lines = [f"{len(self.layers)} layers loaded, {len(self.skipped)} skipped"]
        lines += [f"  loaded   {name}: {weight!r}" for name, weight in self.layers.items()]
        return "\n".join(lines + [f"  skipped  {name}: {reason}" for name, reason in self.skipped.items()])


class Config:
    """A checkpoint's quantization config, resolved layer by layer.

    Args:
        raw: the `quantization_config` object of config.json, or the content of quantize_config.json /
            quant_config.json.
    """

    def __init__(self, raw: dict | None = None) -> None:
        self.raw = raw or {}
        if not isinstance(self.raw, dict):
            raise _bad_config("quantization_config", self.raw, "must be an object")
        for name, kind in _KINDS.items():
            if not isinstance(self.raw.get(name), kind | None):
                raise _bad_config(name, self.raw[name], "must be an object" if kind is dict else "must be a string")
        method = str(self.raw.get("quant_method", "")).lower()
        if not method and self.raw:  # files older than quant_method: AWQ wrote w_bit, GPTQ desc_act
            method = (
                "awq"
                if {"w_bit", "version"} & set(self.raw)
                else "gptq"
                if {"desc_act", "bits"} <= set(self.raw)
                else ""
            )
        if self.raw and method not in ("awq", "gptq", "gptqmodel", "compressed-tensors"):
            raise ArgumentError(
                "quant_method",
                method or None,
                "must be awq, gptq or compressed-tensors",
                "quantize() the float checkpoint, or export it in one of these formats",
            )
        self.method = "gptq" if method == "gptqmodel" else method

    @classmethod
    def of_folder(cls, folder: Path) -> Config:
        """Read config.json (its quantization_config), else quantize_config.json or quant_config.json."""
        for name in _CONFIGS:
            path = folder / name
            if not path.is_file():
                continue
            raw = _object(path)
            if name == "config.json":  # models of several modalities state it in the text model's part
                parts = [raw, *(raw[part] for part in ("text_config", "llm_config") if isinstance(raw.get(part), dict))]
                found = (part.get("quantization_config") or part.get("compression_config") for part in parts)
                raw = next(filter(None, found), None)
            if raw:
                return cls(raw)
        return cls()

    def layer(self, name: str) -> LayerConfig:
        """The config of one layer, by the rules of its format (overrides, ignore lists and targets included)."""
        raw = self.raw
        if self.method == "awq":
            skip = [part for part in _names_of(raw, "modules_to_not_convert") if part in name]
            return LayerConfig(
                "awq",
                _whole(raw, "bits" if "bits" in raw else "w_bit", 4),
                _whole(raw, "group_size" if "group_size" in raw else "q_group_size"),
                raw.get("version") or "gemm",
                skip=f"modules_to_not_convert names {skip[0]!r}" if skip else "",
            )
        if self.method == "gptq":
            facts, skip = dict(raw), ""
            for pattern, overrides in (
                raw.get("dynamic") or {}
            ).items():  # GPTQModel: the first match decides, "-:" excludes
                if _matches(pattern.removeprefix("+:").removeprefix("-:"), name):
                    skip = f"dynamic rule {pattern!r} excludes it" if pattern.startswith("-:") else ""
                    facts |= overrides if isinstance(overrides, dict) else {}
                    break
            version = facts.get("checkpoint_format") or facts.get("format") or "gptq"
            version = "marlin" if facts.get("is_marlin_format") else version
            return LayerConfig(
                "gptq_v2" if version == "gptq_v2" else "gptq",
                _whole(facts, "bits", 4),
                _whole(facts, "group_size"),
                version,
                facts.get("sym"),
                facts.get("desc_act"),
                skip,
            )
        if self.method == "compressed-tensors":
            return self._compressed(name)
        return LayerConfig()

    def _compressed(self, name: str) -> LayerConfig:
        ignored = [entry for entry in _names_of(self.raw, "ignore") if _names(entry, name)]
        if ignored:
            return LayerConfig("compressed_tensors", skip=f"ignore lists {ignored[0]!r}")
        groups = list((self.raw.get("config_groups") or {}).values())
        if not all(isinstance(group, dict) for group in groups):
            raise _bad_config("config_groups", groups, "must be objects")
        by_name = [g for g in groups if any(_names(target, name) for target in _names_of(g, "targets"))]
        by_class = [g for g in groups if "Linear" in _names_of(g, "targets")]
        for group in by_name + by_class:  # a name or pattern is more specific than a module class
            stated, acts = (group.get(part) or {} for part in ("weights", "input_activations"))
            if not isinstance(stated, dict) or not isinstance(acts, dict):
                raise _bad_config("config_groups", group, "weights and input_activations must be objects")
            if acts:
                return LayerConfig(
                    "compressed_tensors",
                    skip=f"activations are quantized too ({acts.get('num_bits')}-bit {acts.get('type')})",
                )
            if stated.get("type", "int") != "int":
                return LayerConfig("compressed_tensors", skip=f"weights are of type {stated['type']}, not int")
            size = _whole(stated, "group_size") if stated.get("strategy") != "channel" else -1
            layout = group.get("format") or self.raw.get("format") or "pack-quantized"
            bits = _whole(stated, "num_bits", 4)
            return LayerConfig("compressed_tensors", bits, size, layout, stated.get("symmetric"))
        return (
            LayerConfig("compressed_tensors", skip="no config group targets it")
            if groups
            else LayerConfig("compressed_tensors")
        )


class Checkpoint:
    """Names, shapes and places of all tensors of a safetensors file or folder. Opens files lazily and keeps them open.

    Args:
        path: a .safetensors file, or a folder with model.safetensors.index.json or *.safetensors.

    Raises:
        ArgumentError: nothing readable there, or a shard is missing.
    """

    def __init__(self, path: str | Path) -> None:
        path = weights.path_of(path)
        if not path.exists():
            remedy = "download it first (huggingface_hub.snapshot_download), and pass its folder"
            raise ArgumentError("path", str(path), "is no file or folder of this machine", remedy)
        self.folder = path if path.is_dir() else path.parent
        own = path / "model.safetensors.index.json"
        indices = [own] if own.is_file() else sorted(path.glob("*.safetensors.index.json"))
        if path.is_file():
            files = [path]
        elif indices:
            files = [path / shard for shard in _shards(indices[0])]
        else:
            files = sorted(path.glob("*.safetensors"))
        if not files:
            raise ArgumentError(
                "path",
                str(path),
                "holds no .safetensors file",
                "pass a safetensors file or folder; convert .bin files first",
            )
        self._handles: dict[tuple[Path, str], object] = {}
        self._layers: dict[str, str] | None = None
        self.places: dict[str, Path] = {}
        for file in files:
            self.places.update(dict.fromkeys(self._open(file, "cpu").keys(), file))
        self.config = Config.of_folder(self.folder)

    def _open(self, file: Path, device: str):
        from safetensors import SafetensorError, safe_open

        if (file, device) not in self._handles:
            try:
                self._handles[file, device] = safe_open(file, framework="pt", device=device)
            except (SafetensorError, OSError) as error:
                raise ArgumentError(
                    "path", str(file), f"must be a readable safetensors file ({error})", "download the file again"
                ) from None
        return self._handles[file, device]

    def tensor(self, name: str, device: str = "cpu") -> torch.Tensor:
        return self._open(self.places[name], device).get_tensor(name)

    def describe(self, name: str) -> tuple[str, list[int]]:
        """(safetensors dtype such as "F16", shape) without loading."""
        view = self._open(self.places[name], "cpu").get_slice(name)
        return view.get_dtype(), view.get_shape()

    def layers(self) -> dict[str, str]:
        """Prefix of every 4-bit layer -> "awq", "gptq" or "compressed_tensors", by its tensors' names and shapes."""
        if self._layers is None:
            self._layers = {}
            for name in self.places:
                prefix, _, leaf = name.rpartition(".")
                if leaf == "weight_packed":
                    self._layers[prefix] = "compressed_tensors"
                elif leaf == "qweight":
                    self._layers[prefix] = self._awq_or_gptq(prefix)
        return self._layers

    def _awq_or_gptq(self, prefix: str) -> str:
        if self.config.method in ("awq", "gptq"):
            return self.config.method
        scales = _join(prefix, "scales")
        if scales not in self.places:
            return "gptq"
        columns, n = (self.describe(name)[1][-1:] for name in (_join(prefix, "qweight"), scales))  # [] of 0-dim tensors
        return "awq" if _join(prefix, "g_idx") not in self.places and [8 * c for c in columns] == n else "gptq"

    def matrices(self) -> dict[str, str]:
        """Every other matrix, `<name>.weight` or another tensor's whole name -> what it is: "BF16 [4096, 4096]"."""
        taken, found = self.layers(), {}
        for name in self.places:
            prefix, _, leaf = name.rpartition(".")
            if prefix in taken and leaf in _TENSORS[taken[prefix]]:
                continue
            dtype, shape = self.describe(name)
            if len(shape) >= 2:
                found[prefix if leaf == "weight" and prefix not in taken else name] = f"{dtype} {shape}"
        return found

    def read(
        self, prefix: str, *, device: str = "cpu", config: LayerConfig | None = None, zero_overflow: str = "wrap"
    ) -> QuantizedWeight:
        """Canonical weight of one layer. `config` None takes the folder's."""
        kind = self.layers().get(prefix) if isinstance(prefix, str) else None
        if kind is None:
            known = ", ".join(sorted(self.layers())[:6]) or "none"
            raise ArgumentError(
                "name", prefix, "is no 4-bit layer of this checkpoint", f"name one of its layers: {known}"
            )
        device, config = str(weights.device_of(device)), self.config.layer(prefix) if config is None else config
        scales = _join(prefix, "scales")
        unscaled = kind == "gptq" and scales not in self.places  # without scales it may be AWQ too
        if config.format is not None and config.format.removesuffix("_v2") != kind and not unscaled:
            raise ArgumentError(
                "format",
                config.format,
                f"the tensors of {prefix!r} are {kind}",
                "pass that format, or correct the config",
            )
        tensors = {}
        for leaf in (*_TENSORS[kind], "bias"):
            if (full := _join(prefix, leaf)) in self.places:
                tensors[leaf] = self.tensor(full, device)
            elif leaf not in _OPTIONAL | {"bias"}:
                raise ArgumentError(
                    leaf,
                    None,
                    f"layer {prefix!r} needs the tensor {full!r}",
                    "get the missing shard, or the file again",
                )
        bias, options = tensors.pop("bias", None), {"bits": config.bits, "group_size": config.group_size}
        if kind in ("awq", "gptq") and "qzeros" not in tensors and not (kind == "gptq" and config.symmetric):
            remedy = f"get the missing shard; for a symmetric layer call from_{kind} with qzeros=None"
            raise ArgumentError("qzeros", None, f"layer {prefix!r} needs its zero points", remedy)
        if kind == "awq":
            return read_awq(**tensors, bias=bias, version=config.version or "gemm", **options)
        if kind == "gptq":
            version = config.version if config.version not in (None, "gptq", "gptq_v2") else config.format
            facts = {
                "version": version,
                "symmetric": config.symmetric,
                "desc_act": config.desc_act,
                "zero_overflow": zero_overflow,
            }
            return read_gptq(
                tensors.pop("qweight"), tensors.pop("qzeros", None), **tensors, bias=bias, **facts, **options
            )
        return read_compressed_tensors(
            **tensors, bias=bias, format=config.version or "pack-quantized", symmetric=config.symmetric, **options
        )


def read_layer(
    path: str | Path,
    name: str | None = None,
    *,
    format: str | None = None,
    device: str | torch.device = "cpu",
    zero_overflow: str = "wrap",
) -> QuantizedWeight:
    """Canonical weight of one layer.

    Args:
        path: a .safetensors file or a Hugging Face folder; a config beside the file is read too.
        name: prefix of the layer's tensors; None when the checkpoint has only one layer.
        format: one of FORMATS, needed when neither config nor tensors tell (asymmetric GPTQ in a bare file).
        device: where the weight is built.
        zero_overflow: see `read_gptq`.

    Raises:
        ArgumentError: no such layer, a missing tensor, or a layer that W4A16 cannot take.
    """
    checkpoint = Checkpoint(path)
    if name is None:
        layers = checkpoint.layers()
        if not layers:
            remedy = "iter_layers says what it holds; quantize() takes float weights"
            raise ArgumentError("path", str(path), "holds no 4-bit layer", remedy)
        if len(layers) != 1:
            raise ArgumentError(
                "name",
                None,
                f"the checkpoint has {len(layers)} 4-bit layers",
                f"name one: {', '.join(sorted(layers)[:6])}",
            )
        (name,) = layers
    config = checkpoint.config.layer(name)
    if format is not None:
        if format not in FORMATS:
            raise ArgumentError(
                "format", format, f"must be one of {FORMATS}", "pass the format that the checkpoint's page states"
            )
        config = replace(config, format=format)
    return checkpoint.read(name, device=str(device), config=config, zero_overflow=zero_overflow)


def load_layer(
    path: str | Path,
    name: str | None = None,
    *,
    format: str | None = None,
    device: str | torch.device = "cpu",
    zero_overflow: str = "wrap",
    target: Target | str | None = None,
) -> PackedWeight:
    """`pack(read_layer(...), target=target)`: the arguments and errors of both; the packed weight is on `device`."""
    return pack(read_layer(path, name, format=format, device=device, zero_overflow=zero_overflow), target=target)


def iter_layers(
    path: str | Path,
    *,
    select: str = "",
    packed: bool = True,
    strict: bool = False,
    device: str | torch.device = "cpu",
    zero_overflow: str = "wrap",
    target: Target | str | None = None,
) -> Iterator[Layer]:
    """Read a checkpoint one layer at a time, in the order of the names; at most one layer is held.

    Args:
        path: a Hugging Face folder (sharded or not) or a .safetensors file; a config beside the file is read too.
        select: regular expression searched in the layer's name; others are passed over.
        packed: False yields canonical weights.
        strict: raise for a 4-bit layer that cannot be read instead of yielding the reason.
        device, zero_overflow: see `read_layer`. target: see `pack`.

    Yields:
        a `Layer` for every 4-bit layer and for every other matrix (with the reason why it is skipped).

    Raises:
        ArgumentError: path, device, select or the checkpoint's config is no such thing; with `strict`, a 4-bit layer
            cannot be read. TargetError: an unknown target.
    """
    weights.device_of(device)
    checkpoint, wanted = Checkpoint(path), _pattern("select", select)
    others = checkpoint.matrices()
    for name in sorted({*checkpoint.layers(), *others}, key=_natural):
        if not wanted.search(name):
            continue
        config = checkpoint.config.layer(name)
        if name in others:
            yield Layer(
                name,
                skipped=f"stored as {others[name]}, not as 4-bit words" + (f" ({config.skip})" if config.skip else ""),
            )
            continue
        if config.skip:
            yield Layer(name, skipped=config.skip)
            continue
        try:
            weight = checkpoint.read(name, device=str(device), config=config, zero_overflow=zero_overflow)
        except ArgumentError as error:
            if strict:
                raise
            yield Layer(name, skipped=str(error))
            continue
        yield Layer(name, pack(weight, target=target) if packed else weight)


def load_model(path: str | Path, **options) -> Model:
    """All layers that `iter_layers(path, **options)` yields, as one object with a printable report."""
    model = Model()
    for layer in iter_layers(path, **options):
        if layer.weight is None:
            model.skipped[layer.name] = layer.skipped
        else:
            model.layers[layer.name] = layer.weight
    return model


def _names(entry: str, name: str) -> bool:
    """compressed-tensors' rule: "re:<pattern>" matches from the start, anything else is the whole name."""
    return _matches(entry[3:], name) if entry.startswith("re:") else entry == name


def _matches(pattern: str, name: str) -> bool:
    return bool(_pattern("pattern", pattern).match(name))


def _pattern(argument: str, text: str) -> re.Pattern:
    try:
        return re.compile(text)
    except (re.error, TypeError) as error:
        raise ArgumentError(argument, text, f"must be a regular expression ({error})", "correct it") from None


def _bad_config(name: str, value: object, constraint: str) -> ArgumentError:
    return ArgumentError(name, value, f"{constraint} in the checkpoint's config", "correct it, or download it again")


def _whole(stated: dict, name: str, default: int | None = None) -> int | None:
    """An integer of a config; 128.0 counts as one."""
    value = stated.get(name)
    if value is None:
        return default
    if isinstance(value, bool | str) or not isinstance(value, int | float) or value % 1 != 0:
        raise _bad_config(name, value, "must be an integer")
    return int(value)


def _names_of(stated: dict, name: str) -> list[str]:
    """A list of names of a config; one name counts as a list of it."""
    value = stated.get(name) or []
    value = [value] if isinstance(value, str) else value
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise _bad_config(name, value, "must be a list of names")
    return value


def _object(path: Path) -> dict:
    """The object in a JSON file."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ArgumentError("path", str(path), f"must hold JSON ({error})", "download the file again") from None
    if not isinstance(data, dict):
        raise ArgumentError("path", str(path), "must hold a JSON object", "download the file again")
    return data


def _shards(index: Path) -> list[str]:
    """Names of the files that an index maps tensors to."""
    found = _object(index).get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(shard, str) for shard in found.values()):
        raise ArgumentError("path", str(index), "must map names of tensors to files (weight_map)", "download it again")
    return sorted(set(found.values()))


def _join(prefix: str, leaf: str) -> str:
    return f"{prefix}.{leaf}" if prefix else leaf


def _natural(name: str) -> list:
    return [(1, int(part), "") if part.isdigit() else (0, 0, part) for part in re.split(r"(\d+)", name)]
