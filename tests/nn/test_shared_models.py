"""Several ranks share a model: tokens of one process, bytes of one share; by threads, and by processes (slow)."""

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

import test_loading_published  # noqa: E402
import tiny_text  # noqa: E402
from ranks_in_threads import together  # noqa: E402
from terrazzo.lowering.errors import ArgumentError  # noqa: E402
from terrazzo.nn import generation  # noqa: E402
from terrazzo.nn.loading import load  # noqa: E402
from terrazzo.ops.checkpoints import files  # noqa: E402

ROOT = Path(__file__).parents[2]
SIZES = dict(
    hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=64, head_dim=64, max_position_embeddings=256, initializer_range=0.2, eos_token_id=None,
    bos_token_id=None,
)  # fmt: skip
FAST = {"quantize": "w4a16-g32", "options": {"clip_steps": 1}}
TOKENS = test_loading_published.TOKENS
PROMPTS = [[5, 9, 2, 33], [7, 1]]


def config(kind: str):
    if kind == "qwen3_moe":
        sparse = dict(moe_intermediate_size=256, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True)
        return transformers.Qwen3MoeConfig(**SIZES, **sparse, mlp_only_layers=[0])
    if kind == "qwen2":  # biases, and a tied head
        return transformers.Qwen2Config(**SIZES, tie_word_embeddings=True)
    return transformers.LlamaConfig(**SIZES)


def folder_of(path, kind: str = "llama"):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config(kind), dtype=torch.float16)
    model.save_pretrained(path)
    return path


def tokens(model, **options) -> list[list[int]]:
    return [row.tolist() for row in generation.generate(model, PROMPTS, max_new_tokens=6, **options)]


@pytest.mark.parametrize(
    ("kind", "world", "options"),
    [
        ("llama", 2, {**FAST, "kv": "int8"}),
        ("llama", 4, {}),  # four ranks, two heads of keys and values
        pytest.param("qwen2", 2, {"lm_head": "w4a16-g32"}, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", 2, FAST, marks=pytest.mark.slow),
    ],
)
def test_ranks_make_the_tokens_of_one_process(tmp_path, kind, world, options):
    folder = folder_of(tmp_path, kind)
    options = {"device": "cpu", "kv": "float16", **options}
    wanted = tokens(load(folder, **options))
    assert len(set(map(tuple, wanted))) == 2
    made = together(world, lambda ranks: tokens(load(folder, **options, tensor_parallel=ranks)))
    assert made == [wanted] * world


@pytest.mark.parametrize("kind", ["llama", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_a_saved_folder_is_shared_as_the_published_one_is(tmp_path, kind):
    options = {"device": "cpu", **FAST, "kv": "float16"}
    whole = load(folder_of(tmp_path / "float", kind), **options)
    whole.save_pretrained(tmp_path / "packed")
    made = together(2, lambda ranks: tokens(load(tmp_path / "packed", device="cpu", tensor_parallel=ranks)))
    assert made == [tokens(whole)] * 2


QUICK = ("awq",)
published = [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow)
             for kind in test_loading_published.KINDS if kind != "gptq_act_order"]  # fmt: skip


@pytest.mark.parametrize("kind", published)
@torch.no_grad()
def test_published_layers_are_shared(tmp_path, kind):
    """Logits up to 16-bit rounding of other sums, or that of activations quantized by what a rank has of a token."""
    test_loading_published.folder(tmp_path, kind)
    logits = lambda ranks: load(tmp_path, device="cpu", kv="float16", tensor_parallel=ranks)(TOKENS).logits.float()
    exact, (first, second) = logits(None), together(2, logits)
    limit = 0.1 if kind.startswith("qserve") or kind in ("int", "pack") else 0.01
    assert torch.equal(first, second) and float((first - exact).norm() / exact.norm()) < limit


class Parts(torch.nn.Module):
    """A product cut along k, each part with what its rank quantizes by itself."""

    def __init__(self, parts) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleList(parts)
        self.in_features = sum(part.in_features for part in parts)

    def forward(self, x, out_dtype=None):
        pieces = x.split([part.in_features for part in self.parts], dim=-1)
        return sum(part(piece.contiguous(), out_dtype).float() for part, piece in zip(self.parts, pieces)).to(x.dtype)


class Summed(torch.nn.Module):
    """The feed-forward layers of all ranks on one input."""

    def __init__(self, parts) -> None:
        super().__init__()
        self.parts, self.gate_up_proj = torch.nn.ModuleList(parts), parts[0].gate_up_proj
        for part in parts:
            part.ranks = None

    def forward(self, x, out_dtype):
        return sum(part(x, out_dtype).float() for part in self.parts).to(out_dtype)


@torch.no_grad()
def test_what_ranks_of_w4a8_change_is_that_each_quantizes_its_own_columns(tmp_path):
    """One process, whose products are cut as ranks cut them, has the logits of ranks; uncut, it is far off."""
    options = {"device": "cpu", "kv": "float16", "quantize": "w4a8-g64"}
    folder = folder_of(tmp_path)
    models = together(2, lambda ranks: load(folder, **options, tensor_parallel=ranks))
    wanted, one = together(2, lambda ranks: models[ranks.rank](TOKENS).logits.float())[0], load(folder, **options)
    off = lambda: float((one(TOKENS).logits.float() - wanted).norm() / wanted.norm())
    whole = off()
    for layer, *shares in zip(one.decoder.layers, *(model.decoder.layers for model in models)):
        layer.self_attn.o_proj = Parts([share.self_attn.o_proj for share in shares])
        layer.mlp = Summed([share.mlp for share in shares])
    assert off() < 2**-9 and whole > 20 * off()


def test_act_order_is_refused_with_the_layer_that_has_it(tmp_path):
    test_loading_published.folder(tmp_path, "gptq_act_order")
    with pytest.raises(ArgumentError, match=r"self_attn\.o_proj cannot be shared by 2 ranks: perm") as caught:
        load(tmp_path, device="cpu", tensor_parallel=(0, 2))
    assert caught.value.argument == "tensor_parallel" and "act-order" in caught.value.remedy


def test_sampled_tokens_are_one_ranks_without_a_seed(tmp_path):
    folder, sampling = folder_of(tmp_path), generation.Sampling(temperature=1.0, top_k=20)
    run = lambda ranks: tokens(load(folder, device="cpu", tensor_parallel=ranks), sampling=sampling)
    first, second = together(2, run)
    assert first == second


@pytest.fixture
def read_bytes(monkeypatch):
    seen: dict[str, int] = {}

    def count(self, name, device, get, plain=files.TensorFiles._read):
        found = plain(self, name, device, get)
        seen[name] = seen.get(name, 0) + found.nbytes
        return found

    monkeypatch.setattr(files.TensorFiles, "_read", count)
    return seen


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("kind", ["llama", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_a_rank_reads_its_share_of_the_bytes(tmp_path, read_bytes, kind, saved):
    folder = folder_of(tmp_path / "float", kind)
    options = {"device": "cpu", "kv": "float16", **FAST}
    if saved:
        load(folder, **options).save_pretrained(tmp_path / "packed")
        folder, options = tmp_path / "packed", {"device": "cpu"}
    read_bytes.clear()
    single = load(folder, **options)
    everything = dict(read_bytes)
    read_bytes.clear()
    model = load(folder, **options, tensor_parallel=(1, 2))
    whole = ("embed_tokens", "norm", "router", "mlp.gate.weight", "weight_format")
    for name, nbytes in read_bytes.items():
        shared = not any(part in name for part in whole)
        assert nbytes == (everything[name] // 2 if shared else everything[name]), name
    assert read_bytes.keys() <= everything.keys()
    one, half = (sum(pages.numel() for pages in it.new_cache(1, 256).pages) for it in (single, model))
    assert 2 * half == one and model.model.shape.kv_heads == 1


@pytest.mark.parametrize(
    ("world", "options", "said"),
    [
        (3, {}, "heads, 4"),
        (8, {}, "heads, 4"),
        (4, {"quantize": "w4a16-g128", "options": {"clip_steps": 1}}, ""),
    ],
)
def test_worlds_that_do_not_fit_a_model_are_refused_by_name(tmp_path, world, options, said):
    folder = folder_of(tmp_path)
    if not said:  # quantized by the rank itself: its columns are their own groups
        assert load(folder, device="cpu", **options, tensor_parallel=(0, world)).ranks.world == 4
        load(folder, device="cpu", **options).save_pretrained(tmp_path / "packed")
        folder, said = tmp_path / "packed", "between groups of 128"
    with pytest.raises(ArgumentError) as caught:
        load(folder, device="cpu", tensor_parallel=(0, world))
    assert caught.value.argument == "tensor_parallel" and said in caught.value.constraint and caught.value.remedy


@pytest.mark.parametrize("given", [(2, 2), (0, 0), "two", (1,), (0, 1.5)])
def test_what_is_no_rank_is_refused(tmp_path, given):
    with pytest.raises(ArgumentError):
        load(folder_of(tmp_path), device="cpu", tensor_parallel=given)


def test_a_share_is_not_saved_and_runs_only_with_a_process_group(tmp_path):
    model = load(folder_of(tmp_path), device="cpu", tensor_parallel=(0, 2))
    with pytest.raises(ArgumentError, match="tensor_parallel"):
        model.save_pretrained(tmp_path / "share")
    with pytest.raises(ArgumentError, match="process group"):
        tokens(model)


RUN = """
import json, sys
import torch
from terrazzo.nn import TensorParallel, generation, loading

torch.set_num_threads(1)
ranks = TensorParallel.from_torchrun()
found = []
for folder, options in json.loads(sys.argv[1]):
    model = loading.load(folder, device="cpu", **options, tensor_parallel=ranks)
    found.append([row.tolist() for row in generation.generate(model, json.loads(sys.argv[2]), max_new_tokens=6)])
torch.distributed.destroy_process_group()
print(json.dumps(found))
"""


def processes(world: int, *command: str) -> list[str]:
    """What each of some processes prints that find each other as torchrun's do."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank in range(world):
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        env = {**os.environ, **{name: str(value) for name, value in ranks.items()}}
        started.append(subprocess.Popen([sys.executable, *command], env=env, stdout=-1, stderr=-1, text=True))
    ended = [process.communicate(timeout=600) for process in started]
    assert not any(process.returncode for process in started), ended[0][1][-3000:]
    return [out for out, _ in ended]


@pytest.mark.slow
def test_four_processes_make_the_tokens_of_one(tmp_path):
    """gloo and the reference path; a dense Llama and Qwen3-MoE, published in 16 bits, quantized on load, and saved."""
    jobs = []
    for kind in ("llama", "qwen3_moe"):
        folder = str(folder_of(tmp_path / kind, kind))
        options = {**FAST, "kv": "float16"}
        load(folder, device="cpu", **options).save_pretrained(tmp_path / f"{kind}-packed")
        jobs += [(folder, options), (str(tmp_path / f"{kind}-packed"), {})]
    jobs.append((str(tmp_path / "llama"), {"kv": "int8"}))
    wanted = [tokens(load(folder, device="cpu", **options)) for folder, options in jobs]
    found = processes(4, "-c", RUN, json.dumps(jobs), json.dumps(PROMPTS))
    assert [json.loads(out) for out in found] == [wanted] * 4


@pytest.mark.slow
def test_the_example_runs_under_torchrun(tmp_path):
    folder = tiny_text.write_folder(tmp_path / "tiny")
    example = [str(ROOT / "examples" / "generate.py"), str(folder), "Why is the sky blue?"]
    alone = subprocess.run([sys.executable, *example], capture_output=True, text=True, timeout=300, check=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *example]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == alone.stdout and alone.stdout.strip()
