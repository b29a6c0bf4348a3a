"""Targets: parsing, detection, capabilities, refusals."""

import pickle
from types import SimpleNamespace

import pytest
from terrazzo.lowering import CAPABILITIES, TARGET_NAMES, Target
from terrazzo.lowering.errors import ArgumentError, TargetError


@pytest.mark.parametrize("name", TARGET_NAMES)
def test_every_name_parses_to_a_value(name):
    target = Target.parse(name)
    assert Target.parse(target) is target and target == pickle.loads(pickle.dumps(target)) and hash(target) is not None
    assert target.capabilities == CAPABILITIES[target.arch]
    assert 48 * 1024 < target.smem_per_block == target.smem_per_sm - 1024
    assert target.tflops("s8") >= 2 * target.tflops("f16") == 2 * target.tflops("bf16") > 0 and target.dram_gb_s >= 300


def test_defaults_and_tags():
    assert Target.parse("sm_90a").name == "NVIDIA H200" and Target.parse("sm_90a").smem_per_block == 232448
    assert Target.parse("nvidia/nvidia-h100").dram_gb_s < Target.parse("sm_90a").dram_gb_s
    assert Target.parse("nvidia/geforce-rtx-4090").arch == "sm_89"


def test_a_tvm_target_is_known_by_its_arch():
    tilelang = pytest.importorskip("tilelang")
    from tvm.target import Target as TvmTarget

    shared = set(TARGET_NAMES) & set(tilelang.tvm.target.list_tags())
    assert len(shared) >= 8
    for tag in shared:
        assert Target.parse(TvmTarget(tag)) == Target.parse(Target.parse(tag).arch)
    with pytest.raises(TargetError, match="sm_75"):
        Target.parse(TvmTarget({"kind": "cuda", "arch": "sm_75"}))


@pytest.mark.parametrize(
    "spec",
    ["sm_90", "sm_103a", "sm_75", "cuda", "nvidia/tesla-v100", 90, SimpleNamespace(kind=SimpleNamespace(name="llvm"))],
)
def test_others_are_refused_with_the_list(spec):
    with pytest.raises(TargetError, match="sm_80, sm_86, sm_89, sm_90a"):
        Target.parse(spec)


@pytest.mark.parametrize(
    ("spec", "near"),
    [("sm_90", "sm_90a"), ("h100", "nvidia/nvidia-h100"), ("nvidia/rtx-4090", "nvidia/geforce-rtx-4090")],
)
def test_what_a_refused_name_is_most_like_comes_first(spec, near):
    with pytest.raises(TargetError) as refused:
        Target.parse(spec)
    assert near in refused.value.remedy.partition("for example")[0]


def test_emulated_instructions_are_no_capabilities():
    hopper = Target.parse("sm_90a")
    assert not hopper.supports("mma.s4") and not hopper.supports("mma.e4m3") and hopper.supports("wgmma.e4m3")
    assert Target.parse("sm_89").supports("mma.e4m3") and not Target.parse("sm_80").supports("mma.e4m3")
    assert Target.parse("sm_86").supports("mma.s4") and not Target.parse("sm_89").supports("tma")


def test_blackwell_has_what_its_mma_sync_runs_natively(monkeypatch):
    data_centre, desktop = Target.parse("sm_100a"), Target.parse("sm_120a")
    assert not data_centre.supports("mma.e4m3") and desktop.supports("mma.e4m3")
    for target in (data_centre, desktop):
        assert target.supports("mma.s8") and not target.supports("mma.s4") and not target.supports("wgmma.f16")
    fake_torch(monkeypatch, name="NVIDIA B200", major=10, minor=0, multi_processor_count=148, L2_cache_size=2**27)
    assert Target.detect().arch == "sm_100a" and Target.detect().dram_gb_s == 8000
    name = "NVIDIA GeForce RTX 5080"
    fake_torch(monkeypatch, name=name, major=12, minor=0, multi_processor_count=84, L2_cache_size=2**26)
    assert Target.detect().arch == "sm_120a" and Target.detect().dram_gb_s == pytest.approx(1792 * 84 / 170)


def test_unknown_names_are_errors_not_guesses():
    with pytest.raises(TargetError, match=r"wgmma\.f16"):
        Target.parse("sm_90a").supports("wgmma.fp16")
    with pytest.raises(ArgumentError, match="no native tensor rate"):
        Target.parse("sm_90a").tflops("s4")


def fake_torch(monkeypatch, **properties):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(properties))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**properties))


def test_detect_reads_the_device(monkeypatch):
    fake_torch(monkeypatch, name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, L2_cache_size=62914560)
    assert Target.parse() == Target.parse("sm_90a")
    fake_torch(
        monkeypatch,
        name="NVIDIA A100-PCIE-40GB MIG 3g.20gb",
        major=8,
        minor=0,
        multi_processor_count=42,
        L2_cache_size=2**24,
    )
    slice_of_a100 = Target.detect()
    assert (slice_of_a100.sms, slice_of_a100.l2_bytes, slice_of_a100.arch) == (42, 2**24, "sm_80")


def test_detect_scales_an_unlisted_model(monkeypatch):
    fake_torch(monkeypatch, name="NVIDIA Something", major=8, minor=9, multi_processor_count=71, L2_cache_size=2**25)
    assert Target.detect().tflops("f16") == Target.parse("sm_89").tflops("f16") / 2


def test_detect_refuses(monkeypatch):
    fake_torch(monkeypatch, name="NVIDIA B300", major=10, minor=3, multi_processor_count=148, L2_cache_size=2**27)
    with pytest.raises(TargetError, match=r"B300 \(sm_103a\)"):
        Target.detect()
    fake_torch(monkeypatch)
    with pytest.raises(TargetError, match="no CUDA device"):
        Target.parse(None)
