"""TileLang's Layout of every packed weight and KV format says where `pack` puts each code."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from terrazzo.layouts import INSTANCES, PackedLayout, get_instance
from terrazzo.layouts.linear import LinearMap
from terrazzo.layouts.units import UnitLayout, derive_unit
from terrazzo.lowering.errors import LayoutError
from terrazzo.ops.attention.cache.layout import CacheLayout, QuantizedBlock
from terrazzo.ops.products.kv import FORMATS, HEAD_DIMS, TILE_TOKENS, KVFormat
from terrazzo.ops.products.product import Product
from terrazzo.ops.products.table import PRODUCTS
from terrazzo.ops.w4ax.format import unit_layout

pytest.importorskip("tilelang", reason="tilelang is not installed: its layouts cannot be asked")
from terrazzo.layouts import tilelang as tl

RNG = np.random.default_rng(3)


def images(layout, shape: tuple[int, int]) -> tuple[tuple[int, ...], list[np.ndarray]]:
    """Shape of a TileLang Layout's image, and its indices at every (row, k), through its own expressions."""
    from tvm import tirx

    at = [tirx.Var(name, "int32") for name in "ik"]
    i, k = np.indices(shape)
    names = {"i": i, "k": k}
    found = [np.broadcast_to(eval(str(one), names), shape) for one in layout.map_forward_index(at)]
    return tuple(map(int, layout.get_output_shape())), found


def placed(layout, codes: np.ndarray, bits: int, bit_map: tuple[int, ...]) -> np.ndarray:
    """Words with each code in the word and field that a TileLang Layout says; a field that is no code's is 0."""
    shape, at = images(layout, codes.shape)
    assert shape[-1] == 32 // bits and len(set(np.ravel_multi_index(at, shape).flat)) == codes.size
    fields = np.zeros(shape, np.uint64)
    fields[tuple(at)] = codes
    words = (fields << (np.arange(shape[-1], dtype=np.uint64) * np.uint64(bits))).sum(-1, dtype=np.uint64)
    if bit_map:  # words whose bits lie elsewhere
        words = sum((words >> np.uint64(bit) & np.uint64(1)) << np.uint64(to) for bit, to in enumerate(bit_map))
    return words.astype(np.uint32)


def random_codes(bits: int, n: int, k: int) -> np.ndarray:
    return RNG.integers(0, 1 << bits, (n, k)).astype(np.uint16 if bits == 16 else np.uint8)


def check_packed(packed: PackedLayout) -> None:
    n, k = 2 * packed.block_rows, 3 * packed.block_k
    codes = random_codes(packed.storage_bits, n, k)
    made = placed(tl.layout(packed, n, k), codes, packed.storage_bits, packed.bit_map)
    assert np.array_equal(made, packed.pack(codes))


@pytest.mark.parametrize("name", INSTANCES)
def test_every_instance(name: str) -> None:
    check_packed(get_instance(name))


def packings(product: Product) -> Iterator[PackedLayout | UnitLayout]:
    """How its weights are packed: blocks, or units with the parameters of their groups."""
    if product.converted:
        yield from (derive_unit(product.layout, 2, 128 // group, 2) for group in product.codes.groups)
    elif product.planned:
        yield from map(unit_layout, (4, 8))
    else:
        yield from map(get_instance, {product.layout, *(it.layout for it in product.programs if it.layout)})


@pytest.mark.parametrize("product", PRODUCTS, ids=lambda it: it.record)
def test_every_weight(product: Product) -> None:
    for packed in packings(product):
        if isinstance(packed, PackedLayout):
            check_packed(packed)
            continue
        n, k, block = 2 * packed.block.block_rows, 3 * packed.unit_k, packed.block
        codes = random_codes(block.storage_bits, n, k)
        planes = [torch.zeros(n, k // packed.unit_k * packed.groups, dtype=torch.uint8) for _ in range(packed.planes)]
        words = packed.pack(torch.from_numpy(codes), *planes).numpy().view(np.uint32)
        made = placed(tl.layout(packed, n, k), codes, block.storage_bits, block.bit_map)
        assert made.shape == (*words.shape[:2], packed.code_words) and not words[..., packed.code_words :].any()
        assert np.array_equal(made, words[..., : packed.code_words])


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_kv_format(fmt: KVFormat, head_dim: int) -> None:
    """Keys, and where they can be, values; one channel group of tokens, or two tiles."""
    cache = CacheLayout(fmt.name, fmt.name if fmt.for_values else "float16", head_dim)
    tokens = max(cache.block_tokens, 2 * TILE_TOKENS)
    codes = {role: random_codes(it.bits, tokens, head_dim) for role, it in (("k", cache.k), ("v", cache.v))}
    zeros = lambda it: torch.zeros((tokens,) if it.token_wise else (1, head_dim), dtype=torch.float16)
    block = lambda role, it: QuantizedBlock(
        torch.from_numpy(codes[role].view(np.int16) if it.bits == 16 else codes[role]), zeros(it), zeros(it)
    )
    words = cache.pack(block("k", cache.k), block("v", cache.v)).numpy().view(np.uint32)
    tiles = words.reshape(-1)[cache.channel_words :] if cache.k.group else words
    tiles = tiles.reshape(tokens // TILE_TOKENS, cache.tile_words)
    for role, packed, first, size in (
        ("k", cache.k_layout, 0, cache.k_words),
        ("v", cache.v_layout, cache.k_words, cache.v_words),
    ):
        for tile, held in zip(tiles, codes[role].reshape(-1, TILE_TOKENS, head_dim)):
            held = held if role == "k" else held.T
            made = placed(tl.layout(packed, *held.shape), held, packed.storage_bits, packed.bit_map)
            assert np.array_equal(made.reshape(-1), tile[first : first + size])


def test_weights_of_bytes_lie_as_tilelang_swizzles_them() -> None:
    """w8a8's blocks are wgmma's operand in shared memory, rows of 128 bytes: TileLang's swizzle, byte by byte."""
    from tilelang.layout import make_wgmma_swizzled_layout
    from tvm import tirx

    theirs = make_wgmma_swizzled_layout(tirx.decl_buffer((64, 128), "int8", scope="shared"))
    theirs, ours = (images(one, (64, 128)) for one in (theirs, tl.layout(get_instance("w8a8"), 64, 128)))
    at = [np.ravel_multi_index(index, shape) for shape, index in (theirs, ours)]
    assert np.array_equal(*at) and len(np.unique(at[0])) == 64 * 128


def test_expressions_are_the_map() -> None:
    """Random maps, of single bits and of sums of them, at every input."""
    for _ in range(50):
        columns = tuple(map(int, RNG.choice([0, 1, 2, 4, 8, 16, 32, *RNG.integers(0, 64, 3)], 7)))
        bits = LinearMap((("a", 3), ("b", 4)), (("c", 4), ("d", 2)), columns)
        a, b = np.indices((8, 16))
        made, right = tl.expressions(bits, a=a, b=b), bits(a=a, b=b)
        for name in "cd":
            assert np.array_equal(np.broadcast_to(made[name], a.shape), right[name])


def test_what_is_no_whole_operand_is_refused() -> None:
    block = get_instance("w4a16")
    for n, k, name in ((63, 64, "n"), (64, 32, "k"), (0, 64, "n"), (64.0, 64, "n")):
        with pytest.raises(LayoutError, match=f"{name} = .*must be a positive multiple of 64"):
            tl.layout(block, n, k)
    with pytest.raises(LayoutError, match="rows = 96.*multiple of 64"):
        tl.fragment(block.fragment, 96, 64)
    with pytest.raises(LayoutError, match="at = .*must name every input once"):
        tl.expressions(block.map, field=0, word=0)
