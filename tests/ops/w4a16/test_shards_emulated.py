"""Shards of a W4A16 weight through a kernel on the CPU: one kernel of no shape multiplies the whole and the shards."""

from __future__ import annotations

import pytest
import torch
from terrazzo.lowering.toolchain import toolchain
from terrazzo.ops import w4a16
from terrazzo.ops.linear import stream_k
from terrazzo.schedules.stream_k import StreamK
from w4a16_on_cpu import Program

from tests.gpu.oracles import Spec

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(bool(toolchain().missing()), reason=f"cannot compile: {toolchain().missing()} missing"),
]
N, K, M, G = 128, 512, 9, 64


def made(k: int, scales: torch.Tensor, rng: torch.Generator, bias: torch.Tensor | None = None):
    codes, zeros = (torch.randint(0, 16, shape, generator=rng) for shape in ((N, k), (N, k // G)))
    return w4a16.QuantizedWeight.canonical(codes, scales, zeros, group_size=G, bias=bias).pack()


def test_products_of_shards_are_parts_of_the_whole(tmp_path):
    """Along N bit for bit on random data; along K on integers, where no sum rounds. 512 channels are cut in packed
    blocks, 384 inside of one: three groups of 64."""
    rng = torch.Generator().manual_seed(0)
    program = Program(stream_k, StreamK(16, 1, 1, 3, 64), Spec(N, K, G), "exact", tmp_path, generic=True)
    w, x = made(K, torch.rand(N, K // G, generator=rng).half(), rng), torch.randn(M, K, generator=rng).half()
    whole = program.stream_k(x, w, 2, 0)
    halves = [program.of(Spec(N // 2, K, G)).stream_k(x, w.shard(rank, 2), 1, 0) for rank in range(2)]
    assert torch.equal(torch.cat(halves, dim=1), whole)

    for k in (K, 384):
        powers = (2.0 ** torch.randint(-3, 1, (N, k // G), generator=rng)).half()
        bias = torch.randint(-8, 9, (N,), generator=rng).half()
        w, x = made(k, powers, rng, bias), torch.randint(-1, 2, (M, k), generator=rng).half()
        exact = x.double() @ w.dequantize().double().T + bias.double()
        assert torch.equal(program.of(Spec(N, k, G, bias=True)).stream_k(x, w, 2, 0), exact.half())
        parts = []
        for rank in range(2):
            one, columns = w.shard(rank, 2, 1), x[:, rank * k // 2 : (rank + 1) * k // 2].contiguous()
            parts.append(program.of(Spec(N, k // 2, G, bias=rank == 0)).stream_k(columns, one, 2, 0).double())
        assert torch.equal(sum(parts), exact), k
