"""TileLang's own emitters are asked for their fragment layouts; ours, as TileLang Fragments, must be equal."""

import itertools

import pytest
from terrazzo.layouts import Fragment

tilelang = pytest.importorskip("tilelang", reason="tilelang is not installed: its emitters cannot be asked")
from terrazzo.layouts.tilelang import fragment  # noqa: E402

ACCUMULATOR = {"float16": "float32", "int8": "int32", "int4": "int32"}
BITS = {"float16": 16, "int8": 8, "int4": 4}


def emitter(kind: str, dtype: str, k: int, rows: int = 4, cols: int = 1, width: int = 16):
    """Of a GEMM of these warps along M and N; width: columns of a warp."""
    from tilelang.cuda.intrinsics.macro import mma_macro_generator, wgmma_macro_generator

    module = mma_macro_generator if kind == "mma" else wgmma_macro_generator
    return module.TensorCoreIntrinEmitter(
        a_dtype=dtype,
        b_dtype=dtype,
        accum_dtype=ACCUMULATOR[dtype],
        a_transposed=False,
        b_transposed=True,
        block_row_warps=rows,
        block_col_warps=cols,
        warp_row_tiles=16,
        warp_col_tiles=width,
        chunk=k,
    )


def buffer(shape, dtype):
    from tvm import tirx

    return tirx.decl_buffer(shape, dtype, scope="local.fragment")


@pytest.mark.parametrize("kind,dtype", [("mma", "float16"), ("mma", "int8"), ("wgmma", "float16"), ("wgmma", "int8")])
@pytest.mark.parametrize("warps", [4, 8])
@pytest.mark.parametrize("atoms", [1, 4])
def test_a_operand(kind, dtype, warps, atoms):
    atom = (Fragment.mma_a if kind == "mma" else Fragment.wgmma_a)(BITS[dtype])
    shape = 16 * warps, atom.cols * atoms
    theirs = emitter(kind, dtype, shape[1], warps).make_mma_load_layout(buffer(shape, dtype), "A")
    assert fragment(atom, *shape).is_equal(theirs)


def test_a_operand_that_warps_share():
    theirs = emitter("mma", "float16", 64, rows=2, cols=2).make_mma_load_layout(buffer((32, 64), "float16"), "A")
    ours = fragment(Fragment.mma_a(16), 32, 64)
    assert ours.replicate(2).is_equal(theirs) and not ours.is_equal(theirs)


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("warps", [1, 4])
def test_b_operand(dtype, warps):
    """16 rows of each warp. Of int4 TileLang repeats an atom of 8 rows over other threads, 16 rows over two warps'."""
    atom = Fragment.mma_b(BITS[dtype], 8 if dtype == "int4" else 16)
    shape = 16 * warps, 2 * atom.cols
    theirs = emitter("mma", dtype, shape[1], 1, warps).make_mma_load_layout(buffer(shape, dtype), "B")
    assert fragment(atom, *shape).is_equal(theirs)


def test_a_operand_of_four_bits():
    """TileLang states this layout twice: its inverse follows CuTe, as ours; its forward map swaps registers 1 and 2.

    (tilelang 0.1.15, shared_16x64_to_mma_a_32x32_layout.) The hardware order is the inverse's.
    """
    from tilelang.cuda.intrinsics.layout.mma_layout import mma_load_a_32x32_to_shared_16x64_layout as inverse

    atom = Fragment.mma_a(4)
    for thread, value in itertools.product(range(32), range(32)):
        assert tuple(map(int, inverse(thread, value))) == atom(thread, value)
    theirs = emitter("mma", "int4", 64).make_mma_load_layout(buffer((64, 64), "int4"), "A")
    assert not fragment(atom, 64, 64).is_equal(theirs), (
        "TileLang's forward map is mended: say so in docs/tile-programs.md"
    )


@pytest.mark.parametrize("kind,n", [*(("mma", n) for n in (16, 32, 64)), *(("wgmma", n) for n in (8, 24, 64, 96, 256))])
def test_accumulator(kind, n):
    """Of one warpgroup that mma.sync keeps busy, and of two on wgmma."""
    warps = 4 if kind == "mma" else 8
    atom = Fragment.mma_c(n) if kind == "mma" else Fragment.wgmma_c(n)
    theirs = emitter(kind, "float16", 64, warps, width=n).make_mma_store_layout(buffer((16 * warps, n), "float32"))
    assert fragment(atom, 16 * warps, n).is_equal(theirs)
