"""Greedy tokens of each architecture beside those of transformers' own float model, on the CPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from terrazzo.nn import generation
from terrazzo.nn.loading import load
from test_loading import CONFIGS, TOKENS, float_model, with_dequantized

QUICK = ("llama", "mixtral")
every = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CONFIGS]
SPARSE = ("mixtral", "qwen3_moe")
GREEDY = dict(max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0)
PADDED = 4


@pytest.mark.parametrize("name", every)
@torch.no_grad()
def test_greedy_tokens_are_those_of_the_float_model(name):
    """By `model.generate`, padded on the left and alone, and by `terrazzo.nn.generation.generate`.

    Weights and cache have 16 bits. Experts have no operator for such weights: theirs have 4, and the float model has
    what those stand for.
    """
    exact = float_model(name)
    quantize = "w4a16-g64" if name in SPARSE else None
    loaded = load(exact.state_dict(), config=exact.config, device="cpu", quantize=quantize, kv="float16")
    if quantize:
        exact = with_dequantized(exact, loaded)
    mask = torch.ones_like(TOKENS)
    mask[1, :PADDED] = 0
    made = loaded.generate(TOKENS, attention_mask=mask, **GREEDY)
    prompts = [TOKENS[0], TOKENS[1, PADDED:]]
    for row, prompt in enumerate(prompts):
        alone = exact.generate(prompt[None], attention_mask=torch.ones_like(prompt[None]), **GREEDY)[0]
        assert made[row, TOKENS.shape[1] - len(prompt) :].tolist() == alone.tolist()
    new = generation.generate(loaded, prompts, max_new_tokens=GREEDY["max_new_tokens"])
    assert [tokens.tolist() for tokens in new] == made[:, TOKENS.shape[1] :].tolist()
