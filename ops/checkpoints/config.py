"""What a checkpoint's config states about each of its layers: awq, gptq, compressed-tensors, qserve, auto-round."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.spelling import did_you_mean
from terrazzo.ops.checkpoints import fields, files
from terrazzo.ops.checkpoints.patterns import matches

FORMATS = {
    "awq": "awq",
    "gptq": "gptq",
    "gptq_v2": "gptq",
    "compressed_tensors": "compressed_tensors",
    "qserve": "qserve",
    "fp8": "fp8",
    "nvfp4": "nvfp4",
    "mxfp4": "mxfp4",
    "auto_round": "gptq",
    "auto_round:auto_gptq": "gptq",
    "auto_round:auto_awq": "awq",
}
"""What a caller may name -> the tensors that a layer of it has. "auto_round" is GPTQ with zero points as they are."""
_METHODS = {
    "gptqmodel": "gptq", "auto_round": "auto-round", "intel/auto-round": "auto-round", "qoq": "qserve",
    "fbgemm_fp8": "fp8",
}  # fmt: skip
_PACKINGS = {
    "": "gptq",
    "auto": "gptq",
    "auto_gptq": "gptq",
    "gptq": "gptq",
    "auto_round": "gptq_v2",
    "gptqmodel": "gptq_v2",
    "auto_awq": "awq",
    "awq": "awq",
}
"""auto-round's packing_format, without its "auto_round:" and the kernel named behind -> format."""
_KERNELS = ("exllamav2", "exllama", "tritonv2", "triton", "marlin", "gemm")
_FILES = (
    "config.json", "hf_quant_config.json", "quantize_config.json", "quant_config.json", "quantization_config.json",
)  # fmt: skip
_KINDS = {
    "dynamic": dict, "config_groups": dict, "extra_config": dict, "version": str, "checkpoint_format": str,
    "format": str, "packing_format": str,
}  # fmt: skip
"""Fields of a config whose kind is checked at once."""
_PRESET = re.compile(r"(?:W(?P<weights>[2-8])A(?P<acts>4|8|16|FP8)(?P<asym>_ASYM)?|INT8|(?P<float>(?:NV|MX)?FP\w+))")


_FLOAT_PRESETS = {
    "FP8": {"num_bits": 8, "strategy": "tensor"},
    "FP8_DYNAMIC": {"num_bits": 8, "strategy": "channel"},
    "FP8_BLOCK": {"num_bits": 8, "strategy": "block"},
    "MXFP4": {"num_bits": 4, "strategy": "group", "group_size": 32},
    "MXFP4A16": {"num_bits": 4, "strategy": "group", "group_size": 32},
    "NVFP4": {"num_bits": 4, "strategy": "tensor_group", "group_size": 16},
    "NVFP4A16": {"num_bits": 4, "strategy": "tensor_group", "group_size": 16},
}
_MODELOPT = {
    "NVFP4": ("nvfp4", 4, 16), "W4A16_NVFP4": ("nvfp4", 4, 16), "FP8": ("fp8", 8, -1),
    "FP8_PER_CHANNEL_PER_TOKEN": ("fp8", 8, -1), "W8A16": ("compressed_tensors", 8, -1),
}  # fmt: skip
"""modelopt's quant_algo -> convention of its tensors, bits, group size."""


@dataclass(frozen=True)
class LayerConfig:
    """What a checkpoint's config states about one layer. None: it does not say.

    Attributes:
        format: "awq", "gptq", "gptq_v2", "compressed_tensors", "qserve", "fp8", "nvfp4" or "mxfp4".
        bits: bits for each code.
        group_size: input channels for each scale, -1 for one group.
        version: AWQ version or compressed-tensors format, as written.
        symmetric, desc_act: as written; of compressed-tensors, desc_act is its actorder by groups.
        activations: what x is quantized to, dynamically and for each token: "int8", "e4m3"; "" for 16 bits; None. Of
            weights in small floats "": their kernels multiply 16-bit x, whatever is stated. Of int8 weights also
            "int8 static", "int8 asymmetric", "int8 static asymmetric", and "other" of what no kernel multiplies.
        inputs: the same of fp8 weights, which W8A8 obeys: "e4m3", "e4m3 static", "e4m3 ue8m0", whose scales are rounded
            up to powers of two, "" or None. It refuses "e4m3 bounded", by `activation_scale_ub`, and "other", all else.
        skip: why the layer cannot be read as its tensors say, or why the config leaves it out, else "".
        excluded: `skip` says that the config leaves the layer out of quantization.
    """

    format: str | None = None
    bits: int = 4
    group_size: int | None = None
    version: str | None = None
    symmetric: bool | None = None
    desc_act: bool | None = None
    activations: str | None = None
    inputs: str | None = None
    skip: str = ""
    excluded: bool = False


class Config:
    """A checkpoint's quantization config, resolved layer by layer.

    Args:
        raw: the `quantization_config` object of config.json, or the content of quantize_config.json /
            quant_config.json.
        format: what the caller says that the layers are stored as, one of FORMATS; it is obeyed whatever `raw` says.

    Attributes:
        method: "awq", "gptq", "compressed-tensors", "qserve", "auto-round", or "" for none.

    Raises:
        ArgumentError: another `quant_method` and no `format`, a folder that Terrazzo packed, or a field of another kind
            than exporters write.
    """

    def __init__(self, raw: dict | None = None, *, format: str | None = None) -> None:
        self.raw, self.format = {} if raw is None else raw, _format(format)
        if not isinstance(self.raw, dict):
            raise _bad("quantization_config", self.raw, "must be an object")
        if self.raw.get("quant_method") == "terrazzo":
            remedy = "give what terrazzo.load makes of it to terrazzo.prepare, which compiles its kernels"
            constraint = "says that Terrazzo packed these layers: terrazzo.load alone reads them"
            raise ArgumentError("quant_method", "terrazzo", constraint, remedy)
        for name, kind in _KINDS.items():
            if not isinstance(self.raw.get(name), kind | None):
                raise _bad(name, self.raw[name], "must be an object" if kind is dict else "must be a string")
        method = self.raw.get("quant_method") or self.raw.get("method") or ""
        method = method.lower() if isinstance(method, str) else type(method).__name__
        if not method and self.raw:  # files older than quant_method: AWQ wrote w_bit, GPTQ desc_act
            method = (
                "awq"
                if {"w_bit", "version"} & set(self.raw)
                else "gptq"
                if {"desc_act", "bits"} <= set(self.raw)
                else ""
            )
        self.method = _METHODS.get(method, method)
        self._known: dict[str, LayerConfig] = {}
        if self.raw and self.method not in fields.NEUTRAL:
            if self.format is None:
                raise ArgumentError(
                    "quant_method",
                    method[:80] or None,
                    f"must be one of {', '.join(fields.NEUTRAL)}",
                    "quantize() the float checkpoint, export it in one of these formats, or pass format=",
                )
            self.method = ""

    @classmethod
    def of_folder(cls, folder: Path, format: str | None = None) -> Config:
        """Read config.json (its quantization_config), else quantize_config.json or quant_config.json.

        Of those that are not chosen, fields that change a layer and that the chosen one does not have are kept.
        """
        chosen, changing = None, {}
        for name in _FILES:
            if (path := files.member(folder, name)) is None:
                continue
            try:
                raw = files.read_object(path)
            except ArgumentError:
                if chosen is None:
                    raise
                continue
            if name == "config.json":  # models of several modalities state it in the text model's part
                parts = [raw, *(raw[part] for part in ("text_config", "llm_config") if isinstance(raw.get(part), dict))]
                found = (part.get("quantization_config") or part.get("compression_config") for part in parts)
                raw = next(filter(None, found), None)
            if name == "hf_quant_config.json" and isinstance(raw.get("quantization"), dict):
                raw = {"quant_method": "modelopt", **raw["quantization"]}
            if raw and chosen is None:
                chosen = raw
            elif isinstance(raw, dict):
                changing = {field: raw[field] for field in fields.CHANGING if field in raw} | changing
        return cls(changing | chosen if isinstance(chosen, dict) else chosen, format=format)

    def layer(self, name: str) -> LayerConfig:
        """The config of one layer, by the rules of its convention (overrides, ignore lists and targets included)."""
        if name not in self._known:
            self._known[name] = self._layer(name)
        return self._known[name]

    def _layer(self, name: str) -> LayerConfig:
        stated = _LAYERS[self.method](self, name) if self.method else LayerConfig()
        facts = self.raw | self._overrides(name)
        reason = fields.unknown(self.method, facts) if self.method else ""
        reason = reason or fields.changed(facts, name)
        if self.format is not None:
            stated = self._named(stated)
        if reason and (stated.excluded or not stated.skip):
            stated = replace(stated, skip=reason, excluded=False)
        return stated

    def _named(self, stated: LayerConfig) -> LayerConfig:
        """Of the caller's format, with what the config says beside its own."""
        same = stated.format is not None and FORMATS[stated.format] == FORMATS[self.format]
        facts = {"bits": stated.bits, "group_size": stated.group_size, "activations": stated.activations}
        facts["inputs"] = stated.inputs
        if same:
            facts |= {"symmetric": stated.symmetric, "desc_act": stated.desc_act}
        if self.format in ("compressed_tensors", "qserve"):
            facts["version"] = stated.version if same else None
        format = {"auto_round": "gptq_v2"}.get(self.format, self.format)
        format = FORMATS[format] if format.startswith("auto_round:") else format
        return LayerConfig(format, **facts)

    def _overrides(self, name: str) -> dict[str, Any]:
        """What the config states for this layer alone."""
        if self.method == "gptq":  # GPTQModel: the first match decides, "-:" excludes
            for pattern, overrides in (self.raw.get("dynamic") or {}).items():
                if matches(pattern.removeprefix("+:").removeprefix("-:"), name):
                    return overrides if isinstance(overrides, dict) and not pattern.startswith("-:") else {}
        if self.method == "auto-round":
            stated = self.raw.get("extra_config") or {}
            found = [stated[name]] if name in stated else []
            found += [v for key, v in stated.items() if set(key) & set("*+?^$()[]{}|\\") and _found(key, name)]
            return next((overrides for overrides in found if isinstance(overrides, dict)), {})
        return {}

    def _awq(self, name: str) -> LayerConfig:
        raw = self.raw
        excluded = [part for part in _names_of(raw, "modules_to_not_convert") if _contains(name, part)]
        versions = [raw[key].lower() for key in ("version", "checkpoint_format", "format") if raw.get(key)]
        return LayerConfig(
            "awq",
            whole(raw, "bits" if "bits" in raw else "w_bit", 4),
            whole(raw, "group_size" if "group_size" in raw else "q_group_size"),
            next((version for version in versions if version != "gemm"), raw.get("version") or "gemm"),
            symmetric=True if raw.get("zero_point") is False else None,
            skip=f"modules_to_not_convert names {excluded[0]!r}" if excluded else "",
            excluded=bool(excluded),
        )

    def _gptq(self, name: str) -> LayerConfig:
        facts, skip = self.raw | self._overrides(name), ""
        for pattern in self.raw.get("dynamic") or {}:
            if matches(pattern.removeprefix("+:").removeprefix("-:"), name):
                skip = f"dynamic rule {pattern!r} excludes it" if pattern.startswith("-:") else ""
                break
        version = _text(facts, "checkpoint_format") or _text(facts, "format") or "gptq"
        version = "marlin" if facts.get("is_marlin_format") else version
        return LayerConfig(
            "gptq_v2" if version == "gptq_v2" else "gptq",
            whole(facts, "bits", 4),
            whole(facts, "group_size"),
            version,
            _flag(facts, "sym"),
            _flag(facts, "desc_act"),
            skip=skip,
            excluded=bool(skip),
        )

    def _auto_round(self, name: str) -> LayerConfig:
        facts = self.raw | self._overrides(name)
        stated = facts.get("packing_format") or facts.get("backend") or ""
        packing = stated if isinstance(stated, str) and (facts.get("packing_format") or "auto_round" in stated) else ""
        parts = [part for part in packing.lower().split(":") if part not in _KERNELS]
        short = ":".join(parts[1:] if len(parts) > 1 and parts[0] == "auto_round" else parts)
        bits, size = whole(facts, "bits", 4), whole(facts, "group_size")
        if short not in _PACKINGS:
            skip = f"packing_format {packing[:80]!r}: only auto_round, auto_round:auto_gptq and auto_round:auto_awq"
            return LayerConfig(None, bits, size, skip=f"{skip} are read")
        format = _PACKINGS[short]
        version = "gemm" if format == "awq" else format
        return LayerConfig(format, bits, size, version, None if format == "awq" else _flag(facts, "sym"))

    def _qserve(self, name: str) -> LayerConfig:
        bits = next((key for key in ("w_bit", "bits", "wbits", "weight_bits") if key in self.raw), "bits")
        return LayerConfig("qserve", whole(self.raw, bits, 4), whole(self.raw, "group_size"), activations="int8")

    def _fp8(self, name: str) -> LayerConfig:
        left = [*_names_of(self.raw, "modules_to_not_convert"), *_names_of(self.raw, "ignored_layers")]
        excluded = [part for part in left if _contains(name, part)]
        block, skip = self.raw.get("weight_block_size"), ""
        if block is not None and block != [128, 128]:
            skip = f"weight_block_size is {_shown(block)}, only blocks of 128 x 128 are read"
        if (codes := _word(self.raw, "fmt")) not in (None, "e4m3"):
            skip = f"fmt is {_shown(codes)!r}, only e4m3 is read"
        skip = f"modules_to_not_convert names {excluded[0]!r}" if excluded else skip
        group, stated = -1 if block is None else 128, _word(self.raw, "activation_scheme")
        bounded = self.raw.get("activation_scale_ub") is not None
        form = _word(self.raw, "scale_fmt")
        if form not in (None, "ue8m0"):
            skip = skip or f"scale_fmt is {_shown(form)!r}, only ue8m0 is known"
        if stated not in (None, "dynamic", "static"):
            skip = skip or f"activation_scheme is {_shown(stated)!r}, only dynamic and static are known"
        inputs = "e4m3 static" if stated == "static" else "e4m3 bounded" if bounded else "e4m3"
        inputs = "e4m3 ue8m0" if form == "ue8m0" else inputs
        if stated not in (None, "dynamic", "static") or (stated == "static" and block is not None):
            inputs = "other"
        return LayerConfig("fp8", 8, group, activations="", inputs=inputs, skip=skip, excluded=bool(excluded))

    def _mxfp4(self, name: str) -> LayerConfig:
        """Of gpt-oss, whose experts alone are quantized; their tensors are no layer's (`terrazzo.load` reads them)."""
        left = _names_of(self.raw, "modules_to_not_convert")
        excluded = [part for part in left if fnmatchcase(name, part) or _contains(name, part)]
        skip = f"modules_to_not_convert names {excluded[0]!r}" if excluded else ""
        return LayerConfig("mxfp4", 4, 32, activations="", skip=skip, excluded=bool(excluded))

    def _modelopt(self, name: str) -> LayerConfig:
        left = [*_names_of(self.raw, "exclude_modules"), *_names_of(self.raw, "ignore")]
        excluded = [part for part in left if fnmatchcase(name, part) or _contains(name, part)]
        if excluded:
            return LayerConfig(skip=f"exclude_modules names {excluded[0]!r}", excluded=True)
        facts = self.raw
        if facts.get("quant_algo") == "MIXED_PRECISION":
            stated = facts.get("quantized_layers")
            facts = stated.get(name) if isinstance(stated, dict) else None
            if not isinstance(facts, dict):
                return LayerConfig(skip="quantized_layers does not name it", excluded=True)
        algorithm = _text(facts, "quant_algo")
        if algorithm not in _MODELOPT:
            known = ", ".join(_MODELOPT)
            return LayerConfig(skip=f"quant_algo is {_shown(algorithm)}, only {known} are read")
        format, bits, size = _MODELOPT[algorithm]
        if bits == 4 and whole(facts, "group_size", size) != size:
            return LayerConfig(skip=f"group_size is {facts['group_size']}, {algorithm} has groups of {size}")
        inputs = {"FP8": "e4m3 static", "FP8_PER_CHANNEL_PER_TOKEN": "e4m3"}.get(algorithm)
        return LayerConfig(format, bits, size, activations="", inputs=inputs)

    def _compressed(self, name: str) -> LayerConfig:
        ignored = [entry for entry in _names_of(self.raw, "ignore") if fields.names(entry, name)]
        if ignored:
            return LayerConfig("compressed_tensors", skip=f"ignore lists {ignored[0]!r}", excluded=True)
        groups = [_group(key, value) for key, value in (self.raw.get("config_groups") or {}).items()]
        places = [(target, at) for at, group in enumerate(groups) for target in _names_of(group, "targets")]
        found = [(target.startswith("re:"), target, at) for target, at in places if fields.names(target, name)]
        found = found or [(False, target, at) for target, at in places if target == "Linear"]
        if found:  # in the writer's order: names, then patterns by their letters, then the module's class
            return _scheme(groups[min(found)[2]], self.raw.get("format"))
        skip = "no config group targets it" if groups else ""
        return LayerConfig("compressed_tensors", skip=skip, excluded=bool(skip))


_LAYERS = {
    "awq": Config._awq,
    "gptq": Config._gptq,
    "compressed-tensors": Config._compressed,
    "qserve": Config._qserve,
    "auto-round": Config._auto_round,
    "fp8": Config._fp8,
    "mxfp4": Config._mxfp4,
    "modelopt": Config._modelopt,
}


def _group(key: str, value: Any) -> dict[str, Any]:
    """A config group; a list of targets stands for the preset that its key names."""
    if isinstance(value, (list, str)):
        preset = _PRESET.fullmatch(key.upper())
        if preset is None:
            return {"targets": value, "preset": key}
        if preset["float"]:
            stated = _FLOAT_PRESETS.get(preset["float"], {"num_bits": None})
            return {"targets": value, "weights": {"type": "float", **stated}}
        bits, acts = int(preset["weights"] or 8), preset["acts"] or "8"
        stated = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": 128}
        stated |= {"symmetric": not preset["asym"]}
        if not preset["weights"] or (bits, acts) == (8, "8"):
            stated |= {"strategy": "channel", "group_size": None}
        x = {"num_bits": 8 if acts == "FP8" else int(acts), "type": "float" if acts == "FP8" else "int"}
        x |= {"strategy": "token", "dynamic": True, "symmetric": True}
        return {"targets": value, "weights": stated, "input_activations": None if acts == "16" else x}
    if not isinstance(value, dict):
        raise _bad("config_groups", value, "must be objects, or lists of targets under a preset's name,")
    return value


_GROUP_FIELDS = {"targets", "weights", "input_activations", "output_activations", "format", "preset"}
_WEIGHT_FIELDS = {
    "num_bits", "type", "symmetric", "strategy", "group_size", "actorder", "block_structure", "dynamic", "observer",
    "observer_kwargs", "scale_dtype", "zp_dtype",
}  # fmt: skip


def _scheme(group: dict[str, Any], format: str | None) -> LayerConfig:
    """One group of compressed-tensors' config_groups."""
    skipped = lambda reason: LayerConfig("compressed_tensors", skip=reason)
    stated, acts = (group.get(part) or {} for part in ("weights", "input_activations"))
    if not isinstance(stated, dict) or not isinstance(acts, dict):
        raise _bad("config_groups", group, "weights and input_activations must be objects")
    if group.get("preset"):
        return skipped(f"config_groups: no preset {group['preset'][:80]!r} is known here")
    extra = [key for key in group if group[key] and key not in _GROUP_FIELDS]
    extra += [key for key in stated if stated[key] and key not in _WEIGHT_FIELDS]
    if extra:
        return skipped(f"config_groups: the field {extra[0][:80]!r} is not known here: it may change the layer")
    if stated.get("type", "int") == "float" and (found := _small_floats(stated, group, format)):
        return found
    if stated.get("type", "int") != "int":
        return skipped(f"weights are of type {_shown(stated['type'])}, not int")
    activations = _activations(acts, whole(stated, "num_bits", 4) == 8)
    if activations is None and whole(stated, "num_bits", 4) == 8:
        activations = "other"
    if activations is None:
        return skipped(f"activations are quantized too ({_shown(acts.get('num_bits'))}-bit {_shown(acts.get('type'))})")
    if group.get("output_activations"):
        return skipped("the layer's output is quantized too (output_activations)")
    strategy = stated.get("strategy")
    if strategy not in (None, "group", "channel", *(["tensor"] if whole(stated, "num_bits", 4) == 8 else [])):
        return skipped(f"weights have scales of strategy {_shown(strategy)}, not group or channel")
    if stated.get("dynamic"):
        return skipped("weights are quantized dynamically, at run time")
    order = stated.get("actorder")
    layout = _text(group, "format") or (None if format == "mixed-precision" else format)
    return LayerConfig(
        "compressed_tensors",
        whole(stated, "num_bits", 4),
        -1 if strategy in ("channel", "tensor") else whole(stated, "group_size"),
        layout,
        _flag(stated, "symmetric"),
        True if order is True or order in ("group", "dynamic") else None,
        activations,
    )


def _small_floats(stated: dict[str, Any], group: dict[str, Any], format: str | None) -> LayerConfig | None:
    """Weights of float-quantized, mxfp4- and nvfp4-pack-quantized; None of others, which are refused."""
    bits, strategy, size = whole(stated, "num_bits"), stated.get("strategy"), whole(stated, "group_size")
    if bits == 8 and strategy == "block" and stated.get("block_structure") not in (None, [128, 128], "128x128"):
        return None
    known = bits == 8 and strategy in (None, "tensor", "channel", "block")
    nvfp4 = bits == 4 and strategy in ("tensor_group", "group") and size == 16
    if stated.get("dynamic") or not (known or nvfp4 or (bits, strategy, size) == (4, "group", 32)):
        return None
    size = size if bits == 4 else 128 if strategy == "block" else -1
    usual = f"{'nvfp4' if nvfp4 else 'mxfp4'}-pack-quantized" if bits == 4 else "float-quantized"
    layout = _text(group, "format") or (usual if format in (None, "mixed-precision") else format)
    if bits == 4 and layout != usual:
        return None
    symmetric, inputs = _flag(stated, "symmetric"), _float_inputs(group.get("input_activations") or {}, strategy)
    return LayerConfig("compressed_tensors", bits, size, layout, symmetric, activations="", inputs=inputs)


def _float_inputs(acts: dict[str, Any], weights: str | None) -> str:
    """What W8A8 makes of activations beside weights of a strategy: a static scale of all tokens or a scale of each, or
    beside blocks one of 128 channels of a token; "other" of what it has no kernel for."""
    if not acts:
        return ""
    if acts.get("num_bits") != 8 or acts.get("type") != "float" or acts.get("symmetric", True) is not True:
        return "other"
    strategy, dynamic = acts.get("strategy"), acts.get("dynamic") or False
    if weights == "block":
        return "e4m3" if dynamic is True and (strategy, acts.get("group_size")) == ("group", 128) else "other"
    if dynamic is True and strategy in (None, "token"):
        return "e4m3"
    return "e4m3 static" if dynamic is False and strategy in (None, "tensor") else "other"


def _activations(acts: dict[str, Any], bytes_: bool = False) -> str | None:
    """ "int8" or "e4m3" of activations quantized for each token, "" of none, None of what no kernel here does. Those of
    8-bit weights may also be static, and have zero points."""
    if not acts:
        return ""
    if bytes_ and acts.get("num_bits") == 8 and acts.get("type", "int") == "int":
        static = acts.get("dynamic") is not True
        if acts.get("strategy") in ((None, "tensor") if static else (None, "token")):
            return "int8" + " static" * static + " asymmetric" * (acts.get("symmetric", True) is False)
    plain = acts.get("num_bits") == 8 and acts.get("dynamic") is True and acts.get("symmetric", True) is True
    if not plain or acts.get("strategy") not in (None, "token"):
        return None
    kind = acts.get("type", "int")
    return "int8" if kind == "int" else "e4m3" if kind == "float" else None


def _format(format: Any) -> str | None:
    if format is not None and (not isinstance(format, str) or format not in FORMATS):
        remedy = f"{did_you_mean(format, FORMATS)}pass the format that the checkpoint's page states"
        raise ArgumentError("format", format, f"must be one of {tuple(FORMATS)}", remedy)
    return format


def _contains(name: str, part: str) -> bool:
    """Whole components of a name, in a row: "model.layers.1" is in "model.layers.1.mlp", not in "model.layers.10"."""
    return f".{part.strip('.')}." in f".{name}."


def _found(pattern: str, name: str) -> bool:
    return matches(pattern, name, search=True)


def _bad(name: str, value: object, constraint: str) -> ArgumentError:
    return ArgumentError(name, _shown(value), f"{constraint} in the checkpoint's config", "correct it, or get it again")


def _shown(value: Any) -> Any:
    """A value of a config, for messages: long and nested ones by their kind."""
    if isinstance(value, (dict, list)):
        return f"{'object' if isinstance(value, dict) else 'list'} of {len(value)}"
    return value[:80] if isinstance(value, str) else value


def _word(stated: dict, name: str) -> Any:
    """A field that names one of a few things, in small letters; None where it is empty."""
    value = stated.get(name) or None
    return value.lower() if isinstance(value, str) else value


def _text(stated: dict, name: str) -> str | None:
    value = stated.get(name)
    if value is not None and not isinstance(value, str):
        raise _bad(name, value, "must be a string")
    return value


def _flag(stated: dict, name: str) -> bool | None:
    value = stated.get(name)
    if value is not None and not isinstance(value, bool):
        raise _bad(name, value, "must be true or false")
    return value


def whole(stated: dict, name: str, default: int | None = None) -> int | None:
    """An integer of a config; 128.0 counts as one."""
    value = stated.get(name)
    if value is None:
        return default
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not -(2**31) < value < 2**31 or value % 1 != 0:
        long = isinstance(value, int) and abs(value) > 10**20  # Python refuses to print very long ones
        raise _bad(name, "a long number" if long else value, "must be an integer")
    return int(value)


def _names_of(stated: dict, name: str) -> list[str]:
    """A list of names of a config; one name counts as a list of it."""
    value = stated.get(name) or []
    value = [value] if isinstance(value, str) else value
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise _bad(name, value, "must be a list of names")
    return value
