"""One rank of tests/gpu/test_tensor_parallel_gpu.py: loads its share of each job, and saves what its steps give.

    python tests/gpu/tensor_parallel_worker.py JOBS.json OUT        started as torchrun starts processes

Without the variables of torchrun it is the only process, on the first GPU; it also runs two ranks as threads there.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from terrazzo.nn import TensorParallel, generation, positions_of
from terrazzo.nn.loading import load

sys.path.insert(0, str(Path(__file__).parents[1] / "nn"))

from ranks_in_threads import together

NEW, STEPS = 12, 5
PROMPTS = [torch.randint(0, 512, (length,), generator=torch.Generator().manual_seed(length)) for length in (5, 70, 33)]
TOKENS = [len(PROMPTS), sum(map(len, PROMPTS))]
"""Of a step, and of the prompts."""


class Eager(generation.DecodeStep):
    """A step without a graph."""

    def _capture(self) -> None:
        self._logits = self._run(first=False)


@torch.no_grad()
def steps(model, kind: type, device: str) -> tuple[torch.Tensor, int]:
    """(logits [STEPS, B, vocabulary] behind the prompts' prefill, how many steps were replays of a graph)."""
    cache = model.new_cache(len(PROMPTS), 128)
    sequences = [cache.new() for _ in PROMPTS]
    batch = cache.extend({s: len(p) for s, p in zip(sequences, PROMPTS)})
    model.decoder(torch.cat(PROMPTS).to(device), positions_of(batch), batch)
    step = kind(model, cache.extend(dict.fromkeys(sequences, 1), reserve=8))
    found = []
    for at in range(STEPS):
        step.tokens.copy_(torch.arange(len(PROMPTS), device=device) + at)
        found.append(step().clone())
    return torch.stack(found).cpu(), step.replays


def of_threads(folder: str, options: dict, device: str) -> torch.Tensor:
    """`steps` of two ranks on one device, eager."""

    def run(ranks: TensorParallel) -> torch.Tensor:
        return steps(load(folder, device=device, **options, tensor_parallel=ranks), Eager, device)[0]

    return together(2, run)[0]


def main(jobs: Path, out: Path) -> None:
    ranks = TensorParallel.from_torchrun()
    device, found = "cuda" if torch.cuda.is_available() else "cpu", []
    for folder, options in json.loads(jobs.read_text(encoding="utf-8")):
        model = load(folder, device=device, **options, tensor_parallel=ranks)
        captured, replays = steps(model, generation.DecodeStep, device)
        eager, _ = steps(model, Eager, device)
        tokens = [row.tolist() for row in generation.generate(model, PROMPTS, max_new_tokens=NEW)]
        found.append({"captured": captured, "eager": eager, "replays": replays, "tokens": tokens})
        if ranks is None:
            found[-1]["threads"] = of_threads(folder, options, device)
    torch.save(found, out / f"rank{0 if ranks is None else ranks.rank}.pt")
    if ranks is not None:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
