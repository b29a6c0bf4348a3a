"""Tiles that CTAs share (ops/tiles/shares.py), by partitions that the cost model rarely takes for small shapes, of
W4A16; and launches of CTAs that wait for each other and get in each other's way."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.targets import Target
from terrazzo.ops import w4a16
from terrazzo.ops.linear import stream_k
from terrazzo.ops.linear.operand import Operand
from terrazzo.ops.w4a16 import reference
from terrazzo.schedules import stream_k as schedules
from terrazzo.schedules.problem import Gemm

torch = pytest.importorskip("torch")
DEVICE = "cuda"


@dataclass(frozen=True)
class Case:
    """A kernel of W4A16; its tiles of m tokens are parted by `among` CTAs each, or shared as `partitions` say: CTAs,
    and shared tiles (-1: all). With clusters of several CTAs these are the CTAs of a tile."""

    n: int
    k: int
    m: int
    tile: tuple[int, int, int, int]  # tokens, warpgroups, row blocks, k of a stage
    among: tuple[int, ...]
    dtype: str = "float16"
    group: int = 128
    numerics: str = "exact"
    partitions: tuple[tuple[int, int], ...] = ()
    cluster: int = 1

    @property
    def problem(self) -> Gemm:
        op = Operand(self.group, False, self.dtype, self.dtype, self.numerics)
        return Gemm(self.n, self.k, op.records_per(128), op.record_bytes)

    @property
    def schedule(self) -> schedules.StreamK:
        tokens, warpgroups, row_blocks, stage_k = self.tile
        s = schedules.StreamK(tokens, warpgroups, row_blocks, 2, stage_k, cluster=self.cluster)
        return schedules.fitted(s, self.problem, Target.parse("sm_90a"))

    @property
    def tiles(self) -> int:
        s = self.schedule
        return -(-self.m // s.block_tokens) * -(-self.problem.row_blocks // s.cta_blocks)

    def requests(self) -> list[KernelRequest]:
        params = dict(
            n=self.n, k=self.k, group=self.group, symmetric=False, scale_dtype=self.dtype, dtype=self.dtype,
            bias=False, numerics=self.numerics, **self.schedule.params(),
        )  # fmt: skip
        entry = f"{stream_k.__name__}:build"
        return [KernelRequest("w4a16.stream_k", entry, tuple(params.items()), "sm_90a", stream_k.PASS_CONFIGS)]

    def every(self) -> list[tuple[int, int]]:
        """(CTAs, shared tiles)."""
        assert all(each <= self.problem.units for each in self.among), "a CTA without a unit of k never comes"
        parted = [(self.tiles * each, self.tiles) for each in self.among]
        return [*parted, *((grid, self.tiles if shared < 0 else shared) for grid, shared in self.partitions)]

    def launch(self, seed: int, grid: int, shared: int):
        """(launch, y, check): one launch on the current stream writes y; check compares it with float64."""
        from terrazzo.lowering.kernels import get_kernel

        dtype, s, kernel = getattr(torch, self.dtype), self.schedule, get_kernel(self.requests()[0])
        rng = torch.Generator(DEVICE).manual_seed(seed)
        weight = w4a16.quantize_weight(
            torch.randn(self.n, self.k, device=DEVICE, generator=rng).to(dtype), group_size=self.group
        )
        packed = w4a16.pack(weight)
        x = torch.randn(self.m, self.k, device=DEVICE, generator=rng).to(dtype)
        workspace = torch.full((grid, s.cta_blocks, s.block_tokens // 8, 128, 4), float("nan"), device=DEVICE)
        flags = torch.zeros(grid, s.flags, dtype=torch.int32, device=DEVICE)
        no_bias = torch.zeros(1, dtype=dtype, device=DEVICE)
        y = torch.full((self.m, self.n), float("nan"), dtype=dtype, device=DEVICE)
        ref = reference.gemm(x, weight, self.numerics)
        bound = reference.forward_error_bound(x, weight, self.numerics)

        def launch() -> None:
            kernel(x, packed.words, packed.params, no_bias, workspace, flags, y, shared)

        def check() -> None:
            assert not bool(flags.any()), f"semaphores are not zero: {self} {grid} {shared}"
            bad = ~((y.double() - ref).abs() <= bound)
            assert not bool(bad.any()), f"{int(bad.sum())} of {y.numel()} wrong: {self} {grid} {shared}"

        return launch, y, check


CASES = (
    Case(1024, 2048, 128, (128, 2, 1, 128), (2, 3, 4, 15), partitions=((13, -1), (3, 5), (5, 0), (6, 2))),
    Case(1000, 2080, 100, (64, 1, 1, 128), (2, 4)),
    Case(1024, 2048, 61, (64, 2, 2, 128), (2, 4, 8), dtype="bfloat16", group=32),
    Case(768, 4096, 64, (64, 3, 1, 128), (3, 7)),
    Case(1024, 1024, 256, (128, 4, 1, 64), (2,), partitions=((7, -1), (3, 2))),
    Case(1024, 1024, 200, (256, 2, 1, 64), (2, 4), dtype="bfloat16", partitions=((11, -1), (3, 2))),
    Case(512, 2048, 33, (32, 2, 1, 128), (2, 4), numerics="post"),
    Case(1000, 2080, 108, (112, 2, 1, 128), (2, 4, 5)),  # seven units of 16 tokens: slices of unlike size
    Case(1024, 1024, 150, (160, 2, 1, 128), (2,), dtype="bfloat16", partitions=((7, -1), (3, 2))),
    Case(1024, 1024, 220, (224, 2, 1, 64), (2, 4), partitions=((7, -1),)),
    Case(512, 2048, 16, (16, 2, 2, 128), (2, 6)),
    Case(1024, 2048, 128, (128, 2, 1, 128), (2,), partitions=((8, 0), (6, -1), (4, 5)), cluster=2),
    Case(1000, 2080, 100, (64, 1, 1, 128), (2,), cluster=2),
    Case(1024, 2048, 61, (64, 2, 2, 128), (2,), dtype="bfloat16", group=32, cluster=2),
    Case(768, 4224, 64, (64, 3, 1, 128), (2,), cluster=2),  # 33 units of k: 16 and 17
    Case(1024, 1024, 256, (128, 4, 1, 64), (2,), cluster=2),
    Case(512, 2048, 33, (32, 2, 1, 128), (2,), numerics="post", cluster=2),
    Case(8192, 4096, 250, (128, 2, 1, 128), (2,), cluster=2),  # 256 CTAs
    Case(1024, 2048, 128, (128, 3, 1, 128), (4,), cluster=4),
    Case(1000, 2080, 90, (96, 1, 1, 128), (2,), cluster=2),
    Case(1024, 2048, 190, (192, 2, 1, 128), (2,), partitions=((8, 0),), cluster=2),
    Case(1536, 2048, 40, (64, 2, 1, 128), (12, 15)),  # 144 and 180 CTAs: not all of them fit at once
)


@pytest.mark.parametrize("cases", [CASES], ids=["all"])
def test_parted_tiles(cases, compiled):
    for case in cases:
        for seed, (grid, shared) in enumerate(case.every()):
            launch, y, check = case.launch(seed, grid, shared)
            launch()
            torch.cuda.synchronize()
            check()
            first = y.clone()
            for _ in range(50):
                y.fill_(float("nan"))
                launch()
                assert torch.equal(first.view(torch.int16), y.view(torch.int16)), f"runs differ: {case} {grid} {shared}"
            check()


@pytest.mark.parametrize("cases", [(CASES[0], CASES[3])], ids=["two"])
def test_launches_that_hold_half_of_the_gpu_each(cases, compiled):
    """Two streams, one of them of high priority: CTAs of either may wait for some that find no place."""
    streams = [torch.cuda.Stream(priority=priority) for priority in (0, -1)]
    made = [case.launch(index, case.tiles * 15, case.tiles) for index, case in enumerate(cases)]
    torch.cuda.synchronize()
    for _ in range(20):
        for _ in range(15):
            for stream, (launch, _, _) in zip(streams, made):
                with torch.cuda.stream(stream):
                    launch()
        torch.cuda.synchronize()
        for _, y, check in made:
            check()
            y.fill_(float("nan"))
        torch.cuda.synchronize()
