"""What the published wheel holds: every family of the registry, each model by its kernels, each kernel once."""

from __future__ import annotations

import json

from terrazzo.cli import main
from terrazzo.lowering.targets import Target
from terrazzo.ops import ready
from terrazzo.ops.ready import Part
from terrazzo.ops.registry import REGISTRY
from terrazzo.schedules.models import ARCHITECTURES

SM_90A = Target.parse("sm_90a")


def test_every_operator_of_the_registry_has_a_part_or_a_reason():
    families = {part.operator.removesuffix("_fp8") for part in ready.PARTS}
    held = families | set(ready.ALONG)
    assert held | set(ready.LEFT_OUT) == {it.operator for it in REGISTRY} and not held & set(ready.LEFT_OUT)
    assert {name for part in ready.PARTS for name in part.models} <= set(ARCHITECTURES)


def test_what_stands_between_linear_layers_comes_with_them():
    (plan,) = ready.plans(Part("w4a16", ("llama-3.2-1b",), (128,), ("float16",)), SM_90A)
    families = {request.name.partition(".")[0] for request in plan.requests}
    assert set(ready.ALONG) <= families and not families & set(ready.LEFT_OUT)


def test_each_device_of_the_architecture_finds_its_choice(monkeypatch):
    part = Part("w4a16", ("llama-3.2-1b",), (128,), ("float16",), symmetric=True)
    monkeypatch.setattr(ready, "PARTS", (part,))
    held = set(ready.published(SM_90A).requests)
    names = [device.name for device in ready.devices(SM_90A)]
    assert {"NVIDIA H200", "NVIDIA H100 80GB HBM3"} == set(names) and len(names) == 2
    for device in ready.devices(SM_90A):
        (plan,) = ready.plans(part, device)
        assert set(plan.requests) <= held
    assert {request.target.arch for request in held} == {"sm_90a"}


def test_kernels_that_stand_in_for_others_are_in_the_wheel(monkeypatch):
    part = Part("w4a16", ("llama-3.2-1b",), (128,), ("float16",))
    monkeypatch.setattr(ready, "PARTS", (part,))
    (plan,) = ready.plans(part, SM_90A)
    monkeypatch.setattr(ready, "devices", lambda target: [target])
    more = set(ready.published(SM_90A).requests) - set(plan.requests)
    assert {request.name for request in more} == {"w4a16.stream_k", "w4a16.small_batch"}
    assert all(dict(request.params)["n"] == 0 for request in more)


def test_layers_that_engines_join_are_in_the_wheel_as_they_join_them():
    (dense,) = ready.plans(Part("w4a16", ("llama-3.1-8b",), (128,), ("float16",)), SM_90A)
    (experts,) = ready.plans(Part("w4a16", ("mixtral-8x7b",), (128,), ("float16",)), SM_90A)
    wide = {kind.leaf: (kind.n, kind.k) for kind in dense.kinds}
    joined = {"qkv_proj": (6144, 4096), "gate_up_proj": (28672, 4096)}
    assert wide == joined | {"o_proj": (4096, 4096), "down_proj": (4096, 14336)}
    assert {kind.leaf: kind.experts for kind in experts.kinds} == {
        "qkv_proj": 0, "o_proj": 0, "gate_up_proj": 8, "down_proj": 8}  # fmt: skip
    shaped = {(made["n"], made["k"]) for made in (dict(it.params) for it in dense.requests) if made.get("n")}
    assert shaped == set(wide.values())


def test_a_part_runs_where_the_registry_has_its_operator():
    runs = {arch: [it for it in ("w4a16", "w4a8", "w4a8_fp8", "attention") if ready.runs(it, Target.parse(arch))]
            for arch in ("sm_80", "sm_89", "sm_90a")}  # fmt: skip
    everywhere = ["w4a16", "w4a8", "attention"]
    assert runs["sm_80"] == everywhere and set(runs["sm_89"]) == set(runs["sm_90a"]) == {*everywhere, "w4a8_fp8"}


def test_the_command_takes_the_published_wheel_where_nothing_is_named(monkeypatch, capsys, tmp_path):
    part = Part("attention", ("llama-3.2-1b",), dtypes=("float16",), kv=(("int4", "int4"),))
    monkeypatch.setattr(ready, "PARTS", (part, part))
    (plan,) = ready.plans(part, SM_90A)
    monkeypatch.setattr(ready, "devices", lambda target: [target])
    assert ready.published(SM_90A).requests == plan.requests
    assert main(["compile", "--target", "sm_90a", "--wheel", str(tmp_path), "--dry-run", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert sum(said["kernels"].values()) == len(plan.requests) and not list(tmp_path.iterdir())
    assert main(["compile", "--target", "sm_90a"]) == 2 and "nothing to compile" in capsys.readouterr().err
