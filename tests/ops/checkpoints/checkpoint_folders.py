"""Small checkpoints of every convention, in memory and in folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from terrazzo.layouts.converters import codebook
from terrazzo.ops import nf4, w4a8, w4a16
from terrazzo.ops.w4a8 import fp8

N, K, G = 64, 256, 128
LAYER = "model.layers.0.mlp.down_proj"
NF4 = torch.tensor(codebook.NF4)


def words(codes: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """int32 [R, C/8] of codes [R, C]: code 8c + j of a row in nibble order[j] of word c."""
    shifts = 4 * torch.tensor(order)
    return (codes.long().view(len(codes), -1, 8) << shifts).sum(-1).to(torch.int64).to(torch.int32)


def stored(convention: str, seed: int = 0, n: int = N, k: int = K, group: int = G) -> tuple[dict, torch.Tensor]:
    """(tensors of a layer by what stands behind its prefix, the float64 weight that they mean)."""
    if convention.startswith("gptq2"):
        made, weight = two_bits(seed, n, k, group, convention == "gptq2_sym")
        return {leaf: t.contiguous().clone() for leaf, t in made.items()}, weight
    rng = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (n, k), generator=rng)
    zeros = torch.randint(1, 16, (n, k // group), generator=rng)
    scales = (torch.rand(n, k // group, generator=rng) + 0.5).half()
    if convention in ("gptq_sym", "pack", "int", "w4a8_pack", "auto_round_sym"):
        zeros.fill_(8)
    if convention in ("int", "w4a8_pack"):
        scales = scales[:, :1].expand(n, k // group)
    spread = lambda t: t.repeat_interleave(group, 1)
    weight = (codes - spread(zeros)).double() * spread(scales).double()
    along_k = lambda t: words(t).T.contiguous()
    if convention == "awq":
        order = (0, 4, 1, 5, 2, 6, 3, 7)
        made = {"qweight": words(codes.T, order), "qzeros": words(zeros.T, order), "scales": scales.T.contiguous()}
    elif convention in ("gptq", "gptq_sym", "auto_round_sym"):
        made = {"qweight": along_k(codes), "qzeros": words((zeros - 1).T), "scales": scales.T.contiguous()}
        made |= {"g_idx": (torch.arange(k) // group).int()} if convention != "auto_round_sym" else {}
    elif convention == "gptq_v2":
        made = {"qweight": along_k(codes), "qzeros": words(zeros.T), "scales": scales.T.contiguous()}
    elif convention in ("pack", "pack_asym", "w4a8_pack"):
        made = {"weight_packed": words(codes), "weight_scale": scales, "weight_shape": torch.tensor([n, k])}
        made |= {"weight_zero_point": along_k(zeros.T)} if convention == "pack_asym" else {}
    elif convention == "int":
        made = {"weight": (codes - 8).to(torch.int8), "weight_scale": scales}
    elif convention == "bitsandbytes":
        state = json.dumps({"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [n, k]}).encode()
        absmax, pairs = torch.rand(n * k // 64, generator=rng) + 0.5, codes.to(torch.uint8).view(-1, 2)
        made = {"weight": pairs[:, :1] << 4 | pairs[:, 1:], "weight.absmax": absmax, "weight.quant_map": NF4}
        made["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(state), dtype=torch.uint8)
        weight = (NF4.double()[codes].view(-1, 64) * absmax.double()[:, None]).view(n, k)
    else:
        raise KeyError(convention)
    return {leaf: t.contiguous().clone() for leaf, t in made.items()}, weight


def two_bits(seed: int, n: int, k: int, group: int, symmetric: bool) -> tuple[dict, torch.Tensor]:
    """GPTQ v1 in 2 bits: field i of word c is the code of k = 16c + i, zero points along N less one."""
    rng = torch.Generator().manual_seed(seed)
    fields = lambda t: (t.long().view(len(t), -1, 16) << 2 * torch.arange(16)).sum(-1).to(torch.int32)
    codes, zeros = torch.randint(0, 4, (n, k), generator=rng), torch.randint(1, 4, (n, k // group), generator=rng)
    zeros = torch.full_like(zeros, 2) if symmetric else zeros
    scales = (torch.rand(n, k // group, generator=rng) + 0.5).half()
    spread = lambda t: t.repeat_interleave(group, 1)
    made = {"qweight": fields(codes).T, "qzeros": fields((zeros - 1).T), "scales": scales.T}
    return made, (codes - spread(zeros)).double() * spread(scales).double()


def compressed(x: dict | None = None, **weights: Any) -> dict[str, Any]:
    """A compressed-tensors config as llm-compressor writes it."""
    stated = {
        "actorder": None, "block_structure": None, "dynamic": False, "group_size": G, "num_bits": 4,
        "observer": "minmax", "observer_kwargs": {}, "strategy": "group", "symmetric": True, "type": "int",
    }  # fmt: skip
    group = {"input_activations": x, "output_activations": None, "targets": ["Linear"], "weights": stated | weights}
    return {
        "config_groups": {"group_0": group}, "format": "pack-quantized", "global_compression_ratio": None,
        "ignore": ["lm_head"], "kv_cache_scheme": None, "quant_method": "compressed-tensors",
        "quantization_status": "compressed", "sparsity_config": {}, "transform_config": {}, "version": "0.12.2",
    }  # fmt: skip


DYNAMIC = {"dynamic": True, "num_bits": 8, "observer": None, "strategy": "token", "symmetric": True, "type": "int"}
AWQ = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": G,
    "zero_point": True,
    "version": "gemm",
    "modules_to_not_convert": None,
}
GPTQ = {
    "bits": 4, "group_size": G, "sym": False, "desc_act": False, "quant_method": "gptq", "checkpoint_format": "gptq",
    "lm_head": False, "pack_dtype": "int32", "meta": {"quantizer": ["gptqmodel:5.7.0"], "damp_percent": 0.05},
}  # fmt: skip
AUTO_ROUND = {
    "quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": G, "sym": True,
    "data_type": "int", "autoround_version": "0.9.0", "block_name_to_quantize": "model.layers", "iters": 200,
    "extra_config": {"lm_head": {"bits": 16}},
}  # fmt: skip
BITSANDBYTES = {
    "_load_in_4bit": True, "_load_in_8bit": False, "bnb_4bit_compute_dtype": "bfloat16",
    "bnb_4bit_quant_storage": "uint8", "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": False,
    "llm_int8_enable_fp32_cpu_offload": False, "llm_int8_has_fp16_weight": False, "llm_int8_skip_modules": None,
    "llm_int8_threshold": 6.0, "load_in_4bit": True, "load_in_8bit": False, "quant_method": "bitsandbytes",
}  # fmt: skip
"""As transformers 5 writes a BitsAndBytesConfig."""
KINDS: dict[str, tuple[str, dict[str, Any], Any]] = {
    "awq": ("awq", AWQ, w4a16),
    "gptq": ("gptq", GPTQ, w4a16),
    "gptq_sym": ("gptq_sym", GPTQ | {"sym": True}, w4a16),
    "gptq_v2": ("gptq_v2", GPTQ | {"checkpoint_format": "gptq_v2"}, w4a16),
    "gptq2": ("gptq2", GPTQ | {"bits": 2}, w4a16),
    "gptq2_sym": ("gptq2_sym", GPTQ | {"bits": 2, "sym": True}, w4a16),
    "auto_round": ("auto_round_sym", AUTO_ROUND, w4a16),
    "pack": ("pack", compressed(), w4a16),
    "pack_asym": ("pack_asym", compressed(symmetric=False), w4a16),
    "w4a8_int": ("int", compressed(DYNAMIC) | {"format": "int-quantized"}, w4a8),
    "w4a8_pack": ("w4a8_pack", compressed(DYNAMIC), w4a8),
    "bitsandbytes": ("bitsandbytes", BITSANDBYTES, nf4),
    "fp8": ("pack", compressed(DYNAMIC | {"type": "float"}), fp8),
}
"""Name -> (convention of `stored`, quantization_config, family that reads it)."""


def tensors(convention: str, *names: str) -> dict[str, torch.Tensor]:
    return {f"{name}.{leaf}": t for name in names or (LAYER,) for leaf, t in stored(convention)[0].items()}


def write(
    folder: Path, held: dict[str, torch.Tensor], config: Any = None, shards: dict[str, str] | None = None
) -> Path:
    """A Hugging Face folder; `shards` maps tensors to files, through an index."""
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": config}))
    if shards is None:
        save_file(held, folder / "model.safetensors")
        return folder
    for shard in set(shards.values()):
        save_file({name: t for name, t in held.items() if shards.get(name) == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    return folder
