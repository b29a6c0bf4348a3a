"""What a rank reads of a published INT8, NVFP4 or MXFP4 layer: the shard of the whole, from slices of its tensors."""

from __future__ import annotations

import pytest
import torch
from terrazzo.ops import mxfp4, nvfp4, w8a16
from terrazzo.ops.checkpoints import parts
from terrazzo.ops.checkpoints.reader import Checkpoint
from terrazzo.ops.shards import Share

from tests.ops.checkpoints.checkpoint_folders import GPTQ, LAYER, compressed, write

N, K, G = 64, 256, 64
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}


def words(rows: int, columns: int, rng: torch.Generator) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, (rows, columns), generator=rng).to(torch.int32)


def codes(rng: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 256, (N, K // 2), generator=rng, dtype=torch.uint8)


def scales(group: int, rng: torch.Generator) -> torch.Tensor:
    return torch.rand(N, K // group, generator=rng) + 0.5


KINDS = {  # what a layer's tensors are, its config, the family that reads it
    "gptq": (
        lambda rng: {
            "qweight": words(K // 4, N, rng), "qzeros": torch.full((K // G, N // 4), 0x7F7F7F7F, dtype=torch.int32),
            "scales": scales(G, rng).T.half().contiguous(),
        },
        GPTQ | {"bits": 8, "group_size": G, "sym": True}, w8a16,
    ),
    "pack-quantized, zeros": (
        lambda rng: {
            "weight_packed": words(N, K // 4, rng), "weight_scale": scales(G, rng).half(),
            "weight_zero_point": words(N // 4, K // G, rng), "weight_shape": torch.tensor([N, K]),
        },
        compressed(num_bits=8, group_size=G, symmetric=False), w8a16,
    ),
    "int-quantized": (
        lambda rng: {
            "weight": torch.randint(-128, 128, (N, K), generator=rng).to(torch.int8),
            "weight_scale": scales(K, rng).bfloat16(),
        },
        compressed(num_bits=8, strategy="channel", group_size=None) | {"format": "int-quantized"}, w8a16,
    ),
    "nvfp4 of modelopt": (
        lambda rng: {
            "weight": codes(rng), "weight_scale": scales(16, rng).to(torch.float8_e4m3fn),
            "weight_scale_2": torch.tensor(0.01), "input_scale": torch.tensor(1.0),
        },
        MODELOPT, nvfp4,
    ),
    "nvfp4 of compressed-tensors": (
        lambda rng: {
            "weight_packed": codes(rng), "weight_scale": scales(16, rng).to(torch.float8_e4m3fn),
            "weight_global_scale": torch.tensor([100.0]),
        },
        compressed(num_bits=4, type="float", strategy="tensor_group", group_size=16)
        | {"format": "nvfp4-pack-quantized"},
        nvfp4,
    ),
    "mxfp4": (
        lambda rng: {
            "weight_packed": codes(rng),
            "weight_scale": torch.randint(120, 130, (N, K // 32), generator=rng, dtype=torch.uint8),
        },
        compressed(num_bits=4, type="float", group_size=32) | {"format": "mxfp4-pack-quantized"}, mxfp4,
    ),
}  # fmt: skip


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_reads_slices_that_are_its_shard(tmp_path, kind, dim):
    make, config, family = KINDS[kind]
    tensors = make(torch.Generator().manual_seed(1)) | {"bias": torch.arange(N).half()}
    checkpoint = Checkpoint(write(tmp_path, {f"{LAYER}.{leaf}": t for leaf, t in tensors.items()}, config))
    whole = family.FAMILY.read(checkpoint, LAYER, "cpu")
    assert (whole.n, whole.k) == (N, K)
    for rank in range(2):
        share = Share(rank, 2, dim)
        assert parts.tensors(checkpoint, LAYER, checkpoint.layer(LAYER), share, "cpu") is not None, "read as a whole"
        own, cut = family.FAMILY.read(checkpoint, LAYER, "cpu", share), whole.shard(rank, 2, dim)
        assert torch.equal(own.dequantize("exact"), cut.dequantize("exact")) and type(own) is type(cut)
        assert (own.bias is None) == (cut.bias is None) == (dim == 1 and rank == 1)
