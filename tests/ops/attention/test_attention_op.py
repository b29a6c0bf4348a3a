"""The attention operators without a GPU: fake tensors, requests, schedules, launches."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace

import pytest
import torch
from terrazzo.lowering import kernels
from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.targets import Target
from terrazzo.ops.attention import KVCache, append, checks, decode, kernel_requests, pack_cache, store
from terrazzo.ops.attention.cache import launch
from terrazzo.ops.attention.cache.layout import CacheLayout
from terrazzo.ops.attention.decoding import decode_program, decode_warpgroup_program, op
from terrazzo.ops.attention.writing import writing
from terrazzo.ops.products import kv
from terrazzo.schedules import attention as schedules
from terrazzo.schedules import attention_space
from torch._subclasses import FakeTensorMode


@pytest.fixture
def cache():
    return pack_cache(*torch.randn(2, 3, 2, 64, 128), "int4_channel64", "int4", lengths=torch.tensor([3, 64, 9]))


def test_fake_tensors_know_the_results(cache):
    with FakeTensorMode() as mode:
        held = {f.name: getattr(cache, f.name) for f in fields(cache)}
        fake = replace(cache, **{n: mode.from_tensor(t) for n, t in held.items() if isinstance(t, torch.Tensor)})
        q = torch.empty(3, 2, 8, 128, dtype=torch.bfloat16)
        y = decode(q, fake)
        assert y.shape == q.shape and y.dtype == q.dtype
        assert decode(q[:, 0], fake).shape == (3, 8, 128)
        sums = torch.empty(3, 2, 8)
        assert decode(q, fake, lse=sums, out=torch.empty_like(q)).shape == q.shape
        k = torch.empty(3, 2, 2, 128, dtype=torch.float16)
        assert append(fake, k, k) is None
        assert store(fake, k.flatten(0, 1), k.flatten(0, 1), torch.empty(4, dtype=torch.int32), 2) is None


def test_tensors_on_the_cpu_are_refused_by_name(cache):
    k = torch.zeros(3, 1, 2, 128, dtype=torch.float16)
    for argument, call in (
        ("q", lambda: decode(torch.zeros(3, 1, 8, 128, dtype=torch.float16), cache)),
        ("k", lambda: append(cache, k, k)),
        ("k", lambda: store(cache, k[:, 0], k[:, 0], torch.zeros(4, dtype=torch.int32), 1)),
    ):
        with pytest.raises(ArgumentError, match=f"{argument} = .*CUDA"):
            call()


def misaligned(x: torch.Tensor) -> torch.Tensor:
    """The same values, contiguous, one element behind an aligned address."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


Q = torch.zeros(3, 1, 8, 128, dtype=torch.float16)


@pytest.mark.parametrize(
    ("words", "q", "options"),
    [
        ("q = .*torch tensor", [1.0], {}),
        ("q = .*q_len must be", Q.expand(3, 9, 8, 128), {}),
        ("q = .*kv heads", Q[:, :, :7], {}),
        ("q = .*kv heads", Q[:, :, :0], {}),
        ("q = .*3 sequences", Q[:2], {}),
        ("q = .*no gradient|q = 'requires_grad", Q.clone().requires_grad_(), {}),
        ("scale", Q, {"scale": float("nan")}),
        ("softcap", Q, {"softcap": -1.0}),  # once taken for none
        ("softcap", Q, {"softcap": float("inf")}),
        ("softcap = 'x'", Q, {"softcap": "x"}),
        ("softcap = None", Q, {"softcap": None}),
        ("scale = 'x'", Q, {"scale": "x"}),
        ("scale = 1000", Q, {"scale": 10**400}),
        ("window", Q, {"window": -1}),
        ("window = .*below 2147483648", Q, {"window": 2**32 + 5}),  # once a window of 5
        ("window", Q, {"window": 2**31}),
        ("sinks", Q, {"sinks": torch.zeros(7)}),
        ("sinks", Q, {"sinks": torch.zeros(16)[::2]}),
        ("out", Q, {"out": Q.float()}),
        ("out", Q, {"out": [0.0]}),
    ],
)
def test_bad_decodes_are_refused_on_any_device(cache, words, q, options):
    with pytest.raises(ArgumentError, match=words):
        decode(q, cache, **options)


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        ("block_table = 'int64", lambda c: {"block_table": c.block_table.long()}),
        ("block_table = .*3 rows", lambda c: {"block_table": c.block_table[:1]}),
        ("block_table = .*page_size", lambda c: {"page_size": 0}),
        ("pages = .*words for 128 tokens", lambda c: {"page_size": 128}),
        ("page_size = 24", lambda c: {"page_size": 24}),
        ("pages = 'float32", lambda c: {"pages": c.pages.float()}),
        ("pages = .*contiguous", lambda c: {"pages": c.pages[:, :, ::2]}),
        ("pages = 'list'", lambda c: {"pages": [0]}),
        ("lengths = 'int64", lambda c: {"lengths": c.lengths.long()}),
        ("residual = None|residual = 0", lambda c: {"residual": None}),
        ("residual = .*tiles", lambda c: {"residual": c.residual[:, :, 1:].contiguous()}),
        ("residual = .*3 sequences", lambda c: {"residual": c.residual[:2]}),
        ("slots = ", lambda c: {"slots": torch.zeros(2, dtype=torch.int32)}),
        ("k_static = .*takes none", lambda c: {"k_static": torch.ones(2, 128)}),
        ("k_static = 'int'.*takes none", lambda c: {"k_static": 5}),
        ("block_table = 'list'", lambda c: {"block_table": [[0]]}),
        ("lengths = 'ndarray'", lambda c: {"lengths": c.lengths.numpy()}),
        ("page_size = False", lambda c: {"page_size": False, "block_table": None}),
        ("pages = .*multiple of 16 bytes", lambda c: {"pages": misaligned(c.pages)}),
        ("residual = .*multiple of 16 bytes", lambda c: {"residual": misaligned(c.residual)}),
        ("max_length = -1", lambda c: {"max_length": -1}),
        ("mean_length = -1", lambda c: {"mean_length": -1}),
        ("mean_length = 30.0", lambda c: {"mean_length": 30.0}),
        ("layout = 'str'", lambda c: {"layout": "int4"}),
        ("lengths = .*on meta", lambda c: {"lengths": c.lengths.to("meta")}),
    ],
)
def test_a_cache_of_ones_own_tensors_is_checked(words, changes):
    made = pack_cache(*torch.randn(2, 3, 2, 64, 128), "int4_channel64", "int4", page_size=64)
    made.check()
    made.check_values()
    with pytest.raises(ArgumentError, match=words):
        decode(Q, replace(made, **changes(made)))


def test_what_lies_on_the_device_is_checked_on_request():
    made = pack_cache(*torch.randn(2, 3, 2, 128, 128), "int4", "int4", page_size=64, residual=64)
    made = replace(made, slots=torch.tensor([2, 0, 1], dtype=torch.int32))
    made.check_values()
    for name, value, words in (
        ("lengths", -1, "lengths = -1"),
        ("lengths", 129, "lengths = 129: must be in 0..128"),
        ("block_table", -1, "block_table = -1: must be in 0..5"),
        ("block_table", 6, "block_table = 6"),
        ("slots", 0, "slots = .*different numbers"),
        ("slots", 3, "slots = .*0..2"),
    ):
        wrong = getattr(made, name).clone()
        wrong[(2, 0)[: wrong.dim()]] = value
        with pytest.raises(ArgumentError, match=words):
            replace(made, **{name: wrong}).check_values()
    scales = torch.full((2, 128), 0.1)
    static = pack_cache(*torch.randn(2, 3, 2, 128, 128), "fp8", "fp8", k_static=scales, v_static=scales)
    static.check_values()
    with pytest.raises(ArgumentError, match=r"v_static = .*within 2\^-100"):
        replace(static, v_static=scales * 0).check_values()
    short = replace(made, block_table=made.block_table[:, :1].contiguous())
    with pytest.raises(ArgumentError, match="64 tokens find room"):
        short.check_values()
    with pytest.raises(ArgumentError, match="device"):
        made.to(torch.float16)


def test_other_caches_and_grids_are_refused():
    held = KVCache("int4", "int4", kv_heads=2, head_dim=128, pages=2, device="cpu")
    for bad in (None, held):
        with pytest.raises(ArgumentError, match="cache = .*must be a PackedCache"):
            decode(Q, bad)
    checks.check_grid(65535, 65535)
    with pytest.raises(ArgumentError, match="65535 sequences"):
        checks.check_grid(65536, 1)
    with pytest.raises(ArgumentError, match="fewer new tokens"):
        checks.check_grid(1, 65536)


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90a"])
def test_kernels_of_a_layer_serve_every_batch(arch):
    target = Target.parse(arch)
    requests = kernel_requests("int4", "int8", heads=32, kv_heads=8, q_len=2, target=target)
    assert [r.name for r in requests].count("attention.write") == 1 and len(set(requests)) == len(requests)
    assert len(requests) <= (31 if target.supports("cluster") else 10)
    layout = CacheLayout("int4", "int8", 128)
    for batch, tokens in (
        (1, 100),
        (7, 3000),
        (300, 50_000),
        (64, 4096),
        (2, 5000),
        (11, 700),
        (3, 12_000),
        (5, 333),
        (17, 9000),
        (23, 4000),
        (41, 2000),
    ):
        facts = dict(dtype="float16", page=128, residual=0, softcap=False, sinks=False, target=target)
        for mean in (0, tokens, tokens // 2, tokens // 30):
            assert op.plan(layout, batch, 8, 8, tokens, **facts, mean=mean).request in requests


@pytest.mark.parametrize(
    ("argument", "options"),
    [
        ("heads", {"heads": 7}),
        ("q_len", {"q_len": 9}),
        ("page_size", {"page": 24}),
        ("head_dim", {"head_dim": 96}),
        ("residual", {"residual": 8}),
        ("dtype", {"dtype": "float32"}),
        ("target", {"target": "sm_75"}),
        ("heads = '32'", {"heads": "32"}),
        ("heads = None", {"heads": None}),
        ("heads = 32.0", {"heads": 32.0}),
        ("kv_heads = 8.0", {"kv_heads": 8.0}),
        ("kv_heads = True", {"kv_heads": True}),
        ("head_dim = 128.0", {"head_dim": 128.0}),
        ("page = False", {"page": False}),
        ("page = 0.0", {"page": 0.0}),
        ("page_size = .*words", {"page": 1 << 40}),
        ("dtype = .*x", {"dtype": ["x"]}),
        ("softcap = 1:", {"softcap": 1}),
        ("sinks = 'x'", {"sinks": "x"}),
        ("prefill = 1:", {"prefill": 1}),
    ],
)
def test_kernels_of_an_impossible_layer_are_refused(argument, options):
    given = {"heads": 32, "kv_heads": 8, "target": Target.parse("sm_90a")} | options
    with pytest.raises(ArgumentError, match=argument):
        kernel_requests("int4", "int4", **given)


@pytest.mark.slow
@pytest.mark.parametrize("k", kv.FORMATS)
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a"])  # sm_86 has the shared memory of sm_89
def test_every_format_and_size_has_a_schedule_that_fits(arch, k):
    for head_dim in kv.HEAD_DIMS:
        check_schedules_fit(Target.parse(arch), CacheLayout(k, "int4", head_dim))


@pytest.mark.parametrize(
    ("arch", "k"), [("sm_80", "int4"), ("sm_86", "float16"), ("sm_89", "fp8"), ("sm_90a", "int4_channel128")]
)
def test_formats_of_each_kind_have_a_schedule_that_fits(arch, k):
    check_schedules_fit(Target.parse(arch), CacheLayout(k, "int4", 128))


def check_schedules_fit(target, layout):
    for rows in (8, 16, 64):  # fewer than 8 are one group of rows, too
        problem = op.problem_of(layout, 1, 1, rows, 1, max(layout.block_tokens, 32))
        for at, schedule in schedules.every(problem, target):
            made = schedules.divide(at, schedule, target)
            size = schedule.smem_bytes(at, made.cluster) + 2048
            assert size <= target.smem_per_block and schedule.min_blocks * size <= target.smem_per_sm
            assert schedule.stages >= 2 and not layout.k.group % (16 * schedule.tiles)
            sizes = (schedule.row_tiles, schedule.warps, schedule.tiles, schedule.stages, schedule.shared_rows)
            sizes = (*sizes, made.cluster)
            assert made.cluster <= 8 * schedule.min_blocks and made.splits % made.cluster == 0
            assert not layout.k.group % (16 * schedule.tiles * made.parts)
            assert size - 2048 == 4 * decode_program.shared_words(layout, *sizes)


def test_shared_memory_of_warpgroups_is_what_the_program_takes():
    for k, v in itertools.product(kv.FORMATS, [name for name, found in kv.FORMATS.items() if found.for_values]):
        for head_dim, residual in itertools.product(kv.HEAD_DIMS, (0, 64, 128)):
            layout = CacheLayout(k, v, head_dim)
            problem = op.problem_of(layout, 1, 1, 16, 1000, 0, layout.k.group or residual)
            if not (problem.parted and problem.divides(64)):
                continue
            for row_tiles, warps, stages, cluster in itertools.product((2, 4, 6, 8), (4, 8, 12), (2, 4), (1, 2, 8, 16)):
                schedule = schedules.WarpgroupDecode(row_tiles, warps, 4, stages, 1)
                sizes = (row_tiles, warps // 4, stages, cluster, problem.residual)
                size = 4 * decode_warpgroup_program.shared_words(layout, *sizes)
                assert schedule.smem_bytes(problem, cluster) == size, (k, v, head_dim, sizes)


@pytest.mark.parametrize("group", [32, 64])
def test_stages_end_where_channel_groups_do(group):
    """A stage of four tiles behind 32 packed tokens would take tokens of stale storage for visible ones."""
    layout, target = CacheLayout(f"int4_channel{group}", "int2", 128), Target.parse("sm_90a")
    schedule = schedules.choose(op.problem_of(layout, 1, 8, 4, 1 << 17, 0, group), target)
    assert group % (16 * schedule.tiles) == 0
    facts = dict(dtype="float16", page=0, softcap=False, sinks=False, target=target)
    chosen = op.plan(layout, 1, 8, 4, 1 << 17, residual=group, **facts).request
    assert group % (16 * dict(chosen.params)["tiles"]) == 0


@pytest.mark.parametrize("residual", [16, 48, 128])
def test_a_ring_leaves_the_schedule_as_it_is(residual):
    """Stages are masked where the ring takes over, so that they may be of any size."""
    layout, target = CacheLayout("int4", "int4", 128), Target.parse("sm_90a")
    problems = [op.problem_of(layout, 1, 8, 4, 1 << 17, 0, tokens) for tokens in (0, residual)]
    assert len({schedules.choose(problem, target) for problem in problems}) == 1


@pytest.mark.parametrize("residual", [0, 16, 64, 256])
def test_launches_cover_every_new_token_once(residual):
    chunk = residual or 64
    for most in (0, 1, 2, 15, 16, 17, 63, 64, 65, 200, 1000):
        made = writing.launches(most, chunk, residual)
        blocks = [block for first, count in made for block in range(first, first + count)]
        assert blocks == list(range(len(blocks)))
        for old in range(chunk):
            if most:
                assert (old + most - 1) // chunk < len(blocks)
        if residual and len(made) == 1 and len(blocks) > 1:
            assert most <= writing.ONE_LAUNCH


def test_the_ring_keeps_new_tiles_apart_from_the_block_that_is_packed():
    for residual in (16, 32, 64, 128, 256):
        tiles = residual // 16 + 1
        for block in range(3 * tiles):
            packed = {tile % tiles for tile in range(block * (tiles - 1), (block + 1) * (tiles - 1))}
            first_of_next = (block + 1) * (tiles - 1) % tiles
            assert len(packed) == tiles - 1 and first_of_next not in packed


@pytest.mark.parametrize(
    ("schedule", "constraint"),
    [
        (schedules.Decode(1, 16, 4, 2, 1), "280576 bytes of shared memory, a block on sm_90a has 232448"),
        (schedules.Decode(1, 33, 1, 3, 1), "a block has 32 warps at most"),
        (schedules.Decode(1, 0, 1, 3, 1), "counts start at one"),
        (schedules.Decode(1, 4, 0, 3, 1), "counts start at one"),
    ],
)
def test_a_schedule_that_cannot_be_launched_is_refused(schedule, constraint):
    with pytest.raises(ArgumentError, match=constraint) as caught:
        op.plan(
            CacheLayout("int4", "int4", 128), 8, 8, 4, 32768, dtype="float16", page=0, residual=0, softcap=False,
            sinks=False, target=Target.parse("sm_90a"), schedule=schedule,
        )  # fmt: skip
    assert "schedule = 'Decode(1, " in str(caught.value)


@pytest.mark.parametrize(
    ("argument", "options"),
    [
        ("balanced = 1", {"balanced": 1}),
        ("balanced = 'x'", {"balanced": "x"}),
        ("splits = 2: a balanced batch", {"balanced": True, "splits": 2}),
        ("schedule = .*warpgroups", {"balanced": True, "schedule": schedules.WarpgroupDecode(2, 8, 4, 3, 1)}),
    ],
)
def test_what_a_balanced_batch_cannot_be_is_refused(argument, options):
    with pytest.raises(ArgumentError, match=argument):
        op.check_balanced(**dict(balanced=None, splits=None, schedule=None) | options)


def test_ragged_batches_have_a_place_for_every_piece():
    """However the lengths change on the device: pieces of a `total / shares` each, and one begun for each sequence."""
    layout, target = CacheLayout("int4", "int4", 128), Target.parse("nvidia/nvidia-h200")
    facts = dict(dtype="float16", page=128, residual=0, softcap=False, sinks=False, target=target)
    even = op.plan(layout, 64, 8, 4, 8192, **facts)
    assert not even.places and op.plan(layout, 64, 8, 4, 8192, **facts, mean=8000) == even
    ragged = op.plan(layout, 64, 8, 4, 8192, **facts, mean=4000)
    assert ragged.places == ragged.partials > 64 and dict(ragged.request.params)["balanced"]
    assert op.plan(layout, 64, 8, 4, 8192, **facts, mean=4000, splits=2).places == 0
    assert op.plan(layout, 64, 8, 4, 8192, **facts, mean=4000, balanced=False) == even
    assert op.plan(layout, 64, 8, 4, 8192, **facts, balanced=True) == ragged
    assert op.plan(layout, 1, 8, 4, 8192, **facts, mean=4000).places == 0
    many = [op.plan(layout, batch, 8, 4, 1 << 20, **facts, mean=1000).places for batch in (1024, 1025)]
    assert many[0] > 1024 and many[1] == 0  # every CTA reads all lengths
    for batch in (2, 3, 64, 500, 65535):
        made = op.plan(layout, batch, 1, 64, 1 << 20, **facts, balanced=True)
        assert made.places > batch and made.row_groups == 4


def test_a_window_is_as_long_as_a_cache_gets():
    """Kernel and splits are those of a cache of as many tokens as the rows see."""
    made = pack_cache(*torch.randn(2, 8, 1, 2048, 128), "int4", "int4", page_size=64)
    made, short = (replace(made, max_length=n, mean_length=n // 2) for n in (1 << 20, 515))
    target, shape = Target.parse("nvidia/nvidia-h200"), (8, 4, 4, 128)
    windowed = op.decode_requests(shape, made, window=512, target=target)
    assert windowed == op.decode_requests(shape, short, target=target)
    assert windowed != op.decode_requests(shape, made, target=target)
    assert op.seen(made, 0, 4) == (1 << 20, 1 << 19) and op.seen(short, 1 << 20, 1) == (515, 257)
    with pytest.raises(ArgumentError, match="window = -1"):
        op.decode_requests(shape, made, window=-1, target=target)


WIDE = schedules.WarpgroupDecode(2, 8, 4, 3, 1)


@pytest.mark.parametrize(
    ("schedule", "changes", "constraint"),
    [
        (WIDE, {"target": "sm_80"}, "needs sm_90a"),
        (WIDE, {"page": 16}, "pages and groups of whole 64 tokens"),
        (WIDE, {"page": 32}, "pages and groups of whole 64 tokens"),
        (WIDE, {"k": "int4_channel32"}, "pages and groups of whole 64 tokens"),
        (WIDE, {"v": "int2", "head_dim": 64}, "values that four warps can part"),
        (replace(WIDE, warps=6), {}, "whole warpgroups"),
        (replace(WIDE, row_tiles=3), {}, "2, 4, 6 or 8 row tiles"),
        (replace(WIDE, row_tiles=10), {}, "2, 4, 6 or 8 row tiles"),
        (replace(WIDE, tiles=2), {}, "4 tiles"),
        (replace(WIDE, stages=1), {}, "at least two stages"),
        (replace(WIDE, warps=4, stages=34), {"k": "int2", "v": "int2"}, "at most 33 stages"),
        (replace(WIDE, ahead=33), {}, "ahead 0 to 32"),
        (replace(WIDE, warps=32, stages=4), {}, "bytes of shared memory, a block on sm_90a has 232448"),
    ],
)
def test_what_warpgroups_cannot_do_is_refused(schedule, changes, constraint):
    given = {"target": "sm_90a", "k": "int4", "v": "int4", "head_dim": 128, "page": 0, "residual": 0} | changes
    layout = CacheLayout(given["k"], given["v"], given["head_dim"])
    facts = dict(page=given["page"], residual=layout.k.group or given["residual"], target=Target.parse(given["target"]))
    with pytest.raises(ArgumentError, match=constraint) as caught:
        op.plan(layout, 8, 8, 16, 32768, dtype="float16", softcap=False, sinks=False, schedule=schedule, **facts)
    assert caught.value.argument == "schedule" and "'WarpgroupDecode(" in str(caught.value)


@pytest.mark.parametrize("keys", ["float16", "bfloat16"])
def test_rows_in_shared_memory_are_refused_for_keys_loaded_one_atom_at_a_time(keys):
    given = schedules.Decode(2, 4, 1, 3, 1, shared_rows=True)
    facts = dict(page=0, residual=0, softcap=False, sinks=False, schedule=given, target=Target.parse("sm_90a"))
    with pytest.raises(ArgumentError, match="keys of at most 8 bits") as caught:
        op.plan(CacheLayout(keys, keys, 128), 8, 8, 16, 32768, dtype="float16", **facts)
    assert caught.value.argument == "schedule"
    space = attention_space.Decode(op.problem_of(CacheLayout(keys, keys, 128), 8, 8, 16, 32768, 0))
    assert "16-bit keys" in space.refusal("decode", given, facts["target"], 64)
    assert not any(schedule.shared_rows for _, schedule in space.every(facts["target"], 64))


@pytest.mark.parametrize("formats", [("int4_channel128", "int4"), ("int4", "int4"), ("int8", "int4")])
def test_kernels_of_a_layer_serve_every_batch_beside_tuned_records(formats):
    target = Target.parse("nvidia/nvidia-h200")
    requests = set(kernel_requests(*formats, heads=32, kv_heads=8, target=target))
    layout = CacheLayout(*formats, 128)
    facts = dict(dtype="float16", page=128, residual=layout.k.group, softcap=False, sinks=False, target=target)
    for batch in (*range(1, 40), 63, 64, 65, 66, 67, 100, 131, 132, 133, 300):
        for tokens in (128, 640, 2048, 3072, 3968, 4096, 12_288, 32_768, 100_096):
            assert op.plan(layout, batch, 8, 4, tokens, **facts).request in requests, (batch, tokens)


@pytest.mark.parametrize(
    ("argument", "changes"),
    [
        *(("q_shape", {"q_shape": shape}) for shape in (5, (1, 1, 8), (1, 1, 0, 128), (1, 1, "x", 128), (3, 1, 8, 64))),
        *(("q_shape", {"q_shape": shape}) for shape in ((3, 1, 7, 128), (3, 9, 8, 128), (3, 1.0, 8, 128), None)),
        ("cache = 'NoneType'", {"cache": None}),
        ("dtype = 'x'", {"dtype": "x"}),
        ("softcap = 1.0", {"softcap": 1.0}),
        ("sinks = 0", {"sinks": 0}),
    ],
)
def test_kernels_of_an_impossible_decode_are_refused(cache, argument, changes):
    good = {"q_shape": (3, 1, 8, 128), "cache": cache, "target": "sm_90a"}
    assert op.decode_requests(**good)
    with pytest.raises(ArgumentError, match=argument):
        op.decode_requests(**good | changes)


@pytest.mark.parametrize("static", [[[1.0] * 128] * 2, torch.ones(1, 2, 128), torch.ones(2, 127), 5])
def test_static_scales_of_another_form_are_refused(static):
    x = torch.ones(1, 2, 16, 128)
    for name, formats in (("k_static", ("fp8", "int4")), ("v_static", ("int4", "fp8"))):
        with pytest.raises(ArgumentError, match=f"^{name} = "):
            pack_cache(x, x, *formats, **{name: static})
    made = pack_cache(x, x, "fp8", "int4", k_static=torch.ones(2, 128))
    with pytest.raises(ArgumentError, match="k_static = "):
        replace(made, k_static=static).check()


@pytest.mark.parametrize("shape", [(4, 2, 128), (4, 1, 2, 128), (2, 2, 2, 128)])
def test_rows_that_kernels_copy_16_bytes_of_are_aligned(shape):
    """`contiguous` leaves a view at an odd address where it is."""
    x = torch.randn(shape).half()
    rows, *pitches = writing.rows_of(misaligned(x))
    assert rows.data_ptr() % 16 == 0 and pitches == [256, 128] and torch.equal(rows, x.flatten())
    assert writing.rows_of(x)[0].data_ptr() == x.data_ptr()


def test_decode_reads_and_writes_aligned_memory(cache, monkeypatch):
    """Kernels store 8 bytes at a time: results for an odd address are copied there."""
    target, seen = Target.parse("sm_90a"), []

    def kernel(q, *rest):
        seen.append((q, rest[-5]))
        rest[-5].copy_(q + 1)

    monkeypatch.setattr(checks, "check_on_gpu", lambda *args: None)
    monkeypatch.setattr(launch, "current_targets", lambda *args: (target, target))
    monkeypatch.setattr(launch, "semaphores", lambda *args: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(kernels, "get_kernel", lambda request: kernel)
    q = torch.randn(3, 1, 8, 128).half()
    for out in (None, torch.zeros_like(q), misaligned(torch.zeros_like(q))):
        y = decode(misaligned(q), cache, out=out)
        assert torch.equal(y, q + 1) and (out is None or y.data_ptr() == out.data_ptr())
        assert all(x.data_ptr() % 16 == 0 for x in seen[-1])
    assert seen[1][1].data_ptr() != seen[2][1].data_ptr()
