"""The sliding ring of f16 tokens: what it holds at every length, defaults by format, what it refuses."""

from __future__ import annotations

import pytest
import torch
from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.attention import KVCache, pack_cache
from terrazzo.ops.attention.cache.format import kept_in_f16
from terrazzo.ops.attention.cache.layout import CacheLayout
from terrazzo.ops.attention.writing import ring_write_program as ring_program
from terrazzo.ops.attention.writing import rope_writing


@pytest.mark.parametrize("ring", [16, 64, 128, 256])
def test_a_full_ring_packs_its_oldest_tile_and_no_more(ring):
    layout = CacheLayout("int4", "int4", 64)
    packed = [layout.packed(n, ring) for n in range(3 * ring)]
    assert packed[ring - 1] == 0 and packed[ring] == 16
    for length, found in enumerate(packed):
        assert found % 16 == 0 and 0 <= length - found < ring
        assert length < ring or length - found >= ring - 16
    assert layout.packed(torch.arange(3 * ring), ring).tolist() == packed


def test_a_channel_group_is_packed_at_once():
    layout = CacheLayout("int4_channel32", "int4", 64)
    assert [layout.packed(n, 32) for n in (0, 31, 32, 63, 64)] == [0, 0, 32, 32, 64]


def test_formats_have_the_ring_that_they_are_measured_with():
    assert kept_in_f16("int4_hadamard") == (128, 0) and kept_in_f16("int2_hadamard") == (128, 16)
    assert kept_in_f16("int4") == (0, 0) and kept_in_f16("int4_channel64") == (64, 0)
    assert kept_in_f16("int2_hadamard", 0) == (0, 0) and kept_in_f16("int4", 64, 16) == (64, 16)
    cache = KVCache("int2_hadamard", "int2_hadamard", kv_heads=1, head_dim=64, pages=2, device="cpu")
    assert cache.residual_tokens == 128 and cache.layout.sink_tokens == 16
    assert cache.residual.shape[-1] == (8 + 1 + 1) * 16 * 64


def test_the_first_tokens_stay_f16_once_they_are_packed():
    x = torch.randn(2, 1, 1, 100, 64)
    made = pack_cache(*x, "int2_hadamard", "int4", residual=32, sink_tokens=16)
    errors = [(held - wanted[0, 0]).abs().amax(-1) for held, wanted in zip(made.dequantize(0, 0), x)]
    for error in errors:
        assert error[:16].max() < 0.01 and error[80:].max() < 0.01 and error[16:80].min() > 0.01


@pytest.mark.parametrize("most_new", [1, 2, 16, 17, 300])
@pytest.mark.parametrize("ring", [16, 128])
def test_launches_have_room_for_every_tile_that_new_tokens_touch_or_push_out(most_new, ring):
    """Whatever was there before: the tiles of a phase fit into its blocks."""
    layout = CacheLayout("int4", "int4", 64)
    room = {phase: blocks * tiles for phase, blocks, _, tiles in ring_program.launches(most_new, ring, 8, 132)}
    for old in range(3 * ring):
        length, first = old + most_new, old // 16
        alone = max(min(layout.packed(length, ring) // 16, first) - layout.packed(old, ring) // 16, 0)
        touched, partly = -(-length // 16) - first, int(old % 16 > 0)
        if ring_program.ALL in room:
            assert touched + alone <= room[ring_program.ALL]
        else:
            assert partly + alone <= room[ring_program.OLDER] and touched - partly <= room[ring_program.NEWER]


def test_rings_that_cannot_be_are_refused():
    with pytest.raises(ArgumentError, match="sink_tokens"):
        CacheLayout("int4", "int4", 64, 8)
    with pytest.raises(ArgumentError, match="sink_tokens"):
        CacheLayout("int4_channel64", "int4", 64, 16)
    x = torch.randn(2, 1, 1, 20, 64)
    with pytest.raises(ArgumentError, match="residual"):
        pack_cache(*x, "int4", "int4", residual=0, sink_tokens=16)
    with pytest.raises(ArgumentError, match="residual"):
        pack_cache(*x, "int4", "int4", residual=24)
    cache = pack_cache(*x, "int4", "int4", residual=16)
    with pytest.raises(ArgumentError, match="sliding ring"):
        rope_writing.check_kept(cache)
