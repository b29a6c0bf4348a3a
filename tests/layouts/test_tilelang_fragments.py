"""TileLang's own emitters are asked for their fragment layouts; ours must be equal, element by element."""

import itertools

import pytest
from terrazzo.layouts import Fragment

tilelang = pytest.importorskip("tilelang", reason="tilelang is not installed: its emitters cannot be asked")

ACCUMULATOR = {"float16": "float32", "int8": "int32", "int4": "int32"}
BITS = {"float16": 16, "int8": 8, "int4": 4}


def emitter(kind: str, dtype: str, rows: int, k: int):
    from tilelang.cuda.intrinsics.macro import mma_macro_generator, wgmma_macro_generator

    module = mma_macro_generator if kind == "mma" else wgmma_macro_generator
    return module.TensorCoreIntrinEmitter(
        a_dtype=dtype,
        b_dtype=dtype,
        accum_dtype=ACCUMULATOR[dtype],
        a_transposed=False,
        b_transposed=True,
        block_row_warps=rows // 16,
        block_col_warps=1,
        warp_row_tiles=16,
        warp_col_tiles=16,
        chunk=k,
    )


def buffer(shape, dtype):
    from tvm import tirx

    return tirx.decl_buffer(shape, dtype, scope="local.fragment")


def theirs(layout, rows: int, cols: int) -> dict[tuple[int, int], tuple[int, int]]:
    """(row, col) -> (thread, value) of a TileLang Fragment, through its compiled expressions."""
    from tvm import tirx

    i, j = tirx.Var("i", "int32"), tirx.Var("j", "int32")
    thread, value = str(layout.map_forward_thread([i, j])[0]), str(layout.map_forward_index([i, j])[0])
    place = compile(f"({thread}, {value})", "<fragment>", "eval")
    return {(r, c): eval(place, {"i": r, "j": c}) for r, c in itertools.product(range(rows), range(cols))}


def ours(fragment: Fragment, atoms: int = 1) -> dict[tuple[int, int], tuple[int, int]]:
    """The same of a Fragment, repeated along the columns."""
    table = {}
    for thread, value, atom in itertools.product(range(fragment.threads), range(fragment.values), range(atoms)):
        row, col = fragment(thread, value)
        table[row, col + atom * fragment.cols] = (thread, value + atom * fragment.values)
    return table


@pytest.mark.parametrize("kind,dtype", [("mma", "float16"), ("mma", "int8"), ("wgmma", "float16"), ("wgmma", "int8")])
@pytest.mark.parametrize("atoms", [1, 4])
def test_a_operand(kind, dtype, atoms):
    fragment = (Fragment.mma_a if kind == "mma" else Fragment.wgmma_a)(BITS[dtype])
    rows, k = fragment.rows, fragment.cols * atoms
    layout = emitter(kind, dtype, rows, k).make_mma_load_layout(buffer((rows, k), dtype), "A")
    assert theirs(layout, rows, k) == ours(fragment, atoms)


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_b_operand(dtype):
    fragment = Fragment.mma_b(BITS[dtype], 16)
    layout = emitter("mma", dtype, 16, fragment.cols).make_mma_load_layout(buffer((16, fragment.cols), dtype), "B")
    assert theirs(layout, 16, fragment.cols) == ours(fragment)


def test_b_operand_of_four_bits():
    fragment = Fragment.mma_b(4)
    layout = emitter("mma", "int4", 16, 64).make_mma_load_layout(buffer((8, 64), "int4"), "B")
    assert theirs(layout, 8, 64) == ours(fragment)


def test_a_operand_of_four_bits():
    """TileLang states this layout twice: its inverse follows CuTe, as ours; its forward map swaps registers 1 and 2.

    (tilelang 0.1.15, shared_16x64_to_mma_a_32x32_layout.) The hardware order is the inverse's; the forward map may be
    either, so that a corrected TileLang passes too.
    """
    from tilelang.cuda.intrinsics.layout.mma_layout import mma_load_a_32x32_to_shared_16x64_layout as inverse

    fragment = Fragment.mma_a(4)
    table = ours(fragment)
    assert {tuple(map(int, inverse(t, v))): (t, v) for t, v in itertools.product(range(32), range(32))} == table
    layout = emitter("mma", "int4", 16, 64).make_mma_load_layout(buffer((16, 64), "int4"), "A")
    exchanged = {at: (t, v % 8 + 8 * (0, 2, 1, 3)[v // 8]) for at, (t, v) in table.items()}
    assert theirs(layout, 16, 64) in (table, exchanged)


@pytest.mark.parametrize("kind,dtype", [("mma", "float16"), ("mma", "int8"), ("wgmma", "float16"), ("wgmma", "int8")])
def test_accumulator(kind, dtype):
    fragment = Fragment.mma_c(16) if kind == "mma" else Fragment.wgmma_c(16)
    rows = fragment.rows
    layout = emitter(kind, dtype, rows, 32).make_mma_store_layout(buffer((rows, 16), ACCUMULATOR[dtype]))
    assert theirs(layout, rows, 16) == ours(fragment)
