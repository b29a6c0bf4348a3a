"""How long `terrazzo compile` takes for a whole checkpoint, cold: `python -m benchmarks.compile_model --workers 16`.

The checkpoint is made of a model's sizes alone: an AWQ folder whose tensors are holes of a sparse file, so that a
70B model takes no disk. Prints one line: kernels, seconds of wall and CPU, processes.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from terrazzo.schedules.models import ARCHITECTURES, Architecture

LAYERS = {"llama-3-8b": 32, "llama-3.2-1b": 16, "llama-3-70b": 80, "qwen2.5-7b": 28, "qwen3-30b-a3b": 48}
GROUP = 128


def write_folder(folder: Path, model: str, layers: int | None = None) -> Path:
    """A Hugging Face folder of AWQ layers in the sizes of a model: config.json, and a sparse model.safetensors."""
    folder.mkdir(parents=True)
    architecture = ARCHITECTURES[model]
    count = layers or LAYERS.get(model, 2)
    (folder / "config.json").write_text(json.dumps(config(architecture, count), indent=1), encoding="utf-8")
    header, at = {}, 0
    for layer in range(count):
        for name, dtype, shape in tensors(architecture, f"model.layers.{layer}"):
            size = {"I32": 4, "F16": 2}[dtype] * shape[0] * shape[1]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
            at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
    return folder


def config(architecture: Architecture, layers: int) -> dict[str, object]:
    """config.json of such a model."""
    found = {
        "model_type": "llama", "hidden_size": architecture.hidden, "num_hidden_layers": layers,
        "intermediate_size": architecture.ffn or architecture.expert_ffn, "num_attention_heads": architecture.heads,
        "num_key_value_heads": architecture.kv_heads, "head_dim": architecture.head_dim, "torch_dtype": "float16",
    }  # fmt: skip
    if architecture.experts:
        found |= {"num_experts": architecture.experts, "num_experts_per_tok": architecture.top_k}
        found |= {"moe_intermediate_size": architecture.expert_ffn}
    awq = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    return found | {"quantization_config": awq}


def tensors(architecture: Architecture, prefix: str) -> list[tuple[str, str, list[int]]]:
    """Name, dtype and shape of the AWQ tensors of one decoder layer."""
    found = []
    for layer in architecture.projections():
        parent = "self_attn" if layer.name[0] in "qkvo" else "mlp"
        experts = [f"experts.{at}.{layer.name.removeprefix('experts.')}" for at in range(layer.count)]
        for name in experts if layer.count > 1 else [layer.name]:
            full, groups = f"{prefix}.{parent}.{name}", layer.k // GROUP
            found += [(f"{full}.qweight", "I32", [layer.k, layer.n // 8])]
            found += [(f"{full}.qzeros", "I32", [groups, layer.n // 8]), (f"{full}.scales", "F16", [groups, layer.n])]
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3-8b", choices=ARCHITECTURES)
    parser.add_argument("--target", default="sm_90a")
    parser.add_argument("--workers", type=int, help="processes; default: one for each CPU")
    parser.add_argument("--kv", default="int4/int4")
    parser.add_argument("--max-tokens", type=int)
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_folder(Path(scratch, "model"), given.model)
        command = [sys.executable, "-m", "terrazzo", "compile", str(folder), "--target", given.target, "--json"]
        command += ["--kv", given.kv, "-o", str(Path(scratch, "bundle"))]
        command += ["--workers", str(given.workers)] if given.workers else []
        command += ["--max-tokens", str(given.max_tokens)] if given.max_tokens else []
        start = time.perf_counter()
        done = subprocess.run(command, env=environment(scratch), stdout=subprocess.PIPE, encoding="utf-8", check=False)
        wall = time.perf_counter() - start
        if done.returncode:
            return done.returncode
        said = json.loads(done.stdout)
        size = sum(path.stat().st_size for path in Path(scratch, "bundle").rglob("*") if path.is_file())
    spilling = sum(row["spill_stores"] + row["spill_loads"] > 0 for row in said["kernels"])
    print(
        f"{given.model} AWQ, {given.target}, KV {given.kv}: {said['total']} kernels in {wall:.1f} s of wall "
        f"({said['seconds']:.1f} s of it compiling), {said['cpu_seconds']:.0f} s of CPU, {said['workers']} processes, "
        f"bundle {size / 2**20:.0f} MiB, {spilling} kernels spill, {len(said['skipped'])} layers left out"
    )
    return 0


def environment(scratch: str) -> dict[str, str]:
    """This process's, with a cache that is empty."""
    return os.environ | {"TERRAZZO_CACHE_DIR": str(Path(scratch, "cache"))}


if __name__ == "__main__":
    sys.exit(main())
