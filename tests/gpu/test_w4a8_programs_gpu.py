"""Every W4A8 program and schedule on the GPU: int32 sums equal the exact product, scaled outputs are one rounding away.

The weight is packed here, by the definition of the format and not by the library. Outputs start as NaN (int32: garbage)
between guard rows that must survive, the workspace starts as garbage, semaphores must end at zero, and a second run
must give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import pytest
import torch
from terrazzo.lowering.kernels import get_kernel
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.targets import Target
from terrazzo.ops.linear.bytes import multistage as multistage_program
from terrazzo.ops.linear.bytes import small_batch as small_batch_program
from terrazzo.ops.linear.bytes import stream_k as stream_k_program
from terrazzo.schedules import multistage as multistage_schedules
from terrazzo.schedules import small_batch as small_batch_schedules
from terrazzo.schedules import stream_k as stream_k_schedules
from terrazzo.schedules.forms import WIDTHS
from terrazzo.schedules.multistage import Multistage, launch_sizes
from terrazzo.schedules.problem import Gemm
from terrazzo.schedules.small_batch import SmallBatch
from terrazzo.schedules.stream_k import StreamK

DEVICE = "cuda"
ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "int32": torch.int32}


PROGRAMS = {
    "stream_k": stream_k_program,
    "small_batch": small_batch_program,
    "multistage": multistage_program,
}


def pack(codes: torch.Tensor, s: torch.Tensor, a: torch.Tensor, group: int) -> torch.Tensor:
    """Units int32 [Kp/128, Np/64, 1024 + 32 * 128 / group] of codes [N, K] with (s, a) [N, G]."""
    n, k = codes.shape
    nb, kb, g = -(-n // 64), -(-k // 128), 128 // group
    padded = torch.zeros(nb * 64, kb * 128, dtype=torch.int64, device=codes.device)
    padded[:n, :k] = codes
    pairs = torch.zeros(nb * 64, kb * g, 2, dtype=torch.int64, device=codes.device)
    pairs[..., 0], pairs[..., 1] = 1, 128
    pairs[:n, : s.shape[1], 0], pairs[:n, : s.shape[1], 1] = s.long(), a.long()
    thread, register, nibble = torch.meshgrid(
        *(torch.arange(size, device=codes.device) for size in (128, 4, 8)), indexing="ij"
    )
    row = thread // 32 * 16 + thread % 32 // 4 + register % 2 * 8
    column = nibble % 2 * 32 + register // 2 * 16 + thread % 4 * 4 + nibble // 2
    blocks = padded.view(nb, 64, kb * 2, 64).permute(2, 0, 1, 3)[:, :, row, column]  # [k block, row block, t, r, p]
    words = (blocks << (4 * nibble)).sum(-1).view(kb, 2, nb, 512).permute(0, 2, 1, 3).reshape(kb, nb, 1024)
    # records: warp, g, row g or g + 8, then s and a
    records = pairs.view(nb, 4, 2, 8, kb, g, 2).permute(4, 0, 5, 1, 3, 2, 6).reshape(kb, nb, g * 32, 4)
    records = (records << (8 * torch.arange(4, device=codes.device))).sum(-1)
    units = torch.cat([words, records], dim=2)
    return torch.where(units >= 2**31, units - 2**32, units).to(torch.int32).contiguous()


@dataclass(frozen=True)
class Weight:
    """Random weight with every byte 0..255 in its bytes before the flip."""

    n: int
    k: int
    group: int

    @lru_cache(maxsize=16)  # noqa: B019  a handful of small weights for the session
    def build(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Packed units, channel scales [Np], bias [N], and the int8 weight as float64 [N, K]."""
        rng = torch.Generator().manual_seed(self.n * 31 + self.k + self.group)
        groups = -(-self.k // self.group)
        codes = torch.randint(0, 16, (self.n, self.k), generator=rng)
        s = torch.randint(1, 17, (self.n, groups), generator=rng)
        a = (torch.rand(self.n, groups, generator=rng) * (256 - 15 * s)).long()
        per_column = lambda t: t.repeat_interleave(self.group, dim=1)[:, : self.k]
        values = (codes * per_column(s) + per_column(a)) - 128
        assert values.min() >= -128 and values.max() <= 127
        scales = torch.zeros(-(-self.n // 64) * 64)
        scales[: self.n] = torch.rand(self.n, generator=rng) * 1e-2 + 1e-3
        bias = torch.randn(self.n, generator=rng)
        units = pack(codes.to(DEVICE), s.to(DEVICE), a.to(DEVICE), self.group)
        return units, scales.to(DEVICE), bias.to(DEVICE), values.double().to(DEVICE)


@dataclass(frozen=True)
class Case:
    """One kernel and the launches that check it. `partitions`: (grid, shared) of stream-K, None for the schedule's;
    shared = -1: all tiles, and then grid = -q: q CTAs for each of them."""

    program: str
    weight: Weight
    schedule: object
    ms: tuple[int, ...]
    dequantization: str = "xor"
    out_dtype: str = "int32"
    bias: bool = False
    partitions: tuple[tuple[int, int] | None, ...] = (None,)
    arch: str = "sm_90a"
    launches: int = 2

    def request(self) -> KernelRequest:
        module, w = PROGRAMS[self.program], self.weight
        params = dict(
            n=w.n, k=-(-w.k // 16) * 16, group=w.group, out_dtype=self.out_dtype, dequantization=self.dequantization,
            bias=self.bias, **self.schedule.params(),
        )  # fmt: skip
        flags = ("ptx=compute_80",) if self.arch == "sm_80" else ()
        return KernelRequest(
            f"w4a8.{self.program}",
            f"{module.__name__}:build",
            tuple(params.items()),
            self.arch,
            module.PASS_CONFIGS,
            flags,
        )

    def requests(self) -> list[KernelRequest]:
        return [self.request()]


def buffers(case: Case, m: int, grid: tuple[int, int] | None) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """Workspace full of garbage, semaphores, trailing scalars."""
    s = case.schedule
    if case.program == "small_batch":
        (shape, sem), scalars = s.workspace(-(-case.weight.n // 64) * 64), ()
    elif case.program == "multistage":
        (shape, sem), scalars = launch_sizes(s, problem(case), m), ()
    else:
        if grid is None:
            part = stream_k_schedules.partition(s, problem(case), Target.detect(), m)
            grid = (part.grid, part.shared)
        (shape, sem), scalars = s.workspace(grid[0]), (grid[1],)
    workspace = torch.full(shape, 0x5A5A5A5A, dtype=torch.int32, device=DEVICE)
    return workspace, torch.zeros(sem, dtype=torch.int32, device=DEVICE), scalars


def tile(*sizes: int, **more: int) -> StreamK:
    """A tile of stream_k."""
    return StreamK(*sizes, form="s8 integer", **more)


def problem(case: Case) -> Gemm:
    out_bytes = 4 if case.out_dtype == "int32" else 2
    return Gemm.of_bytes(case.weight.n, -(-case.weight.k // 16) * 16, case.weight.group, out_bytes)


def check(case: Case) -> None:
    kernel = get_kernel(case.request())
    units, scales, bias, values = case.weight.build()
    n, k, dtype = case.weight.n, case.weight.k, DTYPES[case.out_dtype]
    for m in case.ms:
        rng = torch.Generator().manual_seed(m)
        x = torch.zeros(m, -(-k // 16) * 16, dtype=torch.int8)
        x[:, :k] = torch.randint(-128, 128, (m, k), generator=rng, dtype=torch.int8)
        x = x.to(DEVICE)
        x_scales = (torch.rand(m, generator=rng) * 1e-3 + 1e-4).to(DEVICE)
        sums = x.sum(1, dtype=torch.int32)
        exact = x[:, :k].double() @ values.T
        for grid in case.partitions:
            if grid is not None and grid[1] == -1:  # all tiles shared
                s = case.schedule
                tiles = -(-m // s.block_tokens) * -(-problem(case).row_blocks // s.cta_blocks)
                grid = (grid[0] if grid[0] > 0 else -grid[0] * tiles, tiles)
            workspace, semaphores, scalars = buffers(case, m, grid)
            where = f"{case} m={m} partition={grid or scalars}"
            first = None
            for _ in range(case.launches):
                guarded = torch.full(
                    (m + 16, n), -77 if dtype == torch.int32 else float("nan"), dtype=dtype, device=DEVICE
                )
                y = guarded[8:-8]
                kernel(
                    x, units, scales, x_scales, sums, bias if case.bias else bias[:1].clone(), workspace, semaphores, y,
                    *scalars,
                )  # fmt: skip
                for guard in (guarded[:8], guarded[-8:]):
                    assert bool((guard == -77).all() if dtype == torch.int32 else guard.isnan().all()), (
                        f"guard: {where}"
                    )
                assert not bool(semaphores.any()), f"semaphores are not zero: {where}"
                if first is None:
                    first = y
                    compare(case, y, exact, scales[:n], x_scales, bias, where)
                else:
                    assert torch.equal(first.view(torch.int16), y.view(torch.int16)), f"runs differ: {where}"


def compare(case: Case, y, exact, scales, x_scales, bias, where: str) -> None:
    if case.out_dtype == "int32":
        bad, ref = y.double() != exact, exact
    else:
        product = exact * scales.double() * x_scales.double()[:, None]
        ref = product + bias.double() if case.bias else product
        f32 = 2.0**-22 * (product.abs() + (bias.double().abs() if case.bias else 0))  # three roundings and the sum's
        bound = ROUNDOFF[case.out_dtype] * (ref.abs() + f32) + f32 + 2.0**-25
        bad = ~((y.double() - ref).abs() <= bound)
    if bool(bad.any()):
        rows, columns = bad.nonzero(as_tuple=True)
        some = [(r, c, float(y[r, c]), float(ref[r, c])) for r, c in list(zip(rows.tolist(), columns.tolist()))[:6]]
        spans = f"rows {int(rows.min())}..{int(rows.max())}, columns {int(columns.min())}..{int(columns.max())}"
        raise AssertionError(f"{int(bad.sum())} of {y.numel()} wrong ({spans}): {some}; {where}")


SMALL, RAGGED, THIN, DEEP = Weight(448, 640, 64), Weight(450, 1040, 32), Weight(65, 16, 64), Weight(192, 4112, 128)


def stream_k(
    weight: Weight, tokens: int, warpgroups: int, row_blocks: int, out_dtype: str = "int32", **extra
) -> object:
    return fitted(weight, tile(tokens, warpgroups, row_blocks, 2, **extra), out_dtype)


def fitted(weight: Weight, schedule: object, out_dtype: str = "int32") -> object:
    out_bytes = 4 if out_dtype == "int32" else 2
    of = Gemm.of_bytes(weight.n, -(-weight.k // 16) * 16, weight.group, out_bytes)
    return stream_k_schedules.fitted(schedule, of, Target.parse("sm_90a"), 1536)


def stream_k_cases() -> list[Case]:
    cases = []
    shared = (None, (5, -1), (3, 0), (1, -1), (-2, -1), (-3, -1), (-5, -1))
    for tokens in WIDTHS:
        for warpgroups in (1, 2, 3, 4):
            for row_blocks in (1, 2):
                if tile(tokens, warpgroups, row_blocks, 2).legal():
                    s = stream_k(SMALL, tokens, warpgroups, row_blocks)
                    cases.append(Case("stream_k", SMALL, s, (1, tokens - 1, tokens, 2 * tokens + 3), partitions=shared))
    for weight in (SMALL, RAGGED, THIN, DEEP):
        for shape in ((32, 4, 1), (128, 2, 1), (256, 2, 1)):
            for dequantization in ("xor", "unsigned"):
                for out_dtype, bias in (("int32", False), ("float16", True), ("bfloat16", False)):
                    s = stream_k(weight, *shape, out_dtype)
                    ms = (3, shape[0] + 5, 1000)
                    cases.append(Case("stream_k", weight, s, ms, dequantization, out_dtype, bias, (None, (7, -1))))
    cases.append(Case("stream_k", SMALL, stream_k(SMALL, 128, 2, 1), (9, 300), partitions=(None, (4, -1), (8, 0))))
    return cases


def small_batch_cases() -> list[Case]:
    cases = []
    splits = {  # token_tiles, kc, nc, warps, chunk, stages, cluster, joined, tokens
        SMALL: [
            (1, 1, 20, 5, 1, 2),
            (1, 1, 7, 4, 2, 2, 1, False, 2),
            (1, 2, 7, 2, 2, 2),
            (1, 2, 10, 2, 2, 2, 1, True),
            (1, 2, 7, 2, 2, 2, 1, True, 4),
            (1, 5, 28, 1, 4, 1),
            (2, 1, 14, 3, 2, 3, 2),
            (4, 2, 10, 2, 2, 2),
            (4, 2, 14, 2, 2, 3, 2),
        ],
        RAGGED: [(1, 1, 32, 9, 1, 2), (2, 4, 16, 2, 1, 2, 2), (3, 3, 5, 3, 2, 2), (4, 1, 3, 8, 4, 2)],
        THIN: [(1, 1, 8, 1, 1, 2), (1, 1, 8, 1, 1, 2, 1, False, 1), (2, 1, 2, 1, 2, 1, 2)],
        DEEP: [
            (1, 8, 12, 4, 1, 2),
            (1, 4, 12, 8, 1, 2, 1, True, 3),
            (2, 3, 4, 8, 2, 2),
            (1, 1, 12, 16, 1, 3),
            (3, 4, 4, 8, 2, 2, 2),
        ],
    }
    for weight, params in splits.items():
        for i, values in enumerate(params):
            s = SmallBatch(*values)
            ms = tuple(sorted({max(1, s.x_rows - 7), max(1, s.x_rows - 1), s.x_rows}))
            for dequantization in ("xor", "unsigned"):
                out_dtype, bias = (("int32", False), ("float16", True), ("bfloat16", False))[(i + len(cases)) % 3]
                cases.append(Case("small_batch", weight, s, ms, dequantization, out_dtype, bias))
                if s.cluster == 1 and not s.joined and i < 2:
                    cases.append(Case("small_batch", weight, s, ms, dequantization, arch="sm_80"))
            cases.append(Case("small_batch", weight, s, ms))
    return cases


def multistage_cases() -> list[Case]:
    """Code of sm_80, compiled from its PTX by the driver."""
    cases = []
    shapes = (  # block_tokens, warps, row_blocks, stages, token_warps, kc, raster
        (32, 4, 2, 4, 1, 3), (64, 4, 2, 3, 1, 1, 2), (64, 8, 1, 2, 2, 2), (128, 8, 2, 2), (128, 4, 2, 3, 1, 5),
        (128, 8, 2, 3, 2, 1, 16), (16, 4, 1, 3, 1, 2), (256, 8, 1, 2),
    )  # fmt: skip
    for i, shape in enumerate(shapes):
        for weight in (SMALL, RAGGED, THIN, DEEP):
            s = Multistage(*shape)
            if s.kc <= -(-weight.k // 128):
                ms = (17, s.block_tokens - 1, 2 * s.block_tokens + 3)
                dequantization = ("xor", "unsigned")[(i + len(cases)) % 2]
                out_dtype, bias = (("float16", True), ("bfloat16", False))[i % 2]
                cases.append(Case("multistage", weight, s, ms, dequantization, arch="sm_80"))
                cases.append(Case("multistage", weight, s, ms, dequantization, out_dtype, bias, arch="sm_80"))
    for m in (32, 64, 128, 1000):
        s = multistage_schedules.choose(Gemm.of_bytes(4096, 4096, 64), Target.parse("sm_80"), m)
        cases.append(
            Case("multistage", Weight(4096, 4096, 64), s, (m,), out_dtype="float16", arch="sm_80", launches=20)
        )
    return cases


def chosen_cases() -> list[Case]:
    """What the schedules choose for layers of published models."""
    cases = []
    target = Target.parse("sm_90a")
    for n, k in ((6144, 4096), (4096, 14336)):
        weight = Weight(n, k, 64)
        of = Gemm.of_bytes(n, k, 64)
        for m in (1, 16, 32):
            cases.append(
                Case("small_batch", weight, small_batch_schedules.choose(of, target, m), (m,), out_dtype="float16")
            )
        for m in (16, 64, 128, 256, 1000):
            cases.append(Case("stream_k", weight, stream_k_schedules.choose(of, target, m), (m,), out_dtype="float16"))
    return cases


def stress_cases() -> list[Case]:
    """Several waves, many launches: a stage that is given back too early shows as a changed bit."""
    weight = Weight(6144, 4096, 64)
    of = Gemm.of_bytes(6144, 4096, 64, 4)
    target = Target.parse("sm_90a")
    shapes = ((16, 4, 2), (64, 4, 1), (128, 4, 1), (256, 2, 1))
    cases = [
        Case("stream_k", weight, stream_k_schedules.fitted(tile(*shape, 2), of, target, 1536), (1030,), launches=100)
        for shape in shapes
    ]
    small = (small_batch_schedules.choose(of, target, m) for m in (8, 32))
    return [*cases, *(Case("small_batch", weight, s, (s.x_rows,), launches=200) for s in small)]


ALL = {
    "stream_k": stream_k_cases,
    "small_batch": small_batch_cases,
    "multistage": multistage_cases,
    "chosen": chosen_cases,
    "stress": stress_cases,
}
EVERY = [
    pytest.param((case,), id=f"{name}-{i}-{case.dequantization}-{case.out_dtype}-{case.arch}")
    for name, make in ALL.items()
    for i, case in enumerate(make())
]


@pytest.mark.parametrize("cases", EVERY)
def test_program(compiled, cases):
    (case,) = cases
    if case.arch != "sm_80" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs an sm_90 GPU")
    check(case)
