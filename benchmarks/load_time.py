"""Seconds from a packed folder of Llama-3-8B's shapes on a warm disk to a model on the GPU.

    python -m benchmarks.load_time                      writes results/load_time_<gpu>.json
    python -m benchmarks.load_time --formats w4a8-g64 --layers 4 --out short.json

For each format a folder with random packed weights is written by `save_pretrained` (5.6 GB for 32 layers), and read
`--times` times by a new process each: `seconds` is `terrazzo.load` until the GPU is idle, `import_seconds` all that
comes before it (Python, torch, transformers, the CUDA context). `peak_gb` is the most GPU memory that torch held.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import decode_step, report

FORMATS = ("w4a16-g128", "w4a8-g64")
KV = ("int8", "int8")


def make(folder: Path, weights: str, layers: int) -> int:
    """Write a folder with random weights; its bytes."""
    from terrazzo.nn import Dense
    from terrazzo.nn.architectures import shape_of
    from terrazzo.nn.causal import skeleton
    from terrazzo.nn.transformers_model import Body
    from transformers import LlamaConfig

    d = decode_step
    config = LlamaConfig(
        vocab_size=d.VOCABULARY, hidden_size=d.HIDDEN, intermediate_size=d.INTERMEDIATE, num_hidden_layers=layers,
        num_attention_heads=d.HEADS, num_key_value_heads=d.KV_HEADS, head_dim=d.HEAD_DIM, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0}, dtype="float16",
    )  # fmt: skip
    model, made = skeleton(config), decode_step.Model(weights, layers)
    model.lm_head = Dense(made.head)
    model.model = Body(made.decoder, shape_of(config), KV, 8192)
    model.save_pretrained(folder)
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def read(folder: Path, device: str) -> dict[str, float]:
    """Load the folder in this process."""
    import terrazzo
    import torch
    from transformers import LlamaForCausalLM  # noqa: F401  # which load would import

    torch.zeros(1, device=device)
    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    wait()
    start = time.perf_counter()
    model = terrazzo.load(folder, device=device)
    wait()
    seconds = time.perf_counter() - start
    held = sum(t.numel() * t.element_size() for t in model.state_dict().values())
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    return {"seconds": seconds, "peak_gb": peak / 1e9, "model_gb": held / 1e9}


def row(weights: str, layers: int, times: int, device: str) -> dict[str, Any]:
    """Write, and read by new processes."""
    found: dict[str, Any] = {"op": "load_time", "weights": weights, "layers": layers, "seconds": None}
    with tempfile.TemporaryDirectory() as scratch:
        folder, begun = Path(scratch) / "model", time.perf_counter()
        size = make(folder, weights, layers)
        found |= {"bytes": size, "write_seconds": round(time.perf_counter() - begun, 2)}
        runs, outside = [], []
        for _ in range(times):
            begun = time.perf_counter()
            command = [sys.executable, "-m", "benchmarks.load_time", "--read", str(folder), "--device", device]
            said = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
            if said.returncode:
                return found | {"failure": said.stderr.strip()[-300:]}
            runs.append(json.loads(said.stdout.splitlines()[-1]))
            outside.append(time.perf_counter() - begun - runs[-1]["seconds"])
    took = [run["seconds"] for run in runs]
    return found | {
        "seconds": round(statistics.median(took), 3), "runs": [round(t, 3) for t in took],
        "import_seconds": round(statistics.median(outside), 2), "gb_s": round(size / 1e9 / statistics.median(took), 2),
        "peak_gb": round(runs[0]["peak_gb"], 3), "model_gb": round(runs[0]["model_gb"], 3),
    }  # fmt: skip


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load_time", description=__doc__.splitlines()[0])
    parser.add_argument("--formats", default=",".join(FORMATS), help="comma-separated, as w4a16-g128")
    parser.add_argument("--layers", type=int, default=decode_step.LAYERS)
    parser.add_argument("--times", type=int, default=3, help="processes that read each folder")
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="of the sources, where git cannot tell")
    return parser.parse_args(argv)


def run(o: argparse.Namespace) -> int:
    if o.read is not None:
        print(json.dumps(read(o.read, o.device)))
        return 0
    from terrazzo.autotune import gemm_bench
    from terrazzo.ops.attention.cache import launch

    start, result = time.perf_counter(), gemm_bench.header(launch.detect(), o.commit) | {"rows": []}
    out = o.out or report.RESULTS / report.file_name("load_time", result["gpu"])
    for weights in o.formats.split(","):
        found = row(weights, o.layers, o.times, o.device)
        result["rows"].append(found)
        shown = {name: value for name, value in found.items() if name not in ("op", "layers")}
        print(", ".join(f"{name} {value}" for name, value in shown.items()), flush=True)
        report.write(result, out, start)
    return report.conclude(result)


def main(argv: list[str] | None = None) -> int:
    return report.guarded("benchmarks.load_time", lambda: run(arguments(argv)))


if __name__ == "__main__":
    sys.exit(main())
