"""Models for an engine without files of weights: config.json of known shapes, and values that are the same for each of
its kernels, positive scales that every format holds exactly, activations of ordinary size."""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path
from typing import Any

LLAMA = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", hidden_act="silu", rms_norm_eps=1e-5, rope_theta=500000.0,
    max_position_embeddings=8192, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
QWEN = dict(
    architectures=["Qwen2ForCausalLM"], model_type="qwen2", hidden_act="silu", rms_norm_eps=1e-6, rope_theta=1e6,
    max_position_embeddings=32768, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, head_dim=128,
    vocab_size=152064,
)  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "tiny-llama": LLAMA
    | dict(hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
           head_dim=64, vocab_size=256, max_position_embeddings=512),
    "llama-3-8b": LLAMA
    | dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
           num_key_value_heads=8, head_dim=128, vocab_size=128256),
    "small-llama": LLAMA
    | dict(
        hidden_size=1024, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=2,
        head_dim=128, vocab_size=8192,
    ),
    "small-qwen3-moe": LLAMA
    | dict(
        architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", hidden_size=1024, intermediate_size=2048,
        moe_intermediate_size=512, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2, head_dim=128,
        vocab_size=8192, num_experts=16, num_experts_per_tok=4, norm_topk_prob=True, decoder_sparse_step=1,
        mlp_only_layers=[],
    ),
    "tiny-mixtral": LLAMA
    | dict(architectures=["MixtralForCausalLM"], model_type="mixtral", hidden_size=256, intermediate_size=256,
           num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=64, vocab_size=256,
           num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=512),
    "tiny-qwen3-moe": LLAMA
    | dict(architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", hidden_size=256, intermediate_size=512,
           moe_intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
           vocab_size=256, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True, decoder_sparse_step=1,
           mlp_only_layers=[], max_position_embeddings=512),
    "qwen2.5-7b": QWEN
    | dict(hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
           num_key_value_heads=4),
    "qwen2.5-14b": QWEN
    | dict(hidden_size=5120, intermediate_size=13824, num_hidden_layers=48, num_attention_heads=40,
           num_key_value_heads=8),
    "qwen3-30b-a3b": LLAMA
    | dict(architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", hidden_size=2048, intermediate_size=6144,
           moe_intermediate_size=768, num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
           vocab_size=151936, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True, decoder_sparse_step=1,
           mlp_only_layers=[]),
}  # fmt: skip


def _compressed(group: int, symmetric: bool, activations: dict[str, Any] | None) -> dict[str, Any]:
    weights = dict(num_bits=4, type="int", symmetric=symmetric, strategy="group", group_size=group, dynamic=False)
    if group == -1:
        weights |= dict(strategy="channel", group_size=None)
    ignored = ["lm_head", r"re:.*\.gate$"]
    scheme = dict(targets=["Linear"], input_activations=activations, output_activations=None, weights=weights)
    return dict(
        quant_method="compressed-tensors", format="pack-quantized", quantization_status="compressed", ignore=ignored,
        config_groups=dict(group_0=scheme),
    )  # fmt: skip


def _by_token(kind: str) -> dict[str, Any]:
    return dict(num_bits=8, type=kind, symmetric=True, strategy="token", dynamic=True)


def _floats(bits: int, activations: dict[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    """Weights of few bits that are floating-point numbers, activations of 16 bits unless they are stated."""
    made = _compressed(32, True, activations)
    stated = dict(num_bits=bits, type="float", symmetric=True, dynamic=False) | weights
    made["config_groups"]["group_0"]["weights"] = stated
    return made | dict(format="mxfp4-pack-quantized" if bits == 4 else "float-quantized")


def _gptq(group: int) -> dict[str, Any]:
    """All layers but the router, which vLLM would tell by the files' dtypes: what it fuses by either of its names."""
    layers = [f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj")]
    layers += [f"mlp.{name}" for name in ("gate_proj", "up_proj", "gate_up_proj", "down_proj", "experts")]
    return dict(
        quant_method="gptq", bits=4, group_size=group, desc_act=False, sym=True, lm_head=False,
        checkpoint_format="gptq", modules_in_block_to_quantize=layers,
    )  # fmt: skip


QUANTIZATION = {
    "none": lambda group: None,
    "awq": lambda group: dict(quant_method="awq", bits=4, group_size=group, zero_point=True, version="gemm"),
    "gptq": _gptq,
    "w4a16": lambda group: _compressed(group, True, None),
    "w4a16-zeros": lambda group: _compressed(group, False, None),
    "w4a8": lambda group: _compressed(group, True, _by_token("int")),
    "w4a8-int": lambda group: _compressed(group, True, _by_token("int")) | dict(format="int-quantized"),
    "w4a8-e4m3": lambda group: _compressed(group, True, _by_token("float")),
    "mxfp4": lambda group: _floats(4, strategy="group", group_size=32),
    "fp8-weights": lambda group: _floats(8, strategy="channel"),
    "fp8": lambda group: _floats(8, _by_token("float"), strategy="channel"),
}
"""Name -> quantization_config of a group size; "w4a8" keeps its codes in words, "w4a8-int" in bytes; "fp8" has
activations of 8 bits, too."""


def write_config(
    folder: Path, shape: str, quantization: str, group: int, dtype: str = "float16", layers: int | None = None,
    positions: int = 0,
) -> Path:  # fmt: skip
    """The folder, with a config.json; rotary tables have at least so many positions."""
    config = SHAPES[shape] | dict(torch_dtype=dtype)
    config["max_position_embeddings"] = max(config["max_position_embeddings"], positions)
    config |= {} if layers is None else dict(num_hidden_layers=layers)
    if stated := QUANTIZATION[quantization](group):
        if quantization == "awq" and "num_experts" in config:
            stated["modules_to_not_convert"] = ["mlp.gate"]  # the router
        config["quantization_config"] = stated
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return folder


def fill(name: str, tensor: Any) -> None:
    """Values of one parameter of vLLM, by its name alone; in its dtype, on its device.

    Scales are one power of two or the next, which int8, e4m3 and 16-bit kernels hold alike.
    """
    import torch

    seed = torch.Generator(device=tensor.device).manual_seed(zlib.crc32(name.encode()))
    leaf = name.rsplit(".", 1)[-1]
    random = lambda low, high, dtype=torch.int64: torch.randint(
        low, high, tensor.shape, generator=seed, device=tensor.device, dtype=dtype
    )
    with torch.no_grad():
        if leaf.endswith(("weight_shape", "g_idx", "g_idx_sort_indices", "workspace")):
            return
        if leaf in ("q_scale", "k_scale", "v_scale", "prob_scale"):
            return  # of a cache: as where a checkpoint has none
        if tensor.dtype == torch.int32 and "zero" in leaf:
            tensor.copy_((random(7, 10) * 0x11111111 + 2**31) % 2**32 - 2**31)
        elif tensor.dtype == torch.int32:
            tensor.copy_(random(-(2**31), 2**31))
        elif tensor.dtype == torch.int8:
            tensor.copy_(random(-8, 8))
        elif tensor.dtype == torch.uint8:  # powers of two of MXFP4, or two of its codes
            tensor.copy_(random(118, 121) if "scale" in leaf else random(0, 256))
        elif "scale" in leaf:
            tensor.copy_(2.0 ** (random(0, 2) - 10))
        elif "norm" in name or tensor.ndim == 1:
            tensor.fill_(1.0 if "bias" not in leaf else 0.125)
        elif tensor.is_floating_point():
            tensor.copy_(
                torch.empty_like(tensor, dtype=torch.float32).normal_(generator=seed) / math.sqrt(tensor.shape[-1])
            )


def register_loader(name: str = "seeded") -> str:
    """A load format of vLLM that fills parameters so; the name."""
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER as known
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    if name in known:
        return name

    @register_model_loader(name)
    class Seeded(BaseModelLoader):
        def download_model(self, model_config: Any) -> None:
            """There are no files."""

        def load_weights(self, model: Any, model_config: Any) -> None:
            for each, parameter in model.named_parameters():
                fill(each, parameter.data)

    return name
