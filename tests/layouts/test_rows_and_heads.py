"""Parameter rows (specs.md B.3) and the head permutation (B.5) against their published formulas."""

import numpy as np
import pytest
from terrazzo.layouts import Fragment, derive_rows
from terrazzo.layouts.heads import head_map, head_permutation
from terrazzo.lowering.errors import LayoutError


def test_wgmma_rows_are_warp_group_pair():
    layout = derive_rows(Fragment.wgmma_a(16), 64)
    expected = [16 * warp + g + 8 * pair for warp in range(4) for g in range(8) for pair in range(2)]
    assert list(layout.index) == expected and layout.pair == 2
    thread = np.arange(128)
    assert (layout.slot(thread) == 2 * (8 * (thread // 32) + thread % 32 // 4)).all()


@pytest.mark.parametrize(
    "fragment,rows",
    [(Fragment.mma_a(8), 16), (Fragment.mma_a(16), 64), (Fragment.mma_c(), 16), (Fragment.mma_b(8), 32)],
)
def test_thread_finds_its_rows_in_its_slots(fragment, rows):
    layout = derive_rows(fragment, rows)
    assert sorted(layout.index) == list(range(rows))
    for thread in range(fragment.threads):
        own = {int(fragment(thread, value)[0]) for value in range(fragment.values)}
        slot = layout.slot(thread)
        assert set(layout.index[slot : slot + layout.pair]) == own


@pytest.mark.parametrize("n,groups", [(64, 1), (100, 3), (1, 2), (0, 4)])
def test_pack_and_unpack(n, groups):
    import torch

    layout = derive_rows(Fragment.wgmma_a(16), 64)
    values = np.random.default_rng(0).normal(size=(n, groups)).astype(np.float16)
    packed = layout.pack(values)
    assert packed.shape == (-(-n // 64), groups, 64)
    for row in range(n):
        slot = int(np.flatnonzero(layout.index == row % 64)[0])
        assert (packed[row // 64, :, slot] == values[row]).all()
    assert (layout.unpack(packed, n) == values).all()
    moved = layout.pack(torch.from_numpy(values))
    assert (moved.numpy() == packed).all() and (layout.unpack(moved, n).numpy() == values).all()


def test_rows_refuse_what_does_not_fit():
    layout = derive_rows(Fragment.wgmma_a(16), 64)
    for call, name in (
        (lambda: derive_rows(Fragment.wgmma_a(16), 96), "block_rows"),
        (lambda: layout.pack(np.zeros(64)), "values"),
        (lambda: layout.unpack(np.zeros((1, 2, 64)), 65), "packed"),
    ):
        with pytest.raises(LayoutError) as error:
            call()
        assert error.value.argument == name


@pytest.mark.parametrize("bits", [16, 8, 4, 2])
@pytest.mark.parametrize("head_dim", [64, 128, 256, 192])
def test_head_permutation_is_the_published_formula(bits, head_dim):
    x_count = 16 // bits
    if head_dim % (16 * x_count):
        with pytest.raises(LayoutError, match="head_dim"):
            head_permutation(bits, head_dim)
        return
    expected = np.full(head_dim, -1)
    for k in range(0, head_dim // 16, x_count):
        for x in range(x_count):
            for d in range(2):
                for t in range(4):
                    for i in range(2):
                        expected[16 * (k + x) + 8 * d + 2 * t + i] = (
                            16 * k + 8 * x_count * d + 2 * x_count * t + 2 * x + i
                        )
    got = head_permutation(bits, head_dim)
    assert (got == expected).all() and sorted(got) == list(range(head_dim))
    assert head_map(bits).is_bijective


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_permuted_q_times_delivered_k_is_the_dot_product(bits):
    """Q in P_X order against K rows that went through ldmatrix and were dealt to slices pair by pair."""
    rng, dim, x_count = np.random.default_rng(bits), 128, 16 // bits
    q, k = rng.integers(-8, 8, (8, dim)), rng.integers(-8, 8, (16, dim))
    permuted = q[:, head_permutation(bits, dim)]
    scores = np.zeros((16, 8), dtype=int)
    for span in range(0, dim, 16 * x_count):
        for lane in range(32):
            g, t = lane // 4, lane % 4
            for half in range(2):  # ldmatrix registers: rows g, g + 8
                for d in range(2):
                    first = span + x_count * (8 * d + 2 * t)  # two b16 units of X dimensions
                    held = k[g + 8 * half, first : first + 2 * x_count]
                    for x in range(x_count):
                        column = span + 16 * x + 8 * d + 2 * t
                        scores[g + 8 * half] += permuted[:, column : column + 2] @ held[2 * x : 2 * x + 2]
    assert (scores == k @ q.T).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_output_rows_return_to_their_dimensions(bits):
    x_count = 16 // bits
    order = head_permutation(bits, 128)
    for m in range(0, 8, x_count):
        for x in range(x_count):
            for d in range(2):
                for r in range(8):
                    real = 16 * m + 8 * x_count * d + 2 * x + 2 * x_count * (r // 2) + r % 2
                    assert order[16 * (m + x) + 8 * d + r] == real


def test_head_map_refuses_odd_widths():
    with pytest.raises(LayoutError, match="bits"):
        head_map(3)
