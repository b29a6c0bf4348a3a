"""Attention and experts as functions of transformers: architectures that terrazzo.load does not know, on the CPU."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from terrazzo.integrations.transformers import new_cache, pack  # noqa: E402
from terrazzo.lowering.errors import ArgumentError  # noqa: E402
from terrazzo.nn import Linear  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

SIZES = dict(
    hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
    vocab_size=64, max_position_embeddings=256, pad_token_id=0, eos_token_id=None, bos_token_id=None,
)  # fmt: skip
CONFIGS = {  # sinks, windows, interleaved and transposed experts with biases; norms of q and k, experts; one for qkv
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SIZES, head_dim=64, num_local_experts=4, num_experts_per_tok=2, sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "olmoe": lambda: transformers.OlmoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2),
    "phi3": lambda: transformers.Phi3Config(**SIZES),
}  # fmt: skip
TOKENS = torch.randint(1, 64, (2, 9), generator=torch.Generator().manual_seed(0))
GREEDY = dict(max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)


def made(name: str):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float16, attn_implementation="eager").eval()
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * 0.05
    return model


def mask_of(padding: int) -> torch.Tensor:
    mask = torch.ones_like(TOKENS)
    mask[1, :padding] = 0
    return mask


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("padding", [0, 4])
@torch.no_grad()
def test_attention_over_our_cache_is_that_of_eager_modules(name, padding):
    """Logits of a prompt and of steps behind it, sequences padded on the left or not."""
    model, mask = made(name), mask_of(padding)
    at = (mask.cumsum(1) - 1).clamp_min(0)
    wanted = model(TOKENS, attention_mask=mask, position_ids=at).logits
    model.set_attn_implementation("terrazzo")
    cache = new_cache(model, 2, 32)
    parts = [
        model(
            TOKENS[:, begin:end], attention_mask=mask[:, :end], position_ids=at[:, begin:end], past_key_values=cache,
            use_cache=True,
        ).logits
        for begin, end in ((0, 6), (6, 7), (7, 8), (8, 9))
    ]  # fmt: skip
    got = torch.cat(parts, 1)[mask.bool()].float()
    wanted = wanted[mask.bool()].float()
    assert (got - wanted).norm() < 0.02 * wanted.norm()
    assert [cache.kv.length(s) for s in cache.sequences] == [9, 9 - padding]


@pytest.mark.parametrize("name", ["gpt_oss", "phi3"])
@torch.no_grad()
def test_generate_gives_the_tokens_of_eager_modules(name):
    model, mask = made(name), mask_of(3)
    wanted = model.generate(TOKENS, attention_mask=mask, **GREEDY)
    model.set_attn_implementation("terrazzo")
    found = model.generate(TOKENS, attention_mask=mask, past_key_values=new_cache(model, 2, 32), **GREEDY)
    assert found.tolist() == wanted.tolist()


def dequantized(module, packed) -> torch.Tensor:
    found = torch.stack([packed[e].dequantize() for e in range(len(packed))])
    return found.transpose(1, 2).contiguous() if module.is_transposed else found


@pytest.mark.parametrize("name", ["gpt_oss", "olmoe"])
@torch.no_grad()
def test_packed_experts_multiply_what_their_codes_stand_for(name):
    model, exact = made(name), made(name)
    count = pack(model, "w4a16-g64")
    assert count == 2 * (4 + 1) and model.config._experts_implementation == "terrazzo"
    exact.set_experts_implementation("eager")
    theirs = dict(exact.named_modules())
    for path, module in model.named_modules():
        if isinstance(module, Linear):
            theirs[path].weight.data = module.packed.dequantize()
        if hasattr(module, "terrazzo"):
            assert not any(True for _ in module.parameters(recurse=False))
            theirs[path].gate_up_proj.data = dequantized(module, module.terrazzo.up_proj.packed)
            theirs[path].down_proj.data = dequantized(module, module.terrazzo.down_proj.packed)
    got, wanted = model(TOKENS).logits.float(), exact(TOKENS).logits.float()
    assert (got - wanted).norm() < 0.02 * wanted.norm()


def test_what_the_functions_do_not_serve_is_refused_by_name():
    model = made("gpt_oss")
    model.set_attn_implementation("terrazzo")
    with pytest.raises(ArgumentError, match="past_key_values.*new_cache"):
        model(TOKENS)
    with pytest.raises(ArgumentError, match="^kv = 'int3'"):
        new_cache(model, 2, 32, kv="int3")
    model.config.layer_types = ["chunked_attention"] * 2
    with pytest.raises(ArgumentError, match="layer_types.*chunked"):
        new_cache(model, 2, 32)
    model = made("olmoe")
    model.config._experts_implementation = "terrazzo"
    with pytest.raises(ArgumentError, match="float experts"):
        model(TOKENS)
    with pytest.raises(ArgumentError, match="format"):
        pack(model, "w3")
