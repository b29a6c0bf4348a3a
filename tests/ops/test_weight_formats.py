"""Formats of weights: what programs ask them for."""

import dataclasses

import pytest
from terrazzo.layouts import get_converter
from terrazzo.layouts.instances import get_instance
from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.formats.weight import BLOCK_ROWS, BLOCK_WORDS, TILE_WORDS, WEIGHTS, WeightFormat, get_weight_format
from terrazzo.ops.linear.operand import SCALE_BYTES, Operand
from terrazzo.schedules.problem import Gemm

formats = pytest.mark.parametrize("fmt", WEIGHTS.values(), ids=str)
wide = dataclasses.replace(WEIGHTS["u4"], name="eight bits", bits=8)


@pytest.mark.parametrize("fmt", [*WEIGHTS.values(), wide], ids=lambda fmt: fmt.name)
def test_a_block_is_one_load_of_sixteen_bytes_for_each_thread_of_a_warpgroup(fmt: WeightFormat):
    assert BLOCK_WORDS == 128 * 4 == fmt.words(BLOCK_ROWS, fmt.block_k) and TILE_WORDS == fmt.words(16, fmt.block_k)
    assert fmt.blocks(128) * fmt.block_k == 128 and fmt.nbytes(64, 128) == 64 * 128 * fmt.bits // 8
    assert fmt.step_words * fmt.block_k == 4 * 16, "the words of a load serve so many k16 steps"


@formats
def test_its_converters_make_operands_of_the_activations_dtype(fmt: WeightFormat):
    assert set(fmt.dtypes) == {"float16", "bfloat16"}
    for dtype in fmt.dtypes:
        names = [*fmt.scaled.get(dtype, {}).values(), *([fmt.unscaled[dtype]] if fmt.unscaled else [])]
        for name in names:
            converter = get_converter(name)
            assert (converter.storage_bits, converter.operand) == (fmt.bits, dtype)
            assert converter.outputs * fmt.step_words == 4, "the registers of a k16 step"
            assert converter.bit_map == get_instance(fmt.layout).bit_map
        assert not fmt.unscaled or not get_converter(fmt.unscaled[dtype]).params


@formats
def test_its_scales_have_known_sizes(fmt: WeightFormat):
    assert set(fmt.scales) <= set(SCALE_BYTES) and fmt.numerics[-1] == ("post" if fmt.unscaled else "exact")


@formats
def test_codes_that_are_numbers_have_values_and_factors_of_rows(fmt: WeightFormat):
    assert len(fmt.values) in (0, 1 << fmt.bits) and bool(fmt.values) == fmt.row_factors


@formats
def test_schedules_count_the_same_bytes(fmt: WeightFormat):
    op = Operand(fmt.groups[0], True, fmt.scales[0], "float16", fmt.numerics[-1], fmt.name)
    gemm = Gemm(128, 256, op.records_per(128), op.group_bytes, bits=fmt.bits)
    factors = gemm.row_blocks * 256 * fmt.row_factors
    assert op.weight_bytes(128, 256) == gemm.row_blocks * gemm.units * gemm.unit_bytes + factors


def test_an_unknown_format_is_refused_by_name():
    assert get_weight_format(wide) is wide
    with pytest.raises(ArgumentError, match="weight = 'u5': is no registered weight format; use one of u4"):
        get_weight_format("u5")
