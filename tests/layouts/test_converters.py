"""Every converter, exhaustively over all half-words, against the definition of its storage format."""

from fractions import Fraction

import layout_oracle
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from terrazzo.layouts import CONVERTERS, get_converter
from terrazzo.layouts.converters import arith, codebook
from terrazzo.lowering.errors import LayoutError

PLAIN = [c for c in CONVERTERS.values() if not c.params]
WORDS = layout_oracle.every_half_word()


def test_words_are_exhaustive_in_both_halves():
    assert len(set(WORDS & 0xFFFF)) == len(set(WORDS >> 16)) == 1 << 16


STORAGES = ("u2", "u4", "s4", "z4", "u8", "s8", "e4m3", "e2m1", "nf4")


@pytest.mark.parametrize("name", [c.name for c in PLAIN if c.storage in STORAGES])
def test_plain_converter_gives_the_stored_values(name):
    c = get_converter(name)
    value = layout_oracle.table(c.storage, c.storage_bits)
    value = (layout_oracle.rounded(value, c.operand) if c.storage == "nf4" else value)[
        layout_oracle.fields(WORDS, c.storage_bits)
    ]
    code = layout_oracle.fields(WORDS, c.storage_bits)
    got = arith.elements(c.emulate(c.stored(WORDS)), c.operand)
    for o in range(c.outputs):
        for e in range(c.elements):
            expected = (value[:, c.pos(o, e)] + c.bias[o]) * 2.0 ** c.scale_exp2[o]
            same = got[:, o, e] == expected
            if c.storage == "e4m3":  # NaN: 480 by bit moves, NaN where the operand is e4m3 itself
                same |= code[:, c.pos(o, e)] & 0x7F == 0x7F
            assert same.all(), (o, e)


@pytest.mark.parametrize("name", [c.name for c in CONVERTERS.values() if c.params == ("s0", "s1")])
def test_scaled_operands_are_the_stored_values_times_the_scale_of_their_row(name):
    """Scales are powers of two, in words with what the operand's exponent has more than the code's."""
    c = get_converter(name)
    value = layout_oracle.table(c.storage, c.storage_bits)
    value = (layout_oracle.rounded(value, c.operand) if c.storage == "nf4" else value)[
        layout_oracle.fields(WORDS, c.storage_bits)
    ]
    code = layout_oracle.fields(WORDS, c.storage_bits)
    more = {"e2m1": (14, 126), "e4m3": (0, 120), "u8": (0, 0), "nf4": (0, 0)}[c.storage]
    encode, lacks = (arith.half, 2.0 ** more[0]) if c.operand == "float16" else (arith.brain, 2.0 ** more[1])
    scales = [np.uint32(arith.pair(encode(lacks * s))) for s in (0.5, 0.125)]
    got = arith.elements(c.emulate(c.stored(WORDS), *scales), c.operand)
    for o in range(c.outputs):
        for e in range(c.elements):
            same = got[:, o, e] == (value[:, c.pos(o, e)] + c.bias[o]) * (0.5, 0.125)[o % 2] * 2.0 ** c.scale_exp2[o]
            same |= (c.storage == "e4m3") & (code[:, c.pos(o, e)] & 0x7F == 0x7F)  # NaN
            assert same.all(), (o, e)


def test_nf4_is_made_of_quantiles():
    assert np.abs(np.array(codebook.NF4) - layout_oracle.nf4()).max() < 2e-7


@pytest.mark.parametrize("short", ["bf16", "f16"])
def test_a_product_with_a_scale_is_rounded_once(short):
    c, rng = get_converter(f"nf4_{short}_scaled"), np.random.default_rng(0)
    scale = np.float64(rng.uniform(0.5, 2, len(WORDS)).astype(np.float16 if short == "f16" else np.float32))
    bits = arith.to_f16(scale) if short == "f16" else arith.to_bf16(scale)
    word = bits.astype(np.uint32) * np.uint32(0x10001)
    kept = arith.elements(word, c.operand)[..., 0]
    got = arith.elements(c.emulate(c.stored(WORDS), word, word), c.operand)
    table = layout_oracle.rounded(layout_oracle.table("nf4", 4), c.operand)
    for o in range(4):
        product = table[layout_oracle.fields(WORDS, 4)[:, c.pos(o, 1)]] * kept
        near = arith.to_f16(product) if short == "f16" else arith.to_bf16(product)
        assert (arith.elements(near.astype(np.uint32), c.operand)[..., 0] == got[:, o, 1]).all()


@pytest.mark.parametrize("short", ["bf16", "f16"])
def test_both_scales_in_one_word_give_what_a_word_for_each_gives(short):
    apart, paired = CONVERTERS[f"e2m1_{short}_scaled"], CONVERTERS[f"e2m1_{short}_paired"]
    scales = np.random.default_rng(0).integers(0x1000, 0x7000, (2, len(WORDS)), dtype=np.uint32)
    held = paired.emulate(paired.stored(WORDS), scales[0] | scales[1] << np.uint32(16))
    assert (held == apart.emulate(apart.stored(WORDS), *(scales * np.uint32(0x10001)))).all()


@pytest.mark.parametrize("name", [c.name for c in CONVERTERS.values() if c.bit_map])
def test_bits_are_moved_and_none_is_lost(name):
    c = get_converter(name)
    assert sorted(c.bit_map) == list(range(32))
    for bit, to in enumerate(c.bit_map):
        assert c.stored(np.uint32(1 << bit)) == np.uint32(1 << to)


@pytest.mark.parametrize("name", ["f16_f16", "bf16_bf16"])
def test_sixteen_bit_identities(name):
    assert (get_converter(name).emulate(WORDS)[:, 0] == WORDS).all()


@pytest.mark.parametrize("name", ["u4_f16_subnormal", "u4_f16_magic", "u4_bf16_biased", "u4_f16_exact"])
def test_nibble_order_is_75316420(name):
    c = get_converter(name)
    assert [c.pos(o, e) for e in range(2) for o in range(4)] == list(range(8))
    order = [None] * 8
    for value in range(8):
        order[c.pos(value // 2, value % 2)] = value
    assert order[::-1] == [7, 5, 3, 1, 6, 4, 2, 0]


@pytest.mark.parametrize("operand,significand,least", [("f16", 11, -24), ("bf16", 8, -133)])
def test_exact_rounds_once(operand, significand, least):
    """(q - z) * s correctly rounded for every q, z and scales over the whole range, checked in rational arithmetic."""
    c = get_converter(f"u4_{operand}_exact")
    rng = np.random.default_rng(1)
    encode = arith.to_f16 if operand == "f16" else arith.to_bf16
    numbers = arith.f16_values if operand == "f16" else arith.bf16_values
    scales = encode(
        np.concatenate([rng.uniform(0.5, 1, 40) * 2.0 ** rng.integers(-14, 8, 40), [2.0**-24, 6e-8, 1e-5, 1.0]])
    )
    s = scales.astype(np.uint32) * np.uint32(0x10001)
    for z in range(17):
        b = [np.uint32(encode(np.float64(bias + z))) * np.uint32(0x10001) for bias in c.param_bias]
        for q in range(16):
            got = numbers(c.emulate(np.uint32(q * 0x11111111), b[0], s, b[1], s))
            for lane, scale in enumerate(numbers(s)[:, 0]):
                expected = layout_oracle.round_to(Fraction(q - z) * Fraction(float(scale)), significand, least)
                assert (got[lane] == float(expected)).all(), (q, z, scale)


@pytest.mark.parametrize("operand,significand,least", [("f16", 11, -24), ("bf16", 8, -133)])
def test_bytes_less_any_zero_point_round_once(operand, significand, least):
    """(u - z) * s of every byte and zero point, which one scale makes exact and others round correctly."""
    c = get_converter(f"u8_{operand}_exact")
    encode = arith.to_f16 if operand == "f16" else arith.to_bf16
    numbers = arith.f16_values if operand == "f16" else arith.bf16_values
    s = encode(np.array([1.0, 0.00731, 5.9e-8, 3.25])).astype(np.uint32) * np.uint32(0x10001)
    values, bytes_ = numbers(s)[:, 0], np.arange(256, dtype=np.uint32) * np.uint32(0x01010101)
    for z in range(256):
        b = [np.uint32(encode(np.float64(bias + z))) * np.uint32(0x10001) for bias in c.param_bias]
        got = numbers(c.emulate(bytes_[:, None], b[0], s, b[1], s))
        assert (got[:, 0] == (np.arange(256) - z)[:, None, None]).all()
        if z % 51 == 0:
            for q in range(256):
                exact = [
                    float(layout_oracle.round_to((q - z) * Fraction(float(v)), significand, least)) for v in values
                ]
                assert (got[q] == np.array(exact)[:, None, None]).all(), (q, z)


@pytest.mark.parametrize("operand,significand,least", [("f16", 11, -24), ("bf16", 8, -133)])
def test_fused_rounds_the_offset_and_the_sum(operand, significand, least):
    c = get_converter(f"u4_{operand}_fused")
    encode = arith.to_f16 if operand == "f16" else arith.to_bf16
    numbers = arith.f16_values if operand == "f16" else arith.bf16_values
    for scale in (0.00731, 0.0299, 1.7e-3):
        s = np.uint32(encode(np.float64(scale))) * np.uint32(0x10001)
        exact = Fraction(float(numbers(s)[0]))
        for z in range(17):
            m = layout_oracle.round_to(-z * exact, significand, least)
            b = np.uint32(encode(np.float64(float(m)))) * np.uint32(0x10001)
            for q in range(16):
                expected = float(layout_oracle.round_to(q * exact + m, significand, least))
                assert (numbers(c.emulate(np.uint32(q * 0x11111111), b, s, b, s)) == expected).all()


@pytest.mark.parametrize("name", [c.name for c in CONVERTERS.values() if c.params == ("b0", "s0", "b1", "s1")])
def test_affine_params_belong_to_row_parity(name):
    """Exhaustive words: even output registers obey (b0, s0), odd ones (b1, s1), and each element its own field."""
    c = get_converter(name)
    encode = arith.to_f16 if c.operand == "float16" else arith.to_bf16
    exact = name.endswith("exact")
    z, s = (5.0, 11.0), (0.25, 2.0)  # powers of two: no rounding, so the value shows which pair was used
    b = [(c.param_bias[i] + z[i]) if exact else -z[i] * s[i] for i in range(2)]
    params = [np.uint32(encode(np.float64(v))) * np.uint32(0x10001) for v in (b[0], s[0], b[1], s[1])]
    got, code = arith.elements(c.emulate(WORDS, *params), c.operand), layout_oracle.fields(WORDS, c.storage_bits)
    for o in range(c.outputs):
        for e in range(c.elements):
            assert (got[:, o, e] == (code[:, c.pos(o, e)] - z[o % 2]) * s[o % 2]).all()


def test_lqq_is_the_signed_byte_for_every_group():
    """All (s, a) with q*s + a <= 255, all q: the paper's identity, in lanes, for both variants."""
    s, a = np.meshgrid(np.arange(1, 17), np.arange(256), indexing="ij")
    keep = 15 * s + a <= 255
    s, a = s[keep].astype(np.uint32), a[keep].astype(np.uint32)
    words = np.uint32(0xFEDCBA98), np.uint32(0x76543210)
    for word in words:
        code = layout_oracle.fields(np.array(word), 4)
        signed = arith.elements(get_converter("u4_s8_lqq").emulate(word, s, a * np.uint32(0x01010101)), "int8")
        plain = arith.elements(get_converter("u4_u8_lqq").emulate(word, s, a * np.uint32(0x01010101)), "uint8")
        for o in range(2):
            for e in range(4):
                unsigned = code[o + 2 * e] * s.astype(np.int64) + a
                assert (plain[:, o, e] == unsigned).all() and (signed[:, o, e] == unsigned - 128).all()


def test_lqq_of_signed_codes_multiplies_them():
    """All codes, all multipliers 1..16: the offset that takes the 8 of the unsigned code away."""
    s = np.arange(1, 17, dtype=np.uint32)
    for word in (np.uint32(0xFEDCBA98), np.uint32(0x76543210)):
        code = (layout_oracle.fields(np.array(word), 4) ^ 8).astype(np.int64) - 8
        made = get_converter("s4_s8_lqq").emulate(word, s, (128 - 8 * s) * np.uint32(0x01010101))
        values = arith.elements(made, "int8")
        for o in range(2):
            for e in range(4):
                assert (values[:, o, e] == code[o + 2 * e] * s.astype(np.int64)).all()


half = st.integers(0, 0xFFFF)


@settings(max_examples=300, deadline=None)
@given(half, half, half, st.sampled_from(["f16", "bf16"]))
def test_fused_multiply_add_is_correctly_rounded(a, b, c, kind):
    numbers = arith.f16_values if kind == "f16" else arith.bf16_values
    values = [float(numbers(np.uint32(v))[0]) for v in (a, b, c)]
    significand, least, most = (11, -24, 65504.0) if kind == "f16" else (8, -133, 3.3895e38)
    if not all(np.isfinite(values)):
        return
    exact = Fraction(values[0]) * Fraction(values[1]) + Fraction(values[2])
    expected = layout_oracle.round_to(exact, significand, least)
    # float64 carries products of 11- and 8-bit significands exactly, except below its own subnormals
    if abs(expected) > most or (exact and abs(exact) < Fraction(2) ** -200):
        return
    fma = arith.hfma2 if kind == "f16" else arith.bfma2
    assert float(numbers(fma(a, b, c))[0]) == float(expected)


def test_prmt_follows_the_manual():
    a, b = 0x33221100, 0x77665544
    assert int(arith.prmt(a, b, 0x3210)) == a and int(arith.prmt(a, b, 0x7654)) == b
    assert int(arith.prmt(a, b, 0x0426)) == 0x00442266


def test_registry_is_closed_and_named():
    required = (
        "u4_f16_subnormal u4_f16_magic u4_bf16_biased u4_bf16_magic u4_f16_exact u4_bf16_exact  u4_f16_fused "
        "u4_bf16_fused s4_f16 s4_bf16 u8_f16 u8_bf16 s8_f16 s8_bf16 u2_f16_magic u2_f16_subnormal e4m3_f16 "
        "e4m3_bf16 e2m1_f16  e2m1_bf16 u4_s8_lqq u4_u8_lqq z4_e4m3 s4_s8_x16 u4_u8 u2_u8 f16_f16 s8_s8 "
        "s4_s8_lqq"
    )
    assert set(required.split()) <= set(CONVERTERS)
    with pytest.raises(LayoutError, match="u4_f16_magic"):
        get_converter("u3_f16")
    with pytest.raises(LayoutError, match="params"):
        get_converter("u4_f16_exact").emulate(WORDS[:4])


@pytest.mark.parametrize("name", CONVERTERS)
def test_converter_describes_itself(name):
    c = CONVERTERS[name]
    assert c.outputs * c.elements == c.fields and c.device_name == "tz_" + name
    assert c.pos_map.is_bijective and len(c.scale_exp2) == len(c.bias) == c.outputs
    assert "#include" not in c.device_source and c.device_source.count("__device__") == 1
    assert all(f"out[{o}]" in c.device_source for o in range(c.outputs))
    assert c.emulate(WORDS[:3], *[np.zeros(3, np.uint32)] * len(c.params)).shape == (3, c.outputs)
    assert c.alu_per_element == c.instructions / c.fields
