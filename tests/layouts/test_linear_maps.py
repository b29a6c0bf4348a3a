"""The algebra of linear maps over bits."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from terrazzo.layouts.linear import LinearMap
from terrazzo.lowering.errors import LayoutError

QUICK = settings(max_examples=40, deadline=None)


@st.composite
def invertible(draw) -> LinearMap:
    """A random invertible matrix on 6 bits: a bit permutation followed by column operations."""
    columns = [1 << bit for bit in draw(st.permutations(range(6)))]
    for target, source in draw(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12)):
        if target != source:
            columns[target] ^= columns[source]
    return LinearMap((("a", 4), ("b", 2)), (("x", 3), ("y", 3)), tuple(columns))


@QUICK
@given(invertible())
def test_inverse_undoes_the_map(m):
    assert m.is_bijective
    ends = m.inverse() @ m
    assert ends == LinearMap.identity(m.ins)
    image = m(a=np.arange(16)[:, None], b=np.arange(4))
    back = m.inverse()(**image)
    assert (back["a"] == np.arange(16)[:, None]).all() and (back["b"] == np.arange(4)).all()


@QUICK
@given(invertible(), invertible())
def test_composition_is_application(f, g):
    g = g.rename(a="u", b="v", x="x1", y="y1")
    link = LinearMap.reshape(f.outs, g.ins)
    values = np.arange(64)
    inner = link(**f(a=values & 15, b=values >> 4))
    assert all(((g @ link @ f)(a=values & 15, b=values >> 4)[name] == part).all() for name, part in g(**inner).items())


@QUICK
@given(invertible(), invertible())
def test_quotient_of_a_product_is_the_factor(f, g):
    product = f * g
    assert product.in_bits == f.in_bits + g.in_bits and product.rank == f.rank + g.rank
    assert product.divide(f) == g
    low = product(a=5, b=3)  # the low bits behave as f
    assert low == f(a=5, b=3)


def test_product_places_the_outer_map_above():
    tile = LinearMap.from_function(lambda lane: {"row": lane // 2, "col": lane % 2}, {"lane": 2}, {"row": 1, "col": 1})
    steps = LinearMap.reshape({"atom": 2}, {"col": 2})
    assert (tile * steps)(lane=3, atom=2) == {"row": 1, "col": 1 + 2 * 2}


def test_divide_refuses_what_does_not_tile():
    f = LinearMap.from_function(lambda i: {"o": i ^ (i >> 1)}, {"i": 3}, {"o": 3})
    with pytest.raises(LayoutError, match="left"):
        f.divide(LinearMap.identity({"i": 1}).rename(i="i"))
    with pytest.raises(LayoutError, match="left"):
        f.divide(LinearMap.from_function(lambda i: {"o": 3 * i}, {"i": 1}, {"o": 2}))


def test_from_function_refuses_carries_and_overflow():
    with pytest.raises(LayoutError, match="linear"):
        LinearMap.from_function(lambda i: {"o": (i + 1) % 8}, {"i": 3}, {"o": 3})
    with pytest.raises(LayoutError, match="outside"):
        LinearMap.from_function(lambda i: {"o": 2 * i}, {"i": 3}, {"o": 3})


def test_rank_tells_broadcast_and_holes():
    broadcast = LinearMap.from_function(lambda t, v: {"row": v}, {"t": 2, "v": 3}, {"row": 3})
    assert broadcast.is_surjective and not broadcast.is_injective and broadcast.rank == 3
    holes = LinearMap.from_function(lambda v: {"row": 2 * v}, {"v": 2}, {"row": 3})
    assert holes.is_injective and not holes.is_surjective
    for bad in (broadcast, holes):
        with pytest.raises(LayoutError, match="full rank"):
            bad.inverse()


def test_names_must_meet():
    f, g = LinearMap.identity({"x": 3}), LinearMap.identity({"y": 3})
    with pytest.raises(LayoutError, match="rename or reshape"):
        f @ g
    assert (f @ LinearMap.reshape({"y": 3}, {"x": 3}))(y=5) == {"x": 5}
    with pytest.raises(LayoutError, match="inputs"):
        f + f
    with pytest.raises(LayoutError, match="bits"):
        LinearMap.reshape({"x": 3}, {"y": 2})


def test_sum_of_disjoint_inputs_and_views():
    f = LinearMap.identity({"x": 2}).rename(x="x") + LinearMap((("y", 2),), (("x", 4),), (4, 8))
    assert f.is_bijective and f(x=3, y=2) == {"x": 3 + 8}
    assert f.restrict({"y": range(1, 2)})(y=1) == {"x": 8}
    assert f.restrict(outs={"x": 2}).rank == 2
    assert f.order(["y"], []).ins == (("y", 2), ("x", 2))
    assert list(f.table()) == list(range(16))


def test_str_shows_every_bit():
    text = str(LinearMap.from_function(lambda i: {"o": i ^ (i >> 1)}, {"i": 2}, {"o": 2}))
    assert text.splitlines() == ["(i:4) -> (o:4)", "  i   1 -> o 1", "  i   2 -> o 3"]
