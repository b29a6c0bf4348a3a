"""Codes of weights and their ways: what programs ask them for."""

import dataclasses

import pytest
from terrazzo.layouts import get_converter
from terrazzo.layouts.instances import get_instance
from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.linear.operand import Operand
from terrazzo.ops.products.codes import (
    BLOCK_ROWS,
    BLOCK_WORDS,
    HALVES,
    SCALE_BYTES,
    SMALL_SCALES,
    TILE_WORDS,
    WIDE,
    Codes,
    get_codes,
)
from terrazzo.ops.products.table import of_codes
from terrazzo.ops.products.ways import FOLD, POST, WAYS, choose_way, numerics_of
from terrazzo.schedules.problem import Gemm

formats = pytest.mark.parametrize("fmt", WIDE.values(), ids=str)
wide = dataclasses.replace(WIDE["u4"], name="eight bits", bits=8)


@pytest.mark.parametrize("fmt", [*WIDE.values(), wide], ids=lambda fmt: fmt.name)
def test_a_block_is_one_load_of_sixteen_bytes_for_each_thread_of_a_warpgroup(fmt: Codes):
    assert BLOCK_WORDS == 128 * 4 == fmt.words(BLOCK_ROWS, fmt.block_k) and TILE_WORDS == fmt.words(16, fmt.block_k)
    assert fmt.blocks(128) * fmt.block_k == 128 and fmt.nbytes(64, 128) == 64 * 128 * fmt.bits // 8
    assert fmt.step_words * fmt.block_k == 4 * 16, "the words of a load serve so many k16 steps"


@formats
def test_its_converters_make_operands_of_the_activations_dtype(fmt: Codes):
    for way in WAYS[fmt.name]:
        assert set(way.converters) == set(HALVES) >= set(way.plain)
        for dtype, name in (*way.converters.items(), *way.plain.items()):
            converter = get_converter(name)
            assert (converter.storage_bits, converter.operand) == (fmt.bits, dtype)
            assert converter.outputs * fmt.step_words == 4, "the registers of a k16 step"
            assert converter.bit_map == get_instance(of_codes(fmt).layout).bit_map
            assert way.rule == FOLD or not converter.params


@formats
def test_its_scales_have_known_sizes(fmt: Codes):
    assert set(fmt.scales) <= set(SCALE_BYTES)
    for scale in fmt.scales:
        for dtype in HALVES:
            rules = [choose_way(fmt, scale, dtype, few).rule for few in (False, True)]
            folds = scale in (dtype, *SMALL_SCALES)
            assert rules == [FOLD if folds else POST, FOLD if folds and not fmt.zero else POST]


@formats
def test_codes_that_are_numbers_have_values_and_factors_of_rows(fmt: Codes):
    assert len(fmt.values) in (0, 1 << fmt.bits) and bool(fmt.values) == fmt.row_factors


@formats
def test_schedules_count_the_same_bytes(fmt: Codes):
    op = Operand(fmt.groups[0], True, fmt.scales[0], "float16", numerics_of(fmt)[-1], fmt.name)
    gemm = Gemm(128, 256, op.records_per(128), op.group_bytes, bits=fmt.bits)
    factors = gemm.row_blocks * 256 * fmt.row_factors
    assert op.weight_bytes(128, 256) == gemm.row_blocks * gemm.units * gemm.unit_bytes + factors


def test_an_unknown_format_is_refused_by_name():
    assert get_codes(wide) is wide
    with pytest.raises(ArgumentError, match="weight = 'u5': is no registered weight format; use one of u4"):
        get_codes("u5")
