"""setmaxnreg takes registers from what the CTA was launched with: more than that, and the kernel waits for ever."""

from __future__ import annotations

import pytest
from terrazzo.ops.attention.prefilling import prefill_shared
from terrazzo.ops.tiles import program

REGISTERS = 65536  # of an SM
TABLES = {
    # warpgroups of each kind, registers of their threads, CTAs of an SM
    **{f"tile{key}": ([1, key[0]], regs, key[1]) for key, regs in program.REGISTERS.items()},
    **{f"prefill_shared[{wgs}]": ([1, wgs], regs, 1) for wgs, regs in prefill_shared.REGISTERS.items()},
}


@pytest.mark.parametrize("name", TABLES)
def test_the_pool_is_not_exceeded(name):
    counts, registers, per_sm = TABLES[name]
    warpgroups = sum(counts)
    launched = min(REGISTERS // per_sm // (warpgroups * 128) // 8 * 8, 255 // 8 * 8 + 8)  # of each thread
    assert all(value % 8 == 0 and 24 <= value <= 240 for value in registers)
    assert sum(n * value for n, value in zip(counts, registers, strict=True)) <= warpgroups * launched
