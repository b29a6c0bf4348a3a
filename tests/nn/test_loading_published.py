"""terrazzo.load of folders that other tools publish: 4-bit layers written here, whose meaning is known in float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from safetensors.torch import load_file, save_file  # noqa: E402
from terrazzo.lowering.errors import ArgumentError  # noqa: E402
from terrazzo.nn.loading import load  # noqa: E402
from terrazzo.ops.w4a8 import format as w4a8_format  # noqa: E402
from terrazzo.ops.w4a8 import fp8_format  # noqa: E402
from terrazzo.ops.w4a8.w8a8 import format as w8a8_format  # noqa: E402
from terrazzo.ops.weight_only import byte_integers  # noqa: E402
from terrazzo.ops.weight_only import integers as w4a16_format  # noqa: E402
from terrazzo.ops.weight_only.format import PackedWeight as small_floats  # noqa: E402

from tests.ops.checkpoints.checkpoint_folders import (  # noqa: E402
    AUTO_ROUND,
    AWQ,
    BITSANDBYTES,
    DYNAMIC,
    GPTQ,
    compressed,
    stored,
    words,
)

G, TOKENS = 64, torch.arange(3, 14)[None]
SIZES = dict(
    hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=64, head_dim=64, max_position_embeddings=256,
)  # fmt: skip
SHRINK = 2.0**-8
"""Exact in float16: weights of size 8 would let the softmax see nothing but its maximum."""
QSERVE = {"quant_method": "qserve", "w_bit": 4, "group_size": G}
KINDS: dict[str, tuple[dict[str, Any], type]] = {
    "awq": (AWQ | {"group_size": G}, w4a16_format.PackedWeight),
    "gptq": (GPTQ | {"group_size": G}, w4a16_format.PackedWeight),
    "gptq_act_order": (GPTQ | {"group_size": G, "desc_act": True}, w4a16_format.PackedWeight),
    "gptq_v2": (GPTQ | {"group_size": G, "checkpoint_format": "gptq_v2"}, w4a16_format.PackedWeight),
    "auto_round_sym": (AUTO_ROUND | {"group_size": G}, w4a16_format.PackedWeight),
    "pack_asym": (compressed(symmetric=False, group_size=G), w4a16_format.PackedWeight),
    "qserve": (QSERVE, w4a8_format.PackedWeight),
    "qserve_channel": (QSERVE | {"group_size": -1}, w4a8_format.PackedWeight),
    "int": (compressed(DYNAMIC, group_size=G) | {"format": "int-quantized"}, w4a8_format.PackedWeight),
    "fp8": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        w8a8_format.PackedWeight,
    ),
    "pack": (compressed(DYNAMIC | {"type": "float"}, group_size=G), fp8_format.PackedWeight),
    "gptq8": (GPTQ | {"group_size": G, "bits": 8, "sym": True}, byte_integers.PackedWeight),
    "int8": (compressed(num_bits=8, strategy="channel") | {"format": "int-quantized"}, byte_integers.PackedWeight),
    "mxfp4": (
        compressed(num_bits=4, type="float", group_size=32) | {"format": "mxfp4-pack-quantized"},
        small_floats,
    ),
    "nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}, small_floats),
    "bitsandbytes": (BITSANDBYTES, small_floats),
}
"""Convention -> (quantization_config, class of the packed weights)."""
QUICK = ("awq", "gptq_act_order", "auto_round_sym", "qserve", "mxfp4", "nvfp4")
every = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in KINDS]


def qserve_words(codes: torch.Tensor) -> torch.Tensor:
    """int8 [N, K/2] of codes [N, K]: blocks of 32 x 32, byte (m8, k4, k2, m2, e), rows 16 on in high nibbles."""
    n, k = codes.shape
    parts = codes.view(n // 32, 2, 2, 8, k // 32, 2, 4, 4)  # block, high, m2, m8, depth, k2, k4, e
    low, high = parts.permute(1, 0, 4, 3, 6, 5, 2, 7)
    return (low | high << 4).reshape(n, k // 2).to(torch.uint8).view(torch.int8)


def qserve_rows(values: torch.Tensor) -> torch.Tensor:
    """[G, N] of [N, G], rows of each 32 in the order 0 8 16 24 1 9 17 25 ..."""
    n, groups = values.shape
    return values.view(n // 32, 4, 8, groups).transpose(1, 2).reshape(n, groups).T.contiguous()


def qserve(seed: int, n: int, k: int, channel: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A layer of QServe, by groups (level 1 within 8 bits, whatever the codes are) or by channels."""
    rng = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (n, k), generator=rng)
    s1 = ((torch.rand(n, generator=rng) + 0.5) * SHRINK / 8).half()
    made = {"qweight": qserve_words(codes), "s1_scales": s1}
    if channel:
        zeros = torch.randint(0, 16, (n,), generator=rng)
        s1 = made["s1_scales"] = (s1.float() * 8).half()
        made["s1_szeros"] = (zeros.half() * s1).half()
        return made, (codes - zeros[:, None]).double() * s1.double()[:, None]
    zeros, s2 = (torch.randint(*ends, (n, k // G), generator=rng) for ends in ((4, 12), (1, 9)))
    made |= {"s2_scales": qserve_rows(s2).to(torch.int8), "s2_zeros": qserve_rows(-zeros * s2).to(torch.int8)}
    spread = lambda t: t.repeat_interleave(G, 1)
    return made, ((codes - spread(zeros)) * spread(s2)).double() * s1.double()[:, None]


def integers8(kind: str, seed: int, n: int, k: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A layer of 8-bit integers: GPTQ's words along K, or bytes with a scale for each row."""
    rng = torch.Generator().manual_seed(seed)
    codes, groups = torch.randint(0, 256, (n, k), generator=rng), k // G if kind == "gptq8" else 1
    scales = ((torch.rand(n, groups, generator=rng) + 0.5) * 2.0**-12).half()
    weight = (codes - 128).double() * scales.double().repeat_interleave(k // groups, 1)
    if kind == "int8":
        return {"weight": (codes - 128).to(torch.int8), "weight_scale": scales}, weight
    packed = (codes.view(n, -1, 4) << 8 * torch.arange(4)).sum(-1).to(torch.int32)
    zeros = torch.full((groups, n // 4), 0x7F7F7F7F, dtype=torch.int32)
    return {"qweight": packed.T.contiguous(), "qzeros": zeros, "scales": scales.T.contiguous()}, weight


def e2m1(kind: str, seed: int, n: int, k: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A layer of e2m1 codes: compressed-tensors' MXFP4, or modelopt's NVFP4 with a scale of its own for the tensor."""
    rng = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (n, k // 2), generator=rng, dtype=torch.uint8)
    table = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
    values = torch.stack([table[(packed & 15).long()], table[(packed >> 4).long()]], -1).flatten(1)
    if kind == "mxfp4":
        scales = torch.randint(117, 121, (n, k // 32), generator=rng, dtype=torch.uint8)
        return {"weight_packed": packed, "weight_scale": scales}, values * 2.0 ** (
            scales.double() - 127
        ).repeat_interleave(32, 1)
    scales = (torch.rand(n, k // 16, generator=rng) * 400 + 48).to(torch.float8_e4m3fn)
    whole = torch.tensor(2.0**-17 * (1 + 0.1 * seed))
    made = {"weight": packed, "weight_scale": scales, "weight_scale_2": whole, "input_scale": torch.tensor(0.1)}
    return made, values * scales.double().repeat_interleave(16, 1) * float(whole)


def layer(kind: str, seed: int, n: int, k: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """(tensors by what stands behind the layer's name, the float64 weight that they mean)."""
    if kind == "fp8":
        rng = torch.Generator().manual_seed(seed)
        codes = (torch.randn(n, k, generator=rng) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
        scales = (torch.rand(n // 128, k // 128, generator=rng) + 0.5) * 2.0**-12
        weight = codes.double() * scales.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
        return {"weight": codes, "weight_scale_inv": scales}, weight
    if kind in ("gptq8", "int8"):
        return integers8(kind, seed, n, k)
    if kind in ("mxfp4", "nvfp4"):
        return e2m1(kind, seed, n, k)
    if kind.startswith("qserve"):
        return qserve(seed, n, k, kind == "qserve_channel")
    made, weight = stored(kind.replace("_act_order", ""), seed, n, k, G)
    for name in ("scales", "weight_scale"):
        if name in made:
            made[name] = (made[name].float() * SHRINK).half()
    if kind == "bitsandbytes":
        made["weight.absmax"] *= SHRINK
    if kind == "gptq_act_order":  # of one K, one order, as layers of one input have
        order = torch.randperm(k, generator=torch.Generator().manual_seed(k))
        codes = (made["qweight"].T.long()[..., None] >> 4 * torch.arange(8)).flatten(1) & 15
        made |= {"qweight": words(codes[:, order]).T.contiguous(), "g_idx": made["g_idx"][order]}
        weight = weight[:, order]
    return made, weight * SHRINK


def names(index: int) -> dict[str, tuple[int, int]]:
    """Every linear layer of a decoder layer, and its [N, K]."""
    at, mlp = (f"model.layers.{index}.{part}" for part in ("self_attn", "mlp"))
    return {
        f"{at}.q_proj": (256, 128), f"{at}.k_proj": (128, 128), f"{at}.v_proj": (128, 128),
        f"{at}.o_proj": (128, 256), f"{mlp}.gate_proj": (256, 128), f"{mlp}.up_proj": (256, 128),
        f"{mlp}.down_proj": (128, 256),
    }  # fmt: skip


def folder(path: Path, kind: str, stated: dict[str, Any] | None = None) -> Any:
    """Write a folder; the float32 model that it means."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    held, meant = {}, {}
    for name, weight in model.state_dict().items():
        if ".layers." not in name or "norm" in name:
            meant[name] = weight.half().float()
            held[name] = weight.half()
    for index in range(SIZES["num_hidden_layers"]):
        for seed, (name, size) in enumerate(names(index).items()):
            tensors, weight = layer(kind, 10 * index + seed, *size)
            held |= {f"{name}.{leaf}": t for leaf, t in tensors.items()}
            meant[f"{name}.weight"] = weight.float()
    model.load_state_dict(meant)
    path.mkdir(exist_ok=True)
    save_file(held, path / "model.safetensors")
    written = config.to_dict() | {"dtype": "float16", "quantization_config": stated or KINDS[kind][0]}
    (path / "config.json").write_text(json.dumps(written))
    return model


@pytest.mark.parametrize("kind", every)
@torch.no_grad()
def test_published_folders_are_loaded_as_what_they_mean(tmp_path, kind):
    """Weights rounded once at most; logits up to 16-bit rounding, or that of quantized activations."""
    model = folder(tmp_path, kind)
    loaded = load(tmp_path, device="cpu", kv="float16")
    for index, made in enumerate(loaded.decoder.layers):
        at, mlp, meant = made.self_attn, made.mlp, model.model.layers[index]
        theirs = [getattr(meant.self_attn, f"{part}_proj") for part in "qkvo"]
        joined = {
            at.qkv_proj: theirs[:3], at.o_proj: theirs[3:],
            mlp.gate_up_proj: [meant.mlp.gate_proj, meant.mlp.up_proj], mlp.down_proj: [meant.mlp.down_proj],
        }  # fmt: skip
        for ours, theirs in joined.items():
            assert type(ours.packed) is KINDS[kind][1]
            made, wanted = ours.packed.dequantize(), torch.cat([linear.weight for linear in theirs])
            assert torch.equal(made.float(), wanted.to(made.dtype).float())
    exact, got = model(TOKENS).logits, loaded(TOKENS).logits.float()
    off = float((got - exact).norm() / exact.norm())
    sixteen = (w4a16_format.PackedWeight, byte_integers.PackedWeight, small_floats)
    assert off < (0.02 if KINDS[kind][1] in sixteen else 0.15), off


@pytest.mark.parametrize("kind", ["mxfp4", "nvfp4"])
def test_a_layer_with_a_tensor_missing_or_cut_is_refused_by_name(tmp_path, kind):
    folder(tmp_path, kind)
    held, name = load_file(tmp_path / "model.safetensors"), "model.layers.0.mlp.up_proj"
    for one in [each for each in held if each.startswith(f"{name}.weight")]:
        for without in (True, False):
            rest = {other: t for other, t in held.items() if other != one}
            if not without:
                rest[one] = held[one][:-1].clone() if held[one].ndim else torch.tensor(float("nan"))
            save_file(rest, tmp_path / "model.safetensors")
            with pytest.raises(ArgumentError, match=name):
                load(tmp_path, device="cpu")


def test_joined_layers_of_unlike_orders_are_refused_by_name(tmp_path):
    """Act-order with an order for each of q, k and v: one product has one order of x."""
    folder(tmp_path, "gptq_act_order")
    held = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.self_attn.k_proj.g_idx"
    held[name] = held[name].flip(0).contiguous()
    save_file(held, tmp_path / "model.safetensors")
    with pytest.raises(ArgumentError, match="perm"):
        load(tmp_path, device="cpu")


V = "model.layers.0.self_attn.v_proj"


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        ({"group_size": 32}, "group_size = .*q_proj': 64, .*k_proj': 64, .*v_proj': 32}"),
        ({"bits": 8}, "q_proj': 'w4a16-g64', .*k_proj': 'w4a16-g64', .*v_proj': 'w8a16-g64'}.*one format"),
        (None, "q_proj': 'w4a16-g64', .*v_proj': 'float16'}.*all be quantized, or none"),
    ],
    ids=["groups", "bits", "float"],
)
def test_joined_layers_of_unlike_settings_are_each_named_with_theirs(tmp_path, rule, says):
    n, k = 128, 128
    folder(tmp_path, "auto_round_sym", GPTQ | {"group_size": G, "sym": True, "dynamic": {f"+:{V}": rule or {}}})
    held = {name: t for name, t in load_file(tmp_path / "model.safetensors").items() if not name.startswith(V)}
    own = {"weight": torch.ones(n, k).half()}
    if rule is not None:
        bits, group = rule.get("bits", 4), rule.get("group_size", G)
        own = {
            "qweight": torch.zeros(k * bits // 32, n, dtype=torch.int32),
            "qzeros": torch.full(
                (k // group, n * bits // 32), 0x7F7F7F7F if bits == 8 else 0x77777777, dtype=torch.int32
            ),
            "scales": torch.ones(k // group, n).half(),
        }
    save_file(held | {f"{V}.{leaf}": t for leaf, t in own.items()}, tmp_path / "model.safetensors")
    with pytest.raises(ArgumentError, match=says) as said:
        load(tmp_path, device="cpu")
    assert "export the model again" in said.value.remedy and "keep these layers apart" not in said.value.remedy


@pytest.mark.parametrize("kind", QUICK)
def test_a_quantized_embedding_is_dequantized(tmp_path, kind):
    """Rounded once to the model's dtype; routers are read in the same way (test_loading_experts.py)."""
    folder(tmp_path, kind)
    held = load_file(tmp_path / "model.safetensors")
    name = "model.embed_tokens"
    tensors, weight = layer(kind, 99, *held.pop(f"{name}.weight").shape)
    save_file(held | {f"{name}.{leaf}": t for leaf, t in tensors.items()}, tmp_path / "model.safetensors")
    table = load(tmp_path, device="cpu").decoder.embed_tokens.weight
    assert table.dtype == torch.float16 and torch.equal(table, weight.half())


@pytest.mark.parametrize(
    ("stated", "says"),
    [
        ({"quant_method": "mxfp4"}, "format = 'mxfp4': the tensors of .* are awq"),
        ({"quant_method": "hqq"}, "quant_method = 'hqq'"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bnb_4bit_quant_type = 'fp4'"),
    ],
)  # fmt: skip
def test_methods_that_no_operator_reads_are_refused_by_name(tmp_path, stated, says):
    folder(tmp_path, "awq", stated)
    with pytest.raises(ArgumentError, match=says):
        load(tmp_path, device="cpu")
