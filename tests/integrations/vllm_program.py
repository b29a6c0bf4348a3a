"""Run by an interpreter that has vLLM: greedy tokens and log-probabilities of folders, as JSON on the last line.

    python vllm_program.py '{"folders": [...], "prompts": [[1, 2]], "options": {...}, "plugin": true, "seeded": false}'

Of the plug-ins that are installed, terrazzo is loaded with `plugin`, and `seeded`, which fills weights by their names
(`install`), always.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path


def install(folder: Path, root: Path) -> str:
    """A PYTHONPATH on which the checkout at `root` counts as installed, with its entry point."""
    info = folder / "terrazzo_checkout-0.1.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: terrazzo-checkout\nVersion: 0.1\n")
    points = {"terrazzo": "terrazzo.integrations.vllm:register", "seeded": "benchmarks.engine_model:register_loader"}
    lines = ["[vllm.general_plugins]", *(f"{name} = {value}" for name, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return os.pathsep.join([str(folder), str(root), *filter(None, [os.environ.get("PYTHONPATH")])])


def kernels(model) -> dict[str, str]:
    """Layer -> class that multiplies, and of ours the operator: "TerrazzoLinearKernel w4a16"."""
    found = {}
    for name, layer in model.named_modules():
        if (method := getattr(layer, "quant_method", None)) is not None:
            holder = getattr(layer, "scheme", None) or method
            kernel = getattr(holder, "kernel", None) or getattr(holder, "linear_kernel", None) or holder
            found[name] = " ".join([type(kernel).__name__, *getattr(kernel, "facts", ())[:1]])
    return found


def main() -> None:
    asked = json.loads(sys.argv[1])
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }  # fmt: skip
    os.environ["VLLM_PLUGINS"] = "seeded,terrazzo" if asked.get("plugin") else "seeded"
    from vllm import LLM, SamplingParams

    if asked.get("seeded"):
        asked["options"]["load_format"] = "seeded"
    answers = {}
    for folder in asked["folders"]:
        options = dict(skip_tokenizer_init=True, max_model_len=128, enable_prefix_caching=False) | asked["options"]
        llm = LLM(model=folder, **options)
        how = SamplingParams(max_tokens=asked.get("tokens", 8), temperature=0, detokenize=False, ignore_eos=True,
                             logprobs=20)  # fmt: skip
        prompts = [dict(prompt_token_ids=prompt) for prompt in asked["prompts"]]
        outs = [out.outputs[0] for out in llm.generate(prompts, how, use_tqdm=False)]
        said = [[{int(t): p.logprob for t, p in step.items()} for step in out.logprobs] for out in outs]
        used = llm.apply_model(kernels)[0]
        answers[folder] = dict(tokens=[list(out.token_ids) for out in outs], logprobs=said, kernels=used)
        del llm
        gc.collect()
    print("\n" + json.dumps(answers))


if __name__ == "__main__":
    main()
