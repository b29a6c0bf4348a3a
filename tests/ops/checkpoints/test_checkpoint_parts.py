"""What a rank reads of a published layer: the numbers of the whole layer's shard, and no more bytes than it needs."""

from __future__ import annotations

import pytest
import torch
from checkpoint_folders import AWQ, GPTQ, KINDS, LAYER, compressed, stored, write
from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import fp8, mxfp4, nf4, nvfp4, w4a16, w8a16
from terrazzo.ops.checkpoints import Checkpoint, files
from terrazzo.ops.shards import Share
from terrazzo.ops.w4a8 import fp8_importers
from terrazzo.ops.w4a8 import importers as w4a8_importers
from terrazzo.ops.w4a16 import importers as w4a16_importers

N, K = 256, 512
EIGHT_BITS = ("gptq 8", "pack 8", "modelopt 8")
FAMILIES = {
    "terrazzo.ops.w4a16": w4a16_importers.FAMILY,
    "terrazzo.ops.w4a8": w4a8_importers.FAMILY,
    "terrazzo.ops.w4a8.fp8": fp8_importers.FAMILY,
    "terrazzo.ops.nf4": nf4.FAMILY,
}


def small_floats(kind: str) -> tuple[dict[str, torch.Tensor], dict]:
    rng = torch.Generator().manual_seed(0)
    if kind == "mxfp4":
        made = {"weight_packed": torch.randint(0, 256, (N, K // 2), generator=rng, dtype=torch.uint8)}
        made["weight_scale"] = torch.randint(120, 130, (N, K // 32), generator=rng, dtype=torch.uint8)
        return made, compressed(num_bits=4, type="float", group_size=32) | {"format": "mxfp4-pack-quantized"}
    if kind.startswith("nvfp4"):
        packed = torch.randint(0, 256, (N, K // 2), generator=rng, dtype=torch.uint8)
        scales = (torch.rand(N, K // 16, generator=rng) + 0.5).to(torch.float8_e4m3fn)
        if kind == "nvfp4 packed":
            made = {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": torch.tensor([64.0])}
            stated = compressed(num_bits=4, type="float", group_size=16, strategy="tensor_group")
            return made, stated | {"format": "nvfp4-pack-quantized"}
        made = {"weight": packed, "weight_scale": scales, "weight_scale_2": torch.tensor(1 / 64)}
        return made, {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    weight = torch.randn(N, K, generator=rng).to(torch.float8_e4m3fn)
    shape = {"fp8 tensor": (1,), "fp8 rows": (N, 1), "fp8 blocks": (N // 128, K // 128)}[kind]
    name = "weight_scale_inv" if kind == "fp8 blocks" else "weight_scale"
    made = {"weight": weight, name: torch.rand(shape, generator=rng) + 0.5}
    config = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    return made, config | ({"weight_block_size": [128, 128]} if kind == "fp8 blocks" else {})


def eight_bits(kind: str) -> tuple[dict[str, torch.Tensor], dict]:
    rng = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (N, K), generator=rng, dtype=torch.uint8)
    zeros = torch.randint(1, 256, (N, K // 128), generator=rng, dtype=torch.uint8)
    scales = (torch.rand(N, K // 128, generator=rng) + 0.5).half()
    words = lambda t: t.contiguous().view(torch.int32)
    if kind == "gptq 8":
        made = {"qweight": words(codes).T, "qzeros": words((zeros - 1).T), "scales": scales.T}
        return made, {"quant_method": "gptq", "bits": 8, "group_size": 128, "sym": False, "desc_act": False}
    if kind == "pack 8":
        made = {"weight_packed": words(codes), "weight_scale": scales, "weight_shape": torch.tensor([N, K])}
        return made, compressed(num_bits=8)
    made = {"weight": (codes.int() - 128).to(torch.int8), "weight_scale": scales[:, 0]}
    return made, {"quant_method": "modelopt", "quant_algo": "W8A16", "exclude_modules": ["lm_head"]}


def layer(tmp_path, kind: str, bias: bool = True):
    """(folder, family) of one layer."""
    if kind in KINDS:
        convention, config, module = KINDS[kind]
        made, family = stored(convention, n=N, k=K)[0], FAMILIES[module.__name__]
    elif kind in EIGHT_BITS:
        (made, config), family = eight_bits(kind), w8a16.FAMILY
    else:
        made, config = small_floats(kind)
        family = {"mxfp4": mxfp4, "nvfp4": nvfp4}.get(kind.partition(" ")[0], fp8).FAMILY
    if bias:
        made["bias"] = torch.randn(N).half()
    return write(tmp_path / "folder", {f"{LAYER}.{leaf}": t.contiguous() for leaf, t in made.items()}, config), family


@pytest.fixture
def read_bytes(monkeypatch):
    """Bytes of what files have given since the last look."""
    seen = [0]

    def count(self, name, device, get, plain=files.TensorFiles._read):
        found = plain(self, name, device, get)
        seen[0] += found.nbytes
        return found

    monkeypatch.setattr(files.TensorFiles, "_read", count)

    def look() -> int:
        now, seen[0] = seen[0], 0
        return now

    return look


EVERY = [*KINDS, *EIGHT_BITS, "mxfp4", "nvfp4", "nvfp4 packed", "fp8 tensor", "fp8 rows", "fp8 blocks"]


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("kind", EVERY)
def test_a_rank_reads_its_own_bytes_and_gets_the_shard_of_the_whole(tmp_path, read_bytes, kind, dim):
    folder, family = layer(tmp_path, kind)
    checkpoint = Checkpoint(folder)
    whole = family.read(checkpoint, LAYER, torch.device("cpu"))
    everything = read_bytes()
    for rank in range(2):
        share = Share(rank, 2, dim)
        made = family.read(checkpoint, LAYER, torch.device("cpu"), share)
        small = 8 * K + 8 * N + 64  # the order of channels, biases and scales of rows
        most = everything if kind == "bitsandbytes" else everything // 2  # codes of all rows are one row
        assert read_bytes() <= most + small
        wanted = share.of(whole)
        assert (made.n, made.k) == (wanted.n, wanted.k) and made.group_size == wanted.group_size
        assert (made.bias is None) == (wanted.bias is None)
        if family.operator == "w4a8" and dim == 1:  # a row's scale is fitted to what a rank has of it
            off = (made.dequantize() - wanted.dequantize()).norm() / wanted.dequantize().norm()
            assert float(off) < 0.02
        else:
            assert torch.equal(made.dequantize(), wanted.dequantize())


@pytest.mark.parametrize("kind", ["awq", "gptq", "pack_asym", "fp8 blocks"])
def test_cuts_inside_of_words_or_blocks_are_read_whole_and_made_all_the_same(tmp_path, kind):
    folder, family = layer(tmp_path, kind)
    checkpoint = Checkpoint(folder)
    whole = family.read(checkpoint, LAYER, torch.device("cpu"))
    share = Share(63, 64)  # four rows of a word of eight, or of a block of 128
    made = family.read(checkpoint, LAYER, torch.device("cpu"), share)
    assert made.n == 4 and torch.equal(made.dequantize(), share.of(whole).dequantize())


def test_a_share_of_a_layer_without_its_scales_is_refused_by_their_name(tmp_path):
    made = {leaf: t for leaf, t in stored("pack", n=N, k=K)[0].items() if leaf != "weight_scale"}
    folder = write(tmp_path, {f"{LAYER}.{leaf}": t for leaf, t in made.items()}, compressed())
    with pytest.raises(ArgumentError, match=f"needs the tensor '{LAYER}.weight_scale'"):
        w4a16_importers.FAMILY.read(Checkpoint(folder), LAYER, torch.device("cpu"), Share(1, 2))


def test_one_group_stays_one_group_of_fewer_channels(tmp_path):
    made = stored("awq", n=N, k=128, group=128)[0]
    for stated in (128, -1):
        folder = write(tmp_path / str(stated), {f"{LAYER}.{leaf}": t for leaf, t in made.items()},
                       AWQ | {"group_size": stated})  # fmt: skip
        share = Share(1, 2, 1)
        got = w4a16_importers.FAMILY.read(Checkpoint(folder), LAYER, torch.device("cpu"), share)
        assert got.k == got.group_size == 64
        assert torch.equal(got.dequantize(), w4a16.read_layer(folder).dequantize()[:, 64:])


def act_order(tmp_path):
    made = stored("gptq", n=N, k=K)[0]
    made["g_idx"] = made["g_idx"][torch.randperm(K, generator=torch.Generator().manual_seed(0))]
    held = {f"{LAYER}.{leaf}": t for leaf, t in made.items()}
    return write(tmp_path / "order", held, GPTQ | {"desc_act": True})


def test_act_order_is_read_along_n_and_refused_along_k(tmp_path):
    checkpoint, family = Checkpoint(act_order(tmp_path)), w4a16_importers.FAMILY
    whole = family.read(checkpoint, LAYER, torch.device("cpu"))
    made = family.read(checkpoint, LAYER, torch.device("cpu"), Share(1, 2))
    assert torch.equal(made.dequantize(), whole.dequantize()[N // 2 :])
    with pytest.raises(ArgumentError, match="perm"):
        family.read(checkpoint, LAYER, torch.device("cpu"), Share(1, 2, 1))


@pytest.mark.parametrize(("world", "dim", "said"), [(3, 0, "divide the 256 features"), (8, 1, "groups of 128")])
def test_worlds_that_cut_features_or_groups_are_refused(tmp_path, world, dim, said):
    for kind in ("awq", "gptq", "pack", "fp8 blocks"):
        folder, family = layer(tmp_path / kind, kind)
        with pytest.raises(ArgumentError) as caught:
            family.read(Checkpoint(folder), LAYER, torch.device("cpu"), Share(0, world, dim))
        assert caught.value.argument == "world" and said in caught.value.constraint
