"""Published models: the linear layers and attention that serving them runs.

What benchmarks measure and what `terrazzo compile --model` compiles. Shapes are (N, K) = (output features, input
features). The numbers are those of the models' config.json files on the Hugging Face hub, each read in the table of
Lightning-AI/litgpt (litgpt/config.py at 26857050, which names the file of every model) or, where that has no entry
(LLaMA-1, Qwen2, Yi), in claims.md.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from terrazzo.lowering.errors import ArgumentError


@dataclass(frozen=True)
class Layer:
    """One linear layer: y[M, n] = x[M, k] w[n, k]^T. `count` such layers stand side by side (experts)."""

    name: str
    n: int
    k: int
    count: int = 1
    bias: bool = False


@dataclass(frozen=True)
class Architecture:
    """A decoder-only transformer with grouped-query attention and gated feed-forward layers.

    Attributes:
        hidden, ffn: features of the residual stream, and between gate_up and down; ffn 0 where every layer has experts.
        heads, kv_heads, head_dim: of attention.
        qkv_bias, o_bias, mlp_bias: whether these layers have a bias.
        experts, top_k, expert_ffn: routed experts, how many a token takes, and their ffn; 0 for none.
        shared_ffn: ffn of the shared experts together; 0 for none.
        softcap, sinks: whether attention caps its logits, has a sink for each head.
    """

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    softcap: bool = False
    sinks: bool = False

    def projections(self) -> tuple[Layer, ...]:
        """The linear layers as checkpoints store them, by the names that Llama gave them; experts are one entry."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        made = [Layer(f"{name}_proj", rows, self.hidden, bias=self.qkv_bias) for name, rows in zip("qkv", (q, kv, kv))]
        made.append(Layer("o_proj", self.hidden, q, bias=self.o_bias))
        mlps = {"": (self.ffn, 1), "shared_expert.": (self.shared_ffn, 1), "experts.": (self.expert_ffn, self.experts)}
        for prefix, (ffn, count) in mlps.items():
            for name in ("gate_proj", "up_proj", "down_proj") if ffn else ():
                n, k = (self.hidden, ffn) if name == "down_proj" else (ffn, self.hidden)
                made.append(Layer(prefix + name, n, k, count, self.mlp_bias))
        return tuple(made)

    def fused(self) -> tuple[Layer, ...]:
        """The linear layers that serving engines run: q, k and v as one, gate and up as one."""
        own = {layer.name: layer for layer in self.projections()}
        made = [Layer("qkv", sum(own[f"{name}_proj"].n for name in "qkv"), self.hidden, bias=self.qkv_bias)]
        made.append(Layer("o", self.hidden, own["o_proj"].k, bias=self.o_bias))
        for prefix in ("", "shared_expert.", "experts."):
            up, down = own.get(f"{prefix}up_proj"), own.get(f"{prefix}down_proj")
            if up and down:
                short = "" if prefix == "experts." and not self.ffn else prefix
                made.append(Layer(f"{short}gate_up", 2 * up.n, up.k, up.count, self.mlp_bias))
                made.append(Layer(f"{short}down", down.n, down.k, down.count, self.mlp_bias))
        return tuple(made)

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> Architecture:
        """The architecture that a Hugging Face config.json states, or that of its text model.

        Raises:
            ArgumentError: a field that is missing or no number, or attention of another kind.
        """
        config = next(
            (part for part in (config.get("text_config"), config.get("llm_config")) if _is_model(part)), config
        )
        if config.get("kv_lora_rank"):
            known = "grouped-query attention has no kv_lora_rank"
            raise ArgumentError("kv_lora_rank", config["kv_lora_rank"], known, "compile its layers by --shape")
        heads, experts = _count(config, "num_attention_heads"), _experts(config)
        hidden, ffn = _count(config, "hidden_size"), _count(config, "intermediate_size", 0)
        if config.get("head_dim") is None and hidden % heads:
            constraint = f"is no multiple of num_attention_heads = {heads}, and there is no head_dim"
            raise ArgumentError("hidden_size", hidden, constraint, "correct config.json")
        qkv_bias = config.get("attention_bias", config.get("model_type") in ("qwen2", "qwen2_moe"))
        own = _count(config, "moe_intermediate_size", ffn) if experts else 0
        dense = ffn if not experts or _has_dense_layers(config) else 0
        return cls(
            hidden=hidden,
            ffn=dense,
            heads=heads,
            kv_heads=_count(config, "num_key_value_heads", heads),
            head_dim=_count(config, "head_dim", hidden // heads),
            qkv_bias=bool(qkv_bias),
            o_bias=bool(config.get("attention_bias")) and config.get("model_type") not in ("qwen2", "qwen2_moe"),
            mlp_bias=bool(config.get("mlp_bias")),
            experts=experts,
            top_k=_count(config, "num_experts_per_tok", 0),
            expert_ffn=own,
            shared_ffn=_count(config, "shared_expert_intermediate_size", 0)
            or _count(config, "n_shared_experts", 0) * own,
            softcap=bool(config.get("attn_logit_softcapping")),
            sinks=config.get("model_type") == "gpt_oss",
        )


def _is_model(part: object) -> bool:
    return isinstance(part, Mapping) and "hidden_size" in part


def _experts(config: Mapping[str, Any]) -> int:
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    return next((_count(config, name) for name in names if config.get(name)), 0)


def _has_dense_layers(config: Mapping[str, Any]) -> bool:
    """Whether some layers of a model with experts have none."""
    sparse = (config.get("decoder_sparse_step") or 1) == 1 and (config.get("moe_layer_freq") or 1) == 1
    return bool(not sparse or config.get("mlp_only_layers") or config.get("first_k_dense_replace"))


def layer_counts(config: Mapping[str, Any]) -> tuple[int, int]:
    """Decoder layers of a Hugging Face config.json, and those of them that have experts.

    Raises:
        ArgumentError: a number that is none.
    """
    config = next((part for part in (config.get("text_config"), config.get("llm_config")) if _is_model(part)), config)
    depth, first = _count(config, "num_hidden_layers", 1), _count(config, "first_k_dense_replace", 0)
    if not _experts(config):
        return depth, 0
    steps = [config.get(name) or 1 for name in ("decoder_sparse_step", "moe_layer_freq")]
    step = max([it for it in steps if type(it) is int], default=1)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        constraint = "must be a list of layers in config.json"
        raise ArgumentError("mlp_only_layers", dense, constraint, "correct it, or download it again")
    return depth, sum(at >= first and at not in dense and (at + 1) % step == 0 for at in range(depth))


def _count(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    value = default if value is None else value
    most = MOST_PARTS if "size" not in name else MOST_SIZE
    if type(value) is not int or not (0 if default == 0 else 1) <= value <= most:
        constraint = f"must be a positive number in config.json, at most {most}"
        raise ArgumentError(name, value, constraint, "correct it, or download it again")
    return value


MOST_PARTS, MOST_SIZE = 1 << 16, 1 << 24
"""Heads or experts of a layer, and features of one: beyond, a config.json is no model's."""


def _qwen25(hidden: int, ffn: int, heads: int, kv_heads: int, head_dim: int = 128) -> Architecture:
    return Architecture(hidden, ffn, heads, kv_heads, head_dim, qkv_bias=True)


def _sparse(hidden: int, heads: int, kv_heads: int, experts: int, top_k: int, expert_ffn: int) -> Architecture:
    return Architecture(hidden, 0, heads, kv_heads, experts=experts, top_k=top_k, expert_ffn=expert_ffn)


ARCHITECTURES: dict[str, Architecture] = {
    "llama-1-30b": Architecture(6656, 17920, 52, 52),
    "llama-2-7b": Architecture(4096, 11008, 32, 32),
    "llama-2-13b": Architecture(5120, 13824, 40, 40),
    "llama-2-70b": Architecture(8192, 28672, 64, 8),
    "llama-3-8b": Architecture(4096, 14336, 32, 8),
    "llama-3-70b": Architecture(8192, 28672, 64, 8),
    "mistral-7b": Architecture(4096, 14336, 32, 8),
    "mixtral-8x7b": _sparse(4096, 32, 8, 8, 2, 14336),
    "qwen2-72b": _qwen25(8192, 29568, 64, 8),
    "qwen3-8b": Architecture(4096, 12288, 32, 8),
    "qwen3-32b": Architecture(5120, 25600, 64, 8),
    "yi-34b": Architecture(7168, 20480, 56, 8),
    "llama-3.1-8b": Architecture(4096, 14336, 32, 8),
    "llama-3.1-70b": Architecture(8192, 28672, 64, 8),
    "llama-3.1-405b": Architecture(16384, 53248, 128, 8),
    "llama-3.2-1b": Architecture(2048, 8192, 32, 8, head_dim=64),
    "llama-3.2-3b": Architecture(3072, 8192, 24, 8),
    "llama-3.3-70b": Architecture(8192, 28672, 64, 8),
    "mistral-large": Architecture(12288, 28672, 96, 8),
    "mixtral-8x22b": _sparse(6144, 48, 8, 8, 2, 16384),
    "qwen2.5-0.5b": _qwen25(896, 4864, 14, 2, head_dim=64),
    "qwen2.5-1.5b": _qwen25(1536, 8960, 12, 2),
    "qwen2.5-3b": _qwen25(2048, 11008, 16, 2),
    "qwen2.5-7b": _qwen25(3584, 18944, 28, 4),
    "qwen2.5-14b": _qwen25(5120, 13824, 40, 8),
    "qwen2.5-32b": _qwen25(5120, 27648, 40, 8),
    "qwen2.5-72b": _qwen25(8192, 29568, 64, 8),
    "qwen3-0.6b": Architecture(1024, 3072, 16, 8),
    "qwen3-1.7b": Architecture(2048, 6144, 16, 8),
    "qwen3-4b": Architecture(2560, 9728, 32, 8),
    "qwen3-14b": Architecture(5120, 17408, 40, 8),
    "qwen3-30b-a3b": _sparse(2048, 32, 4, 128, 8, 768),
    "qwen3-235b-a22b": _sparse(4096, 64, 4, 128, 8, 1536),
    "gemma-3-1b": Architecture(1152, 6912, 4, 1, head_dim=256),
    "gemma-3-4b": Architecture(2560, 10240, 8, 4, head_dim=256),
    "gemma-3-12b": Architecture(3840, 15360, 16, 8, head_dim=256),
    "gemma-3-27b": Architecture(5376, 21504, 32, 16),
    "phi-4": Architecture(5120, 17920, 40, 10),
    "phi-4-mini": Architecture(3072, 8192, 24, 8),
}
MODELS: dict[str, tuple[Layer, ...]] = {name: model.fused() for name, model in ARCHITECTURES.items()}
"""Fused linear layers of each model: one GPU, no tensor parallelism."""
MEASURED = tuple(ARCHITECTURES)[: list(ARCHITECTURES).index("yi-34b") + 1]
"""Models whose layers benchmarks and tuned records cover."""


def get_model(name: str) -> tuple[Layer, ...]:
    """The fused layers of a model.

    Raises:
        ArgumentError: a name that is not in MODELS; the message has the most similar one.
    """
    if name not in MODELS:
        similar = difflib.get_close_matches(str(name).lower(), MODELS, n=1)
        hint = f"did you mean {similar[0]!r}? " if similar else ""
        raise ArgumentError("model", name, "is not in the table of models", f"{hint}use one of {', '.join(MODELS)}")
    return MODELS[name]


def shapes(models: list[str] | tuple[str, ...]) -> dict[tuple[int, int], list[str]]:
    """Distinct (N, K) of some models, in order of appearance -> the layers that have it, "llama-3-8b.qkv"."""
    found: dict[tuple[int, int], list[str]] = {}
    for model in models:
        for layer in get_model(model):
            found.setdefault((layer.n, layer.k), []).append(f"{model}.{layer.name}")
    return found
