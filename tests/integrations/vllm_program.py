r"""Run by an interpreter that has vLLM: greedy tokens and log-probabilities of folders, as JSON on a line of its own.

    echo '{"folders": [...], "prompts": [[1, 2]], "options": {...}, "plugin": true, "seeded": false}' | \
        python vllm_program.py

With `attention` our backend serves a CPU, too; with `alone` each prompt is served before the next one comes; a share of
`aborted` requests ends early; `counted` says how often kernels were compiled and requests preempted meanwhile.

Of the plug-ins that are installed, terrazzo is loaded with `plugin`, and `seeded`, which fills weights by their names
(`install`), always.
"""

from __future__ import annotations

import gc
import json
import os
import random
import subprocess
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


ANSWER = "answers: "


def ask(python: str, asked: dict, environment: dict[str, str]) -> tuple[dict | None, str]:
    """What this program answers, None if it fails, and all that it said; a thousand prompts are longer than an argument
    may be, and processes of an engine may speak after it."""
    command = [python, str(Path(__file__).resolve())]
    done = subprocess.run(
        command, input=json.dumps(asked), capture_output=True, text=True, check=False, env=environment
    )
    return answers_in(done.stdout) if done.returncode == 0 else None, done.stderr + done.stdout


def answers_in(said: str) -> dict | None:
    """What `main` printed, wherever it stands."""
    lines = [line for line in said.splitlines() if line.startswith(ANSWER)]
    return json.loads(lines[-1].removeprefix(ANSWER)) if lines else None


def kernels(model) -> dict[str, str]:
    """Layer -> class that multiplies, and of ours the operator: "TerrazzoLinearKernel w4a16"."""
    found = {}
    for name, layer in model.named_modules():
        if (method := getattr(layer, "quant_method", None)) is not None:
            holder = getattr(layer, "scheme", None) or method
            kernel = getattr(holder, "kernel", None) or getattr(holder, "linear_kernel", None) or holder
            found[name] = " ".join([type(kernel).__name__, *getattr(kernel, "facts", ())[:1]])
    return found


def attention(model) -> dict[str, str]:
    """Layer -> class of its attention, and its cache."""
    found = {name: getattr(layer, "impl", None) for name, layer in model.named_modules()}
    return {name: f"{type(impl).__name__} {impl.kv_cache_dtype}" for name, impl in found.items() if impl is not None}


def step_by_step(llm, prompts: list, how, share: float) -> list:
    """As `generate`, while a share of the requests is aborted: those have no output in the end."""
    rng, core, outs = random.Random(0), llm.llm_engine, {}
    for index, prompt in enumerate(prompts):
        core.add_request(str(index), prompt, how)
    end = {str(index) for index in range(len(prompts)) if rng.random() < share}
    while core.has_unfinished_requests():
        for out in core.step():
            outs[out.request_id] = out
            if out.request_id in end and len(out.outputs[0].token_ids) > 2:
                core.abort_request([out.request_id])
                end.remove(out.request_id)
    return [outs[str(index)] for index in range(len(prompts))]


def counting(counts: dict[str, int], key: str, holder, name: str) -> None:
    """Count the calls of a function of a module or class."""
    function = getattr(holder, name)

    def counted(*arguments, **more):
        counts[key] += 1
        return function(*arguments, **more)

    setattr(holder, name, counted)


def main() -> None:
    asked = json.load(sys.stdin)
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }  # fmt: skip
    os.environ["VLLM_PLUGINS"] = "seeded,terrazzo" if asked.get("plugin") else "seeded"
    from vllm import LLM, SamplingParams

    if asked.get("attention"):
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        register_backend(AttentionBackendEnum.CPU_ATTN, "tests.integrations.vllm_cpu_attention.CpuBackend")
    if asked.get("seeded"):
        asked["options"]["load_format"] = "seeded"
    answers = {}
    for folder in asked["folders"]:
        options = dict(skip_tokenizer_init=True, max_model_len=128, enable_prefix_caching=False) | asked["options"]
        llm = LLM(model=folder, **options)
        how = SamplingParams(max_tokens=asked.get("tokens", 8), temperature=0, detokenize=False, ignore_eos=True,
                             logprobs=20)  # fmt: skip
        prompts = [dict(prompt_token_ids=prompt) for prompt in asked["prompts"]]
        counts = dict(preempted=0, compiled=0)
        if asked.get("counted"):
            from terrazzo.lowering import kernels as compiled
            from vllm.v1.core.sched.scheduler import Scheduler

            counting(counts, "compiled", compiled, "compile_request")
            counting(counts, "preempted", Scheduler, "_preempt_request")
        if "aborted" in asked:
            outs = [out.outputs[0] for out in step_by_step(llm, prompts, how, asked["aborted"])]
        else:
            turns = [[prompt] for prompt in prompts] if asked.get("alone") else [prompts]
            outs = [out.outputs[0] for turn in turns for out in llm.generate(turn, how, use_tqdm=False)]
        said = [[{int(t): p.logprob for t, p in step.items()} for step in out.logprobs] for out in outs]
        used = llm.apply_model(kernels)[0]
        tokens = [list(out.token_ids) for out in outs]
        counts["aborted"] = sum(len(each) < how.max_tokens for each in tokens)
        answers[folder] = dict(tokens=tokens, logprobs=said, kernels=used, attention=llm.apply_model(attention)[0])
        graphs = llm.llm_engine.vllm_config.compilation_config.cudagraph_mode
        answers[folder] |= counts | dict(graphs=getattr(graphs, "name", str(graphs)))
        del llm
        gc.collect()
    print("\n" + ANSWER + json.dumps(answers), flush=True)


if __name__ == "__main__":
    main()
