"""INT8 weights on the CPU: what importers read, against loops of the files' writers; forms, quantizer, errors."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import w4a16, w8a16, weights
from terrazzo.ops.grouped import GroupedWeight
from terrazzo.ops.weight_only import reference

N, K, G = 12, 96, 32


def packed_bytes(matrix: np.ndarray) -> torch.Tensor:
    """int32 [R, ceil(C/4)]: byte i of word c is column 4c + i; missing columns are 0."""
    rows, columns = matrix.shape
    words = np.zeros((rows, -(-columns // 4)), dtype=np.int64)
    for column in range(columns):
        words[:, column // 4] |= matrix[:, column].astype(np.int64) << 8 * (column % 4)
    return torch.from_numpy(words.astype(np.uint32).view(np.int32).copy())


def layer(symmetric: bool, seed: int = 0, n: int = N, k: int = K, g: int = G) -> tuple[np.ndarray, ...]:
    """codes [N, K], zeros and scales [N, G], the weight in float64."""
    rng = np.random.default_rng(seed)
    groups = -(-k // g)
    codes = rng.integers(0, 256, (n, k))
    codes[0, :4] = 0, 255, 127, 128
    zeros = np.full((n, groups), 128) if symmetric else rng.integers(0, 256, (n, groups))
    scales = np.exp(rng.normal(-6, 0.5, (n, groups))).astype(np.float16)
    weight = np.empty((n, k))
    for column in range(k):
        weight[:, column] = (codes[:, column] - zeros[:, column // g]) * scales[:, column // g].astype(np.float64)
    return codes, zeros, scales, weight


def values(w) -> torch.Tensor:
    return w.dequantize("post")


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_gptq_of_both_versions_is_what_its_writer_means(version, symmetric):
    """v1 stores a zero point less one in each byte: 127 for 128, 255 for 0."""
    codes, zeros, scales, weight = layer(symmetric)
    if not symmetric:
        zeros[:, 0] = 0
        weight[:, :G] = codes[:, :G] * scales[:, :1].astype(np.float64)
    stored = (zeros - 1) % 256 if version == "gptq" else zeros
    made = dict(qweight=packed_bytes(codes).T.contiguous(), qzeros=packed_bytes(stored.T))
    made["scales"] = torch.from_numpy(scales.T.copy())
    warned = pytest.warns(UserWarning, match="255") if version == "gptq" and not symmetric else None
    if warned is None:
        w = w8a16.read_gptq(**made, version=version, symmetric=symmetric)
    else:
        with warned:
            w = w8a16.read_gptq(**made, version=version, symmetric=symmetric)
    assert torch.equal(values(w), torch.from_numpy(weight)) and w.symmetric == symmetric
    if symmetric:  # its zero points tell which version it is
        assert torch.equal(w8a16.read_gptq(**made).codes, w.codes)


def test_gptq_in_activation_order_keeps_the_channels_order():
    codes, zeros, scales, _ = layer(False)
    g_idx = np.random.default_rng(3).permutation(np.arange(K) // G)
    weight = np.empty((N, K))
    for column in range(K):
        group = g_idx[column]
        weight[:, column] = (codes[:, column] - zeros[:, group]) * scales[:, group].astype(np.float64)
    tensors = packed_bytes(codes).T.contiguous(), packed_bytes(zeros.T), torch.from_numpy(scales.T)
    w = w8a16.from_gptq(*tensors, torch.from_numpy(g_idx).int(), version="gptq_v2", desc_act=True)
    assert w.perm is not None and torch.equal(values(w), torch.from_numpy(weight))


@pytest.mark.parametrize("form", ["packed", "packed zeros", "packed channel", "packed ragged", "int8", "int8 tensor"])
def test_compressed_tensors_is_what_its_writer_means(form):
    g, k = (K, K) if "channel" in form or "int8" in form else (G, 90 if "ragged" in form else K)
    codes, zeros, scales, weight = layer("zeros" not in form, 1, k=k, g=g)
    scale = torch.from_numpy(scales).bfloat16()
    if form == "int8 tensor":
        scale = scale[:1, 0]
    each = scale.double().view(-1, scale.shape[-1] if scale.ndim == 2 else 1).repeat_interleave(g, 1)[:, :k]
    weight = (torch.from_numpy(codes) - torch.from_numpy(zeros).repeat_interleave(g, 1)[:, :k]).double() * each
    if form.startswith("int8"):
        w = w8a16.from_compressed_tensors(torch.from_numpy(codes - 128).to(torch.int8), scale)
    else:
        more = {}
        if "zeros" in form:  # packed along N
            more["weight_zero_point"] = packed_bytes(zeros.T).T.contiguous()
        w = w8a16.from_compressed_tensors(
            packed_bytes(codes), scale, weight_shape=(N, k), group_size=-1 if g == k else g, **more
        )
    assert torch.equal(values(w), weight) and (w.n, w.k) == (N, k)


@pytest.mark.parametrize("n, k, g", [(1, 16, 16), (63, 32, 32), (130, 96, 96), (64, 576, 128), (65, 300, 64)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_packing_loses_nothing(n, k, g, symmetric):
    codes, zeros, scales, weight = layer(symmetric, 2, n, k, g)
    facts = dict(group_size=g, bias=torch.ones(n))
    given = torch.from_numpy(codes), torch.from_numpy(scales), torch.from_numpy(zeros)
    w = w8a16.pack(*given, **facts)
    back = w.unpack()
    assert type(back) is w8a16.QuantizedWeight and type(w) is w8a16.PackedWeight
    assert torch.equal(back.codes.long(), given[0]) and torch.equal(back.scales, given[1])
    assert back.zeros is None if symmetric else torch.equal(back.zeros.long(), given[2])
    assert torch.equal(values(w), torch.from_numpy(weight)) and weights.kind(w) == "w8a16.PackedWeight"
    assert w.nbytes == w.words.numel() * 4 + w.params.numel() and w.words.shape[0] * 32 >= k


def test_a_packed_weight_is_saved_loaded_stacked_and_multiplied(tmp_path):
    floats = torch.randn(70, 96, generator=torch.Generator().manual_seed(3))
    w, zeros = w8a16.quantize(floats), w8a16.quantize(floats, group_size=32, symmetric=False)
    w.save(tmp_path / "w.safetensors")
    back = w8a16.PackedWeight.load(tmp_path / "w.safetensors")
    assert type(back) is type(w) and torch.equal(values(back), values(w)) and (w.group_size, w.symmetric) == (96, True)
    assert (values(w) - floats).abs().max() <= floats.abs().max() / 127 * 0.51
    assert (values(zeros) - floats).square().mean() < (values(w) - floats).square().mean()
    symmetric = w8a16.quantize(floats, group_size=32)
    stacked = GroupedWeight.stack([zeros, symmetric])
    assert torch.equal(values(stacked[1]), values(symmetric))
    x = torch.randn(3, 96, dtype=torch.float16)
    call = torch.compile(lambda x: w8a16.gemm(x, w), backend="aot_eager", fullgraph=True)
    assert torch.equal(call(x), reference.forward(x, w))


BAD = {
    "codes": (lambda: w8a16.pack(torch.full((4, 32), 256), torch.ones(4, 1)), "0..255"),
    "zeros": (lambda: w8a16.pack(torch.zeros(4, 32).int(), torch.ones(4, 1), torch.full((4, 1), 256)), "0..255"),
    "codes (of 4 bits)": (lambda: w8a16.pack(w4a16.quantize_weight(torch.ones(4, 32))), "another format"),
    "codes (of 8 bits)": (lambda: w4a16.pack(w8a16.quantize_weight(torch.ones(4, 32))), "another format"),
    "bits": (
        lambda: w8a16.read_gptq(torch.zeros(8, 8).int(), None, torch.ones(1, 8).half(), bits=4, symmetric=True),
        "w4a16",
    ),
    "symmetric": (
        lambda: w8a16.read_gptq(
            torch.zeros(8, 8).int(), torch.full((1, 2), 0x7F7F7F7F).int(), torch.ones(1, 8).half(), version="gptq_v2",
            symmetric=True,
        ),
        "128",
    ),
    "version": (
        lambda: w8a16.read_gptq(torch.zeros(8, 8).int(), torch.zeros(1, 2).int(), torch.ones(1, 8).half()),
        "minus one",
    ),
    "format": (
        lambda: w8a16.read_compressed_tensors(torch.zeros(8, 8).int(), torch.ones(8, 1), format="marlin-24"),
        "pack-quantized",
    ),
    "numerics": (lambda: w8a16.gemm(torch.ones(1, 32), w8a16.quantize(torch.ones(4, 32)), numerics="fused"), "post"),
    "group_size": (lambda: w8a16.kernel_requests(64, 64, group_size=16, target="sm_90a"), "32"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name):
    call, words = BAD[name]
    with pytest.raises(ArgumentError, match=words) as caught:
        call()
    assert caught.value.argument == name.partition(" ")[0]


NAME = "model.layers.0.mlp.down_proj"
GROUP = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
FOLDERS = {
    "gptq": {"quant_method": "gptq", "bits": 8, "group_size": G, "sym": False, "desc_act": False},
    "auto-round": {
        "quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 8, "group_size": G,
        "sym": False, "data_type": "int",
    },
    "pack-quantized": {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": []},
    "int-quantized": {"quant_method": "compressed-tensors", "format": "int-quantized", "ignore": []},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "W8A16", "exclude_modules": ["lm_head"]},
}  # fmt: skip


@pytest.mark.parametrize("kind", FOLDERS)
def test_folders_are_read_layer_by_layer(kind, tmp_path):
    words = kind in ("gptq", "auto-round")
    codes, zeros, scales, weight = layer(not words, 5, g=G if words else K)
    config = FOLDERS[kind]
    if words:
        zeros[zeros == 0] = 1
        spread = np.repeat(zeros, G, axis=1), np.repeat(scales.astype(np.float64), G, axis=1)
        weight = (codes - spread[0]) * spread[1]
        tensors = {"qweight": packed_bytes(codes).T.contiguous(), "qzeros": packed_bytes((zeros - 1).T)}
        tensors["scales"] = torch.from_numpy(scales.T.copy())
    elif kind == "pack-quantized":
        tensors = {"weight_packed": packed_bytes(codes), "weight_scale": torch.from_numpy(scales)}
        tensors["weight_shape"] = torch.tensor([N, K])
    else:
        tensors = {"weight": torch.from_numpy(codes - 128).to(torch.int8), "weight_scale": torch.from_numpy(scales)}
        tensors["weight_scale"] = tensors["weight_scale"][:, 0] if kind == "modelopt" else tensors["weight_scale"]
    if kind.endswith("quantized"):
        acts = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
        own = {"targets": ["Linear"], "weights": GROUP, "input_activations": acts if kind[0] == "i" else None}
        config = config | {"config_groups": {"group_0": own}}
    save_file({f"{NAME}.{leaf}": t.contiguous() for leaf, t in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    model = w8a16.load_model(tmp_path)
    assert not model.skipped and torch.equal(values(model.layers[NAME]), torch.from_numpy(weight))
    assert "8" in w4a16.load_model(tmp_path).skipped[NAME] or kind in ("int-quantized", "modelopt")
    from terrazzo.ops.model_layers import of_folder

    ((found, _),) = of_folder(tmp_path).kinds.items()
    operator = "w8a8" if kind == "int-quantized" else "w8a16"  # what the config states of activations is followed
    assert (found.operator, found.n, found.k) == (operator, N, K)
