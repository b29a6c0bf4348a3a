"""A model with the outlier channels of large ones, which computes what it did: gains against the weights after them.

    python -m benchmarks.outliers MODEL OUT

Small models have no outliers, so what SmoothQuant, FMPQ's plans and rotations are for cannot show. Some channels of
each RMSNorm's gain are multiplied by a factor, and the columns that read them divided by it; likewise rows of
`up_proj` against columns of `down_proj`, and rows of `v_proj` against columns of `o_proj`. In exact arithmetic the
model is the same. One channel in 128 gets a factor from 20 to 100, even on a logarithmic scale. LLM.int8() (arXiv
2208.07339) sees up to 20 times the other features, SmoothQuant (arXiv 2211.10438) about 100 times. They stand in the
same few channels of every layer, as here. Weights are float32 while they are scaled, and rounded to f16 once.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

SHARE, LEAST, MOST = 128, 20.0, 100.0


def factors(channels: int, generator: torch.Generator) -> torch.Tensor:
    """float32 [channels]: 1, and from LEAST to MOST for one channel in SHARE, at least one."""
    count = max(1, channels // SHARE)
    made = torch.ones(channels)
    where = torch.randperm(channels, generator=generator)[:count]
    made[where] = LEAST * (MOST / LEAST) ** torch.rand(count, generator=generator)
    return made


def add_outliers(model: Any, seed: int = 0) -> None:
    """Rescale the channels of a float32 LlamaForCausalLM in place; every hidden state keeps its outliers' places."""
    generator = torch.Generator().manual_seed(seed)
    c = model.config
    hidden, ffn = factors(c.hidden_size, generator), factors(c.intermediate_size, generator)
    values = factors(c.num_key_value_heads * c.head_dim, generator)
    heads = values.view(c.num_key_value_heads, -1).repeat_interleave(c.num_attention_heads // c.num_key_value_heads, 0)
    with torch.no_grad():
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            layer.input_layernorm.weight *= hidden
            layer.post_attention_layernorm.weight *= hidden
            for part in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
                part.weight /= hidden
            attention.v_proj.weight *= values[:, None]
            attention.o_proj.weight /= heads.flatten()
            mlp.up_proj.weight *= ffn[:, None]
            mlp.down_proj.weight /= ffn


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.outliers", description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="folder of benchmarks.train_small")
    parser.add_argument("out", type=Path, help="folder to make")
    parser.add_argument("--seed", type=int, default=0)
    o = parser.parse_args(argv)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(o.model, dtype=torch.float32, trust_remote_code=False)
    add_outliers(model, o.seed)
    shutil.copytree(o.model, o.out, dirs_exist_ok=True)
    model.half().save_pretrained(o.out)
    facts = json.loads((o.out / "training.json").read_text(encoding="utf-8"))
    facts["outliers"] = {"seed": o.seed, "one channel in": SHARE, "factors": [LEAST, MOST]}
    (o.out / "training.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
