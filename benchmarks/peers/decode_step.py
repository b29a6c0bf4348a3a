"""transformers' own f16 step of the same shapes: static cache, one CUDA graph, as it is and compiled by torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

NAMES = ("transformers_f16", "transformers_compiled")


def missing(names: Sequence[str]) -> dict[str, str]:
    """name -> why it cannot run here."""
    if importlib.util.find_spec("transformers") is None:
        return dict.fromkeys(names, "transformers is not installed")
    return {}


def config(layers: int) -> Any:
    """Of Llama-3-8B with this many layers."""
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0}, attn_implementation="sdpa",
    )  # fmt: skip


def model(layers: int, made: Any = None, device: str = "cuda") -> Any:
    """A LlamaForCausalLM with random f16 weights. `made`: its config, for tests."""
    import torch
    from transformers import LlamaForCausalLM

    with torch.device(device):
        found = LlamaForCausalLM._from_config(made or config(layers), dtype=torch.float16)
    return found.eval()


def filled_cache(model: Any, batch: int, context: int, device: str = "cuda") -> tuple[Any, Any]:
    """(static cache of `context` tokens, int64 [layers] of tokens that its layers take for stored)."""
    import torch
    from transformers import StaticCache

    c = model.config
    cache = StaticCache(config=c, max_cache_len=context)
    lengths = torch.zeros(len(cache.layers), dtype=torch.int64, device=device)
    for index, layer in enumerate(cache.layers):
        like = torch.zeros(batch, c.num_key_value_heads, 1, c.head_dim, dtype=torch.float16, device=device)
        layer.lazy_initialization(like, like)
        for stored in (layer.keys, layer.values):
            stored.normal_()
        layer.cumulative_length = lengths[index]
    return cache, lengths


def step_of(model: Any, name: str, batch: int, context: int, new: int, device: str = "cuda") -> Any:
    """A call that makes logits of the newest token of each sequence.

    A prefill (`new` tokens, as many as `context`) attends to itself without a cache, as its first call does.
    """
    import torch

    tokens = torch.randint(0, model.config.vocab_size, (batch, new), device=device)
    positions = torch.arange(context - new, context, device=device).expand(batch, new)
    forward = model.forward
    if name == "transformers_compiled":
        torch._dynamo.reset()
        forward = torch.compile(forward, dynamic=False)
    if new > 1:
        return lambda: forward(input_ids=tokens, position_ids=positions, use_cache=False, logits_to_keep=1).logits
    cache, lengths = filled_cache(model, batch, context, device)

    def step() -> Any:
        lengths.fill_(context - new)  # its layers count on
        return forward(
            input_ids=tokens, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1
        ).logits

    return step


def step_ms(model: Any, name: str, batch: int, context: int, new: int, budget_ms: float) -> float:
    """Median time of the step as one CUDA graph, milliseconds."""
    import torch
    from terrazzo.autotune import measure

    with torch.no_grad():
        return round(measure.time_calls([step_of(model, name, batch, context, new)], budget_ms).us / 1e3, 4)
