"""Instances against the published permutations of Marlin, QServe and TurboMind, written here without library code."""

import numpy as np
import pytest
from terrazzo.layouts import get_instance

RNG = np.random.default_rng(3)


def nibbles_to_words(nibbles):
    """[..., 8] nibbles, lowest first, to uint32."""
    return (nibbles.astype(np.uint64) << (4 * np.arange(8, dtype=np.uint64))).sum(axis=-1).astype(np.uint32)


def marlin(codes):
    """Marlin: 16 x 16 tiles of W^T, a permutation over 1024 codes, then the interleave 0 2 4 6 1 3 5 7."""
    lane = np.arange(32)
    column, first_row = lane // 4, 2 * (lane % 4)
    thread = []  # eight codes of a lane in one 16 x 16 tile, as positions of the flattened [k, n] tile
    for half in (0, 8):
        for row in (0, 1, 8, 9):
            thread.append(16 * (first_row + row) + column + half)
    thread = np.stack(thread, axis=1)  # [lane, 8]
    order = (thread[:, None, :] + 256 * np.arange(4)[:, None]).reshape(-1)  # four neighbouring tiles along n
    order = order.reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(-1)
    n, k = codes.shape
    tiles = codes.T.reshape(k // 16, 16, n // 16, 16).transpose(0, 2, 1, 3).reshape(k // 16, n * 16)
    return nibbles_to_words(tiles.reshape(-1, 1024)[:, order].reshape(k // 16, -1, 8))


def qserve(codes):
    """QServe g128: 32 x 32 tiles, (n: 2, 2, 8) x (k: 2, 4, 4); two rows 16 apart share a byte."""
    n, k = codes.shape
    parts = codes.reshape(n // 32, 2, 2, 8, k // 32, 2, 4, 4)
    outer = parts.transpose(0, 4, 3, 6, 5, 2, 7, 1)  # tile n, tile k, lane (8, 4), k half, n half, 4 bytes, nibble
    pairs = np.ascontiguousarray(outer[..., 0] | outer[..., 1] << 4)
    return pairs.view(np.uint32).reshape(n // 32, k // 32, -1)


def turbomind(codes, k_outer):
    """TurboMind u4: the four published steps on one 32 x 16 (n, k) tile.

    Extend codes to u16, read them with ldmatrix (n rows of k), compress each lane's eight values in lop3 order, store
    32 lanes x 2 fragments x 8 nibbles.
    """
    n, k = codes.shape
    out = np.zeros((n // 32, k // 16, 32, 2), np.uint32)
    for tile_n in range(n // 32):
        for tile_k in range(k // 16):
            wide = codes[32 * tile_n : 32 * tile_n + 32, 16 * tile_k : 16 * tile_k + 16].astype(np.uint16)
            for fragment in range(2):
                for lane in range(32):
                    values = []
                    for matrix in range(4):  # ldmatrix.x4: matrices (n 0, k 0), (n 0, k 8), (n 8, k 0), (n 8, k 8)
                        row = 16 * fragment + 8 * (matrix // 2) + lane // 4
                        col = 8 * (matrix % 2) + 2 * (lane % 4)
                        values += [wide[row, col], wide[row, col + 1]]
                    compressed = np.array([values[v] for v in (0, 2, 4, 6, 1, 3, 5, 7)])  # 7531 6420 from the top
                    out[tile_n, tile_k, lane, fragment] = nibbles_to_words(compressed)
    return (out.swapaxes(0, 1) if k_outer else out).reshape(
        *((k // 16, n // 32) if k_outer else (n // 32, k // 16)), 64
    )


@pytest.mark.parametrize("n,k", [(64, 16), (256, 128), (128, 64)])
def test_marlin(n, k):
    codes = RNG.integers(0, 16, (n, k), dtype=np.uint8)
    assert (get_instance("marlin_u4").pack(codes).reshape(k // 16, -1) == marlin(codes)).all()


@pytest.mark.parametrize("n,k", [(32, 32), (96, 128)])
def test_qserve(n, k):
    codes = RNG.integers(0, 16, (n, k), dtype=np.uint8)
    assert (get_instance("qserve_g128").pack(codes) == qserve(codes)).all()


@pytest.mark.parametrize("name,k_outer", [("turbomind_u4", True), ("turbomind_u4_moe", False)])
def test_turbomind(name, k_outer):
    codes = RNG.integers(0, 16, (96, 64), dtype=np.uint8)
    assert (get_instance(name).pack(codes) == turbomind(codes, k_outer)).all()


def test_liquid_dual_mma():
    """LiquidGEMM: low nibbles are the registers of the first k32 MMA, high nibbles those of the second."""
    codes = RNG.integers(0, 16, (64, 64), dtype=np.uint8)
    words = get_instance("w4a8_wgmma").pack(codes)[0, 0].reshape(128, 4)
    for thread in range(128):
        warp, g, t = thread // 32, thread % 32 // 4, thread % 4
        for r in range(4):
            row, k = 16 * warp + g + 8 * (r % 2), 4 * t + 16 * (r // 2)
            low, high = codes[row, k : k + 4], codes[row, 32 + k : 32 + k + 4]
            assert int(words[thread, r]) == sum((int(low[b]) | int(high[b]) << 4) << 8 * b for b in range(4))


@pytest.mark.parametrize("name,bits", [("turbomind_mxfp4", 4), ("turbomind_e4m3", 8)])
def test_turbomind_weights_as_a(name, bits):
    """Operand A, pack 1: registers (g, k low), (g + 8, k low), (g, k high), (g + 8, k high), o + O*e within a word."""
    codes = RNG.integers(0, 1 << bits, (16, 16), dtype=np.uint8)
    words, outputs = get_instance(name).pack(codes)[0, 0].reshape(32, -1), 16 // bits
    for lane in range(32):
        for register in range(4):
            row, col = lane // 4 + 8 * (register % 2), 2 * (lane % 4) + 8 * (register // 2)
            word, o = divmod(register, outputs)
            for e in range(2):
                field = int(words[lane, word]) >> bits * (o + outputs * e) & ((1 << bits) - 1)
                assert field == codes[row, col + e]
