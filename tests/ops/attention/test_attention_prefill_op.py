"""Prefill attention without a GPU: fake tensors, refusals, schedules, where new tokens go."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.targets import Target
from terrazzo.ops.attention import FORMATS, checks, kernel_requests, pack_cache, prefill, prefill_requests, store
from terrazzo.ops.attention.cache import launch
from terrazzo.ops.attention.cache.layout import CacheLayout
from terrazzo.ops.attention.prefilling.prefill_op import fresh_cache, problem_of
from terrazzo.ops.attention.prefilling.prefill_operands import exact_converter
from terrazzo.ops.attention.prefilling.prefill_stages import STAGE, Geometry
from terrazzo.ops.attention.writing import writing
from terrazzo.schedules import attention_prefill as schedules
from torch._subclasses import FakeTensorMode


@pytest.fixture
def cache():
    return pack_cache(*torch.randn(2, 3, 2, 64, 128), "int4_channel64", "int4", lengths=torch.tensor([3, 64, 9]))


def test_fake_tensors_know_the_results(cache):
    with FakeTensorMode() as mode:
        held = {f.name: getattr(cache, f.name) for f in fields(cache)}
        fake = replace(cache, **{n: mode.from_tensor(t) for n, t in held.items() if isinstance(t, torch.Tensor)})
        q, cu = torch.empty(40, 8, 128, dtype=torch.bfloat16), torch.empty(4, dtype=torch.int32)
        k = torch.empty(40, 2, 128, dtype=torch.bfloat16)
        for given in ({}, {"k": k, "v": k}):
            y = prefill(q, fake, cu, 20, **given)
            assert y.shape == q.shape and y.dtype == q.dtype
        assert prefill(q, fake, cu, 20, lse=torch.empty(40, 8), out=torch.empty_like(q)).shape == q.shape


def test_tensors_on_the_cpu_are_refused_by_name(cache):
    q = torch.zeros(40, 8, 128, dtype=torch.float16)
    with pytest.raises(ArgumentError, match="q = .*CUDA"):
        prefill(q, cache, torch.zeros(4, dtype=torch.int32), 20)
    with pytest.raises(ArgumentError, match="q = .*new tokens, Hq, 128"):
        prefill(q[None], cache, torch.zeros(4, dtype=torch.int32), 20)


def test_bad_prefills_are_refused_on_any_device(cache):
    q, cu = torch.zeros(40, 8, 128, dtype=torch.float16), torch.zeros(4, dtype=torch.int32)
    k, good = torch.zeros(40, 2, 128, dtype=torch.float16), dict(q=q, cache=cache, cu_seqlens=cu, most_new=20)
    for words, wrong in (
        ("q = .*torch tensor", dict(q=[1.0])),
        ("q = .*kv heads", dict(q=q[:, :7])),
        ("q = .*requires_grad", dict(q=q.clone().requires_grad_())),
        ("cu_seqlens", dict(cu_seqlens=cu.long())),
        ("cu_seqlens", dict(cu_seqlens=[0, 40])),
        ("most_new", dict(most_new=-1)),
        ("most_new", dict(most_new=2.5)),
        ("most_new = .*below 2147483648", dict(most_new=2**31)),
        ("window = .*below 2147483648", dict(window=2**31)),
        ("scale = 'x'", dict(scale="x")),
        ("softcap = None", dict(softcap=None)),
        ("v = None", dict(k=k)),
        ("v = ", dict(k=k, v=k[1:])),
        ("k = .*requires_grad", dict(k=k.clone().requires_grad_(), v=k)),
        ("softcap", dict(softcap=-1.0)),
        ("window", dict(window=-1)),
        ("cache", dict(cache=None)),
        ("lengths", dict(cache=replace(cache, lengths=cache.lengths.long()))),
    ):
        with pytest.raises(ArgumentError, match=words):
            prefill(**good | wrong)


@pytest.mark.parametrize(
    ("argument", "changes"),
    [
        ("dtype = 'x'", {"dtype": "x"}),
        ("page = 128.0", {"page": 128.0}),
        ("residual = False", {"residual": False}),
        ("fresh = 1:", {"fresh": 1}),
        ("softcap = 1.0", {"softcap": 1.0}),
        ("sinks = 'x'", {"sinks": "x"}),
        ("layout = 'str'", {"layout": "int4"}),
    ],
)
def test_kernels_of_an_impossible_prefill_are_refused(argument, changes):
    with pytest.raises(ArgumentError, match=argument):
        prefill_requests(**{"layout": CacheLayout("int4", "int4", 128), "page": 128, "target": "sm_90a"} | changes)


def test_prefill_reads_and_writes_aligned_memory(cache, monkeypatch):
    target, seen = Target.parse("sm_90a"), []

    def kernel(q, *rest):
        seen.append((q, rest[-6]))
        rest[-6].copy_(q + 1)

    monkeypatch.setattr(checks, "check_on_gpu", lambda *args: None)
    monkeypatch.setattr(launch, "current_targets", lambda *args: (target, target))
    monkeypatch.setattr(launch, "warm", lambda *args: (kernel, False))
    q, starts = torch.randn(4, 8, 128).half(), torch.tensor([0, 1, 2, 4], dtype=torch.int32)
    odd = lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
    for out in (None, torch.zeros_like(q), odd(torch.zeros_like(q))):
        y = prefill(odd(q), cache, starts, 2, out=out)
        assert torch.equal(y, q + 1) and (out is None or y.data_ptr() == out.data_ptr())
        assert all(x.data_ptr() % 16 == 0 for x in seen[-1])


def test_a_generous_bound_launches_no_more(cache, monkeypatch):
    """Grids are as large as the tokens that there are ask for, those of the kernel that lays them out too."""
    target, seen = Target.parse("sm_90a"), []
    monkeypatch.setattr(checks, "check_on_gpu", lambda *args: None)
    monkeypatch.setattr(launch, "current_targets", lambda *args: (target, target))
    monkeypatch.setattr(launch, "warm", lambda *args: (lambda *given: seen.append(given), False))
    monkeypatch.setattr(writing, "rows_of", lambda x: (x, 256, 128))
    q, k = torch.zeros(130, 8, 128).half(), torch.zeros(130, 2, 128).half()
    starts = torch.tensor([0, 130, 130, 130], dtype=torch.int32)
    for bound in (130, 2**31 - 1):
        prefill(q, cache, starts, bound, k=k, v=k)
    (stages, batch), rest = seen[0][-2:], seen[1]
    assert (stages, batch) == (3, 3) and seen[2][-2:] == (stages, batch)
    assert seen[3][-1] == rest[-1] == -(-130 * 4 // 64)


def test_a_generous_bound_stores_no_more(cache, monkeypatch):
    target, seen = Target.parse("sm_90a"), []
    monkeypatch.setattr(writing, "check_rows", lambda *args: None)
    monkeypatch.setattr(launch, "current_targets", lambda *args: (target, target))
    monkeypatch.setattr(launch, "warm", lambda *args: (lambda *given: seen.append(given[-4:]), False))
    k, starts = torch.zeros(130, 2, 128).half(), torch.tensor([0, 130, 130, 130], dtype=torch.int32)
    for bound in (130, 2**31 - 1):
        store(cache, k, k, starts, bound)
    assert len(seen) % 2 == 0 and seen[: len(seen) // 2] == seen[len(seen) // 2 :]


def test_geometry_refuses_what_no_stage_can_hold():
    with pytest.raises(ArgumentError, match="page = 24"):
        Geometry(CacheLayout("int4", "int4", 128), 24, 0, False)
    with pytest.raises(ArgumentError, match="residual = 64"):
        Geometry(CacheLayout("bfloat16", "int4", 128), 64, 64, False)


@pytest.mark.parametrize("k", FORMATS)
@pytest.mark.parametrize("page", [0, 48, 64, 128])
def test_a_stage_holds_64_tokens_of_any_page(k, page):
    layout = CacheLayout(k, "int4", 64)
    if page % layout.block_tokens:
        page = layout.block_tokens
    g = Geometry(layout, page, 0, False)
    assert STAGE % g.part_tokens == 0 and (not page or page % g.part_tokens == 0)
    assert not layout.k.group or layout.k.group % g.part_tokens == 0
    ends = [g.tile_at(r) + layout.tile_words for r in range(STAGE // 16)]
    starts = [g.tile_at(r) for r in range(STAGE // 16)]
    assert all(end <= start for end, start in zip(ends, starts[1:])) and ends[-1] <= g.stage_words
    for r, start in enumerate(starts):
        assert g.channel_at(r) + layout.channel_words <= start < g.channel_at(r) + g.part_words


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
def test_exact_converters_leave_the_codes(fmt):
    cvt, packed = exact_converter(fmt), fmt.converter
    words = torch.randint(-(1 << 31), (1 << 31) - 1, (64,), generator=torch.Generator().manual_seed(1)).int()
    if fmt.storage in ("f16", "bf16"):
        return assert_same_converter(cvt, packed)
    raw = words.numpy().view("uint32")
    exact, other = (torch.from_numpy(c.emulate(raw).view("float16").copy()).double() for c in (cvt, packed))
    scale = torch.tensor([2.0**-e for e in packed.scale_exp2]).repeat_interleave(2)
    keep = exact.abs() != 480 if fmt.storage == "e4m3" else exact == exact  # the NaN codes of e4m3
    assert torch.equal(exact[keep], (other * scale)[keep])


def assert_same_converter(a, b):
    assert a is b


def test_new_tokens_have_pages_of_their_own(cache):
    for new in ([1, 64, 65], [0, 0, 200], [63, 1, 64], [128, 0, 1]):
        cu = torch.tensor([0, *new]).cumsum(0).int()
        made = fresh_cache(cache, cu, sum(new), max(new))
        used = [made.block_table[b, : -(-n // STAGE)].tolist() for b, n in enumerate(new)]
        pages = [page for row in used for page in row]
        assert len(set(pages)) == len(pages) and all(0 <= page < len(made.pages) for page in pages)


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90a"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_schedules_fit(arch, head_dim):
    target = Target.parse(arch)
    for k, v in (("float16", "float16"), ("int4", "int4"), ("int2_channel128", "int8")):
        problem = problem_of(CacheLayout(k, v, head_dim), 128, 0, True)
        if head_dim == 256 and arch in ("sm_86", "sm_89"):  # two stages of 64 KB
            with pytest.raises(ArgumentError, match="no two stages of 16384 words"):
                schedules.choose(problem, target)
            problem = problem_of(CacheLayout("int4", "int4", 256), 128, 0, False)
        chosen = schedules.choose(problem, target)
        assert chosen.smem_bytes(problem) <= target.smem_per_block and chosen.stages >= 2
        fits = arch == "sm_90a" and (head_dim < 256 or k != "float16")  # 256: memory, for tiles of f16
        assert chosen.program == ("shared" if fits else "mma")


@pytest.mark.parametrize(
    ("new", "group", "groups", "rows"),
    [(8192, 4, 8, 0), (512, 4, 8, 128), (128, 4, 8, 64), (512, 4, 64, 0), (4096, 1, 32, 0), (1, 1, 1, 64)],
)
def test_few_rows_take_narrower_tiles(new, group, groups, rows):
    target, layout = Target.parse("nvidia/nvidia-h200"), CacheLayout("int4", "int4", 128)
    problem = problem_of(layout, 128, 0, False)
    assert schedules.narrower(problem, target, 132, new * group, groups) == rows
    assert schedules.choose(problem, target, rows).rows == (rows or 192)
    assert schedules.narrower(problem, Target.parse("sm_80"), 108, new * group, groups) == 0


def test_an_unknown_program_is_refused():
    with pytest.raises(ArgumentError, match="program = 'wgmma': must be mma or shared"):
        schedules.Prefill("wgmma", 8, 8, 4)


def test_every_width_is_compiled_ahead():
    target, layout = Target.parse("sm_90a"), CacheLayout("int4", "int4", 128)
    of = lambda split, **facts: {
        dict(it.params)["warps"] * 16
        for it in prefill_requests(layout, page=128, target=target, **facts)
        if it.name == "attention.prefill_shared" and ("split" in dict(it.params)) == split
    }
    assert of(False) == of(True) == {192, 128, 64}
    assert prefill_requests(layout, page=128, target="sm_90a") == prefill_requests(layout, page=128, target=target)
    assert of(False, softcap=True) == of(True, softcap=True) == {128, 64}  # 192 rows would spill


def test_the_compile_command_knows_prefill():
    target = Target.parse("sm_90a")
    made = kernel_requests("int4", "int8", heads=32, kv_heads=8, target=target, prefill=True)
    wanted = [
        request for fresh in (False, True)
        for request in prefill_requests(CacheLayout("int4", "int8", 128), page=128, fresh=fresh, target=target)
    ]  # fmt: skip
    assert set(wanted) <= set(made) and len({r.name for r in wanted}) == 3
