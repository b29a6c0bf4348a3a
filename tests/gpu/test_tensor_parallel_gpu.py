"""A Llama and a Qwen3-MoE on two GPUs by NCCL, steps captured, beside one GPU."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import tensor_parallel_worker as worker  # noqa: E402
from tensor_parallel_worker import together  # noqa: E402
from terrazzo.nn.module import PackedModule  # noqa: E402

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices of one host"),
]
SIZES = dict(
    hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=64, vocab_size=512, initializer_range=0.1, eos_token_id=None, bos_token_id=None,
)  # fmt: skip
FAST = {"options": {"clip_steps": 1}}
SPARSE = dict(moe_intermediate_size=256, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True)


@cache
def folder_of(model: str) -> Path:
    """A folder of random weights, written once in a process."""
    folder = Path(tempfile.mkdtemp()) / model
    if model == "packed":
        from terrazzo.nn.loading import load

        whole = load(folder_of("llama"), device="cpu", quantize="w4a16-g64", kv="float16", **FAST)
        whole.save_pretrained(folder)
        return folder
    config = transformers.LlamaConfig(**SIZES)
    if model == "qwen3_moe":
        config = transformers.Qwen3MoeConfig(**SIZES, **SPARSE, mlp_only_layers=[0])
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float16).save_pretrained(folder)
    return folder


@dataclass(frozen=True, eq=False)
class Job:
    """A model, and options of `load`."""

    model: str
    options: dict

    def requests(self) -> list:
        """The kernels of a whole model and of a rank's share."""
        from terrazzo.lowering.targets import Target
        from terrazzo.nn.loading import load
        from terrazzo.nn.preparing import kernel_requests

        found, target = [], Target.detect()
        for ranks in (None, (0, 2)):
            model = load(folder_of(self.model), device="cpu", **self.options, tensor_parallel=ranks)
            if any(isinstance(module, PackedModule) for module in model.modules()):
                found += kernel_requests(model, worker.TOKENS, target=target)
        return found


JOBS = {
    "w4a8": Job("llama", {"kv": "float16", "quantize": "w4a8-g64"}),
    "w4a16": Job("llama", {"kv": "int8", "quantize": "w4a16-g64", **FAST}),
    "experts": Job("qwen3_moe", {"kv": "float16", "quantize": "w4a16-g64", **FAST}),
    "16 bits": Job("llama", {"kv": "float16"}),
    "saved": Job("packed", {}),
}
LIMITS = {"w4a16": 2**-6, "experts": 2**-5, "16 bits": 2**-6, "saved": 2**-6}
"""Distance of ranks' logits from one GPU's that other sums explain; a rank of W4A8 has other scales, see
`reference_limit`."""
SECONDS = 200


def begun(world: int, jobs: Path, out: Path) -> list[subprocess.Popen]:
    """A worker for each rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running = []
    for rank in range(world):
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        env = {**os.environ, **({name: str(value) for name, value in ranks.items()} if world > 1 else {})}
        log = (out / f"rank{rank}.txt").open("w")
        command = [sys.executable, worker.__file__, jobs, out]
        running.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
    return running


@pytest.fixture(scope="module")
def found(request, compiled, tmp_path_factory) -> tuple[dict, list[dict]]:
    """(of one GPU, of each of two ranks): name of a selected job -> what the worker saved of it."""
    folder = tmp_path_factory.mktemp("ranks")
    here = [item for item in request.session.items if item.module is request.module]
    names = list(dict.fromkeys(item.callspec.params["name"] for item in here))
    jobs = folder / "jobs.json"
    jobs.write_text(json.dumps([(str(folder_of(JOBS[name].model)), JOBS[name].options) for name in names]))
    running, outs = [], []
    for world in (1, 2):
        outs.append(folder / str(world))
        outs[-1].mkdir()
        running += begun(world, jobs, outs[-1])
    try:
        for process in running:
            process.wait(SECONDS)
    finally:
        for process in running:
            process.kill()
    said = [log.read_text()[-3000:] for out in outs for log in sorted(out.glob("*.txt"))]
    assert not any(process.returncode for process in running), "\n".join(said)
    saved = [[dict(zip(names, torch.load(out / f"rank{rank}.pt"))) for rank in range(2)] for out in outs[1:]]
    return dict(zip(names, torch.load(outs[0] / "rank0.pt"))), saved[0]


def distance(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest of the rows' relative distances."""
    off = (found.float() - exact.float()).norm(dim=-1) / exact.float().norm(dim=-1)
    return float(off.max())


def reference_limit(job: Job) -> float:
    """How far the references of two ranks are from one's, and a quarter more for roundings that fall otherwise.

    A rank that quantizes its own columns has scales of its own for weights and for activations.
    """
    from terrazzo.nn import generation
    from terrazzo.nn.loading import load

    def steps(ranks):
        model = load(folder_of(job.model), device="cpu", **job.options, tensor_parallel=ranks)
        return worker.steps(model, generation.DecodeStep, "cpu")[0]

    return 1.25 * distance(together(2, steps)[0], steps(None))


jobs = pytest.mark.parametrize(("name", "cases"), [(name, [job]) for name, job in JOBS.items()], ids=JOBS)


@jobs
def test_two_gpus_make_the_steps_of_two_ranks_on_one_bit_for_bit(found, name, cases):
    one, ranks = found
    for rank in ranks:
        assert torch.equal(rank[name]["captured"], one[name]["threads"])


@jobs
def test_two_gpus_make_the_steps_of_one(found, name, cases):
    one, ranks = found
    limit = LIMITS.get(name) or reference_limit(cases[0])
    for rank in ranks:
        off = distance(rank[name]["captured"], one[name]["captured"])
        assert off < limit, (off, limit)


@jobs
def test_captured_steps_are_eager_steps_bit_for_bit_on_both_ranks(found, name, cases):
    _, ranks = found
    for rank in ranks:
        assert rank[name]["replays"] == 4
        assert torch.equal(rank[name]["captured"], rank[name]["eager"])
        assert torch.equal(rank[name]["captured"], ranks[0][name]["captured"])


@jobs
def test_both_ranks_generate_the_same_tokens(found, name, cases):
    _, (first, second) = found
    assert first[name]["tokens"] == second[name]["tokens"]
    assert len({tuple(row) for row in first[name]["tokens"]}) > 1
