"""Tiny checkpoints that vLLM loads: 4-bit ones, and the float model that each of them means."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.engine_model import SHAPES
from tests.ops.checkpoints.checkpoint_folders import AWQ, DYNAMIC, GPTQ, compressed, stored

GROUP, SHRINK = 64, 2.0**-6
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "awq": ("awq", AWQ | {"group_size": GROUP, "modules_to_not_convert": ["lm_head", "mlp.gate"]}),
    "gptq": ("gptq_sym", GPTQ | {"group_size": GROUP, "sym": True}),
    "w4a16": ("pack", compressed(group_size=GROUP)),
    "w4a16_zeros": ("pack_asym", compressed(group_size=GROUP, symmetric=False)),
    "w4a8": ("w4a8_pack", compressed(DYNAMIC, group_size=GROUP)),
    "w4a8_int": ("int", compressed(DYNAMIC, group_size=GROUP) | {"format": "int-quantized"}),
}
"""Name -> (convention of `stored`, quantization_config)."""
for _, _config in CONFIGS.values():
    if "ignore" in _config:
        _config["ignore"] = ["lm_head", r"re:.*mlp\.gate$", r"re:.*block_sparse_moe\.gate$"]


def layers_of(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Name -> [N, K] of all linear layers that are quantized."""
    hidden, heads, kv, dim = (
        config[k] for k in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    found = {}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        found |= {f"{at}.self_attn.q_proj": (heads * dim, hidden), f"{at}.self_attn.o_proj": (hidden, heads * dim)}
        found |= {f"{at}.self_attn.{name}_proj": (kv * dim, hidden) for name in "kv"}
        experts = config.get("num_local_experts") or config.get("num_experts") or 0
        inner = config.get("moe_intermediate_size") or config["intermediate_size"]
        mixtral = config["model_type"] == "mixtral"
        names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
        folder = "block_sparse_moe" if mixtral else "mlp"
        for place in [f"{at}.{folder}.experts.{e}" for e in range(experts)] or [f"{at}.mlp"]:
            found |= {f"{place}.{names[0]}": (inner, hidden), f"{place}.{names[1]}": (inner, hidden)}
            found[f"{place}.{names[2]}"] = (hidden, inner)
    return found


def write(folder: Path, shape: str, name: str, dtype: str = "bfloat16") -> tuple[Path, Path]:
    """(4-bit folder, float folder with the values that it means)."""
    config = SHAPES[shape] | {"torch_dtype": dtype}
    convention, quantization = CONFIGS[name]
    kind = getattr(torch, dtype)
    rng = torch.Generator().manual_seed(1)
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    plain = {
        "model.embed_tokens.weight": torch.randn(vocabulary, hidden, generator=rng),
        "lm_head.weight": torch.randn(vocabulary, hidden, generator=rng) * 3 / hidden**0.5,
        "model.norm.weight": torch.ones(hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        plain |= {f"{at}.{norm}.weight": torch.ones(hidden) for norm in ("input_layernorm", "post_attention_layernorm")}
        if config["model_type"] == "qwen3_moe":
            plain |= {f"{at}.self_attn.{norm}.weight": torch.ones(config["head_dim"]) for norm in ("q_norm", "k_norm")}
        if experts := config.get("num_local_experts") or config.get("num_experts"):
            place = "block_sparse_moe" if config["model_type"] == "mixtral" else "mlp"
            plain[f"{at}.{place}.gate.weight"] = torch.randn(experts, hidden, generator=rng) / hidden**0.5
    packed, float_ = {}, {}
    for seed, (layer, (n, k)) in enumerate(layers_of(config).items()):
        tensors, weight = stored(convention, seed, n, k, GROUP)
        leaf = "weight_scale" if "weight_scale" in tensors else "scales"
        by_row = (lambda t: t.double()) if leaf == "weight_scale" else (lambda t: t.double().T)
        before = by_row(tensors[leaf])
        tensors[leaf] = (tensors[leaf].to(kind).double() * SHRINK).to(kind)
        scales = by_row(tensors[leaf])
        spread = lambda t: t.repeat_interleave(GROUP, 1)
        float_[f"{layer}.weight"] = (weight / spread(before) * spread(scales)).to(kind)
        packed |= {f"{layer}.{leaf}": t for leaf, t in tensors.items()}
    plain = {each: t.to(kind) for each, t in plain.items()}
    made = folder / f"{shape}-{name}", folder / f"{shape}-{name}-float"
    for path, tensors, stated in ((made[0], packed, {"quantization_config": quantization}), (made[1], float_, {})):
        path.mkdir(parents=True, exist_ok=True)
        save_file({each: t.contiguous() for each, t in (plain | tensors).items()}, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps(config | stated))
    return made
