"""Damaged checkpoints and packed files: a weight or an error that is meant for the reader, whatever was changed."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import mutation
import pytest
import torch
from checkpoint_folders import KINDS, LAYER, stored, tensors, write
from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file
from terrazzo.ops import w4a8, w4a16, w4ax
from terrazzo.ops.grouped import GroupedWeight
from terrazzo.ops.w4a8 import fp8

pytestmark = pytest.mark.random
OTHERS = {"model.norm.weight": torch.ones(8), "lm_head.weight": torch.ones(4, 8).half()}
SHARDS = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}


def read(folder: Path, family: Any) -> list[bool]:
    """What survives of the three ways in; warnings about zero points are none of a failure."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [
            mutation.survives(lambda: family.load_model(folder)),
            mutation.survives(lambda: family.load_layer(folder, LAYER)),
            mutation.survives(lambda: list(family.iter_layers(folder, strict=True, packed=False, select="down"))),
        ]


def damaged_config(folder: Path, kind: str, random: Random) -> None:
    whole = {"model_type": "llama", "quantization_config": KINDS[kind][1]}
    (folder / "config.json").write_bytes(mutation.text(mutation.value(whole, random), random))


def damaged_tensors(folder: Path, kind: str, random: Random) -> None:
    held = mutation.tensors(tensors(KINDS[kind][0]) | OTHERS, random)
    try:
        save_file(held, folder / "model.safetensors")
    except (SafetensorError, ValueError):  # a name or dtype that the format does not have
        return


def damaged_index(folder: Path, kind: str, random: Random) -> None:
    held = tensors(KINDS[kind][0]) | OTHERS
    (folder / "model.safetensors").unlink()
    shards = {name: SHARDS["ab"[i % 2]] for i, name in enumerate(sorted(held))}
    write(folder, held, KINDS[kind][1], shards)
    index = {"metadata": {"total_size": 5}, "weight_map": shards}
    text = mutation.text(mutation.value(index, random), random)
    (folder / "model.safetensors.index.json").write_bytes(text)


def damaged_bytes(folder: Path, kind: str, random: Random) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    head = 8 + int.from_bytes(data[:8], "little")  # the header is where readers can be hurt
    path.write_bytes(mutation.data(data[:head], random) + data[head:])


DAMAGE = (damaged_config, damaged_config, damaged_tensors, damaged_tensors, damaged_index, damaged_bytes)


def checkpoints(tmp_path: Path, seed: int, count: int) -> int:
    """Read so many damaged folders; how many ways in survived the damage."""
    survived = 0
    for case in range(count):
        random = Random(seed * 1_000_003 + case)
        kind = random.choice(sorted(KINDS))
        folder = write(tmp_path / str(case), tensors(KINDS[kind][0]) | OTHERS, KINDS[kind][1])
        random.choice(DAMAGE)(folder, kind, random)
        try:
            survived += sum(read(folder, KINDS[kind][2]))
        except BaseException as error:
            error.add_note(f"case {case} of seed {seed}, {kind}")
            raise
        for file in folder.iterdir():
            file.unlink()
    return survived


def test_damaged_checkpoints_are_refused_with_errors_of_ours(tmp_path, seed):
    assert checkpoints(tmp_path, 6 * seed, 150) > 30  # most damage is beside what is read, or a reason to skip


@pytest.mark.slow
@pytest.mark.parametrize("part", range(1, 6))
def test_thousands_of_damaged_checkpoints(tmp_path, seed, part):
    assert checkpoints(tmp_path, 6 * seed + part, 600) > 100


def packed() -> dict[str, Callable[[], Any]]:
    """Name -> a weight that `save` writes."""
    weight, x = torch.randn(64, 256), torch.randn(9, 256)
    statistics = w4ax.ActivationStatistics.empty(256, percentile=0.9).observe(x)
    plan = w4ax.plan_blocks(torch.arange(1.0, 257).flip(0), ratio=0.5)
    return {
        "w4a16": w4a16.quantize(weight, bias=torch.ones(64)),
        "w4a16_symmetric": w4a16.quantize(weight, symmetric=True, group_size=32),
        "w4a8": w4a8.quantize(weight, smooth=torch.ones(256)),
        "fp8": fp8.quantize(weight),
        "w4ax": w4ax.quantize(weight, plan, target="sm_90a"),
        "w4ax_block": w4ax.quantize(weight, plan, target="sm_80", scales="block"),
        "experts": GroupedWeight.stack([w4a16.quantize(weight)] * 2),
        "statistics": statistics,
        "plan": plan,
    }


def load(name: str, path: Path) -> None:
    """Read a packed file, and use what it gives."""
    if name == "experts":
        GroupedWeight.load(w4a16.PackedWeight, path)[0].dequantize()
    elif name == "statistics":
        found = w4ax.ActivationStatistics.load(path)
        assert found.magnitude.shape == found.mean_square.shape == (found.k,)
        found.observe(torch.randn(3, found.k))
        w4ax.plan_blocks(found)
    elif name == "plan":
        found = w4ax.BlockPlan.load(path)
        found.arrange(torch.ones(2, found.k))
    else:
        family = {"fp8": fp8, "w4a8": w4a8, "w4a16": w4a16, "w4ax": w4ax}[name.partition("_")[0]]
        found = family.PackedWeight.load(path)
        repr(found)
        assert bool(found.dequantize().isfinite().all())


def packed_files(tmp_path: Path, seed: int, count: int) -> int:
    made, path, survived = packed(), tmp_path / "w.safetensors", 0
    texts = {}
    for name, weight in made.items():
        weight.save(path)
        with safe_open(path, "pt") as file:
            texts[name] = file.metadata(), {key: file.get_tensor(key) for key in file.keys()}
    for case in range(count):
        random = Random(seed * 1_000_003 + case)
        name = random.choice(sorted(made))
        meta, held = texts[name]
        kind = random.choice(("facts", "facts", "tensors", "tensors", "bytes"))
        if kind == "facts":
            text = mutation.text(mutation.value(json.loads(meta["weight"]), random), random)
            meta = meta | {"weight": text.decode("utf-8", "replace")}
        try:
            data = save(mutation.tensors(held, random) if kind == "tensors" else held, meta)
        except (SafetensorError, ValueError):
            continue
        head = 8 + int.from_bytes(data[:8], "little")
        path.write_bytes(mutation.data(data[:head], random) + data[head:] if kind == "bytes" else data)
        try:
            survived += mutation.survives(lambda n=name: load(n, path))
        except BaseException as error:
            error.add_note(f"case {case} of seed {seed}, {name}, {kind}")
            raise
    return survived


def test_damaged_packed_files_are_refused_with_errors_of_ours(tmp_path, seed):
    assert packed_files(tmp_path, 6 * seed, 200) > 0  # most is refused


@pytest.mark.slow
@pytest.mark.parametrize("part", range(1, 5))
def test_thousands_of_damaged_packed_files(tmp_path, seed, part):
    assert packed_files(tmp_path, 6 * seed + part, 800) > 5


READERS = {
    "awq": (w4a16.read_awq, "awq"),
    "gptq": (w4a16.read_gptq, "gptq_sym"),
    "pack": (w4a16.read_compressed_tensors, "pack_asym"),
    "w4a8": (w4a8.read_compressed_tensors, "int"),
    "fp8": (fp8.read_compressed_tensors, "int"),
}


@pytest.mark.parametrize("name", READERS)
def test_importers_take_damaged_tensors(name, seed):
    reader, convention = READERS[name]
    good = stored(convention)[0]
    random = Random(seed)
    for _ in range(60):
        held = mutation.tensors(good, random)
        if len(held) == 1 or set(held) - set(good):
            continue  # no argument of that name
        missing = {leaf: None for leaf in good if leaf not in held}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mutation.survives(lambda h=held | missing: reader(**h))
