"""Configs as they are published are read, and one with a field that would make another model is refused by its name."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from terrazzo.lowering.errors import ArgumentError  # noqa: E402
from terrazzo.nn import generation  # noqa: E402
from terrazzo.nn.architectures import Builder, shape_of  # noqa: E402
from terrazzo.nn.calibrating import Calibration  # noqa: E402
from terrazzo.nn.decoder import Rotary  # noqa: E402
from terrazzo.nn.loading import load  # noqa: E402
from terrazzo.nn.reading import Asked  # noqa: E402
from terrazzo.nn.sources import Published  # noqa: E402

LLAMA3 = {
    "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}  # fmt: skip
QWEN_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
PUBLISHED = {
    "Llama 2, AWQ": ("llama", dict(
        max_position_embeddings=4096, pretraining_tp=1, rope_scaling=None, torch_dtype="float16", use_cache=True,
        _name_or_path="/workspace/llama", pad_token_id=0, max_length=4096, temperature=0.9, top_p=0.6,
    ), 4096),
    "Llama 3.1": ("llama", dict(
        attention_bias=False, attention_dropout=0.0, mlp_bias=False, max_position_embeddings=131072,
        rope_scaling=LLAMA3, rope_theta=500000.0, eos_token_id=[128001, 128008, 128009], head_dim=128,
    ), 131072),
    "Llama 3.2, Unsloth": ("llama", dict(
        unsloth_fixed=True, unsloth_version="2024.9", max_position_embeddings=131072, tie_word_embeddings=True,
        rope_scaling=LLAMA3 | {"factor": 32.0}, model_max_length=131072,
    ), 131072),
    "SmolLM2": ("llama", dict(
        is_llama_config=True, rope_interleaved=False, max_position_embeddings=8192,
        **{"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}},
    ), 8192),
    "deepseek-coder": ("llama", dict(
        max_position_embeddings=16384, rope_scaling={"type": "linear", "factor": 4.0}, rope_theta=100000,
    ), 65536),
    "Mistral 0.1": ("mistral", dict(max_position_embeddings=32768, sliding_window=4096), 32768),
    "Mistral Nemo": ("mistral", dict(max_position_embeddings=131072, sliding_window=None, head_dim=128), 131072),
    "Qwen2.5 0.5B": ("qwen2", dict(
        max_position_embeddings=32768, max_window_layers=21, sliding_window=32768, use_mrope=False,
        use_sliding_window=False, tie_word_embeddings=True,
    ), 32768),
    "Qwen2.5 with YaRN": ("qwen2", dict(
        max_position_embeddings=32768, rope_scaling={"type": "yarn"} | QWEN_YARN, use_sliding_window=False,
    ), 131072),
    "Qwen3": ("qwen3", dict(
        attention_bias=False, max_position_embeddings=40960, max_window_layers=36, sliding_window=None, head_dim=128,
        use_sliding_window=False, rope_scaling=None,
    ), 40960),
    "Qwen3 with YaRN": ("qwen3", dict(max_position_embeddings=40960, rope_scaling=QWEN_YARN, head_dim=128), 131072),
    "Qwen3-MoE": ("qwen3_moe", dict(
        attention_bias=False, decoder_sparse_step=1, head_dim=128, max_position_embeddings=40960, max_window_layers=48,
        mlp_only_layers=[], moe_intermediate_size=768, norm_topk_prob=True, num_experts=128, num_experts_per_tok=8,
        output_router_logits=False, router_aux_loss_coef=0.001, use_sliding_window=False,
    ), 40960),
    "Mixtral": ("mixtral", dict(
        max_position_embeddings=32768, num_experts_per_tok=2, num_local_experts=8, output_router_logits=False,
        router_aux_loss_coef=0.02, sliding_window=None,
    ), 32768),
    "Gemma 3": ("gemma3_text", dict(
        attn_logit_softcapping=None, cache_implementation="hybrid", final_logit_softcapping=None, head_dim=256,
        hidden_activation="gelu_pytorch_tanh", max_position_embeddings=131072, query_pre_attn_scalar=256,
        rope_local_base_freq=10000, rope_scaling={"factor": 8.0, "rope_type": "linear"}, rope_theta=1000000,
        sliding_window=1024, sliding_window_pattern=6, boi_token_index=255999, eoi_token_index=256000,
    ), 131072),
    "gpt-oss": ("gpt_oss", dict(
        attention_bias=True, experts_per_token=4, num_experts_per_tok=4, head_dim=64, initial_context_length=4096,
        max_position_embeddings=131072, num_local_experts=32, output_router_logits=False, router_aux_loss_coef=0.9,
        rope_scaling={
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": False,
        },
        rope_theta=150000, sliding_window=128, swiglu_limit=7.0,
    ), 131072),
}  # fmt: skip
"""Architecture, fields beside sizes, and the tokens of the longest sequence."""


def config_of(kind: str, **stated):
    return transformers.AutoConfig.for_model(kind, **stated)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_read(name):
    kind, stated, positions = PUBLISHED[name]
    assert shape_of(config_of(kind, **stated)).positions == positions


REFUSED = [
    ("llama", "num_local_experts", 8),
    ("llama", "n_shared_experts", 1),
    ("llama", "use_sliding_window", True),
    ("llama", "sliding_window", 1024),
    ("llama", "layer_types", ["sliding_attention"] * 32),
    ("llama", "attn_logit_softcapping", 30.0),
    ("llama", "logit_scale", 0.5),
    ("llama", "residual_multiplier", 0.2),
    ("llama", "partial_rotary_factor", 0.5),
    ("llama", "qk_norm", True),
    ("llama", "is_causal", False),
    ("llama", "use_rope", False),
    ("llama", "hidden_activation", "gelu_tanh"),
    ("llama", "position_embedding_type", "alibi"),
    ("mistral", "attention_bias", True),
    ("mistral", "mlp_bias", True),
    ("mistral", "layer_types", ["sliding_attention", "full_attention"] * 16),
    ("qwen2", "num_experts", 4),
    ("qwen3", "query_pre_attn_scalar", 64),
    ("mixtral", "n_routed_experts", 4),
    ("qwen3_moe", "shared_expert_intermediate_size", 512),
    ("gemma3_text", "clip_qkv", 8.0),
    ("gpt_oss", "experts_per_token", 3),
]


@pytest.mark.parametrize(("kind", "name", "value"), REFUSED)
def test_a_field_that_makes_another_model_is_refused_by_its_name(kind, name, value):
    with pytest.raises(ArgumentError) as said:
        shape_of(config_of(kind, **{name: value}))
    assert said.value.argument == name and (kind in str(said.value) or name in ("is_causal",))
    assert "config.json" in said.value.remedy or "model" in said.value.remedy


UNCHANGED = [
    ("llama", "num_local_experts", 0),
    ("llama", "sliding_window", 4096),  # as long as a sequence may be
    ("llama", "layer_types", ["full_attention"] * 32),
    ("llama", "attn_logit_softcapping", None),
    ("llama", "logit_scale", 1.0),
    ("llama", "partial_rotary_factor", 1.0),
    ("llama", "is_causal", True),
    ("llama", "hidden_activation", "silu"),
    ("mistral", "use_sliding_window", True),
    ("mistral", "layer_types", ["sliding_attention"] * 32),
    ("qwen2", "attention_bias", True),
    ("gemma3_text", "hidden_act", "gelu_pytorch_tanh"),
]


@pytest.mark.parametrize(("kind", "name", "value"), UNCHANGED)
def test_a_field_that_says_what_is_so_anyway_is_read(kind, name, value):
    sizes = dict(max_position_embeddings=4096, head_dim=128)
    assert shape_of(config_of(kind, **sizes, **{name: value})) == shape_of(config_of(kind, **sizes))


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        (dict(layer_types=["full_attention", "chunked_attention"]), "layer_types"),
        (dict(layer_types=["full_attention", "sliding_attention"], sliding_window=None), "sliding_window"),
    ],
)
def test_layers_without_an_attention_of_ours_are_refused(changed, name):
    config = config_of("qwen3", num_hidden_layers=2)
    for field, value in changed.items():
        setattr(config, field, value)
    with pytest.raises(ArgumentError) as said:
        shape_of(config)
    assert said.value.argument == name


SIZES = dict(
    hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1, head_dim=64, vocab_size=32,
)  # fmt: skip


def small(**stated):
    config = config_of("llama", **SIZES, **stated)
    return load(transformers.LlamaForCausalLM(config).half().state_dict(), config=config, device="cpu")


def test_prompts_longer_than_the_model_are_refused_before_anything_runs(monkeypatch):
    model = small(max_position_embeddings=16)
    ran: list[object] = []
    monkeypatch.setattr(type(model.decoder), "forward", lambda *args: ran.append(args))
    prompt, ids = list(range(14)), torch.arange(14)[None]
    mask = torch.ones_like(ids)
    calls = [
        lambda new: generation.generate(model, [[1], prompt], max_new_tokens=new),
        lambda new: model.generate(ids, max_new_tokens=new),
        lambda new: model.generate(input_ids=ids, attention_mask=mask, max_length=14 + new),
        lambda new: model.generate(ids, transformers.GenerationConfig(max_new_tokens=new)),
    ]
    for call in calls:
        with pytest.raises(ArgumentError) as said:
            call(3)
        text = str(said.value)
        assert said.value.argument == "max_new_tokens" and "14 tokens" in text and "16 positions" in text
        assert "at most 2" in said.value.remedy
    with pytest.raises(ArgumentError) as said:
        generation.generate(model, [[*prompt, 1, 2, 3]], max_new_tokens=1)
    assert said.value.argument == "prompts" and "17 tokens" in str(said.value) and "16 positions" in str(said.value)
    for options in ({}, {"max_length": 14}):
        with pytest.raises(ArgumentError, match="16 positions"):
            model.generate(torch.zeros(1, 17, dtype=torch.int64), **options)
    assert not ran


def test_padding_takes_no_position_and_the_last_position_is_used():
    model = small(max_position_embeddings=16, eos_token_id=None)
    assert len(generation.generate(model, [list(range(14))], max_new_tokens=2)[0]) == 2
    ids, mask = torch.arange(20)[None], torch.tensor([[0] * 6 + [1] * 14])
    assert model.generate(ids, attention_mask=mask, max_new_tokens=2, pad_token_id=0).shape == (1, 22)


def test_texts_for_calibration_fit_into_the_positions():
    config = config_of("llama", **SIZES, max_position_embeddings=16)
    state = transformers.LlamaForCausalLM(config).half().state_dict()
    source = Published(None, Asked(state), torch.device("cpu"), torch.float16)
    builder = Builder(shape_of(config), source, [Rotary.of_base(64)])
    with pytest.raises(ArgumentError, match="calibration = '17 tokens': must fit into the model's 16 positions"):
        Calibration(builder, torch.zeros(2, 17, dtype=torch.int64))
    assert Calibration(builder, torch.zeros(2, 16, dtype=torch.int64)).h.shape == (32, 64)


def test_a_scaling_that_stretches_the_positions_counts():
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}
    model = small(max_position_embeddings=16, rope_parameters=yarn)
    assert model.max_positions == 32
    assert len(generation.generate(model, [list(range(20))], max_new_tokens=1)[0]) == 1
