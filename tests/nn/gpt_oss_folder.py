"""Folders as gpt-oss is published, of transformers' own model of random weights, and what that model says.

Needs transformers.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

E, HIDDEN, INNER, WINDOW = 4, 128, 96, 8
QUANTIZATION = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
}  # fmt: skip
PROMPT = torch.arange(3, 32)[None] % 64


def config_of(**changed) -> transformers.GptOssConfig:
    facts = dict(
        hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, vocab_size=64, num_local_experts=E, num_experts_per_tok=2, sliding_window=WINDOW,
        max_position_embeddings=256, initializer_range=0.1, pad_token_id=0, bos_token_id=None, eos_token_id=None,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 1000.0, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": False, "original_max_position_embeddings": 32,
        },
    )  # fmt: skip
    return transformers.GptOssConfig(**facts | changed)


def model_of(config) -> torch.nn.Module:
    """Every parameter random, the sinks and biases too; routers far from ties."""
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    for name, parameter in model.named_parameters():
        scale = 1.0 if "sinks" in name or "router" in name else 0.3 if "bias" in name else 0.05
        parameter.data += scale * torch.randn_like(parameter)
        if "sinks" in name:
            parameter.data += 1.0
    return model


def mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(blocks [..., K/32, 16], scales [..., K/32], what they mean) of float [..., K]: the largest of 32 below 8."""
    parts = weight.double().unflatten(-1, (-1, 32))
    exponent = torch.floor(torch.log2(parts.abs().amax(-1))) - 2
    levels = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    scaled = parts / 2.0 ** exponent[..., None]
    codes = (scaled.abs()[..., None] - levels).abs().argmin(-1)
    meant = levels[codes] * scaled.sign() * 2.0 ** exponent[..., None]
    codes = codes + 8 * (scaled < 0)
    blocks = (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8)
    return blocks, (exponent + 127).to(torch.uint8), meant.flatten(-2)


def published(folder: Path, config) -> tuple[Path, torch.nn.Module]:
    """A folder as gpt-oss is published, and the model in float32 that it means."""
    return written(folder, model_of(config), config)


def written(folder: Path, model: torch.nn.Module, config) -> tuple[Path, torch.nn.Module]:
    """The same of a model's own values, which become those that the folder means."""
    tensors = {}
    for name, value in model.state_dict().items():
        if name.endswith(("gate_up_proj", "down_proj")):
            blocks, scales, meant = mxfp4(value.transpose(1, 2))
            value.copy_(meant.transpose(1, 2))
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        else:
            value.copy_(value.to(torch.bfloat16))
            tensors[name] = value.to(torch.bfloat16).contiguous()
    save_file(tensors, folder / "model.safetensors")
    stated = config.to_dict() | {"quantization_config": QUANTIZATION, "dtype": "bfloat16"}
    stated["architectures"] = ["GptOssForCausalLM"]
    (folder / "config.json").write_text(json.dumps(stated))
    return folder, model


def apart(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.float() - wanted.float()).norm() / wanted.float().norm())


def logits(model, tokens=PROMPT) -> torch.Tensor:
    """Of the prompt, its last six tokens step by step over the cache."""
    head = model(tokens[:, :-6], use_cache=True)
    parts, held = [head.logits], head.past_key_values
    for at in range(tokens.shape[1] - 6, tokens.shape[1]):
        step = model(tokens[:, at : at + 1], past_key_values=held, use_cache=True)
        parts, held = [*parts, step.logits], step.past_key_values
    return torch.cat(parts, 1)
