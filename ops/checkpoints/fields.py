"""What fields of a `quantization_config` hold, and which of them change a layer's arithmetic.

A field is read (its `Method` obeys it), neutral (it records how the weights were found), or it changes what a layer
means in a way that no kernel here follows: then the layers that it touches are skipped with the reason. A field that
nobody here knows is refused unless it says nothing: null, false, zero or empty.

Sources: the writers of AutoAWQ 0.2.7, AutoGPTQ 0.7, GPTQModel 7, optimum and transformers 5 (GPTQConfig, AwqConfig),
llm-compressor 0.14 with compressed-tensors 0.20, modelopt, auto-round 0.16, omniserve, and published config.json files.
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import TypeAlias

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.checkpoints.patterns import matches

JSON: TypeAlias = "dict[str, JSON] | list[JSON] | str | float | bool | None"
Stated: TypeAlias = dict[str, JSON]
"""A config, or an object in it."""

SIZES = "quant_method method bits w_bit wbits weight_bits group_size q_group_size"
"""Fields that most methods read."""
FUSED_ROTATION = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "qkv_proj", "gate_up_proj", "lm_head")
"""Layers that GPTQModel's `rotation` changes offline only: the residual stream and the heads are rotated alike."""


def unknown(known: frozenset[str], raw: Stated) -> str:
    """Reason to refuse a config: a field that nobody here knows and that says something; else ""."""
    for name, value in raw.items():
        if value and name not in known and name not in CHANGING:
            return f"the config's field {_short(name)} = {_short(value)} is not known here: it may change the layer"
    return ""


def changed(raw: Stated, layer: str, stored: str = "codes") -> str:
    """Reason to skip one layer: a field that changes its arithmetic in a way that no kernel here follows; else "".

    Of a layer that is stored as "float", only fields about its input and output count.
    """
    for name, reason in CHANGING.items():
        if stored == "float" and name not in AROUND:
            continue
        if raw.get(name) and (found := reason(raw[name], layer)):
            return found
    return ""


def _short(value: JSON) -> str:
    if isinstance(value, (dict, list)):
        return f"{type(value).__name__} of {len(value)}"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _always(what: str) -> Callable[[JSON, str], str]:
    return lambda value, layer: f"{what} ({_short(value)})"


def _rotation(value: JSON, layer: str) -> str:
    if layer.rpartition(".")[2] in FUSED_ROTATION and value in ("hadamard", "random"):
        return ""
    return f"rotation = {_short(value)}: x must be multiplied by a Hadamard matrix before this layer"


def _activations(value: JSON, layer: str) -> str:
    return "" if type(value) is int and value >= 16 else f"activations are quantized too ({_short(value)}-bit)"


def _data_type(value: JSON, layer: str) -> str:
    return "" if isinstance(value, str) and value.startswith("int") else f"weights are of type {_short(value)}, not int"


def _pack_dtype(value: JSON, layer: str) -> str:
    return "" if value in ("int32", "torch.int32") else f"codes are packed into {_short(value)}, not int32"


def _backend(value: JSON, layer: str) -> str:
    return "llm-awq packs codes in another order" if value == "llm-awq" else ""


def _sparsity(value: JSON, layer: str) -> str:
    form = value.get("format") if isinstance(value, dict) else value
    return "" if form in (None, "dense") else f"sparsity_config: the weight is stored sparse ({_short(form)})"


def _transforms(value: JSON, layer: str) -> str:
    """compressed-tensors' transform_config: places "weight_*" were applied to the weight, others happen at run time."""
    groups = value.get("config_groups", {}) if isinstance(value, dict) else None
    if not isinstance(groups, dict):
        return "transform_config is not such as compressed-tensors writes"
    for name, scheme in groups.items():
        places = scheme.get("apply", []) if isinstance(scheme, dict) else None
        if not isinstance(places, list) or not all(isinstance(place, dict) for place in places):
            return f"transform_config of {_short(name)} is not such as compressed-tensors writes"
        for place in places:
            where = place.get("location")
            if where in ("weight_input", "weight_output", "k_cache", "q_attn"):
                continue  # fused into the weight, or between layers, in attention
            if _targets(place.get("targets"), layer) and not _targets(place.get("ignore"), layer):
                kind = _short(scheme.get("type"))
                return f"transform_config: {kind} transform {_short(name)} is applied at run time to its {where}"
    return ""


def _targets(entries: JSON, layer: str) -> bool:
    entries = [entries] if isinstance(entries, str) else entries or []
    if not isinstance(entries, list):
        return True
    return any(not isinstance(entry, str) or entry == "Linear" or names(entry, layer) for entry in entries)


def names(entry: str, layer: str) -> bool:
    """compressed-tensors' rule: "re:<pattern>" matches from the start, anything else is the whole name."""
    return matches(entry[3:], layer) if entry.startswith("re:") else entry == layer


CHANGING = {
    "rotation": _rotation,
    "adapter": _always("a LoRA adapter is added to the layers"),
    "rotation_config": _always("auto-round's rotation is applied at run time"),
    "rotation_configs": _always("auto-round's rotation is applied at run time"),
    "spinquant_config": _always("SpinQuant's rotation is applied at run time"),
    "hadamard_config": _always("a Hadamard transform is applied at run time"),
    "act_bits": _activations,
    "data_type": _data_type,
    "super_bits": _always("scales are quantized too"),
    "super_group_size": _always("scales are quantized too"),
    "pack_dtype": _pack_dtype,
    "backend": _backend,
    "sparsity_config": _sparsity,
    "transform_config": _transforms,
}
"""Field -> (its value, a layer's name) -> reason why the layer is not what its tensors say, or ""."""
AROUND = frozenset(
    "rotation adapter rotation_config rotation_configs spinquant_config hadamard_config transform_config".split()
)
"""Fields of CHANGING that say what happens around a layer, however its weight is stored."""


def left_out(raw: Stated, name: str, *lists: str, glob: bool = False) -> str:
    """Why a config leaves a layer out, else "".

    One of some lists has components of its name, in a row ("model.layers.1" is in "model.layers.1.mlp", not in
    "model.layers.10"), or, with `glob`, a pattern of it.
    """
    for part in (part for each in lists for part in names_of(raw, each)):
        if f".{part.strip('.')}." in f".{name}." or (glob and fnmatchcase(name, part)):
            return f"{lists[0]} names {part!r}"
    return ""


def bad(name: str, value: object, constraint: str) -> ArgumentError:
    return ArgumentError(name, shown(value), f"{constraint} in the checkpoint's config", "correct it, or get it again")


def shown(value: JSON) -> JSON:
    """A value of a config, for messages: long and nested ones by their kind."""
    if isinstance(value, (dict, list)):
        return f"{'object' if isinstance(value, dict) else 'list'} of {len(value)}"
    return value[:80] if isinstance(value, str) else value


def word(stated: Stated, name: str) -> JSON:
    """A field that names one of a few things, in small letters; None where it is empty."""
    value = stated.get(name) or None
    return value.lower() if isinstance(value, str) else value


def text(stated: Stated, name: str) -> str | None:
    value = stated.get(name)
    if value is not None and not isinstance(value, str):
        raise bad(name, value, "must be a string")
    return value


def flag(stated: Stated, name: str) -> bool | None:
    value = stated.get(name)
    if value is not None and not isinstance(value, bool):
        raise bad(name, value, "must be true or false")
    return value


def whole(stated: Stated, name: str, default: int | None = None) -> int | None:
    """An integer of a config; 128.0 counts as one."""
    value = stated.get(name)
    if value is None:
        return default
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not -(2**31) < value < 2**31 or value % 1 != 0:
        long = isinstance(value, int) and abs(value) > 10**20  # Python refuses to print very long ones
        raise bad(name, "a long number" if long else value, "must be an integer")
    return int(value)


def names_of(stated: Stated, name: str) -> list[str]:
    """A list of names of a config; one name counts as a list of it."""
    value = stated.get(name) or []
    value = [value] if isinstance(value, str) else value
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise bad(name, value, "must be a list of names")
    return value
