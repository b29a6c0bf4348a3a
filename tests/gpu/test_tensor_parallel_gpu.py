"""A Llama and a Qwen3-MoE on two GPUs by NCCL, steps captured, beside one GPU."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices of one host"),
]
WORKER = Path(__file__).parent / "tensor_parallel_worker.py"
SIZES = dict(
    hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=64, vocab_size=512, initializer_range=0.1, eos_token_id=None, bos_token_id=None,
)  # fmt: skip
FAST = {"options": {"clip_steps": 1}}
JOBS = {  # name -> (model, options of load, distance of logits from one GPU's that other sums and scales explain)
    "w4a8": ("llama", {"kv": "float16", "quantize": "w4a8-g64"}, 0.1),
    "w4a16": ("llama", {"kv": "int8", "quantize": "w4a16-g64", **FAST}, 2**-6),
    "experts": ("qwen3_moe", {"kv": "float16", "quantize": "w4a16-g64", **FAST}, 2**-5),
    "16 bits": ("llama", {"kv": "float16"}, 2**-6),
    "saved": ("packed", {}, 2**-6),
}
SECONDS = 200


def started(world: int, jobs: Path, out: Path) -> list[dict]:
    """What each rank's worker saves; one that hangs is ended with the others."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running = []
    for rank in range(world):
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        env = {**os.environ, **({name: str(value) for name, value in ranks.items()} if world > 1 else {})}
        log = (out / f"rank{rank}.txt").open("w")
        running.append(subprocess.Popen([sys.executable, WORKER, jobs, out], env=env, stdout=log, stderr=log))
    try:
        for process in running:
            process.wait(SECONDS)
    finally:
        for process in running:
            process.kill()
    said = [(out / f"rank{rank}.txt").read_text()[-3000:] for rank in range(world)]
    assert not any(process.returncode for process in running), "\n".join(said)
    return [torch.load(out / f"rank{rank}.pt") for rank in range(world)]


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> tuple[dict, list[dict]]:
    """(of one GPU, of each of two ranks): name of a job -> what the worker saved of it."""
    from terrazzo.nn.loading import load

    folder = tmp_path_factory.mktemp("ranks")
    sparse = dict(moe_intermediate_size=256, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True)
    configs = {
        "llama": transformers.LlamaConfig(**SIZES),
        "qwen3_moe": transformers.Qwen3MoeConfig(**SIZES, **sparse, mlp_only_layers=[0]),
    }
    for name, config in configs.items():
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float16).save_pretrained(folder / name)
    load(folder / "llama", device="cpu", quantize="w4a16-g64", kv="float16", **FAST).save_pretrained(folder / "packed")
    jobs = folder / "jobs.json"
    jobs.write_text(json.dumps([(str(folder / model), options) for model, options, _ in JOBS.values()]))
    outs = []
    for world in (1, 2):
        out = folder / str(world)
        out.mkdir()
        outs.append([dict(zip(JOBS, each)) for each in started(world, jobs, out)])
    return outs[0][0], outs[1]


@pytest.mark.parametrize("name", JOBS)
def test_two_gpus_make_the_steps_of_one(found, name):
    one, ranks = found
    limit, exact = JOBS[name][2], one[name]["captured"].float()
    for rank in ranks:
        off = (rank[name]["captured"].float() - exact).norm(dim=-1) / exact.norm(dim=-1)
        assert float(off.max()) < limit, float(off.max())


@pytest.mark.parametrize("name", JOBS)
def test_captured_steps_are_eager_steps_bit_for_bit_on_both_ranks(found, name):
    _, ranks = found
    for rank in ranks:
        assert rank[name]["replays"] == 4
        assert torch.equal(rank[name]["captured"], rank[name]["eager"])
        assert torch.equal(rank[name]["captured"], ranks[0][name]["captured"])


@pytest.mark.parametrize("name", JOBS)
def test_both_ranks_generate_the_same_tokens(found, name):
    _, (first, second) = found
    assert first[name]["tokens"] == second[name]["tokens"]
    assert len({tuple(row) for row in first[name]["tokens"]}) > 1
