"""NF4 as bitsandbytes writes it: its formulas for codes, for absmax and for absmax of absmax; folders; refusals."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import fp8, model_layers, mxfp4, nf4, nvfp4, stored_layers
from terrazzo.ops.checkpoints.reader import Checkpoint
from terrazzo.ops.shards import Share
from terrazzo.ops.weight_only import reference

from tests import mutation
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


def restated(made: dict, **changes) -> dict:
    """Tensors of a layer whose JSON says something else."""
    leaf = "weight.quant_state.bitsandbytes__nf4"
    text = json.dumps(json.loads(bytes(made[leaf].tolist())) | changes).encode()
    return made | {leaf: torch.tensor(list(text), dtype=torch.uint8)}


SIZES = (0, -1, True, 64.0, 64.9, 1e300, float("inf"), float("nan"), 2**62, 10**40, "64", None, [64])


@pytest.mark.parametrize("field", ["blocksize", "nested_blocksize", "shape", "nested_offset"])
def test_json_that_states_no_sizes_is_named(tmp_path, field):
    made = written(torch.ones(N, K))[0]
    bad = {
        "shape": ([-N, -K], [N, float(K)], [True, K], [N], [N, K, 1], {str(N): 0, str(K): 1}, "ab", None, N),
        "nested_offset": (True, "0", None, [0], float("nan"), float("inf"), 1e300, 10**400),
    }
    for value in bad.get(field, SIZES):
        with pytest.raises(ArgumentError, match=rf"^quant_state\.{field} = "):
            nf4.load_layer(folder(tmp_path, restated(made, **{field: value})), LAYER)


def test_a_nested_block_may_be_longer_than_the_layer():
    made = written(torch.randn(N, K, generator=torch.Generator().manual_seed(6)))[0]
    load = lambda it: nf4.from_bitsandbytes(it["weight"], state_of(it)).dequantize()
    assert torch.equal(load(restated(made, nested_blocksize=2**31 - 1)), load(made))


def test_a_damaged_layer_is_refused_or_read(tries):
    good = written(torch.randn(N, K, generator=torch.Generator().manual_seed(5)))[0]
    leaf = "weight.quant_state.bitsandbytes__nf4"
    stated = json.loads(bytes(good[leaf].tolist()))
    for random in tries(300):
        made = good
        if random.random() < 0.7:
            text = mutation.text(mutation.value(stated, random), random)
            made = good | {leaf: torch.frombuffer(bytearray(text or b" "), dtype=torch.uint8)}
        else:
            made = mutation.tensors(good, random)
        mutation.survives(lambda made=made: nf4.from_bitsandbytes(made.get("weight"), state_of(made)))


@pytest.mark.parametrize("name", ["weight", "absmax", "quant_map", "quant_state", "nested_absmax", "nested_quant_map"])
def test_what_is_no_tensor_is_named(name):
    made = written(torch.ones(N, K))[0]
    leaf = "weight" if name == "weight" else "weight." + name.replace("state", "state.bitsandbytes__nf4")
    for bad in (None, "x", {}, object(), torch.zeros(4, device="meta"), torch.ones(2, 2).to_sparse()):
        found = made | {leaf: bad}
        with pytest.raises(ArgumentError, match="nested_absmax" if bad is None and "nested" in name else name):
            nf4.from_bitsandbytes(found["weight"], state_of(found))


def test_a_state_is_a_mapping_and_may_hold_arrays():
    made = written(torch.randn(N, K, generator=torch.Generator().manual_seed(4)))[0]
    for bad in (None, list(state_of(made).items()), "x"):
        with pytest.raises(ArgumentError, match="^state = .*must be a mapping"):
            nf4.from_bitsandbytes(made["weight"], bad)
    arrays = {name: it.numpy() for name, it in state_of(made).items()}
    packed = nf4.from_bitsandbytes(made["weight"], state_of(made))
    assert torch.equal(nf4.from_bitsandbytes(made["weight"].numpy(), arrays).params, packed.params)


def test_flattened_lengths_do_not_hide_shapes():
    made = written(torch.ones(N, K))[0]
    for leaf in ("weight.nested_quant_map", "weight.nested_absmax"):
        found = made | {leaf: made[leaf][:, None].expand(-1, 2).contiguous()}
        with pytest.raises(ArgumentError, match="absmax = 'uint8'"):
            nf4.from_bitsandbytes(found["weight"], state_of(found))


@pytest.mark.parametrize("quantize", [nf4.quantize, lambda w, **scale: fp8.quantize(w, granularity="block", **scale)])
def test_scales_that_their_dtype_does_not_hold_are_refused(quantize):
    w = torch.randn(3, 256, generator=torch.Generator().manual_seed(7))
    part = torch.cat([w[:, :128], 1e-9 * w[:, 128:]], 1)  # one group of many
    for bad, dtype, says in (
        (1e-9 * w, torch.float16, "torch.float16': is too narrow.*use torch.float32 or torch.bfloat16"),
        (part, torch.float16, "torch.float16': is too narrow"),
        (1e8 * w, torch.float16, "torch.float16': cannot hold.*use torch.float32 or torch.bfloat16"),
    ):
        with pytest.raises(ArgumentError, match=f"^scale_dtype = '{says}"):
            quantize(bad, scale_dtype=dtype)
        for wide in (torch.bfloat16, torch.float32):
            made, size = quantize(bad, scale_dtype=wide).dequantize(), bad.abs().max().double()
            assert bool(((made - bad).abs() <= 0.2 * size).all()) and bool(made.any())
    w[:, :128] = 0  # a group of zeros has the scale 0, or any
    assert not bool(quantize(w, scale_dtype=torch.float16).dequantize()[:, :128].any())


def test_scales_beyond_every_dtype_name_the_weight():
    for bad, dtype, says in (
        (torch.full((1, 64), 3.4e38), torch.bfloat16, "use torch.float32$"),
        (torch.full((1, 64), 1e-50, dtype=torch.float64), None, "scale the weight up"),
    ):
        with pytest.raises(ArgumentError, match=f"^scale_dtype = .*{says}"):
            nf4.quantize(bad, scale_dtype=dtype)


@pytest.mark.parametrize("bad", ["bfloat16", "x", torch.float64, torch.float8_e4m3fn, torch.int8, 16, []])
def test_other_dtypes_of_scales_are_refused(bad):
    with pytest.raises(ArgumentError, match=r"^scale_dtype = .*must be one of \('torch.float16', "):
        nf4.quantize(torch.ones(2, 64), scale_dtype=bad)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("module", [nf4, mxfp4, nvfp4])
@pytest.mark.parametrize("shape", [(64, 128), (128, 64)])
def test_a_transposed_weight_is_quantized_without_a_warning(module, shape):
    w = torch.randn(shape, generator=torch.Generator().manual_seed(8))
    told = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        made = module.quantize_weight(w.T)
    finally:
        torch.set_warn_always(told)
    assert torch.equal(made.codes, module.quantize_weight(w.T.contiguous()).codes)


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
