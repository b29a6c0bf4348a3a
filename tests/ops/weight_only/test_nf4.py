"""NF4 as bitsandbytes writes it: its formulas for codes, for absmax and for absmax of absmax; folders; refusals."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import model_layers, nf4, stored_layers
from terrazzo.ops.checkpoints.reader import Checkpoint
from terrazzo.ops.shards import Share
from terrazzo.ops.weight_only import reference

from tests.layouts.layout_oracle import nf4 as quantiles

TABLE = torch.tensor(quantiles(), dtype=torch.float32)  # 1e-7 off what files hold
N, K = 70, 192
LAYER = "model.layers.0.mlp.up_proj"
CONFIG = {
    "_load_in_4bit": True, "_load_in_8bit": False, "bnb_4bit_compute_dtype": "bfloat16",
    "bnb_4bit_quant_storage": "uint8", "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True,
    "llm_int8_enable_fp32_cpu_offload": False, "llm_int8_has_fp16_weight": False, "llm_int8_skip_modules": None,
    "llm_int8_threshold": 6.0, "load_in_4bit": True, "load_in_8bit": False, "quant_method": "bitsandbytes",
}  # fmt: skip
"""What transformers 5 writes of a BitsAndBytesConfig."""


def dynamic_map() -> torch.Tensor:
    """bitsandbytes' create_dynamic_map(signed=True): means of even steps from 0.1 to 1 in seven decades, 0, 1."""
    found = [0.0, 1.0]
    for i in range(7):
        edges = np.linspace(0.1, 1, 2**i + 1)
        means = 10.0 ** (i - 6) * (edges[:-1] + edges[1:]) / 2
        found += [*means, *-means]
    return torch.tensor(sorted(found), dtype=torch.float32)


def written(w: torch.Tensor, double: bool = True, block: int = 64) -> tuple[dict, torch.Tensor]:
    """(tensors behind a layer's name, the weight that bitsandbytes makes of them in float32)."""
    flat = w.float().reshape(-1, block)
    absmax = flat.abs().amax(1)
    codes = (flat / absmax.clamp(min=1e-38)[:, None])[..., None].sub(TABLE).abs().argmin(-1).to(torch.uint8)
    pairs = codes.view(-1, 2)
    state = {"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16", "shape": list(w.shape)}
    made = {"weight": (pairs[:, :1] << 4 | pairs[:, 1:]), "weight.absmax": absmax, "weight.quant_map": TABLE.clone()}
    if double:
        offset, inner = absmax.mean(), torch.nn.functional.pad(absmax - absmax.mean(), (0, -len(absmax) % 256))
        outer, table = inner.view(-1, 256).abs().amax(1), dynamic_map()
        places = (inner.view(-1, 256) / outer[:, None])[..., None].sub(table).abs().argmin(-1).flatten()[: len(absmax)]
        made |= {
            "weight.absmax": places.to(torch.uint8),
            "weight.nested_absmax": outer,
            "weight.nested_quant_map": table,
        }
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset.item()}
        absmax = table[places] * outer.repeat_interleave(256)[: len(absmax)] + offset
    made["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return made, (TABLE[codes.long()] * absmax[:, None]).view(w.shape)


def state_of(made: dict) -> dict:
    return {name.removeprefix("weight."): it for name, it in made.items() if name != "weight"}


@pytest.mark.parametrize("double", [False, True], ids=["absmax", "nested"])
def test_a_layer_is_what_its_writer_means(double):
    w = 0.1 * torch.randn(N, K, generator=torch.Generator().manual_seed(3))
    w[5], w[6, 64:128], w[7] = 0, 1e-6, 20 * w[7]  # so coarse is their absmax that it comes out below zero
    made, meant = written(w, double)
    packed = nf4.from_bitsandbytes(made["weight"], state_of(made), bias=torch.ones(N))
    assert torch.allclose(packed.dequantize(), meant.double(), rtol=2e-6, atol=1e-9) and (packed.n, packed.k) == (N, K)
    assert not double or bool((packed.unpack().scales < 0).any())
    stored = made["weight"].flatten().view(torch.bfloat16)[:, None]  # bnb_4bit_quant_storage
    assert torch.equal(nf4.from_bitsandbytes(stored, state_of(made)).words, packed.words)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_operands_are_what_the_oracle_multiplies(dtype):
    """The codebook is rounded once; with 16-bit scales their product once more."""
    rng = torch.Generator().manual_seed(1)
    w = torch.randn(N, K, generator=rng)
    exact, folded = nf4.quantize_weight(w), nf4.quantize_weight(w, scale_dtype=dtype)
    near, spread = TABLE.to(dtype), lambda one: one.scales.repeat_interleave(64, 1)
    assert torch.equal(exact.dequantize("post", dtype), near[exact.codes.long()].double() * spread(exact).double())
    assert torch.equal(folded.dequantize("exact", dtype), (near[folded.codes.long()] * spread(folded)).double())
    x, step = torch.randn(3, K, generator=rng).to(dtype), 2.0 ** (-9 if dtype == torch.bfloat16 else -12)
    truth, size = x.double() @ exact.dequantize().T, x.double().abs() @ exact.dequantize().abs().T
    assert bool(((reference.gemm(x, exact, "post") - truth).abs() <= step * size).all())


def test_codes_are_the_nearest_values_and_ragged_groups_are_whole():
    w = torch.randn(65, 200, generator=torch.Generator().manual_seed(2))
    made = nf4.quantize_weight(w)
    padded = torch.nn.functional.pad(w, (0, 56)).view(65, 4, 64)
    assert torch.equal(made.scales, padded.abs().amax(-1))
    away = (padded / made.scales[..., None])[..., None].sub(TABLE).abs()
    found = torch.nn.functional.pad(made.codes, (0, 56), value=7).view(65, 4, 64, 1).long()
    assert torch.allclose(away.gather(-1, found)[..., 0], away.amin(-1), atol=1e-6)
    packed = made.pack()
    assert torch.equal(packed.unpack().codes, made.codes) and torch.equal(packed.unpack().scales, made.scales)


def folder(path, made: dict, config: dict = CONFIG, name: str = LAYER):
    save_file({f"{name}.{leaf}": it.contiguous() for leaf, it in made.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": config}))
    return path


def test_a_folder(tmp_path):
    made, meant = written(torch.randn(N, K, generator=torch.Generator().manual_seed(0)))
    checkpoint = Checkpoint(folder(tmp_path, made))
    assert checkpoint.layers() == {LAYER: "bitsandbytes"} and not checkpoint.layer(LAYER).skip
    assert stored_layers.operator_of("bitsandbytes", checkpoint.layer(LAYER)) == "nf4"
    assert torch.allclose(nf4.load_layer(tmp_path, LAYER).dequantize(), meant.double(), rtol=2e-6, atol=1e-9)
    assert list(nf4.load_model(tmp_path).layers) == [LAYER]
    (kind,) = model_layers.of_folder(tmp_path).kinds
    assert (kind.operator, kind.n, kind.k, kind.group_size, kind.scale_dtype) == ("nf4", N, K, 64, "float32")
    for dim, world in ((0, 2), (1, 3)):
        parts = [nf4.FAMILY.read(checkpoint, LAYER, "cpu", Share(rank, world, dim)) for rank in range(world)]
        joined = torch.cat([part.dequantize() for part in parts], dim)
        assert torch.allclose(joined, meant.double(), rtol=2e-6, atol=1e-9)


BAD = {
    "block": (dict(block=128), {}, "blocksize"),
    "rows": (dict(k=96), {}, "blocksize"),
    "codebook": ({}, {"quant_map": TABLE.flip(0)}, "quant_map"),
    "absmax": ({}, {"absmax": torch.ones(3)}, "absmax"),
    "half": ({}, {"absmax": torch.ones(N * K // 64).half()}, "absmax"),
    "nested": ({}, {"nested_absmax": torch.ones(0)}, "absmax"),
    "infinite": (dict(double=False), {"absmax": torch.full((N * K // 64,), torch.inf)}, "absmax"),
    "json": ({}, {"quant_state.bitsandbytes__nf4": torch.zeros(9, dtype=torch.uint8)}, "quant_state"),
    "missing": ({}, {"quant_map": None}, "quant_map"),
    "short": ({}, {"weight": torch.zeros(3, 1, dtype=torch.uint8)}, "weight"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_named(name):
    how, other, says = BAD[name]
    w = torch.ones(N, how.pop("k", K))
    made = written(w, **how)[0] | {"weight." * (leaf != "weight") + leaf: it for leaf, it in other.items()}
    made = {leaf: it for leaf, it in made.items() if it is not None}
    with pytest.raises(ArgumentError, match=says):
        nf4.from_bitsandbytes(made["weight"], state_of(made))


@pytest.mark.parametrize(
    "stated, says",
    [
        ({"bnb_4bit_quant_type": "fp4"}, "bnb_4bit_quant_type = 'fp4'"),
        ({"load_in_8bit": True, "load_in_4bit": False}, "load_in_8bit"),
        ({"bnb_4bit_secret": 3}, "bnb_4bit_secret"),
    ],
)
def test_other_kinds_of_bitsandbytes_are_refused_by_name(tmp_path, stated, says):
    made = written(torch.randn(N, K))[0]
    if "load_in_8bit" in stated:
        made = {"weight": torch.zeros(N, K, dtype=torch.int8), "SCB": torch.ones(N)}
    with pytest.raises(ArgumentError, match=says):
        nf4.load_layer(folder(tmp_path, made, CONFIG | stated), LAYER)
