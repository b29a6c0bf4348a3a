"""How a balanced kernel finds its work: the device function, run on the CPU, beside counting in Python."""

from __future__ import annotations

import math
import random

import pytest
import torch
from cuda_on_cpu import EARLY, VOTES, CpuKernel
from terrazzo.ops.tiles.cuda.attention import PRIMITIVES
from terrazzo.schedules.attention_balance import MOST_SPLITS

KERNEL = """
extern "C" __global__ void main_kernel(int* LEN, int* OUT, int count, int reach, int shares, int least, int most);
extern "C" __global__ void main_kernel(int* LEN, int* OUT, int count, int reach, int shares, int least, int most) {
  int held[4], found[5];
  tz_lengths<false>(held, LEN, count, 0);
  tz_place(found, held, LEN, count, reach, (int)blockIdx.x, shares, least, most);
  for (int i = 0; i < 5; ++i) OUT[((int)blockIdx.x * 32 + (int)threadIdx.x) * 5 + i] = found[i];
}
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory) -> CpuKernel:
    return CpuKernel(KERNEL, [EARLY, VOTES, PRIMITIVES["places"].source], 32, tmp_path_factory.mktemp("places"))


def cases():
    rng = random.Random(3)
    yield [0] * 5, 1 << 30, 3
    yield [7], 1 << 30, 1
    yield [1 << 30, 5, 0, 1 << 20], 1 << 31, 9
    for _ in range(40):
        count = rng.choice((1, 2, 5, 31, 32, 33, 64, 127, 128, 129, 300))
        top = rng.choice((10, 3000, 100_000))
        lengths = [rng.choice((0, rng.randint(0, top), top)) for _ in range(count)]
        yield lengths, rng.choice((1 << 30, 700)), rng.choice((1, 4, 60, 500))


@pytest.mark.parametrize(("lengths", "reach", "shares"), list(cases()))
def test_every_piece_has_one_place(kernel, lengths, reach, shares):
    least, count = 128, len(lengths)
    places = shares + count
    out = torch.full((places, 32, 5), -9, dtype=torch.int32)
    given = torch.tensor([n - (1 << 32) if n >= 1 << 31 else n for n in lengths], dtype=torch.int32)
    sizes = dict(count=count, reach=min(reach, (1 << 31) - 1), shares=shares, least=least, most=MOST_SPLITS)
    kernel((places, 1, 1), LEN=given, OUT=out, **sizes)
    assert (out == out[:, :1]).all()  # all lanes agree
    seen = [min(n, reach) for n in lengths]
    taken: dict[int, list[list[int]]] = {}
    for sequence, split, splits, first, length in out[:, 0].tolist():
        if splits:
            assert length == lengths[sequence]
            taken.setdefault(sequence, []).append([split, splits, first])
    assert sorted(taken) == list(range(count))  # empty sequences, too: somebody writes their zeros
    place = 0
    for sequence in range(count):
        splits = len(taken[sequence])
        assert taken[sequence] == [[i, splits, place] for i in range(splits)]
        place += splits
        ideal = max(least, sum(seen) / shares)
        if splits < MOST_SPLITS:  # no piece is larger than a share, and none much smaller unless it must be
            assert seen[sequence] / splits <= 1.001 * ideal + 1
        assert 1 <= splits <= max(1, min(MOST_SPLITS, math.ceil(seen[sequence] / ideal)))
    assert (out[place:, 0, 2] == 0).all()
