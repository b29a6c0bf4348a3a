"""A model's kernels: whatever its layers launch, alone and joined, for any number of tokens, is among them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.targets import Target
from terrazzo.ops import attention, model_layers, model_requests, w4a16
from terrazzo.ops.grouped import GroupedWeight
from terrazzo.ops.kinds.base import Serving
from terrazzo.ops.model_requests import Weights
from terrazzo.schedules.models import ARCHITECTURES, Architecture
from test_w4a16_importers import load

SM_90A = Target.parse("sm_90a")
TINY = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
TINY |= {"num_key_value_heads": 2, "torch_dtype": "float16"}
TOKENS = (1, 3, 16, 17, 100, 700, 4096)


def folder(path: Path, layers: dict[str, str], scales: torch.dtype | None = None, **config: object) -> Path:
    """A Hugging Face folder whose layer `name` is golden layer `layers[name]`; perhaps with scales of another dtype."""
    tensors = {f"{name}.{leaf}": t for name, golden in layers.items() for leaf, t in load(golden)[0].items()}
    if scales is not None:
        tensors = {name: t.to(scales) if t.is_floating_point() else t for name, t in tensors.items()}
    path.mkdir()
    stated = {**TINY, "quantization_config": load(next(iter(layers.values())))[2], **config}
    (path / "config.json").write_text(json.dumps(stated))
    save_file(tensors, path / "model.safetensors")
    return path


def requests_of(w: w4a16.PackedWeight, dtype: str, m: int | None = None) -> set:
    facts = dict(group_size=w.group_size, symmetric=w.symmetric, scale_dtype=w.scale_dtype, bias=w.bias is not None)
    return set(w4a16.kernel_requests(w.n, w.k, **facts, dtype=dtype, m=m, target="sm_90a"))


def joined(*parts: w4a16.QuantizedWeight) -> w4a16.PackedWeight:
    """As README joins layers."""
    zeros = [it.zeros if it.zeros is not None else torch.full_like(it.scales, 8, dtype=torch.uint8) for it in parts]
    codes, scales = (torch.cat([getattr(it, name) for it in parts]) for name in ("codes", "scales"))
    made = w4a16.QuantizedWeight.canonical(codes, scales, torch.cat(zeros), group_size=parts[0].group_size)
    return made.pack()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("scales", [None, torch.bfloat16], ids=["as-stored", "bf16-scales"])
@pytest.mark.parametrize(
    "golden", ["awq", "awq_g32", "gptq_sym", "gptq_asym", "gptq_act_order", "gptq_act_order_ragged", "gptq_v2_asym",
               "ct_sym", "ct_asym", "ct_act_order", "ct_int8_zeros", "ct_ragged"]
)  # fmt: skip
def test_what_load_layer_returns_is_covered(tmp_path, golden, scales, dtype):
    names = [f"model.layers.0.{at}_proj" for at in ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.down")]
    path = folder(tmp_path / "m", dict.fromkeys(names, golden), scales, torch_dtype=dtype)
    model = model_requests.of_folder(path, Weights())
    assert model.dtype == dtype and not model.layers.skipped
    found = set(model_requests.plan(model, Serving(SM_90A, dtype)).requests)
    for name in names:
        w = w4a16.load_layer(path, name)
        assert requests_of(w, dtype) <= found
        assert requests_of(w, dtype, TOKENS) <= found
    parts = [w4a16.read_layer(path, name) for name in names[:3]]
    assert requests_of(joined(*parts), dtype) <= found


def test_zero_points_decide_symmetry_wherever_they_differ(tmp_path):
    """A GPTQ layer whose first zero points are 8, and one far away is not."""
    path = folder(tmp_path / "m", {"a.down_proj": "gptq_sym"})
    tensors = {f"a.down_proj.{leaf}": t for leaf, t in load("gptq_sym")[0].items()}
    config = load("gptq_sym")[2] | {"sym": False}
    (path / "config.json").write_text(json.dumps({**TINY, "quantization_config": config}))
    (even,) = model_layers.of_folder(path).kinds
    assert even.symmetric and w4a16.load_layer(path, "a.down_proj").symmetric
    tensors["a.down_proj.qzeros"][-1, -1] ^= 1 << 28
    save_file(tensors, path / "model.safetensors")
    (odd,) = model_layers.of_folder(path).kinds
    assert not odd.symmetric and not w4a16.load_layer(path, "a.down_proj").symmetric


def test_layers_of_mixed_symmetry_are_joined_with_zero_points(tmp_path):
    layers = {"l.mlp.gate_proj": "gptq_sym", "l.mlp.up_proj": "gptq_v2_asym"}
    path = folder(tmp_path / "m", layers)
    stated = load("gptq_sym")[2] | {"sym": False, "dynamic": {r".*up_proj": {"checkpoint_format": "gptq_v2"}}}
    (path / "config.json").write_text(json.dumps({**TINY, "quantization_config": stated}))
    found = model_requests.plan(model_requests.of_folder(path, Weights()), Serving(SM_90A)).requests
    assert requests_of(joined(*(w4a16.read_layer(path, name) for name in layers)), "float16") <= set(found)


def test_experts_are_covered_one_by_one_and_in_one_launch(tmp_path):
    names = [f"model.layers.0.mlp.experts.{at}.{leaf}" for at in range(4) for leaf in ("gate_proj", "up_proj")]
    path = folder(tmp_path / "m", dict.fromkeys(names, "awq"), num_experts=4, num_experts_per_tok=2)
    model = model_requests.of_folder(path, Weights())
    found = set(model_requests.plan(model, Serving(SM_90A)).requests)
    stack = GroupedWeight.stack([joined(*(w4a16.read_layer(path, it) for it in names[:2]))] * 4)
    one = stack[0]
    assert requests_of(one, "float16") <= found and requests_of(w4a16.load_layer(path, names[0]), "float16") <= found
    facts = dict(group_size=one.group_size, symmetric=one.symmetric, scale_dtype=one.scale_dtype)
    assert set(w4a16.grouped_requests(one.n, one.k, len(stack), **facts, target="sm_90a")) <= found
    limited = set(model_requests.plan(model, Serving(SM_90A, max_tokens=100)).requests)
    few = set(w4a16.grouped_requests(one.n, one.k, len(stack), **facts, m=tuple(range(1, 201)), target="sm_90a"))
    assert few <= limited < found
    sm_80 = Serving(Target.parse("sm_80"))
    on_warps = model_requests.plan(model, sm_80)
    assert not on_warps.skipped
    assert set(w4a16.grouped_requests(one.n, one.k, len(stack), **facts, target="sm_80")) <= set(on_warps.requests)
    without = model_requests.plan(model_requests.of_name("qwen3-30b-a3b", Weights(operator="w4ax")), sm_80)
    assert any("sm_80 calls each by itself" in why for why in without.skipped.values())


@pytest.mark.parametrize("most", [1, 5, 16, 100, 333, 5000])
def test_a_limit_of_tokens_leaves_out_nothing_below_it(most):
    model = model_requests.of_name("llama-3.2-1b", Weights())
    limited = set(model_requests.plan(model, Serving(SM_90A, max_tokens=most)).requests)
    every = set(model_requests.plan(model, Serving(SM_90A)).requests)
    below = sorted({*range(1, min(most, 40) + 1), most, *(most * part // 7 for part in range(1, 7))} - {0})
    facts = dict(group_size=128, symmetric=False, scale_dtype="float16", target="sm_90a", m=below)
    for n, k in ((2048, 2048), (16384, 2048), (2048, 8192)):
        assert set(w4a16.kernel_requests(n, k, **facts)) <= limited
    assert limited <= every and (most > 4096 or len(limited) < len(every))


def test_attention_of_a_model_is_decode_prefill_and_append():
    model = model_requests.of_name("llama-3-8b", Weights())
    serving = Serving(SM_90A, linear=False, kv=(("int4", "int4"), ("float16", "float16")), q_lens=(1, 4))
    found = model_requests.plan(model, serving)
    assert {it.name for it in found.requests} == {
        "attention.decode", "attention.write", "attention.rope_append", "attention.new_tokens",
        "attention.prefill_shared", "attention.prefill_merge",
    }  # fmt: skip
    for q_len, prefill in ((1, True), (4, False)):
        facts = dict(heads=32, kv_heads=8, q_len=q_len, prefill=prefill, target="sm_90a")
        assert set(attention.kernel_requests("int4", "int4", **facts)) <= set(found.requests)
    assert set(found.layouts) == {"kv.int4/int4.d128", "kv.float16/float16.d128"}


def test_a_rank_has_its_part_of_every_layer():
    model = model_requests.of_name("qwen2.5-7b", Weights())
    ranks = model_layers.joined(model_layers.split(model.layers, 4, model.architecture.kv_heads)).kinds
    sizes = {(kind.leaf, kind.n, kind.k) for kind in ranks}
    assert sizes == {
        ("q_proj", 896, 3584), ("k_proj", 128, 3584), ("v_proj", 128, 3584), ("qkv_proj", 1152, 3584),
        ("o_proj", 3584, 896), ("gate_proj", 4736, 3584), ("up_proj", 4736, 3584), ("gate_up_proj", 9472, 3584),
        ("down_proj", 3584, 4736),
    }  # fmt: skip
    wide = model_requests.of_name("llama-3-8b", Weights())  # more ranks than its 8 kv heads: two share one
    shared = model_layers.joined(model_layers.split(wide.layers, 16, wide.architecture.kv_heads)).kinds
    assert {(kind.leaf, kind.n) for kind in shared} >= {("k_proj", 128), ("q_proj", 256), ("qkv_proj", 512)}
    with pytest.raises(ArgumentError, match="K = 18944, which 7 ranks cannot share|N = 18944, which 7 ranks"):
        model_layers.split(model.layers, 7, 4)
    with pytest.raises(ArgumentError, match="28 query heads"):
        model_requests.plan(model, Serving(SM_90A, linear=False, kv=(("int4", "int4"),), ranks=8))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_model_of_the_table_can_be_asked_for(name):
    model = model_requests.of_name(name, Weights())
    names = {it.name for it in model_requests.plan(model, Serving(SM_90A, max_tokens=1)).requests}
    assert "w4a16.small_batch" in names and ("w4a16.grouped" in names) == bool(model.architecture.experts)
    attention.CacheLayout("int4", "int4", model.architecture.head_dim)


@pytest.mark.parametrize("operator", ["w4a8", "w4a8_fp8", "w4ax"])
def test_operators_that_quantize_activations_bring_their_quantizers(operator):
    weights = Weights(group_size=64 if operator == "w4a8" else 128, operator=operator)
    made = model_requests.plan(model_requests.of_name("qwen3-30b-a3b", weights), Serving(SM_90A, max_tokens=20))
    names = {request.name for request in made.requests}
    family = "w4ax" if operator == "w4ax" else "w4a8"
    assert f"{family}.grouped" in names and len(made.layouts) == 1 and not made.skipped
    if operator == "w4ax":
        rows = [dict(it.params) for it in made.requests if it.name == "w4ax.quantize_blocks"]
        forms = {(row["gain"], row.get("front", "none")) for row in rows}
        assert forms == {(False, "none"), (False, "silu"), (True, "none"), (True, "residual")}
        return
    rows = [dict(it.params) for it in made.requests if it.name == "w4a8.quantize_rows"]
    assert {(row["gain"], row["norm"]) for row in rows} == {(False, False), (True, False), (True, True)}
    assert {row["k"] for row in rows} == {2048, 4096, 768}


@pytest.mark.parametrize(("operator", "output"), [("w4a16", "none"), ("w4a8", "int8"), ("w4a8_fp8", "e4m3")])
def test_norms_gates_and_rotary_positions_of_a_model_are_asked_for(operator, output):
    weights = Weights(group_size=128, operator=operator)
    made = model_requests.plan(model_requests.of_name("llama-3-8b", weights), Serving(SM_90A, ranks=2)).requests
    found = {}
    for request in made:
        found.setdefault(request.name, []).append(dict(request.params))
    assert {row["output"] for row in found["norm.rms_norm"]} == {"none", output}
    assert {(row["k"], row["output"]) for row in found["activation.act_and_mul"]} == {(7168, output)}
    assert {row["head_dim"] for row in found["rope.apply_rope"]} == {128}


def test_a_folder_of_a_config_alone_is_served_as_it_says(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({**TINY, "torch_dtype": "bfloat16", "quantization_config": load("gptq_sym")[2]})
    )
    model = model_requests.of_folder(tmp_path, Weights())
    assert model.dtype == "bfloat16" and model.stored
    assert {(kind.symmetric, kind.group_size) for kind in model.layers.kinds} == {(True, 128)}
    assert {kind.leaf for kind in model_layers.joined(model.layers).kinds} > {"qkv_proj", "gate_up_proj", "down_proj"}
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ArgumentError, match="must hold a JSON object"):
        model_requests.of_folder(tmp_path, Weights())


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (TINY, Architecture(256, 512, 4, 2, 64)),
        ({"text_config": TINY | {"head_dim": 128}}, Architecture(256, 512, 4, 2, 128)),
        (TINY | {"model_type": "qwen2"}, Architecture(256, 512, 4, 2, 64, qkv_bias=True)),
        (TINY | {"attention_bias": True}, Architecture(256, 512, 4, 2, 64, qkv_bias=True, o_bias=True)),
        (
            TINY | {"num_experts": 8, "moe_intermediate_size": 96, "num_experts_per_tok": 2},
            Architecture(256, 0, 4, 2, 64, experts=8, top_k=2, expert_ffn=96),
        ),
        (
            TINY
            | {"n_routed_experts": 8, "n_shared_experts": 2, "moe_intermediate_size": 96, "first_k_dense_replace": 1},
            Architecture(256, 512, 4, 2, 64, experts=8, expert_ffn=96, shared_ffn=192),
        ),
        (TINY | {"attn_logit_softcapping": 50.0}, Architecture(256, 512, 4, 2, 64, softcap=True)),
    ],
)
def test_an_architecture_of_a_config(config, expected):
    assert Architecture.of_config(config) == expected


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (TINY | {"hidden_size": "x"}, "hidden_size = 'x'"),
        (TINY | {"num_attention_heads": 0}, "num_attention_heads = 0"),
        ({}, "num_attention_heads = None"),
        (TINY | {"kv_lora_rank": 512}, "grouped-query attention has no kv_lora_rank"),
        (TINY | {"num_attention_heads": 3}, "is no multiple of num_attention_heads = 3"),
    ],
)
def test_a_config_without_an_architecture_is_named(config, words):
    with pytest.raises(ArgumentError, match=words):
        Architecture.of_config(config)
