"""ModelOpt: how its configs state layers, whose tensors are those of NVFP4, FP8 and compressed-tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from terrazzo.ops.checkpoints import fields
from terrazzo.ops.checkpoints.conventions.base import LayerConfig, Method

if TYPE_CHECKING:
    from terrazzo.ops.checkpoints.fields import Stated

_ALGORITHMS = {
    "NVFP4": ("nvfp4", 4, 16, None),
    "W4A16_NVFP4": ("nvfp4", 4, 16, None),
    "FP8": ("fp8", 8, -1, "e4m3 static"),
    "FP8_PER_CHANNEL_PER_TOKEN": ("fp8", 8, -1, "e4m3"),
    "W8A16": ("compressed_tensors", 8, -1, None),
}
"""quant_algo -> format of a layer's tensors, bits, group size, inputs."""


def _layer(raw: Stated, name: str) -> LayerConfig:
    if skip := fields.left_out(raw, name, "exclude_modules", "ignore", glob=True):
        return LayerConfig(skip=skip, excluded=True)
    facts = raw
    if facts.get("quant_algo") == "MIXED_PRECISION":
        stated = facts.get("quantized_layers")
        facts = stated.get(name) if isinstance(stated, dict) else None
        if not isinstance(facts, dict):
            return LayerConfig(skip="quantized_layers does not name it", excluded=True)
    algorithm = fields.text(facts, "quant_algo")
    if algorithm not in _ALGORITHMS:
        known = ", ".join(_ALGORITHMS)
        return LayerConfig(skip=f"quant_algo is {fields.shown(algorithm)}, only {known} are read")
    format, bits, size, inputs = _ALGORITHMS[algorithm]
    if bits == 4 and fields.whole(facts, "group_size", size) != size:
        return LayerConfig(skip=f"group_size is {facts['group_size']}, {algorithm} has groups of {size}")
    return LayerConfig(format, bits, size, activations="", inputs=inputs)


METHOD = Method(
    "modelopt",
    _layer,
    read="quant_method quant_algo group_size exclude_modules ignore quantized_layers",
    neutral="producer kv_cache_quant_algo kv_cache_scheme config_groups has_zero_point version",
    file="hf_quant_config.json",
)
