"""Writes the golden layers of this folder: an independent reading of the published packings, in plain loops.

    python tests/data/make_golden.py          # rewrites the files and SHA256SUMS; the same bytes every time

It imports nothing from terrazzo and shares no code with the importers. Sources: AutoAWQ packing_utils.py (gemm),
AutoGPTQ qlinear_cuda_old.py and GPTQModel (gptq, gptq_v2), compressed-tensors pack_quantized.py. Each file holds the
layer's tensors under the prefix "layer.", what they mean under "expected." (codes, zeros and scales by original input
channel and group; weight = round_to_scale_dtype((q - z) * s)), and the config as metadata.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
AWQ_ORDER_MAP = [0, 2, 4, 6, 1, 3, 5, 7]


def to_bf16_bits(x: np.ndarray) -> np.ndarray:
    """float64 -> bfloat16 bits, nearest even (by way of float32, which holds every product met here exactly)."""
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16_bits(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def write(name: str, tensors: dict[str, tuple[str, np.ndarray]], config: dict) -> None:
    """A safetensors file by its specification: u64 header length, JSON header padded to 8 bytes, then the data."""
    header: dict[str, object] = {"__metadata__": {"config": json.dumps(config, sort_keys=True)}}
    blobs, offset = [], 0
    for key, (dtype, array) in sorted(tensors.items()):
        blob = np.ascontiguousarray(array).tobytes()
        header[key] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [offset, offset + len(blob)]}
        blobs.append(blob)
        offset += len(blob)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (HERE / f"{name}.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blobs))


def write_sums(folder: Path) -> None:
    """SHA256SUMS of the files of a folder."""
    files = sorted(folder.glob("*.safetensors"))
    lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files]
    (folder / "SHA256SUMS").write_text("".join(lines))


def random_layer(
    seed: int, n: int, k: int, g: int, symmetric: bool, g_idx: np.ndarray | None = None, bf16: bool = False
):
    """codes [N, K], zeros and scales [N, G], weight [N, K]; scales as in a trained layer (log-normal, 1e-3 .. 5e-2)."""
    rng = np.random.default_rng(seed)
    groups = (k + g - 1) // g
    codes = np.clip(np.rint(rng.normal(7.5, 3.2, (n, k))), 0, 15).astype(np.int64)
    zeros = (
        np.full((n, groups), 8)
        if symmetric
        else np.clip(np.rint(rng.normal(7.5, 2.5, (n, groups))), 1, 15).astype(np.int64)
    )
    raw = np.exp(rng.normal(-4.8, 0.6, (n, groups)))
    scales = from_bf16_bits(to_bf16_bits(raw)) if bf16 else raw.astype(np.float16).astype(np.float64)
    weight = np.zeros((n, k))
    for column in range(k):
        group = column // g if g_idx is None else int(g_idx[column])
        for row in range(n):
            weight[row, column] = (codes[row, column] - zeros[row, group]) * scales[row, group]
    return codes, zeros, scales, weight


def floats(x: np.ndarray, bf16: bool = False) -> tuple[str, np.ndarray]:
    return ("BF16", to_bf16_bits(x)) if bf16 else ("F16", x.astype(np.float16))


def expected(codes, zeros, scales, weight, bf16: bool = False) -> dict[str, tuple[str, np.ndarray]]:
    return {
        "expected.codes": ("U8", codes.astype(np.uint8)),
        "expected.zeros": ("U8", zeros.astype(np.uint8)),
        "expected.scales": floats(scales, bf16),
        "expected.weight": floats(weight, bf16),
    }


def signed_words(words: list[list[int]]) -> np.ndarray:
    """Words as int32, the dtype that checkpoints store."""
    return np.array(words, dtype=np.uint64).astype(np.uint32).view(np.int32)


def awq_pack(matrix: np.ndarray) -> np.ndarray:
    """[R, N] -> int32 [R, N/8]: nibble i of word c is column 8c + AWQ_ORDER_MAP[i]."""
    out = []
    for r in range(matrix.shape[0]):
        row = []
        for c in range(matrix.shape[1] // 8):
            word = 0
            for i in range(8):
                word |= int(matrix[r, 8 * c + AWQ_ORDER_MAP[i]]) << (4 * i)
            row.append(word)
        out.append(row)
    return signed_words(out)


def pack_columns(matrix: np.ndarray) -> np.ndarray:
    """[R, C] -> int32 [R, ceil(C/8)]: nibble i of word c is column 8c + i; missing columns are 0."""
    out = []
    for r in range(matrix.shape[0]):
        row = []
        for c in range((matrix.shape[1] + 7) // 8):
            word = 0
            for i in range(8):
                if 8 * c + i < matrix.shape[1]:
                    word |= int(matrix[r, 8 * c + i]) << (4 * i)
            row.append(word)
        out.append(row)
    return signed_words(out)


def awq(name: str, seed: int, n: int, k: int, g: int, digest_only: bool = False) -> None:
    layer = random_layer(seed, n, k, g, symmetric=False)
    codes, zeros, scales, _ = layer
    tensors = {
        "layer.qweight": ("I32", awq_pack(codes.T)),
        "layer.qzeros": ("I32", awq_pack(zeros.T)),
        "layer.scales": floats(scales.T),
    }
    config = {"quant_method": "awq", "bits": 4, "group_size": g, "zero_point": True, "version": "gemm"}
    if digest_only:  # a larger layer: state the weight by its digest, to keep the file small
        config["expected_weight_sha256"] = hashlib.sha256(expected(*layer)["expected.weight"][1].tobytes()).hexdigest()
    write(name, tensors if digest_only else tensors | expected(*layer), config)


def gptq(
    name: str, seed: int, n: int, k: int, g: int, *, symmetric: bool, act_order: bool = False, v2: bool = False
) -> None:
    g_idx = np.arange(k) // g
    if act_order:
        g_idx = g_idx[np.random.default_rng(seed + 1).permutation(k)]
    layer = random_layer(seed, n, k, g, symmetric, g_idx)
    codes, zeros, scales, _ = layer
    stored = zeros if v2 else (zeros - 1) & 15
    tensors = {
        "layer.qweight": ("I32", pack_columns(codes).T),  # words run along K: [K/8, N]
        "layer.qzeros": ("I32", pack_columns(stored.T)),
        "layer.scales": floats(scales.T),
        "layer.g_idx": ("I32", g_idx.astype(np.int32)),
    }
    config = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": g,
        "desc_act": act_order,
        "sym": symmetric,
        "checkpoint_format": "gptq_v2" if v2 else "gptq",
    }
    write(name, tensors | expected(*layer), config)


def compressed(
    name: str,
    seed: int,
    n: int,
    k: int,
    g: int,
    *,
    symmetric: bool,
    act_order: bool = False,
    bf16: bool = True,
    int8_zeros: bool = False,
) -> None:
    g_idx = np.arange(k) // g
    if act_order:
        g_idx = g_idx[np.random.default_rng(seed + 1).permutation(k)]
    layer = random_layer(seed, n, k, g, symmetric, g_idx, bf16)
    codes, zeros, scales, _ = layer
    signed, signed_zeros = codes - 8, zeros - 8  # what compressed-tensors quantizes to; packing adds the 8 again
    tensors = {
        "layer.weight_packed": ("I32", pack_columns(signed + 8)),
        "layer.weight_scale": floats(scales, bf16),
        "layer.weight_shape": ("I64", np.array([n, k])),
    }
    if int8_zeros:
        tensors["layer.weight_zero_point"] = ("I8", signed_zeros.astype(np.int8))
    elif not symmetric:
        tensors["layer.weight_zero_point"] = ("I32", pack_columns((signed_zeros + 8).T).T)  # packed along N: [N/8, G]
    if act_order:
        tensors["layer.weight_g_idx"] = ("I32", g_idx.astype(np.int32))
    weights = {"num_bits": 4, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": g}
    weights["actorder"] = "group" if act_order else None
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        "ignore": ["lm_head"],
    }
    write(name, tensors | expected(*layer, bf16), config)


def main() -> None:
    awq("awq", 1, 128, 256, 128)
    awq("awq_g32", 2, 72, 160, 32)
    awq("awq_demo", 3, 256, 512, 128, digest_only=True)
    gptq("gptq_sym", 4, 128, 256, 128, symmetric=True)
    gptq("gptq_asym", 5, 96, 256, 64, symmetric=False)
    gptq("gptq_act_order", 6, 128, 256, 64, symmetric=True, act_order=True)
    gptq("gptq_act_order_ragged", 7, 64, 352, 128, symmetric=False, act_order=True)
    gptq("gptq_v2_asym", 8, 128, 256, 128, symmetric=False, v2=True)
    compressed("ct_sym", 9, 128, 256, 128, symmetric=True)
    compressed("ct_asym", 10, 128, 256, 32, symmetric=False)
    compressed("ct_act_order", 11, 128, 256, 128, symmetric=False, act_order=True, bf16=False)
    compressed("ct_ragged", 12, 83, 203, 64, symmetric=False)
    compressed("ct_int8_zeros", 13, 40, 128, 64, symmetric=False, int8_zeros=True)
    write_sums(HERE)


if __name__ == "__main__":
    main()
