"""Random calls of tiny models of each architecture beside transformers' own float models, on the CPU."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from gpt_oss_folder import config_of, written  # noqa: E402
from gpt_oss_folder import model_of as gpt_oss  # noqa: E402
from terrazzo.nn import generation  # noqa: E402
from terrazzo.nn.architectures import MODELS  # noqa: E402
from terrazzo.nn.loading import load  # noqa: E402
from test_loading import CONFIGS, with_dequantized  # noqa: E402

NAMES = {**{kind: kind for kind in MODELS}, "gemma3_text": "gemma3"}
CASES = 3
VOCABULARY = 64


def small(kind: str):
    """The smallest config that has all of its architecture: of Gemma 3, a layer of each kind.

    All experts are chosen, so that rounding turns no choice of the router.
    """
    config = CONFIGS[NAMES[kind]]()
    sizes = dict(hidden_size=64, intermediate_size=64, num_attention_heads=2, num_key_value_heads=1)
    sizes |= dict(num_local_experts=2, num_experts=2, moe_intermediate_size=64, mlp_only_layers=[])
    layers = 2 if kind == "gemma3_text" else 1
    sizes |= dict(num_experts_per_tok=2, num_hidden_layers=layers)
    for name, value in sizes.items():
        if hasattr(config, name):
            setattr(config, name, value)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    return config


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """(ours, transformers' model of the weights that ours stand for) of an architecture."""

    @cache
    def of(kind: str):
        if kind == "gpt_oss":
            config = config_of(num_experts_per_tok=4)
            folder, exact = written(tmp_path_factory.mktemp(kind), gpt_oss(config), config)
            return load(folder, device="cpu", dtype=torch.float16), exact
        sparse = kind in ("mixtral", "qwen3_moe")
        config = small(kind)
        torch.manual_seed(0)
        exact = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        for parameter in exact.parameters():
            parameter.data += torch.randn_like(parameter) * 0.05
        loaded = load(exact.state_dict(), config=exact.config, device="cpu", quantize="w4a16-g64" if sparse else None)
        return loaded, with_dequantized(exact, loaded) if sparse else exact

    return of


def close(got: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    off = float((got.float() - exact).norm() / exact.norm())
    assert off < (0.06 if dtype == torch.bfloat16 else 0.015), off


def check_greedy(exact, prompt: list[int], made: list[int], ends: list[int], most: int, dtype: torch.dtype) -> None:
    """Each token is the float model's best one, or nearly; the last one is the first end token, or there are `most`."""
    logits = exact(torch.tensor([[*prompt, *made]])).logits[0, len(prompt) - 1 : -1]
    slack = 2 * (2**-6 if dtype == torch.bfloat16 else 2**-9) * logits.abs().amax(-1)
    chosen = logits.gather(1, torch.tensor(made)[:, None])[:, 0]
    assert bool((chosen >= logits.amax(-1) - slack).all()), (made, logits.argmax(-1).tolist())
    assert not set(made[:-1]) & set(ends) and (len(made) == most or made[-1] in ends), (made, ends)


@pytest.mark.random
@pytest.mark.parametrize("kind", MODELS)
@torch.no_grad()
def test_random_calls_are_those_of_transformers(pair, kind, seed):
    """Padding on the left, columns in random chunks, tokens or what the model's own embedding makes of them.

    Then greedy texts by both ways to generate, with random end tokens."""
    ours, exact = pair(kind)
    dtype, draw = ours.dtype, random.Random(f"{seed} {kind}")
    for _ in range(CASES):
        rows, columns, most = draw.randrange(1, 4), draw.randrange(3, 9), draw.randrange(1, 4)
        ids = torch.tensor([[draw.randrange(VOCABULARY) for _ in range(columns)] for _ in range(rows)])
        padding = [draw.choice([0, draw.randrange(columns)]) for _ in range(rows)]
        mask = (torch.arange(columns) >= torch.tensor(padding)[:, None]).long()
        at = (mask.cumsum(1) - 1).clamp_min(0)
        wanted = exact(ids, attention_mask=mask, position_ids=at).logits
        held, found, begin = None, [], 0
        while begin < columns:
            end = min(columns, begin + draw.choice([1, 1, 2, 5]))
            part = ids[:, begin:end]
            given = draw.choice([dict(input_ids=part), dict(inputs_embeds=ours.get_input_embeddings()(part))])
            given |= draw.choice([{}, dict(position_ids=at[:, begin:end])])
            step = ours(**given, attention_mask=mask[:, :end], past_key_values=held, use_cache=True)
            held, begin, found = step.past_key_values, end, [*found, step.logits]
        close(torch.cat(found, 1)[mask.bool()], wanted[mask.bool()], dtype)

        prompts = [row[kept.bool()].tolist() for row, kept in zip(ids, mask)]
        first = wanted[0, -1].topk(2).indices.tolist()
        ends = draw.choice([[], [first[0]], [first[1], draw.randrange(VOCABULARY)]])
        options = dict(attention_mask=mask, max_new_tokens=most, do_sample=False, pad_token_id=0)
        options |= dict(eos_token_id=ends or None)
        if draw.random() < 0.6:
            made = ours.generate(ids, prefill_chunk_size=draw.choice([None, 1, 3]), **options)[:, columns:]
        else:
            made = ours.generate(inputs_embeds=ours.get_input_embeddings()(ids), **options)
        again = generation.generate(ours, prompts, max_new_tokens=most, eos_token_id=ends)
        for row, prompt in enumerate(prompts):
            check_greedy(exact, prompt, again[row].tolist(), ends, most, dtype)
            tokens = made[row].tolist()
            cut = next((n + 1 for n, token in enumerate(tokens) if token in ends), len(tokens))
            check_greedy(exact, prompt, tokens[:cut], ends, most, dtype)
