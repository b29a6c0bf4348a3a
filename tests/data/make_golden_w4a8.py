"""Writes the golden W4A8 layers of the folder w4a8/: an independent reading of the published packings, in plain loops.

    python tests/data/make_golden_w4a8.py     # rewrites the files and w4a8/SHA256SUMS; the same bytes every time

It imports nothing from terrazzo. Sources: QServe w4a8_linear.py and deepcompressor's backend (qserve), llm-compressor's
W4A8 preset with compressed-tensors "int-quantized" and "pack-quantized". Each file holds the layer's tensors under the
prefix "layer.", what they mean under "expected.": the weight as float64, and for QServe the int8 values of level 1.
"""

from __future__ import annotations

import numpy as np
from make_golden import HERE, floats, pack_columns, write, write_sums


def qserve_order(codes: np.ndarray) -> np.ndarray:
    """[N, K] -> bytes [N, K/2]: blocks of 32 x 32; byte (m8, k4, k2, m2, k) holds rows m2*8 + m8 and 16 further on."""
    n, k = codes.shape
    out = np.zeros((n // 32, k // 32, 512), np.uint8)
    for row in range(n):
        for column in range(k):
            block, r = divmod(row, 32)
            depth, c = divmod(column, 32)
            high, r = divmod(r, 16)
            m2, m8 = divmod(r, 8)
            k2, c = divmod(c, 16)
            k4, e = divmod(c, 4)
            at = (((m8 * 4 + k4) * 2 + k2) * 2 + m2) * 4 + e
            out[block, depth, at] |= int(codes[row, column]) << (4 * high)
    return out.reshape(n, k // 2).view(np.int8)


def qserve_rows(values: np.ndarray) -> np.ndarray:
    """[N, G] -> [G, N], rows of each 32 in the order 0 8 16 24 1 9 17 25 ..."""
    order = [32 * block + 8 * j + i for block in range(values.shape[0] // 32) for i in range(8) for j in range(4)]
    return np.ascontiguousarray(values[order].T)


def qserve_group(name: str, seed: int, n: int, k: int, g: int, *, shifted: bool = False) -> None:
    """Level 1 to +-119, level 2 as q = round(v / s) + z; `shifted`: codes that do not start at 0."""
    rng = np.random.default_rng(seed)
    first = rng.normal(0, 30, (n, k))
    first = np.clip(np.rint(first), -119, 119)
    s1 = np.exp(rng.normal(-7, 0.3, n)).astype(np.float16)
    codes, s2, z2 = np.zeros((n, k), np.int64), np.zeros((n, k // g), np.int64), np.zeros((n, k // g), np.int64)
    level1 = np.zeros((n, k), np.int64)
    for row in range(n):
        for group in range(k // g):
            part = slice(group * g, group * g + g)
            low, high = min(first[row, part].min(), 0), max(first[row, part].max(), 0)
            scale = max(1, int(np.ceil((high - low) / 15)))
            zero = int(np.rint(-low / scale))
            q = np.clip(np.rint(first[row, part] / scale) + zero, 3 if shifted else 0, 15).astype(np.int64)
            codes[row, part], s2[row, group], z2[row, group] = q, scale, zero * scale
            level1[row, part] = q * scale - zero * scale
    assert level1.min() >= -128 and level1.max() <= 127
    tensors = {
        "layer.qweight": ("I8", qserve_order(codes)),
        "layer.s1_scales": ("F16", s1),
        "layer.s2_scales": ("I8", qserve_rows(s2).astype(np.int8)),
        "layer.s2_zeros": ("I8", (-qserve_rows(z2)).astype(np.int16).astype(np.int8)),
        "expected.bytes": ("I8", level1.astype(np.int8)),
        "expected.weight": ("F64", level1 * s1.astype(np.float64)[:, None]),
    }
    write(name, tensors, {"format": "qserve", "group_size": g})


def qserve_channel(name: str, seed: int, n: int, k: int) -> None:
    rng = np.random.default_rng(seed)
    codes, zeros = rng.integers(0, 16, (n, k)), rng.integers(0, 16, n)
    s1 = np.exp(rng.normal(-4, 0.3, n)).astype(np.float16)
    tensors = {
        "layer.qweight": ("I8", qserve_order(codes)),
        "layer.s1_scales": ("F16", s1),
        "layer.s1_szeros": ("F16", (zeros.astype(np.float16) * s1)),
        "expected.bytes": ("I8", (codes - zeros[:, None]).astype(np.int8)),
        "expected.weight": ("F64", (codes - zeros[:, None]) * s1.astype(np.float64)[:, None]),
    }
    write(name, tensors, {"format": "qserve", "group_size": -1})


def compressed(name: str, seed: int, n: int, k: int, g: int, *, packed: bool, whole: bool = False) -> None:
    """Signed 4-bit values with a float scale for each group; `whole`: small multiples of one number for each row."""
    rng = np.random.default_rng(seed)
    groups = 1 if g == -1 else -(-k // g)
    size = k if g == -1 else g
    values = np.clip(np.rint(rng.normal(0, 3.2, (n, k))), -8, 7).astype(np.int64)
    scales = np.exp(rng.normal(-4.8, 0.3, (n, groups)))
    if whole:
        scales = 2.0 ** rng.integers(-9, -5, (n, 1)) * np.where(
            np.arange(groups) == 0, 1, rng.integers(1, 15, (n, groups))
        )
    kind, stored = floats(scales)
    weight = np.zeros((n, k))
    for row in range(n):
        for column in range(k):
            weight[row, column] = values[row, column] * float(stored[row, column // size])
    tensors = {
        "layer.weight_scale": (kind, stored),
        "expected.weight": ("F64", weight),
    }
    if packed:
        tensors |= {"layer.weight": ("I32", pack_columns(values + 8)), "layer.weight_shape": ("I64", np.array([n, k]))}
    else:
        tensors |= {"layer.weight": ("I8", values.astype(np.int8))}
    write(name, tensors, {"format": "compressed_tensors", "group_size": g, "exact": whole or g == -1})


def main() -> None:
    (HERE / "w4a8").mkdir(exist_ok=True)
    qserve_group("w4a8/qserve_g128", 1, 64, 256, 128)
    qserve_group("w4a8/qserve_g64", 2, 32, 192, 64, shifted=True)
    qserve_channel("w4a8/qserve_channel", 3, 32, 96)
    compressed("w4a8/ct_channel", 4, 40, 203, -1, packed=False)
    compressed("w4a8/ct_channel_packed", 5, 24, 128, -1, packed=True)
    compressed("w4a8/ct_group_whole", 6, 24, 160, 32, packed=True, whole=True)
    compressed("w4a8/ct_group", 7, 48, 256, 128, packed=False)
    write_sums(HERE / "w4a8")


if __name__ == "__main__":
    main()
