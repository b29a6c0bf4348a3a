"""Fragments against two independent sources: the PTX manual's index formulas and CuTe's thread-value layouts."""

import itertools

import numpy as np
import pytest
from terrazzo.layouts import Fragment
from terrazzo.layouts.heads import a_tile_addresses
from terrazzo.layouts.linear import LinearMap
from terrazzo.lowering.errors import LayoutError


def cute(shape, stride):
    """Coordinates of a CuTe layout mode in colexicographic order (first sub-mode fastest)."""
    index = [sum(c * s for c, s in zip(reversed(at), stride)) for at in itertools.product(*map(range, reversed(shape)))]
    return np.array(index)


# (fragment, rows of the column-major tile, thread mode, value mode), as CUTLASS defines its atoms
CUTE = {
    "mma_a16": (Fragment.mma_a(16), 16, ((4, 8), (32, 1)), ((2, 2, 2), (16, 8, 128))),
    "mma_a8": (Fragment.mma_a(8), 16, ((4, 8), (64, 1)), ((4, 2, 2), (16, 8, 256))),
    "mma_a4": (Fragment.mma_a(4), 16, ((4, 8), (128, 1)), ((8, 2, 2), (16, 8, 512))),
    "mma_b16": (Fragment.mma_b(16), 8, ((4, 8), (16, 1)), ((2, 2), (8, 64))),
    "mma_b8": (Fragment.mma_b(8), 8, ((4, 8), (32, 1)), ((4, 2), (8, 128))),
    "mma_b4": (Fragment.mma_b(4), 8, ((4, 8), (64, 1)), ((8, 2), (8, 256))),
    "mma_c": (Fragment.mma_c(), 16, ((4, 8), (32, 1)), ((2, 2), (16, 8))),
    "wgmma_a16": (Fragment.wgmma_a(16), 64, ((4, 8, 4), (128, 1, 16)), ((2, 2, 2), (64, 8, 512))),
    "wgmma_a8": (Fragment.wgmma_a(8), 64, ((4, 8, 4), (256, 1, 16)), ((4, 2, 2), (64, 8, 1024))),
    "wgmma_c_n24": (Fragment.wgmma_c(24), 64, ((4, 8, 4), (128, 1, 16)), ((2, 2, 3), (64, 8, 512))),
    "wgmma_c_n256": (Fragment.wgmma_c(256), 64, ((4, 8, 4), (128, 1, 16)), ((2, 2, 32), (64, 8, 512))),
}


@pytest.mark.parametrize("name", CUTE)
def test_equals_cute(name):
    fragment, rows, thread, value = CUTE[name]
    offset = cute(*thread)[:, None] + cute(*value)
    row, col = fragment(np.arange(fragment.threads)[:, None], np.arange(fragment.values))
    assert (row == offset % rows).all() and (col == offset // rows).all()
    assert sorted(offset.ravel()) == list(range(fragment.rows * fragment.cols))


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_equals_the_ptx_manual(bits):
    per = 32 // bits  # elements of one register
    a, b = Fragment.mma_a(bits), Fragment.mma_b(bits)
    for lane, i in itertools.product(range(32), range(4 * per)):
        group, member = lane >> 2, lane % 4
        low_rows = i < per or 2 * per <= i < 3 * per
        row = group if low_rows else group + 8
        col = member * per + i % per + (0 if i < 2 * per else 4 * per)
        assert a(lane, i) == (row, col)
        if i < 2 * per:
            assert b(lane, i) == (group, member * per + i % per + (0 if i < per else 4 * per))


@pytest.mark.parametrize(
    "fragment",
    [Fragment.mma_a(b) for b in (4, 8, 16)]
    + [Fragment.wgmma_a(b) for b in (8, 16)]
    + [Fragment.mma_b(b, n) for b in (4, 8, 16) for n in (8, 16, 32)]
    + [Fragment.mma_c(n, b) for n in (8, 16, 64) for b in (16, 32)]
    + [Fragment.wgmma_c(n) for n in (8, 64, 256)],
    ids=lambda f: f.name,
)
def test_power_of_two_fragments_are_bijective(fragment):
    assert fragment.map.is_bijective
    assert fragment.threads * fragment.values == fragment.rows * fragment.cols
    assert fragment.registers * fragment.elements_per_register == fragment.values


def test_several_n_tiles_follow_one_another():
    pair, single = Fragment.mma_b(16, 16), Fragment.mma_b(16)
    for lane, value in itertools.product(range(32), range(8)):
        row, col = single(lane, value % 4)
        assert pair(lane, value) == (row + 8 * (value // 4), col)


def emulate_ldmatrix(memory, addresses, count, trans):
    """ldmatrix by its definition: lane i addresses a row of eight b16; registers [32, count, 2]."""
    registers = np.zeros((32, count, 2), dtype=memory.dtype)
    for matrix in range(count):
        rows = [memory[r, c : c + 8] for r, c in addresses[8 * matrix : 8 * matrix + 8]]
        tile = np.stack(rows)
        tile = tile.T if trans else tile
        for lane in range(32):
            registers[lane, matrix] = tile[lane // 4, 2 * (lane % 4) : 2 * (lane % 4) + 2]
    return registers


@pytest.mark.parametrize("count,trans", itertools.product((1, 2, 4), (False, True)))
def test_matrix_fragment_is_ldmatrix(count, trans):
    stack = np.arange(64 * count).reshape(8 * count, 8)
    expected = emulate_ldmatrix(stack, [(row, 0) for row in range(8 * count)], count, trans)
    fragment = Fragment.ldmatrix(count, trans)
    row, col = fragment(np.arange(32)[:, None], np.arange(2 * count))
    assert (stack[row, col] == expected.reshape(32, -1)).all()
    # stmatrix writes what ldmatrix read: the composition is the identity on the stack
    stored = np.zeros_like(stack)
    row, col = Fragment.stmatrix(count, trans)(np.arange(32)[:, None], np.arange(2 * count))
    stored[row, col] = expected.reshape(32, -1)
    assert (stored == stack).all()


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_ldmatrix_of_an_a_tile_fills_the_a_fragment(bits):
    assert Fragment.ldmatrix(4).through(a_tile_addresses(), bits) == Fragment.mma_a(bits).map


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_ldmatrix_of_two_b_tiles_fills_the_b_fragment(bits):
    where = LinearMap.from_function(
        lambda lane: {"row": lane % 8 + 8 * (lane // 16), "col": 8 * (lane // 8 % 2)}, {"lane": 5}, {"row": 4, "col": 4}
    )
    assert Fragment.ldmatrix(4).through(where, bits) == Fragment.mma_b(bits, 16).map


def test_transposed_ldmatrix_reads_b_with_n_contiguous():
    where = LinearMap.from_function(
        lambda lane: {"row": lane % 16, "col": 8 * (lane // 16)}, {"lane": 5}, {"row": 4, "col": 4}
    )
    k_by_n = Fragment.ldmatrix(4, trans=True).through(where)
    assert k_by_n.rename(row="k", col="n") == Fragment.mma_b(16, 16).map.rename(row="n", col="k").order([], ["k", "n"])


def test_packed_f16_accumulator_is_an_stmatrix_source():
    where = LinearMap.from_function(
        lambda lane: {"row": lane % 16, "col": 8 * (lane // 16)}, {"lane": 5}, {"row": 4, "col": 4}
    )
    assert Fragment.stmatrix(4).through(where) == Fragment.mma_c(16, bits=16).map


@pytest.mark.parametrize(
    "make,name",
    [
        (lambda: Fragment.mma_a(2), "bits"),
        (lambda: Fragment.wgmma_a(4), "bits"),
        (lambda: Fragment.wgmma_c(12), "n"),
        (lambda: Fragment.wgmma_c(264), "n"),
        (lambda: Fragment.mma_c(8, 8), "bits"),
        (lambda: Fragment.mma_b(16, 24), "n"),
        (lambda: Fragment.ldmatrix(3), "count"),
    ],
)
def test_unknown_shapes_are_refused_by_name(make, name):
    with pytest.raises(LayoutError) as error:
        make()
    assert error.value.argument == name
