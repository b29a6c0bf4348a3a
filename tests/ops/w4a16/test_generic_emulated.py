"""Kernels whose n and k, or n alone, come with the launch, on the CPU: each is right for weights of several shapes."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import pytest
import torch
from emulated_cases import cases
from terrazzo.lowering.toolchain import toolchain
from terrazzo.ops.linear import small_batch, stream_k
from test_w4a16_emulated import KINDS, SMALL_BATCH, STREAM_K, data, judge, launches, weights_on_the_cpu  # noqa: F401
from w4a16_on_cpu import Program

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(bool(toolchain().missing()), reason=f"cannot compile: {toolchain().missing()} missing"),
]


@pytest.mark.parametrize("name", cases(STREAM_K, ("clusters",)))
def test_one_stream_k_kernel_serves_every_shape(name, tmp_path):
    spec, m, numerics, schedule, partitions = STREAM_K[name]
    program = Program(stream_k, schedule, spec, numerics, tmp_path, generic=True)
    launches(program, spec, m, numerics, partitions)
    wider = replace(spec, n=spec.n + 256, k=spec.k if spec.group in (-1, spec.k) else spec.k + 512, bias=not spec.bias)
    tiles = ceil(wider.n / 64 / schedule.cta_blocks) * ceil(m / schedule.block_tokens)
    launches(program.of(wider), wider, m, numerics, ((schedule.cluster, 0), (schedule.cluster * tiles, tiles)))


def test_a_stand_in_has_the_bits_of_the_kernel_that_is_made_for_the_shape(tmp_path):
    """One takes the other's place between two calls of the same weight."""
    spec, m, numerics, schedule, _ = STREAM_K["post, a scale for each row"]
    ys = []
    for generic in (False, True):
        folder = tmp_path / str(generic)
        folder.mkdir()
        program = Program(stream_k, schedule, spec, numerics, folder, generic=generic)
        weight, x = data(spec, m, "random")
        ys.append(torch.cat([program.stream_k(x, weight.pack(), ctas, 2, ctas) for ctas in (2, 3)]))
    assert torch.equal(*ys)


ANY_ROWS = {name: case for name, case in SMALL_BATCH.items() if not case[3].joined}


@pytest.mark.parametrize("name", cases(ANY_ROWS, ("split k",)))
def test_a_small_batch_kernel_of_every_n_has_the_bits_of_those_that_know_it(name, tmp_path):
    spec, m, numerics, schedule, target = ANY_ROWS[name]
    programs = []
    for generic in (False, True):
        folder = tmp_path / str(generic)
        folder.mkdir()
        programs.append(Program(small_batch, schedule, spec, numerics, folder, target=target, generic=generic))
    wider = replace(spec, n=spec.n + 256)
    other = programs[1].of(wider, nc=schedule.nc + 2)
    for kind in KINDS:
        weight, x = data(spec, m, kind)
        assert torch.equal(*(program.small_batch(x, weight.pack()) for program in programs))
        weight, x = data(wider, m, kind)
        judge(other.small_batch(x, weight.pack()), x, weight, numerics, kind, kind)
