"""vLLM's attention on our pages without vLLM: sizes, batches, kernels ahead, and what requests say however served."""

from __future__ import annotations

import importlib
import json
import random
import sys
import weakref
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from terrazzo import cli
from terrazzo.integrations import vllm as plugin
from terrazzo.integrations.engines import attention as core
from terrazzo.integrations.engines.attention import Kind, Split
from terrazzo.integrations.vllm.names import CACHES, CHECKER, OWN_CACHE
from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.targets import Target
from terrazzo.ops.attention import checks
from terrazzo.ops.attention.decoding import op
from terrazzo.ops.attention.prefilling import prefill_op
from terrazzo.schedules import attention_prefill

from benchmarks.engine_model import write_config
from tests.integrations import paged_engine, vllm_double

H100 = Target.parse("nvidia/nvidia-h100")
SMALL = Kind(CACHES.layout_of("int4_per_token_head", "float16", 64), 4, 2, 16, "float16", most_length=512)
KIND_OF_TINY = Kind(CACHES.layout_of("int8_per_token_head", "bfloat16", 64), 4, 2, core.PAGE, "bfloat16")
SIZES = {
    "int4_per_token_head": lambda dim: dim + 8, "int8_per_token_head": lambda dim: 2 * dim + 8,
    "float16": lambda dim: 4 * dim, "bfloat16": lambda dim: 4 * dim, OWN_CACHE: lambda dim: dim + dim // 2 + 8,
}  # fmt: skip
"""Bytes of a token and head in vLLM: codes of keys and of values, and a float32 of scales for each."""


# -- sizes -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dim", core.HEAD_DIMS)
@pytest.mark.parametrize("name", SIZES)
def test_a_token_has_the_bytes_that_vllm_gives_it(name, dim):
    assert core.token_bytes(CACHES.layout_of(name, "float16", dim)) == SIZES[name](dim)
    assert CACHES.content(name, dim) * (2 if name.endswith("float16") else 1) == SIZES[name](dim)


def test_auto_is_the_dtype_of_the_model():
    for dtype in ("float16", "bfloat16"):
        assert CACHES.layout_of("auto", dtype, 128) == CACHES.layout_of(dtype, "float16", 128)
    assert CACHES.content("auto", 128) == 256


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("fp8", "float16", 128, None), "must be auto or one of"),
        (("auto", "float32", 128, None), "activations are float32"),
        (("auto", "float16", 96, None), "heads have 96 dimensions"),
        (("auto", "float16", 128, 24), "page_size"),
        (("int4_per_token_head", "bfloat16", 128, 8), "page_size"),
    ],
)
def test_what_is_not_taken_has_a_reason(asked, said):
    assert said in CACHES.refusal(*asked)


@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90a"])
@pytest.mark.parametrize("name", CACHES.formats)
def test_usual_caches_are_taken(name, target):
    dtype = name if name in checks.DTYPES else "bfloat16"
    for dim in (64, 128):
        assert CACHES.refusal(name, dtype, dim, None, sinks=True, target=Target.parse(target)) is None
        assert CACHES.refusal(name, dtype, dim, 32) is None


def test_pages_are_seen_as_words_and_others_refused():
    kv_cache = torch.arange(3 * 2 * 16 * 72).remainder(251).to(torch.uint8).view(3, 2, 16, 72)
    pages = core.pages_of(kv_cache, SMALL)
    assert pages.shape == (3, 2, 16 * 72 // 4) and pages.data_ptr() == kv_cache.data_ptr()
    assert torch.equal(pages.view(torch.uint8).view_as(kv_cache), kv_cache)
    assert torch.equal(core.pages_of(kv_cache.view(torch.float16), SMALL), pages)
    other = torch.zeros(3, 16, 2, 72, dtype=torch.uint8)
    for bad in (other, other.transpose(1, 2), torch.zeros(3, 2, 16, 144, dtype=torch.uint8)[..., :72], other[0]):
        with pytest.raises(ArgumentError, match="kv_cache"):
            core.pages_of(bad, SMALL)


# -- batches -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("counts", "most", "room", "split"),
    [
        ([1, 1, 1], 1, 3, Split(3, 1, 0, 3)),
        ([1, 1, 7, 30], 1, 39, Split(2, 1, 30, 2)),
        ([7, 30], 1, 37, Split(0, 0, 30, 0)),
        ([3, 3, 3], 4, 9, Split(3, 3, 0, 9)),
        ([3, 3, 2], 4, 8, Split(3, 4, 0, 8, ragged=True)),
        ([1, 4, 2, 30], 4, 37, Split(3, 4, 30, 7, ragged=True)),
        ([1, 4, 0, 0], 4, 8, Split(2, 4, 0, 5, ragged=True)),
        ([5, 5], 4, 10, Split(0, 0, 5, 0)),
        ([2, 2, 0, 0], 4, 8, Split(4, 2, 0, 8)),
        ([2, 2, 0, 0], 4, 4, Split(2, 2, 0, 4)),
        ([1, 0, 5], 4, 6, Split(1, 1, 5, 1)),
        ([0, 0], 4, 0, Split(0, 0, 0, 0)),
        ([30, 1], 4, 31, Split(0, 0, 30, 0)),
    ],
)
def test_decodes_are_told_from_prefills(counts, most, room, split):
    starts = [sum(counts[:at]) for at in range(len(counts) + 1)]
    assert core.split(starts, most, room) == split


def test_every_sequence_of_a_random_batch_is_served_once(seed):
    rng = random.Random(seed)
    for _ in range(300):
        most = rng.randrange(1, 9)
        counts = [rng.choice([1, 1, most, rng.randrange(1, 40)]) for _ in range(rng.randrange(1, 12))]
        counts.sort(key=lambda n: n > most)
        starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        lengths, table = (torch.randint(1, 90, (len(counts), *more), dtype=torch.int32) for more in ((), (6,)))
        kind = replace(SMALL, most_rows=most)
        step = core.step_of(kind, starts, starts.tolist(), lengths, table, 90, sum(counts))
        n = step.split.decodes
        assert all(count <= most for count in counts[:n]) and (n == len(counts) or counts[n] > most)
        assert step.split.ragged == (len(set(counts[:n])) > 1) and step.split.tokens == sum(counts[:n])
        assert step.split.ragged or counts[:n] == [step.split.rows] * n
        pages = torch.zeros(7, 2, 288, dtype=torch.int32)
        decoded, filled = step.views(pages)
        assert (decoded is None) == (n == 0) and (filled is None) == (n == len(counts))
        if decoded is not None:
            assert torch.equal(decoded.lengths, lengths[:n]) and torch.equal(decoded.block_table, table[:n])
            assert decoded.lengths.data_ptr() == lengths.data_ptr() and decoded.max_length == kind.most_length
        if step.split.ragged:
            assert step.decoded.data_ptr() == starts.data_ptr() and len(step.decoded) == n + 1
        if filled is not None:
            assert torch.equal(filled.lengths, lengths[n:]) and torch.equal(filled.block_table, table[n:])
            assert step.starts.tolist() == [sum(counts[n:at]) for at in range(n, len(counts) + 1)]
            assert step.split.most_new == max(counts[n:])
        for view in (decoded, filled):
            if view is not None:
                view.check()
        assert step.views(pages)[0] is decoded


# -- kernels -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["int4_per_token_head", "int8_per_token_head", "bfloat16"])
@pytest.mark.parametrize(("softcap", "sinks", "most_rows"), [(0.0, False, 1), (30.0, True, 4)])
def test_what_any_step_launches_was_compiled_before(seed, name, softcap, sinks, most_rows):
    rng, layout = random.Random(seed), CACHES.layout_of(name, "bfloat16", 128)
    kind = Kind(layout, 32, 8, core.PAGE, "bfloat16", softcap=softcap, sinks=sinks, most_rows=most_rows)
    ahead = set(kind.requests(H100))
    assert len(ahead) < 16
    facts = dict(dtype="bfloat16", page=core.PAGE, residual=0, softcap=softcap > 0, sinks=sinks, target=H100)
    problem = prefill_op.problem_of(layout, core.PAGE, 0, False)
    for _ in range(200):
        rows, batch, longest = rng.randrange(1, most_rows + 1), rng.randrange(1, 600), rng.randrange(1, 200_000)
        made = op.plan(layout, batch, 8, rows * 4, longest, **facts, balanced=True, device=H100)
        assert made.request in ahead and made.places
        if most_rows > 1:
            ragged = op.plan(layout, batch, 8, most_rows * 4, longest, **facts, balanced=True, device=H100, ragged=True)
            assert ragged.request in ahead
        width = attention_prefill.narrower(problem, H100, H100.sms, rng.randrange(1, 9000) * 4, batch * 8)
        assert prefill_op.plan(layout, **facts, fresh=False, device=H100, rows=width).request in ahead


def test_a_bundle_has_a_models_attention(tmp_path, capsys):
    folder = write_config(tmp_path / "model", "tiny-llama", "none", 64, "bfloat16")
    ahead = set(replace(KIND_OF_TINY, most_rows=3).requests(H100))
    facts = (
        SimpleNamespace(heads=4, kv_heads=2, head_dim=64, softcap=0.0, sinks=False),
        "int8_per_token_head",
        "bfloat16",
    )
    assert set(CACHES.model_requests(*facts, H100, most_rows=3)) == ahead
    assert set(CACHES.model_requests(*facts, H100, ranks=2)) == set(replace(KIND_OF_TINY, most_rows=1).requests(H100))
    with pytest.raises(ArgumentError, match="ranks"):
        CACHES.model_requests(*facts, H100, ranks=3)
    command = ["compile", str(folder), "--target", "nvidia/nvidia-h100", "--kv", "none", "--dry-run", "--json"]
    counts = []
    for more in ([], ["--kv-cache-dtype", "int8_per_token_head", "--q-len", "3"]):
        assert cli.main([*command, *more]) == 0
        counts.append(json.loads(capsys.readouterr().out)["total"])
    assert counts[1] - counts[0] == len(ahead)


def test_a_folder_says_which_caches_it_may_have(tmp_path, capsys):
    folder = write_config(tmp_path / "model", "tiny-llama", "none", 64, "bfloat16")
    assert CHECKER.cache_refusals(folder, H100) == dict.fromkeys(("auto", *CACHES.formats), "")
    assert cli.main(["serve-check", str(folder)]) == 0
    assert "--kv-cache-dtype auto, float16, bfloat16, int8_per_token_head" in capsys.readouterr().out
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | dict(head_dim=96)))
    assert all("96 dimensions" in reason for reason in CHECKER.cache_refusals(folder, H100).values())


# -- requests ----------------------------------------------------------------------------------------------------------
KINDS = {
    "int4, preempted": (SMALL, dict(pages=8)),
    "int8, windows, soft caps, padded": (
        Kind(CACHES.layout_of("int8_per_token_head", "bfloat16", 64), 2, 1, 32, "bfloat16", window=20, softcap=5.0,
             most_length=512),
        dict(pages=7, padded=True),
    ),
    "float16, speculated": (
        Kind(CACHES.layout_of("auto", "float16", 64), 2, 2, 16, "float16", most_length=512, most_rows=3),
        dict(pages=14, speculate=3, padded=True),
    ),
    "int8, ragged": (
        Kind(CACHES.layout_of("int8_per_token_head", "float16", 64), 2, 1, 16, "float16", most_length=512, most_rows=3),
        dict(pages=14, speculate=3, ragged=True),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_requests_say_what_they_say_alone(seed, name):
    kind, options = KINDS[name]
    found = paged_engine.requests(8, 40, seed)
    said = paged_engine.alone(kind, found)
    engine = paged_engine.Engine(kind, step_tokens=24, seed=seed, **options)
    engine.serve(found, abort=0.02)
    assert engine.counts["chunks"] and engine.counts["mixed"], engine.counts
    equal, wrong = paged_engine.differing(found, said, 0.0)
    assert not wrong and equal == sum(len(request.answer) for request in found)
    if not options.get("speculate"):
        assert not engine.cache[0].any(), "padding was written"


# -- vLLM's classes ----------------------------------------------------------------------------------------------------
@pytest.fixture
def engine(monkeypatch):
    return vllm_double.install(monkeypatch)


@pytest.fixture
def without_experts(monkeypatch):
    """Their module asks vLLM for more than the double has."""
    module = ModuleType("experts")
    module.register = lambda: None
    monkeypatch.setitem(sys.modules, "terrazzo.integrations.vllm.experts", module)
    monkeypatch.setattr(plugin, "experts", module, raising=False)


def backend(release: str) -> Any:
    return importlib.import_module(f"terrazzo.integrations.vllm.attention_{release}").TerrazzoBackend


def register(release: str) -> None:
    for part in importlib.import_module(f"terrazzo.integrations.vllm.{release}").parts().values():
        part()


@pytest.mark.parametrize("release", ["v0_26", "v0_33"])
def test_the_backend_is_registered_under_custom_by_name_alone(engine, without_experts, release):
    register(release)
    register(release)
    path = vllm_double.OVERRIDES[vllm_double.AttentionBackendEnum.CUSTOM]
    assert f"terrazzo.integrations.vllm.attention_{release}" not in sys.modules
    name, _, leaf = path.rpartition(".")
    assert getattr(importlib.import_module(name), leaf) is backend(release)
    known = sys.modules["vllm.config.cache"]
    assert known.KV_CACHE_DTYPES == ["auto", OWN_CACHE] * (release == "v0_33") or release == "v0_26"
    if release == "v0_33":
        assert known.HANDLERS[OWN_CACHE].quant_mode() is vllm_double.KVQuantMode.INT8_PER_TOKEN_HEAD


def test_another_plug_ins_backend_stays(engine, without_experts, caplog):
    vllm_double.OVERRIDES[vllm_double.AttentionBackendEnum.CUSTOM] = "other.Backend"
    register("v0_26")
    assert vllm_double.OVERRIDES[vllm_double.AttentionBackendEnum.CUSTOM] == "other.Backend"
    assert "other.Backend" in caplog.text


@pytest.mark.parametrize("dim", [64, 128])
def test_shapes_of_026_have_the_bytes_of_its_pages(engine, dim):
    for name, elements in (("int8_per_token_head", 1), ("int4_per_token_head", 1), ("auto", 2), ("bfloat16", 2)):
        shape = backend("v0_26").get_kv_cache_shape(5, 64, 8, dim, name)
        bytes_of = SIZES["float16" if name == "auto" else name](dim)
        assert shape == (5, 8, 64, bytes_of // elements)


@dataclass(frozen=True)
class Spec:
    kv_quant_mode: Any
    dtype: torch.dtype
    head_size: int = 128
    state_content_bytes: int | None = None


def test_specs_of_033_have_our_bytes(engine):
    modes, made = vllm_double.KVQuantMode, backend("v0_33")
    for mode, dtype, name in (
        (modes.INT8_PER_TOKEN_HEAD, torch.int8, "int8_per_token_head"),
        (modes.INT4_PER_TOKEN_HEAD, torch.uint8, "int4_per_token_head"),
        (modes.INT8_PER_TOKEN_HEAD, torch.uint8, OWN_CACHE),
    ):
        assert made.customize_spec(Spec(mode, dtype)).state_content_bytes == SIZES[name](128)
        assert made.customize_spec(Spec(mode, dtype, state_content_bytes=1)).state_content_bytes == 1
    assert made.customize_spec(Spec(modes.NONE, torch.float16)).state_content_bytes is None
    assert made.supported_kv_cache_layouts() == (vllm_double.KVCacheLayout.LBHNC,)


def implementation(release: str = "v0_26", **changes: Any) -> Any:
    facts = dict(num_heads=4, head_size=64, scale=0.125, num_kv_heads=2, kv_cache_dtype="int8_per_token_head")
    with torch.device("cpu"):
        torch.set_default_dtype(torch.float16)
        try:
            return backend(release).get_impl_cls()(**facts | changes)
        finally:
            torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "change", [dict(alibi_slopes=[1.0]), dict(attn_type="encoder_only"), dict(chunk_lookback=4),
               dict(kv_cache_dtype="fp8")],
)  # fmt: skip
def test_layers_that_are_not_ours_say_so(engine, change):
    with pytest.raises(ArgumentError):
        implementation(**change)
    assert implementation(chunk_lookback=-1, use_alibi_sqrt=False).kind.page == core.PAGE


@pytest.mark.parametrize("release", ["v0_26", "v0_33"])
def test_a_step_through_vllms_classes_is_attention_over_what_was_written(engine, release):
    made, sinks = backend(release), torch.randn(4)
    impl = implementation(release, sliding_window=9, sinks=sinks)
    impl.process_weights_after_loading(torch.float16)
    engine.config.compilation_config.static_forward_context["a"] = SimpleNamespace(impl=impl)
    builder = made.get_builder_cls()(SimpleNamespace(block_size=16), ["a"], engine.config, torch.device("cpu"))
    assert builder.reorder_batch_threshold == 1 and impl.kind.page == 16 and impl.kind.window == 9
    rng = torch.Generator().manual_seed(3)
    lengths, new = torch.tensor([14, 20], dtype=torch.int32), [1, 5]
    table = torch.tensor([[3, 0], [2, 4]], dtype=torch.int32)
    kv_cache = torch.zeros(5, 2, 16, CACHES.content("int8_per_token_head", 64), dtype=torch.int8)
    past = [torch.randn(34, 2, 64, generator=rng).half() for _ in range(2)]
    slots = [table[b, at // 16].item() * 16 + at % 16 for b in range(2) for at in range(lengths[b])]
    impl.do_kv_cache_update(None, *past, kv_cache, torch.tensor(slots))
    starts = torch.tensor([0, 1, 6], dtype=torch.int32)
    common = SimpleNamespace(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lengths, block_table_tensor=table, max_seq_len=20,
        num_actual_tokens=6,
    )  # fmt: skip
    q = torch.randn(6, 4, 64, generator=rng).half()
    out = torch.full_like(q, float("nan"))
    assert impl.forward(None, q, q, q, kv_cache, builder.build(0, common), out) is out
    for b, (first, length) in enumerate(((0, 14), (14, 20))):
        for row in range(new[b]):
            end = length - new[b] + row + 1
            span = slice(first + max(0, end - 9), first + end)
            k, v = (x[span].repeat_interleave(2, 1).double() for x in past)
            x = q[starts[b] + row].double()
            s = torch.cat([torch.einsum("hd,thd->ht", x, k) * 0.125, sinks.double()[:, None]], 1).softmax(1)
            wanted = torch.einsum("ht,thd->hd", s[:, :-1], v)
            assert (out[starts[b] + row] - wanted).abs().max() < 0.03  # codes of 8 bits
    assert impl.forward(None, q, q, q, torch.tensor([]), None, out).count_nonzero() == 0
    impl.do_kv_cache_update(None, q, q, torch.tensor([]), torch.tensor(slots))
    held = weakref.ref(impl.layer.cache(kv_cache))
    impl._k_scale_cache = None
    assert held() is None, "memory that vLLM gave back is held"
    with pytest.raises(ArgumentError, match="output_scale"):
        impl.forward(None, q, q, q, kv_cache, None, out, output_scale=sinks)


@pytest.mark.parametrize(("tokens", "level"), [(0, 2), (3, 2), (7, 2), (8, 1)])
def test_graphs_hold_as_many_rows_as_are_decoded(engine, tokens, level):
    if tokens:
        engine.config.speculative_config = SimpleNamespace(num_speculative_tokens=tokens)
    impl, made = implementation(), backend("v0_26").get_builder_cls()
    assert made.get_cudagraph_support(engine.config, None).value == level
    engine.config.compilation_config.static_forward_context["a"] = SimpleNamespace(impl=impl)
    built = made(SimpleNamespace(block_size=64), ["a"], engine.config, torch.device("cpu"))
    assert impl.kind.most_rows == built.reorder_batch_threshold == min(1 + tokens, 8)


@pytest.mark.parametrize(("strict", "said"), [(False, "no kernel here"), (True, None)])
def test_a_backend_without_kernels_declines_unless_it_is_strict(engine, monkeypatch, strict, said):
    """Strict says so itself, as an error."""
    made = backend("v0_26")
    module = importlib.import_module("terrazzo.integrations.vllm.attention")
    monkeypatch.setattr(module, "lacking", lambda requests: "no kernel here")
    monkeypatch.setattr(module.VLLM, "target", lambda: H100)
    monkeypatch.setattr(module.VLLM, "compiling", lambda how: None)
    engine.config.additional_config["terrazzo"] |= dict(strict=strict, bundle="there")
    facts = dict(head_size=128, dtype=torch.bfloat16, kv_cache_dtype="int4_per_token_head", block_size=None)
    facts |= dict(use_mla=False, has_sink=True, use_sparse=False, use_mm_prefix=False, device_capability=None)
    assert made.supports_combination(**facts) == said


def test_backends_say_in_words_what_they_decline(engine):
    facts = dict(head_size=128, dtype=torch.bfloat16, kv_cache_dtype="int4_per_token_head", block_size=None)
    facts |= dict(use_mla=False, has_sink=True, use_sparse=False, use_mm_prefix=False, device_capability=None)
    made = backend("v0_26")
    assert made.supports_combination(**facts) is None
    assert "page_size" in made.supports_combination(**facts | dict(block_size=24))
    engine.config.additional_config["terrazzo"]["cpu"] = False
    assert "NVIDIA" in made.supports_combination(**facts) and not made.supports_compute_capability(None)
    assert made.get_preferred_block_size(16) == core.PAGE and made.get_preferred_block_size(256) == 256
    assert made.get_name() == "CUSTOM" and made.supports_sink() and made.supports_sliding_window()
