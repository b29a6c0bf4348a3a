"""Derived layouts: the pseudo-code of specs.md B.1 by hand, proofs, refusals, round trips, random derivations."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from terrazzo.layouts import CONVERTERS, INSTANCES, Fragment, derive, get_instance
from terrazzo.layouts.linear import LinearMap
from terrazzo.lowering.errors import LayoutError

RNG = np.random.default_rng(7)


def by_hand(layout, codes):
    """Packed words [blocks..., words] by the loops of the specification: no linear maps, one code at a time."""
    b, f = layout.storage_bits, layout.fragment
    per = 32 // f.bits
    registers, outputs, atoms = f.values // per, f.bits // b, len(layout.placement)
    n, k = codes.shape
    grid = (n // layout.block_rows, k // layout.block_k)
    out = np.zeros((*grid, f.threads * layout.load_words), dtype=np.uint64)
    for thread in range(f.threads):
        for atom in range(atoms):
            for register in range(registers):
                index = atom * registers + register if layout.order == "atom" else register * atoms + atom
                word, o = divmod(index, outputs)
                for e in range(per):
                    row, col = f(thread, register * per + e)
                    row, col = row + layout.placement[atom][0] * f.rows, col + layout.placement[atom][1] * f.cols
                    code = codes[row :: layout.block_rows, col :: layout.block_k].astype(np.uint64)
                    out[:, :, thread * layout.load_words + word] += code << np.uint64(b * (o + outputs * e))
    if layout.bit_map:  # words whose bits lie elsewhere
        out = sum((out >> np.uint64(bit) & np.uint64(1)) << np.uint64(to) for bit, to in enumerate(layout.bit_map))
    return (out if layout.block_order == "rk" else out.swapaxes(0, 1)).astype(np.uint32)


def random_codes(layout, n, k):
    kind = np.uint16 if layout.storage_bits == 16 else np.uint8
    return RNG.integers(0, 1 << layout.storage_bits, (n, k)).astype(kind)


def check(layout, codes):
    """numpy = torch = by hand (on whole blocks), and both unpack."""
    n, k = codes.shape
    words = layout.pack(codes)
    assert words.dtype == np.uint32 and words.nbytes == layout.nbytes(n, k)
    assert words.shape == (*layout.blocks(n, k), layout.words_per_block)
    assert (layout.unpack(words, n, k) == codes).all()
    tensor = torch.from_numpy(codes.view(np.int16) if codes.dtype == np.uint16 else codes)
    packed = layout.pack(tensor)
    assert packed.dtype == torch.int32 and (packed.numpy().view(np.uint32) == words).all()
    assert (layout.unpack(packed, n, k) == tensor).all()
    whole = np.zeros(layout.padded(n, k), codes.dtype)
    whole[:n, :k] = codes
    assert (by_hand(layout, whole) == words).all()


@pytest.mark.parametrize("name", INSTANCES)
def test_instance_packs_as_specified(name):
    layout = get_instance(name)
    check(layout, random_codes(layout, 2 * layout.block_rows, 3 * layout.block_k))
    check(layout, random_codes(layout, layout.block_rows + 3, layout.block_k - 5))


@pytest.mark.parametrize("name", INSTANCES)
def test_instance_proof_and_its_meaning(name):
    layout = get_instance(name)
    assert layout.prove().ok and "NO" not in str(layout.prove())
    # the proof in words: every element once; a warp's load is one run; a phase touches each bank once
    image = layout.map.table()
    assert sorted(image) == list(range(layout.block_rows * layout.block_k))
    w, lanes = layout.load_words, np.arange(32)
    for warp in range(layout.threads // 32):
        at = layout.memory(word=np.arange(w), thread=(lanes + 32 * warp)[:, None])["address"]
        assert (at.ravel() == np.arange(32 * w * warp, 32 * w * (warp + 1))).all()
        for phase in at.reshape(-1, 32 // w * w):
            assert len(set(phase % 32)) == 32


def test_the_instances_and_their_blocks():
    assert len(INSTANCES) == 20  # eleven of specs.md B.1, W4A16 in another order, W4A8's for e4m3, seven more formats
    assert get_instance("w4a8_fp8").identity == get_instance("w4a8_wgmma").identity  # e4m3 k32 lies as s8 k32
    layout = get_instance("w4a16_wgmma")
    assert (layout.block_rows, layout.block_k, layout.threads, layout.words_per_block) == (64, 64, 128, 512)
    assert get_instance("turbomind_u4").words_per_block * 4 == 256
    assert get_instance("w4a16_wgmma") is layout
    with pytest.raises(LayoutError, match="w4a16_wgmma"):
        get_instance("w4a17")


def test_word_a_feeds_mma_a():
    layout = get_instance("w4a16_wgmma")
    assert [layout.target(w, o) for w in range(4) for o in range(4)] == [(a, r) for a in range(4) for r in range(4)]
    dual = get_instance("w4a8_wgmma")  # word r: register r of MMA 0 (low nibbles) and of MMA 1 (high nibbles)
    assert [dual.target(w, o) for w in range(4) for o in range(2)] == [(a, r) for r in range(4) for a in range(2)]


def test_wgmma_block_is_four_mma_blocks():
    """One packed format serves mma.sync and wgmma: a warp's quarter of a wgmma block is an mma.sync A block."""
    codes = random_codes(get_instance("w4a16_wgmma"), 64, 64)
    quarter = derive(Fragment.mma_a(16), "u4_f16_exact", 4, 4, [(0, a) for a in range(4)])
    wide = get_instance("w4a16_wgmma").pack(codes).reshape(4, 128)
    assert (quarter.pack(codes).reshape(4, 128) == wide).all()


def test_identity_is_stable_and_separates():
    names = {name: get_instance(name).identity for name in INSTANCES}
    assert names["w4a8_fp8"] == names.pop("w4a8_wgmma")  # the same bytes: their weights' identities name the converter
    assert len(set(names.values())) == len(names)
    assert get_instance("w4a16_wgmma").identity == "wgmma_a16.b4.w4.64x64.atom.rk.605566ad75fc"
    again = derive(Fragment.wgmma_a(16), "u4_bf16_exact", 4, 4, [(0, a) for a in range(4)])
    assert again.identity == get_instance("w4a16_wgmma").identity  # the arithmetic does not change the bytes


def test_padding_uses_the_given_code():
    layout = get_instance("w4a16_wgmma")
    codes = random_codes(layout, 10, 20)
    whole = np.full((64, 64), 8, np.uint8)
    whole[:10, :20] = codes
    for pack in (layout.pack, lambda c, pad=0: layout.pack(torch.from_numpy(c), pad).numpy().view(np.uint32)):
        assert (pack(codes, pad=8) == layout.pack(whole)).all()
    assert layout.padded(10, 20) == (64, 64) and layout.blocks(0, 64) == (0, 1)
    assert layout.pack(np.zeros((0, 64), np.uint8)).shape == (0, 1, 512)


def test_signed_codes_are_twos_complement():
    layout = get_instance("w4a4_mma")
    signed = RNG.integers(-8, 8, (16, 64)).astype(np.int8)
    expected = layout.pack(signed.view(np.uint8) & 15)
    assert (layout.pack(signed) == expected).all()
    assert (layout.pack(torch.from_numpy(signed)).numpy().view(np.uint32) == expected).all()


def test_large_operands_are_packed_in_slabs(monkeypatch):
    monkeypatch.setattr("terrazzo.layouts.packed.SLAB", 64 * 128)
    layout = get_instance("turbomind_u4")
    check(layout, random_codes(layout, 160, 128))


@pytest.mark.parametrize("wrap", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
@pytest.mark.parametrize(
    "codes,name",
    [
        (np.zeros(64, np.uint8), "codes"),
        (np.zeros((64, 64), np.int32), "codes"),
        (np.full((64, 64), 16, np.uint8), "codes"),
        (np.full((64, 64), -9, np.int8), "codes"),
    ],
)
def test_bad_codes_are_refused(wrap, codes, name):
    with pytest.raises(LayoutError) as error:
        get_instance("w4a16_wgmma").pack(wrap(codes))
    assert error.value.argument == name


def test_bad_words_and_pad_are_refused():
    layout = get_instance("w4a16_wgmma")
    with pytest.raises(LayoutError, match="shape"):
        layout.unpack(np.zeros((1, 1, 256), np.uint32), 64, 64)
    with pytest.raises(LayoutError, match="shape"):
        layout.unpack(torch.zeros((2, 1, 512), dtype=torch.int32), 64, 64)
    with pytest.raises(LayoutError, match="pad"):
        layout.pack(np.zeros((64, 64), np.uint8), pad=16)


A16, K4 = Fragment.wgmma_a(16), [(0, k) for k in range(4)]
WORD_MAJOR = LinearMap.reshape({"thread": 7, "word": 2}, {"address": 9}).order(["word", "thread"], [])
GAPPED = LinearMap((("word", 2), ("thread", 7)), (("address", 9),), (1, 2, 4, 8, 16, 32, 128, 64, 256))
LANES_APART = LinearMap((("word", 2), ("thread", 7)), (("address", 9),), (1, 2, 64, 32, 16, 8, 4, 128, 256))


@pytest.mark.parametrize(
    "arguments,part",
    [
        ((A16, "u4_f16_magic", 2, 4, K4), "storage_bits"),
        ((Fragment.wgmma_a(8), "u4_f16_magic", 4, 4, K4), "fragment = 'wgmma_a8'"),
        ((Fragment.wgmma_c(24), "u4_f16_magic", 4, 4, K4), "fragment = 'wgmma_c32_n24'"),
        ((A16, "u4_f16_magic", 4, 3, K4), "load_words"),
        ((A16, "u4_f16_magic", 4, 4, K4, "word"), "order"),
        ((A16, "u4_f16_magic", 4, 4, K4, "atom", "nk"), "block_order"),
        ((A16, "u4_f16_magic", 4, 4, K4[:2]), "2 atoms need 8"),
        ((A16, "u4_f16_magic", 4, 4, [(0, 0), (0, 1), (0, 3), (0, 2), (0, 1)]), "placement"),
        ((A16, "u4_f16_magic", 4, 4, [(0, 1), (0, 0), (0, 2), (0, 3)]), "not linear"),
        ((A16, "u4_f16_magic", 4, 4, [(0, 0), (0, 0), (0, 1), (0, 1)]), "bijective"),
        ((A16, "u4_f16_magic", 4, 4, [(0, 0), (0, 1), (0, 2), (0, 4)]), "placement"),
        ((A16, "u4_f16_magic", 4, 4, K4, "atom", "rk", WORD_MAJOR), "coalesced"),
        ((A16, "u4_f16_magic", 4, 4, K4, "atom", "rk", LANES_APART), "banks"),
        ((A16, "u5_f16", 4, 4, K4), "converter"),
    ],
)
def test_derive_refuses_and_names_the_part(arguments, part):
    with pytest.raises(LayoutError, match=re.escape(part)):
        derive(*arguments)


def test_a_load_with_a_gap_is_not_coalesced():
    """Each thread's words are whole and no bank is asked twice; half a warp reads 256 bytes behind the other half."""
    with pytest.raises(LayoutError, match="coalesced: a warp's load is not one aligned run of 512 bytes") as error:
        derive(A16, "u4_f16_magic", 4, 4, K4, memory=GAPPED)
    assert "adjacent" not in str(error.value) and "banks:" not in str(error.value)


def test_bank_failure_alone_keeps_the_run():
    with pytest.raises(LayoutError) as error:
        derive(A16, "u4_f16_magic", 4, 4, K4, memory=LANES_APART)
    assert "coalesced" not in str(error.value) and "4 words of one bank" in str(error.value)


FRAGMENTS = [Fragment.mma_a(b) for b in (4, 8, 16)] + [Fragment.wgmma_a(b) for b in (8, 16)]
FRAGMENTS += [Fragment.mma_b(b, n) for b in (4, 8, 16) for n in (8, 16)]


@st.composite
def derivations(draw):
    """A random fragment (sometimes with its index bits stirred), converter, load width, placement and orders."""
    fragment = draw(st.sampled_from(FRAGMENTS))
    if draw(st.booleans()):
        columns = list(fragment.map.columns)
        for target, source in draw(st.lists(st.tuples(*[st.integers(0, len(columns) - 1)] * 2), max_size=4)):
            columns[target] ^= columns[source] * (target != source)
        stirred = LinearMap(fragment.map.ins, fragment.map.outs, tuple(draw(st.permutations(columns))))
        fragment = Fragment(
            "stirred", fragment.bits, fragment.threads, fragment.values, fragment.rows, fragment.cols, stirred
        )
    converter = draw(st.sampled_from([c for c in CONVERTERS.values() if c.operand_bits == fragment.bits]))
    words = draw(st.sampled_from([w for w in (1, 2, 4) if w * converter.outputs >= fragment.registers]))
    atoms = words * converter.outputs // fragment.registers
    wide = atoms.bit_length() - 1
    along_rows = draw(st.integers(0, wide))
    order = draw(st.permutations(range(wide)))
    spots = []
    for atom in range(atoms):
        moved = sum((atom >> bit & 1) << at for at, bit in enumerate(order))
        spots.append((moved & ((1 << along_rows) - 1), moved >> along_rows))
    return (
        fragment,
        converter,
        words,
        spots,
        draw(st.sampled_from(["atom", "reg"])),
        draw(st.sampled_from(["rk", "kr"])),
    )


@settings(max_examples=40, deadline=None)
@given(derivations(), st.integers(1, 3), st.integers(1, 3), st.integers(0, 5), st.integers(0, 5))
def test_random_derivations_pack_as_specified(derivation, rows, depth, less_n, less_k):
    fragment, converter, words, spots, order, block_order = derivation
    layout = derive(fragment, converter, converter.storage_bits, words, spots, order, block_order)
    assert layout.prove().ok
    check(layout, random_codes(layout, rows * layout.block_rows - less_n, depth * layout.block_k - less_k))


@pytest.mark.parametrize("torch_side", [False, True], ids=["numpy", "torch"])
def test_empty_codes_pack_to_nothing_and_other_words_are_refused(torch_side):
    layout = get_instance("w4a16_wgmma")
    made = (lambda a: torch.from_numpy(a)) if torch_side else (lambda a: a)
    codes = made(np.zeros((70, 60), np.uint8))
    words = layout.pack(codes)
    assert layout.unpack(words, 70, 60).shape == (70, 60)
    for empty in (codes[:0], codes[:, :0]):
        packed = layout.pack(empty)
        assert tuple(packed.shape[:2]) == layout.blocks(*empty.shape) and packed.dtype == words.dtype
        back = layout.unpack(packed, *empty.shape)
        assert back.shape == empty.shape and back.dtype == empty.dtype
    bad = [
        ("codes", lambda: layout.pack(None)),
        ("pad", lambda: layout.pack(codes, pad=None)),
        ("words", lambda: layout.unpack(made(np.zeros(tuple(words.shape), np.float32)), 70, 60)),
        ("words", lambda: layout.unpack(made(np.zeros(tuple(words.shape), np.int64)), 70, 60)),
        ("words", lambda: layout.unpack(None, 70, 60)),
        ("n", lambda: layout.unpack(words, None, 60)),
        ("k", lambda: layout.unpack(words, 70, 60.0)),
    ]
    if torch_side:
        bad += [("codes", lambda: layout.pack(codes.to("meta"))), ("codes", lambda: layout.pack(codes.to_sparse()))]
        bad.append(("words", lambda: layout.unpack(words.to_sparse(), 70, 60)))
    for argument, call in bad:
        with pytest.raises(LayoutError, match=f"^{argument} = "):
            call()


def test_describes_itself():
    text = str(get_instance("w4a16_wgmma"))
    assert "64 x 64, 128 threads x 4 words (2048 bytes)" in text and "field   1 -> row 8" in text
